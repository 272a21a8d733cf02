"""Layers that need to know which part of an activation they are given: embedding, dropout, positions.

Their random numbers and their errors are those of one process.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np

from nn.core.layer import Layer
from nn.layers.dropout import Dropout, keep_mask
from nn.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions, sinusoids
from parallel.strategies.tensor.moves import Cut


class Inner(Layer):
    """Base: in the place of a layer, whose arrays and shapes it has."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.output, self.gradient, self.ids = layer.output, layer.gradient, layer.ids

    def __repr__(self):
        return repr(self.layer)

    def specs(self, in_shape):
        return self.layer.specs(in_shape)

    def macs(self, in_shape):
        return self.layer.macs(in_shape)


class SplitEmbedding(Inner):
    """Some rows of the table: ids that other ranks have give zeros, so that a sum over the ranks looks up all."""

    def __init__(self, layer: Embedding):
        super().__init__(layer)
        self.rows = copy.copy(layer)
        self.rows.padding = None  # which is told here: of all ids

    def forward(self, p, x, run):
        self.layer.check(x, self.layer.vocabulary, run)
        if self.layer.padding is not None:
            run.micro_batch.padding = x == self.layer.padding
        group = run.group("tensor")
        lo, hi = Cut(-1, self.layer.vocabulary).bounds(group.rank, group.size)
        elsewhere = (x < lo) | (x >= hi)
        mine = np.where(elsewhere, 0, x - lo)
        y, saved = self.rows.forward(p, mine, run)
        y[elsewhere] = 0
        return y, (saved, elsewhere)

    def backward(self, p, g, gy, saved, run):
        saved, elsewhere = saved
        mine = run.empty(gy.shape, gy.dtype)
        mine[...] = gy
        mine[elsewhere] = 0
        return self.rows.backward(p, g, mine, saved, run)


class SplitDropout(Inner):
    """This rank's part of the mask that one process draws, of the ranks on an axis."""

    def __init__(self, layer: Dropout, cut: Cut, axis: str = "tensor"):
        super().__init__(layer)
        self.cut, self.axis = cut, axis

    def forward(self, p, x, run):
        if not run.training or self.layer.kept == 65536:
            return x, None
        whole = list(x.shape)
        whole[self.cut.axis] = self.cut.size
        mask = self.cut.take(keep_mask(self.layer.kept, tuple(whole), run), run.group(self.axis), run)
        y = np.multiply(x, mask, run.like_x(x))
        y *= 65536 / self.layer.kept
        return y, mask

    def backward(self, p, g, gy, mask, run):
        return self.layer.backward(p, g, gy, mask, run)


class SplitPositions(Inner):
    """The vectors of this rank's places."""

    def __init__(self, layer: LearnedPositions, cut: Cut):
        super().__init__(layer)
        self.cut = cut

    def forward(self, p, x, run):
        mine = slice(*self._bounds(run))
        return self.layer.forward(SimpleNamespace(W=p.W[mine]), x, run)

    def backward(self, p, g, gy, saved, run):
        lo, hi = self._bounds(run)
        for other in g.W[:lo], g.W[hi:]:
            run.add(other, np.zeros_like(other))
        part = SimpleNamespace(W=g.W[lo:hi])
        return self.layer.backward(None, part, gy, saved, run)

    def _bounds(self, run):
        group = run.group("tensor")
        return self.cut.bounds(group.rank, group.size)


class SplitSinusoids(Inner):
    """The sines of this rank's places."""

    def __init__(self, layer: SinusoidalPositions, cut: Cut):
        super().__init__(layer)
        self.cut = cut

    def forward(self, p, x, run):
        group = run.group("tensor")
        lo, hi = self.cut.bounds(group.rank, group.size)
        return np.add(x, sinusoids(self.cut.size, x.shape[2], x.dtype)[lo:hi], run.like_x(x)), None

    def backward(self, p, g, gy, saved, run):
        return gy
