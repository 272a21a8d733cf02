"""Plans that are kept: their caches count the memory that they take, and let those go that are not used."""

import gc
import mmap
import os
import signal
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from collectives.algorithms.registry import by_messages


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

    planner, large, count = communicator.planner, 300_000 * ranks, 5000 * ranks
    plan_moves.barrier(planner, "shared").free()  # the window is there
    half, x = np.ones(large, "f2"), np.ones(8 << 20, "u1")
    mine, backwards = np.ones(large, "i4"), list(range((ranks - 1) * large, -1, -large))
    all_ = [np.empty(ranks * large, "i4"), [large] * ranks, backwards, MPI.INT32_T]
    for name, make in {
        "float16 through slots": lambda: plan_reductions.allreduce(planner, None, half, MPI.SUM, "shared"),
        "float16 in messages": lambda: plan_reductions.allreduce(planner, None, half, MPI.SUM, "direct"),
        "many segments": lambda: plan_reductions.allreduce(planner, None, x, MPI.SUM, "shared"),
        "in place": lambda: plan_reductions.reduce_scatter(planner, None, mine, None, MPI.SUM, "shared"),
        "packed": lambda: plan_moves.allgather(planner, mine, all_, "doubling", vector=True),
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
    communicator.plan_cache.limit_bytes = 4 << 20
    arrays = [np.ones(1_000_000, "f2") for _ in range(6)]
    for x in arrays:
        communicator.Allreduce(None, x)
        assert (x == ranks).all()
    assert 1 <= len(communicator.plan_cache) < 6
    assert sum(plan.bytes for plan in communicator.plan_cache.values()) == communicator.plan_cache.bytes <= 4 << 20


@pytest.mark.mpi(ranks=[2])
def test_nonblocking_plans_that_are_used_stay(communicator, ranks):
    from mpi4py import MPI

    def start(x):
        communicator.Iallreduce(MPI.IN_PLACE, x).Wait()

    communicator.Barrier()
    communicator.plan_cache.limit = 4
    kept, others = np.zeros(3), [np.zeros(5 + i) for i in range(12)]
    start(kept)
    plan = list(communicator.plan_cache.values())[-1]
    for x in others:
        start(x)
        start(kept)
        assert plan in communicator.plan_cache.values(), "made anew at every second call"
    assert len(communicator.plan_cache) == 4


@pytest.mark.mpi(ranks=[2])
def test_a_message_of_another_call_is_told_with_its_cause(communicator, ranks):
    rank, x = communicator.rank, np.zeros(4)
    if rank == 0:
        communicator.Bcast(np.ones(8), algorithm="flat")  # longer than eager ones Open MPI itself cannot cut short
    else:
        with pytest.raises(RuntimeError, match="longer message"):
            communicator.Bcast(x, algorithm="flat")
        for call in (communicator.Barrier, lambda: communicator.Bcast(x), lambda: communicator.Ibcast(x)):
            with pytest.raises(RuntimeError, match=r"rank 1.*test_plans\.py"):
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
        with pytest.raises(RuntimeError, match="longer message"):
            first.Wait()
        left = r"test_plans\.py"
        for call in (second.Wait, second.Test, communicator.Barrier, lambda: communicator.Ibcast(x)):
            with pytest.raises(RuntimeError, match=left):
                call()
    communicator.release()
    x[:] = 1 + rank
    communicator.Iallreduce(None, x).Wait()
    assert (x == 3).all() and not y.any()


@pytest.mark.mpi(ranks=[2])
def test_a_call_that_is_left_is_not_taken_for_the_next(communicator, ranks):
    from collectives.running import plan_moves

    rank, x, y = communicator.rank, np.full(4, 5.0), np.zeros(4)

    def interrupted():
        raise KeyboardInterrupt

    if rank == 1:
        plan = plan_moves.broadcast(communicator.planner, y, 0, "flat")
        plan.calls.insert(1, interrupted)  # its receive is posted
        with pytest.raises(KeyboardInterrupt):
            plan()
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
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
        assert (y == ranks).all() and len(communicator.plan_cache) == kept
        y[:] = 0
        communicator.Ireduce_scatter_block(x, y, algorithm="ring", keep=keep).Wait()
        assert (y == ranks).all() and len(communicator.plan_cache) == kept
    assert min(plan.bytes for plan in communicator.plan_cache.values()) >= x.nbytes


@pytest.mark.mpi(ranks=[3])
@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_a_call_in_node_memory_that_is_left_is_the_last_on_every_rank(comm, ranks, how):
    """Before, the rank that had left it could call again, and another rank took that call for the one it was in."""
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.failures.aborted import Aborted

    communicator, rank, x = Communicator(comm), comm.rank, np.ones(10_000)
    communicator.Allreduce(MPI.IN_PLACE, x)
    cause = "TimeoutError: rank 0 has waited .* ranks 1, 2 of 3 did not come"
    if rank == 0 and how == "timeout":
        communicator.planner.deadline.seconds = 0.2
        with pytest.raises(TimeoutError):
            communicator.Allreduce(MPI.IN_PLACE, x)
    if rank == 0 and how == "interrupt":
        timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            communicator.Allreduce(MPI.IN_PLACE, x)
    cause = cause if how == "timeout" else "KeyboardInterrupt"
    comm.barrier()
    calls = (
        lambda: communicator.Allreduce(MPI.IN_PLACE, x),
        lambda: communicator.Allreduce(MPI.IN_PLACE, np.ones(20_000)),
        lambda: communicator.Allreduce(MPI.IN_PLACE, x, algorithm="ring"),
        lambda: communicator.Iallreduce(MPI.IN_PLACE, x),
        lambda: communicator.Barrier(),
    )
    for call in calls:
        with pytest.raises(Aborted, match=rf"rank 0 has aborted .* \(.*{cause}"):
            call()
    communicator.release()
    x[:] = rank
    communicator.Allreduce(MPI.IN_PLACE, x)
    assert (x == 3).all()
    communicator.release()


@pytest.mark.mpi(ranks=[3])
@pytest.mark.parametrize("how", ["blocking", "Wait", "Test", "persistent"])
def test_ranks_that_wait_for_messages_see_that_another_has_aborted(comm, ranks, how):
    """Where they share memory: before, they waited in MPI until the watchdog, or for ever."""
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.failures.aborted import Aborted

    communicator, x = Communicator(comm), np.ones(50_000)
    request = communicator.Allreduce_init(MPI.IN_PLACE, x, algorithm="ring")
    communicator.Allreduce(MPI.IN_PLACE, x)  # in node memory
    comm.barrier()
    if comm.rank == 0:
        communicator.planner.deadline.seconds = 0.2
        with pytest.raises(TimeoutError):
            communicator.Allreduce(MPI.IN_PLACE, x)
    else:
        with pytest.raises(Aborted, match=r"rank 0.*TimeoutError"):
            if how == "blocking":
                communicator.Allreduce(MPI.IN_PLACE, x, algorithm="ring")
            if how == "Wait":
                communicator.Iallreduce(MPI.IN_PLACE, x, algorithm="ring").Wait()
            if how == "persistent":
                request.Start()
                request.Wait()
            if how == "Test":
                begun = communicator.Iallreduce(MPI.IN_PLACE, x, algorithm="ring")
                while not begun.Test():
                    pass
    comm.barrier()
    with pytest.raises(Aborted, match="rank 0"):
        communicator.Allreduce(MPI.IN_PLACE, x)
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_memory_that_ranks_share_keeps_no_descriptors_and_goes(comm, ranks):
    from mpi4py import MPI

    from collectives import Communicator, Copy, Reduce
    from collectives.steps import Barrier

    def held():
        maps = sum("memfd:ringprop" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), maps

    communicator = Communicator(comm)
    arrays = [communicator.empty(10)]
    before = held()
    arrays += [communicator.empty(10) for _ in range(20)]
    assert held() == (before[0], before[1] + 20)
    del arrays
    gc.collect()
    seen = set()
    for k in range(1, 20):  # each function is another algorithm, which names other ranks' buffers

        def algorithm(rank, size, count, k=k):
            yield (Copy("mine", 0, count, "x", 0),)
            yield (Barrier(),)
            yield tuple(Reduce("x", 0, count, "mine", 0, of=q) for q in range(size) if q != rank)
            yield (Barrier(),)

        for count in (100, 100 * k, 1000):
            x = np.full(count, comm.rank + k)
            communicator.Allreduce(MPI.IN_PLACE, x, algorithm=algorithm)
            assert (x == 2 * k + 1).all()
        gc.collect()
        seen.add(held())
    assert len(seen) <= 2, "memory that all these algorithms use, as it was first and as it has grown"
    communicator.release()


def test_the_file_of_mpich_ranks_has_no_name_once_all_have_mapped_it():
    from collectives.node_memory.files import unlink_library_memory

    name = f"/dev/shm/mpich_shm_test{os.getpid()}_"
    for path in (Path(name + "0"), Path(name + "of another job")):
        path.write_bytes(bytes(4096))
    with open(name + "0", "r+b") as file, mmap.mmap(file.fileno(), 4096):
        unlink_library_memory(name)
    assert not Path(name + "0").exists()
    Path(name + "of another job").unlink()


@pytest.mark.mpi(ranks=[2])
def test_what_mpi_does_not_define_is_refused_before_anything_is_sent(communicator, ranks):
    from mpi4py import MPI

    for count in (4, 5000):
        x = np.ones(count, bool)
        for call in (communicator.Allreduce, communicator.Scan, communicator.Reduce, communicator.Iallreduce):
            with pytest.raises(TypeError, match="SUM is not defined for MPI_C_BOOL"):
                call(MPI.IN_PLACE if call != communicator.Reduce else x, x.copy())
        communicator.Allreduce(MPI.IN_PLACE, x, MPI.LAND)
        assert x.all()


@pytest.mark.mpi(ranks=[2])
def test_an_entry_of_the_registry_is_what_its_name_is(communicator, ranks):
    from collectives import ALGORITHMS

    communicator.Barrier(algorithm=ALGORITHMS["barrier"]["dissemination"])
    for operation in ALGORITHMS:
        for name, entry in by_messages(operation).items():
            by_entry = communicator.explain(operation, 100, algorithm=entry)
            assert by_entry == communicator.explain(operation, 100, algorithm=name) and f": {name}, because" in by_entry
