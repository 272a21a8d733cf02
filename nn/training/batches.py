"""Batches of what `fit` and `evaluate` take as data: a Loader, a Dataset, arrays (x, y), or an iterable of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nn.core.network import Network, shape_hint
from nn.data.dataset import Data, DataError, Dataset, instead_of_dataset
from nn.data.loader import Loader
from nn.layers.batch_normalization import BatchNorm
from nn.training.prediction import BATCH, as_samples

TRAINING_BATCH = 32  # samples of a step, unless given


def batches(data: Any, trainer: Any, training: bool, what: str, batch: int | None = None) -> Any:
    """Return a loader of this trainer's shard of every batch: `data` itself if it has `epoch`, as a Loader has.

    Parameters
    ----------
    data : Loader, Dataset or (x, y)
        Arrays (N, *in_shape) and (N, ...). Float targets (N,) become (N, 1); integer targets become floats where the
        loss compares values.
    trainer : Trainer
        Its seed decides the order of samples.
    training : bool
        Whether they are to be trained with: then samples come in the orders of epochs.
    what : str
        Name of the data in messages.
    batch : int or None
        Samples of a global batch; None takes the usual number. Data that come in batches have their own.

    Raises
    ------
    TypeError, DataError, ShapeError
        `data` is something else; the message says how it becomes data for this network. Or it has batches of its own,
        and `batch` is given.
    ValueError
        The Loader is for another shard than this trainer's.
    """
    if hasattr(data, "epoch") and callable(data.epoch):
        if isinstance(data, Loader):
            _check_shape(data.dataset, trainer, what)
            _check_shard(data.shard, trainer, what)
        _refuse_batch(data, batch, what)
        return data
    pairs = isinstance(data, list) and all(isinstance(pair, tuple) for pair in data)  # of batches
    if isinstance(data, tuple | list) and len(data) == 2 and not pairs:
        data = _of_arrays(*data, what, trainer)
    if isinstance(data, Iterable) and not isinstance(data, Dataset | np.ndarray | tuple | str | Mapping):
        _refuse_batch(data, batch, what)
        return Batches(data, trainer, what)
    if not isinstance(data, Dataset):
        reason = instead_of_dataset(data) if isinstance(data, Data) else f"given {_kind(data)}"
        raise TypeError(f"{what}: expected arrays (x, y), a Dataset or a Loader; {reason}")
    _check_shape(data, trainer, what)
    if batch is None:
        batch = TRAINING_BATCH if training else BATCH
    return Loader(data, batch, trainer.seed, training, trainer.shard, dtype=trainer.network.dtype)


def _refuse_batch(data: Any, batch: int | None, what: str) -> None:
    """Refuse a size of batches for data that come in batches."""
    if batch is not None:
        raise TypeError(f"{what}: a {type(data).__name__} has batches of its own: leave out batch={batch!r:.80}")


class Batches:
    """Batches (x, y) of any iterable, such as another library's loader, as `fit` reads them.

    Parameters
    ----------
    data : iterable of (x, y), with a length
        Iterated over once an epoch. x and y are arrays, or what np.asarray takes.
    trainer : Trainer
        A trainer of one process: only a Loader cuts global batches into shards.
    what : str
        Name of the data in messages.
    """

    def __init__(self, data: Iterable, trainer: Any, what: str):
        if iter(data) is data or not hasattr(data, "__len__"):
            raise TypeError(
                f"{what}: a {type(data).__name__} has one epoch and no length: give a list of it, or a Loader"
            )
        if trainer.shard != (0, 1):
            raise TypeError(f"{what}: this trainer takes shards of batches, from a Loader with shard=trainer.shard")
        self.data, self.trainer, self.what = data, trainer, what

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.data)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Iterate over (x, y, number of samples)."""
        for step, pair in enumerate(self.data):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"{self.what}: expected batches (x, y), given {_kind(pair)}")
            if step >= start_step:
                dataset = _of_arrays(*pair, self.what, self.trainer)
                _check_shape(dataset, self.trainer, self.what)
                x, y = dataset.batch(dtype=self.trainer.network.dtype)
                yield x, y, len(x)


