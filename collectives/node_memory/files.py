"""Anonymous files that the ranks of a node map: how one opens what another has made.

The first rank makes a file (memfd_create) and sends its place; the others open it in /proc, if it is that one. The
memory goes with the last process that maps it, whatever end they come to.
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
from mpi4py import MPI

T = TypeVar("T")

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


def share_file(
    comm: MPI.Intracomm,
    nbytes: int,
    use: Callable[[int], T],
    kind: int = 0,
    wait: Callable[[MPI.Request], object] = MPI.Request.Wait,
) -> T:
    """Return use(descriptor) of a new file that all ranks open (collective); `use` may map it.

    Parameters
    ----------
    comm : the ranks, all on one node
    nbytes : of the file
    use : what each rank does with its descriptor, which is closed then
    kind : the flag of memfd_create for huge pages, which the system counts apart
    wait : waits for a request in which all ranks take part; may raise TimeoutError where one does not come

    Raises
    ------
    OSError
        On all ranks, where any of them may not have it.
    """
    comm = MPI.Intracomm(comm)  # requests of MPI, also where it is a Communicator, which has its own
    handle, result, problem = -1, None, None
    location = np.zeros(4, np.int64)  # process, descriptor, device and inode of the first rank's file; 0: there is none
    failed, failures = np.zeros(1, bool), np.zeros(comm.Get_size(), bool)
    try:
        try:
            if comm.Get_rank() == 0:
                if not kind:
                    refuse_more_than_there_is(nbytes)
                handle = os.memfd_create("ringprop", os.MFD_CLOEXEC | kind)
                os.ftruncate(handle, nbytes)
                location[:] = os.getpid(), handle, *identity(os.fstat(handle))
        except OSError as error:
            problem = error
        wait(comm.Ibcast(location))
        process, descriptor, *file = location.tolist()
        try:
            if process:
                if comm.Get_rank():
                    handle = open_that(f"/proc/{process}/fd/{descriptor}", tuple(file))
                result = use(handle)
        except OSError as error:
            problem = error
        failed[0] = problem is not None
        wait(comm.Iallgather(failed, failures))  # the first rank's file is open until all have it
    finally:
        if handle >= 0:
            os.close(handle)
    if failures.any():
        wait(comm.Ibarrier())
        for rank, error in enumerate(comm.allgather(problem)):
            if error:
                need = f"{nbytes / 2**20:.1f} MiB for {comm.Get_size()} ranks"
                raise OSError(error.errno, f"no shared memory ({need}): rank {rank}: {error.strerror}")
    return result


def refuse_more_than_there_is(nbytes: int) -> None:
    """Refuse memory that is mapped but not there, which would end in a kill without a word."""
    if nbytes > (available := meminfo("MemAvailable", nbytes)):
        raise OSError(errno.ENOMEM, f"only {available / 2**20:.0f} MiB are available")


def meminfo(name: str, default: int) -> int:
    """Return a line of /proc/meminfo, in bytes."""
    with open("/proc/meminfo") as lines:
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), default)
