"""Every schedule of a pipeline: what it counts, how long it takes, what it holds; and mistakes, each of them found.

The figures are closed forms of the papers, for p ranks and m micro-batches. A sample is drawn; RINGPROP_GRID=full takes
every p to 16 and m to 32.
"""

import os
import random
from fractions import Fraction
from itertools import pairwise, product

import pytest

from parallel.strategies.pipeline.actions import Action, Overlap, PipelineError, parts, read, write
from parallel.strategies.pipeline.checking import check, peak_activations
from parallel.strategies.pipeline.schedules import SCHEDULES, rows

GRID = list(product(range(1, 17), range(1, 33)))
SAMPLE = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 8), (4, 9), (16, 31)] + random.Random(12).sample(GRID, 12)
CASES = GRID if os.environ.get("RINGPROP_GRID") == "full" else SAMPLE


def stages_of(name, p, chunks=2):
    return p * {"interleaved": chunks, "zb-v": 2, "dualpipev": 2}.get(name, 1)


@pytest.mark.parametrize(
    "name, makespan, idle, peaks",
    [
        ("gpipe", 33, 9, [8, 8, 8, 8]),
        ("1f1b", 33, 9, [4, 3, 2, 1]),
        ("interleaved", 57, 9, [11, 9, 7, 5]),
        ("zb-h1", 27, 3, [4, 4, 4, 4]),
        ("zb-h2", 27, 0, [7, 7, 7, 7]),
        ("zb-v", 51, 0, [8, 8, 8, 8]),
    ],
)
def test_four_ranks_and_eight_micro_batches(name, makespan, idle, peaks):
    """With F = I = W = 1; where a rank has two stages, times and peaks are of half stages."""
    report = check(name, 4, 8)
    assert (report.makespan, max(report.idle), report.peaks) == (makespan, idle, peaks)
    assert max(report.idle_share) == pytest.approx(idle / (idle + 24 * stages_of(name, 4) / 4))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_does_everything_once(name):
    for p, m in CASES:
        for chunks in (2, 3) if name == "interleaved" else (2,):
            report = check(name, p, m, **({"chunks": chunks} if name == "interleaved" else {}))
            n = stages_of(name, p, chunks) * m
            counts = report.counts
            assert report.stages == stages_of(name, p, chunks) and report.micro_batches == m
            assert counts["F"] == counts["B"] + counts["I"] == counts["B"] + counts["W"] == n
            halves = n if name.startswith("zb") else 0
            assert counts["I"] == halves or name == "dualpipev"


TIMES = {kind: Fraction(n) for kind, n in (("F", 4), ("I", 5), ("W", 3), ("B", 8))}


def test_closed_forms_of_makespan_and_idle_time():
    """Exact, with seconds of F, I, W that are not alike where the form holds for them."""
    f, i, w, b = (TIMES[kind] for kind in "FIWB")
    for p, m in CASES:
        naive, gpipe, f1b, stream = (check(name, p, m, TIMES) for name in ("naive", "gpipe", "1f1b", "pipedream"))
        assert naive.makespan == m * p * (f + b) and max(naive.idle) == m * (p - 1) * (f + b)
        assert gpipe.makespan == f1b.makespan == stream.makespan == (m + p - 1) * (f + b)
        assert max(gpipe.idle) == max(f1b.idle) == max(stream.idle) == (p - 1) * (f + b)
        if m % p == 0:
            for v in (2, 3):
                assert check("interleaved", p, m, TIMES, chunks=v).makespan == (m * v + p - 1) * (f + b)
        if m >= p:
            assert max(check("zb-h1", p, m, TIMES).idle) == (p - 1) * (f + i - w)
        if m >= 2 * p - 1:
            assert max(check("zb-h2", p, m, TIMES).idle) == (p - 1) * (f + i - 2 * w)
            report = check("zb-v", p, m)
            assert max(report.idle) == 0 and report.makespan == 6 * m + p - 1
        if m >= 2 * p:
            report = check("dualpipev", p, m)
            assert max(report.idle) == 2 * (p - 1) and report.makespan == 6 * m + 2 * (p - 1)


def test_closed_forms_of_peaks():
    for p, m in CASES:
        peaks = {name: check(name, p, m).peaks for name in SCHEDULES}
        assert peaks["naive"] == [1] * p and peaks["gpipe"] == [m] * p
        assert peaks["1f1b"] == peaks["pipedream"] == [min(p - r, m) for r in range(p)]
        if m % p == 0:
            assert peaks["interleaved"] == [min(2 * m, 2 * p + p - 1 - 2 * r) for r in range(p)]
        if m >= p:
            assert peaks["zb-h1"] == [p] * p
            until_input = [peak_activations(row, "BI") for row in rows("zb-h1", p, m)]
            assert until_input == [p - r for r in range(p)]
        if m >= 2 * p - 1:
            assert peaks["zb-h2"] == [2 * p - 1] * p and peaks["zb-v"] == [2 * p] * p
        if m >= 2 * p:
            assert peaks["dualpipev"] == [2 * p + 1] * p


