"""Checkpoints while training goes on: a thread writes the same files; errors are told; SIGTERM saves and ends."""

import hashlib
import json
import os
import resource
import signal
import threading

import numpy as np
import pytest
from conftest import PATIENCE

import nn
from nn.core.layer import Spec, Split
from nn.core.parts import cut
from nn.training.checkpoint_callback import KeepCheckpoints, Terminated, Termination
from nn.training.stored import Fragment

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

    with pytest.raises(OSError, match="No space left"):
        nn.fit(trainer(), loader(), FOREVER, KeepCheckpoints(Full(tmp_path), 2, background=background))


def test_an_error_of_the_last_save_is_told(tmp_path):
    class Last(nn.Checkpoints):
        def save(self, state, progress, name=None):
            if progress["epoch"] == 1:
                raise OSError(28, "No space left on device")
            return super().save(state, progress, name)

    with pytest.raises(OSError, match="No space left"):
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


# ------------------------------------------------------------------------------------------------------------ of parts

WHOLE = {"param/0.W": np.arange(24.0).reshape(6, 4), "param/0.b": np.arange(4.0), "steps": np.array(7)}
SPLIT = Split(1, blocks=2)


def three(change=lambda fragments: fragments):
    """Of three ranks: W is cut along its columns into two parts, the second of them among ranks 1 and 2."""
    spec = {"0.W": Spec((6, 4), None, split=SPLIT)}
    first, second = (cut(spec, {"0.W": WHOLE["param/0.W"]}, i, 2)["0.W"] for i in range(2))
    at = {"shape": (6, 4), "split": SPLIT}
    return change(
        [
            [Fragment("steps", WHOLE["steps"]), Fragment("param/0.W", first, part=(0, 2), **at)],
            [Fragment("param/0.W", second.reshape(-1)[:5], part=(1, 2), **at)],
            [
                Fragment("param/0.W", second.reshape(-1)[5:], part=(1, 2), start=5, **at),
                Fragment("param/0.b", WHOLE["param/0.b"]),
            ],
        ]
    )


def save(kept, steps, ranks, names=(None,)):
    """As three ranks do."""
    number = kept.begin_parts(steps)
    progress = [{"epoch": steps}, None, None]
    parts = [kept.write_part(steps, number, (i, 3), iter(mine), progress[i]) for i, mine in enumerate(ranks)]
    kept.list_parts(steps, parts, names)
    return [kept.directory / file for file, _ in parts]


