"""Buffers as MPI allows them, and those that it does not: derived datatypes, pairs, overlaps."""

import inspect
import re

import numpy as np
import pytest

from collectives.algorithms.registry import by_messages


@pytest.fixture
def communicator(comm):
    from collectives import Communicator

    made = Communicator(comm, synchronous=True)
    yield made
    made.release()


@pytest.mark.mpi(ranks=[2])
def test_buffers_that_overlap_are_refused_at_every_size(communicator, ranks):
    rank = communicator.rank
    for count in (1, 4, 5000):
        x = np.arange(2.0 * count + 1)
        for name in [None, *by_messages("alltoall")]:
            for send in (x[: 2 * count], x[1:]):
                with pytest.raises(ValueError, match="overlap: pass"):
                    communicator.Alltoall(send, x[: 2 * count], algorithm=name)
        for name in [None, *by_messages("reduce_scatter")]:
            with pytest.raises(ValueError, match="overlap"):
                communicator.Reduce_scatter(x[: 2 * count], x[count : 2 * count], [count, count], algorithm=name)
        with pytest.raises(ValueError, match="overlap"):
            communicator.Alltoallv([x, [count, 0], "d"], [x, [1, count - 1], [count - 1, count], "d"])
        if rank == 0:  # only the root has both
            whole, own = x[: 2 * count], x[1 : count + 1]
            with pytest.raises(ValueError, match="overlap"):
                communicator.Gather(own, whole)
            with pytest.raises(ValueError, match="overlap"):
                communicator.Scatter(whole, own)


