"""Algorithms made for tori, levels and near partners: right for their sizes, and as fast as their papers say."""

import math
from functools import partial

import pytest

from collectives import ALGORITHMS, Send, check, price
from collectives.algorithms.bine import distance, tree
from collectives.algorithms.bucket import bucket, multi_level, multiport_bucket
from collectives.algorithms.pat import rounds
from collectives.algorithms.swing import multiport_swing, position, swing
from collectives.pricing.networks import Network
from collectives.steps import is_live

BUCKETS = (bucket, multiport_bucket)


@pytest.mark.parametrize("dims", [(8,), (4, 4), (3, 5), (2, 3, 4), (2, 2, 2, 2)])
def test_on_a_torus_all_ranks_have_the_sum(dims):
    p = math.prod(dims)
    swings = () if any(side & (side - 1) for side in dims) else (swing, multiport_swing)
    for algorithm in (*BUCKETS, *swings):
        report = check(partial(algorithm, dims=dims), ranks=[p], counts=[0, 1, p, 2 * p + 1])
        assert report, report.said
    assert check(partial(multi_level, groups=dims), ranks=[p], counts=[p + 1])


@pytest.mark.parametrize("dims", [(4, 4), (3, 5), (2, 3, 4)])
def test_messages_of_a_bucket_go_to_neighbours_only(dims):
    network, p = Network.torus(dims), math.prod(dims)
    for algorithm in BUCKETS:
        for rank in range(p):
            sent, rounds_of_rank = 0, list(algorithm(rank, p, 240, dims=dims))
            for steps in rounds_of_rank:
                for send in (step for step in steps if type(step) is Send and is_live(step)):
                    assert len(network.topology.route(rank, send.peer).channels) == 1
                    sent += send.hi - send.lo
            if algorithm is bucket:
                assert len(rounds_of_rank) == 2 * sum(side - 1 for side in dims)
                assert sent == 2 * 240 * (p - 1) // p


def congestion(algorithm, sides, **options):
    """Seconds on a torus of one byte a second and no latency, over the bytes of the vector."""
    p, D = math.prod(sides), len(sides)
    n = 4 * 2 * D * p * 64
    return price(algorithm, p, n // 4, 4, Network.torus(sides, 1.0, 0.0), **options).seconds / n


def test_congestion_is_as_published():
    """The fullest channel of every step, summed: Swing 1.0 to 1.55 in its reduce-scatter, halving 1.5 to 3."""
    for p, factor in ((8, 1.0), (16, 1.1875), (32, 1.375), (64, 1.546875)):
        assert congestion(swing, (p,)) == pytest.approx(2 * factor)
        assert congestion(ALGORITHMS["allreduce"]["ring"], (p,)) == pytest.approx(2 * (p - 1) / p)
    # All 2D directions: 2 (p-1)/p n / 2D for the bucket; Swing is Xi times that, 1.19 in the limit of two dimensions.
    assert congestion(multiport_bucket, (8, 8), dims=(8, 8)) == pytest.approx(2 * 63 / 64 / 4)
    assert 1 < congestion(multiport_swing, (8, 8), dims=(8, 8)) / (2 * 63 / 64 / 4) < 1.19
    assert congestion(multiport_swing, (4, 4, 4), dims=(4, 4, 4)) == pytest.approx(2 * 63 / 64 / 6, rel=1e-3)


def test_known_numbers():
    assert [distance(step) for step in range(6)] == [1, -1, 3, -5, 11, -21]
    assert [position(rank, 8) for rank in range(8)] == [0, 4, 6, 1, 3, 7, 5, 2]
    assert tree(16)[1][0] == [11, 3, 15, 1]
    assert sorted((parent, rank) for rank, parent in enumerate(tree(8)[0]) if parent is not None) == [
        (0, 1), (0, 3), (0, 7), (3, 2), (3, 4), (4, 5), (7, 6)
    ]  # fmt: skip
    assert {p: [len(handed) for _, _, handed in rounds(p)[0]] for p in (6, 7, 8)} == {
        6: [1, 1, 3], 7: [1, 2, 3], 8: [1, 2, 4]
    }  # fmt: skip


def crossing(algorithm, p, group, **options):
    """Bytes that leave a group of `group` ranks that follow each other."""
    sends = ((rank, step) for rank in range(p) for steps in algorithm(rank, p, p, **options) for step in steps)
    return sum(s.hi - s.lo for rank, s in sends if type(s) is Send and rank // group != s.peer // group)


def test_bine_trees_cross_between_groups_less_than_binomial_ones():
    """By up to a third, says the paper: here of a broadcast from every root of 64 ranks in groups of four to 16."""
    for group in (4, 8, 16):
        totals = [
            sum(crossing(ALGORITHMS["broadcast"][name].rounds, 64, group, root=root) for root in range(64))
            for name in ("bine", "binomial")
        ]
        assert 0.6 < totals[0] / totals[1] < 1, (group, totals)


def test_levels_carry_what_they_should():
    """Two racks of two nodes of four: rings inside first, so that between racks a rank sends 2 n / 16 and no more."""
    p, n = 16, 1600
    steps = [
        (rank, step.peer, step.hi - step.lo)
        for rank in range(p)
        for steps in multi_level(rank, p, n, groups=(4, 2, 2))
        for step in steps
        if type(step) is Send
    ]
    between_racks = sum(elements for rank, peer, elements in steps if rank // 8 != peer // 8)
    between_nodes = sum(elements for rank, peer, elements in steps if rank // 4 != peer // 4)
    assert between_racks == p * 2 * n // 2 // 8
    assert between_nodes - between_racks == p * 2 * n // 2 // 4


def test_dimensions_that_do_not_fit_are_refused():
    for algorithm in (*BUCKETS, swing, multiport_swing):
        with pytest.raises(ValueError, match=r"dims=4x4 hold 16 ranks, not 8: give sides"):
            list(algorithm(0, 8, 8, dims=(4, 4)))
    with pytest.raises(ValueError, match=r"swing on 3x4: a side of 3 is no power of two; take bucket"):
        list(swing(0, 12, 12, dims=(3, 4)))


def test_a_network_says_its_dimensions():
    entry, network = ALGORITHMS["allreduce"]["bucket"], Network.torus((4, 4))
    assert price(entry, 16, 1600, 4, network).rounds == 2 * 6
    assert price(entry, 16, 1600, 4, network.place_ranks("random")).rounds == 2 * 15
    assert price(entry, 8, 1600, 4, Network.nodes(2, 4)).rounds == 2 * (1 + 3)
