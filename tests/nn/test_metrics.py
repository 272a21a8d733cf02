"""Metrics: what they measure, which way they are better, and means that leave out what the loss ignores."""

import json

import numpy as np
import pytest

import nn
from nn.optim.learning_rates import Cosine, Polynomial, Warmup
from nn.training.schedules import Plateau

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((48, 6)), RNG.integers(0, 3, 48)


def trainer(loss=None, outputs=3, shape=(6,), seed=0, lr=0.1):
    layers = nn.Sequential(nn.Linear(shape[-1], outputs))
    return nn.Trainer(nn.Network(layers, shape, np.float64), loss or nn.CrossEntropyLoss(), nn.SGD(lr=lr), seed)


# ------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_labels_of_narrow_types_are_refused_where_they_are_no_class(dtype):
    outputs = np.iinfo(dtype).max + 173
    z, y = np.zeros((4, outputs)), np.array([0, 1, 2, 3], dtype)
    ctx = trainer().ctx
    value, _ = nn.CrossEntropyLoss()(z, y, 4, ctx)
    assert value == pytest.approx(np.log(outputs))
    for bad in (-1, np.iinfo(dtype).min):
        y[2] = bad
        with pytest.raises(ValueError, match=rf"{bad} .*{np.dtype(dtype)} holds"):
            nn.CrossEntropyLoss()(z, y, 4, ctx)
        assert nn.CrossEntropyLoss(ignore_index=bad)(z, y, 3, ctx)[0] == pytest.approx(np.log(outputs))


def test_labels_that_are_ignored_are_data():
    labels = np.where(np.arange(48) < 9, -100, Y)
    with pytest.raises(ValueError, match="ignore_index=-100"):
        nn.fit(trainer(), (X, labels), 1)
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    nn.fit(trainer(loss), (X, labels), 1)
    dataset = nn.data.Dataset(X, labels, ignore_index=-100)
    assert dataset.classes == 3
    one, other = trainer(loss), trainer(loss)
    nn.fit(one, nn.data.Dataset(X, labels, ignore_index=-100, dtype=np.float64), 1, batch=48)
    nn.fit(other, (X[9:], Y[9:]), 1, batch=48)
    np.testing.assert_allclose(one.flat_parameters, other.flat_parameters, rtol=1e-12)
    with pytest.raises(ValueError, match="3"):
        nn.data.Dataset(X[:2], np.array([255, 3]), classes=3, ignore_index=255)


def test_one_output_has_no_classes():
    for y in (Y * 0, Y % 2):
        with pytest.raises(ValueError, match=r"one output.*BCEWithLogitsLoss"):
            nn.fit(trainer(outputs=1), (X, y), 1)


def test_hints_lead_to_what_works():
    ctx = trainer().ctx
    with pytest.raises(ValueError, match=r"given \(5, 7\): y\[\.\.\., None\]"):
        nn.MSELoss()(np.zeros((5, 7, 1)), np.zeros((5, 7)), 35, ctx)
    with pytest.raises(ValueError, match=r"y\.argmax\(axis=-1\)"):
        trainer().step(X, np.eye(3, dtype=int)[Y])
    with pytest.raises(ValueError, match=r"y\[\.\.\., 0\] has that shape"):
        trainer().step(X, Y[:, None])


def test_whole_numbers_are_values_where_the_loss_compares_values():
    y = np.round(X[:, 0] * 3).astype(int)
    assert y.min() < 0
    one, other = trainer(nn.MSELoss(), 1), trainer(nn.MSELoss(), 1)
    nn.fit(one, (X, y), 2)
    nn.fit(other, (X, y.astype(float)[:, None]), 2)
    assert one.digest() == other.digest()


# ------------------------------------------------------------------------------------------------ what is measured