@pytest.mark.mpi(ranks=[2])
def test_buffers_that_lie_between_each_other_do_not_overlap(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    mine = np.arange(8) + 10 * rank
    expected = mine.copy()
    for name in by_messages("alltoall"):
        x = mine.astype("f8")
        communicator.Alltoallv([x, [1, 1], [0, 4], "d"], [x, [1, 1], [2, 6], "d"], algorithm=name)
        expected[[2, 6]] = 4 * rank, 4 * rank + 10
        assert x.tolist() == expected.tolist()
    expected[[1, 3, 5, 7]] = np.array([0, 2, 10, 12]) + 4 * rank
    expected[[0, 2, 4, 6]] = mine[::2]
    every_other = MPI.INT32_T.Create_vector(2, 1, 2).Create_resized(0, 16).Commit()
    for name in by_messages("alltoall"):
        x = np.append(mine, range(8)).astype("i4")
        communicator.Alltoall([x, 1, every_other], [x[1:], 1, every_other], algorithm=name)
        assert x[:8].tolist() == expected.tolist()
        for other in (x, x[6:]):  # here the last element of one is the first of the other
            for pair in ((x, other), (other, x)):
                with pytest.raises(ValueError, match="overlap"):
                    communicator.Alltoall(*([each, 1, every_other] for each in pair), algorithm=name)
    x = mine.astype("f8")  # the root's own block may lie where it belongs
    communicator.Gather(x[:4], x if rank == 0 else None)
    assert rank or x.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    communicator.Scatter(x if rank == 0 else None, x[:4])
    assert x[:4].tolist() == mine[:4].tolist()


@pytest.mark.mpi(ranks=[2])
def test_elements_that_are_larger_than_the_way_to_the_next(communicator, ranks):
    """Rows of a matrix, each of three numbers, of which the next begins one number on."""
    from mpi4py import MPI

    rank = communicator.rank
    rows = MPI.INT32_T.Create_contiguous(3).Create_resized(0, 4).Commit()
    column = MPI.INT32_T.Create_vector(4, 1, 3).Create_resized(0, 4).Commit()
    for datatype in (rows, column):
        nothing = np.empty(0, "i4")
        for name in by_messages("broadcast"):
            communicator.Bcast([nothing, 0, datatype], algorithm=name)
        for name in by_messages("alltoall"):
            communicator.Alltoall([nothing, 0, datatype], [np.empty(0, "i4"), 0, datatype], algorithm=name)
        communicator.Gatherv([nothing, 0, datatype], [nothing, [0, 0], datatype] if rank == 0 else None)
    for name in by_messages("broadcast"):
        x = np.arange(14, dtype="i4") + 100 * rank
        communicator.Bcast([x[2:], 2, column], algorithm=name)
        expected = np.arange(14) + 100 * rank
        places = [2, 3, 5, 6, 8, 9, 11, 12]
        expected[places] = places
        assert x.tolist() == expected.tolist(), name
    communicator.Bcast([np.zeros(11, "i4"), 2, column])
    for count, length in ((1, 9), (2, 10)):
        with pytest.raises(ValueError, match=f"too small for {count} of "):
            communicator.Bcast([np.zeros(length, "i4"), count, column])


@pytest.mark.mpi(ranks=[2])
def test_pairs_of_numbers(communicator, ranks):
    """All that MPI has for MAXLOC and MINLOC, and in what only moves data."""
    from mpi4py import MPI

    rank = communicator.rank
    for first, second, datatype in (
        ("f4", "i4", MPI.FLOAT_INT),
        ("f8", "i4", MPI.DOUBLE_INT),
        ("i8", "i4", MPI.LONG_INT),
        ("i4", "i4", MPI.TWOINT),
        ("i2", "i4", MPI.SHORT_INT),
        ("g", "i4", MPI.LONG_DOUBLE_INT),
    ):
        kind = np.dtype([("value", first), ("index", second)], align=True)
        make = lambda r, kind=kind: np.array([((-1) ** r * (i + 1), 10 * r + i) for i in range(3)], kind)
        spec = lambda a, datatype=datatype: [a.view("u1"), a.size, datatype]
        for name in [None, "native", *by_messages("allreduce")]:
            for op, winner in ((MPI.MAXLOC, 0), (MPI.MINLOC, 1)):
                x, y = make(rank), np.zeros(3, kind)
                communicator.Allreduce(spec(x), spec(y), op, algorithm=name)
                assert y.tolist() == make(winner).tolist(), (datatype.Get_name(), name)
        for name in by_messages("allgather"):
            all_ = np.zeros(6, kind)
            communicator.Allgather(spec(make(rank)), [all_.view("u1"), 3, datatype], algorithm=name)
            assert all_.tolist() == [*make(0).tolist(), *make(1).tolist()], (datatype.Get_name(), name)


@pytest.mark.mpi(ranks=1)
def test_the_type_of_a_dlpack_tensor(comm):
    """(code, bits, lanes) as its header has them."""
    from collectives.running.buffers import dlpack_type

    types = {"i2": (0, 16, 1), "u1": (1, 8, 1), "f8": (2, 64, 1), "c8": (5, 64, 1), "?": (6, 8, 1)}
    for dtype, told in types.items():
        assert dlpack_type(np.zeros(3, dtype).__dlpack__()) == told


@pytest.mark.mpi(ranks=[1])
def test_every_collective_says_what_it_takes_and_raises(communicator):
    """In its docstring: elements of its buffers; what all take and raise in that of the class."""
    kind = type(communicator)
    ours = [
        name
        for name in vars(kind)
        if name[0].isupper() and "algorithm" in inspect.signature(vars(kind)[name]).parameters
    ]
    assert len(ours) == 37
    for name in ours:
        told = inspect.getdoc(getattr(kind, name))
        assert told == inspect.getdoc(getattr(communicator, name)), "what stands before a method says the same"
        assert re.search(r"elements|blocks?|every rank has called", told), name
    for error in ("ValueError", "TypeError", "BufferError", "ScheduleError", "TimeoutError", "RuntimeError", "Aborted"):
        assert f"{error} |" in kind.__doc__ or f"{error}, " in kind.__doc__, error
