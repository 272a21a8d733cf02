"""Collectives in memory that the ranks of a node share: nothing is sent, ranks copy, sum and wait.

Three variants, by what is at hand; a Barrier is one flag written and p - 1 read.

| variant | for | allreduce |
|---|---|---|
| small | short x | each rank puts x into its slot; barrier; each sums all slots itself |
| slots | x that only its rank can see, in segments of a slot | put; barrier; sum a slice; barrier; get sums |
| arrays | x that all ranks can read and write | barrier; each sums its slice over all x into all x; barrier |

A **slot** is scratch that all ranks of the node see. Every rank has two, "even" and "odd" (double buffering). Each
use is an **epoch**; epochs alternate between the two, within a call and from call to call. No barrier is needed to
free a slot: the rank that writes it in epoch t + 2 has passed the barrier of epoch t + 1, and every rank arrived there
after it had read what it wanted in epoch t.

Every element is summed by one rank, in rank order: the results of all ranks are equal to the last bit.

In these schedules `send` names the buffer of a rank's operands where it is not "x", `epoch` is the first epoch's
number, `slot` the elements of a slot, `line` those of a cache line, on whose bounds slices are cut. Cost: see
`algorithm`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from collectives.algorithms.allreduce import levels, segmented_cost, segmented_ring
from collectives.algorithms.registry import COMMUTATIVE, NODES, SEGMENT, SHARED_MEMORY, Cost, algorithm, how_many
from collectives.steps import SLOTS, Barrier, Copy, Reduce, Round, Step, blocks, chunk, relabel_ranks

SLOT_SIZE = 1 << 17  # elements of a slot where the caller does not say
LINE_SIZE = 16  # elements of a cache line, likewise
BARRIER = (Barrier(),)


class SlotEpoch(NamedTuple):
    """What one rank does with the slots of one epoch: `put`, a barrier, `work`, where needed a barrier, and `get`."""

    put: list[Step]
    work: list[Round]
    get: list[Step]


def alternate_slots(epochs: list[SlotEpoch], twice: bool = False) -> Iterator[Round]:
    """Put, barrier, work, get; with a second barrier before `get` where others get what the work wrote (`twice`).

    Then one barrier serves two epochs: what the next epoch puts is put before the second barrier of this one.
    """
    for k, (put, work, get) in enumerate(epochs):
        if k == 0 or not twice:
            yield tuple(put)
            yield BARRIER
        yield from work
        if twice:
            if k + 1 < len(epochs):
                yield tuple(epochs[k + 1].put)
            yield BARRIER
        yield tuple(get)


def slots_of(epoch: int) -> str:
    """The slots that an epoch uses."""
    return SLOTS[epoch % 2]


def slices(count: int, size: int, line: int) -> list[tuple[int, int]]:
    """(lo, hi) of each rank's slice of `count` elements: whole cache lines, but for the end."""
    lines = -(-count // line)
    return [tuple(min(end * line, count) for end in chunk(lines, size, rank)) for rank in range(size)]


def share_of_slot(slot: int, size: int, line: int) -> int:
    """Elements of a slot that each rank has for itself: whole cache lines, at least one."""
    return max(1, slot // size // line) * line


def total(buf: str, n: int, operands: list[tuple[int | None, str, int]]) -> list[Round]:
    """buf[0:n] = the sum of n elements of each (rank, buffer, first element), from left to right."""
    (of, src, at), *rest = operands
    return [
        (Copy(buf, 0, n, src, at, of=of),),
        tuple(Reduce(buf, 0, n, src, at, operand_left=False, of=of) for of, src, at in rest),
    ]


# --------------------------------------------------------------------------------------------------------- small x


@algorithm(
    "allreduce",
    name="shared_small",
    cost=lambda p, n: Cost(barriers=1, copied=3 * n, reduced=(p - 1) * n),
    needs={SHARED_MEMORY},
)
def small(rank, size, count, root=None, send="x", epoch=0):
    """Each rank puts its x into its slot; each that wants the result sums all: a barrier, 3 n copied, (p-1) n gamma."""
    slot = slots_of(epoch)
    work = []
    if root is None or rank == root:
        operands = [(q, slot, 0) for q in range(size)]
        work = [*total("sum", count, operands), (Copy("x", 0, count, "sum", 0),)]
    yield from alternate_slots([SlotEpoch([Copy(slot, 0, count, send, 0)], work, [])])


@algorithm(
    "reduce",
    name="shared_small",
    cost=lambda p, n: Cost(barriers=1, copied=3 * n, reduced=(p - 1) * n),
    needs={SHARED_MEMORY},
)
def small_reduce(rank, size, count, root=0, send="x", epoch=0):
    """As the allreduce, where only the root sums."""
    yield from small(rank, size, count, root, send, epoch)


# ----------------------------------------------------------------------------------------- through slots, in segments


def slots_cost(copies):
    """Return the cost with `copies`(p) times n copied."""

    def cost(p, n):
        k = how_many(n, p * share_of_slot(SLOT_SIZE, p, LINE_SIZE))
        return Cost(barriers=k + 1, copied=copies(p) * n, reduced=(p - 1) / p * n)

    return cost


@algorithm("allreduce", name="shared_slots", cost=slots_cost(lambda p: 2 + 1 / p), needs={SHARED_MEMORY})
def slots(rank, size, count, root=None, send="x", epoch=0, slot=SLOT_SIZE, line=LINE_SIZE, direct=False):
    """Each rank sums its slice of every segment: k + 1 barriers for k segments, 2 n copied, (p-1)/p n gamma.

    Every slot has a share for the slice of each rank, at the same place in every segment. Into its own share a rank
    only writes results, so that others may still get them while it puts operands two epochs later. Where
    `direct`, others' operands are read where they are, in their `send`.
    """
    share = share_of_slot(slot, size, line)
    step = size * share

    def epoch_of(k):
        name, start = slots_of(epoch + k), k * step
        cut = slices(min(step, count - start), size, line)
        lo, hi = cut[rank]
        operands = [(q, name, rank * share) for q in range(size)]
        if direct:
            operands = [(q, send, start + lo) for q in range(size)]
        operands[rank] = None, send, start + lo
        wanted = root is None or rank == root
        results = [Copy("x", start + lo, start + hi, "sum", 0)] if wanted else []
        if rank != root:  # others want it
            results.insert(0, Copy(name, rank * share, rank * share + hi - lo, "sum", 0))
        put, get = [], []
        for q, (a, b) in enumerate(cut):
            if q != rank and not direct:
                put.append(Copy(name, q * share, q * share + b - a, send, start + a))
            if q != rank and wanted:
                get.append(Copy("x", start + a, start + b, name, q * share, of=q))
        return SlotEpoch(put, [*total("sum", hi - lo, operands), tuple(results)], get)

    yield from alternate_slots([epoch_of(k) for k in range(how_many(count, step))], twice=True)


@algorithm("reduce", name="shared_slots", cost=slots_cost(lambda p: 2), needs={SHARED_MEMORY})
def slots_reduce(rank, size, count, root=0, send="x", epoch=0, slot=SLOT_SIZE, line=LINE_SIZE):
    """As the allreduce, where only the root gets the sums."""
    yield from slots(rank, size, count, root, send, epoch, slot, line)


def slots_of_blocks(size, block, step):
    """Return in how many epochs blocks pass in segments of `step` elements, and (lo, hi) of a rank's k-th segment."""
    longest = max(hi - lo for lo, hi in map(block, range(size)))

    def segment_of(rank, k):
        lo, hi = block(rank)
        return min(lo + k * step, hi), min(lo + (k + 1) * step, hi)

    return how_many(longest, step), segment_of


def scatter_cost(p, n):
    share = -(-n // p)
    return Cost(
        barriers=how_many(share, share_of_slot(SLOT_SIZE, p, LINE_SIZE)),
        copied=n + share,
        reduced=(p - 1) * share,
    )


@algorithm("reduce_scatter", name="shared_slots", cost=scatter_cost, needs={SHARED_MEMORY})
def slots_reduce_scatter(rank, size, count, send="x", recv="x", epoch=0, slot=SLOT_SIZE, line=LINE_SIZE):
    """Each rank puts what others sum, share q of its slot for rank q's block: a barrier a segment, n copied.

    `recv` names where the block goes: its place in x, or the beginning of another buffer.
    """
    block, share = blocks(count, size), share_of_slot(slot, size, line)
    number, segment_of = slots_of_blocks(size, block, share)
    offset = 0 if recv == "x" else block(rank)[0]

    def epoch_of(k):
        name = slots_of(epoch + k)
        put = []
        for q in range(size):
            lo, hi = segment_of(q, k)
            put += [Copy(name, q * share, q * share + hi - lo, send, lo)] if q != rank else []
        lo, hi = segment_of(rank, k)
        operands = [(q, name, rank * share) for q in range(size)]
        operands[rank] = None, send, lo
        return SlotEpoch(put, [*total("sum", hi - lo, operands), (Copy(recv, lo - offset, hi - offset, "sum", 0),)], [])

    yield from alternate_slots([epoch_of(k) for k in range(number)])


@algorithm(
    "allgather",
    name="shared_slots",
    cost=lambda p, n: Cost(barriers=how_many(-(-n // p), SLOT_SIZE), copied=n),
    needs={SHARED_MEMORY},
)
def slots_allgather(rank, size, count, send="x", epoch=0, slot=SLOT_SIZE, line=LINE_SIZE):
    """Each rank puts its block, the others get it: a barrier a segment, n copied. `send` may hold the block alone."""
    block = blocks(count, size)
    number, segment_of = slots_of_blocks(size, block, slot)
    offset = 0 if send == "x" else block(rank)[0]

    def epoch_of(k):
        name, (lo, hi) = slots_of(epoch + k), segment_of(rank, k)
        get = []
        for q in range(size):
            a, b = segment_of(q, k)
            get += [Copy("x", a, b, name, 0, of=q)] if q != rank else []
        if send != "x":
            get.append(Copy("x", lo, hi, send, lo - offset))
        return SlotEpoch([Copy(name, 0, hi - lo, send, lo - offset)], [], get)

    yield from alternate_slots([epoch_of(k) for k in range(number)])


@algorithm(
    "broadcast",
    name="shared_slots",
    cost=lambda p, n: Cost(barriers=how_many(n, SLOT_SIZE), copied=n + min(n, SLOT_SIZE) * (p > 1)),
    needs={SHARED_MEMORY},
)
def slots_broadcast(rank, size, count, root=0, epoch=0, slot=SLOT_SIZE, line=LINE_SIZE):
    """The root puts a segment while the others get the one before: a barrier a segment, n and a segment copied."""

    def epoch_of(k):
        name, lo, hi = slots_of(epoch + k), k * slot, min((k + 1) * slot, count)
        if rank == root:
            return SlotEpoch([Copy(name, 0, hi - lo, "x", lo)], [], [])
        return SlotEpoch([], [], [Copy("x", lo, hi, name, 0, of=root)])

    yield from alternate_slots([epoch_of(k) for k in range(how_many(count, slot))])


# ------------------------------------------------------------------------------------- arrays that all ranks can read


@algorithm(
    "allreduce",
    name="shared_arrays",
    cost=lambda p, n: Cost(barriers=2, copied=n / p + n, reduced=(p - 1) * n / p),
    needs={SHARED_MEMORY},
)
def arrays(rank, size, count, send="x", line=LINE_SIZE):
    """Each rank sums its slice of all x into all x: 2 barriers, (p-1)/p n gamma, n copied."""
    lo, hi = slices(count, size, line)[rank]
    if send != "x":
        yield (Copy("x", 0, count, send, 0),)
    yield BARRIER
    yield from total("sum", hi - lo, [(q, "x", lo) for q in range(size)])
    yield tuple(Copy("x", lo, hi, "sum", 0, to=q) for q in range(size))
    yield BARRIER


@algorithm("reduce", name="shared_arrays", cost=slots_cost(lambda p: 1 + 1 / p), needs={SHARED_MEMORY})
def arrays_reduce(rank, size, count, root=0, send="x", epoch=0, slot=SLOT_SIZE, line=LINE_SIZE):
    """Each rank sums its slice of all x, read where they are, into its slot, from where the root gets it."""
    yield from slots(rank, size, count, root, send, epoch, slot, line, direct=True)


@algorithm(
    "reduce_scatter",
    name="shared_arrays",
    cost=lambda p, n: Cost(barriers=2, copied=2 * n / p, reduced=(p - 1) * n / p),
    needs={SHARED_MEMORY},
)
def arrays_reduce_scatter(rank, size, count, send="x", recv="x"):
    """Each rank sums its block of all x: 2 barriers, (p-1)/p n gamma."""
    lo, hi = blocks(count, size)(rank)
    offset = 0 if recv == "x" else lo
    yield BARRIER
    yield from total("sum", hi - lo, [(q, send, lo) for q in range(size)])
    yield (Copy(recv, lo - offset, hi - offset, "sum", 0),)
    yield BARRIER


@algorithm(
    "allgather", name="shared_arrays", cost=lambda p, n: Cost(barriers=2, copied=(p - 1) / p * n), needs={SHARED_MEMORY}
)
def arrays_allgather(rank, size, count, send="x"):
    """Each rank writes its block into all other x: 2 barriers, (p-1)/p n copied."""
    lo, hi = blocks(count, size)(rank)
    at = lo if send == "x" else 0
    yield BARRIER
    yield tuple(Copy("x", lo, hi, send, at, to=q) for q in range(size) if q != rank or send != "x")
    yield BARRIER


@algorithm(
    "broadcast", name="shared_arrays", cost=lambda p, n: Cost(barriers=2, copied=n * (p > 1)), needs={SHARED_MEMORY}
)
def arrays_broadcast(rank, size, count, root=0):
    """Each rank reads the root's x: 2 barriers, n copied."""
    yield BARRIER
    if rank != root:
        yield (Copy("x", 0, count, "x", 0, of=root),)
    yield BARRIER


# ------------------------------------------------------------------------------------------------------ several nodes


def two_level_cost(p, n):
    """Return the cost for nodes of two ranks; each carries half of x through one link, or one all."""
    if p == 1:
        return Cost()
    here, carriers = 2, 2 - p % 2
    inside, ring = scatter_cost(here, n), segmented_cost(-(-p // 2), -(-n // carriers))
    shared = Cost(barriers=how_many(-(-n // carriers), SLOT_SIZE), copied=n)
    return Cost(
        carriers * ring.messages,
        carriers * ring.moved,
        ring.reduced + inside.reduced,
        inside.barriers + shared.barriers,
        inside.copied + shared.copied,
    )


@algorithm("allreduce", name="shared_two_level", cost=two_level_cost, needs={COMMUTATIVE, NODES, SHARED_MEMORY})
def two_level(
    rank,
    size,
    count,
    nodes=None,
    send="x",
    epoch=0,
    slot=SLOT_SIZE,
    line=LINE_SIZE,
    segment=SEGMENT,
    arrays=False,
):
    """Sum in the memory of each node, each chunk of x around a ring between nodes, share it in the memory of each node.

    2 (M-1)/M n/g elements of a rank cross the network, for M nodes of at least g ranks; without `nodes` there are two
    ranks on each. On a node x goes through slots, or where `arrays`, is read and written where it lies.
    """
    node, chunks, peers = levels(rank, count, [r // 2 for r in range(size)] if nodes is None else nodes)
    here, longest = (node.index(rank), len(node), chunks), chunks[0][1]
    options = {"slot": slot, "line": line}
    if len(node) > 1:
        scatter = arrays_reduce_scatter(*here, send)
        if not arrays:
            scatter = slots_reduce_scatter(*here, send, epoch=epoch, **options)
        yield from relabel_ranks(scatter, node)
    elif send != "x":
        yield (Copy("x", 0, count, send, 0),)
    if peers:
        lo, hi = chunks[node.index(rank)]
        yield from relabel_ranks(segmented_ring(peers.index(rank), len(peers), hi - lo, segment), peers, lo)
    if len(node) > 1:
        epoch += how_many(longest, share_of_slot(slot, len(node), line))
        gather = arrays_allgather(*here) if arrays else slots_allgather(*here, epoch=epoch, **options)
        yield from relabel_ranks(gather, node)


@algorithm(
    "allreduce",
    name="shared_two_level_arrays",
    cost=lambda p, n: two_level_cost(p, n)._replace(barriers=4 * (p > 1)),
    needs={COMMUTATIVE, NODES, SHARED_MEMORY},
)
def two_level_arrays(rank, size, count, nodes=None, send="x", segment=SEGMENT):
    """Two levels, where all ranks of a node can read and write the arrays: no slots. Otherwise as `two_level`."""
    yield from two_level(rank, size, count, nodes, send, segment=segment, arrays=True)


@algorithm("barrier", name="shared", cost=lambda p, n: Cost(barriers=1), needs={SHARED_MEMORY})
def barrier(rank, size):
    """One barrier of all ranks."""
    yield BARRIER
