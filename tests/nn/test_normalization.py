"""Normalisation: definition, PyTorch (running statistics too), synchronisation over ranks, and its errors."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import PATIENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.context import Group
from nn.core.layer import Sequential, ShapeError
from nn.core.network import Network
from nn.initializers import zeros
from nn.layers import batch_normalization
from nn.layers.activations import Sigmoid
from nn.layers.dense import Linear
from nn.layers.normalization import BatchNorm1d, BatchNorm2d, LayerNorm, LocalResponseNorm, RMSNorm
from nn.losses import CrossEntropyLoss
from nn.optim.optimizers import SGD
from nn.training.trainer import Trainer

WITHIN = [LayerNorm(6), LayerNorm(6, bias=False), RMSNorm(6), LocalResponseNorm(4, alpha=0.5, k=2.0)]
BATCH = [(BatchNorm1d(5), (4, 5)), (BatchNorm1d(5), (4, 3, 5)), (BatchNorm2d(5), (4, 3, 7, 5))]


def sample(shape, seed=0, scale=2.0, shift=0.5):
    return shift + scale * np.random.default_rng(seed).standard_normal(shape)


def evaluation(ctx):
    """Evaluation mode, with running statistics that are not those of the start."""
    ctx.micro_batch.training = False
    ctx.buffers.mean[...] = np.linspace(-1, 1, len(ctx.buffers.mean))
    ctx.buffers.var[...] = np.linspace(0.5, 3, len(ctx.buffers.var))


@pytest.mark.parametrize("layer", WITHIN, ids=repr)
def test_within_a_sample(layer):
    x = sample((5, 3, 6))
    assert gradcheck(layer, x) < 1e-6
    check_contract(layer, x)
    check_micro_batches(Sequential(Linear(6, 6), layer, Linear(6, 2)), x)
    assert one_pass(layer, x[:0]).y.shape == (0, 3, 6)


@pytest.mark.parametrize(("layer", "shape"), BATCH, ids=str)
def test_over_the_batch(layer, shape):
    for setup in (None, evaluation):
        assert gradcheck(layer, sample(shape), setup=setup) < 1e-6
        check_contract(layer, sample(shape), setup)


def test_definition():
    """Mean 0 and variance 1 (divided by n) of every channel, then gamma and beta."""
    x = sample((6, 3, 4, 5), scale=3.0, shift=7.0)
    r = one_pass(BatchNorm2d(5, eps=0.0), x)
    normal = (r.y - r.w["beta"]) / r.w["gamma"]
    np.testing.assert_allclose(normal.mean(axis=(0, 1, 2)), 0, atol=1e-13)
    np.testing.assert_allclose(normal.var(axis=(0, 1, 2)), 1, rtol=1e-12)
    r = one_pass(LayerNorm(5, eps=0.0), x)
    normal = (r.y - r.w["beta"]) / r.w["gamma"]
    np.testing.assert_allclose(normal.mean(axis=-1), 0, atol=1e-13)
    np.testing.assert_allclose(normal.var(axis=-1), 1, rtol=1e-12)
    r = one_pass(RMSNorm(5, eps=0.0), x)
    np.testing.assert_allclose(((r.y / r.w["gamma"]) ** 2).mean(axis=-1), 1, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 6), st.integers(1, 7), st.sampled_from([0.0, 0.5, 1.0]))
def test_local_response_by_loops(channels, above, below, beta):
    size = above + below
    layer = LocalResponseNorm(size, alpha=0.3, beta=beta, k=1.5)
    x = sample((3, channels))
    y = np.empty_like(x)
    for n, c in np.ndindex(x.shape):
        window = range(max(0, c - size // 2), min(channels, c + (size - 1) // 2 + 1))
        y[n, c] = x[n, c] / (1.5 + 0.3 / size * sum(x[n, k] ** 2 for k in window)) ** beta
    np.testing.assert_allclose(one_pass(layer, x).y, y, rtol=1e-12)


def moved(torch, array):
    """Channels from the last axis to PyTorch's place."""
    return torch.tensor(np.moveaxis(array, -1, 1).copy() if array.ndim > 2 else array.copy())


