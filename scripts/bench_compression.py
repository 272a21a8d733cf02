"""Compressed gradients: what packing costs, and what fewer bytes gain on a slow network.

First the time in which each method makes a message of the gradients of an MLP (670,000 numbers, 2.7 MB) and adds one to
a sum, on one core. Then, in the lab of several hosts (netlab.py, root only), a training step on two hosts with
100 Mbit/s between them against that with dense gradients (the faster of DistributedDataParallel and --compress none),
and against what the bytes predict:

    compute + compress + of each message: latency + max(0, bytes / bandwidth - head start)

each measured by itself, on the same ranks and in turn with the steps: computing without messages, compressing without a
network, the latency of a small allreduce, bandwidth and head start of two large messages in both directions at once.
The head start is what the cable sends in no time after a pause: the token bucket of the lab has filled (16 KB). Bytes
are those that the trainer counts; the network cards' own count, headers and all, is told beside. All are medians.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import netlab
from benchmarking import Row, arguments, in_lab

MODEL, IN_SHAPE, CLASSES, BATCH = "mlp:784,512,512,10", (784,), 10, 64  # samples a rank
METHODS = (
    "fp16", "qsgd:7", "terngrad", "onebit", "signsgd", "topk:0.01", "threshold:0.001", "dgc:0.001", "powersgd:8",
)  # fmt: skip
RATE = 100  # Mbit/s
LAB = f"2 hosts, {RATE} Mbit/s"
IN_LAB = ("fp16", "qsgd:7", "onebit", "topk:0.01", "dgc:0.001", "dgc:0.05", "powersgd:8", "powersgd:32")
TURNS, QUICK_TURNS = 13, 2  # of each case
IN_TURN = 3  # calls of a case one after another; the first is not counted: it finds what others left in the caches
LARGE = (1 << 18, 1 << 20)  # bytes of the messages that bandwidth and head start are measured with
PAUSE = 0.005  # seconds before a call, in which the token buckets fill
SEED = 1


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Messages on one core; steps in the lab."""
    for method in METHODS:
        if only in f"{method}, one core":
            yield one_core(method, 2 if quick else 9)
    if only and not any(only in f"{method}, {LAB}" for method in IN_LAB):
        return
    if reason := netlab.reason_against():
        yield Row(LAB, None, note=reason)
        return
    methods = [method for method in IN_LAB if only in f"{method}, {LAB}"]
    task = {"methods": methods, "turns": QUICK_TURNS if quick else TURNS}
    try:
        found = in_lab(__file__, [json.dumps(task)], hosts=2, rate=RATE)
    except RuntimeError as error:
        yield Row(LAB, None, note=f"failed: {error}")
        return
    dense = min(found["ddp"]["step"], found["none"]["step"])
    for method, mine in found.items():
        yield Row(f"{method}, {LAB}", mine["step"], dense, "dense", "ms", 2, 1, explain(mine))


def explain(found: dict) -> str:
    """What the bytes predict, and how far the step is from it."""
    return (
        f"predicted {found['predicted']:.1f} ms (measured {found['step'] / found['predicted'] - 1:+.0%}): "
        f"compute {found['compute']:.1f}, compress {found['compress']:.1f}, "
        f"{len(found['messages'])} messages of {found['alpha']:.2f}, {sum(found['messages']) / 1e3:,.0f} kB at "
        f"{found['bandwidth'] / 1e6:.1f} MB/s less head starts of {found['ahead']:.1f}; the card sent "
        f"{found['card'] / 1e3:,.0f} kB"
    )


def one_core(method: str, repeats: int) -> Row:
    """Milliseconds for a message and for adding it up."""
    import numpy as np

    import nn

    layout = nn.models.build(MODEL, IN_SHAPE, CLASSES).layout
    gradients = np.random.default_rng(SEED).standard_normal(layout.size).astype("f4") / 1000
    given = np.empty_like(gradients)

    def fresh() -> np.ndarray:  # as a compressor may write into what it is given
        given[:] = gradients
        return given

    def speed(milliseconds: float) -> str:
        return f"{gradients.nbytes / milliseconds / 1e3:,.0f}"

    if method.startswith("powersgd"):  # no messages of single ranks: its two products and what follows
        reducer = reducing(method, layout, Alone(1))
        took = fastest(lambda step: reducer(fresh(), step), repeats)
        note = f"{speed(took)} MB/s"
    else:
        from parallel.sync.compression import parse

        compressor, total = parse(method).attach(layout.region(), "f4"), np.zeros_like(gradients)
        message = compressor.encode(gradients.copy(), 0)
        encode = fastest(lambda step: compressor.encode(fresh(), step), repeats)
        decode = fastest(lambda step: compressor.decode(message, total), repeats)
        took, fewer = encode + decode, gradients.nbytes / len(message)
        note = f"{speed(encode)} MB/s and {speed(decode)}, {fewer:.0f} times fewer bytes"
    return Row(f"{method}, one core", took, None, "", "ms", 1, 1, note)


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
    from parallel.sync.compression import parse

    compressor = parse(method).attach(layout.region(), "f4", SEED, (rank, wire.size))
    return lambda g, step: compressor.reduce(g, wire, step)


