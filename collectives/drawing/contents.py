"""Replay: what every buffer held after every round, from the simulation's trace of an algorithm.

A rank's buffers also change when another rank writes into them. What is computed comes from all whose data it was
computed from; it keeps its place in the vector where it is as long as what was read first.

For each element: which ranks contributed to it, and where in the vector it stood when the algorithm began. The drawings
show both. (Whether an algorithm is right is the simulator's question: it also knows order and multiplicity.)

Elements that always travel together are one cell, so that the cost is in messages, not in elements.
"""

import numpy as np

from collectives.pricing.trace import Trace
from collectives.steps import Barrier, Blocks, Compute, Copy, Reduce, Send, adds, blocks, is_live, reads, writes

NOWHERE = -1  # where scratch stood that nothing was written to


class Contents:
    """One buffer, cell by cell.

    Attributes
    ----------
    who : object array (cells,)
        The ranks that contributed: bit r for rank r.
    where : int array (cells,)
        The place in the vector where the first element of the cell stood at first.
    given : bool array (cells,)
        Whether the cell is still what it was before the first round.
    needed : bool array (cells,)
        Whether that was ever read.
    """

    def __init__(self, who, where):
        self.who = np.array(who, dtype=object)  # Python integers have a bit for any number of ranks
        self.where = np.array(where, dtype=int)
        self.given = np.ones(len(self.who), dtype=bool)
        self.needed = np.zeros(len(self.who), dtype=bool)

    def read(self, cells: slice):
        self.needed[cells] |= self.given[cells]
        return self.who[cells].copy(), self.where[cells].copy()

    def write(self, cells: slice, who, where, reduces: bool):
        if reduces:
            who = who | self.read(cells)[0]
        self.who[cells], self.where[cells], self.given[cells] = who, where, False

    def copy(self):
        return Contents(self.who, self.where)


