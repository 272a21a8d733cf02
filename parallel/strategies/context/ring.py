"""Ring attention (Liu et al. 2023): keys and values travel around a ring of ranks while each attends to those it has.

    for rounds in ring_forward(rank, size, lengths, width): ...     # a schedule: collectives check, price, draw, run it

Forward: in step s rank r has the keys and values of rank r - s. It attends to them, sends them on to r + 1, and
receives those of r - s - 1 meanwhile; after p - 1 hops it has seen all. Each query's sums are merged by the offset of
their exponents (nn/layers/blockwise.py).

Backward: keys and values travel once more, and the gradients of each follow, one step behind those that compute them:
in the round in which step s is computed, what step s - 1 made is added to what comes from the left, and what step s - 2
has made complete goes to the right. The last hop brings them home, where the part of step 0 has stayed.

Bytes that a rank sends, in units of its keys (as large as its values): 2 (p - 1) forward, 4 (p - 1) backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from collectives.steps import Compute, Recv, RecvReduce, Round, Send, Slice

RECEIVED = "first", "second"  # two buffers of keys and values: one is computed with and sent while the other comes
GRADIENTS = "y", "a", "b", "c"  # y: of step 0, which stays; three others: computed, added to, sent


def ring_forward(
    rank: int, size: int, lengths: Sequence[int], width: int, seconds: Sequence[float] | None = None
) -> Iterator[Round]:
    """Yield the rounds of one rank.

    Parameters
    ----------
    rank, size : int
    lengths : sequence of int
        Positions of each rank.
    width : int
        Elements of one position's keys and values, of all samples and heads.
    seconds : sequence of float, or None
        What this rank computes in each step, for prices.
    """
    for step in range(size):
        here, there = _received(step), _received(step + 1)
        mine, next_one = _elements(rank - step, lengths, width), _elements(rank - step - 1, lengths, width)
        compute = Compute(f"F{step}", (Slice(here, 0, mine),), (), seconds[step] if seconds else 0.0)
        if step == size - 1:
            yield (compute,)
        else:
            yield Send((rank + 1) % size, here, 0, mine), Recv((rank - 1) % size, there, 0, next_one), compute


def ring_backward(
    rank: int, size: int, lengths: Sequence[int], width: int, seconds: Sequence[float] | None = None
) -> Iterator[Round]:
    """Yield the rounds of one rank: as `ring_forward`, with the gradients that follow."""
    right, left = (rank + 1) % size, (rank - 1) % size

    def elements(step: int) -> int:
        return _elements(rank - step, lengths, width)

    for step in range(size + 2 if size > 1 else 1):
        steps: list = []
        if step < size:
            here, into = _received(step), _gradient(step)
            cost = seconds[step] if seconds else 0.0
            reads, writes = (Slice(here, 0, elements(step)),), (Slice(into, 0, elements(step)),)
            steps.append(Compute(f"B{step}", reads, writes, cost))
        if step < size - 1:
            steps.append(Send(right, here, 0, elements(step)))
            steps.append(Recv(left, _received(step + 1), 0, elements(step + 1)))
        if step - 2 >= 1:
            steps.append(Send(right, _gradient(step - 2), 0, elements(step - 2)))
        if 2 <= step - 1 < size:  # what the left one has made of its step before
            steps.append(RecvReduce(left, _gradient(step - 1), 0, elements(step - 1)))
        if step == size + 1:
            steps.append(RecvReduce(left, "y", 0, elements(0)))
        yield tuple(steps)


def _received(step: int) -> str:
    return RECEIVED[(step - 1) % 2] if step else "x"


def _gradient(step: int) -> str:
    return GRADIENTS[1 + step % 3] if step else "y"


def _elements(owner: int, lengths: Sequence[int], width: int) -> int:
    return lengths[owner % len(lengths)] * width


class Ring:
    """Runs the two schedules on the ranks of a communicator; what is computed in a step is the caller's.

    Parameters
    ----------
    communicator : collectives.Communicator
        Of the ring. Its plans are kept by the shape and dtype of what travels.
    """

    def __init__(self, communicator):
        self.communicator, self.rank, self.size = communicator, communicator.rank, communicator.size
        self.plans: dict[tuple, tuple] = {}
        self.compute: Callable[..., None] | None = None

    def forward(self, keys: np.ndarray, values: np.ndarray, lengths: Sequence[int], attend: Callable, name: str):
        """Call attend(owner, keys, values) for those of every rank, one after the other, this rank's first.

        Parameters
        ----------
        keys, values : (N, H, T, d) array
            Of this rank's positions.
        lengths : sequence of int
            Positions of each rank.
        attend : callable (int, (N, H, positions of the owner, d) array, the same)
        name : str
            Of the layer, for the watchdog.
        """
        self._run(ring_forward, (keys, values), lengths, attend, name)

    def backward(
        self, keys: np.ndarray, values: np.ndarray, lengths: Sequence[int], attend: Callable, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Call attend(owner, keys, values, their gradients, to be written) likewise.

        Returns
        -------
        (N, H, T, d) arrays
            The whole gradients of this rank's keys and values; the next call overwrites them.
        """
        buffers = self._run(ring_backward, (keys, values), lengths, attend, name)
        return tuple(_halves(buffers["y"], keys.shape))

    def _run(self, schedule: Callable, own: tuple, lengths: Sequence[int], attend: Callable, name: str) -> dict:
        plan, buffers = self._plan(schedule, own[0], lengths)
        for half, array in zip(_halves(buffers["x"], own[0].shape), own, strict=True):
            half[...] = array
        self.compute = attend
        try:
            self.communicator.Run(plan, name)
        finally:
            self.compute = None
        return buffers

    def _plan(self, schedule: Callable, keys: np.ndarray, lengths: Sequence[int]) -> tuple:
        N, H, _, d = keys.shape
        key = schedule, N, H, d, keys.dtype, tuple(lengths)
        if key not in self.plans:
            width, backward = 2 * N * H * d, schedule is ring_backward
            names = ["x", *RECEIVED, *(GRADIENTS if backward else ())]
            buffers = {name: np.empty(max(1, max(lengths) * width), keys.dtype) for name in names}
            calls = {
                f"{'B' if backward else 'F'}{step}": partial(self.compute_step, step, lengths, (N, H, d))
                for step in range(self.size)
            }
            rounds = schedule(self.rank, self.size, lengths, width)
            self.plans[key] = self.communicator.compile(rounds, computations=calls, **buffers), buffers
        return self.plans[key]

    def compute_step(self, step: int, lengths: Sequence[int], shape: tuple[int, int, int], *arrays: np.ndarray) -> None:
        owner = (self.rank - step) % self.size
        N, H, d = shape
        self.compute(owner, *(half for array in arrays for half in _halves(array, (N, H, lengths[owner], d))))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of messages."""
        return sum(array.nbytes for _, buffers in self.plans.values() for array in buffers.values())

    def close(self) -> None:
        """Free the plans (collective)."""
        for plan, _ in self.plans.values():
            plan.free()
        self.plans = {}


def _halves(buffer: np.ndarray, shape: tuple[int, int, int, int]) -> np.ndarray:
    """What lies at the beginning of a flat buffer: keys and values, or their gradients, (2, N, H, T, d)."""
    return buffer[: 2 * math.prod(shape)].reshape(2, *shape)
