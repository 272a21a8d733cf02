"""Training on topologies: groups, stages and replicas share the channels of a trunk between two racks."""

import dataclasses
from math import inf

import pytest

from collectives.pricing.networks import Network
from parallel.planning.group_costs import Group
from parallel.planning.job import Axes, Job
from parallel.planning.profile import LayerProfile
from parallel.strategies.estimate import estimate, ranking

FAST, TRUNK = 1e9, 0.25e9  # bytes a second


def racks(hosts: int = 4, trunk: float = TRUNK) -> Network:
    """Two switches with half of the hosts each, and a trunk between them."""
    edges = [(i, f"switch{2 * i // hosts}", FAST, 1e-6) for i in range(hosts)]
    return Network.from_edges([*edges, ("switch0", "switch1", trunk, 1e-6)], list(range(hosts)))


def job(batch=64, parameters=8e6, output=1e6, **options):
    layers = [LayerProfile(str(i), 1e-3, 2e-3, output, parameters, 1e-3, output, 0.5) for i in range(8)]
    given = {"overlap": False, "first_bucket": inf, "node_memory": False} | options
    return Job(layers, 16, batch, **given)


def test_groups_that_cross_a_trunk_at_once_share_it():
    """On a mesh data=2, pipeline=2 both groups of replicas cross; one group alone has the trunk to itself."""
    nbytes = 64e6
    both = Group(2, 2).allgather(nbytes, racks().of_ranks(4))
    alone = Group(2, 1).allgather(nbytes, racks().place_ranks([0, 2]).of_ranks(2))
    inside = Group(2, 1).allgather(nbytes, racks().of_ranks(4))
    assert alone == pytest.approx(nbytes / 2 / TRUNK + 3e-6, rel=1e-3)
    assert both == pytest.approx(2 * nbytes / 2 / TRUNK, rel=1e-3)
    assert inside == pytest.approx(nbytes / 2 / FAST, rel=1e-3)


def test_a_ring_over_both_racks_crosses_the_trunk_once_each_way():
    nbytes = 64e6
    found = Group(4).allgather(nbytes, racks().of_ranks(4))
    assert found == pytest.approx(3 * nbytes / 4 / TRUNK, rel=1e-2)
    assert Group(4).allgather(nbytes, racks(trunk=2 * FAST).of_ranks(4)) < 0.3 * found


def test_alltoalls_of_experts_share_a_trunk():
    """Of four ranks two on each side send half of what they have over it; inside a rack they do not need it."""
    nbytes, wide = 64e6, racks(trunk=16 * FAST)
    across = Group(4).alltoall(nbytes, racks().of_ranks(4))
    assert across == pytest.approx(nbytes / 4 / FAST + 2 * 2 * nbytes / 4 / TRUNK, rel=0.1)
    assert Group(4).alltoall(nbytes, wide.of_ranks(4)) == pytest.approx(3 * nbytes / 4 / FAST, rel=0.1)
    mixture = job()
    layers = [layer._replace(routed=1e6, experts=4e6, expert_count=4) for layer in mixture.layers]
    found = ranking(dataclasses.replace(mixture, layers=layers), 4, racks())
    assert any(p.axes.expert > 1 and p.parts["experts"] > 0 for p in found)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_and_replicas_are_where_they_are_placed(schedule):
    """In order, pipelines stay in their racks and replicas sum over the trunk; dealt out, it is the other way round."""
    axes, network = Axes(data=2, pipeline=2), racks()
    in_order = estimate(job(), schedule, axes, network)
    dealt = estimate(job(), schedule, axes, network.place_ranks([0, 2, 1, 3]))
    wide = estimate(job(), schedule, axes, racks(trunk=2 * FAST))
    assert in_order.parts["pipeline"] == pytest.approx(wide.parts["pipeline"], rel=1e-9)
    assert in_order.parts["gradients"] == pytest.approx(8 * wide.parts["gradients"], rel=0.01)
    assert dealt.parts["pipeline"] > 1.02 * in_order.parts["pipeline"]
    assert dealt.parts["gradients"] == pytest.approx(wide.parts["gradients"], rel=0.01)


