"""Answers to the puzzles, by their names in collectives.puzzles; they hold the records."""

from collectives.algorithms import allreduce, broadcast, bucket, swing
from collectives.puzzles.stages import Stage
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Send, Slice, chunk


def gather(rank, size, count):
    """A binomial tree: every second rank hands over all that it has; rank 0 has it where it belongs at once."""

    def begin(r):
        return chunk(count, size, r)[0] if r < size else count

    name, base = ("y", 0) if rank == 0 else ("mine", begin(rank))
    steps = [Copy(name, begin(rank) - base, begin(rank + 1) - base, "x", 0)]
    k = 1
    while k < size and rank % k == 0:
        if rank % (2 * k):
            yield (Send(rank - k, "x" if k == 1 else name, 0, begin(rank + k) - base),)
            return
        if rank + k < size:
            steps.append(Recv(rank + k, name, begin(rank + k) - base, begin(rank + 2 * k) - base))
        yield tuple(steps)
        steps, k = [], 2 * k
    yield tuple(steps)


def scan(rank, size, count):
    """After k rounds x is the sum of 2^k ranks up to this one: a message carries it as it was before the round."""
    k = 1
    while k < size:
        give = [Send(rank + k, "x", 0, count)] if rank + k < size else []
        take = [RecvReduce(rank - k, "x", 0, count)] if rank >= k else []
        yield *give, *take
        k *= 2


