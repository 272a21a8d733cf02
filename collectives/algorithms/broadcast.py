"""Broadcast: the root's x goes to every rank."""

from collectives.algorithms.registry import Cost, algorithm, log2
from collectives.steps import Recv, Send


@algorithm("broadcast", cost=lambda p, n: Cost(p - 1, (p - 1) * n))
def flat(rank, size, count, root=0):
    """The root sends to each rank in turn: (p-1)(alpha + n beta)."""
    if rank != root:
        yield (Recv(root, "x", 0, count),)
    else:
        yield tuple(Send(peer, "x", 0, count) for peer in range(size) if peer != root)


@algorithm("broadcast", cost=lambda p, n: Cost(log2(p), log2(p) * n))
def binomial(rank, size, count, root=0):
    """Who has it passes it on, and the number of ranks that have it doubles: ceil(lg p)(alpha + n beta).

    Counted from the root, rank r gets it from r with its lowest set bit cleared.
    """
    me = (rank - root) % size
    bit = 1
    while bit < size and not me & bit:
        bit *= 2
    if me:
        yield (Recv((me - bit + root) % size, "x", 0, count),)
    while bit := bit // 2:
        if me + bit < size:
            yield (Send((me + bit + root) % size, "x", 0, count),)
