"""The checks and pictures of 11_fewer_bytes.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
import nn
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED
from collectives import price
from collectives.algorithms import allreduce
from collectives.pricing.networks import Network
from parallel.sync.compression import parse


@checks.explain_errors
def check_scale(scale):
    for largest, ranks in ((1.0, 1), (1.0, 4), (3e-9, 8), (700.0, 3), (65504.0, 1), (1e-3, 64)):
        got = float(checks.numbers(scale, largest, ranks))
        checks.expect(got > 0, f"a positive number is expected, not {got:g}.")
        checks.expect(
            np.log2(got) == round(np.log2(got)),
            f"{got:g} is no power of two: to multiply by it changes digits, not only the exponent.",
        )
        checks.expect(
            got * largest * ranks <= 65504,
            f"with numbers up to {largest:g} on {ranks} ranks and the scale {got:g} the sum may become "
            f"{got * largest * ranks:g}, above 65,504: it would be infinite.",
        )
        checks.expect(
            2 * got * largest * ranks > 65504,
            f"with numbers up to {largest:g} on {ranks} ranks the scale may be larger than {got:g}; small "
            "gradients are lost.",
        )
    checks.right("as large as the sum allows")


@checks.explain_errors
def check_signs(pack, unpack):
    rng = np.random.default_rng(17)
    for count in (16, 21):
        p = rng.standard_normal(count) + 0.3
        bits, high, low = checks.several(3, pack, p.copy())
        checks.expect(
            isinstance(bits, np.ndarray) and bits.dtype == np.uint8, "the bits are an array of uint8 (np.packbits)."
        )
        checks.expect(
            bits.nbytes == -(-count // 8),
            f"{count} signs need {-(-count // 8)} bytes, eight in each; yours takes {bits.nbytes}.",
        )
        got = checks.numbers(unpack, bits, high, low, count, shape=(count,))
        want = np.where(p > 0, p[p > 0].mean(), p[p <= 0].mean())
        checks.expect(np.array_equal(got > 0, p > 0), "the signs do not come back in their places.")
        checks.same(got, want, "what is decoded: the mean of the positive numbers, and that of the others")
    checks.right("a bit for each number, and two means")


@checks.explain_errors
def check_dgc(dgc):
    rng = np.random.default_rng(18)
    u, v, u2, v2 = np.zeros((4, 12))
    for step in range(8):
        g = rng.standard_normal(12) * np.linspace(0.1, 2, 12)
        sent = checks.numbers(dgc, g.copy(), u, v, 0.9, 2, shape=(12,))
        u2 = 0.9 * u2 + g
        v2 = v2 + u2
        chosen = sorted(range(12), key=lambda i: -abs(v2[i]))[:2]
        want = np.zeros(12)
        for i in chosen:
            want[i], u2[i], v2[i] = v2[i], 0, 0
        checks.expect(
            np.count_nonzero(sent) == 2, f"step {step}: 2 numbers are to be sent, yours are {np.count_nonzero(sent)}."
        )
        checks.same(sent, want, f"what is sent in step {step}" + (": what is in v?" if step else ""))
        checks.same(v, v2, f"v after step {step}: 0 where it was sent")
        checks.same(u, u2, f"u after step {step}: 0 where v was sent")
    checks.right("velocities are remembered in place of gradients, and both end where they were sent")


def draw_errors(curves, title):
    """Validation error over epochs."""
    _, ax = plt.subplots(figsize=(7, 3.2))
    for (name, errors), colour, marker in zip(curves.items(), (INK, RED, ORANGE, BLUE, GREEN), "osD^v", strict=False):
        ax.plot(
            range(1, len(errors) + 1), errors, marker=marker, ms=4, color=colour, label=f"{name}: {errors[-1]:.1f}%"
        )
    ax.set(xlabel="epoch", ylabel="validation error (%)", title=title, yscale="log", ylim=(1, 100))
    ax.set_yticks([1, 2, 5, 10, 20, 50, 100], [1, 2, 5, 10, 20, 50, 100])
    ax.set_yticks([], minor=True)
    ax.legend(fontsize=8)
    plt.show()


@checks.explain_errors
def check_qsgd(my_qsgd):
    """Of many tries: only whole levels, the right mean, and a variance within the bound."""
    rng = np.random.default_rng(0)
    v, s, count = rng.standard_normal(64), 4, 4000
    tries = np.array([checks.numbers(my_qsgd, v.copy(), s, rng.random(64), shape=(64,)) for _ in range(count)])
    levels = s * tries / np.linalg.norm(v)

    def draw():
        _, ax = plt.subplots(figsize=(4.6, 3.6))
        ends = [v.min(), v.max()]
        ax.plot(ends, ends, color=GREY, lw=5, alpha=0.5, label="wanted: the mean is the value")
        ax.plot(v, tries[0], ".", color=ORANGE, label="one try")
        ax.plot(v, tries.mean(0), "o", ms=4, color=RED, label=f"mean of {count:,} tries")
        ax.set(xlabel="value", ylabel="decoded", title=f"{2 * s + 1} levels")
        ax.legend(fontsize=8)

    whole = np.allclose(levels, np.round(levels), atol=1e-9)
    checks.expect(whole, "not all values are whole levels of |v| / s", draw)
    off = np.abs(tries.mean(0) - v)
    noise = np.linalg.norm(v) / s / 2 / np.sqrt(count)  # standard deviation of the mean, at most
    worst = int(off.argmax())
    said = f"the mean of {count:,} tries of a value {v[worst]:.3f} is {tries[:, worst].mean():.3f}: rounding has a bias"
    checks.expect(off.max() < 6 * noise, said, draw)
    variance = ((tries - v) ** 2).sum(1).mean() / (v @ v)
    bound = min(64 / s**2, np.sqrt(64) / s)
    said = f"the variance is {variance:.2f} |v|^2, and at most {bound:.2f} is allowed"
    checks.expect(variance <= bound, said, draw)
    checks.right(f"no bias, and a variance of {variance:.2f} |v|^2, where {bound:.2f} is the bound")
    draw()


@checks.explain_errors
def check_topk(my_topk):
    """Twelve steps against the library's top-k; nothing is lost."""
    rng = np.random.default_rng(3)
    given = rng.standard_normal((12, 20)) * np.linspace(0.2, 1.5, 20)
    given[:, 2] = 0.25  # small, but always the same way
    e = np.zeros(20)
    flat = nn.Network(nn.Linear(20, 1, bias=False), (20,), np.float64).layout
    theirs = parse(f"topk:{2.99 / flat.size}").attach(flat.region(), np.float64)  # 3 of all, rounded up
    sent, want = [], []
    for step, g in enumerate(given):
        sent.append(checks.numbers(my_topk, g.copy(), e, 3, shape=(20,)))
        padded, total = flat.zeros(np.float64), flat.zeros(np.float64)
        padded[:20] = g
        theirs.decode(theirs.encode(padded, step), total)
        want.append(total[:20])
    sent, want = np.array(sent), np.array(want)

    def draw():
        _, axes = plt.subplots(1, 3, figsize=(11, 3))
        for ax, image, name in zip(axes, (want, sent), ("wanted", "yours"), strict=False):
            ax.imshow(image, cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
            ax.set(xlabel="place in the vector", ylabel="step", title=f"sent: {name}")
        axes[2].bar(range(20), given.sum(0), color=GREY, label="sum of all g")
        axes[2].plot(range(20), sent.sum(0), "o", color=RED, label="sum of all you sent")
        axes[2].set(xlabel="place in the vector", title="what got through in 12 steps")
        axes[2].legend(fontsize=8)

    most = np.count_nonzero(sent, axis=1).max()
    checks.expect(most <= 3, f"3 entries may be sent in a step, yours sends {most}", draw)
    if not np.allclose(sent, want):
        step = int(np.argmax(~np.isclose(sent, want).all(1)))
        wanted, yours = (np.flatnonzero(row[step]).tolist() for row in (want, sent))
        said = f"step {step}: the places {wanted} are to be sent, yours sends {yours}"
        checks.expect(False, said + ("" if step == 0 else "; what is in the memory?"), draw)
    checks.same(sent.sum(0) + e, given.sum(0), "sum of all sent + e")
    checks.right("the library's top-k, bit for bit; what is not sent is remembered")
    draw()


def draw_gain(speeds, PARAMETERS, sizes, COMPUTE):
    """Seconds of a step on three networks, by the bytes of a gradient."""
    _, axes = plt.subplots(1, 3, figsize=(11, 2.4))
    for ax, (name, rate) in zip(axes, speeds.items(), strict=True):
        network = Network.hockney(20e-6, 8 / rate)
        moving = [
            price(allreduce.ring, 8, int(PARAMETERS * b), itemsize=1, network=network).seconds for b in sizes.values()
        ]
        ax.barh(list(sizes), [COMPUTE] * 4, color=BLUE, label="compute")
        bars = ax.barh(list(sizes), moving, left=COMPUTE, color=ORANGE, label="sum gradients")
        ax.bar_label(bars, [f" {COMPUTE / (COMPUTE + t):.0%}" for t in moving], fontsize=9)
        ax.set(xlabel="seconds of a step", title=name, xlim=(0, 1.2 * (COMPUTE + moving[0])))
        ax.invert_yaxis()
    axes[0].legend(loc="lower right")
    plt.show()


def draw_gradients(example, COUNT):
    """How gradients are distributed."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8))
    left.hist(example[example != 0], 80, color=BLUE)
    left.set(xlabel="gradient", ylabel="how many", title=f"{COUNT:,} gradients of one worker", yscale="log")
    right.loglog(np.sort(np.abs(example[example != 0]))[::-1], color=BLUE)
    right.set(xlabel="place in the order of size", ylabel="|gradient|", title="Few are large, most are small")
    plt.show()


def draw_methods(points, methods):
    """Bytes of a message and validation error of each method."""
    _, ax = plt.subplots(figsize=(9, 4))
    for i, (method, (share, err)) in enumerate(sorted(points.items(), key=lambda point: point[1][0])):
        ax.plot(100 * share, err, "o", ms=8, color=methods[method])
        up = 1 if i % 2 else -1  # alternately above and below, so that names do not overlap
        words = dict(textcoords="offset points", ha="center", va="center", fontsize=8, color=methods[method])
        ax.annotate(f"{method}\n{100 * share:.3g}%", (100 * share, err), xytext=(0, 20 * up), **words)
    ax.set(xscale="log", xlabel="bytes of a message, % of float32", ylabel="validation error (%)", xlim=(0.12, 160))
    ax.set(
        title="To the left: fewer bytes. Down: fewer errors", ylim=(4, 1.15 * max(err for _, err in points.values()))
    )
    ax.set_xticks([0.3, 1, 3, 10, 30, 100], [0.3, 1, 3, 10, 30, 100])
    ax.set_xticks([], minor=True)
    plt.show()


def draw_rounded(small, plain, scale, scaled):
    """Relative errors of float16, plain and scaled."""
    _, ax = plt.subplots(figsize=(7, 3))
    there = small != 0
    for name, got, colour in (("as they are", plain, RED), (f"times 2^{np.log2(scale):.0f}", scaled, BLUE)):
        ax.loglog(
            np.abs(small[there]),
            np.abs(got - small)[there] / np.abs(small[there]) + 1e-9,
            ".",
            ms=3,
            color=colour,
            label=name,
        )
    ax.axhline(2**-11, color=GREY, ls=":")
    ax.text(np.abs(small[there]).min(), 2**-11 * 1.3, "half of the last bit", fontsize=8, color=GREY)
    ax.set(xlabel="|gradient|", ylabel="relative error", title="Rounded to float16")
    ax.legend(markerscale=4)
    plt.show()


def draw_on_ranks(losses, sent, name):
    """Training loss on two ranks, for three methods."""
    _, ax = plt.subplots(figsize=(7, 3))
    for (method, each), colour in zip(losses[0].items(), (INK, BLUE, RED), strict=True):
        share = sent[0][method]["bytes_sent"] / sent[0]["none"]["bytes_sent"]
        ax.plot(range(1, 9), each, "o-", color=colour, label=f"{method}: {share:.1%} of the bytes")
    ax.set(
        xlabel="epoch",
        ylabel="training loss",
        title=f"{name[0]} on 2 real ranks, bytes counted on the wire",
        yscale="log",
    )
    ax.legend()
    plt.show()
