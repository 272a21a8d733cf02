"""Several micro-batches in flight, and backward in two halves: the gradients of one after another, bit for bit."""

import numpy as np
import pytest
from passes import SMALL

import nn
from nn.analysis.gradcheck import gradcheck
from nn.core.context import Group, MicroBatch
from nn.core.gradients import Product
from nn.core.layer import Layer, Sequential, Spec
from nn.core.network import Network
from nn.initializers import glorot
from nn.models import build
from nn.models.googlenet import Auxiliary
from nn.models.resnet import Subsample

IMAGE, SEQUENCE = (6, 6, 8), (5, 8)


def linear(n=6):
    return nn.Linear(8, n)


LAYERS = {  # every kind of layer, alone or where it can stand: (layer, shape of a sample)
    nn.Linear: (linear(), (8,)),
    nn.TiedLinear: (Sequential(nn.Linear(8, 5, bias=False), nn.TiedLinear("0.W", 5, 8)), (8,)),
    nn.MultiHeadAttention: (nn.MultiHeadAttention(8, 2, causal=True), SEQUENCE),
    nn.TransformerBlock: (nn.TransformerBlock(8, 2, dropout=0.2), SEQUENCE),
    nn.Embedding: (nn.Embedding(7, 8, padding=0), (5,)),
    nn.LearnedPositions: (Sequential(linear(8), nn.LearnedPositions(9, 8), nn.Sigmoid()), SEQUENCE),
    nn.MixtureOfExperts: (Sequential(linear(8), nn.MixtureOfExperts(8, 3, hidden=5), nn.Tanh()), SEQUENCE),
    nn.RotaryPositions: (Sequential(linear(8), nn.RotaryPositions()), SEQUENCE),
    nn.SinusoidalPositions: (Sequential(linear(8), nn.SinusoidalPositions()), SEQUENCE),
    nn.Conv2d: (nn.Conv2d(8, 6, 3, padding=1), IMAGE),
    nn.BatchNorm1d: (Sequential(linear(), nn.BatchNorm1d(6)), (8,)),
    nn.BatchNorm2d: (Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), IMAGE),
    nn.LayerNorm: (Sequential(nn.LayerNorm(8), linear()), (8,)),
    nn.RMSNorm: (Sequential(linear(), nn.RMSNorm(6), nn.Tanh()), (8,)),
    nn.LocalResponseNorm: (Sequential(nn.Conv2d(8, 6, 1), nn.LocalResponseNorm(3)), IMAGE),
    nn.Dropout: (Sequential(linear(), nn.Dropout(0.4), nn.Linear(6, 3)), (8,)),
    nn.Residual: (Sequential(nn.Residual(Sequential(nn.LearnedPositions(5, 8), linear(8))), nn.Tanh()), SEQUENCE),
    nn.Parallel: (nn.Parallel(linear(2), Sequential(linear(3), nn.Tanh()), nn.Tanh()), (8,)),
    nn.Recompute: (Sequential(nn.Recompute(Sequential(linear(), nn.Dropout(0.5))), nn.Tanh(), nn.Linear(6, 2)), (8,)),
    nn.Sequential: (Sequential(linear(), nn.Sigmoid(), nn.Linear(6, 2)), (8,)),
    Auxiliary: (Auxiliary(linear(3), Sequential(nn.Dropout(0.3), linear(3))), (8,)),
    Subsample: (Sequential(nn.Conv2d(8, 4, 1), Subsample(2, 6)), IMAGE),
    nn.MaxPool2d: (Sequential(nn.Conv2d(8, 4, 1), nn.MaxPool2d(2)), IMAGE),
    nn.AvgPool2d: (Sequential(nn.Conv2d(8, 4, 1), nn.AvgPool2d(2)), IMAGE),
    nn.AdaptiveAvgPool2d: (Sequential(nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(2)), IMAGE),
    nn.GlobalAvgPool2d: (Sequential(nn.Conv2d(8, 4, 1), nn.GlobalAvgPool2d()), IMAGE),
    nn.GlobalMaxPool2d: (Sequential(nn.Conv2d(8, 4, 1), nn.GlobalMaxPool2d()), IMAGE),
    nn.RNN: (Sequential(linear(8), nn.RNN(8, 6), nn.Tanh()), SEQUENCE),
    nn.LSTM: (Sequential(nn.LSTM(8, 6, truncate=2, learn_state=True), nn.LSTM(6, 3, last=True)), SEQUENCE),
    nn.Flatten: (Sequential(nn.Flatten(), nn.Linear(40, 3)), SEQUENCE),
    nn.Reshape: (Sequential(nn.Reshape(8, 5), nn.Linear(5, 3)), SEQUENCE),
} | {
    getattr(nn, name): (Sequential(linear(8), getattr(nn, name)()), (8,))
    for name in ("GELU", "LeakyReLU", "LogSoftmax", "ReLU", "SiLU", "Sigmoid", "Softmax", "Tanh")
}  # fmt: skip
MORE = {  # the ways of a convolution, and other cases of the same layers
    "grouped": (nn.Conv2d(8, 4, 3, stride=2, groups=2), IMAGE),
    "few channels": (Sequential(nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(2, 4, (1, 3))), (4, 8, 8)),
    "pointwise": (nn.Conv2d(8, 16, 1), IMAGE),
    "winograd": (nn.Conv2d(64, 48, 3, padding=1), (16, 15, 64)),
    "winograd of rows": (nn.Conv2d(16, 16, 3, padding=1), (32, 32, 16)),
    "first": (Sequential(nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1)), IMAGE),
    "recomputed attention": (nn.Recompute(nn.TransformerBlock(8, 2, dropout=0.3)), SEQUENCE),
}
CASES = LAYERS | MORE
FIRST, SECOND = slice(0, 3), slice(3, 8)  # samples of two micro-batches


