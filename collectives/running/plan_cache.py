"""Plans that are kept, and under which key: a call's operation, algorithm and details, and its buffers in memory.

Calls of one key do the same with the same memory, whatever objects they were given: an array is its address, size,
dtype and flags.
"""

import weakref
from collections.abc import Callable, Hashable

import numpy as np
from mpi4py import MPI

from collectives.executor.plan import Plan

IN_PLACE = MPI.IN_PLACE
address = MPI.Get_address
ndarray = np.ndarray
UNKNOWN = object()  # a buffer that no key can name


def fingerprint(operation, algorithm, detail, a=None, b=None):
    """A key under which a plan for these buffers may be kept; None where they are not NumPy arrays."""
    if type(b) is ndarray:
        end = address(b), b.size, b.dtype, b.flags.num
        if type(a) is ndarray:
            return (operation, algorithm, detail, address(a), a.size, a.dtype, a.flags.num, end)
        if a is IN_PLACE:
            return (operation, algorithm, detail, None, end)
    a, b = describe(a), describe(b)
    return None if a is UNKNOWN or b is UNKNOWN else (operation, algorithm, detail, a, b)


def describe(spec):
    """A buffer argument as part of a key."""
    if spec is None or spec is IN_PLACE:
        return None
    data, *rest = spec if isinstance(spec, list | tuple) and spec else (spec,)
    if type(data) is not ndarray:
        return UNKNOWN
    return (address(data), data.size, data.dtype, data.flags.num, *map(constant, rest))


def constant(item):
    """A count, sequence of counts, or datatype as part of a key.

    A datatype, as an operation, is named by object and handle: a plan keeps alive those that the user made, so that
    their objects' ids are not used again; handles tell apart the library's own.
    """
    if isinstance(item, MPI.Datatype):
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
