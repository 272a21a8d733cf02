"""Buffers as MPI allows them, and those that are refused: pairs, overlaps, other devices, derived datatypes."""

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

    rank = communicator.rank
    mine = np.arange(8) + 10 * rank
    expected = mine.copy()
    for name in by_messages("alltoall"):
        x = mine.astype("f8")
        communicator.Alltoallv([x, [1, 1], [0, 4], "d"], [x, [1, 1], [2, 6], "d"], algorithm=name)
        expected[[2, 6]] = 4 * rank, 4 * rank + 10
        assert x.tolist() == expected.tolist()
    x = mine.astype("f8")  # the root's own block may lie where it belongs
    communicator.Gather(x[:4], x if rank == 0 else None)
    assert rank or x.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    communicator.Scatter(x if rank == 0 else None, x[:4])
    assert x[:4].tolist() == mine[:4].tolist()


@pytest.mark.mpi(ranks=[2])
def test_derived_datatypes_are_the_librarys_unless_they_are_contiguous(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    column = MPI.INT32_T.Create_vector(4, 1, 3).Commit()  # of a 4 x 3 matrix
    swapped = MPI.INT32_T.Create_indexed_block(1, [1, 0]).Commit()  # without holes, and not in order
    row = MPI.INT32_T.Create_contiguous(3).Create_dup().Commit()
    for datatype in (column, swapped):
        with pytest.raises(TypeError, match="ndarray, or its datatype, is the MPI library's alone"):
            communicator.compile([], x=[np.arange(12, dtype="i4"), 1, datatype])
    x = np.arange(2, dtype="i4") + 10 * rank
    communicator.Bcast([x, 1, swapped])
    assert x.tolist() == [0, 1]
    x = np.arange(12, dtype="i4") + 100 * rank
    communicator.Ibcast([x, 1, column]).Wait()
    assert (x[::3] == np.arange(0, 12, 3)).all() and (x[1::3] == np.arange(1, 12, 3) + 100 * rank).all()
    for name in by_messages("allgather"):
        y = np.zeros(6, "i4")
        communicator.Allgather([np.full(3, rank, "i4"), 1, row], [y, 1, row], algorithm=name)
        assert y.tolist() == [0, 0, 0, 1, 1, 1], name


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


class Tensor:
    """An array of another library, by DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Device:
    """An array of another device, by the CUDA array interface; here that is this machine, as in mpi4py's own tests."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__array_interface__


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("foreign", [Tensor, Device])
def test_arrays_of_other_libraries_are_the_mpi_librarys(communicator, ranks, foreign):
    from mpi4py import MPI

    x = np.full(3, communicator.rank + 1.0)
    communicator.Allreduce(MPI.IN_PLACE, foreign(x))
    communicator.Iallreduce(MPI.IN_PLACE, [foreign(x), 3, MPI.DOUBLE]).Wait()
    communicator.Reduce_scatter(foreign(x), foreign(y := np.empty(2 - communicator.rank)), [2, 1])
    assert (x == 6).all() and (y == 12).all()
    with pytest.raises(TypeError, match=f"{foreign.__name__}, or its datatype, is the MPI library's alone"):
        communicator.compile([], x=foreign(x))


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_a_buffer_that_only_the_library_takes_on_one_rank_keeps_no_other_waiting_for_ever(comm, algorithm):
    """The one rank is in the library's allreduce, the other in ours, which says for whom it waits."""
    from mpi4py import MPI

    from collectives import Communicator

    communicator, x = Communicator(comm, allreduce=algorithm), np.full(5000, comm.rank + 1.0)
    communicator.Allreduce(MPI.IN_PLACE, x)
    communicator.planner.deadline.seconds = 0.5
    comm.Barrier()
    if comm.rank == 0:
        communicator.Allreduce(MPI.IN_PLACE, Tensor(x))
    else:
        with pytest.raises(TimeoutError, match=r"rank 1 has waited 0.5 s .*(message of|send to|:) rank 0"):
            communicator.Allreduce(MPI.IN_PLACE, x)
        MPI.Intracomm(communicator).Allreduce(MPI.IN_PLACE, x)
    assert (x == 6).all()
    comm.Barrier()
    communicator.release()


@pytest.mark.mpi(ranks=[1])
def test_every_collective_says_what_it_takes_and_raises(communicator):
    """In its docstring: elements of its buffers; what all take and raise in that of the class."""
    kind = type(communicator)
    ours = [
        name
        for name in vars(kind)
        if name[0].isupper() and "algorithm" in inspect.signature(vars(kind)[name]).parameters
    ]
    assert len(ours) == 38
    for name in ours:
        told = inspect.getdoc(getattr(kind, name))
        assert told == inspect.getdoc(getattr(communicator, name)), "what stands before a method says the same"
        assert re.search(r"elements|blocks?|every rank has called", told), name
    for error in ("ValueError", "TypeError", "BufferError", "ScheduleError", "TimeoutError", "RuntimeError", "Aborted"):
        assert f"{error} |" in kind.__doc__ or f"{error}, " in kind.__doc__, error


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("memory", [True, False])
def test_buffers_without_elements_may_be_none(comm, memory):
    """As mpi4py takes them: [None, 0, datatype] has memory that is read-only, of which nothing is written."""
    from mpi4py import MPI

    from collectives import Communicator

    communicator, rank, nothing = Communicator(comm, memory=memory), comm.rank, [None, 0, MPI.DOUBLE]
    x, y = np.arange(6.0), np.empty(6)
    communicator.Scatterv([x, [6, 0], None, MPI.DOUBLE], nothing if rank else y)
    assert rank or (y == x).all()
    everything = [None, [0, 0], None, MPI.DOUBLE]
    communicator.Allreduce(nothing, nothing)
    communicator.Bcast(nothing)
    communicator.Gatherv(nothing, everything if rank == 0 else None)
    communicator.Allgatherv(nothing, everything)
    with pytest.raises(BufferError, match="read-only"):
        communicator.Allreduce(MPI.IN_PLACE, b"1234")
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_an_empty_block_far_behind_the_buffer_is_neither_read_nor_copied(communicator, ranks):
    from mpi4py import MPI

    x = np.arange(4.0)
    communicator.Alltoallv(MPI.IN_PLACE, [x, [0, 0], [10**10, 10**10], MPI.DOUBLE])
    assert (x == np.arange(4)).all()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("counts", [[2, 2, 2], [6]])
@pytest.mark.parametrize("memory", [True, False])
def test_every_rank_has_a_count_of_a_reduce_scatter(comm, memory, counts):
    from collectives import Communicator

    communicator = Communicator(comm, memory=memory)
    with pytest.raises(ValueError, match=f"reduce_scatter: {len(counts)} counts for 2 ranks"):
        communicator.Reduce_scatter(np.ones(6), np.empty(6), counts, algorithm="ring")
    communicator.release()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("vector", ["Reduce_scatter", "Scatterv", "Gatherv", "compile"])
def test_a_mistake_of_one_rank_keeps_no_other_waiting_for_the_lengths_of_blocks(comm, vector):
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.failures.aborted import Aborted

    communicator, rank, x = Communicator(comm), comm.rank, np.ones(4)
    communicator.planner.deadline.seconds = 0.3
    blocks = [x, [2, 2], None, MPI.DOUBLE]
    calls = {
        "Reduce_scatter": lambda: communicator.Reduce_scatter(x, b"read-only" if rank == 0 else np.empty(2)),
        "Scatterv": lambda: communicator.Scatterv(blocks, np.empty(3 - rank), algorithm="binomial"),
        "Gatherv": lambda: communicator.Gatherv(np.empty(3 - rank), blocks, algorithm="binomial"),
        "compile": lambda: communicator.compile((), x=x) if rank else communicator.Bcast(x, root=9),
    }
    with pytest.raises((BufferError, ValueError) if rank == 0 else TimeoutError):
        calls[vector]()
    if rank == 1:
        with pytest.raises(Aborted, match="blocks or schedules"):
            communicator.Barrier(algorithm="dissemination")
    comm.Barrier()
    if rank == 0:  # so that nothing is in flight as MPI ends
        private, number = communicator.planner.comm, np.zeros(2, np.int64)
        private.Iallgather(number[:1].copy(), number).Wait() if vector in (
            "Reduce_scatter",
            "compile",
        ) else private.Ibcast(number).Wait()


@pytest.mark.mpi(ranks=[2])
def test_elements_for_which_an_operation_is_not_defined_are_refused_alike_at_every_size(communicator, ranks):
    from mpi4py import MPI

    for dtype, op in (("c16", MPI.MAX), ("f4", MPI.BAND)):
        for count in (4, 4000):
            x, y = np.ones(count, dtype), np.ones(count, dtype)
            for call in (
                lambda x=x, y=y, op=op: communicator.Allreduce(x, y, op),
                lambda x=x, y=y, op=op: communicator.Reduce(x, y, op),
                lambda x=x, y=y, op=op: communicator.Reduce_scatter_block(x, y[: len(y) // 2], op),
            ):
                with pytest.raises(TypeError, match="not defined"):
                    call()
