"""Node-shared memory: every collective, on shared and on private arrays, gives what MPI defines, again and again.

Values are distinct everywhere and small integers, so that sums are exact; arrays lie between guards that must stay.
Several checks share one launch of ranks.
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest

OPERATIONS = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
# 0, 1, fewer than ranks, the small way and just above it, uneven slices, several segments, one block and a bit
COUNTS = [0, 1, 2, 7, 2048, 2049, 4097, 40_003, 300_001]
TYPES = ["f4", "f8", "i8"]
GUARD = 8  # elements


@pytest.fixture
def window(comm):
    from collectives.node_memory.window import SharedWindow

    window = SharedWindow(comm, limit=20)
    yield window
    window.free()


class Guarded:
    """An array inside a larger one, shared or private, whose margins must stay as they are."""

    def __init__(self, window, shared, count, dtype):
        make = window.empty if shared else np.empty
        self.all = make(count + 2 * GUARD, dtype)
        self.all[:] = 77
        self.x = self.all[GUARD : GUARD + count]

    def check(self):
        assert (self.all[:GUARD] == 77).all() and (self.all[GUARD + self.x.size :] == 77).all(), "wrote outside"


def values(rank, count, dtype, again=0):
    """Distinct from rank to rank, place to place and call to call; products of five of them are exact in float32."""
    return ((np.arange(count) * 7 + rank * 3 + again) % 13 + 1).astype(dtype)


def expected(op, size, count, dtype, again=0):
    total = values(0, count, dtype, again)
    for rank in range(1, size):
        total = OPERATIONS[op](total, values(rank, count, dtype, again))
    return total


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_allreduce(window, comm):
    from mpi4py import MPI

    for count in COUNTS:
        for k, dtype in enumerate(TYPES if count < 10_000 else TYPES[:1]):
            op = list(OPERATIONS)[(k + count) % 4] if count < 10_000 else "SUM"
            for shared in (True, False):
                recv, send = (Guarded(window, shared, count, dtype) for _ in range(2))
                in_place = window.allreduce(None, recv.x, getattr(MPI, op))
                out_of_place = window.allreduce(send.x, recv.x, getattr(MPI, op))
                for again in range(3):
                    result = expected(op, comm.size, count, dtype, again)
                    recv.x[:] = values(comm.rank, count, dtype, again)
                    in_place()
                    np.testing.assert_array_equal(recv.x, result)
                    send.x[:] = values(comm.rank, count, dtype, again)
                    out_of_place()
                    np.testing.assert_array_equal(recv.x, result)
                    np.testing.assert_array_equal(send.x, values(comm.rank, count, dtype, again))
                recv.check(), send.check()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_reduce_and_broadcast(window, comm):
    from mpi4py import MPI

    for i, count in enumerate(COUNTS):
        for shared in (True, False):
            root = i % comm.size
            recv, send = (Guarded(window, shared, count, "f4") for _ in range(2))
            recv.x[:] = -1
            at_root = comm.rank == root
            reduce = window.reduce(send.x, recv.x if at_root else None, MPI.MAX, root)
            in_place = window.reduce(None if at_root else send.x, send.x if at_root else None, MPI.SUM, root)
            broadcast = window.broadcast(recv.x, root)
            for again in range(3):
                mine = values(comm.rank, count, "f4", again)
                send.x[:] = mine
                reduce()
                if at_root:
                    np.testing.assert_array_equal(recv.x, expected("MAX", comm.size, count, "f4", again))
                in_place()
                if at_root:
                    recv.x[:] = send.x
                    np.testing.assert_array_equal(recv.x, expected("SUM", comm.size, count, "f4", again))
                else:
                    np.testing.assert_array_equal(send.x, mine)
                    assert again or (recv.x == -1).all()
                broadcast()
                np.testing.assert_array_equal(recv.x, expected("SUM", comm.size, count, "f4", again))
            recv.check(), send.check()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_reduce_scatter_and_allgather(window, comm):
    from mpi4py import MPI

    rank, size = comm.rank, comm.size
    for count in COUNTS:
        uneven = [count // size] * size
        uneven[-1] += count - sum(uneven)
        if size > 1:
            uneven[0], uneven[-1] = 0, uneven[0] + uneven[-1]  # one rank has nothing
        for counts in (None, uneven):
            ends = np.cumsum([0, *(counts or [count // size + (q < count % size) for q in range(size)])])
            lo, hi = ends[rank], ends[rank + 1]
            for shared in (True, False):
                whole = Guarded(window, shared, count, "f4")
                block = Guarded(window, shared, max(np.diff(ends)), "f4")  # empty() needs one size
                own = block.x[: hi - lo]
                scatter = window.reduce_scatter(whole.x, own, MPI.SUM, counts)
                scatter_here = window.reduce_scatter(whole.x, whole.x[lo:hi], MPI.SUM, counts)
                gather = window.allgather(own, whole.x, counts)
                gather_here = window.allgather(None, whole.x, counts)
                for again in range(2):
                    total = expected("SUM", size, count, "f4", again)
                    mine = values(rank, count, "f4", again)
                    whole.x[:] = mine
                    scatter()
                    np.testing.assert_array_equal(own, total[lo:hi])
                    np.testing.assert_array_equal(whole.x, mine)
                    gather()
                    np.testing.assert_array_equal(whole.x, total)
                    whole.x[:] = mine
                    scatter_here()
                    mine[lo:hi] = total[lo:hi]
                    np.testing.assert_array_equal(whole.x, mine)
                    gather_here()
                    np.testing.assert_array_equal(whole.x, total)
                whole.check(), block.check()


@pytest.mark.mpi(ranks=[3], more=[2, 5])
def test_calls_of_all_kinds_in_turn(window, comm):
    """Back to back without a pause, in an order drawn at random, one rank late: slots must not be reused too early."""
    from mpi4py import MPI

    assert not any(slot.ctypes.data % 64 for slots in window.slots for slot in slots), "each begins a cache line"
    random = np.random.default_rng(11)
    late = np.random.default_rng(comm.rank)
    plans = []
    for count in (3, 5000, 270_001, 700_000):
        for shared in (True, False):
            x = window.empty(count, "f4") if shared else np.empty(count, "f4")
            root = int(random.integers(comm.size))
            plans.append((x, window.allreduce(None, x), lambda q, c=count: expected("SUM", comm.size, c, "f4", q)))
            plans.append((x, window.broadcast(x, root), lambda q, c=count, r=root: values(r, c, "f4", q)))
            to_all = window.allgather(None, x)
            ends = np.cumsum([0] + [count // comm.size + (r < count % comm.size) for r in range(comm.size)])

            def gathered(q, c=count, ends=ends):
                return np.concatenate([values(r, c, "f4", q)[ends[r] : ends[r + 1]] for r in range(comm.size)])

            plans.append((x, to_all, gathered))
    before = None
    for again, i in enumerate(random.integers(len(plans), size=40)):
        x, plan, result = plans[i]
        x[:] = values(comm.rank, x.size, "f4", again)
        if late.integers(4) == 0:
            time.sleep(late.uniform(0, 2e-3))
        plan()
        np.testing.assert_array_equal(x, result(again), err_msg=f"call {again}, plan {i} after {before}")
        before = i
    x = np.full(4, comm.rank)
    window.barrier()()
    window.allreduce(None, x, MPI.MAX)()
    assert (x == comm.size - 1).all()


@pytest.mark.mpi(ranks=[3], more=[5])
def test_results_are_equal_to_the_last_bit_and_in_rank_order(window, comm):
    from mpi4py import MPI

    for count in (100, 5000, 300_000):
        for shared in (True, False):
            for dtype in ("f4", "f2", "c8"):
                data = [np.random.default_rng(q).standard_normal(count).astype(dtype) for q in range(comm.size)]
                x = window.empty(count, dtype) if shared else np.empty(count, dtype)
                x[:] = data[comm.rank]
                window.allreduce(None, x)()
                wide = np.float32 if dtype == "f2" else dtype
                total = data[0].astype(wide)
                for more in data[1:]:
                    total = total + more
                np.testing.assert_array_equal(x, total.astype(dtype))
    flat = np.full((3, 4), comm.rank, "i2")
    window.allreduce(None, flat, MPI.SUM)()  # any shape
    assert (flat == sum(range(comm.size))).all()


@pytest.mark.mpi(ranks=3)
def test_shared_arrays_are_given_by_all_ranks_or_by_none(window, comm):
    from mpi4py import MPI

    whole = window.empty(60_000, "f4")
    for count in (3000, 40_000):
        part, other = whole[10_000:][:count], whole[20_000:][:count]
        for place, words in (
            (
                np.empty(count, "f4"),
                "rank 0 gives a private array, rank 1 the same part of a shared array; give the same",
            ),
            (other, "rank 0 gives shared array 0 from byte 80000 on, rank 1 shared array 0 from byte 40000 on"),
        ):
            x = place if comm.rank == 0 else part
            y = np.empty(count, "f4") if comm.rank == 0 else None
            x[:] = values(comm.rank, count, "f4")
            for plan in (window.allreduce(None, x), window.broadcast(x, 1), window.reduce(x, y, MPI.MIN)):
                for _ in range(2):
                    with pytest.raises(ValueError, match=words):
                        plan()
                    np.testing.assert_array_equal(x, values(comm.rank, count, "f4"))
        part[:] = values(comm.rank, count, "f4")  # and the window goes on
        window.allreduce(None, part)()
        np.testing.assert_array_equal(part, expected("SUM", comm.size, count, "f4"))


@pytest.mark.mpi(ranks=2)
def test_a_rank_that_makes_no_array_keeps_no_other_waiting_for_ever(comm):
    from collectives.failures.aborted import Aborted
    from collectives.node_memory.window import SharedWindow

    window = SharedWindow(comm, limit=0.5)
    if comm.rank == 0:
        with pytest.raises(TimeoutError, match=r"empty.*rank 1 of 2"):
            window.empty(3)
    comm.Barrier()
    if comm.rank == 1:
        with pytest.raises(Aborted, match=r"rank 0.*empty"):
            window.empty(3)
    window.free()


@pytest.mark.mpi(ranks=3)
def test_what_is_refused(window, comm):
    from mpi4py import MPI

    x = np.zeros(10, "f4")
    with pytest.raises(TypeError, match="contiguous"):
        window.allreduce(None, x[::2])
    with pytest.raises(TypeError, match="send holds float64, recv float32"):
        window.allreduce(np.zeros(10), x)
    with pytest.raises(ValueError, match="send has 9 elements where 10"):
        window.allreduce(x[:9].copy(), x)
    with pytest.raises(ValueError, match="SUM, PROD, MAX and MIN"):
        window.allreduce(None, x, MPI.LAND)
    with pytest.raises(TypeError, match="MAX of complex64"):
        window.allreduce(None, np.zeros(3, "c8"), MPI.MAX)
    with pytest.raises(TypeError, match="object"):
        window.broadcast(np.array([None]))
    with pytest.raises(ValueError, match="root 9"):
        window.broadcast(x, 9)
    with pytest.raises(ValueError, match="add up to 10"):
        window.allgather(None, x, [1] * comm.size)
    # What only others can know: each names both sides, and the window works on.
    size = 3000 + 1000 * (comm.rank == 1)
    with pytest.raises(ValueError, match=r"3000 float32.*4000 float32"):
        window.allreduce(None, np.zeros(size, "f4"))()
    call = window.broadcast(x) if comm.rank else window.allreduce(None, x)
    with pytest.raises(ValueError, match=r"allreduce.*broadcast"):
        call()
    with pytest.raises(ValueError, match=r"empty\(\(4,.*empty\(\(5,"):
        window.empty(4 + comm.rank, "f4")
    for make in (window.empty, window.empty_common):
        with pytest.raises(ValueError, match=r"shape \(4, -1\): an array has no negative lengths"):
            make((4, -1), "f4")
        for shape in ((1 << 61, 1), (1 << 40, 1 << 40)):
            with pytest.raises(OSError, match="no shared memory"):
                make(shape)
    x[:] = 1
    window.allreduce(None, x)()
    assert (x == comm.size).all()


@pytest.mark.mpi(ranks=3)
def test_a_wait_has_an_end_and_says_who_is_missing(comm):
    from collectives.failures.aborted import Aborted
    from collectives.node_memory.window import SharedWindow

    window = SharedWindow(comm, limit=2)
    x = np.ones(4)
    if comm.rank < 2:
        with pytest.raises(  # Aborted, with the cause of the other, where that was first
            (TimeoutError, Aborted), match=r"allreduce\(.*rank 2"
        ):
            window.allreduce(None, x)()
    comm.Barrier()


@pytest.mark.mpi(ranks=2)
def test_messages_move_while_a_rank_waits(window, comm):
    """Rank 0 waits in shared memory for rank 1, which waits for a message of rank 0 that is too long to be buffered."""
    message, x = np.full(1 << 22, comm.rank + 5.0), np.ones(4)
    if comm.rank == 0:
        request = comm.Isend(message, 1)
        window.allreduce(None, x)()
        request.Wait()
    else:
        comm.Recv(message, 0)
        window.allreduce(None, x)()
        assert (message == 5).all()
    assert (x == 2).all()


@pytest.mark.mpi(ranks=2)
def test_memory_goes_with_the_last_array(window, comm):
    def shared_bytes():
        lines = Path("/proc/self/smaps").read_text().splitlines()
        return sum("/memfd:ringprop" in line for line in lines)

    base = shared_bytes()
    x = window.empty((1000, 100), "f4")
    assert x.flags.c_contiguous and x.shape == (1000, 100) and x.dtype == "f4" and (x == 0).all()
    part = x[10:20]
    assert shared_bytes() == base + 1
    assert (
        not list(Path("/dev/shm").glob("ringprop-*")) or comm.size > 2
    )  # no name is left, but for other tests' new ones
    del x
    assert shared_bytes() == base + 1, "a part of it is still in use"
    part[:] = comm.rank + 1
    window.allreduce(None, part)()
    assert (part == 3).all()
    del part
    assert shared_bytes() == base
    y = window.empty(10)
    window.allreduce(None, y)
    window_free, window.free = window.free, lambda: None  # the fixture frees it a second time
    window_free()
    y[:] = 4  # lives on, as memory of this rank and its peers
    assert (y == 4).all()


@pytest.mark.mpi(ranks=2)
def test_more_memory_than_there_is(window, comm):
    pages = os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(OSError, match=r"no shared memory \(.* MiB for 2 ranks\): rank 0: only .* MiB are available"):
        window.empty(pages * os.sysconf("SC_PAGE_SIZE"), "u1")
    x = window.empty(5)
    x[:] = 1
    window.allreduce(None, x)()
    assert (x == 2).all()


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("rank, call", [(1, "open"), (0, "ftruncate")])
def test_what_one_rank_cannot_have_leaves_no_file_open_on_the_others(window, comm, monkeypatch, rank, call):
    def files():
        return len(os.listdir("/proc/self/fd"))

    def fails(*arguments):
        if comm.rank == rank:
            raise OSError(24, "no more")
        return real(*arguments)

    before, real = files(), getattr(os, call)
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match=f"no shared memory.*rank {rank}: no more") as told:
        window.empty(5)
    monkeypatch.undo()
    assert files() == before and told.value.errno == 24
    x = window.empty(5)
    x[:] = 1
    window.allreduce(None, x)()
    assert (x == 2).all()


@pytest.mark.mpi(ranks=[1, 3], more=[4])
def test_every_number_is_claimed_once_and_words_are_seen_in_order(comm):
    from collectives.node_memory.window import SharedWindow

    window = SharedWindow(comm)
    flags, data = window.flags, window.empty_common(comm.size, "i8")
    mine = [flags.claim() for _ in range(200)]
    assert mine == sorted(mine)
    everyone = comm.allgather(mine)
    assert sorted(number for numbers in everyone for number in numbers) == list(range(200 * comm.size))
    for turn in range(1, 50):  # what was written before `tell` is read after `until`
        data[comm.rank] = turn * (comm.rank + 1)
        flags.publish(3, turn)
        flags.wait_until(3, turn, "the test")
        assert data.tolist() == [turn * (rank + 1) for rank in range(comm.size)]
        flags.barrier("the next turn")
    window.free()


@pytest.mark.mpi(ranks=2)
def test_large_arrays_in_huge_pages_where_all_ranks_get_them(window, comm, monkeypatch):
    import errno

    from collectives.node_memory import window as module

    small = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(module, "huge_page_size", lambda: 16 * small)
    large = module.HUGE_PAGES * 16 * small

    def stretch(nbytes):
        """How far apart a new array lies from rank to rank; it works."""
        x = window.empty(nbytes, "u1")
        x[:] = values(comm.rank, nbytes, "u1")
        window.allreduce(None, x)()
        np.testing.assert_array_equal(x, expected("SUM", comm.size, nbytes, "u1"))
        first, second = (part.ctypes.data for part in window.peers(x).parts)
        return second - first

    monkeypatch.setattr(module, "HUGE", os.MFD_HUGETLB | 63 << 26)  # pages of 2^63 bytes: there are none
    assert stretch(large + 5) == large + small
    monkeypatch.setattr(module, "HUGE", os.MFD_CLOEXEC)  # ordinary pages, asked for as huge ones are
    assert stretch(large + 5) == large + 16 * small
    assert stretch(large - 5) == large, "too small for them"
    real = os.posix_fallocate

    def full(*arguments):
        if comm.rank == 1:
            raise OSError(errno.ENOSPC, "no space left")
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert stretch(large + 5) == large + small, "one rank has none, so none has"


@pytest.mark.mpi(ranks=[2, 3])
@pytest.mark.parametrize("refused", ["memfd_create", "open"])
def test_where_one_rank_is_refused_memory_all_send_messages_and_one_says_so_once(comm, monkeypatch, capfd, refused):
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.running import planner

    at = 0 if refused == "memfd_create" else comm.size - 1  # the first rank makes the file, the others open it

    def fails(*arguments, **more):
        if comm.rank == at:
            raise PermissionError(1, "not permitted here")
        return real(*arguments, **more)

    planner.warn_once.cache_clear()
    real = getattr(os, refused)
    monkeypatch.setattr(os, refused, fails)
    communicator, other = Communicator(comm), Communicator(comm)
    for dtype in ("f8", "f2"):
        for algorithm in (None, "shared"):
            x = np.full(9000, comm.rank + 1, dtype)
            communicator.Allreduce(MPI.IN_PLACE, x, algorithm=algorithm)
            assert (x == sum(range(1, comm.size + 1))).all()
    other.Bcast(x, algorithm="shared")
    with pytest.raises(OSError, match=f"no shared memory.*rank {at}: not permitted here"):
        communicator.empty(5)
    monkeypatch.undo()
    comm.Barrier()
    said = capfd.readouterr().err
    assert said.count(f"collectives of {comm.size} ranks send messages instead") == (comm.rank == 0), said
    assert "shared needs node memory: no shared memory" in communicator.explain("allreduce", 9000)
    communicator.release()
    other.release()


@pytest.mark.mpi(ranks=2)
def test_the_memory_of_another_process_is_opened_only_if_it_is_the_one_told(window, comm, monkeypatch):
    """Where ranks see other processes under the same number, as in containers, the path leads to another's file."""
    real, opened = os.stat, []
    monkeypatch.setattr(os, "stat", lambda path, **more: real("/dev/null" if comm.rank else path, **more))
    monkeypatch.setattr(os, "open", lambda *given, real=os.open: opened.append(given) or real(*given))
    with pytest.raises(OSError, match=r"rank 1: /proc/\d+/fd/\d+ is not rank 0's memory"):
        window.empty(5)
    assert not opened


