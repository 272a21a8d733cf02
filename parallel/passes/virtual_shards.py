"""--reproducible V: the same bits on any number of ranks.

Every global batch is cut into the same V virtual shards, whatever the number of ranks; rank r of p computes the
gradients of the shards chunk(V, p, r), one after another, each in a forward and backward pass of its own, and they are
summed in one fixed binary tree (sync/fixed_tree.py). So no rounding depends on p: parameters after training are
equal bit for bit on 1, 2, 3, ... ranks, and so are losses, running statistics and accuracies.

What else could depend on p is fixed too: BLAS works with one thread in this process until the trainer is closed or
deleted (its sums depend on the number of threads), every shard starts from the running statistics of the step's begin,
and the mean of those of all shards is kept. Losses of evaluations are rounded to 2^-24, each batch's sum, because sums
of such numbers are exact in any order. Equal bits need equal instructions: hosts with the same kind of processor, NumPy
and BLAS.

Cost: batches of 1/V of the size for the layers, and what the tree costs; memory for at most 2 log2 V more gradients.
Measured, one core, batch 64 in 8 shards: a step takes 1.6 times as long for LeNet-5, 3.7 times for an MLP 784-128-10.
"""

from __future__ import annotations

import weakref

import numpy as np
from threadpoolctl import threadpool_limits

from collectives.steps import chunk
from nn.arguments import SIZE
from nn.core.network import Network
from nn.optim.clipping import ClipValue
from nn.optim.optimizers import LAMB, LARS, Optimizer
from parallel.passes.forward_backward import ForwardBackward, Samples, UnevenTotal

FIXED_POINT = 2.0**24  # of the sums over test data


class VirtualShards(ForwardBackward):
    """Every virtual shard is an addend of its own: a pass forward and backward from the statistics of the step's begin.

    Parameters
    ----------
    shards : int
        V, the virtual shards of a batch; at least as many as ranks. Powers of two move least bytes.

    Attributes
    ----------
    shard : (index, count, V)
        A loader cuts batches where virtual shards begin.
    mine : (first, last)
        This rank's virtual shards, half open; none where the index is None.

    Raises
    ------
    ValueError
        Synchronised statistics, which need all shards at once.
    """

    fixed = True

    def __init__(self, shards: int):
        self.shards = SIZE("shards", shards)

    def start(self, mesh, network):
        refuse_synchronized(network)
        super().start(mesh, network)
        self.shard, self.addends = (*self.shard, self.shards), self.shards
        self.mine = (0, 0) if mesh.index is None else chunk(self.shards, mesh.count, mesh.index)
        limit_threads()
        self.restore_threads = weakref.finalize(self, restore_threads)

    def close(self):
        self.restore_threads()
        super().close()

    def divide(self, samples, total, accumulate):
        """Return this rank's shards, as many on every rank: where others have one more, the last is empty."""
        if isinstance(total, UnevenTotal):
            raise ValueError("reproducible training cuts one data set by a Loader; `join` gives every rank its own")
        self._refuse(accumulate)
        if self.mesh.index is None:
            self.refuse(samples)
        first, last = self.mine
        found = []
        for i, leaf in enumerate(range(first, last)):
            rows = slice(*chunk(samples, last - first, i))
            found.append(Samples(rows, chunk(total, self.shards, leaf)[0], False, leaf))
        if 0 < len(found) < -(-self.shards // self.mesh.count):
            found.append(Samples(slice(0, 0), found[-1].first, False, None))
        return found

    def samples_at_once(self, total, accumulate):
        return {hi - lo for lo, hi in (chunk(total, self.shards, leaf) for leaf in range(self.shards))}

    def deal(self, samples, accumulate, ranks):
        self._refuse(accumulate)
        dealt = [chunk(self.shards, ranks, rank) for rank in range(ranks)]
        for i in range(-(-self.shards // ranks)):
            leaves = [first + i for first, _ in dealt]
            yield [
                (*chunk(samples, self.shards, leaf), leaf) if leaf < last else (0, 0, None)
                for leaf, (_, last) in zip(leaves, dealt, strict=True)
            ]

    def rounded(self, scores):
        return np.array([fixed_point(score) for score in scores])

    def describe(self):
        return f"{self.shards} virtual shards, summed in one tree: the same bits on any number of ranks"

    def _refuse(self, accumulate: int) -> None:
        """Refuse micro-batches within a virtual shard: their sums would round differently."""
        if accumulate > 1:
            raise ValueError(
                f"a reproducible step is cut into {self.shards} virtual shards, each a micro-batch: for smaller ones, "
                "use more shards, and no micro-batches"
            )


_limits: list[threadpool_limits] = []  # one for each VirtualShards that is in use; the first remembers what was before


def limit_threads() -> None:
    """Give BLAS one thread, until each caller has called `restore_threads`."""
    _limits.append(threadpool_limits(1, user_api="blas"))


def restore_threads() -> None:
    """Give BLAS its threads back, if no one else needs it to have one."""
    if len(_limits) > 1:
        _limits.pop()
    else:
        _limits.pop().restore_original_limits()


def fixed_point(x: float) -> float:
    """Rounded to 2^-24: as long as sums of such numbers stay below 2^29 they are exact, in any order."""
    return float(np.rint(x * FIXED_POINT) / FIXED_POINT)


def refuse_synchronized(network: Network) -> None:
    """Raise ValueError for layers that need the statistics of all virtual shards at once."""
    for path, layer, _, _ in network.layers():
        if layer.synchronized:
            raise ValueError(
                f"reproducible training computes one virtual shard after another, but layer {path} ({layer!r}) needs "
                "the statistics of all at once: leave out synchronized"
            )


def refuse_norms(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer, or its clip, that needs norms of whole tensors."""
    found = optimizer if isinstance(optimizer, LARS | LAMB) else optimizer.clip
    if found is not None and not isinstance(found, ClipValue):
        raise ValueError(
            f"{found!r} needs norms of whole tensors, and where these are cut over ranks, the bits of a norm depend on "
            "how many there are, or there is none: use ddp, or another optimizer and no clipping by norms"
        )
