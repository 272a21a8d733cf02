"""The checks of 16_survive.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, RED


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
