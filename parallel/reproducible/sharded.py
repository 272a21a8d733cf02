"""ZeRO and FSDP with the same bits on any number of ranks: parallel/reproducible/shards.py says how.

A block of a unit is summed where it is kept: each unit has a tree of its own (tree_sum.py), of which a rank asks for
its block. Updates go element by element, so how parameters are cut makes no difference to the bits; but the norms of
tensors that lie on several ranks are summed over ranks, so LARS, LAMB and clipping by norms are refused.

What is sharded stays so; but until a step's last virtual shard is done, a rank keeps its sums whole, for every unit.
With FSDP parameters are gathered for each virtual shard: use no more of them than ranks where messages are dear.
"""

from __future__ import annotations

import numpy as np

from parallel.reproducible.shards import Reproducible, refuse_norms, with_trees
from parallel.reproducible.tree_sum import TreeSum
from parallel.sharded import FullyShardedDataParallel, ZeRO1, ZeRO2


class ReproducibleSharded(Reproducible):
    """What the stages share; stands before one of them among the base classes.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, unit_bytes, offload
        As for the stage without it.
    shards : int
        V: into how many virtual shards every batch is cut; at least as many as ranks.

    Raises
    ------
    ValueError
        More ranks than shards; synchronised statistics; LARS, LAMB or clipping by norms.
    """

    def __init__(self, *arguments, shards: int = 8, **options):
        super().__init__(*arguments, **options)
        refuse_norms(self.optimizer)
        self.start(shards)
        communicator, ranks, dtype = self.communicator, range(self.shard[1]), self.network.dtype
        self.trees = [
            TreeSum(
                shards,
                unit.block * len(ranks),
                dtype,
                communicator,
                [(unit.block * r, unit.block * (r + 1)) for r in ranks],
            )
            for unit in self.cut.units
        ]
        self.tail_tree = TreeSum(shards, len(self.message), dtype, communicator)

    def reduce(self, whole, unit, out):
        """A virtual shard's gradients of a unit are there; the sum over all ranks is made in `combine`."""
        if self.leaf < self.mine[1]:
            unit.clear_gaps(whole)
            self.trees[unit.number].add(whole)

    def add_leaf(self, loss):
        self.message[:3], self.message[3:] = (loss, *self.totals(first=self.leaf == 0)), self.statistics
        self.tail_tree.add(self.message)

    def combine(self, loss):
        for unit, tree in zip(self.cut.units, self.trees, strict=True):
            self.gradient_shard[unit.blocks] = tree.reduce_scatter()
        summed = self.tail_tree.allreduce()
        self.refuse_other_totals(float(summed[1]) / self.shards, float(summed[2]))
        np.divide(summed[3:], self.shards, out=self.statistics)
        return float(summed[0])

    def memory(self):
        return with_trees(super().memory(), *self.trees)

    def close(self):
        for tree in (*self.trees, self.tail_tree):
            tree.release()


class ReproducibleZeRO1(ReproducibleSharded, ZeRO1):
    """`ZeRO1`, the same bits on any number of ranks."""

    def add_leaf(self, loss):
        for unit in self.cut.units:
            self.reduce(self.cut.whole(self.gradients, unit), unit, self.gradient_shard[unit.blocks])
        super().add_leaf(loss)


class ReproducibleZeRO2(ReproducibleSharded, ZeRO2):
    """`ZeRO2`, the same bits on any number of ranks."""


class ReproducibleFullyShardedDataParallel(ReproducibleSharded, FullyShardedDataParallel):
    """`FullyShardedDataParallel`, the same bits on any number of ranks."""
