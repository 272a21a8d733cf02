"""Memory for activations and workspaces that a training step takes again and again.

Large arrays from the operating system arrive unmapped: touching them the first time costs more than the arithmetic
of most layers. So a step's arrays come from here. `empty` hands out an array and looks for one to use again by its
reference count: an array that only this pool refers to is free. No one has to give anything back, and nothing
can be given back too early.

Blocks are powers of two in size, so that batches of many sizes share them (as in Knowlton's buddy system, CACM 1965):
the pool holds the largest number that was in use at once of each size. The end of a block that no array has reached is
never touched: it costs address space, but no memory.

Blocks of up to two megabytes are parts of larger slabs, as Linux maps huge pages (2 MiB) only where an array asks for
them, and NumPy does so from 4 MiB on: with small pages the processor would often wait for a page's address. As a huge
page is touched as a whole, blocks that are not nearly full stay alone.
"""

import math
import sys
from collections.abc import Iterator

import numpy as np


class MemoryPool:
    """A pool of result arrays and named workspaces, for one thread.

    Examples
    --------
    >>> import nn
    >>> pool = nn.MemoryPool()
    >>> pool.empty((2, 3), "f4").shape
    (2, 3)
    """

    def __init__(self):
        self._results: dict[int, list[Block]] = {}  # k -> blocks of 2^k bytes; at the end, that taken last
        self._workspaces: dict[str, Block] = {}
        self._ones: dict[np.dtype, np.ndarray] = {}
        self._views: dict[tuple, np.ndarray] = {}  # of workspaces and of ones
        self._slab = memoryview(b"")  # the part of the newest slab that no block has

    def empty(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Return an uninitialised array without other references. Small ones come straight from NumPy."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return np.empty(shape, dtype)
        blocks = self._same_size(nbytes)
        blocks.append(_take(blocks) or self._new_block(nbytes))
        return np.ndarray(shape, dtype, *blocks[-1])

    def workspace(self, name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Return the workspace `name` as an array of that shape, with what its last user wrote."""
        key = (name, shape, dtype)
        view = self._views.get(key)
        if view is None:
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            block = self._workspaces.get(name)
            if block is None or block[0].nbytes < nbytes + ALIGN:
                if block is not None:
                    self._same_size(block[0].nbytes - ALIGN).append(block)
                self._workspaces[name] = _take(self._same_size(nbytes)) or self._new_block(nbytes)
                self._views = {k: v for k, v in self._views.items() if k[0] != name}
            view = self._keep(key, np.ndarray(shape, dtype, *self._workspaces[name]))
        return view

    def ones(self, n: int, dtype) -> np.ndarray:
        """Return a vector of n ones; not to be written."""
        view = self._views.get((n, dtype))
        if view is None:
            if dtype not in self._ones or len(self._ones[dtype]) < n:
                self._ones[dtype] = np.ones(1 << (n - 1).bit_length(), dtype)  # views of shorter ones live on
                self._ones[dtype].flags.writeable = False
            view = self._keep((n, dtype), self._ones[dtype][:n])
        return view

    def _same_size(self, nbytes: int) -> list["Block"]:
        """Return the list of blocks of the smallest power of two that holds `nbytes`."""
        return self._results.setdefault((nbytes - 1).bit_length(), [])

    def _new_block(self, nbytes: int) -> "Block":
        """Return a block for `nbytes`: part of a slab if these nearly fill it and it has LEAST to SLAB / 3 bytes.

        A memoryview between slab and block makes the block the owner that views refer to: see `_find_free`.
        """
        size = (1 << (nbytes - 1).bit_length()) + ALIGN
        if not LEAST <= size <= SLAB // 3 or nbytes < FULL * size:
            return _aligned(np.empty(size, np.uint8))
        if len(self._slab) < size:
            self._slab = memoryview(np.empty(SLAB, np.uint8))
        memory, self._slab = self._slab[:size], self._slab[size:]
        return _aligned(np.frombuffer(memory, np.uint8))

    def _keep(self, key: tuple, view: np.ndarray) -> np.ndarray:
        if len(self._views) == VIEWS:
            self._views.clear()
        self._views[key] = view
        return view

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        blocks = [block for same in (*self._results.values(), self._workspaces.values()) for block in same]
        return sum(raw.nbytes for raw, _ in blocks) + sum(ones.nbytes for ones in self._ones.values())

    def workspaces(self) -> Iterator[np.ndarray]:
        """Yield the memory of all workspaces."""
        yield from (raw for raw, _ in self._workspaces.values())

    def clear(self) -> None:
        """Drop all memory; arrays in use stay valid."""
        self.__init__()


SMALL = 4096  # bytes: below, malloc serves from its own lists faster than we can
ALIGN = 64  # bytes: a cache line
LEAST, SLAB = 1 << 17, 1 << 23  # bytes
FULL = 0.9  # least part of a block that is used: a huge page has memory for the rest, too
VIEWS = 1000  # kept; more than that are of shapes that come once


Block = tuple[np.ndarray, int]  # bytes that own their memory, and where in them a cache line starts


def _aligned(raw: np.ndarray) -> Block:
    return raw, -raw.ctypes.data % ALIGN


def _take(blocks: list[Block]) -> Block | None:
    """Remove a block that only the list refers to, and return it; None if there is none."""
    i = _find_free(blocks)
    return None if i is None else blocks.pop(i)


def _find_free(blocks: list[Block]) -> int | None:
    """Index, from the end or from the start, of a block that only the list refers to; None if there is none.

    Searched from both ends inwards: in forward passes the block taken longest ago is free, in backward passes one taken
    just now is (and is still in the cache). However many micro-batches are in flight, few blocks are looked at.

    NumPy's views refer to the array that owns the memory, however many views lie between, so its reference count
    includes them.
    """
    for i in range((len(blocks) + 1) // 2):
        if sys.getrefcount(blocks[~i][0]) <= _UNUSED:
            return ~i
        if sys.getrefcount(blocks[i][0]) <= _UNUSED:
            return i
    return None


def _calibrate() -> int:
    """The reference count that `_find_free` sees of a block in a list and nowhere else."""
    probe = [_aligned(np.empty(1, np.uint8))]
    for i in range(1):
        count = sys.getrefcount(probe[i][0])
    return count


_UNUSED = _calibrate()
