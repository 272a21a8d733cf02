"""The checks and pictures of 16_survive.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED


@checks.explain_errors
def check_chance(chance):
    rng = np.random.default_rng(22)
    for machines, years, hours in ((1024, 5, 24 * 7), (1, 5, 24), (1024, 5, 24), (200, 3, 100)):
        mean = years * 365 * 24
        got = float(checks.numbers(chance, machines, mean, hours))
        checks.expect(0 <= got <= 1, f"a probability lies between 0 and 1; yours is {got:.3g}.")
        tried = np.mean(rng.exponential(mean / machines, 200_000) > hours)
        checks.expect(
            abs(got - tried) < 0.01,
            f"{machines:,} machines that fail once in {years} years, {hours} hours: of 200,000 runs "
            f"{tried:.1%} came through, and "
            f"yours says {got:.1%}.",
        )
    checks.right("as in 200,000 runs with failures at random moments")


@checks.explain_errors
def check_restore(restore):
    rng = np.random.default_rng(23)
    for size in (3, 4, 6):
        parts = rng.integers(0, 100, size=(size, size - 1, 2))
        sums = np.zeros((size, 2), int)
        for r in range(size):
            for k in range(1, size):
                sums[(r + k) % size] += parts[r, k - 1]
        for lost in range(size):
            damaged, kept = parts.copy(), sums.copy()
            damaged[lost], kept[lost] = -(10**6), -(10**6)  # what is read of it is wrong
            got = checks.numbers(restore, damaged, kept, lost, shape=(size - 1, 2))
            checks.expect(
                np.abs(got).max() < 10**5,
                f"rank {lost} of {size} is lost, and yours has used something that only it had.",
            )
            checks.same(got, parts[lost], f"the pieces of rank {lost} of {size}")
    checks.right("whichever is lost, the others know it")


def draw_crashes(found):
    """A box for every moment of the crash."""
    _, ax = plt.subplots(figsize=(1.5 * len(found) + 1, 1.5))
    for k, what in enumerate(found):
        colour = GREEN if what.startswith("NEW!") else BLUE if what == "OLD!" else RED
        ax.add_patch(plt.Rectangle((k, 0), 0.92, 1, facecolor=colour, alpha=0.85))
        ax.text(k + 0.46, 0.5, what or "(empty)", ha="center", va="center", color="white", fontsize=9)
        when = f"after {k}" if not what.endswith("(done)") else "all done"
        ax.text(k + 0.46, -0.25, when, ha="center", va="center", fontsize=8)
    ax.set(xlim=(-0.1, len(found)), ylim=(-0.5, 1.1), title="power lost after k operations: what the file is then")
    ax.axis("off")


@checks.explain_errors
def check_save(save, Disk, Dead):
    """The power goes before the first, second, ... operation, until it comes through."""

    def crash(alive):
        disk = Disk(alive, model="OLD!")
        try:
            save(disk, "model", "NEW!")
        except Dead:
            return disk.on_disk.get("model", "(nothing)")
        return disk.on_disk.get("model", "(nothing)") + " (done)"

    found = []
    while not found or not found[-1].endswith("(done)"):
        found.append(crash(len(found)))
    draw = lambda: draw_crashes(found)
    bad = [k for k, what in enumerate(found[:-1]) if what not in ("OLD!", "NEW!")]
    if bad:
        said = f"if the power goes after {bad[0]} of the operations the file holds {found[bad[0]]!r}, "
        said += "not all of old or new"
        checks.expect(False, said, draw)
    last = found[-1].removesuffix(" (done)")
    checks.expect(last != "OLD!", "all is done, and the file is still the old one", draw)
    said = f"all is done, and if the power goes then the file holds {last!r}, not all of the new"
    checks.expect(last == "NEW!", said, draw)
    checks.right("whenever the power goes there is a whole file; so does nn.training.checkpoints.replacing")
    draw()


def draw_workers(worked):
    """Steps in which each rank has worked; rank 2 dies in step 7."""
    _, ax = plt.subplots(figsize=(8, 2.2))
    for rank, at in sorted(worked.items()):
        ax.plot(at, [rank] * len(at), "s", ms=9, color=(BLUE, GREEN, ORANGE)[rank])
    ax.plot(7, 2, "X", ms=14, color=RED)
    ax.annotate("dies", (7, 2), xytext=(10, -4), textcoords="offset points", color=RED)
    ax.set_yticks(range(3), [f"rank {rank}" for rank in range(3)])
    ax.set_xticks(range(0, 21, 2))
    ax.set(xlabel="step", title="Who has worked in which step", ylim=(2.6, -0.6))
    plt.show()


def draw_failures(machines, hours):
    """Hours between failures over the number of machines."""
    _, ax = plt.subplots(figsize=(7, 3))
    ax.loglog(machines, hours, "o-", color=BLUE)
    for name, value in (("a year", 365 * 24), ("a week", 168), ("a day", 24)):
        ax.axhline(value, color=GREY, ls=":", lw=1)
        ax.text(1, value * 1.1, name, fontsize=8, color=GREY)
    ax.set(xlabel="machines", ylabel="hours between failures", title="5 years for each machine")
    ax.set_xticks(machines, [f"{int(m):,}" for m in machines])
    ax.set_xticks([], minor=True)
    plt.show()


def draw_continued(cases):
    """How far continued runs are from the undisturbed one."""
    _, ax = plt.subplots(figsize=(7.4, 3.4))
    for name, (far, colour) in cases.items():
        ax.plot(range(21, 81), np.maximum(far, 1e-9), color=colour, label=f"{name}: {far[-1]:.1g}")
    ax.set(
        xlabel="step",
        ylabel="farthest parameter",
        title="Continued after step 20, against undisturbed",
        yscale="log",
        ylim=(5e-10, 30),
    )
    ax.set_yticks([1e-9, 1e-6, 1e-3, 1], ["0", "1e-6", "1e-3", "1"])
    ax.legend(fontsize=8, loc="center right")
    plt.show()


def draw_restored(lost, parts, kept_sums, again):
    """What was lost, from the sums that the others keep."""
    _, ax = plt.subplots(figsize=(8, 2.8))
    ax.set_title("What was lost, from the sums that the others keep")
    for r in range(4):
        for piece in range(3):
            text = " ".join(map(str, parts[r, piece]))
            ax.add_patch(
                plt.Rectangle(
                    (r + 0.05, 2.2 - 0.5 * piece),
                    0.9,
                    0.45,
                    fc=GREY if r == lost else BLUE,
                    alpha=0.4 if r == lost else 0.85,
                )
            )
            ax.text(r + 0.5, 2.42 - 0.5 * piece, text, ha="center", va="center", color="white")
        ax.add_patch(
            plt.Rectangle(
                (r + 0.05, 0.45), 0.9, 0.45, fc=GREY if r == lost else ORANGE, alpha=0.4 if r == lost else 0.9
            )
        )
        ax.text(r + 0.5, 0.67, " ".join(map(str, kept_sums[r])), ha="center", va="center", color=INK)
        ax.text(
            r + 0.5, 2.85, f"rank {r}" + (" is lost" if r == lost else ""), ha="center", color=RED if r == lost else INK
        )
    ax.text(-0.1, 1.9, "its own", ha="right", va="center")
    ax.text(-0.1, 0.67, "sum of others'", ha="right", va="center")
    ax.text(
        2,
        0.05,
        f"from the sums of the others: {' | '.join(' '.join(map(str, p)) for p in again)}",
        ha="center",
        color=GREEN,
    )
    ax.set(xlim=(-1.2, 4), ylim=(-0.1, 3.1))
    ax.axis("off")
    plt.show()


def draw_lives(log):
    """Steps over the seconds; rank 1 dies twice."""
    _, ax = plt.subplots(figsize=(8, 3.4))
    zero, lives = log[0, 1], list(dict.fromkeys(log[:, 0]))
    for life, (pid, colour) in enumerate(zip(lives, (BLUE, ORANGE, GREEN), strict=True)):
        mine = log[log[:, 0] == pid]
        ax.plot(
            mine[:, 1] - zero,
            mine[:, 2],
            ".-",
            ms=3,
            color=colour,
            label=f"start {life + 1}: steps {mine[0, 2]:.0f} to {mine[-1, 2]:.0f}",
        )
        if life < 2:
            ax.plot(mine[-1, 1] - zero, mine[-1, 2], "X", ms=12, color=RED)
            ax.annotate(
                "rank 1 dies", (mine[-1, 1] - zero, mine[-1, 2]), xytext=(8, -3), textcoords="offset points", color=RED
            )
    for step in range(0, int(log[:, 2].max()), 20):
        ax.axhline(step, color=GREY, lw=0.5, ls=":")
    ax.set(xlabel="seconds", ylabel="step", title="Two deaths; dotted: checkpoints")
    ax.legend()
    plt.show()


@checks.explain_errors
def check_interval(interval, C=30.0, M=12 * 3600.0):
    """Against the lowest point of the waste on a grid; the picture has simulated failures, too."""
    mine = float(checks.numbers(interval, C, M))
    checks.expect(mine > 0, f"an interval is a positive number of seconds; yours is {mine:g}")
    grid = np.geomspace(60, M, 4000)
    best = grid[np.argmin(C / grid + grid / (2 * M))]
    draw = lambda: draw_waste(mine, C, M)
    said = f"with {mine / 60:.3g} minutes {C / mine + mine / (2 * M):.1%} is wasted, and with another interval only"
    checks.expect(abs(mine / best - 1) < 0.01, f"{said} {C / best + best / (2 * M):.1%}", draw)
    longer = float(checks.numbers(interval, 4 * C, M))
    said = "if saving takes four times as long, the interval should be twice as long"
    checks.expect(abs(longer / mine - 2) < 0.02, said)
    checks.right(f"{mine / 60:.0f} minutes; {C / mine + mine / (2 * M):.1%} is wasted, half of it for saving")
    draw()


def simulated_waste(T, C, M, tries=20, seed=0):
    """The share of time that is wasted in 50 M seconds of work, by failures at random moments."""
    rng, wasted = np.random.default_rng(seed), []
    for _ in range(tries):
        done, time, fails = 0.0, 0.0, rng.exponential(M)
        while done < 50 * M:
            if time + T + C <= fails:  # a piece of work, and its checkpoint
                time, done = time + T + C, done + T
            else:
                time = fails  # lost: all since the last one
                fails = time + rng.exponential(M)
        wasted.append(1 - done / time)
    return float(np.mean(wasted))


def draw_waste(mine, C, M):
    """Waste against the interval, formula and simulation."""
    _, ax = plt.subplots(figsize=(7, 3.2))
    T = 60 * 2.0 ** np.arange(0, 9)
    ax.plot(T / 60, 100 * (C / T + T / (2 * M)), color=GREY, lw=4, alpha=0.5, label="C/T + T/(2M)")
    ax.plot(T / 60, [100 * simulated_waste(t, C, M) for t in T], "o", color=BLUE, label="simulated failures")
    ax.axvline(mine / 60, color=RED, label=f"yours: {mine / 60:.1f} min")
    ax.set(xscale="log", xlabel="minutes between checkpoints", ylabel="time wasted (%)", ylim=(0, 60))
    ax.set_title("a checkpoint takes 30 s, a failure every 12 hours")
    ax.set_xticks(T / 60, [f"{t / 60:g}" for t in T])
    ax.set_xticks([], minor=True)
    ax.legend()
    plt.show()
