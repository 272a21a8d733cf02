"""The checks and pictures of 01_gradient_descent.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED


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
            for g, colour, name in ((want, INK, "downhill"), (got, RED, "minus your gradient")):
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
            for curvature, name, colour in ((flat, "along", GREY), (steep, "across", BLUE)):
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


def draw_guesses(x, y, landscape, guesses, cost):
    """On the left the lines, on the right the same guesses as points."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9))
    left.plot(x, y, "o", ms=5, color=GREY)
    landscape(right)
    for (name, w), colour in zip(guesses.items(), (RED, ORANGE, INK), strict=True):
        left.plot([-1, 2.2], w[0] + w[1] * np.array([-1, 2.2]), color=colour, label=f"{name}: C = {cost(w):.2f}")
        if name != "best":
            right.plot(*w, "o", ms=9, color=colour)
            right.annotate(name, w, (7, 5), textcoords="offset points", fontsize=12, color=colour, weight="bold")
    left.set(title="two guesses and the best line", xlabel="x", ylabel="y")
    left.legend()
    right.set_title("each line is a point in this landscape")
    plt.show()


def draw_arrows(landscape, gradient):
    """Minus the gradient, at 64 places."""
    _, ax = plt.subplots(figsize=(6.4, 4.6))
    landscape(ax)
    places = np.array([(a, b) for a in np.linspace(-1.2, 1.6, 8) for b in np.linspace(-0.4, 2.2, 8)])
    down = -np.array([gradient(w) for w in places])
    ax.quiver(*places.T, *down.T, color=INK, angles="xy", scale=14, width=0.004)
    ax.set_title("minus the gradient, at 64 places")
    plt.show()


def draw_walks(curvature, walk, start, landscape, cost, best):
    """Walks with three rates, and the cost on the way."""
    _, axes = plt.subplots(1, 4, figsize=(12.5, 3.3), width_ratios=(1, 1, 1, 1.15))
    for ax, rate, colour in zip(axes, (0.05, 0.5, 2.05 / curvature[1]), (ORANGE, GREEN, RED), strict=False):
        path = walk(start, rate, 15)
        landscape(ax)
        ax.plot(*path.T, ".-", color=colour, lw=1.5)
        ax.set(title=f"rate {rate:.2f}, 15 steps", xlim=(-1.4, 1.8), ylim=(-0.6, 2.4))
        axes[3].semilogy([cost(w) - cost(best) for w in walk(start, rate, 40)], color=colour, label=f"rate {rate:.2f}")
    axes[3].set(title="cost above the lowest", xlabel="step", ylim=(1e-8, 10))
    axes[3].legend()
    plt.show()


def draw_batches(N, descend, landscape):
    """Six epochs with all samples, with 8, and with one at a time."""
    _, axes = plt.subplots(1, 3, figsize=(12, 3.9), sharey=True)
    kinds = {N: ("batch", BLUE), 8: ("mini-batch of 8", GREEN), 1: ("stochastic", RED)}
    for ax, (B, (name, colour)) in zip(axes, kinds.items(), strict=True):
        path = descend(B, 0.15, 6)
        landscape(ax)
        ax.plot(*path.T, ".-", color=colour, lw=1.2, ms=4)
        ax.set_title(f"{name}: 6 epochs are {len(path) - 1} steps")
    plt.show()


def draw_noise(batches, gradient, here, sizes, noise):
    """Gradients of three batch sizes, and their distance from the true one."""
    _, axes = plt.subplots(1, 4, figsize=(12.5, 3.2), width_ratios=(1, 1, 1, 1.3))
    for ax, B, colour in zip(axes, (1, 4, 16), (RED, ORANGE, GREEN), strict=False):
        ax.plot(*batches[B].T, ".", ms=3, alpha=0.5, color=colour)
        ax.plot(*gradient(here), "+", ms=14, mew=2.5, color=INK)
        ax.set(title=f"400 gradients, B = {B}", xlim=(-2.7, 0.8), ylim=(-5, 0.6), xlabel="$\\partial C/\\partial w_0$")
    axes[0].set_ylabel("$\\partial C/\\partial w_1$")
    axes[3].loglog(sizes, noise, "o", color=BLUE, label="measured")
    axes[3].loglog(sizes, noise[0] / np.sqrt(sizes), "--", color=GREY, label="$1/\\sqrt{B}$")
    axes[3].set_xticks(sizes, sizes)
    axes[3].set_xticks([], minor=True)
    axes[3].set(title="distance from the true gradient", xlabel="batch size B")
    axes[3].legend()
    plt.show()


def draw_momentum(landscape, rolling, cost, best):
    """Twenty steps without momentum and with it, and the cost on the way."""
    _, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    for ax, mu, colour in zip(axes, (0.0, 0.7), (BLUE, GREEN), strict=False):
        landscape(ax)
        ax.plot(*rolling(0.2, mu, 20).T, ".-", color=colour)
        ax.set_title(f"20 steps, momentum {mu}")
        axes[2].semilogy([cost(w) - cost(best) for w in rolling(0.2, mu, 60)], color=colour, label=f"momentum {mu}")
    axes[2].set(title="cost above the lowest", xlabel="step", ylim=(1e-12, 10))
    axes[2].legend()
    plt.show()


