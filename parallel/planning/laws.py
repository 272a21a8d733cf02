"""How much faster many ranks are: the laws, and their one number fitted to measured runs.

p ranks, S the speedup, f the fraction of the work that can be done in parallel, e = 1 - f the serial fraction.

| law | says | keeps | source |
|---|---|---|---|
| Amdahl | S = 1 / ((1 - f) + f / p), below 1 / (1 - f) for any p | the work | Amdahl 1967 |
| Gustafson | S = p - (1 - f) (p - 1) | the time: work grows with p | Gustafson 1988 |
| Karp-Flatt | e = (1/S - 1/p) / (1 - 1/p), read off a run | | Karp, Flatt 1990 |

A Karp-Flatt fraction that grows with p is a sign of overhead (messages, waiting); one that stays, of serial work.

    law = fit_amdahl([(1, 10.0), (2, 5.6), (4, 3.4)])     # (ranks, seconds of the same work)
    law.serial, law.seconds(64)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


def amdahl(ranks: float, parallel: float) -> float:
    """Return the speedup of the same work, of which the fraction `parallel` can be done in parallel."""
    _share(parallel)
    return 1 / ((1 - parallel) + parallel / _ranks(ranks))


def gustafson(ranks: float, parallel: float) -> float:
    """Return how much more work the ranks do in the same time, each a fraction `parallel` of it in parallel."""
    _share(parallel)
    return _ranks(ranks) - (1 - parallel) * (ranks - 1)


def karp_flatt(speedup: float, ranks: float) -> float:
    """Return the serial fraction that explains a measured speedup; negative where p ranks are more than p times faster.

    Raises
    ------
    ValueError
        one rank only; a speedup that is not above 0
    """
    if _ranks(ranks) == 1:
        raise ValueError("Karp-Flatt: one rank says nothing of a serial share: measure two or more")
    if not (speedup > 0 and math.isfinite(speedup)):
        raise ValueError(f"Karp-Flatt: expected a speedup above 0, given {speedup}")
    return (1 / speedup - 1 / ranks) / (1 - 1 / ranks)


def strong_efficiency(one: float, many: float, ranks: float) -> float:
    """Return T(1) / (p T(p)), from seconds of the same work on one rank and on p."""
    return one / (_ranks(ranks) * many)


def weak_efficiency(one: float, many: float) -> float:
    """Return T(1) / T(p), from seconds of one rank's work on one rank and of p times as much work on p."""
    return one / many


def bandwidth_to_hide(nbytes: float, ranks: float, seconds: float) -> float:
    """Return the bandwidth at which a ring allreduce of `nbytes` takes as long as the backprop that hides it."""
    if seconds <= 0:
        raise ValueError(f"expected seconds above 0, given {seconds}")
    return 2 * (_ranks(ranks) - 1) / ranks * nbytes / seconds


@dataclass(frozen=True)
class Law:
    """A law fitted to measured runs.

    Attributes
    ----------
    name : "Amdahl" or "Gustafson"
    serial : float
        1 - f, at least 0 and at most 1
    one : float
        seconds on one rank
    error : float
        root mean square of the relative error of the seconds
    """

    name: str
    serial: float
    one: float
    error: float

    def speedup(self, ranks: float) -> float:
        """Return the speedup of the same work (Amdahl), or of work that grows with the ranks (Gustafson)."""
        return (amdahl if self.name == "Amdahl" else gustafson)(ranks, 1 - self.serial)

    def seconds(self, ranks: float) -> float:
        """Return seconds of the work on `ranks` ranks: the same work for Amdahl, p times as much for Gustafson."""
        scaled = ranks if self.name == "Gustafson" else 1
        return self.one * scaled / self.speedup(ranks)

    def __str__(self):
        most = f", never faster than {1 / self.serial:.3g} times" if self.name == "Amdahl" and self.serial > 0 else ""
        return f"{self.name}: serial share {self.serial:.2%}{most} (off by {self.error:.1%})"


