"""Which positions of a sequence a rank has, in context parallelism.

Of p ranks, `heads` neighbours share the heads of attention (Ulysses) and p / heads such groups are a ring. With causal
attention the last positions see most: in contiguous parts the last rank of 4 computes seven times as much as the first,
and all wait for it. In **zigzag** order the sequence has two chunks for each ring member, and member r has chunks r and
2 p - 1 - r: then each computes the same, at every step of the ring (as in Llama 3's context parallelism, and in
zigzag ring attention). Each chunk is cut again among the neighbours that share the heads.

A sequence of T positions has chunk c of n in [T c // n, T (c + 1) // n): so T need not divide, and parts may be empty.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np


class ContextDegrees(NamedTuple):
    """How attention is shared: `ring` groups of `heads` ranks; their product is the ranks of the axis "context"."""

    ring: int
    heads: int

    @property
    def size(self) -> int:
        return self.ring * self.heads


def chunks(member: int, members: int) -> tuple[list[int], int]:
    """Return (the chunks of a ring member, how many chunks there are): zigzag, or all where it is alone."""
    return ([member, 2 * members - 1 - member], 2 * members) if members > 1 else ([0], 1)


@functools.lru_cache(maxsize=256)
def positions(length: int, rank: int, degrees: ContextDegrees) -> np.ndarray:
    """Return the positions that a rank has of a sequence, ascending.

    Examples
    --------
    >>> [positions(8, rank, ContextDegrees(ring=2, heads=1)).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> [positions(8, rank, ContextDegrees(ring=1, heads=2)).tolist() for rank in range(2)]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    member, piece = divmod(rank, degrees.heads)
    mine, count = chunks(member, degrees.ring)
    found = []
    for chunk in mine:
        lo, hi = length * chunk // count, length * (chunk + 1) // count
        found.append(np.arange(lo + (hi - lo) * piece // degrees.heads, lo + (hi - lo) * (piece + 1) // degrees.heads))
    return _fixed(np.concatenate(found))


@functools.lru_cache(maxsize=256)
def member_positions(length: int, member: int, degrees: ContextDegrees) -> np.ndarray:
    """Return the positions that the ranks of a ring member have together, ascending."""
    return _fixed(np.sort(np.concatenate([positions(length, rank, degrees) for rank in _ranks(member, degrees)])))


@functools.lru_cache(maxsize=256)
def member_rows(length: int, member: int, degrees: ContextDegrees) -> tuple[np.ndarray, ...]:
    """Return, for each rank of a ring member, where its positions are in `member_positions`."""
    whole = member_positions(length, member, degrees)
    return tuple(_fixed(np.searchsorted(whole, positions(length, rank, degrees))) for rank in _ranks(member, degrees))


def _ranks(member: int, degrees: ContextDegrees) -> range:
    return range(member * degrees.heads, (member + 1) * degrees.heads)


def _fixed(array: np.ndarray) -> np.ndarray:
    """The array, which all callers get and none may write."""
    array.flags.writeable = False
    return array
