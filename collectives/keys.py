"""Under which key a plan is kept: a call's operation, algorithm and details, and its buffers as they lie in memory.

Calls of one key do the same with the same memory, whatever objects they were given: an array is its address, size,
dtype and flags.
"""

import numpy as np
from mpi4py import MPI

IN_PLACE = MPI.IN_PLACE
address = MPI.Get_address
ndarray = np.ndarray
UNKNOWN = object()  # a buffer that no key can name


def fingerprint(operation, algorithm, detail, a, b=None):
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
