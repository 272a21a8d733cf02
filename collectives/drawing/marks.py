"""The marks that all drawings are made of: axes, text, buffers as squares, and the colour of a place in the vector."""

import textwrap

import numpy as np

from collectives.drawing.contents import NOWHERE, Replay
from collectives.pricing.networks import ROUNDS
from collectives.pricing.price import Price

INK, GREY, LINE, EMPTY, RED = "#1f2430", "#5d6675", "#c9ced7", "#eef0f3", "#c8102e"
WHOLE = "#42526e"  # of a message that carries the whole vector, which has no place in it
LEFT, RIGHT, TOP, BOTTOM = 0.85, 0.3, 1.2, 0.85  # inches around the axes
SQUARE = 1.08  # from a square to the next of the same rank, in sides


def new_figure(width, height):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", layout="none")  # whatever rcParams say
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure, width, height, bottom):
    """Return axes of these sizes, in inches."""
    w, h = figure.get_size_inches()
    return figure.add_axes((LEFT / w, bottom / h, width / w, height / h))


def new_axes(width, height, below=BOTTOM):
    return add_axes(new_figure(LEFT + width + RIGHT, TOP + height + below), width, height, below)


def width_of(size):
    """Inches across of a space-time diagram."""
    return max(4.0, size * min(0.95, max(0.56, 7.6 / size)))


def depth_of(priced: Price, network):
    """Inches down of a space-time diagram."""
    rows = max(1, int(priced.seconds) if network is ROUNDS else priced.rounds)
    return rows * min(0.95, max(0.55, 3 / rows)) if network is ROUNDS else min(12.0, 3 + rows / 4)


def size_of(ax):
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def place_below(ax, x, inches):
    """Where to put a legend: at x (a fraction), `inches` below the axes."""
    return dict(bbox_to_anchor=(x, -inches / size_of(ax)[1]), borderaxespad=0, borderpad=0)


def points_off(coordinates="axes fraction"):
    """For annotate: text in points off a place that is given in `coordinates`."""
    return dict(xycoords=coordinates, textcoords="offset points", annotation_clip=False)


def plain(ax):
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, colors=GREY, labelsize=9)
    ax.set_facecolor("none")


def plain_key(key):
    key.set_frame_on(False)
    for text in key.get_texts():
        text.set(color=INK, fontsize=8.5)


def unit_of(seconds, network=None):
    """(unit in seconds, symbol) in which a number of seconds is readable; rounds are their own unit."""
    if network is ROUNDS:
        return 1.0, ""
    for unit, symbol in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return unit, symbol
    return 1e-9, "ns"


def headline(ax, title, subtitle, points=26):
    across = int(14.5 * (size_of(ax)[0] + RIGHT))
    whole = subtitle.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}·\N{NO-BREAK SPACE}", " · ")
    subtitle = "\n".join(line for text in whole.splitlines() for line in textwrap.wrap(text, across)).replace(
        "\N{NO-BREAK SPACE}", " "
    )
    up = points + 15 + 14 * subtitle.count("\n")
    ax.annotate(title, (0, 1), (0, up), color=INK, fontsize=13, fontweight="bold", va="bottom", **points_off())
    ax.annotate(subtitle, (0, 1), (0, points), color=GREY, fontsize=9, va="bottom", linespacing=1.4, **points_off())


def rank_heads(ax, places, points=4):
    """The rank numbers, above the axes."""
    across = points_off(("data", "axes fraction"))
    for rank, x in enumerate(places):
        disc = dict(boxstyle="circle,pad=0.28", fc=INK, ec="none")
        words = dict(color="white", fontsize=9 if rank < 10 else 7.5, fontweight="bold", ha="center", bbox=disc)
        ax.annotate(f"{rank}", (x, 1), (0, points + 6), va="center", zorder=9, **words, **across)


def buffer_heads(ax, names, left, pitch):
    """Names of buffers, above their squares."""
    for i, name in enumerate(names):
        across = points_off(("data", "axes fraction"))
        words = dict(color=GREY, fontsize=7.5, ha="center", parse_math=False)
        ax.annotate(name, (left + i * pitch, 1), (0, 3), **words, **across)


def label_ends(axes, size=9):
    """Write each line's name next to its last point, moved up or down until no two overlap.

    `axes` {Axes of one figure: {Line2D: name}}. Call it when limits and scales are set. The axes need room for the
    names to the right of the last points.
    """
    next(iter(axes)).figure.draw_without_rendering()  # places all axes, where a layout engine does
    for ax, names in axes.items():
        _label_ends(ax, names, size)


def _label_ends(ax, names, size):
    figure, height = ax.figure, 1.3 * size
    points = {line: tuple(array[-1] for array in line.get_data()) for line in names}
    heights = {line: ax.transData.transform(point)[1] * 72 / figure.dpi for line, point in points.items()}
    order = sorted(names, key=heights.get)
    moved = [heights[line] for line in order]
    for _ in range(200):
        for i in range(1, len(moved)):
            overlap = max(0.0, height - (moved[i] - moved[i - 1]))
            moved[i - 1 : i + 1] = moved[i - 1] - overlap / 2, moved[i] + overlap / 2
    for line, y in zip(order, moved, strict=True):
        back = dict(fc="white", ec="none", alpha=0.8, pad=0.6)  # lines that pass below stay in the background
        words = dict(fontsize=size, color=INK, va="center", bbox=back, annotation_clip=False)
        ax.annotate(names[line], points[line], (6, y - heights[line]), textcoords="offset points", **words)


def plural(number, what):
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---------------------------------------------------------------------------------------------- buffers as squares


def draw_squares(ax, replay, names, rank, time, left, top, side=1.0):
    """Draw the buffers of a rank, side by side: {name: its image}."""
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
    """Return a buffer of a rank as colours (ranks, elements, 3), or None where that rank has none of that name."""
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
        colour = colour_at(place) if who == last.who[cell] else colour_at(place, pale=0.62)
        for row in range(len(image)):
            image[row, column] = colour if who >> row & 1 else (0.945, 0.95, 0.96)
    return image


# ---------------------------------------------------------------------------------------------- colours


# From violet to orange, so that colours differ for every kind of colour blindness; equal steps are equally far apart.
STOPS = np.array([[90, 32, 192], [36, 88, 216], [31, 154, 200], [69, 192, 138], [200, 204, 60], [245, 160, 48]]) / 255
STEPS = np.cumsum([0, *np.linalg.norm(np.diff(STOPS, axis=0), axis=1)])


def colour_at(place: float, pale: float = 0.0):
    """sRGB of a place in the vector, 0 to 1; or so much of it mixed with white."""
    colour = np.array([np.interp(place * STEPS[-1], STEPS, channel) for channel in STOPS.T])
    return tuple(colour + pale * (1 - colour))


def colour_of(replay: Replay, cells):
    """The colour of what is carried, `cells` as Replay.carried has them: of the middle of where its elements stood."""
    origins, lengths = cells
    known = origins != NOWHERE
    if not known.any() or lengths[known].sum() >= replay.total:
        return WHOLE
    return colour_at(replay.place(origins[known], lengths[known]))
