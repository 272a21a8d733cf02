"""Layers as students write them, in networks of every kind: each trains right, or is refused with its name.

What is right is computed with the same layer in isolation: it is given copies, and copies of what it returns go on.
"""

import copy

import numpy as np
import pytest

import nn
from nn.core.containers import Wrapper

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((12, 6)), RNG.integers(0, 3, 12)


class Identity(nn.Layer):
    def forward(self, p, x, ctx):
        return x, None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


class Bias(nn.Layer):
    def specs(self, in_shape):
        return {"b": nn.Spec(in_shape, nn.initializers.zeros)}, in_shape

    def forward(self, p, x, ctx):
        return x + p.b, None

    def backward(self, p, gy, saved, ctx):
        return gy, {"b": gy.sum(axis=0)}


class Scale(nn.Layer):
    def specs(self, in_shape):
        return {"s": nn.Spec(in_shape, nn.initializers.ones)}, in_shape

    def forward(self, p, x, ctx):
        return x * p.s, x

    def backward(self, p, gy, x, ctx):
        return gy * p.s, {"s": nn.RowSum(gy * x)}


class Dense(nn.Layer):
    def specs(self, in_shape):
        return {"W": nn.Spec((*in_shape, *in_shape), nn.initializers.glorot)}, in_shape

    def forward(self, p, x, ctx):
        return x @ p.W, {"x": x}

    def backward(self, p, gy, saved, ctx):
        return gy @ p.W.T, {"W": nn.Product(saved["x"].T, gy)}


class Adds(Dense):
    def backward(self, p, gy, saved, ctx):
        def add(array):
            array += saved["x"].T @ gy

        return gy @ p.W.T, {"W": add}


class TutorialDropout(nn.Layer):
    def forward(self, p, x, ctx):
        if not ctx.training:
            return x, None
        mask = (ctx.random(x.shape) > 0.3).astype(x.dtype) / 0.7
        return x * mask, mask

    def backward(self, p, gy, mask, ctx):
        return gy * mask, {}


class KeptOutput(nn.Layer):
    def forward(self, p, x, ctx):
        y = 1 / (1 + np.exp(-x))
        return y, y

    def backward(self, p, gy, y, ctx):
        return gy * y * (1 - y), {}


class KeptBoth(KeptOutput):
    def forward(self, p, x, ctx):
        y = np.tanh(x)
        return y, [x, y]

    def backward(self, p, gy, saved, ctx):
        return gy * (1 - saved[1] ** 2), {}


class InputAsGradient(nn.Layer):
    """y = |x|^2 / 2 of every entry: x itself is the slope, and is returned where gy is 1."""

    def forward(self, p, x, ctx):
        return 0.5 * x * x, x

    def backward(self, p, gy, x, ctx):
        return (x if (gy == 1).all() else gy * x), {}


class ReversedView(nn.Layer):
    def forward(self, p, x, ctx):
        return x[:, ::-1], None

    def backward(self, p, gy, saved, ctx):
        return gy[:, ::-1], {}


class ContainerEndsInTanh(nn.Layer):
    def __init__(self):
        self.first, self.last = nn.Linear(6, 6), nn.Tanh()

    def children(self):
        return {"first": self.first, "last": self.last}

    def specs(self, in_shape):
        return {name: layer.specs(in_shape)[0] for name, layer in self.children().items()}, in_shape

    def forward(self, p, x, ctx):
        y, first = ctx.children[0].forward(p[0], x)
        y, last = ctx.children[1].forward(p[1], y)
        return y, [first, last]

    def backward(self, p, gy, saved, ctx):
        gy = ctx.children[1].backward(p[1], gy, saved.pop())
        return ctx.children[0].backward(p[0], gy, saved.pop()), {}


class WorkspaceForGradient(Scale):
    def backward(self, p, gy, x, ctx):
        rows = ctx.workspace("mine", gy.shape, gy.dtype)
        np.multiply(gy, x, out=rows)
        return gy * p.s, {"s": nn.RowSum(rows)}


RIGHT = [
    *(Identity, Bias, Scale, Dense, Adds, TutorialDropout, KeptOutput, KeptBoth, InputAsGradient, ReversedView),
    *(ContainerEndsInTanh, WorkspaceForGradient),
]


class OnSelf(nn.Layer):
    def forward(self, p, x, ctx):
        self.y = np.tanh(x)
        return self.y, None

    def backward(self, p, gy, saved, ctx):
        return gy * (1 - self.y**2), {}


class ForgetsToReturn(Identity):
    def backward(self, p, gy, saved, ctx):
        gy * 2


class NoInputGradient(Identity):
    def backward(self, p, gy, saved, ctx):
        return None, {}


