"""A schedule as a picture: a row for each rank, a block for each action, with the number of its micro-batch.

    draw(check("zb-h1", ranks=4, micro_batches=8).spans).savefig("zb-h1.svg")

What was measured is drawn like what was predicted: any spans, of a rank each list.
"""

from collections.abc import Sequence

from collectives.drawing import marks
from collectives.drawing.timeline import PALETTE, ink_on, looks_of
from parallel.strategies.pipeline.actions import ACTION, Action
from parallel.strategies.pipeline.checking import Span

NAMES = {
    "F": "F  forward",
    "B": "B  backward",
    "I": "I  gradient of the input",
    "W": "W  gradient of the weights",
    "REDUCE_GRAD": "sum over the ranks of a stage",
}
COLOURS = {kind: look["facecolor"] for kind, look in looks_of("FBIW").items()}  # as in timelines
COLOURS["REDUCE_GRAD"] = PALETTE[2]


def draw(spans: Sequence[Sequence[Span]], ax=None, *, title: str = "pipeline", seconds: bool = False):
    """Who computes what when.

    Parameters
    ----------
    spans : for each rank, its spans in order: `check(...).spans`, or what was measured
    ax : matplotlib Axes or None
    title : str
    seconds : whether times are seconds; otherwise they are units, such as a forward's

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        nothing to draw
    """
    from matplotlib.patches import Patch

    flat = [span for row in spans for span in row]
    if not flat:
        raise ValueError("no actions to draw")
    length = max(span.end for span in flat)
    unit, symbol = marks.unit_of(length) if seconds else (1.0, "units")
    if ax is None:
        usual = sum(span.end - span.start for span in flat) / len(flat)
        ax = marks.new_axes(max(7.5, min(16.0, 0.26 * length / usual if usual else 0)), 0.46 * len(spans))
    marks.plain(ax)
    stages = 1 + max(action.stage for span in flat for action in span.actions)
    several = stages > len(spans)
    inches = marks.size_of(ax)[0] / (length or 1)
    for rank, row in enumerate(spans):
        ax.axhspan(rank - 0.36, rank + 0.36, color=marks.EMPTY, lw=0, zorder=0)
        for span in row:
            for i, action in enumerate(span.actions):  # the parts of an overlap lie one above the other
                height = 0.72 / len(span.actions)
                low = rank - 0.36 + i * height
                later = several and action.stage >= len(spans)  # a second stage of the rank is paler
                ax.broken_barh(
                    [(span.start / unit, (span.end - span.start) / unit)],
                    (low, height),
                    color=COLOURS[action.kind],
                    alpha=0.6 if later else 1.0,
                    edgecolor="white",
                    lw=0.5,
                    zorder=2,
                )
                number = "" if action.micro_batch is None else str(action.micro_batch)
                if (span.end - span.start) * inches < 0.07 * len(number):
                    continue  # it would lie on its neighbours
                ax.text(
                    (span.start + span.end) / 2 / unit,
                    low + height / 2,
                    number,
                    ha="center",
                    va="center",
                    fontsize=7.5 if len(span.actions) == 1 else 7,
                    color="black" if later else ink_on(COLOURS[action.kind]),
                    zorder=3,
                    clip_on=True,
                )
    ax.set(xlim=(0, length / unit), ylim=(len(spans) - 0.5, -0.5))
    ax.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
    ax.set_xlabel(f"time, {symbol}", color=marks.GREY, fontsize=9, loc="right")
    kinds = {action.kind for span in flat for action in span.actions}
    handles = [Patch(color=COLOURS[kind], label=name) for kind, name in NAMES.items() if kind in kinds]
    marks.plain_key(ax.legend(handles=handles, ncols=len(handles), loc="upper left", **marks.place_below(ax, 0, 0.3)))
    paler = " · paler: a later stage of the rank" if several else ""
    ranks = marks.plural(len(spans), "rank")
    marks.headline(ax, title, f"{ranks} · {length / unit:.3g} {symbol} · numbers: micro-batches{paler}", 8)
    return ax.figure


def measured(events: Sequence[dict], rows: Sequence[Sequence[Action]]) -> list[list[Span]]:
    """The spans of one step, from the middle of what was recorded; [] where no step is whole on all ranks.

    Parameters
    ----------
    events : dicts of rank, name, start, end
        Those whose name is an action count, as Timeline.merge has them.
    rows : what each rank of the first pipeline does in a step
    """
    steps = []
    for rank, expected in enumerate(rows):
        entries = sorted((e["start"], e["end"], e["name"]) for e in events if e["rank"] == rank)
        entries = [entry for entry in entries if ACTION.fullmatch(entry[2])]
        names, wanted, at = [name for *_, name in entries], list(map(str, expected)), 0
        whole = []
        while at < len(entries):  # of a batch with fewer samples than micro-batches something is left out
            fits = names[at : at + len(wanted)] == wanted
            whole += [entries[at : at + len(wanted)]] if fits else []
            at += len(wanted) if fits else 1
        steps.append(whole)
    count = min(map(len, steps), default=0)
    if not count:
        return []
    middle = [whole[count // 2] for whole in steps]
    zero = min(start for row in middle for start, *_ in row)
    return [
        [Span(rank, i, (rows[rank][i],), start - zero, end - zero) for i, (start, end, _) in enumerate(row)]
        for rank, row in enumerate(middle)
    ]


def compare(seen: Sequence[Sequence[Span]], planned: Sequence[Sequence[Span]]):
    """Draw the measured spans, and below them those of the schedule; return a matplotlib Figure."""
    tall = 0.46 * len(seen)  # inches; between the two: the first one's legend, the second one's heading
    figure = marks.new_figure(10, 2 * tall + 3.2)
    above, below = (marks.add_axes(figure, 8.8, tall, bottom) for bottom in (tall + 2.4, marks.BOTTOM))
    draw(seen, above, title="a step, as it was", seconds=True)
    draw(planned, below, title="as its schedule says, with messages that take no time")
    return figure
