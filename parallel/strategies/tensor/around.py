"""A layer of which this rank computes a part, and the moves before and behind it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace

from nn.core.layer import Layer, Spec, Split
from parallel.strategies.tensor.moves import Move


class Around(Layer):
    """A move, a layer, a move, under the layer's own name: its arrays and masks are what they were.

    Parameters
    ----------
    layer : Layer
        Takes its sizes from the arrays it is given.
    enter, leave : Move or None
        Before and behind it.
    splits : dict of Split, or None
        How the layer's arrays are cut, by name, others being whole; None: as the layer says.
    late : str
        Name of the array that is added behind a sum of terms, once: the layer is not given it.
    terms : bool
        Whether the gradients of the arrays that are whole are terms, to be summed over the ranks; those of a layer
        that is an Around itself are what it says.
    """

    def __init__(
        self,
        layer: Layer,
        enter: Move | None = None,
        leave: Move | None = None,
        splits: Mapping[str, Split] | None = None,
        late: str = "",
        terms: bool = False,
    ):
        self.layer, self.enter, self.leave = layer, enter, leave
        self.splits, self.late = splits, late
        self.terms = terms or (isinstance(layer, Around) and layer.terms)
        self.ids = layer.ids
        self.synchronized = layer.synchronized

    def __repr__(self):
        return repr(self.layer)  # as errors name it, whoever computes it

    @property
    def output(self):
        kind = "view"
        for each in filter(None, (self.enter, self.layer, self.leave)):
            kind = each.output if each.output != "view" else kind
        return kind

    @property
    def gradient(self):
        chain = filter(None, (self.enter, self.layer, self.leave))
        return "new" if any(each.gradient == "new" for each in chain) else "view"

    def children(self):
        return self.layer.children()

    def child_shapes(self, in_shape):
        return self.layer.child_shapes(in_shape)

    def specs(self, in_shape):
        specs, out_shape = self.layer.specs(in_shape)
        return specs if self.splits is None else _cut(specs, self.splits), out_shape

    def training_shape(self, in_shape):
        return self.layer.training_shape(in_shape)

    def macs(self, in_shape):
        return self.layer.macs(in_shape)

    def plan(self, run):
        self.layer.plan(run)

    def forward(self, p, x, run):
        if self.enter:
            x, _ = self.enter.forward(None, x, run)
        y, saved = self.layer.forward(self._inner(p), x, run)
        if self.leave:
            y, _ = self.leave.forward(None, y, run)
        if (b := getattr(p, self.late, None)) is not None:
            y += b
        return y, saved

    def backward(self, p, g, gy, saved, run):
        if (gb := getattr(g, self.late, None)) is not None:
            run.add_rows(gb, gy.reshape(-1, gy.shape[-1]))
        if self.leave:
            gy = self.leave.backward(None, None, gy, None, run)
        gx = self.layer.backward(self._inner(p), self._inner(g), gy, saved, run)
        if gx is None or not self.enter:
            return gx
        return self.enter.backward(None, None, gx, None, run)

    def _inner(self, views):
        """What the layer is given of its arrays."""
        if not self.late or not hasattr(views, self.late):
            return views
        return SimpleNamespace(**{name: array for name, array in vars(views).items() if name != self.late})


def _cut(tree: dict, splits: Mapping[str, Split]) -> dict:
    """The Specs with these splits and no others."""
    return {
        name: _cut(entry, {}) if isinstance(entry, dict) else _with(entry, splits.get(name))
        for name, entry in tree.items()
    }


def _with(spec: Spec, split: Split | None) -> Spec:
    return spec if spec.split == split else replace(spec, split=split)


def with_children(layer: Layer, children: Iterable[Layer]) -> Layer:
    """A copy of a Sequential, Residual, Branches or Auxiliary that has other layers inside."""
    other = copy.copy(layer)
    if hasattr(layer, "layers"):
        other.layers = tuple(children)
    else:
        vars(other).update(zip(layer.children(), children, strict=True))
    return other
