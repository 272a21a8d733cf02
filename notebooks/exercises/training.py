"""The checks and pictures of 04b_training.py."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, ORANGE, RED


def derivative(function, x, eps=1e-6):
    """The gradient of a function of an array, one number after the other."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * eps
            ends.append(function(moved))
        gradient[i] = (ends[0] - ends[1]) / (2 * eps)
    return gradient


def draw_curves(title, xlabel, **curves):
    """Some curves over 1, 2, ..., on a logarithmic axis."""
    _, ax = plt.subplots(figsize=(6.4, 2.8))
    for (name, values), colour, width in zip(curves.items(), (GREY, RED, BLUE), (5, 1.8, 1.8), strict=False):
        ax.semilogy(range(1, len(values) + 1), values, "o-", color=colour, lw=width, label=name, alpha=0.8)
    ax.set(title=title, xlabel=xlabel)
    ax.legend()


@checks.explain_errors
def check_log_softmax(log_softmax):
    rng = np.random.default_rng(0)
    z = 3 * rng.standard_normal((5, 4))
    z.flags.writeable = False
    got = checks.numbers(log_softmax, z, shape=(5, 4))
    sums = np.exp(got).sum(axis=1)
    checks.expect(
        np.allclose(sums, 1),
        f"the probabilities of a row must sum to 1; those of yours sum to {sums.round(3).tolist()}: one sum "
        "for each row?",
    )
    want = np.array([[row[j] - np.log(sum(np.exp(other) for other in row)) for j in range(4)] for row in z])
    checks.same(got, want, "the logarithms of the probabilities")
    large = z + np.array([[1000.0], [-1000.0], [0], [500], [0]])
    with np.errstate(all="ignore"):
        got = checks.numbers(log_softmax, large, shape=(5, 4))
    checks.expect(
        np.isfinite(got).all(),
        "with outputs near 1000 or -1000 exp overflows, or all exponentials are 0. Adding a number to a whole "
        "row changes no "
        "probability: which number makes the largest exponent 0?",
    )
    checks.same(got, want, "the same with 1000 added to a row")
    far = np.array([[1000.0, 0, -1000, 0]])
    with np.errstate(all="ignore"):
        got = checks.numbers(log_softmax, far.copy(), shape=(1, 4))
    checks.same(got, far - 1000, "outputs of one row that lie far apart")
    checks.right("rows of 1000 and of -1000 give the same as rows near 0")


@checks.explain_errors
def check_cross_entropy(gradient):
    rng = np.random.default_rng(1)
    z, labels = rng.standard_normal((6, 4)), np.array([0, 3, 1, 1, 2, 0])

    def cost(z):
        return np.mean([np.log(np.exp(row - row[k]).sum()) for row, k in zip(z, labels, strict=True)])

    got = checks.numbers(gradient, z.copy(), labels, shape=z.shape)
    want = derivative(cost, z)
    checks.expect(
        not np.allclose(got, 6 * want, atol=1e-6),
        "this is the gradient of the sum over the samples; the cost is their mean: it is 6 times too long for "
        "6 samples.",
    )
    checks.same(got, want, "the gradient", tolerance=1e-6)
    checks.right("every row sums to 0: what the right class gains the others lose")


@checks.explain_errors
def check_adam(adam_step):
    rng = np.random.default_rng(2)
    w = theirs = np.array([1.0, -2.0, 0.5])
    m = v = m2 = v2 = np.zeros(3)
    for step in range(1, 6):
        g = rng.standard_normal(3) * [1, 100, 0.01]
        moved, m, v = checks.arrays(3 * [w.shape], adam_step, w.copy(), g.copy(), m.copy(), v.copy(), step, 0.1)
        m2, v2 = 0.9 * m2 + 0.1 * g, 0.999 * v2 + 0.001 * g * g
        checks.same(m, m2, f"m after step {step}")
        checks.same(v, v2, f"v after step {step}")
        theirs = theirs - 0.1 * m2 / (1 - 0.9**step) / (np.sqrt(v2 / (1 - 0.999**step)) + 1e-8)
        if step == 1:
            size = np.abs(moved - w)
            checks.expect(
                np.allclose(size, 0.1, rtol=1e-4),
                "the first step moves every number by the rate, 0.1, however long its gradient is; yours "
                "moves them by "
                f"{[float(f'{each:.8g}') for each in size]}: what corrects m and v, which began at 0? Is eps added "
                "to the root, not inside it?",
            )
        w = moved
        checks.same(w, theirs, f"w after step {step}")
    checks.right("gradients a million times longer or shorter: the first steps are equally long")


