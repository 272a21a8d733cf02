"""The checks and pictures of 14_tensor_parallelism.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED
from exercises.training import derivative

SHADES = (BLUE, ORANGE, GREEN, PINK)  # a colour is a rank


@checks.explain_errors
def check_heads(some_heads, attention, p, x):
    theirs, _ = attention.forward(p, x[None], attention.context())
    for groups in (((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))):
        parts = [checks.several(2, some_heads, x.copy(), group) for group in groups]
        for (term, weights), group in zip(parts, groups, strict=True):
            checks.expect(
                np.shape(term) == x.shape,
                f"a rank's term has the shape {np.shape(term)}; with its rows of the projection it is "
                f"{x.shape}, as the whole output.",
            )
            checks.expect(len(weights) == len(group), f"{len(group)} heads have {len(group)} matrices of weights.")
            checks.expect(
                all(np.allclose(np.sum(w, axis=1), 1) and not np.triu(w, 1).any() for w in weights),
                "each position's weights sum to 1, and later positions have none.",
            )
        total = sum(term for term, _ in parts) + p.bo
        name = f"the sum of {len(groups)} ranks' terms"
        checks.same(total, theirs[0], name, tolerance=1e-9)
    checks.right("on 1, 2 and 4 ranks the terms sum to what nn.MultiHeadAttention gives")


@checks.explain_errors
def check_embedding(lookup):
    rng = np.random.default_rng(20)
    table, ids = rng.standard_normal((11, 5)), rng.integers(11, size=(3, 7))
    for first in ((0,), (0, 4, 8), (0, 1, 10)):
        parts = np.split(table, first[1:])
        terms = [
            checks.numbers(lookup, part.copy(), lo, ids, shape=(3, 7, 5)) for part, lo in zip(parts, first, strict=True)
        ]
        for (part, lo), term in zip(zip(parts, first, strict=True), terms, strict=True):
            elsewhere = (ids < lo) | (ids >= lo + len(part))
            checks.expect(
                not np.any(term[elsewhere]),
                f"the rank with the rows from {lo} on gives something for ids that it does not have: the sum "
                "would be wrong. Their "
                "rows are 0.",
            )
        checks.same(sum(terms), table[ids], f"the sum of the terms of {len(first)} ranks")
    checks.right("each id is found by one rank, and all others add 0")


@checks.explain_errors
def check_seconds(block_seconds):
    alone, nbytes = 0.2, 4e7
    for t in (1, 2, 4, 8):
        for alpha, beta in ((5e-6, 1 / 300e9), (2e-5, 1 / 25e9)):
            rounds = 2 * (t - 1)
            summing = rounds * (alpha + beta * nbytes / t)
            got = float(checks.numbers(block_seconds, t, alone, nbytes, alpha, beta))
            checks.expect(
                t == 1 or not np.isclose(got, alone / t + summing, rtol=1e-9),
                "one sum of four: f and g of attention and of the MLP, forward and backward.",
            )
            checks.same(got, alone / t + 4 * summing, f"seconds of a block on {t} ranks")
    checks.right("a t-th of the arithmetic, and four rings behind which nothing can hide")


def draw_losses(got, want):
    """A bar for every row."""
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    ax.bar(np.arange(len(want)) - 0.2, want, 0.4, color=GREY, label="wanted")
    ax.bar(np.arange(len(want)) + 0.2, got, 0.4, color=RED, label="yours")
    ax.set(xlabel="row", ylabel="loss", title="classes on three ranks: 4, 4 and 3 of 11", ylim=(0, 1.4 * max(want)))
    ax.legend()


@checks.explain_errors
def check_mlp(my_mlp, network):
    """On 1, 2 and 4 ranks against the network in one process; returns its gradients, and the learner's on 4 ranks."""
    ctx, p = network.context(), network.layout.views(network.layout.zeros(np.float64))
    g = network.layout.views(network.layout.zeros(np.float64))
    rng = np.random.default_rng(1)
    X, gZ = rng.standard_normal((6, 4)), rng.standard_normal((6, 4))
    p[0].W[...], p[2].W[...] = rng.standard_normal((4, 8)), rng.standard_normal((8, 4))
    # a network gives no gradient of its input: take it by differences
    gX = derivative(lambda x: (network.forward(p, x.copy(), network.context())[0] * gZ).sum(), X)
    Z, saved = network.forward(p, X.copy(), ctx)
    Z = Z.copy()
    network.backward(p, g, gZ.copy(), saved, ctx)
    for t in (1, 2, 4):
        parts = np.split(p[0].W, t, axis=1), np.split(p[2].W, t, axis=0)
        mine = checks.several(4, my_mlp, X, *parts, gZ)
        checks.same(mine[0], Z, f"Z on {t} ranks")
        checks.same(mine[1], gX, f"the gradient of X on {t} ranks", tolerance=1e-6)
        for name, found, whole, axis in (("A", mine[2], g[0].W, 1), ("B", mine[3], g[2].W, 0)):
            said = f"of {name}, in {t} parts, a list of as many gradients is expected"
            checks.expect(isinstance(found, list | tuple | np.ndarray) and len(found) == t, said)
            for i, want in enumerate(np.split(whole, t, axis=axis)):
                checks.same(found[i], want, f"the gradient of part {i} of {name}, on {t} ranks")
    checks.right("on 1, 2 and 4 ranks as nn in one process")
    return g, mine


