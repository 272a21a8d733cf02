"""The pass of a rank of a local-update replica: of the whole network, of its slices of the layers, or of its stages."""

from __future__ import annotations

from nn.losses import Loss
from parallel.passes.forward_backward import ForwardBackward
from parallel.settings import refuse
from parallel.strategies.axis_rules import NEVER_FLUSHED


def replica_pass(
    loss: Loss, pipeline: int = 1, tensor: int = 1, way: str = "pairs", limit: float = 300.0, **schedule
) -> ForwardBackward:
    """The pass of such a rank.

    Parameters
    ----------
    loss, way, limit, schedule
        As for PipelinePass.
    pipeline, tensor : int
        Ranks of a replica along these axes.

    Raises
    ------
    ValueError
        A schedule that is never flushed.
    """
    if pipeline > 1 or schedule:
        from parallel.strategies.pipeline.executor import PipelinePass  # which other replicas do without

        refuse(schedule.get("schedule") == "pipedream", f"pipedream in a replica: {NEVER_FLUSHED}: use 1f1b")
        return PipelinePass(loss=loss, way=way, limit=limit, **schedule)
    if tensor > 1:
        from parallel.strategies.tensor.shared_pass import SharedPass

        return SharedPass(loss, way)
    return ForwardBackward()
