"""Move activations from data-parallel layers to model-parallel ones, and their gradients back, in rounds.

strategies/one_weird_trick.py says what the schemes are, and what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from collectives.steps import chunk
from nn.core.context import LayerContext
from nn.core.memory_pool import MemoryPool
from parallel.mesh import Ranks
from parallel.strategies.activation_transfer import pack, transfer, transfer_dtype, unpack
from parallel.strategies.tensor.moves import Cut


class ActivationRound(NamedTuple):
    """The samples of one pass through the fully-connected layers: of every rank some of its rows."""

    rows: list[tuple[int, int]]

    @property
    def counts(self) -> list[int]:
        """Return how many samples each rank has."""
        return [hi - lo for lo, hi in self.rows]


def rounds(scheme: str, samples: list[int]) -> list[ActivationRound]:
    """Return the rounds of a step, given how many samples the ranks have; empty rounds are left out."""
    ranks = len(samples)
    if scheme == "turns":
        found = [
            ActivationRound([(0, n if rank == turn else 0) for rank, n in enumerate(samples)]) for turn in range(ranks)
        ]
    elif scheme == "shares":
        found = [ActivationRound([chunk(n, ranks, i) for n in samples]) for i in range(ranks)]
    else:
        found = [ActivationRound([(0, n) for n in samples])]
    return [one for one in found if sum(one.counts)]


class Rounds:
    """Moves activations: each rank has some samples with all features before, and all samples behind.

    Parameters
    ----------
    scheme : {"all", "turns", "shares", "features"}
    group : Ranks
    features : int
        Of a sample, in the last axis.
    ctx : LayerContext
        Of the network.
    """

    def __init__(self, scheme: str, group: Ranks, features: int, ctx: LayerContext):
        self.scheme, self.group, self.cut, self.memory = scheme, group, Cut(-1, features), MemoryPool()
        self.ctx, self.context = ctx, ctx.network_context
        self.rank, self.ranks = group.rank, group.size

    def samples(self, count: int, first: int) -> list[tuple[int, int]]:
        """Return of every rank (position of its first sample in the batch, how many it has)."""
        return [tuple(map(int, each)) for each in self.group.all_gather(np.array([first, count]))]

    def rounds(self, a, y, samples: list[int]) -> Iterator[tuple[ActivationRound, np.ndarray, np.ndarray]]:
        """Yield (round, activations, targets); those of the next round travel while one is computed."""
        todo = rounds(self.scheme, samples)
        waiting = [self.send(todo[0], a)] if todo else []
        all_targets = self.all_rows(y, samples)
        for number, one in enumerate(todo):
            arrive = waiting.pop()
            x = arrive()
            if number + 1 < len(todo):
                waiting.append(self.send(todo[number + 1], a))
            rows = [theirs[lo:hi] for theirs, (lo, hi) in zip(all_targets, one.rows, strict=True)]
            yield one, x, np.concatenate(rows)

    def all_rows(self, rows: np.ndarray, samples: list[int]) -> list[np.ndarray]:
        """Return all ranks' rows of an array with a row for each sample."""
        padded = np.zeros((max(samples), *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        return [theirs[:n] for theirs, n in zip(self.group.all_gather(padded), samples, strict=True)]

    def send(self, one: ActivationRound, a: np.ndarray) -> Callable[[], np.ndarray]:
        """Send the activations of a round; return a function that waits for them."""
        lo, hi = one.rows[self.rank]
        if self.scheme == "features":
            return lambda: self.swapped(a[lo:hi], one)
        communicator, counts = self.group.communicator, one.counts
        if self.scheme == "turns":
            turn = int(np.argmax(counts))
            mine = turn == self.rank
            dtype = transfer_dtype(self.context, a.dtype)
            x = self._sent(a) if mine else self.memory.empty((counts[turn], *a.shape[1:]), dtype)
            request = communicator.Ibcast(x, turn)
            return lambda: (request.Wait(), unpack(self.context, x, a.dtype))[1]
        most = max(counts)
        mine = self.memory.empty((most, *a.shape[1:]), a.dtype)
        mine[: hi - lo], mine[hi - lo :] = a[lo:hi], 0
        mine = self._sent(mine)
        found = self.memory.empty((self.ranks, *mine.shape), mine.dtype)
        request = communicator.Iallgather(mine, found)

        def arrive(sent=mine):  # which must not be used again before
            request.Wait()
            there = unpack(self.context, found, a.dtype)
            return there.reshape(-1, *a.shape[1:]) if min(counts) == most else _joined(there, counts)

        return arrive

    def _sent(self, a: np.ndarray) -> np.ndarray:
        return pack(self.context, np.ascontiguousarray(a))

    def return_gradients(self, gx: np.ndarray, one: ActivationRound, ga: np.ndarray) -> None:
        """Sum the gradients of a round's activations, on the ranks that have computed them."""
        (lo, hi), counts = one.rows[self.rank], one.counts
        if self.scheme == "features":
            ga[lo:hi] = self.swapped_back(gx, one)
        elif self.scheme == "turns":
            turn = int(np.argmax(counts))
            self.group.communicator.Reduce(np.ascontiguousarray(gx), ga if turn == self.rank else None, root=turn)
        else:
            ga[lo:hi] = self.group.reduce_scatter(_apart(gx, counts))[: hi - lo]

    def swapped(self, a: np.ndarray, one: ActivationRound) -> np.ndarray:
        """Return all ranks' samples of this rank's features."""
        most, width = max(one.counts), -(-self.cut.size // self.ranks)
        out = np.zeros((self.ranks, most, width), a.dtype)
        for rank, piece in enumerate(out):
            f, t = self.cut.bounds(rank, self.ranks)
            piece[: len(a), : t - f] = a[:, f:t]
        return _joined(transfer(self.ctx, self.group.all_to_all, out), one.counts)[:, : self.cut.share(self.group)]

    def swapped_back(self, gx: np.ndarray, one: ActivationRound) -> np.ndarray:
        """Return the gradient of this rank's samples for all features; there is nothing to sum."""
        most, width = max(one.counts), -(-self.cut.size // self.ranks)
        out = np.zeros((self.ranks, most, width), gx.dtype)
        out[:, :, : gx.shape[1]] = _apart(gx, one.counts)
        mine = one.counts[self.rank]
        back = [
            piece[:mine, : t - f]
            for rank, piece in enumerate(transfer(self.ctx, self.group.all_to_all, out, gradient=True))
            for f, t in [self.cut.bounds(rank, self.ranks)]
        ]
        return np.concatenate(back, axis=1)


def _joined(pieces: np.ndarray, counts: list[int]) -> np.ndarray:
    """Concatenate each rank's first rows."""
    return np.concatenate([piece[:n] for piece, n in zip(pieces, counts, strict=True)])


def _apart(rows: np.ndarray, counts: list[int]) -> np.ndarray:
    """Split rows by ranks, padded with zeros to the same length."""
    found, at = np.zeros((len(counts), max(counts), *rows.shape[1:]), rows.dtype), 0
    for piece, n in zip(found, counts, strict=True):
        piece[:n] = rows[at : at + n]
        at += n
    return found
