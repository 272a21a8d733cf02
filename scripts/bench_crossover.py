"""Attention of sequences that hosts share, by a ring and by alltoalls (Ulysses), and experts' alltoalls: the prices.

    python scripts/bench.py crossover

In the lab of netlab.py (root only): hosts with a rank each. The network between them is measured, and in the same job
what one rank computes: a layer of causal attention on a whole sequence, and the scores alone, on all hosts at once, as
they share the cores of one machine. Then the layer is computed by all of them together, forward and backward, for
sequences of several lengths and for several numbers of heads, in a ring, by heads, or both. A price is what one rank
computes, divided among them, and what is waited for (parallel/planning/context_costs.py).

Rows of experts hold one of the four alltoallv of a layer, at an even load, against `Group.alltoall`
(parallel/planning/group_costs.py).

More hosts than cores flatter a ring and Ulysses alike: while one rank waits for a message another one computes.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import netlab
import numpy as np
from benchmarking import ETHERNET, Row, arguments, in_lab

import nn
from collectives.pricing.networks import Network
from nn.layers.attention import MultiHeadAttention
from parallel.planning.context_costs import ring, ulysses
from parallel.planning.group_costs import Group
from parallel.strategies.context.attention import ContextGroups
from parallel.strategies.context.cutting import cut
from parallel.strategies.context.strategy import context_degrees

FEATURES, ITEM = 128, 4
LENGTHS, HEADS = (256, 1024, 2048, 4096), (1, 2, 4)
LABS = ((2, 100), (2, 1000), (4, 100), (4, 1000))  # hosts, Mbit/s
POSITIONS = (256, 4096)  # of a rank, that choose two experts each
SIZES = tuple(4**k for k in range(2, 12))  # bytes of the messages that are measured
RUNS, REST = 7, 4e-3  # a bucket of the lab's cables is full again then


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Measured, price: lengths at four heads, then heads at one length, then experts."""
    if reason := netlab.reason_against():
        yield Row("crossover", None, note=reason)
        return
    for hosts, rate in LABS[:1] if quick else LABS:
        place = f"{hosts} hosts, {rate} Mbit/s"
        cases = [each for each in attention_cases(hosts) if not quick or each[0] <= 256]
        if not any(only in name for name in (*(case(place, *each) for each in cases), f"{place}, experts")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            given = [Path(folder) / "network.json", 2 if quick else RUNS, json.dumps(cases)]
            result = in_lab(__file__, given, hosts, rate, options=ETHERNET)
            network = Network.load(given[0])
        for (length, heads, way), seconds in zip(cases, result["attention"], strict=True):
            one, scores = result["one"][f"{length}, {heads}"]
            said = priced(length, way, hosts, one, scores, network)
            note = f"{min(seconds):.3g} to {max(seconds):.3g} ms; one rank {one:.3g} ms, scores forward {scores:.3g} ms"
            row = Row(case(place, length, heads, way), median(seconds), said, "price", "ms", hosts, 1, note)
            yield from [row] if only in row.case else []
        for positions, seconds in zip(POSITIONS, result["experts"], strict=True):
            said = 1e3 * Group(hosts).alltoall(2 * positions * FEATURES * ITEM, network)
            name = f"{place}, experts' alltoallv, {positions:,} positions a rank"
            note = f"{min(seconds):.3g} to {max(seconds):.3g} ms; counts before it {result['counts']:.3g} ms"
            yield from [Row(name, median(seconds), said, "price", "ms", hosts, 1, note)] if only in name else []


def attention_cases(hosts: int) -> list[tuple[int, int, str]]:
    """(positions, heads, way) of a lab."""
    both = [f"ring:{hosts // 2},ulysses:2"] if hosts > 2 else []
    found = [(length, max(HEADS), way) for length in LENGTHS for way in ("ring", "ulysses", *both)]
    for heads in HEADS[:-1]:
        ways = ["ring", *["ulysses"] * (heads % hosts == 0), *(both if heads % 2 == 0 else [])]
        found += [(LENGTHS[1], heads, way) for way in ways]
    return found


def case(place: str, length: int, heads: int, way: str) -> str:
    return f"{place}, {length:,} positions, {heads} head{'s' * (heads > 1)}, {way}"


def priced(length: int, way: str, hosts: int, one: float, scores: float, network: Network) -> float:
    """Milliseconds of a layer, forward and backward, of those that one rank takes alone."""
    degrees = context_degrees(way, hosts)
    keys = 2 * ITEM * length * FEATURES
    around = ring(keys / degrees.heads, scores / 1e3 / degrees.heads, Group(degrees.ring, degrees.heads), network)
    dealt = ulysses(keys / degrees.ring, Group(degrees.heads), network)
    return one / hosts + 1e3 * (around.seconds + dealt.seconds)


# ------------------------------------------------------------------------------------------------ on the hosts


def work(file: str, runs: int, cases: list) -> None:
    """Measure the network, one rank, and all together; rank 0 prints milliseconds as a line of JSON (collective)."""
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.pricing.measure import measure_network
    from parallel.mesh import Ranks
    from parallel.strategies.expert.dispatch import ExpertRanks

    world = MPI.COMM_WORLD
    measured = measure_network(world, SIZES[:: 1 if runs == RUNS else 3], 0.05 if runs == RUNS else 0.005)
    if world.rank == 0:
        measured.save(file)
    communicator = Communicator(world)

    def timed(call) -> list[float]:
        """Milliseconds of the slowest rank, in each run but the first."""
        found = []
        for _ in range(1 + runs):
            time.sleep(REST)
            world.Barrier()
            start = time.perf_counter()
            call()
            found.append(1e3 * world.allreduce(time.perf_counter() - start, MPI.MAX))
        return found[1:]

    one = {}
    for length, heads in sorted({(length, heads) for length, heads, _ in cases}):
        layer = MultiHeadAttention(FEATURES, heads, causal=True, attention="blocks:128")
        network = nn.Network(layer, (length, FEATURES))
        ctx, scores = network.context(), np.ones((3, 1, heads, length, FEATURES // heads), np.float32)
        attend = lambda layer=layer, scores=scores, ctx=ctx: layer.attend(*scores, np.empty_like(scores[0]), ctx)
        one[f"{length}, {heads}"] = median(timed(one_pass(network, length))), median(timed(attend))
    times = []
    for length, heads, way in cases:
        groups = ContextGroups(context_degrees(way, world.size), world.rank)
        groups.connect(communicator, Ranks)
        layer = MultiHeadAttention(FEATURES, heads, causal=True, attention="blocks:128")
        network = cut(nn.Network(layer, (length, FEATURES)), groups)
        times.append(timed(one_pass(network, length)))
        groups.close()
    experts, group = [], ExpertRanks(communicator)
    for positions in POSITIONS:
        sent = np.full((world.size, 1), 2 * positions // world.size)
        given, out = (np.ones((int(sent.sum()), FEATURES), np.float32) for _ in range(2))
        trip = lambda given=given, sent=sent, out=out: group.start(given, sent, sent, out)()
        experts.append(timed(trip))
    counts = median(timed(lambda: group.plan(np.ones(world.size, int))))
    communicator.release()
    if world.rank == 0:
        print(json.dumps({"attention": times, "one": one, "experts": experts, "counts": counts}))


def one_pass(network: nn.Network, length: int):
    """Return what runs a layer forward and backward on one sequence, or on this rank's part of it."""
    ctx, parameters = network.context(), network.layout.zeros(np.float32)
    ctx.network_context.input_gradient = True
    network.layout.initialize(parameters, 0)
    p, g = network.layout.views(parameters), network.layout.views(np.zeros_like(parameters))
    x = np.random.default_rng(0).standard_normal((1, length, FEATURES), np.float32)

    def call() -> None:
        y, saved = network.forward(p, x, ctx)
        network.backward(p, g, y, saved, ctx)

    return call


if __name__ == "__main__":
    file, runs, cases = arguments(__doc__)
    work(file, int(runs), json.loads(cases))
