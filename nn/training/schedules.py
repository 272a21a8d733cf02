"""Schedules that listen to training, and every schedule by its name, as the command line has it.

`Plateau` follows an entry of the epochs' records; a resumed run replays the history. `MomentumCorrection` goes with any
schedule. `parse` reads texts such as "cosine:warmup=5", whose times are in epochs.

Source: Goyal et al. 2017 (linear scaling, gradual warm-up, momentum correction).
"""

from __future__ import annotations

import math

import numpy as np

from nn import option_strings
from nn.arguments import COUNT, NOT_NEGATIVE, Configured, Number, OneOf, Optional
from nn.metrics import MODES, direction
from nn.optim.learning_rates import RATE, Epochs, Schedule, Warmup, linear_scaling
from nn.registry import lookup, option_types, register
from nn.training.training import Callback


@register("schedule", "plateau")
class Plateau(Configured, Callback):
    """Multiply lr by `factor` when `metric` has not improved for more than `patience` epochs.

    A schedule and a callback: `fit` takes it as either, and uses it as both.

    Parameters
    ----------
    lr : float
    factor : float
        In (0, 1).
    patience : int
        Epochs without improvement that change nothing.
    metric : str
        Entry of an epoch's record, such as "validation_loss", "validation_accuracy", or "loss" (of training).
    threshold : float
        Smallest relative change that counts as an improvement.
    mode : {"min", "max"} or None
        Whether smaller or larger is better; None: as the metric says (`nn.metrics.direction`).

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> plateau = nn.callbacks.Plateau(lr=0.1, patience=2, metric="validation_loss")
    >>> training = nn.fit(trainer, (x, y), 3, plateau, validation=(x, y))
    >>> plateau(0)
    0.1
    """

    constraints = {
        "lr": RATE,
        "factor": Number(above=0, below=1),
        "patience": COUNT,
        "threshold": NOT_NEGATIVE,
        "mode": Optional(OneOf(MODES)),
    }

    def __init__(
        self,
        lr: float,
        factor: float = 0.1,
        patience: int = 10,
        metric: str = "validation_loss",
        threshold: float = 1e-4,
        mode: str | None = None,
    ):
        self.lr, self.factor, self.patience, self.metric, self.threshold = lr, factor, patience, metric, threshold
        self.mode = mode
        self.restart()

    def __call__(self, step: int) -> float:
        return self.now

    def restart(self) -> None:
        """Start with the initial rate, as before the first epoch."""
        self.now, self.bad_epochs, self.best_value = self.lr, 0, None

    def observe(self, value: float, mode: str | None = None) -> None:
        """Take an epoch's metric, and lower the rate if it is time; `mode` None: as `direction` says."""
        mode = mode or direction(self.metric, self.mode)
        finite = self.best_value is not None and math.isfinite(self.best_value)
        margin = abs(self.best_value) * self.threshold if finite else 0.0
        if self.best_value is None:
            better = not math.isnan(value)
        else:
            better = value < self.best_value - margin if mode == "min" else value > self.best_value + margin
        if better:
            self.best_value, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.patience:
            self.now, self.bad_epochs = self.now * self.factor, 0

    def on_begin(self, training):
        self.restart()
        training.direction(self.metric, self.mode)  # an unknown direction is refused before the first epoch
        for record in training.history:  # of a resumed run
            self.on_epoch(training, record)

    def on_epoch(self, training, record):
        if self.metric not in record:
            raise ValueError(
                f"Plateau: {self.metric!r} is not in the record ({', '.join(record)}): no validation data?"
            )
        self.observe(record[self.metric], training.direction(self.metric, self.mode))


