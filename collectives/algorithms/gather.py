"""Gather: x of rank i becomes block i of the root's y."""

from collectives.algorithms.registry import Cost, algorithm, log2, subtree
from collectives.algorithms.scatter import offsets
from collectives.steps import Copy, Recv, Send, blocks


@algorithm("gather", cost=lambda p, n: Cost(p - 1, n * (p - 1) / p))
def flat(rank, size, count, root=0):
    """Each rank sends its block to the root: (p-1) alpha + (p-1)/p n beta, all of it at the root."""
    block = blocks(count, size)
    lo, hi = block(rank)
    if rank != root:
        yield (Send(root, "x", 0, hi - lo),)
    else:
        receives = [Recv(peer, "y", *block(peer)) for peer in range(size) if peer != root]
        yield *receives, Copy("y", lo, hi, "x", 0)


@algorithm("gather", cost=lambda p, n: Cost(log2(p), n * (p - 1) / p))
def binomial(rank, size, count, root=0):
    """The binomial scatter backwards: ceil(lg p) alpha + (p-1)/p n beta.

    Counted from the root, rank r collects the blocks of r ... r + bit - 1 in "tmp", where bit is its lowest set bit,
    and sends them on as one slice.
    """
    block = blocks(count, size)
    me = (rank - root) % size
    lowest = subtree(me, size)
    at = offsets(block, size, root, me, min(me + lowest, size))
    yield (Copy("tmp", 0, at[1], "x", 0),)
    bit = 1
    while bit < lowest:
        if me + bit < size:
            yield (Recv((me + bit + root) % size, "tmp", at[bit], at[min(2 * bit, size - me)]),)
        bit *= 2
    if me:
        yield (Send((me - lowest + root) % size, "tmp", 0, at[-1]),)
    else:
        yield tuple(Copy("y", *block((i + root) % size), "tmp", at[i]) for i in range(size))
