"""The checks and pictures of 05_messages.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED
from collectives import Send


@checks.explain_errors
def check_share(share):
    for count, size in ((20, 4), (10, 4), (7, 3), (2, 5)):
        got = [checks.several(2, share, rank, size, count) for rank in range(size)]
        checks.expect(
            all(isinstance(end, int | np.integer) for ends in got for end in ends),
            f"{count} samples on {size} ranks: the shares {got} must begin and end with whole numbers.",
        )
        lengths = [hi - lo for lo, hi in got]
        first = [0, *(hi for _, hi in got)]
        checks.expect(
            [lo for lo, _ in got] == first[:-1] and first[-1] == count,
            f"{count} samples on {size} ranks: the shares {got} do not follow each other from 0 to {count}.",
        )
        checks.expect(
            max(lengths) - min(lengths) <= 1,
            f"{count} samples on {size} ranks: yours have {lengths}. All wait for the rank with the most: "
            "spread the remainder.",
        )
    checks.right("every sample has one rank, and no rank has more than one above another")


@checks.explain_errors
def check_line(smooth, start):
    """`smooth` and `start` have a list of numbers for each rank: after, and before."""
    line = np.concatenate([np.ravel(part) for part in start])
    want = (np.roll(line, 1) + line + np.roll(line, -1)) / 3
    got = np.concatenate([np.ravel(part) for part in smooth])
    checks.expect(
        got.shape == want.shape, f"each rank has {len(start[0])} numbers, as before; together yours are {got.size}."
    )
    inner = np.arange(len(line)) % len(start[0])
    inside = (inner != 0) & (inner != len(start[0]) - 1)
    checks.expect(
        not (np.allclose(got[inside], want[inside]) and not np.allclose(got, want)),
        "numbers inside of a rank are right, and those at its ends are not: which neighbour's number stands "
        "next to which end?",
        lambda: checks.draw_both(got, want),
    )
    checks.same(got, want, "the smoothed line")
    checks.right("the ranks compute what one process would, with two numbers from outside")


def steps_if_all_wait(program, size):
    """Steps until all ranks are done, where a send waits for its receiver and a message takes a step; None: never."""
    rounds = [[step for steps in program(rank, size, 1) for step in steps] for rank in range(size)]
    at, count = [0] * size, 0
    while any(at[r] < len(rounds[r]) for r in range(size)):
        now = {r: rounds[r][at[r]] for r in range(size) if at[r] < len(rounds[r])}
        pairs = [
            (r, step.peer)
            for r, step in now.items()
            if isinstance(step, Send)
            and step.peer in now
            and not isinstance(now[step.peer], Send)
            and now[step.peer].peer == r
        ]
        if not pairs:
            return None
        for pair in pairs:
            for rank in pair:
                at[rank] += 1
        count += 1
    return count


@checks.explain_errors
def check_shift(program, puzzle):
    checks.graded(puzzle.grade(program))
    for size in (6, 7, 12):
        count = steps_if_all_wait(program, size)
        checks.expect(
            count <= 2 + size % 2,
            f"right, but with {size} ranks, if every send waits for its receiver, it takes {count} steps: one "
            "message after "
            f"the other, as if a token went round. {2 + size % 2} are enough, if half of the ranks begin with "
            "the other thing.",
            lambda: puzzle.grade(program).draw(),
        )


@checks.explain_errors
def check_circle(circle):
    for waits, want in (
        ({0: 1, 1: 2, 2: 0}, {0, 1, 2}),
        ({0: 1, 1: 2, 2: 3}, set()),
        ({0: 1, 1: 2, 2: 3, 3: 2}, {2, 3}),
        ({5: 4, 4: 0, 1: 3, 3: 1, 0: 2}, {1, 3}),
        ({}, set()),
    ):
        got = checks.call(circle, dict(waits))
        said = ", ".join(f"{a} for {b}" for a, b in waits.items()) or "nobody"
        checks.expect(
            set(got) == want and len(got) == len(want),
            f"if {said} waits: {'the circle is ' + str(sorted(want)) if want else 'there is no circle'}; yours says "
            f"{list(got)}.",
        )
    checks.right("who waits for the circle without being in it is not part of it")


@checks.explain_errors
def check_fit(fit, measured_n, measured_t):
    n = np.array([8, 64, 512, 4096, 32768, 262144.0])
    t = (2e-6 + 1e-10 * n) * np.array([1.1, 0.9, 1.2, 0.95, 0.9, 1.1])
    # where the derivatives of the sum of squares with respect to both are 0
    (a, b), (c, d) = (np.sum(1 / t**2), np.sum(n / t**2)), (np.sum(n / t**2), np.sum(n**2 / t**2))
    right = np.sum(1 / t), np.sum(n / t)
    want = np.array([right[0] * d - right[1] * b, a * right[1] - c * right[0]]) / (a * d - b * c)

    def draw(got, want):
        _, ax = plt.subplots(figsize=(6.4, 3))
        ax.loglog(n, t, "o", color=INK, label="messages")
        ax.loglog(n, want[0] + want[1] * n, color=GREY, lw=5, alpha=0.5, label="wanted")
        ax.loglog(n, got[0] + got[1] * n, color=RED, label="yours")
        ax.set(title="alpha + beta n", xlabel="bytes", ylabel="seconds")
        ax.legend()

    checks.same(checks.call(fit, n, t), want, "(alpha, beta)", tolerance=1e-6, draw=draw)
    alpha, beta = fit(measured_n, measured_t)
    checks.right(f"here alpha is {1e6 * alpha:.1f} microseconds, and 1/beta {1e-9 / beta:.1f} GB/s")
    return alpha, beta


def draw_tokens(got, want):
    _, ax = plt.subplots(figsize=(4.6, 4.6))
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(want)) / len(want)
    for rank, angle in enumerate(angles):
        at, to = (
            np.array([np.cos(angle), np.sin(angle)]),
            np.array([np.cos(angles[(rank + 1) % len(want)]), np.sin(angles[(rank + 1) % len(want)])]),
        )
        ax.annotate(
            "",
            to * 0.97,
            at * 0.97,
            arrowprops=dict(
                arrowstyle="-|>", lw=2, color=GREY, shrinkA=24, shrinkB=24, connectionstyle="arc3,rad=-0.3"
            ),
        )
        ax.plot(*at, "o", ms=38, color=BLUE)
        ax.text(*at, f"rank {rank}", color="white", ha="center", va="center", weight="bold", fontsize=9)
        good = got[rank] == want[rank]
        ax.text(
            *(at * 0.55),
            f"has {got[rank]:g}" + ("" if good else f"\nnot {want[rank]:g}"),
            color=INK if good else RED,
            ha="center",
            va="center",
            fontsize=12,
        )
    ax.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
    ax.set_title("the token on each rank", loc="center")
    ax.axis("off")


def draw_dealt(mine):
    """Which rank has which sample."""
    colours = (BLUE, ORANGE, GREEN, PINK)
    _, ax = plt.subplots(figsize=(9, 1.3))
    for rank, samples in enumerate(mine):
        for sample in samples:
            ax.add_patch(plt.Rectangle((sample - 0.45, 0), 0.9, 1, color=colours[rank]))
            ax.text(sample, 0.5, sample, color="white", ha="center", va="center", weight="bold")
        ax.plot([], [], "s", color=colours[rank], label=f"rank {rank}: {len(samples)} samples")
    ax.set(xlim=(-1, 20), ylim=(0, 1), title="which rank has which sample")
    ax.axis("off")
    ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0))
    plt.show()


def draw_messages(n, t, alpha, beta):
    """Time of a message and bytes a second, measured and as the line says."""
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    left.loglog(n, 1e6 * t, "o", color=INK, label="measured, two ranks of this machine")
    left.loglog(n, 1e6 * (alpha + beta * n), color=BLUE, label=r"$\alpha + \beta n$")
    left.axhline(1e6 * alpha, color=ORANGE, ls="--", lw=1.2, label=r"$\alpha$")
    left.set(xlabel="bytes", ylabel="microseconds", title="time of a message")
    left.legend()
    right.semilogx(n, 1e-9 * n / t, "o", color=INK)
    right.semilogx(n, 1e-9 * n / (alpha + beta * n), color=BLUE)
    right.axvline(alpha / beta, color=RED, ls="--", lw=1.2)
    right.annotate(r" $n_{1/2} = \alpha/\beta$", (alpha / beta, 0), color=RED, va="bottom")
    right.set(xlabel="bytes", ylabel="GB/s", title="what is carried a second")
    plt.show()
