"""Plans that are kept, and under which key: a call's operation, algorithm and details, and its buffers in memory.

Calls of one key do the same with the same memory, whatever objects they were given: an array is its address, size,
dtype and flags. Some calls of microseconds need no key (`shortcuts`).

What is kept from call to call:

| what | where | why |
|---|---|---|
| plans | plan_cache.py, for each communicator | to bind a program takes a microsecond a message |
| programs | executor/program.py `Programs`, for each communicator | to compile takes up to milliseconds |
| programs in a node | node_memory/plans.py `PROGRAMS`, for all windows | the same |
| the window | planner.py, one for each communicator | to map memory is collective |
| facts about datatypes | buffers.py | four calls of MPI, at each new plan |
| what MPI can reduce | plan_reductions.py `DEFINED` | to find out is to try |
| cuts and trees | algorithms/ `lru_cache` | a thousand ranks that are simulated ask for the same |
| where measured tables lie | choosing/selection.py `cache_file` | /proc/cpuinfo takes milliseconds to read |
"""

import weakref
from collections.abc import Callable, Hashable

import numpy as np
from mpi4py import MPI

from collectives.executor.plan import Plan
from collectives.node_memory.reduction import reduced_as_numpy

IN_PLACE, SUM, Op = MPI.IN_PLACE, MPI.SUM, MPI.Op
address = MPI.Get_address
ndarray = np.ndarray
SHORT = 2  # bytes of elements that the library cannot sum (float16), or differently: sooner asked for than the type


def fingerprint(build, algorithm, key_args, buffers):
    """The key under which a plan may be kept: what plans it, which algorithm, what else a call has, its buffers.

    None where a buffer is no NumPy array: nothing then says where its memory is.
    """
    key = [build, algorithm]
    for item in key_args:
        if type(item) is Op:
            key += id(item), item.handle
        else:
            key.append(constant(item))
    for x in buffers:
        if type(x) is ndarray:
            key += address(x), x.size, x.dtype, x.flags.num
        elif x is None or x is IN_PLACE:
            key.append(None)
        else:
            data, *rest = x if isinstance(x, list | tuple) and x else (x,)
            if type(data) is not ndarray:
                return None
            key += address(data), data.size, data.dtype, data.flags.num, *map(constant, rest), len(rest)
    return tuple(key)


def constant(item):
    """A count, sequence of counts, root, operation or datatype as part of a key.

    An operation and a datatype are named by object and handle: a plan keeps alive those that the user made, so that
    their objects' ids are not used again; handles tell apart the library's own.
    """
    if isinstance(item, MPI.Op | MPI.Datatype):
        return id(item), item.handle
    return tuple(map(constant, item)) if hasattr(item, "__iter__") and not isinstance(item, str) else item


def lasting(args) -> bool:
    """Whether the operations and datatypes among a call's arguments are the library's own.

    Those of the user may be freed where no plan keeps them alive, and another one then has their id and handle.
    """
    return all(
        arg.is_predefined
        if isinstance(arg, MPI.Op | MPI.Datatype)
        else not isinstance(arg, list | tuple) or lasting(arg)
        for arg in args
    )


class Known:
    """Plans by the array object that they reduce in place.

    An entry goes with its array. While it is here NumPy refuses to move the array's memory (`resize`), as something
    refers to the array; what else may change about an array is compared.
    """

    def __init__(self):
        self.entries: dict[int, tuple] = {}  # id of an array -> dtype, flags, the plan's call, what guards the id

    def register(self, array: np.ndarray, plan: Callable) -> None:
        """Remember the plan of an array."""
        key, entries = id(array), self.entries
        entries[key] = array.dtype, array.flags.num, plan.__call__, weakref.ref(array, lambda _: entries.pop(key, None))

    def unregister(self, plan: Callable) -> None:
        """Let go of a plan that goes, and of no other: an array is noted only when its plan is made."""
        for key in list(self.entries):  # entries may go meanwhile, with their arrays
            entry = self.entries.get(key)
            if entry is not None and entry[2].__self__ is plan:
                self.entries.pop(key, None)


class PlanCache(dict):
    """key -> plan, at most `limit` of them with at most `limit_bytes` of scratch memory in all.

    The plan to go is the oldest that has not run since it was last spared (second chance): a hit is a plain lookup.
    `known` finds some of the plans sooner.
    """

    def __init__(self, limit: int = 256, limit_bytes: int = 256 << 20):
        super().__init__()
        self.limit, self.limit_bytes = limit, limit_bytes
        self.bytes = 0
        self.known = Known()

    def put(self, key: Hashable, plan: Plan) -> Plan:
        """Keep a plan under a key that is not in the cache, and free those that are gone or have become too many."""
        for orphan in [key_of_orphan for key_of_orphan, plan_of_key in self.items() if plan_of_key.orphaned]:
            self.drop(orphan)
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
        self.known.unregister(plan)
        plan.free()

    def drop_named(self):
        """Free the plans of schedules in which ranks name each other's buffers: their memory goes."""
        for key in [key for key, plan in self.items() if plan.program and plan.program.named]:
            self.drop(key)

    def free(self):
        """Free every plan."""
        self.known.entries.clear()
        for plan in self.values():
            plan.free()
        self.clear()
        self.bytes = 0


