"""The ranks of one replica that have a network together: the first of them is the worker that servers know.

The first rank gathers the parts of all, stages or parts of tensors, into one whole vector before it pushes, and
scatters what it has read. An array that several ranks have whole (a tensor that is not cut, or to which layers of two
stages are tied) is pushed as one of them has it, and scattered with the rest, so that all copies stay equal. The first
rank decides whether answers have come, and broadcasts that in the same step.

Cost for n bytes on r ranks: (r-1)/r n beta at the first one for a push, as much for a read, and alpha a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nn.core.layout import Layout
from nn.core.network import Network
from parallel.mesh import Mesh
from parallel.state.splits import Split, inside, split_of, whole_specs, with_split

TAG = 13  # of parts; what they are the order of messages says


class ArrayPart(NamedTuple):
    """The part of an array that a rank has.

    Attributes
    ----------
    start : int
        Its first element in the rank's vector.
    split : Split or None
        How the array is cut; None: the rank has all of it.
    is_pushed : bool
        Whether this rank's values are pushed.
    """

    name: str
    start: int
    split: Split | None
    is_pushed: bool


class ReplicaRanks:
    """One of these ranks.

    Parameters
    ----------
    mesh : Mesh
        With an axis "pipeline", or "tensor", or both.
    network : Network
        What this rank holds.
    layout : Layout
        Of the whole network.

    Attributes
    ----------
    ranks : collectives.Communicator
        All of them, stage by stage and in these in the order of their parts.
    first : bool
        Whether this rank is the worker.
    whole : flat array
        Of the first one, in the layout of whole arrays: what is pushed, and then what was read.
    """

    def __init__(self, mesh: Mesh, network: Network, layout: Layout):
        self.ranks, self.layout, self.count = mesh.model, layout, mesh.sizes["tensor"]
        self.first, index = self.ranks.rank == 0, mesh.places["tensor"]
        own, specs = network.layout, whole_specs(network)
        mine = [
            ArrayPart(name, place.start, split, name not in own.borrowed and (split is not None or index == 0))
            for name, place in own.slices.items()
            for split in (split_of(specs[name]) if self.count > 1 else None,)
        ]
        self.pieces, sizes = zip(*self.ranks.allgather((mine, own.size)), strict=True)
        self.whole = np.zeros(layout.size if self.first else 0, network.dtype)
        self.parts = [np.zeros(size, network.dtype) for size in sizes[1:] if self.first]  # of the others, in order
        self.flags = np.zeros(2)

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """Return the whole vector on the first rank, elsewhere the rank's own (collective)."""
        if not self.first:
            self._send(mine, 0)
            return mine
        for i, part in enumerate(self.parts, 1):
            self._receive(part, i)
        for i, part in enumerate((mine, *self.parts)):
            for piece, there, here in self.pairs(self.whole, part, i):
                if piece.is_pushed:
                    there[...] = here
        return self.whole

    def scatter(self, mine: np.ndarray) -> None:
        """Give every rank its part of the first rank's whole vector (collective)."""
        if not self.first:
            self._receive(mine, 0)
            return
        for i, part in enumerate(self.parts, 1):
            self.write_part(self.whole, part, i)
            self._send(part, i)
        self.write_part(self.whole, mine, 0)

    def _send(self, array: np.ndarray, rank: int) -> None:
        self.ranks.planner.wait_for(self.ranks.Isend(array, rank, TAG), f"to send its part of a replica to rank {rank}")

    def _receive(self, array: np.ndarray, rank: int) -> None:
        self.ranks.planner.wait_for(self.ranks.Irecv(array, rank, TAG), f"for the part of a replica of rank {rank}")

    def write_part(self, whole: np.ndarray, part: np.ndarray, index: int | None = None) -> None:
        """Write the part of a whole vector that the rank with this number, by default this one, has."""
        for _, there, here in self.pairs(whole, part, self.ranks.rank if index is None else index):
            here[...] = there

    def pairs(
        self, whole: np.ndarray, part: np.ndarray, index: int
    ) -> Iterator[tuple[ArrayPart, np.ndarray, np.ndarray]]:
        """Yield every piece of a rank, with its views in a whole vector and in the rank's vector."""
        for piece in self.pieces[index]:
            name, spec = piece.name, self.layout.specs[piece.name]
            there = whole[self.layout.slices[name]].reshape(spec.shape)
            if piece.split is not None:
                there = inside(name, with_split(spec, piece.split), there, index % self.count, self.count)
            yield piece, there, part[piece.start : piece.start + there.size].reshape(there.shape)

    def broadcast(self, *flags: bool) -> list[bool]:
        """Return the first rank's flags on all ranks (collective)."""
        self.flags[:] = flags
        self.ranks.Bcast(self.flags, root=0)
        return [bool(flag) for flag in self.flags]
