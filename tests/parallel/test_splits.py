"""Tensors that are cut: parts draw what the whole draws, compute their share of it, and join to it bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
from passes import one_pass

import nn
from nn.core.layer import Sequential, ShapeError
from nn.core.layout import Layout, Views
from nn.core.network import Network
from nn.models import build
from parallel.state.splits import NetworkPart, Split, SplitSpec, cut, inside, merge, split_of
from parallel.state.stages import stages
from parallel.strategies.tensor.layers import (
    ChannelParallelConv2d,
    ColumnLinear,
    HeadParallelAttention,
    RowLinear,
    VocabularyParallelEmbedding,
)
from parallel.strategies.tensor.move_wrapper import MoveWrapper, with_children

KINDS = {
    nn.Conv2d: ChannelParallelConv2d,
    nn.Embedding: VocabularyParallelEmbedding,
    nn.Linear: lambda layer: (RowLinear if layer.in_features > layer.out_features else ColumnLinear)(layer),
    nn.MultiHeadAttention: HeadParallelAttention,
}


def split(layer):
    """The layer, or those inside, as tensor parallelism cuts them."""
    if isinstance(layer, MoveWrapper):
        return layer
    if layer.children():
        return with_children(layer, map(split, layer.children().values()))
    return KINDS.get(type(layer), lambda layer: layer)(layer)


def network(dtype=np.float64):
    """Every layer that can be cut, and some that are whole."""
    layers = [nn.Embedding(10, 8), nn.LearnedPositions(6, 8), nn.TransformerBlock(8, 4, causal=True), nn.LayerNorm(8)]
    layers += [nn.Reshape(2, 3, 8), nn.Conv2d(8, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.Reshape(6, 6)]
    layers += [RowLinear(nn.Linear(6, 8)), nn.TiedLinear("0.W", 8, 10)]
    return Network(split(Sequential(*layers)), (6,), dtype)


def values(layout, seed=3):
    buffer = np.full(layout.size, np.nan)
    layout.initialize(buffer, seed)
    return {name: array.copy() for name, array in layout.items(buffer)}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_are_drawn_whole_and_join_to_the_whole(count):
    if count == 4:  # two groups of three channels
        with pytest.raises(ShapeError, match=r"5\.W.*axis 3"):
            NetworkPart(network(), 0, 4)
        return
    whole = network()
    expected = values(whole.layout)
    parts = [NetworkPart(whole, i, count) for i in range(count)]
    found = [values(part.layout) for part in parts]
    state = {"param/" + name: array for name, array in expected.items()} | {"steps": np.array(3)}
    for i, part in enumerate(parts):
        mine = cut(part.whole_specs, state, i, count)
        assert mine.pop("steps") == 3
        assert list(mine) == ["param/" + name for name in found[i]]
        for name, array in found[i].items():
            assert np.array_equal(mine["param/" + name], array)
        assert (
            list(part.layout.slices) == list(whole.layout.slices)
            and part.layout.ends.keys() == whole.layout.ends.keys()
        )
        assert part.layout.shared == whole.layout.shared
    joined = merge(parts[0].whole_specs, found)
    for name, spec in parts[0].whole_specs.items():
        for i, mine in enumerate(found if split_of(spec) else ()):
            assert np.array_equal(inside(name, spec, expected[name], i, count).ravel(), mine[name].ravel()), name
            assert np.shares_memory(inside(name, spec, expected[name], i, count), expected[name])
    for name, array in expected.items():
        assert np.array_equal(joined[name], array), name
    if count == 2:
        shapes = {name: found[0][name].shape for name in ("0.W", "5.W", "8.W", "2.0.body.1.Wqkv", "2.0.body.1.bo")}
        assert shapes == {
            "0.W": (5, 8),
            "5.W": (3, 3, 4, 2),  # of each group of three outputs one; the other part has two
            "8.W": (3, 8),
            "2.0.body.1.Wqkv": (8, 12),
            "2.0.body.1.bo": (8,),
        }
        assert found[1]["5.W"].shape == (3, 3, 4, 4)


def run_part(layer, x, gy, w, index, count, without=()):
    """(y, gx, g) of a part of a layer, with the whole's values; entries `without` are not given to it."""
    net = Network(split(layer), x.shape[1:], np.float64)
    part = NetworkPart(net, index, count)
    values = {name: array for name, array in cut(part.whole_specs, w, index, count).items() if name not in without}
    g = {name: np.full(array.shape, np.nan) for name, array in values.items()}
    ctx = net.context()
    ctx.network_context.input_gradient = x.dtype.kind == "f"
    y, saved = layer.forward(SimpleNamespace(**values), x, ctx)
    gx = backward(layer, SimpleNamespace(**values), g, gy, saved, ctx)
    return y.copy(), gx, g, part


