"""The contract between a layer and everything else.

A layer holds hyper-parameters and **no arrays**. Parameters, and what backward needs, are handed in and out:

    specs, out_shape = layer.specs(in_shape)           # what it needs, and what it makes of one sample
    y, saved = layer.forward(p, x, ctx)                # p: views of the parameters; saved: all that backward needs
    gx, gradients = layer.backward(p, gy, saved, ctx)  # dLoss/dx, and {name: gradient} of the parameters

So one layer serves one process and many, and whoever trains it decides where arrays are, and when what is computed. The
rules, and what each is good for:

Arrays. A layer never writes into x or gy. The output has the dtype of the input. Nobody writes into what a layer
returns, saves or was given, unless the layer declares it (`Layer.output`, `Layer.gradient`).

Micro-batches. Several may be in flight, in any order: forward, forward, backward, backward. So all that backward needs
of forward is in `saved`, which belongs to the caller and never holds a workspace, and nothing is kept on the layer:
its attributes cannot be set once a network is made of it.

Gradients. A gradient is an array, or a description of what it is made of (gradients.py): `Product`, `RowSum`,
`ScatterAdd`, or a function that adds it to an array. Whether it is written or added, and when, is not the layer's
concern: a pass can ask for dLoss/dx first, which the stage before waits for, and for the parameters' gradients later.
Then workspaces last, and a description reads no parameters, which may have changed by then.

Names. An array's full name, such as "2.W", says which random numbers it is drawn from; a dropout layer's path, which
masks it draws. A Sequential counts from `first`, so a stage of a network draws what the whole one does.

Sizes. Built-in layers take sizes from the arrays in p, not from their attributes: a layer that is given a slice of its
weights (some columns, rows or heads) computes the corresponding slice, or partial sum, of its output. The bias may be
absent from p: with row-parallel weights it is added once, after the sum. So `parallel` lets several processes compute
one layer, and no layer knows of it.

Groups. A layer that needs other processes (statistics over a batch that they share) reaches them by `ctx.group(name)`
only. One that says `channelwise` can be given some of the channels of x, the last axis, and makes those of y.

Containers. A layer with `children()` runs them by `ctx.children[i].forward(p[i], x)` and `.backward(p[i], gy, saved)`,
which take the children's gradients; it has no parameters of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nn.arguments import COUNT, Configured
from nn.core.checks import ShapeError
from nn.core.context import LayerContext, Shape
from nn.core.gradients import Gradient
from nn.registry import register

Initializer = Callable[["np.random.Generator", Shape], np.ndarray]  # quoted: naming it imports numpy.random


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
    buffer : bool
        True for running statistics and other state that is kept with the parameters, but not trained.
    tied : str
        Full name, such as "0.W", of the array of an earlier layer that this one **is**: one array and one gradient,
        to which both layers add. It must have this shape, and each of the layers no other parameters.

    Examples
    --------
    >>> import nn
    >>> spec = nn.Spec((3, 2), nn.initializers.glorot)
    >>> spec.shape, spec.decay
    ((3, 2), True)
    """

    shape: Shape
    init: Initializer
    decay: bool = True
    buffer: bool = False
    tied: str = ""

    def __post_init__(self):
        if not isinstance(self.shape, tuple | list):
            raise ShapeError(f"a shape is a tuple, such as (3,), given {self.shape!r:.80}")
        if not all(isinstance(n, (int, np.integer)) for n in self.shape):
            raise ShapeError(f"sizes must be whole numbers, given shape {self.shape}")
        if self.init is not None and not callable(self.init):  # None where nothing is drawn
            raise TypeError(
                f"first values, here of an array of shape {self.shape}, come from a function (rng, shape) -> array, "
                f"such as nn.initializers.he, given {self.init!r:.80}"
            )


