"""Learning rates: functions from the optimizer's step (0, 1, 2, ...) to a rate.

    fit(trainer, data, epochs=90, schedule=Warmup(MultiStep(3.2, (3000, 6000, 8000)), 500, start=0.1))

All count in steps from the start of training, and none keeps anything, so a resumed run needs nothing to go on with;
`Plateau` alone listens to what `fit` measures, and finds its place from the history. `parse` reads a schedule from the
command line, where everything counts in epochs.

Sources: Goyal et al. 2017 (linear scaling, gradual warm-up, momentum correction); Loshchilov and Hutter 2017 (cosine).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nn.training import Callback

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """lr, always."""

    lr: float

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class Step:
    """lr times `factor` once more after every `every` steps."""

    lr: float
    every: int
    factor: float = 0.1

    def __post_init__(self):
        _at_least_one(self, every=self.every)

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** (step // self.every)


@dataclass(frozen=True)
class MultiStep:
    """lr times `factor` once more from each of the steps `at` on."""

    lr: float
    at: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self):
        if list(self.at) != sorted(self.at):
            raise ValueError(f"MultiStep: the steps must ascend, given {self.at}")

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** bisect_right(self.at, step)


@dataclass(frozen=True)
class Exponential:
    """lr factor^(step / every): smooth, `factor` in every `every` steps."""

    lr: float
    factor: float = 0.95
    every: int = 1

    def __post_init__(self):
        _at_least_one(self, every=self.every)

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** (step / self.every)


@dataclass(frozen=True)
class Polynomial:
    """From lr at step `begin` to `end` at step `steps` as (1 - t)^power, t from 0 to 1; linear for power 1."""

    lr: float
    steps: int
    power: float = 1.0
    end: float = 0.0
    begin: int = 0

    def __post_init__(self):
        _at_least_one(self, steps=self.steps - self.begin)

    def __call__(self, step: int) -> float:
        return self.end + (self.lr - self.end) * (1 - _part(step, self.begin, self.steps)) ** self.power


@dataclass(frozen=True)
class Cosine:
    """From lr at step `begin` to `end` at step `steps` as half a cosine wave."""

    lr: float
    steps: int
    end: float = 0.0
    begin: int = 0

    def __post_init__(self):
        _at_least_one(self, steps=self.steps - self.begin)

    def __call__(self, step: int) -> float:
        wave = (1 + math.cos(math.pi * _part(step, self.begin, self.steps))) / 2
        return self.end + (self.lr - self.end) * wave


@dataclass(frozen=True)
class Warmup:
    """In front of any schedule: from `start` to its rate at step `steps`, in equal increments a step.

    The schedule's own steps count from the start of training, warm-up included.
    """

    schedule: Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self):
        _at_least_one(self, steps=self.steps)

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.schedule(step)
        return self.start + (self.schedule(self.steps) - self.start) * (step / self.steps)


class Plateau(Callback):
    """lr times `factor` when `metric` has not improved for more than `patience` epochs. Also a callback of `fit`.

    Parameters
    ----------
    lr : float
    factor : float
        In (0, 1).
    patience : int
        Epochs without improvement to put up with.
    metric : str
        Entry of an epoch's record: "loss" or "test_loss" (smaller is better), "accuracy" (larger is better).
    threshold : float
        Relative change that counts as an improvement.
    """

    def __init__(
        self,
        lr: float,
        factor: float = 0.1,
        patience: int = 10,
        metric: str = "test_loss",
        threshold: float = 1e-4,
    ):
        if not 0 < factor < 1 or patience < 0:
            raise ValueError(
                f"Plateau: factor must be in (0, 1) and patience not negative, given {factor} and {patience}"
            )
        self.lr, self.factor, self.patience, self.metric, self.threshold = lr, factor, patience, metric, threshold
        self.restart()

    def __repr__(self):
        return f"Plateau(lr={self.lr}, factor={self.factor}, patience={self.patience}, metric={self.metric!r})"

    def __call__(self, step: int) -> float:
        return self.now

    def restart(self) -> None:
        """Forget all that was observed."""
        self.now, self.bad_epochs, self.best = self.lr, 0, math.inf if self.metric.endswith("loss") else -math.inf

    def observe(self, value: float) -> None:
        """Take note of an epoch's metric."""
        smaller = self.metric.endswith("loss")
        margin = abs(self.best) * self.threshold if math.isfinite(self.best) else 0.0
        if value < self.best - margin if smaller else value > self.best + margin:
            self.best, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.patience:
            self.now, self.bad_epochs = self.now * self.factor, 0

    def on_begin(self, training):
        self.restart()
        for record in training.history:  # of a resumed run
            self.on_epoch(training, record)

    def on_epoch(self, training, record):
        if self.metric not in record:
            raise ValueError(f"Plateau: {self.metric!r} is not in the record ({', '.join(record)}): no test data?")
        self.observe(record[self.metric])


