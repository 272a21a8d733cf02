"""Algorithms that a caller wrote run as the built-in ones do; wrong ones are refused on all ranks, before they hang."""

import numpy as np
import pytest

import collectives
from collectives import Copy, Deadlock, Recv, RecvReduce, Reduce, ScheduleError, Send, chunk
from collectives.algorithms import allreduce, shared
from collectives.steps import Barrier, Compute, Slice, blocks


@pytest.fixture
def communicator(comm):
    from collectives import Communicator

    communicator = Communicator(comm)
    yield communicator
    communicator.release()


def ring(rank, size, count):
    """One's own, as in a first course."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield (
            Send(right, "x", *chunk(count, size, (rank - k) % size)),
            RecvReduce(left, "x", *chunk(count, size, (rank - k - 1) % size)),
        )
    for k in range(size - 1):
        yield (
            Send(right, "x", *chunk(count, size, (rank + 1 - k) % size)),
            Recv(left, "x", *chunk(count, size, (rank - k) % size)),
        )


def halving(rank, size, count):
    yield from allreduce.rabenseifner(rank, size, count)


def in_memory(rank, size, count):
    """After a barrier each rank sums its slice over all x, and writes it into all x."""
    lo, hi = chunk(count, size, rank)
    yield (Barrier(),)
    yield (Copy("sum", 0, hi - lo, "x", lo, of=0),)
    yield tuple(Reduce("sum", 0, hi - lo, "x", lo, operand_left=False, of=q) for q in range(1, size))
    yield (Barrier(),)
    yield tuple(Copy("x", lo, hi, "sum", 0, to=q) for q in range(size))


def by_slots(rank, size, count):
    """Scratch that others name, written by its rank and read by all; the last pair has a barrier of its own."""
    yield (Copy("slot", 0, count, "x", 0),)
    yield (Barrier(),)
    yield (Copy("x", 0, count, "slot", 0, of=0),)
    yield tuple(Reduce("x", 0, count, "slot", 0, operand_left=False, of=q) for q in range(1, size))
    if rank < 2 <= size:
        yield (Barrier((0, 1)),)


def to_left(rank, size, count):
    """Nobody's slice is read by another; who is not to be heard of names nobody, and is named."""
    if rank == 0:
        for q in range(1, size):
            yield (Recv(q, "ready", 0, 1),)
        for q in range(1, size):
            yield (Reduce("x", 0, count, "x", 0, operand_left=False, of=q),)
        for q in range(1, size):
            yield (Copy("x", 0, count, "x", 0, to=q),)
        for q in range(1, size):
            yield (Send(q, "x", 0, min(count, 1)),)
    else:
        yield (Copy("ready", 0, 1, "x", 0),)
        yield (Send(0, "ready", 0, 1),)
        yield (Recv(0, "done", 0, min(count, 1)),)


