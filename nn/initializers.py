"""First values of parameters: functions (Generator, shape) -> float64 array.

Every array is drawn in full from its own stream (see Layout.initialize), then cast and sliced: the values
never depend on where the slices are. A weight's last axis counts outputs, the one before inputs, and
any axes in front are a convolution's kernel: (in, out) or (height, width, in, out).

Sources: LeCun et al. 1998, Efficient BackProp; Glorot and Bengio 2010; He et al. 2015; Saxe et al. 2014 (orthogonal).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from nn.arguments import NOT_NEGATIVE, Number
from nn.core.layer import Initializer, Shape
from nn.guesses import refuse_name
from nn.registry import register


def fans(shape: Shape) -> tuple[int, int]:
    """Return (fan_in, fan_out): how many inputs feed one output, and how many outputs one input feeds."""
    if len(shape) < 2:
        return math.prod(shape), math.prod(shape)
    receptive = math.prod(shape[:-2])
    return receptive * shape[-2], receptive * shape[-1]


def zeros(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return zeros, for biases and other terms that are added."""
    return np.zeros(shape)


def ones(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return ones, for factors."""
    return np.ones(shape)


def normal(std: float = 1.0) -> Initializer:
    """N(0, std^2), whatever the shape: std 1 is the choice of the classical digit experiment (Nielsen 2015)."""
    return Normal(std)


def truncated_normal(std: float = 0.02, bound: float = 2.0) -> Initializer:
    """N(0, std^2) without what lies beyond `bound` standard deviations (drawn again)."""
    return Normal(std, bound)


@dataclass(frozen=True)
class Normal:
    """Initializer that `normal` and `truncated_normal` return: closures could not be pickled or compared."""

    std: float
    bound: float = math.inf

    def __post_init__(self):
        NOT_NEGATIVE("normal: std", self.std)
        Number(above=0)("truncated_normal: bound", self.bound)  # no number would lie within

    def __call__(self, rng: np.random.Generator, shape: Shape) -> np.ndarray:
        values = rng.standard_normal(shape)
        while self.bound < math.inf and (outside := np.abs(values) > self.bound).any():
            values[outside] = rng.standard_normal(int(outside.sum()))
        return self.std * values


register("initializer", "normal")(normal())
register("initializer", "truncated")(truncated_normal())


@register("initializer", "lecun")
def lecun(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """N(0, 1/fan_in): keeps the variance of activations through tanh near 0."""
    return rng.standard_normal(shape) / math.sqrt(fans(shape)[0])


@register("initializer", "glorot")
def glorot(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """U(-a, a), a = sqrt(6 / (fan_in + fan_out)): a compromise between forward and backward variance."""
    bound = math.sqrt(6 / sum(fans(shape)))
    return rng.uniform(-bound, bound, shape)


@register("initializer", "he")
def he(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """N(0, 2/fan_in): makes up for the half that ReLU sets to zero."""
    return rng.standard_normal(shape) * math.sqrt(2 / fans(shape)[0])


@register("initializer", "orthogonal")
def orthogonal(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Orthonormal columns or rows, from the QR decomposition of a Gaussian matrix, signs made uniform."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    q, r = np.linalg.qr(rng.standard_normal((max(rows, cols), min(rows, cols))))
    q = q * np.sign(np.diag(r))
    return (q if rows >= cols else q.T).reshape(shape)


__getattr__ = partial(refuse_name, __name__)
