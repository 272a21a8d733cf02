"""Allreduce: x becomes the sum of every rank's x, on every rank ("sum" stands for any operation).

No allreduce takes less than max(lg p alpha, 2 (p-1)/p n beta): doubling reaches the first, ring the second.
Sources: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009.
"""

from collectives.algorithms.registry import Cost, algorithm
from collectives.steps import Recv, RecvReduce, Send, part


@algorithm("allreduce", cost=lambda p, n: Cost(2 * (p - 1), 2 * n * (p - 1) / p, n * (p - 1) / p), ordered=False)
def ring(rank, size, count):
    """Ranks in a ring, x in p parts: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.

    First lap: a part travels to the right and gathers every rank's share; after p-1 rounds rank r holds the whole sum
    of part r+1. Second lap: the finished parts travel on, so that every rank gets them all.
    """
    right, left = (rank + 1) % size, (rank - 1) % size

    def piece(i):
        return part(count, size, i % size)

    for k in range(size - 1):
        yield Send(right, "x", *piece(rank - k)), RecvReduce(left, "x", *piece(rank - k - 1))
    for k in range(size - 1):
        yield Send(right, "x", *piece(rank + 1 - k)), Recv(left, "x", *piece(rank - k))


@algorithm("allreduce", cost=lambda p, n: power_of_two(p, Cost(1, n, n), n))
def doubling(rank, size, count):
    """Recursive doubling: ceil(lg p)(alpha + n beta + n gamma), for short x; keeps rank order.

    In round k partners 2**k apart exchange their sums, so that the number of ranks summed doubles.
    """
    yield from folded(rank, size, count, among_power_of_two)


def among_power_of_two(rank, me, power, real, count):
    bit = 1
    while bit < power:
        peer = real(me ^ bit)
        yield Send(peer, "x", 0, count), RecvReduce(peer, "x", 0, count, left=peer < rank)
        bit *= 2


def folded(rank, size, count, algorithm):
    """Run an algorithm for a power of two of ranks on any number of them.

    Of the first 2 * surplus ranks each odd one takes in x of its left neighbour, stands for both, and hands back the
    result: two messages more. The ranks left are numbered anew, in rank order: real(me) is the rank of number me.
    """
    power = 1 << (size.bit_length() - 1)
    surplus = size - power

    def real(number):
        return 2 * number + 1 if number < surplus else number + surplus

    if rank >= 2 * surplus:
        yield from algorithm(rank, rank - surplus, power, real, count)
    elif rank % 2 == 0:
        yield (Send(rank + 1, "x", 0, count),)
        yield (Recv(rank + 1, "x", 0, count),)
    else:
        yield (RecvReduce(rank - 1, "x", 0, count),)
        yield from algorithm(rank, rank // 2, power, real, count)
        yield (Send(rank - 1, "x", 0, count),)


def power_of_two(size, each, count):
    """Cost of lg p rounds that cost `each`; two messages more where p is no power of two."""
    rounds = size.bit_length() - 1
    surplus = size != 1 << rounds
    return Cost(
        rounds * each.messages + 2 * surplus,
        rounds * each.moved + 2 * surplus * count,
        rounds * each.reduced + surplus * count,
    )
