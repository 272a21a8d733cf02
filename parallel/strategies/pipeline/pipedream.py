"""PipeDream: every mini-batch has an update of its own, and the pipeline is never flushed.

    trainer = PipeDream(network, loss, optimizer, communicator, mini_batches=16)
    loss = trainer.step(x, y)              # 16 mini-batches come in

1F1B, in which a stage updates its weights after each backward pass. Mini-batches that are in flight meanwhile have seen
older ones, so a stage keeps those (**weight stashing**): the backward pass of a mini-batch uses the weights that its
forward pass used, and its gradient is applied to the newest. With n stages and w_s(t) for the weights of stage s after
t updates,

    w(t+1) = w(t) - lr grad f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t))

With **vertical sync** a mini-batch meets the weights of one time in all stages, those that the first stage has when it
begins: w(t+1) = w(t) - lr grad f(w(t-n+1)). Stage s keeps at most n - s versions, counted from 0; with vertical sync
all keep n.

**Replicated stages** (1F1B-RR): r_s ranks have stage s, and mini-batch b is its replica b mod r_s's, forward and
backward. Each r_s backward passes end in one update, with the sum of their gradients; the forward pass of b meets the
weights after b // r_s - u_s updates, where u_s is the stage's warm-up (schedules.py), and with vertical sync the last
ones that have seen no more mini-batches than those that b has met on the first stage.

So this is not what one process computes, but it is the same every time. A step is the mini-batches of one global batch;
at its end some are still in flight, and go on with those of the next step (stream.py). A step returns the loss of some
steps before, which is known by then without waiting (of the first step, as long as there is none). At the end of an
epoch, and for a checkpoint (`settle`), what is in flight comes to its end and is applied, so nothing is lost, and the
pipeline fills again. Looking in between shows the same, on copies of what is in flight, and changes nothing. A step's
mini-batches are updates at that step's learning rate. Running statistics are each replica's own until then, and become
their mean.

A loss that is not finite is told as late; neither that mini-batch's gradient nor one after it is applied by a stage.
Sources: Harlap et al. 2018, Narayanan et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from nn.training.trainer import micro_batches
from parallel.state.placed import OWN, PlacedArray, Shard, in_transit
from parallel.state.table import kind_of_private
from parallel.strategies.pipeline.actions import ACTION, parse
from parallel.strategies.pipeline.checking import Span
from parallel.strategies.pipeline.executor import PipelinePass
from parallel.strategies.pipeline.picture import compare
from parallel.strategies.pipeline.placement import check_updates_apart
from parallel.strategies.pipeline.stream import Stream
from parallel.sync.local_update import LocalUpdate, temporarily
from parallel.sync.messages import BUCKETING, Buckets
from parallel.sync.step_result import StepResult

UPDATES = OWN + "updates/"  # in a checkpoint


class Stashed(LocalUpdate):
    """One stage's parameters, updated after every mini-batch; older versions as long as a mini-batch needs them.

    Parameters
    ----------
    bucketing : bucket, first_bucket, overlap of sync/messages.py
        How the replicas of a stage sum their gradients.

    Attributes
    ----------
    updates : int
        Made since nothing was in flight.
    made : array of one number
        Updates of this stage since training began, or steps of the strategy that trained before: what Adam counts.
    stash : dict
        After how many of them -> (parameters, how layers see them).
    loss : float
        What the step returns.
    buckets : Buckets or None
        What replicas sum.
    """

    buckets: Buckets | None = None
    phases = (
        ("compute", "compute_gradients", False),
        ("communicate", "sync.sum_replicas", False),
        ("update", "sync.apply", False),
    )

    def __init__(self, bucketing: dict = BUCKETING):
        self.bucketing = bucketing

    def allocate(self):
        super().allocate()
        self.stash: dict[int, tuple[np.ndarray, object]] = {}
        self.made, self.updates, self.loss = np.zeros((), np.int64), 0, 0.0
        self.counts = {name: self.made.copy() for name in self.layout.specs}  # `made`, for the state

    def empty(self) -> None:
        """Nothing is in flight."""
        self.stash, self.updates = {}, 0

    def version(self, updates: int):
        """The parameters after so many updates, as layers see them."""
        return self.p if updates == self.updates else self.stash[updates][1]

    def make_buckets(self, peers) -> None:
        """Make the buckets in which the ranks of `peers`, which have this stage, sum gradients (collective)."""
        layout, size = self.layout, self.layout.size
        vector = self.vector[: size + 1]  # behind the gradients, whether a loss was bad
        self.buckets = Buckets(peers, vector, layout.ends.values(), size, **self.bucketing)

    def begin_sum(self) -> Callable[[int], None]:
        """A mini-batch's gradients begin; what is told how many are finished."""
        self.buckets.begin()
        return self.buckets.ready

    def sum_replicas(self, bad: bool) -> bool:
        """Sum the gradients over the ranks with this stage; says whether any of them is `bad`."""
        told = self.vector[self.layout.size : self.layout.size + 1]
        told[:] = bad
        if news := self.buckets.sum():
            self.say(news)
        return bool(told[0])

    def apply(self, rate: float, needed: int) -> None:
        """Update with the gradients that are there; keep the versions after `needed` updates and more."""
        self.stash = {version: kept for version, kept in self.stash.items() if version >= needed}
        if self.updates >= needed:
            copy = self.parameters.copy()
            self.stash[self.updates] = copy, self.layout.views(copy)
        with temporarily(self.optimizer, lr=rate):
            self.optimizer.update(self.parameters, self.gradients, self.slots, int(self.made), self.region)
        self.updates += 1
        self.made += 1

    def finish_step(self):
        return StepResult(self.loss, True)

    def update(self):
        """Every mini-batch has had its own, or will have it."""

    def settle(self):
        self.resume()
        self.settled = True
        return self.pass_.drain()

    def trained(self):
        yield from super().trained()
        yield self.vector
        yield self.made

    def synchronize(self):
        in_flight = self.stash, self.updates
        self.pass_.drain_copy()
        self.stash, self.updates = in_flight

    def before_load(self):
        """What was sent arrives (collective): if the other state is taken over, nothing is in flight any more."""
        self.look()

    def forget(self):
        super().forget()
        self.pass_.forget()

    def placed(self):
        """Also the updates of each array, so that another cut into stages goes on with them."""
        yield from super().placed()
        for name, count in self.counts.items():
            count[...] = self.made
            copy = name in self.layout.borrowed or (self.pass_.peers is not None and self.pass_.peers.rank > 0)
            yield PlacedArray(UPDATES + name, "", count, None, Shard(1), copy=copy)
        yield from in_transit(*(copy for copy, _ in self.stash.values()))

    def loaded(self, steps, anew=()):
        self.made[...] = steps if kind_of_private(UPDATES) in anew else max(self.counts.values())

    def describe(self):
        return f"replicas sum gradients by messages, {self.buckets.describe()}" if self.buckets else ""

    def close(self):
        """Free what is held beside arrays, once nothing is in flight (collective)."""
        self.look()
        self.forget()
        if self.buckets:
            self.buckets.close()


