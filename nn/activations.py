"""Elementwise activations. Each keeps what its derivative is cheapest to compute from: the output, where it can."""

import numpy as np

from nn.layer import Layer


class Activation(Layer):
    """Base: shape in = shape out, no parameters; forward and backward write where `run` says it is free."""

    output = "kept"
    gradient = "view"

    def __repr__(self):
        return f"{type(self).__name__}()"


class Sigmoid(Activation):
    """y = 1 / (1 + exp(-x)), dy/dx = y (1 - y), from the stored output.

    Computed as (1 + tanh(x/2)) / 2: it cannot overflow, and is the fastest form in NumPy.
    """

    def forward(self, p, x, run):
        y = np.multiply(x, 0.5, out=run.like_x(x))
        np.tanh(y, out=y)
        y *= 0.5
        y += 0.5
        return y, y

    def backward(self, p, g, gy, y, run):
        slope = np.subtract(1, y, out=run.scratch("slope", y.shape, y.dtype))
        slope *= y
        return np.multiply(gy, slope, out=run.like_gy(gy))


class Tanh(Activation):
    """y = tanh(x), dy/dx = 1 - y^2."""

    def forward(self, p, x, run):
        y = np.tanh(x, out=run.like_x(x))
        return y, y

    def backward(self, p, g, gy, y, run):
        slope = np.multiply(y, y, out=run.scratch("slope", y.shape, y.dtype))
        np.subtract(1, slope, out=slope)
        return np.multiply(gy, slope, out=run.like_gy(gy))


class ReLU(Activation):
    """y = max(x, 0), dy/dx = 1 where y > 0, else 0."""

    def forward(self, p, x, run):
        y = np.maximum(x, 0, out=run.like_x(x))
        return y, y

    def backward(self, p, g, gy, y, run):
        return np.multiply(gy, y > 0, out=run.like_gy(gy))


BY_NAME: dict[str, type[Layer]] = {"relu": ReLU, "sigmoid": Sigmoid, "tanh": Tanh}
