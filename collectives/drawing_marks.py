"""The marks of a drawing: axes and text, arrows, squares, and the colour of a place in the vector."""

import numpy as np

from collectives.clock import Price
from collectives.networks import ROUNDS
from collectives.replay import NOWHERE, Replay
from collectives.steps import Copy, RecvReduce, Reduce
from collectives.walking import Flight

INK, GREY, LINE, EMPTY = "#1f2430", "#7b8494", "#d5d9e0", "#eef0f3"
WHOLE = "#42526e"  # of a message that carries the whole vector, which has no place in it
LEFT, RIGHT, TOP, BOTTOM = 0.85, 0.3, 1.05, 0.85  # inches around the axes
WITHIN = dict(marker="s", ms=6, mfc="white", mec=INK, mew=1.2, lw=0)  # the sign of what moves within a rank
SQUARE = 1.08  # from a square to the next of the same rank, in sides


def new_figure(width, height):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure, width, height, bottom):
    """Axes of so many inches."""
    w, h = figure.get_size_inches()
    return figure.add_axes((LEFT / w, bottom / h, width / w, height / h))


def new_axes(width, height):
    return add_axes(new_figure(LEFT + width + RIGHT, TOP + height + BOTTOM), width, height, BOTTOM)


def width_of(size):
    """Inches across of a space-time diagram."""
    return max(3.4, size * min(0.95, max(0.56, 7.6 / size)))


def depth_of(priced: Price, network):
    """Inches down of a space-time diagram."""
    rows = max(1, priced.rounds)
    return rows * min(0.95, max(0.55, 3 / rows)) if network is ROUNDS else min(12.0, 3 + rows / 4)


def size_of(ax):
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def place_below(ax, x, inches):
    """Where to put a legend: at x (a fraction), so many inches below the axes."""
    return dict(bbox_to_anchor=(x, -inches / size_of(ax)[1]), borderaxespad=0, borderpad=0)


def points_off(coordinates="axes fraction"):
    """For annotate: text so many points off a place that is given in `coordinates`."""
    return dict(xycoords=coordinates, textcoords="offset points", annotation_clip=False)


def plain(ax):
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, colors=GREY, labelsize=9)
    ax.set_facecolor("none")


def plain_key(key):
    key.set_frame_on(False)
    for text in key.get_texts():
        text.set(color=GREY, fontsize=8.5)


def unit_of(seconds, network=None):
    """(unit in seconds, symbol) in which so many seconds are a readable number; rounds are their own unit."""
    if network is ROUNDS:
        return 1.0, ""
    for unit, symbol in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return unit, symbol
    return 1e-9, "ns"


def headline(ax, title, subtitle, points=26):
    ax.annotate(title, (0, 1), (0, points + 15), color=INK, fontsize=13, fontweight="bold", va="bottom", **points_off())
    ax.annotate(subtitle, (0, 1), (0, points), color=GREY, fontsize=9, va="bottom", **points_off())


def rank_heads(ax, places, points=4):
    """The rank numbers, above the axes."""
    across = points_off(("data", "axes fraction"))
    for rank, x in enumerate(places):
        disc = dict(boxstyle="circle,pad=0.28", fc=INK, ec="none")
        words = dict(color="white", fontsize=9 if rank < 10 else 7.5, fontweight="bold", ha="center", bbox=disc)
        ax.annotate(f"{rank}", (x, 1), (0, points + 6), va="center", zorder=9, **words, **across)


def buffer_heads(ax, names, present, left, pitch):
    """Names of buffers, above their squares."""
    for i, name in enumerate(names):
        if name in present:
            across = points_off(("data", "axes fraction"))
            ax.annotate(name, (left + i * pitch, 1), (0, 3), color=GREY, fontsize=7.5, ha="center", **across)


def plural(number, what):
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---------------------------------------------------------------------------------------------- arrows and squares


def wrapping(priced: Price, size):
    """(number, flight, whether it is drawn around the edge) of every message.

    Around the edge go the long arrows of a circle: those that every rank sends, to the rank k further on modulo size.
    """
    senders: dict[int, set] = {}
    for flight in priced.trace.flights:
        senders.setdefault((flight.dest - flight.source) % size, set()).add(flight.source)
    for number, flight in enumerate(priced.trace.flights):
        distance = flight.dest - flight.source
        yield number, flight, 2 * abs(distance) > size > 2 and len(senders[distance % size]) == size