def backward(layer, p, g, gy, saved, ctx):
    """dLoss/dx; gradients are written to the arrays g."""
    ctx.bind(Views(**g))
    gx, gradients = layer.backward(p, gy, saved, ctx)
    ctx.write_gradients(gradients)
    return gx


def check(whole, parts, names):
    """Gradients join to the whole's."""
    joined = merge(parts[0][3].whole_specs, [{name: part[2][name] for name in names} for part in parts])
    for name in names:
        np.testing.assert_allclose(joined[name], whole.g[name], rtol=1e-12, atol=1e-12, err_msg=name)


OUTPUTS = [  # a layer whose parts have some of the outputs: (layer, shape of x, names)
    (nn.Linear(6, 7), (4, 6), ("W", "b")),
    (nn.Linear(6, 7, bias=False), (4, 3, 6), ("W",)),
    (nn.Conv2d(4, 7, 3, padding=1), (2, 5, 4, 4), ("W", "b")),
    (nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 5, 7, 4), ("W", "b")),
    (nn.Conv2d(16, 16, 3, padding=1), (2, 32, 32, 16), ("W", "b")),
    (nn.Conv2d(64, 96, 3, padding=1), (2, 16, 15, 64), ("W", "b")),
]


@pytest.mark.parametrize(("layer", "shape", "names"), OUTPUTS, ids=lambda value: repr(value) if value else "")
@pytest.mark.parametrize("count", [2, 3])
def test_parts_with_some_of_the_outputs(layer, shape, names, count):
    x = np.random.default_rng(1).standard_normal(shape)
    whole = one_pass(layer, x)
    blocks = getattr(layer, "groups", 1)
    outputs = Layout({"y": SplitSpec(whole.y.shape, nn.initializers.zeros, split=Split(whole.y.ndim - 1, blocks))})
    parts = []
    for i in range(count):
        mine = cut(outputs.specs, {"y": whole.y, "gy/y": whole.gy}, i, count)
        parts.append(run_part(layer, x, mine["gy/y"], whole.w, i, count))
        np.testing.assert_allclose(parts[-1][0], mine["y"], rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(sum(part[1] for part in parts), whole.gx, rtol=1e-10, atol=1e-10)
    joined = merge(parts[0][3].whole_specs, [part[2] for part in parts])
    for name in names:
        np.testing.assert_allclose(joined[name], whole.g[name], rtol=1e-10, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("count", [2, 3])
def test_linear_by_rows(count):
    layer = nn.Linear(7, 5)
    x = np.random.default_rng(1).standard_normal((4, 3, 7))
    whole = one_pass(layer, x)
    axis = Layout({"x": SplitSpec(x.shape, nn.initializers.zeros, split=Split(2))})
    parts = []
    for i in range(count):
        mine = cut(axis.specs, {"x": x}, i, count)["x"]
        net = NetworkPart(Network(RowLinear(layer), (7,), np.float64), i, count)
        W = cut(net.whole_specs, whole.w, i, count)["W"]
        g = {"W": np.full(W.shape, np.nan)}
        ctx = net.context()
        ctx.network_context.input_gradient = True
        y, saved = layer.forward(SimpleNamespace(W=W), mine, ctx)
        gx = backward(layer, SimpleNamespace(W=W), g, whole.gy, saved, ctx)
        parts.append((y.copy(), gx, g, net))
    np.testing.assert_allclose(sum(part[0] for part in parts) + whole.w["b"], whole.y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts], axis=2), whole.gx, rtol=1e-12, atol=1e-12)
    check(whole, parts, ["W"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_attention_by_heads(count, bias):
    """Each part has whole heads; results add up, and the bias behind them is added once."""
    layer = nn.MultiHeadAttention(8, 4, causal=True, bias=bias)
    x = np.random.default_rng(1).standard_normal((3, 5, 8))
    whole = one_pass(layer, x)
    parts = [run_part(layer, x, whole.gy, whole.w, i, count, without=["bo"]) for i in range(count)]
    y = sum(part[0] for part in parts) + (whole.w["bo"] if bias else 0)
    np.testing.assert_allclose(y, whole.y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sum(part[1] for part in parts), whole.gx, rtol=1e-12, atol=1e-12)
    check(whole, parts, ["Wqkv", "Wo", "bqkv"] if bias else ["Wqkv", "Wo"])


def test_embedding_and_tied_output_by_rows():
    """A part looks up the ids that it has; of the tied matrix it makes the outputs that it has."""
    ids = np.random.default_rng(1).integers(0, 7, (4, 5))
    whole = one_pass(nn.Embedding(7, 3), ids)
    total = np.zeros_like(whole.y)
    grads = []
    for i, (lo, hi) in enumerate([(0, 3), (3, 7)]):
        here = (ids >= lo) & (ids < hi)
        gy = whole.gy[here][:, None]
        y, _, g, part = run_part(nn.Embedding(7, 3), ids[here][:, None] - lo, gy, whole.w, i, 2)
        total[here] = y[:, 0]
        grads.append(g)
    assert np.array_equal(total, whole.y)
    np.testing.assert_allclose(merge(part.whole_specs, grads)["W"], whole.g["W"], rtol=1e-12, atol=1e-12)

    tied, x = nn.TiedLinear("0.W", 3, 7), np.random.default_rng(2).standard_normal((4, 3))
    ctx, W = Network(Sequential(nn.Embedding(7, 3), nn.Flatten()), (1,)).context(), whole.w["W"]
    ctx.network_context.input_gradient = True
    pieces = [tied.forward(SimpleNamespace(W=piece), x, ctx)[0] for piece in (W[:3], W[3:])]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), x @ W.T, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="0 to 2"):
        run_part(nn.Embedding(7, 3), np.array([[3]]), whole.gy, whole.w, 0, 2)