@pytest.mark.parametrize(("layer", "shape"), BATCH, ids=str)
def test_pytorch_batch(layer, shape):
    """Three steps in training, then evaluation: outputs, gradients and running statistics."""
    torch = pytest.importorskip("torch")
    other = (torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d)(5).double()
    network = Network(layer, shape[1:], np.float64)
    w, g = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
    w += sample(w.shape)
    ctx = network.context()
    ctx.network_context.input_gradient = True
    p, gp = network.layout.views(w), network.layout.views(g)
    with torch.no_grad():
        other.weight[...], other.bias[...] = torch.tensor(p.gamma), torch.tensor(p.beta)
    for step in range(4):
        ctx.micro_batch.training = step < 3
        other.train(step < 3)
        x, gy = sample(shape, step, 3.0, 10.0 * step), sample(shape, 10 + step)
        y, saved = network.forward(p, x, ctx)
        gx = network.backward(p, gp, gy, saved, ctx)
        other.zero_grad()
        t = moved(torch, x).requires_grad_()
        z = other(t)
        z.backward(moved(torch, gy))
        for ours, theirs in (
            (y, z.detach()),
            (gx, t.grad),
            (gp.gamma, other.weight.grad),
            (gp.beta, other.bias.grad),
            (ctx.buffers.mean, other.running_mean),
            (ctx.buffers.var, other.running_var),
        ):
            expected = np.moveaxis(theirs.numpy(), 1, -1) if theirs.ndim > 2 else theirs.numpy()
            np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-10)


def test_pytorch_within():
    torch = pytest.importorskip("torch")
    pairs = [
        (LayerNorm(6), torch.nn.LayerNorm(6)),
        (LayerNorm(6, bias=False), torch.nn.LayerNorm(6, bias=False)),
        (RMSNorm(6), torch.nn.RMSNorm(6, eps=1e-6)),
    ]
    pairs += [
        (f(s, 0.5, 0.6, 1.5), torch.nn.LocalResponseNorm(s, 0.5, 0.6, 1.5))
        for s in (1, 2, 5, 9)
        for f in (LocalResponseNorm,)
    ]
    for layer, other in pairs:
        other = other.double()
        r = one_pass(layer, sample((4, 3, 6)))
        local = isinstance(layer, LocalResponseNorm)
        to = (lambda a: moved(torch, a)) if local else (lambda a: torch.tensor(a.copy()))
        back = (lambda t: np.moveaxis(t.detach().numpy(), 1, -1)) if local else (lambda t: t.detach().numpy())
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter[...] = torch.tensor(r.w[{"weight": "gamma", "bias": "beta"}[name]])
        t = to(sample((4, 3, 6))).requires_grad_()
        y = other(t)
        y.backward(to(r.gy))
        np.testing.assert_allclose(r.y, back(y), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(r.gx, back(t.grad), rtol=1e-10, atol=1e-10)
        for name, parameter in other.named_parameters():
            ours = r.g[{"weight": "gamma", "bias": "beta"}[name]]
            np.testing.assert_allclose(ours, parameter.grad.numpy(), rtol=1e-10, atol=1e-10)


def test_blocks_change_nothing(monkeypatch):
    x = sample((7, 3, 4, 5))
    whole = one_pass(BatchNorm2d(5), x)
    monkeypatch.setattr(batch_normalization, "BLOCK", 30)
    monkeypatch.setattr(batch_normalization, "WIDTH", 10)
    monkeypatch.setattr(batch_normalization, "LONG", 15)
    blocks = one_pass(BatchNorm2d(5), x)
    np.testing.assert_allclose(blocks.y, whole.y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(blocks.gx, whole.gx, rtol=1e-11, atol=1e-12)


def test_large_mean_in_float32(monkeypatch):
    """Variance by E[x^2] - E[x]^2 would lose everything here, and does so where that is accepted."""
    x = sample((64, 8, 8, 4), scale=1.0, shift=3000.0)
    single, double = one_pass(BatchNorm2d(4), x.astype(np.float32)), one_pass(BatchNorm2d(4), x)
    np.testing.assert_allclose(single.y, double.y, atol=2e-3)
    np.testing.assert_allclose(single.ctx.buffers.var, double.ctx.buffers.var, rtol=1e-5)
    monkeypatch.setattr(batch_normalization, "MOSTLY", np.inf)
    careless = one_pass(BatchNorm2d(4), x.astype(np.float32))
    assert np.abs(careless.ctx.buffers.var / double.ctx.buffers.var - 1).max() > 1e-4


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.9, 3.1, 30.0])
def test_variance_in_float32(shift):
    """As good on both sides of where sums are taken about the mean: a mean of three standard deviations."""
    x = sample((64, 8, 8, 4), scale=1.0, shift=shift)
    single, double = one_pass(BatchNorm2d(4), x.astype(np.float32)), one_pass(BatchNorm2d(4), x)
    np.testing.assert_allclose(single.ctx.buffers.var, double.ctx.buffers.var, rtol=2e-6)
    np.testing.assert_allclose(single.gx, double.gx, atol=1e-5 * (1 + shift))


