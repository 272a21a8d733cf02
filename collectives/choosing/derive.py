"""The table of algorithms that the simulation derives for a network: python scripts/bench.py network --table FILE.

Every algorithm of the registry is priced (price.py) for vectors of 16 B ... 16 MiB, on a number of nodes that is a
power of two and on one that is none, as a communicator would run it. Of each length the fastest in sum is taken, with
as few changes as will do: an algorithm that is at most a tenth slower is kept (selection.table_from).

It knows what the simulation knows: bytes, messages and ports. Some algorithms are left out for what it does not know.
In those for float16 all ranks send to all others at once, which a switch answers by dropping what it cannot hold. In
the pairwise reduce-scatter each round is with other partners; it takes 1.3 times as long as the ring for 4 MiB (4
hosts, TCP). Costs 1 s with a rank on each node, 6 s with four.
"""

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import NODES, SEGMENT_BYTES, by_messages
from collectives.choosing.selection import TABLE, Rows, table_from
from collectives.pricing.networks import NETWORKS, Network
from collectives.pricing.price import price

SIZES = tuple(4 << k for k in range(2, 23, 2))  # bytes of the whole vector
NODE_COUNTS = 6, 8
ITEMSIZE = 4
CROWDED = {"reduce_scatter": "pairwise"}
NEAR = "bine", "bucket", "pat", "swing"  # for networks on which some ranks are nearer: those with a topology


def tables(network: Network | str) -> dict[str, dict[str, Rows]]:
    """What selection.TABLE has for the places "network", a rank on each node, and "nodes", here two.

    On several nodes an allreduce that is not short goes through the memory of each, which is not simulated.
    """
    one, two = derive(network, 1), derive(network, 2)
    return {"network": one, "nodes": two | {"allreduce": [two["allreduce"][0], *TABLE["nodes"]["allreduce"][1:]]}}


def derive(
    network: Network | str = "gigabit", ranks_per_node: int = 1, sizes: tuple[int, ...] = SIZES
) -> dict[str, Rows]:
    """operation -> rows for selection.TABLE: (longest vector in bytes, algorithm), shortest first."""
    network = NETWORKS[network] if isinstance(network, str) else network
    network = network.with_ranks_per_node(ranks_per_node)
    table = {}
    for operation in ALGORITHMS:
        entries = by_messages(operation)
        left_out = CROWDED.get(operation), *(() if network.topology else NEAR)
        times = {name: {} for name, entry in entries.items() if name not in left_out and not entry.rounds_once}
        for name in times:
            for nbytes in (0,) if operation == "barrier" else sizes:
                ranks = [nodes * ranks_per_node for nodes in NODE_COUNTS]
                times[name][nbytes] = sum(seconds(operation, entries[name], p, nbytes, network) for p in ranks)
        table[operation] = table_from(times)
    return table


def seconds(operation, entry, ranks: int, nbytes: int, network: Network) -> float:
    """Return the seconds of an algorithm on a number of ranks."""
    options = {}
    if NODES in entry.needs:
        options["nodes"] = [rank // network.ranks_per_node for rank in range(ranks)]
    if entry.pipelined:
        options["segment"] = SEGMENT_BYTES // ITEMSIZE
    count = nbytes // ITEMSIZE
    if operation == "alltoall":  # blocks of one length
        count = max(1, count // ranks) * ranks
    return price(entry, ranks, count if nbytes else None, ITEMSIZE, network, **options).seconds
