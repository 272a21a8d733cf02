"""What sums the gradients of ranks: one choice, by the mesh, ZeRO's stage, compression, virtual shards and buckets.

| gradients | sync |
|---|---|
| in shards: ZeRO's stages 1, 2 and 3 | sync/sharded.py, sync/unit_buffered.py |
| compressed | sync/compression/compressed.py |
| of virtual shards, in one fixed tree | sync/fixed_tree.py |
| in the memory that the ranks of a node share | sync/node_memory.py |
| else by messages, in buckets | sync/messages.py |
| of one rank that has a part of the network | sync/base.py |
"""

from __future__ import annotations

from collectives.failures.launch_check import nodes_of
from nn.arguments import COUNT, NOT_NEGATIVE, Optional
from nn.registry import lookup
from parallel.axis import DIVIDE_NETWORK
from parallel.guesses import ONE_PROCESS
from parallel.mesh import Mesh
from parallel.strategies.declaration import (
    NEVER_TOGETHER,
    NODE_MEMORY,
    NOT_COMPRESSED_IN_SHARDS,
    NOT_STAGES,
    ROUNDED,
    ROUNDING_ALIKE,
    TREE,
    UNIT_BYTES,
)
from parallel.sync.base import GradientSync
from parallel.sync.compression.base import Compressor, check_compressor
from parallel.sync.compression.compressed import Compressed
from parallel.sync.fixed_tree import FixedTree
from parallel.sync.messages import Messages, check_bucketing
from parallel.sync.node_memory import NodeMemory, reason_against
from parallel.sync.sharded import ShardedOptimizer
from parallel.sync.unit_buffered import ShardedGradients, ShardedParameters


def gradient_sync(
    mesh: Mesh,
    stage: int = 0,
    compressor: Compressor | None = None,
    shards: int = 0,
    *,
    node_memory: str = "auto",
    overlap: str = "auto",
    bucket: float = 25.0,
    first_bucket: float = 1.0,
    limit: float = 300.0,
    survives: bool = False,
    unit_bytes: int = UNIT_BYTES,
    offload=None,
    prefetch: int | None = None,
) -> GradientSync:
    """Return what sums the gradients of the ranks of a mesh that have the same of the network.

    Parameters
    ----------
    mesh : Mesh
        With axes whose ranks have parts of one network, gradients are summed along the others.
    stage : {0, 1, 2, 3}
        Of ZeRO: what is in shards; 0 for nothing.
    compressor : Compressor or None
        Of the gradients, not attached yet; one that keeps nothing where they are in shards.
    shards : int
        Virtual shards of the pass, where the mesh has the axis "data" alone; 0 for none.
    node_memory, overlap, bucket, first_bucket, limit, survives
        As for DistributedDataParallel. A pass whose gradients are not those of its samples, as a pipeline's, needs
        node_memory="off".
    unit_bytes, offload, prefetch
        As for FullyShardedDataParallel.

    Raises
    ------
    ValueError
        What the strategies do not declare.
    TypeError
        A mesh of one process without a communicator, but for virtual shards. What is no number, or no compressor.
    ReplicaError
        If ranks were given different ones.
    """
    buckets = {"bucket": bucket, "first_bucket": first_bucket, "overlap": overlap}
    check_bucketing(**buckets)
    check_compressor(compressor)
    NOT_NEGATIVE("unit_bytes", unit_bytes)
    Optional(COUNT)("prefetch", prefetch)
    units = {"unit_bytes": unit_bytes, "prefetch": prefetch}
    how = {"stage of ZeRO": stage, "compression": repr(compressor), "number of virtual shards": shards}
    mesh.agree(how | {"node_memory": node_memory} | buckets | units)  # else they would wait in unlike collectives
    if node_memory not in NODE_MEMORY:
        raise ValueError(f"node_memory {node_memory!r}: expected one of {', '.join(NODE_MEMORY)}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has the stages 1, 2 and 3, or 0 for nothing in shards; given {stage!r}")
    if compressor and shards:
        raise ValueError(
            f"{compressor!r} does not work with virtual shards: {NEVER_TOGETHER['compress', 'reproducible']}"
        )
    if shards and mesh.data_group is not mesh:
        raise ValueError(f"virtual shards need a mesh whose only axis is data: {TREE}")
    if node_memory == "on" and (stage or compressor or shards):
        raise ValueError(
            "node_memory='on': gradients that are in shards, compressed, or of virtual shards are not summed in the "
            "memory of a node; drop one of them"
        )
    if mesh.communicator is None and (stage or not shards):
        raise TypeError(ONE_PROCESS)
    in_parts = mesh.model is not None
    if in_parts:
        refuse_beside_parts(mesh, stage, compressor)
        if mesh.copies == 1:
            return GradientSync()
    nodes = nodes_of(mesh.communicator) if mesh.communicator and not in_parts else [0]
    if stage:
        if compressor and (compressor.memories or compressor.no_messages):
            raise ValueError(f"{compressor!r} does not work with shards: {NOT_COMPRESSED_IN_SHARDS}")
        readable = not in_parts and node_memory != "off" and len(set(nodes)) == 1  # each other's memory
        if stage == 3:
            return ShardedParameters(unit_bytes, offload, readable, compressor, prefetch)
        return {1: ShardedOptimizer, 2: ShardedGradients}[stage](unit_bytes, offload, readable, compressor)
    if compressor:
        return Compressed(compressor)
    if shards:
        return FixedTree()
    why_messages = "as asked" if node_memory == "off" else reason_against(nodes)
    if in_parts:
        why_messages = "ranks have parts of one network"
    if node_memory == "on" and why_messages:
        raise ValueError(f"gradients cannot be summed in node-shared memory: {why_messages}; use messages")
    if overlap == "auto" and (in_parts or len(set(nodes)) == 1):
        buckets["overlap"] = "none"
    return Messages(buckets, why_messages) if why_messages else NodeMemory(nodes, buckets, limit, survives)


def refuse_beside_parts(mesh: Mesh, stage: int, compressor: Compressor | None) -> None:
    """Refuse what ranks cannot do that have parts of one network."""
    axis = next(axis for axis in DIVIDE_NETWORK if mesh.sizes[axis] > 1)
    if compressor and (stage or type(compressor) not in [lookup("compressor", name) for name in ROUNDING_ALIKE]):
        raise ValueError(f"{compressor!r} does not work with an axis {axis}: {ROUNDED}")
    if stage > 1 and mesh.pipeline:
        raise ValueError(f"ZeRO's stage {stage} does not work with an axis pipeline: {NOT_STAGES}")
