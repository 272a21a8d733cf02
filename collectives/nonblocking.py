"""Collectives that run while the caller computes: Iallreduce, Ibcast, Iallgather, Ireduce_scatter.

    request = communicator.Iallreduce(MPI.IN_PLACE, bucket)
    ... compute, now and then communicator.poke() ...
    request.Wait()

The collectives of a communicator run one after another, in the order in which they were started: the order that MPI
asks of all ranks, and one transfer at a time has the whole bandwidth. A collective is a list of calls (executor.py),
and advancing it means to make those that need not wait. That is done by `poke`, by Test of any request, or, where the
communicator was made with progress=True, by a thread that looks every 0.2 ms. A blocking collective of the same
communicator, lower-case ones included, lets them finish first. Not so Send, Recv and Probe, which know nothing of them:
where another rank has to Wait before it can answer, a thread or a Wait before is needed. What nobody has waited for
when the program ends is named (unfinished.py).

What of it hides behind computing (measured, two hosts): with messages above the MPI library's eager limit nothing, as
they move only inside MPI calls; with eager limit and socket buffers raised above the message 53-59% at 400 Mbit/s and
74-78% at 100 Mbit/s, of at most 88%. On one host the cores that would copy are busy computing, and nothing hides.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from collectives import unfinished

INTERVAL = 0.2e-3  # seconds between two looks of the progress thread


class Request:
    """A collective in flight. It keeps the caller's buffers alive until it is done.

    what : the operation
    agreed : function (whether to wait) -> whether all ranks have said that they call it alike; None if none is to
    started : what the watchdog has to know of it (watchdog.py); None without one
    """

    def __init__(self, queue, what, plan, buffers, release, agreed):
        self.queue, self.what, self.plan, self.buffers, self.release = queue, what, plan, buffers, release
        self.code, self.line = caller()
        self.at = 0  # the next of the plan's calls
        self.done = False
        self.agreed, self.error, self.started = agreed, None, None

    def Test(self) -> bool:
        """Advance what is in flight; say whether this collective is done."""
        if not self.done:
            self.queue.poke()
        if self.error:
            raise self.error
        return self.done

    def Wait(self) -> bool:
        """Return when this collective is done, and those that were started before it."""
        if self.started is not None:
            self.started.calls.others += 1
        self.queue.finish(self)
        if self.error:
            raise self.error
        return True

    test, wait = Test, Wait

    @property
    def place(self) -> str:
        """Where it was started."""
        return f"{Path(self.code.co_filename).name}:{self.line} in {self.code.co_name}"

    def advance(self, blocking: bool) -> bool:
        """Make the calls that need not wait, or all; true at the end."""
        if self.agreed is not None:
            try:
                if not self.agreed(blocking):
                    return False
            except ValueError as error:  # for Test and Wait: this may be another thread, or the Wait of another request
                self.error = error
                return True
            self.agreed = None
        calls, waits = self.plan.calls, self.plan.waits
        while self.at < len(calls):
            request = waits.get(self.at)
            if request is None or blocking:
                calls[self.at]()
            elif not request.Test():
                return False
            self.at += 1
        return True


def caller() -> tuple:
    """Code and line outside this package that have called into it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def waitall(requests: Iterable) -> None:
    """Wait for requests of this module and of mpi4py, in any mixture."""
    for request in requests:
        request.Wait()


def testall(requests: Iterable) -> bool:
    """Advance all, and say whether all are done."""
    return all([request.Test() for request in requests])


class Queue:
    """The collectives of one communicator that are in flight, in order.

    Parameters
    ----------
    changed : called with True when the first collective comes, with False when the last one is done
    progress : whether a thread advances them
    """

    def __init__(self, changed, progress: bool):
        self.changed, self.progress = changed, progress
        self.waiting: deque[Request] = deque()
        self.lock = threading.RLock()
        self.filled = threading.Event()
        self.closed = False
        self.thread = None
        self.agreed = None  # of the next collective, in debug mode (watchdog.py)

    def start(self, what, plan, buffers, release=lambda: None) -> Request:
        """Begin a collective, behind those that are in flight. `release` is called when it is done."""
        request = Request(self, what, plan, buffers, release, self.agreed)
        self.agreed = None
        unfinished.expect_the_end()
        with self.lock:
            plan.busy += 1
            self.waiting.append(request)
            self.filled.set()
            if len(self.waiting) == 1:
                unfinished.queues.add(self)
                self.changed(True)
            self.poke()
        if self.progress and self.thread is None:
            self.thread = threading.Thread(target=self._run, name="collectives", daemon=True)
            self.thread.start()
        return request

    def poke(self) -> None:
        """Advance the collectives in flight as far as that goes without waiting."""
        if self.lock.acquire(blocking=False):  # else the thread is at it
            try:
                while self.waiting and self.waiting[0].advance(blocking=False):
                    self._end()
            finally:
                self.lock.release()

    def finish(self, request: Request | None = None) -> None:
        """Return when `request` is done; without one, when nothing is in flight."""
        with self.lock:
            while self.waiting and not (request and request.done):
                self.waiting[0].advance(blocking=True)
                self._end()

    def _end(self):
        request = self.waiting.popleft()
        request.plan.busy -= 1
        request.done, request.buffers = True, None
        request.release()
        if not self.waiting:
            self.filled.clear()
            unfinished.queues.discard(self)
            self.changed(False)

    def _run(self):
        while not self.closed:
            self.filled.wait()
            self.poke()
            time.sleep(INTERVAL)

    def close(self):
        """End the thread; nothing may be in flight."""
        if self.waiting:
            raise RuntimeError(f"{len(self.waiting)} collectives are still in flight: Wait for their requests first")
        self.stop()

    def stop(self):
        """End the thread, whatever is in flight."""
        self.closed = True
        self.filled.set()
        if self.thread is not None:
            self.thread.join()


class Draining:
    """Stands in for a communicator's plans while collectives are in flight: a blocking one lets them finish first.

    So all ranks make progress, whichever of them waits for a request and whichever is in the blocking call already.
    """

    def __init__(self, communicator):
        self.communicator = communicator

    def get(self, key):
        self.communicator._queue.finish()
        return self.communicator._plans.get(key)
