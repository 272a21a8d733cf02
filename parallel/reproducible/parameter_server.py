"""Parameter servers with the same bits on any number of workers and servers: parallel/reproducible/shards.py says how.

Workers send the sums of their virtual shards' subtrees, each server adds those of its slice as the tree says
(tree_sum.py), updates, and workers pull.
"""

from __future__ import annotations

import numpy as np

from parallel.parameter_server import TAIL, ParameterServer
from parallel.reproducible.shards import Reproducible, refuse_norms, with_trees
from parallel.reproducible.tree_sum import TreeSum


class ReproducibleParameterServer(Reproducible, ParameterServer):
    """`ParameterServer`, the same bits on any number of ranks.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, servers, place
        As for ParameterServer.
    shards : int
        V: into how many virtual shards every batch is cut; at least as many as workers.

    Raises
    ------
    ValueError
        More workers than shards; synchronised statistics; on several servers LARS, LAMB or clipping by norms.
    """

    def __init__(self, *arguments, shards: int = 8, **options):
        super().__init__(*arguments, **options)
        if len(self.hosts) > 1:
            refuse_norms(self.optimizer)
        self.start(shards)
        self.addends = shards
        count, dtype, workers = self.slices[-1][1], self.network.dtype, len(self.workers)
        cuts, end = [], 0
        for rank in range(self.communicator.size):
            lo, hi = self.slices[self.hosts.index(rank)] if rank in self.hosts else (end, end)
            cuts.append((lo, hi))
            end = hi
        self.tree = TreeSum(shards, count, dtype, self.communicator, cuts, workers)
        self.tail_tree = TreeSum(shards, TAIL, dtype, self.communicator, holders=workers)  # for every server

    def add_leaf(self, loss):
        if self.works:
            self.message[self.network.layout.size : -TAIL] = self.statistics
            self.message[-TAIL:] = loss, *self.totals(first=self.leaf == 0)
            self.tree.add(self.message[:-TAIL])
            self.tail_tree.add(self.message[-TAIL:])

    def push(self):
        mine, tail = self.tree.reduce_scatter(), self.tail_tree.allreduce()
        if self.serves:
            self.sums[:-TAIL], self.sums[-TAIL:] = mine, tail
            statistics = self.sums[self.own.stop - self.own.start : -TAIL]
            np.divide(statistics, self.shards, out=statistics)

    def memory(self):
        return with_trees(super().memory(), self.tree)

    def close(self):
        super().close()
        self.tree.release()
        self.tail_tree.release()
