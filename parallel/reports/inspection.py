"""Inspection of a trained network (--inspect): time by layer, misclassified samples, weights, a good learning rate."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np

import nn
from nn.analysis import inspection, pictures
from nn.data import Data
from nn.training.checkpoints import write_atomically
from parallel.reports.figures import write_figure

MISCLASSIFIED = 40  # samples in the picture
LOOKED_AT = 512  # samples for distributions and dead units
CLASSES = 20  # whose confusion is shown as a table


def profile(trainer: nn.Trainer, loader: nn.Loader) -> str:
    """Return a table of each layer's time, forward and backward, in a training step on this rank's samples."""
    return inspection.profile_table(inspection.profile(trainer, *next(loader.epoch(0))))


def find_rate(trainer: nn.Trainer, train: nn.Loader, validation: nn.Loader | None, out: Path, write: bool) -> str:
    """Try growing learning rates. Return the picture, and the rate at which the loss falls fastest.

    The loss is that of a batch of validation samples, or of the training batches if there are none.
    """
    batches = itertools.chain.from_iterable(map(train.epoch, itertools.count()))
    if validation:
        few = validation.dataset.head(validation.batch)
        validation = nn.Loader(few, validation.batch, shuffle=False, shard=validation.shard)
    search = inspection.find_learning_rate(trainer, batches, validation=validation)
    whose = "validation" if validation else "training"
    if write:
        out.mkdir(parents=True, exist_ok=True)
        write_figure(pictures.rate_search(search), out / "learning_rates.png")
    return f"the {whose} loss falls fastest at a learning rate of {search.suggestion:.2g} ({out}/learning_rates.png)"


def inspect(trainer: nn.Trainer, data: Data, out: Path) -> str:
    """Write pictures and tables of a trained network into DIR/inspection. Return lines that describe them."""
    out.mkdir(exist_ok=True)
    said = []
    train, test = data.train, data.test
    x, y = train.batch(np.arange(min(LOOKED_AT, len(train))))
    found = inspection.activations(trainer, x)
    write_figure(pictures.histograms(found, title="activations"), out / "activations.png")
    gradients = inspection.gradients(trainer, x, y)
    write_figure(pictures.histograms(gradients, title="gradients"), out / "gradients.png")
    tables = [
        "activations",
        inspection.distribution_table(found),
        "",
        "gradients",
        inspection.distribution_table(gradients),
    ]
    write_atomically(out / "distributions.txt", ("\n".join(tables) + "\n").encode())
    if (first := first_weights(trainer)) is not None:
        write_figure(pictures.units(first[1], title=first[0]), out / "weights.png")
    dead = inspection.dead_units(trainer, x)
    said += [f"layer {path}: {n} of {units} units are 0 for {len(x)} samples" for path, (n, units) in dead.items()]
    said += ["no dead units"] if not dead else []
    if data.classes and test.y.ndim == 1:
        said += _classes(trainer, data, out)
    if trainer.network.in_shape == (2,):
        xs, ys, classes = inspection.decision_regions(trainer, tuple(test.x.min(0)), tuple(test.x.max(0)))
        write_figure(pictures.regions(xs, ys, classes, test.x, test.y), out / "regions.png")
    return "\n".join([*said, f"more in {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}"])


def first_weights(trainer: nn.Trainer) -> tuple[str, np.ndarray] | None:
    """Return (heading, weights) of the first layer with weights if its inputs are pixels, else None."""
    shape = trainer.network.in_shape
    if len(shape) != 3:
        return None
    arrays = dict(trainer.network.layout.items(trainer.flat_parameters))
    for path, layer, *_ in trainer.network.layers():
        if (weights := arrays.get(f"{path}.W")) is not None:
            side = math.isqrt(len(weights))
            flat = weights.ndim == 2 and side * side == len(weights) and shape == (side, side, 1)
            return (f"weights of {path} {layer!r}", weights) if flat or weights.ndim == 4 else None
    return None


def _classes(trainer: nn.Trainer, data: Data, out: Path) -> list[str]:
    """Draw the confusion matrix and the misclassified samples of a classifier."""
    test = data.test
    x, y = test.batch(np.arange(len(test)))
    z = trainer.predict(x)
    matrix = inspection.confusion_matrix(z.argmax(axis=1), y, data.classes)
    write_figure(pictures.confusion(matrix, data.class_names), out / "confusion.png")
    wrong = inspection.misclassified(z, y)
    if len(wrong) and x.ndim == 4 and x.shape[-1] in (1, 3):
        worst = wrong[:MISCLASSIFIED]
        names = data.class_names
        sure = None
        if isinstance(trainer.loss, nn.CrossEntropyLoss):  # of whose outputs the softmax is meant
            sure = 1 / np.exp(z[worst] - z[worst].max(axis=1, keepdims=True)).sum(axis=1)
        shown = pictures.samples(x[worst], y[worst], z[worst].argmax(axis=1), names, confidence=sure)
        write_figure(shown, out / "misclassified.png")
    if data.classes > CLASSES:
        return []
    return [inspection.confusion_table(matrix, data.class_names)]
