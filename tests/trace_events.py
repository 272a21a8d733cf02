"""What the trace event format asks of a file, and how Perfetto reads it: mistakes that no reader reports.

The rules are those of Google's "Trace Event Format": events with a duration nest on their thread; an arrow begins and
ends in the event that is open there.
"""

import math
from collections import defaultdict

REQUIRED = {
    "X": ("name", "ts", "dur", "pid", "tid"),
    "M": ("name", "pid", "args"),
    "s": ("name", "cat", "id", "ts", "pid", "tid"),
    "f": ("name", "cat", "id", "ts", "pid", "tid", "bp"),
}
NANOSECOND = 1e-3  # in microseconds, the unit of the file; Perfetto counts whole ones


def mistakes_in_trace(fields):
    """Return what is wrong, in words; empty where nothing is."""
    wrong, threads, arrows = [], defaultdict(list), defaultdict(dict)
    for event in fields["traceEvents"]:
        kind = event.get("ph")
        if kind not in REQUIRED:
            wrong.append(f"no kind of event that is written here: {event}")
            continue
        if missing := [name for name in REQUIRED[kind] if name not in event]:
            wrong.append(f"without {', '.join(missing)}: {event}")
            continue
        numbers = [event[name] for name in ("ts", "dur") if name in event]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            wrong.append(f"a time or duration below zero, or none: {event}")
        if any(type(event[name]) is not int for name in ("pid", "tid") if name in event):
            wrong.append(f"processes and threads have numbers: {event}")
        if kind == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif kind in "sf":
            if kind in arrows[event["cat"], event["name"], event["id"]]:
                wrong.append(f"an arrow with two ends of a kind: {event}")
            arrows[event["cat"], event["name"], event["id"]][kind] = event
    for thread, slices in threads.items():
        open_until = []
        for start, end, name in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= start + NANOSECOND / 2:
                open_until.pop()
            if open_until and end > open_until[-1] + NANOSECOND / 2:
                wrong.append(f"{name} on {thread} ends after the event in which it began, {end} > {open_until[-1]}")
            open_until.append(end)
    for arrow, ends in arrows.items():
        if set(ends) != {"s", "f"}:
            wrong.append(f"an arrow with one end: {arrow}")
            continue
        if ends["f"]["ts"] < ends["s"]["ts"]:
            wrong.append(f"an arrow back in time: {ends}")
        for end in ends.values():
            around = threads[end["pid"], end["tid"]]
            if not any(start <= end["ts"] < stop or start == end["ts"] == stop for start, stop, _ in around):
                wrong.append(f"an arrow that ends in no event: {end}")
    return wrong
