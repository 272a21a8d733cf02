"""The one loop: what a trainer does in a step, what fit does with it, exact resume, early stopping."""

import json
import math
import signal

import numpy as np
import pytest

import nn
from nn.training.callbacks import BestEpoch, Callback
from nn.training.checkpoint_callback import Termination


def data(n=50, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 6))
    return nn.data.Dataset(x, (x[:, 0] + x[:, 1] > 0).astype(int), classes=2, dtype=dtype)


def trainer(seed=0, lr=0.3, momentum=0.9, dtype=np.float64):
    network = nn.Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), (6,), dtype)
    return nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr, momentum), seed)


def loader(batch=8, **options):
    return nn.Loader(data(), batch, seed=4, dtype=np.float64, **options)


def test_a_step_is_backprop_by_hand():
    """Sigmoid layers and quadratic cost: the four equations, written out."""
    network = nn.Network(nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 2), nn.Sigmoid()), (6,), np.float64)
    t = nn.Trainer(network, nn.QuadraticLoss(), nn.SGD(3.0))
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
    """The loss of an epoch is the mean over its samples, the first one's too."""
    for batch, steps in ((50, 1), (1, 50), (8, 7)):
        t, watching, losses = trainer(lr=0.1, momentum=0.0), Callback(), []
        watching.on_step = lambda training, loss, losses=losses: losses.append(loss)
        training = nn.fit(t, loader(batch), epochs=2, callbacks=[watching])
        sizes = [min(batch, 50 - first) for first in range(0, 50, batch)]
        for record, told in zip(training.history, np.reshape(losses, (2, steps)), strict=True):
            assert record["loss"] == pytest.approx(np.dot(sizes, told) / 50, rel=1e-12)


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
    assert parts.step(x, y, 10, 3) == pytest.approx(whole.step(x, y), rel=1e-12)
    np.testing.assert_allclose(parts.flat_parameters, whole.flat_parameters, rtol=1e-12, atol=1e-15)


def test_a_batch_that_fails_leaves_nothing_to_the_next():
    whole, failed = trainer(), trainer()
    x, y = data().x[:10], data().y[:10]
    for part, total in ((x[:, :5], 10), (x, 3)):
        with pytest.raises(ValueError):
            failed.step(part, y, total, 2)
    with pytest.raises(nn.NonFiniteLoss):
        failed.step(np.full_like(x, np.nan), y, 10, 2)
    assert failed.step(x, y) == whole.step(x, y) and (failed.flat_parameters == whole.flat_parameters).all()


def test_learns():
    t = trainer()
    training = nn.fit(t, loader(), 20, validation=loader(shuffle=False))
    assert training.history[-1]["validation_accuracy"] >= 0.98
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
    again.load_state_dict(state)
    assert again.steps == stop
    resumed = nn.fit(again, loader(), 3, callbacks[:2], loader(shuffle=False), progress=progress)
    assert (again.flat_parameters == whole.flat_parameters).all()
    assert [r["loss"] for r in resumed.history] == [r["loss"] for r in reference.history]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]


def test_load_state_refuses_by_name():
    t = trainer()
    state = {k: v.copy() for k, v in t.state_dict().items()}
    with pytest.raises(ValueError, match=r"lacks param/0\.W"):
        t.load_state_dict({k: v for k, v in state.items() if k != "param/0.W"})
    with pytest.raises(ValueError, match=r"param/9\.W"):
        t.load_state_dict(state | {"param/9.W": np.zeros(1)})
    with pytest.raises(ValueError, match=r"param/0\.W"):
        t.load_state_dict(state | {"param/0.W": np.zeros((8, 6))})
    with pytest.raises(ValueError, match="given float32"):
        t.load_state_dict(state | {"param/0.b": np.zeros(8, np.float32)})
    assert all((t.state_dict()[k] == v).all() for k, v in state.items()), "a refused state must change nothing"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_names_step_and_layer_and_leaves_parameters():
    t = trainer()
    x, y = data().x[:4].copy(), data().y[:4]
    t.step(x, y)
    before = t.flat_parameters.copy()
    t.p[2].W[0, 0] = np.inf
    with pytest.raises(nn.NonFiniteLoss, match=r"step 1.*parameter 2\.W"):
        t.step(x, y)
    t.flat_parameters[:] = before
    x[1, 2] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match=r"input.*\[1\]"):
        t.step(x, y)
    assert (t.flat_parameters == before).all()
    t.p[0].W[:], t.p[2].W[:] = 1, 1e308
    with pytest.raises(nn.NonFiniteLoss, match=r"output.*layer 2"):
        t.step(np.ones((4, 6)), y)


