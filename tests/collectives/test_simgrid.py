"""Prices on topologies against SimGrid's flow model: another program, the same parameters.

    apt-get install python3-simgrid

Every algorithm of the registry by messages, on five networks. Latencies are 0, as SimGrid shares links by the
reciprocal of the latency where latencies differ; on a star, where they are equal, they count.
"""

import json
import subprocess
from functools import cache, partial
from pathlib import Path

import pytest

from collectives import ALGORITHMS, Recv, RecvReduce, Send, price
from collectives.algorithms.registry import NODES, by_messages
from collectives.pricing.event_simulation import EventSimulation
from collectives.pricing.networks import Network
from collectives.pricing.topology import backbone
from collectives.steps import is_live

PYTHON, REPLAY = "/usr/bin/python3", Path(__file__).with_name("simgrid_replay.py")
BANDWIDTH = 1.25e9
SIDES = {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8)}


@cache
def missing():
    """Why there is no SimGrid; empty where there is one."""
    try:
        found = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if found.returncode == 0 else "no python3-simgrid"


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"SimGrid: {missing()}")


def networks(p):
    return [
        Network.star(p, BANDWIDTH, 0),
        Network.star(p, BANDWIDTH, 5e-6),
        Network.on(backbone(p, BANDWIDTH, 0, 4 * BANDWIDTH)),
        Network.fat_tree(4 if p <= 16 else 8, 4, BANDWIDTH, 0),
        Network.torus(SIDES[p], BANDWIDTH, 0),
        Network.dragonfly(2, 4, 2, BANDWIDTH, 0),
    ]


def case_of(entry, network, p, count):
    """What simgrid_replay.py reads."""
    options = {"nodes": network.nodes_of(p)} if NODES in entry.needs else {}
    ranks, pairs = [], set()
    for rank in range(p):
        ranks.append([])
        for steps in entry.rounds(rank, p, count, **options):
            live = [step for step in steps if is_live(step)]
            sends = [["send", s.peer, 4 * (s.hi - s.lo)] for s in live if type(s) is Send]
            ranks[-1].append(sends + [["recv", s.peer] for s in live if type(s) in (Recv, RecvReduce)])
            pairs |= {(rank, s.peer) for s in live if type(s) is Send}
    channels = [[channel.bandwidth, channel.latency] for channel in network.topology.channels]
    routes = [[a, b, network.topology.route(a, b).channels] for a, b in sorted(pairs)]
    return {"channels": channels, "routes": routes, "ranks": ranks}


def compare(p, sizes, chosen):
    """Refuse prices that are more than 1% off."""
    rows = [
        (
            f"{operation} {name}, {p} ranks, {nbytes} bytes, {network.topology}",
            entry,
            network,
            nbytes // 4 // p * p or p,
        )
        for operation in ALGORITHMS
        if operation != "barrier"
        for name, entry in by_messages(operation).items()
        for network in networks(p)
        for nbytes in sizes
    ]
    rows = rows[::chosen]
    cases = json.dumps([case_of(entry, network, p, count) for _, entry, network, count in rows])
    done = subprocess.run([PYTHON, REPLAY], input=cases, capture_output=True, text=True, check=True)
    for (case, entry, network, count), seconds in zip(rows, json.loads(done.stdout), strict=True):
        assert price(entry, p, count, 4, network).seconds == pytest.approx(seconds, rel=0.01), case


def test_prices_are_those_of_simgrid():
    compare(8, [1 << 20], chosen=7)


class SendersWaitForArrival(EventSimulation):
    """As SimGrid has it: a send is over when its message is there, not when it has left."""

    def left_channels(self, message, now, there):
        there = self.in_order(message, there)
        self.queue.at(there, self.arrive, message)
        if not message.cost.buffered:
            self.queue.at(there, lambda rank, time: self.one_sent(rank, time, time), self.ranks[message.sender])


@pytest.mark.parametrize("chosen", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_with_latencies_on_a_shared_channel_the_end_of_a_send_is_all_the_difference(chosen):
    """LogGP's sender goes on when its message has left, SimGrid's a latency later: then prices are equal here, too."""
    p, network = 8, Network.on(backbone(8, BANDWIDTH, 5e-6, 4 * BANDWIDTH))
    rows = [
        (operation, name, entry, nbytes // 4 // p * p)
        for operation in ALGORITHMS
        if operation != "barrier"
        for name, entry in by_messages(operation).items()
        for nbytes in (4 << 10, 1 << 20)
    ]
    chain = [row for row in rows if row[:2] == ("broadcast", "scatter_allgather")]
    rows = chain + rows[::chosen]
    cases = json.dumps([case_of(entry, network, p, count) for *_, entry, count in rows])
    done = subprocess.run([PYTHON, REPLAY], input=cases, capture_output=True, text=True, check=True)
    off = []
    for (operation, name, entry, count), seconds in zip(rows, json.loads(done.stdout), strict=True):
        options = {"nodes": network.nodes_of(p)} if NODES in entry.needs else {}
        program = partial(entry.rounds, size=p, count=count, **options)
        simulated = SendersWaitForArrival(program, name, p, 4, network, p, False)
        assert simulated.finish.max() == pytest.approx(seconds, rel=0.01), (operation, name, count)
        off.append(abs(price(entry, p, count, 4, network).seconds / seconds - 1))
    assert max(off[:2]) > 0.02, "what LogGP has otherwise"


@pytest.mark.exhaustive
@pytest.mark.parametrize("p", SIDES)
def test_prices_of_all_algorithms_are_those_of_simgrid(p):
    compare(p, [4 << 10, 1 << 20, 64 << 20], chosen=1)
