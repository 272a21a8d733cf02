"""Messages that share channels (collectives/pricing/flows.py), measured ports among them."""

import math
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from collectives import ALGORITHMS, price
from collectives.pricing.event_simulation import EventQueue
from collectives.pricing.flows import Flows, max_min_rates
from collectives.pricing.networks import Link, Network, Point
from collectives.pricing.ports import Message
from collectives.pricing.topology import backbone, from_edges, named_topology
from collectives.steps import Compute, Recv, RecvReduce, Send

US = 1e-6


def network(eager=None, ranks_per_node=1, slower=1.0, busy=0.0):
    """A byte a microsecond and 10 us of latency; with traffic the other way too, `slower` times as long."""
    points = []
    for n in (1, 1_000_000):
        time = (10 + n) * US
        points.append(Point(n, time, busy, busy, n * US, slower * time, slower * time))
    link = Link(10 * US, 1 * US, points=tuple(points), eager=eager)
    return Network(link, link, ranks_per_node)


def arrivals(messages, size, **options):
    """When each message of (source, dest, bytes, microseconds at which it leaves) is there, by simulation: in us."""

    def rounds(rank, size, count):
        mine = sorted((at, dest, n) for source, dest, n, at in messages if source == rank)
        now = 0.0
        for at, dest, n in mine:
            if at > now:
                yield (Compute("wait", seconds=(at - now) * US),)
                now = at
            yield (Send(dest, "x", 0, n),)
        if receives := tuple(Recv(source, "x", 0, n) for source, dest, n, _ in messages if dest == rank):
            yield receives

    found = price(rounds, size, max(n for _, _, n, _ in messages), 1, network(**options), trace=True)
    there = {(flight.source, flight.dest): flight.arrived / US for flight in found.trace.flights}
    return [there[source, dest] for source, dest, _, _ in messages]


def rates_by_raising(routes, step=1 / 960):
    """Max-min fair rates on channels of 1, from the definition: raise all together until each stands at a full one."""
    rates, growing = [0.0] * len(routes), set(range(len(routes)))
    while growing:
        for flow in growing:
            rates[flow] += step
        for channel in set().union(*routes):
            if sum(rates[flow] for flow in range(len(routes)) if channel in routes[flow]) > 1 - step / 2:
                growing -= {flow for flow in growing if channel in routes[flow]}
    return rates


def by_small_steps(messages, step=1.0):
    """The same, by letting every message move a little at a time."""
    left = [n for _, _, n, _ in messages]
    there, now, rates_of = [0.0] * len(messages), 0.0, {}
    while any(n > 0 for n in left):
        moving = [i for i, (_, _, _, at) in enumerate(messages) if at <= now and left[i] > 0]
        if tuple(moving) not in rates_of:
            routes = [{f"out {messages[i][0]}", f"into {messages[i][1]}"} for i in moving]
            rates_of[tuple(moving)] = rates_by_raising(routes)
        rates = rates_of[tuple(moving)]
        for i, rate in zip(moving, rates, strict=True):
            left[i] -= step * rate
            if left[i] <= 0:
                there[i] = now + step + 10
        now += step
    return there


def test_two_that_leave_at_once_take_twice_as_long_both():
    assert arrivals([(1, 0, 1000, 0), (1, 2, 1000, 0)], 3) == pytest.approx([2010, 2010])


def test_two_that_come_at_once_take_twice_as_long_both():
    assert arrivals([(0, 1, 1000, 0), (2, 1, 1000, 0)], 3) == pytest.approx([2010, 2010])


def test_who_is_alone_has_all_of_the_cable():
    """The first has half of it to itself; what is left takes twice as long, and the second is alone at the end."""
    assert arrivals([(1, 0, 1000, 0), (1, 2, 1000, 500)], 3) == pytest.approx([1510, 2010])


def test_messages_to_the_same_rank_go_one_after_the_other():
    def two(rank, size, count):
        yield tuple(Send(1, "x", 0, n) if rank == 0 else Recv(0, "x", 0, n) for n in (1000, 500))

    flights = price(two, 2, 1000, 1, network(), trace=True).trace.flights
    assert [flight.arrived / US for flight in flights] == pytest.approx([1010, 1510])


@pytest.mark.parametrize("seed", range(6))
def test_any_messages_move_as_in_small_steps(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 7))
    pairs = [(s, d) for s in range(size) for d in range(size) if s != d]
    chosen = rng.permutation(len(pairs))[: int(rng.integers(2, len(pairs)))]
    messages = [(*pairs[i], int(rng.integers(100, 2000)), float(rng.integers(0, 3000))) for i in chosen]
    assert arrivals(messages, size) == pytest.approx(by_small_steps(messages), abs=4 * len(messages))


