"""Layers that only change the shape of a sample: views, nothing is copied."""

import math

from nn.arguments import COUNT
from nn.core.layer import Layer, ShapeError
from nn.registry import register


@register("layer")
class Flatten(Layer):
    """(N, ...) -> (N, product of the rest).

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.Flatten(), (4, 4, 3)).out_shape
    (48,)
    """

    output = "view"
    gradient = "view"

    def specs(self, in_shape):
        return {}, (math.prod(in_shape),)

    def forward(self, p, x, ctx):
        return x.reshape(len(x), math.prod(x.shape[1:])), x.shape

    def backward(self, p, gy, shape, ctx):
        return gy.reshape(shape), {}


def _sizes(what: str, value: tuple) -> tuple[int, ...]:
    if any(isinstance(size, tuple | list) for size in value):
        raise TypeError(f"{what} is given size by size, such as nn.Reshape(2, 3), given {value!r:.80}")
    return tuple(COUNT(what, size) for size in value)


@register("layer")
class Reshape(Layer):
    """(N, ...) -> (N, *shape), elements in the same order.

    Parameters
    ----------
    *shape : int
        Shape of one sample, without the batch axis.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.Reshape(4, 3), (12,)).out_shape
    (4, 3)
    """

    output = "view"
    gradient = "view"
    constraints = {"shape": _sizes}

    def __init__(self, *shape: int):
        self.shape = shape

    def specs(self, in_shape):
        if math.prod(in_shape) != math.prod(self.shape):
            raise ShapeError(
                f"cannot give samples of shape {in_shape} ({math.prod(in_shape)} elements) the shape {self.shape}"
            )
        return {}, self.shape

    def forward(self, p, x, ctx):
        return x.reshape(len(x), *self.shape), x.shape

    def backward(self, p, gy, shape, ctx):
        return gy.reshape(shape), {}
