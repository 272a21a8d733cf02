"""Nonblocking collectives: the same results, in order, whoever advances them."""

import threading
import time

import numpy as np
import pytest
from conftest import PATIENCE

import collectives
from collectives import progress
from collectives.running import nonblocking
from parallel.launch import launcher

COUNT = 50_000  # long enough for rendezvous


@pytest.fixture(params=[False, True], ids=["poked", "thread"])
def communicator(comm, request):
    from collectives import Communicator

    made = Communicator(comm, progress=request.param, synchronous=True)
    yield made
    made.release()


def value(rank, call, count=COUNT):
    return ((np.arange(count) + 7 * rank + 3 * call) % 13).astype("f8")


@pytest.mark.mpi(ranks=[1, 2, 3])
def test_results(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    for algorithm in (None, "native", "ring"):
        for call in range(3):
            total = sum(value(r, call) for r in range(ranks))
            x = [value(rank, call) for _ in range(5)]
            y = np.full(COUNT, -1.0)
            everything = np.full((ranks, COUNT), -1.0)
            lengths = [COUNT - ranks + 1] + [1] * (ranks - 1)
            mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
            piece = np.full(lengths[rank], -1.0)
            requests = [
                communicator.Iallreduce(x[0], y, algorithm=algorithm),
                communicator.Ibcast(x[1], ranks - 1, algorithm=None if algorithm == "ring" else algorithm),
                communicator.Iallgather(x[2], everything, algorithm=algorithm),
                communicator.Ireduce_scatter(x[3], piece, lengths, algorithm=algorithm),
                communicator.Iallreduce(MPI.IN_PLACE, x[4], algorithm=algorithm),
            ]
            if call == 0:
                nonblocking.waitall(reversed(requests))
            else:
                while not nonblocking.testall(requests):
                    time.sleep(1e-4)
            assert (y == total).all() and (x[4] == total).all()
            assert (x[1] == value(ranks - 1, call)).all()
            assert all((everything[r] == value(r, call)).all() for r in range(ranks))
            assert (piece == total[mine]).all()


@pytest.mark.mpi(ranks=[1, 2, 3])
def test_blocks_of_other_lengths_every_time(communicator, ranks):
    """Ialltoallv: rank r sends (r + 1) (q + call) numbers to rank q."""
    rank = communicator.rank
    for algorithm in (None, "native", "pairwise"):
        for call in range(3):
            to = [(rank + 1) * (q + call) for q in range(ranks)]
            source = [(r + 1) * (rank + call) for r in range(ranks)]
            x = np.repeat(np.arange(ranks), to) + 10.0 * rank
            y = np.full(sum(source), -1.0)
            starts = [[0, *np.cumsum(counts)[:-1].tolist()] for counts in (to, source)]
            request = communicator.Ialltoallv([x, to, starts[0], "d"], [y, source, starts[1], "d"], algorithm=algorithm)
            request.Wait()
            assert (y == np.repeat(10.0 * np.arange(ranks), source) + rank).all()


@pytest.mark.mpi(ranks=[2, 3])
def test_they_advance_while_the_caller_computes(comm, ranks):
    """Rank 0 only pokes, or does nothing at all where there is a thread; the others wait."""
    from collectives import Communicator, progress

    for thread in (False, True):
        communicator = Communicator(comm, progress=thread)
        x = value(comm.rank, 0)
        request = communicator.Iallreduce(None, x)
        if comm.rank == 0:
            give_up = time.monotonic() + PATIENCE
            while not request.done and time.monotonic() < give_up:
                time.sleep(1e-3)
                if not thread:
                    communicator.progress()
            assert request.done
        else:
            request.Wait()
        assert (x == sum(value(r, 0) for r in range(ranks))).all()
        communicator.release()
        assert not progress.thread.calls and not progress.thread.wanted.is_set(), "the thread looks only while it must"
    assert [t.name for t in threading.enumerate()].count("progress") == 1


@pytest.mark.mpi(ranks=[2])
def test_a_blocking_call_lets_those_in_flight_finish(communicator, ranks):
    """Rank 0 waits for the request first, rank 1 calls the blocking collective first: both are right in MPI."""
    x, y = value(communicator.rank, 0), value(communicator.rank, 1)
    request = communicator.Iallreduce(None, x)
    if communicator.rank == 0:
        request.Wait()
    communicator.Allreduce(None, y)
    assert request.Test() and request.Wait()
    assert (x == value(0, 0) + value(1, 0)).all() and (y == value(0, 1) + value(1, 1)).all()


@pytest.mark.mpi(ranks=[2])
def test_buffers_live_and_plans_stay_while_in_flight(communicator, ranks):
    communicator.Barrier()
    communicator.plan_cache.limit = 2
    for repeat in range(3):
        kept = [value(communicator.rank, i, 3000) for i in range(6)]
        requests = [communicator.Iallreduce(None, x) for x in kept]
        requests.append(communicator.Iallreduce(value(communicator.rank, 9), np.empty(COUNT)))  # nobody else holds it
        nonblocking.waitall(requests)
        for i, x in enumerate(kept):
            assert (x == value(0, i, 3000) + value(1, i, 3000)).all(), repeat
    assert not any(plan.busy for plan in communicator.plan_cache.values())
    assert len(communicator.plan_cache) <= 2 + 6, "those of one repeat were in flight: those of the ones before go"
    if communicator.rank == 1:
        communicator.recv(source=0)  # until then, what rank 0 has begun cannot end
    held = value(0, 0)
    request = communicator.Iallreduce(None, held)
    if communicator.rank == 0:
        with pytest.raises(RuntimeError, match="1 collectives are still in flight"):
            communicator.release()
        communicator.send("go on", 1)
    request.Wait()


FORGETFUL = """
import numpy as np
from mpi4py import MPI
from collectives import Communicator
from collectives.running import nonblocking

def step():
    for _ in range(2):
        made.Iallreduce(MPI.IN_PLACE, np.ones(200_000))  # so long that it needs both ranks

made = Communicator(MPI.COMM_WORLD, progress=THREAD)
nonblocking.EXIT_GRACE *= 0.1 if THREAD else 1
made.Barrier()
WHAT
"""
EACH = "for a nonblocking allreduce of [IN_PLACE, (200000,) float64] (started at program.py:9 in step), 2 times"
# What the program does -> whether a thread advances it, status, what is said, what is not.
ENDS = {
    "step()": (False, 0, ["rank 0: the program ends", "rank 1: the program ends", EACH], ["not finished"]),
    "step(); MPI.Finalize()": (False, 0, ["rank 0: the program ends", "rank 1: the program ends", EACH], ["not fin"]),
    "step() if made.rank else made.Iallreduce(MPI.IN_PLACE, np.ones(200_000)).Wait(); MPI.COMM_WORLD.Barrier()": (
        True,
        0,
        ["rank 1: the program ends", "rank 1: 1 not finished in 0.5 s more: other ranks"],
        ["rank 0"],
    ),
    "step(); 1 // (1 - made.rank)": (False, 1, ["ZeroDivisionError", "rank 1: an exception ends", EACH], []),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_nobody_waited_for_is_named_at_the_end(what, tmp_path):
    """And the end is neither a segmentation fault nor without end, and the ranks that do wait are not let down."""
    thread, status, said, unsaid = ENDS[what]
    program, lines = tmp_path / "program.py", []
    program.write_text(FORGETFUL.replace("THREAD", str(thread)).replace("WHAT", what))
    got = launcher.run([program], ranks=2, timeout=PATIENCE, stdout=lines.append)
    text = "".join(lines)
    assert got == status, text
    assert all(words in text for words in said), text
    assert not any(words in text for words in unsaid), text


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("name", ["Dup", "Split", "empty"])
def test_what_makes_communicators_and_memory_lets_those_in_flight_finish(comm, name):
    from mpi4py import MPI

    from collectives import Communicator

    communicator = Communicator(comm, watch=120)
    make = (lambda: communicator.empty(1000)) if name == "empty" else getattr(communicator, name)
    x = np.ones(1 << 16)
    request = communicator.Iallreduce(MPI.IN_PLACE, x)
    if comm.rank == 0:
        made = make()
        request.Wait()
    else:
        request.Wait()
        made = make()
    assert (x == 2).all()
    if name != "empty":
        assert made.allreduce(1) == 2
        made.Free()
    communicator.release()


@pytest.mark.mpi(ranks=2)
def test_collectives_of_objects_let_those_in_flight_finish(comm):
    """One rank waits before the broadcast, the other after it: both are right."""
    from mpi4py import MPI

    from collectives import Communicator

    communicator = Communicator(comm, watch=120)
    x, first = np.full(1000, comm.rank + 1.0), comm.rank == 0
    for _ in range(3):
        x[:] = comm.rank + 1
        request = communicator.Iallreduce(MPI.IN_PLACE, x)
        if first:
            request.Wait()
        assert communicator.bcast("all of us" if first else None) == "all of us"
        assert communicator.allgather(comm.rank) == [0, 1]
        assert request.Test() and (x == 3).all()
    communicator.release()


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize(
    "what", ["ring", "native", "shared", "auto", "Iallreduce", "objects", "Run", "Irun", "Split", "empty"]
)
def test_communicators_may_be_waited_for_in_different_orders(comm, what):
    """Rank 0 calls something of the one before it waits for what is in flight in the other, rank 1 after it."""
    from mpi4py import MPI

    from collectives import Communicator

    a, b = Communicator(comm, watch=120), Communicator(comm, watch=120)
    first, y = comm.rank == 0, np.ones(50_000)
    rounds = collectives.ALGORITHMS["allreduce"]["ring"].rounds(comm.rank, 2, y.size)
    call = {
        "Iallreduce": lambda: b.Iallreduce(MPI.IN_PLACE, y, algorithm="ring").Wait(),
        "objects": lambda: y.__iadd__(b.allreduce(1) - 1),
        "Run": lambda: b.Run(plan),
        "Irun": lambda: b.Irun(plan).Wait(),
        "Split": lambda: y.__iadd__(b.Split().size - 1),
        "empty": lambda: y.__iadd__(b.empty(9) is not None),
    }.get(what, lambda: b.Allreduce(MPI.IN_PLACE, y, algorithm=what))
    plan = b.compile(rounds, x=y) if what in ("Run", "Irun") else None
    for _ in range(2):  # a new call, and one that is known
        x, y[:] = np.ones(200_000), 1
        request = a.Iallreduce(MPI.IN_PLACE, x, algorithm="ring")  # so long that it needs both ranks
        if not first:
            request.Wait()
        call()
        request.Wait()
        assert (x == 2).all() and (y == 2).all()
    assert not progress.in_flight
    a.release()
    b.release()


@pytest.mark.mpi(ranks=2)
def test_a_schedule_of_ones_own_in_flight(comm):
    """Its buffers come while something else is done; in one in shared memory ranks wait at barriers meanwhile."""
    from collectives import Communicator
    from collectives.steps import Barrier, Copy, Recv, Send

    communicator, other = Communicator(comm, watch=120), 1 - comm.rank
    x, y = np.empty(50_000), np.empty(50_000)
    plan = communicator.compile([(Send(other, "x", 0, x.size), Recv(other, "y", 0, y.size))], x=x, y=y)
    for step in range(3):
        x[:], y[:] = comm.rank + step, -1
        request = communicator.Irun(plan, "exchange")
        assert communicator.allreduce(1) == 2, "a blocking call lets it finish first"
        assert request.Test() and (y == other + step).all()
    here = communicator.compile([(Barrier(),), (Copy("y", 0, 1, "x", 0, other),), (Barrier(),)], x=x, y=y)
    for run in (communicator.Run, lambda plan: communicator.Irun(plan, "exchange").Wait()):
        x[0] = comm.rank + 5
        run(here)
        assert y[0] == other + 5
        y[0] = -1
    communicator.release()


@pytest.mark.mpi(ranks=3)
def test_rows_and_columns_in_flight_at_once(comm):
    """Communicators that overlap in part, waited for in an order of each rank's own."""
    from mpi4py import MPI

    from collectives import Communicator

    world = Communicator(comm, watch=120)
    groups = [world.Split(comm.rank == alone, comm.rank) for alone in range(3)]
    x = [np.ones(200_000) for _ in groups]
    requests = [each.Iallreduce(MPI.IN_PLACE, y) for each, y in zip(groups, x, strict=True)]
    for k in range(3):
        requests[(k + comm.rank) % 3].Wait()
    assert [y[-1] for y in x] == [each.size for each in groups]
    for each in (*groups, world):
        each.release()


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("name", ["Split_type", "Create", "Create_group", "Clone", "Alltoallw", "Create_cart"])
def test_other_calls_of_the_library_beside_one_in_flight(comm, name):
    """Rank 0 calls it before it waits, rank 1 after it; of Create_group also where the other rank is no part of it."""
    from mpi4py import MPI

    from collectives import Communicator

    communicator = Communicator(comm, watch=120)
    x, told, given = np.ones(200_000), np.zeros(2, "i4"), np.full(2, comm.rank + 1, "i4")
    cut = [[1, 1], [0, 4], [MPI.INT, MPI.INT]]
    group = communicator.Get_group()
    call = {
        "Split_type": lambda: communicator.Split_type(MPI.COMM_TYPE_SHARED),
        "Create": lambda: communicator.Create(group),
        "Create_group": lambda: communicator.Create_group(group),
        "Clone": communicator.Clone,
        "Alltoallw": lambda: communicator.Alltoallw([given, *cut], [told, *cut]),
        "Create_cart": lambda: communicator.Create_cart([2]),
    }[name]
    request = communicator.Iallreduce(MPI.IN_PLACE, x, algorithm="ring")
    if comm.rank:
        request.Wait()
    made = call()
    request.Wait()
    assert (x == 2).all()
    assert told.tolist() == [1, 2] if made is None else made.allreduce(1) == 2
    if name == "Create_group":
        request = communicator.Iallreduce(MPI.IN_PLACE, x) if comm.rank == 0 else None
        if comm.rank == 0:
            alone = communicator.Create_group(group.Incl([0]))
            comm.send(alone.allreduce(1), 1)
        else:
            assert comm.recv(source=0) == 1
            request = communicator.Iallreduce(MPI.IN_PLACE, x)
        request.Wait()
        assert (x == 4).all()
    communicator.release()


@pytest.mark.mpi(ranks=2)
def test_a_failure_while_another_call_moves_it_is_told_where_it_is_waited_for(comm, monkeypatch):
    from mpi4py import MPI

    from collectives import Communicator

    a, b = Communicator(comm, watch=120), Communicator(comm, watch=120)
    a.Barrier()

    def fails():
        raise OSError("no such cable")

    x = np.ones(1000)
    a.Iallreduce(MPI.IN_PLACE, x).Wait()
    plan = list(a.plan_cache.values())[-1]
    plan.calls.append(fails)
    requests = a.Iallreduce(MPI.IN_PLACE, x), b.Iallreduce(MPI.IN_PLACE, np.ones(1000))
    assert requests[1].Wait() and b.allreduce(1) == 2
    for ask in (requests[0].Wait, requests[0].Test):
        with pytest.raises(OSError, match="no such cable"):
            ask()
    a.release()
    b.release()


@pytest.mark.mpi(ranks=1)
def test_a_call_that_an_interrupt_ended_is_not_made_again(comm):
    from collectives import Communicator
    from collectives.failures.aborted import Aborted
    from collectives.steps import Compute, Slice

    communicator, x = Communicator(comm), np.zeros(4)

    def add_one(array):
        array += 1
        raise KeyboardInterrupt

    rounds = [(Compute("add", (), (Slice("x", 0, 4),)),)]
    plan = communicator.compile(rounds, x=x, computations={"add": add_one})
    with pytest.raises(KeyboardInterrupt):
        communicator.Irun(plan).Wait()
    with pytest.raises(Aborted, match="KeyboardInterrupt"):
        communicator.Barrier()
    assert (x == 1).all()


@pytest.mark.mpi(ranks=2)
def test_a_wait_ends_also_where_another_communicator_has_something_in_flight(comm, monkeypatch):
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.running import nonblocking

    monkeypatch.setattr(nonblocking, "SPIN_LIMIT", 0.2)
    a, b = Communicator(comm), Communicator(comm)
    a.planner.deadline.seconds = b.planner.deadline.seconds = 0.3
    if comm.rank == 0:
        requests = [each.Iallreduce(MPI.IN_PLACE, np.ones(50_000), algorithm="ring") for each in (a, b)]
        for request in requests:
            with pytest.raises(TimeoutError):
                request.Wait()
    comm.Barrier()
