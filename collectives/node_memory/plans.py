"""Collectives in node-shared memory (window.py): planned once on given arrays, then called.

What they do is written in algorithms/shared.py, as schedules that are checked, priced and drawn like all others. Here a
schedule is bound to memory: between two meetings it becomes calls of NumPy (fusing.py, reduction.py).

At the first meeting of a call every rank shows a signature of operation, count, dtype and place. Where only the places
differ (some ranks gave shared arrays, others not) all go through slots; other differences are refused.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from inspect import signature
from itertools import accumulate, chain, pairwise

import numpy as np
from mpi4py import MPI

from collectives.algorithms import shared as ways
from collectives.node_memory.flags import marks_of
from collectives.node_memory.fusing import Phase, phases
from collectives.node_memory.reduction import operation
from collectives.steps import Slice, part

SLOT = 1 << 19  # bytes of each of a rank's two slots: a segment
SMALL = 1 << 13  # bytes of a vector that every rank sums itself
SMALL_PRIVATE = 1 << 14  # the same for an allreduce of private arrays
STEP = 1 << 9  # bytes that a copy or a reduction of a block takes in a plan, with its views (measured)
ALIGN = 64  # bytes: ranks work on different cache lines

Calls = list[Callable[[], object]]


class SharedPlan:
    """One collective on given arrays. Call it on all ranks, as often as wanted.

    Parameters
    ----------
    window : SharedWindow
    what : str
        The call in words: equal on all ranks, or the call is refused.
    phases : for a first turn with even slots, and with odd ones, the calls before each meeting and after the last
    turns : int
        That it takes of the slots, or two, four ... less.
    peers : where in shared memory, which the other ranks rely on; None through slots
    otherwise : makes the plan for a call in which other ranks are at another place
    kept : memory of its own
    """

    used, busy = False, 0  # a cache of plans asks for these, and for its bytes
    text: list[Phase] = []  # what it does between meetings, in the words of the schedule

    def __init__(self, window, what, phases: list[list[Calls]], turns: int, peers=None, otherwise=None, kept=()):
        self.bytes = memory_of(kept) + STEP * sum(map(len, chain(*phases)))
        self.window, self.what, self.turns, self.peers = window, what, turns, peers
        self.otherwise, self.general = otherwise, None
        self.parts = [(before, between, last) for before, *between, last in phases]
        self.meet, self.together = window.flags.meet, window.flags.together
        digest = hashlib.blake2b(f"{what} at {peers and peers.place}".encode(), digest_size=7).digest()
        self.marks = marks_of(int.from_bytes(digest, "little"))

    @property
    def gone(self) -> bool:
        """Whether nothing but plans refers to the array that it is for: it keeps the memory, and nobody can call it."""
        return self.peers is not None and self.peers.owner() is None

    def __call__(self):
        self.used = True
        try:
            same = self.run()
            calls = None if same else self.window.comm.allgather(self.what)
        except BaseException as error:
            self.window.leave(self.what, error)
            raise
        if calls is not None:
            self.settle(calls)

    def run(self) -> bool:
        """Make the calls; false where the signatures differ: then all ranks are at the first meeting."""
        window, what = self.window, self.what
        before, between, last = self.parts[window.turn & 1]
        for call in before:
            call()
        if not self.meet(self.marks, what):
            window.turn += 1  # others may have put something into slots
            return False
        window.turn += self.turns
        for calls in between:
            for call in calls:
                call()
            self.together(what)
        for call in last:
            call()
        return True

    def settle(self, calls: list[str]):
        """Do what fits the calls of all ranks, whose signatures differ."""
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise ValueError(f"ranks disagree: rank 0 calls {calls[0]}, rank {rank} calls {call}")
        if self.general is None:
            self.general = self.otherwise() if self.otherwise else self
        self.general()

    def free(self):
        """Nothing to free: the arrays belong to the caller, the slots to the window."""


# ----------------------------------------------------------------------------------------------- the collectives
#
# Methods of SharedWindow. Arrays are C-contiguous, of one dtype; counts, dtype and op are the same on every rank. Each
# plans a call on these arrays, on this rank alone, and returns it; making the call is collective. In between the arrays
# are the caller's to read and write.


def allreduce(window, send: np.ndarray | None, recv: np.ndarray, op: MPI.Op = MPI.SUM) -> SharedPlan:
    """recv = send_0 (+) ... (+) send_(p-1), in this order, on every rank. Where send is None recv is reduced."""
    x = flat(recv, "recv")
    s = x if send is None else flat(send, "send")
    alike(s, x, x.size)
    name, _ = operation(op, x.dtype)
    what = f"allreduce({name}, {x.size} {x.dtype})"
    given, told = ({"x": x}, {}) if s is x else ({"x": x, "s": s}, {"send": "s"})
    through_slots = ways.small if x.nbytes <= SMALL_PRIVATE else ways.slots
    return one_of(window, what, (through_slots, ways.arrays), x, x.size, given, op, **told)


def reduce(window, send: np.ndarray | None, recv: np.ndarray | None, op: MPI.Op = MPI.SUM, root: int = 0) -> SharedPlan:
    """recv of the root = send_0 (+) ... (+) send_(p-1). Where the root's send is None its recv is reduced."""
    check_root(window, root)
    x = flat(recv, "recv") if window.rank == root else None
    s = x if send is None and x is not None else flat(send, "send")
    if x is not None:
        alike(s, x, x.size)
    name, _ = operation(op, s.dtype)
    what = f"reduce({name}, {s.size} {s.dtype}, root {root})"
    given, told = {"x": x, "s": s}, {"send": "s", "root": root}
    through_slots = ways.small if s.nbytes <= SMALL else ways.slots
    return one_of(window, what, (through_slots, ways.arrays_reduce), s, s.size, given, op, **told)


