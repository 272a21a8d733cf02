"""Compiles a rank's schedule: its rounds become a flat list of instructions, to which memory is bound (executor.py).

In a round the receives and sends are started first, local copies are made while they are in flight, then reductions
follow in listed order, each when its operand has come. What is still being sent is not written before it has left, so
that the message carries the old value; otherwise nothing waits for a send until another rank is sent to. And receives
of the next round are started before those of this round are waited for: so no cable is empty between rounds. Where
elements are rounded (float16), the reductions of a round into one slice are made as one: `together`.

A program knows neither addresses nor datatypes: one of an algorithm, a count and a root serves all buffers.
"""

from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from typing import NamedTuple

from collectives.steps import Copy, Recv, RecvReduce, Reduce, Round, Send, Step

LONGEST = 1 << 30  # elements in a message: MPI libraries count in 32 bits
IN_FLIGHT = 8  # sends to one rank that a program begins before it waits for the first of them
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


class Total(NamedTuple):
    """buf[lo:hi] = the sum of its operands, (buffer, first element), from left to right; one of them is buf[lo:hi]."""

    buf: str
    lo: int
    hi: int
    operands: list[tuple[str, int]]


Instruction = Start | Wait | Copy | Reduce | Total


class Program:
    """A schedule as a list of instructions.

    Parameters
    ----------
    rounds : the rank's rounds
    together : whether the reductions of a round into one slice are made as one

    Attributes
    ----------
    transfers : list of Transfer, each started and waited for as often as the instructions say
    instructions : list of Instruction; `steps.Reduce` may use up its operand where that is in LANDING
    reach : buffer -> elements that the instructions name of it
    length : what it takes in memory, with an instruction or a transfer for a unit
    """

    def __init__(self, rounds: Iterable[Round], together: bool = False):
        rounds = [[s for s in steps if s.hi > s.lo] for steps in rounds]
        self.transfers: list[Transfer] = []
        self.instructions: list[Instruction] = []
        self.together = together
        self.sending: list[tuple[Send, list[int]]] = []  # sends that are not waited for yet
        self.ahead: list[list[int]] = []  # the next round's first receives, where they are started already
        for steps, following in pairwise([*rounds, []]):
            self.compile(steps, following)
        self.sent(self.sending[:])
        self.reach = reach(self.transfers, self.instructions)
        self.length = len(self.transfers) + len(self.instructions) + 8  # in memory, an empty one included

    def compile(self, steps: list[Step], following: list[Step]):
        """Append one round, and start the first receives of the following one if their places are free."""
        ahead, self.ahead = self.ahead, []
        starts, sends, copies, reductions, arriving = [], [], [], [], []
        landed = 0
        for s in steps:
            kind = type(s)
            if kind is Send:
                sends.append((s, self.transfer(True, s.peer, s.buf, s.lo, s.hi)))
            elif kind is Recv:
                if ahead:
                    message = ahead.pop(0)
                else:
                    self.settle(s)
                    message = self.transfer(False, s.peer, s.buf, s.lo, s.hi)
                    starts += message
                arriving.append((s, message))
            elif kind is Copy:
                self.settle(s)
                copies.append(s)
            elif kind is RecvReduce:
                at, landed = landed, landed + s.hi - s.lo
                message = self.transfer(False, s.peer, LANDING, at, landed)
                starts += message
                reductions.append((Reduce(s.buf, s.lo, s.hi, LANDING, at, s.left), message))
            else:
                reductions.append((s, []))
        if sends:
            peers = {s.peer for s, _ in sends}
            self.sent([item for item in self.sending if item[0].peer not in peers])
            self.sending += sends
        self.instructions += [*map(Start, starts), *(Start(t) for _, message in sends for t in message), *copies]
        for s, messages in totals(reductions) if self.together else reductions:
            self.settle(s)
            self.wait_for(messages)
            self.instructions += [s] if self.together else pieces(s)
        for s in following:
            if type(s) is RecvReduce or (type(s) is Recv and any(meet(s, o) for o, _ in self.sending + arriving)):
                break
            if type(s) is Recv:
                self.ahead.append(self.transfer(False, s.peer, s.buf, s.lo, s.hi))
                self.instructions += map(Start, self.ahead[-1])
        for _, message in arriving:
            self.wait_for(message)
        self.sent(self.sending[:-IN_FLIGHT])

    def transfer(self, sends: bool, peer: int, buf: str, lo: int, hi: int) -> list[int]:
        """Transfers for one message: one, unless it is too long for one."""
        first = len(self.transfers)
        self.transfers += [Transfer(sends, peer, buf, at, min(hi, at + LONGEST)) for at in range(lo, hi, LONGEST)]
        return list(range(first, len(self.transfers)))

    def settle(self, step: Step):
        """Wait for the sends that may still read what a step writes."""
        self.sent([item for item in self.sending if meet(step, item[0])])

    def sent(self, items: list[tuple[Send, list[int]]]):
        """Wait for some of the sends."""
        for item in items:
            self.sending.remove(item)
            self.wait_for(item[1])

    def wait_for(self, transfers: list[int]):
        self.instructions += map(Wait, transfers)

    def writes(self, buf: str) -> bool:
        """Whether it changes a buffer."""
        return any(t.buf == buf and not t.sends for t in self.transfers) or any(
            i.buf == buf for i in self.instructions if not isinstance(i, Start | Wait)
        )


def meet(a: Step, b: Step) -> bool:
    """Whether two steps' slices have elements in common."""
    return a.lo < b.hi and b.lo < a.hi and a.buf == b.buf


def totals(reductions: list[tuple[Reduce, list[int]]]) -> list[tuple[Total, list[int]]]:
    """The reductions of a round with one for each slice, and the transfers that it waits for."""
    slices: dict[tuple, tuple[Total, list[int]]] = {}
    for s, message in reductions:
        place = s.buf, s.lo, s.hi
        total, messages = slices.setdefault(place, (Total(*place, [(s.buf, s.lo)]), []))
        messages += message
        total.operands.insert(0 if s.left else len(total.operands), (s.src, s.at))
    return list(slices.values())


def pieces(s: Reduce) -> list[Reduce]:
    """A reduction, cut where it is too long for one."""
    return [s._replace(lo=lo, hi=min(s.hi, lo + LONGEST), at=s.at + lo - s.lo) for lo in range(s.lo, s.hi, LONGEST)]


def reach(transfers, instructions) -> dict[str, int]:
    """Buffer -> how many elements of it are named."""
    ends: dict[str, int] = {}
    for s in [*transfers, *(i for i in instructions if not isinstance(i, Start | Wait))]:
        ends[s.buf] = max(ends.get(s.buf, 0), s.hi)
        operands = s.operands if isinstance(s, Total) else [(s.src, s.at)] if isinstance(s, Copy | Reduce) else []
        for buf, at in operands:
            ends[buf] = max(ends.get(buf, 0), at + s.hi - s.lo)
    return ends


class Programs(dict):
    """key -> program: those used last, with at most `limit` instructions and transfers in all."""

    def __init__(self, limit: int = 1 << 17):
        super().__init__()
        self.limit, self.length = limit, 0

    def of(self, key: Hashable, make: Callable[[], Program]) -> Program:
        """The program of a key; `make` makes one that is not here."""
        program = self.pop(key, None)
        if program is None:
            program = make()
            self.length += program.length
        self[key] = program
        while self.length > self.limit and len(self) > 1:
            self.length -= self.pop(next(iter(self))).length
        return program
