"""The checks of 01_gradient_descent.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import GREY, RED


@checks.explain_errors
def check_gradient(gradient, cost, landscape, places, X, y):
    """At some places, and over some of the samples, against the definition of the derivative."""

    def by_definition(w, eps=1e-6, **part):
        return np.array([(cost(w + eps * e, **part) - cost(w - eps * e, **part)) / (2 * eps) for e in np.eye(2)])

    for here in places:

        def draw(got, want, here=here):
            """Both gradients at the same point of the landscape, turned downhill."""
            _, ax = plt.subplots(figsize=(5.4, 4))
            landscape(ax)
            for g, colour, name in ((want, checks.INK, "downhill"), (got, RED, "minus your gradient")):
                ax.annotate("", here - 0.35 * g, here, arrowprops=dict(arrowstyle="-|>", lw=2.5, color=colour))
                ax.plot([], [], color=colour, label=name)
            ax.legend(loc="lower left", frameon=True)

        checks.same(checks.call(gradient, here), by_definition(here), "the gradient", tolerance=1e-6, draw=draw)
        part = {"X": X[:13], "y": y[:13]}
        got = checks.call(gradient, here, **part)
        checks.same(got, by_definition(here, **part), "the gradient of 13 samples", tolerance=1e-6, draw=draw)
    checks.right("your gradient is that of the definition, at every place that was tried")


@checks.explain_errors
def check_best_rate(best_rate):
    for flat, steep in ((1.0, 1.0), (0.2, 3.0), (1.0, 100.0)):
        rate = float(checks.numbers(best_rate, flat, steep))
        left = max(abs(1 - rate * flat), abs(1 - rate * steep))
        rates = np.linspace(0, 2 / steep, 20_001)
        best = np.maximum(abs(1 - rates * flat), abs(1 - rates * steep)).min()

        def draw(flat=flat, steep=steep, rates=rates, rate=rate):
            _, ax = plt.subplots(figsize=(6, 2.8))
            for curvature, name, colour in ((flat, "along", GREY), (steep, "across", checks.BLUE)):
                ax.plot(rates, abs(1 - rates * curvature), color=colour, label=f"{name}, curvature {curvature:g}")
            ax.axvline(rate, color=RED, label="your rate")
            ax.set(title="what a step leaves of the error", xlabel="rate", ylim=(0, 1.2))
            ax.legend()

        checks.expect(
            left < best + 1e-3,
            f"with curvatures {flat:g} and {steep:g} and your rate, {rate:.4g}, a step leaves {left:.3f} of "
            "the error in the "
            f"slower direction; {best:.3f} is possible.",
            draw,
        )
    checks.right("both directions shrink by the same factor: no other rate is better for the slower one")


@checks.explain_errors
def check_steps_needed(steps_needed):
    for rate, curvature, factor in (
        (0.1, 1.0, 1000.0),
        (0.5, 1.0, 1000.0),
        (0.5, 1.0, 4.0),
        (1.9, 1.0, 10.0),
        (0.01, 0.3, 1e6),
    ):
        count, error = 0, 1.0
        while error > 1 / factor:
            error, count = abs(1 - rate * curvature) * error, count + 1
        got = float(checks.numbers(steps_needed, rate, curvature, factor))
        checks.expect(
            got == count,
            f"with rate {rate:g} and curvature {curvature:g} the error is {factor:g} times smaller after "
            f"{count} steps, the "
            f"first time; yours says {got:g}.",
        )
    checks.right("as counted step by step, for a rate that jumps across the valley, too")
