"""Which layers form a stage, and on how many ranks each stage lies: PipeDream's dynamic programme.

    plan = partition(read_profile("vgg16.csv"), workers=4, bandwidth=1e9)
    print(plan)          # 2 stages on 4 workers, 3-1: ...

A full pipeline completes a mini-batch in the time of its slowest stage or link. A stage of layers i ... j-1, replicated
on m ranks, with weights of w bytes and bandwidth B, takes

    T(i, j, m) = max(seconds of the layers, 2 (m-1) w / B) / m

and the first j layers on m ranks at best

    A(j, m) = min of T(0, j, m) and, over s < j and n < m, max(A(s, m-n), 2 a_s / B, T(s, j, n))

where a_s are the bytes that layer s-1 sends to layer s, and back. Levels: where groups of g ranks have a fast network
and a slow one joins the groups, the A of a group replaces "seconds of the layers" in the level above.

Two ways of counting are in use. "paper" is the formula above: gradients travel while the layers compute. "program" is
what the authors' program computes: one after the other, 4 (m-1) w / (B m) seconds for the gradients, and a link shared
by the n ranks of the stage behind it, 2 a_s / (B n), before and after a stage. Above the first level it divides the
seconds for the gradients of a group's first stage by the units of the level below, which send their parts at the same
time; those of later stages it does not divide. The answers differ, so do the published figures.

Memory: a rank keeps v versions of its stage's weights and the activations of v mini-batches, v = floor((ranks - 1 -
ranks of earlier stages) / ranks of this stage) + 1 (pipeline/schedules.py). A stage that does not fit is not chosen.

Cost: O(workers^2 layers^2), in a level below another O(layers) times as much, all over arrays.
Sources: Harlap et al. 2018; Narayanan et al. 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

import numpy as np

from parallel.planning.profile import LayerProfile, checked

COUNTING = ("paper", "program")


class PlannedStage(NamedTuple):
    """Layers first ... last on `replicas` ranks; each keeps `versions` of the weights, `bytes` in all."""

    first: int
    last: int
    replicas: int
    versions: int
    bytes: float


@dataclass(frozen=True)
class Partition:
    """Stages of a network, and what a mini-batch takes.

    Attributes
    ----------
    stages : tuple of PlannedStage
    seconds : float
        of a mini-batch, once the pipeline is full
    data_parallel : float
        seconds of a mini-batch by data parallelism on all ranks, even if that does not fit
    """

    stages: tuple[PlannedStage, ...]
    seconds: float
    data_parallel: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ranks of each stage, the argument of `pipedream` in pipeline/schedules.py."""
        return tuple(stage.replicas for stage in self.stages)

    def __str__(self):
        layers = ", ".join(f"layers {s.first}-{s.last} on {s.replicas}" for s in self.stages)
        stages = "1 stage" if len(self.stages) == 1 else f"{len(self.stages)} stages"
        return (
            f"{stages} on {sum(self.replicas)} workers, {'-'.join(map(str, self.replicas))}: {layers};"
            f" {self.seconds:.4g} s a mini-batch, {self.data_parallel / self.seconds:.2f} times data parallelism"
        )


def partition(
    layers: Sequence[LayerProfile],
    workers: int | Sequence[int],
    bandwidth: float | Sequence[float],
    memory: float = inf,
    counting: str = "paper",
) -> Partition:
    """Return the stages with the highest throughput.

    Parameters
    ----------
    layers : profile of each layer
    workers : number of ranks; or units of each level, innermost first: (4, 2) is two nodes of four ranks
    bandwidth : bytes a second between ranks, or one for each level
    memory : bytes that a rank has for weights and activations
    counting : "paper" or "program"

    Raises
    ------
    ValueError
        numbers out of range, or no plan fits into the memory
    """
    layers = checked(layers)
    sizes = (workers,) if isinstance(workers, int) else tuple(workers)
    speeds = (bandwidth,) if isinstance(bandwidth, int | float) else tuple(bandwidth)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"workers: expected numbers of at least 1, given {workers}")
    if len(speeds) != len(sizes) or min(speeds) <= 0:
        raise ValueError(f"bandwidth: expected a number above 0 for each of {len(sizes)} levels, given {bandwidth}")
    if counting not in COUNTING:
        raise ValueError(f"counting: expected one of {', '.join(COUNTING)}, given {counting!r}")
    search = Search(layers, sizes, speeds, memory, counting)
    top = search.best(len(sizes) - 1)
    seconds = float(top.seconds[0, -1])
    if seconds == inf:
        raise ValueError(
            f"no plan for {len(layers)} layers on {prod(sizes)} workers fits into {memory:,.0f} bytes a worker: give "
            f"more workers or memory, or a smaller mini-batch; the largest layer and its input take "
            f"{search.largest:,.0f} bytes in one version"
        )
    return Partition(tuple(search.stages(len(sizes) - 1, 0, len(layers))), seconds, search.data_parallel())


class Table(NamedTuple):
    """The best for layers i ... j-1 on all units of a level: seconds, and for m units the last stage's begin and units.

    The arrays have an axis i and an axis j; begin and units have one for m before those; begin is -1 where all m units
    are one stage.
    """

    seconds: np.ndarray
    begin: np.ndarray
    units: np.ndarray


