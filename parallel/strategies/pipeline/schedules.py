"""Pipeline schedules: what each rank does, in which order; one generator of actions a rank.

    def one_at_a_time(rank, ranks, micro_batches):
        for i in range(micro_batches):
            yield Action(rank, "F", i)
            yield Action(rank, "B", i)

    print(check(one_at_a_time, ranks=4, micro_batches=8))

p ranks, rank r, m micro-batches; F, I, W stand for the seconds of a forward, of the gradient of the input and of that
of the weights on one rank, B = I + W. Idle is what a rank waits between its first and its last action, at most;
peak is how many micro-batches' activations a rank holds at once, from F until B or W.

| name | idle | peak on rank r |
|---|---|---|
| naive | m (p - 1) (F + B) | 1 |
| gpipe | (p - 1) (F + B) | m |
| 1f1b | (p - 1) (F + B) | min(p - r, m) |
| pipedream | of one filling and draining, however many batches | warm-up + 1, and as many versions of the weights |
| interleaved | (p - 1) (F + B) / v | at most p (1 + (p - 1) / (p v)) |
| zb-h1 | (p - 1) (F + I - W) | p |
| zb-h2 | (p - 1) (F + I - 2 W) | 2 p - 1 |
| zb-v | 0 where F = I = W | p |
| dualpipev | (p - 1) F where F = I = W | p + 1/2 |

F, B, I, W and peaks are of all that a rank has: where it has v stages, each of them is a v-th. The figures hold from
the m on at which the pipeline is full: p, 2 p - 1 for zb-h2 and zb-v, 2 p for dualpipev.
Any p >= 1 and m >= 1 work. Orders in which nobody waits for ever are checked, never assumed: checking.py.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from collectives.steps import chunk
from parallel.strategies.pipeline.actions import Action, Overlap, parts

Actions = Iterator[Action | Overlap]


def naive(rank: int, ranks: int, micro_batches: int) -> Actions:
    """One micro-batch at a time through all stages and back: one rank works while all others wait.

    Makespan m p (F + B), of which a rank idles m (p - 1) (F + B); no warm-up; peak 1.
    """
    for i in range(micro_batches):
        yield Action(rank, "F", i)
        yield Action(rank, "B", i)


def gpipe(rank: int, ranks: int, micro_batches: int) -> Actions:
    """All forwards, then all backwards (Huang et al. 2019).

    Makespan (m + p - 1) (F + B), of which a rank idles (p - 1) (F + B); peak m. With `recompute` (lowering.py) a stage
    keeps of every micro-batch its input only, and B begins with F once more.
    """
    for i in range(micro_batches):
        yield Action(rank, "F", i)
    for i in range(micro_batches):
        yield Action(rank, "B", i)


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Actions:
    """A backward as soon as there is one: 1F1B with a flush (Narayanan et al. 2019, 2021).

    Warm-up min(p - 1 - r, m) forwards, then alternating forward and backward, then the remaining backwards. As fast
    as gpipe, but the peak is min(p - r, m): how many micro-batches there are does not matter any more.
    """
    yield from by_turns(rank, range(micro_batches), ranks - 1 - rank)


def pipedream(rank: int, ranks: int, micro_batches: int, replicas: Sequence[int] = ()) -> Actions:
    """1F1B that is never flushed; a stage may lie on several ranks (Harlap et al. 2018, Narayanan et al. 2019).

    Every micro-batch is a mini-batch with an update of its own. replicas[s] ranks share stage s and take mini-batches
    in turn: b belongs to replica b mod replicas[s], forward and backward. Warm-up of stage s with R ranks in all:
    floor((R - 1 - ranks of earlier stages) / replicas[s]) forwards; that plus one is its peak, and the number of
    versions of its weights that it keeps, so that a backward uses the weights of its forward. After each backward the
    replicas of a stage sum their gradients (REDUCE_GRAD): one update for as many mini-batches as there are replicas;
    who has none left in the last of these rounds adds nothing.
    """
    stage, replica, before, count = seat(rank, ranks, replicas)
    mine = range(replica, micro_batches, count)
    for action in by_turns(stage, mine, (ranks - 1 - before) // count):
        yield action
        if action.kind == "B" and count > 1:
            yield Action(stage, "REDUCE_GRAD")
    if count > 1 and len(mine) * count < micro_batches:
        yield Action(stage, "REDUCE_GRAD")


class Seat(NamedTuple):
    """Where a rank of pipedream is: its stage, which replica of it, ranks of earlier stages, replicas of its own."""

    stage: int
    replica: int
    before: int
    count: int


def seat(rank: int, ranks: int, replicas: Sequence[int] = ()) -> Seat:
    """The place of a rank where stage s lies on replicas[s] ranks, one after the other; none given: each on one.

    Raises
    ------
    ValueError
        Replicas that are not as many as the ranks.
    """
    replicas = tuple(replicas) or (1,) * ranks
    if not all(isinstance(each, int | np.integer) and each > 0 for each in replicas) or sum(replicas) != ranks:
        raise ValueError(f"replicas: expected numbers of ranks, in all {ranks}, given {replicas}")
    stage, before = 0, 0
    while before + replicas[stage] <= rank:
        before += replicas[stage]
        stage += 1
    return Seat(stage, rank - before, before, replicas[stage])


def by_turns(stage: int, micro_batches: Sequence[int], warm_up: int) -> Actions:
    """Return warm-up forwards, then alternating forward and backward, then the remaining backwards."""
    forwards, backwards = iter(micro_batches), iter(micro_batches)
    for i in islice(forwards, warm_up):
        yield Action(stage, "F", i)
    for i in forwards:
        yield Action(stage, "F", i)
        yield Action(stage, "B", next(backwards))
    for i in backwards:
        yield Action(stage, "B", i)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int = 2) -> Actions:
    """1F1B over v chunks a rank: stage c p + r is chunk c of rank r (Narayanan et al. 2021).

    Micro-batches go in max(1, m // p) nearly equal groups: a group passes all chunks before the next begins. Warm-
    up min((v - 1) g + 2 (p - 1 - r), m v) forwards, where g is the length of the first, longest group. Idle (p - 1)
    (F + B) / v, for v times as many messages; the peak grows to at most p (1 + (p - 1) / (p v)) whole stages.
    """
    n = max(1, micro_batches // ranks)
    groups = [range(*chunk(micro_batches, n, i)) for i in range(n)]
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action(s, "F", i) for group in groups for s in stages for i in group]
    backwards = [Action(s, "B", i) for group in groups for s in reversed(stages) for i in group]
    warm_up = min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


def zb_h1(rank: int, ranks: int, micro_batches: int) -> Actions:
    """The weights' gradients fill the gaps: ZB-H1 (Qi et al. 2023).

    Warm-up p - r forwards; W follows I behind by r. Idle (p - 1) (F + I - W); the peak is p, as 1F1B's on rank 0.
    """
    yield from weights_later(rank, micro_batches, warm_up=ranks - rank, behind=rank)


def zb_h2(rank: int, ranks: int, micro_batches: int) -> Actions:
    """ZB-H1 with more forwards in flight, so that no gap is left: ZB-H2 (Qi et al. 2023).

    Warm-up 2 (p - r) - 1 forwards; W follows I behind by 2 r. Idle (p - 1) (F + I - 2 W): none where all are equal;
    peak 2 p - 1. That is within a rank's own span: ranks start and end at different times, and the makespan of one
    step is ZB-H1's. It is gained where ranks do not synchronize between steps.
    """
    yield from weights_later(rank, micro_batches, warm_up=2 * (ranks - rank) - 1, behind=2 * rank)


def weights_later(stage: int, micro_batches: int, warm_up: int, behind: int) -> Actions:
    """Return warm-up forwards; then alternating I, the W of an earlier micro-batch, F; then the remaining W."""
    forwards, weights = iter(range(micro_batches)), iter(range(micro_batches))
    for i in islice(forwards, warm_up):
        yield Action(stage, "F", i)
    for i in range(micro_batches):
        yield Action(stage, "I", i)
        if i >= behind:
            yield Action(stage, "W", next(weights))
        for j in islice(forwards, 1):
            yield Action(stage, "F", j)
    for i in weights:
        yield Action(stage, "W", i)


def zb_v(rank: int, ranks: int, micro_batches: int) -> Actions:
    """Two chunks a rank, down and up again: stages r and 2 p - 1 - r; ZB-V (Qi et al. 2024).

    The last stage lies on rank 0, which so begins its backwards early, and every rank holds p whole stages at most
    (2 p of its halves). No idle time where F = I = W; then the makespan of one step is (6 m + p - 1) / 2 F. Warm-up
    2 (p - r) - 1 forwards of the first chunk. It needs 2 p - 1 micro-batches to fill: of fewer, those that are not
    there are left out.
    """
    down, up = Chunk(rank), Chunk(2 * ranks - 1 - rank)
    filled = max(2 * ranks - 1, micro_batches)

    def order():
        for _ in range(2 * (ranks - rank) - 1):
            yield down.forward()
        for _ in range(rank):
            yield from (up.forward(), down.forward())
        for _ in range(ranks - rank):
            yield from (up.forward(), up.input_gradient(), up.weight_gradient())
        while up.forwards < filled:
            if down.forwards < filled:
                yield down.forward()
            yield from (down.input_gradient(), down.weight_gradient())
            yield from (up.forward(), up.input_gradient(), up.weight_gradient())
        for _ in range(rank):
            yield from (down.input_gradient(), up.input_gradient())
        for _ in range(ranks - rank):
            yield from (down.input_gradient(), down.weight_gradient())
        for virtual_stage in (up, down):
            while virtual_stage.weights < filled:
                yield virtual_stage.weight_gradient()

    yield from only(order(), micro_batches)


def dualpipev(rank: int, ranks: int, micro_batches: int) -> Actions:
    """Forwards and backwards of two chunks overlapped: DualPipeV (DeepSeek 2025; its V shape after Qi et al. 2024).

    Stages r and 2 p - 1 - r as ZB-V's; warm-up 2 (p - 1 - r) forwards of the first, then alternating both. In the
    middle a forward of one chunk runs beside a backward of the other, so that the messages of the one hide behind
    the computation of the other. Idle (p - 1) F where F = I = W and an overlap takes as long as its parts one after
    the other; peak 2 p + 1 of its half stages. It needs 2 p micro-batches to fill: of fewer, those that are not
    there are left out.
    """
    down, up = Chunk(rank), Chunk(2 * ranks - 1 - rank)
    filled, after = max(2 * ranks, micro_batches), ranks - rank - 1  # after: ranks behind this one
    put_off = []  # weight gradients, oldest first

    def input_gradient(virtual_stage):
        put_off.append(virtual_stage.weight_gradient())
        return virtual_stage.input_gradient()

    def order():
        for _ in range(2 * after):
            yield down.forward()
        for _ in range(rank + 1):
            yield from (down.forward(), up.forward())
        for _ in range(after):
            yield from (input_gradient(up), put_off.pop(0), up.forward())
        for i in range(filled - 2 * ranks + rank + 1):
            first = down.forward(), up.backward()
            if i == 0 and after == 0:
                yield from first  # there is nothing to hide on the last rank, and all others wait for it
            else:
                yield Overlap(first)
            yield Overlap((up.forward(), down.backward()))
        for _ in range(after):
            yield up.backward()
            yield Overlap((up.forward(), down.backward()))
        for k, virtual_stage in enumerate((up, down) * (rank + 1)):
            yield virtual_stage.backward() if k < rank + 1 else input_gradient(virtual_stage)
        for _ in range(after):
            yield from (put_off.pop(0), input_gradient(down))
        yield from put_off

    yield from only(order(), micro_batches)


class Chunk:
    """A stage of a rank that has several: hands out its actions, each kind in the order of micro-batches."""

    def __init__(self, stage: int):
        self.stage = stage
        self.forwards = self.inputs = self.weights = 0  # how many have been handed out

    def forward(self) -> Action:
        self.forwards += 1
        return Action(self.stage, "F", self.forwards - 1)

    def input_gradient(self) -> Action:
        self.inputs += 1
        return Action(self.stage, "I", self.inputs - 1)

    def weight_gradient(self) -> Action:
        self.weights += 1
        return Action(self.stage, "W", self.weights - 1)

    def backward(self) -> Action:
        self.weights += 1
        return self.input_gradient()._replace(kind="B")


def only(actions: Actions, micro_batches: int) -> Actions:
    """The actions without those of micro-batches that are not there; what depends on what does not change by it."""
    for cell in actions:
        there = tuple(action for action in parts(cell) if action.micro_batch < micro_batches)
        if len(there) > 1:
            yield Overlap(there)
        else:
            yield from there


SCHEDULES: dict[str, Callable[..., Actions]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "pipedream": pipedream,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipev": dualpipev,
}


def check_counts(**numbers: int) -> None:
    """Refuse what is no whole number of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int | np.integer) or number < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, given {number!r}")


def rows(schedule: str | Callable[..., Actions], ranks: int, micro_batches: int, **options) -> list[list]:
    """The actions of every rank, of a schedule by its name or of a generator function.

    Parameters
    ----------
    schedule : str or schedule(rank, ranks, micro_batches, **options)
    options : `chunks` of interleaved, `replicas` of pipedream

    Raises
    ------
    ValueError
        an unknown name, numbers that are not whole or below 1, options that the schedule does not have
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"no pipeline schedule {schedule!r}: there are {', '.join(SCHEDULES)}")
        schedule = SCHEDULES[schedule]
    check_counts(ranks=ranks, micro_batches=micro_batches, chunks=options.get("chunks", 1))
    return [list(schedule(rank, ranks, micro_batches, **options)) for rank in range(ranks)]
