"""Activations. Each keeps what its derivative is cheapest to compute from: the output, or else the derivative.

All cost O(N D) and have no parameters. NumPy reads and writes memory once a call, so those that take many calls
go through an array in blocks that stay in the cache.

Sources: LeCun et al. 1998 (tanh), Nair and Hinton 2010 (ReLU), Maas et al. 2013 (leaky ReLU), Hendrycks and Gimpel 2016
(GELU), Elfwing et al. 2017 (SiLU), Bridle 1990 (softmax).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from nn.arguments import Number
from nn.core.layer import Layer, ShapeError
from nn.layers.gaussian import distribution
from nn.registry import register

BLOCK = 1 << 15  # elements: five float32 arrays of that length fit in a second-level cache of a megabyte


class Activation(Layer):
    """Base: elementwise, no parameters; forward and backward may overwrite x and gy where `ctx` allows it."""

    output = "kept"
    gradient = "view"
    channelwise = True


@register("layer")
@register("activation", "sigmoid")
class Sigmoid(Activation):
    """y = 1 / (1 + exp(-x)), dy/dx = y (1 - y), from the stored output.

    Computed as (1 + tanh(x/2)) / 2: it cannot overflow, and is the fastest form in NumPy.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Sigmoid(), (2,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[0.0, 100.0]]).round(3).tolist()
    [[0.5, 1.0]]
    """

    def forward(self, p, x, ctx):
        y = np.multiply(x, 0.5, ctx.reuse_input(x))
        np.tanh(y, y)
        y *= 0.5
        y += 0.5
        return y, y

    def backward(self, p, gy, y, ctx):
        slope = np.subtract(1, y, ctx.workspace("slope", y.shape, y.dtype))
        slope *= y
        return np.multiply(gy, slope, ctx.reuse_grad(gy)), {}


@register("layer")
@register("activation", "tanh")
class Tanh(Activation):
    """y = tanh(x), dy/dx = 1 - y^2.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Tanh(), (2,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[0.0, 100.0]]).round(3).tolist()
    [[0.0, 1.0]]
    """

    def forward(self, p, x, ctx):
        y = np.tanh(x, ctx.reuse_input(x))
        return y, y

    def backward(self, p, gy, y, ctx):
        slope = np.multiply(y, y, ctx.workspace("slope", y.shape, y.dtype))
        np.subtract(1, slope, slope)
        return np.multiply(gy, slope, ctx.reuse_grad(gy)), {}


@register("layer")
@register("activation", "relu")
class ReLU(Activation):
    """y = max(x, 0), dy/dx = 1 where y > 0, else 0.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.ReLU(), (3,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[-1.0, 0.0, 2.0]]).round(3).tolist()
    [[0.0, 0.0, 2.0]]
    """

    keeps_maxima = True  # outputs are equal where inputs differ at 0 only, where the slope is 0

    def forward(self, p, x, ctx):
        y = x.clip(0, math.inf, ctx.reuse_input(x))  # vectorised for scalar bounds, which np.maximum is not
        return y, y

    def backward(self, p, gy, y, ctx):
        positive = np.greater(y, 0, ctx.workspace("positive", y.shape, np.bool_))
        return np.multiply(gy, positive, ctx.reuse_grad(gy)), {}


@register("layer")
@register("activation", "leaky_relu")
class LeakyReLU(Activation):
    """y = x where x > 0, else slope x.

    Parameters
    ----------
    slope : float
        In (0, 1), so that the output has the sign of the input.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.LeakyReLU(), (3,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[-1.0, 0.0, 2.0]]).round(3).tolist()
    [[-0.009999999776482582, 0.0, 2.0]]
    """

    constraints = {"slope": Number(above=0, below=1)}

    def __init__(self, slope: float = 0.01):
        self.slope = slope

    def forward(self, p, x, ctx):
        low = np.multiply(x, self.slope, ctx.workspace("slope", x.shape, x.dtype))
        y = np.maximum(x, low, out=ctx.reuse_input(x))
        return y, y

    def backward(self, p, gy, y, ctx):
        slope = ctx.workspace("slope", y.shape, y.dtype)
        np.greater(y, 0, slope)
        slope *= 1 - self.slope
        slope += self.slope
        return np.multiply(gy, slope, ctx.reuse_grad(gy)), {}


class Smooth(Activation):
    """Base of activations whose derivative takes the same steps as the value: forward keeps it, backward multiplies."""

    output = "new"

    def forward(self, p, x, ctx):
        y, slope = ctx.reuse_input(x), ctx.empty(x.shape, x.dtype)
        for part in _blocks(x, y, slope):
            shape = part[0].shape
            self.evaluate(*part, ctx.workspace("first", shape, x.dtype), ctx.workspace("second", shape, x.dtype))
        return y, slope

    def backward(self, p, gy, slope, ctx):
        return np.multiply(gy, slope, ctx.reuse_grad(gy)), {}

    def evaluate(self, x, y, slope, a, b) -> None:
        """Write y(x) and dy/dx; y may be x itself; a and b are workspace."""
        raise TypeError(f"{type(self).__name__} does not define evaluate")


@register("layer")
@register("activation", "silu")
class SiLU(Smooth):
    """y = x sigmoid(x), also known as swish.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.SiLU(), (3,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[-1.0, 0.0, 1.0]]).round(3).tolist()
    [[-0.26899999380111694, 0.0, 0.7310000061988831]]
    """

    def evaluate(self, x, y, slope, a, b):
        np.multiply(x, 0.5, a)
        np.tanh(a, a)
        a *= 0.5
        a += 0.5
        np.subtract(1, a, slope)
        slope *= x
        _gated(x, y, slope, a)


@register("layer")
@register("activation", "gelu")
class GELU(Smooth):
    """y = x Phi(x), with Phi the distribution function of N(0, 1): the input, weighed by how large it is among others.

    Parameters
    ----------
    approximate : bool
        The tanh form of the paper: up to 5e-4 off.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.GELU(), (3,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[-1.0, 0.0, 1.0]]).round(3).tolist()
    [[-0.1589999943971634, 0.0, 0.8410000205039978]]
    """

    def __init__(self, approximate: bool = False):
        self.approximate = approximate

    def evaluate(self, x, y, slope, a, b):
        if self.approximate:
            self._tanh_form(x, y, slope, a, b)
            return
        distribution(x, a, slope, b)
        slope *= x
        slope += a
        np.multiply(x, a, y)

    def _tanh_form(self, x, y, slope, a, b):
        # 1/2 (1 + tanh u) with u = x (k + k q x^2); dz/dx of z = 2u is 2k + 6 k q x^2.
        k, q = math.sqrt(2 / math.pi), 0.044715
        np.multiply(x, x, b)
        np.multiply(b, k * q, a)
        a += k
        a *= x
        np.tanh(a, a)
        a *= 0.5
        a += 0.5
        b *= 6 * k * q
        b += 2 * k
        b *= x
        np.subtract(1, a, slope)
        slope *= b
        _gated(x, y, slope, a)


@register("layer")
class Softmax(Activation):
    """y = exp(x) / sum exp(x) along the last axis. For classification train on logits: see CrossEntropyLoss.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Softmax(), (2,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[1.0, 1.0]]).round(3).tolist()
    [[0.5, 0.5]]
    """

    channelwise = False

    def specs(self, in_shape):
        return {}, _with_axis(in_shape)

    def forward(self, p, x, ctx):
        y = softmax(x, ctx.reuse_input(x))
        return y, y

    def backward(self, p, gy, y, ctx):
        dot = np.einsum("...i,...i->...", gy, y)[..., None]
        gx = np.subtract(gy, dot, ctx.reuse_grad(gy))
        gx *= y
        return gx, {}


@register("layer")
class LogSoftmax(Activation):
    """y = x - log sum exp(x) along the last axis; dLoss/dx = gy - softmax(x) sum gy.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.LogSoftmax(), (2,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[1.0, 1.0]]).round(3).tolist()
    [[-0.6930000185966492, -0.6930000185966492]]
    """

    channelwise = False

    def specs(self, in_shape):
        return {}, _with_axis(in_shape)

    def forward(self, p, x, ctx):
        y = np.subtract(x, row_maxima(x), ctx.reuse_input(x))
        exp = np.exp(y, ctx.workspace("exp", y.shape, y.dtype))
        y -= np.log(exp.sum(axis=-1, keepdims=True))
        return y, y

    def backward(self, p, gy, y, ctx):
        softmax = np.exp(y, ctx.workspace("exp", y.shape, y.dtype))
        softmax *= gy.sum(axis=-1, keepdims=True)
        return np.subtract(gy, softmax, ctx.reuse_grad(gy)), {}


def softmax(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Softmax along the last axis, into `out`, which may be x. Each row's maximum is subtracted first: no overflow."""
    np.subtract(x, row_maxima(x), out)
    np.exp(out, out)
    sums = np.matmul(out, np.ones((x.shape[-1], 1), x.dtype))  # six times faster than a reduction of short rows
    out *= np.divide(1, sums, sums)
    return out


