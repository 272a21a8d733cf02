"""Allreduce: x becomes the sum of every rank's x, on every rank ("sum" stands for any operation).

No allreduce takes less than max(lg p alpha, 2 (p-1)/p n beta). Doubling reaches the first, so it is for short x; ring,
segmented_ring and rabenseifner reach the second; double_tree comes near both for many ranks. two_level sends the fewest
bytes between nodes. Source, where no other is named: Thakur, Rabenseifner and Gropp 2005.
"""

from typing import NamedTuple

from collectives.algorithms import allgather, broadcast, reduce
from collectives.algorithms.power_of_two import halves, on_power_of_two
from collectives.algorithms.registry import COMMUTATIVE, NODES, SEGMENT, Cost, algorithm, how_many, log2, segments
from collectives.algorithms.trees import two_trees
from collectives.steps import Recv, RecvReduce, Reduce, Send, chunk, relabel_ranks


@algorithm("allreduce", cost=lambda p, n: Cost(2 * (p - 1), 2 * n * (p - 1) / p, n * (p - 1) / p), needs={COMMUTATIVE})
def ring(rank, size, count):
    """Ranks in a ring, x in p chunks: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.

    First lap: a chunk travels to the right and gathers every rank's operands; after p-1 rounds rank r holds the whole
    sum of chunk r+1. Second lap: the finished chunks travel on, so that every rank gets them all. Source: Patarasuk and
    Yuan 2009.
    """
    right, left = (rank + 1) % size, (rank - 1) % size

    def chunk_of(i):
        return chunk(count, size, i % size)

    out = chunk_of(rank)
    for k in range(size - 1):
        into = chunk_of(rank - k - 1)
        yield Send(right, "x", *out), RecvReduce(left, "x", *into)
        out = into
    for k in range(size - 1):
        into = chunk_of(rank - k)
        yield Send(right, "x", *out), Recv(left, "x", *into)
        out = into


@algorithm("allreduce", cost=lambda p, n: Cost(2 * (p - 1), 2 * n * (p - 1) / p, n * (p - 1) / p), rounds_once=True)
def direct(rank, size, count):
    """Every rank sums one chunk of x, all operands at once; then a ring allgather: the cost of the ring.

    2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, and keeps rank order. What one round adds is rounded only once
    (program.py), as float16 needs it; the ring rounds p-1 times.
    """
    yield *reduce.shares(rank, size, count), *reduce.from_all(rank, size, *chunk(count, size, rank))
    yield from allgather.ring(rank, size, count)


