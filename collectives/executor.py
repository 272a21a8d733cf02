"""Runs a schedule over MPI: compiled once to a program, bound to memory as a plan of persistent requests, run often.

A plan is a flat list of calls without arguments: Start, copy, Wait, reduce. Measured: 1.7 us for 4 bytes between two
ranks; interpreting the same schedule at every call 7 us. To bind a program (program.py) to other memory takes about a
microsecond a message.

A plan names the caller's memory by address and keeps nothing of it alive, so it may only be run for a call whose
buffers lie at those addresses: they are part of the key in the cache.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial

from mpi4py import MPI

from collectives.messages import room
from collectives.program import LANDING, Program, Start, Wait
from collectives.shortcuts import Known
from collectives.steps import Copy, Reduce

WHOLE = slice(None)
REQUEST = 2 << 10  # bytes that a persistent request takes, here and in the MPI library (measured, Open MPI)


class Plan:
    """One rank's schedule as persistent requests on given memory.

    Parameters
    ----------
    program : Program
    comm : MPI.Intracomm on which no other messages travel with this tag
    buffers : name -> MPI.buffer, the memory of "x" and "y"; other names get scratch memory of the plan's own
    datatype : MPI.Datatype of an element
    extent : int
        bytes from one element to the next
    combine : function (source, target) -> call that does target = source (+) target; both are (memory, count, first
        element, datatype). None without reductions
    total : for a program with reductions made together: function (operands from left to right, target) -> calls that
        make their sum
    commutes : whether b (+) a is a (+) b to the last bit, so that operands may swap sides for speed
    synchronous : send with Ssend semantics (for tests)
    before, after : calls to make around the rounds
    keep : what must live as long as the plan: the key of a cached plan holds ids of operations and datatypes
    """

    used, busy = False, 0  # run since the cache last looked; in flight so many times
    gone = False  # whether it is for shared memory that its owner has left (shared.py)

    def __init__(
        self,
        program: Program,
        comm: MPI.Intracomm,
        buffers: dict[str, MPI.buffer],
        datatype: MPI.Datatype = MPI.BYTE,
        extent: int = 1,
        combine: Callable | None = None,
        total: Callable | None = None,
        commutes: bool = False,
        synchronous: bool = False,
        tag: int = 0,
        before: Iterable[Callable] = (),
        after: Iterable[Callable] = (),
        keep: tuple = (),
    ):
        own = {name: room(n * extent) for name, n in program.reach.items() if name not in buffers}
        self.memory, self.datatype, self.extent, self.keep = buffers | own, datatype, extent, keep
        self.combine, self.commutes = combine, commutes
        send, receive = comm.Ssend_init if synchronous else comm.Send_init, comm.Recv_init
        self.requests: list[MPI.Prequest] = [
            (send if sends else receive)((self.memory[buf], hi - lo, lo, datatype), peer, tag)
            for sends, peer, buf, lo, hi in program.transfers
        ]
        self.calls: list[Callable[[], object]] = [*before]
        self.waits: dict[int, MPI.Prequest] = {}  # place among the calls -> the request that it waits for
        for s in program.instructions:
            kind = type(s)
            if kind is Start:
                self.calls.append(self.requests[s.transfer].Start)
            elif kind is Wait:
                request = self.waits[len(self.calls)] = self.requests[s.transfer]
                self.calls.append(request.Wait)
            elif kind is Reduce:
                self.calls += self.reducing(s)
            elif kind is Copy:
                self.calls.append(copying(self.slice(s.buf, s.lo, s.hi), self.slice(s.src, s.at, s.at + s.hi - s.lo)))
            else:
                operands = [self.slice(buf, at, at + s.hi - s.lo) for buf, at in s.operands]
                self.calls += total(operands, self.slice(s.buf, s.lo, s.hi))
        self.calls.extend(after)
        self.bytes = len(self.requests) * REQUEST + sum(getattr(m, "nbytes", 0) for m in (*own.values(), *keep))

    def __call__(self):
        self.used = True
        for call in self.calls:
            call()

    def operand(self, buf: str, lo: int, count: int) -> tuple:
        """Elements as MPI takes them."""
        return self.memory[buf], count, lo, self.datatype

    def slice(self, buf: str, lo: int, hi: int) -> MPI.buffer:
        """Elements as bytes."""
        return self.memory[buf][lo * self.extent : hi * self.extent]

    def reducing(self, s: Reduce) -> list[Callable]:
        """Calls for target = source (+) target, or target (+) source; for the latter the sum is made in the source."""
        count = s.hi - s.lo
        source, target = self.operand(s.src, s.at, count), self.operand(s.buf, s.lo, count)
        if s.left or self.commutes:
            return [self.combine(source, target)]
        made, before = self.slice(s.src, s.at, s.at + count), []
        if s.src != LANDING:  # it must stay as it is
            kept, made = made, room(made.nbytes)
            before, source = [copying(made, kept)], (made, count, 0, self.datatype)
        return [*before, self.combine(target, source), copying(self.slice(s.buf, s.lo, s.hi), made)]

    def free(self):
        """Free the requests; the plan cannot be run afterwards."""
        for q in self.requests:
            q.Free()
        self.requests, self.calls, self.waits = [], [], {}


def copying(target: MPI.buffer, source: MPI.buffer) -> Callable[[], None]:
    """The call target[:] = source."""
    return partial(target.__setitem__, WHOLE, source)


class Once:
    """A plan that nothing can find again: run, then freed."""

    def __init__(self, plan: Callable):
        self.plan = plan

    def __call__(self):
        try:
            self.plan()
        finally:
            self.plan.free()


class PlanCache(dict):
    """key -> plan, at most `limit` of them with at most `limit_bytes` of scratch memory in all.

    The plan to go is the oldest that has not run since it was last spared (second chance): a hit is a plain lookup.
    `known` finds some of the plans sooner (shortcuts.py).
    """

    def __init__(self, limit: int = 256, limit_bytes: int = 256 << 20):
        super().__init__()
        self.limit, self.limit_bytes = limit, limit_bytes
        self.bytes = 0
        self.known = Known()

    def put(self, key: Hashable, plan: Plan) -> Plan:
        """Keep a plan under a key that is not in the cache, and free those that are gone or have become too many."""
        for left in [each for each, other in self.items() if other.gone]:
            self.drop(left)
        self.bytes += plan.bytes
        chances = 2 * len(self)
        while self and chances and (len(self) >= self.limit or self.bytes > self.limit_bytes):
            chances -= 1
            oldest = next(iter(self))
            if self[oldest].used or self[oldest].busy:
                spared = self[oldest] = self.pop(oldest)
                spared.used = False
            else:
                self.drop(oldest)
        self[key] = plan
        return plan

    def drop(self, key: Hashable):
        """Free a plan."""
        plan = self.pop(key)
        self.bytes -= plan.bytes
        self.known.forget(plan)
        plan.free()

    def free(self):
        """Free every plan."""
        self.known.entries.clear()
        for plan in self.values():
            plan.free()
        self.clear()
        self.bytes = 0
