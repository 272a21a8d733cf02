"""The simulation agrees with what can be counted by hand, also where nodes share a port."""

import dataclasses
import io
import json
import sys
import time

import numpy as np
import pytest

from collectives import ALGORITHMS
from collectives.algorithms.registry import SHARED_MEMORY
from collectives.pricing import price as pricing
from collectives.pricing import progress_bar, topology
from collectives.pricing.critical_path import waits
from collectives.pricing.lower_bounds import lower_bound
from collectives.pricing.networks import NETWORKS, ROUNDS, Link, Network, Point, find_network, fit
from collectives.pricing.price import price
from collectives.pricing.symmetry import smallest_block
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Send, chunk

ALPHA, BETA, GAMMA = 3e-6, 1e-9, 2e-10
HOCKNEY = Network.hockney(ALPHA, BETA, GAMMA)


def ring(rank, size, count):
    """The allreduce of the literature, written here so that the registry cannot change what is tested."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        give, take = chunk(count, size, (rank - k) % size), chunk(count, size, (rank - k - 1) % size)
        yield Send(right, "x", *give), RecvReduce(left, "x", *take)
    for k in range(size - 1):
        give, take = chunk(count, size, (rank + 1 - k) % size), chunk(count, size, (rank - k) % size)
        yield Send(right, "x", *give), Recv(left, "x", *take)


def exchange(rank, size, count):
    """Ranks of the first half send to those of the second, all at once."""
    half = size // 2
    if rank < half:
        yield (Send(rank + half, "x", 0, count),)
    else:
        yield (Recv(rank - half, "x", 0, count),)


def test_powers_of_two_of_recursive_doubling():
    entry = ALGORITHMS["allreduce"]["doubling"]
    for rounds in range(8):
        expected = rounds * (ALPHA + 1000 * BETA + 1000 * GAMMA)
        assert price(entry, 2**rounds, 250, 4, HOCKNEY).seconds == pytest.approx(expected, rel=1e-12)


def test_one_message_costs_alpha_and_beta_however_alpha_is_split():
    for overhead, gap in ((0, 0), (1e-6, 0), (0, 2e-6), (1.5e-6, 0), (0.5e-6, 2e-6)):
        link = Link(ALPHA, BETA, overhead, gap)
        network = Network(link, link)
        assert price(exchange, 2, 500, 4, network).seconds == pytest.approx(ALPHA + 2000 * BETA, rel=1e-12)


def test_overhead_and_gap_limit_how_soon_messages_follow():
    def burst(rank, size, count):
        if rank == 0:
            yield tuple(Send(peer, "x", 0, count) for peer in range(1, size))
        else:
            yield (Recv(0, "x", 0, count),)

    for link, spacing in (
        (Link(10e-6, 0, overhead=2e-6), 2e-6),
        (Link(10e-6, 0, gap=3e-6), 3e-6),
        (Link(9e-6, 1e-9), 4e-6),
    ):
        finish = price(burst, 5, 1000, 4, Network(link, link)).finish
        assert np.diff(finish[1:]) == pytest.approx([spacing] * 3)
        assert finish[1] == pytest.approx(link.alpha + 4000 * link.beta)


def test_ranks_of_a_node_share_its_port_and_others_do_not():
    inside, between = Link(1e-6, 1e-10), Link(5e-6, 1e-9)
    for node in (1, 2, 4):
        network = Network(inside, between, ranks_per_node=node)
        got = price(exchange, 8, 1000, 1, network)
        # `node` messages of 1000 bytes leave one port one after another; alpha of the last overlaps the first.
        assert got.seconds == pytest.approx(5e-6 + node * 1000 * 1e-9, rel=1e-12)
        assert got.bytes_between == got.bytes == 4000
    alone = price(exchange, 8, 1000, 1, Network(inside, between, ranks_per_node=8))
    assert alone.seconds == pytest.approx(1e-6 + 1000 * 1e-10, rel=1e-12)
    assert alone.bytes_between == 0


def test_a_port_serves_whoever_comes_first():
    """Rank 1 is late (it reduces first), so rank 2's message passes it at the port of rank 0, though listed later."""

    def incast(rank, size, count):
        if rank == 0:
            yield Recv(1, "x", 0, count), Recv(2, "y", 0, count)
        else:
            if rank == 1:
                yield (Reduce("x", 0, count, "y", 0),)
            yield (Send(0, "x", 0, count),)

    network = Network(Link(0, 1e-9), Link(0, 1e-9), gamma=0.5e-9)
    # rank 2 holds the port 0 ... 1000 ns, rank 1 could start at 500 and gets it at 1000 ... 2000
    assert price(incast, 3, 1000, 1, network).seconds == pytest.approx(2000e-9)
    slow = Network(Link(0, 1e-9), Link(0, 1e-9), gamma=3e-9)
    assert price(incast, 3, 1000, 1, slow).seconds == pytest.approx(4000e-9)


def test_local_steps_cost_copy_and_gamma():
    def local(rank, size, count):
        yield (Copy("y", 0, count, "x", 0),)
        yield Reduce("y", 0, count, "x", 0), Copy("z", 0, 10, "x", 0)

    network = Network(Link(1, 1), Link(1, 1), gamma=2e-9, copy=3e-9)
    assert price(local, 1, 1000, 4, network).seconds == pytest.approx(4000 * 3e-9 + 4000 * 2e-9 + 40 * 3e-9)


