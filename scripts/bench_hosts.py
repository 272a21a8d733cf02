"""Allreduce across hosts with slow cables: every algorithm against the MPI library's own, and against the bound.

Runs in the lab of netlab.py (root only; elsewhere one row says why not). Four hosts with a rank each show the ring; two
and three hosts with two ranks each, dealt out by slot or by host, show what two levels save: bytes on the cable.

`auto` is what runs where nothing is asked for, on private arrays and on arrays that the ranks of a host share. All take
turns in one job, in another order each time. A call takes what its slowest rank takes; medians are compared, and the
note has the quickest and the slowest call: on a cable of 400 Mbit/s and less a busy machine shows in these first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import median

import netlab
from benchmarking import Row, arguments, in_lab

# hosts, ranks a host, dealt out by
LABS = ((4, 1, "slot"), (2, 2, "slot"), (2, 2, "node"), (3, 2, "slot"), (3, 2, "node"))
SHARED = "auto, shared arrays"
SIDES = ("auto", SHARED, "ring", "segmented_ring", "rabenseifner", "two_level")
CALLS, QUICK_CALLS = 9, 2  # of each side
RATE, NBYTES = 400, 16 << 20  # Mbit/s, bytes
QUICK_RATE, QUICK_NBYTES = 100, 4 << 20
PAYLOAD = 1448 / 1514  # of a full frame: the cable's rate counts the headers of Ethernet, IP and TCP too


def rows(quick: bool, only: str) -> Iterator[Row]:
    if reason := netlab.reason_against():
        yield Row("allreduce across hosts", None, note=reason)
        return
    rate, nbytes = (QUICK_RATE, QUICK_NBYTES) if quick else (RATE, NBYTES)
    for hosts, slots, dealt in LABS:
        case = f"{hosts} hosts x {slots} by {dealt}, {nbytes >> 20} MiB"
        if only not in case:
            continue
        given = [nbytes, QUICK_CALLS if quick else CALLS, "native", *SIDES]
        try:
            found = in_lab(__file__, given, hosts, rate, slots, options=["--map-by", dealt])
        except RuntimeError as error:
            yield Row(case, None, note=f"failed: {error}")
            continue
        times, bound = found["times"], least(hosts, nbytes, rate)
        native = median(times["native"])
        for name in SIDES:
            ours = median(times[name])
            note = (
                f"{spread(times[name])}, native {spread(times['native'])}; {bound / ours:.0%} of the bound, "
                f"native {bound / native:.0%}; {found['sent'][name] / 1e6:.1f} MB from a host"
            )
            yield Row(f"{case}, {name}", ours, native, "native", "ms", hosts * slots, 1, note)


def spread(times: Sequence[float]) -> str:
    return f"{min(times):.0f}-{max(times):.0f} ms"


def least(hosts: int, nbytes: int, rate: float) -> float:
    """Milliseconds in which each host can send and receive 2 (M-1)/M of the vector, in frames."""
    return 2 * (hosts - 1) / hosts * nbytes / PAYLOAD * 8 / (rate * 1e6) * 1e3


def measure(nbytes: int, calls: int, names: Sequence[str]) -> dict[str, dict]:
    """Of each side the milliseconds of its calls, and the bytes that the host of rank 0 sends in one (collective)."""
    import random
    import time

    import numpy as np
    from bench_compression import card_bytes
    from mpi4py import MPI

    from collectives import Communicator

    world = MPI.COMM_WORLD
    shuffle = random.Random(0).sample  # the same order on all ranks
    right = world.Get_size() * (world.Get_size() + 1) / 2
    private = np.empty(nbytes // 4, "f4")
    communicators = {name: Communicator(world, allreduce=name.partition(",")[0]) for name in names}
    arrays = {n: c.empty(private.shape, "f4") if n == SHARED else private for n, c in communicators.items()}
    times, sent = {name: [] for name in names}, {}
    for turn in range(calls + 1):  # the first connects the ranks
        for name in shuffle(names, len(names)):
            x = arrays[name]
            x[:] = world.Get_rank() + 1
            before = card_bytes()
            world.Barrier()
            start = time.perf_counter()
            communicators[name].Allreduce(MPI.IN_PLACE, x)
            took = world.allreduce(time.perf_counter() - start, MPI.MAX)
            sent[name] = card_bytes() - before
            if turn:
                times[name].append(took * 1e3)
            if not (x == right).all():
                raise ArithmeticError(f"rank {world.Get_rank()}: allreduce of {x.size} float32 by {name} is wrong")
    for communicator in communicators.values():
        communicator.release()
    return {"times": times, "sent": sent}


if __name__ == "__main__":
    nbytes, calls, *names = arguments(__doc__)
    result = measure(int(nbytes), int(calls), names)
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        print(json.dumps(result), flush=True)
