"""Reduce arrays that lie in memory side by side: operand by operand, in blocks that stay in cache.

What comes out of a reduction is what NumPy makes of it, whatever carries it out: integers wrap, and MAX and MIN of a
NaN are NaN. MPI does not say. In MPI libraries a NaN is lost or kept by the side on which it stands, and the vector
instructions of Open MPI saturate 8- and 16-bit sums, all but the rest of a vector: there `by_numpy` takes the place of
the library. Only a call that asks for `native` gets what the library makes of it.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.executor.plan import array

BLOCK = 1 << 17  # bytes that are reduced at a time: the operands' blocks stay in the second-level cache
PAIR = 1 << 19  # the same for two operands, which are read only once

UFUNCS = {
    MPI.SUM.handle: ("SUM", np.add, "iufc"),
    MPI.PROD.handle: ("PROD", np.multiply, "iufc"),
    MPI.MAX.handle: ("MAX", np.maximum, "iuf"),
    MPI.MIN.handle: ("MIN", np.minimum, "iuf"),
}

EXTREMES = MPI.MAX.handle, MPI.MIN.handle
WRAPPING = MPI.SUM.handle, MPI.PROD.handle


def libraries_differ(op: MPI.Op, dtype: np.dtype | None) -> bool:
    """Return whether MPI libraries reduce some values otherwise than NumPy."""
    if dtype is None:
        return False
    if dtype.kind == "f":
        return op.handle in EXTREMES
    return dtype.kind in "iu" and dtype.itemsize < 4 and op.handle in WRAPPING


# operation -> codes of the types that MPI libraries reduce as NumPy does, all values of them
REDUCED_AS_NUMPY = {
    op.handle: {
        code
        for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
        if np.dtype(code).kind in UFUNCS[op.handle][2] and not libraries_differ(op, np.dtype(code))
    }
    for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN)
}


def reduced_as_numpy(op: MPI.Op, dtype: np.dtype) -> bool:
    """Return whether MPI libraries reduce all values as NumPy does; False where MPI may not define the operation."""
    return dtype.char in REDUCED_AS_NUMPY.get(op.handle, ())


def by_numpy(op: MPI.Op, dtype: np.dtype, source: tuple, target: tuple) -> Callable[[], object]:
    """The call target = source (+) target of operands as MPI takes them: (memory, count, first element, datatype)."""
    x, y = (np.frombuffer(m, dtype, count, first * dtype.itemsize) for m, count, first, _ in (source, target))
    return partial(UFUNCS[op.handle][1], x, y, out=y)


def operation(op: MPI.Op, dtype: np.dtype, keep: Callable = lambda memory: None) -> tuple[str, Callable]:
    """(name, combine): combine(operands, targets) -> calls that reduce the operands, in order, into every target.

    `keep` is called with the memory that they need beside.

    Raises
    ------
    ValueError
        Another operation than those above.
    TypeError
        Elements for which it is not defined.
    """
    if op.handle not in UFUNCS:
        raise ValueError("shared memory reduces with SUM, PROD, MAX and MIN only")
    name, ufunc, kinds = UFUNCS[op.handle]
    if dtype.kind not in kinds:
        raise TypeError(f"{name} of {dtype} is not defined")

    def combine(operands, targets):
        size = operands[0].size
        step = max(1, (PAIR if len(operands) == 2 else BLOCK) // dtype.itemsize)
        return [
            block_of(ufunc, [o[at : at + step] for o in operands], [t[at : at + step] for t in targets], keep)
            for at in range(0, size, step)
        ]

    return name, combine


def sum_into(op: MPI.Op | None, dtype: np.dtype, keep: Callable, operands: list, targets: list) -> list[Callable]:
    """Return the calls that write the sum of operands, from left to right, into all targets; each is memory.

    float16 is summed in float32 and rounded once. `op` is None where nothing is reduced: then each is copied.
    """
    arrays, into = [array(m, dtype) for m in operands], [array(m, dtype) for m in targets]
    if len(arrays) > 1:
        return operation(op, dtype, keep)[1](arrays, into)
    same = operands[0].address, operands[0].nbytes
    return [
        partial(x.__setitem__, ..., arrays[0])
        for m, x in zip(targets, into, strict=True)
        if (m.address, m.nbytes) != same
    ]


def block_of(ufunc, operands, targets, keep) -> Callable[[], None]:
    """One block. float16 is summed in float32 and rounded once."""
    first, *rest = operands
    total, *copies = targets
    if first.dtype == np.float16:
        total, copies = np.empty(first.shape, np.float32), targets
        keep(total)
    elif any(np.may_share_memory(total, operand) for operand in rest[1:]):  # still to be read when total is written
        total, copies = np.empty_like(first), targets
        keep(total)
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
