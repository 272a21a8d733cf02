"""Validation data: training samples that are held out, to choose by (when to stop, which checkpoint, which rate).

A model that was chosen by a data set scores too optimistically on it. So there are three sets:
train on the first, choose by the second, and look at the test data once, at the end. Source: Hastie, Tibshirani,
Friedman, The Elements of Statistical Learning, 2009, section 7.2.
"""

from __future__ import annotations

import copy

import numpy as np

from .dataset import DataError, Dataset, instead_of_dataset


def hold_out(train: Dataset, validation: float, seed: int = 0, in_order: bool = False) -> tuple[Dataset, Dataset]:
    """Return (training data, validation data), both in the order of the data set.

    Parameters
    ----------
    train : Dataset
        Copied in two; of a memory map both are views.
    validation : float
        A fraction of the samples where it is below 1 (at least one sample), else their number.
    seed : int
        Draws the samples.
        Where targets are one class each, every class has its proportion, and is on both sides if it has two samples and
        there is room.
    in_order : bool
        The last samples and not drawn ones: of a text, where a drawn sample stands between two that were learned.

    Raises
    ------
    DataError
        A number that is not whole or not positive, or one that leaves nothing to train on.

    Examples
    --------
    >>> import nn
    >>> train, validation = nn.data.hold_out(nn.data.load("digits").train, 0.25)
    >>> len(train), len(validation)
    (1078, 359)
    """
    if not isinstance(train, Dataset):
        raise TypeError(f"hold_out: {instead_of_dataset(train)}")
    number = isinstance(validation, int | float | np.number)
    if not number or not (0 < validation < 1 or (validation >= 1 and validation % 1 == 0)):
        shown = f"{validation:g}" if number else f"{validation!r:.80}"
        raise DataError(
            f"{train.name}: validation must be a fraction above 0 and below 1, or a number of samples, given {shown}"
        )
    count = max(1, round(validation * len(train))) if validation < 1 else int(validation)
    rest = len(train) - count
    if rest < 1:
        raise DataError(
            f"{train.name}: of {len(train):,} training samples {count:,} cannot be held out for validation: "
            "nothing would be left to train on; hold out fewer, or 0 for none"
        )
    if in_order:
        return _subset(train, slice(rest)), _subset(train, slice(rest, None))
    drawn = np.random.default_rng(np.random.SeedSequence([seed, *b"validation"])).permutation(len(train))
    if train.y.dtype.kind in "iu" and train.y.ndim == 1:
        drawn = _stratified(np.asarray(train.y)[drawn], count, drawn)
    return _subset(train, np.sort(drawn[count:])), _subset(train, np.sort(drawn[:count]))


def _stratified(labels: np.ndarray, count: int, drawn: np.ndarray) -> np.ndarray:
    """Reorder samples such that the first `count` have every class's proportion, rounded by largest remainders.

    Parameters
    ----------
    labels : (N,) integers
        Labels of the samples, in the order in which they were drawn.
    drawn : (N,) integers
        The samples in that order.
    """
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    proportional, caps = count * sizes / len(labels), sizes - 1  # one of each is left to train on
    caps = caps if caps.sum() >= count else sizes
    first = np.zeros(len(sizes), int)
    first[classes[::-1]] = np.arange(len(labels))[::-1]  # where each class comes first: breaks ties as drawn
    quotas = np.minimum(np.floor(proportional).astype(int), caps)
    while (missing := count - quotas.sum()) > 0:  # classes that would be missing come before larger remainders
        order = np.lexsort((first, quotas - proportional, quotas > 0))
        quotas[order[quotas[order] < caps[order]][:missing]] += 1
    for absent in np.flatnonzero((quotas == 0) & (caps > 0)):
        if quotas.max() > 1:
            quotas[quotas.argmax()] -= 1
            quotas[absent] = 1
    order = np.argsort(classes, kind="stable")
    number = np.empty(len(labels), int)  # of a sample in its class
    number[order] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = number < quotas[classes]
    return np.concatenate([drawn[chosen], drawn[~chosen]])


def _subset(dataset: Dataset, rows: slice | np.ndarray) -> Dataset:
    """The samples at `rows`."""
    some = copy.copy(dataset)
    view = Rows if dataset.mapped and not isinstance(rows, slice) else lambda array, rows: array[rows]
    some.x, some.y = view(dataset.x, rows), view(dataset.y, rows)
    return some


class Rows:
    """Some rows of an array that may be larger than memory: what is asked for is copied, the rest never read.

    It has of an array what Dataset and Loader use.
    """

    def __init__(self, array: np.ndarray, rows: np.ndarray):
        self.array, self.rows = array, rows
        self.dtype, self.ndim, self.flags = array.dtype, array.ndim, array.flags
        self.shape = (len(rows), *array.shape[1:])
        self.size = int(np.prod(self.shape, dtype=object))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices) -> np.ndarray:
        return self.array[self.rows[indices]]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def take(self, indices: np.ndarray, axis: int = 0) -> np.ndarray:
        return self.array.take(self.rows[indices], axis)

    def reshape(self, *shape: int) -> Rows:
        """Reshape every row; the first axis stays."""
        return Rows(self.array.reshape(len(self.array), *shape[1:]), self.rows)