@pytest.mark.mpi(ranks=2)
def test_memory_of_a_communicator_waits_as_long_as_its_watchdog(comm, monkeypatch):
    from collectives import Communicator

    for given, environment, limit in (
        ({}, "", 300),
        ({"watch": 0}, "", np.inf),
        ({"watch": 40}, "", 50),
        ({"watch": 40, "abort": False}, "", np.inf),
        ({}, "20", 30),
    ):
        if environment:
            monkeypatch.setenv("RINGPROP_WATCH", environment)
        communicator = Communicator(comm, **given)
        x = communicator.empty(9000)
        assert communicator.planner.deadline.seconds == limit, given
        communicator.Allreduce(None, x)
        for made in (communicator.Dup(), communicator.Split(), communicator.Clone()):
            assert made.planner.deadline.seconds == limit, given
            made.Free()
        communicator.release()


@pytest.mark.mpi(ranks=2)
def test_the_first_call_in_node_memory_waits_no_longer_than_others(comm):
    """To make the memory is to wait inside MPI, where nothing ended the wait for a rank that never comes."""
    from collectives import Communicator
    from collectives.failures.aborted import Aborted

    for make in (
        lambda communicator: communicator.Allreduce(None, np.ones(9), algorithm="shared"),
        lambda communicator: communicator.empty(9),
    ):
        communicator = Communicator(comm)
        communicator.planner.deadline.seconds = 0.3
        if comm.rank == 0:
            with pytest.raises(TimeoutError, match="ranks of its node"):
                make(communicator)
            with pytest.raises(Aborted, match="has waited"):
                communicator.Barrier(algorithm="dissemination")
        comm.Barrier()
        if comm.rank == 1:
            communicator.planner.node.Ibarrier().Wait()  # so that nothing is in flight as MPI ends


