"""Collectives in node-shared memory (window.py): planned once on given arrays, then called.

What they do is written in algorithms/shared.py, as schedules that are checked, priced and drawn like all others. Here a
schedule is compiled (executor/program.py) and bound to memory (executor/plan.py): the arrays, those of other ranks and
slots.

At the first barrier of a call (barriers.py) every rank shows a signature of operation, count, dtype and place: either
all ranks give the same part of a shared array, or none does.
"""

import weakref
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms import shared
from collectives.executor.plan import Plan
from collectives.executor.program import Program, Programs
from collectives.node_memory.barriers import barrier_of, first_barrier, split_barrier_of
from collectives.node_memory.reduction import operation, sum_into
from collectives.steps import SLOTS, chunk

SLOT_BYTES = 1 << 19  # bytes of each of a rank's two slots: a segment
SMALL_BYTES = 1 << 13  # bytes of a vector that every rank sums itself
SMALL_PRIVATE_BYTES = 1 << 14  # the same for an allreduce of private arrays
LINE_BYTES = 64  # bytes: ranks work on different cache lines
PROGRAMS = Programs()  # of all windows


# ----------------------------------------------------------------------------------------------- the collectives
#
# Methods of SharedWindow. Arrays are C-contiguous, of one dtype; counts, dtype and op are the same on every rank. Each
# plans a call on these arrays, on this rank alone, and returns it; making the call is collective. In between the arrays
# are the caller's to read and write. `plan_options` has the further arguments of Plan: before, after, keep.


def allreduce(
    window, send: np.ndarray | None, recv: np.ndarray, op: MPI.Op = MPI.SUM, private=None, **plan_options
) -> Plan:
    """recv = send_0 (+) ... (+) send_(p-1), in this order, on every rank. Where send is None recv is reduced.

    `private` as of allgather.
    """
    x = flattened(recv, "recv")
    s = x if send is None else flattened(send, "send")
    check_arrays(s, x, x.size)
    name, _ = operation(op, x.dtype)
    description = f"allreduce({name}, {x.size} {x.dtype})"
    arrays, options = ({"x": x}, {}) if s is x else ({"x": x, "s": s}, {"send": "s"})
    schedules = shared.small if x.nbytes <= SMALL_PRIVATE_BYTES else shared.slots, shared.arrays
    return bind_either(window, description, *schedules, {"x": x}, x.size, arrays, op, private, plan_options, **options)


def reduce(
    window, send: np.ndarray | None, recv: np.ndarray | None, op: MPI.Op = MPI.SUM, root: int = 0, **plan_options
) -> Plan:
    """recv of the root = send_0 (+) ... (+) send_(p-1). Where the root's send is None its recv is reduced."""
    check_root(window, root)
    x = flattened(recv, "recv") if window.rank == root else None
    s = x if send is None and x is not None else flattened(send, "send")
    if x is not None:
        check_arrays(s, x, x.size)
    name, _ = operation(op, s.dtype)
    description = f"reduce({name}, {s.size} {s.dtype}, root {root})"
    arrays, options = {"x": x, "s": s}, {"send": "s", "root": root}
    through_slots = shared.small if s.nbytes <= SMALL_BYTES else shared.slots
    return bind_either(
        window,
        description,
        through_slots,
        shared.arrays_reduce,
        {"s": s},
        s.size,
        arrays,
        op,
        plan_options=plan_options,
        **options,
    )


def reduce_scatter(
    window, send: np.ndarray, recv: np.ndarray, op: MPI.Op = MPI.SUM, counts=None, **plan_options
) -> Plan:
    """recv = block `rank` of send_0 (+) ... (+) send_(p-1). recv may be that block of send.

    Parameters
    ----------
    counts : sequence of int, optional
        Elements of each rank's block; without it `steps.chunk` cuts send into nearly equal blocks.
    """
    x, s = flattened(recv, "recv"), flattened(send, "send")
    cuts = blocks_of(window, s.size, counts)
    lo, hi = cuts[window.rank]
    check_arrays(s, x, hi - lo, f"recv of rank {window.rank}")
    name, _ = operation(op, x.dtype)
    description = f"reduce_scatter({name}, {[b - a for a, b in cuts]} {x.dtype})"
    schedules = shared.slots_reduce_scatter, shared.arrays_reduce_scatter
    return bind_either(
        window, description, *schedules, {"x": s}, cuts, {"x": s, "y": x}, op, plan_options=plan_options, recv="y"
    )


