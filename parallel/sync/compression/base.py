"""The base of all methods of compression: messages, memory, random streams.

A compressor turns this rank's gradients into a message of bytes, and adds messages to a buffer. What a message leaves
out is kept in an error memory e and added to the next gradient, so that nothing is lost, only late:

    p = g + e;  message = C(p);  e = p - C(p)                  so  sum of all sent + e = sum of all g

Gradients of this project are divided by the global batch, so the sum over ranks is what is wanted. Every rank decodes
the messages of all ranks in rank order: the same bits everywhere. Methods whose messages can be added up as they are
(fp16, PowerSGD) reduce in their own way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nn.core.layout import Region
from nn.optim.optimizers import Optimizer
from nn.registry import from_text


@dataclass(eq=False)
class Compressor:
    """Base: hyper-parameters are the fields; `attach` makes the arrays.

    Attributes
    ----------
    memories : tuple of str
        Names of the flat buffers that a rank keeps from step to step; they start at zero.
    varying : bool
        Whether the lengths of messages differ between ranks.
    no_messages : str
        Why the gradient of one rank alone cannot be made a message; empty where it can.
    memory : dict of flat arrays
        The memories, each as long as the region.
    shared : dict of arrays
        What else is kept, alike on all ranks.
    """

    memories = ()
    varying = False
    no_messages = ""

    def attach(self, region: Region, dtype, seed: int = 0, shard: tuple[int, int] = (0, 1)) -> Compressor:
        """Prepare for gradients that cover `region`; returns self.

        Parameters
        ----------
        region : nn.core.layout.Region
            All of a network's layout, or the shard that one parameter server holds.
        dtype : float32 or float64
            Of the gradients.
        seed : int
            With step and rank it determines every random number that is drawn.
        shard : (rank, ranks)
        """
        self.region, self.dtype, self.seed, self.shard = region, np.dtype(dtype), seed, shard
        self.length = region.hi - region.lo
        self.tensors = [part for _, part, _ in region.tensors]
        self.memory = {name: np.zeros(self.length, self.dtype) for name in self.memories}
        self.shared: dict[str, np.ndarray] = {}
        self._scratch: dict[str, np.ndarray] = {}
        return self

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError where this method cannot work with that optimizer."""

    def check_messages(self, servers: int) -> None:
        """Raise ValueError where this method has no messages for so many parameter servers."""
        if self.no_messages:
            raise ValueError(f"{self!r} does not work with parameter servers: {self.no_messages}")

    def set_epoch_steps(self, steps: int) -> None:
        """How many steps an epoch has, for a warm-up that is counted in epochs."""

    def encode(self, g: np.ndarray, step: int, maximum=None) -> np.ndarray:
        """This rank's message: (bytes,) uint8, a multiple of 8 long.

        Parameters
        ----------
        g : (length,) array
            Gradients of this rank's samples; may be overwritten.
        step : int
            Optimizer steps made before this one.
        maximum : callable or None
            Replaces a small array by its maximum over ranks, in place; without it a rank goes by its own.

        Raises
        ------
        TypeError
            A method without messages of single ranks: `no_messages` says why.
        """
        raise TypeError(f"{self!r} has no messages: {self.no_messages}")

    def decode(self, message: np.ndarray, total: np.ndarray) -> None:
        """Add what a message stands for to `total`, (length,)."""
        raise TypeError(f"{self!r} has no messages: {self.no_messages}")

    def reduce(self, g: np.ndarray, wire, step: int) -> None:
        """Replace g by the sum over all ranks of what their messages stand for (collective)."""
        message = self.encode(g, step, wire.maximum)
        messages = wire.allgather_varying(message) if self.varying else wire.allgather(message)
        g[:] = 0
        for message in messages:
            self.decode(message, g)

    def random(self, step: int) -> np.ndarray:
        """(length,) uniform numbers in [0, 1) that depend on seed, step, rank and the region's place alone: scratch."""
        key = np.random.SeedSequence([self.seed, *b"compress", step, self.shard[0], self.region.lo])
        uniform = self.scratch("uniform", self.dtype)
        np.random.default_rng(key).random(out=uniform, dtype=self.dtype)
        return uniform

    def scratch(self, name: str, dtype) -> np.ndarray:
        """(length,) array for this step only."""
        if name not in self._scratch:
            self._scratch[name] = np.zeros(self.length, dtype)
        return self._scratch[name]


def parse(text: str) -> Compressor:
    """A compressor from the command line: NAME[:NUMBER][,KEY=NUMBER...], such as "topk:0.01" or "dgc:0.001,clip=5".

    NUMBER is the method's first parameter, the others go by their names.

    Raises
    ------
    ValueError
        An unknown method or key, or a number out of range; the message says what there is.
    """
    return from_text("compressor", text)


def check_compressor(given: object) -> None:
    """Refuse what is neither a compressor nor None, such as the text that the command line takes."""
    if not isinstance(given, Compressor | None):
        raise TypeError(
            f"compressor must be one such as TopK(0.01), or None, given {given!r:.80}: "
            "parallel.sync.compression.parse makes one of a text"
        )
