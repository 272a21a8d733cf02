"""L-BFGS against SciPy's minima, against the inverse Hessian written out, and on networks."""

import itertools
import math

import numpy as np
import pytest

from nn.core.layer import Sequential
from nn.core.network import Network
from nn.layers.activations import Tanh
from nn.layers.dense import Linear
from nn.losses import CrossEntropyLoss
from nn.optim.lbfgs import LBFGS, Point, Vectors, between
from nn.optim.optimizers import SGD
from nn.training.trainer import Trainer


def problem(function, start, **options):
    """L-BFGS on a plain function x -> (value, gradient)."""
    w = np.array(start, np.float64)
    vectors = Vectors(w, np.zeros_like(w))

    def evaluate():
        value, vectors.arrays["g"][:] = function(w)
        return value

    return LBFGS(vectors, evaluate, **options), w


def pairs_of(lbfgs):
    """How many pairs it has kept."""
    return int((lbfgs.state()["pairs"][:, 0] >= 0).sum())


def rosenbrock(x):
    a, b = x[1:] - x[:-1] ** 2, 1 - x[:-1]
    g = np.zeros_like(x)
    g[:-1] = -400 * x[:-1] * a - 2 * b
    g[1:] += 200 * a
    return float((100 * a**2 + b**2).sum()), g


def quadratic(n=30, condition=1e4, seed=0):
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((n, n)))
    a = (q * np.geomspace(1, condition, n)) @ q.T
    target = rng.standard_normal(n)
    return lambda x: (0.5 * float((x - target) @ a @ (x - target)), a @ (x - target)), target


def wavy(x):
    return float(np.sum(0.1 * x**2 + 1 - np.cos(2 * x))), 0.2 * x + 2 * np.sin(2 * x)


@pytest.mark.parametrize("history", [1, 3, 10])
def test_finds_the_minimum_that_scipy_finds(history):
    optimize = pytest.importorskip("scipy.optimize")
    convex, target = quadratic()
    starts = {
        "rosenbrock": (rosenbrock, np.tile([-1.2, 1.0], 5)),
        "quadratic": (convex, np.zeros(30)),
        "wavy": (wavy, np.full(4, 0.7)),
    }
    for name, (function, start) in starts.items():
        theirs = optimize.minimize(function, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
        lbfgs, w = problem(function, start, history=history, tolerance=1e-8)
        value = lbfgs.minimize(2000)
        assert "minimum" in lbfgs.done, (name, lbfgs.done)
        assert abs(value - theirs.fun) < 1e-10, name
        np.testing.assert_allclose(w, theirs.x, atol=1e-5, err_msg=name)
        assert value == function(w)[0], "w is where the loss was measured"
    assert np.abs(target).max() > 1


def test_costs_about_as_many_evaluations_as_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    start = np.tile([-1.2, 1.0], 5)
    theirs = optimize.minimize(rosenbrock, start, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-6})
    lbfgs, _ = problem(rosenbrock, start, tolerance=3e-7)
    lbfgs.minimize(1000)
    assert lbfgs.evaluations < 1.5 * theirs.nfev


def test_a_network_reaches_the_minimum_that_scipy_finds():
    """Softmax regression on labels that no plane separates: convex, so there is one minimal loss."""
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((200, 6)), rng.integers(0, 3, 200)
    trainer = Trainer(Network(Linear(6, 3), (6,), np.float64), CrossEntropyLoss(), SGD(0.1))
    start = trainer.flat_parameters.copy()

    def function(w):
        trainer.flat_parameters[:] = w
        return trainer.compute_gradients(x, y, len(x)), trainer.gradients.copy()

    theirs = optimize.minimize(function, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
    trainer.flat_parameters[:] = start
    vectors = Vectors(trainer.flat_parameters, trainer.gradients)
    lbfgs = LBFGS(vectors, lambda: trainer.compute_gradients(x, y, len(x)), tolerance=1e-8)
    assert abs(lbfgs.minimize(500) - theirs.fun) < 1e-12
    assert "minimum" in lbfgs.done


def test_beats_gradient_descent_on_a_network_in_float32():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 4)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    network = Network(Sequential(Linear(4, 16), Tanh(), Linear(16, 2)), (4,))
    descent = Trainer(network, CrossEntropyLoss(), SGD(0.5))
    plain = [descent.step(x, y) for _ in range(100)]
    trainer = Trainer(network, CrossEntropyLoss(), SGD(0.5))
    vectors = Vectors(trainer.flat_parameters, trainer.gradients)
    lbfgs = LBFGS(vectors, lambda: trainer.compute_gradients(x, y, len(x)))
    losses = [lbfgs.step() for _ in range(40)]
    assert all(b <= a for a, b in itertools.pairwise(losses)), "never uphill"
    assert lbfgs.evaluations < 100 and losses[-1] < 0.2 * plain[-1]
    assert all(a.dtype == np.float32 for a in vectors.arrays.values())


def test_every_step_meets_the_strong_wolfe_conditions():
    for function, start in ((rosenbrock, np.tile([-1.2, 1.0], 5)), (wavy, np.full(4, 1.2))):
        lbfgs, w = problem(function, start)
        checked = 0
        while not lbfgs.done and checked < 60:
            before, loss = w.copy(), function(w)[0]
            slope = function(before)[1]
            lbfgs.step()
            if lbfgs.done:
                break
            move = w - before
            assert lbfgs.loss <= loss + lbfgs.c1 * (slope @ move)
            assert abs(function(w)[1] @ move) <= lbfgs.c2 * abs(slope @ move) * (1 + 1e-12)
            checked += 1
        assert checked >= 5


