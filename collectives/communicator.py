"""An mpi4py communicator whose collectives are the schedules of collectives/algorithms.

    communicator = Communicator(MPI.COMM_WORLD, allreduce="ring")
    communicator.Allreduce(MPI.IN_PLACE, gradients)

The upper-case methods keep mpi4py's signatures, with one keyword more: `algorithm`; two have `keep`, too. What is not
defined here is the MPI library's own. A call whose arguments have been seen before costs about a microsecond over its
messages: the plan is found by address, size, dtype and flags of the arrays, and by the operation (plan_cache.py).
"""

import errno
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms import shared
from collectives.algorithms.registry import ALGORITHMS, NODES, SHARED_MEMORY
from collectives.choosing.selection import NODE_MEMORY, Call, check_name, parse_seconds
from collectives.executor.plan import NATIVE
from collectives.failures.aborted import Aborted, cause_of
from collectives.failures.agreement import Agreement, describe_call
from collectives.failures.deadline import MARGIN, Deadline
from collectives.failures.job_end import abort_on_exit, finalize_timeout
from collectives.failures.revocation import register, unregister
from collectives.failures.watchdog import PEER, Watchdog, counting
from collectives.node_memory.files import unlink_library_memory
from collectives.node_memory.plans import SMALL_BYTES, SMALL_PRIVATE_BYTES
from collectives.node_memory.reduction import libraries_differ
from collectives.progress import Calls, in_flight, outside, where, with_progress
from collectives.running import plan_moves, plan_reductions
from collectives.running.buffers import for_library, in_words, incoming
from collectives.running.custom_schedules import compile_rounds
from collectives.running.nonblocking import PersistentRequest, Queue
from collectives.running.plan_cache import PlanCache, fingerprint, lasting, shortcuts
from collectives.running.plan_reductions import can_share
from collectives.running.planner import Planner

Algorithm = str | Callable | None  # of a call: a name, a generator function (rank, size, count, ...) of rounds, or auto


class Planned(NamedTuple):
    """What a planning function plans.

    method : the name of its method, here and in the library
    operation : in ALGORITHMS
    blocks : which of "send" and "recv", the latter if in place, has a block for each rank, where no counts say it
    """

    method: str
    operation: str
    blocks: tuple[str, ...] = ()


PLANNED_BY = {
    plan_moves.barrier: Planned("Barrier", "barrier"),
    plan_moves.broadcast: Planned("Bcast", "broadcast"),
    plan_moves.scatter: Planned("Scatter", "scatter", ("send",)),
    plan_moves.scatterv: Planned("Scatterv", "scatter"),
    plan_moves.gather: Planned("Gather", "gather", ("recv",)),
    plan_moves.gatherv: Planned("Gatherv", "gather"),
    plan_moves.allgather: Planned("Allgather", "allgather", ("recv",)),
    plan_moves.allgatherv: Planned("Allgatherv", "allgather"),
    plan_moves.alltoall: Planned("Alltoall", "alltoall", ("send", "recv")),
    plan_moves.alltoallv: Planned("Alltoallv", "alltoall"),
    plan_reductions.reduce: Planned("Reduce", "reduce"),
    plan_reductions.allreduce: Planned("Allreduce", "allreduce"),
    plan_reductions.reduce_scatter: Planned("Reduce_scatter", "reduce_scatter"),
    plan_reductions.reduce_scatter_block: Planned("Reduce_scatter_block", "reduce_scatter", ("send", "recv")),
    plan_reductions.scan: Planned("Scan", "scan"),
    plan_reductions.exscan: Planned("Exscan", "exscan"),
}
BLOCKS = {planned.method: planned.blocks for planned in PLANNED_BY.values()}


def planned_as(operation: str) -> tuple[Callable, Planned]:
    """Return the first planning function of an operation, and what it plans."""
    return next(item for item in PLANNED_BY.items() if item[1].operation == operation)


