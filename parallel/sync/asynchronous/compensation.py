"""Delayed gradients, compensated for what has changed since they were computed.

A gradient g was computed at w_then and comes to a server whose parameters are w by now. To first order the gradient
here is g + H (w - w_then); the Hessian H is approximated by lambda g g^T / sqrt(mean square of g), its diagonal alone:

    MS = m MS + (1 - m) g^2;   g + lambda / sqrt(MS + 1e-7) g^2 (w - w_then);   lambda 2, m 0.95

Cost: six passes over the slice for every update, one buffer for MS, and for every worker what it was sent last.
Source: Zheng et al. 2017 (DC-ASGD-a).
"""

from __future__ import annotations

import numpy as np

EPS = 1e-7


class Compensation:
    """Compensate the delayed gradients of one server's slice.

    Parameters
    ----------
    size, dtype
        Of the slice.
    strength : float
        lambda; 0 leaves gradients as they are.
    memory : float
        m.

    Attributes
    ----------
    mean_square : (size,) array
    """

    def __init__(self, size: int, dtype, strength: float = 2.0, memory: float = 0.95):
        self.strength, self.memory = strength, memory
        self.mean_square, self.work = np.zeros((2, size), dtype)
        self.sent: dict[int, dict[int, np.ndarray]] = {}

    def remember(self, worker: int, version: int, w: np.ndarray) -> None:
        """A worker is sent these parameters."""
        self.sent.setdefault(worker, {})[version] = w.copy()

    def __call__(self, g: np.ndarray, w: np.ndarray, worker: int, version: int) -> None:
        """Change g, which a worker computed at what it was sent as this version; older ones are forgotten."""
        kept = self.sent[worker]
        for older in [v for v in kept if v < version]:
            del kept[older]
        t = self.work
        np.multiply(g, g, out=t)
        self.mean_square *= self.memory
        self.mean_square += (1 - self.memory) * t
        t *= w - kept[version]
        t *= self.strength
        t /= np.sqrt(self.mean_square + EPS)
        g += t
