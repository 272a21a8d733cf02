"""The pass with a master, which deals samples out, gathers outputs, and hands gradients back.

Only the master reads, and only it computes the loss; in evaluation, too.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import numpy as np

from parallel.passes.forward_backward import ForwardBackward, Samples, UnevenTotal

MASTER = 0


class Dealt(ForwardBackward):
    """Every micro-batch of the master is dealt to all ranks.

    `shard` is the whole batch on the master, and nothing elsewhere.

    Parameters
    ----------
    inner : ForwardBackward or VirtualShards
        How it is dealt.
    """

    def __init__(self, inner: ForwardBackward):
        self.inner, self.fixed = inner, inner.fixed

    def start(self, mesh, network):
        self.inner.start(mesh, network)
        self.mesh, self.addends, self.master = mesh, self.inner.addends, mesh.rank == MASTER
        self.shard = (0 if self.master else None, 1)

    def divide(self, samples, total, accumulate):
        """Return this rank's part of every micro-batch that is dealt; `rows` are the master's."""
        if isinstance(total, UnevenTotal):
            raise ValueError(
                "with dp the master reads for all ranks, and `join` gives every rank its own: use ddp, zero1, zero2, "
                "fsdp, or ps"
            )
        if samples and not self.master:
            raise ValueError(
                f"rank {self.mesh.rank} is a worker of the master, and was given {samples} samples: a worker "
                "gets its part from the master; a loader for this trainer's `shard` gives it none"
            )
        count = np.array([samples])
        self.mesh.communicator.Bcast(count, root=MASTER)
        rounds = list(self.inner.deal(int(count[0]), accumulate, self.mesh.size))
        self.rounds = iter(rounds)
        mine = (dealt[self.mesh.rank] for dealt in rounds)
        return [Samples(slice(lo, hi), lo, i > 0 and not self.fixed, addend) for i, (lo, hi, addend) in enumerate(mine)]

    def samples_at_once(self, total, accumulate):
        return {hi - lo for dealt in self.inner.deal(total, accumulate, self.mesh.size) for lo, hi, _ in dealt}

    def select_samples(self, x, y, micro):
        """This rank's samples; the targets of all ranks' samples, which the master has."""
        self.cuts = [(lo, hi) for lo, hi, _ in next(self.rounds)]
        samples = np.empty((micro.rows.stop - micro.rows.start, *x.shape[1:]), x.dtype)
        self._scatter(x, samples, self.cuts)
        if not self.master:
            return samples, y
        rows = [slice(*cut) for cut in self.cuts] if self.fixed else [slice(self.cuts[0][0], self.cuts[-1][1])]
        return samples, np.concatenate([y[each] for each in rows]) if self.fixed else y[rows[0]]

    def loss(self, trainer, z, y, total):
        outputs = self.gather_outputs(z)
        loss, gz = self.compute_loss(trainer, outputs, y, total)
        return loss, self.scatter_gradient(gz, z)

    def gather_outputs(self, z: np.ndarray) -> np.ndarray | None:
        """All ranks' outputs, one behind the other, on the master."""
        cuts = self.in_a_row()
        outputs = np.empty((cuts[-1][1], *z.shape[1:]), z.dtype) if self.master else None
        self.mesh.communicator.Gatherv(np.ascontiguousarray(z), _blocks(outputs, cuts), root=MASTER)
        return outputs

    def in_a_row(self) -> list[tuple[int, int]]:
        """Where the samples of each rank lie among those of this micro-batch."""
        return list(pairwise(accumulate((hi - lo for lo, hi in self.cuts), initial=0)))

    def compute_loss(self, trainer, outputs: np.ndarray | None, y: np.ndarray, total: int):
        """(loss of this rank's addend, gradient with respect to all outputs on the master); of whole batches the loss
        is the master's."""
        over, losses = trainer.mean_over(total), np.zeros(self.mesh.size)
        gz = None
        if self.master and not self.fixed:
            losses[MASTER], gz = trainer.loss(outputs, y, over, trainer.ctx)
        elif self.master:
            gz = np.empty_like(outputs)
            for rank, (lo, hi) in enumerate(self.in_a_row()):
                if hi > lo:
                    losses[rank], gz[lo:hi] = trainer.loss(outputs[lo:hi], y[lo:hi], over, trainer.ctx)
        if self.fixed:
            self.mesh.communicator.Bcast(losses, root=MASTER)
        return float(losses[self.mesh.rank]), gz

    def scatter_gradient(self, gz: np.ndarray | None, z: np.ndarray) -> np.ndarray:
        """The part of the loss gradient that belongs to this rank's outputs z."""
        mine = np.empty_like(z)
        self._scatter(gz, mine, self.in_a_row())
        return mine

    def predict(self, trainer, x):
        """The outputs for the master's samples, computed by all ranks; workers get None."""
        found = None
        for cuts, outputs, _ in self._outputs(trainer, x, np.empty(len(x))):
            if found is None and outputs is not None:
                found = np.empty((len(x), *outputs.shape[1:]), outputs.dtype)
            for (lo, hi), (a, b) in zip(cuts, self.in_a_row(), strict=True):
                if self.master:
                    found[lo:hi] = outputs[a:b]
        return found

    def sum_scores(self, trainer, x, y):
        sums = trainer.no_scores()
        for _, outputs, targets in self._outputs(trainer, x, y):
            for lo, hi in (self.in_a_row() if self.fixed else [(0, len(targets))]) if self.master else ():
                if hi > lo:
                    sums += self.inner.rounded(trainer.evaluate_outputs(outputs[lo:hi], targets[lo:hi]))
        return sums

    def _outputs(self, trainer, x, y):
        """Yield for every micro-batch where its samples are, and on the master its outputs and targets."""
        for micro in self.divide(len(x), len(x), 1):
            samples, targets = self.select_samples(x, y, micro)
            yield self.cuts, self.gather_outputs(trainer.forward(samples, False)[0]), targets

    def _scatter(self, rows: np.ndarray | None, mine: np.ndarray, cuts: list[tuple[int, int]]) -> None:
        rows = np.ascontiguousarray(rows) if self.master else None
        self.mesh.communicator.Scatterv(_blocks(rows, cuts), mine, root=MASTER)

    def describe(self):
        return self.inner.describe()


def _blocks(rows: np.ndarray | None, cuts: list[tuple[int, int]]) -> list | None:
    """The master's array of rows as a message with a block for each rank."""
    if rows is None:
        return None
    row = math.prod(rows.shape[1:])
    return [rows, [(hi - lo) * row for lo, hi in cuts], [lo * row for lo, _ in cuts], None]
