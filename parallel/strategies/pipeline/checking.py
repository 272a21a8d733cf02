"""Whether a pipeline schedule can run, what it holds at its peak, and how long it takes where messages take no time.

    print(check("1f1b", ranks=4, micro_batches=8))
    print(check(read(open("mine.csv"))))

Who waits for whom: F of a stage for F of the stage before it; B or I for F of its own stage and for B or I of the stage
behind it; W for I; REDUCE_GRAD, where several ranks have its stage, until all of them have come to theirs, the first of
each together, then the second. Ranks do their actions in the order of their rows. Where a text has messages of its own,
an action waits for those instead; sends and receives wait for nobody, the computation that needs them does (so it is in
PyTorch).
What lies in the memory of one rank cannot be used on another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from collectives.checking.simulator import find_cycle
from parallel.strategies.pipeline.actions import (
    COMPUTE,
    MESSAGES,
    SHARDING,
    Action,
    Overlap,
    PipelineError,
    Row,
    Rows,
    parts,
)
from parallel.strategies.pipeline.schedules import Actions, rows

KINDS = COMPUTE + MESSAGES + SHARDING
HERE = ("B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")  # belong to the rank that does F of the same stage
Places = dict[Action, tuple[int, int]]  # rank and column

REDUCE_GRAD = "REDUCE_GRAD"

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, REDUCE_GRAD: 0.0}


class Span(NamedTuple):
    """When a cell of a schedule is worked on, in seconds from the start."""

    rank: int
    column: int
    actions: tuple[Action, ...]
    start: float
    end: float


@dataclass
class Report:
    """The cost of a schedule that can run; a list entry for each rank.

    Attributes
    ----------
    stages, micro_batches : int
    counts : dict
        how many F, B, I, W there are
    makespan : float
        seconds until the last rank is done
    idle : list of float
        seconds that a rank waits between its first action and its last
    peaks : list of int
        the most micro-batches that a rank holds activations of, counted once for each of its stages, from F until B
        or W
    spans : list of list of Span
    """

    stages: int
    micro_batches: int
    counts: dict[str, int]
    makespan: float
    idle: list[float]
    peaks: list[int]
    spans: list[list[Span]] = field(repr=False)

    @property
    def idle_share(self) -> list[float]:
        """Share of a rank's own span, from its first action to its last, in which it waits."""
        return [
            wait / (row[-1].end - row[0].start) if row and row[-1].end > row[0].start else 0.0
            for wait, row in zip(self.idle, self.spans, strict=True)
        ]

    def __str__(self):
        counts = ", ".join(f"{n} {kind}" for kind, n in self.counts.items() if n)
        lines = [
            f"right: {self.stages} stages on {len(self.spans)} ranks, {self.micro_batches} micro-batches: {counts}",
            f"  makespan {self.makespan:g}",
            "  rank   idle  share   peak",
        ]
        for rank, figures in enumerate(zip(self.idle, self.idle_share, self.peaks, strict=True)):
            lines.append("  {:4} {:6g} {:6.1%} {:6}".format(rank, *figures))
        return "\n".join(lines)


