"""The checks of 03_digits.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks


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
    ax.semilogy(range(1, 11), got, "o-", color=checks.RED, label="yours")
    ax.semilogy(range(1, 11), want, color=checks.GREY, lw=5, alpha=0.5, label="wanted")
    ax.set(xlabel="layer", title="how the weighted inputs scatter")
    ax.legend()


def draw_confusion(counts, ax, title):
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in np.argwhere(counts):
        colour = "white" if shares[i, j] > 0.5 else checks.RED
        ax.text(j, i, int(counts[i, j]), ha="center", va="center", color=colour, size=9)
    ax.set(title=title, xlabel="the network says", ylabel="it is", xticks=range(10), yticks=range(10))
