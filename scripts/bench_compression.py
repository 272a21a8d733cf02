"""Compressed gradients: what packing costs, and what fewer bytes gain on a slow network.

First the time in which each method makes a message of the gradients of an MLP (670,000 numbers, 2.7 MB) and adds one to
a sum, on one core. Then, in the lab of several hosts (netlab.py, root only), a training step on two hosts with
100 Mbit/s between them against that with dense gradients (the faster of DistributedDataParallel and --compress none),
and against what the bytes predict:

    compute + compress + calls * latency + bytes / bandwidth

each measured by itself on the same ranks: computing without messages, compressing without a network, the latency of a
small allreduce, the bandwidth of large messages in both directions at once. Bytes are those that the trainer counts;
the network cards' own count, headers and all, is told beside.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import netlab
from benchmarking import Row

MODEL, IN_SHAPE, CLASSES, BATCH = "mlp:784,512,512,10", (784,), 10, 64  # samples a rank
METHODS = (
    "fp16", "qsgd:7", "terngrad", "onebit", "signsgd", "topk:0.01", "threshold:0.001", "dgc:0.001", "powersgd:8",
)  # fmt: skip
RATE = 100  # Mbit/s
LAB = f"2 hosts, {RATE} Mbit/s"
IN_LAB = ("fp16", "qsgd:7", "onebit", "topk:0.01", "dgc:0.001", "dgc:0.05", "powersgd:8", "powersgd:32")
SEED = 1


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Messages on one core; steps in the lab."""
    for method in METHODS:
        if only in f"{method}, one core":
            yield one_core(method, 2 if quick else 9)
    if only and not any(only in f"{method}, {LAB}" for method in IN_LAB):
        return
    if reason := netlab.why_not():
        yield Row(LAB, None, note=reason)
        return
    here = Path(__file__).resolve()
    mpiexec = [Path(sys.executable).with_name("mpiexec"), "-n", 2, sys.executable, "-m", "mpi4py", here]
    lab = [sys.executable, here.with_name("netlab.py"), "run", "--hosts", 2, "--rate", f"{RATE}mbit", "--"]
    methods = [method for method in IN_LAB if only in f"{method}, {LAB}"]
    task = json.dumps({"methods": methods, "steps": 5 if quick else 25})
    done = subprocess.run(list(map(str, [*lab, *mpiexec, task])), capture_output=True, text=True, timeout=300)
    if done.returncode:
        yield Row(LAB, None, note=f"failed: {done.stderr.strip()[-300:]}")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    dense = min(found["ddp"]["step"], found["none"]["step"])
    for method, mine in found.items():
        yield Row(f"{method}, {LAB}", mine["step"], dense, "dense", "ms", 2, 1, explain(mine))


def explain(found: dict) -> str:
    """What the bytes predict, and how far the step is from it."""
    return (
        f"predicted {found['predicted']:.1f} ms (measured {found['step'] / found['predicted'] - 1:+.0%}): "
        f"compute {found['compute']:.1f}, compress {found['compress']:.1f}, "
        f"{found['calls']:.0f} calls of {found['alpha']:.2f}, "
        f"{found['bytes'] / 1e3:,.0f} kB at {found['bandwidth'] / 1e6:.1f} MB/s; the card sent "
        f"{found['card'] / 1e3:,.0f} kB"
    )


def one_core(method: str, repeats: int) -> Row:
    """Milliseconds for a message and for adding it up."""
    import numpy as np

    import nn

    layout = nn.models.build(MODEL, IN_SHAPE, CLASSES).layout
    gradients = np.random.default_rng(SEED).standard_normal(layout.size).astype("f4") / 1000
    if method.startswith("powersgd"):  # no messages of single ranks: its two products and what follows
        reducer = reducing(method, layout, Alone(1))
        encode, length = fastest(lambda step: reducer(gradients.copy(), step), repeats), None
        decode = 0.0
    else:
        from parallel.compression import parse

        compressor, total = parse(method).attach(layout.region(), "f4"), np.zeros_like(gradients)
        message = compressor.encode(gradients.copy(), 0)
        encode = fastest(lambda step: compressor.encode(gradients.copy(), step), repeats)
        decode = fastest(lambda step: compressor.decode(message, total), repeats)
        length = len(message)
    speed = f"{gradients.nbytes / encode / 1e3:,.0f} MB/s"
    speed += (
        f" and {gradients.nbytes / decode / 1e3:,.0f}, {gradients.nbytes / length:.0f} times fewer bytes"
        if length
        else ""
    )
    return Row(f"{method}, one core", encode + decode, None, "", "ms", 1, 1, speed)