class Replay:
    """All states of all ranks.

    Attributes
    ----------
    states : list over ranks of lists of {buffer: Contents}
        Entry 0 is the state before the first round, entry k the one after round k - 1. Elements of "x" that are
        overwritten before they are read are empty at first: what they held is no part of the algorithm.
    times : lists of the same shape
        When that state was reached.
    carried : list of (origins, lengths), one for each flight of the trace
        Where in the vector the cells of the message stood at first (int arrays).
    moved : list of the same, one for each work of the trace; None for a barrier
    total : int
        Elements of the vector.
    bounds : {buffer: int array (cells + 1,)}
        Where the cells begin and end.
    pieces : int array
        Where the vector is cut by all messages together, 0 and `total` included.
    """

    def __init__(self, trace: Trace, size: int, count: Blocks):
        self.total = count if isinstance(count, int) else max(hi for _, hi in count)
        self.bounds = _cells(trace, [(0, self.total), *(blocks(count, size)(rank) for rank in range(size))])
        reached = [0] * size  # how far into x anyone reads or writes
        for span in trace.rounds:
            for step in filter(is_live, span.steps):
                for place in reads(step, span.rank) + writes(step, span.rank):
                    if place.buf == "x":
                        reached[place.rank] = max(reached[place.rank], place.hi)
        given = [self._given(rank, reached[rank], blocks(count, size)(rank)) for rank in range(size)]
        last = self._run(trace, given)
        for x, held in zip(given, last, strict=True):
            x.who[~held["x"].given & ~held["x"].needed] = 0
        self._run(trace, given)
        ends = [0, self.total]
        for origins, lengths in filter(None, self.carried + self.moved):
            known = origins != NOWHERE
            starts, stops = origins[known], (origins + lengths)[known]
            ends += [*starts[:1], *stops[-1:]]
            ends += [
                end for stop, start in zip(stops, starts[1:], strict=False) if stop != start for end in (stop, start)
            ]
        self.pieces = np.unique(ends)

    def _given(self, rank, reached, block):
        """Return the x of a rank at first: the whole vector, or its own block where nobody touches more than that."""
        lo, hi = block
        if reached > hi - lo or hi - lo == self.total:
            lo, hi = 0, self.total
        starts = self.bounds["x"][:-1]
        inside = starts < hi - lo
        return Contents([1 << rank if i else 0 for i in inside], np.where(inside, starts + lo, NOWHERE))

    def _run(self, trace, given):
        """Fill states, times, carried and moved; return the last state."""
        spans = {(span.rank, span.index): span for span in trace.rounds}
        received: dict[tuple[int, int], list] = {}
        for number, flight in enumerate(trace.flights):
            received.setdefault((flight.dest, flight.received_in), []).append((number, flight))
        worked: dict[tuple[int, int], list] = {}
        for number, work in enumerate(trace.works):
            worked.setdefault((work.rank, work.index), []).append((number, work.step))
        now = [{"x": x.copy()} for x in given]
        self.states = [[_copied(held)] for held in now]
        self.times = [[0.0] for _ in given]
        self.carried, self.moved = [None] * len(trace.flights), [None] * len(trace.works)
        wires: dict[tuple[int, int], list] = {}

        def when(entry):
            what, rank, index = entry
            return spans[rank, index].start if what == "begin" else spans[rank, index].end

        for entry in sorted(trace.log, key=when):  # stable: of what happens at once, causes come first
            what, rank, index = entry
            if what == "begin":
                for step in spans[rank, index].steps:
                    if type(step) is Send and is_live(step):
                        payload = self._read(now, step, rank)[0]
                        wires.setdefault((rank, step.peer), []).append(payload)
                continue
            changes = []
            for number, step in worked.get((rank, index), ()):
                if type(step) is Barrier:
                    continue
                if type(step) is Compute:
                    changes += self._computed(now, step, rank, number)
                    continue
                if not isinstance(step, Copy | Reduce):
                    raise TypeError(f"rank {rank}: {step!r} is a step of which no picture knows what buffers hold")
                (payload,), (place,) = self._read(now, step, rank), reads(step, rank)
                self.moved[number] = payload[1], self._lengths(place)
                changes.append((step, writes(step, rank)[0], payload))
            for number, flight in received.get((rank, index), ()):
                (who, where), place = wires[flight.source, rank].pop(0), writes(flight.recv, rank)[0]
                if place.buf == "x" and (where == NOWHERE).all():  # of no place before, it has one from now on
                    where = self.bounds["x"][:-1][self._slice(place)]
                self.carried[number] = where, self._lengths(place)
                changes.append((flight.recv, place, (who, where)))
            for step, place, (who, where) in changes:
                self._buffer(now[place.rank], place.buf).write(self._slice(place), who, where, adds(step))
            for changed in {rank, *(place.rank for _, place, _ in changes)}:
                self.states[changed].append(_copied(now[changed]))
                self.times[changed].append(when(entry))
        return now

    def _read(self, now, step, rank):
        """(who, where) of each slice that a step reads."""
        return [self._buffer(now[s.rank], s.buf).read(self._slice(s)) for s in reads(step, rank)]

    def _computed(self, now, step, rank, number):
        """Return what a Compute writes, as changes."""
        got, sources = self._read(now, step, rank), reads(step, rank)
        who = 0
        for ranks, _ in got:
            for each in ranks:
                who |= each
        origins, lengths = (got[0][1], self._lengths(sources[0])) if got else (np.array([NOWHERE]), np.array([1]))
        self.moved[number] = origins, lengths
        changes = []
        for place in writes(step, rank):
            alike = got and place.hi - place.lo == sources[0].hi - sources[0].lo
            cells = len(self._lengths(place))
            where = origins if alike else np.full(cells, NOWHERE)
            changes.append((step, place, (np.full(cells, who or 1 << rank, dtype=object), where)))
        return changes

    def _lengths(self, place):
        return np.diff(self.bounds[place.buf])[self._slice(place)]

    def _slice(self, place):
        """Return the cells of a slice of elements."""
        return slice(*np.searchsorted(self.bounds[place.buf], (place.lo, place.hi)))

    def _buffer(self, held, name):
        if name not in held:
            cells = len(self.bounds[name]) - 1
            held[name] = Contents([0] * cells, [NOWHERE] * cells)
            held[name].given[:] = False
        return held[name]

    def at(self, rank: int, time: float) -> dict[str, Contents]:
        """Return the buffers of a rank at a time."""
        return self.states[rank][np.searchsorted(self.times[rank], time, side="right") - 1]

    def place(self, origins, lengths=1) -> float:
        """Where in the vector, 0 to 1, cells of these origins stood: the middle of the pieces that they are of."""
        piece = np.searchsorted(self.pieces, origins, side="right") - 1
        middle = (self.pieces[piece] + self.pieces[piece + 1]) / 2
        return float(np.average(middle, weights=np.broadcast_to(lengths, np.shape(origins)))) / self.total


def _copied(held):
    return {name: contents.copy() for name, contents in held.items()}


def _cells(trace: Trace, known) -> dict[str, np.ndarray]:
    """Cut every buffer wherever any step begins or ends, and wherever what it is copied from or to is cut."""
    points: dict[str, set[int]] = {"x": {end for lo, hi in known for end in (lo, hi, hi - lo)}}
    links = set()
    for flight in trace.flights:
        links.add((flight.send.buf, flight.send.lo, flight.recv.buf, flight.recv.lo, flight.recv.hi - flight.recv.lo))
    for flight in trace.lost:
        points.setdefault(flight.send.buf, {0}).update((flight.send.lo, flight.send.hi))
    for work in trace.works:
        read, written = reads(work.step, work.rank), writes(work.step, work.rank)
        for place in read + written:
            points.setdefault(place.buf, {0}).update((place.lo, place.hi))
        for to in written:
            if read and to.hi - to.lo == read[0].hi - read[0].lo:
                links.add((read[0].buf, read[0].lo, to.buf, to.lo, to.hi - to.lo))
    for a, at, b, to, length in links:
        points.setdefault(a, {0}).update((at, at + length))
        points.setdefault(b, {0}).update((to, to + length))
    shifted = [link for link in links if link[0] != link[2] or link[1] != link[3]]
    grown = True
    while grown:
        grown = False
        for a, at, b, to, length in shifted:
            ahead = {point - at + to for point in points[a] if at < point < at + length} - points[b]
            back = {point - to + at for point in points[b] if to < point < to + length} - points[a]
            points[b] |= ahead
            points[a] |= back
            grown = grown or bool(ahead or back)
    return {name: np.array(sorted(ends)) for name, ends in points.items()}