def row_maxima(x: np.ndarray) -> np.ndarray:
    """x.max(axis=-1, keepdims=True), NaN where a row has one, in half the time: argmax is vectorised along rows."""
    rows = x.reshape(-1, x.shape[-1])
    positions = rows.argmax(axis=1)
    positions += row_starts(*rows.shape)
    return rows.reshape(-1).take(positions).reshape(*x.shape[:-1], 1)


@functools.lru_cache(maxsize=8)
def row_starts(rows: int, width: int) -> np.ndarray:
    """Return where each row of a matrix begins in its flat array; not to be written."""
    starts = np.arange(0, rows * width, width)
    starts.flags.writeable = False
    return starts


def _gated(x, y, slope, gate) -> None:
    """y = x gate and dy/dx = gate (1 + x z' (1 - gate)) for gate = sigmoid(z); slope comes as x z' (1 - gate)."""
    slope += 1
    slope *= gate
    np.multiply(x, gate, y)


def _with_axis(in_shape):
    if not in_shape:
        raise ShapeError("expects an axis to normalise along, given samples of shape ()")
    return in_shape


def _blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """The arrays cut alike into short flat pieces; whole if one is not contiguous."""
    if not all(array.flags.c_contiguous for array in arrays):
        yield arrays
        return
    flat = [array.reshape(-1) for array in arrays]
    for lo in range(0, flat[0].size, BLOCK):
        yield tuple(array[lo : lo + BLOCK] for array in flat)