def test_counts():
    got = price(ring, 5, 23, 4, "gpu-25g", trace=True)
    assert got.messages == len(got.trace.flights) == 5 * 8
    assert got.rounds == 8 and len(got.trace.rounds) == 5 * 8
    assert got.bytes == 4 * 23 * 8 == sum(4 * (f.send.hi - f.send.lo) for f in got.trace.flights)
    assert got.busiest == max(
        4 * sum(f.send.hi - f.send.lo for f in got.trace.flights if f.source == r) for r in range(5)
    )
    assert got.seconds == max(got.finish) == max(span.end for span in got.trace.rounds)
    # Of ranks 0-3 | 4, the links 3 -> 4 and 4 -> 0 leave their node.
    crossing = sum(f.send.hi - f.send.lo for f in got.trace.flights if f.source in (3, 4))
    assert got.bytes_between == 4 * crossing


def test_trace_is_causal():
    trace = price(ring, 6, 60, 4, "gpu-100g", trace=True).trace
    position = {entry: i for i, entry in enumerate(trace.log)}
    assert len(position) == len(trace.log) == 2 * len(trace.rounds)
    spans = {(span.rank, span.index): span for span in trace.rounds}
    for f in trace.flights:
        assert position["begin", f.source, f.sent_in] < position["end", f.dest, f.received_in]
        assert spans[f.source, f.sent_in].start <= f.start < f.end <= spans[f.dest, f.received_in].end
        assert f.send.peer == f.dest and f.recv.peer == f.source
        assert f.send.hi - f.send.lo == f.recv.hi - f.recv.lo


@pytest.mark.parametrize("network", [HOCKNEY, "gpu-25g", "gpu-100g", "workstation"])
def test_one_node_stands_for_all_where_nodes_are_alike(network, monkeypatch):
    walked = price(ring, 32, 32 * 1000, 4, network)
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 100)
    short = price(ring, 32, 32 * 1000, 4, network)
    assert (walked.method, short.method) == ("simulation", "one node for all")
    np.testing.assert_allclose(short.finish, walked.finish, rtol=1e-9)
    for name in ("rounds", "messages", "bytes", "bytes_between", "busiest"):
        assert getattr(short, name) == getattr(walked, name), name


def test_unlike_nodes_fall_back_to_the_closed_form_or_refuse(monkeypatch):
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 20)
    entry = ALGORITHMS["allreduce"]["doubling"]
    got = price(entry, 64, 1000, 4, HOCKNEY)
    assert got.method == "closed form"
    assert got.seconds == pytest.approx(6 * (ALPHA + 4000 * (BETA + GAMMA)))
    with pytest.raises(ValueError, match="exchange"):
        price(exchange, 64, 1000, 4, HOCKNEY)


PERIODIC = (  # network, ranks that stand for all: of one host, pod, node or group
    (Network.star(16), 1),
    (Network.fat_tree(4), 4),
    (Network.fat_tree(4, 4).place_ranks(range(16)), 4),
    (Network.nodes(4, 4), 4),
    (Network.on(topology.fat_tree(4), 2), 8),
)


@pytest.mark.parametrize(("network", "ranks"), PERIODIC, ids=lambda value: str(value)[:20])
def test_one_block_stands_for_all_where_a_shift_maps_routes_to_routes(network, ranks, monkeypatch):
    size = len(network.topology.hosts) * network.ranks_per_node
    every = price(ring, size, size * 1000, 4, network)
    monkeypatch.setattr(pricing, "SYMMETRIC_FROM", 0)
    block = price(ring, size, size * 1000, 4, network)
    assert (every.method, block.method) == ("simulation", "one block for all")
    found, _, channels = smallest_block(lambda rank: ring(rank, size, size * 1000), size, network, size)
    assert found == ranks and len(channels) == size // ranks * len(set(channels.values()))
    np.testing.assert_allclose(block.finish, every.finish, rtol=1e-9)
    for name in ("rounds", "messages", "bytes", "bytes_between", "busiest", "traffic"):
        assert getattr(block, name) == getattr(every, name), name


@pytest.mark.parametrize("name", ["doubling", "rabenseifner"])
@pytest.mark.parametrize(
    ("network", "ranks"), [(Network.fat_tree(4, 4), 1), (Network.hypercube(4), 1), (Network.nodes(4, 4), 4)], ids=str
)
def test_one_block_stands_for_all_where_an_exclusive_or_maps_routes_to_routes(network, ranks, name, monkeypatch):
    """Ranks whose numbers differ in one bit exchange: no shift maps what one does to what the next does."""
    entry, size = ALGORITHMS["allreduce"][name], 16
    every = price(entry, size, size * 1000, 4, network)
    monkeypatch.setattr(pricing, "SYMMETRIC_FROM", 0)
    block = price(entry, size, size * 1000, 4, network)
    assert (every.method, block.method) == ("simulation", "one block for all")
    symmetry = smallest_block(lambda rank: entry.rounds(rank, size, size * 1000), size, network, size)
    assert symmetry.block == ranks and symmetry.minus(5, 3) == 6
    assert block.finish.tolist() == every.finish.tolist()
    for field in ("rounds", "messages", "bytes", "bytes_between", "busiest", "traffic"):
        assert getattr(block, field) == getattr(every, field), field


@pytest.mark.parametrize("name", ["ring", "doubling"])
@pytest.mark.parametrize(
    "network",
    [
        Network.fat_tree(4).place_ranks("random"),
        Network.mesh((4, 4)),
        Network.on(topology.backbone(16)),
        Network.from_edges([(i, (i + 1) % 16, 1e9 + (i == 5)) for i in range(16)]),
    ],
    ids=["random", "mesh", "backbone", "one cable differs"],
)
def test_no_block_stands_for_all_where_no_relabelling_maps_channels(network, name, monkeypatch):
    entry = ALGORITHMS["allreduce"][name]
    every = price(entry, 16, 16_000, 4, network)
    monkeypatch.setattr(pricing, "SYMMETRIC_FROM", 0)
    again = price(entry, 16, 16_000, 4, network)
    assert again.method == "simulation" and again.seconds == every.seconds


