"""How long a pipeline of given stages takes, and what its ranks hold: the clock on the lowered schedule.

    timed = time_pipeline("1f1b", stages, micro_batches=32, network=NETWORKS["infiniband"])

| actions | method |
|---|---|
| up to 1,000 | the schedule lowered to rounds with messages, simulated |
| up to 40,000 | the schedule walked, every message as long as the slowest stage's |
| beyond, or where it has to be quick | closed form: what the slowest rank computes, and the idle time of schedules.py |

tests/parallel/test_predict_pipelines.py shows that they are equal where stages are, and messages take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from collectives.pricing.networks import Network
from collectives.pricing.price import price
from parallel.planning.profile import LayerProfile
from parallel.planning.topology_costs import all_pipelines, hop_seconds
from parallel.strategies.pipeline.actions import Rows, parts
from parallel.strategies.pipeline.checking import walk
from parallel.strategies.pipeline.lowering import Stage, lower
from parallel.strategies.pipeline.schedules import rows

CLOCKED, WALKED = 1_000, 40_000  # actions
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipev": 2}  # stages of a rank
TIMED = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev")  # a step at a time
LEAST = 1e-12  # seconds: of what others wait for the walk needs more than none


class StageCost(NamedTuple):
    """A stage, for one micro-batch: seconds, bytes that reach it, that it keeps until backward, and of parameters."""

    forward: float
    input_gradient: float
    weight_gradient: float
    input: float
    saved: float
    parameters: float

    @classmethod
    def of(cls, layers: Sequence[LayerProfile], before: float) -> StageCost:
        """Return the cost of layers whose input has `before` bytes."""
        weights = sum(layer.weight_gradient for layer in layers)
        return cls(
            sum(layer.forward for layer in layers),
            sum(layer.backward for layer in layers) - weights,
            weights,
            before,
            before + sum(layer.saved for layer in layers),
            sum(layer.parameters for layer in layers),
        )


class Timed(NamedTuple):
    """Seconds of a step; of each rank, bytes of activations at its peak, and sent; how it was found."""

    seconds: float
    peaks: tuple[float, ...]
    sent: tuple[float, ...]
    method: str


def cut_evenly(seconds: Sequence[float], count: int) -> list[int]:
    """Where `count` stages begin and the last one ends, so that the longest takes least; none is empty."""
    n = len(seconds)
    if not 1 <= count <= n:
        raise ValueError(f"{n} layers cannot be cut into {count} stages: use 1 to {n}")
    low, high = max(seconds), sum(seconds)

    def ends(limit):
        found, total = [0], 0.0
        for i, each in enumerate(seconds):
            if total + each > limit and total:
                found.append(i)
                total = 0.0
            total += each
        return [*found, n]

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(ends(middle)) <= count + 1 else (middle, high)
    found = ends(high)
    while len(found) <= count:  # fewer are enough: cut the longest that has several layers
        a, b = max((s for s in pairwise(found) if s[1] - s[0] > 1), key=lambda s: sum(seconds[s[0] : s[1]]))
        inner = min(range(a + 1, b), key=lambda k: max(sum(seconds[a:k]), sum(seconds[k:b])))
        found = sorted([*found, inner])
    return found


def stage_costs(layers: Sequence[LayerProfile], at: Sequence[int], input_bytes: float) -> list[StageCost]:
    """The layers as stages that begin and end there."""
    before = [input_bytes, *(layer.output for layer in layers)]
    return [StageCost.of(layers[a:b], before[a]) for a, b in pairwise(at)]


def time_pipeline(
    schedule: str,
    stages: Sequence[StageCost],
    micro_batches: int,
    network: Network,
    recompute: bool = False,
    quick: bool = False,
    tensor: int = 1,
) -> Timed:
    """Seconds of a step, flushed at its end.

    Parameters
    ----------
    schedule : one of TIMED
    stages : as many as the ranks, times the schedule's chunks
    network : whose ranks are the pipeline's: neighbours share a node where it says so
    recompute : a stage keeps its input only, and computes forward again
    quick : by the closed form, however few actions there are
    tensor : on a topology, whose ranks are all of the mesh: ranks of a stage, that send a part of a message each
    """
    limits = CLOCKED, 0 if quick else WALKED
    return _timed(schedule, tuple(stages), micro_batches, network, recompute, tensor, *limits)


@lru_cache(4096)
def _timed(schedule, stages, micro_batches, network, recompute, tensor, clocked, walked) -> Timed:
    if schedule not in TIMED:
        raise ValueError(f"schedule {schedule!r}: expected one of {', '.join(TIMED)}")
    chunks = CHUNKS.get(schedule, 1)
    if len(stages) % chunks or micro_batches < 1:
        raise ValueError(f"{schedule}: expected {chunks} stages a rank and micro-batches, given {len(stages)} stages")
    ranks, actions = len(stages) // chunks, len(stages) * micro_batches * 2
    home = ranks_of_stages(schedule, len(stages))
    hop = max((_hop(network, ranks, stage.input, tensor) for stage in stages[1:]), default=0.0)
    sent = _sent(stages, home, micro_batches)
    if actions > walked:
        seconds = closed_form(schedule, stages, micro_batches, recompute) + 2 * (len(stages) - 1) * hop
        seconds = max(seconds, micro_batches * hop)  # of what one link carries each way
        return Timed(seconds, _held(schedule, stages, micro_batches, home, recompute, None), sent, "closed form")
    order = rows(schedule, ranks, micro_batches, **({"chunks": chunks} if schedule == "interleaved" else {}))
    peaks = _held(schedule, stages, micro_batches, home, recompute, order)
    costs = []
    for stage in stages:
        seconds = max(stage.forward, LEAST), max(stage.input_gradient, LEAST), stage.weight_gradient
        costs.append(Stage(*seconds, max(1, round(stage.input)), 1, 1, recompute))  # no message is left out
    if actions <= clocked and ranks > 1:
        program = lower(order, costs, hop, as_run=True)
        rounds, size = lambda rank, size, count: iter(program[rank]), ranks
        if network.topology:
            rounds, size = all_pipelines(program, tensor), len(network.placement)
        priced = price(rounds, size, 1, 1, _posted(network))
        return Timed(priced.seconds, peaks, sent, "simulation")
    spans = walk(order, lambda action: costs[action.stage].seconds(action.kind), hop)
    return Timed(max(micro_batches * hop, *(row[-1].end for row in spans)), peaks, sent, "walk")


def time_stream(
    stages: Sequence[StageCost], extra: Sequence[float], replicas: Sequence[int], network: Network
) -> float:
    """Seconds a mini-batch of pipedream, once it is full: by simulation, from what more mini-batches take.

    Parameters
    ----------
    extra : seconds of each stage behind a backward pass: its update
    replicas : ranks of each stage, one behind the other; they sum their gradients in a ring
    """
    ranks, costs = sum(replicas), []
    for stage, more in zip(stages, extra, strict=True):
        seconds = max(stage.forward, LEAST), max(stage.input_gradient, LEAST), stage.weight_gradient + more
        costs.append(Stage(*seconds, max(1, round(stage.input)), 1, 1, gradients=round(stage.parameters)))
    unit = lcm(*replicas) * -(-2 * ranks // lcm(*replicas))  # whole rounds

    def taken(micro_batches):
        order = rows("pipedream", ranks, micro_batches, replicas=replicas)
        program = lower(order, costs, max(_hop(network, ranks, stage.input) for stage in stages), as_run=True)
        return price(lambda rank, *_: iter(program[rank]), ranks, 1, 1, _posted(network)).seconds

    return (taken(3 * unit) - taken(unit)) / (2 * unit)


def closed_form(schedule: str, stages: Sequence[StageCost], micro_batches: int, recompute: bool = False) -> float:
    """Seconds where messages take none: of the slowest rank's work, and of what it waits for if all are as the mean.

    Exact for equal stages and full pipelines (zb-v and dualpipev: F = I = W too).
    """
    n, home = len(stages), ranks_of_stages(schedule, len(stages))
    p, m = 1 + max(home), micro_batches
    each = [sum(stage[:3]) + stage.forward * recompute for stage in stages]
    slowest = max(sum(t for t, at in zip(each, home, strict=True) if at == rank) for rank in range(p))
    F, I, W = (sum(stage[i] for stage in stages) / p for i in range(3))
    I += F * recompute
    B = I + W
    idle = {
        "naive": m * (p - 1) * (F + B),
        "gpipe": (p - 1) * (F + B),
        "1f1b": (p - 1) * (F + B),
        "interleaved": (p - 1) * (F + B) * p / n,
        "zb-h1": (p - 1) * (F + I - W),
        "zb-h2": (p - 1) * (F + I - W),
        "zb-v": (p - 1) * F * p / n,
        "dualpipev": (p - 1) * F,
    }
    return m * slowest + max(0.0, idle[schedule])


def closed_peak(schedule: str, rank: int, ranks: int, micro_batches: int) -> float:
    """Micro-batches that a rank holds at its peak: exact for equal stages and full pipelines (schedules.py)."""
    p, m, v = ranks, micro_batches, CHUNKS.get(schedule, 1)
    most = {
        "naive": 1,
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": (2 * (p - rank - 1) + (v - 1) * p + 1) / v,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": p,
        "dualpipev": p + 1 / 2,
    }
    return min(m, most[schedule])


def ranks_of_stages(schedule: str, stages: int) -> list[int]:
    """The rank of every stage."""
    if schedule in ("zb-v", "dualpipev"):
        return [min(s, stages - 1 - s) for s in range(stages)]
    return [s % (stages // CHUNKS.get(schedule, 1)) for s in range(stages)]


def _posted(network: Network) -> Network:
    """The network where receives are posted long before their messages: no send waits for its receive."""
    links = {name: replace(getattr(network, name), eager=None) for name in ("inside", "between")}
    return replace(network, **links)


def _hop(network: Network, ranks: int, nbytes: float, tensor: int = 1) -> float:
    if network.topology and ranks > 1 and len(network.placement) % (ranks * tensor) == 0:
        return hop_seconds(ranks, tensor, nbytes, network)
    link = network.inside if network.ranks_per_node >= ranks else network.between
    return link.cost(nbytes).seconds


def _held(schedule, stages, micro_batches, home: list[int], recompute, order: Rows | None) -> tuple[float, ...]:
    """Bytes of activations that each rank holds at its peak; where no order is given, by `closed_peak`."""
    ranks, kept = 1 + max(home), [stage.input if recompute else stage.saved for stage in stages]
    found = []
    for rank in range(ranks):
        mine = [s for s in range(len(stages)) if home[s] == rank]
        now = most = 0.0
        if order is None:
            most = sum(kept[s] for s in mine) * closed_peak(schedule, rank, ranks, micro_batches)
        else:
            for action in (action for cell in order[rank] for action in parts(cell)):
                now += kept[action.stage] * ((action.kind == "F") - (action.kind in "BW"))
                most = max(most, now)
        found.append(most + recompute * max(stages[s].saved for s in mine))
    return tuple(found)


def _sent(stages, home: list[int], micro_batches: int) -> tuple[float, ...]:
    """Bytes that each rank sends: outputs forward, gradients backward."""
    total = [0.0] * (1 + max(home))
    for s in range(1, len(stages)):
        if home[s] != home[s - 1]:
            total[home[s - 1]] += stages[s].input * micro_batches
            total[home[s]] += stages[s].input * micro_batches
    return tuple(total)
