"""Metrics: how good outputs are, beside the loss. A metric is a mean over all rows, and knows which way is better.

    nn.fit(trainer, data, epochs=5, validation=held_out, metrics=[nn.metrics.TopKAccuracy(5)])
    largest = nn.metrics.Metric(lambda z, y: abs(z - y).max(axis=-1), mode="min", name="largest_error")
    nn.evaluate(trainer, test, metrics=largest)

The record of an epoch then has "validation_top_5_accuracy" beside "validation_loss" and "validation_accuracy", and
callbacks that choose (EarlyStopping, RestoreBest, KeepCheckpoints, Plateau) know that larger is better.

Sums of values and their numbers are added up over batches and shards, so that uneven batches need no correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from nn.arguments import SIZE, Closed, OneOf
from nn.guesses import refuse_name
from nn.registry import lookup, register

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Perplexity",
    "RootMeanSquaredError",
    "TopKAccuracy",
    "as_metrics",
    "direction",
]

MODES = ("min", "max")


class Metric(Closed):
    """The mean of `function(z, y)` over all rows, of all batches and shards.

    Parameters
    ----------
    function : callable
        Outputs z (N, ..., D) and targets y -> array of any shape: the mean is over its elements. Rows that the
        loss ignores are left out; then z is (rows, D) and y (rows,).
    mode : {"min", "max"}
        Whether smaller or larger is better.
    name : str or None
        Entry of a record, such as "largest_error"; None takes the function's.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> within = nn.metrics.Metric(lambda z, y: abs(z - y) < 0.1, "max", "within")
    >>> within.sums(np.array([[1.0], [2.0]]), np.array([[1.05], [3.0]]))
    (1.0, 2)
    """

    def __init__(self, function: Callable[[np.ndarray, np.ndarray], np.ndarray], mode: str, name: str | None = None):
        if not callable(function):
            raise TypeError(f"Metric: expected a function (z, y) -> values, given {function!r:.80}")
        self.function, self.mode, self.name = function, mode, name or getattr(function, "__name__", "")
        check_mode("Metric", mode)
        if not self.name.isidentifier():
            raise ValueError(f"Metric: a name is a word such as 'largest_error', given {self.name!r:.80}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, mode={self.mode!r})"

    def applies(self, z: np.ndarray, y: np.ndarray) -> bool:
        """Return whether targets y are of the kind that the metric compares z with."""
        return True

    def values(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the numbers that the metric is the mean of."""
        values = np.asarray(self.function(z, y))
        if not values.ndim:  # means of batches of different sizes, added up, are not the mean over all rows
            raise ValueError(
                f"metric {self.name}: the function must return a value for each row, given one number for {len(z)} "
                "rows. A score of the whole set, such as F1, is computed from trainer.predict(x)"
            )
        return values

    def sums(self, z: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return (sum of the values, how many there are), to be added up."""
        values = self.values(z, y)
        return float(np.sum(values, dtype=np.float64)), values.size

    def result(self, mean: float) -> float:
        """Return the metric, from the mean of all values."""
        return mean


@register("metric", "accuracy")
class Accuracy(Metric):
    """Fraction of rows whose largest output is at the target's class. A row with NaN is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (3,)), nn.CrossEntropyLoss(), nn.SGD())
    >>> z, y = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), np.array([0, 1])
    >>> nn.evaluate(trainer, (z, y), metrics=nn.metrics.Accuracy())
    {'loss': 0.9076060056686401, 'accuracy': 0.5}
    """

    def __init__(self):
        super().__init__(_right, "max", "accuracy")

    def applies(self, z, y):
        return _are_classes(z, y)


@register("metric", "binary_accuracy")
class BinaryAccuracy(Metric):
    """Fraction of outputs on the right side of 0 (logits): positive where the target is above 1/2. NaN is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (1,)), nn.BCEWithLogitsLoss(), nn.SGD())
    >>> nn.evaluate(trainer, (np.array([[2.0], [-1.0]]), np.array([1, 1])))["accuracy"]
    0.5
    """

    def __init__(self):
        super().__init__(_on_the_right_side, "max", "accuracy")

    def applies(self, z, y):
        return y.shape == z.shape


@register("metric", "top_5_accuracy")
class TopKAccuracy(Metric):
    """Fraction of rows where the target's class is among the k largest outputs. A row with NaN is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (3,)), nn.CrossEntropyLoss(), nn.SGD())
    >>> z, y = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), np.array([0, 1])
    >>> nn.evaluate(trainer, (z, y), metrics=nn.metrics.TopKAccuracy(2))
    {'loss': 0.9076060056686401, 'accuracy': 0.5, 'top_2_accuracy': 1.0}
    """

    def __init__(self, k: int = 5):
        self.k = SIZE("TopKAccuracy: k", k)
        super().__init__(self._among, "max", f"top_{k}_accuracy")

    def _among(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        _check_classes(self.name, z, y)
        own = np.take_along_axis(z, y[..., None].astype(np.intp), axis=-1)
        tied_before = (z == own) & (np.arange(z.shape[-1]) < y[..., None])  # the first of equal ones wins, as in argmax
        before = (z > own) | tied_before
        return (before.sum(axis=-1) < self.k) & ~np.isnan(z).any(axis=-1)


@register("metric", "mae")
class MeanAbsoluteError(Metric):
    """Mean of |z - y|.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (2,)), nn.MSELoss(), nn.SGD())
    >>> z, y = np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]])
    >>> nn.evaluate(trainer, (z, y), metrics=nn.metrics.MeanAbsoluteError())
    {'loss': 2.0, 'mae': 1.0}
    """

    def __init__(self):
        super().__init__(_absolute_error, "min", "mae")


@register("metric", "mse")
class MeanSquaredError(Metric):
    """Mean of (z - y)^2.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (2,)), nn.MSELoss(), nn.SGD())
    >>> z, y = np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]])
    >>> nn.evaluate(trainer, (z, y), metrics=nn.metrics.MeanSquaredError())
    {'loss': 2.0, 'mse': 2.0}
    """

    def __init__(self):
        super().__init__(_squared_error, "min", "mse")


@register("metric", "rmse")
class RootMeanSquaredError(Metric):
    """Square root of the mean of (z - y)^2, in the units of y.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (2,)), nn.MSELoss(), nn.SGD())
    >>> z, y = np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]])
    >>> nn.evaluate(trainer, (z, y), metrics=nn.metrics.RootMeanSquaredError())
    {'loss': 2.0, 'rmse': 1.4142135623730951}
    """

    def __init__(self):
        super().__init__(_squared_error, "min", "rmse")

    def result(self, mean):
        return math.sqrt(mean)


@register("metric", "perplexity")
class Perplexity(Metric):
    """exp of the mean cross-entropy (natural logarithm) of logits z: 1 at best, V where all V classes are alike.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Flatten(), (3,)), nn.CrossEntropyLoss(), nn.SGD())
    >>> z, y = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), np.array([0, 1])
    >>> round(nn.evaluate(trainer, (z, y), metrics=nn.metrics.Perplexity())["perplexity"], 3)
    2.478
    """

    def __init__(self):
        super().__init__(_cross_entropy, "min", "perplexity")

    def result(self, mean):
        return math.inf if mean >= 709 else math.exp(mean)  # NaN stays NaN


def _right(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    _check_classes("accuracy", z, y)
    best = z.argmax(axis=-1)  # of a row with NaN, the index of that
    right = best == y
    if np.isnan(z).any():
        right &= ~np.isnan(z).any(axis=-1)
    return right


def _on_the_right_side(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    _check_same_shape(z, y)
    return ((z > 0) == (y > 0.5)) & ~np.isnan(z)


def _absolute_error(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    _check_same_shape(z, y)
    return np.abs(z - y)


def _squared_error(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    _check_same_shape(z, y)
    return np.square(z - y)


def _check_same_shape(z: np.ndarray, y: np.ndarray) -> None:
    if y.shape != z.shape:  # broadcast, they would give a number, and a wrong one
        raise ValueError(f"metric: expected targets of the outputs' shape {z.shape}, given {y.shape}")


def _are_classes(z: np.ndarray, y: np.ndarray) -> bool:
    return y.dtype.kind in "iu" and y.shape == z.shape[:-1]  # not 0 and 1 as values of each output


def _check_classes(name: str, z: np.ndarray, y: np.ndarray) -> None:
    if not _are_classes(z, y):
        raise ValueError(f"metric {name}: expected classes, integers of shape {z.shape[:-1]}, given {y.dtype}{y.shape}")


def _cross_entropy(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    _check_classes("perplexity", z, y)
    z = z - z.max(axis=-1, keepdims=True)
    own = np.take_along_axis(z, y[..., None].astype(np.intp), axis=-1)[..., 0]
    return np.log(np.exp(z).sum(axis=-1, dtype=np.float64)) - own


WORDS = {  # last words of names whose direction is known
    "loss": "min",
    "accuracy": "max",
    "error": "min",
    "mae": "min",
    "mse": "min",
    "rmse": "min",
    "perplexity": "min",
}


def direction(name: str, mode: str | None = None, metrics: Iterable[Metric] = ()) -> str:
    """Return "min" or "max": which way the entry `name` of a record gets better.

    Parameters
    ----------
    name : str
        Such as "validation_accuracy".
    mode : {"min", "max"} or None
        None asks the metrics, then the last word of the name.
    metrics : iterable of Metric
        Those that are measured.

    Raises
    ------
    ValueError
        Nobody knows.

    Examples
    --------
    >>> import nn
    >>> nn.metrics.direction("validation_mae"), nn.metrics.direction("f1", "max")
    ('min', 'max')
    """
    if mode is not None:
        check_mode(f"metric {name!r}", mode)
        return mode
    plain = name.removeprefix("validation_")
    modes = {metric.name: metric.mode for metric in metrics}
    known = modes.get(plain) or WORDS.get(plain.rpartition("_")[2])
    if known is None:
        raise ValueError(f"metric {name!r}: is smaller or larger better? Say mode='min' or mode='max'")
    return known


Measure = Metric | str | Callable[[np.ndarray, np.ndarray], np.ndarray]
Measures = Measure | Iterable[Measure]


def as_metrics(measures: Measures) -> list[Metric]:
    """Return the metrics that are meant: instances, registered names, or functions whose name says the direction.

    Examples
    --------
    >>> import nn
    >>> nn.metrics.as_metrics(["mae", nn.metrics.TopKAccuracy(3)])
    [MeanAbsoluteError('mae', mode='min'), TopKAccuracy('top_3_accuracy', mode='max')]
    """
    if isinstance(measures, Metric | str) or callable(measures):
        measures = [measures]
    return [_as_metric(measure) for measure in measures]


def _as_metric(measure: Measure) -> Metric:
    if isinstance(measure, Metric):
        return measure
    if isinstance(measure, str):
        return lookup("metric", measure)()
    if isinstance(measure, type) and issubclass(measure, Metric):
        raise TypeError(f"metrics are instances, given the class {measure.__name__} itself: call it")
    if not callable(measure):
        raise TypeError(f"metrics are instances of nn.metrics.Metric, names or functions, given {measure!r:.80}")
    name = getattr(measure, "__name__", "")
    mode = WORDS.get(name.rpartition("_")[2])
    if mode is None:
        raise ValueError(
            f"metric {name!r}: is smaller or larger better? nn.metrics.Metric({name or 'function'}, mode='min') says it"
        )
    return Metric(measure, mode)


def check_mode(what: str, mode: str) -> None:
    """Refuse a direction that is none."""
    OneOf(MODES)(f"{what}: mode", mode)


__getattr__ = partial(refuse_name, __name__)
