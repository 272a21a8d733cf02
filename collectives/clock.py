"""The clock: what an algorithm costs on a network of any size, read off its own steps.

    >>> price(ring_allreduce, size=1024, count=25_000_000, itemsize=4, network="gpu-100g").seconds

Every rank is walked through its rounds under LogGP (Alexandrov et al. 1995) with two levels; see networks.py for the
parameters. A message is sent in overhead seconds of the sender's processor, waits until its port is free, holds it for
the gap and n beta, reaches the receiver's port a latency later, waits for that, holds it as long, and takes overhead
seconds of the receiver's processor; a reduction then takes n gamma, a copy n copy. Ports serve first come, first
served; the ranks of a node share the node's. Sends do not wait for the receive to be posted. On Network.hockney the
result is the closed form of the literature, messages alpha + moved beta + reduced gamma (test_clock.py).

Cost: about 10 us a message, so 16,384 ranks of a logarithmic algorithm take a few seconds. A ring of so many ranks
sends 500 million messages: there one node stands for all, as every node does the same with its neighbours.
"""

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from collectives.algorithms import ALGORITHMS, Algorithm
from collectives.networks import NETWORKS, ROUNDS, Network
from collectives.steps import Blocks, Copy, Recv, RecvReduce, Reduce, Round, Send

__all__ = ["Flight", "Price", "Span", "Trace", "price"]

