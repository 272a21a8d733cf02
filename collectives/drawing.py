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

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from collectives.clock import Flight, Price, price, read
from collectives.networks import NETWORKS, ROUNDS, Network
from collectives.replay import NOWHERE, Replay
from collectives.steps import Blocks, Copy, RecvReduce, Reduce

__all__ = ["animate", "draw", "draw_buffers", "draw_timeline"]

INK, GREY, LINE, EMPTY = "#1f2430", "#7b8494", "#d5d9e0", "#eef0f3"
WHOLE = "#42526e"  # of a message that carries the whole vector, which has no place in it
LEFT, RIGHT, TOP, BOTTOM = 0.85, 0.3, 1.05, 0.85  # inches around the axes
SQUARE = 1.08  # from a square to the next of the same rank, in sides


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
        ax = _new_axes(_lanes(size), _depth(priced, network))
    _space(ax, size, priced, network)
    _heads(ax, range(size))
    _messages(ax, priced, replay, network, itemsize)
    _headline(ax, title or read(algorithm)[0], _summary(priced, size, replay.total * itemsize, network))
    _key(ax, priced, replay)
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
    pitch, down = SQUARE * len(names) + 0.14, 1.2
    wide, deep = size * pitch - 0.14, len(times) * down
    if ax is None:
        side = 0.66 if size <= 8 else 0.5
        ax = _new_axes(max(wide * side, 3.2), deep * side)
    for row, time in enumerate(times):
        for rank in range(size):
            _squares(ax, replay, names, rank, time, rank * pitch, row * down)
        ax.text(-0.2, row * down + 0.5, _when(times, row), ha="right", va="center", color=GREY, fontsize=9)
    ax.set(xlim=(-0.05, wide), ylim=(deep - 0.1, -0.1), aspect="equal", anchor="NW")
    ax.axis("off")
    _heads(ax, [rank * pitch + (SQUARE * len(names) - 0.08) / 2 for rank in range(size)], 12 if names[1:] else 4)
    for rank in range(size) if names[1:] else ():
        _above(ax, names, replay.states[rank][-1], rank * pitch + 0.5, SQUARE)
    _headline(ax, title or read(algorithm)[0], _summary(priced, size, replay.total, network), 35 if names[1:] else 26)
    below = "Across a square: the vector. Down: a row for each rank\nwhose data is in it. Full colour: as it will stay."
    ax.annotate(below, (0, 0), (0, -8), va="top", color=GREY, fontsize=8.5, linespacing=1.5, **_off())
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
    wide, deep = _lanes(size), _depth(priced, network)
    side = min(0.86 / len(names), 0.8)  # of a square, in lanes
    high = wide / size * side
    figure = _new_figure(LEFT + wide + RIGHT, TOP + high + 0.25 + deep + 0.2)
    below = _add_axes(figure, wide, deep, 0.2)
    above = _add_axes(figure, wide, high, 0.2 + deep + 0.25)
    above.set(xlim=(-0.5, size - 0.5), ylim=(1, 0))
    above.axis("off")
    lefts = [rank - side * (SQUARE * len(names) - 0.08) / 2 for rank in range(size)]
    squares = [
        _squares(above, replay, names, rank, 0.0, left, 0, side) for rank, left in zip(range(size), lefts, strict=True)
    ]
    above.set_aspect("auto")
    _heads(above, range(size), 12 if names[1:] else 4)
    for rank, left in enumerate(lefts if names[1:] else ()):
        _above(above, names, replay.states[rank][-1], left + side / 2, SQUARE * side)
    _headline(above, title or read(algorithm)[0], _summary(priced, size, replay.total * itemsize, network))
    _space(below, size, priced, network)
    _messages(below, priced, replay, network, itemsize, alpha=0.22)
    unit, _ = _unit(priced.seconds, network)
    flights = [(f, _ends(f, size, around), _colour_of(replay, n)) for n, f, around in _wrapping(priced, size)]
    packets = below.scatter([], [], s=75, zorder=6, edgecolors="white", linewidths=1.2)
    cursor = below.axhline(0, color=INK, lw=1, alpha=0.6, zorder=5)
    frames = max(1, priced.rounds) * frames_per_round
    times = np.concatenate([np.linspace(0, priced.seconds, frames + 1), np.full(fps, priced.seconds)])

    def show(time):
        cursor.set_ydata([time / unit] * 2)
        flying = [item for item in flights if item[0].start <= time < item[0].end]
        packets.set_offsets(np.reshape([_position(f, ends, time, size, unit) for f, ends, _ in flying], (-1, 2)))
        packets.set_facecolors([colour for *_, colour in flying])
        for rank, images in enumerate(squares):
            for name, image in images.items():
                image.set_data(_image(replay, name, rank, time))

    film = FuncAnimation(figure, show, frames=times, init_func=lambda: None)
    writer = PillowWriter(fps=fps) if file.suffix == ".gif" else HTMLWriter(fps=fps, embed_frames=True)
    film.save(file, writer, dpi=80)
    return file


