"""What a reduction makes of NaN and of integers that are too small for it: what NumPy does, whatever carries it out.

The same for every algorithm, size and path: on one node and over several, blocking and not, short and long.
"""

import numpy as np
import pytest

from collectives.algorithms.registry import by_messages
from collectives.choosing.selection import SHARED

COUNTS = 1, 70, 5000  # native, native with vector instructions, above what is native by default


def names(operation):
    return [None, *by_messages(operation), *(["shared"] if operation in SHARED else [])]


def operands(ranks, count, dtype):
    """Of each rank: integers over the whole range of the dtype, or floating-point numbers with NaN here and there."""
    rng = np.random.default_rng(count)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, (ranks, count), dtype, endpoint=True)
    x = rng.choice([1.5, -2.25, np.inf, -np.inf, 0, 7], (ranks, count)).astype(dtype)
    x[rng.random(x.shape) < 0.2] = np.nan
    x[:, 0] = np.arange(ranks)
    x[ranks // 2, 0] = np.nan
    return x


dtypes = pytest.mark.parametrize(
    "dtypes",
    [pytest.param("i1 u2 i4 f2 f4", id="some"), pytest.param("u1 i2 f8 g", id="others", marks=pytest.mark.exhaustive)],
)


def cases(dtypes):
    from mpi4py import MPI

    for dtype in dtypes.split():
        if np.dtype(dtype).kind in "iu":
            yield dtype, MPI.SUM, np.add
            yield dtype, MPI.PROD, np.multiply
        else:
            yield dtype, MPI.MAX, np.maximum
            yield dtype, MPI.MIN, np.minimum


def check(communicator, methods, dtypes):
    rank, ranks = communicator.rank, communicator.size
    for dtype, op, ufunc in cases(dtypes):
        for count in COUNTS:
            x = operands(ranks, count, dtype)
            sums = ufunc.accumulate(x, axis=0, dtype=dtype)
            total = sums[-1]
            y = np.empty_like(total)
            for method, operation in methods:
                for name in names(operation) if count < 1000 else [None, names(operation)[-1]]:
                    case = method, dtype, ufunc.__name__, count, name
                    y[:] = 55
                    expected, own = total, y
                    if method == "Reduce":
                        communicator.Reduce(x[rank], y, op, ranks - 1, algorithm=name)
                        expected = total if rank == ranks - 1 else y
                    elif method == "Reduce_scatter_block":
                        each = count // ranks
                        own, expected = y[:each], total[each * rank : each * (rank + 1)]
                        communicator.Reduce_scatter_block(x[rank, : each * ranks], own, op, algorithm=name)
                    elif method == "Exscan":
                        communicator.Exscan(x[rank], y, op, algorithm=name)
                        expected = sums[rank - 1] if rank else y
                    elif method == "Iallreduce":
                        communicator.Iallreduce(x[rank], y, op, algorithm=name).Wait()
                    else:
                        getattr(communicator, method)(x[rank], y, op, algorithm=name)
                        expected = sums[rank] if method == "Scan" else total
                    np.testing.assert_array_equal(own, expected, str(case))


@pytest.mark.mpi(ranks=[1, 2, 3])
@dtypes
def test_nan_stays_and_integers_wrap(comm, ranks, dtypes):
    from collectives import Communicator

    communicator = Communicator(comm)
    methods = ("Allreduce", "Reduce", "Reduce_scatter_block", "Scan", "Exscan")
    check(communicator, [(name, name.lower().removesuffix("_block")) for name in methods], dtypes)
    communicator.release()


@pytest.mark.mpi(ranks=[2])
@dtypes
def test_nonblocking_ones_give_the_same(comm, ranks, dtypes):
    from collectives import Communicator

    communicator = Communicator(comm)
    check(communicator, [("Iallreduce", "allreduce")], dtypes)
    communicator.release()


@pytest.mark.mpi(ranks=[3])
@dtypes
def test_over_several_nodes_too(comm, ranks, monkeypatch, dtypes):
    """A node of two ranks and one of one, as far as the communicator can tell."""
    from collectives import Communicator
    from collectives.running import planner

    monkeypatch.setattr(planner, "same_node", lambda comm: comm.Split(comm.Get_rank() // 2))
    communicator = Communicator(comm)
    check(communicator, [("Allreduce", "allreduce")], dtypes)
    communicator.release()


@pytest.mark.mpi(ranks=[3], more=[4])
def test_float16_in_the_memory_of_several_nodes(comm, ranks, monkeypatch):
    """Each node sums in its memory; between nodes the sums are numbers, not bit patterns, and rounded a hop."""
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.running import planner

    monkeypatch.setattr(planner, "same_node", lambda comm: comm.Split(comm.Get_rank() // 2))
    communicator = Communicator(comm)
    total = ranks * (ranks + 1) / 2
    for count in (1, 7, 1000, 300_000):
        ramp = np.arange(count) % 50
        x, y = (ramp * (comm.rank + 1)).astype("f2"), np.empty(count, "f2")
        communicator.Allreduce(x, y, algorithm="shared")
        np.testing.assert_array_equal(y, ramp * total)
        communicator.Allreduce(x, y, MPI.MAX, algorithm="shared")
        np.testing.assert_array_equal(y, ramp * ranks)
        communicator.Allreduce(MPI.IN_PLACE, x, algorithm="shared")
        np.testing.assert_array_equal(x, ramp * total)
    communicator.release()
