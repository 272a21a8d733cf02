"""--strategy auto: the planner chooses. The run is measured on the ranks that will train, and priced.

Every rank measures the layers at the same time, with samples of the data; all of them the network. Rank 0 prices every
strategy and mesh (strategies/estimate.py) and takes the fastest that computes what one process computes, fits into
--memory-limit, and that no other option forbids. With auto:stale=1 it may also be a pipeline that is never flushed, on
the stages and replicas that PipeDream's programme finds: its weights are stale. From then on the
options are those of a run that was started with them: config.json has them, and --resume continues with them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np

import nn
from collectives.pricing.networks import Network
from parallel.command import rules
from parallel.command.factory import Parts
from parallel.command.options import Options
from parallel.command.sizes import read_bytes
from parallel.planning.choice import best_of_each, options_of, reasons
from parallel.planning.job import Job, Prediction
from parallel.planning.layer_times import Times, job_of, measure_layers
from parallel.planning.profile import count_layers
from parallel.planning.tables import Scaled, nbytes, table
from parallel.settings import OptionError
from parallel.strategies.auto import AutoKeys
from parallel.strategies.estimate import ranking, serial, strong_and_weak

LENGTHS = tuple(4**k for k in (2, 4, 6, 8, 10, 11))  # of messages
SECONDS = 0.004  # for each thing that is measured
REPEATS = 3  # steps that are measured
SHOWN = 3  # predictions, and the fastest of each strategy


def chosen(options: Options, parts: Parts, world, say: Callable[[str], None]) -> Options:
    """Return the options with what the plan chooses in the place of --strategy auto (collective).

    Raises
    ------
    OptionError
        On all ranks: nothing fits, or other options forbid what does.
    """
    from collectives.pricing import measure  # which needs MPI, and what is below does not

    if world.size == 1:
        return dataclasses.replace(options, strategy="ddp")
    network = measure.measure_network(world, LENGTHS, SECONDS)
    job = measured_job(options, parts, world, network, say)
    choice = choose(options, parts, job, network, world.size) if world.rank == 0 else None
    choice, lines = world.bcast(choice)
    for line in lines:
        say(line)
    if not choice:
        raise OptionError(f"--strategy auto: {lines[-1]}")
    return dataclasses.replace(options, **choice)


def measured_job(options: Options, parts: Parts, world, network: Network, say) -> Job:
    """A step of the run: what layers take on average of the ranks, which measure them at once (collective).

    What does not fit into a rank's memory is counted instead, at the speed of matrix products.
    """
    samples = max(1, options.batch // world.size)
    x, y = parts.data.train.batch(slice(0, samples))
    samples, moments = len(x), len(parts.optimizer.slots)
    flops = world.allreduce(products_a_second()) / world.size
    counted = Times(count_layers(parts.network, samples, flops, network.copy), 0.0, 0.0)
    job = job_of(parts.network, counted, samples, options.batch, moments)
    whole = serial(dataclasses.replace(job, batch=samples)).memory
    if whole > limit_of(options):
        say(f"layers are counted, not measured: on one rank they would take {nbytes(whole)}")
        update = (3 + 2 * moments) / 2 * network.copy * job.parameters  # read and written
        return dataclasses.replace(job, update=update)
    plain = nn.Network(parts.network.root, parts.network.in_shape, parts.network.dtype, parts.network.name)
    world.Barrier()
    mine = measure_layers(nn.Trainer(plain, parts.loss, parts.optimizer, options.seed), x, y, REPEATS)
    figures = np.array([[layer.forward, layer.backward, layer.weight_gradient] for layer in mine.layers])
    mean = np.mean(world.allgather(figures), axis=0)
    update, head = np.mean(world.allgather((mine.update, mine.head)), axis=0)
    layers = [
        layer.measured(forward, backward, weights)
        for layer, (forward, backward, weights) in zip(counted.layers, mean.tolist(), strict=True)
    ]
    return job_of(parts.network, Times(layers, float(update), float(head)), samples, options.batch, moments)


def choose(
    options: Options, parts: Parts, job: Job, network: Network, ranks: int
) -> tuple[dict[str, str] | None, list[str]]:
    """Return the options of the run, None where there are none, and lines for the log; the last one says why not."""
    limit = limit_of(options)
    stale = AutoKeys.parse(options.strategy).stale
    rank_all = lambda job: ranking(job, ranks, network, limit, options.servers, stale=stale)
    predictions = rank_all(job)
    refusals: dict[int, str] = {}

    def usable(prediction: Prediction) -> bool:
        try:
            values = {"memory_limit": None} | with_defaults(options_of(prediction, parts.network))
            check(dataclasses.replace(options, **values), ranks, parts)
        except ValueError as error:  # also an OptionError
            refusals[id(prediction)] = str(error)
        return id(prediction) not in refusals

    fitting = [p for p in predictions if p.memory <= limit]
    shown = [
        Scaled(p, *strong_and_weak(job, p, lambda job: rank_all(job)[0])) for p in best_of_each(predictions, SHOWN)
    ]
    lines = [f"the plan for {ranks} ranks, {job.samples:,} samples each:", table(shown, options.batch, memory=limit)]
    if not fitting:
        least = nbytes(min(p.memory for p in predictions))
        return None, [*lines, f"nothing fits into {nbytes(limit)} a rank: the least is {least}"]
    best = next(filter(usable, fitting), None)
    if not best:
        return None, [*lines, f"of what fits nothing can be: {fitting[0].name}: {refusals[id(fitting[0])]}"]
    return with_defaults(options_of(best, parts.network)), [*lines, *reasons(best, predictions, limit, usable)]


def with_defaults(chosen: dict[str, str]) -> dict[str, str]:
    """Return the choice, with the defaults of what it leaves open."""
    return {"strategy": "ddp", "mesh": None, "pipeline": None} | chosen


def check(options: Options, ranks: int, parts: Parts) -> None:
    """Check options as if the user had given them."""
    rules.check(options)
    rules.check_strategy(options, ranks, parts.network, parts.optimizer)


def limit_of(options: Options) -> float:
    """Bytes that a rank may keep."""
    return read_bytes(options.memory_limit) if options.memory_limit else math.inf


def products_a_second(size: int = 256) -> float:
    """Operations a second in products of matrices."""
    a = np.ones((size, size), np.float32)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)
