"""Looking into a network: what it confuses, what its layers do, where the time goes, which learning rate it takes.

Everything here works on a trainer and restores its state. Numbers and tables are made here, pictures of them in
nn/analysis/pictures.py. Sources: Smith 2017 (learning-rate range test).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from nn.arguments import SIZE
from nn.core.context import LayerContext
from nn.core.layer import Layer
from nn.core.network import all_layers
from nn.tables import text_table
from nn.training.fit import evaluate
from nn.training.trainer import NonFiniteLoss, Trainer


def confusion_matrix(predicted: np.ndarray, target: np.ndarray, classes: int) -> np.ndarray:
    """Return (classes, classes) counts: row = the true class, column = the one predicted.

    Raises
    ------
    ValueError
        If the two differ in shape, or hold a class that does not exist.
    """
    if predicted.shape != target.shape:
        raise ValueError(f"confusion matrix: {predicted.shape} predictions for {target.shape} targets")
    for name, values in (("prediction", predicted), ("target", target)):
        if values.size and not 0 <= values.min() <= values.max() < classes:
            raise ValueError(f"confusion matrix: {name}s from {values.min()} to {values.max()}, for {classes} classes")
    flat = target.reshape(-1).astype(np.int64) * classes + predicted.reshape(-1)
    return np.bincount(flat, minlength=classes * classes).reshape(classes, classes)


def confusion_table(matrix: np.ndarray, names: Sequence[str] | None = None) -> str:
    """Return the matrix as a table, with recall (fraction of a true class that is found) and precision."""
    names = [str(i) for i in range(len(matrix))] if names is None else list(names)
    right = np.diag(matrix)
    recall = right / np.maximum(matrix.sum(axis=1), 1)
    precision = right / np.maximum(matrix.sum(axis=0), 1)
    rows = [["true \\ guess", *names, "recall"]]
    rows += [[name, *map(str, row), f"{r:.1%}"] for name, row, r in zip(names, matrix, recall, strict=True)]
    rows += [["precision", *(f"{p:.1%}" for p in precision), f"{right.sum() / max(1, matrix.sum()):.1%}"]]
    return text_table(rows)


def misclassified(z: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Indices of the samples that outputs z get wrong, the most surely wrong first."""
    wrong = np.flatnonzero(z.argmax(axis=1) != target)
    margin = z[wrong].max(axis=1) - z[wrong, target[wrong]]
    return wrong[np.argsort(-margin, kind="stable")]


@dataclass(frozen=True)
class Distribution:
    """Distribution of the elements of an array.

    Attributes
    ----------
    name : str
        Name of the layer or parameter.
    counts, edges : arrays
        Histogram.
    zeros : float
        Fraction of elements that are exactly 0.
    dead, units : int
        Units (indices of the last axis: features or channels) that are 0 for every sample and position, of how many.
    """

    name: str
    mean: float
    std: float
    least: float
    most: float
    zeros: float
    dead: int
    units: int
    counts: np.ndarray
    edges: np.ndarray


def distribution(name: str, values: np.ndarray, bins: int = 40) -> Distribution:
    """Moments and histogram of an array, in double precision."""
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    flat = rows.reshape(-1).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    counts, edges = np.histogram(finite, bins)
    return Distribution(
        name,
        *(float(v) for v in (flat.mean(), flat.std(), flat.min(), flat.max(), np.mean(flat == 0))),
        int(np.count_nonzero(~rows.any(axis=0))),
        rows.shape[1],
        counts,
        edges,
    )


def activations(trainer: Trainer, x: np.ndarray, bins: int = 40) -> list[Distribution]:
    """Return the output of every layer for a batch, in forward order and evaluation mode, as distributions.

    Layers that only show their input in another form, such as Flatten, are left out: they have no units of their own.
    """
    outputs = []

    def watch(path: str, layer: Layer, y: np.ndarray) -> None:
        if not layer.children() and layer.output != "view":
            outputs.append(distribution(f"{path} {layer!r}", y, bins))

    context = trainer.ctx.network_context
    with trainer.lock:  # outputs of other threads are not meant
        outer, context.after_forward = context.after_forward, watch
        try:
            trainer.predict(x, batch=max(1, len(x)))  # one pass: each layer once, over all samples
        finally:
            context.after_forward = outer
    return outputs


