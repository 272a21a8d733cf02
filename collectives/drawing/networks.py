"""Pictures of networks: hosts, switches and ranks, what every channel carried, and how full it was when.

draw_network(network, 16)                      the graph, with ranks on its hosts
draw_network(network, 16, priced)              the same, channels as dark as they were busy
draw_channels(network, priced)                 load of the busiest channels over time; needs a trace
draw_critical_path(network, priced)            the messages for which the last rank waited, on their channels; likewise
draw_trees(network, schedule)                  the trees along which the pieces of a synthesized schedule travel
animate_flows("flows.gif", network, priced)    a film: how full every channel is; needs a trace
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from collectives.drawing import marks
from collectives.drawing.film import DPI, save_film
from collectives.pricing.critical_path import critical_path, waits
from collectives.pricing.networks import Network
from collectives.pricing.price import Price
from collectives.pricing.topology import Topology, breadth_first
from collectives.synthesis import Schedule

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
    """Draw the graph of a network with its ranks, channels as wide as they are fast.

    Parameters
    ----------
    network : Network
        With a topology.
    size : int, optional
        Ranks; by default one on each host.
    priced : Price, optional
        Colours each link by the time in which its busier direction was in use.
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
    ax = ax or _axes_for(places)
    busy = busy_shares(network, priced) if priced else None
    for line, i, back in _draw_cables(ax, topology, places):
        if busy:
            line.set_color(marks.colour_at(max(busy[i], busy[back] if back is not None else 0.0)))
    _draw_vertices(ax, network, size, places)
    below = "violet to orange: idle to always busy" if priced else "wider: faster"
    marks.headline(ax, title or repr(topology), f"{marks.plural(size, 'rank')} · {below}", 8)
    return ax.figure


def _axes_for(places: dict, below: float = 0.5, scale: float = 1.0):
    xs, ys = zip(*places.values(), strict=True)
    across, up = 0.5 * (max(xs) - min(xs)) + 1, 0.6 * (max(ys) - min(ys)) + 1
    return marks.new_axes(scale * min(11.0, max(4.0, across)), scale * min(6.0, max(2.0, up)), below)


def _draw_cables(ax, topology: Topology, places: dict) -> list[tuple]:
    """Draw a line for each link, as wide as it is fast: (line, its channel, the channel back or None)."""
    widest, lines = max(channel.bandwidth for channel in topology.channels), []
    for i, channel in enumerate(topology.channels):
        back = topology.number.get((channel.target, channel.source))
        if back is not None and back < i:
            continue
        (x0, y0), (x1, y1) = places[channel.source], places[channel.target]
        width = 0.8 + 2.4 * channel.bandwidth / widest
        lines.append((ax.plot([x0, x1], [y0, y1], color=marks.LINE, lw=width, zorder=1)[0], i, back))
    return lines


def _draw_vertices(ax, network: Network, size: int, places: dict) -> None:
    topology = network.topology
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


def _arrow(ax, topology: Topology, places: dict, channel: int, colour, width: float = 2.2):
    """Draw an arrow along a channel, beside the middle of its link, so that both directions can be seen."""
    one, other = places[topology.channels[channel].source], places[topology.channels[channel].target]
    look = dict(arrowstyle="-|>", color=colour, lw=width, shrinkA=6, shrinkB=6, connectionstyle="arc3,rad=0.14")
    return ax.annotate("", other, one, arrowprops=look, zorder=4)


def busy_shares(network: Network, priced: Price) -> list[float]:
    """Return the share of the time in which each channel, at its full rate, would carry what it has carried."""
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


def draw_critical_path(network: Network, priced: Price, ax=None, *, title: str = "critical path"):
    """Draw the messages for which the last rank waited, on their channels: the first is violet, the last orange.

    Parameters
    ----------
    network : Network
    priced : Price
        Made with trace=True on this network.
    ax, title
        As for `draw`.

    Raises
    ------
    ValueError
        No topology, or a price without a trace.
    """
    topology, path = _topology_of(network), critical_path(priced)
    places, size = positions(topology), len(priced.finish)
    ax = ax or _axes_for(places)
    _draw_cables(ax, topology, places)
    hosts = network.nodes_of(size)
    for stretch in path:
        if stretch.kind == "message":
            colour = marks.colour_at(stretch.end / priced.seconds)
            for channel in topology.route(hosts[stretch.flight.source], hosts[stretch.flight.dest]).channels:
                _arrow(ax, topology, places, channel, colour)
    _draw_vertices(ax, network, size, places)
    marks.headline(ax, title, f"{marks.plural(size, 'rank')} · violet to orange: first to last · {waits(priced)}", 8)
    return ax.figure


