"""Cores of the lab's hosts, each so many times as slow as one here: what is computed, and how long it takes."""

from pathlib import Path

import numpy as np
import pytest

import nn

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def made():
    return nn.models.build("mlp:6,5,3", (6,), 3)


def trained() -> np.ndarray:
    """Parameters after a step in two micro-batches."""
    trainer = nn.Trainer(made(), nn.CrossEntropyLoss(), nn.SGD(0.1))
    trainer.step(np.ones((4, 6), np.float32), np.arange(4) % 3, None, 2)
    return trainer.flat_parameters.copy()


def test_layers_and_updates_compute_the_same_and_rest_behind_it(monkeypatch):
    import slow_cores

    clock = {"wall": 0.0, "busy": 0.0}
    rests = []

    def rest(seconds):
        rests.append(seconds)
        clock["wall"] += seconds

    def busy():  # each look at the processor's time finds a second more of it, and of the wall's
        clock["busy"] += 1.0
        clock["wall"] += 1.0
        return clock["busy"]

    before, original = trained(), nn.Linear.forward
    monkeypatch.setattr(slow_cores.time, "sleep", rest)
    monkeypatch.setattr(slow_cores.time, "thread_time", busy)
    monkeypatch.setattr(slow_cores.time, "perf_counter", lambda: clock["wall"])
    with slow_cores.of(4, made(), nn.SGD(0.1)) as cores:
        np.testing.assert_array_equal(trained(), before)
        monkeypatch.undo()
    calls = 2 * 2 * 3 + 1  # micro-batches, ways, layers; an update
    assert len(rests) == calls and set(rests) == {2.0}, "of four seconds the call took two: two looks"
    assert cores.seconds == 4.0 * calls and cores.late == 0
    assert cores.describe() == ", on cores 4 times as slow as those here, which came 0% late"
    assert nn.Linear.forward is original, "behind the context all is as it was"


def test_a_call_that_took_too_long_already_does_not_rest_and_is_late(monkeypatch):
    import slow_cores

    rests, wall = [], iter([0.0, 5.0, 5.0])
    monkeypatch.setattr(slow_cores.time, "sleep", rests.append)
    monkeypatch.setattr(slow_cores.time, "thread_time", iter([0.0, 1.0]).__next__)
    monkeypatch.setattr(slow_cores.time, "perf_counter", wall.__next__)
    cores = slow_cores.Cores(4)
    assert cores.resting(lambda value: value + 1)(1) == 2
    assert not rests and (cores.seconds, cores.late) == (5.0, 1.0)
    assert cores.describe().endswith("which came 20% late")


def test_weights_that_are_put_off_rest_too():
    import slow_cores

    with slow_cores.of(2, made(), nn.SGD(0.1)) as cores:
        network = made()
        trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1))
        x, ctx = np.ones((4, 6), np.float32), trainer.ctx
        output, saved = network.forward(trainer.p, x, ctx)
        network.backward_inputs(trainer.p, trainer.g, np.ones_like(output), saved, ctx)
        before = cores.seconds
        network.backward_weights(ctx)
        assert cores.seconds > before


def test_ranks_that_have_cores_do_not_rest(monkeypatch):
    import slow_cores

    monkeypatch.setattr(slow_cores.os, "sched_getaffinity", lambda _: {0, 1})
    assert [slow_cores.times(ranks) for ranks in (1, 2, 3, 4, 8)] == [1, 1, 3, 4, 8]
    original = nn.Linear.forward
    with slow_cores.of(1, made(), nn.SGD(0.1)) as cores:
        assert nn.Linear.forward is original and cores.describe() == ""


def test_only_what_has_no_layers_inside_rests():
    import slow_cores

    kinds = {type(layer).__name__ for layer in slow_cores.leaves(made().root)}
    assert kinds == {"Linear", "ReLU"}
