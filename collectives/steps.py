"""The vocabulary: a parallel algorithm is one small generator of rounds per rank.

    def ring_allgather(rank, size, count):
        for k in range(size - 1):
            send, recv = chunk(count, size, (rank - k) % size), chunk(count, size, (rank - k - 1) % size)
            yield Send((rank + 1) % size, "x", *send), Recv((rank - 1) % size, "x", *recv)

What is yielded is a **round**: a tuple of steps. Four tools take the same schedule: the executor runs it over MPI, the
simulator checks it for all ranks in one process, the event-driven simulation prices it on a network, the drawing shows
it. Steps are of three kinds: messages (Send, Recv, RecvReduce), moves in memory (Copy, Reduce), where ranks of a node
may name each other's buffers and wait at a Barrier, and computation (Compute).

Four words for a range of elements:

| word | means | made by |
|---|---|---|
| slice | any (lo, hi) of a buffer; with buffer and rank a `Slice` | |
| chunk | one of p nearly equal slices of a vector, such as the one that a rank reduces | `chunk` |
| segment | one of several slices of a chunk or vector that follow each other through a pipeline | `registry.segments` |
| block | a slice that the caller has chosen for a rank, as in gather, alltoall and their v-forms | `blocks` |

The rules that every tool relies on:

1. A round is a simultaneous assignment: its steps read the state before it, and their writes appear after it. A rank
   starts its next round when its own has finished; there is no global step.
2. No element is written twice in a round, except by reductions, which apply in listed order. Only a reduction may
   write what a Send of that round reads: the message carries the old value.
3. Messages from one rank to another match in the order in which they are listed.
4. Slices are in elements, half open; a step without elements (lo >= hi) is dropped by every tool alike.
5. Buffers are named: "x" is the one the caller gave, "y" the result where that is another; any other name is scratch
   of this rank, as long as the steps reach. Datatypes, operations, packing and MPI.IN_PLACE belong to the
   communicator: an algorithm never sees them.
6. Where two ranks touch the same element, and one of them writes it, a Barrier of both or a message from the first to
   the second lies between the two rounds; else they race. A Barrier is the only step of its round.

A tool handles each kind of step by its name and refuses what it does not know; what a step reads and writes, and
whether it does anything, it asks of the functions below.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Integral, Real
from typing import NamedTuple, get_args


class Send(NamedTuple):
    """Send buf[lo:hi] to `peer`.

    Examples
    --------
    >>> from collectives import Recv, Send, check
    >>> def broadcast(rank, size, count):  # the root sends to all others
    ...     if rank == 0:
    ...         for other in range(1, size):
    ...             yield (Send(other, "x", 0, count),)
    ...     else:
    ...         yield (Recv(0, "x", 0, count),)
    >>> bool(check(broadcast, operation="broadcast", ranks=[2, 3]))
    True
    """

    peer: int
    buf: str
    lo: int
    hi: int


class Recv(NamedTuple):
    """buf[lo:hi] = what comes from `peer`.

    Examples
    --------
    >>> from collectives import Recv, Send, check
    >>> def broadcast(rank, size, count):  # the root sends to all others
    ...     if rank == 0:
    ...         for other in range(1, size):
    ...             yield (Send(other, "x", 0, count),)
    ...     else:
    ...         yield (Recv(0, "x", 0, count),)
    >>> bool(check(broadcast, operation="broadcast", ranks=[2, 3]))
    True
    """

    peer: int
    buf: str
    lo: int
    hi: int


class RecvReduce(NamedTuple):
    """buf[lo:hi] = operand (+) buf[lo:hi], operand from `peer`; without `operand_left`, on the right.

    Examples
    --------
    >>> from collectives import RecvReduce, Send, check
    >>> def exchange(rank, size, count):  # an allreduce of two ranks
    ...     yield Send(1 - rank, "x", 0, count), RecvReduce(1 - rank, "x", 0, count)
    >>> bool(check(exchange, ranks=2))
    True
    """

    peer: int
    buf: str
    lo: int
    hi: int
    operand_left: bool = True


class Copy(NamedTuple):
    """buf[lo:hi] = src[at : at + hi - lo]; src is rank `of`'s and buf rank `to`'s, where None is this rank.

    Examples
    --------
    >>> from collectives import Copy, Recv, Reduce, Send, check
    >>> def exchange(rank, size, count):  # an allreduce of two ranks, with a copy of x
    ...     yield (Copy("own", 0, count, "x", 0),)
    ...     yield Send(1 - rank, "own", 0, count), Recv(1 - rank, "other", 0, count)
    ...     yield (Reduce("x", 0, count, "other", 0),)
    >>> bool(check(exchange, ranks=2))
    True
    """

    buf: str
    lo: int
    hi: int
    src: str
    at: int
    of: int | None = None
    to: int | None = None


class Reduce(NamedTuple):
    """buf[lo:hi] = operand (+) buf[lo:hi], operand = src[at : at + hi - lo]; without `operand_left`, on the right.

    src is rank `of`'s and buf rank `to`'s, where None is this rank.

    Examples
    --------
    >>> from collectives import Copy, Recv, Reduce, Send, check
    >>> def exchange(rank, size, count):  # an allreduce of two ranks, with a copy of x
    ...     yield (Copy("own", 0, count, "x", 0),)
    ...     yield Send(1 - rank, "own", 0, count), Recv(1 - rank, "other", 0, count)
    ...     yield (Reduce("x", 0, count, "other", 0),)
    >>> bool(check(exchange, ranks=2))
    True
    """

    buf: str
    lo: int
    hi: int
    src: str
    at: int
    operand_left: bool = True
    of: int | None = None
    to: int | None = None


class Barrier(NamedTuple):
    """Wait until all `ranks` (None: every rank) have come: each may then read what the others wrote before.

    Examples
    --------
    >>> from collectives import Barrier, check
    >>> def barrier(rank, size):
    ...     yield (Barrier(),)
    >>> bool(check(barrier, operation="barrier", ranks=[2, 3]))
    True
    """

    ranks: tuple[int, ...] | None = None


class Slice(NamedTuple):
    """buf[lo:hi] of a rank; in a Compute, where rank is None, of its own.

    Examples
    --------
    >>> from collectives import Slice
    >>> Slice("x", 0, 4)
    Slice(buf='x', lo=0, hi=4, rank=None)
    """

    buf: str
    lo: int
    hi: int
    rank: int | None = None


class Compute(NamedTuple):
    """Do what is registered under `name`; it reads and writes these slices of this rank and takes `seconds`.

    Examples
    --------
    >>> from collectives import Compute, Slice
    >>> Compute("forward", (Slice("x", 0, 8),), (Slice("y", 0, 4),), seconds=1e-3).name
    'forward'
    """

    name: str
    reads: tuple[Slice, ...] = ()
    writes: tuple[Slice, ...] = ()
    seconds: float = 0.0


Step = Send | Recv | RecvReduce | Copy | Reduce | Barrier | Compute
Round = tuple[Step, ...]

SLOTS = "even", "odd"  # scratch of which each rank has two, where ranks share memory: they alternate from call to call

KINDS, MESSAGES = frozenset(get_args(Step)), frozenset((Send, Recv, RecvReduce))
NUMBERS, NAMES = (
    {kind: [(i, name) for i, name in enumerate(kind._fields) if name in fields] for kind in (*KINDS, Slice)}
    for fields in (("peer", "lo", "hi", "at", "of", "to"), ("buf", "src"))
)


def rounds_of(rank: int, rounds: Iterable[Round]) -> Iterator[Round]:
    """Return what an algorithm gave for a rank, or a TypeError: a function without `yield` gives None."""
    if not isinstance(rounds, Iterable):
        raise TypeError(f"rank {rank}: an algorithm is a generator of rounds, this one returned {rounds!r}")
    return iter(rounds)


def mistake_in(steps: Round) -> str:
    """Return what is no round or no step, or has a field of another kind than a step's; empty where all is well."""
    if not isinstance(steps, tuple | list) or type(steps) in KINDS:
        return f"a round is a tuple of steps, (step,) where there is one, not {steps!r}"
    for s in steps:
        if type(s) in MESSAGES and type(s[0]) is type(s[2]) is type(s[3]) is int and type(s[1]) is str:
            continue  # nearly all are: a third of the time
        if type(s) not in KINDS:
            return f"{s!r} is not a step"
        slices = ()
        if type(s) is Compute:
            if wrong := [x for x in (s.reads, s.writes) if not isinstance(x, tuple | list)]:
                return f"{s!r}: reads and writes are tuples of Slice, and {wrong[0]!r} is not a Slice"
            if not isinstance(s.seconds, Real) or not 0 <= s.seconds < math.inf:
                return f"{s!r}: seconds is a number >= 0, not {s.seconds!r}"
            slices = (*s.reads, *s.writes)
        if wrong := [x for x in slices if type(x) is not Slice]:
            return f"{s!r}: reads and writes are tuples of Slice, and {wrong[0]!r} is not a Slice"
        if type(s) is Barrier and not isinstance(s.ranks, Sequence | None):
            return f"{s!r}: ranks is a tuple of them, or None for all"
        for x in (s, *slices):
            for i, name in NUMBERS[type(x)]:
                this_rank = x[i] is None and name in ("of", "to")
                if type(x[i]) is not int and not isinstance(x[i], Integral) and not this_rank:
                    return f"{s!r}: {name} is a whole number, not {x[i]!r}"
            for i, name in NAMES[type(x)]:
                if type(x[i]) is not str:
                    return f"{s!r}: {name} is the name of a buffer, such as 'x', not {x[i]!r}"
    return ""


