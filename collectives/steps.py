"""The vocabulary: a parallel algorithm is one small generator of rounds per rank.

    def ring_allgather(rank, size, count):
        for k in range(size - 1):
            send, recv = part(count, size, (rank - k) % size), part(count, size, (rank - k - 1) % size)
            yield Send((rank + 1) % size, "x", *send), Recv((rank - 1) % size, "x", *recv)

What is yielded is a **round**: a tuple of steps. Four readers understand the same text: the executor runs it over
MPI, the simulator checks it for all ranks in one process, the clock prices it on a network, the drawing shows it.

The rules that every reader relies on:

1. A round is a simultaneous assignment: its steps read the state before it, and their writes appear after it. A rank
   starts its next round when its own has finished; there is no global step.
2. No element is written twice in a round, except by reductions, which apply in listed order. Only a reduction may
   write what a Send of that round reads: the message carries the old value.
3. Messages from one rank to another match in the order in which they are listed.
4. Slices are in elements, half open; a step without elements (lo >= hi) is dropped by every reader alike.
5. Buffers are named: "x" is the one the caller gave, "y" the result where that is another; any other name is scratch
   of this rank, as long as the steps reach. Datatypes, operations, packing and MPI.IN_PLACE belong to the
   communicator: an algorithm never sees them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple


class Send(NamedTuple):
    """Send buf[lo:hi] to `peer`."""

    peer: int
    buf: str
    lo: int
    hi: int


class Recv(NamedTuple):
    """buf[lo:hi] = what comes from `peer`."""

    peer: int
    buf: str
    lo: int
    hi: int


class RecvReduce(NamedTuple):
    """buf[lo:hi] = got (+) buf[lo:hi] where `left`, else buf[lo:hi] (+) got; got is what comes from `peer`."""

    peer: int
    buf: str
    lo: int
    hi: int
    left: bool = True


class Copy(NamedTuple):
    """buf[lo:hi] = src[at : at + hi - lo], both on this rank."""

    buf: str
    lo: int
    hi: int
    src: str
    at: int


class Reduce(NamedTuple):
    """buf[lo:hi] = got (+) buf[lo:hi] where `left`, else buf[lo:hi] (+) got; got is src[at : at + hi - lo]."""

    buf: str
    lo: int
    hi: int
    src: str
    at: int
    left: bool = True


Step = Send | Recv | RecvReduce | Copy | Reduce
Round = tuple[Step, ...]


def part(count: int, n: int, i: int) -> tuple[int, int]:
    """(lo, hi) of part i when `count` elements are cut into n nearly equal parts.

    The first count % n parts are one element longer; parts may be empty when count < n.
    """
    size, longer = divmod(count, n)
    lo = size * i + min(i, longer)
    return lo, lo + size + (i < longer)


Blocks = int | Sequence[tuple[int, int]]


def blocks(count: Blocks, n: int) -> Callable[[int], tuple[int, int]]:
    """The function i -> (lo, hi) of block i of n.

    `count` is a number of elements, cut into nearly equal parts, or a sequence that holds (lo, hi) of each block.
    """
    return partial(part, count, n) if isinstance(count, int) else count.__getitem__
