"""PipeDream: every mini-batch has an update of its own, and the pipeline is never flushed.

    trainer = PipeDream(network, loss, optimizer, communicator, mini_batches=16)
    loss = trainer.step(x, y)              # 16 mini-batches come in

1F1B, in which a stage updates its weights after each backward pass. Mini-batches that are in flight meanwhile have seen
older ones, so a stage keeps those (**weight stashing**): the backward pass of a mini-batch uses the weights that its
forward pass used, and its gradient is applied to the newest. With n stages and w_s(t) for the weights of stage s after
t updates,

    w(t+1) = w(t) - lr grad f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t))

With **vertical sync** a mini-batch uses the weights of one time in all stages, those that the first stage has when it
begins: w(t+1) = w(t) - lr grad f(w(t-n+1)). Stage s keeps at most n - s versions, counted from 0; with vertical sync
all keep n.

**Replicated stages** (1F1B-RR): r_s ranks have stage s, and mini-batch b is its replica b mod r_s's, forward and
backward. Each r_s backward passes end in one update, with the sum of their gradients; the forward pass of b uses the
weights after b // r_s - u_s updates, where u_s is the stage's warm-up (schedules.py), and with vertical sync the last
ones that have seen no more mini-batches than those that b uses on the first stage.

So this is not what one process computes, but it is the same every time. A step is the mini-batches of one global batch;
at its end some are still in flight, and go on with those of the next step (pipedream_step.py). A step returns the loss
of some steps before, which is known by then without waiting (of the first step, as long as there is none). At the end
of an epoch, and for a checkpoint (`synchronize`), the pipeline is drained and all of it is applied, so nothing is lost,
and the pipeline fills again. Looking in between shows the same, on copies of what is in flight, and changes nothing. A
step's mini-batches are updates at that step's learning rate. Running statistics are each replica's own until then, and
become their mean.

A loss that is not finite is returned as late as others; no stage applies that mini-batch's gradient, or a later one.
Sources: Harlap et al. 2018, Narayanan et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from mpi4py import MPI

from nn.training.trainer import micro_batches
from parallel.strategies.pipeline.actions import ACTION, parse
from parallel.strategies.pipeline.checking import Span
from parallel.strategies.pipeline.executor import PipelinePass
from parallel.strategies.pipeline.picture import compare
from parallel.strategies.pipeline.pipedream_step import PipeDreamStep
from parallel.strategies.pipeline.placement import check_stage_updates


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
        self.in_flight: PipeDreamStep | None = None
        self.count = 0  # mini-batches before those of `in_flight`
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

    def bind(self, trainer):
        super().bind(trainer)
        check_stage_updates(self.placement, trainer.optimizer)
        (stage,) = self.stages
        if max(self.replicas) > 1:
            peers = self.communicator.Split(stage, self.rank)
            trainer.mesh.made.append(peers)
            self.peers = peers if self.replicas[stage] > 1 else None
            if self.peers:
                trainer.sync.make_buckets(peers)

    def parts(self, samples):
        """Return (lo, hi) of every mini-batch: of one sample each, where there are fewer samples than mini-batches."""
        return [(rows.start, rows.stop) for rows in micro_batches(samples, min(samples, self.micro_batches))]

    def version(self, b: int, stage: int) -> int:
        """Return how many updates the weights of a stage have seen that mini-batch b uses."""
        first = 0 if self.vertical_sync else stage
        updates = max(0, b // self.replicas[first] - self.warm_up[first])
        return updates * self.replicas[first] // self.replicas[stage]

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """Start the batch's mini-batches; return the loss of some steps before."""
        self.check(x)
        step, sync = trainer.steps, trainer.sync
        if self.in_flight is None:
            self.in_flight = PipeDreamStep(self, self.count)
        if step != self.following:  # another state was loaded
            self.losses.clear()
        self.following = step + 1
        self.before[step] = x, self.trainer.buffers.copy()
        with self.running(self.in_flight):
            self.in_flight.add(x, y, step, total, micro.first, float(trainer.optimizer.lr))
            self.in_flight.run(self.in_flight.rounds())
            known = max(step - self.delay, min((*self.losses, *self.in_flight.losses)))
            sync.loss = self.complete_loss(known)
        self.late -= sync.loss * trainer.weight_in_epoch(total)
        if not math.isfinite(sync.loss):
            self.drain()
        return sync.loss

    def complete_loss(self, step: int) -> float:
        """Return the loss of a step; forget what is kept of steps before it."""
        if step not in self.losses:
            self.losses[step] = self.in_flight.loss_of(step)
            self.late += self.losses[step] * self.in_flight.forget(step)
            if math.isfinite(self.losses[step]):
                self.before.pop(step)
        for old in [old for old in self.losses if old < step - self.delay]:
            del self.losses[old]
        return self.losses[step]

    def drain(self) -> bool:
        """Go on until nothing is in flight (collective); return whether something was not finite.

        Then the trainer has what it needs to say what.
        """
        in_flight = self.in_flight
        if in_flight is None or self.failed:
            return False
        with self.running(in_flight):
            in_flight.run(in_flight.rounds(to_the_end=True))
            for step in list(in_flight.losses):
                self.complete_loss(step)
            in_flight.finish()
        self.in_flight = None
        self.count += in_flight.given
        trainer = self.trainer
        trainer.sync.empty()
        bad = np.array([float(in_flight.bad or any(not math.isfinite(loss) for loss in self.losses.values()))])
        if self.communicator:
            self.communicator.Allreduce(MPI.IN_PLACE, bad)
        if bad[0]:
            step = min((step for step, loss in self.losses.items() if not math.isfinite(loss)), default=None)
            x, trainer.buffers[:] = self.before.get(step, (in_flight.latest, trainer.buffers))
            trainer.suspects = [(0, x)]
            self.losses.clear()
            self.late = 0.0
        self.before.clear()
        self.share_buffers()
        if bad[0]:
            trainer.buffers_before[:] = trainer.buffers
        return bool(bad[0])

    def drain_copy(self) -> None:
        """Drain copies of what is in flight: the sync restores the arrays that this overwrites (collective)."""
        if self.in_flight is not None and not self.failed:
            with self.running(self.in_flight):
                copy = self.in_flight.fork()
                with self.running(copy):
                    copy.run(copy.rounds(to_the_end=True))
                    copy.finish()
        self.share_buffers()

    def share_buffers(self) -> None:
        """Give all replicas the mean of their buffers."""
        if self.peers and self.trainer.buffers.size:
            self.peers.Allreduce(MPI.IN_PLACE, self.trainer.buffers)
            self.trainer.buffers /= self.peers.size

    def forget(self) -> None:
        """Forget what is in flight, which has arrived: another state was loaded."""
        if self.in_flight is not None:
            self.count += self.in_flight.given
        self.in_flight, self.late = None, 0.0
        self.losses.clear()
        self.before.clear()
        self.trainer.sync.empty()

    def loss_in_flight(self):
        late, self.late = self.late, 0.0
        return late

    def in_transit(self):
        return self.in_flight.bytes() if self.in_flight else 0

    def pictures(self, events):
        """Some mini-batches from the middle of the run, beside what the schedule says of the first ones."""
        ranks = len(self.placement.rows)
        first = max(0, self.count // 2 - ranks)
        actions = [(parse(event["name"]), event) for event in events if ACTION.fullmatch(event["name"])]
        inside = range(first, first + 2 * ranks)
        mine = [event for action, event in actions if action.micro_batch in inside]
        if len(mine) < 2 * len(inside) * len(self.replicas):  # not whole
            return {}
        begin, end = min(event["start"] for event in mine), max(event["end"] for event in mine)
        found: list[list[Span]] = [[] for _ in range(ranks)]
        for action, event in actions:
            sums = action.micro_batch is None and begin <= event["start"] and event["end"] <= end
            if sums or action.micro_batch in inside:
                if not sums:
                    action = action._replace(micro_batch=action.micro_batch - first)
                row = found[event["rank"]]
                row.append(Span(event["rank"], len(row), (action,), event["start"] - begin, event["end"] - begin))
        return {"pipeline.png": compare(found, self.placement.report.spans)}

    def describe(self):
        late = f", losses returned {self.delay} steps late" if self.delay else ""
        return f"{super().describe()}; never flushed, {'-'.join(map(str, self.replicas))} ranks a stage{late}"
