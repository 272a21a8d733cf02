"""What layers are told about a pass, and what they ask for while they compute.

Run         one for each layer: its place in the network, its statistics, what it may overwrite
Context     one for all Runs of a network: memory, seed, groups of ranks, and who wants to be told what
MicroBatch  one for each set of samples in flight: which samples they are, and how their gradients are to be taken

A layer gets its Run, and asks it for everything: memory for results, other ranks, and to have gradients of parameters
added. So whoever trains decides how all of that is done, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]


class Group:
    """Ranks that compute something together. This is a rank by itself; `parallel` has those of several ranks.

    Every rank of a group takes part in every call, in the same order, with arrays of one shape and dtype, and they
    travel as they are. Activations, and their gradients, that are moved and not summed go by `Run.moved`.

    Attributes
    ----------
    size, rank : int
        How many there are, and which of them this is.
    """

    size, rank = 1, 0

    def sum(self, array: np.ndarray) -> None:
        """Sum over the ranks, in place."""

    def maximum(self, array: np.ndarray) -> None:
        """The largest over the ranks, entry by entry, in place."""

    def gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, in their order: (size, *array.shape)."""
        return array[None]

    def sum_part(self, array: np.ndarray) -> np.ndarray:
        """This rank's entry of the sum over the ranks of an array (size, ...)."""
        return array[0]

    def swap(self, array: np.ndarray) -> np.ndarray:
        """What every rank has for this one, in their order: entry r of an array (size, ...) goes to rank r."""
        return array


ALONE = Group()
# What ranks of a group share: the samples of a batch, the parts of tensors, the rows of images, a network's branches.
AXES = ("data", "tensor", "space", "branch")


@dataclass(slots=True)
class MicroBatch:
    """Samples that go through the network together. Several may be in flight, each with its own.

    Attributes
    ----------
    training : bool
        Whether it is for training: dropout, statistics of the batch.
    step : int
        Of the optimizer.
    sample : int
        Index in the global batch of the first sample.
    pieces : list of (int, int), or None
        Where the samples do not follow one another there: the first one's index, and the number, of each piece that
        does.
    padding : (N, T) bool array or None
        Places that attention ignores. An `Embedding` with padding sets it; where that is in an earlier stage of a
        pipeline, it travels with the activations.
    accumulate : bool
        False: gradients are written. True: added to those of this step's other micro-batches, which are there already.
        So it is False for the one micro-batch whose gradients are made first.
    waiting : list or None
        Where gradients of parameters wait to be made (Network.backward_inputs); None: they are made at once.
    """

    training: bool = True
    step: int = 0
    sample: int = 0
    pieces: list[tuple[int, int]] | None = None
    padding: np.ndarray | None = None
    accumulate: bool = False
    waiting: list[tuple[Callable, tuple]] | None = None

    def index(self, row: int) -> int:
        """Where a sample is in the global batch."""
        for first, samples in self.pieces or ():
            if row < samples:
                return first + row
            row -= samples
        return self.sample + row


class Context:
    """What all Runs of one network share; set by the trainer.

    Attributes
    ----------
    memory : Memory
    seed : int
        Of the random streams of layers such as dropout.
    micro_batch : MicroBatch
        The one that is being computed.
    input_gradient : bool
        Whether dLoss/dx of the whole network is wanted: of a stage of a pipeline, for instance.
    groups : dict of Group
        Other ranks by what they share: one of AXES. See Run.group.
    ready : callable (int) or None
        Told how long the prefix of finished gradients is.
    watch : callable (path, layer, y) or None
        Shown every layer's output.
    fetch : callable (Run) or None
        Told which layer is run next, either way: the root, then what a Sequential below it consists of.
    half : Half or None
        Keeps activations as float16 (nn/core/half.py).
    checked : set of bool
        Values of `training` for which one forward pass has shown that every layer makes what its specs say.
    factors : dict of callables (x, gy)
        By the path of a Linear layer: takes x and gy, rows of them, and makes their product, the gradient of W, later
        or elsewhere.
    """

    __slots__ = (
        "checked",
        "factors",
        "fetch",
        "groups",
        "half",
        "input_gradient",
        "memory",
        "micro_batch",
        "ready",
        "seed",
        "watch",
    )

    def __init__(self, memory, seed: int, half=None):
        self.memory, self.seed = memory, seed
        self.micro_batch = MicroBatch()
        self.input_gradient = False
        self.half = half
        self.checked: set[bool] = set()
        self.groups: dict[str, Group] = {}
        self.ready: Callable[[int], None] | None = None
        self.watch: Callable[[str, Any, np.ndarray], None] | None = None  # path, layer, output
        self.fetch: Callable[[Run], None] | None = None
        self.factors: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {}

    def wire(self, dtype) -> np.dtype:
        """The dtype with which an activation of `dtype` travels between ranks: in training that in which it is kept."""
        return np.dtype(np.float16 if self.half and self.micro_batch.training else dtype)

    def packed(self, array: np.ndarray, gradient: bool = False) -> np.ndarray:
        """An activation, or the gradient of one, as it travels."""
        if self.wire(array.dtype) == array.dtype:
            return array
        return self.half.pack(array, self.half.scale if gradient else 1.0)

    def unpacked(self, array: np.ndarray, dtype, gradient: bool = False) -> np.ndarray:
        """What a rank has packed, as an array of `dtype`."""
        if array.dtype != np.float16:
            return array
        return self.half.unpack(array, dtype, self.half.scale if gradient else 1.0)


