"""Layers that need to know which part of an activation they are given: embedding, dropout, positions.

Their random numbers and their errors are those of one process.
"""

from __future__ import annotations

import copy

import numpy as np

from nn.core.containers import Wrapper
from nn.core.gradients import ScatterAdd
from nn.layers.dropout import Dropout, keep_mask
from nn.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions, sinusoids
from parallel.strategies.tensor.moves import Cut


class SplitEmbedding(Wrapper):
    """Some rows of the table: ids that other ranks have give zeros, so that a sum over the ranks looks up all."""

    def __init__(self, layer: Embedding):
        super().__init__(layer)
        self.rows = copy.copy(layer)
        self.rows.padding = None  # which is set here, from all ids

    def forward(self, p, x, ctx):
        self.layer.check(x, self.layer.vocabulary, ctx)
        if self.layer.padding is not None:
            ctx.micro_batch.padding = x == self.layer.padding
        group = ctx.group("tensor")
        lo, hi = Cut(-1, self.layer.vocabulary).bounds(group.rank, group.size)
        elsewhere = (x < lo) | (x >= hi)
        mine = np.where(elsewhere, 0, x - lo)
        y, saved = self.rows.forward(p, mine, ctx)
        y[elsewhere] = 0
        return y, (saved, elsewhere)

    def backward(self, p, gy, saved, ctx):
        saved, elsewhere = saved
        mine = ctx.empty(gy.shape, gy.dtype)
        mine[...] = gy
        mine[elsewhere] = 0
        return self.rows.backward(p, mine, saved, ctx)


class SplitDropout(Wrapper):
    """This rank's part of the mask that one process draws.

    Parameters
    ----------
    layer : Dropout
    cut : Cut or None
        How the ranks on `axis` share what they are given together; None: each has all of it.
    axis : str
    positions : array of int, or None
        Which positions of sequences of `length` they have together; None for all.
    length : int
    """

    def __init__(
        self,
        layer: Dropout,
        cut: Cut | None,
        axis: str = "tensor",
        positions: np.ndarray | None = None,
        length: int = 0,
    ):
        super().__init__(layer)
        self.cut, self.axis, self.positions, self.length = cut, axis, positions, length

    def forward(self, p, x, ctx):
        if not ctx.training or self.layer.keep_count == 65536:
            return x, None
        whole, mine, cut = list(x.shape), self.positions, self.cut
        if cut:
            whole[cut.axis] = cut.size
            if cut.axis == 1 and cut.blocks == 1:  # a stretch of the positions that these ranks have together
                group = ctx.group(self.axis)
                mine = np.arange(*cut.bounds(group.rank, group.size)) if mine is None else _share(mine, cut, group)
                cut = None
        if self.positions is not None:
            whole[1] = self.length
        mask = keep_mask(self.layer.keep_count, tuple(whole), ctx, mine)
        if cut:
            mask = cut.scatter(mask, ctx.group(self.axis), ctx)
        y = np.multiply(x, mask, ctx.reuse_input(x))
        y *= 65536 / self.layer.keep_count
        return y, mask

    def backward(self, p, gy, mask, ctx):
        return self.layer.backward(p, gy, mask, ctx)


class OfPositions(Wrapper):
    """Base: a layer that adds something of each position, and is given some of them.

    Parameters
    ----------
    layer : Layer
    positions : array of int
        Which positions of the whole sequence the ranks of the axis "tensor" have together.
    cut : Cut or None
        How these ranks share them; None: each has all.
    """

    def __init__(self, layer: LearnedPositions | SinusoidalPositions, positions: np.ndarray, cut: Cut | None = None):
        super().__init__(layer)
        self.positions, self.cut = positions, cut

    def rows(self, ctx) -> np.ndarray:
        """The positions of this rank."""
        if self.cut is None:
            return self.positions
        return _share(self.positions, self.cut, ctx.group("tensor"))


class SplitPositions(OfPositions):
    """The vectors of this rank's positions."""

    def forward(self, p, x, ctx):
        return np.add(x, p.W[self.rows(ctx)], ctx.reuse_input(x)), None

    def backward(self, p, gy, saved, ctx):
        return (gy if ctx.needs_input_grad else None), {"W": ScatterAdd(self.rows(ctx), gy.sum(axis=0))}


class SplitSinusoids(OfPositions):
    """The sines of this rank's positions."""

    def forward(self, p, x, ctx):
        rows = self.rows(ctx)
        return np.add(x, sinusoids(int(rows.max(initial=0)) + 1, x.shape[2], x.dtype)[rows], ctx.reuse_input(x)), None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


def _share(positions: np.ndarray, cut: Cut, group) -> np.ndarray:
    """This rank's part of the positions."""
    return positions[slice(*cut.bounds(group.rank, group.size))]
