"""One batch on one rank of a pipeline: its rounds, and what is in flight meanwhile.

A receive is posted when the last reader of its slot is done, rounds before it is needed; a rank waits for it when it is
about to compute with it, and for its sends at the end of the step only. Outputs are sent from where the layers made
them, and what two stages of one rank give each other is handed over as it is: nothing is copied. In mixed precision
messages are float16, and stay so until a layer is given them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.failures.awake import Awake
from collectives.steps import Compute, Recv, Send
from nn.core.context import MicroBatch
from parallel.strategies.activation_transfer import pack, unpack
from parallel.strategies.pipeline.actions import Action, parse
from parallel.strategies.pipeline.lowering import Stage, lower

TAG = 29  # of all messages here; those of a pair of ranks match in their order
MAKES_GRADIENTS = ("B", "W")
USES = {"F": ("input",), "B": ("output_gradient",), "I": ("output_gradient",), "W": ()}  # of what comes from others


class Program:
    """What a rank does for a batch of so many samples: its rounds, and when each receive may be posted.

    Parameters
    ----------
    line : PipelinePass
    samples : int

    Attributes
    ----------
    parts : list of (lo, hi)
        The samples of every micro-batch.
    rounds : list of rounds
    receives : list of list of Recv
        For each round, which receives are posted as it begins: their slots are free, and earlier ones of the same
        sender are posted.
    slots : dict of flat arrays
        The memory of every buffer that is received into, the same for all steps.
    final : dict
        Stage -> the micro-batch whose gradients are made last: then the stage's are complete.
    """

    def __init__(self, line, samples: int):
        rank, placement = line.rank, line.placement
        self.parts = line.parts(samples)
        stages = [
            Stage(input=prod(placement.shape(number)), recompute=line.recompute)
            for number in range(len(placement.networks))
        ]
        self.rounds = lower(placement.rows, stages, samples=[hi - lo for lo, hi in self.parts])[rank]
        self.receives: list[list[Recv]] = [[] for _ in self.rounds]
        self.final: dict[int, int] = {}
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
                    action = parse(step.name)
                    lo, hi = self.parts[action.micro_batch]
                    if action.kind in MAKES_GRADIENTS and (hi > lo or line.everyone):
                        self.final[action.stage] = action.micro_batch
        kept = placement.networks[0]
        self.slots = {name: np.empty(size, np.float16 if kept.mixed else kept.dtype) for name, size in reach.items()}


class Step:
    """One batch on one rank: what is in flight, and which array every slot stands for now.

    Parameters
    ----------
    line : PipelinePass
    program : Program
    x, y : the samples and targets; only the first and the last stage look at them
    total : samples of the global batch
    first : place in it of the first sample
    """

    def __init__(self, line, program: Program, x, y, total: int, first: int):
        self.line, self.program, self.x, self.y, self.total, self.first = line, program, x, y, total, first
        self.slots = program.slots
        self.arrays: dict[tuple[str, int], np.ndarray] = {}  # (buffer, first element) -> what lies there
        self.coming: dict[tuple[str, int], list[tuple]] = {}  # receives in their order, by slot
        self.sending: list[tuple[MPI.Request, np.ndarray, int]] = []
        self.kept: dict[tuple[int, int], Any] = {}  # (stage, micro-batch) -> what its backward needs
        self.batches: dict[tuple[int, int], MicroBatch] = {}
        self.value = 0.0

    def run(self) -> float:
        """Do all rounds; returns the loss, 0 where the last stage is elsewhere."""
        comm = self.line.communicator
        for steps, receives in zip(self.program.rounds, self.program.receives, strict=True):
            for step in receives:
                memory = self.slots[step.buf][step.lo : step.hi]
                request = comm.Irecv(bits(memory), step.peer, TAG), step.peer
                self.coming.setdefault((step.buf, step.lo), []).append(request)
            for step in steps:
                if isinstance(step, Send) and step.hi > step.lo:
                    array = self.packed(step.buf, np.ascontiguousarray(self.arrays.pop((step.buf, step.lo))))
                    self.sending.append((comm.Isend(bits(array), step.peer, TAG), array, step.peer))
                elif isinstance(step, Recv) and step.hi > step.lo:
                    self.arrays[step.buf, step.lo] = self.slots[step.buf][step.lo : step.hi]
            for step in steps:
                if isinstance(step, Compute):
                    self.compute(parse(step.name), step)
            self.sending = [entry for entry in self.sending if not entry[0].Test()]
        for request, _, peer in self.sending:
            self.line.wait(request, peer, "to take what was sent to it")
        return self.value

    def compute(self, action: Action, step: Compute):
        """Run what a Compute stands for; nothing where its micro-batch has no samples, and none has to meet others."""
        lo, hi = self.program.parts[action.micro_batch]
        if lo == hi and not self.line.everyone:
            return
        line, stage = self.line, self.line.stages[action.stage]
        uses = ("input", "output_gradient") if line.recompute and action.kind in "BI" else USES[action.kind]
        given = {
            name: self.array(place, action.stage, hi - lo)
            for place in step.reads
            if (name := named(place.buf)[0]) in uses
        }
        x, gy = given.get("input") if action.stage else self.x[lo:hi], given.get("output_gradient")
        if lo == hi:
            dtype = stage.network.dtype
            before, behind = (line.placement.shape(action.stage + i) for i in (0, 1))
            x = np.empty((0, *before), dtype) if action.stage else x
            gy = None if action.stage == line.last else np.empty((0, *behind), dtype)
        final = self.program.final.get(action.stage) == action.micro_batch and action.kind != "F"
        stage.ctx.network_context.on_gradients_ready = stage.ready if final else None
        start = time.perf_counter()
        result = ACTIONS[action.kind](self, action, stage, x, gy, slice(lo, hi))
        if line.note:
            line.note(str(action), start, time.perf_counter())
        for place in step.writes if hi > lo else ():
            if place.buf.startswith(("input", "output")):  # the others are what layers keep themselves
                given = x if action.kind == "F" else gy
                seen = given is not None and np.may_share_memory(result, given)  # of layers such as Flatten
                self.arrays[place.buf, place.lo] = result.copy() if seen else result  # a slot is soon another's

    def packed(self, buffer: str, array: np.ndarray) -> np.ndarray:
        """What leaves a buffer, as it travels."""
        name, stage = named(buffer)
        return pack(self.line.stages[stage].ctx.network_context, array, name == "input_gradient")

    def array(self, place, stage: int, samples: int) -> np.ndarray | None:
        """What a slot of a stage stands for, as a batch; None for no samples."""
        key, name = (place.buf, place.lo), named(place.buf)[0]
        if key not in self.arrays or not samples:
            return None
        if waiting := self.coming.get(key):
            request, peer = waiting.pop(0)
            self.line.wait(request, peer, f"for {name} of {self.line.placement.networks[stage].name}")
        shape = self.line.placement.shape(stage if name == "input" else stage + 1)
        own = self.line.stages[stage]
        array = self.arrays[key].reshape(samples, *shape)
        return unpack(own.ctx.network_context, array, own.network.dtype, name == "output_gradient")

    def forward(self, action: Action, stage, x, gy, mine: slice) -> np.ndarray:
        place, line = (action.stage, action.micro_batch), self.line
        batch = self.batches[place] = MicroBatch(
            step=line.trainer.steps, sample=self.first + mine.start, total=self.total
        )
        output, saved = stage.network.forward(stage.p, x, stage.ctx, batch)
        if action.stage == line.last:
            loss, gy = line.trainer.loss(output, self.y[mine], line.trainer.mean_over(self.total), stage.ctx)
            self.value += float(loss)
        self.kept[place] = None if line.recompute else saved, gy
        return output

    def saved(self, action, stage, x, gy):
        """What forward kept, computed again where it did not, and the gradient of the output."""
        saved, own = self.kept.pop((action.stage, action.micro_batch))
        if self.line.recompute:
            buffers = stage.buffers.copy()  # of which this micro-batch is a part already
            saved = stage.network.forward(stage.p, x, stage.ctx, self.batch(action))[1]
            stage.buffers[:] = buffers
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
        return stage.network.backward(stage.p, stage.g, gy, saved, stage.ctx, self.adding(action, stage))

    def backward_inputs(self, action, stage, x, gy, mine) -> np.ndarray:
        saved, gy = self.saved(action, stage, x, gy)
        return stage.network.backward_inputs(stage.p, stage.g, gy, saved, stage.ctx, self.batch(action))

    def backward_weights(self, action, stage, x, gy, mine):
        stage.network.backward_weights(stage.ctx, self.adding(action, stage))


ACTIONS = {"F": Step.forward, "B": Step.backward, "I": Step.backward_inputs, "W": Step.backward_weights}


def named(buffer: str) -> tuple[str, int]:
    """The kind, and the stage, of a buffer."""
    kind = buffer.rstrip("0123456789")
    return kind, int(buffer[len(kind) :])


def bits(array: np.ndarray) -> np.ndarray:
    """An array as MPI takes it: it has no float16."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


def wait_for(request: MPI.Request, limit: float, who: str, check: Callable[[], None] | None = None) -> None:
    """Wait for a message, letting others work; for so many seconds at most.

    `check` is called again and again meanwhile, and may raise: where the other rank has refused to go on.

    Raises
    ------
    TimeoutError
        Who waits for whom.
    """
    if request.Test():
        return
    clock = Awake()
    while not request.Test():
        if check:
            check()
        os.sched_yield()
        if clock.now() > limit:
            raise TimeoutError(f"{who}, for {limit:g} s: has it ended, or does it do another step?")