def test_metrics_are_their_definitions():
    z, y = RNG.standard_normal((20, 7)), RNG.integers(0, 7, 20)
    mean = lambda metric, z, y: metric.result(np.divide(*metric.sums(z, y)))
    assert mean(nn.metrics.Accuracy(), z, y) == np.mean(z.argmax(-1) == y)
    for k in (1, 3, 7):
        among = np.mean([label in np.argsort(row)[-k:] for row, label in zip(z, y, strict=True)])
        assert mean(nn.metrics.TopKAccuracy(k), z, y) == pytest.approx(among)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    assert mean(nn.metrics.Perplexity(), z, y) == pytest.approx(np.exp(-log_p[np.arange(20), y].mean()))
    v = RNG.standard_normal(z.shape)
    assert mean(nn.metrics.MeanAbsoluteError(), z, v) == pytest.approx(np.abs(z - v).mean())
    assert mean(nn.metrics.MeanSquaredError(), z, v) == pytest.approx(np.square(z - v).mean())
    assert mean(nn.metrics.RootMeanSquaredError(), z, v) == pytest.approx(np.sqrt(np.square(z - v).mean()))
    assert mean(nn.metrics.BinaryAccuracy(), z, (v > 0) * 1.0) == np.mean((z > 0) == (v > 0))
    with pytest.raises(ValueError, match="outputs' shape"):
        nn.metrics.MeanAbsoluteError().sums(z, y)
    with pytest.raises(ValueError, match="expected classes"):
        nn.metrics.TopKAccuracy(2).sums(z, v)


def test_outputs_that_are_no_numbers_are_not_right():
    one = trainer()
    one.flat_parameters[:] = np.nan
    assert nn.evaluate(one, (X, 0 * Y))["accuracy"] == 0
    binary = trainer(nn.BCEWithLogitsLoss(), 1)
    binary.flat_parameters[:] = np.nan
    assert nn.evaluate(binary, (X, np.zeros((48, 1))))["accuracy"] == 0


def test_own_metrics_are_measured_and_know_their_direction():
    within = nn.metrics.Metric(lambda z, y: np.abs(z - y) < 1, "max", "within")
    y = X[:, :1].copy()
    stop = nn.EarlyStopping(2, "validation_within")
    training = nn.fit(
        trainer(nn.MSELoss(), 1), (X, y), 6, stop, validation=(X, y), test=(X, y),
        metrics=[within, nn.metrics.MeanAbsoluteError()],
    )  # fmt: skip
    scores = [record["validation_within"] for record in training.history]
    assert stop.epoch - 1 == int(np.argmax(scores))
    assert {"loss", "within", "mae"} == set(training.result) and training.result["within"] == max(scores)
    assert training.trainer.metrics == (training.trainer.whole_loss.metric,), "measured in that call alone"
    assert nn.evaluate(training.trainer, (X, y), metrics=within)["within"] == max(scores)
    with pytest.raises(TypeError, match=r"instances of nn\.metrics\.Metric, names or functions, given 3"):
        nn.evaluate(training.trainer, (X, y), metrics=[3])


def test_binary_accuracy_chooses():
    y = (X[:, :1] > 0) * 1.0
    training = nn.fit(trainer(nn.BCEWithLogitsLoss(), 1), (X, y), 2, nn.EarlyStopping(2), validation=(X, y))
    z = training.trainer.predict(X)
    assert training.history[-1]["validation_accuracy"] == np.mean((z > 0) == (y > 0.5))


class Falls(nn.Callback):
    """A metric of one's own that gets smaller every epoch."""

    def __init__(self, name):
        self.name = name

    def on_epoch(self, training, record):
        record[self.name] = np.float32(10.0 / record["epoch"])


