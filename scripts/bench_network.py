"""The network under the ranks, measured: what a message costs inside a node and between nodes.

    python scripts/bench.py network --network FILE                         two ranks of this machine
    python scripts/bench.py network --network FILE --table FILE            and the algorithms to choose there, derived
    srun -n 4 python -m mpi4py scripts/bench_network.py FILE               a cluster's nodes, or mpiexec's hosts

FILE is what `collectives.networks.Network.load` reads and `collectives.price` takes. alpha and beta are fitted to
ping-pongs of 4 B ... 4 MiB (Hockney 1994), gamma and copy are those of the memory. The rows hold ping-pongs of other
lengths, which the fit has not seen, against what it says: where an MPI library changes its protocol, one straight line
is off by as much.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarking import Row, arguments

from collectives.deriving import tables
from collectives.networks import Network
from collectives.selection import save
from parallel import launch

RANKS = 2
MIB = 1 << 20
SIZES = tuple(2 * 4**k for k in range(1, 12))  # 8 B ... 8 MiB, between those of the fit
SECONDS = 0.2  # for each length


def rows(
    quick: bool = False, only: str = "", network: str | Path = "network.json", table: str | None = None
) -> Iterator[Row]:
    """Measured ping-pongs against the fitted line; reductions and copies."""
    lines = []

    def take(line: str) -> None:
        lines.append(line) if line.startswith("{") else sys.stderr.write(line)

    status = launch.run([__file__, network, 0.005 if quick else SECONDS], RANKS, timeout=600, stdout=take)
    if status:
        raise RuntimeError(f"network: {launch.ending(status)}")
    result = json.loads(lines[-1])
    measured = Network.load(network)
    if table:
        save(table, tables(measured))
    yield from (row for row in compare(result, measured) if only in row.case)


def compare(result: dict, network: Network) -> Iterator[Row]:
    """The rows of a measurement."""
    ranks, cores = result["ranks"], launch.cores()
    crowd = f"; {ranks} ranks share {cores} cores" if ranks > cores else ""
    for level, points in result["levels"].items():
        link = getattr(network, level)
        bandwidth = f"{1e-9 / link.beta:.3g} GB/s" if link.beta else "no cost a byte"
        note = f"alpha {1e6 * link.alpha:.3g} us, {bandwidth}, overhead {1e6 * link.overhead:.3g} us{crowd}"
        for nbytes, seconds in points:
            fitted = link.alpha + nbytes * link.beta
            yield Row(f"message {level}, {nbytes} B", 1e6 * seconds, 1e6 * fitted, "fit", "us", ranks, 1, note)
    for name, cost in (("reduction", network.gamma), ("copy", network.copy)):
        note = f"{1e-9 / cost:.3g} GB/s of results, one rank at work{crowd}"
        yield Row(f"{name} in memory, 1 MiB", 1e6 * MIB * cost, None, "", "us", ranks, 1, note)


def work(file: str, seconds: float) -> None:
    """Measure, write the file, and print the ping-pongs as a line of JSON (collective)."""
    from mpi4py import MPI

    from collectives.measure import measure_network, neighbours, ping_pong

    world = MPI.COMM_WORLD
    network = measure_network(world, seconds=seconds)
    levels = {}
    for level, peers in zip(("inside", "between"), neighbours(world), strict=True):
        if peers and world.Get_rank() in (0, peers[0]):
            levels[level] = [(nbytes, ping_pong(world, peers[0], nbytes, seconds)) for nbytes in SIZES]
        world.Barrier()
    if world.Get_rank() == 0:
        network.save(file)
        print(json.dumps({"ranks": world.Get_size(), "levels": levels}), flush=True)


if __name__ == "__main__":
    file, *seconds = arguments(__doc__)
    work(file, float(seconds[0]) if seconds else SECONDS)
