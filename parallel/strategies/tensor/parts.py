"""Layers that need to know which part of an activation they are given: embedding, dropout, positions.

Their random numbers and their errors are those of one process.
"""

from __future__ import annotations

import copy

import numpy as np

from nn.core.containers import Wrapper
from nn.core.gradients import write_gradient
from nn.core.layout import Views
from nn.layers.dropout import Dropout, keep_mask
from nn.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions, sinusoids
from parallel.strategies.tensor.moves import Cut


class SplitEmbedding(Wrapper):
    """Some rows of the table: ids that other ranks have give zeros, so that a sum over the ranks looks up all."""

    def __init__(self, layer: Embedding):
        super().__init__(layer)
        self.rows = copy.copy(layer)
        self.rows.padding = None  # which is told here: of all ids

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
    """This rank's part of the mask that one process draws, of the ranks on an axis."""

    def __init__(self, layer: Dropout, cut: Cut, axis: str = "tensor"):
        super().__init__(layer)
        self.cut, self.axis = cut, axis

    def forward(self, p, x, ctx):
        if not ctx.training or self.layer.kept == 65536:
            return x, None
        whole = list(x.shape)
        whole[self.cut.axis] = self.cut.size
        mask = self.cut.take(keep_mask(self.layer.kept, tuple(whole), ctx), ctx.group(self.axis), ctx)
        y = np.multiply(x, mask, ctx.reuse_input(x))
        y *= 65536 / self.layer.kept
        return y, mask

    def backward(self, p, gy, mask, ctx):
        return self.layer.backward(p, gy, mask, ctx)


class SplitPositions(Wrapper):
    """The vectors of this rank's places."""

    def __init__(self, layer: LearnedPositions, cut: Cut):
        super().__init__(layer)
        self.cut = cut

    def forward(self, p, x, ctx):
        mine = slice(*self._bounds(ctx))
        return self.layer.forward(Views(W=p.W[mine]), x, ctx)

    def backward(self, p, gy, saved, ctx):
        lo, hi = self._bounds(ctx)
        gx, gradients = self.layer.backward(Views(W=p.W[lo:hi]), gy, saved, ctx)
        gW = np.zeros_like(p.W)
        write_gradient(gW[lo:hi], gradients["W"], False, ctx.network_context.pool)
        return gx, {"W": gW}

    def _bounds(self, ctx):
        group = ctx.group("tensor")
        return self.cut.bounds(group.rank, group.size)


class SplitSinusoids(Wrapper):
    """The sines of this rank's places."""

    def __init__(self, layer: SinusoidalPositions, cut: Cut):
        super().__init__(layer)
        self.cut = cut

    def forward(self, p, x, ctx):
        group = ctx.group("tensor")
        lo, hi = self.cut.bounds(group.rank, group.size)
        return np.add(x, sinusoids(self.cut.size, x.shape[2], x.dtype)[lo:hi], ctx.reuse_input(x)), None

    def backward(self, p, gy, saved, ctx):
        return gy, {}
