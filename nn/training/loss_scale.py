"""The dynamic loss scale of mixed precision: as large as float16 gradients of activations allow.

It starts at 65536. A step in which a value overflows float16 makes no update, is counted, and halves the scale; 2000
steps without overflow double it. The state is one small array, part of every checkpoint. Source: Micikevicius et al.
2018; the constants are those of PyTorch's GradScaler.
"""

from __future__ import annotations

import numpy as np

INITIAL, SMALLEST, LARGEST = 2.0**16, 1.0, 2.0**24
GROWTH = 2000  # steps


class LossScale:
    """The scale, changed after every step.

    Parameters
    ----------
    growth : int
        Steps without overflow after which the scale doubles.

    Attributes
    ----------
    array : (3,) float64
        The scale, the steps since it last changed, and the number of skipped steps.
    """

    def __init__(self, growth: int = GROWTH):
        self.growth, self.array = growth, np.array([INITIAL, 0, 0])

    @property
    def scale(self) -> float:
        """The factor by which gradients of activations are multiplied."""
        return float(self.array[0])

    @property
    def skipped(self) -> int:
        """The number of steps without an update."""
        return int(self.array[2])

    def count_update(self) -> None:
        """Count a step without overflow; double the scale where it is time."""
        self.array[1] += 1
        if self.array[1] >= self.growth:
            self.array[:2] = min(LARGEST, 2 * self.scale), 0

    def count_overflow(self, step: int) -> None:
        """Count a step that made no update; halve the scale.

        Raises
        ------
        FloatingPointError
            The scale is 1 already: the loss scale is not the cause.
        """
        if self.scale <= SMALLEST:
            raise FloatingPointError(
                f"step {step}: an activation, or the gradient of one, is beyond float16's 65504 although the loss "
                "scale is 1. The parameters were not updated. A lower learning rate, clipping, normalisation or "
                "float32 may help."
            )
        self.array[:] = self.scale / 2, 0, self.skipped + 1
