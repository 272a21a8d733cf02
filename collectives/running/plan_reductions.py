"""Plans of the collectives that reduce: their data travels as elements of its datatype.

Each function takes the planner of a communicator, the arguments of a call and what algorithm it asks for; NATIVE says
that the call is the library's.
"""

from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from mpi4py import MPI

from collectives.algorithms import shared
from collectives.algorithms.registry import SEGMENT_BYTES
from collectives.choosing.selection import NODE_MEMORY, Call
from collectives.executor.plan import NATIVE, allocate, copying
from collectives.failures.watchdog import describe
from collectives.node_memory.plans import bind_either
from collectives.node_memory.reduction import UFUNCS, libraries_differ
from collectives.running.buffers import (
    incoming,
    is_in_place,
    outgoing,
    refuse_overlap,
    same_type,
)

DEFINED = set()  # (operation, datatype), by handle, that the library has reduced


def operands(sendbuf, recvbuf):
    """(send or None, recv), checked against each other."""
    recv = incoming(recvbuf)
    if is_in_place(sendbuf):
        return None, recv
    send = outgoing(sendbuf)
    same_type(send, recv)
    if send.count != recv.count:
        raise ValueError(f"the send buffer has {send.count} elements, the receive buffer {recv.count}")
    refuse_overlap(send, recv)
    return send, recv


def call_of(operation, message, count, op) -> Call:
    """Return what of a reduction of `count` elements decides its algorithm.

    Raises
    ------
    TypeError
        Elements for which `op` is not defined.
    """
    if message.float16 and op.handle not in UFUNCS:
        raise TypeError("float16 has SUM, PROD, MAX and MIN; for another operation convert to float32")
    if not message.float16:
        refuse_undefined(op, message.datatype)
    return Call(
        operation,
        count * message.itemsize,
        ordered=ordered(op),
        shareable=can_share(op, message.elements.dtype),
        float16=message.float16,
        numpy=libraries_differ(op, message.elements.dtype),
    )


def refuse_undefined(op, datatype):
    """Raise TypeError where MPI does not define a predefined operation for a datatype, as the sum of booleans."""
    key = op.handle, datatype.handle
    if key in DEFINED or not (op.is_predefined and datatype.is_predefined):
        return
    source, target = np.zeros(datatype.Get_extent()[1], np.uint8), np.zeros(datatype.Get_extent()[1], np.uint8)
    try:
        op.Reduce_local([source, 1, datatype], [target, 1, datatype])
    except MPI.Exception as error:
        raise TypeError(
            f"{describe(op)} is not defined for {datatype.Get_name()} ({error}): give integers or floats; "
            "booleans have LAND, LOR and LXOR"
        ) from None
    DEFINED.add(key)


def reduce_on_every_rank(operation, planner, sendbuf, recvbuf, op, requested):
    """Every rank gets a result of the same length, made in its receive buffer."""
    send, recv = operands(sendbuf, recvbuf)
    call = call_of(operation, recv, recv.count, op)
    name = planner.selection.choose(requested, call)
    if name == "native":
        return NATIVE
    if name in NODE_MEMORY:
        s, x = send and send.array(), recv.array()
        if planner.selection.place != "node":
            return two_level(planner, s, x, op, recv)
        private = None
        if planner.selection.library_for_private(name, requested, call):
            private = partial(planner.comm.Allreduce, MPI.IN_PLACE if send is None else s, x, op)
        return planner.window.allreduce(s, x, op, private)
    x, before, keep = recv.bytes(0, recv.count), [], ()
    if operation == "exscan" and planner.rank == 0 and send:
        x = allocate(x.nbytes)  # rank 0 has no result: its receive buffer stays as it is
        keep = (x,)
    if send:
        before = [copying(x, send.bytes(0, send.count))]
    program = planner.program(
        operation, name, recv.count, itemsize=recv.itemsize, float16=recv.float16, ordered=ordered(op)
    )
    return planner.plan(program, {"x": x}, before, (), keep, message=recv, op=op)


allreduce, scan, exscan = (partial(reduce_on_every_rank, operation) for operation in ("allreduce", "scan", "exscan"))


