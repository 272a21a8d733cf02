"""A data set: samples x, targets y, and how stored numbers become what a network reads.

Arrays stay as they are stored (bytes, a memory map larger than memory, a view of a longer text); only a batch
is converted, so MNIST takes 47 MB and not 188. One affine map does it, batch = x * scale + shift, into which
mean and standard deviation are folded. Gathering and converting a batch costs about 0.4 us a sample of 28x28
(one core), no more than gathering ready floats.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nn.arguments import Closed


class DataError(ValueError):
    """A file or an array that is not what it should be: names it, what was expected and what was given.

    Examples
    --------
    >>> import nn
    >>> try:
    ...     nn.data.Dataset([[1.0]], [0, 1])
    ... except nn.data.DataError as error:
    ...     print(error)
    data: 1 samples but 2 targets
    """


class DataNotFound(FileNotFoundError):
    """A data set that is not on this machine; the message is what to do about it.

    Examples
    --------
    >>> import nn
    >>> try:
    ...     nn.data.load("mnist", "/nowhere")
    ... except nn.data.DataNotFound:
    ...     print("python scripts/get_data.py mnist")
    python scripts/get_data.py mnist
    """


class Dataset(Closed):
    """Samples and targets of equal length.

    Parameters
    ----------
    x : array (n, ...)
        Memory-mapped or not. Images are (n, H, W, C). Integers without a scale are ids (of words, of bytes).
    y : array (n, ...)
        Integers are classes, floats are values to regress on.
    name : str
        Name of the data in messages.
    classes : int
        0 takes the largest target plus one, where the targets are integers.
    class_names : sequence of str
        One name a class; none takes the numbers.
    scale, shift : float, array (C,) or None
        A batch is x * scale + shift.
    ignore_index : int or None
        A label that is no class: of samples that a loss with this `ignore_index` leaves out.
    dtype : float32 or float64
        That of the batches; ids and classes are int64.

    Attributes
    ----------
    mapped : bool
        Whether x is a memory map, so that reading takes time.

    Raises
    ------
    DataError
        Lengths differ, no samples, labels out of range, values that are not finite or not numbers.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> data = nn.data.Dataset([[0.0, 1.0], [2.0, 3.0]], [0, 1], classes=2)
    >>> len(data), data[1]
    (2, (array([2., 3.], dtype=float32), np.int64(1)))
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        name: str = "data",
        *,
        classes: int = 0,
        class_names: Sequence[str] = (),
        scale: float | np.ndarray | None = None,
        shift: float | np.ndarray | None = None,
        ignore_index: int | None = None,
        dtype=np.float32,
    ):
        self.name = name
        self.mapped = _is_mapped(x)
        try:
            self.x, self.y = np.asarray(x), np.asarray(y)
        except ValueError as error:  # lists of lists of different lengths
            raise DataError(f"{name}: samples must be arrays of one shape, and so must targets ({error})") from None
        self.scale, self.shift, self.ignore_index = scale, shift, ignore_index
        self.dtype = np.dtype(dtype)
        self._check()
        if self.y.dtype.kind == "b":
            self.y = self.y.view(np.uint8)
        if not classes and self.y.dtype.kind in "iu":
            classes = max(1, int(self._labels().max(initial=0)) + 1)
        self.classes, self._class_names = classes, tuple(class_names)
        self._check_targets()

    def _check(self):
        x, y = self.x, self.y
        for axis, a in (("x", x), ("y", y)):
            if a.dtype.kind not in "biuf":
                classes = ": np.unique(y, return_inverse=True)[1] numbers the classes" if axis == "y" else ""
                raise DataError(f"{self.name}: {axis} must hold numbers, got dtype {a.dtype}{classes}")
            if a.ndim == 0:
                raise DataError(f"{self.name}: {axis} must have a first axis of samples, got a single number")
            if 0 in a.shape[1:]:
                raise DataError(f"{self.name}: {axis} holds nothing for a sample, given shape {a.shape}")
        if len(x) != len(y):
            raise DataError(f"{self.name}: {len(x)} samples but {len(y)} targets")
        if len(x) == 0:
            raise DataError(f"{self.name}: holds no samples")
        if self.dtype.kind != "f":
            raise DataError(f"{self.name}: batches must be floats, got dtype {self.dtype}")
        for name, a in (("scale", self.scale), ("shift", self.shift)):
            channels = 1 if a is None else np.size(a)
            if channels not in {1, *x.shape[1:][-1:]} or (a is not None and not _are_numbers(a)):
                raise DataError(
                    f"{self.name}: {name} must be a number, or one for each of the last axis of {x.shape[1:]}, "
                    f"given {a!r:.80}"
                )
        for axis, a in (("x", x), ("y", y)):
            if a.dtype.kind == "f" and not self.mapped and not np.isfinite(a).all():
                bad = int(np.argmin(np.isfinite(a.reshape(len(a), -1)).all(axis=1)))
                raise DataError(f"{self.name}: {axis}[{bad}] holds a value that is not finite")

    def _check_targets(self):
        if not isinstance(self.classes, int | np.integer) or self.classes < 0:
            raise DataError(f"{self.name}: classes must be their number, given {self.classes!r:.80}")
        if self.classes and self.y.dtype.kind == "f":
            raise DataError(f"{self.name}: labels of {self.classes} classes must be integers, given {self.y.dtype}")
        if self.classes and self.y.ndim == 1:
            check_labels(self.y, self.classes, self.name, self.ignore_index)
        if self._class_names and len(self._class_names) != self.classes:
            raise DataError(f"{self.name}: {self.classes} classes but {len(self._class_names)} class names")

    def first_bad(self) -> int | None:
        """Index of the first sample with a value that is not finite; a memory map is looked through for it."""
        if self.x.dtype.kind != "f":
            return None
        for lo in range(0, len(self), 256):
            good = np.isfinite(self.x[lo : lo + 256].reshape(len(self.x[lo : lo + 256]), -1)).all(axis=1)
            if not good.all():
                return lo + int(np.argmin(good))
        return None

    def _labels(self) -> np.ndarray:
        """Targets without those that are to be ignored."""
        return self.y if self.ignore_index is None else self.y[self.y != self.ignore_index]

    def __len__(self) -> int:
        return len(self.x)

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "__getitem__" in vars(cls) and "batch" not in vars(cls):
            raise TypeError(
                f"{cls.__name__}: a Loader reads through batch(indices, dtype=None) -> (x, y), and never calls "
                "__getitem__: define that, or give nn.Loader a transform"
            )
        for name, argument in (("batch", "indices"), ("convert", "x"), ("targets", "y")):
            try:
                inspect.signature(getattr(cls, name)).bind(None, None, None)  # self, the argument, and dtype
            except TypeError:
                raise TypeError(
                    f"{cls.__name__}.{name}: a Loader calls {name}({argument}, dtype), with the dtype of its batches: "
                    f"def {name}(self, {argument}, dtype=None)"
                ) from None

    def __getitem__(self, index):
        """Return (x, y) of one sample, or of several for a slice or an index array, converted as in a batch."""
        if not isinstance(index, int | np.integer):
            return self.batch(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name}: sample {index} of {len(self)}")
        x, y = self.batch(np.array([index % len(self)]))
        return x[0], y[0]

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} x {self.in_shape} {self.x.dtype}, {self.classes} classes)"

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.x.shape[1:]

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name a class; its number where none was given."""
        return self._class_names or tuple(str(i) for i in range(self.classes))

    def batch(self, indices=slice(None), dtype=None) -> tuple[np.ndarray, np.ndarray]:
        """Samples and targets at `indices` (index array or slice), converted: new arrays, yours to keep."""
        x, y = self.raw(indices)
        return self.convert(x, dtype), self.targets(y, dtype)

    def raw(self, indices) -> tuple[np.ndarray, np.ndarray]:
        """Samples and targets at `indices` as stored: copies for an index array, views for a slice."""
        return _gather(self.x, indices), _gather(self.y, indices)

    def convert(self, x: np.ndarray, dtype=None) -> np.ndarray:
        """Stored samples as the network reads them: floats x * scale + shift, or ids as int64."""
        if x.dtype.kind in "biu" and self.scale is None:
            return x.astype(np.int64)
        x = x.astype(self.dtype if dtype is None else dtype, order="C")
        # A row of the image at a time: ten times as fast as one pixel's three channels at a time.
        rows = x.reshape(*x.shape[:-2], math.prod(x.shape[-2:])) if x.ndim > 2 else x
        if self.scale is not None:
            rows *= _along(rows, self.scale)
        if self.shift is not None:
            rows += _along(rows, self.shift)
        return x

    def targets(self, y: np.ndarray, dtype=None) -> np.ndarray:
        """Stored targets as a loss reads them: classes as int64, values as floats."""
        if y.dtype.kind in "biu":
            return y.astype(np.int64)
        return y.astype(self.dtype if dtype is None else dtype)

    def head(self, count: int) -> Dataset:
        """Return the first `count` samples, as a view; all where there are fewer."""
        if count < 1:
            raise DataError(f"{self.name}: cannot be limited to {count} samples; give at least 1")
        some = copy.copy(self)
        some.x, some.y = self.x[:count], self.y[:count]
        return some

    def flat(self) -> Dataset:
        """Return every sample as one vector (H * W * C,), as a view."""
        some = copy.copy(self)
        some.x = self.x.reshape(len(self), -1)
        some.scale, some.shift = (None if a is None else _along(some.x, a) for a in (self.scale, self.shift))
        return some

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel (the last axis) over all converted samples.

        Two float64 arrays (C,), summed in chunks of 32 MiB, so that the data may be larger than memory.
        """
        # Distances from the first pixel: little is cancelled, and a channel that never varies gives exactly 0.
        pivot = self.convert(self.x[:1], np.float64).reshape(-1, self.x.shape[-1])[0]
        total = squares = 0.0
        chunk = max(1, 2**22 // max(1, self.x[0].size))
        for lo in range(0, len(self), chunk):
            x = self.convert(self.x[lo : lo + chunk], np.float64)
            x = x.reshape(-1, x.shape[-1]) - pivot
            total = total + x.sum(axis=0)
            squares = squares + np.einsum("ij,ij->j", x, x)
        count = self.x.size // self.x.shape[-1]
        mean = total / count
        return pivot + mean, np.sqrt(np.maximum(squares / count - mean * mean, 0.0))

    def normalised(self, mean, std) -> Dataset:
        """Return (converted - mean) / std, folded into scale and shift; std 1 for a channel that never varies."""
        if self.x.dtype.kind in "biu" and self.scale is None:
            raise DataError(f"{self.name}: ids cannot be normalised")
        mean, std = np.asarray(mean, float), np.asarray(std, float)
        std = np.where(std > 0, std, 1.0)
        scale = 1.0 if self.scale is None else self.scale
        shift = 0.0 if self.shift is None else self.shift
        some = copy.copy(self)
        some.scale, some.shift = scale / std, (shift - mean) / std
        return some


@dataclass(frozen=True)
class Data:
    """Training, test and validation splits of one data set; validation is None where there is none.

    Examples
    --------
    >>> import nn
    >>> data = nn.data.load("digits", validation=0.1)
    >>> len(data.train), len(data.validation), len(data.test), data.in_shape, data.classes
    (1293, 144, 360, (8, 8, 1), 10)
    """

    train: Dataset
    test: Dataset
    name: str
    validation: Dataset | None = None

    def __post_init__(self):
        for split in ("test", "validation"):
            other = getattr(self, split)
            if other is None:
                continue
            if self.train.in_shape != other.in_shape:
                raise DataError(
                    f"{self.name}: training samples have shape {self.train.in_shape}, {split} samples {other.in_shape}"
                )
            if self.train.y.shape[1:] != other.y.shape[1:]:  # refused here, before any training
                raise DataError(
                    f"{self.name}: training targets have shape {self.train.y.shape[1:]}, {split} targets "
                    f"{other.y.shape[1:]}"
                )

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.train.in_shape

    @property
    def classes(self) -> int:
        """Number of classes; of a text, the size of its vocabulary; 0 for values to regress on."""
        return self.train.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name a class."""
        return self.train.class_names


def instead_of_dataset(value) -> str:
    """Return what to do with something that is no Dataset, in words."""
    if isinstance(value, Data):
        return f"{value.name} is a Data, of several parts: give {value.name}.train, .validation or .test"
    if isinstance(value, tuple | list) and len(value) == 2:
        return f"expected a Dataset, given a {type(value).__name__} of two: nn.data.Dataset(x, y) makes one"
    if isinstance(value, np.ndarray):
        return "expected a Dataset, given an array: nn.data.Dataset(x, y) makes one, of samples and targets"
    if hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | list | tuple | dict):
        pairs = "(given[i] for i in range(len(given)))"
        return (
            f"expected a Dataset, given a {type(value).__name__}: if given[i] is a pair (x, y), "
            f"nn.data.Dataset(*map(np.stack, zip(*{pairs}))) makes one"
        )
    return f"expected a Dataset, given {value!r:.80}"


def check_labels(labels: np.ndarray, classes: int, where, ignore_index: int | None = None) -> None:
    """Raise DataError, which names the first wrong label and `where` it is, unless all are 0 .. classes - 1.

    `ignore_index` is allowed, too.
    """
    wrong = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        at = int(np.argmax(wrong))
        hint = ""
        if labels[at] < 0:
            hint = (
                f". Samples to leave out: a loss and a Dataset with ignore_index={labels[at]}. "
                "Values to regress on: floats"
            )
        raise DataError(
            f"{where}: label {labels[at]} of sample {at}: expected 0 to {classes - 1} ({classes} classes){hint}"
        )


def _along(rows: np.ndarray, channels) -> np.ndarray:
    """Values per channel repeated along the last axis of rows, in their dtype where that is a float."""
    dtype = rows.dtype if rows.dtype.kind == "f" else float
    channels = np.asarray(channels, dtype)
    return np.tile(channels, rows.shape[-1] // channels.size) if channels.size > 1 else channels


def _gather(a: np.ndarray, indices) -> np.ndarray:
    # take copies rows fastest, but would first copy the whole of an array that is not contiguous, and reads True as 1.
    if isinstance(indices, slice) or not a.flags.c_contiguous or np.asarray(indices).dtype == bool:
        return a[indices]
    return a.take(indices, axis=0)


def _are_numbers(a) -> bool:
    """Whether a number, or all of some, are finite."""
    values = np.asarray(a)
    return values.dtype.kind in "biuf" and bool(np.isfinite(values).all())


def _is_mapped(a) -> bool:
    while a is not None:
        if isinstance(a, np.memmap):
            return True
        a = getattr(a, "base", None)
    return False
