"""The walk of the clock (clock.py): every rank through its rounds, every message through its ports, in order of time.

Cost: about 10 us a message.
"""

import gc
import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from collectives.networks import ROUNDS
from collectives.steps import Copy, Recv, RecvReduce, Reduce, Round, Send


class Flight(NamedTuple):
    """One message, in seconds from the start: `start` at the sender's port, `end` in the receiver's hands."""

    source: int
    dest: int
    send: Send
    recv: Recv | RecvReduce
    start: float
    end: float
    sent_in: int  # round of the sender
    received_in: int  # round of the receiver


class Span(NamedTuple):
    """One round of one rank, in seconds from the start."""

    rank: int
    index: int
    start: float
    end: float
    steps: Round


@dataclass
class Trace:
    """All that happened: every round, every message, and the order of beginnings and ends of rounds.

    `log` holds ("begin" or "end", rank, round) in causal order: a round ends after those it received from began.
    """

    rounds: list[Span] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    log: list[tuple[str, int, int]] = field(default_factory=list)


class Walk:
    """Walk ranks 0 .. mine - 1.

    Where mine < size these are one node that stands for all: what a rank sends to a rank of another node, its own node
    gets from the rank as far away on the other side, at the same moment.
    """

    def __init__(self, program, name, size, itemsize, network, mine, trace):
        self.name, self.size, self.mine = name, size, mine
        self.itemsize, self.network = itemsize, network
        self.finish = np.full(mine, np.nan)
        self.rounds = [0] * mine
        self.messages = 0
        self.elements = [0] * mine, [0] * mine  # sent inside the node, and between nodes
        self.trace = Trace() if trace else None
        self.programs = [iter(program(rank)) for rank in range(mine)]
        collecting = gc.isenabled()
        gc.disable()  # hundreds of thousands of small objects live at once, none in a cycle: 1.5 times faster
        try:
            self.walk()
        finally:
            if collecting:
                gc.enable()

    def walk(self):
        # Two kinds of events in order of time: a rank begins its next round (flight is None), or the first byte of a
        # message reaches the port of the rank. Ranks in step have events at equal times, hence a heap of the distinct
        # times and a list for each. Written flat, with local names: this loop is all of the cost.
        size, mine, itemsize, trace = self.size, self.mine, self.itemsize, self.trace
        node, links = self.network.ranks_per_node, (self.network.inside, self.network.between)
        gamma, copy = self.network.gamma * itemsize, self.network.copy * itemsize
        overhead = [link.overhead for link in links]
        latency = [link.latency for link in links]
        gap = [link.gap for link in links]
        held = [link.beta * itemsize for link in links]
        nodes = -(-mine // node)
        out, into = ([0.0] * mine, [0.0] * nodes), ([0.0] * mine, [0.0] * nodes)  # port free at
        inbox: list[dict[int, list]] = [{} for _ in range(mine)]  # what has come, by source
        waiting = [-1] * mine  # for a message of this rank
        state: list = [None] * mine
        in_rounds = self.network is ROUNDS
        rounds, elements, programs = self.rounds, self.elements, self.programs
        times, events = [0.0], {0.0: [(rank, None) for rank in range(mine)]}

        while times:
            now = times[0]
            for rank, flight in events[now]:  # grows while it is read, where something takes no time
                if flight is None:
                    steps = next(programs[rank], None)
                    if steps is None:
                        self.finish[rank] = now
                        continue
                    begin = t = sent = now
                    busy, receives, i = 0.0, [], 0
                    for step in steps:
                        n = step.hi - step.lo
                        if n <= 0:
                            continue
                        kind = type(step)
                        if kind is Send:
                            peer = step.peer
                            far = rank // node != peer // node
                            ports, port = out[far], rank // node if far else rank
                            t += overhead[far]
                            start = ports[port] if ports[port] > t else t
                            ports[port] = sent = start + gap[far] + n * held[far]
                            dest = peer % mine
                            there = start + latency[far]
                            event = dest, ((dest - peer + rank) % size, n, start, step, rounds[rank])
                            if there in events:
                                events[there].append(event)
                            else:
                                events[there] = [event]
                                heappush(times, there)
                            self.messages += 1
                            elements[far][rank] += n
                            if in_rounds:
                                sent = now + 1
                        elif kind is Copy:
                            busy += n * copy
                        elif kind is Reduce:
                            busy += n * gamma
                        else:
                            receives.append(step)
                    if trace:
                        trace.log.append(("begin", rank, rounds[rank]))
                    t += busy
                else:
                    source = flight[0]
                    far = rank // node != source // node
                    ports, port = into[far], rank // node if far else rank
                    arrived = (ports[port] if ports[port] > now else now) + gap[far] + flight[1] * held[far]
                    ports[port] = arrived
                    if source in inbox[rank]:
                        inbox[rank][source].append((arrived, flight))
                    else:
                        inbox[rank][source] = [(arrived, flight)]
                    if waiting[rank] != source:
                        continue
                    waiting[rank] = -1
                    receives, i, t, sent, begin, steps = state[rank]

                while i < len(receives):
                    step = receives[i]
                    source = step.peer
                    if source not in inbox[rank]:
                        waiting[rank] = source
                        state[rank] = receives, i, t, sent, begin, steps
                        break
                    queue = inbox[rank][source]
                    arrived, (_, n, start, send, sent_in) = queue.pop(0)
                    if not queue:
                        del inbox[rank][source]
                    if n != step.hi - step.lo:
                        raise ValueError(f"{self.name}: rank {source} sends {n} elements where rank {rank} has {step}")
                    t = (arrived if arrived > t else t) + overhead[rank // node != source // node]
                    if trace:
                        trace.flights.append(Flight(source, rank, send, step, start, t, sent_in, rounds[rank]))
                    if type(step) is RecvReduce:
                        t += n * gamma
                    i += 1
                else:
                    t = sent if sent > t else t
                    if trace:
                        trace.rounds.append(Span(rank, rounds[rank], begin, t, tuple(steps)))
                        trace.log.append(("end", rank, rounds[rank]))
                    rounds[rank] += 1
                    if t in events:
                        events[t].append((rank, None))
                    else:
                        events[t] = [(rank, None)]
                        heappush(times, t)
            heappop(times)
            del events[now]

        if stuck := [rank for rank in range(mine) if math.isnan(self.finish[rank])]:
            who = ", ".join(f"{rank} for {waiting[rank]}" for rank in stuck[:4])
            raise ValueError(f"{self.name}: {len(stuck)} of {size} ranks wait for ever, rank {who}")
        if left := [(source, rank) for rank in range(mine) for source in inbox[rank]]:
            raise ValueError(f"{self.name}: nobody receives the message from rank {left[0][0]} to rank {left[0][1]}")
