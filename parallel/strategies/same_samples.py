"""The axes whose ranks compute the same samples together: "space", "branch" and "context", from options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.strategies import axes
from parallel.strategies.context.attention import ContextGroups
from parallel.strategies.context.cutting import cut
from parallel.strategies.context.strategy import ContextParallel, context_degrees
from parallel.strategies.data_parallel import summing_arguments
from parallel.strategies.operators.strategy import REWRITTEN, BranchParallel, SpatialParallel
from parallel.strategies.zero import STAGES, shard_arguments, summed

if TYPE_CHECKING:
    from nn.core.network import Network
    from parallel.trainer import DistributedTrainer

STRATEGIES = {"space": SpatialParallel, "branch": BranchParallel, "context": ContextParallel}


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Return the trainer of ranks that compute the same samples; several such groups share every batch."""
    axis, stage = axes.same_samples_axis(options), STAGES.get(options.strategy_name, 0)
    compressor = summed(options)["compressor"]
    if stage or compressor:
        how = {"stage": stage, "compressor": compressor, **(shard_arguments(options) if stage else {})}
    else:
        how = summing_arguments(options, communicator)
    how[axis] = axes.sizes(options, communicator.size)[axis]
    if axis == "context":
        how["attention"] = options.context
    return STRATEGIES[axis](network, loss, optimizer, communicator, options.seed, **how)


def rewritten(network: Network, axis: str, ranks: int, attention: str) -> Network:
    """Return what the first of so many ranks of the axis computes of a network.

    Raises
    ------
    ValueError
        A network that cannot be cut so: what would do.
    """
    if axis == "context":
        return cut(network, ContextGroups(context_degrees(attention, ranks), 0))
    return REWRITTEN[axis](network, 0, ranks)
