"""Reduce-scatter: block i of the sum of every rank's x goes to rank i, in place; the rest of x is used up."""

from collectives.algorithms import allreduce, reduce
from collectives.algorithms.power_of_two import on_power_of_two
from collectives.algorithms.registry import COMMUTATIVE, CONSECUTIVE, Cost, algorithm
from collectives.steps import RecvReduce, Send, blocks, relabel_ranks


@algorithm("reduce_scatter", cost=lambda p, n: Cost(p - 1, n * (p - 1) / p, n * (p - 1) / p), needs={COMMUTATIVE})
def ring(rank, size, count):
    """A block travels once around and gathers every share: (p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma."""
    block = blocks(count, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(1, size):
        yield Send(right, "x", *block((rank - k) % size)), RecvReduce(left, "x", *block((rank - k - 1) % size))


@algorithm("reduce_scatter", cost=lambda p, n: Cost(p - 1, n * (p - 1) / p, n * (p - 1) / p), needs={COMMUTATIVE})
def pairwise(rank, size, count):
    """Each pair of ranks exchanges shares directly: (p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma.

    As the ring, but a rank's sum is made where it ends up, in one place.
    """
    block = blocks(count, size)
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        yield Send(to, "x", *block(to)), RecvReduce(source, "x", *block(rank))


@algorithm("reduce_scatter", cost=lambda p, n: Cost(p - 1, n * (p - 1) / p, n * (p - 1) / p), rounds_once=True)
def direct(rank, size, count):
    """As pairwise, but in one round, and so in rank order: (p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma.

    What one round adds is rounded only once (program.py), as float16 needs it. Takes p-1 blocks of memory.
    """
    block = blocks(count, size)
    others = [(rank + k) % size for k in range(1, size)]
    yield *(Send(peer, "x", *block(peer)) for peer in others), *reduce.from_all(rank, size, *block(rank))


def halving_cost(p, n):
    rounds = p.bit_length() - 1
    share, folded = n * (p - 1) / p, p != 1 << rounds
    return Cost(rounds + 2 * folded, share + folded * (n + n / p), share + folded * n)


@algorithm("reduce_scatter", cost=halving_cost, needs={COMMUTATIVE, CONSECUTIVE})
def halving(rank, size, count):
    """Partners p/2, p/4, ... apart swap halves: lg p alpha + (p-1)/p (n beta + n gamma) where p is a power of two.

    Otherwise neighbours are folded together first: two messages and up to n (beta + gamma) more.
    """
    block = blocks(count, size)
    everything = block(0)[0], block(size - 1)[1]

    def halve(folded):
        bit = folded.power // 2
        while bit:
            peer, (mine, other) = folded.rank(folded.number ^ bit), folded.swaps(block, bit)
            yield Send(peer, "x", *other), RecvReduce(peer, "x", *mine)
            bit //= 2

    yield from on_power_of_two(rank, size, halve, lambda r: everything, block)


@algorithm("reduce_scatter", cost=allreduce.doubling_cost, needs={CONSECUTIVE})
def doubling(rank, size, count):
    """A whole allreduce, of which each rank keeps its block: the one that keeps rank order. lg p (alpha + n beta)."""
    block = blocks(count, size)
    lo, hi = block(0)[0], block(size - 1)[1]
    yield from relabel_ranks(allreduce.doubling(rank, size, hi - lo), range(size), lo)
