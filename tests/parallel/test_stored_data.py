"""Data as other programs store them: found by the names that these give, or refused before ranks start."""

import gzip
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import nn
from collectives import steps
from nn import data
from nn.training.checkpoints import json_text
from parallel.command.factory import prepare, synchronised
from parallel.command.options import Options
from parallel.command.parsing import parse
from parallel.command.rules import check_normalization
from parallel.passes.forward_backward import ForwardBackward
from parallel.passes.virtual_shards import VirtualShards
from parallel.settings import OptionError

CLASSES = np.arange(40) % 10
IMAGES = np.random.default_rng(0).random((40, 8, 8, 1)).astype(np.float32)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (IMAGES, CLASSES[:, None], r"y_train int64\(40, 1\) must hold one class a sample: store y_train\[:, 0\]"),
        (IMAGES, np.eye(10, dtype=int)[CLASSES], r"one-hot: store y_train\.argmax\(axis=1\)"),
        ((IMAGES * 255).astype(np.int32), CLASSES, "ids"),
        (IMAGES, CLASSES.astype(float), r"if they are classes, store y\.astype\(int\)"),
    ],
    ids=["column", "one-hot", "int32 images", "classes as floats"],
)
def test_what_to_store_is_said_before_ranks_start(tmp_path, x, y, said):
    np.savez(tmp_path / "some.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(OptionError, match=said):
        prepare(Options(data=str(tmp_path / "some.npz"), model="mlp:64,32,10"))
    np.savez(tmp_path / "some.npz", x_train=IMAGES, y_train=CLASSES, x_test=IMAGES, y_test=CLASSES)
    prepare(Options(data=str(tmp_path / "some.npz"), model="mlp:64,32,10"))  # control


def test_home_is_expanded_where_no_shell_does_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text('out = "~/runs/one"\ndata_dir = "~/d"\n')
    options = parse(["--config", "~/c.toml"])
    assert (options.out, options.data_dir) == (f"{tmp_path}/runs/one", f"{tmp_path}/d")
    assert parse(["--out=~/x", "--model", "mlp:64,10"]).out == f"{tmp_path}/x"
    np.savez(tmp_path / "some.npz", x_train=IMAGES, y_train=CLASSES, x_test=IMAGES, y_test=CLASSES)
    assert len(data.load("~/some.npz").train) == 40


def test_mnist_is_found_by_the_names_of_other_programs(tmp_path, monkeypatch):
    """train-images.idx3-ubyte, below $RINGPROP_DATA as it was written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RINGPROP_DATA", "~/d")
    (place := tmp_path / "d" / "mnist").mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        images = b"\0\0\x08\x03" + np.array([count, 28, 28], ">u4").tobytes() + bytes(count * 784)
        labels = b"\0\0\x08\x01" + np.array([count], ">u4").tobytes() + bytes(count)
        (place / f"{part}-images.idx3-ubyte").write_bytes(images)
        (place / f"{part}-labels.idx1-ubyte").write_bytes(labels)
    assert len(data.load("mnist").train) == 20
    with (
        gzip.open(place / "t10k-images.idx3-ubyte.gz", "wb") as packed,
        open(place / "t10k-images.idx3-ubyte", "rb") as file,
    ):
        shutil.copyfileobj(file, packed)
    (place / "t10k-images.idx3-ubyte").unlink()
    assert len(data.load("mnist").test) == 10


def test_json_has_no_nan_and_the_sample_is_named():
    record = {"loss": float("nan"), "rows": [1.5, float("inf"), {"x": -float("inf")}], "n": 3}
    assert json.loads(json_text(record), parse_constant=pytest.fail) == {
        "loss": None, "rows": [1.5, None, {"x": None}], "n": 3,
    }  # fmt: skip
    some = data.Dataset(IMAGES.copy(), CLASSES)
    assert some.first_bad() is None
    some.x[7, 2] = np.nan  # as a memory map may hold it, which is not looked through when it is opened
    assert some.first_bad() == 7


def normalised():
    return nn.Network(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), (3,))


def test_a_last_batch_of_one_sample_is_told_at_the_start():
    network = normalised()

    def check(options, samples, readers=1):
        some = data.Dataset(np.zeros((samples, 3), np.float32), np.zeros(samples, int))
        check_normalization(options, network, nn.Loader(some, options.batch), readers)

    check(Options(batch=8), 32)
    check(Options(batch=8), 34)
    with pytest.raises(ValueError, match=r"a batch of 1 of the training samples.* use another --batch than 8"):
        check(Options(batch=8), 33)
    with pytest.raises(ValueError, match="a batch of 2 of"):
        check(Options(batch=8), 34, 2)
    check(Options(batch=8, reproducible=4), 40)
    with pytest.raises(ValueError, match="a batch of 5 of"):
        check(Options(batch=8, reproducible=4), 37)
    four = Options(batch=16, strategy="pipeline", pipeline="gpipe:micro=4")
    check(four, 40)
    with pytest.raises(ValueError, match="a batch of 5 of"):
        check(four, 37)
    with pytest.raises(ValueError, match="a batch of 3 of"):
        check(Options(batch=16, strategy="pipeline", pipeline="pipedream:micro=4"), 35)
    network = synchronised(network)
    check(Options(batch=8, sync_batch_norm=True), 34, 2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_refuses_a_sample_that_is_normalised_alone(accumulate):
    trainer = nn.Trainer(normalised(), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    x, y = np.ones((40, 3), np.float32), np.zeros(40, int)
    before = trainer.digest()
    for samples, batch in (33, 8), (32 + accumulate, 32), (accumulate, 8):
        with pytest.raises(ValueError, match=f"a batch of {samples % batch} of .* give another batch than {batch}"):
            nn.fit(trainer, (x[:samples], y[:samples]), 1, batch=batch, accumulate=accumulate)
    assert trainer.steps == 0 and trainer.digest() == before
    loader = nn.Loader(data.Dataset(x[:33], y[:33]), 8, drop_last=True)
    assert nn.fit(trainer, loader, 1).trainer.steps == 4


@pytest.mark.parametrize("make", [ForwardBackward, lambda: VirtualShards(5)])
def test_passes_say_how_many_samples_they_compute_at_once(make):
    """What is refused at the start is what ranks would compute: the micro-batches of `divide`, of all ranks."""
    for total, count, parts in itertools.product(range(1, 20), range(1, 5), (1, 2, 3)):
        passes = [make() for _ in range(count)]
        if isinstance(passes[0], VirtualShards) and (parts > 1 or count > 4):
            continue
        found = set()
        for index, one in enumerate(passes):
            one.mesh = SimpleNamespace(shard=(index, count), index=index, count=count, rank=index)
            one.shard, one.mine, one.addend = (index, count), steps.chunk(5, count, index), index
            virtual = (5,) if isinstance(one, VirtualShards) else ()
            some = data.Dataset(np.zeros((total, 1), np.float32), np.zeros(total, int))
            ((lo, hi, _),) = nn.Loader(some, max(total, count), shard=(index, count, *virtual)).step_slices()
            found |= {micro.rows.stop - micro.rows.start for micro in one.divide(hi - lo, total, parts)}
        assert passes[0].samples_at_once(total, parts) - {0} == found - {0}
