"""Initialisers: moments, bounds, orthogonality, and the same values whatever the dtype or place."""

import math

import numpy as np
import pytest

from nn.core.layer import Spec
from nn.core.layout import Layout
from nn.initializers import fans, glorot, he, lecun, normal, ones, orthogonal, truncated_normal, zeros
from nn.registry import lookup, registered

SHAPES = [(300, 200), (5, 5, 30, 80)]


def draw(init, shape, seed=0):
    return init(np.random.default_rng(seed), shape)


def test_fans_of_a_kernel_count_its_receptive_field():
    assert fans((784, 30)) == (784, 30)
    assert fans((3, 5, 16, 32)) == (240, 480)
    assert fans((7,)) == (7, 7) and fans(()) == (1, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "init, variance",
    [
        (glorot, lambda i, o: 2 / (i + o)),
        (he, lambda i, o: 2 / i),
        (lecun, lambda i, o: 1 / i),
        (normal(), lambda i, o: 1.0),
        (normal(0.1), lambda i, o: 0.01),
    ],
    ids=["glorot", "he", "lecun", "normal", "normal0.1"],
)
def test_mean_and_variance(init, variance, shape):
    """60,000 values: the mean within 5 standard errors, the variance within 5 of a Gaussian's."""
    values, expected = draw(init, shape), variance(*fans(shape))
    assert values.shape == shape and values.dtype == np.float64
    assert abs(values.mean()) < 5 * math.sqrt(expected / values.size)
    assert abs(values.var() / expected - 1) < 5 * math.sqrt(2 / values.size)


def test_shapes_of_the_distributions():
    uniform = draw(glorot, (300, 200))
    bound = math.sqrt(6 / 500)
    assert np.abs(uniform).max() <= bound and np.abs(uniform).max() > 0.99 * bound
    cut = draw(truncated_normal(0.5, bound=1.5), (300, 200))
    assert np.abs(cut).max() <= 0.75 and np.abs(cut).max() > 0.74
    # variance of a Gaussian cut at a = 1.5: 1 - 2 a phi(a) / (2 Phi(a) - 1)
    phi, mass = math.exp(-1.125) / math.sqrt(2 * math.pi), math.erf(1.5 / math.sqrt(2))
    assert abs(cut.var() / (0.25 * (1 - 3 * phi / mass)) - 1) < 0.03
    assert not draw(zeros, (3, 4)).any() and (draw(ones, (3,)) == 1).all()


@pytest.mark.parametrize("shape", [(20, 20), (30, 10), (10, 30), (3, 3, 4, 8), (2, 2, 3, 50)], ids=str)
def test_orthogonal_has_orthonormal_rows_or_columns(shape):
    matrix = draw(orthogonal, shape).reshape(-1, shape[-1])
    product = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    np.testing.assert_allclose(product, np.eye(len(product)), atol=1e-12)


def test_orthogonal_is_uniform():
    """Without the signs of R's diagonal, QR would favour some rotations: the diagonal's mean would not be 0."""
    corner = [draw(orthogonal, (3, 3), seed)[0, 0] for seed in range(2000)]
    assert abs(np.mean(corner)) < 5 * math.sqrt(1 / 3 / 2000)


@pytest.mark.parametrize("name", registered("initializer"))
def test_values_depend_on_the_seed_and_nothing_else(name):
    init = lookup("initializer", name)
    shape = (12, 7)
    np.testing.assert_array_equal(draw(init, shape, 3), draw(init, shape, 3))
    assert (draw(init, shape, 3) != draw(init, shape, 4)).any()
    alone = Layout({"1": {"W": Spec(shape, init)}})
    among = Layout({"0": {"W": Spec((5, 5), init)}, "1": {"W": Spec(shape, init), "b": Spec((7,), zeros)}})
    found = []
    for layout, dtype in ((alone, np.float64), (among, np.float32)):
        buffer = layout.zeros(dtype)
        layout.initialize(buffer, seed=9)
        found.append(dict(layout.items(buffer))["1.W"])
    np.testing.assert_array_equal(found[0].astype(np.float32), found[1])
