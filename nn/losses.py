"""Losses: how wrong a batch of outputs is, and the gradient with respect to it.

    value, gz = loss(z, target, total_weight, ctx)
    value, gz = loss(z, target)                       # the mean over this batch

z is the network's output for this batch; its last axis holds the outputs of one **row**: one row a sample in (N, D),
one a position in (N, T, V). `value` is the sum of the rows' losses over `total_weight`, `gz` its gradient with respect
to z.

`total_weight` is what the caller says: for the mean over the **global** batch, the weight of all its rows, wherever
they are. A row weighs 1, unless the loss says otherwise (`Loss.weighted`, `weight`). Then sums over micro-batches or
shards, uneven ones included, need no correction.

Values and gradients have the dtype of z. Each loss is a handful of NumPy calls: for a batch of ten they cost more than
the arithmetic. Sources: Nielsen 2015 (quadratic), Bridle 1990 (softmax), Huber 1964, Szegedy et al. 2016 (smoothing).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from nn.arguments import SIZE, Configured, Number, Optional
from nn.core.context import LayerContext, NetworkContext
from nn.core.memory_pool import MemoryPool
from nn.guesses import refuse_name
from nn.layers.activations import row_maxima, row_starts
from nn.metrics import Accuracy, BinaryAccuracy, Metric
from nn.registry import register


def _with_defaults(call: Callable) -> Callable:
    """Return `__call__` of a loss that also takes (z, target) alone: the mean over that batch, in memory of its own."""

    @functools.wraps(call)
    def called(self, z, target, total_weight=None, ctx=None):
        if ctx is None:
            z, target = np.asarray(z), np.asarray(target)
            z = z if z.dtype.kind == "f" else z.astype(np.float64)
            if z.ndim < 2:
                raise ValueError(
                    f"{type(self).__name__}: expected outputs of shape (N, D), a row for each sample, given {z.shape}: "
                    "z[:, None] has one output for each"
                )
            ctx = LayerContext(NetworkContext(MemoryPool(), 0), None, "loss", (), None, 0)
        if total_weight is None:
            total_weight = self.weight(target) if self.weighted else len(z) * self.rows(z.shape[1:])
        return call(self, z, target, total_weight, ctx)

    return called


class Loss(Configured):
    """Base of the losses. Targets are class indices, one a row, or an array of the output's shape.

    Attributes
    ----------
    metric : Metric
        What evaluation measures beside the loss, where it can: the fraction of outputs that are right.
    weighted : bool
        Whether rows count differently in the mean. If so, `weight(target)` is that of some, and
        the mean divides by the weight of the whole batch.
    targets : {"classes", "values", ""}
        What targets must be; "" where either will do.
    ignore_index : int or None
        The target of rows that have no loss.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> class Squares(nn.Loss):
    ...     targets = "values"
    ...     def __call__(self, z, target, total_weight, ctx):
    ...         nn.losses.check_same(z, target)
    ...         d = z - target
    ...         return float((d * d).sum()) / total_weight, 2 * d / total_weight
    >>> nn.check_loss(Squares(), (3,))
    >>> value, gradient = Squares()(np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]]))
    >>> value, gradient
    (4.0, array([[ 0., -4.]]))
    """

    metric: Metric = Accuracy()
    weighted = False
    targets = ""
    ignore_index: int | None = None

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            cls.__call__ = _with_defaults(cls.__call__)  # type: ignore[method-assign]

    def __call__(
        self, z: np.ndarray, target: np.ndarray, total_weight: float | None = None, ctx: LayerContext | None = None
    ) -> tuple[float, np.ndarray]:
        """(sum of the rows' losses / total_weight, its gradient with respect to z in an array of its own).

        Without `total_weight` it is the mean over this batch; without `ctx` z and target may be lists. A subclass takes
        all four.

        Raises
        ------
        TypeError, ValueError
            If the targets have the wrong dtype or shape, a class that does not exist, or NaN: which, where, and what
            was expected. NaN in z gives a NaN value, which the trainer traces to its layer.
        """
        raise TypeError(f"{type(self).__name__} does not define __call__")

    def rows(self, out_shape: tuple[int, ...]) -> int:
        """Rows of a sample that have a loss: 1, or the positions of a sequence."""
        return math.prod(out_shape[:-1])

    def mask(self, target: np.ndarray) -> np.ndarray | None:
        """Return a mask of the rows that are not ignored, of the shape of the targets; None if no row can be."""
        return None


@register("loss", "quadratic")
class QuadraticLoss(Loss):
    """C = 1/2 |z - y|^2, summed over a row: the cost of the classical derivation of backprop; gradient z - y.

    Integer targets of shape (N,) stand for one-hot rows.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (2,)), nn.QuadraticLoss(), nn.SGD())
    >>> round(trainer.evaluate(np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]]))["loss"], 4)
    2.0
    """

    def __call__(self, z, target, total_weight, ctx):
        gz = ctx.empty(z.shape, z.dtype)
        check_array(target)
        if target.ndim == z.ndim - 1 and target.dtype.kind in "iu":
            check_classes(target, z)
            gz[...] = z
            gz.reshape(-1)[_positions(target.reshape(-1), z.shape[-1])] -= 1
        else:
            _difference(z, target, gz)
        flat = gz.reshape(-1)
        value = _checked(0.5 * float(flat @ flat), target)
        gz *= 1 / total_weight
        return value / total_weight, gz


@register("loss", "mse")
class MSELoss(Loss):
    """Mean squared error of a row: 1/D sum (z - y)^2 over its D outputs.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (2,)), nn.MSELoss(), nn.SGD())
    >>> round(trainer.evaluate(np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]]))["loss"], 4)
    2.0
    """

    targets = "values"

    def __call__(self, z, target, total_weight, ctx):
        gz = _difference(z, target, ctx.empty(z.shape, z.dtype))
        flat = gz.reshape(-1)
        value = _checked(float(flat @ flat), target)
        outputs = total_weight * z.shape[-1]
        gz *= 2 / outputs
        return value / outputs, gz


@register("loss", "mae")
class MAELoss(Loss):
    """Mean absolute error of a row: 1/D sum |z - y|; the gradient's sign is 0 where z = y.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (2,)), nn.MAELoss(), nn.SGD())
    >>> round(trainer.evaluate(np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]]))["loss"], 4)
    1.0
    """

    targets = "values"

    def __call__(self, z, target, total_weight, ctx):
        gz = _difference(z, target, ctx.empty(z.shape, z.dtype))
        value = _checked(float(np.abs(gz, out=ctx.workspace("loss", z.shape, z.dtype)).sum()), target)
        np.sign(gz, out=gz)
        outputs = total_weight * z.shape[-1]
        gz *= 1 / outputs
        return value / outputs, gz


@register("loss", "huber")
class HuberLoss(Loss):
    """Mean over a row of d^2/2 where |d| <= delta, else delta (|d| - delta/2), with d = z - y.

    With c = d clipped to +-delta both cases are c d - c^2/2, and the gradient is c.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (2,)), nn.HuberLoss(), nn.SGD())
    >>> round(trainer.evaluate(np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]]))["loss"], 4)
    0.75
    """

    targets = "values"

    constraints = {"delta": Number(above=0)}

    def __init__(self, delta: float = 1.0):
        self.delta = delta

    def __call__(self, z, target, total_weight, ctx):
        d = _difference(z, target, ctx.workspace("loss", z.shape, z.dtype))
        gz = np.clip(d, -self.delta, self.delta, out=ctx.empty(z.shape, z.dtype))
        flat = gz.reshape(-1)
        value = _checked(float(flat @ d.reshape(-1)) - 0.5 * float(flat @ flat), target)
        outputs = total_weight * z.shape[-1]
        gz *= 1 / outputs
        return value / outputs, gz


@register("loss", "bce")
class BCEWithLogitsLoss(Loss):
    """Binary cross-entropy of sigmoid(z) against targets in [0, 1], mean over a row; gradient sigmoid(z) - y.

    From the logits, -y log s - (1-y) log(1-s) = max(z, 0) - z y + log(1 + exp(-|z|)): no overflow, no log of zero.
    Evaluation's accuracy is binary: an output is right where it is positive and the target above 1/2, or neither.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (1,)), nn.BCEWithLogitsLoss(), nn.SGD())
    >>> round(trainer.evaluate(np.array([[0.0]]), np.array([[1.0]]))["loss"], 4)
    0.6931
    """

    metric = BinaryAccuracy()
    targets = "values"

    def __call__(self, z, target, total_weight, ctx):
        check_same(z, target)
        if target.size and not (target.min() >= 0 and target.max() <= 1):
            refuse(target, ~((target >= 0) & (target <= 1)), "must be between 0 and 1")
        gz, work = ctx.empty(z.shape, z.dtype), ctx.workspace("loss", z.shape, z.dtype)
        np.abs(z, out=work)
        np.negative(work, out=work)
        np.exp(work, out=work)
        np.log1p(work, out=work)
        value = float(work.sum())
        np.multiply(z, target, out=work)
        np.subtract(np.maximum(z, 0, out=gz), work, out=work)
        value += float(work.sum())
        np.multiply(z, 0.5, out=gz)  # sigmoid(z) = (1 + tanh(z/2)) / 2
        np.tanh(gz, out=gz)
        gz *= 0.5
        gz += 0.5
        gz -= target
        outputs = total_weight * z.shape[-1]
        gz *= 1 / outputs
        return value / outputs, gz


def _class_weights(what: str, value) -> np.ndarray:
    weights = np.array(value, np.float64)  # a copy: changed later, it would not be checked
    if weights.ndim != 1 or not (weights >= 0).all():
        raise ValueError(f"{what} must be one number, not negative, for each class")
    return weights


def _weighted_sum(weights: np.ndarray, values: np.ndarray) -> float:
    """Return weights . values, where -inf with weight 0, as in an ignored row, adds nothing. NaN gives NaN."""
    return float(weights @ np.where((weights == 0) & (values == -np.inf), 0, values))


@register("loss", "nll")
class NLLLoss(Loss):
    """-z[target] of each row, for z that are log-probabilities already, such as LogSoftmax gives.

    Parameters
    ----------
    class_weights : array (V,) or None
        A row's loss is multiplied by the weight of its class.
    ignore_index : int or None
        Rows with this target, such as padding, have no loss and no gradient. Any integer, also one that is no class.

    Notes
    -----
    With either, the mean divides by the **weights** of the rows that are not ignored, as PyTorch's reduction="mean"
    does: `total_weight` is then the sum of `weight(target)` over the global batch. `nn.fit` and `nn.evaluate` see to
    it; with `trainer.step` on a shard it is the argument of that name.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.LogSoftmax(), (2,)), nn.NLLLoss(), nn.SGD())
    >>> round(trainer.evaluate(np.zeros((1, 2)), np.array([1]))["loss"], 4)  # log 2
    0.6931
    """

    targets = "classes"
    constraints = {"class_weights": Optional(_class_weights), "ignore_index": Optional(Number(whole=True))}

    def __init__(self, class_weights: np.ndarray | None = None, *, ignore_index: int | None = None):
        self.class_weights, self.ignore_index = class_weights, ignore_index

    def __call__(self, z, target, total_weight, ctx):
        labels = self.check(z, target)
        gz = ctx.empty(z.shape, z.dtype)
        gz[...] = 0
        labels, _, weights = self.row_weights(labels, z.dtype)
        at = _positions(labels, z.shape[-1])
        value = -_weighted_sum(weights, z.reshape(-1)[at])
        gz.reshape(-1)[at] = weights * (-1 / total_weight)
        return value / total_weight, gz

    @property
    def weighted(self) -> bool:
        return self.class_weights is not None or self.ignore_index is not None

    def weight(self, target: np.ndarray) -> float:
        """Return the weight of these targets: the sum of the class weights of all rows that are not ignored.

        Raises
        ------
        ValueError
            A class without a weight.
        """
        labels, known = target.reshape(-1), math.inf if self.class_weights is None else len(self.class_weights)
        bad = (target < 0) | (target >= known) if self.class_weights is not None else np.zeros(0, bool)
        if self.ignore_index is not None and bad.any():
            bad &= target != self.ignore_index
        if bad.any():
            refuse(target, bad, f"is out of range: there are {known} class weights, 0 to {known - 1}")
        return float(self.row_weights(labels, np.float64)[2].sum())

    def mask(self, target):
        return None if self.ignore_index is None else target != self.ignore_index

    def check(self, z: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the targets, one for each row; refuse others."""
        if z.shape[-1] == 1:
            raise ValueError(
                f"{type(self).__name__}: the network has one output, and softmax makes it 1 whatever it is: give two "
                "outputs, or use BCEWithLogitsLoss for two classes, MSELoss for values"
            )
        check_classes(target, z, self.ignore_index)
        if self.class_weights is not None and len(self.class_weights) != z.shape[-1]:
            raise ValueError(
                f"{type(self).__name__}: {len(self.class_weights)} class weights, but {z.shape[-1]} outputs"
            )
        return target.reshape(-1)

    def row_weights(self, labels: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (labels, with class 0 for ignored rows; 1 for rows that count, else 0; that times class weight)."""
        counted = np.ones(len(labels), dtype)
        if self.ignore_index is not None:
            counted[labels == self.ignore_index] = 0
            labels = np.where(labels == self.ignore_index, 0, labels)
        if self.class_weights is None:
            return labels, counted, counted
        return labels, counted, counted * self.class_weights[labels].astype(dtype)


@register("loss", "cross-entropy")
class CrossEntropyLoss(NLLLoss):
    """-log softmax(z)[target] of each row, from logits; gradient softmax(z) - onehot.

    Softmax and logarithm are one operation: the row's maximum is subtracted first, so nothing overflows, and no
    logarithm sees a zero.

    Parameters
    ----------
    label_smoothing : float
        e in [0, 1): the target distribution is (1-e) onehot + e/V.
    class_weights, ignore_index
        As for NLLLoss; with smoothing, every element of the target distribution is multiplied by its class's weight.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (4,)), nn.CrossEntropyLoss(), nn.SGD())
    >>> round(trainer.evaluate(np.zeros((1, 4)), np.array([2]))["loss"], 4)  # log 4
    1.3863
    """

    constraints = NLLLoss.constraints | {"label_smoothing": Number(0, below=1)}

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        class_weights: np.ndarray | None = None,
        ignore_index: int | None = None,
    ):
        super().__init__(class_weights, ignore_index=ignore_index)
        self.label_smoothing = label_smoothing

    def __call__(self, z, target, total_weight, ctx):
        labels = self.check(z, target)
        gz = ctx.empty(z.shape, z.dtype)
        rows, prob = z.reshape(-1, z.shape[-1]), gz.reshape(-1, z.shape[-1])
        np.subtract(rows, row_maxima(rows), out=prob)
        if self.label_smoothing or self.class_weights is not None or self.ignore_index is not None:
            return self._general(prob, labels, total_weight) / total_weight, gz
        flat, at = gz.reshape(-1), _positions(labels, z.shape[-1])
        value = -float(np.add.reduce(flat[at]))
        np.exp(prob, out=prob)
        norm = prob.dot(ctx.ones(z.shape[-1], z.dtype))
        value += float(np.add.reduce(np.log(norm)))
        norm *= total_weight
        prob /= norm[:, None]
        flat[at] -= 1 / total_weight
        return value / total_weight, gz

    def _general(self, prob: np.ndarray, labels: np.ndarray, total_weight: float) -> float:
        """The sum for target distributions q[c] = w[c] ((1-e) onehot[c] + e/V); prob is z - max(z), then the gradient.

        A row's loss is -q . log softmax(z), its gradient |q| softmax(z) - q, with |q| the sum of q.
        """
        classes, smoothing = prob.shape[1], self.label_smoothing
        spread = np.full(classes, smoothing / classes, prob.dtype)  # e/V w: what every row has
        if self.class_weights is not None:
            spread *= self.class_weights
        labels, counted, own = self.row_weights(labels, prob.dtype)
        own = own * (1 - smoothing)  # (1-e) w[target]: what it has more at its target
        flat, at = prob.reshape(-1), _positions(labels, classes)
        value = -_weighted_sum(own, flat[at]) - (_weighted_sum(counted, prob @ spread) if smoothing else 0.0)
        np.exp(prob, out=prob)
        norm = np.add.reduce(prob, axis=1)
        weight = own + counted * spread.sum()  # |q|
        value += float(weight @ np.log(norm))
        norm *= total_weight
        prob *= (weight / norm)[:, None]
        if smoothing:
            prob -= spread / total_weight
            prob[counted == 0] = 0
        flat[at] -= own / total_weight
        return value


class MaskedCrossEntropyLoss(CrossEntropyLoss):
    """Cross-entropy of the positions whose ids were masked (nn/data/masking.py); all other targets are -1.

    Parameters
    ----------
    masked : int
        Positions masked in each sample: what the mean is taken over.
    label_smoothing : float
        As for CrossEntropyLoss.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.LogSoftmax(), (3, 4)), nn.MaskedCrossEntropyLoss(masked=1), nn.SGD())
    >>> targets = np.array([[-1, 2, -1]])  # one of three positions was masked
    >>> round(trainer.evaluate(np.zeros((1, 3, 4)), targets)["loss"], 4)  # log 4
    1.3863
    """

    constraints = CrossEntropyLoss.constraints | {"masked": SIZE}
    constant = ("masked",)  # trainers ask for `rows` once

    def __init__(self, masked: int, *, label_smoothing: float = 0.0):
        super().__init__(label_smoothing=label_smoothing, ignore_index=-1)
        self.masked = masked

    weighted = False  # each sample has as many rows that count

    def rows(self, out_shape):
        return self.masked


def check_classes(target: np.ndarray, z: np.ndarray, ignore_index: int | None = None) -> None:
    """Refuse targets that are not one class index 0 ... V-1 (or ignore_index) for each row of z."""
    check_array(target)
    classes = z.shape[-1]
    if target.shape == z.shape and classes > 1:
        raise (ValueError if target.dtype.kind in "iu" else TypeError)(
            f"targets must be integer class indices, one for each output row, given {target.dtype}{target.shape}: "
            "of one-hot rows these are y.argmax(axis=-1)"
        )
    if target.dtype.kind not in "iu":
        raise TypeError(
            f"targets must be integer class indices, given dtype {target.dtype}: y.astype(np.int64) makes them of "
            "whole numbers; for values, use MSELoss"
        )
    if target.shape != z.shape[:-1]:
        column = ": y[..., 0] has that shape" if target.shape == (*z.shape[:-1], 1) else ""
        raise ValueError(
            f"targets: expected shape {z.shape[:-1]}, one class for each output row, given {target.shape}{column}"
        )
    unsigned, largest = _unsigned(target.dtype)
    # As an unsigned number, a negative class is larger than any that the type holds: then one look is enough.
    one_look = classes <= largest
    labels = target.view(unsigned) if one_look else target
    if target.size and (np.maximum.reduce(labels, axis=None) >= classes or (not one_look and target.min() < 0)):
        bad = (target < 0) | (target >= classes)
        if ignore_index is not None:
            bad &= target != ignore_index
        if bad.any():
            narrow = "" if one_look else f"; {target.dtype} holds none above {largest}, so store labels as int64"
            refuse(target, bad, f"is out of range: the network has {classes} outputs, 0 to {classes - 1}{narrow}")


@functools.cache
def _unsigned(dtype: np.dtype) -> tuple[np.dtype, int]:
    """Return (the unsigned integer type of the same size, the largest number of `dtype`)."""
    return np.dtype(dtype.str.replace("i", "u")), int(np.iinfo(dtype).max)


def check_same(z: np.ndarray, target: np.ndarray) -> None:
    """Refuse targets that are not an array of the outputs' shape."""
    check_array(target)
    if target.shape != z.shape:
        column = ": y[..., None] has that shape" if (*target.shape, 1) == z.shape else ""
        raise ValueError(f"targets: expected the outputs' shape {z.shape}, given {target.shape}{column}")


