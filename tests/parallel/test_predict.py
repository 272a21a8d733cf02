"""Predictions: closed forms where there are any, what the strategies' own texts promise, and 65,536 ranks."""

import dataclasses
import os
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

import nn
from collectives.pricing.networks import NETWORKS, Network
from parallel.planning.choice import options_of
from parallel.planning.group_costs import Group
from parallel.planning.job import Axes, Job
from parallel.planning.profile import LayerProfile, count_layers, read_profile, write_profile
from parallel.planning.tables import nbytes
from parallel.strategies import zero
from parallel.strategies.estimate import NAMES, SHARED, candidates, estimate, ranking, serial, strong_and_weak
from parallel.strategies.pipeline.cost import plan_stages

LAYERS = [LayerProfile(str(i), 1e-3, 2e-3, 4e6, 8e6, 1e-3, 4e6, 0.5) for i in range(10)]
JOB = Job(LAYERS, 32, 256, moments=2, sample_bytes=100.0, answer_bytes=40.0, node_memory=False)
FLAT = Network.hockney(1e-5, 1e-9, 0.0)
FREE = Network.hockney(0.0, 0.0)


def test_one_rank_is_the_sum_of_its_layers():
    alone = serial(JOB)
    assert alone.seconds == pytest.approx(8 * 30e-3) and alone.idle_share == 0
    assert alone.memory == pytest.approx(4 * 80e6 + 8 * 40e6)
    for strategy in NAMES:
        assert estimate(JOB, strategy, Axes(), FLAT) == alone


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "dp"])
def test_where_messages_are_free_all_ranks_do_is_compute(strategy):
    found = estimate(JOB, strategy, Axes(8), FREE)
    assert found.seconds == pytest.approx(30e-3) and found.idle_share == pytest.approx(0, abs=1e-12)
    assert strong_and_weak(JOB, found, lambda j: estimate(j, strategy, Axes(8), FREE)) == pytest.approx((1, 1))


def test_data_parallelism_is_one_allreduce_of_all_parameters():
    """Without overlap, in one bucket: the objective of Alpa's tests, here exact."""
    job = dataclasses.replace(JOB, overlap=False, first_bucket=inf)
    found = estimate(job, "ddp", Axes(8), FLAT)
    assert found.seconds == pytest.approx(30e-3 + 2 * 3 * 1e-5 + 2 * 7 / 8 * 80e6 * 1e-9, rel=1e-9)
    assert found.sent == 2 * 7 / 8 * 80e6
    # hidden behind backprop but for what is left of the last bucket: never slower, never faster than the wire
    overlapped = estimate(JOB, "ddp", Axes(8), FLAT)
    assert 140e-3 <= overlapped.seconds < found.seconds
    fast = estimate(JOB, "ddp", Axes(8), Network.hockney(1e-6, 1e-12))
    assert fast.parts["gradients"] < 1e-4 and fast.idle_share < 0.01


def test_tensor_parallelism_sums_every_layer():
    """Of t ranks each layer's output is gathered forward, its gradient scattered backward: one sum of it in all."""
    found = estimate(JOB, "ddp", Axes(tensor=8), FLAT)
    output = 8 * 4e6
    one = 2 * 3 * 1e-5 + 2 * 7 / 8 * output * 1e-9
    assert found.parts["activations"] == pytest.approx(10 * one, rel=1e-9)
    assert found.seconds == pytest.approx(8 * 30e-3 / 8 + 10 * one, rel=1e-9)
    assert found.memory == pytest.approx(4 * 10e6 + 40e6) and found.sent == pytest.approx(10 * 2 * 7 / 8 * output)
    block = [layer._replace(tensor_sums=2.0) for layer in LAYERS]  # a transformer's: two sums forward, two backward
    more = estimate(dataclasses.replace(JOB, layers=block), "ddp", Axes(tensor=8), FLAT)
    assert more.parts["activations"] == pytest.approx(4 * found.parts["activations"], rel=1e-9)


