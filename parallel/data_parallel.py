"""Data parallelism: every rank holds the whole network and takes its part of every batch.

The gradients of all ranks are summed and every parameter is updated once with the sum, so a step computes what one
process computes with the whole batch, up to rounding. Two ways of summing, which share one form:

node_memory.py  in the memory that the ranks of a node share, on one or several nodes: the default where it is possible
buckets.py      by messages that travel while backprop goes on: for one rank a node, or nodes that have unlike numbers

Cost of a step over one process's: see there. Source: Li et al. 2020 (PyTorch DistributedDataParallel).
"""

from __future__ import annotations

import weakref

import numpy as np

from collectives.world import nodes_of
from nn.layout import ALIGN
from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from parallel.breakdown import DEFAULT
from parallel.buckets import Messages, check_bucketing
from parallel.node_memory import NodeMemory, why_not
from parallel.synchronous import Synchronous

NODE_MEMORY = ("auto", "on", "off")


class DistributedDataParallel(Synchronous):
    """`Serial` on many ranks; one line of a program differs.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for Synchronous.
    node_memory : {"auto", "on", "off"}
        Sum gradients in the memory that the ranks of a node share; auto: where all nodes have equally many ranks, and
        more than one.
    overlap : {"auto", "thread", "poke", "none"}
        What moves messages while backprop goes on; see buckets.py. auto: none where all ranks share a node, and cores.
    bucket, first_bucket : float
        MiB of gradients that make a message, and the first one.
    limit : float
        Seconds after which a rank gives up that waits for others in shared memory.

    Raises
    ------
    ValueError
        node_memory="on" where it is not possible; the message says why. Buckets or an overlap that cannot be.
    OSError
        Too little memory that ranks of a node can share.
    ReplicaError
        As for Synchronous.
    """

    def __init__(
        self,
        network: Network,
        loss: Loss,
        optimizer: Optimizer,
        communicator,
        seed: int = 0,
        *,
        node_memory: str = "auto",
        overlap: str = "auto",
        bucket: float = 25.0,
        first_bucket: float = 1.0,
        limit: float = 300.0,
    ):
        check_bucketing(bucket, first_bucket, overlap)
        if node_memory not in NODE_MEMORY:
            raise ValueError(f"node_memory {node_memory!r}: expected one of {', '.join(NODE_MEMORY)}")
        self.nodes = nodes_of(communicator)
        self.why_messages = "as asked" if node_memory == "off" else why_not(self.nodes)
        if node_memory == "on" and self.why_messages:
            raise ValueError(f"gradients cannot be summed in node-shared memory: {self.why_messages}; use messages")
        if overlap == "auto" and len(set(self.nodes)) == 1:
            overlap = "none"
        self.limit = limit
        self.bucketing = {"bucket": bucket, "first": first_bucket, "overlap": overlap}
        super().__init__(network, loss, optimizer, communicator, seed)
        self.slots = self.sums.slots(optimizer.slots)
        self.told = False  # whether the sums have this step's loss and statistics
        self.sums.start(self.statistics)

    def allocate(self) -> None:
        """Flat buffers where they are summed; behind the gradients is room for the loss and the running statistics."""
        layout, dtype = self.network.layout, self.network.dtype
        tail = ALIGN + self.network.state_layout.size
        if self.why_messages:
            self.sums = Messages(self.communicator, layout, tail, dtype, self.bucketing)
        else:
            self.sums = NodeMemory(
                self.communicator, self.nodes, self.network, self.optimizer, tail, self.bucketing, self.limit
            )
        if self.sums.buckets:
            this = weakref.proxy(self)  # no cycle
            self.sums.buckets.say = lambda line: this.say(line)
        self.parameters, self.gradients = self.sums.parameters, self.sums.gradients

    @property
    def phases(self) -> tuple[tuple[str, str, bool], ...]:
        """What of a step is what, for the breakdown: ranks that share memory wait for gradients and meet in the update.

        What is made of told factors counts as update: it is made there.
        """
        more = ("wait", "sums.wait_for", False), ("communicate", "sums.meet", True)
        return DEFAULT if self.why_messages else (*DEFAULT, *more)

    def step(self, x, y, total=None):
        total = self.size_of_batch(x, total)
        common = self.run.common
        common.factors = self.sums.begin(None if self.parts else self.place(len(x), total), total)
        self.told, common.ready = False, self.sums.ready
        try:
            return super().step(x, y, total)
        finally:
            common.ready, common.factors = None, {}

    def before_backward(self, loss):
        if self.run.common.ready:  # the last samples of this shard
            self.tell(self.loss_so_far + loss)

    def tell(self, loss: float) -> None:
        """Let loss and running statistics follow the gradients: their mean, so that replicas stay alike."""
        self.told, tail = True, self.sums.tail
        tail[:3] = loss, *self.totals(first=self.shard[0] == 0)
        if self.statistics.size:
            np.divide(self.statistics, self.shard[1], out=tail[ALIGN:])
        self.sums.told()

    def combine(self, loss: float) -> float:
        """Sum what was told, and the gradients."""
        if not self.told:  # there were no samples
            self.tell(loss)
        self.sums.sum()
        summed = self.sums.summed_tail
        self.refuse_other_totals(float(summed[1]) / self.shard[1], float(summed[2]))
        if self.statistics.size:
            self.statistics[:] = summed[ALIGN:]
        return float(summed[0])

    def update(self) -> None:
        """Update all parameters, or this rank's share of those in node-shared memory."""
        self.sums.update(self.optimizer, self.steps)

    def rescale(self, slot, factor):
        """In node-shared memory each rank has its share to do, and none reads on before all are done."""
        if self.why_messages:
            return super().rescale(slot, factor)
        self.slots[slot][self.sums.share] *= factor
        return self.sums.meet("the correction of momentum")

    def replicated(self):
        """In node-shared memory on one node there is one array of parameters: only statistics can differ."""
        for name, array in super().replicated():
            if self.why_messages or name.startswith("state/") or len(set(self.nodes)) > 1:
                yield name, array

    def memory(self):
        return super().memory() | ({} if self.why_messages else {"in transit": self.sums.factors.nbytes})

    def describe(self) -> str:
        """How gradients are summed and why, for the log."""
        return self.sums.describe() + (f" ({self.why_messages})" if self.why_messages else "")

    def close(self) -> None:
        self.sums.close()