def check(
    schedule: str | Callable[..., Actions] | Rows,
    ranks: int | None = None,
    micro_batches: int | None = None,
    seconds: Mapping[str, float] | Callable[[Action], float] = SECONDS,
    **options,
) -> Report:
    """Check a schedule, and say what it costs.

    Parameters
    ----------
    schedule : str, generator function or rows
        a name in SCHEDULES, schedule(rank, ranks, micro_batches, **options), or what `read` returned
    ranks, micro_batches : int
        needed for all but rows, where they are what the rows have
    seconds : dict or function
        of an action: by kind, or by the whole action where stages differ

    Raises
    ------
    PipelineError
        at the first action that cannot run: its rank, its column and why; or what is missing at the end
    """
    if callable(schedule) or isinstance(schedule, str):
        if ranks is None or micro_batches is None:
            raise ValueError("check: say for how many ranks and micro_batches")
        schedule = rows(schedule, ranks, micro_batches, **options)
    elif ranks not in (None, len(schedule)):
        raise PipelineError(f"the schedule has {len(schedule)} rows, one for each rank, but there are {ranks} ranks")
    spans = walk(schedule, seconds)
    done = [action for row in schedule for cell in row for action in parts(cell) if action.kind in COMPUTE]
    stages = 1 + max((a.stage for a in done), default=-1)
    present = 1 + max((a.micro_batch for a in done), default=-1)
    refuse_missing(schedule, stages, present if micro_batches is None else micro_batches)
    return Report(
        stages,
        present,
        {kind: sum(a.kind == kind for a in done) for kind in COMPUTE},
        max(row[-1].end for row in spans if row),
        [row[-1].end - row[0].start - sum(s.end - s.start for s in row) if row else 0.0 for row in spans],
        [peak_activations(row) for row in schedule],
        spans,
    )


def peak_activations(row: Row, until: str = "BW") -> int:
    """The most micro-batches that are held at once, from F until an action of these kinds."""
    held = most = 0
    for cell in row:
        for action in parts(cell):
            held += action.kind == "F"
            most = max(most, held)
            held -= action.kind in until
    return most


def walk(
    schedule: Rows, seconds: Mapping[str, float] | Callable[[Action], float] = SECONDS, latency: float = 0.0
) -> list[list[Span]]:
    """When every cell of computation is worked on: as soon as its rank is free and what it needs is there.

    The parts of an overlap begin together and take as long as one after the other. Sums of gradients over the ranks of
    a stage are spans, too.

    Parameters
    ----------
    latency : float
        seconds from the end of an action until another rank can use its result

    Raises
    ------
    PipelineError
    """
    cost = seconds if callable(seconds) else lambda action: ({REDUCE_GRAD: 0.0} | dict(seconds))[action.kind]
    size = len(schedule)
    table = places(schedule)
    last = max((action.stage for action in table), default=0)
    lowered = any(action.kind in MESSAGES for action in table)
    sums = Sums(schedule)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    clock, column = [0.0] * size, [0] * size
    waiting: dict[Action | SumKey, list[int]] = {}
    ready = list(range(size))
    while ready:
        rank = ready.pop()
        row = schedule[rank]
        while column[rank] < len(row):
            now = parts(row[column[rank]])
            if sums.has(rank, now):
                key, last_came = sums.arrive(rank, now[0].stage, clock[rank])
                if last_came is None:
                    waiting.setdefault(key, []).append(rank)
                    break
                clock[rank] = last_came + cost(now[0])
                spans[rank].append(Span(rank, column[rank], now, last_came, clock[rank]))
                sums.leave(rank, now[0].stage)
                ready += waiting.pop(key, ())
                column[rank] += 1
                continue
            needed = [need for action in now for need in needs(action, last, rank, table, lowered)]
            came = [next((a for a in need if a in ends), None) for need in needed]
            if None in came:
                for a in needed[came.index(None)]:
                    waiting.setdefault(a, []).append(rank)
                break
            there = max((ends[a] + latency * (table[a][0] != rank) for a in came), default=0.0)
            start = max(clock[rank], there)
            clock[rank] = start + sum(cost(a) for a in now if a.kind in COMPUTE)
            if any(action.kind in COMPUTE for action in now):
                spans[rank].append(Span(rank, column[rank], now, start, clock[rank]))
            for action in now:
                ends[action] = clock[rank]
                ready += waiting.pop(action, ())
            column[rank] += 1
    stuck = {rank: column[rank] for rank, row in enumerate(schedule) if column[rank] < len(row)}
    if stuck:
        raise_stuck(schedule, stuck, ends, last, table, lowered, sums)
    return spans


SumKey = tuple[int, int]  # stage, number of the sum of its gradients


