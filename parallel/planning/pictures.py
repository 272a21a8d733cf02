"""Predictions as pictures: efficiency and seconds over ranks; which strategy is fastest at which scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.drawing.marks import label_ends
from collectives.drawing.timeline import PALETTE
from parallel.planning.job import Prediction
from parallel.planning.tables import Scaled, nbytes, seconds

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, *_ = PALETTE
COLOURS = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE, YELLOW, "#4d4d4d", "#999999", "#7a5195")
DARK = (BLUE, GREEN, RED)  # under white letters
MARKERS = "osD^vP*X<>"
NOTHING, PALE = "nothing fits", "#dddddd"
FAMILIES = (
    "one rank",
    "ddp",
    "zero, fsdp",
    "dp, ps",
    "data x tensor",
    "data x context",
    "pipeline",
    "pipeline x tensor",
)


def family(prediction: Prediction) -> str:
    """Return which of FAMILIES a prediction belongs to."""
    name, axes = prediction.strategy, prediction.axes
    if prediction.ranks == 1:
        return "one rank"
    if axes.pipeline > 1 or name == "pipedream":
        return "pipeline x tensor" if axes.tensor > 1 else "pipeline"
    if axes.context > 1:
        return "data x context"
    if axes.tensor > 1:
        return "data x tensor"
    return "ddp" if name == "ddp" else "dp, ps" if name in ("dp", "ps") else "zero, fsdp"


def new_axes(count: int, width: float = 5.0, height: float = 3.8):
    """Return `count` axes side by side in a new figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    found = figure.subplots(1, count, squeeze=False)[0]
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    return found


def draw_scaling(curves: dict[str, Sequence[Scaled]], batch: int, title: str):
    """Draw seconds of a step and efficiencies over ranks, a curve for each name.

    Returns
    -------
    matplotlib Figure
    """
    left, middle, right = new_axes(3, 2.8, 2.9)
    names = {}
    for i, (name, found) in enumerate(curves.items()):
        ranks = [s.prediction.ranks for s in found]
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "ms": 4}
        (line,) = left.plot(ranks, [s.prediction.seconds for s in found], **style)
        names[line] = name
        middle.plot(ranks, [100 * s.strong for s in found], **style)
        right.plot(ranks, [100 * s.weak for s in found], **style)
    left.set(yscale="log", title=f"seconds a step,\n{batch:,} samples")
    most = max([1.0, *(each for found in curves.values() for s in found for each in (s.strong, s.weak))])
    middle.set(ylim=(0, 105 * most), title=f"strong efficiency, %:\n{batch:,} samples on all ranks")
    right.set(ylim=(0, 105 * most), title=f"weak efficiency, %:\n{batch:,} samples on each rank")
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("ranks", fontsize=9)
        axes.set_title(axes.get_title(), fontsize=10)
        axes.tick_params(labelsize=9)
        axes.grid(alpha=0.25)
    left.yaxis.set_major_formatter("{x:g}")
    left.figure.suptitle(", ".join([title, *curves][: 1 + (len(curves) == 1)]), fontsize=11, fontweight="bold")
    if len(curves) > 1:
        most = max(line.get_xdata()[-1] for line in names)
        left.set_xlim(right=8 * most)  # room for the names
        label_ends({left: names})
    return left.figure


def draw_bars(found: Sequence[Prediction], title: str, memory: float = float("inf")):
    """Draw the parts of each prediction's step as bars, the fastest on top.

    Returns
    -------
    matplotlib Figure
    """
    (axes,) = new_axes(1, 8.0, 1.4 + 0.34 * len(found))
    parts = list(dict.fromkeys(part for p in found for part, value in p.parts.items() if value))
    scale, symbol = (1e3, "ms") if max(p.seconds for p in found) < 1 else (1.0, "s")
    for row, p in enumerate(found):
        at = 0.0
        for i, part in enumerate(parts):
            width = scale * p.parts.get(part, 0.0)
            look = {"color": COLOURS[i % len(COLOURS)], "hatch": "///" * (i // len(COLOURS)) or None}
            axes.barh(row, width, left=at, label=part if row == 0 else None, lw=0, edgecolor="white", **look)
            at += width
        fits = "" if p.memory <= memory else ", does not fit"
        axes.annotate(f" {seconds(p.seconds)}, {nbytes(p.memory)}{fits}", (at, row), va="center", fontsize=8)
    axes.set_yticks(range(len(found)), [p.name for p in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{symbol} of a step")
    axes.set_xlim(0, 1.35 * scale * max(p.seconds for p in found))
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return axes.figure


def draw_map(
    ranks: Sequence[int],
    batches: Sequence[int],
    fastest: Sequence[Sequence[Prediction]],
    title: str,
    memory: float = float("inf"),
):
    """Draw which strategy is fastest, by ranks (across) and samples of a step (up).

    Parameters
    ----------
    fastest : [row of a batch][column of ranks]
    memory : bytes of a rank; a prediction that needs more does not count

    Returns
    -------
    matplotlib Figure
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    kinds = [[family(p) if p.memory <= memory else NOTHING for p in row] for row in fastest]
    looks = {**dict(zip(FAMILIES, COLOURS, strict=False)), NOTHING: PALE}
    names = [name for name in looks if any(name in row for row in kinds)]
    colours = [looks[name] for name in names]
    fields = np.array([[names.index(name) for name in row] for row in kinds])
    (axes,) = new_axes(1, 2.6 + 0.72 * len(ranks), 2.4 + 0.5 * len(batches))
    axes.imshow(fields, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5, origin="lower", aspect="auto")
    for y, row in enumerate(fastest):
        for x, p in enumerate(row):
            sizes = p.axes if p.axes.context > 1 else p.axes[:3]
            mesh = "x".join(map(str, sizes)) if p.ranks > p.axes.data else ""
            ink = "white" if colours[fields[y, x]] in DARK else "black"
            text = f"{p.strategy}\n{mesh}".rstrip() if kinds[y][x] != NOTHING else ""
            axes.annotate(text, (x, y), ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks(range(len(ranks)), [f"{n:,}" for n in ranks], rotation=45, fontsize=8)
    axes.set_yticks(range(len(batches)), [f"{n:,}" for n in batches], fontsize=8)
    axes.set(xlabel="ranks", ylabel="samples of a step, over all ranks")
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left")
    handles = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.annotate(
        "in a field: data x pipeline x tensor",
        (1.01, 0.0),
        xycoords="axes fraction",
        fontsize=7,
        xytext=(4, 4),
        textcoords="offset points",
        annotation_clip=False,
    )
    return axes.figure