def draw_timeline(events: Iterable[Mapping], ax=None, *, title: str = "timeline"):
    """What each rank did when: a bar for every event.

    Parameters
    ----------
    events : iterable of mappings
        Each with rank (int), name (str), start and end (seconds of one clock); perhaps lane (str), where a rank does
        several things at once, such as reading on a thread. The first start becomes zero.
    ax, title
        As for `draw`.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        No events, or one that ends before it starts.
    """
    from matplotlib.patches import Patch

    events = sorted(events, key=lambda event: event["start"])
    if not events:
        raise ValueError("no events to draw")
    for event in events:
        if event["end"] < event["start"]:
            raise ValueError(f"an event ends before it starts: {event}")
    zero = events[0]["start"]
    length = max(event["end"] for event in events) - zero
    unit, symbol = _unit(length)
    rows = sorted({(event["rank"], event.get("lane", "")) for event in events})
    names = list(dict.fromkeys(event["name"] for event in events))
    # The golden section steps around the circle of colours so that any few neighbours in the list are far apart.
    colours = {name: _colour((0.75 + 0.618034 * i) % 1) for i, name in enumerate(n for n in names if n != "wait")}
    colours["wait"] = LINE
    if ax is None:
        ax = _new_axes(8.5, 0.46 * len(rows))
    _plain(ax)
    for row, lane in enumerate(rows):
        ax.axhspan(row - 0.36, row + 0.36, color=EMPTY, lw=0, zorder=0)
        for name in names:
            own = [e for e in events if (e["rank"], e.get("lane", ""), e["name"]) == (*lane, name)]
            bars = [((e["start"] - zero) / unit, (e["end"] - e["start"]) / unit) for e in own]
            ax.broken_barh(bars, (row - 0.36, 0.72), color=colours[name], edgecolor="white", lw=0.5, zorder=2)
    ax.set(xlim=(0, length / unit or 1), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [lane or f"rank {rank}" for rank, lane in rows])
    ax.set_xlabel(f"time, {symbol}", color=GREY, fontsize=9, loc="right")
    handles = [Patch(color=colours[name], label=name) for name in names]
    _plain_key(ax.legend(handles=handles, ncols=min(len(names), 5), loc="upper left", **_below(ax, 0, 0.3)))
    _headline(ax, title, f"{_plural(len({rank for rank, _ in rows}), 'rank')} · {length / unit:.3g} {symbol}", 8)
    return ax.figure


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
    words = [_plural(size, "rank"), _plural(rounds, "round")]
    if total:
        words.append(f"no rank sends more than {priced.busiest / total:.3g} n")
    if network is not ROUNDS:
        unit, symbol = _unit(priced.seconds)
        words.append(f"{priced.seconds / unit:.3g} {symbol}")
    return " · ".join(words)


