"""Offsets between the clocks of hosts: time.perf_counter of each host starts at another moment.

Rank 0 asks one rank of each other host for its time, again and again. The answer of the quickest round trip was read
half a round trip ago, give or take the other half; ranks of a host share its clock. Clocks also run at different
speeds, some 10 microseconds a second apart, so the offset is measured at the begin and at the end of a run, and
between the two it changes linearly. Sources: Cristian 1989; Mills 1991 (NTP takes the quickest sample, too).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from collectives.failures.revocation import register, unregister

ROUND_TRIPS = 50


@dataclass(frozen=True)
class Offset:
    """The offset that turns this rank's time into rank 0's.

    Attributes
    ----------
    at : float
        This rank's time when it was measured.
    seconds : float
    error : float
        At most so wrong: half the quickest round trip; 0 for ranks on rank 0's host.
    """

    at: float
    seconds: float
    error: float


def measure(
    comm: MPI.Intracomm, hosts: list[int], clock: Callable[[], float] = time.perf_counter, trips: int = ROUND_TRIPS
) -> Offset:
    """Measure this rank's offset to rank 0 (collective).

    Parameters
    ----------
    hosts : list of int
        For each rank the first rank on its host; see collectives.failures.launch_check.nodes_of.
    clock : callable
        Seconds; one that all ranks of a host share.
    trips : int
        Round trips to each host, of which the quickest counts.
    """
    comm = register(MPI.Intracomm(comm).Dup())  # keeps these messages apart from all others
    rank, answer, found = comm.rank, np.zeros(1), {}
    for host in sorted(set(hosts) - {0}):
        if rank == 0:
            samples = []
            for _ in range(trips):
                asked = clock()
                comm.Send(answer, host)
                comm.Recv(answer, host)
                got = clock()
                samples.append((got - asked, (asked + got) / 2 - answer[0]))
            quickest, offset = min(samples)
            found[host] = offset, quickest / 2
        elif rank == host:
            for _ in range(trips):
                comm.Recv(answer, 0)
                answer[0] = clock()
                comm.Send(answer, 0)
    found = comm.bcast(found)
    unregister(comm).Free()
    return Offset(clock(), *found.get(hosts[rank], (0.0, 0.0)))


def to_rank_0(times: np.ndarray, begin: Offset, end: Offset) -> np.ndarray:
    """Convert times of this rank to rank 0's clock, by linear interpolation between two measurements."""
    length = end.at - begin.at
    part = (np.asarray(times) - begin.at) / length if length > 0 else np.zeros(np.shape(times))
    return times + begin.seconds + part * (end.seconds - begin.seconds)
