"""curves.png: training and validation loss, and validation accuracy or speed, by epoch; the best epoch is ringed."""

from __future__ import annotations

from pathlib import Path

from parallel.reports.figures import write_figure


def write_curves(history: list[dict], file: Path) -> None:
    """Draw loss and accuracy by epoch into a file; does nothing if there was no epoch."""
    if not history:
        return
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from collectives.drawing.timeline import PALETTE

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs, style = [record["epoch"] for record in history], {"marker": "o", "ms": 4} if len(history) < 10 else {}
    left.plot(epochs, [record["loss"] for record in history], label="training", color=PALETTE[0], **style)
    if scored := "validation_loss" in history[0]:
        losses = [record["validation_loss"] for record in history]
        left.plot(epochs, losses, label="validation", color=PALETTE[5], ls="--", **style)
    left.set(xlabel="epoch", ylabel="loss", yscale="log", title="loss")
    if scored and "validation_accuracy" in history[0]:
        shares = [100 * record["validation_accuracy"] for record in history]
        right.plot(epochs, shares, color=PALETTE[5], ls="--", **style)
        right.set(xlabel="epoch", ylabel="validation accuracy (%)", title="accuracy")
        ring(right, epochs, shares, shares.index(max(shares)), f"{max(shares):.2f}%")
    else:
        right.plot(epochs, [record["images_per_second"] for record in history], color=PALETTE[2], **style)
        right.set(xlabel="epoch", ylabel="samples/s", title="speed")
        if scored:
            ring(left, epochs, losses, losses.index(min(losses)), f"{min(losses):.4g}")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.set_title(axes.get_title(), loc="left", fontsize=11, fontweight="bold")
        axes.set_title("")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    write_figure(figure, file)


def ring(axes, epochs: list, values: list, best: int, text: str) -> None:
    """Ring the best epoch, the first of equal ones, and name it in the legend."""
    label = f"best: {text} after epoch {epochs[best]}"
    axes.plot(epochs[best], values[best], "o", ms=10, mfc="none", mec="black", mew=1.4, ls="none", label=label)
    axes.legend(frameon=False, loc="best")
