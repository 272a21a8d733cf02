#!/usr/bin/env python3
"""Predict a training step on any number of ranks: seconds, efficiency, idle share, bytes, memory, hours and cost.

python scripts/predict.py vgg16 --ranks 1..65536 --network gpu-25g --flops 10T --batch 1024
python scripts/predict.py resnet50 --strategy ddp --ranks 1..1024 --network infiniband --draw scaling.png
python scripts/predict.py transformer:1024,16,24 --input 512 --strategy 1f1b --mesh pipeline=8,tensor=4 --ranks 64..4096
python scripts/predict.py vgg16 --ranks 1..65536 --network gigabit --map map.svg     which wins at which scale

Without --strategy: of one number of ranks every strategy, of several the fastest of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from entry_point import run
from planning import (
    MOMENTS,
    add_job_options,
    amount,
    in_node_memory,
    model_of,
    network_of,
    node_size,
    picture,
    positive,
    ranks,
)

SHOWN = 16  # strategies of a table
MESHES = ("tensor", "hybrid")  # ddp with all layers cut as far as the ranks go; the fastest mesh of several axes


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="predict.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--strategy",
        default="all",
        help="ddp, zero1 ... zero3, dp, ps, gpipe ..., tensor, hybrid, local-sgd:8, easgd, diloco, downpour, or all",
    )
    found.add_argument("--mesh", help="sizes of axes: pipeline=4,tensor=2; what is left of the ranks is data")
    found.add_argument("--ranks", type=ranks, help="64, or 1,2,4, or 1..65536 (default: 1..8, of a mesh)")
    add_job_options(found, "workstation")
    found.add_argument(
        "--flops", type=amount, default=5e10, help="operations a second that a rank keeps up (default: 50G)"
    )
    found.add_argument("--recompute", action="store_true", help="pipelines keep a stage's input only")
    found.add_argument("--samples", type=amount, metavar="N", help="of a whole run, such as 115M: how long it takes")
    found.add_argument("--price", type=positive, help="of a rank for an hour: what the run costs")
    found.add_argument(
        "--draw", type=picture, metavar="FILE", help="picture of seconds and efficiency over ranks (png, svg, pdf)"
    )
    found.add_argument(
        "--map", type=picture, metavar="FILE", help="picture of which strategy is fastest with how many samples a step"
    )
    found.add_argument("--json", metavar="FILE", help="write all predictions there")
    return found


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.price and not options.samples:
        parser().error("--price needs --samples: of how long a run")
    try:
        return predict_all(options)
    except (ValueError, OSError) as error:
        parser().exit(2, f"predict.py: error: {error}\n")


def job_of(options, network):
    """What is trained, from its counts or from --profile."""
    from parallel.planning.job import Job
    from parallel.planning.layer_times import sample_bytes
    from parallel.planning.profile import count_layers, read_profile

    model = model_of(options)
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
        not options.no_overlap,
    )


def predict_all(options) -> int:
    """Predict, print, draw."""
    from parallel.planning.job import Axes
    from parallel.planning.tables import Run, as_dict, nbytes, seconds, table
    from parallel.strategies.estimate import NAMES, estimate
    from parallel.strategies.pipeline.timing import TIMED

    network = network_of(options)
    mesh = Axes.parse(options.mesh) if options.mesh else Axes()
    options.ranks = options.ranks or [mesh.ranks * times for times in ((1, 2, 4, 8) if mesh.data == 1 else (1,))]
    job, limit = job_of(options, network), options.memory or float("inf")
    options.strategy = {"zero3": "fsdp"}.get(options.strategy, options.strategy)
    if options.strategy.partition(":")[0] not in (known := ("all", *NAMES, *MESHES)):
        raise ValueError(f"--strategy {options.strategy}: expected one of {', '.join(known)}")
    if options.mesh and options.strategy in ("all", *MESHES):
        raise ValueError(f"--mesh {options.mesh} is for one --strategy other than {options.strategy}: name it")
    if options.recompute and options.strategy not in (*TIMED, "hybrid"):
        raise ValueError(f"--recompute is of pipelines: name one with --strategy, such as 1f1b, not {options.strategy}")
    title = f"{options.model} on {options.network}"
    one = seconds(estimate(job, "ddp", Axes(), network).seconds)
    print(f"{title}: {nbytes(job.parameters)} of parameters, {options.batch:,} samples a step, one rank {one}")
    print(f"network: {node_size(network, max(options.ranks))}; {network.source}\n")
    curves = of_one(options, job, network) if options.strategy != "all" else of_all(options, job, network, limit)
    found = next(iter(curves.values()))
    print(table(found, options.batch, Run(options.samples or 0.0, options.price or 0.0), limit))
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
        told = {"model": options.model, "network": options.network, "batch": options.batch}
        told["predictions"] = [as_dict(each) for each in found]
        Path(options.json).write_text(json.dumps(told, indent=1) + "\n")
    return 0


def of_one(options, job, network) -> dict:
    """One strategy on every number of ranks."""
    from parallel.planning.job import Axes
    from parallel.planning.tables import Scaled
    from parallel.strategies.estimate import MOST_PARTS, estimate, ranking, strong_and_weak
    from parallel.strategies.pipeline.timing import CHUNKS, TIMED

    fixed = Axes.parse(options.mesh) if options.mesh else Axes()
    found = []
    for count in options.ranks:
        pipeline = fixed.pipeline
        if options.strategy in TIMED and pipeline == 1:  # as many stages as there can be
            most = min(count // fixed.tensor, len(job.layers) // CHUNKS.get(options.strategy, 1))
            pipeline = max((n for n in range(1, most + 1) if count // fixed.tensor % n == 0), default=1)
        if count % (pipeline * fixed.tensor) or (fixed.data > 1 and count != fixed.ranks):
            raise ValueError(f"--mesh {options.mesh} does not multiply to {count} ranks: change --ranks or --mesh")
        axes, strategy = Axes(count // (pipeline * fixed.tensor), pipeline, fixed.tensor), options.strategy
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
    """The fastest of every number of ranks; of a single one all strategies, each on its best mesh."""
    from parallel.planning.tables import Scaled
    from parallel.strategies.estimate import estimate, ranking, strong_and_weak

    def ranked(job, count):
        return ranking(job, count, network, limit, options.servers, options.micro)

    def scaled(p, again=None):
        same = lambda job: estimate(job, p.strategy, p.axes, network, options.servers, options.micro)
        return Scaled(p, *strong_and_weak(job, p, (again or same) if p.ranks > 1 else lambda job: p))

    every = {count: ranked(job, count) for count in options.ranks}
    if len(every) == 1:
        (each,) = every.values()
        best = list({p.strategy: p for p in reversed(each)}.values())
        return {"all": [scaled(p) for i, p in enumerate(each) if i < SHOWN or p in best]}
    curves = {
        "the fastest": [
            scaled(each[0], lambda job, count=count: ranked(job, count)[0]) for count, each in every.items()
        ]
    }
    for name in ("ddp", "zero1", "fsdp", "ps", "dp") if options.draw else ():
        of = (p for each in every.values() for p in each)
        curves[name] = [scaled(p) for p in of if p.strategy in (name, "serial") and p.axes[1:] == (1, 1)]
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


if __name__ == "__main__":
    sys.exit(run(main))
