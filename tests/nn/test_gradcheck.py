"""The gradient check itself: it passes what is right, and catches every kind of mistake that a backward can have."""

import numpy as np
import pytest

from nn import losses
from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Layer, Sequential, ShapeError, Spec
from nn.initializers import ones, zeros
from nn.layers.activations import Sigmoid, Tanh
from nn.layers.dense import Linear
from nn.models.googlenet import AuxiliaryLoss
from nn.registry import registered

BOUND = 1e-6
X = np.random.default_rng(1).standard_normal((4, 3))


def test_right_layers_pass():
    network = Sequential(Linear(3, 5), Tanh(), Linear(5, 2), Sigmoid())
    assert gradcheck(network, X) < 1e-8
    assert gradcheck(network, X, seed=5) < 1e-8


class Scale(Layer):
    """y = (a x)^2 + b with a mistake of choice in backward."""

    def __init__(self, mistake=""):
        self.mistake = mistake

    def specs(self, in_shape):
        return {"a": Spec(in_shape, ones), "b": Spec(in_shape, zeros)}, in_shape

    def forward(self, p, x, ctx):
        y = (p.a * x) ** 2 + p.b
        if self.mistake == "overwrites x":
            x *= 1.5
        return y, x

    def backward(self, p, gy, x, ctx):
        slope = 2 * p.a * x * gy
        ga = (slope * x).sum(0)
        if self.mistake == "writes in place of adding":
            gradients = {"a": lambda array: np.copyto(array, ga)}
        elif self.mistake == "leaves one out":
            ga[0] = 0
            gradients = {"a": ga}
        else:
            gradients = {"a": ga * (1.001 if self.mistake == "slightly wrong parameter" else 1)}
        gradients["b"] = gy.sum(0) / (len(x) if self.mistake == "mean for sum" else 1)
        if self.mistake == "forgotten parameter":
            del gradients["b"]
        if self.mistake == "another name":
            gradients["c"] = gradients.pop("b")
        if self.mistake == "another shape":
            gradients["b"] = gy.sum()[None]
        if self.mistake == "ignores gy":
            return 2 * p.a**2 * x, gradients
        gx = p.a * slope
        if self.mistake == "wrong sign":
            gx = -gx
        if self.mistake == "rows mixed up":
            gx = gx[::-1].copy()
        if self.mistake == "one entry":
            gx[0, 0] += 0.01
        if self.mistake == "overwrites x in backward":
            x[...] = gx
        if self.mistake == "overwrites gy":
            gy[...] = gx
        if self.mistake == "returns nothing":
            return None, gradients
        if self.mistake == "forgets to return":
            return None
        return (gx.astype(np.float32) if self.mistake == "another dtype" else gx), gradients


def test_the_layer_without_a_mistake_passes():
    assert gradcheck(Scale(), X) < 1e-8
    assert gradcheck(Sequential(Linear(3, 3), Scale(), Linear(3, 2)), X) < 1e-8


@pytest.mark.parametrize(
    "mistake",
    [
        "slightly wrong parameter",
        "mean for sum",
        "ignores gy",
        "wrong sign",
        "rows mixed up",
        "one entry",
        "writes in place of adding",
        "leaves one out",
    ],
)
def test_every_mistake_is_caught(mistake):
    assert gradcheck(Scale(mistake), X) > 100 * BOUND


def test_overwriting_the_input_is_caught():
    with pytest.raises(TypeError, match="forward overwrote x, which others may need"):
        gradcheck(Scale("overwrites x"), X.copy())


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("overwrites x in backward", "backward overwrote its input"),
        ("overwrites gy", "backward overwrote gy"),
        ("returns nothing", r"backward must return dLoss/dx, float64\(\d, 3\), given None"),
        ("another dtype", r"must return dLoss/dx, float64\(\d, 3\), given float32"),
        ("forgets to return", r"backward must return a pair \(gx, gradients\).*given None \(is a return missing\?\)"),
        ("forgotten parameter", "must return the gradients of a, b, as specs names them, given those of a"),
        ("another name", "must return the gradients of a, b, as specs names them, given those of a, c"),
        ("another shape", r"the gradient of b must have its shape \(3,\), given \(1,\)"),
    ],
)
def test_what_backward_owes_others_is_checked(mistake, said, samples):
    with pytest.raises((AssertionError, TypeError, ShapeError), match=said):
        gradcheck(Scale(mistake), X[:samples].copy())


class Roots(Layer):
    """y = sqrt(x), NaN below 0, or y = x with a gradient that is NaN."""

    def __init__(self, root=True):
        self.root = root

    def forward(self, p, x, ctx):
        with np.errstate(invalid="ignore"):
            return (np.sqrt(x) if self.root else x.copy()), x

    def backward(self, p, gy, x, ctx):
        with np.errstate(invalid="ignore"):
            return (gy / (2 * np.sqrt(x)) if self.root else gy * np.nan), {}


