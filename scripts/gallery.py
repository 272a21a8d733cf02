#!/usr/bin/env python3
"""Draw every kind of picture that the project has, for the pages of docs/: schedules, runs, networks, predictions.

    python scripts/gallery.py                    into docs/pictures
    python scripts/gallery.py --only pipeline    those whose name begins so

Schedules are drawn from their code. Pictures of runs train on the embedded digits, on two or three ranks, for a few
seconds. The repository keeps all pictures: draw one again when its code has changed; pictures of runs on a machine
that does nothing else.
"""

import argparse
import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "pictures"
PIPELINES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev")
# Runs on the embedded digits: options of scripts/train.py.
RUNS = {
    "ddp": ["--ranks", "2", "--epochs", "20", "--timeline", "--inspect"],
    "dp": ["--ranks", "2", "--strategy", "dp", "--epochs", "2", "--timeline"],
    "ssp": ["--ranks", "3", "--strategy", "ps", "--consistency", "ssp:3", "--epochs", "6", "--model", "mlp:64,100,10"],
    "pipeline": ["--ranks", "2", "--strategy", "pipeline", "--pipeline", "1f1b:micro=6", "--epochs", "2", "--timeline"],
    "zero1": ["--ranks", "4", "--strategy", "zero1", "--mesh", "data=2,tensor=2", "--epochs", "1", "--memory"]
    + ["--optimizer", "adam", "--model", "mlp:64,30,20,10"],
}


# ------------------------------------------------------------------------------------------------- schedules


def schedule(operation: str, name: str, size: int, count: int, **options):
    """A collective's space-time diagram."""
    from collectives import ALGORITHMS, draw

    return draw(ALGORITHMS[operation][name], size, count, **options)


def buffers():
    """What every rank holds after every round of the ring."""
    from collectives import ALGORITHMS, draw_buffers

    return draw_buffers(ALGORITHMS["allreduce"]["ring"], 4, 4)


def priced():
    """The same ring with time as the clock has it: 16 MiB on the GPUs of a node."""
    from collectives import ALGORITHMS, draw

    return draw(ALGORITHMS["allreduce"]["ring"], 4, 1 << 22, network="gpu-25g", title="ring, 16 MiB, by the clock")


def race():
    """Allreduces on 16 ranks, priced, over the bytes of the vector."""
    from collectives import ALGORITHMS, draw_race

    names = ("doubling", "rabenseifner", "ring", "double_tree")
    runners = {name: ALGORITHMS["allreduce"][name].rounds for name in names}
    return draw_race(runners, 16, network="gigabit", title="allreduce of 16 ranks on gigabit, as priced")


def network(name: str, algorithm: str, over_time: bool = False):
    """A network with the load of an allreduce of 4 MiB, or its channels over time."""
    from collectives import ALGORITHMS, price
    from collectives.drawing.networks import draw_channels, draw_network
    from collectives.pricing.networks import find_network

    place = find_network(name)
    priced = price(ALGORITHMS["allreduce"][algorithm], 16, 1 << 20, 4, place, trace=True)
    draw = draw_channels if over_time else draw_network
    return draw(place, priced=priced, title=f"{algorithm}, 4 MiB, {name}")


def path_through_links():
    """The critical path of recursive doubling through the links of a fat tree."""
    from collectives import ALGORITHMS, price
    from collectives.drawing.networks import draw_critical_path
    from collectives.pricing.networks import find_network

    place = find_network("fat-tree:k=4,oversubscription=4")
    priced = price(ALGORITHMS["allreduce"]["doubling"], 16, 1 << 20, 4, place, trace=True)
    return draw_critical_path(place, priced, title="recursive doubling, 4 MiB: what the last rank waited for")


def found_trees():
    """Trees that were found for an allreduce on a torus."""
    from collectives import synthesize
    from collectives.drawing.networks import draw_trees
    from collectives.pricing.networks import Network

    torus = Network.torus((4, 4))
    return draw_trees(torus, synthesize("allreduce", torus), title="found by search: allreduce on a torus of 4 x 4")


def flows(file):
    """The film of how full the channels of a fat tree are."""
    from collectives import ALGORITHMS, price
    from collectives.drawing.networks import animate_flows
    from collectives.pricing.networks import find_network

    place = find_network("fat-tree:k=4,oversubscription=4")
    priced = price(ALGORITHMS["allreduce"]["rabenseifner"], 16, 1 << 20, 4, place, trace=True)
    animate_flows(file, place, priced, title="halving and doubling, 4 MiB, on a fat tree with 4:1")


