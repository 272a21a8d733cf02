"""Flags in the memory that the ranks of a node share: barriers, published numbers and claims of work.

Flags are words in memory that all map, a cache line for each rank. A rank writes its data, then a fence (MPI_Win_sync),
then its word; a reader sees the word, then a fence, then reads. A waiting rank looks again and again where the node has
a core for every rank, else it yields its core at once. While it waits long it lets MPI make progress, which may tell it
that a rank has died, moves this process's nonblocking collectives (progress.py), and at its deadline it says who has
not come.

A rank that ends a wait early (timeout, interrupt, MPI error) aborts: it writes the cause beside its words, and GONE
into its words for barriers. Every rank that waits for it, then or later, raises `Aborted` with that cause.
"""

import fcntl
import hashlib
import os
from enum import IntEnum
from io import FileIO

import numpy as np
from mpi4py import MPI

from collectives.failures.aborted import Aborted, cause_of
from collectives.failures.revocation import is_rank_death
from collectives.failures.unfinished import keep_alive
from collectives.node_memory.files import map_file, share_file
from collectives.progress import Calls, Doing

CACHE_LINE = 128  # bytes: processors fetch cache lines in pairs
CAUSE_BYTES = 512  # bytes for the cause for which a rank has aborted
GONE = -1  # what a rank that has aborted shows in place of a signature, which is never negative
MOST_CORES = 8192  # of a node
SPINS = 2000  # at a flag before a rank yields its core, where there are enough cores: some 100 us


def marks_of(signature: int) -> tuple[int, int]:
    """What a rank shows of a signature, of 62 bits at most: with a bit that changes from use to use of a word."""
    return signature << 1, signature << 1 | 1


UNSIGNED = marks_of(0)


