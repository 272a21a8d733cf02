"""The halo of an image that is cut in height: rows that a rank needs of others, and their gradients back.

Rank r of p has the rows floor(r h / p) to floor((r + 1) h / p). A window that moves over them needs an interval, some
of which other ranks have: usually the neighbours, of small images also those behind. One round of messages brings
them; the same round the other way takes their gradients home, where they are added.

    halo(rank, needs, owned, size)     # a schedule: rounds for collectives

Cost of a 3x3 convolution of N images of width W and C channels: each rank sends 2 N W C elements, each way, however
many rows it has: the share of communication falls as images grow. In mixed precision rows travel as float16, and their
gradients, which are addends, as float32. Source: Dryden et al. 2019 (spatial parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from collectives.steps import Recv, Send
from parallel.strategies.activation_transfer import transfer
from parallel.strategies.tensor.moves import Cut

Interval = tuple[int, int]


def common(a: Interval, b: Interval) -> Interval:
    """What two intervals have in common; empty ones begin where they end."""
    lo, hi = max(a[0], b[0]), min(a[1], b[1])
    return lo, max(lo, hi)


def owned_rows(height: int, ranks: int) -> list[Interval]:
    """The rows of every rank."""
    return [Cut(1, height).bounds(rank, ranks) for rank in range(ranks)]


def pieces(rank: int, needs: Sequence[Interval], owned: Sequence[Interval]) -> tuple[list, list]:
    """(what this rank sends, what it receives): (rank, rows) of each message, by ranks."""
    others = [other for other in range(len(needs)) if other != rank]
    sends = [(other, common(owned[rank], needs[other])) for other in others]
    receives = [(other, common(needs[rank], owned[other])) for other in others]
    return tuple([(other, rows) for other, rows in found if rows[1] > rows[0]] for found in (sends, receives))


def halo(rank: int, needs: Sequence[Interval], owned: Sequence[Interval], size: int, back: bool = False) -> Iterator:
    """One round: buffer "mine" has what is sent, "theirs" what comes, messages of one rank after the other.

    Parameters
    ----------
    needs, owned : of every rank, an interval of rows
    size : int
        Elements of a row, of all samples.
    back : bool
        The other way: of gradients; "theirs" is sent and "mine" comes.
    """
    sends, receives = pieces(rank, needs, owned)
    out, into = (Recv, Send) if back else (Send, Recv)
    steps = []
    for kind, buffer, messages in ((out, "mine", sends), (into, "theirs", receives)):
        at = 0
        for other, (lo, hi) in messages:
            steps.append(kind(other, buffer, at, at + (hi - lo) * size))
            at += (hi - lo) * size
    yield tuple(steps)


class Halo:
    """What a layer needs of its input's rows, on one rank.

    Parameters
    ----------
    height : int
        Of the whole image.
    needs : sequence of (lo, hi)
        Rows that each rank needs, inside the image.
    rank : int

    Attributes
    ----------
    lo, hi : int
        The rows that this rank needs.
    moves : bool
        Whether any rank needs anything of another.
    beside : Communicator or None
        Of the same ranks, with a thread that moves its messages while layers compute; whoever joins the ranks gives it
        where some are on other nodes.
    hides : bool
        Whether messages are hidden so, as far as a layer has enough to compute meanwhile.
    """

    beside, hides = None, True

    def __init__(self, height: int, needs: Sequence[Interval], rank: int):
        self.height, self.needs, self.rank = height, list(needs), rank
        self.owned = owned_rows(height, len(needs))
        self.lo, self.hi = needs[rank]
        self.sends, self.receives = pieces(rank, needs, self.owned)
        self.moves = any(any(pieces(r, needs, self.owned)) for r in range(len(needs)))
        self.buffers: dict[tuple, tuple] = {}  # shape of a row of all samples, dtype -> what is sent, and what comes
        self.plans: dict[tuple, object] = {}  # the same, and whether back

    @property
    def rows(self) -> int:
        """How many rows this rank has."""
        lo, hi = self.owned[self.rank]
        return hi - lo

    def keep(self, x: np.ndarray, ctx) -> np.ndarray:
        """The rows that this rank needs, of a whole image (N, H, W, C)."""
        found = ctx.empty((len(x), self.hi - self.lo, *x.shape[2:]), x.dtype)
        found[...] = x[:, self.lo : self.hi]
        return found

    def receive(self, x: np.ndarray, ctx, meanwhile: Callable[[], object] | None = None) -> np.ndarray | None:
        """Rows that others send, one rank's behind another's: (rows, N, W, C); of x (N, rows, W, C), this rank's.

        `meanwhile` is called when they are on their way, and they are waited for when it has returned.
        """
        if not self.moves or not x.size:
            return None
        first = self.owned[self.rank][0]
        rows = ctx.workspace("halo", (_rows(self.sends), len(x), *x.shape[2:]), x.dtype)
        for part, (lo, hi) in _parts(rows, self.sends):
            part[...] = x[:, lo - first : hi - first]
        return transfer(ctx, lambda sent: self._exchanged(sent, ctx, meanwhile), rows)

    def _exchanged(self, sent: np.ndarray, ctx, meanwhile) -> np.ndarray:
        """What comes for the rows that are sent."""
        mine, theirs = self._buffers(sent.shape[1:], sent.dtype)
        mine[...] = sent
        self._move(mine, theirs, ctx, meanwhile)
        found = ctx.empty(theirs.shape, theirs.dtype)
        found[...] = theirs
        return found

    def put_together(self, x: np.ndarray, theirs: np.ndarray | None, ctx, rows: Interval | None = None) -> np.ndarray:
        """The rows that this rank needs (N, rows, W, C), or some of them, from its own and what it has received."""
        if rows is None and self._as_it_is():
            return x
        start, stop = rows or (self.lo, self.hi)
        found = ctx.empty((len(x), stop - start, *x.shape[2:]), x.dtype)
        first = self.owned[self.rank][0]
        lo, hi = common(self.owned[self.rank], (start, stop))
        found[:, lo - start : hi - start] = x[:, lo - first : hi - first]
        for part, there in _parts(theirs, self.receives) if theirs is not None else ():
            lo, hi = common(there, (start, stop))
            found[:, lo - start : hi - start] = part[:, lo - there[0] : hi - there[0]]
        return found

    def give_back(self, gx: np.ndarray, ctx) -> np.ndarray:
        """The gradient of this rank's rows from that of the rows it needs, and what other ranks have for it."""
        if self._as_it_is():
            return gx
        self.send_back([((self.lo, self.hi), gx)], ctx)
        return self.add_back(gx, ctx)

    def send_back(self, borders: Sequence, ctx, meanwhile: Callable[[], object] | None = None) -> None:
        """Bring gradients of other ranks' rows home, of borders (rows, gradient); `meanwhile` as for `receive`."""
        _, gx = borders[0]
        if not self.moves or not gx.size:
            return
        mine, theirs = self._buffers((len(gx), *gx.shape[2:]), gx.dtype)
        for part, (lo, hi) in _parts(theirs, self.receives):
            start, g = next((rows[0], g) for rows, g in borders if rows[0] <= lo and hi <= rows[1])
            part[...] = g[:, lo - start : hi - start]
        self._move(mine, theirs, ctx, meanwhile, back=True)

    def add_back(self, gx: np.ndarray, ctx) -> np.ndarray:
        """The gradient of this rank's rows: its own, and what has come home."""
        found = ctx.empty((len(gx), self.rows, *gx.shape[2:]), gx.dtype)
        found[...] = 0
        first = self.owned[self.rank][0]
        lo, hi = common(self.owned[self.rank], (self.lo, self.hi))
        found[:, lo - first : hi - first] = gx[:, lo - self.lo : hi - self.lo]
        if self.moves and gx.size:
            mine, _ = self._buffers((len(gx), *gx.shape[2:]), gx.dtype)
            for part, (lo, hi) in _parts(mine, self.sends):
                found[:, lo - first : hi - first] += part
        return found

    def _move(self, mine: np.ndarray, theirs: np.ndarray, ctx, meanwhile, back: bool = False) -> None:
        """Let what lies in the buffers travel; where there is a communicator for that, while something else is done."""
        communicator = self.beside or ctx.group("space").communicator
        if (key := (mine.shape[1:], mine.dtype, back)) not in self.plans:
            rounds = halo(self.rank, self.needs, self.owned, math.prod(mine.shape[1:]), back)
            self.plans[key] = communicator.compile(rounds, mine=mine.reshape(-1), theirs=theirs.reshape(-1))
        plan, name = self.plans[key], f"halo of layer {ctx.path}{', backward' * back}"
        if not self.beside:
            communicator.Run(plan, name)
            return
        request = self.beside.Irun(plan, name)  # of all ranks, whether they have something to do meanwhile or not
        if meanwhile:
            meanwhile()
        request.Wait()

    def _as_it_is(self) -> bool:
        """Whether every rank needs what it has."""
        return self.needs == self.owned

    def _buffers(self, shape: tuple[int, ...], dtype) -> tuple[np.ndarray, np.ndarray]:
        """(of what is sent, of what comes) for rows of all samples of that shape."""
        if (key := (shape, dtype)) not in self.buffers:
            counts = map(_rows, (self.sends, self.receives))
            self.buffers[key] = tuple(np.empty((count, *shape), dtype) for count in counts)
        return self.buffers[key]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of messages."""
        return sum(mine.nbytes + theirs.nbytes for mine, theirs in self.buffers.values())

    def close(self) -> None:
        """Free the plans (collective)."""
        for plan in self.plans.values():
            plan.free()
        self.plans, self.buffers = {}, {}


def _rows(messages: list) -> int:
    """How many rows they have together."""
    return sum(hi - lo for _, (lo, hi) in messages)


def _parts(buffer: np.ndarray, messages: list) -> Iterator[tuple[np.ndarray, Interval]]:
    """Each message as (N, rows, W, C), a view of a buffer (all rows, N, W, C); and which rows they are."""
    at = 0
    for _, (lo, hi) in messages:
        yield buffer[at : at + hi - lo].swapaxes(0, 1), (lo, hi)
        at += hi - lo