def draw_digits(images, labels):
    """The first digits and their labels."""
    _, axes = plt.subplots(2, 12, figsize=(11, 2.2))
    for ax, image, label in zip(axes.flat, images, labels, strict=False):
        ax.imshow(image.reshape(8, 8))
        ax.set_title(label, loc="center", weight="normal")
        ax.axis("off")
    plt.show()


def landscape_of(cost, best):
    """Return a function that draws the cost over w0 and w1 into an `ax`."""

    def landscape(ax, low=(-1.4, -0.6), high=(1.8, 2.4)):
        """Lines of equal cost over w0 and w1, darker where it is lower, and a star at the bottom."""
        w0, w1 = np.linspace(low[0], high[0], 80), np.linspace(low[1], high[1], 80)
        C = np.array([[cost(np.array([a, b])) for a in w0] for b in w1])
        levels = cost(best) + np.array([0.01, 0.04, 0.1, 0.2, 0.4, 0.7, 1.1, 1.6, 2.3, 3.2])
        ax.contourf(w0, w1, C, [C.min(), *levels, C.max() + 1], cmap="Blues_r", alpha=0.3)
        ax.contour(w0, w1, C, levels, colors="#7f9fc4", linewidths=0.7)
        ax.plot(*best, "*", ms=14, mfc="white", mec=INK, zorder=5)
        ax.set(xlabel="$w_0$", ylabel="$w_1$")

    return landscape


@checks.explain_errors
def check_descend(descend, gradient, landscape, start, X, y):
    """Against the same steps, written without a loop over pieces: each sample has the number of its step."""
    for B in (len(y), 1, 10, 7):
        check_pieces(descend, gradient, landscape, start, X, y, B)
    checks.right("all samples, one, ten, and seven with a last piece of five: one loop")


def check_pieces(descend, gradient, landscape, start, X, y, B):
    N = len(y)
    order = np.random.default_rng(3).permutation(N)
    want, step_of = [start], np.arange(N) // B
    for step in range(step_of[-1] + 1):
        rows = order[step_of == step]
        want.append(want[-1] - 0.2 * gradient(want[-1], X[rows], y[rows]))

    want = np.array(want)

    def draw(*_):
        _, ax = plt.subplots(figsize=(5.4, 4))
        landscape(ax)
        ax.plot(*want.T, ".-", color=INK, label=f"wanted: {len(want) - 1} steps")
        ax.plot(*path.T, ".-", color=RED, label=f"yours: {len(path) - 1} steps")
        ax.legend(loc="lower left", frameon=True)

    path = checks.call(descend, B, 0.2, 1, seed=3)
    checks.expect(
        len(path) == len(want),
        f"{N} samples in pieces of {B}, steps an epoch: {len(want) - 1}; yours takes {len(path) - 1}.",
        draw,
    )
    checks.same(path, want, f"the path with B = {B}", draw=draw)


@checks.explain_errors
def check_roll(roll, rolling, gradient, landscape, start):
    """By Polyak's other form, which needs no velocity: minus the gradient's step, plus mu times the last step."""
    want = [start, start - 0.2 * gradient(start)]
    while len(want) < 21:
        want.append(want[-1] - 0.2 * gradient(want[-1]) + 0.7 * (want[-1] - want[-2]))

    def draw(got, want):
        _, ax = plt.subplots(figsize=(5.4, 4))
        landscape(ax)
        ax.plot(*want.T, ".-", color=INK, label="wanted")
        ax.plot(*got.T, ".-", color=RED, label="yours")
        ax.legend(loc="lower left", frameon=True)

    checks.same(rolling(0.2, 0.7, 20), np.array(want), "20 steps with momentum", draw=draw)
    _, v = checks.several(2, roll, start, np.zeros(2), 0.2, 0.7)
    checks.same(v, gradient(start), "the velocity after the first step")
    checks.right("that is momentum")


def draw_learning(runs):
    """Validation accuracy of three batch sizes, over epochs and over steps."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), sharey=True)
    for (name, (accuracy, steps)), colour in zip(runs.items(), (BLUE, GREEN, RED), strict=True):
        each, percent = steps // len(accuracy), 100 * np.array(accuracy)
        left.plot(range(1, 9), percent, ".-", color=colour, label=name)
        right.semilogx(each * np.arange(1, 9), percent, ".-", color=colour, label=f"{each} steps an epoch")
    left.set(title="by epochs: samples looked at", xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 101))
    right.set(title="by steps: updates made", xlabel="steps")
    left.legend(loc="lower right")
    right.legend(loc="lower right")
    plt.show()
