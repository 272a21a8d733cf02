"""What is in flight on one rank of a pipeline that is never flushed, from step to step.

A step hands its mini-batches in, and the rank goes on in its row of the schedule, which has no end, until it would need
a mini-batch that nobody has given yet. So what waits for its backward pass then waits for the next step; the last stage
alone has done all. `drain` does what is left, in the row's order: what no mini-batch is there for is passed over.

Mini-batches are counted from the last time at which nothing was in flight. Receives are posted some ahead, into arrays
of their own, which layers may keep. Messages from one rank to another are all of one kind, in the order of their
mini-batches.

**Sizes.** Every rank tells all others the size of the batch that a step begins with. A message with samples of that
step is received only once its sender's size is known to be the same, and a gradient of it is applied only once all are.
Ranks that were given different sizes all refuse the step, when what was in flight before it has come to its end.

**Looking.** `fork` returns a stream that can run to its end on copies, while this one stays as it is. All that was sent
before has arrived by then, so the messages of the fork are its own.

**Losses.** The ranks of the last stage tell all others the loss of a step as soon as they have it; who reads it some
steps later does not wait. **What is not finite**: the gradient of a loss that is none is sent back as NaN, so each
stage learns of it in its turn, and applies neither this gradient nor any after it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from functools import partial
from itertools import tee
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from nn.core.context import LayerContext, MicroBatch
from nn.training.trainer import micro_batches
from parallel.state.splits import sample_shape
from parallel.strategies.pipeline.actions import Action
from parallel.strategies.pipeline.executor import contexts
from parallel.strategies.pipeline.schedules import pipedream, seat
from parallel.strategies.pipeline.step import TAG
from parallel.sync.step_result import disagreement

ENDLESS = 1 << 62  # mini-batches
AHEAD = 2  # receives of each kind that are posted before they are needed
LOSSES, SIZES = 30, 31  # tags of the messages with losses, and with sizes of batches


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


class Sizes(NamedTuple):
    """The size of a step's batch, and the samples given, on this rank; of all others: rank -> (array, request)."""

    mine: np.ndarray
    others: dict[int, tuple[np.ndarray, MPI.Request]]


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
        (self.row,) = tee(pipedream(line.rank, ranks, ENDLESS, line.replicas), 1)  # which can be copied
        self.now: Action = next(self.row)
        self.warm_up = line.warm_up[self.seat.stage]
        self.forked = False
        self.given = self.rounds = 0
        self.bad = self.wrote = self.began = False  # whether the gradients are of a mini-batch, and on their way
        self.minis: dict[int, Mini] = {}
        self.kept: dict[int, tuple] = {}  # mini-batch -> what its backward needs
        self.coming: dict[tuple[str, int], tuple[np.ndarray, MPI.Request, int]] = {}
        self.posted = {"F": self.seat.replica, "B": self.seat.replica}  # the first of which no receive is posted
        self.done = dict(self.posted)
        self.sending: list[tuple[MPI.Request, np.ndarray, int, int]] = []  # with its receiver, and its step
        self.values: dict[int, float] = {}  # step -> this rank's part of its loss
        self.totals: dict[int, float] = {}
        self.told: dict[int, list] = {}  # step -> what ranks of the last stage say of it
        self.speakers = placement.replicas[line.last]
        self.sizes: dict[int, Sizes] = {}  # step -> those of all ranks, until they are known to be the same

    # ------------------------------------------------------------------------------------------------ steps

    def take(self, x: np.ndarray, y: np.ndarray, step: int, total: int, first: int, rate: float) -> None:
        """A step's samples, as mini-batches."""
        self.tell_size(step, total, len(x))
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
                array = np.empty(1)
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
            if self.now.kind == "REDUCE_GRAD":
                return to_the_end or self.all_come_here()
            if self.now.micro_batch < self.given:
                return True
            if not to_the_end:
                return False
            self.now = next(self.row)
        return False

    def all_come_here(self) -> bool:
        """Whether every replica can do its backward pass of this round with the mini-batches that were given."""
        return (self.warm_up + self.rounds + 1) * self.seat.count <= self.given

    def finish(self, before: float = math.inf) -> None:
        """Wait for what was sent, of the steps before one."""
        for request, _, peer, step in self.sending:
            if step < before:
                self.line.wait(request, peer, "to take what was sent to it")
        self.sending = [entry for entry in self.sending if entry[3] >= before]

    def loss(self, step: int) -> float:
        """The loss of a step, on all ranks."""
        parts = {self.line.rank: self.values[step]}
        for array, request, rank in self.told[step]:
            self.wait(request, rank, f"for the loss of step {step}", step)
            parts[rank] = float(array[0])
        return sum(parts[rank] for rank in self.speakers)

    def forget(self, step: int) -> float:
        """A step whose loss is known; returns the samples of its batch."""
        del self.values[step], self.told[step]
        return self.totals.pop(step)

    def bytes(self) -> int:
        """Of what other ranks send."""
        return sum(array.nbytes for array, *_ in self.coming.values())

    # ------------------------------------------------------------------------------------------------ sizes

    def tell_size(self, step: int, total: int, samples: int) -> None:
        """Tell all ranks how large this rank was told that the batch of a step is, and how many samples it has."""
        mine, line = np.array([total, samples]), self.line
        sizes = self.sizes[step] = Sizes(mine, {})
        for rank in range(len(line.placement.rows)):
            if rank != line.rank:
                array = np.empty_like(mine)
                sizes.others[rank] = array, line.communicator.Irecv(array, rank, SIZES)
                self.sending.append((line.communicator.Isend(mine, rank, SIZES), mine, rank, step))
        if samples != total:
            self.refuse(step)

    def check_sizes(self, until: int) -> None:
        """Refuse the first step, up to one, of which a rank is known to have been given another size.

        Raises
        ------
        ValueError
            On all ranks, in time: what each was given.
        """
        for step, sizes in list(self.sizes.items()):
            if step > until:
                break
            come = [array for array, request in sizes.others.values() if request.Test()]
            if any((array != sizes.mine).any() for array in come):
                self.refuse(step)
            if len(come) == len(sizes.others):
                del self.sizes[step]

    def agree(self, step: int) -> None:
        """Return when all ranks are known to have been given one size of the batch of a step."""
        if sizes := self.sizes.get(step):
            for rank, (_, request) in sizes.others.items():
                self.wait(request, rank, f"to begin step {step}", step)
            self.check_sizes(step)

    def same_size(self, step: int, peer: int, wait: bool) -> bool:
        """Whether a rank is known to have been given this one's size of a step; if told to, this waits for it."""
        if not (sizes := self.sizes.get(step)):
            return True
        array, request = sizes.others[peer]
        if wait:
            self.wait(request, peer, f"to begin step {step}", step)
            self.check_sizes(step)
        return request.Test() and bool((array == sizes.mine).all())

    def wait(self, request: MPI.Request, peer: int, what: str, step: int) -> None:
        """Wait for a message of a step, as long as no rank is known to refuse that, or one before."""
        self.line.wait(request, peer, what, partial(self.check_sizes, step))

    def refuse(self, step: int) -> None:
        """Let what was in flight before a step come to its end; say what every rank was given."""
        for first, sizes in list(self.sizes.items()):  # it may be an earlier one, of which not all is known
            for rank, (_, request) in sizes.others.items():
                self.line.wait(request, rank, f"to begin step {first}")
            if first == step or any((array != sizes.mine).any() for array, _ in sizes.others.values()):
                step = first
                break
        self.given = min((b for b, mini in self.minis.items() if mini.step >= step), default=self.given)
        self.sizes = {}
        self.run(to_the_end=True)
        self.finish(step)
        line = self.line
        everyone = {rank: array.tolist() for rank, (array, _) in sizes.others.items()} | {
            line.rank: sizes.mine.tolist()
        }
        if len({total for total, _ in everyone.values()}) > 1:
            raise ValueError(disagreement(step, [everyone[rank][0] for rank in sorted(everyone)]))
        wrong = {rank: samples for rank, (total, samples) in sorted(everyone.items()) if samples != total}
        raise ValueError(
            f"step {step}: all {sizes.mine[0]} samples of a batch go through one pipeline, given "
            + ", ".join(f"{samples} on rank {rank}" for rank, samples in wrong.items())
        )

    # ------------------------------------------------------------------------------------------------ looking

    def fork(self) -> Stream:
        """A stream that goes on from here with copies of what is in flight; nothing is here any more (collective)."""
        line = self.line
        for step in list(self.sizes):
            self.agree(step)
        done = line.communicator.allgather((self.done["F"], self.done["B"])) if line.communicator else []
        arrived = {}
        for kind, neighbour, which in (("F", self.seat.stage - 1, 0), ("B", self.seat.stage + 1, 1)):
            if not 0 <= neighbour <= line.last:
                continue
            b = self.done[kind]
            while b < self.given and done[line.placement.at(neighbour, b)][which] > b:
                while self.posted[kind] <= b:
                    self.post_next(kind, neighbour, wait=True)
                array, request, peer = self.coming[kind, b]
                line.wait(request, peer, "for what it has sent")
                arrived[kind, b] = array, request, peer
                b += self.seat.count
        self.finish()
        for step in self.told:
            for _, request, rank in self.told[step]:
                line.wait(request, rank, f"for the loss of step {step}")
        other = copy.copy(self)
        other.forked, other.row, other.sending = True, copy.copy(self.row), []
        other.coming = self.coming | {
            key: (array.copy(), request, peer) for key, (array, request, peer) in arrived.items()
        }
        self.coming = arrived
        other.posted, other.done = dict(self.posted), dict(self.done)
        for kind in self.posted:  # what is not there is posted again, after the fork
            self.posted[kind] = max((b + self.seat.count for k, b in arrived if k == kind), default=self.done[kind])
        for name in "minis", "values", "totals", "told":
            setattr(other, name, dict(getattr(self, name)))
        other.kept = {b: copied(entry, self.stage.ctx) for b, entry in self.kept.items()}
        return other

    # ------------------------------------------------------------------------------------------------ actions

    def post(self) -> None:
        """Receives for what comes next."""
        stage, replicas = self.seat.stage, self.seat.count
        for kind, there, neighbour in (("F", stage > 0, stage - 1), ("B", not self.last, stage + 1)):
            until = min(self.given, self.done[kind] + AHEAD * replicas)
            while there and self.posted[kind] < until and self.post_next(kind, neighbour):
                pass

    def post_next(self, kind: str, neighbour: int, wait: bool = False) -> bool:
        """Post the next receive of a kind; says whether it was, which needs the size of the sender's batch."""
        b, network = self.posted[kind], self.stage.network
        peer = self.line.placement.at(neighbour, b)
        if not self.same_size(self.minis[b].step, peer, wait):
            return False
        shape = sample_shape(network) if kind == "F" else self.line.placement.shape(neighbour)
        array = np.empty((len(self.minis[b].x), *shape), network.dtype)
        self.coming[kind, b] = array, self.line.communicator.Irecv(array, peer, TAG), peer
        self.posted[kind] += self.seat.count
        return True

    def receive(self, kind: str, b: int) -> np.ndarray:
        while self.posted[kind] <= b:
            self.post_next(kind, self.seat.stage + (1 if kind == "B" else -1), wait=True)
        array, request, peer = self.coming[kind, b]
        what = "the input" if kind == "F" else "the gradient of the output"
        self.wait(request, peer, f"for {what} of {self.stage.network.name}", self.minis[b].step)
        del self.coming[kind, b]
        return array

    def send(self, array: np.ndarray, stage: int, b: int) -> None:
        array, peer = np.ascontiguousarray(array), self.line.placement.at(stage, b)
        self.sending.append((self.line.communicator.Isend(array, peer, TAG), array, peer, self.minis[b].step))

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
        if self.line.note and not self.forked:
            named = action if b is None else action._replace(micro_batch=self.before + b)
            self.line.note(str(named), start, time.perf_counter())
        if b is not None:
            self.done[kind] = b + self.seat.count

    def forward(self, b: int, x: np.ndarray) -> None:
        line, stage, mini = self.line, self.stage, self.minis[b]
        batch = MicroBatch(step=mini.step, sample=mini.sample)
        stage.ctx.network_context.on_gradients_ready = None
        version = min(line.seen(b, self.seat.stage), line.trainer.sync.updates)  # fewer, where nothing is applied
        output, saved = stage.network.forward(line.trainer.sync.version(version), x, stage.ctx, batch)
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
        array = np.array([self.values[step]])
        for rank in range(len(self.line.placement.rows)):
            if rank != self.line.rank:
                self.sending.append((self.line.communicator.Isend(array, rank, LOSSES), array, rank, step))

    def backward(self, b: int, gy: np.ndarray | None) -> None:
        stage = self.stage
        self.agree(self.minis[b].step)
        saved, own, version, batch = self.kept.pop(b)
        gy = own if gy is None else gy
        self.bad = self.bad or bool(np.isnan(gy.flat[0]))
        if self.bad:
            gx = np.full((len(gy), *sample_shape(stage.network)), np.nan, stage.network.dtype)
        else:
            batch.accumulate = False
            sync = self.line.trainer.sync
            early = self.seat.count > 1 and self.all_come_here()
            self.began = early
            stage.ctx.network_context.on_gradients_ready = sync.begin_sum() if early else None
            p = sync.version(version)
            gx = stage.network.backward(p, stage.g, gy, saved, stage.ctx, batch)
        if self.seat.stage:
            self.send(gx, self.seat.stage - 1, b)
        self.wrote = not self.bad
        if self.seat.count == 1:
            self.update()

    def sum_gradients(self, b: None, given: None) -> None:
        """Over the replicas: those of one mini-batch each; and whether a loss was none."""
        sync = self.line.trainer.sync
        if not self.wrote:
            sync.gradients[...] = 0
        if not (self.wrote and self.began):
            sync.begin_sum()
        self.bad = sync.sum_replicas(self.bad)
        self.update()

    def update(self) -> None:
        """Apply what is there, at the rate of its first mini-batch; forget what no mini-batch needs any more."""
        replicas, first = self.seat.count, self.rounds * self.seat.count
        rate, self.wrote = self.minis[first].rate, False
        self.rounds += 1
        if not self.bad:
            following = self.seat.replica + self.rounds * replicas
            try:
                self.line.trainer.sync.apply(rate, self.line.seen(following, self.seat.stage))
            except FloatingPointError:  # a norm that is not finite: nothing was updated
                self.bad = True
        for b in range(first, min(first + replicas, self.given)):
            del self.minis[b]


def copied(entry: tuple, ctx: LayerContext) -> tuple:
    """A copy of what the backward pass of a mini-batch needs, which does not reach layers and their contexts."""
    memo = {}
    for each in contexts(ctx):
        for part in each, each.layer, each.network_context:
            memo[id(part)] = part
    return copy.deepcopy(entry, memo)
