"""Node-shared memory: arrays that every rank of a node can read and write, and flags to take turns with.

    window = SharedWindow(comm)                  # collective; all ranks of comm on one node
    x = window.empty((1000, 1000), "f4")         # collective; one for each rank, seen by all
    allreduce = window.allreduce(None, x)        # local: plans a call on these arrays ...
    allreduce()                                  # ... which all ranks then make, as often as they like

The collectives are in shared.py. Nothing is sent: each rank reduces its slice of the vector over all ranks' arrays and
writes it back to all, in blocks that stay in cache. Each element is summed by one rank, in rank order, so that the
results of all ranks are equal to the last bit.

Arrays live in anonymous files (memfd_create) that all ranks map: memory goes with the last array that needs it, no
array ever points to memory that is gone, and nothing is left behind, whatever end the ranks come to.

Arrays of 8 MiB and more lie in huge pages where the administrator allows them (sysctl vm.nr_overcommit_hugepages=N, of
2 MiB each, or vm.nr_hugepages=N): sums of 8 and 16 MiB then take a tenth less. Otherwise ordinary pages do.

Flags are words in a shared MPI window, a cache line for each rank. A rank writes its data, then a fence (MPI_Win_sync),
then its word; a reader sees the word, then a fence, then reads. A waiting rank looks again and
again where the node has a core for every rank, else it yields its core at once. While it waits long it lets MPI make
progress, and after `limit` seconds it says who has not come.
"""

import errno
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.shared import SLOT, SharedCollectives

__all__ = ["SharedWindow"]

HUGE = os.MFD_HUGETLB
FAILED, PROCESS, HANDLE = 8, 10, 11  # words of the flags: 8 and 9 whether a rank has failed, and whose which file is
HUGE_PAGES = 4  # that a rank's memory must fill to lie in such: at most a fifth is left over
LINE = 128  # bytes: processors fetch cache lines in pairs
# Where slots begin in their page. Large private arrays begin 16 bytes after a page's start, and some processors copy
# ten times slower where the target lies just behind the source, counted within pages (AMD's rep movsb).
SHIFT = 2048
LOOKS = 2000  # at a flag before a rank yields its core, where there are enough cores: some 100 us


class Array(NamedTuple):
    """What `empty` made, as this rank sees it."""

    address: int
    nbytes: int
    memory: np.ndarray  # a row for each rank
    owner: weakref.ref  # to what the caller's views keep alive, and plans do not


class Peers(NamedTuple):
    """The same part of a shared array on every rank."""

    place: tuple[int, int]  # number of the array, offset in bytes
    parts: list[np.ndarray]
    owner: weakref.ref  # dead when nothing but plans can refer to the array on this rank


