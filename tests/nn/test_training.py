"""The one loop: what a trainer does in a step, what fit does with it, exact resume, early stopping."""

import json

import numpy as np
import pytest

import nn
from nn.callbacks import best_epoch


def data(n=50, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 6))
    return nn.data.Dataset(x, (x[:, 0] + x[:, 1] > 0).astype(int), classes=2, dtype=dtype)


def trainer(seed=0, lr=0.3, momentum=0.9, dtype=np.float64):
    network = nn.Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), (6,), dtype)
    return nn.Serial(network, nn.CrossEntropyLoss(), nn.SGD(lr, momentum), seed)


def loader(batch=8, **options):
    return nn.Loader(data(), batch, seed=4, dtype=np.float64, **options)


def test_a_step_is_backprop_by_hand():
    """Sigmoid layers and quadratic cost: the four equations, written out."""
    network = nn.Network(nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 2), nn.Sigmoid()), (6,), np.float64)
    t = nn.Serial(network, nn.QuadraticLoss(), nn.SGD(3.0))
    x, y = data().x[:7], data().y[:7]
    w1, b1, w2, b2 = (t.p[i].__dict__[k].copy() for i in (0, 2) for k in "Wb")
    a1 = 1 / (1 + np.exp(-(x @ w1 + b1)))
    a2 = 1 / (1 + np.exp(-(a1 @ w2 + b2)))
    d2 = (a2 - np.eye(2)[y]) * a2 * (1 - a2)
    d1 = d2 @ w2.T * a1 * (1 - a1)
    loss = t.step(x, y)
    assert loss == pytest.approx(0.5 * np.square(a2 - np.eye(2)[y]).sum() / 7, rel=1e-12)
    for got, want in (
        (t.p[0].W, w1 - 3 * x.T @ d1 / 7),
        (t.p[0].b, b1 - 3 * d1.sum(0) / 7),
        (t.p[2].W, w2 - 3 * a1.T @ d2 / 7),
        (t.p[2].b, b2 - 3 * d2.sum(0) / 7),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)


def test_batch_stochastic_and_mini_batch_descent_are_one_loop():
    for batch, steps in ((50, 1), (1, 50), (8, 7)):
        t = trainer(lr=0.1, momentum=0.0)
        training = nn.fit(t, loader(batch), epochs=1)
        assert t.steps == steps and training.history[0]["loss"] > 0


def test_micro_batches_sum_to_the_batch():
    whole, parts = trainer(), trainer()
    x, y = data().x[:10], data().y[:10]
    loss = whole.compute_gradients(x, y, 10)
    sums, losses = np.zeros_like(parts.gradients), 0.0
    for part in (slice(0, 3), slice(3, 4), slice(4, 10)):
        losses += parts.compute_gradients(x[part], y[part], 10)
        sums += parts.gradients
    np.testing.assert_allclose(sums, whole.gradients, rtol=1e-12, atol=1e-15)
    assert losses == pytest.approx(loss, rel=1e-12)


def test_a_batch_that_fails_leaves_nothing_to_the_next():
    whole, failed = trainer(), trainer()
    x, y = data().x[:10], data().y[:10]
    for part, total, method in ((x[4:, :5], 10, "step"), (x[4:, :5], 10, "accumulate"), (x[4:], 3, "step")):
        failed.accumulate(-x[:4], y[:4], 10)
        with pytest.raises(ValueError):
            getattr(failed, method)(part, y[4:], total)
    assert failed.step(x, y) == whole.step(x, y) and (failed.parameters == whole.parameters).all()


def test_learns():
    t = trainer()
    training = nn.fit(t, loader(), 20, test=loader(shuffle=False))
    assert training.history[-1]["accuracy"] >= 0.98
    assert training.history[-1]["loss"] < training.history[0]["loss"]


@pytest.mark.parametrize("stop", [1, 2, 6, 9])  # in steps: inside the first epoch, and in later ones
def test_resume_is_bit_identical(tmp_path, stop):
    class Interrupt(nn.Callback):
        def on_step(self, training, loss):
            if training.trainer.steps == stop:
                raise KeyboardInterrupt

    whole = trainer()
    kept = nn.Checkpoints(tmp_path / "whole")
    reference = nn.fit(whole, loader(), 3, [nn.KeepCheckpoints(kept, steps=1)], loader(shuffle=False))

    kept = nn.Checkpoints(tmp_path / "cut")
    callbacks = [nn.KeepCheckpoints(kept, steps=1), nn.Metrics(tmp_path / "metrics.jsonl"), Interrupt()]
    with pytest.raises(KeyboardInterrupt):
        nn.fit(trainer(), loader(), 3, callbacks, loader(shuffle=False))
    again = trainer(seed=99)
    state, progress, _ = kept.load()
    again.load_state(state)
    assert again.steps == stop
    resumed = nn.fit(again, loader(), 3, callbacks[:2], loader(shuffle=False), progress=progress)
    assert (again.parameters == whole.parameters).all()
    assert [r["loss"] for r in resumed.history] == [r["loss"] for r in reference.history]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]


