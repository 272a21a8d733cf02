"""The checks and pictures of 04_convolution.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
import nn
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED
from exercises.training import derivative
from nn.analysis import workload


@checks.explain_errors
def check_size(output_size):
    for size, kernel, stride, padding in ((8, 3, 1, 0), (8, 3, 1, 1), (227, 11, 4, 0), (224, 7, 2, 3), (7, 2, 2, 0)):
        places = [
            i for i in range(-padding, size + padding) if (i + padding) % stride == 0 and i + kernel <= size + padding
        ]
        got = float(checks.numbers(output_size, size, kernel, stride, padding))
        checks.expect(
            got == len(places),
            f"a kernel of {kernel} with stride {stride} and padding {padding} has {len(places)} places in "
            f"{size} pixels; yours "
            f"says {got:g}.",
        )
    checks.right("as counted place by place")


def convolved(x, w):
    """By shifts: the sum over the kernel of shifted images times a matrix."""
    height, width = x.shape[1] - w.shape[0] + 1, x.shape[2] - w.shape[1] + 1
    shifts = np.ndindex(w.shape[:2])
    return sum(x[:, u : u + height, v : v + width] @ w[u, v] for u, v in shifts)


@checks.explain_errors
def check_weight_gradient(weight_gradient):
    rng = np.random.default_rng(10)
    x, w = rng.standard_normal((2, 5, 6, 2)), rng.standard_normal((3, 2, 2, 3))
    gy = rng.standard_normal((2, 3, 5, 3))
    got = checks.numbers(weight_gradient, x.copy(), gy.copy(), (3, 2), shape=w.shape)
    want = derivative(lambda w: np.sum(gy * convolved(x, w)), w)
    checks.expect(
        not np.allclose(got, want / 2, atol=1e-6), "it is the mean over the images; each adds its part to the gradient."
    )
    checks.same(got, want, "the gradient of w", tolerance=1e-6)
    checks.right("as by differences: a convolution of the input with the output's gradient")


@checks.explain_errors
def check_pooling(max_pool, max_pool_backward):
    rng = np.random.default_rng(11)
    x = rng.permutation(2 * 4 * 6 * 3).reshape(2, 4, 6, 3).astype(float)
    y = checks.numbers(max_pool, x.copy(), shape=(2, 2, 3, 3))
    network = nn.Network(nn.MaxPool2d(2), (4, 6, 3), np.float64)
    p = network.layout.views(network.layout.zeros(np.float64))
    checks.same(y, network.forward(p, x.copy(), network.context())[0], "the largest of each 2 x 2")
    gy = rng.standard_normal(y.shape)
    got = checks.numbers(max_pool_backward, x.copy(), gy, shape=x.shape)
    places = np.count_nonzero(got)
    checks.expect(
        places == gy.size,
        f"{places} inputs get a gradient; only the largest of each 2 x 2 has an influence: {gy.size} of them.",
    )
    checks.same(got, derivative(lambda x: np.sum(gy * convolve_max(x)), x), "the gradient of x", tolerance=1e-6)
    checks.right("the gradient goes to the pixel that was the largest, and to no other")


def convolve_max(x):
    return np.maximum(np.maximum(x[:, ::2, ::2], x[:, 1::2, ::2]), np.maximum(x[:, ::2, 1::2], x[:, 1::2, 1::2]))


def draw_maps(shown, filters, maps):
    """Feature maps of four filters on three digits."""
    _, axes = plt.subplots(3, 5, figsize=(9, 5.6))
    for row, image in enumerate(shown):
        axes[row, 0].imshow(image[..., 0])
        for k, (name, weights) in enumerate(filters.items()):
            axes[row, k + 1].imshow(maps[row, ..., k], cmap="RdBu", vmin=-4, vmax=4)
            if row == 0:
                axes[0, k + 1].set_title(name, loc="center", fontsize=10)
                inset = axes[0, k + 1].inset_axes((0.66, 0.66, 0.34, 0.34))
                inset.imshow(weights, cmap="RdBu", vmin=-3, vmax=3)
                inset.set(xticks=[], yticks=[])
    for ax in axes.flat:
        ax.axis("off")
    plt.show()


def draw_networks():
    """Shares of weights and of work, layer by layer, of AlexNet and VGG-16."""
    _, axes = plt.subplots(1, 2, figsize=(11.5, 4.2))
    for ax, (name, shape) in zip(axes, (("alexnet", (227, 227, 3)), ("vgg16", (224, 224, 3))), strict=True):
        rows = [r for r in workload.count(nn.models.build(name, shape, 1000)) if r.weights]
        conv = ["Conv" in type(r.layer).__name__ for r in rows]
        for side, values in ((-1, [r.weights for r in rows]), (1, [r.forward for r in rows])):
            share = 100 * side * np.array(values) / sum(values)
            ax.barh(range(len(rows)), share, color=[BLUE if c else ORANGE for c in conv])
        macs, weights = sum(r.forward for r in rows), sum(r.weights for r in rows)
        ax.axvline(0, color=INK, lw=1)
        ax.invert_yaxis()
        ax.set(title=f"{name}: {weights / 1e6:.0f} M weights, {macs / 1e9:.1f} G MACs", yticks=[], xlim=(-80, 40))
        ax.set_xticks([-75, -50, -25, 0, 25], ["75%", "50%", "25% of the weights", "", "25% of the MACs"], fontsize=8)
        ax.set_ylabel("layers, from the image to the answer")
    for colour, name in ((BLUE, "convolution"), (ORANGE, "fully connected")):
        axes[1].bar(0, 0, color=colour, label=name)
    axes[1].legend(loc="lower right")
    plt.show()


def draw_tiles(tiles, saved, errors):
    """Multiplications saved and rounding error, by the size of a tile."""
    _, (left, right) = plt.subplots(1, 2, figsize=(9.5, 2.9))
    left.bar(list(map(str, tiles)), saved, color=BLUE, width=0.6)
    left.bar_label(left.containers[0], [f"{s:.2f}" for s in saved])
    left.set(
        title="multiplications of the definition, for each that is left", xlabel="outputs along a tile", ylim=(0, 7)
    )
    right.bar(list(map(str, tiles)), errors, color=RED, width=0.6)
    right.set(title="rounding error in float32", xlabel="outputs along a tile", yscale="log")
    plt.show()


def draw_race(rates, N, size, C):
    """Billions of MACs a second of four ways."""
    _, ax = plt.subplots(figsize=(8.5, 2.8))
    ax.set_title("What a core gets done, by the way it is written")
    bars = ax.barh(list(rates), list(rates.values()), color=[RED, ORANGE, GREEN, GREY])
    ax.bar_label(bars, [f"{value:,.4f}" if value < 0.1 else f"{value:.0f}" for value in rates.values()], padding=4)
    ax.set(xscale="log", xlabel=f"billion MACs a second: {N} images of {size} x {size}, {C} channels", xlim=(1e-4, 1e4))
    ax.invert_yaxis()
    plt.show()


def draw_shifts(shifted, x_validation, shifts, dense, conv, y_validation):
    """Accuracy of both networks on digits that are shifted by 0 to 3 pixels."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 2.9), width_ratios=(1.2, 1))
    strip = np.concatenate([shifted(x_validation[:1], s)[0, ..., 0] for s in shifts], axis=1)
    right.imshow(strip)
    right.axis("off")
    right.set_title("shifted by 0, 1, 2 and 3 pixels")
    for trainer, name, colour in ((dense, "fully connected", ORANGE), (conv, "convolutions", BLUE)):
        right_ = [
            100 * np.mean(trainer.predict(shifted(x_validation, s)).argmax(axis=1) == y_validation) for s in shifts
        ]
        left.plot(shifts, right_, "o-", color=colour, label=f"{name}, {trainer.network.layout.count:,} parameters")
    left.set(xlabel="shift in pixels", ylabel="accuracy (%)", ylim=(0, 101), xticks=list(shifts))
    left.legend()
    plt.show()


def draw_found(maps):
    """What each of twelve filters finds."""
    _, axes = plt.subplots(1, 12, figsize=(11, 1.2))
    for k, ax in enumerate(axes):
        ax.imshow(maps[..., k], vmin=0, vmax=maps.max())
        ax.set(xticks=[], yticks=[])
        ax.set_title(k, loc="center", weight="normal", fontsize=9)
    axes[0].set_ylabel("finds")
    plt.show()