def check_array(target: np.ndarray) -> None:
    """Refuse targets that are no array."""
    if not isinstance(target, np.ndarray):
        raise TypeError(f"targets must be an array, given a {type(target).__name__}: np.asarray(y) makes one")


def refuse(target: np.ndarray, bad: np.ndarray, why: str) -> None:
    """Raise ValueError about the first bad target."""
    at = tuple(np.argwhere(bad)[0].tolist())
    where = f"sample {at[0]}" + (f", position {at[1:]}" if len(at) > 1 else "")
    raise ValueError(f"targets: {target[at]} of {where} {why}")


def _positions(labels: np.ndarray, classes: int) -> np.ndarray:
    """Where z[row, labels[row]] is in z.reshape(-1): one index array is much cheaper than two."""
    return row_starts(len(labels), classes) + labels.astype(np.intp, copy=False)


def _difference(z: np.ndarray, target: np.ndarray, out: np.ndarray) -> np.ndarray:
    check_same(z, target)
    return np.subtract(z, target, out=out, casting="same_kind")


def _checked(value: float, target: np.ndarray) -> float:
    """The sum of a loss. Only where it is not finite are targets looked at, and refused, so checking them is free."""
    if not math.isfinite(value):
        bad = ~np.isfinite(target)
        if bad.any():
            refuse(target, bad, "is not a finite number")
    return value


__getattr__ = partial(refuse_name, __name__)
