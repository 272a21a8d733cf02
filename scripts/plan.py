#!/usr/bin/env python3
"""Which strategy to train with, why, and by how much: every layer is measured, every strategy and mesh priced.

python scripts/plan.py mlp:784,1024,1024,10 --ranks 2
python scripts/plan.py vgg16 --ranks 16 --network gigabit --profile vgg16.csv --profile-batch 128 --batch 2048
python scripts/plan.py transformer:256,8,6 --ranks 8 --memory 2GiB --draw plan.png

Layers are measured on one process here, for the samples that a rank has, unless --profile says what they take; the
network on two ranks here, unless --network names one. Stages and replicas are found by PipeDream's dynamic programme.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from entry_point import module, run
from planning import (
    COLOURS,
    DIGITS,
    MOMENTS,
    add_job_options,
    in_node_memory,
    measured_network,
    model_of,
    network_of,
    node_size,
    picture,
    samples_of,
    whole,
)

blas = module("parallel.launch.blas")
SHOWN = 12
DATA = {((8, 8, 1), 10): "digits", DIGITS: "mnist", COLOURS: "cifar10", ((32, 32, 3), 100): "cifar100"}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--ranks", type=whole, required=True, metavar="N", help="that shall train")
    add_job_options(found, None)
    found.add_argument("--repeats", type=whole, default=5, help="steps in which layers are measured (default: 5)")
    found.add_argument("--threads", type=whole, default=1, help="BLAS threads of a rank (default: 1)")
    found.add_argument("--save-profile", metavar="CSV", help="write what was measured there, for --profile")
    found.add_argument(
        "--draw", type=picture, metavar="FILE", help="picture of what a step of each strategy is made of"
    )
    found.add_argument("--json", metavar="FILE", help="write the plan there")
    return found


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    blas.settle(options.threads)  # before NumPy is imported
    try:
        return plan(options)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        parser().exit(2, f"plan.py: error: {error}\n")


def measured_job(options):
    """What is trained, measured here or read from --profile."""
    import nn
    from parallel.planning.layer_times import Times, job_of, measure_layers, random_batch
    from parallel.planning.profile import read_profile, write_profile

    model, moments = model_of(options), MOMENTS[options.optimizer]
    samples = options.profile_batch or max(1, options.batch // options.ranks)
    if options.profile:
        times = Times(read_profile(options.profile), 0.0, 0.0)
        samples = options.profile_batch or options.batch
    else:
        optimizer = nn.Adam(1e-3) if moments == 2 else nn.SGD(1e-3, momentum=0.9 * moments)
        loss = nn.CrossEntropyLoss()
        if options.model.startswith("googlenet"):
            from nn.models.googlenet import AuxiliaryLoss

            loss = AuxiliaryLoss(loss)
        times = measure_layers(nn.Trainer(model, loss, optimizer), *random_batch(model, samples), options.repeats)
    if options.save_profile:
        Path(options.save_profile).write_text(write_profile(times.layers))
    return job_of(model, times, samples, options.batch, moments, in_node_memory(options), not options.no_overlap)


def plan(options) -> int:
    """Measure, price, say."""
    from parallel.planning.choice import best_of_each, reasons
    from parallel.planning.tables import Scaled, as_dict, columns, nbytes, seconds, table
    from parallel.strategies.estimate import estimate, ranking, strong_and_weak
    from parallel.strategies.pipeline.cost import MOST_PLANNED, plan_stages

    def scaled(p):
        again = lambda job: estimate(job, p.strategy, p.axes, network, options.servers, options.micro)
        return Scaled(p, *strong_and_weak(job, p, again if p.ranks > 1 else lambda job: p))

    model_of(options)  # refuses what cannot be before anything is measured
    job = measured_job(options)
    network = network_of(options) if options.network else measured_network(options.ranks)
    limit = options.memory or float("inf")

    heads = ["layer", "forward", "input gradient", "weight gradient", "output", "parameters"]
    lines = [
        [layer.name[:44], *map(seconds, (layer.forward, layer.backward - layer.weight_gradient, layer.weight_gradient))]
        + [nbytes(layer.output), nbytes(layer.parameters)]
        for layer in job.layers
    ]
    print(f"{options.model}, {job.samples:,} samples on a rank")
    print(columns(heads, lines))
    print(f"optimizer {seconds(job.update)}, loss and the rest {seconds(job.head)}")
    print(f"\nnetwork: {options.network or 'measured here'}, {node_size(network, options.ranks)}; {network.source}")

    found = ranking(job, options.ranks, network, limit, options.servers, options.micro)
    if options.ranks <= MOST_PLANNED:
        try:
            print(f"\nstages without flush: {plan_stages(job, options.ranks, network, limit)}")
        except ValueError as error:  # nothing fits
            print(f"\nstages without flush: {error}")
    shown = best_of_each(found, SHOWN)
    rows = [scaled(p) for p in shown]
    print(f"\n{options.batch:,} samples a step on {options.ranks:,} ranks")
    print(table(rows, options.batch, memory=limit))

    fitting = [p for p in found if p.memory <= limit]
    best = next((p for p in fitting if trainable(p, options)), None)
    print()
    if not fitting:
        print(f"nothing fits into {nbytes(limit)} a rank: the least is {nbytes(min(p.memory for p in found))}")
    elif not best:
        name = fitting[0].name
        print(f"use {name}, the fastest that fits; train.py does not take it, and what it takes does not fit")
    else:
        print("\n".join(reasons(best, found, limit, lambda p: trainable(p, options))))
        print(f"\n    {command(best, options)}")
        if not data_of(options):
            shape, classes = samples_of(options)
            print(f"\nadd --data, of samples of shape {shape} and {classes:,} classes")
    if options.draw:
        from parallel.planning.pictures import draw_bars

        title = f"{options.model}, {options.batch:,} samples a step on {options.ranks:,} ranks"
        draw_bars(shown, title, limit).savefig(options.draw)
        print(f"\npicture in {options.draw}")
    if options.json:
        told = {"model": options.model, "ranks": options.ranks, "batch": options.batch}
        told["best"] = best and command(best, options)
        told["predictions"] = [as_dict(row) for row in rows]
        Path(options.json).write_text(json.dumps(told, indent=1) + "\n")
    return 0 if fitting else 1


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
    words += [f"--{name} {chosen[name]}" for name in ("strategy", "pipeline", "mesh") if name in chosen]
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
