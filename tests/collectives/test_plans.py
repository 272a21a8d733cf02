"""Plans that are kept: their caches count the memory that they take, and let those go that are not used."""

import tracemalloc

import numpy as np
import pytest


@pytest.fixture
def communicator(comm):
    from collectives import Communicator

    made = Communicator(comm)
    yield made
    made.release()


@pytest.mark.mpi(ranks=[1, 2, 3])
def test_plans_count_what_they_keep(communicator, ranks):
    """Within a factor of two of what Python's allocator gave out while they were made."""
    from mpi4py import MPI

    from collectives.running import plan_moves, plan_reductions

    planner, large, count = communicator._planner, 300_000 * ranks, 5000 * ranks
    plan_moves.barrier(planner, "shared").free()  # the window is there
    half, x = np.ones(large, "f2"), np.ones(8 << 20, "u1")
    every_other = MPI.INT32_T.Create_vector(large, 1, 2).Commit()
    matrix = np.ones(2 * large, "i4")
    mine, all_ = np.ones(large, "i4"), np.empty(ranks * large, "i4")
    spec = [matrix, 1, every_other]
    for name, make in {
        "float16 through slots": lambda: plan_reductions.allreduce(planner, None, half, MPI.SUM, "shared"),
        "float16 in messages": lambda: plan_reductions.allreduce(planner, None, half, MPI.SUM, "direct"),
        "many segments": lambda: plan_reductions.allreduce(planner, None, x, MPI.SUM, "shared"),
        "in place": lambda: plan_reductions.reduce_scatter(planner, None, mine, None, MPI.SUM, "shared"),
        "packed": lambda: plan_moves.broadcast(planner, spec, 0, "binomial"),
        "packed, shared": lambda: plan_moves.broadcast(planner, spec, 0, "shared"),
        "packed, gathered": lambda: plan_moves.allgather(planner, spec, [all_, large, MPI.INT32_T], "ring"),
        "packed, for the root": lambda: plan_moves.gather(planner, spec, [all_, large, MPI.INT32_T], 0, "flat"),
        "exchanged in place": lambda: plan_moves.alltoall(planner, None, mine, "pairwise"),
        "short": lambda: plan_reductions.allreduce(planner, None, x[:count], MPI.SUM, "doubling"),
    }.items():
        make().free()  # what is kept elsewhere, programs and facts about datatypes, is there
        tracemalloc.start()
        plan = make()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < 2 * plan.bytes + 8192, name
        if name not in ("short", "many segments"):
            assert plan.bytes < 2 * taken, name
        plan.free()


@pytest.mark.mpi(ranks=[2])
def test_plans_in_shared_memory_fill_the_cache_too(communicator, ranks):
    communicator.Barrier()
    communicator._cache.limit_bytes = 4 << 20
    arrays = [np.ones(1_000_000, "f2") for _ in range(6)]
    for x in arrays:
        communicator.Allreduce(None, x)
        assert (x == ranks).all()
    assert 1 <= len(communicator._cache) < 6
    assert sum(plan.bytes for plan in communicator._cache.values()) == communicator._cache.bytes <= 4 << 20


@pytest.mark.mpi(ranks=[2])
def test_nonblocking_plans_that_are_used_stay(communicator, ranks):
    from mpi4py import MPI

    def start(x):
        communicator.Iallreduce(MPI.IN_PLACE, x).Wait()

    communicator.Barrier()
    communicator._later_plans.limit = 4
    kept, others = np.zeros(3), [np.zeros(5 + i) for i in range(12)]
    start(kept)
    (plan,) = communicator._later_plans.values()
    for x in others:
        start(x)
        start(kept)
        assert plan in communicator._later_plans.values(), "made anew at every second call"
    assert len(communicator._later_plans) == 4


@pytest.mark.mpi(ranks=[2])
def test_a_message_of_another_call_is_told_with_its_cause(communicator, ranks):
    rank, x = communicator.rank, np.zeros(4)
    if rank == 0:
        communicator.Bcast(np.ones(8), algorithm="flat")  # longer than eager ones Open MPI itself cannot cut short
    else:
        with pytest.raises(RuntimeError, match=r"got a longer message than it expects.* different counts.*debug=True"):
            communicator.Bcast(x, algorithm="flat")
        for call in (communicator.Barrier, lambda: communicator.Bcast(x), lambda: communicator.Ibcast(x)):
            with pytest.raises(RuntimeError, match=r"rank 1 has left a collective .*test_plans.py.*release\(\)"):
                call()
    communicator.release()
    x[:] = 1 + rank
    communicator.Allreduce(None, x)
    assert (x == 3).all()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("progress", [False, True])
def test_a_message_of_another_nonblocking_call_is_told_with_its_cause(comm, ranks, progress):
    from collectives import Communicator

    communicator = Communicator(comm, progress=progress)
    rank, x, y = communicator.rank, np.zeros(4), np.zeros(3)
    if rank == 0:
        comm.barrier()  # the other one has begun both
        communicator.Ibcast(np.ones(8), algorithm="flat").Wait()
    else:
        first, second = communicator.Ibcast(x, algorithm="flat"), communicator.Ibcast(y, algorithm="flat")
        comm.barrier()
        with pytest.raises(RuntimeError, match=r"got a longer message than it expects.* different counts.*debug=True"):
            first.Wait()
        left = r"rank 1 has left a collective before its end \(at test_plans.py:.*release\(\)"
        for call in (second.Wait, second.Test, communicator.Barrier, lambda: communicator.Ibcast(x)):
            with pytest.raises(RuntimeError, match=left):
                call()
    communicator.release()
    x[:] = 1 + rank
    communicator.Iallreduce(None, x).Wait()
    assert (x == 3).all() and not y.any()


@pytest.mark.mpi(ranks=[2])
def test_a_call_that_is_left_is_not_taken_for_the_next(communicator, ranks):
    from collectives.running.table import BCAST

    rank, x, y = communicator.rank, np.full(4, 5.0), np.zeros(4)

    def interrupted():
        raise KeyboardInterrupt

    if rank == 1:
        plan = communicator._new(("a key",), BCAST, "flat", (0,), y)
        plan.calls.insert(1, interrupted)  # its receive is posted
        with pytest.raises(KeyboardInterrupt):
            communicator._plans["a key",]()
        with pytest.raises(RuntimeError, match=r"has left a collective before its end \(at .*KeyboardInterrupt\)"):
            communicator.Bcast(y, algorithm="flat")
    communicator.barrier()  # rank 0 has not sent before
    if rank == 0:
        communicator.Bcast(x, algorithm="flat")
    communicator.barrier()
    assert rank == 0 or not y.any(), "nothing comes into memory of which nobody waits any more"
    communicator.release()
    communicator.Allreduce(None, x)
    assert (x == 10).all()


@pytest.mark.mpi(ranks=[2])
def test_a_plan_that_is_not_to_be_kept_is_gone_with_its_call(communicator, ranks):
    x, y = np.ones(2 * 100_000), np.empty(100_000)
    for keep, kept in ((False, 0), (True, 1)):
        communicator.Reduce_scatter_block(x, y, algorithm="ring", keep=keep)
        assert (y == ranks).all() and len(communicator._cache) == kept
        y[:] = 0
        communicator.Ireduce_scatter_block(x, y, algorithm="ring", keep=keep).Wait()
        assert (y == ranks).all() and len(communicator._later_plans) == kept
    assert min(plan.bytes for plan in communicator._cache.values()) >= x.nbytes