def test_what_is_not_finite_is_caught():
    assert (X < 0).any() and gradcheck(Roots(), 1 + np.abs(X)) < 1e-8
    assert gradcheck(Roots(), X) == np.inf
    assert gradcheck(Roots(root=False), X) == np.inf
    assert gradcheck(Linear(3, 2), np.where(X < 0, np.nan, X)) == np.inf


def test_ids_are_not_perturbed_but_their_table_is():
    class Table(Layer):
        ids = True

        def __init__(self, right):
            self.right = right

        def specs(self, in_shape):
            return {"W": Spec((5, 2), ones)}, (*in_shape, 2)

        def forward(self, p, x, ctx):
            return p.W[x] ** 2, x

        def backward(self, p, gy, x, ctx):
            gW = np.zeros_like(p.W)
            if self.right:
                np.add.at(gW, x, 2 * p.W[x] * gy)
            else:
                gW[x] += 2 * p.W[x] * gy  # repeated ids count once
            return None, {"W": gW}

    ids = np.array([[0, 1], [1, 4]])
    assert gradcheck(Table(True), ids) < 1e-8
    assert gradcheck(Table(False), ids) > 100 * BOUND


# ----------------------------------------------------------------------------------------------------------- losses

Z = np.random.default_rng(2).standard_normal((6, 4))
CLASSES = np.array([0, 3, 1, 1, 2, 0])
VALUES = np.random.default_rng(3).standard_normal((6, 4))
LOSSES = {
    losses.QuadraticLoss(): VALUES,
    losses.MSELoss(): VALUES,
    losses.MAELoss(): VALUES,
    losses.HuberLoss(0.5): VALUES,
    losses.BCEWithLogitsLoss(): np.abs(np.sin(VALUES)),
    losses.NLLLoss(np.array([1.0, 2.0, 0.5, 3.0]), ignore_index=3): CLASSES,
    losses.CrossEntropyLoss(): CLASSES,
    losses.CrossEntropyLoss(label_smoothing=0.1, class_weights=np.array([1.0, 2.0, 0.5, 3.0]), ignore_index=1): CLASSES,
    losses.MaskedCrossEntropyLoss(2): np.where(CLASSES == 1, -1, CLASSES),
    AuxiliaryLoss(losses.CrossEntropyLoss()): CLASSES,
}


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_right_losses_pass(loss):
    z = np.stack([Z, 2 * Z, -Z], axis=1) if isinstance(loss, AuxiliaryLoss) else Z
    assert gradcheck(loss, z, target=LOSSES[loss]) < 1e-7


def test_all_losses_are_checked():
    assert {type(loss) for loss in LOSSES} >= set(registered("loss").values())


class Squares(losses.Loss):
    """1/2 |z - y|^2 with a mistake of choice."""

    def __init__(self, mistake=""):
        self.mistake = mistake

    def __call__(self, z, target, total, ctx):
        gz, d = ctx.empty(z.shape, z.dtype), z - target
        match self.mistake:
            case "adds":
                gz += d / total
            case "leaves one out":
                gz[1:] = d[1:] / total
            case "own total":
                return 0.5 * (d * d).sum() / len(z), d / len(z)
            case "gradient of the mean":
                gz[...] = d / total / z.shape[1]
            case "wrong sign":
                gz[...] = -d / total
            case "overwrites z":
                z -= target
                return 0.5 * (z * z).sum() / total, z / total
            case "gives z":
                gz = z[:]
                gz[...] = gz
            case "float32":
                gz = (d / total).astype(np.float32)
            case _:
                gz[...] = d / total
        return 0.5 * float((d * d).sum()) / total, gz


def test_every_mistake_of_a_loss_is_caught():
    assert gradcheck(Squares(), Z, target=VALUES) < 1e-8
    for mistake in ("gradient of the mean", "wrong sign"):
        assert gradcheck(Squares(mistake), Z, target=VALUES) > 100 * BOUND
    for mistake, said in (
        ("adds", "another value or gradient the second time"),
        ("leaves one out", "another value or gradient the second time"),
        ("own total", "of a batch in two micro-batches"),
        ("overwrites z", "overwrote its input"),
        ("gives z", "must be a new"),
        ("float32", "must be a new float64"),
    ):
        with pytest.raises(AssertionError, match=said):
            gradcheck(Squares(mistake), Z.copy(), target=VALUES)


def test_nothing_is_not_right():
    for x, directions in (np.zeros((0, 3)), 3), (np.ones((2, 3)), 0):
        with pytest.raises(ValueError, match="nothing to compare"):
            gradcheck(Linear(3, 2), x, directions=directions)


def test_what_cannot_be_checked_gets_a_sentence():
    for call, said in (
        (lambda: gradcheck(Linear(3, 2), X.tolist()), "an array of float64, or of ids, given list"),
        (lambda: gradcheck(Linear(3, 2), X.astype(np.float32)), "given float32"),
        (lambda: gradcheck(losses.MSELoss(), Z), r"takes the targets y as an array, given None"),
        (lambda: gradcheck(Linear, X), "takes a Layer and x, or a Loss"),
        (lambda: gradcheck(Linear(3, 2), X, target=X), "takes a Layer and x, or a Loss"),
    ):
        with pytest.raises(TypeError, match=said):
            call()
