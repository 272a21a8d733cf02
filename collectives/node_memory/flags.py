"""Flags in the memory that the ranks of a node share: how they meet, tell each other numbers, and claim work.

Flags are words in memory that all map, a cache line for each rank. A rank writes its data, then a fence (MPI_Win_sync),
then its word; a reader sees the word, then a fence, then reads. A waiting rank looks again and again where the node has
a core for every rank, else it yields its core at once. While it waits long it lets MPI make progress, which may tell it
that a rank has died, moves this process's nonblocking collectives (progress.py), and after `limit` seconds it says who
has not come.
"""

import fcntl
import os
import time
from enum import IntEnum

from mpi4py import MPI

from collectives.failures.awake import Awake
from collectives.node_memory.files import open_first
from collectives.progress import Calls, Doing, in_flight, move

LINE = 128  # bytes: processors fetch cache lines in pairs
LOOKS = 2000  # at a flag before a rank yields its core, where there are enough cores: some 100 us


def marks_of(signature: int) -> tuple[int, int]:
    """What a rank shows of a signature, of 62 bits at most: with a bit that changes from use to use of a word."""
    return signature << 1, signature << 1 | 1


UNSIGNED = marks_of(0)


class Word(IntEnum):
    """What each word of a rank's line is for; the next one too where a comment says so."""

    MEETING = 0  # and 1, by turns
    FINISHED = 2  # `tell`: how many gradients a rank has finished
    TOLD = 3  # that its loss is there
    FIRST = 4  # the first and the last of the parameters that it has
    NUMBER = 5  # on the first rank's line: the next one to `claim`
    LAST = 6
    BEGUN = 7  # how far it is in its backward pass
    FAILED = 8  # and 9, by turns: whether it could not make or open a file
    PROCESS = 10  # where the first rank's file is,
    HANDLE = 11
    DEVICE = 12  # and which
    INODE = 13
    PAIRS = 16  # and all behind: how often it has met each of the others, where not all meet


class Flags:
    """What each rank shows the others, in words on cache lines of its own (`Word`).

    A rank that arrives at a meeting writes the signature of its call into a word, together with a bit that changes from
    use to use: so a reader sees with one look that the rank has come and what it calls. Two words take turns. A rank
    writes the same word again two meetings later; by then every other rank has come to the meeting between the two, and
    so has read what was there before.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks, all on one node; creating the flags is collective.
    limit : float
        Seconds after which a rank that waits for others gives up.

    Attributes
    ----------
    count : int
        Meetings so far.
    file : int
        Descriptor of a file that a rank locks while it claims a number: -1 until window.py opens it.

    Raises
    ------
    OSError
        On all ranks, where any of them may have no shared memory.
    TimeoutError
        In whatever waits: others did not come within `limit`; the message names them.
    MPI.Exception
        In whatever waits, where MPI tells of a death.
    """

    def __init__(self, comm, limit):
        self.comm, self.limit = comm, limit
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.lines = lines = lines_of(comm)
        self.mine, self.others = lines[self.rank], [line for rank, line in enumerate(lines) if rank != self.rank]
        self.ranks = [rank for rank in range(self.size) if rank != self.rank]
        for word in (*range(8), *range(Word.PAIRS, Word.PAIRS + self.size)):
            self.mine[word] = int(word == 1)  # as if all had met twice
        self.first = lines[0]
        self.window = MPI.Win.Allocate_shared(0, 1, comm=MPI.COMM_SELF)  # for its fence
        self.window.Lock_all()
        self.fence = self.window.Sync
        self.count, self.calls = 0, Calls()
        # A bound rank sees its own cores only, so the masks of all are joined.
        cores = set().union(*comm.allgather(os.sched_getaffinity(0)))
        self.looks = LOOKS if self.size <= len(cores) else 0
        comm.Barrier()
        self.file = -1

    def meet(self, marks: tuple[int, int], what: str) -> bool:
        """Arrive, and wait until every rank has arrived as often: what they wrote before can be read then.

        Says whether all ranks came with the same `marks_of` a signature: all get the same answer.
        """
        count = self.count = self.count + 1
        word, shown = count & 1, marks[count >> 1 & 1]
        self.fence()
        self.mine[word] = shown
        same = True
        for line in self.others:
            if line[word] != shown and not self._comes(line, word, shown, what):
                same = False
        self.fence()
        return same

    def together(self, what: str) -> None:
        """Meet, without a signature."""
        self.meet(UNSIGNED, what)

    def among(self, ranks: list[int], what: str) -> None:
        """Meet some of the ranks, this one among them: each pair counts how often it has met here."""
        if len(ranks) == self.size:
            return self.together(what)
        self.fence()
        late = [(r, self.lines[r]) for r in ranks if r != self.rank]
        for r, _ in late:
            self.mine[Word.PAIRS + r] += 1
        for r, line in late:
            met, mine = self.mine[Word.PAIRS + r], Word.PAIRS + self.rank
            if line[mine] < met:
                self._wait(line, lambda line, met=met, mine=mine: line[mine] >= met, what, [(r, line)])
        return self.fence()

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
        if not self._locks():
            self._wait(self.first, lambda _: self._locks(), "a claim")
        number = self.first[Word.NUMBER]
        self.first[Word.NUMBER] = number + 1
        fcntl.lockf(self.file, fcntl.LOCK_UN)
        return number

    def _locks(self):
        """Lock the file if nobody has: 3 us with the unlocking, where MPI_Fetch_and_op takes 16 in Open MPI."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def _wait(self, line, there, what, expected=None):
        """First only look; then give the core to others, and let MPI move what a late rank may be waiting for."""
        for _ in range(self.looks):
            if there(line):
                return
        self.calls.others += 1
        self.calls.current = Doing("a meeting", (what,), {})
        try:
            self._wait_long(line, there, what, expected)
        finally:
            self.calls.current = None

    def _wait_long(self, line, there, what, expected):
        pause, probe, clock = os.sched_yield, self.comm.Iprobe, Awake()
        rounds = 0
        while not there(line):
            pause()
            rounds += 1
            if rounds % 32 == 0:
                probe(MPI.ANY_SOURCE, MPI.ANY_TAG)
                if in_flight:
                    move()
                waited = clock.now()
                if waited > 0.05:
                    time.sleep(50e-6)
                if waited > self.limit:
                    expected = expected or zip(self.ranks, self.others, strict=True)
                    late = [rank for rank, other in expected if not there(other)]
                    raise TimeoutError(
                        f"rank {self.rank} has waited {waited:.1f} s in {what}: "
                        f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} of {self.size} did not come"
                    )

    def free(self):
        """Let go of the memory, and close the file."""
        self.window.Unlock_all()
        self.mine, self.first, self.others, self.lines = None, None, [], []
        self.window.Free()
        if self.file >= 0:
            os.close(self.file)


def lines_of(comm: MPI.Intracomm) -> list[memoryview]:
    """A line of words for each rank, which all see (collective); an OSError on all ranks where any has none."""
    nbytes = LINE + -(-8 * comm.Get_size() // LINE) * LINE  # words by which it meets all, and each of the others
    memory = memoryview(open_first(comm, nbytes * comm.Get_size()))
    return [memory[rank * nbytes : (rank + 1) * nbytes].cast("q") for rank in range(comm.Get_size())]
