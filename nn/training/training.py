"""Where a run of `fit` stands, and what it calls while it trains: `Training` and `Callback`."""

from __future__ import annotations

from dataclasses import dataclass, field

from nn.metrics import direction
from nn.training.trainer import Trainer

PROGRESS = ("epoch", "batch", "loss_sum", "samples", "seconds", "history", "weight", "first_epoch", "first_step")


@dataclass(repr=False)
class Training:
    """Where a run of `fit` stands; callbacks read it, checkpoints keep it.

    Attributes
    ----------
    history : list of dict
        One record an epoch: epoch, step, loss (mean over the epoch), lr (of its last step), images_per_second, seconds;
        with validation data also validation_loss, validation_accuracy where there are classes, and one entry for each
        of `metrics`; in mixed precision also loss_scale and skipped_steps.
    stop : bool
        A callback sets it to end after this epoch (alike on all ranks: decide from the history).
    result : dict
        Loss and accuracy on the test data, once training has ended; empty without test data.
    first_epoch, first_step : int
        Epochs and steps that the trainer had made before this run: the order of samples goes on from there.
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

    def __repr__(self) -> str:
        last = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in self.result.items()}
        if not last and self.history:
            last = {name: f"{value:.4g}" for name, value in self.history[-1].items() if "loss" in name or "acc" in name}
        scores = "".join(f", {name}={value}" for name, value in last.items())
        return f"Training({self.epoch} of {self.epochs} epochs, {self.trainer.steps} steps{scores})"

    @property
    def step(self) -> int:
        """Steps of this run, those before a resume included: what schedules count."""
        return self.trainer.steps - self.first_step

    def direction(self, metric: str, mode: str | None = None) -> str:
        """Return "min" or "max": which way an entry of the records gets better. See `nn.metrics.direction`."""
        return direction(metric, mode, self.trainer.metrics)

    def meet(self) -> None:
        """Shards that train apart come together, with one loss: where an epoch ends, or a checkpoint is kept."""
        self.loss_sum = self.trainer.meet(self.loss_sum)

    def progress(self) -> dict:
        """What a checkpoint keeps beside the trainer's state."""
        return {key: getattr(self, key) for key in PROGRESS} | {"history": self.history[:]}


class Callback:
    """Told what happens; every rank calls its callbacks alike, so only `trainer.writer` should print or write."""

    def on_begin(self, training: Training) -> None:
        """Before the first step; `training.history` holds the epochs of a run that is continued."""

    def on_step(self, training: Training, loss: float) -> None:
        """After a step; `loss` is the mean over the global batch, before the step."""

    def on_epoch(self, training: Training, record: dict) -> None:
        """After an epoch; `record`, the last of `training.history`, may be added to."""

    def on_end(self, training: Training) -> None:
        """After the last epoch, and before the test data are looked at."""
