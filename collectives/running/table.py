"""The table of collectives: of each method how its arguments become a plan, and the key under which that is kept."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from collectives.running import plan_moves as moves
from collectives.running import plan_reductions as sums
from collectives.running.plan_cache import constant


def of_sum(more):
    """An operation in a key: a plan keeps operations of the user alive, so that their ids are not used again."""
    (op,) = more
    return id(op), op.handle


def of_rooted_sum(more):
    """The same with a root."""
    op, root = more
    return id(op), op.handle, root


def of_blocks(more):
    """The same of a reduce-scatter: its counts, and the operation."""
    counts, op = more
    return id(op), op.handle, constant(counts)


class Row(NamedTuple):
    """How a collective becomes a plan.

    Attributes
    ----------
    name : of the method, here and in the library
    operation : its name in ALGORITHMS
    plan : function (planner, *buffers, *what else the call has, algorithm) -> plan, or NATIVE
    detail : function (what else the call has) -> its part in the key under which the plan is kept
    kept : whether a plan is kept: not where other ranks may have other blocks this time, or who calls says so
    buffers : how many a call has
    """

    name: str
    operation: str
    plan: Callable
    detail: Callable = tuple
    kept: bool = True

    @property
    def buffers(self):
        return {"barrier": 0, "broadcast": 1}.get(self.operation, 2)


BARRIER = Row("Barrier", "barrier", moves.barrier)
BCAST = Row("Bcast", "broadcast", moves.broadcast)
SCATTER = Row("Scatter", "scatter", moves.scatter)
SCATTERV = Row("Scatterv", "scatter", partial(moves.scatter, vector=True), kept=False)
GATHER = Row("Gather", "gather", moves.gather)
GATHERV = Row("Gatherv", "gather", partial(moves.gather, vector=True), kept=False)
ALLGATHER = Row("Allgather", "allgather", moves.allgather)
ALLGATHERV = Row("Allgatherv", "allgather", partial(moves.allgather, vector=True))
ALLTOALL = Row("Alltoall", "alltoall", moves.alltoall)
ALLTOALLV = Row("Alltoallv", "alltoall", partial(moves.alltoall, vector=True))
REDUCE = Row("Reduce", "reduce", sums.reduce, of_rooted_sum)
ALLREDUCE = Row("Allreduce", "allreduce", sums.allreduce, of_sum)
REDUCE_SCATTER = Row("Reduce_scatter", "reduce_scatter", sums.reduce_scatter, of_blocks)
REDUCE_SCATTER_BLOCK = Row("Reduce_scatter_block", "reduce_scatter", sums.reduce_scatter_block, of_sum)
REDUCE_SCATTER_BLOCK_ONCE = REDUCE_SCATTER_BLOCK._replace(kept=False)
SCAN = Row("Scan", "scan", sums.scan, of_sum)
EXSCAN = Row("Exscan", "exscan", sums.exscan, of_sum)
