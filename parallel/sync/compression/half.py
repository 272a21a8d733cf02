"""fp16: gradients travel as 16-bit floating point numbers and are summed in 32 bits.

Each rank rounds its gradients, gets one part of every rank's, adds them in rank order in float32, rounds the sum and
gives it to all: a reduce-scatter and an allgather whose messages are half as long. So a sum is rounded once, however
many ranks there are. Before, gradients are multiplied by a power of two, the same on all ranks, such that no sum can
leave the range of float16 (65504): small gradients stay above its smallest numbers, whose conversion is slow, too.
Source: Micikevicius et al. 2018 (mixed precision training). Keeps nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nn.registry import register
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.packing import EVEN, Reader, concatenate

EXPONENTS = (-126, 126)  # of the power of two


@register("compressor", "fp16")
@dataclass(eq=False)
class Half(Compressor):
    """fp16."""

    def attach(self, region, dtype, seed=0, shard=(0, 1)):
        super().attach(region, dtype, seed, shard)
        part = -(-self.length // (EVEN * shard[1])) * EVEN
        self.mine = np.zeros((shard[1], part), np.uint16)  # row i is what rank i adds up
        self.theirs = np.empty_like(self.mine)
        self.total = np.empty(part, np.float32)
        return self

    def encode(self, g, step, maximum=None):
        scale = self._halve(g, maximum)
        return concatenate([np.array([scale]), self.mine.reshape(-1)[: self.length]])

    def decode(self, message, total):
        reader = Reader(message)
        scale = float(reader.read(1, np.float64)[0])
        total += reader.read(self.length, np.float16).astype(self.dtype) * (1 / scale)

    def reduce(self, g, wire, step):
        scale = self._halve(g, wire.maximum)
        wire.alltoall(self.mine, self.theirs)
        self.total[:] = 0
        for theirs in self.theirs:
            self.total += theirs.view(np.float16)
        sums = wire.allgather(self.total.astype(np.float16).view(np.uint8))
        for i, part in enumerate(sums):
            values = part.view(np.float16)
            target = g[i * len(values) : (i + 1) * len(values)]
            np.multiply(values[: len(target)], 1 / scale, out=target, dtype=self.dtype)

    def _halve(self, g: np.ndarray, maximum) -> float:
        """Put scale * g into `mine` as float16; returns the scale."""
        largest = np.array([max(float(g.max(initial=0)), -float(g.min(initial=0)))])  # a slice may be empty
        if maximum:
            maximum(largest)
        room = float(np.finfo(np.float16).max) / self.shard[1]
        exponent = math.floor(math.log2(room) - math.log2(largest[0])) if 0 < largest[0] < math.inf else 0
        scale = 2.0 ** min(max(exponent, EXPONENTS[0]), EXPONENTS[1])
        self.mine.reshape(-1).view(np.float16)[: self.length] = np.multiply(g, scale, out=g)
        return scale
