"""What every rank did when: read, wait, compute, communicate, update; a Chrome trace and a picture.

Times are of time.perf_counter, which all processes of a host share.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nn.checkpoints import write_atomically
from nn.training import Serial

MOST = 20_000  # events a rank keeps: the first ones; a long run need not fit


class Timeline:
    """Events of one rank.

    Parameters
    ----------
    rank : int
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.events: list[dict] = []

    def add(self, name: str, start: float, end: float) -> None:
        """Something called `name` happened from `start` to `end`, on this thread."""
        if len(self.events) < MOST:
            thread = threading.current_thread()
            lane = "" if thread is threading.main_thread() else thread.name
            self.events.append({"rank": self.rank, "lane": lane, "name": name, "start": start, "end": end})

    def timed(self, name: str, call: Callable) -> Callable:
        """`call`, with an event for each time."""

        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.add(name, start, time.perf_counter())
            return result

        return timed

    def watch(self, trainer: Serial) -> None:
        """Let every step of this trainer leave its events.

        A trainer may name its own: `phases`, (event, method, together). Where ranks do a phase together they meet
        first, so that waiting for each other is an event of its own, "wait", and no part of the phase.
        """
        if phases := getattr(trainer, "phases", ()):
            meet = self.timed("wait", trainer.communicator.Barrier)
            for name, method, together in phases:
                call = self.timed(name, getattr(trainer, method))
                setattr(trainer, method, _after(meet, call) if together else call)
            return
        trainer.compute_gradients = self.timed("compute", trainer.compute_gradients)
        if trainer.shard[1] > 1:
            trainer.combine = self.timed("communicate", trainer.combine)
        trainer.optimizer.update = self.timed("update", trainer.optimizer.update)


def _after(first: Callable, call: Callable) -> Callable:
    """`call`, each time after `first`."""

    def both(*args, **kwargs):
        first()
        return call(*args, **kwargs)

    return both


def write(events: list[dict], directory: Path) -> None:
    """trace.json, for chrome://tracing or Perfetto, and timeline.png with some steps from the middle of the run."""
    from collectives.drawing import draw_timeline

    zero = min(event["start"] for event in events)
    trace = [
        {
            "name": event["name"],
            "ph": "X",
            "ts": 1e6 * (event["start"] - zero),
            "dur": 1e6 * (event["end"] - event["start"]),
            "pid": event["rank"],
            "tid": event["lane"] or "main",
        }
        for event in events
    ]
    write_atomically(directory / "trace.json", json.dumps({"traceEvents": trace}).encode())
    figure = draw_timeline(excerpt(events), title="some steps from the middle of the run")
    figure.savefig(directory / "timeline.png", dpi=120)


def excerpt(events: list[dict], steps: int = 6) -> list[dict]:
    """The events of a few steps in the middle."""
    first = next((e["name"] for e in events if e["rank"] == 0 and e["name"] not in ("read", "wait")), "")
    starts = sorted(e["start"] for e in events if e["name"] == first and e["rank"] == 0)
    if not starts:
        return events
    middle = len(starts) // 2
    lo, hi = starts[middle], starts[min(middle + steps, len(starts) - 1)]
    return [e for e in events if e["end"] > lo and e["start"] < hi] if hi > lo else events
