"""Layers that ranks compute together: outputs and gradients are one process's. The ranks are threads, any number."""

import copy

import numpy as np
import pytest
from threads import on_threads

import nn
from nn.core.layer import Layer
from nn.models.transformer import encoder, transformer
from parallel.state.splits import NetworkPart, merge
from parallel.strategies.tensor.move_wrapper import MoveWrapper
from parallel.strategies.tensor.moves import AllGather, CopyTo, Cut, Move, ReduceFrom, ReduceScatter, Scatter
from parallel.strategies.tensor.rewriting import partial_gradients, share

rng = np.random.default_rng(0)
IDS, NEXT = rng.integers(1, 13, (5, 8)), rng.integers(0, 13, (5, 8))
X, CLASSES = rng.standard_normal((6, 20)), rng.integers(0, 7, 6)
IMAGES = rng.standard_normal((6, 8, 8, 2))


def mlp():
    layers = nn.Linear(20, 17), nn.Sigmoid(), nn.Dropout(0.3), nn.Linear(17, 15), nn.Tanh(), nn.Linear(15, 7)
    return nn.Network(nn.Sequential(*layers), (20,), np.float64)


def language_model(**more):
    return transformer((8,), 13, 24, 12, 2, dropout=0.2, dtype=np.float64, **more)


def reader():
    return encoder((8,), 13, 24, 12, 1, dtype=np.float64)


def residual():
    block = nn.Residual(nn.Sequential(_convolve(6, 6), nn.BatchNorm2d(6), nn.ReLU()))
    down = nn.Residual(nn.Sequential(_convolve(6, 8, 2), nn.BatchNorm2d(8)), nn.Conv2d(6, 8, 1, stride=2))
    end = nn.MaxPool2d(2), nn.LocalResponseNorm(3), _convolve(8, 8, groups=2), nn.Flatten(), nn.Dropout(0.2)
    layers = _convolve(2, 6), nn.BatchNorm2d(6), nn.ReLU(), block, down, *end, nn.Linear(32, 9), nn.ReLU()
    return nn.Network(nn.Sequential(*layers, nn.Linear(9, 7)), (8, 8, 2), np.float64)


def _convolve(channels, filters, stride=1, groups=1):
    return nn.Conv2d(channels, filters, 3, stride, 1, groups=groups, bias=False)


class Doubled(nn.Residual):
    """No rule knows it."""

    def forward(self, p, x, ctx):
        return super().forward(p, 2 * x, ctx)

    def backward(self, p, gy, saved, ctx):
        gx, gradients = super().backward(p, gy, saved, ctx)
        return 2 * gx, gradients


def odd():
    """What no rule knows is done by all ranks alike, whatever comes; a tied matrix may lie inside."""
    tied = nn.Sequential(nn.LayerNorm(16), nn.TiedLinear("0.W", 16, 20))
    inner = nn.Parallel(nn.Linear(16, 8), Doubled(tied, nn.Linear(16, 20)))
    layers = nn.Linear(20, 16, bias=False), nn.Tanh(), inner, nn.Recompute(nn.Sequential(nn.Linear(28, 9), nn.GELU()))
    end = nn.Residual(nn.Linear(9, 7), nn.Recompute(nn.Sequential(nn.Linear(9, 7), nn.Tanh())))
    return nn.Network(nn.Sequential(*layers, nn.Softmax(), end), (20,), np.float64)


def between():
    """Blocks behind what is whole, or cut along its features, and before it."""
    block = lambda: nn.TransformerBlock(24, 12, causal=True)
    layers = nn.Embedding(13, 24), block(), nn.LSTM(24, 24), block(), nn.Linear(24, 24), block()
    return nn.Network(nn.Sequential(*layers, nn.Linear(24, 13)), (8,), np.float64)


SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.1, class_weights=1 + np.arange(13) % 3, ignore_index=2)
CASES = {
    "mlp": (mlp, nn.CrossEntropyLoss(), X, CLASSES),
    "quadratic": (mlp, nn.QuadraticLoss(), X, CLASSES),
    "transformer": (language_model, SMOOTH, IDS, NEXT),
    "tied": (lambda: language_model(tied=1), nn.CrossEntropyLoss(), IDS, NEXT),
    "encoder": (reader, nn.MaskedCrossEntropyLoss(4), IDS, np.where(NEXT % 2, NEXT, -1)),
    "between": (between, nn.CrossEntropyLoss(), IDS, NEXT),
    "residual": (residual, nn.CrossEntropyLoss(label_smoothing=0.2), IMAGES, CLASSES),
    "odd": (odd, nn.CrossEntropyLoss(), X, CLASSES),
}