class Sums:
    """Who has come to which sum of gradients, of stages that several ranks have."""

    def __init__(self, schedule: Rows):
        self.ranks: dict[int, set[int]] = {}
        for rank, row in enumerate(schedule):
            for action in (action for cell in row for action in parts(cell)):
                if action.kind in (*COMPUTE, REDUCE_GRAD):
                    self.ranks.setdefault(action.stage, set()).add(rank)
        self.made: dict[tuple[int, int], int] = {}  # (rank, stage) -> sums that lie behind it
        self.when: dict[SumKey, dict[int, float]] = {}  # rank -> when it came

    def has(self, rank: int, actions: Sequence[Action]) -> bool:
        """Whether a cell is a sum for which ranks wait for each other."""
        return bool(actions) and actions[0].kind == REDUCE_GRAD and len(self.ranks[actions[0].stage]) > 1

    def arrive(self, rank: int, stage: int, now: float) -> tuple[SumKey, float | None]:
        """Return (key of the sum, when the last rank arrived; None as long as some have not)."""
        key = stage, self.made.get((rank, stage), 0)
        there = self.when.setdefault(key, {})
        there.setdefault(rank, now)
        return key, max(there.values()) if there.keys() == self.ranks[stage] else None

    def leave(self, rank: int, stage: int) -> None:
        self.made[rank, stage] = self.made.get((rank, stage), 0) + 1

    def missing(self, rank: int, stage: int) -> tuple[int, list[int]]:
        """The number of the sum at which a rank waits, and for whom."""
        number = self.made.get((rank, stage), 0)
        return number, sorted(self.ranks[stage] - self.when[stage, number].keys())


def places(schedule: Rows) -> Places:
    """Where every action is; refuses what is none, what is done twice, and what needs the memory of another rank."""
    for rank, row in enumerate(schedule):
        for column, cell in enumerate(row):
            if not isinstance(cell, Action | Overlap | None):
                refuse(rank, column, repr(cell), 'expected an action, such as Action(0, "F", 3)')
            for action in parts(cell):
                if action.kind not in KINDS:
                    refuse(rank, column, action, f"no kind {action.kind!r}: there are {', '.join(KINDS)}")
    found = [
        (column, rank, action)
        for rank, row in enumerate(schedule)
        for column, cell in enumerate(row)
        for action in parts(cell)
        if action.kind not in SHARDING
    ]
    found.sort(key=lambda entry: entry[:2])
    table: Places = {}
    done: dict[tuple, Action] = {}  # (stage, what, micro-batch) -> by which action; B does both I and W
    for column, rank, action in found:
        for half in ("I", "W") if action.kind == "B" else (action.kind,):
            if before := done.get((action.stage, half, action.micro_batch)):
                there = "rank {}, column {}".format(*table[before])
                refuse(rank, column, action, f"{before} on {there} has done that")
            done[action.stage, half, action.micro_batch] = action
        table[action] = rank, column
    for column, rank, action in found:
        beside = action._replace(kind="F")
        if action.kind in HERE and table.get(beside, (rank,))[0] != rank:
            refuse(rank, column, action, f"it needs what {beside} left on rank {table[beside][0]}")
    return table


def needs(action: Action, last: int, rank: int, table: Places, lowered: bool) -> list[tuple[Action, ...]]:
    """Return the actions that must come before one: of each tuple, one of them."""
    stage, kind, i = action
    forward = Action(stage, "F", i)
    backward = Action(stage, "B", i), Action(stage, "I", i)
    match kind:
        case "F" if stage:
            return arrival((Action(stage - 1, "F", i),), "F", action, rank, table, lowered)
        case "B" | "I":
            behind = Action(stage + 1, "B", i), Action(stage + 1, "I", i)
            return [(forward,)] + (arrival(behind, "B", action, rank, table, lowered) if stage < last else [])
        case "W":
            return [(backward[1],)]
        case "SEND_F":
            return [(forward,)]
        case "SEND_B":
            return [backward]
    return []


