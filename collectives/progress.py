"""What nonblocking collectives are in flight on this process, and what advances them while a call waits.

MPI promises that what a process has begun goes on while the process waits, in whichever call: so ranks may wait in
different orders. The library keeps that promise for its own messages, and not for our schedules, of which a rank must
start the next message when one has come. Therefore

- a Wait for a nonblocking collective advances those of all communicators (nonblocking.py), as does whoever waits for
  others in shared memory (flags.py);
- a call that waits inside the library has a thread beside it that advances them: `with_progress`. It needs
  MPI.THREAD_MULTIPLE, mpi4py's default; without it such calls advance nothing.

Where nothing is in flight, nothing of this runs.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from mpi4py import MPI

INTERVAL = 0.2e-3  # seconds between two looks of a thread

in_flight: set = set()  # queues (nonblocking.py) that hold a collective


def advance_all() -> None:
    """Advance all that is in flight as far as that goes without waiting."""
    for queue in tuple(in_flight):
        queue.advance()


class ProgressThread:
    """A thread that advances what is in flight while someone has acquired it: calls of the library, progress=True."""

    def __init__(self):
        self.calls, self.lock = 0, threading.Lock()
        self.wanted = threading.Event()
        self.thread, self.closed = None, False

    def acquire(self) -> None:
        """Let the thread look every 0.2 ms, until `release` is called as often."""
        with self.lock:
            self.calls += 1
            if self.thread is None:
                self.closed = False
                self.thread = threading.Thread(target=self._run, name="progress", daemon=True)
                self.thread.start()
            self.wanted.set()

    def release(self) -> None:
        with self.lock:
            self.calls -= 1
            if not self.calls and not self.closed:
                self.wanted.clear()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()

    def _run(self):
        while self.wanted.wait() and not self.closed:
            advance_all()
            time.sleep(INTERVAL)

    def stop(self) -> None:
        """End the thread: MPI ends."""
        with self.lock:
            thread, self.thread, self.closed = self.thread, None, True
            self.wanted.set()
        if thread is not None:
            thread.join()


thread = ProgressThread()


def with_progress(call: Callable, *args, **kwargs):
    """Make a call that waits inside the library and return its result; a thread advances what is in flight."""
    if not in_flight or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return call(*args, **kwargs)
    with thread:
        return call(*args, **kwargs)


class Doing(NamedTuple):
    """A call that waits for other ranks.

    Attributes
    ----------
    number : of a nonblocking collective for which Wait was called, which it is
    late : function () -> ranks of COMM_WORLD that it still waits for, where that is known
    """

    name: str
    args: tuple
    kwargs: dict
    number: int | None = None
    late: Callable[[], list[int]] | None = None


class Calls:
    """A communicator's calls that wait for other ranks: how many have begun, and which one it is in."""

    instances: list[weakref.ref] = []  # of all communicators of this process

    def __init__(self):
        self.collectives = self.others = 0
        self.current: Doing | None = None
        self.aborted: tuple[int, str] | None = None  # the last collective that raised: its number, and what and where
        self.instances.append(weakref.ref(self, self.instances.remove))


def outside(frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame that is not of this package: where it was called."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame = frame.f_back
    return frame


def where(frame: FrameType | None) -> str:
    """File, line and function of a frame."""
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
