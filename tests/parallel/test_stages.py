"""Networks cut into stages: the same names, first values, masks, gradients, and one layout put together of theirs."""

import itertools

import numpy as np
import pytest
from passes import SMALL

import nn
from nn.core.context import MicroBatch
from nn.core.layer import Sequential, ShapeError
from nn.core.layout import Layout
from nn.core.network import Network
from nn.models import build
from nn.models.googlenet import Auxiliary
from nn.optim.clipping import ClipGlobalNorm
from parallel.state.stages import stages


def language_model():
    layers = [nn.Embedding(9, 8, padding=0), nn.LearnedPositions(6, 8), nn.TransformerBlock(8, 2, dropout=0.4)]
    layers += [nn.Recompute(nn.TransformerBlock(8, 2, causal=True, dropout=0.4)), nn.LayerNorm(8)]
    return Network(Sequential(*layers, nn.TiedLinear("0.W", 8, 9)), (6,), np.float64, "language model")


def images():
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Residual(nn.Conv2d(4, 4, 1))]
    return Network(Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 5)), (6, 6, 3), np.float64)


def all_cuts(network):
    count = len(network.root.layers)
    for length in range(count):
        yield from itertools.combinations(range(1, count), length)


def in_order(layouts):
    """(name, place in the whole buffer) of all that stages own, last stage first."""
    start = 0
    for layout in reversed(layouts):
        for name, place in layout.slices.items():
            if name not in layout.borrowed:
                yield name, slice(start + place.start, start + place.stop)
        start += layout.own


@pytest.mark.parametrize("spec", SMALL)
def test_layouts_of_stages_are_the_whole_one(spec):
    network = build(spec, SMALL[spec], 5)
    count = len(network.root.layers)
    for at in ([1], [count - 1], [count // 2], range(1, count)):
        parts = stages(network, at)
        assert list(in_order([part.layout for part in parts])) == list(network.layout.slices.items())
        assert sum(part.layout.own for part in parts) == network.layout.size
        assert sum(part.layout.count for part in parts) == network.layout.count
        assert list(in_order([part.buffer_layout for part in parts])) == list(network.buffer_layout.slices.items())
        assert [part.in_shape for part in parts[1:]] == [part.out_shape for part in parts[:-1]]
        assert parts[-1].out_shape == network.out_shape


@pytest.mark.parametrize("make", [language_model, images])
def test_first_values_are_the_whole_networks(make):
    network = make()
    whole = network.layout.zeros(np.float64)
    network.layout.initialize(whole, 5)
    values = dict(network.layout.items(whole))
    for at in all_cuts(network):
        for part in stages(network, at):
            w = np.full(part.layout.size, np.nan)
            part.layout.initialize(w, 5)
            for name, array in part.layout.items(w):
                assert np.array_equal(array, values[name]), name


def forward(parts, ps, runs, x, micro_batches):
    """The output and what each stage saved; padding goes along."""
    saved, padding = [], None
    for part, p, ctx, batch in zip(parts, ps, runs, micro_batches, strict=True):
        batch.padding = padding
        x, kept = part.forward(p, x, ctx, batch)
        padding = batch.padding
        saved.append(kept)
    return x, saved


def backward(parts, ps, gs, runs, gy, saved, micro_batches):
    for part, p, g, ctx, kept, batch in reversed(list(zip(parts, ps, gs, runs, saved, micro_batches, strict=True))):
        gy = part.backward(p, g, gy, kept, ctx, batch)


@pytest.mark.parametrize("make", [language_model, images])
def test_stages_compute_what_the_whole_network_computes(make):
    """Outputs, masks and gradients bit for bit, at every cut; a borrowed tensor's gradients add up."""
    network = make()
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (4, 6)) if network.takes_ids else rng.standard_normal((4, 6, 6, 3))
    if network.takes_ids:
        x[1, 2:] = x[3, 5:] = 0
    whole, expected = network.layout.zeros(np.float64), None
    network.layout.initialize(whole, 5)
    for at in all_cuts(network):
        parts = stages(network, at)
        buffers = [part.layout.zeros(np.float64) for part in parts]
        gradients = [np.full_like(buffer, np.nan) for buffer in buffers]
        runs = [part.context(seed=7) for part in parts]
        told = [[] for _ in parts]
        for part, buffer, ctx, ends in zip(parts, buffers, runs, told, strict=True):
            part.layout.initialize(buffer, 5)
            ctx.network_context.input_gradient = part is not parts[0]
            ctx.network_context.on_gradients_ready = ends.append
        ps = [part.layout.views(buffer) for part, buffer in zip(parts, buffers, strict=True)]
        gs = [part.layout.views(buffer) for part, buffer in zip(parts, gradients, strict=True)]
        batches = [MicroBatch(step=2, start=3) for _ in parts]
        y, saved = forward(parts, ps, runs, x, batches)
        out = y.copy()
        backward(parts, ps, gs, runs, y * y, saved, batches)
        found = {}
        for part, buffer in zip(parts, gradients, strict=True):
            for name, g in part.layout.items(buffer):
                found[name] = found[name] + g if name in found else g
        for part, ends in zip(parts, told, strict=True):
            assert ends == sorted(ends) and ends[-1] == part.layout.size
        if expected is None:  # the network that is not cut comes first
            expected = out, found
        assert np.array_equal(out, expected[0])
        for name, g in found.items():
            if any(name in part.layout.borrowed for part in parts):
                np.testing.assert_allclose(g, expected[1][name], rtol=1e-12, atol=1e-12)
            else:
                assert np.array_equal(g, expected[1][name]), (at, name)


def test_a_stage_begins_where_it_is_told():
    """A control: stages that count from 0 draw other weights and masks."""
    layers = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)
    _, right = stages(Network(Sequential(*layers), (4,)), [2])
    wrong = Network(Sequential(*layers[2:]), (8,))
    results = []
    for network in right, wrong:
        w = network.layout.zeros(np.float32)
        network.layout.initialize(w, 0)
        views, ctx = network.layout.views(w), network.context()
        ones, _ = network.forward(views, np.ones((5, 8), np.float32), ctx)
        results.append((w[:64].tobytes(), (ones != 0).tobytes()))
    assert results[0][0] != results[1][0] and results[0][1] != results[1][1]
    assert list(right.layout.slices) == ["2.W", "2.b"]
    assert repr(right.root) == "Sequential(Linear(8, 8), Dropout(), first=2)"


