"""Checkpoints while training goes on.

KeepCheckpoints decides when, and under which names; the trainer's CheckpointWriter writes (checkpoint_writer.py).
"""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Sequence

from nn.arguments import COUNT, Optional
from nn.training.callbacks import BestEpoch
from nn.training.checkpoints import Checkpoints, check_checkpoints
from nn.training.training import Callback, Training


class Terminated(RuntimeError):
    """Training was asked to end, by SIGTERM: it has, and what it has learned is saved."""


class Termination:
    """A request to end: once started, SIGTERM, or SIGHUP of a closed terminal, sets `requested`.

    A second signal does what it does elsewhere. SIGHUP is left alone where it is ignored, as by nohup.
    """

    def __init__(self):
        self.requested, self._before = False, {}

    def __enter__(self) -> Termination:
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def start(self) -> bool:
        """Handle these signals from now on; only the main thread can. Return whether this call installed handlers."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return False
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask) or signal.SIG_DFL
        return True

    def stop(self) -> None:
        """Put back the handlers of before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number, frame) -> None:
        if self.requested:
            self.stop()
            signal.raise_signal(number)
        self.requested = True


class KeepCheckpoints(Callback):
    """Save after every epoch, and the best epoch's once more as "best".

    Parameters
    ----------
    checkpoints : Checkpoints
    steps : int or None
        Also save within an epoch, whenever this number of steps has been made.
    best : str or None
        The record's entry that decides, such as "validation_accuracy"; without validation data there is no best.
    mode : {"min", "max"} or None
        Whether smaller or larger is better; None: as the metric says (`nn.metrics.direction`).
    background : bool
        Whether a thread writes, while training goes on: the files are the same, and at the end of training, and before
        the next save, they are there.
    termination : Termination or None
        Where it is asked for, save and end.

    Raises
    ------
    OSError, CheckpointError, FloatingPointError
        A checkpoint cannot be written, or a parameter is not finite; of a thread, after one of the next steps.
    Terminated
        After a checkpoint.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> directory = tempfile.TemporaryDirectory()
    >>> checkpoints = nn.Checkpoints(directory.name)
    >>> training = nn.fit(trainer, (x, y), 3, nn.KeepCheckpoints(checkpoints, best=None))
    >>> [entry["file"] for entry in checkpoints.entries()]
    ['step-00000002.npz', 'step-00000003.npz']
    >>> directory.cleanup()
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        steps: int | None = None,
        best: str | None = "validation_accuracy",
        background: bool = False,
        termination: Termination | None = None,
        mode: str | None = None,
    ):
        check_checkpoints("KeepCheckpoints", checkpoints)
        Optional(COUNT)("KeepCheckpoints: steps", steps)
        self.checkpoints, self.steps, self.background, self.termination = checkpoints, steps, background, termination
        self.best_epoch = None if best is None else BestEpoch("KeepCheckpoints", best, mode)
        self.writer, self._handles_signals = None, False

    def on_begin(self, training):
        if self.best_epoch is not None:
            self.best_epoch.check_direction(training)
        self.writer = training.trainer.checkpoint_writer(self.checkpoints, self.background)
        if self.termination:
            self._handles_signals = self.termination.start()

    def on_step(self, training, loss):
        if saves := bool(self.steps) and training.trainer.steps % self.steps == 0:
            self._save(training)
        self._poll(training, saves)

    def on_epoch(self, training, record):
        measured = self.best_epoch is not None and self.best_epoch.metric in record
        is_best = measured and self.best_epoch.find(training) == training.epoch
        # The best first: a run killed after it makes this epoch again, and finds it the best.
        self._save(training, ("best", None) if is_best else (None,))
        self._poll(training, True)

    def on_end(self, training):
        self.finish()
        self._poll(training, True)
        if self.termination:
            self.termination.stop()

    def on_abort(self, training):
        if self._handles_signals:  # else whoever started the termination before may go on, as recovery does
            self.termination.stop()

    def finish(self) -> None:
        """Return when all that was to be saved is; raise what went wrong."""
        if self.writer:
            self.writer.finish()

    def wait(self) -> None:
        """Return when this process writes no more."""
        if self.writer:
            self.writer.wait()

    def _poll(self, training: Training, saved: bool) -> None:
        """Raise errors of the background write; end training after SIGTERM. `saved`: a save was just begun."""
        if self.writer.poll(self.termination and self.termination.requested, saved):
            if not saved:
                self._save(training)
            self.finish()
            raise Terminated(f"ended by SIGTERM after step {training.trainer.steps}, which is saved")

    def _save(self, training: Training, names: Sequence[str | None] = (None,)) -> None:
        """Start a save; finish it unless `background`."""
        training.synchronize()
        self.writer.save(copy.deepcopy(training.progress()), names)
