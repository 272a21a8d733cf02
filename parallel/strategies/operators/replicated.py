"""Replicated layers, which all ranks of a group compute identically, and the move that gathers their input.

Every rank of the group has all parameters, and the gradients of all ranks are summed. So the gradient of a layer of
which each rank computes something of its own is partial, and that of a replicated layer is counted once: it is the
first rank's, and zero on others. A replicated activation has a replicated gradient, which costs no message.
"""

from __future__ import annotations

from nn.core.gradients import zero
from nn.core.layer import Layer
from parallel.strategies.tensor.move_wrapper import MoveWrapper
from parallel.strategies.tensor.moves import Cut, Move


class ReplicatedLayer(MoveWrapper):
    """A layer that all ranks compute identically.

    Parameters
    ----------
    layer : Layer
    rank : int
        This one, in its group.
    enter : Move or None
        What makes the input whole.
    """

    def __init__(self, layer: Layer, rank: int, enter: Move | None = None):
        super().__init__(layer, enter)
        self.rank = rank

    def backward(self, p, gy, saved, ctx):
        context = ctx.network_context
        announce, context.on_gradients_ready = context.on_gradients_ready, None  # of layers inside: they may be cleared
        gx, gradients = super().backward(p, gy, saved, ctx)
        context.on_gradients_ready = announce
        if self.rank:
            ctx.defer(zero, ctx.gradients)
            gradients = {}
        return gx, gradients


class GatherRows(Move):
    """The rows of all ranks, which all of them process identically."""

    def __init__(self, height: int):
        self.cut = Cut(1, height)

    def forward(self, p, x, ctx):
        return self.cut.all_gather(x, ctx.group("space"), ctx), None

    def backward(self, p, gy, saved, ctx):
        return self.cut.scatter(gy, ctx.group("space"), ctx), {}
