"""Data sets by name: `load("digits")` is in the package, the others are files in a directory.

    digits                               1,797 scans of 8x8, in the package
    mnist, fashion-mnist                 IDX files, gzip-compressed or not
    cifar10, cifar100                    the binary version
    FILE.npz, DIRECTORY                  arrays x_train, y_train, x_test, y_test, perhaps x_validation and
                                         y_validation; .npy files of a directory are memory-mapped
    stdlib, tinyshakespeare, text:PATH   bytes for a language model
    synthetic, synthetic:HxWxC           random images, of ImageNet's shape unless given
    spirals                              points in the plane

The directory is `data_dir`, else $RINGPROP_DATA, else ./data. Nothing is ever downloaded here:
scripts/get_data.py does.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import zipfile
from pathlib import Path

import numpy as np

from nn import reading
from nn.data.arrays import Archive, ArrayError, check_memory, map_npy, nbytes

from .cifar import CIFAR10_CLASSES, read_cifar
from .dataset import Data, DataError, DataNotFound, Dataset, check_labels
from .idx import read_idx
from .masking import masked
from .splitting import hold_out
from .synthetic import random_images, spirals
from .text import read_standard_library, read_text, text_datasets

NAMES = (
    "digits", "mnist", "fashion-mnist", "cifar10", "cifar100",
    "stdlib", "tinyshakespeare", "synthetic", "spirals",
)  # fmt: skip
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
# Both data sets have files of the same names: the first training labels distinguish them.
FIRST_LABELS = {
    "mnist": (5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    "fashion-mnist": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
}
TEXTS = ("stdlib", "tinyshakespeare", "text:")  # how the names of texts begin
BYTE = 1 / 255


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    *,
    limit: int | None = None,
    flat: bool = False,
    normalise: bool = False,
    length: int = 64,
    mask: float = 0.0,
    validation: float = 0.0,
    seed: int = 0,
    dtype=np.float32,
) -> Data:
    """Return a data set by name (see the top of this file).

    Parameters
    ----------
    name : str or Path
        One of NAMES, text:PATH, synthetic:HxWxC, or the path of an .npz file or of a directory of .npy files.
    data_dir : str, Path or None
        Where the files are; None takes $RINGPROP_DATA, else ./data.
    limit : int or None
        The number of samples to keep of each split, the first ones.
    flat : bool
        Images as vectors.
    normalise : bool
        Subtract the mean and divide by the standard deviation of each channel of the training samples; else
        pixels lie in 0 .. 1.
    length : int
        Bytes in a sample of text.
    mask : float
        Mask that fraction of the ids, which are then the targets (masking.py); 0 for the next id as the target.
    validation : float
        Training samples to hold out as validation data: a fraction of them below 1, else their number; 0 for none. Of a
        text they are its last ones, else drawn by the seed. A data set with a validation split of its own gives that.
    seed : int
        Draws the samples that are held out.
    dtype : float32 or float64
        That of the batches.

    Returns
    -------
    Data

    Raises
    ------
    DataNotFound
        The files are not there; the message says what to run.
    DataError
        They are there and wrong, or there is no data set of that name.

    Examples
    --------
    >>> import nn
    >>> data = nn.data.load("digits", flat=True)
    >>> data.in_shape, data.classes
    ((64,), 10)
    """
    directory = Path(os.path.expanduser(data_dir or os.environ.get("RINGPROP_DATA") or "data"))
    train, test, *own = _open(str(name), directory, length, dtype)
    splits = [train, test]
    if validation and own:
        splits += own
    elif validation:
        train, held_out = hold_out(train, validation, seed, in_order=str(name).startswith(TEXTS))
        splits = [train, test, held_out]
    if limit is not None:
        splits = [split.head(limit) for split in splits]
    if normalise:
        moments = splits[0].moments()
        splits = [split.normalised(*moments) for split in splits]
    if flat:
        splits = [split.flat() for split in splits]
    if mask:
        splits = [masked(split, mask, seed=i) for i, split in enumerate(splits)]
    return Data(*splits[:2], str(name), *splits[2:])


def _open(name: str, directory: Path, length: int, dtype) -> list[Dataset]:
    if name == "digits":
        return _digits(dtype)
    if name in FIRST_LABELS:
        return _mnist(name, directory, dtype)
    if name in ("cifar10", "cifar100"):
        return _cifar(name, directory, dtype)
    if name == "stdlib":
        return text_datasets(read_standard_library(), name, length, dtype=dtype)
    if name == "tinyshakespeare":
        path = _find(name, directory, ["input.txt"])["input.txt"]
        return text_datasets(read_text(path), name, length, dtype=dtype)
    if name.startswith("text:"):
        path = Path(os.path.expanduser(name.removeprefix("text:")))
        if not path.exists():
            raise DataNotFound(f"{path}: no such file or directory; --data text:PATH names a text or a directory")
        return text_datasets(read_text(path), name, length, dtype=dtype)
    if re.fullmatch(r"synthetic(:\d+x\d+x\d+)?", name):
        shape = tuple(map(int, name.removeprefix("synthetic:").split("x"))) if ":" in name else (224, 224, 3)
        counts = 256, 64
        try:
            check_memory(sum(counts) * math.prod(shape))
        except ArrayError as error:
            raise DataError(f"{name}: {error}") from error
        return [
            Dataset(*random_images(count, shape, 1000, seed), name, classes=1000, scale=BYTE, dtype=dtype)
            for seed, count in enumerate(counts)
        ]
    if name == "spirals":
        return [Dataset(*spirals(count, seed=seed), name, dtype=dtype) for seed, count in enumerate((1500, 300))]
    return _arrays(name, dtype)


def _digits(dtype) -> list[Dataset]:
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, labels = file["images"][..., None], file["labels"]
    # Every fifth of each class, in the order of the file, is for the test: 1437 and 360, no random numbers.
    test = np.zeros(len(labels), bool)
    test[np.argsort(labels, kind="stable")[::5]] = True
    return [
        Dataset(images[chosen], labels[chosen], "digits", classes=10, scale=1 / 16, dtype=dtype)
        for chosen in (~test, test)
    ]


def _mnist(name: str, directory: Path, dtype) -> list[Dataset]:
    wanted = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    paths = _find(name, directory, wanted, suffixes=(".gz", ""))
    pairs = []
    for part in ("train", "t10k"):
        images = read_idx(paths[f"{part}-images-idx3-ubyte"], 3, np.uint8)[..., None]
        labels = read_idx(paths[f"{part}-labels-idx1-ubyte"], 1, np.uint8)
        if len(images) != len(labels):
            files = paths[f"{part}-images-idx3-ubyte"], paths[f"{part}-labels-idx1-ubyte"]
            raise DataError(f"{files[0]} holds {len(images)} images, but {files[1]} {len(labels)} labels")
        check_labels(labels, 10, paths[f"{part}-labels-idx1-ubyte"])
        pairs.append((images, labels))
    for other, first in FIRST_LABELS.items():
        if other != name and tuple(pairs[0][1][:10]) == first:
            raise DataError(f"{paths['train-labels-idx1-ubyte'].parent} holds {other}, expected {name}")
    names = FASHION_CLASSES if name == "fashion-mnist" else ()
    return [Dataset(x, y, name, classes=10, class_names=names, scale=BYTE, dtype=dtype) for x, y in pairs]


def _cifar(name: str, directory: Path, dtype) -> list[Dataset]:
    if name == "cifar10":
        files, label_bytes, classes = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"], 1, 10
    else:
        files, label_bytes, classes = ["train.bin", "test.bin", "fine_label_names.txt"], 2, 100
    paths = _find(name, directory, files)
    names = CIFAR10_CLASSES
    if name == "cifar100":
        path = paths[files.pop()]
        names = reading.read_text(path, reading.OPTIONS, errors="replace").split()
        if len(names) != classes:
            raise DataError(f"{path}: expected the names of {classes} classes, one a line, given {len(names)}")
    splits = [paths[file] for file in files[:-1]], [paths[files[-1]]]
    return [
        Dataset(
            *read_cifar(split, label_bytes, classes),
            name, classes=classes, class_names=names, scale=BYTE, dtype=dtype,
        )
        for split in splits
    ]  # fmt: skip


def _arrays(name: str, dtype) -> list[Dataset]:
    """Arrays x_train, y_train, x_test, y_test of an .npz file or of .npy files in a directory; of validation, too."""
    path, keys = Path(os.path.expanduser(name)), ("x_train", "y_train", "x_test", "y_test")
    own = "x_validation", "y_validation"
    if path.suffix != ".npz" and not path.is_dir():
        raise DataError(
            f"no data set {name!r}; known: {', '.join(NAMES)}, synthetic:HxWxC, text:PATH, "
            "an .npz file, or a directory of .npy files"
        )
    if not path.exists():
        raise DataNotFound(f"{path}: no such file; an .npz file must hold {', '.join(keys)}")
    if path.is_file() and not zipfile.is_zipfile(path):
        raise DataError(f"{path}: not an .npz file; expected the arrays {', '.join(keys)}")
    where = path
    try:
        if path.is_dir():
            keys += own * any((path / f"{key}.npy").exists() for key in own)
            arrays = [map_npy(where := path / f"{key}.npy") for key in keys]
        else:
            with contextlib.closing(Archive(path)) as file:
                keys += own * any(key in file for key in own)
                check_memory(sum(nbytes(*file.check(key)) for key in keys))
                arrays = [file[key] for key in keys]
    except KeyError as error:
        raise DataError(f"{path}: holds no array {error}; expected {', '.join(keys)}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no {where.name}; expected the arrays {', '.join(keys)}") from error
    except ArrayError as error:
        raise DataError(f"{where}: {error}") from error
    for key, array in zip(keys, arrays, strict=True):
        if array.ndim == 0:
            raise DataError(f"{path}: {key} must have a first axis of samples, given a single number")
    xs, ys = arrays[::2], arrays[1::2]
    for key, y in zip(keys[1::2], ys, strict=True):
        if what := _store_instead(key, y, xs[0]):
            raise DataError(f"{path}: {key} {y.dtype}{y.shape} must hold one class a sample: {what}")
    if len({y.dtype.kind == "f" for y in ys}) > 1:
        kinds = " and ".join(f"{key} {y.dtype}" for key, y in zip(keys[1::2], ys, strict=True))
        raise DataError(f"{path}: y must be classes (whole numbers) or values (floats) in all splits, given {kinds}")
    if len({x.dtype == np.uint8 for x in xs}) > 1:
        kinds = " and ".join(f"{key} {x.dtype}" for key, x in zip(keys[::2], xs, strict=True))
        raise DataError(f"{path}: x must be bytes, which are divided by 255, in all splits or in none, given {kinds}")
    integer = ys[0].dtype.kind in "iu"
    classes = int(max(y.max(initial=0) for y in ys)) + 1 if integer else 0
    samples = sum(map(len, ys))
    if classes > max(1000, samples):
        raise DataError(
            f"{path}: the largest label is {classes - 1}, for {samples} samples; classes count from 0, "
            "so a network would need as many outputs. Is a label wrong, or are these values (then store floats)?"
        )
    scale = BYTE if xs[0].dtype == np.uint8 else None
    return [
        Dataset(_channels(x), _values(y), f"{path} ({part})", classes=classes, scale=scale, dtype=dtype)
        for part, x, y in zip(("train", "test", "validation"), xs, ys, strict=False)
    ]


def _store_instead(key: str, y: np.ndarray, x: np.ndarray) -> str:
    """Return what to store instead of classes that are columns or one-hot rows; '' where they are neither."""
    if y.dtype.kind not in "iub" or y.ndim != 2 or len(y) == 0:
        return ""
    ids = x.dtype.kind in "iub" and x.dtype != np.uint8  # then a target may be a sequence, too
    if y.shape[1] == 1 and not ids:
        return f"store {key}[:, 0]"
    if not ids and y.min() == 0 and y.max() == 1 and (y.sum(axis=1) == 1).all():
        return f"these rows are one-hot: store {key}.argmax(axis=1)"
    return ""


def _channels(x: np.ndarray) -> np.ndarray:
    # Grey images (n, H, W) get their channel axis; anything else is taken as it is.
    return x[..., None] if x.ndim == 3 and x.dtype == np.uint8 else x


def _values(y: np.ndarray) -> np.ndarray:
    # One value a sample is a vector of one, as a network's output is; classes stay numbers.
    return y[:, None] if y.ndim == 1 and y.dtype.kind == "f" else y


def _spellings(file: str) -> tuple[str, ...]:
    """The name of a file, and how some programs that unpack it write it: train-images.idx3-ubyte."""
    return file, re.sub(r"-(idx\d-ubyte)$", r".\1", file)


def _find(name: str, directory: Path, files: list[str], suffixes: tuple[str, ...] = ("",)) -> dict[str, Path]:
    """Path of each file, in directory/name or in directory itself; DataNotFound says what to do."""
    for folder in (directory / name, directory):
        paths = {
            file: next((p for n in _spellings(file) for s in suffixes if (p := folder / (n + s)).is_file()), None)
            for file in files
        }
        if all(paths.values()):
            return paths
        if any(paths.values()) and folder != directory:
            break  # half a data set: name what is missing there, and do not mix it with another folder's
    missing = [file for file, path in paths.items() if path is None]
    raise DataNotFound(
        f"{name} is not in {directory}: no {', '.join(missing)} in {directory / name} or {directory}.\n"
        f"Get it with:    python scripts/get_data.py {name} --data-dir {directory}\n"
        "or train on the scans that come with the package:    --data digits"
    )
