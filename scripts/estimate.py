#!/usr/bin/env python3
"""Estimate a training step on any number of ranks: seconds, efficiency, bytes, memory, cost, and the best strategy.

python scripts/estimate.py mlp:784,1024,1024,10 --ranks 4 --measure       layers and network measured here: what to use
python scripts/estimate.py vgg16 --ranks 1..65536 --network gpu-25g --flops 10T --batch 1024
python scripts/estimate.py resnet50 --strategy ddp --ranks 1..1024 --network infiniband --draw scaling.png
python scripts/estimate.py transformer:1024,16,24 --input 512 --strategy 1f1b --mesh pipeline=8,tensor=4 --ranks 64..512
python scripts/estimate.py vgg16 --ranks 1..65536 --network gigabit --map map.svg     which wins at which scale

Layers are counted, at --flops; with --measure they are measured on one process here, for the samples that a rank has;
with --profile a file says what they take. Of one number of ranks every strategy is shown, which one to use and the
command that follows; of several the fastest of each. Stages and replicas are found by PipeDream's dynamic programme.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import BooleanOptionalAction
from dataclasses import replace
from pathlib import Path

from entry_point import module, run
from job_options import (
    COLOURS,
    DIGITS,
    MOMENTS,
    MOST,
    add_job_options,
    amount,
    arguments,
    in_node_memory,
    measured_network,
    model_of,
    network_of,
    node_size,
    picture,
    positive,
    ranks,
    samples_of,
)

blas = module("parallel.launch.blas")
SHOWN = 16  # strategies of a table
MESHES = ("tensor", "hybrid")  # ddp with all layers cut as far as the ranks go; the fastest mesh of several axes
DATA = {((8, 8, 1), 10): "digits", DIGITS: "mnist", COLOURS: "cifar10", ((32, 32, 3), 100): "cifar100"}


def parser() -> argparse.ArgumentParser:
    whole = arguments.whole(1, MOST)
    found = arguments.Parser(
        prog="estimate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--strategy",
        default="all",
        help="ddp, zero1 ... zero3, dp, ps, gpipe ..., tensor, hybrid, local-sgd:8, easgd, diloco, downpour, or all",
    )
    found.add_argument(
        "--mesh", help="sizes of axes: pipeline=4,tensor=2, context=4, expert=8; what is left of the ranks is data"
    )
    found.add_argument("--ranks", type=ranks, help="64, or 1,2,4, or 1..65536 (default: 1..8, of a mesh)")
    add_job_options(found)
    found.add_argument(
        "--flops", type=amount, default=5e10, help="operations a second that a rank keeps up (default: 50G)"
    )
    found.add_argument(
        "--measure", action=BooleanOptionalAction, default=False,
        help="measure the layers here, and the network on two ranks here unless --network names one",
    )  # fmt: skip
    found.add_argument("--repeats", type=whole, default=5, help="steps in which layers are measured (default: 5)")
    found.add_argument("--threads", type=whole, default=1, help="BLAS threads of a rank, measured (default: 1)")
    found.add_argument(
        "--save-profile", type=arguments.new_file, metavar="CSV", help="write what was measured there, for --profile"
    )
    found.add_argument(
        "--recompute", action=BooleanOptionalAction, default=False, help="pipelines keep a stage's input only"
    )
    found.add_argument("--samples", type=amount, metavar="N", help="of a whole run, such as 115M: how long it takes")
    found.add_argument("--price", type=positive, help="of a rank for an hour: what the run costs")
    found.add_argument(
        "--draw", type=picture, metavar="FILE",
        help="picture of seconds and efficiency over ranks, or of what a step is made of (png, svg, pdf)",
    )  # fmt: skip
    found.add_argument(
        "--map", type=picture, metavar="FILE", help="picture of which strategy is fastest with how many samples a step"
    )
    found.add_argument("--json", type=arguments.new_file, metavar="FILE", help="write all estimates there")
    return found


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.price and not options.samples:
        parser().error("--price needs --samples: of how long a run")
    if options.profile and options.measure:
        parser().error("--profile says what --measure would measure: leave one of them out")
    if options.save_profile and not options.measure:
        parser().error("--save-profile writes what --measure measures: add --measure")
    if options.measure:
        blas.set_environment(options.threads)  # before NumPy is imported
    try:
        return estimates(options)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        parser().error(str(error))


def job_of(options, network):
    """Return what is trained: from its counts, from --profile, or measured here."""
    from parallel.planning.job import Job
    from parallel.planning.layer_times import sample_bytes
    from parallel.planning.profile import count_layers, read_profile

    model = model_of(options)
    if options.measure:
        return measured_job(options, model)
    copy = network.copying(1 << 24) / (1 << 24)
    if options.profile:
        layers, samples = read_profile(options.profile), options.profile_batch or options.batch
    else:
        samples = 1
        layers = count_layers(model, samples, options.flops, copy)
    moments = MOMENTS[options.optimizer]
    given, answered = sample_bytes(model)
    return Job(
        layers,
        samples,
        options.batch,
        moments,
        (3 + 2 * moments) / 2 * copy * sum(layer.parameters for layer in layers),  # read and written
        given,
        answered,
        in_node_memory(options),
        options.overlap,
    )


def measured_job(options, model):
    """Return what is trained, every layer measured for the samples that a rank has."""
    import nn
    from parallel.planning import layer_times
    from parallel.planning.profile import write_profile

    moments, samples = MOMENTS[options.optimizer], max(1, options.batch // max(options.ranks))
    optimizer = nn.Adam(1e-3) if moments == 2 else nn.SGD(1e-3, momentum=0.9 * moments)
    loss = nn.CrossEntropyLoss()
    if options.model.startswith("googlenet"):
        from nn.models.googlenet import AuxiliaryLoss

        loss = AuxiliaryLoss(loss)
    batch = layer_times.random_batch(model, samples)
    times = layer_times.measure_layers(nn.Trainer(model, loss, optimizer), *batch, options.repeats)
    if options.save_profile:
        Path(options.save_profile).write_text(write_profile(times.layers))
    return layer_times.job_of(model, times, samples, options.batch, moments, in_node_memory(options), options.overlap)


def estimates(options) -> int:
    """Estimate, print, draw."""
    from parallel.planning.job import Axes
    from parallel.strategies import ALIASES, STRATEGIES
    from parallel.strategies.estimate import NAMES
    from parallel.strategies.pipeline.timing import TIMED

    mesh = Axes.parse(options.mesh) if options.mesh else Axes()
    options.ranks = options.ranks or [mesh.ranks * times for times in ((1, 2, 4, 8) if mesh.data == 1 else (1,))]
    options.strategy = ALIASES.get(options.strategy, options.strategy)
    strategy, colon, _ = options.strategy.partition(":")
    if strategy not in (known := ("all", *NAMES, *MESHES)):
        raise ValueError(f"--strategy {options.strategy}: expected one of {', '.join(known)}")
    if keys := STRATEGIES[strategy].keys if strategy in STRATEGIES else None:
        try:
            keys.parse(options.strategy)
        except ValueError as error:
            raise ValueError(f"--strategy {options.strategy}: {error}") from None
    elif colon:
        raise ValueError(f"--strategy {options.strategy}: {strategy} takes no keys: leave them out")
    if options.mesh and options.strategy in ("all", *MESHES):
        raise ValueError(f"--mesh {options.mesh} is for one --strategy other than {options.strategy}: name it")
    if options.recompute and options.strategy not in (*TIMED, "hybrid"):
        raise ValueError(f"--recompute is of pipelines: name one with --strategy, such as 1f1b, not {options.strategy}")
    model_of(options)  # refuses what cannot be before anything is measured
    if options.measure and not options.network:
        network, name = measured_network(max(options.ranks)), "measured here"
    else:
        options.network = options.network or "workstation"
        network, name = network_of(options), options.network
    job, limit = job_of(options, network), options.memory or float("inf")
    if options.measure or options.profile:
        print(layers_of(job), end="\n\n")
    if options.strategy == "all" and len(options.ranks) == 1:
        return plan(options, job, network, name, limit)
    return over_ranks(options, job, network, name, limit)


def layers_of(job) -> str:
    """Return a table of the layers, as they were measured or read."""
    from nn.tables import text_table
    from parallel.planning.tables import nbytes, seconds

    heads = ["layer", "forward", "input gradient", "weight gradient", "output", "parameters"]
    lines = [
        [layer.name[:44], *map(seconds, (layer.forward, layer.backward - layer.weight_gradient, layer.weight_gradient))]
        + [nbytes(layer.output), nbytes(layer.parameters)]
        for layer in job.layers
    ]
    return text_table([heads, *lines])


def plan(options, job, network, name: str, limit: float) -> int:
    """Every strategy on one number of ranks, which one to use, and the command that follows."""
    from parallel.planning.choice import best_of_each, reasons
    from parallel.planning.tables import Run, Scaled, as_dict, nbytes, seconds, table
    from parallel.strategies.estimate import estimate, ranking, serial, strong_and_weak
    from parallel.strategies.pipeline.cost import MOST_PLANNED, plan_stages

    def scaled(p):
        again = lambda job: estimate(job, p.strategy, p.axes, network, options.servers, options.micro)
        return Scaled(p, *strong_and_weak(job, p, again if p.ranks > 1 else lambda job: p))

    (count,) = options.ranks
    print("; ".join(filter(None, [f"network: {name}, {node_size(network, count)}", network.source])))
    if count <= MOST_PLANNED:
        try:
            print(f"stages without flush: {plan_stages(job, count, network, limit)}")
        except ValueError as error:  # nothing fits
            print(f"stages without flush: {error}")
    every = ranking(job, count, network, limit, options.servers, options.micro)
    shown = best_of_each(every, SHOWN)
    rows, one = [scaled(p) for p in shown], seconds(serial(job).seconds)
    print(f"\n{options.batch:,} samples a step on {count:,} ranks; one rank {one}")
    print(table(rows, options.batch, Run(options.samples or 0.0, options.price or 0.0), memory=limit))
    fitting = [p for p in every if p.memory <= limit]
    best = next((p for p in fitting if trainable(p, options)), None)
    print()
    if not fitting:
        print(f"nothing fits into {nbytes(limit)} a rank: the least is {nbytes(min(p.memory for p in every))}")
    elif not best:
        name = fitting[0].name
        print(f"use {name}, the fastest that fits; train.py does not take it, and what it takes does not fit")
    else:
        print("\n".join(reasons(best, every, limit, lambda p: trainable(p, options))))
        print(f"\n    {command(best, options)}")
        if not data_of(options):
            shape, classes = samples_of(options)
            print(f"\nadd --data, of samples of shape {shape} and {classes:,} classes")
    if options.draw:
        from parallel.planning.pictures import draw_bars

        title = f"{options.model}, {options.batch:,} samples a step on {count:,} ranks"
        draw_bars(shown, title, limit).savefig(options.draw)
        print(f"\npicture in {options.draw}")
    if options.map:
        draw(options, job, network, limit, f"{options.model} on {name}")
    if options.json:
        record = {"model": options.model, "network": name, "ranks": count, "batch": options.batch}
        record["best"] = best and command(best, options)
        record["predictions"] = [as_dict(row) for row in rows]
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0 if fitting else 1


def over_ranks(options, job, network, name: str, limit: float) -> int:
    """One strategy, or the fastest, on every number of ranks."""
    from parallel.planning.tables import Run, as_dict, nbytes, seconds, table
    from parallel.strategies.estimate import serial

    title = f"{options.model} on {name}"
    one = seconds(serial(job).seconds)
    print(f"{title}: {nbytes(job.parameters)} of parameters, {options.batch:,} samples a step, one rank {one}")
    print("; ".join(filter(None, [f"network: {node_size(network, max(options.ranks))}", network.source])), end="\n\n")
    curves = of_one(options, job, network) if options.strategy != "all" else of_all(options, job, network, limit)
    rows = next(iter(curves.values()))
    print(table(rows, options.batch, Run(options.samples or 0.0, options.price or 0.0), limit))
    if options.draw:
        from parallel.planning.pictures import draw_scaling

        fitting = {name: [s for s in of if s.prediction.memory <= limit] for name, of in curves.items()}
        if not any(fitting.values()):
            raise ValueError(f"--draw {options.draw}: nothing fits into {nbytes(limit)} a rank: give more --memory")
        draw_scaling({name: of for name, of in fitting.items() if of}, options.batch, title).savefig(options.draw)
        print(f"\npicture in {options.draw}")
    if options.map:
        draw(options, job, network, limit, title)
    if options.json:
        record = {"model": options.model, "network": name, "batch": options.batch}
        record["predictions"] = [as_dict(row) for row in rows]
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def of_one(options, job, network) -> dict:
    """One strategy on every number of ranks."""
    from parallel.planning.job import Axes
    from parallel.planning.tables import Scaled
    from parallel.strategies.estimate import MOST_PARTS, estimate, ranking, strong_and_weak
    from parallel.strategies.pipeline.timing import CHUNKS, TIMED

    fixed = Axes.parse(options.mesh) if options.mesh else Axes()
    found = []
    inside = fixed.tensor * fixed.context * fixed.expert
    for count in options.ranks:
        pipeline = fixed.pipeline
        if options.strategy in TIMED and pipeline == 1:  # as many stages as there can be
            most = min(count // inside, len(job.layers) // CHUNKS.get(options.strategy, 1))
            pipeline = max((n for n in range(1, most + 1) if count // inside % n == 0), default=1)
        if count % (pipeline * inside) or (fixed.data > 1 and count != fixed.ranks):
            raise ValueError(f"--mesh {options.mesh} does not multiply to {count} ranks: change --ranks or --mesh")
        axes = fixed._replace(data=count // (pipeline * inside), pipeline=pipeline)
        strategy = options.strategy
        if strategy == "tensor":
            parts = max(n for n in range(1, min(count, MOST_PARTS) + 1) if count % n == 0)
            axes, strategy = Axes(count // parts, 1, parts), "ddp"
        elif strategy == "hybrid":
            every = ranking(job, count, network, options.memory or float("inf"), options.servers, options.micro)
            several = [p for p in every if sum(size > 1 for size in p.axes) > 1] or every
            axes, strategy = several[0].axes, several[0].strategy.replace("serial", "ddp")

        def again(job, axes=axes, strategy=strategy):
            return estimate(job, strategy, axes, network, options.servers, options.micro, options.recompute)

        found.append(Scaled(again(job), *strong_and_weak(job, again(job), again)))
    return {options.strategy: found}


def of_all(options, job, network, limit: float) -> dict:
    """Return the fastest on every number of ranks, and for a picture the curves of some strategies."""
    from parallel.planning.tables import Scaled
    from parallel.strategies.estimate import estimate, ranking, strong_and_weak

    def ranked(job, count):
        return ranking(job, count, network, limit, options.servers, options.micro)

    def scaled(p, again=None):
        same = lambda job: estimate(job, p.strategy, p.axes, network, options.servers, options.micro)
        return Scaled(p, *strong_and_weak(job, p, (again or same) if p.ranks > 1 else lambda job: p))

    every = {count: ranked(job, count) for count in options.ranks}
    curves = {
        "the fastest": [
            scaled(each[0], lambda job, count=count: ranked(job, count)[0]) for count, each in every.items()
        ]
    }
    for name in ("ddp", "zero1", "fsdp", "ps", "dp") if options.draw else ():
        of = (p for each in every.values() for p in each)
        curves[name] = [scaled(p) for p in of if p.strategy in (name, "serial") and p.ranks == p.axes.data]
    return curves


def draw(options, job, network, limit: float, title: str) -> None:
    """The map: batches from a 64th to 64 times --batch."""
    from parallel.planning.pictures import draw_map
    from parallel.strategies.estimate import ranking

    batches = sorted({max(1, round(options.batch * 4.0**k)) for k in range(-3, 4)})
    given = network, limit, options.servers, options.micro
    fastest = [
        [ranking(replace(job, batch=batch), count, *given, stale=False)[0] for count in options.ranks]
        for batch in batches
    ]
    draw_map(options.ranks, batches, fastest, f"the fastest strategy: {title}", limit).savefig(options.map)
    print(f"\nmap in {options.map}")


def trainable(prediction, options) -> bool:
    """Whether train.py has it: asked of what its strategies say they can, its rules, and the network."""
    from parallel.command import factory, rules
    from parallel.command.parsing import parse
    from parallel.strategies import STRATEGIES
    from parallel.strategies.pipeline.timing import TIMED

    name = prediction.strategy.partition(":")[0]
    used = {axis for axis, size in prediction.axes._asdict().items() if size > 1}
    strategy = STRATEGIES.get("pipeline" if name in (*TIMED, "pipedream") else name)
    if prediction.ranks == 1 or strategy is None or not used <= set(strategy.supports.axes):
        return prediction.ranks == 1
    try:
        given = parse(command(prediction, options).split()[2:])
        rules.check_strategy(given, prediction.ranks, model_of(options), factory.optimizer(given))
    except ValueError:
        return False
    return True


def command(best, options) -> str:
    """The run that follows."""
    from parallel.planning.choice import options_of

    train = os.environ.get("RINGPROP_COMMAND", "python scripts/train.py")
    words = [f"{train} --model {options.model}{data_of(options)} --batch {options.batch} --ranks {best.ranks}"]
    chosen = options_of(best, None if options.profile else model_of(options))
    words += [f"--{name} {chosen[name]}" for name in ("strategy", "pipeline", "mesh", "context") if name in chosen]
    if best.strategy == "ps" and options.servers > 1:
        words.append(f"--servers {options.servers}")
    if options.dtype != "float32":
        words.append(f"--dtype {options.dtype}")
    if options.optimizer != "sgd":
        words.append("--optimizer adam --lr 0.001" if options.optimizer == "adam" else "--momentum 0.9")
    if options.node_memory != "auto" and best.strategy == "ddp" and best.ranks > 1:
        words.append(f"--node-memory {options.node_memory}")
    return " ".join(words)


def data_of(options) -> str:
    """The words that name data of such samples; none where train.py has none."""
    shape, classes = samples_of(options)
    if name := DATA.get((shape, classes)):
        return f" --data {name}"
    if len(shape) == 1 and classes == 256:
        return f" --data stdlib --length {shape[0]}"
    if len(shape) == 3 and classes == 1000:
        return f" --data synthetic:{'x'.join(map(str, shape))}"
    return ""


if __name__ == "__main__":
    sys.exit(run(main))
