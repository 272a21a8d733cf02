"""Every collective algorithm as a schedule: one file an operation, one generator of rounds an algorithm."""

from collectives.algorithms import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    shared,
)
from collectives.algorithms.registry import ALGORITHMS, Algorithm, Cost

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Cost",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "shared",
]
