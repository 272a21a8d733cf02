"""The dynamic loss scale of mixed precision: as large as gradients of activations can bear in float16.

It starts at 65536. A step in which a number was too large for float16 makes no update, is counted, and halves the
scale; so many steps without one double it. All of it is one small array, part of every checkpoint. Source:
Micikevicius et al. 2018; the constants are those of PyTorch's GradScaler.
"""

from __future__ import annotations

import numpy as np

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH = 2000  # steps


class LossScale:
    """The scale, and when it changes.

    Parameters
    ----------
    growth : int
        Steps without an overflow after which it doubles.

    Attributes
    ----------
    array : (3,) float64
        The scale, the steps since it changed or a step was skipped, and the steps that were skipped.
    """

    def __init__(self, growth: int = GROWTH):
        self.growth, self.array = growth, np.array([FIRST, 0, 0])

    @property
    def scale(self) -> float:
        """What gradients of activations are multiplied by."""
        return float(self.array[0])

    @property
    def skipped(self) -> int:
        """Steps that made no update."""
        return int(self.array[2])

    def went_well(self) -> None:
        """A step was made."""
        self.array[1] += 1
        if self.array[1] >= self.growth:
            self.array[:2] = min(MOST, 2 * self.scale), 0

    def skip(self, step: int) -> None:
        """A step was skipped.

        Raises
        ------
        FloatingPointError
            The scale is as low as it gets: it is not the scale.
        """
        if self.scale <= LEAST:
            raise FloatingPointError(
                f"step {step}: an activation, or the gradient of one, is beyond float16's 65504 although the loss "
                "scale is 1. The parameters were not updated. A lower learning rate, clipping, normalisation or "
                "float32 may help."
            )
        self.array[:] = self.scale / 2, 0, self.skipped + 1