def test_borrowed_tensors_stand_behind_and_count_once():
    network = language_model()
    first, last = stages(network, [3])
    assert last.layout.borrowed == {"0.W"} and not first.layout.borrowed
    assert last.layout.slices["0.W"] == slice(last.layout.own, last.layout.own + 72)
    assert "0" not in last.layout.shared and "0" not in first.layout.shared  # nobody in a stage adds to another's
    assert last.layout.specs["0.W"] == first.layout.specs["0.W"]
    assert last.context().end == last.layout.own
    squares = []
    for layout in (network.layout, first.layout, last.layout):
        g = np.zeros(layout.size)
        for _, array in layout.items(g):
            array[...] = 1
        ClipGlobalNorm(1e9)(g, layout.region(), lambda square: squares.append(float(square[0])))
    assert squares[0] == squares[1] + squares[2] == network.layout.count
    middle = last.layout.own + 10
    assert last.layout.region(5, middle).owned == [slice(0, last.layout.own - 5)]
    assert last.layout.region(middle, middle + 4).owned == [slice(0, 0)]


def test_two_borrowers_in_a_stage_share_one_gradient():
    layers = nn.Linear(3, 4, bias=False), nn.TiedLinear("0.W", 4, 3), nn.Linear(3, 4), nn.TiedLinear("0.W", 4, 3)
    network = Network(Sequential(*layers), (3,), np.float64)
    _, last = stages(network, [1])
    assert last.layout.shared == {"1"}, "3 is the first to write"
    assert network.layout.shared == {"0", "1"}


def test_stages_can_be_cut_again():
    network = language_model()
    _, rest = stages(network, [2])
    once, twice = stages(network, [2, 4])[1:], stages(rest, [4])
    assert [part.layout.slices for part in once] == [part.layout.slices for part in twice]


def test_cuts_that_cannot_be():
    network = language_model()
    for at, words in (
        ([0], "children 0 to 5: it can be cut before 1 to 5"),
        ([6], "before 1 to 5"),
        ([3, 2], r"in this order, given \[3, 2\]"),
        ([3, 3], "each once"),
    ):
        with pytest.raises(ValueError, match=words):
            stages(network, at)
    with pytest.raises(ValueError, match=r"only a Sequential.*Residual"):
        stages(Network(nn.Residual(nn.Linear(4, 4)), (4,)), [1])
    with pytest.raises(ValueError, match=r"before child 1: child 1 \(Embedding.* takes ids"):
        stages(Network(Sequential(nn.Reshape(6), nn.Embedding(9, 8), nn.LayerNorm(8)), (2, 3)), [1, 2])
    inside = Sequential(Auxiliary(nn.Linear(4, 3), nn.Linear(4, 3)), nn.Tanh())
    with pytest.raises(ValueError, match=r"before child 1: what comes there is \(2, 3\) in training and \(3,\)"):
        stages(Network(inside, (4,)), [1])
    for first in (-1, 1.5):
        with pytest.raises((TypeError, ValueError), match="first must be a"):
            Sequential(nn.Tanh(), first=first)
    with pytest.raises(ShapeError, match="tied"):
        Layout({"5": network.specs["5"]})  # nothing is said to be elsewhere
