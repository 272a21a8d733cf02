"""Normalisation within a sample: over its features (LayerNorm, RMSNorm) or near channels (LocalResponseNorm).

    xhat = (x - mean) / sqrt(var + eps)        y = gamma xhat + beta
    gx = (h - mean(h) - xhat mean(h xhat)) / sqrt(var + eps),  h = gamma gy

with means over the last axis; RMSNorm has neither mean(x), beta nor mean(h). A few passes over the activations each.
BatchNorm, whose means go over the batch, is in nn/layers/batch_normalization.py, and offered from here too.

Sources: Ba, Kiros, Hinton 2016 (LayerNorm); Zhang and Sennrich 2019 (RMSNorm); Krizhevsky, Sutskever, Hinton 2012
(LocalResponseNorm).
"""

from __future__ import annotations

import numpy as np

from nn.arguments import NOT_NEGATIVE, SIZE, Number
from nn.core.gradients import Product, RowSum
from nn.core.layer import Layer, ShapeError, Spec
from nn.initializers import ones, zeros
from nn.layers.batch_normalization import BatchNorm1d, BatchNorm2d
from nn.registry import register

__all__ = ["BatchNorm1d", "BatchNorm2d", "LayerNorm", "LocalResponseNorm", "RMSNorm"]


@register("layer")
class LayerNorm(Layer):
    """Each position is normalised over its features, the last axis: no batch statistics, nothing to synchronise.

    Parameters
    ----------
    features : int
    eps : float
        Added to the variance.
    bias : bool
        Whether there is a beta.

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.LayerNorm(2), (2,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[1.0, 3.0]]).round(3).tolist()
    [[-1.0, 1.0]]
    """

    output = gradient = "new"

    constraints = {"features": SIZE, "eps": NOT_NEGATIVE}

    def __init__(self, features: int, eps: float = 1e-5, *, bias: bool = True):
        self.features, self.eps, self.bias = features, eps, bias

    def specs(self, in_shape):
        _check_features(in_shape, self.features)
        specs = {"gamma": Spec((self.features,), ones, decay=False)}
        if self.bias:
            specs["beta"] = Spec((self.features,), zeros, decay=False)
        return specs, in_shape

    def forward(self, p, x, ctx):
        rows = np.ascontiguousarray(x).reshape(-1, self.features)
        y = ctx.empty(x.shape, x.dtype)
        out = y.reshape(rows.shape)
        mean = _row_means(rows, ctx)
        np.subtract(rows, mean, out=out)
        scale = np.einsum("ij,ij->i", out, out)[:, None]
        scale *= 1 / self.features
        scale += self.eps
        np.sqrt(scale, out=scale)
        np.divide(1, scale, out=scale)
        out *= scale
        out *= p.gamma
        if self.bias:
            out += p.beta
        return y, (x, mean, scale)

    def backward(self, p, gy, saved, ctx):
        x, mean, scale = saved
        rows = np.ascontiguousarray(x).reshape(-1, self.features)
        upstream = np.ascontiguousarray(gy).reshape(rows.shape)
        centred = np.subtract(rows, mean, out=ctx.workspace("centred", rows.shape, x.dtype))
        product = np.multiply(upstream, centred, out=ctx.workspace("block", rows.shape, x.dtype))
        gradients = {"gamma": Product(scale[:, 0], product)}  # xhat = scale centred, and a row's scale is one number
        if self.bias:  # now: dLoss/dx may lie where gy is
            gradients["beta"] = ctx.materialize("beta", RowSum(upstream))
        if not ctx.needs_input_grad:
            return None, gradients
        weights = p.gamma * (1 / self.features)
        along = np.dot(product, weights)[:, None]  # mean(h xhat) / scale
        along *= scale
        along *= scale
        centred *= along
        centred += np.dot(upstream, weights)[:, None]  # mean(h)
        gx = ctx.reuse_grad(gy) if gy.flags.c_contiguous else ctx.empty(gy.shape, gy.dtype)
        target = np.multiply(upstream, p.gamma, out=gx.reshape(rows.shape))
        target -= centred
        target *= scale
        return gx, gradients