def test_nothing_hangs_on_the_order_in_which_ranks_are_walked():
    def line(rank, size, count):
        yield tuple(Send(peer, "x", 0, count) for peer in (rank - 1, rank + 1) if 0 <= peer < size)
        yield tuple(Recv(peer, "x", 0, count) for peer in (rank - 1, rank + 1) if 0 <= peer < size)

    found = {price(line, 9, 1000, 1, network()).seconds for _ in range(5)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(2010 * US)


def test_ranks_of_a_node_share_its_cable():
    def across(rank, size, count):
        yield (Send(rank + 2, "x", 0, count) if rank < 2 else Recv(rank - 2, "x", 0, count),)

    assert price(across, 4, 1000, 1, network(ranks_per_node=2)).seconds == pytest.approx(2010 * US)
    assert price(across, 4, 1000, 1, network(ranks_per_node=1)).seconds == pytest.approx(1010 * US)


def test_what_the_receiver_sends_meanwhile_delays_a_message():
    def exchange(rank, size, count):
        yield Send(1 - rank, "x", 0, count), Recv(1 - rank, "x", 0, count)

    alone = price(exchange, 2, 1000, 1, network()).seconds
    assert alone == pytest.approx(1010 * US)
    assert price(exchange, 2, 1000, 1, network(slower=1.5)).seconds == pytest.approx(1.5 * alone)


def test_the_other_direction_delays_at_the_hosts_whatever_lies_between():
    """Measured: 500 us more for 1000 us. On a trunk of a quarter of the rate it costs 500 us too, not 2000."""

    def exchange(rank, size, count):
        yield Send(1 - rank, "x", 0, count), Recv(1 - rank, "x", 0, count)

    edges = [(0, "a", 1e6, 0), ("a", "b", 0.25e6, 0), ("b", 1, 1e6, 0)]
    narrow = replace(network(slower=1.5), topology=from_edges(edges, [0, 1]))
    assert price(exchange, 2, 1000, 1, narrow).seconds == pytest.approx((4010 + 505) * US)


def test_a_send_that_waits_ends_its_round_when_it_has_left():
    """Two children one after the other, where the first message is over before the second begins; else both share."""

    def children(rank, size, count):
        if rank == 0:
            yield (Send(1, "x", 0, count),)
            yield (Send(2, "x", 0, count),)
        else:
            yield (Recv(0, "x", 0, count),)

    waits = price(children, 3, 1000, 1, network(eager=100), trace=True).trace.flights
    assert sorted(flight.arrived / US for flight in waits) == pytest.approx([1010, 2010], abs=25)
    shared = price(children, 3, 1000, 1, network(), trace=True).trace.flights
    assert [flight.arrived / US for flight in shared] == pytest.approx([2010, 2010])


def test_a_receiver_is_not_busy_while_the_cable_moves_what_waits():
    """Three senders at once: the last byte of all comes after three messages, however long a late receive takes."""

    def gather(rank, size, count):
        if rank:
            yield (Send(0, "x", 0, count),)
        else:
            yield tuple(RecvReduce(peer, "x", 0, count) for peer in range(1, size))

    assert price(gather, 4, 1000, 1, network(eager=100, busy=400 * US)).seconds < 3500 * US


@pytest.mark.parametrize("trunk", [0.25e6, 0.5e6])
def test_what_a_rested_port_lets_through_at_once_crosses_no_narrower_channel_faster(trunk):
    """A byte a microsecond behind a bucket of 1000 bytes: ten messages of 500 over a trunk take its time for all."""
    points = [
        Point(n, *[(10 + max(0, n - 1000)) * US, 0, 0, n * US, *[(10 + n) * US] * 2]) for n in (1, 500, 1000, 2000)
    ]
    link = Link(10 * US, 1 * US, points=tuple(points))
    edges = [(0, "a", 1e6, 0), ("a", "b", trunk, 0), ("b", 1, 1e6, 0)]
    narrow = Network(link, link, topology=from_edges(edges, [0, 1]))

    def stream(rank, size, count):
        yield tuple(Send(1, "x", 0, count) if rank == 0 else Recv(0, "x", 0, count) for _ in range(10))

    seconds = price(stream, 2, 500, 1, narrow).seconds
    assert 5000 / trunk <= seconds < 1.1 * 5000 / trunk


def test_a_send_that_nobody_receives_is_named():
    def wrong(rank, size, count):
        if rank == 0:
            yield (Send(1, "x", 0, count),)

    for eager in (None, 100):
        with pytest.raises(ValueError, match=r"wait for ever|nobody receives"):
            price(wrong, 2, 1000, 1, network(eager=eager))


@pytest.mark.parametrize("operation", sorted(ALGORITHMS))
def test_all_algorithms_have_a_price_not_below_that_of_their_longest_port(operation):
    for name, entry in ALGORITHMS[operation].items():
        if name.startswith("shared") or operation == "barrier":
            continue
        for eager in (None, 100):
            found = price(entry, 6, 600, 1, network(eager=eager))
            assert found.busiest * US * 0.999 < found.seconds < 60 * 600 * US, name


# ------------------------------------------------------------------------------------------ rates


def test_rates_of_known_examples():
    exact = lambda routes, capacities, limits=(): [
        rate
        for rate, _ in max_min_rates(
            routes,
            {channel: Fraction(capacity) for channel, capacity in capacities.items()},
            [Fraction(limit) for limit in limits] or [Fraction(10**9)] * len(routes),
        )
    ]
    # Equal parts of every link, and the least of those, would give "A" 5 and leave 1 unused.
    assert exact(["AB", "A", "B", "B"], {"A": 10, "B": 12}) == [4, 6, 4, 4]
    assert exact(["AB", "A", "B"], {"A": 10, "B": 3}, [99, 99, 1]) == [2, 8, 1]
    assert exact(["AA", "A"], {"A": 9}) == [3, 3]  # what crosses a channel twice counts twice
    assert exact(["AB", "A", "B"], {"A": 4, "B": 4}) == [2, 2, 2]  # two channels that fill at once
    assert max_min_rates(["", "A"], {"A": 1.0}, [5.0, math.inf]) == [(5.0, None), (1.0, "A")]
    assert max_min_rates([], {}, []) == []


@pytest.mark.parametrize("seed", range(60))
def test_every_flow_has_a_bottleneck(seed):
    rng = random.Random(seed)
    capacities = {channel: Fraction(rng.randint(1, 9)) for channel in range(6)}
    routes = [rng.sample(range(6), rng.randint(1, 4)) for _ in range(rng.randint(1, 9))]
    limits = [Fraction(rng.randint(1, 6) if rng.random() < 0.3 else 1000) for _ in routes]
    found = max_min_rates(routes, capacities, limits)
    load = {c: sum(rate for route, (rate, _) in zip(routes, found, strict=True) if c in route) for c in capacities}
    assert all(load[channel] <= capacities[channel] for channel in capacities)
    for route, limit, (rate, bottleneck) in zip(routes, limits, found, strict=True):
        if bottleneck is None:
            assert rate == limit
        else:
            beside = [other for r, (other, _) in zip(routes, found, strict=True) if bottleneck in r]
            assert bottleneck in route and load[bottleneck] == capacities[bottleneck] and rate == max(beside)


@pytest.mark.parametrize("name", ["torus:3x3", "mesh:3x3", "star:6", "fat-tree:4,4", "dragonfly:1,3,1", "backbone:6"])
def test_rates_after_any_change_are_those_of_all_flows_together(name):
    """`Flows.share` looks only at flows near a change; the rates are those of a whole filling."""
    topology = named_topology(name)
    network, hosts = Network.on(topology), len(topology.hosts)
    for seed in range(12):
        rng, queue, compared = random.Random(seed), EventQueue(), 0
        flows = Flows(network, range(hosts), hosts, queue.at, lambda *message: None)
        for _ in range(rng.randint(2, 40)):
            source, dest = rng.sample(range(hosts), 2)
            at, nbytes = rng.choice([0.0, rng.random() * 1e-4]), rng.randint(1000, 2_000_000)
            cost = network.cost_over(topology.route(source, dest), nbytes)
            queue.at(at, flows.send, Message(source, source, dest, True, Send(dest, "x", 0, nbytes), cost, nbytes))
        while queue.times:
            queue.run_next()
            moving = [flow for flow in flows.flows.values() if flow.messages]
            capacities = {i: channel.bandwidth for i, channel in enumerate(topology.channels)}
            expected = max_min_rates([f.channels for f in moving], capacities, [f.limit for f in moving])
            assert [f.rate * f.limit for f in moving] == pytest.approx([rate for rate, _ in expected], rel=1e-6)
            compared += len(moving)
        assert compared and not any(flow.messages for flow in flows.flows.values())


# ------------------------------------------------------------------------------------------ messages


def ends(messages, edges, hosts):
    """When messages (start, source, dest, bytes) are there, on a graph of channels."""
    network = Network.on(from_edges(edges, hosts, directed=True))
    index = {host: i for i, host in enumerate(hosts)}

    def rounds(rank, size, count):
        now = 0.0
        for start, source, dest, nbytes in sorted(messages):
            if index[source] == rank:
                if start > now:
                    yield (Compute("wait", seconds=start - now),)
                yield (Send(index[dest], "x", 0, nbytes),)
                now = start
        yield tuple(Recv(index[source], "x", 0, nbytes) for _, source, dest, nbytes in messages if index[dest] == rank)

    flights = price(rounds, len(hosts), 10**6, 1, network, trace=True).trace.flights
    there = {(hosts[flight.source], hosts[flight.dest]): flight.arrived for flight in flights}
    return [there[source, dest] for _, source, dest, _ in messages]


def test_messages_that_start_together_end_one_after_the_other():
    """x crosses A (10 bytes a second) and B (30), y only A, z only B: rates 5, 5, 25 at first."""
    edges = [("x", "a1", 1e9, 0), ("y", "a1", 1e9, 0), ("a1", "a2", 10, 0), ("a2", "b1", 1e9, 0), ("z", "b1", 1e9, 0)]
    edges += [("b1", "b2", 30, 0), ("b2", "X", 1e9, 0), ("b2", "Z", 1e9, 0), ("a2", "Y", 1e9, 0)]
    edges += [(end, start, 1e9, 0) for end in "XYZ" for start in "xyz"]  # a way back, so that all is connected
    messages = [(0, "x", "X", 100), (0, "y", "Y", 60), (0, "z", "Z", 240)]
    assert ends(messages, edges, list("xyzXYZ")) == pytest.approx([16, 12, 9.6])


def test_a_message_takes_its_share_from_those_that_move():
    edges = [("x", "a1", 1e9, 0), ("y", "a1", 1e9, 1), ("a1", "a2", 10, 0), ("a2", "X", 1e9, 0), ("a2", "Y", 1e9, 0)]
    edges += [(end, start, 1e9, 0) for end in "XY" for start in "xy"]
    assert ends([(0, "x", "X", 100), (2, "y", "Y", 30)], edges, list("xyXY")) == pytest.approx([13, 9])


@pytest.mark.parametrize("p", [2, 7, 8])
def test_where_no_channel_is_shared_prices_are_those_without_channels_to_the_last_digit(p):
    """And where channels are shared by what one rank sends or gets at once, sums end together."""
    plain = Network(Link(2e-6, 1 / 12.5e9), Link(2e-6, 1 / 12.5e9))
    star = Network.star(p, 12.5e9, 1e-6)
    shared = 0
    for operation, entries in ALGORITHMS.items():
        for name, entry in entries.items():
            if name.startswith("shared"):
                continue
            without = price(entry, p, None if operation == "barrier" else 100 * p, 4, plain)
            on_star = price(entry, p, None if operation == "barrier" else 100 * p, 4, star, trace=True)
            full = {share.rate for share in on_star.trace.shares}
            if max(full - {12.5e9}, default=0) == 0:
                assert on_star.seconds == without.seconds and (on_star.finish == without.finish).all(), name
            else:
                shared += 1
                assert on_star.seconds == pytest.approx(without.seconds, rel=0.03), name
    assert shared >= (p > 2) * 5


def test_all_bytes_arrive_over_the_channels_of_their_route():
    topology = named_topology("fat-tree:k=4,oversubscription=4")
    got = price(ALGORITHMS["alltoall"]["pairwise"], 16, 1600, 4, Network.on(topology), trace=True)
    moved = sum((share.end - share.start) * share.rate for share in got.trace.shares)
    assert moved == pytest.approx(got.bytes, rel=1e-9)
    hops = [len(topology.route(f.source, f.dest).channels) * (f.send.hi - f.send.lo) * 4 for f in got.trace.flights]
    assert sum(got.traffic) == sum(hops)


def test_a_shared_backbone_serves_all_at_once():
    """8 ranks, 4 MB, 1.25 GB/s a rank and 4 times that for all: by hand, and as SimGrid finds."""
    network = Network.on(backbone(8, 1.25e9, 5e-6, 5e9))
    times = {name: price(ALGORITHMS["allreduce"][name], 8, 10**6, 4, network).seconds for name in ("ring", "doubling")}
    assert times == pytest.approx({"ring": 14 * (10e-6 + 2 * 0.4e-3), "doubling": 3 * (10e-6 + 2 * 3.2e-3)})
    assert price(ALGORITHMS["allreduce"]["rabenseifner"], 8, 10**6, 4, network).seconds == pytest.approx(11.26e-3)
