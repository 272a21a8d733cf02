"""Persistent collectives: planned once, started often, on what the buffers hold then; in order, whoever waits first."""

import numpy as np
import pytest


@pytest.fixture(params=["schedule", "messages", "thread"])
def communicator(comm, request):
    from collectives import Communicator

    made = Communicator(comm, memory=request.param != "messages", progress=request.param == "thread")
    yield made
    made.release()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_results(communicator, ranks):
    from mpi4py import MPI

    rank, everyone = communicator.rank, range(ranks)
    for count in (1, 700, 20_000):
        for make in (np.empty, communicator.empty):
            x, y, block = make(count, "f8"), make(count, "f8"), make(count, "f8")
            long, other = make(ranks * count, "f8"), make(ranks * count, "f8")
            requests = {
                "Allreduce": communicator.Allreduce_init(x, y, MPI.MAX),
                "Allgather": communicator.Allgather_init(x, long),
                "Reduce": communicator.Reduce_init(x, block, root=ranks - 1),
                "Scan": communicator.Scan_init(x, other[:count]),
                "Barrier": communicator.Barrier_init(),
            }
            for call in range(4):
                x[:] = rank + 10 * call
                y[:] = block[:] = 0
                for request in requests.values():
                    request.Start()
                waits = list(requests.values())
                for request in waits if (call + rank) % 2 else reversed(waits):  # another order on each rank
                    if call > 1:
                        while not request.Test():
                            pass
                    assert request.Wait()
                assert (y == ranks - 1 + 10 * call).all()
                assert (long == np.repeat(np.arange(ranks) + 10.0 * call, count)).all()
                assert (block == (sum(r + 10 * call for r in everyone) if rank == ranks - 1 else 0)).all()
                assert (other[:count] == sum(r + 10 * call for r in range(rank + 1))).all()
            for request in requests.values():
                request.Free()


@pytest.mark.mpi(ranks=[2])
def test_rooted_and_scattered(communicator, ranks):
    rank = communicator.rank
    x, y, long = np.empty(3), np.empty(3), np.empty(6)
    scatter = communicator.Scatter_init(long if rank == 0 else None, y)
    gather = communicator.Gather_init(x, long if rank == 1 else None, root=1)
    bcast, blocks = communicator.Bcast_init(x, root=1), communicator.Reduce_scatter_block_init(long, y)
    swap = communicator.Alltoall_init(long, other := np.empty(6))
    for call in range(3):
        long[:] = np.arange(6) + call + 10 * rank
        for request in (scatter, blocks, swap):
            y[:] = 0
            request.Start()
            request.Wait()
            if request is scatter:
                assert (y == np.arange(3) + call + 3 * rank).all()
            if request is blocks:
                assert (y == 2 * (np.arange(3) + call + 3 * rank) + 10).all()
        assert (other == [k + call + 3 * rank + 10 * r for r in range(2) for k in range(3)]).all()
        x[:] = rank + call
        gather.Start()
        gather.Wait()
        assert rank == 0 or (long == np.repeat([call, call + 1], 3)).all()
        bcast.Start()
        bcast.Wait()
        assert (x == 1 + call).all()


@pytest.mark.mpi(ranks=[2])
def test_what_is_started_is_done_before_a_later_call_and_moves_while_others_are_waited_for(comm, ranks):
    from mpi4py import MPI

    from collectives import Communicator

    first, second = Communicator(comm), Communicator(comm)
    x, y, long = np.ones(20_000), np.zeros(20_000), np.ones(50_000)
    request = first.Allreduce_init(x, y)
    for call in range(3):
        request.Start()
        first.Allreduce(MPI.IN_PLACE, long)  # the same communicator: behind the one that was started
        assert (y == 2).all()
        request.Wait()
        y[:] = 0
        request.Start()
        if comm.rank == call % 2:  # another communicator: ranks wait in another order
            request.Wait()
        second.Allreduce(MPI.IN_PLACE, long, algorithm=("ring", "shared", None)[call])
        request.Wait()
        assert (y == 2).all()
    assert (long == 2**6).all()
    first.release(), second.release()


