"""Reduce: the root's x becomes the sum of every rank's x ("sum" stands for any operation). x of others is used up."""

from collectives.algorithms.registry import Cost, algorithm, log2
from collectives.steps import Recv, RecvReduce, Send


@algorithm("reduce", cost=lambda p, n: Cost(p - 1, (p - 1) * n, (p - 1) * n))
def flat(rank, size, count, root=0):
    """Every rank sends its x to the root, which adds them up: (p-1)(alpha + n beta + n gamma).

    Ranks below the root are added from the left, nearest first; ranks above from the right.
    """
    if rank != root:
        yield (Send(root, "x", 0, count),)
    else:
        below = [RecvReduce(peer, "x", 0, count, left=True) for peer in reversed(range(root))]
        above = [RecvReduce(peer, "x", 0, count, left=False) for peer in range(root + 1, size)]
        yield *below, *above


@algorithm("reduce", cost=lambda p, n: Cost(log2(p), log2(p) * n, log2(p) * n))
def binomial(rank, size, count, root=0):
    """Neighbours are added first, then pairs of pairs: ceil(lg p)(alpha + n beta + n gamma).

    The tree hangs from rank 0, so that operands meet in rank order; another root gets the sum in one message more.
    """
    bit = 1
    while bit < size:
        if rank & bit:
            yield (Send(rank - bit, "x", 0, count),)
            break
        if rank + bit < size:
            yield (RecvReduce(rank + bit, "x", 0, count, left=False),)
        bit *= 2
    if root and rank == 0:
        yield (Send(root, "x", 0, count),)
    if root and rank == root:
        yield (Recv(0, "x", 0, count),)