class PipeDreamPass(PipelinePass):
    """The pass: mini-batches with losses of their own, and a version of the weights for each.

    Parameters
    ----------
    mini_batches : int
    cuts : as for PipelinePass
    vertical_sync : bool
    limit : float
    replicas : numbers of ranks
        Of each stage; none: one for each.

    Attributes
    ----------
    replicas : tuple of int
    delay : int
        A step returns the loss of so many steps before.
    peers : collectives.Communicator or None
        Of the ranks with this rank's stage, where it has replicas.
    """

    def __init__(
        self,
        mini_batches: int,
        cuts: Iterable[int] | None,
        vertical_sync: bool,
        limit: float = 300.0,
        replicas: Sequence[int] = (),
    ):
        options = {"replicas": tuple(replicas)} if len(replicas) else {}
        super().__init__("pipedream", mini_batches, cuts, limit=limit, **options)
        self.vertical_sync = vertical_sync
        self.stream: Stream | None = None
        self.count = 0  # mini-batches before those of the stream
        self.before: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # step -> its samples, statistics before it
        self.losses: dict[int, float] = {}  # of the last steps, where they are known
        self.following = 0  # the step that comes next
        self.late = 0.0  # of the sum of losses: what steps have not returned yet

    def make_local_network(self, network, mesh):
        local = super().make_local_network(network, mesh)
        self.replicas = tuple(map(len, self.placement.replicas))
        before = [sum(self.replicas[:stage]) for stage in range(len(self.replicas))]
        ranks = sum(self.replicas)
        self.warm_up = [(ranks - 1 - b) // r for b, r in zip(before, self.replicas, strict=True)]
        self.delay = -(-self.warm_up[0] * self.replicas[0] // self.micro_batches)
        return local

    def start(self, mesh, network):
        super().start(mesh, network)
        mesh.agree({"vertical sync": self.vertical_sync, "mini-batches": self.micro_batches})

    def join(self, trainer):
        super().join(trainer)
        check_updates_apart(self.placement, trainer.optimizer)
        (stage,) = self.stages
        if max(self.replicas) > 1:
            peers = self.communicator.Split(stage, self.rank)
            trainer.mesh.made.append(peers)
            self.peers = peers if self.replicas[stage] > 1 else None
            if self.peers:
                trainer.sync.make_buckets(peers)

    def parts(self, samples):
        """Of fewer samples than mini-batches one each."""
        return [(rows.start, rows.stop) for rows in micro_batches(samples, min(samples, self.micro_batches))]

    def seen(self, b: int, stage: int) -> int:
        """How many updates of a stage mini-batch b sees."""
        first = 0 if self.vertical_sync else stage
        updates = max(0, b // self.replicas[first] - self.warm_up[first])
        return updates * self.replicas[first] // self.replicas[stage]

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """The batch's mini-batches come in; returns the loss of some steps before."""
        self.check(x)
        step, sync = trainer.steps, trainer.sync
        if self.stream is None:
            (stage,) = self.stages.values()
            self.stream = Stream(self, stage, self.count)
        if step != self.following:  # another state was loaded
            self.losses.clear()
        self.following = step + 1
        self.before[step] = x, self.trainer.buffers.copy()
        with self.kept_if_it_fails():
            self.stream.take(x, y, step, total, micro.first, float(trainer.optimizer.lr))
            self.stream.run()
            told = max(step - self.delay, min((*self.losses, *self.stream.values)))
            sync.loss = self.know(told)
        self.late -= sync.loss * trainer.weight_in_epoch(total)
        if not math.isfinite(sync.loss):
            self.drain()
        return sync.loss

    def know(self, step: int) -> float:
        """The loss of a step; what is kept of steps before it goes."""
        if step not in self.losses:
            self.losses[step] = self.stream.loss(step)
            self.late += self.losses[step] * self.stream.forget(step)
            if math.isfinite(self.losses[step]):
                self.before.pop(step)
        for old in [old for old in self.losses if old < step - self.delay]:
            del self.losses[old]
        return self.losses[step]

    def drain(self) -> bool:
        """Until nothing is in flight (collective); says whether something was not finite, and then takes care that the
        trainer can say what."""
        stream = self.stream
        if stream is None:
            return False
        with self.kept_if_it_fails():
            stream.run(to_the_end=True)
            for step in list(stream.values):
                self.know(step)
            stream.finish()
        self.stream = None
        self.count += stream.given
        trainer = self.trainer
        trainer.sync.empty()
        bad = np.array([float(stream.bad or any(not math.isfinite(loss) for loss in self.losses.values()))])
        if self.communicator:
            self.communicator.Allreduce(MPI.IN_PLACE, bad)
        if bad[0]:
            step = min((step for step, loss in self.losses.items() if not math.isfinite(loss)), default=None)
            x, trainer.buffers[:] = self.before.get(step, (stream.latest, trainer.buffers))
            trainer.suspects = [(0, x)]
            self.losses.clear()
            self.late = 0.0
        self.before.clear()
        self.share_buffers()
        if bad[0]:
            trainer.buffers_before[:] = trainer.buffers
        return bool(bad[0])

    def drain_copy(self) -> None:
        """As `drain`, with copies of what is in flight: the sync keeps what this overwrites (collective)."""
        if self.stream is not None:
            with self.kept_if_it_fails():
                stream = self.stream.fork()
                stream.run(to_the_end=True)
                stream.finish()
        self.share_buffers()

    def share_buffers(self) -> None:
        """Buffers become the mean of the replicas'."""
        if self.peers and self.trainer.buffers.size:
            self.peers.Allreduce(MPI.IN_PLACE, self.trainer.buffers)
            self.trainer.buffers /= self.peers.size

    def forget(self) -> None:
        """What is in flight, and has been seen to arrive, is not needed any more: another state was loaded."""
        if self.stream is not None:
            self.count += self.stream.given
        self.stream, self.late = None, 0.0
        self.losses.clear()
        self.before.clear()
        self.trainer.sync.empty()

    def owed(self):
        late, self.late = self.late, 0.0
        return late

    @contextmanager
    def kept_if_it_fails(self):
        """Messages may still arrive in the memory of a stream that has failed."""
        try:
            yield
        except BaseException:
            self.broken.append(self.stream)
            self.stream = None
            raise

    def in_transit(self):
        return self.stream.bytes() if self.stream else 0

    def pictures(self, events):
        """Some mini-batches from the middle of the run, beside what the schedule says of the first ones."""
        ranks = len(self.placement.rows)
        first = max(0, self.count // 2 - ranks)
        told = [(parse(event["name"]), event) for event in events if ACTION.fullmatch(event["name"])]
        inside = range(first, first + 2 * ranks)
        mine = [event for action, event in told if action.micro_batch in inside]
        if len(mine) < 2 * len(inside) * len(self.replicas):  # not whole
            return {}
        begin, end = min(event["start"] for event in mine), max(event["end"] for event in mine)
        found: list[list[Span]] = [[] for _ in range(ranks)]
        for action, event in told:
            sums = action.micro_batch is None and begin <= event["start"] and event["end"] <= end
            if sums or action.micro_batch in inside:
                if not sums:
                    action = action._replace(micro_batch=action.micro_batch - first)
                row = found[event["rank"]]
                row.append(Span(event["rank"], len(row), (action,), event["start"] - begin, event["end"] - begin))
        return {"pipeline.png": compare(found, self.placement.report.spans)}

    def describe(self):
        late = f", losses told {self.delay} steps late" if self.delay else ""
        return f"{super().describe()}; never flushed, {'-'.join(map(str, self.replicas))} ranks a stage{late}"