def arrival(made: tuple[Action, ...], way: str, action: Action, rank: int, table: Places, lowered: bool):
    """Return what brings `action` a result: its maker, or the message from another rank if the text has messages."""
    if not lowered or all(a not in table or table[a][0] == rank for a in made):
        return [made]
    return [(action._replace(kind=f"RECV_{way}"),), (made[0]._replace(kind=f"SEND_{way}"),)]


def refuse(rank: int, column: int, action: Action, why: str):
    """Raise the error of an action that cannot run."""
    raise PipelineError(f"rank {rank}, column {column}: {action} cannot run: {why}", rank, column)


def raise_stuck(schedule: Rows, stuck: dict[int, int], ends, last: int, table: Places, lowered: bool, sums: Sums):
    """Refuse the first action that can never run; where all could, the ranks wait for each other."""
    waits: dict[int, list[int]] = {}
    lines = []
    for rank, column in sorted(stuck.items(), key=lambda place: (place[1], place[0])):
        now = parts(schedule[rank][column])
        if sums.has(rank, now):
            number, others = sums.missing(rank, now[0].stage)
            for other in others:
                if other not in stuck:
                    refuse(rank, column, now[0], f"it is sum {number} over its stage, and rank {other} ends before it")
            waits[rank] = others
            lines.append(f"  rank {rank}, column {column}: {now[0]} waits for the same of ranks {others}")
            continue
        for action in now:
            missing = [n for n in needs(action, last, rank, table, lowered) if not any(a in ends for a in n)]
            for need in missing:
                what = " or ".join(map(str, need))
                there = next((table[a] for a in need if a in table), None)
                if there is None:
                    refuse(rank, column, action, f"it needs {what}, which no rank does")
                if there[0] == rank:
                    when = "in the same cell" if there[1] == column else f"later on this rank, in column {there[1]}"
                    refuse(rank, column, action, f"it needs {what}, which comes {when}")
                waits.setdefault(rank, []).append(there[0])
                lines.append(
                    f"  rank {rank}, column {column}: {action} needs {what} of rank {there[0]}, column {there[1]}"
                )
    cycle = find_cycle(waits)
    rank, column = min(((r, stuck[r]) for r in cycle), key=lambda place: (place[1], place[0]))
    text = "\n".join([f"{len(waits)} of {len(schedule)} ranks wait for ever", *lines])
    raise PipelineError(f"{text}\n  cycle: {' -> '.join(map(str, cycle))}", rank, column)


def refuse_missing(schedule: Rows, stages: int, micro_batches: int):
    """All that is there can run: is anything missing?"""
    table = places(schedule)
    if not table:
        raise PipelineError("the schedule has no actions")
    for i in range(micro_batches):
        for stage in range(stages):
            forward, whole, first, second = (Action(stage, kind, i) for kind in "FBIW")
            if forward not in table:
                raise PipelineError(f"{forward} is missing: no rank does it")
            rank = table[forward][0]
            if whole not in table and first not in table:
                raise PipelineError(f"rank {rank}: {whole}, or {first} and {second}, is missing", rank)
            if first in table and second not in table:
                raise PipelineError(f"rank {rank}: {second} is missing: nothing computes the weights' gradient", rank)
    for action, (rank, column) in table.items():
        if action.micro_batch >= micro_batches:
            refuse(rank, column, action, f"there are {micro_batches} micro-batches, from 0")
        if action.kind in MESSAGES:
            way = 1 if action.kind in ("SEND_F", "RECV_B") else -1
            does, other = ("receives", "sends") if action.kind.startswith("SEND") else ("sends", "receives")
            kind = {"SEND": "RECV", "RECV": "SEND"}[action.kind[:4]] + action.kind[4:]
            if Action(action.stage + way, kind, action.micro_batch) not in table:
                raise PipelineError(f"rank {rank}, column {column}: nobody {does} what {action} {other}", rank, column)
