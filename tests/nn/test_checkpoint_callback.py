"""Checkpoints while training goes on: a thread writes the same files; errors are told; SIGTERM saves and ends."""

import os
import resource
import signal
import threading

import numpy as np
import pytest
from conftest import PATIENCE

import nn
from nn.training.checkpoint_callback import KeepCheckpoints, Terminated, Termination

FOREVER = 10**9


def trainer():
    network = nn.Network(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,), np.float64)
    return nn.Trainer(network, nn.CrossEntropyLoss(), nn.Adam(0.05))


def samples():
    rng = np.random.default_rng(0)
    return nn.data.Dataset(rng.random((40, 6)), rng.integers(0, 3, 40), classes=3, dtype=np.float64)


def loader(shuffle=True):
    return nn.Loader(samples(), 8, seed=1, shuffle=shuffle, dtype=np.float64)


def untimed(monkeypatch):
    """Progress without what a clock says, so that files can be compared."""
    progress = nn.Training.progress

    def without(self):
        found = progress(self)
        history = [{k: v for k, v in record.items() if k not in ("seconds", "images_per_second")}
                   for record in found["history"]]  # fmt: skip
        return found | {"seconds": 0.0, "history": history}

    monkeypatch.setattr(nn.Training, "progress", without)


def test_a_thread_writes_the_same_files(tmp_path, monkeypatch):
    untimed(monkeypatch)
    for background in (False, True):
        kept = nn.Checkpoints(tmp_path / str(background), keep=4)
        nn.fit(trainer(), loader(), 3, KeepCheckpoints(kept, 3, background=background), loader(False))
    at_once, by_thread = (
        {path.name: path.read_bytes() for path in (tmp_path / str(background)).iterdir()}
        for background in (False, True)
    )
    assert len(at_once) == 6 and "best.npz" in at_once and at_once == by_thread


class Held(nn.Checkpoints):
    """Begins to write when it may."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may = threading.Event()

    def save(self, *arguments):
        assert self.may.wait(PATIENCE)
        return super().save(*arguments)


def test_what_is_written_later_is_what_was_there_then(tmp_path):
    """However late: the steps that follow change the parameters, and not what is saved."""
    kept, many = Held(tmp_path), trainer()

    class Watch(nn.Callback):
        def on_step(self, training, loss):
            if many.steps == 3:
                self.then = {name: array.copy() for name, array in many.state_dict().items()}
            if many.steps == 5:
                assert not kept.entries(), "nothing is written yet"
                kept.may.set()

    watch = Watch()
    nn.fit(many, loader(), 1, [KeepCheckpoints(kept, 3, background=True), watch])
    assert [entry["file"] for entry in kept.entries()] == ["step-00000003.npz", "step-00000005.npz"]
    (tmp_path / "step-00000005.npz").unlink()
    with pytest.warns(UserWarning, match="DAMAGED"):
        stored, progress, _ = kept.load()
    assert stored["steps"] == 3 and progress["batch"] == 3
    assert all(np.array_equal(stored[name], array) for name, array in watch.then.items())
    assert not np.array_equal(stored["param/0.W"], many.state_dict()["param/0.W"]), "control: training went on"


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_the_writer_ends_training(tmp_path, background):
    """Which would go on for ever."""

    class Full(nn.Checkpoints):
        def save(self, *arguments):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        nn.fit(trainer(), loader(), FOREVER, KeepCheckpoints(Full(tmp_path), 2, background=background))


def test_an_error_of_the_last_save_is_told(tmp_path):
    class Last(nn.Checkpoints):
        def save(self, state, progress, name=None):
            if progress["epoch"] == 1:
                raise OSError(28, "No space left on device")
            return super().save(state, progress, name)

    with pytest.raises(OSError, match="No space"):
        nn.fit(trainer(), loader(), 1, KeepCheckpoints(Last(tmp_path), 2, background=True))


def test_a_full_disk_keeps_the_last_whole_one(tmp_path):
    """Of a process that may not write larger files than it has: its own limit is lowered after the first epoch."""
    kept = nn.Checkpoints(tmp_path)

    class Fill(nn.Callback):
        before = None

        def on_step(self, training, loss):
            if kept.entries() and not self.before:  # the first one is there
                self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, self.before[1]))

    fill = Fill()
    try:
        with pytest.raises(OSError, match=r"cannot write .*npz .*File too large.*before is kept"):
            nn.fit(trainer(), loader(), FOREVER, [KeepCheckpoints(kept, background=True), fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, fill.before)
    last = kept.entries()[-1]["file"]
    assert f"step-{kept.load()[0]['steps']:08d}.npz" == last and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("background", [False, True])
def test_parameters_that_are_not_finite_do_not_take_the_place_of_those_that_were(tmp_path, background):
    """Else who continues finds NaN, every time."""

    class Poison(nn.Callback):
        def on_step(self, training, loss):
            if training.trainer.steps == 5:
                training.trainer.flat_parameters[0] = np.nan

    kept = nn.Checkpoints(tmp_path)
    keeper = KeepCheckpoints(kept, 2, background=background)
    with pytest.raises(ArithmeticError, match=r"parameter 2\.W (is not finite, so it is not saved|.* in step 4)"):
        nn.fit(trainer(), loader(), FOREVER, [Poison(), keeper])  # or by the next step, where that is faster
    keeper.wait()
    assert kept.load()[0]["steps"] == 4 and not list(tmp_path.glob(".*"))


class Terminate(nn.Callback):
    """SIGTERM to this process, after a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, training, loss):
        if training.trainer.steps == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_asked_to_end_it_saves_and_what_continues_has_the_same_bits(tmp_path):
    whole, left, again = trainer(), trainer(), trainer()
    kept, before = nn.Checkpoints(tmp_path), signal.getsignal(signal.SIGTERM)
    with Termination() as termination, pytest.raises(Terminated, match=r"after step (\d+), which is saved") as ended:
        nn.fit(left, loader(), FOREVER, [Terminate(7), KeepCheckpoints(kept, background=True, termination=termination)])
    assert signal.getsignal(signal.SIGTERM) is before
    state, progress, _ = kept.load()
    assert state["steps"] == left.steps >= 7 and f"step {left.steps}," in str(ended.value)
    again.load_state_dict(state)
    epochs = progress["epoch"] + 2  # training may have gone on for a while, until it looked whether it was asked to
    nn.fit(whole, loader(), epochs)
    nn.fit(again, loader(), epochs, progress=progress)
    assert again.digest() == whole.digest()


def test_asked_twice_it_ends_as_elsewhere(tmp_path):
    class Twice(nn.Callback):
        def on_step(self, training, loss):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    def handler(number, frame):
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with Termination() as termination, pytest.raises(KeyboardInterrupt):
            nn.fit(
                trainer(), loader(), 1, [KeepCheckpoints(nn.Checkpoints(tmp_path), termination=termination), Twice()]
            )
    finally:
        signal.signal(signal.SIGTERM, before)


def test_several_files_need_the_class_that_reads_them(tmp_path):
    """They are neither damaged nor lost: the message says what reads them."""
    kept = nn.Checkpoints(tmp_path)
    kept.save({"steps": np.array(1)}, {})
    parts = [{"file": entry["file"], "sha256": entry["sha256"]} for entry in kept.entries()]
    kept.list_entries([{"file": "step-00000002.npz", "parts": parts, "named": False}])
    with pytest.raises(nn.CheckpointError, match=r"step-00000002\.npz: it has 1 files.*parallel\.ShardedCheckpoints"):
        kept.load()
