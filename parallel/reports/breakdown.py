"""Where the time of a step goes on every rank: compute, wait, communicate, update, input; always on.

Each rank adds up the durations of its phases (under a microsecond per step). Collective calls are measured without a
barrier, which would itself cost time: the last rank to enter a call waits for nobody, so the shortest duration of a
call among the ranks is communication, and the rest of a longer one is waiting. Once an epoch one allreduce compares the
durations of all steps, and the epoch's record gets the seconds per step of each part: minimum, mean and maximum over
the ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import attrgetter

import numpy as np

from nn.training.fit import Callback
from parallel.run_trainer import RunTrainer

PARTS = ("compute", "wait", "communicate", "update", "input")
OWN = {"compute": 0, "forward": 0, "backward": 0, "loss": 0, "wait": 1, "communicate": 2, "update": 3}  # phases
INPUT = 4


class Breakdown(Callback):
    """Add "breakdown" to the record of every epoch; list this callback before those that write records.

    A nested phase is subtracted from the phase around it. Collective phases are split into wait and communicate. Of the
    other phases compute, forward, backward and loss count as compute, wait and update as themselves, and all else as
    communicate.

    Parameters
    ----------
    trainer : RunTrainer
        Its phases are measured from now on.

    Attributes
    ----------
    table : (ranks, 5) array
        Seconds per step of every rank, in the order of PARTS: means over all steps so far.
    """

    def __init__(self, trainer: RunTrainer):
        self.communicator = trainer.communicator
        self.thread = threading.get_ident()
        self.spent = [0.0] * len(PARTS)
        self.together: list[float] = []  # durations of the collective calls of this epoch
        self.inside = [0.0]  # time of phases that have ended, to be taken from the one around them
        for name, method, together in trainer.phases:
            wrap(trainer, method, self._collective if together else partial(self._timed, OWN.get(name, 2)))
        wrap(trainer, "sum_scores", self._uncounted)
        self.steps = self.steps_before = 0
        ranks = self.communicator.size if self.communicator else 1
        self.table = np.zeros((ranks, len(PARTS)))

    def _timed(self, part: int, call: Callable) -> Callable:
        clock, spent, inside = time.perf_counter, self.spent, self.inside

        def timed(*arguments):
            outer, start = inside[0], clock()
            result = call(*arguments)
            took = clock() - start
            spent[part] += took - inside[0] + outer
            inside[0] = outer + took
            return result

        return timed

    def _collective(self, call: Callable) -> Callable:
        clock, inside, log = time.perf_counter, self.inside, self.together

        def timed(*arguments):
            outer, start = inside[0], clock()
            result = call(*arguments)
            took = clock() - start
            log.append(took - inside[0] + outer)
            inside[0] = outer + took
            return result

        return timed

    def _uncounted(self, call: Callable) -> Callable:
        def evaluate(*arguments):
            spent, calls = self.spent[:], len(self.together)
            result = call(*arguments)
            self.spent[:] = spent
            del self.together[calls:]
            return result

        return evaluate

    def loader(self, name: str, start: float, end: float) -> None:
        """Record, for Loader(timeline=), the time in which the training thread reads or waits for data."""
        if threading.get_ident() == self.thread:
            self.spent[INPUT] += end - start

    def on_begin(self, training):
        self.steps_before = training.trainer.steps
        self._clear()

    def on_epoch(self, training, record):
        steps = training.trainer.steps - self.steps_before
        self.steps_before = training.trainer.steps
        if steps:
            table = self._compare() / steps
            self.table += (table - self.table) * (steps / (self.steps + steps))
            self.steps += steps
            record["breakdown"] = {
                part: {kind: float(f"{value:.4g}") for kind, value in spread(column)}
                for part, column in zip(PARTS, table.T, strict=True)
            }
        self._clear()

    def by_rank(self) -> dict[str, list[float]]:
        """Return seconds per step of each part, an entry for every rank."""
        return {part: [float(f"{v:.4g}") for v in column] for part, column in zip(PARTS, self.table.T, strict=True)}

    def _clear(self) -> None:
        self.spent[:] = [0.0] * len(PARTS)
        self.together.clear()

    def _compare(self) -> np.ndarray:
        """Return (ranks, 5) seconds of this epoch, with collective phases split into wait and communicate."""
        mine, together = np.array(self.spent), np.array(self.together)
        if self.communicator is None:
            return mine[None]
        everyone = self.communicator.allgather(len(together))
        if together.size and len(set(everyone)) == 1:
            from mpi4py import MPI

            shortest = np.empty_like(together)
            self.communicator.Allreduce(together, shortest, MPI.MIN)
            mine[1] += (together - shortest).sum()
            together = shortest
        mine[2] += together.sum()
        return np.array(self.communicator.allgather(mine))


def wrap(trainer: RunTrainer, method: str, around: Callable[[Callable], Callable]) -> None:
    """Wrap one method of this trainer, or of one of its parts for "part.method"."""
    path, _, name = method.rpartition(".")
    owner = attrgetter(path)(trainer) if path else trainer
    setattr(owner, name, around(getattr(owner, name)))


def spread(values: np.ndarray) -> list[tuple[str, float]]:
    """Return ("min", "mean", "max") with their values."""
    return [("min", values.min()), ("mean", values.mean()), ("max", values.max())]


def draw_breakdown(table: np.ndarray, ax=None):
    """Draw stacked bars: where each rank spends the time of a step, with the percentage of the larger parts.

    Parameters
    ----------
    table : (ranks, 5) array
        Breakdown.table, seconds.

    Returns
    -------
    matplotlib Figure
    """
    from matplotlib.figure import Figure

    from collectives.drawing.timeline import ink_on, looks_of

    if ax is None:
        ax = Figure(figsize=(7, 1.4 + 0.32 * len(table)), layout="constrained").subplots()
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if table.sum(axis=1).max() >= u), (1e-6, "µs"))
    colours = [look["facecolor"] for look in looks_of([*PARTS[:INPUT], "read"]).values()]  # as in the timeline
    longest = table.sum(axis=1).max() / unit
    for row, values in enumerate(table / unit):
        starts = accumulate(values[:-1], initial=0.0)
        for part, start, value, colour in zip(PARTS, starts, values, colours, strict=True):
            ax.barh(row, value, left=start, height=0.72, color=colour, label=part if row == 0 else None)
            if value > 0.05 * longest:
                text = f"{value / values.sum():.0%}"
                ax.text(start + value / 2, row, text, ha="center", va="center", fontsize=8, color=ink_on(colour))
    ax.set(yticks=range(len(table)), ylim=(len(table) - 0.5, -0.5), xlabel=f"{name} a step, mean over the run")
    ax.set_title("where the time of a step goes", loc="left", fontsize=11, fontweight="bold", pad=24)
    ax.set_yticklabels([f"rank {rank}" for rank in range(len(table))])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False)
    ax.legend(frameon=False, ncols=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return ax.figure
