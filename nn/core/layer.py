"""The contract between a layer and everything else.

A layer holds hyper-parameters and **no arrays**. Parameters, gradients and what backward needs are handed in and out:

    specs, out_shape = layer.specs(in_shape)         # what it needs, and what it makes of one sample
    y, saved = layer.forward(p, x, run)              # p: views of the parameters; saved: all that backward needs
    gx = layer.backward(p, g, gy, saved, run)        # adds to g (views of the gradients), returns dLoss/dx

So one layer serves one process and many, and whoever trains it decides where arrays are, and when what is computed. The
rules, and what each is good for:

Arrays. Never write into x or gy unless `run` says that they are free. The output has the dtype of the input.

Micro-batches. Several may be in flight, in any order: forward, forward, backward, backward. So all that backward needs
of forward is in `saved`, which belongs to the caller and never holds a workspace; and what is known of the samples
(which they are, their padding, whether their gradients add to others') is in `run.micro_batch`, never in the layer.

Gradients. They are added by `run.add`, `run.add_product` and `run.add_rows`, or by a function given to `run.later`, and
not otherwise. For a pass can ask for dLoss/dx first, which the stage before waits for, and for the parameters'
gradients later: then these calls only note what is to be done. So what they are given is no workspace (an operand that
has to be made comes from `run.operand`), and nothing that this layer returns or overwrites. What they do reads no
parameters, which may have changed by then.

Names. An array's full name, such as "2.W", says which random numbers it is drawn from; a dropout layer's path, which
masks it draws. A Sequential counts from `first`, so a stage of a network (stages.py) draws what the whole one does.

Sizes. A Spec has the shape of the whole array, and `split` says how it may be cut into parts (parts.py). So forward and
backward take sizes from the arrays in p, and a layer computes with a part as with the whole: its share of the outputs,
or a result that is to be summed. An array that is added to such a sum, and whole on every rank, may be missing in p:
then it is added elsewhere, once.

Other ranks. A layer reaches them by `run.group(name)` only: a sum, a maximum, a gather, and their like. One that says
`channelwise` can be given some of the channels of x, the last axis, and makes those of y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nn.core.run import Run, Shape

Initializer = Callable[[np.random.Generator, Shape], np.ndarray]


@dataclass(frozen=True)
class Split:
    """How an array may be cut into parts, for ranks that compute one layer together (nn/core/parts.py).

    Parameters
    ----------
    axis : int
        The axis that is cut.
    blocks : int
        Along it lie so many blocks of one size, and every part gets its share of each: 3 where queries, keys and values
        are one matrix.
    units : int
        What a block consists of and is never cut, such as heads; all parts get equally many. 0: single entries, of
        which parts may have one more or less.
    """

    axis: int
    blocks: int = 1
    units: int = 0


@dataclass(frozen=True)
class Spec:
    """One array that a layer needs.

    Parameters
    ----------
    shape : tuple of int
    init : callable (Generator, shape) -> array
        Draws the first value; see nn/initializers.py.
    decay : bool
        Whether weight decay and layer-wise rates apply (no for biases and normalisation).
    state : bool
        True for running statistics: kept with the parameters, but not trained.
    tied : str
        Full name, such as "0.W", of the array of an earlier layer that this one **is**: one array and one gradient,
        to which both layers add. It must have this shape, and each of the layers no other parameters.
    split : Split or None
        How it may be cut; None: it is whole on every rank. `shape` is always that of the whole array.
    """

    shape: Shape
    init: Initializer
    decay: bool = True
    state: bool = False
    tied: str = ""
    split: Split | None = None

    def __post_init__(self):
        if not all(isinstance(n, (int, np.integer)) for n in self.shape):
            raise ShapeError(f"sizes must be whole numbers, given shape {self.shape}")
        if self.init is not None and not callable(self.init):  # None where nothing is drawn
            raise TypeError(
                f"first values, here of an array of shape {self.shape}, come from a function (rng, shape) -> array, "
                f"such as nn.initializers.he, given {self.init!r:.80}"
            )
        if (split := self.split) is None:
            return
        size = self.shape[split.axis] if 0 <= split.axis < len(self.shape) else 0
        if split.blocks < 1 or not size or size % (split.blocks * (split.units or 1)):
            raise ShapeError(f"an array of shape {self.shape} does not consist of what {split} says")


class ShapeError(ValueError):
    """A layer cannot take what it is given; the message names the layer, expected and given."""


class Layer:
    """Base of all layers: one input array, one output array, batch axis first.

    Attributes
    ----------
    output : {"new", "view", "kept"}
        What forward returns: a new array, a view of its input, or an array that `saved` holds as well. A container
        tells from it which arrays the next layer may overwrite.
    gradient : {"new", "view"}
        What backward returns: a new array, or gy itself (perhaps overwritten or reshaped).
    ids : bool
        Whether x holds integer ids; every other layer takes floats of the network's dtype.
    channelwise : bool
        Whether each entry of the last axis of y is made of that entry of x alone, whatever their number: then ranks can
        have some of them each.
    synchronized : bool
        Whether it takes statistics over all ranks that share a batch, so that every one of them has to be there.
    """

    output = "new"
    gradient = "new"
    ids = False
    channelwise = synchronized = False

    def specs(self, in_shape: Shape) -> tuple[dict[str, Spec | dict], Shape]:
        """What the layer needs, and its output's shape in evaluation; the batch axis is left out of both shapes."""
        return {}, in_shape

    def training_shape(self, in_shape: Shape) -> Shape:
        """Shape of the output in training, where a layer may put out more than in evaluation; by default the same."""
        return self.specs(in_shape)[1]

    def forward(self, p: Any, x: np.ndarray, run: Run) -> tuple[np.ndarray, Any]:
        """Compute (y, saved) for a batch x of shape (N, *in_shape)."""
        raise TypeError(f"{type(self).__name__} does not define forward")

    def backward(self, p: Any, g: Any, gy: np.ndarray, saved: Any, run: Run) -> np.ndarray | None:
        """Add to the gradients g and return dLoss/dx, or None where `run.wants_gx` is False."""
        raise TypeError(f"{type(self).__name__} does not define backward")

    def children(self) -> dict[str, Layer]:
        """The layers inside, by name, in the order in which forward uses them; none for a plain layer."""
        return {}

    def plan(self, run: Run) -> None:
        """A container tells its children's runs which arrays they may overwrite; by default none."""

    def child_shapes(self, in_shape: Shape) -> list[Shape]:
        """What each child takes: what the one before makes, unless a container says otherwise."""
        shapes = [in_shape]
        for child in self.children().values():
            shapes.append(child.specs(shapes[-1])[1])
        return shapes[:-1]

    def macs(self, in_shape: Shape) -> int:
        """Multiply-accumulates of one sample's forward pass; 0 for elementwise layers, as is customary."""
        shapes = self.child_shapes(in_shape)
        return sum(child.macs(shape) for child, shape in zip(self.children().values(), shapes, strict=True))


