"""What an algorithm waits for: the chain of rounds and messages that ends last, read backwards off a trace.

>>> priced = price(ALGORITHMS["allreduce"]["ring"], 4, 25_000, network=measured, trace=True)
>>> print(waits(priced))
498 us messages (6 of 25,000 bytes), 37.4 us work of ranks (10.2 us sums)
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from collectives.pricing.price import Price
from collectives.pricing.trace import Flight
from collectives.steps import Barrier, Copy, Reduce


@dataclass(frozen=True)
class Waits:
    """Seconds of the chain, and what it is made of.

    Attributes
    ----------
    messages : float
        On their way, ports held included.
    ports : float
        Ready to leave, but the port was busy or the receive was not there yet.
    ranks : float
        Within ranks: computation, reductions, copies, the calls to send and to receive; and a round that waits for its
        own sends.
    barriers : float
        In node memory, from when the last rank had come until all went on.
    sums, copies : float
        Of `ranks`, in reductions and in copies.
    lengths : tuple of int
        Bytes of each message.
    barrier_count : int
    """

    messages: float
    ports: float
    ranks: float
    barriers: float
    sums: float
    copies: float
    lengths: tuple[int, ...]
    barrier_count: int

    def __str__(self):
        total = self.messages + self.ports + self.ranks + self.barriers

        def phrases(*parts):
            return [f"{1e6 * seconds:.3g} us {name}" for seconds, name in parts if seconds > 0.005 * total]

        least, most = min(self.lengths, default=0), max(self.lengths, default=0)
        length = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        within = ", ".join(phrases((self.sums, "sums"), (self.copies, "copies")))
        parts = phrases(
            (self.messages, f"messages ({len(self.lengths)} of {length} bytes)"),
            (self.ports, "busy ports or late receives"),
            (self.ranks, "work of ranks" + f" ({within})" * bool(within)),
            (self.barriers, f"barriers in memory ({self.barrier_count})"),
        )
        return ", ".join(parts)


class Stretch(NamedTuple):
    """A stretch of the critical path: `kind` is "message", "port" (busy, or a late receive), "work" or "barrier".

    `flight` is the message, None of the others; `sums` and `copies` are seconds of work that are one or the other.
    """

    kind: str
    rank: int
    start: float
    end: float
    flight: Flight | None = None
    sums: float = 0.0
    copies: float = 0.0


def waits(priced: Price) -> Waits:
    """What the last rank to finish waited for, and what those it waited for did.

    Raises
    ------
    ValueError
        The price has no trace.
    """
    path = critical_path(priced)
    total = dict.fromkeys(("message", "port", "work", "barrier"), 0.0)
    for stretch in reversed(path):
        total[stretch.kind] += stretch.end - stretch.start
    flights = [stretch.flight for stretch in path if stretch.kind == "message"]
    return Waits(
        messages=total["message"],
        ports=total["port"],
        ranks=total["work"],
        barriers=total["barrier"],
        sums=sum(stretch.sums for stretch in reversed(path)),
        copies=sum(stretch.copies for stretch in reversed(path)),
        lengths=tuple((flight.send.hi - flight.send.lo) * priced.trace.itemsize for flight in flights),
        barrier_count=sum(stretch.kind == "barrier" for stretch in path),
    )


def critical_path(priced: Price) -> list[Stretch]:
    """The chain of messages and work that ends last, in order of time.

    Raises
    ------
    ValueError
        The price has no trace.
    """
    if priced.trace is None:
        raise ValueError("a price without a trace: ask for price(..., trace=True)")
    spans = {(span.rank, span.index): span for span in priced.trace.rounds}
    came, worked = defaultdict(list), defaultdict(list)
    for flight in priced.trace.flights:
        came[flight.dest, flight.received_in].append(flight)
    for work in priced.trace.works:
        worked[work.rank, work.index].append(work)
    ranks_of = lambda barrier: None if barrier.ranks is None else tuple(sorted(barrier.ranks))
    barriers = {(work.rank, work.index): work for work in priced.trace.works if isinstance(work.step, Barrier)}
    together = defaultdict(list)
    for work in barriers.values():
        together[work.end, ranks_of(work.step)].append(work)
    path: list[Stretch] = []
    now = priced.seconds
    last_round = {rank: index for rank, index in spans if (rank, index + 1) not in spans}
    # Of those that finish last one that received something: the others waited for their port only.
    rank = max(last_round, key=lambda rank: (priced.finish[rank], bool(came[rank, last_round[rank]])), default=0)
    index = last_round.get(rank, -1)
    while index >= 0:
        if (rank, index) in barriers:
            work = barriers[rank, index]
            last = max(together[work.end, ranks_of(work.step)], key=lambda work: work.start)
            path += [Stretch("work", rank, work.end, now), Stretch("barrier", rank, last.start, work.end)]
            now, rank, index = last.start, last.rank, last.index - 1
            continue
        # A message that the rank was waiting for, not one that had come while it was busy.
        late = [flight for flight in came[rank, index] if flight.arrived == flight.end <= now]
        since = max((flight.end for flight in late), default=spans[rank, index].start)
        sums = sum(flight.adding for flight in came[rank, index] if since <= flight.end <= now)
        copies = 0.0
        for work in worked[rank, index]:
            if since <= work.start and work.end <= now:
                sums += (work.end - work.start) * isinstance(work.step, Reduce)
                copies += (work.end - work.start) * isinstance(work.step, Copy)
        path.append(Stretch("work", rank, since, now, None, sums, copies))
        if late:
            last = max(late, key=lambda flight: flight.end)
            path.append(Stretch("message", last.source, last.start, last.end, last))
            rank, index = last.source, last.sent_in
            path.append(Stretch("port", rank, last.ready, last.start))
            # Of its round only what came before the send: copies, earlier sends.
            path.append(Stretch("work", rank, spans[rank, index].start, last.ready))
        now, index = spans[rank, index].start, index - 1
    return path[::-1]
