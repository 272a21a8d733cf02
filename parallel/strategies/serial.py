"""One process that computes what many ranks compute, bit for bit; without MPI."""

from __future__ import annotations

from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.mesh import Mesh
from parallel.passes.virtual_shards import VirtualShards
from parallel.sync.fixed_tree import FixedTree
from parallel.trainer import DistributedTrainer


def ReproducibleSerial(
    network: Network, loss: Loss, optimizer: Optimizer, seed: int = 0, shards: int = 8
) -> DistributedTrainer:
    """One process that computes, bit for bit, what any number of ranks compute with as many virtual shards.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer.
    shards : int
        V: into how many virtual shards every batch is cut.

    Raises
    ------
    ValueError
        Where the network cannot be: synchronised statistics need all shards at once.
    """
    pass_, name = VirtualShards(shards), "ReproducibleSerial"
    return DistributedTrainer(network, loss, optimizer, Mesh(), pass_, FixedTree(), seed, name)
