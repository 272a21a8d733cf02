"""The checks and pictures of 15_laws.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED
from exercises import messages
from parallel.planning import laws


@checks.explain_errors
def check_sum(sum_seconds, nbytes, inside, between):
    """Against rings message by message: each GPU of a node sends its eighth through the one port."""
    for M in (1, 2, 16, 128):
        seconds = 0.0
        for _ in range(2 * 7):
            seconds += inside[0] + inside[1] * nbytes / 8
        for _ in range(2 * (M - 1)):
            seconds += between[0] + 8 * between[1] * (nbytes / 8) / M
        got = float(checks.numbers(sum_seconds, M))
        eighth = seconds - 2 * (M - 1) / M * nbytes * between[1] * 7 / 8
        checks.expect(
            M == 1 or not np.isclose(got, eighth, rtol=1e-9),
            f"{M} nodes: an eighth of the bytes is one GPU's. All eight of a node send theirs, through one port.",
        )
        checks.same(got, seconds, f"seconds of the sum on {M} nodes")
    checks.right("message by message the same")


@checks.explain_errors
def check_step(my_step, sum_seconds, compute, nodes):
    got = np.array([float(checks.numbers(my_step, M)) for M in nodes])
    want = []
    for M in nodes:  # a clock: the sum begins when backward does
        begin, sums = compute / 3, sum_seconds(M)
        ends = sorted([begin + 2 / 3 * compute, begin + sums])
        want.append(ends[1])

    def draw(got, want):
        _, ax = plt.subplots(figsize=(6.8, 3))
        gpus = 8 * np.array(nodes)
        ax.loglog(gpus, 1e3 * np.asarray(want), color=GREY, lw=5, alpha=0.5, label="wanted")
        ax.loglog(gpus, 1e3 * got, "o-", color=RED, label="yours")
        ax.loglog(gpus, [1e3 * sum_seconds(M) for M in nodes], ":", color=BLUE, label="the sum alone")
        ax.set_xticks(gpus, [f"{n:,}" for n in gpus], fontsize=8)
        ax.set(xlabel="GPUs", ylabel="ms a step", title="ResNet-50, 64 images a GPU")
        ax.legend()

    checks.same(got, want, "seconds of a step on 1, 2, 4, ... nodes, 1,024 and 2,048", draw=draw)
    checks.right(
        f"the sum takes {1e3 * sum_seconds(128):.1f} ms on 128 nodes, and backward "
        f"{1e3 * 2 / 3 * compute:.1f}: it hides"
    )
    draw(got, want)
    plt.show()
    return got


@checks.explain_errors
def check_hiding(fewest, sum_seconds, images_per_second):
    for M in (2, 32, 128, 2048):
        want = next(n for n in range(1, 100_000) if 2 / 3 * n / images_per_second >= sum_seconds(M))
        got = float(checks.numbers(fewest, M))
        checks.expect(
            got == want,
            f"on {M:,} nodes the sum takes {1e3 * sum_seconds(M):.2f} ms: backward of {want} images is the "
            "shortest that is as long; "
            f"yours says {got:g}.",
        )
    checks.right("as tried one by one")


def check_fit(fit, n, t):
    """The same line as in notebook 5, from the same equations."""
    return messages.check_fit(fit, n, t)


def draw_measured(n, t, alpha, beta):
    """Seconds of messages, measured, and the line."""
    _, ax = plt.subplots(figsize=(6.8, 3.2))
    ax.loglog(n, 1e6 * t, "o", color=BLUE, label="measured")
    line = 1e6 * np.maximum(alpha + beta * n, 1e-9)
    ax.loglog(n, line, color=RED, label=f"{1e6 * alpha:.2g} us + n / ({1e-9 / beta:.2g} GB/s)")
    ax.set(xlabel="bytes", ylabel="microseconds", ylim=(0.5 * 1e6 * t.min(), 2e6 * t.max()))
    ax.set_title("Two ranks of this computer")
    ax.legend()
    plt.show()


def powers_of_two(ax, values, which="x"):
    """A logarithmic axis with the values themselves."""
    getattr(ax, f"set_{which}scale")("log")
    getattr(ax, f"set_{which}ticks")(values, [f"{v:,}" for v in values])
    getattr(ax, f"set_{which}ticks")([], minor=True)


@checks.explain_errors
def check_shares(serial_share):
    """Of work that is 5% serial, from its speedups by Amdahl's law."""
    tried = np.array([2, 4, 8, 16, 32, 64])
    want = np.full(6, 0.05)

    def draw(got, want):
        _, ax = plt.subplots(figsize=(6.4, 2.8))
        ax.plot(tried, 100 * want, color=GREY, lw=5, alpha=0.5, label="wanted")
        ax.plot(tried, 100 * got, "o-", color=RED, label="yours")
        powers_of_two(ax, tried)
        ax.set(xlabel="ranks", ylabel="serial share (%)", title="from the speedups of work that is 5% serial")
        ax.set_ylim(0, max(8, 110 * got.max()))
        ax.legend()

    speedups = 1 / (0.05 + 0.95 / tried)
    got = np.array([checks.numbers(serial_share, s, int(p)) for s, p in zip(speedups, tried, strict=True)])
    checks.same(got, want, "the serial share of work that is 5% serial, on 2, 4, ... ranks", draw=draw)
    checks.right("5% from any number of ranks")
    draw(got, want)


