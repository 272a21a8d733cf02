"""Shortcuts give what the methods give, and give way where they must not decide."""

import gc
from inspect import isfunction

import numpy as np
import pytest


@pytest.fixture
def communicator(comm):
    from collectives import Communicator

    communicator = Communicator(comm)
    yield communicator
    communicator.release()


def summed(call, x, comm):
    """x after an allreduce in place of distinct numbers, and what it should be."""
    ramp = np.arange(x.size) % 50
    x[...] = (ramp + comm.rank).astype(x.dtype)
    call()
    size = comm.Get_size()
    np.testing.assert_array_equal(x, (size * ramp + size * (size - 1) // 2).astype(x.dtype))


@pytest.mark.mpi(ranks=1)
def test_a_missing_argument_is_said_of_the_method(communicator):
    with pytest.raises(TypeError, match=r"^Communicator\.Allreduce\(\) missing .* 'recvbuf'"):
        communicator.Allreduce(np.ones(3))


@pytest.mark.mpi(ranks=[1, 2])
def test_an_array_finds_its_plan_until_it_changes(communicator, comm):
    from mpi4py import MPI

    known = communicator.plan_cache.known.entries
    x = np.zeros(10_000, "f4")
    allreduce = lambda: communicator.Allreduce(MPI.IN_PLACE, x)
    summed(allreduce, x, comm)
    assert list(known) == [id(x)]
    plan = next(iter(communicator.plan_cache.values()))
    plan.used = False
    communicator.plan_cache.clear()  # from here on only the shortcut finds it
    summed(allreduce, x, comm)
    assert plan.used and not communicator.plan_cache

    with pytest.raises(ValueError, match="resize"):
        x.resize(20_000, refcheck=False)  # would move the memory that the plan names
    plan.used = False
    x.dtype = "i4"
    summed(allreduce, x, comm)
    assert not plan.used, "summed integers as floats"
    x.dtype = "f4"
    x.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        allreduce()
    x = None
    gc.collect()
    assert not known


@pytest.mark.mpi(ranks=[1, 2])
def test_a_plan_that_goes_is_not_found(communicator, comm):
    from mpi4py import MPI

    communicator.plan_cache.limit = 2
    arrays = [np.zeros(10_000 + i, "f8") for i in range(5)]
    for _ in range(3):
        for x in arrays:
            summed(lambda x=x: communicator.Allreduce(MPI.IN_PLACE, x), x, comm)
            assert len(communicator.plan_cache) <= 2 and len(communicator.plan_cache.known.entries) <= 2
    communicator.plan_cache.free()
    assert not communicator.plan_cache.known.entries


@pytest.mark.mpi(ranks=[1, 2])
def test_a_plan_that_goes_leaves_the_others_their_shortcut(communicator, comm):
    from mpi4py import MPI

    from collectives.running import plan_reductions

    communicator.plan_cache.limit = 4
    known = communicator.plan_cache.known.entries
    kept, *others = [np.zeros(10_000 + i, "f8") for i in range(9)]
    for x in (kept, *others):
        for again in (x, kept):  # kept is spared, as it runs; plans of the others go
            summed(lambda x=again: communicator.Allreduce(MPI.IN_PLACE, x), again, comm)
    plans = [plan for key, plan in communicator.plan_cache.items() if key[0] is plan_reductions.allreduce]
    assert id(kept) in known, "found by all that the call is made of, for good"
    assert {id(entry[2].__self__) for entry in known.values()} == set(map(id, plans))
    communicator.plan_cache.known.unregister(known[id(kept)][2].__self__)
    assert id(kept) not in known and len(known) == len(plans) - 1


@pytest.mark.mpi(ranks=[2])
def test_a_shortcut_that_is_kept_lets_others_finish_first(communicator, comm):
    from mpi4py import MPI

    kept = communicator.Allreduce
    later, x, y = np.ones(50_000), np.zeros(100, "f4"), np.zeros(100_000, "f4")
    for array in (x, y):
        for again in range(3):
            request = communicator.Iallreduce(MPI.IN_PLACE, later)
            if comm.rank == again % 2:
                request.Wait()
            summed(lambda array=array: kept(MPI.IN_PLACE, array), array, comm)
            assert request.done, "passed a collective in flight"
    np.testing.assert_array_equal(later, 2.0**6)


@pytest.mark.mpi(ranks=[1, 2])
def test_short_calls(communicator, comm):
    """Those that go to the library, and those that must not: wrong ones are refused in our words."""
    from mpi4py import MPI

    size, rank = comm.Get_size(), comm.rank
    x, y = np.full(3, rank + 1.0), np.zeros(3)
    total = size * (size + 1) / 2
    communicator.Allreduce(x, y)
    assert (y == total).all()
    communicator.Allreduce(x, y, MPI.MAX)
    assert (y == size).all()
    communicator.Reduce(x, y, root=size - 1)
    assert rank < size - 1 or (y == total).all()
    blocks = np.zeros(3 * size)
    communicator.Allgather(x, blocks)
    np.testing.assert_array_equal(blocks, np.repeat(np.arange(size) + 1.0, 3))
    communicator.Reduce_scatter_block(blocks, y)
    assert (y == size * (rank + 1)).all()
    communicator.Bcast(x, size - 1)
    assert (x == size).all()
    communicator.Barrier()
    summed(lambda: communicator.Allreduce(MPI.IN_PLACE, h), h := np.zeros(100, "f2"), comm)

    with pytest.raises(TypeError, match="send buffer"):
        communicator.Allreduce(x.astype("f4"), y)
    with pytest.raises(ValueError, match="2 elements"):
        communicator.Allreduce(x[:2], y)
    with pytest.raises(ValueError, match="overlap"):
        communicator.Allreduce(y, y)
    with pytest.raises(ValueError, match=f"root {size}"):
        communicator.Bcast(x, size)
    with pytest.raises(ValueError, match=f"root {size}"):
        communicator.Reduce(x, y, root=size)


def is_shortcut(function):
    return isfunction(function) and function.__module__ == "collectives.running.plan_cache"


@pytest.mark.mpi(ranks=[1])
def test_where_there_are_no_shortcuts(comm):
    from collectives import Communicator

    class Own(Communicator):
        def Allreduce(self, *arguments, **more):
            return "own"

    own = Own(comm)
    assert own.Allreduce(np.zeros(1), np.zeros(1)) == "own"
    own.release()
    for options in ({"debug": True}, {"synchronous": True}):
        communicator = Communicator(comm, **options)
        assert not any(is_shortcut(front) for front in vars(communicator).values())
        communicator.release()
    for options in ({}, {"watch": 300}):
        communicator = Communicator(comm, **options)
        front = vars(communicator)["Allreduce"]
        inner = [cell.cell_contents for cell in front.__closure__]  # the watchdog's function stands before it
        assert any(map(is_shortcut, [front, *inner])), "a short call would cost microseconds more"
        communicator.release()
        assert "Allreduce" not in vars(communicator)
