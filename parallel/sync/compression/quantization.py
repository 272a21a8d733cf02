"""QSGD and TernGrad: unbiased rounding to a few levels, drawn at random.

A number t between two integers becomes floor(t + U), U uniform in [0, 1): the upper one with the probability that
makes the mean t. Codes of 2s + 1 values are packed into words. As the rounding is unbiased no error memory is kept.
Cost: about ten passes over the gradients, most of it drawing U.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nn.registry import register
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.packing import Reader, concatenate, pack, unpack, words

BUCKET = 512  # elements that share a norm; the paper's choice for 4 bits
MOST_LEVELS = 32767
SIGMAS = 2.5


@register("compressor", "qsgd")
@dataclass(eq=False)
class QSGD(Compressor):
    """|v| sign(v_i) xi_i with xi_i in {0, 1/s, ..., 1}, for buckets v of 512 gradients; unbiased.

    The variance is at most min(n/s^2, sqrt(n)/s) |v|^2, n = 512. A message has 4 bytes a bucket and about log2(2s + 1)
    bits a gradient. Source: Alistarh et al. 2017, without its entropy coding.

    Parameters
    ----------
    levels : int
        s, 1 to 32767; 4 make 3.2 bits a gradient.
    """

    levels: int = 4

    def __post_init__(self):
        if not 1 <= self.levels <= MOST_LEVELS:
            raise ValueError(f"qsgd: levels must be 1 to {MOST_LEVELS}, given {self.levels}")
        self.base = 2 * self.levels + 1

    def attach(self, region, dtype, seed=0, shard=(0, 1)):
        super().attach(region, dtype, seed, shard)
        self.buckets = -(-self.length // BUCKET)
        self.values = np.zeros((self.buckets, BUCKET), self.dtype)  # the last bucket is filled up with zeros
        self.flat, self.padding = np.split(self.values.reshape(-1), [self.length])
        return self

    def encode(self, g, step, maximum=None):
        t = self.values
        self.flat[:], self.padding[:] = g, 0  # 0 times a norm that was not finite, in a step that was refused, is NaN
        norms = np.sqrt(np.einsum("ij,ij->i", t, t)).astype(np.float32)
        t *= (self.levels / np.where(norms, norms, np.inf)).astype(self.dtype)[:, None]
        codes = round_up_or_down(self.flat, self.random(step), self.levels)
        return concatenate([norms, pack(codes, self.base)])

    def decode(self, message, total):
        reader = Reader(message)
        norms = reader.read(self.buckets, np.float32)
        codes = unpack(reader.read(words(self.length, self.base), np.uint32), self.base, self.length)
        np.copyto(self.flat, codes, casting="same_kind")
        self.flat -= self.levels
        self.values *= (norms / np.float32(self.levels)).astype(self.dtype)[:, None]
        total += self.flat


@register("compressor", "terngrad")
@dataclass(eq=False)
class TernGrad(Compressor):
    """s sign(g) b with b in {0, 1}, P(b = 1) = |g|/s, s the largest |g| of the tensor over all ranks; unbiased.

    Before, gradients are cut off at 2.5 sigma of their tensor, sigma^2 the mean of g^2: a large s makes much noise. A
    message has 4 bytes a tensor and 1.6 bits a gradient. Source: Wen et al. 2017.
    """

    def encode(self, g, step, maximum=None):
        scales = np.zeros(len(self.tensors), np.float32)
        for i, part in enumerate(self.tensors):
            x = g[part]
            limit = SIGMAS * math.sqrt(float(x @ x) / len(x))
            np.clip(x, -limit, limit, out=x)
            scales[i] = max(float(x.max()), -float(x.min()))
        if maximum:
            maximum(scales)
        for part, scale in zip(self.tensors, scales, strict=True):
            g[part] *= 1 / scale if scale else 0
        codes = round_up_or_down(g, self.random(step), 1)
        return concatenate([scales, pack(codes, 3)])

    def decode(self, message, total):
        reader = Reader(message)
        scales = reader.read(len(self.tensors), np.float32)
        values = unpack(reader.read(words(self.length, 3), np.uint32), 3, self.length).astype(self.dtype)
        values -= 1
        for part, scale in zip(self.tensors, scales, strict=True):
            values[part] *= scale
        total += values


def round_up_or_down(t: np.ndarray, u: np.ndarray, levels: int) -> np.ndarray:
    """floor(t + u) + levels for t in [-levels, levels]: codes in [0, 2 levels], uint16; u is used up."""
    u += t
    np.floor(u, out=u)
    np.clip(u, -levels, levels, out=u)  # t + u may have been rounded up
    u += levels
    return u.astype(np.uint16)