class Run:
    """What one layer is told about the pass it takes part in. Built once for each layer of a network.

    Attributes
    ----------
    context : Context
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
        Length of the prefix of the gradient buffer that is finished when this layer's gradients are.
    shared : bool
        The array of this layer is also that of a later one (Spec.tied), which has written its gradient already.
    """

    __slots__ = ("children", "context", "end", "first", "gy_free", "path", "shared", "state", "x_free")

    def __init__(self, context: Context, path: str, children: tuple[Run, ...], state: Any, end: int):
        self.context, self.path, self.children, self.state, self.end = context, path, children, state, end
        self.first = self.x_free = self.gy_free = self.shared = False

    # ------------------------------------------------------------------------------------ about the pass

    @property
    def micro_batch(self) -> MicroBatch:
        """The samples that are being computed."""
        return self.context.micro_batch

    @property
    def training(self) -> bool:
        """Whether this pass is for training."""
        return self.context.micro_batch.training

    @property
    def wants_gx(self) -> bool:
        """Whether backward has to return dLoss/dx."""
        return not self.first or self.context.input_gradient

    def group(self, name: str) -> Group:
        """The ranks that share what `name` says with this one: one of AXES."""
        if name not in AXES:
            raise ValueError(f"layer {self.path}: ranks share {' or '.join(AXES)}, not {name!r}")
        return self.context.groups.get(name, ALONE)

    def moved(self, move: Callable[[np.ndarray], np.ndarray], array: np.ndarray, gradient: bool = False) -> np.ndarray:
        """What `move`, a Group's gather or swap, makes of an activation, or of the gradient of one.

        What is not summed travels as it is kept: as float16 in mixed precision. Terms of a sum do not.
        """
        context = self.context
        return context.unpacked(move(context.packed(array, gradient)), array.dtype, gradient)

    # ------------------------------------------------------------------------------------ memory

    def empty(self, shape: Shape, dtype) -> np.ndarray:
        """A new array for results; its memory is used again once nobody refers to it."""
        return self.context.memory.empty(shape, dtype)

    def scratch(self, name: str, shape: Shape, dtype) -> np.ndarray:
        """Workspace for this call only: the next layer gets the same memory. Must not be returned or saved."""
        return self.context.memory.scratch(name, shape, dtype)

    def operand(self, name: str, shape: Shape, dtype) -> np.ndarray:
        """Workspace for what `add_product` multiplies: a new array where that waits, otherwise as `scratch`."""
        return self.empty(shape, dtype) if self.waits else self.scratch(name, shape, dtype)

    def like_x(self, x: np.ndarray) -> np.ndarray:
        """Where to write an output of x's shape: x itself where that is free."""
        return x if self.x_free else self.context.memory.empty(x.shape, x.dtype)

    def like_gy(self, gy: np.ndarray) -> np.ndarray:
        """Where to write a gradient of gy's shape: gy itself where that is free."""
        return gy if self.gy_free else self.context.memory.empty(gy.shape, gy.dtype)

    # ------------------------------------------------------------------------------------ gradients of parameters

    @property
    def waits(self) -> bool:
        """Whether gradients of parameters are put off: backward computes dLoss/dx only."""
        return self.context.micro_batch.waiting is not None

    @property
    def adds(self) -> bool:
        """Whether this layer's gradients hold something already; to be asked when they are made (see `later`)."""
        return self.context.micro_batch.accumulate or self.shared

    def later(self, work: Callable, *arguments) -> None:
        """Call work(*arguments), which makes gradients of parameters: now, or when the pass catches up on them.

        No argument may be a workspace, or an array that this layer returns or overwrites.
        """
        waiting = self.context.micro_batch.waiting
        if waiting is None:
            work(*arguments)
        else:
            waiting.append((work, arguments))

    def add(self, g: np.ndarray, value: np.ndarray) -> None:
        """g += value; the first micro-batch of a step writes instead, so nothing has to be zeroed."""
        batch = self.context.micro_batch
        if batch.waiting is not None:
            batch.waiting.append((self.add, (g, value.copy())))
        elif batch.accumulate or self.shared:
            g += value
        else:
            g[...] = value

    def add_product(self, g: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        """g += a @ b (written where nothing is there yet), without allocating, for b a matrix and a one or a vector.

        The product of a vector is small: it is always made at once. That of matrices may wait, and a and b with it, so
        they are no workspaces (see `operand`), nor what this layer returns or overwrites.
        """
        context = self.context
        batch = context.micro_batch
        if batch.waiting is not None:
            batch.waiting.append((self.add, (g, np.dot(a, b))) if a.ndim == 1 else (self.add_product, (g, a, b)))
        elif context.factors and a.ndim == 2 and (take := context.factors.get(self.path)):
            take(a.T, b)
        elif batch.accumulate or self.shared:
            product = context.memory.scratch("product", g.shape, g.dtype)
            g += np.dot(a, b, product)
        else:
            np.dot(a, b, g)  # for small matrices half the overhead of matmul

    def add_rows(self, g: np.ndarray, rows: np.ndarray) -> None:
        """g += rows.sum(0) for 2-D rows: a product with ones is several times faster than a reduction."""
        self.add_product(g, self.context.memory.ones(len(rows), rows.dtype), rows)
