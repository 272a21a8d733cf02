"""What it costs to share the network itself: pipelines and layers cut among ranks, with a BLAS thread each.

one stage         a pipeline on one rank beside the same micro-batches, one after the other, without it
of the clock      a step of every schedule, and of tensor parallelism, beside what strategies/estimate.py says from
                  layers and messages measured on the same ranks: on two here, on two hosts of the lab (netlab.py) and
                  on four, which share cores and rest behind what they compute (slow_cores.py); and in which kinds of
                  action the two differ
the plan's word   a step of a small VGG on four hosts of the lab as `--strategy auto:stale=1` would run it, beside data
                  parallelism; and by how much the plan said that it is faster
halos             a step on images of which four hosts of the lab have a quarter each, where rows of the others are
                  hidden behind what needs none of them, beside one that waits for them
PyTorch           the same network, micro-batches and cut with torch.distributed.pipelining, and with its
                  tensor.parallel, over gloo

In one job all sides take turns, a block of steps each, in an order that changes; the median over the rounds of the
median step of a block counts, of the mean of the ranks. Layers are measured again in each round, on all ranks at once,
as what else the machine does, and how fast it is, changes from one to the next: the clock's step of a round stands
beside the one measured in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

import netlab
import numpy as np
import slow_cores
from bench_training import RANKS, Torch, block, quiet_barrier, run
from benchmarking import ETHERNET, Row, arguments, in_lab
from threadpoolctl import threadpool_limits

import nn
from collectives.steps import chunk

MICRO_BATCHES = 4
MODELS = {"mlp:784,1024,1024,1024,10": (784,), "cnn": (28, 28, 1)}

WIDTHS = (784, 1024, 1024, 1024, 1024, 1024, 10)
BATCH, MICRO = 256, 8
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev")
IN_TORCH = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
TENSOR = "tensor"
WAITING = "messages and waiting"
FAR_OFF = 0.15  # of the clock
LONG = 120  # seconds after which no round begins
LAB_RATE = 100  # Mbit/s
PLANNED_BATCH = 64
HOSTS, PLANNED = 4, "the plan's word for a small VGG"
HALOS, IMAGE = f"rows of other ranks hidden, {HOSTS} hosts, {LAB_RATE} Mbit/s", 128
SIZES = tuple(4**k for k in range(1, 11))  # bytes of the messages that are measured: 4 B ... 1 MiB


class Piece(NamedTuple):
    """What is measured together: the names of its rows, seconds that it takes on two cores, what yields the rows."""

    cases: list[str]
    seconds: int
    measure: Callable[[], Iterator[Row]]


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """One stage of each network; every schedule and tensor parallelism, here and in the lab; the plan; halos.

    What comes next, and how long it and all that is left may take, is said on stderr.
    """
    wanted = [piece for piece in pieces(quick) if any(only in case for case in piece.cases)]
    left = sum(piece.seconds for piece in wanted)
    for piece in wanted:
        more = f" and {len(piece.cases) - 1} more" * (len(piece.cases) > 1)
        about = f": about {piece.seconds} of {left} s that are left" * (not quick)
        print(f"# {piece.cases[0]}{more}{about}", file=sys.stderr, flush=True)
        left -= piece.seconds
        try:
            yield from (row for row in piece.measure() if only in row.case)
        except RuntimeError as error:
            yield from (Row(case, None, note=f"failed: {error}") for case in piece.cases if only in case)


def pieces(quick: bool) -> Iterator[Piece]:
    """All that there is, in the order in which it is measured."""
    for model, shape in MODELS.items():
        case = f"one stage, {MICRO_BATCHES} micro-batches, {model}"
        yield Piece([case], 10, partial(one_stage, case, model, shape, 1 if quick else 30))
    here = f"{RANKS} ranks"
    yield Piece(cases(here), 150, lambda: shared_rows(here, run({"quick": quick}, suite=__file__)))
    for hosts, seconds in ((RANKS, 150), (HOSTS, 200)):
        task = {"quick": quick, "meeting": ""}
        named = cases(f"{hosts} hosts, {LAB_RATE} Mbit/s", torch=False)
        yield Piece(named, seconds, partial(lab_rows, named, shared_rows, hosts, task))
    for case, task, hosts, seconds, row in (
        (f"{PLANNED}, {HOSTS} hosts, {LAB_RATE} Mbit/s", "planned", HOSTS, 110, planned_row),
        (HALOS, "halos", HOSTS, 60, halo_row),
    ):
        yield Piece([case], seconds, partial(lab_rows, [case], row, hosts, {"quick": quick, "task": task}))


def lab_rows(named: list[str], rows_of: Callable, hosts: int, task: dict) -> Iterator[Row]:
    """What a task tells on so many hosts of the lab; why there is none."""
    if reason := netlab.reason_against():
        yield from (Row(case, None, note=reason) for case in named)
        return
    found = in_lab(__file__, [json.dumps(task)], hosts, LAB_RATE, options=ETHERNET)
    yield from rows_of(named[0] if len(named) == 1 else f"{hosts} hosts, {LAB_RATE} Mbit/s", found)


def cases(where: str, torch: bool = True) -> list[str]:
    """The names of the rows of all that ranks do there."""
    peers = "of the clock", *["PyTorch"] * torch
    return [f"{name}, {where}, {peer}" for name in (*SCHEDULES, TENSOR) for peer in peers]


def one_stage(case: str, model: str, shape: tuple[int, ...], steps: int) -> Iterator[Row]:
    """Both take turns, step by step; processor seconds, so that what else the machine does counts little."""
    from mpi4py import MPI

    from collectives import Communicator
    from parallel import Pipeline

    rng = np.random.default_rng(0)
    x, y = rng.random((256, *shape), np.float32), rng.integers(0, 10, 256)
    arguments = nn.models.build(model, shape, 10), nn.CrossEntropyLoss(), nn.SGD(0.01)
    with threadpool_limits(1, user_api="blas"):
        plain = nn.Trainer(*arguments)
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
    yield Row(case, ours, peer, "nn.Trainer, as many micro-batches", note=f"{steps} alternating steps, processor time")


def shared_rows(where: str, found: dict) -> Iterator[Row]:
    """A step of each side beside the clock's, and beside PyTorch's where it has the same."""
    for name, predicted in found["predicted"].items():
        measured = 1e3 * median(found["seconds"][name])
        case = f"{name}, {where}, of the clock"
        note = f"{found['what']}; {off_the_clock(found['seconds'][name], predicted)}"
        note += f"; {differing(found['kinds'][name])}"
        yield Row(case, measured, 1e3 * median(predicted), "predicted", "ms", found["ranks"], 1, note)
        case, peer = f"{name}, {where}, PyTorch", found["seconds"].get(f"torch {name}")
        if peer:
            yield Row(case, measured, 1e3 * median(peer), found["torch"], "ms", RANKS, 1, found["what"])


def spread(values: list[float]) -> str:
    """The middle one, and the quartiles of so many."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:+.0%} ({low:+.0%} to {high:+.0%} in the middle half of {len(values)} rounds)"


