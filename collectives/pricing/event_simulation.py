"""Event-driven simulation of a schedule: every rank goes through its rounds, every message through ports or channels.

An event is a handler and its subject, at a time: a rank starts its next round, a message reaches its receiver, a flow
may be over. `EventSimulation.run` takes them in order of time. What a rank does in a round:

1. its receives are posted: sends of other ranks that wait for them leave (`post_receives`);
2. its processor hands over its messages one by one (`send`), and copies, adds and computes (`run_steps`);
3. it takes what it receives in the listed order (`receive`), waiting for what has not arrived;
4. the round ends when all that is done, and what it sends has left (`end_round`).

A message inside a node goes through the ports of both ranks, between nodes through those of the nodes (ports.py), or it
shares channels with others (flows.py). Cost: about 5 us a message through ports, 8 us over channels.
"""

import gc
import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

import numpy as np

from collectives.pricing.flows import Flows
from collectives.pricing.memory import NodeMemory
from collectives.pricing.networks import ROUNDS, MessageCost, Network
from collectives.pricing.ports import MeasuredPorts, Message, Ports
from collectives.pricing.progress_bar import ProgressBar
from collectives.pricing.symmetry import Symmetry, shift
from collectives.pricing.trace import Flight, Span, Trace, Work
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Round, Send, mistake_in


class EventQueue:
    """Handlers and their subjects, in order of time; those of one time in the order in which they were added.

    Ranks in step have events at equal times: so it is a heap of the distinct times, and a list for each of them.
    """

    def __init__(self):
        self.times: list[float] = []
        self.events: dict[float, list[tuple[Callable[[Any, float], None], Any]]] = {}

    def at(self, time: float, handler: Callable[[Any, float], None], subject: Any) -> None:
        """Call handler(subject, time) at that time."""
        if time in self.events:
            self.events[time].append((handler, subject))
        else:
            self.events[time] = [(handler, subject)]
            heappush(self.times, time)

    def run_next(self) -> None:
        """Handle the events of the earliest time, and those that they add to it."""
        now = heappop(self.times)
        for handler, subject in self.events[now]:  # grows while it is read, where something takes no time
            handler(subject, now)
        del self.events[now]


class Rank:
    """A rank on its way through its rounds.

    Attributes
    ----------
    number : int
    rounds : iterator of rounds
    round : int
        Index of the current one.
    started : float
        When it began.
    steps : sequence of steps
        Of the current round.
    clock : float
        Until when its processor is busy.
    receives, received : list of Recv and RecvReduce, int
        Of the current round, and how many of them are done.
    sends_end : float
        When what it sends in the current round has left, as far as that is known.
    pending_sends : int
        Sends of the current round of which that is not yet known.
    done : bool
        Whether the current round waits only for those.
    inbox : dict
        Source -> messages that have arrived and were not received yet.
    awaited : int
        Source of the message for which it waits; -1 for none.
    posted : dict
        Source -> how many of its receives have no send yet.
    parked : dict
        Source -> messages to this rank whose receive is not posted yet; None for one that has left all the same.
    """

    __slots__ = (
        "awaited",
        "clock",
        "done",
        "inbox",
        "number",
        "parked",
        "pending_sends",
        "posted",
        "received",
        "receives",
        "round",
        "rounds",
        "sends_end",
        "started",
        "steps",
    )  # fmt: skip

    def __init__(self, number: int, rounds: Iterable[Round]):
        self.number, self.rounds, self.round = number, iter(rounds), 0
        self.started = self.clock = self.sends_end = 0.0
        self.steps: Round = ()
        self.receives: list[Recv | RecvReduce] = []
        self.received = self.pending_sends = 0
        self.done = False
        self.inbox: dict[int, list[Message]] = {}
        self.awaited = -1
        self.posted: dict[int, int] = {}
        self.parked: dict[int, list[Message | None]] = {}