@pytest.mark.mpi(ranks=2)
def test_to_make_a_communicator_waits_no_longer_than_a_call(comm, monkeypatch):
    from collectives import Communicator
    from collectives.failures.deadline import Deadline

    monkeypatch.setattr(Deadline, "seconds", 0.3)
    if comm.rank == 0:
        with pytest.raises(TimeoutError, match=r"rank 0 has waited 0\.3 s for the other rank to make its Communicator"):
            Communicator(comm)
        comm.send("gave up", 1)
    else:
        comm.recv()
        comm.Ibarrier().Wait()  # for that of rank 0, so that nothing is in flight as MPI ends
    comm.Barrier()


@pytest.mark.mpi(ranks=2)
def test_who_waits_for_a_claim_does_not_take_it_by_asking_who_is_late(comm, monkeypatch):
    from collectives.node_memory.window import SharedWindow

    window = SharedWindow(comm, limit=0.2)
    flags, asked = window.flags, []
    monkeypatch.setattr(flags, "try_lock", lambda: asked.append(flags.calls.current))
    late = []
    monkeypatch.setattr(flags, "refuse_aborted", lambda: late.append(flags.calls.current.late()))
    with pytest.raises(TimeoutError, match="claim"):
        flags.claim()
    assert late and not any(late)
    comm.Barrier()


