"""Words and their positions as vectors: Embedding; learned, sinusoidal and rotary positions.

Sources: Bengio et al. 2003 (embedding), Vaswani et al. 2017 (sinusoids), Press and Wolf 2017 (tied output weights), Su
et al. 2021 (rotary positions).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from nn.arguments import COUNT, SIZE, Optional
from nn.core.gradients import RowSum, ScatterAdd, write_gradient
from nn.core.layer import Initializer, Layer, ShapeError, Spec
from nn.initializers import normal
from nn.registry import register

NARROW = normal(0.02)


@register("layer")
class Embedding(Layer):
    """y = W[ids]: one row of W for every id. Its gradient is a sum over the positions of each id.

    Parameters
    ----------
    vocabulary : int
        Ids are 0 ... vocabulary - 1.
    features : int
        D, the length of a vector.
    padding : int or None
        The id that fills up short sequences: attention layers of this pass ignore its positions (`MicroBatch.padding`).
    init : initializer
        For W of shape (vocabulary, features).

    Raises
    ------
    ValueError
        An id out of the vocabulary: which, where, and in which layer.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.Embedding(100, 16), (12,)).out_shape
    (12, 16)
    """

    ids = True
    output = gradient = "new"

    constraints = {"vocabulary": SIZE, "features": SIZE, "padding": Optional(COUNT)}

    def __init__(self, vocabulary: int, features: int, *, padding: int | None = None, init: Initializer = NARROW):
        self.vocabulary, self.features, self.padding, self.init = vocabulary, features, padding, init

    def check_arguments(self):
        if self.padding is not None and self.padding >= self.vocabulary:
            raise ValueError(f"Embedding: padding must be an id, 0 to {self.vocabulary - 1}, given {self.padding}")

    def specs(self, in_shape):
        return {"W": Spec((self.vocabulary, self.features), self.init)}, (*in_shape, self.features)

    def forward(self, p, x, ctx):
        vocabulary, features = p.W.shape
        self.check(x, vocabulary, ctx)
        if self.padding is not None:
            ctx.micro_batch.padding = x == self.padding
        y = ctx.empty((*x.shape, features), p.W.dtype)
        np.take(p.W, x, axis=0, out=y, mode="clip")  # in range, and with this mode not through a copy
        return y, x

    def check(self, x, vocabulary: int, ctx) -> None:
        """Refuse what is no id below `vocabulary`."""
        if x.dtype.kind not in "iu":
            raise TypeError(f"{ctx.description}: expects integer ids, given {x.dtype}")
        if x.size and (x.min() < 0 or x.max() >= vocabulary):
            at = np.argwhere((x < 0) | (x >= vocabulary))[0].tolist()
            raise ValueError(
                f"{ctx.description}: id {x[tuple(at)]} of sample {at[0]}, position {at[1:]}, "
                f"is not in the vocabulary: ids are 0 to {vocabulary - 1}"
            )

    def backward(self, p, gy, x, ctx):
        return None, {"W": ScatterAdd(x, gy)}


@register("layer")
class LearnedPositions(Layer):
    """y = x + W: a vector for every position of a sequence (N, T, D), learned as the others are.

    Parameters
    ----------
    length : int
        The longest sequence; shorter ones use the first positions.
    features : int
    init : initializer
        For W of shape (length, features).

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.LearnedPositions(12, 16), (12, 16)).out_shape
    (12, 16)
    """

    output, gradient = "new", "view"

    constraints = {"length": SIZE, "features": SIZE}

    def __init__(self, length: int, features: int, init: Initializer = NARROW):
        self.length, self.features, self.init = length, features, init

    def specs(self, in_shape):
        if len(in_shape) != 2 or in_shape[0] > self.length or in_shape[1] != self.features:
            raise ShapeError(
                f"expects at most {self.length} positions of {self.features} features, given samples of shape "
                f"{in_shape}"
            )
        return {"W": Spec((self.length, self.features), self.init, decay=False)}, in_shape

    def forward(self, p, x, ctx):
        return np.add(x, p.W[: x.shape[1]], ctx.reuse_input(x)), None

    def backward(self, p, gy, saved, ctx):
        positions = gy.shape[1]
        if positions == len(p.W):
            return (gy if ctx.needs_input_grad else None), {"W": RowSum(gy)}
        gW = np.zeros(p.W.shape, gy.dtype)
        write_gradient(gW[:positions], RowSum(gy), False, ctx.network_context.pool)
        return (gy if ctx.needs_input_grad else None), {"W": gW}


@register("layer")
class SinusoidalPositions(Layer):
    """y = x + S, S[t, 2i] = sin(t / 10000^(2i/D)), S[t, 2i + 1] = cos of the same: nothing to learn, any length.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.SinusoidalPositions(), (12, 16)).out_shape
    (12, 16)
    """

    output, gradient = "new", "view"

    def specs(self, in_shape):
        if len(in_shape) != 2:
            raise ShapeError(f"expects sequences (positions, features), given samples of shape {in_shape}")
        return {}, in_shape

    def forward(self, p, x, ctx):
        return np.add(x, sinusoids(*x.shape[1:], x.dtype), ctx.reuse_input(x)), None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


@functools.lru_cache(maxsize=8)
def sinusoids(length: int, features: int, dtype: np.dtype) -> np.ndarray:
    """Return the table S of shape (length, features)."""
    half = np.arange(-(-features // 2))
    angle = np.arange(length)[:, None] * np.exp(half * (-2 * math.log(10000) / features))
    table = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, -1)[:, :features].astype(dtype)
    table.flags.writeable = False
    return table


@register("layer")
class RotaryPositions(Layer):
    """Turn each pair of features (2i, 2i + 1) of position t by the angle t / 10000^(2i/D).

    A product of a query and a key that are turned so depends on the distance of their positions alone.
    `MultiHeadAttention(rotary=True)` does it with queries and keys; this layer, with the samples (T, D) of a sequence.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.RotaryPositions(), (16, 8)).out_shape
    (16, 8)
    """

    output = gradient = "new"

    def specs(self, in_shape):
        if len(in_shape) != 2 or in_shape[1] % 2:
            raise ShapeError(
                f"expects sequences (positions, features), the features even, given samples of shape {in_shape}"
            )
        return {}, in_shape

    def forward(self, p, x, ctx):
        return self._turned(x, False, ctx), None

    def backward(self, p, gy, saved, ctx):
        return self._turned(gy, True, ctx), {}

    def positions(self, T: int) -> np.ndarray:
        """Return the position in the sequence of each of the T rows that this process has."""
        return np.arange(T)

    def _turned(self, x, backward, ctx):
        y = ctx.empty(x.shape, x.dtype)
        y[...] = x
        rotate(y, self.positions(x.shape[1]), backward)
        return y


def rotate(x: np.ndarray, positions: np.ndarray, backward: bool = False) -> None:
    """Rotate the pairs of features of x (..., T, D) by the angles of their positions (T,), in-place; backward: back."""
    cos, sin = rotary_angles(positions, x.shape[-1], x.dtype)
    if backward:
        sin = -sin
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = even * cos - odd * sin
    odd *= cos
    odd += even * sin
    even[...] = turned


def rotary_angles(positions: np.ndarray, features: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine, (T, features / 2), of the angle of each position and pair of features."""
    return _rotary_table(np.ascontiguousarray(positions, np.int64).tobytes(), features, dtype)


@functools.lru_cache(maxsize=8)
def _rotary_table(positions: bytes, features: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine, (T, D/2), of the angle of each position and pair of features."""
    rates = np.exp(np.arange(features // 2) * (-2 * math.log(10000) / features))
    angles = np.frombuffer(positions, np.int64)[:, None] * rates
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
