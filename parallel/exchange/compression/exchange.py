"""How compressed gradients meet: all ranks get all messages, or each message goes to who keeps that part of the sum."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from mpi4py import MPI

from nn.core.layout import Layout, Region
from parallel.exchange.base import Exchange
from parallel.exchange.compression.base import Compressor
from parallel.exchange.compression.wire import Wire
from parallel.exchange.step_result import StepMessage, head_elements
from parallel.mesh import Mesh

PREFIX = "compress/"
TAG = 7  # of compressed gradients


class Compressed(Exchange):
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
        self.mesh.agree({"compression": repr(self.compressor)})
        super().allocate()
        self.compressor.attach(self.region, self.dtype, self.seed, (self.mesh.index, self.mesh.count))
        self.memories = Memories(self.mesh, self.layout, self.compressor.memory, self.compressor.shared, self.dtype)
        self.wire, self.reductions = Wire(self.mesh.communicator, self.parts), 0
        head = head_elements(self.addends, np.float64)
        self.together = np.zeros(head + len(self.buffers))
        self.message = self.summed = StepMessage(self.together[:head], self.together[head:], self.addends)

    def sum(self):
        """A step that will not be made leaves what the method keeps as it is."""
        self.wire.allreduce(self.together)
        result = self.summed.result()
        if math.isfinite(result.loss) and not result.overflowed and result.agreed:
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

    def check(self, state):
        return super().check(self.memories.completed(state))

    def kinds(self):
        return super().kinds() | self.memories.kinds()

    def state_items(self):
        yield from super().state_items()
        yield from self.memories.state_items()

    def kept(self):
        yield from super().state_items()
        yield from self.memories.kept()

    def load(self, state):
        for name, array in super().state_items():
            array[...] = state[name]
        self.memories.load(state)

    def bytes(self):
        found = super().bytes()
        return found | {"moments": found["moments"] + self.memories.nbytes}

    def describe(self):
        return repr(self.compressor)


class Memories:
    """What a method keeps from step to step, in checkpoints: a row for each rank, dealt again to other numbers of them.

    Parameters
    ----------
    mesh : Mesh
    layout : Layout
    flat : dict of flat arrays
        Of this rank, in the layout; of a rank that computes no gradients the names are enough.
    shared : dict of arrays
        Alike on all ranks.
    dtype : NumPy dtype
    """

    def __init__(self, mesh: Mesh, layout: Layout, flat: Mapping[str, np.ndarray | None], shared: Mapping, dtype):
        self.mesh, self.layout, self.flat, self.shared, self.dtype = mesh, layout, flat, shared, dtype

    @property
    def nbytes(self) -> int:
        """Bytes of what this rank keeps."""
        return sum(array.nbytes for array in (*self.flat.values(), *self.shared.values()) if array is not None)

    def kept(self) -> Iterator[tuple[str, np.ndarray]]:
        """(key in a checkpoint, array) of this rank's."""
        for name, array in self.shared.items():
            yield PREFIX + name, array
        for name, memory in self.flat.items():
            if memory is not None:
                yield from ((f"{PREFIX}{name}/{key}", array) for key, array in self.layout.items(memory))

    def state_items(self) -> Iterator[tuple[str, np.ndarray]]:
        """As `kept`, with the rows of all ranks (collective); empty where this rank computes no gradients."""
        for name, array in self.shared.items():
            yield PREFIX + name, array
        for name, memory in self.flat.items():
            for key, place in self.layout.slices.items():
                rows = np.empty(0)
                if memory is not None:
                    rows = np.empty((self.mesh.count, place.stop - place.start), memory.dtype)
                    self.mesh.data.Allgather(memory[place], rows)
                    rows = rows.reshape(-1, *self.layout.specs[key].shape)
                yield f"{PREFIX}{name}/{key}", rows

    def kinds(self) -> dict[str, tuple]:
        """Name -> (shape, dtype) of the entries."""
        kinds = {PREFIX + name: (array.shape, array.dtype) for name, array in self.shared.items()}
        for name in self.flat:
            for key, spec in self.layout.specs.items():
                kinds[f"{PREFIX}{name}/{key}"] = (self.mesh.count, *spec.shape), self.dtype
        return kinds

    def completed(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A state with as many rows as there are ranks; where not all is there that this method keeps, it begins anew.

        Where the number of ranks has changed, the first one gets the sum of all, and the others nothing: so nothing is
        lost, and all that was left out is still sent.
        """
        if not isinstance(state, Mapping):
            return state
        state, kinds = dict(state), self.kinds()
        rows = {f"{PREFIX}{name}/{key}" for name in self.flat for key in self.layout.specs}

        def fits(name: str) -> bool:
            found, (shape, dtype) = state.get(name), kinds[name]
            if not isinstance(found, np.ndarray) or found.dtype != dtype or found.ndim != len(shape):
                return False
            return found.shape[1:] == shape[1:] if name in rows else found.shape == shape

        if not all(map(fits, kinds)):
            return (
                state
                | {key: np.zeros(*kinds[key]) for key in rows}
                | {PREFIX + name: array for name, array in self.shared.items()}
            )
        return {key: deal(array, self.mesh.count) if key in rows else array for key, array in state.items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over this rank's of a state that was checked."""
        state = self.completed(state)
        for key, array in self.kept():
            shared = key.removeprefix(PREFIX) in self.shared
            array[...] = state[key] if shared else state[key][self.mesh.index]

    def load_from_first(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over this rank's of what the first rank is given, array after array (collective)."""
        first, mine = self.mesh.rank == 0, dict(self.kept())
        given = self.completed(state) if first else {}
        for key, (shape, dtype) in self.kinds().items():
            array = np.ascontiguousarray(given[key], dtype) if first else np.empty(shape, dtype)
            self.mesh.communicator.Bcast(array, root=0)
            if key in mine:
                shared = key.removeprefix(PREFIX) in self.shared
                mine[key][...] = array if shared else array[self.mesh.index]


def deal(rows: np.ndarray, size: int) -> np.ndarray:
    """Memories of some ranks as those of `size` ranks: their sum stays the same."""
    if not rows.ndim or len(rows) == size:
        return rows
    dealt = np.zeros((size, *rows.shape[1:]), rows.dtype)
    dealt[0] = rows.sum(0)
    return dealt


class Pieces:
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
        rank, attached = (
            communicator.rank,
            lambda region, i: copy.copy(compressor).attach(region, dtype, seed, (i, len(senders))),
        )
        self.encoders = [attached(region, senders.index(rank)) for region in regions] if rank in senders else []
        self.decoder = attached(regions[hosts.index(rank)], 0) if rank in hosts else None
        self.sent = 0  # bytes

    def reduce(self, pieces: Sequence[np.ndarray], out: np.ndarray | None, step: int) -> None:
        """out += what the messages of all ranks stand for, in the piece that this rank keeps (collective)."""
        rank, mine, requests = self.communicator.rank, None, []
        for host, piece, encoder in zip(self.hosts, pieces, self.encoders, strict=bool(self.encoders)):
            message = encoder.encode(piece, step, self.maximum)
            if host == rank:
                mine = message
            else:
                requests.append((message, self.communicator.Isend(message, host, TAG)))
                self.sent += message.nbytes
        for sender in self.senders if self.decoder else ():
            self.decoder.decode(mine if sender == rank else self._receive(sender), out)
        for _, request in requests:
            request.Wait()

    def _receive(self, sender: int) -> np.ndarray:
        """A message, whatever its length."""
        status = MPI.Status()
        self.communicator.Probe(sender, TAG, status)
        message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self.communicator.Recv(message, sender, TAG)
        return message

    def set_epoch_steps(self, steps: int) -> None:
        for encoder in self.encoders:
            encoder.set_epoch_steps(steps)
