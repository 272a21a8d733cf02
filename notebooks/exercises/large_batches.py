"""The checks and pictures of 09_large_batches.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
import nn
from checks import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED


@checks.explain_errors
def check_correction(momentum_step):
    rng = np.random.default_rng(14)
    w = theirs = rng.standard_normal(4)
    v, outside, last = np.zeros(4), np.zeros(4), 0.1
    for step, rate in enumerate((0.1, 0.1, 0.4, 0.4, 0.05)):
        g = rng.standard_normal(4)
        outside = 0.9 * outside + g
        theirs = theirs - rate * outside
        w, v = checks.arrays([(4,), (4,)], momentum_step, w.copy(), v.copy(), g, rate, last, 0.9)
        said = (
            ""
            if rate == last
            else f"; here the rate changes from {last:g} to {rate:g}, and v still has the old one in it"
        )
        checks.expect(
            np.allclose(w, theirs, rtol=1e-9),
            f"step {step} goes elsewhere than with the rate outside of the velocity{said}.",
        )
        last = rate
    checks.right("the same steps as with the rate outside, however it changes")


@checks.explain_errors
def check_lamb(lamb):
    one = nn.Network(nn.Linear(8, 8, bias=False), (8,), np.float64)
    theirs = one.layout.zeros(np.float64)
    one.layout.initialize(theirs, 0)
    ours, slots = theirs.copy(), {name: one.layout.zeros(np.float64) for name in nn.LAMB(0.01).slots}
    m, v, rng = np.zeros_like(ours), np.zeros_like(ours), np.random.default_rng(2)
    for step in range(10):
        g, before = rng.standard_normal(ours.shape), (ours.copy(), theirs.copy())
        checks.change(lamb, ours, g.copy(), m, v, step)
        nn.LAMB(0.01).update(theirs, g, slots, step, one.layout.region())
        checks.expect(not np.array_equal(ours, before[0]), "w stays as it was given: change it in place, w -= ...")
        lengths = [np.linalg.norm(new - old) for new, old in zip((ours, theirs), before, strict=True)]
        checks.expect(
            np.isclose(*lengths, rtol=1e-9),
            f"step {step} is {lengths[0]:.3g} long, and {lengths[1]:.3g} is wanted: the rate times the length "
            "of the weight, in "
            "the direction u.",
        )
        checks.same(ours, theirs, f"w after step {step}")
    checks.right("ten steps as nn.LAMB makes them")


@checks.explain_errors
def check_noise_scale(noise_scale):
    for signal, noise in ((1.0, 50.0), (0.01, 3.0), (4.0, 4.0)):
        small, large = 8, 128
        got = float(checks.numbers(noise_scale, signal + noise / small, signal + noise / large, small, large))
        naive = signal + noise / large
        checks.expect(
            not np.isclose(got, (signal + noise / small - naive) * small / naive, rtol=1e-3),
            "the large batch's gradient has noise in it, too: solve both equations for both unknowns.",
        )
        checks.same(
            got, noise / signal, f"the noise scale for |G|^2 = {signal:g} and a variance of {noise:g}", tolerance=1e-6
        )
    checks.right("two equations, two unknowns")


def draw_rates(got, want):
    """Both as lines, with a cross where they part."""
    _, ax = plt.subplots(figsize=(6, 2.6))
    ax.plot(want, color=GREY, lw=5, alpha=0.5, label="wanted")
    ax.plot(got, "o-", color=RED, label="yours")
    for first in np.flatnonzero(~np.isclose(got, want))[:1]:
        ax.plot(first, want[first], "x", ms=13, mew=3, color=INK, label=f"the first that differs: step {first}")
    ax.set(xlabel="step", ylabel="learning rate", title="warm-up from 0.015 to 0.24 in 10 steps", ylim=(0, 0.3))
    ax.legend(loc="upper left")


def draw_steps(mine, right):
    """The length of every step, for both matrices."""
    _, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True)
    for i, ax in enumerate(axes):
        ax.bar(np.arange(5) - 0.2, right[:, i], 0.4, color=GREY, label="nn.LARS")
        ax.bar(np.arange(5) + 0.2, mine[:, i], 0.4, color=RED, label="yours")
        ax.set(xlabel="step", title=f"matrix {i}: length of a step")
    axes[0].legend()


def draw_errors(curves, title):
    """The mean over seeds, and the range that they span."""
    _, ax = plt.subplots(figsize=(6.8, 3.4))
    for (name, runs), colour in zip(curves.items(), (INK, BLUE, RED, GREEN, ORANGE, PINK), strict=False):
        runs, epochs = np.array(runs), np.arange(1, len(runs[0]) + 1)
        ax.plot(epochs, runs.mean(0), "o-", ms=3, color=colour, label=f"{name}: {runs[:, -1].mean():.1f}%")
        ax.fill_between(epochs, runs.min(0), runs.max(0), color=colour, alpha=0.12, lw=0)
    ax.set(xlabel="epoch", ylabel="validation error (%)", title=title, yscale="log", ylim=(1, 100))
    ax.set_yticks([1, 2, 5, 10, 20, 50, 100], [1, 2, 5, 10, 20, 50, 100])
    ax.set_yticks([], minor=True)
    ax.legend()
    plt.show()


@checks.explain_errors
def check_lars(my_lars):
    """The lengths of five steps on two matrices, and the weights in the end, as nn.LARS makes them."""
    small = nn.Network(nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)), (6,), np.float64)
    optimizer = nn.LARS(2.0, momentum=0.9, trust=0.01, weight_decay=0.1)
    theirs, velocity = small.layout.zeros(np.float64), {"velocity": small.layout.zeros(np.float64)}
    small.layout.initialize(theirs, 0)
    own, v, rng = theirs.copy(), np.zeros_like(theirs), np.random.default_rng(1)
    lengths = []
    for step in range(5):
        g = rng.standard_normal(theirs.shape) * 10.0**-step  # the gradients become short: LARS does not mind
        before = own.copy(), theirs.copy()
        arrays = [[array for _, array in small.layout.items(flat)] for flat in (own, g.copy(), v)]
        for matrices in zip(*arrays, strict=True):
            checks.change(my_lars, *matrices, 2.0, 0.9, 0.01, 0.1)
        optimizer.update(theirs, g, velocity, step, small.layout.region())
        moved = own - before[0], theirs - before[1]
        lengths.append([[np.linalg.norm(a) for _, a in small.layout.items(m)] for m in moved])
    mine, right = np.moveaxis(np.array(lengths), 1, 0)
    wrong = np.argwhere(~np.isclose(mine, right, rtol=1e-9))
    if len(wrong):
        step, matrix = wrong[0]
        hint = "what does the momentum do?" if step else "look at the local rate, and that w and v change in place"
        long = f"{mine[step, matrix]:.3g} long, and {right[step, matrix]:.3g} is wanted"
        checks.expect(False, f"step {step} of matrix {matrix} is {long}: {hint}", lambda: draw_steps(mine, right))
    checks.same(own, theirs, "the weights after five steps")
    checks.right("as nn.LARS, though the gradients became 10,000 times shorter")
    draw_steps(mine, right)


def draw_epochs(images, ranks, summing):
    """Minutes of an epoch over the number of ranks."""
    _, ax = plt.subplots(figsize=(6.8, 3.2))
    for name, share, colour in (
        ("256 samples in a step", lambda p: 256 / p, RED),
        ("32 samples on each rank", lambda p: 32, BLUE),
    ):
        epoch = [images / (share(p) * p) * (share(p) / 200 + s) for p, s in zip(ranks, summing, strict=True)]
        ax.plot(ranks, np.array(epoch) / 60, "o-", color=colour, label=name)
        ax.annotate(f"{epoch[-1] / 60:.2g} min", (256, epoch[-1] / 60), xytext=(6, -3), textcoords="offset points")
    ax.plot(ranks, images / 200 / np.array(ranks) / 60, ":", color=GREY, label="if sums took no time")
    ax.set(
        xscale="log", yscale="log", xlabel="ranks", ylabel="minutes an epoch", title="An epoch of ResNet-50 (computed)"
    )
    ax.set_xticks(ranks, ranks)
    ax.set_xticks([], minor=True)
    ax.legend()
    plt.show()


def draw_apart(moments, found, rates, K, SMALL, LARGE):
    """How far small steps and a large one end apart, over the rate."""
    _, ax = plt.subplots(figsize=(6.8, 3.2))
    for step, each, colour in zip(moments, found, (RED, GREEN, BLUE), strict=True):
        ax.plot(rates, each, "o-", color=colour, label=f"after {step} steps of the small batch")
    ax.set(xscale="log", xlabel="rate of the small batch", ylabel="apart, % of the way", ylim=(0, 150))
    ax.set_xticks(rates, rates)
    ax.set_title(f"{K} steps of {SMALL} samples, and one of {LARGE}")
    ax.legend()
    plt.show()


def draw_ratios(weights, names, ratios):
    """Length of each weight over that of its gradient."""
    _, ax = plt.subplots(figsize=(6.4, 2.2))
    bars = ax.barh([f"{name}  {weights[name].shape}" for name in names], ratios, color=BLUE)
    ax.bar_label(bars, fmt=" %.0f")
    ax.invert_yaxis()
    ax.set(
        xlabel="|w| / |g| at the start",
        title="The rate at which a step would be as long as the weight",
        xlim=(0, 1.15 * max(ratios)),
    )
    plt.show()


def draw_noise_scales(places, scales):
    """The noise scale at some moments of training."""
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    bars = ax.bar([f"after {step} steps" for step in places], scales, color=BLUE, width=0.6)
    ax.bar_label(bars, fmt="%.0f")
    ax.set(title="noise scale of our network", ylabel="samples", ylim=(0, 1.2 * max(scales)))
    plt.show()


def draw_families(families, sizes, final):
    """Validation error of four methods over the batch."""
    _, ax = plt.subplots(figsize=(6.8, 3.4))
    for name, colour, marker in zip(families, (RED, BLUE, GREEN, ORANGE), "os^D", strict=True):
        ax.plot(sizes, final[name], marker=marker, color=colour, label=name)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="batch",
        ylabel="validation error (%)",
        title="20 epochs, one seed",
        ylim=(1, 100),
    )
    ax.set_xticks(sizes, sizes)
    ax.set_xticks([], minor=True)
    ax.set_yticks([1, 2, 5, 10, 20, 50], [1, 2, 5, 10, 20, 50])
    ax.set_yticks([], minor=True)
    ax.legend(fontsize=8)
    plt.show()
