"""Learning-rate schedules against PyTorch's, and the linear scaling recipe of Goyal et al. 2017."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import nn
from nn.optim.learning_rates import (
    Constant,
    Cosine,
    Exponential,
    MultiStep,
    Polynomial,
    Step,
    Warmup,
    linear_scaling,
)
from nn.training.schedules import MomentumCorrection, Plateau, parse

PAIRS = [
    (Constant(0.1), "ConstantLR", {"factor": 1.0}),
    (Step(0.1, 7, 0.5), "StepLR", {"step_size": 7, "gamma": 0.5}),
    (MultiStep(0.1, (3, 10, 11)), "MultiStepLR", {"milestones": [3, 10, 11]}),
    (Exponential(0.1, 0.9), "ExponentialLR", {"gamma": 0.9}),
    (Polynomial(0.1, 30), "PolynomialLR", {"total_iters": 30}),
    (Polynomial(0.1, 30, 2.0), "PolynomialLR", {"total_iters": 30, "power": 2.0}),
    (Cosine(0.1, 40, 0.02), "CosineAnnealingLR", {"T_max": 40, "eta_min": 0.02}),
    (Warmup(Constant(0.1), 8, 0.025), "LinearLR", {"start_factor": 0.25, "total_iters": 8}),
]


@pytest.mark.parametrize("schedule, name, options", PAIRS, ids=[repr(pair[0]) for pair in PAIRS])
def test_schedules_equal_pytorch(schedule, name, options):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    for step in range(40):
        assert math.isclose(schedule(step), optimizer.param_groups[0]["lr"], rel_tol=1e-12), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("metric", ["validation_loss", "validation_accuracy"])
def test_plateau_equals_pytorch_and_finds_its_place_again(metric):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    mode = "min" if metric == "validation_loss" else "max"
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, factor=0.5, patience=2)
    ours = Plateau(0.1, 0.5, 2, metric)
    training = SimpleNamespace(history=[], direction=nn.metrics.direction)
    ours.on_begin(training)
    rates = []
    for value in np.random.default_rng(0).random(40):
        theirs.step(value)
        training.history.append({metric: value})
        ours.on_epoch(training, training.history[-1])
        assert math.isclose(ours(0), optimizer.param_groups[0]["lr"], rel_tol=1e-12)
        rates.append(ours(0))
    assert len(set(rates)) > 5, "it must have been lowered several times"
    again = Plateau(0.1, 0.5, 2, metric)
    again.on_begin(training)
    assert again(0) == ours(0)


def test_warm_up_ends_where_the_schedule_is():
    for schedule in (Constant(0.8), Cosine(0.8, 100, begin=10), MultiStep(0.8, (5, 50)), Polynomial(0.8, 100)):
        warm = Warmup(schedule, 10, 0.1)
        rates = [warm(step) for step in range(100)]
        assert rates[0] == 0.1 and rates[10:] == [schedule(step) for step in range(10, 100)]
        np.testing.assert_allclose(np.diff(rates[:11]), (schedule(10) - 0.1) / 10)
    assert Warmup(Cosine(0.8, 100, begin=10), 10)(10) == 0.8, "the peak is reached"


def test_schedules_end_where_they_should():
    assert Cosine(0.1, 10, 0.01)(10) == Cosine(0.1, 10, 0.01)(1000) == 0.01
    assert Polynomial(0.1, 10, 3, 0.01)(10) == Polynomial(0.1, 10, 3, 0.01)(11) == 0.01


def test_a_factor_lowers_the_rate_where_none_is_given():
    assert all(0 < kind.factor < 1 for kind in (Step, MultiStep, Exponential))


class Inside(nn.SGD):
    """SGD with the rate inside the velocity, as LARS has it."""

    rate_inside = ("velocity",)

    def apply(self, w, g, slots, step, region, sum_over_slices):
        v = slots["velocity"]
        v *= self.momentum
        v += float(self.lr) * g
        w -= v


def train(optimizer, schedule, corrected, epochs=3, continued=None):
    """(trainer, progress) after training with a schedule on five batches an epoch."""
    rng = np.random.default_rng(1)
    data = nn.data.Dataset(rng.random((20, 6)), rng.integers(0, 3, 20), dtype=np.float64)
    trainer = nn.Trainer(nn.Network(nn.Linear(6, 3), (6,), np.float64), nn.CrossEntropyLoss(), optimizer)
    before, progress = continued or (None, None)
    if before:
        trainer.load_state_dict(before.state_dict())
    hooks = [schedule] if isinstance(schedule, Plateau) else []
    hooks += [MomentumCorrection(schedule)] if corrected else []
    loader = nn.Loader(data, 4)
    return trainer, nn.fit(trainer, loader, epochs, hooks, schedule=schedule, progress=progress).progress()


def test_momentum_is_corrected_while_training():
    warm = Warmup(Step(0.4, 6, 0.5), 4, 0.05)
    plateau = partial(Plateau, 0.4, 0.5, 0, "loss", 0.9)  # no epoch is good enough: lowered after each
    for schedule in (lambda: warm, plateau):
        outside, _ = train(nn.SGD(0.4, 0.9), schedule(), corrected=False)
        inside, _ = train(Inside(0.4, 0.9), schedule(), corrected=True)
        np.testing.assert_allclose(inside.flat_parameters, outside.flat_parameters, rtol=1e-12)
        plain, _ = train(Inside(0.4, 0.9), schedule(), corrected=False)
        assert np.abs(plain.flat_parameters - outside.flat_parameters).max() > 1e-3, "control: without it they differ"
    half = train(Inside(0.4, 0.9), warm, True, epochs=1)
    resumed, _ = train(Inside(0.4, 0.9), warm, True, continued=half)
    assert np.array_equal(resumed.flat_parameters, train(Inside(0.4, 0.9), warm, True)[0].flat_parameters)
    assert nn.LARS(0.1).rate_inside == ("velocity",) and not nn.SGD(0.1, 0.9).rate_inside


def test_linear_scaling():
    assert linear_scaling(0.1, 8192, 256) == 3.2
    with pytest.raises(ValueError, match="at least 1"):
        linear_scaling(0.1, 8, 0)


def test_from_the_command_line():
    assert parse("constant", 0.1, 10, 100) == (Constant(0.1), [])
    assert parse("step:every=2.5,factor=0.5", 0.1, 10, 100)[0] == Step(0.1, 250, 0.5)
    assert parse("multistep:at=3/6/8", 0.1, 10, 100)[0] == MultiStep(0.1, (300, 600, 800))
    assert parse("exponential:factor=0.9", 0.1, 10, 100)[0] == Exponential(0.1, 0.9, 100)
    assert parse("polynomial:power=2", 0.1, 10, 100)[0] == Polynomial(0.1, 1000, 2.0)
    assert parse("cosine:warmup=5,end=0.01", 0.1, 10, 100)[0] == Warmup(Cosine(0.1, 1000, 0.01, 500), 500, 0.0)
    goyal = parse("multistep:at=30/60/80,warmup=5,base_batch=256", 0.1, 90, 156, batch=8192)[0]
    assert goyal == Warmup(MultiStep(3.2, (30 * 156, 60 * 156, 80 * 156)), 780, 0.1)
    schedule, callbacks = parse("plateau:patience=3,metric=validation_accuracy,warmup=1", 0.1, 10, 100)
    assert schedule.schedule is callbacks[0] and repr(callbacks[0]).startswith("Plateau(0.1, patience=3, metric=")


@pytest.mark.parametrize(
    "text, message",
    [
        ("cosin", "unknown schedule 'cosin': did you mean 'cosine'"),
        (
            "cosine:warm=5",
            r"what is 'warm=5'\? cosine takes end=NUMBER, warmup=NUMBER, warmup_from=NUMBER, base_batch=",
        ),
        ("cosine:warmup=five", "warmup must be a number, given 'five'"),
        ("cosine:warmup=-1", r"warmup must be at least 0 and below 1e\+09, given -1.0"),
        ("cosine:warmup=inf", r"warmup must be at least 0 and below 1e\+09, given inf"),
        ("polynomial:power=nan", "power must be at least 0"),
        ("cosine:warmup=10", "10 epochs of warm-up leave none of 10"),
        ("step:every=0", "every must be at least 1, given 0"),
        ("multistep:at=30/20", "at must be steps that ascend"),
        ("multistep:at=30/x", "at must be a number, or some as 30/60, given '30/x'"),
        ("plateau:factor=2", r"factor must be in \(0, 1\)"),
        ("plateau:patience=1.5", "patience must be a whole number, given '1.5'"),
        ("constant:base_batch=256", "base_batch needs the batch size"),
    ],
)
def test_what_makes_no_sense_is_named(text, message):
    with pytest.raises(ValueError, match=f"learning rate '{text}'.*{message}"):
        parse(text, 0.1, 10, 100)


def test_a_schedule_as_long_as_training_needs_an_epoch():
    for text in "cosine", "polynomial:end=0.01", "cosine:warmup=1":
        with pytest.raises(ValueError, match=f"learning rate '{text}'.*its length is that of training.*0 epochs"):
            parse(text, 0.1, 0, 100)
    assert parse("step", 0.1, 0, 100)[0](0) == 0.1


def test_plateau_names_a_metric_that_is_not_measured():
    with pytest.raises(ValueError, match="'validation_loss' is not in the record"):
        Plateau(0.1).on_epoch(SimpleNamespace(history=[]), {"loss": 1.0})


def test_records_of_a_run_that_is_resumed_behind_an_epochs_last_step_have_its_rate():
    class Stop(nn.Callback):
        def on_step(self, training, loss):
            if training.batch == 5:
                self.kept, self.progress = training.trainer.snapshot(), training.progress()
                raise InterruptedError

    rng = np.random.default_rng(1)
    data = rng.random((20, 6)), rng.integers(0, 3, 20)
    schedule, stop = Step(0.4, 1, 0.5), Stop()
    network = nn.Network(nn.Linear(6, 3), (6,), np.float64)
    whole = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.9))
    expected = [record["lr"] for record in nn.fit(whole, data, 2, schedule=schedule, batch=4).history]
    with pytest.raises(InterruptedError):
        nn.fit(nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.9)), data, 2, stop, schedule=schedule, batch=4)
    resumed = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.9))
    resumed.load_state_dict(stop.kept)
    run = nn.fit(resumed, data, 2, schedule=schedule, batch=4, progress=stop.progress)
    assert [record["lr"] for record in run.history] == expected
    assert np.array_equal(resumed.flat_parameters, whole.flat_parameters)
