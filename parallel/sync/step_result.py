"""The message that is summed with the gradients (`StepMessage`), and the result of a step (`StepResult`).

Ranks must be given the same size of the global batch, by which each divides its gradient, and the same settings of the
optimizer, such as the learning rate. Whether they were, every rank learns from the same message, before anything is
updated (`AgreementCode`).
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nn.core.layout import ALIGN
from nn.core.network import Network
from nn.optim.optimizers import Optimizer

LOSS, OVERFLOW, CODE = 0, 1, 2  # places in a message's head; the code of what ranks agree on comes last


class StepResult(NamedTuple):
    """The result of a step, the same on every rank.

    Attributes
    ----------
    loss : float
        Mean loss of the global batch; with local updates, this rank's estimate of it.
    agreed : bool
        Whether all ranks were given one size of the global batch, and have one optimizer.
    overflowed : bool
        Whether a value was too large for float16 on any rank.
    buffers : flat array or None
        Running statistics, the mean over all ranks; None where they remain each rank's own.
    """

    loss: float
    agreed: bool
    overflowed: bool = False
    buffers: np.ndarray | None = None


class AgreementCode:
    """A size of the global batch and a checksum as numbers whose sum over addends shows whether all are the same.

    The bits of the size, of which those of the checksum flip some, are digits of the numbers in base addends + 1, so a
    sum of addends never carries: each digit of the sum counts the addends with that bit. If all have the same, every
    digit is 0 or the number of addends; if any two differ, some digit is neither. This is exact in float32 too, as a
    sum of sizes and of squares is not.

    Parameters
    ----------
    addends : int
    dtype : float32 or float64
        Of the message.

    Attributes
    ----------
    elements : int
        Numbers of the code: 6 for 3 addends in float32.
    encoded : (float, int, array)
        What was encoded last, and its code.
    """

    def __init__(self, addends: int, dtype):
        self.addends = addends
        digits = max(1, int((np.finfo(dtype).nmant + 1) / math.log2(addends + 1)))
        self.elements = -(-64 // digits)
        self.powers = (addends + 1.0) ** np.arange(digits)
        self.encoded: tuple[float, int, np.ndarray] = math.nan, 0, np.empty(0)

    def encode(self, size: float, checksum: int = 0) -> np.ndarray:
        """Return the numbers of a size and a checksum of 32 bits, (elements,) float64.

        The size may be a sum of class weights.
        """
        if (size, checksum) != self.encoded[:2]:
            both = np.array([size], np.float64).view(np.uint64) ^ np.uint64(checksum)
            bits = np.zeros(self.elements * len(self.powers))
            bits[:64] = np.unpackbits(both.view(np.uint8))
            self.encoded = size, checksum, bits.reshape(self.elements, -1) @ self.powers
        return self.encoded[2]

    def agree(self, sums: np.ndarray) -> bool:
        """Return whether all addends had the same."""
        counts = (sums.astype(np.float64)[:, None] // self.powers % (self.addends + 1)).reshape(-1)[:64]
        return bool(((counts == self.addends) | (counts == 0)).all())


class SizeLog:
    """Sizes of the global batches since local-update ranks last synchronized: all must have had the same.

    Attributes
    ----------
    first : int
        The step of the first one.
    sizes : array of float
    """

    def __init__(self):
        self.first, self.sizes = 0, array("d")

    def add(self, step: int, size: float) -> None:
        """Add the size of a step's global batch."""
        if not self.sizes:
            self.first = step
        self.sizes.append(size)

    def checksum(self) -> int:
        """Return a number of 32 bits that differs where steps or sizes do."""
        return zlib.crc32(self.sizes.tobytes(), self.first & 0xFFFFFFFF)

    def drain(self) -> tuple[int, list[float]]:
        """Return (first step, sizes), and forget them."""
        found = self.first, list(self.sizes)
        self.clear()
        return found

    def clear(self) -> None:
        del self.sizes[:]


