"""Messages of compressed gradients on a communicator, with the bytes on the wire counted (traffic.py)."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from parallel.reports.traffic import Traffic

KEPT = 8  # lengths of messages whose memory is kept: a method has one or two at a time


class Wire:
    """Messages of bytes between all ranks.

    Parameters
    ----------
    communicator : collectives.Communicator
    parts : the same, or None
        Of the ranks with other parts of the same tensors: what is whole on each has to be rounded alike.

    Attributes
    ----------
    traffic : Traffic
        `traffic.total` is the number of bytes that this rank has had to send so far.
    """

    def __init__(self, communicator, parts=None):
        self.traffic, self.parts = Traffic(communicator), parts
        self.rank, self.size = communicator.rank, communicator.size
        self._blocks: dict[int, np.ndarray] = {}  # of messages of one length: where those of all ranks come
        self._buffer = np.empty(0, np.uint8)  # of messages of different lengths

    def allreduce(self, array: np.ndarray) -> None:
        """Sum an array over all ranks, in place."""
        self.traffic.Allreduce(MPI.IN_PLACE, array)

    def maximum(self, array: np.ndarray) -> None:
        """Replace an array by its maximum over all ranks, in place."""
        self.traffic.Allreduce(MPI.IN_PLACE, array, MPI.MAX)
        if self.parts:
            self.parts.Allreduce(MPI.IN_PLACE, array, MPI.MAX)

    def alltoall(self, mine: np.ndarray, theirs: np.ndarray) -> None:
        """Row i of `mine` goes to rank i, into row `rank` of its `theirs`."""
        self.traffic.Alltoall(mine, theirs)

    def allgather(self, message: np.ndarray) -> list[np.ndarray]:
        """Messages of all ranks, bytes of one length; valid until the next call."""
        blocks = self._blocks.get(len(message))
        if blocks is None:
            if len(self._blocks) == KEPT:
                self._blocks.clear()
            blocks = self._blocks[len(message)] = np.empty((self.size, len(message)), np.uint8)
        blocks[self.rank] = message
        self.traffic.Allgather(MPI.IN_PLACE, blocks)
        return list(blocks)

    def allgather_varying(self, message: np.ndarray) -> list[np.ndarray]:
        """Gather messages of different lengths, each a multiple of 8 bytes: the lengths travel first."""
        lengths = self.allgather(np.array([len(message)], np.int64).view(np.uint8))
        counts = [int(length.view(np.int64)[0]) for length in lengths]
        ends = np.cumsum([0, *counts]).tolist()
        if len(self._buffer) < ends[-1]:
            self._buffer = np.empty(2 * ends[-1], np.uint8)
        blocks = [self._buffer[lo : lo + count] for lo, count in zip(ends, counts, strict=False)]
        blocks[self.rank][:] = message
        self.traffic.Allgatherv(MPI.IN_PLACE, [self._buffer, counts, ends[:-1], MPI.BYTE])
        return blocks
