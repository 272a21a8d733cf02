"""Which worker may go on: a server's table of the workers' clocks, and the age of the slices that a worker has cached.

A worker's clock counts the steps whose gradients it has pushed. With a bound s a worker may start clock c only if
c - min_j c_j <= s, and what it reads then contains every update stamped <= c - s - 1 and its own: s = 0 is bulk
synchronous, s = infinity asynchronous. (With s = 0 a server applies the pushes of a clock when all are there, in the
order of workers: else who reads late would see more than others.) A worker that is finished, or dead, holds nobody
back: it leaves the minimum.

    s = 1      worker 0 | 0 | 1 | waits for 2: worker 2 has not pushed 0
               worker 1 | 0 | 1 | ...
               worker 2 |     0       |

There are no messages here and no arrays, so servers, workers (served.py) and the checker, which tries every order of
arrival (checking.py), run the same code. Source: Ho et al. 2013 (stale synchronous parallel).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class ClockTable:
    """The clocks of the workers, as a server knows them.

    Parameters
    ----------
    workers : iterable of int
    bound : float
        s: how many clocks a worker may be ahead of the slowest; math.inf for any.
    warm : int
        No worker is ahead of another up to that clock: the bound is 0 there.

    Attributes
    ----------
    reached : dict
        Worker -> the clock of its last push.
    clocks : dict
        The same, but math.inf of one that has left.
    waiting : dict
        Worker -> the clock at which it reads, where it may not yet; in the order of asking.
    pausing : set
        Workers that have left and will go on.
    """

    workers: Iterable[int]
    bound: float = math.inf
    warm: int = 0
    reached: dict[int, int] = field(init=False)
    clocks: dict[int, float] = field(init=False)
    waiting: dict[int, float] = field(default_factory=dict)
    pausing: set[int] = field(default_factory=set)

    def __post_init__(self):
        self.open(0)

    def open(self, clock: int) -> None:
        """Start with all workers at one clock."""
        self.reached = dict.fromkeys(self.workers, clock)
        self.clocks, self.waiting, self.pausing = dict(self.reached), {}, set()

    @property
    def least(self) -> float:
        """Return the clock of the slowest worker that has not left; math.inf if all have."""
        return min(self.clocks.values())

    def record_push(self, worker: int, clock: int) -> None:
        """Record a worker's push: gradients of its steps up to this clock."""
        self.clocks[worker] = self.reached[worker] = clock

    def add_read(self, worker: int, clock: float) -> None:
        """Record that a worker wants to read, at this clock; math.inf: when all workers have left."""
        self.waiting[worker] = clock

    def remove(self, worker: int, pauses: bool = False) -> None:
        """Remove a worker that is finished, or dead, or that pauses and will go on from its last push."""
        self.clocks[worker] = math.inf
        self.pausing = self.pausing | {worker} if pauses else self.pausing - {worker}

    def restore(self, worker: int) -> None:
        """Restore a worker that has paused, at its last push."""
        self.clocks[worker] = self.reached[worker]
        self.pausing.discard(worker)

    def is_synchronous(self, clock: float) -> bool:
        """Return whether all workers go from one clock to the next together there."""
        return self.bound == 0 or clock <= self.warm

    def ended_early(self, clock: int) -> bool:
        """Return whether all workers have left, one before it had come to this clock: training has ended early."""
        gone = (at for worker, at in self.reached.items() if worker not in self.pausing)
        return self.least == math.inf and min(gone, default=clock) < clock

    def pop_readable(self, broken: bool = False) -> list[int]:
        """Return the workers that may read now, and remove them from `waiting`; all if training is `broken`."""
        least = self.least
        found = [w for w, clock in self.waiting.items() if broken or allowed(clock, least, self.bound, self.warm)]
        for worker in found:
            del self.waiting[worker]
        return found


def allowed(clock: float, least: float, bound: float, warm: int = 0) -> bool:
    """Return whether a worker at `clock` may go on while the slowest is at `least`."""
    return least >= (clock if clock <= warm or clock == math.inf else clock - bound)


@dataclass(frozen=True)
class CachedSlice:
    """The age of a worker's copy of one server's slice, as the server sent it with the slice.

    Attributes
    ----------
    version : int
        Updates that the server had made.
    least, own : float
        The clocks, then, of the slowest worker, and of this one.
    """

    version: int = 0
    least: float = 0
    own: float = 0


def fits(copies: Iterable[CachedSlice], clock: int, bound: float, warm: int = 0) -> bool:
    """Return whether a worker at `clock` may compute with these copies: every slice must be new enough."""
    return all(allowed(clock, copy.least, bound, warm) for copy in copies)
