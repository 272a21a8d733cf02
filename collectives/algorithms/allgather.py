"""Allgather: every rank's block of x goes to every rank; before, each has its own block in place."""

from collectives.algorithms.power_of_two import on_power_of_two
from collectives.algorithms.registry import CONSECUTIVE, Cost, algorithm, log2
from collectives.algorithms.scatter import offsets
from collectives.steps import Copy, Recv, Send, blocks


@algorithm("allgather", cost=lambda p, n: Cost(p - 1, n * (p - 1) / p))
def ring(rank, size, count):
    """Each rank passes on what it got last: (p-1) alpha + (p-1)/p n beta. Best for long blocks."""
    block = blocks(count, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield Send(right, "x", *block((rank - k) % size)), Recv(left, "x", *block((rank - k - 1) % size))


def doubling_cost(p, n):
    rounds = p.bit_length() - 1
    return Cost(rounds, n * (p - 1) / p) if p == 1 << rounds else Cost(rounds + 2, 2 * n)


@algorithm("allgather", cost=doubling_cost, needs={CONSECUTIVE})
def doubling(rank, size, count):
    """Partners 2**k apart exchange all they have: lg p alpha + (p-1)/p n beta where p is a power of two.

    Otherwise neighbours are folded together first, and get everything last: two messages and n beta more.
    """
    block = blocks(count, size)
    everything = block(0)[0], block(size - 1)[1]

    def exchange(folded):
        bit = 1
        while bit < folded.power:
            peer, (mine, other) = folded.rank(folded.number ^ bit), folded.swaps(block, bit)
            yield Send(peer, "x", *mine), Recv(peer, "x", *other)
            bit *= 2

    yield from on_power_of_two(rank, size, exchange, block, lambda r: everything, Recv)


@algorithm("allgather", cost=lambda p, n: Cost(log2(p), n * (p - 1) / p))
def bruck(rank, size, count):
    """What a rank has doubles in each of ceil(lg p) rounds, for any p: ceil(lg p) alpha + (p-1)/p n beta.

    "tmp" holds the blocks of rank, rank + 1, ... in that order; at the end they are put where they belong. Best for
    short blocks. Source: Bruck, Ho, Kipnis, Upfal and Weathersby 1997.
    """
    block = blocks(count, size)
    at = offsets(block, size, rank, 0, size)
    yield (Copy("tmp", 0, at[1], "x", block(rank)[0]),)
    have = 1
    while have < size:
        more = min(have, size - have)
        to, source = (rank - have) % size, (rank + have) % size
        yield Send(to, "tmp", 0, at[more]), Recv(source, "tmp", at[have], at[have + more])
        have += more
    yield tuple(Copy("x", *block((rank + i) % size), "tmp", at[i]) for i in range(1, size))
