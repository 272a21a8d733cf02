"""Fully connected layer: y = x W + b.

Backprop (the second and the last two of the four equations, for a whole batch at once):
gx = gy W^T, gW = x^T gy, gb = sum of gy over the batch.
"""

import math

import numpy as np

from nn.arguments import SIZE
from nn.core.gradients import Product, RowSum, dot
from nn.core.layer import Initializer, Layer, ShapeError, Spec
from nn.initializers import glorot, zeros
from nn.registry import register


@register("layer")
class Linear(Layer):
    """y = x W + b on the last axis.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last axis of x and y; axes before it are kept, such as time in (N, T, D).
    bias : bool
    init, bias_init : initializer
        For W of shape (in_features, out_features) and b of shape (out_features,).

    Examples
    --------
    >>> import nn
    >>> network = nn.Network(nn.Linear(3, 2), (3,))
    >>> network.out_shape
    (2,)
    >>> network.layout.count
    8
    """

    output = gradient = "new"
    constraints = {"in_features": SIZE, "out_features": SIZE}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: Initializer = glorot,
        bias_init: Initializer = zeros,
    ):
        self.in_features, self.out_features, self.bias = in_features, out_features, bias
        self.init, self.bias_init = init, bias_init

    def specs(self, in_shape):
        if not in_shape or in_shape[-1] != self.in_features:
            raise ShapeError(
                f"expects {self.in_features} features on the last axis, given samples of shape {in_shape}"
                + (" (is a Flatten missing?)" if math.prod(in_shape) == self.in_features else "")
            )
        specs = {"W": Spec((self.in_features, self.out_features), self.init)}
        if self.bias:
            specs["b"] = Spec((self.out_features,), self.bias_init, decay=False)
        return specs, (*in_shape[:-1], self.out_features)

    def macs(self, in_shape):
        return math.prod(in_shape) * self.out_features

    def forward(self, p, x, ctx):
        rows, W = _rows(x), p.W
        y = ctx.empty((len(rows), W.shape[1]), x.dtype)
        dot(rows, W, y)
        if (b := getattr(p, "b", None)) is not None:
            y += b
        return (y if x.ndim == 2 else y.reshape(*x.shape[:-1], W.shape[1])), x

    def backward(self, p, gy, x, ctx):
        rows = _rows(gy)
        gradients = {"W": Product(_rows(x).T, rows)}
        if getattr(p, "b", None) is not None:
            gradients["b"] = RowSum(rows)
        if not ctx.needs_input_grad:
            return None, gradients
        gx = ctx.empty(x.shape, x.dtype)
        dot(rows, p.W.T, gx if x.ndim == 2 else _rows(gx))
        return gx, gradients


def _rows(array: np.ndarray) -> np.ndarray:
    """All axes but the last as one: a matrix, and a view where that is possible."""
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


@register("layer")
class TiedLinear(Layer):
    """y = x W^T with the matrix of an earlier layer: the output weights of a language model are its embedding.

    Parameters
    ----------
    source : str
        Full name of that matrix, such as "0.W", of shape (out_features, in_features).
    in_features, out_features : int

    Examples
    --------
    >>> import nn
    >>> layers = nn.Sequential(nn.Embedding(100, 16), nn.TiedLinear("0.W", 16, 100))
    >>> network = nn.Network(layers, (12,))
    >>> network.out_shape
    (12, 100)
    >>> network.layout.count
    1600
    """

    output = gradient = "new"
    constraints = {"in_features": SIZE, "out_features": SIZE}

    def __init__(self, source: str, in_features: int, out_features: int):
        self.source, self.in_features, self.out_features = source, in_features, out_features

    def specs(self, in_shape):
        if not in_shape or in_shape[-1] != self.in_features:
            raise ShapeError(f"expects {self.in_features} features on the last axis, given samples of shape {in_shape}")
        tied = Spec((self.out_features, self.in_features), zeros, tied=self.source)
        return {"W": tied}, (*in_shape[:-1], self.out_features)

    def macs(self, in_shape):
        return math.prod(in_shape) * self.out_features

    def forward(self, p, x, ctx):
        y = ctx.empty((*x.shape[:-1], len(p.W)), x.dtype)
        dot(_rows(x), p.W.T, _rows(y))
        return y, x

    def backward(self, p, gy, x, ctx):
        rows = _rows(gy)
        gx = ctx.empty(x.shape, x.dtype)
        dot(rows, p.W, _rows(gx))
        return gx, {"W": Product(rows.T, _rows(x))}
