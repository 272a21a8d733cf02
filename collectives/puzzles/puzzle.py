"""What a puzzle is, and how an answer is graded: by the same readers that check, price and draw the library's own."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from collectives.checking.definitions import Operation, WrongResult, compare, most_rounds
from collectives.checking.simulator import Deadlock, ScheduleError, Stats, simulate
from collectives.pricing.networks import ROUNDS, Network
from collectives.pricing.price import price
from collectives.steps import Compute, Round, reads, writes

PACKAGE = str(Path(__file__).parents[1])  # whose lines no answer is in

UNITS = {
    "rounds": "rounds, one after the other",
    "moved": "elements that a rank sends or receives, at most",
    "seconds": "time units until the last rank has finished",
    "live": "elements that a rank keeps to read them later, at most",
    "copied": "elements that a rank copies or adds in memory, at most",
    "held": "elements that a rank has in the end beside x, at most",
}


@dataclass(frozen=True)
class Puzzle:
    """A task for a generator `mine(rank, size, count)` of rounds.

    Attributes
    ----------
    name, task : str
    size, count : int
        Ranks and elements of the case that is measured.
    define : Operation
        What buffers hold before, and must hold after.
    limits, record : dict of str -> number
        Of UNITS: what an answer may need at most, and the best known.
    others : tuple of (size, count)
        Cases in which it must be right, too.
    network : Network
        What "seconds" are counted on.
    compute : callable (rank, size, step, values) -> (values of its writes, what is wrong or "")
        For puzzles with computation.
    rule : callable (Stats, buffers) -> str
        What is not allowed beside: why an answer is refused, or "".
    memory : bool
        Whether ranks may name each other's buffers.
    """

    name: str
    task: str
    size: int
    count: int
    define: Operation
    limits: dict[str, float]
    record: dict[str, float]
    others: tuple[tuple[int, int], ...] = ()
    network: Network = ROUNDS
    compute: Callable | None = None
    rule: Callable[[Stats, list], str] = field(default=lambda stats, buffers: "")
    memory: bool = False

    def __str__(self):
        text = "\n\n".join(textwrap.fill(" ".join(each.split()), 100) for each in self.task.split("\n\n"))
        lines = [f"{self.name}: {self.size} ranks, {self.count} elements", "", text, ""]
        for name, limit in self.limits.items():
            lines.append(f"  {UNITS[name]}: {limit:g} (record {self.record[name]:g})")
        return "\n".join(lines)

    def grade(self, mine: Callable[..., Iterable]) -> Grade:
        """Try an answer: in the case that is measured and in the others, with eager and with synchronous sends."""
        grade = Grade(self, mine)
        for size, count in ((self.size, self.count), *self.others):
            for synchronous in (False, True):
                try:
                    buffers, stats = self._try(mine, size, count, synchronous)
                except ScheduleError as error:
                    only = " (with eager sends it passes)" if synchronous and isinstance(error, Deadlock) else ""
                    grade.said, grade.error = f"{size} ranks, {count} elements{only}: {error}", error
                    grade.failed = size, count
                    return grade
                if (size, count, synchronous) == (self.size, self.count, True):
                    grade.measured = self._measure(mine, stats, buffers)
        return grade

    def _try(self, mine: Callable, size: int, count: int, synchronous: bool) -> tuple[list, Stats]:
        wrong: list[tuple[int, str]] = []

        def compute(rank: int, step: Compute, values: list) -> list:
            found, problem = self.compute(rank, size, step, values)
            wrong.extend([(rank, problem)] if problem else [])
            return found

        buffers = [self.define.before(rank, size, count, 0) for rank in range(size)]
        most = most_rounds(size, size * (count + 1))
        stats = simulate(
            lambda rank: rounds_of_answer(mine, rank, size, count),
            buffers,
            synchronous,
            most,
            compute if self.compute else refuse,
        )
        if wrong:
            raise WrongResult(wrong[0][1], wrong[0][0], stats)
        if not self.memory and (problem := elsewhere(stats)):
            raise WrongResult(problem, None, stats)
        compare(self.define, buffers, stats, size, count)
        if problem := self.rule(stats, buffers):
            raise WrongResult(problem, None, stats)
        return buffers, stats

    def _measure(self, mine: Callable, stats: Stats, buffers: list) -> dict[str, float]:
        found = {
            "rounds": max(stats.depth),
            "moved": stats.moved,
            "live": max(stats.live),
            "copied": stats.copied,
            "held": max(sum(len(a) for name, a in each.items() if name != "x") for each in buffers),
        }
        if "seconds" in self.limits:
            found["seconds"] = price(mine, self.size, self.count, 1, self.network).seconds
        return {name: found[name] for name in self.limits}


def rounds_of_answer(mine: Callable, rank: int, size: int, count: int) -> Iterator[Round]:
    """The answer's rounds; what it raises is a ScheduleError, with the answer's own line."""
    number = 0
    try:
        rounds = mine(rank, size, count)
        if isinstance(rounds, Iterable):
            for steps in rounds:
                yield steps
                number += 1
            return
    except Exception as error:
        own = [f for f in traceback.extract_tb(error.__traceback__)[1:] if f.line and PACKAGE not in f.filename]
        where = f", at `{own[-1].line}`" if own else ""
        raise ScheduleError(f"rank {rank}, round {number}: it raises {type(error).__name__}: {error}{where}") from error
    raise ScheduleError(f"rank {rank}: it returns {rounds!r}; a generator of rounds has a `yield`")


def elsewhere(stats: Stats) -> str:
    """The first step in memory that is not the rank's own, or ""."""
    for rank, rounds in enumerate(stats.history):
        for k, steps in enumerate(rounds):
            for step in steps:
                if any(place.rank != rank for place in (*reads(step, rank), *writes(step, rank))):
                    return f"rank {rank}, round {k}: {step}: there is no shared memory here, use messages"
    return ""


