"""Layers as one writes them first, wrongly: each is refused with its name, and with what to do."""

from collections import namedtuple

import numpy as np
import pytest

import nn
from nn.core.layer import ShapeError
from nn.models.googlenet import Auxiliary, AuxiliaryLoss

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 64)


def trainer(*layers, in_shape=(6,), loss=None, **more):
    network = nn.Network(nn.Sequential(*layers), in_shape, **more)
    return nn.Trainer(network, loss or nn.CrossEntropyLoss(), nn.SGD(0.1))


class Wide(nn.Layer):
    def forward(self, p, x, ctx):
        return x * np.ones(6), None


class Mean(nn.Layer):  # without specs, which would say (1,)
    def forward(self, p, x, ctx):
        return x.mean(-1, keepdims=True), None


class Alone(nn.Layer):
    def forward(self, p, x, ctx):
        return 2 * x


class Hidden(nn.Layer):
    def __init__(self):
        self.parts = [nn.Linear(6, 6)]

    def forward(self, p, x, ctx):
        return self.parts[0].forward(p, x, ctx)


class Nameless(Hidden):
    def children(self):
        return {"part": self.parts[0]}


class Zeros(nn.Layer):
    def __init__(self, init):
        self.init = init

    def specs(self, in_shape):
        return {"w": nn.Spec(in_shape, self.init)}, in_shape


@pytest.mark.parametrize("samples", [2, 64])  # two rows can be taken for the pair that they are not
@pytest.mark.parametrize("inside", [lambda layer: layer, nn.Residual, nn.Parallel, nn.Recompute, nn.Sequential])
def test_what_forward_returns(inside, samples):
    x, y = X[:samples], Y[:samples]
    with pytest.raises(TypeError, match=r"layer 1.*Alone.*forward must return a pair \(y, saved\)"):
        trainer(nn.Linear(6, 6), inside(Alone()), nn.Linear(6, 3)).step(x, y)
    with pytest.raises(TypeError, match=r"layer 1.*Wide.*float64 in a network of float32.*dtype=x.dtype"):
        trainer(nn.Linear(6, 6), inside(Wide()), nn.Linear(6, 3)).step(x, y)
    if inside is not nn.Residual:
        for of in (lambda trainer: trainer.step(x, y), lambda trainer: trainer.predict(x)):
            with pytest.raises(ShapeError, match=rf"layer 1.*Mean.*\({samples}, 6\).*\({samples}, 1\)"):
                of(trainer(nn.Linear(6, 6), inside(Mean()), nn.Tanh()))


def test_a_network_that_is_one_layer():
    def one(layer, in_shape=(6,)):
        return nn.Trainer(nn.Network(layer, in_shape), nn.MSELoss(), nn.SGD(0.1))

    with pytest.raises(TypeError, match="Alone"):
        one(Alone()).predict(X[:2])
    with pytest.raises(ShapeError, match=r"Mean.*\(64, 6\).*\(64, 1\)"):
        one(Mean()).predict(X)
    assert one(nn.Linear(6, 3)).predict(X).shape == (64, 3)


