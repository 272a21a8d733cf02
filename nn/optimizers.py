"""Optimizers: updates in place on flat buffers.

An optimizer holds hyper-parameters; its moments live in `slots`, flat buffers with the layout of the parameters, so that
a shard of an optimizer is the same code on a slice.
"""

from __future__ import annotations

import numpy as np

from nn.layout import Region

BLOCK = 1 << 15  # elements updated at a time, so that a block's operands stay in the cache


class Optimizer:
    """Base: a learning rate, named slots, and an update.

    Attributes
    ----------
    lr : float
        May be changed between steps, by a schedule.
    slots : tuple of str
        Names of the flat buffers that `update` needs besides parameters and gradients; they start at zero.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, lr: float):
        if not lr >= 0:
            raise ValueError(f"{type(self).__name__}: the learning rate must not be negative, given {lr}")
        self.lr = lr

    def update(
        self, w: np.ndarray, g: np.ndarray, slots: dict[str, np.ndarray], step: int, region: Region
    ) -> None:
        """w moves along -g. All arrays are flat and cover `region` of the layout; g may be overwritten."""
        raise TypeError(f"{type(self).__name__} does not define update")


class SGD(Optimizer):
    """Stochastic gradient descent: v = momentum v + (g + weight_decay w); w -= lr v.

    Parameters
    ----------
    lr : float
    momentum : float
        0 for plain descent, which then needs no buffer.
    weight_decay : float
        L2 coefficient; biases and normalisation are exempt (`Spec.decay`).
    """

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        super().__init__(lr)
        if not 0 <= momentum < 1:
            raise ValueError(f"SGD: momentum must be in [0, 1), given {momentum}")
        self.momentum, self.weight_decay = momentum, weight_decay
        self.slots = ("velocity",) if momentum else ()

    def __repr__(self):
        return f"SGD(lr={self.lr}, momentum={self.momentum}, weight_decay={self.weight_decay})"

    def update(self, w, g, slots, step, region):
        if self.weight_decay:
            for part in region.decayed:
                g[part] += self.weight_decay * w[part]
        if self.momentum:
            v = slots["velocity"]
            for lo in range(0, len(w), BLOCK):
                block = v[lo : lo + BLOCK]
                block *= self.momentum
                block += g[lo : lo + BLOCK]
            g = v
        for lo in range(0, len(w), BLOCK):
            w[lo : lo + BLOCK] -= self.lr * g[lo : lo + BLOCK]