def served(which: str):
    """What parameter servers are sent, and what they answer."""
    from collectives import draw
    from parallel.sync import push_pull

    return draw(getattr(push_pull, which), 5, 12, servers=2, title=f"{which}: 3 workers, 2 servers")


def one_layer_ahead():
    """The puzzle of FSDP, as its solution has it."""
    from collectives import draw
    from collectives.puzzles import solutions

    return draw(solutions.fsdp, 3, 4, title="FSDP: one layer ahead")


def ring_attention():
    """Keys and values travel while each rank attends to those it has; backward their gradients follow."""
    from collectives import draw
    from parallel.strategies.context.ring import ring_backward

    def rounds(rank, size, count):
        return ring_backward(rank, size, [count] * size, 1, [1e-3] * size)

    return draw(rounds, 4, 4, title="ring attention, backward: gradients follow keys and values home")


def ring_or_ulysses():
    """Where a ring is faster than Ulysses, predicted."""
    sys.path.insert(0, str(ROOT / "scripts" / "experiments"))
    import long_sequences

    return long_sequences.picture()


def positions_and_experts():
    """The puzzle of experts, as its solution has it: positions travel while others are computed."""
    from collectives import draw
    from collectives.puzzles import solutions

    def rounds(rank, size, count):
        return solutions.experts(rank, size, count // size)

    return draw(rounds, 4, 4, title="positions travel while others are computed")


def holders_of_experts():
    """What each of four ranks has, with --mesh data=2,expert=2 and eight experts."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from collectives.drawing.marks import GREY, INK
    from collectives.drawing.timeline import PALETTE

    figure = Figure((9, 3.2), layout="constrained")
    axes = figure.subplots()
    columns = [("samples", 0.0, 1.6), *((f"expert {e}", 2.0 + 0.9 * e, 0.8) for e in range(8)), ("all else", 9.4, 1.6)]
    for rank in range(4):
        data, expert = divmod(rank, 2)
        axes.text(-0.3, -rank + 0.35, f"rank {rank}\ndata {data}, expert {expert}", ha="right", va="center", size=8)
        for name, at, width in columns:
            held = not name.startswith("expert") or int(name[7:]) // 4 == expert
            colour = GREY if name == "all else" else PALETTE[2 + rank] if name == "samples" else PALETTE[expert]
            face = {"facecolor": colour, "alpha": 0.85} if held else {"fill": False}
            axes.add_patch(Rectangle((at, -rank), width, 0.7, edgecolor=GREY, **face))
            if name == "samples":
                axes.text(at + width / 2, -rank + 0.35, f"{rank + 1} of 4", ha="center", va="center", color="white")
    for name, at, width in columns:
        axes.text(at + width / 2, 0.95, name.replace("expert ", "E"), ha="center", color=INK, size=9)
    axes.text(5.5, -3.6, "gradients of experts: summed over ranks of one colour", ha="center", size=9)
    axes.text(10.2, -3.6, "over all four", ha="center", size=9)
    axes.set(xlim=(-2.6, 11.2), ylim=(-3.9, 1.3), title="--mesh data=2,expert=2, eight experts")
    axes.axis("off")
    return figure


def holders_of_positions():
    """Which of 16 positions each of four ranks has, by each way of attention, and the pairs of causal scores."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from collectives.drawing.marks import GREY, INK
    from collectives.drawing.timeline import PALETTE
    from parallel.strategies.context.positions import positions
    from parallel.strategies.context.strategy import context_degrees

    figure, length = Figure((9, 3.2), layout="constrained"), 16
    axes = figure.subplots()
    for row, way in enumerate(("ring", "ring:2,ulysses:2", "ulysses")):
        axes.text(-0.3, -row + 0.35, f"--context {way}", ha="right", va="center", size=9)
        pairs = []
        for rank in range(4):
            mine = positions(length, rank, context_degrees(way, 4)).tolist()
            pairs.append(sum(mine) + len(mine))
            for at in mine:
                axes.add_patch(Rectangle((at, -row), 0.92, 0.7, facecolor=PALETTE[rank], edgecolor=GREY, alpha=0.85))
                axes.text(at + 0.46, -row + 0.35, str(rank), ha="center", va="center", color="white", size=9)
        told = "each computes a head" if way == "ulysses" else f"{', '.join(map(str, pairs))} pairs"
        if way == "ring:2,ulysses:2":
            told = "68 pairs of half of the heads"
        axes.text(length + 0.3, -row + 0.35, told, va="center", size=9)
    for at in range(length):
        axes.text(at + 0.46, 0.95, str(at), ha="center", color=INK, size=9)
    axes.set(xlim=(-5.2, 22.5), ylim=(-2.3, 1.4), title="--mesh context=4: the rank that has each of 16 positions")
    axes.axis("off")
    return figure


def redundant(which: str):
    """What a puzzle of survival keeps of every rank on the others, as its solution has it."""
    from collectives import draw
    from collectives.puzzles import solutions

    titles = {"buddy": "a neighbour's copy", "parity": "parity: a third of the memory"}
    return draw(getattr(solutions, which), 4, 6, title=titles[which])


def wrong():
    """A schedule that deadlocks, drawn up to where it does."""
    import collectives
    from collectives import Recv, Send

    def all_receive_first(rank, size, count):
        yield (Recv((rank - 1) % size, "y", 0, count),)
        yield (Send((rank + 1) % size, "x", 0, count),)

    return collectives.draw(all_receive_first, 3, 2, title="all receive first")


def pipeline(name: str):
    """What each of four ranks does, eight micro-batches long; all pictures equally wide.

    A rank takes one unit forward for a micro-batch and two backward, in two stages half of that in each.
    """
    from collectives.drawing.marks import new_axes
    from parallel.strategies.pipeline.checking import SECONDS, check
    from parallel.strategies.pipeline.picture import draw

    stages = 1 + max(action.stage for row in check(name, 4, 8).spans for span in row for action in span.actions)
    seconds = {kind: 4 * value / stages for kind, value in SECONDS.items()}
    return draw(check(name, 4, 8, seconds).spans, new_axes(9.5, 0.46 * 4), title=name)


# ------------------------------------------------------------------------------------------------- runs


@functools.cache
def place() -> tempfile.TemporaryDirectory:
    """Where runs are; it is gone when the program ends."""
    return tempfile.TemporaryDirectory(prefix="gallery-")


@functools.cache
def run(name: str) -> Path:
    """The directory of a run of RUNS."""
    out = Path(place().name) / name
    command = [sys.executable, ROOT / "scripts" / "train.py", *RUNS[name], "--threads", "1", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the run for {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return out


def of_run(name: str, file: str) -> bytes:
    """A picture that a run has left."""
    return (run(name) / file).read_bytes()


# ------------------------------------------------------------------------------------------------- networks


def regions():
    """Two moons, told apart by a small network: its decision boundary."""
    import numpy as np

    import nn
    from nn.analysis import inspection, pictures

    rng, n = np.random.default_rng(0), 150
    turn = rng.random(n) * np.pi
    moon = np.stack([np.cos(turn), np.sin(turn)], axis=1) - [0.5, 0.25]
    x = np.concatenate([moon, -moon]) + rng.normal(0, 0.08, (2 * n, 2))
    y = np.repeat([0, 1], n)
    layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    trainer = nn.Trainer(nn.Network(layers, (2,), "float64"), nn.CrossEntropyLoss(), nn.Adam(0.03))
    nn.fit(trainer, (x, y), epochs=60, batch=30)
    xs, ys, classes = inspection.decision_regions(trainer, (-2, -1.3), (2, 1.3))
    return pictures.regions(xs, ys, classes, x, y)


def rates():
    """Growing learning rates on the digits."""
    import nn
    from nn.analysis import inspection, pictures

    data = nn.data.load("digits", validation=0.1)
    network = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)), data.in_shape)
    trainer, loader = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1)), nn.Loader(data.train, 32)
    batches = (batch for epoch in range(100) for batch in loader.epoch(epoch))
    return pictures.rate_search(inspection.find_learning_rate(trainer, batches))


