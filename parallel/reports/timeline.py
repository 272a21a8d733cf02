"""What every rank did when: read, wait, compute, communicate, update; a Chrome trace and a picture.

Times come from time.perf_counter, which all processes of a host share; times of other hosts are converted to rank 0's
clock (clock_offsets.py). A collective phase starts when the last rank enters it: until then the others wait, which is
distinguished when the events of all ranks are merged, so that watching costs no barrier.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nn.training.checkpoints import write_atomically
from parallel.reports.breakdown import wrap
from parallel.reports.figures import write_figure
from parallel.run_trainer import RunTrainer

MOST = 20_000  # events a rank keeps: the first ones; a long run need not fit
STAGES = "stages"  # the lane of what a pipeline's stages do, which lies inside the phases


class Timeline:
    """Events of one rank.

    Parameters
    ----------
    communicator : collectives.Communicator or None
        Of all ranks; None for one process.
    clock : callable
        Seconds; one that all ranks of a host share.
    """

    def __init__(self, communicator=None, clock: Callable[[], float] = time.perf_counter):
        self.rank, self.communicator, self.clock = communicator.rank if communicator else 0, communicator, clock
        self.events: list[dict] = []
        self._begin = self._offset()

    def add(self, name: str, start: float, end: float, together: bool = False, lane: str = "") -> None:
        """Record an event of this thread; `together` marks a phase that all ranks do collectively."""
        if len(self.events) < MOST:
            thread = threading.current_thread()
            lane = lane or ("" if thread is threading.main_thread() else thread.name)
            event = {"rank": self.rank, "lane": lane, "name": name, "start": start, "end": end, "together": together}
            self.events.append(event)

    def timed(self, name: str, together: bool, call: Callable) -> Callable:
        """Return `call` wrapped so that each call records an event."""

        def timed(*args, **kwargs):
            start = self.clock()
            result = call(*args, **kwargs)
            self.add(name, start, self.clock(), together)
            return result

        return timed

    def watch(self, trainer: RunTrainer) -> None:
        """Record every step of this trainer, by its phases."""
        for name, method, together in trainer.phases:
            wrap(trainer, method, partial(self.timed, name, together))
        if trainer.forward_backward:
            trainer.forward_backward.note = partial(self.add, lane=STAGES)

    def merge(self) -> list[dict]:
        """Return the events of all ranks on rank 0's clock, with waits separated (collective); [] on others."""
        if self.communicator is None:
            return self.events
        from parallel.reports.clock_offsets import to_rank_0

        events, end = [], self._offset()
        for event in self.events:
            start, stop = (float(to_rank_0(t, self._begin, end)) for t in (event["start"], event["end"]))
            events.append(event | {"start": start, "end": stop})
        everyone = self.communicator.gather(events)
        return split_waits(everyone) if everyone else []

    def _offset(self):
        if self.communicator is None:
            return None
        from collectives.failures.launch_check import nodes_of
        from parallel.reports.clock_offsets import measure

        return measure(self.communicator, nodes_of(self.communicator), self.clock)


def split_waits(ranks: list[list[dict]]) -> list[dict]:
    """Return all events; collective ones are split at the moment the last rank enters, with "wait" before it.

    Parameters
    ----------
    ranks : list of lists of events
        Of every rank, by one clock. The k-th event of a name on one rank belongs to the k-th on the others.
    """
    starts: dict[tuple[str, int], list[float]] = defaultdict(list)
    numbered = []
    for events in ranks:
        count: dict[str, int] = defaultdict(int)
        for event in events:
            key = event["name"], count[event["name"]]
            count[event["name"]] += 1
            numbered.append((key, event))
            if event["together"]:
                starts[key].append(event["start"])
    found = []
    for key, event in numbered:
        last = max(starts[key]) if event["together"] and len(starts[key]) == len(ranks) else event["start"]
        met = min(last, event["end"])
        if met > event["start"]:
            found.append(event | {"name": "wait", "end": met})
        found.append(event | {"start": met})
    return found


def write_trace(events: list[dict], directory: Path) -> None:
    """Write the events in three forms.

    trace.json opens in Perfetto and chrome://tracing, recorded.goal is what LogGOPSim and `read_goal` simulate again,
    timeline.png shows some steps from the middle of the run.
    """
    from collectives import draw_timeline
    from collectives.pricing.trace_formats import chrome_trace, recorded_schedule, write_goal

    write_atomically(directory / "trace.json", json.dumps(chrome_trace(events)).encode())
    recorded = recorded_schedule(events)
    write_goal(directory / "recorded.goal", lambda rank, size: recorded[rank], len(recorded), None, itemsize=1)
    phases = [event for event in events if event["lane"] != STAGES]
    figure = draw_timeline(excerpt(phases), title="some steps from the middle of the run")
    write_figure(figure, directory / "timeline.png", bbox_inches="tight")


def excerpt(events: list[dict], steps: int = 6) -> list[dict]:
    """Return the events of a few steps in the middle."""
    first = next((e["name"] for e in events if e["rank"] == 0 and e["name"] not in ("read", "wait")), "")
    starts = sorted(e["start"] for e in events if e["name"] == first and e["rank"] == 0)
    if not starts:
        return events
    middle = len(starts) // 2
    lo, hi = starts[middle], starts[min(middle + steps, len(starts) - 1)]
    if hi <= lo:
        return events
    within = [e for e in events if e["end"] > lo and e["start"] < hi]
    return [e | {"start": max(e["start"], lo), "end": min(e["end"], hi)} for e in within]
