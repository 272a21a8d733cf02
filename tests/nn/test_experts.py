"""Mixture of experts: a loop over experts, golden numbers, gradients, auxiliary losses, capacity, balancing."""

import numpy as np
import pytest
from passes import check_contract, check_micro_batches, one_pass

import nn
from nn.analysis import pictures
from nn.analysis.gradcheck import gradcheck
from nn.layers.experts import EachExpert

MODEL = "transformer:16,2,1,experts=4,top=2,auxiliary=0.1"


def sample(shape=(3, 7, 6), seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_loop(w, x, top, room=None):
    """One sample, position and choice after the other: y of relu experts with a softmax gate."""
    y, E = np.zeros_like(x), w["router"].shape[1]
    for n in range(len(x)):
        prob = softmax(x[n] @ w["router"])
        choices = np.argsort(-prob, axis=1, kind="stable")[:, :top]
        taken = np.zeros(E, int)
        for j in range(top):
            for t in range(x.shape[1]):
                e = choices[t, j]
                taken[e] += 1
                if room is not None and taken[e] > room:
                    continue
                weight = prob[t, e] / (prob[t, choices[t]].sum() if top > 1 else 1)
                y[n, t] += weight * np.maximum(x[n, t] @ w["A"][e], 0) @ w["B"][e]
    return y


def test_golden_numbers():
    n, E, D, F = 8, 4, 3, 4
    x, gy = np.sin(np.arange(n * D)).reshape(1, n, D), np.cos(1.3 * np.arange(n * D)).reshape(1, n, D)
    w = {"router": np.cos(np.arange(D * E)).reshape(D, E), "A": np.sin(0.5 * np.arange(E * D * F)).reshape(E, D, F)}
    w["B"] = np.cos(0.7 * np.arange(E * F * D)).reshape(E, F, D)
    found = one_pass(nn.MixtureOfExperts(D, E, 2, F, activation="relu"), x, gy=gy, w=w)
    squares = [(a**2).sum() for a in (found.y, found.gx, found.g["router"], found.g["A"], found.g["B"])]
    np.testing.assert_allclose(
        squares, [1.638003282034, 3.410438276680, 0.437039173284, 5.874834417639, 1.351441435114], rtol=1e-11
    )


@pytest.mark.parametrize("top", [1, 2, 3])
@pytest.mark.parametrize("capacity", [0, 0.6, 1.0, 3.0])
def test_a_loop_over_positions(top, capacity):
    layer = nn.MixtureOfExperts(6, 4, top, 5, activation="relu", capacity=capacity)
    found = one_pass(layer, sample())
    room = int(np.ceil(capacity * top * 7 / 4)) if capacity else None
    expected = by_loop(found.w, sample(), top, room)
    np.testing.assert_allclose(found.y, expected, rtol=1e-11, atol=1e-12)
    if capacity == 0.6:
        assert abs(expected - by_loop(found.w, sample(), top)).max() > 1e-3, "nothing was dropped"


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top", [1, 2, 4])
@pytest.mark.parametrize("capacity", [0, 0.7])
def test_gradient_and_contract(gate, top, capacity):
    layer = nn.MixtureOfExperts(6, 4, top, 5, gate=gate, capacity=capacity, auxiliary=0)
    assert gradcheck(layer, sample()) < 1e-6
    if not capacity:
        assert gradcheck(layer, sample((5, 6))) < 1e-6
    check_contract(layer, sample())
    check_micro_batches(layer, sample((5, 7, 6)))


def test_noise_is_what_the_router_is_given_in_training():
    """Its gradient, the experts' own x, evaluation, and samples that are computed in parts."""
    layer = nn.MixtureOfExperts(6, 4, 2, 5, auxiliary=0, noise=0.3)
    assert gradcheck(layer, sample()) < 1e-6
    check_micro_batches(layer, sample((5, 7, 6)))
    x = sample()
    plain = one_pass(nn.MixtureOfExperts(6, 4, 2, 5, auxiliary=0), x)
    noisy = one_pass(layer, x, gy=plain.gy, w=plain.w)
    assert abs(noisy.y - plain.y).max() > 1e-3
    ctx = noisy.ctx
    ctx.micro_batch.training = False
    assert layer.draw_noise(x.shape, ctx) is None
    ctx.micro_batch.training = True
    factors = layer.draw_noise((40, 9, 6), ctx)
    assert 0.7 <= factors.min() < 0.71 and 1.29 < factors.max() <= 1.3


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_activations(activation):
    assert gradcheck(nn.MixtureOfExperts(6, 3, 2, 5, activation=activation, auxiliary=0), sample()) < 1e-6


def losses(prob, chosen, z, top):
    """The auxiliary loss and the z-loss of one sample."""
    f = np.bincount(chosen.ravel(), minlength=prob.shape[1]) / chosen.size
    lse = np.log(np.exp(z).sum(1))
    return prob.shape[1] * f @ prob.mean(0), (lse**2).mean()


def test_golden_auxiliary_losses():
    prob = np.array([[0.5, 0.3, 0.2, 0], [0.1, 0.6, 0.2, 0.1], [0.4, 0.1, 0.4, 0.1], [0.25] * 4])
    chosen = np.argsort(-prob, axis=1, kind="stable")[:, :2]
    assert chosen.tolist() == [[0, 1], [1, 2], [0, 2], [0, 1]]
    assert 0.01 * losses(prob, chosen, prob, 2)[0] == pytest.approx(0.012)
    halves = [0.01 * losses(prob[rows], chosen[rows], prob, 2)[0] for rows in (slice(0, 2), slice(2, 4))]
    assert np.mean(halves) == pytest.approx(0.01275), "a mean of halves is another loss: so it is of one sample"
    assert losses(prob, chosen, np.array([[1.0, 2, 3], [0, 0, 0]]), 2)[1] == pytest.approx(6.409363684864748)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_the_gradients_of_the_auxiliary_losses_are_differences(gate):
    """The layer adds, to what gy brings, the gradient of the mean over samples of both losses."""
    x, alpha, beta = sample(), 0.3, 0.2
    plain = one_pass(nn.MixtureOfExperts(6, 4, 2, 5, gate=gate, auxiliary=0), x)
    layer = nn.MixtureOfExperts(6, 4, 2, 5, gate=gate, auxiliary=alpha, z_loss=beta)
    both = one_pass(layer, x, gy=plain.gy, w=plain.w)

    def extra(router):
        total = 0.0
        for rows in x:
            z = rows @ router
            score = softmax(z) if gate == "softmax" else 1 / (1 + np.exp(-z))
            one = losses(score / score.sum(1, keepdims=True), np.argsort(-score, axis=1, kind="stable")[:, :2], z, 2)
            total += (alpha * one[0] + beta * one[1]) / len(x)
        return total

    found, step = both.g["router"] - plain.g["router"], 1e-6
    for place in [(0, 0), (3, 1), (5, 3)]:
        up, down = (plain.w["router"].copy() for _ in range(2))
        up[place] += step
        down[place] -= step
        assert found[place] == pytest.approx((extra(up) - extra(down)) / (2 * step), rel=1e-6, abs=1e-9)
    assert np.array_equal(both.y, plain.y)


def test_auxiliary_losses_do_not_depend_on_micro_batches():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 10, (7, 8)), rng.integers(0, 10, (7, 8))
    found = []
    for parts in (1, 3):
        network = nn.models.build(MODEL, (8,), 10, np.float64)
        trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.5))
        for _ in range(3):
            trainer.step(x, y, accumulate=parts)
        found.append(trainer.flat_parameters.copy())
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-13)
    without = nn.Trainer(nn.models.build(MODEL.replace("=0.1", "=0"), (8,), 10, np.float64), trainer.loss, nn.SGD(0.5))
    for _ in range(3):
        without.step(x, y)
    assert abs(without.flat_parameters - found[0]).max() > 1e-6, "the auxiliary loss changes nothing"