def is_live(step: Step) -> bool:
    """Return whether a step does anything; tools drop the others."""
    return type(step) is Barrier or type(step) is Compute or step.hi > step.lo


def reads(step: Step, rank: int) -> list[Slice]:
    """Return what a step of `rank` reads, besides what a reduction adds to (that it writes)."""
    match step:
        case Send(_, buf, lo, hi):
            return [Slice(buf, lo, hi, rank)]
        case Copy() | Reduce():
            return [Slice(step.src, step.at, step.at + step.hi - step.lo, rank if step.of is None else step.of)]
        case Compute():
            return [s._replace(rank=rank) for s in step.reads]
        case Recv() | RecvReduce() | Barrier():
            return []
    raise TypeError(f"{step!r} is not a step")


def writes(step: Step, rank: int) -> list[Slice]:
    """Return what a step of `rank` writes, or adds to."""
    match step:
        case Recv() | RecvReduce():
            return [Slice(step.buf, step.lo, step.hi, rank)]
        case Copy() | Reduce():
            return [Slice(step.buf, step.lo, step.hi, rank if step.to is None else step.to)]
        case Compute():
            return [s._replace(rank=rank) for s in step.writes]
        case Send() | Barrier():
            return []
    raise TypeError(f"{step!r} is not a step")