class EventSimulation:
    """Simulate the ranks of a schedule, or those of a block that stands for all.

    Parameters
    ----------
    program : callable (rank) -> iterable of rounds
    name : str
        Of the algorithm, for messages of errors.
    size, itemsize : int
        Ranks; bytes of an element.
    network : Network
    trace : bool
        Whether every round, message and piece of work is recorded.
    symmetry : Symmetry, optional
        Only ranks 0 ... `symmetry.block` - 1 are simulated: what a rank sends to one beyond them, one of them gets at
        the same moment from the rank that a relabelling puts in the sender's place.
    unfinished : bool
        Whether ranks may wait for ever, and messages not be received: of a schedule that is wrong.
    expected_steps : float
        Of all simulated ranks, for the bar that a long simulation shows.

    Attributes
    ----------
    finish : ndarray (simulated,)
        Seconds until each rank has finished.
    rounds, barriers, copied : list of int
        Of each rank: rounds, barriers, elements that Copy and Reduce wrote.
    elements : pair of lists of int
        Elements that each rank sent inside its node, and to other nodes.
    messages : int
    flows : Flows or None
    trace : Trace or None

    Raises
    ------
    ValueError
        A step without a price, ranks of different nodes that would share memory, a receive of another length than its
        send, ranks that wait for ever, a message that no rank receives.
    """

    def __init__(
        self,
        program: Callable[[int], Iterable[Round]],
        name: str,
        size: int,
        itemsize: int,
        network: Network,
        trace: bool,
        symmetry: Symmetry | None = None,
        unfinished: bool = False,
        expected_steps: float = 0.0,
    ):
        self.name, self.size, self.unfinished = name, size, unfinished
        simulated, self.minus, representatives = symmetry or Symmetry(size, shift(size))
        self.simulated = simulated
        self.itemsize, self.network = itemsize, network
        self.trace = Trace(itemsize=itemsize) if trace else None
        self.in_rounds = network is ROUNDS
        self.nodes = network.nodes_of(size)
        self.finish = np.full(simulated, np.nan)
        self.barriers, self.copied = [0] * simulated, [0] * simulated
        self.elements = [0] * simulated, [0] * simulated
        self.messages = self.steps_done = 0
        self.bar = ProgressBar(expected_steps)
        self.ranks = [Rank(rank, program(rank)) for rank in range(simulated)]
        self.queue = EventQueue()
        self.memory = NodeMemory(network, self.nodes, itemsize, simulated)
        self.links = network.inside, network.between
        self.costs: tuple[dict, dict] = {}, {}  # inside, between: elements, or those and the route -> MessageCost
        self.adding: dict[int, float] = {}  # elements -> seconds of a RecvReduce
        self.in_barrier: dict[tuple[int, ...], list[Rank]] = {}
        # Whether a send may have to wait for its receive (rendezvous), and how long before its data the request left.
        self.rendezvous = any(link.eager is not None for link in self.links)
        self.request = [link.cost(0).seconds - link.cost(0).sending for link in self.links]
        node_count = max(self.nodes[:simulated]) + 1
        inside = MeasuredPorts(simulated) if network.inside.points else Ports(simulated)
        self.ports = inside, Ports(node_count)
        self.flows = None
        if network.topology or network.between.points:
            shares = self.trace.shares if trace else None
            self.flows = Flows(
                network, self.nodes, node_count, self.queue.at, self.left_channels, shares, representatives
            )
        self.keep_order = bool(network.inside.points), bool(network.between.points)  # latencies depend on lengths
        self.last_arrival: dict[tuple[int, int], float] = {}  # (source, dest) -> when the last message is there
        self.run()

    @property
    def rounds(self) -> list[int]:
        return [rank.round for rank in self.ranks]

    def run(self) -> None:
        """Handle all events in order of time."""
        for rank in self.ranks:
            self.queue.at(0.0, self.start_round, rank)
        collecting = gc.isenabled()
        gc.disable()  # hundreds of thousands of small objects live at once, none in a cycle: 1.5 times faster
        try:
            while self.queue.times:
                self.queue.run_next()
                self.bar.update(self.steps_done)
        finally:
            self.bar.close()
            if collecting:
                gc.enable()
        if self.unfinished:
            self.record_lost()
        else:
            self.refuse_stuck_ranks()
            self.refuse_lost_messages()

    # -------------------------------------------------------------------------------------------- rounds of a rank

    def start_round(self, rank: Rank, now: float) -> None:
        rank.steps = next(rank.rounds, None)
        if rank.steps is None:
            self.finish[rank.number] = now
        elif self.rendezvous:  # ranks that begin at once: all receives are posted before anyone sends
            self.post_receives(rank, now)
            self.queue.at(now, self.run_steps, rank)
        else:
            self.run_steps(rank, now)

    def post_receives(self, rank: Rank, now: float) -> None:
        """The receives of a round are there; the sends that waited for them leave."""
        for step in rank.steps:
            kind = type(step)
            if (kind is not Recv and kind is not RecvReduce) or step.hi <= step.lo:
                continue
            parked = rank.parked.get(step.peer)
            if not parked:
                rank.posted[step.peer] = rank.posted.get(step.peer, 0) + 1
            elif message := parked.pop(0):
                earliest = max(message.ready, now - self.request_seconds(message))
                end = self.leave(message, earliest, now)
                if end is not None:
                    self.one_sent(self.ranks[message.sender], end, now)

    def request_seconds(self, message: Message) -> float:
        """For how long the request of a message that waits for its receive is on its way."""
        if message.between and self.network.topology:
            return message.cost.latency + self.network.between.gap + message.cost.delivery
        return self.request[message.between]

    def run_steps(self, rank: Rank, now: float) -> None:
        """Send, copy, add and compute; then receive."""
        steps, number = rank.steps, rank.number
        self.steps_done += len(steps)
        rank.started = rank.clock = rank.sends_end = now
        rank.receives, rank.received, local = [], 0, None
        if self.trace:
            self.trace.log.append(("begin", number, rank.round))
        for step in steps:
            kind = type(step)
            if kind is Send:
                if step.hi > step.lo:
                    self.send(rank, step, now)
            elif kind is Recv or kind is RecvReduce:
                if step.hi > step.lo:
                    rank.receives.append(step)
            elif kind is Compute or kind is Copy or kind is Reduce:
                if kind is Compute or step.hi > step.lo:
                    local = local or []
                    local.append((step, self.local_seconds(rank, step)))
            elif kind is Barrier and len(steps) == 1:
                self.enter_barrier(rank, step, now)
                return
            else:
                self.refuse_step(rank, step)
        if local:
            self.work(rank, local)
        self.receive(rank)

    def end_round(self, rank: Rank, time: float) -> None:
        if self.trace:
            self.trace.rounds.append(Span(rank.number, rank.round, rank.started, time, tuple(rank.steps)))
            self.trace.log.append(("end", rank.number, rank.round))
        rank.round += 1
        self.queue.at(time, self.start_round, rank)

    # -------------------------------------------------------------------------------------------- local work

    def local_seconds(self, rank: Rank, step: Copy | Reduce | Compute) -> float:
        """How long a step without messages takes, if the rank has the memory to itself."""
        if type(step) is Compute:
            return 1.0 if self.in_rounds else step.seconds
        number = rank.number
        self.copied[number] += step.hi - step.lo
        if step.of is not None or step.to is not None:
            self.refuse_other_node(number, step.of, step)
            self.refuse_other_node(number, step.to, step)
            if self.in_rounds:
                rank.sends_end = max(rank.sends_end, rank.started + 1)
        return self.memory.cost(step, number)

    def work(self, rank: Rank, local: list[tuple[Copy | Reduce | Compute, float]]) -> None:
        """The rank does the local steps of its round, one after the other."""
        computing = copying = 0.0
        for step, seconds in local:
            if type(step) is Compute:
                computing += seconds
            else:
                copying += seconds
        start, busy = rank.clock, copying
        if copying and self.memory.share:
            busy = self.memory.share_bandwidth(rank.number, start, copying)
        rank.clock = start + busy + computing
        if not self.trace:
            return
        for step, seconds in local:
            if self.in_rounds:
                takes_a_round = type(step) is Compute or step.of is not None or step.to is not None
                start, end = rank.started, rank.started + takes_a_round
            else:
                end = start + seconds * (busy / copying if copying and type(step) is not Compute else 1.0)
            self.trace.works.append(Work(rank.number, rank.round, step, start, end))
            start = end

    def enter_barrier(self, rank: Rank, step: Barrier, now: float) -> None:
        """A rank comes to a barrier; with the last one all leave it."""
        group = range(self.size) if step.ranks is None else step.ranks
        for other in group:
            self.refuse_other_node(rank.number, other, step)
        # Where a block of ranks stands for all, a barrier of all is complete when those of the block have come.
        members = tuple(sorted({other % self.simulated for other in group}))
        waiting = self.in_barrier.setdefault(members, [])
        waiting.append(rank)
        if len(waiting) < len(members):
            return
        end = now + (1.0 if self.in_rounds else self.network.barrier_seconds(len(group)))
        for member in self.in_barrier.pop(members):
            self.barriers[member.number] += 1
            if self.trace:
                self.trace.works.append(Work(member.number, member.round, member.steps[0], member.started, end))
            self.end_round(member, end)

    # -------------------------------------------------------------------------------------------- messages

    def send(self, rank: Rank, step: Send, now: float) -> None:
        """The sender's processor hands a message over; it leaves, or waits for its receive."""
        number, peer, elements = rank.number, step.peer, step.hi - step.lo
        between = self.nodes[number] != self.nodes[peer]
        cost = self.message_cost(number, peer, between, elements)
        rank.clock += cost.sending
        self.messages += 1
        self.elements[between][number] += elements
        dest = peer % self.simulated
        source = number if dest == peer else self.minus(number, self.minus(peer, dest))
        nbytes = elements * self.itemsize
        message = Message(number, source, dest, between, step, cost, nbytes, rank.clock, rank.round)
        if self.rendezvous and not self.has_receive(message) and cost.waits:
            rank.pending_sends += 1
            return
        end = self.leave(message, rank.clock, now)
        if self.in_rounds:
            rank.sends_end = now + 1
        elif not cost.buffered:
            if end is None:
                rank.pending_sends += 1
            elif end > rank.sends_end:
                rank.sends_end = end

    def message_cost(self, rank: int, peer: int, between: bool, elements: int) -> MessageCost:
        """What a message costs that is alone on its way."""
        key, route = elements, None
        if between and self.network.topology:
            route = self.network.topology.route(self.nodes[rank], self.nodes[peer])
            key = elements, route.bandwidth, route.latency
        cost = self.costs[between].get(key)
        if cost is None:
            nbytes = elements * self.itemsize
            cost = self.network.cost_over(route, nbytes) if route else self.links[between].cost(nbytes)
            if between and self.flows and cost.waits:  # it moves on its channels, whoever turns to it
                cost = cost._replace(receiving=0.0)
            self.costs[between][key] = cost
        return cost

    def has_receive(self, message: Message) -> bool:
        """Whether the receive of a message is posted; if not, the message is parked at its receiver."""
        receiver = self.ranks[message.dest]
        if receiver.posted.get(message.source):
            receiver.posted[message.source] -= 1
            return True
        receiver.parked.setdefault(message.source, []).append(message if message.cost.waits else None)
        return False

    def leave(self, message: Message, earliest: float, now: float) -> float | None:
        """A message leaves through its port, or onto its channels; return when it has left, if that is known.

        `earliest` is before `now` only for a message that waited for its receive: it counts from when the request for
        that was made.
        """
        if message.between and self.flows:
            message.head_start = max(0.0, now - earliest)
            if earliest > now:
                self.queue.at(earliest, self.flows.send, message)
            else:
                self.flows.send(message, now)
            return None
        port = self.nodes[message.sender] if message.between else message.sender
        end, first_byte = self.ports[message.between].send(message, port, earliest)
        self.queue.at(self.in_order(message, first_byte if first_byte > now else now), self.reach_port, message)
        return end

    def left_channels(self, message: Message, now: float, there: float) -> None:
        """The last byte of a message has left its channels; it reaches the receiver at `there`."""
        self.queue.at(self.in_order(message, there), self.arrive, message)
        if not message.cost.buffered:
            self.one_sent(self.ranks[message.sender], now, now)

    def in_order(self, message: Message, time: float) -> float:
        """When a message is there: not before one of the same ranks that was sent before it, but may be longer."""
        if not self.keep_order[message.between]:
            return time
        pair = message.source, message.dest
        self.last_arrival[pair] = time = max(time, self.last_arrival.get(pair, 0.0))
        return time

    def one_sent(self, rank: Rank, end: float, now: float) -> None:
        """A send has left for which the end of the rank's round may wait."""
        rank.sends_end = max(rank.sends_end, end)
        rank.pending_sends -= 1
        if rank.done and not rank.pending_sends:
            rank.done = False
            self.end_round(rank, max(rank.clock, rank.sends_end, now))

    def reach_port(self, message: Message, now: float) -> None:
        """The first byte of a message reaches the receiver's port."""
        port = self.nodes[message.dest] if message.between else message.dest
        message.arrived = self.ports[message.between].receive(message, port)
        self.deliver(message)

    def arrive(self, message: Message, now: float) -> None:
        """The last byte of a message has come over its channels."""
        message.arrived = now + message.cost.delivery
        self.deliver(message)

    def deliver(self, message: Message) -> None:
        rank = self.ranks[message.dest]
        rank.inbox.setdefault(message.source, []).append(message)
        if rank.awaited == message.source:
            rank.awaited = -1
            self.receive(rank)

    def receive(self, rank: Rank) -> None:
        """Take the messages of a round in the listed order, until one has not arrived."""
        receives, inbox = rank.receives, rank.inbox
        while rank.received < len(receives):
            step = receives[rank.received]
            arrived = inbox.get(step.peer)
            if not arrived:
                rank.awaited = step.peer
                return
            self.take(rank, step, arrived.pop(0))
            rank.received += 1
        if rank.pending_sends:
            rank.done = True
        else:
            self.end_round(rank, rank.sends_end if rank.sends_end > rank.clock else rank.clock)

    def take(self, rank: Rank, step: Recv | RecvReduce, message: Message) -> None:
        """The receiver's processor takes a message, and adds it if the step says so."""
        elements = message.send.hi - message.send.lo
        if elements != step.hi - step.lo:
            raise ValueError(
                f"{self.name}: rank {message.source} sends {elements} elements where rank {rank.number} has {step}"
            )
        clock, adding = rank.clock + message.cost.receiving, 0.0
        if message.arrived > clock:
            clock = message.arrived
        if type(step) is RecvReduce:
            if elements not in self.adding:
                self.adding[elements] = self.network.reducing(elements * self.itemsize)
            adding = self.adding[elements]
        if self.trace:
            self.trace.flights.append(self.flight(rank, step, message, clock, adding))
        rank.clock = clock + adding

    def flight(self, rank: Rank, step: Recv | RecvReduce | None, m: Message, end: float, adding: float) -> Flight:
        received_in = rank.round if step else -1
        times = m.sent_in, received_in, m.ready, m.arrived, adding
        return Flight(m.source, rank.number, m.send, step, m.start, end, *times)

    # -------------------------------------------------------------------------------------------- what is wrong

    def refuse_other_node(self, rank: int, other: int | None, step: Copy | Reduce | Barrier) -> None:
        """Ranks of different nodes share no memory."""
        if other is not None and self.nodes[other] != self.nodes[rank]:
            raise ValueError(
                f"{self.name}: rank {rank} shares no memory with rank {other}, as this network has "
                f"{self.network.ranks_per_node} ranks a node: {step}"
            )

    def refuse_step(self, rank: Rank, step: Any) -> None:
        reason = f"{step!r} is a step that has no price"
        if type(step) is Barrier:
            reason = f"{step!r} must be the only step of its round"
        raise ValueError(f"{self.name}: rank {rank.number}: {mistake_in(rank.steps) or reason}")

    def refuse_stuck_ranks(self) -> None:
        stuck = [rank for rank in self.ranks if math.isnan(self.finish[rank.number])]
        if not stuck:
            return
        absent = {}  # rank in a barrier -> those that do not come
        for members, waiting in self.in_barrier.items():
            missing = sorted(set(members) - {rank.number for rank in waiting})
            absent |= {rank.number: missing for rank in waiting}

        def waits_for(rank):
            if rank.number in absent:
                return f"{rank.number} in a Barrier for {absent[rank.number]}"
            return f"{rank.number} for {rank.awaited if rank.awaited >= 0 else 'the receive of a send'}"

        who = ", ".join(map(waits_for, stuck[:4]))
        raise ValueError(f"{self.name}: {len(stuck)} of {self.size} ranks wait for ever, rank {who}")

    def refuse_lost_messages(self) -> None:
        for rank in self.ranks:
            for source, messages in rank.inbox.items():
                if messages:
                    raise ValueError(
                        f"{self.name}: nobody receives the message from rank {source} to rank {rank.number}"
                    )

    def record_lost(self) -> None:
        for rank in self.ranks:
            for messages in rank.inbox.values():
                self.trace.lost += [self.flight(rank, None, m, m.arrived, 0.0) for m in messages]