def test_one_channel_with_a_large_mean_is_enough():
    """Sums are taken about the mean as soon as any channel needs it."""
    x = sample((64, 8, 8, 4), scale=1.0, shift=[0.0, 0.0, 3000.0, 0.0])
    single, double = one_pass(BatchNorm2d(4), x.astype(np.float32)), one_pass(BatchNorm2d(4), x)
    np.testing.assert_allclose(single.ctx.buffers.var, double.ctx.buffers.var, rtol=1e-5)


class Ranks:
    """As many threads as there are ranks, with a sum over all of them."""

    def __init__(self, count):
        self.count, self.barrier, self.parts = count, threading.Barrier(count, timeout=PATIENCE), {}

    def group(self, rank):
        def total(array):
            self.parts[rank] = array.copy()
            self.barrier.wait()
            total = sum(self.parts[r] for r in range(self.count))
            self.barrier.wait()
            array[...] = total

        group = Group()
        group.size, group.rank, group.sum = self.count, rank, total
        return group

    def run(self, work):
        with ThreadPoolExecutor(self.count) as pool:
            return [future.result() for future in [pool.submit(work, rank) for rank in range(self.count)]]


CUTS = [slice(0, 4), slice(4, 5), slice(5, 5), slice(5, 7)]


def on_ranks(layer, x, whole):
    """One pass on four ranks with 4, 1, 0 and 2 samples, with the same parameters and upstream gradient."""
    ranks = Ranks(len(CUTS))

    def work(rank):
        def setup(ctx):
            ctx.network_context.groups["data"] = ranks.group(rank)

        return one_pass(layer, x[CUTS[rank]], setup=setup, gy=whole.gy[CUTS[rank]], w=whole.w)

    return ranks.run(work)


@pytest.mark.parametrize("shape", [(7, 5), (7, 3, 2, 5)], ids=str)
def test_synchronised_over_uneven_ranks_is_one_process(shape):
    """With 4, 1, 0 and 2 samples: outputs, input gradients, sums of gradients and running statistics."""
    kind = BatchNorm1d if len(shape) == 2 else BatchNorm2d
    x = sample(shape, scale=2.0, shift=5.0)
    whole = one_pass(kind(5), x)
    parts = on_ranks(kind(5, synchronized=True), x, whole)
    np.testing.assert_allclose(np.concatenate([r.y for r in parts]), whole.y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([r.gx for r in parts]), whole.gx, rtol=1e-11, atol=1e-12)
    for name in ("gamma", "beta"):
        np.testing.assert_allclose(sum(r.g[name] for r in parts), whole.g[name], rtol=1e-11, atol=1e-12)
    for r in parts:
        np.testing.assert_allclose(r.ctx.buffers.mean, whole.ctx.buffers.mean, rtol=1e-12)
        np.testing.assert_allclose(r.ctx.buffers.var, whole.ctx.buffers.var, rtol=1e-12)


def test_more_micro_batches_than_samples_leave_some_empty():
    """As of the last batch of an epoch: they count for nothing, though ranks would have met for them."""
    found = set()
    for parts in 2, 5:
        layers = Sequential(Linear(4, 3), BatchNorm1d(3, synchronized=True))
        trainer = Trainer(Network(layers, (6, 4), np.float64), CrossEntropyLoss(), SGD(0.1), seed=1)
        loss = trainer.step(sample((2, 6, 4)), np.array([[0, 1, 1, 2, 0, 1]] * 2), accumulate=parts)
        found.add((loss, trainer.digest()))
    assert len(found) == 1


def test_without_synchronisation_results_differ():
    """A rank's own statistics are not the batch's; and a rank without samples leaves its own alone."""
    x = sample((7, 3, 2, 5))
    whole = one_pass(BatchNorm2d(5), x)
    parts = on_ranks(BatchNorm2d(5), x, whole)
    assert np.abs(np.concatenate([r.y for r in parts]) - whole.y).max() > 0.01
    assert parts[2].y.shape == (0, 3, 2, 5)
    assert not parts[2].g["gamma"].any() and not parts[2].ctx.buffers.mean.any()
    for cut, part in [(cut, part) for cut, part in zip(CUTS, parts, strict=True) if cut.start < cut.stop]:
        alone = one_pass(BatchNorm2d(5), x[cut], gy=whole.gy[cut], w=whole.w)
        np.testing.assert_array_equal(part.gx, alone.gx)


