"""The pass of a rank to which a coordinator deals a batch in chunks: it computes one after the other."""

from __future__ import annotations

from nn.training.trainer import micro_batches
from parallel.passes.forward_backward import ForwardBackward, Samples


class Chunks(ForwardBackward):
    """A replica has the whole batch and computes what chunks of it it is given; in evaluation, its equal part.

    Parameters
    ----------
    size : int
        Samples in a chunk.
    """

    def __init__(self, size: int):
        self.size = size

    def start(self, mesh, network):
        self.mesh, self.addends = mesh, 1
        self.shard = (None if mesh.index is None else 0, 1)

    def chunk(self, number: int, samples: int) -> Samples:
        """A chunk of a batch of so many samples."""
        first = number * self.size
        return Samples(slice(first, min(first + self.size, samples)), first, False, None)

    def samples_at_once(self, total, accumulate):
        return {min(self.size, total - first) for first in range(0, total, self.size)}

    def divide(self, samples, total, accumulate):
        """This replica's part of what is only evaluated."""
        if self.mesh.index is None:
            self.refuse(samples)
            return []
        rows = micro_batches(samples, self.mesh.count)[self.mesh.index]
        return [Samples(rows, rows.start, False, None)]

    def predict(self, trainer, x):
        if self.mesh.index is None:
            raise ValueError(
                f"rank {self.mesh.rank} has no copy of the parameters: predict on a replica, or with trainer.alone()"
            )
        return super().predict(trainer, x)

    def describe(self):
        return f"chunks of {self.size} samples"
