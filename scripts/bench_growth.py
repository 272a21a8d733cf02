"""How the cost of a training step grows with layers, width, batch and ranks, each by itself.

The network is an MLP of 784 inputs with two layers of 128, 64 samples a step, float32, one BLAS thread. A row's peer is
the cost in proportion to the multiply-accumulates, from that network: above 1 work costs more than there. Sizes take
turns, and medians of CPU time count. With ranks (DistributedDataParallel, 64 samples each) the step of the slowest one
stands beside a core's share of them; memory is a rank's proportional set size, which divides what processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np
from bench_training import run
from benchmarking import Row, arguments
from threadpoolctl import threadpool_limits

import nn
from nn.analysis.workload import count

LAYERS, WIDTH, BATCH = 2, 128, 64
GROWTH = {  # what grows -> its sizes
    "layers": (1, 2, 4, 8, 16, 32, 64),
    "width": (16, 32, 64, 128, 256, 512, 1024, 2048),
    "batch": (1, 4, 16, 64, 256, 1024, 4096),
    "ranks": (1, 2, 4, 8, 16, 32, 64),
}
PEER, RANKS_PEER = "in proportion", "one a core"


class Step:
    """A trainer with a batch, and the seconds of its steps."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, batch: int = BATCH, make=nn.Trainer, *rest):
        sizes = ",".join(map(str, (784, *layers * [width], 10)))
        network = nn.models.build(f"mlp:{sizes}", (784,), 10)
        self.trainer = make(network, nn.CrossEntropyLoss(), nn.SGD(), *rest)
        rng = np.random.default_rng(0)
        self.x, self.y = rng.random((batch, 784), np.float32), rng.integers(0, 10, batch)
        self.macs = batch * sum(layer.forward + layer.backward for layer in count(network))
        self.seconds: list[float] = []

    def measure(self, seconds: float, total: int | None = None, steps: int = 4, clock=time.process_time) -> None:
        """Make steps for that long, at least this number of them; the first does not count."""
        end, times = clock() + seconds, []
        while len(times) < steps or clock() < end:
            start = clock()
            self.trainer.step(self.x, self.y, total)
            times.append(clock() - start)
        self.seconds += times[1:]


def rows(quick: bool = False, only: str = "", draw: str | None = None) -> Iterator[Row]:
    """Rows of each growth; `draw`: also write them there as a picture."""
    cases = [(what, size) for what, sizes in GROWTH.items() for size in (sizes[:3] if quick else sizes)]
    cases = [(what, size) for what, size in cases if only in f"{what} {size}"]
    steps = {case: Step(**{case[0]: case[1]}) for case in cases if case[0] != "ranks"}
    steps["base"] = Step()
    with threadpool_limits(1, user_api="blas"):
        for _ in range(1 if quick else 15):
            for step in steps.values():
                step.measure(0.01 if quick else 0.1)
    base, found = steps.pop("base"), []
    for (what, size), step in steps.items():
        ms, expected = (1e3 * s for s in (median(step.seconds), median(base.seconds) * step.macs / base.macs))
        note = f"{1e3 / ms:,.0f} steps/s, {2e-6 * step.macs / ms:.3g} Gflop/s"
        found.append(Row(f"{what} {size}", ms, expected, PEER, note=note))
        yield found[-1]
    alone = None
    for size in (size for what, size in cases if what == "ranks"):
        result = run({"steps": 4 if quick else max(20, 400 // size)}, suite=__file__, ranks=size)
        ms, alone = 1e3 * result["seconds"], alone or 1e3 * result["seconds"]
        note = f"{1e3 / ms:,.0f} steps/s, {result['memory']:.0f} MiB a rank"
        found.append(Row(f"ranks {size}", ms, alone * max(1, size / os.cpu_count()), RANKS_PEER, ranks=size, note=note))
        yield found[-1]
    if draw:
        picture([asdict(row) for row in found]).savefig(draw, dpi=120)


def work(task: dict) -> None:
    """Train on these ranks; rank 0 prints the median of a step, the slowest rank's, and the memory of one."""
    from mpi4py import MPI

    from collectives import Communicator
    from parallel import DistributedDataParallel

    world = Communicator(MPI.COMM_WORLD)
    step = Step(LAYERS, WIDTH, BATCH, DistributedDataParallel, world)
    step.measure(0, world.size * BATCH, task["steps"], time.perf_counter)
    memory = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:")]
    of_ranks = world.gather((median(step.seconds), int(memory[0].split()[1]) / 1024))
    if world.rank == 0:
        seconds, mebibytes = zip(*of_ranks, strict=True)
        print(json.dumps({"seconds": max(seconds), "memory": sum(mebibytes) / len(of_ranks)}), flush=True)
    step.trainer.close()


def picture(found: list[dict]):
    """Return a Figure of rows, as --json writes them: the cost of a step over what grows, beside the one expected."""
    from matplotlib.figure import Figure

    grown = list(dict.fromkeys(row["case"].split()[0] for row in found))
    figure = Figure(figsize=(2.6 * len(grown), 2.8), layout="constrained")
    for axes, what in zip(figure.subplots(1, len(grown), squeeze=False)[0], grown, strict=True):
        points = [row for row in found if row["case"].startswith(what)]
        sizes = [int(row["case"].split()[1]) for row in points]
        axes.plot(sizes, [row["ours"] for row in points], "o-", color="#1f4e79", markersize=4, label="ms a step")
        axes.plot(sizes, [row["peer"] for row in points], "--", color="#888888", label=points[0]["peer_name"])
        axes.set(xscale="log", yscale="log", xlabel=what)
        axes.legend(fontsize=7, frameon=False)
    return figure


if __name__ == "__main__":
    work(json.loads(arguments(__doc__)[0]))