# ----------------------------------------------------------------------------------------- what runs in the lab


def work(task: dict) -> None:
    """Measure on two hosts; rank 0 prints what was found (collective)."""
    import numpy as np
    from mpi4py import MPI

    import nn
    from collectives import Communicator
    from parallel import DistributedDataParallel
    from parallel.sync.compression import parse

    world = MPI.COMM_WORLD
    communicator = Communicator(world)
    rng = np.random.default_rng(world.Get_rank())
    x = rng.random((BATCH, *IN_SHAPE), np.float32)
    y = rng.integers(0, CLASSES, BATCH)
    other = 1 - world.Get_rank()

    def parts() -> tuple:
        return nn.models.build(MODEL, IN_SHAPE, CLASSES), nn.CrossEntropyLoss(), nn.SGD(0.01)

    def exchange(nbytes: int) -> Callable[[int], object]:
        mine, theirs = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        return lambda _: world.Sendrecv(mine, other, recvbuf=theirs, source=other)

    serial, small = nn.Trainer(*parts()), np.zeros(16)
    gradients = np.empty_like(serial.gradients)
    trainers = {"ddp": DistributedDataParallel(*parts(), communicator)}
    for method in ("none", *task["methods"]):
        trainers[method] = DistributedDataParallel(*parts(), communicator, compressor=parse(method))
    messages = {method: [trainers["ddp"].gradients.nbytes] for method in trainers}  # 2 n (p-1)/p
    calls: dict[str, Callable[[int], object]] = {
        "compute": lambda _: serial.step(x, y, 2 * BATCH),
        "alpha": lambda _: communicator.Allreduce(MPI.IN_PLACE, small),
        **{f"exchange {nbytes}": exchange(nbytes) for nbytes in LARGE},
    }
    for method, trainer in trainers.items():
        calls[f"step {method}"] = lambda _, trainer=trainer: trainer.step(x, y, 2 * BATCH)
        if method != "ddp":
            trainer.sync.wire.traffic.bytes = log = Log()
            messages[method] = log.messages
            reducer = reducing(method, trainer.network.layout, Alone(2), world.Get_rank())
            calls[f"compress {method}"] = lambda step, r=reducer: r(gradients, step)

    times: dict[str, list[float]] = {name: [] for name in calls}
    card = dict.fromkeys(calls, 0)
    for turn in range(task["turns"]):
        for name, call in calls.items():
            before = card_bytes()
            for i in range(IN_TURN):
                gradients[:] = serial.gradients
                time.sleep(PAUSE)
                world.Barrier()
                start = time.perf_counter()
                call(turn * IN_TURN + i)
                times[name] += [time.perf_counter() - start] * (i > 0)
            card[name] += card_bytes() - before
    slower = np.array([1e3 * median(each) for each in times.values()])
    world.Allreduce(MPI.IN_PLACE, slower, MPI.MAX)
    took = dict(zip(times, slower.tolist(), strict=True))

    short, long = (took[f"exchange {nbytes}"] for nbytes in LARGE)
    bandwidth = 1e3 * (LARGE[1] - LARGE[0]) / (long - short)
    ahead = max(0.0, 1e3 * LARGE[1] / bandwidth + took["alpha"] - long)
    found, steps = {}, IN_TURN * task["turns"]
    for method in trainers:
        each = messages[method][-len(messages[method]) // steps :] if method != "ddp" else messages[method]
        compress = took.get(f"compress {method}", 0.0)
        sending = sum(took["alpha"] + max(0.0, 1e3 * nbytes / bandwidth - ahead) for nbytes in each)
        found[method] = {
            "step": took[f"step {method}"], "predicted": took["compute"] + compress + sending,
            "compute": took["compute"], "compress": compress, "messages": each, "alpha": took["alpha"],
            "bandwidth": bandwidth, "ahead": ahead, "card": card[f"step {method}"] / steps,
        }  # fmt: skip
    if world.Get_rank() == 0:
        print(json.dumps(found), flush=True)


class Log(Counter):
    """Bytes by operation, as Traffic counts them, and `messages`: those of every message."""

    def __init__(self):
        super().__init__()
        self.messages: list[int] = []

    def __setitem__(self, operation: str, total: int) -> None:
        self.messages.append(total - self[operation])
        super().__setitem__(operation, total)


def card_bytes() -> int:
    """Bytes that this host's network card has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    return 0


if __name__ == "__main__":
    work(json.loads(arguments(__doc__)[0]))
