"""Contexts: what layers know of a pass, and what they ask for while they compute.

LayerContext    one for each layer: its path in the network, its statistics, what it may overwrite
NetworkContext  one for all layers of a network: memory, seed, groups of processes, hooks
MicroBatch      one for each set of samples in flight: which samples they are, and where their gradients go

A layer asks its context for everything: memory for results, random numbers, sums over a group. It describes gradients
(nn/core/gradients.py), and the context has them made: so whoever trains decides how all of that is done, and when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nn.core.checks import Checks
from nn.core.gradients import Gradient, Product, is_small, write_gradient, zero
from nn.core.memory_pool import MemoryPool
from nn.registry import lookup, registered

Shape = tuple[int, ...]


class Group:
    """Processes that compute something together: here one, by itself. `parallel` has groups of several.

    Every member takes part in every call, in the same order, with arrays of one shape and dtype.

    Attributes
    ----------
    size, rank : int
        The number of members, and which of them this is.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> group = nn.Group()  # of one process
    >>> group.size, group.all_gather(np.ones(3)).shape
    (1, (1, 3))
    """

    size, rank = 1, 0

    def sum(self, array: np.ndarray) -> None:
        """Sum over the members, in-place."""

    def maximum(self, array: np.ndarray) -> None:
        """Take the largest over the members, element by element, in-place."""

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Return the arrays of all members, in their order: (size, *array.shape)."""
        return array[None]

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """Return this member's element of the sum of an array (size, ...)."""
        return array[0]

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        """Send element r of an array (size, ...) to member r; return what all members had for this one."""
        return array


ALONE = Group()
registered("group")["data"] = "the samples of a batch"  # what its members share; others register more


@dataclass(slots=True)
class MicroBatch:
    """Samples that go through the network together. Several may be in flight, each with its own.

    Attributes
    ----------
    training : bool
        Whether it is for training: dropout, statistics of the batch.
    step : int
        Step of the optimizer.
    start : int, or list of (int, int)
        Index in the global batch of the first sample; where samples are not contiguous there, (first index, count) of
        each contiguous run.
    total : int
        Samples in the global batch; 0 where these are all.
    padding : (N, T) bool array or None
        Positions that attention ignores. An `Embedding` with padding sets it; where that is in an earlier stage of a
        pipeline, it travels with the activations.
    accumulate : bool
        False: gradients are written. True: added to those of this step's other micro-batches, which are there already.
        So it is False for the one micro-batch whose gradients are made first.
    deferred : list or None
        Gradients of parameters that wait to be made (Network.backward_inputs); None: they are made at once.

    Examples
    --------
    >>> import nn
    >>> nn.MicroBatch(training=True, total=8).total
    8
    """

    training: bool = True
    step: int = 0
    start: int | list[tuple[int, int]] = 0
    total: int = 0
    padding: np.ndarray | None = None
    accumulate: bool = False
    deferred: list[tuple[Callable, tuple]] | None = None

    def runs(self, samples: int) -> list[tuple[int, int]]:
        """Return (first index in the global batch, count) of each contiguous run of these samples."""
        return self.start if isinstance(self.start, list) else [(self.start, samples)]

    def index(self, row: int) -> int:
        """Return the index in the global batch of a sample."""
        for first, count in self.runs(row + 1):
            if row < count:
                return first + row
            row -= count
        raise IndexError("the micro-batch has fewer samples")


