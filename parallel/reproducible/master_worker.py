"""Master and workers with the same bits on any number of ranks: parallel/reproducible/shards.py says how.

Each worker computes the outputs of its virtual shards one after the other, and so their gradients; the master takes the
losses of the shards one by one, and adds gradients and losses as the tree says (tree_sum.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from collectives.steps import part
from parallel.master_worker import DataParallel
from parallel.reproducible.shards import fixed_point, refuse_micro_batches, refuse_synchronized, with_trees
from parallel.reproducible.tree_sum import TreeSum
from parallel.synchronous import agree


class ReproducibleMasterWorker(DataParallel):
    """`DataParallel`, the same bits on any number of ranks.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DataParallel.
    shards : int
        V: into how many virtual shards every batch is cut; at least as many as ranks.

    Raises
    ------
    ValueError
        More ranks than shards; synchronised statistics, which need all shards at once.
    """

    def __init__(self, *arguments, shards: int = 8, **options):
        super().__init__(*arguments, **options)
        refuse_synchronized(self.network)
        agree(self.communicator, {"number of virtual shards": shards})
        self.shards, count, dtype = shards, len(self.message), self.network.dtype
        for_master = [(0, count)] + [(count, count)] * (self.communicator.size - 1)
        self.tree = TreeSum(shards, count, dtype, self.communicator, for_master)
        self.loss_tree = TreeSum(shards, 1, dtype)  # the master has all losses
        self.threads = threadpool_limits(1, user_api="blas")

    def virtual(self) -> Iterator[tuple[slice, int]]:
        """Of each of this rank's virtual shards: its samples here, and the place of the first in the batch."""
        lo, _ = self.cuts[self.communicator.rank]
        for leaf in range(*self.tree.mine):
            a, b = part(self.cuts[-1][1], self.shards, leaf)
            yield slice(a - lo, b - lo), a

    def scatter_batch(self, x):
        rank, size = self.communicator.rank, self.communicator.size
        count = self.communicator.bcast(len(x))
        bounds = [part(count, self.shards, leaf)[0] for leaf in range(self.shards)] + [count]
        dealt = [part(self.shards, size, i) for i in range(size)]
        self.cuts = [(bounds[first], bounds[last]) for first, last in dealt]
        lo, hi = self.cuts[rank]
        self.run.common.sample = lo
        samples = np.empty((hi - lo, *x.shape[1:]), x.dtype)
        self._scatter(x, samples)
        return samples

    def forward(self, x):
        """(outputs, what backward needs) of one virtual shard after the other; running statistics are kept of each."""
        before, outputs, saved = self.statistics.copy(), [], []
        for rows, first in self.virtual():
            self.run.common.sample, self.statistics[:] = first, before
            z, kept = super().forward(x[rows])
            outputs.append(z)
            saved.append((rows, kept, self.statistics.copy()))
        self.run.common.sample = self.cuts[self.communicator.rank][0]
        self.statistics[:] = before
        return np.concatenate(outputs), saved

    def compute_loss(self, outputs, y, total):
        if not self.master:
            return 0.0, None
        gz = self.run.empty(outputs.shape, outputs.dtype)
        for leaf in range(self.shards):
            rows = slice(*part(len(outputs), self.shards, leaf))
            loss = 0.0
            if rows.stop > rows.start:
                loss, gz[rows] = super().compute_loss(outputs[rows], y[rows], total)
            self.loss_tree.add(np.array([loss], self.network.dtype))
        return float(self.loss_tree.allreduce()[0]), gz

    def backward(self, gz, saved):
        for rows, kept, statistics in saved:
            super().backward(gz[rows], kept)
            self.message_statistics[:] = statistics
            self.tree.add(self.message)

    def combine(self, loss):
        mine = self.tree.reduce_scatter()
        if self.master:
            self.message[:] = mine
            np.divide(self.message_statistics, self.shards, out=self.statistics)
        return self.communicator.bcast(loss)

    def memory(self):
        return with_trees(super().memory(), self.tree)

    def close(self):
        self.tree.release()

    def accumulate(self, x, y, total):
        refuse_micro_batches(self.shards)

    def evaluate(self, x, y):
        z = self.predict(x)
        sums = np.zeros(3)
        for leaf in range(self.shards if self.master else 0):
            rows = slice(*part(len(x), self.shards, leaf))
            if rows.stop > rows.start:
                loss, correct, count = self.score(z[rows], y[rows])
                sums += fixed_point(loss), correct, count
        return sums
