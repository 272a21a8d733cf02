"""Data parallelism with the same bits on any number of ranks: parallel/reproducible/shards.py says how."""

from __future__ import annotations

from parallel.reproducible.shards import Replicated
from parallel.synchronous import Synchronous


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

    def __init__(self, *arguments, shards: int = 8, **options):
        super().__init__(*arguments, **options)
        self.start(shards, self.communicator)
        self.start_alike()

    def add_leaf(self, loss):
        self.message_totals[:] = self.totals(first=self.leaf == 0)
        super().add_leaf(loss)

    def combine(self, loss):
        loss = super().combine(loss)
        told, first = map(float, self.message_totals)
        self.refuse_other_totals(told / self.shards, first)
        return loss

    def describe(self):
        return f"{self.shards} virtual shards, summed in one tree: the same bits on any number of ranks"

    def close(self):
        self.tree.release()