def test_pipelines_that_share_a_trunk_are_slower_than_one_alone():
    """Messages of 16 MB: two pipelines over the trunk take twice its time, whatever they compute."""
    big, network = job(output=64e6), racks()
    two = estimate(big, "gpipe", Axes(data=2, pipeline=2), network.place_ranks([0, 2, 1, 3]), micro_batches=4)
    half = dataclasses.replace(big, batch=32)
    one = estimate(half, "gpipe", Axes(pipeline=2), network.place_ranks([0, 2]), micro_batches=4)
    assert two.parts["pipeline"] == pytest.approx(2 * one.parts["pipeline"], rel=0.1)


def test_messages_of_stages_that_are_cut_are_cut_too():
    """Two ranks of a stage send half a message each: over a trunk that takes as long as one whole message."""
    big, network = job(output=256e6), racks().place_ranks([0, 1, 2, 3])
    cut = estimate(big, "gpipe", Axes(pipeline=2, tensor=2), network, micro_batches=4)
    whole = estimate(big, "gpipe", Axes(pipeline=2), racks().place_ranks([0, 2]), micro_batches=4)
    assert 0.8 < cut.parts["pipeline"] / whole.parts["pipeline"] < 1.5


def test_pipedream_has_its_stages_on_hosts():
    """Four stages in a chain cross the trunk once; dealt out, with every message, both ways."""
    big = job(output=64e6)
    cuts = (2, 4, 6)
    in_order = estimate(big, "pipedream", Axes(4), racks(), cuts=cuts)
    dealt = estimate(big, "pipedream", Axes(4), racks().place_ranks([0, 2, 1, 3]), cuts=cuts)
    wide = estimate(big, "pipedream", Axes(4), racks(trunk=4 * FAST), cuts=cuts)
    assert wide.seconds < in_order.seconds < dealt.seconds
    assert dealt.seconds == pytest.approx(4 * 3 * 64e6 * 1 / TRUNK, rel=0.35)  # three messages each way share it


def test_every_strategy_has_a_price_on_a_topology():
    network = Network.fat_tree(4, oversubscription=4)
    found = ranking(job(), 8, network)
    assert len(found) > 15 and all(0 < p.seconds < 10 for p in found)
    with pytest.raises(ValueError, match="32 ranks"):
        estimate(job(), "ddp", Axes(32), network)


def test_what_workers_push_to_a_server_shares_the_trunk():
    """Three workers and a server: one worker is in the server's rack, two push over the trunk at once."""
    narrow, wide = racks(trunk=TRUNK), racks(trunk=4 * FAST)
    for part, nbytes in (("push", 8 * 8e6), ("pull", 8 * 8e6)):
        over = estimate(job(), "ps", Axes(data=4), narrow).parts[part]
        beside = estimate(job(), "ps", Axes(data=4), wide).parts[part]
        assert over == pytest.approx(2 * nbytes / TRUNK, rel=1e-2), part
        assert beside == pytest.approx(3 * nbytes / FAST, rel=1e-2), part


def test_what_workers_of_downpour_send_shares_the_trunk():
    """Pushes and reads of every step: where the trunk is busy longer than a step takes, it sets the pace."""
    network = racks(trunk=TRUNK)
    found = estimate(job(), "downpour:push=1,fetch=1", Axes(data=4), network)
    beside = estimate(job(), "downpour:push=1,fetch=1", Axes(data=4), racks(trunk=4 * FAST))
    update = 3 * job().update
    assert sum(found.parts.values()) == pytest.approx(2 * 2 * 64e6 / TRUNK + update, rel=1e-2)
    assert sum(beside.parts.values()) == pytest.approx(2 * 3 * 64e6 / FAST + update, rel=1e-2)