class Layer(Configured):
    """Base of all layers: one input array, one output array, batch axis first.

    Attributes
    ----------
    output : {"kept", "new", "view"}
        What the next layer may do with the array that forward returns. "kept": it may be in `saved`, or x itself, and
        is never overwritten. Two other declarations save memory. "new": no other reference exists, so the next layer
        may overwrite it. "view": it is x or a view of it; the next layer may overwrite it if this one might.
    gradient : {"kept", "new", "view"}
        The same for dLoss/dx and the layer before; "view" is gy itself, perhaps overwritten or reshaped.
    ids : bool
        Whether x holds integer ids; every other layer takes floats of the network's dtype.
    channelwise : bool
        Whether each channel (index of the last axis) of y is made of that channel of x alone, whatever their number:
        then a layer may be given some of them.
    takes_maxima : bool
        Whether each element of y is the largest of some elements of x.
    keeps_maxima : bool
        Whether it is elementwise, and the largest of some outputs is the output for the largest input, with the same
        dLoss/dx. A Sequential runs a following layer that `takes_maxima` first, which leaves this one less to do.
    synchronized : bool
        Whether it takes statistics over a group that shares a batch, so that every member has to take part.
    updates_without_samples : bool
        Whether its statistics change once in every step, so that a process without samples in it computes, too.

    Examples
    --------
    >>> import nn
    >>> class Scale(nn.Layer):
    ...     def __init__(self, features):
    ...         self.features = features
    ...     def specs(self, in_shape):
    ...         return {"s": nn.Spec((self.features,), nn.initializers.ones)}, in_shape
    ...     def forward(self, p, x, ctx):
    ...         return x * p.s, x
    ...     def backward(self, p, gy, x, ctx):
    ...         return gy * p.s, {"s": (gy * x).sum(axis=0)}
    >>> nn.check_layer(Scale(3), (3,))
    """

    output = gradient = "kept"
    ids = False
    channelwise = takes_maxima = keeps_maxima = synchronized = updates_without_samples = False

    def __setattr__(self, name: str, value: object) -> None:
        if "_fixed" in self.__dict__ and not callable(getattr(type(self), name, None)):
            raise AttributeError(
                f"{self!r}: {name} cannot be set once a network is made of the layer. What backward needs, forward "
                "returns beside y; for another hyper-parameter make a new layer, and a network of it"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without what depends on others: a copy may be changed."""
        is_own = lambda name: name != "_fixed" and not isinstance(getattr(type(self), name, None), cached_property)
        return {name: value for name, value in self.__dict__.items() if is_own(name)}

    def fix(self) -> None:
        """Let no attribute be set from now on: a network relies on them."""
        self.__dict__["_fixed"] = True

    def specs(self, in_shape: Shape) -> tuple[dict[str, Spec | dict], Shape]:
        """Return the arrays that the layer needs, and the shape of its output in evaluation; without the batch axis."""
        return {}, in_shape

    def training_shape(self, in_shape: Shape) -> Shape:
        """Shape of the output in training, where a layer may put out more than in evaluation; by default the same."""
        return self.specs(in_shape)[1]

    def forward(self, p: Any, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Any]:
        """Compute (y, saved) for a batch x of shape (N, *in_shape)."""
        raise TypeError(f"{type(self).__name__} does not define forward")

    def backward(
        self, p: Any, gy: np.ndarray, saved: Any, ctx: LayerContext
    ) -> tuple[np.ndarray | None, dict[str, Gradient]]:
        """Compute dLoss/dx (or None, where not `ctx.needs_input_grad`), and {name: gradient} of the parameters."""
        raise TypeError(f"{type(self).__name__} does not define backward")

    def children(self) -> dict[str, Layer]:
        """Return the layers inside, by name, in the order in which forward uses them; none for a plain layer."""
        return {}

    def plan(self, ctx: LayerContext) -> None:
        """Set in the children's contexts which arrays they may overwrite: a container does; by default none."""

    def child_shapes(self, in_shape: Shape) -> list[Shape]:
        """Return the shape of each child's input: the output of the child before, unless a container says otherwise."""
        shapes = [in_shape]
        for child in self.children().values():
            shapes.append(child.specs(shapes[-1])[1])
        return shapes[:-1]

    def macs(self, in_shape: Shape) -> int:
        """Multiply-accumulates of one sample's forward pass; 0 for elementwise layers, as is customary."""
        shapes = self.child_shapes(in_shape)
        return sum(child.macs(shape) for child, shape in zip(self.children().values(), shapes, strict=True))


@register("layer")
class Sequential(Layer):
    """Layers one after the other; their names are their positions: "0", "1", ...

    Parameters
    ----------
    *layers : Layer
    first : int
        Index of the first layer in the whole network, where these layers are a pipeline stage of it.

    Examples
    --------
    >>> import nn
    >>> layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> nn.Network(layers, (8, 8, 1)).out_shape
    (10,)
    """

    constraints = {"first": COUNT}

    def __init__(self, *layers: Layer, first: int = 0):
        if not layers:
            raise ValueError("Sequential needs at least one layer")
        check_layers("Sequential", *layers)
        self.layers, self.first = layers, first

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

    @cached_property  # containers ask at each step, and layers of a network do not change
    def output(self) -> str:
        return last_kind(self.layers[i].output for i in reversed(self.order))

    @cached_property
    def gradient(self) -> str:
        return last_kind(self.layers[i].gradient for i in self.order)

    @cached_property
    def order(self) -> Sequence[int]:
        """Positions of the layers in the order in which they run: MaxPool2d before ReLU, for instance.

        Where somebody watches the outputs (`NetworkContext.after_forward`), they run as they are written.
        """
        order = list(range(len(self.layers)))
        for i, after in enumerate(self.layers[1:]):
            if after.takes_maxima and self.layers[order[i]].keeps_maxima:
                order[i : i + 2] = i + 1, order[i]
        return order

    def plan(self, ctx: LayerContext) -> None:
        """Tell each child whether it is first, and which arrays it may overwrite, in both orders."""
        for child in ctx.children:
            child.may_overwrite_input = child.may_overwrite_grad = True
        for order in (range(len(self.layers)), self.order):
            free = ctx.may_overwrite_input
            for i in order:
                ctx.children[i].may_overwrite_input &= free
                free = {"new": True, "kept": False, "view": free}[self.layers[i].output]
            free = ctx.may_overwrite_grad
            for i in reversed(order):
                ctx.children[i].may_overwrite_grad &= free
                free = {"new": True, "kept": False, "view": free}[self.layers[i].gradient]
        start = ctx.children[0].end if ctx.children else ctx.end
        for child in ctx.children:  # the layers up to and with the first that has parameters
            child.is_first = ctx.is_first and child.end == start

    def forward(self, p, x, ctx):
        order = range(len(self.layers)) if ctx.network_context.after_forward else self.order
        saved = []
        for i in order:
            x, saved_by_child = ctx.children[i].forward(p[i], x)
            saved.append(saved_by_child)
        saved.append(order)
        return x, saved

    def backward(self, p, gy, saved, ctx):
        for i in reversed(saved.pop()):
            gy = ctx.children[i].backward(p[i], gy, saved.pop())  # popped: its memory can serve the layers below
            if gy is None:
                break
        return gy, {}


def child_path(path: str, name: str) -> str:
    """Return the path of a layer's child, such as 3.body.0; the root's is empty."""
    return f"{path}.{name}" if path else name


def last_kind(kinds: Iterable[str]) -> str:
    """Return the kind (`Layer.output`) of what a chain of layers returns, given that of each layer, the last first."""
    return next((kind for kind in kinds if kind != "view"), "view")


def check_layers(container: str, *layers: Layer) -> None:
    """Refuse what is no layer, by its position."""
    for i, layer in enumerate(layers):
        if isinstance(layer, list | tuple):
            raise TypeError(
                f"{container}: argument {i} is a {type(layer).__name__} of layers: nn.Sequential(*layers) is one layer"
            )
        if not isinstance(layer, Layer):
            raise TypeError(f"{container}: argument {i} is {layer!r}, not a Layer (an instance, not the class)")


KINDS, TRUTHS = ("kept", "new", "view"), (False, True)
DECLARED = {"output": KINDS, "gradient": KINDS}
DECLARED |= dict.fromkeys(("ids", "channelwise", "takes_maxima", "keeps_maxima"), TRUTHS)
DECLARED |= dict.fromkeys(("synchronized", "updates_without_samples"), TRUTHS)


def check_tree(root: Layer) -> None:
    """Refuse a layer object that a network has twice, and a layer that hides layers from the network.

    Raises
    ------
    ValueError
        One object twice: it would have two sets of weights.
    TypeError
        A layer that holds layers and declares no `children`, or has children and no `specs`: their weights would be
        missing. An attribute such as `output` that is not what the engine reads in it.
    """
    paths: dict[int, str] = {}
    waiting = [("", root)]
    while waiting:
        path, layer = waiting.pop()
        if id(layer) in paths:
            raise ValueError(
                f"{_described(path, layer)} is the same object as layer {paths[id(layer)]}: each would have weights of "
                "its own. Make two layers; where weights are to be shared, one layer's Spec says tied= (see TiedLinear)"
            )
        paths[id(layer)] = path
        _refuse_declarations(layer, path)
        _refuse_hidden(layer, path)
        for inner in vars(layer).values():  # that of a wrapper, such as Recompute, which is no child
            if isinstance(inner, Layer):
                _refuse_hidden(inner, path)
        waiting += [(child_path(path, name), child) for name, child in layer.children().items()]


def _described(path: str, layer: Layer) -> str:
    return f"layer {path} ({layer!r:.80})" if path else f"{layer!r:.80}"


def _refuse_hidden(layer: Layer, path: str) -> None:
    """Refuse a layer whose layers inside the network cannot see."""
    children = layer.children()
    if type(layer).specs is not Layer.specs:
        return
    names = [*children] or [name for name, value in vars(layer).items() if _holds_layers(value)]
    lacks = "specs()" if children else "children() and specs()"
    if names:
        raise TypeError(
            f"{_described(path, layer)}: it holds layers ({', '.join(names)}) whose weights the network cannot see: "
            f"{type(layer).__name__} needs {lacks}, as Sequential and Residual have"
        )


def _refuse_declarations(layer: Layer, path: str) -> None:
    """Refuse a hyper-parameter that has the name of what a layer declares to the engine."""
    for name, allowed in DECLARED.items():
        if isinstance(getattr(type(layer), name), property | cached_property):  # a container's, of what is inside
            continue
        if not isinstance(value := getattr(layer, name), str | bool) or value not in allowed:
            raise TypeError(
                f"{_described(path, layer)}: {name} declares something to the engine (nn.Layer) and must be one of "
                f"{allowed}, given {value!r:.80}: a hyper-parameter needs another name"
            )


def _holds_layers(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, Layer) for item in items)


