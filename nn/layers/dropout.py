"""Dropout (Srivastava et al. 2014): in training some activations are zero, the rest scaled up.

The random numbers are counted, not drawn one after the other (LayerContext.random_bits): so the mask is the same
for any cut of the batch into micro-batches and shards, and when activations are computed again (Recompute).
"""

from __future__ import annotations

import math

import numpy as np

from nn.arguments import Number
from nn.core.layer import Layer
from nn.layers.blockwise import blocks
from nn.registry import register

COUNT = 16  # 16-bit random numbers in one count of the generator: 4 x 64 bits


@register("layer")
class Dropout(Layer):
    """y = x mask / (1 - rate) in training, y = x in evaluation.

    Parameters
    ----------
    rate : float
        Probability of a zero, in [0, 1), exact to 1/65536; the scale is that of the probability used.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.Dropout(0.1), (8,)).out_shape
    (8,)
    """

    output = "view"  # in evaluation; in training x itself where it may be overwritten
    gradient = "view"
    constraints = {"rate": Number(0, below=1)}

    def __init__(self, rate: float = 0.5):
        self.rate = rate

    @property
    def keep_count(self) -> int:
        """Number of every 65536 activations that are not set to zero."""
        return max(1, round((1 - self.rate) * 65536))

    def forward(self, p, x, ctx):
        if not ctx.training or self.keep_count == 65536:
            return x, None
        mask = keep_mask(self.keep_count, x.shape, ctx)
        y = np.multiply(x, mask, ctx.reuse_input(x))
        y *= 65536 / self.keep_count
        return y, mask

    def backward(self, p, gy, mask, ctx):
        if mask is None:
            return gy, {}
        gx = np.multiply(gy, mask, ctx.reuse_grad(gy))
        gx *= 65536 / self.keep_count
        return gx, {}


def keep_mask(keep_count: int, shape: tuple[int, ...], ctx, positions: np.ndarray | None = None) -> np.ndarray:
    """Return a mask of `shape` (batch axis first), True with probability keep_count / 65536.

    Parameters
    ----------
    positions : array of int, ascending, or None
        Draw the mask of these along axis 1 only, (N, len(positions), ...): the others' numbers are skipped.
    """
    samples, size = shape[0], math.prod(shape[1:])
    counts = -(-size // COUNT)  # of the generator, a sample
    width = math.prod(shape[2:])  # of a position
    if positions is None:
        runs = [(0, size)]
    else:
        consecutive = blocks(positions, max(1, len(positions)))
        runs = [(width * block.position, width * (block.position + len(block))) for block in consecutive]
    mask = ctx.empty(shape if positions is None else (samples, len(positions), *shape[2:]), np.bool_)
    flat, at = mask.reshape(samples, sum(hi - lo for lo, hi in runs)), 0  # of no samples, too
    for lo, hi in runs:
        first = lo // COUNT
        for rows, bits in ctx.random_bits(samples, counts, count_range=(first, -(-hi // COUNT))):
            short = bits.astype("<u8", copy=False).view("<u2")
            np.less(short[:, lo - COUNT * first : hi - COUNT * first], keep_count, flat[rows, at : at + hi - lo])
        at += hi - lo
    return mask