def directions(rank, size):
    """Round the ring to the right and to the left: (to, from, +-1, how many ranks come from there)."""
    right, left = (rank + 1) % size, (rank - 1) % size
    return (right, left, 1, size // 2), (left, right, -1, (size - 1) // 2)


def reduce_scatter(rank, size, count):
    """Part j comes to rank j from both sides: in half as many rounds as from one, and nobody sends more."""
    for k in range(size // 2):
        steps = []
        for to, source, direction, far in directions(rank, size):
            if k < far:
                steps += [Send(to, "x", *chunk(count, size, (rank + direction * (far - k)) % size))]
                steps += [RecvReduce(source, "x", *chunk(count, size, (rank + direction * (far - k - 1)) % size))]
        yield tuple(steps)


def ring(rank, size, count):
    """Reduce-scatter on both wires, then send each part out to both sides."""
    yield from reduce_scatter(rank, size, count)
    for k in range(size // 2):
        steps = []
        for to, source, direction, far in directions(rank, size):
            if k < far:
                steps += [Send(to, "x", *chunk(count, size, (rank - direction * k) % size))]
                steps += [Recv(source, "x", *chunk(count, size, (rank - direction * (k + 1)) % size))]
        yield tuple(steps)


def alltoall(rank, size, count):
    """In round k everybody sends to the rank k places ahead; one's own block is copied beside the first."""
    lo, hi = chunk(count, size, rank)
    mine = hi - lo
    steps = [Copy("y", rank * mine, (rank + 1) * mine, "x", lo)]
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        steps += [Send(to, "x", *chunk(count, size, to)), Recv(source, "y", source * mine, (source + 1) * mine)]
        yield tuple(steps)
        steps = []
    if steps:
        yield tuple(steps)


def chain(rank, size, count, pieces=8):
    """A chain: while a piece goes on, the next one comes."""
    cuts = [chunk(count, pieces, i) for i in range(pieces)]
    for k in range(pieces + 1):
        receive = [Recv(rank - 1, "x", *cuts[k])] if rank and k < pieces else []
        give = [Send(rank + 1, "x", *cuts[k - 1])] if rank < size - 1 and k else []
        yield *receive, *give


def memory(rank, size, count):
    """Each rank sums its part of all x, and writes it into all x: nobody else touches that part."""
    lo, hi = chunk(count, size, rank)
    yield (Copy("sum", 0, hi - lo, "x", lo, of=0),)
    yield tuple(Reduce("sum", 0, hi - lo, "x", lo, operand_left=False, of=q) for q in range(1, size))
    yield tuple(Copy("x", lo, hi, "sum", 0, to=q) for q in range(size))
    yield (Barrier(),)


def fsdp(rank, size, count):
    """While a layer is computed, the shards of the next one come into the other half of a double buffer."""
    for number in range(-1, count):
        steps = []
        if number >= 0:
            at = number % 2 * size
            reads, writes = (Slice("full", at, at + size),), (Slice("y", number, number + 1),)
            steps.append(Compute(f"L{number}", reads, writes, 4.0))
        if (after := number + 1) < count:
            at = after % 2 * size
            steps.append(Copy("full", at + rank, at + rank + 1, "x", after))
            for k in range(1, size):
                to, source = (rank + k) % size, (rank - k) % size
                steps += [Send(to, "x", after, after + 1), Recv(source, "full", at + source, at + source + 1)]
        yield tuple(steps)


def ring_attention(rank, size, count):
    """While a rank attends to some keys, it sends them on, and the next ones come into another buffer."""
    here, there = "x", "first"
    for step in range(size):
        owner = (rank - step) % size
        steps = [Compute(f"A{owner}", (Slice(here, 0, count),), (Slice("y", owner, owner + 1),), 4.0)]
        if step < size - 1:
            steps += [Send((rank + 1) % size, here, 0, count), Recv((rank - 1) % size, there, 0, count)]
        yield tuple(steps)
        here, there = there, "first" if there == "second" else "second"


def experts(rank, size, count):
    """First my own positions, while others travel; what is computed goes back while the next ones are."""

    def block(q):
        return q * count, (q + 1) * count

    for d in range(size + 1):
        steps = []
        if d < size:
            source = (rank - d) % size
            reads, writes = ("in", "out") if d else ("x", "y")
            steps.append(Compute(f"E{source}", (Slice(reads, *block(source)),), (Slice(writes, *block(source)),), 2.0))
        if d + 1 < size:
            to, source = (rank + d + 1) % size, (rank - d - 1) % size
            steps += [Send(to, "x", *block(to)), Recv(source, "in", *block(source))]
        if d > 1:
            to, source = (rank - d + 1) % size, (rank + d - 1) % size
            steps += [Send(to, "out", *block(to)), Recv(source, "y", *block(source))]
        yield tuple(steps)


def gpipe(rank, size, count):
    """All forward, then all backward; the last first, so that it is kept for the shortest time."""
    order = [("F", i) for i in range(count)] + [("B", i) for i in range(count)]
    yield from Stage(rank, size).rounds(order)


def one_f_one_b(rank, size, count):
    """As many forwards ahead as there are stages behind, then one forward, one backward."""
    ahead = min(size - 1 - rank, count)
    order = [("F", i) for i in range(ahead)]
    for i in range(count):
        order += [("F", ahead + i)] * (ahead + i < count) + [("B", i)]
    yield from Stage(rank, size).rounds(order)


def zero_bubble(rank, size, count):
    """ZB-H1 (Qi et al. 2023): weight gradients as many micro-batches behind as there are stages before."""
    ahead = min(size - rank, count)
    order = [("F", i) for i in range(ahead)]
    for i in range(count):
        order += [("I", i)] + [("W", i - rank)] * (i >= rank) + [("F", ahead + i)] * (ahead + i < count)
    order += [("W", i) for i in range(max(0, count - rank), count)]
    yield from Stage(rank, size).rounds(order)


def torus(rank, size, count):
    """Swing in all four directions at once, each on a quarter of the vector."""
    yield from swing.multiport_swing(rank, size, count, dims=(4, 4))


def thin_link(rank, size, count):
    """A bucket of two levels: inside the nodes, over the link a quarter of the vector by each rank, inside again."""
    yield from bucket.bucket(rank, size, count, dims=(2, 4))


def buddy(rank, size, count):
    """A copy of x for the next rank."""
    yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "copy", 0, count)


def parity(rank, size, count):
    """x in as many parts as there are other ranks; each of those keeps the sum of what it gets from all."""
    lengths = [chunk(count, size - 1, i) for i in range(size - 1)]
    longest = lengths[0][1]
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        lo, hi = lengths[k - 1]
        take = Recv if k == 1 else RecvReduce
        yield Send(to, "x", lo, hi), take(source, "sums", 0, min(longest, hi - lo))


ANSWERS = {
    "broadcast": broadcast.binomial,
    "gather": gather,
    "scan": scan,
    "doubling": allreduce.doubling,
    "reduce_scatter": reduce_scatter,
    "ring": ring,
    "halving": allreduce.rabenseifner,
    "alltoall": alltoall,
    "chain": chain,
    "memory": memory,
    "torus": torus,
    "thin_link": thin_link,
    "fsdp": fsdp,
    "ring_attention": ring_attention,
    "experts": experts,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble": zero_bubble,
    "buddy": buddy,
    "parity": parity,
}
