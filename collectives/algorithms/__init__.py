"""Every collective algorithm as a schedule: one file an operation, one generator of rounds an algorithm."""

from collectives.algorithms import allreduce, barrier, broadcast, gather, reduce, scatter
from collectives.algorithms.registry import ALGORITHMS, Algorithm, Cost

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Cost",
    "allreduce",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
]
