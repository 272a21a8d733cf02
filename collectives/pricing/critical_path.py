"""What an algorithm waits for: the chain of rounds and messages that ends last, read off the clock's trace backwards.

>>> priced = price(ALGORITHMS["allreduce"]["ring"], 4, 25_000, network=measured, trace=True)
>>> print(waits(priced))
93% messages, 7% work of ranks
"""

from collections import defaultdict
from dataclasses import dataclass

from collectives.pricing.price import Price
from collectives.steps import Meet


@dataclass(frozen=True)
class Waits:
    """Seconds of the chain.

    Attributes
    ----------
    messages : float
        On their way, ports held included.
    ports : float
        Ready to leave, but the port was busy or the receive was not there yet.
    ranks : float
        Within ranks: computation, reductions, copies, the calls to send and to receive; and a round that waits for its
        own sends.
    meetings : float
        In node memory, from when the last rank had come until all went on.
    """

    messages: float
    ports: float
    ranks: float
    meetings: float

    def __str__(self):
        total = self.messages + self.ports + self.ranks + self.meetings or 1.0
        parts = ("messages", self.messages), ("busy ports or late receives", self.ports), ("work of ranks", self.ranks)
        parts += (("meetings in memory", self.meetings),)
        return ", ".join(f"{seconds / total:.0%} {name}" for name, seconds in parts if seconds > 0.005 * total)


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
    came = defaultdict(list)
    for flight in priced.trace.flights:
        came[flight.dest, flight.received_in].append(flight)
    ranks_of = lambda meet: None if meet.ranks is None else tuple(sorted(meet.ranks))
    met = {(work.rank, work.index): work for work in priced.trace.works if isinstance(work.step, Meet)}
    together = defaultdict(list)
    for work in met.values():
        together[work.end, ranks_of(work.step)].append(work)
    messages = ports = ranks = meetings = 0.0
    now = priced.seconds
    last_round = {rank: index for rank, index in spans if (rank, index + 1) not in spans}
    # Of those that finish last one that received something: the others waited for their port only.
    rank = max(last_round, key=lambda rank: (priced.finish[rank], bool(came[rank, last_round[rank]])), default=0)
    index = last_round.get(rank, -1)
    while index >= 0:
        if (rank, index) in met:
            work = met[rank, index]
            last = max(together[work.end, ranks_of(work.step)], key=lambda work: work.start)
            ranks += now - work.end
            meetings += work.end - last.start
            now, rank, index = last.start, last.rank, last.index - 1
            continue
        # A message that the rank was waiting for, not one that had come while it was busy.
        late = [flight for flight in came[rank, index] if flight.arrived == flight.end <= now]
        if late:
            last = max(late, key=lambda flight: flight.end)
            ranks += now - last.end
            messages += last.end - last.start
            ports += last.start - last.ready
            now, rank, index = last.ready, last.source, last.sent_in
            begin = spans[rank, index].start
            # Of its round only what came before the send: copies, earlier sends.
            ranks += now - begin
        else:
            begin = spans[rank, index].start
            ranks += now - begin
        now, index = begin, index - 1
    return Waits(messages, ports, ranks, meetings)
