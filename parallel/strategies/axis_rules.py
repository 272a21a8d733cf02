"""What cannot be combined with the axes of --mesh, and with --pipeline: before ranks start where it can be known then.

`check_options` asks options alone, `check` a network on a number of ranks. Each raises OptionError: which option, what
is wrong, what to do.
"""

from __future__ import annotations

import math
from functools import partial

from parallel.axis import DIVIDE_NETWORK, SHARE_BATCH, conflict
from parallel.settings import OptionError, changed, flag
from parallel.strategies import STRATEGIES, axes
from parallel.strategies.pipeline.option import arguments, schedule
from parallel.strategies.zero import STAGES

# Why a worker, or a replica without servers, is no pipeline that updates after every mini-batch.
NEVER_FLUSHED = "it updates its stages after every mini-batch, so a step has no gradient"


def check_options(options) -> None:
    """Refuse axes that the strategy does not have, and options that do not go with an axis."""
    _stages(options)
    _layers_together(options)
    _replicas(options)
    _cut_samples(options)
    _axes_of_ddp(options)


def _stages(options) -> None:
    """Stages on different ranks: by whom, with what, and no other way beside it."""
    given = axes.mesh(options)
    if options.pipeline:
        schedule(options)
    can_have = {*STRATEGIES[options.strategy_name].supports.axes, *axes.supported(options).axes}
    if given and not axes.is_pipeline(options) and not can_have - {"data"}:
        raise OptionError(f"--mesh {options.mesh} has no effect with --strategy {options.strategy}: leave it out")
    for axis in given:
        if axis not in can_have and not (axes.is_pipeline(options) and axis in ("data", "pipeline")):
            raise OptionError(
                f"--mesh {options.mesh}: --strategy {options.strategy} has no axis {axis}: leave it out, or use "
                f"{_strategies_with(axis)}"
            )
    if options.pipeline and given.get("pipeline") == 1:
        raise OptionError(f"--pipeline {options.pipeline} needs ranks on its axis, given --mesh {options.mesh}")
    if not axes.is_pipeline(options):
        return
    if "pipeline" not in can_have:
        why = STRATEGIES[options.strategy_name].supports.not_stages or f"use {_strategies_with('pipeline')}"
        raise OptionError(f"--strategy {options.strategy} has no stages on different ranks: {why}")
    if axes.of_several_ranks(options):
        return
    _of_axis(options, "pipeline", "stages on different ranks")
    if options.late:
        raise OptionError(
            f"--consistency {options.consistency} cannot be combined with stages on different ranks: leave it out"
        )
    if options.node_memory == "on":
        raise OptionError("--node-memory on: gradients of stages are summed by messages; leave it out")


def _strategies_with(axis: str) -> str:
    return ", ".join(name for name, strategy in STRATEGIES.items() if axis in strategy.supports.axes)


def _layers_together(options) -> None:
    """Ranks that compute layers together: with what, and no other way beside it."""
    if not axes.is_tensor(options):
        if changed(options, ["tensor"]):
            raise OptionError(f"--tensor {options.tensor} needs an axis: use --mesh tensor=2, or --strategy tensor")
        return
    if axes.is_pipeline(options) or axes.of_several_ranks(options):
        return
    _of_axis(options, "tensor", "layers that ranks compute together")
    if options.node_memory == "on":
        raise OptionError("--node-memory on: gradients of parts of layers are summed by messages; leave it out")


def _replicas(options) -> None:
    """Refuse what local-update replicas of several ranks each cannot be combined with."""
    pipeline = axes.is_pipeline(options)
    if not axes.of_several_ranks(options) or not pipeline:
        return
    if schedule(options).name == "pipedream":
        raise OptionError(
            f"--pipeline {options.pipeline} cannot be combined with --strategy {options.strategy}: "
            f"{NEVER_FLUSHED}: use --pipeline 1f1b, or --strategy pipeline"
        )
    if options.accumulate > 1:
        why = STRATEGIES["pipeline"].supports.not_parts
        raise OptionError(f"--accumulate cannot be combined with stages on different ranks: {why}: leave it out")


def _cut_samples(options) -> None:
    """Refuse options of an axis without it, and axes that cannot be combined."""
    if changed(options, ["context"]) and not axes.has(options, "context"):
        raise OptionError(f"--context {options.context} needs an axis: use --mesh context=2")
    if problem := conflict(axes.mesh(options)):
        raise OptionError(f"--mesh {options.mesh}: {problem}: leave one out")


def _axes_of_ddp(options) -> None:
    """Refuse what cannot be combined with axes that are no strategies."""
    for axis in filter(partial(axes.has, options), reversed(axes.SUPPORTS)):
        _of_axis(options, axis, f"--mesh {options.mesh}")
        if axis in DIVIDE_NETWORK and options.node_memory == "on":
            raise OptionError(f"--node-memory on: gradients beside an axis {axis} are summed by messages; leave it out")


def _of_axis(options, axis: str, what: str) -> None:
    """Refuse what cannot be combined with an axis."""
    can = axes.SUPPORTS.get(axis) or STRATEGIES[axis].supports
    for name in ("accumulate", "reproducible", "compress", "offload", "consistency"):
        method = options.compress if name == "compress" else None
        why = can.reason_against(method, name)
        if method and options.strategy_name in STAGES and axis in DIVIDE_NETWORK:
            why = can.not_compressed
        never = ("offload", "consistency") if axis in DIVIDE_NETWORK else ("consistency",)
        if changed(options, [name]) and (why or name in never):
            raise OptionError(f"{flag(name)} cannot be combined with {what}{': ' * bool(why)}{why}: leave it out")