def fastest(call: Callable[[int], object], repeats: int) -> float:
    """Milliseconds of the best call; the first is not counted."""
    times = []
    for step in range(repeats + 1):
        start = time.perf_counter()
        call(step)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


class Alone:
    """Stands in for the wire between so many ranks: everyone else sends what this rank does."""

    def __init__(self, size: int):
        self.size = size

    def allreduce(self, array) -> None:
        array *= self.size

    def maximum(self, array) -> None:
        pass

    def alltoall(self, mine, theirs) -> None:
        theirs[:] = mine[0]

    def allgather(self, message) -> list:
        return [message] * self.size

    allgather_varying = allgather


def reducing(method: str, layout, wire, rank: int = 0) -> Callable:
    """(gradients, step) -> None: compress, and add up, over a wire."""
    from parallel.compression import parse

    compressor = parse(method).attach(layout.region(), "f4", SEED, (rank, wire.size))
    return lambda g, step: compressor.reduce(g, wire, step)


# ----------------------------------------------------------------------------------------- what runs in the lab


def work(task: dict) -> None:
    """Measure on two hosts; rank 0 prints what was found (collective)."""
    import numpy as np
    from mpi4py import MPI

    import nn
    from collectives import Communicator
    from parallel import CompressedDataParallel, DistributedDataParallel
    from parallel.compression import parse

    world = MPI.COMM_WORLD
    communicator, steps = Communicator(world), task["steps"]
    rng = np.random.default_rng(world.Get_rank())
    x = rng.random((BATCH, *IN_SHAPE), np.float32)
    y = rng.integers(0, CLASSES, BATCH)

    def timed(call: Callable[[int], object]) -> float:
        """Milliseconds of a call, median, on the slower rank."""
        times = []
        for step in range(steps + 2):
            world.Barrier()
            start = time.perf_counter()
            call(step)
            times.append(time.perf_counter() - start)
        return world.allreduce(1e3 * median(times[2:]), MPI.MAX)

    def parts() -> tuple:
        return nn.models.build(MODEL, IN_SHAPE, CLASSES), nn.CrossEntropyLoss(), nn.SGD(0.01)

    serial = nn.Serial(*parts())
    compute = timed(lambda _: serial.step(x, y, 2 * BATCH))
    small, large = np.zeros(16), np.zeros(1 << 20, np.uint8)
    alpha = timed(lambda _: communicator.Allreduce(MPI.IN_PLACE, small))
    other, back = 1 - world.Get_rank(), np.empty_like(large)
    bandwidth = large.nbytes / timed(lambda _: world.Sendrecv(large, other, recvbuf=back, source=other)) * 1e3

    found = {}
    for method in ("ddp", "none", *task["methods"]):
        if method == "ddp":
            trainer, compress, calls = DistributedDataParallel(*parts(), communicator), 0.0, 1
        else:
            trainer = CompressedDataParallel(*parts(), communicator, parse(method))
            reducer, gradients = reducing(method, trainer.network.layout, Alone(2), world.Get_rank()), serial.gradients
            compress = timed(lambda step, r=reducer, g=gradients: r(g.copy(), step))
        card = card_bytes()
        step = timed(lambda _, t=trainer: t.step(x, y, 2 * BATCH))
        card = (card_bytes() - card) / (steps + 2)
        if method == "ddp":
            sent = trainer.gradients.nbytes  # 2 n (p-1)/p
        else:
            sent = trainer.bytes_sent()["bytes_sent"]
            calls = sum(trainer.wire.traffic.calls.values()) / (steps + 2)
        predicted = compute + compress + calls * alpha + 1e3 * sent / bandwidth
        trainer.close()
        found[method] = {
            "step": step, "predicted": predicted, "compute": compute, "compress": compress, "calls": calls,
            "alpha": alpha, "bytes": sent, "bandwidth": bandwidth, "card": card,
        }  # fmt: skip
    if world.Get_rank() == 0:
        print(json.dumps(found), flush=True)


def card_bytes() -> int:
    """Bytes that this host's network card has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    return 0


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
