"""Networks as numbers: what a message costs inside a node and between nodes.

A message of n bytes takes alpha + n beta seconds (Hockney 1994). LogGP (Alexandrov, Ionescu, Schauser, Scheiman 1995)
says where they go: alpha = o + L + g + o, and beta = G. The processors of sender and receiver are busy for the overhead
o; the port of each is held for the gap g and n G, the receiver's a latency L later. A `Link` is alpha, beta, o and g.
Where g = alpha, a rank sends one message at a time: what the closed forms of the literature mean.

No real network is one straight line: MPI libraries change their protocol with the length of the message, and cables let
a short one through at once. A measured link therefore has `points` (measure.py), the same costs for many lengths, with
straight lines between them: parameterised LogP (Kielmann, Bal, Verstoep 2000).

A `Network` has two levels. Ranks of a node (rank // ranks_per_node) talk over `inside`, each through a port of its
own; all ranks of a node share one port in each direction for what leaves or enters the node, over `between`: for one
message after the other, or, where it was measured, as messages share channels (flows.py).

A network with a topology (topology.py) places its ranks on hosts: `Network.fat_tree(k=8, oversubscription=4)`, or
`find_network("fat-tree:k=8,oversubscription=4")`. Messages between hosts then share the channels of their routes.
"""

import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives.pricing import topology
from collectives.pricing.topology import BANDWIDTH, LATENCY, Route, Topology
from collectives.reading import read_json


class Point(NamedTuple):
    """What messages of one length cost, measured; seconds.

    Attributes
    ----------
    nbytes : int
        The length.
    time : float
        One way, from the call to send until the receiver has it, through ports that have rested.
    sending, receiving : float
        That the sender's processor is busy, and the receiver's once it turns to a message that has come meanwhile.
    gap : float
        From one message of a stream to the next.
    both : float
        As `time`, where every rank sends one to the next and gets one from the rank before it at once.
    exchange : float
        As `time`, where the receiver sends one to the sender at the same time.
    """

    nbytes: int
    time: float
    sending: float
    receiving: float
    gap: float
    both: float
    exchange: float