def test_parts_come_back_whole(tmp_path):
    kept = nn.Checkpoints(tmp_path)
    for steps in (1, 2, 3):
        save(kept, steps, three(), (None,) if steps > 1 else ("best", None))
    state, progress, _ = kept.load()
    assert progress == {"epoch": 3} and state.keys() == WHOLE.keys()
    for name, array in WHOLE.items():
        assert state[name].dtype == array.dtype and np.array_equal(state[name], array), name
    assert kept.load("best")[1] == {"epoch": 1}
    assert len(list(tmp_path.iterdir())) == 10, "the best one, the last two, and the manifest"
    kept.save(WHOLE | {"steps": np.array(3)}, {"epoch": 4})  # one of one file takes its place
    kept.save(WHOLE, {"epoch": 5}, "best")
    assert kept.load()[1] == {"epoch": 4} and kept.load("best")[1] == {"epoch": 5}
    assert len(list(tmp_path.iterdir())) == 1 + 3 + 2


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_a_damaged_part_is_named_and_the_one_before_used(tmp_path, which, damage):
    kept = nn.Checkpoints(tmp_path)
    before, parts = save(kept, 1, three()), save(kept, 2, three())
    content = bytearray(parts[which].read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "flip":
            parts[which].write_bytes(content)
        case "truncate":
            parts[which].write_bytes(content[:-7])
        case "swap":
            parts[which].write_bytes(before[(which + 1) % 3].read_bytes())
        case "remove":
            parts[which].unlink()
    with pytest.warns(UserWarning, match=f"DAMAGED.*its part {parts[which].name}: "):
        assert kept.load()[1] == {"epoch": 1}
    for left in before:
        left.write_bytes(b"")
    with pytest.warns(UserWarning), pytest.raises(nn.CheckpointError, match=parts[which].name):
        kept.load()


CHANGES = {
    "missing": (lambda ranks: [ranks[0], [], ranks[2]], r"param/0\.W: elements of part 1 of 2 from 0 on are missing"),
    "short": (lambda ranks: [ranks[0], ranks[1], ranks[2][1:]], r"param/0\.W: it has 12 elements of part 1 of 2, .* 5"),
    "twice": (
        lambda ranks: [ranks[0], ranks[1], [Fragment("param/0.b", np.zeros(2), (4,)), *ranks[1]]],
        r"param/0\.W: elements of part 1 of 2 from 0 on are there twice",
    ),
    "dtype": (
        lambda ranks: [*ranks[:2], [ranks[2][0], Fragment("steps", np.array(7.0), (), 1)]],
        r"steps: another shape, dtype",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_do_not_make_a_whole_are_refused(tmp_path, change):
    """Though every file is what the manifest says."""
    kept, (change, said) = nn.Checkpoints(tmp_path), CHANGES[change]
    save(kept, 1, three())
    save(kept, 2, three(change))
    with pytest.warns(UserWarning, match=said):
        assert kept.load()[1] == {"epoch": 1}


def test_a_manifest_that_was_cut_short_is_refused_by_name(tmp_path):
    kept = nn.Checkpoints(tmp_path)
    save(kept, 1, three())
    text = (tmp_path / "manifest.json").read_text()
    for length in (0, 1, len(text) // 2, len(text) - 1):
        (tmp_path / "manifest.json").write_text(text[:length])
        with pytest.raises(nn.CheckpointError, match=r"manifest\.json is not JSON"):
            kept.load()
    for wrong in ("../step.npz", "a/b.npz", 7, "x"):
        entry = {"file": "step-00000001.npz", "named": False, "parts": [{"file": wrong, "sha256": ""}]}
        (tmp_path / "manifest.json").write_text(json.dumps({"format": 2, "checkpoints": [entry]}))
        with pytest.raises(nn.CheckpointError, match="was it edited"):
            kept.entries()


def test_what_is_not_listed_does_not_count_and_is_removed(tmp_path):
    """A run was killed when some of its parts were there, also those of a step that is listed already."""
    kept = nn.Checkpoints(tmp_path)
    listed = save(kept, 1, three())
    for steps in (1, 2):
        number = kept.begin_parts(steps)
        file, _ = kept.write_part(steps, number, (1, 3), iter(three()[1]))
        assert (tmp_path / file) not in listed, "it takes nobody's place"
    assert kept.load()[1] == {"epoch": 1}
    assert len(list(tmp_path.glob("*.part-*"))) == 4, "the first was removed as the second began"
    save(kept, 3, three())
    assert sorted(tmp_path.glob("*.part-*")) == sorted([*listed, *tmp_path.glob("step-00000003.*")])


def test_parts_are_read_without_trust(tmp_path):
    """Places that no array has; nothing is unpickled, and no memory asked for that the files do not have."""
    kept = nn.Checkpoints(tmp_path)
    good = {"shape": [2], "start": 0, "part": [0, 1], "split": None}
    wrongs = [{"shape": [10**30]}, {"shape": [-1]}, {"shape": 2}, {"start": -1}, {"part": [1, 1]}, {"part": [0, 2]}]
    wrongs += [{"split": [5, 1, 0], "part": [0, 2]}, {"split": [0, 3, 0], "part": [0, 2]}, {"part": [0, 10**9]}]
    wrongs += [{"shape": [0, 10**30]}, {"shape": [10**12]}, {"part": [0, 10**9], "split": [0, 1, 0]}, {"start": 1.0}]
    for wrong in wrongs:
        file = tmp_path / "step-00000001.1.part-0-of-1.npz"
        places = json.dumps({"w": good | wrong})
        np.savez(file, w=np.zeros(2), progress=np.array("{}"), fragments=np.array(places))
        kept.list_parts(1, [(file.name, hashlib.sha256(file.read_bytes()).hexdigest())])
        with pytest.warns(UserWarning, match="w: "), pytest.raises(nn.CheckpointError, match="no usable"):
            kept.load()
