"""Measure a network: ping-pongs inside a node and between nodes, reductions and copies in memory.

    network = measure_network(MPI.COMM_WORLD)
    network.save("network.json")

Half of a ping-pong is alpha + n beta, from which `networks.fit` finds both by least squares. The overhead o is what a
small send costs the sender: a burst of them, divided by their number. Of many repetitions the fast quartile counts:
noise only ever adds.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from collectives.networks import Link, Network, fit
from collectives.world import nodes_of

SIZES = tuple(4**k for k in range(1, 12))  # 4 B ... 4 MiB
MEMORY = 1 << 20  # bytes: beyond the first- and second-level caches, as a bucket of gradients is
BURST = 64


def measure_network(comm: MPI.Intracomm, sizes: Sequence[int] = SIZES, seconds: float = 0.2) -> Network:
    """The network under `comm`, as its rank 0 sees it (collective, equal on all ranks).

    Where all ranks share a node, or none does, the level that is not there gets the numbers of the other.

    Parameters
    ----------
    comm : MPI.Intracomm
        At least two ranks.
    sizes : sequence of int
        Bytes of the messages.
    seconds : float
        To spend on each measurement, about.

    Raises
    ------
    ValueError
        One rank only.
    """
    if comm.Get_size() < 2:
        raise ValueError("one rank has no network: measure with two or more")
    near, far = neighbours(comm)
    inside, between = (measure_link(comm, peers[0], sizes, seconds) if peers else None for peers in (near, far))
    a, b = np.ones(MEMORY // 4, "f4"), np.ones(MEMORY // 4, "f4")
    gamma, copy = comm.bcast(
        (_memory(lambda: np.add(a, b, b), seconds) / MEMORY, _memory(lambda: np.copyto(a, b), seconds) / MEMORY)
    )
    source = f"measured with {MPI.get_vendor()[0]}, {len(near) + 1} ranks a node"
    return Network(inside or between, between or inside, len(near) + 1, gamma, copy, source)


def neighbours(comm: MPI.Intracomm) -> tuple[list[int], list[int]]:
    """The other ranks on the node of rank 0, and those on other nodes (collective)."""
    first, *others = nodes_of(comm)
    near = [rank for rank, node in enumerate(others, 1) if node == first]
    return near, [rank for rank, node in enumerate(others, 1) if node != first]


def measure_link(comm: MPI.Intracomm, peer: int, sizes: Sequence[int] = SIZES, seconds: float = 0.2) -> Link:
    """alpha, beta and overhead between rank 0 and `peer` (collective; the other ranks wait)."""
    link = None
    if comm.Get_rank() in (0, peer):
        points = [(size, ping_pong(comm, peer, size, seconds)) for size in sizes]
        overhead = _burst(comm, peer)
        link = fit(points, overhead)
    return comm.bcast(link)


def ping_pong(comm: MPI.Intracomm, peer: int, size: int, seconds: float = 0.2) -> float:
    """Seconds that so many bytes take one way, half of there and back (call it on rank 0 and on `peer`)."""
    first = comm.Get_rank() == 0
    other = peer if first else 0
    out, into = np.ones(size, "u1"), np.empty(size, "u1")

    def there_and_back():
        if first:
            comm.Send(out, other)
            comm.Recv(into, other)
        else:
            comm.Recv(into, other)
            comm.Send(out, other)

    there_and_back()
    once = _quartile(there_and_back, 3)
    # Both must make as many: rank 0 says how many fit into the time.
    number = int(np.clip(seconds / once, 5, 2000))
    if first:
        comm.send(number, other)
    else:
        number = comm.recv(source=other)
    return _quartile(there_and_back, number) / 2


def _burst(comm, peer) -> float:
    """Seconds that a small send takes the sender."""
    first = comm.Get_rank() == 0
    other = peer if first else 0
    byte, requests = np.ones(1, "u1"), []

    def send():
        requests[:] = [comm.Isend(byte, other) for _ in range(BURST)]

    times = []
    for _ in range(20):
        if first:
            times.append(_quartile(send, 1) / BURST)
            MPI.Request.Waitall(requests)
            comm.Recv(byte, other)
        else:
            for _ in range(BURST):
                comm.Recv(byte, other)
            comm.Send(byte, other)
    return float(np.quantile(times, 0.25)) if first else 0.0


def _memory(call: Callable[[], object], seconds) -> float:
    once = _quartile(call, 3)
    return _quartile(call, int(np.clip(seconds / once, 5, 1000)))


def _quartile(call: Callable[[], object], number: int) -> float:
    """The fast quartile of so many calls, in seconds."""
    times = []
    for _ in range(number):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.quantile(times, 0.25))
