"""--elastic: what is done when a rank dies, as a text with keys.

| text | keys, with what they are unless given |
|---|---|
| shrink | the others go on: min=2 ranks, else the run ends; buddy=10 |
| respawn | another process takes its place: min=2, as long as none can be started; buddy=10 |

Ranks that are silent for heartbeat=30 seconds, or compute for loop=120 and ten times their longest step, are killed;
with silent=wait they are named only. 0 is for ever, and no other value may be below 1. Where ranks have parts of the
state, neighbours have copies, at most buddy=10 steps old; with buddy=0 only checkpoints help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from nn import option_strings
from parallel.strategies.settings import Keyed, refuse

KINDS = ("shrink", "respawn")
SILENT = ("kill", "wait")
SHORTEST = 1.0  # seconds: any rank may be silent as long, for it waits for a core or a disk
KILLED = 2  # times as long as a rank may be silent: by then it has been killed, and the others know


@dataclass(frozen=True)
class Policy(Keyed):
    """How a run survives.

    Attributes
    ----------
    min : int
        Ranks with which it goes on.
    heartbeat, loop : float
        Seconds that a rank may be silent, and may compute without a step or a call; 0 for ever.
    silent : str
        "kill" or "wait".
    buddy : int
        Steps between two copies of what a rank alone has, for a neighbour; 0 for none.
    kind : str
        One of KINDS.
    """

    name: ClassVar[str] = "elastic"
    least: ClassVar[dict[str, float]] = {"buddy": 0, "heartbeat": 0, "loop": 0}
    min: int = 2
    buddy: int = 10
    heartbeat: float = 30.0
    loop: float = 120.0
    silent: str = "kill"
    kind: str = "shrink"

    def patience(self, watch: float) -> float:
        """Seconds that ranks may wait for each other (0: for ever), where the user gives them `watch`.

        A rank that is stopped is the heartbeat's business first: the others go on without it.
        """
        return max(watch, KILLED * self.heartbeat) if watch and self.silent == "kill" else watch

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Of --elastic.

        Raises
        ------
        ValueError
            What there is not; fewer ranks than one.
        """
        kind, parts = option_strings.split(text)
        refuse(kind not in KINDS, f"elastic {text!r}: expected one of {', '.join(KINDS)}")
        kinds = {"min": int, "buddy": int, "heartbeat": float, "loop": float, "silent": str}
        found = cls(kind=kind, **option_strings.convert(kind, parts, kinds))
        for name in ("heartbeat", "loop"):
            seconds = getattr(found, name)
            refuse(
                0 < seconds < SHORTEST or seconds == math.inf,
                f"elastic {text!r}: {name} must be at least {SHORTEST:g} seconds, or 0 for ever, given {seconds:g}",
            )
        refuse(found.silent not in SILENT, f"elastic {text!r}: silent must be one of {', '.join(SILENT)}")
        return found
