"""Is a collective right? Ask with any generator of rounds:

    >>> print(collectives.check(my_allreduce, ranks=range(1, 18)))
    wrong: 3 ranks, 7 elements: rank 0, x[0]: the operands of ranks [1, 2] are missing

`prove` runs one case in the simulator and compares every element with what it should be; `check` runs many, and tells
how far the algorithm is from the fewest rounds and elements that any could do with. What each operation should compute
is written once, in OPERATIONS, as the values before and after.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from collectives.checking.simulator import Deadlock, ScheduleError, Stats, simulate
from collectives.pricing.lower_bounds import lower_bound
from collectives.pricing.networks import Network
from collectives.steps import blocks


class WrongResult(ScheduleError):
    """An element that is not what the operation defines, found when all rounds were over."""

    def __init__(self, message, rank, stats):
        super().__init__(message)
        self.rank, self.done, self.begun = rank, stats.history, [[] for _ in stats.history]


def held(rank, lo, hi):
    """Elements lo ... hi - 1 as a rank has them at first."""
    return [((rank, i),) for i in range(lo, hi)]


def summed(ranks, count):
    """So many elements, each the sum over these ranks."""
    return [tuple((r, i) for r in ranks) for i in range(count)]


def total(count, size):
    """Elements up to the end of the last block."""
    return max(blocks(count, size)(r)[1] for r in range(size))


class Operation(NamedTuple):
    """The buffers of a rank before, and which elements of them must hold what after.

    before(rank, size, count, root) -> {name: values}; after(...) -> (name, lo, values), or None for no demand.
    """

    before: Callable
    after: Callable
    rooted: bool = False
    blocked: bool = False  # count may be a list of blocks


def own_block(rank, size, count, root):
    """Before: x is the rank's block, and no more."""
    lo, hi = blocks(count, size)(rank)
    return {"x": held(rank, 0, hi - lo)}


def all_elements(rank, size, count, root):
    """Before: x is a whole vector."""
    return {"x": held(rank, 0, total(count, size))}


def unwritten(count):
    """What a receive buffer holds before."""
    return [((-1, i),) for i in range(count)]


def gathered(size, count):
    """Every rank's block in its place."""
    values = unwritten(total(count, size))  # what lies between blocks stays as it was
    for r in range(size):
        lo, hi = blocks(count, size)(r)
        values[lo:hi] = held(r, 0, hi - lo)
    return values


def place_own(rank, size, count):
    """Before an allgather: the rank's block is in its place in x, and nothing else."""
    values = unwritten(total(count, size))
    lo, hi = blocks(count, size)(rank)
    values[lo:hi] = held(rank, 0, hi - lo)
    return {"x": values}


def scatter_before(rank, size, count, root):
    """Every rank has room for its block in y; the root has all blocks in x."""
    lo, hi = blocks(count, size)(rank)
    return {"y": unwritten(hi - lo)} | (all_elements(rank, size, count, root) if rank == root else {})


def gather_before(rank, size, count, root):
    """Every rank has its block in x; the root has room for all in y."""
    return own_block(rank, size, count, root) | ({"y": unwritten(total(count, size))} if rank == root else {})


OPERATIONS = {
    "broadcast": Operation(
        before=lambda r, p, n, root: {"x": held(r, 0, n)},
        after=lambda r, p, n, root: ("x", 0, held(root, 0, n)),
        rooted=True,
    ),
    "reduce": Operation(
        before=lambda r, p, n, root: {"x": held(r, 0, n)},
        after=lambda r, p, n, root: ("x", 0, summed(range(p), n)) if r == root else None,
        rooted=True,
    ),
    "allreduce": Operation(
        before=lambda r, p, n, root: {"x": held(r, 0, n)},
        after=lambda r, p, n, root: ("x", 0, summed(range(p), n)),
    ),
    "scatter": Operation(
        before=scatter_before,
        after=lambda r, p, n, root: ("y", 0, held(root, *blocks(n, p)(r))),
        rooted=True,
        blocked=True,
    ),
    "gather": Operation(
        before=gather_before,
        after=lambda r, p, n, root: ("y", 0, gathered(p, n)) if r == root else None,
        rooted=True,
        blocked=True,
    ),
    "allgather": Operation(
        before=lambda r, p, n, root: place_own(r, p, n),
        after=lambda r, p, n, root: ("x", 0, gathered(p, n)),
        blocked=True,
    ),
    "reduce_scatter": Operation(
        before=all_elements,
        after=lambda r, p, n, root: ("x", blocks(n, p)(r)[0], summed(range(p), total(n, p))[slice(*blocks(n, p)(r))]),
        blocked=True,
    ),
    "alltoall": Operation(
        before=lambda r, p, n, root: {"x": held(r, 0, n), "y": unwritten(n)},
        after=lambda r, p, n, root: ("y", 0, [v for q in range(p) for v in held(q, *blocks(n, p)(r))]),
    ),
    "scan": Operation(
        before=all_elements,
        after=lambda r, p, n, root: ("x", 0, summed(range(r + 1), n)),
    ),
    "exscan": Operation(
        before=all_elements,
        after=lambda r, p, n, root: ("x", 0, summed(range(r) if r else [0], n)),
    ),
}