def _plural(number, what):
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _wrapping(priced: Price, size):
    """(number, flight, whether it is drawn around the edge) of every message.

    Around the edge go the long arrows of a circle: those that every rank sends, to the rank k further on modulo size.
    """
    senders: dict[int, set] = {}
    for flight in priced.trace.flights:
        senders.setdefault((flight.dest - flight.source) % size, set()).add(flight.source)
    for number, flight in enumerate(priced.trace.flights):
        distance = flight.dest - flight.source
        yield number, flight, 2 * abs(distance) > size > 2 and len(senders[distance % size]) == size


def _ends(flight: Flight, size, around) -> tuple[float, float]:
    """Where the arrow starts and ends across; around the edge it ends beyond it."""
    if not around:
        return flight.source, flight.dest
    return flight.source, flight.dest + (size if flight.dest < flight.source else -size)


def _position(flight: Flight, ends, time, size, unit):
    """Where a message is at a time."""
    done = (time - flight.start) / (flight.end - flight.start)
    return (ends[0] + done * (ends[1] - ends[0]) + 0.5) % size - 0.5, time / unit


def _buffer_names(replay: Replay) -> list[str]:
    """x, y, then scratch."""
    names = {name for rank in replay.states for name in rank[-1]}
    return sorted(names, key=lambda name: ("xy".find(name) % 3, name))


def _image(replay: Replay, name, rank, time):
    """A buffer of a rank as colours (ranks, elements, 3), or None where that rank has none of that name."""
    last, state = replay.states[rank][-1].get(name), replay.at(rank, time)
    if last is None or not (last.where != NOWHERE).any():
        return None
    bounds = replay.bounds[name]
    shown = np.linspace(0, bounds[-1] - 1, min(bounds[-1], 96)).round()
    cells = np.searchsorted(bounds, shown, side="right") - 1
    image = np.empty((len(replay.states), len(cells), 3))
    for column, cell in enumerate(cells):
        who = state[name].who[cell] if name in state else 0
        origin = state[name].where[cell] if who else last.where[cell]
        place = replay.place(origin) if origin != NOWHERE else 0.0
        colour = _colour(place) if who == last.who[cell] else _colour(place, lightness=0.85, chroma=0.075)
        for row in range(len(image)):
            image[row, column] = colour if who >> row & 1 else (0.945, 0.95, 0.96)
    return image


def _when(times, row):
    if row == 0:
        return "start"
    return f"round {row}" if (times == np.arange(len(times))).all() else f"t = {times[row]:g}"


# ---------------------------------------------------------------------------------------------- how it is drawn


def _new_figure(width, height):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _add_axes(figure, width, height, bottom):
    """Axes of so many inches."""
    w, h = figure.get_size_inches()
    return figure.add_axes((LEFT / w, bottom / h, width / w, height / h))


def _new_axes(width, height):
    return _add_axes(_new_figure(LEFT + width + RIGHT, TOP + height + BOTTOM), width, height, BOTTOM)


def _lanes(size):
    """Inches across of a space-time diagram."""
    return max(3.4, size * min(0.95, max(0.56, 7.6 / size)))


def _depth(priced: Price, network):
    """Inches down of a space-time diagram."""
    rows = max(1, priced.rounds)
    return rows * min(0.95, max(0.55, 3 / rows)) if network is ROUNDS else min(12.0, 3 + rows / 4)


def _inches(ax):
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def _below(ax, x, inches):
    """Where to put a legend: at x (a fraction), so many inches below the axes."""
    return dict(bbox_to_anchor=(x, -inches / _inches(ax)[1]), borderaxespad=0, borderpad=0)


def _off(coordinates="axes fraction"):
    """For annotate: text so many points off a place that is given in `coordinates`."""
    return dict(xycoords=coordinates, textcoords="offset points", annotation_clip=False)


def _plain(ax):
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, colors=GREY, labelsize=9)
    ax.set_facecolor("none")


