"""Collectives that run while the caller computes: Iallreduce, Ibcast, Iallgather, Ialltoallv, Ireduce_scatter.

    request = communicator.Iallreduce(MPI.IN_PLACE, bucket)
    ... compute, now and then communicator.progress() ...
    request.Wait()

The collectives of a communicator run one after another, in the order in which they were started: the order that MPI
asks of all ranks, and one transfer at a time has the whole bandwidth. A collective is a list of calls (plan.py), and
advancing it means to make those that need not wait. That is done by `progress`, by Test of any request, or, where the
communicator was made with progress=True, by a thread that looks every 0.2 ms. A blocking collective of the same
communicator, lower-case ones included, lets them finish first. Not so Send, Recv and Probe, which know nothing of them:
where another rank has to Wait before it can answer, a thread or a Wait before is needed.

What nobody has waited for when the program ends is named:

    rank 1: the program ends, and nobody has waited for a nonblocking allreduce of [IN_PLACE, (1000,) float32] (started
    at train.py:88 in step)

Python gives back the memory of arrays when it ends, before MPI does, and MPI then moves what is still under way: a
segmentation fault. And a rank that leaves lets those down that do wait. So at the end of Python, or in an MPI.Finalize
before it, what is in flight is advanced for some seconds, as long as no exception has ended the program; what is then
not finished keeps its memory for as long as the process lives.

What of it hides behind computing (measured, two hosts): with messages above the MPI library's eager limit nothing, as
they move only inside MPI calls; with eager limit and socket buffers raised above the message 53-59% at 400 Mbit/s and
74-78% at 100 Mbit/s, of at most 88%. On one host the cores that would copy are busy computing, and nothing hides.
"""

import atexit
import ctypes
import functools
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from mpi4py import MPI

from collectives import progress
from collectives.executor.plan import Disagreement
from collectives.failures.aborted import Aborted
from collectives.failures.awake import Awake
from collectives.failures.watchdog import describe
from collectives.progress import Calls, Doing, in_flight, outside, where

EXIT_GRACE = 5.0  # seconds that the other ranks get to do their part when the program ends
SPIN_LIMIT = 5.0  # seconds that a Wait only looks where other communicators have something in flight too
NAMED = 8  # collectives of a communicator that are named then, at most


class Request:
    """A collective in flight. It keeps the caller's buffers alive until it is done.

    what : the operation
    agreed : function (whether to wait) -> whether all ranks have said that they call it alike; None if none is to
    place : where it was started
    started : what the watchdog has to know of it, its Calls and the call; None without one
    """

    def __init__(self, queue, what, plan, buffers, release, agreed):
        self.queue, self.what, self.plan, self.buffers, self.release = queue, what, plan, buffers, release
        self.place = where(outside())
        self.at, self.calls, self.waits = 0, (), {}  # the next of the plan's calls
        self.done = False
        self.agreed, self.error = agreed, None
        self.started: tuple[Calls, Doing] | None = None

    def Test(self) -> bool:
        """Advance what is in flight; say whether this collective is done."""
        if not self.done:
            self.queue.advance()
        if self.error:
            raise self.error
        return self.done

    def Wait(self) -> bool:
        """Return when this collective is done, and those that were started before it."""
        if self.started is not None and self.started[0].current is None:
            calls, calls.current = self.started
            calls.others += 1
            try:
                self.queue.finish(self)
            finally:
                calls.current = None
        else:
            self.queue.finish(self)
        if self.error:
            raise self.error
        return True

    test, wait = Test, Wait

    def advance(self, blocking: bool) -> bool:
        """Make the calls that need not wait, or all; true at the end, which may be an error."""
        try:
            return self._advance(blocking)
        except Exception as error:  # for Test and Wait: this may be another thread, or the Wait of another request
            self.error = error
            return True

    def _advance(self, blocking):
        if self.queue.broken:  # by one before it, of whose messages these would be taken for
            raise Aborted(self.queue.broken)
        if self.agreed is not None:
            if not self.agreed(blocking):
                return False
            self.agreed = None
        try:
            if not self.at:
                self.calls, self.waits = self.plan.stepwise()
            calls, waits = self.calls, self.waits
            while self.at < len(calls):
                request = waits.get(self.at)
                if request is None or blocking:
                    self.plan.carry_out(calls[self.at])
                elif not request.Test():
                    self.queue.refuse_aborted()
                    return False
                self.at += 1
        except Disagreement:
            raise
        except BaseException as error:  # KeyboardInterrupt too: a call that is made twice adds twice
            self.plan.abort(error, self.place)  # this may be a thread of ours
            raise
        return True


