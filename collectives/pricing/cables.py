"""Cables that messages share: what leaves or enters a node at once gets the same part of its port, as TCP deals it.

The closed forms send one message after the other through a port (networks.py). Streams do not wait for each other: of
two that leave at once, each takes twice as long. What all of them take together is the same; who waits for one of them
waits longer, such as the stages of a pipeline, which send to both sides.

A message that is alone holds its ports for some seconds. Else it gets 1 / max(streams that leave there, streams that
enter here) of each second, and takes longer by so much as the receiving node has sent meanwhile
(`MessageCost.crossing`). Between the same two ranks messages go one after the other.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from collectives.pricing.networks import MessageCost
from collectives.steps import Send


class Parcel(NamedTuple):
    """A message that has left its sender; what the walk needs once it is there."""

    sender: int
    source: int  # as `dest` names it: the sender, or who does the same one node further
    dest: int
    cost: MessageCost
    step: Send
    sent_in: int
    ready: float
    asked: float  # seconds since its receive was asked for, in which it was on its way already


class Stream:
    """The messages of one rank to another: the first of them is on the cable."""

    __slots__ = ("booked", "end", "into", "left", "out", "parcels", "rate", "since", "started")

    def __init__(self, out: int, into: int):
        self.out, self.into, self.parcels = out, into, deque()
        self.started = self.left = self.since = self.end = self.booked = 0.0
        self.rate = 1.0


class Cables:
    """One in each direction of every node.

    Parameters
    ----------
    nodes : int
    credit : float
        Seconds of sending that a rested port has saved up (`Link.credit`).
    book : callable (seconds, Stream) -> None
        Asks for `look(stream, seconds)` at that time.
    """

    def __init__(self, nodes: int, credit: float, book):
        self.credit, self.book = credit, book
        self.leaving: list[list[Stream]] = [[] for _ in range(nodes)]
        self.entering: list[list[Stream]] = [[] for _ in range(nodes)]
        self.debts = [0.0] * nodes, [0.0] * nodes  # out, into: rested at
        self.silent = [(0.0, -1)] * nodes  # since when nothing leaves, and where the last message went
        self.streams: dict[tuple[int, int], Stream] = {}

    def send(self, parcel: Parcel, out: int, into: int, now: float) -> None:
        """From node `out` to node `into`, behind what is on its way between the same ranks."""
        key = parcel.source, parcel.dest
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = Stream(out, into)
        stream.parcels.append(parcel)
        if len(stream.parcels) == 1:
            self.leaving[out].append(stream)
            self.entering[into].append(stream)
            self._begin(stream, now)
            self._share(out, into, now)

    def look(self, stream: Stream, now: float) -> tuple[Parcel, float, float] | None:
        """The message of a stream that is over, when it began, and how much later it is there; None: not yet over."""
        if stream.booked != now:
            return None
        if stream.end > now:
            stream.booked = stream.end
            self.book(stream.end, stream)
            return None
        stream.booked = float("inf")
        later = self._crossing(stream, now)
        done, started = stream.parcels.popleft(), stream.started
        if stream.parcels:
            self._begin(stream, now)
        else:
            self.leaving[stream.out].remove(stream)
            self.entering[stream.into].remove(stream)
            self.silent[stream.out] = now, stream.into
        self._share(stream.out, stream.into, now)
        return done, started, later

    def _begin(self, stream: Stream, now: float) -> None:
        parcel = stream.parcels[0]
        cost, work = parcel.cost, parcel.cost.held
        if self.credit:
            for debts, port in zip(self.debts, (stream.out, stream.into), strict=True):
                saved = max(0.0, self.credit - max(0.0, debts[port] - now))
                work = max(work, cost.gap - saved)
                debts[port] = max(debts[port], now) + cost.gap
        stream.started = stream.since = now
        stream.left, stream.booked = max(0.0, work - parcel.asked), float("inf")

    def _crossing(self, stream: Stream, now: float) -> float:
        """How much longer its message takes for what the receiving node has sent meanwhile."""
        cost, answers = stream.parcels[0].cost, self.leaving[stream.into]
        until, last = self.silent[stream.into]
        back = all(other.into == stream.out for other in answers) if answers else last == stream.out
        together = (now if answers else until) - stream.started
        return (cost.exchange if back else cost.crossing) * max(0.0, min(cost.held, together))

    def _share(self, out: int, into: int, now: float) -> None:
        """Streams that leave `out` or enter `into` have another part from now on."""
        for stream in self.leaving[out] + [other for other in self.entering[into] if other.out != out]:
            stream.left -= (now - stream.since) * stream.rate
            sharing = max(len(self.leaving[stream.out]), len(self.entering[stream.into]))
            stream.since, stream.rate = now, 1 / sharing
            stream.end = now + max(0.0, stream.left) / stream.rate
            if stream.end < stream.booked:
                stream.booked = stream.end
                self.book(stream.end, stream)
