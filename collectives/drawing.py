"""Drawings: who sends what to whom and when, who has what, and what was measured.

    draw(allreduce.ring, 4, 4)                              space-time diagram: ranks across, rounds down
    draw(allreduce.ring, 8, 1 << 20, network="gpu-25g")     the same, with time as the clock prices it
    draw_buffers(allreduce.ring, 4, 4)                      what every rank's buffers hold after every round
    animate("ring.gif", allreduce.ring, 4, 4)               both, moving; a .gif or .html file
    draw_timeline(events)                                   what ranks really did, from a measured trace

An algorithm is any generator function of steps.py, or an entry of ALGORITHMS. The clock reads it, on a network where
every message takes one unit of time unless another is given. A colour is a place in the vector: a message has the
colour of the place where its elements stood at first, whatever scratch they have passed through since.

Each returns a Figure that belongs to no window: a notebook shows it, `figure.savefig(file)` writes it. Matplotlib is
imported when something is first drawn.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from collectives import drawing_marks as marks
from collectives.clock import Price, price, read
from collectives.drawing_timeline import draw_timeline
from collectives.networks import NETWORKS, ROUNDS, Network
from collectives.replay import Replay
from collectives.steps import Blocks
from collectives.walking import Flight

__all__ = ["animate", "draw", "draw_buffers", "draw_timeline"]


def draw(
    algorithm: Callable,
    size: int,
    count: Blocks,
    ax=None,
    *,
    network: Network | str | None = None,
    itemsize: int = 4,
    title: str | None = None,
    **options,
):
    """Space-time diagram of an algorithm: an arrow for every message. Readable up to 16 ranks.

    Parameters
    ----------
    algorithm : generator function or entry of ALGORITHMS
    size, count : int
        Ranks and elements of the vector (or a list of blocks).
    ax : matplotlib Axes, optional
        Where to draw; else a figure is made.
    network : Network or str, optional
        Draw time as priced on it; without it a message takes one unit and time is rounds.
    itemsize : int
        Bytes of an element, for the clock.
    title : str, optional
        In place of the algorithm's name.
    **options
        For the algorithm: root, segment and the like.

    Returns
    -------
    matplotlib Figure
    """
    priced, replay, network = _watch(algorithm, size, count, network, itemsize, options)
    if ax is None:
        ax = marks.new_axes(marks.width_of(size), marks.depth_of(priced, network))
    marks.time_space(ax, size, priced, network)
    marks.rank_heads(ax, range(size))
    marks.draw_messages(ax, priced, replay, network, itemsize)
    marks.headline(ax, title or read(algorithm)[0], _summary(priced, size, replay.total * itemsize, network))
    marks.legend(ax, priced, replay)
    return ax.figure


def draw_buffers(algorithm: Callable, size: int, count: Blocks, ax=None, *, title: str | None = None, **options):
    """What the buffers of every rank hold: ranks across, rounds down.

    Each square is one buffer: across it the vector, down it the ranks. A filled cell says that this rank's data is in
    this element; a column takes its full colour once it is as it will be at the end.

    Parameters
    ----------
    algorithm, size, count, ax, title, **options
        As for `draw`.

    Returns
    -------
    matplotlib Figure
    """
    priced, replay, network = _watch(algorithm, size, count, None, 1, options)
    names = _buffer_names(replay)
    times = np.unique([time for rank in replay.times for time in rank])
    pitch, down = marks.SQUARE * len(names) + 0.14, 1.2
    wide, deep = size * pitch - 0.14, len(times) * down
    if ax is None:
        side = 0.66 if size <= 8 else 0.5
        ax = marks.new_axes(max(wide * side, 3.2), deep * side)
    for row, time in enumerate(times):
        for rank in range(size):
            marks.draw_squares(ax, replay, names, rank, time, rank * pitch, row * down)
        ax.text(-0.2, row * down + 0.5, _when(times, row), ha="right", va="center", color=marks.GREY, fontsize=9)
    ax.set(xlim=(-0.05, wide), ylim=(deep - 0.1, -0.1), aspect="equal", anchor="NW")
    ax.axis("off")
    marks.rank_heads(
        ax, [rank * pitch + (marks.SQUARE * len(names) - 0.08) / 2 for rank in range(size)], 12 if names[1:] else 4
    )
    for rank in range(size) if names[1:] else ():
        marks.buffer_heads(ax, names, replay.states[rank][-1], rank * pitch + 0.5, marks.SQUARE)
    marks.headline(
        ax, title or read(algorithm)[0], _summary(priced, size, replay.total, network), 35 if names[1:] else 26
    )
    below = "Across a square: the vector. Down: a row for each rank\nwhose data is in it. Full colour: as it will stay."
    ax.annotate(below, (0, 0), (0, -8), va="top", color=marks.GREY, fontsize=8.5, linespacing=1.5, **marks.points_off())
    return ax.figure


def animate(
    file: str | Path,
    algorithm: Callable,
    size: int,
    count: Blocks,
    *,
    network: Network | str | None = None,
    itemsize: int = 4,
    frames_per_round: int = 12,
    fps: int = 15,
    title: str | None = None,
    **options,
) -> Path:
    """The algorithm as a film: messages travel down the space-time diagram while the buffers above them fill.

    Parameters
    ----------
    file : str or Path
        Ends in .gif (needs Pillow, which comes with matplotlib) or .html (a player, all in this one file).
    frames_per_round, fps : int
        Smoothness and speed.
    algorithm, size, count, network, itemsize, title, **options
        As for `draw`.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        Another ending of the file name.
    """
    file = Path(file)
    if file.suffix not in (".gif", ".html"):
        raise ValueError(f"{file}: the name must end in .gif or .html")
    from matplotlib.animation import FuncAnimation, HTMLWriter, PillowWriter

    priced, replay, network = _watch(algorithm, size, count, network, itemsize, options)
    names = _buffer_names(replay)
    wide, deep = marks.width_of(size), marks.depth_of(priced, network)
    side = min(0.86 / len(names), 0.8)  # of a square, in lanes
    high = wide / size * side
    figure = marks.new_figure(marks.LEFT + wide + marks.RIGHT, marks.TOP + high + 0.25 + deep + 0.2)
    below = marks.add_axes(figure, wide, deep, 0.2)
    above = marks.add_axes(figure, wide, high, 0.2 + deep + 0.25)
    above.set(xlim=(-0.5, size - 0.5), ylim=(1, 0))
    above.axis("off")
    lefts = [rank - side * (marks.SQUARE * len(names) - 0.08) / 2 for rank in range(size)]
    squares = [
        marks.draw_squares(above, replay, names, rank, 0.0, left, 0, side)
        for rank, left in zip(range(size), lefts, strict=True)
    ]
    above.set_aspect("auto")
    marks.rank_heads(above, range(size), 12 if names[1:] else 4)
    for rank, left in enumerate(lefts if names[1:] else ()):
        marks.buffer_heads(above, names, replay.states[rank][-1], left + side / 2, marks.SQUARE * side)
    marks.headline(above, title or read(algorithm)[0], _summary(priced, size, replay.total * itemsize, network))
    marks.time_space(below, size, priced, network)
    marks.draw_messages(below, priced, replay, network, itemsize, alpha=0.22)
    unit, _ = marks.unit_of(priced.seconds, network)
    flights = [
        (f, marks.ends_of(f, size, around), marks.colour_of(replay, n)) for n, f, around in marks.wrapping(priced, size)
    ]
    packets = below.scatter([], [], s=75, zorder=6, edgecolors="white", linewidths=1.2)
    cursor = below.axhline(0, color=marks.INK, lw=1, alpha=0.6, zorder=5)
    frames = max(1, priced.rounds) * frames_per_round
    times = np.concatenate([np.linspace(0, priced.seconds, frames + 1), np.full(fps, priced.seconds)])

    def show(time):
        cursor.set_ydata([time / unit] * 2)
        flying = [item for item in flights if item[0].start <= time < item[0].end]
        packets.set_offsets(np.reshape([_position(f, ends, time, size, unit) for f, ends, _ in flying], (-1, 2)))
        packets.set_facecolors([colour for *_, colour in flying])
        for rank, images in enumerate(squares):
            for name, image in images.items():
                image.set_data(marks.image_of(replay, name, rank, time))

    film = FuncAnimation(figure, show, frames=times, init_func=lambda: None)
    writer = PillowWriter(fps=fps) if file.suffix == ".gif" else HTMLWriter(fps=fps, embed_frames=True)
    film.save(file, writer, dpi=80)
    return file


# ---------------------------------------------------------------------------------------------- what is drawn


def _watch(algorithm, size, count, network, itemsize, options):
    """(price with its trace, replay, network) of one run."""
    if isinstance(network, str):
        network = NETWORKS.get(network, network)  # a name that is not there is the clock's to refuse
    network = ROUNDS if network is None else network
    priced = price(algorithm, size, count, itemsize, network, trace=True, **options)
    return priced, Replay(priced.trace, size, 1 if count is None else count), network


def _summary(priced: Price, size, total, network):
    rounds = int(priced.seconds) if network is ROUNDS else priced.rounds  # local moves alone are no round of a drawing
    words = [marks.plural(size, "rank"), marks.plural(rounds, "round")]
    if total:
        words.append(f"no rank sends more than {priced.busiest / total:.3g} n")
    if network is not ROUNDS:
        unit, symbol = marks.unit_of(priced.seconds)
        words.append(f"{priced.seconds / unit:.3g} {symbol}")
    return " · ".join(words)


def _position(flight: Flight, ends, time, size, unit):
    """Where a message is at a time."""
    done = (time - flight.start) / (flight.end - flight.start)
    return (ends[0] + done * (ends[1] - ends[0]) + 0.5) % size - 0.5, time / unit


def _buffer_names(replay: Replay) -> list[str]:
    """x, y, then scratch."""
    names = {name for rank in replay.states for name in rank[-1]}
    return sorted(names, key=lambda name: ("xy".find(name) % 3, name))


def _when(times, row):
    if row == 0:
        return "start"
    return f"round {row}" if (times == np.arange(len(times))).all() else f"t = {times[row]:g}"
