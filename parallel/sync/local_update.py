"""The base of local-update strategies: each rank makes steps of its own, and all ranks synchronize now and then.

stale.py                delayed gradients             replicas.py               local SGD, DiLoCo, EASGD
asynchronous/served.py  asynchronous parameter servers, Downpour
strategies/pipeline/weight_stashing.py                PipeDream

Looking never changes training. The state, a digest, an evaluation or a comparison of replicas shows what synchronizing
now would give, until the next step, which continues from what this rank had. Only `synchronize` (the end of an epoch, a
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
    synchronized : bool
        Whether nothing was trained since all ranks synchronized.
    before_showing : list of (array, copy), or None
        While ranks look: the arrays that this rank trains with, and their values.
    showing : bool
        Whether arrays are what synchronizing gives, and not what this rank trains with.
    """

    local_update = True
    synchronized = True
    before_showing: list[tuple[np.ndarray, np.ndarray]] | None = None
    showing = property(lambda self: self.before_showing is not None)

    def begin_step(self, step, samples, total, parts):
        self.synchronized, self.total = False, total
        return super().begin_step(step, samples, total, parts)

    def show_synchronized(self):
        if self.synchronized or self.showing:
            return False
        self.before_showing = [(array, array.copy()) for array in self.trained()]
        return bool(self.write_synchronized())

    def resume(self):
        for array, copy in self.before_showing or ():
            array[...] = copy
        self.before_showing = None

    def before_load(self):
        """Nothing: where the other state is refused, training goes on."""

    def reset(self):
        self.before_showing, self.synchronized, self.bad = None, True, False

    def trained(self) -> Iterator[np.ndarray]:
        """Yield all arrays that this rank's next step depends on, and that `write_synchronized` changes."""
        yield self.parameters
        yield from self.slots.values()
        yield self.buffers

    def write_synchronized(self) -> bool | None:
        """Give all ranks the same arrays, whatever their losses were (collective).

        Return whether a loss was not finite, if other ranks synchronize meanwhile.
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
