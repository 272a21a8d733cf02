"""The network of the projects: a multilayer perceptron in float64, short enough to be read before one begins.

Its parameters are one flat vector `w`, layer after layer; a gradient is a vector of the same layout. Do not change this
file: the grader brings its own copy.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np


class Layer:
    """x -> tanh(x W + b), or x W + b for the last layer.

    Attributes
    ----------
    lo, hi : int
        the layer's parameters are w[lo:hi], first W row by row, then b
    """

    def __init__(self, inputs: int, outputs: int, lo: int, last: bool):
        self.inputs, self.outputs, self.last = inputs, outputs, last
        self.lo, self.hi = lo, lo + (inputs + 1) * outputs

    def matrices(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return W (inputs, outputs) and b (outputs,) as views of the flat vector."""
        split = self.hi - self.outputs
        return w[self.lo : split].reshape(self.inputs, self.outputs), w[split : self.hi]

    def forward(self, w: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the output (N, outputs) for the input x (N, inputs)."""
        weights, bias = self.matrices(w)
        z = x @ weights + bias
        return z if self.last else np.tanh(z)

    def backward_input(self, w: np.ndarray, y: np.ndarray, gy: np.ndarray) -> np.ndarray:
        """Return dLoss/dx (N, inputs) from the output y and dLoss/dy."""
        return self._before_tanh(y, gy) @ self.matrices(w)[0].T

    def backward_weights(self, g: np.ndarray, x: np.ndarray, y: np.ndarray, gy: np.ndarray) -> None:
        """Add dLoss/dW and dLoss/db into g[lo:hi], from input x, output y and dLoss/dy."""
        gz = self._before_tanh(y, gy)
        weights, bias = self.matrices(g)
        weights += x.T @ gz
        bias += gz.sum(axis=0)

    def _before_tanh(self, y: np.ndarray, gy: np.ndarray) -> np.ndarray:
        return gy if self.last else gy * (1 - y * y)


class Network:
    """Layers of the given sizes and their parameters.

    Attributes
    ----------
    layers : list of Layer
    w : (size,) float64
    """

    def __init__(self, sizes: tuple[int, ...], seed: int = 0):
        self.layers, lo = [], 0
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            self.layers.append(Layer(inputs, outputs, lo, last=i == len(sizes) - 2))
            lo = self.layers[-1].hi
        self.w = 0.3 * np.random.default_rng(seed).normal(size=lo)

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input and the output of every layer: what `backward` needs."""
        arrays = [x]
        for layer in self.layers:
            arrays.append(layer.forward(self.w, arrays[-1]))
        return arrays

    def backward(self, g: np.ndarray, arrays: list[np.ndarray], gy: np.ndarray) -> Iterator[tuple[int, int]]:
        """Add the gradient into g, from the last layer to the first.

        Yields
        ------
        (lo, hi)
            g[lo:hi] is complete now. The caller may do something else before it continues the generator.
        """
        for i in reversed(range(len(self.layers))):
            layer, x, y = self.layers[i], arrays[i], arrays[i + 1]
            layer.backward_weights(g, x, y, gy)
            yield layer.lo, layer.hi
            if i:
                gy = layer.backward_input(self.w, y, gy)


def cross_entropy(z: np.ndarray, labels: np.ndarray, total: int) -> tuple[float, np.ndarray]:
    """Return the sum of the samples' cross-entropies over `total`, and its gradient (N, classes).

    With `total` = len(z) this is the mean. On many ranks `total` counts the samples of all ranks, so that the ranks'
    losses and gradients add up to those of the whole batch. There may be no samples here: then both are zero.
    """
    shifted = z - z.max(axis=1, keepdims=True) if len(z) else z
    p = np.exp(shifted)
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(z))
    loss = -np.log(p[rows, labels]).sum() / total
    p[rows, labels] -= 1
    return float(loss), p / total
