"""Messages that share channels: each gets its max-min fair share, from the moment one starts until one ends.

Rates are max-min fair if no message can be faster without making slower one that is no faster (Bertsekas and Gallager
1992, chapter 6). *Progressive filling* finds them: all rates grow together until a channel is full; what crosses it
stays at that rate, the others grow on. TCP and credit-based fabrics come near it, and so does SimGrid, against which
tests hold it (tests/collectives/test_simgrid.py).

A message takes bandwidth from when it leaves its sender, and is there a latency after its last byte has left. Messages
from one rank to another go one after the other, as on one connection: they are one `Flow`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from collectives.pricing.networks import MessageCost, Network
from collectives.pricing.ports import Message
from collectives.pricing.trace import Share

EQUAL = 1e-12  # relative: two shares that differ by less are one
TOLERANCE = 1e-9  # relative, of sums of rates
FULL = 1 + TOLERANCE  # times its bandwidth: what a channel may be asked for before its flows must share it
NEVER = float("inf")


def max_min_rates(
    routes: Sequence[Sequence[Hashable]], capacities: Mapping[Hashable, Any], limits: Sequence
) -> list[tuple[Any, Hashable | None]]:
    """Return the max-min fair rate of every flow and its bottleneck, by progressive filling.

    Parameters
    ----------
    routes : for each flow its channels; one that it crosses twice counts twice
    capacities : channel -> most that all flows together may take; of any number type, Fractions too
    limits : for each flow the most that it can take, math.inf for no limit

    Returns
    -------
    list of (rate, bottleneck)
        The bottleneck is a channel that is full, None where the flow has reached its limit.

    Examples
    --------
    >>> max_min_rates(["AB", "A", "B", "B"], {"A": 10, "B": 12}, [100] * 4)
    [(4.0, 'B'), (6.0, 'A'), (4.0, 'B'), (4.0, 'B')]
    """
    found: list = [None] * len(routes)
    left = dict(capacities)
    crossing: dict[Hashable, list[int]] = {}
    for flow, route in enumerate(routes):
        for channel in route:
            crossing.setdefault(channel, []).append(flow)
    live = {channel: len(flows) for channel, flows in crossing.items()}
    by_limit = deque(sorted(range(len(routes)), key=limits.__getitem__))
    while True:
        while by_limit and found[by_limit[0]] is not None:
            by_limit.popleft()
        if not by_limit:
            return found
        shares = {channel: left[channel] / number for channel, number in live.items()}
        smallest = min(shares.values(), default=limits[by_limit[0]])
        if limits[by_limit[0]] <= smallest:
            smallest = limits[by_limit[0]]
            stopped = [(by_limit.popleft(), None)]
        else:
            nearly = smallest * (1 + EQUAL) if isinstance(smallest, float) else smallest
            stopped = [(flow, channel) for channel in shares if shares[channel] <= nearly for flow in crossing[channel]]
        for flow, bottleneck in stopped:
            if found[flow] is not None:
                continue
            found[flow] = smallest, bottleneck
            for channel in routes[flow]:
                left[channel] -= smallest
                live[channel] -= 1
                if not live[channel]:
                    del live[channel]


class Flow:
    """The messages from one rank to another: the first of them is moving.

    Attributes
    ----------
    channels, limit : what it crosses, and the most that it can take of them
    rate : what it takes, as part of `limit`
    bottleneck : the full channel on which nothing is faster; None where it has its limit
    left : seconds that its first message still needs at full rate
    since : when `left` was true
    end, booked : when the message is over if nothing changes, and when `look` will be called
    alone : whether the message had full rate all the time
    bytes : that have been sent so far
    """

    __slots__ = (
        "alone",
        "booked",
        "bottleneck",
        "bytes",
        "channels",
        "end",
        "into",
        "left",
        "limit",
        "messages",
        "out",
        "pair",

        "rate",
        "since",
        "started",
    )  # fmt: skip

    def __init__(self, pair: tuple[int, int], channels: tuple[int, ...], limit: float, out: int, into: int):
        self.pair, self.channels, self.limit, self.out, self.into = pair, channels, limit, out, into
        self.messages: deque[Message] = deque()
        self.started = self.left = self.since = self.end = self.booked = 0.0
        self.rate, self.alone, self.bottleneck, self.bytes = 1.0, True, None, 0


class Flows:
    """All messages that are moving between the hosts of a network.

    Parameters
    ----------
    network : Network
        With a topology, whose channels are shared; else every node has one channel out and one in, of rate 1.
    hosts : sequence of int
        The host or node of each rank.
    nodes : int
        How many there are.
    at : callable (seconds, handler, subject) -> None
        Calls handler(subject, seconds) at that time.
    left : callable (message, now, there) -> None
        Called when the last byte of a message has left, and when it will be there.
    trace : list of Share, optional
        Where the shares are recorded.
    representatives : dict, optional
        Channel -> the channel that stands for it, where a block of ranks stands for all.
    """

    def __init__(
        self,
        network: Network,
        hosts: Sequence[int],
        nodes: int,
        at: Callable[[float, Callable, Any], None],
        left: Callable[[Message, float, float], None],
        trace: list[Share] | None = None,
        representatives: dict[int, int] | None = None,
    ):
        self.representatives = representatives or {}
        self.at, self.left, self.trace, self.topology, self.hosts = at, left, trace, network.topology, hosts
        if self.topology:
            self.capacities = [channel.bandwidth for channel in self.topology.channels]
        else:
            self.capacities = [1.0] * (2 * nodes)
        self.measured = MeasuredNodePorts(nodes, network.between.credit) if network.between.points else None
        self.nodes = nodes
        self.asked = [0.0] * len(self.capacities)  # what its flows would take if each were alone
        self.most = [FULL * capacity for capacity in self.capacities]
        self.crossing: list[dict[Flow, None]] = [{} for _ in self.capacities]
        self.dirty: set[int] = set()  # channels on which something has changed since the last `share`
        self.flows: dict[tuple[int, int], Flow] = {}

    def send(self, message: Message, now: float) -> None:
        """A message leaves, behind those that are on their way between the same ranks."""
        pair = message.source, message.dest
        flow = self.flows.get(pair)
        if flow is None:
            flow = self.flows[pair] = self._flow(message)
        flow.bytes += message.nbytes
        flow.messages.append(message)
        if len(flow.messages) > 1:
            return
        shared, limit, asked, most = False, flow.limit, self.asked, self.most
        for channel in flow.channels:
            self.crossing[channel][flow] = None
            asked[channel] += limit
            if asked[channel] > most[channel]:
                shared = True
                self._change(channel, now)
        if self.measured:
            self.measured.leaves(flow)
        flow.rate, flow.bottleneck = 1.0, None
        self._begin(flow, now)
        if not shared:
            flow.end = flow.booked = end = now + flow.left
            self.at(end, self.look, flow)

    def _flow(self, message: Message) -> Flow:
        """The messages of a pair of ranks: over the route of the topology, or out of one node and into another."""
        out, into = self.hosts[message.sender], self.hosts[message.dest]
        channels, limit = (out, self.nodes + into), 1.0
        if self.topology:
            channels, limit, _ = self.topology.route(out, self.hosts[message.send.peer])
            channels = tuple(self.representatives.get(channel, channel) for channel in channels)
        return Flow((message.source, message.dest), channels, limit, out, into)

    def look(self, flow: Flow, now: float) -> None:
        """The first message of a flow is over, unless its rate has changed since this was planned."""
        if flow.booked != now:
            return
        if flow.end > now:
            flow.booked = flow.end
            self.at(flow.end, self.look, flow)
            return
        flow.booked = NEVER
        message, started = flow.messages.popleft(), flow.started
        message.start, cost = started, message.cost
        if self.measured:
            there = now + cost.latency + self.measured.crossing(flow, cost, now)
        else:  # what is alone costs the same to the last digit as where no channel is shared
            there = started + cost.latency + cost.held if flow.alone else now + cost.latency
        if self.trace is not None:
            self._record(flow, now)
        if flow.messages:
            self._begin(flow, now)
            self._ends_at(flow, now + flow.left / flow.rate)
        else:
            self._stop(flow, now)
        self.left(message, now, there)

    def _stop(self, flow: Flow, now: float) -> None:
        """A flow has no more messages: its channels are the others'."""
        asked, most = self.asked, self.most
        for channel in flow.channels:
            if asked[channel] > most[channel]:
                self._change(channel, now)
            here = self.crossing[channel]
            del here[flow]
            asked[channel] = asked[channel] - flow.limit if here else 0.0
        if self.measured:
            self.measured.left(flow, now)

    def carried(self) -> list[float]:
        """Return the bytes that each channel has carried."""
        total = [0] * len(self.capacities)
        for flow in self.flows.values():
            for channel in flow.channels:
                total[channel] += flow.bytes
        for channel, representative in self.representatives.items():
            total[channel] = total[representative]
        return total

    def share(self, _: None, now: float) -> None:
        """Divide the channels anew on which something has changed.

        Rates are max-min fair where every flow has a bottleneck: its own limit, or a full channel on which nothing is
        faster. So it is enough to begin with the flows of the changed channels, while all others keep their rates, and
        to take in those that have lost their bottleneck by it, or are faster at that of another, until there are none.
        """
        changed: dict[Flow, None] = {}
        for channel in self.dirty:
            changed.update(self.crossing[channel])
        self.dirty.clear()
        new = changed
        while new:
            contended = {flow: self._contended(flow) for flow in changed}
            touched = dict.fromkeys(channel for channels in contended.values() for channel in channels)
            others = {channel: [f for f in self.crossing[channel] if f not in changed] for channel in touched}
            left = {c: self.capacities[c] - sum([f.rate * f.limit for f in others[c]]) for c in touched}
            limits = [flow.limit for flow in changed]
            found = dict(zip(changed, max_min_rates(list(contended.values()), left, limits), strict=True))
            new = self._without_bottleneck(found, contended, others)
            changed.update(new)
        for flow in changed:
            rate, flow.bottleneck = found[flow]
            rate = 1.0 if flow.bottleneck is None else rate / flow.limit
            if rate != flow.rate:
                self._record(flow, now)
                flow.left -= (now - flow.since) * flow.rate
                flow.since, flow.rate, flow.alone = now, rate, False
                self._ends_at(flow, now + max(0.0, flow.left) / rate)
            elif flow.end == NEVER:  # it has just begun
                self._ends_at(flow, now + flow.left / rate)

    def _contended(self, flow: Flow) -> list[int]:
        """The channels of a flow that cannot give all their flows what these would take alone."""
        return [c for c in flow.channels if self.asked[c] > self.most[c]]

    def _without_bottleneck(self, found, contended, others) -> dict[Flow, None]:
        """The other flows that lose their bottleneck if the `found` rates hold, or are faster at one of those."""
        fastest: dict[int, float] = {}
        taken: dict[int, float] = {}
        for flow, (rate, _) in found.items():
            for channel in contended[flow]:
                fastest[channel] = max(fastest.get(channel, 0.0), rate)
                taken[channel] = taken.get(channel, 0.0) + rate
        slowest: dict[int, float] = {}  # of those that have their bottleneck there
        for rate, bottleneck in found.values():
            if bottleneck is not None:
                slowest[bottleneck] = rate
        lost = {}
        for channel, flows in others.items():
            if not flows:
                continue
            rates = [flow.rate * flow.limit for flow in flows]
            most = max(fastest[channel], *rates) * (1 - TOLERANCE)
            full = taken[channel] + sum(rates) > self.capacities[channel] * (1 - TOLERANCE)
            least = slowest.get(channel, NEVER) * (1 + TOLERANCE)
            for flow, rate in zip(flows, rates, strict=True):
                if rate > least or (flow.bottleneck == channel and not (full and rate >= most)):
                    lost[flow] = None
        return lost

    def _change(self, channel: int, now: float) -> None:
        if not self.dirty:
            self.at(now, self.share, None)
        self.dirty.add(channel)

    def _begin(self, flow: Flow, now: float) -> None:
        message = flow.messages[0]
        work = message.cost.held
        if self.measured:
            work = self.measured.work(flow, now)
        flow.started = flow.since = now
        flow.left, flow.end, flow.booked = max(0.0, work - message.head_start), NEVER, NEVER
        flow.alone = flow.rate == 1.0 and not message.head_start

    def _ends_at(self, flow: Flow, end: float) -> None:
        flow.end = end
        if end < flow.booked:
            flow.booked = end
            self.at(end, self.look, flow)

    def _record(self, flow: Flow, now: float) -> None:
        if self.trace is not None and now > flow.since:
            self.trace.append(Share(*flow.pair, flow.channels, flow.since, now, flow.rate * flow.limit))


