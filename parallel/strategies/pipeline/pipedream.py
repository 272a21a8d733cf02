"""PipeDream: every mini-batch has an update of its own, and the pipeline is not flushed between them.

    trainer = PipeDream(network, loss, optimizer, communicator, mini_batches=16)
    loss = trainer.step(x, y)              # 16 updates

1F1B, in which a stage updates its weights after each backward pass. Mini-batches that are in flight meanwhile have seen
older ones, so a stage keeps those (**weight stashing**): the backward pass of a mini-batch uses the weights that its
forward pass used, and its gradient is applied to the newest. With n stages and w_s(t) for the weights of stage s after
t updates,

    w(t+1) = w(t) - lr grad f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t))

With **vertical sync** a mini-batch meets the weights of one time in all stages, those that the first stage has when it
begins: w(t+1) = w(t) - lr grad f(w(t-n+1)). Stage s keeps at most n - s versions, counted from 0; with vertical sync
all keep n.

So this is not what one process computes, but it is the same every time. A step is the mini-batches of one global batch,
in one run through the pipeline; it is drained at the step's end only, where loss and statistics are settled, so idle
time is that of one filling and one draining a step: give it many. Sources: Harlap et al. 2018, Narayanan et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from nn.training.serial import micro_batches
from parallel.exchange.base import Exchange
from parallel.mesh import Mesh
from parallel.strategies.pipeline.actions import parts
from parallel.strategies.pipeline.executor import PipelinePass
from parallel.strategies.pipeline.placement import check_updates_apart
from parallel.trainer import Trainer


class Stashed(Exchange):
    """One stage's parameters, updated after every mini-batch; older versions as long as a mini-batch needs them."""

    def begin(self, step, samples, total, parts):
        self.before = self.snapshot()  # of a step that is refused nothing is left
        self.stash: dict[int, tuple[np.ndarray, object]] = {}  # updates of this step -> (parameters, views)
        self.updates = 0
        return super().begin(step, samples, total, parts)

    def version(self, updates: int):
        """The parameters after so many updates of this step, as layers see them."""
        return self.p if updates == self.updates else self.stash[updates][1]

    def apply(self, number: int, needed: set[int]) -> None:
        """Update with the gradients that are there, as the `number`-th of all; keep the versions that are needed."""
        self.stash = {version: kept for version, kept in self.stash.items() if version in needed}
        if self.updates in needed:
            copy = self.parameters.copy()
            self.stash[self.updates] = copy, self.layout.views(copy)
        self.optimizer.update(self.parameters, self.gradients, self.slots, number, self.region)
        self.updates += 1

    def update(self):
        """Nothing is left to be done: no mini-batch is in flight."""
        self.stash, self.before = {}, {}

    def take_back(self):
        if self.before:
            self.restore(self.before)

    def bytes(self):
        kept = sum(copy.nbytes for copy, _ in self.stash.values()) + sum(a.nbytes for a in self.before.values())
        return super().bytes() | {"in transit": kept}


class PipeDreamPass(PipelinePass):
    """The pass: mini-batches with losses of their own, and a version of the weights for each.

    Parameters
    ----------
    mini_batches : int
    cuts : as for PipelinePass
    vertical_sync : bool
    limit : float
    """

    def __init__(self, mini_batches: int, cuts: Iterable[int] | None, vertical_sync: bool, limit: float = 300.0):
        super().__init__("pipedream", mini_batches, cuts, limit=limit)
        self.vertical_sync = vertical_sync

    def start(self, mesh, network):
        super().start(mesh, network)
        mesh.agree({"vertical sync": self.vertical_sync})

    def join(self, trainer):
        super().join(trainer)
        check_updates_apart(self.placement, trainer.optimizer)
        self.versions = seen(self.placement.rows[0 if self.vertical_sync else self.rank])

    def parts(self, samples):
        """Of fewer samples than mini-batches one each: what is empty comes last, and delays nobody."""
        found = micro_batches(samples, min(samples, self.micro_batches))
        found += [slice(samples, samples)] * (self.micro_batches - len(found))
        return [(rows.start, rows.stop) for rows in found]

    def compute(self, trainer, x, y, total, micro, before=0.0):
        self.waiting = {i: self.versions[i] for i, (lo, hi) in enumerate(self.parts(len(x))) if hi > lo}
        return super().compute(trainer, x, y, total, micro, before)

    def version(self, stage, action):
        return self.trainer.exchange.version(self.waiting[action.micro_batch])

    def divisor(self, samples, total):
        return samples

    def made(self, stage, action):
        exchange = self.trainer.exchange
        del self.waiting[action.micro_batch]
        exchange.apply(self.trainer.steps * self.micro_batches + exchange.updates, set(self.waiting.values()))
        stage.written = False  # the next mini-batch's gradients are written over these


def seen(row) -> list[int]:
    """How many updates a rank with this row has made when the forward pass of each mini-batch begins."""
    found, updates = {}, 0
    for cell in row:
        for action in parts(cell):
            if action.kind == "F":
                found[action.micro_batch] = updates
            updates += action.kind == "B"
    return [found[i] for i in range(len(found))]


def PipeDream(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    mini_batches: int = 16,
    cuts: Iterable[int] | None = None,
    vertical_sync: bool = False,
    limit: float = 300.0,
) -> Trainer:
    """A stage on each rank, and an update after every mini-batch.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, cuts, limit
        As for Pipeline.
    mini_batches : int
        Into so many the batch of a step is cut; each is a batch of its own.
    vertical_sync : bool
        One version of the weights for all stages, instead of each stage's newest.

    Raises
    ------
    ValueError
        As for Pipeline; arrays that stages share; clipping by the global norm.
    """
    mesh = Mesh(communicator, data=1, pipeline=communicator.size)
    pass_ = PipeDreamPass(mini_batches, cuts, vertical_sync, limit)
    return Trainer(network, loss, optimizer, mesh, pass_, Stashed(), seed, "PipeDream")
