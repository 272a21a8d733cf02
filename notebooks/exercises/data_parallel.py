"""The checks and pictures of 08_data_parallel.py."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, ORANGE, PINK, RED


def draw_paths(path, alone):
    """Each weight over the steps: in grey one process, in colour what the ranks have."""
    _, axes = plt.subplots(1, 3, figsize=(11, 2.6))
    for k, ax in enumerate(axes):
        ax.plot(alone[:, k], color=GREY, lw=5, alpha=0.5, label="one process")
        for r, each in enumerate(path):
            ax.plot(np.array(each)[:, k], color=(RED, ORANGE, PINK, BLUE)[r], label=f"rank {r}")
        ax.set(title=f"w[{k}]", xlabel="step")
    axes[0].legend()


def walks(X, y, size, steps=40, rate=0.2):
    """Paths of rank 0 with each of the mistakes that one makes: name -> path."""
    shares = [(X[r::size], y[r::size]) for r in range(size)]

    def walk(step):
        w, path = np.zeros(X.shape[1]), []
        for _ in range(steps):
            w = w - rate * step(w)
            path.append(w)
        return np.array(path)

    def sums(w, r):
        x, targets = shares[r]
        return x.T @ (x @ w - targets)

    counts = [len(targets) for _, targets in shares]
    return {
        "the gradients are not summed: each rank has a model of its own, from its own samples": walk(
            lambda w: sums(w, 0) / counts[0]
        ),
        "each rank has divided by all samples, and nothing was summed: most of the gradient is missing": walk(
            lambda w: sums(w, 0) / len(y)
        ),
        f"each rank divides by its own number of samples, and {size} such means are summed: the step is about "
        f"{size} times too "
        "long": walk(lambda w: sum(sums(w, r) / counts[r] for r in range(size))),
        "the mean of the ranks' means is not the mean over all samples: ranks have different numbers of them": walk(
            lambda w: sum(sums(w, r) / counts[r] for r in range(size)) / size
        ),
    }


@checks.explain_errors
def check_ranks(path, alone, X, y):
    """Every rank has the path of one process; a known mistake is named."""
    for mistake, wrong in walks(X, y, len(path)).items():
        got = np.array(path[0])
        checks.expect(
            got.shape != wrong.shape or not np.allclose(got, wrong, rtol=1e-9),
            f"{mistake}.",
            lambda: draw_paths(path, alone),
        )
    for rank, each in enumerate(path):
        name = f"the path of rank {rank}"
        checks.same(np.array(each), alone, name, tolerance=1e-12, draw=lambda *_: draw_paths(path, alone))
    checks.expect(
        all(np.array_equal(each, path[0]) for each in path),
        "the ranks' weights differ in their last bits: why are they not equal?",
    )
    checks.right("the ranks make the steps of one process, with the same bits on all")


@checks.explain_errors
def check_server(path, alone, X, y, gradient):
    """As `check_ranks`; the server's sum is in the order of the ranks."""
    workers = len(path) - 1
    w, want, last = np.zeros(3), [], np.zeros(3)
    only_last = []
    for _ in range(len(alone)):
        total = np.zeros(3)
        for r in range(workers):
            total += gradient(w, X[r::workers], y[r::workers], len(X))
        w = w - 0.2 * total
        want.append(w)
        last = last - 0.2 * gradient(last, X[workers - 1 :: workers], y[workers - 1 :: workers], len(X))
        only_last.append(last)
    checks.expect(
        not np.allclose(path[-1], only_last, rtol=1e-9),
        "the server makes its step with what came last alone: what came before has been overwritten.",
        lambda: draw_paths(path, alone),
    )
    for rank, each in enumerate(path):
        name = f"rank {rank}, {'a worker' if rank < workers else 'the server'}: its path"
        checks.same(np.array(each), alone, name, tolerance=1e-12, draw=lambda *_: draw_paths(path, alone))
    first = next((step for step in range(len(want)) if not np.array_equal(path[-1][step], want[step])), None)
    checks.expect(
        first is None,
        f"the sum is right but for its last bits, from step {first} on: worker 0 is late here, and you have "
        "added in the order "
        "in which gradients came. Another run gives other bits. Receive from worker 0 first, then from 1, and so on.",
    )
    checks.right("workers and server have the steps of one process, with the same bits in every run")


@checks.explain_errors
def check_combine(combine):
    rng = np.random.default_rng(12)
    for counts in ((5, 1, 3, 2), (4, 4, 4), (7,)):
        samples = [rng.standard_normal((n, 6)) for n in counts]
        got = checks.numbers(combine, [s.mean(axis=0) for s in samples], list(counts), shape=(6,))
        checks.same(
            got, np.concatenate(samples).mean(axis=0), f"the mean over all samples, of ranks with {list(counts)}"
        )
    checks.right("each rank's mean counts as often as the rank has samples")