def draw_products():
    """Two ways to cut a matrix product."""

    def draw_product(ax, blocks, title):
        """Matrices side by side; blocks: (text, width, height, how it is cut, sign after it)."""
        at = 0.0
        for text, width, height, cut, sign in blocks:
            for i in range(2):
                w, h = (
                    (width / 2, height)
                    if cut == "columns"
                    else (width, height / 2)
                    if cut == "rows"
                    else (width, height)
                )
                x = at + (i * w if cut == "columns" else 0)
                y = -height / 2 + ((1 - i) * h if cut == "rows" else 0)
                colour = SHADES[i] if cut else "#dfe3ea"
                ax.add_patch(plt.Rectangle((x, y), w, h, facecolor=colour, edgecolor="white", lw=2, alpha=0.85))
            ax.text(at + width / 2, 0, text, ha="center", va="center", fontsize=12, color=INK if not cut else "white")
            ax.text(at + width + 0.35, 0, sign, ha="center", va="center", fontsize=13)
            at += width + 0.7
        ax.set(xlim=(-0.2, at), ylim=(-1.8, 1.8), title=title, aspect="equal")
        ax.axis("off")

    _, axes = plt.subplots(1, 2, figsize=(11, 2.8))
    draw_product(
        axes[0],
        [("X", 2, 2.4, "", "·"), ("A", 3, 2, "columns", "="), ("Y", 3, 2.4, "columns", "")],
        "by columns: nothing is sent",
    )
    draw_product(
        axes[1],
        [("X", 2, 2.4, "columns", "·"), ("A", 3, 2, "rows", "="), ("sum", 3, 2.4, "", "")],
        "by rows: terms are summed",
    )
    plt.show()


def draw_gelu(z, GeLU):
    """GeLU of a sum and the sum of GeLUs."""
    _, ax = plt.subplots(figsize=(6.2, 2.8))
    ax.plot(z, GeLU(2 * z)[0], color=BLUE, label="GeLU(a + b)")
    ax.plot(z, 2 * GeLU(z)[0], color=RED, label="GeLU(a) + GeLU(b)")
    ax.set(xlabel="a = b", title="The GeLU of a sum is not the sum of the GeLUs")
    ax.legend()
    plt.show()


def draw_f_and_g():
    """Where ranks sum: g forward, f backward."""
    _, ax = plt.subplots(figsize=(9, 3.1))
    ax.set_title("Where the ranks meet: g forward, f backward")
    for rank, y in enumerate((0.75, -0.75)):
        for x, text in ((2.2, f"$A_{rank}$"), (4.0, "GeLU"), (5.8, f"$B_{rank}$")):
            ax.text(
                x,
                y,
                text,
                ha="center",
                va="center",
                color="white",
                bbox=dict(boxstyle="round,pad=0.5", fc=SHADES[rank], ec="none"),
            )
        for a, b in (((1.1, 0), (1.85, y)), ((2.55, y), (3.5, y)), ((4.5, y), (5.45, y)), ((6.15, y), (6.9, 0))):
            ax.annotate("", b, a, arrowprops=dict(arrowstyle="-|>", color=GREY))
        ax.text(-1.0, y, f"rank {rank}", color=SHADES[rank], va="center")
    for x, text in ((0.9, "f"), (7.1, "g")):
        ax.text(
            x,
            0,
            text,
            ha="center",
            va="center",
            fontsize=13,
            style="italic",
            bbox=dict(boxstyle="circle,pad=0.35", fc="white", ec=INK),
        )
    ax.text(0.2, 0, "X", ha="center", va="center", fontsize=13)
    ax.text(7.9, 0, "Z", ha="center", va="center", fontsize=13)
    ax.text(0.9, -1.5, "backward: sum", ha="center", fontsize=9)
    ax.text(7.1, -1.5, "forward: sum", ha="center", fontsize=9)
    ax.set(xlim=(-1.2, 8.4), ylim=(-1.7, 1.3))
    ax.axis("off")
    plt.show()