def allgather(window, send: np.ndarray | None, recv: np.ndarray, counts=None, private=None, **plan_options) -> Plan:
    """recv = send_0, ..., send_(p-1), one after another. Where send is None it is in its place in recv.

    Parameters
    ----------
    counts : sequence of int, optional
        Elements of each rank's block; without it `steps.chunk` cuts recv into nearly equal blocks.
    private : callable, optional
        Called in place of the schedule through slots, where arrays are not shared.
    """
    x = flattened(recv, "recv")
    cuts = blocks_of(window, x.size, counts)
    lo, hi = cuts[window.rank]
    s = x[lo:hi] if send is None else flattened(send, "send")
    check_arrays(x, s, hi - lo, f"send of rank {window.rank}")
    description = f"allgather({[b - a for a, b in cuts]} {x.dtype})"
    arrays, options = ({"x": x}, {}) if send is None else ({"x": x, "s": s}, {"send": "s"})
    schedules = shared.slots_allgather, shared.arrays_allgather
    return bind_either(
        window, description, *schedules, {"x": x}, cuts, arrays, private=private, plan_options=plan_options, **options
    )


def broadcast(window, x: np.ndarray, root: int = 0, private=None, **plan_options) -> Plan:
    """x = x of the root. `private` as of allgather."""
    check_root(window, root)
    description = f"broadcast({x.size} {x.dtype}, root {root})"
    x = flattened(x, "x")
    schedules = shared.slots_broadcast, shared.arrays_broadcast
    return bind_either(
        window,
        description,
        *schedules,
        {"x": x},
        x.size,
        {"x": x},
        private=private,
        plan_options=plan_options,
        root=root,
    )


def barrier(window) -> Plan:
    """No rank leaves before every rank has entered."""
    return bind(window, "barrier()", shared.barrier, None, {})


class Peers(NamedTuple):
    """Every rank's part of a shared array, all at one offset."""

    place: tuple[int, int]  # number of the array, offset in bytes
    parts: list[np.ndarray]
    owner: weakref.ref  # dead when nothing but plans can refer to the array on this rank


def peers(window, x: np.ndarray) -> Peers | None:
    """Return where in shared memory x is, and the same part of every rank's memory; None if x is not shared."""
    if window.size == 1:
        return Peers((0, 0), [x], weakref.ref(window))
    address = x.ctypes.data
    for number, array in list(window._arrays.items()):
        at = address - array.address
        if at >= 0 and at + x.nbytes <= array.nbytes:
            parts = [row[at : at + x.nbytes].view(x.dtype) for row in array.memory]
            return Peers((number, at), parts, array.owner)
    return None


def bind_either(
    window,
    description,
    through_slots,
    over_arrays,
    read_by_others,
    count,
    arrays,
    op=None,
    private=None,
    plan_options=None,
    **options,
):
    """Plan one of two schedules: through slots, or over the arrays where those that others name are shared.

    Parameters
    ----------
    read_by_others : name -> array that other ranks name
    private : called in place of `through_slots`, after a barrier in which all ranks show that it is the one
    plan_options : further arguments of Plan: before, after, keep
    """
    plan_options = plan_options or {}
    peers = {name: window.peers(array) for name, array in read_by_others.items()}
    if max(array.nbytes for array in read_by_others.values()) > SMALL_BYTES and None not in peers.values():
        return bind(
            window, description, over_arrays, count, arrays, op, peers=peers, plan_options=plan_options, **options
        )
    if private is not None:
        after = [private, *plan_options.get("after", ())]
        return bind(window, description, shared.barrier, None, {}, plan_options=plan_options | {"after": after})
    return bind(window, description, through_slots, count, arrays, op, plan_options=plan_options, **options)


