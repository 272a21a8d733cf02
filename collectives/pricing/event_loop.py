"""The walk of the clock (price.py): every rank through its rounds, every message through its ports, in order of time.

Cost: about 5 us a message.
"""

import gc
import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np

from collectives.algorithms.shared import SLOTS
from collectives.pricing.flows import Flows, Parcel, Share
from collectives.pricing.networks import ROUNDS
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Round, Send, mistake_in


class Flight(NamedTuple):
    """One message, in seconds from the start: `start` at the sender's port, `end` in the receiver's hands.

    Its sender had it `ready` before, if the port was busy or the receive was not there yet; and it had `arrived` before
    the end if the receiver was busy. It is added in `adding` seconds behind the end.
    """

    source: int
    dest: int
    send: Send
    recv: Recv | RecvReduce
    start: float
    end: float
    sent_in: int  # round of the sender
    received_in: int  # round of the receiver
    ready: float
    arrived: float
    adding: float


class Span(NamedTuple):
    """One round of one rank, in seconds from the start."""

    rank: int
    index: int
    start: float
    end: float
    steps: Round


class Work(NamedTuple):
    """One Copy, Reduce, Barrier or Compute of a rank in its round `index`, in seconds from the start."""

    rank: int
    index: int
    step: Copy | Reduce | Barrier | Compute
    start: float
    end: float


@dataclass
class Trace:
    """All that happened: every round, message and piece of work, and the order of beginnings and ends of rounds.

    `lost` are messages that nobody received, of a schedule that is wrong.
    `shares` are what each message had of the channels that it crossed, on networks where messages share them.
    `log` holds ("begin" or "end", rank, round) in causal order: a round ends after those it received from began.
    `itemsize` is the bytes of an element.
    """

    rounds: list[Span] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    lost: list[Flight] = field(default_factory=list)
    log: list[tuple[str, int, int]] = field(default_factory=list)
    itemsize: int = 1
    shares: list[Share] = field(default_factory=list)


