"""Attention by blocks equals attention by whole rows; rotary positions; golden numbers of both."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

import nn
from nn.analysis.gradcheck import gradcheck
from nn.core.memory_pool import MemoryPool
from nn.layers.attention import MultiHeadAttention, block_size
from nn.layers.blockwise import BlockwiseAttention, blocks

PADDING = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]], bool)


def pad(ctx):
    ctx.micro_batch.padding = PADDING


def sample(shape=(3, 5, 12), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def golden():
    """q, k, v and the gradient of the result: formulas of one index, so that others can compare."""
    i = np.moveaxis(np.arange(32.0).reshape(1, 8, 2, 2), 1, 2)
    return np.sin(i), np.cos(2 * i), np.sin(3 * i + 1), np.cos(i / 2)


def attend(q, k, v, gy, pieces, causal, size):
    """Forward and backward where keys come in pieces, each an array of positions: (y, gq, gk, gv)."""
    scale = 1 / np.sqrt(q.shape[3])
    running = BlockwiseAttention(q * scale, np.arange(q.shape[2]), causal, size, MemoryPool())
    y = np.empty_like(q)
    running.start(y)
    for at in pieces:
        running.add(k[:, :, at], v[:, :, at], at)
    buffers = running.finish()
    running.start_backward(*buffers, y, gy)
    gq, gk, gv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for at in pieces:
        part = np.zeros_like(k[:, :, at]), np.zeros_like(v[:, :, at])
        running.add_backward(k[:, :, at], v[:, :, at], (gq, *part), at)
        gk[:, :, at] += part[0]
        gv[:, :, at] += part[1]
    lse = buffers[0] + np.log(buffers[1])
    return y, lse[..., 0], gq * scale, gk, gv


# Sums of squares of y, m + log l, gq, gk and gv; and one row of y.
ALL_SEEN = [3.317104396453, 75.492994230882, 0.016463566885, 0.151158420632, 1.220755200507], [-0.26346525, 0.27680589]
CAUSAL = [5.133121511635, 39.743417782840, 0.034240472577, 0.127453339659, 2.111360289398], [-0.21264039, 0.29431369]


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("causal, expected", [(False, ALL_SEEN), (True, CAUSAL)])
def test_golden_numbers(causal, expected, size):
    squares, row = expected
    for pieces in ([np.arange(8)], [np.array([0, 1, 6, 7]), np.arange(2, 6)], [np.arange(5, 8), np.arange(5)]):
        found = attend(*golden(), pieces, causal, size)
        np.testing.assert_allclose([(array**2).sum() for array in found], squares, rtol=1e-10)
        np.testing.assert_allclose(found[0][0, 0, 5], row, atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(*[st.integers(1, 4)] * 3, st.integers(1, 9), st.integers(1, 10), st.booleans(), st.booleans(), st.booleans())
def test_any_shape(batch, heads, half, places, size, causal, rotary, padded):
    x = sample((batch, places, heads * half * 2), places)

    def setup(ctx):
        padding = np.random.default_rng(size).random((batch, places)) < 0.4
        padding[:, 0] = False
        ctx.micro_batch.padding = padding if padded else None

    whole = one_pass(MultiHeadAttention(heads * half * 2, heads, causal, rotary=rotary), x, setup=setup)
    layer = MultiHeadAttention(heads * half * 2, heads, causal, rotary=rotary, attention=f"blocks:{size}")
    by_blocks = one_pass(layer, x, setup=setup, gy=whole.gy, w=whole.w)
    np.testing.assert_allclose(by_blocks.y, whole.y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(by_blocks.gx, whole.gx, rtol=1e-11, atol=1e-12)
    for name in whole.g:
        np.testing.assert_allclose(by_blocks.g[name], whole.g[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", ["whole", "blocks:2"])
@pytest.mark.parametrize("setup", [None, pad])
def test_gradient_and_contract(causal, attention, setup):
    layer = MultiHeadAttention(12, 3, causal, attention=attention, rotary=True)
    assert gradcheck(layer, sample(), setup=setup) < 1e-6
    check_contract(layer, sample(), setup=setup)
    check_micro_batches(layer, sample((5, 4, 12)))


def test_large_scores_are_as_exact_as_those_of_whole_rows():
    """m and l apart: exp(S - (m + log l)) would be wrong by eps |S|."""
    q, k, v, gy = (10 * sample((1, 2, 16, 4), seed) for seed in range(4))
    one, others = (attend(q, k, v, gy, [np.arange(16)], True, size) for size in (16, 3))
    for whole, parts in zip(one, others, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-13 * max(1, abs(whole).max()))


def test_a_block_normalised_alone_would_be_wrong():
    """The control: statistics of the last piece in place of those of the whole row."""
    q, k, v, gy = golden()
    right = attend(q, k, v, gy, [np.arange(8)], False, 4)[2]
    running = BlockwiseAttention(q / np.sqrt(2), np.arange(8), False, 4, MemoryPool())
    y = np.empty_like(q)
    running.start(y)
    running.add(k[:, :, 4:], v[:, :, 4:], np.arange(4, 8))
    buffers = running.finish()
    running.start_backward(*buffers, y, gy)
    gq = np.zeros_like(q)
    running.add_backward(k, v, (gq, np.zeros_like(k), np.zeros_like(v)), np.arange(8))
    assert abs(gq / np.sqrt(2) - right).max() > 1e-3


def test_no_square_array_is_kept_or_made():
    T = 512
    layer = nn.Network(MultiHeadAttention(16, 2, causal=True, attention="blocks:32"), (T, 16), np.float64)
    ctx = layer.context()
    ctx.network_context.input_gradient = True
    buffer = layer.layout.zeros(np.float64)
    layer.layout.initialize(buffer, 0)
    p, g = layer.layout.views(buffer), layer.layout.views(np.zeros_like(buffer))
    y, saved = layer.forward(p, sample((1, T, 16)), ctx)
    layer.backward(p, g, np.ones_like(y), saved, ctx)
    whole_scores = 2 * T * T * 8
    assert ctx.network_context.pool.nbytes < whole_scores / 2


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_one_block_are_computed_whole(causal):
    """To the bit, for whole scores are faster there; longer ones are added up in another order."""
    for size, same in ((8, True), (7, False)):
        whole = one_pass(MultiHeadAttention(12, 3, causal), sample((2, 8, 12)))
        layer = MultiHeadAttention(12, 3, causal, attention=f"blocks:{size}")
        by_blocks = one_pass(layer, sample((2, 8, 12)), gy=whole.gy, w=whole.w)
        assert (by_blocks.y.tobytes() == whole.y.tobytes()) == same


def test_blocks_of_positions():
    assert [(b.rows, b.position) for b in blocks(np.array([0, 1, 2, 6, 7]), 2)] == [
        (slice(0, 2), 0),
        (slice(2, 3), 2),
        (slice(3, 5), 6),
    ]
    assert blocks(np.array([], int), 4) == []


@pytest.mark.parametrize("attention", ["block", "blocks:0", "blocks:-1", "blocks:x", "blocks:1,2", "", "whole:3"])
def test_unknown_kinds_of_attention_are_refused(attention):
    with pytest.raises(ValueError, match='attention must be "whole", or "blocks:SIZE"'):
        MultiHeadAttention(8, 2, attention=attention)
    assert block_size("blocks") == 128 and block_size("whole") == 0


# ------------------------------------------------------------------------------------------------ rotary positions


def test_rotary_positions_turn_pairs_as_complex_numbers():
    x = sample((2, 5, 6))
    result = one_pass(nn.RotaryPositions(), x)
    angles = np.arange(5)[:, None] * 10000.0 ** (-2 * np.arange(3) / 6)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    np.testing.assert_allclose(result.y[..., 0::2], turned.real, atol=1e-12)
    np.testing.assert_allclose(result.y[..., 1::2], turned.imag, atol=1e-12)
    assert gradcheck(nn.RotaryPositions(), x) < 1e-6
    check_contract(nn.RotaryPositions(), x)


def test_products_of_turned_vectors_depend_on_distance_alone():
    q, k = sample((1, 1, 8)), sample((1, 1, 8), 1)
    turned = [one_pass(nn.RotaryPositions(), np.repeat(array, 12, axis=1)).y[0] for array in (q, k)]
    scores = turned[0] @ turned[1].T
    for distance in range(-5, 6):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-12)
    assert np.ptp(scores) > 0.1


def test_odd_features_cannot_be_turned():
    with pytest.raises(nn.ShapeError, match="the features even"):
        nn.Network(nn.RotaryPositions(), (4, 3))
    with pytest.raises(ValueError, match="rotary turns pairs"):
        MultiHeadAttention(9, 3, rotary=True)


# ------------------------------------------------------------------------------------------------ models by name


def test_a_model_takes_options_by_name():
    network = nn.models.build("transformer:16,2,1,positions=rotary,dropout=0.1,attention=blocks:4", (8,), 10)
    assert "attention='blocks:4', rotary=True" in repr(network.root) and "Dropout(rate=0.1)" in repr(network.root)
    assert "LearnedPositions" not in repr(network.root)
    same = nn.models.build("transformer:16,2,1,1", (8,), 10)
    assert repr(nn.models.build("transformer:16,2,blocks=1,tied=1", (8,), 10).root) == repr(same.root)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("transformer:16,heads=4,2", "what is '2'"),
        ("transformer:16,features=3", "what is 'features=3'"),
        ("transformer:dropout=much", "dropout"),
        ("transformer:positions=x", "positions"),
        ("mlp:64,width=3", "takes nothing"),
    ],
)
def test_options_that_a_model_does_not_have_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        nn.models.build(spec, (8,), 10)
