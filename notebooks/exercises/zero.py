"""The checks of 12_zero.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import INK
from collectives.steps import chunk


def kept(sizes, shared_from, ranks):
    """Bytes of each kind that a rank keeps in stages 0 to 3: `sizes` bytes a number, shared out from a stage on."""
    rows = []
    for stage in range(4):
        rows.append([size / ranks if stage >= since else size for size, since in zip(sizes, shared_from, strict=True)])
    return np.array(rows, float)


@checks.explain_errors
def check_bytes(my_bytes, psi, draw):
    mine = [checks.several(3, my_bytes, psi, 64, stage) for stage in range(4)]
    wanted = psi * kept((4, 4, 8), (3, 2, 1), 64)
    checks.same(mine, wanted, "GB of [stage, (parameters, gradients, moments)]", draw=draw)
    checks.right(f"{wanted[0].sum():.0f} GB become {wanted[3].sum():.1f}")
    draw(np.array(mine, float))


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