def reduce(planner, sendbuf, recvbuf, op, root, requested):
    planner.check_root(root)
    if planner.rank == root:
        send, message = operands(sendbuf, recvbuf)
    else:
        send = message = outgoing(sendbuf)
    name = planner.selection.choose(requested, call_of("reduce", message, message.count, op))
    if name == "native":
        return NATIVE
    if name in NODE_MEMORY:
        s, x = send and send.array(), message.array() if planner.rank == root else None
        return planner.window.reduce(s, x, op, root)
    options = {"float16": message.float16, "ordered": ordered(op), "root": root}
    program = planner.program("reduce", name, message.count, itemsize=message.itemsize, **options)
    x, before, keep = message.bytes(0, message.count), [], ()
    if planner.rank != root and (program.writes("x") or program.named):
        x = allocate(x.nbytes)  # the send buffer is not ours to write
        keep = (x,)
    if send and (send is not message or keep):
        before = [copying(x, send.bytes(0, send.count))]
    return planner.plan(program, {"x": x}, before, (), keep, message=message, op=op)


def reduce_scatter(planner, sendbuf, recvbuf, counts, op, requested):
    """`counts` of each rank's block, or None where all are as long as this one's."""
    in_place = is_in_place(sendbuf)
    parts = planner.size if counts is None else 1  # a count that is given with a buffer is then one block's
    recv = incoming(recvbuf, parts if in_place else 1)
    source = recv if in_place else outgoing(sendbuf, parts)
    if counts is None:
        counts = [recv.count] * planner.size
    if len(counts) != planner.size:
        raise ValueError(f"reduce_scatter: {len(counts)} counts for {planner.size} ranks")
    if min(counts) < 0:
        raise ValueError(f"reduce_scatter: counts {list(counts)}: a block has no negative length")
    ends = [0, *accumulate(map(int, counts))]
    total, own = ends[-1], slice(*list(pairwise(ends))[planner.rank])
    same_type(source, recv)
    if source.count * parts != total:
        raise ValueError(
            f"reduce_scatter: the blocks have {total} elements in all, the send buffer {source.count * parts}"
        )
    if recv.count < own.stop - own.start:
        raise ValueError(
            f"reduce_scatter: the block of rank {planner.rank} has {own.stop - own.start} elements, "
            f"its receive buffer {recv.count}"
        )
    if source is not recv:
        refuse_overlap(source, recv)
    name = planner.selection.choose(requested, call_of("reduce_scatter", recv, total, op))
    if name == "native":
        return NATIVE
    if name in NODE_MEMORY:
        lengths = [hi - lo for lo, hi in pairwise(ends)]
        x, y = source.array(total), recv.array(lengths[planner.rank])
        if not in_place:
            return planner.window.reduce_scatter(x, y, op, lengths)
        result = np.empty_like(y)  # others may still read what y overlaps
        after = [partial(y.__setitem__, ..., result)]
        return planner.window.reduce_scatter(x, result, op, lengths, after=after, keep=(op, result))
    x, extent = allocate(total * recv.itemsize), recv.itemsize
    before = [copying(x, source.bytes(0, total))]
    after = [copying(recv.bytes(0, own.stop - own.start), x[own.start * extent : own.stop * extent])]
    program = planner.program("reduce_scatter", name, tuple(pairwise(ends)), float16=recv.float16, ordered=ordered(op))
    return planner.plan(program, {"x": x}, before, after, (x,), message=recv, op=op)


def reduce_scatter_block(planner, sendbuf, recvbuf, op, requested):
    return reduce_scatter(planner, sendbuf, recvbuf, None, op, requested)


def two_level(planner, send, x, op, message):
    """Allreduce over several nodes by the schedules of algorithms/shared.py: through slots, or over shared arrays."""
    arrays = {"x": x} if send is None else {"x": x, "s": send}
    options = {"nodes": planner.nodes, "send": "x" if send is None else "s"}
    options["segment"] = max(1, SEGMENT_BYTES // x.itemsize)
    plan_options = planner.reducing(message, op) | {"comm": planner.comm, "synchronous": planner.synchronous}
    plan_options |= {
        "wait_long": planner.wait_long,
        "ranks": planner.node_ranks,
        "size": planner.size,
        "keep": (op, message.datatype),
    }
    description = f"allreduce({describe(op)}, {x.size} {x.dtype} over nodes)"
    schedules = shared.two_level, shared.two_level_arrays
    return bind_either(
        planner.window, description, *schedules, arrays, x.size, arrays, op, plan_options=plan_options, **options
    )


def ordered(op) -> bool:
    """Whether operands must be combined in rank order."""
    return not op.Is_commutative()


def can_share(op, dtype) -> bool:
    """Whether shared memory reduces these elements."""
    return op.handle in UFUNCS and dtype is not None and dtype.kind in UFUNCS[op.handle][2]
