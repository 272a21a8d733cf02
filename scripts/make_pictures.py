#!/usr/bin/env python3
"""Draw the pictures of docs/ from the algorithms and classes themselves.

    python scripts/make_pictures.py              into docs/
    python scripts/make_pictures.py --out DIR    elsewhere, to compare

The same versions of the code and of matplotlib write the same bytes: no date, no random identifiers.
"""

import argparse
import importlib
import pkgutil
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from collectives import ALGORITHMS, draw
from parallel import strategies
from parallel.mesh import AXES, Mesh
from parallel.passes.forward_backward import ForwardBackward
from parallel.sync.base import GradientSync
from parallel.trainer import DistributedTrainer


def kinds(part: type) -> list[str]:
    """Names of a part's kinds in parallel/, by what they are made of."""
    for module in pkgutil.walk_packages(strategies.__path__, f"{strategies.__name__}."):
        importlib.import_module(module.name)  # and with it the parts that it chooses from
    found = [part]
    for kind in found:
        found += kind.__subclasses__()
    return sorted({kind.__name__ for kind in found}, key=lambda name: (name != part.__name__, name))


def asked(part: type, *names: str, gap: int = 3) -> str:
    """Methods by name, which the class has: a picture that names others is not drawn."""
    for name in names:
        getattr(part, name)
    return (" " * gap).join(names)


def trainer_parts():
    """The trainer, its three parts and their kinds; and what a step asks of each, in its order."""
    figure = Figure(figsize=(9, 4.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 9), ylim=(0, 4.2))
    axes.axis("off")
    title = {"ha": "center", "va": "top", "fontsize": 11, "fontweight": "bold"}
    text = {"ha": "center", "va": "top", "fontsize": 8.5, "linespacing": 1.35}

    def box(left, bottom, width, height, color):
        axes.add_patch(Rectangle((left, bottom), width, height, facecolor=color, edgecolor="#444444"))

    box(2.2, 3.2, 4.6, 0.9, "#eeeeee")
    axes.text(4.5, 4.02, "DistributedTrainer", **title)
    asks = asked(DistributedTrainer, "step", "evaluate", "state_items", "load_state_dict")
    axes.text(4.5, 3.72, f"{asks}\nnn.fit cannot tell it from nn.Trainer", **text)
    step = asked(GradientSync, "begin_step", "begin_pass", "finish_step", "update", gap=2)
    for i, (name, color, does, found) in enumerate(
        (
            (
                "forward_backward",
                "#dcecf9",
                f"what this rank computes\n{asked(ForwardBackward, 'divide', 'take', 'compute')}",
                kinds(ForwardBackward),
            ),
            ("sync", "#e3f3df", f"how the gradients of ranks are summed\n{step}", kinds(GradientSync)),
            ("mesh", "#fbeed5", f"who is whose peer, by axes\n{asked(Mesh, 'sum', 'allgather', 'bcast')}", AXES),
        )
    ):
        left = 0.15 + 2.95 * i
        box(left, 0.1, 2.8, 2.6, color)
        axes.annotate("", (left + 1.4, 2.7), (3.3 + 1.2 * i, 3.2), arrowprops={"arrowstyle": "-|>", "color": "#444444"})
        axes.text(left + 1.4, 2.62, name, **title)
        axes.text(left + 1.4, 2.3, does, **text)
        lines = [" \u00b7 ".join(found[k : k + 2]) for k in range(0, len(found), 2)]
        axes.text(left + 1.4, 1.62, "\n".join(lines), **text, color="#1f4e79")
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
