"""The checks and pictures of 19_long_sequences.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, ORANGE


@checks.explain_errors
def check_mask(mask):
    for size, length in ((1, 8), (4, 64), (3, 24)):
        chunk = length // (2 * size)
        parts = []
        for r in range(size):
            parts.append([c * chunk + i for c in (r, 2 * size - 1 - r) for i in range(chunk)])
        for one in range(size):
            for two in range(size):
                got = np.asarray(checks.call(mask, np.array(parts[one]), np.array(parts[two])))
                checks.expect(
                    got.shape == (2 * chunk, 2 * chunk),
                    f"a row for each of {2 * chunk} queries, a column for each of {2 * chunk} keys; yours: "
                    f"{got.shape}.",
                )
                want = np.array([[key <= query for key in parts[two]] for query in parts[one]])
                future = np.logical_and(got, ~want).sum()
                checks.expect(
                    not future,
                    f"queries of rank {one}, keys of rank {two}: {future} pairs look into the future. Which "
                    "row a position has in its "
                    "part says nothing; its place in the sequence does.",
                )
                checks.expect(
                    (got == want).all(),
                    f"queries of rank {one}, keys of rank {two}: {int((want & ~got).sum())} pairs are hidden "
                    "that may be seen; a "
                    "position sees itself.",
                )
    checks.right("by positions, whichever rank has them")


def draw_waits(waits, lengths, attention):
    """Seconds that ring and Ulysses wait, over the length."""
    _, ax = plt.subplots(figsize=(6.4, 3.2))
    for (name, times), color in zip(waits.items(), (BLUE, ORANGE), strict=True):
        ax.loglog(lengths, times, "o-", ms=3, color=color, label=f"waits, {name}")
    ax.loglog(lengths, [3.5 * a / 8 for a in attention], "--", color=GREY, label="computes")
    ax.set(title="One layer's attention on 8 ranks", xlabel="positions", ylabel="seconds")
    ax.legend()
    plt.show()


def draw_pairs(contiguous, counts):
    """Pairs of queries and keys that each rank computes."""
    _, ax = plt.subplots(figsize=(6, 2.6))
    places = np.arange(len(counts))
    ax.bar(places - 0.2, contiguous, 0.4, color=GREY, label="contiguous")
    ax.bar(places + 0.2, counts, 0.4, color=BLUE, label="yours")
    ax.set(title="Pairs of queries and keys", xlabel="rank", xticks=places)
    ax.legend()
    plt.show()