def _plain_key(key):
    key.set_frame_on(False)
    for text in key.get_texts():
        text.set(color=GREY, fontsize=8.5)


def _unit(seconds, network=None):
    """(unit in seconds, symbol) in which so many seconds are a readable number; rounds are their own unit."""
    if network is ROUNDS:
        return 1.0, ""
    for unit, symbol in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return unit, symbol
    return 1e-9, "ns"


def _headline(ax, title, subtitle, points=26):
    ax.annotate(title, (0, 1), (0, points + 15), color=INK, fontsize=13, fontweight="bold", va="bottom", **_off())
    ax.annotate(subtitle, (0, 1), (0, points), color=GREY, fontsize=9, va="bottom", **_off())


def _heads(ax, places, points=4):
    """The rank numbers, above the axes."""
    across = _off(("data", "axes fraction"))
    for rank, x in enumerate(places):
        disc = dict(boxstyle="circle,pad=0.28", fc=INK, ec="none")
        words = dict(color="white", fontsize=9 if rank < 10 else 7.5, fontweight="bold", ha="center", bbox=disc)
        ax.annotate(f"{rank}", (x, 1), (0, points + 6), va="center", zorder=9, **words, **across)


def _above(ax, names, present, left, pitch):
    """Names of buffers, above their squares."""
    for i, name in enumerate(names):
        if name in present:
            across = _off(("data", "axes fraction"))
            ax.annotate(name, (left + i * pitch, 1), (0, 3), color=GREY, fontsize=7.5, ha="center", **across)


def _space(ax, size, priced, network):
    """The lines that ranks move down, and the time on the left."""
    unit, symbol = _unit(priced.seconds, network)
    depth = priced.seconds / unit or 1.0
    ax.set(xlim=(-0.5, size - 0.5), ylim=(depth * 1.01, -depth * 0.01), xticks=[])
    _plain(ax)
    ax.vlines(range(size), 0, depth, color=LINE, lw=1.4, zorder=1)
    if network is ROUNDS:
        ax.hlines(range(int(depth) + 1), -0.5, size - 0.5, color=EMPTY, lw=1, zorder=0)
        ax.set_yticks(np.arange(int(depth)) + 0.5, [f"{k + 1}" for k in range(int(depth))])
        ax.set_ylabel("round", color=GREY, fontsize=9)
    else:
        ax.set_ylabel(f"time, {symbol}", color=GREY, fontsize=9)
        ax.grid(axis="y", color=EMPTY, lw=1, zorder=0)


def _messages(ax, priced, replay, network, itemsize, alpha=1.0):
    """An arrow for every message; a band where its data holds the ports for long; a sign where it is added."""
    from matplotlib.patches import Polygon

    size, (unit, _) = len(priced.finish), _unit(priced.seconds, network)
    for number, flight, around in _wrapping(priced, size):
        colour, elements = _colour_of(replay, number), flight.send.hi - flight.send.lo
        start, end = flight.start / unit, flight.end / unit
        ends = _ends(flight, size, around)
        shifts = (0, np.sign(ends[0] - ends[1]) * size) if around else (0,)
        far = flight.source // network.ranks_per_node != flight.dest // network.ranks_per_node
        held = (network.between if far else network.inside).beta * elements * itemsize / unit
        stroke = dict(color=colour, alpha=alpha, lw=1.2 + 1.5 * (elements / max(replay.total, 1)) ** 0.5)
        shape = dict(arrowstyle="-|>,head_width=0.2,head_length=0.48", shrinkA=0, shrinkB=3)
        for shift in shifts:
            tail, head = (ends[0] + shift, start), (ends[1] + shift, end)
            arrow = ax.annotate("", head, tail, annotation_clip=False, arrowprops=stroke | shape, zorder=3)
            arrow.arrow_patch.set_clip_path(ax.patch)
            if held > 0.02 * priced.seconds / unit:
                corners = [tail, (tail[0], start + held), head, (head[0], end - held)]
                ax.add_patch(Polygon(corners, color=colour, alpha=0.17 * alpha, lw=0, zorder=2))
        if type(flight.recv) is RecvReduce:
            ring = dict(mec=colour, mew=1.3, alpha=alpha)
            ax.plot(flight.dest, end, "o", ms=8, mfc="white", zorder=4, **ring)
            ax.plot(flight.dest, end, "+", ms=5, zorder=5, **ring)
    for span in priced.trace.rounds:
        if any(type(step) in (Copy, Reduce) and step.lo < step.hi for step in span.steps):
            ax.plot(
                span.rank,
                span.start / unit,
                "s",
                ms=6,
                mfc="white",
                mec=INK,
                mew=1.2,
                zorder=6,
                alpha=alpha,
                clip_on=False,
            )