class Pass:
    """A network, its parameters, and samples for two micro-batches."""

    def __init__(self, network: Network, seed=0, samples=8):
        rng = np.random.default_rng(seed)
        self.network, layout = network, network.layout
        w = rng.standard_normal(layout.size, network.dtype)
        w *= 0.1
        shape = samples, *network.in_shape
        self.x = rng.integers(0, 5, shape) if network.takes_ids else rng.standard_normal(shape).astype(network.dtype)
        if network.takes_ids:
            self.x[:, 0] = 1  # a sequence that is nothing but padding cannot be looked at
        self.g = np.full_like(w, np.nan)
        self.p, self.views = layout.views(w), layout.views(self.g)
        self.ctx = network.context(seed=seed)
        self.ctx.network_context.input_gradient = not network.takes_ids
        self.gy, self.listens = {}, layout.size < 10_000

    def compute(self, order: str, accumulate: bool = False):
        """Gradients, the micro-batches' input gradients and what was told to be finished, in an order such as F0 B0."""
        parts = {"0": FIRST, "1": SECOND}
        batches = {name: MicroBatch(step=3, start=part.start) for name, part in parts.items()}
        ctx, told, gx, saved = self.ctx, [], {}, {}
        if self.listens:
            ctx.network_context.on_gradients_ready = lambda end: told.append((end, self.g[:end].copy()))
        self.g[:] = 1 if accumulate else np.nan
        for kind, name in order.split():
            batch = batches[name]
            if kind == "F":
                y, saved[name] = self.network.forward(self.p, self.x[parts[name]], ctx, batch)
                if name not in self.gy:
                    self.gy[name] = np.random.default_rng(int(name)).standard_normal(y.shape).astype(y.dtype)
                del y
                continue
            batch.accumulate = accumulate  # those who come after the first
            if kind in "BW":
                accumulate = True
            if kind == "W":
                self.network.backward_weights(ctx, batch)
                continue
            back = self.network.backward if kind == "B" else self.network.backward_inputs
            found = back(self.p, self.views, self.gy[name].copy(), saved.pop(name), ctx, batch)
            gx[name] = None if found is None else found.copy()
            del found
        return self.g.copy(), gx, told


def same(a, b):
    """Bit for bit, padding between tensors (NaN or 1 from the start) included."""
    return np.array_equal(a, b, equal_nan=True)


def assert_same(found, expected):
    g, gx, told = found
    assert same(g, expected[0])
    for name, value in expected[1].items():
        assert value is gx[name] is None or same(value, gx[name])
    assert [end for end, _ in told] == [end for end, _ in expected[2]]
    for (_, prefix), (_, other) in zip(told, expected[2], strict=True):
        assert same(prefix, other), "told to be finished before it was"


def case(name, dtype=np.float64):
    layer, in_shape = CASES[name]
    return Pass(Network(layer, in_shape, dtype))


IDS = pytest.mark.parametrize("name", CASES, ids=lambda name: getattr(name, "__name__", name))


