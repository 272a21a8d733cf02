"""Scan and exscan: x becomes the sum over ranks 0 ... rank, or 0 ... rank - 1; both keep rank order."""

from collectives.algorithms.reduce import from_all
from collectives.algorithms.registry import Cost, algorithm, log2
from collectives.steps import Copy, Recv, RecvReduce, Reduce, Send


@algorithm("scan", cost=lambda p, n: Cost(p - 1, (p - 1) * n, n if p > 1 else 0), rounds_once=True)
def flat(rank, size, count):
    """Every rank sends its x to all above it: (p-1)(alpha + n beta) + n gamma.

    A sum is made in one round, so that elements that are rounded are rounded only once (program.py).
    """
    yield *(Send(peer, "x", 0, count) for peer in range(rank + 1, size)), *from_all(rank, rank + 1, 0, count)


@algorithm("exscan", name="flat", cost=lambda p, n: Cost(p - 1, (p - 1) * n, max(0, p - 2) * n), rounds_once=True)
def exclusive_flat(rank, size, count):
    """As the flat scan, without a rank's own x: (p-1)(alpha + n beta) + (p-2) n gamma."""
    sends = [Send(peer, "x", 0, count) for peer in range(rank + 1, size)]
    yield *sends, *(Recv(peer, "tmp", peer * count, (peer + 1) * count) for peer in reversed(range(rank)))
    yield tuple(Reduce("tmp", 0, count, "tmp", peer * count, operand_left=False) for peer in range(1, rank))
    yield (Copy("x", 0, count, "tmp", 0),) if rank else ()


@algorithm("scan", cost=lambda p, n: Cost(p - 1, (p - 1) * n, (p - 1) * n))
def chain(rank, size, count):
    """Each rank adds the sum of those before it and passes it on: (p-1)(alpha + n beta + n gamma)."""
    if rank > 0:
        yield (RecvReduce(rank - 1, "x", 0, count),)
    if rank < size - 1:
        yield (Send(rank + 1, "x", 0, count),)


@algorithm("scan", cost=lambda p, n: Cost(log2(p), log2(p) * n, max(0, 2 * log2(p) - 1) * n))
def doubling(rank, size, count):
    """Partners 2**k apart exchange the sums of their groups: ceil(lg p)(alpha + n beta + at most 2 n gamma).

    "tmp" is the sum of the group, x of those of it up to this rank. What nobody needs is neither sent nor summed.
    """
    yield from by_doubling(rank, size, count, Reduce)


@algorithm("exscan", name="doubling", cost=lambda p, n: Cost(log2(p), log2(p) * n, max(0, 2 * log2(p) - 2) * n))
def exclusive(rank, size, count):
    """As the scan by doubling, but x begins with the first sum that comes from the left. Rank 0 keeps its x."""
    yield from by_doubling(rank, size, count, Copy)


def by_doubling(rank, size, count, first):
    """Sums of groups twice as large in every round. The `first` one from the left is added to x, or takes its place."""
    yield start_group(rank, size, count)
    into_x = first
    for peer, mine, theirs in exchanges(rank, size):
        yield from exchange_sums(rank, peer, mine, theirs, count)
        to_x = [into_x("x", 0, count, "in", 0)] if peer < rank else []
        into_x = Reduce if to_x else into_x
        yield *to_x, *add_to_group(rank, peer, mine, count)


def start_group(rank, size, count):
    """The group is this rank alone, if it will send its sum to any rank."""
    sends = any(peer > rank or theirs for peer, _, theirs in exchanges(rank, size))
    return (Copy("tmp", 0, count, "x", 0),) if sends else ()


def exchange_sums(rank, peer, mine, theirs, count):
    """Partners exchange "tmp" as far as the one on the right, whose x needs it, or a later group does."""
    give = [Send(peer, "tmp", 0, count)] if peer > rank or theirs else []
    take = [Recv(peer, "in", 0, count)] if peer < rank or mine else []
    yield *give, *take


def add_to_group(rank, peer, mine, count):
    return [Reduce("tmp", 0, count, "in", 0, operand_left=peer < rank)] if mine else []


def exchanges(rank, size):
    """(peer, whether this rank's new group sum is needed later, whether the peer's is) of each round."""

    def needed(r, k):
        """Whether anyone uses what rank r has in "tmp" after round k."""
        later = [(j, r ^ 1 << j) for j in range(k + 1, log2(size)) if r ^ 1 << j < size]
        return any(peer > r or needed(peer, j) for j, peer in later)

    for k in range(log2(size)):
        peer = rank ^ 1 << k
        if peer < size:
            yield peer, needed(rank, k), needed(peer, k)
