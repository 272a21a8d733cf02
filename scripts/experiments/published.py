#!/usr/bin/env python3
"""Figures that others published, beside what the models of parallel/planning predict: docs/published.md and .svg.

    RINGPROP_DATA=... python scripts/experiments/published.py          # a few seconds; --out DIR for another place

Nothing is fitted to the figure that is predicted, but where a row says so. A row whose prediction is far off, or that
has none, says what a model of messages and computation cannot see. The layer profiles of PipeDream are read from
$RINGPROP_DATA/profiles (scripts/experiments needs no other data); without them their rows are left out, and told.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from collectives.pricing.networks import NETWORKS, Link, Network
from nn.models import build
from parallel.command.arguments import Parser, new_directory
from parallel.planning.job import Axes, Job
from parallel.planning.laws import bandwidth_to_hide
from parallel.planning.partition import partition
from parallel.planning.profile import LayerProfile, count_layers, read_profile
from parallel.planning.transformer import A100, Machine, Transformer, step, training_days
from parallel.strategies.estimate import estimate
from parallel.strategies.pipeline.checking import check, walk
from parallel.strategies.pipeline.schedules import rows as schedule_rows
from parallel.strategies.pipeline.timing import StageCost, time_pipeline

ROOT = Path(__file__).resolve().parents[2]
GBIT = 1e9 / 8
NO_LATENCY = Link(0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """One figure: what of, by whom, and the two values; None where there is no prediction, or only words."""

    what: str
    source: str
    published: float | str
    predicted: float | str | None
    unit: str
    note: str

    @property
    def difference(self) -> float | None:
        """Of the prediction, as a share of what was published."""
        if isinstance(self.published, str) or not isinstance(self.predicted, int | float):
            return None
        return self.predicted / self.published - 1


# ------------------------------------------------------------------------------------------ data parallelism


def timed(model: str, size: int, rate: float, samples: int) -> list[LayerProfile]:
    """The layers of a network, by their counts, as long as a rank of so many images a second takes for `samples`."""
    layers = count_layers(build(model, (size, size, 3), 1000), samples, 1e12, 1 / 500e9)
    measured = sum(layer.forward + layer.backward for layer in layers)
    return stretched(layers, samples / rate / measured)


def stretched(layers, times: float) -> list[LayerProfile]:
    """The same layers, slower."""
    return [
        layer._replace(
            forward=layer.forward * times,
            backward=layer.backward * times,
            weight_gradient=layer.weight_gradient * times,
        )
        for layer in layers
    ]


def even(parameters: float, rate: float, samples: int, layers: int = 100) -> list[LayerProfile]:
    """A network of which only parameters and images a second are known: equal layers, a third of the time forward."""
    each = samples / rate / layers
    return [LayerProfile(str(i), each / 3, 2 * each / 3, 0.0, 4 * parameters / layers) for i in range(layers)]


def weak(layers, samples: int, ranks: int, network: Network, compared: int = 1) -> float:
    """Seconds of a step on few ranks, with the same samples on each, as a share of those on many."""
    job = Job(layers, samples, samples, node_memory=False)
    one, many = (estimate(replace(job, batch=samples * n), "ddp", Axes(n), network).seconds for n in (compared, ranks))
    return one / many


def data_parallelism() -> Iterator[Row]:
    source = "lecture, ResNet-50 on 1,024 GPUs"
    layers = timed("resnet50", 224, 1457, 64)
    half = [layer._replace(parameters=layer.parameters / 2) for layer in layers]
    yield Row(
        "weak scaling of 1,024 GPUs against one node of 8",
        source,
        99.2,
        100 * weak(half, 64, 1024, NETWORKS["gpu-100g"], 8),
        "%",
        "100 Gbit/s a node, 64 images a GPU, 1,457 images/s alone, gradients of 16 bits in buckets behind backprop",
    )
    yield Row(
        "twice the GPUs, time of the whole run",
        source,
        "18% faster",
        None,
        "",
        "not reached: the steps would be twice as fast by this model; what else a run does (reading images, "
        "validation, starting, more epochs for a larger batch) is in no model of a step",
    )
    goyal = "Goyal et al. 2017, ResNet-50"
    ethernet = Network(Link(12e-6, 1 / 10e9), Link(25e-6, 1 / (50 * GBIT * 0.94)), 8, gamma=1 / 300e9)
    yield Row(
        "efficiency of 256 P100 against 8",
        goyal,
        90.0,
        100 * weak(timed("resnet50", 224, 32 / 0.180, 32), 32, 256, ethernet, 8),
        "%",
        "8 a node, 50 Gbit/s, 32 images a GPU, backprop of 120 ms in steps of 180 ms; what is missing: the slowest of "
        "256 in every step, reading images",
    )
    yield Row(
        "bandwidth that hides 100 MB of gradients",
        goyal,
        12.8,
        bandwidth_to_hide(100e6, 1e9, 0.120) / GBIT,
        "Gbit/s",
        "behind 120 ms of backprop, 2 n in the limit; the paper divides 200 MB by 125 ms",
    )
    run = 90 * 1.28e6 / (256 * 32 / 0.180 * 0.9)
    yield Row(
        "90 epochs on 256 P100",
        goyal,
        1.0,
        run / 3600,
        "h",
        "1.28 M images, 32 in 180 ms a GPU, 90% efficiency; not seen: validation, input",
    )
    horovod = "Sergeev, Del Balso 2018 (Horovod), 128 x 4 P100"
    network = NETWORKS["gpu-25g"]
    beyond = "not seen: copies into and out of fusion buffers, TensorFlow's own threads, the slowest of 512 ranks"
    for name, layers, published in (
        ("Inception-v3", even(23.8e6, 142, 64), 90.0),
        ("ResNet-101", even(44.5e6, 132, 64), 90.0),
        ("VGG-16", timed("vgg16", 224, 154, 64), 68.0),
    ):
        note = f"25 Gbit/s a node, 64 images a GPU, {samples_per_second(layers, 64):.0f} images/s alone; {beyond}"
        yield Row(f"efficiency, {name}", horovod, published, 100 * weak(layers, 64, 512, network), "%", note)


def samples_per_second(layers, samples: int) -> float:
    return samples / sum(layer.forward + layer.backward for layer in layers)


# ------------------------------------------------------------------------------------------ pipelines and plans


def profiles(data: Path | None) -> dict[str, list[LayerProfile]]:
    """Those that are there."""
    found = {name: (data or Path("data")) / "profiles" / f"{name}.csv" for name in ("vgg16", "alexnet")}
    return {name: read_profile(path) for name, path in found.items() if path.is_file()}


def plans(data: Path | None) -> Iterator[Row]:
    source, there = "Narayanan, Harlap et al. (PipeDream)", profiles(data)
    if missing := [name for name in ("vgg16", "alexnet") if name not in there]:
        yield Row("plans of stages", source, "", None, "", f"left out: no profiles of {', '.join(missing)} in the data")
        return
    vgg, alexnet = there["vgg16"], there["alexnet"]

    def plan(layers, workers, bandwidth, counting="paper"):
        found = partition(layers, workers, bandwidth, counting=counting)
        return found, "-".join(map(str, found.replicas))

    why = "bandwidth and memory of the published plan are not published"
    for workers, published, note in ((8, "7-1", "1.25 GB/s"), (16, "9-5-1-1", why), (4, "2-1-1", why)):
        yield Row(f"stages of VGG-16 on {workers}", source, published, plan(vgg, workers, 1.25e9)[1], "", note)
    for layers, workers, bandwidth, published, note in (
        (vgg, 4, 1e9, "3-1", "the authors' program, 1 GB/s"),
        (alexnet, 16, 1.25e9, "15-1", "the authors' program, 1.25 GB/s"),
        (vgg, 16, 1.25e9, "15-1", "the authors' program says so too for this profile, which is not the paper's"),
    ):
        name = "VGG-16" if layers is vgg else "AlexNet"
        found = plan(layers, workers, bandwidth, "program")[1]
        yield Row(f"stages of {name} on {workers}, program", source, published, found, "", note)
    best = plan(vgg, 4, 1e9, "program")[0]
    yield Row("seconds a mini-batch, VGG-16 on 4", source, 0.2055, best.seconds, "s", "the authors' program, 1 GB/s")
    gain = best.data_parallel / best.seconds
    yield Row("gain of that over data parallelism", source, 2.84, gain, "times", "the same")
    moved = 1 - bytes_of_plan(vgg, (7, 1)) / bytes_of_plan(vgg, (8,))
    note = "bytes that cross links a mini-batch; the profile is of another GPU and batch than the published figure"
    yield Row("communication saved by 7-1, VGG-16 on 8", source, 95.0, 100 * moved, "%", note)
    for name, layers, workers, published in (
        ("VGG-16", vgg, (4, 4), 5.28),
        ("VGG-16", vgg, (8, 2), 2.98),
        ("AlexNet", alexnet, (4, 4), 4.92),
        ("AlexNet", alexnet, (8, 2), 2.04),
    ):
        inside = 10e9 if workers[0] == 4 else 50e9
        found = partition(layers, workers, (inside, 10 * GBIT if workers[0] == 4 else 25 * GBIT))
        yield Row(
            f"gain over data parallelism, {name} on {workers[1]} x {workers[0]}",
            source,
            published,
            found.data_parallel / found.seconds,
            "times",
            f"{'-'.join(map(str, found.replicas))}; inside a node {inside / 1e9:g} GB/s, between them "
            f"{10 if workers[0] == 4 else 25} Gbit/s; the profile is of another GPU than the published runs",
        )
    branches = "the authors publish a profile, whose graph branches; the planner here takes chains of layers"
    for model, gpus, published, note in (
        ("ResNet-50", "16", "1x: data parallelism", branches),
        ("S2VT", "4", "2-1-1, 3.01x", "no profile of it here to predict from"),
    ):
        yield Row(f"plan of {model} on {gpus}", source, published, None, "", note)
    best = plan(vgg, (4, 4), (10e9, 1.25e9), "program")[0]
    note = "the authors' program, 10 GB/s inside a node and 1.25 GB/s between them"
    yield Row("seconds a mini-batch, VGG-16 on 4 x 4", source, 0.0671, best.seconds, "s", note)
    slow = Network(Link(20e-6, 1 / 10e9), Link(30e-6, 1 / (10 * GBIT * 0.94)), 4)
    fast = timed("vgg16", 224, 230, 32)
    shares = estimate(Job(fast, 32, 32 * 32, node_memory=False), "ddp", Axes(32), slow).idle_share
    yield Row(
        "VGG-16, 32 GPUs, time in synchronisation, up to",
        source,
        90.0,
        100 * shares,
        "%",
        "4 V100 a node, 10 Gbit/s, 32 images of 230/s a GPU; a published bound over several links",
    )


def bytes_of_plan(layers, replicas) -> float:
    """That all links carry for a mini-batch: sums of weights, and what stages give each other."""
    plan = partition(layers, sum(replicas), 1.25e9) if len(replicas) > 1 else None
    if plan is None:
        (m,) = replicas
        return 2 * (m - 1) / m * sum(layer.parameters for layer in layers)
    total = 0.0
    for stage in plan.stages:
        weights = sum(layer.parameters for layer in layers[stage.first : stage.last + 1])
        total += 2 * (stage.replicas - 1) / stage.replicas * weights
        total += 2 * layers[stage.last].output * (stage.last + 1 < len(layers))
    return total


def gpipe() -> Iterator[Row]:
    """Equal stages; the paper's own machine had no fast links, which made no difference."""
    stage = StageCost(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    for stages, published in ((2, 1.8), (4, 3.4), (8, 6.3)):
        network = Network(NO_LATENCY, NO_LATENCY)
        found = stages * 32 * 3 / time_pipeline("gpipe", [stage] * stages, 32, network).seconds
        yield Row(
            f"speedup of a transformer, K = {stages}, M = 32",
            "Huang et al. 2019 (GPipe)",
            published,
            found,
            "times",
            "K M / (M + K - 1): equal stages, free messages. With M = 4 it does not hold: the batches were changed",
        )


def zero_bubble() -> Iterator[Row]:
    source = "Qi et al. 2023 (zero bubble), 1.5 G, p 8, m 24"
    F, I, W, hop = 18.522e-3, 18.086e-3, 9.337e-3, 0.601e-3
    told = "T_F 18.522, T_B 18.086, T_W 9.337, a message 0.601 ms, as profiled by the authors"
    peaks = {}
    for name, ours, chunks, idle in (
        ("1F1B", "1f1b", 1, 0.2431),
        ("interleaved", "interleaved", 3, 0.1055),
        ("ZB-1p", "zb-h1", 1, 0.1585),
        ("ZB-2p", "zb-h2", 1, 0.0433),
    ):
        options = {"chunks": chunks} if chunks > 1 else {}
        order = schedule_rows(ours, 8, 24, **options)
        cost = {"F": F / chunks, "I": I / chunks, "W": W / chunks, "B": (I + W) / chunks}
        seconds = max(row[-1].end for row in walk(order, cost, hop))
        note = f"{ours}, {told}"
        if ours == "interleaved":
            note += "; 3 chunks a rank, as 24 layers on 8 ranks have"
        if ours == "zb-h2":
            note += "; ZB-2p is found by search for these times, H2 is made for equal ones; of H2 0.1083 is published"
        yield Row(f"idle share, {name}", source, idle, 1 - 24 * (F + I + W) / seconds, "", note)
        peaks[name] = max(check(order).peaks) / chunks
    each = (59 - 30) / (peaks["ZB-2p"] - peaks["1F1B"])
    for name, published in (("interleaved", 40.0), ("ZB-1p", 32.0)):
        note = (
            f"peak of {peaks[name]:.3g} micro-batches; fitted to 30 GB of 1F1B ({peaks['1F1B']:g}) and 59 GB of ZB-2p"
        )
        yield Row(f"memory, {name}", source, published, 30 + each * (peaks[name] - peaks["1F1B"]), "GB", note)


# ------------------------------------------------------------------------------------------ transformers


def megatron() -> Iterator[Row]:
    source = "Narayanan et al. 2021 (Megatron-LM)"
    for name, model, ranks, batch, rate, total in (
        ("1008 G", Transformer(128, 25_600, 160), 3072, 3072, 163.0, 502.0),
        ("145.6 G", Transformer(80, 12_288, 96), 1536, 2304, 148.0, 227.1),
    ):
        seconds = model.operations(batch) / (total * 1e15)
        published = {"1008 G": 102.4, "145.6 G": 24.8}[name]
        note = f"96 B s l h^2 (...) operations, B {batch:,}, at the published {total:g} PF/s"
        yield Row(f"seconds of a step, {name}, {ranks:,} GPUs", source, published, seconds, "s", note)
        parts, stages = (8, 64) if name == "1008 G" else (8, 8)
        replicas = ranks // (parts * stages)
        found = step(model, A100, batch // replicas, 1, parts, stages, 1)
        gradients = 2 * 2 * model.parameters / (parts * stages) * A100.network.between.beta
        reached = model.operations(batch) / ranks / (found.seconds + gradients) / 1e12
        note = f"A100 of transformer.py, t {parts}, p {stages}, {replicas} replicas, 1F1B, full recomputation; "
        note += "the published runs had stages interleaved and larger micro-batches"
        yield Row(f"rate of a GPU, {name}", source, rate, reached, "TF/s", note)
    for name, tokens, parameters, ranks, rate, days in (
        ("GPT-3, 175 G, 300 G tokens", 300e9, 175e9, 1024, 140e12, 34.0),
        ("1 T, 450 G tokens", 450e9, 1.008e12, 3072, 163e12, 84.0),
    ):
        found = training_days(tokens, parameters, ranks, rate)
        yield Row(f"{name}, {ranks:,} GPUs", source, days, found, "days", "8 T P / (n X), X as published")


def selective() -> Iterator[Row]:
    source = "Korthikanti et al. 2022"
    for name, model, parts, stages, chunks, batch, micro, full, less in (
        ("22 G, 8 GPUs", Transformer(48, 6144, 64), 8, 1, 1, 4, 4, 1.42, 1.10),
        ("175 G, 64 GPUs", Transformer(96, 12_288, 96), 8, 8, 3, 64, 1, 18.13, 13.75),
        ("530 G, 280 GPUs", Transformer(105, 20_480, 128), 8, 35, 3, 280, 1, 49.05, 37.83),
        ("1 T, 512 GPUs", Transformer(128, 25_600, 160), 8, 64, 1, 512, 1, 94.42, 71.49),
    ):
        note = "A100: 312 TF/s, 2,048 GB/s, NVLink 300 GB/s x 0.65, 10 us, 25 GB/s x 0.9, 20 us, shares by size of "
        note += "Isaev et al. 2023; not seen: launching kernels, fragmented memory, waiting for the slowest"
        for what, published, attention in (("all computed twice", full, False), ("attention alone", less, True)):
            found = step(model, A100, batch, micro, parts, stages, chunks, attention).seconds
            yield Row(f"{name}, {what}", source, published, found, "s", note)


V100 = Machine(
    125e12,
    900e9,
    A100.products,
    A100.moves,
    Network(Link(10e-6, 1 / 150e9), Link(20e-6, 1 / (100e9 * 0.9)), 16, source="DGX-2H: NVSwitch, 8 x 100 Gbit/s"),
)


def megatron_2019() -> Iterator[Row]:
    source = "Shoeybi et al. 2019, 8.3 G on 8, 1.2 G on one GPU"
    small, large = Transformer(40, 1536, 16, 1024), Transformer(72, 3072, 32, 1024)
    one, eight = step(small, V100, 8, 8), step(large, V100, 8, 8, 8)
    rate = lambda model, seconds, ranks: model.operations(8) / ranks / seconds
    found = rate(large, eight.seconds, 8) / rate(small, one.seconds, 1)
    note = (
        "V100: 125 TF/s, 900 GB/s, NVSwitch 150 GB/s a direction, the A100's shares by size; 8 samples; the published "
    )
    note += "base, 39 TF/s, reaches 30% of the peak, so its messages weigh less"
    yield Row("8-way tensor parallel, weak scaling", source, 77.0, 100 * found, "%", note)
    gradients = 8 * 2 * 2 * large.parameters / 8 * V100.network.between.beta
    both = rate(large, eight.seconds + gradients, 8) / rate(small, one.seconds, 1)
    note = "64 replicas, two a node: 16-bit gradients of all eight parts through its 100 GB/s, after backprop; behind "
    note += "it they would cost nothing: the published figure lies between"
    yield Row("with 64-way data parallelism", source, 74.0, 100 * both, "%", note)


# ------------------------------------------------------------------------------------------ table and picture


def everything(data: Path | None) -> list[Row]:
    """All rows."""
    parts: list[Callable[[], Iterator[Row]]] = [data_parallelism, lambda: plans(data), gpipe, zero_bubble]
    parts += [megatron_2019, megatron, selective]
    return [row for part in parts for row in part()]


def shown(value: float | str | None, unit: str) -> str:
    """A value in a cell."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}{'' if unit == '%' else ' '}{unit}".rstrip()


def markdown(rows: list[Row]) -> str:
    """The page."""
    numbers = [abs(row.difference) for row in rows if row.difference is not None]
    within, middle = sum(n <= 0.10 for n in numbers), sorted(numbers)[len(numbers) // 2]
    heads = ["", "| what | published | predicted | difference | assumptions |", "|---|---|---|---|---|"]
    lines = [
        "# Published and predicted",
        "",
        "Written by `python scripts/experiments/published.py`. Published figures, measured by others on machines",
        "that are not here, and predictions of the models of `parallel/planning`. Nothing is fitted unless noted;",
        "where a prediction is far off, a note says what the model leaves out.",
        "",
        f"{len(rows)} rows, {len(numbers)} of them numbers: {within} within 10%, median {middle:.1%}.",
        "",
        "![predicted over published](published.svg)",
    ]
    for source in dict.fromkeys(row.source for row in rows):
        lines += ["", f"## {source}", *heads]
        for row in (row for row in rows if row.source == source):
            apart = "" if row.difference is None else f"{row.difference:+.1%}"
            if row.difference is None and row.predicted is not None:
                apart = "the same" if row.predicted == row.published else "another"
            cells = row.what, shown(row.published, row.unit), shown(row.predicted, row.unit), apart, row.note
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row]):
    """A dot for each number: how far the prediction is from what was published."""
    from parallel.planning.pictures import COLOURS, MARKERS, new_axes

    rows = [row for row in rows if row.difference is not None]
    sources = list(dict.fromkeys(row.source for row in rows))
    (axes,) = new_axes(1, 8.5, 2.4 + 0.24 * len(rows))
    axes.axvspan(-10, 10, color="#eef0f3", lw=0)
    axes.axvline(0, color="#5d6675", lw=1)
    for i, source in enumerate(sources):
        mine = [(y, row) for y, row in enumerate(rows) if row.source == source]
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "ls": "", "ms": 7}
        axes.plot([100 * row.difference for _, row in mine], [y for y, _ in mine], label=source, **style)
    axes.set_yticks(range(len(rows)), [row.what for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", alpha=0.25)
    axes.set_xscale("symlog", linthresh=20)
    ticks = (-20, -10, 0, 10, 20, 50, 100, 300)
    axes.set_xlim(-30, 400)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("predicted against published, %; the band is 10% either way")
    axes.set_title("Published and predicted", fontsize=11, fontweight="bold", loc="left")
    axes.figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    return axes.figure


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=new_directory, default=str(ROOT / "docs"), help="directory of published.md and .svg"
    )
    parser.add_argument("--data-dir", type=Path, help="where profiles/ lies (default: $RINGPROP_DATA, else ./data)")
    given = parser.parse_args(argv)
    given.out = Path(given.out)
    data = given.data_dir or (Path(os.environ["RINGPROP_DATA"]) if os.environ.get("RINGPROP_DATA") else None)
    rows = everything(data)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "published.md").write_text(markdown(rows))
    figure = draw(rows)
    figure.savefig(given.out / "published.svg", metadata={"Date": None})
    for row in rows:
        apart = "" if row.difference is None else f"{row.difference:+.1%}"
        print(f"{row.what:56} {shown(row.published, row.unit):>18} {shown(row.predicted, row.unit):>14} {apart:>8}")
    print(f"{given.out / 'published.md'} and published.svg beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
