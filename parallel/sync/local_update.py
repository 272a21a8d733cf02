"""What strategies of local updates have in common: ranks train apart, and all become one only where they synchronize.

Looking never changes training. Whoever asks for the state, a digest, an evaluation or a comparison of replicas sees
what synchronizing now would give, until the next step, which goes on from what this rank had. Only `settle` (the end
of an epoch, a checkpoint that a run continues from) is a part of training.

Cost of looking: a copy of all that this rank trains with, until the next step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parallel.sync.base import GradientSync


class LocalUpdate(GradientSync):
    """Ranks make steps of their own.

    Attributes
    ----------
    settled : bool
        Whether nothing was trained since all ranks became one.
    own : list of (array, copy), or None
        While ranks look: what this one trains with, and its values.
    """

    apart = True
    settled = True
    own: list[tuple[np.ndarray, np.ndarray]] | None = None

    def begin_step(self, step, samples, total, parts):
        self.settled, self.total = False, total
        return super().begin_step(step, samples, total, parts)

    def look(self):
        if self.settled or self.own is not None:
            return False
        self.own = [(array, array.copy()) for array in self.trained()]
        self.synchronize()
        return False

    def resume(self):
        for array, copy in self.own or ():
            array[...] = copy
        self.own = None

    def before_load(self):
        """Nothing: where the other state is refused, training goes on."""

    def forget(self):
        self.own, self.settled, self.bad = None, True, False

    def trained(self) -> Iterator[np.ndarray]:
        """All arrays that this rank's next step depends on."""
        yield self.parameters
        yield from self.slots.values()
        yield self.buffers

    def synchronize(self) -> None:
        """Make all ranks one, whatever their losses were (collective)."""
        raise TypeError(f"{type(self).__name__} does not say how")

    def mean(self, array: np.ndarray) -> None:
        """Take the mean over ranks, in place."""
        self.mesh.sum(array)
        array /= self.mesh.count
