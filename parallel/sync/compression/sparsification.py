"""Top-k, threshold and DGC: only the largest gradients travel, as indices and values; the others wait in memory.

A message has 8 bytes for their number, the values, and for each index 2 bytes, or a bitmap of all where that is
shorter; nothing where all are sent, so that a ratio of 1 is the dense sum. Choosing costs a few passes over |p|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nn.registry import register
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.packing import Reader, concatenate, pack_indices, unpack_indices

LARGEST_RATIO = 1.0
SAMPLE = 1 << 12  # magnitudes from which the largest of many are estimated


@dataclass(eq=False)
class Sparse(Compressor):
    """Base: what the messages of sparse vectors look like."""

    def message(self, values: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return concatenate([np.array([len(indices)], np.int64), values, *pack_indices(indices, self.length)])

    def decode(self, message, total):
        reader = Reader(message)
        count = int(reader.read(1, np.int64)[0])
        values = reader.read(count, self.dtype)
        total[unpack_indices(reader.rest(), count, self.length)] += values


@register("compressor", "topk")
@dataclass(eq=False)
class TopK(Sparse):
    """The ratio of p = g + e that is largest in magnitude, over all tensors together.

    Sources: Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018. Keeps the error memory e.

    Parameters
    ----------
    ratio : float
        Of the gradients that are sent, above 0, at most 1.
    """

    ratio: float = 0.01
    memories = ("error",)

    def __post_init__(self):
        check_ratio("topk", self.ratio)

    def encode(self, g, step, maximum=None):
        e = self.memory["error"]
        e += g
        indices = largest(e, math.ceil(self.ratio * self.length), self.scratch("size", self.dtype))
        values = e[indices]
        e[indices] = 0
        return self.message(values, indices)


@register("compressor", "threshold")
@dataclass(eq=False)
class Threshold(Sparse):
    """Every p = g + e with |p| >= limit. Source: Strom 2015, which sends only the sign of p, and limit for |p|.

    Keeps the error memory e. Messages differ in length, so their lengths travel first.

    Parameters
    ----------
    limit : float
        In units of a rank's gradient, which is divided by the global batch; 0 sends all.
    """

    limit: float = 0.001
    memories = ("error",)
    varying = True

    def __post_init__(self):
        if not self.limit >= 0:
            raise ValueError(f"threshold: the limit must not be negative, given {self.limit}")

    def encode(self, g, step, maximum=None):
        e = self.memory["error"]
        e += g
        indices = np.flatnonzero(np.abs(e, out=self.scratch("size", self.dtype)) >= self.limit)
        values = e[indices]
        e[indices] = 0
        return self.message(values, indices)


@register("compressor", "dgc")
@dataclass(eq=False)
class DGC(Sparse):
    """Deep gradient compression: u = m u + g; v += u; of each tensor the largest |v| are sent, u and v zeroed there.

    So momentum acts before the choice is made (momentum correction), and does not push on what has just been sent
    (masking). The optimizer has no momentum of its own. The first epochs send 25, 6.25, 1.56 and 0.39% (a sparsity of
    75, 93.75, 98.4 and 99.6%), all later ones `ratio` (99.9%). Source: Lin et al. 2018. Keeps u and v.

    Parameters
    ----------
    ratio : float
        Of the gradients that are sent after warm-up.
    momentum : float
        m.
    clip : float
        The gradient of this rank is clipped to the norm clip / sqrt(ranks) before it is added; 0: not at all.
    epoch : int
        Steps in an epoch of the warm-up; 0: as `set_epoch_steps` says, and no warm-up where nobody calls it.
    masking : bool
        Whether u is zeroed where it was sent; without it, and with a ratio of 1, this is SGD with momentum.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    epoch: int = 0
    masking: bool = True
    memories = ("u", "v")

    def __post_init__(self):
        check_ratio("dgc", self.ratio)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"dgc: momentum must be in [0, 1), given {self.momentum}")
        if not (self.clip >= 0 and self.epoch >= 0):
            raise ValueError(f"dgc: clip and epoch must not be negative, given {self.clip} and {self.epoch}")

    def check(self, optimizer):
        if getattr(optimizer, "momentum", 0) or "mean" in optimizer.slots:
            raise ValueError(
                f"dgc has the momentum itself ({self.momentum}), so the optimizer must have none, given {optimizer!r}; "
                "use SGD, RMSprop or LARS with momentum 0, or Adagrad: dgc:RATIO,momentum=M sets that of dgc"
            )

    def check_messages(self, servers):
        super().check_messages(servers)
        if self.clip and servers > 1:
            raise ValueError(
                f"dgc: clip={self.clip:g} is for the norm of the whole gradient, of which each of {servers} parameter "
                "servers gets a slice: use one server, or no clip"
            )

    def set_epoch_steps(self, steps):
        self.epoch = self.epoch or steps

    def ratio_at(self, step: int) -> float:
        """The share of gradients that is sent in a step."""
        return max(self.ratio, 0.25 ** (1 + step // self.epoch)) if self.epoch else self.ratio

    def encode(self, g, step, maximum=None):
        if self.clip:
            norm, limit = math.sqrt(float(g @ g)), self.clip / math.sqrt(self.shard[1])
            if norm > limit:
                g *= limit / norm
        u, v, ratio = self.memory["u"], self.memory["v"], self.ratio_at(step)
        u *= self.momentum
        u += g
        v += u
        if ratio == LARGEST_RATIO:
            indices = np.arange(self.length)
        else:
            room = self.scratch("size", self.dtype)
            counts = (math.ceil(ratio * (part.stop - part.start)) for part in self.tensors)
            parts = zip(self.tensors, counts, strict=True)
            indices = np.concatenate([largest(v[part], count, room[part]) + part.start for part, count in parts])
        values = v[indices]
        v[indices] = 0
        if self.masking:
            u[indices] = 0
        return self.message(values, indices)


def largest(p: np.ndarray, count: int, room: np.ndarray | None = None) -> np.ndarray:
    """Rising indices of the `count` elements that are largest in magnitude; of equal ones the first.

    `room`, as long as p, is workspace: a new array each time would cost more in page faults than choosing does.
    """
    if count >= len(p):
        return np.arange(len(p))
    size = np.abs(p, out=room)
    places = likely(size, count)
    among = size[places]
    limit = np.partition(among, len(among) - count)[len(among) - count]
    if math.isnan(limit):
        return np.flatnonzero(np.isnan(size))[:count]
    above = places[~(among < limit)]  # NaN counts as large: it must not hide in the memory
    if len(above) > count:
        equal = above[size[above] == limit]
        surplus = equal[len(equal) - (len(above) - count) :]
        above = np.setdiff1d(above, surplus, assume_unique=True)
    return above


def likely(size: np.ndarray, count: int) -> np.ndarray:
    """Rising places that hold the `count` largest numbers and few others, as a sample says; all, where it errs.

    To partition all takes longer than everything else: 1 ms for 670,000; to partition these takes next to nothing.
    """
    stride = len(size) // SAMPLE | 1
    if stride > 1:
        sample = size[::stride]
        expected = len(sample) * count / len(size)
        at = len(sample) - math.ceil(expected + 4 * math.sqrt(expected) + 4)  # four standard deviations to be safe
        if at >= 0:
            places = np.flatnonzero(~(size < np.partition(sample, at)[at]))
            if len(places) >= count:
                return places
    return np.arange(len(size))


def check_ratio(name: str, ratio: float) -> None:
    """Raise ValueError for a share of the entries that cannot be sent."""
    if not 0 < ratio <= LARGEST_RATIO:
        raise ValueError(f"{name}: the ratio must be above 0 and at most 1, given {ratio}")