def test_every_layer_is_here():
    everything = {kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, Layer)}
    assert everything - {Layer} <= set(LAYERS)


@IDS
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("accumulate", [False, True])
def test_two_halves_are_one_backward(name, dtype, accumulate):
    given = case(name, dtype)
    expected = given.compute("F0 B0", accumulate)
    assert_same(given.compute("F0 I0 W0", accumulate), expected)


@IDS
def test_in_flight_as_one_after_another(name):
    """Any order that makes the gradients of 0 first, or those of 1 first: the same bits."""
    given = case(name)
    for first, last in ("01", "10"):
        g, gx, _ = given.compute(f"F{first} B{first} F{last} B{last}")
        for order in (
            f"F0 F1 B{first} B{last}",
            f"F1 F0 B{first} B{last}",
            f"F0 F1 I{last} I{first} W{first} W{last}",
            f"F0 I0 F1 I1 W{first} W{last}",
            f"F0 F1 I{last} B{first} W{last}",
        ):
            other, other_gx, _ = given.compute(order)
            assert same(other, g), order
            for part in gx:
                assert gx[part] is other_gx[part] is None or same(gx[part], other_gx[part]), order


LARGE = {"alexnet", "googlenet", "overfeat-fast", "resnet50", "vgg16"}  # five million parameters and more


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.exhaustive] * (spec in LARGE)) for spec in SMALL]
)
def test_models_in_two_halves(spec):
    network = build(spec, SMALL[spec], 5)
    given = Pass(network, samples=5)
    g, gx, _ = given.compute("F0 B0 F1 B1")
    other, other_gx, _ = given.compute("F1 F0 I1 I0 W0 W1")
    assert same(g, other)
    assert all(gx[part] is other_gx[part] is None or same(gx[part], other_gx[part]) for part in gx)
    for name, array in network.layout.items(g):
        assert np.isfinite(array).all(), name


def encoder(recompute: bool):
    """Padding, dropout and a tied embedding; the blocks perhaps computed again."""
    blocks = [nn.TransformerBlock(8, 2, pre_norm=False, dropout=0.3) for _ in range(2)]
    if recompute:
        blocks = [nn.Recompute(block) for block in blocks]
    return Sequential(nn.Embedding(9, 8, padding=0), *blocks, nn.TiedLinear("0.W", 8, 9))


@pytest.mark.parametrize("recompute", [False, True])
def test_padding_dropout_and_ties_in_flight(recompute):
    """Micro-batches are padded differently, and masks are their own: their sum is the gradient of the whole batch."""
    ids = np.random.default_rng(1).integers(1, 9, (8, 6))
    ids[1, 2:] = ids[4, 5:] = ids[6, 1:] = 0
    network = Network(encoder(recompute), (6,), np.float64)
    given, whole = Pass(network), Pass(Network(encoder(False), (6,), np.float64))
    given.x = whole.x = ids
    whole.ctx.micro_batch.step = 3
    y, saved = whole.network.forward(whole.p, ids, whole.ctx)
    gy = y * y
    given.gy = {"0": gy[FIRST], "1": gy[SECOND]}
    whole.network.backward(whole.p, whole.views, gy.copy(), saved, whole.ctx)
    one_after_another, _, _ = given.compute("F0 B0 F1 B1")
    real = ~np.isnan(whole.g)
    np.testing.assert_allclose(one_after_another[real], whole.g[real], rtol=1e-9, atol=1e-12)
    for order in ("F0 F1 B0 B1", "F0 F1 I1 I0 W0 W1"):
        assert same(given.compute(order)[0], one_after_another)
    other_first, _, _ = given.compute("F0 F1 B1 B0")
    np.testing.assert_allclose(other_first[real], whole.g[real], rtol=1e-9, atol=1e-12)


def test_padding_of_a_micro_batch_is_its_own():
    """Its attention computed again after the next one's forward sees its own padding, not the other's."""
    given = Pass(Network(encoder(True), (6,), np.float64))
    given.x[:3, 3:] = 0
    given.x[3:] = 1
    kept, _, _ = given.compute("F0 B0 F1 B1")
    assert same(given.compute("F0 F1 B0 B1")[0], kept)
    first, second = MicroBatch(), MicroBatch()
    given.network.forward(given.p, given.x[FIRST], given.ctx, first)
    given.network.forward(given.p, given.x[SECOND], given.ctx, second)
    assert first.padding.any() and not second.padding.any()


