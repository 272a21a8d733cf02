"""Attention of the positions that a rank has: by a ring, by heads (Ulysses), or by both.

**Ring** (ring.py): queries stay, keys and values of all ranks come by. **Ulysses** (Jacobs et al. 2023): an alltoall
gives every rank all positions of some heads, and another one brings the results back; between them attention is that
of one process, to the bit. **Both** (Fang and Zhao 2024): the alltoall among neighbours, the ring between such groups.

Bytes that a rank sends of one layer, in units of its keys: ring 2 (p - 1) forward and 4 (p - 1) backward; Ulysses
4 (p - 1) / p each way. Ulysses needs heads to deal; a ring takes any number of ranks, and hides what it sends.
"""

from __future__ import annotations

import numpy as np

from nn.layers.attention import MultiHeadAttention
from nn.layers.blockwise import BlockwiseAttention
from parallel.strategies.context.positions import ContextDegrees, member_positions, member_rows, positions
from parallel.strategies.context.ring import Ring

BLOCK = 128  # queries and keys computed at a time in a ring, where the layer does not say


class ContextGroups:
    """The ranks with which one computes attention; those of one process until `connect`.

    Parameters
    ----------
    degrees : ContextDegrees
    rank : int
        This one, on the axis "context".
    """

    def __init__(self, degrees: ContextDegrees, rank: int):
        self.degrees, self.rank = degrees, rank
        self.member, self.piece = divmod(rank, degrees.heads)
        self.ring: Ring | None = None
        self.heads = None  # the Group that shares the heads
        self.made: list = []

    def positions(self, length: int) -> np.ndarray:
        """Return this rank's positions of sequences of a length."""
        return positions(length, self.rank, self.degrees)

    def connect(self, communicator, group_of) -> None:
        """Make the communicators (collective). group_of: of a communicator, what layers ask."""
        ring = communicator.Split(self.piece, self.member)
        heads = communicator.Split(self.member, self.piece)
        self.made, self.ring, self.heads = [ring, heads], Ring(ring), group_of(heads)

    def close(self) -> None:
        """Free plans and communicators (collective)."""
        if self.ring:
            self.ring.close()
        for communicator in self.made:
            communicator.Free()
        self.made = []