class OnlyOutput(Identity):
    def forward(self, p, x, ctx):
        return 2 * x


class OnlyInputGradient(Identity):
    def backward(self, p, gy, saved, ctx):
        return gy


class ForgetsAGradient(Scale):
    def backward(self, p, gy, x, ctx):
        return gy * p.s, {}


class KeepsDimensions(Scale):
    def backward(self, p, gy, x, ctx):
        return gy * p.s, {"s": (gy * x).sum(axis=0, keepdims=True)}


class AnotherDtype(Identity):
    def forward(self, p, x, ctx):
        return x.astype(np.float32), None


class WritesIntoInput(Identity):
    def forward(self, p, x, ctx):
        x *= 2
        return x, None


class SavesAWorkspace(KeptOutput):
    def forward(self, p, x, ctx):
        kept = ctx.workspace("mine", x.shape, x.dtype)
        kept[...] = 1 / (1 + np.exp(-x))
        return kept.copy(), kept


class AnotherShape(Identity):
    def specs(self, in_shape):
        return {}, (in_shape[0],)

    def forward(self, p, x, ctx):
        return x[:, None], None


class HoldsALayer(nn.Layer):
    def __init__(self):
        self.inner = nn.Linear(6, 6)

    def forward(self, p, x, ctx):
        return self.inner.forward(p, x, ctx)


WRONG = {
    OnSelf: "y cannot be set",
    ForgetsToReturn: "None",
    NoInputGradient: "dLoss/dx",
    OnlyOutput: "forward",
    OnlyInputGradient: "backward",
    ForgetsAGradient: "gradients of s",
    KeepsDimensions: "gradient of s",
    AnotherDtype: "float32",
    SavesAWorkspace: "saved is a workspace",
    AnotherShape: "specs says that it makes",
    HoldsALayer: "holds layers",
}


class Isolated(Wrapper):
    """The layer, which gets and gives copies: nobody can overwrite anything."""

    output = gradient = "kept"

    def forward(self, p, x, ctx):
        y, saved = self.layer.forward(p, x.copy(), ctx)
        return y.copy(), copy.deepcopy(saved)

    def backward(self, p, gy, saved, ctx):
        gx, gradients = self.layer.backward(p, gy.copy(), saved, ctx)
        return gx.copy(), gradients


def dense(inputs=6, outputs=6):
    return nn.Linear(inputs, outputs)


def chain(*layers):
    return nn.Sequential(*layers)


NETWORKS = [  # of a layer that is made as often as it is needed; 6 features in and out, or 12 out
    lambda made: [made(), nn.Tanh()],
    lambda made: [dense(), made(), nn.Tanh()],
    lambda made: [dense(), nn.Tanh(), made(), nn.Tanh()],
    lambda made: [dense(), nn.Sigmoid(), made(), nn.Softmax()],
    lambda made: [dense(), made(), made(), dense(), nn.ReLU()],
    lambda made: [dense(), nn.Residual(made())],
    lambda made: [nn.Residual(chain(made(), nn.Tanh())), nn.ReLU()],
    lambda made: [dense(), nn.Residual(chain(made(), nn.Tanh())), nn.Tanh()],
    lambda made: [dense(), nn.Residual(chain(dense(), nn.Tanh(), made()))],
    lambda made: [dense(), nn.Residual(chain(nn.Tanh(), made())), nn.Tanh()],
    lambda made: [dense(), nn.Residual(nn.Tanh(), made())],
    lambda made: [dense(), nn.Parallel(made(), nn.Tanh()), dense(12, 6)],
    lambda made: [dense(), nn.Parallel(chain(made(), nn.Tanh()), chain(nn.Tanh(), made())), nn.Tanh(), dense(12, 6)],
    lambda made: [dense(), nn.Recompute(made())],
    lambda made: [dense(), nn.Recompute(chain(nn.Tanh(), made(), nn.Tanh())), nn.Tanh()],
    lambda made: [dense(), nn.Dropout(0.2), made(), nn.Dropout(0.2)],
    lambda made: [dense(), nn.BatchNorm1d(6), made(), nn.BatchNorm1d(6)],
    lambda made: [dense(), nn.LayerNorm(6), made(), nn.LayerNorm(6), nn.GELU()],
    lambda made: [dense(), chain(made()), chain(nn.Tanh(), made())],
]