class Sequential(Layer):
    """Layers one after the other; their names are their positions: "0", "1", ...

    Parameters
    ----------
    *layers : Layer
    first : int
        The first one's position: that which it has in a whole network of which these are a stage (nn/core/stages.py).
    """

    def __init__(self, *layers: Layer, first: int = 0):
        if not layers:
            raise ValueError("Sequential needs at least one layer")
        if not isinstance(first, int) or first < 0:
            raise ValueError(f"Sequential: first must be a position, 0 or more, given {first!r}")
        check_layers("Sequential", *layers)
        self.layers, self.first = layers, first

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.layers))}{f', first={self.first}' if self.first else ''})"

    def children(self) -> dict[str, Layer]:
        return {str(i): layer for i, layer in enumerate(self.layers, self.first)}

    def specs(self, in_shape: Shape) -> tuple[dict, Shape]:
        specs, shape = {}, in_shape
        for name, layer in self.children().items():
            specs[name], shape = child_specs(name, layer, shape)
        return specs, shape

    def training_shape(self, in_shape: Shape) -> Shape:
        shape = in_shape
        for name, layer in self.children().items():
            child_specs(name, layer, shape)  # what fits in evaluation only is refused here
            shape = layer.training_shape(shape)
        return shape

    @property
    def output(self) -> str:
        kind = "view"
        for layer in self.layers:
            kind = layer.output if layer.output != "view" else kind
        return kind

    @property
    def gradient(self) -> str:
        return "new" if any(layer.gradient == "new" for layer in self.layers) else "view"

    def plan(self, run: Run) -> None:
        """Tell each child whether it is first, and which arrays it may overwrite."""
        free = run.x_free
        for layer, child in zip(self.layers, run.children, strict=True):
            child.x_free = free
            free = {"new": True, "kept": False, "view": free}[layer.output]
        free = run.gy_free
        for layer, child in zip(reversed(self.layers), reversed(run.children), strict=True):
            child.gy_free = free
            free = free or layer.gradient == "new"
        start = run.children[0].end if run.children else run.end
        for child in run.children:  # the layers up to and with the first that has parameters
            child.first = run.first and child.end == start

    def forward(self, p, x, run):
        saved = []
        watch, fetch, half = run.context.watch, run.context.fetch, run.context.half
        for layer, pl, rl in zip(self.layers, p, run.children, strict=True):
            if fetch:
                fetch(rl)
            if half:
                x = half.take(pl, x, rl)
            x, kept = as_pair(layer.forward(pl, x, rl), layer, rl)
            saved.append(kept if half is None or rl.children else half.keep(kept, x))
            if watch:
                watch(rl.path, layer, x)
        return x, saved

    def backward(self, p, g, gy, saved, run):
        ready, fetch, half = run.context.ready, run.context.fetch, run.context.half
        for i in range(len(self.layers) - 1, -1, -1):
            child = run.children[i]
            if fetch:
                fetch(child)
            if half:
                gy, saved[i] = half.restore(p[i], gy, saved[i], child)
            gy = self.layers[i].backward(p[i], g[i], gy, saved[i], child)
            saved[i] = None  # its memory can serve the layers below
            if ready:
                child.later(ready, child.end)
            if gy is None:
                break
        return gy


