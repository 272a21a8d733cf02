"""Copies and reductions in the memory of a node: what they cost, and how the ranks of a node share its bandwidth."""

from collections.abc import Sequence

from collectives.pricing.networks import Network
from collectives.steps import SLOTS, Copy, Reduce


class NodeMemory:
    """The memory of every node.

    Parameters
    ----------
    network : Network
    hosts : sequence of int
        The node of each rank.
    itemsize : int
    simulated : int
        Ranks that are simulated.
    """

    def __init__(self, network: Network, hosts: Sequence[int], itemsize: int, simulated: int):
        self.network, self.hosts, self.itemsize = network, hosts, itemsize
        # What a rank that copies takes of the bandwidth, for all ranks of its node that it stands for.
        node = network.ranks_per_node
        self.share = network.memory_share * min(node, len(hosts)) / min(node, simulated)
        self.free = [0.0] * (max(hosts[:simulated]) + 1)  # of each node: when its memory is
        self.seconds: dict[tuple, float] = {}

    def cost(self, step: Copy | Reduce, rank: int) -> float:
        """Seconds of a copy or reduction, if the rank has the memory to itself."""
        others = step.of not in (None, rank) or step.to not in (None, rank)
        key = type(step), others, step.buf in SLOTS, step.hi - step.lo
        seconds = self.seconds.get(key)
        if seconds is None:
            seconds = self.seconds[key] = self._cost(*key)
        return seconds

    def _cost(self, kind: type, others: bool, slot: bool, elements: int) -> float:
        """What other ranks have written, and what they have read in a slot, their cores hold: it is fetched."""
        network, nbytes = self.network, elements * self.itemsize
        copying = network.copying(nbytes)
        moving = network.fetching(nbytes) if others else network.posting(nbytes) if slot else copying
        return moving if kind is Copy else network.reducing(nbytes) + max(0.0, moving - copying)

    def share_bandwidth(self, rank: int, start: float, seconds: float) -> float:
        """Return for how long the rank copies from `start` on, where others of its node may do so too."""
        node, free = self.hosts[rank], self.free
        free[node] = max(free[node], start) + self.share * seconds
        return max(seconds, free[node] - start)
