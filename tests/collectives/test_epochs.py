"""Every rank of a shared schedule counts the same epochs of slots: else the next calls read the wrong ones."""

from inspect import signature

import numpy as np
import pytest

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import NODES, SHARED_MEMORY
from collectives.executor.program import Program

SHARED = [
    pytest.param(operation, name, id=f"{operation} {name}")
    for operation, entries in ALGORITHMS.items()
    for name, entry in entries.items()
    if SHARED_MEMORY in entry.needs and operation != "barrier"
]


@pytest.mark.parametrize(("operation", "name"), SHARED)
def test_all_ranks_of_a_node_count_the_same(operation, name):
    entry = ALGORITHMS[operation][name]
    taken = signature(entry.rounds).parameters
    for size in (2, 3, 5):
        for count in (*range(40), 65, 128, 129):
            for root in {0, size - 1} if "root" in taken else {None}:
                options = {"slot": 32, "line": 4, "root": root, "nodes": tuple(r // 3 for r in range(size))}
                options = {key: value for key, value in options.items() if key in taken}
                parity = [
                    Program(entry.rounds(rank, size, count, **options), rank, fused=True).epoch_parity % 2
                    for rank in range(size)
                ]
                nodes = options["nodes"] if NODES in entry.needs else (0,) * size
                for node in set(nodes):
                    here = {parity[rank] for rank in range(size) if nodes[rank] == node}
                    assert len(here) == 1, (size, count, root, parity)


@pytest.mark.mpi(ranks=3)
def test_sums_after_a_reduce_on_shared_arrays_whose_last_segment_is_short(comm):
    from mpi4py import MPI

    from collectives import Communicator

    communicator = Communicator(comm)
    x, y = communicator.empty(131056, "f4"), communicator.empty(131056, "f4")
    x[:] = comm.rank + 1
    communicator.Reduce(x, y, root=1, algorithm="shared")
    assert comm.rank != 1 or (y == 6).all()
    for i in range(4):
        z = np.full(50000, comm.rank + 1.0 + i, "f4")
        communicator.Allreduce(MPI.IN_PLACE, z)
        assert (z == 6 + 3 * i).all()
    communicator.release()


@pytest.mark.mpi(ranks=2)
def test_no_plan_runs_on_an_aborted_communicator(comm):
    from collectives import Communicator
    from collectives.failures.aborted import Aborted
    from collectives.steps import Compute, Recv, Send

    communicator, other = Communicator(comm), 1 - comm.rank

    def fail(array):
        raise ValueError("a mistake of the caller")

    x = np.zeros(4)
    good = communicator.compile(iter([(Send(other, "x", 0, 2), Recv(other, "x", 2, 4))]), x=x)
    bad = communicator.compile(iter([(Compute("fail"),)]), computations={"fail": lambda: fail(None)}, x=x)
    with pytest.raises(ValueError, match="a mistake"):
        communicator.Run(bad)
    with pytest.raises(Aborted):
        communicator.Run(good)
    with pytest.raises(Aborted):
        communicator.compile(iter([]), x=x)


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("message", [(1, -1), (-3, 0)])
def test_negative_counts_and_displacements_are_refused(comm, message):
    from mpi4py import MPI

    from collectives import Communicator

    communicator, x = Communicator(comm), np.arange(4096.0, dtype="f4")
    for algorithm in ("ring", "doubling"):
        with pytest.raises(ValueError, match=r"negative (count|displacement)"):
            communicator.Allreduce(MPI.IN_PLACE, [x, message, MPI.FLOAT], algorithm=algorithm)
    assert np.array_equal(x, np.arange(4096.0))
    communicator.release()
