"""All ranks in one process: runs a schedule on symbolic values and finds what is wrong with it.

A value is a tuple of (rank, index) pairs, one for every operand in it, and (+) joins tuples. So one run proves for all
data and all operations that every rank contributed exactly once, and in rank order where that matters.

Sends are *eager* (they finish at once) or *synchronous* (they finish when the receiver takes the message: what MPI may
do with any send, and does with long ones). A schedule that finishes with synchronous sends finishes with eager ones,
with the same result: a message carries what its sender held when the round began, and matches in listed order, so
timing decides nothing (a Kahn network).

That holds where ranks share memory too, as long as nothing races: every two accesses of an element by different ranks,
one of them a write, must be ordered by a Barrier or a message. Each rank keeps a vector clock (Fidge 1988, Mattern
1989): for every rank, how many of its rounds are known to be over. A message takes its sender's along, a Barrier joins
those of all who come; an access is ordered behind another's if the clock of the one knows that the other's round is
over.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from collectives.failures.cycle import find_cycle
from collectives.steps import (
    Barrier,
    Compute,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Round,
    Send,
    Slice,
    Step,
    adds,
    is_live,
    mistake_in,
    overlap,
    reads,
    rounds_of,
    writes,
)

UNSET = None  # scratch nobody has written
END = object()  # of a rank's rounds, where None is a mistake
SCRATCH_SIZE = 1_000_000  # elements of a buffer that nobody has given: what reaches further is taken for a mistake
MOST_ROUNDS = 100_000  # rounds, for schedules of which nobody says how many they need at most


class ScheduleError(AssertionError):
    """A schedule that breaks a rule, hangs, or computes something else than it should.

    Attributes
    ----------
    rank, round : int or None
        Where it fails; None where that is no single place.
    done : for each rank the steps of the rounds that it had finished
    begun : for each rank what had happened of its next round: sends, and receives whose message had come

    Examples
    --------
    >>> import collectives
    >>> from collectives import Send
    >>> def lost(rank, size, count):  # nobody receives
    ...     yield (Send((rank + 1) % size, "x", 0, count),)
    >>> bool(collectives.check(lost, ranks=2))
    False
    """

    rank: int | None = None
    round: int | None = None
    done: Sequence[list] = ()
    begun: Sequence[list] = ()


class RuleBroken(ScheduleError):
    """Steps of one round that conflict, reach outside a buffer, or read what nobody wrote."""


class Race(RuleBroken):
    """Two ranks touch the same element, one of them writes it, and nothing says who is first.

    Attributes
    ----------
    other : (rank, round) of the access that came first here
    """

    def __init__(self, message, other):
        super().__init__(message)
        self.other = other


class LengthMismatch(ScheduleError):
    """A message of another length than its receiver expects."""


class UnreceivedMessages(ScheduleError):
    """Messages that nobody received."""


class Deadlock(ScheduleError):
    """Ranks that wait for ever.

    Attributes
    ----------
    waits : dict from a waiting rank to the ranks it waits for
    cycle : list of ranks, the first repeated at the end; empty where a rank waits for one that has finished

    Examples
    --------
    >>> import collectives
    >>> from collectives import Recv
    >>> def stuck(rank, size, count):
    ...     yield (Recv((rank + 1) % size, "x", 0, count),)
    >>> report = collectives.check(stuck, ranks=2)
    >>> bool(report)
    False
    """

    def __init__(self, message, waits, cycle):
        super().__init__(message)
        self.waits, self.cycle = waits, cycle


@dataclass
class Stats:
    """What a run counted, a list entry for each rank; elements, not bytes.

    Attributes
    ----------
    rounds, messages, sent, received, reduced : list of int
    depth : list of int
        Rounds one after the other until the rank had finished: its own, and those of others that it waited for. Along a
        chain nobody has more than two, and the last of 8 ranks is done after 7.
    heard : for each rank its vector clock at the end: of every rank, how many rounds it knows to be over; -1 where it
        has not heard of that rank at all
    history : for each rank the steps of its rounds
    buffers : for each rank name -> values at the end, scratch too
    """

    rounds: list[int]
    messages: list[int]
    sent: list[int]
    received: list[int]
    reduced: list[int]
    depth: list[int] = field(default_factory=list)
    heard: list[list[int]] = field(default_factory=list)
    history: list[list[list[Step]]] = field(default_factory=list)
    buffers: Sequence[dict[str, list]] = ()

    @property
    def moved(self) -> int:
        """Return the most elements that any rank sent or received: what its link must carry in one direction."""
        return max(max(self.sent), max(self.received))

    @property
    def barriers(self) -> int:
        """Return the most barriers of any rank."""
        return max(sum(isinstance(s, Barrier) for steps in rounds for s in steps) for rounds in self.history)

    @property
    def copied(self) -> int:
        """Return the most elements that any rank copied or added in memory."""
        moves = ([s for steps in rounds for s in steps if isinstance(s, Copy | Reduce)] for rounds in self.history)
        return max(sum(s.hi - s.lo for s in steps) for steps in moves)

    @cached_property
    def live(self) -> list[int]:
        """The most elements that each rank held at a time which it still had to read, in all buffers but x and y.

        Of a pipeline: the activations at their peak.
        """
        return [most_live(rank, rounds) for rank, rounds in enumerate(self.history)]


class Access(NamedTuple):
    """What a rank did to elements of a buffer in one of its rounds."""

    rank: int
    round: int
    step: Step
    slice: Slice
    writes: bool

    def __str__(self):
        verb, place = "writes" if self.writes else "reads", self.slice
        whose = f"{place.buf}[{place.lo}:{place.hi}]{of(place, self.rank)}"
        return f"rank {self.rank}, round {self.round}: {self.step} {verb} {whose}"


@dataclass
class Rank:
    """Where one rank stands."""

    number: int
    rounds: Iterator[Round]
    buffers: dict[str, list]
    given: set[str]  # the buffers that are not scratch
    clock: list[int]  # of every rank, how many of its rounds are over for all that this rank knows
    round: int = -1  # the round it is in, from 0
    busy: int = 0  # rounds so far in which it did something
    depth: int = 0  # rounds one after the other so far, those of others that it waited for among them
    steps: list[Step] | None = None  # of this round; None between rounds
    places: list[tuple[list[Slice], list[Slice]]] = field(default_factory=list)  # what each of them reads and writes
    awaited: list[tuple[int, Step]] = field(default_factory=list)  # receives without their message, with their place
    arrived: dict[int, list] = field(default_factory=dict)  # place of a receive in the round -> payload
    unsent: list["Message"] = field(default_factory=list)  # messages of this round that nobody has taken
    barrier: tuple[int, ...] = ()  # whom it waits for, and itself
    clocks: list[list[int]] = field(default_factory=list)  # the clocks that this round's messages brought
    finished: bool = False


@dataclass(eq=False)
class Message:
    payload: list
    send: Send
    sender: Rank
    round: int
    clock: list[int]
    depth: int  # of its sender, when the round began


def simulate(
    program: Callable[[int], Iterable[Round]],
    buffers: list[dict[str, list]],
    synchronous: bool = True,
    most: int = MOST_ROUNDS,
    compute: Callable[[int, Compute, list[list]], list[list]] | None = None,
    round_once: bool = False,
) -> Stats:
    """Run program(rank) for every rank; `buffers` is changed in place.

    Parameters
    ----------
    program : rank -> rounds of that rank
    buffers : for each rank, name -> list of values that have `+`. A buffer that is not named is scratch.
    synchronous : whether a send finishes only when its message is taken
    most : int
        rounds of a rank, not counting empty ones, after which the schedule is refused as endless; counting them, so
        many for each rank; and steps of a round
    compute : callable (rank, step, values of its reads) -> values of its writes
        without it every element that a Compute writes is the one operand (its name, its place)
    round_once : refuse to add what is a sum already, as float16 would then be rounded a second time

    Raises
    ------
    RuleBroken, Race, LengthMismatch, UnreceivedMessages, Deadlock
        with rank, round (from 0) and steps

    Examples
    --------
    >>> import collectives
    >>> from collectives import Recv, Send
    >>> def program(rank):
    ...     yield (Recv(1, "x", 0, 1),) if rank == 0 else (Send(0, "x", 0, 1),)
    >>> collectives.simulate(program, [{"x": [0]}, {"x": [7]}]).buffers
    [{'x': [7]}, {'x': [7]}]
    """
    return Simulation(program, buffers, synchronous, compute or symbols_of_compute, round_once).run(most)


def symbols_of_compute(rank: int, step: Compute, values: list[list]) -> list[list]:
    """Return what a Compute writes, as symbols."""
    return [[((step.name, i),) for i in range(s.lo, s.hi)] for s in step.writes]


class Simulation:
    """All ranks, the messages on the wires between them, and what was done to every buffer."""

    def __init__(self, program, buffers, synchronous, compute, round_once):
        size = len(buffers)
        self.synchronous, self.compute, self.round_once = synchronous, compute, round_once
        self.ranks = [
            Rank(r, rounds_of(r, program(r)), held, set(held), [0 if q == r else -1 for q in range(size)])
            for r, held in enumerate(buffers)
        ]
        self.stats = Stats(*([0] * size for _ in range(5)), history=[[] for _ in buffers], buffers=buffers)
        self.wires: dict[tuple[int, int], deque[Message]] = {}
        self.barriers: dict[tuple[int, ...], set[int]] = {}  # who has come
        self.accesses: dict[tuple[int, str], dict[int, list[Access]]] = {}  # (owner, buffer) -> by rank
        self.ready = deque(range(size))

    def run(self, most) -> Stats:
        self.most = most
        try:
            self.advance(most)
            refuse_deadlock(self.ranks, self.barriers, self.synchronous)
            refuse_unreceived(self.wires)
        except ScheduleError as error:
            if not isinstance(error, Deadlock | UnreceivedMessages):
                error.rank, error.round = self.current.number, self.current.round
                self.continue_others(most)
            error.done = [
                history if rank.steps is None or is_released(rank) else history[:-1]
                for rank, history in zip(self.ranks, self.stats.history, strict=True)
            ]
            error.begun = [
                [s for i, s in enumerate(rank.steps or ()) if isinstance(s, Send) or i in rank.arrived]
                for rank in self.ranks
            ]
            raise
        self.stats.heard = [rank.clock for rank in self.ranks]
        self.stats.depth = [rank.depth for rank in self.ranks]
        return self.stats

    def advance(self, most):
        """Let all ranks that are ready go as far as they can."""
        while self.ready:
            self.current = rank = self.ranks[self.ready.popleft()]
            while not rank.finished:
                if rank.steps is None:
                    if not self.enter_round(rank):
                        break
                    refuse_endless(rank, most, len(self.ranks))
                if not self.round_is_over(rank):
                    break
                self.finish_round(rank)

    def continue_others(self, most):
        """After an error the other ranks go on as far as they can: what they did before it does not depend on turns."""
        while True:
            self.current.finished = True
            try:
                return self.advance(most)
            except ScheduleError:  # one error is reported
                continue

    def enter_round(self, rank) -> bool:
        """Take the next round of a rank, check it, post its sends, come to its barrier; False where there is none."""
        steps = next(rank.rounds, END)
        if steps is END:
            rank.finished = True
            return False
        rank.round += 1
        self.stats.rounds[rank.number] += 1
        rank.steps = self.check_round(rank, steps)
        self.stats.history[rank.number].append(rank.steps)
        rank.busy += bool(rank.steps)
        rank.awaited = [(i, s) for i, s in enumerate(rank.steps) if isinstance(s, Recv | RecvReduce)]
        rank.arrived, rank.clocks = {}, []
        rank.unsent = [
            Message(rank.buffers[s.buf][s.lo : s.hi], s, rank, rank.round, list(rank.clock), rank.depth)
            for s in rank.steps
            if isinstance(s, Send)
        ]
        for message in rank.unsent:
            self.wires.setdefault((rank.number, message.send.peer), deque()).append(message)
            self.stats.messages[rank.number] += 1
            self.stats.sent[rank.number] += len(message.payload)
            self.ready.append(message.send.peer)
        if rank.steps and isinstance(rank.steps[0], Barrier):
            self.arrive(rank, rank.steps[0])
        return True

    def arrive(self, rank, barrier):
        """Let a rank arrive at a barrier; the last one releases all, and each then knows what all of them knew."""
        rank.barrier = tuple(range(len(self.ranks))) if barrier.ranks is None else tuple(sorted(barrier.ranks))
        here = self.barriers.setdefault(rank.barrier, set())
        here.add(rank.number)
        if len(here) < len(rank.barrier):
            return
        clocks, depth = [list(self.ranks[r].clock) for r in here], max(self.ranks[r].depth for r in here)
        for r in here:
            self.ranks[r].clocks, self.ranks[r].barrier, self.ranks[r].depth = clocks, (), depth
        self.ready.extend(here)
        del self.barriers[tuple(sorted(here))]

    def round_is_over(self, rank) -> bool:
        """Return whether nothing is missing of a rank's round; takes the messages that have come."""
        senders = take_messages(rank, self.wires, self.stats)
        if self.synchronous:
            self.ready.extend(sender for sender in senders if not self.ranks[sender].unsent)
        return not (rank.awaited or rank.barrier or (self.synchronous and rank.unsent))

    def finish_round(self, rank):
        """Let the writes of a finished round appear; what they read is what was there before it."""
        got = [
            rank.arrived[i] if i in rank.arrived else [self.values_of(place) for place in sources]
            for i, (sources, _) in enumerate(rank.places)
        ]
        if self.round_once:
            self.refuse_sums_of_sums(rank, got)
        for i, (s, (_, places)) in enumerate(zip(rank.steps, rank.places, strict=True)):
            values = self.compute(rank.number, s, got[i]) if isinstance(s, Compute) else got[i]
            for place, value in zip(places, values, strict=bool(places)):
                if adds(s):
                    pairs = list(zip(value, self.values_of(place), strict=True))
                    value = [a + b for a, b in pairs] if s.operand_left else [b + a for a, b in pairs]
                    self.stats.reduced[rank.number] += len(value)
                self.ranks[place.rank].buffers[place.buf][place.lo : place.hi] = value
        rank.clock = [max(known) for known in zip(rank.clock, *rank.clocks, strict=True)]
        rank.clock[rank.number] = rank.round + 1
        rank.depth += 1
        rank.steps, rank.unsent = None, []

    def refuse_sums_of_sums(self, rank, got):
        """Refuse a round that adds what is a sum, or adds to what was one before it."""
        for s, values, (_, places) in zip(rank.steps, got, rank.places, strict=True):
            if adds(s) and any(len(x) > 1 for x in [*values[0], *self.values_of(places[0])]):
                raise RuleBroken(
                    f"rank {rank.number}, round {rank.round}: {s} adds up a sum of an earlier round: where float16 is "
                    f"to be rounded once, all operands of an element are added in one round"
                )

    def values_of(self, place: Slice) -> list:
        """Return the elements of a slice now."""
        return self.ranks[place.rank].buffers[place.buf][place.lo : place.hi]

    def check_round(self, rank, steps) -> list[Step]:
        """Return the steps of a round that do something, after the rules of steps.py have been checked."""
        r, size = rank.number, len(self.ranks)

        def refuse(what):
            raise RuleBroken(f"rank {r}, round {rank.round}: {what}")

        if wrong := mistake_in(steps):
            refuse(wrong)
        if len(steps) > self.most:
            refuse(f"{len(steps):,} steps at once; {self.most:,} would be many")
        steps = [s for s in steps if is_live(s)]
        for s in steps:
            self.check_peers(s, r, size, refuse)
            if isinstance(s, Barrier) and len(steps) > 1:
                refuse(f"{s} must be the only step of its round, beside it there is {steps[steps[0] is s]}")
        rank.places = [(reads(s, r), writes(s, r)) for s in steps]
        read = [(place, s) for s, (places, _) in zip(steps, rank.places, strict=True) for place in places]
        written = [(place, s) for s, (_, places) in zip(steps, rank.places, strict=True) for place in places]
        for place, s in read + written:
            owner = self.ranks[place.rank]
            held = owner.buffers.setdefault(place.buf, [])
            if place.buf not in owner.given:
                if place.hi > SCRATCH_SIZE and isinstance(held, list):
                    refuse(
                        f"{s} reaches to element {place.hi:,} of {place.buf}{of(place, r)}: {SCRATCH_SIZE:,} are many"
                    )
                if (missing := place.hi - len(held)) > 0:
                    held.extend([UNSET] * missing if isinstance(held, list) else Blank(missing))
            if not 0 <= place.lo <= place.hi <= len(held):
                refuse(f"{s} reaches outside {place.buf}{of(place, r)}, which has {len(held)} elements")
        for place, s in read:
            self.refuse_race(Access(r, rank.round, s, place, False), rank.clock)
        for place, s in written:
            self.refuse_race(Access(r, rank.round, s, place, True), rank.clock)
        for place, s in read + [(place, s) for place, s in written if adds(s)]:
            if any(value is UNSET for value in self.values_of(place)):
                yet = "" if place.rank == r else " yet: a Barrier behind what writes them says that they are there"
                refuse(f"{s} reads elements of {place.buf}{of(place, r)} that nothing wrote{yet}")
        for i, (place, s) in enumerate(written):
            for other, t in written[:i]:
                if overlap(place, other) and not (adds(s) and adds(t)):
                    refuse(f"{t} and {s} write the same elements")
            for other, t in read:
                sent = adds(s) and isinstance(t, Send)
                in_place = s is t and isinstance(s, Compute)
                if overlap(place, other) and not (sent or in_place):
                    refuse(f"{s} writes elements that {t} reads")
        return steps

    def check_peers(self, s, r, size, refuse):
        """Refuse ranks that are not there, messages to oneself, and barriers without the one who comes."""
        if isinstance(s, Send | Recv | RecvReduce):
            if not 0 <= s.peer < size or s.peer == r:
                alone = ": one rank has nobody to send to or receive from" if size == 1 else ""
                refuse(f"{s} names rank {s.peer}, which must be another rank of 0 ... {size - 1}{alone}")
        elif isinstance(s, Barrier):
            named = range(size) if s.ranks is None else s.ranks
            if r not in named or not set(named) <= set(range(size)) or len(set(named)) < len(named):
                refuse(f"{s} must name ranks of 0 ... {size - 1}, each once and this one among them")
        elif isinstance(s, Copy | Reduce):
            for other in (s.of, s.to):
                if other is not None and not 0 <= other < size:
                    refuse(f"{s} names rank {other}, which must be one of 0 ... {size - 1}")
        elif not isinstance(s, Compute):
            raise TypeError(f"rank {r}: {s!r} is a step that the simulator does not know")

    def refuse_race(self, now: Access, clock: list[int]):
        """Note an access; those of other ranks to the same elements must be over, for all that this rank knows."""
        place = now.slice
        seen = self.accesses.setdefault((place.rank, place.buf), {})
        for other, before in seen.items():
            if other == now.rank:
                continue
            for then in reversed(before):
                if then.round < clock[other]:
                    break  # this one and all earlier ones are over
                if (now.writes or then.writes) and overlap(place, then.slice):
                    message = f"{now}, and {then}: no Barrier and no message says who is first"
                    raise Race(message, (then.rank, then.round))
        seen.setdefault(now.rank, []).append(now)


