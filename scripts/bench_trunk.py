"""Four hosts on two switches with a trunk between them: schedules that share it, measured against their prices.

    python scripts/bench.py trunk

In the lab of netlab.py (root only) with cables of 200 Mbit/s. The network between hosts is measured without the trunk;
then hosts 1, 2 and 3, 4 hang on switches of their own, joined by a trunk of 100 Mbit/s, and every price is on that
topology (collectives/pricing/topology.py). Rows are allreduces of the registry, the one that is chosen where nobody
asks for one ("auto"), one that a search has found for network and length (collectives/synthesis.py), and messages of
pipelines: PipeDream on four stages, and 1F1B on two with two replicas, placed so that pipelines, or replicas, cross the
trunk. Ranks sleep where stages would compute: the hosts share the cores of one machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import netlab
import numpy as np
from bench_network import clocks, one_run
from benchmarking import ETHERNET, Row, arguments, in_lab

from collectives import ALGORITHMS, synthesize
from collectives.algorithms.registry import NODES
from collectives.pricing.networks import Network
from collectives.pricing.price import price
from collectives.pricing.topology import LATENCY, from_edges
from collectives.steps import Compute, Recv, RecvReduce, Send
from collectives.synthesis import Schedule
from parallel.planning.topology_costs import all_pipelines
from parallel.strategies.pipeline.lowering import Stage, lower
from parallel.strategies.pipeline.schedules import rows as rows_of

HOSTS, RATE, TRUNK = 4, 200, 100  # Mbit/s
ITEMSIZE = 4
VECTORS = (256 << 10, 2 << 20, 16 << 20)
LONG = 8 << 20  # bytes from which on only some allreduces run, a few times
ALLREDUCES = ("ring", "doubling", "rabenseifner", "double_tree", "reduce_broadcast")
PLACEMENTS = {"in order": [0, 1, 2, 3], "dealt out": [0, 2, 1, 3]}
ACTIVATION, COMPUTING, MICRO = 256 << 10, 5e-3, 6  # bytes and seconds of a stage, micro-batches
RUNS, REST = 9, 4e-3


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Measured, price."""
    if reason := netlab.reason_against():
        yield Row("trunk", None, note=reason)
        return
    with tempfile.TemporaryDirectory() as folder:
        file, found = Path(folder) / "network.json", Path(folder) / "found"
        in_lab(__file__, ["measure", file, 0.01 if quick else 0.05], HOSTS, RATE, options=ETHERNET)
        network = trunk_network(Network.load(file))
        for nbytes in VECTORS:
            for_length = nbytes if nbytes <= LONG else None  # long ones: as for a vector without end
            synthesize("allreduce", network, nbytes=for_length).save(f"{found}{nbytes}.json")
        given = ["run", found, 3 if quick else RUNS, *VECTORS]
        result = in_lab(__file__, given, HOSTS, RATE, options=ETHERNET, trunk=TRUNK)
        schedules = {nbytes: Schedule.load(f"{found}{nbytes}.json") for nbytes in VECTORS}
    for case, nbytes, times in result["cases"]:
        seconds = median(times)
        said = predicted(case, nbytes, network, schedules.get(nbytes))
        if only in case:
            length = f", {nbytes >> 10} KiB" if nbytes else ""
            note = f"runs take {1e3 * min(times):.3g} to {1e3 * max(times):.3g} ms; priced {said / seconds - 1:+.0%}"
            yield Row(f"{case}{length}", 1e6 * seconds, 1e6 * said, "price", "us", HOSTS, 1, note)


def trunk_network(measured: Network) -> Network:
    """The measured hosts on two switches, with a trunk whose rate is to theirs as TRUNK to RATE."""
    bandwidth = 1 / measured.between.beta
    edges = [(host, f"switch{2 * host // HOSTS}", bandwidth, 0.0) for host in range(HOSTS)]
    edges.append(("switch0", "switch1", bandwidth * TRUNK / RATE, min(LATENCY, 1e-6)))
    return replace(measured, topology=from_edges(edges, list(range(HOSTS))), ranks_per_node=1)


