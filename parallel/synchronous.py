"""What all synchronous data-parallel strategies share: one global batch a step, cut among the ranks.

Each rank computes the gradient of its samples, divided by the size of the *global* batch, so that the sum over ranks is
the gradient of the batch, uneven parts included. A strategy says how the sum is made (`combine`), who updates what
(`update`), and where parameters, gradients and moments live (`allocate`).
"""

from __future__ import annotations

import hashlib

import numpy as np
from mpi4py.MPI import IN_PLACE

from collectives.steps import part
from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from nn.training import Serial


class ReplicaError(RuntimeError):
    """Ranks that should hold the same do not; the message says which and what."""


class Synchronous(Serial):
    """`Serial` on many ranks; base of the strategies.

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
        self.run.common.all_sum = self.all_sum

    def first_sample(self, total):
        return part(total, self.shard[1], self.shard[0])[0]

    def first_bad(self, x):
        """Every rank looks at its own samples; all return one finding: an input comes before what is made of it."""
        common = self.run.common
        # In training, ranks that share statistics would wait for one that has found something and looks no further.
        common.training = not self.everyone
        found = self.communicator.allgather(self.look(x))
        places = sorted((not place.startswith("the input"), rank, place) for rank, place in enumerate(found) if place)
        return f"{places[0][2]} on rank {places[0][1]}" if places else ""

    def look(self, x: np.ndarray) -> str:
        """What `first_bad` finds on this rank."""
        return super().first_bad(x)

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
