"""Memory for activations and workspaces that a training step takes again and again.

Large arrays from the operating system arrive unmapped: touching them the first time costs more than the arithmetic
of most layers. So a step's arrays come from here. `empty` hands out an array and looks for one to use again by its
reference count: an array that only this pool refers to is free. No one has to give anything back, and nothing
can be given back too early.
"""

import math
import sys

import numpy as np


class Memory:
    """A pool of result arrays and named workspaces, for one thread."""

    def __init__(self):
        self._results: dict[int, list[Block]] = {}  # bytes -> blocks of that many bytes
        self._workspaces: dict[str, Block] = {}
        self._views: dict[tuple, np.ndarray] = {}
        self._ones: dict[tuple, np.ndarray] = {}

    def empty(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """An uninitialised array that nobody else refers to. Small ones come straight from NumPy."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return np.empty(shape, dtype)
        blocks = self._results.get(nbytes)
        if blocks is None:
            blocks = self._results[nbytes] = []
        i = _first_free(blocks)
        if i < 0:
            blocks.append(_block(nbytes))
        return np.ndarray(shape, dtype, *blocks[i])

    def scratch(self, name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        """The workspace `name`, as an array of that shape; contents are whatever the last user left."""
        key = (name, shape, dtype)
        view = self._views.get(key)
        if view is None:
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            if name not in self._workspaces or self._workspaces[name][0].nbytes < nbytes + ALIGN:
                self._workspaces[name] = _block(nbytes)
                self._views = {k: v for k, v in self._views.items() if k[0] != name}
            view = self._views[key] = np.ndarray(shape, dtype, *self._workspaces[name])
        return view

    def ones(self, n: int, dtype) -> np.ndarray:
        """A vector of n ones; not to be written."""
        ones = self._ones.get((n, dtype))
        if ones is None:
            ones = self._ones[n, dtype] = np.ones(n, dtype)
            ones.flags.writeable = False
        return ones

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        blocks = [block for same in self._results.values() for block in same]
        return sum(raw.nbytes for raw, _ in blocks + list(self._workspaces.values()))

    def clear(self) -> None:
        """Forget everything; arrays still in use live on with their users."""
        self.__init__()


SMALL = 4096  # bytes: below, malloc serves from its own lists faster than we can
ALIGN = 64  # bytes: a cache line


Block = tuple[np.ndarray, int]  # bytes that own their memory, and where in them a cache line starts


def _block(nbytes: int) -> Block:
    raw = np.empty(nbytes + ALIGN, np.uint8)
    return raw, -raw.ctypes.data % ALIGN


def _first_free(blocks: list[Block]) -> int:
    """Index of a block that only the list refers to, or -1.

    NumPy's views refer to the array that owns the memory, however many views lie between, so its count tells.
    """
    for i in range(len(blocks)):
        if sys.getrefcount(blocks[i][0]) <= _UNUSED:
            return i
    return -1


def _calibrate() -> int:
    """The reference count that `_first_free` sees of a block in a list and nowhere else."""
    probe = [_block(1)]
    for i in range(1):
        count = sys.getrefcount(probe[i][0])
    return count


_UNUSED = _calibrate()
