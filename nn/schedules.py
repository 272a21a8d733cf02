"""Learning rates over time: functions from the step of a call of `fit` to a rate, for its `schedule=`.

nn/optim/learning_rates.py has those that follow the step alone, nn/training/schedules.py those that listen to training.
"""

from functools import partial

from nn.guesses import refuse_name
from nn.optim.learning_rates import (
    Constant,
    Cosine,
    Exponential,
    MultiStep,
    Polynomial,
    Step,
    Warmup,
    linear_scaling,
)
from nn.training.schedules import MomentumCorrection, Plateau, parse

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "MomentumCorrection",
    "MultiStep",
    "Plateau",
    "Polynomial",
    "Step",
    "Warmup",
    "linear_scaling",
    "parse",
]

__getattr__ = partial(refuse_name, __name__)
