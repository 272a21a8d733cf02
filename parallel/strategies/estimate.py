"""What a training step costs on any number of ranks: seconds, idle share, bytes sent, memory, for every strategy.

    job = Job(count_layers(network, 64, flops=5e10, copy=1/15e9), samples=64, batch=1024)
    print(estimate(job, "ddp", Axes(data=256), NETWORKS["infiniband"]).seconds)

Psi bytes of parameters on N ranks, k moments, b = batch / N samples a rank (of the rank that has most), F and B
seconds of these forward and backward, U seconds of the optimizer. Each strategy declares its `cost`, in its own file;
costs of collectives are those of planning/group_costs.py.

| strategy | a step | Psi kept | Psi sent |
|---|---|---|---|
| ddp | F, B with buckets that leave as they fill, U; in a node's memory F, B, sum and U / N | 2 + k | 2 |
| zero1 | F, B, reduce-scatter, U / N, allgather | 2 + k/N | 2 |
| zero2 | the same, reduced in units while B goes on | 1 + (1 + k)/N | 2 |
| fsdp | a unit is gathered before its F and its B, one ahead where it travels, and reduced after | (2 + k)/N | 3 |
| dp | scatter, broadcast, F, gather, loss, scatter, B, reduce, U: the master's | 2 + k | 1 |
| ps | F, B, push and pull: N - s messages of Psi / s each way at each server; U / s | (N - s + 2 + k)/s | (N-s)/s |
| gpipe ... | stages in a schedule (pipeline/cost.py), then an allreduce of the largest stage | 2 + k of one | |
| local-sgd, diloco, easgd, downpour | local updates, synchronized now and then (local_sgd.py, downpour.py) | | |
| pipedream | stages and replicas of planning/partition.py, never flushed, by simulation | versions of a stage | |

On the axis "tensor" every layer takes a part of its seconds and of its bytes, and sums (LayerProfile). On "context" it
takes a part of its seconds and activations, and what of a ring, or of Ulysses' alltoalls, is not hidden
(planning/context_costs.py); its ranks sum gradients with those of "data". On "expert" ranks have other samples and
some of the experts: positions travel in alltoalls, and all other gradients are summed along it, too.
Activations are counted with what is kept, and a unit or two that are whole for a moment.

What is left out: that ranks differ and wait for the slowest, that cores of a node share memory and clock, loading data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd, inf

from collectives.pricing.networks import Network
from parallel.planning.job import Axes, Job, Prediction
from parallel.planning.parts import attention_of
from parallel.strategies import DECLARED
from parallel.strategies.pipeline.cost import MOST_PLANNED, pipedream, pipeline
from parallel.strategies.pipeline.timing import CHUNKS, TIMED

PRICED = {strategy.name: strategy for strategy in DECLARED if strategy.cost}
AS_ONE = [strategy for strategy in PRICED.values() if not strategy.supports.local_update]
SHARED = [strategy.name for strategy in AS_ONE if "tensor" in strategy.supports.axes]  # go with the axis "tensor"
ALONE = [strategy.name for strategy in AS_ONE if "tensor" not in strategy.supports.axes]
LOCAL_UPDATE = [name for name, strategy in PRICED.items() if strategy.supports.local_update]  # with keys: local-sgd:8
NAMES = (*SHARED, *TIMED, *ALONE, "pipedream", *LOCAL_UPDATE)
MOST_PARTS = 64  # of a layer, that are tried
REFINED = 4  # pipelines, of those that the closed form says are fastest
SEARCHED = ("1f1b", "interleaved", "zb-h1")  # schedules that are tried on every mesh


def estimate(
    job: Job,
    strategy: str,
    axes: Axes,
    network: Network,
    servers: int = 1,
    micro_batches: int | None = None,
    recompute: bool = False,
    quick: bool = False,
    cuts: Sequence[int] = (),
) -> Prediction:
    """What a step costs.

    Parameters
    ----------
    strategy : a name in NAMES, with its keys if it has some
    servers : of ps and downpour, on ranks of their own
    micro_batches, recompute, quick : of pipelines; None for four a stage (see time_pipeline)
    cuts : of pipelines, the layers with which the second stage and all after it begin; none: where they balance

    Raises
    ------
    ValueError
        an unknown strategy, a mesh that it cannot have, more stages than layers, cuts that make other stages
    """
    name = strategy.partition(":")[0]
    name = name if name in LOCAL_UPDATE else strategy
    if name not in NAMES:
        raise ValueError(f"unknown strategy {strategy!r}: expected one of {', '.join(NAMES)}")
    if axes.pipeline > 1 and name in LOCAL_UPDATE:
        raise ValueError(f"{strategy} is predicted with whole networks: leave pipeline={axes.pipeline} out")
    if axes.pipeline > 1 and strategy not in TIMED:
        raise ValueError(f"{strategy} has no stages: leave pipeline={axes.pipeline} out, or use {', '.join(TIMED)}")
    if axes.tensor > 1 and name in (*ALONE, "pipedream", *LOCAL_UPDATE):
        how = "is predicted with whole layers" if name in LOCAL_UPDATE else "does not cut layers"
        raise ValueError(f"{strategy} {how}: leave tensor={axes.tensor} out")
    if axes.context > 1:
        if name in (*ALONE, "pipedream", *LOCAL_UPDATE):
            raise ValueError(f"{strategy} does not cut sequences: leave context={axes.context} out")
        if axes.context > (most := most_positions(job)):
            raise ValueError(
                f"context={axes.context}: "
                + (f"sequences have {most} positions: use at most {most}" if most > 1 else "no layer has attention")
            )
    if axes.expert > 1 and name not in SHARED:
        raise ValueError(
            f"{strategy} is not predicted with experts dealt out: leave expert={axes.expert} out, or use "
            f"{', '.join(SHARED)}"
        )
    if axes.ranks == 1:
        return serial(job)
    if network.topology:
        network = network.of_ranks(axes.ranks)
    if strategy == "pipedream":
        return pipedream(job, axes, network, quick, cuts)
    if strategy in TIMED:
        found = pipeline(job, strategy, axes, network, micro_batches, recompute, quick, cuts)
    else:
        found = PRICED[name].cost(job, axes, network, strategy, servers)
    return replace(found, attention=attention_of(job, axes, network))


def serial(job: Job) -> Prediction:
    """One rank."""
    layers = job.of(job.batch)
    seconds = sum(layer.forward + layer.backward for layer in layers) + job.loss(job.batch)
    memory = (2 + job.moments) * job.parameters + sum(layer.saved for layer in layers)
    parts = {"computation": seconds, "update": job.update}
    return Prediction("serial", Axes(), parts, seconds + job.update, 0.0, memory)


def most_positions(job: Job) -> int:
    """Return how many ranks can share a sequence: at most one for each position; 1 where no layer has attention."""
    return max((layer.positions for layer in job.layers), default=1) or 1


def strong_and_weak(job: Job, prediction: Prediction, again: Callable[[Job], Prediction]) -> tuple[float, float]:
    """Efficiency of the same batch on all ranks, and of a batch for each; `again(job)` predicts another job's."""
    one, ranks = serial(job).seconds, prediction.ranks
    weak = again(replace(job, batch=job.batch * ranks)).seconds
    return one / (ranks * prediction.seconds), one / weak


