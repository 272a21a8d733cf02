"""Where a run could go on: the state of a trainer between two steps, and how far training was.

Every member keeps its place as it trains. A death may find some in step s and others past it; the sum of a step is
there on all or comes to none, so whoever is past it has all of it, and all go on from the place of those. What ranks
have in memory together is as after that step again (sync/undo_log.py). Where a rank has what no other has, it gives
another one copies (mirrors.py). What is done after the last step (the best epoch's
weights are put back) begins anew from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from nn.training.fit import Callback, Training
from parallel.elastic.mirrors import Mirrors
from parallel.sync.base import GradientSync


class Point(NamedTuple):
    """After so many steps.

    Attributes
    ----------
    step : int
        -1 where nothing was trained.
    progress : dict
        As `Training.progress`.
    state : callable () -> dict of arrays
        As `DistributedTrainer.load_state_dict` takes it.
    everywhere : bool
        Whether all members have the state; otherwise the first one.
    """

    step: int
    progress: dict
    state: Callable[[], dict[str, np.ndarray]]
    everywhere: bool = True


class Keeper(Callback):
    """Knows where this member is; the first of the callbacks, so that it knows before anything can go wrong.

    Parameters
    ----------
    mirrors : Mirrors
        For trainers whose ranks do not have all of the state. With local updates checkpoints are used instead.
    """

    def __init__(self, mirrors: Mirrors):
        self.mirrors, self.generation = mirrors, 0
        self.point: Point | None = None  # that this attempt has begun with
        self.training: Training | None = None
        self.trains: Callable[[], None] | None = None
        self.ended = self.scattered = False

    def begin(self, generation: int, point: Point | None, trains: Callable[[], None]) -> None:
        """An attempt of so many begins, with this point; `trains` is called after its first step."""
        self.generation = generation
        self.point, self.training, self.ended, self.trains = point, None, False, trains

    def on_begin(self, training):
        self.training = training
        trainer = training.trainer
        self.scattered = trainer.scattered or trainer.local_update
        self.mirrored = trainer.scattered and not trainer.local_update and self.mirrors.every
        self._note(training)
        if self.mirrored and training.epoch < training.epochs:
            self.mirrors.take(training, self.progress, self.generation)

    def on_step(self, training, loss):
        self._note(training)
        if self.mirrored and training.trainer.steps % self.mirrored == 0:
            self.mirrors.take(training, self.progress, self.generation)
        if self.trains:
            self.trains()
            self.point = self.trains = None

    def _note(self, training: Training) -> None:
        self.progress = training.progress()

    @property
    def end(self) -> Callback:
        """A callback behind what saves the last step: this member goes on from there, no more from its own state."""
        return End(self)

    @property
    def step(self) -> int:
        """After which step this member is, and -1 where it has no state."""
        if self.ended or (self.training and self.scattered):
            return -1
        if self.training:
            return self.training.trainer.steps
        return self.point.step if self.point and self.point.everywhere else -1

    @property
    def whole(self) -> tuple[int, int]:
        """The last change of what ranks have in memory together that is whole, as this member knows."""
        return self.training.trainer.sync.last_change if self.training else GradientSync.last_change

    def here(self) -> tuple[dict, dict[str, np.ndarray]]:
        """(progress, state) of this member, where it has a step."""
        if self.training:
            return self.progress, self.training.trainer.state_dict()
        return self.point.progress, self.point.state()


class End(Callback):
    """Tells a Keeper that all that was trained is saved."""

    def __init__(self, keeper: Keeper):
        self.keeper = keeper

    def on_end(self, training):
        self.keeper.ended = True


def share(comm: MPI.Intracomm, keeper: Keeper) -> tuple[Point | None, bool]:
    """(the latest point that members have, on all; whether all steps were made, where there is none) (collective)."""
    told = comm.allgather((keeper.step, keeper.ended, bool(keeper.mirrors.copies), keeper.whole))
    steps, ended, copied, whole = zip(*told, strict=True)
    latest = max(steps)
    if latest >= 0:
        if keeper.training and keeper.step == latest:
            keeper.training.trainer.sync.detach(whole)
        return _spread(comm, keeper, steps, latest), False
    if any(ended):
        return None, True
    copies = keeper.mirrors.whole(comm) if any(copied) else None
    return Point(copies.step, copies.progress, copies.state, everywhere=False) if copies else None, False


def _spread(comm: MPI.Intracomm, keeper: Keeper, steps: Sequence[int], latest: int) -> Point:
    """The point of the members that are at the latest step, on all."""
    source = steps.index(latest)
    if set(steps) == {latest}:
        progress, state = keeper.here()
        progress = comm.bcast(progress, source)
    else:
        progress, state = keeper.here() if comm.rank == source else (None, {})
        kinds = {name: (array.shape, array.dtype.str) for name, array in state.items()}
        progress, kinds = comm.bcast((progress, kinds), source)
        state = state or {name: np.empty(shape, dtype) for name, (shape, dtype) in kinds.items()}
        for array in state.values():
            comm.Bcast([array, MPI.BYTE], source)
    return Point(latest, progress, lambda: state)
