"""Mailbox: short messages between the roles of a run, which may share a rank.

Messages of one sender to one receiver arrive in the order in which they were sent; nothing is promised of two senders.
A rank reads what has come from each rank in turn, so that no sender keeps another one waiting.

Without a communicator every role is in this process, and `LocalMailbox` delivers in any order that is possible: so all
of them can be tried.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

LIMIT = 300.0  # seconds that a role waits for a message, unless told otherwise


class Message(NamedTuple):
    """What one role tells another one.

    Attributes
    ----------
    kind : str
        One of KINDS.
    sender : role, such as ("replica", 2)
    receiver : role
    header : tuple of float
        At most 6; vectors are named by their places in a list that all roles have.
    array : flat array or None
    """

    kind: str
    sender: tuple[str, int]
    receiver: tuple[str, int]
    header: tuple[float, ...] = ()
    array: np.ndarray | None = None


class LocalMailbox:
    """Delivers messages between roles of one process.

    Parameters
    ----------
    rng : np.random.Generator or None
        Which of the messages that may come next does come; None: the one that was sent first.
    """

    def __init__(self, rng: np.random.Generator | None = None):
        self.rng = rng
        self.sent: dict[tuple, deque[Message]] = {}  # from one role to another

    def send(self, message: Message) -> None:
        """Never waits; the array may be written afterwards."""
        array = None if message.array is None else message.array.copy()
        self.sent.setdefault((message.sender, message.receiver), deque()).append(message._replace(array=array))

    def receive(self) -> Message:
        """The next message; there must be one."""
        waiting = [pair for pair, messages in self.sent.items() if messages]
        if not waiting:
            raise RuntimeError("every role waits, and there is no message on its way")
        pair = waiting[self.rng.integers(len(waiting)) if self.rng else 0]
        message = self.sent[pair].popleft()
        if not self.sent[pair]:
            del self.sent[pair]  # so that the first of the others comes next
        return message

    def close(self) -> None:
        """There is nothing to free."""


class Mailbox:
    """Delivers messages between roles on the ranks of a communicator.

    Parameters
    ----------
    communicator : MPI.Intracomm
    places : dict of role -> rank
    dtype : np.dtype
        Of the arrays in messages.
    kinds : tuple of str
        All that there are.
    limit : float
        Seconds without a message after which `receive` raises.
    """

    HEAD = 12  # numbers before the array: kind, two roles, length of the header, six numbers of it, length of the array

    def __init__(self, communicator, places: dict, dtype: np.dtype, kinds: tuple[str, ...], limit: float = LIMIT):
        from mpi4py import MPI

        self.comm = MPI.Intracomm(communicator).Dup()  # no other messages meet these
        self.status = MPI.Status()
        self.places, self.dtype, self.kinds, self.limit = places, np.dtype(dtype), kinds, limit
        self.roles = list(places)
        self.numbers = {role: i for i, role in enumerate(self.roles)}
        self.here: deque[Message] = deque()
        self.flying: deque = deque()  # (request, buffer) of messages that may still be read from
        self.turn = 0

    def send(self, message: Message) -> None:
        place = self.places[message.receiver]
        if place == self.comm.rank:
            array = None if message.array is None else message.array.copy()
            self.here.append(message._replace(array=array))
            return
        head = np.zeros(self.HEAD)
        roles = self.numbers[message.sender], self.numbers[message.receiver]
        head[:4] = self.kinds.index(message.kind), *roles, len(message.header)
        head[4 : 4 + len(message.header)] = message.header
        head[-1] = -1 if message.array is None else len(message.array)
        body = [] if message.array is None else [message.array.view(np.uint8)]
        buffer = np.concatenate([head.view(np.uint8), *body])
        self.flying.append((self.comm.Isend(buffer, place), buffer))
        while self.flying and self.flying[0][0].Test():
            self.flying.popleft()

    def receive(self) -> Message:
        """The next message, in turn of the ranks.

        Raises
        ------
        TimeoutError
            There was none within the limit.
        """
        from parallel.sync.asynchronous.wire import wait

        wait(lambda: self.here, self._look, self.limit, self._who)
        return self.here.popleft()

    def _who(self) -> str:
        mine = ", ".join(f"{kind} {i}" for (kind, i), rank in self.places.items() if rank == self.comm.rank)
        return f"rank {self.comm.rank} ({mine}) waits for a message from any rank"

    def _look(self) -> bool:
        """Take what one of the ranks has sent; whether one has."""
        size = self.comm.size
        for i in range(size):
            source = (self.turn + i) % size
            if source != self.comm.rank and (message := self.comm.Improbe(source, status=self.status)):
                self.turn = source + 1
                buffer = np.empty(self.status.Get_count(), np.uint8)
                message.Recv(buffer)
                self.here.append(self._read(buffer))
                return True
        return False

    def _read(self, buffer: np.ndarray) -> Message:
        head = buffer[: 8 * self.HEAD].view(np.float64)
        kind, sender, receiver, header = (int(value) for value in head[:4])
        array = None if head[-1] < 0 else buffer[8 * self.HEAD :].view(self.dtype)
        header = tuple(head[4 : 4 + header].tolist())
        return Message(self.kinds[kind], self.roles[sender], self.roles[receiver], header, array)

    def close(self) -> None:
        """Let the last messages go out, and free the communicator (collective)."""
        for request, _ in self.flying:
            request.Wait()
        self.flying.clear()
        self.comm.Free()
