"""The checks of 06_collectives.py and 07_allreduce.py, and a puzzle."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, RED
from collectives.checking.definitions import OPERATIONS
from collectives.puzzles import Puzzle
from collectives.puzzles.messages import one_port

reduce = Puzzle(
    "reduce to one",
    """Every rank has x; rank 0 is to have the sum of all in its x. What the others have in the end may be anything.
    A rank sends one message in a round and receives one.""",
    8,
    4,
    OPERATIONS["reduce"],
    limits={"rounds": 3, "moved": 12},
    record={"rounds": 3, "moved": 12},
    others=((1, 2), (2, 3), (5, 4), (7, 3)),
    rule=one_port,
)


@checks.explain_errors
def check_pieces(best_pieces):
    for p, n, alpha, beta in (
        (32, 1e6, 20e-6, 8e-10),
        (4, 1e9, 1e-6, 1e-10),
        (128, 1e4, 20e-6, 8e-10),
        (3, 100.0, 1e-3, 1e-9),
    ):
        pieces = np.arange(1, 20_000)
        seconds = (p - 2 + pieces) * (alpha + beta * n / pieces)
        best = int(pieces[seconds.argmin()])
        got = float(checks.numbers(best_pieces, p, n, alpha, beta))
        checks.expect(got >= 1, f"for {n:g} bytes on {p} ranks: at least one piece, not {got:.3g}.")
        mine = (p - 2 + got) * (alpha + beta * n / got)

        def draw(pieces=pieces, seconds=seconds, got=got, p=p):
            _, ax = plt.subplots(figsize=(6, 2.8))
            ax.loglog(pieces, seconds, color=BLUE)
            ax.axvline(got, color=RED, label="yours")
            ax.axhline(seconds.min(), color=GREY, ls=":")
            ax.set(title=f"a chain of {p} ranks", xlabel="pieces", ylabel="seconds")
            ax.legend()

        checks.expect(
            mine < 1.02 * seconds.min(),
            f"for {n:g} bytes on {p} ranks you cut {got:.4g} pieces, which takes {1e3 * mine:.4g} ms; with "
            f"{best} it takes "
            f"{1e3 * seconds.min():.4g} ms.",
            draw,
        )
    checks.right("where the derivative is 0, and never less than one")


@checks.explain_errors
def check_slow_link(ring_seconds):
    rng = np.random.default_rng(21)
    for p in (2, 4, 8):
        alphas, betas = rng.uniform(1e-6, 5e-5, p), rng.uniform(1e-10, 1e-9, p)
        for n in (1e3, 1e7):
            at = np.zeros(p)
            for _ in range(2 * (p - 1)):  # rank r receives over link r - 1 when its neighbour has had its own last part
                at = np.maximum(at, np.roll(at, 1)) + np.roll(alphas + betas * n / p, 1)
            slowest = max(alphas + betas * n / p)
            got = float(checks.numbers(ring_seconds, n, alphas.tolist(), betas.tolist()))
            mean = 2 * (p - 1) * (alphas.mean() + betas.mean() * n / p)
            checks.expect(
                not np.isclose(got, mean) or p == 1,
                f"{p} links, {n:g} bytes: this is the time with the mean of the links. In each round every "
                "link carries a part, and "
                "the next round of a rank waits for its neighbour: which link sets the pace?",
            )
            checks.same(got, 2 * (p - 1) * slowest, f"seconds of {n:g} bytes on {p} links")
            assert max(at) <= 2 * (p - 1) * slowest * (1 + 1e-9), "no rank is later"
    checks.right("one slow link, and the ring is slow: the price of having every link in it")


def draw_tree(ax, tree, colour, title):
    order = sorted(range(len(tree.parent)), key=lambda r: r)
    for rank in order:
        x, y = rank, -tree.depth[rank]
        inside = bool(tree.children[rank])
        if tree.parent[rank] is not None:
            up = tree.parent[rank]
            ax.plot([x, up], [y, -tree.depth[up]], color=checks.GREY, lw=1, zorder=1)
        ax.plot(x, y, "o", ms=16, mfc=colour if inside else "white", mec=colour, mew=1.5, zorder=2)
        ax.text(x, y, rank, ha="center", va="center", color="white" if inside else colour, fontsize=9)
    ax.set_title(title)
    ax.axis("off")
