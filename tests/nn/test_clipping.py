"""Clipping against PyTorch; norms of tensors that are cut over regions."""

import math

import numpy as np
import pytest

from nn.core.layer import Spec
from nn.core.layout import Layout
from nn.initializers import zeros
from nn.optim.clipping import ClipGlobalNorm, ClipNorm, ClipValue, squared_norms
from nn.registry import from_text

LAYOUT = Layout({"0": {"W": Spec((5, 7), zeros), "b": Spec((7,), zeros)}, "1": {"W": Spec((3,), zeros)}})


def gradients(scale=1.0, dtype=np.float64):
    g = LAYOUT.zeros(dtype)
    for name, array in LAYOUT.items(g):
        array[...] = scale * np.random.default_rng([*name.encode()]).standard_normal(array.shape)
    return g


def test_clips_equal_pytorch():
    torch = pytest.importorskip("torch")
    utils = torch.nn.utils
    for limit in (0.01, 0.5, 1.0, 100.0):
        for clip, reference in (
            (ClipValue(limit), lambda ts, limit=limit: utils.clip_grad_value_(ts, limit)),
            (ClipGlobalNorm(limit), lambda ts, limit=limit: utils.clip_grad_norm_(ts, limit)),
            (ClipNorm(limit), lambda ts, limit=limit: [utils.clip_grad_norm_([t], limit) for t in ts]),
        ):
            g = gradients()
            theirs = {name: torch.nn.Parameter(torch.zeros(array.shape)) for name, array in LAYOUT.items(g)}
            for name, array in LAYOUT.items(g):
                theirs[name] = torch.nn.Parameter(torch.zeros(array.shape, dtype=torch.float64))
                theirs[name].grad = torch.tensor(array)
            reference(list(theirs.values()))
            clip(g, LAYOUT.region())
            for name, array in LAYOUT.items(g):  # PyTorch divides by norm + 1e-6
                np.testing.assert_allclose(array, theirs[name].grad, rtol=2e-6)


def test_a_clipped_norm_is_the_limit_and_a_small_one_is_left_alone():
    g = gradients(100.0)
    direction = g / np.linalg.norm(g)
    ClipGlobalNorm(2.0)(g, LAYOUT.region())
    np.testing.assert_allclose(g, 2.0 * direction, rtol=1e-14)
    before = g.copy()
    ClipGlobalNorm(2.1)(g, LAYOUT.region())
    ClipNorm(2.1)(g, LAYOUT.region())
    np.testing.assert_array_equal(g, before)
    ClipNorm(0.1)(g, LAYOUT.region())
    for name, array in LAYOUT.items(g):
        assert math.isclose(np.linalg.norm(array), 0.1), name


def test_norms_of_cut_tensors_add_up():
    g, w = gradients(), gradients(3.0)
    whole = squared_norms([g, w], LAYOUT.region())
    parts = []
    for a, b in ((0, 9), (9, 40), (40, LAYOUT.size)):
        squared_norms([g[a:b], w[a:b]], LAYOUT.region(a, b), lambda sums: parts.append(sums.copy()))
    total = sum(parts)
    for row, norms in zip(total, whole, strict=True):
        assert list(norms) == list(LAYOUT.slices)
        np.testing.assert_allclose(row, list(norms.values()), rtol=1e-14)
    for name, array in LAYOUT.items(g):
        assert math.isclose(whole[0][name], float((array**2).sum()), rel_tol=1e-13)


def test_a_gradient_that_is_no_number_is_refused():
    for bad, text in ((math.nan, "nan"), (math.inf, "inf")):
        g = gradients()
        dict(LAYOUT.items(g))["0.b"][2] = bad
        before = g.copy()
        with pytest.raises(FloatingPointError, match=f"the norm of the gradient is {text}"):
            ClipGlobalNorm(1.0)(g, LAYOUT.region())
        np.testing.assert_array_equal(g, before)
        with pytest.raises(FloatingPointError, match=rf"the norm of the gradient of 0\.b is {text}"):
            ClipNorm(1e9)(g, LAYOUT.region())


def test_a_norm_beyond_single_precision_is_a_number():
    """The squares of such entries are no float32, their root is."""
    g = np.full(LAYOUT.size, 1e25, np.float32)
    squares = squared_norms([g], LAYOUT.region())[0]
    for name, array in LAYOUT.items(g):
        assert math.isclose(squares[name], array.size * 1e50, rel_tol=1e-6)
    ClipGlobalNorm(1.0)(g, LAYOUT.region())
    assert math.isclose(float(np.linalg.norm(g)), 1, rel_tol=1e-5)


def test_clips_from_the_command_line():
    assert from_text("clip", "global:1.5") == ClipGlobalNorm(1.5)
    assert from_text("clip", "norm:2") == ClipNorm(2.0) != from_text("clip", "value:2")
    for text, words in {
        "global": "missing a required argument: 'limit'",
        "global:": "missing a required argument: 'limit'",
        "globl:1": "unknown clip 'globl': did you mean 'global'",
        "value:-1": "limit",
        "value:nan": "limit",
        "norm:x": "limit must be a number, given 'x'",
        "1.0": "unknown clip '1.0': known are global, norm, value",
    }.items():
        with pytest.raises(ValueError, match=words):
            from_text("clip", text)
