"""The communicator computes what the operations define, on real ranks, and touches nothing else.

Every rank's every element is distinct, calls repeat back to back on rewritten buffers, guards stand around results,
and sends are synchronous, so that nothing passes because MPI happened to buffer it.
"""

import os
import re
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives.algorithms.registry import by_messages
from collectives.choosing.selection import SHARED

GUARD = 3  # elements before and after every buffer that must stay as they were
DTYPES = ("f4", "f8", "i4", "u1", "c16", "f2")


@pytest.fixture
def communicator(comm):
    from collectives import Communicator

    made = Communicator(comm, synchronous=True)
    yield made
    made.release()


def data(rank, count, dtype, call):
    """Distinct small values for every rank, place and call, exact in every dtype and sum."""
    return ((np.arange(count) * 3 + rank * 7 + call * 5) % 11).astype(dtype)


def guarded(count, dtype):
    """(what is around, the buffer in it)"""
    around = np.full(count + 2 * GUARD, 99, dtype)
    return around, around[GUARD : GUARD + count]


def untouched(around):
    return (around[:GUARD] == 99).all() and (around[-GUARD:] == 99).all()


def names(operation):
    return [None, "native", *by_messages(operation), *(["shared"] if operation in SHARED else [])]


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_allreduce(communicator, ranks):
    rank = communicator.rank
    for name in names("allreduce"):
        counts = {0, 1, ranks - 1, 1000}
        for dtype, count in [*((dtype, 2 * ranks + 1) for dtype in DTYPES), *(("f8", count) for count in counts)]:
            if dtype == "f2" and name == "native":
                continue
            around, y = guarded(count, dtype)
            x = np.empty(count, dtype)
            for call in range(2):
                expected = sum(data(r, count, dtype, call) for r in range(ranks))
                x[:] = data(rank, count, dtype, call)
                communicator.Allreduce(x, y, algorithm=name)
                assert (y == expected).all() and untouched(around)
                assert (x == data(rank, count, dtype, call)).all()
                y[:] = x
                communicator.Allreduce(None, y, algorithm=name)
                assert (y == expected).all() and untouched(around)


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_reduce(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    for name in names("reduce"):
        for root in range(ranks):
            for count in {0, 1, ranks, 100}:
                around, y = guarded(count, "i8")
                x = np.empty(count, "i8")
                for call in range(2):
                    expected = sum(data(r, count, "i8", call) for r in range(ranks))
                    x[:], y[:] = data(rank, count, "i8", call), -1
                    communicator.Reduce(x, y if rank == root else None, root=root, algorithm=name)
                    assert (y == (expected if rank == root else -1)).all() and untouched(around)
                    assert (x == data(rank, count, "i8", call)).all(), "the send buffer is the caller's"
                    y[:] = x
                    communicator.Reduce(MPI.IN_PLACE if rank == root else y, y, root=root, algorithm=name)
                    assert (y == (expected if rank == root else x)).all() and untouched(around)


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_broadcast(communicator, ranks):
    rank = communicator.rank
    for name in names("broadcast"):
        for root in range(ranks):
            for count in (0, 1, 100):
                around, x = guarded(count, "f4")
                for call in range(2):
                    x[:] = data(rank, count, "f4", call)
                    communicator.Bcast(x, root, algorithm=name)
                    assert (x == data(root, count, "f4", call)).all() and untouched(around)


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_scatter_and_gather(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    for scatter, gather in zip(names("scatter"), names("gather"), strict=True):
        for root in range(ranks):
            at_root = rank == root
            for count in (0, 1, 17):
                around, whole = guarded(count * ranks, "f8")
                own_around, own = guarded(count, "f8")
                for call in range(2):
                    everything = np.concatenate([data(r, count, "f8", call) for r in range(ranks)])
                    whole[:] = everything if at_root else -1
                    communicator.Scatter(whole if at_root else None, own, root, algorithm=scatter)
                    assert (own == data(rank, count, "f8", call)).all() and untouched(own_around)
                    assert (whole == (everything if at_root else -1)).all()
                    whole[:] = -1
                    communicator.Gather(own, whole if at_root else None, root, algorithm=gather)
                    assert (whole == (everything if at_root else -1)).all() and untouched(around)
                    communicator.Scatter(whole, MPI.IN_PLACE if at_root else own, root, algorithm=scatter)
                    if at_root:
                        whole[count * root : count * (root + 1)] = data(rank, count, "f8", call)
                    communicator.Gather(MPI.IN_PLACE if at_root else own, whole, root, algorithm=gather)
                    assert (whole == (everything if at_root else -1)).all() and untouched(around)


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_scatterv_and_gatherv(communicator, ranks):
    """Blocks of lengths that differ, out of order and with gaps; only the root knows where."""
    rank = communicator.rank
    lengths = [(5 * r + 2) % 4 for r in range(ranks)]
    places, at = [0] * ranks, 1
    for r in reversed(range(ranks)):
        places[r], at = at, at + lengths[r] + 1
    for scatter, gather in zip(names("scatter"), names("gather"), strict=True):
        for root in range(ranks):
            for call in range(2):
                everything = np.full(at, -1.0)
                for r in range(ranks):
                    everything[places[r] : places[r] + lengths[r]] = data(r, lengths[r], "f8", call)
                around, own = guarded(lengths[rank], "f8")
                spec = lambda a: [a, lengths, places, "d"] if rank == root else None  # noqa: B023
                communicator.Scatterv(spec(everything), own, root, algorithm=scatter)
                assert (own == data(rank, lengths[rank], "f8", call)).all() and untouched(around)
                result = np.full(at, -1.0)
                communicator.Gatherv(own, spec(result), root, algorithm=gather)
                assert (result == (everything if rank == root else -1)).all()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_allgather(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    lengths = [(5 * r + 2) % 4 for r in range(ranks)]
    places, at = [0] * ranks, 1 + rank % 2  # where the blocks lie is each rank's own affair
    for r in reversed(range(ranks)):
        places[r], at = at, at + lengths[r] + r % 2
    for name in names("allgather"):
        for call in range(2):
            for count in (0, 1, 9):
                expected = np.concatenate([data(r, count, "i4", call) for r in range(ranks)])
                around, y = guarded(count * ranks, "i4")
                communicator.Allgather(data(rank, count, "i4", call), y, algorithm=name)
                assert (y == expected).all() and untouched(around)
                y[:] = -1
                y[count * rank : count * (rank + 1)] = data(rank, count, "i4", call)
                communicator.Allgather(MPI.IN_PLACE, y, algorithm=name)
                assert (y == expected).all() and untouched(around)
            expected = np.full(at, -1.0)
            for r in range(ranks):
                expected[places[r] : places[r] + lengths[r]] = data(r, lengths[r], "f8", call)
            y = np.full(at, -1.0)
            communicator.Allgatherv(data(rank, lengths[rank], "f8", call), [y, lengths, places, "d"], algorithm=name)
            assert (y == expected).all()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_reduce_scatter(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    lengths = [(5 * r + 2) % 4 for r in range(ranks)]
    ends = np.cumsum([0, *lengths])
    for name in names("reduce_scatter"):
        for call in range(2):
            x = data(rank, ends[-1], "f8", call)
            expected = sum(data(r, ends[-1], "f8", call) for r in range(ranks))[ends[rank] : ends[rank + 1]]
            for counts in (lengths, None):
                around, y = guarded(lengths[rank], "f8")
                communicator.Reduce_scatter(x, y, counts, algorithm=name)
                assert (y == expected).all() and untouched(around)
                assert (x == data(rank, ends[-1], "f8", call)).all()
            y = x.copy()
            communicator.Reduce_scatter(MPI.IN_PLACE, y, lengths, algorithm=name)
            assert (y[: lengths[rank]] == expected).all()
            x = data(rank, 4 * ranks, "i4", call)
            expected = sum(data(r, 4 * ranks, "i4", call) for r in range(ranks))[4 * rank : 4 * rank + 4]
            around, y = guarded(4, "i4")
            communicator.Reduce_scatter_block(x, y, algorithm=name)
            assert (y == expected).all() and untouched(around)
            communicator.Reduce_scatter_block(MPI.IN_PLACE, x, algorithm=name)
            assert (x[:4] == expected).all()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_what_is_broadcast_and_gathered_is_read_where_all_ranks_have_shared_arrays(comm, ranks):
    from mpi4py import MPI

    from collectives import Communicator

    communicator, count, last = Communicator(comm), 5_000 * ranks, ranks - 1
    private = np.full(count, comm.rank, "f4")
    assert ": native," in communicator.explain("allgather", count)
    communicator.Bcast(private, last)  # what was planned for none is planned again for some
    first, second = communicator.empty(count, "f4"), communicator.empty(count, "f4")
    assert "schedule shared_arrays of" in communicator.explain("allgather", count)
    of_ranks = np.repeat(np.arange(ranks), count // ranks)
    for call in range(3):
        mixed = first if comm.rank % 2 else private
        for collective, given in ((communicator.Bcast, (mixed, last)), (communicator.Allreduce, (None, mixed))):
            if ranks > 1:
                with pytest.raises(ValueError, match="private array"):
                    collective(*given)
        for x in (private, first, second):
            x[:] = 10 * call + comm.rank
            communicator.Bcast(x, last)
            assert (x == 10 * call + last).all()
            x[:] = 10 * call + comm.rank
            communicator.Allgather(MPI.IN_PLACE, x)
            assert (x == 10 * call + of_ranks).all()
            block = np.full(count // ranks, comm.rank, "f4")
            communicator.Allgather(block, x)
            assert (x == of_ranks).all()
            communicator.Allreduce(MPI.IN_PLACE, x)  # through slots in between
            assert (x == ranks * of_ranks).all()
    called = []
    for plan in communicator.plan_cache.values():
        called += [call.func.__name__ for call in getattr(plan, "after", ()) if isinstance(call, partial)]
    expected = {"Bcast", "Allgather"} if ranks > 1 else set()  # one rank sees all its arrays
    assert set(called) == expected, "with private arrays they are the library's"
    communicator.release()


@pytest.mark.mpi(ranks=[2, 3])
def test_long_private_arrays_are_summed_through_slots_and_shared_ones_where_they_lie(comm, ranks):
    from mpi4py import MPI

    from collectives import Communicator

    communicator, count = Communicator(comm), (1 << 18) + ranks
    explain = lambda: communicator.explain("allreduce", count, "f4")
    assert ": shared, because" in explain() and "; schedule shared_slots" in explain()
    x, y = (np.empty(count, "f4") for _ in range(2))
    for shared in (None, communicator.empty(count, "f4")):
        for send, recv in (
            ((MPI.IN_PLACE, x), (x, y)) if shared is None else ((MPI.IN_PLACE, shared), (x, shared), (x, y))
        ):
            (recv if send is MPI.IN_PLACE else send)[:] = np.arange(count) % 99 + comm.rank
            communicator.Allreduce(send, recv)
            assert (recv == ranks * (np.arange(count) % 99) + sum(range(ranks))).all()
    if comm.rank == 0:
        x, shared = shared, x
    with pytest.raises(ValueError, match="rank 0 gives the same part of a shared array, rank 1 a private array"):
        communicator.Allreduce(MPI.IN_PLACE, x)
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_arrays_given_after_a_call_was_left_bring_no_calls_back(comm):
    from collectives import Communicator

    communicator = Communicator(comm)
    communicator.planner.on_abort(RuntimeError("left"), "here")
    x = communicator.empty(10, "f4")
    with pytest.raises(RuntimeError, match="aborted"):
        communicator.Bcast(x)
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_a_result_in_place_does_not_lie_where_others_still_read(comm, ranks, monkeypatch):
    """Rank 0 is late with its reading, and the result of rank 1 goes where it reads."""
    from mpi4py import MPI

    from collectives import Communicator

    communicator, count = Communicator(comm, reduce_scatter="shared"), 10_000
    x = communicator.empty(2 * count)
    flags = communicator.planner.window.flags
    meet, late = flags.signed_barrier, 0.2 * (comm.rank == 0)
    monkeypatch.setattr(flags, "signed_barrier", lambda *given: (meet(*given), time.sleep(late))[0])
    x[:] = comm.rank + 1
    communicator.Reduce_scatter_block(MPI.IN_PLACE, x)
    assert (x[:count] == 3).all()
    communicator.release()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_alltoall(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    length = lambda source, to: (3 * source + 5 * to) % 4
    message = lambda source, to, call: data(source * 13 + to, length(source, to), "f8", call)
    ends = lambda lengths: np.cumsum([0, *[n + 1 for n in lengths]])
    for name in names("alltoall"):
        for call in range(2):
            for count in (0, 1, 3):
                x = np.concatenate([data(13 * rank + to, count, "i2", call) for to in range(ranks)])
                expected = np.concatenate([data(13 * source + rank, count, "i2", call) for source in range(ranks)])
                around, y = guarded(count * ranks, "i2")
                communicator.Alltoall(x, y, algorithm=name)
                assert (y == expected).all() and untouched(around)
                communicator.Alltoall(MPI.IN_PLACE, x, algorithm=name)
                assert (x == expected).all()
            out, into = [length(rank, to) for to in range(ranks)], [length(source, rank) for source in range(ranks)]
            x, y, expected = np.full(ends(out)[-1], -1.0), np.full(ends(into)[-1], -2.0), np.full(ends(into)[-1], -2.0)
            for peer in range(ranks):
                x[ends(out)[peer] :][: out[peer]] = message(rank, peer, call)
                expected[ends(into)[peer] :][: into[peer]] = message(peer, rank, call)
            spec = lambda a, lengths: [a, lengths, ends(lengths)[:-1], MPI.DOUBLE]
            communicator.Alltoallv(spec(x, out), spec(y, into), algorithm=name)
            assert (y == expected).all()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_scans(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    for method, operation, last in ((communicator.Scan, "scan", rank + 1), (communicator.Exscan, "exscan", rank)):
        for name in names(operation):
            for count in (0, 1, 10):
                for call in range(2):
                    expected = sum((data(r, count, "i4", call) for r in range(last)), np.zeros(count, "i4"))
                    around, y = guarded(count, "i4")
                    x = data(rank, count, "i4", call)
                    method(x, y, algorithm=name)
                    assert (y == (expected if last else 99)).all() and untouched(around)
                    assert (x == data(rank, count, "i4", call)).all()
                    method(MPI.IN_PLACE, x, algorithm=name)
                    assert not last or (x == expected).all()


@pytest.mark.mpi(ranks=[2, 3], more=[5])
def test_barrier_holds_everyone(communicator, ranks):
    """The last rank comes late; the others leave after it came."""
    import time

    for name in names("barrier"):
        communicator.Barrier(name)
        if communicator.rank == ranks - 1:
            time.sleep(0.05)
        came = time.monotonic()  # of one machine: the same clock on all ranks
        communicator.Barrier(name)
        left = time.monotonic()
        assert left >= communicator.bcast(came, ranks - 1)


@pytest.mark.mpi(ranks=[2, 3], more=[5])
def test_operations_that_do_not_commute_keep_rank_order(communicator, ranks):
    """2x2 integer matrices: their product depends on the order, and a ring would mix it up."""
    from mpi4py import MPI

    def multiply(a, b, _):
        x, y = (np.frombuffer(m, "i8").reshape(-1, 2, 2) for m in (a, b))
        y[:] = x @ y

    matrix = MPI.INT64_T.Create_contiguous(4).Commit()
    product = MPI.Op.Create(multiply, commute=False)
    rank, count = communicator.rank, 7
    mine = lambda r: np.array([[[1, r + i + 1], [i % 2, 1]] for i in range(count)], "i8")
    expected = mine(0)
    for r in range(1, ranks):
        expected = expected @ mine(r)
    for name in names("allreduce"):
        y = np.empty((count, 2, 2), "i8")
        communicator.Allreduce([mine(rank), count, matrix], [y, count, matrix], product, algorithm=name)
        assert (y == expected).all(), name
    for name in names("reduce"):
        for root in range(ranks):
            y = np.empty((count, 2, 2), "i8")
            communicator.Reduce([mine(rank), count, matrix], [y, count, matrix], product, root, algorithm=name)
            assert rank != root or (y == expected).all(), name
    for name in names("reduce_scatter"):
        y = np.empty((count, 2, 2), "i8")
        x = np.concatenate([mine(rank)] * ranks)
        communicator.Reduce_scatter_block([x, count, matrix], [y, count, matrix], product, algorithm=name)
        assert (y == expected).all(), name
    so_far = mine(0)
    for r in range(1, rank + 1):
        before, so_far = so_far, so_far @ mine(r)
    for name in names("scan"):
        y = np.empty((count, 2, 2), "i8")
        communicator.Scan([mine(rank), count, matrix], [y, count, matrix], product, algorithm=name)
        assert (y == so_far).all(), name
    for name in names("exscan"):
        communicator.Exscan([mine(rank), count, matrix], [y, count, matrix], product, algorithm=name)
        assert rank == 0 or (y == before).all(), name
    product.Free()
    matrix.Free()


@pytest.mark.mpi(ranks=[2, 3])
def test_operations_and_datatypes_of_mpi(communicator, ranks):
    from mpi4py import MPI

    rank = communicator.rank
    for name in by_messages("allreduce"):
        x = np.array([3 + rank, 7 - rank, 5], "i4")
        all_x = np.array([[3 + r, 7 - r, 5] for r in range(ranks)], "i4")
        for op, function in (
            (MPI.MAX, np.max),
            (MPI.MIN, np.min),
            (MPI.PROD, np.prod),
            (MPI.BAND, np.bitwise_and.reduce),
            (MPI.BXOR, np.bitwise_xor.reduce),
        ):
            y = np.empty_like(x)
            communicator.Allreduce(x, y, op, algorithm=name)
            assert (y == function(all_x, axis=0)).all()
        pairs = np.array(
            [(1.5 + (rank - 1) ** 2, rank), (-rank, 10 + rank)], np.dtype([("v", "f8"), ("i", "i4")], align=True)
        )
        least = np.empty_like(pairs)
        spec = lambda a: [a.view("u1"), 2, MPI.DOUBLE_INT]
        communicator.Allreduce(spec(pairs), spec(least), MPI.MINLOC, algorithm=name)
        assert least["v"].tolist() == [1.5, 1 - ranks] and least["i"].tolist() == [1, 9 + ranks]
        # NaN: whichever operand MAX keeps, all ranks keep the same
        x = np.array([np.nan if rank == 1 else rank, rank], "f8")
        y = np.empty_like(x)
        communicator.Allreduce(x, y, MPI.MAX, algorithm=name)
        assert len({bytes(b) for b in communicator.allgather(y.tobytes())}) == 1


@pytest.mark.mpi(ranks=[2])
def test_float16_is_summed_in_float32_and_rounded_once_a_sum(communicator, ranks):
    x = np.array([2048, 0.1, 65504], "f2") if communicator.rank else np.array([1, 0.2, 0], "f2")
    y = np.empty_like(x)
    communicator.Allreduce(x, y)
    both = np.array([[2048, 0.1, 65504], [1, 0.2, 0]], "f2").astype("f4").sum(0)
    assert (y == both.astype("f2")).all()


@pytest.mark.mpi(ranks=[2])
def test_plans_are_found_again_and_never_for_other_memory(communicator, ranks):
    plans = communicator.plan_cache
    x, y = np.ones(4, "f4"), np.empty(4, "f4")
    for _ in range(3):
        communicator.Allreduce(x, y)
    assert len(plans) == 1
    communicator.Allreduce(x[:2], y[:2])  # same addresses, another count
    communicator.Allreduce(x.view("i4"), y.view("i4"))  # another dtype
    assert len(plans) == 3 and (y.view("i4") == 2 * x.view("i4")).all()
    y.flags.writeable = False  # the same memory, now read-only
    with pytest.raises(BufferError, match="read-only"):
        communicator.Allreduce(x, y)
    assert len(plans) == 3
    # memory that comes and goes: whatever the allocator does, the sums are right
    for i in range(300):
        a = np.full(1 + i % 50, communicator.rank + i, "f8" if i % 3 else "i4")
        b = np.empty_like(a)
        communicator.Allreduce(a, b)
        assert (b == 1 + 2 * i).all()
        del a, b


@pytest.mark.mpi(ranks=[2])
def test_operations_and_datatypes_that_come_and_go(communicator, ranks):
    """Short-lived objects share ids, and freed ones their handles, with those that follow: plans are not mixed up."""
    from mpi4py import MPI

    x, y = np.array([3.0, 5.0]), np.empty(2)
    mine = x + communicator.rank
    for name in ("doubling", "shared"):
        for _ in range(20):
            for op, expected in ((MPI.SUM, [7, 11]), (MPI.MAX, [4, 6]), (MPI.PROD, [12, 30])):
                communicator.Allreduce(mine, y, MPI.Op(op), algorithm=name)
                assert (y == expected).all()
            for first in (True, False):

                def keep(a, b, _, first=first):
                    if first:
                        b[:] = a

                op = MPI.Op.Create(keep, commute=False)
                communicator.Allreduce(mine, y, op, algorithm=name)
                assert (y == x + (0 if first else 1)).all()
                op.Free()
    z = np.arange(4, dtype="i4") + communicator.rank
    for _ in range(20):
        for datatype, count in ((MPI.INT32_T, 4), (MPI.INT64_T, 2)):
            out = np.empty_like(z)
            communicator.Allreduce([z, count, MPI.Datatype(datatype)], [out, count, MPI.Datatype(datatype)], MPI.MAX)
            code = datatype.tocode()
            both = [(np.arange(4, dtype="i4") + r).view(code) for r in range(2)]
            assert (out.view(code) == np.maximum(*both)).all()


@pytest.mark.mpi(ranks=[2])
def test_the_librarys_calls_are_kept_only_for_types_and_operations_that_last(communicator, ranks):
    """No plan keeps alive those of the user: others may come to their id and handle, of which a key consists."""
    from mpi4py import MPI

    x = np.arange(4.0)
    vector = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    add = MPI.Op.Create(lambda a, b, _: np.add(*(np.frombuffer(m) for m in (a, b)), out=np.frombuffer(b)), commute=True)
    communicator.Bcast([x, 1, vector])
    communicator.Bcast([x, 1, vector], algorithm="native")
    communicator.Allreduce(x, np.empty(4), add, algorithm="native")
    assert not communicator.plan_cache
    communicator.Bcast([x, MPI.DOUBLE], algorithm="native")
    assert len(communicator.plan_cache) == 1
    vector.Free(), add.Free()


@pytest.mark.mpi(ranks=[2])
def test_the_cache_is_bounded_and_spares_what_is_used(communicator, ranks):
    communicator.Barrier()
    plans = communicator.plan_cache
    plans.limit = 8
    kept = np.ones(3)
    communicator.Allreduce(None, kept, algorithm="ring")
    first = next(key for key in plans if "ring" in key)
    arrays = [np.ones(5 + i) for i in range(30)]
    for i, a in enumerate(arrays):
        communicator.Allreduce(None, a, algorithm="ring")
        kept[:] = i
        communicator.Allreduce(None, kept, algorithm="ring")
        assert (kept == 2 * i).all()
    assert len(plans) <= 8 and first in plans
    plans.limit_bytes = 1000
    big = np.ones(4000)
    communicator.Allreduce(None, big, algorithm="ring")
    assert len(plans) == 1 and plans.bytes >= 4000 * 8 / 2, "a plan larger than the limit is kept, alone"


@pytest.mark.mpi(ranks=[2])
def test_a_schedule_of_ones_own_stays_inside_its_arrays(communicator, ranks):
    from collectives import Copy, Recv, Send

    x, y = np.zeros(5), np.arange(10.0)
    other = 1 - communicator.rank
    rounds = [(Send(other, "y", 0, 10), Recv(other, "x", 0, 10))]
    with pytest.raises(ValueError, match=rf"rank {communicator.rank}'s schedule needs 10 elements of x, which has 5"):
        communicator.compile(rounds, x=x, y=y)
    with pytest.raises(ValueError, match="12 elements of y"):
        communicator.compile([(Copy("x", 0, 5, "y", 7),)], x=x, y=y)
    with pytest.raises(ValueError, match="at least one array"):
        communicator.compile(rounds)
    plan = communicator.compile([(Send(other, "y", 5, 10), Recv(other, "x", 0, 5))], x=x, y=y)
    communicator.Run(plan)
    np.testing.assert_array_equal(x, y[5:])
    plan.free()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("many", [250, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_thousands_of_buffers_and_counts_take_bounded_memory(communicator, ranks, many):
    from mpi4py import MPI

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def use(first):
        kept = []
        for i in range(first, first + many):
            name = ("ring", "doubling", "double_tree")[i % 3]
            kept += [np.full(7, float(i)), np.full(1 + i, float(i))]  # new memory, and a new count
            for x in kept[-2:]:
                communicator.Allreduce(MPI.IN_PLACE, x, algorithm=name)
                assert x[0] == x[-1] == 2 * i
        x = np.full((4 << 20) + first, 1, "u1")
        communicator.Allreduce(MPI.IN_PLACE, x, algorithm="segmented_ring")  # hundreds of requests
        assert (x == 2).all()

    communicator.Barrier()
    plans, programs = communicator.plan_cache, communicator.planner.programs
    plans.limit, programs.limit = 64, 4000
    use(0)
    before = resident()
    use(many)
    assert len(plans) <= 64 and sum(plan.bytes for plan in plans.values()) == plans.bytes
    assert sum(program.length for program in programs.values()) == programs.length <= 4000
    assert resident() < before + (8 << 20) + many * (24 << 10), "of the long vector, and of each of the others"
    made = [request for plan in plans.values() for request in plan.requests]
    assert made and all(made)
    communicator.release()
    assert not any(made), "all are freed before the communicator"


@pytest.mark.mpi(ranks=[2])
def test_plans_keep_no_array_alive(communicator, ranks):
    import weakref

    class Array(np.ndarray):
        pass

    x = np.ones(8)
    gone = weakref.ref(x)
    communicator.Allreduce(None, x)
    communicator.Bcast(x)
    del x
    assert gone() is None


@pytest.mark.mpi(ranks=[2])
def test_what_does_not_fit_is_refused_by_name(communicator, ranks):
    from mpi4py import MPI

    f4, f8 = np.ones(4, "f4"), np.ones(4, "f8")
    rank = communicator.rank
    for call, error, said in (
        (
            lambda: communicator.Allreduce(f4, f8),
            TypeError,
            "send buffer holds MPI_FLOAT, the receive buffer MPI_DOUBLE",
        ),
        (lambda: communicator.Allreduce(f4, f4[:3].copy()), ValueError, "4 elements, the receive buffer 3"),
        (lambda: communicator.Allreduce(f4, f4), ValueError, "overlap: pass MPI.IN_PLACE"),
        (lambda: communicator.Bcast(f4, root=2), ValueError, r"root 2: the communicator has ranks 0 \.\.\. 1"),
        (lambda: communicator.Reduce(f4, f8, root=rank), TypeError, "MPI_FLOAT"),
        (lambda: communicator.Scatter(np.ones(3, "f4"), f4, root=rank), ValueError, "3 elements cannot be dealt to 2"),
        (
            lambda: communicator.Gather(f4, np.ones(6, "f4"), root=rank),
            ValueError,
            "has 12 bytes in the buffer of all blocks, 16 in its own",
        ),
        (lambda: communicator.Allreduce(f4, f4.copy(), algorithm="rind"), ValueError, "no allreduce algorithm 'rind'"),
        (lambda: communicator.Bcast([f4, 9, "f"]), ValueError, "too small for 9 of MPI_FLOAT"),
        (lambda: communicator.Bcast(np.ones((4, 4))[:, 1]), BufferError, "contiguous"),
        (lambda: communicator.Allreduce(None, f4.astype("f2"), MPI.BAND), TypeError, "float16"),
    ):
        with pytest.raises(error, match=said):
            call()
    communicator.Allreduce(None, f4)  # nobody sent anything: the communicator still works
    assert (f4 == 2).all()


@pytest.mark.mpi(ranks=[2])
def test_the_algorithm_is_chosen_by_call_keyword_and_environment(comm, ranks, monkeypatch):
    from collectives import Communicator

    monkeypatch.setenv("RINGPROP_ALLREDUCE", "ring")
    x = np.ones(1)
    sends = lambda c: len(next(iter(c.plan_cache.values())).requests)
    for given, asked, requests in (({}, None, 4), ({"allreduce": "doubling"}, None, 2), ({}, "doubling", 2)):
        communicator = Communicator(comm, **given)
        communicator.Allreduce(None, np.ones(2), algorithm=asked)
        assert sends(communicator) == requests
        communicator.release()
    native = Communicator(comm, allreduce="native")
    native.Allreduce(None, x)
    assert x == 2
    native.release()
    monkeypatch.setenv("RINGPROP_ALLREDUCE", "rind")
    says = "RINGPROP_ALLREDUCE in the environment: no allreduce algorithm 'rind': there are auto, schedule, messages"
    with pytest.raises(ValueError, match=says):
        Communicator(comm)
    monkeypatch.delenv("RINGPROP_ALLREDUCE")
    with pytest.raises(ValueError, match=r"^watch=-1"):
        Communicator(comm, watch=-1)
    monkeypatch.setenv("RINGPROP_WATCH", "1 min")
    with pytest.raises(ValueError, match="RINGPROP_WATCH=1 min in the environment: expected seconds"):
        Communicator(comm)
    monkeypatch.delenv("RINGPROP_WATCH")
    with pytest.raises(ValueError, match="alreduce"):
        Communicator(comm, alreduce="ring")


@pytest.mark.mpi(ranks=[3])
def test_duplicates_and_parts_are_communicators_too(communicator, ranks):
    from mpi4py import MPI

    from collectives import Communicator

    halves = communicator.Split(communicator.rank % 2, -communicator.rank)
    copy = communicator.Dup()
    for made in (halves, copy):
        assert type(made) is Communicator
        x = np.array([communicator.rank + 1.0])
        made.Allreduce(None, x)
        assert x == sum(made.allgather(communicator.rank + 1.0))
        assert made.plan_cache
        made.Free()
    alone = communicator.Split(MPI.UNDEFINED if communicator.rank else 0)
    assert (alone == MPI.COMM_NULL) == (communicator.rank > 0)
    if alone != MPI.COMM_NULL:
        alone.Free()
    communicator.Barrier()
    communicator.release()
    x = np.ones(1)
    communicator.Allreduce(None, x)  # set up again
    assert x == ranks


@pytest.mark.mpi(ranks=[2])
def test_messages_of_the_caller_never_meet_ours(communicator, ranks):
    """A receive of anything with any tag is posted while collectives run."""
    from mpi4py import MPI

    y = np.empty(1)
    request = communicator.Irecv(y, MPI.ANY_SOURCE, MPI.ANY_TAG)
    x = np.ones(1)
    communicator.Allreduce(None, x)
    met = request.Test()
    communicator.Barrier()
    assert x == 2 and not met
    communicator.Send(np.array([5.0]), 1 - communicator.rank)
    request.Wait()
    assert y == 5


@pytest.mark.mpi(ranks=[3], more=[5])
def test_shared_memory_in_nodes_and_rings_between_them(comm, ranks, monkeypatch):
    """Nodes of two ranks and one of one, as far as the communicator can tell."""
    from collectives import Communicator
    from collectives.running import planner

    monkeypatch.setattr(planner, "same_node", lambda comm: comm.Split(comm.Get_rank() // 2))
    communicator = Communicator(comm)
    assert f"{ranks} ranks on several nodes" in communicator.explain("allreduce", 1000)
    x, shared = np.empty(1000), communicator.empty(3000)
    for call in range(3):
        for y, count in ((x, 1000), (shared, 3000)):
            y[:] = data(comm.rank, count, "f8", call)
            communicator.Allreduce(None, y, algorithm="shared")
            assert (y == sum(data(r, count, "f8", call) for r in range(ranks))).all()
        around, y = guarded(7, "f4")
        communicator.Allreduce(data(comm.rank, 7, "f4", call), y, algorithm="two_level")
        assert (y == sum(data(r, 7, "f4", call) for r in range(ranks))).all() and untouched(around)
    communicator.Bcast(x, root=ranks - 1, algorithm="shared")  # between nodes: not shared
    communicator.release()


@pytest.mark.mpi(ranks=[3], more=[5])
def test_between_nodes_slots_are_for_ranks_that_have_shared_arrays(comm, ranks, monkeypatch):
    """Then all choose alike, whether a rank has called with the same array before or not."""
    from collectives import Communicator
    from collectives.running import planner

    monkeypatch.setattr(planner, "same_node", lambda comm: comm.Split(comm.Get_rank() // 2))
    communicator, count = Communicator(comm), 20_000
    x = np.ones(count)
    communicator.Allreduce(None, x)
    assert (x == ranks).all()
    assert "two_level, because shared_arrays needs arrays in memory that ranks share" in communicator.explain(
        "allreduce", count
    )
    assert ": shared, because" in communicator.explain("allreduce", 5000)
    assert ": shared, because requested" in communicator.explain("allreduce", count, algorithm="shared")
    shared = communicator.empty(count)
    assert ": shared_arrays, because" in communicator.explain("allreduce", count)
    x = x if comm.rank == 1 else np.empty(count)
    for y in (x, shared):
        y[:] = comm.rank
        communicator.Allreduce(None, y)
        assert (y == sum(range(ranks))).all()
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_shared_arrays(communicator, ranks):
    x = communicator.empty((4, 100), "f4")
    assert x.shape == (4, 100) and x.dtype == np.float32 and not x.any()
    for call in range(3):
        x[:] = data(communicator.rank, 400, "f4", call).reshape(4, 100)
        communicator.Allreduce(None, x[1:3])
        assert (x[1:3] == sum(data(r, 400, "f4", call) for r in range(2)).reshape(4, 100)[1:3]).all()
        assert (x[0] == data(communicator.rank, 400, "f4", call)[:100]).all()

    def mapped():
        return Path("/proc/self/maps").read_text().count("/memfd:ringprop")

    before = mapped()
    for _ in range(5):  # plans of arrays that are gone do not keep their memory
        y = communicator.empty(10_000, "f4")
        y[:] = communicator.rank + 1
        communicator.Allreduce(None, y)
        communicator.Bcast(y, algorithm="shared")
        communicator.Reduce(None if communicator.rank == 0 else y, y, algorithm="shared")
        assert (y == (6, 3)[communicator.rank]).all()
        assert mapped() <= before + 2


@pytest.mark.mpi(ranks=[2])
def test_explain(communicator, ranks):
    from mpi4py import MPI

    explain = lambda *given, **more: communicator.explain(*given, **more).splitlines()[0]
    files = {
        "scan": "selection.py -> running/planner.py -> compile(algorithms/scan.py doubling, executor/program.py)",
        "gather": "running/plan_moves.py gather -> running/buffers.py -> choosing/selection.py -> running/planner.py",
        "allgather": "plan_moves.py allgather -> running/buffers.py -> choosing/selection.py -> the MPI library",
    }
    for operation, path in files.items():
        assert path in communicator.explain(operation, 1000).splitlines()[1]
    _, shared, again = communicator.explain("allreduce", 10000).splitlines()
    assert shared.startswith(
        "  communicator.py Allreduce -> running/plan_cache.py -> running/plan_reductions.py reduce_on"
    )
    assert shared.endswith(
        "compile(algorithms/shared.py slots, executor/fusing.py, executor/program.py) -> executor/plan.py"
    )
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    assert " ".join(communicator.explain("allreduce", 1 << 18, "f4").split()) in " ".join(page.split())
    assert shared.count(" -> ") == 7 and again.endswith("barriers.py, flags.py, reduction.py of node_memory")
    for name in re.findall(r"[\w/]+\.py", shared):
        assert (Path(collectives.__file__).parent / name).is_file(), name
    assert explain("reduce_scatter", 16) == (
        "reduce_scatter of 16 float32, 2 ranks on one node: native, because the default table says so up to 4,096 bytes"
    )
    assert "shared, because the default table says so for all longer messages; schedule shared_" in explain(
        "allreduce", 10000
    )
    assert explain("allreduce", 9, algorithm=sum).endswith("sum, because requested")
    assert "ring, because requested" in explain("allreduce", 1000, algorithm="ring")
    assert "needs SUM, PROD, MAX or MIN" in explain("allreduce", 9000, "i4", MPI.BXOR)
    assert "shared" not in explain("scan", 9)
    other = MPI.Op.Create(lambda a, b, _: None, commute=False)
    assert "doubling, because ring needs an operation that commutes" in explain(
        "allreduce", 9, op=other, algorithm="ring"
    )
    other.Free()
    with pytest.raises(ValueError, match="no operation 'sum': there are allgather, allreduce"):
        explain("sum", 9)


@pytest.mark.skipif("RINGPROP_LARGE" not in os.environ, reason="takes 9 GiB and up to minutes: set RINGPROP_LARGE=1")
@pytest.mark.mpi(ranks=[2], timeout=300)
def test_more_elements_than_32_bits_count(communicator, ranks):
    count = (1 << 31) + 5
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    if min(communicator.allgather(free)) < 9 << 30:
        pytest.skip(f"needs 9 GiB of free memory, here are {free / (1 << 30):.1f}")
    rank = communicator.rank
    edges = np.array([0, (1 << 30) - 1, 1 << 30, (1 << 30) + 3, (1 << 31) - 1, 1 << 31, count - 1])
    marks = np.arange(7, 14, dtype="u1")

    differs = np.empty(1 << 18, bool)  # new memory for every comparison would take most of the time

    def holds(factor):
        blocks = (x[at : at + differs.size] for at in range(0, count, differs.size))
        others = sum(np.count_nonzero(np.not_equal(block, factor, out=differs[: block.size])) for block in blocks)
        return others == len(edges) and (x[edges] == marks * factor).all()

    x = np.full(count, rank + 1, "u1")
    x[edges] = marks * (rank + 1)
    communicator.Bcast(x, 1, algorithm="binomial")
    assert holds(2)
    communicator.Allreduce(None, x, algorithm="ring")
    assert holds(4)
    communicator.Allreduce(None, x)
    assert holds(8)
    x *= rank + 1
    communicator.Bcast(x, 1)
    assert holds(16)


@pytest.mark.mpi(ranks=[3])
def test_slices_too_long_for_one_message_travel_in_pieces(comm, ranks, monkeypatch):
    """MPI counts in 32 bits: what is longer is cut, here beyond 7 elements."""
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.executor import program

    monkeypatch.setattr(program, "LONGEST", 7)
    communicator = Communicator(comm, synchronous=True)
    for count in (7, 8, 50):
        for operation, names_ in (("allreduce", by_messages("allreduce")), ("broadcast", by_messages("broadcast"))):
            for name in names_:
                around, x = guarded(count, "f8")
                x[:] = data(comm.rank, count, "f8", 1)
                if operation == "allreduce":
                    communicator.Allreduce(MPI.IN_PLACE, x, algorithm=name)
                    assert (x == sum(data(r, count, "f8", 1) for r in range(ranks))).all() and untouched(around)
                else:
                    communicator.Bcast(x, 2, algorithm=name)
                    assert (x == data(2, count, "f8", 1)).all() and untouched(around)
    longest = max(len(plan.requests) for plan in communicator.plan_cache.values())
    assert longest > 50, "the slices were cut"
    communicator.release()


@pytest.mark.mpi(ranks=[2])
def test_explain_of_what_only_moves_depends_on_bytes_alone(communicator, ranks):
    for operation in ("allgather", "alltoall", "broadcast", "gather", "scatter"):
        for count in (1_000, 100_000):
            as_bytes = communicator.explain(operation, count, "u1").partition(":")[2]
            for dtype in ("i1", "?", "f2", "f4"):
                n = count // np.dtype(dtype).itemsize
                assert communicator.explain(operation, n, dtype).partition(":")[2] == as_bytes, (operation, dtype)


@pytest.mark.mpi(ranks=[3])
def test_an_array_that_one_node_cannot_have_no_node_has(comm, monkeypatch):
    """Each node would choose its algorithms by the arrays that it has."""
    from collectives import Communicator
    from collectives.running import planner

    monkeypatch.setattr(planner, "same_node", lambda comm: comm.Split(comm.Get_rank() // 2))
    communicator, x = Communicator(comm), np.ones(20_000)
    before = communicator.explain("allreduce", 20_000, "f8")
    with pytest.raises((ValueError, OSError), match=r"ranks disagree|ranks of another node"):
        communicator.empty(20_000 + (comm.rank == 1))
    assert communicator.explain("allreduce", 20_000, "f8") == before
    for count in (20_000, 5_000):
        x[:count] = 1
        communicator.Allreduce(None, x[:count])
        assert (x[:count] == 3).all()
    shared = communicator.empty(20_000)
    assert communicator.explain("allreduce", 20_000, "f8") != before
    shared[:] = 1
    communicator.Allreduce(None, shared)
    assert (shared == 3).all()
    communicator.release()