def test_rings_on_a_thousand_ranks_of_a_fat_tree_take_seconds():
    """All 2,095,104 messages would take half a minute; the messages of one pod, 130,944, a second or two."""
    begin = time.process_time()
    got = price(ring, 1024, 1 << 20, 4, Network.fat_tree(16, 4))
    assert got.method == "one block for all" and got.messages == 2_095_104
    assert time.process_time() - begin < 20


def test_double_trees_on_a_thousand_ranks_of_a_fat_tree_take_seconds():
    begin = time.process_time()
    got = price(ALGORITHMS["allreduce"]["double_tree"], 1024, 1 << 20, 4, Network.fat_tree(16, 4))
    assert got.method == "simulation" and got.messages == 32_736
    assert time.process_time() - begin < 20


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "shape", "messages"),
    [("doubling", "fat-tree:k=64,oversubscription=4", 16), ("ring", "nodes:nodes=8192,ranks=8", 2 * 65535)],
)
def test_65536_ranks_take_seconds(name, shape, messages):
    """One rank, or those of a node, stand for all: 16 messages instead of a million, a million instead of billions."""
    begin = time.process_time()
    got = price(ALGORITHMS["allreduce"][name], 1 << 16, 1 << 16, 4, find_network(shape))
    assert got.method == "one block for all" and got.messages == messages << 16
    assert time.process_time() - begin < 20


def test_a_very_large_ring_equals_its_closed_form():
    p, n = 16_384, 16_384 * 6000
    got = price(ring, p, n, 4, HOCKNEY)
    assert got.method == "one node for all"
    expected = 2 * (p - 1) * (ALPHA + 4 * n / p * BETA) + (p - 1) * 4 * n / p * GAMMA
    assert got.seconds == pytest.approx(expected, rel=1e-9)
    assert got.messages == 2 * p * (p - 1)


@pytest.mark.parametrize("sizes", [(256, 2048), pytest.param((512, 4096), marks=pytest.mark.exhaustive)], ids=max)
def test_two_levels_on_many_nodes_take_time_that_grows_with_the_ranks(sizes, monkeypatch):
    """Not with their square: the ranks of a node are found in one pass."""
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 0)  # or the time grows with all messages

    def seconds(p):
        begin = time.process_time()
        got = price(ALGORITHMS["allreduce"]["two_level"], p, p, 4, "gpu-100g", nodes=[rank // 8 for rank in range(p)])
        assert got.rounds == 2 * 7 + 2 * 2 * (p // 8 - 1) + 1 and got.method == "one node for all"
        return time.process_time() - begin

    few, many = (min(seconds(p) for _ in range(3)) for p in sizes)
    assert many < 24 * few


def test_nodes_are_those_of_the_network_where_none_are_given():
    two_level, nodes = ALGORITHMS["allreduce"]["two_level"], [rank // 8 for rank in range(32)]
    got = price(two_level, 32, 320, 4, "gpu-100g")
    assert str(got) == str(price(two_level, 32, 320, 4, "gpu-100g", nodes=nodes))
    assert 0 < got.bytes_between < price(two_level, 32, 320, 4, "gpu-100g", nodes=[0] * 32).bytes_between


def test_what_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(pricing, "MOST_STEPS", 10_000)

    def nothing(rank, size, count):
        while rank == size - 1:
            yield ()

    def lap(rank, size, count):
        while True:
            yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "y", 0, count)

    for endless in (nothing, lap):
        for trace in (False, True):
            with pytest.raises(ValueError, match=f"a rank of {endless.__name__} takes more than 10,000 steps, if it"):
                price(endless, 4, 8, trace=trace)


def test_more_bytes_and_slower_links_never_cost_less():
    times = [price(ring, 8, count, 4, "gpu-25g").seconds for count in (0, 1, 7, 8, 1000, 100_000)]
    assert times[0] == 0 and times == sorted(times)
    near = NETWORKS["gpu-25g"]
    slow = Network(near.inside, Link(near.between.alpha, 2 * near.between.beta), near.ranks_per_node)
    assert price(ring, 8, 100_000, 4, slow).seconds > price(ring, 8, 100_000, 4, near).seconds


def test_what_cannot_be_priced_is_refused_with_its_ranks():
    def stuck(rank, size, count):
        yield (Recv((rank + 1) % size, "x", 0, count),)

    def unequal(rank, size, count):
        yield (Send(1, "x", 0, count) if rank == 0 else Recv(0, "x", 0, count - 1),)

    def unheard(rank, size, count):
        if rank == 0:
            yield (Send(1, "x", 0, count),)

    with pytest.raises(ValueError, match="stuck: 3 of 3 ranks"):
        price(stuck, 3, 4, 4, HOCKNEY)
    with pytest.raises(ValueError, match="unequal: rank 0 sends 4 elements where rank 1"):
        price(unequal, 2, 4, 4, HOCKNEY)
    with pytest.raises(ValueError, match="unheard: nobody receives the message from rank 0 to rank 1"):
        price(unheard, 2, 4, 4, HOCKNEY)
    with pytest.raises(ValueError, match="'nowhere'"):
        price(ring, 2, 4, 4, "nowhere")
    for size, itemsize in ((0, 4), (2, 0)):
        with pytest.raises(ValueError, match=f"need size >= 1 and itemsize >= 1, not {size} and {itemsize}"):
            price(ring, size, 4, itemsize, HOCKNEY)


def test_a_round_ends_when_what_it_sends_has_left_the_port():
    """Rank 0 has its short message long before its long one has left; rank 1 the other way round."""

    def uneven(rank, size, count):
        lengths = (count, 10) if rank == 0 else (10, count)
        yield Send(1 - rank, "x", 0, lengths[0]), Recv(1 - rank, "y", 0, lengths[1])

    finish = price(uneven, 2, 1000, 1, Network(Link(0, 1e-9), Link(0, 1e-9))).finish
    assert finish == pytest.approx([1000e-9, 1000e-9])


@pytest.mark.parametrize("odd", [None, 1, 4, 7])
def test_one_node_stands_for_no_node_that_differs(odd, monkeypatch):
    """The second, a middle and the last node are looked at."""

    def around(rank, size, count):
        twice = 2 if rank == odd else 1
        yield Send((rank + 1) % size, "x", 0, count * twice), Recv((rank - 1) % size, "y", 0, count)

    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 0)
    if odd is None:
        assert price(around, 8, 100, 4, HOCKNEY).method == "one node for all"
    else:
        with pytest.raises(ValueError, match="the nodes differ from each other, and it has no closed form"):
            price(around, 8, 100, 4, HOCKNEY)


def test_a_closed_form_takes_blocks_up_to_the_end_of_the_last(monkeypatch):
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 0)
    entry = ALGORITHMS["allgather"]["ring"]
    blocks = [(30, 90), (90, 100), (0, 30)]  # 100 elements; that of the last rank is not the one that lies last
    got = price(entry, 3, blocks, 4, HOCKNEY)
    assert got.method == "closed form"
    assert got.seconds == pytest.approx(entry.cost(3, 100).seconds(ALPHA, 4 * BETA, 4 * GAMMA))


def test_in_rounds_a_message_takes_one_unit_whatever_its_length():
    for count in (4, 4000):
        assert price(ring, 4, count, 8, ROUNDS).seconds == 2 * 3


def test_networks_survive_a_file(tmp_path):
    for name, network in NETWORKS.items():
        assert 1e-13 < network.copy < 1e-8 and 1e-13 < network.gamma < 1e-8, "seconds a byte"
        assert network.source, name
        network.save(tmp_path / "network.json")
        assert Network.load(tmp_path / "network.json") == network
    for text in ("{", "[]", '{"inside": {"alpha": 1}}', '{"inside": {"alpha": -1, "beta": 0}, "between": {}}'):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ValueError, match=r"broken\.json"):
            Network.load(tmp_path / "broken.json")
    with pytest.raises(ValueError, match="part of alpha"):
        Link(1e-6, 0, overhead=0.6e-6)


