"""Partner checkpoints: each rank's part of the state is copied to a neighbour, and survives the loss of any rank.

Every so many steps each rank copies its fragments of the state, those that it would write into a checkpoint, and gives
the next rank a copy: shards, stages, parts of tensors, a server's slice. Where ranks die, all go back to the last
copies of which every part is there, and make the steps since then again, which have the same bits. Two copies are kept,
as a death may interrupt the newest. Where neighbours die at once, all go on from the last checkpoint instead.

Cost: every so many steps a copy and a message of 3 Psi/N elements (Adam), twice two copies of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from nn.training.fit import Training
from parallel.state.fragments import Fragment, GatheredFragments

KEPT = 2


class RankFragments(NamedTuple):
    """Fragments of one rank, as bytes one after the other.

    Attributes
    ----------
    kinds : list of (Fragment without elements, number of elements)
    data : array of bytes
    """

    kinds: list[tuple[Fragment, int]]
    data: np.ndarray

    @classmethod
    def of(cls, fragments: Iterable[Fragment]) -> RankFragments:
        """Copy some fragments."""
        kinds, arrays = [], []
        for each in fragments:
            shape = each.array.shape if each.shape is None else each.shape
            kinds.append((replace(each, array=np.empty(0, each.array.dtype), shape=shape), each.array.size))
            arrays.append(np.ravel(each.array).view(np.uint8))
        return cls(kinds, np.concatenate(arrays) if arrays else np.empty(0, np.uint8))

    def fragments(self) -> Iterator[Fragment]:
        """Return the fragments."""
        at = 0
        for each, elements in self.kinds:
            end = at + elements * each.array.itemsize
            yield replace(each, array=self.data[at:end].view(each.array.dtype))
            at = end


class PartnerCheckpoint(NamedTuple):
    """The parts of two ranks after a step.

    Attributes
    ----------
    key : (step, generation)
    rank, ranks : int
        Of this process, then.
    mine, before : RankFragments
        Of this rank, and of the one before it.
    progress : dict
    """

    key: tuple[int, int]
    rank: int
    ranks: int
    mine: RankFragments
    before: RankFragments
    progress: dict

    @property
    def holds(self) -> dict[int, RankFragments]:
        """Return the parts that are here, by rank."""
        return {(self.rank - 1) % self.ranks: self.before, self.rank: self.mine}


class PartnerCheckpoints:
    """The partner checkpoints that this rank has.

    Parameters
    ----------
    every : int
        Steps between two of them; 0 for none.
    """

    def __init__(self, every: int):
        self.every = every
        self.copies: list[PartnerCheckpoint] = []

    def copy(self, training: Training, progress: dict, generation: int) -> None:
        """Copy the parts of all ranks to their neighbours (collective)."""
        trainer = training.trainer
        communicator = trainer.communicator
        rank, ranks = communicator.rank, communicator.size
        after, first = (rank + 1) % ranks, (rank - 1) % ranks
        mine = RankFragments.of(trainer.fragments())
        known = self.copies[-1] if self.copies and self.copies[-1].key[1] == generation else None
        # What they are stays the same as long as the ranks do.
        kinds = known.before.kinds if known else communicator.sendrecv(mine.kinds, after, source=first)
        before = RankFragments(kinds, np.empty(sum(size * each.array.itemsize for each, size in kinds), np.uint8))
        communicator.Sendrecv(mine.data, after, 0, before.data, first, 0)
        self.copies = [
            *self.copies,
            PartnerCheckpoint((trainer.steps, generation), rank, ranks, mine, before, progress),
        ][-KEPT:]

    def latest(self, comm: MPI.Intracomm) -> RestoredState | None:
        """Return the latest state of which every part is left; None if there is none (collective)."""
        everyone = comm.allgather([(copy.key, copy.ranks, list(copy.holds)) for copy in self.copies])
        holders: dict[tuple, dict[int, int]] = {}
        sizes = {}
        for rank, copies in reversed(list(enumerate(everyone))):  # the first of those that have it
            for key, ranks, held in copies:
                sizes[key] = ranks
                holders.setdefault(key, {}).update(dict.fromkeys(held, rank))
        key = max((key for key, found in holders.items() if len(found) == sizes[key]), default=None)
        if key is None:
            return None
        copy = next((copy for copy in self.copies if copy.key == key), None)
        progress = comm.bcast(copy.progress if copy else None, holders[key][0])
        parts = []
        for number, holder in sorted(holders[key].items()):  # the first rank gets all
            if comm.rank == 0 != holder:
                kinds, size = comm.recv(source=holder)
                comm.Recv(data := np.empty(size, np.uint8), holder)
                parts.append(RankFragments(kinds, data))
            elif comm.rank == holder:
                part = copy.holds[number]
                if holder:
                    comm.send((part.kinds, part.data.size), 0)
                    comm.Send(part.data, 0)
                parts.append(part)
        return RestoredState(key[0], progress, parts if comm.rank == 0 else [])


class RestoredState(NamedTuple):
    """All parts of a state after a step, on the first rank; none on the others."""

    step: int
    progress: dict
    parts: list[RankFragments]

    def state(self) -> dict[str, np.ndarray]:
        """Return the state, as any trainer loads it from its first rank."""
        return dict(GatheredFragments(part.fragments() for part in self.parts))
