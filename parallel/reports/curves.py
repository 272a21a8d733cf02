"""curves.png: loss of training and validation, and validation accuracy or speed, over the epochs."""

from __future__ import annotations

import io
from pathlib import Path

from nn.training.checkpoints import write_atomically


def write_curves(history: list[dict], file: Path) -> None:
    """Loss and accuracy over the epochs, into a picture; nothing where there was no epoch."""
    if not history:
        return
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs, style = [record["epoch"] for record in history], {"marker": "o"} if len(history) < 10 else {}
    left.plot(epochs, [record["loss"] for record in history], label="training", **style)
    if scored := "validation_loss" in history[0]:
        left.plot(epochs, [record["validation_loss"] for record in history], label="validation", **style)
    left.set(xlabel="epoch", ylabel="loss", yscale="log")
    left.legend(frameon=False)
    if scored and "validation_accuracy" in history[0]:
        right.plot(epochs, [100 * record["validation_accuracy"] for record in history], color="C1", **style)
        right.set(xlabel="epoch", ylabel="validation accuracy (%)")
    else:
        right.plot(epochs, [record["images_per_second"] for record in history], color="C1", **style)
        right.set(xlabel="epoch", ylabel="samples/s")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_atomically(file, content.getvalue())
