#!/usr/bin/env python3
"""How a strategy scales on your machines: measured on 1 to n ranks, beside the prediction, with the laws fitted.

    python scripts/experiments/scaling.py --ranks 1,2,4 --strategy ddp,zero1,fsdp          # ranks of this machine
    python scripts/experiments/scaling.py --ranks 1,2 --strategy all                       # is every prediction true?
    python scripts/experiments/scaling.py --ranks 4,8 --strategy all --lab 100 --out runs/lab    # and between hosts?
    srun -n 16 python -m mpi4py scripts/experiments/scaling.py --out runs/scaling          # those of a cluster: one
    srun -n 32 python -m mpi4py scripts/experiments/scaling.py --out runs/scaling          # number after the other

Strong scaling keeps the samples of a step, weak scaling those of a rank. Layers are measured on all ranks at once, for
as many samples as each has: what ranks of a node take from each other is in the profile, so the prediction is of the
exchange. Pipelines and layers that are cut are measured with the samples of a micro-batch, and of a step.

Layers and steps take turns. Of a turn counts what layers and steps usually take, the mean of the middle half
(measure_layers): of layers on the mean of the ranks, of steps on the slowest rank; told are the medians of the turns,
and the span of the difference over them, which is narrow where nothing else runs. Where there are fewer cores than
ranks a point is marked: it says nothing of scaling.

--lab puts each rank on a host of its own (netlab.py, root only). They share the cores of this machine, which is why
cables are slow: messages must be most of a step.

scaling.json keeps all points, and is added to; scaling.png and the table are made again from all that is in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarking import ETHERNET, in_lab  # noqa: E402
from job_options import MOST, arguments, measured_network, model_of, network_of, ranks, shape  # noqa: E402

from parallel.launch import blas, launcher  # noqa: E402

SHARED = ("ddp", "dp", "ps", "zero1", "zero2", "fsdp")
PIPELINES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev", "pipedream")
STRATEGIES = (*SHARED, "tensor", *PIPELINES)
MODES = ("strong", "weak")
NEAR = 0.15
TURNS = 8  # at most
STEPS, LAB_STEPS = 40, 8  # of each measurement; in the lab messages are most of it, and take what their bytes take
MICRO = 4  # micro-batches a stage
SIZES, SECONDS = tuple(4**k for k in range(1, 13)), 0.05  # of the lab's network: bytes, for each length
TIMED = (1, 2, 5)  # of a LayerProfile: forward, backward, weight gradient
TIMEOUT = 300.0  # seconds for one number of ranks and one strategy


def parser() -> argparse.ArgumentParser:
    whole = arguments.whole(1, MOST)
    found = arguments.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="mlp:784,512,512,512,512,10", help="network as train.py has it")
    found.add_argument("--input", type=shape, metavar="SHAPE", help="of one sample, such as 224,224,3")
    found.add_argument("--classes", type=whole, metavar="N", help="outputs, or the vocabulary")
    found.add_argument("--batch", type=whole, default=128, help="samples: of a step (strong), of a rank (weak)")
    found.add_argument("--strategy", default="ddp", help=f"all, or one or several of {','.join(STRATEGIES)}")
    found.add_argument("--ranks", type=ranks, default=[1, 2], help="to start here (default: 1,2)")
    found.add_argument(
        "--network", metavar="FILE", help="what bench.py network wrote (default: two ranks are measured)"
    )
    found.add_argument("--lab", type=whole, metavar="RATE", help="a host for each rank, with cables of so many Mbit/s")
    found.add_argument("--placement", metavar="HOW", help="of ranks on a topology, as of estimate")
    found.add_argument("--ranks-per-node", type=whole, metavar="N", help=argparse.SUPPRESS)
    found.add_argument("--steps", type=whole, help=f"of each measurement (default: {STEPS}, in a lab {LAB_STEPS})")
    found.add_argument("--out", type=arguments.new_directory, default="runs/scaling", help="directory of results")
    return found


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    options.out = Path(options.out)
    strategies = list(STRATEGIES) if options.strategy == "all" else options.strategy.split(",")
    for name in strategies:
        if name not in STRATEGIES:
            parser().error(f"--strategy {name}: expected all, or one or several of {', '.join(STRATEGIES)}")
    try:
        model_of(options)
        if options.network:
            network_of(options)
    except ValueError as error:
        parser().error(str(error))
    blas.set_environment(1)
    task = {"model": options.model, "input": options.input, "classes": options.classes, "batch": options.batch}
    task |= {"steps": options.steps or (LAB_STEPS if options.lab else STEPS), "lab": options.lab}
    read(options, task)  # refuses another task before anything is measured
    if launcher.inside():
        if not options.network and not (options.out / "network.json").exists():
            parser().error("--network: measure it with bench_network.py on these nodes, and name the file")
        found = [point for name in strategies for point in measure(world(), task | {"strategy": name})]
        if found:  # rank 0 has them
            keep(options, task, network_here(options), found)
    else:
        if options.lab and (reason := why_no_lab(options)):
            parser().error(reason)
        try:
            network = network_here(options)
        except (ValueError, OSError, RuntimeError) as error:
            parser().exit(1, f"scaling.py: error: {error}\n")
        for count in options.ranks:
            for name in strategies if count > 1 else strategies[:1]:
                print(f"{name} on {count} rank{'s' * (count > 1)}", flush=True)
                try:
                    options_of(name, model_of(options), count)
                except ValueError as error:  # too few layers
                    print(f"left out: {error}")
                    continue
                try:
                    points = measured_on(count, task | {"strategy": name})
                except RuntimeError as error:
                    parser().exit(1, f"scaling.py: error: {error}\n")
                of = strategies if count == 1 else [name]  # one rank is alone, whatever the strategy
                keep(options, task, network, [point | {"strategy": each} for each in of for point in points])
    return tell(options, task) if not launcher.inside() or found else 0


def why_no_lab(options) -> str | None:
    """Why --lab cannot be, or None."""
    import netlab

    return "--lab: give --ranks of 2 and more" if min(options.ranks) < 2 else netlab.reason_against()


def measured_on(count: int, task: dict) -> list[dict]:
    """The points that so many ranks of this machine measure.

    Raises
    ------
    RuntimeError
        they did not end well
    """
    if task["lab"]:
        return in_lab(__file__, [json.dumps(task)], count, task["lab"], options=ETHERNET)
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
    sharing = world.size if task.get("lab") else here  # the cores of a machine
    points = []
    for mode in MODES if world.size > 1 else MODES[:1]:  # one rank is both
        batch = task["batch"] * (world.size if mode == "weak" else 1)
        point = one_point(world, task, batch)
        point |= {"mode": mode, "strategy": task["strategy"], "ranks": world.size, "batch": batch}
        points.append(point | {"ranks_per_node": here, "crowded": sharing > launcher.cores()})
    if world.size == 1:
        points.append(points[0] | {"mode": "weak"})
    return points if world.rank == 0 else []


def one_point(world, task: dict, batch: int) -> dict:
    """Of each turn the seconds of a step, and the layers' on the mean of the ranks."""
    from types import SimpleNamespace

    import numpy as np

    import nn
    from collectives.steps import chunk
    from parallel.command.options import Options
    from parallel.planning.layer_times import measure_layers, random_batch
    from parallel.strategies import build_trainer

    network = model_of(SimpleNamespace(**task))
    make = lambda: (model_of(SimpleNamespace(**task)), nn.CrossEntropyLoss(), nn.SGD(1e-3))
    words, micro, cuts = options_of(task["strategy"], network, world.size)
    one = nn.Trainer(*make())
    trainer = one if world.size == 1 else build_trainer(Options(**words), *make(), world)
    parts = {"ps": world.size - 1, "tensor": 1}.get(task["strategy"], micro or world.size)
    share = -(-batch // parts)
    mine = random_batch(network, share)
    index, count = trainer.shard
    lo, hi = chunk(batch, count, index) if index is not None else (0, 0)
    x, y = random_batch(network, batch)
    x, y = x[lo:hi], y[lo:hi]
    count = max(1, min(TURNS, task["steps"] // 2))
    steps = max(2, task["steps"] // count)
    turns = []
    for _ in range(count):  # alternating runs, so that all are disturbed alike by what else runs
        quiet_barrier(world)
        times = measure_layers(one, *mine, repeats=steps)
        alone = clocked_steps(world, lambda: one.step(*mine, share), steps)
        many = usual(np.max(world.allgather(clocked_steps(world, lambda: trainer.step(x, y, batch), steps)), axis=0))
        profile = np.mean(world.allgather([[layer[k] for k in TIMED] for layer in times.layers]), axis=0)
        update = float(np.mean(world.allgather(times.update)))
        besides = usual(np.mean(world.allgather(alone), axis=0)) - float(profile[:, :2].sum()) - update
        head = max(0.0, besides)  # all that a step of one rank takes besides, and no clock in it
        turns.append({"seconds": many, "profile": profile.tolist(), "update": update, "head": head})
    quiet_barrier(world)
    if world.size > 1:
        trainer.close()
    return {"samples": share, "micro": micro, "cuts": cuts, "turns": turns}


def clocked_steps(world, step, repeats: int) -> list[float]:
    """Seconds of so many steps, after one to warm up, which comes first."""
    quiet_barrier(world)
    taken = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


def usual(taken) -> float:
    """What a step usually takes: of steps as of their layers the mean of the middle half, but for the first one."""
    from parallel.planning.layer_times import STEP, typical

    return float(typical([{STEP: seconds} for seconds in taken])[STEP])


def options_of(strategy: str, network, ranks: int) -> tuple[dict, int, list[int]]:
    """(options of the run, micro-batches, the layers with which the second stage and all after it begin)."""
    from parallel.strategies.pipeline.placement import even_cuts
    from parallel.strategies.pipeline.timing import CHUNKS

    if strategy not in PIPELINES or ranks == 1:
        return {"strategy": "ddp" if ranks == 1 else strategy}, 0, []
    micro = ranks if strategy == "pipedream" else MICRO * ranks
    cuts = even_cuts(network, ranks * CHUNKS.get(strategy, 1))
    given = f"{strategy}:micro={micro},cuts={'/'.join(map(str, cuts))}"
    return {"strategy": "pipeline", "pipeline": given}, micro, cuts


def quiet_barrier(world) -> None:
    """A barrier in which a rank that waits leaves its core to the others."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


# ------------------------------------------------------------------------------------------ beside the prediction


def predicted(point: dict, task: dict, network) -> dict:
    """A point with what the model says of it: of each turn from the layers of that turn; then the medians."""
    from statistics import median

    found = [predicted_turn(point, turn, task, network) for turn in point["turns"]]
    apart = [each.seconds / turn["seconds"] - 1 for each, turn in zip(found, point["turns"], strict=True)]
    parts = {part: median(each.parts[part] for each in found) for part in found[0].parts}
    point |= {"seconds": median(turn["seconds"] for turn in point["turns"])}
    point |= {"predicted": median(each.seconds for each in found), "parts": parts}
    return point | {"apart": median(apart), "least": min(apart), "most": max(apart)}


def predicted_turn(point: dict, turn: dict, task: dict, network):
    """What the model says of a step, from the layers of one turn."""
    from types import SimpleNamespace

    from parallel.planning.job import Axes
    from parallel.planning.layer_times import Times, job_of
    from parallel.planning.profile import count_layers
    from parallel.strategies.estimate import estimate

    model, strategy, ranks = model_of(SimpleNamespace(**task)), point["strategy"], point["ranks"]
    counted = count_layers(model, point["samples"], 1e9, 0.0)
    layers = [
        layer._replace(forward=f, backward=b, weight_gradient=min(w, b))
        for layer, (f, b, w) in zip(counted, turn["profile"], strict=True)
    ]
    job = job_of(model, Times(layers, turn["update"], turn["head"]), point["samples"], point["batch"], 0, overlap=False)
    own = network.with_ranks_per_node(point["ranks_per_node"])
    if strategy == "tensor":
        return estimate(job, "ddp", Axes(tensor=ranks), own)
    axes = Axes(pipeline=ranks) if strategy in PIPELINES and strategy != "pipedream" else Axes(ranks)
    return estimate(job, strategy, axes, own, micro_batches=point["micro"] or None, cuts=point["cuts"])


def network_here(options):
    """Of --network, or kept from before, or measured."""
    from collectives.pricing.networks import Network

    kept = options.out / "network.json"
    if options.network:
        network = network_of(options)
    elif kept.exists():
        network = Network.load(kept)
    elif options.lab:
        network = Network.of(in_lab(__file__, [json.dumps({"measure": "network"})], 2, options.lab, options=ETHERNET))
    else:
        network = measured_network(2)
    options.out.mkdir(parents=True, exist_ok=True)
    network.save(kept)
    return network


def read(options, task: dict) -> dict:
    """What scaling.json has; nothing of another task."""
    file = options.out / "scaling.json"
    same = json.loads(json.dumps({name: task[name] for name in ("model", "input", "classes", "batch", "lab")}))
    try:
        before = json.loads(file.read_text()) if file.exists() else {"task": same, "points": []}
        task_before = {**dict.fromkeys(same), **before["task"]}  # nothing is said where nothing was given
    except (ValueError, LookupError, TypeError) as error:
        parser().error(f"{file} is not what was written here ({error}): give another --out")
    if task_before != same:
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
    from nn.tables import text_table
    from parallel.planning.tables import seconds

    content = read(options, task)
    points = content["points"]
    lines = []
    for p in points:
        lines.append([p["strategy"], p["mode"], str(p["ranks"]), str(p["batch"]), seconds(p["seconds"])])
        lines[-1] += [seconds(p["predicted"]), f"{p['apart']:+.1%}", f"{p['least']:+.0%} to {p['most']:+.0%}"]
        lines[-1].append("; ".join(marks(p)))
    heads = ["strategy", "scaling", "ranks", "samples", "measured", "predicted", "apart", "of turns", ""]
    print("\n" + text_table([heads, *lines], left=(0, 1, 8)))
    near = sum(abs(p["apart"]) <= NEAR for p in points)
    print(f"{near} of {len(points)} predictions are within {NEAR:.0%} of what was measured")
    laws = fitted(points)
    for text in laws.values():
        print(text)
    write(options, content | {"laws": laws})
    draw(points, f"{task['model']}, {task['batch']} samples").savefig(options.out / "scaling.png")
    print(f"{options.out / 'scaling.json'}, network.json and scaling.png beside it")
    return 0


def marks(point: dict) -> list[str]:
    """What is to be known of a row; of one that is far off, what the prediction is made of, and whether turns agree."""
    from parallel.planning.tables import seconds

    found = ["more ranks than cores"] * point["crowded"]
    if abs(point["apart"]) <= NEAR:
        return found
    parts = {part: took for part, took in point["parts"].items() if took > point["predicted"] / 100}
    found.append(f"beyond {NEAR:.0%}: {', '.join(f'{part} {seconds(took)}' for part, took in parts.items())}")
    if (span := point["most"] - point["least"]) > NEAR:
        found.append(f"turns differ by {span:.0%}, as where other work wants the cores")
    return found


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
        top = max(110, 1.05 * ax.dataLim.y1)
        ax.set(xlabel="ranks", ylabel="efficiency, %", ylim=(0, top), title=f"{mode} scaling")
        ax.set_xscale("log", base=2)
        ax.grid(alpha=0.25)
    axes["strong"].plot([], [], "--", color="grey", label="predicted")
    axes["strong"].legend(frameon=False, fontsize=8)
    axes["strong"].figure.suptitle(f"{title}; hollow: more ranks than cores", fontsize=10, fontweight="bold")
    return axes["strong"].figure


def work(task: dict) -> None:
    """What ranks do that were started for a task; rank 0 prints what was found."""
    ranks = world()
    if "measure" in task:
        from dataclasses import asdict

        from collectives.pricing.measure import measure_network

        told = asdict(measure_network(ranks, SIZES, SECONDS))
    else:
        told = measure(ranks, task)
    if ranks.rank == 0:
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    if launcher.inside() and len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        sys.exit(main())