@pytest.mark.parametrize("name", ["validation_mae", "error", "perplexity", "validation_top_5_error"])
def test_what_falls_is_better(name, tmp_path):
    kept = nn.Checkpoints(tmp_path)
    stop, best = nn.EarlyStopping(2, name), nn.RestoreBest(kept, name)
    plateau = Plateau(0.1, 0.5, 0, name)
    lines = nn.Metrics(tmp_path / "metrics.jsonl")
    hooks = [Falls(name), lines, stop, nn.KeepCheckpoints(kept, best=name), plateau, best]
    training = nn.fit(trainer(), (X, Y), 6, hooks)
    assert training.epoch == 6 and stop.epoch == best.epoch == 6 and plateau.now == 0.1
    assert kept.load("best")[1]["epoch"] == 6
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])[name] == pytest.approx(10 / 6)


@pytest.mark.parametrize(
    "make",
    [lambda mode, kept: nn.EarlyStopping(2, "f1", mode=mode), lambda mode, kept: Plateau(0.1, metric="f1", mode=mode),
     lambda mode, kept: nn.RestoreBest(kept, "f1", mode=mode),
     lambda mode, kept: nn.KeepCheckpoints(kept, best="f1", mode=mode)],
)  # fmt: skip
def test_unknown_names_need_a_direction(make, tmp_path):
    kept = nn.Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="'f1': is smaller or larger better"):
        nn.fit(trainer(), (X, Y), 1, [Falls("f1"), make(None, kept)])
    hooks = [Falls("f1"), nn.KeepCheckpoints(kept, best="f1", mode="min"), make("min", kept)]
    assert nn.fit(trainer(), (X, Y), 2, hooks).epoch == 2
    with pytest.raises(ValueError, match="mode"):
        make("down", kept)


# ------------------------------------------------------------------------------------------------ weights of rows

WEIGHTED = {
    "ignored": nn.CrossEntropyLoss(ignore_index=-100),
    "weights": nn.CrossEntropyLoss(class_weights=[0.2, 0.5, 0.1]),
    "both": nn.CrossEntropyLoss(label_smoothing=0.1, class_weights=[2.0, 0.5, 0.7], ignore_index=-100),
}


@pytest.mark.parametrize("kind", WEIGHTED)
def test_the_mean_is_pytorchs(kind):
    torch = pytest.importorskip("torch")
    loss, shape = WEIGHTED[kind], (4, 6)
    x, y = RNG.standard_normal((16, *shape)), RNG.integers(0, 3, (16, 4))
    if loss.ignore_index is not None:
        y[:, 2:] = -100
        y[5] = -100
    one = trainer(loss, shape=shape)
    z = torch.tensor(one.predict(x).reshape(-1, 3))
    weights = None if loss.class_weights is None else torch.tensor(loss.class_weights)
    theirs = torch.nn.functional.cross_entropy(
        z, torch.tensor(y.reshape(-1)), weights, ignore_index=-100, label_smoothing=loss.label_smoothing
    ).item()
    kept = y != -100
    scores = nn.evaluate(one, (x, y), batch=5)
    assert scores["loss"] == pytest.approx(theirs, rel=1e-12)
    assert scores["accuracy"] == np.mean((one.predict(x).argmax(-1) == y)[kept])
    assert trainer(loss, shape=shape).step(x, y) == pytest.approx(theirs, rel=1e-12)
    assert trainer(loss, shape=shape).step(x, y, accumulate=3) == pytest.approx(theirs, rel=1e-12)
    assert trainer(loss, shape=shape).step(x, y, 16, total_weight=loss.weight(y)) == pytest.approx(theirs, rel=1e-12)
    assert nn.fit(trainer(loss, shape=shape), (x, y), 1, batch=16).history[-1]["loss"] == pytest.approx(
        theirs, rel=1e-12
    )
    still = nn.fit(trainer(loss, shape=shape, lr=1e-300), (x, y), 1, batch=5)  # an epoch's mean is over its weight
    assert still.history[-1]["loss"] == pytest.approx(theirs, rel=1e-12)