@checks.explain_errors
def check_buckets(buckets):
    for sizes, limit in (([4, 4, 4, 4], 8), ([1, 2, 3, 4, 5], 6), ([10, 1, 1], 4), ([3], 100)):
        got = checks.call(buckets, list(sizes), limit)
        checks.expect(
            isinstance(got, list) and all(isinstance(bucket, list | tuple | range) and len(bucket) for bucket in got),
            "a list of lists of layer numbers is expected, none of them empty.",
        )
        order = [layer for bucket in got for layer in bucket]
        checks.expect(
            order == list(reversed(range(len(sizes)))),
            f"backward finishes the last layer first, so buckets are filled from there: the layers in order are "
            f"{list(reversed(range(len(sizes))))}, yours {order}.",
        )
        for bucket in got:
            total = sum(sizes[layer] for layer in bucket)
            checks.expect(
                total <= limit or len(bucket) == 1,
                f"sizes {sizes}, limit {limit}: the bucket of layers {list(bucket)} has {total}.",
            )
        for one, two in pairwise(got):
            together = sum(sizes[layer] for layer in one) + sizes[two[0]]
            checks.expect(
                together > limit,
                f"sizes {sizes}, limit {limit}: layer {two[0]} would fit into the bucket before it: {together} in all.",
            )
    checks.right("from the last layer to the first, as full as the limit allows")


@checks.explain_errors
def check_overlap(step_seconds):
    rng = np.random.default_rng(13)
    for case in ("slow network", "fast network", "mixed"):
        backward = rng.uniform(1, 3, 5)
        sums = backward * {"slow network": 3, "fast network": 0.2, "mixed": 1}[case] * rng.uniform(0.5, 1.5, 5)
        free = ready = 0.0
        for k in range(5):  # event by event: bucket k is ready, and the network is free, then it leaves
            ready += backward[k]
            free = (ready if ready > free else free) + sums[k]
        got = float(checks.numbers(step_seconds, 4.0, backward.tolist(), sums.tolist()))
        alone = 4 + backward.sum() + sums.sum()
        checks.expect(
            not np.isclose(got, alone) or np.isclose(free + 4, alone),
            f"{case}: {got:.3g} seconds is everything one after the other; a bucket may leave while backward goes on.",
        )
        checks.expect(
            not np.isclose(got, 4 + max(backward.sum(), sums.sum())),
            f"{case}: {got:.3g} seconds is as if sums and backward ran side by side from the start. The first "
            "bucket must be full "
            "before it leaves, and the last one leaves when backward is over.",
        )
        checks.same(got, 4 + free, f"seconds of a step, {case}")
    checks.right("a bucket leaves when it is full and the network is free")


def draw_overlap(step_seconds):
    """Seconds of a step over the number of buckets, for two networks."""
    _, ax = plt.subplots(figsize=(7, 2.8))
    counts = [1, 2, 4, 5, 10, 20]
    for network_seconds, colour in ((4.0, BLUE), (8.0, RED)):
        times = [step_seconds(4.0, [8.0 / n] * n, [network_seconds / n + 0.15] * n) for n in counts]
        ax.plot(
            counts, times, "o-", color=colour, label=f"sums of {network_seconds:g} s in all, and 0.15 s for each start"
        )
    ax.set(title="a step of 12 s of computation", xlabel="buckets", ylabel="seconds of a step", ylim=(11, 21))
    ax.legend()
    plt.show()


def draw_busiest(moved, ranks, seconds, sizes):
    """What the busiest rank carries, and seconds of a step, over the number of ranks."""
    looks = dict(zip(moved, ((GREY, "-"), (RED, "-"), (ORANGE, "-"), (BLUE, "-"), ("k", ":")),
                     strict=True))  # fmt: skip
    _, (left, right) = plt.subplots(1, 2, figsize=(11.5, 3.8))
    for name, each in moved.items():
        left.plot(ranks, each, label=name, color=looks[name][0], ls=looks[name][1], lw=2.4 if name[0] == "r" else 1.8)
    left.set(xlabel="ranks", ylabel="vectors of n", ylim=(0, 12), title="what the busiest rank carries in a step")
    left.legend()
    for name, each in seconds.items():
        right.loglog(sizes, each, marker="o", color=looks[name][0], ls=looks[name][1], label=name)
    right.set_xticks(sizes, sizes)
    right.set_xticks([], minor=True)
    right.set(xlabel="ranks", ylabel="seconds a step", title="25 million parameters, 10 Gbit/s")
    plt.show()
