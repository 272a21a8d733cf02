"""Anonymous files that the ranks of a node map: how one opens what another has made.

The first rank makes a file (memfd_create) and sends its place; the others open it in /proc, if it is that one. The
memory goes with the last process that maps it, whatever end they come to.
"""

import ctypes
import errno
import mmap
import os
import weakref
from functools import cache

from mpi4py import MPI

C_LIBRARY = ctypes.CDLL(None, use_errno=True)
C_LIBRARY.mmap.restype = ctypes.c_void_p
C_LIBRARY.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
C_LIBRARY.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
LARGEST_WORD = (1 << 63) - 1


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what no two files of a system have in common, in words of 63 bits."""
    return status.st_dev & LARGEST_WORD, status.st_ino & LARGEST_WORD


def open_that(path: str, file: tuple[int, int]) -> int:
    """Open a file if it is the one that was meant: elsewhere, as in another container, the path may be another's."""
    if identity(os.stat(path)) == file:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if identity(os.fstat(handle)) == file:  # it may have changed meanwhile
            return handle
        os.close(handle)
    raise OSError(errno.ESTALE, f"{path} is not rank 0's memory: do the ranks see each other's processes?")


def map_file(handle: int, nbytes: int) -> ctypes.Array:
    """Map a file; the memory goes with the last that refers to what is returned.

    mmap.mmap of Python before 3.13 keeps a descriptor of its own as long as the memory.
    """
    address = C_LIBRARY.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, C_LIBRARY.munmap, address, nbytes).atexit = False  # arrays may be used until the very end
    return memory


@cache
def unlink_library_memory(prefix: str = "/dev/shm/mpich_shm_") -> None:
    """Take away the name of the file in which MPICH's ranks of a node share memory, once all of them have mapped it.

    MPICH does so as it ends, and a job that is killed would leave the memory behind.
    """
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps if prefix in line}
    for file in files:
        try:
            os.unlink(file)
        except OSError:  # another rank of the node was first, or may
            continue


def open_first(comm: MPI.Intracomm, nbytes: int) -> ctypes.Array:
    """So many bytes that all ranks see (collective); the first ones, when there are only messages to agree by.

    Raises
    ------
    OSError
        On all ranks, where any of them may not have it.
    """
    handle, location, memory, problem = -1, None, None, None
    try:
        if comm.Get_rank() == 0:
            handle = os.memfd_create("ringprop", os.MFD_CLOEXEC)
            os.ftruncate(handle, nbytes)
            location = f"/proc/{os.getpid()}/fd/{handle}", identity(os.fstat(handle))
    except OSError as error:
        problem = error
    location = comm.bcast(location)
    try:
        if location:
            if comm.Get_rank():
                handle = open_that(*location)
            memory = map_file(handle, nbytes)
    except OSError as error:
        problem = error
    problems = comm.allgather(problem)  # the first rank's file is open until all have it
    if handle >= 0:
        os.close(handle)
    for rank, error in enumerate(problems):
        if error:
            raise OSError(error.errno, f"no shared memory: rank {rank}: {error.strerror}")
    return memory