def test_wrong_shape_and_dtype_are_refused():
    t = trainer()
    with pytest.raises(nn.ShapeError, match=r"\(4, 5\)"):
        t.step(np.zeros((4, 5)), np.zeros(4, int))
    with pytest.raises(TypeError, match="given float32"):
        t.step(np.zeros((4, 6), np.float32), np.zeros(4, int))


def test_an_empty_batch_is_refused_before_anything_moves():
    t = trainer()
    t.step(*data(4).batch())
    before = t.flat_parameters.copy()
    empty = np.zeros((0, 6)), np.zeros(0, int)
    with pytest.raises(ValueError, match=r"step 1 of network: a shard of 0 samples in a batch of 0; .*at least one"):
        t.step(*empty)
    with pytest.raises(ValueError, match="4 samples"):
        t.step(*data(4).batch(), 3)
    assert t.steps == 1 and (t.flat_parameters == before).all()
    assert t.step(*empty, 5) == 0 and t.steps == 2  # a shard may be empty


def test_early_stopping_keeps_the_best(tmp_path, capsys):
    class Scores(nn.Callback):
        """Accuracies as if measured; weights are marked with the epoch."""

        def on_epoch(self, training, record):
            record["validation_accuracy"] = [0.5, 0.9, 0.8, 0.7, 0.95][training.epoch - 1]
            training.trainer.flat_parameters[:] = training.epoch

    t = trainer()
    kept = nn.Checkpoints(tmp_path)
    stop = nn.EarlyStopping(2, checkpoints=kept)
    training = nn.fit(t, loader(), 5, [Scores(), nn.KeepCheckpoints(kept), stop], loader(shuffle=False))
    assert training.epoch == 4 and t.flat_parameters[0] == 2
    assert kept.load("best")[0]["param/0.W"][0, 0] == 2
    again, (state, progress, _) = trainer(), kept.load()  # it was killed after its last checkpoint
    again.load_state_dict(state)
    hooks = [Scores(), nn.KeepCheckpoints(kept), nn.EarlyStopping(2, checkpoints=kept)]
    training = nn.fit(again, loader(), 5, hooks, loader(shuffle=False), progress=progress)
    assert training.epoch == 4 and again.flat_parameters[0] == 2, "it had stopped, and trains no further"

    # Resumed where nothing is left to do, it reads the best; where that is damaged the last epoch counts, and is told.
    for damaged, epoch in (False, 2), (True, 4):
        if damaged:
            (tmp_path / "best.npz").write_bytes(b"")
        again, (state, progress, _) = trainer(), kept.load()
        again.load_state_dict(state)
        stop = nn.EarlyStopping(2, checkpoints=kept)
        nn.fit(again, loader(), 4, [stop], progress=progress)
        assert again.flat_parameters[0] == stop.epoch == epoch
        assert damaged == ("the best epoch, 2, cannot be put back" in capsys.readouterr().out)


def test_wherever_a_run_is_killed_the_best_comes_back(tmp_path):
    """Whichever of its saves is the last: resumed, it ends with the parameters of the run that was left alone."""

    class Scores(nn.Callback):
        def on_epoch(self, training, record):
            record["validation_accuracy"] = [0.5, 0.9, 0.8, 0.7][training.epoch - 1]

    class Killed(nn.Checkpoints):
        saves = 6  # of which the last is made no more

        def save(self, *arguments):
            self.saves -= 1
            if not self.saves:
                raise KeyboardInterrupt
            return super().save(*arguments)

    def run(kept, t, progress=None):
        hooks = [Scores(), nn.KeepCheckpoints(kept), nn.EarlyStopping(2, checkpoints=kept)]
        nn.fit(t, loader(), 4, hooks, progress=progress)
        return t.digest()

    wanted = run(nn.Checkpoints(tmp_path / "whole"), trainer())
    for saves in range(2, 7):
        killed, kept = trainer(), Killed(tmp_path / str(saves))
        kept.saves = saves
        with pytest.raises(KeyboardInterrupt):
            run(kept, killed)
        left, again, progress = nn.Checkpoints(kept.directory), trainer(), None
        if any(not entry["named"] for entry in left.entries()):
            state, progress, _ = left.load()
            again.load_state_dict(state)
        assert run(left, again, progress) == wanted, f"killed at save {saves}"