class MomentumCorrection(Callback):
    """Multiply velocities by new rate / old rate when a schedule changes the rate.

    It is for optimizers whose velocity includes the rate, as that of LARS does: v = m v + lr g. They name the slots in
    `rate_inside`. With the correction a new rate acts at once on the whole velocity, exactly as in SGD, where the rate
    stays outside (Goyal et al. 2017). Put it after a `Plateau`, and before the callback that writes checkpoints.

    Parameters
    ----------
    schedule : callable (step) -> rate

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.Warmup(nn.schedules.Constant(1.0), steps=5)
    >>> callbacks = [nn.callbacks.MomentumCorrection(schedule)]  # with nn.fit(..., schedule=schedule)
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def on_begin(self, training):
        self.lr = self.schedule(training.step)  # the velocity of a checkpoint is corrected already

    def on_step(self, training, loss):
        trainer, lr = training.trainer, self.schedule(training.step)
        if self.lr and self.lr != lr:  # after a rate of 0 the velocity has nothing to correct
            for name in trainer.optimizer.rate_inside:
                trainer.rescale(name, lr / self.lr)
        self.lr = lr

    def on_epoch(self, training, record):
        self.on_step(training, 0.0)


COMMON_KEYS = {"warmup": float, "warmup_from": float, "base_batch": int}
TOO_LARGE = 1e9  # for any number: steps are counted in integers


def parse(
    text: str, lr: float, epochs: int, steps_per_epoch: int, batch: int | None = None
) -> tuple[Schedule, list[Callback]]:
    """Return the schedule that a text names, and the callbacks that it needs.

    Parameters
    ----------
    text : str
        NAME or NAME:KEY=VALUE,KEY=VALUE such as "cosine:warmup=5" or "multistep:at=30/60/80,warmup=5,base_batch=256".
        Names and their keys: constant; step (every, factor); multistep (at, factor); exponential (factor an epoch);
        polynomial (power, end); cosine (end); plateau (factor, patience, metric). Keys of all: warmup (epochs),
        warmup_from (rate it starts from), base_batch (batch size for which `lr` is meant: scales it linearly, and
        warm-up starts from the unscaled rate). Times are in epochs, fractions allowed.
    lr : float
    epochs, steps_per_epoch : int
    batch : int or None
        Global batch size, for base_batch.

    Raises
    ------
    ValueError
        The message says which part of the text is wrong, and what it may be.

    Examples
    --------
    >>> import nn
    >>> schedule, callbacks = nn.schedules.parse("cosine:warmup=1", 0.1, epochs=5, steps_per_epoch=10)
    >>> round(schedule(10), 3), callbacks
    (0.1, [])
    """
    name, parts = option_strings.split(text)
    try:
        kind = lookup("schedule", name)
        make = getattr(kind, "in_epochs", lambda epochs, lr, **keys: kind(lr, **keys))
        types = option_types(getattr(kind, "in_epochs", kind))
        types.pop("lr", None)
        keys = _in_range(option_strings.convert(name, parts, types | COMMON_KEYS, positional=False))
        start = keys.pop("warmup_from", lr if "base_batch" in keys else 0.0)
        warmup, base_batch = keys.pop("warmup", 0.0), keys.pop("base_batch", None)
        times = Epochs(epochs, steps_per_epoch, warmup)
        if base_batch is not None:
            if batch is None:
                raise ValueError("base_batch needs the batch size")
            lr = linear_scaling(lr, batch, base_batch)
        schedule = make(times, lr, **keys)
    except ValueError as error:
        raise ValueError(f"learning rate {text!r}: {error}") from error
    callbacks = [schedule] if isinstance(schedule, Callback) else []
    steps = times.steps(warmup)
    return (Warmup(schedule, steps, start) if steps else schedule), callbacks


def _in_range(keys: dict) -> dict:
    """Return the keys; ValueError where a number is out of range."""
    for key, value in keys.items():
        if not isinstance(value, str) and not all(0 <= number < TOO_LARGE for number in np.atleast_1d(value)):
            raise ValueError(f"{key} must be at least 0 and below {TOO_LARGE:g}, given {value}")
    return keys