def most_rounds(size: int, count: int) -> int:
    """More rounds than a rank could need that sends, receives, adds and copies every element by itself.

    What takes more does not end, and is told so soon: of 17 ranks and 35 elements after 2,548 rounds.
    """
    return 4 * size * (count + 1) + 100


def prove(
    operation: str,
    rounds: Callable,
    size: int,
    count,
    root: int = 0,
    *,
    ordered=True,
    synchronous=True,
    **options,
) -> Stats:
    """Run one case of `rounds(rank, size, count, ...)` and compare with the definition of the operation.

    Raises
    ------
    ScheduleError
        that names the first wrong element, who is missing from it and who is twice in it, or the broken rule
    """
    if operation == "barrier":
        return prove_barrier(rounds, size, synchronous)
    define = OPERATIONS[operation]
    if define.rooted:
        options["root"] = root
    buffers = [define.before(r, size, count, root) for r in range(size)]
    most = most_rounds(size, total(count, size))
    stats = simulate(lambda r: rounds(r, size, count, **options), buffers, synchronous, most)
    compare(define, buffers, stats, size, count, root, ordered)
    return stats


def compare(define: Operation, buffers: list[dict], stats: Stats, size: int, count, root: int = 0, ordered=False):
    """Raise WrongResult at the first element that is not what the operation defines."""
    for r in range(size):
        expected = define.after(r, size, count, root)
        if expected is None:
            continue
        name, lo, values = expected
        got = buffers[r].get(name, [])[lo : lo + len(values)]
        if len(got) < len(values):
            raise WrongResult(f"rank {r}: {name}[{lo + len(got)}] was never written", r, stats)
        for i, (have, want) in enumerate(zip(got, values, strict=True)):
            if have != want and (ordered or sorted(have) != sorted(want)):
                raise WrongResult(f"rank {r}, {name}[{lo + i}]: " + difference(have, want), r, stats)


def prove_barrier(rounds, size, synchronous):
    """A barrier is right when every rank has heard, directly or not, that every other has entered."""
    stats = simulate(
        lambda rank: rounds(rank, size), [{"x": [((r, 0),)]} for r in range(size)], synchronous, most_rounds(size, 1)
    )
    for r, heard in enumerate(stats.heard):
        if missing := [q for q in range(size) if heard[q] < 0]:
            raise WrongResult(f"rank {r} leaves the barrier before it has heard of ranks {missing}", r, stats)
    return stats


def difference(have, want) -> str:
    """Say what is wrong with a sum of operands: who is missing, who is twice, what does not belong, or the order."""
    missing = sorted({r for r, _ in set(want) - set(have)})
    twice = sorted({r for r, i in set(have) if have.count((r, i)) > 1})
    foreign = sorted(set(have) - set(want))
    said = []
    if missing:
        said.append(f"the operands of ranks {missing} are missing")
    if twice:
        said.append(f"those of ranks {twice} are in it more than once")
    if foreign:
        said.append(f"(rank, index) {foreign[:4]} do not belong there")
    if not said:
        said.append(f"the operands are out of rank order: {[r for r, _ in have]}")
    return "; ".join(said)


class Case(NamedTuple):
    """One run: so many ranks and elements, and what was counted."""

    size: int
    count: int
    root: int
    stats: Stats


