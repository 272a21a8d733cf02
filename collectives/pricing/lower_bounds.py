"""Lower bounds: seconds below which no algorithm of a collective can finish on a network."""

import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from collectives.algorithms.registry import COLLECTIVES
from collectives.pricing.networks import Network, find_network
from collectives.pricing.topology import Topology

CUT = ("allgather", "reduce_scatter", "allreduce")  # bounded by cuts of a topology


def lower_bound(op: str, p: int, n: float, network: Network) -> float:
    """Seconds below which no algorithm can finish where a rank has one message out and one in at a time.

    One level: max(ceil(log2 p) alpha, traffic(p) n beta). Two levels: the same over the nodes, each of which
    has one port, and no fewer messages in all; what stays inside the nodes is taken as free. On a topology: the cuts of
    `bandwidth_bound`, what the fastest host can send, and the way from the first rank to the farthest one.

    Parameters
    ----------
    op : str
        A name in ALGORITHMS: "allreduce", "broadcast", "reduce_scatter" ...
    p : int
        Ranks.
    n : float
        Bytes of the whole vector.
    network : Network

    Raises
    ------
    ValueError
        The operation is not known.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"no lower bound for {op!r}: known are {', '.join(COLLECTIVES)}")
    traffic = COLLECTIVES[op].traffic
    if p == 1:
        return 0.0
    if network.topology:
        fastest = max(network.topology.host_bandwidths)
        per_byte = traffic(p, (p - 1) / p) / fastest
        if op in CUT and len(network.nodes_of(p)) == len(set(network.nodes_of(p))):
            per_byte = max(per_byte, bandwidth_bound(network, op, p))
        return max(network.between.overhead * 2 + network.latency_of(p), per_byte * n)
    g = min(network.ranks_per_node, p)
    nodes = -(-p // g)
    hops = lambda k: math.ceil(math.log2(k))
    if nodes == 1 or g == 1:
        link = network.inside if nodes == 1 else network.between
        return max(hops(p) * link.alpha, traffic(p, (p - 1) / p) * n * link.beta)
    volume = traffic(nodes, (p - g) / p) * n
    if op == "alltoall":  # n is what one rank sends; all ranks of a node send through one port
        volume *= g
    # The g ranks of a node can tell as many nodes at once: after each message 1 + g times as many nodes know.
    across = math.ceil(round(math.log(nodes, 1 + g), 9))
    fastest = min(network.inside.alpha, network.between.alpha)
    latency = max(hops(p) * fastest, across * network.between.alpha)
    return max(latency, volume * network.between.beta)


def bandwidth_bound(network: Network | str, operation: str = "allreduce", size: int | None = None) -> float:
    """Seconds a byte of the whole vector below which no schedule can stay, whatever its latencies.

    For any set of vertices without all ranks: what must leave it, over the bandwidth of the channels that do. An
    allgather's and a reduce-scatter's worst cut is found by maximum flows. In an allreduce n bytes must leave every set
    that has some of the ranks, and k groups of ranks together send at least 2 (k-1) n, as one-way gossip among k needs
    2 (k-1) messages (Harary and Schwenk 1974): groups are grown along the widest channels, and the worst number counts.

    Raises
    ------
    ValueError
        No topology, or another operation.
    """
    network = find_network(network) if isinstance(network, str) else network
    if network.topology is None:
        raise ValueError("bandwidth_bound needs a network with a topology")
    if operation not in CUT:
        raise ValueError(f"bandwidth_bound: operation {operation!r}; there are {', '.join(CUT)}")
    topology = network.topology
    hosts = network.nodes_of(size or len(network.placement or topology.hosts))
    size = len(hosts)
    if size == 1:
        return 0.0
    if operation == "allgather":
        return allgather_bound(topology, hosts)
    if operation == "reduce_scatter":
        return allgather_bound(topology, hosts, reverse=True)
    capacities = _capacities(topology)
    ranks = [topology.hosts[host] for host in hosts]
    narrowest = min(
        float(maximum_flow(capacities, *pair)) for rank in ranks[1:] for pair in ((ranks[0], rank), (rank, ranks[0]))
    )
    return max(1 / narrowest, _worst_groups(topology, ranks), _worst_parts(topology, ranks))


def _worst_parts(topology, ranks) -> float:
    """The most of 2 (k - 1) over the bandwidth out of k parts with ranks."""
    return max((2 * (len(parts) - 1) / leaving for parts, leaving in parts_of(topology, ranks)), default=0.0)


def parts_of(topology: Topology, ranks: Sequence[Hashable]) -> Iterator[tuple[list[list[int]], float]]:
    """Yield the parts into which a network falls without its narrow channels, and the bandwidth out of all of them.

    Parts are lists of indices into `ranks`, which are vertices: a fat tree with oversubscription falls into its edge
    switches and their hosts. Once for every bandwidth of channels, the widest first, while there is more than one part.
    """
    part_of: dict = {}

    def find(vertex):
        while part_of.setdefault(vertex, vertex) != vertex:
            vertex = part_of[vertex]
        return vertex

    for width in sorted({channel.bandwidth for channel in topology.channels}, reverse=True):
        for channel in topology.channels:
            if channel.bandwidth == width:
                part_of[find(channel.source)] = find(channel.target)
        parts: dict = {}
        for i, rank in enumerate(ranks):
            parts.setdefault(find(rank), []).append(i)
        if len(parts) == 1:
            break
        ends = ((find(channel.source), find(channel.target), channel.bandwidth) for channel in topology.channels)
        leaving = sum(bandwidth for source, target, bandwidth in ends if source in parts and source != target)
        yield list(parts.values()), leaving


def _worst_groups(topology, ranks) -> float:
    """The most of 2 (k - 1) over the bandwidth out of k groups of ranks; the first are the ranks themselves."""
    group = {rank: i for i, rank in enumerate(ranks)}
    worst = 0.0
    while (number := len(set(group.values()))) > 1:
        leaving, between = 0.0, {}
        for source, target, bandwidth, _ in topology.channels:
            if source in group and group.get(target) != group[source]:
                leaving += bandwidth
                if target in group:
                    pair = tuple(sorted((group[source], group[target])))
                    between[pair] = between.get(pair, 0.0) + bandwidth
        worst = max(worst, 2 * (number - 1) / leaving)
        if not between:
            break
        one, other = max(between, key=between.get)
        group = {rank: one if i == other else i for rank, i in group.items()}
    return worst


def allgather_bound(topology: Topology, hosts, reverse: bool = False) -> float:
    """Seconds a byte of all blocks together: max over sets of |ranks in it| / (p bandwidth out of it).

    A rate of x bytes a second from every rank to all is possible (Edmonds 1973; Zhao et al. 2023) if and only if a
    source of x to each rank has a flow of p x to every rank: the largest x is found by bisection.
    """
    capacities = _capacities(topology, reverse)
    ranks = [topology.hosts[host] for host in hosts]
    size = len(ranks)
    high = min(sum(row.get(rank, 0) for row in capacities.values()) for rank in ranks) / (size - 1)
    source = object()

    def possible(rate):
        wide = capacities | {source: {rank: rate for rank in ranks}}
        return all(maximum_flow(wide, source, rank, size * rate) >= size * rate * (1 - 1e-9) for rank in ranks)

    if possible(high):
        return 1 / (high * size)
    low = 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return 1 / (high * size)


def _capacities(topology, reverse=False):
    capacities: dict = {}
    for source, target, bandwidth, _ in topology.channels:
        row = capacities.setdefault(target if reverse else source, {})
        row[source if reverse else target] = bandwidth
    return capacities


def maximum_flow(capacities: dict, source, sink, enough: float = math.inf) -> float:
    """The most that flows from source to sink, or `enough` (Dinic 1970)."""
    left = {vertex: dict(row) for vertex, row in capacities.items()}
    for vertex, row in capacities.items():
        for other in row:
            left.setdefault(other, {}).setdefault(vertex, 0)
    scale = max(float(width) for row in capacities.values() for width in row.values())
    total = 0.0
    while total < enough:
        level, queue = {source: 0}, deque([source])
        while queue and sink not in level:
            vertex = queue.popleft()
            for other, width in left[vertex].items():
                if width > 1e-12 * scale and other not in level:
                    level[other] = level[vertex] + 1
                    queue.append(other)
        if sink not in level:
            return total
        unused = {vertex: list(left[vertex]) for vertex in level}
        path = [source]
        while path:  # depth first, along levels
            vertex = path[-1]
            if vertex == sink:
                pushed = min(float(left[a][b]) for a, b in itertools.pairwise(path))
                for a, b in itertools.pairwise(path):
                    left[a][b] -= pushed
                    left[b][a] += pushed
                total += pushed
                if total >= enough:
                    return total
                path = [source]
            elif unused[vertex]:
                other = unused[vertex][-1]
                if left[vertex][other] > 1e-12 * scale and level.get(other) == level[vertex] + 1:
                    path.append(other)
                else:
                    unused[vertex].pop()
            else:
                path.pop()
                if path:
                    unused[path[-1]].pop()
    return total
