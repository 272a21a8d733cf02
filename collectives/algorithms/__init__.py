"""Every collective algorithm as a schedule: one generator of rounds.

| file | holds |
|---|---|
| registry.py | ALGORITHMS: names, costs, needs; what each operation is |
| allgather.py, allreduce.py, alltoall.py, barrier.py, broadcast.py, gather.py | of these operations, by messages |
| reduce.py, reduce_scatter.py, scan.py, scatter.py | the same |
| bucket.py, swing.py | allreduce on tori and on levels |
| bine.py, pat.py | trees and rounds whose partners are near, for several operations |
| shared.py | of all of them in the memory of a node |
| trees.py, power_of_two.py | what several of them are made of |
"""

from collectives.algorithms import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    bine,
    broadcast,
    bucket,
    gather,
    pat,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    shared,
    swing,
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
    "bine",
    "broadcast",
    "bucket",
    "gather",
    "pat",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "shared",
    "swing",
]