def draw_parts(mine, g):
    """Which rank has what of the gradients."""
    _, axes = plt.subplots(1, 4, figsize=(11, 2.4))
    for ax, array, name in zip(axes, (mine[1], g[0].W, g[2].W, mine[0]), ("gX", "gA", "gB", "Z"), strict=True):
        ax.imshow(array, cmap="RdBu", vmin=-8, vmax=8, aspect="auto")
        for i in range(1, 4):
            cut = ax.axvline if name == "gA" else ax.axhline
            if name in ("gA", "gB"):
                cut(2 * i - 0.5, color=INK, lw=1.5)
        ax.set(
            title=name + {"gA": ": each rank some columns", "gB": ": some rows"}.get(name, ": on all ranks"),
            xticks=[],
            yticks=[],
        )
    plt.show()


def draw_heads(terms):
    """Weights of the four heads."""
    _, axes = plt.subplots(1, 4, figsize=(11, 2.7), sharey=True)
    for h, ax in enumerate(axes):
        ax.imshow(terms[h // 2][1][h % 2], cmap="Blues", vmin=0, vmax=1)
        ax.set_title(f"head {h}, on rank {h // 2}", color=SHADES[h // 2])
        ax.set(xlabel="looks at place")
    axes[0].set_ylabel("place")
    plt.show()


def draw_mesh():
    """A mesh of 32 ranks."""
    _, ax = plt.subplots(figsize=(9, 2.6))
    for rank in range(32):
        d, s, t = rank // 16, rank // 4 % 4, rank % 4
        x, y = t + 4.6 * s, -d
        ax.add_patch(plt.Rectangle((x, y), 0.92, 0.8, facecolor=SHADES[t], alpha=1.0 if d == 0 else 0.55))
        ax.text(x + 0.46, y + 0.4, rank, ha="center", va="center", color="white")
    for s in range(4):
        ax.text(4.6 * s + 2, 1.0, f"stage {s}", ha="center")
        for d in range(2):
            ax.add_patch(plt.Rectangle((4.6 * s - 0.12, -d - 0.1), 4.16, 1.0, fill=False, ec=GREY, ls=":"))
    for d in range(2):
        ax.text(-0.4, -d + 0.4, f"replica {d}", ha="right", va="center")
    ax.set(
        xlim=(-2.2, 18.2),
        ylim=(-1.3, 1.4),
        title="data=2, pipeline=4, tensor=4: a frame is a group that sums activations",
    )
    ax.axis("off")
    plt.show()


def draw_training(losses_one, losses, held):
    """Losses of one process and of two ranks; who has what of each matrix."""
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4))
    left.plot(losses_one, color=GREY, lw=5, alpha=0.5, label="one process")
    left.plot(losses[0], color=BLUE, label="two ranks")
    left.axhline(np.log(3) / 12, color=GREEN, ls=":", label="as good as it can be")
    left.set(xlabel="step", ylabel="loss", title="Training", ylim=(0, None))
    left.legend()
    names = [name for name in held[0] if name.endswith(("W", "Wqkv", "Wo")) and len(held[0][name]) == 2][::-1]
    for rank in range(2):
        size = [np.prod(held[rank][name]) for name in names]
        right.barh(names, size, left=[rank * s for s in size] if rank else 0, color=SHADES[rank], label=f"rank {rank}")
    right.set(xlabel="numbers", title="Who has what of each matrix")
    right.tick_params(axis="y", labelsize=8)
    right.legend()
    plt.show()


def draw_predictions(guess, y, x):
    """What is seen and predicted; wrong ones are red."""
    _, ax = plt.subplots(figsize=(8, 2.6))
    ax.imshow(guess == y, cmap="RdYlGn", vmin=-0.4, vmax=1.4, aspect="auto", alpha=0.6)
    for (i, j), value in np.ndenumerate(x):
        ax.text(j, i, f"{value} → {guess[i, j]}", ha="center", va="center", fontsize=9)
    ax.set(xlabel="place", ylabel="sequence", title="seen → predicted; red: wrong (the first is a guess)")
    plt.show()


def draw_speedups(degrees, speedups):
    """Speedup and efficiency of a block, over the number of ranks that share it."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    for (name, speedup), colour in zip(speedups.items(), (BLUE, RED), strict=True):
        left.plot(degrees, speedup, "o-", color=colour, label=name)
        right.plot(degrees, 100 * np.array(speedup) / degrees, "o-", color=colour, label=name)
    left.plot(degrees, degrees, ":", color=GREY, label="ideal")
    right.plot(8, 77, "*", ms=14, color=INK, label="Megatron, 8 GPUs: 77%")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="ranks that share every layer")
        ax.set_xticks(degrees, degrees)
        ax.set_xticks([], minor=True)
    left.set(yscale="log", ylabel="times as fast", title="One block, one sequence")
    left.set_yticks(degrees, degrees)
    left.set_yticks([], minor=True)
    right.set(ylabel="efficiency (%)", ylim=(0, 105), title="The sums are on the critical path")
    left.legend()
    right.legend()
    plt.show()
