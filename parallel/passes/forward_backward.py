"""Forward and backward of one rank in a step: its samples at once, or micro-batches whose gradients are added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from collectives.steps import chunk
from nn.core.network import Network, NotFinite
from nn.training.trainer import micro_batches
from parallel.mesh import Mesh


class UnevenTotal(int):
    """Samples in a global batch that was not cut evenly; `first` is the index in it of this rank's first sample."""

    first: int

    def __new__(cls, total: int, first: int):
        self = super().__new__(cls, total)
        self.first = first
        return self

    def __getnewargs__(self):  # ranks that disagree tell each other
        return int(self), self.first


class Samples(NamedTuple):
    """Samples that go forward and backward together.

    Attributes
    ----------
    rows : slice
        Which of this rank's samples.
    first : int
        Place of the first one in the global batch.
    accumulate : bool
        Whether gradients and loss add to those of the micro-batch before.
    addend : int or None
        With it ends that addend of the sum over all ranks; None where more is to come, or nothing counts.
    """

    rows: slice
    first: int
    accumulate: bool
    addend: int | None


class ForwardBackward:
    """All samples of this rank are one addend of the sum.

    Attributes
    ----------
    shard : tuple
        What a Loader cuts batches for.
    addends : int
        How many the sum has over all ranks.
    fixed : bool
        Whether they are the same addends on any number of ranks, to be added in one order.
    """

    fixed = False
    by_samples = True  # whether ranks that have the same of the network differ only in their samples
    owns_loss = True  # whether it has the loss of its samples: of ranks that have one network together, one has it
    phases = ()  # as of a sync, those of its own
    asks_others = False  # layers ask ranks with other samples: so one without samples computes, too
    peers = None  # a communicator of ranks on the axis "pipeline" that have the same of the network
    note = None  # called with (name, start, end) of what is done inside the phases, where somebody records it

    def make_local_network(self, network: Network, mesh: Mesh) -> Network:
        """Return the part of the network that this rank computes."""
        return network

    def bind(self, trainer) -> None:
        """Bind to the trainer; called once, when all buffers are there."""

    def start(self, mesh: Mesh, network: Network) -> None:
        """Take the mesh; called once, before the first step."""
        self.mesh, self.shard = mesh, mesh.shard
        self.addends, self.addend = mesh.copies, mesh.data_group.index
        self.by_samples = self.addends == mesh.count

    def divide(self, samples: int, total: int, accumulate: int) -> list[Samples]:
        """Return the micro-batches of a step for which this rank has `samples` of `total`; none without a part."""
        if self.mesh.index is None:
            self.refuse(samples)
            return []
        first = self.first_sample(total)
        cuts, last = micro_batches(samples, accumulate), accumulate - 1
        return [
            Samples(rows, first + rows.start, i > 0, self.addend if i == last else None) for i, rows in enumerate(cuts)
        ]

    def samples_at_once(self, total: int, accumulate: int) -> set[int]:
        """Return how many samples of a batch of `total` are computed together, on all ranks."""
        shares = (chunk(total, self.shard[1], i) for i in range(self.shard[1]))
        return {rows.stop - rows.start for lo, hi in shares for rows in micro_batches(hi - lo, accumulate)}

    def refuse(self, samples: int) -> None:
        """Refuse samples for a rank that computes nothing."""
        if samples:
            raise ValueError(
                f"rank {self.mesh.rank} only serves, and was given {samples} samples: give them to the "
                f"{self.mesh.shard[1]} workers, or let workers be servers"
            )

    def first_sample(self, total: int) -> int:
        """Return where this rank's samples begin in a batch of `total`."""
        index, count, *_ = self.shard
        return total.first if isinstance(total, UnevenTotal) else chunk(total, count, index)[0]

    def contiguous_slice(self, samples: int, total: int, accumulate: int) -> slice | None:
        """Return where in the batch this rank's samples are, if it computes them at once; else None."""
        first, (index, count) = self.first_sample(total), self.mesh.shard
        at_once = (
            self.by_samples
            and accumulate == 1
            and (isinstance(total, UnevenTotal) or samples == chunk(total, count, index)[1] - first)
        )
        return slice(first, first + samples) if at_once else None

    def deal(self, samples: int, accumulate: int, ranks: int) -> Iterator[list[tuple[int, int, int | None]]]:
        """Yield how a master deals samples: for every micro-batch (lo, hi, addend) of each rank."""
        for i, rows in enumerate(micro_batches(samples, accumulate)):
            cuts = (chunk(rows.stop - rows.start, ranks, rank) for rank in range(ranks))
            yield [
                (rows.start + lo, rows.start + hi, rank if i == accumulate - 1 else None)
                for rank, (lo, hi) in enumerate(cuts)
            ]

    def select_samples(self, x: np.ndarray, y: np.ndarray, micro: Samples) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples and targets of a micro-batch."""
        return x[micro.rows], y[micro.rows]

    def compute(self, trainer, x: np.ndarray, y: np.ndarray, total: int, micro: Samples, before: float = 0.0) -> float:
        """Go forward and backward through a micro-batch; return its part of the mean loss, plus `before`."""
        z, saved = trainer.forward(x, True, micro)
        loss, gz = self.loss(trainer, z, y, total)
        trainer.set_loss(loss + before, total, micro)
        trainer.backward(gz, saved)
        return loss + before

    def loss(self, trainer, z: np.ndarray, y: np.ndarray, total: int) -> tuple[float, np.ndarray | None]:
        """Return (part of the mean loss, its gradient) for the outputs z of a micro-batch."""
        if not len(z) and not trainer.computes_empty_shards:
            return 0.0, None
        return trainer.loss(z, y, trainer.mean_over(total), trainer.ctx)

    def predict(self, trainer, x: np.ndarray) -> np.ndarray:
        """Return the outputs for samples, in evaluation mode."""
        return trainer.forward(x, False)[0]

    def sum_scores(self, trainer, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the sums of `Trainer.sum_scores` over samples; of ranks that have the same outputs, one reports."""
        sums = trainer.no_scores()
        for micro in self.divide(len(x), len(x), 1):
            samples, targets = self.select_samples(x, y, micro)
            z = trainer.forward(samples, False)[0]
            if len(samples):
                sums += self.rounded(trainer.evaluate_outputs(z, targets))
        return sums if self.reports_scores else np.zeros_like(sums)

    def look(self, trainer, part: tuple[int, np.ndarray]) -> NotFinite | None:
        """Return the first value that is not finite; `part` is (place of the first sample, samples)."""
        return trainer.check_forward(part)

    def loss_in_flight(self) -> float:
        """Return the loss that no step has returned: of micro-batches in flight until ranks synchronized."""
        return 0.0

    def close(self) -> None:
        """Free what is held beside arrays."""

    @property
    def reports_scores(self) -> bool:
        """Whether this rank reports scores in evaluation: of ranks that have the same outputs, one does."""
        return self.owns_loss and not self.mesh.places["context"]

    def rounded(self, scores: np.ndarray) -> np.ndarray:
        """Return the scores of a micro-batch, as they are summed over all."""
        return scores

    def pictures(self, events: list[dict]) -> dict:
        """Return figures by the names of their files, of what `note` has recorded on all ranks."""
        return {}

    def in_transit(self) -> int:
        """Return the bytes that are kept for what other ranks send, beside the sync's."""
        return 0

    def describe(self) -> str:
        """Describe how samples are cut, for the log; empty where that is as usual."""
        return ""
