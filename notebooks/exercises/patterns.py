"""The checks and pictures of 06_collectives.py and 07_allreduce.py, and a puzzle."""

import matplotlib.pyplot as plt
import numpy as np

import checks
import collectives
import exercises.patterns as exercise
from checks import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, SKY
from collectives.algorithms import alltoall, scatter
from collectives.algorithms.trees import two_trees
from collectives.checking.definitions import OPERATIONS
from collectives.pricing.lower_bounds import lower_bound
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
            ax.plot([x, up], [y, -tree.depth[up]], color=GREY, lw=1, zorder=1)
        ax.plot(x, y, "o", ms=16, mfc=colour if inside else "white", mec=colour, mew=1.5, zorder=2)
        ax.text(x, y, rank, ha="center", va="center", color="white" if inside else colour, fontsize=9)
    ax.set_title(title)
    ax.axis("off")


def draw_broadcasts(ways, sizes, p, network):
    """Seconds of four broadcasts over the length of the vector."""
    _, ax = plt.subplots(figsize=(8, 4))
    for (name, way), mark in zip(ways.items(), "os^D", strict=True):
        ax.loglog(sizes, [way(int(n)).seconds for n in sizes], f"{mark}-", ms=5, label=name)
    ax.loglog(sizes, [lower_bound("broadcast", p, n, network) for n in sizes], "--", color=INK, label="lower bound")
    ax.set(xlabel="bytes", ylabel="seconds", title=f"broadcast to {p} ranks")
    ax.legend()
    plt.show()


def draw_scatters(network):
    """Milliseconds of two ways to scatter, over the number of ranks."""
    _, axes = plt.subplots(1, 2, figsize=(10.5, 3.2))
    ranks = [2, 4, 8, 16, 32, 64, 128]
    for ax, block in zip(axes, (100, 1_000_000), strict=True):
        for way, name, mark in ((scatter.flat, "one by one", "o-"), (scatter.binomial, "tree", "s-")):
            ax.plot(
                ranks, [1e3 * collectives.price(way, q, block * q, 1, network).seconds for q in ranks], mark, label=name
            )
        ax.set(xlabel="ranks", ylabel="milliseconds", title=f"scatter, {block:,} bytes for each")
        ax.legend()
    plt.show()


def draw_alltoalls(p, network, blocks):
    """Seconds of two ways of alltoall, over the length of a block."""
    _, ax = plt.subplots(figsize=(7.5, 3.4))
    for way, name, mark in (
        (alltoall.pairwise, "pairwise: 63 messages", "o-"),
        (alltoall.bruck, "Bruck: 6 messages", "s-"),
    ):
        seconds = [collectives.price(way, p, int(b) * p, 1, network).seconds for b in blocks]
        ax.loglog(blocks, seconds, mark, label=name)
    ax.set(xlabel="bytes of a block", ylabel="seconds", title=f"alltoall on {p} ranks")
    ax.legend()
    plt.show()


def draw_vectors_sent():
    """Vectors that the busiest rank sends, over the number of ranks."""
    p = np.arange(2, 65)
    _, ax = plt.subplots(figsize=(7, 2.9))
    ax.plot(p, p - 1, color=RED, label="whole vectors round the ring: p - 1")
    ax.plot(p, np.ceil(np.log2(p)), color=ORANGE, label="up and down a tree: log2(p), rounded up")
    ax.plot(p, 2 * (p - 1) / p, color=BLUE, label="the ring in parts: 2 (p - 1)/p")
    ax.set(title="What the busiest rank sends (and receives)", xlabel="ranks p", ylabel="vectors sent", ylim=(0, 13))
    ax.legend()
    plt.show()


def draw_two_trees():
    """Two trees over the same ranks: a rank inside one is a leaf of the other."""
    _, axes = plt.subplots(1, 2, figsize=(11, 3))
    for ax, tree, colour, title in zip(
        axes, two_trees(12), (BLUE, RED), ("one half of the vector", "the other half"), strict=True
    ):
        exercise.draw_tree(ax, tree, colour, title + " (filled: passes on)")
    plt.show()


def draw_winners(ways, winner, sizes, ranks):
    """The fastest allreduce for each number of ranks and each length."""
    _, ax = plt.subplots(figsize=(8.5, 4))
    palette = (BLUE, ORANGE, GREEN, PINK, SKY)
    for k, (name, colour, mark) in enumerate(zip(ways, palette, "os^D>", strict=True)):
        rows, columns = np.nonzero(winner == k)
        label = name if len(rows) else f"{name}: never"
        ax.plot(sizes[columns], rows, mark, ms=11, color=colour, label=label)
    ax.set(xscale="log", xlabel="bytes", ylabel="ranks", title="the fastest allreduce, by its formula")
    ax.set_yticks(range(len(ranks)), ranks)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), markerscale=0.7)
    plt.show()


def draw_patterns():
    """Before and after eight collectives, on four ranks."""
    COLOURS = (BLUE, ORANGE, GREEN, PINK)
    P = 4
    PATTERNS = {
        "broadcast": (lambda r: ["0"] if r == 0 else [], lambda r: ["0"]),
        "scatter": (lambda r: [f"0{'abcd'[k]}" for k in range(P)] if r == 0 else [], lambda r: [f"0{'abcd'[r]}"]),
        "gather": (lambda r: [f"{r}"], lambda r: [f"{q}" for q in range(P)] if r == 0 else []),
        "allgather": (lambda r: [f"{r}"], lambda r: [f"{q}" for q in range(P)]),
        "reduce": (lambda r: [f"{r}"], lambda r: ["0+1+2+3"] if r == 0 else []),
        "allreduce": (lambda r: [f"{r}"], lambda r: ["0+1+2+3"]),
        "reduce-scatter": (lambda r: [f"{r}{'abcd'[k]}" for k in range(P)], lambda r: [f"+{'abcd'[r]}"]),
        "alltoall": (lambda r: [f"{r}{'abcd'[k]}" for k in range(P)], lambda r: [f"{q}{'abcd'[r]}" for q in range(P)]),
    }

    def draw_blocks(ax, left, row, names):
        for k, name in enumerate(names):
            whose = [int(c) for c in name if c.isdigit()] or list(range(P))
            for i, q in enumerate(whose):
                low = row + 0.08 + 0.84 * i / len(whose)
                ax.add_patch(plt.Rectangle((left + k, low), 0.9, 0.84 / len(whose), color=COLOURS[q]))
            ax.text(left + k + 0.45, row + 0.5, name[-1] if name[-1].isalpha() else "", color="white", ha="center",
                    va="center", weight="bold")  # fmt: skip

    _, axes = plt.subplots(2, 4, figsize=(12, 5))
    for ax, (name, (before, after)) in zip(axes.flat, PATTERNS.items(), strict=True):
        for rank in range(P):
            ax.add_patch(plt.Rectangle((-0.1, rank + 0.02), 4.1, 0.96, color="#f2f4f7", zorder=0))
            ax.add_patch(plt.Rectangle((5.4, rank + 0.02), 4.1, 0.96, color="#f2f4f7", zorder=0))
            draw_blocks(ax, 0, rank, before(rank))
            draw_blocks(ax, 5.5, rank, after(rank))
            ax.text(-0.3, rank + 0.5, rank, ha="right", va="center", color=GREY)
        ax.annotate("", (5.3, 2), (4.1, 2), arrowprops=dict(arrowstyle="-|>", color=INK, lw=1.5))
        ax.set(xlim=(-0.8, 9.6), ylim=(4.1, -0.1))
        ax.set_title(name, loc="center")
        ax.axis("off")
    plt.show()
