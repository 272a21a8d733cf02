"""Linear: the four equations written out, PyTorch, shapes; and what the engine promises of any layer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Layer, Sequential, ShapeError, Spec
from nn.core.network import Network
from nn.layers.activations import Sigmoid
from nn.layers.dense import Linear, TiedLinear
from nn.layers.reshaping import Flatten, Reshape


def sample(shape=(5, 4), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4), (2, 3, 2, 4), (1, 4)])
def test_gradient_and_contract(shape, bias):
    layer = Linear(4, 3, bias=bias)
    assert gradcheck(layer, sample(shape)) < 1e-6
    check_contract(layer, sample(shape))


def test_micro_batches_in_flight():
    check_micro_batches(Sequential(Linear(4, 6), Sigmoid(), Linear(6, 3)), sample())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 6), st.integers(0, 2**31))
def test_element_by_element(shape, outputs, seed):
    x = sample(shape, seed)
    r = one_pass(Linear(shape[-1], outputs), x)
    W, b = r.w["W"], r.w["b"]
    y, gx, gW, gb = np.zeros_like(r.y), np.zeros_like(x), np.zeros_like(W), np.zeros_like(b)
    for place in np.ndindex(x.shape[:-1]):
        for k in range(outputs):
            y[place][k] = sum(x[place][j] * W[j, k] for j in range(shape[-1])) + b[k]
            gb[k] += r.gy[place][k]
            for j in range(shape[-1]):
                gx[place][j] += r.gy[place][k] * W[j, k]
                gW[j, k] += x[place][j] * r.gy[place][k]
    for ours, naive in ((r.y, y), (r.gx, gx), (r.g["W"], gW), (r.g["b"], gb)):
        np.testing.assert_allclose(ours, naive, rtol=1e-11, atol=1e-12)


def test_pytorch():
    torch = pytest.importorskip("torch")
    x = sample((7, 3, 4))
    ours = one_pass(Linear(4, 6), x)
    t, W, b = (torch.from_numpy(a.copy()).requires_grad_() for a in (x, ours.w["W"].T, ours.w["b"]))
    y = torch.nn.functional.linear(t, W, b)
    y.backward(torch.from_numpy(ours.gy))
    pairs = [(ours.y, y.detach()), (ours.gx, t.grad), (ours.g["W"], W.grad.T), (ours.g["b"], b.grad)]
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-10, atol=1e-12)


def test_gradients_by_an_older_version_of_the_weights():
    """A pipeline's backward uses the weights of its forward, whatever has happened to the newest since."""
    network = Network(Sequential(Linear(4, 6), Sigmoid(), Linear(6, 3)), (4,), np.float64)
    old = network.layout.zeros(np.float64)
    network.layout.initialize(old, 0)
    ctx, gradients = network.context(), [network.layout.zeros(np.float64) for _ in range(2)]
    new = old.copy()
    p_old, p_new = network.layout.views(old), network.layout.views(new)
    y, saved = network.forward(p_old, sample(), ctx)
    network.backward(p_old, network.layout.views(gradients[0]), np.ones_like(y), saved, ctx)
    y, saved = network.forward(p_new, sample(), ctx)
    new += 1.0
    network.backward(p_old, network.layout.views(gradients[1]), np.ones_like(y), saved, ctx)
    assert np.array_equal(*gradients)


def test_first_layer_computes_no_input_gradient():
    network = Network(Sequential(Flatten(), Sigmoid(), Linear(4, 6), Linear(6, 3)), (2, 2), np.float64)
    runs = network.context().children
    assert [ctx.needs_input_grad for ctx in runs] == [False, False, False, True]