class SharedWindow(SharedCollectives):
    """Shared memory of the ranks of one node, and collectives on it.

    Parameters
    ----------
    comm : MPI.Intracomm
        Its ranks must share a node: comm.Split_type(MPI.COMM_TYPE_SHARED).
    limit : float
        Seconds after which a rank that waits for others gives up.

    Raises
    ------
    ValueError
        Ranks on different nodes.
    """

    def __init__(self, comm: MPI.Intracomm, limit: float = 300.0):
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        together = node.Get_size() == comm.Get_size()
        node.Free()
        if not comm.allreduce(together, MPI.LAND):
            raise ValueError("ranks on different nodes cannot share memory: give the communicator of one node")
        self.comm, self.rank, self.size = comm.Dup(), comm.Get_rank(), comm.Get_size()
        self.flags = Flags(self.comm, limit)
        self.turn = 0  # slots alternate: a turn uses those of its parity
        self._arrays: dict[int, Array] = {}
        self._made = 0  # arrays so far: the next one's number, equal on all ranks
        slots = self._map(SHIFT + 2 * SLOT)
        self._slots = [slots[rank][SHIFT : SHIFT + 2 * SLOT].reshape(2, SLOT) for rank in range(self.size)]

    def empty(self, shape: int | tuple[int, ...], dtype=float) -> np.ndarray:
        """An array of zeros in shared memory, one for each rank, all of one shape (collective).

        Collectives on it, or on the same contiguous part of it on every rank, need no copies. The memory goes when
        nothing refers to the array any more on any rank; a Communicator lets go of its plans when it makes a new one.

        Raises
        ------
        ValueError
            Shapes or dtypes that differ between ranks.
        OSError
            Not enough memory, or ranks that may not see each other's files in /proc.
        """
        dtype = np.dtype(dtype)
        shape = tuple(map(int, shape)) if np.iterable(shape) else (int(shape),)
        told = self.comm.allgather((shape, dtype.str))
        for rank, other in enumerate(told):
            if other != told[0]:
                raise ValueError(f"empty: rank 0 asks for {told[0]}, rank {rank} for {other}")
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = self._map(max(nbytes, 1))
        own = np.frombuffer(memoryview(memory[self.rank]), np.uint8)
        number, arrays = self._made, self._arrays
        arrays[number] = Array(own.ctypes.data, nbytes, memory, weakref.ref(own, lambda _: arrays.pop(number, None)))
        self._made += 1
        return own[:nbytes].view(dtype).reshape(shape)

    def common(self, shape: int | tuple[int, ...], dtype=float) -> np.ndarray:
        """One array of zeros that all ranks see (collective): what one writes others read when they have met.

        Each rank has touched its part first, so that lies in the memory next to its core.

        Raises
        ------
        OSError
            As `empty`.
        """
        shape, dtype = tuple(map(int, shape)) if np.iterable(shape) else (int(shape),), np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = self._map(max(1, -(-nbytes // self.size)))
        return memory.reshape(-1)[:nbytes].view(dtype).reshape(shape)

    def free(self) -> None:
        """Free the flags and forget the arrays (collective). Arrays that are still in use live on as private ones."""
        self.flags.free()
        self._arrays, self._slots = {}, []
        self.comm.Free()

    def peers(self, x: np.ndarray) -> Peers | None:
        """Where in shared memory x is, and the same part of every rank's memory; None if x is not shared."""
        if self.size == 1:
            return Peers((0, 0), [x], weakref.ref(self))
        address = x.ctypes.data
        for number, array in list(self._arrays.items()):
            at = address - array.address
            if at >= 0 and at + x.nbytes <= array.nbytes:
                parts = [row[at : at + x.nbytes].view(x.dtype) for row in array.memory]
                return Peers((number, at), parts, array.owner)
        return None

    def _map(self, nbytes: int) -> np.ndarray:
        """New memory for every rank, one row each of at least so many bytes: a file that all map, of whole pages."""
        if nbytes >= HUGE_PAGES * (page := huge_page_size()):
            try:
                return self._map_pages(nbytes, page, HUGE)
            except OSError:  # on all ranks alike: there are not so many huge pages
                pass
        return self._map_pages(nbytes, mmap.PAGESIZE)

    def _map_pages(self, nbytes, page, kind=0):
        """The same, of pages of so many bytes; `kind` is what memfd_create has to know of them."""
        stretch = -(-nbytes // page) * page
        flags, total = self.flags, stretch * self.size
        handle = open_together(flags, total, kind)

        def touched():  # whoever writes first gets the page, from the memory next to its core
            memory = np.frombuffer(mmap.mmap(handle, total), np.uint8).reshape(self.size, stretch)
            memory[self.rank] = 0
            return memory

        try:
            if kind:  # likewise; and a page that cannot be had says so here, where the first touch would end in a kill
                on_all(flags, total, partial(os.posix_fallocate, handle, self.rank * stretch, stretch))
            return on_all(flags, total, touched)
        finally:
            os.close(handle)


def huge_page_size() -> int:
    """Bytes of the system's huge pages."""
    return meminfo("Hugepagesize", 2 << 20)


def open_together(flags: "Flags", nbytes: int, kind: int = 0) -> int:
    """An anonymous file that every rank has open (collective); returns this rank's descriptor of it."""

    def created():
        if flags.rank:
            return -1
        if not kind:  # the system counts huge pages apart
            refuse_more_than_there_is(nbytes)
        handle = os.memfd_create("ringprop", os.MFD_CLOEXEC | kind)
        try:
            os.ftruncate(handle, nbytes)
        except OSError:
            os.close(handle)
            raise
        flags.tell(PROCESS, os.getpid())
        flags.tell(HANDLE, handle)
        return handle

    handle = on_all(flags, nbytes, created)
    path = f"/proc/{flags.first[PROCESS]}/fd/{flags.first[HANDLE]}"
    try:
        return on_all(flags, nbytes, lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC), undo=os.close)
    finally:
        if handle >= 0:
            os.close(handle)


def on_all(flags: "Flags", nbytes: int, act: Callable, undo: Callable = lambda result: None):
    """act() on every rank (collective). What keeps any rank from it is raised on every rank, after undo(its result).

    The ranks tell by flags, for which they do not wait without end, as they would in messages.
    """
    result, problem = None, None
    try:
        result = act()
    except OSError as error:
        problem = error
    word = FAILED + (flags.count & 1)  # nobody writes it again before all have met once more
    flags.tell(word, int(problem is not None))
    flags.together(f"making {nbytes / 2**20:.1f} MiB of shared memory")
    if any(flags.told(word)):
        if problem is None:
            undo(result)
        for rank, error in enumerate(flags.comm.allgather(problem)):
            if error:
                need = f"{nbytes / 2**20:.1f} MiB for {flags.size} ranks"
                raise OSError(error.errno, f"no shared memory ({need}): rank {rank}: {error.strerror}")
    return result


def refuse_more_than_there_is(nbytes):
    """Memory that is mapped but not there ends in a kill without a word."""
    if nbytes > (available := meminfo("MemAvailable", nbytes)):
        raise OSError(errno.ENOMEM, f"only {available / 2**20:.0f} MiB are available")


def meminfo(name, default):
    """A line of /proc/meminfo, in bytes."""
    with open("/proc/meminfo") as lines:
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), default)


class Flags:
    """What each rank shows the others, on a cache line of its own.

    Words of a line: 0 and 1 belong to the meetings, by turns: a rank that arrives writes the signature of its call, and
    beside it a bit that changes from use to use. One store says both, and a word is not written again before all have
    read it: that takes a meeting more. 2, 3, 4, 6 and 7 are what the ranks like to tell each other with `tell`; on the
    first rank's line 5 is the next number to `claim`.
    """

    def __init__(self, comm, limit):
        self.comm, self.limit = comm, limit
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.window = MPI.Win.Allocate_shared(LINE, 1, comm=comm)
        lines = [memoryview(self.window.Shared_query(rank)[0]).cast("B").cast("q") for rank in range(self.size)]
        self.mine, self.others = lines[self.rank], [line for rank, line in enumerate(lines) if rank != self.rank]
        self.ranks = [rank for rank in range(self.size) if rank != self.rank]
        for word in range(8):
            self.mine[word] = int(word == 1)  # as if all had met twice
        self.first = lines[0]
        self.window.Lock_all()
        self.fence = self.window.Sync
        self.count = 0
        # A bound rank sees its own cores only, so the masks of all are joined.
        cores = set().union(*comm.allgather(os.sched_getaffinity(0)))
        self.looks = LOOKS if self.size <= len(cores) else 0
        comm.Barrier()
        self.turn = open_together(self, 1)  # locked by the rank whose turn it is to claim

    def agree(self, signature: int, what: str) -> bool:
        """Arrive, and wait until every rank has arrived as often: what they wrote before can be read then.

        Says whether all ranks gave the same signature, of 62 bits at most: all get the same answer.
        """
        count = self.count = self.count + 1
        word, shown = count & 1, signature << 1 | (count >> 1 & 1)
        self.fence()
        self.mine[word] = shown
        same = True
        for line in self.others:
            if line[word] != shown and not self._comes(line, word, shown, what):
                same = False
        self.fence()
        return same

    def together(self, what: str) -> None:
        """The same without a signature."""
        self.agree(0, what)

    def tell(self, word: int, value: int) -> None:
        """Raise a word of this rank: what was written before can be read by those who see it."""
        self.fence()
        self.mine[word] = value

    def until(self, word: int, value: int, what: str) -> None:
        """Wait until that word of every rank is at least `value`."""
        for line in self.others:
            if line[word] < value:
                self._wait(line, lambda line: line[word] >= value, what)
        self.fence()

    def told(self, word: int) -> list[int]:
        """That word of every rank."""
        found = [line[word] for line in self.others]
        found.insert(self.rank, self.mine[word])
        return found

    def claim(self) -> int:
        """The next number: 0, 1, 2, ... over all ranks of the node, none twice."""
        if not self._turns():
            self._wait(self.first, lambda _: self._turns(), "its turn to claim")
        number = self.first[5]
        self.first[5] = number + 1
        fcntl.lockf(self.turn, fcntl.LOCK_UN)
        return number

    def _turns(self):
        """Take the turn to claim if nobody has it: 3 us with its end, where MPI_Fetch_and_op takes 16 in Open MPI."""
        try:
            fcntl.lockf(self.turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _comes(self, line, word, shown, what):
        """Wait for a rank, and say whether it shows the same."""
        for _ in range(self.looks):
            if line[word] == shown:
                return True
        self._wait(line, lambda line: not (line[word] ^ shown) & 1, what)
        return line[word] == shown

    def _wait(self, line, there, what):
        """First only look; then give the core to others, and let MPI move what a late rank may be waiting for."""
        for _ in range(self.looks):
            if there(line):
                return
        pause, probe, clock = os.sched_yield, self.comm.Iprobe, time.monotonic
        since, rounds = clock(), 0
        while not there(line):
            pause()
            rounds += 1
            if rounds % 32 == 0:
                probe(MPI.ANY_SOURCE, MPI.ANY_TAG)
                waited = clock() - since
                if waited > 0.05:
                    time.sleep(50e-6)
                if waited > self.limit:
                    late = [rank for rank, other in zip(self.ranks, self.others, strict=True) if not there(other)]
                    raise TimeoutError(
                        f"rank {self.rank} has waited {waited:.1f} s in {what}: "
                        f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} of {self.size} did not come"
                    )

    def free(self):
        self.window.Unlock_all()
        self.mine, self.first, self.others = None, None, []
        self.window.Free()
        os.close(self.turn)
