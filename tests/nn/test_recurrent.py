"""Recurrent layers: a naive twin, PyTorch, truncated backpropagation, what has to be remembered is learned."""

import numpy as np
import pytest
from passes import check_contract, check_micro_batches, one_pass

import nn
from nn.analysis.gradcheck import gradcheck
from nn.layers.recurrent import TILE
from nn.models import build

KINDS = [(nn.RNN, {}), (nn.RNN, {"activation": "relu"}), (nn.LSTM, {})]


def sample(shape=(3, 7, 5), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def naive(layer, w, x):
    """One sample and step after the other, in the words of the papers."""
    y = np.zeros((*x.shape[:2], layer.features))
    for n, sequence in enumerate(x):
        h, c = (w.get(name, np.zeros(layer.features)) for name in ("h0", "c0"))
        for t, entry in enumerate(sequence):
            z = entry @ w["W"] + h @ w["U"] + w.get("b", 0)
            if isinstance(layer, nn.LSTM):
                i, f, g, o = np.split(z, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
            else:
                h = np.tanh(z) if layer.activation == "tanh" else np.maximum(z, 0)
            y[n, t] = h
    return y[:, -1] if layer.last else y


@pytest.mark.parametrize("kind, more", KINDS)
@pytest.mark.parametrize("options", [{}, {"last": True, "bias": False}, {"learn_state": True}])
def test_naive_twin_and_gradient(kind, more, options):
    layer = kind(5, 4, **more, **options)
    result = one_pass(layer, sample())
    np.testing.assert_allclose(result.y, naive(layer, result.w, sample()), rtol=1e-11, atol=1e-12)
    assert ("h0" in result.w) == ("learn_state" in options) and ("b" in result.w) == ("bias" not in options)
    assert gradcheck(layer, sample()) < 1e-6
    assert gradcheck(nn.Sequential(kind(5, 4, **more), kind(4, 3, **more, **options)), sample((2, 1, 5))) < 1e-6
    check_contract(layer, sample())
    check_micro_batches(layer, sample((5, 4, 5)))


def test_gradient_with_more_features_than_are_transposed_at_a_time():
    assert gradcheck(nn.RNN(2, TILE + 1), sample((2, 3, 2))) < 1e-6


def theirs(torch, layer, w, x, truncate=0):
    """(module, its x, its output): PyTorch's, of the same parameters; the state detached every `truncate` steps."""
    H, lstm = layer.features, isinstance(layer, nn.LSTM)
    more = {} if lstm else {"nonlinearity": layer.activation}
    module = (torch.nn.LSTM if lstm else torch.nn.RNN)(x.shape[2], H, batch_first=True, dtype=torch.float64, **more)
    with torch.no_grad():
        module.weight_ih_l0.copy_(torch.from_numpy(w["W"].T))
        module.weight_hh_l0.copy_(torch.from_numpy(w["U"].T))
        module.bias_ih_l0.copy_(torch.from_numpy(w["b"]))
        module.bias_hh_l0.zero_()
    module.first = [torch.from_numpy(w[name].copy()).requires_grad_() for name in layer.states if name in w]
    state = tuple(first.expand(1, len(x), H) for first in module.first) or None
    t = torch.from_numpy(x).requires_grad_()
    parts = []
    for part in torch.split(t, truncate or x.shape[1], dim=1):
        y, state = module(part, state if lstm or state is None or torch.is_tensor(state) else state[0])
        parts.append(y)
        state = tuple(each.detach() for each in state) if lstm else state.detach()
    y = torch.cat(parts, 1)
    return module, t, y[:, -1] if layer.last else y


@pytest.mark.parametrize("kind, more", KINDS)
@pytest.mark.parametrize("options", [{}, {"last": True}, {"learn_state": True}, {"truncate": 3}, {"truncate": 1}])
def test_pytorch(kind, more, options):
    torch = pytest.importorskip("torch")
    x, layer = sample((4, 8, 5)), kind(5, TILE + 3, **more, **options)
    ours = one_pass(layer, x)
    module, t, y = theirs(torch, layer, ours.w, x, layer.truncate)
    y.backward(torch.from_numpy(ours.gy))
    expected = {
        "W": module.weight_ih_l0.grad.T, "U": module.weight_hh_l0.grad.T, "b": module.bias_ih_l0.grad,
    } | {name: first.grad for name, first in zip(layer.states, module.first, strict=False)}  # fmt: skip
    np.testing.assert_allclose(ours.y, y.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(ours.gx, t.grad.numpy(), rtol=1e-10, atol=1e-12)
    assert ours.g.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(ours.g[name], gradient.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind, more", KINDS)
def test_truncated_gradients_stop_at_the_border(kind, more):
    """With truncate 3 no entry before step 6 has a part in what is put out last; with 0 all have."""
    x = sample((2, 8, 5))
    for truncate, first in (3, 6), (4, 4), (8, 0), (0, 0):
        result = one_pass(
            kind(5, 4, **more, truncate=truncate, last=True, bias_init=lambda _, shape: np.ones(shape)), x
        )
        reached = np.abs(result.gx).max(axis=(0, 2)) > 0
        assert reached.tolist() == [t >= first for t in range(8)], truncate


def test_several_layers_are_pytorchs(steps=3):
    """Two layers and a projection trained beside PyTorch's: the same losses."""
    torch = pytest.importorskip("torch")
    network = nn.Network(nn.Sequential(nn.LSTM(5, 6), nn.LSTM(6, 6, last=True), nn.Linear(6, 3)), (7, 5), np.float64)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.5))
    w = dict(network.layout.items(trainer.flat_parameters))
    lstm, out = torch.nn.LSTM(5, 6, 2, batch_first=True, dtype=torch.float64), torch.nn.Linear(6, 3).double()
    pairs = {out.weight: w["2.W"], out.bias: w["2.b"]}
    for k in range(2):
        pairs |= {getattr(lstm, f"weight_{a}h_l{k}"): w[f"{k}.{b}"] for a, b in (("i", "W"), ("h", "U"))}
        pairs[getattr(lstm, f"bias_ih_l{k}")] = w[f"{k}.b"]
    with torch.no_grad():
        for k in range(2):
            getattr(lstm, f"bias_hh_l{k}").zero_().requires_grad_(False)
        for parameter, array in pairs.items():
            parameter.copy_(torch.from_numpy(array.T))
    optimizer = torch.optim.SGD(list(pairs), lr=0.5)
    for step in range(steps):
        x, y = sample((9, 7, 5), step), np.arange(9) % 3
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(out(lstm(torch.from_numpy(x))[0][:, -1]), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        assert trainer.step(x, y) == pytest.approx(loss.item(), rel=1e-11)


def test_first_values():
    network = nn.Network(nn.LSTM(5, 4, learn_state=True), (3, 5), np.float64)
    buffer = network.layout.zeros(np.float64)
    network.layout.initialize(buffer, 0)
    w = dict(network.layout.items(buffer))
    np.testing.assert_array_equal(w["b"], np.repeat([0, 1, 0, 0], 4))
    np.testing.assert_allclose(w["U"] @ w["U"].T, np.eye(4), atol=1e-12)
    assert not w["h0"].any() and not w["c0"].any()


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_what_has_to_be_remembered_is_learned(kind):
    """The class is the first of six entries; without it, a control, nothing is known."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 6, 4)).astype(np.float32)
    y = x[:, 0].argmax(1)
    layers = nn.Sequential(kind(4, 24, last=True), nn.Linear(24, 4))
    trainer = nn.Trainer(nn.Network(layers, (6, 4)), nn.CrossEntropyLoss(), nn.Adam(lr=0.02))
    for step in range(100):
        part = slice(step % 4 * 64, step % 4 * 64 + 64)
        trainer.step(x[part], y[part])
    assert (trainer.predict(x).argmax(1) == y).mean() > 0.9
    x[:, 0] = 0
    assert (trainer.predict(x).argmax(1) == y).mean() < 0.6


def test_wrong_arguments_and_shapes_are_refused():
    for make, words in (
        (lambda: nn.LSTM(0, 4), "LSTM: in_features"),
        (lambda: nn.RNN(4, 4, activation="gelu"), "RNN: activation"),
        (lambda: nn.LSTM(4, 4, truncate=-1), "LSTM: truncate"),
        (lambda: build("lstm", (8, 8, 1), 10), r"lstm takes sequences of ids \(positions,\)"),
        (lambda: build("lstm:8,2000", (8,), 10), "lstm has at most 1000 layers, given 2000"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(TypeError, match="features"):
        nn.LSTM(4, "8")
    for shape in ((5,), (4, 6), (0, 5)):
        with pytest.raises(nn.ShapeError, match="steps, 5"):
            nn.Network(nn.Sequential(nn.LSTM(5, 4)), shape)


def test_forget_bias_is_not_added_to_the_callers_array():
    bias = np.zeros(8)
    for _ in range(2):
        network = nn.Network(nn.LSTM(2, 2, bias_init=lambda rng, shape: bias, forget_bias=1.0), (3, 2))
        trainer = nn.Trainer(network, nn.MSELoss(), nn.SGD(0.1))
    assert not bias.any() and trainer.network.root.forget_bias == 1
    assert trainer.p.b.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