def gradients(trainer: Trainer, x: np.ndarray, y: np.ndarray, bins: int = 40) -> list[Distribution]:
    """Return the gradient of every parameter for a batch, first layer first, as distributions."""
    with trainer.lock:
        before = trainer.snapshot()
        trainer.total_weight = trainer.weight(y) if trainer.whole_loss.weighted else None
        trainer.compute_gradients(x, y, len(x))
        trainer.restore(before)  # running statistics
        items = {name: array.copy() for name, array in trainer.network.layout.items(trainer.gradients)}
    layers = reversed(dict.fromkeys(name.rpartition(".")[0] for name in items))  # the layout has the last one first
    return [
        distribution(name, g, bins) for layer in layers for name, g in items.items() if name.rpartition(".")[0] == layer
    ]


def distribution_table(rows: Iterable[Distribution]) -> str:
    """Return distributions as a table."""
    cells = [["", "mean", "std", "min", "max", "zeros", "dead units"]]
    for d in rows:
        numbers = [f"{v:.3g}" for v in (d.mean, d.std, d.least, d.most)]
        cells.append([d.name, *numbers, f"{d.zeros:.1%}", f"{d.dead} of {d.units}"])
    return text_table(cells)


def dead_units(trainer: Trainer, x: np.ndarray) -> dict[str, tuple[int, int]]:
    """Layer -> (units that are 0 for every sample of x and every position, units), for layers that have any."""
    return {d.name: (d.dead, d.units) for d in activations(trainer, x) if d.dead}


