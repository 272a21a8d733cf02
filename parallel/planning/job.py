"""What is predicted: a network's layers, the samples of a step, and what a rank and its memory can do.

A `Mesh` says how ranks share it: rank = (d pipeline + s) tensor + t, so that those of the axis "tensor" are neighbours
and those of "data" farthest apart, as they talk most and least often. A `Prediction` says what a step costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from parallel.planning.group_costs import Group
from parallel.planning.profile import LayerProfile, checked


class Axes(NamedTuple):
    """So many ranks on each axis: replicas, stages, parts of a layer."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return math.prod(self)

    def __str__(self):
        return ",".join(f"{name}={size}" for name, size in zip(self._fields, self, strict=True) if size > 1) or "data=1"

    def group(self, axis: str, memory: bool) -> Group:
        """The ranks that differ in this axis only."""
        strides = {"tensor": 1, "pipeline": self.tensor, "data": self.tensor * self.pipeline}
        return Group(getattr(self, axis), strides[axis], memory)

    @classmethod
    def parse(cls, text: str) -> Axes:
        """ "data=2,tensor=4".

        Raises
        ------
        ValueError
            an axis that is none or named twice, a size below 1
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            if name not in cls._fields or name in sizes or not size.isdecimal() or not int(size):
                raise ValueError(
                    f"mesh {text!r}: expected data=N,pipeline=N,tensor=N with numbers above 0, given {part!r}"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @classmethod
    def all(cls, ranks: int, most_stages: int, most_parts: int) -> Iterator[Axes]:
        """Every way to make so many ranks a product of three."""
        divisors = [n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0]
        divisors = sorted({*divisors, *(ranks // n for n in divisors)})
        for pipeline, tensor in product(divisors, divisors):
            if pipeline <= most_stages and tensor <= most_parts and ranks % (pipeline * tensor) == 0:
                yield cls(ranks // (pipeline * tensor), pipeline, tensor)


@dataclass(frozen=True)
class Job:
    """A training step.

    Attributes
    ----------
    layers : sequence of LayerProfile
        of a mini-batch of `samples` on one rank
    samples : int
    batch : int
        samples of a step, over all ranks
    moments : int
        arrays that the optimizer keeps beside parameters: SGD 0, with momentum 1, Adam 2
    update : float
        seconds of the optimizer for all parameters
    sample_bytes, answer_bytes : float
        of a sample, and of the network's output for one: what a master hands out and collects
    node_memory : bool
        whether ranks of a node sum in its memory
    overlap : bool
        whether messages travel while backprop goes on
    bucket, first_bucket, unit : float
        bytes of gradients that leave together, first; of parameters that travel together where they are sharded
    head : float
        seconds of a step that belong to no layer, such as the loss
    """

    layers: Sequence[LayerProfile]
    samples: int
    batch: int
    moments: int = 0
    update: float = 0.0
    sample_bytes: float = 0.0
    answer_bytes: float = 0.0
    node_memory: bool = True
    overlap: bool = True
    bucket: float = 25 << 20
    first_bucket: float = 1 << 20
    unit: float = 1 << 20
    head: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(checked(self.layers)))
        for name in ("samples", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, given {getattr(self, name)}")

    @cached_property
    def parameters(self) -> float:
        """Bytes."""
        return sum(layer.parameters for layer in self.layers)

    def loss(self, samples: float) -> float:
        """Seconds of what belongs to no layer, for so many samples."""
        return self.head * samples / self.samples

    def share(self, ranks: int) -> int:
        """Samples of the rank that has most of them."""
        return -(-self.batch // ranks)

    def of(self, samples: int) -> list[LayerProfile]:
        """The layers for so many samples."""
        return [layer.of_samples(samples / self.samples) for layer in self.layers]


@dataclass(frozen=True)
class Prediction:
    """What a step costs; bytes are those of the rank that has most.

    Attributes
    ----------
    strategy : str
    axes : Axes
    parts : dict
        seconds of a step on the busiest rank, one after the other: what it computes, and what it waits for
    computing : float
        seconds of computation of all ranks together
    sent, memory : float
        bytes that a rank sends in a step, and keeps
    note : str
        what else there is to say
    micro_batches, cuts : int, tuple of int
        of pipelines: how many, and the layers with which the second stage and all after it begin
    replicas : tuple of int
        of pipedream: ranks of each stage
    """

    strategy: str
    axes: Axes
    parts: dict[str, float]
    computing: float
    sent: float
    memory: float
    note: str = ""
    micro_batches: int = 0
    cuts: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())

    @property
    def ranks(self) -> int:
        return self.axes.ranks

    @property
    def idle_share(self) -> float:
        """Of a rank's time, on average, in which it does not compute."""
        return min(1.0, max(0.0, 1 - self.computing / (self.ranks * self.seconds)))

    @property
    def name(self) -> str:
        """The strategy and, where it has more than one axis, the mesh."""
        return self.strategy if self.axes == (self.ranks, 1, 1) else f"{self.strategy} {self.axes}"
