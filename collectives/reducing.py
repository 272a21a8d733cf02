"""Reduce arrays that lie in memory side by side: operand by operand, in blocks that stay in cache."""

from collections.abc import Callable
from functools import partial

import numpy as np
from mpi4py import MPI

BLOCK = 1 << 17  # bytes that are reduced at a time: the operands' blocks stay in the second-level cache
PAIR = 1 << 19  # the same for two operands, which are read only once

OPERATIONS = {
    MPI.SUM.handle: ("SUM", np.add, "iufc"),
    MPI.PROD.handle: ("PROD", np.multiply, "iufc"),
    MPI.MAX.handle: ("MAX", np.maximum, "iuf"),
    MPI.MIN.handle: ("MIN", np.minimum, "iuf"),
}


def operation(op: MPI.Op, dtype: np.dtype) -> tuple[str, Callable]:
    """(name, combine): combine(operands, targets) -> calls that reduce the operands, in order, into every target.

    Raises
    ------
    ValueError
        Another operation than those above.
    TypeError
        Elements for which it is not defined.
    """
    if op.handle not in OPERATIONS:
        raise ValueError("shared memory reduces with SUM, PROD, MAX and MIN only")
    name, ufunc, kinds = OPERATIONS[op.handle]
    if dtype.kind not in kinds:
        raise TypeError(f"{name} of {dtype} is not defined")

    def combine(operands, targets):
        size = operands[0].size
        step = max(1, (PAIR if len(operands) == 2 else BLOCK) // dtype.itemsize)
        return [
            reducing(ufunc, [o[at : at + step] for o in operands], [t[at : at + step] for t in targets])
            for at in range(0, size, step)
        ]

    return name, combine


def reducing(ufunc, operands, targets) -> Callable[[], None]:
    """One block. float16 is summed in float32 and rounded once."""
    first, *rest = operands
    total, *copies = targets
    if first.dtype == np.float16:
        total, copies = np.empty(first.shape, np.float32), targets
    elif any(np.may_share_memory(total, operand) for operand in rest[1:]):  # still to be read when total is written
        total, copies = np.empty_like(first), targets
    if not rest:
        return lambda: [target.__setitem__(..., first) for target in targets if target is not first]
    second, *later = rest
    kind = total.dtype

    def reduce():
        ufunc(first, second, out=total, dtype=kind)
        for operand in later:
            ufunc(total, operand, out=total)
        for copy in copies:
            copy[...] = total

    if later or kind != first.dtype or ufunc not in (np.add, np.multiply):
        return reduce
    if not copies:
        return partial(ufunc, first, second, total)
    (copy,) = copies

    def reduce_two():  # without keywords (which np.maximum wants) and loops: half a microsecond less
        ufunc(first, second, total)
        copy[...] = total

    return reduce_two