def persistent_form(blocking: Callable, build: Callable) -> Callable[..., Any]:
    """Return the persistent form of a collective: a method with the same parameters and, as in mpi4py, `info`.

    Parameters
    ----------
    blocking : the blocking method
    build : what plans it, a key of PLANNED_BY
    """
    *parameters, algorithm = [p for p in inspect.signature(blocking).parameters.values() if p.name != "keep"]
    info = algorithm.replace(name="info", default=MPI.INFO_NULL, annotation=MPI.Info)
    signature = inspect.Signature([*parameters, info, algorithm])
    buffers = sum(p.default is p.empty for p in parameters) - 1  # self has no default, either

    def method(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self, *values, _, requested = bound.arguments.values()
        return self._persistent(build, requested, tuple(values[buffers:]), *values[:buffers])

    name = f"{blocking.__name__}_init"
    method.__name__, method.__qualname__, method.__signature__ = name, f"Communicator.{name}", signature
    method.__doc__ = f"Return a persistent request for {blocking.__name__}; its buffers have the same elements."
    return method


class Communicator(MPI.Intracomm):
    """An intracommunicator that runs hand-written collectives.

    It shares the handle of `comm` and works on a private duplicate, which keeps its messages apart. Creating one is
    collective; where it has several ranks, an exception or exit that ends one ends all, unless the program has
    an excepthook of its own. Not for use by several threads at once.

    Parameters
    ----------
    comm : MPI.Intracomm
    progress : bool
        let a thread advance nonblocking collectives (nonblocking.py); needs MPI.THREAD_MULTIPLE, mpi4py's default
    watch : float
        seconds after which a call that does not end is reported, with who waits for whom (watchdog.py); 0 for never,
        by default RINGPROP_WATCH. Ranks of one node that wait for each other give up soon after it; after 300 s where
        none is given. As the program ends, a rank that waits for another one some seconds longer than that is ended by
        SIGALRM, and all with it, unless the program has ended MPI itself
    abort : bool
        end all ranks after that report
    debug : bool
        compare counts, datatypes, operations, roots and algorithms of all ranks before each collective; by default
        RINGPROP_DEBUG
    synchronous : bool
        send with Ssend semantics, so that a schedule that relies on buffering hangs (for tests)
    memory : bool
        use the memory that ranks of a node share; False: messages only, of which MPI can tell that a rank has died
    algorithms : operation=name
        e.g. allreduce="ring", reduce="native"; "auto", the default, chooses by size. The names are those of
        ALGORITHMS[operation]. A call may say otherwise: Allreduce(..., algorithm="doubling").

    Notes
    -----
    Buffers are what mpi4py takes: an array, or [data, count, datatype] and its kin; n counts elements. `algorithm` of a
    call is a name of ALGORITHMS[operation], or its entry; "native" for the MPI library's own, "shared" for the memory
    of a node; "auto", "schedule" for the same without the library's, "messages" without node memory too; or one's own
    generator function (rank, size, count, ...) -> rounds, which is proven on all ranks before anything is sent. Without
    reductions its count, or its blocks, are in bytes.

    Every collective raises

    | error | for |
    |---|---|
    | ValueError | counts, roots or buffers that do not fit each other; an algorithm that there is not |
    | ValueError | with debug=True, on every rank, calls that differ |
    | TypeError, BufferError | datatypes that do not fit each other; a receive buffer that is read-only |
    | ScheduleError | an algorithm of one's own that is wrong: rank, round and step are named |
    | TimeoutError | on one node, ranks that do not come, or send, within 300 s, or what `watch` says |
    | RuntimeError | a message of another call |
    | Aborted | every call after one that has ended early, here or, where that can be known, on another rank |

    A nonblocking one (Iallreduce) raises the last three by Wait and Test; its buffers are not the caller's until Wait
    has returned, or Test has said True. A persistent one (Allreduce_init) is planned by all ranks, which may wait for
    each other in it: Start begins a run, on what the buffers hold then, Wait and Test end it, Free lets go of the plan;
    `info` is not looked at. Both run what a blocking call runs, but for the library's own, which they take only where
    "native" is requested. A nonblocking call runs in node memory if the ranks share some already (`empty`, or a
    blocking call), else by messages, as to make it is to wait for other ranks.

    What a reduction gives is what NumPy makes of it, whatever the algorithm and the size: integers wrap, MAX and MIN of
    a NaN are NaN. The algorithm says in which order operands are combined. "native", where requested, is the library's.

    Raises
    ------
    ValueError
        for an unknown operation or algorithm; where ranks ask for different ones
    RuntimeError
        for `progress`, where MPI was started without threads

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from collectives import Communicator
    >>> communicator = Communicator(MPI.COMM_WORLD, allreduce="ring")
    >>> x = np.ones(8)
    >>> communicator.Allreduce(MPI.IN_PLACE, x)
    >>> bool((x == communicator.size).all())
    True
    >>> communicator.release()
    """

    calls = None  # what a watchdog looks at: which call that waits for other ranks this one is in (progress.Calls)
    _plans = {}  # so on an instance that mpi4py made itself: its first collective prepares it
    planner = None  # what its plans are made with, and the limit of their waits (planner.deadline)
    _wrapped = ()  # methods before which another function stands
    watchdog = agreement = None
    _broken = ""  # why there can be no more calls
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
        memory: bool = True,
        **algorithms: str,
    ):
        register(self)
        watched = os.environ.get("RINGPROP_WATCH") if watch is None else watch
        limit, seconds = parse_seconds(watched or 0, "RINGPROP_WATCH" if watch is None else "watch"), Deadline.seconds
        if watched is not None:
            seconds = limit + MARGIN if limit and abort else math.inf
        with_progress(self._prepare, progress, synchronous, algorithms, memory, seconds)
        if debug is None:
            debug = os.environ.get("RINGPROP_DEBUG", "0") not in ("", "0")
        selection = self.planner.selection
        settings = {
            "how to observe calls": {"watch": limit, "abort": abort, "debug": debug},
            "memory": memory,
            "algorithms": selection.names,
            "the table of algorithms": selection.measured,
        }
        settings_of_ranks = with_progress(MPI.Intracomm(self).allgather, settings)
        for rank, theirs in enumerate(settings_of_ranks):  # some would wait for messages that others do not send
            for name, first in settings_of_ranks[0].items():
                if theirs[name] != first:
                    raise ValueError(f"ranks disagree on {name}: rank 0 has {first}, rank {rank} {theirs[name]}")
        if len(settings_of_ranks) > 1:
            unlink_library_memory()
            abort_on_exit()
        if len(settings_of_ranks) > 1 and limit and abort:
            finalize_timeout(limit + MARGIN)
        if limit or debug:
            with_progress(self._observe, limit, abort, debug)

    def _observe(self, limit, abort, debug):
        """Register every call, for the watchdog and the check that ranks agree (failures)."""
        self._observed = {"watch": limit, "abort": abort, "debug": debug}
        native = MPI.Intracomm(self)
        if debug:
            self.agreement = Agreement(register(native.Dup()), self.planner.wait_or_abort)
        if limit:
            self.watchdog = Watchdog(self.calls, register(native.Dup()), limit, abort)
            self.watchdog.start()
        self._install_wrappers(not debug)

    def _install_wrappers(self, short: bool) -> None:
        """Put wrappers before the methods: shortcuts, and what registers calls for the watchdog."""
        for name in self._wrapped:
            del self.__dict__[name]
        front = {}
        short = short and not self._broken and not self.planner.synchronous
        if short and type(self) is Communicator:  # a subclass may have other methods
            below, known = self.planner.selection.native_below, self.plan_cache.known.entries.get
            front = shortcuts(self, MPI.Intracomm(self), below, in_flight, known)
        if self._observed:
            agree = self._agree if self.agreement else None
            for name in (*COLLECTIVE, *PEER):
                front[name] = counting(name, front.get(name) or getattr(self, name), self.calls, agree)
        for name, function in front.items():
            function.__doc__, function.__qualname__ = getattr(type(self), name).__doc__, f"Communicator.{name}"
        self.__dict__.update(front)
        self._wrapped = tuple(front)

    def _agree(self, name, method, args, kwargs):
        """Compare what all ranks are about to call: now, or where it is nonblocking, before it begins.

        Raises
        ------
        ValueError
            on every rank, with what two of them call and where
        """
        try:
            must_agree = describe_call(name, method, self, args, kwargs, in_words, BLOCKS)
        except (ValueError, TypeError, BufferError) as error:
            must_agree = f"{name} with a mistake: {error}"
        if not name.startswith("I"):
            self.queue.finish()  # others may wait for what is in flight before they come here
        self.queue.agreed = None  # of a call that was refused
        agreed = self.agreement.exchange(must_agree, where(outside()))
        if name.startswith("I"):
            self.queue.agreed = agreed
        else:
            agreed(True)

    def _prepare(self, progress=False, synchronous=False, algorithms=None, memory=True, seconds=Deadline.seconds):
        if progress and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("progress=True needs an MPI library that was started with MPI.THREAD_MULTIPLE")
        self.planner = Planner(MPI.Intracomm(self), algorithms or {}, synchronous, memory, seconds)
        self.planner.on_abort = self._abort
        self.plan_cache, self.calls = PlanCache(), Calls()
        self._plans = self.plan_cache  # in which calls look for theirs
        self.planner.forget_scratch = self.plan_cache.drop_named
        self._persistents = weakref.WeakSet()
        self.queue = Queue(progress, self.planner.refuse_aborted)
        self._install_wrappers(True)

    def _abort(self, error, place):
        """Abort: every later call raises `Aborted`, as it could take messages of this one for its own."""
        rank, place = self.Get_rank(), place or where(outside())
        if not self._broken:
            self._broken = self.queue.broken = cause_of(error, f"rank {rank}", "a collective", f"at {place}: ")
            self.planner.abort(self._broken)
            self._install_wrappers(False)
            self.plan_cache.known.entries.clear()
            self._plans = {}  # so that every call comes to `_new`, which refuses it
        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
            raise RuntimeError(
                f"rank {rank} got a longer message than it expects, one of another call: ranks call different "
                f"collectives, or one with different counts, datatypes, roots or algorithms; or one of them has "
                f"refused its arguments, or left a call before its end, and gone on. Communicator(debug=True), or "
                f"RINGPROP_DEBUG=1, compares the calls of all ranks before data moves"
            ) from error

    def Dup(self, info: MPI.Info = MPI.INFO_NULL, progress: bool | None = None) -> "Communicator":
        """Return a communicator of the same ranks and settings, `progress` apart where that is given (collective)."""
        return self._like(self._after_pending(super().Dup, info), progress)

    def Clone(self) -> "Communicator":
        """Return a communicator of the same ranks and settings (collective)."""
        return self._like(self._after_pending(super().Clone))

    def Split(self, color: int = 0, key: int = 0) -> "Communicator":
        """Return a communicator of the ranks of one color, in order of their keys (collective)."""
        return self._like(self._after_pending(super().Split, color, key))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> MPI.Intracomm:
        """Return a communicator of the ranks of a group (collective over the group)."""
        # What is in flight here may need ranks that are not in the group: it is not finished first.
        return with_progress(super().Create_group, group, tag)

    def _like(self, comm, progress=None):
        """Return `comm`, which was made of this communicator, with the same settings; of a released one, defaults."""
        if comm == MPI.COMM_NULL:
            return comm
        if self.planner is None:
            return Communicator(comm, progress=bool(progress))
        progress = self.queue.progress if progress is None else progress
        observed = self._observed or {"watch": 0, "debug": False}
        algorithms = self.planner.selection.algorithms
        settings = {"synchronous": self.planner.synchronous, "memory": self.planner.selection.memory, **observed}
        communicator = Communicator(comm, progress=progress, **settings, **algorithms)
        communicator.planner.deadline = self.planner.deadline  # watch=0, where it is given, means to wait for ever
        return communicator

    def release(self):
        """Free the plans and the private duplicate (collective). The next collective makes them anew, with defaults.

        RuntimeError, before anything is freed, while collectives are in flight or persistent ones active; those of a
        communicator on which a call has ended early end with it.
        """
        with_progress(self._release)

    def _release(self):
        if self.planner is not None:
            if self._broken:
                self.queue.finish()  # what was in flight has failed: each ends at once, with that error
            elif active := [request for request in self._persistents if request.active]:
                raise RuntimeError(f"{len(active)} persistent collective(s) are active: Wait for them first")
            self.queue.refuse_in_flight()
            if self._observed:
                if self.watchdog is not None:
                    self.watchdog.stop()
                    unregister(self.watchdog.comm).Free()
                if self.agreement is not None:
                    unregister(self.agreement.comm)
                    self.agreement.free(bool(self._broken))
                self.agreement, self.watchdog, self._observed = None, None, {}
            self.plan_cache.free()
            for request in list(self._persistents):
                request.active = False  # one that has been aborted
                request.Free()
            self.planner.free(bool(self._broken))
            self._install_wrappers(False)
            self.planner, self._plans, self._broken = None, {}, ""

    def Free(self):
        """Free the plans, the private duplicate and the communicator itself (collective)."""
        self.release()
        unregister(self)
        with_progress(super().Free)

    def empty(self, shape: int | tuple[int, ...], dtype=float) -> np.ndarray:
        """Return zeros in memory that the ranks of a node share, an array for each rank, all of one shape (collective).

        Collectives on such arrays, or on the same part of them on every rank, need no copies inside a node. Of a
        communicator without `memory` they are ordinary ones.

        Raises
        ------
        ValueError, OSError
            On all ranks, as `SharedWindow.empty`: shapes or dtypes that differ; not enough memory.
        TimeoutError
            Ranks that do not come within 300 s, or what `watch` says.
        """
        self._prepared()
        if not self.planner.selection.memory:
            return np.zeros(shape, dtype)
        return self._after_pending(self._shared, shape, dtype)

    def _shared(self, shape, dtype):
        planner, problem = self.planner, None
        selection, several = planner.selection, planner.selection.place == "nodes"
        try:
            if several and planner.made_window is None and not planner.shares():
                raise OSError(errno.ENOMEM, selection.refused)
            array = planner.window.empty(shape, dtype)
        except (TimeoutError, Aborted) as error:
            self._abort(error, "")
            raise
        except (OSError, ValueError) as error:
            problem = error
        if several and planner.exchange(np.array(problem is not None)).any() and problem is None:
            problem = OSError(errno.ENOMEM, "ranks of another node cannot have such an array")
        if problem is not None:
            raise problem
        self.plan_cache.free()  # a plan for private memory does not fit a shared array that now lies at its address
        if not selection.arrays:
            selection.arrays = True
            self._install_wrappers(not self._observed.get("debug"))
        return array

    def explain(self, operation: str, count: int, dtype="f4", op: MPI.Op = MPI.SUM, algorithm: Algorithm = None) -> str:
        """Return which algorithm a call runs, why, and the files on its path: explain("allreduce", 1000, "f4").

        Each is a schedule that can be checked, priced and drawn, those in shared memory too; only "native" is not.
        `count` is the number of elements of the whole vector. ValueError for an operation or algorithm there is not.

        The second line is the path of a call that is new, from file to file of this package in reading order; its
        schedule is compiled in one step. The third is that of a call that has been seen before.
        """
        reason, schedules = self._explanation(operation, count, dtype, op, algorithm)
        build, planned = planned_as(operation)
        path = [f"communicator.py {planned.method}", "running/plan_cache.py", file_of(build), "running/buffers.py"]
        path.append("choosing/selection.py")
        if not schedules:
            return f"{reason}\n  {' -> '.join([*path, 'the MPI library'])}"
        in_memory = any(schedule is shared for schedule in map(inspect.getmodule, schedules))
        first, *others = map(file_of, schedules)
        compiler = [" or ".join([first, *(name.partition(" ")[2] for name in others)])]
        compiler += ["executor/fusing.py", "executor/program.py"] if in_memory else ["executor/program.py"]
        path.append("node_memory/plans.py" if in_memory else "running/planner.py")
        path += [f"compile({', '.join(compiler)})", "executor/plan.py"]
        calls = "barriers.py, flags.py, reduction.py of node_memory" if in_memory else "requests of the MPI library"
        again = "again: communicator.py -> running/plan_cache.py -> executor/plan.py"
        return f"{reason}\n  {' -> '.join(path)}\n  {again}; the calls of a plan: {calls}"

    def _explanation(self, operation, count, dtype, op, algorithm) -> tuple[str, list[Callable]]:
        """Return which algorithm a call runs and why, and the schedules that it may be; none for the library's."""
        self._prepared()
        selection, dtype = self.planner.selection, np.dtype(dtype)
        check_name(operation, "auto")
        if not isinstance(count, Integral) or count < 0:
            other = f"an array of {count.size} {count.dtype}" if isinstance(count, np.ndarray) else repr(count)
            raise ValueError(f"explain: count is a number of elements, such as x.size, with dtype x.dtype; not {other}")
        requested = selection.requested(operation, algorithm)
        place = {"node": "on one node", "network": "on a node each", "nodes": "on several nodes"}[selection.place]
        title = f"{operation} of {count:,} {dtype}, {selection.size} ranks {place}"
        if callable(requested):
            return f"{title}: {getattr(requested, '__name__', requested)}, because requested", [requested]
        call = Call(operation, count * dtype.itemsize)
        method = getattr(Communicator, planned_as(operation)[1].method)
        if "op" in inspect.signature(method).parameters:  # else elements travel as bytes
            properties = {"shareable": can_share(op, dtype), "numpy": libraries_differ(op, dtype)}
            call = call._replace(float16=dtype == np.float16, ordered=not op.Is_commutative(), **properties)
        name, why = selection.reason(requested, call)
        text = f"{title}: {name}, because {why}"
        if name not in NODE_MEMORY:
            return text, [] if name == "native" else [ALGORITHMS[operation][name].rounds]
        several = selection.place == "nodes"
        variants = [
            n for n, e in ALGORITHMS[operation].items() if SHARED_MEMORY in e.needs and (NODES in e.needs) == several
        ]
        if selection.library_for_private(name, requested, call):
            variants = ["shared_arrays"]
        small = SMALL_PRIVATE_BYTES if operation == "allreduce" else SMALL_BYTES
        if "shared_small" in variants:
            variants.remove("shared_slots" if call.nbytes <= small else "shared_small")
        if len(variants) > 1 and (not selection.arrays or call.nbytes <= SMALL_BYTES):
            variants = [v for v in variants if not v.endswith("arrays")]
        text += f"; schedule {' or, for arrays of empty(), '.join(variants)} of algorithms/shared.py"
        return text, [ALGORITHMS[operation][variant].rounds for variant in variants]

    def compile(
        self,
        rounds: Iterable,
        op: MPI.Op = MPI.SUM,
        computations: dict[str, Callable] | None = None,
        **buffers: np.ndarray,
    ):
        """Return a schedule of one's own as a plan for `Run` (collective): compile(rounds, x=gradients).

        Before anything is sent all ranks' parts are run against each other without values, so that messages that do
        not match, ranks that would wait for ever and races are refused on every rank.

        Parameters
        ----------
        rounds : iterable of tuples of steps
            This rank's part. `collectives.check` says whether all parts together compute what they should.
        op : MPI.Op
            What RecvReduce and Reduce do.
        computations : name -> function
            What a Compute of that name calls, with an array for each slice that it reads, then each that it writes.
        buffers : contiguous arrays of one dtype
            What the steps name; other names are scratch. They must live as long as the plan; plan.free() ends it.
            Those that other ranks name are read and written where they are if they come from `empty`, else in copies
            that all ranks of the node see.

        Raises
        ------
        ScheduleError
            on every rank, for parts that do not fit each other; rank, round and step are named
        ValueError, TypeError
            on every rank, where one rank's part names what is not there: elements, computations, ranks of other nodes
        OSError
            on every rank, where they name each other's buffers and may have no shared memory
        TimeoutError
            on one node, for ranks that do not come within 300 s, or what `watch` says
        """
        self._prepared()
        if self._broken:
            raise Aborted(self._broken)
        return self._after_pending(compile_rounds, self.planner, rounds, op, buffers, computations or {})

    def Run(self, plan, name: str = "") -> None:
        """Carry out a plan of `compile`, once; every rank its own, in the same order. `name` is for the watchdog.

        Raises
        ------
        TimeoutError
            On one node, ranks that do not come, or send, within 300 s, or what `watch` says.
        Aborted
            After a call that has ended early.
        """
        if self._broken:
            raise Aborted(self._broken)
        self._after_pending(plan)

    def Irun(self, plan, name: str = ""):
        """Begin a plan of `compile`. Returns its request, as Iallreduce does.

        Raises
        ------
        Aborted
            After a call that has ended early.
        """
        self._prepared()
        if self._broken:
            raise Aborted(self._broken)
        return self.queue.start(name or "plan", plan, ())

    def _prepared(self):
        if self.planner is None:
            with_progress(self._prepare)

    def _after_pending(self, call, *args, **kwargs):
        """Finish what is in flight here, then make a call that waits for all ranks of this communicator: its result.

        Other ranks may wait for what is in flight before they come; what is in flight elsewhere moves meanwhile.
        """
        if not in_flight:
            return call(*args, **kwargs)
        if self.planner is not None:
            self.queue.finish()
        return with_progress(call, *args, **kwargs)

    def _collective(self, build, algorithm, key_args, *buffers, keep=True):
        """Carry out a collective, which `build` plans: behind those that are in flight, which move meanwhile."""
        if in_flight:
            return self._after_pending(self._carry_out, build, algorithm, key_args, buffers, keep)
        return self._carry_out(build, algorithm, key_args, buffers, keep)

    def _carry_out(self, build, algorithm, key_args, buffers, keep):
        """Run the plan of a call's key, or a new one, or the library's collective. Not `keep`: other ranks may have
        other blocks the next time, or who calls says so."""
        key = fingerprint(build, algorithm, key_args, buffers) if keep else None
        plan = self._plans.get(key) or self._new(key, build, algorithm, key_args, buffers)
        if plan is NATIVE:
            return getattr(MPI.Intracomm, PLANNED_BY[build].method)(self, *buffers, *key_args)
        if key is not None:
            return plan()
        try:
            return plan()
        finally:
            plan.free()

    def _new(self, key, build, algorithm, key_args, buffers):
        """Plan a call that has not been seen before, of a requested name or function."""
        self._prepared()
        if self._broken:
            raise Aborted(self._broken)
        requested = self.planner.selection.requested(PLANNED_BY[build].operation, algorithm)
        native = requested == "native" or any(map(for_library, buffers))
        plan = NATIVE if native else build(self.planner, *buffers, *key_args, requested)
        if key is not None and (plan is not NATIVE or lasting((*buffers, *key_args))):
            self.plan_cache.put(key, plan)
            in_place_sum = build is plan_reductions.allreduce and algorithm is None and key_args == (MPI.SUM,)
            if in_place_sum and plan is not NATIVE and buffers[0] is MPI.IN_PLACE and type(buffers[1]) is np.ndarray:
                self.plan_cache.known.register(buffers[1], plan)  # for a shortcut
        return plan

    def _start(self, build, algorithm, key_args, *buffers, keep=True):
        """Start the nonblocking form of a collective, ours or the library's."""
        self._prepared()
        name, operation, _ = PLANNED_BY[build]
        self.planner.may_wait = False
        try:
            requested = self.planner.requested_in_flight(operation, algorithm)
            key = fingerprint(build, requested, key_args, buffers) if keep else None
            if (plan := self._plans.get(key)) is not None:
                plan.used = True  # so the cache spares it
            else:
                plan = self._new(key, build, requested, key_args, buffers)
        finally:
            self.planner.may_wait = True
        if plan is NATIVE:
            if self.queue.agreed is not None:
                agreed, self.queue.agreed = self.queue.agreed, None
                with_progress(agreed, True)
            return getattr(MPI.Intracomm, f"I{name.lower()}")(self, *buffers, *key_args)
        return self.queue.start(operation, plan, buffers, *([plan.free] if key is None else []))

    def _recvcounts(self, recvcounts, recvbuf):
        """Return the elements of every rank's block, which the ranks send each other where they are not given."""
        if recvcounts is not None or for_library(recvbuf):
            return recvcounts
        self._prepared()
        if self._broken:
            raise Aborted(self._broken)
        count = np.array(incoming(recvbuf).count)
        return self._after_pending(self.planner.exchange, count).tolist()

    def _persistent(self, build, algorithm, key_args, *buffers):
        """Plan the persistent form of a collective (collective): a schedule of ours, unless "native" is requested."""
        self._prepared()
        if build is plan_reductions.reduce_scatter:
            key_args = self._recvcounts(key_args[0], buffers[1]), *key_args[1:]
        name, operation, _ = PLANNED_BY[build]
        requested = self.planner.requested_in_flight(operation, algorithm)
        plan = self._after_pending(self._new, None, build, requested, key_args, buffers)
        if plan is NATIVE:
            return getattr(MPI.Intracomm, f"{name}_init")(self, *buffers, *key_args)
        calls = self.calls if self.watchdog else None
        request = PersistentRequest(self.queue, operation, plan, buffers, calls)
        self._persistents.add(request)
        return request

    # ------------------------------------------------ the collectives: arguments and errors are said of the class

    def Barrier(self, algorithm: Algorithm = None):
        """Return when every rank has called it."""
        return self._collective(plan_moves.barrier, algorithm, ())

    def Bcast(self, buf, root: int = 0, algorithm: Algorithm = None):
        """buf of every rank = buf of the root; n elements on every rank."""
        return self._collective(plan_moves.broadcast, algorithm, (root,), buf)

    def Scatter(self, sendbuf, recvbuf, root: int = 0, algorithm: Algorithm = None):
        """recvbuf of rank i, n elements = block i of the root's sendbuf, which has size * n."""
        return self._collective(plan_moves.scatter, algorithm, (root,), sendbuf, recvbuf)

    def Scatterv(self, sendbuf, recvbuf, root: int = 0, algorithm: Algorithm = None):
        """As Scatter, with blocks [data, counts, displacements, datatype] that only the root knows."""
        return self._collective(plan_moves.scatterv, algorithm, (root,), sendbuf, recvbuf, keep=False)

    def Gather(self, sendbuf, recvbuf, root: int = 0, algorithm: Algorithm = None):
        """Block i of the root's recvbuf, which has size * n elements = sendbuf of rank i, n elements."""
        return self._collective(plan_moves.gather, algorithm, (root,), sendbuf, recvbuf)

    def Gatherv(self, sendbuf, recvbuf, root: int = 0, algorithm: Algorithm = None):
        """As Gather, with blocks [data, counts, displacements, datatype] that only the root knows."""
        return self._collective(plan_moves.gatherv, algorithm, (root,), sendbuf, recvbuf, keep=False)

    def Allgather(self, sendbuf, recvbuf, algorithm: Algorithm = None):
        """Block i of every rank's recvbuf, which has size * n elements = sendbuf of rank i, n elements."""
        return self._collective(plan_moves.allgather, algorithm, (), sendbuf, recvbuf)

    def Allgatherv(self, sendbuf, recvbuf, algorithm: Algorithm = None):
        """As Allgather, with blocks [data, counts, displacements, datatype], the same on every rank."""
        return self._collective(plan_moves.allgatherv, algorithm, (), sendbuf, recvbuf)

    def Alltoall(self, sendbuf, recvbuf, algorithm: Algorithm = None):
        """Block i of recvbuf = block `rank` of rank i's sendbuf; both have size * n elements."""
        return self._collective(plan_moves.alltoall, algorithm, (), sendbuf, recvbuf)

    def Alltoallv(self, sendbuf, recvbuf, algorithm: Algorithm = None):
        """As Alltoall, with blocks [data, counts, displacements, datatype] on both sides; `algorithm` is a name."""
        return self._collective(plan_moves.alltoallv, algorithm, (), sendbuf, recvbuf)

    def Reduce(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, root: int = 0, algorithm: Algorithm = None):
        """recvbuf of the root, n elements = sendbuf of rank 0 (+) ... (+) that of the last, n elements each."""
        return self._collective(plan_reductions.reduce, algorithm, (op, root), sendbuf, recvbuf)

    def Allreduce(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None):
        """recvbuf of every rank, n elements = sendbuf of rank 0 (+) ... (+) that of the last, n elements each."""
        return self._collective(plan_reductions.allreduce, algorithm, (op,), sendbuf, recvbuf)

    def Reduce_scatter(self, sendbuf, recvbuf, recvcounts=None, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None):
        """recvbuf = block `rank` of the sum of every rank's sendbuf.

        `recvcounts` has the elements of every rank's block, whose sum sendbuf has; without it all ranks tell theirs.
        """
        counts = self._recvcounts(recvcounts, recvbuf)
        return self._collective(plan_reductions.reduce_scatter, algorithm, (counts, op), sendbuf, recvbuf)

    def Reduce_scatter_block(
        self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None, keep: bool = True
    ):
        """recvbuf, n elements = block `rank` of the sum of every rank's sendbuf, which has size * n.

        A plan that sends messages has a working copy of sendbuf. `keep` False: it goes when the call ends, and the next
        one plans again.
        """
        return self._collective(plan_reductions.reduce_scatter_block, algorithm, (op,), sendbuf, recvbuf, keep=keep)

    def Scan(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None):
        """recvbuf = sendbuf of rank 0 (+) ... (+) that of this rank; n elements each."""
        return self._collective(plan_reductions.scan, algorithm, (op,), sendbuf, recvbuf)

    def Exscan(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None):
        """recvbuf = sendbuf of rank 0 (+) ... (+) that of the rank before; n elements each; rank 0 keeps its own."""
        return self._collective(plan_reductions.exscan, algorithm, (op,), sendbuf, recvbuf)

    # ------------------------------------------------ the nonblocking ones

    def progress(self) -> None:
        """Advance the nonblocking collectives in flight, without waiting."""
        if self.planner is not None:
            self.queue.advance()

    def Ibcast(self, buf, root: int = 0, algorithm: Algorithm = None):
        """Begin a Bcast: n elements on every rank. Returns its request."""
        return self._start(plan_moves.broadcast, algorithm, (root,), buf)

    def Iallreduce(self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None):
        """Begin an Allreduce: n elements in both buffers. Returns its request."""
        return self._start(plan_reductions.allreduce, algorithm, (op,), sendbuf, recvbuf)

    def Iallgather(self, sendbuf, recvbuf, algorithm: Algorithm = None):
        """Begin an Allgather: n elements, and size * n. Returns its request."""
        return self._start(plan_moves.allgather, algorithm, (), sendbuf, recvbuf)

    def Ialltoallv(self, sendbuf, recvbuf, algorithm: Algorithm = None):
        """Begin an Alltoallv: blocks [data, counts, displacements, datatype] on both sides. Returns its request.

        It is planned for this call: the next one has other blocks.
        """
        return self._start(plan_moves.alltoallv, algorithm, (), sendbuf, recvbuf, keep=False)

    def Ireduce_scatter(self, sendbuf, recvbuf, recvcounts=None, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None):
        """Begin a Reduce_scatter: sum(recvcounts) elements, and recvcounts[rank]. Returns its request.

        Without `recvcounts` ranks tell each other theirs first, and wait for it.
        """
        counts = self._recvcounts(recvcounts, recvbuf)
        return self._start(plan_reductions.reduce_scatter, algorithm, (counts, op), sendbuf, recvbuf)

    def Ireduce_scatter_block(
        self, sendbuf, recvbuf, op: MPI.Op = MPI.SUM, algorithm: Algorithm = None, keep: bool = True
    ):
        """Begin a Reduce_scatter_block: size * n elements, and n. Returns its request."""
        return self._start(plan_reductions.reduce_scatter_block, algorithm, (op,), sendbuf, recvbuf, keep=keep)


