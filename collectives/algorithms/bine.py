"""Bine trees: binomial trees whose partners lie on alternating sides, and so nearer.

Up to a third less crosses between groups of neighbouring ranks. Distances are those of Swing (swing.py): 1, 1, 3, 5, 11
..., on one side and on the other in turn. Ranks are written in base -2: `to_negabinary`. Where p is no power of two,
the largest power of two below it makes the tree, and its ranks hand on to the others.

Source: De Sensi et al., Bine Trees, SC 2025.
"""

from functools import lru_cache

from collectives.algorithms.allreduce import doubling_cost
from collectives.algorithms.power_of_two import on_power_of_two
from collectives.algorithms.registry import COMMUTATIVE, Cost, algorithm, log2
from collectives.steps import Copy, Recv, RecvReduce, Send, blocks

MASK = 0xAAAAAAAA


def to_negabinary(x: int) -> int:
    """The digits of x in base -2, as bits."""
    return ((MASK + x) & 0xFFFFFFFF) ^ MASK


def from_negabinary(digits: int) -> int:
    """The number whose digits in base -2 these bits are."""
    return (MASK ^ digits) - MASK


def distance(step: int) -> int:
    """How far partners of a step are apart, with its side: 1, -1, 3, -5, 11 ... for even ranks, the other for odd."""
    return from_negabinary((2 << step) - 1)


@lru_cache(maxsize=8)
def tree(size: int) -> tuple[list[int | None], list[list[int]]]:
    """(parent of each rank, its children in the order in which they are served), for root 0."""
    power = 1 << (size.bit_length() - 1)
    parent: list[int | None] = [None] * size
    children: list[list[int]] = [[] for _ in range(size)]
    reached = [0]
    for step in reversed(range(power.bit_length() - 1)):
        for place in list(reached):
            child = from_negabinary(to_negabinary(place) ^ ((2 << step) - 1)) % power
            parent[child] = place
            children[place].append(child)
            reached.append(child)
    for place in range(power, size):
        parent[place] = place - power
        children[place - power].append(place)
    return parent, children


@lru_cache(maxsize=8)
def preorder(size: int) -> tuple[list[list[int]], list[int]]:
    """(of each rank the ranks of its subtree, itself first, then child by child; how many they are)."""
    _, children = tree(size)
    below: list[list[int]] = [[] for _ in range(size)]

    def fill(place):
        below[place] = [place]
        for child in children[place]:
            fill(child)
            below[place] += below[child]

    fill(0)
    return below, list(map(len, below))


@algorithm("broadcast", cost=lambda p, n: Cost(log2(p), log2(p) * n), name="bine")
def broadcast(rank, size, count, root=0):
    """As binomial, with partners on both sides: ceil(lg p)(alpha + n beta)."""
    parent, children = tree(size)
    me = (rank - root) % size
    if me:
        yield (Recv((parent[me] + root) % size, "x", 0, count),)
    for child in children[me]:
        yield (Send((child + root) % size, "x", 0, count),)


@algorithm("reduce", cost=lambda p, n: Cost(log2(p), log2(p) * n, log2(p) * n), needs={COMMUTATIVE}, name="bine")
def reduce(rank, size, count, root=0):
    """The broadcast backwards: ceil(lg p)(alpha + n beta + n gamma)."""
    parent, children = tree(size)
    me = (rank - root) % size
    for child in reversed(children[me]):
        yield (RecvReduce((child + root) % size, "x", 0, count),)
    if me:
        yield (Send((parent[me] + root) % size, "x", 0, count),)


def layout(rank, size, count, root):
    """What scatter and gather need: (block function, subtree, offsets in "tmp", children with their slices, parent)."""
    block, me = blocks(count, size), (rank - root) % size
    parent, children = tree(size)
    below, at = preorder(size)[0][me], [0]
    for place in below:
        lo, hi = block((place + root) % size)
        at.append(at[-1] + hi - lo)
    starts = {place: at[i] for i, place in enumerate(below)} | {None: at[-1]}
    follow = [*children[me][1:], None]
    served = (
        [
            ((child + root) % size, starts[child], starts[after])
            for child, after in zip(children[me], follow, strict=True)
        ]
        if children[me]
        else []
    )
    above = None if me == 0 else (parent[me] + root) % size
    return block, below, at, served, above


@algorithm("scatter", cost=lambda p, n: Cost(log2(p), n * (p - 1) / p), name="bine")
def scatter(rank, size, count, root=0):
    """The blocks of a whole subtree go to its root, in the order in which it hands them on: "tmp" has them so.

    ceil(lg p) alpha + (p-1)/p n beta.
    """
    block, below, at, served, above = layout(rank, size, count, root)
    if above is None:
        yield tuple(Copy("tmp", at[i], at[i + 1], "x", block((v + root) % size)[0]) for i, v in enumerate(below))
    else:
        yield (Recv(above, "tmp", 0, at[-1]),)
    for child, lo, hi in served:
        yield (Send(child, "tmp", lo, hi),)
    yield (Copy("y", 0, at[1], "tmp", 0),)


@algorithm("gather", cost=lambda p, n: Cost(log2(p), n * (p - 1) / p), name="bine")
def gather(rank, size, count, root=0):
    """The scatter backwards: ceil(lg p) alpha + (p-1)/p n beta."""
    block, below, at, served, above = layout(rank, size, count, root)
    yield (Copy("tmp", 0, at[1], "x", 0),)
    for child, lo, hi in reversed(served):
        yield (Recv(child, "tmp", lo, hi),)
    if above is None:
        yield tuple(Copy("y", *block((v + root) % size), "tmp", at[i]) for i, v in enumerate(below))
    else:
        yield (Send(above, "tmp", 0, at[-1]),)


@algorithm("allreduce", cost=doubling_cost, needs={COMMUTATIVE}, name="bine")
def allreduce(rank, size, count):
    """As doubling, of whole vectors, the far partners first: lg p (alpha + n beta + n gamma); folded as doubling is."""

    def exchange(folded):
        for step in reversed(range(folded.power.bit_length() - 1)):
            by = distance(step) if folded.number % 2 == 0 else -distance(step)
            peer = folded.rank((folded.number + by) % folded.power)
            yield Send(peer, "x", 0, count), RecvReduce(peer, "x", 0, count)

    yield from on_power_of_two(rank, size, exchange, lambda r: (0, count), lambda r: (0, count))
