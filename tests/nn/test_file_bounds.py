"""Files whose arrays are not what they should be take no memory for these: small files that unpack, wrong shapes."""

import functools
import gzip
import hashlib
import io
import json
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

import nn
from nn.data.arrays import Archive, ArrayError
from nn.reading import MAX_OBJECTS, TABLE, free_memory, parse_json
from nn.training.state import check_state
from nn.training.state_files import StateFile

LITTLE = 1 << 22  # bytes


@pytest.fixture
def traced():
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def rewritten(path, change, how=zipfile.ZIP_STORED):
    """The same archive, with other arrays by name, compressed or not."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file} | change
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)
    path.write_bytes(out.getvalue())


@pytest.fixture
def trainer():
    network = nn.Network(nn.Sequential(nn.Linear(3, 2)), (3,))
    return nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.1))


def test_a_small_network_file_does_not_unpack(tmp_path, traced):
    """2,000 x 2,000 zeros are 16 kB where they are compressed; nn.save compresses nothing."""
    network = nn.Network(nn.Sequential(nn.Linear(2000, 2000)), (2000,))
    file = nn.save(nn.Model(network, network.layout.zeros(np.float32)), tmp_path / "network.npz")
    rewritten(file, {}, zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < 40_000
    tracemalloc.reset_peak()
    before = traced()
    with pytest.raises(nn.FileError, match=r"network.npz.*compressed"):
        nn.load(file)
    assert traced() - before < LITTLE


def test_an_entry_of_a_wrong_shape_is_not_read(tmp_path, trainer, traced):
    kept = nn.Checkpoints(tmp_path)
    path = kept.save(trainer.state_dict(), {})
    rewritten(path, {"param/0.W": np.zeros((3000, 1000), np.float32)})
    state = StateFile(path)
    tracemalloc.reset_peak()
    before = traced()
    expected = {name: (array.shape, array.dtype) for name, array in trainer.state_dict().items()}
    assert "param/0.W: expected float32(3, 2), given float32(3000, 1000)" in check_state(expected, state)
    assert traced() - before < LITTLE
    rewritten(path, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ArrayError, match="compressed, and here only"):
        StateFile(path)


@pytest.mark.parametrize("steps", [-1, 1 << 60])
def test_steps_that_cannot_have_been_made_are_refused(tmp_path, trainer, steps):
    state = trainer.state_dict() | {"steps": np.array(steps)}
    with pytest.raises(ValueError, match=f"entry steps: expected the number of steps made, given {steps}"):
        trainer.load_state_dict(state)
    assert trainer.steps == 0


def test_texts_are_bounded(tmp_path):
    np.savez(tmp_path / "texts.npz", short="abc", long="x" * 1000, number=np.arange(3))
    archive = Archive(tmp_path / "texts.npz", "iU")
    assert archive.text("short", 3) == "abc"
    for name in ("long", "number"):
        with pytest.raises(ArrayError, match=f"{name} must be a text of at most 999 characters"):
            archive.text(name, 999)
    archive.close()


def test_a_temporary_name_leads_nowhere_else(tmp_path, monkeypatch):
    """Whoever may write into the directory can guess the name that a file is first written under."""
    (victim := tmp_path / "victim").write_text("mine")
    monkeypatch.setattr("os.getpid", lambda: 7)
    (tmp_path / ".result.json.7.tmp").symlink_to(victim)
    nn.training.checkpoints.write_atomically(tmp_path / "result.json", b"{}")
    assert victim.read_text() == "mine" and not (tmp_path / "result.json").is_symlink()
    assert (tmp_path / "result.json").read_bytes() == b"{}"


def signed(directory, progress):
    """A checkpoint whose progress somebody has changed, and its checksum with it."""
    manifest = json.loads((directory / "manifest.json").read_text())
    path = directory / manifest["checkpoints"][-1]["file"]
    rewritten(path, {"progress": np.array(json.dumps(progress))})
    manifest["checkpoints"][-1]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_a_progress_that_no_training_has_is_refused(tmp_path, trainer):
    """With the right checksum: one line that names it, before anything is trained."""
    x, y = np.zeros((8, 3), np.float32), np.zeros(8, int)
    good = nn.fit(trainer, (x, y), 2, batch=4).progress()
    kept = nn.Checkpoints(tmp_path)
    kept.save(trainer.state_dict(), good)
    record = good["history"][0]
    wrong = [
        {"epoch": 10**30}, {"epoch": -1}, {"epoch": 3}, {"epoch": True}, {"epoch": "2"}, {"batch": -1}, {"batch": 99},
        {"history": []}, {"history": None}, {"history": [record, 7]}, {"history": [record, {}]},
        {"history": [record, record]}, {"history": [record, good["history"][1] | {"loss": "x"}]},
        {"samples": -1}, {"samples": 10**30}, {"seconds": -1.0}, {"seconds": "x"}, {"loss_sum": None}, {"foreign": 1},
        {"history": [record, good["history"][1] | {"step": 10**200}]},
    ]  # fmt: skip
    for change in wrong:
        signed(tmp_path, good | change)
        _, progress, _ = kept.load()
        with pytest.raises(ValueError, match="progress") as told:
            nn.fit(trainer, (x, y), 3, batch=4, progress=progress)
        assert len(str(told.value)) < 300 and "\n" not in str(told.value), change
    for missing in ("epoch", "history"):
        with pytest.raises(ValueError, match=r"progress.*history must be"):
            nn.fit(trainer, (x, y), 3, progress={key: value for key, value in good.items() if key != missing})
    signed(tmp_path, good)
    assert nn.fit(trainer, (x, y), 3, batch=4, progress=kept.load()[1]).epoch == 3


def test_an_archive_of_very_many_members_is_not_read(tmp_path, traced):
    """Its list alone has 18 MB; each member would be an object of 600 bytes."""
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 1, *6 * [0]) + b"x"
    count = (TABLE + (2 << 20)) // len(entry)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, count * len(entry), 0, 0)
    (tmp_path / "many.npz").write_bytes(entry * count + end)
    tracemalloc.reset_peak()
    before = traced()
    with pytest.raises(ArrayError, match="its list of members has"):
        Archive(tmp_path / "many.npz")
    assert traced() - before < LITTLE


@pytest.mark.parametrize("name", ["data.npz", "mnist"])
def test_data_that_memory_does_not_hold_are_refused_before_they_are_read(tmp_path, monkeypatch, traced, name):
    """Compressed a thousandfold; Linux would hand out the memory, and kill whoever uses it."""
    monkeypatch.setattr("nn.data.arrays.free_memory", lambda: 10 << 20)
    monkeypatch.setenv("RINGPROP_DATA", str(tmp_path))
    x, y = np.zeros((20_000, 28, 28), np.uint8), np.zeros(20_000, np.uint8)
    if name == "mnist":
        for part, most in ("train", 20_000), ("t10k", 10):
            for kind, array in ("images-idx3", x[:most]), ("labels-idx1", y[:most]):
                head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
                (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    else:
        np.savez_compressed(tmp_path / name, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
        name = str(tmp_path / name)
    del x
    tracemalloc.reset_peak()
    before = traced()
    with pytest.raises(
        nn.data.DataError, match=r"its arrays take 0\.0 GiB, and 0\.0 GiB of memory are free: \.npy files"
    ):
        nn.data.load(name)
    assert traced() - before < LITTLE
    monkeypatch.setattr("nn.data.arrays.free_memory", lambda: 100 << 20)
    assert len(nn.data.load(name).train) == 20_000


def test_free_memory_is_that_of_the_machine_or_of_a_container(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (groups / "job" / "step").mkdir(parents=True)
    (groups / "memory" / "of").mkdir(parents=True)
    free = functools.partial(free_memory, str(proc), str(groups))
    assert free() > 1 << 60, "where nothing tells"
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:  700 kB\n")
    assert free() == 700 << 10
    (groups / "memory.max").write_text("max\n")
    (groups / "job" / "step" / "memory.max").write_text("5000\n")
    (groups / "memory" / "of" / "memory.limit_in_bytes").write_text("4000\n")
    assert free() == 700 << 10
    (proc / "self" / "cgroup").write_text("rubbish\n0::/job/step\n")
    assert free() == 5000
    (proc / "self" / "cgroup").write_text("7:memory:/of\n0::/\n")
    assert free() == 4000


def test_objects_in_json_are_bounded():
    """Two letters each are seventy bytes in memory."""
    with pytest.raises(ValueError, match="1,048,577 objects and lists, and at most 1,048,576 are read"):
        parse_json("{}" * (MAX_OBJECTS + 1))
    assert parse_json("[[1], {}]") == [[1], {}]


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_description_of_vast_values_is_refused(tmp_path, kind):
    """They need no weights: a kilobyte of a file told predict.py to make an image of 80 GiB."""
    network = nn.Network(nn.Sequential(nn.GlobalAvgPool2d(), nn.Linear(3, 10)), (8, 8, 3))
    vast = nn.Network(network.root, (1 << 20, 1 << 20, 3))
    for each in network, vast:
        trainer = nn.Trainer(each, nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
        file = nn.save(trainer, tmp_path / f"network.{kind}")
        if each is network:
            assert nn.load(file).network.in_shape == (8, 8, 3)
    with pytest.raises(nn.FileError, match=r"layer 0 takes or makes 12,288\.0 GiB for one sample, and .* are free"):
        nn.load(file)
