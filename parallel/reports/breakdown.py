"""Where the time of a step goes on every rank: compute, wait, communicate, update, input; always on.

Each rank adds up how long its phases took (under a microsecond a step). What ranks do together is measured without a
meeting, which would itself cost time: the rank that comes last to a collective call waits for nobody, so of each call
the shortest duration among the ranks is communication, and what it took longer elsewhere is waiting. Once an epoch
these durations are compared, one allreduce for all steps, and the record of the epoch gets for each part the seconds a
step: the least, the mean, and the most of all ranks.
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
    """Put "breakdown" into the record of every epoch; place it before what writes records.

    A phase that lies in another is no part of it. Phases that ranks do together are told apart into wait and
    communicate; of the others those called compute, forward, backward, loss are compute; wait and update are
    what they say, all else is communicate.

    Parameters
    ----------
    trainer : RunTrainer
        Its phases are measured from now on.

    Attributes
    ----------
    table : (ranks, 5) array
        Seconds a step of every rank, in the order of PARTS: means over the steps of all epochs so far.
    """

    def __init__(self, trainer: RunTrainer):
        self.communicator = trainer.communicator
        self.thread = threading.get_ident()
        self.spent = [0.0] * len(PARTS)
        self.together: list[float] = []  # durations of the collective calls of this epoch
        self.inside = [0.0]  # time of phases that have ended, to be taken from the one around them
        for name, method, together in trainer.phases:
            wrap(trainer, method, self._meeting if together else partial(self._timed, OWN.get(name, 2)))
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

    def _meeting(self, call: Callable) -> Callable:
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
        """For Loader(timeline=): what the training thread read or waited for; reading ahead costs it nothing."""
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
        """Seconds a step of each part, an entry for every rank."""
        return {part: [float(f"{v:.4g}") for v in column] for part, column in zip(PARTS, self.table.T, strict=True)}

    def _clear(self) -> None:
        self.spent[:] = [0.0] * len(PARTS)
        self.together.clear()

    def _compare(self) -> np.ndarray:
        """(ranks, 5) seconds of this epoch; phases that ranks did together are split into wait and communicate."""
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
    """trainer.method = around(trainer.method), for this trainer alone; of one of its parts for "part.method"."""
    path, _, name = method.rpartition(".")
    owner = attrgetter(path)(trainer) if path else trainer
    setattr(owner, name, around(getattr(owner, name)))


def spread(values: np.ndarray) -> list[tuple[str, float]]:
    """The least, the mean and the most, by name."""
    return [("min", values.min()), ("mean", values.mean()), ("max", values.max())]


def draw_breakdown(table: np.ndarray, ax=None):
    """Stacked bars: for every rank, where the time of a step goes, with the shares of the larger parts.

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
