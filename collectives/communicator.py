"""An mpi4py communicator whose collectives are the schedules of collectives/algorithms.

    communicator = Communicator(MPI.COMM_WORLD, allreduce="ring")
    communicator.Allreduce(MPI.IN_PLACE, gradients)

The upper-case methods keep mpi4py's signatures, with one keyword more: `algorithm`. What is not defined here is the MPI
library's own. A call whose arguments have been seen before costs about a microsecond over its messages: the plan is
found by address, size, dtype and flags of the arrays, and by the operation (keys.py).
"""

import os
from functools import wraps

import numpy as np
from mpi4py import MPI

from collectives.executor import Once, PlanCache
from collectives.keys import constant, fingerprint
from collectives.messages import incoming
from collectives.nonblocking import Draining, Queue
from collectives.planner import NATIVE, Planner, can_share
from collectives.selection import Call
from collectives.shortcuts import Calls, shortcuts

IN_PLACE = MPI.IN_PLACE
ndarray = np.ndarray
HALF = np.dtype(np.float16).num


class Communicator(MPI.Intracomm):
    """An intracommunicator that runs hand-written collectives.

    It shares the handle of `comm` and works on a private duplicate, so that its messages never meet others. Creating
    one is collective. Not for use by several threads at once.

    Parameters
    ----------
    comm : MPI.Intracomm
    progress : bool
        let a thread advance nonblocking collectives (nonblocking.py); needs MPI.THREAD_MULTIPLE, mpi4py's default
    watch : float
        seconds after which a call that does not end is reported, with who waits for whom (watchdog.py); 0 for never,
        by default RINGPROP_WATCH
    abort : bool
        end all ranks after that report
    debug : bool
        compare counts, datatypes, operations and roots of all ranks before each collective; by default RINGPROP_DEBUG
    synchronous : bool
        send with Ssend semantics, so that a schedule that relies on buffering hangs (for tests)
    algorithms : operation=name
        e.g. allreduce="ring", reduce="native"; "auto", the default, chooses by size. The names are those of
        ALGORITHMS[operation]. A call may say otherwise: Allreduce(..., algorithm="doubling").

    Raises
    ------
    ValueError
        for an unknown operation or algorithm; in a call for counts, roots or buffers that do not fit each other
    TypeError
        in a call for datatypes that do not fit each other
    """

    _plans = {}  # so on an instance that mpi4py made itself: its first collective prepares it
    _planner = None
    _shortcuts = {}
    _watchdog = _agreement = None
    _observed = {}  # watch, abort, debug, where one of them is on

    def __new__(cls, comm=None, **_):
        return super().__new__(cls, comm)

    def __init__(
        self,
        comm=None,
        *,
        progress: bool = False,
        synchronous: bool = False,
        watch: float | None = None,
        abort: bool = True,
        debug: bool | None = None,
        **algorithms: str,
    ):
        self._prepare(progress, synchronous, algorithms)
        limit = seconds(os.environ.get("RINGPROP_WATCH", "0")) if watch is None else watch
        if debug is None:
            debug = os.environ.get("RINGPROP_DEBUG", "0") not in ("", "0")
        selection = self._planner.selection
        facts = {
            "how to observe calls": {"watch": limit, "abort": abort, "debug": debug},
            "algorithms": selection.names,
            "the table of algorithms": selection.table,
        }
        told = MPI.Intracomm(self).allgather(facts)
        for rank, others in enumerate(told):  # some would wait for messages that others do not send
            for what, first in told[0].items():
                if others[what] != first:
                    raise ValueError(f"ranks disagree on {what}: rank 0 has {first}, rank {rank} {others[what]}")
        if limit or debug:
            self._observe(limit, abort, debug)

    def _observe(self, limit, abort, debug):
        """Note every call, for the watchdog and the check that ranks agree (watchdog.py)."""
        from collectives.agreement import Agreement
        from collectives.watchdog import Watchdog, watched

        self._observed = {"watch": limit, "abort": abort, "debug": debug}
        native = MPI.Intracomm(self)
        if debug:
            self._without_shortcuts()
            self._agreement = Agreement(native.Dup())
        if limit:
            self._watchdog = Watchdog(self._calls, native.Dup(), limit, abort)
            self._watchdog.start()
        self.__class__ = watched(type(self))

    def _prepare(self, progress=False, synchronous=False, algorithms=None):
        if progress and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("progress=True needs an MPI library that was started with MPI.THREAD_MULTIPLE")
        self._planner = Planner(MPI.Intracomm(self).Dup(), algorithms or {}, synchronous)
        self._later, self._later_plans = self._planner.nonblocking(), PlanCache()
        self._queue = Queue(self._in_flight, progress)
        self._cache = PlanCache()
        self._in_flight(False)
        self._calls = Calls()
        if type(self) is Communicator and not synchronous:  # a subclass may have other methods
            below, waiting, known = self._planner.selection.native_below, self._queue.waiting, self._cache.known
            self._shortcuts = shortcuts(self, MPI.Intracomm(self), below, waiting, known, self._calls)
            self.__dict__.update(self._shortcuts)

    def _in_flight(self, any_):
        """Called when the first nonblocking collective starts, and when the last one is done."""
        self._plans = Draining(self) if any_ else self._cache

    def Dup(self, info: MPI.Info = MPI.INFO_NULL, progress: bool | None = None) -> "Communicator":
        """The same ranks, with the same settings but for `progress` where that is given (collective)."""
        self._finish()
        return self._like(super().Dup(info), progress)

    def Split(self, color: int = 0, key: int = 0) -> "Communicator":
        """The ranks of one color, in order of their keys, with the same settings (collective)."""
        self._finish()
        return self._like(super().Split(color, key))

    def _like(self, comm, progress=None):
        """A communicator made of this one, with the same settings."""
        if comm == MPI.COMM_NULL or self._planner is None:
            return comm
        progress = self._queue.progress if progress is None else progress
        observed = self._observed or {"watch": 0, "debug": False}
        given = self._planner.selection.given
        return Communicator(comm, progress=progress, synchronous=self._planner.synchronous, **observed, **given)

    def release(self):
        """Free the plans and the private duplicate (collective).

        The next collective makes them anew, with default settings.
        """
        if self._planner is not None:
            self._queue.close()
            if self._observed:
                self.__class__ = type(self).__base__
                if self._watchdog is not None:
                    self._watchdog.stop()
                    self._watchdog.comm.Free()
                if self._agreement is not None:
                    self._agreement.free()
                self._agreement, self._watchdog, self._observed = None, None, {}
            self._cache.free()
            self._later_plans.free()
            self._planner.free()
            self._without_shortcuts()
            self._planner, self._plans = None, {}

    def Free(self):
        """Free the plans, the private duplicate and the communicator itself (collective)."""
        self.release()
        super().Free()

    def empty(self, shape: int | tuple[int, ...], dtype=float) -> np.ndarray:
        """An array of zeros in memory that the ranks of a node share, one for each rank, of one shape (collective).

        Collectives on such arrays, or on the same part of them on every rank, need no copies inside a node.
        """
        self._prepared()
        self._queue.finish()
        return self._planner.window.empty(shape, dtype)

    def explain(
        self, operation: str, count: int, dtype="f4", op: MPI.Op = MPI.SUM, algorithm: str | None = None
    ) -> str:
        """Which algorithm a call runs, and why: explain("allreduce", 1000, "f4")."""
        self._prepared()
        selection, dtype = self._planner.selection, np.dtype(dtype)
        asked = selection.asked(operation, algorithm)
        half, ordered = dtype.num == HALF, not op.Is_commutative()
        call = Call(operation, count * dtype.itemsize, ordered=ordered, shareable=can_share(op, dtype), half=half)
        name, why = selection.reason(asked, call)
        place = {"node": "on one node", "network": "on a node each", "nodes": "on several nodes"}[selection.place]
        return f"{operation} of {count:,} {dtype}, {selection.size} ranks {place}: {name}, because {why}"

    def compile(self, rounds, op: MPI.Op = MPI.SUM, **buffers: np.ndarray):
        """A schedule of one's own as a plan for `Run`: compile(rounds, x=gradients).

        Parameters
        ----------
        rounds : iterable of tuples of steps
            This rank's part; check it with `collectives.simulate`.
        op : MPI.Op
            What RecvReduce and Reduce do.
        buffers : contiguous arrays of one dtype
            What the steps name; other names are scratch. They must live as long as the plan; plan.free() ends it.
        """
        self._prepared()
        return self._planner.schedule(rounds, op, buffers)

    def Run(self, plan, name: str = "") -> None:
        """Carry out a plan of `compile`, once; every rank its own, in the same order. `name` is for the watchdog."""
        self._queue.finish()
        plan()

    def _without_shortcuts(self):
        for name in self._shortcuts:
            del self.__dict__[name]
        self._shortcuts = {}

    def _prepared(self):
        if self._planner is None:
            self._prepare()

    def _finish(self):
        """Let what is in flight finish before a collective of the library: a rank may wait for it before it comes."""
        if self._planner is not None:
            self._queue.finish()

    def _new(self, key, operation, *arguments):
        """Plan a call that has not been seen before."""
        self._prepared()
        self._queue.finish()
        plan = getattr(self._planner, operation)(*arguments)
        if key is not None:
            return self._cache.put(key, plan)
        return plan if plan is NATIVE else Once(plan)

    def _start(self, key, operation, buffers, *arguments):
        """Start a nonblocking collective; None where it is the library's."""
        self._prepared()
        plan = self._later_plans.get(key)
        if plan is None:
            plan = getattr(self._later, operation)(*arguments)
            if key is not None:
                self._later_plans.put(key, plan)
        if plan is NATIVE:
            if self._queue.agreed is not None:
                self._queue.agreed(True)
            return None
        return self._queue.start(operation, plan, buffers, plan.free if key is None else NATIVE.free)

    # ------------------------------------------------------------------------------------- the collectives

    def Barrier(self, algorithm: str | None = None):
        """Return when every rank has called it."""
        key = "barrier", algorithm
        plan = self._plans.get(key) or self._new(key, "barrier", algorithm)
        return plan() if plan is not NATIVE else super().Barrier()

    def Bcast(self, buf, root: int = 0, algorithm: str | None = None):
        """buf of every rank = buf of the root."""
        key = fingerprint("broadcast", algorithm, root, buf)
        plan = self._plans.get(key) or self._new(key, "broadcast", buf, root, algorithm)
        return plan() if plan is not NATIVE else super().Bcast(buf, root)

    def Scatter(self, sendbuf, recvbuf, root: int = 0, algorithm: str | None = None):
        """recvbuf of rank i = block i of the root's sendbuf."""
        key = fingerprint("scatter", algorithm, root, sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "scatter", sendbuf, recvbuf, root, algorithm)
        return plan() if plan is not NATIVE else super().Scatter(sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf, recvbuf, root: int = 0, algorithm: str | None = None):
        """As Scatter, with blocks [data, counts, displacements, datatype] that only the root knows."""
        plan = self._new(None, "scatter", sendbuf, recvbuf, root, algorithm, True)
        return plan() if plan is not NATIVE else super().Scatterv(sendbuf, recvbuf, root)

    def Gather(self, sendbuf, recvbuf, root: int = 0, algorithm: str | None = None):
        """Block i of the root's recvbuf = sendbuf of rank i."""
        key = fingerprint("gather", algorithm, root, sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "gather", sendbuf, recvbuf, root, algorithm)
        return plan() if plan is not NATIVE else super().Gather(sendbuf, recvbuf, root)

    def Gatherv(self, sendbuf, recvbuf, root: int = 0, algorithm: str | None = None):
        """As Gather, with blocks [data, counts, displacements, datatype] that only the root knows."""
        plan = self._new(None, "gather", sendbuf, recvbuf, root, algorithm, True)
        return plan() if plan is not NATIVE else super().Gatherv(sendbuf, recvbuf, root)

    def Allgather(self, sendbuf, recvbuf, algorithm: str | None = None):
        """Block i of every rank's recvbuf = sendbuf of rank i."""
        key = fingerprint("allgather", algorithm, False, sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "allgather", sendbuf, recvbuf, algorithm)
        return plan() if plan is not NATIVE else super().Allgather(sendbuf, recvbuf)

    def Allgatherv(self, sendbuf, recvbuf, algorithm: str | None = None):
        """As Allgather, with blocks [data, counts, displacements, datatype]."""
        key = fingerprint("allgather", algorithm, True, sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "allgather", sendbuf, recvbuf, algorithm, True)
        return plan() if plan is not NATIVE else super().Allgatherv(sendbuf, recvbuf)

    def Alltoall(self, sendbuf, recvbuf, algorithm: str | None = None):
        """Block i of recvbuf = block `rank` of rank i's sendbuf."""
        key = fingerprint("alltoall", algorithm, False, sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "alltoall", sendbuf, recvbuf, algorithm)
        return plan() if plan is not NATIVE else super().Alltoall(sendbuf, recvbuf)

    def Alltoallv(self, sendbuf, recvbuf, algorithm: str | None = None):
        """As Alltoall, with blocks [data, counts, displacements, datatype] on both sides."""
        key = fingerprint("alltoall", algorithm, True, sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "alltoall", sendbuf, recvbuf, algorithm, True)
        return plan() if plan is not NATIVE else super().Alltoallv(sendbuf, recvbuf)

    def Reduce(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, root: int = 0, algorithm: str | None = None):
        """recvbuf of the root = sendbuf of rank 0 (+) ... (+) that of the last."""
        key = fingerprint("reduce", algorithm, (id(op), op.handle, root), sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "reduce", sendbuf, recvbuf, op, root, algorithm)
        return plan() if plan is not NATIVE else super().Reduce(sendbuf, recvbuf, op, root)

    def Allreduce(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        """recvbuf of every rank = sendbuf of rank 0 (+) ... (+) that of the last."""
        key = fingerprint("allreduce", algorithm, (id(op), op.handle), sendbuf, recvbuf)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new(key, "allreduce", sendbuf, recvbuf, op, algorithm)
            usual = algorithm is None and sendbuf is IN_PLACE and op is MPI.SUM and type(recvbuf) is ndarray
            if usual and plan is not NATIVE:
                self._cache.known.note(recvbuf, plan)
        return plan() if plan is not NATIVE else super().Allreduce(sendbuf, recvbuf, op)

    def Reduce_scatter(self, sendbuf, recvbuf, recvcounts=None, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        """recvbuf = block `rank` of the sum of every rank's sendbuf; `recvcounts` tells all blocks' lengths."""
        if recvcounts is None:
            recvcounts = self.allgather(incoming(recvbuf).count)
        key = fingerprint("reduce_scatter", algorithm, (id(op), op.handle, constant(recvcounts)), sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "reduce_scatter", sendbuf, recvbuf, recvcounts, op, algorithm)
        return plan() if plan is not NATIVE else super().Reduce_scatter(sendbuf, recvbuf, recvcounts, op)

    def Reduce_scatter_block(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        """recvbuf = block `rank` of the sum of every rank's sendbuf; blocks of one length."""
        key = fingerprint("reduce_scatter", algorithm, (id(op), op.handle), sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "reduce_scatter", sendbuf, recvbuf, None, op, algorithm)
        return plan() if plan is not NATIVE else super().Reduce_scatter_block(sendbuf, recvbuf, op)

    def Scan(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        """recvbuf = sendbuf of rank 0 (+) ... (+) that of this rank."""
        key = fingerprint("scan", algorithm, (id(op), op.handle), sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "scan", sendbuf, recvbuf, op, algorithm)
        return plan() if plan is not NATIVE else super().Scan(sendbuf, recvbuf, op)

    def Exscan(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        """recvbuf = sendbuf of rank 0 (+) ... (+) that of the rank before; rank 0 keeps its own."""
        key = fingerprint("exscan", algorithm, (id(op), op.handle), sendbuf, recvbuf)
        plan = self._plans.get(key) or self._new(key, "exscan", sendbuf, recvbuf, op, algorithm)
        return plan() if plan is not NATIVE else super().Exscan(sendbuf, recvbuf, op)

    # ------------------------------------------------------------------------------ the nonblocking ones

    def poke(self) -> None:
        """Advance the nonblocking collectives in flight, without waiting."""
        if self._planner is not None:
            self._queue.poke()

    def Ibcast(self, buf, root: int = 0, algorithm: str | None = None):
        key = fingerprint("broadcast", algorithm, root, buf)
        request = self._start(key, "broadcast", buf, buf, root, algorithm)
        return request or super().Ibcast(buf, root)

    def Iallreduce(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        key = fingerprint("allreduce", algorithm, (id(op), op.handle), sendbuf, recvbuf)
        request = self._start(key, "allreduce", (sendbuf, recvbuf), sendbuf, recvbuf, op, algorithm)
        return request or super().Iallreduce(sendbuf, recvbuf, op)

    def Iallgather(self, sendbuf, recvbuf, algorithm: str | None = None):
        key = fingerprint("allgather", algorithm, None, sendbuf, recvbuf)
        request = self._start(key, "allgather", (sendbuf, recvbuf), sendbuf, recvbuf, algorithm)
        return request or super().Iallgather(sendbuf, recvbuf)

    def Ireduce_scatter(self, sendbuf, recvbuf, recvcounts=None, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        if recvcounts is None:
            recvcounts = self.allgather(incoming(recvbuf).count)
        buffers = sendbuf, recvbuf
        key = fingerprint("reduce_scatter", algorithm, (id(op), op.handle, constant(recvcounts)), *buffers)
        request = self._start(key, "reduce_scatter", buffers, *buffers, recvcounts, op, algorithm)
        return request or super().Ireduce_scatter(sendbuf, recvbuf, recvcounts, op)

    def Ireduce_scatter_block(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: str | None = None):
        buffers = sendbuf, recvbuf
        key = fingerprint("reduce_scatter", algorithm, (id(op), op.handle), *buffers)
        request = self._start(key, "reduce_scatter", buffers, *buffers, None, op, algorithm)
        return request or super().Ireduce_scatter_block(sendbuf, recvbuf, op)


def seconds(text: str) -> float:
    """RINGPROP_WATCH as a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"RINGPROP_WATCH={text} in the environment: expected seconds, 0 for never") from None


def finishing(name):
    """A collective of Python objects, the MPI library's own, that lets ours finish first."""
    own = getattr(MPI.Intracomm, name)

    @wraps(own)
    def method(self, *args, **kwargs):
        self._finish()
        return own(self, *args, **kwargs)

    return method


OF_OBJECTS = "allgather allreduce alltoall barrier bcast exscan gather reduce scan scatter"
for name in OF_OBJECTS.split():
    setattr(Communicator, name, finishing(name))