# That of __new__ hides the keywords from whoever asks inspect, and from the pages of the API.
Communicator.__signature__ = inspect.Signature(list(inspect.signature(Communicator.__init__).parameters.values())[1:])
for build, planned in PLANNED_BY.items():  # Barrier_init, Bcast_init, ... Exscan_init
    blocking = getattr(Communicator, planned.method)
    setattr(Communicator, f"{planned.method}_init", persistent_form(blocking, build))


def file_of(function: Callable) -> str:
    """Return the file of this package that a function is in, and its name."""
    while isinstance(function, partial):
        function = function.func
    file = getattr(function, "__module__", "").removeprefix("collectives.").replace(".", "/")
    return f"{file}.py {getattr(function, '__name__', function)}"


def run(
    algorithm: Callable,
    comm: MPI.Intracomm | None = None,
    op: MPI.Op = MPI.SUM,
    computations: dict[str, Callable] | None = None,
    **buffers: np.ndarray,
) -> None:
    """Run an algorithm of one's own once, on given arrays: run(my_allreduce, x=gradients) (collective).

    Parameters
    ----------
    algorithm : generator function (rank, size, count) -> rounds
        where count is the number of elements of x
    comm : the ranks; by default all
    op, computations, buffers : as for `Communicator.compile`, which says what is raised

    Examples
    --------
    >>> import numpy as np
    >>> import collectives
    >>> from mpi4py import MPI
    >>> x = np.ones(8)
    >>> collectives.run(collectives.ALGORITHMS["allreduce"]["ring"].rounds, x=x)
    >>> bool((x == MPI.COMM_WORLD.size).all())
    True
    """
    if comm == MPI.COMM_NULL:
        raise ValueError("run: this rank is not in the communicator (COMM_NULL): call run on its ranks only")
    if "x" not in buffers:
        raise ValueError("run: give the vector as x=array: its elements are the schedule's count")
    communicator = Communicator(MPI.COMM_WORLD if comm is None else comm)
    try:
        plan = communicator.compile(
            algorithm(communicator.rank, communicator.size, buffers["x"].size), op, computations, **buffers
        )
        communicator.Run(plan)
        plan.free()
    finally:
        communicator.release()


def after_pending(name):
    """Return a collective of the MPI library's own, which lets ours finish first."""
    own = getattr(MPI.Intracomm, name)

    @wraps(own)
    def method(self, *args, **kwargs):
        if not in_flight:
            return own(self, *args, **kwargs)
        return self._after_pending(own, self, *args, **kwargs)

    return method


LIBRARY = "Alltoallw Create Split_type Create_cart Create_graph Create_dist_graph Create_dist_graph_adjacent"
OF_OBJECTS = "allgather allreduce alltoall barrier bcast exscan gather reduce scan scatter"
for name in (*LIBRARY.split(), *OF_OBJECTS.split()):
    setattr(Communicator, name, after_pending(name))

ELSEWHERE = {"explain", "progress", "Create_group", "Free", "release"}  # wait for no rank, or not for all, or end it
COLLECTIVE = [
    name for name, value in vars(Communicator).items() if callable(value) and name[0] != "_" and name not in ELSEWHERE
]
