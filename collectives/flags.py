"""Flags in the memory that the ranks of a node share: how they meet, tell each other numbers, and claim work.

Flags are words in a shared MPI window, a cache line for each rank. A rank writes its data, then a fence (MPI_Win_sync),
then its word; a reader sees the word, then a fence, then reads. A waiting rank looks again and again where the node has
a core for every rank, else it yields its core at once. While it waits long it lets MPI make progress, and after `limit`
seconds it says who has not come.
"""

import fcntl
import os
import time

from mpi4py import MPI

LINE = 128  # bytes: processors fetch cache lines in pairs
LOOKS = 2000  # at a flag before a rank yields its core, where there are enough cores: some 100 us


def marks_of(signature: int) -> tuple[int, int]:
    """What a rank shows of a signature, of 62 bits at most: with a bit that changes from use to use of a word."""
    return signature << 1, signature << 1 | 1


UNSIGNED = marks_of(0)


class Flags:
    """What each rank shows the others, on a cache line of its own.

    Words of a line: 0 and 1 belong to the meetings, by turns: a rank that arrives writes the signature of its call, and
    beside it a bit that changes from use to use. One store says both, and a word is not written again before all have
    read it: that takes a meeting more. 2, 3, 4, 6 and 7 are what the ranks like to tell each other with `tell`, 8 to 11
    what window.py does; on the first rank's line 5 is the next number to `claim`.

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
    turn : int
        Descriptor of a file that the rank whose turn it is to claim has locked: -1 until window.py opens it.

    Raises
    ------
    TimeoutError
        In whatever waits: others did not come within `limit`; the message names them.
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
        self.turn = -1

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
        """Free the window, and close the file (collective)."""
        self.window.Unlock_all()
        self.mine, self.first, self.others = None, None, []
        self.window.Free()
        os.close(self.turn)
