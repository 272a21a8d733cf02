"""Schedules as rounds: every action meets its own data, nothing waits for ever, and a slot too few is found.

A sample of ranks and micro-batches is drawn; RINGPROP_GRID=full takes every p to 16 and m to 32: an hour or two.
"""

import os
import random
from functools import partial
from itertools import pairwise, product

import pytest

from collectives.checking.simulator import Deadlock, RuleBroken, ScheduleError, simulate
from collectives.pricing.networks import Network
from collectives.pricing.price import price
from collectives.steps import Compute, Recv, Send, Slice
from parallel.strategies.pipeline.actions import PipelineError, parse
from parallel.strategies.pipeline.checking import check, walk
from parallel.strategies.pipeline.lowering import Stage, lower, prove
from parallel.strategies.pipeline.schedules import SCHEDULES, rows

GRID = list(product(range(1, 17), range(1, 33)))
SAMPLE = [(1, 3), (2, 5), (4, 8), (3, 7), (5, 2)] + random.Random(3).sample(list(product(range(2, 8), range(1, 14))), 4)
CASES = GRID if os.environ.get("RINGPROP_GRID") == "full" else SAMPLE
some_and_large = pytest.mark.parametrize(
    "cases",
    [pytest.param(CASES, id="some"), pytest.param([(8, 16)], id="large", marks=pytest.mark.exhaustive)],
)


def uneven(n):
    """Stages of which no two are alike, so that times and sizes cannot be taken for each other's."""
    return [
        Stage(1 + 0.3 * (i % 3), 0.9 + 0.2 * (i % 4), 0.5 + 0.1 * (i % 5), 1 + i % 3, 2 + i % 2, 1) for i in range(n)
    ]


def lowered(name, p, m, stages=uneven, latency=0.0, **options):
    given = rows(name, p, m, **options)
    return lower(given, stages(check(given).stages), latency)