@pytest.mark.mpi(ranks=2)
def test_who_is_told_of_a_death_by_another_rank_knows_it_for_one(comm, monkeypatch):
    """A run that goes on without dead ranks asks of every error whether it is one."""
    from collectives.failures import revocation
    from collectives.failures.aborted import Aborted
    from collectives.node_memory.window import SharedWindow

    for death in (True, False):
        window = SharedWindow(comm, limit=20)
        comm.barrier()  # it is there on both
        if comm.rank == 0:
            window.flags.abort("rank 0 was told", death)
        comm.barrier()
        with pytest.raises(Aborted, match="rank 0 was told") as caught:
            window.flags.barrier("the test")
        monkeypatch.setattr(revocation, "_made", None)
        assert not revocation.is_rank_death(caught.value)
        monkeypatch.setattr(revocation, "_made", {})
        assert revocation.is_rank_death(caught.value) == death
        monkeypatch.setattr(revocation, "_made", None)
        window.free()


@pytest.mark.mpi(ranks=2)
def test_memory_that_a_rank_does_not_come_to_map_ends_in_time(comm, monkeypatch):
    """A rank that stands still after the barrier, while it opens the file, is named by the other."""
    from collectives.failures.aborted import Aborted
    from collectives.node_memory import files, window

    shared, open_that = window.SharedWindow(comm, limit=1.0), files.open_that
    monkeypatch.setattr(files, "open_that", lambda *location: [time.sleep(3), open_that(*location)][1])
    error = Aborted if comm.rank else TimeoutError
    with pytest.raises(error, match="making memory"):
        shared.empty_common(1000)
        shared.flags.barrier("what comes next")  # the late rank may have had what the other had sent already


