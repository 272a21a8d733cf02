"""What ranks really did, from a measured trace: a bar for every event."""

from collections.abc import Iterable, Mapping

from collectives import drawing_marks as marks

# What training is made of has the same colour in every picture; other names have the colours that follow.
USUAL = ("compute", "communicate", "update", "push", "pull", "read")
USUAL += ("scatter", "broadcast", "forward", "gather", "loss", "scatter gradient", "backward", "reduce")


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
    unit, symbol = marks.unit_of(length)
    rows = sorted({(event["rank"], event.get("lane", "")) for event in events})
    names = list(dict.fromkeys(event["name"] for event in events))
    # The golden section steps around the circle of colours so that any few neighbours in the list are far apart.
    coloured = [*USUAL, *(name for name in names if name not in (*USUAL, "wait"))]
    colours = {name: marks.colour_at((0.75 + 0.618034 * i) % 1) for i, name in enumerate(coloured)}
    colours["wait"] = marks.LINE
    if ax is None:
        ax = marks.new_axes(8.5, 0.46 * len(rows))
    marks.plain(ax)
    for row, lane in enumerate(rows):
        ax.axhspan(row - 0.36, row + 0.36, color=marks.EMPTY, lw=0, zorder=0)
        for name in names:
            own = [e for e in events if (e["rank"], e.get("lane", ""), e["name"]) == (*lane, name)]
            bars = [((e["start"] - zero) / unit, (e["end"] - e["start"]) / unit) for e in own]
            ax.broken_barh(bars, (row - 0.36, 0.72), color=colours[name], edgecolor="white", lw=0.5, zorder=2)
    ax.set(xlim=(0, length / unit or 1), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [lane or f"rank {rank}" for rank, lane in rows])
    ax.set_xlabel(f"time, {symbol}", color=marks.GREY, fontsize=9, loc="right")
    handles = [Patch(color=colours[name], label=name) for name in names]
    marks.plain_key(
        ax.legend(handles=handles, ncols=min(len(names), 5), loc="upper left", **marks.place_below(ax, 0, 0.3))
    )
    marks.headline(
        ax, title, f"{marks.plural(len({rank for rank, _ in rows}), 'rank')} · {length / unit:.3g} {symbol}", 8
    )
    return ax.figure