def test_fit_recovers_a_link_from_noisy_points():
    rng = np.random.default_rng(4)
    sizes = [4**k for k in range(1, 13)] * 5
    points = [(n, (2e-6 + n * 1e-10) * rng.uniform(0.97, 1.03)) for n in sizes]
    link = fit(points, overhead=0.4e-6)
    assert link.alpha == pytest.approx(2e-6, rel=0.02)
    assert link.beta == pytest.approx(1e-10, rel=0.02)
    assert link.overhead == 0.4e-6
    assert fit(points, overhead=1.0).overhead == pytest.approx(link.alpha / 2)  # no more than there is
    assert fit([(1, 1e-9), (1000, 2e-6)]).alpha == 0  # a line that would begin below zero
    assert fit([(1, 2e-6), (1000, 1e-6)]).beta == 0
    with pytest.raises(ValueError, match="two sizes"):
        fit([(8, 1e-6), (8, 1e-6)])


def test_lower_bound():
    n = 1e6
    assert lower_bound("allreduce", 8, n, HOCKNEY) == pytest.approx(2 * 7 / 8 * n * BETA)
    assert lower_bound("allreduce", 9, 8, HOCKNEY) == pytest.approx(4 * ALPHA)
    assert lower_bound("allgather", 8, n, HOCKNEY) == pytest.approx(7 / 8 * n * BETA)
    assert lower_bound("barrier", 8, 0, HOCKNEY) == pytest.approx(3 * ALPHA)
    assert lower_bound("allreduce", 1, n, HOCKNEY) == 0
    with pytest.raises(ValueError, match="'sort'"):
        lower_bound("sort", 8, n, HOCKNEY)
    two = Network(Link(1e-6, 1e-10, gap=1e-6), Link(9e-6, 1e-9, gap=9e-6), ranks_per_node=4)
    assert lower_bound("allreduce", 4, n, two) == pytest.approx(2 * 3 / 4 * n * 1e-10)
    assert lower_bound("allreduce", 16, n, two) == pytest.approx(2 * 3 / 4 * n * 1e-9)


def test_no_algorithm_beats_the_lower_bound():
    two = Network(Link(1e-6, 1e-10, gap=1e-6), Link(9e-6, 1e-9, gap=9e-6), ranks_per_node=4)
    for operation in ALGORITHMS:
        for entry in ALGORITHMS[operation].values():
            if SHARED_MEMORY in entry.needs:  # these need not send; see the next test
                continue
            for p in (2, 3, 5, 8, 11, 16):
                for count in (p, 5000 * p):
                    count = None if operation == "barrier" else count
                    for network in (Network.hockney(ALPHA, BETA), two):
                        bound = lower_bound(operation, p, 8 * (count or 0), network)
                        got = price(entry, p, count, 8, network).seconds
                        assert got >= bound * (1 - 1e-9), (operation, entry.name, p, count)


def test_no_algorithm_in_memory_beats_what_all_ranks_together_can_do():
    """One barrier at least; and p - 1 additions of every element, which p ranks share if all wait for the result."""
    for operation, entries in ALGORITHMS.items():
        for entry in (entry for entry in entries.values() if entry.needs == {SHARED_MEMORY}):
            for p in (2, 3, 8):
                network = in_memory(p)
                for count in (p, 5000 * p):
                    got = price(entry, p, None if operation == "barrier" else count, 4, network)
                    adding = (p - 1) / p * 4 * count * GAMMA if "reduce" in operation else 0.0
                    assert got.seconds >= (network.barrier_seconds(p) + adding) * (1 - 1e-9), (operation, entry.name, p)
                    assert got.messages == got.bytes == 0 and got.barriers >= 1


