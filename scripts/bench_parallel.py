"""What it costs to share the network itself.

one stage, 4 micro-batches: a pipeline on one rank beside the same micro-batches, one after the other, without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import numpy as np
from benchmarking import Row
from threadpoolctl import threadpool_limits

import nn

MICRO_BATCHES = 4
MODELS = {"mlp:784,1024,1024,1024,10": (784,), "cnn": (28, 28, 1)}


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """A row for each network; processor seconds of a step, so that what else the machine does counts little."""
    for model, shape in MODELS.items():
        case = f"one stage, {MICRO_BATCHES} micro-batches, {model}"
        if only in case:
            yield one_stage(case, model, shape, 1 if quick else 30)


def one_stage(case: str, model: str, shape: tuple[int, ...], steps: int) -> Row:
    """Both take turns, step by step."""
    from mpi4py import MPI

    from collectives import Communicator
    from parallel import Pipeline

    rng = np.random.default_rng(0)
    x, y = rng.random((256, *shape), np.float32), rng.integers(0, 10, 256)
    arguments = nn.models.build(model, shape, 10), nn.CrossEntropyLoss(), nn.SGD(0.01)
    with threadpool_limits(1, user_api="blas"):
        plain = nn.Serial(*arguments)
        line = Pipeline(*arguments, Communicator(MPI.COMM_SELF), micro_batches=MICRO_BATCHES)
        times: dict[str, list[float]] = {"plain": [], "line": []}
        for _ in range(steps + 1):  # the first one plans
            for name, step in (
                ("plain", lambda: plain.step(x, y, 256, MICRO_BATCHES)),
                ("line", lambda: line.step(x, y)),
            ):
                start = time.process_time()
                step()
                times[name].append(1e3 * (time.process_time() - start))
        line.close()
    ours, peer = (median(times[name][1:]) for name in ("line", "plain"))
    return Row(case, ours, peer, "nn.Serial, as many micro-batches", note=f"{steps} steps by turns, processor time")
