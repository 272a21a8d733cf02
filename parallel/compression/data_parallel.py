"""Data parallelism with fewer bytes: gradients travel compressed.

As DistributedDataParallel, but the sum of the gradients is that of what each rank's message stands for. All ranks hold
the same parameters, bit for bit; what one process would compute they are only where nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from parallel.compression.base import Compressor
from parallel.compression.wire import Wire
from parallel.synchronous import Synchronous, agree

PREFIX = "compress/"


class CompressedDataParallel(Synchronous):
    """`Serial` on many ranks, with compressed gradients.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for Synchronous.
    compressor : Compressor
        Not attached yet.

    Attributes
    ----------
    wire : Wire
        Its `traffic` counts the bytes of all steps.

    Raises
    ------
    ValueError
        A method that cannot work with this optimizer.
    ReplicaError
        Ranks that were given different methods.
    """

    def __init__(self, *arguments, compressor: Compressor, **options):
        super().__init__(*arguments, **options)
        compressor.check(self.optimizer)
        agree(self.communicator, {"compression": repr(compressor)})
        self.start_alike()
        self.compressor = compressor.attach(self.region, self.network.dtype, self.seed, self.shard)
        self.wire = Wire(self.communicator)
        self.together = np.zeros(3 + len(self.statistics))  # loss, totals, running statistics
        self.reductions = 0

    def combine(self, loss: float) -> float:
        """Sum loss, statistics and compressed gradients. A loss that is not finite leaves the memories as they are."""
        self.together[:3] = loss, *self.totals(first=self.shard[0] == 0)
        np.divide(self.statistics, self.shard[1], out=self.together[3:])
        self.wire.allreduce(self.together)
        self.refuse_other_totals(*(self.together[1:3] / (self.shard[1], 1)))
        self.statistics[:] = self.together[3:]
        loss = float(self.together[0])
        if math.isfinite(loss):
            self.compressor.reduce(self.gradients, self.wire, self.steps)
            self.reductions += 1
        return loss

    def memory(self) -> dict[str, int]:
        """As for all trainers; what waits to be sent counts among the moments."""
        found, kept = super().memory(), (*self.compressor.memory.values(), *self.compressor.shared.values())
        return found | {"moments": found["moments"] + sum(array.nbytes for array in kept)}

    def describe(self) -> str:
        return repr(self.compressor)

    def bytes_sent(self) -> dict[str, float]:
        """Bytes that a rank had to send in a step: "bytes_sent", counted, the mean over ranks and steps; "bytes_dense",
        what gradients as they are would be."""
        size = self.shard[1]
        total = self.communicator.allreduce(self.wire.traffic.total)
        dense = 2 * (self.gradients.nbytes + self.together.nbytes) * (size - 1) / size
        return {"bytes_sent": total / size / max(1, self.reductions), "bytes_dense": dense}

    def memories(self) -> Iterator[tuple[str, np.ndarray]]:
        """(key in a checkpoint, this rank's part) of all that the compressor keeps for this rank."""
        for name, memory in self.compressor.memory.items():
            for key, array in self.network.layout.items(memory):
                yield f"{PREFIX}{name}/{key}", array

    def shared(self) -> dict[str, np.ndarray]:
        """What the compressor keeps alike on all ranks, by key in a checkpoint."""
        return {f"{PREFIX}{name}": array for name, array in self.compressor.shared.items()}

    def entries(self) -> Iterator[tuple[str, np.ndarray]]:
        """That of Serial, what the compressor keeps alike on all ranks, and its memories with a row for each rank."""
        plain = super().state()
        yield "steps", plain.pop("steps")
        yield from plain.items()
        yield from self.shared().items()
        for key, mine in self.memories():
            rows = np.empty((self.shard[1], *mine.shape), mine.dtype)
            self.communicator.Allgather(np.ascontiguousarray(mine), rows)
            yield key, rows

    def state(self) -> dict[str, np.ndarray]:
        return dict(self.entries())

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state` returned, on any number of ranks; a state without memories starts with empty ones.

        Where the number of ranks has changed, rank 0 gets the sum of the memories and the others start at zero: so
        nothing is lost, and all that was left out is still sent.
        """
        rank, size = self.shard
        memories = dict(self.memories())
        state = dict(state)
        if not any(key.startswith(PREFIX) for key in state):
            state |= self.shared() | {key: np.zeros((size, *a.shape), a.dtype) for key, a in memories.items()}
        state = {key: deal(array, size) if key in memories else array for key, array in state.items()}
        super().load_state(state)  # refuses what does not fit
        for key, mine in memories.items():
            mine[...] = state[key][rank]

    def snapshot(self) -> dict[str, np.ndarray]:
        mine = super().state() | self.shared() | dict(self.memories())
        return {key: array.copy() for key, array in mine.items()}

    def restore(self, snapshot: dict[str, np.ndarray]) -> None:
        mine = super().state() | self.shared() | dict(self.memories())
        for key, array in mine.items():
            array[...] = snapshot[key]
        self.steps = int(snapshot["steps"])


def deal(rows: np.ndarray, size: int) -> np.ndarray:
    """Memories of some ranks as those of `size` ranks: their sum stays the same."""
    if len(rows) == size:
        return rows
    dealt = np.zeros((size, *rows.shape[1:]), rows.dtype)
    dealt[0] = rows.sum(0)
    return dealt
