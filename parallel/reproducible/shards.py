"""--reproducible V: the same bits on any number of ranks.

Every global batch is cut into the same V virtual shards, whatever the number of ranks; rank r of p computes the
gradients of the shards part(V, p, r), one after another, each in a forward and backward pass of its own, and they are
summed in one fixed binary tree (tree_sum.py). So no rounding depends on p: parameters after training are equal
bit for bit on 1, 2, 3, ... ranks, and so are losses, running statistics and accuracies.

What else could tell p apart is fixed too: BLAS works with one thread, in this process from now on (its sums depend on
the number of threads), every shard starts from the running statistics of the step's begin, and the mean of those of all
shards is kept. Equal bits need equal instructions: hosts with the same kind of processor, NumPy and BLAS.

Cost: batches of 1/V of the size for the layers, and what the tree costs; memory for at most 2 log2 V more gradients.
Measured, one core, batch 64 in 8 shards: a step takes 1.6 times as long for LeNet-5, 3.7 times for an MLP 784-128-10.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from collectives.steps import part
from nn.clipping import ClipValue
from nn.layout import ALIGN
from nn.losses import Loss
from nn.network import Network
from nn.optimizers import LAMB, LARS, Optimizer
from nn.serial import Serial
from parallel.reproducible.tree_sum import TreeSum
from parallel.uneven import Total

FIXED_POINT = 2.0**24  # of the sums over test data


class Reproducible:
    """What makes a trainer reproducible; stands before `Serial` or a strategy among the base classes.

    A subclass defines `add_leaf`, which takes what a virtual shard has computed into its sums, and `combine`.

    Attributes
    ----------
    shards : int
        V, the virtual shards of a batch.
    shard : (index, count, V)
        A loader cuts batches where virtual shards begin.
    mine : (first, last)
        This rank's virtual shards, half open; none where the index is None.
    """

    def start(self, shards: int) -> None:
        """Called at the end of the constructor."""
        refuse_synchronized(self.network)
        if communicator := getattr(self, "communicator", None):
            from parallel.synchronous import agree  # with MPI, which one process does without

            agree(communicator, {"number of virtual shards": shards})
        rank, size = self.shard
        self.shards, self.shard = shards, (rank, size, shards)
        self.mine = (0, 0) if rank is None else part(shards, size, rank)
        self.leaf = self.mine[0]
        self.before = np.empty_like(self.statistics)
        self.threads = threadpool_limits(1, user_api="blas")

    def add_leaf(self, loss: float) -> None:
        """Gradients, loss and running statistics of one virtual shard are there."""
        raise TypeError(f"{type(self).__name__} does not define add_leaf")

    def first_sample(self, total):
        return part(total, self.shards, self.leaf)[0]

    def rows(self, count: int) -> Iterator[slice]:
        """Which of `count` samples, all those of this rank, are in each of its virtual shards.

        Every rank is given as many slices: where there are more ranks with one shard more, the last slice is empty.
        """
        first, last = self.mine
        for i in range(last - first):
            yield slice(*part(count, last - first, i))
        if last - first < -(-self.shards // self.shard[1]):
            yield slice(0, 0)

    def compute_gradients(self, x, y, total):
        if isinstance(total, Total):
            raise ValueError("reproducible training cuts one data set by a Loader; `join` gives every rank its own")
        self.before[:] = self.statistics
        for leaf, rows in enumerate(self.rows(len(x)), self.mine[0]):
            self.leaf = leaf  # `first_sample` asks for it
            self.statistics[:] = self.before
            loss = super().compute_gradients(x[rows], y[rows], total)
            if leaf < self.mine[1]:
                self.add_leaf(loss)
        self.leaf = self.mine[0]
        self.run.common.sample = self.first_sample(total)  # as for a shard that is computed at once
        return 0.0  # it is in the sums

    def accumulate(self, x, y, total):
        """Refused: how micro-batches round would depend on the number of ranks.

        Raises
        ------
        ValueError
        """
        refuse_micro_batches(self.shards)

    def evaluate(self, x, y):
        """As Serial, one virtual shard at a time."""
        sums = np.zeros(3)
        for rows in self.rows(len(x)):
            loss, correct, count = super().evaluate(x[rows], y[rows])
            sums += fixed_point(loss), correct, count
        return sums


class Replicated(Reproducible):
    """Every rank has the whole gradient: it is summed, with the loss and running statistics behind it, in one tree."""

    def start(self, shards: int, communicator=None) -> None:
        super().start(shards)
        self.tree = TreeSum(shards, len(self.message), self.network.dtype, communicator)

    def allocate(self) -> None:
        """Gradients, behind them loss and totals, and behind those running statistics: a leaf of the tree."""
        super().allocate()
        size = self.network.layout.size
        self.message = np.zeros(size + ALIGN + self.network.state_layout.size, self.network.dtype)
        self.gradients = self.message[:size]
        self.message_loss, self.message_totals = self.message[size : size + 1], self.message[size + 1 : size + 3]
        self.message_statistics = self.message[size + ALIGN :]

    def add_leaf(self, loss):
        self.message_loss[0], self.message_statistics[:] = loss, self.statistics
        self.tree.add(self.message)

    def combine(self, loss):
        np.copyto(self.message, self.tree.allreduce())
        np.divide(self.message_statistics, self.shards, out=self.statistics)
        return float(self.message_loss[0])

    def memory(self):
        return with_trees(super().memory(), self.tree)


class ReproducibleSerial(Replicated, Serial):
    """One process that computes, bit for bit, what any number of ranks compute with as many virtual shards.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Serial.
    shards : int
        V: into how many virtual shards every batch is cut.

    Raises
    ------
    ValueError
        Where the network cannot be: synchronised statistics need all shards at once.
    """

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, seed: int = 0, shards: int = 8):
        super().__init__(network, loss, optimizer, seed)
        self.start(shards)


def fixed_point(x: float) -> float:
    """Rounded to 2^-24: as long as sums of such numbers stay below 2^29 they are exact, in any order."""
    return float(np.rint(x * FIXED_POINT) / FIXED_POINT)


def with_trees(found: dict[str, int], *trees: TreeSum) -> dict[str, int]:
    """What a trainer's `memory` found, and the sums of its trees."""
    return found | {"in transit": found["in transit"] + sum(tree.sums.nbytes for tree in trees)}


def refuse_micro_batches(shards: int) -> None:
    raise ValueError(
        f"a reproducible step is cut into {shards} virtual shards, each a micro-batch: for smaller ones, use more "
        "shards, and no micro-batches"
    )


def refuse_synchronized(network: Network) -> None:
    for path, layer, _, _ in network.layers():
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"reproducible training computes one virtual shard after another, but layer {path} ({layer!r}) needs "
                "the statistics of all at once: leave out synchronized"
            )


def refuse_norms(optimizer: Optimizer) -> None:
    found = optimizer if isinstance(optimizer, LARS | LAMB) else optimizer.clip
    if found is not None and not isinstance(found, ClipValue):
        raise ValueError(
            f"{found!r} needs norms of whole tensors, and where these are cut over ranks, the bits of a norm depend on "
            "how many there are: use ddp, or another optimizer and no clipping by norms"
        )
