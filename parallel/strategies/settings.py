"""What strategies whose ranks train apart are told, as texts with keys: --strategy local-sgd:8, --consistency ssp:2.

| text | keys, with what they are unless given |
|---|---|
| --consistency | sync; ssp:S,ahead=0; async:ahead=0 (ps); stale:S (ddp) |
| --strategy downpour | push=1, fetch=1 steps between; ahead=0; warm=0 steps |
| --strategy local-sgd | every=8 steps; drift=0 (never) |
| --strategy diloco | every=500 steps; outer=0.7, momentum=0.9, nesterov=1 of the outer optimizer |
| --strategy sandblaster | chunk=64 samples that a replica is dealt; history=10 pairs of L-BFGS |
| --strategy easgd | every=10 steps; alpha=0.9/ranks |
| --strategy auto | stale=0 (1: also what is not what one process computes: pipedream) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from nn import option_strings


def refuse(wrong: bool, why: str) -> None:
    """Raise ValueError where something is."""
    if wrong:
        raise ValueError(why)


def check_apart(network, shards: int = 0) -> None:
    """Refuse what needs all ranks in every step, where each is at a step of its own."""
    refuse(bool(shards), "virtual shards are added up over all ranks in every step, and here each is at its own")
    together = any(layer.synchronized for _, layer, _, _ in network.layers())
    refuse(together, "statistics over all ranks need all of them at one step, and here each is at its own")


@dataclass(frozen=True)
class Keyed:
    """Settings whose fields are the keys of a text; counts are at least 1, unless `least` says otherwise."""

    name: ClassVar[str]
    least: ClassVar[dict[str, float]] = {}
    most: ClassVar[dict[str, float]] = {}

    def __post_init__(self):
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least = self.least.get(entry.name, 1)
            most = self.most.get(entry.name, math.inf)
            refuse(
                not least <= value <= most,
                f"{self.name}: {entry.name} must be at least {least:g}{f' and at most {most:g}' * (most < math.inf)}, "
                f"given {value:g}",
            )

    @classmethod
    def parse(cls, text: str):
        """Of a text with its name: "local-sgd:8,drift=0.1"."""
        name, parts = option_strings.split(text)
        kinds = {entry.name: type(entry.default) for entry in fields(cls)}
        return cls(**option_strings.convert(name, parts, kinds))


@dataclass(frozen=True)
class Downpour(Keyed):
    """Steps between pushes and between reads; reads ahead; steps at first in which no replica is ahead."""

    name, least = "downpour", {"warm": 0}
    push: int = 1
    fetch: int = 1
    ahead: bool = False
    warm: int = 0


@dataclass(frozen=True)
class LocalSGD(Keyed):
    """Steps between averages; relative distance of a replica from the last average at which there is one; 0: none."""

    name, least = "local-sgd", {"drift": 0}
    every: int = 8
    drift: float = 0.0


@dataclass(frozen=True)
class DiLoCo(Keyed):
    """Inner steps of a round; rate and momentum of the outer optimizer."""

    name, least, most = "diloco", {"outer": 0, "momentum": 0}, {"momentum": 1}
    every: int = 500
    outer: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


@dataclass(frozen=True)
class EASGD(Keyed):
    """Steps between meetings with the centre; how far replica and centre move towards each other; 0: 0.9 / ranks."""

    name, least, most = "easgd", {"alpha": 0}, {"alpha": 1}
    every: int = 10
    alpha: float = 0.0


@dataclass(frozen=True)
class Sandblaster(Keyed):
    """Samples that a replica is dealt at once; pairs of steps and gradient changes that L-BFGS keeps."""

    name = "sandblaster"
    chunk: int = 64
    history: int = 10


@dataclass(frozen=True)
class Auto(Keyed):
    """Whether the plan may choose pipelines whose weights are stale."""

    name = "auto"
    stale: bool = False


@dataclass(frozen=True)
class Consistency(Keyed):
    """How old gradients or parameters may be: sync, ssp:S, async (parameter servers), stale:S (without).

    Attributes
    ----------
    name : str
    bound : float
        S: steps; math.inf for any.
    ahead : bool
        Whether workers go on with the parameters that they have while others come, as far as the bound allows.
    """

    least: ClassVar[dict[str, float]] = {"bound": 0}
    name: str = "sync"
    bound: float = 0
    ahead: bool = False

    @classmethod
    def parse(cls, text: str, strategy: str):
        """Of --consistency, for a strategy.

        Raises
        ------
        ValueError
            Another strategy's, no bound, or one below 0.
        """
        name, parts = option_strings.split(text)
        allowed = CONSISTENCIES.get(strategy, ())
        if name not in allowed:
            raise ValueError(f"consistency {text!r}: expected one of {', '.join(allowed)} with {strategy}")
        kinds = {"ssp": {"bound": int, "ahead": bool}, "async": {"ahead": bool}, "stale": {"bound": int}}
        found = option_strings.convert(name, parts, kinds.get(name, {}))
        if name in ("ssp", "stale") and "bound" not in found:
            raise ValueError(f"consistency {text!r} needs a bound in steps, such as {name}:2")
        if found.get("ahead") and found.get("bound") == 0:
            raise ValueError(f"consistency {text!r}: with the bound 0 nothing that comes ahead is new enough")
        return cls(name, **{"bound": math.inf if name == "async" else 0} | found)


OF_STRATEGIES = {kind.name: kind for kind in (Downpour, LocalSGD, DiLoCo, EASGD, Sandblaster, Auto)}
CONSISTENCIES = {"ps": ("sync", "ssp", "async"), "ddp": ("sync", "stale")}
