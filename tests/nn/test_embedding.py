"""Embedding and positions: gradients by hand, PyTorch, ids that do not exist."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.containers import Recompute
from nn.core.gradients import ScatterAdd, write_gradient
from nn.core.layer import Sequential, ShapeError
from nn.core.memory_pool import MemoryPool
from nn.core.network import Network
from nn.layers.attention import MultiHeadAttention
from nn.layers.dense import Linear, TiedLinear
from nn.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions, sinusoids

IDS = np.random.default_rng(0).integers(0, 7, (6, 5))
IDS[:, 0] = 3  # not padding everywhere


def test_gradients():
    assert gradcheck(Sequential(Embedding(7, 4), Linear(4, 3)), IDS) < 1e-6
    x = np.random.default_rng(1).standard_normal((3, 5, 4))
    assert gradcheck(LearnedPositions(5, 4), x) < 1e-6
    assert gradcheck(LearnedPositions(9, 4), x) < 1e-6
    assert gradcheck(SinusoidalPositions(), x) < 1e-6


def test_contract():
    check_contract(Embedding(7, 4), IDS)
    check_contract(Embedding(7, 4), IDS.astype(np.int32)[:, ::2])
    x = np.random.default_rng(1).standard_normal((3, 5, 4))
    check_contract(LearnedPositions(6, 4), x)
    check_contract(SinusoidalPositions(), x)


def test_micro_batches_in_flight():
    check_micro_batches(Sequential(Embedding(7, 4), LearnedPositions(6, 4), SinusoidalPositions(), Linear(4, 3)), IDS)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2**31))
def test_gradient_is_the_sum_over_the_places_of_an_id(vocabulary, shape, seed):
    ids = np.random.default_rng(seed).integers(0, vocabulary, shape)
    result = one_pass(Embedding(vocabulary, 3), ids)
    assert np.array_equal(result.y, result.w["W"][ids])
    naive = np.zeros((vocabulary, 3))
    for place in np.ndindex(ids.shape):
        naive[ids[place]] += result.gy[place]
    np.testing.assert_allclose(result.g["W"], naive, rtol=1e-12, atol=1e-13)
    assert result.gx is None


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([0, 1, 60, 500]), st.integers(1, 200), st.sampled_from([1.05, 2, None]), st.booleans())
def test_rows_of_rare_and_of_frequent_ids_are_summed(count, vocabulary, exponent, accumulate):
    rng = np.random.default_rng(count)
    ids = rng.integers(0, vocabulary, count) if exponent is None else rng.zipf(exponent, count) % vocabulary
    rows, first = rng.standard_normal((count, 3)), rng.standard_normal((vocabulary, 3))
    gradient, expected = first.copy(), first * accumulate
    write_gradient(gradient, ScatterAdd(ids, rows), accumulate, MemoryPool())
    np.add.at(expected, ids, rows)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


def test_pytorch():
    torch = pytest.importorskip("torch")
    result = one_pass(Embedding(7, 4), IDS)
    W = torch.from_numpy(result.w["W"].copy()).requires_grad_()
    torch.nn.functional.embedding(torch.from_numpy(IDS), W).backward(torch.from_numpy(result.gy))
    np.testing.assert_allclose(result.g["W"], W.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_ids_out_of_the_vocabulary_are_named():
    network = Network(Sequential(Embedding(7, 4)), (5,))
    p, ctx = network.layout.views(network.layout.zeros(np.float32)), network.context()
    for bad in (7, -1):
        ids = IDS.copy()
        ids[4, 2] = bad
        with pytest.raises(ValueError, match=rf"layer 0 .*id {bad} of sample 4, position \[2\].*0 to 6"):
            network.forward(p, ids, ctx)
    with pytest.raises(TypeError, match=r"layer 0 .*integer ids"):
        network.forward(p, IDS.astype(np.float32), ctx)


def test_padding_reaches_attention():
    """What stands at padded places changes nothing elsewhere."""
    ids = np.array([[3, 4, 0, 0, 0], [1, 2, 5, 0, 6]])
    layers = Embedding(7, 4, padding=0), LearnedPositions(5, 4), MultiHeadAttention(4, 2)
    result = one_pass(Sequential(*layers), ids)
    moved = {name: array.copy() for name, array in result.w.items()}
    moved["0.W"][0] += 5.0
    again = one_pass(Sequential(*layers), ids, w=moved)
    words = ids != 0
    np.testing.assert_allclose(again.y[words], result.y[words], rtol=1e-12)
    assert np.abs(again.y[~words] - result.y[~words]).max() > 0.01


def test_recomputed_attention_has_the_padding_of_its_micro_batch():
    check_micro_batches(Sequential(Embedding(7, 4, padding=0), Recompute(MultiHeadAttention(4, 2))), IDS)


def test_sinusoids():
    table = sinusoids(50, 7, np.dtype(np.float64))
    for t, i in ((0, 0), (3, 1), (49, 6), (17, 4)):
        angle = t / 10000 ** (2 * (i // 2) / 7)
        assert table[t, i] == pytest.approx(np.cos(angle) if i % 2 else np.sin(angle), abs=1e-12)


def test_shapes_that_do_not_fit_are_refused():
    for layer, shape in (
        (LearnedPositions(4, 3), (5, 3)),
        (LearnedPositions(4, 3), (4, 2)),
        (SinusoidalPositions(), (4,)),
    ):
        with pytest.raises(ShapeError, match="layer 0"):
            Network(Sequential(layer), shape)
    with pytest.raises(ValueError, match="at least 1"):
        Embedding(0, 3)
    with pytest.raises(ValueError, match="at least 1"):
        LearnedPositions(0, 3)
    with pytest.raises(ValueError, match="padding must be an id, 0 to 4, given 5"):
        Embedding(5, 3, padding=5)


def test_tied_output_weights():
    """The embedding's matrix is also the output's: one array, and its gradient the sum of both uses."""
    tied = one_pass(Sequential(Embedding(7, 4), LearnedPositions(5, 4), TiedLinear("0.W", 4, 7)), IDS)
    assert set(tied.w) == {"0.W", "1.W"}
    untied = Sequential(Embedding(7, 4), LearnedPositions(5, 4), Linear(4, 7, bias=False))
    w = {"0.W": tied.w["0.W"], "1.W": tied.w["1.W"], "2.W": tied.w["0.W"].T}
    apart = one_pass(untied, IDS, w=w, gy=tied.gy)
    np.testing.assert_allclose(tied.y, apart.y, rtol=1e-12)
    np.testing.assert_allclose(tied.g["0.W"], apart.g["0.W"] + apart.g["2.W"].T, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(tied.g["1.W"], apart.g["1.W"], rtol=1e-12, atol=1e-13)


def test_tied_weights_in_flight_and_with_three_users():
    layers = Sequential(Embedding(7, 4)), TiedLinear("0.0.W", 4, 7), Linear(7, 4), TiedLinear("0.0.W", 4, 7)
    assert gradcheck(Sequential(*layers), IDS) < 1e-6
    check_micro_batches(Sequential(*layers), IDS)


def test_finished_prefix_with_ties():
    """What `ready` reports as finished is never written again: the shared array only when its last user is through."""
    network = Network(Sequential(Embedding(7, 4), Linear(4, 4), TiedLinear("0.W", 4, 7)), (5,), np.float64)
    buffer, gradients = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
    network.layout.initialize(buffer, 0)
    ctx, seen = network.context(), []
    ctx.network_context.on_gradients_ready = lambda end: seen.append((end, gradients[:end].copy()))
    y, saved = network.forward(network.layout.views(buffer), IDS, ctx)
    network.backward(network.layout.views(buffer), network.layout.views(gradients), y.copy(), saved, ctx)
    assert [end for end, _ in seen] == [0, 32, 64, 64]
    for end, prefix in seen:
        assert np.array_equal(gradients[:end], prefix)