def reduce_scatter(window, send: np.ndarray, recv: np.ndarray, op: MPI.Op = MPI.SUM, counts=None) -> SharedPlan:
    """recv = block `rank` of send_0 (+) ... (+) send_(p-1). recv may be that block of send.

    Parameters
    ----------
    counts : sequence of int, optional
        Elements of each rank's block; without it `steps.part` cuts send into nearly equal blocks.
    """
    x, s = flat(recv, "recv"), flat(send, "send")
    cuts = blocks_of(window, s.size, counts)
    lo, hi = cuts[window.rank]
    alike(s, x, hi - lo, f"recv of rank {window.rank}")
    name, _ = operation(op, x.dtype)
    what = f"reduce_scatter({name}, {[b - a for a, b in cuts]} {x.dtype})"
    both = ways.slots_reduce_scatter, ways.arrays_reduce_scatter
    return one_of(window, what, both, s, cuts, {"x": s, "y": x}, op, recv="y")


def allgather(window, send: np.ndarray | None, recv: np.ndarray, counts=None, private=None) -> SharedPlan:
    """recv = send_0, ..., send_(p-1), one after another. Where send is None it is in its place in recv.

    Parameters
    ----------
    counts : sequence of int, optional
        Elements of each rank's block; without it `steps.part` cuts recv into nearly equal blocks.
    private : callable, optional
        Called in place of the way through slots, where arrays are not shared.
    """
    x = flat(recv, "recv")
    cuts = blocks_of(window, x.size, counts)
    lo, hi = cuts[window.rank]
    s = x[lo:hi] if send is None else flat(send, "send")
    alike(x, s, hi - lo, f"send of rank {window.rank}")
    what = f"allgather({[b - a for a, b in cuts]} {x.dtype})"
    given, told = ({"x": x}, {}) if send is None else ({"x": x, "s": s}, {"send": "s"})
    both = ways.slots_allgather, ways.arrays_allgather
    return one_of(window, what, both, x, cuts, given, private=private, **told)


def broadcast(window, x: np.ndarray, root: int = 0, private=None) -> SharedPlan:
    """x = x of the root. `private` as of allgather."""
    check_root(window, root)
    what = f"broadcast({x.size} {x.dtype}, root {root})"
    x = flat(x, "x")
    both = ways.slots_broadcast, ways.arrays_broadcast
    return one_of(window, what, both, x, x.size, {"x": x}, private=private, root=root)


def barrier(window) -> SharedPlan:
    """No rank leaves before every rank has entered."""
    return bind(window, "barrier()", ways.barrier, None, {})


def one_of(window, what, ways, named, count, given, op=None, private=None, **options):
    """Of two ways, through slots and over arrays: the second where the array that it names of others is shared.

    `private` is called in place of the first: all ranks meet, which tells them that it is the one, and then call it.
    """
    through_slots = partial(bind, window, what, ways[0], count, given, op, **options)
    if private is not None:
        through_slots = partial(SharedPlan, window, what, [[[], [private]]] * 2, 0)
    if named.nbytes <= SMALL or (peers := window.peers(named)) is None:
        return through_slots()
    return bind(window, what, ways[1], count, given, op, peers=peers, otherwise=through_slots, **options)


