"""What attention costs ranks that share sequences: a ring of them, or alltoalls of heads (Ulysses), for one layer.

n bytes of keys and values of all positions of a rank's samples, c ranks, A seconds of scores and sums on one process:

| | forward | backward |
|---|---|---|
| ring | (c - 1) max(0, hop(n / c) - A / c^2) | sum over steps of max(0, h hop(n / c) - 2.5 A / c^2), and two hops |
| Ulysses | 4 alltoalls of n / 2c bytes | the same |

A hop is hidden behind the scores of the keys that a rank has meanwhile; in zigzag order all steps take alike long
(strategies/context). Backward five products are computed in place of two, and h is 2 where both keys and the gradients
behind them travel: the last gradients come home when nothing is left to compute. An alltoall is c - 1 messages, of
n / 2c^2 bytes each, and nothing is computed meanwhile. Both times are added to what the layers compute. Sources: Liu et
al. 2023, Jacobs et al. 2023.
"""

from __future__ import annotations

from typing import NamedTuple

from collectives.pricing.networks import Network
from parallel.planning.group_costs import Group, message

BACKWARD = 2.5  # products of a block of scores, backward for each forward: five for two


class Exposed(NamedTuple):
    """Seconds that ranks wait in a layer's attention, forward and backward, and bytes that each sends."""

    forward: float
    backward: float
    sent: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def ring(nbytes: float, attention: float, group: Group, network: Network) -> Exposed:
    """Return what keys and values that travel around a ring cost.

    Parameters
    ----------
    nbytes : float
        Of the keys and values of all positions.
    attention : float
        Seconds in which one process computes the layer's scores and sums, forward.
    group : Group
        The ranks of the axis "context".
    """
    c = group.count
    if c == 1:
        return Exposed(0.0, 0.0, 0.0)
    hop, step = slowest(nbytes / c, group, network), attention / c**2
    forward = (c - 1) * max(0.0, hop - step)
    hops = [(number < c - 1) + (number >= 3) for number in range(c + 2)]  # in each round of `ring_backward`
    backward = sum(max(0.0, count * hop - BACKWARD * step * (number < c)) for number, count in enumerate(hops))
    return Exposed(forward, backward, 3 * (c - 1) * nbytes / c)


def ulysses(nbytes: float, group: Group, network: Network) -> Exposed:
    """Return what the alltoalls of queries, keys, values and results cost: four each way."""
    c = group.count
    if c == 1:
        return Exposed(0.0, 0.0, 0.0)
    part = nbytes / 2 / c  # of the queries of one rank
    near = group.members(network)
    far = message(network.between, part / c, near * group.sharing(network))  # all of a node leave through its port
    one = (near - 1) * message(network.inside, part / c) + (c - near) * far
    return Exposed(4 * one, 4 * one, 8 * part * (c - 1) / c)


def slowest(nbytes: float, group: Group, network: Network) -> float:
    """Return seconds of a hop of a ring whose members all send at once: that between nodes, where there is one."""
    if group.nodes(network) > 1:
        return message(network.between, nbytes, group.sharing(network))
    return message(network.inside, nbytes)


def attention_ways(nbytes: float, attention: float, heads: int, group: Group, network: Network) -> dict[str, Exposed]:
    """Return what each way costs that can be: Ulysses where the ranks divide the heads."""
    found = {"ring": ring(nbytes, attention, group, network)}
    if heads and heads % group.count == 0:
        found["ulysses"] = ulysses(nbytes, group, network)
    return found
