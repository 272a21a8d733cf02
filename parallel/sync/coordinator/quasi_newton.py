"""The optimizer of Sandblaster: the settings of L-BFGS, and the vectors that last from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nn.optim.lbfgs import LBFGS, Vectors
from nn.optim.optimizers import Optimizer


@dataclass(eq=False, repr=False)
class QuasiNewton(Optimizer):
    """L-BFGS where a trainer expects an optimizer: its settings, and the vectors that last from step to step.

    A step is a direction and a search along it: several evaluations of the batch. `Sandblaster` makes it, on one
    process too.

    Parameters
    ----------
    lr : float
        Where a line search begins, in units of the direction; 1 but for special cases.
    history, tolerance, c1, c2, max_evaluations
        As for LBFGS.

    Raises
    ------
    ValueError
        Clipping or weight decay, with which the gradient would not be that of the loss that is searched.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> optimizer = parallel.QuasiNewton(history=5)
    >>> optimizer.history
    5
    """

    lr: float = 1.0
    history: int = 10
    tolerance: float = 1e-6
    c1: float = 1e-4
    c2: float = 0.9
    max_evaluations: int = 25

    searches = True

    def check_arguments(self):
        if self.clip or self.weight_decay or self.rates or self.frozen:
            raise ValueError(
                "QuasiNewton: a line search needs the gradient of the loss that it searches: leave out clip, "
                "weight_decay and rates, and freeze nothing"
            )
        self.algorithm(Vectors(np.zeros(1), np.zeros(1)), float)  # refuses settings that make no sense

    @property
    def slots(self):
        pairs = range(self.history)
        return ("g", *(f"s{i}" for i in pairs), *(f"y{i}" for i in pairs))

    def algorithm(self, vectors, evaluate: Callable[[], float]) -> LBFGS:
        """L-BFGS with these settings."""
        return LBFGS(
            vectors, evaluate, self.history, self.tolerance, self.c1, self.c2, self.max_evaluations, self.lr
        )  # fmt: skip

    def apply(self, w, g, slots, step, region, sum_over_slices=None):
        raise TypeError("QuasiNewton: L-BFGS evaluates a batch several times in a step: use Sandblaster")