class ContextAttention(MultiHeadAttention):
    """Multi-head attention of some positions of every sequence.

    Parameters
    ----------
    layer : MultiHeadAttention
    length : int
        T, of whole sequences.
    groups : ContextGroups
    """

    def __init__(self, layer: MultiHeadAttention, length: int, groups: ContextGroups):
        self.copy_attributes(layer)
        self.length, self.groups = length, groups

    def __repr__(self):
        return f"{super().__repr__()[:-1]}, of {self.groups.degrees.size} ranks)"

    def macs(self, in_shape):
        T, D = in_shape
        return 4 * T * D * D + 2 * T * self.length * D

    def positions(self, T, ctx):
        return self.groups.positions(self.length)

    # --------------------------------------------------------------------------------------------- forward, backward

    def attend(self, q, k, v, out, ctx):
        self._padding(len(k), self.length, ctx)  # refuses what one process would, on all ranks alike
        degrees = self.groups.degrees
        if degrees.heads == 1:
            return self._ring(q, k, v, out, ctx)
        heads = [self._to_heads(array, ctx) for array in (q, k, v)]
        y = ctx.empty(heads[0].shape, q.dtype)
        weights = self._ring(*heads, y, ctx) if degrees.ring > 1 else super().attend(*heads, y, ctx)
        out[...] = self._to_positions(y, ctx)
        return (*weights, *heads, y)

    def attend_backward(self, qkv, y, weights, gy, gradients, ctx):
        degrees = self.groups.degrees
        if degrees.heads == 1:
            self._ring_backward(qkv, y, weights, gy, gradients, ctx)
            return
        *weights, q, k, v, y = weights
        gy = self._to_heads(gy, ctx)
        found = tuple(ctx.empty(q.shape, gy.dtype) for _ in gradients)
        backward = self._ring_backward if degrees.ring > 1 else super().attend_backward
        backward((q, k, v), y, weights, gy, found, ctx)
        for target, array in zip(gradients, found, strict=True):
            target[...] = self._to_positions(array, ctx)

    # --------------------------------------------------------------------------------------------- heads (Ulysses)

    def _to_heads(self, array: np.ndarray, ctx) -> np.ndarray:
        """(N, H, my positions, d) of all heads -> (N, my heads, positions of my ring member, d), ascending."""
        group, all_rows = self.groups.heads, self._rows()
        counts = [len(rows) for rows in all_rows]
        N, H, _, d = array.shape
        most = max(counts)
        sent = ctx.empty((group.size, N, H // group.size, most, d), array.dtype)
        sent[:, :, :, : counts[group.rank]] = np.moveaxis(
            array.reshape(N, group.size, H // group.size, counts[group.rank], d), 1, 0
        )
        sent[:, :, :, counts[group.rank] :] = 0
        received = group.all_to_all(sent)
        whole = ctx.empty((N, H // group.size, sum(counts), d), array.dtype)
        for rows, part, count in zip(all_rows, received, counts, strict=True):
            whole[:, :, rows] = part[:, :, :count]
        return whole

    def _to_positions(self, array: np.ndarray, ctx) -> np.ndarray:
        """The way back: (N, my heads, positions of my ring member, d) -> (N, H, my positions, d)."""
        group, all_rows = self.groups.heads, self._rows()
        counts = [len(rows) for rows in all_rows]
        N, H, _, d = array.shape
        most = max(counts)
        sent = ctx.empty((group.size, N, H, most, d), array.dtype)
        for target, rows, count in zip(sent, all_rows, counts, strict=True):
            target[:, :, :count] = array[:, :, rows]
            target[:, :, count:] = 0
        received = group.all_to_all(sent)[:, :, :, : counts[group.rank]]
        return np.moveaxis(received, 0, 1).reshape(N, group.size * H, counts[group.rank], d)

    def _rows(self) -> tuple[np.ndarray, ...]:
        """Where the positions of each rank that shares the heads are among those of the ring member."""
        return member_rows(self.length, self.groups.member, self.groups.degrees)

    # --------------------------------------------------------------------------------------------- ring

    def _members(self) -> list[np.ndarray]:
        """Positions of each member of the ring."""
        degrees = self.groups.degrees
        return [member_positions(self.length, member, degrees) for member in range(degrees.ring)]

    def _running(self, q, ctx) -> BlockwiseAttention:
        mine, size = self._members()[self.groups.member], self.block_size or BLOCK
        return BlockwiseAttention(q, mine, self.causal, size, ctx.network_context.pool)

    def _ring(self, q, k, v, y, ctx) -> tuple:
        members, padding = self._members(), ctx.micro_batch.padding
        running = self._running(q, ctx)
        running.start(y)

        def attend(owner, keys, values):
            at = members[owner]
            running.add(keys, values, at, None if padding is None else padding[:, at])

        self.groups.ring.forward(k, v, list(map(len, members)), attend, f"attention of layer {ctx.path}")
        return (*running.finish(), padding)

    def _ring_backward(self, qkv, y, kept, gy, gradients, ctx) -> None:
        (q, k, v), (gq, gk, gv) = qkv, gradients
        members, (largest, total, padding) = self._members(), kept
        running = self._running(q, ctx)
        running.start_backward(largest, total, y, gy)
        gq[...] = 0

        def attend(owner, keys, values, gkeys, gvalues):
            gkeys[...], gvalues[...] = 0, 0
            at = members[owner]
            mask = None if padding is None else padding[:, at]
            running.add_backward(keys, values, (gq, gkeys, gvalues), at, mask)

        name = f"attention of layer {ctx.path}, backward"
        gk[...], gv[...] = self.groups.ring.backward(k, v, list(map(len, members)), attend, name)
