"""The network under the ranks, measured: what messages and memory cost, and whether the clock's prices are then true.

    python scripts/bench.py network --network FILE                         two ranks of this machine
    python scripts/bench.py network --network FILE --table FILE            and the algorithms to choose there, derived
    srun -n 4 python -m mpi4py scripts/bench_network.py FILE               a cluster's nodes, or mpiexec's hosts

FILE is what `Network.load` reads and `collectives.price` takes: messages, reductions and copies of many lengths, the
bandwidth of memory and what it costs to meet there (collectives/pricing/measure.py). The first rows hold
ping-pongs of other lengths, which it has not seen, against what it says.

Then every algorithm of the registry runs, on vectors of 4 KiB ... 16 MiB, against what the clock says for the measured
network: here with two ranks, and in the lab of netlab.py (root only) with a rank on each of four hosts, and two on each
of two. Those in node memory run where all ranks share a node, on the lengths for which the library takes them. Each run
begins (between nodes after a rest) when all ranks have met, and ends with the last rank. Runs in which a rank lost its
core to another process are not calm, and do not count where there are enough others. The note says within what half of
the runs lie. Where price and median are more than 15% apart, it says whether the price is within that, and so no more
off than one run from the next, and what of it, in the clock's trace, the last rank waited for: so many messages of so
many bytes, busy ports, sums, copies, barriers. The last rows of a lab (`--only model`) hold prices by the model without
one refinement each against those with all: the root of the mean square of log(price / measured).

Two cores may talk to each other at one speed now and at a half of it seconds later. So here network and algorithms are
measured in alternating runs: rows hold the median of medians against the price on the median network, and the notes
what both were in single turns.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

import netlab
import numpy as np
from benchmarking import ETHERNET, Row, arguments, in_lab

from collectives import ALGORITHMS
from collectives.algorithms.registry import NODES, SEGMENT_BYTES, SHARED_MEMORY
from collectives.choosing.derive import tables
from collectives.choosing.selection import save
from collectives.pricing.critical_path import waits
from collectives.pricing.networks import Network
from collectives.pricing.price import price
from collectives.steps import chunk
from parallel.launch import launcher

RANKS = 2
LABS, RATE = ((4, 1), (2, 2)), 400  # hosts, ranks a host; Mbit/s
KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(3 * 4**k for k in range(1, 12))  # 12 B ... 12 MiB, between those of the points
VECTORS = (4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB)
QUICK = (4 * KIB, 256 * KIB)
SECONDS = 0.2  # for each length
TURNS = 7  # where all ranks share a node; an odd number, or medians of lengths and ranks would be fractions
ITEMSIZE = 4
NEAR = 0.15  # of the measured median
REST = 4e-3  # seconds in which a token bucket fills
ENOUGH, MOST = 5, 50  # runs


def rows(
    quick: bool = False, only: str = "", network: str | Path = "network.json", table: str | None = None
) -> Iterator[Row]:
    """Measured ping-pongs against the points between which they lie; reductions and copies; prices of algorithms."""
    lines = []

    def take(line: str) -> None:
        lines.append(line) if line.startswith("{") else sys.stderr.write(line)

    vectors = QUICK if quick else VECTORS
    given = [1 if quick else TURNS, 0.005 if quick else SECONDS, *vectors]
    status = launcher.run([__file__, network, *given], RANKS, timeout=600, stdout=take)
    if status:
        raise RuntimeError(f"network: {launcher.ending(status)}")
    measured = Network.load(network)
    if table:
        save(table, tables(measured))
    result = json.loads(lines[-1])
    yield from (row for row in compare(result, measured) if only in row.case)
    yield from (row for row in prices(result, measured, f"{RANKS} ranks") if only in row.case)
    for hosts, slots in () if quick else LABS:
        place = f"{hosts} hosts x {slots}"
        if only and not any(only in text for text in (place, "model", *ALGORITHMS)):
            continue
        if reason := netlab.reason_against():
            yield Row(place, None, note=reason)
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "network.json"
            try:
                result = in_lab(__file__, [file, *given], hosts, RATE, slots, options=["--map-by", "slot", *ETHERNET])
            except RuntimeError as error:
                yield Row(place, None, note=f"failed: {error}")
                continue
            for rows_of in (prices, refinements):
                yield from (row for row in rows_of(result, Network.load(file), place) if only in row.case)


def compare(result: dict, network: Network) -> Iterator[Row]:
    """The rows of messages and memory."""
    ranks, cores = result["ranks"], launcher.cores()
    crowd = f"; {ranks} ranks share {cores} cores" if ranks > cores else ""
    for level, points in result["levels"].items():
        link = getattr(network, level)
        bandwidth = f"{1e-9 / link.beta:.3g} GB/s" if link.beta else "no cost a byte"
        note = f"alpha {1e6 * link.alpha:.3g} us, {bandwidth}, overhead {1e6 * link.overhead:.3g} us{crowd}"
        for nbytes, seconds in points:
            cost = link.cost(nbytes)
            said = cost.seconds
            yield Row(f"message {level}, {nbytes} B", 1e6 * seconds, 1e6 * said, "points", "us", ranks, 1, note)
    for name, cost in (("reduction", network.reducing(MIB)), ("copy", network.copying(MIB))):
        note = f"{1e-9 * MIB / cost:.3g} GB/s of results, all ranks at once{crowd}"
        yield Row(f"{name} in memory, 1 MiB", 1e6 * cost, None, "", "us", ranks, 1, note)
    for members, seconds in network.barriers:
        note = f"memory of the node: {1e-9 / network.memory:.3g} GB/s read and written{crowd}"
        yield Row(f"barrier of {members} ranks in memory", 1e6 * seconds, None, "", "us", members, 1, note)


def prices(result: dict, network: Network, place: str) -> Iterator[Row]:
    """A row for each algorithm and length: measured, price."""
    turns = [Network.of(fields) for fields in result["networks"]]
    for measured in zip(*result["schedules"], strict=True):
        operation, name, nbytes = measured[0][:3]
        medians, calm, runs, lower, upper = zip(*(row[3:] for row in measured), strict=True)
        entry, (count, options) = ALGORITHMS[operation][name], call(operation, name, nbytes, result["nodes"])

        def priced(network=network, trace=False, entry=entry, count=count, options=options):
            return price(entry, result["ranks"], count, ITEMSIZE, network, trace, **options)

        seconds, said = median(medians), priced().seconds
        spread = float(np.quantile(lower, 0.25)), float(np.quantile(upper, 0.75))  # neither of the worst turn
        note = f"{sum(calm)} of {sum(runs)} runs calm, half of them in {span(spread)}"
        if len(turns) > 1:
            note += f"; in single turns {span(medians)}, priced {span(priced(turn).seconds for turn in turns)}"
        if abs(said - seconds) > NEAR * seconds:
            noise = "within" if spread[0] <= said <= spread[1] else "beyond"
            off = f"{said / seconds - 1:+.0%}, {noise} what runs differ by"
            note += f"; priced {off}: of {1e6 * said:.4g} us {waits(priced(trace=True))}"
        size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
        case = f"{place}, {operation} {name}" + (f", {size}" if nbytes else "")
        yield Row(case, 1e6 * seconds, 1e6 * said, "price", "us", result["ranks"], 1, note)


def refinements(result: dict, network: Network, place: str) -> Iterator[Row]:
    """A row for each refinement of the model: how far prices are off without it, beside those with all."""
    schedules = result["schedules"][0]

    def logs(network) -> np.ndarray:
        found = []
        for operation, name, nbytes, seconds, *_ in schedules:
            count, options = call(operation, name, nbytes, result["nodes"])
            entry = ALGORITHMS[operation][name]
            found.append(price(entry, result["ranks"], count, ITEMSIZE, network, **options).seconds / seconds)
        return np.log(found)

    root = lambda values: float(np.sqrt((values**2).mean()))
    whole = root(logs(network))
    for name, other in {"model with all refinements": network, **without_one(network)}.items():
        found = logs(other)
        near = np.mean(np.abs(np.expm1(found)) <= NEAR)
        note = f"{near:.0%} of {len(found)} prices within {NEAR:.0%} of what was measured"
        yield Row(f"{place}, {name}", root(found), whole, "all refinements", "rms", result["ranks"], 1, note)


def without_one(network: Network) -> dict[str, Network]:
    """Return the measured network without one refinement each, by what is missing."""

    def changed(level, change):
        link = getattr(network, level)
        points = tuple(point._replace(**change(point, link.cost(point.nbytes))) for point in link.points)
        return replace(network, **{level: replace(link, points=points)})

    def at_the_rate(point, cost):
        more = cost.gap - cost.held
        return {name: getattr(point, name) + more for name in ("time", "both", "exchange")}

    one_way = lambda point, cost: {"both": point.time, "exchange": point.time}
    lines = {level: replace(getattr(network, level), points=()) for level in ("inside", "between")}
    return {
        "model without credit": changed("between", lambda point, cost: {"gap": cost.held}),
        "model with each message at the rate of a stream": changed("between", at_the_rate),
        "model without both directions": changed("between", one_way),
        "model with partners as a ring": changed("between", lambda point, cost: {"exchange": point.both}),
        "model of a straight line": replace(network, **lines),
        "model without both directions inside a node": changed("inside", one_way),
    }


def span(seconds: Iterable[float]) -> str:
    """Microseconds from the least to the most."""
    lowest, *_, highest = sorted(seconds)
    return f"{1e6 * lowest:.4g}-{1e6 * highest:.4g} us"


def median_network(networks: Sequence[Network]) -> Network:
    """Return the median of alternating runs, of the lengths that all have."""

    def merge(each):
        if isinstance(each[0], dict):
            return {name: merge([fields[name] for fields in each]) for name in each[0]}
        if not isinstance(each[0], list | tuple):
            return median(each) if isinstance(each[0], float) else each[0]
        lengths = set.intersection(*({point[0] for point in points} for points in each))
        kept = [[point for point in points if point[0] in lengths] for points in each]
        return [tuple(map(median, zip(*points, strict=True))) for points in zip(*kept, strict=True)]

    return Network.of(merge([asdict(network) for network in networks]))


def call(operation: str, name: str, nbytes: int, nodes: list[int]) -> tuple[int | None, dict]:
    """Elements and options of an algorithm on a vector of so many bytes, as a communicator would run it."""
    entry, options = ALGORITHMS[operation][name], {}
    if NODES in entry.needs:
        options["nodes"] = nodes
    if entry.pipelined:
        options["segment"] = SEGMENT_BYTES // ITEMSIZE
    count = nbytes // ITEMSIZE
    if operation == "alltoall":  # blocks of one length
        count = max(1, count // len(nodes)) * len(nodes)
    return (None if operation == "barrier" else count), options


def work(file: str, turns: int, seconds: float, vectors: list[int]) -> None:
    """Measure, write the file, and print ping-pongs and schedules as a line of JSON (collective)."""
    from mpi4py import MPI

    from collectives.failures.launch_check import nodes_of
    from collectives.pricing.measure import measure_network, neighbours, ping_pong, quietly, repeated, typical

    world = MPI.COMM_WORLD
    names = nodes_of(world)
    nodes = [sorted(set(names), key=names.index).index(name) for name in names]
    networks, schedules = [], []
    for _ in range(turns if len(set(nodes)) == 1 else 1):
        networks.append(measure_network(world, seconds=seconds))
        schedules.append(measure_schedules(world, nodes, seconds, vectors))
    levels = {}
    for level, peers in zip(("inside", "between"), neighbours(world), strict=True):
        if peers:
            pair = world.Split(0 if world.Get_rank() in (0, peers[0]) else MPI.UNDEFINED)
            if pair != MPI.COMM_NULL:
                play = partial(ping_pong, pair, rest=REST if level == "between" else 0.0)
                levels[level] = []
                for nbytes in SIZES:
                    times = [
                        there_and_back for there_and_back, _ in repeated(pair, partial(play, nbytes), seconds, True)
                    ]
                    levels[level].append((nbytes, typical(times) / 2))
                pair.Free()
        quietly(world)
    if world.Get_rank() == 0:
        median_network(networks).save(file)
        told = {"ranks": world.Get_size(), "nodes": nodes, "levels": levels, "schedules": schedules}
        print(json.dumps(told | {"networks": [asdict(network) for network in networks]}), flush=True)


def measure_schedules(world, nodes: list[int], seconds: float, vectors: list[int]) -> list[tuple]:
    """(operation, algorithm, bytes, median seconds, calm runs, runs, quartiles) of the registry (collective)."""
    from collectives import Communicator
    from collectives.node_memory.window import SharedWindow

    communicator, ahead, schedules = Communicator(world), clocks(world), []
    window = SharedWindow(world) if len(set(nodes)) == 1 else None
    rest = REST if len(set(nodes)) > 1 else 0.0
    for nbytes in vectors:
        x, y = (np.ones(nbytes // ITEMSIZE, "f4") for _ in "xy")
        for operation, entries in ALGORITHMS.items():
            for name in entries:
                both = NODES in entries[name].needs and SHARED_MEMORY in entries[name].needs
                if both or (operation == "barrier" and nbytes != vectors[0]):
                    continue
                count, options = call(operation, name, nbytes, nodes)
                given = [world.Get_rank(), world.Get_size(), *([] if count is None else [count])]
                if entries[name].needs == {SHARED_MEMORY}:  # two levels are made of these and of messages
                    plan = in_memory(window, operation, name, nbytes)
                else:
                    plan = communicator.compile(entries[name].rounds(*given, **options), x=x, y=y)
                if plan is None:
                    continue
                runs, until = [], time.perf_counter() + seconds
                while world.bcast(len(runs) <= ENOUGH or (len(runs) < MOST and time.perf_counter() < until)):
                    x.fill(1)
                    runs.append(one_run(world, plan, ahead, rest))
                plan.free()
                runs = runs[1:]  # the first connects the ranks
                calm = [taken for taken, lost in runs if not lost]
                counted = calm if len(calm) >= ENOUGH else [taken for taken, _ in runs]
                lower, taken, upper = np.quantile(counted, (0.25, 0.5, 0.75)).tolist()
                schedules.append((operation, name, nbytes if count else 0, taken, len(calm), len(runs), lower, upper))
    communicator.release()
    if window:
        window.free()
    return schedules


def in_memory(window, operation: str, name: str, nbytes: int):
    """The plan that runs an algorithm of node memory, or None where the library takes another one (collective)."""
    from collectives.node_memory.plans import SMALL_BYTES, SMALL_PRIVATE_BYTES

    if window is None:
        return None
    if operation == "barrier":
        return window.barrier()
    small = SMALL_PRIVATE_BYTES if operation == "allreduce" else SMALL_BYTES
    takes = {"shared_small": nbytes <= small, "shared_slots": True, "shared_arrays": nbytes > SMALL_BYTES}
    if not takes[name] or (name == "shared_slots" and "shared_small" in ALGORITHMS[operation] and nbytes <= small):
        return None
    count, rank = nbytes // ITEMSIZE, window.rank
    x = window.empty(count, "f4") if name == "shared_arrays" else np.empty(count, "f4")
    x.fill(1)
    block = slice(*chunk(count, window.size, rank))
    return {
        "allreduce": lambda: window.allreduce(None, x),
        "reduce": lambda: window.reduce(x, np.empty_like(x) if rank == 0 else None),
        "reduce_scatter": lambda: window.reduce_scatter(x, np.empty_like(x[block])),
        "allgather": lambda: window.allgather(None, x),
        "broadcast": lambda: window.broadcast(x),
    }[operation]()


def one_run(world, plan, ahead: float, rest: float) -> tuple[float, int]:
    """(seconds from when the last rank began until the last has ended, how often one lost its core) (collective)."""
    if rest:
        time.sleep(rest)
    world.Barrier()
    lost = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    begin = time.perf_counter()
    plan()
    end = time.perf_counter()
    lost = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - lost
    all_of_them = world.allgather((begin - ahead, end - ahead, lost))
    begins, ends, losses = zip(*all_of_them, strict=True)
    return max(ends) - max(begins), sum(losses)


def clocks(world) -> float:
    """How far this rank's clock is ahead of that of rank 0: from the ping-pong that was quickest (collective)."""
    ahead = 0.0
    for peer in range(1, world.Get_size()):
        if world.Get_rank() == 0:
            for _ in range(20):
                world.send(None, peer)
                world.recv(source=peer)
                world.send(time.perf_counter(), peer)
        elif world.Get_rank() == peer:
            tries = []
            for _ in range(20):
                world.recv(source=0)
                begin = time.perf_counter()
                world.send(None, 0)
                theirs = world.recv(source=0)
                end = time.perf_counter()
                tries.append((end - begin, (begin + end) / 2 - theirs))
            ahead = min(tries)[1]
        world.Barrier()
    return ahead


if __name__ == "__main__":
    file, *given = arguments(__doc__)
    turns, seconds, *vectors = given or [TURNS, SECONDS, *VECTORS]
    work(file, int(turns), float(seconds), [int(nbytes) for nbytes in vectors])
