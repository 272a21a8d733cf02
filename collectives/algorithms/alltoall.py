"""Alltoall: block q of every rank's x goes to rank q, which finds that of rank r in block r of its y."""

from collectives.algorithms.registry import EQUAL_BLOCKS, Cost, algorithm, log2
from collectives.steps import Copy, Recv, Send, blocks


def layout(count, into, size):
    """Where block i lies in x and in y."""
    if isinstance(count, int) and count % size:
        raise ValueError(f"alltoall: {count} elements are no {size} blocks of the same length; give lists of blocks")
    return blocks(count, size), blocks(count if into is None else into, size)


@algorithm("alltoall", cost=lambda p, n: Cost(p - 1, n * (p - 1) / p))
def pairwise(rank, size, count, into=None):
    """In round k each rank sends to the one k to its right: (p-1)(alpha + n/p beta)."""
    block, place = layout(count, into, size)
    yield (Copy("y", *place(rank), "x", block(rank)[0]),)
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        yield Send(to, "x", *block(to)), Recv(source, "y", *place(source))


def bruck_cost(p, n):
    sent = sum(i.bit_count() for i in range(p)) if p < 1 << 12 else p * log2(p) / 2
    return Cost(log2(p), n / p * sent)


@algorithm("alltoall", cost=bruck_cost, needs={EQUAL_BLOCKS})
def bruck(rank, size, count, into=None):
    """Blocks travel in leaps of 1, 2, 4, ...: ceil(lg p) alpha + n/2 lg p beta, for short blocks.

    The block for the rank i to the right leaps where i has a bit. "tmp" holds block i at place i, of whatever rank it
    is now; those that leap together are packed into "out", one message. Source: Bruck et al. 1997.
    """
    block, place = layout(count, into, size)
    length = block(0)[1] - block(0)[0]

    def at(i):
        return i * length, (i + 1) * length

    yield tuple(Copy("tmp", *at(i), "x", block((rank + i) % size)[0]) for i in range(size))
    bit = 1
    while bit < size:
        leaping = [i for i in range(size) if i & bit]
        yield tuple(Copy("out", *at(k), "tmp", i * length) for k, i in enumerate(leaping))
        reach = len(leaping) * length
        yield Send((rank + bit) % size, "out", 0, reach), Recv((rank - bit) % size, "in", 0, reach)
        yield tuple(Copy("tmp", *at(i), "in", k * length) for k, i in enumerate(leaping))
        bit *= 2
    yield tuple(Copy("y", *place((rank - i) % size), "tmp", i * length) for i in range(size))
