"""What an algorithm waits for: the chain of rounds and messages that ends last, read off the clock's trace backwards.

>>> priced = price(ALGORITHMS["allreduce"]["ring"], 4, 25_000, network=measured, trace=True)
>>> print(waits(priced))
498 us messages (6 of 25,000 bytes), 37.4 us work of ranks (10.2 us sums)
"""

from collections import defaultdict
from dataclasses import dataclass

from collectives.pricing.price import Price
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

        def told(*parts):
            return [f"{1e6 * seconds:.3g} us {name}" for seconds, name in parts if seconds > 0.005 * total]

        least, most = min(self.lengths, default=0), max(self.lengths, default=0)
        length = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        within = ", ".join(told((self.sums, "sums"), (self.copies, "copies")))
        parts = told(
            (self.messages, f"messages ({len(self.lengths)} of {length} bytes)"),
            (self.ports, "busy ports or late receives"),
            (self.ranks, "work of ranks" + f" ({within})" * bool(within)),
            (self.barriers, f"barriers in memory ({self.barrier_count})"),
        )
        return ", ".join(parts)


def waits(priced: Price) -> Waits:
    """What the last rank to finish waited for, and what those it waited for did.

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
    ranks_of = lambda step: None if step.ranks is None else tuple(sorted(step.ranks))
    barrier_works = {(work.rank, work.index): work for work in priced.trace.works if isinstance(work.step, Barrier)}
    together = defaultdict(list)
    for work in barrier_works.values():
        together[work.end, ranks_of(work.step)].append(work)
    messages = ports = ranks = barriers = sums = copies = 0.0
    lengths, number = [], 0
    now = priced.seconds
    last_round = {rank: index for rank, index in spans if (rank, index + 1) not in spans}
    # Of those that finish last one that received something: the others waited for their port only.
    rank = max(last_round, key=lambda rank: (priced.finish[rank], bool(came[rank, last_round[rank]])), default=0)
    index = last_round.get(rank, -1)
    while index >= 0:
        if (rank, index) in barrier_works:
            work = barrier_works[rank, index]
            last = max(together[work.end, ranks_of(work.step)], key=lambda work: work.start)
            ranks += now - work.end
            barriers += work.end - last.start
            number += 1
            now, rank, index = last.start, last.rank, last.index - 1
            continue
        # A message that the rank was waiting for, not one that had come while it was busy.
        late = [flight for flight in came[rank, index] if flight.arrived == flight.end <= now]
        since = max((flight.end for flight in late), default=spans[rank, index].start)
        ranks += now - since
        sums += sum(flight.adding for flight in came[rank, index] if since <= flight.end <= now)
        for work in worked[rank, index]:
            if since <= work.start and work.end <= now:
                sums += (work.end - work.start) * isinstance(work.step, Reduce)
                copies += (work.end - work.start) * isinstance(work.step, Copy)
        if late:
            last = max(late, key=lambda flight: flight.end)
            messages += last.end - last.start
            ports += last.start - last.ready
            lengths.append((last.send.hi - last.send.lo) * priced.trace.itemsize)
            rank, index = last.source, last.sent_in
            # Of its round only what came before the send: copies, earlier sends.
            ranks += last.ready - spans[rank, index].start
        now, index = spans[rank, index].start, index - 1
    return Waits(messages, ports, ranks, barriers, sums, copies, tuple(reversed(lengths)), number)