def one_pass(network, loss, x, y, group=None, summed=True):
    """(outputs in evaluation, loss, gradients) of a network, or of a rank's part of it."""
    w, g = network.layout.zeros(network.dtype), np.full(network.layout.size, np.nan)
    network.layout.initialize(w, 3)
    ctx = network.context(seed=3)
    if group:
        ctx.network_context.groups["tensor"] = group
    p, views = network.layout.views(w), network.layout.views(g)
    ctx.micro_batch.training = False
    z = network.forward(p, x, ctx)[0].copy()
    ctx.micro_batch.training = True
    before = dict(group.calls) if group else {}
    out, saved = network.forward(p, x, ctx)
    value, gz = loss(out, y, len(x) * loss.rows(network.out_shape), ctx)
    network.backward(p, views, gz, saved, ctx)
    calls = {name: n - before.get(name, 0) for name, n in group.calls.items()} if group else {}
    gradients = dict(network.layout.items(g))
    for name in partial_gradients(network) if group and summed else ():
        group.sum(gradients[name])
    return z, value, gradients, calls


def compute(network, loss, x, y, ranks, way="pairs", change=lambda layer: None):
    """What the ranks compute together: their outputs and losses, and the gradients put together."""
    shared, split_loss, _ = share(network, loss, ranks, way)
    change(shared.root)
    work = lambda group: one_pass(NetworkPart(shared, group.rank, ranks), split_loss, x, y, group)
    found = on_threads(ranks, work)
    gradients = merge(NetworkPart(shared, 0, ranks).whole_specs, [each[2] for each in found])
    return [each[0] for each in found], [each[1] for each in found], gradients, found[0][3]


WITHOUT_PLACES = ("mlp", "quadratic", "residual", "odd")  # there is no sequence


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(case):
    make, loss, x, y = CASES[case]
    network = make()
    z, value, gradients, _ = one_pass(network, loss, x, y)
    for ranks in 2, 3, 4:
        for way in ("pairs", "width") if case in WITHOUT_PLACES else ("pairs", "width", "sequence"):
            outputs, values, found, _ = compute(network, loss, x, y, ranks, way)
            for other, its in zip(outputs, values, strict=True):
                np.testing.assert_allclose(other, z, rtol=1e-12, atol=1e-12)
                assert abs(its - value) < 1e-12 and np.array_equal(other, outputs[0]) and its == values[0]
            assert found.keys() == gradients.keys()
            for name, g in gradients.items():
                np.testing.assert_allclose(found[name], g, rtol=1e-11, atol=1e-12, err_msg=f"{ranks} {way} {name}")


def test_eight_ranks():
    network = transformer((9,), 13, 16, 8, 1, dtype=np.float64)
    x, y = rng.integers(0, 13, (3, 9)), rng.integers(0, 13, (3, 9))
    _, value, gradients, _ = one_pass(network, nn.CrossEntropyLoss(), x, y)
    for way in "pairs", "sequence":
        _, values, found, _ = compute(network, nn.CrossEntropyLoss(), x, y, 8, way)
        assert max(abs(each - value) for each in values) < 1e-13
        for name, g in gradients.items():
            np.testing.assert_allclose(found[name], g, rtol=1e-12, atol=1e-13, err_msg=name)


def test_the_users_network_stays_as_it_is():
    network = language_model(tied=1)
    before = network.summary(), copy.copy(network.layout.slices)
    shared = share(network, nn.CrossEntropyLoss(), 2).network
    assert (network.summary(), network.layout.slices) == before == (before[0], shared.layout.slices)
    assert [path for path, *_ in shared.layers()] == [path for path, *_ in network.layers()]
    assert share(network, SMOOTH, 1) == (network, SMOOTH, {})


class Nothing(Move):
    """A move that was forgotten."""

    output = gradient = "view"

    def forward(self, p, x, ctx):
        return x, None

    def backward(self, p, gy, saved, ctx):
        return gy, {}


def forget(kind):
    """Leave out all moves of a kind, wherever in a network."""

    def change(layer: Layer):
        for each in layer.children().values():
            change(each)
        if isinstance(layer, MoveWrapper):
            for name in ("enter", "leave"):
                if type(getattr(layer, name)) is kind:
                    vars(layer)[name] = Nothing()

    return change


@pytest.mark.parametrize("way", ["pairs", "sequence"])
@pytest.mark.parametrize("kind", [CopyTo, ReduceFrom])
def test_without_f_or_g_it_is_wrong(kind, way):
    """A control: each of them counts. Cut along places, there are others in their stead."""
    network = language_model()
    _, value, gradients, _ = one_pass(network, SMOOTH, IDS, NEXT)
    _, values, found, _ = compute(network, SMOOTH, IDS, NEXT, 2, way, forget(kind))
    right = max(np.abs(found[name] - g).max() for name, g in gradients.items()) < 1e-12
    assert right == (way == "sequence")
    if kind is CopyTo:
        assert abs(values[0] - value) < 1e-12, "f changes gradients only"


