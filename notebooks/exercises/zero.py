"""The checks and pictures of 12_zero.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED
from collectives.drawing.timeline import PALETTE
from collectives.steps import chunk

PARTS = {"parameters": BLUE, "gradients": ORANGE, "moments": GREEN}


def kept(sizes, shared_from, ranks):
    """Bytes of each kind that a rank keeps in stages 0 to 3: `sizes` bytes a number, shared out from a stage on."""
    rows = []
    for stage in range(4):
        rows.append([size / ranks if stage >= since else size for size, since in zip(sizes, shared_from, strict=True)])
    return np.array(rows, float)


@checks.explain_errors
def check_bytes(my_bytes, psi):
    mine = [checks.several(3, my_bytes, psi, 64, stage) for stage in range(4)]
    wanted = psi * kept((4, 4, 8), (3, 2, 1), 64)
    checks.same(mine, wanted, "GB of [stage, (parameters, gradients, moments)]", draw=draw_bytes)
    checks.right(f"{wanted[0].sum():.0f} GB become {wanted[3].sum():.1f}")
    draw_bytes(np.array(mine, float))
    plt.show()


@checks.explain_errors
def check_mixed(mixed_bytes, psi):
    mine = np.array([checks.several(3, mixed_bytes, psi, 64, stage) for stage in range(4)], float)
    wanted = psi * kept((2, 2, 12), (3, 2, 1), 64)
    checks.expect(
        not np.allclose(mine[0], psi * np.array([2, 2, 8])),
        "12 of 16 bytes are there without the optimizer's copy: it keeps the parameters in float32, too, since "
        "an update is often "
        "too small to change a number of 16 bits.",
    )
    checks.expect(
        not np.allclose(mine[1], psi * np.array([2, 2, 4 + 8 / 64])),
        "the float32 copy is the optimizer's, which updates its own part only: stage 1 shares it out like the moments.",
    )
    checks.same(mine, wanted, "GB of [stage, (parameters, gradients, optimizer)]")
    totals = ", ".join(f"{total:.1f}" for total in mine.sum(axis=1))
    checks.right(f"{totals} GB: the figures of the paper")
    return mine


@checks.explain_errors
def check_clip(clip):
    rng = np.random.default_rng(19)
    for sizes, limit in (((6, 6), 1.0), ((5, 1, 9), 0.5), ((4, 4), 1000.0)):
        shards = [rng.standard_normal(n) * (3 - i) for i, n in enumerate(sizes)]
        whole = np.concatenate(shards)
        length = np.sqrt(whole @ whole)
        got = checks.call(clip, [s.copy() for s in shards], limit)
        checks.expect(
            isinstance(got, list | tuple) and [np.shape(s) for s in got] == [s.shape for s in shards],
            "a list with each rank's shard is expected.",
        )
        joined = np.concatenate(got)
        cosine = joined @ whole / np.linalg.norm(joined) / length
        checks.expect(
            cosine > 1 - 1e-9,
            f"the clipped gradient points elsewhere (cosine {cosine:.3f}): the shards have been scaled by "
            "different factors.",
        )
        checks.same(joined, whole * min(1, limit / length), "the clipped gradient, all shards")
    checks.right("one small number is summed over the ranks, and all scale by the same factor")


def four_ranks(my_zero1, adam, steps=5, count=22, N=4):
    """Parameters of every rank after some steps of yours, and of one process."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(count)
    one, m1, v1 = start.copy(), np.zeros(count), np.zeros(count)
    w = [start.copy() for _ in range(N)]
    lengths = [hi - lo for lo, hi in (chunk(count, N, r) for r in range(N))]
    m, v = [np.zeros(n) for n in lengths], [np.zeros(n) for n in lengths]
    for step in range(steps):
        g = [rng.standard_normal(count) for _ in range(N)]
        adam(one, sum(g), m1, v1, step)
        checks.change(my_zero1, w, [a.copy() for a in g], m, v, step)
    return np.array(w), one


def draw_ranks(got, want):
    """How far each number of each rank is from one process's."""
    _, ax = plt.subplots(figsize=(7, 2.2))
    off = np.abs(got - want)
    image = ax.imshow(off, cmap="Reds", aspect="auto", vmin=0, vmax=max(1e-12, off.max()))
    for r in range(len(got)):
        lo, hi = chunk(got.shape[1], len(got), r)
        ax.add_patch(plt.Rectangle((lo - 0.5, r - 0.5), hi - lo, 1, fill=False, edgecolor=INK, lw=1.5))
    ax.set_yticks(range(len(got)), [f"rank {r}" for r in range(len(got))])
    ax.set_xticks(range(0, got.shape[1], 3))
    ax.set(xlabel="place in the vector; framed: the rank's own part", title="how far from one process")
    plt.colorbar(image)


@checks.explain_errors
def check_zero1(my_zero1, adam):
    got, one = four_ranks(my_zero1, adam)
    want = np.broadcast_to(one, got.shape)
    parts = [slice(*chunk(22, 4, r)) for r in range(4)]
    own = [np.allclose(got[r, part], one[part], rtol=1e-12) for r, part in enumerate(parts)]
    checks.expect(
        all(own),
        f"rank {own.index(False) if False in own else 0} has its own part wrong: of which gradients is it the update?",
        lambda: draw_ranks(got, want),
    )
    checks.same(got, want, "parameters of [rank, place]", tolerance=1e-12, draw=draw_ranks)
    checks.right("all ranks have the parameters of one process, and each has a quarter of the moments")
    draw_ranks(got, want)