def predicted(case: str, nbytes: int, network: Network, schedule: Schedule | None) -> float:
    """The price of a case."""
    kind, _, name = case.partition(" ")
    if kind == "allreduce":
        entry = schedule if name == "synthesized" else ALGORITHMS["allreduce"][name.split()[-1].strip("()")]
        options = {"nodes": list(range(HOSTS))} if NODES in getattr(entry, "needs", ()) else {}
        return price(entry, HOSTS, nbytes // ITEMSIZE, ITEMSIZE, network, **options).seconds
    links = {level: replace(getattr(network, level), eager=None) for level in ("inside", "between")}
    return price(pipeline(case), HOSTS, 1, 1, replace(network, **links)).seconds


def pipeline(case: str):
    """The schedule of "1f1b in order" or "pipedream dealt out", for all ranks."""
    name, _, where = case.partition(" ")
    stages = 2 if name == "1f1b" else HOSTS
    cost = Stage(COMPUTING, COMPUTING, COMPUTING, ACTIVATION, 1, 1)
    order = rows_of("1f1b", 2, MICRO) if stages == 2 else rows_of("pipedream", HOSTS, MICRO, replicas=(1,) * HOSTS)
    program = lower(order, [cost] * stages, 0.0, as_run=True)
    everyone = all_pipelines([tuple(rounds) for rounds in program], 1)
    placed = PLACEMENTS[where]

    def rounds(rank, size, count):
        for steps in everyone(placed.index(rank), size, count):
            yield tuple(step._replace(peer=placed[step.peer]) if hasattr(step, "peer") else step for step in steps)

    return rounds


# ------------------------------------------------------------------------------------------------ on the hosts


def measure(file: str, seconds: float) -> None:
    """Measure the network between hosts (collective)."""
    from mpi4py import MPI

    from collectives.pricing.measure import measure_network

    network = measure_network(MPI.COMM_WORLD, seconds=seconds)
    if MPI.COMM_WORLD.Get_rank() == 0:
        network.save(file)
        print(json.dumps({}))


def run(found: str, runs: int, vectors: list[int]) -> None:
    """Run all cases, and print their seconds as a line of JSON (collective)."""
    from mpi4py import MPI

    from collectives import Communicator

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    communicator, ahead, cases = Communicator(world), clocks(world), []

    def timed(plan, runs=runs):
        return [one_run(world, plan, ahead, REST)[0] for _ in range(runs + 1)][1:]  # the first connects the ranks

    for nbytes in vectors:
        count = nbytes // ITEMSIZE
        x, y = np.ones(count, "f4"), np.empty(count, "f4")
        said = communicator.explain("allreduce", count)
        chosen = next(name for name in sorted(ALGORITHMS["allreduce"], key=len, reverse=True) if name in said)
        of_registry = ALLREDUCES[:1] if nbytes > LONG else ALLREDUCES
        times = min(runs, 5) if nbytes > LONG else runs
        for name in (*of_registry, f"auto ({chosen})", "synthesized"):
            schedule = Schedule.load(f"{found}{nbytes}.json") if name == "synthesized" else None
            algorithm = schedule or (None if name.startswith("auto") else name)
            plan = lambda algorithm=algorithm, x=x, y=y: communicator.Allreduce(x, y, algorithm=algorithm)
            cases.append((f"allreduce {name}", nbytes, timed(plan, times)))
    for name in ("1f1b", "pipedream"):
        for where in PLACEMENTS:
            rounds = list(pipeline(f"{name} {where}")(rank, size, 1))
            cases.append((f"{name} {where}", 0, timed(lambda rounds=rounds: run_rounds(world, rounds))))
    communicator.release()
    if rank == 0:
        print(json.dumps({"cases": cases}))


def run_rounds(world, rounds) -> None:
    """Messages as they are, computation as sleep."""
    for steps in rounds:
        requests = []
        for step in steps:
            length = step.hi - step.lo if hasattr(step, "peer") else 0
            if isinstance(step, Recv | RecvReduce):
                requests.append(world.Irecv(np.empty(length, np.uint8), step.peer))
        for step in steps:
            if isinstance(step, Send):
                requests.append(world.Isend(np.zeros(step.hi - step.lo, np.uint8), step.peer))
        time.sleep(sum(step.seconds for step in steps if isinstance(step, Compute)))
        for request in requests:
            request.Wait()


if __name__ == "__main__":
    verb, *given = arguments(__doc__)
    if verb == "measure":
        measure(given[0], float(given[1]))
    elif verb == "run":
        run(given[0], int(given[1]), [int(nbytes) for nbytes in given[2:]])
    else:
        sys.exit(f"bench_trunk.py {verb}: expected measure or run")
