"""--strategy auto: the planner chooses (command/auto.py); here is what may be said to it."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.settings import Keys, key, option

AUTO = "auto"


@dataclass(frozen=True)
class AutoKeys(Keys):
    """What may stand behind --strategy auto:."""

    name = AUTO
    stale: bool = key(False, "whether a pipeline whose weights are stale may be chosen")


@dataclass(frozen=True)
class AutoOptions:
    """What is chosen from."""

    memory_limit: str | None = option(
        None, "bytes that a rank may use, such as 16GiB: strategies that need more are left out", metavar="BYTES"
    )