class Search:
    """The dynamic programme, level by level.

    The cost of a stage does not depend on its position in the pipeline, but its memory does. With limited memory there
    is a table for every number of ranks before it and of copies of each of its ranks in the levels above.
    """

    def __init__(self, layers, sizes, speeds, memory, counting):
        self.sizes, self.speeds, self.memory, self.counting = sizes, speeds, memory, counting
        column = lambda values: np.concatenate([[0.0], np.cumsum(values)])
        self.between = np.array(
            [0.0] + [layer.output for layer in layers]
        )  # bytes that reach layer i; last: the output
        self.n = len(layers)
        self.computing = self.sums(column([layer.forward + layer.backward for layer in layers]))
        self.weights = self.sums(column([layer.parameters for layer in layers]))
        outputs = self.sums(column([layer.output for layer in layers]))
        self.kept = self.weights + outputs + self.between[:, None]  # by one version
        self.largest = max(self.kept[i, i + 1] for i in range(self.n))
        self.tables: dict[tuple[int, int, int], Table] = {}

    def sums(self, column):
        """Return the table whose [i, j] is the sum over layers i ... j-1; infinite where i >= j."""
        table = column[None, :] - column[:, None]
        table[np.tril_indices(self.n + 1)] = inf
        return table

    def versions(self, before: int, copies: int) -> int:
        return (prod(self.sizes) - 1 - before) // copies + 1

    def one_rank(self, before: int, copies: int) -> np.ndarray:
        """Return seconds of layers i ... j-1 on one rank; infinite where they do not fit."""
        fits = self.versions(before, copies) * self.kept <= self.memory
        return np.where(fits, self.computing, inf)

    def unit(self, level: int, before: int, copies: int) -> np.ndarray:
        """Return seconds of layers i ... j-1 on one unit of a level."""
        return self.best(level - 1, before, copies).seconds if level else self.one_rank(before, copies)

    def shared(self, seconds: np.ndarray, level: int, m: int, first: bool = False) -> np.ndarray:
        """Return T: seconds of a mini-batch for layers i ... j-1 replicated on m units."""
        travelling = (m - 1) * np.where(np.isfinite(self.weights), self.weights, 0.0) / self.speeds[level]
        if self.counting == "paper":
            return np.maximum(seconds, 2 * travelling) / m
        within = self.sizes[level - 1] if first and level else 1
        return (seconds + 4 * travelling / m / within) / m

    def behind_a_link(self, seconds: np.ndarray, level: int, m: int) -> np.ndarray:
        """Return the larger of a stage's seconds and those of its links; for stages that are not the first."""
        link = 2 * self.between / self.speeds[level]
        if self.counting == "paper":
            return np.maximum(seconds, link[:, None])
        after = link.copy()
        after[-1] = 0.0
        return np.maximum(seconds, np.maximum(link[:, None], after[None, :]) / m)

    def best(self, level: int, before: int = 0, copies: int = 1) -> Table:
        """Return A of a level whose ranks come after `before` others, each of them `copies` times."""
        key = (level, before, copies) if self.memory < inf else (level, 0, 1)
        if key in self.tables:
            return self.tables[key]
        size, below = self.sizes[level], prod(self.sizes[:level])
        rows = 1 if level == len(self.sizes) - 1 else self.n  # at the top only what begins with the first layer counts
        seconds = [np.empty(0)]
        begin = np.full((size + 1, rows, self.n + 1), -1)
        units = np.zeros_like(begin)
        for m in range(1, size + 1):
            whole = self.shared(self.unit(level, before, copies * m), level, m, first=True)[:rows].copy()
            units[m] = m
            for last in range(1, m):
                there = before + copies * (m - last) * below
                stage = self.shared(self.unit(level, there, copies * last), level, last)
                stage = self.behind_a_link(stage, level, last)
                for i in range(rows):
                    slowest = np.maximum(seconds[m - last][i][:, None], stage)
                    cut = slowest.argmin(0)
                    found = slowest[cut, np.arange(self.n + 1)]
                    better = found < whole[i]
                    whole[i, better] = found[better]
                    begin[m, i, better], units[m, i, better] = cut[better], last
            seconds.append(whole)
        filled = np.full((self.n + 1, self.n + 1), inf)
        filled[:rows] = seconds[size]
        self.tables[key] = Table(filled, begin, units)
        return self.tables[key]

    def stages(self, level: int, first: int, end: int, before: int = 0, copies: int = 1) -> list[PlannedStage]:
        """The stages of layers first ... end-1 in the best plan of a level."""
        if level < 0:
            versions = self.versions(before, copies)
            return [PlannedStage(first, end - 1, copies, versions, versions * float(self.kept[first, end]))]
        table, below = self.best(level, before, copies), prod(self.sizes[:level])
        found, m = [], self.sizes[level]
        while True:
            begin, last = int(table.begin[m, first, end]), int(table.units[m, first, end])
            at = first if begin < 0 else begin
            there = before + copies * (m - last) * below
            found = self.stages(level - 1, at, end, there, copies * last) + found
            if begin < 0:
                return found
            m, end = m - last, begin

    def data_parallel(self) -> float:
        """Seconds a mini-batch where every rank has all layers."""
        seconds = self.computing
        for level, size in enumerate(self.sizes):
            seconds = self.shared(seconds, level, size, first=True)
        return float(seconds[0, -1])