def segmented_cost(p, n, segment=SEGMENT):
    k = max(2, how_many(-(-n // p), segment))
    return Cost(2 * (p - 1) * k, 2 * n * (p - 1) / p, n / (p * k) if p > 1 else 0)


@algorithm("allreduce", cost=segmented_cost, needs={COMMUTATIVE})
def segmented_ring(rank, size, count, segment=SEGMENT):
    """The ring with chunks cut into k >= 2 segments: 2(p-1) k alpha + 2(p-1)/p n beta + n/(p k) gamma.

    In the first lap a segment is added while the next one is on its way: it lands in one of two slots of "tmp". So only
    the last one's addition takes time. In both laps segments follow each other, so that the link is never empty while
    a rank sees that a chunk has come and begins to send it on.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    longest = chunk(count, size, 0)[1]
    k = max(2, how_many(longest, segment))
    slot = -(-longest // k)

    def segments_of(i):
        return segments(*chunk(count, size, i % size), k)

    landed = ()  # what came in the round before, still to be added
    came = 0  # segments
    for lap in range(size - 1):
        for out, (lo, hi) in zip(segments_of(rank - lap), segments_of(rank - lap - 1), strict=True):
            at = came % 2 * slot
            yield Send(right, "x", *out), Recv(left, "tmp", at, at + hi - lo), *landed
            landed = (Reduce("x", lo, hi, "tmp", at),)
            came += 1
    yield landed
    for lap in range(size - 1):
        for out, into in zip(segments_of(rank + 1 - lap), segments_of(rank - lap), strict=True):
            yield Send(right, "x", *out), Recv(left, "x", *into)


@algorithm("allreduce", cost=lambda p, n: Cost(2 * log2(p), 2 * log2(p) * n, log2(p) * n))
def reduce_broadcast(rank, size, count):
    """Binomial reduce to rank 0, binomial broadcast from it: 2 ceil(lg p)(alpha + n beta) + ceil(lg p) n gamma."""
    yield from reduce.binomial(rank, size, count)
    yield from broadcast.binomial(rank, size, count)


def doubling_cost(p, n):
    rounds = p.bit_length() - 1
    folded = p != 1 << rounds
    return Cost(rounds + 2 * folded, (rounds + 2 * folded) * n, (rounds + folded) * n)


@algorithm("allreduce", cost=doubling_cost)
def doubling(rank, size, count):
    """Recursive doubling: lg p (alpha + n beta + n gamma), one round of each more where p is no power of two.

    In round k partners 2**k apart exchange their sums, so that the number of ranks in a sum doubles. Keeps rank order.
    """

    def exchange(folded):
        bit = 1
        while bit < folded.power:
            peer = folded.rank(folded.number ^ bit)
            yield Send(peer, "x", 0, count), RecvReduce(peer, "x", 0, count, operand_left=peer < rank)
            bit *= 2

    yield from on_power_of_two(rank, size, exchange, lambda r: (0, count), lambda r: (0, count))


@algorithm("allreduce", cost=reduce.halving_cost)
def rabenseifner(rank, size, count):
    """Reduce-scatter by halving, allgather by doubling: 2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma.

    Two messages of n more where p is no power of two. Keeps rank order. Source: Rabenseifner 2004.
    """

    def halve_and_double(folded):
        path = halves(folded, count)
        for _, peer, keep, give in path:
            yield Send(peer, "x", *give), RecvReduce(peer, "x", *keep, operand_left=peer < rank)
        for _, peer, keep, give in reversed(path):
            yield Send(peer, "x", *keep), Recv(peer, "x", *give)

    yield from on_power_of_two(rank, size, halve_and_double, lambda r: (0, count), lambda r: (0, count))


def double_tree_cost(p, n, segment=SEGMENT):
    if p == 1:
        return Cost(0, 0)
    k, levels = how_many(-(-n // 2), segment), p.bit_length() - 1
    messages = 4 * levels - 2 * (p == 1 << levels) + (4 if p > 2 else 2) * (k - 1)
    return Cost(messages, messages * n / (2 * k), messages * n / (4 * k))


@algorithm("allreduce", cost=double_tree_cost, needs={COMMUTATIVE})
def double_tree(rank, size, count, segment=SEGMENT):
    """Two binary trees, each for half of x in k segments: 4 (lg p + k) messages of n/2k, half of them added.

    For many segments that is 4 k alpha + 2 n beta + n gamma. It is within a quarter of what the simulation finds, as
    the waves of the two trees delay each other at their ports.

    Segments climb a tree and are added, and go down again from its root while others climb; a rank inside one tree
    is a leaf of the other, so that both directions of every link are busy. The rounds count common time t: segment
    s goes up to a node of height h at t = s + h, and down to a node of depth d at t = s + d + the height of the root.
    Both ends of a message are in the same round, which is why nothing can wait in a circle. Source: Sanders, Speck and
    Traff 2009.
    """
    if size == 1:
        return
    trees, both = two_trees(size), segments(0, count, 2)
    k = how_many(both[0][1], segment)
    lanes = []  # this rank's part in both trees: what it does to whom, from which round on, with which segments
    for (lo, hi), tree in zip(both, trees, strict=True):
        cuts, parent, top = segments(lo, hi, k), tree.parent[rank], tree.height[tree.root]
        for child in tree.children[rank]:
            lanes.append((RecvReduce, child, tree.height[rank], cuts))
            lanes.append((Send, child, top + tree.depth[rank] + 1, cuts))
        if parent is not None:
            lanes.append((Send, parent, tree.height[parent], cuts))
            lanes.append((Recv, parent, top + tree.depth[rank], cuts))
    for t in range(k + 2 * max(tree.height[tree.root] for tree in trees) + 1):
        now = [(step, peer, cuts[t - first]) for step, peer, first, cuts in lanes if first <= t < first + k]
        yield tuple([step(peer, "x", lo, hi) for step, peer, (lo, hi) in now])


class Levels(NamedTuple):
    """A rank's role in an allreduce over several nodes of at least g ranks: x is cut into g chunks.

    Attributes
    ----------
    node : the ranks on its node
    chunks : (lo, hi) of the chunk of x that each of them carries between nodes; empty for those behind the first g
    peers : the ranks that carry the same chunk as this one, one on each node; empty where it carries none
    """

    node: list[int]
    chunks: tuple[tuple[int, int], ...]
    peers: list[int]


def levels(rank: int, count: int, nodes) -> Levels:
    """Return a rank's `Levels`, where `nodes` names the node of every rank."""
    members: dict[object, list[int]] = {}
    for r, node in enumerate(nodes):
        members.setdefault(node, []).append(r)
    mine, g = members[nodes[rank]], min(map(len, members.values()))
    chunks = tuple(chunk(count, g, i) if i < g else (count, count) for i in range(len(mine)))
    here = mine.index(rank)
    return Levels(mine, chunks, [group[here] for group in members.values()] if here < g else [])


@algorithm("allreduce", cost=segmented_cost, needs={COMMUTATIVE, NODES})  # of a rank on each node: segmented_ring
def two_level(rank, size, count, nodes=None, segment=SEGMENT):
    """Sum inside each node, then between nodes, then share: 2(M-1)/M n/g bytes of a rank cross the network.

    `nodes` names the node of every rank, in any order; M nodes of at least g ranks. x is cut into g chunks. The first g
    ranks of a node each gather one chunk from all of it, sum it with those of the other nodes in a segmented ring, and
    hand it to all of their node. With one rank on each node, or all on one, it is that ring or a direct exchange.

    Between nodes segments are short enough for the library to send at once. Before it sends a long message Open MPI
    asks the receiver, and two that exchange long ones fill their link in one direction after the other more often than
    not. Where the least is 351 ms (2 hosts x 2 ranks, 4 MiB, 100 Mbit/s) the plain ring took 386 to 701, median 664;
    segments take 379 to 534, median 421, in turn with it and on a busy machine.
    """
    node, chunks, peers = levels(rank, count, [0] * size if nodes is None else nodes)
    here = node.index(rank)
    others = [((here + k) % len(node), (here - k) % len(node)) for k in range(1, len(node))]
    for to, source in others:
        yield Send(node[to], "x", *chunks[to]), RecvReduce(node[source], "x", *chunks[here])
    if peers:
        lo, hi = chunks[here]
        yield from relabel_ranks(segmented_ring(peers.index(rank), len(peers), hi - lo, segment), peers, lo)
    for to, source in others:
        yield Send(node[to], "x", *chunks[here]), Recv(node[source], "x", *chunks[source])