# ------------------------------------------------------------------------------------------------- predictions


def predicted(option: str, file: Path) -> None:
    """What scripts/estimate.py draws."""
    job = ["vgg16", "--network", "gpu-25g", "--flops", "10T", "--batch", "1024"]
    job += ["--ranks", "1,4,16,64,256,1024"] if option == "--map" else ["--ranks", "1..1024", "--strategy", "ddp"]
    command = [sys.executable, ROOT / "scripts" / "estimate.py", *job, option, file]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)


def compression(draw: str):
    """Draw with a function of scripts/experiments/fewer_bytes.py what it has measured."""
    sys.path.insert(0, str(ROOT / "scripts" / "experiments"))
    import fewer_bytes

    measured = json.loads((ROOT / "docs" / "measured" / "fewer_bytes.json").read_text())
    return getattr(fewer_bytes, draw)(measured["rows"], measured["options"])


def growth():
    """The cost of a step over layers, width, batch, ranks, as scripts/bench_growth.py has measured it."""
    import bench_growth

    return bench_growth.picture(json.loads((ROOT / "docs" / "measured" / "growth.json").read_text()))


# name of the file -> how it is drawn: a function that returns a Figure or bytes, or one that writes a file it is given.
PICTURES: dict[str, Callable] = {
    "ring_buffers.svg": buffers,
    "ring_priced.svg": priced,
    "race.svg": race,
    "network_fat_tree.svg": partial(network, "fat-tree:k=4,oversubscription=4", "doubling"),
    "network_torus.svg": partial(network, "torus:dims=4x4", "swing"),
    "network_path.svg": path_through_links,
    "network_trees.svg": found_trees,
    "network_flows.gif": flows,
    "network_channels.svg": partial(network, "fat-tree:k=4,oversubscription=4", "doubling", over_time=True),
    "doubling.svg": partial(schedule, "allreduce", "doubling", 4, 4),
    "halving.svg": partial(schedule, "allreduce", "rabenseifner", 4, 4),
    "double_tree.svg": partial(schedule, "allreduce", "double_tree", 7, 8, segment=4),
    "two_level.svg": partial(schedule, "allreduce", "two_level", 4, 8, nodes=[0, 0, 1, 1]),
    "broadcast.svg": partial(schedule, "broadcast", "binomial", 8, 1),
    "reduce_scatter.svg": partial(schedule, "reduce_scatter", "ring", 4, 4),
    "allgather.svg": partial(schedule, "allgather", "ring", 4, 4),
    "alltoall.svg": partial(schedule, "alltoall", "pairwise", 4, 4),
    "push.svg": partial(served, "push"),
    "pull.svg": partial(served, "pull"),
    "fsdp.svg": one_layer_ahead,
    "ring_attention.svg": ring_attention,
    "sequences.svg": ring_or_ulysses,
    "positions_held.svg": holders_of_positions,
    "experts_held.svg": holders_of_experts,
    "experts_travel.svg": positions_and_experts,
    "buddy.svg": partial(redundant, "buddy"),
    "parity.svg": partial(redundant, "parity"),
    "deadlock.svg": wrong,
    **{f"pipeline_{name}.svg": partial(pipeline, name) for name in PIPELINES},
    "curves.png": partial(of_run, "ddp", "curves.png"),
    "timeline.png": partial(of_run, "ddp", "timeline.png"),
    "breakdown.png": partial(of_run, "ddp", "breakdown.png"),
    "timeline_master.png": partial(of_run, "dp", "timeline.png"),
    "breakdown_master.png": partial(of_run, "dp", "breakdown.png"),
    "timeline_pipeline.png": partial(of_run, "pipeline", "pipeline.png"),
    "staleness.png": partial(of_run, "ssp", "staleness.png"),
    "placement.png": partial(of_run, "zero1", "placement.png"),
    "weights.png": partial(of_run, "ddp", "inspection/weights.png"),
    "activations.png": partial(of_run, "ddp", "inspection/activations.png"),
    "gradients.png": partial(of_run, "ddp", "inspection/gradients.png"),
    "confusion.png": partial(of_run, "ddp", "inspection/confusion.png"),
    "misclassified.png": partial(of_run, "ddp", "inspection/misclassified.png"),
    "regions.png": regions,
    "rates.png": rates,
    "bytes.png": partial(compression, "draw_bytes"),
    "compression.png": partial(compression, "draw"),
    "growth.png": growth,
    "scaling.png": partial(predicted, "--draw"),
    "map.png": partial(predicted, "--map"),
}


def write(name: str, out: Path) -> None:
    """Draw one picture into a directory."""
    file, drawn = out / name, PICTURES[name]
    if drawn is flows or (isinstance(drawn, partial) and drawn.func is predicted):
        drawn(file)
        return
    with contextlib.redirect_stdout(io.StringIO()):
        found = drawn()
    if isinstance(found, bytes):
        file.write_bytes(found)
    else:
        undated = {"metadata": {"Date": None}} if file.suffix == ".svg" else {}
        with matplotlib.rc_context({"svg.hashsalt": name}):
            found.savefig(file, dpi=120, bbox_inches="tight", **undated)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw every kind of picture that the project has.")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="(default: docs/pictures)")
    parser.add_argument("--only", default="", metavar="NAME", help="those whose name begins so")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    began, names = time.perf_counter(), [name for name in PICTURES if name.startswith(options.only)]
    if not names:
        parser.error(f"--only {options.only}: there are {', '.join(PICTURES)}")
    for name in names:
        write(name, options.out)
    print(f"{len(names)} pictures in {options.out}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