def test_ties_go_to_the_first_experts():
    layer = nn.MixtureOfExperts(3, 4, 2, 4)
    w = {"router": np.zeros((3, 4)), "A": sample((4, 3, 4)), "B": sample((4, 4, 3))}
    found = one_pass(layer, sample((1, 8, 3)), w=w)
    routing = layer.route(np.zeros((8, 4)), 8, found.ctx)
    assert routing.counts.tolist() == [8, 8, 0, 0] and (routing.chosen == [0, 1]).all()


def test_a_sigmoid_gate_chooses_by_score_and_bias_and_weighs_by_score():
    layer = nn.MixtureOfExperts(3, 4, 2, 4, gate="sigmoid", auxiliary=0)
    ctx = one_pass(layer, sample((1, 8, 3))).ctx
    ctx.buffers.bias[...] = [-0.5, 0.1, 0, 0.9]
    ctx.micro_batch.training = False
    routing = layer.route(np.array([[2.0, 0, 1, -1]]), 1, ctx)
    assert routing.chosen.tolist() == [[3, 2]]
    np.testing.assert_allclose(routing.weights, [[0.26894142, 0.73105858]], atol=1e-8)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_bias_evens_the_load(parts):
    rng = np.random.default_rng(0)
    network = nn.Network(nn.MixtureOfExperts(6, 4, 1, 5, gate="sigmoid", auxiliary=0, bias_rate=0.002), (9, 6))
    trainer = nn.Trainer(network, nn.MSELoss(), nn.SGD(0.0))
    x = (rng.standard_normal((16, 9, 6)) + 3).astype(np.float32)  # nearly all positions like the same experts
    loads, biases = [], []
    for _ in range(80):
        trainer.step(x, np.zeros_like(x), accumulate=parts)
        state = dict(network.buffer_layout.items(trainer.buffers))
        loads.append(state["load"].copy())
        biases.append(state["bias"].copy())
    assert np.ptp(loads[0]) > 2 * np.ptp(loads[-1]) and (np.asarray(loads).sum(1) == 16 * 9).all()
    assert not biases[0].any() and abs(abs(biases[1] - biases[0]).max() - 0.002) < 1e-6, "once a step"


