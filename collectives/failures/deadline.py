"""When a rank gives up waiting for others: the loop of every wait that lasts, by messages and in shared memory."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

from mpi4py import MPI

from collectives.failures.awake import Awake
from collectives.failures.job_end import HANGING, abort, rank_of_world
from collectives.progress import advance_all, in_flight

MARGIN = 10.0  # seconds after a deadline, or the watchdog, that what knows less of who waits for whom gives up


class Deadline:
    """How long the ranks of a communicator wait for each other: one object, so that a change holds for every wait.

    Parameters
    ----------
    seconds : float
    """

    seconds = 300.0  # by default

    def __init__(self, seconds: float = seconds):
        self.seconds = seconds

    def wait(self, done: Callable[[], bool], meanwhile: Callable[[], object], late: Callable[[float], object]) -> None:
        """Return when done() is true. Yield the core, and advance what is in flight.

        Parameters
        ----------
        meanwhile : called now and then; may raise
        late : called with the seconds waited, again and again once they are too many; may raise
        """
        clock, looks = Awake(), 0
        while not done():
            os.sched_yield()
            looks += 1
            if looks % 32 == 0:
                meanwhile()
                if in_flight:
                    advance_all()
                waited = clock.now()
                if waited > 0.05:
                    time.sleep(50e-6)
                if waited > self.seconds:
                    late(waited)

    @contextlib.contextmanager
    def inside_mpi(self, what: str) -> Iterator[None]:
        """In this block ranks wait for each other inside MPI, where nothing ends a wait: then all ranks end.

        The block makes no call of mpi4py that holds the interpreter: lower-case ones do, the first of a communicator.
        """
        done, limit = threading.Event(), self.seconds + MARGIN

        def watch():
            clock = Awake()
            while not done.wait(1.0):
                if clock.now() > limit:
                    abort(HANGING, f"{rank_of_world()} has waited {limit:g} s {what}: is a rank stopped?")

        if limit < math.inf and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            threading.Thread(target=watch, name="inside MPI", daemon=True).start()
        try:
            yield
        finally:
            done.set()