def bind(window, what, way, count, given, op=None, peers=None, otherwise=None, **options):
    """Bind the schedule `way` to memory: the arrays that are given, those of peers, and slots.

    Parameters
    ----------
    what : str
        The call in words.
    way : generator function of algorithms/shared.py
    count : elements, or each rank's block
    given : name in the schedule -> array
    op : None where nothing is reduced
    peers : where the array lies of which others' parts are named
    """
    array = next((array for array in given.values() if array is not None), None)
    dtype = np.dtype(np.uint8) if array is None else array.dtype
    options |= {"slot": SLOT // dtype.itemsize, "line": max(1, ALIGN // dtype.itemsize)}
    text, reach, turns = read(way, window.rank, window.size, count, tuple(options.items()))
    scratch = {name: np.empty(n, dtype) for name, n in reach.items() if name not in given}
    own, kept = given | scratch, [*scratch.values()]
    combine = op and operation(op, dtype, kept.append)[1]

    def bound(first):
        """The calls where the first turn uses these slots: the text is written for the even ones."""

        def memory(s: Slice) -> np.ndarray:
            if s.buf in ways.SLOTS:
                slot = window.slots[s.rank][ways.SLOTS.index(s.buf) ^ first]
                return slot[s.lo * dtype.itemsize : s.hi * dtype.itemsize].view(dtype)
            return (own[s.buf] if s.rank == window.rank else peers.parts[s.rank])[s.lo : s.hi]

        return [calls_of(phase, memory, combine) for phase in text]

    plan = SharedPlan(window, what, [bound(0), bound(1)], turns, peers, otherwise, kept)
    plan.text = text
    return plan


def calls_of(phase: Phase, memory, combine) -> Calls:
    """A phase as calls of NumPy."""
    calls = []
    for operands, targets in phase:
        arrays = [memory(s) for s in operands]
        if len(arrays) > 1:
            calls += combine(arrays, [memory(s) for s in targets])
        else:
            calls += [copying(memory(s), arrays[0]) for s in targets if s != operands[0]]
    return calls


def blocks_of(window, total, counts):
    """(lo, hi) of every rank's block."""
    if counts is None:
        return tuple(part(total, window.size, rank) for rank in range(window.size))
    if len(counts) != window.size or sum(counts) != total:
        raise ValueError(f"counts {list(counts)}: need {window.size} numbers that add up to {total}")
    return tuple(pairwise(accumulate(map(int, counts), initial=0)))


def check_root(window, root):
    if not 0 <= root < window.size:
        raise ValueError(f"root {root}: there are ranks 0 ... {window.size - 1}")


@lru_cache(maxsize=256)
def read(way, rank, size, count, options) -> tuple[list[Phase], dict[str, int], int]:
    """(phases, elements of each buffer but the slots, turns) of a schedule; of turns it may be two, four ... less.

    It is given those of the options that it takes.
    """
    known = signature(way).parameters
    counted = () if count is None else (count,)
    text = phases(way(rank, size, *counted, **{name: value for name, value in options if name in known}), rank)
    reach, turns = {}, 0
    for fused in chain.from_iterable(text):
        for s in (*fused.operands, *fused.targets):
            if s.buf in ways.SLOTS:
                turns = ways.SLOTS.index(s.buf) + 1  # the last one counts
            else:
                reach[s.buf] = max(reach.get(s.buf, 0), s.hi)
    return text, reach, turns


def memory_of(kept: Iterable) -> int:
    """Bytes of memory among what a plan keeps alive."""
    return sum(getattr(m, "nbytes", 0) for m in kept)


def copying(target, source) -> Callable[[], None]:
    return partial(target.__setitem__, ..., source)


def flat(x, name) -> np.ndarray:
    """x in one dimension, as a view."""
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        raise TypeError(f"{name} must be a C-contiguous NumPy array, not {type(x).__name__}")
    if x.dtype.hasobject or not 0 < x.itemsize <= 1024:
        raise TypeError(f"{name} holds {x.dtype}: shared memory needs plain elements of at most 1024 bytes")
    return x.reshape(-1)


def alike(send, recv, size, name=None):
    """Refuse arrays of two dtypes, and of another size than is needed."""
    if send.dtype != recv.dtype:
        raise TypeError(f"send holds {send.dtype}, recv {recv.dtype}")
    for what, array in (("send", send), ("recv", recv)) if name is None else ((name, recv),):
        if array.size != size:
            raise ValueError(f"{what} has {array.size} elements where {size} are needed")
