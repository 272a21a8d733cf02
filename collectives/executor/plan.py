"""Runs a schedule: compiled once to a program, bound to memory as a plan, run often.

A plan is a flat list of calls without arguments: Start, copy, Test, sum, barrier. Test stands where MPI's Wait would,
which nothing ends. Measured: 1.7 us for 4 bytes between two ranks; interpreting the same schedule at every call 7 us.
To bind a program (program.py) to other memory takes about a microsecond a message. Schedules that use slots, which
alternate from call to call, are bound twice.

A plan names the caller's memory by address and keeps nothing of it alive, so it may only be run for a call whose
buffers lie at those addresses: they are part of the key in the cache (running/plan_cache.py).
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.executor.fusing import SumInto
from collectives.executor.program import LANDING, Program, Start, Transfer, Wait
from collectives.steps import SLOTS, Barrier, Compute, Copy, Reduce, Slice, reads, writes

REQUEST = 2 << 10  # bytes that a persistent request takes, here and in the MPI library (measured, Open MPI)
LOOKS = range(500)  # at a request before it counts as long
STEP = 1 << 10  # bytes that a copy or a sum of a block takes in a plan, with its views (measured)


class Disagreement(ValueError):
    """The ranks came to the first barrier of a call with different signatures: all of them raise it, nothing has moved.

    The communicator can be used on.
    """


class Plan:
    """One rank's schedule on given memory: persistent requests, copies, sums and barriers.

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
    sum_into : for a program with fused sums: function (operands from left to right, targets) -> calls that write the
        sum of the operands, each as memory, into all targets
    barrier : function (Barrier) -> call that waits until its ranks have come
    compute : function (Compute, memory of what it reads, of what it writes) -> call
    commutes : whether b (+) a is a (+) b to the last bit, so that operands may swap sides for speed
    synchronous : send with Ssend semantics (for tests)
    before, after : calls to make around the rounds
    keep : what must live as long as the plan: the key of a cached plan holds ids of operations and datatypes
    on_abort : called with the exception that has aborted a run, and where that began if not here
    slots : what counts the epochs of double-buffered slots (`epoch`), for a program that uses them
    agree : called in place of the first barrier: it compares what all ranks call, and raises Disagreement
    split_barrier : function (Barrier, whether it is the first) -> the same, with Start, Test and Wait, in flight
    wait_long : called with a request that has not come soon and its Transfer, returns when it has; by default MPI waits
    owners : weak references to what this plan's shared memory belongs to
    """

    used, busy = False, 0  # run since the cache last looked; how many times it is in flight
    aborted = False  # whether a run was aborted

    def __init__(
        self,
        program: Program,
        comm: MPI.Intracomm | None,
        buffers: dict,
        datatype: MPI.Datatype = MPI.BYTE,
        extent: int = 1,
        combine: Callable | None = None,
        sum_into: Callable | None = None,
        barrier: Callable | None = None,
        compute: Callable | None = None,
        commutes: bool = False,
        synchronous: bool = False,
        tag: int = 0,
        before: Iterable[Callable] = (),
        after: Iterable[Callable] = (),
        keep: Iterable = (),
        on_abort: Callable[[BaseException, str], None] = lambda error, place: None,
        slots=None,
        agree: Callable | None = None,
        split_barrier: Callable | None = None,
        wait_long: Callable[[MPI.Prequest, Transfer], None] | None = None,
        owners: Iterable[Callable] = (),
    ):
        own = {name: allocate(n * extent) for name, n in program.lengths.items() if name not in buffers}
        self.memory, self.datatype, self.extent, self.keep = buffers | own, datatype, extent, keep
        self.program, self.rank, self.combine, self.commutes = program, program.rank, combine, commutes
        self.sum_into, self.barrier, self.compute, self.wait_long = sum_into, barrier, compute, wait_long
        self.on_abort, self.agree, self.owners = on_abort, agree, owners
        self.requests: list[MPI.Prequest] = []
        if program.transfers:
            send, receive = comm.Ssend_init if synchronous else comm.Send_init, comm.Recv_init
            self.requests = [
                (send if sends else receive)((self.memory[buf], hi - lo, lo, datatype), peer, tag)
                for sends, peer, buf, lo, hi in program.transfers
            ]
        self.receives = [q for q, t in zip(self.requests, program.transfers, strict=True) if not t.sends]
        self.before, self.after = tuple(before), tuple(after)
        self.slots, self.split_barrier = slots if program.epoch_parity else None, split_barrier
        self.waits: dict[int, object] = {}  # place among the calls -> the request that it waits for
        self.tests: dict[int, tuple[MPI.Prequest, Transfer]] = {}  # id of a Test among the calls -> what it tests
        self.variants = [self.bind(epoch) for epoch in ((0, 1) if self.slots else (0,))]
        self.calls: list[Callable[[], object]] = self.variants[0]
        waiting = any(type(s) is Barrier for s in program.instructions)
        self.in_flight: dict[int, tuple[list, dict]] = {} if waiting else {0: (self.calls, self.waits)}  # by epoch
        self.bytes = len(self.requests) * REQUEST + memory_of((*own.values(), *keep)) + self.steps * STEP

    def stepwise(self) -> tuple[list[Callable[[], object]], dict[int, object]]:
        """Return the calls for a run that need not wait, and at which places what can be asked whether it would."""
        epoch = self.slots.epoch & 1 if self.slots else 0
        if epoch not in self.in_flight:
            waits: dict[int, object] = {}
            self.in_flight[epoch] = self.bind(epoch, waits), waits
        return self.in_flight[epoch]

    def bind(self, epoch: int, split: dict[int, object] | None = None) -> list[Callable[[], object]]:
        """Return the calls where the first epoch uses the even slots (0) or the odd ones (1).

        Where `split` is given each barrier is two calls, and what they wait for is entered there.
        """
        calls: list[Callable[[], object]] = [*self.before]
        agree, self.steps = self.agree, 0
        waits = self.waits if split is None else split
        for s in self.program.instructions:
            kind = type(s)
            if kind is Start:
                calls.append(self.requests[s.transfer].Start)
            elif kind is Wait:
                request = waits[len(calls)] = self.requests[s.transfer]
                calls.append(request.Test if self.wait_long else request.Wait)
                self.tests[id(calls[-1])] = request, self.program.transfers[s.transfer]
            elif kind is Reduce:
                calls += self.reduction(s)
            elif kind is Copy:
                calls.append(
                    copying(*(self.slice(place, epoch) for place in writes(s, self.rank) + reads(s, self.rank)))
                )
            elif kind is Barrier and split is not None:
                barrier = self.split_barrier(s, agree is not None)
                waits[len(calls) + 1] = barrier
                calls += [barrier.Start, barrier.Wait]
                agree = None
            elif kind is Barrier:
                calls.append(agree or self.barrier(s))
                agree = None
            elif kind is Compute:
                sides = reads(s, self.rank), writes(s, self.rank)
                calls.append(self.compute(s, *([self.slice(place) for place in side] for side in sides)))
            elif kind is SumInto:
                sums = self.sum_into(*([self.slice(place, epoch) for place in side] for side in s))
                self.steps += len(sums) * (2 if self.slots else 1)
                calls += sums
            else:
                raise TypeError(f"{s!r} is an instruction that a plan cannot carry out")
        return [*calls, *self.after]

    def __call__(self):
        self.used = True
        try:
            for call in self.calls if self.slots is None else self.variants[self.slots.epoch & 1]:
                if call() is False and id(call) in self.tests:  # `carry_out`, without function calls
                    for _ in LOOKS:
                        if call():
                            break
                    else:
                        self.wait_long(*self.tests[id(call)])
        except Disagreement:
            raise
        except BaseException as error:
            self.abort(error)
            raise

    def carry_out(self, call: Callable[[], object]) -> None:
        """Make one of the calls; where it is the Test of a message, return when that has come or gone."""
        if call() is False and id(call) in self.tests:  # what a Compute returns is its own affair
            self.wait_long(*self.tests[id(call)])

    def abort(self, error, place=""):
        """Abort a run: take back its receives, and call `on_abort`."""
        self.aborted = True
        try:
            self.take_back()
        finally:
            self.on_abort(error, place)

    def take_back(self):
        """Cancel the receives that are still posted: what comes late is not for the caller's memory."""
        for request in self.receives:
            if not request.Test():
                request.Cancel()
                request.Wait()

    @property
    def orphaned(self) -> bool:
        """Whether the caller has dropped a shared array: the plan can never run again, and keeps the memory mapped."""
        return any(owner() is None for owner in self.owners)

    def whole(self, place: Slice, epoch: int = 0) -> MPI.buffer:
        """Return the memory of the buffer that a slice is of."""
        name = SLOTS[SLOTS.index(place.buf) ^ epoch] if place.buf in SLOTS else place.buf
        return self.memory[name if place.rank == self.rank else (name, place.rank)]

    def operand(self, place: Slice) -> tuple:
        """Elements as MPI takes them."""
        return self.whole(place), place.hi - place.lo, place.lo, self.datatype

    def slice(self, place: Slice, epoch: int = 0) -> MPI.buffer:
        """Elements as bytes."""
        return self.whole(place, epoch)[place.lo * self.extent : place.hi * self.extent]

    def reduction(self, s: Reduce) -> list[Callable]:
        """Calls for target = source (+) target, or target (+) source; for the latter the sum is made in the source."""
        (read,), (written,) = reads(s, self.rank), writes(s, self.rank)
        source, target = self.operand(read), self.operand(written)
        if s.operand_left or self.commutes:
            return [self.combine(source, target)]
        total, before = self.slice(read), []
        if s.src != LANDING:  # it must stay as it is
            operand_memory, total = total, allocate(total.nbytes)
            before, source = [copying(total, operand_memory)], (total, s.hi - s.lo, 0, self.datatype)
        return [*before, self.combine(target, source), copying(self.slice(written), total)]

    def free(self):
        """Free the requests; the plan cannot be run afterwards."""
        for q in self.requests:
            try:
                q.Free()
            except MPI.Exception:
                if not self.aborted:  # after an error Open MPI 4.1 has freed the request itself
                    raise
        self.requests, self.receives, self.variants, self.calls, self.waits, self.tests = [], [], [], [], {}, {}


# ------------------------------------------------------------------------------------- memory, as bytes and as arrays


def allocate(nbytes: int) -> MPI.buffer:
    """Return new memory."""
    return MPI.buffer.frombuffer(np.empty(nbytes, np.uint8))


def array(memory: MPI.buffer, dtype=np.uint8) -> np.ndarray:
    """Return memory as an array."""
    return np.frombuffer(memory, dtype) if memory.nbytes else np.empty(0, dtype)


def copying(target: MPI.buffer, source: MPI.buffer) -> Callable[[], None]:
    """Return the call target[:] = source."""
    return partial(target.__setitem__, slice(None), source)


def memory_of(kept: Iterable) -> int:
    """Return the bytes of memory among what a plan keeps alive."""
    return sum(getattr(m, "nbytes", 0) for m in kept)


NATIVE = Plan(Program(()), None, {})  # stands where a plan would: the call belongs to the MPI library