@pytest.mark.mpi(ranks=[2])
def test_requests_that_are_active_freed_or_left_are_refused(comm, ranks):
    from collectives import Communicator
    from collectives.failures.aborted import Aborted

    communicator = Communicator(comm)
    x, y = np.ones(4), np.empty(4)
    request, other = communicator.Allreduce_init(x, y), communicator.Barrier_init()
    assert request.Wait() and request.Test(), "one that is not active is done"
    request.Start()
    with pytest.raises(RuntimeError, match="active"):
        request.Start()
    with pytest.raises(RuntimeError, match="active"):
        request.Free()
    request.Wait()
    request.Free()
    request.Free()
    with pytest.raises(RuntimeError, match="freed"):
        request.Start()
    with pytest.raises(TypeError, match="not defined"):
        communicator.Allreduce_init(np.ones(3, bool), np.ones(3, bool))
    with pytest.raises(ValueError, match="elements"):
        communicator.Allreduce_init(x, np.ones(3))
    library = communicator.Allreduce_init(x, y, algorithm="native")
    library.Start()
    library.Wait()
    library.Free()
    assert (y == 2).all()
    request = communicator.Allreduce_init(x, y)
    if comm.rank == 0:
        communicator.planner.deadline.seconds = 0.2
        request.Start()
        with pytest.raises(TimeoutError):
            request.Wait()
    comm.barrier()
    for one in (request, other):
        with pytest.raises(Aborted, match=r"rank 0.*allreduce"):
            one.Start()
            one.Wait()
    communicator.release()
    with pytest.raises(RuntimeError, match="freed"):
        other.Start()


@pytest.mark.mpi(ranks=[2])
def test_a_wait_moves_what_another_communicator_has_begun_since_the_start(comm, ranks):
    """Without `memory`, too: a Wait advances what another rank waits for first."""
    from mpi4py import MPI

    from collectives import Communicator

    first, second = Communicator(comm, memory=False), Communicator(comm, memory=False)
    x, y, long = np.ones(200_000), np.zeros(200_000), np.ones(200_000)
    request = first.Allreduce_init(x, y)
    if comm.rank == 0:
        request.Start()
    other = second.Iallreduce(MPI.IN_PLACE, long, algorithm="ring")
    if comm.rank == 1:
        other.Wait()
        request.Start()
    request.Wait()
    other.Wait()
    assert (y == 2).all() and (long == 2).all()
    first.release(), second.release()


@pytest.mark.mpi(ranks=[2])
def test_release_refuses_active_requests_before_it_frees_anything(comm):
    from collectives import Communicator

    communicator = Communicator(comm, watch=60)
    x, y = np.ones(4), np.empty(4)
    communicator.Allreduce(x, y, algorithm="shared")
    request = communicator.Allreduce_init(x, y)
    request.Start()
    communicator.Barrier(algorithm="dissemination")  # behind it the run is done
    before = communicator.watchdog, dict(communicator.plan_cache)
    with pytest.raises(RuntimeError, match="1 persistent collective"):
        communicator.release()
    assert (communicator.watchdog, dict(communicator.plan_cache)) == before
    request.Wait()
    assert (y == 2).all()
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_release_after_an_abort_ends_what_is_in_flight(comm):
    from collectives import Communicator

    communicator = Communicator(comm)
    arrays = [np.ones(3000) for _ in range(4)]
    communicator.Allreduce(None, arrays[0], algorithm="shared")
    persistent = communicator.Allreduce_init(None, arrays[3])
    if comm.rank == 0:
        communicator.planner.deadline.seconds = 0.3
        requests = [communicator.Iallreduce(None, x) for x in arrays[:3]]
        persistent.Start()
        with pytest.raises(TimeoutError):
            requests[0].Wait()
    comm.Barrier()
    communicator.release()
    communicator.Allreduce(None, x := np.ones(3000))
    assert (x == 2).all()


@pytest.mark.mpi(ranks=[2])
def test_what_ranks_agreed_on_is_not_asked_of_a_later_call(comm):
    """A nonblocking call that was refused, or is the library's, left its question to the next one."""
    from collectives import Communicator

    communicator = Communicator(comm, debug=True)
    with pytest.raises(ValueError, match="elements"):
        communicator.Iallreduce(np.ones(3), np.ones(4))
    communicator.Barrier()
    assert communicator.queue.agreed is None
    communicator.Iallreduce(np.ones(3), np.ones(3), algorithm="native").Wait()
    assert communicator.queue.agreed is None
    communicator.release()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("blocking", [True, False])
def test_who_asks_what_others_call_waits_no_longer_than_others(comm, blocking):
    """With debug=True a rank waited without end for what a rank that never comes would call, and release for both."""
    from collectives import Communicator
    from collectives.failures.aborted import Aborted

    communicator = Communicator(comm, debug=True)
    communicator.planner.deadline.seconds = 0.3
    agreement, arrays = communicator.agreement, [np.ones(4) for _ in range(3)]
    if comm.rank == 0:
        requests = [] if blocking else [communicator.Iallreduce(None, x) for x in arrays]
        with pytest.raises(TimeoutError):
            communicator.Allreduce(None, arrays[0]) if blocking else requests[0].Wait()
        with pytest.raises(Aborted, match="about to call"):
            communicator.Iallreduce(None, arrays[1]) if blocking else requests[1].Wait()
    comm.Barrier()
    exchanges = 0 if comm.rank == 0 else 2 if blocking else 3
    for _ in range(exchanges):  # so that nothing is in flight as MPI ends
        agreement.exchange("nothing", "the end")
    for request, *_ in agreement.pending:
        request.Wait()
    communicator.release()
    comm.Barrier()
