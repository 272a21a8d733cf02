"""A layer with an input shape: layout of its parameters, and one pass forward and backward.

A Network holds no arrays either. Whoever trains it owns the buffers (see nn/training/trainer.py):

    network = Network(Sequential(Linear(784, 30), Sigmoid(), Linear(30, 10)), in_shape=(784,))
    w, g = network.layout.zeros(np.float32), network.layout.zeros(np.float32)
    network.layout.initialize(w, seed=0)
    p, gp, ctx = network.layout.views(w), network.layout.views(g), network.context()
    y, saved = network.forward(p, x, ctx)
    network.backward(p, gp, gy, saved, ctx)

Several micro-batches in flight, as pipelines have them, and backward in two halves:

    first, second = MicroBatch(start=0), MicroBatch(start=32, accumulate=True)
    y, saved = network.forward(p, x, ctx, first)
    ...
    gx = network.backward_inputs(p, gp, gy, saved, ctx, first)   # the stage before waits for this
    network.backward_weights(ctx, first)                         # any time later
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nn.arguments import Closed
from nn.core.checks import Checks
from nn.core.context import LayerContext, MicroBatch, NetworkContext
from nn.core.layer import Layer, Shape, ShapeError, check_layers, check_tree, child_path, child_specs
from nn.core.layout import Layout
from nn.core.memory_pool import MemoryPool
from nn.core.mixed_precision import MixedPrecision
from nn.tables import text_table


class NotFinite(NamedTuple):
    """Where the first value that is not finite appears.

    Attributes
    ----------
    depth : int
        0 for the input, i for the output of the i-th layer, -1 for a parameter.
    where : str
        In words.
    samples : list of int
        Whose values they are: indices in the global batch.
    """

    depth: int
    where: str
    samples: list[int]

    def __str__(self):
        return self.where + (f" (samples {_list_samples(self.samples)} of the batch)" if self.samples else "")


WEIGHTED = ("parameters", "named_parameters", "state_dict", "predict", "fit", "train", "eval", "weights", "evaluate")


class Network(Closed):
    """A root layer, checked against the shape and dtype of what it will be fed.

    Parameters
    ----------
    root : Layer
        Often a Sequential.
    in_shape : tuple of int
        Shape of one sample, without the batch axis; images are (height, width, channels).
    dtype : float32 or float64
        That of parameters and activations.
    name : str
        For reports.
    mixed : bool
        Mixed precision: what is kept for backward, and sent, is float16; see nn/core/mixed_precision.py.
    whole : Layout or None
        Layout of the network of which this is a stage; layers here may be tied to arrays of other stages.

    Attributes
    ----------
    out_shape, training_shape : tuple of int
        Shape of the output for one sample, in evaluation and training; they differ where classifiers inside the network
        help to train it.
    layout, buffer_layout : Layout
        Layouts of trained parameters, and of running statistics.
    checks_shapes : bool
        Whether layers are given arrays of the shapes that their specs say, so that the first passes compare them. False
        where a layout has some rows or columns of arrays.

    Raises
    ------
    ShapeError
        If layers do not fit together: which one, what it expects, what it is given.
    TypeError, ValueError
        If a layer hides the layers that it holds, or the network has it twice.

    Examples
    --------
    >>> import nn
    >>> network = nn.Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (4,))
    >>> network.out_shape, network.layout.count
    ((3,), 67)
    >>> print(network.summary())
    network (float32)
    layer                output  parameters  MACs
    ---------------------------------------------
    0      Linear(4, 8)  (8,)            40    32
    1      ReLU()        (8,)             0     0
    2      Linear(8, 3)  (3,)            27    24
    ---------------------------------------------
           input (4,)    (3,)            67    56
    """

    constant = ("root", "in_shape", "dtype")
    checks_shapes = True

    def __init__(
        self,
        root: Layer,
        in_shape: Shape,
        dtype=np.float32,
        name: str = "network",
        whole: Layout | None = None,
        mixed: bool = False,
    ):
        check_layers("Network", root)
        check_tree(root)
        if not isinstance(in_shape, tuple | list) or not all(isinstance(n, (int, np.integer)) for n in in_shape):
            raise TypeError(
                f"Network: in_shape is that of one sample, such as (64,) or (28, 28, 1), given {in_shape!r:.80}"
            )
        if any(n < 0 for n in in_shape):
            raise ValueError(f"Network: in_shape must have no negative size, given {tuple(in_shape)}")
        if not isinstance(name, str):
            raise TypeError(f"Network: name must be a text, given {name!r:.80}")
        self.root, self.in_shape, self.name, self.mixed = root, tuple(map(int, in_shape)), name, mixed
        if dtype not in ("float32", "float64", np.float32, np.float64):
            raise TypeError(f"Network: dtype must be float32 or float64, given {dtype!r:.80}")
        self.dtype = np.dtype(dtype)
        self.specs, self.out_shape = (
            child_specs("", root, self.in_shape) if not root.children() else root.specs(self.in_shape)
        )
        self.training_shape = root.training_shape(self.in_shape)
        self.takes_ids = takes_ids(root)
        _refuse_two_paddings(root)
        self.layout = Layout(self.specs, borrowed=whole and whole.specs, names=whole.names if whole else ())
        for layer in all_layers(root):
            layer.fix()
        self.buffer_layout = Layout(self.specs, buffers=True)

    @property
    def precision(self) -> str:
        """The dtype, in words."""
        return f"{self.dtype}{', kept as float16' * self.mixed}"

    def __repr__(self):
        shapes, count = f"{self.in_shape} -> {self.out_shape}", f"{self.layout.count:,} parameters"
        return f"Network({self.name}: {shapes}, {count}, {self.precision})"

    def context(
        self,
        buffers: np.ndarray | None = None,
        seed: int = 0,
        pool: MemoryPool | None = None,
        may_overwrite_grad: bool = False,
    ) -> LayerContext:
        """Return the context of the root layer, with those of all layers inside: one for each thread that trains.

        Parameters
        ----------
        buffers : flat array of `buffer_layout`, or None
            Running statistics; made here (and initialised) if not given.
        seed : int
            Seed of the random streams of layers such as dropout.
        pool : MemoryPool or None
            Where results and workspaces come from; one of its own if not given.
        may_overwrite_grad : bool
            Whether backward may overwrite the gy that it is given.
        """
        if buffers is None:
            buffers = self.buffer_layout.zeros(self.dtype)
            self.buffer_layout.initialize(buffers, seed)
        pool = pool or MemoryPool()
        context = NetworkContext(pool, seed, MixedPrecision(pool) if self.mixed else None, self.dtype)
        ctx = self._contexts(self.root, "", context, self.buffer_layout.views(buffers))
        ctx.is_first, ctx.may_overwrite_grad = True, may_overwrite_grad
        _plan(self.root, ctx)
        return ctx

    def _contexts(self, layer: Layer, path: str, context: NetworkContext, buffers) -> LayerContext:
        prefix = f"{path}." if path else ""
        inside = layer.children().items()
        children = tuple(
            self._contexts(child, prefix + name, context, part)
            for (name, child), part in zip(inside, buffers if inside else (), strict=True)
        )
        ctx = LayerContext(context, layer, path, children, buffers, self.layout.ends[path])
        ctx.shared = path in self.layout.shared
        ctx.unchecked = Checks(self.dtype, self.checks_shapes)
        return ctx

    def forward(
        self, p, x: np.ndarray, ctx: LayerContext, micro_batch: MicroBatch | None = None
    ) -> tuple[np.ndarray, object]:
        """Return (output, what backward needs) for a batch of shape (N, *in_shape).

        Each of several micro-batches in flight has its MicroBatch, given to its forward and to its backward, which may
        come in any order. None: that of the pass before; at first LayerContext.micro_batch.
        """
        context = ctx.network_context
        if micro_batch is not None:
            context.micro_batch = micro_batch
        self.check_input(x)
        if context.mixed_precision:
            context.mixed_precision.begin(None if context.input_gradient else x, ctx.training)
        return ctx.forward(p, x)

    def check_input(self, x: np.ndarray, sample_shape: Shape | None = None) -> None:
        """Refuse what is no batch for this network; the message says what is missing.

        Parameters
        ----------
        x : array
        sample_shape : tuple of int or None
            Shape of one sample, where that is not in_shape.

        Raises
        ------
        TypeError, ShapeError
        """
        if not isinstance(x, np.ndarray):
            raise TypeError(
                f"{self.name}: expects an array of samples, given a {type(x).__name__}: "
                + (
                    "a Dataset's are those of data.batch()[0]"
                    if hasattr(x, "batch")
                    else "use np.asarray(x, np.float32)"
                )
            )
        sample = sample_shape or self.in_shape
        if x.shape[1:] != sample or not x.ndim:
            expected = f"(N, {', '.join(map(str, sample))})"
            raise ShapeError(
                f"{self.name}: expects batches of shape {expected}, given {x.shape}{shape_hint(x.shape, sample)}"
            )
        if x.dtype == self.dtype or self.takes_ids:
            return
        how = f"x.astype(np.{self.dtype}), or nn.Network(layers, in_shape, dtype=np.{x.dtype})"
        if x.dtype.kind in "biu":
            how = (
                f"convert the data, as for training: (x / 255).astype(np.{self.dtype}) where these are bytes of images"
            )
        raise TypeError(f"{self.name}: computes in {self.dtype}, given {x.dtype}: {how}")

    def __call__(self, *values):
        raise TypeError(
            "a network has no weights: nn.Trainer(network, loss, optimizer) has them, trainer.predict(x) runs it"
        )

    def __getattr__(self, name: str):
        """Refuse names of other libraries: the trainer has what is asked for."""
        hint = ": a network has no weights; nn.Trainer(network, loss, optimizer) has" if name in WEIGHTED else ""
        raise AttributeError(f"a Network has no {name!r}{hint}", name=name, obj=self)

    def backward(
        self, p, g, gy: np.ndarray, saved, ctx: LayerContext, micro_batch: MicroBatch | None = None
    ) -> np.ndarray | None:
        """Gradients of the parameters into g; returns dLoss/dx where ctx.network_context.input_gradient is set."""
        context = ctx.network_context
        if micro_batch is not None:
            context.micro_batch = micro_batch
        if ctx.gradients is not g:
            ctx.bind(g)
        gx = ctx.backward(p, gy, saved)
        if context.on_gradients_ready and self.layout.borrowed:
            ctx.defer(context.on_gradients_ready, self.layout.size)  # they come last, and no layer's end has them
        return gx

    def backward_inputs(
        self, p, g, gy: np.ndarray, saved, ctx: LayerContext, micro_batch: MicroBatch | None = None
    ) -> np.ndarray | None:
        """Compute the first half of `backward`: dLoss/dx only. `backward_weights` makes the parameters' gradients.

        What they are made of waits too, gy among it: it must not be overwritten before. Sums over rows, of which a
        vector is left, are made at once, and wait to be added.
        """
        micro_batch = micro_batch or ctx.micro_batch
        if micro_batch.deferred is not None:
            raise RuntimeError(f"{self.name}: backward_weights has to come before this micro-batch's next backward")
        micro_batch.deferred = []
        try:
            return self.backward(p, g, gy, saved, ctx, micro_batch)
        except BaseException:
            micro_batch.deferred = None
            raise

    def backward_weights(self, ctx: LayerContext, micro_batch: MicroBatch | None = None) -> None:
        """Compute the second half: gradients of the parameters into the g of the first, the bits of `backward`.

        Micro-batches may take theirs in any order: the first one's are written (accumulate False), all others' added.
        """
        micro_batch = micro_batch or ctx.micro_batch
        deferred, micro_batch.deferred = micro_batch.deferred, None
        if deferred is None:
            raise RuntimeError(f"{self.name}: backward_weights needs a backward_inputs of this micro-batch before")
        ctx.network_context.micro_batch = micro_batch
        deferred.reverse()
        while deferred:  # what has been made is let go at once
            work, arguments = deferred.pop()
            work(*arguments)
            del work, arguments

    def bad_input(self, x: np.ndarray, ctx: LayerContext) -> NotFinite | None:
        """Return the input as NotFinite if a value of it is not finite, else None."""
        return NotFinite(0, "the input", samples) if (samples := _bad_samples(x, ctx)) else None

    def first_bad(
        self, p, x: np.ndarray, ctx: LayerContext, forward: Callable[[], object] | None = None
    ) -> NotFinite | None:
        """Return where the first value that is not finite appears in a forward pass; None if nowhere.

        `forward` makes that pass, where it is not this network's own.
        """
        if bad := self.bad_input(x, ctx):
            return bad
        bad_outputs: list[NotFinite] = []
        outputs = 0

        def check_output(path: str, layer: Layer, y: np.ndarray) -> None:
            nonlocal outputs
            outputs += 1
            if not bad_outputs and not np.isfinite(y).all():
                samples = _bad_samples(y, ctx) if len(y) == len(x) else []
                name = f"layer {path} ({layer!r})" if path else repr(layer)
                bad_outputs.append(NotFinite(outputs, f"the output of {name}", samples))

        outer, ctx.network_context.after_forward = ctx.network_context.after_forward, check_output
        try:
            with np.errstate(all="ignore"):
                forward() if forward else self.forward(p, x, ctx)
        finally:
            ctx.network_context.after_forward = outer
        return bad_outputs[0] if bad_outputs else None

    def layers(self):
        """Yield (path, layer, in_shape, out_shape) of every layer that is no container, in forward order."""
        yield from _walk(self.root, "", self.in_shape)

    def summary(self) -> str:
        """Return a table: layer, output shape, parameters and multiply-accumulates for one sample."""
        rows: list[tuple[str | int, ...]] = [("layer", "", "output", "parameters", "MACs")]
        macs = 0
        for path, layer, shape, out in self.layers():
            own = [spec for spec in layer.specs(shape)[0].values() if not (spec.buffer or spec.tied)]
            count = sum(math.prod(spec.shape) for spec in own)
            macs += layer.macs(shape)
            rows.append((path, repr(layer), str(out), count, layer.macs(shape)))
        rows.append(("", f"input {self.in_shape}", str(self.out_shape), self.layout.count, macs))
        table = text_table(rows, left=(0, 1, 2), rules=(1, len(rows) - 1))
        return f"{self.name} ({self.precision})\n{table}"


def shape_hint(shape: Shape, sample: Shape) -> str:
    """Return how an array of the given shape may become a batch, to end a message; '' where that is unclear."""
    inside = shape[1:]
    if shape == sample:
        return ": is it a single sample? x[None] is a batch of one"
    if len(sample) == 3 and sample[2] == 1 and inside == sample[:2]:
        return ": x[..., None] adds the axis of channels"
    if len(sample) == 3 and shape in (sample[:2], (sample[2], *sample[:2])):
        return ": is it a single sample? A batch has the samples first, and channels last"
    if len(sample) == 3 and inside == (sample[2], *sample[:2]):
        return ": channels come last here: np.moveaxis(x, 1, -1)"
    if math.prod(inside) == math.prod(sample) and inside and sample:
        return f": x.reshape(len(x), {', '.join(map(str, sample))}) has that shape"
    if not inside and sample == (1,):
        return ": x[:, None] has that shape"
    return ""


def _bad_samples(x: np.ndarray, ctx: LayerContext) -> list[int]:
    """Indices in the global batch of the samples with a value that is not finite."""
    rows = np.isfinite(x).all(axis=tuple(range(1, x.ndim)))  # of no samples too
    return [ctx.micro_batch.index(int(i)) for i in np.flatnonzero(~rows)]


def _list_samples(samples: list[int]) -> str:
    """The first few of a list, and that there are more."""
    return str(samples) if len(samples) <= 5 else f"[{', '.join(map(str, samples[:5]))}, ... {len(samples)} in all]"


def _walk(layer: Layer, path: str, in_shape: Shape):
    children = layer.children()
    if not children:
        yield path, layer, in_shape, layer.specs(in_shape)[1]
    for (name, child), shape in zip(children.items(), layer.child_shapes(in_shape), strict=True):
        yield from _walk(child, child_path(path, name), shape)


def all_layers(layer: Layer) -> Iterator[Layer]:
    """Yield a layer and all layers inside it."""
    yield layer
    for child in layer.children().values():
        yield from all_layers(child)


def _refuse_two_paddings(root: Layer) -> None:
    """Refuse layers that take different ids as padding: attention ignores the positions of one only."""
    padding = {layer.padding for layer in all_layers(root) if layer.ids and getattr(layer, "padding", None) is not None}
    if len(padding) > 1:
        raise ValueError(
            f"Network: its Embeddings have the paddings {', '.join(map(str, sorted(padding)))}, and attention has one "
            "padding mask: use one id for padding"
        )


def takes_ids(layer: Layer) -> bool:
    """Return whether a layer, or one inside it, takes integer ids."""
    return layer.ids or any(map(takes_ids, layer.children().values()))


def _plan(layer: Layer, ctx: LayerContext) -> None:
    """Let every container decide what its children may overwrite, from the outside in."""
    layer.plan(ctx)
    for child, inner in zip(layer.children().values(), ctx.children, strict=True):
        _plan(child, inner)
