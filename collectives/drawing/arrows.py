"""What the steps of a schedule look like in a space-time diagram: arrows, bars for barriers, blocks of computation.

| step | looks like |
|---|---|
| Send and its receive | an arrow, with a circled plus where it is added; around the edge in a ring |
| Copy and Reduce of another rank's buffer | a dashed arrow from where it is read to where it is written |
| Copy and Reduce of one's own | a square |
| Barrier | a bar across the ranks, with a dot on each that takes part |
| Compute | a block with its name |
| what is wrong | red: a frame around the round, an arrow from who waits to whom it waits for |
"""

from itertools import pairwise

import numpy as np

from collectives.drawing.marks import (
    EMPTY,
    GREY,
    INK,
    LINE,
    RED,
    colour_at,
    colour_of,
    place_below,
    plain,
    plain_key,
    points_off,
    size_of,
    unit_of,
)
from collectives.pricing.networks import ROUNDS
from collectives.pricing.price import Price
from collectives.pricing.trace import Flight
from collectives.steps import Barrier, Compute, Copy, RecvReduce, Reduce, adds, reads, writes

WITHIN = dict(marker="s", ms=6, mfc="white", mec=INK, mew=1.2, lw=0)
HEAD = "-|>,head_width=0.2,head_length=0.48"
DASHES = (0, (3, 1.5))
BLOCK = 0.26  # half the width of a block, in lanes
BLOCKS = "#dfe6f1", "#f6dcc0", "#d9ecd8", "#ecdcef"  # light, as names stand on them; told apart by these names too


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
        ax.set_yticks(np.arange(int(depth)) + 0.5, [f"{k}" for k in range(int(depth))])  # as reports count
        ax.set_ylabel("round", color=GREY, fontsize=9)
    else:
        ax.set_ylabel(f"time, {symbol}", color=GREY, fontsize=9)
        ax.grid(axis="y", color=EMPTY, lw=1, zorder=0)


def borders(ax, nodes):
    """A line between ranks of different nodes."""
    for rank, (one, other) in enumerate(pairwise(nodes)):
        if one != other:
            ax.axvline(rank + 0.5, color=GREY, lw=1.2, ls=(0, (1, 2)), zorder=0)


def arrow(ax, tail, head, **stroke):
    """An arrow that the axes cut off."""
    shape = dict(arrowstyle=HEAD, shrinkA=0, shrinkB=3) | stroke
    drawn = ax.annotate("", head, tail, annotation_clip=False, arrowprops=shape, zorder=5)
    drawn.arrow_patch.set_clip_path(ax.patch)


def plus(ax, x, y, colour, alpha):
    """Here something is added."""
    ring = dict(mec=colour, mew=1.3, alpha=alpha, clip_on=False)
    ax.plot(x, y, "o", ms=8, mfc="white", zorder=6, **ring)
    ax.plot(x, y, "+", ms=5, zorder=7, **ring)


def draw_messages(ax, priced, replay, network, itemsize, alpha=1.0):
    """An arrow for every message; a band where its data holds the ports for long; a sign where it is added."""
    from matplotlib.patches import Polygon

    size, (unit, _) = len(priced.finish), unit_of(priced.seconds, network)
    for number, flight, around in wrapping(priced, size):
        colour, elements = colour_of(replay, replay.carried[number]), flight.send.hi - flight.send.lo
        start, end = flight.start / unit, flight.end / unit
        ends = ends_of(flight, size, around)
        shifts = (0, np.sign(ends[0] - ends[1]) * size) if around else (0,)
        far = flight.source // network.ranks_per_node != flight.dest // network.ranks_per_node
        held = (network.between if far else network.inside).beta * elements * itemsize / unit
        for shift in shifts:
            tail, head = (ends[0] + shift, start), (ends[1] + shift, end)
            arrow(ax, tail, head, color=colour, alpha=alpha, lw=width_of_line(elements, replay))
            if held > 0.02 * priced.seconds / unit:
                corners = [tail, (tail[0], start + held), head, (head[0], end - held)]
                ax.add_patch(Polygon(corners, color=colour, alpha=0.17 * alpha, lw=0, zorder=2))
        if type(flight.recv) is RecvReduce:
            plus(ax, flight.dest, end, colour, alpha)


def width_of_line(elements, replay):
    return 1.2 + 1.5 * (elements / max(replay.total, 1)) ** 0.5


