"""Staleness: how old the parameters were with which an update's gradients were computed, of every update.

In metrics.jsonl an epoch of a run with servers that wait for nobody has

    "staleness": {"mean": 2.1, "max": 7, "updates": [40, 95, 130, ...]}       so many updates were 0, 1, 2, ... late

counted by every server in updates that it made between the read and the push; replicas without a server tell how often
they have met, and how far they had drifted.
"""

from __future__ import annotations

import io
from pathlib import Path

from nn.training.checkpoints import write_atomically
from nn.training.fit import Callback


class Staleness(Callback):
    """Put what ranks that train apart have counted into the record of every epoch; before what writes records."""

    def on_epoch(self, training, record):
        record |= training.trainer.counted()


def write_staleness(history: list[dict], file: Path) -> None:
    """Over the epochs the share of updates of each staleness, into a picture; nothing where there was none."""
    counts = [record["staleness"]["updates"] for record in history if "staleness" in record]
    if not counts:
        return
    import numpy as np
    from matplotlib.figure import Figure

    most = max(map(len, counts))
    table = np.array([[*row, *[0] * (most - len(row))] for row in counts], float)
    total = table.sum(axis=0)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(range(most), 100 * total / total.sum(), color="#3f97ec")
    left.set(xlabel="staleness (updates between read and push)", ylabel="updates (%)")
    epochs = [record["epoch"] for record in history if "staleness" in record]
    means = table @ np.arange(most) / table.sum(axis=1)
    right.plot(epochs, means, label="mean", marker="o" if len(epochs) < 10 else None)
    right.plot(epochs, [len(row) - 1 for row in counts], label="most", color="C1")
    right.set(xlabel="epoch", ylabel="staleness", ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_atomically(file, content.getvalue())
