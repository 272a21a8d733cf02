"""--consistency: how old gradients or parameters may be, where ranks need not wait for each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from parallel.settings import Keys, key, option, refuse


@dataclass(frozen=True)
class ConsistencyOptions:
    """How late gradients or parameters may be."""

    consistency: str = option(
        "sync",
        "ps: when servers apply gradients: sync (all together), ssp:S (as they come, no worker more than S steps ahead "
        "of the slowest), async; ssp:2,ahead=1 reads while computing; ddp: stale:S applies sums S steps late, while "
        "the next steps compute",
        ("sync", "ssp", "async", "stale"),
        metavar="NAME[:KEYS]",
        keys=True,
        planned=True,
    )


@dataclass(frozen=True)
class Consistency(Keys):
    """How old gradients or parameters may be: sync, ssp:S, async (parameter servers), stale:S (without).

    Attributes
    ----------
    name : str
    bound : float
        S: steps; math.inf for any.
    ahead : bool
        Whether workers go on with the parameters that they have while others come, as far as the bound allows.
    """

    KINDS: ClassVar[dict[str, dict[str, type]]] = {
        "ssp": {"bound": int, "ahead": bool},
        "async": {"ahead": bool},
        "stale": {"bound": int},
    }
    name: str = key("sync", "")
    bound: float = key(0.0, "", least=0)
    ahead: bool = key(False, "")

    @classmethod
    def parse(cls, text: str, strategy: str, allowed: tuple[str, ...]) -> Consistency:
        """Read --consistency, for a strategy that has these.

        Raises
        ------
        ValueError
            Another strategy's, no bound, or one below 0.
        """
        from nn import option_strings

        name, parts = option_strings.split(text)
        if name not in allowed:
            raise ValueError(f"consistency {text!r}: expected one of {', '.join(allowed)} with {strategy}")
        values = option_strings.convert(name, parts, cls.KINDS.get(name, {}))
        if name in ("ssp", "stale") and "bound" not in values:
            raise ValueError(f"consistency {text!r} needs a bound in steps, such as {name}:2")
        if values.get("ahead") and values.get("bound") == 0:
            raise ValueError(f"consistency {text!r}: with the bound 0 nothing that comes ahead is new enough")
        return cls(name, **{"bound": math.inf if name == "async" else 0} | values)


def check_local_updates(network, shards: int = 0) -> None:
    """Refuse what needs all ranks in every step, where each is at a step of its own."""
    refuse(bool(shards), "virtual shards are added up over all ranks in every step, and here each is at its own")
    synchronized = any(layer.synchronized for _, layer, _, _ in network.layers())
    refuse(synchronized, "statistics over all ranks need all of them at one step, and here each is at its own")
