"""Predictions for samples as users have them: lists, arrays of any float dtype, any number of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nn.arguments import SIZE
from nn.core.checks import ShapeError
from nn.core.network import Network

BATCH = 500  # samples computed at once in evaluation


def predict_in_batches(
    network: Network, forward: Callable[[np.ndarray], np.ndarray], x: Any, batch: int = BATCH
) -> np.ndarray:
    """Return forward's outputs (N, *out_shape) for samples (N, *in_shape), `batch` at a time, in an array of its own.

    Raises
    ------
    TypeError, ShapeError
        x is no array of samples of this network; the message says how to make one. `batch` is no whole number.
    ValueError
        `batch` is below 1.
    """
    SIZE("predict: batch", batch)
    x = as_samples(network, x)
    network.check_input(x)
    y = np.empty((len(x), *network.out_shape), network.dtype)
    for lo in range(0, len(x), batch):
        part = forward(x[lo : lo + batch])
        if part.shape != y[lo : lo + batch].shape:  # NumPy would repeat a single row
            raise ShapeError(
                f"{network.name}: makes {network.out_shape} of a sample, but an array {part.shape} of "
                f"{len(x[lo : lo + batch])} samples"
            )
        y[lo : lo + batch] = part
    return y


def as_samples(network: Network, x: Any) -> np.ndarray:
    """Return samples as the network takes them: lists become arrays, floats get its dtype."""
    if isinstance(x, list | tuple):
        try:
            x = np.asarray(x)
        except ValueError as error:  # lists of different lengths
            raise TypeError(f"{network.name}: samples must have one shape ({error})") from None
        if x.dtype.kind in "biu" and not network.takes_ids:  # numbers as they are written: [[0, 1], [1, 0]]
            x = x.astype(network.dtype)
    if isinstance(x, np.ndarray) and x.dtype.kind == "f" and not network.takes_ids:
        x = x.astype(network.dtype, copy=False)
    return x
