"""Replay: what every buffer held after every round, element by element, from the clock's trace of an algorithm.

For each element: which ranks contributed to it, and where in the vector it stood when the algorithm began. The drawings
show both. (Whether an algorithm is right is the simulator's question: it also knows order and multiplicity.)
"""

import numpy as np

from collectives.clock import Trace
from collectives.steps import Blocks, Copy, RecvReduce, Reduce, Send, blocks

NOWHERE = -1  # where an element of scratch stood that nothing was written to


class Contents:
    """One buffer.

    Attributes
    ----------
    who : object array (elements,)
        The ranks that contributed: bit r for rank r.
    where : int array (elements,)
        The place in the vector where the element stood at first.
    given : bool array (elements,)
        Whether the element is still what it was before the first round.
    needed : bool array (elements,)
        Whether that was ever read.
    """

    def __init__(self, who=(), where=()):
        self.who = np.array(who, dtype=object)  # Python integers have a bit for any number of ranks
        self.where = np.array(where, dtype=int)
        self.given = np.ones(len(self.who), dtype=bool)
        self.needed = np.zeros(len(self.who), dtype=bool)

    def read(self, lo, hi):
        self.reach(hi)
        self.needed[lo:hi] |= self.given[lo:hi]
        return self.who[lo:hi].copy(), self.where[lo:hi].copy()

    def write(self, lo, hi, who, where, reduces):
        if reduces:
            who = who | self.read(lo, hi)[0]
        self.reach(hi)
        self.who[lo:hi], self.where[lo:hi], self.given[lo:hi] = who, where, False

    def reach(self, hi):
        """Grow to at least `hi` elements: scratch is as long as the steps reach."""
        if (more := hi - len(self.who)) > 0:
            self.who = np.concatenate([self.who, np.full(more, 0, dtype=object)])
            self.where = np.concatenate([self.where, np.full(more, NOWHERE)])
            self.given = np.concatenate([self.given, np.zeros(more, dtype=bool)])
            self.needed = np.concatenate([self.needed, np.zeros(more, dtype=bool)])

    def copy(self):
        return Contents(self.who, self.where)


class Replay:
    """All states of all ranks.

    Attributes
    ----------
    states : list over ranks of lists of {buffer: Contents}
        Entry 0 is the state before the first round, entry k the one after round k - 1. What an element of "x" holds
        before it is overwritten unread is no part of the algorithm, and is left out.
    times : lists of the same shape
        When that state was reached.
    carried : list of int arrays, one for each flight of the trace
        Where in the vector the elements of the message stood at first.
    total : int
        Elements of the vector.
    cuts : int array
        Where the vector is cut by all those messages, 0 and `total` included.
    """

    def __init__(self, trace: Trace, size: int, count: Blocks):
        self.total = count if isinstance(count, int) else max(hi for _, hi in count)
        given = [self._reached(rank, trace, size, count) for rank in range(size)]
        last = self._run(trace, given)
        for x, held in zip(given, last, strict=True):
            unread = ~held["x"].given & ~held["x"].needed
            x.who[unread[: len(x.who)]] = 0
        self._run(trace, given)
        ends = [0, self.total]
        for origins in self.carried:
            known = origins[origins != NOWHERE]
            jumps = np.flatnonzero(np.diff(known) != 1)
            ends += [*known[:1], *known[jumps + 1], *(known[jumps] + 1), *(known[-1:] + 1)]
        self.cuts = np.unique(ends)

    def _run(self, trace, given):
        """Fill states, times and carried; return the last state."""
        size = len(given)
        spans = {(span.rank, span.index): span for span in trace.rounds}
        received: dict[tuple[int, int], list] = {}
        for number, flight in enumerate(trace.flights):
            received.setdefault((flight.dest, flight.received_in), []).append((number, flight))
        now = [{"x": x.copy()} for x in given]
        self.states = [[_copied(held)] for held in now]
        self.times = [[0.0] for _ in range(size)]
        self.carried = [None] * len(trace.flights)
        wires: dict[tuple[int, int], list] = {}
        for what, rank, index in trace.log:
            span, held = spans[rank, index], now[rank]
            steps = [step for step in span.steps if step.lo < step.hi]
            if what == "begin":
                for step in steps:
                    if type(step) is Send:
                        payload = held.setdefault(step.buf, Contents()).read(step.lo, step.hi)
                        wires.setdefault((rank, step.peer), []).append(payload)
                continue
            writes = []
            for step in steps:
                if type(step) in (Copy, Reduce):
                    source = held.setdefault(step.src, Contents())
                    writes.append((step, source.read(step.at, step.at + step.hi - step.lo)))
            for number, flight in received.get((rank, index), ()):
                payload = wires[flight.source, rank].pop(0)
                self.carried[number] = payload[1]
                writes.append((flight.recv, payload))
            for step, (who, where) in writes:
                target = held.setdefault(step.buf, Contents())
                target.write(step.lo, step.hi, who, where, type(step) in (Reduce, RecvReduce))
            self.states[rank].append(_copied(held))
            self.times[rank].append(span.end)
        return now

    def _reached(self, rank, trace, size, count):
        """The x of a rank at first: the whole vector, or its own block where it never touches more than that."""
        reached = 0
        for span in trace.rounds:
            for step in span.steps if span.rank == rank else ():
                if step.buf == "x":
                    reached = max(reached, step.hi)
                if type(step) in (Copy, Reduce) and step.src == "x":
                    reached = max(reached, step.at + step.hi - step.lo)
        lo, hi = blocks(count, size)(rank)
        if reached > hi - lo or hi - lo == self.total:
            lo, hi = 0, self.total
        return Contents([1 << rank] * (hi - lo), np.arange(lo, hi))

    def at(self, rank: int, time: float) -> dict[str, Contents]:
        """The buffers of a rank at a time."""
        return self.states[rank][np.searchsorted(self.times[rank], time, side="right") - 1]

    def place(self, origins) -> float:
        """Where in the vector, 0 to 1, the elements of these origins stood: the middle of the pieces it is cut into."""
        piece = np.searchsorted(self.cuts, origins, side="right") - 1
        return float((self.cuts[piece] + self.cuts[piece + 1]).mean() / (2 * self.total))


def _copied(held):
    return {name: contents.copy() for name, contents in held.items()}