class Walk:
    """Walk ranks 0 .. mine - 1.

    Where mine < size these are one node that stands for all: what a rank sends to a rank of another node, its own node
    gets from the rank as far away on the other side, at the same moment. Where ranks wait for ever, or a message is not
    received, that is refused, unless the walk may stay `unfinished`: of a schedule that is wrong.
    """

    def __init__(self, program, name, size, itemsize, network, mine, trace, unfinished=False):
        self.name, self.size, self.mine, self.unfinished = name, size, mine, unfinished
        self.itemsize, self.network = itemsize, network
        self.finish = np.full(mine, np.nan)
        self.rounds = [0] * mine
        self.elements = [0] * mine, [0] * mine  # sent inside the node, and between nodes
        self.copied = [0] * mine  # elements that Copy and Reduce wrote
        self.meetings = [0] * mine
        self.trace = Trace(itemsize=itemsize) if trace else None
        self.host = network.nodes_of(size)
        self.flows = None
        self.programs = [iter(program(rank)) for rank in range(mine)]
        collecting = gc.isenabled()
        gc.disable()  # hundreds of thousands of small objects live at once, none in a cycle: 1.5 times faster
        try:
            self.walk()
        finally:
            if collecting:
                gc.enable()

    def refuse_other_node(self, rank, other, step):
        """Ranks of different nodes share no memory."""
        if other is not None and self.host[other] != self.host[rank]:
            node = self.network.ranks_per_node
            raise ValueError(
                f"{self.name}: rank {rank} shares no memory with rank {other}, as this network has {node} ranks a node:"
                f" {step}"
            )

    def walk(self):
        # Two kinds of events in order of time: a rank begins its next round (the event is the rank, and the steps once
        # its receives are there), or the first byte of a message reaches the port of the rank. Between nodes whose
        # cables are shared: a message gets onto its cable, or a stream may be over (None, and which), and the message
        # has come. Ranks in step have events at equal times, hence a heap of the distinct times and a list for each.
        # Written flat, with local names: this loop is all of the cost.
        size, mine, itemsize, trace, network = self.size, self.mine, self.itemsize, self.trace, self.network
        node, links, host, topology = (
            network.ranks_per_node,
            (network.inside, network.between),
            self.host,
            network.topology,
        )
        nodes = max(host[:mine]) + 1
        out, into = ([0.0] * mine, [0.0] * nodes), ([0.0] * mine, [0.0] * nodes)  # port free at
        credit = network.inside.credit
        out_debt, into_debt = [0.0] * mine, [0.0] * mine  # port in the node rested at
        towards = [None] * mine  # whom it sent to last
        request = [
            link.cost(0).seconds - link.cost(0).sending for link in links
        ]  # of the receiver, until it can begin to answer
        rendezvous = any(link.eager is not None for link in links)  # whether any send waits for its receive
        measured = bool(network.inside.points)  # whether all of it hangs on the length
        latest: dict[tuple[int, int], float] = {}  # sender and receiver -> when the last message reached its port
        memory = [0.0] * nodes  # of a node, free at
        # What a rank that copies takes of it, for all those it stands for.
        share = network.memory_share * min(node, size) / min(node, mine)
        costs: tuple[dict, dict] = {}, {}  # inside, between: elements -> what MessageCost has
        reducing: dict[int, float] = {}  # elements -> seconds, of what a message brings
        moves: dict[tuple, float] = {}  # Copy or Reduce, whether of another's buffer, into a slot, elements -> seconds
        inbox: list[dict[int, list]] = [{} for _ in range(mine)]  # what has come, by source
        posted: list[dict[int, int]] = [{} for _ in range(mine)]  # receives, by source, whose send has not begun
        parked: list[dict[int, list]] = [{} for _ in range(mine)]  # sends, by source, that began before their receive
        waiting = [-1] * mine  # for a message of this rank
        unsent = [0] * mine  # sends of the round that wait for their receive
        left = [0.0] * mine  # when the ports have done with the sends of the round
        ended: list = [None] * mine  # of rounds that are over but for those: time, begin, steps
        met: dict[tuple[int, ...], list] = {}  # who has come to a meeting: rank, begin, steps
        state: list = [None] * mine
        # What other cores of the node have read of a rank, where somebody has measured what it takes to write there.
        lent: list[list[tuple[str, int, int]]] = [[] for _ in range(mine)]
        lends = bool(network.posts)
        in_rounds = network is ROUNDS
        rounds, elements, programs = self.rounds, self.elements, self.programs
        copied, meetings = self.copied, self.meetings
        messages = 0
        times, events = [0.0], {0.0: [(rank,) for rank in range(mine)]}

        def book(t, event):
            if t in events:
                events[t].append(event)
            else:
                events[t] = [event]
                heappush(times, t)

        # Where channels are known, or were measured; otherwise ports are those of the closed forms.
        flows = None
        if topology or network.between.points:
            shares = trace.shares if trace else None
            flows = self.flows = Flows(network, nodes, lambda t, item: book(t, (None, item)), shares)

        def leave(rank, step, far, cost, ready, earliest, now, sent_in):
            """The message leaves as soon as its port is free; says when the port has done with it, if that is known."""
            peer = step.peer
            if far and flows:
                dest = peer % mine
                source = (dest - peer + rank) % size
                asked = max(0.0, now - earliest)
                parcel = Parcel(rank, source, dest, cost, step, sent_in, ready, asked)
                if earliest > now:
                    book(earliest, (None, parcel))
                else:
                    flows.send(parcel, host[rank], host[dest], now, (step.hi - step.lo) * itemsize)
                return None
            ports, port = out[far], host[rank] if far else rank
            start = ports[port] if ports[port] > earliest else earliest
            end = start + cost[3]
            dest = peer % mine
            there = start + cost[2]
            if there < now:  # only a message that waited for its receive: it counts from when that was asked for
                there = now
            if measured and not far:
                if credit:
                    out_debt[rank] = max(out_debt[rank], start) + cost[4]
                    end = max(end, out_debt[rank] - credit)
                towards[rank] = peer
                # A short one that starts later may be there earlier: it still comes second.
                last = latest.get((rank, peer), there)
                there = latest[rank, peer] = there if there > last else last
            ports[port] = end
            book(there, (dest, (dest - peer + rank) % size, far, cost, start, step, sent_in, ready))
            return end

        def carry(item, now):
            """A message leaves, a flow has come to where its message may be over, or channels are shared anew."""
            if item is None:
                flows.share(now)
            elif type(item) is Parcel:
                nbytes = (item.step.hi - item.step.lo) * itemsize
                flows.send(item, host[item.sender], host[item.dest], now, nbytes)
            elif over := flows.look(item, now):
                parcel, start, there = over
                sender, source, dest, cost, step, sent_in, ready, _ = parcel
                # A short one that starts later may be there earlier: it still comes second.
                there = latest[source, dest] = max(there, latest.get((source, dest), now))
                book(there, (dest, source, True, cost, start, step, sent_in, ready))
                if not cost.buffered:
                    all_sent(sender, now, now)

        def all_sent(rank, end, now):
            """One of those sends has left on which the end of the rank's round waits."""
            left[rank] = max(left[rank], end)
            unsent[rank] -= 1
            if ended[rank] and not unsent[rank]:
                over, *round_of_rank = ended[rank]
                ended[rank] = None
                finish(rank, max(over, left[rank], now), *round_of_rank)

        def post(rank, steps, now):
            """The receives of a round are there; the sends that waited for them leave."""
            for step in steps:
                kind = type(step)
                if (kind is not Recv and kind is not RecvReduce) or step.hi <= step.lo:
                    continue
                source = step.peer
                if not parked[rank].get(source):
                    posted[rank][source] = posted[rank].get(source, 0) + 1
                elif held_back := parked[rank][source].pop(0):
                    sender, send, far, cost, ready, sent_in = held_back
                    asking = cost[2] + network.between.gap + cost[7] if far and topology else request[far]
                    earliest = max(ready, now - asking)
                    end = leave(sender, send, far, cost, ready, earliest, now, sent_in)
                    if end is not None:
                        all_sent(sender, end, now)

        def finish(rank, t, begin, steps):
            """The round of a rank ends."""
            if trace:
                trace.rounds.append(Span(rank, rounds[rank], begin, t, tuple(steps)))
                trace.log.append(("end", rank, rounds[rank]))
            rounds[rank] += 1
            book(t, (rank,))

        def move(kind, other, slot, nbytes):
            """Seconds of a Copy or Reduce; what other ranks have written, or read in a slot, their cores hold."""
            copying = network.copying(nbytes)
            moving = network.fetching(nbytes) if other else network.posting(nbytes) if slot else copying
            return moving if kind is Copy else network.reducing(nbytes) + max(0.0, moving - copying)

        def back(rank, step):
            """Seconds to get back from other cores what this rank writes after they have read it as messages."""
            among, buf, lo, hi, elements = lent[rank], step.buf, step.lo, step.hi, 0
            for i in range(len(among) - 1, -1, -1):
                name, a, b = among[i]
                if name == buf and a < hi and lo < b:
                    elements += min(b, hi) - max(a, lo)
                    among[i : i + 1] = [(buf, c, d) for c, d in ((a, lo), (hi, b)) if c < d]
            nbytes = elements * itemsize
            return max(0.0, network.posting(nbytes) - network.copying(nbytes)) if nbytes else 0.0

        def meet(rank, step, now, steps):
            """A rank comes to a meeting; with the last one all leave."""
            group = range(size) if step.ranks is None else step.ranks
            for other in group:
                self.refuse_other_node(rank, other, step)
            # Where one node stands for all, a meeting of all is over when those of this node have come.
            key = tuple(sorted({other % mine for other in group}))
            here = met.setdefault(key, [])
            here.append((rank, now, steps))
            if len(here) < len(key):
                return
            end = now + (1.0 if in_rounds else network.meeting(len(group)))
            for each, begin, its_steps in met.pop(key):
                meetings[each] += 1
                if trace:
                    trace.works.append(Work(each, rounds[each], its_steps[0], begin, end))
                finish(each, end, begin, its_steps)

        while times:
            now = heappop(times)
            for event in events[now]:  # grows while it is read, where something takes no time
                rank = event[0]
                if rank is None:
                    carry(event[1], now)
                    continue
                if len(event) < 3:
                    if len(event) == 2:  # its receives are there
                        steps = event[1]
                    else:
                        steps = next(programs[rank], None)
                        if steps is None:
                            self.finish[rank] = now
                            continue
                        if rendezvous:  # ranks that begin at once: all receives are there before anyone sends
                            post(rank, steps, now)
                            events[now].append((rank, steps))
                            continue
                    begin = t = sent = now
                    busy, computing, receives, works, i, message = 0.0, 0.0, [], [], 0, None
                    if trace:
                        trace.log.append(("begin", rank, rounds[rank]))
                    for step in steps:
                        kind = type(step)
                        if kind is Send:
                            n = step.hi - step.lo
                            if n <= 0:
                                continue
                            peer = step.peer
                            far = int(host[rank] != host[peer])  # an index
                            over = n
                            if far and topology:
                                route = topology.route(host[rank], host[peer])
                                over = n, route.bandwidth, route.latency
                            cost = costs[far].get(over)
                            if cost is None:
                                if far and topology:
                                    cost = network.cost_over(route, n * itemsize)
                                else:
                                    cost = links[far].cost(n * itemsize)
                                if far and flows and cost.waits:  # it moves on its channels, whoever turns to it
                                    cost = cost._replace(receiving=0.0)
                                costs[far][over] = cost
                            t += cost[0]
                            messages += 1
                            if lends and not far and cost[8]:  # shorter ones are copied, and lie elsewhere
                                lent[rank].append((step.buf, step.lo, step.hi))
                            elements[far][rank] += n
                            if rendezvous:
                                dest = peer % mine
                                source = (dest - peer + rank) % size
                                if posted[dest].get(source):
                                    posted[dest][source] -= 1
                                else:
                                    parked[dest].setdefault(source, []).append(
                                        (rank, step, far, cost, t, rounds[rank]) if cost[8] else None
                                    )
                                    if cost[8]:
                                        unsent[rank] += 1
                                        continue
                            end = leave(rank, step, far, cost, t, t, now, rounds[rank])
                            if not cost[9]:
                                if end is None:
                                    unsent[rank] += 1
                                else:
                                    sent = end
                            if in_rounds:
                                sent = now + 1
                        elif kind is Recv or kind is RecvReduce:
                            if step.hi > step.lo:
                                receives.append(step)
                        elif kind is Copy or kind is Reduce:
                            n = step.hi - step.lo
                            if n <= 0:
                                continue
                            other = step.of not in (None, rank) or step.to not in (None, rank)
                            what = kind, other, step.buf in SLOTS, n
                            seconds = moves.get(what)
                            if seconds is None:
                                seconds = moves[what] = move(*what[:3], n * itemsize)
                            if lent[rank]:
                                seconds += back(rank, step)
                            busy += seconds
                            copied[rank] += n
                            named = step.of is not None or step.to is not None
                            if named:
                                self.refuse_other_node(rank, step.of, step)
                                self.refuse_other_node(rank, step.to, step)
                                if in_rounds:
                                    sent = now + 1
                            if trace:
                                works.append((step, seconds))
                        elif kind is Compute:
                            seconds = 1.0 if in_rounds else step.seconds
                            computing += seconds
                            if trace:
                                works.append((step, seconds))
                        elif kind is Barrier and len(steps) == 1:
                            break
                        else:
                            alone = f"{step!r} is a step that has no price"
                            if kind is Barrier:
                                alone = f"{step!r} must be the only step of its round"
                            raise ValueError(f"{self.name}: rank {rank}: {mistake_in(steps) or alone}")
                    if steps and type(steps[0]) is Barrier:
                        meet(rank, steps[0], now, steps)
                        continue
                    moving = busy
                    if busy and share:  # the ranks of a node share its memory
                        free = memory[host[rank]]
                        memory[host[rank]] = free = (free if free > t else t) + share * busy
                        moving = max(busy, free - t)
                    at, t = t, t + moving + computing
                    for step, seconds in works:  # with a trace only
                        if in_rounds:
                            reaches = type(step) is Compute or step.of is not None or step.to is not None
                            trace.works.append(Work(rank, rounds[rank], step, now, now + 1 if reaches else now))
                            continue
                        end = at + seconds * (moving / busy if busy and type(step) is not Compute else 1.0)
                        trace.works.append(Work(rank, rounds[rank], step, at, end))
                        at = end
                    if rendezvous:
                        left[rank] = sent
                else:
                    source, far, cost, left_at = event[1:5]
                    if far and flows:
                        arrived = now + cost[7]
                    else:
                        ports, port = into[far], host[rank] if far else rank
                        there = left_at + cost[2]
                        start = ports[port] if ports[port] > there else there
                        arrived = start + cost[3]
                        if measured and not far:
                            if credit:
                                into_debt[rank] = max(into_debt[rank], start) + cost[4]
                                arrived = max(arrived, into_debt[rank] - credit)
                            if out[False][rank] > left_at:
                                slower = cost[6] if towards[rank] == source else cost[5]
                                arrived += slower * min(cost[3], out[False][rank] - left_at)
                        ports[port] = arrived
                        arrived += cost[7]
                    if waiting[rank] != source:
                        inbox[rank].setdefault(source, []).append((arrived, event))
                        continue
                    waiting[rank], message = -1, (arrived, event)
                    receives, i, t, sent, begin, steps = state[rank]

                came = inbox[rank]
                while i < len(receives):
                    step = receives[i]
                    source = step.peer
                    if message is None:
                        if source not in came:
                            waiting[rank] = source
                            state[rank] = receives, i, t, sent, begin, steps
                            break
                        queue = came[source]
                        message = queue.pop(0)
                        if not queue:
                            del came[source]
                    arrived, (_, _, _, cost, start, send, sent_in, ready) = message
                    message = None
                    n = send.hi - send.lo
                    if n != step.hi - step.lo:
                        raise ValueError(f"{self.name}: rank {source} sends {n} elements where rank {rank} has {step}")
                    t += cost[1]
                    if arrived > t:
                        t = arrived
                    adding = 0.0
                    if type(step) is RecvReduce:
                        if n not in reducing:
                            reducing[n] = network.reducing(n * itemsize)
                        adding = reducing[n]
                    if trace:
                        trace.flights.append(
                            Flight(source, rank, send, step, start, t, sent_in, rounds[rank], ready, arrived, adding)
                        )
                    t += adding
                    if lent[rank]:
                        t += back(rank, step)
                    i += 1
                else:
                    if unsent[rank]:
                        ended[rank] = t, begin, steps
                    else:
                        if rendezvous:
                            sent = left[rank]
                        finish(rank, sent if sent > t else t, begin, steps)
            del events[now]
        self.messages = messages
        if self.unfinished:
            for rank in range(mine):
                for arrived, (_, source, _, _, start, send, sent_in, ready) in chain(*inbox[rank].values()):
                    trace.lost.append(
                        Flight(source, rank, send, None, start, arrived, sent_in, -1, ready, arrived, 0.0)
                    )
            return
        if stuck := [rank for rank in range(mine) if math.isnan(self.finish[rank])]:
            meeting = {rank: sorted(set(key) - {r for r, *_ in here}) for key, here in met.items() for rank, *_ in here}

            def waits_for(rank):
                if rank in meeting:
                    return f"{rank} to meet {meeting[rank]}"
                return f"{rank} for {waiting[rank]}" if waiting[rank] >= 0 else f"{rank} for the receive of a send"

            who = ", ".join(map(waits_for, stuck[:4]))
            raise ValueError(f"{self.name}: {len(stuck)} of {size} ranks wait for ever, rank {who}")
        if unheard := [(source, rank) for rank in range(mine) for source in inbox[rank]]:
            raise ValueError("{}: nobody receives the message from rank {} to rank {}".format(self.name, *unheard[0]))
