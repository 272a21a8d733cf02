"""--elastic: what is done when a rank dies, as a text with keys.

| text | keys, with what they are unless given |
|---|---|
| shrink | the others go on: min=2 ranks, else the run ends; buddy=10 |
| respawn | another process takes its place: min=2, as long as none can be started; buddy=10 |

Where state is in shards, neighbours have copies that are buddy=10 steps old at most; with buddy=0 only checkpoints help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nn import keyed
from parallel.strategies.settings import Keyed, refuse

KINDS = ("shrink", "respawn")


@dataclass(frozen=True)
class Policy(Keyed):
    """How a run survives.

    Attributes
    ----------
    min : int
        Ranks with which it goes on.
    buddy : int
        Steps between two copies of sharded state for a neighbour; 0 for none.
    kind : str
        One of KINDS.
    """

    name: ClassVar[str] = "elastic"
    least: ClassVar[dict[str, float]] = {"buddy": 0}
    min: int = 2
    buddy: int = 10
    kind: str = "shrink"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Of --elastic.

        Raises
        ------
        ValueError
            What there is not; fewer ranks than one.
        """
        kind, parts = keyed.split(text)
        refuse(kind not in KINDS, f"elastic {text!r}: expected one of {', '.join(KINDS)}")
        return cls(kind=kind, **keyed.convert(kind, parts, {"min": int, "buddy": int}))
