"""Dropout: rates, scales, and masks that belong to samples and not to batches."""

import math

import numpy as np
import pytest
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Sequential
from nn.core.network import Network
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout, keep_mask


def masked(ctx, shape=(8, 5), rate=0.5):
    return keep_mask(Dropout(rate).keep_count, shape, ctx).copy()


def a_run(layer=None, seed=0, step=0, sample=0):
    ctx = Network(layer or Dropout(), (5,), np.float64).context(seed=seed)
    ctx.micro_batch.step, ctx.micro_batch.start = step, sample
    return ctx


def test_gradient_and_contract():
    x = np.random.default_rng(0).standard_normal((4, 3, 5))
    assert gradcheck(Dropout(0.3), x) < 1e-6
    check_contract(Dropout(0.3), x)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.7])
def test_rate_and_scale(rate):
    x = np.ones((50, 4000))
    y = one_pass(Dropout(rate), x).y
    n = x.size
    zeros = np.count_nonzero(y == 0)
    assert abs(zeros - rate * n) < 5 * math.sqrt(n * rate * (1 - rate)) + n / 65536
    values = np.unique(y[y != 0])
    assert len(values) == 1
    assert values[0] == pytest.approx(1 / (1 - rate), rel=1e-4)


def test_evaluation_is_the_identity():
    def evaluate(ctx):
        ctx.micro_batch.training = False

    x = np.random.default_rng(0).standard_normal((3, 5))
    result = one_pass(Dropout(0.5), x, setup=evaluate)
    assert np.array_equal(result.y, x)
    assert np.array_equal(result.gx, result.gy)
    assert np.array_equal(one_pass(Dropout(0.0), x).y, x)


def test_a_sample_has_its_mask_whatever_the_batch():
    """Each sample alone, shards, micro-batches: rows of one mask. 21 elements fill no count."""
    whole = masked(a_run(), (8, 3, 7))
    for start in range(8):
        for stop in range(start + 1, 9):
            part = masked(a_run(sample=start), (stop - start, 3, 7))
            assert np.array_equal(part, whole[start:stop])


def test_streams_differ_by_seed_step_and_layer():
    base = masked(a_run(), (4, 100))
    network = Network(Sequential(Dropout(), Dropout()), (5,))
    others = [
        masked(a_run(seed=1), (4, 100)),
        masked(a_run(step=1), (4, 100)),
        *(masked(child, (4, 100)) for child in network.context().children),
    ]
    for mask in others:
        assert 100 < np.count_nonzero(mask != base) < 300
    assert np.array_equal(masked(a_run(), (4, 100)), base)


def test_neighbouring_samples_and_elements_are_independent():
    mask = masked(a_run(), (200, 500)).astype(float) - 0.5
    for shifted in (mask[1:] * mask[:-1], mask[:, 1:] * mask[:, :-1]):
        assert abs(shifted.mean()) < 5 * 0.25 / math.sqrt(shifted.size)


def test_micro_batches_in_flight():
    x = np.random.default_rng(0).standard_normal((6, 5))
    check_micro_batches(Sequential(Linear(5, 20), Dropout(0.4), Linear(20, 3)), x)


def test_bad_rates_are_refused():
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="rate"):
            Dropout(rate)


@pytest.mark.parametrize("positions", [[0, 1, 2], [3], [0, 1, 6, 7, 8], [], [1, 3, 5], list(range(9))])
def test_some_positions_have_the_masks_of_all(positions):
    """What others have is skipped, not drawn: zigzag parts, uneven widths, samples of later micro-batches."""
    for shape in ((4, 9, 7), (3, 9), (2, 9, 3, 5), (5, 9, 16)):
        for sample in (0, 3):
            whole, mine = (
                keep_mask(Dropout(0.4).keep_count, shape, a_run(sample=sample), at)
                for at in (None, np.array(positions, np.int64))
            )
            np.testing.assert_array_equal(mine, whole[:, positions])


def test_no_samples_have_an_empty_mask():
    """As on a rank of a pipeline whose micro-batch is empty."""
    assert keep_mask(Dropout(0.4).keep_count, (0, 3, 2), a_run()).shape == (0, 3, 2)
    assert keep_mask(Dropout(0.4).keep_count, (0, 3, 2), a_run(), np.array([0, 2])).shape == (0, 2, 2)
