"""The gradient check itself: it passes what is right, and catches every kind of mistake that a backward can have."""

import numpy as np
import pytest

from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Layer, Sequential, Spec
from nn.initializers import ones, zeros
from nn.layers.activations import Sigmoid, Tanh
from nn.layers.dense import Linear

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

    def forward(self, p, x, run):
        y = (p.a * x) ** 2 + p.b
        if self.mistake == "overwrites x":
            x *= 1.5
        return y, x

    def backward(self, p, g, gy, x, run):
        slope = 2 * p.a * x * gy
        if self.mistake == "always adds":
            g.a += (slope * x).sum(0)
        elif self.mistake == "always writes":
            g.a[...] = (slope * x).sum(0)
        elif self.mistake == "leaves one out":
            run.add(g.a[1:], (slope * x).sum(0)[1:])
        else:
            run.add(g.a, (slope * x).sum(0) * (1.001 if self.mistake == "slightly wrong parameter" else 1))
        if self.mistake != "forgotten parameter":
            run.add(g.b, gy.sum(0) / (len(x) if self.mistake == "mean for sum" else 1))
        if self.mistake == "ignores gy":
            return 2 * p.a**2 * x
        gx = p.a * slope
        if self.mistake == "wrong sign":
            gx = -gx
        if self.mistake == "rows mixed up":
            gx = gx[::-1].copy()
        if self.mistake == "one entry":
            gx[0, 0] += 0.01
        return gx


def test_the_layer_without_a_mistake_passes():
    assert gradcheck(Scale(), X) < 1e-8
    assert gradcheck(Sequential(Linear(3, 3), Scale(), Linear(3, 2)), X) < 1e-8


@pytest.mark.parametrize(
    "mistake",
    [
        "slightly wrong parameter",
        "forgotten parameter",
        "mean for sum",
        "ignores gy",
        "wrong sign",
        "rows mixed up",
        "one entry",
        "always adds",
        "always writes",
        "leaves one out",
    ],
)
def test_every_mistake_is_caught(mistake):
    assert gradcheck(Scale(mistake), X) > 100 * BOUND


def test_overwriting_the_input_is_caught():
    with pytest.raises(AssertionError, match="forward overwrote its input"):
        gradcheck(Scale("overwrites x"), X.copy())


def test_ids_are_not_perturbed_but_their_table_is():
    class Table(Layer):
        ids = True

        def __init__(self, right):
            self.right = right

        def specs(self, in_shape):
            return {"W": Spec((5, 2), ones)}, (*in_shape, 2)

        def forward(self, p, x, run):
            return p.W[x] ** 2, x

        def backward(self, p, g, gy, x, run):
            gW = np.zeros_like(g.W)
            if self.right:
                np.add.at(gW, x, 2 * p.W[x] * gy)
            else:
                gW[x] += 2 * p.W[x] * gy  # repeated ids count once
            run.add(g.W, gW)

    ids = np.array([[0, 1], [1, 4]])
    assert gradcheck(Table(True), ids) < 1e-8
    assert gradcheck(Table(False), ids) > 100 * BOUND
