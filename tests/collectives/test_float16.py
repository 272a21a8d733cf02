"""float16 over ranks: summed in float32 in rank order, rounded once; bit for bit what one process computes."""

import numpy as np
import pytest

from collectives import ALGORITHMS
from collectives.choosing.selection import Call, Selection

COUNT = 3001


def operands(ranks, count=COUNT):
    """float16 of all ranks whose sums lose bits at every rounding."""
    rng = np.random.default_rng(7)
    return (rng.standard_normal((ranks, count)) * rng.choice([1, 30, 1000], (ranks, count))).astype("f2")


def summed(x):
    """In float32 from the first rank to the last, rounded once."""
    total = x[0].astype("f4")
    for row in x[1:]:
        total += row
    return total.astype("f2")


ROUNDED_ONCE = {op: name for op, entries in ALGORITHMS.items() for name, entry in entries.items() if entry.rounds_once}


@pytest.mark.mpi(ranks=[1, 2, 3], more=[5])
def test_sums_are_rounded_once(comm, ranks):
    from mpi4py import MPI

    from collectives import Communicator

    rank, x = comm.rank, operands(ranks)
    expected = summed(x)
    cuts = [COUNT * i // ranks for i in range(ranks + 1)]
    lengths, mine = np.diff(cuts).tolist(), slice(cuts[rank], cuts[rank + 1])
    for given in ({}, ROUNDED_ONCE):  # on one node memory is shared; elsewhere, and nonblocking, it is ROUNDED_ONCE
        communicator = Communicator(comm, **given)
        own, y = x[rank].copy(), np.full(COUNT, -1, "f2")
        communicator.Allreduce(own, y)
        assert y.tobytes() == expected.tobytes()
        communicator.Allreduce(MPI.IN_PLACE, own)
        assert own.tobytes() == expected.tobytes()
        for root in range(ranks):
            y[:] = -1
            communicator.Reduce(x[rank], y, MPI.SUM, root)
            assert y.tobytes() == (expected if rank == root else np.full_like(y, -1)).tobytes()
        part = np.full(lengths[rank], -1, "f2")
        communicator.Reduce_scatter(x[rank], part, lengths)
        assert part.tobytes() == expected[mine].tobytes()
        communicator.Scan(x[rank], y)
        assert y.tobytes() == summed(x[: rank + 1]).tobytes()
        y[:] = -1
        communicator.Exscan(x[rank], y)
        assert y.tobytes() == (summed(x[:rank]) if rank else np.full_like(y, -1)).tobytes()
        own = x[rank].copy()
        communicator.Iallreduce(None, own).Wait()
        assert own.tobytes() == expected.tobytes()
        communicator.Ireduce_scatter(x[rank], part, lengths).Wait()
        assert part.tobytes() == expected[mine].tobytes()
        communicator.Allreduce(x[rank], y, MPI.MAX)
        assert (y == x.max(0)).all()
        scaled = (x[rank].astype("f4") / 1000).astype("f2")
        communicator.Allreduce(scaled, y, MPI.PROD)
        assert np.isfinite(y).all()
        own = x[rank].copy()
        communicator.Allreduce(None, own, algorithm="ring")
        same = own.tobytes() == expected.tobytes()
        assert same == (ranks < 3), "a ring rounds at every hop: these operands show it"
        communicator.release()


def test_what_rounds_once_is_chosen_where_ranks_do_not_share_memory():
    for nodes, shared in (([0, 0], True), ([0, 1], False), ([0, 0, 1, 1], False)):
        selection = Selection({}, nodes)
        for operation, name in ROUNDED_ONCE.items():
            for nbytes in (0, 100, 1 << 30):
                chosen, why = selection.reason("auto", Call(operation, nbytes, float16=True))
                assert chosen == ("shared" if shared and operation not in ("scan", "exscan") else name)
                reasons = "rounded after every round", "default table says so", "needs arrays"
                assert any(words in why for words in reasons)
                assert selection.choose("ring", Call("allreduce", nbytes, float16=True)) == "ring", "as asked for"
