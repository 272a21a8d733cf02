"""Compiles a rank's schedule: its rounds become a flat list of instructions, to which memory is bound (plan.py).

In a round the receives and sends are started first; local copies and computations are made while they are in flight,
then reductions follow in listed order, each when its operand has come. What is still being sent is not written before
it has left, so that the message carries the old value. Only then, when there is another message for the same rank, and
before a barrier does a rank wait for its sends. And receives of the next round are started before those of this round
are waited for, so that no link is empty between rounds. Where elements are rounded (float16), the reductions of a
round into one slice are made as one: `round_once`. Schedules in memory that ranks share are fused first (fusing.py).

A program knows neither addresses nor datatypes: one of an algorithm, a count and a root serves all buffers.
"""

from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from typing import NamedTuple

from collectives.executor.fusing import SumInto, fuse
from collectives.steps import (
    SLOTS,
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
    is_live,
    mistake_in,
    overlap,
    reads,
    rounds_of,
    writes,
)

LONGEST = 1 << 30  # elements in a message: MPI libraries count in 32 bits
IN_FLIGHT = 8  # sends to one rank that a program begins before it waits for the first of them
MOST_ROUNDS = 1_000_000  # rounds of a rank that are taken for a mistake
LANDING = "(landing)"  # the buffer into which operands of reductions are received


class Transfer(NamedTuple):
    """A message of its own: buf[lo:hi] to or from a peer."""

    sends: bool
    peer: int
    buf: str
    lo: int
    hi: int


class Start(NamedTuple):
    """Start a transfer."""

    transfer: int


class Wait(NamedTuple):
    """Wait until a transfer is done."""

    transfer: int


Instruction = Start | Wait | Copy | Compute | Barrier | Reduce | SumInto


class Program:
    """A schedule as a list of instructions.

    Parameters
    ----------
    rounds : the rank's rounds
    rank : the rank itself
    round_once : whether the reductions of a round into one slice are made as one
    shared : whether ranks touch each other's buffers, ordered by messages too: then a round is over before the next
    fused : whether copies and reductions between barriers are made as sums that write each slice once; where ranks
        touch each other's buffers, barriers alone must order that

    Attributes
    ----------
    transfers : list of Transfer, each started and waited for as often as the instructions say
    instructions : list of Instruction; `steps.Reduce` may use up its operand where that is in LANDING
    lengths : buffer of this rank -> elements that the instructions name of it
    length : what it takes in memory, with an instruction or a transfer for a unit
    epoch_parity : 0 without slots, 1 for an odd number of epochs, 2 for an even one: parity alone selects the slots
    named : of a schedule in shared memory, what ranks name of each other's buffers

    Raises
    ------
    TypeError
        What is no round or no step, with its rank and round.
    ValueError
        More than a million rounds.
    """

    named = None

    def __init__(
        self,
        rounds: Iterable[Round],
        rank: int = 0,
        round_once: bool = False,
        shared: bool = False,
        fused: bool = False,
    ):
        self.rank, self.round_once, self.shared = rank, round_once, shared
        self.transfers: list[Transfer] = []
        self.instructions: list[Instruction] = []
        self.sending: list[tuple[Send, list[int]]] = []  # sends that are not waited for yet
        self.ahead: list[list[int]] = []  # the next round's first receives, where they are started already
        slots: list[str] = []
        live = live_rounds(rounds, rank, slots)
        for steps, following in pairwise([*(fuse(live, rank) if fused else live), []]):
            self.compile(steps, following)
        self.wait_for_sends(self.sending[:])
        self.lengths = self.lengths_named()
        self.epoch_parity = SLOTS.index(slots[-1]) + 1 if slots else 0  # the last one counts
        self.length = len(self.transfers) + len(self.instructions) + 8  # in memory, an empty one included

    def compile(self, steps: list[Step], following: list[Step]):
        """Append one round, and start the first receives of the following one if their places are free."""
        ahead, self.ahead = self.ahead, []
        starts, sends, local, reductions, arriving = [], [], [], [], []
        landed = 0
        for s in steps:
            match s:
                case Send():
                    sends.append((s, self.transfer(True, s.peer, s.buf, s.lo, s.hi)))
                case Recv():
                    if ahead:
                        message = ahead.pop(0)
                    else:
                        self.wait_for_readers(s)
                        message = self.transfer(False, s.peer, s.buf, s.lo, s.hi)
                        starts += message
                    arriving.append((s, message))
                case RecvReduce():
                    at, landed = landed, landed + s.hi - s.lo
                    message = self.transfer(False, s.peer, LANDING, at, landed)
                    starts += message
                    reductions.append((Reduce(s.buf, s.lo, s.hi, LANDING, at, s.operand_left), message))
                case Reduce():
                    reductions.append((s, []))
                case Copy() | Compute() | SumInto():
                    self.wait_for_readers(s)
                    local.append(s)
                case Barrier():  # behind it others may write what is being sent
                    self.wait_for_sends(self.sending[:])
                    local.append(s)
                case _:
                    raise TypeError(f"rank {self.rank}: {s!r} is a step that a program cannot carry out")
        if sends:
            peers = {s.peer for s, _ in sends}
            self.wait_for_sends([item for item in self.sending if item[0].peer not in peers])
            self.sending += sends
        self.instructions += [*map(Start, starts), *(Start(t) for _, message in sends for t in message), *local]
        for s, messages in self.sums_of(reductions) if self.round_once else reductions:
            self.wait_for_readers(s)
            self.wait_for(messages)
            self.instructions += [s] if self.round_once else split_reduction(s)
        for s in () if self.shared else following:
            if not isinstance(s, Recv):
                if isinstance(s, RecvReduce):
                    break
                continue
            if any(self.overlaps(s, o) for o, _ in self.sending + arriving):
                break
            self.ahead.append(self.transfer(False, s.peer, s.buf, s.lo, s.hi))
            self.instructions += map(Start, self.ahead[-1])
        for _, message in arriving:
            self.wait_for(message)
        self.wait_for_sends(self.sending[:] if self.shared else self.sending[:-IN_FLIGHT])

    def transfer(self, sends: bool, peer: int, buf: str, lo: int, hi: int) -> list[int]:
        """Transfers for one message: one, unless it is too long for one."""
        first = len(self.transfers)
        self.transfers += [Transfer(sends, peer, buf, at, min(hi, at + LONGEST)) for at in range(lo, hi, LONGEST)]
        return list(range(first, len(self.transfers)))

    def touches(self, s) -> list[Slice]:
        """Return what a step or an instruction writes."""
        return list(s.targets) if isinstance(s, SumInto) else writes(s, self.rank)

    def overlaps(self, s, message: Send | Recv) -> bool:
        """Return whether what a step writes has elements in common with a message in flight."""
        place = Slice(message.buf, message.lo, message.hi, self.rank)
        return any(overlap(target, place) for target in self.touches(s))

    def wait_for_readers(self, s):
        """Wait for the sends that may still read what a step writes."""
        if self.sending:
            self.wait_for_sends([item for item in self.sending if self.overlaps(s, item[0])])

    def wait_for_sends(self, items: list[tuple[Send, list[int]]]):
        """Wait for some of the sends."""
        for item in items:
            self.sending.remove(item)
            self.wait_for(item[1])

    def wait_for(self, transfers: list[int]):
        self.instructions += map(Wait, transfers)

    def sums_of(self, reductions: list[tuple[Reduce, list[int]]]) -> list[tuple[SumInto, list[int]]]:
        """Return the reductions of a round with one for each slice, and the transfers that it waits for."""
        slices: dict[Slice, tuple[list[Slice], list[int]]] = {}
        for s, message in reductions:
            (source,), (target,) = reads(s, self.rank), writes(s, self.rank)
            operands, messages = slices.setdefault(target, ([target], []))
            messages += message
            operands.insert(0 if s.operand_left else len(operands), source)
        return [(SumInto(tuple(operands), (target,)), messages) for target, (operands, messages) in slices.items()]

    def places(self) -> Iterable[Slice]:
        """All that the transfers and instructions name."""
        for t in self.transfers:
            yield Slice(t.buf, t.lo, t.hi, self.rank)
        for s in self.instructions:
            if isinstance(s, SumInto):
                yield from s.operands
                yield from s.targets
            elif not isinstance(s, Start | Wait):
                yield from reads(s, self.rank)
                yield from writes(s, self.rank)

    def lengths_named(self) -> dict[str, int]:
        """Buffer of this rank -> how many elements of it are named."""
        ends: dict[str, int] = {}
        for s in self.places():
            if s.rank == self.rank:
                ends[s.buf] = max(ends.get(s.buf, 0), s.hi)
        return ends

    def writes(self, buf: str) -> bool:
        """Return whether it changes a buffer of this rank."""
        return any(t.buf == buf and not t.sends for t in self.transfers) or any(
            s.buf == buf and s.rank == self.rank
            for i in self.instructions
            if not isinstance(i, Start | Wait)
            for s in self.touches(i)
        )


