"""Where a run could go on: the state of a trainer between two steps, and how far training was.

Every member keeps its place as it trains. A death may find some in step s and others past it; the sum of a step is
there on all or comes to none, so whoever is past it has all of it, and all go on from the place of those. What is done
after the last step (the best epoch's weights are put back) begins anew from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from nn.training.fit import Callback, Training


class Point(NamedTuple):
    """After so many steps.

    Attributes
    ----------
    step : int
        -1 where nothing was trained.
    progress : dict
        As `Training.progress`.
    state : dict of arrays
        As `Trainer.state`.
    """

    step: int
    progress: dict
    state: dict[str, np.ndarray]


class Keeper(Callback):
    """Knows where this member is; the first of the callbacks, so that it knows before anything can go wrong."""

    def __init__(self):
        self.point: Point | None = None  # that this attempt has begun with
        self.training: Training | None = None
        self.trains: Callable[[], None] | None = None
        self.ended = False

    def begin(self, point: Point | None, trains: Callable[[], None] = lambda: None) -> None:
        """An attempt begins, with this; `trains` is called after its first step."""
        self.point, self.training, self.ended, self.trains = point, None, False, trains

    def on_begin(self, training):
        self.training = training
        self._note(training)

    def on_step(self, training, loss):
        self._note(training)
        if self.trains:
            self.trains()
            self.point = self.trains = None

    def on_end(self, training):
        self.ended = True

    def _note(self, training: Training) -> None:
        self.progress = training.progress() | {"history": training.history[:]}

    @property
    def step(self) -> int:
        """After which step this member is, and -1 where it has no state."""
        if self.training and not self.ended:
            return self.training.trainer.steps
        return self.point.step if self.point and not self.ended else -1

    def here(self) -> Point | None:
        """The state of this member; None where it has none."""
        if self.training and not self.ended:
            trainer = self.training.trainer
            return Point(trainer.steps, self.progress, trainer.state())
        return None if self.ended else self.point


def share(comm: MPI.Intracomm, keeper: Keeper) -> tuple[Point | None, bool]:
    """(the latest point that a member has, on all; whether all steps were made, where there is none) (collective)."""
    told = comm.allgather((keeper.step, keeper.ended))
    latest = max(step for step, _ in told)
    if latest < 0:
        return None, any(ended for _, ended in told)
    source = next(rank for rank, (step, _) in enumerate(told) if step == latest)
    mine = keeper.here() if comm.rank == source or all(step == latest for step, _ in told) else None
    if all(step == latest for step, _ in told):
        return mine._replace(progress=comm.bcast(mine.progress, source)), False
    progress, kinds = comm.bcast(
        (mine.progress, {name: (a.shape, a.dtype.str) for name, a in mine.state.items()}) if mine else None, source
    )
    state = mine.state if mine else {name: np.empty(shape, dtype) for name, (shape, dtype) in kinds.items()}
    for array in state.values():
        comm.Bcast([array, MPI.BYTE], source)
    return Point(latest, progress, state), False