def test_an_expert_without_positions_has_no_gradient():
    layer = nn.MixtureOfExperts(3, 4, 1, 4)
    w = {"router": np.zeros((3, 4)), "A": sample((4, 3, 4)), "B": sample((4, 4, 3))}
    found = one_pass(layer, sample((2, 5, 3)), w=w)
    assert found.g["A"][0].any() and not found.g["A"][1:].any() and not found.g["B"][1:].any()


def test_first_values_of_each_expert_are_those_of_one():
    draw = EachExpert(nn.initializers.glorot)
    values = draw(np.random.default_rng(0), (3, 40, 60))
    assert abs(values).max() <= np.sqrt(6 / 100) and np.ptp(values.std(axis=(1, 2))) < 0.02


def test_mixed_precision_keeps_the_router_exact():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 10, (8, 8)), rng.integers(0, 10, (8, 8))
    losses = []
    for mixed in (False, True):
        network = nn.models.build(MODEL, (8,), 10)
        network = nn.Network(network.root, (8,), mixed=mixed)
        trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.Adam(0.01))
        losses.append([trainer.step(x, y) for _ in range(8)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)
    assert losses[0][-1] < losses[0][0]


def test_model_with_a_shared_expert():
    options = "experts=4,top=1,shared=1,gate=sigmoid,auxiliary=0,z_loss=0.001"
    network = nn.models.build(f"transformer:16,2,1,{options}", (8,), 10)
    mixture = "MixtureOfExperts(16, 4, top=1, gate='sigmoid', auxiliary=0.0, z_loss=0.001)"
    assert f"Residual({mixture}, shortcut=Sequential(Linear(16, 64)" in repr(network.root)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top": 5}, "top must be 1 to 4"),
        ({"top": 0}, "top"),
        ({"gate": "hard"}, "gate"),
        ({"activation": "tanh"}, "activation"),
        ({"capacity": -1.0}, "capacity"),
        ({"hidden": -1}, "hidden"),
        ({"noise": 1.0}, "noise"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nn.MixtureOfExperts(6, 4, **options)


def test_other_samples_are_refused():
    with pytest.raises(nn.ShapeError, match=r"room for 0.88 of .* 7 positions: it needs at least 0.572 for one"):
        nn.Network(nn.MixtureOfExperts(6, 4, top=1, capacity=0.5), (7, 6))
    with pytest.raises(nn.ShapeError, match=r"expects samples \(positions, 6\)"):
        nn.Network(nn.MixtureOfExperts(6, 4), (3, 5))


def fitted(model, epochs=2):
    """The records of a run of 3 steps an epoch, of 4 samples with 6 positions."""
    x = np.random.default_rng(0).integers(0, 9, (12, 6))
    data = nn.data.Dataset(x, x, classes=9)
    trainer = nn.Trainer(nn.models.build(model, (6,), 9), nn.CrossEntropyLoss(), nn.SGD(0.1), 1)
    return nn.fit(trainer, nn.Loader(data, 4), epochs, [nn.callbacks.ExpertLoad()], accumulate=2).history


def test_the_load_of_experts_is_in_the_records_and_in_a_picture():
    history = fitted("transformer:8,2,2,experts=4,top=2,capacity=0.7")
    for epoch, record in enumerate(history):
        assert list(record["experts"]) == ["2.1.body.1", "3.1.body.1"]
        for layer in record["experts"].values():
            assert layer["step"] == [3 * epoch + 1, 3 * epoch + 2, 3 * epoch + 3]
            np.testing.assert_allclose(np.sum(layer["load"], axis=1), 4, atol=0.01)
            assert all(0 < share < 1 for share in layer["dropped"])  # 4 experts with room for 3 of 12 choices
    figure = pictures.expert_load(history)
    assert len([ax for ax in figure.axes if ax.get_title(loc="left").startswith("layer")]) == 2


def test_a_network_without_experts_has_no_load():
    history = fitted("transformer:8,2,1")
    assert all("experts" not in record for record in history)
    with pytest.raises(ValueError, match='no record has "experts"'):
        pictures.expert_load(history)


def test_spans_of_a_long_epoch(monkeypatch):
    monkeypatch.setattr(nn.callbacks.ExpertLoad, "SPANS", 2)
    (record,) = fitted("transformer:8,2,1,experts=4", 1)
    layer = record["experts"]["2.1.body.1"]
    assert layer["step"] == [2, 3] and layer["dropped"] == [0, 0]
