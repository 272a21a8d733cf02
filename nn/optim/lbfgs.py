"""L-BFGS: full-batch minimisation with the curvature of the last few steps, and a strong Wolfe line search.

    trainer = Trainer(network, loss, SGD(0.1))        # owns the buffers; its optimizer is not used
    lbfgs = LBFGS(Vectors(trainer.flat_parameters, trainer.gradients), lambda: trainer.compute_gradients(x, y, len(x)))
    lbfgs.minimize(iterations=100)

The algorithm itself holds no array: it names vectors ("w", "g", "d", "s3", ...) and asks for dot products, scaled sums
and copies. `Vectors` does them with flat arrays; iterates are the same wherever they are done (parallel.Sandblaster).

Sources: Nocedal 1980 and Liu and Nocedal 1989 (two-loop recursion); Nocedal and Wright 2006, algorithms 3.5, 3.6, 7.4.
Cost of an iteration, n parameters, m pairs: 4 m n multiply-adds, 1 to 3 evaluations as a rule. Memory: (2 m + 3) n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from nn.arguments import NOT_NEGATIVE, SIZE, Number
from nn.optim.clipping import BLOCK_BYTES


class Vectors:
    """Flat arrays by name, and the four things that L-BFGS does with them.

    Parameters
    ----------
    w, g : flat arrays
        Parameters and gradients; "w" is written, "g" read and put back where a search fails.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> nn.Vectors(np.array([3.0, 4.0]), np.zeros(2)).dot("w", "w")
    25.0
    """

    def __init__(self, w: np.ndarray, g: np.ndarray):
        if w.shape != g.shape or w.dtype != g.dtype or w.ndim != 1:
            raise ValueError(
                f"Vectors: w and g must be flat and alike, given {w.dtype}{w.shape} and {g.dtype}{g.shape}"
            )
        self.arrays = {"w": w, "g": g}

    def dot(self, a: str, b: str) -> float:
        """a . b, blocks summed in double precision."""
        x, y = self.arrays[a], self.arrays[b]
        block = BLOCK_BYTES // x.itemsize
        return math.fsum(float(x[lo : lo + block] @ y[lo : lo + block]) for lo in range(0, len(x), block))

    def copy(self, to: str, source: str) -> None:
        """to = source; made where there is none yet."""
        if to not in self.arrays:
            self.arrays[to] = np.empty_like(self.arrays[source])
        self.arrays[to][:] = self.arrays[source]

    def scale(self, a: str, factor: float) -> None:
        """a *= factor."""
        self.arrays[a] *= factor

    def axpy(self, to: str, factor: float, x: str) -> None:
        """to += factor x, without a temporary of full size."""
        target, source = self.arrays[to], self.arrays[x]
        block = BLOCK_BYTES // target.itemsize
        for lo in range(0, len(target), block):
            part = target[lo : lo + block]
            part += factor * source[lo : lo + block]


@dataclass(frozen=True)
class Point:
    """A point of the search line: its distance from the start, the loss there, and its slope along the line."""

    step: float
    loss: float
    slope: float


class LBFGS:
    """Minimise the loss that `evaluate` computes, as a function of vector "w".

    Parameters
    ----------
    vectors : Vectors
        With "w" at the start.
    evaluate : callable () -> float
        The full-batch loss at "w", its gradient into "g". Must be the same function every time: no dropout.
    history : int
        Pairs of steps and gradient changes that are kept.
    tolerance : float
        The minimum is found when |g| <= tolerance max(1, |w|).
    c1, c2 : float
        Strong Wolfe conditions: loss(a) <= loss(0) + c1 a slope(0), |slope(a)| <= c2 |slope(0)|.
    max_evaluations : int
        The most evaluations in one line search.
    lr : float
        Where a line search begins, in units of the direction; 1 but for special cases.

    Attributes
    ----------
    loss : float
        At "w"; NaN before the first step, and where "w" or the function was changed from outside.
    start : float
        At "w" before the last step.
    iterations, evaluations : int
    done : str
        Why there is nothing more to do; "" while there is.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> w, g = np.array([3.0, -2.0]), np.zeros(2)
    >>> def evaluate():  # the loss at w, its gradient into g
    ...     g[:] = 2 * w
    ...     return float(w @ w)
    >>> nn.LBFGS(nn.Vectors(w, g), evaluate).minimize(5) < 1e-12
    True
    """

    def __init__(
        self,
        vectors: Vectors,
        evaluate: Callable[[], float],
        history: int = 10,
        tolerance: float = 1e-6,
        c1: float = 1e-4,
        c2: float = 0.9,
        max_evaluations: int = 25,
        lr: float = 1.0,
    ):
        for name, value in (("history", history), ("max_evaluations", max_evaluations)):
            SIZE(f"LBFGS: {name}", value)
        NOT_NEGATIVE("LBFGS: tolerance", tolerance)
        Number(above=0, below=math.inf)("LBFGS: lr", lr)
        if not 0 < c1 < c2 < 1:
            raise ValueError(f"LBFGS: expected 0 < c1 < c2 < 1, given c1={c1}, c2={c2}")
        self.vectors, self.evaluate, self.history, self.tolerance = vectors, evaluate, history, tolerance
        self.c1, self.c2, self.max_evaluations, self.lr = c1, c2, max_evaluations, lr
        self.loss = self.start = math.nan
        self.iterations, self.evaluations, self.done = 0, 0, ""
        self._pairs: list[tuple[str, str, float]] = []  # names of s and y, and 1 / s.y; oldest first

    def minimize(self, iterations: int) -> float:
        """Make at most that many steps; return the loss. `done` says why it stopped early."""
        for _ in range(iterations):
            self.step()
            if self.done:
                break
        return self.loss

    def step(self) -> float:
        """Make one iteration: a direction, a line search along it, a new pair. Return the loss at the new "w".

        Raises
        ------
        FloatingPointError
            If the loss at the starting point is NaN or infinite.
        """
        v, self.done = self.vectors, ""
        if math.isnan(self.loss):
            self.loss = self._evaluate()
            if not math.isfinite(self.loss):
                raise FloatingPointError(f"LBFGS: the loss at the starting point is {self.loss}")
        self.start = self.loss
        g_norm = math.sqrt(v.dot("g", "g"))
        if g_norm <= self.tolerance * max(1.0, math.sqrt(v.dot("w", "w"))):
            self.done = f"the gradient's norm is {g_norm:.3g}: a minimum"
            return self.loss
        v.copy("w0", "w")
        v.copy("g0", "g")
        self._direction()
        slope = v.dot("g", "d")
        if slope >= 0:  # rounding has spoilt the pairs
            self._pairs.clear()
            self._direction()
            slope = -g_norm * g_norm
        first = self.lr * (1.0 if self._pairs else min(1.0, 1 / g_norm))
        lower = self._search(Point(0.0, self.loss, slope), first)
        self.iterations += 1
        if lower is None:
            v.copy("w", "w0")
            v.copy("g", "g0")
            if not self._pairs:
                self.done = "no step along the negative gradient lowers the loss: as far as rounding allows"
            self._pairs.clear()  # once more, with the gradient alone
            return self.loss
        self.loss = lower.loss
        self._add_pair(lower.step)
        return self.loss

    def state(self) -> dict[str, np.ndarray]:
        """Return what a run continues from, beside the vectors: name -> float64 array."""
        pairs = np.full((self.history, 2), -1.0)  # number of each pair's vectors and 1 / s.y, oldest first
        for row, (s, _, rho) in zip(pairs, self._pairs, strict=False):
            row[:] = int(s[1:]), rho
        return {
            "loss": np.array(self.loss),
            "pairs": pairs,
            "made": np.array([self.iterations, self.evaluations], float),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned; the vectors are those of that time."""
        self.loss, (self.iterations, self.evaluations) = float(state["loss"]), map(int, state["made"])
        self._pairs = [(f"s{i:.0f}", f"y{i:.0f}", float(rho)) for i, rho in state["pairs"] if i >= 0]
        self.done = ""

    def _evaluate(self) -> float:
        self.evaluations += 1
        loss = self.evaluate()
        return loss if math.isfinite(loss) else math.inf

    def _direction(self) -> None:
        """d = -H g by the two-loop recursion, H the inverse Hessian that the pairs stand for."""
        v = self.vectors
        v.copy("d", "g")
        alphas = []
        for s, y, rho in reversed(self._pairs):
            alphas.append(rho * v.dot(s, "d"))
            v.axpy("d", -alphas[-1], y)
        if self._pairs:
            _, y, rho = self._pairs[-1]
            v.scale("d", 1 / (rho * v.dot(y, y)))
        for (s, y, rho), alpha in zip(self._pairs, reversed(alphas), strict=True):
            v.axpy("d", alpha - rho * v.dot(y, "d"), s)
        v.scale("d", -1.0)

    def _add_pair(self, step: float) -> None:
        """Keep s = step d and y = g - g0, unless the curvature s.y along them is not clearly positive."""
        v = self.vectors
        v.scale("g0", -1.0)
        v.axpy("g0", 1.0, "g")  # now y
        curvature = step * v.dot("d", "g0")
        if curvature <= EPS * step * math.sqrt(v.dot("d", "d") * v.dot("g0", "g0")):
            return
        if len(self._pairs) < self.history:
            s, y = f"s{len(self._pairs)}", f"y{len(self._pairs)}"
        else:
            s, y, _ = self._pairs.pop(0)  # vectors of the oldest pair, to be overwritten
        v.copy(y, "g0")
        v.copy(s, "d")
        v.scale(s, step)
        self._pairs.append((s, y, 1 / curvature))

    def _at(self, step: float) -> Point:
        """Go to w0 + step d, and evaluate there."""
        v = self.vectors
        v.copy("w", "w0")
        v.axpy("w", step, "d")
        loss = self._evaluate()
        return Point(step, loss, v.dot("g", "d") if math.isfinite(loss) else math.inf)

    def _too_high(self, here: Point, start: Point) -> bool:
        return here.loss > start.loss + self.c1 * here.step * start.slope

    def _flat(self, here: Point, start: Point) -> bool:
        return abs(here.slope) <= -self.c2 * start.slope

    def _search(self, start: Point, step: float) -> Point | None:
        """Return a point where the strong Wolfe conditions hold, with "w" and "g" there; None if none is lower.

        The step doubles until it has passed a minimum; then the interval that holds one shrinks around it.
        """
        before, here = start, self._at(step)
        for evaluations in range(1, self.max_evaluations):
            if self._too_high(here, start) or (before is not start and here.loss >= before.loss):
                return self._zoom(start, before, here, self.max_evaluations - evaluations)
            if self._flat(here, start):
                return here
            if here.slope >= 0:
                return self._zoom(start, here, before, self.max_evaluations - evaluations)
            before, here = here, self._at(2 * here.step)
        return here if here.loss < start.loss else None

    def _zoom(self, start: Point, low: Point, high: Point, evaluations: int) -> Point | None:
        """Search between two points: `low` has the lowest loss so far, and its slope points towards `high`."""
        here = high
        for _ in range(evaluations):
            here = self._at(between(low, high))
            if self._too_high(here, start) or here.loss >= low.loss:
                high = here
            elif self._flat(here, start):
                return here
            else:
                if here.slope * (high.step - low.step) >= 0:
                    high = low
                low = here
        if low is start:
            return None
        return low if here is low else self._at(low.step)  # lower than the start, at least


EPS = 1e-10  # of |s| |y|: less curvature than that is rounding


def between(low: Point, high: Point) -> float:
    """Return the minimum of the cubic through both points with their slopes; the middle where that is near an end."""
    width = high.step - low.step
    middle = low.step + width / 2
    if not math.isfinite(high.loss):
        return middle
    a = low.slope + high.slope - 3 * (high.loss - low.loss) / width
    square = a * a - low.slope * high.slope
    if square < 0:
        return middle
    root = math.copysign(math.sqrt(square), width)
    bottom = high.slope - low.slope + 2 * root
    if bottom == 0:
        return middle
    part = 1 - (high.slope + root - a) / bottom
    return low.step + part * width if 0.1 <= part <= 0.9 else middle
