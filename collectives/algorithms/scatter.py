"""Scatter: block i of the root's x becomes y of rank i."""

from collectives.algorithms.registry import Cost, algorithm, log2, subtree
from collectives.steps import Copy, Recv, Send, blocks


@algorithm("scatter", cost=lambda p, n: Cost(p - 1, n * (p - 1) / p))
def flat(rank, size, count, root=0):
    """The root sends each rank its block: (p-1) alpha + (p-1)/p n beta, all of it at the root."""
    block = blocks(count, size)
    lo, hi = block(rank)
    if rank != root:
        yield (Recv(root, "y", 0, hi - lo),)
    else:
        sends = [Send(peer, "x", *block(peer)) for peer in range(size) if peer != root]
        yield *sends, Copy("y", 0, hi - lo, "x", lo)


@algorithm("scatter", cost=lambda p, n: Cost(log2(p), n * (p - 1) / p))
def binomial(rank, size, count, root=0):
    """Each holder gives away the upper half of its blocks: ceil(lg p) alpha + (p-1)/p n beta.

    Counted from the root, rank r receives the blocks of r ... r + bit - 1 into "tmp", where bit is its lowest set
    bit. The root puts its blocks into "tmp" in that order, so that every message is one slice.
    """
    block = blocks(count, size)
    me = (rank - root) % size
    bit = subtree(me, size)
    at = offsets(block, size, root, me, min(me + bit, size))
    if me:
        yield (Recv((me - bit + root) % size, "tmp", 0, at[-1]),)
    else:
        yield tuple(Copy("tmp", at[i], at[i + 1], "x", block((i + root) % size)[0]) for i in range(size))
    while bit := bit // 2:
        if me + bit < size:
            yield (Send((me + bit + root) % size, "tmp", at[bit], at[min(2 * bit, size - me)]),)
    yield (Copy("y", 0, at[1], "tmp", 0),)


def offsets(block, size, root, first, last):
    """Where the blocks first ... last - 1, counted from the root, begin in "tmp"; and where the last one ends."""
    at = [0]
    for i in range(first, last):
        lo, hi = block((i + root) % size)
        at.append(at[-1] + hi - lo)
    return at