def test_what_is_right_is_looked_at_once_in_training_and_once_in_evaluation():
    one = trainer(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    one.predict(X)
    assert all(child.unchecked.checked_modes == {False} for child in one.ctx.children)
    one.step(X, Y)
    assert all(each.unchecked is None for each in (one.ctx, *one.ctx.children))


def test_layers_inside_that_are_not_declared():
    with pytest.raises(TypeError, match=r"layer 1.*it holds layers \(parts\).*needs children\(\) and specs\(\)"):
        trainer(nn.Linear(6, 6), Hidden())
    with pytest.raises(TypeError, match=r"layer 1\.0.*\(part\)"):
        trainer(nn.Linear(6, 6), nn.Parallel(Nameless()))


def test_one_object_in_two_places():
    shared, act = nn.Linear(6, 6), nn.Tanh()
    for layers in ((shared, nn.Tanh(), shared), (act, nn.Linear(6, 6), nn.Residual(act))):
        with pytest.raises(ValueError, match=r"same object as layer .*Make two layers.*tied="):
            trainer(*layers)
    first, second = trainer(shared), trainer(nn.Tanh(), shared)  # in two networks it is two layers
    assert not np.shares_memory(first.flat_parameters, second.flat_parameters)


def test_first_values_that_are_no_function_of_a_generator_and_a_shape():
    with pytest.raises(TypeError, match=r"0\.w: its init is called as init\(rng, shape\).*nn.initializers.zeros"):
        trainer(Zeros(np.zeros))
    with pytest.raises(ShapeError, match=r"0\.w: its init must make an array of shape \(6,\), given \(2, 6\)"):
        trainer(Zeros(lambda rng, shape: np.zeros((2, *shape))))
    with pytest.raises(ShapeError, match=r"given \(1,\)"):  # would be repeated
        trainer(Zeros(lambda rng, shape: rng.standard_normal(1)))


def test_an_array_given_for_a_parameter_is_written_into_it():
    one = trainer(nn.Linear(6, 3))
    one.p[0].W = np.zeros((6, 3))
    one.p[0].b += 1
    assert np.array_equal(one.predict(X), np.ones((64, 3))) and one.flat_parameters.sum() == 3
    one.flat_parameters = np.full_like(one.flat_parameters, 2.0)
    assert (one.p[0].W == 2).all() and np.shares_memory(one.p[0].W, one.flat_parameters)
    with pytest.raises(ValueError, match=r"W: expected an array of shape \(6, 3\), given shape \(3,\)"):
        one.p[0].W = np.zeros(3)
    with pytest.raises(ValueError, match=r"parameters: expected an array of shape"):
        one.flat_parameters = np.zeros(3, np.float32)
    with pytest.raises(AttributeError, match="there is no array 'w' here, only W, b"):
        one.p[0].w = np.zeros((6, 3))


def test_padding_that_is_not_of_the_places_that_attention_sees():
    layers = (
        nn.Embedding(5, 4, padding=0),
        nn.Reshape(4, 3),
        nn.MultiHeadAttention(3, 1),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    with pytest.raises(ShapeError, match=r"layer 2.*a padding mask of shape \(2, 4\).*given the Embedding's \(2, 3\)"):
        trainer(*layers, in_shape=(3,)).predict(np.ones((2, 3), int))


def test_branches_of_ids():
    """The width of two embeddings side by side, and gradients of both."""
    branches = nn.Parallel(nn.Embedding(5, 4), nn.Sequential(nn.Embedding(5, 2), nn.Dropout(0.0)))
    one = trainer(branches, nn.Flatten(), nn.Linear(18, 3), in_shape=(3,))
    ids = RNG.integers(0, 5, (64, 3))
    expected = np.concatenate([one.p[0][0].W[ids], one.p[0][1][0].W[ids]], axis=-1)
    y, _ = one.network.root.layers[0].forward(one.p[0], ids, one.ctx.children[0])
    assert np.array_equal(y, expected)
    assert nn.gradcheck(nn.Sequential(branches, nn.Flatten(), nn.Linear(18, 3)), ids) < 1e-6
    before = one.flat_parameters.copy()
    one.step(ids, Y)
    assert (one.p[0][0].W != one.network.layout.views(before)[0][0].W).any()


def test_mixed_precision_of_a_layer_that_saves_a_named_tuple():
    Kept = namedtuple("Kept", "x y")

    class Named(nn.Tanh):
        def forward(self, p, x, ctx):
            y = np.tanh(x)
            return y, Kept(x, y)

        def backward(self, p, gy, kept, ctx):
            return gy * (1 - kept.y**2), {}

    one, other = (trainer(nn.Linear(6, 6), layer, nn.Linear(6, 3), mixed=True) for layer in (Named(), nn.Tanh()))
    assert one.step(X, Y) == other.step(X, Y)
    np.testing.assert_allclose(one.gradients, other.gradients, atol=1e-6)


def test_heads_inside_a_network_are_rounded_and_watched():
    """Of a network in mixed precision all layers with parameters take float16 numbers, those of an Auxiliary too."""
    layers = nn.Linear(6, 6), Auxiliary(nn.Sequential(nn.Linear(6, 3)), nn.Linear(6, 3))
    one = trainer(*layers, loss=AuxiliaryLoss(nn.CrossEntropyLoss()), mixed=True)
    seen = {}
    one.ctx.network_context.after_forward = lambda path, layer, y: seen.setdefault(path, y)
    _, saved = one.network.forward(one.p, X, one.ctx)
    assert {"1.rest.0", "1.rest", "1.head"} <= seen.keys()
    assert saved[1][1].dtype == np.float16, "what the head has saved"


class Table(nn.Layer):
    """A look-up with ids of its own; describe(ids, gy) is what backward says of the table."""

    def __init__(self, shape, ids, describe):
        self.shape, self.at, self.describe = shape, np.array(ids), describe

    def specs(self, in_shape):
        return {"W": nn.Spec(self.shape, nn.initializers.ones)}, in_shape

    def forward(self, p, x, ctx):
        return x + p.W[self.at].mean(axis=0), None

    def backward(self, p, gy, saved, ctx):
        return gy, {"W": self.describe(self.at, gy)}


def test_ids_of_a_scattered_gradient_count_from_the_end_where_negative():
    rows = RNG.standard_normal((6, 6)).astype(np.float32)
    ids = [-1, 3, 0, -4, -1, 2]
    one = trainer(Table((4, 6), ids, lambda ids, gy: nn.ScatterAdd(ids, rows)))
    expected = np.zeros((4, 6), np.float32)
    np.add.at(expected, ids, rows)
    for parts in (1, 2):
        one.step(X, Y, accumulate=parts)
        np.testing.assert_allclose(one.g[0].W, parts * expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(IndexError, match="id -5 is out of range of 4 rows"):
        trainer(Table((4, 6), [0, -1], lambda ids, gy: nn.ScatterAdd(ids - 4, rows[:2]))).step(X, Y)


@pytest.mark.parametrize(("shape", "rows"), [((4, 6), (2, 1)), ((4, 1, 6), (2, 6)), ((4, 6), (1, 6))])
def test_scattered_rows_that_are_no_rows_of_the_parameter_are_refused(shape, rows):
    given = np.ones(rows, np.float32)
    one = trainer(Table(shape, [0, 1], lambda ids, gy: nn.ScatterAdd(ids, given)), nn.Flatten(), in_shape=(1, 6))
    with pytest.raises(ValueError, match="ScatterAdd adds rows"):
        one.step(X[:, None], Y % 6)


class Squeezed(nn.Layer):
    def specs(self, in_shape):
        return {"b": nn.Spec(in_shape, nn.initializers.zeros)}, in_shape

    def forward(self, p, x, ctx):
        return (x + p.b if ctx.training else (x + p.b).mean(axis=0, keepdims=True)), None

    def backward(self, p, gy, saved, ctx):
        return gy, {"b": gy.squeeze().sum(axis=0)}


def test_what_goes_wrong_after_the_first_step_is_not_repeated_by_numpy():
    one = trainer(Squeezed(), nn.Flatten(), in_shape=(2, 3))
    x = X.reshape(64, 2, 3)
    one.step(x, Y)
    with pytest.raises(ValueError, match=r"a gradient must have its parameter's shape \(2, 3\), given \(3,\)"):
        one.step(x[:1], Y[:1])
    narrow = trainer(Squeezed())
    narrow.step(X, Y)
    with pytest.raises(ValueError, match=r"shape \(6,\), given \(\)"):
        narrow.step(X[:1], Y[:1])
    with pytest.raises(ShapeError, match=r"makes \(6,\) of a sample, but an array \(1, 6\) of 64 samples"):
        narrow.predict(X)


class Slope(nn.Layer):
    """PReLU with one slope: its parameter has no axis, so the gradient is a sum of everything."""

    def specs(self, in_shape):
        return {"a": nn.Spec((), nn.initializers.zeros)}, in_shape

    def forward(self, p, x, ctx):
        return np.where(x > 0, x, x * p.a), x

    def backward(self, p, gy, x, ctx):
        return np.where(x > 0, gy, gy * p.a), {"a": (gy * x)[x <= 0].sum()}


def test_the_gradient_of_a_parameter_without_axes_is_a_scalar():
    assert nn.gradcheck(Slope(), RNG.standard_normal((5, 4))) < 1e-6
    one, cut = trainer(nn.Linear(6, 4), Slope()), trainer(nn.Linear(6, 4), Slope())
    one.step(X, Y)
    cut.step(X, Y, accumulate=5)
    assert one.flat_parameters[one.network.layout.slices["1.a"]] != 0
    np.testing.assert_allclose(cut.flat_parameters, one.flat_parameters, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("output", 10), ("gradient", abs), ("ids", [3, 4]), ("ids", np.arange(3)), ("synchronized", "no")],
)
def test_a_hyper_parameter_with_the_name_of_a_declaration_is_refused(name, value):
    layer = nn.ReLU()
    setattr(layer, name, value)
    with pytest.raises(TypeError, match=f"layer 0.*{name} declares something to the engine"):
        nn.Network(nn.Sequential(layer), (3,))


class Turned(nn.Linear):
    def backward(self, p, gy, x, ctx):
        gx, gradients = super().backward(p, gy, x, ctx)
        return gx, gradients | {"W": nn.Product(gy.T, x)}


def test_a_product_of_the_transposed_shape_is_refused():
    with pytest.raises(ShapeError, match="gradient of W"):
        trainer(Turned(6, 3)).step(X, Y)