def test_load_state_refuses_by_name():
    t = trainer()
    state = {k: v.copy() for k, v in t.state().items()}
    with pytest.raises(ValueError, match=r"lacks param/0\.W"):
        t.load_state({k: v for k, v in state.items() if k != "param/0.W"})
    with pytest.raises(ValueError, match=r"has param/9\.W, unknown here"):
        t.load_state(state | {"param/9.W": np.zeros(1)})
    with pytest.raises(ValueError, match=r"param/0\.W: expected float64\(6, 8\), given float64\(8, 6\)"):
        t.load_state(state | {"param/0.W": np.zeros((8, 6))})
    with pytest.raises(ValueError, match=r"given float32"):
        t.load_state(state | {"param/0.b": np.zeros(8, np.float32)})
    assert all((t.state()[k] == v).all() for k, v in state.items()), "a refused state must change nothing"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_names_step_and_layer_and_leaves_parameters():
    t = trainer()
    x, y = data().x[:4].copy(), data().y[:4]
    t.step(x, y)
    before = t.parameters.copy()
    t.p[2].W[0, 0] = np.inf
    with pytest.raises(nn.NonFiniteLoss, match=r"step 1: the loss is nan.*parameter 2\.W"):
        t.step(x, y)
    t.parameters[:] = before
    x[1, 2] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match=r"the input \(samples \[1\]"):
        t.step(x, y)
    assert (t.parameters == before).all()
    t.p[0].W[:], t.p[2].W[:] = 1, 1e308
    with pytest.raises(nn.NonFiniteLoss, match=r"the output of layer 2 \(Linear\(8, 2\)\)"):
        t.step(np.ones((4, 6)), y)


def test_wrong_shape_and_dtype_are_refused():
    t = trainer()
    with pytest.raises(nn.ShapeError, match=r"expects batches of shape \(N, 6\), given \(4, 5\)"):
        t.step(np.zeros((4, 5)), np.zeros(4, int))
    with pytest.raises(TypeError, match="computes in float64, given float32"):
        t.step(np.zeros((4, 6), np.float32), np.zeros(4, int))


def test_an_empty_batch_is_refused_before_anything_moves():
    t = trainer()
    t.step(*data(4).batch())
    before = t.parameters.copy()
    empty = np.zeros((0, 6)), np.zeros(0, int)
    with pytest.raises(ValueError, match=r"step 1 of network: a shard of 0 samples in a batch of 0; .*at least one"):
        t.step(*empty)
    with pytest.raises(ValueError, match="a shard of 4 samples in a batch of 3"):
        t.step(*data(4).batch(), 3)
    assert t.steps == 1 and (t.parameters == before).all()
    assert t.step(*empty, 5) == 0 and t.steps == 2  # a shard may be empty


def test_early_stopping_keeps_the_best(tmp_path):
    class Scores(nn.Callback):
        """Accuracies as if measured; weights are marked with the epoch."""

        def on_epoch(self, training, record):
            record["accuracy"] = [0.5, 0.9, 0.8, 0.7, 0.95][training.epoch - 1]
            training.trainer.parameters[:] = training.epoch

    t = trainer()
    kept = nn.Checkpoints(tmp_path)
    stop = nn.EarlyStopping(2, checkpoints=kept)
    training = nn.fit(t, loader(), 5, [Scores(), nn.KeepCheckpoints(kept), stop], loader(shuffle=False))
    assert training.epoch == 4 and t.parameters[0] == 2
    assert kept.load("best")[0]["param/0.W"][0, 0] == 2


def test_best_epoch():
    history = [{"accuracy": 0.1, "test_loss": 3}, {"accuracy": 0.3, "test_loss": 1}, {"accuracy": 0.3, "test_loss": 2}]
    assert best_epoch(history, "accuracy") == 1 and best_epoch(history, "test_loss") == 1
