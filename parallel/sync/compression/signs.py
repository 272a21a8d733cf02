"""1-bit SGD and EF-signSGD: one bit a gradient, two levels a tensor, the error fed back.

Sign bits are packed by eight. A message has 8 or 4 bytes a tensor (the levels) and a bit a gradient: 1/32 of float32.
Both keep an error memory e; with a rate that changes from step to step e is not rescaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nn.registry import register
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.packing import Reader, concatenate


@dataclass(eq=False)
class TwoLevels(Compressor):
    """Base: every element of a tensor becomes `upper` where p >= 0, else `lower`."""

    memories = ("error",)
    numbers = 2  # sent for each tensor

    def levels(self, p: np.ndarray, count: int) -> tuple[float, ...]:
        """Return the numbers to send for a tensor with `count` elements p >= 0."""
        raise TypeError(f"{type(self).__name__} does not define levels")

    def bounds(self, levels: np.ndarray) -> tuple[float, float]:
        """(lower, upper) from that."""
        raise TypeError(f"{type(self).__name__} does not define bounds")

    def encode(self, g, step, maximum=None):
        e = self.memory["error"]
        e += g
        positive = e >= 0
        levels = np.zeros((len(self.tensors), self.numbers), np.float32)
        for i, part in enumerate(self.tensors):
            levels[i] = self.levels(e[part], np.count_nonzero(positive[part]))
        e -= self._values(levels, positive.view(np.uint8))
        return concatenate([levels, np.packbits(positive)])

    def decode(self, message, total):
        reader = Reader(message)
        levels = reader.read(len(self.tensors) * self.numbers, np.float32).reshape(-1, self.numbers)
        total += self._values(levels, np.unpackbits(reader.rest(), count=self.length))

    def _values(self, levels: np.ndarray, bits: np.ndarray) -> np.ndarray:
        values = self.scratch("values", self.dtype)
        for part, numbers in zip(self.tensors, levels.astype(self.dtype), strict=True):
            lower, upper = self.bounds(numbers)
            x = values[part]
            np.multiply(bits[part], upper - lower, out=x)
            x += lower
        return values


@register("compressor", "onebit")
@dataclass(eq=False)
class OneBit(TwoLevels):
    """1-bit SGD: the levels are the means of the elements p >= 0 and of those below. Source: Seide et al. 2014.

    The paper has two levels for each column of a weight matrix; here they are a tensor's.
    """

    def levels(self, p, count):
        total, size = float(p.sum()), float(np.abs(p).sum())
        return (total - size) / 2 / max(1, len(p) - count), (total + size) / 2 / max(1, count)

    def bounds(self, levels):
        return levels[0], levels[1]


@register("compressor", "signsgd")
@dataclass(eq=False)
class SignSGD(TwoLevels):
    """EF-signSGD: (|p|_1 / d) sign(p) for each tensor p of d elements. Source: Karimireddy et al. 2019."""

    numbers = 1

    def levels(self, p, count):
        return (float(np.abs(p).sum()) / len(p),)

    def bounds(self, levels):
        return -levels[0], levels[0]