@pytest.mark.mpi(ranks=2)
def test_a_rank_that_comes_late_to_the_first_call_in_node_memory_gives_up_too(comm):
    """The other one had given up: its barrier counted for the late rank, which then waited inside MPI without end."""
    from collectives import Communicator

    communicator = Communicator(comm)
    communicator.planner.deadline.seconds = 0.5
    if comm.rank == 1:
        time.sleep(1.5)
    with pytest.raises(TimeoutError, match="node"):
        communicator.Allreduce(None, np.ones(9000), algorithm="shared")
    comm.Barrier()
    if comm.rank == 0:
        communicator.planner.node.Ibarrier().Wait()  # so that nothing is in flight as MPI ends


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("make", ["empty", "empty_common"])
def test_a_rank_that_makes_an_array_and_one_that_calls_a_collective_both_learn_of_it(window, comm, make):
    x = np.ones(9000)
    with pytest.raises(ValueError, match=rf"ranks disagree: rank 0 calls {make}\(.*, rank 1 calls allreduce\("):
        getattr(window, make)(9000) if comm.rank == 0 else window.allreduce(None, x)()
    window.allreduce(None, x)()
    assert (x == 2).all()
    with pytest.raises(ValueError, match="ranks disagree"):
        getattr(window, make)(9000 + comm.rank)