@checks.explain_errors
def check_decay(adamw_step, adam_step):
    w, m, v = np.array([2.0, -3.0, 0.5]), np.zeros(3), np.zeros(3)
    g = np.array([0.1, 0.2, -100.0])
    got, m, v = checks.arrays(3 * [w.shape], adamw_step, w.copy(), g, m, v, 1, 0.01, 0.1)
    plain = adam_step(w.copy(), g, np.zeros(3), np.zeros(3), 1, 0.01)
    checks.same(m, plain[1], "m: the decay is no part of the gradient")
    checks.same(got, plain[0] - 0.01 * 0.1 * w, "w after a step of rate 0.01 with decay 0.1")
    checks.right("each weight shrinks by the same share, however large its gradients have been")


@checks.explain_errors
def check_he(he_weights):
    rng = np.random.default_rng(3)
    x, sizes = rng.standard_normal((500, 200)), []
    for inputs, outputs in 10 * [(200, 100), (100, 200)]:
        weights = checks.numbers(he_weights, rng, inputs, outputs, shape=(inputs, outputs))
        x = np.maximum(x @ weights, 0)
        sizes.append(np.sqrt(np.mean(x**2)))
    steps = np.log(np.divide(sizes[2:], sizes[1:-1]))  # into narrower layers and into wider ones, alternately
    ratio = float(np.exp(max(steps[::2].mean(), steps[1::2].mean(), key=abs)))
    checks.expect(
        0.9 < ratio < 1.1,
        f"through each of 20 layers with ReLU the activations become {ratio:.2f} times as large. ReLU makes "
        "half of them 0, "
        "so half of the sum of squares is lost: what does that ask of the variance of the weights?",
        lambda: draw_curves("root mean square of activations", "layer", wanted=np.ones(20), yours=sizes),
    )
    checks.right(f"from layer to layer the activations change by a factor of {ratio:.2f}")


@checks.explain_errors
def check_norms(gradient_norms):
    rng = np.random.default_rng(4)
    sizes = [6, 5, 7, 3]
    weights = [rng.standard_normal(pair) for pair in pairwise(sizes)]
    x = rng.standard_normal((4, 6))
    leaky = (lambda z: np.maximum(z, 0.1 * z), lambda a: np.where(a > 0, 1, 0.1))
    for f, slope in ((np.tanh, lambda a: 1 - a**2), leaky):

        def run(first, f=f):
            """The sum of the outputs, where what `first` holds is added to the weighted inputs of each layer."""
            a, inside = x, []
            for w, shift in zip(weights, first, strict=True):
                a = f(a @ w + shift)
                inside.append(a)
            return a.sum(), inside

        shifts = [np.zeros((4, n)) for n in sizes[1:]]
        want = []
        for layer in range(3):

            def moved(shift, layer=layer, run=run, shifts=shifts):
                return run([*shifts[:layer], shift, *shifts[layer + 1 :]])[0]

            want.append(np.linalg.norm(derivative(moved, shifts[layer])))
        got = checks.call(gradient_norms, weights, run(shifts)[1], np.ones((4, 3)), slope)
        checks.expect(np.shape(got) == (3,), f"three layers have three norms; yours has the shape {np.shape(got)}.")
        if np.allclose(got, want[::-1], rtol=1e-5) and not np.allclose(want, want[::-1]):
            checks.expect(False, "these are the norms, the last layer first; the first layer's are to be first.")
        checks.same(got, want, "the norms, the first layer first", tolerance=1e-5)
    checks.right("as by differences, for tanh and for a leaky ReLU")


@checks.explain_errors
def check_batch_norm(batch_norm):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((50, 3)) * [1, 10, 0.1] + [0, 5, -2]
    mean, variance = np.zeros(3), np.ones(3)
    shapes = x.shape, (3,), (3,)
    y, new_mean, new_variance = checks.arrays(shapes, batch_norm, x.copy(), mean.copy(), variance.copy(), True)
    checks.expect(
        np.allclose(y.mean(axis=0), 0, atol=1e-9) and np.allclose(y.std(axis=0), 1, atol=1e-3),
        f"each feature (column) of y must have mean 0 and deviation 1 over the batch; yours have means "
        f"{y.mean(axis=0).round(2).tolist()} and deviations {y.std(axis=0).round(2).tolist()}.",
    )
    checks.same(new_mean, 0.1 * x.mean(axis=0), "the running mean after one batch")
    checks.same(new_variance, 0.9 + 0.1 * x.var(axis=0), "the running variance after one batch")
    remembered = np.full(3, 2.0), np.full(3, 4.0)
    one, kept_mean, kept_variance = checks.arrays([(1, 3), (3,), (3,)], batch_norm, x[:1].copy(), *remembered, False)
    checks.same(one, (x[:1] - 2) / np.sqrt(4 + 1e-5), "y of one sample in evaluation: by the running mean and variance")
    checks.same((kept_mean, kept_variance), ([2] * 3, [4] * 3), "the running mean and variance after evaluation")
    checks.right("in training by the batch, in evaluation by what was remembered")