def fit_amdahl(runs: Iterable[tuple[float, float]]) -> Law:
    """Fit the serial fraction to measured (ranks, seconds) of the same work.

    T(p) = a + b / p, by least squares of the relative error, so that the long runs on few ranks do not dominate.

    Raises
    ------
    ValueError
        fewer than two numbers of ranks; seconds that are not above 0
    """
    runs = _checked(runs)
    a, b = _least_squares([(1 / seconds, 1 / (ranks * seconds)) for ranks, seconds in runs])
    return _law("Amdahl", a, b, runs, lambda a, b, p: a + b / p)


def fit_gustafson(runs: Iterable[tuple[float, float]]) -> Law:
    """Fit the serial fraction to measured (ranks, seconds) of work that grows with the ranks.

    With a serial fraction e, p ranks do (1 - e) p + e times one rank's work in the same time: T(p) = T1 p / (p - e (p -
    1)). So 1/T is linear in 1/p, and fitted by least squares of the relative error.
    """
    runs = _checked(runs)
    a, b = _least_squares([(seconds, seconds / ranks) for ranks, seconds in runs])  # 1/T = a + b/p; e = b / (a + b)
    if min(a, b) < 0:  # the best of those that are possible
        times = [(ranks if a < 0 else 1.0) / seconds for ranks, seconds in runs]
        rate = sum(each**2 for each in times) / sum(times)
        a, b = (0.0, rate) if a < 0 else (rate, 0.0)
    serial = b / (a + b)
    found = Law("Gustafson", serial, 1 / (a + b), 0.0)
    return Law("Gustafson", serial, found.one, _error(runs, found.seconds))


def serial_shares(runs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (ranks, serial fraction by Karp-Flatt) for measured (ranks, seconds) of the same work.

    Raises
    ------
    ValueError
        no run on one rank to compare with
    """
    runs = _checked(runs)
    one = [seconds for ranks, seconds in runs if ranks == 1]
    if not one:
        raise ValueError("Karp-Flatt compares with one rank: measure that too")
    return [(ranks, karp_flatt(one[0] / seconds, ranks)) for ranks, seconds in runs if ranks > 1]


def _law(name: str, a: float, b: float, runs, form: Callable[[float, float, float], float]) -> Law:
    """Make the law of `a` serial and `b` parallel seconds; a negative one is set to 0 and the other fitted again."""
    if a < 0:
        a, b = 0.0, _least_squares([(0.0, form(0.0, 1.0, p) / t) for p, t in runs])[1]
    if b < 0:
        a, b = _least_squares([(1 / t, 0.0) for _, t in runs])[0], 0.0
    return Law(name, a / (a + b), a + b, _error(runs, lambda p: form(a, b, p)))


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return x, y that minimize the sum of (u x + v y - 1)^2; a column of zeros gets 0."""
    uu, vv = sum(u * u for u, _ in rows), sum(v * v for _, v in rows)
    uv, u1, v1 = sum(u * v for u, v in rows), sum(u for u, _ in rows), sum(v for _, v in rows)
    if not vv:
        return u1 / uu, 0.0
    if not uu:
        return 0.0, v1 / vv
    whole = uu * vv - uv * uv
    return (u1 * vv - v1 * uv) / whole, (v1 * uu - u1 * uv) / whole


def _error(runs, seconds: Callable[[float], float]) -> float:
    return math.sqrt(sum((seconds(p) / t - 1) ** 2 for p, t in runs) / len(runs))


def _checked(runs) -> list[tuple[float, float]]:
    runs = sorted((_ranks(ranks), seconds) for ranks, seconds in runs)
    if len({ranks for ranks, _ in runs}) < 2:
        raise ValueError(f"a law is fitted to two numbers of ranks at least, given {[ranks for ranks, _ in runs]}")
    for ranks, seconds in runs:
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"seconds on {ranks} ranks: expected a number above 0, given {seconds}")
    return runs


def _ranks(ranks: float) -> float:
    if not ranks >= 1:
        raise ValueError(f"ranks: expected at least 1, given {ranks}")
    return ranks


def _share(parallel: float) -> None:
    if not 0 <= parallel <= 1:
        raise ValueError(f"the parallel share: expected 0 to 1, given {parallel}")