# ------------------------------------------------------------------- shortcuts: what stands before some methods
#
# A short call of the MPI library takes a few microseconds; finding a plan by all that a call is made of takes one more
# or two (measured, one rank: an Allreduce of 4 bytes 0.9 us with its shortcut, 2.3 us by the method; of 8 KiB in place
# 1.8 and 2.8 us). So a Communicator has, in front of some methods of its class, functions of a few comparisons:
#
# - a NumPy array that is so short that the table leaves it to the library goes there at once, if that reduces all
#   values as NumPy does (reduction.py);
# - an allreduce in place of an array object that a plan was made for finds the plan by that object (`Known`).
#
# All other calls go on to the method, which does everything: a shortcut decides nothing that the method would decide
# otherwise. Where the library finds that arguments do not fit each other, before it sends anything, the method says so
# in its own words. Each function has the parameters of its method: one closure for all, with *args, takes 0.15 to
# 0.6 us more (measured, two ranks).


def shortcuts(methods, native: MPI.Intracomm, native_below, waiting, known) -> dict[str, Callable]:
    """Name of a method -> the function that stands before it.

    Parameters
    ----------
    methods : what has the methods that do everything
    native : the same communicator without our methods
    native_below : operation -> bytes up to which the library's is chosen; -1 for none
    waiting : what nonblocking collectives are in flight on this process: while there are any there are no shortcuts
    known : id of an array -> what is known of its allreduce in place, or None
    """
    made = {}
    for name, operation, make, extra in (
        ("Allreduce", "allreduce", allreduce, known),
        ("Allgather", "allgather", allgather, None),
        ("Barrier", "barrier", barrier, None),
        ("Bcast", "broadcast", broadcast, native.Get_size()),
        ("Reduce", "reduce", reduce, native.Get_size()),
        ("Reduce_scatter_block", "reduce_scatter", reduce_scatter_block, None),
    ):
        limit = native_below(operation)
        if limit >= 0 or operation == "allreduce":
            made[name] = make(getattr(native, name), getattr(methods, name), limit, waiting, extra)
    return made


def allreduce(native, method, limit, waiting, known):
    def Allreduce(sendbuf, recvbuf, op=SUM, algorithm=None):
        if algorithm is None and not waiting and type(recvbuf) is ndarray:
            if recvbuf.nbytes <= limit:
                as_numpy = op is SUM or reduced_as_numpy(op, recvbuf.dtype)
                if recvbuf.itemsize > SHORT and as_numpy and sendbuf is not recvbuf:
                    try:
                        return native(sendbuf, recvbuf, op)
                    except ValueError:
                        pass
            elif sendbuf is IN_PLACE and op is SUM and (entry := known(id(recvbuf))) is not None:
                dtype, flags, plan, _ = entry
                if recvbuf.dtype is dtype and recvbuf.flags.num == flags:
                    return plan()
        return method(sendbuf, recvbuf, op, algorithm)

    return Allreduce


def allgather(native, method, limit, waiting, _):
    def Allgather(sendbuf, recvbuf, algorithm=None):
        if algorithm is None and not waiting and type(recvbuf) is ndarray and recvbuf.nbytes <= limit:
            try:
                return native(sendbuf, recvbuf)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, algorithm)

    return Allgather


def barrier(native, method, limit, waiting, _):
    def Barrier(algorithm=None):
        return native() if algorithm is None and not waiting else method(algorithm)

    return Barrier


def broadcast(native, method, limit, waiting, size):
    def Bcast(buf, root=0, algorithm=None):
        if algorithm is None and not waiting and type(buf) is ndarray and buf.nbytes <= limit and 0 <= root < size:
            return native(buf, root)
        return method(buf, root, algorithm)

    return Bcast


def reduce(native, method, limit, waiting, size):
    def Reduce(sendbuf, recvbuf, op=SUM, root=0, algorithm=None):
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        short = algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit
        if short and x.itemsize > SHORT and 0 <= root < size and (op is SUM or reduced_as_numpy(op, x.dtype)):
            try:
                return native(sendbuf, recvbuf, op, root)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, root, algorithm)

    return Reduce


def reduce_scatter_block(native, method, limit, waiting, _):
    def Reduce_scatter_block(sendbuf, recvbuf, op=SUM, algorithm=None, keep=True):
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        short = algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit
        if short and x.itemsize > SHORT and (op is SUM or reduced_as_numpy(op, x.dtype)):
            try:
                return native(sendbuf, recvbuf, op)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, algorithm, keep)

    return Reduce_scatter_block
