"""Data parallelism: every rank holds the whole network and takes its part of every batch.

One allreduce sums the gradients; every rank makes the same update. So all ranks hold the same parameters, bit for bit,
and these are what one process would compute with the whole batch, up to rounding. Source: Li et al. 2020 (PyTorch
DistributedDataParallel). Cost of a step over one process's: one allreduce of the parameters' size.
"""

from __future__ import annotations

import numpy as np
from mpi4py.MPI import IN_PLACE

from nn.layout import ALIGN
from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from parallel.synchronous import Synchronous


class DistributedDataParallel(Synchronous):
    """`Serial` on many ranks; one line of a program differs. Parameters are those of Synchronous."""

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, communicator, seed: int = 0):
        super().__init__(network, loss, optimizer, communicator, seed)
        communicator.Bcast(self.parameters, root=0)
        communicator.Bcast(self.statistics, root=0)

    def allocate(self) -> None:
        """Gradients, behind them the loss, and behind that running statistics: one message carries all."""
        super().allocate()
        size = self.network.layout.size
        self.message = np.zeros(size + ALIGN + self.network.state_layout.size, self.network.dtype)
        self.gradients = self.message[:size]
        self.message_loss, self.message_statistics = self.message[size : size + 1], self.message[size + ALIGN :]

    def combine(self, loss: float) -> float:
        """Sum gradients and loss; take the mean of the ranks' running statistics, so that replicas stay alike."""
        self.message_loss[0] = loss
        np.divide(self.statistics, self.shard[1], out=self.message_statistics)
        self.communicator.Allreduce(IN_PLACE, self.message)
        self.statistics[:] = self.message_statistics
        return float(self.message_loss[0])
