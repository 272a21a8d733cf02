"""When a rank gives up waiting for others: the loop of every wait that lasts, by messages and in shared memory."""

import os
import time
from collections.abc import Callable, Iterable

from collectives.failures.awake import Awake
from collectives.progress import advance_all, in_flight

# By id, arrays or requests of messages to which not all ranks have come: MPI may use them after a wait that has failed.
UNFINISHED: dict[int, list] = {}


def keep_alive(requests: Iterable) -> None:
    """Keep the memory of messages that may still come, for as long as the process lives: a request holds its buffer."""
    kept = list(requests)
    UNFINISHED[id(kept)] = kept


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
