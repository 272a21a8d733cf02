"""Collectives in node-shared memory (window.py): planned once on given arrays, then called.

Three ways, by what is at hand. A *meeting* is one flag raised and p - 1 looked at.

| way | for | allreduce |
|---|---|---|
| small | up to SMALL (_PRIVATE) bytes | each rank puts x into its slot; meet; each sums all slots itself |
| shared | the same part of a shared array on every rank | meet; each sums its slice over all arrays into all; meet |
| slots | everything else, in segments of a slot | put what others sum; meet; sum a slice; meet; get their sums |

They have one form, a turn: put, meet, work, get; where others get what the work wrote, they meet before they get. One
meeting serves two turns: what the next turn puts is put before the ranks meet for this one. Slots come in pairs that
alternate from turn to turn: whoever puts in turn t + 2 has met all others since they got what they wanted in turn t, so
a slot needs no meeting to be free again.

At the first meeting of a call every rank shows a signature of operation, count, dtype and place. Where only the places
differ (some ranks gave shared arrays, others not) all go through slots; other differences are refused.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.flags import UNSIGNED, marks_of
from collectives.reducing import operation
from collectives.steps import part

SLOT = 1 << 19  # bytes of each of a rank's two slots: a segment
SMALL = 1 << 13  # bytes of a vector that every rank sums itself
SMALL_PRIVATE = 1 << 14  # the same for an allreduce of private arrays
ALIGN = 64  # bytes: ranks work on different cache lines

Copies = list[tuple[np.ndarray, np.ndarray]]  # (target, source)


class Turn(NamedTuple):
    """What one rank does with the slots of one parity."""

    put: Copies
    work: list[Callable[[], None]]
    get: Copies


class SharedPlan:
    """One collective on given arrays. Call it on all ranks, as often as wanted.

    Parameters
    ----------
    window : SharedWindow
    what : str
        The call in words: equal on all ranks, or the call is refused.
    turns : for each parity the list of turns
    twice : whether ranks get what others wrote in the work of the same turn
    peers : where in shared memory, which the other ranks rely on; None through slots
    otherwise : makes the plan for a call in which other ranks are at another place
    """

    bytes, used, busy = 0, False, 0  # a cache of plans asks for these

    def __init__(self, window, what, turns, twice=False, peers=None, otherwise=None):
        self.window, self.what, self.turns, self.twice, self.peers = window, what, turns, twice, peers
        self.otherwise, self.general = otherwise, None
        digest = hashlib.blake2b(f"{what} at {peers and peers.place}".encode(), digest_size=7).digest()
        self.marks = marks_of(int.from_bytes(digest, "little"))

    @property
    def gone(self) -> bool:
        """Whether nothing but plans refers to the array that it is for: it keeps the memory, and nobody can call it."""
        return self.peers is not None and self.peers.owner() is None

    def __call__(self):
        self.used = True
        window, flags, what, twice = self.window, self.window.flags, self.what, self.twice
        start = window.turn & 1
        window.turn += 1
        now = self.turns[0][start]
        for target, source in now.put:
            target[...] = source
        if not flags.meet(self.marks, what):
            return self.settle()
        for k in range(1, len(self.turns) + 1):
            for step in now.work:
                step()
            if not twice:
                for target, source in now.get:
                    target[...] = source
            after = self.turns[k][(start + k) & 1] if k < len(self.turns) else None
            if after:
                window.turn += 1
                for target, source in after.put:
                    target[...] = source
            if after or twice:
                flags.together(what)
            if twice:
                for target, source in now.get:
                    target[...] = source
            now = after
        return None

    def settle(self):
        """The signatures differ: all ranks are here."""
        calls = self.window.comm.allgather(self.what)
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise ValueError(f"ranks disagree: rank 0 calls {calls[0]}, rank {rank} calls {call}")
        if self.general is None:
            self.general = self.otherwise() if self.otherwise else self
        self.general()

    def free(self):
        """Nothing to free: the arrays belong to the caller, the slots to the window."""


class ShortPlan(SharedPlan):
    """One turn, of which nobody gets what others wrote in their work: all is done after one meeting."""

    def __init__(self, window, what, turns, **more):
        super().__init__(window, what, turns, **more)
        self.turns = [(turn.put, [*turn.work, *starmap(copying, turn.get)]) for turn in turns[0]]
        self.meet = window.flags.meet

    def __call__(self):
        self.used = True
        window = self.window
        put, work = self.turns[window.turn & 1]
        window.turn += 1
        for target, source in put:
            target[...] = source
        if not self.meet(self.marks, self.what):
            return self.settle()
        for step in work:
            step()
        return None


class DirectPlan(SharedPlan):
    """Put into own memory, meet, work on the memory of all, meet."""

    def __init__(self, window, what, put, work, peers, otherwise):
        super().__init__(window, what, [], True, peers, otherwise)
        self.put, self.work = put, work
        self.meet = window.flags.meet

    def __call__(self):
        self.used = True
        meet, what = self.meet, self.what
        for target, source in self.put:
            target[...] = source
        if not meet(self.marks, what):
            self.window.turn += 1  # others may have put something into slots
            return self.settle()
        for step in self.work:
            step()
        meet(UNSIGNED, what)
        return None


class SharedCollectives:
    """The collectives of a SharedWindow.

    Arrays are C-contiguous, of one dtype; counts, dtype and op are the same on every rank. Each method plans a call on
    these arrays, on this rank alone, and returns it; making the call is collective. In between the arrays are the
    caller's to read and write.
    """

    def allreduce(self, send: np.ndarray | None, recv: np.ndarray, op: MPI.Op = MPI.SUM) -> SharedPlan:
        """recv = send_0 (+) ... (+) send_(p-1), in this order, on every rank. Where send is None recv is reduced."""
        x = flat(recv, "recv")
        s = x if send is None else flat(send, "send")
        alike(s, x, x.size)
        name, combine = operation(op, x.dtype)
        what = f"allreduce({name}, {x.size} {x.dtype})"

        def through_slots():
            if x.nbytes <= SMALL_PRIVATE:
                return self._plan(what, 1, lambda slots, _: self._small(slots, s, x, combine))
            return self._plan(what, self._segments(x), lambda slots, k: self._slices(slots, k, s, x, combine), True)

        if x.nbytes <= SMALL or (peers := self.peers(x)) is None:
            return through_slots()
        lo, hi = self._slice(x.size, x.itemsize)
        mine = [peer[lo:hi] for peer in peers.parts]
        return self._direct(what, peers, through_slots, combine(mine, mine), [] if s is x else [(x, s)])

    def reduce(
        self, send: np.ndarray | None, recv: np.ndarray | None, op: MPI.Op = MPI.SUM, root: int = 0
    ) -> SharedPlan:
        """recv of the root = send_0 (+) ... (+) send_(p-1). Where the root's send is None its recv is reduced."""
        self._check_root(root)
        x = flat(recv, "recv") if self.rank == root else None
        s = x if send is None and x is not None else flat(send, "send")
        if x is not None:
            alike(s, x, x.size)
        name, combine = operation(op, s.dtype)
        what = f"reduce({name}, {s.size} {s.dtype}, root {root})"
        if s.nbytes <= SMALL:
            return self._plan(what, 1, lambda slots, _: self._small(slots, s, x, combine))

        def through_slots(peers=None, otherwise=None):
            turn = lambda slots, k: self._slices(slots, k, s, x, combine, peers and peers.parts)
            return self._plan(what, self._segments(s), turn, True, peers, otherwise)

        if (peers := self.peers(s)) is None:
            return through_slots()
        return through_slots(peers, through_slots)

    def reduce_scatter(self, send: np.ndarray, recv: np.ndarray, op: MPI.Op = MPI.SUM, counts=None) -> SharedPlan:
        """recv = block `rank` of send_0 (+) ... (+) send_(p-1). recv may be that block of send.

        Parameters
        ----------
        counts : sequence of int, optional
            Elements of each rank's block; without it `steps.part` cuts send into nearly equal blocks.
        """
        x, s = flat(recv, "recv"), flat(send, "send")
        cuts = self._blocks(s.size, counts)
        lo, hi = cuts[self.rank]
        alike(s, x, hi - lo, f"recv of rank {self.rank}")
        name, combine = operation(op, x.dtype)
        what = f"reduce_scatter({name}, {[b - a for a, b in cuts]} {x.dtype})"
        step = self._room // x.itemsize

        def turn(slots, k):
            """Elements k * step ... of every block; in a slot the room of rank q is for block q."""
            pieces = [s[a:b][k * step : (k + 1) * step] for a, b in cuts]

            def room(owner, rank):
                return slots[owner][rank * self._room :][: pieces[rank].nbytes].view(x.dtype)

            operands = [pieces[q] if q == self.rank else room(q, self.rank) for q in range(self.size)]
            work = combine(operands, [x[k * step : (k + 1) * step]])
            return Turn([(room(self.rank, q), pieces[q]) for q in range(self.size) if q != self.rank], work, [])

        def through_slots():
            return self._plan(what, segments(max(b - a for a, b in cuts), step), turn)

        if s.nbytes <= SMALL or (peers := self.peers(s)) is None:
            return through_slots()
        return self._direct(what, peers, through_slots, combine([peer[lo:hi] for peer in peers.parts], [x]))

    def allgather(self, send: np.ndarray | None, recv: np.ndarray, counts=None) -> SharedPlan:
        """recv = send_0, ..., send_(p-1), one after another. Where send is None it is in its place in recv.

        Parameters
        ----------
        counts : sequence of int, optional
            Elements of each rank's block; without it `steps.part` cuts recv into nearly equal blocks.
        """
        x = flat(recv, "recv")
        cuts = self._blocks(x.size, counts)
        lo, hi = cuts[self.rank]
        s = x[lo:hi] if send is None else flat(send, "send")
        alike(x, s, hi - lo, f"send of rank {self.rank}")
        what = f"allgather({[b - a for a, b in cuts]} {x.dtype})"
        step = SLOT // x.itemsize
        home = [] if send is None else [(x[lo:hi], s)]

        def turn(slots, k):
            pieces = [x[a:b][k * step : (k + 1) * step] for a, b in cuts]
            room = [slot[: piece.nbytes].view(x.dtype) for slot, piece in zip(slots, pieces, strict=True)]
            get = [(pieces[q], room[q]) for q in range(self.size) if q != self.rank]
            return Turn([(room[self.rank], s[k * step : (k + 1) * step])], [], get if k else get + home)

        def through_slots():
            return self._plan(what, segments(max(b - a for a, b in cuts), step), turn)

        if x.nbytes <= SMALL or (peers := self.peers(x)) is None:
            return through_slots()
        others = [peer[lo:hi] for q, peer in enumerate(peers.parts) if q != self.rank]
        return self._direct(what, peers, through_slots, [copying(t, s) for t in [*others, *(t for t, _ in home)]])

    def broadcast(self, x: np.ndarray, root: int = 0) -> SharedPlan:
        """x = x of the root."""
        self._check_root(root)
        what = f"broadcast({x.size} {x.dtype}, root {root})"
        x = flat(x, "x")

        def turn(slots, k):
            piece = x[k * step : (k + 1) * step]
            room = slots[root][: piece.nbytes].view(x.dtype)
            return Turn([(room, piece)], [], []) if self.rank == root else Turn([], [], [(piece, room)])

        step = SLOT // x.itemsize

        def through_slots():
            return self._plan(what, segments(x.size, step), turn)

        if x.nbytes <= SMALL or (peers := self.peers(x)) is None:
            return through_slots()
        work = [] if self.rank == root else [copying(x, peers.parts[root])]
        return self._direct(what, peers, through_slots, work)

    def barrier(self) -> SharedPlan:
        """No rank leaves before every rank has entered."""
        return self._plan("barrier()", 1, lambda *_: Turn([], [], []))

    # ------------------------------------------------------------------------------------------ how turns are made

    def _plan(self, what, number, turn, twice=False, peers=None, otherwise=None):
        """turn(slots of one parity, segment) -> Turn, for both parities and so many segments."""
        even, odd = ([slot[parity] for slot in self._slots] for parity in (0, 1))
        turns = [(turn(even, k), turn(odd, k)) for k in range(number)]
        if number == 1 and not twice:
            return ShortPlan(self, what, turns, peers=peers, otherwise=otherwise)
        return SharedPlan(self, what, turns, twice, peers, otherwise)

    def _direct(self, what, peers, otherwise, work, put=()):
        return DirectPlan(self, what, put, work, peers, otherwise)

    def _small(self, slots, s, x, combine):
        """Every rank puts its vector, and whoever wants the result (x is not None) sums them all."""
        operands = [slot[: s.nbytes].view(s.dtype) for slot in slots]
        return Turn([(operands[self.rank], s)], combine(operands, [x]) if x is not None else [], [])

    def _slices(self, slots, k, s, x, combine, direct=None):
        """Segment k: each rank sums its slice into its slot and into x; x is None where the result is not wanted.

        The operands of others are in their slots, or in `direct`: all ranks' s, where they can be read. In every slot
        there is a room for the slice of each rank, at the same place in every segment: into its own room a rank only
        writes results, so that others may still get them while it puts operands for the next turn but one.
        """
        step = self.size * (self._room // s.itemsize)
        mine = s[k * step : (k + 1) * step]
        cuts = [self._slice(mine.size, s.itemsize, rank) for rank in range(self.size)]

        def room(owner, rank):
            lo, hi = cuts[rank]
            return slots[owner][rank * self._room :][: (hi - lo) * s.itemsize].view(s.dtype)

        def slices(array):
            return [array[k * step :][lo:hi] for lo, hi in cuts]

        r = self.rank
        others = [q for q in range(self.size) if q != r]
        put = [] if direct else [(room(r, q), slices(s)[q]) for q in others]
        sources = [slices(peer)[r] for peer in direct] if direct else [room(q, r) for q in range(self.size)]
        sources[r] = slices(s)[r]
        if x is None:
            return Turn(put, combine(sources, [room(r, r)]), [])
        result = slices(x)
        get = [(result[q], room(q, q)) for q in others]
        return Turn(put, combine(sources, [room(r, r), result[r]]), get)

    @property
    def _room(self):
        """Bytes of a slot for each rank: whole cache lines."""
        return SLOT // self.size // ALIGN * ALIGN

    def _segments(self, x):
        return segments(x.size, self.size * (self._room // x.itemsize))

    def _slice(self, count, itemsize, rank=None):
        """(lo, hi) of a rank's slice of so many elements: whole cache lines, but for the end."""
        unit = max(1, ALIGN // itemsize)
        lo, hi = part(-(-count // unit), self.size, self.rank if rank is None else rank)
        return min(lo * unit, count), min(hi * unit, count)

    def _blocks(self, total, counts):
        """(lo, hi) of every rank's block."""
        if counts is None:
            return [part(total, self.size, rank) for rank in range(self.size)]
        if len(counts) != self.size or sum(counts) != total:
            raise ValueError(f"counts {list(counts)}: need {self.size} numbers that add up to {total}")
        return list(pairwise(accumulate(map(int, counts), initial=0)))

    def _check_root(self, root):
        if not 0 <= root < self.size:
            raise ValueError(f"root {root}: there are ranks 0 ... {self.size - 1}")


def segments(count, step) -> int:
    """How many pieces of `step` elements make `count`; at least one, as a call has at least one meeting."""
    return max(1, -(-count // step))


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