def is_released(rank: Rank) -> bool:
    """Return whether a rank is in a round whose barrier is over."""
    return bool(rank.steps) and isinstance(rank.steps[0], Barrier) and not rank.barrier


def of(place: Slice, rank: int) -> str:
    """Whose buffer it is, in words, where it is another's."""
    return "" if place.rank == rank else f" of rank {place.rank}"


def most_live(rank: int, rounds: list[list[Step]]) -> int:
    """Return the most elements of scratch that will still be read; from the last round back to the first."""
    needed: dict[str, set[int]] = {}
    count = most = 0
    for steps in reversed(rounds):
        during = count
        for s in steps:
            for place in () if adds(s) else writes(s, rank):
                if place.rank == rank and place.buf not in ("x", "y"):
                    kept = needed.setdefault(place.buf, set())
                    count -= len(kept)
                    kept.difference_update(range(place.lo, place.hi))
                    count += len(kept)
        for s in steps:
            for place in reads(s, rank) + (writes(s, rank) if adds(s) else []):
                if place.rank == rank and place.buf not in ("x", "y"):
                    kept = needed.setdefault(place.buf, set())
                    new = set(range(place.lo, place.hi)) - kept
                    kept |= new
                    count += len(new)
                    during += len(new)
        most = max(most, during, count)
    return most


