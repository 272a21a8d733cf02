"""The executor of a rank of a pipeline: rounds of actions and messages, and what is in flight between them.

A receive is posted when the last reader of its slot is done, rounds before it is needed; a rank waits for it when it is
about to compute with it, and for its sends at the end of the step only. Outputs are sent from where the layers made
them, and a stage hands its output to the next stage of the same rank without a copy. In mixed precision messages are
float16, and stay so until a layer is given them.

`PipelinePlan` binds the rounds of a batch of one size to memory, and to their actions, once; `PipelineStep` runs
rounds. PipeDream's is a subclass, with rounds that have no end, and a version of the weights for each mini-batch
(pipedream_step.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from math import prod
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.failures.awake import Awake
from collectives.steps import Compute, Recv, Send, Slice
from nn.core.context import MicroBatch
from parallel.strategies.activation_transfer import pack, unpack
from parallel.strategies.pipeline.actions import Action, parse
from parallel.strategies.pipeline.lowering import Stage, lower

TAG = 29  # of all activations and their gradients; those of a pair of ranks match in their order
MAKES_GRADIENTS = ("B", "W")
READS = {"F": ("input",), "B": ("output_gradient",), "I": ("output_gradient",), "W": ()}  # of what comes from others
METHODS = {"F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights"}  # of a PipelineStep
WORDS = {"input": "the input", "output_gradient": "the gradient of the output"}


class Place(NamedTuple):
    """Where the values of one micro-batch lie: a kind of buffer (lowering.py), its stage, and which slot of it."""

    buffer: str
    stage: int
    slot: int


class Message(NamedTuple):
    """A send to a peer, or a receive from it.

    Attributes
    ----------
    memory : array or None
        What is received into, or sent; None for a send of what lies in `place` by then.
    place : Place or None
        What the samples' values are; None for other messages.
    step : int
        That of the samples, where several steps are in flight.
    """

    peer: int
    memory: np.ndarray | None
    place: Place | None = None
    step: int = 0


class Work(NamedTuple):
    """An action, bound to the places that it reads and writes.

    Attributes
    ----------
    completes : bool
        Whether the gradients of the stage are complete with it.
    """

    action: Action
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    completes: bool


class PipelineRound(NamedTuple):
    """Receives that are posted, then messages that are sent, then actions."""

    receives: Iterable[Message]
    sends: Iterable[Message]
    work: Iterable[Work]


class Batch(NamedTuple):
    """Samples and targets of a micro-batch; only the first and the last stage look at them.

    Attributes
    ----------
    divisor : float
        What the sum of the samples' losses is divided by.
    sample, step, total : int
        Index in the global batch of the first sample, the step, the samples of the global batch: see MicroBatch.
    share : float
        What the loss counts in that of the step.
    rate : float
        The step's learning rate, where each micro-batch has an update.
    """

    x: np.ndarray
    y: np.ndarray
    divisor: float
    sample: int
    step: int
    total: int = 0
    share: float = 1.0
    rate: float = 0.0


class PipelinePlan:
    """The rounds of one rank for a batch of a number of samples, bound to memory.

    Parameters
    ----------
    pipeline : PipelinePass
    samples : int

    Attributes
    ----------
    parts : list of (lo, hi)
        The samples of every micro-batch.
    rounds : list of PipelineRound
        A receive is posted in the first round in which its slot is free and earlier ones of its sender are posted.
    slots : dict of flat arrays
        The memory of every buffer that is received into, the same for all steps.
    """

    def __init__(self, pipeline, samples: int):
        placement = pipeline.placement
        self.pipeline, self.parts = pipeline, pipeline.parts(samples)
        stages = [
            Stage(input=prod(placement.shape(number)), recompute=pipeline.recompute)
            for number in range(len(placement.networks))
        ]
        lowered = lower(placement.rows, stages, samples=[hi - lo for lo, hi in self.parts])[pipeline.rank]
        receives: list[list[Recv]] = [[] for _ in lowered]
        sends: list[list[Send]] = [[] for _ in lowered]
        work: list[list[tuple[Action, Compute]]] = [[] for _ in lowered]
        last: dict[int, int] = {}  # stage -> the micro-batch whose gradients are made last
        sizes: dict[str, int] = {}  # elements of every buffer that is received into
        used: dict[tuple[str, int], int] = {}  # slot -> the last round in which it was read
        posted: dict[int, int] = {}  # sender -> the round of its latest receive
        for number, steps in enumerate(lowered):
            for step in steps:
                if isinstance(step, Recv) and step.hi > step.lo:
                    when = max(used.get((step.buf, step.lo), -1) + 1, posted.get(step.peer, 0))
                    posted[step.peer] = when
                    receives[when].append(step)
                    sizes[step.buf] = max(sizes.get(step.buf, 0), step.hi)
                elif isinstance(step, Send) and step.hi > step.lo:
                    sends[number].append(step)
                elif isinstance(step, Compute):
                    used |= {(place.buf, place.lo): number for place in step.reads}
                    action = parse(step.name)
                    if self.samples_of(action) or pipeline.computes_empty:
                        work[number].append((action, step))
                        if action.kind in MAKES_GRADIENTS:
                            last[action.stage] = action.micro_batch
        network = placement.networks[0]
        dtype = np.float16 if network.mixed else network.dtype
        self.slots = {name: np.empty(size, dtype) for name, size in sizes.items()}
        self.rounds = [
            PipelineRound(
                [Message(step.peer, self.memory(step), place(step)) for step in receives[number]],
                [Message(step.peer, None, place(step)) for step in sends[number]],
                [self.bind(action, step, last) for action, step in work[number]],
            )
            for number in range(len(lowered))
        ]

    def samples_of(self, action: Action) -> int:
        """Return how many samples the micro-batch of an action has."""
        lo, hi = self.parts[action.micro_batch]
        return hi - lo

    def memory(self, step: Recv) -> np.ndarray:
        """Return the memory of a slot."""
        return self.slots[step.buf][step.lo : step.hi]

    def bind(self, action: Action, step: Compute, last: dict[int, int]) -> Work:
        """Return an action, with what it reads of others and writes for others."""
        wanted = ("input", "output_gradient") if self.pipeline.recompute and action.kind in "BI" else READS[action.kind]
        reads, writes = [], []
        if self.samples_of(action):
            reads = [where for where in map(place, step.reads) if where.buffer in wanted]
            writes = [where for where in map(place, step.writes) if where.buffer.startswith(("input", "output"))]
        completes = action.kind != "F" and last.get(action.stage) == action.micro_batch
        return Work(action, tuple(reads), tuple(writes), completes)

    def batches(self, x: np.ndarray, y: np.ndarray, total: int, first: int) -> dict[int, Batch]:
        """Cut a batch, which begins at sample `first` of `total`, into its micro-batches."""
        trainer = self.pipeline.trainer
        divisor = trainer.mean_over(total)
        return {
            number: Batch(x[lo:hi], y[lo:hi], divisor, first + lo, trainer.steps, total)
            for number, (lo, hi) in enumerate(self.parts)
        }


class PipelineStep:
    """The executor of rounds on one rank; it holds what is in flight.

    Parameters
    ----------
    pipeline : PipelinePass
    batches : dict of Batch
        By the number of the micro-batch.

    Attributes
    ----------
    loss : float
        The sum over the micro-batches so far, where the last stage is here.
    written : set of int
        Stages whose gradients hold something of this step.
    """

    def __init__(self, pipeline, batches: dict[int, Batch]):
        self.pipeline, self.batches = pipeline, batches
        self.arrays: dict[Place, np.ndarray] = {}
        self.receiving: dict[Place, tuple[MPI.Request, Message]] = {}
        self.sending: list[tuple[MPI.Request, Message]] = []  # whose memory has to stay
        self.saved: dict[tuple[int, int], tuple] = {}  # (stage, micro-batch) -> what its backward needs
        self.micro_batches: dict[tuple[int, int], MicroBatch] = {}
        self.loss, self.written = 0.0, set()

    def run(self, rounds: Iterable[PipelineRound]) -> None:
        """Do rounds, in their order; what was sent may still be under way."""
        for receives, sends, work in rounds:
            for message in receives:
                self.receive(message)
            for message in sends:
                array = np.ascontiguousarray(self.arrays.pop(message.place))
                self.send(message._replace(memory=self.pack(message.place, array)))
            for each in work:
                self.compute(each)
            self.sending = [entry for entry in self.sending if not entry[0].Test()]

    def finish(self, before: float = math.inf) -> None:
        """Wait until what was sent is taken, of the steps before one."""
        for request, message in self.sending:
            if message.step < before:
                self.pipeline.wait(request, message.peer, "to take what was sent to it")
        self.sending = [entry for entry in self.sending if entry[1].step >= before]

    def requests(self) -> list[MPI.Request]:
        """Return the requests of messages that may still be under way."""
        return [request for request, _ in (*self.receiving.values(), *self.sending)]

    # ------------------------------------------------------------------------------------------------ messages

    def receive(self, message: Message) -> None:
        """Post a receive."""
        request = self.pipeline.communicator.Irecv(bits(message.memory), message.peer, TAG)
        self.receiving[message.place] = request, message

    def send(self, message: Message, tag: int = TAG) -> None:
        """Send what a message has in memory, which nobody writes to until it is taken."""
        request = self.pipeline.communicator.Isend(bits(message.memory), message.peer, tag)
        self.sending.append((request, message))

    def wait(self, request: MPI.Request, peer: int, what: str, step: int) -> None:
        """Wait for a message of a step."""
        self.pipeline.wait(request, peer, what)

    def read(self, place: Place, stage, samples: int, keep: bool) -> np.ndarray:
        """Return what lies in a place, as a batch, when it has come; remove it from there, unless `keep`."""
        if place in self.receiving:
            request, message = self.receiving[place]
            self.wait(request, message.peer, f"for {WORDS[place.buffer]} of {stage.network.name}", message.step)
            del self.receiving[place]
            self.arrays[place] = message.memory
        array = self.arrays[place] if keep else self.arrays.pop(place)
        shape = self.pipeline.placement.shape(place.stage if place.buffer == "input" else place.stage + 1)
        array = array.reshape(samples, *shape)
        return unpack(stage.ctx.network_context, array, stage.network.dtype, place.buffer == "output_gradient")

    def pack(self, place: Place, array: np.ndarray) -> np.ndarray:
        """Return what leaves a place, as it travels."""
        context = self.pipeline.stages[place.stage].ctx.network_context
        return pack(context, array, place.buffer == "input_gradient")

    # ------------------------------------------------------------------------------------------------ actions

    def compute(self, work: Work) -> None:
        """Do an action, when what it reads has come."""
        action, stage = work.action, self.pipeline.stages[work.action.stage]
        x, gy = self.operands(work, stage)
        stage.ctx.network_context.on_gradients_ready = stage.ready if work.completes else None
        start = time.perf_counter()
        result = getattr(self, METHODS[action.kind])(action, stage, x, gy)
        self.record(action, start)
        given = x if action.kind == "F" else gy
        for place in work.writes:  # a slot is soon another's; layers such as Flatten return what they are given
            shared = given is not None and np.may_share_memory(result, given)
            self.arrays[place] = result.copy() if shared else result

    def operands(self, work: Work, stage) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the stage's input and the gradient of its output, None for what the action does not read."""
        action, pipeline = work.action, self.pipeline
        batch = self.batches[action.micro_batch]
        x, gy, samples = None if action.stage else batch.x, None, len(batch.x)
        for place in work.reads:
            array = self.read(place, stage, samples, pipeline.recompute and action.kind == "F")
            if place.buffer == "input":
                x = array
            else:
                gy = array
        if not samples:
            before, behind = (pipeline.placement.shape(action.stage + i) for i in (0, 1))
            x = np.empty((0, *before), stage.network.dtype) if action.stage else x
            gy = None if action.stage == pipeline.last else np.empty((0, *behind), stage.network.dtype)
        return x, gy

    def record(self, action: Action, start: float) -> None:
        """Note how long an action took, where someone records it."""
        if self.pipeline.note:
            self.pipeline.note(str(action), start, time.perf_counter())

    def forward(self, action: Action, stage, x, gy) -> np.ndarray:
        key, pipeline, batch = (action.stage, action.micro_batch), self.pipeline, self.batches[action.micro_batch]
        micro_batch = MicroBatch(step=batch.step, start=batch.sample, total=batch.total)
        version = self.version(action)
        output, saved = stage.network.forward(self.weights(stage, version), x, stage.ctx, micro_batch)
        if action.stage == pipeline.last:
            loss, gy = pipeline.trainer.loss(output, batch.y, batch.divisor, stage.ctx)
            self.add_loss(batch, float(loss))
        self.micro_batches[key] = micro_batch
        self.saved[key] = None if pipeline.recompute else saved, gy, version
        return output

    def add_loss(self, batch: Batch, loss: float) -> None:
        """Add the loss of a micro-batch."""
        self.loss += loss

    def version(self, action: Action) -> int:
        """Return the version of the weights that a micro-batch's forward and backward use: there is one."""
        return 0

    def weights(self, stage, version: int):
        """Return a stage's parameters in a version, as layers see them."""
        return stage.p

    def pop_saved(self, action: Action, stage, x, gy) -> tuple:
        """Return the weights, what forward saved (computed again where it did not), the gradient of the output."""
        saved, own, version = self.saved.pop((action.stage, action.micro_batch))
        p = self.weights(stage, version)
        if self.pipeline.recompute:
            buffers = stage.buffers.copy()  # of which this micro-batch is a part already
            saved = stage.network.forward(p, x, stage.ctx, self.micro_batches[action.stage, action.micro_batch])[1]
            stage.buffers[:] = buffers
        return p, saved, own if gy is None else gy

    def accumulating(self, action: Action) -> MicroBatch:
        """Return the micro-batch whose gradients are made now: the first one's are written, all others' added."""
        micro_batch = self.micro_batches.pop((action.stage, action.micro_batch))
        micro_batch.accumulate = action.stage in self.written
        self.written.add(action.stage)
        return micro_batch

    def backward(self, action: Action, stage, x, gy) -> np.ndarray | None:
        p, saved, gy = self.pop_saved(action, stage, x, gy)
        return stage.network.backward(p, stage.g, gy, saved, stage.ctx, self.accumulating(action))

    def backward_inputs(self, action: Action, stage, x, gy) -> np.ndarray | None:
        p, saved, gy = self.pop_saved(action, stage, x, gy)
        micro_batch = self.micro_batches[action.stage, action.micro_batch]
        return stage.network.backward_inputs(p, stage.g, gy, saved, stage.ctx, micro_batch)

    def backward_weights(self, action: Action, stage, x, gy) -> None:
        stage.network.backward_weights(stage.ctx, self.accumulating(action))


def place(where: Send | Recv | Slice) -> Place:
    """Return the place that a lowered step or slice names."""
    kind = where.buf.rstrip("0123456789")
    return Place(kind, int(where.buf[len(kind) :]), where.lo)


def bits(array: np.ndarray) -> np.ndarray:
    """Return an array as MPI takes it, which has no float16."""
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
