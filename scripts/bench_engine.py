"""A training step (forward, backward, update) of seven models, in float32, against PyTorch on the same cores.

Ours and the peer's run in two processes that take turns, each with the same BLAS threads, on the same batches, which
lie in memory; the median over all steps counts. Each model has rows for its time, for the memory of a step, and for the
allocations of a step; every time's note has the roofline: what the step's matrix products would take at the speed of a
large one (direct convolution; Winograd needs fewer), and which part of the step is not that. Beside it a floor for
whoever writes layers in NumPy, measured in the same steps: the time that our products take, in the shapes that they
have, which of it small ones take (attention's, a recurrent layer's step), and GELU's normal distribution.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarking import Row, arguments, geometric_mean

from parallel.launch import blas

LARGE = 128 * 1024  # bytes: from here on malloc asks the operating system; below are NumPy's own buffers of 32 KiB
SMALL = 1 << 20  # multiply-accumulates of a matrix product: OpenBLAS has no time to get up to speed
MIB = 1 << 20
EXPERTS = "8 experts, top 2"


@dataclass(frozen=True)
class Case:
    """A model of nn.models, the shape of its samples, classes, batch and learning rate."""

    model: str
    in_shape: tuple[int, ...]
    classes: int
    batch: int
    lr: float = 0.01
    sigmoid: bool = False  # with the quadratic loss: the classical digit experiment


CASES = {
    "mlp 784-30-10, batch 10": Case("mlp:784,30,10", (784,), 10, 10, 3.0, sigmoid=True),
    "mlp 784-128-10, batch 64": Case("mlp:784,128,10", (784,), 10, 64),
    "lenet5, batch 64": Case("lenet5", (28, 28, 1), 10, 64),
    "vgg-small, batch 32": Case("vgg-small", (32, 32, 3), 10, 32),
    "resnet20, batch 32": Case("resnet20", (32, 32, 3), 10, 32),
    "transformer, batch 16": Case("transformer:128,4,2", (64,), 256, 16),
    "lstm, batch 16": Case("lstm:128,2", (64,), 256, 16),
}


def rows(quick: bool = False, only: str = "", explain: bool = False) -> Iterator[Row]:
    """Times with 1 and 2 threads, memory and allocations with 1; or where time goes (`explain`)."""
    if explain:
        for case in CASES:
            if only in case:
                worker = Worker("ours", case, 1)
                try:
                    yield from (Row(**row) for row in worker.ask({"passes": 1 if quick else 20}))
                finally:
                    worker.close()
        return
    for threads in (1, 2):
        times = []
        for case in CASES:
            if only in case:
                for row in compare(case, threads, quick):
                    times += [row] if row.unit == "ms" else []
                    yield row
        if len(times) > 1:
            yield geometric_mean("geometric mean", times)
    if only in EXPERTS:
        yield compare_experts(quick)


def compare_experts(quick: bool) -> Row:
    """Positions sorted by expert, against a loop in which every expert computes all; alternating runs, one thread."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    import nn

    features, experts, top = 128, 8, 2
    layer = nn.MixtureOfExperts(features, experts, top, auxiliary=0)
    network = nn.Network(layer, (64, features))
    rng, ctx = np.random.default_rng(0), network.context()
    ctx.network_context.input_gradient = True
    parameters, gradients = (network.layout.zeros(np.float32) for _ in range(2))
    network.layout.initialize(parameters, 0)
    p, g = network.layout.views(parameters), network.layout.views(gradients)
    x, gy = (rng.standard_normal((16, 64, features)).astype("f4") for _ in range(2))

    def sorted_by_expert():
        y, saved = network.forward(p, x, ctx)
        return y.copy(), network.backward(p, g, gy.copy(), saved, ctx)

    def dense_loop():
        rows, upstream = x.reshape(-1, features), gy.reshape(-1, features)
        routing = layer.route(np.einsum("nd,de->ne", rows, p.router), 64, ctx)
        weights = np.zeros((len(rows), experts), np.float32)
        np.put_along_axis(weights, routing.chosen, routing.weights, axis=1)
        y, gx, gA, gB = np.zeros_like(rows), np.zeros_like(rows), np.empty_like(p.A), np.empty_like(p.B)
        for e in range(experts):
            hidden, slope = layer.apply.forward(None, rows @ p.A[e], ctx)
            y += weights[:, e, None] * (hidden @ p.B[e])
            gout = weights[:, e, None] * upstream
            ghidden, _ = layer.apply.backward(None, gout @ p.B[e].T, slope, ctx)
            gA[e], gB[e] = rows.T @ ghidden, hidden.T @ gout
            gx += ghidden @ p.A[e].T
        return y, gx

    taken: dict = {sorted_by_expert: [], dense_loop: []}
    with threadpool_limits(1, user_api="blas"):
        if np.abs(sorted_by_expert()[0].reshape(-1, features) - dense_loop()[0]).max() > 1e-3:
            raise ValueError(f"{EXPERTS}: the loop computes something else")
        for _ in range(2 if quick else 30):
            for compute, seconds in taken.items():
                start = time.perf_counter()
                compute()
                seconds.append(time.perf_counter() - start)
    ours, loop = (1e3 * median(seconds) for seconds in taken.values())
    note = (
        f"forward and backward, 1,024 positions, {features} features; the loop has {experts / top:g} times the products"
    )
    return Row(EXPERTS, ours, loop, "dense loop (NumPy)", "ms", 1, 1, note)