def test_gradients_of_places_are_terms():
    """A control: what each rank has of a normalisation's gradient is not all of it."""
    shared, loss, _ = share(language_model(), SMOOTH, 2, "sequence")
    names = partial_gradients(shared)
    assert names == [
        *("1.W", "3.0.body.0.gamma", "3.0.body.0.beta", "3.0.body.1.bo", "3.1.body.0.gamma", "3.1.body.0.beta"),
        *("3.1.body.3.b", "4.0.body.0.gamma", "4.0.body.0.beta", "4.0.body.1.bo", "4.1.body.0.gamma"),
        *("4.1.body.0.beta", "4.1.body.3.b", "5.gamma", "5.beta"),
    ]
    _, _, gradients, _ = one_pass(language_model(), SMOOTH, IDS, NEXT)
    work = lambda group: one_pass(NetworkPart(shared, group.rank, 2), loss, IDS, NEXT, group, summed=False)[2]
    halves = on_threads(2, work)
    for name in names:
        assert np.abs(halves[0][name] - gradients[name]).max() > 1e-6, name
        np.testing.assert_allclose(halves[0][name] + halves[1][name], gradients[name], rtol=1e-11, atol=1e-13)
    assert not partial_gradients(share(language_model(), SMOOTH, 2)[0])


def test_two_sums_forward_and_two_backward_a_block():
    """Of Shoeybi et al.; and no more where each is moved in halves."""
    calls = {}
    for way in "pairs", "sequence":
        for blocks in 1, 3:
            network = transformer((8,), 13, 24, 4, blocks, dtype=np.float64)
            calls[way, blocks] = compute(network, nn.CrossEntropyLoss(), IDS, NEXT, 2, way)[3]
    more = {name: calls["pairs", 3][name] - calls["pairs", 1][name] for name in calls["pairs", 1]}
    assert {name: n for name, n in more.items() if n} == {"sum": 8}
    # The embedding, the output layer's inputs; of the loss the largest logits, and two numbers a row.
    assert calls["pairs", 1] == {"sum": 4 + 3, "maximum": 1, "all_gather": 0}
    more = {name: calls["sequence", 3][name] - calls["sequence", 1][name] for name in calls["sequence", 1]}
    assert {name: n for name, n in more.items() if n} == {"all_gather": 8, "reduce_scatter": 8}


def test_moves_are_adjoint():
    """<move(x), y> = <x, its backward(y)>, over all ranks: what is whole counts once, of what each does the sum."""
    for cut in (Cut(1, 5), Cut(-1, 9, 3), Cut(-1, 12, 2)):
        shape = (2, 5, cut.size) if cut.axis == -1 else (2, 5, 3)
        part = lambda group, cut=cut, shape=shape: tuple(
            cut.share(group) if i == cut.axis % 3 else n for i, n in enumerate(shape)
        )
        for move, whole_in, whole_out in (
            (AllGather(cut), False, True),
            (ReduceScatter(cut), True, False),
            (Scatter(cut), True, False),
        ):

            def work(group, move=move, whole_in=whole_in, whole_out=whole_out, part=part, shape=shape):
                ctx = nn.Network(nn.ReLU(), (3,), np.float64).context()
                ctx.network_context.groups["tensor"] = group
                own = np.random.default_rng(group.rank)
                same = np.random.default_rng(9)
                draw = same if isinstance(move, Scatter) else own
                x = draw.standard_normal(shape if whole_in else part(group))
                y = own.standard_normal(shape if whole_out else part(group))
                forward = np.vdot(move.forward(None, x, ctx)[0], y)
                gx = move.backward(None, y, None, ctx)[0]
                backward = np.vdot(x, gx) / (group.size if isinstance(move, Scatter) else 1)
                return forward, backward

            forward, backward = zip(*on_threads(3, work), strict=True)
            assert sum(forward) == pytest.approx(sum(backward), rel=1e-12), move


def test_what_cannot_be_shared_is_refused():
    heads = transformer((8,), 13, 24, 6, 1)
    with pytest.raises(ValueError, match=r"layer 2\.0\.body\.1 \(MultiHead.*its 6 heads.*4 ranks.*use 1, 2, 3, 6"):
        share(heads, nn.CrossEntropyLoss(), 4)
    small = nn.Network(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2)), (8,))
    with pytest.raises(ValueError, match=r"nothing that 3 ranks could share.*use fewer ranks"):
        share(small, nn.CrossEntropyLoss(), 3)
    with pytest.raises(ValueError, match="by 'heads': expected one of pairs, width, sequence"):
        share(small, nn.CrossEntropyLoss(), 2, "heads")
    with pytest.raises(ValueError, match="nothing to be cut along the places of a sequence by 2 ranks"):
        share(small, nn.CrossEntropyLoss(), 2, "sequence")


def test_errors_are_those_of_one_process():
    """Ids and classes are told in whole numbers, whichever rank has them."""
    network = language_model()
    for x, y in ((np.minimum(IDS * 2, 13), NEXT), (IDS, np.minimum(NEXT * 2, 13))):
        messages = set()
        for ranks in 1, 2:
            with pytest.raises(ValueError, match="0 to 12") as error:
                if ranks == 1:
                    one_pass(network, nn.CrossEntropyLoss(), x, y)
                else:
                    compute(network, nn.CrossEntropyLoss(), x, y, ranks)
            messages.add(str(error.value))
        assert len(messages) == 1