def test_direction_is_the_inverse_hessian_of_the_pairs():
    """H <- (I - rho s y^T) H (I - rho y s^T) + rho s s^T for each pair, from (s.y / y.y) I, written out."""
    lbfgs, w = problem(rosenbrock, np.tile([-1.2, 1.0], 4), history=3)
    trace = [(w.copy(), rosenbrock(w)[1])]
    for _ in range(8):
        lbfgs.step()
        trace.append((w.copy(), rosenbrock(w)[1]))
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(trace)][-3:]
    assert pairs_of(lbfgs) == 3
    s, y = pairs[-1]
    h = np.eye(8) * (s @ y) / (y @ y)
    for s, y in pairs:
        rho = 1 / (s @ y)
        h = (np.eye(8) - rho * np.outer(s, y)) @ h @ (np.eye(8) - rho * np.outer(y, s)) + rho * np.outer(s, s)
    lbfgs.step()  # along the direction from those pairs
    np.testing.assert_allclose(lbfgs.vectors.arrays["d"], -h @ trace[-1][1], rtol=1e-7)


def test_memory_is_two_vectors_a_pair_and_five_more():
    lbfgs, _ = problem(rosenbrock, np.tile([-1.2, 1.0], 5), history=4)
    lbfgs.minimize(30)
    expected = {"w", "g", "w0", "g0", "d"} | {f"{name}{i}" for name in "sy" for i in range(4)}
    assert set(lbfgs.vectors.arrays) == expected


def test_infinite_losses_are_walked_around():
    """A barrier: the loss is not finite for x >= 1, and the first steps jump over it."""

    def barrier(x):
        with np.errstate(all="ignore"):
            return float(-np.log(1 - x[0]) - 100 * x[0]), np.array([1 / (1 - x[0]) - 100])

    lbfgs, w = problem(barrier, [-5.0])
    lbfgs.minimize(100)
    assert abs(w[0] - 0.99) < 1e-6 and lbfgs.done
    with pytest.raises(FloatingPointError, match="starting point"):
        problem(barrier, [2.0])[0].step()


def test_stops_where_rounding_leaves_nothing_to_gain():
    def lying(x):  # the gradient points uphill: no step helps
        return float(x @ x), -2 * x

    lbfgs, w = problem(lying, [1.0, 2.0])
    assert lbfgs.minimize(10) == 5.0
    assert "as far as rounding allows" in lbfgs.done
    np.testing.assert_array_equal(w, [1.0, 2.0])
    np.testing.assert_array_equal(lbfgs.vectors.arrays["g"], lying(w)[1], "as put back as w")


@pytest.mark.parametrize(
    ("curvature", "across", "kept"), [(-1.0, 1.0, 0), (0.0, 0.0, 0), (5e-11, 1.0, 0), (2e-10, 1.0, 1)]
)
def test_pairs_without_clearly_positive_curvature_are_not_kept(curvature, across, kept):
    """s = (1, 0) and y = (curvature, across), after the one evaluation that a search has here."""

    def bend(x):
        return float(-4 * x[0]), np.array([-4 + curvature * x[0], across * x[0]])

    lbfgs, w = problem(bend, [0.0, 0.0], max_evaluations=1)
    lbfgs.step()
    np.testing.assert_array_equal(w, [1.0, 0.0])
    assert pairs_of(lbfgs) == kept
    lbfgs.step()
    assert w[0] > 1, "still downhill"


def test_cubic_interpolation_is_exact_for_cubics():
    def cubic(t):
        return Point(t, t**3 - 2 * t, 3 * t**2 - 2)

    for low, high in ((0.0, 2.0), (1.5, 0.2)):
        assert math.isclose(between(cubic(low), cubic(high)), math.sqrt(2 / 3), rel_tol=1e-12)
    assert between(Point(0.0, 1.0, -1.0), Point(1.0, math.inf, math.inf)) == 0.5


def test_wrong_options_are_named():
    vectors = Vectors(np.zeros(3), np.zeros(3))
    for options, message in (
        ({"history": 0}, "history"),
        ({"c1": 0.95}, "c1 < c2"),
        ({"max_evaluations": 0}, "max_ev"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"lr": 0.0}, "lr"),
    ):
        with pytest.raises(ValueError, match=message):
            LBFGS(vectors, lambda: 0.0, **options)
    with pytest.raises(ValueError, match="flat and alike"):
        Vectors(np.zeros(3), np.zeros(3, np.float32))


def test_goes_on_after_the_minimum_of_another_function():
    goal, scale, w, g = np.ones(3), np.ones(3), np.zeros(3), np.zeros(3)

    def evaluate():
        g[:] = scale * (w - goal)
        return 0.5 * float(g @ (w - goal))

    lbfgs = LBFGS(Vectors(w, g), evaluate)
    lbfgs.minimize(50)
    assert "a minimum" in lbfgs.done
    goal[:], scale[:], lbfgs.loss = (5.0, -3.0, 100.0), (1.0, 5.0, 50.0), math.nan
    lbfgs.minimize(50)
    np.testing.assert_allclose(w, goal, rtol=1e-5)
