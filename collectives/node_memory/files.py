"""Anonymous files that the ranks of a node map: how one opens what another has made.

The first rank makes a file (memfd_create) and tells where it is; the others open it in /proc, if it is that one. The
memory goes with the last process that maps it, whatever end they come to.
"""

import errno
import mmap
import os

from mpi4py import MPI

LARGEST_WORD = (1 << 63) - 1


def identity(status: os.stat_result) -> tuple[int, int]:
    """What no two files of a system have in common, in words of 63 bits."""
    return status.st_dev & LARGEST_WORD, status.st_ino & LARGEST_WORD


def open_that(path: str, file: tuple[int, int]) -> int:
    """Open a file if it is the one that was told: elsewhere, as in another container, the path may be another's."""
    if identity(os.stat(path)) == file:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if identity(os.fstat(handle)) == file:  # it may have changed meanwhile
            return handle
        os.close(handle)
    raise OSError(errno.ESTALE, f"{path} is not rank 0's memory: do the ranks see each other's processes?")


def open_first(comm: MPI.Intracomm, nbytes: int) -> mmap.mmap:
    """So many bytes that all ranks see (collective); the first ones, when there are only messages to tell by.

    Raises
    ------
    OSError
        On all ranks, where any of them may not have it.
    """
    handle, told, memory, problem = -1, None, None, None
    try:
        if comm.Get_rank() == 0:
            handle = os.memfd_create("ringprop", os.MFD_CLOEXEC)
            os.ftruncate(handle, nbytes)
            told = f"/proc/{os.getpid()}/fd/{handle}", identity(os.fstat(handle))
    except OSError as error:
        problem = error
    told = comm.bcast(told)
    try:
        if told:
            if comm.Get_rank():
                handle = open_that(*told)
            memory = mmap.mmap(handle, nbytes)
    except OSError as error:
        problem = error
    problems = comm.allgather(problem)  # the first rank's file is open until all have it
    if handle >= 0:
        os.close(handle)
    for rank, error in enumerate(problems):
        if error:
            raise OSError(error.errno, f"no shared memory: rank {rank}: {error.strerror}")
    return memory
