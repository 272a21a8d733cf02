"""Learning rates: functions from the optimizer's step (0, 1, 2, ...) to a rate.

    fit(trainer, data, epochs=90, schedule=Warmup(MultiStep(3.2, (3000, 6000, 8000)), 500, start=0.1))

All count in steps from the start of a call of `fit`, those before a resume included. They keep no state, so a resumed
run has nothing to restore.
Schedules that follow what `fit` measures, and all by their names, are in nn/training/schedules.py.

Sources: Goyal et al. 2017 (linear scaling, gradual warm-up); Loshchilov and Hutter 2017 (cosine).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from nn.arguments import COUNT, SIZE, Constraint, Number
from nn.registry import register

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Epochs:
    """The epochs of a training, as schedules whose times are in epochs need them (`Schedule.in_epochs`).

    Parameters
    ----------
    count, steps_each : int
    warmup : float
        Epochs of warm-up at the start.
    """

    count: int
    steps_each: int
    warmup: float = 0.0

    def steps(self, epochs: float) -> int:
        """Return the number of steps in a number of epochs."""
        return round(epochs * self.steps_each)

    def after_warmup(self) -> tuple[int, int]:
        """Return the steps at which training ends and warm-up ends; ValueError where nothing is between them."""
        end, begin = self.steps(self.count), self.steps(self.warmup)
        if not self.count:
            raise ValueError("its length is that of training, which has 0 epochs: use at least one, or no schedule")
        if begin and begin >= end:
            raise ValueError(f"{self.warmup:g} epochs of warm-up leave none of {self.count}")
        return end, begin


RATE = Number(0, below=math.inf)


def _ascending(what: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or list(value) != sorted(value):
        raise ValueError(f"{what} must be steps that ascend, such as (300, 600), given {value!r:.80}")
    return tuple(value)  # a copy: changed later, it would not be checked


def _function(what: str, value: object) -> object:
    if not callable(value):
        raise TypeError(f"{what} must be a function step -> rate, such as nn.schedules.Cosine, given {value!r:.80}")
    return value


class _Schedule:
    """Base: fields in the ranges that `constraints` says."""

    constraints: ClassVar[Mapping[str, Constraint]] = {"lr": RATE}

    def __post_init__(self):
        for name, constraint in self.constraints.items():
            value = constraint(f"{type(self).__name__}: {name}", getattr(self, name))
            object.__setattr__(self, name, value)  # the dataclass is frozen


@register("schedule", "constant")
@dataclass(frozen=True)
class Constant(_Schedule):
    """lr, always.

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.Constant(0.1)
    >>> schedule(100)
    0.1
    """

    lr: float

    def __call__(self, step: int) -> float:
        return self.lr


@register("schedule", "step")
@dataclass(frozen=True)
class Step(_Schedule):
    """lr times `factor` once more after every `every` steps.

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.Step(0.1, every=10, factor=0.5)
    >>> [schedule(step) for step in (0, 10, 20)]
    [0.1, 0.05, 0.025]
    """

    constraints = {"lr": RATE, "every": SIZE, "factor": RATE}

    lr: float
    every: int
    factor: float = 0.1

    @classmethod
    def in_epochs(cls, epochs: Epochs, lr: float, every: float = 30.0, factor: float = 0.1) -> Step:
        """Return the schedule whose times are in epochs."""
        return cls(lr, epochs.steps(every), factor)

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** (step // self.every)


@register("schedule", "multistep")
@dataclass(frozen=True)
class MultiStep(_Schedule):
    """lr times `factor` once more from each of the steps `at` on.

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.MultiStep(0.1, at=(10, 20), factor=0.5)
    >>> [schedule(step) for step in (0, 10, 20)]
    [0.1, 0.05, 0.025]
    """

    constraints = {"lr": RATE, "at": _ascending, "factor": RATE}

    lr: float
    at: tuple[int, ...]
    factor: float = 0.1

    @classmethod
    def in_epochs(cls, epochs: Epochs, lr: float, at: tuple = (30, 60, 80), factor: float = 0.1) -> MultiStep:
        """Return the schedule whose times are in epochs."""
        return cls(lr, tuple(epochs.steps(epoch) for epoch in at), factor)

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** bisect_right(self.at, step)


@register("schedule", "exponential")
@dataclass(frozen=True)
class Exponential(_Schedule):
    """lr factor^(step / every): smooth, `factor` in every `every` steps.

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.Exponential(0.1, factor=0.5, every=10)
    >>> [schedule(step) for step in (0, 10, 20)]
    [0.1, 0.05, 0.025]
    """

    constraints = {"lr": RATE, "factor": RATE, "every": SIZE}

    lr: float
    factor: float = 0.95
    every: int = 1

    @classmethod
    def in_epochs(cls, epochs: Epochs, lr: float, factor: float = 0.95) -> Exponential:
        """Return the schedule whose times are in epochs."""
        return cls(lr, factor, epochs.steps_each)

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** (step / self.every)


@register("schedule", "polynomial")
@dataclass(frozen=True)
class Polynomial(_Schedule):
    """From lr at step `begin` to `end` at step `steps` as (1 - t)^power, t from 0 to 1; linear for power 1.

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.Polynomial(0.1, steps=100)
    >>> [round(schedule(step), 3) for step in (0, 50, 100)]
    [0.1, 0.05, 0.0]
    """

    constraints = {"lr": RATE, "steps": SIZE, "power": RATE, "end": RATE, "begin": COUNT}

    lr: float
    steps: int
    power: float = 1.0
    end: float = 0.0
    begin: int = 0

    def __post_init__(self):
        super().__post_init__()
        _check_begin(self)

    @classmethod
    def in_epochs(cls, epochs: Epochs, lr: float, power: float = 1.0, end: float = 0.0) -> Polynomial:
        """Return the schedule whose times are in epochs."""
        last, begin = epochs.after_warmup()
        return cls(lr, last, power, end, begin)

    def __call__(self, step: int) -> float:
        return self.end + (self.lr - self.end) * (1 - _fraction(step, self.begin, self.steps)) ** self.power


@register("schedule", "cosine")
@dataclass(frozen=True)
class Cosine(_Schedule):
    """From lr at step `begin` to `end` at step `steps` as half a cosine wave.

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.Cosine(0.1, steps=100)
    >>> [round(schedule(step), 3) for step in (0, 50, 100)]
    [0.1, 0.05, 0.0]
    """

    constraints = {"lr": RATE, "steps": SIZE, "end": RATE, "begin": COUNT}

    lr: float
    steps: int
    end: float = 0.0
    begin: int = 0

    def __post_init__(self):
        super().__post_init__()
        _check_begin(self)

    @classmethod
    def in_epochs(cls, epochs: Epochs, lr: float, end: float = 0.0) -> Cosine:
        """Return the schedule whose times are in epochs."""
        last, begin = epochs.after_warmup()
        return cls(lr, last, end, begin)

    def __call__(self, step: int) -> float:
        wave = (1 + math.cos(math.pi * _fraction(step, self.begin, self.steps))) / 2
        return self.end + (self.lr - self.end) * wave


@dataclass(frozen=True)
class Warmup(_Schedule):
    """In front of any schedule: from `start` to its rate at step `steps`, in equal increments a step.

    The schedule's own steps count from the start of training, warm-up included, so it must last longer.

    Examples
    --------
    >>> import nn
    >>> schedule = nn.schedules.Warmup(nn.schedules.Constant(0.1), steps=4)
    >>> [round(schedule(step), 3) for step in (0, 2, 4)]
    [0.0, 0.05, 0.1]
    """

    constraints = {"schedule": _function, "steps": SIZE, "start": RATE}

    schedule: Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.schedule, Cosine | Polynomial) and self.steps >= self.schedule.steps:
            raise ValueError(
                f"Warmup: {self.steps} steps of warm-up leave none of {self.schedule!r}, whose steps count from the "
                "start of training"
            )

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.schedule(step)
        return self.start + (self.schedule(self.steps) - self.start) * (step / self.steps)


def linear_scaling(lr: float, batch: int, base_batch: int) -> float:
    """Return the rate for a batch of another size: k times the batch, k times the rate (Goyal et al. 2017).

    Examples
    --------
    >>> import nn
    >>> nn.schedules.linear_scaling(0.1, batch=1024, base_batch=256)
    0.4
    """
    SIZE("linear scaling: the base batch", base_batch)
    return lr * batch / base_batch


def _fraction(step: int, begin: int, end: int) -> float:
    """Return how far a step is from one step to another: 0 to 1."""
    return min(max(0.0, (step - begin) / (end - begin)), 1.0)


def _check_begin(schedule: Polynomial | Cosine) -> None:
    if not schedule.begin < schedule.steps:
        raise ValueError(
            f"{type(schedule).__name__}: steps must be above begin, {schedule.begin}, given {schedule.steps}"
        )