def draw_works(ax, priced, replay, network, alpha=1.0):
    """What ranks do besides messages: copies and reductions, barriers, computation."""
    unit, _ = unit_of(priced.seconds, network)
    families = list(dict.fromkeys(family_of(w.step.name) for w in priced.trace.works if type(w.step) is Compute))
    for number, work in enumerate(priced.trace.works):
        start, end = work.start / unit, work.end / unit
        if type(work.step) is Compute:
            colour = BLOCKS[families.index(family_of(work.step.name)) % len(BLOCKS)]
            block(ax, work.rank, start, end, work.step.name, colour, alpha)
        elif type(work.step) is not Barrier:
            if not isinstance(work.step, Copy | Reduce):
                raise TypeError(f"rank {work.rank}: {work.step!r} is a step that no picture knows")
            (source,), (target,) = reads(work.step, work.rank), writes(work.step, work.rank)
            if source.rank == target.rank:
                lower = 0.16 if network is ROUNDS else 0.0  # than what the round before ends with
                ax.plot(work.rank, start + lower, **WITHIN, zorder=6, alpha=alpha, clip_on=False)
                continue
            colour = colour_of(replay, replay.moved[number])
            stroke = dict(color=colour, alpha=alpha, lw=width_of_line(target.hi - target.lo, replay), ls=DASHES)
            arrow(ax, (source.rank, start), (target.rank, end), **stroke)
            if adds(work.step):
                plus(ax, target.rank, end, colour, alpha)
    for members, start, end in barriers_of(priced):
        draw_barrier(ax, members, start / unit, end / unit, alpha)


def barriers_of(priced) -> list[tuple[list[int], float, float]]:
    """(ranks, when the last of them came, when they went on) of every barrier."""
    came: dict[tuple, list] = {}
    for work in priced.trace.works:
        if type(work.step) is Barrier:
            ranks = None if work.step.ranks is None else tuple(sorted(work.step.ranks))
            came.setdefault((work.end, ranks), []).append(work)
    return [(sorted(w.rank for w in works), max(w.start for w in works), end) for (end, _), works in came.items()]


def draw_barrier(ax, members, start, end, alpha):
    """A bar across the ranks, with a dot on each that takes part."""
    thick, middle = 4.5, (start + end) / 2
    across = dict(color=INK, alpha=alpha, solid_capstyle="round", zorder=5, clip_on=False)
    ax.plot([members[0] - 0.12, members[-1] + 0.12], [middle] * 2, lw=thick, **across)
    ax.plot(members, [middle] * len(members), "o", ms=0.62 * thick, mfc="white", mec="none", alpha=alpha, zorder=6)


def family_of(name: str) -> str:
    """Of "forward 3", "F3", or "2F3" for stage 2, what all of its kind are called: "forward", "F"."""
    return name.strip("0123456789 ") or name


def block(ax, rank, start, end, name, colour, alpha):
    """A piece of computation, with its name where there is room."""
    from matplotlib.patches import FancyBboxPatch

    pad = min(0.03 * (end - start), 0.05)
    corner, height = (rank - BLOCK, start + pad), max(end - start - 2 * pad, 0.0)
    look = dict(boxstyle="square,pad=0", fc=colour, ec=INK, lw=0.9, alpha=alpha, zorder=3)
    ax.add_patch(FancyBboxPatch(corner, 2 * BLOCK, height, **look))
    low, high = ax.get_ylim()
    if (end - start) / abs(low - high) * size_of(ax)[1] > 0.13:
        words = dict(ha="center", va="center", color=INK, fontsize=8, parse_math=False)
        ax.text(rank, (start + end) / 2, name, zorder=7, alpha=alpha, **words)


# ---------------------------------------------------------------------------------------------- what is wrong


def frame(ax, rank, start, end):
    """A red frame around a round of a rank."""
    from matplotlib.patches import Rectangle

    inside = 0.06 * (end - start)
    look = dict(fill=False, ec=RED, lw=2, zorder=8, clip_on=False)
    ax.add_patch(Rectangle((rank - 0.3, start + inside), 0.6, end - start - 2 * inside, **look))


def cross(ax, rank, y):
    """A red cross."""
    ax.plot(rank, y, "X", ms=11, mfc=RED, mec="white", mew=1, zorder=9, clip_on=False)


def waits_for(ax, waiting, other, y, in_cycle):
    """A red arrow from a rank to one that it waits for; bent, as the other may wait for it."""
    bent = dict(connectionstyle="arc3,rad=-0.28", shrinkA=9, shrinkB=9)
    shape = dict(arrowstyle=HEAD, color=RED, lw=2.4 if in_cycle else 1.2, **bent)
    ax.annotate("", (other, y), (waiting, y), annotation_clip=False, arrowprops=shape, zorder=8)


