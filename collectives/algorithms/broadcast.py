"""Broadcast: the root's x goes to every rank.

Short x: binomial. Long x: chain where there are many more segments than ranks, else scatter_allgather.
"""

from collectives.algorithms import allgather
from collectives.algorithms.registry import SEGMENT, Cost, algorithm, how_many, log2, segments, subtree
from collectives.steps import Recv, Send, chunk, relabel_ranks


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
    bit = subtree(me, size)
    if me:
        yield (Recv((me - bit + root) % size, "x", 0, count),)
    while bit := bit // 2:
        if me + bit < size:
            yield (Send((me + bit + root) % size, "x", 0, count),)


def chain_cost(p, n, segment=SEGMENT):
    k = how_many(n, segment)
    return Cost(p - 2 + k, (p - 2 + k) * n / k) if p > 1 else Cost(0, 0)


@algorithm("broadcast", cost=chain_cost)
def chain(rank, size, count, root=0, segment=SEGMENT):
    """A pipeline of k segments from each rank to its right neighbour: (p-2+k)(alpha + n/k beta).

    A segment arrives while the one before it is passed on.
    """
    me = (rank - root) % size
    left, right = (rank - 1) % size, (rank + 1) % size
    cuts = segments(0, count, how_many(count, segment))
    for k in range(len(cuts) + 1):
        steps = []
        if me > 0 and k < len(cuts):
            steps.append(Recv(left, "x", *cuts[k]))
        if me < size - 1 and k > 0:
            steps.append(Send(right, "x", *cuts[k - 1]))
        yield tuple(steps)


@algorithm("broadcast", cost=lambda p, n: Cost(log2(p) + p - 1, 2 * n * (p - 1) / p))
def scatter_allgather(rank, size, count, root=0):
    """x is scattered in p chunks, then gathered by everyone: (lg p + p-1) alpha + 2(p-1)/p n beta.

    Part i belongs to the i-th rank from the root, so that a binomial scatter hands on one slice. Source: van de Geijn
    1994.
    """
    me = (rank - root) % size
    bit = subtree(me, size)

    def chunks(first, last):
        return chunk(count, size, first)[0], chunk(count, size, min(last, size) - 1)[1]

    if me:
        yield (Recv((me - bit + root) % size, "x", *chunks(me, me + bit)),)
    while bit := bit // 2:
        if me + bit < size:
            yield (Send((me + bit + root) % size, "x", *chunks(me + bit, me + 2 * bit)),)
    yield from relabel_ranks(allgather.ring(me, size, count), [(r + root) % size for r in range(size)])
