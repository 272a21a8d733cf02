"""Ports of ranks (inside a node) and of nodes (between them): one message after the other, first come, first served.

A message of n bytes holds the sender's port for g + n G of LogGP, and the receiver's for as long, a latency L later.
Where messages share channels instead, flows.py says when they are there.
"""

from collectives.pricing.networks import MessageCost
from collectives.steps import Send


class Message:
    """One message on its way.

    Attributes
    ----------
    sender, dest : int
        Ranks, among those that are simulated.
    source : int
        The sender as `dest` names it. It differs from `sender` where one block of ranks stands for all of them: what
        a rank sends to another block, its own block gets from the rank as far away on the other side.
    between : bool
        Whether it crosses from one node to another.
    send : Send
    cost : MessageCost
    nbytes : int
    ready : float
        When the sender's processor has done its part.
    sent_in : int
        Round of the sender.
    start : float
        When it gets the sender's port.
    arrived : float
        When the receiver's processor may turn to it.
    head_start : float
        Seconds for which it has been on its way when it is handed to the flows: it waited for its receive, and counts
        from when the request for that was made.
    """

    __slots__ = (
        "arrived",
        "between",
        "cost",
        "dest",
        "head_start",
        "nbytes",
        "ready",
        "send",
        "sender",
        "sent_in",
        "source",
        "start",
    )  # fmt: skip

    def __init__(
        self,
        sender: int,
        source: int,
        dest: int,
        between: bool,
        send: Send | None,
        cost: MessageCost,
        nbytes: int,
        ready: float = 0.0,
        sent_in: int = 0,
    ):
        self.sender, self.source, self.dest, self.between = sender, source, dest, between
        self.send, self.cost, self.nbytes, self.ready, self.sent_in = send, cost, nbytes, ready, sent_in
        self.start = self.arrived = self.head_start = 0.0


class Ports:
    """The ports of one level, each with an outgoing and an incoming direction.

    Parameters
    ----------
    number : int
        How many ports there are.
    """

    def __init__(self, number: int):
        self.out_free, self.in_free = [0.0] * number, [0.0] * number

    def send(self, message: Message, port: int, earliest: float) -> tuple[float, float]:
        """Return when the port has sent the message, and when its first byte reaches the receiver's port."""
        cost, free = message.cost, self.out_free[port]
        message.start = start = free if free > earliest else earliest
        self.out_free[port] = end = start + cost.held
        return end, start + cost.latency

    def receive(self, message: Message, port: int) -> float:
        """Return when the message is in the receiver's hands."""
        cost, free = message.cost, self.in_free[port]
        first_byte = message.start + cost.latency
        self.in_free[port] = end = (free if free > first_byte else first_byte) + cost.held
        return end + cost.delivery


class MeasuredPorts(Ports):
    """Ports of ranks in a node whose link was measured: one that sends and receives at once is slower."""

    def __init__(self, number: int):
        super().__init__(number)
        self.last_peer = [-1] * number  # to which the port sent last

    def send(self, message: Message, port: int, earliest: float) -> tuple[float, float]:
        self.last_peer[port] = message.send.peer
        return super().send(message, port, earliest)

    def receive(self, message: Message, port: int) -> float:
        """As `Ports.receive`; slower for the time for which the port was sending meanwhile."""
        end = super().receive(message, port)
        sending = self.out_free[port] - message.start
        if sending <= 0:
            return end
        cost = message.cost
        slower = cost.exchange if self.last_peer[port] == message.source else cost.crossing
        delay = slower * min(cost.held, sending)
        self.in_free[port] += delay
        return end + delay