def compare(case: str, threads: int, quick: bool) -> Iterator[Row]:
    """Both sides take turns: a block of steps each, as often as it takes."""
    rounds, seconds = (1, 0.02) if quick else (7, 0.5)
    has_peer = find_spec("torch") is not None
    sides = {"ours": Worker("ours", case, threads)}
    try:
        if has_peer:
            sides["peer"] = Worker("peer", case, threads)
        times, cpu = {side: [] for side in sides}, {side: [] for side in sides}
        peak, floors = 0.0, []
        for _ in range(rounds):
            for side, worker in sides.items():
                steps, cpu_of_a_step = worker.ask({"seconds": seconds})
                times[side] += steps
                cpu[side].append(cpu_of_a_step)
            floors += sides["ours"].ask({"floors": 3})
            peak = max(peak, sides["ours"].ask({"peak": quick}))
        facts = {side: worker.ask({"facts": threads == 1}) for side, worker in sides.items()}
    finally:
        for worker in sides.values():
            worker.close()
    ours, peer = facts["ours"], facts.get("peer", {"name": "", "memory": None, "note": "PyTorch is not installed"})
    if has_peer and ours["parameters"] != peer["parameters"]:
        raise ValueError(f"{case}: {ours['parameters']} parameters here, {peer['parameters']} in {peer['name']}")
    step = 1e3 * median(times["ours"])
    floor = 2e3 * ours["macs"] / (1e9 * peak)
    note = f"GEMM floor {floor:.3g} ms at {peak:.0f} GF/s, "
    note += f"{1 - floor / step:.0%} of the step is not GEMM" if step > floor else "the step is below it, by Winograd"
    theirs = 1e3 * median(times["peer"]) if has_peer else None
    note += f"; {floor_note({name: 1e3 * median(each[name] for each in floors) for name in floors[0]}, theirs)}"
    note += "; CPU time of a step " + " and ".join(f"{1e3 * min(costs):.3g} ms" for costs in cpu.values())
    note += f"; {peer['note']}" if peer["note"] else ""
    yield Row(case, step, theirs, peer["name"], "ms", 1, threads, note)
    if threads == 1:
        note = "peak above what the process had before the model, batches included"
        yield Row(f"{case}: memory of a step", ours["memory"], peer["memory"], peer["name"], "MiB", 1, threads, note)
        note = ", ".join(ours["allocating"]) or "no call of a layer, loss or optimizer"
        note = f"calls that allocate more than {LARGE // 1024} KiB: {note}"
        yield Row(f"{case}: large allocations", len(ours["allocating"]), None, "", "calls", 1, threads, note)


def floor_note(taken: dict[str, float], theirs: float | None) -> str:
    """What a step cannot do without, in milliseconds, and what share of the peer's step that is."""
    note = f"products alone {taken['products']:.3g} ms"
    note += f", {taken['small']:.3g} of them small ones" if taken["small"] else ""
    note += f"; normal distribution {taken['distribution']:.3g} ms" if taken["distribution"] else ""
    together = taken["products"] + taken["distribution"]
    return note + (f"; {together / theirs:.2f} of the peer's step" if theirs else "")


class Worker:
    """A process of one side: a line of JSON asks, a line of JSON answers."""

    def __init__(self, side: str, case: str, threads: int):
        self.name = f"{case} ({side}, {threads} threads)"
        self.process = subprocess.Popen(
            [sys.executable, __file__, side, case],
            env=os.environ | blas.settings(threads),  # before NumPy is imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for who asks
        )

    def ask(self, question: dict):
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            status = self.process.wait()
            why = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}, its message above"
            raise RuntimeError(f"{self.name} {why}")
        return json.loads(answer)

    def close(self) -> None:
        self.process.kill()  # it may be at something, after Ctrl-C
        with contextlib.suppress(BrokenPipeError):  # of a process that has died, with a question unread
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


