"""The clock agrees with what can be counted by hand, also where nodes share a port."""

import time

import numpy as np
import pytest

from collectives import ALGORITHMS, clock
from collectives.clock import price
from collectives.networks import NETWORKS, Link, Network, fit, lower_bound
from collectives.steps import Copy, Recv, RecvReduce, Reduce, Send, part

ALPHA, BETA, GAMMA = 3e-6, 1e-9, 2e-10
HOCKNEY = Network.hockney(ALPHA, BETA, GAMMA)


def ring(rank, size, count):
    """The allreduce of the literature, written here so that the registry cannot change what is tested."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        give, take = part(count, size, (rank - k) % size), part(count, size, (rank - k - 1) % size)
        yield Send(right, "x", *give), RecvReduce(left, "x", *take)
    for k in range(size - 1):
        give, take = part(count, size, (rank + 1 - k) % size), part(count, size, (rank - k) % size)
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
    monkeypatch.setattr(clock, "WALK_AT_MOST", 100)
    short = price(ring, 32, 32 * 1000, 4, network)
    assert (walked.method, short.method) == ("walk", "one node for all")
    np.testing.assert_allclose(short.finish, walked.finish, rtol=1e-9)
    for name in ("rounds", "messages", "bytes", "bytes_between", "busiest"):
        assert getattr(short, name) == getattr(walked, name), name


def test_unlike_nodes_fall_back_to_the_closed_form_or_refuse(monkeypatch):
    monkeypatch.setattr(clock, "WALK_AT_MOST", 20)
    entry = ALGORITHMS["allreduce"]["doubling"]
    got = price(entry, 64, 1000, 4, HOCKNEY)
    assert got.method == "closed form"
    assert got.seconds == pytest.approx(6 * (ALPHA + 4000 * (BETA + GAMMA)))
    with pytest.raises(ValueError, match=r"exchange .* no closed form"):
        price(exchange, 64, 1000, 4, HOCKNEY)


def test_a_very_large_ring_equals_its_closed_form():
    p, n = 16_384, 16_384 * 6000
    got = price(ring, p, n, 4, HOCKNEY)
    assert got.method == "one node for all"
    expected = 2 * (p - 1) * (ALPHA + 4 * n / p * BETA) + (p - 1) * 4 * n / p * GAMMA
    assert got.seconds == pytest.approx(expected, rel=1e-9)
    assert got.messages == 2 * p * (p - 1)


def test_two_levels_on_many_nodes_take_seconds():
    """The ranks of a node are found in one pass: 2 s where it once took minutes."""
    p = 16_384
    begin = time.process_time()
    got = price(ALGORITHMS["allreduce"]["two_level"], p, p, 4, "gpu-100g", nodes=[rank // 8 for rank in range(p)])
    assert got.rounds == 2 * 7 + 2 * (p // 8 - 1) and time.process_time() - begin < 30


def test_nodes_are_those_of_the_network_where_none_are_given():
    two_level, nodes = ALGORITHMS["allreduce"]["two_level"], [rank // 8 for rank in range(32)]
    got = price(two_level, 32, 320, 4, "gpu-100g")
    assert str(got) == str(price(two_level, 32, 320, 4, "gpu-100g", nodes=nodes))
    assert 0 < got.bytes_between < price(two_level, 32, 320, 4, "gpu-100g", nodes=[0] * 32).bytes_between


def test_what_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(clock, "ENDLESS", 10_000)

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

    with pytest.raises(ValueError, match=r"stuck: 3 of 3 ranks wait for ever, rank 0 for 1"):
        price(stuck, 3, 4, 4, HOCKNEY)
    with pytest.raises(ValueError, match=r"unequal: rank 0 sends 4 elements where rank 1"):
        price(unequal, 2, 4, 4, HOCKNEY)
    with pytest.raises(ValueError, match=r"unheard: nobody receives the message from rank 0 to rank 1"):
        price(unheard, 2, 4, 4, HOCKNEY)
    with pytest.raises(ValueError, match=r"no network named 'nowhere'.*gigabit"):
        price(ring, 2, 4, 4, "nowhere")


def test_networks_survive_a_file(tmp_path):
    for name, network in NETWORKS.items():
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
    for operation, entries in ALGORITHMS.items():
        for entry in entries.values():
            for p in (2, 3, 5, 8, 11, 16):
                for count in (p, 5000 * p):
                    count = None if operation == "barrier" else count
                    for network in (Network.hockney(ALPHA, BETA), two):
                        bound = lower_bound(operation, p, 8 * (count or 0), network)
                        got = price(entry, p, count, 8, network).seconds
                        assert got >= bound * (1 - 1e-9), (operation, entry.name, p, count)