def decision_regions(
    trainer: Trainer, low: tuple[float, float], high: tuple[float, float], points: int = 200
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the classes that a network of two inputs predicts on a grid: (x, y, class at [y, x])."""
    if trainer.network.in_shape != (2,):
        raise ValueError(f"decision regions need a network of 2 inputs; this one takes {trainer.network.in_shape}")
    xs, ys = np.linspace(low[0], high[0], points), np.linspace(low[1], high[1], points)
    grid = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2).astype(trainer.network.dtype)
    z = trainer.predict(grid, 10_000)
    classes = z.argmax(axis=1) if z.shape[1] > 1 else (z[:, 0] > 0).astype(np.int64)
    return xs, ys, classes.reshape(points, points)


@dataclass
class LayerTime:
    """Seconds a step in one layer, without the layers inside it."""

    path: str
    layer: str
    forward: float = 0.0
    backward: float = 0.0


def profile(
    trainer: Trainer, x: np.ndarray, y: np.ndarray, total: int | None = None, repeats: int = 10
) -> list[LayerTime]:
    """Time of every layer's forward and backward in a training step, in forward order, after a step of warm-up.

    Rows "loss" and "optimizer" follow. The trainer's parameters and moments are put back. Each layer is timed alone, so
    the sum is what the step costs without what happens between layers.
    """
    SIZE("profile: repeats", repeats)
    before = trainer.snapshot()
    spent: dict[str, LayerTime] = {}
    inner = [0.0]  # for each call that runs: time spent in calls inside it

    def clock(path: str, name: str, kind: str, call: Callable):
        row = spent.setdefault(path, LayerTime(path, name))
        inner.append(0.0)
        start = time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - start
        setattr(row, kind, getattr(row, kind) + elapsed - inner.pop())
        inner[-1] += elapsed
        return result

    try:
        with calls(trainer, clock):
            trainer.step(x, y, total)
            for row in spent.values():
                row.forward = row.backward = 0.0
            for _ in range(repeats):
                trainer.step(x, y, total)
    finally:
        trainer.restore(before)
    for row in spent.values():
        row.forward, row.backward = row.forward / repeats, row.backward / repeats
    return list(spent.values())


def profile_table(rows: Sequence[LayerTime]) -> str:
    """Return a profile as a table: milliseconds and fractions of the whole."""
    total = sum(row.forward + row.backward for row in rows)
    cells = [["layer", "", "forward ms", "backward ms", "fraction"]]
    for row in rows:
        fraction = (row.forward + row.backward) / max(total, 1e-12)
        cells.append([row.path, row.layer, f"{1e3 * row.forward:.3f}", f"{1e3 * row.backward:.3f}", f"{fraction:.1%}"])
    forward, backward = sum(row.forward for row in rows), sum(row.backward for row in rows)
    cells.append(["all", "", f"{1e3 * forward:.3f}", f"{1e3 * backward:.3f}", ""])
    return text_table(cells, left=(0, 1))


@contextmanager
def calls(trainer: Trainer, around: Callable[[str, str, str, Callable], object]) -> Iterator[None]:
    """Within this context, everything that a training step calls goes through `around`.

    Parameters
    ----------
    around : callable (path, name, kind, call) -> what call() returns
        Path and name of a layer with kind "forward" or "backward"; path "loss" with "forward"; path "optimizer" with
        "backward". Calls of the layers inside a container come within its own.
    """

    class Observed(LayerContext):
        """A layer's context whose calls go through `around`: gradients are written within backward."""

        __slots__ = ()

        def forward(self, p, x):
            return around(self.path, names[id(self.layer)], "forward", lambda: LayerContext.forward(self, p, x))

        def backward(self, p, gy, saved):
            call = lambda: LayerContext.backward(self, p, gy, saved)
            return around(self.path, names[id(self.layer)], "backward", call)

    def through(original, path, name, kind):
        return lambda *args, **kwargs: around(path, name, kind, lambda: original(*args, **kwargs))

    layers, contexts = all_layers(trainer.network.root), [trainer.ctx]
    names = {id(layer): type(layer).__name__ if layer.children() else repr(layer) for layer in layers}
    for context in contexts:  # grows
        contexts += context.children
    loss, optimizer = trainer.loss, trainer.optimizer
    vars(trainer)["loss"] = through(loss, "loss", repr(loss), "forward")
    optimizer.apply = through(optimizer.apply, "optimizer", type(optimizer).__name__, "backward")
    try:
        for context in contexts:
            context.__class__ = Observed
        yield
    finally:
        for context in contexts:
            context.__class__ = LayerContext
        vars(trainer)["loss"] = loss
        del optimizer.apply


@dataclass(frozen=True)
class RateSearch:
    """Learning rates that were tried, the loss of each step, smoothed, and the rate where it fell fastest."""

    rates: np.ndarray
    losses: np.ndarray
    suggestion: float


def find_learning_rate(
    trainer: Trainer,
    batches: Iterable,
    low: float = 1e-5,
    high: float = 10.0,
    steps: int = 100,
    smoothing: float = 0.9,
    validation: Iterable | None = None,
) -> RateSearch:
    """Train while the rate grows from `low` to `high` by a constant factor a step, until the loss blows up.

    Parameters
    ----------
    batches : iterable of (x, y, total)
        At least `steps` of them, such as `itertools.chain.from_iterable(map(loader.epoch, itertools.count()))`.
    smoothing : float
        Weight of the past in the running mean of the loss, corrected for its start at zero.
    validation : Loader or None
        Whose loss is looked at after every step, so a few hundred samples; None takes that of the batch before it.

    Returns
    -------
    RateSearch
        The trainer is as before. Stops at four times the lowest smoothed loss.
    """
    if not 0 < low < high:
        raise ValueError(f"learning-rate finder: expected 0 < low < high, given {low} and {high}")
    before, lr = trainer.snapshot(), trainer.optimizer.lr
    rates, losses, mean = [], [], 0.0
    try:
        for i, (x, y, total) in zip(range(steps), batches, strict=False):
            trainer.optimizer.lr = low * (high / low) ** (i / max(1, steps - 1))
            try:
                loss = trainer.synchronize(trainer.step(x, y, total))
            except NonFiniteLoss:
                break
            if validation is not None and not math.isfinite(loss := evaluate(trainer, validation)["loss"]):
                break
            mean = smoothing * mean + (1 - smoothing) * loss
            rates.append(trainer.optimizer.lr)
            losses.append(mean / (1 - smoothing ** (i + 1)))
            if losses[-1] > 4 * min(losses):
                break
    finally:
        trainer.optimizer.lr = lr
        trainer.restore(before)
    if len(losses) < 3:
        raise ValueError(f"learning-rate finder: only {len(losses)} steps before the loss blew up or data ended")
    around = min(9, len(losses))  # steps over which a slope is taken: single batches differ
    slopes = np.convolve(np.gradient(np.array(losses), np.log(rates)), np.ones(around) / around, "same")
    settled = min(len(losses) // 2, round(1 / (1 - smoothing)))  # before, the mean is of too few steps
    falls = slopes[settled : max(settled, int(np.argmin(losses))) + 1]  # what falls later has blown up before
    return RateSearch(np.array(rates), np.array(losses), float(rates[settled + int(np.argmin(falls))]))