# ------------------------------------------------------------------------------------- what runs in a worker


def work(side: str, case: str) -> None:
    """Answer questions until the input ends."""
    runner = (Ours if side == "ours" else Peer)(case)
    for line in sys.stdin:
        question = json.loads(line)
        if "seconds" in question:
            answer = run(runner, question["seconds"])
        elif "floors" in question:
            answer = runner.floors(question["floors"])
        elif "passes" in question:
            answer = runner.passes(question["passes"])
        elif "peak" in question:
            answer = matmul_speed(2 if question["peak"] else 6)
        else:
            answer = runner.facts(question["facts"])
        print(json.dumps(answer), flush=True)


def run(runner, seconds: float) -> tuple[list[float], float]:
    """Seconds of each step, for about that long, at least 3 after one that is not counted; and CPU seconds a step.

    With one thread the CPU time is what the step takes on a machine that does nothing else.
    """
    times, end, cpu = [], time.perf_counter() + seconds, time.process_time()
    while len(times) < 4 or time.perf_counter() < end:
        x, y = runner.batches[len(times) % len(runner.batches)]
        start = time.perf_counter()
        runner.step(x, y)
        times.append(time.perf_counter() - start)
    return times[1:], (time.process_time() - cpu) / len(times)


def make_batches(case: Case) -> list[tuple]:
    """Four batches from a fixed seed: the same on both sides."""
    import numpy as np

    rng = np.random.default_rng(0)
    if case.model.startswith(("transformer", "lstm")):
        ids = rng.integers(0, case.classes, (4, case.batch, case.in_shape[0] + 1))
        return [(np.ascontiguousarray(s[:, :-1]), np.ascontiguousarray(s[:, 1:])) for s in ids]
    shape = (case.batch, *case.in_shape)
    return [(rng.random(shape, np.float32), rng.integers(0, case.classes, case.batch)) for _ in range(4)]