@some_and_large
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_meets_its_own_data_and_nobody_waits_for_ever(name, cases):
    """With sends that end only when they are received; then with any other."""
    for i, (p, m) in enumerate(cases):
        program = lowered(name, p, m, latency=(0.0, 0.7)[i % 2])
        prove(program)
        done = [parse(s.name) for rounds in program for steps in rounds for s in steps if isinstance(s, Compute)]
        assert sorted(map(str, done)) == sorted(
            str(a) for row in check(name, p, m).spans for s in row for a in s.actions
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_are_what_the_simulator_counts(name):
    """Where what forward saves outweighs all messages, live elements are the peak in hundreds."""
    for p, m in ((1, 3), (4, 8), (3, 7)):
        stats = prove(lowered(name, p, m, lambda n: [Stage(saved=1000)] * n))
        assert [live // 1000 for live in stats.live] == check(name, p, m).peaks


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_clock_takes_as_long_as_the_actions(name):
    """Where messages take no time: to the last bit. Where they do, no message counts twice; naive waits for each."""
    for p, m in ((4, 8), (3, 7), (5, 2)):
        report = check(name, p, m)
        stages = [Stage()] * report.stages
        priced = partial(clocked, rows(name, p, m), stages)
        assert priced(0.0).seconds == report.makespan
        links = sum(a != b for a, b in pairwise(ranks_of_stages(report))) * 2
        assert priced(0.0).messages == links * m
        late = priced(1e-3).seconds
        ideal = max(row[-1].end for row in walk(rows(name, p, m), latency=1e-3))
        assert ideal - 1e-9 <= late <= report.makespan + 1e-3 * links * m + 1e-9
        assert name != "naive" or late == pytest.approx(report.makespan + 1e-3 * links * m)


def clocked(given, stages, latency):
    program = lower(given, stages, latency)
    network = Network.hockney(latency, 0.0)
    return price(lambda rank, size, count: iter(program[rank]), len(given), 1, network=network)


def ranks_of_stages(report):
    """The rank of every stage."""
    return [rank for _, rank in sorted({(a.stage, s.rank) for row in report.spans for s in row for a in s.actions})]


def test_recompute_keeps_the_input_only():
    """gpipe of 8 micro-batches on 4 ranks: forward runs twice, and only 8 inputs are kept."""
    again = [Stage(input=10, saved=1000, recompute=True)] * 4
    whole = [stage._replace(recompute=False) for stage in again]
    live = prove(lowered("gpipe", 4, 8, lambda n: again)).live
    assert max(live) < 8 * 10 + 3 * 10 and min(prove(lowered("gpipe", 4, 8, lambda n: whole)).live) >= 8 * 1000
    times = lambda program: sum(s.seconds for steps in program[1] for s in steps if isinstance(s, Compute))
    assert times(lowered("gpipe", 4, 8, lambda n: again)) == times(lowered("gpipe", 4, 8, lambda n: whole)) + 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_of_different_sizes(name):
    """Of 3, 3, 2, 2 and no samples: what is sent is as long as its samples are many."""
    given = rows(name, 3, 5)
    stages = [Stage(input=7, saved=2)] * check(given).stages
    program = lower(given, stages, samples=[3, 3, 2, 2, 0])
    stats = prove(program)
    links = sum(isinstance(s, Send) for rounds in program for steps in rounds for s in steps) / 5
    assert sum(stats.sent) == links * 7 * 10
    with pytest.raises(PipelineError, match="the schedule has 5 micro-batches, but samples of 4"):
        lower(given, stages, samples=[1] * 4)


@some_and_large
@pytest.mark.parametrize("name", SCHEDULES)
def test_rounds_as_they_are_run(name, cases):
    """What the clock is given: every action meets its own data, messages of two ranks match in their order, and a
    receive stands right before an action that needs it, or before one that was sent after it."""
    for i, (p, m) in enumerate(cases):
        given = rows(name, p, m)
        program = lower(given, uneven(check(given).stages), (0.0, 0.7)[i % 2], as_run=True)
        prove(program, synchronous=False)
        for rounds in program:
            for steps, following in pairwise([*rounds, ()]):
                if received := [step for step in steps if isinstance(step, Recv)]:
                    assert not any(isinstance(step, Compute) for step in steps)
                    reads = {place[:2] for step in following if isinstance(step, Compute) for place in step.reads}
                    lasting = {step.peer: step for step in received}  # the last of each sender
                    assert all(step[1:3] in reads for step in lasting.values())


def test_replicas_send_to_the_replica_whose_turn_it_is():
    program = lowered("pipedream", 6, 12, replicas=(3, 1, 2))
    prove(program)
    to = [[s.peer for steps in rounds for s in steps if isinstance(s, Send)] for rounds in program]
    assert set(to[0]) == set(to[1]) == {3} and sorted(set(to[3])) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("replicas, m", [((2, 1), 6), ((3, 1, 2), 11), ((1, 4), 2), ((2, 3, 2), 13)])
def test_sums_over_replicas_are_a_ring(replicas, m):
    """Each sends 2 (r - 1) / r of the gradients for every update, behind its backward pass."""
    ranks, n = sum(replicas), 12
    given = rows("pipedream", ranks, m, replicas=replicas)
    program = lower(given, [Stage(gradients=n)] * len(replicas))
    sent, without = prove(program).sent, prove(lower(given, [Stage()] * len(replicas))).sent
    counts = [r for r in replicas for _ in range(r)]
    expected = [-(-m // r) * 2 * (r - 1) * n / r for r in counts]
    assert [a - b for a, b in zip(sent, without, strict=True)] == expected
    clock = lambda found: price(lambda rank, *_: iter(found[rank]), ranks, 1, 1, Network.hockney(0.0, 1.0)).seconds
    assert clock(program) > clock(lower(given, [Stage()] * len(replicas)))


def test_a_receive_is_there_when_its_message_is():
    """A quick first stage makes five more inputs while the second works on its first: all are received right after."""
    quick, slow = Stage(forward=0.1), Stage(forward=1.0)
    program = lower(rows("gpipe", 2, 6), [quick, slow])
    names = [[s.name if isinstance(s, Compute) else type(s).__name__ for s in steps] for steps in program[1]]
    assert names[:5] == [["Recv"], ["1F0"], ["Recv"] * 5, ["1F1"], ["1F2"]]
    program = lower(rows("gpipe", 2, 6), [quick, slow._replace(forward=0.15)])
    names = [[s.name if isinstance(s, Compute) else type(s).__name__ for s in steps] for steps in program[1]]
    assert ["Recv", "1F3"] in names  # beside the work on an earlier one, where there is time


def test_two_ranks_by_hand():
    """1F1B of two micro-batches: rank 0 has two of everything that it keeps, rank 1 one but for what comes early."""
    first, second = lower(rows("1f1b", 2, 2), [Stage(saved=4), Stage(input=3, saved=5)])
    saved, out = [Slice("saved0", 0, 4), Slice("saved0", 4, 8)], [Slice("output0", 0, 3), Slice("output0", 3, 6)]
    back = Slice("output_gradient0", 0, 3)
    assert first == [
        (Compute("0F0", (), (saved[0], out[0]), 1.0),),
        (Send(1, "output0", 0, 3), Compute("0F1", (), (saved[1], out[1]), 1.0)),
        (Send(1, "output0", 3, 6), Recv(1, *back[:3])),
        (Compute("0B0", (saved[0], back), (), 2.0),),
        (Recv(1, *back[:3]),),
        (Compute("0B1", (saved[1], back), (), 2.0),),
    ]
    saved, into, back = Slice("saved1", 0, 5), [Slice("input1", 0, 3), Slice("input1", 3, 6)], ("input_gradient1", 0, 3)
    assert second == [
        (Recv(0, "input1", 0, 3),),
        (Compute("1F0", (into[0],), (saved,), 1.0),),
        (Recv(0, "input1", 3, 6), Compute("1B0", (into[0], saved), (Slice(*back),), 2.0)),
        (Send(0, *back), Compute("1F1", (into[1],), (saved,), 1.0)),
        (Compute("1B1", (into[1], saved), (Slice(*back),), 2.0),),
        (Send(0, *back),),
    ]


# ------------------------------------------------------------------ mistakes


def changed(program, change):
    """The program with every slice of a Compute and every message changed: change(buffer, lo, hi) -> (lo, hi)."""

    def step(s):
        if isinstance(s, Compute):
            move = lambda places: tuple(p._replace(lo=(c := change(p.buf, p.lo, p.hi))[0], hi=c[1]) for p in places)
            return s._replace(reads=move(s.reads), writes=move(s.writes))
        lo, hi = change(s.buf, s.lo, s.hi)
        return s._replace(lo=lo, hi=hi)

    return [[tuple(map(step, steps)) for steps in rounds] for rounds in program]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved", "dualpipev"])
def test_a_slot_too_few_is_found_in_every_buffer(name):
    """The last slot of a buffer on the first: a value is overwritten while it is needed."""
    program = lowered(name, 4, 8)
    ends, width = {}, {}
    for rounds in program:
        for steps in rounds:
            for s in steps:
                for place in (*s.reads, *s.writes) if isinstance(s, Compute) else [s]:
                    ends[place.buf] = max(ends.get(place.buf, 0), place.hi)
                    width[place.buf] = place.hi - place.lo
    several = [buf for buf, end in ends.items() if end > width[buf]]
    assert len(several) >= 6
    for few in several:
        last = ends[few] - width[few]
        onto = lambda buf, lo, hi: (0, hi - lo) if buf == few and lo == last else (lo, hi)  # noqa: B023
        with pytest.raises(RuleBroken, match=few):
            prove(changed(program, onto))


def test_one_buffer_for_all_micro_batches_is_overwritten():
    """The trap of pipelines: a message is received into the array that a layer still needs."""
    program = changed(lowered("1f1b", 2, 4), lambda buf, lo, hi: (0, hi - lo) if buf == "input1" else (lo, hi))
    with pytest.raises(RuleBroken, match="input1"):
        prove(program)


def test_what_an_earlier_micro_batch_has_left_is_not_taken_for_ones_own():
    program = lowered("1f1b", 2, 2)
    computed = {s.name: s for rounds in program for steps in rounds for s in steps if isinstance(s, Compute)}
    late = computed["1F1"]._replace(reads=computed["1F0"].reads)
    program[1] = [tuple(late if s == computed["1F1"] else s for s in steps) for steps in program[1]]
    with pytest.raises(RuleBroken, match=r"1F1 reads input1.* of micro-batch 1, but holds the input of micro-batch 0"):
        prove(program)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_message_dropped_is_found(name):
    program = lowered(name, 3, 4)
    kinds = {Send: 0, Recv: 0}
    for rank, rounds in enumerate(program):
        for i, steps in enumerate(rounds):
            for s in steps:
                if type(s) in kinds:
                    kinds[type(s)] += 1
                    broken = [list(other) for other in program]
                    broken[rank][i] = tuple(t for t in steps if t is not s)
                    with pytest.raises(ScheduleError):
                        prove(broken)
    assert kinds[Send] == kinds[Recv] > 0


@pytest.mark.parametrize("name", ["1f1b", "zb-h2"])
def test_messages_right_before_and_after_their_use_hang(name):
    """What lowering is for: with sends that wait for their receive, two neighbours send to each other, for ever."""

    def simply(rank):
        for action in rows(name, 4, 8)[rank]:
            back = 1 if action.kind == "F" else -1
            if action.kind != "W" and 0 <= rank - back < 4:
                yield (Recv(rank - back, "in", 0, 1),)
            yield (Compute(str(action), writes=(Slice("out", 0, 1),)),)
            if action.kind != "W" and 0 <= rank + back < 4:
                yield (Send(rank + back, "out", 0, 1),)

    simulate(simply, [{} for _ in range(4)], synchronous=False)
    with pytest.raises(Deadlock):
        simulate(simply, [{} for _ in range(4)])


def test_what_cannot_be_lowered_is_refused():
    with pytest.raises(PipelineError, match="the schedule has 2 stages, but 3 are described"):
        lower(rows("1f1b", 2, 2), uneven(3))
    with pytest.raises(ValueError, match="stage 1: expected seconds above 0 for what others wait for"):
        lower(rows("1f1b", 2, 2), [Stage(), Stage(forward=0.0)])
    with pytest.raises(PipelineError, match="cannot run"):
        lower([row[::-1] for row in rows("1f1b", 2, 2)], uneven(2))
