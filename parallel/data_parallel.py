"""Data parallelism: every rank holds the whole network and takes its part of every batch.

Each rank computes the gradient of its samples, divided by the size of the *global* batch; one allreduce sums them;
every rank makes the same update. So all ranks hold the same parameters, bit for bit, and these are what one process
would compute with the whole batch, up to rounding. Source: Li et al. 2020 (PyTorch DistributedDataParallel).
Cost of a step over one process's: one allreduce of the parameters' size.
"""

from __future__ import annotations

import hashlib

import numpy as np
from mpi4py.MPI import IN_PLACE

from collectives.steps import part
from nn.layout import ALIGN
from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from nn.training import Serial


class ReplicaError(RuntimeError):
    """Ranks that should hold the same do not; the message says which and what."""


class DistributedDataParallel(Serial):
    """`Serial` on many ranks; one line of a program differs.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Serial, alike on all ranks.
    communicator : collectives.Communicator
        Its ranks share every global batch.

    Raises
    ------
    ReplicaError
        If ranks were given different networks, losses or optimizers.
    """

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, communicator, seed: int = 0):
        self.communicator = communicator
        self.shard = (communicator.rank, communicator.size)
        self._agree(network, loss, optimizer, seed)
        super().__init__(network, loss, optimizer, seed)
        communicator.Bcast(self.parameters, root=0)
        communicator.Bcast(self.statistics, root=0)
        self.run.common.all_sum = self.all_sum

    def allocate(self) -> None:
        """Gradients, behind them the loss, and behind that running statistics: one message carries all."""
        super().allocate()
        size = self.network.layout.size
        self.message = np.zeros(size + ALIGN + self.network.state_layout.size, self.network.dtype)
        self.gradients = self.message[:size]
        self.message_loss, self.message_statistics = self.message[size : size + 1], self.message[size + ALIGN :]

    def compute_gradients(self, x, y, total):
        self.run.common.sample = part(total, self.shard[1], self.shard[0])[0]
        return super().compute_gradients(x, y, total)

    def combine(self, loss: float) -> float:
        """Sum gradients and loss; take the mean of the ranks' running statistics, so that replicas stay alike."""
        self.message_loss[0] = loss
        np.divide(self.statistics, self.shard[1], out=self.message_statistics)
        self.communicator.Allreduce(IN_PLACE, self.message)
        self.statistics[:] = self.message_statistics
        return float(self.message_loss[0])

    def first_bad(self, x):
        """Every rank looks at its own samples; all return the finding of the first rank that has one."""
        found = self.communicator.allgather(super().first_bad(x))
        return next((f"{place} on rank {rank}" for rank, place in enumerate(found) if place), "")

    def all_sum(self, array: np.ndarray) -> None:
        """Sum an array over all ranks, in place."""
        self.communicator.Allreduce(IN_PLACE, array)

    def sum(self, values):
        total = np.array(values, np.float64)
        self.all_sum(total)
        return total

    def check_replicas(self) -> None:
        """Compare the parameters of all ranks, bit for bit, by their hashes.

        Raises
        ------
        ReplicaError
            On every rank: the first parameter that differs, and on which ranks.
        """
        mine = {name: _digest(array) for name, array in self.network.layout.items(self.parameters)}
        everyone = self.communicator.allgather(mine)
        for name in reversed(mine):  # in forward order: the first to differ is nearest to the cause
            differing = [r for r, digests in enumerate(everyone) if digests[name] != everyone[0][name]]
            if differing:
                raise ReplicaError(f"step {self.steps}: parameter {name} on ranks {differing} differs from rank 0's")

    def _agree(self, network: Network, loss: Loss, optimizer: Optimizer, seed: int) -> None:
        """Refuse to start where ranks differ: the sizes of messages would not match."""
        shapes = {name: spec.shape for name, spec in network.layout.specs.items()}
        mine = {
            "network": f"{network.in_shape} -> {network.out_shape}, parameters {shapes}",
            "dtype": str(network.dtype),
            "loss": repr(loss),
            "optimizer": repr(optimizer),
            "seed": seed,
        }
        everyone = self.communicator.allgather(mine)
        for key, value in everyone[0].items():
            for rank, theirs in enumerate(everyone):
                if theirs[key] != value:
                    raise ReplicaError(f"ranks disagree on the {key}: rank 0: {value}, rank {rank}: {theirs[key]}")


def _digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array)).digest()