def memory(field: str) -> int:
    """Bytes: VmRSS, what this process has in memory, or VmHWM, the most it had (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


class Measured:
    """Memory of the first steps: the peak above what the process had before the model was made."""

    def __init__(self, case: str):
        self.case = case
        self.warm_up_libraries()
        self.batches = make_batches(CASES[case])
        linux = Path("/proc/self/clear_refs").exists()
        if linux:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
            before = memory("VmRSS")
        self.build()
        for x, y in self.batches:
            self.step(x, y)
        self.peak_memory = (memory("VmHWM") - before) / MIB if linux else None


class Ours(Measured):
    def warm_up_libraries(self) -> None:
        import numpy as np

        import nn  # noqa: F401

        a = np.ones((256, 256), np.float32)
        a @ a

    def build(self) -> None:
        import numpy as np

        import nn
        from nn import losses
        from nn.optim import optimizers

        case = CASES[self.case]
        names = {"activation": "sigmoid", "output_activation": "sigmoid"} if case.sigmoid else {}
        network = nn.models.build(case.model, case.in_shape, case.classes, np.float32, **names)
        loss = losses.QuadraticLoss() if case.sigmoid else losses.CrossEntropyLoss()
        self.trainer = nn.Trainer(network, loss, optimizers.SGD(case.lr))

    def step(self, x, y) -> None:
        self.trainer.step(x, y)

    def floors(self, steps: int) -> list[dict[str, float]]:
        """Seconds of each of some steps in NumPy's matrix products, in small ones of these, and in GELU's erf."""
        import numpy as np

        from nn.core import gradients
        from nn.layers import activations, dense

        taken = []

        def timed(work, names):
            def call(*args, **kwargs):
                start = time.perf_counter()
                result = work(*args, **kwargs)
                seconds = time.perf_counter() - start
                for name in names(*args):
                    taken[-1][name] += seconds
                return result

            return call

        def kinds(a, b, *_):
            small = a.ndim > 1 and math.prod(a.shape[-2:]) * b.shape[-1] <= SMALL
            return ("products", "small") if small else ("products",)

        originals = [(np, "dot"), (np, "matmul"), (gradients, "dot"), (dense, "dot"), (activations, "distribution")]
        originals = [(room, name, getattr(room, name)) for room, name in originals]
        try:
            for room, name, work in originals:
                setattr(room, name, timed(work, (lambda *_: ("distribution",)) if name == "distribution" else kinds))
            for x, y in self.batches[:steps]:
                taken.append(dict.fromkeys(("products", "small", "distribution"), 0.0))
                self.step(x, y)
        finally:
            for room, name, work in originals:
                setattr(room, name, work)
        return taken

    def passes(self, steps: int, least: float = 0.01) -> list[dict]:
        """Rows of a step's passes over memory, those that take at least that part of it, beside streaming speed."""
        from engine_passes import PRODUCTS, passes_of_a_step

        step, passes = passes_of_a_step(self.trainer, self.batches, steps)
        moves = {key: entry for key, entry in passes.items() if key[-1] not in PRODUCTS}
        products = sum(entry.seconds for key, entry in passes.items() if key[-1] in PRODUCTS)
        moved, streaming = (sum(getattr(entry, name) for entry in moves.values()) for name in ("seconds", "streaming"))
        rows = []

        def add(name: str, seconds: float, streaming: float | None, note: str) -> None:
            best = None if streaming is None else 1e3 * streaming
            rows.append(dict(case=name, ours=1e3 * seconds, peer=best, peer_name="at full speed", note=note))

        add(self.case, step, None, f"products {1e3 * products:.3g} ms; passes over memory below; the rest is Python")
        add("  passes", moved, streaming, f"{sum(e.nbytes for e in moves.values()) / MIB:.3g} MiB")
        for (layer, kind, function), entry in sorted(moves.items(), key=lambda item: -item[1].seconds):
            if entry.seconds >= least * step:
                note = (
                    f"{entry.calls} calls, {entry.nbytes / MIB:.3g} MiB, {entry.nbytes / entry.seconds / 1e9:.3g} GB/s"
                )
                add(f"  {layer} {kind} {function}", entry.seconds, entry.streaming, note)
        return rows

    def facts(self, allocations: bool) -> dict:
        """What there is to tell besides times."""
        from nn.analysis.workload import count

        layers = count(self.trainer.network)
        return {
            "parameters": self.trainer.network.layout.count,
            "macs": CASES[self.case].batch * sum(row.forward + row.backward for row in layers),
            "memory": self.peak_memory,
            "allocating": self.allocating_calls() if allocations else [],
        }

    def allocating_calls(self) -> list[str]:
        """Calls in one step during which tracemalloc counts more than LARGE bytes above what there was before.

        A container is left out where a call inside it is already there.
        """
        import tracemalloc

        from nn.analysis.inspection import calls

        found, inner = [], [0]

        def around(path: str, name: str, kind: str, call):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            inner.append(0)
            result = call()
            peak = max(tracemalloc.get_traced_memory()[1], inner.pop())
            inside = f"{path}." if path else ""
            if peak - before > LARGE and not any(entry.startswith(inside) for entry in found):
                found.append(f"{path} {name} {kind} {(peak - before) // 1024} KiB")
            inner[-1] = max(inner[-1], peak)  # of the call around this one, too: reset_peak has forgotten it
            return result

        with calls(self.trainer, around):
            self.step(*self.batches[0])
            tracemalloc.start()
            found.clear()
            self.step(*self.batches[1])
            tracemalloc.stop()
        return found


class Peer(Measured):
    def warm_up_libraries(self) -> None:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        layers = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3), torch.nn.Flatten(), torch.nn.Linear(36, 2))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            layers(torch.ones(2, 1, 8, 8)).sum().backward()
            optimizer.step()

    def build(self) -> None:
        import torch_models

        case = CASES[self.case]
        self.note = ""
        make = lambda channels_last: torch_models.Trainer(self.case, case.lr, channels_last)
        self.trainer = make(False)
        batches = self.batches
        self.batches = [self.trainer.batch(*batch) for batch in batches]
        if len(case.in_shape) == 3:  # images: the faster of the two memory formats
            usual = self.trainer, self.batches
            time_usual = median(run(self, 0.3)[0])
            self.trainer = make(True)
            self.batches = [self.trainer.batch(*batch) for batch in batches]
            self.note = "peer with channels last"
            if median(run(self, 0.3)[0]) > time_usual:
                (self.trainer, self.batches), self.note = usual, "peer with channels first"

    def step(self, x, y) -> None:
        self.trainer.step(x, y)

    def facts(self, allocations: bool) -> dict:
        import torch

        return {
            "name": f"PyTorch {torch.__version__.partition('+')[0]}",
            "parameters": self.trainer.parameters,
            "memory": self.peak_memory,
            "note": self.note,
        }


def matmul_speed(repeats: int, n: int = 1024) -> float:
    """GF/s of NumPy's product of two n x n float32 matrices, the best of several: the roof."""
    import numpy as np

    a, b = np.random.default_rng(0).random((2, n, n), np.float32)
    out, best = np.empty_like(a), float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        np.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2e-9 * n**3 / best


if __name__ == "__main__":
    work(*arguments(__doc__))
