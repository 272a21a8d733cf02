"""The checks and pictures of 03_digits.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, SKY
from nn.analysis import inspection


@checks.explain_errors
def check_parts(three_parts):
    for count, validation, test in ((100, 20, 30), (57, 5, 10)):
        parts = checks.several(3, three_parts, np.random.default_rng(count), count, validation, test)
        sizes = [np.size(part) for part in parts]
        checks.expect(
            sizes == [count - validation - test, validation, test],
            f"of {count} samples {validation} for validation and {test} for the test leave "
            f"{count - validation - test} for "
            f"training; yours have {sizes}.",
        )
        once = sorted(int(i) for part in parts for i in part)
        checks.expect(
            len(set(once)) == len(once), "some samples are in two parts: what is tested has been learned from before."
        )
        checks.expect(once == list(range(count)), f"each index from 0 to {count - 1} belongs to one part.")
        order = np.concatenate(parts)
        checks.expect(
            not (np.sort(parts[2]) == np.arange(count)[-test:]).all() and np.mean(np.abs(np.diff(order)) == 1) < 0.5,
            "the samples are in their old order: data are often sorted, by class or by writer. Shuffle first.",
        )
    checks.right("three parts without a sample in common, by chance")


@checks.explain_errors
def check_neighbours(shifted_copies):
    images = np.random.default_rng(0).random((3, 8, 8)) + 0.1
    got = checks.numbers(shifted_copies, images.copy(), shape=(15, 8, 8))
    want = [images]
    for rows, columns in ((0, 1), (0, -1), (1, 0), (-1, 0)):
        padded = np.zeros((3, 10, 10))
        padded[:, 1 + rows : 9 + rows, 1 + columns : 9 + columns] = images
        want.append(padded[:, 1:9, 1:9])
    rolled = np.concatenate([images, *(np.roll(images, by, axis) for axis in (2, 1) for by in (1, -1))])

    def draw(got=got):
        _, axes = plt.subplots(1, 5, figsize=(8, 1.9))
        for i, ax in enumerate(axes):
            ax.imshow(got[3 * i])
            ax.set_title(f"yours: copy {i}", loc="center")
            ax.axis("off")

    checks.expect(
        not np.allclose(*(np.sort(each.reshape(15, -1)) for each in (got, rolled))),
        "what leaves the image on one side comes in on the other; paper (0) should come in.",
        draw,
    )
    checks.same(got, np.concatenate(want), "the copies: as they are, right, left, down, up", draw=lambda *_: draw())
    checks.right("five images for each: as it is, and shifted to its four neighbours")


def draw_spread(got, want):
    _, ax = plt.subplots(figsize=(6.4, 2.8))
    ax.semilogy(range(1, 11), got, "o-", color=RED, label="yours")
    ax.semilogy(range(1, 11), want, color=GREY, lw=5, alpha=0.5, label="wanted")
    ax.set(xlabel="layer", title="how the weighted inputs scatter")
    ax.legend()


def draw_confusion(counts, ax, title):
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in np.argwhere(counts):
        colour = "white" if shares[i, j] > 0.5 else RED
        ax.text(j, i, int(counts[i, j]), ha="center", va="center", color=colour, size=9)
    ax.set(title=title, xlabel="the network says", ylabel="it is", xticks=range(10), yticks=range(10))


def draw_regions(points, spiral, trained):
    """What classifiers of the spirals decide; trained: hidden layers -> (trainer, share of points that are right)."""
    edge = np.abs(points).max() * 1.08
    names = {(): "no hidden layer", (4,): "4 hidden neurons", (16, 16): "two layers of 16"}
    _, axes = plt.subplots(1, 3, figsize=(11.5, 3.9), sharey=True)
    for ax, (hidden, (trainer, accuracy)) in zip(axes, trained.items(), strict=True):
        xs, ys, regions = inspection.decision_regions(trainer, (-edge, -edge), (edge, edge), 120)
        ax.contourf(xs, ys, regions, [-0.5, 0.5, 1.5], colors=[SKY, ORANGE], alpha=0.45)
        for k, colour, mark in ((0, BLUE, "o"), (1, RED, "^")):
            ax.plot(*points[spiral == k].T, mark, ms=3.2, color=colour)
        ax.set_title(f"{names[hidden]}: {accuracy:.0%} right")
        ax.set(xlim=(-edge, edge), ylim=(-edge, edge))
    plt.show()


def draw_parts(x_train, y_train, y_validation, y_test):
    """Means of the training digits, and how many of each digit there are in each part."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10.5, 2.6), width_ratios=(1.6, 1))
    means = np.concatenate([x_train[y_train == k].mean(axis=0).reshape(8, 8) for k in range(10)], axis=1)
    left.imshow(means)
    left.set_title("the mean of all training digits of a kind")
    left.axis("off")
    for i, (name, labels, colour) in enumerate(
        (
            ("training", y_train, BLUE),
            ("validation", y_validation, ORANGE),
            ("test", y_test, GREEN),
        )
    ):
        counts = np.bincount(labels, minlength=10)
        right.bar(np.arange(10) + 0.27 * (i - 1), counts, 0.27, color=colour, label=f"{name}: {len(labels):,}")
    right.set(title="how many of each", xticks=range(10), ylim=(0, 200))
    right.legend(ncols=3, fontsize=8, loc="upper center", columnspacing=1, handlelength=1)
    plt.show()


