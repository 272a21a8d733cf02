"""Data parallelism with the same bits on any number of ranks: parallel/reproducible/shards.py says how."""

from __future__ import annotations

from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from parallel.reproducible.shards import Replicated
from parallel.synchronous import Synchronous, agree


class ReproducibleDataParallel(Replicated, Synchronous):
    """Every rank holds the whole network; gradients are summed in the fixed tree, and every rank makes the same update.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for Synchronous.
    shards : int
        V: into how many virtual shards every batch is cut; at least as many as ranks. Powers of two move least bytes.

    Raises
    ------
    ValueError
        More ranks than shards; synchronised statistics, which need all shards at once.
    ReplicaError
        If ranks were given different networks, losses, optimizers or numbers of shards.
    """

    def __init__(
        self, network: Network, loss: Loss, optimizer: Optimizer, communicator, seed: int = 0, shards: int = 8
    ):
        super().__init__(network, loss, optimizer, communicator, seed)
        agree(communicator, {"number of virtual shards": shards})
        self.start(shards, communicator)
        self.start_alike()

    def close(self):
        self.tree.release()
