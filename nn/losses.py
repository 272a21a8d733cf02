"""Losses: how wrong a batch of outputs is, and which way it should move.

    value, gz = loss(z, target, total, run)

z is the network's output for this batch, `total` the number of samples of the **global** batch. Value and gradient are
divided by it, so that sums over micro-batches, shards or ranks, uneven ones included, need no correction.
"""

from __future__ import annotations

import numpy as np


class Loss:
    """Base of the losses. Targets are class indices (N,), or an array of the output's shape where that has a meaning."""

    def __call__(self, z: np.ndarray, target: np.ndarray, total: int, run) -> tuple[float, np.ndarray]:
        """(sum of the samples' losses / total, its gradient with respect to z, in an array of its own)."""
        raise TypeError(f"{type(self).__name__} does not define __call__")

    def __repr__(self):
        return f"{type(self).__name__}()"


class QuadraticLoss(Loss):
    """C = 1/2 |a - y|^2 summed over outputs, the cost of the classical derivation of backprop; gradient a - y.

    Integer targets of shape (N,) stand for one-hot rows.
    """

    def __call__(self, z, target, total, run):
        gz = run.empty(z.shape, z.dtype)
        if target.ndim == 1 and z.ndim == 2 and target.dtype.kind in "iu":
            check_classes(target, z.shape[-1])
            gz[...] = z
            gz[np.arange(len(gz)), target] -= 1
        else:
            check_same(z, target)
            np.subtract(z, target, out=gz)
        flat = gz.reshape(-1)
        value = 0.5 * float(flat @ flat) / total
        gz *= 1 / total
        return value, gz


class CrossEntropyLoss(Loss):
    """-log softmax(z)[target], from logits: softmax and logarithm are one operation, gradient softmax(z) - onehot.

    The row's maximum is subtracted first, so nothing overflows, and no logarithm sees a zero.
    """

    def __call__(self, z, target, total, run):
        check_classes(target, z.shape[-1], z.shape[:-1])
        rows = z.reshape(-1, z.shape[-1])
        index = np.arange(len(rows)), target.reshape(-1)
        gz = run.empty(z.shape, z.dtype)
        prob = gz.reshape(rows.shape)
        np.subtract(rows, rows.max(axis=1, keepdims=True), out=prob)
        value = -float(prob[index].sum())
        np.exp(prob, out=prob)
        norm = prob.sum(axis=1, keepdims=True)
        value += float(np.log(norm).sum())
        prob *= 1 / (norm * norm.dtype.type(total))
        prob[index] -= 1 / total
        return value / total, gz


def check_classes(target: np.ndarray, classes: int, shape: tuple[int, ...] | None = None) -> None:
    """Refuse targets that are not class indices 0 ... classes - 1, or not of the outputs' shape."""
    if target.dtype.kind not in "iu":
        raise TypeError(f"targets must be integer class indices, given dtype {target.dtype}")
    if shape is not None and target.shape != shape:
        raise ValueError(
            f"targets: expected shape {shape}, one class for each output row, given {target.shape}"
        )
    if target.size and (target.min() < 0 or target.max() >= classes):
        bad = np.argwhere((target < 0) | (target >= classes))[0]
        raise ValueError(
            f"targets: class {target[tuple(bad)]} of sample {bad[0]} is out of range: the network has {classes} outputs, "
            f"so classes are 0 to {classes - 1}"
        )


def check_same(z: np.ndarray, target: np.ndarray) -> None:
    """Refuse targets that are not an array of the outputs' shape."""
    if target.shape != z.shape:
        raise ValueError(f"targets: expected the outputs' shape {z.shape}, given {target.shape}")
