"""Dropout (Srivastava et al. 2014): in training some activations are zero, the rest scaled up.

The random numbers are **counted**, not drawn one after the other (Salmon et al. 2011, Philox): every sample of the
global batch has its own place in the stream of (seed, step, layer). So the mask is the same on any number of ranks, for
any cut into micro-batches, and when activations are computed again (Recompute).
"""

from __future__ import annotations

import math

import numpy as np

from nn.core.layer import Layer, check_numbers

COUNT = 16  # 16-bit random numbers in one count of the generator: 4 x 64 bits


class Dropout(Layer):
    """y = x mask / (1 - rate) in training, y = x in evaluation.

    Parameters
    ----------
    rate : float
        Probability of a zero, in [0, 1), exact to 1/65536; the scale is that of the probability used.
    """

    output = "view"  # in evaluation; in training x itself where it is free
    gradient = "view"

    def __init__(self, rate: float = 0.5):
        check_numbers("Dropout", rate=rate)
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: rate must be in [0, 1), given {rate}")
        self.rate = rate
        self.kept = max(1, round((1 - rate) * 65536))  # of 65536

    def __repr__(self):
        return f"Dropout({self.rate})"

    def forward(self, p, x, run):
        if not run.training or self.kept == 65536:
            return x, None
        mask = keep_mask(self.kept, x.shape, run)
        y = np.multiply(x, mask, run.like_x(x))
        y *= 65536 / self.kept
        return y, mask

    def backward(self, p, g, gy, mask, run):
        if mask is None:
            return gy
        gx = np.multiply(gy, mask, run.like_gy(gy))
        gx *= 65536 / self.kept
        return gx


def keep_mask(kept: int, shape: tuple[int, ...], run) -> np.ndarray:
    """A mask of `shape` (batch axis first), True with probability kept / 65536."""
    batch, size = run.micro_batch, math.prod(shape[1:])
    counts = -(-size // COUNT)  # of the generator, a sample
    key = np.random.SeedSequence([run.context.seed, batch.step, *run.path.encode()]).generate_state(2, np.uint64)
    mask, at = run.empty(shape, np.bool_), 0
    for first, samples in batch.pieces or [(batch.sample, shape[0])]:
        stream = np.random.Philox(key=key, counter=first * counts)
        bits = stream.random_raw(samples * counts * 4).astype("<u8", copy=False).view("<u2")
        rows = mask[at : at + samples].reshape(samples, size)
        np.less(bits.reshape(samples, counts * COUNT)[:, :size], kept, rows)
        at += samples
    return mask
