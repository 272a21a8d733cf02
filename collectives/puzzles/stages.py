"""Puzzles with computation: pipelines, layers in shards, attention of shared sequences, experts on several ranks.

A pipeline's stage has three things to do for each micro-batch i: F (forward), then B (backward), or B cut in two: I
(gradient of its input, for which the stage before waits) and W (gradient of its weights, for which nobody waits).
`Stage` says what each reads and writes, so that an answer is an order:

    def gpipe(rank, size, count):
        stage = Stage(rank, size)
        yield from stage.rounds([*(("F", i) for i in range(count)), *(("B", i) for i in range(count))])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from collectives.checking.definitions import Operation, unwritten
from collectives.checking.simulator import ScheduleError, Stats
from collectives.pricing.networks import Link, Network
from collectives.puzzles.puzzle import Puzzle
from collectives.steps import Compute, Recv, Round, Send, Slice

LAYER, EXPERT = 4.0, 2.0  # seconds
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
FREE = Network(Link(0.0, 0.0), Link(0.0, 0.0))  # messages take no time


class Stage:
    """Rank `rank` of `size`, one stage of a pipeline; x of the first one holds the micro-batches, an element each.

    F reads in[i] (the first stage x[i]) and writes out[i] and kept[i]; B reads gradient[i] (but on the last stage) and
    kept[i], and writes back[i] and done[i]. I and W are the same in two steps, with factor[i] between them.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.first, self.last = rank, rank == 0, rank == size - 1

    def compute(self, kind: str, i: int) -> Compute:
        """Return the computation of an action."""
        gradient = [] if self.last else ["gradient"]
        reads, writes = {
            "F": (["x" if self.first else "in"], ["kept"] + ([] if self.last else ["out"])),
            "B": (["kept", *gradient], ["done"] + ([] if self.first else ["back"])),
            "I": (["kept", *gradient], ["factor"] + ([] if self.first else ["back"])),
            "W": (["kept", "factor"], ["done"]),
        }[kind]
        slices = [tuple(Slice(name, i, i + 1) for name in names) for names in (reads, writes)]
        return Compute(f"{kind}{i}", *slices, SECONDS[kind])

    def receive(self, kind: str, i: int) -> list[Recv]:
        """Return what has to come before an action."""
        if kind == "F" and not self.first:
            return [Recv(self.rank - 1, "in", i, i + 1)]
        if kind in "BI" and not self.last:
            return [Recv(self.rank + 1, "gradient", i, i + 1)]
        return []

    def send(self, kind: str, i: int) -> list[Send]:
        """Return what others wait for after an action."""
        if kind == "F" and not self.last:
            return [Send(self.rank + 1, "out", i, i + 1)]
        if kind in "BI" and not self.first:
            return [Send(self.rank - 1, "back", i, i + 1)]
        return []

    def rounds(self, order: Iterable[tuple[str, int]]) -> Iterator[Round]:
        """The actions in this order; what one has made leaves while what the next one needs comes in."""
        leaving: list[Send] = []
        for kind, i in order:
            yield *leaving, *self.receive(kind, i)
            yield (self.compute(kind, i),)
            leaving = self.send(kind, i)
        yield tuple(leaving)


# What each buffer of a stage must hold where an action reads it: (who made it, seen from this rank; by which action).
MADE = {"in": (-1, "F"), "gradient": (1, "B"), "kept": (0, "F"), "factor": (0, "I")}


def pass_on(rank: int, size: int, step: Compute, values: list, kinds: str = "FB") -> list:
    """Return what an action writes: its kind and rank, and the micro-batch; ScheduleError where it reads others'."""
    kind, number = step.name[:1], step.name[1:]
    if kind not in kinds or not number.isdecimal():
        raise ScheduleError(f"rank {rank} computes {step.name!r}: expected {' or '.join(kinds)} and a micro-batch")
    i = int(number)
    if needs(step) != needs(want := Stage(rank, size).compute(kind, i)):
        raise ScheduleError(f"rank {rank}: {step}: expected {want}, as `Stage` makes it")
    for read, got in zip(step.reads, values, strict=True):
        by, made = MADE.get(read.buf, (0, ""))
        want = ((f"{made}{rank + by}", i),) if made else ((0, i),)
        if got[0] != want:
            where = f"rank {rank}, {step.name} reads {read.buf}[{read.lo}]"
            raise ScheduleError(f"{where}: it holds {shown(got[0])}, expected {shown(want)}")
    name = {"W": "B"}.get(kind, kind)  # whether in one step or in two
    written = {"kept": "F", "out": "F", "back": "B", "done": "B", "factor": "I"}
    return [[((f"{written.get(s.buf, name)}{rank}", i),)] for s in step.writes]


