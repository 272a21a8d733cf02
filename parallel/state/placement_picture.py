"""Who holds what: a picture of the table of a trainer's arrays, the elements that each rank has of each kind.

Every array of the whole network has its stretch of the axis, in the order of the layout. A rank of a tensor group has
its part of it, a stage of a pipeline the arrays of its layers, a shard some of the elements; a server what it serves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nn.core.layer import Spec
from parallel.state.fragments import Fragment
from parallel.state.placed import KINDS, Partial
from parallel.state.splits import part_shape, with_split
from parallel.state.table import StateTable

DRAWN = KINDS[:-1]  # not what is in transit


class Held(NamedTuple):
    """What a rank has of one kind of arrays.

    Attributes
    ----------
    placements : list of str
        As the table has them: "Replicate", "Shard over 4"; several on a worker that is a server, too.
    ranges : list of (float, float)
        First element and number of elements, on the axis of the whole network.
    """

    placements: list[str]
    ranges: list[tuple[float, float]]


def held_by_ranks(table: StateTable) -> list[dict[str, Held]]:
    """Return what each rank has of each kind (collective); of several moments, those of the first name count."""
    stretches, at = {}, 0
    for name, spec in table.network.layout.specs.items():
        stretches[name] = at, math.prod(spec.shape)
        at += math.prod(spec.shape)
    mine: dict[str, Held] = {}
    names: dict[str, str] = {}
    for row in table.rows():
        if row.kind not in DRAWN or row.layout is None or names.setdefault(row.kind, row.name) != row.name:
            continue
        held = mine.setdefault(row.kind, Held([], []))
        held.placements.append(str(row.placement))
        for each in table.split(row):
            start, size = stretches[each.name.rpartition("/")[2]]
            lo, hi = (0.0, 1.0) if isinstance(row.placement, Partial) else _fractions(each)
            held.ranges.append((start + lo * size, (hi - lo) * size))
    return table.mesh.allgather(mine)


def _fractions(fragment: Fragment) -> tuple[float, float]:
    """Return where a fragment begins and ends in its array, as if the parts of a split array lay side by side."""
    (index, count), shape = fragment.part, fragment.full_shape
    if fragment.split is not None:
        shape = part_shape(fragment.name, with_split(Spec(shape, None), fragment.split), index, count)
    size = max(1, math.prod(shape))
    return (index + fragment.start / size) / count, (index + (fragment.start + fragment.array.size) / size) / count


def draw_placement(everyone: list[dict[str, Held]], name: str, elements: int):
    """Draw, for each kind of arrays, the elements that every rank has.

    Parameters
    ----------
    everyone : list of dict
        Of every rank, as `held_by_ranks` returns it.
    name : str
        Of the trainer.
    elements : int
        Parameters of the whole network.

    Returns
    -------
    matplotlib Figure
    """
    from matplotlib.figure import Figure

    from collectives.drawing.timeline import PALETTE

    kinds = [kind for kind in DRAWN if any(kind in held for held in everyone)]
    figure = Figure(figsize=(8, 0.9 + len(kinds) * (0.5 + 0.2 * len(everyone))), layout="constrained")
    panels = figure.subplots(len(kinds), sharex=True, squeeze=False)[:, 0]
    for kind, colour, ax in zip(kinds, PALETTE, panels, strict=False):
        for rank, held in enumerate(everyone):
            ax.broken_barh(held[kind].ranges if kind in held else [], (rank - 0.36, 0.72), color=colour)
        placements = dict.fromkeys(each for held in everyone if kind in held for each in held[kind].placements)
        ax.set_title(f"{kind} (along data: {', '.join(placements)})", loc="left", fontsize=9)
        ax.set(yticks=range(len(everyone)), ylim=(len(everyone) - 0.5, -0.5), xlim=(0, elements))
        ax.set_yticklabels([f"rank {rank}" for rank in range(len(everyone))], fontsize=8)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False)
    panels[-1].set_xlabel("elements of the network's arrays, the last layer's first")
    figure.suptitle(f"who holds what: {name}", x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure
