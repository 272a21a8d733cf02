"""Data as other programs store them: found by the names that these give, or refused before ranks start."""

import gzip
import json
import shutil

import numpy as np
import pytest

import nn
from nn import data
from nn.training.checkpoints import json_text
from parallel.command.factory import prepare
from parallel.command.options import OptionError, Options
from parallel.command.parsing import parse
from parallel.command.rules import check_normalization

CLASSES = np.arange(40) % 10
IMAGES = np.random.default_rng(0).random((40, 8, 8, 1)).astype(np.float32)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (IMAGES, CLASSES[:, None], r"y_train int64\(40, 1\) must hold one class a sample: store y_train\[:, 0\]"),
        (IMAGES, np.eye(10, dtype=int)[CLASSES], r"one-hot: store y_train\.argmax\(axis=1\)"),
        ((IMAGES * 255).astype(np.int32), CLASSES, r"which are ids: of images store x\.astype\(np\.uint8\)"),
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


def test_a_last_batch_of_one_sample_is_told_at_the_start():
    network = nn.Network(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), (3,))
    check_normalization(Options(batch=8), network, 32, 1)
    check_normalization(Options(batch=8), network, 34, 1)
    with pytest.raises(OptionError, match="a batch of 1 of the 33 training samples"):
        check_normalization(Options(batch=8), network, 33, 1)
    with pytest.raises(OptionError, match="a batch of 2 of the 34 training samples"):
        check_normalization(Options(batch=8), network, 34, 2)
    check_normalization(Options(batch=8, sync_batch_norm=True), network, 34, 2)