def refuse_endless(rank, most, size):
    """A generator that yields for ever: doing something, or empty rounds."""
    r = rank.number
    if rank.busy > most:
        raise RuleBroken(f"rank {r} is in its round {rank.round:,}: the schedule does not end; {most:,} would be many")
    if rank.round >= most * size:
        raise RuleBroken(
            f"rank {r} is in its round {rank.round:,}, of which {rank.busy:,} had steps with elements: it does not end"
        )


def take_messages(rank, wires, stats) -> set[int]:
    """Match the awaited receives in listed order with what lies on the wires; returns whose messages were taken."""
    missing, taken_from, blocked = [], set(), set()
    for i, s in rank.awaited:
        wire = wires.get((s.peer, rank.number))
        if s.peer in blocked or not wire:
            blocked.add(s.peer)
            missing.append((i, s))
            continue
        message = wire.popleft()
        if len(message.payload) != s.hi - s.lo:
            raise LengthMismatch(
                f"rank {rank.number}, round {rank.round}: {s} expects {s.hi - s.lo} elements, but rank {s.peer} sends "
                f"{len(message.payload)} in its round {message.round}: {message.send}"
            )
        stats.received[rank.number] += s.hi - s.lo
        rank.arrived[i] = [message.payload]
        rank.clocks.append(message.clock)
        rank.depth = max(rank.depth, message.depth)
        if message in message.sender.unsent:  # an eager sender may be rounds further
            message.sender.unsent.remove(message)
        taken_from.add(s.peer)
    rank.awaited = missing
    return taken_from