# ------------------------------------------------------------------------------------ memory of a node, computation

BARRIER_SECONDS = 5e-7


def in_memory(size, **given):
    """One node of so many ranks."""
    barriers = ((2, BARRIER_SECONDS), (8, 4 * BARRIER_SECONDS))
    return dataclasses.replace(HOCKNEY, ranks_per_node=size, copy=5e-10, barriers=barriers, **given)


def test_all_who_meet_leave_together_after_the_last():
    def late(rank, size, count):
        if rank == 1:
            yield (Copy("y", 0, 1000, "x", 0),)
        if rank < 2:
            yield (Barrier((0, 1)),)
        yield (Barrier(),)

    network = in_memory(3)
    priced = price(late, 3, 1, 4, network, trace=True)
    first = 4000 * 5e-10 + network.barrier_seconds(2)
    assert priced.finish == pytest.approx([first + network.barrier_seconds(3)] * 3) and priced.barriers == 2
    assert [(w.rank, w.start, w.end) for w in priced.trace.works if w.step == Barrier((0, 1))] == [
        (0, 0.0, pytest.approx(first)),
        (1, pytest.approx(2e-6), pytest.approx(first)),
    ]
    assert network.barrier_seconds(1) == 0 and network.barrier_seconds(5) == pytest.approx(2.5 * BARRIER_SECONDS)
    assert HOCKNEY.barrier_seconds(5) == 2 * ALPHA  # where nobody has measured it


def test_buffers_of_other_ranks_cost_what_ones_own_do():
    def gets(rank, size, count):
        yield (Barrier(),)
        yield Copy("y", 0, count, "x", 0, of=1 - rank), Reduce("z", 0, count, "x", 0, of=1 - rank)

    network = in_memory(2)
    priced = price(gets, 2, 1000, 4, network)
    assert priced.seconds == pytest.approx(BARRIER_SECONDS + 4000 * (5e-10 + GAMMA))
    assert priced.copied == 2 * 2 * 4000
    assert str(priced).endswith("2 rounds, 1 barriers, 16,000 bytes copied or added in memory, by simulation")


def test_what_another_rank_has_written_has_to_be_fetched():
    def gets(rank, size, count):
        yield (Barrier(),)
        yield Copy("y", 0, count, "x", 0, of=1 - rank), Reduce("z", 0, count, "x", 0, of=1 - rank)
        yield Copy("a", 0, count, "x", 0, of=rank), Reduce("z", 0, count, "x", 0)
        yield (Copy("y", 0, count, "x", 0, to=1 - rank),)

    network = dataclasses.replace(in_memory(2), fetches=((100, 1e-7), (10_000, 1e-5)))
    assert network.fetching(4000) == pytest.approx(4e-6)
    further = 4e-6 - 4000 * 5e-10
    own = 4000 * (5e-10 + GAMMA)
    assert price(gets, 2, 1000, 4, network).seconds == pytest.approx(BARRIER_SECONDS + 2 * own + 2 * further + 4e-6)


def test_slots_that_others_have_read_take_longer_to_write():
    posts = ((100, 1e-7), (10_000, 1e-5))  # 1e-9 a byte, where a copy takes 5e-10
    network = dataclasses.replace(in_memory(2), posts=posts)

    def puts(rank, size, count):
        yield Copy("odd", 0, count, "x", 0), Reduce("even", 0, count, "x", 0), Copy("y", 0, count, "x", 0)

    own = 4000 * (5e-10 + GAMMA)
    assert price(puts, 2, 1000, 4, network).seconds == pytest.approx(4e-6 + own + 4000 * 5e-10)
    assert price(puts, 2, 1000, 4, in_memory(2)).seconds == pytest.approx(own + 4000 * 5e-10)


def test_ranks_of_a_node_share_its_memory():
    """A copy of one rank takes half of what the memory carries: two go on undisturbed, of four each takes twice."""

    def copies(rank, size, count):
        yield (Copy("y", 0, count, "x", 0),)

    alone = 4000 * 5e-10
    times = [price(copies, 8, 1000, 4, in_memory(node, memory=1.25e-10)).seconds for node in (1, 2, 4)]
    assert times == pytest.approx([alone, alone, 2 * alone])
    assert price(copies, 8, 1000, 4, in_memory(8)).seconds == pytest.approx(alone)  # memory is not known
    # The measured table is of all ranks at once, here two: their share of memory is in it.
    table = dataclasses.replace(in_memory(4, memory=1.25e-10), copies=((100, 1e-6), (1 << 24, (1 << 24) * 5e-10)))
    assert table.memory_share == pytest.approx(0.5)
    assert dataclasses.replace(table, copies=((0, 0.0),)).memory_share == 0, "of copies that take no time"
    assert dataclasses.replace(HOCKNEY, memory=1e-9).copying(1000) == pytest.approx(2e-6)  # read and written


def test_computation_goes_on_beside_the_messages_of_its_round():
    def overlaps(rank, size, count):
        peer = 1 - rank
        yield Compute("work", seconds=seconds), Send(peer, "x", 0, count), Recv(peer, "y", 0, count)

    message = ALPHA + 4000 * BETA
    for seconds in (0.0, message / 2, message, 3 * message):
        priced = price(overlaps, 2, 1000, 4, HOCKNEY, trace=True)
        assert priced.seconds == pytest.approx(max(message, seconds))
        assert [(w.step.name, w.start, w.end) for w in priced.trace.works] == [("work", 0.0, seconds)] * 2
    # What comes is added after the computation.
    after = price(lambda r, p, n: [(Compute("work", seconds=1.0), *added(r))], 2, 1000, 4, HOCKNEY)
    assert after.seconds == pytest.approx(1.0 + 4000 * GAMMA)