def test_what_zero_keeps_and_sends():
    """16 Psi; 8 Psi + 8 Psi/N; 4 Psi + 12 Psi/N; 16 Psi/N (Psi parameters of four bytes, Adam); 2, 2, 2, 3 Psi sent."""
    psi, n, saved = 80e6 / 4, 16, 256 / 16 / 32 * 40e6
    kept = {"ddp": 16 * psi, "zero1": 8 * psi + 8 * psi / n, "zero2": 4 * psi + 12 * psi / n}
    kept["fsdp"] = 16 * psi / n + 2 * 8e6  # and two units in transit
    for strategy, most in kept.items():
        found = estimate(JOB, strategy, Axes(n), FLAT)
        assert found.memory == pytest.approx(most + saved)
        times = 3 - 2 * 8 / 80 if strategy == "fsdp" else 2  # the last unit, and the one before, are still there
        assert found.sent == pytest.approx(times * 80e6 * (n - 1) / n)


def test_the_loss_is_the_last_stages():
    """Where the last stage waits for the others it costs nothing; where it is the slowest, its seconds."""
    for cuts, seconds in (((7,), 0.0), ((3,), 8 * 1e-3)):
        alone, more = (
            estimate(dataclasses.replace(JOB, head=head), "gpipe", Axes(pipeline=2), FREE, micro_batches=8, cuts=cuts)
            for head in (0.0, 1e-3)
        )
        assert more.seconds - alone.seconds == pytest.approx(seconds or 1e-3, abs=1e-9)
        assert "loss" not in more.parts


def test_stages_are_those_that_are_run():
    """Cut elsewhere than where it is best: the slowest stage has seven of ten layers."""
    best = estimate(JOB, "gpipe", Axes(pipeline=2), FREE, micro_batches=8)
    assert estimate(JOB, "gpipe", Axes(pipeline=2), FREE, micro_batches=8, cuts=best.cuts) == best
    other = estimate(JOB, "gpipe", Axes(pipeline=2), FREE, micro_batches=8, cuts=(7,))
    assert other.cuts == (7,) and other.seconds == pytest.approx((8 * 7 + 3) * 3e-3)


def test_units_are_gathered_ahead_where_they_travel():
    network = Network.hockney(0.0, 0.1e-9)
    found = estimate(JOB, "fsdp", Axes(8), network)
    plain = estimate(dataclasses.replace(JOB, overlap=False), "fsdp", Axes(8), network)
    assert 0 < found.parts["units"] < plain.parts["units"]
    gathers = (10 + 9) * 7 / 8 * 8e6 * 0.1e-9
    assert plain.parts["units"] == pytest.approx(gathers + 10 * 7 / 8 * 8e6 * 0.1e-9, rel=0.35)
    wide = dataclasses.replace(JOB, unit=inf)
    assert len(zero.units(wide, LAYERS)) == 1 and len(zero.units(JOB, LAYERS)) == 10


def test_a_server_is_the_bottleneck():
    one, four = (estimate(JOB, "ps", Axes(12), FLAT, servers=s) for s in (1, 4))
    assert one.parts["push"] == pytest.approx(11 * (1e-5 + 80e6 * 1e-9), rel=1e-3)
    assert four.parts["push"] == pytest.approx(8 * (1e-5 + 20e6 * 1e-9), rel=1e-3)
    with pytest.raises(ValueError, match="ps: 12 servers leave no worker of 12 ranks: use 1 to 11"):
        estimate(JOB, "ps", Axes(12), FLAT, servers=12)