def checked_specs(layer: Layer, result: Any) -> tuple[dict, Shape]:
    """Return what a layer's specs has returned; refuse anything but a pair (dict of Specs, shape)."""
    if type(result) is not tuple or len(result) != 2 or not isinstance(result[0], dict):
        raise TypeError(
            f"{layer!r}: specs must return a pair (arrays, out_shape): a dict of nn.Spec, which may be empty, and the "
            f"shape of the output without the batch axis; given {result!r:.80}"
        )
    arrays, out_shape = result
    if not isinstance(out_shape, tuple | list):
        raise TypeError(
            f"{layer!r}: specs must return the output's shape as a tuple, such as (3,), given {out_shape!r}"
        )
    for name, spec in arrays.items():
        if not isinstance(spec, Spec | dict):
            raise TypeError(
                f"{layer!r}: specs must say nn.Spec(shape, init) of {name}, such as "
                f"nn.Spec((3,), nn.initializers.zeros), given {spec!r:.80}"
            )
    return result


def child_specs(name: str, layer: Layer, in_shape: Shape) -> tuple[dict, Shape]:
    """Return layer.specs(in_shape); a ShapeError begins with the layer's path and its repr."""
    try:
        return checked_specs(layer, layer.specs(in_shape))
    except ShapeError as error:
        text = str(error)
        inner = text.startswith("layer ")
        described = f"layer {name} ({layer!r})" if name else repr(layer)
        raise ShapeError(f"layer {name}.{text[6:]}" if inner else f"{described}: {text}") from None
