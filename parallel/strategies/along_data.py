"""How ranks meet that have the same part of a network: those of the axes "data" and "context" beside other axes."""

from __future__ import annotations

from nn.registry import lookup
from parallel.mesh import Mesh
from parallel.strategies.declaration import ALIKE, ROUNDED
from parallel.strategies.zero import NOT_STAGES
from parallel.sync.base import GradientSync
from parallel.sync.compression import Compressor
from parallel.sync.compression.compressed import Compressed
from parallel.sync.messages import Messages, check_bucketing
from parallel.sync.sharded import Sharded

BUCKETING = {"bucket": 25.0, "first": 1.0, "overlap": "none"}


def exchange_along(
    mesh: Mesh,
    stage: int = 0,
    bucketing: dict | None = None,
    unit_bytes: int = 1 << 20,
    prefetch: int | None = None,
    compressor: Compressor | None = None,
) -> GradientSync:
    """What sums gradients along the axes "data" and "context" of a mesh with others.

    Parameters
    ----------
    stage : {0, 1, 2, 3}
        Of ZeRO: what is in shards; 0 for nothing.
    bucketing : bucket, first, overlap of sync/messages.py, or None
        How gradients are summed that are neither in shards nor compressed.
    unit_bytes, prefetch
        As for FullyShardedDataParallel.
    compressor : Compressor or None
        Of gradients that are not in shards.

    Raises
    ------
    ValueError
        What the strategies do not declare.
    """
    axis = "pipeline" if mesh.pipeline else "tensor"
    if compressor and (stage or type(compressor) not in [lookup("compressor", name) for name in ALIKE]):
        raise ValueError(f"{compressor!r} does not work with an axis {axis}: {ROUNDED}")
    if stage > 1 and mesh.pipeline:
        raise ValueError(f"ZeRO's stage {stage} does not work with an axis pipeline: {NOT_STAGES}")
    bucketing = bucketing or BUCKETING
    check_bucketing(**bucketing)
    if stage:
        found = Sharded(stage, unit_bytes, None, False, prefetch)
    elif compressor:
        found = Compressed(compressor)
    else:
        found = Messages(bucketing, "ranks have parts of one network")
    return found if mesh.copies > 1 else GradientSync()
