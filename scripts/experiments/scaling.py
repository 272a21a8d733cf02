#!/usr/bin/env python3
"""How a strategy scales on your machines: measured on 1 to n ranks, beside the prediction, with the laws fitted.

    python scripts/experiments/scaling.py --ranks 1,2,4 --strategy ddp,zero1,fsdp          # ranks of this machine
    srun -n 16 python -m mpi4py scripts/experiments/scaling.py --out runs/scaling          # those of a cluster: one
    srun -n 32 python -m mpi4py scripts/experiments/scaling.py --out runs/scaling          # number after the other

Strong scaling keeps the samples of a step, weak scaling those of a rank. Layers are measured on all ranks at once, for
as many samples as each has: what ranks of a node take from each other is in the profile, so the prediction is of the
exchange. Where there are fewer cores than ranks a point is marked: it says nothing of scaling. Seconds are those of the
fastest step, of its slowest rank, as other processes only add; where they leave no rank in peace, figures say little.

scaling.json keeps all points, and is added to; scaling.png and the table are made again from all that is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from planning import measured_network, model_of, network_of, ranks, shape, whole  # noqa: E402

from parallel.launch import launcher  # noqa: E402

STRATEGIES = ("ddp", "dp", "ps", "zero1", "zero2", "fsdp")
MODES = ("strong", "weak")
NEAR = 0.15
ROUNDS = 4  # of measurements
TIMED = (1, 2, 5)  # of a LayerProfile: forward, backward, weight gradient
TIMEOUT = 300.0  # seconds for one number of ranks and one strategy


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="mlp:784,512,512,10", help="network as train.py has it")
    found.add_argument("--input", type=shape, metavar="SHAPE", help="of one sample, such as 224,224,3")
    found.add_argument("--classes", type=whole, metavar="N", help="outputs, or the vocabulary")
    found.add_argument("--batch", type=whole, default=128, help="samples: of a step (strong), of a rank (weak)")
    found.add_argument("--strategy", default="ddp", help=f"one or several of {','.join(STRATEGIES)}")
    found.add_argument("--ranks", type=ranks, default=[1, 2], help="to start here (default: 1,2)")
    found.add_argument(
        "--network", metavar="FILE", help="what bench.py network wrote (default: two ranks are measured)"
    )
    found.add_argument("--ranks-per-node", type=whole, metavar="N", help=argparse.SUPPRESS)
    found.add_argument("--steps", type=whole, default=40, help="of each measurement (default: 40)")
    found.add_argument("--out", type=Path, default=Path("runs/scaling"), help="directory of results")
    return found


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    strategies = options.strategy.split(",")
    for name in strategies:
        if name not in STRATEGIES:
            parser().error(f"--strategy {name}: expected one or several of {', '.join(STRATEGIES)}")
    try:
        model_of(options)
        if options.network:
            network_of(options)
    except ValueError as error:
        parser().error(str(error))
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    task = {"model": options.model, "input": options.input, "classes": options.classes, "batch": options.batch}
    task |= {"steps": options.steps}
    read(options, task)  # refuses another task before anything is measured
    if launcher.inside():
        if not options.network and not (options.out / "network.json").exists():
            parser().error("--network: measure it with bench_network.py on these nodes, and name the file")
        found = [point for name in strategies for point in measure(world(), task | {"strategy": name})]
        if found:  # rank 0 has them
            keep(options, task, network_here(options), found)
    else:
        network = network_here(options)
        for count in options.ranks:
            for name in strategies if count > 1 else strategies[:1]:
                print(f"{name} on {count} rank{'s' * (count > 1)}", flush=True)
                try:
                    points = measured_on(count, task | {"strategy": name})
                except RuntimeError as error:
                    parser().exit(1, f"scaling.py: error: {error}\n")
                of = strategies if count == 1 else [name]  # one rank is alone, whatever the strategy
                keep(options, task, network, [point | {"strategy": each} for each in of for point in points])
    return tell(options, task) if not launcher.inside() or found else 0


def measured_on(count: int, task: dict) -> list[dict]:
    """The points that so many ranks of this machine measure.

    Raises
    ------
    RuntimeError
        they did not end well
    """
    told: list[str] = []
    said: list[str] = []

    def receive(line: str) -> None:
        (told if line.startswith("[{") else said).append(line)

    status = launcher.run([str(HERE), json.dumps(task)], count, timeout=TIMEOUT, stdout=receive)
    if status or not told:
        raise RuntimeError(f"{task['strategy']} on {count} ranks: {launcher.ending(status)}: {''.join(said)[-2000:]}")
    return json.loads(told[-1])


# ------------------------------------------------------------------------------------------ what runs on the ranks


def world():
    """All ranks that were started."""
    from mpi4py import MPI

    from collectives import Communicator

    return Communicator(MPI.COMM_WORLD)


def measure(world, task: dict) -> list[dict]:
    """A point of strong and of weak scaling, on all ranks; rank 0 gets them."""
    from collectives.failures.launch_check import nodes_of

    nodes = nodes_of(world)
    here = max(nodes.count(node) for node in set(nodes))
    points = []
    for mode in MODES if world.size > 1 else MODES[:1]:  # one rank is both
        batch = task["batch"] * (world.size if mode == "weak" else 1)
        point = one_point(world, task, batch)
        point |= {"mode": mode, "strategy": task["strategy"], "ranks": world.size, "batch": batch}
        points.append(point | {"ranks_per_node": here, "crowded": here > launcher.cores()})
    if world.size == 1:
        points.append(points[0] | {"mode": "weak"})
    return points if world.rank == 0 else []


def one_point(world, task: dict, batch: int) -> dict:
    """Seconds of a step, and the layers' of the slowest rank."""
    from types import SimpleNamespace

    import numpy as np

    import nn
    from collectives.steps import part
    from parallel.command.options import Options
    from parallel.command.registry import STRATEGIES as MAKE
    from parallel.planning.layer_times import measure_layers, random_batch

    network = model_of(SimpleNamespace(**task))
    make = lambda: (model_of(SimpleNamespace(**task)), nn.CrossEntropyLoss(), nn.SGD(1e-3))
    one = nn.Serial(*make())
    trainer = one if world.size == 1 else MAKE[task["strategy"]](Options(strategy=task["strategy"]), *make(), world)
    workers = world.size - 1 if task["strategy"] == "ps" else world.size
    share = -(-batch // workers)
    mine = random_batch(network, share)
    index, count = trainer.shard
    lo, hi = part(batch, count, index) if index is not None else (0, 0)
    x, y = random_batch(network, batch)
    x, y = x[lo:hi], y[lo:hi]
    turns, steps = max(1, task["steps"] // (2 * ROUNDS)), max(2, task["steps"] // ROUNDS)
    taken: dict[str, list[float]] = {"alone": [], "many": []}
    layers = []
    for _ in range(ROUNDS):  # by turns, so that all see the same of what else runs
        quiet_barrier(world)
        layers.append(measure_layers(one, *mine, repeats=turns))
        for side, each, given in (("alone", one, (*mine, share)), ("many", trainer, (x, y, batch))):
            quiet_barrier(world)
            each.step(*given)
            for _ in range(steps):
                start = time.perf_counter()
                each.step(*given)
                taken[side].append(time.perf_counter() - start)
    quiet_barrier(world)
    step = {"many": float(np.min(np.max(world.allgather(taken["many"]), axis=0)))}  # of the slowest rank
    step["alone"] = max(world.allgather(min(taken["alone"])))
    mine = [[min(t.layers[i][k] for t in layers) for k in TIMED] for i in range(len(layers[0].layers))]
    profile = np.max(world.allgather(mine), axis=0)
    update = max(world.allgather(min(t.update for t in layers)))
    head = max(0.0, step["alone"] - float(profile[:, :2].sum()) - update)  # all that a step of one rank takes besides
    if world.size > 1:
        trainer.close()
    return {
        "seconds": step["many"],
        "alone": step["alone"],
        "samples": share,
        "profile": profile.tolist(),
        "update": update,
        "head": head,
    }


def quiet_barrier(world) -> None:
    """A barrier in which a rank that waits leaves its core to the others."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


# ------------------------------------------------------------------------------------------ beside the prediction


def predicted(point: dict, task: dict, network) -> dict:
    """A point with what the model says of it."""
    from types import SimpleNamespace

    from parallel.planning.job import Axes
    from parallel.planning.layer_times import Times, job_of
    from parallel.planning.predict import predict
    from parallel.planning.profile import count_layers

    model = model_of(SimpleNamespace(**task))
    counted = count_layers(model, point["samples"], 1e9, 0.0)
    layers = [
        layer._replace(forward=f, backward=b, weight_gradient=min(w, b))
        for layer, (f, b, w) in zip(counted, point["profile"], strict=True)
    ]
    times = Times(layers, point["update"], point["head"])
    job = job_of(model, times, point["samples"], point["batch"], 0, overlap=False)
    own = network.with_ranks_per_node(point["ranks_per_node"])
    found = predict(job, point["strategy"], Axes(point["ranks"]), own)
    return point | {"predicted": found.seconds, "parts": found.parts, "apart": found.seconds / point["seconds"] - 1}


def network_here(options):
    """Of --network, or kept from before, or measured."""
    from collectives.pricing.networks import Network

    kept = options.out / "network.json"
    if options.network:
        network = network_of(options)
    elif kept.exists():
        network = Network.load(kept)
    else:
        network = measured_network(2)
    options.out.mkdir(parents=True, exist_ok=True)
    network.save(kept)
    return network


def read(options, task: dict) -> dict:
    """What scaling.json has; nothing of another task."""
    file, same = options.out / "scaling.json", {name: task[name] for name in ("model", "batch")}
    before = json.loads(file.read_text()) if file.exists() else {"task": same, "points": []}
    if before["task"] != same:
        parser().error(f"{file} is of {before['task']}, given {same}: give another --out")
    return before


def write(options, content: dict) -> None:
    from nn.training.checkpoints import write_atomically

    write_atomically(options.out / "scaling.json", (json.dumps(content, indent=1) + "\n").encode())


def keep(options, task: dict, network, found: list[dict]) -> None:
    """Add points, with what is predicted of them, to those that are there."""
    content = read(options, task)
    key = lambda point: (point["strategy"], point["mode"], point["ranks"])
    points = {key(p): p for p in content["points"]} | {key(p): predicted(p, task, network) for p in found}
    write(options, content | {"points": [points[k] for k in sorted(points)]})


def tell(options, task: dict) -> int:
    """Print and draw all points."""
    from parallel.planning.tables import columns, seconds

    content = read(options, task)
    points = content["points"]
    lines = []
    for p in points:
        mark = "more ranks than cores" if p["crowded"] else "" if abs(p["apart"]) <= NEAR else f"beyond {NEAR:.0%}"
        lines.append([p["strategy"], p["mode"], str(p["ranks"]), str(p["batch"]), seconds(p["seconds"])])
        lines[-1] += [seconds(p["predicted"]), f"{p['apart']:+.1%}", mark]
    heads = ["strategy", "scaling", "ranks", "samples", "measured", "predicted", "apart", ""]
    print("\n" + columns(heads, lines, left=(0, 1, 7)))
    laws = fitted(points)
    for text in laws.values():
        print(text)
    write(options, content | {"laws": laws})
    draw(points, f"{task['model']}, {task['batch']} samples").savefig(options.out / "scaling.png")
    print(f"{options.out / 'scaling.json'}, network.json and scaling.png beside it")
    return 0


def curves(points: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """The points of every strategy and mode, by ranks; those that say nothing of scaling are left out."""
    found: dict[tuple[str, str], list[dict]] = {}
    for p in sorted(points, key=lambda p: p["ranks"]):
        found.setdefault((p["strategy"], p["mode"]), []).append(p)
    return found


def fitted(points: list[dict]) -> dict[str, str]:
    """The laws, in words, of every curve of several numbers of ranks."""
    from parallel.planning.laws import fit_amdahl, fit_gustafson, serial_shares

    found = {}
    for (strategy, mode), mine in curves(points).items():
        runs = [(p["ranks"], p["seconds"]) for p in mine if not p["crowded"]]
        if len(runs) < 2:
            continue
        law = fit_amdahl(runs) if mode == "strong" else fit_gustafson(runs)
        text = f"{strategy}, {mode}: {law}"
        if mode == "strong" and runs[0][0] == 1:
            text += "; Karp-Flatt " + ", ".join(f"{p}: {e:.1%}" for p, e in serial_shares(runs))
        found[f"{strategy} {mode}"] = text
    return found


def draw(points: list[dict], title: str):
    """Efficiency over ranks, measured and predicted; hollow where there were fewer cores than ranks."""
    from parallel.planning.laws import strong_efficiency, weak_efficiency
    from parallel.planning.pictures import COLOURS, MARKERS, new_axes

    axes = dict(zip(MODES, new_axes(2), strict=True))
    names = list(dict.fromkeys(p["strategy"] for p in points))
    for (strategy, mode), mine in curves(points).items():
        one = next((p["seconds"] for p in mine if p["ranks"] == 1), None)
        if one is None:
            continue
        share = lambda p, at, one=one, mode=mode: (
            100 * (strong_efficiency(one, p[at], p["ranks"]) if mode == "strong" else weak_efficiency(one, p[at]))
        )
        i = names.index(strategy)
        colour, marker, x = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], [p["ranks"] for p in mine]
        axes[mode].plot(x, [share(p, "predicted") for p in mine], "--", color=colour, lw=1.2)
        axes[mode].plot(x, [share(p, "seconds") for p in mine], color=colour, lw=1.5, label=strategy)
        for p in mine:
            fill = "none" if p["crowded"] else colour
            axes[mode].plot(p["ranks"], share(p, "seconds"), marker, color=colour, mfc=fill, ms=6)
    for mode, ax in axes.items():
        ax.set(xlabel="ranks", ylabel="efficiency, %", ylim=(0, 110), title=f"{mode} scaling")
        ax.set_xscale("log", base=2)
        ax.grid(alpha=0.25)
    axes["strong"].plot([], [], "--", color="grey", label="predicted")
    axes["strong"].legend(frameon=False, fontsize=8)
    axes["strong"].figure.suptitle(f"{title}; hollow: more ranks than cores", fontsize=10, fontweight="bold")
    return axes["strong"].figure


if __name__ == "__main__":
    if launcher.inside() and len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        told = measure(world(), json.loads(sys.argv[1]))
        if told:
            print(json.dumps(told), flush=True)
    else:
        sys.exit(main())