def off_the_clock(measured: list[float], predicted: list[float]) -> str:
    """By how much steps differ from what was predicted in the same round."""
    return f"the clock is {spread([m / p - 1 for m, p in zip(measured, predicted, strict=True)])} off"


def differing(kinds: list[dict[str, list[float]]]) -> str:
    """Of every kind of action the milliseconds of a step, measured and predicted: the median over rounds."""
    seen = {kind: [1e3 * median(each[kind][i] for each in kinds) for i in (0, 1)] for kind in kinds[0]}
    text = ", ".join(f"{kind} {measured:.3g} ({predicted:.3g})" for kind, (measured, predicted) in seen.items())
    total = sum(predicted for _, predicted in seen.values())
    most = max(seen, key=lambda kind: abs(seen[kind][0] - seen[kind][1]))
    off = (sum(measured for measured, _ in seen.values()) - total) / total
    return f"ms (predicted): {text}" + (f"; most of it lies in {most}" if abs(off) > FAR_OFF else "")


def planned_row(case: str, found: dict) -> Iterator[Row]:
    """What the plan chose beside data parallelism, and how far its word of both is off."""
    said, seen = found["predicted"], {name: median(each) for name, each in found["seconds"].items()}
    factors = [ddp / plan for ddp, plan in zip(found["seconds"]["ddp"], found["seconds"]["plan"], strict=True)]
    factor, promised = median(factors), said["ddp"] / said["plan"]
    off = ", ".join(f"{name} {seen[name] / said[name] - 1:+.0%}" for name in said)
    note = (
        f"{found['what']}: {found['words']}; {factor:.2f} times as fast, {promised:.2f} were promised: "
        f"{spread([each / promised - 1 for each in factors])}; steps beside the clock's: {off}"
    )
    yield Row(case, 1e3 * seen["plan"], 1e3 * seen["ddp"], "ddp", "ms", HOSTS, 1, note)


