"""The normal distribution for arrays: its density phi and distribution function Phi. NumPy has no erf.

For a >= 0, 1 - Phi(a) = phi(a) M(a), and M falls slowly from 1.25 to 0 (Mills 1926): in t = 1 / (1 + k a), which maps
[0, inf) to (0, 1], a short polynomial is enough (Shepherd and Laframboise 1981 have such a mapping). Its coefficients
are not a table: they are found here, once, by least squares at Chebyshev's nodes, each weighted by the phi(a) that M is
multiplied with; values are from math.erfc and, where that loses digits, Laplace's continued fraction. Absolute error of
Phi below 2e-7 in float32, 1e-15 in float64.
"""

from __future__ import annotations

import functools
import math

import numpy as np

FORM = {4: (0.46, 5), 8: (0.36, 16)}  # k and degree by bytes of the number format: the shortest that are good enough


def distribution(x: np.ndarray, below: np.ndarray, density: np.ndarray, work: np.ndarray) -> None:
    """Write Phi(x) into `below` and phi(x) into `density`; `work` is overwritten. Four arrays of one shape."""
    np.multiply(x, x, density)
    density *= -0.5
    np.exp(density, density)
    density *= 1 / math.sqrt(2 * math.pi)
    np.abs(x, work)
    k, degree = FORM[x.itemsize]
    work *= k
    work += 1
    np.divide(1, work, work)  # t
    first, second, *rest = coefficients(k, degree)
    np.multiply(work, first, below)
    below += second
    for c in rest:
        below *= work
        below += c
    below *= density  # 1 - Phi(|x|)
    np.greater(x, 0, work)
    work -= below
    np.abs(work, below)  # below 0 the tail itself, above 0 what it leaves of 1


@functools.cache
def coefficients(k: float, degree: int) -> tuple[float, ...]:
    """Return the coefficients of M as a polynomial in t, highest power first."""
    from numpy.polynomial import chebyshev, polynomial

    nodes = np.cos((2 * np.arange(64) + 1) * math.pi / 128)  # s = 2t - 1
    points = (1 - nodes) / (1 + nodes) / k
    weights = np.exp(-points * points / 2)
    values = np.array([mills_ratio(a) for a in points])
    series = np.linalg.lstsq(chebyshev.chebvander(nodes, degree) * weights[:, None], values * weights)[0]
    in_t = np.zeros(1)
    for c in chebyshev.cheb2poly(series)[::-1]:
        in_t = polynomial.polyadd(polynomial.polymul(in_t, [-1, 2]), [c])
    return tuple(float(c) for c in in_t[::-1])


def mills_ratio(a: float) -> float:
    """M(a) = (1 - Phi(a)) / phi(a)."""
    if a < 2:
        return math.sqrt(math.pi / 2) * math.erfc(a / math.sqrt(2)) * math.exp(a * a / 2)
    fraction = a
    for n in range(120, 0, -1):
        fraction = a + n / fraction
    return 1 / fraction
