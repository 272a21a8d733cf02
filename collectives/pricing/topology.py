"""Topologies: hosts, switches, and the channels between them that messages share.

    fat_tree(k=4, oversubscription=2).route(0, 15)     # the channels from host 0 to host 15
    named_topology("torus:dims=4x4,bandwidth=1.25e9")

A topology is a directed graph. A *channel* is one direction of a cable (the word of Dally and Towles 2004): bandwidth
in bytes a second, latency in seconds. Every pair of hosts has one route. Networks of the literature are routed as it
routes them; any other graph by shortest paths.

| topology | hosts | cables between switches | route |
|---|---|---|---|
| star(p) | p | | through the one switch |
| nodes(n, ranks) | n ranks | n | out of the node, the central switch, into the node |
| backbone(p) | p | one channel that all share | over the backbone |
| fat_tree(k) | k^3 / 4 | k^3 / 2 | D-mod-k: the switch above is chosen by the destination |
| torus(dims), mesh(dims) | product of dims | none: hosts are joined to neighbours | first dimension first |
| hypercube(d) | 2^d | none | lowest bit first |
| dragonfly(p, a, h) | p a (a h + 1) | all pairs in a group, one between two groups | local, global, local |
| from_edges(edges) | as given | as given | fewest channels |

Sources: Al-Fares, Loukissas and Vahdat 2008 (fat tree); Zahavi 2012 (D-mod-k); Kim, Dally, Scott and Abts 2008
(dragonfly, with the absolute arrangement of its global cables).
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from inspect import signature
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from collectives.reading import read_json

BANDWIDTH = 12.5e9  # bytes a second: 100 Gbit/s
LATENCY = 500e-9  # seconds of one cable
MOST_HOSTS, MOST_CABLES = 1 << 17, 1 << 20  # of a topology by name: a short text must not take all memory


class Channel(NamedTuple):
    """One direction of a cable, from vertex `source` to vertex `target`: bytes a second, seconds."""

    source: Hashable
    target: Hashable
    bandwidth: float
    latency: float


class Route(NamedTuple):
    """The channels from one host to another.

    Attributes
    ----------
    channels : tuple of int
        Their numbers in `Topology.channels`, in order.
    bandwidth : float
        Bytes a second of the narrowest.
    latency : float
        Seconds of all together.
    """

    channels: tuple[int, ...]
    bandwidth: float
    latency: float


class Topology:
    """Hosts, switches, channels and routes.

    Parameters
    ----------
    hosts : sequence of vertices
        Host i is where ranks are placed; every other vertex is a switch.
    channels : iterable of Channel
    path : callable (host number, host number) -> list of vertices, optional
        The route; by default a shortest path, and of several the one that the number of the destination chooses.
    kind, options : str, dict
        What makes it again: `named_topology` and files have these. A graph of edges has none.

    Raises
    ------
    ValueError
        No hosts, a channel without bandwidth or with a negative latency, two channels for one direction, or hosts that
        cannot reach each other.
    """

    def __init__(
        self,
        hosts: Sequence[Hashable],
        channels: Iterable[Channel],
        path: Callable[[int, int], list] | None = None,
        kind: str = "",
        options: dict | None = None,
    ):
        self.hosts, self.channels = tuple(hosts), tuple(Channel(*channel) for channel in channels)
        self.kind, self.options = kind, dict(options or {})
        self._path = path or self._shortest_path
        self.number = {(channel.source, channel.target): i for i, channel in enumerate(self.channels)}
        self.host_number = {host: i for i, host in enumerate(self.hosts)}
        self._next: dict[Hashable, list] = {}
        self.distances: dict[int, dict[Hashable, int]] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        self._hash = hash((self.kind, len(self.hosts), self.channels))
        self._refuse_what_is_no_network()
        for channel in self.channels:
            self._next.setdefault(channel.source, []).append(channel.target)
        self._refuse_unreachable_hosts()

    def _refuse_what_is_no_network(self) -> None:
        if not self.hosts:
            raise ValueError("a topology needs at least one host")
        if len(self.host_number) < len(self.hosts):
            raise ValueError("a host is named twice: every host has a name of its own")
        if len(self.number) < len(self.channels):
            directions = [(channel.source, channel.target) for channel in self.channels]
            twice = next(pair for pair in directions if directions.count(pair) > 1)
            raise ValueError(f"two channels from {twice[0]} to {twice[1]}: give one with the bandwidth of both")
        for channel in self.channels:
            between = f"the channel from {channel.source} to {channel.target}"
            if not 0 < channel.bandwidth < math.inf:
                raise ValueError(f"{between} has bandwidth {channel.bandwidth}: it must be > 0 bytes a second, finite")
            if not 0 <= channel.latency < math.inf:
                raise ValueError(f"{between} has latency {channel.latency}: it must be >= 0 seconds, finite")

    def _refuse_unreachable_hosts(self) -> None:
        before: dict[Hashable, list] = {}
        for channel in self.channels:
            before.setdefault(channel.target, []).append(channel.source)
        first = self.hosts[0]
        for neighbours, words in (
            (self._next, "{1} cannot be reached from {0}"),
            (before, "{0} cannot be reached from {1}"),
        ):
            reached = breadth_first(first, neighbours)
            if lost := [host for host in self.hosts if host not in reached]:
                raise ValueError(
                    f"the network is not connected: host {words.format(first, lost[0])} ({len(lost)} of "
                    f"{len(self.hosts)} hosts): add edges, or give only the hosts of one part"
                )

    def route(self, source: int, dest: int) -> Route:
        """The channels from host `source` to host `dest`, by their numbers; none where they are the same."""
        known = self._routes.get((source, dest))
        if known is None:
            numbers = self.channels_between(source, dest)
            bandwidth = min((self.channels[i].bandwidth for i in numbers), default=math.inf)
            latency = math.fsum(self.channels[i].latency for i in numbers)
            known = self._routes[source, dest] = Route(numbers, bandwidth, latency)
        return known

    def channels_between(self, source: int, dest: int) -> tuple[int, ...]:
        """The channels of `route`, which are not remembered."""
        return tuple(self.number[pair] for pair in pairwise(self._path(source, dest))) if source != dest else ()

    def _shortest_path(self, source: int, dest: int) -> list:
        """The fewest channels; where several ways are as short, the destination's number takes its turn among them."""
        if dest not in self.distances:
            before: dict[Hashable, list] = {}
            for channel in self.channels:
                before.setdefault(channel.target, []).append(channel.source)
            self.distances[dest] = breadth_first(self.hosts[dest], before)
        distance, vertices = self.distances[dest], [self.hosts[source]]
        while vertices[-1] != self.hosts[dest]:
            here = distance[vertices[-1]]
            nearer = [vertex for vertex in self._next[vertices[-1]] if distance.get(vertex, math.inf) == here - 1]
            vertices.append(nearer[dest % len(nearer)])
        return vertices

    @property
    def host_bandwidths(self) -> list[float]:
        """Bytes a second that can leave each host."""
        leaving = dict.fromkeys(self.hosts, 0.0)
        for channel in self.channels:
            if channel.source in leaving:
                leaving[channel.source] += channel.bandwidth
        return list(leaving.values())

    @property
    def host_latency(self) -> float:
        """Seconds of the longest route from host 0."""
        return max(self.route(0, host).latency for host in range(len(self.hosts)))

    @property
    def dims(self) -> tuple[int, ...] | None:
        """Sides of a torus, mesh or hypercube; (nodes, ranks) of nodes; None for any other topology."""
        if self.kind == "hypercube":
            return (2,) * self.options["d"]
        if self.kind == "nodes":
            return self.options["nodes"], self.options["ranks"]
        return self.options.get("dims")

    def __eq__(self, other):
        return self is other or (isinstance(other, Topology) and self.as_dict() == other.as_dict())

    def __hash__(self):
        return self._hash

    def __repr__(self):
        options = ",".join(f"{name}={_written(value)}" for name, value in self.options.items())
        return f"{self.kind}:{options}" if self.kind else f"{len(self.hosts)} hosts, {len(self.channels)} channels"

    def as_dict(self) -> dict:
        """What JSON can hold: kind and options, or hosts and channels."""
        if self.kind:
            return {
                "kind": self.kind,
                "options": {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()},
            }
        return {"hosts": list(self.hosts), "channels": [list(channel) for channel in self.channels]}

    @classmethod
    def from_dict(cls, fields: dict) -> "Topology":
        """The topology of `as_dict`, or of {"edges": [[vertex, vertex, bandwidth, latency], ...], "hosts": [...]}.

        Raises
        ------
        ValueError
            An unknown kind or option, or what the constructors refuse.
        """
        if "kind" in fields:
            return _build(fields["kind"], fields.get("options", {}))
        if "edges" in fields:
            return from_edges(fields["edges"], fields.get("hosts"), fields.get("directed", False))
        if "channels" in fields and "hosts" in fields:
            return cls(fields["hosts"], fields["channels"])
        raise ValueError('a topology in JSON has "kind" and "options", "edges", or "hosts" and "channels"')