@checks.explain_errors
def check_layer_norm(layer_norm_backward):
    rng = np.random.default_rng(6)
    x, gy = rng.standard_normal((3, 5)) * 2 + 1, rng.standard_normal((3, 5))

    def cost(x):
        return np.sum(gy * (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True))

    got = checks.numbers(layer_norm_backward, x.copy(), gy, shape=x.shape)
    want = derivative(cost, x)
    checks.expect(
        not np.allclose(got, gy / x.std(axis=1, keepdims=True), atol=1e-6),
        "the mean and the deviation depend on x, too: this is the gradient as if both were constants.",
    )
    checks.same(got, want, "the gradient of x", tolerance=1e-6)
    checks.right("the two terms that are subtracted are what the mean and the deviation contribute")


@checks.explain_errors
def check_dropout(dropout):
    x = np.linspace(1, 2, 20_000).reshape(100, 200)
    y = checks.numbers(dropout, x.copy(), 0.25, np.random.default_rng(7), True, shape=x.shape)
    whole = max(np.mean(y == 0, axis=axis).max() for axis in (0, 1))
    checks.expect(whole < 1, "each number is dropped by itself, not whole rows or columns.")
    dropped = np.mean(y == 0)
    checks.expect(abs(dropped - 0.25) < 0.02, f"with rate 0.25 a quarter is to be 0; in yours it is {dropped:.1%}.")
    kept = y != 0
    checks.expect(
        not np.allclose(y[kept], x[kept]),
        f"the mean of x is {x.mean():.3f}, and that of y {y.mean():.3f}: the layer behind gets less in "
        "training than in "
        "evaluation. Scale what is kept.",
    )
    checks.same(y[kept], x[kept] / 0.75, "what is kept")
    z = checks.numbers(dropout, x.copy(), 0.25, np.random.default_rng(7), False, shape=x.shape)
    checks.expect(np.array_equal(z, x), "in evaluation nothing is dropped and nothing is scaled.")
    checks.right("a quarter is dropped, the mean stays, and in evaluation nothing happens")


@checks.explain_errors
def check_rate(rate):
    steps, warm = 100, 10
    got = np.array([float(checks.numbers(rate, step, 0.2, warm, steps)) for step in range(steps + 1)])
    turns = np.linspace(0, np.pi, steps - warm + 1)
    want = np.concatenate([0.2 * np.arange(1, warm + 1) / warm, 0.1 + 0.1 * np.cos(turns)])

    def draw(*_):
        _, ax = plt.subplots(figsize=(6.4, 2.8))
        ax.plot(want, color=GREY, lw=5, alpha=0.5, label="wanted")
        ax.plot(got, color=RED, label="yours")
        ax.set(title="10 steps of warm-up, then a cosine", xlabel="step", ylabel="learning rate")
        ax.legend()

    checks.expect(got[0] > 0, "the rate of step 0 is 0: a step that moves nothing is lost.", draw)
    checks.same(got[:warm], want[:warm], "the rate in the warm-up", draw=draw)
    checks.same(got, want, "the rate of step 0, 1, ..., 100", draw=draw)
    checks.right("up in ten steps, down along a cosine")


@checks.explain_errors
def check_clip(clip):
    gradients = [np.array([3.0, 0.0]), np.array([[0.0], [4.0]]), np.zeros(3)]
    got = checks.call(clip, [g.copy() for g in gradients], 2.0)
    checks.expect(
        isinstance(got, list | tuple) and [np.shape(g) for g in got] == [g.shape for g in gradients],
        "a list of arrays of the shapes of the gradients is expected.",
    )
    length = np.sqrt(sum(np.sum(np.square(g)) for g in got))
    checks.expect(
        abs(length - 2) < 1e-6,
        "two gradients of length 3 and 4 are 5 long together, and 2 is the limit; after yours they are "
        f"{length:.3g} long.",
    )
    checks.same(
        np.concatenate([np.ravel(g) for g in got]), np.array([6, 0, 0, 8, 0, 0, 0]) / 5, "the clipped gradients"
    )
    short = checks.call(clip, [g / 100 for g in gradients], 1.0)
    checks.expect(
        all(np.allclose(a, g / 100, rtol=1e-12) for a, g in zip(short, gradients, strict=True)),
        "gradients that are shorter than the limit stay as they are.",
    )
    checks.right("the direction stays, only the length is limited")