def draw_first_weights(accuracies, new_trainer):
    """Validation accuracy over epochs, from four kinds of first weights."""
    _, ax = plt.subplots(figsize=(7, 3))
    for (name, scale), colour in zip(
        {"$1/\\sqrt{n}$": 1, "0": 0, "ten times as large": 10, "forty times": 40}.items(),
        (BLUE, RED, ORANGE, PINK),
        strict=True,
    ):
        ax.plot(range(1, 9), 100 * np.array(accuracies(new_trainer(scale), 8)), ".-", color=colour, label=name)
    ax.set(xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 101), title="first weights")
    ax.legend(loc="center right")
    plt.show()


def draw_two_costs(history, training_cost, validation_cost, best, last):
    """Training and validation cost over epochs; where it is stopped, and the best epoch."""
    _, ax = plt.subplots(figsize=(7.4, 3.2))
    epochs = np.arange(1, len(history) + 1)
    ax.semilogy(epochs, training_cost, color=BLUE, label="training")
    ax.semilogy(epochs, validation_cost, color=ORANGE, label="validation")
    ax.plot(best + 1, validation_cost[best], "*", ms=15, color=RED, zorder=5, label=f"the best: epoch {best + 1}")
    ax.axvline(last + 1, color=GREY, ls="--", lw=1.2)
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    ax.annotate("here we stop", (last + 1, 0.93), (6, 0), color=GREY, **place)
    ax.set(xlabel="epoch", ylabel="cost", title="200 digits to learn from")
    ax.legend()
    plt.show()


def draw_mistakes(missed, x_validation, y_validation, output, confidence, hit):
    """Ten mistakes, the surest first; how sure the network was of right and wrong answers."""
    fig = plt.figure(figsize=(11, 2.6))
    grid = fig.add_gridspec(1, 2, width_ratios=(1.5, 1))
    panel = grid[0].subgridspec(1, max(len(missed), 1))
    for k, i in enumerate(missed):
        ax = fig.add_subplot(panel[k])
        ax.imshow(x_validation[i].reshape(8, 8))
        ax.set_title(f"{y_validation[i]} as {output[i].argmax()}\n{confidence[i]:.0%}", loc="center", fontsize=10)
        ax.axis("off")
    ax = fig.add_subplot(grid[1])
    bins = np.linspace(0, 1, 21)
    ax.hist(confidence[hit], bins, color=BLUE, alpha=0.8, label="right")
    ax.hist(confidence[~hit], bins, color=RED, label="wrong")
    ax.set(yscale="log", xlabel="confidence", ylabel="digits", title="all validation digits")
    ax.legend(loc="upper left")
    plt.show()


