"""The checks of 04_convolution.py."""

import numpy as np

import checks
import nn
from exercises.training import derivative


@checks.explain_errors
def check_size(output_size):
    for size, kernel, stride, padding in ((8, 3, 1, 0), (8, 3, 1, 1), (227, 11, 4, 0), (224, 7, 2, 3), (7, 2, 2, 0)):
        places = [
            i for i in range(-padding, size + padding) if (i + padding) % stride == 0 and i + kernel <= size + padding
        ]
        got = float(checks.numbers(output_size, size, kernel, stride, padding))
        checks.expect(
            got == len(places),
            f"a kernel of {kernel} with stride {stride} and padding {padding} has {len(places)} places in "
            f"{size} pixels; yours "
            f"says {got:g}.",
        )
    checks.right("as counted place by place")


def convolved(x, w):
    """By shifts: the sum over the kernel of shifted images times a matrix."""
    height, width = x.shape[1] - w.shape[0] + 1, x.shape[2] - w.shape[1] + 1
    shifts = np.ndindex(w.shape[:2])
    return sum(x[:, u : u + height, v : v + width] @ w[u, v] for u, v in shifts)


@checks.explain_errors
def check_weight_gradient(weight_gradient):
    rng = np.random.default_rng(10)
    x, w = rng.standard_normal((2, 5, 6, 2)), rng.standard_normal((3, 2, 2, 3))
    gy = rng.standard_normal((2, 3, 5, 3))
    got = checks.numbers(weight_gradient, x.copy(), gy.copy(), (3, 2), shape=w.shape)
    want = derivative(lambda w: np.sum(gy * convolved(x, w)), w)
    checks.expect(
        not np.allclose(got, want / 2, atol=1e-6), "it is the mean over the images; each adds its part to the gradient."
    )
    checks.same(got, want, "the gradient of w", tolerance=1e-6)
    checks.right("as by differences: a convolution of the input with the output's gradient")


@checks.explain_errors
def check_pooling(max_pool, max_pool_backward):
    rng = np.random.default_rng(11)
    x = rng.permutation(2 * 4 * 6 * 3).reshape(2, 4, 6, 3).astype(float)
    y = checks.numbers(max_pool, x.copy(), shape=(2, 2, 3, 3))
    network = nn.Network(nn.MaxPool2d(2), (4, 6, 3), np.float64)
    p = network.layout.views(network.layout.zeros(np.float64))
    checks.same(y, network.forward(p, x.copy(), network.context())[0], "the largest of each 2 x 2")
    gy = rng.standard_normal(y.shape)
    got = checks.numbers(max_pool_backward, x.copy(), gy, shape=x.shape)
    places = np.count_nonzero(got)
    checks.expect(
        places == gy.size,
        f"{places} inputs get a gradient; only the largest of each 2 x 2 has an influence: {gy.size} of them.",
    )
    checks.same(got, derivative(lambda x: np.sum(gy * convolve_max(x)), x), "the gradient of x", tolerance=1e-6)
    checks.right("the gradient goes to the pixel that was the largest, and to no other")


def convolve_max(x):
    return np.maximum(np.maximum(x[:, ::2, ::2], x[:, 1::2, ::2]), np.maximum(x[:, ::2, 1::2], x[:, 1::2, 1::2]))
