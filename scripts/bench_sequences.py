"""Long sequences: attention by blocks beside whole scores in one process, and a sequence on two ranks beside one.

blocks    forward and backward of nn.MultiHeadAttention(128, 4, causal=True), seconds and memory, by blocks of 128
          beside whole scores
ranks     a training step on one sequence of 2,048 positions: two ranks in a ring, or by heads (Ulysses), beside one
          process

Both sides take turns, step by step; the median counts. A thread of BLAS for each rank.
"""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
from bench_training import RANKS, quiet_barrier, run
from benchmarking import Row, arguments
from threadpoolctl import threadpool_limits

import nn

FEATURES, HEADS = 128, 4
SIZES = {64: 16, 256: 4, 1024: 1, 4096: 1}  # positions -> samples
LENGTH, MODEL = 2048, "transformer:64,4,2,positions=rotary,attention=blocks:128"
WAYS = ("ring", "ulysses")


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Blocks by length, then ranks."""
    for positions, samples in SIZES.items():
        case = f"attention by blocks, {positions:,} positions"
        if only in case and not (quick and positions > 256):
            yield from block_rows(case, positions, samples, 2 if quick else max(5, 4000 // positions))
    case = f"a sequence of {LENGTH:,} positions, {RANKS} ranks"
    if any(only in f"{case}, {way}" for way in WAYS):
        result = run({"length": 64 if quick else LENGTH, "steps": 2 if quick else 20}, suite=__file__)
        for way in WAYS:
            ours, peer = result[way], result["one"]
            note = f"{peer / ours:.2f} times as fast as one process"
            yield Row(f"{case}, {way}", 1e3 * ours, 1e3 * peer, "one process", "ms", RANKS, 1, note)


def block_rows(case: str, positions: int, samples: int, steps: int) -> Iterator[Row]:
    """Seconds and memory of both ways, taking turns."""
    ways = {name: one_pass(name, positions, samples) for name in ("blocks:128", "whole")}
    with threadpool_limits(1):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for step in range(1 + steps):
            for name, call in ways.items():
                start = time.perf_counter()
                call()
                if step:
                    times[name].append(time.perf_counter() - start)
    ours, peer = (1e3 * median(times[name]) for name in ways)
    yield Row(f"{case}, time", ours, peer, "whole scores", "ms", 1, 1, f"{samples} samples")
    ours, peer = (peak_bytes(name, positions, samples) / 2**20 for name in ways)
    yield Row(f"{case}, memory", ours, peer, "whole scores", "MiB", 1, 1, f"{samples} samples")


def one_pass(attention: str, positions: int, samples: int) -> Callable[[], object]:
    """Return what runs attention forward and backward."""
    layer = nn.MultiHeadAttention(FEATURES, HEADS, causal=True, attention=attention)
    network = nn.Network(layer, (positions, FEATURES))
    ctx, parameters = network.context(), network.layout.zeros(np.float32)
    network.layout.initialize(parameters, 0)
    p, g = network.layout.views(parameters), network.layout.views(np.zeros_like(parameters))
    x = np.random.default_rng(0).standard_normal((samples, positions, FEATURES), np.float32)

    def call():
        y, saved = network.forward(p, x, ctx)
        network.backward(p, g, y, saved, ctx)

    return call


def peak_bytes(attention: str, positions: int, samples: int) -> int:
    """Return the most that one pass has allocated at one time, with what the layer keeps for the next."""
    call = one_pass(attention, positions, samples)
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def work(task: dict) -> None:
    """On two ranks: alternating steps of both strategies and of one process; rank 0 reports the medians."""
    from mpi4py import MPI

    from collectives import Communicator
    from parallel import ContextParallel

    world, length = MPI.COMM_WORLD, task["length"]
    network = nn.models.build(MODEL, (length,), 256)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (1, length)), rng.integers(0, 256, (1, length))
    given = network, nn.CrossEntropyLoss(), nn.Adam(1e-3)
    trainers = {way: ContextParallel(*given, Communicator(world), attention=way) for way in WAYS}
    one = nn.Trainer(*given)
    times: dict[str, list[float]] = {name: [] for name in (*WAYS, "one")}
    with threadpool_limits(1):
        for step in range(1 + task["steps"]):
            for name, trainer in (*trainers.items(), ("one", one)):
                quiet_barrier(world)
                start = time.perf_counter()
                if name != "one" or world.rank == 0:  # the other rank waits, and leaves it the machine
                    trainer.step(x, y, 1)
                if step:
                    times[name].append(time.perf_counter() - start)
    if world.rank == 0:
        print(json.dumps({name: median(each) for name, each in times.items()}), flush=True)
    for trainer in trainers.values():
        trainer.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work(json.loads(arguments(__doc__)[0]))
