"""What each operation must end with: written once, in OPERATIONS, as the values before and after.

`prove` runs one case in the simulator and compares every element with that.
"""

from collections.abc import Callable
from typing import NamedTuple

from collectives.checking.simulator import ScheduleError, Stats, simulate
from collectives.steps import blocks


class WrongResult(ScheduleError):
    """An element that is not what the operation defines, found when all rounds were over."""

    def __init__(self, message, rank, stats):
        super().__init__(message)
        self.rank, self.done, self.begun = rank, stats.history, [[] for _ in stats.history]


def held(rank, lo, hi):
    """Return elements lo ... hi - 1 as a rank has them at first."""
    return [((rank, i),) for i in range(lo, hi)]


def summed(ranks, count):
    """Return `count` elements, each the sum over these ranks."""
    return [tuple((r, i) for r in ranks) for i in range(count)]


def total(count, size):
    """Return the number of elements up to the end of the last block."""
    return max(blocks(count, size)(r)[1] for r in range(size))


class Operation(NamedTuple):
    """The buffers of a rank before, and which elements of them must hold what after.

    before(rank, size, count, root) -> {name: values}; after(...) -> (name, lo, values), or None for no demand. A
    barrier has no buffers, and neither of them: `prove_barrier`.
    """

    before: Callable | None
    after: Callable | None
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
    """Return what a receive buffer holds before."""
    return [((-1, i),) for i in range(count)]


def placed(ranks, size, count):
    """Return a vector with the blocks of these ranks in their places."""
    values = unwritten(total(count, size))  # what lies between blocks stays as it was
    for r in ranks:
        lo, hi = blocks(count, size)(r)
        values[lo:hi] = held(r, 0, hi - lo)
    return values


def scatter_before(rank, size, count, root):
    """Every rank has room for its block in y; the root has all blocks in x."""
    lo, hi = blocks(count, size)(rank)
    return {"y": unwritten(hi - lo)} | (all_elements(rank, size, count, root) if rank == root else {})


def gather_before(rank, size, count, root):
    """Every rank has its block in x; the root has room for all in y."""
    return own_block(rank, size, count, root) | ({"y": unwritten(total(count, size))} if rank == root else {})


OPERATIONS = {
    "broadcast": Operation(all_elements, lambda r, p, n, root: ("x", 0, held(root, 0, n)), rooted=True),
    "reduce": Operation(
        all_elements, lambda r, p, n, root: ("x", 0, summed(range(p), n)) if r == root else None, rooted=True
    ),
    "allreduce": Operation(all_elements, lambda r, p, n, root: ("x", 0, summed(range(p), n))),
    "scatter": Operation(
        scatter_before, lambda r, p, n, root: ("y", 0, held(root, *blocks(n, p)(r))), rooted=True, blocked=True
    ),
    "gather": Operation(
        gather_before,
        lambda r, p, n, root: ("y", 0, placed(range(p), p, n)) if r == root else None,
        rooted=True,
        blocked=True,
    ),
    "allgather": Operation(
        lambda r, p, n, root: {"x": placed([r], p, n)},
        lambda r, p, n, root: ("x", 0, placed(range(p), p, n)),
        blocked=True,
    ),
    "reduce_scatter": Operation(
        all_elements,
        lambda r, p, n, root: ("x", blocks(n, p)(r)[0], summed(range(p), total(n, p))[slice(*blocks(n, p)(r))]),
        blocked=True,
    ),
    "alltoall": Operation(
        lambda r, p, n, root: {"x": held(r, 0, n), "y": unwritten(n)},
        lambda r, p, n, root: ("y", 0, [v for q in range(p) for v in held(q, *blocks(n, p)(r))]),
    ),
    "scan": Operation(all_elements, lambda r, p, n, root: ("x", 0, summed(range(r + 1), n))),
    "barrier": Operation(None, None),
    "exscan": Operation(all_elements, lambda r, p, n, root: ("x", 0, summed(range(r) if r else [0], n))),
}


def most_rounds(size: int, count: int) -> int:
    """More rounds than a rank could need that sends, receives, adds and copies every element by itself.

    What takes more does not end, and is told so soon: of 17 ranks and 35 elements after 2,548 rounds.
    """
    return 4 * size * (count + 1) + 100


def prove(
    operation: str | Operation,
    rounds: Callable,
    size: int,
    count,
    root: int = 0,
    *,
    ordered=True,
    synchronous=True,
    compute: Callable | None = None,
    round_once: bool = False,
    **options,
) -> Stats:
    """Run one case of `rounds(rank, size, count, ...)` and compare with the definition of the operation.

    `compute` is what carries out a Compute, `round_once` refuses sums of sums, as `simulate` takes them.

    Raises
    ------
    ScheduleError
        that names the first wrong element, who is missing from it and who is twice in it, or the broken rule
    """
    define = OPERATIONS[operation] if isinstance(operation, str) else operation
    if define.before is None:
        return prove_barrier(rounds, size, synchronous)
    if define.rooted:
        options["root"] = root
    buffers = [define.before(r, size, count, root) for r in range(size)]
    most = most_rounds(size, total(count, size))
    stats = simulate(lambda r: rounds(r, size, count, **options), buffers, synchronous, most, compute, round_once)
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
    """Prove a barrier, which is right when every rank has heard, directly or not, that every other has entered."""
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
    problems = []
    if missing:
        problems.append(f"the operands of ranks {missing} are missing")
    if twice:
        problems.append(f"those of ranks {twice} are in it more than once")
    if foreign:
        problems.append(f"(rank, index) {foreign[:4]} do not belong there")
    if not problems:
        problems.append(f"the operands are out of rank order: {[r for r, _ in have]}")
    return "; ".join(problems)
