"""Which layers make which stage, and which rank has it: a schedule applied to a network, or refused.

plan = place(network, ranks=2, schedule="1f1b", micro_batches=8)
plan.networks, plan.replicas             # every stage, and its rank or ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature

import numpy as np

from nn.core.layer import Sequential
from nn.core.network import Network
from nn.optim.clipping import ClipGlobalNorm
from nn.optim.optimizers import Optimizer
from parallel.state.splits import NetworkPart, sample_shape
from parallel.state.stages import stages
from parallel.strategies.pipeline.actions import Rows
from parallel.strategies.pipeline.checking import Report, check
from parallel.strategies.pipeline.schedules import SCHEDULES, check_counts, rows
from parallel.strategies.tensor.moves import Cut


@dataclass(frozen=True)
class Placement:
    """Stages on ranks.

    Attributes
    ----------
    rows : the schedule's, one a rank
    report : Report
        What it costs where all stages take alike long.
    networks : list of Network
        Every stage.
    cuts : list of int
        The numbers of the children with which the second stage begins, and all after it.
    replicas : list of list of int
        The ranks of every stage: one, but with pipedream.
    """

    rows: Rows
    report: Report
    networks: list[Network]
    cuts: list[int]
    replicas: list[list[int]]

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of every stage."""
        return [ranks[0] for ranks in self.replicas]

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank that has a micro-batch in a stage: replicas take turns."""
        ranks = self.replicas[stage]
        return ranks[micro_batch % len(ranks)]

    def part(self, index: int, count: int, cut: Mapping[int, Cut], tensors: int) -> Placement:
        """Return the placement of part `index` of `count` of every stage.

        Parameters
        ----------
        cut : how the input of a child of the root comes, by the child's number; that of the others is whole
        tensors : how many ranks it is cut for, again and again
        """
        found = []
        for network in self.networks:
            mine, how = NetworkPart(network, index, count), cut.get(network.root.first)
            if how:
                mine.sample_shape = how.part_of(network.in_shape, index % tensors, tensors)
            found.append(mine)
        return replace(self, networks=found)

    def shape(self, stage: int) -> tuple[int, ...]:
        """Return the shape of one sample of a stage's input; behind the last stage, of the outputs."""
        return sample_shape(self.networks[stage]) if stage < len(self.networks) else self.networks[-1].out_shape

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage, ranks in enumerate(self.replicas) if rank in ranks]

    def tied(self) -> dict[str, list[int]]:
        """Names of the arrays that layers of several stages share -> those stages, the owner first."""
        found: dict[str, list[int]] = {}
        for number, network in enumerate(self.networks):
            for name in network.layout.borrowed:
                owner = next(s for s, n in enumerate(self.networks) if name in n.layout.specs)
                found.setdefault(name, [owner]).append(number)
        return found


def place(
    network: Network,
    ranks: int,
    schedule: str | Callable | Rows = "1f1b",
    micro_batches: int = 8,
    cuts: Iterable[int] | None = None,
    **options,
) -> Placement:
    """Cut a network into the stages that a schedule has.

    Parameters
    ----------
    network : Network
        Its root is a Sequential.
    ranks : int
    schedule : str, generator function or rows
        As for `check`.
    micro_batches : int
    cuts : numbers of children with which the second stage and all after it begin, or None
        None: so that the largest number of multiply-accumulates a rank is as small as it can be.
    **options
        Of the schedule, such as chunks, or replicas of pipedream.

    Raises
    ------
    ValueError
        A schedule that cannot run, more stages than layers, a cut in a place where there can be none, a rank without
        a stage, a stage on several ranks (but with pipedream).
    """
    check_counts(ranks=ranks, micro_batches=micro_batches)
    never_flushed = schedule == "pipedream"
    if never_flushed:  # of what has no end a stretch in which all ranks have work
        micro_batches = max(micro_batches, 2 * ranks)
    if isinstance(schedule, str) or callable(schedule):
        schedule = generated(schedule, ranks, micro_batches, options)
    elif not isinstance(schedule, Sequence):
        raise ValueError(f"schedule: expected a name, a generator function, or rows of actions, given {schedule!r}")
    elif options:
        raise ValueError(f"a schedule that is written down has no options: leave out {', '.join(options)}")
    report = check(schedule, ranks, micro_batches)
    if not isinstance(network.root, Sequential):
        raise ValueError(f"{network.name}: only a Sequential can be cut into stages, the root is {network.root!r}")
    places = {(action.stage, span.rank) for row in report.spans for span in row for action in span.actions}
    replicas = [sorted(rank for stage, rank in places if stage == number) for number in range(report.stages)]
    if cuts is None:
        cuts = even_cuts(network, report.stages, [len(each) for each in replicas])
    cuts = list(cuts) if isinstance(cuts, Iterable) else [cuts]
    if not all(isinstance(k, int | np.integer) for k in cuts):
        raise ValueError(f"cuts: expected numbers of children of {network.name}'s root, given {cuts!r}")
    if len(cuts) + 1 != report.stages:
        raise ValueError(
            f"the schedule has {report.stages} stages, the network is cut into {len(cuts) + 1}: give "
            f"{report.stages - 1} places to cut, or none"
        )
    cuts = [int(k) for k in cuts]
    networks = stages(network, cuts)
    if len(networks) > 1:
        refuse_padding(networks[0])
    if len(places) > report.stages and not never_flushed:
        raise ValueError(
            "a stage lies on several ranks: their gradients would have to be summed, which pipedream:replicas=2/1 does"
        )
    for rank in set(range(ranks)) - {rank for _, rank in places}:
        raise ValueError(f"rank {rank} has no stage: the schedule's {report.stages} stages need fewer ranks")
    return Placement(schedule, report, networks, cuts, replicas)


