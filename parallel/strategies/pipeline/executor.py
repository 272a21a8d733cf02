"""A pass through a network whose stages lie on different ranks, after any schedule.

The schedule is lowered to rounds of Compute, Send and Recv for the batch's size (lowering.py, where the simulator can
prove them), and run round by round (step.py). Gradients of a stage are added up in the order of its actions, and
divided by the size of the global batch: together the ranks hold what one process computes.

What this rank has of the network, one stage or several, lies in one layout, last stage first. So a sync sees a
network like any other, of which gradients finish from the front; while the last micro-batch goes backward its own are
on their way. An array that layers of several stages share has one gradient: the sum over those stages, made before it
is announced as finished.

Where there is an axis "tensor", too, each of its ranks has a part of every layer of its stages (strategies/tensor), and
sends its neighbours' counterparts what it has of the activations: all of them, or its part. Along an axis "context"
each has some positions of every sequence (strategies/context), in all stages. Pipelines along an axis "expert" have
other samples, and run in step: in a stage with experts their ranks ask each other (strategies/expert).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.failures.unfinished import keep_alive
from collectives.steps import chunk
from nn.core.context import LayerContext, MicroBatch
from nn.core.network import Network, NotFinite
from nn.losses import Loss
from nn.training.trainer import micro_batches
from parallel.axis import AXES, IN_LAYERS
from parallel.passes.forward_backward import ForwardBackward
from parallel.state.splits import NetworkPart, sample_shape
from parallel.state.stages import local_network
from parallel.strategies.expert.dealing import check as check_experts
from parallel.strategies.expert.dealing import deal
from parallel.strategies.expert.expert_pass import bind_experts, replicated_names
from parallel.strategies.pipeline.actions import Rows, parts, write
from parallel.strategies.pipeline.picture import compare, measured
from parallel.strategies.pipeline.placement import place
from parallel.strategies.pipeline.step import TAG, PipelinePlan, PipelineStep, wait_for
from parallel.strategies.tensor.moves import sum_as_one
from parallel.strategies.tensor.rewriting import in_words, partial_gradients, share

PLANS = 8  # lengths of batches that a pipeline is ready for at once: each has memory for what it receives


@dataclass
class OwnStage:
    """A stage of this rank: its layers, and how they see the buffers that belong to them.

    Attributes
    ----------
    start : int
        Where the stage begins in the rank's layout.
    finished : int
        How much of the stage's gradients is.
    """

    network: Network
    p: Any
    g: Any
    buffers: np.ndarray
    ctx: LayerContext
    start: int
    pipeline: PipelinePass
    finished: int = 0

    def ready(self, end: int) -> None:
        """Take how much of this stage's gradients is finished."""
        self.finished = min(end, self.network.layout.own)
        self.pipeline.announce_ready()