def breadth_first(start: Hashable, neighbours: dict) -> dict[Hashable, int]:
    """How many channels every vertex is away."""
    distance, queue = {start: 0}, deque([start])
    while queue:
        vertex = queue.popleft()
        for other in neighbours.get(vertex, ()):
            if other not in distance:
                distance[other] = distance[vertex] + 1
                queue.append(other)
    return distance


def cable(one: Hashable, other: Hashable, bandwidth: float, latency: float) -> tuple[Channel, Channel]:
    """A channel in each direction."""
    return Channel(one, other, bandwidth, latency), Channel(other, one, bandwidth, latency)


# ------------------------------------------------------------------------------------------- topologies by name


def star(hosts: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """`hosts` hosts, each with a cable to the one switch."""
    whole(hosts=hosts)
    refuse_huge(hosts, hosts)
    channels = [channel for i in range(hosts) for channel in cable(f"h{i}", "switch", bandwidth, latency)]
    path = lambda source, dest: [f"h{source}", "switch", f"h{dest}"]
    options = {"hosts": hosts, "bandwidth": bandwidth, "latency": latency}
    return Topology([f"h{i}" for i in range(hosts)], channels, path, "star", options)


def nodes(
    nodes: int,
    ranks: int,
    bandwidth: float = BANDWIDTH,
    latency: float = LATENCY,
    inside_bandwidth: float = 10 * BANDWIDTH,
    inside_latency: float = 100e-9,
) -> Topology:
    """`nodes` nodes of `ranks` hosts: a fast switch in each node, one cable from it to the central switch.

    `bandwidth` is that of a node's cable, `inside_bandwidth` that of each rank to its node's switch.
    """
    whole(nodes=nodes, ranks=ranks)
    refuse_huge(nodes * ranks, nodes * (ranks + 1))
    hosts = [f"h{i}" for i in range(nodes * ranks)]
    channels = [
        channel
        for i, host in enumerate(hosts)
        for channel in cable(host, f"node{i // ranks}", inside_bandwidth, inside_latency)
    ]
    if nodes > 1:
        channels += [c for node in range(nodes) for c in cable(f"node{node}", "switch", bandwidth, latency)]

    def path(source, dest):
        there, back = source // ranks, dest // ranks
        switches = [f"node{there}"] if there == back else [f"node{there}", "switch", f"node{back}"]
        return [hosts[source], *switches, hosts[dest]]

    options = {"nodes": nodes, "ranks": ranks, "bandwidth": bandwidth, "latency": latency}
    options |= {"inside_bandwidth": inside_bandwidth, "inside_latency": inside_latency}
    return Topology(hosts, channels, path, "nodes", options)


def backbone(hosts: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY, shared: float = BANDWIDTH) -> Topology:
    """`hosts` hosts of which every message crosses one channel of `shared` bytes a second, whatever its direction."""
    whole(hosts=hosts)
    refuse_huge(hosts, hosts)
    names = [f"h{i}" for i in range(hosts)]
    channels = [Channel(name, "into backbone", bandwidth, latency) for name in names]
    channels += [Channel("into backbone", "out of backbone", shared, 0.0)]
    channels += [Channel("out of backbone", name, bandwidth, latency) for name in names]
    path = lambda source, dest: [names[source], "into backbone", "out of backbone", names[dest]]
    options = {"hosts": hosts, "bandwidth": bandwidth, "latency": latency, "shared": shared}
    return Topology(names, channels, path, "backbone", options)


def fat_tree(k: int, oversubscription: float = 1, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """Switches with k ports on three levels: k pods of k/2 edge and k/2 aggregation switches, (k/2)^2 core switches.

    Every edge switch has k/2 hosts: k^3/4 in all. With `oversubscription` r the cables above the edge switches have
    1/r of the bandwidth of a host's, so that r times as much can come from below as goes on.
    """
    whole(k=k)
    if k % 2:
        raise ValueError(f"a fat tree has switches with an even number of ports, not k={k}")
    if not oversubscription > 0:
        raise ValueError(f"oversubscription={oversubscription}: it must be > 0, 1 for none, 4 for 4:1")
    refuse_huge(k**3 // 4, 3 * k**3 // 4)
    half, above = k // 2, bandwidth / oversubscription
    hosts = [f"h{i}" for i in range(half * half * k)]
    edge = lambda host: f"edge{host // half}"  # numbered through all pods, as are the aggregation switches
    channels = [channel for i, host in enumerate(hosts) for channel in cable(host, edge(i), bandwidth, latency)]
    for pod, a, b in product(range(k), range(half), range(half)):
        channels += cable(f"edge{pod * half + a}", f"aggregation{pod * half + b}", above, latency)
        channels += cable(f"aggregation{pod * half + a}", f"core{a * half + b}", above, latency)

    def path(source, dest):
        there, back = [hosts[source], edge(source)], [edge(dest), hosts[dest]]
        pods = source // half**2, dest // half**2
        column, row = dest % half, dest // half % half  # D-mod-k
        if there[-1] == back[0]:
            return [*there, hosts[dest]]
        there.append(f"aggregation{pods[0] * half + column}")
        if pods[0] != pods[1]:
            there += [f"core{column * half + row}", f"aggregation{pods[1] * half + column}"]
        return there + back

    options = {"k": k, "oversubscription": oversubscription, "bandwidth": bandwidth, "latency": latency}
    return Topology(hosts, channels, path, "fat-tree", options)


def torus(dims: Sequence[int], bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """A grid of hosts whose ends are joined: host numbers go through the last dimension first, as NumPy counts.

    A side of 2 has one cable. A message goes through the first dimension, then the second, and so on, the shorter way
    round; where both are as short, upwards from even coordinates and downwards from odd ones.
    """
    return _grid("torus", dims, True, bandwidth, latency)


def mesh(dims: Sequence[int], bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """A grid of hosts, each joined to its neighbours; a message goes through the first dimension first."""
    return _grid("mesh", dims, False, bandwidth, latency)


def _grid(kind, dims, wraps, bandwidth, latency):
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    for side in dims:
        whole(dims=side)
    refuse_huge(math.prod(dims), math.prod(dims) * len(dims))
    places = list(product(*map(range, dims)))
    number = {place: i for i, place in enumerate(places)}

    def moved(place, axis, by):
        return (*place[:axis], (place[axis] + by) % dims[axis], *place[axis + 1 :])

    channels = []
    for i, place in enumerate(places):
        for axis, side in enumerate(dims):
            if place[axis] + 1 < side or (wraps and side > 2):
                channels += cable(f"h{i}", f"h{number[moved(place, axis, 1)]}", bandwidth, latency)

    def path(source, dest):
        place, goal = places[source], places[dest]
        vertices = [f"h{source}"]
        for axis, side in enumerate(dims):
            up = (goal[axis] - place[axis]) % side
            down = side - up
            by = 1 if goal[axis] > place[axis] else -1
            if wraps and side > 2:
                by = 1 if up < down or (up == down and place[axis] % 2 == 0) else -1
            while place[axis] != goal[axis]:
                place = moved(place, axis, by)
                vertices.append(f"h{number[place]}")
        return vertices

    options = {"dims": dims, "bandwidth": bandwidth, "latency": latency}
    return Topology([f"h{i}" for i in range(len(places))], channels, path, kind, options)


def hypercube(d: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """2^d hosts, each joined to those whose number differs in one bit; a message corrects the lowest bit first."""
    whole(d=d + 1)
    refuse_huge(1 << min(d, 64), d << min(d, 64))

    def path(source, dest):
        vertices = [f"h{source}"]
        for bit in range(d):
            if (source ^ dest) >> bit & 1:
                source ^= 1 << bit
                vertices.append(f"h{source}")
        return vertices

    pairs = [(i, i | 1 << bit) for i in range(1 << d) for bit in range(d) if not i >> bit & 1]
    channels = [channel for i, j in pairs for channel in cable(f"h{i}", f"h{j}", bandwidth, latency)]
    options = {"d": d, "bandwidth": bandwidth, "latency": latency}
    return Topology([f"h{i}" for i in range(1 << d)], channels, path, "hypercube", options)


def dragonfly(
    p: int,
    a: int,
    h: int,
    bandwidth: float = BANDWIDTH,
    latency: float = LATENCY,
    global_bandwidth: float | None = None,
    global_latency: float | None = None,
) -> Topology:
    """a h + 1 groups of `a` routers with `p` hosts each; each router has `h` cables to other groups.

    Routers of a group are all joined; so are any two groups, by one cable: port q of group G, on its router q // h,
    leads to group q, or q + 1 where q >= G. A message goes to the router that has the cable, over it, and on.
    """
    whole(p=p, a=a, h=h)
    groups = a * h + 1
    refuse_huge(p * a * groups, groups * (p * a + a * a // 2 + groups // 2))
    router = lambda group, number: f"r{group}.{number}"
    owner = lambda group, other: router(group, (other if other < group else other - 1) // h)
    hosts = [f"h{i}" for i in range(p * a * groups)]
    router_of = lambda host: router(host // (p * a), host // p % a)
    channels = [channel for i, host in enumerate(hosts) for channel in cable(host, router_of(i), bandwidth, latency)]
    wide = bandwidth if global_bandwidth is None else global_bandwidth
    far = latency if global_latency is None else global_latency
    for group in range(groups):
        for i, j in product(range(a), repeat=2):
            if i < j:
                channels += cable(router(group, i), router(group, j), bandwidth, latency)
        for other in range(group):
            channels += cable(owner(group, other), owner(other, group), wide, far)

    def path(source, dest):
        groups = source // (p * a), dest // (p * a)
        vertices = [hosts[source], router_of(source)]
        if groups[0] != groups[1]:
            vertices += [owner(*groups), owner(*reversed(groups))]
        vertices += [router_of(dest), hosts[dest]]
        return [vertex for i, vertex in enumerate(vertices) if not i or vertex != vertices[i - 1]]

    options = {"p": p, "a": a, "h": h, "bandwidth": bandwidth, "latency": latency}
    options |= {"global_bandwidth": wide, "global_latency": far}
    return Topology(hosts, channels, path, "dragonfly", options)


def from_edges(edges: Iterable[Sequence], hosts: Sequence[Hashable] | None = None, directed: bool = False) -> Topology:
    """Any graph: edges (vertex, vertex), (vertex, vertex, bandwidth) or (vertex, vertex, bandwidth, latency).

    Parameters
    ----------
    edges : iterable of tuples
        Each is a cable, or one channel of the given direction where `directed`.
    hosts : sequence of vertices, optional
        In the order of their numbers; by default all vertices, sorted.
    """
    channels = []
    for edge in edges:
        if not 2 <= len(edge) <= 4:
            raise ValueError(f"an edge is (vertex, vertex, bandwidth, latency), the last two optional, not {edge!r}")
        one, other, bandwidth, latency = (*edge, *(BANDWIDTH, LATENCY)[len(edge) - 2 :])
        channels += [Channel(one, other, bandwidth, latency)] if directed else cable(one, other, bandwidth, latency)
    if hosts is None:
        hosts = sorted({channel.source for channel in channels} | {channel.target for channel in channels})
    return Topology(hosts, channels)


TOPOLOGIES = {
    "star": star,
    "nodes": nodes,
    "backbone": backbone,
    "fat-tree": fat_tree,
    "torus": torus,
    "mesh": mesh,
    "hypercube": hypercube,
    "dragonfly": dragonfly,
}


def whole(**numbers: int) -> None:
    """Refuse what is not a whole number of at least 1."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number >= 1, not {number!r}")


def refuse_huge(hosts: int, cables: int) -> None:
    """Refuse a topology that would take minutes and gigabytes to make."""
    if hosts > MOST_HOSTS or cables > MOST_CABLES:
        raise ValueError(
            f"a topology has at most {MOST_HOSTS:,} hosts and {MOST_CABLES:,} cables, this one would have "
            f"{hosts:.4g} and {cables:.4g}: make it smaller"
        )


def named_topology(text: str) -> Topology:
    """The topology of a name such as "fat-tree:k=8,oversubscription=4", "torus:dims=4x4" or "star:8".

    Options follow the colon, by name or in the order of the constructor.

    Raises
    ------
    ValueError
        An unknown topology or option, a missing one, or a value that is no number.
    """
    kind, _, rest = text.partition(":")
    constructor = _constructor(kind)
    names, options = list(signature(constructor).parameters), {}
    for i, given in enumerate(filter(None, rest.split(","))):
        name, equals, value = given.rpartition("=")
        if not equals and i >= len(names):
            raise ValueError(f"{text!r}: {kind} takes at most {len(names)} options: {', '.join(names)}")
        options[name if equals else names[i]] = _read(value, text)
    return _build(kind, options)


def _constructor(kind):
    if kind not in TOPOLOGIES:
        raise ValueError(f"no topology {kind!r}: there are {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[kind]


def _build(kind, options):
    constructor = _constructor(kind)
    known = signature(constructor).parameters
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{kind} has no option {unknown[0]!r}: there are {', '.join(known)}")
    if missing := [name for name, option in known.items() if option.default is option.empty and name not in options]:
        raise ValueError(f"{kind} needs {missing[0]}: for example {EXAMPLES[kind]}")
    return constructor(**options)


EXAMPLES = {
    "star": "star:hosts=8",
    "nodes": "nodes:nodes=4,ranks=8",
    "backbone": "backbone:hosts=8",
    "fat-tree": "fat-tree:k=8,oversubscription=4",
    "torus": "torus:dims=4x4",
    "mesh": "mesh:dims=3x3",
    "hypercube": "hypercube:d=3",
    "dragonfly": "dragonfly:p=2,a=4,h=2",
}


def _read(value, text):
    try:
        if "x" in value:
            return tuple(map(int, value.split("x")))
        return float(value) if set(value) & set(".en") else int(value)
    except ValueError as error:
        raise ValueError(f"{text!r}: {value!r} is no number, nor sides such as 4x4") from error


def _written(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def load_topology(file: str | Path) -> Topology:
    """Read a topology from JSON (`Topology.from_dict`).

    Raises
    ------
    ValueError
        The file is not JSON or no topology; the message names the file.
    """
    try:
        return Topology.from_dict(read_json(file))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(f"{file}: not a topology ({type(error).__name__}: {error})") from error
