"""What is in flight on one rank of a pipeline that is never flushed, from step to step.

A step hands its mini-batches in, and the rank goes on in its row of the schedule, which has no end, until it would need
a mini-batch that nobody has given yet. So what waits for its backward pass then waits for the next step; the last stage
alone has done all. `drain` does what is left, in the row's order: what no mini-batch is there for is passed over.

Mini-batches are counted from the last time at which nothing was in flight. Receives are posted some ahead, into arrays
of their own, which layers may keep. Messages from one rank to another are all of one kind, in the order of their
mini-batches.

**Losses.** The ranks of the last stage tell all others the loss of a step as soon as they have it; who reads it some
steps later does not wait. **What is not finite**: the gradient of a loss that is none is sent back as NaN, so each
stage learns of it in its turn, and applies neither this gradient nor any after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from nn.core.context import MicroBatch
from nn.training.trainer import micro_batches
from parallel.strategies.pipeline.actions import Action
from parallel.strategies.pipeline.schedules import pipedream, seat
from parallel.strategies.pipeline.step import TAG

ENDLESS = 1 << 62  # mini-batches
AHEAD = 2  # receives of each kind that are posted before they are needed
LOSSES = 30  # tag of the messages with losses


class Mini(NamedTuple):
    """A mini-batch: samples and targets, of which only the first and the last stage look at them.

    Attributes
    ----------
    sample, step : int
        Place of the first sample in the global batch, and the step that this is.
    weight, share : float
        What its losses are divided by, and how much of the global batch's that is.
    rate : float
        The step's learning rate.
    """

    x: np.ndarray
    y: np.ndarray
    sample: int
    step: int
    weight: float
    share: float
    rate: float


class Stream:
    """The mini-batches of one rank since nothing was in flight.

    Parameters
    ----------
    line : PipeDreamPass
    stage : OwnStage
    before : int
        Mini-batches before these, for the names of what is measured.

    Attributes
    ----------
    given : int
        Mini-batches that steps have handed in.
    rounds : int
        Of this rank's backward passes, or sums with those of the other replicas, that are done.
    bad : bool
        Whether a loss was not finite: nothing is applied any more.
    latest : array
        The samples of the last step.
    """

    def __init__(self, line, stage, before: int):
        placement, ranks = line.placement, len(line.placement.rows)
        self.line, self.stage, self.before = line, stage, before
        self.seat = seat(line.rank, ranks, line.replicas)
        self.last = self.seat.stage == line.last
        self.row = pipedream(line.rank, ranks, ENDLESS, line.replicas)
        self.now: Action = next(self.row)
        self.given = self.rounds = 0
        self.bad = self.wrote = False  # whether the gradients are of a mini-batch
        self.minis: dict[int, Mini] = {}
        self.kept: dict[int, tuple] = {}  # mini-batch -> what its backward needs
        self.coming: dict[tuple[str, int], tuple[np.ndarray, MPI.Request, int]] = {}
        self.posted = {"F": self.seat.replica, "B": self.seat.replica}  # the first of which no receive is posted
        self.done = dict(self.posted)
        self.sending: list[tuple[MPI.Request, np.ndarray, int]] = []
        self.values: dict[int, float] = {}  # step -> this rank's part of its loss
        self.totals: dict[int, float] = {}
        self.told: dict[int, list] = {}  # step -> what ranks of the last stage say of it
        self.speakers = placement.replicas[line.last]

    # ------------------------------------------------------------------------------------------------ steps

    def take(self, x: np.ndarray, y: np.ndarray, step: int, total: int, first: int, rate: float) -> None:
        """A step's samples, as mini-batches."""
        self.latest = x
        if self.seat.stage == 0:
            x = x.copy()  # who gave it may write into it before its last backward pass
        trainer = self.line.trainer
        for rows in micro_batches(total, min(total, self.line.micro_batches)):
            weight = trainer.weight(y[rows])
            share = weight / trainer.mean_over(total)
            self.minis[self.given] = Mini(x[rows], y[rows], first + rows.start, step, weight or 1.0, share, rate)
            self.given += 1
        self.values[step], self.totals[step], self.told[step] = 0.0, trainer.weight_in_epoch(total), []
        for rank in self.speakers:
            if rank != self.line.rank:
                array = np.empty(2)
                self.told[step].append((array, self.line.communicator.Irecv(array, rank, LOSSES), rank))
        if self.last and not any(self.minis[b].step == step for b in self.mine()):
            self.tell(step)

    def mine(self) -> Iterator[int]:
        """This rank's mini-batches that have not gone forward."""
        return iter(range(self.done["F"], self.given, self.seat.count))

    def run(self, to_the_end: bool = False) -> None:
        """Go on in the row as far as mini-batches are there; or until nothing is in flight."""
        while self.due(to_the_end):
            self.post()
            self.do(self.now)
            self.now = next(self.row)
            self.sending = [entry for entry in self.sending if not entry[0].Test()]

    def due(self, to_the_end: bool) -> bool:
        """Whether the row's next action can be done; passes over those of mini-batches that will not come."""
        replicas = self.seat.count
        while not to_the_end or self.rounds * replicas < self.given:
            if self.now.kind == "REDUCE_GRAD":  # all replicas must have had theirs
                return to_the_end or (self.rounds + 1) * replicas <= self.given
            if self.now.micro_batch < self.given:
                return True
            if not to_the_end:
                return False
            self.now = next(self.row)
        return False

    def finish(self) -> None:
        """Wait for what was sent."""
        for request, _, peer in self.sending:
            self.line.wait(request, peer, "to take what was sent to it")
        self.sending = []

    def loss(self, step: int) -> float:
        """The loss of a step, on all ranks.

        Raises
        ------
        ValueError
            A rank of the last stage was given another batch.
        """
        parts = {self.line.rank: self.values[step]}
        for array, request, rank in self.told[step]:
            self.line.wait(request, rank, f"for the loss of step {step}")
            parts[rank] = float(array[0])
            if array[1] != self.totals[step]:
                ranks = self.line.trainer.mesh
                raise ValueError(
                    f"step {step}: ranks disagree on the size of the global batch: {array[1]:g} on rank "
                    f"{ranks.rank_at(pipeline=rank)}, {self.totals[step]} on rank {ranks.rank}"
                )
        return sum(parts[rank] for rank in self.speakers)

    def forget(self, step: int) -> float:
        """A step whose loss is known; returns the samples of its batch."""
        del self.values[step], self.told[step]
        return self.totals.pop(step)

    def bytes(self) -> int:
        """Of what other ranks send."""
        return sum(array.nbytes for array, *_ in self.coming.values())

    # ------------------------------------------------------------------------------------------------ actions

    def post(self) -> None:
        """Receives for what comes next."""
        stage, replicas = self.seat.stage, self.seat.count
        for kind, there, neighbour in (("F", stage > 0, stage - 1), ("B", not self.last, stage + 1)):
            until = min(self.given, self.done[kind] + AHEAD * replicas)
            while there and self.posted[kind] < until:
                b = self.posted[kind]
                network = self.stage.network
                shape = network.given if kind == "F" else self.line.placement.shape(stage + 1)
                array = np.empty((len(self.minis[b].x), *shape), network.dtype)
                peer = self.line.placement.at(neighbour, b)
                self.coming[kind, b] = array, self.line.communicator.Irecv(array, peer, TAG), peer
                self.posted[kind] += replicas

    def receive(self, kind: str, b: int) -> np.ndarray:
        array, request, peer = self.coming.pop((kind, b))
        what = "the input" if kind == "F" else "the gradient of the output"
        self.line.wait(request, peer, f"for {what} of {self.stage.network.name}")
        return array

    def send(self, array: np.ndarray, stage: int, b: int) -> None:
        array, peer = np.ascontiguousarray(array), self.line.placement.at(stage, b)
        self.sending.append((self.line.communicator.Isend(array, peer, TAG), array, peer))

    def do(self, action: Action) -> None:
        """An action, when what it needs has come."""
        b, kind = action.micro_batch, action.kind
        given = None
        if kind == "F":
            given = self.receive("F", b) if self.seat.stage else self.minis[b].x
        elif kind == "B" and not self.last:
            given = self.receive("B", b)
        start = time.perf_counter()
        {"F": self.forward, "B": self.backward, "REDUCE_GRAD": self.sum_gradients}[kind](b, given)
        if self.line.note:
            named = action if b is None else action._replace(micro_batch=self.before + b)
            self.line.note(str(named), start, time.perf_counter())
        if b is not None:
            self.done[kind] = b + self.seat.count

    def forward(self, b: int, x: np.ndarray) -> None:
        line, stage, mini = self.line, self.stage, self.minis[b]
        batch = MicroBatch(step=mini.step, sample=mini.sample)
        stage.ctx.network_context.on_gradients_ready = None
        version = min(line.seen(b, self.seat.stage), line.trainer.exchange.updates)  # fewer, where nothing is applied
        output, saved = stage.network.forward(line.trainer.exchange.version(version), x, stage.ctx, batch)
        gy = None
        if self.last:
            trainer = line.trainer
            loss, gy = trainer.loss(output, mini.y, mini.weight, stage.ctx)
            self.values[mini.step] += float(loss) * mini.share
            self.bad = self.bad or not math.isfinite(loss)
        self.kept[b] = saved, gy, version, batch
        if not self.last:
            self.send(output, self.seat.stage + 1, b)
        elif b + self.seat.count >= self.given or self.minis[b + self.seat.count].step > mini.step:
            self.tell(mini.step)

    def tell(self, step: int) -> None:
        """All others of this rank's part of a step's loss."""
        array = np.array([self.values[step], self.totals[step]])
        for rank in range(len(self.line.placement.rows)):
            if rank != self.line.rank:
                self.sending.append((self.line.communicator.Isend(array, rank, LOSSES), array, rank))

    def backward(self, b: int, gy: np.ndarray | None) -> None:
        stage = self.stage
        saved, own, version, batch = self.kept.pop(b)
        gy = own if gy is None else gy
        self.bad = self.bad or bool(np.isnan(gy.flat[0]))
        if self.bad:
            gx = np.full((len(gy), *stage.network.given), np.nan, stage.network.dtype)
        else:
            batch.accumulate = False
            exchange = self.line.trainer.exchange
            stage.ctx.network_context.on_gradients_ready = exchange.begin_sum() if self.seat.count > 1 else None
            p = exchange.version(version)
            gx = stage.network.backward(p, stage.g, gy, saved, stage.ctx, batch)
        if self.seat.stage:
            self.send(gx, self.seat.stage - 1, b)
        self.wrote = not self.bad
        if self.seat.count == 1:
            self.update()

    def sum_gradients(self, b: None, given: None) -> None:
        """Over the replicas: those of one mini-batch each; and whether a loss was none."""
        exchange = self.line.trainer.exchange
        if not self.wrote:
            exchange.begin_sum()
            exchange.gradients[...] = 0
        self.bad = exchange.sum_replicas(self.bad)
        self.update()

    def update(self) -> None:
        """Apply what is there, at the rate of its first mini-batch; forget what no mini-batch needs any more."""
        replicas, first = self.seat.count, self.rounds * self.seat.count
        rate, self.wrote = self.minis[first].rate, False
        self.rounds += 1
        if not self.bad:
            following = self.seat.replica + self.rounds * replicas
            try:
                self.line.trainer.exchange.apply(rate, self.line.seen(following, self.seat.stage))
            except FloatingPointError:  # a norm that is not finite: nothing was updated
                self.bad = True
        for b in range(first, min(first + replicas, self.given)):
            del self.minis[b]
