"""Gradient clipping, and the norms of tensors that lie in flat buffers, or in slices of them.

Each clip is called with the gradients and changes them in-place; optimizers take one as `clip=`. Norms are those of
whole tensors, or of the whole gradient: where a buffer is only a slice of that, the squares of all slices are summed
first. Sources: Mikolov 2012 (by value), Pascanu, Mikolov and Bengio 2013 (by norm). Cost: one pass over the gradients,
and another where something has to be clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nn.arguments import Configured, Number
from nn.core.layout import Region
from nn.registry import register

SumOverSlices = Callable[[np.ndarray], None]  # sums a small float64 array over all slices of a buffer, in-place
BLOCK_BYTES = 120 * 1024  # what is worked on at a time, so that a block's operands stay in the cache


def squared_norms(
    buffers: Sequence[np.ndarray], region: Region, sum_over_slices: SumOverSlices | None = None
) -> list[dict[str, float]]:
    """Return |tensor|^2 of every tensor in the layout, by name, for each of the buffers.

    It is 0 for tensors outside the region, unless slices are summed. A tensor in several slices is counted in one
    (Region.elsewhere).

    Parameters
    ----------
    buffers : sequence of flat arrays
        Each covers `region`.
    sum_over_slices : callable or None
        Called with one float64 array of shape (buffers, tensors of the whole layout): the same shape for every region.
    """
    at = {name: i for i, name in enumerate(region.names)}
    sums = np.zeros((len(buffers), len(at)))
    for name, part, _ in region.tensors:
        if sum_over_slices and name in region.elsewhere:
            continue
        for row, buffer in zip(sums, buffers, strict=True):
            row[at[name]] = _square(buffer[part])
    if sum_over_slices:
        sum_over_slices(sums)
    return [{name: float(row[i]) for name, i in at.items()} for row in sums]


def _square(x: np.ndarray) -> float:
    """|x|^2, blocks summed in double precision; also squared in it where that is too much for x's own."""
    step, total = BLOCK_BYTES // x.itemsize, 0.0
    with np.errstate(over="ignore"):
        for lo in range(0, len(x), step):
            block = x[lo : lo + step]
            square = float(block @ block)
            if square == math.inf:
                block = block.astype(np.float64)
                square = float(block @ block)
            total += square
    return total


@dataclass
class Clip(Configured):
    """Base: a positive limit."""

    constraints = {"limit": Number(above=0, below=math.inf)}

    limit: float

    def __call__(self, g: np.ndarray, region: Region, sum_over_slices: SumOverSlices | None = None) -> None:
        """Clip the gradients g of a region in-place.

        Raises
        ------
        FloatingPointError
            If a norm is NaN or infinite: scaling would spread it over all that is clipped.
        """
        raise TypeError(f"{type(self).__name__} does not define __call__")


@register("clip", "value")
class ClipValue(Clip):
    """Clip every element to [-limit, limit].

    Examples
    --------
    >>> import nn
    >>> nn.SGD(lr=0.1, clip=nn.ClipValue(0.5))
    SGD(lr=0.1, clip=ClipValue(limit=0.5))
    """

    def __call__(self, g, region, sum_over_slices=None):
        np.clip(g, -self.limit, self.limit, out=g)


@register("clip", "norm")
class ClipNorm(Clip):
    """Clip the norm of every tensor to at most `limit`.

    Examples
    --------
    >>> import nn
    >>> nn.SGD(lr=0.1, clip=nn.ClipNorm(1.0))
    SGD(lr=0.1, clip=ClipNorm(limit=1.0))
    """

    def __call__(self, g, region, sum_over_slices=None):
        (squares,) = squared_norms([g], region, sum_over_slices)
        for name, square in squares.items():  # of all tensors: where one slice is refused, all are
            _refuse(square, f"the gradient of {name}")
        for name, part, _ in region.tensors:
            _scale(g[part], self.limit, squares[name])


@register("clip", "global")
class ClipGlobalNorm(Clip):
    """Clip the norm of the whole gradient to at most `limit`: its direction is kept.

    Examples
    --------
    >>> import nn
    >>> nn.SGD(lr=0.1, clip=nn.ClipGlobalNorm(1.0))
    SGD(lr=0.1, clip=ClipGlobalNorm(limit=1.0))
    """

    def __call__(self, g, region, sum_over_slices=None):
        square = np.array([sum(_square(g[part]) for part in region.owned)], np.float64)
        if sum_over_slices:
            sum_over_slices(square)
        _refuse(float(square[0]), "the gradient")
        _scale(g, self.limit, float(square[0]))


def _refuse(square: float, name: str) -> None:
    if not math.isfinite(square):
        raise FloatingPointError(f"cannot clip: the norm of {name} is {math.sqrt(square)}")


def _scale(g: np.ndarray, limit: float, square: float) -> None:
    norm = math.sqrt(square)
    if norm > limit:
        g *= limit / norm
