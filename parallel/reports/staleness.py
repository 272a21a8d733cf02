"""Staleness: the age of the parameters with which the gradients of an update were computed.

In a run with asynchronous servers each epoch in metrics.jsonl has

    "staleness": {"mean": 2.1, "max": 7, "updates": [40, 95, 130, ...]}       so many updates were 0, 1, 2, ... late

counted by every server in updates that it made between the read and the push; replicas without a server record how
often they averaged, and how far they had drifted.
"""

from __future__ import annotations

from pathlib import Path

from nn.training.fit import Callback
from parallel.reports.figures import write_figure


class Staleness(Callback):
    """Add the counts of local-update ranks to the record of every epoch, before callbacks that write it."""

    def on_epoch(self, training, record):
        record |= training.trainer.epoch_record()


def write_staleness(history: list[dict], file: Path) -> None:
    """Draw the fraction of updates of each staleness by epoch into a file; does nothing without updates."""
    counts = [record["staleness"]["updates"] for record in history if "staleness" in record]
    if not counts:
        return
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from collectives.drawing.timeline import PALETTE

    most = max(map(len, counts))
    table = np.array([[*row, *[0] * (most - len(row))] for row in counts], float)
    total = table.sum(axis=0)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = 100 * total / total.sum()
    for at, share in enumerate(shares) if most <= 12 else ():
        text = "<0.5%" if 0 < share < 0.5 else f"{share:.0f}%"
        left.annotate(text, (at, share), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    left.bar(range(most), shares, color=PALETTE[0])
    left.set(xlabel="updates between read and push", ylabel="updates (%)", title="how late updates were")
    epochs = [record["epoch"] for record in history if "staleness" in record]
    means = table @ np.arange(most) / table.sum(axis=1)
    marker = "o" if len(epochs) < 10 else None
    right.plot(epochs, means, label="mean", color=PALETTE[0], marker=marker)
    right.plot(epochs, [len(row) - 1 for row in counts], label="most", color=PALETTE[5], ls="--", marker=marker)
    right.set(xlabel="epoch", ylabel="updates", ylim=(0, None), title="over the epochs")
    right.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_title(axes.get_title(), fontsize=11, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, file)
