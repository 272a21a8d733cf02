"""All ranks in one process: runs a schedule on symbolic values and finds what is wrong with it.

A value is a tuple of (rank, index) pairs, one for every operand in it, and (+) joins tuples. So one run proves for all
data and all operations that every rank contributed exactly once, and in rank order where that matters.

Sends are *eager* (they finish at once) or *synchronous* (they finish when the receiver takes the message: what MPI may
do with any send, and does with long ones). A schedule that finishes with synchronous sends finishes with eager ones,
with the same result: a message carries what its sender held when the round began, and matches in listed order, so
timing decides nothing (a Kahn network).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from collectives.steps import Copy, Recv, RecvReduce, Reduce, Round, Send, Step

Value = tuple[tuple[int, int], ...]
UNSET = None  # scratch nobody has written
ENDLESS = 100_000  # rounds, for schedules of which nobody says how many they need at most


class ScheduleError(AssertionError):
    """A schedule that breaks a rule, hangs, or computes something else than it should."""


class RuleBroken(ScheduleError):
    """Steps of one round that conflict, reach outside a buffer, or read what nobody wrote."""


class LengthMismatch(ScheduleError):
    """A message of another length than its receiver expects."""


class LeftOver(ScheduleError):
    """Messages that nobody received."""


class Deadlock(ScheduleError):
    """Ranks that wait for ever.

    Attributes
    ----------
    waits : dict from a waiting rank to the ranks it waits for
    cycle : list of ranks, the first repeated at the end; empty where a rank waits for one that has finished
    """

    def __init__(self, message, waits, cycle):
        super().__init__(message)
        self.waits, self.cycle = waits, cycle


@dataclass
class Stats:
    """What a run counted, a list entry for each rank; elements, not bytes."""

    rounds: list[int]
    messages: list[int]
    sent: list[int]
    received: list[int]
    reduced: list[int]

    @property
    def moved(self) -> int:
        """The most elements that any rank sent or received: what its link must carry in one direction."""
        return max(max(self.sent), max(self.received))


@dataclass
class Rank:
    """Where one rank stands."""

    rounds: Iterator[Round]
    buffers: dict[str, list]
    given: set[str]  # the buffers that are not scratch
    round: int = -1  # the round it is in, from 0
    busy: int = 0  # rounds so far in which it did something
    steps: list[Step] | None = None  # of this round; None between rounds
    awaited: list[tuple[int, Step]] = field(default_factory=list)  # receives without their message, with their place
    arrived: dict[int, list] = field(default_factory=dict)  # place of a receive in the round -> payload
    unsent: list["Message"] = field(default_factory=list)  # messages of this round that nobody has taken
    finished: bool = False


@dataclass(eq=False)
class Message:
    payload: list
    send: Send
    sender: Rank


def simulate(
    program: Callable[[int], Iterable[Round]],
    buffers: list[dict[str, list]],
    synchronous: bool = True,
    most: int = ENDLESS,
) -> Stats:
    """Run program(rank) for every rank; `buffers` is changed in place.

    Parameters
    ----------
    program : rank -> rounds of that rank
    buffers : for each rank, name -> list of values that have `+`. A buffer that is not named is scratch.
    synchronous : whether a send finishes only when its message is taken
    most : rounds of a rank, not counting empty ones, after which the schedule is refused as endless; counting them, so
        many for each rank

    Raises
    ------
    RuleBroken, LengthMismatch, LeftOver, Deadlock
        with rank, round (from 0) and steps
    """
    ranks = [Rank(rounds_of(r, program), held, set(held)) for r, held in enumerate(buffers)]
    stats = Stats(*([0] * len(ranks) for _ in range(5)))
    wires: dict[tuple[int, int], deque] = {}
    ready = deque(range(len(ranks)))
    while ready:
        r = ready.popleft()
        rank = ranks[r]
        while not rank.finished:
            if rank.steps is None:
                if not enter_round(r, ranks, wires, stats):
                    break
                refuse_endless(r, rank, most, len(ranks))
                ready.extend({message.send.peer for message in rank.unsent})
            senders = take_messages(r, rank, wires, stats)
            if synchronous:
                ready.extend(sender for sender in senders if not ranks[sender].unsent)
            if rank.awaited or (synchronous and rank.unsent):
                break
            apply(r, rank, stats)
            rank.steps, rank.unsent = None, []
    tell_deadlock(ranks, synchronous)
    tell_leftover(wires)
    return stats


def rounds_of(r, program) -> Iterator[Round]:
    rounds = program(r)
    if not isinstance(rounds, Iterable):
        raise TypeError(f"rank {r}: an algorithm is a generator of rounds, this one returned {rounds!r}")
    return iter(rounds)


def enter_round(r, ranks, wires, stats) -> bool:
    """Take the next round of rank r, check it and post its sends; False where there is none."""
    rank = ranks[r]
    steps = next(rank.rounds, None)
    if steps is None:
        rank.finished = True
        return False
    rank.round += 1
    stats.rounds[r] += 1
    rank.steps = check_round(r, rank, steps, len(ranks))
    rank.busy += bool(rank.steps)
    rank.awaited = [(i, s) for i, s in enumerate(rank.steps) if isinstance(s, Recv | RecvReduce)]
    rank.arrived = {}
    rank.unsent = [Message(rank.buffers[s.buf][s.lo : s.hi], s, rank) for s in rank.steps if isinstance(s, Send)]
    for message in rank.unsent:
        wires.setdefault((r, message.send.peer), deque()).append(message)
        stats.messages[r] += 1
        stats.sent[r] += len(message.payload)
    return True


def refuse_endless(r, rank, most, size):
    """A generator that yields for ever: doing something, or empty rounds."""
    if rank.busy > most:
        raise RuleBroken(f"rank {r} is in its round {rank.round:,}: the schedule does not end; {most:,} would be many")
    if rank.round >= most * size:
        raise RuleBroken(
            f"rank {r} is in its round {rank.round:,}, of which {rank.busy:,} had steps with elements: it does not end"
        )


def take_messages(r, rank, wires, stats) -> set[int]:
    """Match the awaited receives in listed order with what lies on the wires; returns whose messages were taken."""
    missing, taken_from, blocked = [], set(), set()
    for i, s in rank.awaited:
        wire = wires.get((s.peer, r))
        if s.peer in blocked or not wire:
            blocked.add(s.peer)
            missing.append((i, s))
            continue
        message = wire.popleft()
        if len(message.payload) != s.hi - s.lo:
            raise LengthMismatch(
                f"rank {r}, round {rank.round}: {s} expects {s.hi - s.lo} elements, but rank {s.peer} sends "
                f"{len(message.payload)} in its round {message.sender.round}: {message.send}"
            )
        stats.received[r] += s.hi - s.lo
        rank.arrived[i] = message.payload
        if message in message.sender.unsent:  # an eager sender may be rounds further
            message.sender.unsent.remove(message)
        taken_from.add(s.peer)
    rank.awaited = missing
    return taken_from


def apply(r, rank, stats):
    """Let the writes of a finished round appear; what they read is what was there before it."""
    sources = {
        i: rank.buffers[s.src][s.at : s.at + s.hi - s.lo]
        for i, s in enumerate(rank.steps)
        if isinstance(s, Copy | Reduce)
    }
    for i, s in enumerate(rank.steps):
        if isinstance(s, Send):
            continue
        got = rank.arrived[i] if i in rank.arrived else sources[i]
        held = rank.buffers[s.buf]
        if isinstance(s, RecvReduce | Reduce):
            pairs = list(zip(got, held[s.lo : s.hi], strict=True))
            got = [a + b for a, b in pairs] if s.left else [b + a for a, b in pairs]
            stats.reduced[r] += len(got)
        held[s.lo : s.hi] = got


def check_round(r, rank, steps, size) -> list[Step]:
    """The steps of a round that have elements, after the rules of steps.py have been checked."""

    def broken(what):
        raise RuleBroken(f"rank {r}, round {rank.round}: {what}")

    if not isinstance(steps, tuple | list) or isinstance(steps, Step):
        broken(f"a round is a tuple of steps, not {steps!r}")
    for s in steps:
        if not isinstance(s, Step):
            broken(f"{s!r} is not a step")
    steps = [s for s in steps if s.hi > s.lo]
    reads, writes, targets = [], [], []  # (buffer, lo, hi, step); targets: what a reduction adds to
    for s in steps:
        if isinstance(s, Send | Recv | RecvReduce) and (not 0 <= s.peer < size or s.peer == r):
            alone = ": one rank has nobody to send to or receive from" if size == 1 else ""
            broken(f"{s} names rank {s.peer}, which must be another rank of 0 ... {size - 1}{alone}")
        if isinstance(s, Copy | Reduce):
            reads.append((s.src, s.at, s.at + s.hi - s.lo, s))
        if isinstance(s, RecvReduce | Reduce):
            targets.append((s.buf, s.lo, s.hi, s))
        (reads if isinstance(s, Send) else writes).append((s.buf, s.lo, s.hi, s))
    for name, lo, hi, s in reads + writes:
        held = rank.buffers.setdefault(name, [])
        if name not in rank.given:
            held.extend([UNSET] * (hi - len(held)))
        if not 0 <= lo <= hi <= len(held):
            broken(f"{s} reaches outside {name}, which has {len(held)} elements")
    for name, lo, hi, s in reads + targets:
        if any(value is UNSET for value in rank.buffers[name][lo:hi]):
            broken(f"{s} reads elements of {name} that nothing wrote")

    for i, (name, lo, hi, s) in enumerate(writes):
        reduces = isinstance(s, RecvReduce | Reduce)
        for other, low, high, t in writes[:i]:
            if name == other and lo < high and low < hi and not (reduces and isinstance(t, RecvReduce | Reduce)):
                broken(f"{t} and {s} write the same elements")
        for other, low, high, t in reads:
            if name == other and lo < high and low < hi and not (reduces and isinstance(t, Send)):
                broken(f"{s} writes elements that {t} reads")
    return steps


def tell_deadlock(ranks, synchronous):
    """Raise Deadlock, with who waits for whom and the cycle among them, if any rank has not finished."""
    waits, lines = {}, []
    for r, rank in enumerate(ranks):
        if rank.finished:
            continue
        stuck = [s for _, s in rank.awaited] or [m.send for m in rank.unsent]
        waits[r] = sorted({s.peer for s in stuck})
        verb = "to receive from" if rank.awaited else "for its message to be taken by"
        state = ["finished" if ranks[p].finished else f"in round {ranks[p].round}" for p in waits[r]]
        peers = ", ".join(f"rank {p} ({s})" for p, s in zip(waits[r], state, strict=True))
        lines.append(f"  rank {r}, round {rank.round}: waits {verb} {peers}: {stuck[0]}")
    if not waits:
        return
    cycle = find_cycle(waits)
    sends = "synchronous" if synchronous else "eager"
    lines.insert(0, f"{len(waits)} of {len(ranks)} ranks wait for ever ({sends} sends)")
    if cycle:
        lines.append("  cycle: " + " -> ".join(map(str, cycle)))
    raise Deadlock("\n".join(lines), waits, cycle)


def find_cycle(waits: dict[int, list[int]]) -> list[int]:
    """A cycle of the graph rank -> ranks it waits for, the first rank repeated at the end; [] where there is none."""
    left = dict(waits)
    while ends := [r for r, peers in left.items() if not any(p in left for p in peers)]:
        for r in ends:
            del left[r]
    if not left:
        return []
    path = [min(left)]  # every rank left waits for another one left, so that this walk must return to itself
    while True:
        peer = next(p for p in left[path[-1]] if p in left)
        if peer in path:
            return path[path.index(peer) :] + [peer]
        path.append(peer)


def tell_leftover(wires):
    left = [message for wire in wires.values() for message in wire]
    if left:
        ranks = [f"  to rank {m.send.peer}: {m.send}" for m in left[:8]]
        raise LeftOver("\n".join([f"{len(left)} messages that nobody received", *ranks]))
