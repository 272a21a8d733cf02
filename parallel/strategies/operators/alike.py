"""Layers that all ranks of a group compute alike, on something whole, and the moves from and to what is not.

Every rank of the group has all parameters, and the gradients of all ranks are summed. So the gradient of a layer of
which each rank computes something of its own is a term, and that of a layer that all compute alike is counted once: it
is the first rank's, and zero on others. A whole activation has a whole gradient on every rank, which costs no message.
"""

from __future__ import annotations

import numpy as np

from nn.core.layer import Layer
from parallel.strategies.tensor.around import Around
from parallel.strategies.tensor.moves import Cut, Move


class Once(Around):
    """A layer that all ranks compute alike.

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

    def backward(self, p, g, gy, saved, run):
        context = run.context
        ready, context.ready = context.ready, None  # of layers inside: their gradients may be cleared
        gx = super().backward(p, g, gy, saved, run)
        context.ready = ready
        if self.rank:
            run.later(clear, g)
        return gx


class GatherRows(Move):
    """The rows of all ranks, where all go on alike."""

    def __init__(self, height: int):
        self.cut = Cut(1, height)

    def forward(self, p, x, run):
        return self.cut.gather(x, run.group("space"), run), None

    def backward(self, p, g, gy, saved, run):
        return self.cut.take(gy, run.group("space"), run)


def clear(g) -> None:
    """Zero all gradients of a tree of views."""
    for part in g if isinstance(g, tuple) else vars(g).values():
        if isinstance(part, np.ndarray):
            part[...] = 0
        else:
            clear(part)