def halo_row(case: str, found: dict) -> Iterator[Row]:
    """A whole step with rows of other ranks on their way meanwhile, beside one that waits for them."""
    hidden, waited = (found["seconds"][way] for way in ("hidden", "waited for"))
    gain = spread([a / b - 1 for a, b in zip(hidden, waited, strict=True)])
    note = f"{found['what']}; a whole step takes {gain} longer than where rows are waited for"
    yield Row(case, 1e3 * median(hidden), 1e3 * median(waited), "waited for", "ms", HOSTS, 1, note)


# ------------------------------------------------------------------------------------- what runs on the ranks


def work(task: dict) -> None:
    """Carry out a task; rank 0 prints what was found."""
    from mpi4py import MPI

    from collectives import Communicator

    world = Communicator(MPI.COMM_WORLD)
    networks = {"planned": small_vgg, "halos": images}
    of = networks.get(task.get("task"), network)()
    with (
        threadpool_limits(1, user_api="blas"),
        slow_cores.of(slow_cores.times(world.size), of, nn.SGD(0.01)) as cores,
    ):
        if "meeting" in task:
            found = shared(world, task["quick"], task["meeting"])
        else:
            found = {"planned": planned, "halos": halo_steps}[task["task"]](world, task["quick"])
    found["what"] += cores.describe()
    if world.rank == 0:
        print(json.dumps(found), flush=True)