def test_a_batch_of_ignored_rows_teaches_nothing():
    one = trainer(WEIGHTED["ignored"])
    before = one.digest()
    assert one.step(X, np.full(48, -100)) == 0 and one.digest() == before
    half = np.where(np.arange(48) < 24, -100, Y)  # in the order of the data one batch has nothing
    loader = nn.Loader(nn.data.Dataset(X, half, ignore_index=-100), 24, shuffle=False, dtype=np.float64)
    want = nn.evaluate(trainer(WEIGHTED["ignored"]), (X, half))["loss"]
    assert nn.fit(trainer(WEIGHTED["ignored"]), loader, 1).history[0]["loss"] == pytest.approx(want, rel=1e-12)
    assert np.isnan(nn.evaluate(one, (X, np.full(48, -100)))["loss"])


def test_an_option_of_the_loss_that_is_set_between_steps_counts_from_then_on():
    y = np.where(np.arange(48) < 24, 2, Y)
    one, want = trainer(nn.NLLLoss(), lr=1e-300), {None: None, 2: None}
    for ignored in want:
        want[ignored] = trainer(nn.NLLLoss(ignore_index=ignored), lr=1e-300).step(X, y)
    assert want[None] != want[2]
    for ignored in (None, 2, None):
        one.loss.ignore_index = ignored
        assert one.step(X, y) == pytest.approx(want[ignored], rel=1e-12)


def test_weights_that_are_none_are_refused():
    loss = WEIGHTED["ignored"]
    with pytest.raises(TypeError, match=r"given 9\.0: .*total_weight"):
        trainer(loss).step(X, Y, 9.0)
    with pytest.raises(ValueError, match="48 of 60 samples: give total_weight"):
        trainer(loss).step(X, Y, 60)
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="total_weight must be in"):
            trainer(loss).step(X, Y, total_weight=bad)
    with pytest.raises(TypeError, match="total_weight is the sum"):
        trainer(loss).step(X, Y, total_weight="48")
    with pytest.raises(ValueError, match="count alike: leave out total_weight"):
        trainer().step(X, Y, total_weight=48)
    with pytest.raises(ValueError, match="class weights"):
        trainer(WEIGHTED["weights"]).step(X, Y * 0 + 7)


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("given", ["schedule", "callbacks"])
def test_plateau_is_schedule_and_callback_whichever_it_is_given_as(given):
    plateau = Plateau(0.1, 0.5, 0, "loss", threshold=10.0)  # no epoch is good enough
    training = nn.fit(trainer(lr=7.0), (X, Y), 4, **{given: plateau})
    assert [record["lr"] for record in training.history] == [0.1, 0.1, 0.05, 0.025]
    both = nn.fit(trainer(lr=7.0), (X, Y), 4, plateau, schedule=Warmup(plateau, 1))
    assert both.history[-1]["lr"] == 0.025
    with pytest.raises(ValueError, match="sets the learning rate, and so does Cosine"):
        nn.fit(trainer(), (X, Y), 1, plateau, schedule=Cosine(0.1, 100))


def test_fit_again_trains_on():
    """With the next epochs' orders, and the schedule from its start."""
    seen = []

    class Spy(nn.ReLU):
        def forward(self, p, x, ctx):
            seen.extend(x[:, 0].tolist() if ctx.training else [])
            return super().forward(p, x, ctx)

    def spied():
        network = nn.Network(nn.Sequential(Spy(), nn.Linear(1, 2)), (1,))
        return nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.01))

    x, y = np.arange(12.0)[:, None], np.arange(12) % 2
    one = spied()
    for _ in range(3):
        nn.fit(one, (x, y), 1, batch=5)
    again, seen[:] = list(seen), []
    nn.fit(spied(), (x, y), 3, batch=5)
    assert again == seen and len({tuple(seen[i : i + 12]) for i in (0, 12, 24)}) == 3

    t, cosine = trainer(), Cosine(0.1, 10)
    first = nn.fit(t, (X, Y), 5, schedule=cosine, batch=24)
    digest = t.digest()
    second = nn.fit(t, (X, Y), 5, schedule=cosine, batch=24)
    assert [r["lr"] for r in first.history] == [r["lr"] for r in second.history] and t.digest() != digest
    with pytest.warns(UserWarning, match=r"starts anew.*progress=training.progress"):
        nn.fit(t, (X, Y), 5, schedule=Cosine(0.1, 1000), batch=24)


