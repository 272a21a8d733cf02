"""Plans of the collectives that only move data: it travels as bytes.

Each function takes the planner of a communicator, the arguments of a call and what algorithm it asks for; NATIVE says
that the call is the library's.
"""

from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from mpi4py import MPI

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import CONSECUTIVE
from collectives.choosing.selection import NODE_MEMORY, Call
from collectives.executor.plan import NATIVE, allocate, array, copying
from collectives.running.buffers import (
    Bytes,
    all_bytes,
    as_bytes,
    incoming,
    is_in_place,
    outgoing,
    packed,
    refuse_overlap,
    slices_of,
)


def barrier(planner, requested):
    name = planner.selection.choose(requested, Call("barrier", 0))
    if name == "native":
        return NATIVE
    if name in NODE_MEMORY:
        return planner.window.barrier()
    return planner.plan(planner.program("barrier", name), {})


def broadcast(planner, buf, root, requested):
    planner.check_root(root)
    message = outgoing(buf) if planner.rank == root else incoming(buf)
    x = all_bytes(message)
    call = Call("broadcast", x.nbytes)
    name = planner.selection.choose(requested, call)
    if name == "native":
        return NATIVE
    if name in NODE_MEMORY:
        private = None
        if planner.selection.library_for_private(name, requested, call):
            private = partial(planner.comm.Bcast, [x, MPI.BYTE], root)
        return planner.window.broadcast(array(x), root, private, keep=(message.datatype,))
    program = planner.program("broadcast", name, x.nbytes, root=root)
    return planner.plan(program, {"x": x}, keep=(message.datatype,))


def scatter(planner, sendbuf, recvbuf, root, requested, vector=False):
    return rooted(planner, "scatter", sendbuf, recvbuf, root, requested, vector)


def gather(planner, sendbuf, recvbuf, root, requested, vector=False):
    return rooted(planner, "gather", recvbuf, sendbuf, root, requested, vector)


scatterv, gatherv = partial(scatter, vector=True), partial(gather, vector=True)


def rooted(planner, operation, all_blocks, own_block, root, requested, vector):
    """Scatter and gather: the root has the buffer of all blocks, each rank that of its own."""
    planner.check_root(root)
    parse_all, parse_own = (outgoing, incoming) if operation == "scatter" else (incoming, outgoing)
    keep, own, all_as_bytes = [], None, None
    if not (planner.rank == root and is_in_place(own_block)):
        mine = parse_own(own_block)
        own = all_bytes(mine)
        keep.append(mine.datatype)
    if planner.rank == root:
        message = parse_all(all_blocks, planner.size, vector)
        all_as_bytes = as_bytes(message, slices_of(message, planner.size))
        keep.append(message.datatype)
        if own is not None and own.address != all_as_bytes.block(root).address:
            refuse_overlap(mine, message)
        if own is None:  # in place: the root's block is where it belongs
            own = all_as_bytes.block(root)
        check_lengths(planner, operation, all_as_bytes.block(root).nbytes, own.nbytes)
    length = own.nbytes
    name = planner.selection.choose(requested, Call(operation, length * planner.size, vector))
    if name == "native":
        return NATIVE
    if planner.rank == root:
        blocks = all_as_bytes.blocks
    elif vector:
        blocks = ((0, length),) * planner.size  # the others' lengths are not known here, and flat does not ask
    else:
        blocks = tuple((i * length, (i + 1) * length) for i in range(planner.size))
    if vector and name != "flat":
        blocks = blocks_of_root(planner, blocks, root)
    before, after = [], []
    if vector and callable(name) and planner.rank == root:  # for the others they lie one after another
        all_as_bytes, into_order, back = packed(all_as_bytes)
        blocks, keep = all_as_bytes.blocks, [*keep, all_as_bytes.memory]
        before, after = (into_order, []) if operation == "scatter" else ([], back)
    names = ("x", "y") if operation == "scatter" else ("y", "x")  # of all blocks, and of the own one
    buffers = {names[1]: own} | ({names[0]: all_as_bytes.memory} if all_as_bytes else {})
    program = planner.program(operation, name, blocks, root=root)
    return planner.plan(program, buffers, before, after, tuple(keep))