class PersistentRequest:
    """A collective that is planned once and run often: Start, then Wait or Test, again and again; Free at the end.

    Ranks start the collectives of a communicator in one order. Between Wait and Start the buffers are the caller's.
    Where nothing else is in flight Start only says that there is something, and Wait runs the plan: what comes between
    them, here or on another communicator, makes it one that is in flight (`Queue.admit`).

    calls : where runs are noted for the watchdog; None without one

    Raises
    ------
    RuntimeError
        Start of a request that is active; Free of one; Start of one that was freed.
    """

    def __init__(self, queue: "Queue", what: str, plan, buffers: tuple, calls: Calls | None = None):
        self.queue, self.what, self.plan, self.buffers, self.calls = queue, what, plan, buffers, calls
        self.number = 0  # of the run, among the collectives that `calls` counts
        self.request: Request | None = None  # where it is in flight
        self.active = False

    def Start(self) -> None:
        """Begin a run."""
        queue = self.queue
        if self.active or self.plan is None or queue.broken:
            self._refuse()
        self.active = True
        if self.calls is not None:
            self.calls.collectives += 1
            self.number = self.calls.collectives
        if in_flight or queue.progress or queue.agreed is not None:
            self.request = queue.start(self.what, self.plan, self.buffers)
        else:
            queue.deferred.append(self)
            in_flight.add(queue)

    def _refuse(self):
        """Raise what keeps this request from a start."""
        if self.active or self.plan is None:
            was = "is active: Wait for it before the next Start" if self.active else "was freed"
            raise RuntimeError(f"this {self.what} {was}")
        raise Aborted(self.queue.broken)

    def Wait(self, status=None) -> bool:
        """Return when the run is done; at once where none is active."""
        if not self.active:
            return True
        if self.calls is not None and self.calls.current is None:
            return self._observed_wait()
        queue = self.queue
        if self.request is None and len(in_flight) == 1:
            try:
                queue.deferred.pop()
            except IndexError:  # a thread is just beginning it
                pass
            else:
                self.active = False
                in_flight.discard(queue)
                self.plan()
                return True
        queue.admit()
        with queue.lock:
            self.active, request, self.request = False, self.request, None
        return request.Wait()

    def _observed_wait(self) -> bool:
        """Wait, and let the watchdog see for what."""
        self.calls.others += 1
        self.calls.current = Doing(f"persistent {self.what}", self.buffers, {}, self.number)
        try:
            return self.Wait()
        finally:
            self.calls.current = None

    def Test(self, status=None) -> bool:
        """Advance what is in flight; say whether the run is done, or none is active."""
        if not self.active:
            return True
        self.queue.admit()
        try:
            done = self.request.Test()
        except BaseException:
            self.active, self.request = False, None
            raise
        if done:
            self.active, self.request = False, None
        return done

    def Free(self) -> None:
        """Let go of the plan; the request cannot be started again."""
        if self.active:
            raise RuntimeError(f"this {self.what} is active: Wait for it before Free")
        if self.plan is not None:
            self.plan.free()
        self.plan = self.buffers = None

    start, wait, test, free = Start, Wait, Test, Free


def waitall(requests: Iterable) -> None:
    """Wait for requests of this module and of mpi4py, in any mixture.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from collectives import Communicator, waitall
    >>> communicator = Communicator(MPI.COMM_WORLD)
    >>> arrays = [np.ones(4), np.ones(9)]
    >>> waitall([communicator.Iallreduce(MPI.IN_PLACE, array) for array in arrays])
    >>> all((array == communicator.size).all() for array in arrays)
    True
    >>> communicator.release()
    """
    for request in requests:
        if isinstance(request, Request | PersistentRequest):
            request.Wait()
        else:
            progress.with_progress(request.Wait)


def testall(requests: Iterable) -> bool:
    """Advance all, and say whether all are done.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from collectives import Communicator, testall
    >>> communicator = Communicator(MPI.COMM_WORLD)
    >>> x = np.ones(4)
    >>> requests = [communicator.Iallreduce(MPI.IN_PLACE, x)]
    >>> while not testall(requests):
    ...     pass  # compute something
    >>> bool((x == communicator.size).all())
    True
    >>> communicator.release()
    """
    return all([request.Test() for request in requests])


