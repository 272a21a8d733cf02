"""none: gradients as they are, what the other methods are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from nn.registry import register
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.packing import Reader, concatenate


@register("compressor", "none")
@dataclass(eq=False)
class Dense(Compressor):
    """One allreduce. Keeps nothing."""

    def encode(self, g, step, maximum=None):
        return concatenate([g])

    def decode(self, message, total):
        total += Reader(message).read(self.length, self.dtype)

    def reduce(self, g, wire, step):
        wire.allreduce(g)