@dataclass
class Report:
    """What `check` found. True where the algorithm is right; print it, or look at it: `report.draw()`.

    Attributes
    ----------
    algorithm, operation : what was checked, and as what
    right : bool
    said : str
        the first thing that is wrong, and in which case; empty where nothing is
    error : ScheduleError or None
        the same to look into: a Deadlock has `waits` and `cycle`
    failed : (ranks, elements) or None
        of the case that is wrong
    cases : list of Case
        what ran before anything was wrong
    """

    algorithm: Callable
    operation: str
    right: bool = True
    said: str = ""
    error: ScheduleError | None = None
    failed: tuple[int, int] | None = None
    cases: list[Case] = field(default_factory=list)

    def __bool__(self):
        return self.right

    def __str__(self):
        if not self.right:
            return f"wrong: {self.said}"
        sizes = sorted({case.size for case in self.cases})
        lines = [
            f"right: {self.operation} of {sizes[0]} ... {sizes[-1]} ranks in {len(self.cases)} cases, with eager and "
            f"synchronous sends",
        ]
        largest = [max((c for c in self.cases if c.size == size), key=lambda c: c.count) for size in sizes]
        if not any(any(case.stats.messages) for case in largest) and any(case.stats.meetings for case in largest):
            lines.append("  ranks  elements  rounds  meetings  copied or added by a rank")
            for case in largest:
                rounds, meetings, copied = max(case.stats.rounds), case.stats.meetings, case.stats.copied
                lines.append(f"  {case.size:5}  {case.count:8}  {rounds:6}  {meetings:8}  {copied:25}")
            return "\n".join(lines)
        lines.append("  ranks  elements  rounds (at least)  moved (at least)")
        for case in largest:
            fewest, least = self.bounds(case)
            rounds = f"{max(case.stats.rounds)} ({fewest:.0f})"
            lines.append(f"  {case.size:5}  {case.count:8}  {rounds:>17}  {f'{case.stats.moved} ({least:.0f})':>16}")
        return "\n".join(lines)

    def bounds(self, case: Case) -> tuple[float, float]:
        """The fewest rounds, and elements that a rank must send or receive, that any algorithm can do with."""
        return tuple(
            lower_bound(self.operation, case.size, case.count, Network.hockney(*unit)) for unit in ((1, 0), (0, 1))
        )

    def draw(self, size: int | None = None, count: int | None = None, **options):
        """Space-time diagram; of what is wrong, up to and with the round where it fails, else of a case that is right.

        Parameters
        ----------
        size, count : int, optional
            Ranks and elements; by default the case that failed, or the largest of at most eight ranks that ran.
        **options
            As for `collectives.draw`.

        Returns
        -------
        matplotlib Figure
        """
        from collectives.drawing.diagrams import draw, draw_failure

        if self.error is not None and size is None and count is None:
            shown = {name: options[name] for name in ("ax", "title") if name in options}  # time is rounds
            return draw_failure(self.algorithm, *self.failed, self.error, **shown)
        seen = [c for c in self.cases if 1 < c.size <= 8 and c.count] or self.cases
        size = size or (seen[-1].size if seen else 2)
        count = next((c.count for c in reversed(seen) if c.size == size), size) if count is None else count
        return draw(self.algorithm, size, None if self.operation == "barrier" else count, **options)


def check(
    algorithm: Callable,
    ranks: int | Iterable[int] = range(1, 18),
    operation: str = "allreduce",
    counts: Iterable[int] | None = None,
    ordered: bool = False,
    **options,
) -> Report:
    """Check a generator function `algorithm(rank, size, count)` of rounds, for many sizes and counts.

    Parameters
    ----------
    algorithm : generator function, or entry of ALGORITHMS
        with a parameter `root` where the operation has one, else the root is rank 0; a barrier has no count
    ranks : numbers of ranks, or one number
    operation : a name in ALGORITHMS: what x is before and after is said in collectives/algorithms/registry.py
    counts : numbers of elements; by default 0, 1, fewer than ranks, as many, and a number that does not divide
    ordered : whether operands must meet in rank order
    options : passed on to the algorithm

    Returns
    -------
    Report
        on the first wrong case: the first wrong element and who is missing from it; who waits for whom; or the rule
        that is broken, and in which round. Otherwise rounds and elements against the lower bounds.
    """
    if operation != "barrier" and operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}: there are barrier, {', '.join(OPERATIONS)}")
    ranks = [ranks] if isinstance(ranks, int) else list(ranks)
    if not ranks or min(ranks) < 1:
        raise ValueError(f"ranks: expected numbers of ranks, each at least 1, given {ranks}")
    counts = None if counts is None else list(counts)
    if counts is not None and (not counts or min(counts) < 0):
        raise ValueError(f"counts: expected numbers of elements, each at least 0, given {counts}")
    rounds = getattr(algorithm, "rounds", algorithm)
    report = Report(rounds, operation)
    has_root = operation != "barrier" and OPERATIONS[operation].rooted
    any_root = has_root and "root" in inspect.signature(rounds).parameters
    called = rounds if any_root or not has_root else lambda rank, size, count, root: rounds(rank, size, count)
    for size in sorted(ranks, key=lambda size: size == 1):  # one rank last: what is wrong there is seldom the mistake
        for count in sorted(set(counts or (0, 1, size - 1, size, 2 * size + 1))):
            count *= size if operation == "alltoall" else 1
            for root in sorted({0, size // 2, size - 1}) if any_root else [0]:
                case = f"{size} ranks, {count} elements" + (f", root {root}" if any_root else "")
                for synchronous in (False, True):
                    try:
                        stats = prove(
                            operation, called, size, count, root, ordered=ordered, synchronous=synchronous, **options
                        )
                    except ScheduleError as error:
                        only = " (with eager sends it passes)" if synchronous and isinstance(error, Deadlock) else ""
                        report.right, report.said, report.error = False, f"{case}{only}: {error}", error
                        report.failed = size, count
                        return report
                    except Exception as error:
                        error.add_note(f"raised by the algorithm for {case}")
                        raise
                report.cases.append(Case(size, count, root, stats))
    return report