class NetworkContext:
    """The context of all layers of one network in their passes; set by the trainer.

    Attributes
    ----------
    pool : MemoryPool
    dtype : NumPy dtype
        That of parameters and activations.
    seed : int
        Seed of the random streams of layers such as dropout.
    micro_batch : MicroBatch
        The one that is being computed.
    input_gradient : bool
        Whether dLoss/dx of the whole network is needed: of a stage of a pipeline, for instance.
    groups : dict of Group
        By what their members share: names of the registry's groups. See LayerContext.group.
    before_layer : callable (LayerContext) or None
        Called before a layer is run, forward or backward.
    after_forward : callable (path, layer, y) or None
        Called with every layer's output.
    on_routing : callable (path, choices, computed) or None
        Called in training by every mixture of experts, with how many positions chose each expert, (E,), and how many
        each computes: fewer where a capacity drops some.
    on_gradients_ready : callable (int) or None
        Called with the length of the prefix of finished gradients.
    mixed_precision : MixedPrecision or None
        Keeps activations as float16 (nn/core/mixed_precision.py).
    product_hooks : dict of callables (x, gy)
        By the full name of a gradient that is a product of matrices x.T @ gy, with a row for each sample: called with
        these factors, and nothing is multiplied or written here.
    """

    __slots__ = (
        "after_forward",
        "before_layer",
        "dtype",
        "groups",
        "input_gradient",
        "micro_batch",
        "mixed_precision",
        "on_gradients_ready",
        "on_routing",
        "pool",
        "product_hooks",
        "seed",
    )

    def __init__(self, pool: MemoryPool, seed: int, mixed_precision=None, dtype=np.float32):
        self.pool, self.seed, self.dtype = pool, seed, np.dtype(dtype)
        self.micro_batch = MicroBatch()
        self.input_gradient = False
        self.mixed_precision = mixed_precision
        self.groups: dict[str, Group] = {}
        self.before_layer: Callable[[LayerContext], None] | None = None
        self.after_forward: Callable[[str, Any, np.ndarray], None] | None = None
        self.on_routing: Callable[[str, np.ndarray, np.ndarray], None] | None = None
        self.on_gradients_ready: Callable[[int], None] | None = None
        self.product_hooks: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {}


