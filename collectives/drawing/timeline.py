"""What ranks did when, a bar for every event: measured by parallel's Timeline, or simulated."""

from collections.abc import Iterable, Mapping

from collectives.drawing import marks
from collectives.drawing.arrows import family_of
from collectives.pricing.price import Price
from collectives.steps import Barrier, Compute, Copy, Reduce

# Eight colours that differ for every kind of colour blindness (Okabe, Ito 2008); after these, the same with stripes.
PALETTE = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8f99"
# What training is made of looks the same in every picture; other names have what is left, in their order.
USUAL = ("forward", "backward", "update", "communicate", "compute", "reduce", "read", "push", "pull", "loss")
USUAL += ("scatter", "broadcast", "gather", "scatter gradient")
SAME = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "L": "compute",
}  # in schedules of pipelines, and of layers
OWN = {"input gradients": PALETTE[5], "weight gradients": PALETTE[6]}  # halves of backward: warm, as backward is


def draw_timeline(events: Iterable[Mapping] | Price, ax=None, *, title: str = "timeline", counted_in: str = ""):
    """Draw what each rank did when: a bar for every event.

    Parameters
    ----------
    events : iterable of mappings, or Price
        Each with rank (int), name (str), start and end (seconds of one clock); perhaps lane (str), where a rank does
        several things at once, such as reading on a thread. The first start becomes zero. Names with numbers, such as
        "forward 3", "F3", or "2F3" for stage 2, have one colour, and the last number in the bar. Of a price, made with
        trace=True, what ranks compute, copy and wait for is drawn in the same way.
    ax, title
        As for `draw`.
    counted_in : str
        What starts and ends are counted in, such as "units", where that is not seconds.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        No events, one that ends before it starts, or a price without a trace.

    Examples
    --------
    >>> import collectives
    >>> ring = collectives.ALGORITHMS["allreduce"]["ring"]
    >>> price = collectives.price(ring, size=4, count=1000, network="gigabit", trace=True)
    >>> type(collectives.draw_timeline(price)).__name__
    'Figure'
    """
    from matplotlib.patches import Patch

    events = sorted(events_of(events) if isinstance(events, Price) else events, key=lambda event: event["start"])
    if not events:
        raise ValueError("no events to draw")
    for event in events:
        if event["end"] < event["start"]:
            raise ValueError(f"an event ends before it starts: {event}")
    zero = events[0]["start"]
    length = max(event["end"] for event in events) - zero
    unit, symbol = (1.0, counted_in) if counted_in else marks.unit_of(length)
    rows = sorted({(event["rank"], event.get("lane", "")) for event in events})
    names = list(dict.fromkeys(family_of(event["name"]) for event in events))
    looks = looks_of(names)
    if ax is None:
        ax = marks.new_axes(8.5, 0.46 * len(rows), 0.65 + 0.22 * -(-len(names) // 5))
    marks.plain(ax)
    inches = marks.size_of(ax)[0] / (length or 1)
    for row, lane in enumerate(rows):
        ax.axhspan(row - 0.36, row + 0.36, color=marks.EMPTY, lw=0, zorder=0)
        for name in names:
            own = [e for e in events if (e["rank"], e.get("lane", ""), family_of(e["name"])) == (*lane, name)]
            bars = [((e["start"] - zero) / unit, (e["end"] - e["start"]) / unit) for e in own]
            ax.broken_barh(bars, (row - 0.36, 0.72), edgecolor="white", lw=0.5, zorder=2, **looks[name])
            for event in own:
                number = event["name"].rpartition(name)[2].strip()
                if number and (event["end"] - event["start"]) * inches > 0.09 * len(number):
                    middle = ((event["start"] + event["end"]) / 2 - zero) / unit
                    words = dict(ha="center", va="center", fontsize=8, color=ink_on(looks[name]["facecolor"]), zorder=3)
                    ax.text(middle, row, number, **words)
    ax.set(xlim=(0, length / unit or 1), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [lane or f"rank {rank}" for rank, lane in rows])
    ax.set_xlabel(f"time, {symbol}", color=marks.GREY, fontsize=9, loc="right")
    meant = {SAME.get(name, name): looks[name] for name in names}
    handles = [Patch(label=name, **look) for name, look in meant.items()]
    marks.plain_key(
        ax.legend(handles=handles, ncols=min(len(names), 5), loc="upper left", **marks.place_below(ax, 0, 0.3))
    )
    ranks = marks.plural(len({rank for rank, _ in rows}), "rank")
    marks.headline(ax, title, f"{ranks} · {length / unit:.3g} {symbol}", 8)
    return ax.figure


def looks_of(names) -> dict[str, dict]:
    """Colour and stripes of each name."""
    known = [SAME.get(name, name) for name in names]
    order = [*USUAL, *(name for name in known if name not in (*USUAL, *OWN, "wait"))]
    looks = {}
    for name, usual in zip(names, known, strict=True):
        if usual == "wait":
            looks[name] = dict(facecolor=marks.LINE)
            continue
        if usual in OWN:
            looks[name] = dict(facecolor=OWN[usual], hatch="")
            continue
        i = order.index(usual)
        looks[name] = dict(facecolor=PALETTE[i % len(PALETTE)], hatch="" if i < len(PALETTE) else "////")
    return looks


def ink_on(colour) -> str:
    """Black or white, whichever is easier to read there."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 130 else marks.INK


def events_of(priced: Price) -> list[dict]:
    """What the ranks of a price did: a "wait" is a round's time beyond its own work; that of a barrier is all of it."""
    if priced.trace is None:
        raise ValueError("a price without a trace: ask for price(..., trace=True)")
    worked: dict[tuple[int, int], list] = {}
    for work in priced.trace.works:
        worked.setdefault((work.rank, work.index), []).append(work)
    events = []
    for span in priced.trace.rounds:
        now = span.start
        for work in worked.get((span.rank, span.index), ()):
            match work.step:
                case Compute():
                    name = work.step.name
                case Copy() | Reduce():
                    name = "copy" if isinstance(work.step, Copy) else "reduce"
                case Barrier():
                    name = "wait"
                case _:
                    raise TypeError(f"rank {work.rank}: {work.step!r} is a step that no picture knows")
            events.append({"rank": span.rank, "name": name, "start": work.start, "end": work.end})
            now = max(now, work.end)
        events.append({"rank": span.rank, "name": "wait", "start": now, "end": span.end})
    return [event for event in events if event["end"] > event["start"]]