class MomentumCorrection(Callback):
    """v *= lr / lr before, whenever a schedule changes the rate, for optimizers whose velocity has the rate inside.

    Which buffers these are, an optimizer says in `rate_inside`; LARS has one: v = m v + lr g. With the correction a new
    rate acts at once on all that has been gathered, exactly as where the rate stays outside, as in SGD (Goyal et al.
    2017). Place it after a schedule that listens (`Plateau`), and before checkpoints are written.

    Parameters
    ----------
    schedule : callable (step) -> rate
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def on_begin(self, training):
        self.lr = self.schedule(training.trainer.steps)  # a checkpoint holds what is corrected already

    def on_step(self, training, loss):
        trainer, lr = training.trainer, self.schedule(training.trainer.steps)
        if self.lr and self.lr != lr:  # a rate of 0 has put nothing into the velocity
            for name in trainer.optimizer.rate_inside:
                trainer.rescale(name, lr / self.lr)
        self.lr = lr

    def on_epoch(self, training, record):
        self.on_step(training, 0.0)


def linear_scaling(lr: float, batch: int, base_batch: int) -> float:
    """The rate for a batch of another size: k times the batch, k times the rate (Goyal et al. 2017)."""
    if base_batch < 1:
        raise ValueError(f"linear scaling: the base batch must be at least 1, given {base_batch}")
    return lr * batch / base_batch


def parse(
    text: str, lr: float, epochs: int, steps_per_epoch: int, batch: int | None = None
) -> tuple[Schedule, list[Callback]]:
    """A schedule from the command line, and the callbacks that it needs.

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
        Which part of the text is wrong, and what it may be.
    """
    name, _, rest = text.partition(":")
    if name not in KEYS:
        raise ValueError(f"learning rate {text!r}: unknown schedule {name!r}; there are {', '.join(KEYS)}")
    given = _options(text, name, rest)

    def steps(epochs: float) -> int:
        return round(epochs * steps_per_epoch)

    warmup = steps(warmup_epochs := given.pop("warmup", 0))
    start = given.pop("warmup_from", lr if "base_batch" in given else 0.0)
    base_batch = given.pop("base_batch", None)
    if name in ("cosine", "polynomial"):
        if warmup and warmup >= steps(epochs):
            raise ValueError(f"learning rate {text!r}: {warmup_epochs:g} epochs of warm-up leave none of {epochs}")
        given |= {"steps": steps(epochs), "begin": warmup}
    elif name == "exponential":
        given["every"] = steps_per_epoch
    elif name == "step":
        given["every"] = steps(given.get("every", 30))
    elif name == "multistep":
        given["at"] = tuple(steps(epoch) for epoch in given.get("at", (30, 60, 80)))
    try:
        if base_batch is not None:
            if batch is None:
                raise ValueError("base_batch needs the batch size")
            lr = linear_scaling(lr, batch, base_batch)
        schedule = KINDS[name](lr, **given)
        callbacks = [schedule] if isinstance(schedule, Plateau) else []
        return (Warmup(schedule, warmup, start) if warmup else schedule), callbacks
    except ValueError as error:
        raise ValueError(f"learning rate {text!r}: {error}") from error


KINDS = {
    "constant": Constant,
    "step": Step,
    "multistep": MultiStep,
    "exponential": Exponential,
    "polynomial": Polynomial,
    "cosine": Cosine,
    "plateau": Plateau,
}
KEYS = {
    "constant": (),
    "step": ("every", "factor"),
    "multistep": ("at", "factor"),
    "exponential": ("factor",),
    "polynomial": ("power", "end"),
    "cosine": ("end",),
    "plateau": ("factor", "patience", "metric"),
}
FOR_ALL = ("warmup", "warmup_from", "base_batch")
WHOLE = ("patience", "base_batch")
MOST = 1e9  # of any number: steps are counted in integers


def _options(text: str, name: str, rest: str) -> dict:
    """The KEY=VALUE pairs, each value of its kind."""
    given = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in (*KEYS[name], *FOR_ALL):
            raise ValueError(
                f"learning rate {text!r}: {name} has no option {key!r}; it takes {', '.join((*KEYS[name], *FOR_ALL))}"
            )
        try:
            if key == "metric":
                given[key] = value
            elif key == "at":
                given[key] = tuple(float(epoch) for epoch in value.split("/"))
            else:
                given[key] = int(value) if key in WHOLE else float(value)
        except ValueError as error:
            kind = "a whole number" if key in WHOLE else "a number"
            raise ValueError(f"learning rate {text!r}: {key} must be {kind}, given {value!r}") from error
        if key != "metric" and not all(0 <= number < MOST for number in np.atleast_1d(given[key])):
            raise ValueError(f"learning rate {text!r}: {key} must be at least 0 and below {MOST:g}, given {value!r}")
    return given


def _part(step: int, begin: int, end: int) -> float:
    """Where a step is between two others: 0 to 1."""
    return min(max(0.0, (step - begin) / (end - begin)), 1.0)


def _at_least_one(schedule, **values: int) -> None:
    for name, value in values.items():
        if not value >= 1:
            raise ValueError(f"{type(schedule).__name__}: {name} must be at least 1, given {value}")
