"""A profile by measurement: seconds of every child of a network's root, forward and in both halves of backward.

    times = measure_layers(nn.Serial(network, loss, nn.SGD(0.1)), x, y)
    times.layers, times.update, times.head

Each layer is timed alone in whole training steps; the fastest of the repetitions counts, as other processes only add.
The gradient of the weights takes what backward takes longer than the backward that puts it off (contract 1:
`run.later`). What belongs to no layer, the loss and what Python does between layers, is the head.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from nn.analysis.inspection import calls
from nn.core.network import Network
from nn.core.run import MicroBatch
from nn.training.serial import Serial
from parallel.planning.job import Job
from parallel.planning.profile import LayerProfile, checked, count_layers


class Times(NamedTuple):
    """What one rank takes for a mini-batch: layers, seconds of the optimizer, and of what belongs to no layer."""

    layers: list[LayerProfile]
    update: float
    head: float


def measure_layers(trainer: Serial, x: np.ndarray, y: np.ndarray, repeats: int = 5) -> Times:
    """Measure a training step, layer by layer; the trainer is left as it was.

    Parameters
    ----------
    x, y : a mini-batch and its targets
    repeats : steps that count, after one to warm up
    """
    network = trainer.network
    top = list(network.root.children()) if network.root.children() else [""]
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)

    def clock(path, name, kind, call):
        start = time.perf_counter()
        result = call()
        if path in top or path in ("loss", "optimizer"):
            spent[path, kind].append(time.perf_counter() - start)
        return result

    terms = len(x) * trainer.loss.rows(network.out_shape)
    before, whole = trainer.snapshot(), []
    try:
        for turn in range(repeats + 1):
            start = time.perf_counter()
            trainer.step(x, y)
            whole.append(time.perf_counter() - start)
            with calls(trainer, clock):
                trainer.step(x, y)
            if turn == 0:
                spent.clear()
                whole.clear()
        full = {key: min(times) for key, times in spent.items()}
        spent.clear()
        for _ in range(repeats):
            with calls(trainer, clock):
                halves(trainer, x, y, terms)
        inputs = {key: min(times) for key, times in spent.items()}
    finally:
        trainer.restore(before)
    layers = []
    counted = count_layers(network, len(x), 1e9, 0.0)
    for path, layer in zip(top, counted, strict=True):
        forward, backward = full.get((path, "forward"), 0.0), full.get((path, "backward"), 0.0)
        weights = max(0.0, backward - inputs.get((path, "backward"), 0.0)) if layer.parameters else 0.0
        layers.append(layer._replace(forward=forward, backward=backward, weight_gradient=weights))
    update = full.get(("optimizer", "backward"), 0.0)
    computed = sum(layer.forward + layer.backward for layer in layers)
    return Times(checked(layers), update, max(0.0, min(whole) - computed - update))


def job_of(
    network: Network,
    times: Times,
    samples: int,
    batch: int,
    moments: int,
    node_memory: bool = True,
    overlap: bool = True,
) -> Job:
    """A step of `batch` samples of a network, of which `times` were taken with `samples`; see Job."""
    given, answered = sample_bytes(network)
    sizes = moments, times.update, given, answered
    return Job(times.layers, samples, batch, *sizes, node_memory, overlap, head=times.head)


def sample_bytes(network: Network) -> tuple[float, float]:
    """Of one sample, and of what the network answers."""
    item = network.dtype.itemsize
    return item * math.prod(network.in_shape) + 8.0, float(item * math.prod(network.out_shape))


def halves(trainer: Serial, x: np.ndarray, y: np.ndarray, terms: int) -> None:
    """Forward, loss, and a backward that puts the weights' gradients off."""
    network, run = trainer.network, trainer.run
    batch = MicroBatch()
    output, saved = network.forward(trainer.p, x, run, batch)
    _, gy = trainer.loss(output, y, terms, run)
    network.backward_inputs(trainer.p, trainer.g, gy, saved, run, batch)
    network.backward_weights(run, batch)


def random_batch(network: Network, samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Samples and classes of a network's shapes."""
    draw = np.random.default_rng(seed)
    *places, classes = network.out_shape
    if network.takes_ids:
        x = draw.integers(0, classes, (samples, *network.in_shape))
    else:
        x = draw.standard_normal((samples, *network.in_shape)).astype(network.dtype)
    return x, draw.integers(0, classes, (samples, *places))