def generated(schedule: str | Callable, ranks: int, micro_batches: int, options: dict) -> Rows:
    """The rows of a schedule; refuses options that one by its name does not have."""
    if schedule in SCHEDULES:
        known = list(signature(SCHEDULES[schedule]).parameters)[3:]  # behind rank, ranks, micro_batches
        if unknown := [name for name in options if name not in known]:
            raise ValueError(
                f"pipeline {schedule}: it has no {', '.join(unknown)}: leave that out; micro_batches= says how many "
                "micro-batches a batch has"
            )
    return rows(schedule, ranks, micro_batches, **options)


def refuse_padding(first: Network) -> None:
    """Padding is found in the first stage, and needed in later ones."""
    for path, layer, _, _ in first.layers():
        if getattr(layer, "padding", None) is not None and layer.ids:
            raise ValueError(
                f"layer {path} ({layer!r}) marks padding, which later stages are not told of: "
                "use --strategy ddp or tensor, or an Embedding without padding"
            )


def even_cuts(network: Network, count: int, ranks: Sequence[int] = ()) -> list[int]:
    """Where `count` stages begin, but the first, so that the most multiply-accumulates of a rank are fewest.

    Only where the network can be cut: not before layers that take ids, nor where training sees another shape. `ranks`
    are how many share each stage; one, where nothing is said.
    """
    ranks = ranks or [1] * count
    root = network.root
    macs = [layer.macs(shape) for layer, shape in zip(root.layers, root.child_shapes(network.in_shape), strict=True)]
    if count > len(macs):
        raise ValueError(
            f"{network.name} has {len(macs)} layers, too few for {count} stages: use at most {len(macs)}: fewer "
            "ranks, or fewer chunks"
        )
    legal = [k for k in range(1, len(macs)) if not refused(network, root.first + k)]
    if count > len(legal) + 1:
        raise ValueError(
            f"{network.name} can be cut in {len(legal)} places (before {', '.join(str(root.first + k) for k in legal)})"
            f", too few for {count} stages: use at most {len(legal) + 1}: fewer ranks, or fewer chunks"
        )
    sums = np.concatenate([[0], np.cumsum(macs)])
    ends = [*legal, len(macs)]
    best = {(end, 1): (sums[end] / ranks[0], []) for end in ends}  # of so many layers in so many stages
    for n in range(2, count + 1):
        for i, end in enumerate(ends):
            found = [(best[k, n - 1], k) for k in ends[:i] if (k, n - 1) in best]
            if found:
                best[end, n] = min(
                    (max(most, (sums[end] - sums[k]) / ranks[n - 1]), [*at, k]) for (most, at), k in found
                )
    return [root.first + k for k in best[len(macs), count][1]]


def refused(network: Network, at: int) -> bool:
    """Whether there can be no cut before a child."""
    try:
        stages(network, [at])
    except ValueError:
        return True
    return False


def refuse_ties(placement: Placement) -> None:
    """Refuse arrays that stages share, where each stage rounds its gradients by a scale of its own."""
    if tied := placement.tied():
        raise ValueError(
            f"{', '.join(tied)}: stages share it, and would round its gradient each in its own way: do not compress, "
            "or cut the network where all its layers are in one stage"
        )


def check_stage_updates(placement: Placement, optimizer: Optimizer) -> None:
    """Refuse what needs all stages at one time, where each updates at its own (PipeDream)."""
    if tied := placement.tied():
        raise ValueError(
            f"{', '.join(tied)}: stages share it, and would update it at different times: cut the network where all "
            "its layers are in one stage"
        )
    if isinstance(optimizer.clip, ClipGlobalNorm):
        raise ValueError("the norm of the whole gradient is never known: clip by value, or each tensor's norm")
    synchronized = any(layer.synchronized for network in placement.networks for _, layer, _, _ in network.layers())
    if synchronized and max(map(len, placement.replicas)) > 1:
        raise ValueError("statistics over all ranks need all at one step, and each replica has another batch")
    if placement.networks[0].mixed:
        raise ValueError("an update that overflows float16 cannot be skipped by all stages: use float32 or float64")