def _key(ax, priced, replay):
    """Below the diagram: the vector in its colours, and what the signs mean."""
    from matplotlib.lines import Line2D

    came = {type(flight.recv) for flight in priced.trace.flights}
    local = {type(step) for span in priced.trace.rounds for step in span.steps if step.lo < step.hi} & {Copy, Reduce}
    line, handles = dict(color=GREY, lw=1.6), []
    if RecvReduce in came:
        handles.append(Line2D([], [], label="is added there", marker="$\\oplus$", ms=9, mfc=GREY, mec="none", **line))
    if came - {RecvReduce}:
        handles.append(Line2D([], [], label="replaces what is there", marker=">", ms=6, **line))
    if local:
        square = dict(marker="s", ms=6, mfc="white", mec=INK, lw=0)
        handles.append(Line2D([], [], label="moves within the rank", **square))
    pieces = len(replay.pieces) - 1
    if pieces > 1:
        width, height = _inches(ax)
        strip = ax.inset_axes((0, -0.33 / height, 1.45 / width, 0.13 / height))
        starts = replay.pieces[:-1]
        colours = [_colour(replay.place(start)) for start in starts]
        strip.bar(starts, 1, np.diff(replay.pieces), align="edge", color=colours, ec="white", lw=pieces <= 24)
        strip.set(xlim=(0, replay.total), ylim=(0, 1))
        strip.axis("off")
        ax.annotate("place in the vector", (0, 0), (0, -40), color=GREY, fontsize=8.5, **_off())
    side = 1 if pieces > 1 else 0
    place = _below(ax, side, 0.18)
    _plain_key(ax.legend(handles=handles, loc="upper right" if side else "upper left", labelspacing=0.35, **place))


def _squares(ax, replay, names, rank, time, left, top, side=1.0):
    """The buffers of a rank, side by side: {name: its image}."""
    from matplotlib.patches import Rectangle

    images = {}
    for i, name in enumerate(names):
        image = _image(replay, name, rank, time)
        if image is not None:
            x = left + SQUARE * side * i
            extent = x, x + side, top + 1, top
            images[name] = ax.imshow(image, extent=extent, interpolation="nearest", zorder=2)
            ax.add_patch(Rectangle((x, top), side, 1, fill=False, ec="#aab1bd", lw=0.8, zorder=3, clip_on=False))
    return images


# ---------------------------------------------------------------------------------------------- colours


def _colour(place: float, lightness: float = 0.66, chroma: float = 0.15):
    """sRGB of a place in the vector, 0 to 1, from red through green and blue to violet, all equally light.

    Oklch colours (Ottosson 2020): equal lightness and chroma, the hue goes around.
    """
    hue = np.radians(25 + 300 * place)
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    red = 4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short
    green = -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short
    blue = -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short
    linear = np.clip([red, green, blue], 0, 1)
    return tuple(np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


def _colour_of(replay: Replay, number):
    """The colour of a message: of the middle of where its elements stood."""
    origins, lengths = replay.carried[number]
    known = origins != NOWHERE
    if not known.any() or lengths[known].sum() >= replay.total:
        return WHOLE
    return _colour(replay.place(origins[known], lengths[known]))