def test_progress_goes_on_with_the_schedule_of_a_second_fit():
    def begun():
        t = trainer()
        nn.fit(t, (X, Y), 1, batch=20)
        return t

    cosine = Cosine(0.1, 12)
    whole = nn.fit(begun(), (X, Y), 4, schedule=cosine, batch=20)
    half = nn.fit(begun(), (X, Y), 2, schedule=lambda step: cosine(step), batch=20)
    rest = nn.fit(half.trainer, (X, Y), 4, schedule=cosine, batch=20, progress=half.progress())
    assert whole.trainer.digest() == rest.trainer.digest()
    assert [r["lr"] for r in whole.history] == [r["lr"] for r in rest.history]


def test_schedules_that_end_too_early_are_refused():
    for schedule in (Cosine(0.1, 20), Polynomial(0.1, 20), Warmup(Cosine(0.1, 20), 5)):
        with pytest.raises(ValueError, match=r"ends with rate 0 at step 20, and 20 epochs of 6 steps.*steps=120"):
            nn.fit(trainer(), (X, Y), 20, schedule=schedule, batch=8)
    nn.fit(trainer(), (X, Y), 3, schedule=Cosine(0.1, 13), batch=8)
    nn.fit(trainer(), (X, Y), 20, schedule=Cosine(0.1, 20, end=0.01), batch=8)
    for steps in (5, 10):
        with pytest.raises(ValueError, match="10 steps of warm-up leave none of Cosine"):
            Warmup(Cosine(0.1, steps), 10)


# ------------------------------------------------------------------------------------------------ metrics.jsonl


def test_metrics_are_appended_and_never_half_a_line(tmp_path, monkeypatch):
    from nn.training import callbacks

    path, rewrites = tmp_path / "m.jsonl", []
    whole = callbacks.write_atomically
    monkeypatch.setattr(callbacks, "write_atomically", lambda *given: rewrites.append(whole(*given)))
    training = nn.fit(trainer(), (X, Y), 5, nn.Metrics(path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == training.history
    assert len(rewrites) == 1, "written whole at the start, then appended to"
    late = nn.fit(trainer(), (X, Y), 3, [nn.Metrics(path), Falls("mae")])  # added to after the line was written
    assert [json.loads(line) for line in path.read_text().splitlines()] == late.history

    before = path.read_bytes()
    write = callbacks.os.write
    monkeypatch.setattr(callbacks.os, "write", lambda file, line: write(file, line[:7]))
    with pytest.raises(OSError, match="7 of 20 bytes"):
        callbacks.append_or_nothing(path, b"x" * 20)
    assert path.read_bytes() == before


def test_of_equal_outputs_the_first_counts_as_in_accuracy():
    z, y = np.zeros((30, 3)), np.arange(30) % 3
    assert nn.metrics.TopKAccuracy(1).sums(z, y) == nn.metrics.Accuracy().sums(z, y) == (10, 30)
    assert nn.metrics.TopKAccuracy(2).sums(z, y) == (20, 30)


def test_a_metric_of_one_number_is_refused():
    """Its mean over batches would depend on how the samples are cut."""
    right = nn.metrics.Metric(lambda z, y: (z.argmax(axis=1) == y).mean(), "max", "right")
    with pytest.raises(ValueError, match=r"metric right: .*a value for each row, given one number for 48 rows"):
        nn.evaluate(trainer(), (X, Y), metrics=right)


def test_perplexity_of_nan_is_nan():
    assert np.isnan(nn.metrics.Perplexity().result(float("nan"))) and nn.metrics.Perplexity().result(1e4) == np.inf
