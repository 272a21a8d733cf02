"""Parameter servers that are sent fewer bytes: workers push compressed gradients, and pull whole parameters.

A worker has an encoder for each server's slice, with an error memory of its own; a server decodes and adds the messages
in worker order. Loss and running statistics travel as they are. What is pulled is not compressed: of the 2 n that a
worker moves in a step, the half that is pushed shrinks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping

import numpy as np
from mpi4py import MPI

from parallel.compression.base import Compressor
from parallel.compression.data_parallel import PREFIX, deal
from parallel.parameter_server import TAIL, ParameterServer
from parallel.push_pull import push
from parallel.synchronous import agree

TAG = 7  # of compressed gradients


class Encoders(list):
    """A worker's encoders, one for each server."""

    def tell_epoch(self, steps: int) -> None:
        for encoder in self:
            encoder.tell_epoch(steps)


class CompressedParameterServer(ParameterServer):
    """`ParameterServer` with compressed gradients.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, servers, place
        As for ParameterServer.
    compressor : Compressor
        Not attached yet; one with messages of single ranks.

    Raises
    ------
    ValueError
        A method that has no such messages, not for so many servers, or cannot work with this optimizer.
    """

    def __init__(self, *arguments, compressor: Compressor, **options):
        super().__init__(*arguments, **options)
        compressor.check_messages(len(self.hosts))
        compressor.check(self.optimizer)
        agree(self.communicator, {"compression": repr(compressor)})
        layout, dtype, seed = self.network.layout, self.network.dtype, self.seed
        self.shares = [slice(lo, max(lo, min(hi, layout.size))) for lo, hi in self.slices]
        regions = [layout.region(part.start, part.stop) for part in self.shares]
        self.memories: dict[str, np.ndarray] = {}  # of all slices together, in the order of the layout
        self.compressor = Encoders()
        if self.works:
            self.compressor += [copy.copy(compressor).attach(region, dtype, seed, self.shard) for region in regions]
            self.memories = {name: layout.zeros(dtype) for name in compressor.memories}
            for encoder, part in zip(self.compressor, self.shares, strict=True):
                encoder.memory = {name: memory[part] for name, memory in self.memories.items()}
        if self.serves:
            own = regions[self.hosts.index(self.communicator.rank)]
            self.decoder = copy.copy(compressor).attach(own, dtype, seed, (0, len(self.workers)))
        self._push_the_rest_plainly()
        self.method, self.sent, self.pushes = repr(compressor), 0, 0

    def _push_the_rest_plainly(self) -> None:
        """The schedule of `push` for what is not compressed: running statistics, and the tail."""
        first = self.network.layout.size
        rest = [(max(lo, first) - first, max(hi, first) - first) for lo, hi in self.slices]
        vectors = {"x": self.message[first:]} if self.works else {}
        vectors |= {"y": self.sums[self.own.stop - self.own.start :]} if self.serves else {}
        rank, size, servers = self.communicator.rank, self.communicator.size, len(self.hosts)
        rounds = push(rank, size, rest, servers, self.server_place, TAIL)
        self.pushing.free()
        self.pushing = self.communicator.compile(rounds, **vectors)

    def combine(self, loss):
        """As for ParameterServer; but a loss that is not finite is told first, and leaves the memories as they are."""
        total = float(self.sum([loss])[0])
        return super().combine(loss) if math.isfinite(total) else total

    def push(self):
        super().push()
        messages, requests = {}, []
        if self.works:
            for host, part, encoder in zip(self.hosts, self.shares, self.compressor, strict=True):
                messages[host] = encoder.encode(self.gradients[part], self.steps, self._maximum)
                if host != self.communicator.rank:
                    requests.append(self.communicator.Isend(messages[host], host, TAG))
                    self.sent += messages[host].nbytes
        if self.serves:
            total = self.sums[: self.own.stop - self.own.start]
            for worker in self.workers:
                mine = worker == self.communicator.rank
                self.decoder.decode(messages[worker] if mine else self._receive(worker), total)
        MPI.Request.Waitall(requests)
        self.pushes += 1

    def _receive(self, worker: int) -> np.ndarray:
        """A message of a worker, whatever its length."""
        status = MPI.Status()
        self.communicator.Probe(worker, TAG, status)
        message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self.communicator.Recv(message, worker, TAG)
        return message

    def _maximum(self, array: np.ndarray) -> None:
        self.between_workers.Allreduce(MPI.IN_PLACE, array, MPI.MAX)

    def bytes_sent(self) -> dict[str, float]:
        """Bytes of gradients that a worker sent in a step, counted (mean over workers and steps), and dense ones."""
        total = self.communicator.allreduce(self.sent) / len(self.workers) / max(1, self.pushes)
        pairs = sum(host != worker for worker in self.workers for host in self.hosts)
        whole = self.network.layout.size * self.network.dtype.itemsize
        return {"bytes_sent": total, "bytes_dense": whole * pairs / (len(self.hosts) * len(self.workers))}

    def entries(self) -> Iterator[tuple[str, np.ndarray]]:
        """Those of ParameterServer, and the memories with a row for each worker."""
        yield from super().entries()
        layout, first = self.network.layout, self.communicator.rank == 0
        for name in self._names():
            rows = np.zeros((len(self.workers), layout.size), self.network.dtype) if first else None
            if self.works:
                self.between_workers.Gather(self.memories[name], rows, root=0)
            for key, place in layout.slices.items():
                shape = len(self.workers), *layout.specs[key].shape
                yield f"{PREFIX}{name}/{key}", rows[:, place].reshape(shape) if first else np.empty(0)

    def _names(self) -> tuple[str, ...]:
        return self.compressor[0].memories if self.works else self.decoder.memories

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state` returned, for any number of workers; a state without memories starts with empty ones.

        Where the number of workers has changed, worker 0 gets the sum of the memories: nothing is lost.
        """
        names = [f"{PREFIX}{name}/{key}" for name in self._names() for key in self.network.layout.specs]
        kept = [key for key in state if key.startswith(PREFIX)]
        if kept and sorted(kept) != sorted(names):
            raise ValueError(f"the checkpoint has memories of another method than {self.method}: {', '.join(kept[:3])}")
        super().load_state({key: state[key] for key in state if not key.startswith(PREFIX)})
        for name, memory in self.memories.items():
            memory[:] = 0
            for key, array in self.network.layout.items(memory):
                if kept:
                    array[...] = deal(state[f"{PREFIX}{name}/{key}"], len(self.workers))[self.shard[0]]

    def snapshot(self):
        return super().snapshot() | {f"{PREFIX}{name}": memory.copy() for name, memory in self.memories.items()}

    def restore(self, snapshot):
        super().restore(snapshot)
        for name, memory in self.memories.items():
            memory[:] = snapshot[f"{PREFIX}{name}"]

    def memory(self):
        """As for ParameterServer; what waits to be sent counts among the moments."""
        found = super().memory()
        return found | {"moments": found["moments"] + sum(memory.nbytes for memory in self.memories.values())}

    def describe(self):
        return f"{super().describe()}; pushed as {self.method}"