def draw_largest_models(my_bytes):
    """The largest model that fits, over the number of ranks."""
    ranks = 2 ** np.arange(0, 11)
    _, ax = plt.subplots(figsize=(7, 3.2))
    for stage, colour in enumerate((GREY, GREEN, ORANGE, BLUE)):
        largest = [60e9 / sum(my_bytes(1, n, stage)) / 1e9 for n in ranks]
        name = f"stage {stage}" if stage else "replicated"
        ax.plot(ranks, largest, "o-", ms=4, color=colour, label=f"{name}: {largest[-1]:,.0f} billion on {ranks[-1]:,}")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="ranks",
        ylabel="billion parameters",
        title="The largest model in 60 GB a rank",
    )
    ax.set_xticks(ranks, ranks)
    ax.set_xticks([], minor=True)
    ax.legend()
    plt.show()


def draw_clipped(whole, apart):
    """A gradient clipped by the norm of all, and each shard by its own."""
    _, ax = plt.subplots(figsize=(7, 2.4))
    ax.bar(np.arange(12) - 0.2, whole, 0.4, color=BLUE, label="by the norm of all: shorter, the same direction")
    ax.bar(np.arange(12) + 0.2, apart, 0.4, color=RED, label="each shard by its own norm")
    ax.axvline(5.5, color=GREY, ls=":")
    ax.set(xlabel="gradients of rank 0 | of rank 1", ylabel="clipped", title="Clipping to length 1", ylim=(-1, 1.6))
    ax.legend()
    plt.show()


def draw_life(life):
    """Parameters and gradients that a rank holds, pass by pass."""
    _, axes = plt.subplots(1, 3, figsize=(11, 3), sharey=True)
    for ax, stage in zip(axes, (1, 2, 3), strict=True):
        rows = life(stage)
        ax.bar(range(16), rows[:, 0], 0.9, color=BLUE, label="parameters")
        ax.bar(range(16), rows[:, 1], 0.9, bottom=rows[:, 0], color=ORANGE, label="gradients")
        ax.axvline(7.5, color=INK, ls=":")
        ax.set_xticks(range(16), [*range(8), *reversed(range(8))], fontsize=8)
        ax.set(
            xlabel="forward 0 ... 7 | backward 7 ... 0", title=f"stage {stage}: at most {rows.sum(1).max():.3g} layers"
        )
    axes[0].set_ylabel("held, in layers")
    axes[0].legend(loc="upper left")
    plt.show()


def draw_traffic(traffic):
    """Vectors that a rank sends in a step."""
    _, ax = plt.subplots(figsize=(8, 1.7))
    ax.bar_label(ax.barh(list(traffic), traffic.values(), color=[GREY, ORANGE, BLUE]), fmt=" %.3f")
    ax.invert_yaxis()
    ax.set(xlabel=r"sent by a rank in a step, in $\Psi$ (8 ranks)", title="What it costs", xlim=(0, 3.2))
    plt.show()


def draw_kept(measured, formula, names):
    """Bytes that rank 0 keeps, measured, and by the formula."""
    _, ax = plt.subplots(figsize=(8, 2.8))
    for row, (found, said) in enumerate(zip(measured[0], formula[0], strict=True)):
        left = 0.0
        for i, kind in enumerate(["parameters", "gradients", "moments", "in transit"]):
            size = found.get(kind, 0) / 1e6
            ax.barh(row, size, left=left, color=[*PARTS.values(), PALETTE[7]][i], label=kind if row == 0 else None)
            left += size
        ax.plot(
            [sum(said.values()) / 1e6] * 2,
            [row - 0.45, row + 0.45],
            color=INK,
            lw=2,
            label="formula" if row == 0 else None,
        )
    ax.set_yticks(range(4), names[0])
    ax.invert_yaxis()
    ax.set(xlabel="MB of rank 0", title="What is kept, measured; and the formula")
    ax.legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.25))
    plt.show()


def draw_bytes(got, want=None):
    """Bars of what each stage keeps; a frame around what is wanted."""
    _, ax = plt.subplots(figsize=(7, 2.6))
    left = np.zeros(4)
    for i, (name, colour) in enumerate(PARTS.items()):
        ax.barh(range(4), got[:, i], left=left, color=colour, label=name)
        left += got[:, i]
    if want is not None:
        ax.barh(range(4), want.sum(1), color="none", edgecolor=INK, lw=1.5, label="wanted")
    ax.bar_label(ax.containers[len(PARTS) - 1], [f" {v:.3g}" for v in got.sum(1)])
    ax.set_yticks(range(4), ["replicated", "stage 1", "stage 2", "stage 3"])
    ax.invert_yaxis()
    ax.set(xlabel="GB a rank", title="7.5 billion parameters on 64 ranks, Adam, float32", xlim=(0, 165))
    ax.legend(loc="lower right")