class MessageCost(NamedTuple):
    """What one message does to processors and ports; seconds.

    Attributes
    ----------
    sending, receiving : float
        The processors of sender and receiver are busy.
    latency : float
        From the sender's port to the receiver's.
    held : float
        Both ports are held.
    gap : float
        The share of the port in a stream: more than `held` where a port that rests saves up for later (`Link.credit`).
    crossing, exchange : float
        How much longer it takes for each second in which the receiver's port of the other direction is busy too: with a
        message to another rank, and to the sender.
    delivery : float
        From the receiver's port into its hands.
    waits : bool
        Whether the message leaves only when its receive is there.
    buffered : bool
        Whether the sender goes on once its processor has done its part; else it waits for the port.
    """

    sending: float
    receiving: float
    latency: float
    held: float
    gap: float
    crossing: float
    exchange: float
    delivery: float
    waits: bool
    buffered: bool

    @property
    def seconds(self) -> float:
        """From the call to send until the receiver, who waits for nothing else, has it."""
        return self.sending + self.latency + self.held + self.delivery


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
    points : sequence of Point
        Costs by length, shortest first, which then count instead of the four numbers; those remain as a summary.
    eager : int or None
        Longest message in bytes that is sent before its receive is there; None if all are.
    """

    alpha: float
    beta: float
    overhead: float = 0.0
    gap: float = 0.0
    points: tuple[Point, ...] = ()
    eager: int | None = None

    def __post_init__(self):
        if not all(math.isfinite(n) and n >= 0 for n in (self.alpha, self.beta, self.overhead, self.gap)):
            raise ValueError(f"{self}: alpha, beta, overhead and gap must be >= 0 and finite")
        if self.latency < -1e-12 * self.alpha:
            raise ValueError(f"{self}: 2 overhead + gap is part of alpha, and cannot be more")
        if self.eager is not None and not 0 <= self.eager < math.inf:
            raise ValueError(f"eager is a number of bytes >= 0 or None, not {self.eager}")
        object.__setattr__(self, "points", tuple(Point(*point) for point in self.points))
        lengths = [point.nbytes for point in self.points]
        if lengths != sorted(set(lengths)) or not all(
            math.isfinite(number) and number >= 0 for point in self.points for number in point
        ):
            raise ValueError(f"the points of a link must rise in length, and be >= 0: {self.points}")

    @property
    def latency(self) -> float:
        """L of LogGP: seconds from the sender's port to the receiver's."""
        return self.alpha - 2 * self.overhead - self.gap

    @property
    def credit(self) -> float:
        """Seconds of sending that a rested port has saved up: the depth of a token bucket, 0 without one.

        Read off messages that are not so long that it is less than what one measurement differs from the next.
        """
        costs = [self.cost(point.nbytes) for point in self.points]
        return max([cost.gap - cost.held for cost in costs if cost.gap - cost.held > cost.gap / 4], default=0.0)

    def cost(self, nbytes: float) -> MessageCost:
        """Return the cost of a message of `nbytes` bytes."""
        waits = self.eager is not None and nbytes > self.eager
        if not self.points:
            held = self.gap + nbytes * self.beta
            o = self.overhead
            return MessageCost(o, o, self.latency, held, held, 0.0, 0.0, o, waits, False)
        _, time, sending, receiving, gap, both, exchange = interpolate(self.points, nbytes)
        first = self.points[0]
        shortest = max(0.0, first.time - first.sending - first.gap)  # latency of a message without data
        sending = min(sending, time)
        held = max(0.0, min(gap, time - sending - shortest))
        receiving = min(receiving, gap, time - sending)
        # At worst one direction goes after the other; what a busy machine adds beyond that is none of the network's.
        crossing, exchange = (min(time, max(0.0, x - time)) / held if held else 0.0 for x in (both, exchange))
        latency = time - sending - held
        return MessageCost(sending, receiving, latency, held, gap, crossing, exchange, 0.0, waits, not waits)


def interpolate(points: Sequence[tuple[float, ...]], x: float) -> tuple[float, ...]:
    """The point at `x`, their first number: on the line between its neighbours, or on from the last two.

    Below the first point everything costs what it costs there. Above the last, costs do not fall.
    """
    if x <= points[0][0] or len(points) == 1:
        return (x, *points[0][1:])
    i = min(bisect_left(points, x, key=lambda point: point[0]), len(points) - 1)
    a, b = points[i - 1], points[i]
    share = (x - a[0]) / (b[0] - a[0])
    if share > 1:
        return (x, *(v + (share - 1) * max(0.0, v - u) for u, v in zip(a[1:], b[1:], strict=True)))
    return (x, *(u + share * (v - u) for u, v in zip(a[1:], b[1:], strict=True)))


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
    reductions, copies : sequence of (bytes, seconds)
        The same by length, shortest first, which then count instead of gamma and copy.
    memory : float
        Seconds a byte that the memory of a node takes, read and written, where all of its ranks copy at once; 0 if not
        known.
    barriers : sequence of (ranks, seconds)
        What it takes so many ranks of a node to wait for each other in shared memory, fewest first.
    fetches : sequence of (bytes, seconds)
        Copies from or to what another rank of the node has written, which its core may still hold; where nobody has
        measured them they cost what copies cost.
    posts : sequence of (bytes, seconds)
        Copies into a slot: over what other ranks of the node have read, so that their cores hold it too; likewise.
    topology : Topology or None
        Hosts and the channels between them. A message between hosts takes the overhead and gap of `between`; its
        latency and bandwidth are those of its route, and it shares the channels with others. On a measured link the
        route's latency comes on top, and a route narrower than `between` slows it.
    placement : tuple of int or None
        The host of every rank; by default rank r is on host r // ranks_per_node. See `place_ranks`.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 1
    gamma: float = 0.0
    copy: float = 0.0
    source: str = ""
    reductions: tuple[tuple[float, float], ...] = ()
    copies: tuple[tuple[float, float], ...] = ()
    memory: float = 0.0
    barriers: tuple[tuple[int, float], ...] = ()
    fetches: tuple[tuple[float, float], ...] = ()
    posts: tuple[tuple[float, float], ...] = ()
    topology: Topology | None = None
    placement: tuple[int, ...] | None = None

    def __post_init__(self):
        if not isinstance(self.ranks_per_node, (int, np.integer)) or self.ranks_per_node < 1:
            raise ValueError(f"{self}: ranks_per_node must be a whole number >= 1")
        if not all(math.isfinite(value) and value >= 0 for value in (self.gamma, self.copy, self.memory)):
            raise ValueError(f"{self}: gamma, copy and memory must be >= 0 and finite")
        if not isinstance(self.source, str):
            raise ValueError(f"source is a text, not {self.source}")
        for name in ("reductions", "copies", "barriers", "fetches", "posts"):
            points = tuple((x, seconds) for x, seconds in getattr(self, name))
            xs = [x for x, _ in points]
            if xs != sorted(set(xs)) or not all(
                math.isfinite(number) and number >= 0 for point in points for number in point
            ):
                raise ValueError(f"{name}: pairs that rise, of numbers >= 0, not {points}")
            object.__setattr__(self, name, points)
        if isinstance(self.topology, dict):
            object.__setattr__(self, "topology", Topology.from_dict(self.topology))
        if self.placement is not None:
            object.__setattr__(self, "placement", tuple(self.placement))
            hosts = len(self.topology.hosts) if self.topology else math.inf
            if wrong := [host for host in self.placement if isinstance(host, bool) or not 0 <= host < hosts]:
                raise ValueError(f"placement: there is no host {wrong[0]} among {hosts} hosts, 0 to {hosts - 1}")

    @classmethod
    def hockney(cls, alpha: float, beta: float, gamma: float = 0.0) -> "Network":
        """One level, and one message at a time in and out of a rank: the model of the closed forms."""
        link = Link(alpha, beta, gap=alpha)
        return cls(link, link, gamma=gamma)

    @classmethod
    def on(
        cls, topology: Topology, ranks_per_host: int = 1, overhead: float = 0.0, gap: float = 0.0, **fields
    ) -> "Network":
        """A network of the topology's hosts; `overhead` and `gap` are those of LogGP, `fields` others of Network.

        `between` becomes a summary: the longest latency from host 0, and the bandwidth of a host.
        """
        alpha = 2 * overhead + gap + topology.host_latency
        between = Link(alpha, 1 / min(topology.host_bandwidths), overhead, gap)
        inside = fields.pop("inside", Link(0.5e-6, 1 / 8e9, 0.2e-6))
        return cls(inside, between, ranks_per_host, topology=topology, **fields)

    @classmethod
    def star(cls, hosts: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY, **fields) -> "Network":
        """Hosts on one switch (topology.py); bytes a second and seconds of each cable."""
        return cls.on(topology.star(hosts, bandwidth, latency), **fields)

    @classmethod
    def nodes(
        cls, nodes: int, ranks: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY, **fields
    ) -> "Network":
        """Nodes of `ranks` hosts each: `bandwidth` is that of a node's one cable, ten times less than inside."""
        return cls.on(topology.nodes(nodes, ranks, bandwidth, latency, 10 * bandwidth), **fields)

    @classmethod
    def fat_tree(
        cls, k: int, oversubscription: float = 1, bandwidth: float = BANDWIDTH, latency: float = LATENCY, **fields
    ) -> "Network":
        """k^3/4 hosts on three levels of switches with k ports."""
        return cls.on(topology.fat_tree(k, oversubscription, bandwidth, latency), **fields)

    @classmethod
    def torus(cls, dims: Sequence[int], bandwidth: float = BANDWIDTH, latency: float = LATENCY, **fields) -> "Network":
        """A grid whose ends are joined."""
        return cls.on(topology.torus(dims, bandwidth, latency), **fields)

    @classmethod
    def mesh(cls, dims: Sequence[int], bandwidth: float = BANDWIDTH, latency: float = LATENCY, **fields) -> "Network":
        """A grid."""
        return cls.on(topology.mesh(dims, bandwidth, latency), **fields)

    @classmethod
    def hypercube(cls, d: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY, **fields) -> "Network":
        """2^d hosts."""
        return cls.on(topology.hypercube(d, bandwidth, latency), **fields)

    @classmethod
    def dragonfly(
        cls, p: int, a: int, h: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY, **fields
    ) -> "Network":
        """a h + 1 groups of a routers with p hosts each."""
        return cls.on(topology.dragonfly(p, a, h, bandwidth, latency), **fields)

    @classmethod
    def from_edges(cls, edges: Iterable[Sequence], hosts: Sequence | None = None, **fields) -> "Network":
        """Any graph of cables (vertex, vertex, bandwidth, latency)."""
        return cls.on(topology.from_edges(edges, hosts), **fields)

    def place_ranks(self, how: str | Sequence[int], seed: int = 0) -> "Network":
        """Return this network with its ranks placed on hosts by another rule.

        Parameters
        ----------
        how : "in order", "round robin", "random" or a sequence
            Fill one host after the other; deal the ranks out, one to each host in turn; shuffle the first; or the host
            of every rank.
        seed : int
            Of the shuffle.

        Raises
        ------
        ValueError
            The network has no topology, an unknown word, or a host that is not there.
        """
        if self.topology is None:
            raise ValueError("ranks are placed on the hosts of a topology, and this network has none")
        hosts = len(self.topology.hosts)
        orders = {
            "in order": [host for host in range(hosts) for _ in range(self.ranks_per_node)],
            "round robin": list(range(hosts)) * self.ranks_per_node,
        }
        if how == "random":
            placement = np.random.default_rng(seed).permutation(orders["in order"]).tolist()
        elif isinstance(how, str):
            if how not in orders:
                raise ValueError(f"place_ranks: in order, round robin, random or a list of hosts, not {how!r}")
            placement = orders[how]
        else:
            placement = [int(host) for host in how]
        return dataclasses.replace(self, placement=tuple(placement))

    def nodes_of(self, size: int) -> list[int]:
        """The node of each of `size` ranks: with a topology, the number of its host.

        Raises
        ------
        ValueError
            More ranks than there is place for.
        """
        if self.placement is not None:
            if size > len(self.placement):
                raise ValueError(f"{size} ranks, and the placement names the hosts of {len(self.placement)}")
            return list(self.placement[:size])
        if self.topology and size > len(self.topology.hosts) * self.ranks_per_node:
            raise ValueError(
                f"{size} ranks do not fit on {len(self.topology.hosts)} hosts with {self.ranks_per_node} each: take a "
                f"larger network, or more ranks a host (ranks_per_host={-(-size // len(self.topology.hosts))})"
            )
        return [rank // self.ranks_per_node for rank in range(size)]

    def of_ranks(self, size: int) -> "Network":
        """Return this network with `size` ranks, each on the node where it is placed."""
        return dataclasses.replace(self, placement=tuple(self.nodes_of(size)))

    def latency_of(self, size: int) -> float:
        """Seconds from the first of `size` ranks to the farthest, by the routes of the topology."""
        hosts = self.nodes_of(size)
        return max(self.topology.route(hosts[0], host).latency for host in hosts)

    def dims_of(self, size: int) -> tuple[int, ...] | None:
        """The sides of the topology, where it has some and `size` ranks fill it in order; else None."""
        dims = self.topology.dims if self.topology and self.placement is None and self.ranks_per_node == 1 else None
        return dims if dims and math.prod(dims) == size else None

    def cost_over(self, route: Route, nbytes: float) -> MessageCost:
        """Return the cost of a message of `nbytes` bytes that is alone on a route of the topology."""
        cost = self.between.cost(nbytes)
        if self.between.points:
            slower = max(1.0, 1 / (route.bandwidth * self.between.beta)) if self.between.beta else 1.0
            # What the hosts' token buckets let through at once does not cross a narrower channel any faster.
            least = nbytes / route.bandwidth if slower > 1 else 0.0
            held, gap = max(cost.held * slower, least), max(cost.gap * slower, least)
            # The other direction delays a message at the hosts, for as many seconds whatever lies between them.
            at_hosts = cost.held / held if held else 0.0
            crossing, exchange = cost.crossing * at_hosts, cost.exchange * at_hosts
            latency = cost.latency + route.latency
            return cost._replace(latency=latency, held=held, gap=gap, crossing=crossing, exchange=exchange)
        held = self.between.gap + nbytes * (1 / route.bandwidth)
        return cost._replace(latency=route.latency, held=held, gap=held)

    def reducing(self, nbytes: float) -> float:
        """Seconds for a reduction with a result of `nbytes` bytes."""
        return interpolate(self.reductions, nbytes)[1] if self.reductions else nbytes * self.gamma

    def copying(self, nbytes: float) -> float:
        """Seconds for a copy of `nbytes` bytes."""
        return interpolate(self.copies, nbytes)[1] if self.copies else nbytes * max(self.copy, 2 * self.memory)

    def fetching(self, nbytes: float) -> float:
        """Seconds for a copy of `nbytes` bytes from or to another rank's memory."""
        return interpolate(self.fetches, nbytes)[1] if self.fetches else self.copying(nbytes)

    def posting(self, nbytes: float) -> float:
        """Seconds for a copy of so many bytes into a slot that others have read."""
        return interpolate(self.posts, nbytes)[1] if self.posts else self.copying(nbytes)

    def barrier_seconds(self, ranks: int) -> float:
        """Seconds from when the last of so many ranks of a node has come until all go on.

        Where nobody has measured it, as long as two messages without data: one to each rank, and one back.
        """
        if ranks < 2:
            return 0.0
        return interpolate(self.barriers, ranks)[1] if self.barriers else 2 * self.inside.alpha

    @property
    def memory_share(self) -> float:
        """Which part of a node's memory bandwidth one rank takes that copies long vectors; 0 where that is not known.

        A byte copied is read and written. What is short enough for the caches takes as much of a shorter time.
        """
        nbytes = self.copies[-1][0] if self.copies else 1.0
        seconds = self.copying(nbytes)
        return min(1.0, 2 * nbytes * self.memory / seconds) if seconds else 0.0

    def with_ranks_per_node(self, ranks_per_node: int) -> "Network":
        """Return this network with another number of ranks a node."""
        return dataclasses.replace(self, ranks_per_node=ranks_per_node)

    def save(self, file: str | Path) -> None:
        """Write as JSON: {"inside": {"alpha", "beta", "overhead", "gap", "points", "eager"}, "between", "gamma"...}."""
        fields = dataclasses.asdict(dataclasses.replace(self, topology=None))
        if self.topology:
            fields["topology"] = self.topology.as_dict()
        Path(file).write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def of(cls, fields: dict) -> "Network":
        """From plain dictionaries, as dataclasses.asdict makes them."""
        links = {level: Link(**fields[level]) for level in ("inside", "between")}
        return cls(**fields | links)

    @classmethod
    def load(cls, file: str | Path) -> "Network":
        """Read what `save` wrote; what a file does not say of lengths, memory and barriers is left out.

        Raises
        ------
        ValueError
            The file is not JSON, or a field is missing, unknown or out of range; the message names the file.
        """
        try:
            return cls.of(read_json(file))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
            raise ValueError(f"{file}: not a network description ({type(error).__name__}: {error})") from error


# Rounds for time: a message takes one unit whatever its length, and so do a round that sends without receiving, a
# barrier, a round that reads or writes memory of other ranks, and each Compute. All ranks share one node.
ROUNDS = Network(Link(1.0, 0.0), Link(1.0, 0.0), ranks_per_node=1 << 20)


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


def find_network(text: str) -> Network:
    """The network that a text means: a name in NETWORKS, a topology such as "torus:dims=4x4", or a JSON file.

    A file holds what `Network.save` wrote, or a topology alone (`topology.load_topology`).

    Raises
    ------
    ValueError
        Unknown; the message lists the names.
    """
    if text in NETWORKS:
        return NETWORKS[text]
    if text.partition(":")[0] in topology.TOPOLOGIES:
        return Network.on(topology.named_topology(text))
    if text.endswith(".json"):
        try:
            fields = read_json(text)
        except (ValueError, RecursionError, OSError) as error:
            raise ValueError(f"{text}: not a network description ({type(error).__name__}: {error})") from error
        bare = isinstance(fields, dict) and "inside" not in fields
        return Network.on(topology.load_topology(text)) if bare else Network.load(text)
    raise ValueError(
        f"no network named {text!r}: give a name ({', '.join(NETWORKS)}), a topology "
        f"({', '.join(topology.EXAMPLES.values())}) or a file that ends in .json"
    )
