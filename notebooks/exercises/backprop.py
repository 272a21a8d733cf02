"""The checks and pictures of 02_backprop.py."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
import nn
from checks import BLUE, GREEN, GREY, ORANGE, PALE, RED
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
                style = dict(arrowstyle="-|>", lw=1.8, color=BLUE if forward_way else RED) if used else None
                ax.annotate("", end, start, arrowprops=style or dict(arrowstyle="-", lw=0.6, color="0.8"))
        ax.plot([0] * 4, left, "o", ms=17, mfc="white", mec="0.3")
        ax.plot([1] * 3, right, "o", ms=17, mfc="white", mec="0.3")
        ax.text(0, left[1], "$k$", ha="center", va="center")
        ax.text(1, right[1], "$j$", ha="center", va="center")
        ax.set(title=title, xlim=(-0.3, 1.3), ylim=(-2, 2))
        ax.axis("off")
    plt.show()


def draw_one_weight(W2, cost, x, y, W1, b1, b2, slow_derivative):
    """The cost of the sample, while one weight changes, and its slope."""
    values, before = np.linspace(-12, 12, 200), W2[3, 7]
    costs = []
    for W2[3, 7] in values:
        costs.append(cost(x, y, W1, b1, W2, b2))
    W2[3, 7] = before
    slope, height = slow_derivative(W2, (3, 7)), cost(x, y, W1, b1, W2, b2)
    near = before + np.array([-7, 7])
    _, ax = plt.subplots(figsize=(6.4, 2.8))
    ax.plot(values, costs, color=BLUE, label="the cost, while one weight of 2,260 changes")
    ax.plot(near, height + slope * (near - before), "--", color=RED, label=f"its slope here: {slope:.4f}")
    ax.plot(before, height, "o", ms=8, color=RED)
    ax.set(title="One weight is turned, the others stay", xlabel="$W^2_{3,7}$", ylabel="cost of this sample")
    ax.legend()
    plt.show()


def draw_times(fast, slow):
    """Milliseconds of both ways."""
    _, ax = plt.subplots(figsize=(7, 1.9))
    bars = ax.barh(["backpropagation", "one by one"], [1e3 * fast, 1e3 * slow], color=[GREEN, RED], height=0.6)
    ax.bar_label(bars, [f"{1e3 * fast:.2f} ms", f"{1e3 * slow:,.0f} ms, {slow / fast:,.0f} times as much"], padding=4)
    ax.set(title="Two ways to the same numbers", xlabel="milliseconds for all derivatives of 32 samples")
    ax.set(xscale="log", xlim=(None, 1e5 * fast * 1e3))
    ax.invert_yaxis()
    plt.show()


def draw_steps(directional_error, wrong, gradients):
    """The relative error of a gradient over the step eps: backprop's, and a wrong one's."""
    steps = np.logspace(-11, 0, 45)
    _, ax = plt.subplots(figsize=(6.4, 3))
    ax.loglog(steps, [directional_error(wrong, eps) for eps in steps], ".-", color=RED, label="(2) without $\\sigma'$")
    ax.loglog(steps, [directional_error(gradients, eps) for eps in steps], ".-", color=BLUE, label="backprop")
    ax.set(title="Backprop against differences", xlabel=r"step $\varepsilon$", ylabel="relative error")
    ax.legend()
    plt.show()


def draw_network(x, a1, a2, y):
    """The sample, what the hidden neurons make of it, and the ten outputs."""
    _, axes = plt.subplots(1, 3, figsize=(10, 2.6), width_ratios=(1, 2, 1.6))
    axes[0].imshow(x.reshape(8, 8))
    axes[0].set_title("$a^0$: 64 pixels")
    axes[0].axis("off")
    axes[1].bar(range(len(a1)), a1, color=BLUE)
    axes[1].set(title="$a^1$: 30 hidden neurons", xlabel="neuron", ylim=(0, 1))
    axes[2].bar(np.arange(len(y)) - 0.2, y, 0.4, color=PALE, ec=GREY, label="wanted")
    axes[2].bar(np.arange(len(y)) + 0.2, a2, 0.4, color=ORANGE, label="is")
    axes[2].set(title="$a^2$: 10 outputs", xlabel="digit", ylim=(0, 1.3), xticks=range(len(y)))
    axes[2].legend(ncols=2)
    plt.show()


@checks.explain_errors
def check_delta(delta):
    """Against dC/dz by central difference, for outputs that should be 1 and 0."""

    def cross_entropy(z, y):
        return -(y * np.log(sigma(z)) + (1 - y) * np.log(1 - sigma(z)))

    z = np.linspace(-5, 5, 21)
    both, targets, eps = np.concatenate([z, z]), np.repeat([1.0, 0.0], len(z)), 1e-5
    want = (cross_entropy(both + eps, targets) - cross_entropy(both - eps, targets)) / (2 * eps)

    def draw(got, want):
        _, ax = plt.subplots(figsize=(6.4, 2.8))
        ax.plot(z, want[: len(z)], color=GREY, lw=5, alpha=0.6, label="wanted")
        ax.plot(z, got[: len(z)], color=RED, label="yours")
        ax.set(xlabel="weighted input z of an output that should be 1", ylabel="$\\delta$")
        ax.legend()

    got = checks.numbers(delta, sigma(both), targets, shape=both.shape)
    checks.same(got, want, "delta", tolerance=1e-6, draw=draw)
    checks.right("and nothing is left of sigma'")


def draw_push(delta):
    """How hard an output that should be 1 is pushed up, over its weighted input: cross-entropy and quadratic cost."""
    z = np.linspace(-5, 5, 21)
    _, ax = plt.subplots(figsize=(6.4, 2.8))
    ax.plot(z, -np.asarray(delta(sigma(z), np.ones_like(z))), color=BLUE, label="cross-entropy")
    ax.plot(z, -(sigma(z) - 1) * sigma(z) * (1 - sigma(z)), color=RED, label="quadratic")
    ax.set(title="How hard a wrong output is pushed", xlabel="weighted input z of an output that should be 1")
    ax.set(ylabel="$-\\delta$: the push up")
    ax.legend()
    plt.show()


def check_layer(layer, inputs):
    """By `nn.gradcheck`; the picture has what backward says, and the slope of what forward computes."""
    error = checks.call(nn.gradcheck, layer, inputs)
    checks.expect(
        error < 1e-6,
        f"backward is not the derivative of forward: along a random direction they differ by {error:.0e}, relatively.",
        lambda: draw_backward(layer),
    )
    checks.right(f"gradcheck says {error:.0e}")
    draw_backward(layer)
    plt.show()


def draw_backward(layer):
    at, network = np.linspace(-4, 4, 81), nn.Network(layer, in_shape=(81,), dtype=np.float64)
    ctx, p, g = network.context(), network.layout.views(np.zeros(0)), network.layout.views(np.zeros(0))
    y, saved = network.forward(p, at[None], ctx)
    _, ax = plt.subplots(figsize=(6.4, 2.8))
    ax.plot(at, y[0], color=GREY, label="forward")
    ax.plot(at, np.gradient(y[0], at), color=GREY, lw=5, alpha=0.5, label="its slope")
    ax.plot(at, network.backward(p, g, np.ones((1, 81)), saved, ctx)[0], color=RED, label="backward of ones")
    ax.set(title="Is backward the slope of forward?", xlabel="input", ylabel="output, slope")
    ax.legend()


@checks.explain_errors
def check_huber(huber_gradient):
    """Against differences of the loss, and the library's."""
    e = np.linspace(-3, 3, 61)
    huber = lambda e: np.where(np.abs(e) <= 1, 0.5 * e**2, np.abs(e) - 0.5)
    want = (huber(e + 1e-6) - huber(e - 1e-6)) / 2e-6
    checks.same(checks.call(huber_gradient, e), want, "the gradient", tolerance=1e-5)
    output, target = np.random.default_rng(6).standard_normal((2, 4, 3)) * np.array([[[2.0]], [[1.0]]])
    _, gz = nn.HuberLoss()(output, target)
    got = checks.call(huber_gradient, output - target) / 12
    checks.same(got, gz, "the gradient of the mean over 4 samples of 3 outputs")
    checks.right("the same as nn.HuberLoss")