WALK_AT_MOST = 4_000_000  # steps; about 10 s


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

    `log` holds ("begin" or "end", rank, round) in causal order: a round ends after those it received from
    began.
    """

    rounds: list[Span] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    log: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Price:
    """What an algorithm costs.

    Attributes
    ----------
    seconds : float
        Until the last rank has finished.
    finish : ndarray (size,)
        Seconds until each rank has finished.
    rounds : int
        Most rounds of any rank.
    messages, bytes : int
        Sent by all ranks together.
    bytes_between : int
        Those of them that left a node.
    busiest : int
        Most bytes that one rank sent.
    method : str
        "walk" (every rank), "one node for all" (shift symmetry) or "closed form".
    trace : Trace or None
        Every round and message, where asked for.
    """

    seconds: float
    finish: np.ndarray
    rounds: int
    messages: int
    bytes: int
    bytes_between: int
    busiest: int
    method: str
    trace: Trace | None = None

    def __str__(self):
        return (
            f"{self.seconds * 1e6:,.1f} us, {self.rounds:,} rounds, {self.messages:,} messages,"
            f" {self.bytes:,} bytes ({self.bytes_between:,} between nodes), by {self.method}"
        )


def price(
    algorithm: Algorithm | Callable[..., Iterable[Round]],
    size: int,
    count: Blocks,
    itemsize: int = 4,
    network: Network | str = "workstation",
    trace: bool = False,
    **options,
) -> Price:
    """What `algorithm` costs on `size` ranks of `network`.

    Where all ranks together have more than four million steps, one node is walked for all of them, if a sample of the
    others does the same with its neighbours (`count` is then rounded up to a multiple of `size`); failing that, the
    closed form of the registry is taken, on one level: the network's, or the node's where all ranks share one.

    Parameters
    ----------
    algorithm : generator function or entry of ALGORITHMS
        algorithm(rank, size, count, **options) yields rounds (steps.py).
    size, count, itemsize : int
        Ranks; elements of the vector, or a list of blocks; bytes of an element.
    network : Network or str
        Or the name of one in NETWORKS.
    trace : bool
        Keep every round and message (drawing.py reads them); always walks every rank.
    **options
        For the algorithm: root, segment and the like.

    Raises
    ------
    ValueError
        A rank waits for ever, a message nobody receives or of another length than its receive (ask
        `collectives.check`), an unknown network, or too many steps and neither symmetry nor a closed form.
    """
    if isinstance(network, str):
        if network not in NETWORKS:
            raise ValueError(f"no network named {network!r}: give a Network or one of {', '.join(NETWORKS)}")
        network = NETWORKS[network]
    if size < 1 or itemsize < 1:
        raise ValueError(f"need size >= 1 and itemsize >= 1, not {size} and {itemsize}")
    name, rounds, closed_form = read(algorithm)

    def walk(mine, count):
        return _Walk(partial(_rounds_of, rounds, size, count, options), name, size, itemsize, network, mine, trace)

    if trace or _steps_in_all(partial(_rounds_of, rounds, size, count, options), size) <= WALK_AT_MOST:
        return walk(size, count).price("walk")
    node = network.ranks_per_node if network.ranks_per_node < size else 1  # in one node all ranks are alike
    if size % node == 0:
        rounded = -(-count // size) * size if isinstance(count, int) else count
        if _nodes_are_alike(partial(_rounds_of, rounds, size, rounded, options), size, node):
            return walk(node, rounded).price("one node for all")
    if closed_form:
        elements = count if isinstance(count, int) else max(hi for _, hi in count)
        link = network.inside if network.ranks_per_node >= size else network.between
        cost = closed_form(size, elements)
        seconds = cost.seconds(link.alpha, link.beta * itemsize, network.gamma * itemsize)
        return Price(seconds, np.full(size, seconds), 0, 0, 0, 0, 0, "closed form")
    raise ValueError(
        f"{size} ranks of {name} take more than {WALK_AT_MOST:,} steps, the nodes differ from each other, and it has no"
        " closed form: price fewer ranks or larger segments"
    )


def read(algorithm) -> tuple[str, Callable, Callable | None]:
    """(name in words, generator function, closed form or None) of an entry of the registry or a generator function."""
    if isinstance(algorithm, Algorithm):
        algorithm = algorithm.rounds
    function = algorithm
    while isinstance(function, partial):
        function = function.func
    for operation, entries in ALGORITHMS.items():
        for entry in entries.values():
            if entry.rounds is function:
                name = f"{entry.name} {operation}".replace("_", " ")
                return name, algorithm, entry.cost if function is algorithm else None
    return getattr(function, "__name__", type(function).__name__).replace("_", " "), algorithm, None


def _rounds_of(rounds, size, count, options, rank):
    if count is None:  # a barrier has no vector
        return rounds(rank, size, **options)
    return rounds(rank, size, count, **options)


def _steps_in_all(program, size) -> float:
    """Estimated from a few ranks: the first and the longest count once, the median stands for all others."""
    sample = sorted({0, 1 % size, size // 3, size // 2, size - 1})
    steps = [_length(program(rank)) for rank in sample]
    return max(steps) + steps[0] + float(np.median(steps)) * size


def _length(rounds) -> int:
    total = 0
    for steps in rounds:
        total += len(steps)
        if total > WALK_AT_MOST:
            break
    return total


def _nodes_are_alike(program, size, node) -> bool:
    """Whether rank r + k node does what r does with all peers shifted by k node, for a few k and every r of a node.

    Only kinds, peers and lengths matter to the clock. A sample, not a proof: the first, a middle and the last node.
    """

    def relative(rank):
        for steps in program(rank):
            yield [(type(s), (getattr(s, "peer", rank) - rank) % size, s.hi - s.lo) for s in steps if s.hi > s.lo]

    nodes = sorted({1 % (size // node), (size // node) // 2, size // node - 1} - {0})
    for rank in range(node):
        others = (relative(rank + k * node) for k in nodes)
        for rows in zip_longest(relative(rank), *others):
            if any(row != rows[0] for row in rows[1:]):
                return False
    return True


class _Walk:
    """Walk ranks 0 .. mine - 1.

    Where mine < size these are one node that stands for all: what a rank sends to a rank of another node, its
    own node gets from the rank as far away on the other side, at the same moment.
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
        # Two kinds of events in order of time: a rank begins its next round (flight is None), or the first
        # byte of a message reaches the port of the rank. Ranks in step have events at equal times, hence a
        # heap of the distinct times and a list for each. Written flat, with local names: this loop is all of
        # the cost.
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

    def price(self, method):
        copies = self.size // self.mine
        sent = [(near + far) * self.itemsize for near, far in zip(*self.elements, strict=True)]
        return Price(
            seconds=float(self.finish.max()),
            finish=np.tile(self.finish, copies),
            rounds=max(self.rounds),
            messages=self.messages * copies,
            bytes=sum(sent) * copies,
            bytes_between=sum(self.elements[True]) * self.itemsize * copies,
            busiest=max(sent),
            method=method,
            trace=self.trace,
        )