def draw_neurons(trainer, HIDDEN, sigma, x_train, y_train):
    """Weights of each hidden neuron as an image, and its mean activation for each digit."""
    fig = plt.figure(figsize=(11, 5))
    grid = fig.add_gridspec(2, 1, height_ratios=(1.2, 1))
    panel = grid[0].subgridspec(3, 10, wspace=0.02)
    most = np.abs(trainer.p[0].W).max() * 0.7
    for neuron in range(HIDDEN):
        ax = fig.add_subplot(panel[neuron // 10, neuron % 10])
        ax.imshow(trainer.p[0].W[:, neuron].reshape(8, 8), cmap="RdBu", vmin=-most, vmax=most)
        ax.axis("off")
    ax = fig.add_subplot(grid[1])
    hidden = sigma(x_train @ trainer.p[0].W + trainer.p[0].b)
    shown = ax.imshow(
        [hidden[y_train == k].mean(axis=0) for k in range(10)], cmap="Greys", vmin=0, vmax=1, aspect="auto"
    )
    ax.set(xlabel="hidden neuron", ylabel="digit", yticks=range(10), title="mean activation")
    fig.colorbar(shown, ax=ax, pad=0.01)
    plt.show()


def draw_shifted(trainer, augmented, y_validation, shifted):
    """Accuracy of two networks on digits that are shifted."""
    _, ax = plt.subplots(figsize=(7, 2.4))
    for i, (name, which, colour) in enumerate(
        (("digits as they are", trainer, ORANGE), ("five copies of each", augmented, BLUE))
    ):
        right_ = [100 * np.mean(which.predict(images).argmax(axis=1) == y_validation) for images in shifted]
        ax.bar(np.arange(5) + 0.4 * i - 0.2, right_, 0.38, color=colour, label=f"learned from {name}")
    ax.set_xticks(range(5), ["as it is", "right", "left", "down", "up"])
    ax.set(title="validation digits, shifted by a pixel", ylabel="accuracy (%)", ylim=(0, 130))
    ax.legend(ncols=2)
    plt.show()


@checks.explain_errors
def check_stop(early_stop):
    for costs, patience, want in (
        ([5, 4, 3, 3.5, 3.2, 3.1, 2.9], 3, (2, 5)),
        ([5, 4, 3, 3.5, 3.2, 2.9, 3.0, 3.1], 3, (5, 7)),
        ([5, 4, 3, 2], 2, (3, 3)),
        ([5, 3, 3, 3, 3, 2], 3, (1, 4)),
        ([1, 2, 3, 4, 5], 2, (0, 2)),
    ):

        def draw(got, want, costs=costs):
            _, ax = plt.subplots(figsize=(6.4, 2.8))
            ax.plot(costs, "o-", color=GREY)
            for epoch, y, name, colour in ((want, 0.02, "wanted", INK), (got, 0.12, "yours", RED)):
                ax.axvspan(*epoch, color=colour, alpha=0.15)
                words = f"{name}: best {epoch[0]:g}, stop {epoch[1]:g}"
                ax.text(epoch[0], y, words, color=colour, transform=ax.get_xaxis_transform())
            ax.set(xlabel="epoch", ylabel="validation cost")

        got = checks.several(2, early_stop, np.array(costs), patience)
        checks.same(got, want, f"with patience {patience}, of {costs}", draw=draw)


@checks.explain_errors
def check_confusion(confusion, labels):
    """On digits whose mistakes are known: every 7th is said to be one more."""
    known = np.where(np.arange(len(labels)) % 7 == 0, (labels + 1) % 10, labels)

    def draw(got, want):
        _, axes = plt.subplots(1, 2, figsize=(9, 4.2))
        for ax, counts, title in zip(axes, (got, want), ("yours", "wanted"), strict=True):
            draw_confusion(counts, ax, title)

    want = inspection.confusion_matrix(known, labels, 10)
    checks.same(checks.call(confusion, known, labels), want, "the counts", draw=draw)
    checks.right("rows are what it is, columns are what is said")


@checks.explain_errors
def check_mistakes(mistakes):
    output = np.random.default_rng(5).random((12, 10))
    labels = output.argmax(axis=1)
    labels[::2] = (labels[::2] + 3) % 10  # every second one is wrong
    want = sorted(range(0, 12, 2), key=lambda i: -output[i].max())

    def draw(got, want):
        _, ax = plt.subplots(figsize=(6.4, 2.6))
        for places, colour, name in ((want, GREY, "wanted"), (got, RED, "yours")):
            there = [int(i) for i in places if -12 <= i < 12]
            ax.plot(output[there].max(axis=1), "o-", color=colour, label=f"{name}: {len(places)} samples")
        ax.set(xlabel="place in the list", ylabel="confidence")
        ax.legend()

    got = checks.call(mistakes, output, labels)
    checks.expect(
        np.shape(got) == (6,),
        f"6 of the 12 samples are wrong, and their indices are expected in an array; yours has {np.size(got)}.",
        lambda: draw(np.ravel(got) if np.ndim(got) else np.zeros(0), np.array(want)),
    )
    checks.same(got, want, "the mistakes, the surest first", draw=draw)
    checks.right("the most surely wrong come first")


@checks.explain_errors
def check_first_weights(first_weights):
    """Ten layers of 300 and 100 neurons, one after the other, without a squeeze in between."""
    weights = checks.call(first_weights, np.random.default_rng(0), 64, 30)
    checks.expect(np.shape(weights) == (64, 30), f"the weights have the shape {np.shape(weights)}, not (64, 30).")
    rng = np.random.default_rng(0)
    x, spreads = rng.standard_normal((200, 300)), []
    for inputs, outputs in 5 * [(300, 100), (100, 300)]:
        x = x @ checks.call(first_weights, rng, inputs, outputs)
        spreads.append(x.std())
    checks.same(np.array(spreads), np.ones(10), "the scatter after each layer", tolerance=0.3, draw=draw_spread)
    checks.right("it neither explodes nor vanishes, through ten layers")
