"""Messages that share a measured cable (collectives/pricing/cables.py)."""

import numpy as np
import pytest

from collectives import ALGORITHMS, price
from collectives.pricing.networks import Link, Network, Point
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
    """When each message of (source, dest, bytes, microseconds at which it leaves) is there, by the clock: in us."""

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


def by_small_steps(messages, step=0.25):
    """The same, by letting every message move a little at a time."""
    left = [n for _, _, n, _ in messages]
    there, now = [0.0] * len(messages), 0.0
    while any(n > 0 for n in left):
        moving = [i for i, (_, _, _, at) in enumerate(messages) if at <= now and left[i] > 0]
        for i in moving:
            out = sum(messages[j][0] == messages[i][0] for j in moving)
            into = sum(messages[j][1] == messages[i][1] for j in moving)
            left[i] -= step / max(out, into)
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


@pytest.mark.parametrize("seed", range(12))
def test_any_messages_move_as_in_small_steps(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 7))
    pairs = [(s, d) for s in range(size) for d in range(size) if s != d]
    chosen = rng.permutation(len(pairs))[: int(rng.integers(2, len(pairs)))]
    messages = [(*pairs[i], int(rng.integers(100, 2000)), float(rng.integers(0, 3000))) for i in chosen]
    assert arrivals(messages, size) == pytest.approx(by_small_steps(messages), abs=len(messages))


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