@register("layer")
class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * gamma over the last axis: LayerNorm without centring and beta.

    Parameters
    ----------
    features : int
    eps : float

    Examples
    --------
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.RMSNorm(2), (2,)), nn.MSELoss(), nn.SGD())
    >>> trainer.predict([[3.0, 4.0]]).round(3).tolist()
    [[0.8489999771118164, 1.13100004196167]]
    """

    output = gradient = "new"

    constraints = {"features": SIZE, "eps": NOT_NEGATIVE}

    def __init__(self, features: int, eps: float = 1e-6):
        self.features, self.eps = features, eps

    def specs(self, in_shape):
        _check_features(in_shape, self.features)
        return {"gamma": Spec((self.features,), ones, decay=False)}, in_shape

    def forward(self, p, x, ctx):
        rows = np.ascontiguousarray(x).reshape(-1, self.features)
        scale = np.einsum("ij,ij->i", rows, rows)[:, None]
        scale *= 1 / self.features
        scale += self.eps
        np.sqrt(scale, out=scale)
        np.divide(1, scale, out=scale)
        y = ctx.empty(x.shape, x.dtype)
        out = np.multiply(rows, scale, out=y.reshape(rows.shape))
        out *= p.gamma
        return y, (x, scale)

    def backward(self, p, gy, saved, ctx):
        x, scale = saved
        rows = np.ascontiguousarray(x).reshape(-1, self.features)
        upstream = np.ascontiguousarray(gy).reshape(rows.shape)
        normal = np.multiply(rows, scale, out=ctx.workspace("normal", rows.shape, x.dtype))
        product = np.multiply(upstream, normal, out=ctx.workspace("block", rows.shape, x.dtype))
        gradients = {"gamma": RowSum(product)}
        if not ctx.needs_input_grad:
            return None, gradients
        gx = ctx.reuse_grad(gy) if gy.flags.c_contiguous else ctx.empty(gy.shape, gy.dtype)
        target = gx.reshape(rows.shape)
        np.multiply(upstream, p.gamma, out=target)
        along = np.einsum("ij,ij->i", target, normal)[:, None]
        along *= 1 / self.features
        normal *= along
        target -= normal
        target *= scale
        return gx, gradients


@register("layer")
class LocalResponseNorm(Layer):
    """y = x / d^beta, d = k + alpha / size * (sum of x^2 over the `size` nearest channels).

    Parameters
    ----------
    size : int
        Channels of the window; an even one reaches one channel further down than up. AlexNet's formula has alpha
        itself before the sum: give size times its 1e-4, and k = 2.
    alpha, beta, k : float

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.LocalResponseNorm(5), (8, 8, 16)).out_shape
    (8, 8, 16)
    """

    output = gradient = "new"

    constraints = {"size": SIZE, "alpha": NOT_NEGATIVE, "beta": Number(), "k": Number(above=0)}

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0):
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def specs(self, in_shape):
        if not in_shape:
            raise ShapeError("expects channels on the last axis, given samples without axes")
        return {}, in_shape

    def forward(self, p, x, ctx):
        d = ctx.empty(x.shape, x.dtype)
        squares = np.multiply(x, x, out=ctx.workspace("squares", x.shape, x.dtype))
        self._window_sums(squares, d, self.size // 2)
        d *= self.alpha / self.size
        d += self.k
        y = np.multiply(x, self._power(d, ctx), out=ctx.empty(x.shape, x.dtype))
        return y, (x, d)

    def backward(self, p, gy, saved, ctx):
        if not ctx.needs_input_grad:
            return None, {}
        x, d = saved
        power = self._power(d, ctx)
        inner = np.multiply(gy, x, out=ctx.workspace("squares", x.shape, x.dtype))
        inner *= power
        inner /= d
        sums = ctx.workspace("sums", x.shape, x.dtype)
        self._window_sums(inner, sums, (self.size - 1) // 2)  # the window seen from its members
        sums *= x
        sums *= 2 * self.alpha * self.beta / self.size
        gx = np.multiply(gy, power, out=ctx.reuse_grad(gy))
        gx -= sums
        return gx, {}

    def _power(self, d, ctx):
        """d^-beta, as exp(-beta log d): several times faster than `power` in NumPy."""
        power = np.log(d, out=ctx.workspace("power", d.shape, d.dtype))
        power *= -self.beta
        return np.exp(power, out=power)

    def _window_sums(self, values, sums, below):
        """sums[..., c] = sum of values[..., c - below : c - below + size], as far as there are channels."""
        channels = values.shape[-1]
        sums[...] = 0
        for shift in range(-below, self.size - below):
            a, b = max(0, -shift), min(channels, channels - shift)
            if a < b:
                sums[..., a:b] += values[..., a + shift : b + shift]


def _check_features(in_shape, features) -> None:
    if not in_shape or in_shape[-1] != features:
        raise ShapeError(f"expects {features} features on the last axis, given samples of shape {in_shape}")


def _row_means(rows, ctx) -> np.ndarray:
    """Mean of each row, as a column."""
    means = np.matmul(rows, ctx.ones(rows.shape[1], rows.dtype))
    means *= 1 / rows.shape[1]
    return means[:, None]