@pytest.mark.mpi(ranks=[1, 2, 3], more=[4])
@pytest.mark.parametrize("mine", [ring, halving, in_memory, by_slots, shared.arrays, shared.slots, shared.small])
def test_a_generator_goes_where_a_name_goes(communicator, comm, mine):
    from mpi4py import MPI

    rank, size = comm.Get_rank(), comm.Get_size()
    for dtype, count in (("f8", 1), ("f4", 10), ("f2", 33), ("i4", 1000)):
        ramp = np.arange(count) % 20
        total = (size * ramp + size * (size - 1) // 2).astype(dtype)
        seen = communicator.empty(count, dtype)
        for _ in range(2):
            x, y = (ramp + rank).astype(dtype), np.zeros(count, dtype)
            communicator.Allreduce(x, y, algorithm=mine)
            np.testing.assert_array_equal(y, total)
            np.testing.assert_array_equal(x, (ramp + rank).astype(dtype), "the send buffer is the caller's")
            communicator.Allreduce(MPI.IN_PLACE, x, MPI.MAX, algorithm=mine)
            np.testing.assert_array_equal(x, (ramp + size - 1).astype(dtype))
        seen[:] = ramp + rank
        plan = communicator.compile(mine(rank, size, count), x=seen)
        communicator.Run(plan)
        np.testing.assert_array_equal(seen, total)
        plan.free()
    assert len([key for key in communicator.plan_cache if key[1] is mine]) <= 16, "a plan is kept by its function"


@pytest.mark.mpi(ranks=[3])
def test_others_operations_take_generators_too(communicator, comm):
    from mpi4py import MPI

    rank = comm.Get_rank()

    def star(rank, size, count, root=0):
        if rank == root:
            yield tuple(Send(q, "x", 0, count) for q in range(size) if q != root)
        else:
            yield (Recv(root, "x", 0, count),)

    def look(rank, size, count, root=0):
        yield (Barrier(),)
        if rank != root:
            yield (Copy("x", 0, count, "x", 0, of=root),)

    def gather_up(rank, size, count, root=0):
        yield (Barrier(),)
        if rank == root:
            for q in range(size):
                yield (Reduce("x", 0, count, "x", 0, operand_left=q < root, of=q),) if q != root else ()

    for way in (star, look):
        x = np.full(9, float(rank))
        communicator.Bcast(x, 2, algorithm=way)
        assert (x == 2).all()
    x, y = np.full(5, rank + 1.0), np.zeros(5)
    communicator.Reduce(x, y, MPI.SUM, 1, algorithm=gather_up)
    assert (y == (6 if rank == 1 else 0)).all() and (x == rank + 1).all()
    request = communicator.Iallreduce(x, y, algorithm=ring)
    request.Wait()
    assert (y == 6).all()
    request = communicator.Iallreduce(x, y, algorithm=in_memory)
    request.Wait()
    assert (y == 6).all()
    with pytest.raises(ValueError, match=r"wait to make the memory .* call this blocking first"):
        communicator.Iallreduce(np.zeros(999), np.zeros(999), algorithm=in_memory)


def without_meeting(rank, size, count):
    yield from [steps for steps in by_slots(rank, size, count) if steps != (Barrier(),)]


def waits_in_a_circle(rank, size, count):
    yield (Recv((rank + 1) % size, "tmp", 0, count),)
    yield (Send((rank - 1) % size, "x", 0, count),)


def forgets_the_last(rank, size, count):
    yield from list(ring(rank, size, count))[:-1]


def too_far(rank, size, count):
    yield (Send((rank + 1) % size, "x", 0, count + 1), Recv((rank - 1) % size, "tmp", 0, count + 1))


def too_long_for_one(rank, size, count):
    """Right for few elements only."""
    yield from ring(rank, size, count if count < 100 or rank else count - 1)


def nonsense(rank, size, count):
    yield ("Send", rank)


WRONG = [
    (
        without_meeting,
        ScheduleError,
        "rank 0, round 1: .* reads slot.*no Barrier and no message says who is first|that nothing wrote",
    ),
    (waits_in_a_circle, Deadlock, "wait for ever.*cycle: 0 -> 1 -> 2 -> 0"),
    (forgets_the_last, ScheduleError, "operands of ranks .* are missing|nobody received"),
    (too_far, ScheduleError, "outside x"),
    (too_long_for_one, ScheduleError, "rank .*elements"),
    (nonsense, ScheduleError, "'Send'"),
]


@pytest.mark.mpi(ranks=[3])
@pytest.mark.parametrize("wrong, error, said", WRONG, ids=[wrong.__name__ for wrong, *_ in WRONG])
def test_wrong_ones_are_refused_on_all_ranks_before_anything_is_sent(communicator, comm, wrong, error, said):
    x, y = np.ones(1000), np.zeros(1000)
    with pytest.raises(error, match=f"(?s){said}"):
        communicator.Allreduce(x, y, algorithm=wrong)
    if wrong is not forgets_the_last:  # what it sends and receives fits, but for the sums
        with pytest.raises((ScheduleError, ValueError, TypeError)):
            communicator.compile(wrong(comm.Get_rank(), comm.Get_size(), 1000), x=x)
    communicator.Allreduce(x, y, algorithm=ring)
    assert (y == 3).all(), "the communicator goes on"


@pytest.mark.mpi(ranks=[2])
def test_one_ranks_mistake_is_told_to_all(communicator, comm):
    rank, other, x = comm.Get_rank(), 1 - comm.Get_rank(), np.zeros(5)
    mine = [(Send(1, "x", 0, 5),)] if rank == 0 else [(Recv(0, "x", 0, 6),)]
    said = "rank 1's schedule"
    with pytest.raises(ValueError, match=said if rank else f"rank 1 has a mistake in its schedule: .*{said}"):
        communicator.compile(mine, x=x)
    step = Send(other, "x", 0, 5) if rank == 0 else ("no", "step")
    with pytest.raises((TypeError, ValueError), match="'no', 'step'"):
        communicator.compile([(step,)], x=x)
    with pytest.raises(ValueError, match=r"rank 0, round 1: there is no computation 'F0' among \['F1'\]"):
        steps = [(), (Compute("F0" if rank == 0 else "F1"),)]
        communicator.compile(steps, computations={"F1": print}, x=x)
    many = [(Copy("x", 0, 2, "x", 2),)] * 10_001 + ([(Barrier(),)] if rank else [])
    with pytest.raises(ValueError, match=r"rank 1 has a Barrier .* more than 20,000 steps"):
        communicator.compile(many, x=x)
    with pytest.raises(ScheduleError, match="by rank 1"):
        communicator.compile([(Send(1, "x", 0, 5),)] if rank == 0 else [], x=x)


@pytest.mark.mpi(ranks=[3])
def test_ranks_of_other_nodes_share_no_memory(comm, monkeypatch):
    from collectives import Communicator
    from collectives.running import planner

    monkeypatch.setattr(planner, "same_node", lambda comm: comm.Split(comm.Get_rank() // 2))
    communicator, x = Communicator(comm), np.ones(4)
    with pytest.raises(ValueError, match=r"round 0: Barrier\(ranks=None\) names rank 2, which is on another node"):
        communicator.Allreduce(x, x.copy(), algorithm=in_memory)
    rank = comm.Get_rank()
    rounds = [(Barrier((0, 1)),), (Copy("x", 0, 2, "y", 0, of=1 - rank),)] if rank < 2 else []
    y = np.full(4, float(rank))
    plan = communicator.compile(rounds, x=x, y=y)
    communicator.Run(plan)
    np.testing.assert_array_equal(x, [1 - rank] * 2 + [1] * 2 if rank < 2 else [1] * 4)
    plan.free()
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_computations_are_called_in_their_round(communicator, comm):
    """A pipeline of two stages: rank 0 doubles each part, rank 1 adds one to what has come."""
    rank, said = comm.Get_rank(), []

    def double(x, h):
        np.multiply(x, 2, out=h)
        said.append("double")

    def add_one(h, y):
        np.add(h, 1, out=y)
        said.append("add_one")

    def stages(rank, parts, n):
        for k in range(parts):
            place = k * n, (k + 1) * n
            if rank == 0:
                yield (Compute("double", (Slice("x", *place),), (Slice("h", *place),)),)
                yield (Send(1, "h", *place),)
            else:
                yield (Recv(0, "h", *place),)
                yield (Compute("add_one", (Slice("h", *place),), (Slice("y", *place),)),)

    x, y = np.arange(12.0), np.zeros(12)
    given = {"double": double} if rank == 0 else {"add_one": add_one}
    plan = communicator.compile(stages(rank, 3, 4), computations=given, x=x, y=y)
    for _ in range(2):
        communicator.Run(plan)
    assert said == [*given] * 6
    with pytest.raises(
        ValueError, match=r"allreduce by .*, 2 ranks: Compute\(name='double'.* needs a function: compile"
    ):
        communicator.Allreduce(x, x.copy(), algorithm=lambda rank, size, count: stages(0, 1, 4))
    np.testing.assert_array_equal(y, np.arange(12) * 2 + 1 if rank else 0)
    plan.free()


@pytest.mark.mpi(ranks=[2])
def test_run_is_a_plain_function(comm):
    rank = comm.Get_rank()
    x = np.arange(6.0) + rank
    collectives.run(ring, x=x)
    np.testing.assert_array_equal(x, 2 * np.arange(6) + 1)
    collectives.run(in_memory, x=x)
    np.testing.assert_array_equal(x, 4 * np.arange(6) + 2)


@pytest.mark.mpi(ranks=[3])
def test_memory_that_only_messages_keep_in_order(communicator, comm):
    """A rank of which others read and write memory, and which itself names nobody's."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for _ in range(20):
        x, y = np.arange(50.0) + rank, np.zeros(50)
        communicator.Allreduce(x, y, algorithm=to_left)
        np.testing.assert_array_equal(y, size * np.arange(50) + 3)


@pytest.mark.mpi(ranks=[2])
def test_run_refuses_a_rank_that_is_not_in_the_communicator(comm):
    """COMM_NULL is false: it was taken for no communicator given, which is the world."""
    from mpi4py import MPI

    x = np.ones(4)
    alone = comm.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    if comm.rank == 0:
        collectives.run(ring, comm=alone, x=x)
        alone.Free()
    else:
        with pytest.raises(ValueError, match="not in the communicator"):
            collectives.run(ring, comm=alone, x=x)
        with pytest.raises(MPI.Exception):
            collectives.check_world(alone)
    assert (x == 1).all()


@pytest.mark.mpi(ranks=[3])
def test_displaced_blocks_of_ones_own_scatter_and_gather_in_node_memory(communicator, comm):
    """Blocks out of order and with gaps, which only the root knows: the others read and write them where they lie."""
    rank, counts, places = comm.rank, [1, 2, 1], [5, 1, 4]

    def scatter(rank, size, count, root=0):
        lo, hi = blocks(count, size)(rank)
        yield (Barrier(),)
        yield (Copy("y", 0, hi - lo, "x", lo, of=root),)
        yield (Barrier(),)

    def gather(rank, size, count, root=0):
        yield (Barrier(),)
        if rank == root:
            for other in range(size):
                lo, hi = blocks(count, size)(other)
                yield (Copy("y", lo, hi, "x", 0, of=other),)
        yield (Barrier(),)

    for root in (0, 2):
        whole = np.arange(8.0)
        own = np.full(counts[rank], -1.0)
        spec = lambda a: [a, counts, places, "d"] if rank == root else None  # noqa: B023
        communicator.Scatterv(spec(whole), own, root, algorithm=scatter)
        expected = np.arange(places[rank], places[rank] + counts[rank])
        np.testing.assert_array_equal(own, expected)
        result = np.full(8, -1.0)
        communicator.Gatherv(own, spec(result), root, algorithm=gather)
        there = [-1, 1, 2, -1, 4, 5, -1, -1] if rank == root else [-1] * 8
        np.testing.assert_array_equal(result, there)


@pytest.mark.mpi(ranks=[2])
def test_blocks_that_only_their_ranks_know_are_for_named_algorithms(communicator, comm):
    """A right one was refused as wrong, on those ranks whose own blocks differ in length."""
    x, y = np.arange(3.0), np.zeros(3)
    mine = collectives.ALGORITHMS["alltoall"]["pairwise"].rounds
    counts = [1, 2] if comm.rank == 0 else [2, 1]
    spec = [counts, [0, counts[0]], "d"]
    with pytest.raises(ValueError, match="no rank knows those of all others"):
        communicator.Alltoallv([x, *spec], [y, *spec], algorithm=mine)
    communicator.Alltoall(x[:2], y[:2], algorithm=mine)
    assert (y[:2] == comm.rank).all()


@pytest.mark.mpi(ranks=[2])
def test_a_mistake_without_words_is_told_by_its_kind(communicator, comm):
    x = np.zeros(5)

    def rounds():
        yield ()
        assert comm.rank == 0

    with pytest.raises((AssertionError, ValueError)) as caught:
        communicator.compile(rounds(), x=x)
    assert comm.rank or "rank 1 has a mistake in its schedule: AssertionError" in str(caught.value)


@pytest.mark.mpi(ranks=[2])
def test_a_schedule_in_node_memory_and_another_call_are_refused_on_both_ranks(communicator, comm):
    x = np.ones(5000)
    communicator.Allreduce(None, x, algorithm=in_memory)
    communicator.Allreduce(None, x)
    for mine, other in (
        (lambda y: communicator.Allreduce(None, y, algorithm=in_memory), lambda y: communicator.Allreduce(None, y)),
        (
            lambda y: communicator.Allreduce(None, y[:40], algorithm=in_memory),
            lambda y: communicator.Allreduce(None, y, algorithm=in_memory),
        ),
    ):
        y = np.ones(5000)
        with pytest.raises(ValueError, match="rank 0 calls allreduce"):
            (mine if comm.rank == 0 else other)(y)
        communicator.Allreduce(None, y)
        assert (y == 2).all()


@pytest.mark.mpi(ranks=[2])
def test_a_barrier_of_ones_own_may_send(communicator, comm):
    communicator.Barrier(algorithm=collectives.ALGORITHMS["barrier"]["dissemination"].rounds)


@pytest.mark.mpi(ranks=[1])
def test_run_says_which_array_it_counts(comm):
    with pytest.raises(ValueError, match=r"run: .*x=array"):
        collectives.run(ring, y=np.ones(3))
