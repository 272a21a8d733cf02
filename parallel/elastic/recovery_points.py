"""Recovery points: the state of a trainer between two steps, from which a run can continue.

Every member tracks its step. When a rank dies some members may be in step s and others past it; the sum of a step
reaches all ranks or none, so a member past the step has all of it, and all continue from there. Memory that ranks
share is restored to the end of that step (sync/undo_log.py). State that one rank alone has is copied to another one
(partner_checkpoints.py). What follows the last step (restoring the best epoch's weights) starts again from the last
checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from nn.training.fit import Callback, Training
from parallel.elastic.partner_checkpoints import PartnerCheckpoints
from parallel.sync.base import GradientSync


class RecoveryPoint(NamedTuple):
    """The state after a number of steps.

    Attributes
    ----------
    step : int
        -1 if nothing was trained.
    progress : dict
        As `Training.progress`.
    state : callable () -> dict of arrays
        For `DistributedTrainer.load_state_dict`.
    everywhere : bool
        Whether all members have the state; otherwise the first one.
    """

    step: int
    progress: dict
    state: Callable[[], dict[str, np.ndarray]]
    everywhere: bool = True


class StepTracker(Callback):
    """Tracks the step of this member; the first of the callbacks, so that it knows before anything can go wrong.

    Parameters
    ----------
    partners : PartnerCheckpoints
        For trainers whose ranks do not have all of the state; local-update strategies use checkpoints instead.
    """

    def __init__(self, partners: PartnerCheckpoints):
        self.partners, self.generation = partners, 0
        self.point: RecoveryPoint | None = None  # that this attempt has begun with
        self.training: Training | None = None
        self.trains: Callable[[], None] | None = None
        self.ended = self.scattered = False

    def start_attempt(self, generation: int, point: RecoveryPoint | None, trains: Callable[[], None]) -> None:
        """Start an attempt with this point; `trains` is called after its first step."""
        self.generation = generation
        self.point, self.training, self.ended, self.trains = point, None, False, trains

    def on_begin(self, training):
        self.training = training
        trainer = training.trainer
        self.scattered = trainer.scattered or trainer.local_update
        self.partner_interval = trainer.scattered and not trainer.local_update and self.partners.every
        self._record(training)
        if self.partner_interval and training.epoch < training.epochs:
            self.partners.copy(training, self.progress, self.generation)

    def on_step(self, training, loss):
        self._record(training)
        if self.partner_interval and training.trainer.steps % self.partner_interval == 0:
            self.partners.copy(training, self.progress, self.generation)
        if self.trains:
            self.trains()
            self.point = self.trains = None

    def _record(self, training: Training) -> None:
        self.progress = training.progress()

    @property
    def end(self) -> Callback:
        """Return a callback that follows the last checkpoint: from then on a run continues from that."""
        return End(self)

    @property
    def step(self) -> int:
        """Return the number of steps that this member has trained; -1 if it has no state."""
        if self.ended or (self.training and self.scattered):
            return -1
        if self.training:
            return self.training.trainer.steps
        return self.point.step if self.point and self.point.everywhere else -1

    @property
    def whole(self) -> tuple[int, int]:
        """Return the last change of shared memory that is complete, as this member knows."""
        return self.training.trainer.sync.last_change if self.training else GradientSync.last_change

    def own_state(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Return (progress, state) of this member, which has trained."""
        if self.training:
            return self.progress, self.training.trainer.state_dict()
        return self.point.progress, self.point.state()


class End(Callback):
    """Records in a StepTracker that all training is saved."""

    def __init__(self, tracker: StepTracker):
        self.tracker = tracker

    def on_end(self, training):
        self.tracker.ended = True
        sys.audit("ringprop.end_training", training.trainer)


def share(comm: MPI.Intracomm, tracker: StepTracker) -> tuple[RecoveryPoint | None, bool]:
    """Return (the latest point of any member, on all; if there is none, whether all steps were made) (collective)."""
    members = comm.allgather((tracker.step, tracker.ended, bool(tracker.partners.copies), tracker.whole))
    steps, ended, copied, whole = zip(*members, strict=True)
    latest = max(steps)
    if latest >= 0:
        if tracker.training and tracker.step == latest:
            tracker.training.trainer.sync.detach(whole)
        return _spread(comm, tracker, steps, latest), False
    if any(ended):
        return None, True
    copies = tracker.partners.latest(comm) if any(copied) else None
    return RecoveryPoint(copies.step, copies.progress, copies.state, everywhere=False) if copies else None, False


def _spread(comm: MPI.Intracomm, tracker: StepTracker, steps: Sequence[int], latest: int) -> RecoveryPoint:
    """Return the point of the members at the latest step, on all."""
    source = steps.index(latest)
    if set(steps) == {latest}:
        progress, state = tracker.own_state()
        progress = comm.bcast(progress, source)
    else:
        progress, state = tracker.own_state() if comm.rank == source else (None, {})
        kinds = {name: (array.shape, array.dtype.str) for name, array in state.items()}
        progress, kinds = comm.bcast((progress, kinds), source)
        state = state or {name: np.empty(shape, dtype) for name, (shape, dtype) in kinds.items()}
        for array in state.values():
            comm.Bcast([array, MPI.BYTE], source)
    return RecoveryPoint(latest, progress, lambda: state)