def ends_of(flight: Flight, size, around) -> tuple[float, float]:
    """Where the arrow starts and ends across; around the edge it ends beyond it."""
    if not around:
        return flight.source, flight.dest
    return flight.source, flight.dest + (size if flight.dest < flight.source else -size)


def time_space(ax, size, priced, network):
    """The lines that ranks move down, and the time on the left."""
    unit, symbol = unit_of(priced.seconds, network)
    depth = priced.seconds / unit or 1.0
    ax.set(xlim=(-0.5, size - 0.5), ylim=(depth * 1.01, -depth * 0.01), xticks=[])
    plain(ax)
    ax.vlines(range(size), 0, depth, color=LINE, lw=1.4, zorder=1)
    if network is ROUNDS:
        ax.hlines(range(int(depth) + 1), -0.5, size - 0.5, color=EMPTY, lw=1, zorder=0)
        ax.set_yticks(np.arange(int(depth)) + 0.5, [f"{k + 1}" for k in range(int(depth))])
        ax.set_ylabel("round", color=GREY, fontsize=9)
    else:
        ax.set_ylabel(f"time, {symbol}", color=GREY, fontsize=9)
        ax.grid(axis="y", color=EMPTY, lw=1, zorder=0)


def draw_messages(ax, priced, replay, network, itemsize, alpha=1.0):
    """An arrow for every message; a band where its data holds the ports for long; a sign where it is added."""
    from matplotlib.patches import Polygon

    size, (unit, _) = len(priced.finish), unit_of(priced.seconds, network)
    for number, flight, around in wrapping(priced, size):
        colour, elements = colour_of(replay, number), flight.send.hi - flight.send.lo
        start, end = flight.start / unit, flight.end / unit
        ends = ends_of(flight, size, around)
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
            ring = dict(mec=colour, mew=1.3, alpha=alpha, clip_on=False)
            ax.plot(flight.dest, end, "o", ms=8, mfc="white", zorder=4, **ring)
            ax.plot(flight.dest, end, "+", ms=5, zorder=5, **ring)
    for span in priced.trace.rounds:
        if any(type(step) in (Copy, Reduce) and step.lo < step.hi for step in span.steps):
            ax.plot(span.rank, span.start / unit, **WITHIN, zorder=6, alpha=alpha, clip_on=False)


def legend(ax, priced, replay):
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
        handles.append(Line2D([], [], label="moves within the rank", **WITHIN))
    pieces = len(replay.pieces) - 1
    if pieces > 1:
        width, height = size_of(ax)
        strip = ax.inset_axes((0, -0.33 / height, 1.45 / width, 0.13 / height))
        starts = replay.pieces[:-1]
        colours = [colour_at(replay.place(start)) for start in starts]
        strip.bar(starts, 1, np.diff(replay.pieces), align="edge", color=colours, ec="white", lw=pieces <= 24)
        strip.set(xlim=(0, replay.total), ylim=(0, 1))
        strip.axis("off")
        ax.annotate("place in the vector", (0, 0), (0, -40), color=GREY, fontsize=8.5, **points_off())
    side = 1 if pieces > 1 else 0
    place = place_below(ax, side, 0.18)
    plain_key(ax.legend(handles=handles, loc="upper right" if side else "upper left", labelspacing=0.35, **place))


def draw_squares(ax, replay, names, rank, time, left, top, side=1.0):
    """The buffers of a rank, side by side: {name: its image}."""
    from matplotlib.patches import Rectangle

    images = {}
    for i, name in enumerate(names):
        image = image_of(replay, name, rank, time)
        if image is not None:
            x = left + SQUARE * side * i
            extent = x, x + side, top + 1, top
            images[name] = ax.imshow(image, extent=extent, interpolation="nearest", zorder=2)
            ax.add_patch(Rectangle((x, top), side, 1, fill=False, ec="#aab1bd", lw=0.8, zorder=3, clip_on=False))
    return images


def image_of(replay: Replay, name, rank, time):
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
        colour = colour_at(place) if who == last.who[cell] else colour_at(place, lightness=0.85, chroma=0.075)
        for row in range(len(image)):
            image[row, column] = colour if who >> row & 1 else (0.945, 0.95, 0.96)
    return image


# ---------------------------------------------------------------------------------------------- colours


def colour_at(place: float, lightness: float = 0.66, chroma: float = 0.15):
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


def colour_of(replay: Replay, number):
    """The colour of a message: of the middle of where its elements stood."""
    origins, lengths = replay.carried[number]
    known = origins != NOWHERE
    if not known.any() or lengths[known].sum() >= replay.total:
        return WHOLE
    return colour_at(replay.place(origins[known], lengths[known]))
