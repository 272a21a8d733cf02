"""The checks of 02_backprop.py."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
from exercises.training import derivative


def sigma(z):
    return 1 / (1 + np.exp(-z))


@checks.explain_errors
def check_deep(backward_deep):
    rng = np.random.default_rng(8)
    for sizes in ((4, 3), (5, 4, 3), (3, 6, 2, 5, 4)):
        weights = [rng.standard_normal(pair) for pair in pairwise(sizes)]
        x, y = rng.standard_normal((7, sizes[0])), rng.random((7, sizes[-1]))

        def cost(weights, x=x, y=y):
            a = x
            for W in weights:
                a = sigma(a @ W)
            return 0.5 * np.sum((a - y) ** 2) / len(x)

        activations = [x]
        for W in weights:
            activations.append(sigma(activations[-1] @ W))
        got = checks.call(backward_deep, y, [W.copy() for W in weights], [a.copy() for a in activations])
        checks.expect(
            isinstance(got, list | tuple) and len(got) == len(weights),
            f"a list of as many gradients as layers is expected, {len(weights)}; yours is of the type "
            f"{type(got).__name__}{f', of {len(got)}' * isinstance(got, list | tuple)}.",
        )
        for layer in reversed(range(len(weights))):
            want = derivative(lambda W, i=layer, c=cost, w=weights: c([*w[:i], W, *w[i + 1 :]]), weights[layer])
            shape = np.shape(got[layer])
            checks.expect(
                shape == want.shape,
                f"of {len(weights)} layers: the gradient number {layer + 1} has the shape {shape}, and its "
                f"matrix {want.shape}: "
                "first layer first?",
            )
            name = f"the gradient of matrix {layer + 1} of {len(weights)}"
            checks.same(got[layer], want, name, tolerance=1e-6)
    checks.right("one, two and four layers: the same loop")


@checks.explain_errors
def check_direction(directional_derivative):
    rng = np.random.default_rng(9)
    w, d = rng.standard_normal((2, 6))
    d /= np.linalg.norm(d)
    f = lambda w: np.sum(np.sin(w) * np.arange(6))
    exact = np.sum(np.cos(w) * np.arange(6) * d)
    errors = [abs(float(checks.numbers(directional_derivative, f, w.copy(), d, eps)) - exact) for eps in (1e-2, 5e-3)]
    checks.expect(
        errors[0] < 0.1, f"it is {errors[0]:.3g} away from the derivative along d: times what, over which distance?"
    )
    ratio = errors[0] / errors[1]
    checks.expect(
        3.5 < ratio < 4.5,
        f"with half of the step the error becomes {ratio:.1f} times smaller. If both sides are used, the "
        "curvature cancels, "
        "and it becomes 4 times smaller.",
    )
    calls = []
    directional_derivative(lambda w: calls.append(w.copy()) or f(w), w.copy(), d, 1e-3)
    checks.expect(
        len(calls) == 2, f"two evaluations are enough for any number of parameters; yours makes {len(calls)}."
    )
    kept = w.copy()
    directional_derivative(f, kept, d, 1e-3)
    checks.expect(
        np.array_equal(kept, w), "it changes w: f must be called with new arrays, w + eps d, and w stay as it is."
    )
    checks.right("two evaluations; half the step, a quarter of the error")


def draw_ways():
    """Which weights a neuron uses in each direction."""
    _, panels = plt.subplots(1, 2, figsize=(8.4, 2.7), sharey=True)
    left, right = np.linspace(-1.5, 1.5, 4), np.linspace(-1, 1, 3)
    for ax, title in zip(
        panels, (r"forward: $z_j=\sum_k a_k W_{kj}$", r"backward: $\sum_j W_{kj}\,\delta_j$"), strict=True
    ):
        forward_way = ax is panels[0]
        for k, yk in enumerate(left):
            for j, yj in enumerate(right):
                used = j == 1 if forward_way else k == 1
                start, end = ((0.1, yk), (0.9, yj)) if forward_way else ((0.9, yj), (0.1, yk))
                style = (
                    dict(arrowstyle="-|>", lw=1.8, color=checks.BLUE if forward_way else checks.RED) if used else None
                )
                ax.annotate("", end, start, arrowprops=style or dict(arrowstyle="-", lw=0.6, color="0.8"))
        ax.plot([0] * 4, left, "o", ms=17, mfc="white", mec="0.3")
        ax.plot([1] * 3, right, "o", ms=17, mfc="white", mec="0.3")
        ax.text(0, left[1], "$k$", ha="center", va="center")
        ax.text(1, right[1], "$j$", ha="center", va="center")
        ax.set(title=title, xlim=(-0.3, 1.3), ylim=(-2, 2))
        ax.axis("off")
    plt.show()