def lost_message(ax, flight: Flight, unit):
    """A message that nobody receives: it ends in a cross on the way."""
    end = (
        flight.source + 0.6 * (flight.dest - flight.source),
        (flight.start + 0.6 * (flight.end - flight.start)) / unit,
    )
    ax.plot([flight.source, end[0]], [flight.start / unit, end[1]], color=RED, lw=1.6, ls=DASHES, zorder=7)
    ax.plot(*end, "x", ms=7, mec=RED, mew=2, zorder=8)


# ---------------------------------------------------------------------------------------------- what the marks mean


def key_of(priced, nodes, network, wrong=()) -> list:
    """Return the handles of the legend: what is in this picture, and nothing else."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    size, works = len(priced.finish), priced.trace.works
    came = {type(flight.recv) for flight in priced.trace.flights}
    within, reached = set(), set()
    for work in works:
        if type(work.step) not in (Barrier, Compute):
            (source,), (target,) = reads(work.step, work.rank), writes(work.step, work.rank)
            kinds = within if source.rank == target.rank else reached
            kinds.add("adds" if adds(work.step) else "from" if target.rank == work.rank else "to")
    line, dashed, handles = dict(color=GREY, lw=1.8), dict(color=GREY, lw=1.8, ls=DASHES), []
    sign = dict(marker="$\\oplus$", ms=9, mfc=GREY, mec="none")
    if came - {RecvReduce}:
        handles.append(Line2D([], [], label="message: replaces what is there", marker=">", ms=6, **line))
    if RecvReduce in came:
        handles.append(Line2D([], [], label="message: is added to what is there", **sign, **line))
    if any(around for *_, around in wrapping(priced, size)):
        handles.append(
            Line2D([], [], label="leaves on one side, comes in on the other", marker="|", ms=9, mew=2, **line)
        )
    if reached - {"adds"}:
        how = "read from the other's memory" if "to" not in reached else "copied between ranks' memory"
        handles.append(Line2D([], [], label=how, marker=">", ms=6, **dashed))
    if "adds" in reached:
        handles.append(Line2D([], [], label="read from there, and added", **sign, **dashed))
    if within:
        handles.append(Line2D([], [], label="copied or added within the rank", **WITHIN))
    if any(type(work.step) is Barrier for work in works):
        dot = dict(marker="o", ms=4, mfc="white", mec="none")
        handles.append(Line2D([], [], label="barrier: all wait for the last", color=INK, lw=6, **dot))
    if families := dict.fromkeys(family_of(work.step.name) for work in works if type(work.step) is Compute):
        for i, name in enumerate(families):
            handles.append(Patch(fc=BLOCKS[i % len(BLOCKS)], ec=INK, lw=0.9, label=f"computes {name}"))
    held = any(link.beta for link in (network.inside, network.between))
    if network is not ROUNDS and held and came:
        handles.append(Patch(fc=GREY, alpha=0.25, label="its data is on the wire"))
    if len(set(nodes)) > 1:
        handles.append(Line2D([], [], label="border of a node", color=GREY, lw=1.2, ls=(0, (1, 2))))
    red = dict(color=RED, lw=2)
    meanings = {
        "failed": Line2D([], [], label="fails in this round", marker="s", ms=9, mfc="white", mec=RED, mew=2, lw=0),
        "waits": Line2D([], [], label="waits for; thick: in a circle", marker=">", ms=6, **red),
        "lost": Line2D([], [], label="message that nobody receives", marker="x", ms=7, mew=2, **red | {"ls": DASHES}),
        "result": Line2D([], [], label="ends with a wrong result", marker="X", ms=9, mfc=RED, mec="white", lw=0),
    }
    return handles + [meanings[what] for what in wrong]


def inches_below(handles) -> float:
    """Inches that the legend takes, with the strip above it."""
    return 0.6 + 0.195 * len(handles)


def legend(ax, replay, handles):
    """Below the diagram: the vector in its colours, and what the signs mean."""
    pieces = len(replay.pieces) - 1
    if pieces > 1:
        width, height = size_of(ax)
        strip = ax.inset_axes((0, -0.34 / height, 1.25 / width, 0.13 / height))
        starts = replay.pieces[:-1]
        colours = [colour_at(replay.place(start)) for start in starts]
        strip.bar(starts, 1, np.diff(replay.pieces), align="edge", color=colours, ec="white", lw=pieces <= 24)
        strip.set(xlim=(0, replay.total), ylim=(0, 1))
        strip.axis("off")
        ax.annotate("place in the vector", (0, 0), (96, -23), color=INK, fontsize=8.5, **points_off())
    down = 0.45 if pieces > 1 else 0.22
    plain_key(
        ax.legend(handles=handles, loc="upper left", labelspacing=0.4, handlelength=2.4, **place_below(ax, 0, down))
    )
