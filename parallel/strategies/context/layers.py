"""Layers that have to know which positions of a sequence they are given: the first one, positions, dropout, experts.

Their arrays, their random numbers and their errors are those of one process.
"""

from __future__ import annotations

import copy

import numpy as np

from nn.core.containers import Wrapper
from nn.core.gradients import ScatterAdd
from nn.core.layer import Layer
from nn.layers.dropout import Dropout, keep_mask
from nn.layers.embedding import Embedding, LearnedPositions, RotaryPositions, SinusoidalPositions, sinusoids
from nn.layers.experts import MixtureOfExperts
from parallel.strategies.context.attention import ContextGroups
from parallel.strategies.context.positions import positions


class OfPositions(Wrapper):
    """Base: a layer that is given some positions of sequences of `length`."""

    def __init__(self, layer: Layer, length: int, groups: ContextGroups):
        super().__init__(layer)
        self.length, self.groups = length, groups

    @property
    def rows(self) -> np.ndarray:
        """The positions of this rank."""
        return positions(self.length, self.groups.rank, self.groups.degrees)


class TakePositions(OfPositions):
    """Take this rank's positions of whole sequences, then run the layer.

    Where it is an `Embedding` with padding, attention is told of the padding of whole sequences.
    """

    output, gradient = "kept", "new"

    def __init__(self, layer: Layer, length: int, groups: ContextGroups):
        super().__init__(layer, length, groups)
        self.inner, self.padding = layer, None
        if isinstance(layer, Embedding) and layer.padding is not None:
            self.inner, self.padding = copy.copy(layer), layer.padding
            self.inner.padding = None

    def forward(self, p, x, ctx):
        if self.padding is not None:
            ctx.micro_batch.padding = x == self.padding
        return self.inner.forward(p, np.take(x, self.rows, axis=1), ctx)

    def backward(self, p, gy, saved, ctx):
        gx, gradients = self.inner.backward(p, gy, saved, ctx)
        if gx is None or not ctx.needs_input_grad:
            return None, gradients
        whole = ctx.empty((len(gx), self.length, *gx.shape[2:]), gx.dtype)  # a term: other ranks have the others
        whole[...] = 0
        whole[:, self.rows] = gx
        return whole, gradients


class ContextLearnedPositions(OfPositions):
    """The vectors of this rank's positions."""

    layer: LearnedPositions

    def forward(self, p, x, ctx):
        return np.add(x, p.W[self.rows], ctx.reuse_input(x)), None

    def backward(self, p, gy, saved, ctx):
        rows = np.broadcast_to(self.rows, gy.shape[:2])
        return (gy if ctx.needs_input_grad else None), {"W": ScatterAdd(rows, gy)}


class ContextSinusoids(OfPositions):
    """The sines of this rank's positions."""

    layer: SinusoidalPositions

    def forward(self, p, x, ctx):
        return np.add(x, sinusoids(self.length, x.shape[2], x.dtype)[self.rows], ctx.reuse_input(x)), None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


class ContextRotaryPositions(RotaryPositions):
    """The angles of this rank's positions."""

    def __init__(self, layer: RotaryPositions, length: int, groups: ContextGroups):
        self.length, self.groups = length, groups

    def positions(self, T):
        return positions(self.length, self.groups.rank, self.groups.degrees)


class ContextDropout(OfPositions):
    """This rank's positions of the mask that one process draws."""

    layer: Dropout

    def forward(self, p, x, ctx):
        if not ctx.training or self.layer.kept == 65536:
            return x, None
        mask = keep_mask(self.layer.kept, (len(x), self.length, *x.shape[2:]), ctx)[:, self.rows]
        y = np.multiply(x, mask, ctx.reuse_input(x))
        y *= 65536 / self.layer.kept
        return y, mask

    def backward(self, p, gy, mask, ctx):
        return self.layer.backward(p, gy, mask, ctx)


class ContextExperts(MixtureOfExperts):
    """A mixture of experts for some positions: the auxiliary losses count the choices of whole samples."""

    def __init__(self, layer: MixtureOfExperts, length: int, groups: ContextGroups):
        vars(self).update({name: value for name, value in vars(layer).items() if name != "_fixed"})
        self.length, self.groups = length, groups

    def count_choices(self, chosen, samples, ctx):
        counts = super().count_choices(chosen, samples, ctx)
        ctx.group("context").sum(counts)
        return counts

    def sample_length(self, positions):
        return self.length
