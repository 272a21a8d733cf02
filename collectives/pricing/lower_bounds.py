"""Lower bounds: seconds below which no algorithm of a collective can finish on a network."""

import math

from collectives.pricing.networks import Network

# Factor of n beta that some unit must at least send or receive, n being the whole vector (Chan, Heimlich, Purkayastha,
# van de Geijn 2007, table 1). Units are ranks, or nodes; `others` is the share of the ranks outside of one unit.
_TRAFFIC = {
    "broadcast": lambda units, others: 1.0,
    "reduce": lambda units, others: 1.0,
    "scatter": lambda units, others: others,
    "gather": lambda units, others: others,
    "allgather": lambda units, others: others,
    "reduce_scatter": lambda units, others: others,
    "alltoall": lambda units, others: others,
    "allreduce": lambda units, others: 2 * (units - 1) / units,
    "scan": lambda units, others: 1.0,
    "exscan": lambda units, others: 1.0,
    "barrier": lambda units, others: 0.0,
}


def lower_bound(op: str, p: int, n: float, network: Network) -> float:
    """Seconds below which no algorithm can finish where a rank has one message out and one in at a time.

    One level: max(ceil(log2 p) alpha, traffic(p) n beta). Two levels: the same over the nodes, each of which
    has one port, and no fewer messages in all; what stays inside the nodes is taken as free.

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
    if op not in _TRAFFIC:
        raise ValueError(f"no lower bound for {op!r}: known are {', '.join(_TRAFFIC)}")
    if p == 1:
        return 0.0
    g = min(network.ranks_per_node, p)
    nodes = -(-p // g)
    hops = lambda k: math.ceil(math.log2(k))
    if nodes == 1 or g == 1:
        link = network.inside if nodes == 1 else network.between
        return max(hops(p) * link.alpha, _TRAFFIC[op](p, (p - 1) / p) * n * link.beta)
    volume = _TRAFFIC[op](nodes, (p - g) / p) * n
    if op == "alltoall":  # n is what one rank sends; all ranks of a node send through one port
        volume *= g
    # The g ranks of a node can tell as many nodes at once: after each message 1 + g times as many nodes know.
    across = math.ceil(round(math.log(nodes, 1 + g), 9))
    fastest = min(network.inside.alpha, network.between.alpha)
    latency = max(hops(p) * fastest, across * network.between.alpha)
    return max(latency, volume * network.between.beta)
