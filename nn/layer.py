"""The contract between a layer and everything else.

A layer holds hyper-parameters and **no arrays**. Parameters, gradients and what backward needs are handed in and out:

    specs, out_shape = layer.specs(in_shape)         # what it needs, and what it makes of one sample
    y, saved = layer.forward(p, x, run)              # p: views of the parameters; saved: all that backward needs
    gx = layer.backward(p, g, gy, saved, run)        # adds to g (views of the gradients), returns dLoss/dx

So many micro-batches can be in flight, a backward can use an older version of the weights, and the same layer
serves one process and many. Three rules: never write into x or gy unless `run` says that they are free; the output
has the dtype of the input; `saved` belongs to the caller, so it never holds scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Initializer = Callable[[np.random.Generator, Shape], np.ndarray]


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
    """

    shape: Shape
    init: Initializer
    decay: bool = True
    state: bool = False
    tied: str = ""

    def __post_init__(self):
        if not all(isinstance(n, (int, np.integer)) for n in self.shape):
            raise ShapeError(f"sizes must be whole numbers, given shape {self.shape}")


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
    """

    output = "new"
    gradient = "new"
    ids = False

    def specs(self, in_shape: Shape) -> tuple[dict[str, Spec | dict], Shape]:
        """What the layer needs, and the shape of its output; the batch axis is left out of both shapes."""
        return {}, in_shape

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


class Common:
    """What all `Run`s of one network share during a pass; set by the trainer."""

    def __init__(self, memory, seed: int):
        self.memory = memory
        self.seed = seed
        self.training = True
        self.step = 0  # of the optimizer
        self.sample = 0  # index in the global batch of the first sample of this batch
        self.accumulate = False  # False: gradients are written; True: added to what is there
        self.padding: np.ndarray | None = None  # (N, T): places that attention ignores; set by Embedding
        self.input_gradient = False  # whether dLoss/dx of the whole network is wanted
        self.ready: Callable[[int], None] | None = None  # told how long the prefix of finished gradients is
        self.all_sum: Callable[[np.ndarray], None] | None = None  # sums an array over all ranks, in place
        self.watch: Callable[[str, Layer, np.ndarray], None] | None = None  # shown every layer's output
        # By the path of a Linear layer: takes its x and gy, of which somebody else makes the gradient of W.
        self.factors: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {}
        self.fetch: Callable[[Run], None] | None = None  # told which layer of a Sequential is run next, either way


class Run:
    """What one layer is told about the pass it takes part in. Built once for each layer of a network.

    Attributes
    ----------
    path : str
        Where the layer is in the network, such as "3" or "2.0".
    children : tuple of Run
        For the layers inside, in order.
    state : views or None
        Running statistics of this layer.
    first : bool
        No parameters before this layer: dLoss/dx is wanted only if the whole network's is.
    x_free, gy_free : bool
        Whether forward may overwrite x, and backward gy: nobody else needs them.
    end : int
        Length of the prefix of the gradient buffer that is finished when this layer's backward has run.
    shared : bool
        The array of this layer is also that of a later one (Spec.tied), which has written its gradient already.
    """

    __slots__ = ("children", "common", "end", "first", "gy_free", "path", "shared", "state", "x_free")

    def __init__(self, common: Common, path: str, children: tuple[Run, ...], state: Any, end: int):
        self.common, self.path, self.children, self.state, self.end = common, path, children, state, end
        self.first = self.x_free = self.gy_free = self.shared = False

    @property
    def training(self) -> bool:
        return self.common.training

    @property
    def wants_gx(self) -> bool:
        return not self.first or self.common.input_gradient

    @property
    def adds(self) -> bool:
        """Whether this layer's gradients hold something already: what backward computes is added, not written."""
        return self.common.accumulate or self.shared

    def empty(self, shape: Shape, dtype) -> np.ndarray:
        """A new array for results; its memory is used again once nobody refers to it."""
        return self.common.memory.empty(shape, dtype)

    def scratch(self, name: str, shape: Shape, dtype) -> np.ndarray:
        """Workspace for this call only: the next layer gets the same memory. Must not be returned or saved."""
        return self.common.memory.scratch(name, shape, dtype)

    def like_x(self, x: np.ndarray) -> np.ndarray:
        """Where to write an output of x's shape: x itself where that is free."""
        return x if self.x_free else self.common.memory.empty(x.shape, x.dtype)

    def like_gy(self, gy: np.ndarray) -> np.ndarray:
        """Where to write a gradient of gy's shape: gy itself where that is free."""
        return gy if self.gy_free else self.common.memory.empty(gy.shape, gy.dtype)

    def add(self, g: np.ndarray, value: np.ndarray) -> None:
        """g += value; the first micro-batch of a step writes instead, so nothing has to be zeroed."""
        if self.common.accumulate or self.shared:
            g += value
        else:
            g[...] = value

    def add_product(self, g: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        """g += a @ b (written where nothing is there yet), without allocating, for b a matrix and a one or a vector."""
        if self.common.accumulate or self.shared:
            product = self.common.memory.scratch("product", g.shape, g.dtype)
            g += np.dot(a, b, product)
        else:
            np.dot(a, b, g)  # for small matrices half the overhead of matmul

    def add_rows(self, g: np.ndarray, rows: np.ndarray) -> None:
        """g += rows.sum(0) for 2-D rows: a product with ones is several times faster than a reduction."""
        self.add_product(g, self.common.memory.ones(len(rows), rows.dtype), rows)


class Sequential(Layer):
    """Layers one after the other; their names are their positions: "0", "1", ..."""

    def __init__(self, *layers: Layer):
        if not layers:
            raise ValueError("Sequential needs at least one layer")
        check_layers("Sequential", *layers)
        self.layers = layers

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.layers))})"

    def children(self) -> dict[str, Layer]:
        return {str(i): layer for i, layer in enumerate(self.layers)}

    def specs(self, in_shape: Shape) -> tuple[dict, Shape]:
        specs, shape = {}, in_shape
        for name, layer in self.children().items():
            specs[name], shape = child_specs(name, layer, shape)
        return specs, shape

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
        watch, fetch = run.common.watch, run.common.fetch
        for layer, pl, rl in zip(self.layers, p, run.children, strict=True):
            if fetch:
                fetch(rl)
            x, kept = layer.forward(pl, x, rl)
            saved.append(kept)
            if watch:
                watch(rl.path, layer, x)
        return x, saved

    def backward(self, p, g, gy, saved, run):
        ready, fetch = run.common.ready, run.common.fetch
        for i in range(len(self.layers) - 1, -1, -1):
            child = run.children[i]
            if fetch:
                fetch(child)
            gy = self.layers[i].backward(p[i], g[i], gy, saved[i], child)
            saved[i] = None  # its memory can serve the layers below
            if ready:
                ready(child.end)
            if gy is None:
                break
        return gy


def check_layers(container: str, *layers: Layer) -> None:
    """Refuse what is no layer, by its position."""
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(f"{container}: entry {i} is {layer!r}, not a Layer (an instance, not the class)")


def child_specs(name: str, layer: Layer, in_shape: Shape) -> tuple[dict, Shape]:
    """layer.specs(in_shape), with the layer's place and name put before any complaint."""
    try:
        return layer.specs(in_shape)
    except ShapeError as error:
        text = str(error)
        inner = text.startswith("layer ")
        place = f"layer {name} ({layer!r})" if name else repr(layer)
        raise ShapeError(f"layer {name}.{text[6:]}" if inner else f"{place}: {text}") from None
