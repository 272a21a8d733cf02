"""Node-shared memory: arrays that every rank of a node can read and write.

    window = SharedWindow(comm)                  # collective; all ranks of comm on one node
    x = window.empty((1000, 1000), "f4")         # collective; one for each rank, seen by all
    allreduce = window.allreduce(None, x)        # local: plans a call on these arrays ...
    allreduce()                                  # ... which all ranks then make, as often as they like

The collectives are schedules of algorithms/shared.py, bound to memory in plans.py; barriers are in flags.py. Nothing is
sent: each rank reduces its slice of the vector over all ranks' arrays and writes it back to all, in blocks that stay in
cache. Each element is summed by one rank, in rank order, so that the results of all ranks are equal to the last bit.

Arrays live in anonymous files (memfd_create) that all ranks map: memory goes with the last array that needs it, no
array ever points to memory that is gone, and nothing is left behind, whatever end the ranks come to.

Arrays of 8 MiB and more lie in huge pages where the administrator allows them (sysctl vm.nr_overcommit_hugepages=N, of
2 MiB each, or vm.nr_hugepages=N): sums of 8 and 16 MiB then take a tenth less. Otherwise ordinary pages do.
"""

import errno
import math
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.failures.aborted import cause_of
from collectives.failures.deadline import Deadline
from collectives.failures.revocation import is_rank_death, register, unregister
from collectives.node_memory import plans
from collectives.node_memory.barriers import first_barrier
from collectives.node_memory.files import map_file, meminfo, share_file
from collectives.node_memory.flags import Flags
from collectives.node_memory.plans import SLOT_BYTES
from collectives.progress import Calls

__all__ = ["SharedWindow"]

HUGE = os.MFD_HUGETLB
LARGEST = 1 << 62  # bytes of a file: offsets have 63 bits
HUGE_PAGES = 4  # that a rank's memory must fill to lie in such: at most a fifth is left over
# Where slots begin in their page. Large private arrays begin 16 bytes after a page's start, and some processors copy
# ten times slower where the target lies just behind the source, counted within pages (AMD's rep movsb).
SHIFT = 2048


class Array(NamedTuple):
    """What `empty` made, as this rank sees it."""

    address: int
    nbytes: int
    memory: np.ndarray  # a row for each rank
    owner: weakref.ref  # to what the caller's views keep alive, and plans do not