def needs(step: Compute) -> tuple:
    """Return what an action reads, writes and takes, wherever in the buffers it does."""
    reads, writes = (sorted((s.buf, s.hi - s.lo) for s in slices) for slices in (step.reads, step.writes))
    return reads, writes, step.seconds


def shown(value: tuple) -> str:
    """Return a symbol in words."""
    return " + ".join(f"what {made} made of micro-batch {i}" if made else f"micro-batch {i}" for made, i in value)


def micro_batches(rank: int, size: int, count: int, root: int) -> dict:
    """Return what each stage has: the first one has all micro-batches."""
    return {"x": [((0, i),) for i in range(count)]} if rank == 0 else {}


def all_done(rank: int, size: int, count: int, root: int):
    """Every stage has been forward and backward with every micro-batch."""
    return "done", 0, [((f"B{rank}", i),) for i in range(count)]


PIPELINE = Operation(micro_batches, all_done)
pipeline = partial(
    Puzzle,
    size=4,
    count=8,
    define=PIPELINE,
    others=((1, 3), (2, 1), (2, 5), (3, 4)),
    network=FREE,
    compute=pass_on,
)

gpipe = pipeline(
    "GPipe",
    """Four stages, eight micro-batches; F takes one unit of time, B two, messages none. One micro-batch after the
    other takes 8 x 4 x 3 = 96 units. Do better: 33, by stages that work on different micro-batches at once. As many
    activations may be kept as you like.

    `Stage(rank, size).rounds(order)` makes rounds of an order of ("F", i) and ("B", i).""",
    limits={"seconds": 33, "live": 10},
    record={"seconds": 33, "live": 6},
)

one_f_one_b = pipeline(
    "1F1B",
    """The same in the same time, but with fewer activations: what F keeps for B can go when B has used it, so go
    backward as soon as you can. The first stage need not keep more than four.""",
    limits={"seconds": 33, "live": 6},
    record={"seconds": 33, "live": 6},
)

zero_bubble = pipeline(
    "zero bubble",
    """Now B may be done in two steps, ("I", i) and then ("W", i), of one unit each. The stage before waits for I
    alone: W can fill the time in which a stage would have nothing to do. 27 units.""",
    limits={"seconds": 27, "live": 10},
    record={"seconds": 27, "live": 9},
    compute=partial(pass_on, kinds="FBIW"),
)


def shards(rank: int, size: int, count: int, root: int) -> dict:
    """Element l of x is this rank's shard of the parameters of layer l."""
    return {"x": [((rank, layer),) for layer in range(count)], "y": unwritten(count)}


def outputs(rank: int, size: int, count: int, root: int):
    """Every layer has been computed, with all of its parameters."""
    return "y", 0, [((f"layer {layer}", layer),) for layer in range(count)]


def layer(rank: int, size: int, step: Compute, values: list) -> list:
    """Computing a layer needs the shards of all ranks, in rank order."""
    digits = step.name.removeprefix("L")
    if step.name[:1] != "L" or not digits.isdecimal() or step.seconds != LAYER:
        raise ScheduleError(f'rank {rank}: {step}: expected Compute(f"L{{l}}", reads, writes, {LAYER}) of a layer l')
    number = int(digits)
    got = [value for read in values for value in read]
    want = [((q, number),) for q in range(size)]
    if [s.hi - s.lo for s in step.writes] != [1]:
        raise ScheduleError(f"rank {rank}, {step.name} writes {step.writes}: expected one element of y")
    if got != want:
        raise ScheduleError(f"rank {rank}, {step.name} reads {got}, expected the shards of all ranks: {want}")
    return [[((f"layer {number}", number),)]]


fsdp = Puzzle(
    "one layer ahead",
    """Eight layers, whose parameters are in shards on four ranks: x[l] is this rank's shard of layer l. To compute
    layer l,

    `Compute(f"L{l}", (Slice("full", a, b),), (Slice("y", l, l + 1),), 4.0)`

    a rank needs the shards of all ranks, in rank order, in full[a:b] (choose a; its own shard must get there too).
    Computing a layer takes four units, a message one. Gathering all layers first would keep 32 elements at a time,
    and gathering each one when it is needed leaves the ranks idle meanwhile: do neither. A `Compute` and messages
    may be in the same round.""",
    4,
    8,
    Operation(shards, outputs),
    {"seconds": 36, "live": 8},
    {"seconds": 35, "live": 8},
    ((1, 2), (2, 3), (3, 5)),
    Network.hockney(1.0, 0.0),
    layer,
)


def only_to_the_right(stats: Stats) -> str:
    """Messages go to the next rank on a ring."""
    size = len(stats.buffers)
    for rank, rounds in enumerate(stats.history):
        for step in (s for steps in rounds for s in steps if isinstance(s, Send)):
            if step.peer != (rank + 1) % size:
                return f"rank {rank} sends to rank {step.peer}: only to the next rank on the ring there is a wire"
    return ""


