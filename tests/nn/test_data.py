"""Data sets by name: what is in them, what a batch of them is, and what is said where they are missing or wrong."""

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nn.data import Data, DataError, DataNotFound, Dataset, load

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RINGPROP_DATA") or ROOT / "data")


def needs(name):
    """Skip a test where the data set is not on this machine."""
    return pytest.mark.skipif(
        not (DATA / name).is_dir(), reason=f"needs {name} in $RINGPROP_DATA (scripts/get_data.py {name})"
    )


def test_digits_are_the_published_ones():
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.in_shape == (8, 8, 1) and data.classes == 10 and data.class_names == tuple("0123456789")
    both = np.bincount(np.concatenate([data.train.y, data.test.y]))
    assert both.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    share = np.bincount(data.test.y) / both
    assert share.min() > 0.19 and share.max() < 0.21  # the classes alike in both parts
    x, y = data.train.batch()
    assert x.dtype == np.float32 and x.min() == 0 and x.max() == 1
    assert y.dtype == np.int64
    # No scan is in both parts.
    train = {image.tobytes() for image in data.train.x}
    assert not [image for image in data.test.x if image.tobytes() in train]


def test_digits_file_is_rebuilt_byte_for_byte():
    pytest.importorskip("sklearn", reason="needs scikit-learn, the source of the digits")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_digits.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "digits.npz: " in done.stdout


