"""Activations: gradients, PyTorch, extremes, and the normal distribution's tail."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Sequential, ShapeError
from nn.core.network import Network
from nn.layers import activations
from nn.layers.activations import (
    GELU,
    LeakyReLU,
    LogSoftmax,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
    row_maxima,
    softmax,
)
from nn.layers.dense import Linear
from nn.layers.gaussian import distribution
from nn.registry import registered

ALL = [
    Sigmoid(),
    Tanh(),
    ReLU(),
    LeakyReLU(0.2),
    GELU(),
    GELU(approximate=True),
    SiLU(),
    Softmax(),
    LogSoftmax(),
]
EACH = pytest.mark.parametrize("layer", ALL, ids=repr)


def sample(shape=(4, 3, 5), seed=0, scale=2.0):
    return scale * np.random.default_rng(seed).standard_normal(shape)


@EACH
def test_gradient(layer):
    assert gradcheck(layer, sample(seed=1)) < 1e-6


@EACH
def test_contract(layer):
    check_contract(layer, sample())


@EACH
def test_micro_batches_in_flight(layer):
    check_micro_batches(Sequential(Linear(5, 4), layer, Linear(4, 3)), sample((6, 5)))


@EACH
def test_where_x_and_gy_are_free_nothing_changes(layer):
    """After a Linear the activation writes over its input, before one over its gradient: same numbers."""
    x = sample((5, 6))
    free = one_pass(Sequential(Linear(6, 6), layer, Linear(6, 6)), x)
    network = free.network
    ctx = network.context()
    ctx.network_context.input_gradient = True
    assert ctx.children[1].may_overwrite_input and ctx.children[1].may_overwrite_grad
    for child in ctx.children:
        child.may_overwrite_input = child.may_overwrite_grad = False
    buffer = network.layout.zeros(np.float64)
    for name, array in network.layout.items(buffer):
        array[...] = free.w[name]
    p, g = network.layout.views(buffer), network.layout.views(buffer.copy())
    y, saved = network.forward(p, x, ctx)
    gx = network.backward(p, g, free.gy, saved, ctx)
    assert np.array_equal(y, free.y)
    assert np.array_equal(gx, free.gx)


@EACH
def test_pytorch(layer):
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    theirs = {
        "Sigmoid()": torch.sigmoid,
        "Tanh()": torch.tanh,
        "ReLU()": torch.relu,
        "LeakyReLU(slope=0.2)": lambda t: F.leaky_relu(t, 0.2),
        "GELU()": F.gelu,
        "GELU(approximate=True)": lambda t: F.gelu(t, approximate="tanh"),
        "SiLU()": F.silu,
        "Softmax()": lambda t: F.softmax(t, -1),
        "LogSoftmax()": lambda t: F.log_softmax(t, -1),
    }[repr(layer)]
    x = sample((40, 50, 11), scale=4.0)  # 22,000 elements: more than a block
    ours = one_pass(layer, x)
    t = torch.from_numpy(x).requires_grad_()
    y = theirs(t)
    y.backward(torch.from_numpy(ours.gy))
    np.testing.assert_allclose(ours.y, y.detach().numpy(), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(ours.gx, t.grad.numpy(), rtol=1e-10, atol=1e-13)


@EACH
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_stay_finite(layer, dtype):
    x = np.array([[-1e4, -100, -40, -1e-30, 0.0, 1e-30, 40, 100, 1e4]], dtype)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        result = one_pass(layer, x)
    assert np.isfinite(result.y).all()
    assert np.isfinite(result.gx).all()


@pytest.mark.parametrize("dtype, bound", [(np.float32, 2e-7), (np.float64, 1e-15)])
def test_normal_distribution_against_erfc(dtype, bound):
    x = np.linspace(-14, 14, 20001).astype(dtype)
    below, density, work = (np.empty_like(x) for _ in range(3))
    distribution(x, below, density, work)
    exact = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(float)])
    assert np.abs(below - exact).max() < bound
    np.testing.assert_allclose(density, np.exp(-0.5 * x.astype(float) ** 2) / math.sqrt(2 * math.pi), atol=bound)


def test_gelu_in_blocks_equals_gelu_of_each_element():
    x = sample((3, activations.BLOCK // 2 + 7))
    whole = one_pass(GELU(), x)
    exact = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.reshape(-1)[:: activations.BLOCK // 4]]
    np.testing.assert_allclose(whole.y.reshape(-1)[:: activations.BLOCK // 4], exact, rtol=1e-13, atol=1e-15)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(ALL), st.integers(0, 2**31))
def test_any_shape(shape, layer, seed):
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    result = one_pass(layer, x)
    flat = one_pass(layer, x.reshape(-1, shape[-1]), gy=result.gy.reshape(-1, shape[-1]))
    assert result.y.shape == result.gx.shape == x.shape
    np.testing.assert_allclose(result.y.reshape(flat.y.shape), flat.y, rtol=1e-12)
    np.testing.assert_allclose(result.gx.reshape(flat.y.shape), flat.gx, rtol=1e-12, atol=1e-15)


def test_softmax_rows_sum_to_one_and_log_softmax_is_its_logarithm():
    x = sample((7, 9), scale=30.0)
    soft, log = one_pass(Softmax(), x).y, one_pass(LogSoftmax(), x).y
    np.testing.assert_allclose(soft.sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(np.exp(log), soft, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("shape", [(5, 1), (3, 4, 7), (2, 3, 2, 64), (0, 3), (9,)])
def test_maxima_of_rows_are_those_of_numpy(shape):
    x = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    x.reshape(-1)[::5] = -np.inf
    x.reshape(-1)[1::11] = np.nan
    for rows in (x, np.repeat(x, 2, axis=-1)[..., ::2]):
        np.testing.assert_array_equal(row_maxima(rows), rows.max(axis=-1, keepdims=True))


def test_softmax_of_what_is_hidden_and_of_what_overflows():
    """A place that sees itself only has weight 1 there; NaN stays NaN, and in its own row."""
    x = np.array([[3e4, -np.inf, -np.inf], [-3e4, -3e4, -np.inf], [0.0, np.nan, 1.0]], np.float32)
    with np.errstate(over="raise", divide="raise"):
        y = softmax(x, x)
    np.testing.assert_array_equal(y, [[1, 0, 0], [0.5, 0.5, 0], [np.nan] * 3])


def test_bad_parameters_are_refused():
    for slope in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="slope"):
            LeakyReLU(slope)
    with pytest.raises(ShapeError, match="axis"):
        Network(Softmax(), ())


def test_names():
    for name, activation in registered("activation").items():
        assert activation.__name__.lower() == name.replace("_", "")


def test_softmax_of_one_row():
    """A vector is one row: of sums there is one, and no axis beside it."""
    from nn.layers.activations import softmax

    x = np.array([1.0, 3.0, -2.0])
    assert softmax(x, np.empty(3)) == pytest.approx(np.exp(x) / np.exp(x).sum(), rel=1e-15)