def check_layers(container: str, *layers: Layer) -> None:
    """Refuse what is no layer, by its position."""
    for i, layer in enumerate(layers):
        if isinstance(layer, list | tuple):
            raise TypeError(
                f"{container}: entry {i} is a {type(layer).__name__} of layers: Sequential(*layers) puts them together"
            )
        if not isinstance(layer, Layer):
            raise TypeError(f"{container}: entry {i} is {layer!r}, not a Layer (an instance, not the class)")


def as_pair(result: Any, layer: Layer, run: Run) -> tuple[np.ndarray, Any]:
    """Return what a layer's forward has returned; refuse anything but a pair (y, saved)."""
    if type(result) is not tuple or len(result) != 2:
        made = f"an array of shape {result.shape}" if isinstance(result, np.ndarray) else f"{result!r:.80}"
        place = f"layer {run.path} ({layer!r})" if run.path else f"{layer!r}"
        raise TypeError(
            f"{place}: forward must return a pair (y, saved), the output and what backward needs (None if nothing), "
            f"given {made}"
        )
    return result


def check_tree(root: Layer) -> None:
    """Refuse a layer object that stands in two places, and a layer that hides layers from the network.

    Raises
    ------
    ValueError
        One object twice: it would have two sets of weights.
    TypeError
        A layer that holds layers and declares no `children`, or has children and no `specs`: their weights would be
        missing.
    """
    places: dict[int, str] = {}
    waiting = [("", root)]
    while waiting:
        path, layer = waiting.pop()
        kind, place = type(layer).__name__, f"layer {path} ({layer!r:.80})" if path else f"{layer!r:.80}"
        if id(layer) in places:
            raise ValueError(
                f"{place} is the same object as layer {places[id(layer)]}: each place would have weights of its own. "
                "Make two layers; where weights are to be shared, one layer's Spec says tied= (see TiedLinear)"
            )
        places[id(layer)] = path
        children = layer.children()
        if type(layer).specs is Layer.specs:
            names = [*children] or [name for name, value in vars(layer).items() if _holds_layers(value)]
            lacks = "specs()" if children else "children() and specs()"
            if names:
                raise TypeError(
                    f"{place}: it holds layers ({', '.join(names)}) whose weights the network cannot see: {kind} needs "
                    f"{lacks}, as Sequential and Residual have"
                )
        waiting += [(f"{path}.{name}" if path else name, child) for name, child in children.items()]


def _holds_layers(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(part, Layer) for part in parts)


def check_numbers(layer: str, **values: object) -> None:
    """Refuse arguments of a layer's, or a loss's, constructor that are no numbers, by their names."""
    for name, value in values.items():
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"{layer}: {name} must be a number, given {value!r:.80}")


def child_specs(name: str, layer: Layer, in_shape: Shape) -> tuple[dict, Shape]:
    """layer.specs(in_shape), with the layer's place and name put before any complaint."""
    try:
        return layer.specs(in_shape)
    except ShapeError as error:
        text = str(error)
        inner = text.startswith("layer ")
        place = f"layer {name} ({layer!r})" if name else repr(layer)
        raise ShapeError(f"layer {name}.{text[6:]}" if inner else f"{place}: {text}") from None
