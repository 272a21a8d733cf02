"""Measure a profile: seconds of every child of a network's root, forward and in both halves of backward.

    times = measure_layers(nn.Trainer(network, loss, nn.SGD(0.1)), x, y)
    times.layers, times.update, times.head

Each layer is timed in whole training steps. The steps are sorted by their total time; the times of a layer are means
over the middle half, so they add up to a typical step. (The minimum of each layer would add up to a step that never
happened, and the difference would look like time outside the layers.) The time of the weights' gradients is the
difference between backward and a backward that defers them, as zero-bubble pipelines do. The head is the rest: the
loss, and Python between layers.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from nn.analysis.inspection import calls
from nn.core.context import MicroBatch
from nn.core.network import Network
from nn.training.trainer import Trainer, micro_batches
from parallel.planning.job import Job
from parallel.planning.profile import LayerProfile, checked, count_layers

STEP = "", "step"  # key of the whole step


class Times(NamedTuple):
    """Times of one rank for a mini-batch: layers, seconds of the optimizer, seconds that belong to no layer."""

    layers: list[LayerProfile]
    update: float
    head: float


def measure_layers(trainer: Trainer, x: np.ndarray, y: np.ndarray, repeats: int = 5, parts: int = 1) -> Times:
    """Measure a training step, layer by layer, and restore the trainer.

    Parameters
    ----------
    x, y : a mini-batch and its targets
    repeats : steps that count, after one to warm up
    parts : micro-batches of a step; times are those of one micro-batch, and of one update
    """
    network = trainer.network
    top = list(network.root.children()) if network.root.children() else [""]
    terms = len(x) * trainer.loss.rows(network.out_shape)
    before = trainer.snapshot()
    try:
        whole = typical([clocked(trainer, lambda: trainer.step(x, y, None, parts)) for _ in range(1 + repeats)])
        inputs = typical([clocked(trainer, lambda: halves(trainer, x, y, terms, parts)) for _ in range(1 + repeats)])
    finally:
        trainer.restore(before)
    layers = []
    counted = count_layers(network, len(x) / parts, 1e9, 0.0)
    for path, layer in zip(top, counted, strict=True):
        forward, backward = (whole.get((path, kind), 0.0) / parts for kind in ("forward", "backward"))
        weights = backward - inputs.get((path, "backward"), 0.0) / parts if layer.parameters else 0.0
        layers.append(layer.measured(forward, backward, max(0.0, weights)))
    update = whole.get(("optimizer", "backward"), 0.0)
    computed = sum(layer.forward + layer.backward for layer in layers)
    return Times(checked(layers), update, max(0.0, (whole[STEP] - update) / parts - computed))


def clocked(trainer: Trainer, call: Callable[[], object]) -> dict[tuple[str, str], float]:
    """Return seconds of `call`, under STEP, and of each layer call inside it, under (path, "forward" or "backward")."""
    spent: dict[tuple[str, str], float] = defaultdict(float)

    def clock(path, name, kind, call):
        start = time.perf_counter()
        result = call()
        spent[path, kind] += time.perf_counter() - start
        return result

    with calls(trainer, clock):
        start = time.perf_counter()
        call()
        spent[STEP] = time.perf_counter() - start
    return spent


def typical(steps: Sequence[dict[tuple[str, str], float]]) -> dict[tuple[str, str], float]:
    """Return mean times over the middle half of the steps, sorted by their total; the first step warms up."""
    steps = sorted(steps[1:], key=lambda spent: spent[STEP])
    middle = steps[len(steps) // 4 : len(steps) - len(steps) // 4]
    return {key: sum(spent[key] for spent in middle) / len(middle) for key in middle[0]}


def job_of(
    network: Network,
    times: Times,
    samples: int,
    batch: int,
    moments: int,
    node_memory: bool = True,
    overlap: bool = True,
) -> Job:
    """Return the Job of a step of `batch` samples, from `times` measured with `samples`."""
    given, answered = sample_bytes(network)
    sizes = moments, times.update, given, answered
    return Job(times.layers, samples, batch, *sizes, node_memory, overlap, head=times.head)


def sample_bytes(network: Network) -> tuple[float, float]:
    """Return bytes of one sample with its target, and of the network's output for it."""
    item = network.dtype.itemsize
    return item * math.prod(network.in_shape) + 8.0, float(item * math.prod(network.out_shape))


def halves(trainer: Trainer, x: np.ndarray, y: np.ndarray, terms: int, parts: int) -> None:
    """Run forward, loss, and a backward that defers the weights' gradients, for every micro-batch."""
    network, ctx = trainer.network, trainer.ctx
    for i, rows in enumerate(micro_batches(len(x), parts)):
        batch = MicroBatch(accumulate=i > 0)
        output, saved = network.forward(trainer.p, x[rows], ctx, batch)
        _, gy = trainer.loss(output, y[rows], terms, ctx)
        network.backward_inputs(trainer.p, trainer.g, gy, saved, ctx, batch)
        network.backward_weights(ctx, batch)


def random_batch(network: Network, samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw samples and class labels of a network's shapes."""
    draw = np.random.default_rng(seed)
    *places, classes = network.out_shape
    if network.takes_ids:
        x = draw.integers(0, classes, (samples, *network.in_shape))
    else:
        x = draw.standard_normal((samples, *network.in_shape)).astype(network.dtype)
    return x, draw.integers(0, classes, (samples, *places))
