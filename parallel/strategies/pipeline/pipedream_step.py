"""PipeDream's step: the pipeline's `PipelineStep`, whose rounds have no end, and go on from one batch to the next.

A step adds its mini-batches, and the rank goes on in its row of the schedule, which is endless, until it would need a
mini-batch that has not been added. So what waits for its backward pass waits for the next step; the last stage alone
has done all. To the end, it does what is left in the row's order, without the mini-batches that do not exist.

Mini-batches are counted from the last time at which nothing was in flight. Receives are posted some ahead, into arrays
of their own, which layers may keep.

**Sizes.** Every rank sends all others the size of the batch that a step begins with. A message with samples of that
step is received only once its sender's size is known to be the same, and a gradient of it is applied only once all are.
Ranks that were given different sizes all refuse the step, after they have completed what was in flight before it.

**Looking.** `fork` returns a step that can run to its end on copies, while this one stays as it is. All that was sent
before has arrived by then, so the messages of the fork are its own.

**Losses.** The ranks of the last stage send all others the loss of a step as soon as they have it; who reads it some
steps later does not wait. **What is not finite**: the gradient of a loss that is not finite is sent back as NaN, so
each stage learns of it in its turn, and applies neither this gradient nor any after it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, tee
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.failures.unfinished import keep_alive
from nn.core.context import LayerContext
from nn.training.trainer import micro_batches
from parallel.strategies.pipeline.actions import Action
from parallel.strategies.pipeline.executor import contexts
from parallel.strategies.pipeline.schedules import pipedream, seat
from parallel.strategies.pipeline.step import Batch, Message, PipelineRound, PipelineStep, Place, Work
from parallel.sync.step_result import disagreement

ENDLESS = 1 << 62  # mini-batches
AHEAD = 2  # receives of each kind that are posted before they are needed
LOSSES, SIZES = 30, 31  # tags of the messages with losses, and with sizes of batches
INPUT, OUTPUT = {"F": "input", "B": "output_gradient"}, {"F": "output", "B": "input_gradient"}  # buffers of an action
COPIED = ("batches", "losses", "totals", "losses_coming", "posted", "done", "written")  # by a fork


class Sizes(NamedTuple):
    """The size of a step's batch, and the samples given, on this rank; of all others: rank -> (array, request)."""

    mine: np.ndarray
    others: dict[int, tuple[np.ndarray, MPI.Request]]


