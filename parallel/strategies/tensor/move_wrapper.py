"""A layer of which this rank computes a part, and the moves before and behind it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from nn.core.containers import Wrapper
from nn.core.gradients import RowSum
from nn.core.layer import Layer, Sequential, Shape, last_kind
from nn.core.layout import Views
from parallel.state.splits import Split, split_of, with_split
from parallel.strategies.tensor.moves import Move


class MoveWrapper(Wrapper):
    """A move, a layer, a move, under the layer's own name: its arrays and masks are what they were.

    Parameters
    ----------
    layer : Layer
        Takes its sizes from the arrays it is given.
    enter, leave : Move or None
        Before and behind it.
    splits : dict of Split, or None
        How the layer's arrays are cut, by name, others being whole; None: as the layers inside say.
    late : str
        Name of the array that is added after a sum over the ranks, once: the layer is not given it.
    partial : bool
        Whether the gradients of replicated arrays are partial, to be summed over the ranks; those of a layer
        that is a MoveWrapper itself are what it says.
    """

    def __init__(
        self,
        layer: Layer,
        enter: Move | None = None,
        leave: Move | None = None,
        splits: Mapping[str, Split] | None = None,
        late: str = "",
        partial: bool = False,
    ):
        super().__init__(layer)
        self.enter, self.leave = enter, leave
        self.splits, self.late = splits, late
        self.partial = partial or (isinstance(layer, MoveWrapper) and layer.partial)

    @property
    def output(self):
        return last_kind(each.output for each in (self.leave, self.layer, self.enter) if each)

    @property
    def gradient(self):
        return last_kind(each.gradient for each in (self.enter, self.layer, self.leave) if each)

    def specs(self, in_shape):
        specs, out_shape = self.layer.specs(self._entered(in_shape))
        specs = specs if self.splits is None else _cut(specs, self.splits)
        return specs, self.leave.out_shape(out_shape, False) if self.leave else out_shape

    def training_shape(self, in_shape):
        shape = self.layer.training_shape(self._entered(in_shape))
        return self.leave.out_shape(shape, True) if self.leave else shape

    def child_shapes(self, in_shape):
        return self.layer.child_shapes(self._entered(in_shape))

    def macs(self, in_shape):
        return self.layer.macs(self._entered(in_shape))

    def _entered(self, in_shape: Shape) -> Shape:
        """The shape of a sample that the layer is given."""
        return self.enter.out_shape(in_shape, True) if self.enter else in_shape

    def forward(self, p, x, ctx):
        if self.enter:
            x, _ = self.enter.forward(None, x, ctx)
        y, saved = self.layer.forward(self._inner(p), x, ctx)
        if self.leave:
            y, _ = self.leave.forward(None, y, ctx)
        if (b := getattr(p, self.late, None)) is not None:
            y += b
        return y, saved

    def backward(self, p, gy, saved, ctx):
        late = {}
        if hasattr(p, self.late):  # now: what moves next may lie where gy is
            late[self.late] = ctx.materialize(self.late, RowSum(gy.reshape(-1, gy.shape[-1])))
        if self.leave:
            gy, _ = self.leave.backward(None, gy, None, ctx)
        gx, gradients = self.layer.backward(self._inner(p), gy, saved, ctx)
        if gx is not None and self.enter:
            gx, _ = self.enter.backward(None, gx, None, ctx)
        return gx, gradients | late

    def _inner(self, views):
        """What the layer is given of its arrays."""
        if not self.late or not hasattr(views, self.late):
            return views
        return Views(**{name: array for name, array in vars(views).items() if name != self.late})


def _cut(tree: dict, splits: Mapping[str, Split]) -> dict:
    """The Specs with these splits and no others."""
    return {
        name: _cut(entry, {})
        if isinstance(entry, dict)
        else entry
        if split_of(entry) == splits.get(name)
        else with_split(entry, splits.get(name))
        for name, entry in tree.items()
    }


def behind(layer: Layer, move: Move) -> Layer:
    """The layer, and then the move; of a Sequential, behind its last child, so that its children stay its own."""
    if isinstance(layer, Sequential):
        *before, last = layer.layers
        return with_children(layer, (*before, behind(last, move)))
    if isinstance(layer, MoveWrapper) and layer.leave is None:
        return MoveWrapper(layer.layer, layer.enter, move, layer.splits, layer.late, layer.partial)
    return MoveWrapper(layer, leave=move)


def with_children(layer: Layer, children: Iterable[Layer]) -> Layer:
    """A copy of a Sequential, Residual, Parallel or Auxiliary that has other layers inside."""
    other = copy.copy(layer)
    if hasattr(layer, "layers"):
        other.layers = tuple(children)
    else:
        vars(other).update(zip(layer.children(), children, strict=True))
    return other
