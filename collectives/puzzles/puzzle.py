"""What a puzzle is, and how an answer is graded: by the tools that check, price and draw the library's own."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path

from collectives.checking.definitions import Operation, WrongResult, prove
from collectives.checking.simulator import ScheduleError, Stats
from collectives.drawing.timeline import draw_timeline
from collectives.pricing.networks import ROUNDS, Network
from collectives.pricing.price import price
from collectives.report import Report
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
    compute : callable (rank, size, step, values) -> values of its writes
        Raises ScheduleError for values that are wrong. For puzzles with computation.
    rule : callable (Stats) -> str
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
    rule: Callable[[Stats], str] = field(default=lambda stats: "")
    memory: bool = False

    def __str__(self):
        text = "\n\n".join(textwrap.fill(" ".join(each.split()), 100) for each in self.task.split("\n\n"))
        lines = [f"{self.name}: {self.size} ranks, {self.count} elements", "", text, ""]
        for name, limit in self.limits.items():
            lines.append(f"  {UNITS[name]}: {limit:g} (record {self.record[name]:g})")
        return "\n".join(lines)

    def grade(self, mine: Callable[..., Iterable]) -> Grade:
        """Try an answer: in the case that is measured and in the others, with eager and with synchronous sends."""
        grade = Grade(mine, self.name, puzzle=self)
        for size, count in ((self.size, self.count), *self.others):
            words = f"{size} ranks, {count} elements"
            if grade.try_case(words, (size, count, 0), partial(self._try, mine, size, count)) is None:
                return grade
        stats, *_ = (case.stats for case in grade.cases)
        grade.measured = self._measure(mine, stats)
        return grade

    def _try(self, mine: Callable, size: int, count: int, synchronous: bool) -> Stats:
        compute = (lambda rank, *given: self.compute(rank, size, *given)) if self.compute else refuse
        answer = partial(rounds_of_answer, mine)
        stats = prove(self.define, answer, size, count, ordered=False, synchronous=synchronous, compute=compute)
        if problem := self.rule(stats) or ("" if self.memory else elsewhere(stats)):
            raise WrongResult(problem, None, stats)
        return stats

    def _measure(self, mine: Callable, stats: Stats) -> dict[str, float]:
        found = {
            "rounds": max(stats.depth),
            "moved": stats.moved,
            "live": max(stats.live),
            "copied": stats.copied,
            "held": max(sum(len(a) for name, a in each.items() if name != "x") for each in stats.buffers),
        }
        if "seconds" in self.limits:
            found["seconds"] = price(mine, self.size, self.count, 1, self.network).seconds
        return {name: found[name] for name in self.limits}


def rounds_of_answer(mine: Callable, rank: int, size: int, count: int, **_) -> Iterator[Round]:
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
    """Return the first step in memory that is not the rank's own, or ""."""
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
class Grade(Report):
    """A `Report` on an answer, with limits. True where it is right and within them; print it, or `grade.draw()` it.

    Attributes
    ----------
    measured : dict of str -> number
        Of UNITS; empty where the answer is wrong.
    """

    _: KW_ONLY
    puzzle: Puzzle
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def over(self) -> list[str]:
        """Names of the limits that are not kept."""
        return [name for name, value in self.measured.items() if value > self.puzzle.limits[name] * (1 + 1e-9)]

    @property
    def records(self) -> list[str]:
        """Names of the records that are broken."""
        return [name for name, value in self.measured.items() if value < self.puzzle.record[name] * (1 - 1e-9)]

    def __bool__(self):
        return self.right and not self.over

    def __str__(self):
        if not self.right:
            return f"{self.puzzle.name}: wrong. {self.mistake}\ngrade.draw() shows where."
        head = (
            "right, but over the limit" if self.over else "solved, and a new record!" * bool(self.records) or "solved"
        )
        lines = [f"{self.puzzle.name}: {head}"]
        for name, value in self.measured.items():
            limit, record = self.puzzle.limits[name], self.puzzle.record[name]
            mark = "too many" if name in self.over else "a record" if name in self.records and self else "ok"
            lines.append(f"  {mark:8}  {value:6g} of {limit:g} (record {record:g})  {UNITS[name]}")
        return "\n".join(lines)

    def draw(self, size: int | None = None, count: int | None = None, **options):
        """Draw the answer as `Report.draw` does; one with computation over time, in the puzzle's own case."""
        puzzle = self.puzzle
        options = {"title": puzzle.name} | options
        if self.right and puzzle.compute:
            priced = price(self.algorithm, puzzle.size, puzzle.count, 1, puzzle.network, trace=True)
            return draw_timeline(priced, title=options["title"], counted_in="units")
        if self.right:
            size, count = size or puzzle.size, puzzle.count if count is None else count
        return super().draw(size, count, **options)
