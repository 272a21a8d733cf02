"""Attention and the transformer block: a naive twin, PyTorch, masks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Sequential, ShapeError
from nn.core.network import Network
from nn.layers.attention import MultiHeadAttention, TransformerBlock

PADDING = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]], bool)


def pad(ctx):
    ctx.micro_batch.padding = PADDING


def sample(shape=(3, 5, 12), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def naive(w, x, heads, causal=False, padding=None):
    """One sample, head and place after the other, in the words of the paper."""
    N, T, D = x.shape
    size = D // heads
    y = np.zeros_like(x)
    for n in range(N):
        Q, K, V = np.split(x[n] @ w["Wqkv"] + w["bqkv"], 3, axis=1)
        mixed = np.zeros((T, D))
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            for t in range(T):
                seen = [s for s in range(T) if not (causal and s > t) and not (padding is not None and padding[n, s])]
                score = np.array([Q[t, part] @ K[s, part] for s in seen]) / np.sqrt(size)
                prob = np.exp(score) / np.exp(score).sum()
                mixed[t, part] = sum(pr * V[s, part] for pr, s in zip(prob, seen, strict=True))
        y[n] = mixed @ w["Wo"] + w["bo"]
    return y


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("setup", [None, pad])
def test_naive_twin_and_gradient(causal, setup):
    layer = MultiHeadAttention(12, 3, causal)
    result = one_pass(layer, sample(), setup=setup)
    expected = naive(result.w, sample(), 3, causal, PADDING if setup else None)
    np.testing.assert_allclose(result.y, expected, rtol=1e-11, atol=1e-12)
    assert gradcheck(layer, sample(), setup=setup) < 1e-6
    check_contract(layer, sample(), setup=setup)


@settings(max_examples=25, deadline=None)
@given(*[st.integers(1, 4)] * 4, st.booleans(), st.integers(0, 2**31))
def test_any_shape(batch, places, heads, size, causal, seed):
    x = sample((batch, places, heads * size), seed)
    result = one_pass(MultiHeadAttention(heads * size, heads, causal), x)
    np.testing.assert_allclose(result.y, naive(result.w, x, heads, causal), rtol=1e-10, atol=1e-12)


def test_without_bias():
    layer = MultiHeadAttention(12, 3, bias=False)
    result = one_pass(layer, sample())
    assert set(result.w) == {"Wqkv", "Wo"}
    zero = {"bqkv": np.zeros(36), "bo": np.zeros(12)}
    np.testing.assert_allclose(result.y, naive(result.w | zero, sample(), 3), rtol=1e-11, atol=1e-12)
    assert gradcheck(layer, sample()) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_pytorch(causal, padded):
    torch = pytest.importorskip("torch")
    x = sample((3, 5, 12))
    ours = one_pass(MultiHeadAttention(12, 3, causal), x, setup=pad if padded else None)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.from_numpy(ours.w["Wqkv"].T))
        theirs.in_proj_bias.copy_(torch.from_numpy(ours.w["bqkv"]))
        theirs.out_proj.weight.copy_(torch.from_numpy(ours.w["Wo"].T))
        theirs.out_proj.bias.copy_(torch.from_numpy(ours.w["bo"]))
    t = torch.from_numpy(x).requires_grad_()
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1) if causal else None
    padding = torch.from_numpy(PADDING) if padded else None
    y, _ = theirs(t, t, t, attn_mask=mask, key_padding_mask=padding)
    y.backward(torch.from_numpy(ours.gy))
    np.testing.assert_allclose(ours.y, y.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(ours.gx, t.grad.numpy(), rtol=1e-10, atol=1e-12)
    pairs = {
        "Wqkv": theirs.in_proj_weight.grad.T,
        "bqkv": theirs.in_proj_bias.grad,
        "Wo": theirs.out_proj.weight.grad.T,
        "bo": theirs.out_proj.bias.grad,
    }
    for name, gradient in pairs.items():
        np.testing.assert_allclose(ours.g[name], gradient.numpy(), rtol=1e-10, atol=1e-12)


def test_causal_places_do_not_see_what_follows():
    x = sample((2, 6, 8))
    layer = MultiHeadAttention(8, 2, causal=True)
    before = one_pass(layer, x).y
    changed = x.copy()
    changed[:, 4:] += 1.0
    after = one_pass(layer, changed).y
    assert np.array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 0.01


def test_large_scores_do_not_overflow():
    x = (200 * sample((2, 6, 8))).astype(np.float32)
    with np.errstate(over="raise", invalid="raise"):
        result = one_pass(MultiHeadAttention(8, 2, causal=True), x)
    assert np.isfinite(result.y).all() and np.isfinite(result.gx).all()


@pytest.mark.parametrize("causal, padding", [(True, [[0, 0, 0], [1, 0, 0]]), (False, [[0, 0, 1], [1, 1, 1]])])
def test_places_with_nothing_to_see_are_refused(causal, padding):
    def mask(ctx):
        ctx.micro_batch.padding = np.array(padding, bool)

    layer = Sequential(MultiHeadAttention(4, 2, causal))
    with pytest.raises(ValueError, match=r"layer 0 .*sample 1, position 0: padding masks every position"):
        one_pass(layer, sample((2, 3, 4)), setup=mask)


def test_padding_in_front_is_no_matter_where_all_is_seen():
    def mask(ctx):
        ctx.micro_batch.padding = np.array([[1, 1, 0], [0, 1, 0]], bool)

    result = one_pass(MultiHeadAttention(4, 2), sample((2, 3, 4)), setup=mask)
    expected = naive(result.w, sample((2, 3, 4)), 2, padding=np.array([[1, 1, 0], [0, 1, 0]], bool))
    np.testing.assert_allclose(result.y, expected, rtol=1e-11, atol=1e-12)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 heads do not divide 8 features"):
        MultiHeadAttention(8, 3)
    for shape in ((8,), (4, 6), (2, 4, 8)):
        with pytest.raises(ShapeError, match="positions, 8"):
            Network(Sequential(MultiHeadAttention(8, 2)), shape)


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_block(pre_norm, causal):
    block = TransformerBlock(8, 2, causal, pre_norm, hidden=12, dropout=0.2)
    assert gradcheck(block, sample((3, 4, 8))) < 1e-6
    check_contract(block, sample((3, 4, 8)))
    check_micro_batches(block, sample((5, 4, 8)))


@pytest.mark.parametrize("pre_norm", [True, False])
def test_block_pytorch(pre_norm):
    torch = pytest.importorskip("torch")
    x = sample((3, 5, 12))
    ours = one_pass(TransformerBlock(12, 3, pre_norm=pre_norm), x)
    theirs = torch.nn.TransformerEncoderLayer(
        *(12, 3, 48), dropout=0.0, activation="gelu", batch_first=True, norm_first=pre_norm, dtype=torch.float64
    )
    names = dict(zip(("at", "n1", "f1", "f2", "n2"), _names(pre_norm), strict=True))
    pairs = {
        "self_attn.in_proj_weight": f"{names['at']}.Wqkv",
        "self_attn.in_proj_bias": f"{names['at']}.bqkv",
        "self_attn.out_proj.weight": f"{names['at']}.Wo",
        "self_attn.out_proj.bias": f"{names['at']}.bo",
        "linear1.weight": f"{names['f1']}.W",
        "linear1.bias": f"{names['f1']}.b",
        "linear2.weight": f"{names['f2']}.W",
        "linear2.bias": f"{names['f2']}.b",
    }
    for torch_name, ours_name in (("norm1", names["n1"]), ("norm2", names["n2"])):
        scale, shift = (name for name in ours.w if name.startswith(f"{ours_name}."))
        pairs |= {f"{torch_name}.weight": scale, f"{torch_name}.bias": shift}
    assert sorted(pairs.values()) == sorted(ours.w)
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for theirs_name, name in pairs.items():
            parameters[theirs_name].copy_(torch.from_numpy(ours.w[name].T))
    t = torch.from_numpy(x).requires_grad_()
    y = theirs(t)
    y.backward(torch.from_numpy(ours.gy))
    np.testing.assert_allclose(ours.y, y.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(ours.gx, t.grad.numpy(), rtol=1e-10, atol=1e-11)
    for theirs_name, name in pairs.items():
        np.testing.assert_allclose(ours.g[name], parameters[theirs_name].grad.numpy().T, rtol=1e-10, atol=1e-11)


def _names(pre_norm):
    """Paths of attention, first norm, first and second linear layer, second norm."""
    if pre_norm:
        return "0.body.1", "0.body.0", "1.body.1", "1.body.3", "1.body.0"
    return "0.body.0", "1", "2.body.0", "2.body.2", "3"