class LayerContext:
    """The argument `ctx` of a layer: what it knows of the pass, and asks for while it computes.

    A layer's author needs `training`, `needs_input_grad`, `empty`, `workspace`, `random` and `group`; of a container
    also `children`, whose `forward` and `backward` run the layers inside. The rest is the engine's. Built once for each
    layer of a network.

    Attributes
    ----------
    children : tuple of LayerContext
        Contexts of the layers inside, in order.
    buffers : views or None
        Buffers of this layer, such as running statistics.
    layer : Layer
    path : str
        Where it is in the network, such as "3" or "2.0".
    network_context : NetworkContext
    gradients : views or None
        Gradients of this layer's parameters; bound by the network's backward.
    arrays : dict of arrays
        Those of a layer without children, by name.
    is_first : bool
        No parameters before this layer: dLoss/dx is needed only if the whole network's is.
    may_overwrite_input, may_overwrite_grad : bool
        Whether forward may overwrite x, and backward gy, because they have no other use.
    end : int
        Length of the prefix of the gradient buffer that is finished when this layer's gradients are.
    shared : bool
        The array of this layer is also that of a later one (Spec.tied), which has written its gradient already.
    unchecked : Checks or None
        Checks of the first passes (nn/core/checks.py); None when these have been right.
    """

    __slots__ = (
        "arrays",
        "buffers",
        "children",
        "end",
        "gradients",
        "is_first",
        "layer",
        "may_overwrite_grad",
        "may_overwrite_input",
        "network_context",
        "path",
        "shared",
        "unchecked",
    )

    def __init__(
        self,
        network_context: NetworkContext,
        layer: Any,
        path: str,
        children: tuple[LayerContext, ...],
        buffers: Any,
        end: int,
    ):
        self.network_context, self.layer, self.path, self.children = network_context, layer, path, children
        self.buffers, self.end, self.gradients = buffers, end, None
        self.is_first = self.may_overwrite_input = self.may_overwrite_grad = self.shared = False
        self.unchecked: Checks | None = None

    # ------------------------------------------------------------------------------------ for a layer's author

    @property
    def training(self) -> bool:
        """Whether this pass is for training."""
        return self.network_context.micro_batch.training

    @property
    def needs_input_grad(self) -> bool:
        """Whether backward has to return dLoss/dx; else it may return None instead."""
        return not self.is_first or self.network_context.input_gradient

    def empty(self, shape: Shape, dtype) -> np.ndarray:
        """Return a new array for results; its memory is used again once there is no reference to it."""
        return self.network_context.pool.empty(shape, dtype)

    def workspace(self, name: str, shape: Shape, dtype) -> np.ndarray:
        """Return memory for this call only, with what the last user left in it: the next layer gets the same.

        It must not be returned as y or gx, or saved. A gradient may be made of it.
        """
        context = self.network_context
        if context.micro_batch.deferred is not None:  # a gradient that is made of it waits
            return context.pool.empty(shape, dtype)
        return context.pool.workspace(name, shape, dtype)

    def random(self, shape: Shape, name: str = "") -> np.ndarray:
        """Return numbers drawn uniformly from [0, 1) for a batch of `shape` (N, ...), with the dtype of the network.

        They depend on seed, step, layer, `name` and the sample's index in the global batch only: so they are the same
        for any cut of the batch into micro-batches and shards, and when activations are computed again (Recompute).
        Two draws of one layer need two names.
        """
        size, dtype = math.prod(shape[1:]), self.network_context.dtype
        digits = np.finfo(dtype).nmant + 1
        numbers = np.empty((shape[0], size), dtype)
        for rows, bits in self.random_bits(shape[0], -(-size // 4), name):
            np.multiply(bits[:, :size] >> np.uint64(64 - digits), 2.0**-digits, numbers[rows], casting="unsafe")
        return numbers.reshape(shape)

    def group(self, name: str) -> Group:
        """Return the processes that share what `name` says, such as "data", with this one."""
        lookup("group", name)  # a name that nobody has registered is refused
        return self.network_context.groups.get(name, ALONE)

    # ------------------------------------------------------------------------------------ for a container's author

    def forward(self, p: Any, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """Run this layer forward, as its container does: (y, saved). p: its parameters."""
        context = self.network_context
        mixed = context.mixed_precision
        if context.before_layer:
            context.before_layer(self)
        if mixed:
            x = mixed.round_input(p, x, self)
        if self.unchecked:
            y, saved = self.unchecked.forward(p, x, self)
        else:
            y, saved = self.layer.forward(p, x, self)
        if mixed and not self.children:
            saved = mixed.keep(saved, y, x)
        if context.after_forward:
            context.after_forward(self.path, self.layer, y)
        return y, saved

    def backward(self, p: Any, gy: np.ndarray, saved: Any) -> np.ndarray | None:
        """Run this layer backward: return dLoss/dx; gradients of parameters go where they belong.

        Give it the only reference to `saved`, for instance `saved.pop()`: the memory serves the layers below.
        """
        context = self.network_context
        mixed = context.mixed_precision
        if context.before_layer:
            context.before_layer(self)
        if mixed:
            gy, saved = mixed.restore(p, gy, saved, self)
        if self.unchecked:
            gx, gradients = self.unchecked.backward(p, gy, saved, self)
        else:
            gx, gradients = self.layer.backward(p, gy, saved, self)
        if gradients:
            self.write_gradients(gradients)
        if context.on_gradients_ready:
            self.defer(context.on_gradients_ready, self.end)
        return gx

    # ------------------------------------------------------------------------------------ for the engine

    @property
    def description(self) -> str:
        """The layer with its path, for messages."""
        return f"layer {self.path} ({self.layer!r:.80})" if self.path else f"{self.layer!r:.80}"

    @property
    def micro_batch(self) -> MicroBatch:
        """The samples that are being computed."""
        return self.network_context.micro_batch

    def bind(self, gradients: Any) -> None:
        """Let gradients of this layer, and of those inside, go to these views."""
        self.gradients = gradients
        self.arrays = {} if self.children else vars(gradients)
        for child, views in zip(self.children, gradients if self.children else (), strict=True):
            child.bind(views)

    def write_gradients(self, gradients: dict[str, Gradient]) -> None:
        """Write a layer's gradients to their arrays, or add them; now, or with the deferred gradients of the pass."""
        context = self.network_context
        batch, arrays = context.micro_batch, self.arrays
        if batch.deferred is not None:
            for name, gradient in gradients.items():
                batch.deferred.append((self._write, (arrays[name], name, self._lasting(name, gradient))))
        elif context.product_hooks:
            for name, gradient in gradients.items():
                self._write(arrays[name], name, gradient)
        else:
            add = batch.accumulate or self.shared
            for name, gradient in gradients.items():
                write_gradient(arrays[name], gradient, add, context.pool)

    def _write(self, array: np.ndarray, name: str, gradient: Gradient) -> None:
        context = self.network_context
        if type(gradient) is Product and gradient.a.ndim == 2:
            hook = context.product_hooks.get(f"{self.path}.{name}" if self.path else name)
            if hook:
                hook(gradient.a.T, gradient.b)
                return
        write_gradient(array, gradient, context.micro_batch.accumulate or self.shared, context.pool)

    def _lasting(self, name: str, gradient: Gradient) -> Gradient:
        """The gradient as it may wait: vectors are made at once, arrays copied, which others may overwrite."""
        if is_small(gradient):
            return self.materialize(name, gradient)
        return gradient.copy() if isinstance(gradient, np.ndarray) else gradient

    def materialize(self, name: str, gradient: Gradient) -> np.ndarray:
        """Return a gradient of this layer as an array: where what it is made of is overwritten before backward ends."""
        array = np.empty_like(self.arrays[name])
        write_gradient(array, gradient, False, self.network_context.pool)
        return array

    def zero_gradients(self) -> None:
        """This layer and those inside took no part: their gradients are zero, unless they hold others' already."""
        if self.network_context.micro_batch.deferred is not None:
            self.defer(self.zero_gradients)
        elif not (self.network_context.micro_batch.accumulate or self.shared):
            zero(self.gradients)

    @property
    def defers(self) -> bool:
        """Whether gradients of parameters are deferred: this pass computes dLoss/dx only."""
        return self.network_context.micro_batch.deferred is not None

    def defer(self, work: Callable, *arguments) -> None:
        """Call work(*arguments) now, or, where gradients of parameters are deferred, in its turn among them."""
        deferred = self.network_context.micro_batch.deferred
        if deferred is None:
            work(*arguments)
        else:
            deferred.append((work, arguments))

    def reuse_input(self, x: np.ndarray) -> np.ndarray:
        """Return where to write an output of x's shape: x itself where that may be overwritten."""
        return x if self.may_overwrite_input else self.network_context.pool.empty(x.shape, x.dtype)

    def reuse_grad(self, gy: np.ndarray) -> np.ndarray:
        """Return where to write a gradient of gy's shape: gy itself where that may be overwritten."""
        return gy if self.may_overwrite_grad else self.network_context.pool.empty(gy.shape, gy.dtype)

    def ones(self, n: int, dtype) -> np.ndarray:
        """Return a vector of n ones; not to be written."""
        return self.network_context.pool.ones(n, dtype)

    def random_bits(
        self, samples: int, counts: int, name: str = "", count_range: tuple[int, int] | None = None
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (rows of the batch, their random numbers): (rows, 4 counts) uint64, from counted streams.

        Random numbers are **counted**, not drawn one after the other (Salmon et al. 2011, Philox): every sample of the
        global batch has its own counts in the stream of (seed, step, layer). With count_range = (lo, hi), only those
        lo to hi of each sample are drawn, and the others cost nothing.
        """
        lo, hi = count_range or (0, counts)
        batch, at = self.network_context.micro_batch, 0
        entropy = [self.network_context.seed, batch.step, *self.path.encode(), *([0, *name.encode()] if name else ())]
        key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
        for first, count in batch.runs(samples):
            stream = np.random.Philox(key=key, counter=first * counts + lo)
            if hi - lo == counts:
                yield slice(at, at + count), stream.random_raw(count * counts * 4).reshape(count, counts * 4)
            else:
                for row in range(at, at + count):
                    yield slice(row, row + 1), stream.random_raw((hi - lo) * 4)[None]
                    stream.advance(counts - (hi - lo))
            at += count