class PipelinePass(ForwardBackward):
    """Forward and backward of a batch, in micro-batches, through the stages on the axis "pipeline".

    Parameters
    ----------
    schedule : str, generator function or rows
        As for `check`. A stage has to lie on one rank (but see pipedream.py).
    micro_batches : int
        Into so many parts, as alike as possible, the samples of every place on the axis "data" are cut.
    cuts : numbers of children with which the second stage and all after it begin, or None
        None: so that the largest number of multiply-accumulates in a stage is as small as it can be.
    recompute : bool
        Keep of a micro-batch only what a stage is given, and compute its forward pass again before its backward pass.
    limit : float
        Seconds after which a rank gives up that waits for another one's message.
    loss : Loss or None
        Of whole outputs; needed where the mesh has an axis "tensor".
    way : {"pairs", "width", "sequence"}
        How its ranks share layers; see tensor/rewriting.py.
    positions : SequenceParts or None
        Needed where the mesh has an axis "context".
    **options
        Of the schedule, such as chunks.

    Attributes
    ----------
    placement : Placement
        Which rank has which stage.
    stages : dict of OwnStage
        Those of this rank, by their number.
    """

    phases = (("wait", "forward_backward.wait", False),)

    def __init__(
        self,
        schedule: str | Callable | Rows = "1f1b",
        micro_batches: int = 8,
        cuts: Iterable[int] | None = None,
        recompute: bool = False,
        limit: float = 300.0,
        loss: Loss | None = None,
        way: str = "pairs",
        positions=None,
        **options,
    ):
        self.whole_loss, self.way, self.positions = loss, way, positions
        self.schedule, self.micro_batches, self.cuts = schedule, micro_batches, cuts
        self.recompute, self.limit, self.options = recompute, limit, options
        self.plans: dict[int, PipelinePlan] = {}  # by samples of a batch; the one that was used last is the last
        self.failed = False  # whether a step or an evaluation has

    def make_local_network(self, network, mesh):
        """This rank's stages, as one network; all of it, in none of them, on a rank that only serves."""
        ranks, self.rank = mesh.sizes["pipeline"], mesh.places["pipeline"]
        tensors, experts = mesh.sizes["tensor"], mesh.sizes["expert"]
        cuts, self.asks_others = self.cuts, experts > 1
        check_experts(network, experts, tensors)
        mine = self.positions.cut(network, mesh, self.way == "sequence") if self.positions else network
        if mine is not network:  # ranks may have one position more or less, and cut alike
            cuts = place(network, ranks, self.schedule, self.micro_batches, cuts, **self.options).cuts
        shared, self.parts_loss, cut = share(mine, self.whole_loss, tensors, self.way)
        shared = deal(shared, experts, tensors)
        placement = place(shared, ranks, self.schedule, self.micro_batches, cuts, **self.options)
        self.local_network, self.owns_loss = network, False
        self.stages: dict[int, OwnStage] = {}
        if mesh.index is not None:
            self.local_network = local_network(shared, [placement.networks[s] for s in placement.stages_of(self.rank)])
            if mesh.part[1] > 1:
                placement = placement.part(*mesh.part, cut, tensors)
                self.local_network = NetworkPart(self.local_network, *mesh.part)
            self.owns_loss = self.rank in placement.replicas[-1] and not mesh.places["tensor"]
        self.placement, self.last = placement, len(placement.networks) - 1
        return self.local_network

    def start(self, mesh, network):
        super().start(mesh, network)
        self.communicator = mesh.pipeline
        mesh.agree(
            {
                "pipeline schedule": write(self.placement.rows),
                "cuts of the network": self.placement.cuts,
                "recomputation": self.recompute,
                "way to share layers": self.way,
            }
        )

    def bind(self, trainer):
        """Give every stage its share of the buffers."""
        self.trainer = weakref.proxy(trainer)  # who is closed is gone at once, with all its memory
        if self.mesh.index is None:
            return
        trainer.loss = self.parts_loss or trainer.loss
        if self.positions:
            self.positions.connect()
            trainer.loss = self.positions.loss(trainer.loss)
        self.experts = bind_experts(trainer)
        # Layers call other ranks, with samples or without.
        self.computes_empty = trainer.computes_empty_shards and self.mesh.shard[1] > 1
        outer, child = trainer.ctx.network_context, 0
        mine = self.placement.stages_of(self.rank)
        start, state = self.local_network.layout.own, self.local_network.buffer_layout.size
        for number in mine:  # layouts have the last one first
            network = self.placement.networks[number]
            start, state = start - network.layout.own, state - network.buffer_layout.size
            end = child + len(network.root.layers)
            buffers = trainer.buffers[state : state + network.buffer_layout.size]
            ctx = network.context(buffers, trainer.seed, outer.pool)
            context = ctx.network_context
            context.input_gradient, context.groups = number > 0, outer.groups
            context.mixed_precision, context.before_layer = outer.mixed_precision, outer.before_layer
            p, g = trainer.p[child:end], trainer.g[child:end]
            self.stages[number] = OwnStage(network, p, g, buffers, ctx, start, self)
            child = end
        self._bind_ties()
        late = self._bind_partial_gradients()
        layout = self.local_network.layout
        self.early_end = min((layout.slices[name].start for name in (*self.ties, *late)), default=layout.size)

    def _bind_ties(self) -> None:
        """Make the groups that sum the gradients of arrays that several stages share; all stages add to them."""
        gradients = self.local_network.layout.flat(self.trainer.g)
        self.ties: dict[str, tuple[np.ndarray, Any]] = {}
        for name, users in self.placement.tied().items():
            ranks = {self.placement.first_ranks[stage] for stage in users}
            group = self.communicator.Split(self.rank in ranks) if len(ranks) > 1 else None
            if group is not None:
                self.trainer.mesh.made.append(group)
            if self.rank in ranks:
                self.ties[name] = gradients[name], group
            for stage in set(users) & self.stages.keys():
                own = self.stages[stage]
                for ctx in contexts(own.ctx):
                    ctx.shared |= name in names_of(own.network, ctx.path)

    def _bind_partial_gradients(self) -> list[str]:
        """Find the gradients to sum with whom: those of arrays that all ranks of an axis have. Return their names."""
        gradients = self.local_network.layout.flat(self.trainer.g)
        groups = self.trainer.ctx.network_context.groups
        found = [(partial_gradients(self.local_network), groups.get("tensor"))]
        if self.experts:
            found.append((replicated_names(self.local_network, self.mesh), self.experts))
        self.summed = [([gradients[name] for name in names], group) for names, group in found if names]
        return [name for names, _ in found for name in names]

    # ------------------------------------------------------------------------------------------------ a step

    def divide(self, samples, total, parts):
        if parts != 1:
            raise ValueError(
                f"a pipeline cuts a batch into its own {self.micro_batches} micro-batches: say how many there, and "
                f"leave out to accumulate {parts} parts"
            )
        return super().divide(samples, total, 1)

    def parts(self, samples: int) -> list[tuple[int, int]]:
        """Return (lo, hi) of the samples of every micro-batch."""
        return [(rows.start, rows.stop) for rows in micro_batches(samples, self.micro_batches)]

    def samples_at_once(self, total, parts):
        shares = (chunk(total, self.mesh.shard[1], i) for i in range(self.mesh.shard[1]))
        return {stop - start for lo, hi in shares if hi > lo for start, stop in self.parts(hi - lo)}

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """Go forward and backward through the whole batch, in the schedule's micro-batches."""
        self.check(x)
        self.on_ready = trainer.sync.begin_pass(micro)
        for stage in self.stages.values():
            stage.finished = 0
        for array, _ in self.ties.values():
            array[...] = 0
        plan = self.plan(len(x))
        step = PipelineStep(self, plan.batches(x, y, total, micro.first))
        with self.running(step):
            step.run(plan.rounds)
            step.finish()
        loss = step.loss
        for number, stage in self.stages.items():
            if number not in step.written:
                for array in stage.network.layout.flat(stage.g).values():
                    array[...] = 0
        if trainer.sync.local_update:  # all ranks of a replica decide alike what comes of the step
            loss = self.sum_loss(loss)
        if self.experts and trainer.buffers.size:
            self.experts.average(trainer.buffers)
        trainer.set_loss(loss, total, micro)
        for array, group in self.ties.values():
            if group is not None:
                group.Allreduce(MPI.IN_PLACE, array)
        for arrays, group in self.summed:
            sum_as_one(arrays, group)
        if self.on_ready:
            self.on_ready(self.local_network.layout.size)
        return loss

    @contextmanager
    def running(self, step: PipelineStep | None = None) -> Iterator[None]:
        """Where a step or an evaluation fails, refuse further ones; keep the memory that its messages may still use."""
        try:
            yield
        except BaseException:
            self.failed = True
            if step:
                keep_alive(step.requests())
            raise

    def plan(self, samples: int) -> PipelinePlan:
        """Return the plan for a batch of so many samples; the least recently used of too many is dropped."""
        plan = self.plans.pop(samples, None) or PipelinePlan(self, samples)
        self.plans[samples] = plan
        if len(self.plans) > PLANS:
            del self.plans[next(iter(self.plans))]
        return plan

    def sum_loss(self, loss: float) -> float:
        """Return the loss that the last stage has, in all stages (collective)."""
        total = np.array([loss])
        if self.communicator:
            self.communicator.Allreduce(MPI.IN_PLACE, total)
        return float(total[0])

    def check(self, x: np.ndarray) -> None:
        """Refuse on all ranks what one stage could not compute with, and what others would wait for.

        Raises
        ------
        RuntimeError
            A step or an evaluation has failed.
        TypeError, ShapeError
            Samples that are none.
        """
        if self.failed:
            raise RuntimeError(
                f"rank {self.trainer.mesh.rank}: a step or an evaluation of this pipeline has failed, and its messages "
                "may still be on their way: make a new trainer, and load the state of a checkpoint"
            )
        self.trainer.network.check_input(x)

    def announce_ready(self) -> None:
        """Tell the sync which gradients are finished: those of the last stages first."""
        if not self.on_ready:
            return
        end = 0
        for number in reversed(self.stages):
            stage = self.stages[number]
            end = stage.start + stage.finished
            if stage.finished < stage.network.layout.own:
                break
        self.on_ready(min(end, self.early_end))

    def wait(self, request: MPI.Request, peer: int, what: str, check: Callable[[], None] | None = None) -> None:
        """Wait for a message of another rank; it is part of a step's idle time. `check` as for `wait_for`."""
        ranks = self.trainer.mesh
        who = f"rank {ranks.rank} has waited for rank {ranks.rank_at(pipeline=peer)} {what}"
        try:
            wait_for(request, self.limit, who, check)
        except BaseException:
            keep_alive([request])  # of an evaluation, which has no step
            raise

    # ------------------------------------------------------------------------------------------------ evaluation

    def outputs(
        self, x: np.ndarray, training: bool = False, look: Callable | None = None, first: int = 0
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Forward only: (rows, outputs) of every micro-batch, on the rank with the last stage (collective).

        `look(stage's number, stage, x)` is shown what every stage here is given; `first` is the first sample's place.
        """
        if self.mesh.index is None:
            self.refuse(len(x))
        self.check(x)
        comm, rank_of, sending = self.communicator, self.placement.rank_of, []
        with self.running():
            for i, (lo, hi) in enumerate(self.parts(len(x))):
                output = None
                for number, stage in self.stages.items() if hi > lo or self.asks_others else ():
                    if rank_of(number, i) != self.rank:
                        continue
                    if number == 0:
                        given = x[lo:hi]
                    elif rank_of(number - 1, i) == self.rank:
                        given = output
                    else:
                        given = np.empty((hi - lo, *sample_shape(stage.network)), stage.network.dtype)
                        peer = rank_of(number - 1, i)
                        self.wait(comm.Irecv(given, peer, TAG), peer, f"for the input of {stage.network.name}")
                    batch = MicroBatch(training=training, step=self.trainer.steps, start=first + lo)
                    stage.ctx.network_context.micro_batch, stage.ctx.network_context.on_gradients_ready = batch, None
                    if look:
                        look(number, stage, given)
                    output, _ = stage.network.forward(stage.p, given, stage.ctx, batch)
                    if number < self.last and rank_of(number + 1, i) != self.rank:
                        array, peer = np.ascontiguousarray(output), rank_of(number + 1, i)
                        sending.append((comm.Isend(array, peer, TAG), array, peer))
                    elif number == self.last:
                        yield slice(lo, hi), output
                sending = [entry for entry in sending if not entry[0].Test()]
            for request, _, peer in sending:
                self.wait(request, peer, "to take what was sent to it")

    def predict(self, trainer, x):
        """Return the outputs for samples, in evaluation mode, on every rank of the pipeline."""
        found = np.empty((len(x), *trainer.network.out_shape), trainer.network.dtype)
        for rows, z in self.outputs(x):
            found[rows] = z
        for i, (lo, hi) in enumerate(self.parts(len(x))) if self.communicator else ():
            self.communicator.Bcast(found[lo:hi], root=self.placement.rank_of(self.last, i))
        return found

    def sum_scores(self, trainer, x, y):
        """Sum the scores on one rank with the last stage; elsewhere they are zero."""
        sums = trainer.no_scores()
        trainer.ctx.micro_batch.training = False
        for rows, z in self.outputs(x):
            sums += trainer.evaluate_outputs(z, y[rows]) if len(z) else 0.0
        return sums if self.reports_scores else np.zeros_like(sums)

    def first_bad(self, trainer, parts: list[tuple[int, np.ndarray]]) -> NotFinite | None:
        """Return the first value that is not finite; every stage checks its inputs and layers (collective)."""
        found: list[tuple] = []

        def look(number: int, stage: OwnStage, x: np.ndarray) -> None:
            bad = stage.network.bad_input(x, stage.ctx)
            if not self.any_rank_found(bad):  # decided together: these layers may call other ranks
                bad = stage.network.first_bad(stage.p, x, stage.ctx)
            if bad:
                found.append((number, bad.depth, trainer.mesh.rank, bad))

        for first, x in parts:
            with np.errstate(all="ignore"):
                for _ in self.outputs(x, not self.computes_empty, look, first):
                    pass
        everyone = [bad for each in trainer.mesh.allgather(found) for bad in each]
        if not everyone:
            return None
        *_, rank, bad = min(everyone, key=lambda entry: entry[:3])
        return bad._replace(where=f"{bad.where} on rank {rank}")

    def any_rank_found(self, found: object) -> bool:
        """Whether any rank that the layers of this one ask has found something."""
        count, mesh = np.array([found is not None], float), self.trainer.mesh
        for ranks in (getattr(mesh, axis) for axis in IN_LAYERS if axis != "data"):
            if ranks:
                ranks.Allreduce(MPI.IN_PLACE, count)
        return bool(count[0])

    def pictures(self, events):
        """Draw a step from the middle of the run beside the schedule; none where no step was recorded whole."""
        stages, mesh = range(len(self.placement.rows)), self.trainer.mesh
        first = {mesh.rank_at(**dict.fromkeys(AXES, 0) | {"pipeline": stage}): stage for stage in stages}
        mine = [event | {"rank": first[event["rank"]]} for event in events if event["rank"] in first]
        found = measured(mine, [[a for cell in row for a in parts(cell)] for row in self.placement.rows])
        return {"pipeline.png": compare(found, self.placement.report.spans)} if found else {}

    def in_transit(self):
        slots = sum(slot.nbytes for plan in self.plans.values() for slot in plan.slots.values())
        return slots + (self.positions.nbytes if self.positions else 0)

    def close(self):
        if self.positions:
            self.positions.close()

    def describe(self):
        """Describe the schedule and its idle share, for the log."""
        report, placement, mesh = self.placement.report, self.placement, self.mesh
        name = self.schedule if isinstance(self.schedule, str) else getattr(self.schedule, "__name__", "a schedule")
        cuts = f", cut before {', '.join(map(str, placement.cuts))}" if placement.cuts else ""
        shared = f"; {in_words(mesh.sizes['tensor'], self.way)}" * bool(mesh.tensor)
        shared += f"; experts dealt out to {mesh.part[1]} ranks" * bool(mesh.expert)
        shared += f"; {how}" if self.positions and (how := self.positions.describe()) else ""
        stages = f"{len(placement.networks)} stages on {len(placement.rows)} ranks{cuts}"
        return (
            f"{name}: {stages}, {self.micro_batches} micro-batches, idle {max(report.idle_share):.0%} at most{shared}"
        )


def contexts(ctx: LayerContext) -> Iterator[LayerContext]:
    """Yield a layer's context, and those inside."""
    yield ctx
    for child in ctx.children:
        yield from contexts(child)


def names_of(network: Network, path: str) -> set[str]:
    """Return the full names of the arrays of the layer at a path; a tied one has its owner's name."""
    tree = network.specs
    for key in path.split(".") if path else ():
        tree = tree[key]
    return {spec.tied or f"{path}.{name}" for name, spec in tree.items() if not isinstance(spec, dict)}
