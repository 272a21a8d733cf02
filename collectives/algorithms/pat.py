"""PAT: Bruck's algorithm with the far partners first, so that the long messages of its last rounds stay near.

Any number of ranks. Source: Jeaugey, PAT: a new algorithm for all-gather and reduce-scatter operations at scale, 2025.
"""

from collectives.algorithms.registry import COMMUTATIVE, Cost, algorithm, log2
from collectives.steps import Copy, Recv, RecvReduce, Send, blocks


def rounds(size):
    """([(distance, how many blocks before it came, which of them are handed on)], how far each block has come from)."""
    distances, steps = [0], []
    for bit in reversed(range(log2(size))):
        forwarded = [i for i, back in enumerate(distances) if back + (1 << bit) < size]
        steps.append((1 << bit, len(distances), forwarded))
        distances += [distances[i] + (1 << bit) for i in forwarded]
    return steps, distances


def runs(numbers):
    """Consecutive numbers as (first, last + 1): each is one slice of "tmp"."""
    found = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] = number + 1
        else:
            found.append([number, number + 1])
    return found


def layout(rank, size, count):
    """(block function, steps, how far each block has come from, where it begins in "tmp")."""
    block = blocks(count, size)
    steps, distances = rounds(size)
    at = [0]
    for back in distances:
        lo, hi = block((rank - back) % size)
        at.append(at[-1] + hi - lo)
    return block, steps, distances, at


@algorithm("allgather", cost=lambda p, n: Cost(log2(p), n * (p - 1) / p))
def pat(rank, size, count):
    """What a rank has doubles in each of ceil(lg p) rounds, far partners first: ceil(lg p) alpha + (p-1)/p n beta.

    "tmp" holds the blocks in the order in which they come. Where p is no power of two, some rounds need several slices.
    """
    block, steps, distances, at = layout(rank, size, count)
    yield (Copy("tmp", 0, at[1], "x", block(rank)[0]),)
    for far, before, forwarded in steps:
        sends = [Send((rank + far) % size, "tmp", at[a], at[b]) for a, b in runs(forwarded)]
        into = [(before + forwarded.index(a), before + forwarded.index(b - 1) + 1) for a, b in runs(forwarded)]
        yield (*sends, *(Recv((rank - far) % size, "tmp", at[a], at[b]) for a, b in into))
    yield tuple(Copy("x", *block((rank - back) % size), "tmp", at[i]) for i, back in enumerate(distances) if back)


@algorithm(
    "reduce_scatter", cost=lambda p, n: Cost(log2(p), n * (p - 1) / p, n * (p - 1) / p), needs={COMMUTATIVE}, name="pat"
)
def pat_reduce_scatter(rank, size, count):
    """The allgather backwards: ceil(lg p) alpha + (p-1)/p (n beta + n gamma)."""
    block, steps, distances, at = layout(rank, size, count)
    yield tuple(Copy("tmp", at[i], at[i + 1], "x", block((rank - back) % size)[0]) for i, back in enumerate(distances))
    for far, before, forwarded in reversed(steps):
        into = [(before + forwarded.index(a), before + forwarded.index(b - 1) + 1) for a, b in runs(forwarded)]
        sends = [Send((rank - far) % size, "tmp", at[a], at[b]) for a, b in into]
        yield (*sends, *(RecvReduce((rank + far) % size, "tmp", at[a], at[b]) for a, b in runs(forwarded)))
    yield (Copy("x", *block(rank), "tmp", 0),)