def live_rounds(rounds: Iterable[Round], rank: int, slots: list[str] | None = None) -> list[list[Step]]:
    """Return the rounds of a rank, less the steps that do nothing; ValueError where they do not end.

    `slots` gets the slots that steps name, empty ones too: every rank must count the same epochs, also a rank whose
    slice of the last segment is empty.
    """
    live = []
    for number, steps in enumerate(rounds_of(rank, rounds)):
        if wrong := mistake_in(steps):
            raise TypeError(f"rank {rank}, round {number}: {wrong}")
        if number >= MOST_ROUNDS:
            raise ValueError(f"rank {rank} is in its round {number:,}: the schedule does not end, or run it in parts")
        if slots is not None:
            slots += [p.buf for s in steps for p in (*reads(s, rank), *writes(s, rank)) if p.buf in SLOTS]
        live.append([s for s in steps if is_live(s)])
    return live


def split_reduction(s: Reduce) -> list[Reduce]:
    """Return a reduction, cut where it is too long for one."""
    return [s._replace(lo=lo, hi=min(s.hi, lo + LONGEST), at=s.at + lo - s.lo) for lo in range(s.lo, s.hi, LONGEST)]


class Programs(dict):
    """key -> program: those used last, with at most `limit` instructions and transfers in all."""

    def __init__(self, limit: int = 1 << 17):
        super().__init__()
        self.limit, self.length = limit, 0

    def of(self, key: Hashable, make: Callable[[], Program]) -> Program:
        """Return the program of a key; `make` makes one that is not here."""
        program = self.pop(key, None)
        if program is None:
            program = make()
            self.length += program.length
        self[key] = program
        while self.length > self.limit and len(self) > 1:
            self.length -= self.pop(next(iter(self))).length
        return program
