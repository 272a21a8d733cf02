"""Messages between workers and servers: a head of eight numbers, then bytes; and waits that end.

All messages of a pair travel with one tag, so they arrive in the order in which they were sent: what a worker pushes
is applied before what it then reads. A server looks for messages from one worker after another, and begins behind the
one that it served last: who sends much gets no more turns than others.

Messages of a rank to itself are calls.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from mpi4py import MPI

from collectives.failures.awake import Awake

HEAD = 8  # numbers of float64
HEAD_BYTES = 8 * HEAD
TO_SERVER, TO_WORKER = 11, 12  # tags
PUSH, READ, FAIL, DONE = range(4)  # what a worker's message is; then clock, version and rate of a push
FAILED = getattr(MPI, "ERR_PROC_FAILED", MPI.ERR_UNKNOWN)  # of MPI libraries with fault tolerance (ULFM)
SPINS, NAP = 50, 1e-4  # looks before a rank that waits gives its core away, and the seconds of each nap then


class Outgoing:
    """Messages to one rank, one at a time: the next one waits until the last has left.

    Parameters
    ----------
    communicator : collectives.Communicator
    peer, tag : int
    room : int
        Bytes of the longest, without its head.
    """

    def __init__(self, communicator, peer: int, tag: int, room: int):
        self.communicator, self.peer, self.tag = communicator, peer, tag
        self.buffer, self.request = np.zeros(HEAD_BYTES + room, np.uint8), None
        self.head = self.buffer[:HEAD_BYTES].view(np.float64)

    def move(self) -> bool:
        """Whether the last message has left; the MPI library moves it meanwhile."""
        if self.request and self.request.Test():
            self.request = None
        return self.request is None

    def send(self, head: Sequence[float], body: np.ndarray | None = None) -> None:
        """Copy a message and let it go; the last one must have left."""
        self.head[: len(head)] = head
        end = HEAD_BYTES
        if body is not None:
            end += body.nbytes
            if end > len(self.buffer):  # a method whose messages vary in length
                self._grow(end)
            self.buffer[HEAD_BYTES:end] = body.view(np.uint8)
        self.request = self.communicator.Isend(self.buffer[:end], self.peer, self.tag)

    def _grow(self, size: int) -> None:
        head = self.head.copy()
        self.buffer = np.zeros(size, np.uint8)
        self.head = self.buffer[:HEAD_BYTES].view(np.float64)
        self.head[:] = head


class Incoming:
    """A reply that is expected from one rank.

    Parameters are those of `Outgoing`; all replies are as long.
    """

    def __init__(self, communicator, peer: int, tag: int, room: int):
        self.communicator, self.peer, self.tag = communicator, peer, tag
        self.buffer, self.request, self.expected = np.zeros(HEAD_BYTES + room, np.uint8), None, False
        self.head, self.body = self.buffer[:HEAD_BYTES].view(np.float64), self.buffer[HEAD_BYTES:]

    def expect(self) -> None:
        """A reply will come; from this rank itself `put` brings it."""
        self.expected = True
        if self.peer != self.communicator.rank:
            self.request = self.communicator.Irecv(self.buffer, self.peer, self.tag)

    def put(self, head: Sequence[float], body: np.ndarray) -> None:
        """This rank's reply to itself."""
        self.head[: len(head)] = head
        self.body[:] = body.view(np.uint8)
        self.expected = False

    def move(self) -> bool:
        """Whether nothing is expected that has not come; the MPI library moves it meanwhile."""
        if self.request and self.request.Test():
            self.request, self.expected = None, False
        return not self.expected


class Arrivals:
    """What workers send to this server, from one after another in a circle.

    Attributes
    ----------
    dead : list of int
        Workers that MPI has found to be dead, since it was looked at last; nothing is awaited from them any more.
    """

    def __init__(self, communicator, workers: Sequence[int]):
        self.communicator, self.workers, self.next = communicator, [w for w in workers if w != communicator.rank], 0
        self.status, self.buffer = MPI.Status(), np.zeros(HEAD_BYTES, np.uint8)
        self.dead: list[int] = []

    def take(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(worker, head, body) of at most one message of each worker that has come; views, valid until the next."""
        for worker in circle(self.workers, self.next):
            if self._has_sent(worker):
                size = self.status.Get_count(MPI.BYTE)
                if size > len(self.buffer):
                    self.buffer = np.zeros(size, np.uint8)
                self.communicator.Recv(self.buffer[:size], worker, TO_SERVER)
                self.next = (self.workers.index(worker) + 1) % len(self.workers)
                yield worker, self.buffer[:HEAD_BYTES].view(np.float64), self.buffer[HEAD_BYTES:size]

    def _has_sent(self, worker: int) -> bool:
        try:
            return self.communicator.Iprobe(worker, TO_SERVER, self.status)
        except MPI.Exception as error:  # told by an MPI library that outlives its ranks; what had come was taken before
            if FAILED == MPI.ERR_UNKNOWN or error.Get_error_class() != FAILED:
                raise
            self.workers.remove(worker)
            self.dead.append(worker)
            self.next = 0
            return False


def circle(items: Sequence, start: int) -> list:
    """All items, from one on."""
    return [*items[start:], *items[:start]]


SERVERS: weakref.WeakSet = weakref.WeakSet()  # of all trainers on this rank: each has others that wait for it


def serve_others() -> bool:
    """Let the servers of this rank do what there is to do; says whether there was anything."""
    return any([server.move() for server in tuple(SERVERS) if server.serving and not server.busy])


def wait(done: Callable[[], bool], move: Callable[[], bool], limit: float, why: Callable[[], str]) -> None:
    """Return when something is done.

    Parameters
    ----------
    done, move : callables
        `move` does what there is to do meanwhile, and says whether there was anything.
    limit : float
        Seconds without anything to do after which there is an error.
    why : callable
        Says who waits for whom.

    Meanwhile the servers of other trainers on this rank go on, too: a rank that waits here for one that waits for them
    would wait for ever.

    Raises
    ------
    TimeoutError
    """
    clock = Awake()
    quiet, since = 0, clock.now()
    while not done():
        if move() or serve_others():
            quiet, since = 0, clock.now()
            continue
        quiet += 1
        if quiet < SPINS:
            os.sched_yield()
            continue
        time.sleep(NAP)
        if clock.now() - since > limit:
            raise TimeoutError(f"{why()}: nothing has come for {limit:g} s")