def refuse_lone_samples(
    network: Network, sizes: Callable[[int], Iterable[int]], totals: Iterable[int], do: str
) -> None:
    """Refuse a micro-batch of one sample where batch normalisation takes the variance over samples only.

    Parameters
    ----------
    sizes : callable (int) -> iterable of int
        Maps the size of a global batch to the sizes of its micro-batches in all shards.
    totals : iterable of int
        Sizes of the global batches of an epoch.
    do : str
        Advice, for the message.

    Raises
    ------
    ValueError
        One sample has no variance. Mostly this is the last batch of an epoch: better now than then.
    """
    for path, layer, shape, _ in network.layers():
        if not isinstance(layer, BatchNorm) or math.prod(shape[:-1]) > 1:
            continue
        for total in sorted(totals):
            if 1 in ([total] if layer.synchronized else sizes(total)):
                raise ValueError(
                    f"layer {path} of {network.name}: a batch of {total:,} of the training samples leaves one sample "
                    f"to a shard or micro-batch, which batch normalisation cannot normalise: {do}"
                )


def _of_arrays(x: Any, y: Any, what: str, trainer: Any) -> Dataset:
    for name, array in (("x", x), ("y", y)):
        if (
            not isinstance(array, np.ndarray)
            and not hasattr(array, "__array__")
            and not isinstance(array, list | tuple)
        ):
            call = "np.asarray(x, np.float32)" if name == "x" else "np.asarray(y)"
            raise TypeError(f"{what}: {name} must be an array, given {_kind(array)}: {call} makes one")
    try:
        x = as_samples(
            trainer.network, list(x) if isinstance(x, tuple) else np.asarray(x) if hasattr(x, "__array__") else x
        )
        y = np.asarray(y)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"{what}: targets must have one shape ({error})") from None
    loss, y_shape = trainer.whole_loss, y.shape
    if loss.targets == "values" and y.dtype.kind in "biu":  # whole numbers, but no classes
        y = y.astype(trainer.network.dtype)
    column = y.ndim == 1 and y.dtype.kind == "f"
    y = y[:, None] if column else y
    if loss.targets == "values" and y.shape[1:] != trainer.network.out_shape:  # NumPy would repeat them
        raise ValueError(
            f"{what}: {type(loss).__name__} compares outputs with values: targets must have their shape "
            f"(N, {', '.join(map(str, trainer.network.out_shape))}), given {y_shape}; classes go with "
            "nn.CrossEntropyLoss()"
        )
    return Dataset(x, y, what, ignore_index=loss.ignore_index)


def _check_shape(dataset: Dataset, trainer: Any, what: str) -> None:
    network = trainer.network
    if dataset.in_shape != network.in_shape:
        hint = shape_hint((len(dataset), *dataset.in_shape), network.in_shape)
        raise ValueError(
            f"{what}: {network.name} takes samples of shape {network.in_shape}, given {dataset.in_shape}{hint}"
        )
    if not network.takes_ids and dataset.x.dtype.kind in "biu" and dataset.scale is None:
        raise TypeError(
            f"{what}: {network.name} computes in {network.dtype}, and x holds {dataset.x.dtype}: give floats, such as "
            "x / 255, or a Dataset with a scale"
        )


def _check_shard(shard: tuple[int | None, ...], trainer: Any, what: str) -> None:
    """Refuse a Loader of another shard than the trainer's: sums would silently be those of another batch."""
    expected = trainer.shard
    if tuple(shard) != expected and not tuple(shard[:2]) == expected[:2] == (0, 1):  # all of it, however it is cut
        raise ValueError(
            f"{what}: the Loader cuts batches for shard {tuple(shard)}, and this trainer's is {expected}: make it with "
            "shard=trainer.shard"
        )


def _kind(value: Any) -> str:
    """Return what something is, for a message."""
    if isinstance(value, np.ndarray):
        return "an array of samples without targets: (x, y) are both"
    return f"a {type(value).__name__}"
