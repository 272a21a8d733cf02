"""Is a collective right? Ask with any generator of rounds:

    >>> print(collectives.check(my_allreduce, ranks=range(1, 18)))
    wrong: 3 ranks, 7 elements: rank 0, x[0]: the operands of ranks [1, 2] are missing

`check` proves many cases (checking/definitions.py), and tells how far the algorithm is from the fewest rounds and
elements that any could do with; what is wrong it can draw.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import COMMUTATIVE, CONSECUTIVE, EQUAL_BLOCKS, Algorithm, Need
from collectives.checking.definitions import OPERATIONS, prove, total
from collectives.checking.simulator import Deadlock, ScheduleError, Stats
from collectives.drawing.diagrams import draw, draw_failure
from collectives.pricing.lower_bounds import lower_bound
from collectives.pricing.networks import Network
from collectives.pricing.price import read


class Case(NamedTuple):
    """One run: its numbers of ranks and elements, and what was counted."""

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
    mistake : str
        the first mistake, and in which case; empty where there is none
    error : ScheduleError or None
        the exception that says it: a Deadlock has `waits` and `cycle`
    failed : (ranks, elements) or None
        of the case that is wrong
    cases : list of Case
        the cases that are right
    """

    algorithm: Callable
    operation: str
    mistake: str = ""
    error: ScheduleError | None = None
    failed: tuple[int, int] | None = None
    cases: list[Case] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Return whether no case was wrong."""
        return self.error is None

    def try_case(
        self, words: str, case: tuple[int, int, int], run: Callable[[bool], Stats], synchronous=(False, True)
    ) -> Stats | None:
        """Run a case with eager and with synchronous sends; return what was counted, or None where it is wrong.

        Parameters
        ----------
        words : of the case, for a message
        case : ranks, elements, root
        run : function (whether sends are synchronous) -> Stats; raises ScheduleError
        """
        size, count, root = case
        for sends in synchronous:
            try:
                stats = run(sends)
            except ScheduleError as error:
                only = " (with eager sends it passes)" if sends and isinstance(error, Deadlock) else ""
                self.mistake, self.error, self.failed = f"{words}{only}: {error}", error, (size, count)
                return None
        self.cases.append(Case(size, total(count, size), root, stats))
        return stats

    def __bool__(self):
        return self.right

    def __str__(self):
        if not self.right:
            return f"wrong: {self.mistake}"
        sizes = sorted({case.size for case in self.cases})
        lines = [
            f"right: {self.operation} of {sizes[0]} ... {sizes[-1]} ranks in {len(self.cases)} cases, with eager and "
            f"synchronous sends",
        ]
        largest = [max((c for c in self.cases if c.size == size), key=lambda c: c.count) for size in sizes]
        if not any(any(case.stats.messages) for case in largest) and any(case.stats.barriers for case in largest):
            lines.append("  ranks  elements  rounds  barriers  copied or added by a rank")
            for case in largest:
                rounds, barriers, copied = max(case.stats.depth), case.stats.barriers, case.stats.copied
                lines.append(f"  {case.size:5}  {case.count:8}  {rounds:6}  {barriers:8}  {copied:25}")
            return "\n".join(lines)
        lines.append("  ranks  elements  rounds (at least)  moved (at least)")
        for case in largest:
            fewest, least = self.bounds(case)
            rounds = f"{max(case.stats.depth)} ({fewest:.0f})"
            lines.append(f"  {case.size:5}  {case.count:8}  {rounds:>17}  {f'{case.stats.moved} ({least:.0f})':>16}")
        return "\n".join(lines)

    def bounds(self, case: Case) -> tuple[float, float]:
        """Return the fewest rounds, and elements that a rank must send or receive, that any algorithm can do with."""
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
    operation: str = "",
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
    operation : a name in ALGORITHMS; of an entry its own, else allreduce. What x is before and after is said in
        collectives/algorithms/registry.py
    counts : numbers of elements; by default 0, 1, fewer than ranks, as many, and a number that does not divide
    ordered : whether operands must be combined in rank order
    options : passed on to the algorithm; `root` is the one to try, else the first, the middle and the last rank

    Returns
    -------
    Report
        on the first wrong case: the first wrong element and who is missing from it; who waits for whom; or the rule
        that is broken, and in which round. Otherwise rounds and elements against the lower bounds.

    Examples
    --------
    >>> import collectives
    >>> ring = collectives.ALGORITHMS["allreduce"]["ring"]
    >>> report = collectives.check(ring, ranks=range(1, 6))
    >>> bool(report)
    True
    """
    operation = operation or operation_of(algorithm)
    if operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}: there are {', '.join(OPERATIONS)}")
    ranks = [ranks] if isinstance(ranks, int) else list(ranks)
    if not ranks or min(ranks) < 1:
        raise ValueError(f"ranks: expected numbers of ranks, each at least 1, given {ranks}")
    counts = None if counts is None else list(counts)
    if counts is not None and (not counts or min(counts) < 0):
        raise ValueError(f"counts: expected numbers of elements, each at least 0, given {counts}")
    rounds = read(getattr(algorithm, "rounds", algorithm))[1]
    report = Report(rounds, operation)
    has_root = OPERATIONS[operation].rooted
    any_root = has_root and "root" in inspect.signature(rounds).parameters
    called = rounds if any_root or not has_root else lambda *given, root, **more: rounds(*given, **more)
    asked_root = options.pop("root", None) if has_root else None
    if asked_root and not any_root:
        raise ValueError(f"root {asked_root}, but the algorithm has no parameter root: it is rank 0")
    for size in sorted(ranks, key=lambda size: size == 1):  # one rank last: what is wrong there is seldom the mistake
        tried = set(counts or (0, 1, size - 1, size, 2 * size + 1)) if operation != "barrier" else {size}
        for count in sorted(tried, key=lambda n: (n == 0, n)):  # none last, for which ranks may only wait
            count *= size if operation == "alltoall" else 1
            roots = {0, size // 2, size - 1} if asked_root is None else {asked_root}
            for root in sorted(roots) if any_root else [0]:
                words = (
                    f"{size} ranks"
                    + f", {count} elements" * (operation != "barrier")
                    + (f", root {root}" if any_root else "")
                )

                def run(synchronous, case=(size, count, root)):
                    return prove(operation, called, *case, ordered=ordered, synchronous=synchronous, **options)

                try:
                    if report.try_case(words, (size, count, root), run) is None:
                        return report
                except Exception as error:
                    error.add_note(f"raised by the algorithm for {words}")
                    raise
    return report


def check_algorithm(
    algorithm: Algorithm | Callable,
    operation: str = "",
    ranks: int | Iterable[int] = range(1, 18),
    needs: Iterable[Need] = (),
) -> Report:
    """Check an algorithm as those of the registry are checked: what `check` does, and all that a call may bring.

    Blocks that are uneven, empty, apart and out of order, where the operation has blocks; many segments, where the
    algorithm takes `segment`; nodes of any size, where it takes `nodes`; rank order, if it does not need COMMUTATIVE;
    sums that are made in one round, if its entry says `rounds_once`.

    Parameters
    ----------
    algorithm : entry of ALGORITHMS, or generator function
    operation : a name in ALGORITHMS; of an entry its own, by default allreduce
    ranks : numbers of ranks
    needs : of a generator function what an entry would say

    Returns
    -------
    Report
        on the first wrong case; true where nothing is wrong

    Examples
    --------
    >>> from collectives import ALGORITHMS, check_algorithm
    >>> bool(check_algorithm(ALGORITHMS["allreduce"]["ring"], ranks=range(1, 6)))
    True
    """
    if isinstance(algorithm, Algorithm):
        needs = algorithm.needs
    operation, needs = operation or operation_of(algorithm), frozenset(needs)
    ranks = [ranks] if isinstance(ranks, int) else list(ranks)
    rounds, ordered = read(algorithm)[1], COMMUTATIVE not in needs
    report = check(algorithm, ranks, operation, ordered=ordered)
    if not report or operation == "barrier":
        return report
    parameters = inspect.signature(rounds).parameters
    called = rounds
    if OPERATIONS[operation].rooted and "root" not in parameters:
        called = lambda *given, root, **more: rounds(*given, **more)
    once = [{"round_once": True}] if isinstance(algorithm, Algorithm) and algorithm.rounds_once else []
    for size in [size for size in ranks if size <= 9]:
        for count, options in [*((2 * size + 1, o) for o in once), *harder(size, operation, needs, parameters)]:
            root = size // 2 if "root" in parameters else 0
            words = f"{size} ranks, {count} elements, {options}"
            run = partial(prove, operation, called, size, count, root, ordered=ordered, **options)
            if (
                report.try_case(words, (size, count, root), lambda sends, run=run: run(synchronous=sends), [True])
                is None
            ):
                return report
    return report


def operation_of(algorithm: Algorithm | Callable) -> str:
    """Return the operation of an entry of ALGORITHMS; of a function allreduce."""
    return next((name for name, entries in ALGORITHMS.items() if algorithm in entries.values()), "allreduce")


def harder(size: int, operation: str, needs: frozenset[Need], parameters) -> Iterable[tuple]:
    """Yield (count or blocks, options) of the cases that `check` does not have."""
    if OPERATIONS[operation].blocked:
        lengths = [2 if EQUAL_BLOCKS in needs else 3 * rank % 4 for rank in range(size)]
        ends = [0, *accumulate(lengths)]
        blocks = list(pairwise(ends))
        if CONSECUTIVE not in needs:  # the last rank's block first, a gap before each
            blocks = [
                (2 * size + ends[-1] - hi - rank, 2 * size + ends[-1] - lo - rank)
                for rank, (lo, hi) in enumerate(blocks)
            ]
        yield blocks, {}
    count = 3 * size if operation == "alltoall" else 2 * size + 5
    if "segment" in parameters:
        for segment in (1, 3):
            yield count, {"segment": segment}
    if "nodes" in parameters:
        for most in (1, 2, 3):
            yield count, {"nodes": [rank % -(-size // most) for rank in range(size)]}
            yield count, {"nodes": [rank // most for rank in range(size)]}
