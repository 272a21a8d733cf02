"""What is predicted: a network's layers, the samples of a step, and what a rank and its memory can do.

A `Mesh` says how ranks share it: rank = (((d expert + e) pipeline + s) context + c) tensor + t, so those of "tensor"
are neighbours and those of "data" farthest apart, as they talk most and least often. A `Prediction` says what a step
costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from parallel.axis import AXES
from parallel.planning.group_costs import Group
from parallel.planning.profile import LayerProfile, checked


class Axes(NamedTuple):
    """Number of ranks on each axis: replicas, stages, shards of a layer, parts of a sequence, shares of the experts."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        return math.prod(self)

    def __str__(self):
        return ",".join(f"{name}={size}" for name, size in zip(self._fields, self, strict=True) if size > 1) or "data=1"

    def group(self, axis: str, memory: bool) -> Group:
        """The ranks that differ in this axis only; of "data" also in "context": they have the same of the network."""
        if axis != "data":
            names = list(AXES)
            stride = math.prod(getattr(self, later, 1) for later in names[names.index(axis) + 1 :])
            return Group(getattr(self, axis), stride, memory)
        return Group(self.data * self.context, self.tensor * self.pipeline * self.expert, memory)

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
                    f"mesh {text!r}: expected data=N,pipeline=N,tensor=N,context=N,expert=N with numbers above 0, "
                    f"given {part!r}"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @classmethod
    def all(
        cls, ranks: int, most_stages: int, most_parts: int, most_positions: int = 1, experts: int = 0
    ) -> Iterator[Axes]:
        """Yield every mesh of `ranks` ranks within the limits; with an axis "expert" where some ranks divide experts.

        Pipelines are left out beside that axis: nothing predicts them.
        """
        divisors = [n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0]
        divisors = sorted({*divisors, *(ranks // n for n in divisors)})
        contexts = [n for n in divisors if n <= most_positions] or [1]
        for pipeline, tensor, context in product(divisors, divisors, contexts):
            model = pipeline * tensor * context
            if pipeline <= most_stages and tensor <= most_parts and ranks % model == 0:
                yield cls(ranks // model, pipeline, tensor, context)
                for expert in divisors[1:] if pipeline == 1 and experts else ():
                    if experts % (expert * tensor) == 0 and ranks % (model * expert) == 0:
                        yield cls(ranks // (model * expert), 1, tensor, context, expert)


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
        bytes of one sample and of the network's output for it: what a master sends and receives
    node_memory : bool
        whether ranks of a node sum in its memory
    overlap : bool
        whether messages travel while backprop goes on
    bucket, first_bucket, unit : float
        bytes of a bucket of gradients and of the first bucket; of a unit of sharded parameters
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

    def updating(self, nbytes: float) -> float:
        """Return seconds of the optimizer for some of the parameters, given in bytes."""
        return self.update * nbytes / self.parameters if nbytes else 0.0

    def loss(self, samples: float) -> float:
        """Return seconds that belong to no layer, for `samples` samples."""
        return self.head * samples / self.samples

    def share(self, ranks: int) -> int:
        """Return the samples of the rank that has the most."""
        return -(-self.batch // ranks)

    def of(self, samples: int) -> list[LayerProfile]:
        """Return the layers, scaled to `samples` samples."""
        return [layer.of_samples(samples / self.samples) for layer in self.layers]


@dataclass(frozen=True)
class Prediction:
    """Cost of a step; bytes are those of the rank that needs the most.

    Attributes
    ----------
    strategy : str
    axes : Axes
    parts : dict
        seconds of the busiest rank's step by what it computes and what it waits for; they add up to the step
    computing : float
        seconds of computation of all ranks together
    sent, memory : float
        bytes that a rank sends in a step; bytes of memory that it needs
    note : str
        a remark for the reader
    micro_batches, cuts : int, tuple of int
        of pipelines: the micro-batches of a step, and the first layer of the second and each later stage
    replicas : tuple of int
        of pipedream: ranks of each stage
    attention : str
        "ring" or "ulysses" where ranks share sequences: the faster one
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
    attention: str = ""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())

    @property
    def ranks(self) -> int:
        return self.axes.ranks

    @property
    def idle_share(self) -> float:
        """Mean fraction of a rank's time in which it does not compute."""
        return min(1.0, max(0.0, 1 - self.computing / (self.ranks * self.seconds)))

    @property
    def name(self) -> str:
        """The strategy, and the mesh if it has more than one axis."""
        return self.strategy if self.axes == Axes(self.ranks) else f"{self.strategy} {self.axes}"