def draw_trees(network: Network, schedule: Schedule, pieces: Sequence[int] = (0, 1, 2, 3), *, title: str = ""):
    """The trees along which pieces of the vector travel in a schedule that was found by search: a graph for each.

    Parameters
    ----------
    network : Network
        For which it was found.
    schedule : collectives.synthesis.Schedule
    pieces : sequence of int
        Those that are drawn.

    Raises
    ------
    ValueError
        No topology, or no such piece.
    """
    topology, trees = _topology_of(network), schedule.trees()
    if wrong := [piece for piece in pieces if not 0 <= piece < len(trees)]:
        raise ValueError(f"there is no piece {wrong[0]} among the {len(trees)} of this schedule")
    places, hosts = positions(topology), network.nodes_of(schedule.size)
    xs, ys = zip(*places.values(), strict=True)
    width, height = (min(4.0, max(2.2, 0.4 * (max(v) - min(v)) + 0.8)) for v in (xs, ys))
    figure = marks.new_figure(marks.LEFT + len(pieces) * (width + 0.3), marks.TOP + height + 0.3)
    wide, high = figure.get_size_inches()
    share = f" · {100 * schedule.share_of_bound:.0f}% of the bound" if schedule.bound else ""
    subtitle = f"pieces {', '.join(map(str, pieces))} of {len(trees)} · violet to orange: first to last step{share}"
    head = marks.add_axes(figure, len(pieces) * (width + 0.3), height, 0.25)
    head.axis("off")
    marks.headline(head, title or schedule.__name__, subtitle, 8)
    for column, piece in enumerate(pieces):
        left = (0.5 + column * (width + 0.3)) / wide
        ax = figure.add_axes((left, 0.25 / high, width / wide, height / high))
        _draw_cables(ax, topology, places)
        steps = [step for _, _, step in trees[piece]]
        first, last = min(steps, default=0), max(steps, default=0)
        for source, dest, step in trees[piece]:
            colour = marks.colour_at((step - first) / max(1, last - first))
            for channel in topology.route(hosts[source], hosts[dest]).channels:
                _arrow(ax, topology, places, channel, colour)
        _draw_vertices(ax, network, schedule.size, places)
    return figure


def animate_flows(
    file: str | Path, network: Network, priced: Price, *, frames: int = 60, fps: int = 15, title: str = "flows"
) -> Path:
    """A film of the network: a channel that carries messages is as orange as it is full.

    Parameters
    ----------
    file : str or Path
        Ends in .gif or .html.
    network : Network
    priced : Price
        Made with trace=True on this network.
    frames, fps : int

    Raises
    ------
    ValueError
        Another ending of the file name, no topology, or a price without a trace.
    """
    topology = _topology_of(network)
    if priced.trace is None:
        raise ValueError("a price without a trace: ask for price(..., trace=True)")
    places, size = positions(topology), len(priced.finish)
    ax = _axes_for(places)
    ax.figure.set_dpi(DPI)
    _draw_cables(ax, topology, places)
    _draw_vertices(ax, network, size, places)
    unit, symbol = marks.unit_of(priced.seconds)
    marks.headline(ax, title, f"{marks.plural(size, 'rank')} · {priced.seconds / unit:.3g} {symbol} · orange: full", 8)
    clock = ax.annotate("", (1, 0), (0, -6), ha="right", color=marks.GREY, fontsize=9, **marks.points_off())
    used = sorted({channel for share in priced.trace.shares for channel in share.channels})
    arrows = {channel: _arrow(ax, topology, places, channel, marks.LINE) for channel in used}
    times = np.linspace(0, priced.seconds, frames)
    load = np.zeros((len(topology.channels), frames))
    for share in priced.trace.shares:
        first, last = np.searchsorted(times, (share.start, share.end))
        for channel in share.channels:
            load[channel, first:last] += share.rate / topology.channels[channel].bandwidth

    def pictures():
        from PIL import Image

        for frame, time in enumerate(times):
            for channel, arrow in arrows.items():
                full = min(1.0, load[channel, frame])
                arrow.arrow_patch.set(visible=full > 0, color=marks.colour_at(full))
            clock.set_text(f"{time / unit:.3g} {symbol}")
            ax.figure.canvas.draw()
            yield Image.fromarray(np.array(ax.figure.canvas.buffer_rgba())[..., :3])

    return save_film(file, pictures(), fps, title)


def _topology_of(network: Network) -> Topology:
    if network.topology is None:
        raise ValueError("the network has no topology to draw: take one such as Network.fat_tree(4)")
    return network.topology
