"""Strategies that cut a network into stages: what a step of every schedule with a flush costs, and of PipeDream.

strategies/estimate.py has the formulas in a table, timing.py the seconds of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from collectives.pricing.networks import Network
from parallel.planning.job import Axes, Job, Prediction
from parallel.planning.partition import Partition, PlannedStage, partition
from parallel.planning.parts import part_of
from parallel.planning.profile import LayerProfile
from parallel.strategies.pipeline.timing import (
    CHUNKS,
    cut_evenly,
    ranks_of_stages,
    stage_costs,
    time_pipeline,
    time_stream,
)

MOST_PLANNED = 64  # workers of a level of the dynamic programme, which takes the square of them
GROUP = 16  # workers, or groups of them, that form a level where there are more
MOST_SIMULATED = 16  # ranks whose stream is simulated
MICRO = 4  # micro-batches a stage, where nothing else is said


def pipeline(
    job: Job,
    schedule: str,
    axes: Axes,
    network: Network,
    micro_batches: int | None = None,
    recompute: bool = False,
    quick: bool = False,
    cuts: Sequence[int] = (),
) -> Prediction:
    """Stages in a schedule with a flush; replicas of the pipeline sum their gradients at the end of the step.

    What belongs to no layer, the loss, comes before the last stage's backward passes.
    """
    mine = part_of(job, axes, network, waiting=True)
    m = max(1, min(mine.samples, micro_batches or MICRO * axes.pipeline))
    layers = [layer.of_samples(1 / m) for layer in mine.layers]
    count = axes.pipeline * CHUNKS.get(schedule, 1)
    at = given(cuts, count, layers) if cuts else cut_evenly([layer.forward + layer.backward for layer in layers], count)
    loss = job.loss(mine.samples)
    stages = stage_costs(layers, at, job.sample_bytes * mine.samples / m)
    stages[-1] = stages[-1]._replace(input_gradient=stages[-1].input_gradient + loss / m)
    own = network  # of the whole mesh, on a topology: its pipelines share channels
    if not network.topology:
        own = network.with_ranks_per_node(max(1, network.ranks_per_node // (axes.tensor * axes.context)))
    timed = time_pipeline(schedule, stages, m, own, recompute, quick, axes.tensor * axes.context)
    weights = [0.0] * axes.pipeline
    for stage, rank in zip(stages, ranks_of_stages(schedule, len(stages)), strict=True):
        weights[rank] += stage.parameters
    group, largest = axes.group("data", job.node_memory), max(weights)
    share = job.update / job.parameters if job.parameters else 0.0  # seconds a byte
    update = share * largest
    parts = {
        "pipeline": timed.seconds,
        "update": update,
        "gradients": group.allreduce(largest, network),
    }
    again = sum(layer.forward for layer in mine.layers) * recompute
    one = mine.computation + again - mine.sums + loss  # of a part of every stage of a replica
    memory = max((2 + job.moments) * w + peak for w, peak in zip(weights, timed.peaks, strict=True))
    sent = max(timed.sent) / axes.tensor + 2 * group.sent(largest) + mine.sent / axes.pipeline
    name, note = f"{schedule}{':recompute' * recompute}", f"{m} micro-batch{'es' * (m > 1)}, by {timed.method}"
    computing = mine.workers * one + axes.data * axes.tensor * axes.context * share * sum(weights)
    return Prediction(name, axes, parts, computing, sent, memory, note, m, tuple(at[1:-1]))


def given(cuts: Sequence[int], count: int, layers: Sequence[LayerProfile]) -> list[int]:
    """Where so many stages begin, and the last one ends.

    Raises
    ------
    ValueError
        cuts that do not make `count` stages of these layers
    """
    at = [0, *cuts, len(layers)]
    if len(at) != count + 1 or any(a >= b for a, b in pairwise(at)):
        raise ValueError(f"cuts: expected {count - 1} that rise, of 1 to {len(layers) - 1}, given {list(cuts)}")
    return at


def pipedream(job: Job, axes: Axes, network: Network, quick: bool = False, cuts: Sequence[int] = ()) -> Prediction:
    """Stages and replicas by the dynamic programme, never flushed: a rank's samples are a mini-batch of their own.

    `quick`: by the programme's own formula, in which messages and computation hide behind each other; otherwise by
    simulation of the schedule that is run. With `cuts`, a rank for each stage between them.
    """
    ranks = axes.ranks
    layers = job.of(job.share(ranks))
    plan = straight(layers, given(cuts, ranks, layers)) if cuts else plan_stages(job, ranks, network)
    batches = -(-job.batch // job.share(ranks))

    def weights(stage: PlannedStage) -> float:
        return sum(layer.parameters for layer in layers[stage.first : stage.last + 1])

    share = job.update / job.parameters if job.parameters else 0.0  # seconds a byte, and a copy is kept
    extra = [share * weights(s) + network.copying(weights(s)) * (s.versions > 1) for s in plan.stages]
    extra[-1] += (loss := job.loss(job.share(ranks)))
    if quick or len(plan.stages) == 1 or ranks > MOST_SIMULATED:
        each = [sum(layer.forward + layer.backward for layer in layers[s.first : s.last + 1]) for s in plan.stages]
        longest = max(  # replicas that a step has no mini-batch for do not help
            max(1.0, batches / s.replicas) * (t + more) for s, t, more in zip(plan.stages, each, extra, strict=True)
        )
        parts = {"slowest stage or link": max(plan.seconds * batches, longest)}
    else:
        at = [*(stage.first for stage in plan.stages), len(layers)]
        stages = stage_costs(layers, at, job.sample_bytes * job.share(ranks))
        parts = {"pipeline": batches * time_stream(stages, extra, plan.replicas, network)}
    memory = max(stage.bytes + (1 + job.moments) * weights(stage) for stage in plan.stages)
    sent = max(
        batches / s.replicas * (2 * weights(s) * (s.replicas - 1) / s.replicas + edges(layers, s)) for s in plan.stages
    )
    computing = batches * (sum(layer.forward + layer.backward for layer in layers) + loss + job.update)
    note = f"stages on {'-'.join(map(str, plan.replicas))}; weights are stale"
    cuts = tuple(stage.first for stage in plan.stages[1:])
    return Prediction("pipedream", axes, parts, computing, sent, memory, note, batches, cuts, plan.replicas)


def plan_stages(job: Job, ranks: int, network: Network, memory: float = float("inf")) -> Partition:
    """The dynamic programme for a rank's share of the batch, on the two levels of a network where ranks fill nodes.

    More than MOST_PLANNED ranks or nodes are planned in groups, and groups of groups: not every plan is tried then.

    Raises
    ------
    ValueError
        so many ranks do not fall into groups
    """
    layers, g = job.of(job.share(ranks)), min(ranks, network.ranks_per_node)
    inside, between = (1 / max(link.beta, 1e-30) for link in (network.inside, network.between))
    if network.topology and network.topology.kind == "nodes":
        given = network.topology.options
        g, inside, between = min(ranks, given["ranks"]), given["inside_bandwidth"], given["bandwidth"]
    if ranks > g > 1 and ranks % g == 0:
        sizes = levels(g), levels(ranks // g)
        speeds = [inside] * len(sizes[0]) + [between] * len(sizes[1])
        return partition(layers, sizes[0] + sizes[1], speeds, memory)
    sizes = levels(ranks)
    return partition(layers, sizes, [between if ranks > g else inside] * len(sizes), memory)


def levels(units: int) -> list[int]:
    """So many units as a product, innermost first, of numbers that the dynamic programme takes."""
    sizes, left = [], units
    while left > MOST_PLANNED:
        group = next(n for n in range(GROUP, 0, -1) if left % n == 0)
        if group == 1:
            raise ValueError(
                f"pipedream: {units:,} workers do not fall into groups of 2 to {GROUP} to be planned in: "
                f"take another number, such as {units - units % GROUP:,}"
            )
        sizes.append(group)
        left //= group
    return [*sizes, left]


def straight(layers: Sequence[LayerProfile], at: Sequence[int]) -> Partition:
    """The plan whose stages begin and end there, on a rank each."""
    stages = []
    for i, (a, b) in enumerate(pairwise(at)):
        versions = len(at) - 1 - i
        kept = sum(layer.parameters + layer.output for layer in layers[a:b]) + (layers[a - 1].output if a else 0.0)
        stages.append(PlannedStage(a, b - 1, 1, versions, versions * kept))
    seconds = [sum(layer.forward + layer.backward for layer in layers[a:b]) for a, b in pairwise(at)]
    return Partition(tuple(stages), max(seconds), sum(seconds) / len(seconds))


def edges(layers: Sequence[LayerProfile], stage: PlannedStage) -> float:
    """Bytes that a mini-batch sends out of a stage: its output forward, the gradient of its input backward."""
    after = layers[stage.last].output if stage.last + 1 < len(layers) else 0.0
    return after + (layers[stage.first - 1].output if stage.first else 0.0)