def draw_amdahl(ranks):
    """Speedup and efficiency for four serial shares."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    for serial, colour in ((0.001, BLUE), (0.01, GREEN), (0.05, ORANGE), (0.2, RED)):
        speedup = np.array([laws.amdahl(p, 1 - serial) for p in ranks])
        left.plot(ranks, speedup, color=colour, label=f"{serial:.1%} serial: at most {1 / serial:,.0f}")
        right.plot(ranks, 100 * speedup / ranks, color=colour)
    left.plot(ranks, ranks, ":", color=GREY)
    left.set(xlabel="ranks", ylabel="times as fast", title="Amdahl: the same work", yscale="log")
    right.set(xlabel="ranks", ylabel="efficiency (%)", title="What is left of each rank")
    for ax in (left, right):
        powers_of_two(ax, ranks[::2])
    left.legend()
    plt.show()


def draw_programs(serial_program, chatty, my_serial_share):
    """Speedups of two programs, and their serial shares."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    for name, runs, colour in (
        ("6% serial", serial_program, BLUE),
        ("all parallel, but it talks: log2 p", chatty, RED),
    ):
        p = list(runs)
        left.plot(p, [runs[1] / t for t in runs.values()], "o-", color=colour, label=name)
        shares = [100 * my_serial_share(runs[1] / runs[n], n) for n in p[1:]]
        right.plot(p[1:], shares, "o-", color=colour, label=name)
    left.set(xlabel="ranks", ylabel="times as fast", title="Speedups look alike")
    right.set(xlabel="ranks", ylabel="serial share (%)", title="Karp-Flatt tells them apart", ylim=(0, None))
    for ax in (left, right):
        powers_of_two(ax, [2, 4, 8, 16, 32])
        ax.legend()
    plt.show()


def draw_scaling(nodes, got, library, without):
    """Efficiency over the number of GPUs, predicted and published."""
    _, ax = plt.subplots(figsize=(7.4, 3.2))
    gpus = 8 * np.array(nodes)
    ax.plot(gpus, 100 * got[0] / got, "o-", color=RED, label=f"by hand: {got[0] / got[-1]:.1%}")
    ax.plot(gpus, 100 * library[0] / library, "s-", color=BLUE, label=f"the library: {library[0] / library[-1]:.1%}")
    ax.plot(
        gpus, 100 * without[0] / without, "^-", color=ORANGE, label=f"without overlap: {without[0] / without[-1]:.1%}"
    )
    ax.plot(1024, 99.2, "*", ms=15, color=INK, label="published: 99.2%")
    powers_of_two(ax, list(gpus))
    ax.set(xlabel="GPUs", ylabel="efficiency against one node (%)", title="Weak scaling of ResNet-50", ylim=(60, 102))
    ax.legend()
    plt.show()


def draw_published(published, found, bare):
    """Published and predicted efficiencies."""
    _, ax = plt.subplots(figsize=(7.4, 2.8))
    for i, (values, name, colour) in enumerate(
        ((published, "published", GREY), (found, "predicted", BLUE), (bare, "predicted, no overlap", ORANGE))
    ):
        ax.bar_label(
            ax.bar(np.arange(3) + 0.27 * (i - 1), values.values(), 0.26, color=colour, label=name),
            fmt="%.0f",
            fontsize=9,
        )
    ax.set_xticks(range(3), published)
    ax.set(ylabel="efficiency (%)", title="512 GPUs, 25 Gbit/s for four", ylim=(0, 125))
    ax.legend(ncols=3)
    plt.show()


def draw_days(published, predicted):
    """Days of two large runs."""
    _, ax = plt.subplots(figsize=(8, 2.2))
    for place, days, colour, name in ((-0.2, published, GREY, "published"), (0.2, predicted, BLUE, "predicted")):
        bars = ax.barh(np.arange(len(days)) + place, days.values(), 0.38, color=colour, label=name)
        ax.bar_label(bars, fmt=" %.1f days")
    ax.set_yticks(range(len(published)), published, fontsize=9)
    ax.invert_yaxis()
    ax.set(xlabel="days", title="Two large runs", xlim=(0, 100))
    ax.legend(loc="upper right")
    plt.show()
