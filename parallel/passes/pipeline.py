"""A pass through a network whose stages lie on different ranks, after any schedule of parallel/strategies/pipeline.

    line = PipelinePass(network, CrossEntropyLoss(), communicator, schedule="1f1b", micro_batches=8)
    loss = line.compute_gradients(x, y, len(x))      # every rank is given the whole batch
    for stage in line.stages.values():
        optimizer.update(stage.parameters, stage.gradients, ...)

The schedule is lowered to rounds of Compute, Send and Recv for the batch's size (lowering.py, where the simulator can
prove them), and run here round by round. A receive is posted when the last reader of its slot is done, rounds before it
is needed; a rank waits for it when it is about to compute with it, and for its sends at the end of the step only.
Outputs are sent from where the layers made them, and what two stages of one rank give each other is handed over as it
is: nothing is copied.

Gradients of a stage are added up in the order of its actions, and divided by the size of the global batch: together
the ranks hold what one process computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.steps import Compute, Recv, Send, part
from nn.core.network import Network
from nn.core.pool import Memory
from nn.core.run import MicroBatch, Run
from nn.core.stages import stages as cut
from nn.losses import Loss
from parallel.strategies.pipeline.actions import Action, Rows, parse
from parallel.strategies.pipeline.checking import check
from parallel.strategies.pipeline.lowering import Stage, lower
from parallel.strategies.pipeline.schedules import rows

TAG = 29  # of all messages here; those of a pair of ranks match in their order


@dataclass
class OwnStage:
    """A stage of this rank: its layers, and the flat buffers that belong to them."""

    network: Network
    parameters: np.ndarray
    gradients: np.ndarray
    statistics: np.ndarray
    run: Run
    p: Any = field(init=False)
    g: Any = field(init=False)
    written: bool = False  # whether the gradients hold something of this step

    def __post_init__(self):
        layout = self.network.layout
        self.p, self.g = layout.views(self.parameters), layout.views(self.gradients)


class PipelinePass:
    """Forward and backward of a batch, in micro-batches, through stages on the ranks of a communicator.

    Parameters
    ----------
    network : Network
        The whole one; its root is a Sequential.
    loss : Loss
    communicator : MPI.Intracomm
        One on which nothing else is sent with this tag.
    schedule : str, generator function or rows
        As for `check`. A stage has to lie on one rank, as every schedule's does where it has no replicas.
    micro_batches : int
        Into so many parts, as alike as possible, a batch is cut.
    at : numbers of children with which the second stage and all after it begin, or None
        None: so that the largest number of multiply-accumulates in a stage is as small as it can be.
    seed : int
        Of the first parameters and of random layers.
    recompute : bool
        Keep of a micro-batch only what a stage is given, and compute its forward pass again before its backward pass.
    **options
        Of the schedule, such as chunks.

    Attributes
    ----------
    stages : dict of OwnStage
        Those of this rank, by their number.
    home : list of int
        The rank of every stage.

    Raises
    ------
    ValueError
        A schedule that cannot run, more stages than layers, a cut in a place where there can be none, an array that
        layers of different stages share.
    """

    def __init__(
        self,
        network: Network,
        loss: Loss,
        communicator: MPI.Intracomm,
        schedule: str | Callable | Rows = "1f1b",
        micro_batches: int = 8,
        at: Iterable[int] | None = None,
        seed: int = 0,
        recompute: bool = False,
        **options,
    ):
        self.loss, self.communicator, self.micro_batches, self.recompute = loss, communicator, micro_batches, recompute
        ranks, rank = communicator.size, communicator.rank
        named = isinstance(schedule, str) or callable(schedule)
        self.rows = rows(schedule, ranks, micro_batches, **options) if named else schedule
        report = check(self.rows, ranks, micro_batches)
        self.networks = cut(network, even_cuts(network, report.stages) if at is None else list(at))
        if len(self.networks) != report.stages:
            raise ValueError(f"the schedule has {report.stages} stages, the network is cut into {len(self.networks)}")
        for other in self.networks:
            if other.layout.borrowed:
                raise ValueError(
                    f"{other.name} shares {', '.join(other.layout.borrowed)} with an earlier stage: cut the network "
                    "where both layers are in one stage"
                )
        for path, layer, _, _ in self.networks[0].layers():
            if len(self.networks) > 1 and getattr(layer, "padding", None) is not None and layer.ids:
                raise ValueError(f"layer {path} ({layer!r}) marks padding, which later stages are not told of")
        places = {(action.stage, span.rank) for row in report.spans for span in row for action in span.actions}
        if len(places) > report.stages:
            raise ValueError("a stage lies on several ranks: their gradients would have to be summed")
        self.home = [r for _, r in sorted(places)]
        self.stages = {s: self.own(other, seed) for s, other in enumerate(self.networks) if self.home[s] == rank}
        self.terms = loss.rows(network.out_shape)
        self.programs: dict[int, Program] = {}  # by samples of a batch
        self.broken: list[Step] = []  # steps that failed: messages may still arrive in their memory
        self.steps = 0

    def own(self, network: Network, seed: int) -> OwnStage:
        """Buffers of a stage, with their first values."""
        parameters, statistics = network.layout.zeros(network.dtype), network.state_layout.zeros(network.dtype)
        network.layout.initialize(parameters, seed)
        network.state_layout.initialize(statistics, seed)
        run = network.run(statistics, seed, Memory())
        run.context.input_gradient = network is not self.networks[0]
        return OwnStage(network, parameters, network.layout.zeros(network.dtype), statistics, run)

    def compute_gradients(self, x: np.ndarray, y: np.ndarray, total: int) -> float:
        """Gradients of these samples' part of the mean loss into the stages' buffers; returns that part of the loss.

        Parameters
        ----------
        x, y : the batch and its targets, the same on every rank; only the first and the last stage look at them
        total : samples of the global batch

        Returns
        -------
        float
            on every rank
        """
        if len(x) not in self.programs:
            self.programs[len(x)] = Program(self, len(x))
        for stage in self.stages.values():
            stage.written = False
        step = Step(self, self.programs[len(x)], x, y, total)
        try:
            loss = step.run()
        except BaseException:
            self.broken.append(step)
            raise
        for stage in self.stages.values():
            if not stage.written:
                stage.gradients[:] = 0
        self.steps += 1
        value = np.array([loss])
        self.communicator.Bcast(value, root=self.home[-1])
        return float(value[0])


def even_cuts(network: Network, count: int) -> list[int]:
    """Where `count` stages begin, but the first, so that the most multiply-accumulates in a stage are fewest."""
    root = network.root
    macs = [layer.macs(shape) for layer, shape in zip(root.layers, root.child_shapes(network.in_shape), strict=True)]
    if count > len(macs):
        raise ValueError(f"{network.name} has {len(macs)} layers, too few for {count} stages")
    sums = np.concatenate([[0], np.cumsum(macs)])
    best = {(end, 1): (sums[end], []) for end in range(1, len(macs) + 1)}  # of so many layers in so many stages
    for n in range(2, count + 1):
        for end in range(n, len(macs) + 1):
            best[end, n] = min(
                (max(best[k, n - 1][0], sums[end] - sums[k]), [*best[k, n - 1][1], k]) for k in range(n - 1, end)
            )
    return [root.first + k for k in best[len(macs), count][1]]


class Program:
    """What a rank does for a batch of so many samples: its rounds, and when each receive may be posted.

    Attributes
    ----------
    rounds : list of rounds
    receives : list of list of Recv
        For each round, which receives are posted as it begins: their slots are free, and earlier ones of the same
        sender are posted.
    slots : dict of flat arrays
        The memory of every buffer that is received into, the same for all steps.
    """

    def __init__(self, line: PipelinePass, samples: int):
        n, rank = line.micro_batches, line.communicator.rank
        self.parts = [part(samples, n, i) for i in range(n)]
        stages = [Stage(input=prod(other.in_shape), recompute=line.recompute) for other in line.networks]
        self.rounds = lower(line.rows, stages, samples=[hi - lo for lo, hi in self.parts])[rank]
        self.receives: list[list[Recv]] = [[] for _ in self.rounds]
        reach: dict[str, int] = {}  # elements of every buffer that is received into
        used: dict[tuple[str, int], int] = {}  # slot -> the last round in which it was read
        posted: dict[int, int] = {}  # sender -> the round of its latest receive
        for number, steps in enumerate(self.rounds):
            for step in steps:
                if isinstance(step, Recv) and step.hi > step.lo:
                    when = max(used.get((step.buf, step.lo), -1) + 1, posted.get(step.peer, 0))
                    posted[step.peer] = when
                    self.receives[when].append(step)
                    reach[step.buf] = max(reach.get(step.buf, 0), step.hi)
                elif isinstance(step, Compute):
                    used |= {(place.buf, place.lo): number for place in step.reads}
        self.slots = {name: np.empty(n, line.networks[0].dtype) for name, n in reach.items()}


class Step:
    """One batch on one rank: what is in flight, and which array every slot stands for now."""

    def __init__(self, line: PipelinePass, program: Program, x, y, total):
        self.line, self.program, self.x, self.y, self.total = line, program, x, y, total
        self.slots = program.slots
        self.arrays: dict[tuple[str, int], np.ndarray] = {}  # (buffer, first element) -> what lies there
        self.coming: dict[tuple[str, int], list[MPI.Request]] = {}  # receives in their order, by slot
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.kept: dict[tuple[int, int], Any] = {}  # (stage, micro-batch) -> what its backward needs
        self.batches: dict[tuple[int, int], MicroBatch] = {}
        self.value = 0.0

    def run(self) -> float:
        """Do all rounds; returns the loss, 0 where the last stage is elsewhere."""
        comm = self.line.communicator
        for steps, receives in zip(self.program.rounds, self.program.receives, strict=True):
            for step in receives:
                memory = self.slots[step.buf][step.lo : step.hi]
                self.coming.setdefault((step.buf, step.lo), []).append(comm.Irecv(memory, step.peer, TAG))
            for step in steps:
                if isinstance(step, Send) and step.hi > step.lo:
                    array = np.ascontiguousarray(self.arrays.pop((step.buf, step.lo)))
                    self.sending.append((comm.Isend(array, step.peer, TAG), array))
                elif isinstance(step, Recv) and step.hi > step.lo:
                    self.arrays[step.buf, step.lo] = self.slots[step.buf][step.lo : step.hi]
            for step in steps:
                if isinstance(step, Compute):
                    self.compute(parse(step.name), step)
            self.sending = [entry for entry in self.sending if not entry[0].Test()]
        for request, _ in self.sending:
            request.Wait()
        return self.value

    def compute(self, action: Action, step: Compute):
        """Run what a Compute stands for; nothing where its micro-batch has no samples."""
        lo, hi = self.program.parts[action.micro_batch]
        if lo == hi:
            return
        stage = self.line.stages[action.stage]
        given = {place.buf.rstrip("0123456789"): self.array(place, stage.network, hi - lo) for place in step.reads}
        x = given["input"] if action.stage else self.x[lo:hi]
        result = getattr(self, DO[action.kind])(action, stage, x, given.get("output_gradient"), slice(lo, hi))
        for place in step.writes:
            if place.buf.startswith(("input", "output")):  # the others are what layers keep themselves
                self.arrays[place.buf, place.lo] = result

    def array(self, place, network: Network, samples: int) -> np.ndarray | None:
        """What a slot stands for, as a batch; None for what layers keep themselves."""
        key = place.buf, place.lo
        if key not in self.arrays:
            return None
        if waiting := self.coming.get(key):
            waiting.pop(0).Wait()
        shape = network.in_shape if place.buf.startswith("input") else network.out_shape
        self.arrays[key] = self.arrays[key].reshape(samples, *shape)
        return self.arrays[key]

    def forward(self, action, stage, x, gy, mine) -> np.ndarray:
        place = action.stage, action.micro_batch
        batch = self.batches[place] = MicroBatch(step=self.line.steps, sample=mine.start)
        output, saved = stage.network.forward(stage.p, x, stage.run, batch)
        if action.stage == len(self.line.networks) - 1:
            loss, gy = self.line.loss(output, self.y[mine], self.total * self.line.terms, stage.run)
            self.value += float(loss)
        self.kept[place] = None if self.line.recompute else saved, gy
        return output

    def saved(self, action, stage, x, gy):
        """What forward kept, computed again where it did not, and the gradient of the output."""
        saved, own = self.kept.pop((action.stage, action.micro_batch))
        if self.line.recompute:
            statistics = stage.statistics.copy()  # of which this micro-batch is a part already
            saved = stage.network.forward(stage.p, x, stage.run, self.batch(action))[1]
            stage.statistics[:] = statistics
        return saved, own if gy is None else gy

    def batch(self, action) -> MicroBatch:
        return self.batches[action.stage, action.micro_batch]

    def adding(self, action, stage) -> MicroBatch:
        """The micro-batch whose gradients are made now: the first one's are written, all others' added."""
        batch = self.batch(action)
        batch.accumulate, stage.written = stage.written, True
        return batch

    def backward(self, action, stage, x, gy, mine) -> np.ndarray:
        saved, gy = self.saved(action, stage, x, gy)
        return stage.network.backward(stage.p, stage.g, gy, saved, stage.run, self.adding(action, stage))

    def backward_inputs(self, action, stage, x, gy, mine) -> np.ndarray:
        saved, gy = self.saved(action, stage, x, gy)
        return stage.network.backward_inputs(stage.p, stage.g, gy, saved, stage.run, self.batch(action))

    def backward_weights(self, action, stage, x, gy, mine):
        stage.network.backward_weights(stage.run, self.adding(action, stage))


DO = {"F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights"}