def refuse_deadlock(ranks, barriers, synchronous):
    """Raise Deadlock, with who waits for whom and the cycle among them, if any rank has not finished."""
    waits, lines = {}, []
    for rank in ranks:
        r = rank.number
        if rank.finished:
            continue
        stuck = [s for _, s in rank.awaited] or [m.send for m in rank.unsent] or rank.steps
        if rank.barrier:
            waits[r], verb = sorted(set(rank.barrier) - barriers[rank.barrier]), "in a Barrier, for"
        else:
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


def refuse_unreceived(wires):
    unreceived = [message for wire in wires.values() for message in wire]
    if unreceived:
        ranks = [
            f"  from rank {m.sender.number}, round {m.round}, to rank {m.send.peer}: {m.send}" for m in unreceived[:8]
        ]
        raise UnreceivedMessages("\n".join([f"{len(unreceived)} messages that nobody received", *ranks]))


class Blank:
    """`count` elements without values: a run on them finds all that does not depend on values, in short time."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return Blank(place.stop - place.start)

    def __setitem__(self, place, value):
        pass

    def __iter__(self):
        return iter(())

    def extend(self, more):
        self.count += len(more)


class Blanks(dict):
    """Buffers of such elements; scratch too."""

    def setdefault(self, name, _=None):
        return super().setdefault(name, Blank(0))


def simulate_lengths(every: list[list[Round]], lengths: list[dict[str, int]]) -> Stats:
    """Run the rounds of all ranks without values: do messages match, end all ranks, does nothing race?

    Parameters
    ----------
    every : the rounds of each rank
    lengths : for each rank, name -> elements of its buffers; others are scratch

    Raises
    ------
    ScheduleError
        as `simulate` does
    """
    buffers = [Blanks({name: Blank(n) for name, n in named.items()}) for named in lengths]
    return simulate(every.__getitem__, buffers, compute=lambda rank, step, values: [[] for _ in step.writes])
