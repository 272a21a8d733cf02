"""Mailbox: messages between actors (servers and workers; a coordinator, shards, replicas), which may share a rank.

A message is a kind, a few numbers and an array. Actors are named by their roles; the rank on which a message's receiver
lives calls that actor's `handle` with it.
Messages of one sender to one receiver arrive in the order in which they were sent; messages of two senders in any. A
rank receives from one rank after another in a circle, so a rank that sends much does not delay the others.

At most one message from one rank to another is in flight: the next `send` waits until it has left. A rank that waits
receives, so two ranks that send to each other do not block; it runs no handler inside a handler.

`LocalMailbox` delivers between actors of one process, in any order that is possible: so all of them can be tried.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from collectives.failures.awake import Awake
from collectives.failures.unfinished import keep_alive

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT = 300.0  # seconds that a rank waits for a message by default
POLLS_BEFORE_SLEEP, POLL_INTERVAL = 50, 1e-4  # seconds; a waiting rank sleeps between polls after this number of them
NUMBERS = 6  # at most in a header
HEAD = 4 + NUMBERS  # float64 before the array: kind, two roles, length of the header, the header
HEAD_BYTES = 8 * HEAD

Role = tuple[str, int]  # such as ("server", 2)


class Message(NamedTuple):
    """One message.

    Attributes
    ----------
    kind : str
    sender, receiver : Role
    header : tuple of float
        At most 6.
    array : flat array or None
        Of any dtype; from another rank its bytes arrive, empty for None: the receiver knows the dtype.
    """

    kind: str
    sender: Role
    receiver: Role
    header: tuple[float, ...] = ()
    array: np.ndarray | None = None

    def copy(self) -> Message:
        """Return the message with an array of its own."""
        return self if self.array is None else self._replace(array=self.array.copy())


class Actor:
    """Handles the messages of one role, and sends messages under its name.

    Parameters
    ----------
    mailbox : Mailbox or LocalMailbox
    role : Role
    """

    def __init__(self, mailbox, role: Role):
        self.mailbox, self.role = mailbox, role
        mailbox.handlers[role] = self.handle

    def handle(self, message: Message) -> None:
        """Do what a message asks for."""
        raise TypeError(f"{type(self).__name__} handles no messages")

    def send(self, receiver: Role, kind: str, header: tuple[float, ...] = (), array: np.ndarray | None = None) -> None:
        """Send a message."""
        self.mailbox.send(Message(kind, self.role, receiver, header, array))


class LocalMailbox:
    """Delivers messages between actors of one process.

    Parameters
    ----------
    rng : np.random.Generator or None
        Chooses among the messages that may come next; None: in the order of sending.

    Attributes
    ----------
    handlers : dict of Role -> callable (Message)
    buffers : dict
        Empty: copies are in `sent` only until they are delivered.
    """

    def __init__(self, rng: np.random.Generator | None = None):
        self.rng, self.handlers, self.buffers = rng, {}, {}
        self.sent: dict[tuple[Role, Role], deque[Message]] = {}  # by sender and receiver

    def send(self, message: Message) -> None:
        """Send a copy of a message."""
        self.sent.setdefault((message.sender, message.receiver), deque()).append(message.copy())

    def receive(self) -> Message:
        """Return the next message; there must be one."""
        if not self.sent:
            raise RuntimeError("every role waits, and no message is in flight")
        pairs = list(self.sent)
        pair = pairs[self.rng.integers(len(pairs)) if self.rng else 0]
        message = self.sent[pair].popleft()
        if not self.sent[pair]:
            del self.sent[pair]  # so that another pair's message comes next
        return message

    def wait(self, done: Callable[[], bool], reason: Callable[[], str] | None = None) -> None:
        """Deliver messages until `done`."""
        while not done():
            message = self.receive()
            self.handlers[message.receiver](message)

    def close(self) -> None:
        """Do nothing: nothing has to be freed."""


MAILBOXES: weakref.WeakSet[Mailbox] = weakref.WeakSet()  # of all trainers on this rank, until they are closed


class Mailbox:
    """Delivers messages between actors on the ranks of a communicator.

    Parameters
    ----------
    communicator : collectives.Communicator
        Messages travel on a duplicate of it (collective).
    rank_of : dict of Role -> int
    kinds : tuple of str
        All kinds of messages.
    peers : iterable of int, or None
        The ranks with which this one has messages; None: all that have a role.
    limit : float
        Seconds without a message after which a wait raises.
    mortal : str
        Roles of this name may die, if the MPI library outlives its ranks: the roles here get a message "death".

    Attributes
    ----------
    handlers : dict of Role -> callable (Message)
        Of the roles on this rank.
    handling : bool
        Whether a handler of this mailbox runs. Until it ends, `wait` and `poll` only receive; else they call handlers.
    serving : bool
        Whether waits for another mailbox of this rank call handlers as well, unless `handling`; else they only receive.
    buffers : dict of int -> array of bytes
        The last message to each rank.
    """

    def __init__(
        self,
        communicator,
        rank_of: Mapping[Role, int],
        kinds: tuple[str, ...],
        peers: Iterable[int] | None = None,
        limit: float = LIMIT,
        mortal: str = "",
    ):
        from mpi4py import MPI

        self.communicator, self.status = communicator.Dup(), MPI.Status()
        self.rank_of, self.kinds, self.limit, self.mortal = rank_of, kinds, limit, mortal
        self.roles = list(rank_of)
        self.number_of = {role: number for number, role in enumerate(self.roles)}
        everyone = rank_of.values() if peers is None else peers
        self.peers = deque(sorted(set(everyone) - {self.communicator.rank}))  # the rank that was looked at last is last
        self.handlers: dict[Role, Callable[[Message], None]] = {}
        self.arrived: deque[Message] = deque()
        self.buffers: dict[int, np.ndarray] = {}
        self.sending: dict[int, MPI.Request] = {}
        self.receiving: dict[int, tuple[MPI.Request, np.ndarray]] = {}
        self.failure = MPI.Exception, getattr(MPI, "ERR_PROC_FAILED", None)  # of MPI libraries with fault tolerance
        self.serving = self.handling = False
        weakref.finalize(self, keep_unfinished, self.sending, self.receiving)  # where nobody closes it
        MAILBOXES.add(self)

    def send(self, message: Message) -> None:
        """Send a copy of a message, once the last one to that rank has left.

        Raises
        ------
        TimeoutError
            That rank does not receive.
        """
        peer, array = self.rank_of[message.receiver], message.array
        if peer == self.communicator.rank:
            self.arrived.append(message.copy())
            return
        if peer in self.sending:
            self.wait(lambda: peer not in self.sending, lambda: f"{self._name()}: rank {peer} receives no message")
        size = HEAD_BYTES + (0 if array is None else array.nbytes)
        if peer not in self.buffers or len(self.buffers[peer]) < size:
            self.buffers[peer] = np.zeros(size, np.uint8)
        buffer = self.buffers[peer][:size]
        names = self.kinds.index(message.kind), self.number_of[message.sender], self.number_of[message.receiver]
        head = *names, len(message.header), *message.header
        buffer[: 8 * len(head)].view(np.float64)[:] = head
        if array is not None:
            buffer[HEAD_BYTES:] = array.view(np.uint8)
        self.sending[peer] = self.communicator.Isend(buffer, peer)

    def wait(self, done: Callable[[], bool], reason: Callable[[], str] | None = None) -> None:
        """Receive messages and handle one after another until `done`; those behind it stay for later.

        Servers of other trainers on this rank are served meanwhile: this rank may wait for a rank that waits for them.

        Parameters
        ----------
        done : callable
        reason : callable or None
            Returns what this rank waits for.

        Raises
        ------
        TimeoutError
            Nothing came for `limit` seconds.
        """
        clock = Awake()
        quiet, since = 0, clock.now()
        while not done():
            if self._handle_next() or poll_other_mailboxes(self):
                quiet, since = 0, clock.now()
                continue
            quiet += 1
            if quiet < POLLS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            time.sleep(POLL_INTERVAL)
            if clock.now() - since > self.limit:
                reason = reason or (lambda: f"{self._name()} waits for a message from any rank")
                keep_unfinished(self.sending, self.receiving)
                raise TimeoutError(f"{reason()}: nothing has come for {self.limit:g} s")

    def poll(self) -> bool:
        """Handle what has come, about one message of each rank; return whether anything came."""
        return any([self._handle_next() for _ in range(len(self.peers) + 1)])

    def _handle_next(self) -> bool:
        """Handle the next message, or, inside a handler, only receive it; return whether there is one."""
        if self.handling:
            return self._receive()
        if not self.arrived and not self._receive():
            return False
        message, self.handling = self.arrived.popleft(), True
        try:
            self.handlers[message.receiver](message)
        finally:
            self.handling = False
        return True

    def _receive(self) -> bool:
        """Advance what is in flight, until a message has arrived; return whether one has."""
        for _ in range(len(self.peers)):
            self.peers.rotate(-1)
            if self._progress(self.peers[-1]):
                return True
        return False

    def _progress(self, peer: int) -> bool:
        """Advance what is in flight to and from one rank; return whether a message of it has arrived."""
        error_type, died = self.failure
        try:
            if peer in self.sending and self.sending[peer].Test():
                del self.sending[peer]
            if peer not in self.receiving and (message := self.communicator.Improbe(peer, status=self.status)):
                buffer = np.empty(self.status.Get_count(), np.uint8)
                self.receiving[peer] = message.Irecv(buffer), buffer
            if peer not in self.receiving or not self.receiving[peer][0].Test():
                return False
        except error_type as error:
            roles = [role for role in self.roles if self.rank_of[role] == peer]
            if error.Get_error_class() != died or any(name != self.mortal for name, _ in roles):
                raise
            self.peers.remove(peer)
            self.sending.pop(peer, None)
            self.receiving.pop(peer, None)
            self.arrived += [Message("death", role, here) for role in roles for here in self.handlers]
            return True
        self.arrived.append(self._decode(self.receiving.pop(peer)[1]))
        return True

    def _decode(self, buffer: np.ndarray) -> Message:
        kind, sender, receiver, numbers, *header = buffer[:HEAD_BYTES].view(np.float64).tolist()
        roles = self.roles[int(sender)], self.roles[int(receiver)]
        return Message(self.kinds[int(kind)], *roles, tuple(header[: int(numbers)]), buffer[HEAD_BYTES:])

    def _name(self) -> str:
        roles = ", ".join(f"{name} {number}" for name, number in self.handlers)
        return f"rank {self.communicator.rank} ({roles})"

    def flush(self) -> None:
        """Return when all messages of this rank have left."""
        self.wait(lambda: not self.sending, lambda: f"{self._name()}: rank {min(self.sending)} receives no message")

    def close(self) -> None:
        """Let the last messages leave, and free the communicator (collective)."""
        self.flush()
        self.serving = False
        MAILBOXES.discard(self)
        self.communicator.Free()


def keep_unfinished(
    sending: Mapping[int, MPI.Request], receiving: Mapping[int, tuple[MPI.Request, np.ndarray]]
) -> None:
    """Keep the memory of messages to and from each rank that are still in flight."""
    if sending or receiving:
        keep_alive([*sending.values(), *(request for request, _ in receiving.values())])


def poll_other_mailboxes(waiting: Mailbox) -> bool:
    """Receive for the other mailboxes of this rank, and handle messages where they serve; return whether any came.

    Those that do not serve, or are inside a handler, receive as well: another rank may wait until its message has left.
    One that fails is left alone from then on; its own trainer meets the error at its next wait.
    """
    came = False
    for each in [each for each in MAILBOXES if each is not waiting]:
        try:
            came |= each.poll() if each.serving else each._receive()
        except each.failure[0]:  # a rank of an earlier trainer has died, say: who waits here need not know
            MAILBOXES.discard(each)
    return came
