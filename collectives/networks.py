"""Networks as numbers: what a message costs inside a node and between nodes.

A message of n bytes takes alpha + n beta seconds (Hockney 1994). LogGP (Alexandrov, Ionescu, Schauser, Scheiman 1995)
says where they go: alpha = o + L + g + o, and beta = G. The processors of sender and receiver are busy for the overhead
o; the port of each is held for the gap g and n G, the receiver's a latency L later. A `Link` is alpha, beta, o and g.
Where g = alpha, a rank sends one message at a time: what the closed forms of the literature mean.

A `Network` has two levels. Ranks of a node (rank // ranks_per_node) talk over `inside`, each through a port of its
own; all ranks of a node share one port in each direction for what leaves or enters the node, over `between`.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Link:
    """What one message costs between two ranks.

    Parameters
    ----------
    alpha : float
        Seconds for a message without data, from the call to send until the receiver has it.
    beta : float
        Seconds a byte: the reciprocal of the bandwidth of one direction.
    overhead : float
        Seconds of alpha that each of the two processors is busy with the message.
    gap : float
        Seconds of alpha that the ports are held: how soon the next message may follow. 2 overhead + gap <= alpha.
    """

    alpha: float
    beta: float
    overhead: float = 0.0
    gap: float = 0.0

    def __post_init__(self):
        if not min(self.alpha, self.beta, self.overhead, self.gap) >= 0:
            raise ValueError(f"{self}: alpha, beta, overhead and gap must be >= 0")
        if self.latency < -1e-12 * self.alpha:
            raise ValueError(f"{self}: 2 overhead + gap is part of alpha, and cannot be more")

    @property
    def latency(self) -> float:
        """L of LogGP: seconds from the sender's port to the receiver's."""
        return self.alpha - 2 * self.overhead - self.gap


@dataclass(frozen=True)
class Network:
    """Two levels of links and what a rank does with bytes.

    Parameters
    ----------
    inside, between : Link
        Between two ranks of one node, and of two nodes.
    ranks_per_node : int
        Rank r lives on node r // ranks_per_node.
    gamma, copy : float
        Seconds a byte of a reduction (result written), and of a copy in memory.
    source : str
        Where the numbers come from.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 1
    gamma: float = 0.0
    copy: float = 0.0
    source: str = ""

    def __post_init__(self):
        if self.ranks_per_node < 1 or self.gamma < 0 or self.copy < 0:
            raise ValueError(f"{self}: ranks_per_node must be >= 1, gamma and copy >= 0")

    @classmethod
    def hockney(cls, alpha: float, beta: float, gamma: float = 0.0) -> "Network":
        """One level, and one message at a time in and out of a rank: the model of the closed forms."""
        link = Link(alpha, beta, gap=alpha)
        return cls(link, link, gamma=gamma)

    def with_ranks_per_node(self, ranks_per_node: int) -> "Network":
        """The same links with another number of ranks a node."""
        return dataclasses.replace(self, ranks_per_node=ranks_per_node)

    def save(self, file: str | Path) -> None:
        """Write as JSON: {"inside": {"alpha", "beta", "overhead", "gap"}, "between": ..., "gamma", ...}."""
        Path(file).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> "Network":
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            The file is not JSON, or a field is missing, unknown or out of range; the message names the file.
        """
        try:
            fields = json.loads(Path(file).read_text())
            links = {level: Link(**fields.pop(level)) for level in ("inside", "between")}
            return cls(**links, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not a network description ({type(error).__name__}: {error})") from error


# Rounds for time: a message takes one unit whatever its length, and so does a round that sends without receiving.
ROUNDS = Network(Link(1.0, 0.0), Link(1.0, 0.0))


def fit(points: Iterable[tuple[float, float]], overhead: float = 0.0) -> Link:
    """The link that explains measured messages: least squares of the relative error of alpha + n beta.

    Relative, because a ping-pong spans six orders of magnitude: plain least squares would see the largest only.

    Parameters
    ----------
    points : pairs of (bytes, seconds)
        One-way times, half of a ping-pong; at least two different sizes.
    overhead : float
        Seconds a processor is busy per message, measured apart; cut to alpha / 2.

    Raises
    ------
    ValueError
        Fewer than two sizes, or a time that is not positive.
    """
    size, seconds = np.array(list(points), dtype=float).reshape(-1, 2).T
    if np.unique(size).size < 2 or not (seconds > 0).all():
        raise ValueError("a fit needs messages of at least two sizes, each with a positive time")
    design = np.stack([1 / seconds, size / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(design, np.ones_like(size), rcond=None)[0]
    if alpha < 0:  # noise at the small end: the best line through the origin
        alpha, beta = 0.0, (size / seconds).sum() / (size**2 / seconds**2).sum()
    if beta < 0:  # larger messages were not slower: the best constant
        alpha, beta = (1 / seconds).sum() / (1 / seconds**2).sum(), 0.0
    alpha, beta = float(alpha), float(beta)
    return Link(alpha, beta, min(overhead, alpha / 2))


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


def _gbit(rate: float, efficiency: float = 1.0) -> float:
    """Seconds a byte of a line of `rate` Gbit/s."""
    return 8e-9 / (rate * efficiency)


# Line rates are what the name says; latencies are typical published ones: replace them by your own measurement.
NETWORKS = {
    "workstation": Network(
        inside=Link(0.5e-6, 1 / 8e9, 0.2e-6),
        between=Link(0.5e-6, 1 / 8e9, 0.2e-6),
        ranks_per_node=1 << 20,
        gamma=1 / 15e9,
        copy=1 / 15e9,
        source="two ranks on one server CPU (Zen 3), Open MPI 5 through shared memory",
    ),
    "gigabit": Network(
        inside=Link(0.5e-6, 1 / 8e9, 0.2e-6),
        between=Link(30e-6, _gbit(1, 0.94), 5e-6),
        ranks_per_node=4,
        gamma=1 / 15e9,
        copy=1 / 15e9,
        source="1 Gbit/s Ethernet with TCP: 94% of the line rate is payload at MTU 1500; latency typical of TCP",
    ),
    "infiniband": Network(
        inside=Link(0.6e-6, 1 / 10e9, 0.2e-6),
        between=Link(1.2e-6, _gbit(100, 0.97), 0.3e-6),
        ranks_per_node=32,
        gamma=1 / 15e9,
        copy=1 / 15e9,
        source="CPU cluster, InfiniBand EDR 100 Gbit/s: about 1.2 us and 12.1 GB/s between hosts, typical of MPI",
    ),
    "gpu-25g": Network(
        inside=Link(12e-6, 1 / 10e9, 2e-6),
        between=Link(25e-6, _gbit(25, 0.94), 5e-6),
        ranks_per_node=4,
        gamma=1 / 300e9,
        copy=1 / 300e9,
        source="4 Pascal GPUs a node on PCIe 3.0 x16, RoCE 25 Gbit/s, as in Sergeev, Del Balso 2018 (Horovod)",
    ),
    "gpu-100g": Network(
        inside=Link(3.4e-6, 1 / 120e9, 1e-6),
        between=Link(14e-6, _gbit(100, 0.94), 2e-6),
        ranks_per_node=8,
        gamma=1 / 600e9,
        copy=1 / 600e9,
        source="8 NVLink GPUs a node sharing 100 Gbit/s; latencies of a ring step as in NCCL's tuning table",
    ),
}