def signature_of(text: str) -> tuple[int, int]:
    """Return what a rank shows of a call in words, for `Flags.signed_barrier`."""
    return marks_of(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little"))


class Word(IntEnum):
    """What each word of a rank's line is for; the next one too where a comment says so."""

    BARRIER = 0  # and 1, alternating
    USER = 2  # and four more: for the window's owner (`publish`, `wait_until`, `read_all`)
    NUMBER = 7  # on the first rank's line: the next one to `claim`
    ABORTED = 8  # that the rank has ended a call early, and that the cause can be read
    PAIRS = 16  # and all behind: how many barriers it has had with each of the others, where not all take part


class Flags:
    """What each rank shows the others, in words on cache lines of its own (`Word`).

    A rank that arrives at a barrier writes the signature of its call into a word, together with a bit that changes from
    use to use: one read says that the rank has arrived and what it calls. Two words alternate. A rank writes a word
    again two barriers later; by then every other rank has arrived at the barrier between, and so has read it.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks, all on one node; creating the flags is collective.
    deadline : Deadline
        When a rank that waits for others gives up.
    calls : Calls, optional
        Where waits are registered for a watchdog; by default none looks.

    Attributes
    ----------
    count : int
        Barriers so far.
    file
        The file that the words are in: a rank locks it while it claims a number.

    Raises
    ------
    OSError
        On all ranks, where any of them may have no shared memory.
    TimeoutError
        In whatever waits: others did not come by the deadline; the message names them.
    MPI.Exception
        In whatever waits, where MPI tells of a death.
    Aborted
        In whatever waits, where another rank has ended a wait early; and in all that follows an early end here.
    """

    def __init__(self, comm, deadline, calls=None):
        self.comm, self.deadline = comm, deadline
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.lines, self.causes, self.file = lines_of(comm)
        lines = self.lines
        self.mine, self.others = lines[self.rank], [line for rank, line in enumerate(lines) if rank != self.rank]
        group = comm.Get_group()
        self.world = group.Translate_ranks(range(self.size), MPI.COMM_WORLD.Get_group())
        group.Free()
        self.ranks = [rank for rank in range(self.size) if rank != self.rank]
        for word in (*range(8), Word.ABORTED, *range(Word.PAIRS, Word.PAIRS + self.size)):
            self.mine[word] = int(word == 1)  # as after two barriers
        self.first = lines[0]
        self.window = MPI.Win.Allocate_shared(0, 1, comm=MPI.COMM_SELF)  # for its fence
        self.window.Lock_all()
        self.fence = self.window.Sync
        self.count, self.calls = 0, calls or Calls()
        cores = np.zeros(MOST_CORES, bool)  # a bound rank sees its own only, so the masks of all are merged
        cores[list(os.sched_getaffinity(0))] = True
        comm.Allreduce(MPI.IN_PLACE, cores, MPI.LOR)
        self.spins = SPINS if self.size <= np.count_nonzero(cores) else 0
        comm.Barrier()

    def signed_barrier(self, marks: tuple[int, int], description: str) -> bool:
        """Arrive, and wait until every rank has arrived as often: what they wrote before can be read then.

        Return whether all ranks came with the same `marks_of` a signature: all get the same answer.
        """
        count = self.count = self.count + 1
        word, value = count & 1, marks[count >> 1 & 1]
        self.fence()
        self.mine[word] = value
        same = True  # `arrive` and `wait_for_all`, written out: 0.25 us less (measured)
        for line in self.others:
            if line[word] != value and not self._wait_for_word(line, word, value, description):
                same = False
        self.fence()
        return same

    def arrive(self, marks: tuple[int, int]) -> tuple[int, int]:
        """Begin a barrier: return the word and its value, for `arrived`, which must follow before anything else."""
        count = self.count = self.count + 1
        word, value = count & 1, marks[count >> 1 & 1]
        self.fence()
        self.mine[word] = value
        return word, value

    def wait_for_all(self, word: int, value: int, description: str) -> bool:
        """End a barrier that `arrive` began: return whether all ranks came with the same signature."""
        same = True
        for line in self.others:
            if line[word] != value and not self._wait_for_word(line, word, value, description):
                same = False
        self.fence()
        return same

    def arrived(self, word: int, shown: int) -> bool | None:
        """Look once: None while a rank has not come, else whether all came with the same signature."""
        same = True
        for line in self.others:
            if (shows := line[word]) != shown:
                if shows == GONE:
                    self.refuse_aborted()
                if (shows ^ shown) & 1:
                    self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # which may say that it has died
                    self.refuse_aborted()
                    return None
                same = False
        self.fence()
        return same

    def barrier(self, description: str) -> None:
        """Wait for all ranks, without a signature."""
        self.signed_barrier(UNSIGNED, description)

    def subset_barrier(self, ranks: list[int], description: str) -> None:
        """Wait for some of the ranks, this one among them: each pair counts its barriers."""
        if len(ranks) == self.size:
            return self.barrier(description)
        self.wait_for_subset(self.arrive_at_subset(ranks), description)

    def arrive_at_subset(self, ranks: list[int]) -> dict[int, int]:
        """Begin a barrier of some ranks: return what each of the others has to have counted with this one."""
        self.fence()
        others = [r for r in ranks if r != self.rank]
        for r in others:
            self.mine[Word.PAIRS + r] += 1
        return {r: self.mine[Word.PAIRS + r] for r in others}

    def wait_for_subset(self, counts: dict[int, int], description: str) -> None:
        """End a barrier that `arrive_at_subset` began."""
        mine = Word.PAIRS + self.rank
        for r, count in counts.items():
            line = self.lines[r]
            if line[mine] < count:
                self._wait(line, lambda line, count=count: line[mine] >= count, description, [(r, line)])
        self.fence()

    def subset_arrived(self, counts: dict[int, int]) -> bool:
        """Look once whether they have come."""
        there = all(self.lines[r][Word.PAIRS + self.rank] >= count for r, count in counts.items())
        if not there:
            self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # which may say that one has died
            self.refuse_aborted()
        self.fence()
        return there

    def wait_for_request(self, request: MPI.Request, description: str) -> None:
        """Wait for a message in which all ranks take part, as for a barrier; MPI keeps its memory where that raises."""
        try:
            self._wait(None, lambda _: request.Test(), description)
        except BaseException:
            keep_alive([request])
            raise

    def publish(self, word: int, value: int) -> None:
        """Write a word of this rank: a rank that reads it can read everything written before."""
        self.fence()
        self.mine[word] = value

    def wait_until(self, word: int, value: int, description: str) -> None:
        """Wait until a word of every rank is at least `value`."""
        for line in self.others:
            if line[word] < value:
                self._wait(line, lambda line: line[word] >= value, description)
        self.fence()

    def read_all(self, word: int) -> list[int]:
        """Return a word of every rank."""
        return [(self.mine if rank == self.rank else line)[word] for rank, line in enumerate(self.lines)]

    def claim(self) -> int:
        """Return the next number: 0, 1, 2, ... over all ranks of the node, none twice."""
        try:
            if not self.try_lock():
                self._wait(self.first, lambda _: self.try_lock(), "a claim", [])  # [] as to ask `done` is to lock
            number = self.first[Word.NUMBER]
            self.first[Word.NUMBER] = number + 1
            return number
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN)  # whether it was locked or not

    def abort(self, cause: str, death: bool = False) -> None:
        """End a call early: every rank that waits for this one, now or later, raises Aborted.

        `death`: because MPI has told it of one, which the others may not know yet.
        """
        if isinstance(self.mine, Refusing):
            return
        text = cause.encode()[:CAUSE_BYTES]
        self.causes[self.rank][: len(text)] = text
        self.fence()
        self.mine[Word.ABORTED] = -len(text) if death else len(text)
        self.fence()
        self.mine[0] = self.mine[1] = GONE
        self.mine = Refusing(cause, death)

    def refuse_aborted(self):
        """Raise Aborted where another rank has ended a call early, and abort with its cause."""
        for rank, line in zip(self.ranks, self.others, strict=True):
            if length := line[Word.ABORTED]:
                self.fence()
                cause = bytes(self.causes[rank][: abs(length)]).decode(errors="replace")
                self.abort(cause, length < 0)
                raise Aborted(cause, length < 0)

    def try_lock(self):
        """Lock the file if nobody has: 3 us with the unlocking, where MPI_Fetch_and_op takes 16 in Open MPI."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _wait_for_word(self, line, word, shown, description):
        """Wait for a rank, and say whether it shows the same."""
        for _ in range(self.spins):
            if line[word] == shown:
                return True
        self._wait(line, lambda line: line[word] == GONE or not (line[word] ^ shown) & 1, description)
        if (shows := line[word]) == GONE:
            self.refuse_aborted()
        return shows == shown

    def _wait(self, line, done, description, expected=None):
        """Spin, then yield the core, and let MPI make the progress that a late rank may be waiting for.

        Every wait that lasts is here, and aborts where it ends early. (A plan aborts, too, where an
        interrupt comes while a barrier spins.)
        """
        for _ in range(self.spins):
            if done(line):
                return
        expected = list(zip(self.ranks, self.others, strict=True)) if expected is None else expected

        def late():  # for the watchdog's thread; a request (no line) may be tested by the waiting thread alone
            return [self.world[rank] for rank, other in expected if line is None or not done(other)]

        calls, before = self.calls, self.calls.current
        if before is None:
            calls.others += 1
            calls.current = Doing("a wait in node memory", (description,), {}, late=late)
        try:
            self._wait_long(line, done, description, expected)
        except BaseException as error:
            self.abort(cause_of(error, f"rank {self.rank}", description), is_rank_death(error))
            raise
        finally:
            calls.current = before

    def _wait_long(self, line, done, description, expected):
        def meanwhile():
            self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # which may say that a rank has died
            self.refuse_aborted()

        def late(waited):
            missing = [rank for rank, other in expected if not done(other)]
            absent = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.size} did not come"
            raise TimeoutError(
                f"rank {self.rank} has waited {waited:.1f} s in {description}: "
                f"{absent if expected else 'another rank holds the lock'}"
            )

        self.deadline.wait(lambda: done(line), meanwhile, late)

    def free(self):
        """Let go of the memory, and close the file."""
        self.window.Unlock_all()
        self.mine, self.first, self.others, self.lines, self.causes = None, None, [], [], []
        self.window.Free()
        self.file.close()


class Refusing:
    """Takes the place of the words of a rank that has aborted: each access raises."""

    def __init__(self, cause: str, death: bool):
        self.cause, self.death = cause, death

    def __getitem__(self, word):
        raise Aborted(self.cause, self.death)

    def __setitem__(self, word, value):
        raise Aborted(self.cause, self.death)


def lines_of(comm: MPI.Intracomm) -> tuple[list[memoryview], list[memoryview], FileIO]:
    """Return words and bytes of text for each rank, which all see, and their file (collective).

    Raises
    ------
    OSError
        On all ranks, where any has none.
    """
    words = CACHE_LINE + -(-8 * comm.Get_size() // CACHE_LINE) * CACHE_LINE  # for all, and for each of the others
    each = words + CAUSE_BYTES
    nbytes = each * comm.Get_size()
    memory, file = share_file(comm, nbytes, lambda handle: (map_file(handle, nbytes), FileIO(os.dup(handle), "r+")))
    memory, starts = memoryview(memory).cast("B"), range(0, nbytes, each)
    return [memory[at : at + words].cast("q") for at in starts], [memory[at + words : at + each] for at in starts], file