def adds(step: Step) -> bool:
    """Return whether what a step writes is added to what is there."""
    return isinstance(step, RecvReduce | Reduce)


def overlap(a: Slice, b: Slice) -> bool:
    """Return whether two slices have elements in common."""
    return a.lo < b.hi and b.lo < a.hi and a.buf == b.buf and a.rank == b.rank


def relabel_ranks(rounds: Iterable[Round], ranks: Sequence[int], shift: int = 0) -> Iterable[Round]:
    """Return the schedule with rank i replaced by ranks[i], and x[0] (and y[0]) by x[shift]."""

    def moved(s):
        by = shift if s.buf in ("x", "y") else 0
        return s._replace(lo=s.lo + by, hi=s.hi + by)

    def relabelled(step):
        match step:
            case Send() | Recv() | RecvReduce():
                return moved(step)._replace(peer=ranks[step.peer])
            case Copy() | Reduce():
                of, to = (None if r is None else ranks[r] for r in (step.of, step.to))
                at = step.at + (shift if step.src in ("x", "y") else 0)
                return moved(step)._replace(at=at, of=of, to=to)
            case Barrier():
                return Barrier(tuple(ranks if step.ranks is None else (ranks[r] for r in step.ranks)))
            case Compute():
                return step._replace(reads=tuple(map(moved, step.reads)), writes=tuple(map(moved, step.writes)))
        raise TypeError(f"{step!r} is not a step")

    for steps in rounds:
        yield tuple(map(relabelled, steps))


def chunk(count: int, n: int, i: int) -> tuple[int, int]:
    """Return (lo, hi) of chunk i where `count` elements are cut into n nearly equal chunks.

    The first count % n chunks are one element longer; chunks may be empty where count < n.

    Examples
    --------
    >>> from collectives import chunk
    >>> [chunk(10, 3, i) for i in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    """
    size, longer = divmod(count, n)
    lo = size * i + (i if i < longer else longer)
    return lo, lo + size + (i < longer)


Blocks = int | Sequence[tuple[int, int]]


def blocks(count: Blocks, n: int) -> Callable[[int], tuple[int, int]]:
    """Return the function i -> (lo, hi) of block i of n.

    `count` is a number of elements, cut into nearly equal chunks, or a sequence that holds (lo, hi) of each block.

    Examples
    --------
    >>> from collectives import blocks
    >>> block = blocks([(0, 2), (2, 7)], 2)
    >>> block(1)
    (2, 7)
    """
    return partial(chunk, count, n) if isinstance(count, int) else count.__getitem__