def test_who_trains_apart_meets_every_so_many_steps():
    """In each step: data parallelism's sum, after backprop; in none: computation alone."""
    job = dataclasses.replace(JOB, overlap=False, first_bucket=inf, update=1e-3)
    dense = estimate(job, "ddp", Axes(8), FLAT)
    each, eighth, never = (estimate(job, f"local-sgd:{every}", Axes(8), FLAT) for every in (1, 8, 10**9))
    assert each.seconds == pytest.approx(dense.seconds) and each.sent == dense.sent and each.memory == dense.memory
    assert never.seconds == pytest.approx(30e-3 + 1e-3) and never.idle_share == pytest.approx(0, abs=1e-6)
    assert eighth.seconds - never.seconds == pytest.approx((each.seconds - never.seconds) / 8)
    kept = {name: estimate(job, name, Axes(8), FLAT).memory - each.memory for name in ("local-sgd", "diloco", "easgd")}
    assert kept == {"local-sgd": 0, "diloco": 2 * 80e6, "easgd": 80e6}


def test_a_server_that_all_push_to_sets_the_pace():
    job = dataclasses.replace(JOB, update=1e-3)
    often, seldom = (estimate(job, f"downpour:push={n},fetch={n}", Axes(12), FLAT) for n in (1, 100))
    moved = 11 * 2 * 80e6 * 1e-9  # in and out of one server's port, for a step of all workers
    assert often.seconds == pytest.approx(moved + 11 * 1e-3, rel=1e-3)
    assert seldom.parts["servers"] == 0 and seldom.sent == often.sent / 100
    assert seldom.seconds == pytest.approx(24 / 32 * 30e-3 + 1e-3 + 2 * 80e-3 / 100, rel=1e-3)
    assert estimate(job, "downpour", Axes(12), FLAT, servers=6).seconds < often.seconds
    for call, message in (
        (lambda: estimate(job, "downpour", Axes(4), FLAT, servers=4), "downpour: 4 servers leave no worker of 4 ranks"),
        (lambda: estimate(job, "local-sgd:0", Axes(4), FLAT), "local-sgd: every"),
        (lambda: estimate(job, "easgd", Axes(2, 1, 2), FLAT), "whole layers"),
        (lambda: estimate(JOB, "local-sgd", Axes(2, 2), FLAT), "local-sgd is predicted with whole networks"),
        (lambda: estimate(job, "ddp:3", Axes(4), FLAT), "'ddp:3'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_pipelines_wait_a_share_of_the_time():
    """(p - 1) / (m + p - 1) of it, where stages are equal and messages free."""
    for schedule in ("gpipe", "1f1b"):
        found = estimate(JOB, schedule, Axes(pipeline=5), FREE, micro_batches=16)
        assert found.idle_share == pytest.approx(4 / 20) and found.seconds == pytest.approx(0.24 / 5 * 20 / 16)
    hybrid = estimate(JOB, "1f1b", Axes(data=2, pipeline=5), FREE, micro_batches=16)
    assert hybrid.seconds == pytest.approx(found.seconds / 2) and hybrid.idle_share == pytest.approx(0.2)
    whole = estimate(JOB, "gpipe", Axes(pipeline=5), FREE, micro_batches=16).memory
    assert hybrid.memory < whole
    less = estimate(JOB, "gpipe", Axes(pipeline=5), FREE, micro_batches=16, recompute=True)
    assert less.seconds == pytest.approx(found.seconds * 4 / 3) and less.memory < whole
    assert estimate(JOB, "zb-h1", Axes(pipeline=5), FREE, micro_batches=16).seconds < found.seconds


def test_who_has_fewer_parameters_waits_for_the_largest_update():
    """All parameters in the last of four stages: only its ranks update, and the others are idle meanwhile."""
    layers = [LayerProfile("", 1.0, 2.0, 0.0, 1e6 * (i == 3), 1.0) for i in range(4)]
    found = estimate(Job(layers, 8, 8, update=12.0), "gpipe", Axes(1, 4), FREE, micro_batches=1)
    assert found.seconds == pytest.approx(12 + 12) and found.computing == pytest.approx(12 + 12)
    cut = estimate(Job(layers, 8, 8, update=12.0), "gpipe", Axes(1, 4, 2), FREE, micro_batches=1)
    assert cut.seconds == pytest.approx(6 + 6) and cut.computing == pytest.approx(12 + 12)


def test_stages_are_cut_where_it_is_said():
    """The slowest stage sets the pace: of 10 equal layers 7, and of every micro-batch."""
    even, uneven = (estimate(JOB, "gpipe", Axes(pipeline=2), FREE, micro_batches=16, cuts=cuts) for cuts in ([5], [7]))
    assert even.seconds == pytest.approx(estimate(JOB, "gpipe", Axes(pipeline=2), FREE, micro_batches=16).seconds)
    assert uneven.cuts == (7,) and uneven.seconds == pytest.approx(8 * (30e-3 * 0.7 + 30e-3 * 0.3 / 16))
    stream = estimate(JOB, "pipedream", Axes(2), FREE, cuts=[7])
    assert stream.replicas == (1, 1) and stream.cuts == (7,)
    assert stream.seconds == pytest.approx(2 * 4 * 30e-3 * 0.7), "two mini-batches a step, at the slowest stage's pace"
    for cuts in ([5, 7], [3, 3], [0], [10]):
        with pytest.raises(ValueError, match="cuts: expected 1 that rise, of 1 to 9, given"):
            estimate(JOB, "1f1b", Axes(pipeline=2), FREE, cuts=cuts)


def test_a_pipeline_without_flush_is_the_programme():
    path = Path(os.environ.get("RINGPROP_DATA", "")) / "profiles" / "vgg16.csv"
    if not path.is_file():
        pytest.skip("needs profiles/vgg16.csv in the directory that RINGPROP_DATA names")
    job = Job(read_profile(path), 128, 8 * 128)
    network = Network.hockney(0.0, 1 / 1.25e9)
    found = estimate(job, "pipedream", Axes(8), network)
    assert found.note == "stages on 7-1; weights are stale"
    dense = estimate(dataclasses.replace(job, overlap=False), "ddp", Axes(8), network)
    assert dense.sent > 5 * found.sent or dense.seconds > found.seconds


def test_many_workers_without_flush_are_planned_in_groups():
    """Every rank has its stage, and no step is shorter than one mini-batch of the slowest."""
    for ranks in (128, 65_536):
        found = estimate(JOB, "pipedream", Axes(ranks), NETWORKS["gpu-100g"])
        assert sum(found.replicas) == ranks
        at = [0, *found.cuts, len(LAYERS)]
        layers = JOB.of(JOB.share(ranks))
        assert found.seconds >= max(sum(x.forward + x.backward for x in layers[a:b]) for a, b in pairwise(at))
    slow = Network.hockney(0.0, 1e-5)
    assert plan_stages(JOB, 128, slow).seconds <= plan_stages(JOB, 64, slow).seconds


def test_a_stream_by_the_clock():
    """Where messages are free and sums hide nothing: the programme's formula; then what the ring of a stage adds."""
    layers = [LayerProfile("", 1.0, 2.0, 0.0, 1e3, 1.0) for _ in range(3)]
    layers.append(LayerProfile("", 1.0, 2.0, 0.0, 1e6, 1.0))
    job, slow = Job(layers, 8, 32), Network.hockney(0.0, 1e-5)
    formula, clock = (estimate(job, "pipedream", Axes(4), slow, quick=quick) for quick in (True, False))
    assert formula.replicas == clock.replicas == (3, 1) and clock.cuts == (3,) and clock.micro_batches == 4
    ring = 4 * 2 * 2 / 3 * 3e3 * 1e-5 / 3  # of a step's four mini-batches; every third has one
    assert formula.seconds == pytest.approx(12.0), "as if sums were made while layers compute"
    assert 12.0 + ring < clock.seconds < 12.0 + 1.5 * ring, "replicas leave the ring one after the other"


@pytest.mark.parametrize(("update", "head"), [(4.0, 0.0), (0.0, 2.0), (4.0, 2.0)])
def test_a_stream_has_updates_and_the_loss(update, head):
    """Every mini-batch ends in an update, and begins backward with the loss: by the formula as by the clock."""
    layers = [LayerProfile("", 1.0, 2.0, 0.0, 1e3, 1.0) for _ in range(4)]
    job = Job(layers, 8, 32, update=update, head=head)
    line = [estimate(job, "pipedream", Axes(4), FREE, quick=quick, cuts=[1, 2, 3]) for quick in (True, False)]
    assert [p.seconds for p in line] == pytest.approx(2 * [4 * (3 + update / 4 + head)])
    assert [p.computing for p in line] == pytest.approx(2 * [4 * (12 + update + head)])
    one = estimate(job, "pipedream", Axes(4), FREE)
    assert one.replicas == (4,) and one.seconds == pytest.approx(12 + update + head) and one.idle_share < 1e-9


@pytest.mark.parametrize("network", ["gigabit", "gpu-100g"])
def test_every_strategy_at_every_scale(network):
    for ranks in (1, 6, 64, 65_536):
        found = ranking(JOB, ranks, NETWORKS[network])
        assert [p.seconds for p in found] == sorted(p.seconds for p in found)
        assert all(p.ranks == ranks and 0 <= p.idle_share <= 1 and p.memory > 0 < p.seconds for p in found)
        assert {p.strategy for p in found} >= ({"dp", "ps"} if ranks > 1 else {"serial"})


def test_memory_decides():
    free, tight = (ranking(JOB, 16, FLAT, memory) for memory in (inf, 60e6))
    assert tight[0].memory <= 60e6 < free[0].memory
    fitting = [p.memory <= 60e6 for p in tight]
    assert fitting == sorted(fitting, reverse=True), "what does not fit comes last"
    assert all(p.strategy != "pipedream" for p in ranking(JOB, 16, FLAT, stale=False))


def test_every_mesh_multiplies_to_the_ranks():
    for ranks in (2, 12, 64):
        found = list(candidates(JOB, ranks))
        assert len(found) == len(set(found)) and all(axes.ranks == ranks for _, axes in found)
        assert {axes for name, axes in found if name in SHARED} >= {Axes(ranks), Axes(tensor=ranks)}
    assert Axes.parse("data=2,tensor=4") == Axes(2, 1, 4) and str(Axes(2, 1, 4)) == "data=2,tensor=4"


def test_profiles_from_counts(tmp_path):
    network = nn.models.build("mlp:784,30,10", (28, 28, 1), 10)
    layers = count_layers(network, 32, flops=1e9, copy=0.0)
    assert sum(layer.forward for layer in layers) == pytest.approx(2 * 32 * (784 * 30 + 300) / 1e9)
    assert sum(layer.backward for layer in layers) == pytest.approx(2 * 32 * (784 * 30 + 600) / 1e9)
    assert sum(layer.parameters for layer in layers) == 4 * network.layout.count
    path = tmp_path / "profile.csv"
    path.write_text(write_profile(layers))
    for ours, read in zip(layers, read_profile(path), strict=True):
        assert read[1:] == pytest.approx(ours[1:], rel=1e-5)
    text = nn.models.build("transformer:64,4,3,1", (64,), 256)
    assert [layer.tensor_sums for layer in count_layers(text, 1, 1e9, 0.0)] == [0, 0, 2, 2, 2, 0, 0.5]


def test_layers_on_several_ranks_sum_what_tensor_parallelism_sums():
    """In pairs: the output of the second forward, the input of the next first backward, but for data (rewriting.py)."""
    line = nn.models.build("mlp:784,30,20,40,10", (28, 28, 1), 10)
    linear = [layer for layer in count_layers(line, 32, 1e9, 0.0) if "Linear" in layer.name]
    assert [layer.tensor_sums for layer in linear] == [0, 0.5, 0.5, 0.5]
    assert [layer.summed for layer in linear[1:]] == [32 * 4 * n for n in (20, 20, 10)]
    images = count_layers(nn.models.build("lenet5", (28, 28, 1), 10), 32, 1e9, 0.0)
    told = [
        (layer.tensor_sums, layer.summed / 32 / 4)
        for layer in images
        if "Conv2d" in layer.name or "Linear" in layer.name
    ]
    assert told == [(0, 784), (0.5, 12 * 12 * 20), (0.5, 500), (0.5, 500)], "what is gathered is what pooling left"


def test_what_cannot_be_is_refused():
    for call, message in (
        (lambda: estimate(JOB, "ddpp", Axes(2), FLAT), "unknown strategy 'ddpp': expected one of ddp, zero1"),
        (
            lambda: estimate(JOB, "ddp", Axes(1, 2), FLAT),
            "ddp has no stages: leave pipeline=2 out, or use naive, gpipe",
        ),
        (lambda: estimate(JOB, "ps", Axes(2, 1, 2), FLAT), "ps does not cut layers: leave tensor=2 out"),
        (lambda: estimate(JOB, "gpipe", Axes(1, 11), FLAT), "10 layers cannot be cut into 11 stages"),
        (lambda: Axes.parse("data=2,stage=4"), "given 'stage=4'"),
        (lambda: Axes.parse("data=0"), "numbers above 0, given 'data=0'"),
        (lambda: Job(LAYERS, 32, 0), "batch: expected at least 1, given 0"),
        (lambda: Job([], 32, 1), "no layers"),
        (lambda: count_layers(None, 1, 0.0, 0.0), "flops: expected operations a second above 0, given 0"),
        (lambda: estimate(JOB, "pipedream", Axes(127), FLAT), "127 workers do not fall into groups of 2 to 16"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_mixed_precision_sends_half_the_bytes_where_nothing_is_summed():
    """Between stages, and where layers are gathered; sums are of float32."""
    found = {}
    for mixed in False, True:
        network = nn.models.build("mlp:784,512,512,10", (28, 28, 1), 10)
        network.mixed = mixed
        layers = count_layers(network, 64, 1e10, 1e-10)
        job = Job(layers, 64, 64)
        found[mixed] = {
            "pipeline": estimate(job, "gpipe", Axes(1, 2, 1), NETWORKS["gigabit"], micro_batches=4),
            "tensor": estimate(job, "ddp", Axes(1, 1, 2), NETWORKS["gigabit"]),
            "text": count_layers(halved_text(mixed), 1, 1e9, 0.0),
        }
    full, half = found[False], found[True]
    assert half["pipeline"].sent == full["pipeline"].sent / 2 > 0
    assert half["pipeline"].seconds < full["pipeline"].seconds and half["pipeline"].memory < full["pipeline"].memory
    assert half["tensor"].sent == full["tensor"].sent > 0, "of linear layers in pairs all is summed"
    for one, other in zip(full["text"], half["text"], strict=True):
        assert other.output == one.output / 2 and other.saved == one.saved / 2 and other.parameters == one.parameters
        assert other.summed == one.summed and other.tensor_sums == one.tensor_sums
    images = nn.models.build("lenet5", (28, 28, 1), 10)
    images.mixed = True
    gathered = [layer.tensor_sums for layer in count_layers(images, 1, 1e9, 0.0) if "Conv2d" in layer.name]
    assert gathered == [0, 0.375], (
        "the first takes images that all have; the second's are gathered forward, summed back"
    )


def halved_text(mixed):
    network = nn.models.build("transformer:32,2,2", (16,), 10)
    network.mixed = mixed
    return network


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (999.4e6, "999 MB"), (999.6e6, "1 GB")])
def test_bytes_are_said_in_three_digits(value, text):
    assert nbytes(value) == text


def test_bars_tell_their_parts_apart():
    """Each part is in the legend once, with a look of its own, beside the bars; the unit is the longest one's."""
    from parallel.planning.pictures import draw_bars

    job = dataclasses.replace(JOB, update=1e-3, head=1e-3, node_memory=True)
    network = NETWORKS["gigabit"]
    found = [estimate(job, name, Axes(8), network) for name in ("zero1", "fsdp", "dp", "ps")]
    found = sorted(
        [*found, estimate(job, "ddp", Axes(1, 1, 8), network), estimate(job, "1f1b", Axes(1, 8), network)],
        key=lambda p: p.seconds,
    )
    (axes,) = draw_bars(found, "bars").axes
    legend = axes.get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    assert (
        sorted(names) == sorted({part for p in found for part, value in p.parts.items() if value}) and len(names) > 10
    )
    looks = [(handle.get_facecolor(), handle.get_hatch()) for handle in legend.legend_handles]
    assert len(set(looks)) == len(looks)
    axes.figure.canvas.draw()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    assert axes.get_xlabel() == "s of a step" and found[0].seconds < 1 < found[-1].seconds


def test_experts_dealt_out_save_memory_and_send_positions():
    """Bytes as the layer counts them: four trips of n k D (p - 1) / p numbers a layer, and dense gradients summed."""
    network = nn.models.build("transformer:16,2,1,experts=8,top=2,shared=1", (32,), 9)
    layers = count_layers(network, 4, 1e9, 1e-9)
    job, p = Job(layers, 4, 32, node_memory=False, overlap=False), 8
    (block,) = (layer for layer in layers if layer.experts)
    A = 16 * 64
    assert block.experts == 8 * 2 * A * 4 and block.routed == 4 * 32 * 2 * 16 * 4
    found, whole = estimate(job, "ddp", Axes(expert=p), FLAT), estimate(job, "ddp", Axes(p), FLAT)
    dense = job.parameters - block.experts
    assert found.sent == pytest.approx((4 * block.routed + 2 * dense) * (p - 1) / p)
    assert whole.memory - found.memory == pytest.approx(2 * block.experts * (p - 1) / p)
    assert found.parts["experts"] == pytest.approx(4 * Group(p).alltoall(block.routed, FLAT))
    both = estimate(job, "ddp", Axes(2, 1, 2, expert=2), FLAT)
    assert both.ranks == 8 and both.parts["activations"] > 0 < both.parts["experts"]
    assert Axes.parse("expert=4,data=2") == Axes(2, expert=4) and str(both.axes) == "data=2,tensor=2,expert=2"
    shards = [estimate(job, name, Axes(2, expert=4), FLAT) for name in ("ddp", "zero1", "zero2")]
    assert [p.memory for p in shards] == sorted((p.memory for p in shards), reverse=True)
    assert all(p.parts["experts"] == shards[0].parts["experts"] > 0 for p in shards)
    beside = estimate(job, "ddp", Axes(1, 1, 1, 2, 4), FLAT)
    assert beside.attention and beside.parts["experts"] == pytest.approx(shards[0].parts["experts"]), (
        "a rank has twice the samples, and of each half of the positions"
    )
    with pytest.raises(ValueError, match="leave expert=2 out, or use ddp"):
        estimate(job, "ps", Axes(2, expert=2), FLAT)
    with pytest.raises(ValueError, match="an axis expert=2 needs a network with experts"):
        estimate(JOB, "ddp", Axes(2, expert=2), FLAT)


def test_the_planner_deals_out_experts_that_fit_no_rank():
    """Only as many ranks are tried as divide them; without experts there is no such mesh."""
    network = nn.models.build("transformer:16,2,1,experts=12,top=2", (8,), 9)
    job = Job(count_layers(network, 4, 1e9, 1e-9), 4, 32, node_memory=False)
    sizes = {axes.expert for _, axes in candidates(job, 8)}
    assert sizes == {1, 2, 4} and {axes.expert for _, axes in candidates(JOB, 8)} == {1}
    assert all(12 % (axes.expert * axes.tensor) == 0 for _, axes in candidates(job, 8) if axes.expert > 1)
    fastest, *_ = ranking(job, 8, NETWORKS["infiniband"], memory=0.4 * 2 * job.parameters)
    assert fastest.axes.expert > 1 and f"expert={fastest.axes.expert}" in options_of(fastest)["mesh"]
