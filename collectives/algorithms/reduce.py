"""Reduce: the root's x becomes the sum of every rank's x ("sum" stands for any operation). x of others is used up."""

from collectives.algorithms.power_of_two import fold, halves
from collectives.algorithms.registry import Cost, algorithm, log2
from collectives.steps import Recv, RecvReduce, Send, chunk


def from_all(rank, size, lo, hi):
    """What every other rank sends, added to x[lo:hi] in rank order: those below from the left, nearest first."""
    below = [RecvReduce(peer, "x", lo, hi, operand_left=True) for peer in reversed(range(rank))]
    above = [RecvReduce(peer, "x", lo, hi, operand_left=False) for peer in range(rank + 1, size)]
    return below + above


@algorithm("reduce", cost=lambda p, n: Cost(p - 1, (p - 1) * n, n if p > 1 else 0))
def flat(rank, size, count, root=0):
    """Every rank sends its x to the root, which adds them up as they come: (p-1)(alpha + n beta) + n gamma."""
    if rank != root:
        yield (Send(root, "x", 0, count),)
    else:
        yield tuple(from_all(root, size, 0, count))


@algorithm("reduce", cost=lambda p, n: Cost(2 * (p - 1), 2 * n * (p - 1) / p, n * (p - 1) / p), rounds_once=True)
def direct_gather(rank, size, count, root=0):
    """Every rank sums one chunk of x, all operands at once; the root gathers the chunks: the cost of a ring allreduce.

    2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, in rank order. What one round adds is rounded only once
    (program.py), as float16 needs it.
    """
    yield *shares(rank, size, count), *from_all(rank, size, *chunk(count, size, rank))
    if rank != root:
        yield (Send(root, "x", *chunk(count, size, rank)),)
    else:
        yield tuple(Recv(peer, "x", *chunk(count, size, peer)) for peer in range(size) if peer != root)


def shares(rank, size, count):
    """To every other rank its chunk of x, the neighbour's first."""
    others = ((rank + k) % size for k in range(1, size))
    return [Send(peer, "x", *chunk(count, size, peer)) for peer in others]


@algorithm("reduce", cost=lambda p, n: Cost(log2(p), log2(p) * n, log2(p) * n))
def binomial(rank, size, count, root=0):
    """Neighbours are added first, then pairs of pairs: ceil(lg p)(alpha + n beta + n gamma).

    The tree hangs from rank 0, so that operands are combined in rank order; another root gets the sum in a message of
    its own.
    """
    bit = 1
    while bit < size:
        if rank & bit:
            yield (Send(rank - bit, "x", 0, count),)
            break
        if rank + bit < size:
            yield (RecvReduce(rank + bit, "x", 0, count, operand_left=False),)
        bit *= 2
    if root and rank == 0:
        yield (Send(root, "x", 0, count),)
    if root and rank == root:
        yield (Recv(0, "x", 0, count),)


def halving_cost(p, n):
    power = 1 << (p.bit_length() - 1)
    rounds, share, folded = power.bit_length() - 1, n * (power - 1) / power, p != power
    return Cost(2 * rounds + 2 * folded, 2 * share + 2 * folded * n, share + folded * n)


@algorithm("reduce", cost=halving_cost)
def halving_gather(rank, size, count, root=0):
    """Reduce-scatter by halving, then a gather: 2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma, for long x.

    Where p is no power of two neighbours are folded together first (and the sum handed to the root where its neighbour
    stands for it). The nearest partners halve first, which keeps rank order. Source: Rabenseifner 1997.
    """
    folded = fold(rank, size)
    me = folded.number
    target = fold(root, size)  # who stands for the root
    goal = root // 2 if target.number is None else target.number
    if me is None:
        yield (Send(rank + 1, "x", 0, count),)
        if rank == root:
            yield (Recv(rank + 1, "x", 0, count),)
        return
    if me < folded.surplus:
        yield (RecvReduce(rank - 1, "x", 0, count),)
    path = halves(folded, count)
    for _, peer, keep, give in path:
        yield Send(peer, "x", *give), RecvReduce(peer, "x", *keep, operand_left=peer < rank)
    for bit, peer, keep, give in reversed(path):
        if (me ^ goal) & bit:
            yield (Send(peer, "x", *keep),)
            break
        yield (Recv(peer, "x", *give),)
    if target.number is None and rank == root + 1:
        yield (Send(root, "x", 0, count),)
