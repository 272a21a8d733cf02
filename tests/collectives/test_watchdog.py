"""Hanging programs are told as who waits for whom; calls that do not fit are refused by all ranks."""

import numpy as np
import pytest

from parallel import launch

PROGRAM = """
import sys, time
import numpy as np
from mpi4py import MPI
from collectives import Communicator
c = Communicator(MPI.COMM_WORLD, watch=0.6)
x = np.ones(1000, "f4")
y = x.copy()
c.Allreduce(x, y)

def deadlock():
    c.Ssend(x, (c.rank + 1) % 3)

def missing():
    if c.rank == 1:
        compute()
    c.Allreduce(x, y, MPI.MAX)

def compute():
    time.sleep(20)

def mixed():
    if c.rank == 2:
        c.Recv(x, source=0, tag=5)
    c.Bcast(x, root=1)
    c.Barrier()

WHAT()
"""

CASES = {
    "deadlock": ["Ssend((1000,) float32, 1), after collective 1", "in deadlock", "cycle: 0 -> 1 -> 2 -> 0"],
    "missing": [
        "rank 0: Allreduce((1000,) float32, (1000,) float32, MAX), collective 2",
        "rank 1: not in a call, after collective 1",
        "in compute",
        "missing from Allreduce: rank 1",
    ],
    "mixed": ["rank 2: Recv((1000,) float32, source=0, tag=5)", "cycle: 0 -> 2 -> 0"],
}


@pytest.mark.parametrize("what", CASES)
def test_a_hanging_program_is_reported_once_and_ended(what, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("WHAT", what))
    said: list[str] = []
    status = launch.run([program], ranks=3, timeout=20, stdout=said.append)
    text = "".join(said)
    assert status == 86, text
    assert text.count("watchdog: rank") == 1, text
    for words in CASES[what]:
        assert words in text, text


@pytest.mark.mpi(ranks=[2])
def test_going_on_after_a_report(comm, ranks, capfd):
    import time

    from collectives import Communicator

    communicator = Communicator(comm, watch=0.3, abort=False)
    if communicator.rank:
        time.sleep(1.2)
    x = np.ones(3)
    communicator.Allreduce(None, x)
    assert (x == 2).all()
    communicator.release()
    said = capfd.readouterr().err
    assert ("missing from Allreduce: rank 1" in said) == (comm.rank == 0)
    communicator.Allreduce(None, x)


@pytest.mark.mpi(ranks=[3])
def test_ranks_that_do_not_agree_are_refused_with_both_sides(comm, ranks):
    from mpi4py import MPI

    from collectives import Communicator

    communicator = Communicator(comm, debug=True)
    odd = communicator.rank == 1
    f4, f8 = np.ones(6, "f4"), np.ones(3, "f8")
    for call, said in (
        (lambda: communicator.Allreduce(None, f4[: 5 if odd else 6]), r"Allreduce\(6 of MPI_FLOAT, SUM\) at"),
        (lambda: communicator.Allreduce(None, f8 if odd else f4), r"rank 1 calls Allreduce\(3 of MPI_DOUBLE, SUM\)"),
        (lambda: communicator.Bcast(f8.view("i8") if odd else f8), r"rank 1 calls Bcast\(3 of MPI_LONG, root 0\)"),
        (lambda: communicator.Bcast(f8, root=odd), "root 0.*root 1"),
        (lambda: communicator.Allreduce(None, f4, MPI.MAX if odd else MPI.MIN), "MIN.*MAX"),
        (lambda: communicator.Barrier() if odd else communicator.Bcast(f8), r"Bcast.*rank 1 calls Barrier\(\)"),
        (lambda: communicator.bcast(1) if odd else communicator.allgather(1), "allgather.*bcast"),
        (lambda: communicator.Gather(f8[: 1 + odd], np.ones(6)), "Gather.1 of MPI_DOUBLE.*2 of"),
        (lambda: communicator.Bcast(f4[:: 2 if odd else 1]), "with a mistake: .*contiguous"),
    ):
        with pytest.raises(ValueError, match=f"(?s)the ranks do not agree: rank 0 calls.*{said}"):
            call()
    root = communicator.rank == 0
    whole, part = np.arange(6.0), np.empty(2)
    communicator.Scatter(whole if root else None, MPI.IN_PLACE if root else part)
    communicator.Gather(MPI.IN_PLACE if root else part, whole if root else None)
    communicator.Allgather(part.copy() if not root else whole[:2], np.empty(6))
    communicator.Alltoall(whole.copy(), np.empty(6))
    communicator.Reduce_scatter(np.ones(6), part, [2, 2, 2])
    communicator.Reduce_scatter_block(np.ones(6), part)
    communicator.Gatherv(np.ones(communicator.rank), [np.empty(3), [0, 1, 2]] if root else None)
    assert communicator.allreduce(1) == 3
    communicator.release()
