"""Containers: sums and concatenations by hand, names and order of the layout, what may be overwritten, recomputing."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

import nn
from nn.analysis.check_layer import check_layer
from nn.analysis.gradcheck import gradcheck
from nn.core.containers import Parallel, Recompute, Residual
from nn.core.layer import Layer, Sequential, ShapeError, Spec
from nn.core.network import Network
from nn.files.model import load, save
from nn.layers.activations import GELU, LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from nn.layers.attention import MultiHeadAttention, TransformerBlock
from nn.layers.dense import Linear, TiedLinear
from nn.layers.dropout import Dropout
from nn.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions
from nn.layers.pooling import GlobalMaxPool2d, MaxPool2d
from nn.layers.reshaping import Flatten, Reshape
from nn.losses import CrossEntropyLoss
from nn.optim.optimizers import SGD
from nn.registry import registered
from nn.training.fit import fit
from nn.training.trainer import Trainer


def sample(shape=(5, 4), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


class Average(Layer):
    """Counts forward passes in a running statistic and drifts with them, as batch normalisation does."""

    def specs(self, in_shape):
        return {"count": Spec((1,), lambda rng, shape: np.zeros(shape), buffer=True)}, in_shape

    def forward(self, p, x, ctx):
        if ctx.training:
            ctx.buffers.count += 1
        return x * 2, None

    def backward(self, p, gy, saved, ctx):
        return gy * 2, {}


CASES = [
    Residual(Sequential(Linear(4, 6), Tanh(), Linear(6, 4))),
    Residual(Sequential(Linear(4, 4), Tanh())),
    Residual(Sequential(Linear(4, 3), Tanh()), Linear(4, 3)),
    Residual(Linear(4, 3), Sequential(Sigmoid(), Linear(4, 3), Tanh())),
    Residual(Tanh()),
    Residual(Sequential(Tanh(), Reshape(2, 2), Flatten())),
    Residual(Residual(Residual(Linear(4, 4)))),
    Parallel(Linear(4, 3), Sequential(Tanh(), Linear(4, 2)), Sigmoid(), Linear(4, 1)),
    Parallel(Tanh()),
    Parallel(Residual(Tanh()), Parallel(Sigmoid(), Linear(4, 2))),
    Recompute(Sequential(Linear(4, 5), GELU(), Dropout(0.4), Linear(5, 3))),
    Recompute(Linear(4, 3)),
    Recompute(Residual(Sequential(Linear(4, 4), Tanh()))),
]
# Between layers that would overwrite their input or gradient if they were told that it is free.
WRAPPED = [Sequential(Linear(4, 4), Tanh(), case, Tanh(), Linear(case.specs((4,))[1][0], 2)) for case in CASES]


@pytest.mark.parametrize("layer", CASES + WRAPPED, ids=repr)
def test_gradient_contract_and_micro_batches(layer):
    assert gradcheck(layer, sample(seed=3)) < 1e-6
    check_contract(layer, sample())
    check_micro_batches(layer, sample())


def test_residual_adds():
    body = Sequential(Linear(4, 4), Tanh())
    result = one_pass(Residual(body), sample())
    inner = np.tanh(sample() @ result.w["body.0.W"] + result.w["body.0.b"])
    np.testing.assert_allclose(result.y, inner + sample(), rtol=1e-13)
    shortcut = one_pass(Residual(body, Linear(4, 4)), sample())
    w = shortcut.w
    inner = np.tanh(sample() @ w["body.0.W"] + w["body.0.b"])
    np.testing.assert_allclose(shortcut.y, inner + sample() @ w["shortcut.W"] + w["shortcut.b"], rtol=1e-13)


def test_branches_concatenate():
    x = sample((5, 3, 4))
    result = one_pass(Parallel(Linear(4, 3), Tanh(), Linear(4, 2)), x)
    w = result.w
    expected = np.concatenate([x @ w["0.W"] + w["0.b"], np.tanh(x), x @ w["2.W"] + w["2.b"]], axis=-1)
    np.testing.assert_allclose(result.y, expected, rtol=1e-13)
    assert result.network.out_shape == (3, 9)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 2**31))
def test_branches_of_any_width(widths, features, seed):
    x = sample((3, features), seed)
    result = one_pass(Parallel(*(Linear(features, w) for w in widths)), x)
    whole = {kind: np.concatenate([result.w[f"{i}.{kind}"] for i in range(len(widths))], axis=-1) for kind in "Wb"}
    single = one_pass(Linear(features, sum(widths)), x, w=whole, gy=result.gy)
    np.testing.assert_allclose(result.y, single.y, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(result.gx, single.gx, rtol=1e-12, atol=1e-13)
    stacked = np.concatenate([result.g[f"{i}.W"] for i in range(len(widths))], axis=-1)
    np.testing.assert_allclose(stacked, single.g["W"], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layer", [Sequential(Linear(4, 4), case) for case in CASES], ids=repr)
def test_finished_gradients_are_a_growing_prefix(layer):
    network = Network(layer, (4,), np.float64)
    buffer, gradients = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
    network.layout.initialize(buffer, 0)
    ctx, seen = network.context(), []
    ctx.network_context.on_gradients_ready = lambda end: seen.append((end, gradients[:end].copy()))
    y, saved = network.forward(network.layout.views(buffer), sample(), ctx)
    network.backward(network.layout.views(buffer), network.layout.views(gradients), y.copy(), saved, ctx)
    ends = [end for end, _ in seen]
    assert ends == sorted(ends) and ends[-1] == network.layout.size
    for end, prefix in seen:
        assert np.array_equal(gradients[:end], prefix)


def test_first_layers_compute_no_input_gradient():
    for layer in (CASES[2], CASES[7], CASES[10]):
        network = Network(layer, (4,), np.float64)
        buffer = network.layout.zeros(np.float64)
        network.layout.initialize(buffer, 0)
        p, ctx = network.layout.views(buffer), network.context()
        with_gx = one_pass(layer, sample())
        gradients = network.layout.zeros(np.float64)
        for name, array in network.layout.items(buffer):
            array[...] = with_gx.w[name]
        _, saved = network.forward(p, sample(), ctx)
        gx = network.backward(p, network.layout.views(gradients), with_gx.gy, saved, ctx)
        assert gx is None
        for name, array in network.layout.items(gradients):
            np.testing.assert_allclose(array, with_gx.g[name], rtol=1e-13, atol=1e-15)


def test_recompute_changes_nothing_but_memory():
    inner = Sequential(Sigmoid(), Linear(4, 50), Dropout(0.3), Average(), Tanh(), Linear(50, 3))
    plain = one_pass(Sequential(Linear(4, 4), inner), sample())
    again = one_pass(Sequential(Linear(4, 4), Recompute(inner)), sample())
    assert list(plain.w) == list(again.w)
    assert np.array_equal(plain.y, again.y) and np.array_equal(plain.gx, again.gx)
    for name in plain.g:
        assert np.array_equal(plain.g[name], again.g[name])
    assert plain.ctx.children[1].children[3].buffers.count == again.ctx.children[1].children[3].buffers.count == 1
    network = again.network
    p, ctx = network.layout.views(network.layout.zeros(np.float64)), network.context()
    _, saved = network.forward(p, sample(), ctx)
    assert saved[1][0].shape == (5, 4) and len(saved[1]) == 3
    network.backward(p, network.layout.views(network.layout.zeros(np.float64)), np.ones((5, 3)), saved, ctx)
    _, saved = network.forward(p, sample(), ctx)
    assert saved[1][2] is None, "the output is kept in the first pass only, to be compared"


def test_recompute_sees_the_pass_as_it_was():
    """Two micro-batches in flight, later steps and evaluation between: masks come from the first forward."""
    network = Network(Recompute(Sequential(Linear(4, 40), Dropout(0.5), Linear(40, 2))), (4,), np.float64)
    buffer, gradients = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
    network.layout.initialize(buffer, 0)
    p, g, ctx = network.layout.views(buffer), network.layout.views(gradients), network.context()
    ctx.network_context.input_gradient = True
    ctx.micro_batch.start, ctx.micro_batch.step = 3, 7
    y, saved = network.forward(p, sample(), ctx)
    gy = np.ones_like(y)
    ctx.micro_batch.start, ctx.micro_batch.step, ctx.micro_batch.training = 11, 8, False
    seen = []
    ctx.network_context.after_forward = lambda path, layer, y: seen.append(path)
    gx = network.backward(p, g, gy, saved, ctx)
    assert (ctx.micro_batch.start, ctx.micro_batch.step, ctx.micro_batch.training, seen) == (11, 8, False, [])
    x = sample()
    ctx.micro_batch.start, ctx.micro_batch.step, ctx.micro_batch.training = 3, 7, True
    eps, d = 1e-6, sample(seed=5)
    difference = (
        (network.forward(p, x + eps * d, ctx)[0].sum() - network.forward(p, x - eps * d, ctx)[0].sum()) / eps / 2
    )
    assert (gx * d).sum() == pytest.approx(difference, rel=1e-6)


def test_every_layer_is_watched():
    layer = Sequential(Residual(Linear(4, 4)), Parallel(Linear(4, 2), Sequential(Tanh())), Recompute(Linear(6, 2)))
    network = Network(layer, (4,), np.float64)
    ctx, seen = network.context(), []
    ctx.network_context.after_forward = lambda path, layer, y: seen.append(path)
    network.forward(network.layout.views(network.layout.zeros(np.float64)), sample(), ctx)
    assert seen == ["0.body", "0", "1.0", "1.1.0", "1.1", "1", "2", ""]


@pytest.mark.parametrize(
    ("layer", "order"),
    [
        (Sequential(Linear(2, 3), ReLU(), MaxPool2d(2)), [0, 2, 1]),
        (Sequential(ReLU(), MaxPool2d(3, 2, 1), GlobalMaxPool2d(), Linear(2, 3)), [1, 2, 0, 3]),
        (Sequential(Linear(2, 3), ReLU(), MaxPool2d(2), LogSoftmax()), [0, 2, 1, 3]),  # it must not overwrite ReLU's y
        (Residual(Sequential(Linear(2, 2), ReLU(), MaxPool2d(1))), [0, 2, 1]),  # nor must the sum
        (Sequential(Linear(2, 3), Tanh(), MaxPool2d(2)), [0, 1, 2]),
    ],
    ids=repr,
)
def test_a_maximum_is_taken_before_a_relu_unless_outputs_are_watched(layer, order):
    """Same bits either way, of ties and of windows without a positive value too."""
    ran, shapes, x = [], {}, np.round(sample((3, 6, 6, 2)))

    def note(ctx):
        ctx.network_context.before_layer = lambda child: ran.append(child)

    def watch(ctx):
        ctx.network_context.after_forward = lambda path, layer, y: shapes.update({path: y.shape})

    plain, watched = one_pass(layer, x, setup=note), one_pass(layer, x, setup=watch)
    assert [int(child.path[-1]) for child in ran if not child.children][: len(order)] == order
    assert all(shapes[path] == (3, *out) for path, _, _, out in plain.network.layers())
    assert np.array_equal(plain.y, watched.y) and np.array_equal(plain.gx, watched.gx)
    assert all(np.array_equal(plain.g[name], watched.g[name]) for name in plain.g)


def test_bad_values_are_traced_through_containers():
    network = Network(Sequential(Residual(Sequential(Linear(4, 4), Tanh())), Linear(4, 2)), (4,), np.float64)
    buffer = network.layout.zeros(np.float64)
    dict(network.layout.items(buffer))["0.body.0.b"][2] = np.nan
    bad = network.first_bad(network.layout.views(buffer), sample(), network.context())
    assert bad.where == "the output of layer 0.body.0 (Linear(4, 4))"
    assert bad.samples == list(range(len(sample())))


def test_shapes_macs_and_summary():
    layer = Sequential(
        Residual(Sequential(Linear(4, 6), Linear(6, 4)), Linear(4, 4)), Parallel(Linear(4, 2), Linear(4, 3))
    )
    network = Network(layer, (4,))
    assert layer.macs((4,)) == 24 + 24 + 16 + 8 + 12
    rows = list(network.layers())
    assert [row[0] for row in rows] == ["0.body.0", "0.body.1", "0.shortcut", "1.0", "1.1"]
    assert [row[2] for row in rows] == [(4,), (6,), (4,), (4,), (4,)]
    assert f"{network.layout.count:,}" in network.summary()


@pytest.mark.parametrize(
    "layer",
    [
        *(
            a()
            for a in (*registered("activation").values(), Softmax, LogSoftmax, Dropout, Flatten, SinusoidalPositions)
        ),
        *(Linear(4, 3), LearnedPositions(5, 4), MultiHeadAttention(4, 2), TransformerBlock(4, 2), Reshape(12)),
        *(Residual(Linear(4, 4)), Parallel(Linear(4, 4), Tanh()), Recompute(Sequential(Tanh(), Linear(4, 4)))),
        Sequential(Embedding(5, 4, padding=0), TiedLinear("0.W", 4, 5)),
    ],
    ids=repr,
)
def test_an_empty_batch_passes_through_every_layer(layer):
    """A rank may have no sample of a small last batch; its gradients are zero."""
    x = np.zeros((0, 3), np.int64) if "Embedding" in repr(layer) else np.zeros((0, 3, 4))
    result = one_pass(layer, x)
    assert result.y.shape == (0, *result.network.out_shape)
    assert all((g == 0).all() for g in result.g.values())


def test_what_does_not_fit_is_refused_by_name():
    for layer, words in (
        (Sequential(Residual(Linear(4, 3))), r"layer 0 .*the body makes \(3,\) .*the shortcut \(4,\)"),
        (Sequential(Residual(Linear(4, 3), Linear(4, 2))), r"the shortcut \(2,\)"),
        (Sequential(Residual(Sequential(ReLU(), Linear(5, 4)))), r"layer 0\.body\.1 .*expects 5 features"),
        (Sequential(Parallel(Linear(4, 3), Sequential(Linear(3, 4)))), r"layer 0\.1\.0 .*expects 3 features"),
        (Sequential(Parallel(Reshape(2, 2), Linear(4, 2))), r"layer 0 .*agree in all axes but the last"),
        (Sequential(Recompute(Linear(3, 4))), r"layer 0 .*expects 3 features"),
        (Sequential(Reshape(3, 2)), r"layer 0 .*4 elements.*\(3, 2\)"),
    ):
        with pytest.raises(ShapeError, match=words):
            Network(layer, (4,))
    with pytest.raises(ValueError, match="at least one"):
        Parallel()
    for make, words in (
        (lambda: Residual(Linear(4, 4), Tanh), r"Residual: argument 1 .*not a Layer"),
        (lambda: Parallel(Tanh(), None), r"Parallel: argument 1 is None"),
        (lambda: Recompute(Tanh), r"Recompute: argument 0 .*not the class"),
    ):
        with pytest.raises(TypeError, match=words):
            make()


class Column(Layer):
    """One column of ids (N, columns)."""

    ids = True

    def __init__(self, index):
        self.index = index

    def specs(self, in_shape):
        return {}, (1,)

    def forward(self, p, x, ctx):
        return x[:, self.index : self.index + 1], None

    def backward(self, p, gy, saved, ctx):
        return None, {}


def ids_in_branches():
    """Two tables of the same ids, one of them behind a linear layer; and one table for each column."""
    same = Parallel(Embedding(7, 3), Sequential(Embedding(7, 4), Linear(4, 2)))
    columns = Parallel(Sequential(Column(0), Embedding(7, 3)), Sequential(Column(2), Embedding(9, 2)))
    return {"same ids": same, "columns": columns}


@pytest.mark.parametrize("name", ids_in_branches())
def test_branches_of_ids_have_right_gradients(name):
    layer, ids = ids_in_branches()[name], np.random.default_rng(3).integers(0, 7, (6, 3))
    assert gradcheck(layer, ids) < 1e-6
    assert gradcheck(Sequential(layer, Tanh(), Flatten()), ids) < 1e-6
    check_layer(layer, (3,))
    check_micro_batches(layer, ids)


def test_branches_of_ids_train_as_in_pytorch():
    """The look-up of a table is told apart from the other one's: the same weights after each step."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    ids, classes = rng.integers(0, 7, (20, 3)), rng.integers(0, 4, 20)
    network = Network(Sequential(ids_in_branches()["same ids"], Flatten(), Linear(15, 4)), (3,), np.float64)
    one = Trainer(network, CrossEntropyLoss(), SGD(0.5, momentum=0.9))
    arrays = {name: torch.tensor(array.copy(), requires_grad=True) for name, array in one.named_parameters()}
    rule = torch.optim.SGD(arrays.values(), 0.5, momentum=0.9)

    def loss():
        first = arrays["0.0.W"][torch.tensor(ids)]
        second = arrays["0.1.0.W"][torch.tensor(ids)] @ arrays["0.1.1.W"] + arrays["0.1.1.b"]
        z = torch.cat([first, second], -1).flatten(1) @ arrays["2.W"] + arrays["2.b"]
        return torch.nn.functional.cross_entropy(z, torch.tensor(classes))

    losses = []
    for _ in range(20):
        losses.append(one.step(ids, classes))
        rule.zero_grad()
        value = loss()
        value.backward()
        rule.step()
        assert abs(losses[-1] - value.item()) < 1e-12
    for name, array in one.named_parameters():
        np.testing.assert_allclose(array, arrays[name].detach().numpy(), rtol=1e-10, atol=1e-12, err_msg=name)
    assert losses[-1] < 0.5 * losses[0]


def test_branches_of_ids_are_used_as_others_are(tmp_path):
    """Trained by fit, saved, loaded, exported: an outer look-up of ids is refused by name where floats come."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 7, (64, 3))
    network = Network(Sequential(ids_in_branches()["same ids"], Flatten(), Linear(15, 2)), (3,))
    one = Trainer(network, CrossEntropyLoss(), SGD(0.5))
    training = fit(one, (ids, (ids[:, 0] > 3).astype(int)), 30, batch=16, verbose=False)
    assert training.history[-1]["loss"] < 0.2 < training.history[0]["loss"]
    again = load(save(one, tmp_path / "x.npz"))
    np.testing.assert_array_equal(again.predict(ids), one.predict(ids))
    with pytest.raises(TypeError, match="ids"):
        one.predict(ids + 0.5)


def test_a_copy_of_a_chain_that_is_changed_tells_anew_what_may_be_overwritten():
    chain = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    nn.Network(chain, (4,))
    assert chain.output == "kept"
    other = copy.deepcopy(chain)
    other.layers = (nn.Sigmoid(), nn.Linear(4, 4))
    assert other.output == "new" and chain.output == "kept"
