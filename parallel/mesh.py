"""Who is whose peer: the ranks that share every global batch (the axis "data"), among all ranks of a run.

Without a communicator there is one process, and what it asks all ranks it asks itself: so nothing else need know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nn.core.run import Group


class ReplicaError(RuntimeError):
    """Ranks that should hold the same do not; the message says which and what."""


class Ranks(Group):
    """The ranks of a communicator, as layers see them."""

    def __init__(self, communicator):
        from mpi4py import MPI  # which one process does without

        self.communicator, self.rank, self.size = communicator, communicator.rank, communicator.size
        self.in_place, self.max = MPI.IN_PLACE, MPI.MAX

    def sum(self, array):
        self.communicator.Allreduce(self.in_place, array)

    def maximum(self, array):
        self.communicator.Allreduce(self.in_place, array, self.max)

    def gather(self, array):
        out = np.empty((self.size, *array.shape), array.dtype)
        self.communicator.Allgather(np.ascontiguousarray(array), out)
        return out


class Mesh:
    """The ranks of a run and their axes (collective).

    Parameters
    ----------
    communicator : collectives.Communicator or None
    workers : sequence of int or None
        The ranks on the axis "data", which compute gradients; None for all.

    Attributes
    ----------
    rank, size : int
        Of this process among all.
    index, count : int
        Of this rank on the axis "data"; the index of a rank that is not on it is None.
    data : collectives.Communicator or None
        Of the ranks on that axis.
    """

    def __init__(self, communicator=None, workers: Sequence[int] | None = None):
        self.communicator, self.made = communicator, []
        if communicator:
            from mpi4py.MPI import IN_PLACE  # which one process does without

            self.in_place = IN_PLACE
        self.rank, self.size = (communicator.rank, communicator.size) if communicator else (0, 1)
        workers = range(self.size) if workers is None else workers
        self.index, self.count = workers.index(self.rank) if self.rank in workers else None, len(workers)
        self.data = self.group(workers) if communicator else None

    def group(self, ranks: Sequence[int]):
        """A communicator of these ranks, which goes with the mesh; None on the others (collective)."""
        if len(ranks) == self.size:
            return self.communicator
        made = self.communicator.Split(self.rank in ranks)
        self.made.append(made)
        return made if self.rank in ranks else None

    def sum(self, array: np.ndarray) -> None:
        """Sum an array over the ranks on the axis "data", in place."""
        if self.data:
            self.data.Allreduce(self.in_place, array)

    def sum_all(self, array: np.ndarray) -> None:
        """Sum an array over all ranks, in place."""
        if self.communicator:
            self.communicator.Allreduce(self.in_place, array)

    def allgather(self, item) -> list:
        """What every rank has."""
        return self.communicator.allgather(item) if self.communicator else [item]

    def bcast(self, item):
        """What rank 0 has."""
        return self.communicator.bcast(item) if self.communicator else item

    def agree(self, mine: dict[str, object]) -> None:
        """Compare what every rank has been given, by name; see `agree`."""
        if self.communicator:
            agree(self.communicator, mine)

    def close(self) -> None:
        """Free the communicators that were made here (collective)."""
        for communicator in self.made:
            communicator.Free()
        self.made = []


def agree(communicator, mine: dict[str, object]) -> None:
    """Compare what every rank has been given, by name (collective).

    Raises
    ------
    ReplicaError
        On every rank: what the ranks disagree on, and what two of them have.
    """
    everyone = communicator.allgather(mine)
    for key, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(key) != value:
                raise ReplicaError(f"ranks disagree on the {key}: rank 0: {value}, rank {rank}: {theirs.get(key)}")
