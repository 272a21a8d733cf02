"""The ranks start as one program.

MPI does not see to it: started by a launcher that the MPI library does not know, every process believes to be alone.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from collectives.failures.job_end import GRACE, HANGING, abort, rank_of_world

# Where launchers say how many ranks they started: Open MPI, MPICH and Intel MPI, Cray, Slurm.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")
START = 912  # tag with which ranks tell the first one that they have come


class WorldError(RuntimeError):
    """The ranks that were launched do not form one MPI world."""


def nodes_of(comm) -> list[int]:
    """Return for each rank the first rank on its node (collective)."""
    from mpi4py import MPI

    from collectives.failures.revocation import register, unregister

    node = register(MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED)))
    first = node.bcast(comm.Get_rank())
    unregister(node).Free()
    return comm.allgather(first)


def check_world(comm=None):
    """Refuse to run as N separate worlds of one rank.

    Raises
    ------
    WorldError
        where the launcher started several ranks and this one is alone in COMM_WORLD

    Examples
    --------
    >>> from collectives import check_world
    >>> check_world()  # at the start of a program: an error if each rank is alone
    """
    from mpi4py import MPI

    size = (MPI.COMM_WORLD if comm is None else comm).Get_size()
    for name in SIZE_VARIABLES:
        launched = int(os.environ.get(name, 1))
        if launched > 1 and size == 1:
            library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
            raise WorldError(
                f"{launched} processes were launched ({name}={launched}), but each is alone: the launcher does not "
                f"belong to the MPI library of this Python, {library}. Start the ranks with that library's own "
                f"mpiexec (of a wheel: the one beside {sys.executable}); under Slurm with `srun --mpi=pmix` or "
                f"`srun --mpi=pmi2`, one of those that `srun --mpi=list` names and the library was built with."
            )


@contextlib.contextmanager
def starting(limit: float) -> Iterator[None]:
    """In this block the ranks wait for each other for the first time; where some do not come, name them and end all.

    Parameters
    ----------
    limit : seconds that a rank waits; 0 for ever
    """
    from mpi4py import MPI

    world, all_here = MPI.COMM_WORLD, threading.Event()
    rank, others = world.Get_rank(), range(1, world.Get_size())
    hello = world.Isend(bytearray(0), 0, START) if rank else MPI.REQUEST_NULL

    def watch():
        if all_here.wait(limit + GRACE * (rank > 0)):  # the first rank knows more
            return
        late = [other for other in others if not world.Iprobe(other, START)] if rank == 0 else [0]
        ranks = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        what = f"for {ranks}: stopped, or busy" if late else "for ranks that are here, and do not go on"
        abort(HANGING, f"{rank_of_world()}: start-up has waited {limit:g} s {what}")

    if limit and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        threading.Thread(target=watch, name="start-up", daemon=True).start()
    try:
        yield
    finally:
        all_here.set()
    hello.Wait()
    for other in others if rank == 0 else ():
        world.Recv(bytearray(0), other, START)
