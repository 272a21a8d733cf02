"""The undo log: what an update overwrites in memory that ranks share, kept until the update is complete.

Ranks update parameters in place, block by block, and one may be killed at any moment of that: then some blocks are new,
one is half written, and the rest are old. So who is about to change a block copies it first, and then marks the copy
with the number of the change: a copy with a mark is complete, and a block without one is as it was. The memory outlives
whoever is killed, so all that live can put together what was there before.

Cost: a copy of what is updated, in a step and in memory, where ranks are to survive; the blocks are in cache already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from collectives.node_memory.window import SharedWindow


class UndoLog:
    """Copies of the arrays that the ranks of a node have together.

    Parameters
    ----------
    window : SharedWindow
    arrays : name -> flat array of `window.empty_common`
        All of one length.
    blocks : int
        Into how many an update cuts them at most.
    """

    def __init__(self, window: SharedWindow, arrays: Mapping[str, np.ndarray], blocks: int):
        self.fence, self.arrays = window.flags.fence, dict(arrays)
        self.copies = {name: window.empty_common(array.shape, array.dtype) for name, array in arrays.items()}
        self.marks = window.empty_common(blocks, np.int64)  # the change before which each block was copied last

    def keep(self, block: int, place: slice, change: int) -> None:
        """Copy a block of all arrays, which this rank is about to change."""
        for name, array in self.arrays.items():
            self.copies[name][place] = array[place]
        self.fence()
        self.marks[block] = change
        self.fence()

    def before(self, change: int, places: Iterable[slice]) -> dict[str, np.ndarray]:
        """Return copies of all arrays as they were before a change of these blocks."""
        found = {name: array.copy() for name, array in self.arrays.items()}
        for block, place in enumerate(places):
            if self.marks[block] == change:
                for name, array in found.items():
                    array[place] = self.copies[name][place]
        return found