@checks.explain_errors
def check_folds(folds):
    for count, k in ((10, 5), (23, 4), (7, 7)):
        order = np.random.default_rng(count).permutation(count)
        pairs = checks.call(lambda count=count, k=k, order=order: list(folds(order.copy(), k)))
        checks.expect(len(pairs) == k, f"{k} folds are asked for; yours are {len(pairs)}.")
        learned, tested = (np.concatenate([np.ravel(pair[i]) for pair in pairs]) for i in (0, 1))
        checks.expect(
            sorted(learned) != list(range(count)), "a pair is (indices to learn from, indices to test), in this order."
        )
        checks.expect(
            sorted(tested) == list(range(count)),
            f"of {count} samples in {k} folds each must be tested once; yours tests "
            f"{len(set(tested.tolist()))} of them in "
            f"{len(tested)} tests: what becomes of the remainder?",
        )
        checks.expect(
            tested.tolist() != list(range(count)),
            "the folds are cut from sorted indices, and data are often sorted: cut `order` as it is.",
        )
        sizes = [len(test) for _, test in pairs]
        checks.expect(
            max(sizes) - min(sizes) <= 1, f"the folds should be equally large, up to one; yours have {sizes}."
        )
        for train, test in pairs:
            both = len(set(np.ravel(train).tolist()) & set(np.ravel(test).tolist()))
            checks.expect(
                not both, f"{both} samples are learned from and tested in the same fold: the figure is too good."
            )
            checks.expect(len(train) + len(test) == count, "what is not tested is learned from, all of it.")
    checks.right("each sample is tested once, by a network that has not learned from it")


def draw_valley(kinds, descend, tried):
    """Sixty steps of three methods in a narrow valley, each with the best rate that was tried."""
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3))
    for kind, colour in kinds.items():
        runs = {rate: descend(kind, rate) for rate in tried[kind]}
        costs = {rate: (path**2 @ [0.5, 50.0]) for rate, path in runs.items()}
        best = min(costs, key=lambda rate: costs[rate][-1])
        left.plot(*runs[best].T, ".-", ms=4, color=colour, label=kind)
        right.semilogy(costs[best], color=colour, label=f"{kind}, rate {best}")
    left.set(title="60 steps in a narrow valley", xlabel="$w_0$", ylabel="$w_1$")
    right.set(title="cost", xlabel="step")
    right.legend()
    plt.show()


def draw_vanishing(errors, DEPTH, setups):
    """Length of the error in each of 30 layers, for three kinds of layers."""
    _, ax = plt.subplots(figsize=(7, 3))
    for name, norms in errors.items():
        ax.semilogy(range(1, DEPTH + 1), norms, "o-", ms=3, color=setups[name][-1], label=name)
    ax.set(title="Length of the error in each of 30 layers", xlabel="layer", ylabel="of the last layer's")
    ax.legend()
    plt.show()


def draw_regularised(regularised):
    """Errors on training labels and on new digits."""
    _, ax = plt.subplots(figsize=(7, 2.4))
    for i, (name, colour) in enumerate((("training labels, a quarter of them wrong", BLUE), ("new digits", ORANGE))):
        places = np.arange(3) + 0.2 * (2 * i - 1)
        bars = ax.barh(places, [e[i] for e in regularised.values()], 0.38, color=colour, label=name)
        ax.bar_label(bars, fmt=" %.1f%%")
    ax.set_yticks(range(3), regularised)
    ax.invert_yaxis()
    ax.set(title="60 epochs, three seeds", xlabel="errors (%)", xlim=(0, 48))
    ax.legend(loc="lower right")
    plt.show()


def draw_wrong_digits(wrong_digits, x_all, y_all):
    """Digits that were taken for another one, with their labels."""
    _, axes = plt.subplots(2, 12, figsize=(11, 2.2))
    for ax in axes.flat:
        ax.axis("off")
    for ax, i in zip(axes.flat, wrong_digits, strict=False):
        ax.imshow(x_all[i].reshape(8, 8))
        ax.set_title(y_all[i], loc="center", weight="normal")
    plt.show()
