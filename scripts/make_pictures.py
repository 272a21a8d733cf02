#!/usr/bin/env python3
"""Draw the pictures of docs/ from the algorithms and classes themselves.

    python scripts/make_pictures.py              into docs/
    python scripts/make_pictures.py --out DIR    elsewhere, to compare

The same versions of the code and of matplotlib write the same bytes: no date, no random identifiers.
"""

import argparse
import importlib
import pkgutil
import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from collectives import ALGORITHMS, draw
from collectives.drawing.marks import GREY, INK
from parallel import passes, strategies, sync
from parallel.axis import AXES
from parallel.mesh import Mesh
from parallel.passes.forward_backward import ForwardBackward
from parallel.sync.base import GradientSync
from parallel.trainer import DistributedTrainer


def kinds(part: type) -> list[str]:
    """Return the names of a part and of its subclasses in parallel/."""
    for package in (passes, strategies, sync):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found = [part]
    for kind in found:
        found += kind.__subclasses__()
    return sorted({kind.__name__ for kind in found}, key=lambda name: (name != part.__name__, name))


def methods(part: type, *names: str) -> list[str]:
    """Return the names of methods, which the class has: a picture that names others is not drawn."""
    for name in names:
        getattr(part, name)
    return list(names)


def trainer_parts():
    """The trainer and its three parts: what each is for, which methods a step calls in their order, and its kinds."""
    width, height = 7.2, 4.45  # inches, which are also the axes' units
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    calls = methods(DistributedTrainer, "step", "evaluate", "state_items", "load_state_dict")
    calls_of_pass = methods(ForwardBackward, "divide", "select_samples", "compute")
    calls_of_sync = methods(GradientSync, "begin_step", "begin_pass", "finish_step", "update")
    calls_of_mesh = methods(Mesh, "sum", "allgather", "bcast")
    parts = (
        (0.95, "#dcecf9", "forward_backward", "what this rank computes", calls_of_pass, kinds(ForwardBackward)),
        (1.6, "#e3f3df", "sync", "how the gradients of\nranks are summed", calls_of_sync, kinds(GradientSync)),
        (0.85, "#fbeed5", "mesh", "which ranks are peers", calls_of_mesh, list(AXES)),
    )

    def box(left, top, height, color):
        axes.add_patch(Rectangle((left, top - height), width - 0.05 - left, height, facecolor=color, edgecolor=GREY))

    title = {"va": "top", "fontsize": 12, "fontweight": "bold", "color": INK}
    text = {"va": "top", "fontsize": 10, "linespacing": 1.3, "color": INK}
    top = height - 0.05
    box(0.05, top, 0.65, "#eeeeee")
    axes.text(0.2, top - 0.1, "DistributedTrainer", **title)
    axes.text(2.85, top - 0.12, f"{', '.join(calls)}\nnn.fit trains it as it trains an nn.Trainer", **text)
    top -= 0.75
    for rows, color, name, purpose, calls, found in parts:
        arrow = {"arrowstyle": "-|>", "color": GREY}
        axes.annotate("", (0.55, top - rows / 2), (0.28, top - rows / 2), arrowprops=arrow)
        box(0.55, top, rows, color)
        axes.text(0.7, top - 0.1, name, **title)
        axes.text(0.7, top - 0.35, f"{purpose}\n{textwrap.fill(', '.join(calls), 27)}", **text)
        column = -(-len(found) // 3)
        for k in range(3):
            shown = "\n".join(found[k * column :][:column])
            axes.text(2.85 + 1.4 * k, top - 0.12, shown, **text | {"color": "#1f4e79"})
        axes.plot((0.3, 0.3), (height - 0.7, top - rows / 2), color=GREY, lw=1, zorder=0)
        top -= rows + 0.1
    return figure


PICTURES = {
    "ring_allreduce.svg": lambda: draw(ALGORITHMS["allreduce"]["ring"], 4, 4),
    "shared_allreduce.svg": lambda: draw(ALGORITHMS["allreduce"]["shared_arrays"], 4, 64),
    "trainer_parts.svg": trainer_parts,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/ from the algorithms themselves.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs", metavar="DIR")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        with matplotlib.rc_context({"svg.hashsalt": name}):
            picture().savefig(out / name, metadata={"Date": None})
        print(f"{out / name}: {(out / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