@needs("mnist")
def test_mnist():
    data = load("mnist", DATA)
    assert data.in_shape == (28, 28, 1) and (len(data.train), len(data.test)) == (60000, 10000)
    assert data.train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert np.bincount(data.train.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    mean, std = data.train.moments()
    assert mean == pytest.approx([0.1307], abs=5e-5) and std == pytest.approx([0.3081], abs=5e-5)


@needs("fashion-mnist")
def test_fashion_mnist_normalised():
    data = load("fashion-mnist", DATA, normalise=True, limit=20000)
    assert (len(data.train), len(data.test)) == (20000, 10000)
    assert data.train.y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert data.class_names[9] == "Ankle boot"
    x, _ = data.train.batch(dtype=np.float64)
    assert abs(x.mean()) < 1e-9 and abs(x.std() - 1) < 1e-9
    x, _ = data.test.batch(dtype=np.float64)  # by the moments of the training samples, not by its own
    assert 1e-4 < abs(x.mean()) < 0.1


@needs("mnist")
def test_the_files_of_another_data_set_are_refused():
    directory = DATA / "mnist"
    assert len(load("mnist", directory).test) == 10000  # directly in the directory: both layouts are found
    with pytest.raises(DataError, match="holds mnist, expected fashion-mnist"):
        load("fashion-mnist", directory)


@needs("tinyshakespeare")
def test_tiny_shakespeare():
    data = load("tinyshakespeare", DATA, length=100)
    text = (DATA / "tinyshakespeare" / "input.txt").read_bytes()
    x, y = data.train.batch(np.array([0, 7]))
    assert x.dtype == y.dtype == np.int64
    assert bytes(x[1].astype(np.uint8)) == text[700:800] and bytes(y[1].astype(np.uint8)) == text[701:801]
    x, _ = data.test.batch(slice(0, 1))
    cut = len(text) * 9 // 10
    assert bytes(x[0].astype(np.uint8)) == text[cut : cut + 100]
    assert data.classes == 256 and data.in_shape == (100,) and data.train.mapped


def test_the_standard_library_is_a_text():
    data = load("stdlib", length=64)
    assert 64 * len(data.train) > 5e6
    x, y = data.train.batch(slice(10, 12))
    assert np.array_equal(x.ravel()[1:], y.ravel()[:-1])
    assert data.train.x.base is not None and data.train.y.base is not None  # views: the text is there once


def test_text_of_a_directory_and_of_a_file(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"later" * 10)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_bytes(b"last" * 10)
    (tmp_path / "a.md").write_bytes(b"first" * 10)
    (tmp_path / "picture.png").write_bytes(b"not text")
    whole = b"first" * 10 + b"\0" + b"later" * 10 + b"\0" + b"last" * 10 + b"\0"
    for place, text in ((tmp_path, whole), (tmp_path / "b.txt", b"later" * 10)):
        data = load(f"text:{place}", length=3)
        cut = len(text) * 9 // 10
        assert bytes(data.train.x.ravel()) == text[: (cut - 1) // 3 * 3]
        assert bytes(data.test.y.ravel()) == text[cut + 1 :][: (len(text) - cut - 1) // 3 * 3]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="no text found"):
        load(f"text:{tmp_path / 'empty'}")
    with pytest.raises(DataError, match="empty"):
        load(f"text:{tmp_path / 'empty.txt'}")
    with pytest.raises(DataError, match="50 bytes are too few for samples of 64"):
        load(f"text:{tmp_path / 'b.txt'}")
    with pytest.raises(DataNotFound, match="nowhere"):
        load(f"text:{tmp_path / 'nowhere'}")


def test_arrays_from_npz(tmp_path):
    images, labels = np.arange(5 * 4 * 4, dtype=np.uint8).reshape(5, 4, 4), np.array([0, 1, 2, 1, 0])
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=np.array([3, 0]))
    data = load(tmp_path / "a.npz")
    assert data.in_shape == (4, 4, 1) and data.classes == 4  # a class that only the test has counts too
    assert np.allclose(data.train.batch()[0][..., 0] * 255, images, atol=1e-4)
    flat = load(tmp_path / "a.npz", flat=True, normalise=True, limit=3)
    assert flat.in_shape == (16,) and (len(flat.train), len(flat.test)) == (3, 2)
    assert abs(flat.train.batch()[0].mean()) < 1e-6

    values = np.linspace(0, 1, 12).reshape(4, 3)
    np.savez(tmp_path / "b.npz", x_train=values, y_train=values[:, 0], x_test=values, y_test=values[:, 1])
    data = load(tmp_path / "b.npz", dtype=np.float64)
    assert data.classes == 0 and np.array_equal(data.train.batch()[0], values)
    assert data.train.batch()[1].dtype == np.float64


def test_wrong_npz_files_are_refused(tmp_path):
    good = {
        "x_train": np.ones((2, 3)),
        "y_train": np.ones(2, int),
        "x_test": np.ones((2, 3)),
        "y_test": np.ones(2, int),
    }
    path = tmp_path / "a.npz"
    for change, message in [
        ({"y_train": np.ones(3, int)}, "2 samples but 3 targets"),
        ({"y_test": np.array([0, -1])}, "label -1"),
        ({"x_train": np.array([[0, 1, np.nan], [1, 1, 1]])}, r"x\[0\] holds a value that is not finite"),
        ({"x_train": np.array([["a"], ["b"]])}, "x_train.npy: it must hold numbers, given dtype <U1"),
        ({"x_train": np.array([None, {}])}, "x_train.npy: it holds Python objects, which is a pickle"),
        ({"x_test": np.ones((2, 4))}, r"\(4,\)"),
        ({"x_test": np.ones((0, 3)), "y_test": np.ones(0, int)}, "holds no samples"),
        ({"y_test": np.ones(2)}, "must be classes"),
        (
            {"y_train": np.ones((2, 2)), "y_test": np.ones((2, 3))},
            r"training targets have shape \(2,\), test targets \(3,\)",
        ),
        ({"x_train": np.ones((2, 3), np.uint8)}, "x must be bytes.* given x_train uint8 and x_test float64"),
    ]:
        np.savez(path, **(good | change))
        with pytest.raises(DataError, match=message) as error:
            load(path)
        assert str(path) in str(error.value)
    np.savez(path, x_train=good["x_train"])
    with pytest.raises(DataError, match="y_train"):
        load(path)
    np.savez(path, **good)
    load(path)
    content = path.read_bytes()
    damaged = content.replace(b"\xf0\x3f", b"\xf1\x3f")
    assert damaged != content
    for wrong in (b"", b"not a zip file", content[: len(content) // 2], damaged):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"a\.npz") as error:
            load(path)
        assert "pickle.load" not in str(error.value), "no advice to unpickle what somebody sent"
    with pytest.raises(DataNotFound, match=r"b\.npz"):
        load(tmp_path / "b.npz")


def test_a_data_set_larger_than_memory_is_read_where_needed(tmp_path):
    count, shape = 500_000, (224, 224, 3)  # 75 GB of which the file system stores what is written
    x = np.lib.format.open_memmap(tmp_path / "x_train.npy", "w+", np.uint8, (count, *shape))
    x[123_456] = 255
    np.save(tmp_path / "y_train.npy", np.arange(count) % 1000)
    np.save(tmp_path / "x_test.npy", np.zeros((5, *shape), np.uint8))
    np.save(tmp_path / "y_test.npy", np.arange(5))
    del x
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = load(tmp_path)
    x, y = data.train.batch(np.array([5, 123_456, 499_999]))
    assert x[:, 0, 0, 0].tolist() == [0, 1, 0] and x[1].min() == 1 and y.tolist() == [5, 456, 999]
    assert data.train.mapped and data.train.head(10).mapped
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_synthetic_images_and_spirals():
    data = load("synthetic:6x5x3")
    assert data.in_shape == (6, 5, 3) and data.classes == 1000
    assert np.array_equal(data.train.x, load("synthetic:6x5x3").train.x)  # the same each time
    assert not np.array_equal(data.train.x[:64], data.test.x)
    assert load("synthetic", limit=2).in_shape == (224, 224, 3)

    data = load("spirals")
    x, y = data.train.batch()
    assert x.shape == (1500, 2) and np.bincount(y).tolist() == [500] * 3
    assert np.abs(x).max() < 1.2
    # No line separates them: the best linear map gets little more than chance.
    a = np.c_[x, np.ones(len(x))]
    linear = np.linalg.lstsq(a, np.eye(3)[y], rcond=None)[0]
    assert ((a @ linear).argmax(1) == y).mean() < 0.7


def test_a_missing_data_set_names_the_way_out(tmp_path, monkeypatch):
    for name in ("mnist", "fashion-mnist", "cifar10", "cifar100", "tinyshakespeare"):
        with pytest.raises(DataNotFound) as error:
            load(name, tmp_path)
        assert f"python scripts/get_data.py {name} --data-dir {tmp_path}" in str(error.value)
        assert "--data digits" in str(error.value)
    monkeypatch.setenv("RINGPROP_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(DataNotFound, match="elsewhere"):
        load("mnist")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").touch()
    with pytest.raises(DataNotFound, match="no train-labels-idx1-ubyte, t10k-images") as error:
        load("mnist", tmp_path)
    assert "train-images" not in str(error.value)  # that one is there
    with pytest.raises(DataError, match="no data set 'mnits'; known: digits, mnist"):
        load("mnits")


def write_cifar(path, labels, label_bytes=1):
    """Records whose pixel at channel c, row h, column w is (c * 50 + h + w + label) % 256."""
    c, h, w = np.ogrid[:3, :32, :32]
    with open(path, "wb") as file:
        for label in labels:
            file.write(bytes([7] * (label_bytes - 1) + [label]))
            file.write(((c * 50 + h + w + label) % 256).astype(np.uint8).tobytes())


def test_cifar(tmp_path):
    for i in range(1, 6):
        write_cifar(tmp_path / f"data_batch_{i}.bin", [i, i + 1])
    write_cifar(tmp_path / "test_batch.bin", [9])
    data = load("cifar10", tmp_path)
    assert data.in_shape == (32, 32, 3) and data.class_names[9] == "truck"
    assert data.train.y.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    n, h, w, c = 3, 30, 4, 2
    assert data.train.x[n, h, w, c] == c * 50 + h + w + data.train.y[n]
    (tmp_path / "cifar100").mkdir()
    write_cifar(tmp_path / "cifar100" / "train.bin", [99, 0], 2)
    write_cifar(tmp_path / "cifar100" / "test.bin", [50], 2)
    (tmp_path / "cifar100" / "fine_label_names.txt").write_text("\n".join(f"name{i}" for i in range(100)))
    data = load("cifar100", tmp_path)
    assert data.train.y.tolist() == [99, 0] and data.class_names[99] == "name99"

    write_cifar(tmp_path / "data_batch_3.bin", [3, 10])
    with pytest.raises(DataError, match=r"data_batch_3.bin: label 10 of sample 1: expected 0 to 9"):
        load("cifar10", tmp_path)
    for length in (5000, 0):
        (tmp_path / "data_batch_3.bin").write_bytes(b"\0" * length)
        with pytest.raises(DataError, match=rf"data_batch_3.bin: .* records of 3073 bytes, given {length}"):
            load("cifar10", tmp_path)


def test_labels_of_a_data_set_are_checked():
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(DataError, match=r"toy.*3"):
        Dataset(x, np.array([0, 1, 3]), "toy", classes=3)
    with pytest.raises(DataError, match=r"toy.*-1"):
        Dataset(x, np.array([-1, -1, -1]), "toy")
    with pytest.raises(DataError, match="labels of 3 classes must be integers, given float64"):
        Dataset(x, np.array([0.0, 1.0, 2.0]), "toy", classes=3)
    with pytest.raises(DataError, match="2 classes but 1 class names"):
        Dataset(x, np.array([0, 1, 1]), "toy", class_names=["one"])
    with pytest.raises(DataError, match="cannot be limited to 0"):
        Dataset(x, np.array([0, 1, 1]), "toy").head(0)
    with pytest.raises(DataError, match="single number"):
        Dataset(np.float32(1), np.array([1]))
    with pytest.raises(DataError, match="batches must be floats"):
        Dataset(x, np.array([0, 1, 1]), dtype=np.int32)
    with pytest.raises(DataError, match="ids cannot be normalised"):
        Dataset(np.ones((3, 2), np.uint8), np.array([0, 1, 1])).normalised(0.5, 1.0)
    assert Dataset(x, np.array([True, False, True])).batch()[1].tolist() == [1, 0, 1]


def test_colour_channels_are_normalised_one_by_one_and_flatten_alike():
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (50, 4, 5, 3), np.uint8)
    x[..., 2] = 77  # a channel that never varies
    data = Dataset(x, np.zeros(50, int), scale=1 / 255, dtype=np.float64)
    some = data.normalised(*data.moments())
    got, _ = some.batch()
    want = (x / 255 - (x / 255).mean((0, 1, 2))) / np.array([*(x / 255).std((0, 1, 2))[:2], 1.0])
    assert np.abs(got - want).max() < 1e-9
    assert np.array_equal(some.flat().batch()[0], got.reshape(50, -1))
    assert np.abs(some.batch(dtype=np.float32)[0] - want).max() < 1e-6
    assert some.flat().batch(slice(2, 5), np.float32)[0].dtype == np.float32
    # The moments of data in several chunks are those of all of it.
    large = np.repeat(x, 1500, axis=0)
    mean, std = Dataset(large, np.zeros(len(large), int), scale=1 / 255).moments()
    assert large.size > 2**22 and np.allclose((mean, std), data.moments(), rtol=1e-9, atol=0)
    assert np.array_equal(data.batch()[0], x * (1 / 255))  # the old one is what it was


def test_training_and_test_samples_must_be_alike():
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(DataError, match="toy"):
        Data(Dataset(x, np.arange(3)), Dataset(x[:, :1], np.arange(3)), "toy")


def test_importing_data_touches_no_mpi():
    program = "import sys, nn.data; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_mnist_layouts_compressed_or_not(tmp_path):
    import gzip

    images = np.arange(3 * 28 * 28, dtype=np.uint32).reshape(3, 28, 28).astype(np.uint8)
    for part in ("train", "t10k"):
        content = struct.pack(">4I", 2051, 3, 28, 28) + images.tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 3) + bytes([1, 9, 0]))
    data = load("mnist", tmp_path)
    assert np.array_equal(data.test.x[..., 0], images) and data.test.y.tolist() == [1, 9, 0]
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 2) + bytes([1, 9]))
    with pytest.raises(DataError, match=r"holds 3 images, but .*train-labels-idx1-ubyte 2 labels"):
        load("mnist", tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 3) + bytes([1, 12, 1]))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.*12"):
        load("mnist", tmp_path)


def test_a_label_that_makes_too_many_classes_is_refused(tmp_path):
    x, y = np.zeros((4, 3)), np.array([0, 1, 49_000_000, 1])
    np.savez(tmp_path / "stray.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match="the largest label is 49000000, for 8 samples"):
        load(str(tmp_path / "stray.npz"))
