"""Plans that are kept, and under which key: a call's operation, algorithm and details, and its buffers in memory.

Calls of one key do the same with the same memory, whatever objects they were given: an array is its address, size,
dtype and flags.

What is kept from call to call:

| what | where | why |
|---|---|---|
| plans | plan_cache.py, for each communicator | to bind a program takes a microsecond a message |
| programs | executor/program.py `Programs`, for each communicator | to compile takes up to milliseconds |
| programs in a node | node_memory/plans.py `compiled` | the same, for all windows |
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

IN_PLACE, Op = MPI.IN_PLACE, MPI.Op
address = MPI.Get_address
ndarray = np.ndarray


def fingerprint(build, algorithm, more, buffers):
    """The key under which a plan may be kept: what plans it, which algorithm, what else a call has, its buffers.

    None where a buffer is no NumPy array: nothing then says where its memory is.
    """
    key = [build, algorithm]
    for item in more:
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


class Known:
    """Plans by the array object that they reduce in place.

    An entry goes with its array. While it is here NumPy refuses to move the array's memory (`resize`), as something
    refers to the array; what else may change about an array is compared.
    """

    def __init__(self):
        self.entries: dict[int, tuple] = {}  # id of an array -> dtype, flags, the plan's call, what guards the id

    def note(self, array: np.ndarray, plan: Callable) -> None:
        """Remember the plan of an array."""
        key, entries = id(array), self.entries
        entries[key] = array.dtype, array.flags.num, plan.__call__, weakref.ref(array, lambda _: entries.pop(key, None))

    def forget(self, plan: Callable) -> None:
        """Let go of a plan that goes, and of no other: an array is noted only when its plan is made."""
        for key in list(self.entries):  # entries may go meanwhile, with their arrays
            entry = self.entries.get(key)
            if entry is not None and entry[2].__self__ is plan:
                self.entries.pop(key, None)


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
        for left in [each for each, other in self.items() if other.orphaned]:
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