class StepMessage:
    """The numbers behind a vector of gradients.

    Every **addend** of the sum, which is a rank or a virtual shard, writes its own; `result` reads the sums.

    Parameters
    ----------
    head : array of `head_elements`
    buffers : flat array in network.buffer_layout
        Both are views of what travels.
    addends : int
    """

    def __init__(self, head: np.ndarray, buffers: np.ndarray, addends: int):
        self.head, self.buffers, self.addends = head, buffers, addends
        self.code = AgreementCode(addends, head.dtype)

    @classmethod
    def of(cls, array: np.ndarray, addends: int) -> StepMessage:
        """Use an array of `elements` elements as a message."""
        head = head_elements(addends, array.dtype)
        return cls(array[:head], array[-(-head // ALIGN) * ALIGN :], addends)

    @staticmethod
    def elements(network: Network, addends: int) -> int:
        """Return how many elements a vector has behind its gradients."""
        return -(-head_elements(addends, network.dtype) // ALIGN) * ALIGN + network.buffer_layout.size

    def write(self, loss: float, samples: float, buffers: np.ndarray, checksum: int = 0) -> None:
        """Write the numbers of one addend, in a global batch of that size; the checksum is of the optimizer."""
        self.head[:CODE] = loss, 0
        self.head[CODE:] = self.code.encode(samples, checksum)
        if buffers.size:
            self.buffers[:] = buffers

    def set_overflow(self) -> None:
        """Note, after `write`, that a value of the addend was too large for float16."""
        self.head[OVERFLOW] = 1

    @property
    def loss(self) -> float:
        return float(self.head[LOSS])

    def result(self) -> StepResult:
        """Read the sums over all addends."""
        mean = self.buffers / self.addends if self.buffers.size else None
        return StepResult(self.loss, self.code.agree(self.head[CODE:]), bool(self.head[OVERFLOW]), mean)


def head_elements(addends: int, dtype) -> int:
    """Return how many elements of a message are in front of the running statistics."""
    return CODE + AgreementCode(addends, dtype).elements


def checksum(optimizer: Optimizer) -> int:
    """Return 32 bits that differ where any setting does: the rate, a momentum, what is frozen."""
    values = [getattr(optimizer, name) for name in optimizer.__dataclass_fields__]
    numbers = array("d", [value for value in values if isinstance(value, float | int)])
    others = [value for value in values if value and not isinstance(value, float | int)]
    return zlib.crc32(repr(others).encode() if others else b"", zlib.crc32(numbers.tobytes()))


def disagreement(step: int, sizes: Sequence[float], optimizers: Sequence[str] = ()) -> str:
    """Say which rank was given which size of the global batch, or optimizer; both in the order of ranks."""
    if len(set(sizes)) == 1 and len(set(optimizers)) > 1:
        return (
            f"step {step}: ranks disagree on the optimizer: {listed(optimizers)}. Nothing was updated; change its "
            "settings, and what is frozen, alike on every rank: in callbacks on all of them, not on the one that writes"
        )
    if len(set(sizes)) == 1:
        return (
            f"step {step}: all ranks were given {sizes[0]:.12g} as the size of the global batch, and their sum says "
            "otherwise. Nothing was updated; a sync must sum the whole flat_buffer over ranks exactly once, and an "
            "optimizer's repr must show its settings"
        )
    return (
        f"step {step}: ranks disagree on the size of the global batch: {listed(sizes)}. Nothing was updated; "
        "give step(x, y, total) the same total on every rank"
    )


def listed(values: Sequence[float | str]) -> str:
    """Say which ranks have which size, or optimizer."""
    ranks: dict[float | str, list[int]] = {}
    for rank, value in enumerate(values):
        if isinstance(value, str) or not math.isnan(value):  # this rank has not made the step
            ranks.setdefault(value, []).append(rank)
    texts = {value: value if isinstance(value, str) else f"{value:.12g}" for value in ranks}
    return "; ".join(
        f"{texts[value]} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}" for value, who in ranks.items()
    )


def late_disagreement(logs: list[tuple[int, list[float]]]) -> str:
    """Return in which step local-update ranks were first given different sizes, in words; '' where they were not.

    `logs` are those of SizeLog, by rank; a rank that has made fewer steps, as one that has ended, is no disagreement.
    """
    steps = sorted({first + i for first, sizes in logs for i in range(len(sizes))})
    for step in steps:
        sizes = [log[step - first] if 0 <= step - first < len(log) else math.nan for first, log in logs]
        if len({size for size in sizes if not math.isnan(size)}) > 1:
            return (
                f"step {step}: ranks disagree on the size of the global batch: {listed(sizes)}. Ranks make local "
                "updates, and find it when they synchronize: go back to a state from before that step, and give "
                "step(x, y, total) the same total on every rank"
            )
    return ""