class SharedWindow:
    """Shared memory of the ranks of one node, and collectives on it.

    Parameters
    ----------
    comm : MPI.Intracomm
        Its ranks must share a node: comm.Split_type(MPI.COMM_TYPE_SHARED).
    limit : float or Deadline
        Seconds after which a rank that waits for others gives up.
    calls : Calls, optional
        Where waits are registered for a watchdog, as of a Communicator.

    Attributes
    ----------
    flags : Flags
    on_abort : function (exception, place)
        Called with what has ended a call early on this rank.
    slots : list of uint8 arrays (2, SLOT_BYTES)
        Of every rank, the scratch that all see: even and odd.
    epoch : int
        Uses of slots so far: even ones take the even slots.

    Raises
    ------
    ValueError
        Ranks on different nodes.
    OSError
        On all ranks, where any of them may have no shared memory.
    """

    peers, barrier, broadcast, allgather = plans.peers, plans.barrier, plans.broadcast, plans.allgather
    allreduce, reduce, reduce_scatter = plans.allreduce, plans.reduce, plans.reduce_scatter

    def __init__(self, comm: MPI.Intracomm, limit: float | Deadline = 300.0, calls: Calls | None = None):
        deadline = limit if isinstance(limit, Deadline) else Deadline(limit)
        self.on_abort = lambda error, place: None
        self.epoch = 0
        self._arrays: dict[int, Array] = {}
        self._made = 0  # arrays so far: the next one's number, equal on all ranks
        with deadline.inside_mpi("for the other ranks of its node, to make the memory that they share"):
            node = register(comm.Split_type(MPI.COMM_TYPE_SHARED))
            together = np.array(node.Get_size() == comm.Get_size())
            unregister(node).Free()
            MPI.Intracomm(comm).Allreduce(MPI.IN_PLACE, together, MPI.LAND)
            if not together:
                raise ValueError("ranks on different nodes cannot share memory: give the communicator of one node")
            self.comm, self.rank, self.size = register(comm.Dup()), comm.Get_rank(), comm.Get_size()
            try:
                self.flags = Flags(self.comm, deadline, calls)
            except OSError:
                unregister(self.comm).Free()
                raise
        try:
            slots = self._map(SHIFT + 2 * SLOT_BYTES)
        except TimeoutError:  # an OSError too; to free the flags is to wait for the rank that has not come
            raise
        except OSError:
            self.free()
            raise
        self.slots = [slots[rank][SHIFT : SHIFT + 2 * SLOT_BYTES].reshape(2, SLOT_BYTES) for rank in range(self.size)]

    def abort(self, description: str, error: BaseException, place: str = "") -> None:
        """Mark the window aborted: this rank has ended a call early, and no later one can be trusted, on any rank."""
        self.flags.abort(cause_of(error, f"rank {self.rank}", description), is_rank_death(error))
        self.on_abort(error, place)

    def empty(self, shape: int | tuple[int, ...], dtype=float) -> np.ndarray:
        """Return an array of zeros in shared memory, one for each rank, all of one shape (collective).

        Collectives on it, or on the same contiguous part of it on every rank, need no copies. The memory goes when
        nothing refers to the array any more on any rank; a Communicator lets go of its plans when it makes a new one.

        Raises
        ------
        ValueError
            Shapes or dtypes that differ between ranks; a negative length.
        OSError
            Not enough memory, or ranks that may not see each other's files in /proc.
        TimeoutError
            Ranks that do not come in time.
        """
        shape, dtype = shape_of(shape), np.dtype(dtype)
        self._agree(f"empty({shape}, {dtype.str!r})")
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._map(max(nbytes, 1))
        own = np.frombuffer(memoryview(memory[self.rank]), np.uint8)
        number, arrays = self._made, self._arrays
        arrays[number] = Array(own.ctypes.data, nbytes, memory, weakref.ref(own, lambda _: arrays.pop(number, None)))
        self._made += 1
        return own[:nbytes].view(dtype).reshape(shape)

    def empty_common(self, shape: int | tuple[int, ...], dtype=float) -> np.ndarray:
        """One array of zeros that all ranks see (collective): what one writes others read behind a barrier.

        Each rank has touched its part first, so that lies in the memory next to its core.

        Raises
        ------
        ValueError
            Shapes or dtypes that differ between ranks; a negative length.
        OSError
            As `empty`.
        """
        shape, dtype = shape_of(shape), np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        self._agree(f"empty_common({shape}, {dtype.str!r})")
        memory = self._map(max(1, -(-nbytes // self.size)))
        return memory.reshape(-1)[:nbytes].view(dtype).reshape(shape)

    def _agree(self, description: str) -> None:
        """Raise Disagreement, a ValueError, on every rank where they do not all make the same array (collective)."""
        agree, _ = first_barrier(self, description, [], 0)
        agree()

    def free(self) -> None:
        """Free the flags and forget the arrays (collective). Arrays that are still in use live on as private ones."""
        self.flags.free()
        self._arrays, self.slots = {}, []
        unregister(self.comm).Free()

    def _map(self, nbytes: int) -> np.ndarray:
        """Return new memory for all ranks, a row of at least `nbytes` for each: a file that all map, of whole pages."""
        if nbytes * self.size > LARGEST:  # on all ranks alike, where the first one alone would make the file
            raise OSError(errno.ENOMEM, f"no shared memory ({nbytes / 2**20:.1f} MiB for {self.size} ranks)")
        if nbytes >= HUGE_PAGES * (page := huge_page_size()):
            try:
                return self._map_pages(nbytes, page, HUGE)
            except TimeoutError:  # an OSError too
                raise
            except OSError:  # on all ranks alike: there are not enough huge pages
                pass
        return self._map_pages(nbytes, mmap.PAGESIZE)

    def _map_pages(self, nbytes, page, kind=0):
        """Return new memory in pages of `page` bytes; `kind` is the flag of memfd_create for such pages."""
        stretch = -(-nbytes // page) * page
        total = stretch * self.size

        def touched(handle):  # the first rank to write a page gets it in the memory next to its core
            if kind:  # a page that cannot be had says so here, where the first touch would end in a kill
                os.posix_fallocate(handle, self.rank * stretch, stretch)
            memory = np.frombuffer(map_file(handle, total), np.uint8).reshape(self.size, stretch)
            memory[self.rank] = 0
            return memory

        wait = lambda request: self.flags.wait_for_request(request, "making memory that all ranks see")
        return share_file(self.comm, total, touched, kind, wait)


def shape_of(shape) -> tuple[int, ...]:
    """Return a shape as a tuple, without negative lengths."""
    shape = tuple(map(int, shape)) if np.iterable(shape) else (int(shape),)
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}: an array has no negative lengths")
    return shape


def huge_page_size() -> int:
    """Bytes of the system's huge pages."""
    return meminfo("Hugepagesize", 2 << 20)