class MeasuredNodePorts:
    """What measured ports of nodes do besides: they save up sending while they rest, and slow the other direction.

    Parameters
    ----------
    nodes : int
    credit : float
        Seconds of sending that a rested port has saved up (`Link.credit`).
    """

    def __init__(self, nodes: int, credit: float):
        self.credit = credit
        self.leaving: list[dict[Flow, None]] = [{} for _ in range(nodes)]
        self.rested = [0.0] * nodes, [0.0] * nodes  # out, in: when the port has rested
        self.silent = [(0.0, -1)] * nodes  # since when nothing leaves, and where the last message went

    def leaves(self, flow: Flow) -> None:
        """A flow begins to leave its node."""
        self.leaving[flow.out][flow] = None

    def left(self, flow: Flow, now: float) -> None:
        """Nothing of a flow is left to leave its node."""
        del self.leaving[flow.out][flow]
        self.silent[flow.out] = now, flow.into

    def work(self, flow: Flow, now: float) -> float:
        """Seconds that the first message of a flow takes at full rate."""
        cost = flow.messages[0].cost
        work = cost.held
        if self.credit:
            for rested, port in zip(self.rested, (flow.out, flow.into), strict=True):
                saved = max(0.0, self.credit - max(0.0, rested[port] - now))
                work = max(work, cost.gap - saved)
                rested[port] = max(rested[port], now) + cost.gap
        return work

    def crossing(self, flow: Flow, cost: MessageCost, now: float) -> float:
        """Seconds more that a message takes for what the receiving node has sent meanwhile."""
        answers = self.leaving[flow.into]
        until, last = self.silent[flow.into]
        back = all(other.into == flow.out for other in answers) if answers else last == flow.out
        together = (now if answers else until) - flow.started
        return (cost.exchange if back else cost.crossing) * max(0.0, min(cost.held, together))