def train(layers):
    """The trainer after some steps, two of them in micro-batches, and its outputs in evaluation."""
    network = nn.Network(nn.Sequential(*layers, nn.Linear(6, 3)), (6,), np.float64)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.3))
    x = X.copy()
    losses = [trainer.step(x, Y, accumulate=parts) for parts in (1, 1, 2, 3)]
    outputs = trainer.predict(x).copy()
    assert np.array_equal(x, X), "the caller's samples"
    return losses, outputs, trainer.flat_parameters


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_what_is_right_trains_right(kind):
    for number, network in enumerate(NETWORKS):
        found, expected = train(network(kind)), train(network(lambda: Isolated(kind())))
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(a, b), f"network {number}"
    if kind is not ContainerEndsInTanh:
        nn.check_layer(kind(), (6,))


def drawn(rng, make, depth=2):
    """A random chain of students' layers, make(kind), and built-in ones; 6 features in and out."""
    own = lambda: make(RIGHT[rng.integers(len(RIGHT))])
    inner = lambda: chain(*drawn(rng, make, depth - 1))
    choices = [own, own, own, dense, nn.Tanh, lambda: nn.Dropout(0.2), lambda: nn.LayerNorm(6)]
    if depth:
        choices += [
            lambda: nn.Residual(inner()),
            lambda: nn.Residual(own(), inner()),
            lambda: nn.Recompute(inner()),
            lambda: chain(nn.Parallel(inner(), own()), dense(12, 6)),
        ]
    return [choices[rng.integers(len(choices))]() for _ in range(rng.integers(1, 5))]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_networks_of_several_students_train_right(seed):
    found, expected = (
        train(drawn(np.random.default_rng(seed), make)) for make in (lambda kind: kind(), lambda kind: Isolated(kind()))
    )
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_is_wrong_is_refused_by_name(kind):
    refused = 0
    for number, network in enumerate(NETWORKS):
        try:
            found = train(network(kind))
        except (TypeError, ValueError, AttributeError) as error:
            assert kind.__name__ in str(error), f"network {number}"
            refused += 1
        else:  # where backward is not needed, or comes at once after forward (Recompute), it may be right
            for a, b in zip(found, train(network(lambda: Isolated(kind()))), strict=True):
                assert np.array_equal(a, b), f"network {number}"
    assert refused >= len(NETWORKS) - 2
    with pytest.raises((TypeError, ValueError, AttributeError, AssertionError), match=WRONG[kind]):
        nn.check_layer(kind(), (6,))


def test_who_writes_into_samples_is_refused_where_others_need_them():
    refused = 0
    for network in NETWORKS:
        try:
            found = train(network(WritesIntoInput))
        except TypeError as error:
            assert "WritesIntoInput" in str(error) and "overwrote x" in str(error)
            refused += 1
        else:
            for a, b in zip(found, train(network(lambda: Isolated(WritesIntoInput()))), strict=True):
                assert np.array_equal(a, b)
    assert refused > 10


class OwnNoise(nn.Layer):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def forward(self, p, x, ctx):
        mask = self.rng.random(x.shape) > 0.5
        return x * mask, mask

    def backward(self, p, gy, mask, ctx):
        return gy * mask, {}


class Noise(OwnNoise):
    def forward(self, p, x, ctx):
        mask = ctx.random(x.shape, "noise") > 0.5
        return x * mask, mask


def test_random_numbers_of_ones_own_are_refused_where_they_must_come_again():
    with pytest.raises(RuntimeError, match=r"Recompute\(OwnNoise.*ctx.random"):
        train([dense(), nn.Recompute(OwnNoise())])
    with pytest.raises(AssertionError, match=r"OwnNoise.*second time.*ctx.random"):
        nn.check_layer(OwnNoise(), (6,))
    for a, b in zip(train([dense(), nn.Recompute(Noise())]), train([dense(), Noise()]), strict=True):
        assert np.array_equal(a, b)


def test_counted_random_numbers():
    network = nn.Network(nn.Sequential(Noise()), (6,), np.float64)
    ctx = network.context(seed=3).children[0]
    numbers = ctx.random((9, 2, 3))
    single = nn.Network(nn.Sequential(Noise()), (6,)).context(seed=3).children[0].random((9, 2, 3))
    assert single.dtype == np.float32 and np.abs(single - numbers).max() < 1e-7
    assert numbers.shape == (9, 2, 3) and 0 <= numbers.min() < numbers.max() < 1
    assert not np.array_equal(ctx.random((9, 2, 3), "other"), numbers)
    ctx.micro_batch.start = 4
    assert np.array_equal(ctx.random((5, 2, 3)), numbers[4:]), "by the sample's place in the global batch"
    ctx.micro_batch.step = 1
    assert not np.array_equal(ctx.random((5, 2, 3)), numbers[4:])
    many = ctx.random((400, 1000))
    assert abs(many.mean() - 0.5) < 0.002 and abs(many.var() - 1 / 12) < 0.001