def test_what_a_micro_batch_is_told_changes_its_masks():
    """A control: another first sample or step draws other masks, so the tests above would notice."""
    given = Pass(Network(Sequential(nn.Linear(8, 6), nn.Dropout(0.5)), (8,), np.float64))
    masks = []
    for batch in MicroBatch(), MicroBatch(start=3), MicroBatch(step=1), MicroBatch(training=False):
        y, _ = given.network.forward(given.p, given.x, given.ctx, batch)
        masks.append((y != 0).tobytes())
    assert len(set(masks)) == 4


class TwoAlike(Group):
    """This rank, and another one with the same samples."""

    size = 2

    def sum(self, array):
        array *= 2


def test_sums_over_ranks_in_two_halves():
    """They are made at once, in the array of which the gradients have been noted before."""
    layers = Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, synchronized=True), nn.Tanh())
    given = Pass(Network(layers, (8,), np.float64))
    given.ctx.network_context.groups["data"] = TwoAlike()
    assert_same(given.compute("F0 I0 W0"), given.compute("F0 B0"))


def test_halves_in_the_wrong_order_are_refused():
    given = case(nn.Linear)
    batch = MicroBatch()
    y, saved = given.network.forward(given.p, given.x, given.ctx, batch)
    with pytest.raises(RuntimeError, match="needs a backward_inputs"):
        given.network.backward_weights(given.ctx, batch)
    given.network.backward_inputs(given.p, given.views, y, saved, given.ctx, batch)
    with pytest.raises(RuntimeError, match="has to come before"):
        given.network.backward_inputs(given.p, given.views, y, saved, given.ctx, batch)
    given.network.backward_weights(given.ctx, batch)
    assert batch.deferred is None


def test_nothing_is_made_before_its_time():
    """The first half leaves the gradients alone, and weights may change before the second, which does not read them."""
    for name in CASES:
        given = case(name)
        g, _, _ = given.compute("F0 B0")
        batch = MicroBatch(step=3)
        given.g[:] = np.nan
        _, saved = given.network.forward(given.p, given.x[FIRST], given.ctx, batch)
        given.network.backward_inputs(given.p, given.views, given.gy["0"].copy(), saved, given.ctx, batch)
        assert np.isnan(given.g).all(), name
        for part in flat(given.p):
            part[...] = np.nan
        given.network.backward_weights(given.ctx, batch)
        assert same(given.g, g), name


def flat(views):
    """All arrays of a tree of views."""
    for part in views if isinstance(views, tuple) else vars(views).values():
        if isinstance(part, np.ndarray):
            yield part
        else:
            yield from flat(part)


def test_whoever_takes_factors_gets_them_when_the_weights_are_made():
    given = case(nn.Sequential)
    expected, _, _ = given.compute("F0 B0")
    taken = []
    given.ctx.network_context.product_hooks = {"2.W": lambda x, gy: taken.append((x, gy))}
    for order in ("F0 B0", "F0 I0 W0"):
        taken.clear()
        g, _, _ = given.compute(order)
        ((x, gy),) = taken
        place = given.network.layout.slices["2.W"]
        assert np.isnan(g[place]).all()
        assert np.array_equal((x.T @ gy).reshape(-1), expected[place])


class OverwritesItsOperand(Layer):
    """Wrong: describes its gradient by memory that other layers use before the product is made."""

    def specs(self, in_shape):
        return {"W": Spec((in_shape[0], in_shape[0]), glorot)}, in_shape

    def forward(self, p, x, ctx):
        return x @ p.W, x

    def backward(self, p, gy, x, ctx):
        rows = ctx.network_context.pool.workspace("rows", gy.shape, gy.dtype)  # ctx.workspace would last
        rows[...] = gy
        return rows @ p.W.T, {"W": Product(x.T, rows)}


def test_a_workspace_that_does_not_outlive_the_call_is_noticed():
    """A control of the tests above."""
    given = Pass(Network(Sequential(OverwritesItsOperand(), OverwritesItsOperand()), (4,), np.float64))
    expected, _, _ = given.compute("F0 B0")
    assert not same(given.compute("F0 I0 W0")[0], expected)
    with pytest.raises(AssertionError, match=r"two halves makes another gradient of 1\.W: is it given a workspace"):
        gradcheck(given.network.root, given.x)
