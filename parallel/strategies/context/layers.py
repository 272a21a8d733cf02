"""What has to know which positions of a sequence it is given: the ends of a network, rotations, experts, the loss.

Arrays, random numbers and errors are those of one process. Learned positions, sinusoids and dropout are shared with
tensor parallelism (tensor/parts.py).
"""

from __future__ import annotations

import numpy as np

from nn.core.layer import Layer
from nn.layers.embedding import Embedding, RotaryPositions
from nn.layers.experts import MixtureOfExperts
from nn.losses import Loss
from parallel.strategies.context.attention import ContextGroups
from parallel.strategies.context.positions import positions
from parallel.strategies.tensor.moves import Move


class TakePositions(Move):
    """Whole sequences to this rank's positions, before the first layer.

    Parameters
    ----------
    length : int
        T, of whole sequences.
    groups : ContextGroups
    layer : Layer
        Given the positions. An `Embedding`'s ids are checked here, where all ranks refuse them alike, and attention is
        told of the padding of whole sequences.
    """

    def __init__(self, length: int, groups: ContextGroups, layer: Layer):
        self.length, self.rows = length, groups.positions(length)
        ids = isinstance(layer, Embedding)
        self.check, self.vocabulary, self.padding = (
            (layer.check, layer.vocabulary, layer.padding) if ids else (None, 0, None)
        )

    def out_shape(self, in_shape, training):
        return (len(self.rows), *in_shape[1:])

    def forward(self, p, x, ctx):
        if self.check:
            self.check(x, self.vocabulary, ctx)
        if self.padding is not None:
            ctx.micro_batch.padding = x == self.padding
        return np.take(x, self.rows, axis=1), None

    def backward(self, p, gy, saved, ctx):
        whole = ctx.empty((len(gy), self.length, *gy.shape[2:]), gy.dtype)  # a term: other ranks have the others
        whole[...] = 0
        whole[:, self.rows] = gy
        return whole, {}


class ShowPositions(Move):
    """The outputs of all positions in evaluation, behind the last layer; in training the loss works with some."""

    output = gradient = "view"

    def __init__(self, length: int, groups: ContextGroups):
        self.length, self.degrees = length, groups.degrees
        self.rows = groups.positions(length)

    def out_shape(self, in_shape, training):
        return in_shape if training else (self.length, *in_shape[1:])

    def forward(self, p, x, ctx):
        if ctx.training:
            return x, None
        rows = [positions(self.length, rank, self.degrees) for rank in range(self.degrees.size)]
        mine = np.zeros((len(x), max(map(len, rows)), *x.shape[2:]), x.dtype)
        mine[:, : x.shape[1]] = x
        whole = ctx.empty((len(x), self.length, *x.shape[2:]), x.dtype)
        for at, part in zip(rows, ctx.group("context").all_gather(mine), strict=True):
            whole[:, at] = part[:, : len(at)]
        return whole, None

    def backward(self, p, gy, saved, ctx):
        return (gy if ctx.training else gy[:, self.rows]), {}


class ContextLoss(Loss):
    """The part of a loss that this rank's positions have; in evaluation the whole of it."""

    def __init__(self, loss: Loss, length: int, groups: ContextGroups):
        self.loss, self.positions = loss, groups.positions(length)

    def __repr__(self):
        return repr(self.loss)

    def rows(self, out_shape):
        return self.loss.rows(out_shape)

    def __call__(self, z, target, total_weight, ctx):
        target = np.take(target, self.positions, axis=1) if ctx.training else target
        return self.loss(z, target, total_weight, ctx)


class ContextRotaryPositions(RotaryPositions):
    """The angles of this rank's positions."""

    def __init__(self, layer: RotaryPositions, length: int, groups: ContextGroups):
        self.mine = groups.positions(length)

    def positions(self, T):
        return self.mine


class ContextExperts(MixtureOfExperts):
    """A mixture of experts for some positions: the auxiliary losses count the choices of whole samples."""

    def __init__(self, layer: MixtureOfExperts, length: int, groups: ContextGroups):
        self.copy_attributes(layer)
        self.length, self.groups = length, groups

    def draw_noise(self, shape, ctx):
        whole = super().draw_noise((shape[0], self.length, *shape[2:]), ctx)
        return None if whole is None else whole[:, self.groups.positions(self.length)]

    def count_choices(self, chosen, samples, ctx):
        counts = super().count_choices(chosen, samples, ctx)
        ctx.group("context").sum(counts)
        return counts

    def sample_length(self, positions):
        return self.length