class PipeDreamStep(PipelineStep):
    """The mini-batches of one rank since nothing was in flight.

    Parameters
    ----------
    pipeline : PipeDreamPass
    before : int
        Mini-batches before these, for the names of what is measured.

    Attributes
    ----------
    given : int
        Mini-batches that steps have added.
    updates : int
        Rounds of backward passes, one of each replica, that have ended in an update.
    bad : bool
        Whether a loss was not finite: nothing is applied any more.
    latest : array
        The samples of the last step.
    """

    def __init__(self, pipeline, before: int):
        super().__init__(pipeline, {})
        placement, ranks = pipeline.placement, len(pipeline.placement.rows)
        self.before, self.seat = before, seat(pipeline.rank, ranks, pipeline.replicas)
        stage, count = self.seat.stage, self.seat.count
        self.stage, self.last = pipeline.stages[stage], stage == pipeline.last
        existing = range(pipeline.last + 1)
        self.sources = {kind: at for kind, at in (("F", stage - 1), ("B", stage + 1)) if at in existing}
        self.targets = {kind: at for kind, at in (("F", stage + 1), ("B", stage - 1)) if at in existing}
        (self.row,) = tee(pipedream(pipeline.rank, ranks, ENDLESS, pipeline.replicas), 1)  # which can be copied
        self.now: Action = next(self.row)
        self.warm_up, self.count = pipeline.warm_up[stage], count
        self.given = self.updates = 0
        self.forked = self.bad = self.summing = False  # `summing`: the gradients that are there leave already
        self.posted = {"F": self.seat.replica, "B": self.seat.replica}  # the first of which no receive is posted
        self.done = dict(self.posted)
        self.losses: dict[int, float] = {}  # step -> this rank's part of its loss
        self.totals: dict[int, float] = {}
        self.losses_coming: dict[int, list] = {}  # step -> the parts of other ranks of the last stage
        self.owners = placement.replicas[pipeline.last]
        self.sizes: dict[int, Sizes] = {}  # step -> those of all ranks, until they are known to be the same

    # ------------------------------------------------------------------------------------------------ steps

    def add(self, x: np.ndarray, y: np.ndarray, step: int, total: int, first: int, rate: float) -> None:
        """Add a step's samples, as mini-batches."""
        self.send_size(step, total, len(x))
        self.latest = x
        if self.seat.stage == 0:
            x = x.copy()  # who gave it may write into it before its last backward pass
        trainer = self.pipeline.trainer
        for rows in micro_batches(total, min(total, self.pipeline.micro_batches)):
            weight = trainer.weight(y[rows])
            share = weight / trainer.mean_over(total)
            batch = Batch(x[rows], y[rows], weight or 1.0, first + rows.start, step, share=share, rate=rate)
            self.batches[self.given] = batch
            self.given += 1
        self.losses[step], self.totals[step], self.losses_coming[step] = 0.0, trainer.weight_in_epoch(total), []
        for rank in self.owners:
            if rank != self.pipeline.rank:
                array = np.empty(1)
                request = self.pipeline.communicator.Irecv(array, rank, LOSSES)
                self.losses_coming[step].append((array, request, rank))
        to_do = range(self.done["F"], self.given, self.count)
        if self.last and not any(self.batches[b].step == step for b in to_do):
            self.send_loss(step)

    def rounds(self, to_the_end: bool = False) -> Iterator[PipelineRound]:
        """Go on in the row as far as mini-batches are there; or until nothing is in flight."""
        while self.due(to_the_end):
            action = self.now
            receives = chain(self.receives_ahead(), self.receives_until(action)) if self.sources else ()
            yield PipelineRound(receives, (), self.work(action))
            if action.kind in self.targets:
                yield PipelineRound((), (self.sent(action),), ())
            self.end(action)
            self.now = next(self.row)

    def due(self, to_the_end: bool) -> bool:
        """Whether the row's next action can be done; passes over those of mini-batches that will not come."""
        while not to_the_end or self.updates * self.count < self.given:
            if self.now.kind == "REDUCE_GRAD":
                return to_the_end or self.all_replicas_go_backward()
            if self.now.micro_batch < self.given:
                return True
            if not to_the_end:
                return False
            self.now = next(self.row)
        return False

    def all_replicas_go_backward(self) -> bool:
        """Whether every replica can do its next backward pass with the mini-batches that were given."""
        return (self.warm_up + self.updates + 1) * self.count <= self.given

    def end(self, action: Action) -> None:
        """Do what follows an action: send a loss that is complete, sum over replicas, update."""
        kind, b = action.kind, action.micro_batch
        if kind == "REDUCE_GRAD":
            self.sum_gradients(action)
        elif kind == "B" and self.count == 1:
            self.update()
        elif kind == "F" and self.last:
            step, following = self.batches[b].step, b + self.count
            if following >= self.given or self.batches[following].step > step:
                self.send_loss(step)
        if kind in self.done:
            self.done[kind] = b + self.count

    def loss_of(self, step: int) -> float:
        """Return the loss of a step, the same on all ranks."""
        parts = {self.pipeline.rank: self.losses[step]}
        for array, request, rank in self.losses_coming[step]:
            self.wait(request, rank, f"for the loss of step {step}", step)
            parts[rank] = float(array[0])
        return sum(parts[rank] for rank in self.owners)

    def send_loss(self, step: int) -> None:
        """Send all others this rank's part of a step's loss."""
        array = np.array([self.losses[step]])
        for rank in range(len(self.pipeline.placement.rows)):
            if rank != self.pipeline.rank:
                self.send(Message(rank, array, step=step), LOSSES)

    def forget(self, step: int) -> float:
        """Forget a step whose loss is known; return the samples of its batch."""
        del self.losses[step], self.losses_coming[step]
        return self.totals.pop(step)

    def requests(self):
        losses = (request for parts in self.losses_coming.values() for _, request, _ in parts)
        sizes = (request for each in self.sizes.values() for _, request in each.others.values())
        return [*super().requests(), *losses, *sizes]

    def bytes(self) -> int:
        """Return the bytes that other ranks send."""
        return sum(message.memory.nbytes for _, message in self.receiving.values())

    # ------------------------------------------------------------------------------------------------ sizes

    def send_size(self, step: int, total: int, samples: int) -> None:
        """Send all ranks the size that this rank was given of a step's batch, and how many samples it has."""
        mine, pipeline = np.array([total, samples]), self.pipeline
        sizes = self.sizes[step] = Sizes(mine, {})
        for rank in range(len(pipeline.placement.rows)):
            if rank != pipeline.rank:
                array = np.empty_like(mine)
                sizes.others[rank] = array, pipeline.communicator.Irecv(array, rank, SIZES)
                self.send(Message(rank, mine, step=step), SIZES)
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

    def same_size(self, step: int, peer: int, wait: bool = False) -> bool:
        """Whether a rank is known to have been given this one's size of a step; with `wait`, wait for it."""
        if not (sizes := self.sizes.get(step)):
            return True
        array, request = sizes.others[peer]
        if wait:
            self.wait(request, peer, f"to begin step {step}", step)
            self.check_sizes(step)
        return request.Test() and bool((array == sizes.mine).all())

    def wait(self, request, peer, what, step):
        """Wait for a message of a step, as long as no rank is known to refuse that, or one before."""
        self.pipeline.wait(request, peer, what, partial(self.check_sizes, step))

    def refuse(self, step: int) -> None:
        """Complete what was in flight before a step; say what every rank was given."""
        for first, sizes in list(self.sizes.items()):  # it may be an earlier one, of which not all is known
            for rank, (_, request) in sizes.others.items():
                self.pipeline.wait(request, rank, f"to begin step {first}")
            if first == step or any((array != sizes.mine).any() for array, _ in sizes.others.values()):
                step = first
                break
        self.given = min((b for b, batch in self.batches.items() if batch.step >= step), default=self.given)
        keep_alive(self.requests())  # the sizes of later steps are forgotten, and may still arrive
        self.sizes = {}
        self.run(self.rounds(to_the_end=True))
        self.finish(step)
        everyone = {rank: array.tolist() for rank, (array, _) in sizes.others.items()} | {
            self.pipeline.rank: sizes.mine.tolist()
        }
        if len({total for total, _ in everyone.values()}) > 1:
            raise ValueError(disagreement(step, [everyone[rank][0] for rank in sorted(everyone)]))
        wrong = {rank: samples for rank, (total, samples) in sorted(everyone.items()) if samples != total}
        raise ValueError(
            f"step {step}: all {sizes.mine[0]} samples of a batch go through one pipeline, given "
            + ", ".join(f"{samples} on rank {rank}" for rank, samples in wrong.items())
        )

    # ------------------------------------------------------------------------------------------------ looking

    def fork(self) -> PipeDreamStep:
        """Return a step that goes on from here with copies; no message is under way any more (collective)."""
        pipeline = self.pipeline
        for step in list(self.sizes):
            self.agree(step)
        done = pipeline.communicator.allgather((self.done["F"], self.done["B"])) if pipeline.communicator else []
        arrived = {}
        for kind, neighbour in self.sources.items():
            b = self.done[kind]
            while b < self.given and done[pipeline.placement.rank_of(neighbour, b)][kind == "B"] > b:
                for message in self.receives_until(Action(self.seat.stage, kind, b)):
                    self.receive(message)
                place = Place(INPUT[kind], self.seat.stage, b)
                request, message = arrived[place] = self.receiving[place]
                pipeline.wait(request, message.peer, "for what it has sent")
                b += self.count
        self.finish()
        for step, parts in self.losses_coming.items():
            for _, request, rank in parts:
                pipeline.wait(request, rank, f"for the loss of step {step}")
        fork = copy.copy(self)
        fork.forked, fork.row, fork.sending = True, copy.copy(self.row), []
        fork.receiving = self.receiving | {
            place: (request, message._replace(memory=message.memory.copy()))
            for place, (request, message) in arrived.items()
        }
        for name in COPIED:
            setattr(fork, name, copy.copy(getattr(self, name)))
        self.receiving = arrived
        for kind in self.posted:  # what is not there is posted again, after the fork
            there = [place.slot + self.count for place in arrived if place.buffer == INPUT[kind]]
            self.posted[kind] = max(there, default=self.done[kind])
        fork.saved, fork.micro_batches = copied((self.saved, self.micro_batches), self.stage.ctx)
        return fork

    # ------------------------------------------------------------------------------------------------ messages

    def receives_ahead(self) -> Iterator[Message]:
        """Receives for what comes next, as far as their senders are known to have batches of the same size."""
        for kind, neighbour in self.sources.items():
            until = min(self.given, self.done[kind] + AHEAD * self.count)
            while (b := self.posted[kind]) < until:
                if not self.same_size(self.batches[b].step, self.pipeline.placement.rank_of(neighbour, b)):
                    break
                yield self.next_receive(kind)

    def receives_until(self, action: Action) -> Iterator[Message]:
        """Receives up to that of an action; waits until the sizes of their senders' batches are known."""
        kind, b = action.kind, action.micro_batch
        while kind in self.sources and (following := self.posted[kind]) <= b:
            peer = self.pipeline.placement.rank_of(self.sources[kind], following)
            self.same_size(self.batches[following].step, peer, wait=True)
            yield self.next_receive(kind)

    def next_receive(self, kind: str) -> Message:
        """Return the next receive of a kind, into memory of its own."""
        b, stage, placement = self.posted[kind], self.seat.stage, self.pipeline.placement
        self.posted[kind] += self.count
        batch, shape = self.batches[b], placement.shape(stage if kind == "F" else stage + 1)
        memory = np.empty((len(batch.x), *shape), self.stage.network.dtype)
        return Message(placement.rank_of(self.sources[kind], b), memory, Place(INPUT[kind], stage, b), batch.step)

    def work(self, action: Action) -> Iterator[Work]:
        """Return a computation, with what it reads and writes."""
        stage, kind, b = action
        if kind in self.done:
            reads = (Place(INPUT[kind], stage, b),) if kind in self.sources else ()
            writes = (Place(OUTPUT[kind], stage, b),) if kind in self.targets else ()
            yield Work(action, reads, writes, kind == "B" and self.count > 1)

    def sent(self, action: Action) -> Message:
        """Return the send of what an action has written."""
        stage, kind, b = action
        peer = self.pipeline.placement.rank_of(self.targets[kind], b)
        return Message(peer, None, Place(OUTPUT[kind], stage, b), self.batches[b].step)

    # ------------------------------------------------------------------------------------------------ actions

    def record(self, action, start):
        if self.pipeline.note and not self.forked:
            b = action.micro_batch
            named = action if b is None else action._replace(micro_batch=self.before + b)
            self.pipeline.note(str(named), start, time.perf_counter())

    def version(self, action):
        """Return how many updates the weights have seen: fewer than the schedule says where no more are applied."""
        return min(self.pipeline.version(action.micro_batch, action.stage), self.pipeline.trainer.sync.updates)

    def weights(self, stage, version):
        return self.pipeline.trainer.sync.weights(version)

    def add_loss(self, batch, loss):
        self.losses[batch.step] += loss * batch.share
        self.bad = self.bad or not math.isfinite(loss)

    def backward(self, action, stage, x, gy):
        """Go backward with the weights of the forward pass; send NaN back after a loss that was not finite."""
        key = action.stage, action.micro_batch
        self.agree(self.batches[action.micro_batch].step)
        own = self.saved[key][1]
        gy = own if gy is None else gy
        self.bad = self.bad or bool(np.isnan(gy.flat[0]))
        if self.bad:
            del self.saved[key], self.micro_batches[key]
            return np.full((len(gy), *self.pipeline.placement.shape(action.stage)), np.nan, stage.network.dtype)
        self.summing = self.count > 1 and self.all_replicas_go_backward()
        self.pipeline.on_ready = self.pipeline.trainer.sync.begin_sum() if self.summing else None
        return super().backward(action, stage, x, gy)

    def sum_gradients(self, action: Action) -> None:
        """Sum over the replicas the gradients of one mini-batch each, and whether a loss was not finite; update."""
        sync, start = self.pipeline.trainer.sync, time.perf_counter()
        if not self.written:
            sync.gradients[...] = 0
        if not (self.written and self.summing):
            sync.begin_sum()
        self.bad = sync.sum_replicas(self.bad)
        self.update()
        self.record(action, start)

    def update(self) -> None:
        """Apply what is there, at the rate of its first mini-batch; forget what no mini-batch needs any more."""
        first = self.updates * self.count
        self.written.clear()
        self.updates += 1
        if not self.bad:
            following = self.seat.replica + self.updates * self.count
            needed = self.pipeline.version(following, self.seat.stage)
            try:
                self.pipeline.trainer.sync.apply(self.batches[first].rate, needed)
            except FloatingPointError:  # a norm that is not finite: nothing was updated
                self.bad = True
        for b in range(first, min(first + self.count, self.given)):
            del self.batches[b]


def copied(saved: tuple, ctx: LayerContext) -> tuple:
    """Return a copy of what backward passes need, which does not reach layers and their contexts."""
    memo = {}
    for each in contexts(ctx):
        for part in each, each.layer, each.network_context:
            memo[id(part)] = part
    return copy.deepcopy(saved, memo)