def added(rank):
    return Send(1 - rank, "x", 0, 1000), RecvReduce(1 - rank, "y", 0, 1000)


def test_memory_is_shared_within_a_node_only():
    entry = ALGORITHMS["allreduce"]["shared_arrays"]
    with pytest.raises(ValueError, match="rank 4, as this network has 4 ranks a node: Barrier"):
        price(entry, 8, 100, 4, "gigabit")
    assert price(entry, 4, 100, 4, "gigabit").barriers == 2

    def reads(rank, size, count):
        yield (Copy("y", 0, count, "x", 0, of=(rank + 1) % size),)

    with pytest.raises(ValueError, match=r"rank 3.*rank 4"):
        price(reads, 8, 100, 4, "gigabit")


def test_meetings_that_do_not_come_about_are_refused():
    def absent(rank, size, count):
        if rank != 2:
            yield (Barrier(),)

    with pytest.raises(
        ValueError, match=r"absent: 2 of 3 ranks wait for ever, rank 0 in a Barrier for \[2\], 1 in a Barrier for \[2\]"
    ):
        price(absent, 3, 4, 4, in_memory(3))
    with pytest.raises(ValueError, match=r"rank 0: Barrier.* must be the only step of its round"):
        price(lambda r, p, n: [(Copy("y", 0, n, "x", 0), Barrier())], 2, 4, 4, in_memory(2))


def test_one_node_stands_for_all_that_meet_and_compute(monkeypatch):
    """Within each node: sum, meet; between nodes: a ring, which the ranks compute beside."""

    def levels(rank, size, count):
        first = rank - rank % 4
        yield (Barrier(tuple(range(first, first + 4))),)
        yield (Reduce("x", 0, count, "x", 0, of=first),)
        for _ in range(3):
            step = Compute("work", seconds=1e-6 * (1 + rank % 4))
            yield step, Send((rank + 4) % size, "x", 0, count), Recv((rank - 4) % size, "y", 0, count)

    network = in_memory(4, memory=1e-10)
    walked = price(levels, 32, 1000, 4, network)
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 10)
    short = price(levels, 32, 1024, 4, network)
    assert (walked.method, short.method) == ("simulation", "one node for all")
    np.testing.assert_allclose(short.finish, price(levels, 32, 1024, 4, network, trace=True).finish)
    assert short.barriers == walked.barriers == 1 and short.copied == 32 * 4096


def test_a_closed_form_takes_copies_at_the_rate_of_long_ones(monkeypatch):
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 0)
    table = ((100, 1e-6), (1 << 20, (1 << 20) * 5e-10), (1 << 24, (1 << 24) * 5e-10))
    entry, network = ALGORITHMS["broadcast"]["shared_arrays"], dataclasses.replace(in_memory(4), copies=table)
    got = price(entry, 4, 1000, 4, network)
    assert got.method == "closed form"
    assert got.seconds == pytest.approx(2 * network.barrier_seconds(4) + 4000 * 5e-10)


@pytest.mark.parametrize("name", ["shared_small", "shared_slots", "shared_arrays"])
def test_one_rank_stands_for_all_of_a_node_that_share_its_memory(name, monkeypatch):
    network, entry = in_memory(8, memory=1.25e-10), ALGORITHMS["allreduce"][name]
    walked = price(entry, 8, 8 * 1024, 4, network)
    assert walked.seconds > 1.5 * price(entry, 8, 8 * 1024, 4, in_memory(8)).seconds  # eight take more than there is
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 10)
    short = price(entry, 8, 8 * 1024, 4, network)
    assert (walked.method, short.method) == ("simulation", "one node for all")
    assert short.seconds == pytest.approx(walked.seconds, rel=1e-9)
    assert (short.barriers, short.copied) == (walked.barriers, walked.copied)


# --------------------------------------------------------------------------------------------- costs by length

US = 1e-6
SHORT, LONG = (
    Point(100, *(US * x for x in (10, 2, 3, 4, 12, 15))),
    Point(1100, *(US * x for x in (40, 2, 3, 30, 46, 55))),
)


def measured(eager=None, points=(SHORT, LONG)):
    link = Link(1, 1, points=points, eager=eager)  # alpha and beta do not count where there are points
    return Network(link, link)


def test_messages_of_a_pair_do_not_overtake_each_other():
    """A long one whose first byte takes a while, and a short one behind it, which would be there earlier."""
    slow = Point(10_000, 1000 * US, 0, 0, 100 * US, 1000 * US, 1000 * US)
    quick = Point(1, 1 * US, 0, 0, 1 * US, 1 * US, 1 * US)

    def two(rank, size, count):
        kind, peer = (Send, 1) if rank == 0 else (Recv, 0)
        yield (kind(peer, "x", 0, count),)
        yield (kind(peer, "x", 0, 1),)

    found = price(two, 2, 10_000, 1, measured(points=(quick, slow)), trace=True)
    long, short = found.trace.flights
    assert long.send.hi == 10_000 and short.send.hi == 1 and short.end >= long.end >= 999 * US


def one(rank, size, count):
    yield (Send(1, "x", 0, count) if rank == 0 else Recv(0, "x", 0, count),)


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, 10), (100, 10), (600, 25), (1100, 40), (2100, 70)], ids=lambda n: str(n)
)
def test_a_message_costs_what_was_measured_and_between_lengths_what_lies_between(nbytes, expected):
    assert price(one, 2, nbytes, 1, measured()).seconds == pytest.approx(expected * US)


def test_longer_messages_do_not_cost_less_than_the_longest_measured():
    noisy = (LONG, Point(1200, *(US * x for x in (39, 2, 3, 29, 45, 54))))
    assert price(one, 2, 10_000, 1, measured(points=noisy)).seconds == pytest.approx(39 * US)


