"""Sums of compressed gradients: all ranks get all messages, or one rank gets those of its part of the sum."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.failures.unfinished import keep_alive
from nn.core.layout import Layout, Region
from parallel.mesh import Mesh
from parallel.state.placed import Partial, PlacedArray
from parallel.sync.base import GradientSync
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.wire import Wire
from parallel.sync.step_result import StepMessage, head_elements

PREFIX = "compress/"
TAG = 7  # of compressed gradients


class Compressed(GradientSync):
    """Every rank has all parameters; gradients are summed as the method says, loss and statistics as they are.

    Parameters
    ----------
    compressor : Compressor
        Not attached yet.

    Attributes
    ----------
    wire : Wire
        Its `traffic` counts the bytes of all steps.
    """

    def __init__(self, compressor: Compressor):
        self.compressor = compressor

    def allocate(self):
        self.compressor.check(self.optimizer)
        super().allocate()
        self.compressor.attach(self.region, self.dtype, self.seed, (self.mesh.index, self.mesh.count))
        self.memories = Memories(self.mesh, self.layout, self.compressor.memory, self.compressor.shared)
        self.wire, self.reductions = Wire(self.mesh.communicator, self.parts), 0
        head = head_elements(self.addends, np.float64)
        self.together = np.zeros(head + len(self.buffers))
        self.message = self.summed = StepMessage(self.together[:head], self.together[head:], self.addends)

    def finish_step(self):
        """A step that will not be made leaves what the method keeps as it is."""
        self.wire.allreduce(self.together)
        result = self.summed.result()
        refused = np.array([result.overflowed or not result.agreed or not math.isfinite(result.loss)], np.float64)
        self.sum_parts(refused)  # parts of an array are compressed together, and a value may have overflowed in one
        if not refused[0]:
            self.compressor.reduce(self.gradients, self.wire, self.step)
            self.reductions += 1
        return result

    def set_epoch_steps(self, steps):
        self.compressor.set_epoch_steps(steps)

    def bytes_sent(self):
        size = self.mesh.count
        total = self.mesh.communicator.allreduce(self.wire.traffic.total)
        dense = 2 * (self.gradients.nbytes + self.together.nbytes) * (size - 1) / size
        return {"bytes_sent": total / size / max(1, self.reductions), "bytes_dense": dense}

    def placed(self):
        yield from super().placed()
        yield from self.memories.placed()

    def describe(self):
        return repr(self.compressor)


class Memories(NamedTuple):
    """The memory of a method from step to step.

    Attributes
    ----------
    mesh : Mesh
    layout : Layout
    flat : dict of flat arrays
        Of this rank, in the layout: what it has left out. None on a rank that computes no gradients.
    shared : dict of arrays
        Alike on all ranks.
    """

    mesh: Mesh
    layout: Layout
    flat: Mapping[str, np.ndarray | None]
    shared: Mapping[str, np.ndarray]

    def placed(self) -> Iterator[PlacedArray]:
        """Yield the memory as a sum over ranks: on another number of ranks the first one takes all of it."""
        for name, array in self.shared.items():
            yield PlacedArray(PREFIX + name, "moments", array)
        for name, array in self.flat.items():
            if array is not None:
                addend = Partial(self.mesh.index, self.mesh.count)
                yield PlacedArray(PREFIX + name, "moments", array, self.layout, addend)


class CompressedReduceScatter:
    """A vector in pieces, each of which one rank keeps: messages of all ranks go there, and are added in rank order.

    Parameters
    ----------
    communicator : collectives.Communicator
    compressor : Compressor
        Not attached; one with messages of single ranks.
    regions : sequence of Region
        The pieces.
    hosts, senders : sequences of int
        The rank that keeps each piece; those that have gradients.
    dtype, seed
        As for Compressor.attach.
    maximum : callable or None
        As for Compressor.encode.
    """

    def __init__(
        self,
        communicator,
        compressor: Compressor,
        regions: Sequence[Region],
        hosts: Sequence[int],
        senders: Sequence[int],
        dtype,
        seed: int,
        maximum=None,
    ):
        self.communicator, self.hosts, self.senders, self.maximum = communicator, hosts, senders, maximum

        def attached(region: Region, i: int) -> Compressor:
            return copy.copy(compressor).attach(region, dtype, seed, (i, len(senders)))

        rank = communicator.rank
        self.encoders = [attached(region, senders.index(rank)) for region in regions] if rank in senders else []
        self.decoder = attached(regions[hosts.index(rank)], 0) if rank in hosts else None
        self.sent = 0  # bytes

    def reduce(self, pieces: Sequence[np.ndarray], out: np.ndarray | None, step: int) -> None:
        """out += what the messages of all ranks stand for, in the piece that this rank keeps (collective)."""
        rank, mine, requests, planner = self.communicator.rank, None, {}, self.communicator.planner
        for host, piece, encoder in zip(self.hosts, pieces, self.encoders, strict=bool(self.encoders)):
            message = encoder.encode(piece, step, self.maximum)
            if host == rank:
                mine = message
            else:
                requests[host] = self.communicator.Isend(message, host, TAG)
                self.sent += message.nbytes
        try:
            for sender in self.senders if self.decoder else ():
                self.decoder.decode(mine if sender == rank else self._receive(sender), out)
            for host, request in requests.items():
                planner.wait_for(request, f"to send compressed gradients to rank {host}")
        except BaseException:
            keep_alive(requests.values())
            raise

    def _receive(self, sender: int) -> np.ndarray:
        """A message, whatever its length."""
        communicator, status = self.communicator, MPI.Status()
        arrived = partial(communicator.Iprobe, sender, TAG, status)
        communicator.planner.wait_until(arrived, f"for the compressed gradients of rank {sender}")
        message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        communicator.Recv(message, sender, TAG)
        return message

    def set_epoch_steps(self, steps: int) -> None:
        for encoder in self.encoders:
            encoder.set_epoch_steps(steps)
