"""How activations move between the ranks that compute a layer together: layers without parameters.

In DTensor's words an activation is **replicated**: whole on every rank; **sharded** along an axis: each rank has a
part; or **partial**: each rank has an addend, and the sum is meant. The gradient of a replicated activation is
replicated where all ranks do the same with it, and partial where each does something of its own with it. Every move's
backward is the adjoint of its forward:

| move | forward | backward | |
|---|---|---|---|
| CopyTo | replicated, as it is | partial to replicated: allreduce | f of Shoeybi et al. 2019 |
| ReduceFrom | partial to replicated: allreduce | replicated, as it is | g |
| AllGather | sharded to replicated | partial to sharded: reduce-scatter | where each rank goes on in its own way |
| AllGather(replicated=True) | sharded to replicated | replicated to sharded | where all ranks do the same with it |
| ReduceScatter | partial to sharded | sharded to replicated: allgather | |
| Scatter | replicated to sharded | sharded to replicated: allgather | |
| Identity | replicated, as it is | partial, as it is | where somebody else sums it |
| FirstRankGradient | replicated, as it is | replicated to partial: all of it on the first rank, zero on others | |
| GatherInEvaluation | AllGather(replicated=True) in evaluation; in training nothing | | behind the last layer |

Cost for n bytes of the whole activation on p ranks: an allreduce (2 (p-1)/p n beta) for CopyTo backward and ReduceFrom
forward, half of it for a gather or reduce-scatter. In mixed precision parts travel as float16, but for those that one
process would not round, as outputs and what a residual connection adds; addends of sums as float32. Source: Shoeybi et
al. 2019; Korthikanti et al. 2022 (along places).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nn.core.context import Group
from nn.core.layer import Layer, Shape
from parallel.strategies.activation_transfer import transfer


@dataclass(frozen=True)
class Cut:
    """An axis of an activation of which each rank has a part, cut as state/splits.py cuts parameters.

    Attributes
    ----------
    axis : int
        Of an array with its batch axis: 1 for places of a sequence, -1 for features or channels.
    size : int
        Of the whole axis.
    blocks : int
        Along it lie so many blocks of one size, and each rank gets its share of each.
    """

    axis: int
    size: int
    blocks: int = 1

    @property
    def units(self) -> int:
        """Entries of a block."""
        return self.size // self.blocks

    def bounds(self, rank: int, ranks: int) -> tuple[int, int]:
        """Where a rank's share of every block begins and ends."""
        return self.units * rank // ranks, self.units * (rank + 1) // ranks

    def share(self, group: Group) -> int:
        """Entries of this rank."""
        lo, hi = self.bounds(group.rank, group.size)
        return self.blocks * (hi - lo)

    def part_of(self, shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of a rank's part of one sample, of that of the whole."""
        lo, hi = self.bounds(rank, ranks)
        axis = (self.axis if self.axis < 0 else self.axis - 1) % len(shape)
        return (*shape[:axis], self.blocks * (hi - lo), *shape[axis + 1 :])

    def in_blocks(self, array: np.ndarray) -> np.ndarray:
        """A view with the axis as two: (..., blocks, entries of each, ...)."""
        axis = self.axis % array.ndim
        entries = array.shape[axis] // self.blocks  # also where there are no samples
        return array.reshape(*array.shape[:axis], self.blocks, entries, *array.shape[axis + 1 :])

    def inside(self, array: np.ndarray, lo: int, hi: int) -> tuple:
        """The index of entries lo to hi of each block, for what `in_blocks` returns."""
        return (*[slice(None)] * (self.axis % array.ndim + 1), slice(lo, hi))

    def scatter(self, array: np.ndarray, group: Group, ctx) -> np.ndarray:
        """This rank's part of a whole array, as a new one."""
        mine = self.in_blocks(array)[self.inside(array, *self.bounds(group.rank, group.size))]
        part = ctx.empty(self._shape(array, self.share(group)), array.dtype)
        self.in_blocks(part)[...] = mine
        return part

    def all_gather(
        self, part: np.ndarray, group: Group, ctx, gradient: bool = False, rounded: bool = True
    ) -> np.ndarray:
        """The whole array from all ranks' parts; those that are shorter travel with a gap behind.

        `gradient`: it is that of an activation, not one; `rounded`: in mixed precision as float16.
        """
        most = self.blocks * -(-self.units // group.size)
        mine = np.ascontiguousarray(part)
        if most * group.size != self.size:
            mine = ctx.workspace("gathered", self._shape(part, most), part.dtype)
            mine[...] = 0  # the gap, too: as a float16 any number will not do
            self.in_blocks(mine)[self.inside(part, 0, self.share(group) // self.blocks)] = self.in_blocks(part)
        whole = ctx.empty(self._shape(part, self.size), part.dtype)
        into = self.in_blocks(whole)
        everyones = transfer(ctx, group.all_gather, mine, gradient) if rounded else group.all_gather(mine)
        for rank, theirs in enumerate(everyones):
            lo, hi = self.bounds(rank, group.size)
            into[self.inside(part, lo, hi)] = self.in_blocks(theirs)[self.inside(part, 0, hi - lo)]
        return whole

    def reduce_scatter(self, array: np.ndarray, group: Group, ctx) -> np.ndarray:
        """This rank's part of the sum of all ranks' whole arrays."""
        most = -(-self.units // group.size)
        pieces = ctx.workspace("pieces", (group.size, *self._shape(array, self.blocks * most)), array.dtype)
        source = self.in_blocks(array)
        for rank, piece in enumerate(pieces):
            lo, hi = self.bounds(rank, group.size)
            target = self.in_blocks(piece)
            target[self.inside(array, 0, hi - lo)] = source[self.inside(array, lo, hi)]
            target[self.inside(array, hi - lo, most)] = 0
        mine = group.reduce_scatter(pieces)
        if most * group.size * self.blocks == self.size:
            return mine
        part = ctx.empty(self._shape(array, self.share(group)), array.dtype)
        self.in_blocks(part)[...] = self.in_blocks(mine)[self.inside(array, 0, self.share(group) // self.blocks)]
        return part

    def _shape(self, array: np.ndarray, size: int) -> tuple[int, ...]:
        axis = self.axis % array.ndim
        return (*array.shape[:axis], size, *array.shape[axis + 1 :])


class Move(Layer):
    """Base: what forward does with x, and backward with gy, is a `Group`'s, of the ranks on the axis "tensor"."""

    output = gradient = "new"

    def out_shape(self, in_shape: Shape, training: bool) -> Shape:
        """The shape of a sample behind the move; a part's is said to be that of the whole."""
        return in_shape

    def __repr__(self):
        return f"{type(self).__name__}()"


class CopyTo(Move):
    """f: identity forward, sum backward, over the ranks on an axis."""

    output = "view"

    def __init__(self, axis: str = "tensor"):
        self.axis = axis

    def forward(self, p, x, ctx):
        return x, None

    def backward(self, p, gy, saved, ctx):
        """gy is an array that the layer behind has just made: the sum may lie where it is."""
        ctx.group(self.axis).sum(gy)
        return gy, {}


class Identity(Move):
    """Identity: where x comes from, a partial gradient is summed."""

    output = gradient = "view"

    def forward(self, p, x, ctx):
        return x, None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


class FirstRankGradient(Identity):
    """Identity, where all ranks do the same with x and a partial gradient is wanted: the first rank has all of it."""

    gradient = "new"

    def backward(self, p, gy, saved, ctx):
        gx = ctx.empty(gy.shape, gy.dtype)
        gx[...] = 0 if ctx.group("tensor").rank else gy
        return gx, {}


class ReduceFrom(Move):
    """g: sum forward, identity backward."""

    gradient = "view"

    def forward(self, p, x, ctx):
        """x is an array that the layer before has just made."""
        ctx.group("tensor").sum(x)
        return x, None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


class AllGather(Move):
    """Sharded to replicated.

    Parameters
    ----------
    cut : Cut
    replicated : bool
        Whether all ranks do the same with the whole, so that its gradient is replicated, too.
    rounded : bool
        Whether the whole is float16 in mixed precision, in one process, too.
    """

    def __init__(self, cut: Cut, replicated: bool = False, rounded: bool = True):
        self.cut, self.replicated, self.rounded = cut, replicated, rounded

    def forward(self, p, x, ctx):
        return self.cut.all_gather(x, ctx.group("tensor"), ctx, rounded=self.rounded), None

    def backward(self, p, gy, saved, ctx):
        part = self.cut.scatter if self.replicated else self.cut.reduce_scatter
        return part(gy, ctx.group("tensor"), ctx), {}


class ReduceScatter(Move):
    """Partial to sharded."""

    def __init__(self, cut: Cut):
        self.cut = cut

    def forward(self, p, x, ctx):
        return self.cut.reduce_scatter(x, ctx.group("tensor"), ctx), None

    def backward(self, p, gy, saved, ctx):
        return self.cut.all_gather(gy, ctx.group("tensor"), ctx, gradient=True), {}


class Scatter(Move):
    """Replicated to sharded."""

    def __init__(self, cut: Cut):
        self.cut = cut

    def forward(self, p, x, ctx):
        return self.cut.scatter(x, ctx.group("tensor"), ctx), None

    def backward(self, p, gy, saved, ctx):
        return self.cut.all_gather(gy, ctx.group("tensor"), ctx, gradient=True), {}


class GatherInEvaluation(Move):
    """The whole outputs in evaluation; in training the loss works with parts (loss.py)."""

    output = gradient = "view"

    def __init__(self, cut: Cut):
        self.cut = cut

    def forward(self, p, x, ctx):
        return (x if ctx.training else self.cut.all_gather(x, ctx.group("tensor"), ctx)), None

    def backward(self, p, gy, saved, ctx):
        return (gy if ctx.training else self.cut.scatter(gy, ctx.group("tensor"), ctx)), {}


def sum_as_one(arrays: Sequence[np.ndarray], group: Group) -> None:
    """Sum arrays over the ranks, in place, in one message."""
    message = np.concatenate([array.reshape(-1) for array in arrays])
    group.sum(message)
    at = 0
    for array in arrays:
        array[...] = message[at : at + array.size].reshape(array.shape)
        at += array.size