def test_messages_of_a_stream_follow_each_other_by_the_measured_gap():
    def stream(rank, size, count):
        yield tuple(Send(1, "x", 0, count) if rank == 0 else Recv(0, "x", 0, count) for _ in range(8))

    # The processor is done with a send before the port is: 7 gaps after the first message.
    assert price(stream, 2, 1100, 1, measured()).seconds == pytest.approx((40 + 7 * 30) * US)


def test_a_rested_port_lets_through_what_it_has_saved_up():
    """A cable of 1 byte a microsecond behind a token bucket of 1000 bytes: what comes first goes at once."""
    bucket = tuple(
        Point(n, *(US * x for x in (10 + max(0, n - 1000), 1, 1, n, 10 + max(0, n - 1000), 10 + max(0, n - 1000))))
        for n in (1, 500, 1000, 2000, 4000)
    )
    network = measured(points=bucket)
    assert network.inside.credit == pytest.approx(1000 * US, rel=0.02)

    def stream(number):
        def rounds(rank, size, count):
            yield tuple(Send(1, "x", 0, count) if rank == 0 else Recv(0, "x", 0, count) for _ in range(number))

        return price(rounds, 2, 500, 1, network).seconds

    assert stream(1) == pytest.approx(10 * US)
    assert stream(2) < 40 * US
    assert stream(10) == pytest.approx(4000 * US, rel=0.02)  # 5000 bytes, of which 1000 are free


def test_a_round_ends_when_its_last_send_has_left_on_whichever_level():
    """The long send between nodes is listed first, and the short one inside the node leaves long before it."""

    def both(rank, size, count):
        if rank == 0:
            yield Send(2, "x", 0, count), Send(1, "x", 0, 1)
        elif rank < 3:
            yield (Recv(0, "x", 0, count if rank == 2 else 1),)

    for between in (
        Link(0, 1e-9),
        Link(0, 0, points=tuple(Point(n, n * 1e-9, 0, 0, *[n * 1e-9] * 3) for n in (1, 2000)), eager=1),
    ):
        network = Network(Link(0, 1e-9), between, ranks_per_node=2)
        assert price(both, 4, 1000, 1, network).finish[0] == pytest.approx(1000e-9)


def test_both_directions_at_once_cost_what_was_measured():
    def around(rank, size, count):
        yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "y", 0, count)

    for nbytes, ring, pair in ((100, 12, 15), (1100, 46, 55)):
        assert price(around, 3, nbytes, 1, measured()).seconds == pytest.approx(ring * US)
        assert price(around, 2, nbytes, 1, measured()).seconds == pytest.approx(pair * US)


def test_long_sends_wait_for_their_receive_and_short_ones_do_not():
    def late(rank, size, count):
        if rank == 0:
            yield (Send(1, "x", 0, count),)
        else:
            yield (Copy("z", 0, 1000, "y", 0),)  # a millisecond
            yield (Recv(0, "x", 0, count),)

    for eager, nbytes, sender, receiver in ((600, 600, 2, 1000 + 3), (599, 600, 1000 - 10 + 2 + 17, 1000 - 10 + 25)):
        network = dataclasses.replace(measured(eager), copy=US)
        priced = price(late, 2, nbytes, 1, network, trace=True)
        assert priced.finish == pytest.approx([sender * US, receiver * US], rel=1e-3), eager
        (flight,) = priced.trace.flights
        assert flight.ready == pytest.approx(2 * US)
    # The receive is there first: the wait costs nothing.
    assert price(one, 2, 1100, 1, measured(0)).seconds == price(one, 2, 1100, 1, measured()).seconds


def test_sends_that_wait_for_each_other_are_refused():
    def head_on(rank, size, count):
        yield (Send(1 - rank, "x", 0, count),)
        yield (Recv(1 - rank, "y", 0, count),)

    assert price(head_on, 2, 1100, 1, measured(1100)).seconds > 0
    with pytest.raises(ValueError, match="2 of 2 ranks"):
        price(head_on, 2, 1100, 1, measured(1099))


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
def test_every_algorithm_has_a_price_where_all_sends_wait(p):
    for operation, entries in ALGORITHMS.items():
        for entry in entries.values():
            count = None if operation == "barrier" else 40 * p
            node = p if entry.needs == {SHARED_MEMORY} else 2 if SHARED_MEMORY in entry.needs else 1
            waiting, eager = (
                price(entry, p, count, 4, measured(limit).with_ranks_per_node(node)) for limit in (0, None)
            )
            assert waiting.seconds > 0 and waiting.messages == eager.messages, (operation, entry.name)


def test_reductions_and_copies_cost_by_length():
    network = dataclasses.replace(
        HOCKNEY, gamma=1.0, copy=1.0, reductions=((100, 1.0), (200, 3.0)), copies=((100, 5.0), (200, 7.0))
    )

    def local(rank, size, count):
        yield Reduce("y", 0, count, "x", 0), Copy("z", 0, count, "x", 0)

    assert [price(local, 1, n, 1, network).seconds for n in (50, 100, 150, 300)] == pytest.approx([6, 6, 8, 14])


def test_steps_without_a_price_are_refused():
    def unknown(rank, size, count):
        yield (("dance", 0, count),)

    with pytest.raises(ValueError, match="'dance'"):
        price(unknown, 2, 4, 4, HOCKNEY, trace=True)


