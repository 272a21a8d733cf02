"""Positions on their way to the ranks that have their experts, and back: by alltoallv.

A rank's rows are sorted by expert, and experts are dealt out in their order, so the rows for a rank are neighbours.
What a rank receives is ordered by the rank it came from, and there by expert; `Dispatch.by_expert` brings the rows of
each expert together. Ranks first exchange how many rows go where, in an alltoall of numbers.

Each layer moves rows four times a step: the positions there, the experts' outputs back, then their gradients there and
those of the positions back. With n positions on each of p ranks, k experts a position and an even choice a rank sends
n k D (p - 1) / p numbers each time. Nothing bounds what one expert may receive: memory is allocated by the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from parallel.mesh import Ranks


@dataclass(frozen=True)  # no tuple: mixed precision would keep its numbers as float16
class Dispatch:
    """How many rows a rank sends and receives.

    Attributes
    ----------
    sent : (p, E / p) int array
        Rows of this rank for every expert, by the rank that has it.
    received : (p, E / p) int array
        Rows for each expert of this rank, by the rank that they came from.
    """

    sent: np.ndarray
    received: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Rows of each expert of this rank."""
        return self.received.sum(axis=0)

    @property
    def by_expert(self) -> np.ndarray:
        """Which of the received rows are the first expert's, in the order of the ranks, then the second's, ..."""
        expert = np.tile(np.arange(self.received.shape[1]), len(self.received))
        return np.argsort(np.repeat(expert, self.received.ravel()), kind="stable")


class ExpertRanks(Ranks):
    """The ranks among which experts are dealt out, as a layer sees them.

    Attributes
    ----------
    bytes_sent : int
        Of rows that this rank has sent to others, since it was made.
    """

    def __init__(self, communicator):
        super().__init__(communicator)
        self.bytes_sent = 0
        self._meanwhile: Callable[[], None] | None = None

    def plan(self, counts: np.ndarray) -> Dispatch:
        """Return where rows go, of this rank's counts of every expert's, (E,)."""
        sent = np.ascontiguousarray(counts, np.int64).reshape(self.size, -1)
        return Dispatch(sent, self.all_to_all(sent).copy())

    def start(
        self, rows: np.ndarray, sent: np.ndarray, received: np.ndarray, out: np.ndarray
    ) -> Callable[[], np.ndarray]:
        """Begin to send rows to every rank, so many as `sent` says; return what waits for those received, in `out`."""
        to, source = sent.sum(axis=1), received.sum(axis=1)
        width = rows.shape[1]
        request = self.communicator.Ialltoallv(_blocks(rows, to * width), _blocks(out, source * width))
        others = int(to.sum() - to[self.rank])
        self.bytes_sent += others * width * rows.itemsize
        return partial(_wait, request, out)

    @contextmanager
    def meanwhile(self, compute: Callable[[], object]) -> Iterator[list]:
        """Let the next rows be on their way to their experts while `compute` runs; the list then has its result."""
        results: list = []
        self._meanwhile = lambda: results.append(compute())
        try:
            yield results
        finally:
            self._meanwhile = None

    def compute_meanwhile(self) -> None:
        """Compute what there is to compute while rows are on their way."""
        compute, self._meanwhile = self._meanwhile, None
        if compute:
            compute()


def _blocks(rows: np.ndarray, counts: np.ndarray) -> list:
    """Rows as MPI takes them: with the elements of each rank's block, and where it begins."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return [rows, counts.tolist(), starts.tolist(), rows.dtype.char]


def _wait(request, out: np.ndarray) -> np.ndarray:
    request.Wait()
    return out