def test_best_epoch():
    def best_epoch(history, metric, mode=None):
        return BestEpoch("test", metric, mode).find(nn.Training(trainer(), None, 1, history=history))

    history = [{"accuracy": 0.1, "a_loss": 3}, {"accuracy": 0.3, "a_loss": 1}, {"accuracy": 0.3, "a_loss": 2}]
    assert best_epoch(history, "accuracy") == 2 and best_epoch(history, "a_loss") == 2
    nan = float("nan")
    for values, best in (([nan, 3, 2, 5], 3), ([3, nan, 2], 3), ([nan, nan], 1), ([nan, np.inf], 1), ([nan], 1)):
        assert best_epoch([{"a_loss": value} for value in values], "a_loss") == best
        assert best_epoch([{"score": -value} for value in values], "score", "max") == best


class Counted:
    """A loader that counts how often it is gone through, and after which step last."""

    def __init__(self, trainer):
        self.trainer, self.loader, self.seen = trainer, loader(shuffle=False), []

    def epoch(self, epoch):
        self.seen.append(self.trainer.steps)
        return self.loader.epoch(epoch)


def test_validation_data_are_looked_at_every_epoch_and_test_data_once_at_the_end(tmp_path):
    t = trainer()
    validation, test = Counted(t), Counted(t)
    said = []
    training = nn.fit(t, loader(), 3, [nn.Progress(say=said.append)], validation, test=test)
    assert validation.seen == [7, 14, 21] and test.seen == [21]
    assert {"validation_loss", "validation_accuracy"} <= training.history[0].keys()
    assert not {"test_loss", "accuracy"} & training.history[0].keys(), "a name says which data it is of"
    assert training.result == nn.evaluate(t, loader(shuffle=False))
    assert all("validation loss" in line and "test" not in line for line in said)
    assert nn.fit(trainer(), loader(), 1).result == {}


class ValidationAccuracies(nn.Callback):
    """As if measured; weights are marked with the epoch."""

    def on_epoch(self, training, record):
        record["validation_accuracy"] = [0.5, 0.9, 0.8][training.epoch - 1]
        training.trainer.flat_parameters[:] = training.epoch


def test_the_best_epochs_weights_are_those_that_are_tested(tmp_path):
    def run(*more):
        t = trainer()
        kept = nn.Checkpoints(tmp_path)
        best = nn.RestoreBest(kept, say=said.append)
        hooks = [ValidationAccuracies(), nn.KeepCheckpoints(kept), *more, best]
        return t, best, nn.fit(t, loader(), 3, hooks, loader(shuffle=False), test=loader(shuffle=False))

    class Spoil(nn.Callback):
        def on_end(self, training):
            (tmp_path / "best.npz").write_bytes(b"")

    class Outdate(nn.Callback):
        def on_end(self, training):
            nn.Checkpoints(tmp_path).save(training.trainer.state_dict(), training.progress(), "best")

    said = []
    t, best, training = run()
    assert best.epoch == 2 and (t.p[0].W == 2).all() and training.epoch == 3 and not said
    assert training.result == nn.evaluate(t, loader(shuffle=False))
    t, best, training = run(Spoil())
    assert best.epoch == 3 and (t.p[0].W == 3).all(), "what cannot be read is not put back"
    t, best, training = run(Outdate())
    assert best.epoch == 3 and (t.p[0].W == 3).all(), "nor what is of another epoch"
    assert "best.npz: sha256 is" in said[0] and "best.npz is of epoch 3" in said[1]
    assert all(line.startswith("warning: the best epoch, 2, cannot be put back") for line in said)


def test_without_validation_data_nothing_chooses(tmp_path):
    kept = nn.Checkpoints(tmp_path)
    nn.fit(trainer(), loader(), 2, [nn.KeepCheckpoints(kept)], test=loader(shuffle=False))
    assert not (tmp_path / "best.npz").exists()
    with pytest.raises(
        ValueError, match=r"EarlyStopping: 'validation_accuracy' is not in the record .* validation data"
    ):
        nn.fit(trainer(), loader(), 2, [nn.EarlyStopping(1)], test=loader(shuffle=False))


@pytest.mark.parametrize(("shape", "unit"), [((4, 4, 1), "images/s"), ((16,), "samples/s")])
def test_progress_counts_what_the_data_are(shape, unit):
    """In lines within an epoch and at its end."""
    data = nn.data.Dataset(np.random.default_rng(0).random((12, *shape)), np.arange(12) % 2)
    network = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), shape)
    lines = []
    progress = nn.Progress(every=0.0, say=lines.append)
    nn.fit(nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1)), nn.Loader(data, 4), 1, [progress])
    assert len(lines) == 4 and all(f" {unit} " in line for line in lines)


