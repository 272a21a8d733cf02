"""The ranks of one replica that compute layers together: the first of them is the worker that servers know.

What each has in parts the first puts together as one whole vector before it pushes, and what it has read it deals out.
What is not cut is whole on every rank: it is pushed as the first one has it, and dealt with the rest, so that it never
drifts apart. Whether something has come the first one decides, and tells the others in the same step.

Cost for n bytes on t ranks: (t-1)/t n beta at the first one for a push, as much for a read, and alpha a step.
"""

from __future__ import annotations

import numpy as np

from nn.core.network import Network
from nn.core.parts import inside

TAG = 13  # of parts; what they are the order of messages says


class Replica:
    """One of these ranks.

    Parameters
    ----------
    ranks : collectives.Communicator
        All of them, in the order of their parts.
    network : Network
        Of this one's part.

    Attributes
    ----------
    first : bool
        Whether this rank is the worker.
    whole : flat array
        Of the first one, in the layout of whole arrays: what is pushed, and then what was read.
    """

    def __init__(self, ranks, network: Network):
        self.ranks, self.first = ranks, ranks.rank == 0
        self.part, self.layout, dtype = network.layout, network.whole, network.dtype
        self.whole = np.zeros(self.layout.size if self.first else 0, dtype)
        self.rooms = [self.part.zeros(dtype) for _ in range(ranks.size - 1) if self.first]  # of the others, in order
        self.told = np.zeros(2)

    def join(self, mine: np.ndarray) -> np.ndarray:
        """The whole vector of what each has, on the first rank; elsewhere its own (collective)."""
        if not self.first:
            self.ranks.Send(mine, 0, TAG)
            return mine
        for i, room in enumerate(self.rooms, 1):
            self.ranks.Recv(room, i, TAG)
        for name, array in self.layout.items(self.whole):
            place, spec = self.part.slices[name], self.layout.specs[name]
            if spec.split is None:
                array[...] = mine[place].reshape(spec.shape)
                continue
            for i, part in enumerate((mine, *self.rooms)):
                there = inside(name, spec, array, i, self.ranks.size)
                there[...] = part[place.start : place.start + there.size].reshape(there.shape)
        return self.whole

    def deal(self, mine: np.ndarray) -> None:
        """Each takes its own of the first one's whole vector (collective)."""
        if not self.first:
            self.ranks.Recv(mine, 0, TAG)
            return
        for i, room in enumerate(self.rooms, 1):
            self.take(self.whole, room, i)
            self.ranks.Send(room, i, TAG)
        self.take(self.whole, mine, 0)

    def take(self, whole: np.ndarray, part: np.ndarray, index: int | None = None) -> None:
        """Write the part with this number, or this rank's, of a whole vector."""
        index = self.ranks.rank if index is None else index
        for name, array in self.layout.items(whole):
            start, spec = self.part.slices[name].start, self.layout.specs[name]
            mine = array if spec.split is None else inside(name, spec, array, index, self.ranks.size)
            part[start : start + mine.size].reshape(mine.shape)[...] = mine

    def tell(self, *flags: bool) -> list[bool]:
        """The first one's, on all (collective)."""
        self.told[:] = flags
        self.ranks.Bcast(self.told, root=0)
        return [bool(flag) for flag in self.told]

    @property
    def nbytes(self) -> int:
        """Of the whole vector, and of room for the others' parts."""
        return self.whole.nbytes + sum(room.nbytes for room in self.rooms)
