"""The progress of a run of `fit`, and what `fit` calls while it trains: `Training` and `Callback`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field

from nn.arguments import Closed
from nn.metrics import direction
from nn.training.state import LARGEST_COUNT
from nn.training.trainer import Trainer

PROGRESS = ("epoch", "batch", "loss_sum", "samples", "seconds", "history", "weight", "first_epoch", "first_step")


@dataclass(repr=False)
class Training(Closed):
    """The progress of a run of `fit`: callbacks read it, checkpoints keep it.

    Attributes
    ----------
    history : list of dict
        One record an epoch: epoch, step, loss (mean over the epoch), lr (of its last step), images_per_second, seconds
        (since training began). With validation data also validation_loss, validation_accuracy where there are classes,
        and one value for each of `metrics`. In mixed precision also loss_scale and skipped_steps.
    stop : bool
        A callback sets it to end training after this epoch, in all processes alike: decide from the history.
    result : dict
        Loss and accuracy on the test data, after training; empty without test data.
    first_epoch, first_step : int
        Epochs and steps that the trainer had made before this run: the order of samples continues from there.
    restored : int or None
        The epoch whose state a callback has restored after training; None: the trainer's is that of the last epoch.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> training = nn.fit(trainer, (x, y), epochs=2, batch=3)
    >>> training.epoch, training.step, sorted(training.history[0])
    (2, 2, ['epoch', 'images_per_second', 'loss', 'lr', 'seconds', 'step'])
    """

    trainer: Trainer
    train: object
    epochs: int
    validation: object = None
    epoch: int = 0  # epochs finished
    batch: int = 0  # batches of the current epoch finished
    loss_sum: float = 0.0
    samples: int = 0
    seconds: float = 0.0  # spent training, earlier runs included
    history: list[dict] = field(default_factory=list)
    stop: bool = False
    result: dict = field(default_factory=dict)
    weight: float = 0.0  # of the losses in loss_sum: samples, or their total weight
    first_epoch: int = 0
    first_step: int = 0
    restored: int | None = None

    def __repr__(self) -> str:
        last = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in self.result.items()}
        if not last and self.history:
            last = {name: f"{value:.4g}" for name, value in self.history[-1].items() if "loss" in name or "acc" in name}
        scores = "".join(f", {name}={value}" for name, value in last.items())
        restored = f", restored epoch {self.restored}" if self.restored else ""
        return f"Training({self.epoch} of {self.epochs} epochs, {self.trainer.steps} steps{restored}{scores})"

    @property
    def epoch_steps(self) -> int:
        """Steps in an epoch; 0 where the data have no length."""
        return len(self.train) if isinstance(self.train, Sized) else 0

    @property
    def step(self) -> int:
        """Steps of this run, including those before a resume: what schedules count."""
        return self.trainer.steps - self.first_step

    def direction(self, metric: str, mode: str | None = None) -> str:
        """Return "min" or "max": whether a smaller or larger value of a record is better (`nn.metrics.direction`)."""
        return direction(metric, mode, self.trainer.metrics)

    def synchronize(self) -> None:
        """Synchronize shards of a local-update method: at the end of an epoch, or before a checkpoint."""
        self.loss_sum = self.trainer.synchronize(self.loss_sum)

    def progress(self) -> dict:
        """Return what a checkpoint keeps beside the trainer's state, for `fit(progress=...)`."""
        progress = {key: getattr(self, key) for key in PROGRESS} | {"history": self.history[: self.restored]}
        if self.restored:
            progress |= {"epoch": self.restored, "seconds": self.history[self.restored - 1]["seconds"]}
        return progress


class Callback:
    """Base of what `fit` calls while it trains.

    Every process calls its callbacks, in the same order: print and write files only if `training.trainer.is_writer`.

    Examples
    --------
    >>> import nn
    >>> class Losses(nn.Callback):
    ...     def on_epoch(self, training, record):
    ...         print(record["epoch"], record["loss"])
    """

    def on_begin(self, training: Training) -> None:
        """Called before the first step; `training.history` has the epochs before a resume."""

    def on_step(self, training: Training, loss: float) -> None:
        """Called after a step; `loss` is the mean over the global batch, before the update."""

    def on_epoch(self, training: Training, record: dict) -> None:
        """Called after an epoch; values may be added to `record`, the last of `training.history`."""

    def on_end(self, training: Training) -> None:
        """Called after the last epoch, before the test data are evaluated."""

    def on_abort(self, training: Training) -> None:
        """Called where training ends with an error: undo what `on_begin` has changed outside of this callback."""


def check_progress(progress: Mapping, batches: int | None = None) -> None:
    """Refuse a progress that no training has, as in a checkpoint that was edited.

    Parameters
    ----------
    progress : mapping
        As `Training.progress` returns it; missing numbers are 0.
    batches : int or None
        Batches of an epoch, where known.

    Raises
    ------
    ValueError
        The first wrong value, in one line.
    """

    def refuse(what: str, given: object) -> None:
        try:
            shown = f"{given!r:.80}"
        except ValueError:  # an integer of thousands of digits
            shown = "a number that is too long to be shown"
        raise ValueError(f"the progress of a training: {what}, given {shown}: was the checkpoint edited?")

    def is_number(value: object, kinds: type = int | float) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool)

    if unknown := sorted(map(str, progress.keys() - set(PROGRESS))):
        refuse(f"it has {', '.join(PROGRESS)}", unknown[0])
    for name, most in (
        ("epoch", LARGEST_COUNT),
        ("batch", LARGEST_COUNT if batches is None else batches),
        ("first_epoch", LARGEST_COUNT),
        ("first_step", LARGEST_COUNT),
    ):
        if not is_number(value := progress.get(name, 0), int) or not 0 <= value <= most:
            refuse(f"{name} must be a whole number in 0 .. {most}", value)
    for name, most in (
        ("samples", LARGEST_COUNT),
        ("weight", LARGEST_COUNT),
        ("seconds", LARGEST_COUNT),
        ("loss_sum", math.inf),
    ):
        if not is_number(value := progress.get(name, 0)) or (name != "loss_sum" and not 0 <= value <= most):
            refuse(f"{name} must be a number, not negative", value)
    history, epochs = progress.get("history", []), progress.get("epoch", 0)
    if not isinstance(history, list) or len(history) != epochs:
        refuse(f"history must be a list of the records of epoch {epochs} and those before it", history)
    for epoch, record in enumerate(history, 1):
        if not isinstance(record, dict) or record.get("epoch") != epoch:
            refuse(f"history must have a record of epoch {epoch}", record)
        for name in ("step", "loss", "seconds", *(key for key in record if str(key).startswith("validation_"))):
            if not is_number(value := record.get(name)) or (
                name != "loss" and is_number(value, int) and value > LARGEST_COUNT
            ):
                refuse(f"{name} of epoch {epoch} must be a number", value)