def test_a_part_without_its_share_is_wrong():
    """A control: contiguous columns of queries, keys and values are not heads."""
    layer = nn.MultiHeadAttention(8, 2, bias=False)
    x = np.random.default_rng(1).standard_normal((2, 4, 8))
    whole, ctx = one_pass(layer, x), Network(layer, (4, 8), np.float64).context()
    W, Wo = whole.w["Wqkv"], whole.w["Wo"]
    halves = [SimpleNamespace(Wqkv=W[:, :12], Wo=Wo[:4]), SimpleNamespace(Wqkv=W[:, 12:], Wo=Wo[4:])]
    y = sum(layer.forward(half, x, ctx)[0] for half in halves)
    assert np.abs(y - whole.y).max() > 0.01


COLUMNS, ROWS = {"W": Split(1), "b": Split(0)}, {"W": Split(0)}


def test_a_block_of_two_layers_in_parts():
    """What tensor parallelism does: columns, then rows, and one sum; the layers are the same objects."""
    layers = Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5, bias=False))
    x = np.random.default_rng(1).standard_normal((4, 5))
    whole = one_pass(layers, x)
    total, gx, gradients = 0, 0, []
    for i in range(2):
        first, between, last = layers.layers
        cut_layers = Sequential(
            MoveWrapper(first, splits={"W": Split(1), "b": Split(0)}), between, MoveWrapper(last, splits=ROWS)
        )
        part = NetworkPart(Network(cut_layers, (5,), np.float64), i, 2)
        w, g = part.layout.zeros(np.float64), np.full(part.layout.size, np.nan)
        for name, array in part.layout.items(w):
            array[...] = cut(part.whole_specs, whole.w, i, 2)[name]
        ctx = part.context()
        ctx.network_context.input_gradient = True
        y, saved = part.forward(part.layout.views(w), x, ctx)
        total, gx = total + y, gx + part.backward(part.layout.views(w), part.layout.views(g), whole.gy, saved, ctx)
        gradients.append(dict(part.layout.items(g)))
    np.testing.assert_allclose(total, whole.y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gx, whole.gx, rtol=1e-12, atol=1e-12)
    for name, g in merge(part.whole_specs, gradients).items():
        np.testing.assert_allclose(g, whole.g[name], rtol=1e-12, atol=1e-12)


