"""Cost of a collective on a group of mesh ranks, in closed form: the simulator's answer, for any number of ranks.

    Group(1024, 8).allreduce(100e6, NETWORKS["gpu-100g"])       # every 8th of 8192 ranks, all 8 such groups at once

A group has `count` members, `stride` ranks apart; the groups between them call the same collective at the same time.
With g ranks on a node, m = g // stride members of a group share a node, and k = min(stride, g) groups have members
there; the group spans M = count / m nodes. t(n) is the time of a message of n bytes inside a node. T(n, j) is the time
between nodes when j messages leave through one port at once: T(n) plus (j - 1) times the port's busy time, and at least
j gaps.

| collective | the fastest of |
|---|---|
| reduce-scatter, allgather | ring: (count - 1) hops of n / count, each max(k gaps, mean of (m - 1) t and one T) |
| | two levels: (m - 1) t(n/m) or halving inside, then (M - 1) T(n/(m M), m k) or the sum over i of T(n/(m 2^i), m k) |
| allreduce | both one after the other; or doubling: log2 m t(n) + log2 M T(n, m k) |
| in a node's memory | a barrier, and a copy of one chunk (reduce-scatter) or of all others (allgather) |
| alltoall | pairwise: for every distance s = 1 ... count - 1 T(n / count, k min(s, m, count - s)), or t inside a node |
| broadcast, reduce | binomial; or scatter and allgather, reduce-scatter and gather |
| scatter, gather | the root's port: count - 1 messages of n / count, one after the other |

Collectives that add take n (count - 1) / count gamma more. tests/parallel/test_group_costs.py compares each algorithm
with the simulator. On a topology all groups move their bytes at once and share its channels, which topology_costs.py
simulates. Sources: Thakur, Rabenseifner, Gropp 2005; Chan et al. 2007; two levels: Jia et al. 2018.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from collectives.pricing.networks import Link, Network
from parallel.planning.topology_costs import moving_seconds


class Group(NamedTuple):
    """Ranks of a mesh that communicate with each other, `stride` ranks apart.

    Attributes
    ----------
    count, stride : int
    memory : bool
        whether a group that lies on one node uses that node's shared memory
    """

    count: int
    stride: int = 1
    memory: bool = False

    def members(self, network: Network) -> int:
        """Return how many members of this group share a node."""
        return max(1, min(self.count, network.ranks_per_node // self.stride))

    def nodes(self, network: Network) -> int:
        return -(-self.count // self.members(network))

    def sharing(self, network: Network) -> int:
        """Return how many groups have members on one node."""
        return min(self.stride, network.ranks_per_node)

    def in_memory(self, network: Network) -> bool:
        """Return whether the whole group works in one node's memory."""
        return self.memory and self.nodes(network) == 1

    # ------------------------------------------------------------------------------------ seconds

    @lru_cache(1 << 16)  # noqa: B019  a group is a tuple of three numbers
    def scattering(self, nbytes: float, network: Network) -> float:
        """Return seconds of moving `nbytes` as an allgather, or as a reduce-scatter without its additions."""
        if self.count == 1 or not nbytes:
            return 0.0
        return min(seconds for _, seconds in self.ways(nbytes, network))

    def ways(self, nbytes: float, network: Network) -> Iterator[tuple[str, float]]:
        """Yield (algorithm, seconds) of every algorithm that `scattering` chooses from."""
        if network.topology and not self.in_memory(network):
            yield "simulated", self.simulated("allgather", nbytes, network)
            return
        m, nodes, k = self.members(network), self.nodes(network), self.sharing(network)
        if self.in_memory(network):
            yield "memory", network.barrier_seconds(m) + network.fetching(nbytes * (m - 1) / m)
            return
        near = message(network.inside, nbytes / self.count)
        if nodes == 1:
            yield "ring", (m - 1) * near
            yield "halving", halving(network.inside, nbytes, m, 1)
            return
        far = message(network.between, nbytes / self.count, k)
        port = k * network.between.cost(nbytes / self.count).gap
        yield "ring", (self.count - 1) * max(port, ((m - 1) * near + far) / m)
        inside = min((m - 1) * message(network.inside, nbytes / m), halving(network.inside, nbytes, m, 1))
        share = nbytes / m
        yield "two levels, ring", inside + (nodes - 1) * message(network.between, share / nodes, m * k)
        yield "two levels, halving", inside + halving(network.between, share, nodes, m * k)

    def doubling(self, nbytes: float, network: Network) -> float:
        """Return seconds of an allreduce by recursive doubling, additions included."""
        m, nodes, k = self.members(network), self.nodes(network), self.sharing(network)
        adding = network.reducing(nbytes)
        if network.topology:
            return self.simulated("allreduce", nbytes, network) + rounds(self.count) * adding
        inside = rounds(m) * (message(network.inside, nbytes) + adding)
        return inside + rounds(nodes) * (message(network.between, nbytes, m * k) + adding)

    def reduce_scatter(self, nbytes: float, network: Network) -> float:
        if (
            self.in_memory(network) and self.count > 1 and nbytes
        ):  # each rank reads its chunk of all arrays and adds it up
            part = network.copying(nbytes / self.count)
            return network.barrier_seconds(self.count) + part + self.adding(nbytes, network)
        return self.scattering(nbytes, network) + self.adding(nbytes, network)

    def adding(self, nbytes: float, network: Network) -> float:
        return network.reducing(nbytes / self.count) * (self.count - 1) if nbytes else 0.0

    def allgather(self, nbytes: float, network: Network) -> float:
        return self.scattering(nbytes, network)

    @lru_cache(1 << 16)  # noqa: B019
    def allreduce(self, nbytes: float, network: Network) -> float:
        if self.count == 1 or not nbytes:
            return 0.0
        both = self.reduce_scatter(nbytes, network) + self.allgather(nbytes, network)
        if self.in_memory(network):
            return both
        return min(both, self.doubling(nbytes, network))

    def alltoall(self, nbytes: float, network: Network) -> float:
        """Return seconds in which each rank sends every other one its chunk of `nbytes`, pair by pair, by messages."""
        if self.count == 1 or not nbytes:
            return 0.0
        if network.topology:
            return self.simulated("alltoall", nbytes, network)
        m, k, each = self.members(network), self.sharing(network), nbytes / self.count
        own = network.copying(each)
        if self.nodes(network) == 1:
            return own + (self.count - 1) * message(network.inside, each)
        near = sum(message(network.between, each, k * s) for s in range(1, m))  # the first distances, and the last
        return own + 2 * near + max(0, self.count - 2 * m + 1) * message(network.between, each, k * m)

    def broadcast(self, nbytes: float, network: Network) -> float:
        if self.count == 1 or not nbytes:
            return 0.0
        m, nodes, k = self.members(network), self.nodes(network), self.sharing(network)
        tree = log2(m) * message(network.inside, nbytes) + log2(nodes) * message(network.between, nbytes, k)
        if network.topology:
            tree = self.simulated("broadcast", nbytes, network)
        return min(tree, self.scatter(nbytes, network) + self.allgather(nbytes, network))

    def reduce(self, nbytes: float, network: Network) -> float:
        if self.count == 1 or not nbytes:
            return 0.0
        m, nodes, k = self.members(network), self.nodes(network), self.sharing(network)
        tree = log2(m) * message(network.inside, nbytes) + log2(nodes) * message(network.between, nbytes, k)
        if network.topology:
            tree = self.simulated("reduce", nbytes, network)
        tree += (log2(m) + log2(nodes)) * network.reducing(nbytes)
        return min(tree, self.reduce_scatter(nbytes, network) + self.gather(nbytes, network))

    def scatter(self, nbytes: float, network: Network) -> float:
        """Return seconds in which the root sends each rank its chunk of `nbytes`, through one port."""
        if self.count == 1 or not nbytes:
            return 0.0
        if network.topology:
            return self.simulated("scatter", nbytes, network)
        link = network.between if self.nodes(network) > 1 else network.inside
        return message(link, nbytes / self.count, (self.count - 1) * self.sharing(network))

    gather = scatter

    def simulated(self, operation: str, nbytes: float, network: Network) -> float:
        """Return seconds of `operation` on a topology while all such groups call it."""
        return moving_seconds(operation, self.count, self.stride, nbytes, network)

    # ------------------------------------------------------------------------------------ bytes that a rank sends

    def sent(self, nbytes: float) -> float:
        """Return bytes that a rank sends in a reduce-scatter or an allgather; an allreduce is both."""
        return nbytes * (self.count - 1) / self.count


def message(link: Link, nbytes: float, together: float = 1) -> float:
    """Return seconds until the last of `together` messages has arrived, when all leave through one port at once.

    The port was busy before, so `Link.credit`, which an idle port accumulates, is spent.
    """
    cost, together = link.cost(nbytes), max(1, together)
    return max(cost.seconds + (together - 1) * cost.held, together * cost.gap)


def halving(link: Link, nbytes: float, size: int, together: int) -> float:
    """Return seconds of recursive halving: exchanges of 1/2, 1/4 ...; one more where `size` is no power of two."""
    power = 1 << (size.bit_length() - 1)
    seconds = sum(message(link, nbytes / 2**i, together) for i in range(1, power.bit_length()))
    return seconds + (message(link, nbytes, together) if power != size else 0.0)


def rounds(size: int) -> int:
    """Return rounds of recursive doubling: two more where the size is no power of two."""
    return size.bit_length() - 1 + 2 * (size & (size - 1) != 0)


def log2(size: int) -> int:
    """Return rounds of a binomial tree over `size` ranks."""
    return math.ceil(math.log2(size)) if size > 1 else 0