def check(options, ranks: int, network, optimizer) -> int | None:
    """Refuse a mesh, a schedule, layers that cannot be shared, on so many ranks.

    Returns
    -------
    int or None
        Ranks, or groups of ranks, that read samples; None where the network is on no axis but "data".
    """
    if axes.is_pipeline(options):
        return _check_stages(options, ranks, network, optimizer)
    sizes = axes.sizes(options, ranks)
    _check_experts(options, sizes, network)
    network = _positions(options, sizes, network)
    if axes.is_tensor(options):
        from nn.losses import Loss
        from parallel.strategies.tensor.rewriting import share

        share(network, Loss(), sizes["tensor"], options.tensor)
    axis = axes.same_samples_axis(options)
    if axes.divides_network(options):
        if not axes.of_several_ranks(options):
            _refuse_nothing_sent(options, sizes)
    elif axis in ("space", "branch"):
        from parallel.strategies.operators.strategy import REWRITTEN

        try:
            REWRITTEN[axis](network, 0, sizes[axis])
        except ValueError as error:
            raise OptionError(f"--mesh {options.mesh}: {error}") from error
    elif not axis:
        return None
    return _readers(sizes)


def _readers(sizes: dict[str, int]) -> int:
    """Return how many ranks, or groups of ranks, have samples of their own."""
    return math.prod(sizes[axis] for axis in SHARE_BATCH)


def _check_experts(options, sizes: dict[str, int], network) -> None:
    """Refuse a network whose experts cannot be dealt out."""
    from parallel.strategies.expert.dealing import check as check_experts

    try:
        check_experts(network, sizes["expert"], sizes["tensor"])
    except ValueError as error:
        raise OptionError(f"--mesh {options.mesh}: {error}") from error


def _positions(options, sizes: dict[str, int], network):
    """Return what the first rank of the axis "context" has of a network; refuse what cannot be cut so."""
    if sizes["context"] == 1:
        return network
    from parallel.strategies.context.attention import ContextGroups
    from parallel.strategies.context.cutting import Beside, cut
    from parallel.strategies.context.strategy import context_degrees

    try:
        groups = ContextGroups(context_degrees(options.context, sizes["context"]), 0)
        return cut(network, groups, Beside(sizes["tensor"], options.tensor == "sequence"))
    except ValueError as error:
        raise OptionError(f"--mesh {options.mesh}: {error}") from error


def _refuse_nothing_sent(options, sizes: dict[str, int]) -> None:
    """Refuse to compress gradients where no two ranks have the same part of the network."""
    if options.compress and math.prod(size for axis, size in sizes.items() if axis not in DIVIDE_NETWORK) == 1:
        raise OptionError(
            f"--compress {options.compress}: every rank has another part of the network, and no gradients are sent "
            "along the axis data: leave it out, or start more ranks for that axis"
        )


def _check_stages(options, ranks: int, network, optimizer) -> int:
    """Refuse a mesh, a schedule, cuts that cannot be; returns how many pipelines read samples."""
    from nn.losses import Loss
    from parallel.strategies.pipeline.placement import check_stage_updates, place, refuse_ties
    from parallel.strategies.tensor.rewriting import share

    sizes = axes.sizes(options, ranks)
    pipelines = _readers(sizes)
    if options.batch < pipelines:
        raise OptionError(
            f"--batch {options.batch} cannot be cut among {pipelines} pipelines: use a batch of at least "
            f"{pipelines}, or fewer of them"
        )
    given = arguments(options, pipelines)
    stale = given["schedule"] == "pipedream"
    if stale and (pipelines * sizes["context"] * sizes["tensor"] > 1 or options.strategy == "zero1"):
        raise OptionError(
            f"--pipeline {options.pipeline}: every mini-batch has an update of its own, which several ranks with a "
            "stage would have to wait for: leave out --mesh data, expert, context, tensor and --strategy zero1; a "
            "stage on several ranks, which take turns, is pipedream:replicas=2/1"
        )
    if stale and options.compress:
        raise OptionError(
            f"--compress cannot be combined with --pipeline {options.pipeline}: replicas of a stage sum their "
            "gradients as they are: leave it out"
        )
    _refuse_nothing_sent(options, sizes)
    _check_experts(options, sizes, network)
    given = {name: value for name, value in given.items() if name not in ("recompute", "vertical_sync")}
    whole = network
    network = share(_positions(options, sizes, network), Loss(), sizes["tensor"], options.tensor).network
    try:
        if network is not whole:
            given["cuts"] = place(whole, sizes["pipeline"], **given).cuts
        placement = place(network, sizes["pipeline"], **given)
        if stale:
            check_stage_updates(placement, optimizer)
        if options.compress and not axes.of_several_ranks(options):  # whose pushes are of whole networks
            refuse_ties(placement)
    except ValueError as error:
        name = next((name for name in ("pipeline", "mesh") if getattr(options, name)), "strategy")
        raise OptionError(f"{flag(name)} {getattr(options, name)}: {error}") from error
    return pipelines
