"""Long sequences: attention by blocks beside whole scores, a sequence on several ranks beside one and beside estimates.

blocks    forward and backward of nn.MultiHeadAttention(128, 4, causal=True), seconds and memory, by blocks of 128
          beside whole scores
ranks     a training step on one sequence of 2,048 positions: two ranks in a ring, or by heads (Ulysses), beside one
          process
lengths   seconds and bytes of such a step on 1, 2 and 4 ranks, beside what parallel/strategies/estimate.py predicts of
          layers that are measured on one rank while all others measure theirs, and of the network
experts   an alltoallv of the positions of a layer with experts, beside its price on the measured network

Sides take turns, step by step; the median counts. A thread of BLAS for each rank.
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
SIZES = {64: 16, 256: 4, 1024: 1, 4096: 1, 8192: 1}  # positions -> samples
LENGTHS, MEMBERS = (1024, 4096), (1, 2, 4)  # positions of a sequence, ranks
ROUTED = 256, 4096  # positions of a rank, each of which two experts take
LENGTH, MODEL = 2048, "transformer:64,4,2,positions=rotary,attention=blocks:128"
WAYS = ("ring", "ulysses")


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Blocks by length, then ranks, lengths, experts."""
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
    for length in LENGTHS[:1] if quick else LENGTHS:
        for ranks in MEMBERS[1:2] if quick else MEMBERS:
            if only in f"length {length:,}, {ranks} ranks":
                yield from length_rows(length, ranks, quick)
    if only in f"experts' alltoallv, {RANKS} ranks":
        yield from expert_rows(quick)


def length_rows(length: int, ranks: int, quick: bool) -> Iterator[Row]:
    """A training step on one sequence: seconds and bytes of a rank, beside those that are predicted."""
    found = run(
        {"predicted": length, "steps": 2 if quick else 10, "network": 0.002 if quick else 0.02},
        suite=__file__,
        ranks=ranks,
    )
    case, cores = f"length {length:,}, {ranks} rank{'s' * (ranks > 1)}", os.cpu_count() or 1
    note = f"{ranks} ranks share {cores} cores" if ranks > cores else ""
    yield Row(f"{case}, step", *(1e3 * seconds for seconds in found["seconds"]), "estimate", "ms", ranks, 1, note)
    note = "the estimate: parameters, gradients, moments, and what forward keeps; measured also what layers work with"
    yield Row(f"{case}, memory", *(nbytes / 2**20 for nbytes in found["bytes"]), "estimate", "MiB", ranks, 1, note)


def expert_rows(quick: bool) -> Iterator[Row]:
    """What sends positions to their experts, at an even load."""
    result = run({"routed": ROUTED, "calls": 5 if quick else 200, "network": 0.002 if quick else 0.05}, suite=__file__)
    for positions, (ours, price) in zip(ROUTED, result["seconds"], strict=True):
        case = f"experts' alltoallv, {RANKS} ranks, {positions:,} positions a rank"
        yield Row(case, 1e6 * ours, 1e6 * price, "price", "us", RANKS, 1, f"{FEATURES} features, two experts each")


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
    """Carry out a task of this suite on its ranks; rank 0 prints the result as a line of JSON (collective)."""
    from mpi4py import MPI

    kinds = {"predicted": predict_and_train, "routed": send_to_experts, "length": train_in_turns}
    result = next(call for kind, call in kinds.items() if kind in task)(task, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(result), flush=True)


def predict_and_train(task: dict, world) -> dict:
    """(measured, predicted) seconds of a step on one sequence, and bytes that a rank takes for it."""
    from collectives import Communicator
    from collectives.pricing.measure import measure_network
    from collectives.pricing.networks import NETWORKS
    from parallel import ContextParallel
    from parallel.planning import layer_times
    from parallel.planning.job import Axes
    from parallel.strategies.estimate import estimate

    length, size = task["predicted"], world.size
    network = nn.models.build(MODEL, (length,), 256)
    given = network, nn.CrossEntropyLoss(), nn.Adam(1e-3)
    x, y = layer_times.random_batch(network, 1)
    with threadpool_limits(1):
        measured = measure_network(world, seconds=task["network"]) if size > 1 else NETWORKS["workstation"]
        quiet_barrier(world)
        times = layer_times.measure_layers(nn.Trainer(*given), x, y, max(2, task["steps"] // 2))
        job = layer_times.job_of(network, times, 1, 1, 2, node_memory=False)
        said = estimate(job, "ddp", Axes(context=size), measured)
        tracemalloc.start()
        trainer = ContextParallel(*given, Communicator(world), node_memory="off") if size > 1 else nn.Trainer(*given)
        trainer.step(x, y, 1)
        nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        steps = []
        for _ in range(task["steps"]):
            quiet_barrier(world)
            start = time.perf_counter()
            trainer.step(x, y, 1)
            steps.append(time.perf_counter() - start)
    if size > 1:
        trainer.close()
    return {"seconds": [median(steps), said.seconds], "bytes": [nbytes, said.memory]}


def send_to_experts(task: dict, world) -> dict:
    """(measured, priced) seconds of an alltoallv of rows for the experts of two ranks, by positions of a rank."""
    from collectives import Communicator
    from collectives.pricing.measure import measure_network
    from parallel.planning.group_costs import Group
    from parallel.strategies.expert.dispatch import ExpertRanks

    network, found = measure_network(world, seconds=task["network"]), []
    group = ExpertRanks(Communicator(world))
    for positions in task["routed"]:
        sent = np.full((world.size, 1), 2 * positions // world.size)
        rows, out = (np.ones((2 * positions, FEATURES), np.float32) for _ in range(2))
        times = []
        for call in range(1 + task["calls"]):
            world.Barrier()
            start = time.perf_counter()
            group.start(rows, sent, sent, out)()
            if call:
                times.append(time.perf_counter() - start)
        found.append((median(times), Group(world.size).alltoall(rows.nbytes, network)))
    return {"seconds": found}


def train_in_turns(task: dict, world) -> dict:
    """On two ranks: steps of both ways and of one process, in turns: their medians."""
    from collectives import Communicator
    from parallel import ContextParallel

    length = task["length"]
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
    for trainer in trainers.values():
        trainer.close()
    return {name: median(each) for name, each in times.items()}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work(json.loads(arguments(__doc__)[0]))
