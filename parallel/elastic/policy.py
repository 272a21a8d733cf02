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

from parallel.launch import launcher
from parallel.settings import Keys, OptionError, changed, flag, key, refuse
from parallel.strategies import STRATEGIES, axes
from parallel.strategies.pipeline.option import schedule

KINDS = ("shrink", "respawn")
SILENT = ("kill", "wait")
SHORTEST = 1.0  # seconds: any rank may be silent as long, for it waits for a core or a disk
KILLED = 2  # times as long as a rank may be silent: by then it has been killed, and the others know


@dataclass(frozen=True)
class Policy(Keys):
    """How an elastic run survives.

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

    name = "elastic"
    min: int = key(2, "ranks with which it goes on")
    buddy: int = key(10, "steps between two copies for a neighbour; 0: none", least=0)
    heartbeat: float = key(30.0, "seconds that a rank may be silent; 0: for ever", least=0)
    loop: float = key(120.0, "seconds that a rank may compute without a step or a call; 0: for ever", least=0)
    silent: str = key("kill", "kill or wait")
    kind: str = key("shrink", "one of KINDS")

    def patience(self, watch: float) -> float:
        """Return the seconds that ranks may wait for each other (0: for ever), given the user's `watch`.

        A rank that is stopped is the heartbeat's business first: the others go on without it.
        """
        return max(watch, KILLED * self.heartbeat) if watch and self.silent == "kill" else watch

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse the value of --elastic.

        Raises
        ------
        ValueError
            Unknown kinds or keys; values out of range.
        """
        from nn import option_strings  # and with it NumPy, which --help does without

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


def check_options(options) -> None:
    """Refuse to go on without others where what each rank has is neither what all have, nor copied."""
    if options.elastic is None:
        return
    flags = f"--strategy {options.strategy}{f' --consistency {options.consistency}' * options.late}"
    others = ", ".join(name for name, strategy in STRATEGIES.items() if strategy.supports.elastic)
    if why := axes.supported(options).reason_against(None, "elastic"):
        raise OptionError(f"--elastic cannot be combined with {flags}: {why}: use {others}")
    if axes.is_pipeline(options) and schedule(options).name == "pipedream":
        raise OptionError(
            "--elastic cannot be combined with --pipeline pipedream: weights of several steps are in its stages"
        )
    for name, values, why in (
        ("compress", None, "what a rank has left out so far is lost with it"),
        ("allreduce", ("shared",), "what dies in it leaves sums half made"),
        ("offload", None, "shards on disk are to save memory, and neighbours have copies in memory"),
        ("find_lr", None, "trying rates makes no run"),
    ):
        if changed(options, [name]) and (values is None or getattr(options, name) in values):
            raise OptionError(f"{flag(name)} cannot be combined with --elastic: {why}: leave one of them out")


def check_ranks(options, ranks: int | None) -> None:
    """Refuse to go on where ranks die with an MPI library that ends all, and fewer ranks than are to be left."""
    policy = Policy.parse(options.elastic)
    if ranks == 0:  # one process: without effect
        return
    if why := launcher.reason_all_end():
        raise OptionError(f"--elastic: {why}; or leave it out, and start the run by scripts/supervise.py")
    if ranks is not None and ranks < policy.min:
        raise OptionError(f"--elastic {options.elastic}: {ranks} ranks are fewer than min={policy.min}: start more")