def candidates(job: Job, ranks: int, most_parts: int = MOST_PARTS) -> Iterator[tuple[str, Axes]]:
    """Every strategy on every mesh of so many ranks that makes sense: (strategy, axes)."""
    if ranks == 1:
        yield "ddp", Axes()
        return
    yield from ((name, Axes(ranks)) for name in ALONE)
    if ranks <= MOST_PLANNED:
        yield "pipedream", Axes(ranks)
    experts = gcd(*(layer.expert_count for layer in job.layers))
    for axes in Axes.all(ranks, len(job.layers), most_parts, min(most_parts, most_positions(job)), experts):
        if axes.data * axes.expert > job.batch:
            continue
        if axes.pipeline == 1:
            yield from ((name, axes) for name in SHARED if axes.data * axes.context > 1 or name == "ddp")
            continue
        for name in SEARCHED:
            if axes.pipeline * CHUNKS.get(name, 1) <= len(job.layers):
                yield name, axes


def ranking(
    job: Job,
    ranks: int,
    network: Network,
    memory: float = inf,
    servers: int = 1,
    micro_batches: int | None = None,
    stale: bool = True,
    most_parts: int = MOST_PARTS,
) -> list[Prediction]:
    """Every candidate, the fastest that fits into `memory` bytes a rank first, those that do not fit last.

    Parameters
    ----------
    stale : whether strategies count whose weights are stale
    """
    fits = lambda p: p.memory <= memory
    found = []
    for name, axes in candidates(job, ranks, most_parts):
        if (name in PRICED and PRICED[name].serves and servers >= ranks) or (name == "pipedream" and not stale):
            continue
        each = estimate(job, name, axes, network, servers, micro_batches, quick=True)
        if name != "pipedream" or "-" in each.note:  # one stage on all ranks is data parallelism
            found.append(each)
    lines = sorted((p for p in found if p.axes.pipeline > 1 or p.replicas), key=lambda p: (not fits(p), p.seconds))
    for near in lines[:REFINED]:  # what may come first is simulated
        found[found.index(near)] = estimate(job, near.strategy, near.axes, network, servers, micro_batches)
    return sorted(found, key=lambda p: (not fits(p), p.seconds))