def test_evaluation_asks_nothing_of_other_ranks():
    """One rank may evaluate alone: neither pass waits for the others, and both use the running statistics."""

    def alone(ctx):
        evaluation(ctx)
        group = ctx.network_context.groups["data"] = Group()
        group.size, group.sum = 2, lambda array: pytest.fail("the other ranks do not evaluate")

    x = sample((4, 3, 2, 5))
    ours, plain = (
        one_pass(BatchNorm2d(5, synchronized=True), x, setup=alone),
        one_pass(BatchNorm2d(5), x, setup=evaluation),
    )
    np.testing.assert_array_equal(ours.y, plain.y)
    np.testing.assert_array_equal(ours.gx, plain.gx)


def test_backward_of_an_older_pass():
    """Two batches in flight: each backward uses its own batch's statistics."""
    layer = Sequential(Linear(3, 5), BatchNorm1d(5), Sigmoid(), Linear(5, 2))
    x = sample((9, 3))
    cuts = slice(0, 4), slice(4, 9)
    apart = [one_pass(layer, x[cut]) for cut in cuts]
    network, ctx = apart[0].network, apart[0].network.context()
    ctx.network_context.input_gradient = True
    w, g = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
    for name, array in network.layout.items(w):
        array[...] = apart[0].w[name]
    p, gp = network.layout.views(w), network.layout.views(g)
    saved = [network.forward(p, x[cut], ctx)[1] for cut in cuts]
    for i in (0, 1):
        ctx.micro_batch.accumulate = i == 1
        gx = network.backward(p, gp, apart[i].gy, saved[i], ctx)
        np.testing.assert_allclose(gx, apart[i].gx, rtol=1e-10, atol=1e-12)
    for name, array in network.layout.items(g):
        np.testing.assert_allclose(array, apart[0].g[name] + apart[1].g[name], rtol=1e-10, atol=1e-12)


def test_specs():
    specs, out = BatchNorm2d(5, init=zeros).specs((3, 4, 5))
    assert out == (3, 4, 5) and set(specs) == {"gamma", "beta", "mean", "var"}
    assert specs["mean"].buffer and specs["var"].buffer
    assert not any(spec.decay for name, spec in specs.items() if not spec.buffer)
    assert not specs["gamma"].init(np.random.default_rng(0), (5,)).any()
    for layer in WITHIN[:3]:
        assert not any(spec.decay for spec in layer.specs((6,))[0].values())


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (BatchNorm2d(4), (3, 3, 5), r"layer 0 \(BatchNorm2d\(4\)\): expects images .* 4 .* \(3, 3, 5\)"),
        (BatchNorm2d(4), (4,), "expects images"),
        (BatchNorm1d(4), (2, 2, 4), "expects features"),
        (LayerNorm(4), (3, 5), r"layer 0 \(LayerNorm\(4\)\): expects 4 features"),
        (RMSNorm(4), (5,), "expects 4 features"),
        (LocalResponseNorm(5), (), "expects channels"),
    ],
)
def test_wrong_shapes_name_the_layer(layer, shape, words):
    with pytest.raises(ShapeError, match=words):
        Network(Sequential(layer), shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchNorm2d(0),
        lambda: BatchNorm2d(3, momentum=1.5),
        lambda: BatchNorm1d(3, eps=-1.0),
        lambda: LayerNorm(0),
        lambda: RMSNorm(3, eps=-1.0),
        lambda: LocalResponseNorm(0),
        lambda: LocalResponseNorm(5, k=0.0),
    ],
)
def test_impossible_layers(make):
    with pytest.raises(ValueError, match="given"):
        make()


def test_one_value_a_channel_in_training_is_refused():
    layer = Sequential(Linear(3, 4), BatchNorm1d(4))
    words = r"layer 1 \(BatchNorm1d\(4\)\): 1 values for each channel"
    with pytest.raises(ValueError, match=words):
        one_pass(layer, sample((1, 3)))

    def setup(ctx):
        ctx.micro_batch.training = False

    assert one_pass(layer, sample((1, 3)), setup=setup).y.shape == (1, 4)
    assert one_pass(BatchNorm2d(4), sample((1, 2, 1, 4))).y.shape == (1, 2, 1, 4)
