"""The axes whose ranks compute the same samples together, beside "data" alone: "space", "branch", "context"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.strategies import axes
from parallel.strategies.context.strategy import ContextParallel
from parallel.strategies.data_parallel import summing_arguments
from parallel.strategies.operators.strategy import BranchParallel, SpatialParallel
from parallel.strategies.zero import STAGES, shard_arguments, summed

if TYPE_CHECKING:
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
