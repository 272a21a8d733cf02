"""Schedules and prices in the formats of other tools: GOAL, which LogGOPSim reads, and Chrome's trace events.

    write_goal("ring.goal", ALGORITHMS["allreduce"]["ring"], 8, 1 << 20)
    price(read_goal("ring.goal"), 8, 1 << 20, network=network)
    write_chrome_trace("ring.json", price(..., trace=True))        # ui.perfetto.dev opens it
    recorded_schedule(events)                                      # of a training run with --timeline

GOAL (Hoefler, Siebert, Lumsdaine 2009) names the sends, receives and computations of each rank, and which of them wait
for which. A round becomes its steps and one `calc 0` behind them all, for which the next round's wait. A GOAL file says
how much is sent, not from where: what is read has the same messages, which begin at element 0 of "x".
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from collectives.algorithms import barrier
from collectives.pricing.price import Price, read
from collectives.steps import Compute, Recv, RecvReduce, Round, Send, is_live, mistake_in

LARGEST = 64 << 20  # bytes of a file
MICRO = 1e6  # microseconds of a second
MAIN = "main"  # name of the thread whose lane has none


def write_goal(file: str | Path, algorithm, size: int, count, itemsize: int = 4, gamma: float = 0.0, **options) -> None:
    """Write what every rank sends, receives and computes.

    Parameters
    ----------
    algorithm, size, count, itemsize, **options
        As for `collectives.price`.
    gamma : float
        Seconds a byte of a reduction: a `calc` in nanoseconds behind its receive, where it is not 0.

    Raises
    ------
    ValueError
        Copies, reductions in memory and barriers, for which GOAL has no words.
    """
    _, rounds, _ = read(algorithm)
    lines = [f"num_ranks {size}"]
    for rank in range(size):
        lines += ["", f"rank {rank} {{"]
        number, before = 0, None
        for steps in rounds(rank, size, *(() if count is None else (count,)), **options):
            labels = []
            for step in filter(is_live, steps):
                number += 1
                label = f"l{number}"
                match step:
                    case Send():
                        lines.append(f"{label}: send {(step.hi - step.lo) * itemsize}b to {step.peer} tag 0")
                    case Recv() | RecvReduce():
                        lines.append(f"{label}: recv {(step.hi - step.lo) * itemsize}b from {step.peer} tag 0")
                    case Compute():
                        lines.append(f"{label}: calc {round(step.seconds * 1e9)}")
                    case _:
                        raise ValueError(f"rank {rank}: GOAL has no word for {mistake_in((step,)) or step!r}")
                labels.append(label)
                if before:
                    lines.append(f"{label} requires {before}")
                if gamma and isinstance(step, RecvReduce):
                    number += 1
                    lines.append(f"l{number}: calc {round((step.hi - step.lo) * itemsize * gamma * 1e9)}")
                    lines.append(f"l{number} requires {label}")
                    labels.append(f"l{number}")
            if labels:
                number += 1
                before = f"l{number}"
                lines += [f"{before}: calc 0", *(f"{before} requires {label}" for label in labels)]
        lines.append("}")
    Path(file).write_text("\n".join(lines) + "\n")


RANK, END = re.compile(r"rank (\d+) \{"), "}"
STEP = re.compile(r"(\w+): (?:(send|recv) (\d+)b (?:to|from) (\d+)(?: tag \d+)?|calc (\d+))(?: cpu \d+)?")
REQUIRES = re.compile(r"(\w+) i?requires (\w+)")


def read_goal(file: str | Path, itemsize: int = 4):
    """Return the schedule of a GOAL file, a function (rank, size, count): any tool takes it.

    Steps of a rank are one round if they wait for equally long chains of others.

    Raises
    ------
    ValueError
        What is no GOAL; the message has the file and the line.
    """
    text = Path(file).read_text(errors="replace") if Path(file).stat().st_size <= LARGEST else "too large"
    ranks: list[dict] = []
    size, here = 0, None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("//")[0].strip()
        if not line:
            continue
        if match := re.fullmatch(r"num_ranks (\d{1,7})", line):
            size = int(match[1])
            ranks = [{} for _ in range(size)]
        elif (match := RANK.fullmatch(line)) and int(match[1]) < size:
            here = ranks[int(match[1])]
        elif line == END and here is not None:
            here = None
        elif here is not None and (match := STEP.fullmatch(line)):
            kind, nbytes, peer = match[2] or "calc", int(match[3] or match[5]), int(match[4] or 0)
            if peer >= size:
                raise ValueError(f"{file}, line {number}: there is no rank {peer} among {size}")
            here[match[1]] = [kind, nbytes, peer, []]
        elif here is not None and (match := REQUIRES.fullmatch(line)) and match[1] in here:
            here[match[1]][3].append(match[2])
        else:
            raise ValueError(f"{file}, line {number}: no GOAL: {line[:60]!r}")
    if not size:
        raise ValueError(f"{file}: no GOAL: it does not begin with num_ranks")
    programs = [_rounds_of(steps, itemsize, f"{file}, rank {rank}") for rank, steps in enumerate(ranks)]

    def goal(rank: int, size: int, count=None) -> Iterator[Round]:
        if size != len(programs):
            raise ValueError(f"{file} is for {len(programs)} ranks, not {size}")
        yield from programs[rank]

    return goal


def _rounds_of(steps, itemsize, where) -> list[Round]:
    """Rounds of one rank: by the longest chain of steps that each waits for; `calc 0` counts half a round."""
    depth: dict[str, int] = {}
    for label in steps:
        waiting = [label]
        while waiting:
            top = waiting[-1]
            needs = [need for need in steps[top][3] if need not in depth]
            if lost := [need for need in needs if need not in steps]:
                raise ValueError(f"{where}: {top} requires {lost[0]}, which is not there")
            if any(need in waiting for need in needs):
                raise ValueError(f"{where}: {top} requires itself, through {needs[0]}")
            if needs:
                waiting += needs[:1]
                continue
            depth[waiting.pop()] = max([depth[need] + 1 for need in steps[top][3]], default=0)
    rounds: dict[int, list] = {}
    for label, (kind, nbytes, peer, _) in steps.items():
        elements = math.ceil(nbytes / itemsize)
        if kind == "calc" and not nbytes:
            continue
        step = Compute("calc", seconds=nbytes * 1e-9) if kind == "calc" else None
        step = step or (Send if kind == "send" else Recv)(peer, "x" if kind == "send" else "y", 0, elements)
        rounds.setdefault(depth[label], []).append(step)
    return [tuple(rounds[level]) for level in sorted(rounds)]


def write_chrome_trace(file: str | Path, priced: Price) -> None:
    """Write rounds, work and messages as Chrome trace events: a process for each rank, arrows for messages.

    Raises
    ------
    ValueError
        The price has no trace.
    """
    if priced.trace is None:
        raise ValueError("a price without a trace: ask for price(..., trace=True)")
    events: list[dict] = []
    for span in priced.trace.rounds:
        events.append({"rank": span.rank, "name": f"round {span.index}", "start": span.start, "end": span.end})
    for work in priced.trace.works:
        name = type(work.step).__name__
        events.append({"rank": work.rank, "name": name, "start": work.start, "end": work.end})
    fields = chrome_trace(events)
    rounds = {(span.rank, span.index): span for span in priced.trace.rounds}

    def within(span, seconds):
        """In microseconds, moved into its round, before the end: an arrow belongs to what is open at its ends."""
        return max(span.start, min(seconds, span.end - 1e-9)) * MICRO

    for number, flight in enumerate(priced.trace.flights):
        nbytes = (flight.send.hi - flight.send.lo) * priced.trace.itemsize
        message = {"name": f"{nbytes:,} bytes", "cat": "message", "id": number, "tid": 0}
        sent_in, received_in = rounds[flight.source, flight.sent_in], rounds[flight.dest, flight.received_in]
        start = message | {"ph": "s", "pid": flight.source, "ts": within(sent_in, flight.start)}
        end = message | {"ph": "f", "bp": "e", "pid": flight.dest, "ts": within(received_in, flight.end)}
        fields["traceEvents"] += [start, end]
    Path(file).write_text(json.dumps(fields) + "\n")


def chrome_trace(events: Iterable[Mapping]) -> dict:
    """Return what ranks did when, as Chrome's trace format: a process for each rank, a thread for each of its lanes.

    Parameters
    ----------
    events : iterable of mappings
        Each with rank (int), name (str), start and end (seconds), perhaps lane (str), as `draw_timeline` takes them.
        The first start becomes zero.

    Examples
    --------
    >>> chrome_trace([{"rank": 0, "name": "compute", "start": 1.0, "end": 3.0}])["traceEvents"][-1]["dur"]
    2000000.0
    """
    events = list(events)
    zero = min((event["start"] for event in events), default=0.0)
    lanes: dict[int, dict[str, int]] = {}  # of each rank: lane -> number of its thread
    for event in events:
        of_rank = lanes.setdefault(event["rank"], {"": 0})
        of_rank.setdefault(event.get("lane", ""), len(of_rank))
    found: list[dict] = []
    for rank, of_rank in sorted(lanes.items()):
        found.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, number in of_rank.items():
            arguments = {"name": lane or MAIN}
            found.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": arguments})
    for event in events:
        place = {"pid": event["rank"], "tid": lanes[event["rank"]][event.get("lane", "")]}
        times = {"ts": (event["start"] - zero) * MICRO, "dur": (event["end"] - event["start"]) * MICRO}
        found.append({"name": event["name"], "ph": "X", **place, **times})
    return {"traceEvents": found, "displayTimeUnit": "ns"}


def read_chrome_trace(file: str | Path) -> list[dict]:
    """Return the events with a duration as `draw_timeline` takes them: rank, lane, name, start and end in seconds.

    Raises
    ------
    ValueError
        The file holds no trace events.
    """
    try:
        if Path(file).stat().st_size > LARGEST:
            raise ValueError(f"larger than {LARGEST:,} bytes")
        return events_of(json.loads(Path(file).read_text()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(f"{file}: no Chrome trace ({type(error).__name__}: {error})") from error


def events_of(fields: Mapping | list) -> list[dict]:
    """The events with a duration of a Chrome trace; threads may have names instead of numbers."""
    events = fields["traceEvents"] if isinstance(fields, Mapping) else fields
    names = {
        (event["pid"], event["tid"]): str(event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    found = []
    for event in events:
        if event["ph"] == "X":
            lane = names.get((event["pid"], event["tid"]), str(event["tid"]))
            start, length = float(event["ts"]) / MICRO, float(event["dur"]) / MICRO
            of_event = {"rank": int(event["pid"]), "lane": "" if lane == MAIN else lane, "name": str(event["name"])}
            found.append(of_event | {"start": start, "end": start + length})
    return found


def recorded_schedule(events: Iterable[Mapping], most: int = 2000) -> list[list[Round]]:
    """Return the rounds of every rank that repeat what was recorded: computation, and who waits for whom.

    What a rank did becomes a Compute of the recorded seconds, and so does the time between. Before what all ranks did
    together there is a dissemination barrier of messages of one byte instead of the recorded waiting: who is late in
    another simulation, on other machines, makes the others wait there.

    Parameters
    ----------
    events : iterable of mappings
        As `parallel.reports.timeline.Timeline.merge` returns them: rank, lane, name, start, end, together. Those of the
        main lane count, and "wait" is left out.
    most : int
        Events of a rank: its first ones.
    """
    ranks: dict[int, list[Mapping]] = {}
    for event in sorted(events, key=lambda event: event["start"]):
        if not event.get("lane"):
            ranks.setdefault(event["rank"], []).append(event)
    lines = [[event for event in ranks.get(rank, ())][:most] for rank in range(max(ranks, default=-1) + 1)]
    size, together = len(lines), []
    for line in lines:
        seen: Counter = Counter()
        together.append([])
        for event in line:
            if event.get("together") and event["name"] != "wait":
                together[-1].append((event["name"], seen[event["name"]]))
                seen[event["name"]] += 1
    common = set(together[0]).intersection(*together) if together else set()
    orders = [[key for key in keys if key in common] for keys in together]
    if any(order != orders[0] for order in orders):  # ranks that did not do the same one after the other
        common = set()
    zero = min((line[0]["start"] for line in lines if line), default=0.0)
    programs = []
    for rank, (line, keys) in enumerate(zip(lines, together, strict=True)):
        rounds: list[Round] = []
        keys, now = iter(keys), zero
        for event in line:
            if event["start"] > now:
                rounds.append((Compute("between", seconds=event["start"] - now),))
            now = max(now, event["end"])
            if event["name"] == "wait":
                continue
            if event.get("together") and next(keys) in common:
                rounds += barrier.dissemination(rank, size)
            rounds.append((Compute(event["name"], seconds=event["end"] - event["start"]),))
        programs.append(rounds)
    return programs
