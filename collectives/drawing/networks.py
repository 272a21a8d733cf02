"""Pictures of networks: hosts, switches and ranks, what every channel carried, and how full it was when.

draw_network(network, 16)                      the graph, with ranks on its hosts
draw_network(network, 16, priced)              the same, channels as dark as they were busy
draw_channels(network, priced)                 load of the busiest channels over time; needs a trace
"""

import math

import numpy as np

from collectives.drawing import marks
from collectives.pricing.networks import Network
from collectives.pricing.price import Price
from collectives.pricing.topology import Topology, breadth_first

MOST_CHANNELS = 40  # rows of a picture of loads


def positions(topology: Topology) -> dict:
    """(x, y) of every vertex: tori and meshes as grids, hosts of other graphs in a row, or around a circle.

    Switches stand above their hosts, as many rows up as they are channels away from the nearest host.
    """
    hosts, dims = topology.hosts, topology.options.get("dims")
    if dims and len(dims) > 1:
        across = dims[-1]
        return {
            host: (i % across + 0.18 * (i // across % 2), 0.14 * (i % across % 2) - i // across)
            for i, host in enumerate(hosts)
        }
    neighbours: dict = {}
    for channel in topology.channels:
        neighbours.setdefault(channel.source, []).append(channel.target)
    switches = [vertex for vertex in neighbours if vertex not in topology.host_number]
    if not switches:
        turn = 2 * math.pi / len(hosts)
        radius = max(1.0, len(hosts) / 6)
        return {host: (radius * math.sin(i * turn), radius * math.cos(i * turn)) for i, host in enumerate(hosts)}
    places = {host: (float(i), 0.0) for i, host in enumerate(hosts)}
    distances = {switch: breadth_first(switch, neighbours) for switch in switches}
    levels = {
        switch: min(distance[host] for host in hosts if host in distance) for switch, distance in distances.items()
    }
    for level in sorted(set(levels.values())):
        row = []
        for switch in (switch for switch in switches if levels[switch] == level):
            below = [places[v][0] for v in neighbours[switch] if v in places and levels.get(v, 0) < level]
            row.append((sum(below) / len(below) if below else len(hosts) / 2, switch))
        row.sort(key=lambda place: place[0])
        for i, (_, switch) in enumerate(row):  # evenly, in the order of what is below
            places[switch] = ((i + 0.5) * len(hosts) / len(row) - 0.5, level * max(1.0, len(hosts) / 8))
    return places


def draw_network(network: Network, size: int | None = None, priced: Price | None = None, ax=None, *, title: str = ""):
    """The graph of a network with its ranks, channels as wide as they are fast.

    Parameters
    ----------
    network : Network
        With a topology.
    size : int, optional
        Ranks; by default one on each host.
    priced : Price, optional
        Colours each cable by the time in which its busier direction was in use.
    ax, title
        As for `draw`.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        The network has no topology.
    """
    topology = _topology_of(network)
    size = size or len(network.placement or topology.hosts)
    places = positions(topology)
    xs, ys = zip(*places.values(), strict=True)
    if ax is None:
        ax = marks.new_axes(
            min(11.0, max(4.0, 0.5 * (max(xs) - min(xs)) + 1)), min(6.0, max(2.0, 0.6 * (max(ys) - min(ys)) + 1)), 0.5
        )
    widest = max(channel.bandwidth for channel in topology.channels)
    busy = busy_shares(network, priced) if priced else [0.0] * len(topology.channels)
    for i, channel in enumerate(topology.channels):
        back = topology.number.get((channel.target, channel.source))
        if back is not None and back < i:
            continue
        share = max(busy[i], busy[back] if back is not None else 0.0)
        colour = marks.colour_at(share) if priced else marks.LINE
        (x0, y0), (x1, y1) = places[channel.source], places[channel.target]
        ax.plot([x0, x1], [y0, y1], color=colour, lw=0.8 + 2.4 * channel.bandwidth / widest, zorder=1)
    for vertex, (x, y) in places.items():
        if vertex not in topology.host_number:
            ax.plot([x], [y], "s", ms=9, color="white", mec=marks.GREY, zorder=2)
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(network.nodes_of(size)):
        ranks.setdefault(host, []).append(rank)
    for number, host in enumerate(topology.hosts):
        here = ranks.get(number, [])
        words = str(here[0]) if len(here) == 1 else f"{here[0]}…" if here else ""
        disc = dict(boxstyle="circle,pad=0.22", fc=marks.INK if here else "white", ec=marks.GREY)
        ax.text(*places[host], words or " ", color="white", fontsize=7, ha="center", va="center", bbox=disc, zorder=3)
    ax.axis("off")
    ax.margins(0.06)
    below = "violet to orange: idle to always busy" if priced else "wider: faster"
    marks.headline(ax, title or repr(topology), f"{marks.plural(size, 'rank')} · {below}", 8)
    return ax.figure


def busy_shares(network: Network, priced: Price) -> list[float]:
    """Of every channel the part of the time in which it would carry at full rate what it has carried."""
    widths = [channel.bandwidth for channel in _topology_of(network).channels]
    return [min(1.0, n / (width * priced.seconds)) for n, width in zip(priced.traffic, widths, strict=True)]


def draw_channels(network: Network, priced: Price, ax=None, *, title: str = "load of channels", columns: int = 240):
    """How full the busiest channels were, over time: a row each.

    Parameters
    ----------
    network : Network
    priced : Price
        Made with trace=True on this network.
    columns : int
        Parts of the time.

    Raises
    ------
    ValueError
        No topology, or a price without a trace.
    """
    topology = _topology_of(network)
    if priced.trace is None:
        raise ValueError("a price without a trace: ask for price(..., trace=True)")
    chosen = sorted(range(len(topology.channels)), key=lambda i: -priced.traffic[i])[:MOST_CHANNELS]
    row_of = {channel: row for row, channel in enumerate(sorted(i for i in chosen if priced.traffic[i]))}
    load = np.zeros((len(row_of), columns))
    edges = np.linspace(0, priced.seconds, columns + 1)
    width = edges[1] - edges[0]
    for share in priced.trace.shares:
        first, last = np.searchsorted(edges, (share.start, share.end), side="right") - 1
        span = np.arange(first, min(last, columns - 1) + 1)
        covered = np.minimum(edges[span + 1], share.end) - np.maximum(edges[span], share.start)
        for channel in share.channels:
            if channel in row_of:
                load[row_of[channel], span] += covered / width * share.rate / topology.channels[channel].bandwidth
    if ax is None:
        ax = marks.new_axes(8.0, max(1.2, 0.19 * len(row_of)), 0.6)
    unit, symbol = marks.unit_of(priced.seconds)
    extent = 0, priced.seconds / unit, len(row_of) - 0.5, -0.5
    ax.imshow(load, aspect="auto", extent=extent, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    marks.plain(ax)
    names = [f"{topology.channels[i].source} → {topology.channels[i].target}" for i in row_of]
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.set_xlabel(f"time, {symbol}; darker: fuller", color=marks.GREY, fontsize=9, loc="right")
    marks.headline(
        ax, title, f"{len(names)} of {len(topology.channels)} channels · {priced.seconds / unit:.3g} {symbol}", 8
    )
    return ax.figure


def _topology_of(network: Network) -> Topology:
    if network.topology is None:
        raise ValueError("the network has no topology to draw: take one such as Network.fat_tree(4)")
    return network.topology