def test_a_checkpoint_of_two_parts_continues_in_three_and_in_one():
    whole = Network(split(Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))), (6,), np.float64)
    rng, twice = np.random.default_rng(0), [NetworkPart(whole, i, 2) for i in range(2)]
    states = [
        {f"{kind}/{name}": rng.standard_normal(spec.shape) for kind in ("param", "optimizer/velocity") for name, spec in
         part.layout.specs.items()}
        for part in twice
    ]  # fmt: skip
    for state in states:
        for kind in ("param", "optimizer/velocity"):
            state[f"{kind}/2.b"] = states[0][f"{kind}/2.b"]  # whole on both
    saved = merge(twice[0].whole_specs, states)
    specs = NetworkPart(whole, 0, 3).whole_specs
    thrice = [cut(specs, saved, i, 3) for i in range(3)]
    again = merge(specs, thrice)
    assert list(again) == list(saved) and all(np.array_equal(again[name], saved[name]) for name in saved)
    assert saved["param/0.W"].shape == (6, 12) and thrice[0]["param/0.W"].shape == (6, 4)


def test_a_stage_can_be_cut_too():
    """Its borrowed tensor is cut as its owner's."""
    model = build("transformer:8,2,1,1", (6,), 10, np.float64)
    stage = stages(Network(split(model.root), (6,), np.float64), [2])[1]
    parts = [NetworkPart(stage, i, 2) for i in range(2)]
    assert parts[0].layout.specs["0.W"].shape == (5, 8) and parts[0].layout.borrowed == {"0.W"}
    joined = merge(parts[0].whole_specs, [values(part.layout) for part in parts])
    for name, array in values(stage.layout).items():
        assert np.array_equal(joined[name], array)


def test_what_cannot_be_cut_is_refused_by_name():
    layers = nn.MultiHeadAttention(6, 3), ColumnLinear(nn.Linear(6, 2))
    whole = Network(split(Sequential(*layers)), (4, 6))
    with pytest.raises(ShapeError, match=r"0\.Wqkv has 3 units"):
        NetworkPart(whole, 0, 2)
    with pytest.raises(ShapeError, match=r"1\.W has 2 entries on axis 1, which cannot be cut into 3 parts.*no larger"):
        NetworkPart(whole, 0, 3)
    state = {"1.W": np.zeros((6, 3)), "1.b": np.zeros(2)}
    with pytest.raises(ShapeError, match=r"1\.W: expected the whole array, of shape \(6, 2\), given \(6, 3\)"):
        cut(whole.layout.specs, state, 0, 2)
    with pytest.raises(ShapeError, match=r"1\.W: expected \(6, 1\) of part 1 of 2, given \(6, 2\)"):
        merge(whole.layout.specs, [{"1.W": np.zeros((6, 1))}, {"1.W": np.zeros((6, 2))}])
    with pytest.raises(ValueError, match="no part 2 of 2"):
        cut(whole.layout.specs, {}, 2, 2)
    for how in (Split(2), Split(-1), Split(1, blocks=4), Split(1, blocks=3, units=4), Split(0, blocks=0)):
        with pytest.raises(ShapeError, match=r"shape \(6, 6\) does not consist of what Split"):
            SplitSpec((6, 6), nn.initializers.zeros, split=how)


def test_all_parts_have_the_same_places():
    """Uneven ones too: what is whole on ranks that sum it in pieces, each over others, is cut in the same places."""
    whole = Network(split(Sequential(nn.LayerNorm(6), nn.Linear(6, 33), nn.BatchNorm1d(33))), (6,), np.float64)
    for parts in ([NetworkPart(whole, i, n).layout for i in range(n)] for n in (2, 4)):
        assert len({layout.specs["1.W"].shape for layout in parts}) == 2
        places = [[place.start for place in layout.slices.values()] for layout in parts]
        assert all(each == places[0] for each in places) and len({layout.size for layout in parts}) == 1
