"""Allreduce across hosts with slow cables: every algorithm against the MPI library's own, and against the bound.

Runs in the lab of netlab.py (root only; elsewhere one row says why not). Four hosts with a rank each show the ring;
two hosts with two ranks each, dealt out by slot or by host, show what two levels save: bytes on the cable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import netlab
from benchmarking import Row, arguments, in_lab

LABS = ((4, 1, "slot"), (2, 2, "slot"), (2, 2, "node"))  # hosts, ranks a host, dealt out by
ALGORITHMS = ("ring", "segmented_ring", "rabenseifner", "two_level")
RATE, NBYTES = 400, 16 << 20  # Mbit/s, bytes
QUICK_RATE, QUICK_NBYTES = 100, 4 << 20
PAYLOAD = 1448 / 1514  # of a full frame: the cable's rate counts the headers of Ethernet, IP and TCP too


def rows(quick: bool, only: str) -> Iterator[Row]:
    if reason := netlab.why_not():
        yield Row("allreduce across hosts", None, note=reason)
        return
    rate, nbytes = (QUICK_RATE, QUICK_NBYTES) if quick else (RATE, NBYTES)
    for hosts, slots, dealt in LABS:
        case = f"{hosts} hosts x {slots} by {dealt}, {nbytes >> 20} MiB"
        if only not in case:
            continue
        given = [nbytes, 2 if quick else 5, "native", *ALGORITHMS]
        try:
            times = in_lab(__file__, given, hosts, rate, slots, options=["--map-by", dealt])
        except RuntimeError as error:
            yield Row(case, None, note=f"failed: {error}")
            continue
        bound = least(hosts, nbytes, rate)
        for name in ALGORITHMS:
            note = f"{bound / times[name]:.0%} of the bound, native {bound / times['native']:.0%}"
            yield Row(f"{case}, {name}", times[name], times["native"], "native", "ms", hosts * slots, 1, note)


def least(hosts: int, nbytes: int, rate: float) -> float:
    """Milliseconds in which each host can send and receive 2 (M-1)/M of the vector, in frames."""
    return 2 * (hosts - 1) / hosts * nbytes / PAYLOAD * 8 / (rate * 1e6) * 1e3


def measure(nbytes: int, repeats: int, names: Sequence[str]) -> dict[str, float]:
    """Best milliseconds of each algorithm, on the ranks of a lab (collective)."""
    import time

    import numpy as np
    from mpi4py import MPI

    from collectives import Communicator

    world = MPI.COMM_WORLD
    x = np.empty(nbytes // 4, "f4")
    best = {}
    for name in names:
        communicator = Communicator(world, allreduce=name)
        times = []
        for _ in range(repeats + 1):  # the first connects the ranks
            x[:] = world.Get_rank() + 1
            world.Barrier()
            start = time.perf_counter()
            communicator.Allreduce(MPI.IN_PLACE, x)
            times.append(world.allreduce(time.perf_counter() - start, MPI.MAX))
        right = world.Get_size() * (world.Get_size() + 1) / 2
        if not (x == right).all():
            raise ArithmeticError(f"rank {world.Get_rank()}: allreduce of {x.size} float32 by {name} is wrong")
        communicator.release()
        best[name] = min(times[1:]) * 1e3
    return best


if __name__ == "__main__":
    nbytes, repeats, *names = arguments(__doc__)
    result = measure(int(nbytes), int(repeats), names)
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        print(json.dumps(result), flush=True)
