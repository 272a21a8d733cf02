"""Allreduce on a torus, and on any number of levels: one ring for each dimension.

    price(ALGORITHMS["allreduce"]["bucket"], 16, n, network=Network.torus((4, 4)))       # dims are the network's
    communicator.Allreduce(x, y, algorithm=partial(bucket, dims=(4, 4)))

Source: Jain and Sabharwal 2010, for tori; Jia et al. 2018 and others, for levels.
"""

import math
from itertools import zip_longest

from collectives.algorithms.registry import COMMUTATIVE, DIMS, Cost, algorithm
from collectives.steps import Recv, RecvReduce, Send, chunk


def ring_cost(p, n):
    return Cost(2 * (p - 1), 2 * n * (p - 1) / p, n * (p - 1) / p)


@algorithm("allreduce", cost=ring_cost, needs={COMMUTATIVE, DIMS})
def bucket(rank, size, count, dims=None):
    """Reduce-scatter along each dimension in turn, allgather back: 2 sum(n_d - 1) alpha + 2(p-1)/p n beta.

    Ranks are numbered through the last dimension first. After a ring of n_d ranks each keeps 1/n_d of what it had, so
    that the next dimension moves that much less; every message goes to a neighbour. Without `dims` it is a ring, whose
    cost the registry has. A dimension can as well be a level: with dims = (nodes, ranks a node), or (racks, nodes,
    ranks), the slow level carries 1/ranks of the vector (`multi_level`).
    """
    yield from along(rank, size, 0, count, sides_of(size, dims), 0, 1)


def multi_level(rank, size, count, groups=None):
    """Allreduce over any number of levels, with groups[0] ranks in the innermost one, groups[1] of those in the next.

    Level i moves 2 (g_i - 1)/g_i n / (g_0 ... g_i-1), so that the slow outer levels carry least.
    A rank's group on level i holds the ranks that differ in that place alone, counted as digits, innermost first.
    """
    yield from bucket(rank, size, count, None if groups is None else tuple(groups)[::-1])


def multiport_bucket(rank, size, count, dims=None):
    """All 2D directions of a torus at once: 2D buckets on n/2D each, time 2(p-1)/p n beta / 2D where sides are equal.

    Half of them go the other way round, and each begins in another dimension.
    """
    sides = sides_of(size, dims)
    directions = [(first, direction) for first in range(len(sides)) for direction in (1, -1)]
    copies = [
        along(rank, size, *chunk(count, len(directions), i), sides, first, direction)
        for i, (first, direction) in enumerate(directions)
    ]
    for rounds in zip_longest(*copies, fillvalue=()):
        yield tuple(step for steps in rounds for step in steps)


def sides_of(size, dims) -> tuple[int, ...]:
    """The sides of the torus; refuses those that do not hold `size` ranks."""
    sides = (size,) if dims is None else tuple(dims)
    if math.prod(sides) != size:
        raise ValueError(
            f"dims={'x'.join(map(str, sides))} hold {math.prod(sides)} ranks, not {size}: give sides whose "
            "product is the number of ranks"
        )
    return sides


def along(rank, size, lo, hi, sides, first, direction):
    """A bucket of x[lo:hi] that begins `first` dimensions from the last, and goes up (direction 1) or down (-1)."""
    strides = [math.prod(sides[axis + 1 :]) for axis in range(len(sides))]
    axes = [(len(sides) - 1 - first - i) % len(sides) for i in range(len(sides))]
    rings = []  # of each dimension: this rank's place in it, its neighbours, its chunks
    for axis in axes:
        n, stride = sides[axis], strides[axis]
        at = rank // stride % n
        ahead, behind = (rank + ((at + by) % n - at) * stride for by in (direction, -direction))
        chunks = [(lo + a, lo + b) for a, b in (chunk(hi - lo, n, i) for i in range(n))]
        rings.append((n, at, ahead, behind, chunks))
        lo, hi = chunks[at]
    for n, at, ahead, behind, chunks in rings:
        for k in range(1, n):
            give, take = chunks[(at - direction * k) % n], chunks[(at - direction * (k + 1)) % n]
            yield Send(ahead, "x", *give), RecvReduce(behind, "x", *take)
    for n, at, ahead, behind, chunks in reversed(rings):
        for k in range(n - 1):
            give, take = chunks[(at - direction * k) % n], chunks[(at - direction * (k + 1)) % n]
            yield Send(ahead, "x", *give), Recv(behind, "x", *take)
