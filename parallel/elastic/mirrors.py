"""Copies of what each rank alone has, with a neighbour: sharded state survives the loss of any rank.

Every so many steps each rank copies what it keeps, and gives the next rank a copy. Where ranks die, all go back to the
last copies of which every part is there, and make the steps since then again, which have the same bits. Two copies are
kept, as a death may interrupt the newest. Where neighbours die at once, all go on from the last checkpoint instead.

Cost: every so many steps a copy and a message of 3 Psi/N elements (Adam), twice two copies of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from nn.training.fit import Training
from parallel.exchange.base import Exchange

KEPT = 2


class Copy(NamedTuple):
    """What two ranks had after a step.

    Attributes
    ----------
    key : (step, generation)
    rank, ranks : int
        Of this process, then.
    mine, before : flat arrays
        All that this rank kept, and the one before it.
    small : dict of arrays
        What every rank has of the state.
    progress : dict
    """

    key: tuple[int, int]
    rank: int
    ranks: int
    mine: np.ndarray
    before: np.ndarray
    small: dict[str, np.ndarray]
    progress: dict

    @property
    def holds(self) -> dict[int, np.ndarray]:
        """Whose parts are here."""
        return {(self.rank - 1) % self.ranks: self.before, self.rank: self.mine}


class Mirrors:
    """The copies that this rank has.

    Parameters
    ----------
    every : int
        Steps between two of them; 0 for none.
    """

    def __init__(self, every: int):
        self.every = every
        self.copies: list[Copy] = []

    def take(self, training: Training, progress: dict, generation: int) -> None:
        """Copy what every rank has now (collective)."""
        trainer = training.trainer
        communicator = trainer.communicator
        rank, ranks = communicator.rank, communicator.size
        mine = np.concatenate([np.ravel(array) for _, array in trainer.exchange.kept()])
        before = np.empty_like(mine)
        communicator.Sendrecv(mine, (rank + 1) % ranks, 0, before, (rank - 1) % ranks, 0)
        small = {name: array.copy() for name, array in trainer.small()} | {"steps": np.array(trainer.steps)}
        key = trainer.steps, generation
        self.copies = [*self.copies, Copy(key, rank, ranks, mine, before, small, progress)][-KEPT:]

    def whole(self, comm: MPI.Intracomm) -> Copies | None:
        """The latest copies of which every rank's part is there; None if there are none (collective)."""
        told = comm.allgather([(copy.key, copy.ranks, list(copy.holds)) for copy in self.copies])
        holders: dict[tuple, dict[int, int]] = {}
        sizes = {}
        for rank, copies in reversed(list(enumerate(told))):  # the first of those that have it
            for key, ranks, held in copies:
                sizes[key] = ranks
                holders.setdefault(key, {}).update(dict.fromkeys(held, rank))
        key = max((key for key, found in holders.items() if len(found) == sizes[key]), default=None)
        if key is None:
            return None
        copy = next((copy for copy in self.copies if copy.key == key), None)
        source = holders[key][0]
        facts = (copy.progress, copy.small, copy.mine.dtype.str, len(copy.mine)) if copy else None
        progress, small, dtype, length = comm.bcast(facts, source)
        parts = []
        for part, holder in sorted(holders[key].items()):  # the first rank gets all
            held = copy.holds[part] if comm.rank == holder else None
            if comm.rank == 0 != holder:
                comm.Recv([held := np.empty(length, dtype), MPI.BYTE], holder)
            elif comm.rank == holder != 0:
                comm.Send([held, MPI.BYTE], 0)
            parts.append(held)
        return Copies(key[0], progress, small, parts if comm.rank == 0 else [])


class Copies(NamedTuple):
    """All parts of a sharded state after a step: on the first rank; elsewhere none."""

    step: int
    progress: dict
    small: dict[str, np.ndarray]
    parts: list[np.ndarray]

    def state(self, exchange: Exchange) -> dict[str, np.ndarray]:
        """The state, as an exchange of other ranks loads it."""
        return exchange.joined(self.parts) | self.small if self.parts else {}