@pytest.mark.parametrize(("epochs", "left"), [(2, "60 s left"), (21, "20 min left")])
def test_progress_tells_the_time_left(epochs, left, monkeypatch):
    """An epoch of a minute, by a clock that stands still in between."""
    lines, times = [], [0.0]
    monkeypatch.setattr("nn.training.callbacks.time.perf_counter", lambda: times[0])
    clock = nn.Callback()
    clock.on_epoch = lambda training, record: times.__setitem__(0, 60.0 * training.epoch)
    nn.fit(trainer(), loader(), epochs, [clock, nn.Progress(every=math.inf, say=lines.append)])
    assert lines[0].endswith(left) and lines[-1].endswith("0 s left")


def test_progress_tells_no_time_left_where_nothing_was_trained():
    """Continued after the last step of an epoch, which is still to be evaluated."""

    class Last(nn.Callback):
        def on_step(self, training, loss):
            if training.epoch == 0 and training.batch == len(training.train):
                self.progress = training.progress()

    last, lines = Last(), []
    nn.fit(trainer(), loader(), 1, [last])
    nn.fit(trainer(), loader(), 2, [nn.Progress(every=math.inf, say=lines.append)], progress=last.progress)
    assert len(lines) == 2 and lines[0].endswith("/s") and lines[1].endswith("  0 s left"), lines


class Interrupts(Callback):
    def on_step(self, training, loss):
        raise KeyboardInterrupt


def test_an_error_in_fit_leaves_nothing_behind(tmp_path):
    """`on_abort` of each callback undoes what its `on_begin` has changed elsewhere."""
    network = nn.Network(nn.Residual(nn.MixtureOfExperts(6, 2, top=1)), (6,), np.float64)
    t, before = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1)), signal.getsignal(signal.SIGTERM)
    saves = nn.KeepCheckpoints(nn.Checkpoints(tmp_path), termination=Termination())
    with pytest.raises(KeyboardInterrupt):
        nn.fit(t, loader(), 1, [nn.callbacks.ExpertLoad(), saves, Interrupts()], schedule=nn.schedules.Step(0.5, 1))
    assert t.ctx.network_context.on_routing is None and signal.getsignal(signal.SIGTERM) is before
    assert t.optimizer.lr == 0.1


def test_a_termination_that_was_started_before_fit_outlasts_an_error(tmp_path):
    """Recovery, which calls fit again, can still be asked to end."""
    before = signal.getsignal(signal.SIGTERM)
    with Termination() as termination:
        termination.start()
        saves = nn.KeepCheckpoints(nn.Checkpoints(tmp_path), termination=termination)
        with pytest.raises(KeyboardInterrupt):
            nn.fit(trainer(), loader(), 1, [saves, Interrupts()])
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_rate_is_the_optimizers_again_after_a_schedule():
    t = trainer(lr=0.3)
    first = nn.fit(t, loader(), 2, schedule=nn.schedules.Exponential(0.2, 0.5))
    assert first.history[-1]["lr"] < 0.2 and t.optimizer.lr == 0.3
    assert nn.fit(t, loader(), 1).history[-1]["lr"] == 0.3


def test_progress_shows_the_last_epoch_after_an_early_stop():
    lines = []
    progress = nn.Progress(every=1e9, say=lines.append, every_epoch=1e9)
    training = nn.fit(trainer(lr=0.0), loader(), 9, [nn.EarlyStopping(2, "validation_loss"), progress], loader())
    assert training.epoch == 3 and [line.split("  ")[0] for line in lines] == ["epoch 3/9"]


def test_expert_load_takes_batches_without_a_length():
    class Batches:
        def epoch(self, epoch, start=0):
            yield from loader().epoch(epoch, start)

    network = nn.Network(nn.Residual(nn.MixtureOfExperts(6, 2, top=1)), (6,), np.float64)
    t = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1))
    record = nn.fit(t, Batches(), 1, [nn.callbacks.ExpertLoad()]).history[0]
    assert record["experts"]["body"]["step"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_weight_of_zero_for_targets_that_count_is_refused():
    t = nn.Trainer(trainer().network, nn.CrossEntropyLoss(ignore_index=-1), nn.SGD(0.1))
    x, y = data().x[:3], data().y[:3]
    with pytest.raises(ValueError, match="total_weight is 0, but the targets of this shard weigh 3"):
        t.step(x, y, total_weight=0)
    assert t.step(x, np.full(3, -1), total_weight=0) == 0