def refuse(rank: int, step: Compute, values: list) -> list:
    """There is nothing to compute in this puzzle."""
    raise ScheduleError(f"rank {rank} computes {step.name}: here elements are only moved and added")


@dataclass
class Grade:
    """How an answer did. True where it is right and within all limits; print it, or look at it: `grade.draw()`.

    Attributes
    ----------
    measured : dict of str -> number
        Of UNITS; empty where the answer is wrong.
    said : str
        The first thing that is wrong, and in which case.
    error : ScheduleError or None
        The same to look into.
    failed : (ranks, elements)
        Of that case.
    """

    puzzle: Puzzle
    answer: Callable
    measured: dict[str, float] = field(default_factory=dict)
    said: str = ""
    error: ScheduleError | None = None
    failed: tuple[int, int] | None = None

    @property
    def over(self) -> list[str]:
        """Names of the limits that are not kept."""
        return [name for name, value in self.measured.items() if value > self.puzzle.limits[name] * (1 + 1e-9)]

    @property
    def records(self) -> list[str]:
        """Names of the records that are broken."""
        return [name for name, value in self.measured.items() if value < self.puzzle.record[name] * (1 - 1e-9)]

    def __bool__(self):
        return self.error is None and not self.over

    def __str__(self):
        if self.error is not None:
            return f"{self.puzzle.name}: wrong. {self.said}\ngrade.draw() shows where."
        head = (
            "right, but over the limit" if self.over else "solved, and a new record!" * bool(self.records) or "solved"
        )
        lines = [f"{self.puzzle.name}: {head}"]
        for name, value in self.measured.items():
            limit, record = self.puzzle.limits[name], self.puzzle.record[name]
            mark = "too many" if name in self.over else "a record" if name in self.records and self else "ok"
            lines.append(f"  {mark:8}  {value:6g} of {limit:g} (record {record:g})  {UNITS[name]}")
        return "\n".join(lines)

    def draw(self, **options):
        """The answer as a picture; of one that is wrong, up to and with the round where it goes wrong.

        Parameters
        ----------
        **options
            As for `collectives.draw`.

        Returns
        -------
        matplotlib Figure
        """
        from collectives.drawing.diagrams import draw, draw_failure
        from collectives.drawing.timeline import draw_timeline

        title = options.pop("title", self.puzzle.name)
        if self.error is not None:
            return draw_failure(self.answer, *self.failed, self.error, title=title)
        size, count = self.puzzle.size, self.puzzle.count
        if self.puzzle.compute:
            priced = price(self.answer, size, count, 1, self.puzzle.network, trace=True)
            return draw_timeline(priced, title=title, counted_in="units")
        return draw(self.answer, size, count, title=title, **options)