def test_replicas_take_mini_batches_in_turn():
    """Stages on 3, 1 and 2 ranks: mini-batch b goes to replica b mod 3, 1, 2; in flight at first: ceil(6 / 3) each."""
    given = rows("pipedream", 6, 20, replicas=(3, 1, 2))
    report = check(given)
    assert report.stages == 3 and report.counts["F"] == report.counts["B"] == 3 * 20
    for rank, (stage, replica, n) in enumerate([(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 1), (2, 0, 2), (2, 1, 2)]):
        assert {a.stage for a in given[rank]} == {stage}
        for kind in "FB":
            assert [a.micro_batch for a in given[rank] if a.kind == kind] == list(range(replica, 20, n))
        kinds = [a.kind for a in given[rank]]
        assert kinds.count("REDUCE_GRAD") == (-(-20 // n) if n > 1 else 0), "rounds, the last one with fewer"
        after = [kind for before, kind in pairwise(kinds) if before == "B"]
        assert n == 1 or set(after) == {"REDUCE_GRAD"}
    assert report.peaks == [2, 2, 2, 3, 1, 1]
    with pytest.raises(ValueError, match=r"replicas: expected numbers of ranks, in all 6, given \(3, 1\)"):
        rows("pipedream", 6, 20, replicas=(3, 1))


def test_any_replicas_run():
    draw = random.Random(5)
    for _ in range(30):
        replicas = [draw.randint(1, 5) for _ in range(draw.randint(1, 5))]
        check("pipedream", sum(replicas), draw.randint(1, 30), replicas=replicas)


def test_replicas_sum_their_gradients_together():
    """By hand: the first stage's replicas leave their first sum when both backward passes are done."""
    given = rows("pipedream", 3, 4, replicas=(2, 1))
    text = "0F0,0F2,0B0,0REDUCE_GRAD,0B2,0REDUCE_GRAD\n0F1,0F3,0B1,0REDUCE_GRAD,0B3,0REDUCE_GRAD\n"
    assert write(given) == text + "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n" and read(write(given)) == given
    seconds = {"F": 1.0, "B": 2.0, "REDUCE_GRAD": 5.0}
    spans = check(given, seconds=seconds).spans
    sums = [[(s.start, s.end) for s in row if s.actions[0].kind == "REDUCE_GRAD"] for row in spans]
    assert sums == [[(9.0, 14.0), (16.0, 21.0)]] * 2 + [[]]
    assert spans[0][2].end == 6.0, "rank 0 waits for rank 1"


def test_sums_that_never_end():
    given = rows("pipedream", 3, 4, replicas=(2, 1))
    with pytest.raises(
        PipelineError, match="rank 1, column 5: 0REDUCE_GRAD cannot run: it is sum 1 over its stage, and"
    ):
        check([given[0][:-1], *given[1:]])
    late = given[0][:1] + given[0][2:4] + given[0][1:2] + given[0][4:]  # F2 after a sum for which B1 must come
    last = [given[2][i] for i in (0, 1, 4, 5, 2, 3, 6, 7)]  # and the last stage has it before
    with pytest.raises(PipelineError, match=r"0REDUCE_GRAD waits for the same of ranks \[1\](.|\n)*cycle: ") as error:
        check([late, given[1], last])
    assert "3 of 3 ranks wait for ever" in str(error.value)
    alone = read("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n1F0,1B0\n")
    assert check(alone).makespan == check(read("0F0,0B0\n1F0,1B0\n")).makespan, "nobody else has the stage"


def test_an_overlap_is_of_two_chunks_and_two_micro_batches():
    found = [cell for row in rows("dualpipev", 4, 8) for cell in row if isinstance(cell, Overlap)]
    assert found
    for f, b in (cell.actions for cell in found):
        assert (f.kind, b.kind) == ("F", "B") and f.stage != b.stage and f.micro_batch != b.micro_batch


def test_a_schedule_of_ones_own():
    def one_at_a_time(rank, ranks, micro_batches):
        for i in range(micro_batches):
            yield Action(rank, "F", i)
            yield Action(rank, "B", i)

    report = check(one_at_a_time, ranks=3, micro_batches=2)
    assert report.makespan == 18
    assert str(report).splitlines() == [
        "right: 3 stages on 3 ranks, 2 micro-batches: 6 F, 6 B",
        "  makespan 18",
        "  rank   idle  share   peak",
        "     0     12  66.7%      1",
        "     1      9  60.0%      1",
        "     2      6  50.0%      1",
    ]


# ------------------------------------------------------------------ mistakes


def swapped(given, rank, column):
    given[rank][column], given[rank][column + 1] = given[rank][column + 1], given[rank][column]
    return given


def test_a_backward_before_its_forward_is_refused():
    with pytest.raises(PipelineError) as told:
        check(swapped(rows("1f1b", 4, 8), 3, 0))
    assert (
        str(told.value) == "rank 3, column 0: 3B0 cannot run: it needs 3F0, which comes later on this rank, in column 1"
    )
    assert (told.value.rank, told.value.column) == (3, 0)


def test_ranks_that_wait_for_each_other_are_told_with_their_cycle():
    """Rank 0 takes its backward before the forward that rank 1 wants first."""
    with pytest.raises(PipelineError) as told:
        check([[Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
               [Action(1, "F", 1), Action(1, "F", 0), Action(1, "B", 0), Action(1, "B", 1)]])  # fmt: skip
    assert str(told.value).splitlines() == [
        "2 of 2 ranks wait for ever",
        "  rank 1, column 0: 1F1 needs 0F1 of rank 0, column 2",
        "  rank 0, column 1: 0B0 needs 1B0 or 1I0 of rank 1, column 2",
        "  cycle: 0 -> 1 -> 0",
    ]
    assert (told.value.rank, told.value.column) == (1, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_dropped_is_missed(name):
    given = rows(name, 3, 7)
    for row in given:
        for column, cell in enumerate(row):
            for action in parts(cell):
                left = tuple(a for a in parts(cell) if a != action)
                row[column] = left[0] if left else None
                with pytest.raises(PipelineError, match=str(action)):
                    check(given)
                row[column] = cell


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_swap_of_what_depends_on_each_other_is_refused(name):
    """Neighbours of the same stage and micro-batch; other swaps may be right, and are if they run."""
    given = rows(name, 3, 7)
    for rank, row in enumerate(given):
        for column in range(len(row) - 1):
            first, second = parts(row[column]), parts(row[column + 1])
            if any(a.stage == b.stage and a.micro_batch == b.micro_batch for a in first for b in second):
                swapped(given, rank, column)
                with pytest.raises(PipelineError, match=f"rank {rank}, column {column}"):
                    check(given)
                swapped(given, rank, column)


F0, B0, I0, W0 = (Action(0, kind, 0) for kind in "FBIW")


@pytest.mark.parametrize(
    "given, why",
    [
        ([[F0, F0, B0]], "rank 0, column 1: 0F0 cannot run: 0F0 on rank 0, column 0 has done that"),
        ([[F0, I0, B0]], "rank 0, column 2: 0B0 cannot run: 0I0 on rank 0, column 1 has done that"),
        ([[F0, I0]], "rank 0: 0W0 is missing: nothing computes the weights' gradient"),
        ([[F0]], "rank 0: 0B0, or 0I0 and 0W0, is missing"),
        ([[F0, W0, I0]], "rank 0, column 1: 0W0 cannot run: it needs 0I0, which comes later on this rank, in column 2"),
        ([[F0], [B0]], "rank 1, column 0: 0B0 cannot run: it needs what 0F0 left on rank 0"),
        (
            [[Action(1, "F", 0), Action(1, "B", 0)]],
            "rank 0, column 0: 1F0 cannot run: it needs 0F0, which no rank does",
        ),
        ([[F0, B0, Action(0, "F", 2), Action(0, "B", 2)]], "0F1 is missing: no rank does it"),
        ([[None]], "the schedule has no actions"),
        ([[F0, "0B0"]], "rank 0, column 1: '0B0' cannot run: expected an action, such as Action(0, \"F\", 3)"),
        (
            [[Action(0, "G", 0)]],
            "rank 0, column 0: 0G0 cannot run: no kind 'G': there are F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, "
            "UNSHARD, RESHARD, REDUCE_GRAD",
        ),
    ],
)
def test_what_cannot_run_is_told_with_its_place(given, why):
    with pytest.raises(PipelineError) as told:
        check(given)
    assert str(told.value) == why


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="no pipeline schedule 'gpip': there are naive, gpipe, 1f1b"):
        check("gpip", 2, 2)
    with pytest.raises(ValueError, match="micro_batches: expected a whole number of at least 1, given 0"):
        check("gpipe", 2, 0)
    with pytest.raises(ValueError, match="chunks"):
        check("interleaved", 2, 2, chunks=0)
    with pytest.raises(PipelineError, match="the schedule has 2 rows, one for each rank, but there are 3 ranks"):
        check(rows("gpipe", 2, 2), 3)
    with pytest.raises(PipelineError, match="column 2: 0F2"):
        check(rows("gpipe", 2, 3), 2, 2)
