"""Predictions of sequences that ranks share: closed forms against priced schedules, the planner's answers, refusals."""

import numpy as np
import pytest

import nn
from collectives import price
from collectives.pricing.networks import NETWORKS
from parallel.planning.choice import options_of
from parallel.planning.context_costs import BACKWARD, ring, ulysses
from parallel.planning.group_costs import Group
from parallel.planning.job import Axes, Job
from parallel.planning.profile import LayerProfile, count_layers, read_profile, write_profile
from parallel.strategies.context.ring import ring_backward, ring_forward
from parallel.strategies.estimate import candidates, estimate, ranking

NETWORK = NETWORKS["gigabit"].with_ranks_per_node(1)


def language_model(length=4096, **more):
    return nn.models.build("transformer:64,4,2,attention=blocks:128", (length,), 256, **more)


def job(length=4096, batch=1, flops=2e10):
    return Job(count_layers(language_model(length), 1, flops, 1e-10), 1, batch, moments=2, node_memory=False)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("positions", [64, 1024, 16384])
@pytest.mark.parametrize("schedule", [ring_forward, ring_backward])
def test_a_ring_waits_as_long_as_its_schedule_priced(ranks, positions, schedule):
    """Beside what is computed; where nothing is hidden and where all is, to 15 %, and a latency a step."""
    width, flops = 2 * 64, 2e10
    attention = 4 * positions**2 * 64 / flops
    each = (1.0 if schedule is ring_forward else BACKWARD) * attention / ranks**2
    lengths = [positions // ranks] * ranks
    rounds = lambda rank, size, count: schedule(rank, size, lengths, width, [each] * size)
    priced = price(rounds, ranks, 1, 4, NETWORK).seconds - ranks * each
    found = ring(4 * width * positions, attention, Group(ranks), NETWORK)
    closed = found.forward if schedule is ring_forward else found.backward
    assert priced == pytest.approx(closed, rel=0.15, abs=3 * ranks * NETWORK.between.alpha + 0.1 * ranks * each)


@pytest.mark.parametrize("ranks, on_a_node", [(2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8)])
def test_ulysses_waits_as_long_as_its_alltoalls_priced(ranks, on_a_node):
    from collectives import ALGORITHMS

    network = NETWORK.with_ranks_per_node(on_a_node)
    elements = 64 * 4096 // ranks // ranks * ranks
    each = price(ALGORITHMS["alltoall"]["pairwise"], ranks, elements, 4, network).seconds
    found = ulysses(4 * 2 * elements * ranks, Group(ranks), network)
    assert found.forward == found.backward == pytest.approx(4 * each, rel=0.15)


def test_bytes_are_those_of_the_formulas():
    """Of u bytes of a rank's keys: the ring 6 (p - 1) u, Ulysses 8 u (p - 1) / p."""
    u, p = 1000.0, 4
    assert ring(2 * u * p, 1.0, Group(p), NETWORK).sent == 6 * (p - 1) * u
    assert ulysses(2 * u * p, Group(p), NETWORK).sent == 8 * u * (p - 1) / p


def test_activations_and_seconds_are_cut_and_parameters_are_not():
    one, four = (estimate(job(), "ddp", Axes(context=n), NETWORK) for n in (1, 4))
    parameters = 4 * job().parameters
    assert (four.memory - parameters) == pytest.approx((one.memory - parameters) / 4)
    assert four.parts["computation"] == pytest.approx(one.parts["computation"] / 4)
    assert estimate(job(), "fsdp", Axes(context=4), NETWORK).memory < four.memory


def test_a_short_sequence_is_not_hidden_and_a_long_one_is():
    waits = [estimate(job(n), "ddp", Axes(context=4), NETWORK).parts["activations"] for n in (256, 65536)]
    hop = ring(4 * 2 * 64 * 65536, 0.0, Group(4), NETWORK).forward / 3
    assert waits[0] > 0 and waits[1] == pytest.approx(2 * 2 * hop), "but for two hops backward of each of two layers"


def test_ulysses_is_chosen_where_the_ring_waits_and_heads_can_be_dealt():
    slow = [estimate(job(512), "ddp", Axes(context=n), NETWORK) for n in (4, 8)]
    assert [p.attention for p in slow] == ["ulysses", "ring"], "of four heads eight ranks cannot have one each"
    assert options_of(slow[0]) == {"strategy": "ddp", "mesh": "context=4", "context": "ulysses"}
    assert estimate(job(65536), "ddp", Axes(context=4), NETWORK).attention == "ring"
    assert estimate(job(512), "ddp", Axes(tensor=2, context=4), NETWORK).attention == "ring"


def test_the_planner_shares_a_sequence_that_fits_no_rank():
    found = ranking(job(16384), 4, NETWORK, memory=60e6)
    assert found[0].axes.context == 4 and found[0].memory < 60e6
    alone = next(p for p in found if p.axes == Axes(4))
    assert alone.memory > 60e6
    assert all(axes.context <= 3 for _, axes in candidates(job(3), 4))


def test_what_cannot_be_predicted_is_refused():
    for name in ("dp", "ps", "local-sgd:2", "pipedream"):
        with pytest.raises(ValueError, match="does not cut sequences: leave context=2 out"):
            estimate(job(), name, Axes(context=2), NETWORK)
    with pytest.raises(ValueError, match="sequences have 3 positions: use at most 3"):
        estimate(job(3), "ddp", Axes(context=4), NETWORK)
    plain = Job([LayerProfile("0", 1e-3, 2e-3, 1e3, 1e3)], 1, 4)
    with pytest.raises(ValueError, match="attention"):
        estimate(plain, "ddp", Axes(context=2), NETWORK)


def test_a_profile_keeps_what_is_known_of_attention(tmp_path):
    layers, path = job().layers, tmp_path / "profile.csv"
    path.write_text(write_profile(layers))
    for wanted, found in zip(layers, read_profile(path), strict=True):
        np.testing.assert_allclose(found[1:], wanted[1:], rtol=1e-5)


def test_pipelines_send_parts_of_a_sequence():
    whole, cut = (estimate(job(batch=4), "1f1b", Axes(pipeline=2, context=n), NETWORK) for n in (1, 4))
    assert cut.memory < whole.memory and cut.seconds < whole.seconds
