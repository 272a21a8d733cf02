"""Small numbers packed into words: codes of any base, indices of a sparse vector, several arrays as one message.

A code below `base` takes log2(base) bits where as many digits as fit are put into a 32-bit word: 20 ternary digits,
1.6 bits each; 10 of base 9, 3.2 bits each. Signs are single bits (np.packbits). An index of a sparse vector takes 16
bits, as its place within a block of 65536, or the whole set is a bitmap where that is shorter. All operations are
whole-array ones: cost is a few passes over the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WORD = 1 << 32  # values of a word
BLOCK = 1 << 16  # elements whose places fit 16 bits
EVEN = 8  # a message's length is a multiple of this, so that those of all ranks can lie one behind the other


def digits(base: int) -> int:
    """How many digits of that base fit into a word."""
    count = 0
    while base ** (count + 1) <= WORD:
        count += 1
    return count


def words(count: int, base: int) -> int:
    """How many words `count` codes take."""
    return -(-count // digits(base))


def pack(codes: np.ndarray, base: int) -> np.ndarray:
    """Integers in [0, base) as 32-bit words: (n,) -> (words(n, base),) uint32.

    Digit j of word i is code j * words + i, so that packing and unpacking run along contiguous memory.
    """
    length = words(len(codes), base)
    packed = np.zeros(length, np.uint32)
    for lo in range(0, len(codes), length or 1):
        part = codes[lo : lo + length]
        packed *= base
        packed[: len(part)] += part.astype(np.uint32, copy=False)
    return packed


def unpack(packed: np.ndarray, base: int, count: int) -> np.ndarray:
    """The codes that `pack` packed: (count,) uint32."""
    length = len(packed)
    codes = np.empty((-(-count // length) if length else 0, length), np.uint32)
    rest = packed
    for row in codes[::-1]:
        higher = rest // np.uint32(base)
        np.multiply(higher, np.uint32(base), out=row)
        np.subtract(rest, row, out=row)
        rest = higher
    return codes.reshape(-1)[:count]


def pack_indices(indices: np.ndarray, size: int) -> list[np.ndarray]:
    """Rising indices in [0, size) as the shortest of: nothing where they are all, 16 bits each, a bitmap.

    Which one is decided by their number alone, so the receiver knows.
    """
    form = _form(len(indices), size)
    if form == "all":
        return []
    if form == "places":
        inside = np.searchsorted(indices, np.arange(0, size + BLOCK, BLOCK))
        return [np.diff(inside).astype(np.uint32), indices.astype(np.uint16)]  # the lower 16 bits
    bitmap = np.zeros(size, bool)
    bitmap[indices] = True
    return [np.packbits(bitmap)]


def unpack_indices(fields: np.ndarray, count: int, size: int) -> np.ndarray | slice:
    """Return the index into a vector of `size`, from the bytes of `pack_indices`."""
    form = _form(count, size)
    if form == "all":
        return slice(0, size)
    if form == "places":
        blocks = -(-size // BLOCK)
        inside = fields[: 4 * blocks].view(np.uint32)
        places = fields[4 * blocks : 4 * blocks + 2 * count].view(np.uint16)
        return np.repeat(np.arange(0, size, BLOCK), inside) + places
    return np.flatnonzero(np.unpackbits(fields[: -(-size // 8)], count=size))


def _form(count: int, size: int) -> str:
    if count == size:
        return "all"
    return "places" if 2 * count + 4 * -(-size // BLOCK) <= size // 8 else "bitmap"


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays one behind the other as bytes, those of the largest elements first; a multiple of 8 bytes."""
    size = sum(array.nbytes for array in arrays)
    message = np.zeros(-(-size // EVEN) * EVEN, np.uint8)
    at = 0
    for array in arrays:
        message[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += array.nbytes
    return message


class Reader:
    """Splits a message in the order in which it was concatenated."""

    def __init__(self, message: np.ndarray):
        self.message, self.at = message, 0

    def read(self, count: int, dtype) -> np.ndarray:
        """The next `count` elements."""
        start, self.at = self.at, self.at + count * np.dtype(dtype).itemsize
        return self.message[start : self.at].view(dtype)

    def rest(self) -> np.ndarray:
        return self.message[self.at :]
