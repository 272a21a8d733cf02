"""Runs a schedule over MPI: compiled once to a program, bound to memory as a plan of persistent requests, run often.

A plan is a flat list of calls without arguments: Start, copy, Wait, reduce, meet. Measured: 1.7 us for 4 bytes between
two ranks; interpreting the same schedule at every call 7 us. To bind a program (program.py) to other memory takes about
a microsecond a message.

A plan names the caller's memory by address and keeps nothing of it alive, so it may only be run for a call whose
buffers lie at those addresses: they are part of the key in the cache (plan_cache.py).
"""

from collections.abc import Callable, Iterable

from mpi4py import MPI

from collectives.node_memory.plans import memory_of
from collectives.running.buffers import allocate, copying
from collectives.running.program import LANDING, Program, Start, Wait
from collectives.steps import Compute, Copy, Meet, Reduce, Slice, reads, writes

REQUEST = 2 << 10  # bytes that a persistent request takes, here and in the MPI library (measured, Open MPI)


class Plan:
    """One rank's schedule as persistent requests on given memory.

    Parameters
    ----------
    program : Program
    comm : MPI.Intracomm on which no other messages travel with this tag
    buffers : name -> MPI.buffer, the memory of "x" and "y"; other names get scratch memory of the plan's own. Where the
        schedule names buffers of other ranks, (name, rank) -> MPI.buffer as well
    datatype : MPI.Datatype of an element
    extent : int
        bytes from one element to the next
    combine : function (source, target) -> call that does target = source (+) target; both are (memory, count, first
        element, datatype). None without reductions
    total : for a program with reductions made together: function (operands from left to right, target) -> calls that
        make their sum
    meet : function (Meet) -> call that waits until its ranks have come
    compute : function (Compute, memory of what it reads, of what it writes) -> call
    commutes : whether b (+) a is a (+) b to the last bit, so that operands may swap sides for speed
    synchronous : send with Ssend semantics (for tests)
    before, after : calls to make around the rounds
    keep : what must live as long as the plan: the key of a cached plan holds ids of operations and datatypes
    left : called with the exception that has ended a run before its end, and where that began if not here
    """

    used, busy = False, 0  # run since the cache last looked; in flight so many times
    left_early = False  # whether a run has ended before its end
    gone = False  # whether it is for shared memory that its owner has left, as SharedPlan says it

    def __init__(
        self,
        program: Program,
        comm: MPI.Intracomm,
        buffers: dict,
        datatype: MPI.Datatype = MPI.BYTE,
        extent: int = 1,
        combine: Callable | None = None,
        total: Callable | None = None,
        meet: Callable | None = None,
        compute: Callable | None = None,
        commutes: bool = False,
        synchronous: bool = False,
        tag: int = 0,
        before: Iterable[Callable] = (),
        after: Iterable[Callable] = (),
        keep: Iterable = (),
        left: Callable[[BaseException, str], None] = lambda error, place: None,
    ):
        own = {name: allocate(n * extent) for name, n in program.reach.items() if name not in buffers}
        self.memory, self.datatype, self.extent, self.keep = buffers | own, datatype, extent, keep
        self.program = program
        self.rank, self.combine, self.commutes, self.left = program.rank, combine, commutes, left
        send, receive = comm.Ssend_init if synchronous else comm.Send_init, comm.Recv_init
        self.requests: list[MPI.Prequest] = [
            (send if sends else receive)((self.memory[buf], hi - lo, lo, datatype), peer, tag)
            for sends, peer, buf, lo, hi in program.transfers
        ]
        self.receives = [q for q, t in zip(self.requests, program.transfers, strict=True) if not t.sends]
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
                self.calls += self.reduction(s)
            elif kind is Copy:
                self.calls.append(copying(*map(self.slice, writes(s, self.rank) + reads(s, self.rank))))
            elif kind is Meet:
                self.calls.append(meet(s))
            elif kind is Compute:
                sides = reads(s, self.rank), writes(s, self.rank)
                self.calls.append(compute(s, *([self.slice(place) for place in side] for side in sides)))
            else:
                self.calls += total([self.slice(place) for place in s.operands], self.slice(s.target))
        self.calls.extend(after)
        self.bytes = len(self.requests) * REQUEST + memory_of((*own.values(), *keep))

    def __call__(self):
        self.used = True
        try:
            for call in self.calls:
                call()
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error, place=""):
        """A run has ended before its end."""
        self.left_early = True
        try:
            self.take_back()
        finally:
            self.left(error, place)

    def take_back(self):
        """Cancel the receives that are still posted: what comes late is not for the caller's memory."""
        for request in self.receives:
            if not request.Test():
                request.Cancel()
                request.Wait()

    def whole(self, place: Slice) -> MPI.buffer:
        """The memory of the buffer that a slice is of."""
        return self.memory[place.buf if place.rank == self.rank else (place.buf, place.rank)]

    def operand(self, place: Slice) -> tuple:
        """Elements as MPI takes them."""
        return self.whole(place), place.hi - place.lo, place.lo, self.datatype

    def slice(self, place: Slice) -> MPI.buffer:
        """Elements as bytes."""
        return self.whole(place)[place.lo * self.extent : place.hi * self.extent]

    def reduction(self, s: Reduce) -> list[Callable]:
        """Calls for target = source (+) target, or target (+) source; for the latter the sum is made in the source."""
        (read,), (written,) = reads(s, self.rank), writes(s, self.rank)
        source, target = self.operand(read), self.operand(written)
        if s.left or self.commutes:
            return [self.combine(source, target)]
        made, before = self.slice(read), []
        if s.src != LANDING:  # it must stay as it is
            kept, made = made, allocate(made.nbytes)
            before, source = [copying(made, kept)], (made, s.hi - s.lo, 0, self.datatype)
        return [*before, self.combine(target, source), copying(self.slice(written), made)]

    def free(self):
        """Free the requests; the plan cannot be run afterwards."""
        for q in self.requests:
            try:
                q.Free()
            except MPI.Exception:
                if not self.left_early:  # after an error Open MPI 4.1 has freed the request itself
                    raise
        self.requests, self.receives, self.calls, self.waits = [], [], [], {}


class Sequence:
    """Plans one after another."""

    used, busy = False, 0

    def __init__(self, before, plans, after, keep=()):
        self.plans, self.keep = plans, keep
        self.calls = [*before, *plans, *after]
        self.bytes = sum(plan.bytes for plan in plans) + memory_of(keep)

    def __call__(self):
        self.used = True
        for call in self.calls:
            call()

    @property
    def gone(self):
        return any(plan.gone for plan in self.plans)

    def free(self):
        for plan in self.plans:
            plan.free()


class Native:
    """Stands where a plan would: the call belongs to the MPI library."""

    bytes, used, busy, gone = 0, False, 0, False

    def free(self):
        """There is nothing to free."""


NATIVE = Native()


class Once:
    """A plan that nothing can find again: run, then freed."""

    def __init__(self, plan: Callable):
        self.plan = plan

    def __call__(self):
        try:
            self.plan()
        finally:
            self.plan.free()
