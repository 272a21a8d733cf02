#!/usr/bin/env python3
"""Which algorithm on which network: priced for every length, with a table that a communicator reads.

    python scripts/plan_collective.py fat-tree:k=4,oversubscription=4
    python scripts/plan_collective.py torus:dims=4x4 --operation allgather --synthesize
    python scripts/plan_collective.py nodes:nodes=4,ranks=4 --map --pictures pictures --table tune.json
    RINGPROP_TUNE=tune.json mpiexec -n 16 python -m mpi4py program.py

NETWORK is a name (workstation, gigabit, ...), a topology with options, or a JSON file: `Network.save`, or edges.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives import ALGORITHMS, price
from collectives.algorithms.registry import DIMS, NODES, SEGMENT_BYTES, by_messages
from collectives.choosing.derive import NEAR
from collectives.choosing.selection import save, table_from
from collectives.pricing.lower_bounds import CUT, lower_bound
from collectives.pricing.networks import find_network
from collectives.pricing.progress_bar import ProgressBar
from parallel.command.arguments import Parser, new_directory, new_file, whole

ITEMSIZE = 4
SIZES = tuple(4**k for k in range(1, 16))  # bytes: 4 B to 1 GiB
MAP_SIZES = tuple(16**k for k in range(1, 8))
MOST_RANKS = 1 << 16  # the rounds of each are simulated
LONG_STEPS = 40_000  # of all ranks: where a pipeline has more, it is not priced


def main(arguments: list[str] | None = None) -> int:
    """Print the plan; returns 0."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", metavar="NETWORK")
    parser.add_argument("--operation", default="allreduce", choices=[name for name in ALGORITHMS if name != "barrier"])
    parser.add_argument("--ranks", type=whole(1, MOST_RANKS), help="by default one on each host, 16 without a topology")
    parser.add_argument("--synthesize", action="store_true", help="search for a schedule too (with a topology)")
    parser.add_argument("--map", action="store_true", help="the fastest for 2, 4, 8 ... ranks")
    parser.add_argument(
        "--table", type=new_file, metavar="FILE", help="write what RINGPROP_TUNE reads, for all operations"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all prices")
    parser.add_argument(
        "--pictures", type=new_directory, metavar="FOLDER", help="draw the network and the load of its channels"
    )
    options = parser.parse_args(arguments)
    try:
        network = find_network(options.network)
        hosts = len(network.topology.hosts) if network.topology else 16
        ranks = options.ranks or hosts
        if ranks < 2:
            raise ValueError(f"a collective needs at least 2 ranks, given {ranks}: see --ranks")
        network.nodes_of(ranks)
        if options.synthesize and (options.operation not in CUT or ranks != hosts or not network.topology):
            raise ValueError(f"--synthesize needs a topology with a rank on each host, and one of {', '.join(CUT)}")
        if options.pictures and not network.topology:
            raise ValueError("--pictures needs a network with a topology, such as fat-tree:k=4")
    except ValueError as error:
        parser.error(str(error))
    extra = {}
    if options.synthesize:
        from collectives import synthesize

        found = extra["synthesized"] = synthesize(options.operation, network)
        share = f"{100 * found.share_of_bound:.0f}% of the bound"
        print(f"found a schedule of {len(found.steps)} steps, {share} for long vectors")
    times = prices(network, options.operation, ranks, SIZES, extra)
    print(f"{options.operation} on {ranks} ranks of {network.topology or options.network}\n")
    print(f"{'bytes':>13}  {'fastest':20} {'time':>10}  {'bound':>10}  next")
    for nbytes in SIZES:
        order = sorted((name for name in times if nbytes in times[name]), key=lambda name: times[name][nbytes])
        best, *others = order
        bound = lower_bound(options.operation, ranks, nbytes, network)
        after = ", ".join(f"{name} {times[name][nbytes] / times[best][nbytes]:.2f}x" for name in others[:2])
        print(f"{nbytes:13,}  {best:20} {in_words(times[best][nbytes])}  {in_words(bound)}  {after}")
    if options.map:
        print_map(network, options.operation, hosts)
    if options.json:
        Path(options.json).write_text(json.dumps(times, indent=1) + "\n")
    if options.table:
        write_table(options.table, network, ranks)
        print(f"\nwritten: RINGPROP_TUNE={options.table}")
    if options.pictures:
        draw(Path(options.pictures), network, options.operation, ranks, times)
    return 0


def prices(network, operation, ranks, sizes, extra=None, as_run=False) -> dict[str, dict[int, float]]:
    """Algorithm -> bytes -> seconds; `as_run`: as a communicator runs them, which knows no sides of a torus."""
    entries = {
        name: entry
        for name, entry in by_messages(operation).items()
        if not entry.rounds_once and (network.topology or name not in NEAR)
    }
    times: dict[str, dict[int, float]] = {}
    jobs = [(name, entry, nbytes) for name, entry in (entries | (extra or {})).items() for nbytes in sizes]
    bar = ProgressBar(len(jobs))
    for done, (name, entry, nbytes) in enumerate(jobs):
        bar.update(done)
        count = max(1, nbytes // ITEMSIZE)
        if operation == "alltoall":
            count = -(-count // ranks) * ranks
        chosen = {}
        if getattr(entry, "pipelined", False):
            chosen["segment"] = SEGMENT_BYTES // ITEMSIZE
            if count // chosen["segment"] * ranks > LONG_STEPS:
                chosen["segment"] = count * ranks // LONG_STEPS
        if as_run and DIMS in getattr(entry, "needs", ()):
            chosen["dims"] = None
        if NODES in getattr(entry, "needs", ()):
            chosen["nodes"] = nodes_for(network, ranks)
        try:
            seconds = price(entry, ranks, count, ITEMSIZE, network, **chosen).seconds
        except ValueError:  # its sides do not fit
            continue
        times.setdefault(name, {})[nbytes] = seconds
    bar.close()
    return times


def nodes_for(network, ranks) -> list[int]:
    """The node of each rank: of a topology of nodes, hosts of one node count as one."""
    hosts = network.nodes_of(ranks)
    if network.topology and network.topology.kind == "nodes":
        return [host // network.topology.options["ranks"] for host in hosts]
    return hosts


def print_map(network, operation, hosts) -> None:
    """The fastest algorithm for each number of ranks and length."""
    print("\n" + " " * 6 + "".join(f"{nbytes:>17,}" for nbytes in MAP_SIZES))
    number = 2
    while number <= hosts:
        times = prices(network, operation, number, MAP_SIZES)
        cells = [min((name for name in times if n in times[name]), key=lambda name: times[name][n]) for n in MAP_SIZES]
        print(f"{number:6}" + "".join(f"{cell:>17}" for cell in cells))
        number *= 2


def write_table(file, network, ranks) -> None:
    """A table for all operations, of what a communicator runs by name."""
    sizes = tuple(n for n in SIZES if 16 <= n <= 1 << 26)
    rows = {}
    for operation in ALGORITHMS:
        if operation != "barrier":
            rows[operation] = table_from(prices(network, operation, ranks, sizes, as_run=True))
    save(file, {"network": rows, "nodes": rows})


def draw(folder, network, operation, ranks, times) -> None:
    """The network with the load of the fastest algorithm for 1 MiB, and its channels over time."""
    from collectives.drawing.networks import draw_channels, draw_network

    nbytes = 1 << 20
    names = [name for name in by_messages(operation) if nbytes in times.get(name, ())]
    best = min(names, key=lambda name: times[name][nbytes])
    count = nbytes // ITEMSIZE // ranks * ranks
    priced = price(ALGORITHMS[operation][best], ranks, count, ITEMSIZE, network, trace=True)
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{best} {operation}, 1 MiB"
    draw_network(network, ranks, priced, title=title).savefig(folder / "network.png", dpi=120)
    draw_channels(network, priced, title=title).savefig(folder / "channels.png", dpi=120)
    print(f"drawn: {folder / 'network.png'}, {folder / 'channels.png'}")


def in_words(seconds: float) -> str:
    """Seconds with a unit, ten wide."""
    for unit, symbol in ((1.0, "s "), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:7.4g} {symbol}"
    return f"{seconds * 1e9:7.4g} ns"


if __name__ == "__main__":
    from entry_point import run

    sys.exit(run(main))