def test_files_of_networks_without_lengths_are_read(tmp_path):
    file = tmp_path / "network.json"
    link = {"alpha": 1e-6, "beta": 1e-9, "overhead": 2e-7, "gap": 0.0}
    old = {"inside": link, "between": link, "ranks_per_node": 2, "gamma": 1e-10, "copy": 2e-10, "source": "measured"}
    file.write_text(json.dumps(old))
    assert Network.load(file) == Network(Link(1e-6, 1e-9, 2e-7), Link(1e-6, 1e-9, 2e-7), 2, 1e-10, 2e-10, "measured")
    full = dataclasses.replace(
        measured(64), copies=((1, 2.0),), memory=1e-11, barriers=((2, 1e-6),), fetches=((1, 3.0),), posts=((1, 4.0),)
    )
    full.save(file)
    assert Network.load(file) == full
    for wrong in (
        {"inside": link | {"points": [[2, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]}},
        {"inside": link | {"points": [[1, -1, 1, 1, 1, 1, 1]]}},
        {"inside": link | {"points": [[1, 1]]}},
        {"inside": link | {"eager": -1}},
        {"copies": [[2, 1], [1, 1]]},
        {"source": ["measured", "here"]},
    ):
        file.write_text(json.dumps(old | wrong))
        with pytest.raises(ValueError, match=r"network\.json: not a network"):
            Network.load(file)


def test_the_critical_path_says_what_was_waited_for():
    def chain(rank, size, count):
        if rank:
            yield (Recv(rank - 1, "x", 0, count),)
        if rank == 1:
            yield (Copy("y", 0, 1000, "x", 0),)
        if rank < size - 1:
            yield (Send(rank + 1, "x", 0, count),)

    network = dataclasses.replace(HOCKNEY, copy=1e-9)
    priced = price(chain, 4, 1000, 1, network, trace=True)
    found = waits(priced)
    assert found.messages == pytest.approx(3 * (ALPHA + 1000 * BETA)) and found.ranks == pytest.approx(1000e-9)
    assert found.messages + found.ports + found.ranks == pytest.approx(priced.seconds)
    assert found.copies == pytest.approx(1000e-9) and found.sums == 0 and found.lengths == (1000, 1000, 1000)
    for entry in ALGORITHMS["allreduce"].values():
        for p in (2, 5, 8):
            node = p if entry.needs == {SHARED_MEMORY} else 2 if SHARED_MEMORY in entry.needs else 1
            priced = price(entry, p, 5000, 4, measured(1000).with_ranks_per_node(node), trace=True)
            found = waits(priced)
            parts = found.messages + found.ports + found.ranks + found.barriers
            assert parts == pytest.approx(priced.seconds), (entry.name, p)
            assert 0 <= found.sums + found.copies <= found.ranks * (1 + 1e-9), (entry.name, p)
    with pytest.raises(ValueError, match="trace=True"):
        waits(price(chain, 4, 1000, 1, network))


def test_the_critical_path_goes_on_with_the_last_who_came_to_a_meeting():
    def late(rank, size, count):
        if rank == 1:
            yield (Compute("work", seconds=5e-6),)
        yield (Barrier(),)
        if rank == 0:
            yield (Compute("work", seconds=1e-6),)

    found = waits(price(late, 3, 1, 4, in_memory(3), trace=True))
    assert found.ranks == pytest.approx(6e-6) and found.barriers == pytest.approx(in_memory(3).barrier_seconds(3))
    assert found.messages == found.ports == 0
    assert str(found) == f"6 us work of ranks, {1e6 * found.barriers:.3g} us barriers in memory (1)"


def test_the_critical_path_says_how_many_messages_of_what_length_and_how_much_is_sums():
    network = Network.hockney(1e-6, 1e-9, 0.5e-9)
    ring = ALGORITHMS["allreduce"]["ring"]
    found = waits(price(ring, 4, 1000, 4, network, trace=True))
    assert found.lengths == (1000,) * 6 and found.sums == pytest.approx(3 * 1000 * 0.5e-9)
    assert str(found) == "12 us messages (6 of 1,000 bytes), 1.5 us work of ranks (1.5 us sums)"
    slots = ALGORITHMS["allreduce"]["shared_slots"]
    memory = dataclasses.replace(network, ranks_per_node=4, copy=0.25e-9)
    found = waits(price(slots, 4, 1024, 4, memory, trace=True))
    assert found.sums == pytest.approx(3 * 1024 * 0.5e-9) and found.barrier_count == 2 and not found.lengths
    assert found.copies == pytest.approx((2 + 1 / 4) * 4096 * 0.25e-9)
    assert found.ranks == pytest.approx(found.sums + found.copies)


def test_a_schedule_of_two_trees_cuts_its_vector_once(monkeypatch):
    from collectives.algorithms import allreduce

    calls = []
    cut = allreduce.segments
    monkeypatch.setattr(allreduce, "segments", lambda *given: calls.append(given) or cut(*given))
    assert len(list(allreduce.double_tree(3, 8, 10_000, segment=10))) > 500
    assert len(calls) == 3  # x in halves, each half in segments


def test_ranks_that_begin_at_once_send_in_listed_order_where_sends_wait():
    """Each rank sends to the next, then to the one after: no two ever meet at a port, whoever is looked at first."""

    def direct(rank, size, count):
        others = [(rank + k) % size for k in range(1, size)]
        yield *(Send(peer, "x", 0, count) for peer in others), *(Recv(peer, "y", 0, count) for peer in others)

    alone = (SHORT, LONG._replace(both=LONG.time, exchange=LONG.time))
    in_a_node = (measured(limit, alone).with_ranks_per_node(4) for limit in (0, None))
    waiting, eager = (price(direct, 4, 1100, 1, each).seconds for each in in_a_node)
    assert waiting == pytest.approx(eager)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("patience", "shows"), [(0.0, True), (1e9, False)])
def test_a_long_simulation_shows_a_bar_on_a_terminal_and_erases_it(patience, shows, monkeypatch):
    monkeypatch.setattr(progress_bar, "PATIENCE", patience)
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        price(ring, 8, 8000, 4, HOCKNEY)
        said = terminal.getvalue()
        assert ("#" in said) == ("%" in said) == (shows and terminal.isatty())
        assert not said or said.endswith(" \r")