def small_vgg() -> nn.Network:
    """Two pairs of convolutions and pools, then what has nearly all parameters: two linear layers."""
    layers, before = [], 3
    for channels in (16, 32):
        for _ in "12":
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(8 * 8 * before, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Network(nn.Sequential(*layers), (32, 32, 3))


def planned(world, quick: bool) -> dict:
    """Seconds a step, for each round, of data parallelism and of what the plan chooses; and what it says of both."""
    from collectives.pricing.measure import measure_network
    from parallel.command import auto
    from parallel.command.factory import Parts
    from parallel.command.options import Options
    from parallel.planning.choice import options_of
    from parallel.planning.job import Axes
    from parallel.strategies import build_trainer
    from parallel.strategies.estimate import estimate, ranking

    rng = np.random.default_rng(0)
    x, y = rng.random((PLANNED_BATCH, 32, 32, 3), np.float32), rng.integers(0, 10, PLANNED_BATCH)
    parts = Parts(None, small_vgg(), nn.CrossEntropyLoss(), nn.SGD(0.01))
    measured = measure_network(world, SIZES[:: 5 if quick else 1], 0.002 if quick else 0.05)
    share = PLANNED_BATCH // world.size
    job = replace(measured_job(world, small_vgg, x[:share], y[:share], 1, 2 if quick else 20), batch=PLANNED_BATCH)
    told = None
    if world.rank == 0:
        options = Options(strategy="auto:stale=1", batch=PLANNED_BATCH)
        chosen, _ = auto.choose(options, parts, job, measured, world.size)
        best = next(
            p for p in ranking(job, world.size, measured) if auto.with_defaults(options_of(p, parts.network)) == chosen
        )
        told = chosen, {"plan": best.seconds, "ddp": estimate(job, "ddp", Axes(world.size), measured).seconds}
    chosen, predicted = world.bcast(told)

    def side(words: dict) -> Callable:
        options = Options(batch=PLANNED_BATCH, **words)
        trainer = build_trainer(options, small_vgg(), parts.loss, nn.SGD(0.01), world)
        index, count = trainer.shard
        mine = slice(*chunk(PLANNED_BATCH, count, index))

        def steps(count: int) -> float:
            """Seconds of one, of so many; before them the pipeline fills, and behind them it is drained."""
            for _ in range(2):
                trainer.step(x[mine], y[mine], PLANNED_BATCH)
            start = time.perf_counter()
            for _ in range(count):
                trainer.step(x[mine], y[mine], PLANNED_BATCH)
            taken = (time.perf_counter() - start) / count
            trainer.synchronize(0.0)
            return taken

        return steps

    sides = {"plan": side(chosen), "ddp": side({"strategy": "ddp"})}
    words = " ".join(f"--{name} {value}" for name, value in chosen.items() if value)
    found = {"what": f"{parts.network.layout.count:,} parameters, {PLANNED_BATCH} samples", "words": words}
    found |= {"predicted": predicted, "seconds": {name: [] for name in sides}}
    order = np.random.default_rng(0)  # the same on all ranks
    for _ in range(2 if quick else 6):
        for name in order.permutation(list(sides)).tolist():
            quiet_barrier(world)
            found["seconds"][name].append(mean(world.allgather(sides[name](2 if quick else 6))))
    return found


def images() -> nn.Network:
    """Four convolutions, and what tells classes."""
    layers, before = [], 3
    for channels in (16, 16, 32, 32):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
        before = channels
    layers += [nn.GlobalAvgPool2d(), nn.Linear(before, 10)]
    return nn.Network(nn.Sequential(*layers), (IMAGE, IMAGE, 3))


def halo_steps(world, quick: bool) -> dict:
    """Seconds a step, for each round, either way: of images of which every rank has some rows."""
    from parallel import SpatialParallel

    rng = np.random.default_rng(0)
    x, y = rng.random((4, IMAGE, IMAGE, 3), np.float32), rng.integers(0, 10, 4)
    many = SpatialParallel(images(), nn.CrossEntropyLoss(), nn.SGD(0.01), world)
    many.forward_backward.trial = None  # the rounds here try both ways
    ways = ("hidden", "waited for")
    found = {"what": f"4 convolutions, 4 images {IMAGE} x {IMAGE}", "seconds": {way: [] for way in ways}}
    order = np.random.default_rng(0)  # the same on all ranks
    for number in range(2 if quick else 13):
        for way in order.permutation(ways).tolist():
            many.forward_backward.hide(way)
            quiet_barrier(world)
            taken = median(block(many.step, [(x, y)], 2 if quick else 5))
            told = mean(world.allgather(taken))
            if number:  # the first round warms up
                found["seconds"][way].append(told)
    many.close()
    return found


def network() -> nn.Network:
    return nn.models.build("mlp:" + ",".join(map(str, WIDTHS)), WIDTHS[:1], WIDTHS[-1])


class Kinds:
    """Seconds of this rank's steps by kind: F, B, I, W of a pipeline, the update, and of parts of layers their sums.

    All else of a step is, in a pipeline, messages and waiting; with layers in parts it is computation.
    """

    def __init__(self, trainer):
        from parallel.reports.breakdown import wrap
        from parallel.strategies.pipeline.actions import parse

        self.spent: dict[str, float] = {}
        self.trainer, self.rest = trainer, WAITING
        wrap(trainer, "sync.update", partial(self.timed, "update"))
        if trainer.mesh.pipeline:
            trainer.forward_backward.note = lambda action, start, end: self.add(parse(action).kind, end - start)
        else:
            self.rest = "computation"
            wrap(trainer, "mesh.tensor.Allreduce", partial(self.timed, WAITING))

    def add(self, kind: str, seconds: float) -> None:
        self.spent[kind] = self.spent.get(kind, 0.0) + seconds

    def timed(self, kind: str, call: Callable) -> Callable:
        def timed(*arguments):
            start = time.perf_counter()
            result = call(*arguments)
            self.add(kind, time.perf_counter() - start)
            return result

        return timed

    def block(self, x, y, steps: int) -> dict[str, float]:
        """The middle one of so many steps: its seconds by kind, which add up to all of it."""
        found = []
        for _ in range(steps):
            self.spent.clear()
            start = time.perf_counter()
            self.trainer.step(x, y)
            taken = time.perf_counter() - start
            found.append((taken, self.spent | {self.rest: taken - sum(self.spent.values())}))
        return sorted(found, key=lambda each: each[0])[steps // 2][1]


def expected(job, trainer, network) -> dict[str, float]:
    """Seconds of a step by kind as the clock has them: of the mean of the ranks."""
    from parallel.planning.job import Axes
    from parallel.strategies.estimate import estimate
    from parallel.strategies.pipeline.actions import parts
    from parallel.strategies.pipeline.timing import stage_costs

    ranks = trainer.mesh.size
    if not trainer.mesh.pipeline:
        told = estimate(job, "ddp", Axes(tensor=ranks), network).parts
        return {"computation": told["computation"], "update": told["update"], WAITING: told["activations"]}
    placement, name = trainer.forward_backward.placement, trainer.forward_backward.schedule
    told = estimate(job, name, Axes(pipeline=ranks), network, micro_batches=MICRO, cuts=placement.cuts)
    stages = stage_costs(job.layers, [0, *placement.cuts, len(job.layers)], 0.0)
    kinds = {"F": job.head * MICRO / ranks}
    for action in (action for row in placement.rows for cell in row for action in parts(cell)):
        forward, inputs, weights = stages[action.stage][:3]
        each = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}[action.kind]
        kinds[action.kind] = kinds.get(action.kind, 0.0) + each / ranks
    kinds["update"] = told.parts["update"]
    return kinds | {WAITING: told.seconds - sum(kinds.values())}


def shared(world, quick: bool, meeting: str) -> dict:
    """Seconds a step of every side for each round, and what the clock says."""
    from collectives.pricing.measure import measure_network
    from parallel import Pipeline, TensorParallel

    rng = np.random.default_rng(0)
    samples, steps = (BATCH, 5) if world.size == RANKS else (BATCH // 2, 3)
    x, y = rng.random((samples, WIDTHS[0]), np.float32), rng.integers(0, WIDTHS[-1], samples)
    made = lambda: (network(), nn.CrossEntropyLoss(), nn.SGD(0.01), world)
    trainers = {name: Pipeline(*made(), schedule=name, micro_batches=MICRO) for name in SCHEDULES}
    trainers[TENSOR] = TensorParallel(*made())
    ours = {name: Kinds(each) for name, each in trainers.items()}
    what = f"mlp {'-'.join(map(str, WIDTHS))}, {samples} samples, {MICRO} micro-batches"
    found = {"what": what, "ranks": world.size}
    peer = Torch.start(world, meeting) if meeting else None
    theirs: dict[str, Callable] = {}
    if peer:
        found["torch"] = peer.name
        theirs = torch_sides(world)
    found |= {"seconds": {side: [] for side in (*ours, *theirs)}, "predicted": {}, "kinds": {}}
    order, start = np.random.default_rng(0), time.perf_counter()  # the same on all ranks
    for number in range(2 if quick else 13):
        if number > 1 and world.bcast(time.perf_counter() - start) > LONG:
            break  # on a busy machine fewer rounds, which the row says
        if number % 6 == 0:
            messages = measure_network(world, SIZES[:: 5 if quick else 1], 0.002 if quick else 0.02)
        count = 2 if quick else steps
        if number:
            small, whole = (measured_job(world, network, x, y, parts, max(2, count - 1)) for parts in (MICRO, 1))
        else:
            count = 1  # the first round warms up
        for side in order.permutation([*ours, *theirs]).tolist():
            quiet_barrier(world)
            if side in theirs:
                taken = median(block(theirs[side], [(x, y)], count))
                told = world.allgather(taken)
            else:
                each = ours[side].block(x, y, count)
                told = world.allgather(sum(each.values()))
                each = {kind: mean(world.allgather(seconds)) for kind, seconds in sorted(each.items())}
            if not number:
                continue
            found["seconds"][side].append(mean(told))
            if side in ours:
                clock = expected(whole if side == TENSOR else small, trainers[side], messages)
                found["predicted"].setdefault(side, []).append(sum(clock.values()))
                found["kinds"].setdefault(side, []).append({kind: (each[kind], clock[kind]) for kind in clock})
    if peer:
        peer.end()
    for each in trainers.values():
        each.close()
    return found


def measured_job(world, build: Callable, x, y, parts: int, repeats: int):
    """A step whose layers all ranks measure at once, in so many micro-batches: the mean."""
    from parallel.planning.job import Job
    from parallel.planning.layer_times import measure_layers

    quiet_barrier(world)
    times = measure_layers(nn.Trainer(build(), nn.CrossEntropyLoss(), nn.SGD(0.01)), x, y, repeats, parts)
    layers = [each.forward for each in times.layers], [each.backward for each in times.layers]
    told = world.allgather((*layers, [each.weight_gradient for each in times.layers], times.update, times.head))
    both = [np.mean(each, axis=0).tolist() for each in zip(*told, strict=True)]
    layers = [
        layer._replace(forward=f, backward=b, weight_gradient=w)
        for layer, f, b, w in zip(times.layers, *both[:3], strict=True)
    ]
    return Job(layers, len(x) // parts, len(x), update=both[3], sample_bytes=4.0 * x[0].size, head=both[4])


def torch_sides(world) -> dict[str, Callable]:
    """PyTorch's step of each schedule that it has as we do, and of tensor parallelism."""
    import torch
    from torch.distributed import device_mesh, pipelining
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn import functional as F

    def layers() -> list[torch.nn.Module]:
        torch.manual_seed(0)
        return [made for a, b in pairwise(WIDTHS) for made in (torch.nn.Linear(a, b), torch.nn.ReLU())][:-1]

    def line(name: str) -> Callable:
        whole = layers()
        half = len(whole) // 2
        mine = torch.nn.Sequential(*(whole[half:] if world.rank else whole[:half]))
        stage = pipelining.PipelineStage(mine, world.rank, RANKS, torch.device("cpu"))
        schedule = getattr(pipelining, IN_TORCH[name])(stage, MICRO, loss_fn=F.cross_entropy)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)

        def step(x, y):
            optimizer.zero_grad()
            if world.rank:
                schedule.step(target=torch.from_numpy(y), losses=[])
            else:
                schedule.step(torch.from_numpy(x))
            optimizer.step()

        return step

    mesh = device_mesh.init_device_mesh("cpu", (RANKS,))
    model = torch.nn.Sequential(*layers())
    ways = {str(2 * i): (ColwiseParallel, RowwiseParallel)[i % 2]() for i in range(len(WIDTHS) - 1)}
    model = parallelize_module(model, mesh, ways)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()

    return {f"torch {name}": line(name) for name in IN_TORCH} | {f"torch {TENSOR}": step}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work(json.loads(arguments(__doc__)[0]))
