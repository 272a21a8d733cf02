"""From what a rank does to rounds of steps: which message when, and where everything lies.

    stages = [Stage(forward=2e-3, input_gradient=2e-3, weight_gradient=2e-3, input=4096, saved=65536)] * 4
    program = lower(rows("1f1b", ranks=4, micro_batches=8), stages)
    prove(program)                        # nothing hangs, and every action meets its own micro-batch's data

**When.** The actions are walked with the seconds given, which says when each begins, and when each message is made. A
message made at time t belongs, on both its ends, to the first round that begins at t or later; it travels beside that
round's computation, unless this one needs it or the rank was idle. So a receive is there as soon as its message is,
needed or not, and nobody waits long for a send. Nor can anybody wait for ever, even where a send ends only when it is
received: a rank that waits in a round begun at time t waits for one in a round that began before t, and so on, down to
one that does not wait. (Seconds that are wrong cost time, never the result. Who runs the rounds may post a receive even
earlier, once the last reader of its slot is done.)

**Where.** Each stage has six buffers, cut into slots, one for each micro-batch that needs one at the same time:

| buffer | written by | last read by |
|---|---|---|
| input | RECV_F, or F of the stage before on the same rank | B, or W |
| output | F, where the next stage is on another rank | SEND_F |
| saved: what forward keeps, besides its input | F | B, or W |
| output_gradient | RECV_B, or B, I of the stage behind on the same rank | B, or W |
| input_gradient | B, I, where the stage before is on another rank | SEND_B |
| kept: what W needs of I | I | W |
| gradients: one slot for all | B, W | REDUCE_GRAD |

A slot is used again after the round of its last reader: one buffer for all micro-batches would be overwritten by the
next receive while backward still needs it. With `recompute` (Chen et al. 2016, GPipe) nothing is saved but the input,
and B or I begin with F once more. The first stage has its input and the last one its labels from the data set.

REDUCE_GRAD, where several ranks have a stage, becomes the rounds of a ring over them, which nothing goes beside.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.algorithms.allreduce import ring
from collectives.checking.simulator import RuleBroken, Stats, simulate
from collectives.steps import Compute, Recv, Round, Send, Slice, relabel_ranks
from parallel.strategies.pipeline.actions import COMPUTE, Action, PipelineError, Rows, parse
from parallel.strategies.pipeline.checking import REDUCE_GRAD, Span, check, walk


class Stage(NamedTuple):
    """The cost of one micro-batch in a stage: seconds of each kind, elements of each buffer (`gradients`: in all)."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    input: int = 1
    saved: int = 1
    kept: int = 1
    recompute: bool = False
    gradients: int = 0

    def seconds(self, kind: str) -> float:
        again = self.forward if self.recompute and kind in "BI" else 0.0
        return (
            again
            + {
                "F": self.forward,
                "B": self.input_gradient + self.weight_gradient,
                "I": self.input_gradient,
                "W": self.weight_gradient,
                REDUCE_GRAD: 0.0,  # messages, which have their own
            }[kind]
        )


class Tensor(NamedTuple):
    """The values of one micro-batch in a buffer."""

    buffer: str
    stage: int
    micro_batch: int


class Message(NamedTuple):
    """Orders messages made at the same time, on both ends alike."""

    made: float
    action: Action
    source: int
    dest: int


Program = list[list[Round]]


def lower(
    schedule: Rows,
    stages: Sequence[Stage],
    latency: float = 0.0,
    samples: Sequence[int] | None = None,
    as_run: bool = False,
) -> Program:
    """The rounds of every rank.

    Parameters
    ----------
    schedule : rows of actions; messages written in it are left out, as they are found anew
    stages : a Stage for each stage
    latency : seconds from the end of an action until another rank can use its result
    samples : of each micro-batch, where the elements of a Stage are those of one sample; None: one each. They need not
        be alike: a slot is as wide as the largest, and a message as long as its own
    as_run : as simulated: a receive ends in the round before the action that needs it, and not when its message is
        there, which hangs on what else travels. So step.py waits, which posts receives long before; where a send ends
        only when it is received, ranks might wait for ever

    Raises
    ------
    PipelineError
        the schedule cannot run, or has another number of stages or micro-batches
    ValueError
        a stage whose forward or input gradient takes no time: nothing would say what is first
    """
    for number, stage in enumerate(stages):
        if min(stage.seconds("F"), stage.seconds("I")) <= 0 or stage.weight_gradient < 0:
            raise ValueError(f"stage {number}: expected seconds above 0 for what others wait for, given {stage}")
    rows = [[c for c in row if not isinstance(c, Action) or c.kind in (*COMPUTE, REDUCE_GRAD)] for row in schedule]
    report = check(rows)
    if report.stages != len(stages):
        raise PipelineError(f"the schedule has {report.stages} stages, but {len(stages)} are described")
    samples = [1] * report.micro_batches if samples is None else list(samples)
    if len(samples) != report.micro_batches:
        raise PipelineError(f"the schedule has {report.micro_batches} micro-batches, but samples of {len(samples)}")
    spans = walk(rows, lambda action: stages[action.stage].seconds(action.kind), latency)
    done = [(action, span.rank) for row in spans for span in row for action in span.actions]
    home = {(action.stage, action.micro_batch): rank for action, rank in done if action.kind != REDUCE_GRAD}
    peers = {stage: sorted({rank for action, rank in done if action.stage == stage}) for stage in range(len(stages))}
    messages, order = messages_of(spans, home), as_needed if as_run else in_rounds
    return [
        Memory(stages, samples, home, peers, rank).rounds(
            order(row, [m for m in messages if rank in (m.source, m.dest)], rank)
        )
        for rank, row in enumerate(spans)
    ]


