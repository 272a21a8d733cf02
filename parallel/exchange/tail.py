"""What travels with the gradients and is summed as they are: loss, size of the batch, running statistics."""

from __future__ import annotations

import numpy as np

from nn.core.layout import ALIGN
from nn.core.network import Network


def head(network: Network) -> int:
    """How many numbers are in front of the statistics.

    The loss; the size of the batch as every rank was told it; as the first one was; in mixed precision, how many
    addends overflowed.
    """
    return 4 if network.mixed else 3


class Tail:
    """The numbers behind a vector of gradients.

    Every **addend** of the sum, which is a rank or a virtual shard, writes its own; then the sums are read. So all
    ranks have the loss of the whole batch, and the mean of the running statistics, and find out in the same message
    if they were told different sizes of the batch: the sum of all is not so many times the first.

    Parameters
    ----------
    head : (3,) array, or (4,) in mixed precision
    statistics : flat array in network.state_layout
        Both are views of what travels.
    """

    def __init__(self, head: np.ndarray, statistics: np.ndarray):
        self.head, self.statistics, self.mixed = head, statistics, len(head) > 3

    @classmethod
    def of(cls, array: np.ndarray, network: Network) -> Tail:
        """An array of `room` elements as a tail."""
        return cls(array[: head(network)], array[ALIGN:])

    @staticmethod
    def room(network: Network) -> int:
        """Elements that a vector has behind its gradients."""
        return ALIGN + network.state_layout.size

    def write(self, loss: float, total: int, first: bool, statistics: np.ndarray) -> None:
        """Of one addend; `first`: whether it is the first of all."""
        self.head[:3] = loss, total, total if first else 0
        if self.mixed:
            self.head[3] = 0
        if statistics.size:
            self.statistics[:] = statistics

    def tell_overflow(self) -> None:
        """Of an addend, after `write`: a number was too large for float16."""
        self.head[3] = 1

    @property
    def overflowed(self) -> bool:
        """Of the sums: whether that is so of any addend."""
        return self.mixed and bool(self.head[3])

    def read(self, addends: int, statistics: np.ndarray) -> tuple[float, float, float]:
        """(loss, mean of the sizes of the batch that were told, the first one) from the sums; fills in `statistics`."""
        if statistics.size:
            np.divide(self.statistics, addends, out=statistics)
        loss, told, first = map(float, self.head[:3])
        return loss, told / addends, first


def differ(total: float, first: float) -> bool:
    """Whether two sizes of a batch do, as sums of float32 tell them."""
    return abs(total - first) > 1e-6 * first
