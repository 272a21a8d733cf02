"""ZeRO: every rank keeps the optimizer's state, the gradients, the parameters of a shard only.

| strategy | sharded | elements a rank keeps, Adam | elements on the wire a step |
|---|---|---|---|
| DistributedDataParallel | nothing | 4 Psi | 2 Psi |
| ZeRO1 | moments | 2 Psi + 2 Psi/N | 2 Psi |
| ZeRO2 | and gradients | Psi + 3 Psi/N | 2 Psi |
| FullyShardedDataParallel (ZeRO-3) | and parameters | 4 Psi/N | 3 Psi |

for Psi parameters on N ranks: exchange/sharded.py says how.

Milliseconds a step on 2 ranks of one node with Adam, 64 samples each, replicated and stages 1 to 3 (measured, median):
MLP 784-512-512-10 7.7, 8.0, 7.7, 8.1; eight layers of 1024 x 1024 85, 85, 87, 97.

Sources: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from collectives.failures.launch_check import nodes_of
from parallel.exchange.compression.base import Compressor
from parallel.exchange.sharded import Sharded
from parallel.mesh import Mesh
from parallel.passes.virtual_shards import VirtualShards
from parallel.passes.whole import Whole
from parallel.strategies.capabilities import CAPABILITIES
from parallel.trainer import DistributedTrainer

UNIT_BYTES = 1 << 20


def ZeRO1(
    network, loss, optimizer, communicator, seed=0, unit_bytes=UNIT_BYTES, offload=None, *, compressor=None, shards=0
) -> DistributedTrainer:
    """The optimizer's state is sharded; parameters and gradients are whole on every rank.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel.
    unit_bytes : int
        Neighbouring layers travel together until they have so many bytes of parameters.
    offload : path or None
        A directory in which the shards lie, in memory-mapped files; None for memory.
    compressor : Compressor or None
        Of the gradients, not attached yet; one that keeps nothing.
    shards : int
        The same bits on any number of ranks: into how many virtual shards every batch is cut; 0 for none.

    Raises
    ------
    ValueError
        A compressor that keeps something. With virtual shards: more ranks than shards, synchronised statistics, LARS,
        LAMB or clipping by norms.
    OSError
        On all ranks, if the directory has too little room on one.
    """
    given = network, loss, optimizer, communicator, seed
    return _zero(1, "ZeRO1", *given, compressor, shards, unit_bytes, offload, None)


def ZeRO2(
    network, loss, optimizer, communicator, seed=0, unit_bytes=UNIT_BYTES, offload=None, *, compressor=None, shards=0
) -> DistributedTrainer:
    """Gradients are sharded too: a unit's are reduced as soon as they are finished, then its memory serves the next.

    Between nodes a unit's are on their way while the next one computes. Parameters are those of ZeRO1.
    """
    given = network, loss, optimizer, communicator, seed
    return _zero(2, "ZeRO2", *given, compressor, shards, unit_bytes, offload, None)


def FullyShardedDataParallel(
    network,
    loss,
    optimizer,
    communicator,
    seed=0,
    unit_bytes=UNIT_BYTES,
    offload=None,
    prefetch=None,
    *,
    compressor=None,
    shards=0,
) -> DistributedTrainer:
    """Parameters are sharded too: a unit's are gathered before its forward and again before its backward.

    With virtual shards they are gathered for each: use no more of them than ranks where messages are dear.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, unit_bytes, offload, compressor, shards
        As for ZeRO1.
    prefetch : int or None
        How many units are gathered ahead, while others compute; None for 1 between nodes, and 0 on a node, where the
        cores that would copy are busy computing. Memory for prefetch + 1 units is needed. A unit that is still there
        when backward begins is not gathered again.
    """
    given = network, loss, optimizer, communicator, seed
    return _zero(3, "FullyShardedDataParallel", *given, compressor, shards, unit_bytes, offload, prefetch)


def ReproducibleZeRO1(*arguments, shards: int = 8, **options) -> DistributedTrainer:
    """`ZeRO1`, the same bits on any number of ranks."""
    return ZeRO1(*arguments, shards=shards, **options)


def ReproducibleZeRO2(*arguments, shards: int = 8, **options) -> DistributedTrainer:
    """`ZeRO2`, the same bits on any number of ranks."""
    return ZeRO2(*arguments, shards=shards, **options)


def ReproducibleFullyShardedDataParallel(*arguments, shards: int = 8, **options) -> DistributedTrainer:
    """`FullyShardedDataParallel`, the same bits on any number of ranks."""
    return FullyShardedDataParallel(*arguments, shards=shards, **options)


def sharding(
    communicator,
    stage: int,
    unit_bytes: int = UNIT_BYTES,
    offload=None,
    prefetch: int | None = None,
    compressor: Compressor | None = None,
) -> Sharded:
    """What keeps the shards of these ranks, as FullyShardedDataParallel is told to.

    Raises
    ------
    ValueError
        A compressor that keeps something.
    """
    if compressor and (compressor.memories or compressor.no_messages):
        raise ValueError(f"{compressor!r} does not work with shards: {CAPABILITIES['zero1'].not_compressed}")
    together = len(set(nodes_of(communicator))) == 1  # ranks can read each other's memory
    return Sharded(stage, unit_bytes, offload, together, prefetch, compressor)


def _zero(stage, name, network, loss, optimizer, communicator, seed, compressor, shards, *cut) -> DistributedTrainer:
    exchange = sharding(communicator, stage, *cut, compressor)
    pass_ = VirtualShards(shards) if shards else Whole()
    name = f"{'Compressed' * bool(compressor)}{'Reproducible' * bool(shards)}{name}"
    return DistributedTrainer(network, loss, optimizer, Mesh(communicator), pass_, exchange, seed, name)