def messages_of(spans: list[list[Span]], home: dict) -> list[Message]:
    """Every result that another rank needs, in the order in which they are made."""
    messages = []
    for row in spans:
        for span in row:
            for action in span.actions:
                to = action.stage + {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
                dest = home.get((to, action.micro_batch), span.rank)
                if dest != span.rank:
                    messages.append(Message(span.end, action, span.rank, dest))
    return sorted(messages)


def in_rounds(spans: list[Span], messages: list[Message], rank: int) -> list[tuple[list[Message], tuple[Action, ...]]]:
    """(messages, actions) of each round of a rank: see "When" above."""
    rounds: list[tuple[list[Message], tuple[Action, ...]]] = []
    free = i = 0
    for span in spans:
        due = []
        while i < len(messages) and messages[i].made <= span.start:
            due.append(messages[i])
            i += 1
        needed = {source for action in span.actions for source in sources(action)}
        if due and (free < span.start or any(m.dest == rank and m.action in needed for m in due)):
            rounds.append((due, ()))
            due = []
        rounds.append((due, span.actions))
        free = span.end
    if i < len(messages):
        rounds.append((messages[i:], ()))
    return rounds


def as_needed(spans: list[Span], messages: list[Message], rank: int) -> list[tuple[list[Message], tuple[Action, ...]]]:
    """(messages, actions) of each round of a rank: what is sent as soon as it is made, what is received when needed.

    With a message come those that its sender has sent before it, as messages of two ranks match in their order.
    """
    sends = [m for m in messages if m.source == rank]
    comes = [m for m in messages if m.dest == rank]
    rounds: list[tuple[list[Message], tuple[Action, ...]]] = []
    i = 0
    for span in spans:
        due = []
        while i < len(sends) and sends[i].made <= span.start:
            due.append(sends[i])
            i += 1
        reads = {source for action in span.actions for source in sources(action)}
        last = {m.source: n for n, m in enumerate(comes) if m.action in reads}
        needed = [m for n, m in enumerate(comes) if n <= last.get(m.source, -1)]
        comes = [m for n, m in enumerate(comes) if n > last.get(m.source, -1)]
        rounds += [(due + needed, ()), ([], span.actions)] if needed else [(due, span.actions)]
    return [*rounds, (sends[i:], ())] if i < len(sends) else rounds


def sources(action: Action) -> list[Action]:
    """Whose messages an action reads."""
    if action.kind == "F":
        return [action._replace(stage=action.stage - 1)]
    return [Action(action.stage + 1, kind, action.micro_batch) for kind in "BI"] if action.kind in "BI" else []


class Memory:
    """The buffers of one rank: what its actions read and write, and in which slot that lies.

    Parameters
    ----------
    home : (stage, micro-batch) -> the rank that computes it
    peers : stage -> the ranks that have it
    """

    def __init__(self, stages: Sequence[Stage], samples: Sequence[int], home: dict, peers: dict, rank: int):
        self.stages, self.samples, self.home, self.peers, self.rank = stages, samples, home, peers, rank

    def here(self, stage: int, micro_batch: int) -> bool:
        return self.home.get((stage, micro_batch)) == self.rank

    def touched(self, action: Action) -> tuple[list[Tensor], list[Tensor]]:
        """Return what a computation reads, and what it writes."""
        stage, kind, i = action
        tensor = lambda buffer, at=stage: Tensor(buffer, at, i)
        reads = [tensor("input")] if stage else []
        writes = []
        if kind == REDUCE_GRAD:
            return [], []
        if kind == "F":
            writes.append(tensor("saved"))
            if stage + 1 < len(self.stages):
                writes.append(tensor("input", stage + 1) if self.here(stage + 1, i) else tensor("output"))
            return reads, writes
        reads.append(tensor("saved"))
        if stage + 1 < len(self.stages):
            reads.append(tensor("output_gradient"))
        if kind == "W":
            return [*reads, tensor("kept")], []
        if kind == "I":
            writes.append(tensor("kept"))
        if stage:
            writes.append(tensor("output_gradient", stage - 1) if self.here(stage - 1, i) else tensor("input_gradient"))
        return reads, writes

    def moved(self, message: Message) -> Tensor:
        """Return what a message reads on its sender's rank, or writes on its receiver's."""
        stage, kind, i = message.action
        if kind == "F":
            return Tensor("output", stage, i) if message.source == self.rank else Tensor("input", stage + 1, i)
        if message.source == self.rank:
            return Tensor("input_gradient", stage, i)
        return Tensor("output_gradient", stage - 1, i)

    def elements(self, tensor: Tensor) -> int:
        """Return the elements of one sample."""
        stage = self.stages[tensor.stage]
        match tensor.buffer:
            case "saved":
                return 0 if stage.recompute else stage.saved
            case "kept":
                return stage.kept
            case "input" | "input_gradient":
                return stage.input
        return self.stages[tensor.stage + 1].input  # output, output_gradient

    def rounds(self, rounds) -> list[Round]:
        """Steps for (messages, actions) of each round."""
        slots = self.slots(rounds)

        def place(tensor) -> Slice:
            n = self.elements(tensor)
            begin = slots[tensor] * n * max(self.samples)
            return Slice(f"{tensor.buffer}{tensor.stage}", begin, begin + n * self.samples[tensor.micro_batch])

        def moves(messages):
            for message in messages:
                there = place(self.moved(message))[:3]
                if message.source == self.rank:
                    yield Send(message.dest, *there)
                else:
                    yield Recv(message.source, *there)

        def computes(action):
            reads, writes = (tuple(map(place, tensors)) for tensors in self.touched(action))
            if action.kind in "BW":
                writes += self.gradients(action.stage)
            return Compute(str(action), reads, writes, self.stages[action.stage].seconds(action.kind))

        found, made = [], False  # whether gradients were, since the last sum
        for messages, actions in rounds:
            if [action.kind for action in actions] != [REDUCE_GRAD]:
                found.append((*moves(messages), *map(computes, actions)))
                made = made or any(action.kind in "BW" for action in actions)
                continue
            found += [tuple(moves(messages))] * bool(messages)
            found += self.summed(actions[0], made)
            made = False
        return found

    def gradients(self, stage: int) -> tuple[Slice, ...]:
        """Those that are summed, where several ranks have the stage."""
        n = self.stages[stage].gradients * (len(self.peers[stage]) > 1)
        return (Slice(f"gradients{stage}", 0, n),) if n else ()

    def summed(self, action: Action, made: bool) -> Iterator[Round]:
        """The gradients of a stage, summed over its ranks; before that zeros, where this rank has made none."""
        peers, there = self.peers[action.stage], self.gradients(action.stage)
        if there and not made:
            yield (Compute(str(action), (), there, 0.0),)
        for steps in relabel_ranks(ring(peers.index(self.rank), len(peers), there[0].hi), peers) if there else ():
            yield tuple(step._replace(buf=there[0].buf) for step in steps)

    def slots(self, rounds) -> dict[Tensor, int]:
        """A slot for each tensor: the first that was not in use from its writing to its last reading."""
        first: dict[Tensor, int] = {}
        last: dict[Tensor, int] = {}
        for number, (messages, actions) in enumerate(rounds):
            tensors = [self.moved(message) for message in messages]
            tensors += [tensor for action in actions for side in self.touched(action) for tensor in side]
            for tensor in tensors:
                first.setdefault(tensor, number)
                last[tensor] = number
        slots: dict[Tensor, int] = {}
        busy: dict[tuple, list[int]] = {}  # buffer -> for each slot, the last round in which it is read
        for tensor in sorted(first, key=first.__getitem__):
            until = busy.setdefault(tensor[:2], [])
            slot = next((s for s, end in enumerate(until) if end < first[tensor]), len(until))
            until[slot : slot + 1] = [last[tensor]]
            slots[tensor] = slot
        return slots


def prove(program: Program, synchronous: bool = True) -> Stats:
    """Run a lowered schedule in the simulator, each value a name: what, of which stage, of which micro-batch.

    Returns
    -------
    Stats
        `live`: the most elements that each rank held at once

    Raises
    ------
    ScheduleError
        a rank waits for ever, two steps of a round touch the same elements, or an action reads what is not of its
        micro-batch, because a slot was used too early
    """

    def compute(rank, step, values):
        action = parse(step.name)
        for place, value in zip(step.reads, values, strict=True):
            kind = place.buf.rstrip("0123456789")
            want = (kind, action.stage, action.micro_batch)
            if wrong := [v for v in value if v != want]:
                raise RuleBroken(
                    f"rank {rank}: {step.name} reads {place.buf}[{place.lo}:{place.hi}], which should hold the {kind} "
                    f"of micro-batch {action.micro_batch}, but holds the {wrong[0][0]} of micro-batch {wrong[0][2]}"
                )
        return [[meaning(place.buf, action.micro_batch)] * (place.hi - place.lo) for place in step.writes]

    return simulate(lambda rank: program[rank], [{} for _ in program], synchronous, compute=compute)


def meaning(buffer: str, micro_batch: int) -> tuple[str, int, int]:
    """The name of a value by where it is first written: an output is the next stage's input, and so backwards."""
    kind = buffer.rstrip("0123456789")
    stage = int(buffer[len(kind) :])
    kind, step = {"output": ("input", 1), "input_gradient": ("output_gradient", -1)}.get(kind, (kind, 0))
    return kind, stage + step, micro_batch