def bind(window, description, schedule, count, arrays, op=None, peers=None, plan_options=None, **options) -> Plan:
    """Bind a schedule to memory: the arrays that are given, those of peers, and slots.

    Parameters
    ----------
    description : str
        The call in words.
    schedule : generator function of algorithms/shared.py
    count : elements, or each rank's block
    arrays : name in the schedule -> array
    op : None where nothing is reduced
    peers : name in the schedule -> where the array lies of which others' parts are named
    plan_options : further arguments of Plan
    """
    plan_options, peers = dict(plan_options or {}), peers or {}
    ranks = plan_options.pop("ranks", range(window.size))  # the window's, as the schedule numbers them
    size = plan_options.pop("size", window.size)
    array = next((array for array in arrays.values() if array is not None), None)
    dtype = np.dtype(np.uint8) if array is None else array.dtype
    options |= {"slot": SLOT_BYTES // dtype.itemsize, "line": max(1, LINE_BYTES // dtype.itemsize)}
    round_once = dtype == np.float16
    key = schedule, ranks[window.rank], size, count, round_once, *options.items()
    program = PROGRAMS.of(key, partial(compiled, schedule, ranks[window.rank], size, count, round_once, options))
    buffers = {name: MPI.buffer(array) for name, array in arrays.items() if array is not None}
    for name, both in zip(SLOTS, zip(*window.slots, strict=True), strict=True):
        buffers |= {(name, rank): MPI.buffer(slot) for rank, slot in zip(ranks, both, strict=True)}
        buffers[name] = MPI.buffer(both[window.rank])
    for name, place in peers.items():
        buffers |= {(name, rank): MPI.buffer(chunk) for rank, chunk in zip(ranks, place.parts, strict=True)}
    keep = [*plan_options.pop("keep", ()), op]
    agree, split = first_barrier(window, description, [place.place for place in peers.values()], program.epoch_parity)
    return Plan(
        program,
        plan_options.pop("comm", None),
        buffers,
        extent=dtype.itemsize,
        sum_into=partial(sum_into, op, dtype, keep.append),
        barrier=partial(barrier_of, window, description, ranks),
        agree=agree,
        split_barrier=lambda step, first: split() if first else split_barrier_of(window, description, ranks, step),
        slots=window,
        keep=keep,
        owners=[place.owner for place in peers.values()],
        on_abort=partial(window.abort, description),
        **plan_options,
    )


def compiled(schedule, rank, size, count, round_once, options) -> Program:
    """Return a rank's program of a schedule, which is given those of the options that it takes."""
    parameters = signature(schedule).parameters
    counted = () if count is None else (count,)
    passed = {name: value for name, value in options.items() if name in parameters}
    return Program(schedule(rank, size, *counted, **passed), rank, round_once=round_once, fused=True)


def blocks_of(window, total, counts):
    """(lo, hi) of every rank's block."""
    if counts is None:
        return tuple(chunk(total, window.size, rank) for rank in range(window.size))
    if len(counts) != window.size or sum(counts) != total:
        raise ValueError(f"counts {list(counts)}: need {window.size} numbers that add up to {total}")
    return tuple(pairwise(accumulate(map(int, counts), initial=0)))


def check_root(window, root):
    if not 0 <= root < window.size:
        raise ValueError(f"root {root}: there are ranks 0 ... {window.size - 1}")


def flattened(x, name) -> np.ndarray:
    """x in one dimension, as a view."""
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        raise TypeError(f"{name} must be a C-contiguous NumPy array, not {type(x).__name__}")
    if x.dtype.hasobject or not 0 < x.itemsize <= 1024:
        raise TypeError(f"{name} holds {x.dtype}: shared memory needs plain elements of at most 1024 bytes")
    return x.reshape(-1)


def check_arrays(send, recv, size, name=None):
    """Refuse arrays of two dtypes, and of another size than is needed."""
    if send.dtype != recv.dtype:
        raise TypeError(f"send holds {send.dtype}, recv {recv.dtype}")
    for description, array in (("send", send), ("recv", recv)) if name is None else ((name, recv),):
        if array.size != size:
            raise ValueError(f"{description} has {array.size} elements where {size} are needed")
