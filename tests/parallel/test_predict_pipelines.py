"""Seconds of a pipeline: the clock, the walk and the closed forms agree where they should; peaks are the checker's."""

import random
from itertools import combinations, pairwise

import pytest

from collectives.pricing.networks import Link, Network, Point
from parallel.planning.profile import LayerProfile
from parallel.strategies.pipeline import timing
from parallel.strategies.pipeline.checking import check
from parallel.strategies.pipeline.timing import (
    CHUNKS,
    TIMED,
    StageCost,
    closed_form,
    cut_evenly,
    stage_costs,
    time_pipeline,
)

FREE = Network(Link(0.0, 0.0), Link(0.0, 0.0), ranks_per_node=1)
EQUAL = StageCost(1.0, 1.0, 1.0, 10.0, 100.0, 7.0)


def equal(schedule, ranks):
    return [EQUAL] * (ranks * CHUNKS.get(schedule, 1))


@pytest.mark.parametrize("schedule", TIMED)
def test_three_ways_agree(schedule, monkeypatch):
    """Equal stages, free messages, full pipelines: lowered and priced, walked, and the formula."""
    for ranks, m in ((2, 8), (3, 7), (4, 8), (4, 16)):
        stages, found = equal(schedule, ranks), {}
        for method, limits in (("simulation", (10**9, 10**9)), ("walk", (0, 10**9)), ("closed form", (0, 0))):
            monkeypatch.setattr(timing, "CLOCKED", limits[0])
            monkeypatch.setattr(timing, "WALKED", limits[1])
            timed = time_pipeline(schedule, stages, m, FREE)
            assert timed.method == method
            found[method] = timed.seconds
        assert found["simulation"] == pytest.approx(found["walk"], rel=1e-9), (ranks, m)
        assert found["closed form"] == pytest.approx(found["walk"], rel=1e-9), (ranks, m)


def test_golden_figures():
    """GPipe, 1F1B: 33 for p = 4, m = 8, F = I = W = 1; a stage waits (p-1)/(m+p-1) of the time; ZB-H1 27."""
    for schedule, seconds in (("gpipe", 33), ("1f1b", 33), ("zb-h1", 27), ("zb-h2", 27)):
        assert time_pipeline(schedule, equal(schedule, 4), 8, FREE).seconds == pytest.approx(seconds)
    small = EQUAL._replace(input=0.0)  # a message of nothing is waited for, too
    assert time_pipeline("gpipe", [small] * 4, 8, FREE).seconds == pytest.approx(33)
    assert closed_form("gpipe", [EQUAL], 8, recompute=True) == 32
    assert time_pipeline("gpipe", equal("gpipe", 4), 8, FREE, recompute=True).seconds == pytest.approx(44)


@pytest.mark.parametrize("schedule", TIMED)
def test_peaks_are_those_of_the_checker(schedule):
    timed = time_pipeline(schedule, equal(schedule, 4), 8, FREE)
    assert timed.peaks == tuple(100.0 * n for n in check(schedule, 4, 8).peaks)
    assert max(time_pipeline(schedule, equal(schedule, 4), 8, FREE, recompute=True).peaks) < max(timed.peaks) or (
        schedule == "naive"
    )
    for ranks, m in ((1, 4), (2, 8), (3, 12), (4, 16)):  # full pipelines: the closed form, too
        stages = equal(schedule, ranks)
        quick = time_pipeline(schedule, stages, m, FREE, quick=True)
        assert quick.peaks == time_pipeline(schedule, stages, m, FREE).peaks, (ranks, m)


def test_messages_cost_time():
    slow = Network.hockney(0.5, 0.0)
    assert time_pipeline("gpipe", equal("gpipe", 4), 8, slow).seconds >= 33 + 3
    timed = time_pipeline("1f1b", equal("1f1b", 3), 5, slow)
    assert timed.sent == (50.0, 100.0, 50.0)
    near = Network(Link(0.0, 0.0), slow.between, ranks_per_node=4)
    assert time_pipeline("gpipe", equal("gpipe", 4), 8, near).seconds == pytest.approx(33)


def test_a_rank_waits_for_what_it_needs_and_for_nothing_else():
    """Messages of 10 s, of which a cable carries one after the other, beside actions of 1 s: by hand.

    1F1B on two ranks: rank 1 gets F0 at 11, F1 at 21; rank 0 B0 at 24, then does F2, which is there at 37, and gets
    B1 at 34. Sends end without the receiver, which has posted its receives, however short messages are that may else.
    """
    points = tuple(Point(n, float(n), 0.0, 0.0, float(n), float(n), float(n)) for n in (1, 10))
    link = Link(0.0, 1.0, points=points, eager=4)
    for schedule, seconds in (("1f1b", 62), ("gpipe", 86), ("naive", 104)):
        timed = time_pipeline(schedule, equal(schedule, 2), 4, Network(link, link))
        assert timed.method == "simulation" and timed.seconds == pytest.approx(seconds), schedule


def test_stages_are_cut_where_the_longest_takes_least():
    draw = random.Random(1)
    for _ in range(60):
        seconds = [draw.choice([0.0, 1.0, 2.0, 5.0]) + draw.random() for _ in range(draw.randint(1, 8))]
        for count in range(1, len(seconds) + 1):
            at = cut_evenly(seconds, count)
            assert at[0] == 0 and at[-1] == len(seconds) and len(at) == count + 1 and at == sorted(set(at))
            longest = max(sum(seconds[a:b]) for a, b in pairwise(at))
            every = [(0, *inner, len(seconds)) for inner in combinations(range(1, len(seconds)), count - 1)]
            assert longest == pytest.approx(min(max(sum(seconds[a:b]) for a, b in pairwise(c)) for c in every))
    layers = [LayerProfile(str(i), 1.0, 2.0, 8.0 + i, 3.0, 1.0, 5.0) for i in range(4)]
    first, second = stage_costs(layers, (0, 2, 4), input_bytes=2.0)
    assert first == StageCost(2.0, 2.0, 2.0, 2.0, 12.0, 6.0) and second == StageCost(2.0, 2.0, 2.0, 9.0, 19.0, 6.0)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="5 stages"):
        cut_evenly([1.0] * 4, 5)
    with pytest.raises(ValueError, match="schedule 'pipedream': expected one of naive, gpipe"):
        time_pipeline("pipedream", [EQUAL], 4, FREE)
    with pytest.raises(ValueError, match="zb-v: expected 2 stages a rank"):
        time_pipeline("zb-v", [EQUAL] * 3, 4, FREE)
