"""Closed forms of collectives of groups: what the clock finds, algorithm by algorithm, for up to 64 ranks."""

from dataclasses import replace

import pytest

from collectives import ALGORITHMS
from collectives.pricing.lower_bounds import lower_bound
from collectives.pricing.networks import NETWORKS, Network, Point
from collectives.pricing.price import price
from parallel.planning.group_costs import Group

NETS = NETWORKS | {"hockney": Network.hockney(1e-5, 1e-9, 1e-10)}
SIZES = (1 << 12, 100 << 20)
# Closed form over the clock, where nodes share ports: rounds inside a node hide behind those between.
BOUNDS = {"allreduce": (0.95, 1.42), "doubling": (0.99, 1.16), "ring": (0.74, 1.02)}


def clock(operation, name, ranks, nbytes, network):
    return price(ALGORITHMS[operation][name], ranks, nbytes // 4, 4, network).seconds


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ranks", [2, 64])
def test_allreduce_is_what_the_clock_finds(name, ranks):
    network, group = NETS[name], Group(ranks)
    for nbytes in SIZES:
        found = {a: clock("allreduce", a, ranks, nbytes, network) for a in ("ring", "rabenseifner", "doubling")}
        ways, adding = dict(group.ways(nbytes, network)), group.adding(nbytes, network)
        ring, doubling = 2 * ways["ring"] + adding, group.doubling(nbytes, network)
        whole = group.allreduce(nbytes, network)
        if group.nodes(network) == 1 or name == "hockney":  # one level: equal
            assert ring == pytest.approx(found["ring"], rel=1e-5)
            assert doubling == pytest.approx(found["doubling"], rel=1e-9)
            assert whole == pytest.approx(min(found.values()), rel=0.01)
        else:
            found["two_level"] = clock("allreduce", "two_level", ranks, nbytes, network)
            for what, ours, theirs in (
                ("ring", ring, found["ring"]),
                ("doubling", doubling, found["doubling"]),
                ("allreduce", whole, min(found.values())),
            ):
                assert BOUNDS[what][0] <= ours / theirs <= BOUNDS[what][1], (what, nbytes, ours / theirs)
        assert whole >= 0.99 * lower_bound("allreduce", ranks, nbytes, network)


def test_a_port_that_rested_lets_no_stream_through_sooner():
    """One message after a rest is there sooner than those of a stream, as in a network that was measured."""
    points = [Point(4, 20e-6, 1e-5, 1e-5, 1e-5, 4e-5, 4e-5), Point(1 << 16, 4.2e-3, 8e-5, 9e-4, 5.5e-3, 4.4e-3, 4.4e-3)]
    network = Network.hockney(1e-5, 1e-9, 0.0)
    network = replace(network, between=replace(network.between, points=tuple(points)))
    assert network.between.credit > 0
    for ranks in (2, 4, 7):
        ours = 2 * dict(Group(ranks).ways(ranks << 16, network))["ring"]
        assert ours == pytest.approx(
            clock("allreduce", "ring", ranks, ranks << 16, network), rel=0.15 if ranks == 2 else 0.05
        )


@pytest.mark.parametrize("operation, name", [("reduce_scatter", "ring"), ("allgather", "ring")])
def test_halves_of_an_allreduce(operation, name):
    network = NETS["hockney"]
    for ranks in (2, 5, 16):
        nbytes = ranks << 14
        ours = dict(Group(ranks).ways(nbytes, network))["ring"]
        ours += Group(ranks).adding(nbytes, network) * (operation == "reduce_scatter")
        assert ours == pytest.approx(clock(operation, name, ranks, nbytes, network), rel=1e-9)


def test_trees_and_ports():
    network = NETS["hockney"]
    for ranks in (2, 3, 8, 16):
        group, few, many = Group(ranks), 64, 1 << 24
        assert group.broadcast(few, network) == pytest.approx(clock("broadcast", "binomial", ranks, few, network))
        assert group.scatter(many, network) == pytest.approx(clock("scatter", "flat", ranks, many, network), rel=1e-3)
        assert group.gather(many, network) == pytest.approx(clock("gather", "flat", ranks, many, network), rel=1e-3)
        reduced = clock("reduce", "binomial", ranks, few, network)
        assert group.reduce(few, network) == pytest.approx(reduced, rel=1e-3)


def test_groups_that_share_ports_wait_for_each_other():
    """8 ranks a node: a group of every 8th rank has a port to share with 7 others; one of neighbours has none."""
    network, nbytes = NETS["gpu-100g"], 1 << 26
    alone, crowded = Group(8, 8), Group(8, 1)
    assert alone.nodes(network) == 8 and alone.sharing(network) == 8 and crowded.nodes(network) == 1
    one = price(ALGORITHMS["allreduce"]["ring"], 8, nbytes // 4, 4, network.with_ranks_per_node(1)).seconds
    assert alone.allreduce(nbytes, network) == pytest.approx(8 * one, rel=0.05)
    assert crowded.allreduce(nbytes, network) < one / 5
    whole = Group(64).allreduce(nbytes, network)  # all 64: the nodes' cables carry each byte once
    assert whole == pytest.approx(one + crowded.allreduce(nbytes, network), rel=0.1)


def test_memory_of_a_node():
    network = NETS["workstation"]
    group = Group(8, 1, memory=True)
    assert dict(group.ways(1 << 20, network)).keys() == {"memory"}
    entry = ALGORITHMS["allreduce"]["shared_arrays"]
    found = price(entry, 8, 1 << 22, 4, network).seconds
    assert group.allreduce(1 << 24, network) == pytest.approx(found, rel=0.08), "which fetches its own part, too"
    assert "memory" not in dict(Group(8, 4, memory=True).ways(1 << 20, NETS["gigabit"]))


def test_one_rank_sends_nothing():
    for what in ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "scatter", "gather"):
        assert getattr(Group(1), what)(1 << 20, NETS["gigabit"]) == 0
        assert getattr(Group(64), what)(0, NETS["gigabit"]) == 0
    assert Group(4).sent(100) == 75


def test_65536_ranks_cost_as_little_as_8():
    network = NETS["gpu-100g"]
    seconds = [Group(p).allreduce(100e6, network) for p in (8, 64, 1024, 65_536)]
    assert seconds == sorted(seconds) and seconds[-1] < 2 * seconds[1]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_alltoall_is_what_the_clock_finds(name, ranks):
    network, group = NETS[name], Group(ranks)
    for nbytes in SIZES:
        ratio = group.alltoall(nbytes, network) / clock("alltoall", "pairwise", ranks, nbytes, network)
        if group.nodes(network) == 1 or name == "hockney":
            assert ratio == pytest.approx(1, rel=1e-5)
        else:
            assert 0.95 <= ratio <= 1.5, (nbytes, ratio)  # rounds inside a node hide behind those between