class Queue:
    """The collectives of one communicator that are in flight, in order.

    Parameters
    ----------
    thread : whether a thread advances them
    refuse_aborted : raises Aborted where another rank has ended a call early, as far as that can be seen
    """

    def __init__(self, thread: bool, refuse_aborted: Callable[[], None]):
        self.progress, self.refuse_aborted = thread, refuse_aborted
        self.waiting: deque[Request] = deque()
        self.lock = threading.RLock()
        self.advancing = False
        self.agreed = None  # of the next collective, in debug mode (agreement.py)
        self.broken = ""  # why none goes on
        self.deferred: list[PersistentRequest] = []  # the one that was started while nothing was in flight, if any

    def admit(self) -> None:
        """Begin the collective whose start was deferred, if there is one."""
        with self.lock:
            try:
                first = self.deferred.pop()
            except IndexError:
                return
            first.request = self.start(first.what, first.plan, first.buffers)

    def start(self, what, plan, buffers, release=lambda: None) -> Request:
        """Begin a collective, behind those that are in flight. `release` is called when it is done."""
        self.admit()
        request = Request(self, what, plan, buffers, release, self.agreed)
        self.agreed = None
        complete_at_exit()
        with self.lock:
            plan.busy += 1
            self.waiting.append(request)
            if len(self.waiting) == 1:
                in_flight.add(self)
                if self.progress:
                    progress.thread.acquire()
            self.advance()
        return request

    def advance(self) -> None:
        """Advance the collectives in flight as far as that goes without waiting."""
        if self.deferred:
            self.admit()
        if self.lock.acquire(blocking=False):  # else the thread is at it
            try:
                while not self.advancing and self.waiting and self.waiting[0].advance(blocking=False):
                    self._complete_first()
            finally:
                self.lock.release()

    def finish(self, request: Request | None = None) -> None:
        """Return when `request` is done; without one, when nothing is in flight."""
        clock = None  # of the time since another communicator was first found to have something in flight, too
        with self.lock:
            self.admit()
            while self.waiting and not (request and request.done):
                alone = len(in_flight) == 1
                if alone or (clock and clock.now() > SPIN_LIMIT):  # this wait has a limit, and advances the others
                    self.advancing = True  # a wait in shared memory advances what is in flight, this one too
                    try:
                        first = self.waiting[0]
                        first.advance(True) if alone else progress.with_progress(first.advance, True)
                    finally:
                        self.advancing = False
                    self._complete_first()
                else:  # another rank may wait for those of other communicators before it comes to this one
                    clock = clock or Awake()
                    progress.advance_all()
                    os.sched_yield()

    def _complete_first(self):
        request = self.waiting.popleft()
        request.plan.busy -= 1
        request.done, request.buffers = True, None
        request.release()
        if not self.waiting:
            self._emptied()

    def _emptied(self):
        in_flight.discard(self)
        if self.progress:
            progress.thread.release()

    def refuse_in_flight(self):
        """Raise RuntimeError while anything is in flight."""
        self.admit()
        if self.waiting:
            raise RuntimeError(f"{len(self.waiting)} collectives are still in flight: Wait for their requests first")

    def abandon(self):
        """Leave what is in flight: the communicator was revoked. Its memory is kept, as MPI may still write there."""
        with self.lock:
            for request in self.waiting:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))
            if self.waiting:
                self.waiting.clear()
                self._emptied()
            in_flight.discard(self)  # as one that has only a deferred start, too


# ----------------------------------------------------------------------------------------- the end of the program


@functools.cache
def complete_at_exit() -> None:
    """Let `finish_at_exit` be called before memory goes."""
    # What belongs to COMM_SELF goes as the first act of MPI.Finalize; at the end of Python there is nobody to call.
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: finish_at_exit()), "collectives")
    atexit.register(finish_at_exit)


def finish_at_exit() -> None:
    """Name what is in flight, give it time to finish, and keep the memory of what does not."""
    for queue in tuple(in_flight):
        queue.admit()
    progress.thread.stop()
    unfinished = [queue for queue in tuple(in_flight) if queue.waiting]
    if not unfinished:
        return
    me = f"rank {MPI.COMM_WORLD.Get_rank()}"
    failed = hasattr(sys, "last_value")  # the other ranks may never come, or abort
    ending = "an exception ends the program" if failed else "the program ends"
    for queue in unfinished:
        requests = [(request, request.buffers) for request in list(queue.waiting)]  # a thread may still end some
        alike = Counter(f"{r.what} of {describe(b)} (started at {r.place})" for r, b in requests if b is not None)
        for what, times in list(alike.items())[:NAMED]:
            often = f", {times} times" if times > 1 else ""
            write_stderr(f"{me}: {ending}, and nobody has waited for a nonblocking {what}{often}")
        if len(alike) > NAMED:
            write_stderr(f"{me}: nor for {len(alike) - NAMED} more")
    until = time.monotonic() + (0 if failed else EXIT_GRACE)
    while time.monotonic() < until and any(queue.waiting for queue in unfinished):
        progress.advance_all()
        time.sleep(1e-3)
    for queue in unfinished:
        for request in queue.waiting:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))  # for ever: MPI may read and write its memory
    in_flight.clear()
    if not failed and (missing := sum(len(queue.waiting) for queue in unfinished)):
        write_stderr(
            f"{me}: {missing} not finished in {EXIT_GRACE:g} s more: other ranks have not started the same, or are gone"
        )


def write_stderr(line: str) -> None:
    """Whole lines, so that those of several ranks do not mix."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