def own_keys(rank: int, size: int, count: int, root: int) -> dict:
    """Return what each rank has: the keys of its positions in x."""
    return {"x": [((rank, i),) for i in range(count)], "y": unwritten(size)}


def all_seen(rank: int, size: int, count: int, root: int):
    """Every rank has attended to the keys of all ranks."""
    return "y", 0, [((f"scores with rank {owner}", owner),) for owner in range(size)]


def attend(rank: int, size: int, step: Compute, values: list) -> list:
    """Attending to a rank's keys needs all of these, and nobody else's."""
    digits = step.name.removeprefix("A")
    if step.name[:1] != "A" or not digits.isdecimal() or step.seconds != LAYER:
        raise ScheduleError(f'rank {rank}: {step}: expected Compute(f"A{{q}}", reads, writes, {LAYER}) of a rank q')
    owner = int(digits)
    got = [value for read in values for value in read]
    want = [((owner, i),) for i in range(len(got))]
    if [s.hi - s.lo for s in step.writes] != [1]:
        raise ScheduleError(f"rank {rank}, {step.name} writes {step.writes}: expected one element of y")
    if got != want or not got:
        raise ScheduleError(f"rank {rank}, {step.name} reads {got}, expected the keys of rank {owner}: {want}")
    return [[((f"scores with rank {owner}", owner),)]]


ring_attention = Puzzle(
    "ring attention",
    """A sequence is cut over four ranks: x holds the keys of this rank's positions, two elements. Each rank has to
    attend to the keys of every rank q, its own too, wherever they lie by then:

    `Compute(f"A{q}", (Slice(name, 0, count),), (Slice("y", q, q + 1),), 4.0)`

    That takes four units, a message one. Gathering all keys first takes three units more, and keeps eight elements at
    a time; sending them on when a rank has attended to them leaves it idle meanwhile. Messages go to the next rank on
    a ring only. A `Compute` and messages may be in the same round, if they write different buffers.""",
    4,
    2,
    Operation(own_keys, all_seen),
    {"seconds": 16, "live": 4},
    {"seconds": 16, "live": 4},
    ((1, 2), (2, 3), (3, 1), (5, 2)),
    Network.hockney(1.0, 0.0),
    attend,
    only_to_the_right,
)


def positions(rank: int, size: int, count: int, root: int) -> dict:
    """Block q of x are this rank's positions that have chosen expert q, which rank q has."""
    return {"x": [((rank, i),) for i in range(size * count)], "y": unwritten(size * count)}


def answered(rank: int, size: int, count: int, root: int):
    """Every position has been to its expert and back."""
    return "y", 0, [((f"expert {i // count} of rank {rank}", i),) for i in range(size * count)]


def expert(rank: int, size: int, step: Compute, values: list) -> list:
    """An expert takes the positions of one rank at a time, all that this rank has for it."""
    digits = step.name.removeprefix("E")
    if step.name[:1] != "E" or not digits.isdecimal() or int(digits) >= size or step.seconds != EXPERT:
        raise ScheduleError(f'rank {rank}: {step}: expected Compute(f"E{{r}}", reads, writes, {EXPERT}) of a rank r')
    got, source = [value for read in values for value in read], int(digits)
    want = [((source, rank * len(got) + i),) for i in range(len(got))]
    if got != want or sum(s.hi - s.lo for s in step.writes) != len(got):
        raise ScheduleError(
            f"rank {rank}, {step.name} reads {got} and writes {step.writes}: expected what rank {source} has for "
            f"expert {rank}, {want}, and as many elements to write"
        )
    answers = [((f"expert {rank} of rank {source}", i),) for _, i in (value[0] for value in got)]
    values = []
    for piece in step.writes:
        values.append(answers[: piece.hi - piece.lo])
        answers = answers[piece.hi - piece.lo :]
    return values


experts = Puzzle(
    "experts",
    """Four ranks with an expert each. Every rank has positions for every expert: x[q * count : (q + 1) * count] are for
    expert q, on rank q. There they are computed, those of one rank r at a time,

    `Compute(f"E{r}", (Slice("in", a, b),), (Slice("out", c, d),), 2.0)`

    (choose the buffers and where in them), and what expert q has made of them belongs to y[q * count : (q + 1) * count]
    of the rank they came from. Computing takes two units, a message one. An alltoall pair by pair, then four
    computations, then an alltoall back take 3 + 8 + 3 units. Nine are enough: what can be computed before a message
    has come, and what can travel meanwhile?""",
    4,
    2,
    Operation(positions, answered),
    {"seconds": 9},
    {"seconds": 9},
    ((1, 2), (2, 1), (3, 2), (5, 1)),
    Network.hockney(1.0, 0.0),
    expert,
)
