"""The upper tail of the normal distribution, Q(a) = 1 - Phi(a) = erfc(a / sqrt 2) / 2, for arrays: NumPy has no erf.

Q(a) = exp(-a^2/2) M(a), and M falls slowly from 1/2 to 0: in s = (1 - k a) / (1 + k a), which maps [0, inf) to
(-1, 1], a short polynomial is enough. Its coefficients are not a table: they are found here, once, by Chebyshev
interpolation (Shepherd and Laframboise 1981 have the mapping) of values from math.erfc and, where that loses digits,
Laplace's continued fraction. Absolute error below 2e-7 in float32, 5e-16 in float64.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.polynomial import chebyshev

K = 0.3  # where the mapping has its middle: gives the shortest polynomials
DEGREE = {4: 8, 8: 22}  # by bytes of the number format


def upper_tail(a: np.ndarray, tail: np.ndarray, density: np.ndarray, work: np.ndarray) -> None:
    """Write Q(a) into `tail` and exp(-a^2/2) into `density`, for a >= 0; `work` is overwritten. All of one shape."""
    np.multiply(a, K, work)
    np.subtract(1, work, tail)
    work += 1
    np.divide(tail, work, work)  # s
    np.multiply(a, a, density)
    density *= -0.5
    np.exp(density, density)
    first, second, *rest = coefficients(DEGREE[a.itemsize])
    np.multiply(work, first, tail)
    tail += second
    for c in rest:
        tail *= work
        tail += c
    tail *= density


@functools.cache
def coefficients(degree: int) -> tuple[float, ...]:
    """Of the polynomial M(s), highest power first."""
    angles = (2 * np.arange(64) + 1) * math.pi / 128
    nodes = np.cos(angles)
    values = np.array([_ratio((1 - s) / (1 + s) / K) for s in nodes])
    series = [float(values @ np.cos(m * angles)) / (64 if m == 0 else 32) for m in range(degree + 1)]
    return tuple(float(c) for c in chebyshev.cheb2poly(series)[::-1])


def _ratio(a: float) -> float:
    """M(a) = Q(a) exp(a^2/2)."""
    if a < 2:
        return 0.5 * math.erfc(a / math.sqrt(2)) * math.exp(a * a / 2)
    fraction = a
    for n in range(120, 0, -1):
        fraction = a + n / fraction
    return 1 / (fraction * math.sqrt(2 * math.pi))
