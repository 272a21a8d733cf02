"""The checks of 15_laws.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, RED
from exercises.messages import check_fit as fit_of_messages  # the same line, from the same equations

__all__ = ["check_hiding", "check_step", "check_sum", "fit_of_messages"]


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


def draw_line(ax, n, t, fits):
    """Measured points, and lines."""
    ax.loglog(n, 1e6 * t, "o", color=BLUE, label="measured")
    for name, (alpha, beta), colour in fits:
        ax.loglog(n, 1e6 * np.maximum(alpha + beta * n, 1e-9), color=colour, label=name)
    ax.set(xlabel="bytes", ylabel="microseconds", ylim=(0.5 * 1e6 * t.min(), 2e6 * t.max()))
    ax.legend()