@pytest.mark.parametrize(
    "layer, shape, words",
    [
        (Sequential(Linear(4, 3), Linear(4, 2)), (4,), r"layer 1 \(Linear\(4, 2\)\): expects 4 features.*\(3,\)"),
        (Sequential(Linear(4, 3)), (2, 2), "layer 0 .*is a Flatten missing"),
        (Sequential(Linear(4, 3)), (), r"layer 0 .*given samples of shape \(\)"),
        (Sequential(Sequential(Linear(4, 3), Linear(2, 2))), (4,), r"layer 0\.1 .*expects 2 features"),
        (Sequential(Linear(3, 4), TiedLinear("0.W", 4, 3)), (3,), "neither layer may have other parameters"),
        (Sequential(Linear(3, 4, bias=False), TiedLinear("0.W", 4, 5)), (3,), "layer 1"),
        (Sequential(TiedLinear("1.W", 3, 4), Linear(4, 3, bias=False)), (3,), "layer 0: .*no earlier layer has"),
        (Sequential(TiedLinear("7.W", 3, 4)), (3,), r"layer 0: .*'7\.W', which no earlier layer has"),
        (Sequential(TiedLinear("7.W", 2, 4)), (3,), "layer 0 .*expects 2 features"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(layer, shape, words):
    with pytest.raises(ShapeError, match=words):
        Network(layer, shape)


def test_batches_that_do_not_fit_are_refused():
    network = Network(Sequential(Linear(4, 3)), (4,))
    p, ctx = network.layout.views(network.layout.zeros(np.float32)), network.context()
    with pytest.raises(ShapeError, match=r"\(N, 4\), given \(5, 3\)"):
        network.forward(p, np.zeros((5, 3), np.float32), ctx)
    with pytest.raises(TypeError, match="float64"):
        network.forward(p, np.zeros((5, 4)), ctx)
    with pytest.raises(TypeError, match="int64"):
        network.forward(p, np.zeros((5, 4), np.int64), ctx)
    with pytest.raises(TypeError, match="dtype"):
        Network(Sequential(Linear(4, 3)), (4,), np.float16)
    with pytest.raises(ValueError, match="at least 1"):
        Linear(0, 3)
    with pytest.raises(TypeError, match="argument 1"):
        Sequential(Linear(4, 3), Sigmoid)
    with pytest.raises(ValueError, match="Sequential needs at least one"):
        Sequential()
    with pytest.raises(TypeError, match="argument 0"):
        Network(Sigmoid, (4,))


def test_an_empty_batch_passes_through():
    r = one_pass(Sequential(Linear(4, 6), Sigmoid(), Linear(6, 3)), np.zeros((0, 4)))
    assert r.y.shape == (0, 3) and r.gx.shape == (0, 4)
    places = one_pass(Linear(4, 6), np.zeros((0, 2, 4)))
    assert places.y.shape == (0, 2, 6) and places.gx.shape == (0, 2, 4) and not places.g["W"].any()
    assert all((g == 0).all() for g in r.g.values())


def test_reshaping_keeps_the_elements():
    x = sample((5, 2, 3, 4))
    flat = one_pass(Flatten(), x)
    assert np.array_equal(flat.y, x.reshape(5, 24)) and np.array_equal(flat.gx, flat.gy.reshape(x.shape))
    other = one_pass(Reshape(4, 6), x)
    assert np.array_equal(other.y, x.reshape(5, 4, 6)) and np.array_equal(other.gx, other.gy.reshape(x.shape))
    check_contract(Flatten(), x)
    check_contract(Reshape(6, 4), x)
    with pytest.raises(ShapeError, match=r"24 elements.*\(5, 5\)"):
        Network(Sequential(Reshape(5, 5)), (2, 3, 4))


def test_summary_counts():
    network = Network(Sequential(Flatten(), Linear(784, 30), Sigmoid(), Linear(30, 10)), (28, 28, 1), name="digits")
    lines = network.summary().splitlines()
    assert lines[0] == "digits (float32)"
    assert "23,550" in lines[4] and "23,520" in lines[4]
    assert lines[-1].split()[-2:] == ["23,860", "23,820"]


class Forgetful(Layer):
    """A layer without forward and backward."""

    def specs(self, in_shape):
        return {"W": Spec((1,), lambda rng, shape: np.ones(shape))}, in_shape


def test_a_layer_without_forward_says_so():
    with pytest.raises(TypeError, match="Forgetful does not define forward"):
        one_pass(Forgetful(), sample())


def test_sizes_are_whole_numbers_and_a_lone_layer_is_named_by_itself():
    with pytest.raises(TypeError, match="out_features"):
        Linear(4, 2.5)
    with pytest.raises(ShapeError, match=r"^Linear\(5, 4\)"):
        Network(Linear(5, 4), (3,))
