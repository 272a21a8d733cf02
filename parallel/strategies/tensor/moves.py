"""How activations move between the ranks that compute a layer together: layers without parameters.

An activation is **whole** on every rank; or **cut** along an axis, so that each has a part; or a **term** on each, and
their sum is meant. Its gradient is whole where it is whole and all ranks do the same with it, and a term on each where
each does something of its own with it. Every move's backward is the adjoint of its forward:

| move | forward | backward | |
|---|---|---|---|
| Copy | whole, as it is | sum of terms | f of Shoeybi et al. 2019 |
| Sum | sum of terms | whole, as it is | g |
| Gather | parts to whole | sum of terms, of which each keeps its part | where each rank goes on in its own way |
| Gather(same=True) | parts to whole | each keeps its part | where all ranks do the same with it |
| SumPart | sum of terms, of which each keeps its part | parts to whole | |
| Keep | each keeps its part | parts to whole | |
| Given | whole, as it is | terms, as they are | where somebody else sums the terms |
| Once | whole, as it is | a term that is all of it on the first rank, and zero on others | |
| Show | as Gather(same=True) in evaluation; in training nothing | | behind the last layer |

Cost for n bytes of the whole activation on p ranks: an allreduce (2 (p-1)/p n beta) for Copy backward and Sum forward,
half of it for each of the others. In mixed precision parts travel as float16, but for those that one process would not
round, as outputs and what a residual connection adds; terms of sums as float32. Source: Shoeybi et al. 2019;
Korthikanti et al. 2022 (along places).
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

    def gather(self, part: np.ndarray, group: Group, ctx, gradient: bool = False, rounded: bool = True) -> np.ndarray:
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
        everyones = transfer(ctx, group.gather, mine, gradient) if rounded else group.gather(mine)
        for rank, theirs in enumerate(everyones):
            lo, hi = self.bounds(rank, group.size)
            into[self.inside(part, lo, hi)] = self.in_blocks(theirs)[self.inside(part, 0, hi - lo)]
        return whole

    def sum_part(self, array: np.ndarray, group: Group, ctx) -> np.ndarray:
        """This rank's part of the sum of all ranks' whole arrays."""
        most = -(-self.units // group.size)
        pieces = ctx.workspace("pieces", (group.size, *self._shape(array, self.blocks * most)), array.dtype)
        source = self.in_blocks(array)
        for rank, piece in enumerate(pieces):
            lo, hi = self.bounds(rank, group.size)
            target = self.in_blocks(piece)
            target[self.inside(array, 0, hi - lo)] = source[self.inside(array, lo, hi)]
            target[self.inside(array, hi - lo, most)] = 0
        mine = group.sum_part(pieces)
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


class Copy(Move):
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


class Given(Move):
    """Identity: whoever gives x takes terms of its gradient."""

    output = gradient = "view"

    def forward(self, p, x, ctx):
        return x, None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


class Once(Given):
    """All ranks do the same with x, and whoever gives it takes terms of its gradient: one rank's counts."""

    gradient = "new"

    def backward(self, p, gy, saved, ctx):
        gx = ctx.empty(gy.shape, gy.dtype)
        gx[...] = 0 if ctx.group("tensor").rank else gy
        return gx, {}


class Sum(Move):
    """g: sum forward, identity backward."""

    gradient = "view"

    def forward(self, p, x, ctx):
        """x is an array that the layer before has just made."""
        ctx.group("tensor").sum(x)
        return x, None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


class Gather(Move):
    """Parts to whole.

    Parameters
    ----------
    cut : Cut
    same : bool
        Whether all ranks do the same with the whole, so that each has the whole gradient.
    rounded : bool
        Whether the whole is float16 in mixed precision, in one process, too.
    """

    def __init__(self, cut: Cut, same: bool = False, rounded: bool = True):
        self.cut, self.same, self.rounded = cut, same, rounded

    def forward(self, p, x, ctx):
        return self.cut.gather(x, ctx.group("tensor"), ctx, rounded=self.rounded), None

    def backward(self, p, gy, saved, ctx):
        part = self.cut.scatter if self.same else self.cut.sum_part
        return part(gy, ctx.group("tensor"), ctx), {}


class SumPart(Move):
    """Terms to parts of their sum."""

    def __init__(self, cut: Cut):
        self.cut = cut

    def forward(self, p, x, ctx):
        return self.cut.sum_part(x, ctx.group("tensor"), ctx), None

    def backward(self, p, gy, saved, ctx):
        return self.cut.gather(gy, ctx.group("tensor"), ctx, gradient=True), {}


class Keep(Move):
    """Whole to parts."""

    def __init__(self, cut: Cut):
        self.cut = cut

    def forward(self, p, x, ctx):
        return self.cut.scatter(x, ctx.group("tensor"), ctx), None

    def backward(self, p, gy, saved, ctx):
        return self.cut.gather(gy, ctx.group("tensor"), ctx, gradient=True), {}


class Show(Move):
    """The whole outputs in evaluation; in training the loss works with parts (loss.py)."""

    output = gradient = "view"

    def __init__(self, cut: Cut):
        self.cut = cut

    def forward(self, p, x, ctx):
        return (x if ctx.training else self.cut.gather(x, ctx.group("tensor"), ctx)), None

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
