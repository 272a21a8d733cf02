"""Batch normalisation: every channel is normalised over all samples and positions of the batch.

    xhat = (x - mean) / sqrt(var + eps)        y = gamma xhat + beta
    gx = gamma / sqrt(var + eps) * (gy - mean(gy) - xhat mean(gy xhat))

Costs about five passes over the activations forward, six backward, so what counts is bytes: work goes by blocks that
stay in the cache, sums over positions are products with a vector of ones, and per-channel vectors are repeated so that
inner loops are long.

Sources: Ioffe and Szegedy 2015; Goyal et al. 2017 (gamma 0, no weight decay).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from nn.arguments import NOT_NEGATIVE, SIZE, Number
from nn.core.layer import Initializer, Layer, ShapeError, Spec
from nn.initializers import ones, zeros
from nn.registry import register

BLOCK = 1 << 17  # elements worked on at a time
WIDTH, LONG = 512, 8192  # elements of an inner loop, about: in sums over rows, and in products with a row
MOSTLY = 0.9  # part of the squares that may be the mean's: then a digit of the variance is lost


class BatchNorm(Layer):
    """Each channel (last axis) is normalised over all other axes of the batch; BatchNorm1d and BatchNorm2d say of what.

    Parameters
    ----------
    features : int
        Channels.
    eps : float
        Added to the variance.
    momentum : float
        For the running statistics, which evaluation uses: running = (1 - momentum) running + momentum batch.
        The batch's variance is divided by n for normalising, and by n - 1 in the running statistics.
    synchronized : bool
        Take the statistics over the samples of all members of ctx.group("data"), each with its true count, which may
        be 0. Every member must take part.
    init : initializer
        For gamma: ones, or zeros for the last normalisation of a residual branch (Goyal et al. 2017).
    """

    output = gradient = "new"
    dimensions: tuple[int, ...] = ()
    expects = ""

    constraints = {"features": SIZE, "eps": NOT_NEGATIVE, "momentum": Number(0, most=1)}

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        synchronized: bool = False,
        init: Initializer = ones,
    ):
        self.features, self.eps, self.momentum = features, eps, momentum
        self.synchronized, self.init = synchronized, init

    def specs(self, in_shape):
        if len(in_shape) not in self.dimensions or in_shape[-1] != self.features:
            raise ShapeError(
                f"expects {self.expects} with {self.features} on the last axis, given samples of shape {in_shape}"
            )
        shape = (self.features,)
        return {
            "gamma": Spec(shape, self.init, decay=False),
            "beta": Spec(shape, zeros, decay=False),
            "mean": Spec(shape, zeros, buffer=True),
            "var": Spec(shape, ones, buffer=True),
        }, in_shape

    def forward(self, p, x, ctx):
        features = len(p.gamma)
        rows = _wide(x, features, WIDTH)
        count, mean, var = None, ctx.buffers.mean.astype(np.float64), ctx.buffers.var.astype(np.float64)
        if ctx.training and (len(x) or self.synchronized):
            count, mean, var = self._moments(rows, x.size // features, features, ctx) or (count, mean, var)
        if count is not None:  # else evaluation; or no samples, of which there is nothing to normalise
            self._update_running(count, mean, var, ctx.buffers)
        scale = 1 / np.sqrt(var + self.eps)
        y = ctx.empty(x.shape, x.dtype)
        slope = p.gamma * scale
        self._apply(_wide(x, features, LONG), slope, p.beta - slope * mean, y, ctx)
        return y, (x, count, mean, scale)

    def backward(self, p, gy, saved, ctx):
        x, count, mean, scale = saved
        rows, upstream = _wide(x, len(p.gamma), WIDTH), _wide(gy, len(p.gamma), WIDTH)
        partial = _partial_sums(rows, ctx)
        for i, block in enumerate(_blocks(rows)):
            _add_up(upstream[block], rows[block], partial[:, i], ctx)
        sums = _collect(partial, len(p.gamma))  # of gy, and of gy x
        sums[1] = scale * (sums[1] - mean * sums[0])  # of gy xhat
        gradients = {"beta": sums[0], "gamma": sums[1]}
        if count is not None and self.synchronized:
            sums = sums.copy()
            ctx.group("data").sum(sums)
        if not ctx.needs_input_grad:
            return None, gradients
        slope = p.gamma * scale
        gx = ctx.reuse_grad(gy) if gy.flags.c_contiguous else ctx.empty(gy.shape, gy.dtype)
        rows, upstream = _wide(x, len(p.gamma), LONG), _wide(gy, len(p.gamma), LONG)
        if count is None:  # statistics were given, not computed
            self._apply(upstream, slope, 0 * slope, gx, ctx)
            return gx, gradients
        # gx = slope gy + along x + constant, where the last two are -slope (mean(gy) + xhat mean(gy xhat))
        along = -slope * scale * sums[1] / count
        constant = -slope * sums[0] / count - along * mean
        slope = _repeat("slope", slope, rows, ctx)
        along, constant = _repeat("along", along, rows, ctx), _repeat("constant", constant, rows, ctx)
        target = gx.reshape(rows.shape)
        for block in _blocks(rows):
            shift = np.multiply(rows[block], along, out=ctx.workspace("block", rows[block].shape, x.dtype))
            shift += constant
            piece = np.multiply(upstream[block], slope, out=target[block])
            piece += shift  # target[block] += shift would copy the block onto itself once more
        return gx, gradients

    def _moments(self, rows, n, features, ctx):
        """(count, mean, variance) of every channel, over this batch or all of the group; sums in float64.

        None where no member has samples: a batch cut into more micro-batches than samples has empty ones.
        Where the mean makes up nearly all of the squares, they are summed again about the mean, which loses less.
        """
        sums, squares = self._sums(rows, None, features, ctx)
        if (sums * sums > MOSTLY * n * squares).any():
            center = (sums / n).astype(rows.dtype)
            sums, squares = self._sums(rows, _repeat("center", center, rows, ctx), features, ctx)
            squares -= sums * sums / n
            sums += n * center.astype(np.float64)
        elif n:
            squares -= sums * sums / n
        np.maximum(squares, 0, out=squares)  # now about the mean
        count = float(n)
        group = ctx.group("data")
        if self.synchronized and group.size > 1:
            own = sums / max(n, 1)
            total = np.append(sums, count)
            group.sum(total)
            count, sums = total[-1], total[:-1]
            squares += n * (own - sums / max(count, 1)) ** 2  # of a member without samples: nothing
            group.sum(squares)
        if not count:
            return None
        if count < 2:
            raise ValueError(
                f"{ctx.description}: {int(count)} values for each channel in training, and a variance needs "
                "at least two: use a larger batch, or evaluation mode"
            )
        return count, sums / count, squares / count

    def _sums(self, rows, center, features, ctx):
        """Return the sums of x, and of its squares, for every channel; those of x - center where that is given."""
        partial = _partial_sums(rows, ctx)
        for i, block in enumerate(_blocks(rows)):
            part = rows[block]
            if center is not None:
                part = np.subtract(part, center, out=ctx.workspace("block", part.shape, rows.dtype))
            _add_up(part, part, partial[:, i], ctx)
        return _collect(partial, features)

    def _update_running(self, count, mean, var, state):
        keep = 1 - self.momentum
        state.mean[...] = keep * state.mean + self.momentum * mean
        state.var[...] = keep * state.var + self.momentum * (count / (count - 1)) * var

    def _apply(self, rows, scale, shift, out, ctx):
        """out = scale rows + shift."""
        scale, shift = _repeat("slope", scale, rows, ctx), _repeat("constant", shift, rows, ctx)
        out = out.reshape(rows.shape)
        for block in _blocks(rows):
            piece = np.multiply(rows[block], scale, out=out[block])
            piece += shift


@register("layer")
class BatchNorm1d(BatchNorm):
    """BatchNorm of features (N, C) or sequences (N, T, C); parameters as for BatchNorm.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.BatchNorm1d(8), (8,)).out_shape
    (8,)
    """

    dimensions = (1, 2)
    expects = "features (C,) or (T, C)"


@register("layer")
class BatchNorm2d(BatchNorm):
    """BatchNorm of images (N, H, W, C); parameters as for BatchNorm.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.BatchNorm2d(3), (8, 8, 3)).out_shape
    (8, 8, 3)
    """

    dimensions = (3,)
    expects = "images (height, width, channels)"


def _wide(x, features: int, width: int) -> np.ndarray:
    """x as rows that hold several positions' channels each: long inner loops."""
    x = np.ascontiguousarray(x)
    return x.reshape(-1, features * _positions(x.size // features, features, width))


@cache
def _positions(count: int, features: int, width: int) -> int:
    """The largest divisor of `count` that keeps a row within `width`."""
    limit = min(count, max(1, width // features))
    return next((n for n in range(limit, 1, -1) if count % n == 0), 1)


def _blocks(rows):
    """Slices of about BLOCK elements."""
    step = _step(rows)
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _step(rows) -> int:
    return max(1, BLOCK // rows.shape[1])


def _repeat(name: str, vector, rows, ctx) -> np.ndarray:
    """One value for each channel, repeated over a row of `_wide`, in the workspace `name`."""
    repeated = ctx.workspace(name, (rows.shape[1] // len(vector), len(vector)), rows.dtype)
    repeated[...] = vector
    return repeated.reshape(-1)


def _partial_sums(rows, ctx) -> np.ndarray:
    """Workspace for two sums over every block: (2, blocks, width)."""
    blocks = -(-len(rows) // _step(rows))
    return ctx.workspace("partial sums", (2, blocks, rows.shape[1]), rows.dtype)


def _add_up(a, b, sums, ctx) -> None:
    """Sums over rows of a, and of a * b."""
    np.matmul(ctx.ones(len(a), a.dtype), a, out=sums[0])
    np.einsum("ij,ij->j", a, b, out=sums[1])


def _collect(partial, features: int) -> np.ndarray:
    """Two sums for each channel, in float64, from those over blocks."""
    return partial.sum(axis=1, dtype=np.float64).reshape(2, -1, features).sum(axis=1)