def blocks_of_root(planner, blocks, root):
    """Blocks of the lengths that only the root knows (collective)."""
    lengths = np.array([hi - lo for lo, hi in blocks], np.int64)
    ends = [0, *accumulate(planner.exchange(lengths, root).tolist())]
    return blocks if planner.rank == root else tuple(pairwise(ends))


def check_lengths(planner, operation, one, other):
    if one != other:
        raise ValueError(
            f"{operation}: the block of rank {planner.rank} has {one} bytes in the buffer of all blocks, "
            f"{other} in its own"
        )


def allgather(planner, sendbuf, recvbuf, requested, vector=False):
    recv = incoming(recvbuf, planner.size, vector)
    slices = slices_of(recv, planner.size)
    nbytes = sum(hi - lo for lo, hi in slices) * recv.itemsize
    call = Call("allgather", nbytes, vector)
    name = planner.selection.choose(requested, call)
    if name == "native":
        return NATIVE
    received = as_bytes(recv, slices)
    x, before, after = packed(received) if in_order(name) else (received, [], [])
    keep = (recv.datatype,) if x is received else (recv.datatype, x.memory)
    if not is_in_place(sendbuf):
        send = outgoing(sendbuf)
        own = all_bytes(send)
        check_lengths(planner, "allgather", x.block(planner.rank).nbytes, own.nbytes)
        before = [copying(x.block(planner.rank), own)]
        keep = (*keep, send.datatype)
    if name in NODE_MEMORY:
        lengths, private = [hi - lo for lo, hi in x.blocks], None
        if planner.selection.library_for_private(name, requested, call):  # all blocks have one length
            private = partial(planner.comm.Allgather, MPI.IN_PLACE, [x.memory, lengths[0], MPI.BYTE])
        plan_options = {"before": before, "after": after, "keep": keep}
        return planner.window.allgather(None, array(x.memory), lengths, private, **plan_options)
    return planner.plan(planner.program("allgather", name, x.blocks), {"x": x.memory}, before, after, keep)


allgatherv = partial(allgather, vector=True)


def in_order(name) -> bool:
    """Whether an allgather needs the blocks one after another."""
    return callable(name) or name in NODE_MEMORY or CONSECUTIVE in ALGORITHMS["allgather"][name].needs


def alltoall(planner, sendbuf, recvbuf, requested, vector=False):
    recv = incoming(recvbuf, planner.size, vector)
    y = as_bytes(recv, slices_of(recv, planner.size))
    nbytes = sum(hi - lo for lo, hi in y.blocks)
    name = planner.selection.choose(requested, Call("alltoall", nbytes, vector))
    if vector and callable(name):
        raise ValueError(
            "alltoall of blocks that may differ: no rank knows those of all others, so that none can prove an "
            "algorithm of one's own: name one of ALGORITHMS['alltoall'], or compile the rounds of each rank"
        )
    if name == "native":
        return NATIVE
    if is_in_place(sendbuf):
        x = Bytes(allocate(y.memory.nbytes), y.blocks)
        before, keep = [copying(x.memory, y.memory)], (recv.datatype, x.memory)
    else:
        send = outgoing(sendbuf, planner.size, vector)
        refuse_overlap(send, recv)
        x = as_bytes(send, slices_of(send, planner.size))
        before, keep = [], (recv.datatype, send.datatype)
    check_lengths(planner, "alltoall", y.block(planner.rank).nbytes, x.block(planner.rank).nbytes)
    program = planner.program("alltoall", name, x.blocks, into=y.blocks)
    return planner.plan(program, {"x": x.memory, "y": y.memory}, before, (), keep)


alltoallv = partial(alltoall, vector=True)
