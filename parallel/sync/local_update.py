"""The base of local-update strategies: each rank makes steps of its own, and all ranks synchronize now and then.

stale.py                delayed gradients             replicas.py               local SGD, DiLoCo, EASGD
asynchronous/served.py  asynchronous parameter servers, Downpour
strategies/pipeline/weight_stashing.py                PipeDream

Looking never changes training. The state, a digest, an evaluation or a comparison of replicas shows what synchronizing
now would give, until the next step, which continues from what this rank had. Only `settle` (the end of an epoch, a
checkpoint from which a run continues) is a part of training.

Cost of looking: a copy of all that this rank trains with, until the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from nn.optim.optimizers import Optimizer
from parallel.sync.base import GradientSync


class LocalUpdate(GradientSync):
    """Ranks make steps of their own.

    Attributes
    ----------
    settled : bool
        Whether nothing was trained since all ranks synchronized.
    before_looking : list of (array, copy), or None
        While ranks look: the arrays that this rank trains with, and their values.
    looking : bool
        Whether arrays are what synchronizing gives, and not what this rank trains with.
    """

    local_update = True
    settled = True
    before_looking: list[tuple[np.ndarray, np.ndarray]] | None = None
    looking = property(lambda self: self.before_looking is not None)

    def begin_step(self, step, samples, total, parts):
        self.settled, self.total = False, total
        return super().begin_step(step, samples, total, parts)

    def look(self):
        if self.settled or self.looking:
            return False
        self.before_looking = [(array, array.copy()) for array in self.trained()]
        return bool(self.synchronize())

    def resume(self):
        for array, copy in self.before_looking or ():
            array[...] = copy
        self.before_looking = None

    def before_load(self):
        """Nothing: where the other state is refused, training goes on."""

    def forget(self):
        self.before_looking, self.settled, self.bad = None, True, False

    def trained(self) -> Iterator[np.ndarray]:
        """Yield all arrays that this rank's next step depends on, and that `synchronize` changes."""
        yield self.parameters
        yield from self.slots.values()
        yield self.buffers

    def synchronize(self) -> bool | None:
        """Give all ranks the same arrays, whatever their losses were (collective).

        Return whether a loss was not finite, if a rank settles meanwhile.
        """
        raise TypeError(f"{type(self).__name__} does not say how")

    def mean(self, array: np.ndarray) -> None:
        """Take the mean over ranks, in place."""
        self.mesh.sum(array)
        array /= self.mesh.count


@contextmanager
def temporarily(optimizer: Optimizer, **settings: float) -> Iterator[None]:
    """Change settings of an optimizer in this block, to those of the step whose gradients are applied."""
    before = {name: getattr(optimizer, name) for name in settings}
    vars(optimizer).update(settings)
    try:
        yield
    finally:
        vars(optimizer).update(before)
