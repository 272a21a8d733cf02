"""The checks and pictures of 13_pipelines.py."""

from itertools import combinations, pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED, SKY
from parallel.strategies.pipeline.checking import check
from parallel.strategies.pipeline.picture import COLOURS
from parallel.strategies.pipeline.schedules import rows


@checks.explain_errors
def check_cuts(my_cuts):
    for seconds, p in (
        ([1, 1, 1, 1], 2),
        ([4, 4, 4, 1, 1], 2),
        ([5, 1, 1, 1, 1, 5], 3),
        ([1, 2, 3, 4, 5, 6, 7], 4),
        ([9, 1], 2),
    ):
        got = np.ravel(checks.call(my_cuts, list(seconds), p)).tolist()
        checks.expect(
            len(got) == p - 1
            and all(isinstance(cut, int) and 0 < cut < len(seconds) for cut in got)
            and got == sorted(set(got)),
            f"{p} stages of {len(seconds)} layers have {p - 1} cuts, different ones, between 1 and "
            f"{len(seconds) - 1}, in order; "
            f"yours: {got}.",
        )

        def slowest(cuts, seconds=seconds):
            ends = [0, *cuts, len(seconds)]
            return max(sum(seconds[a:b]) for a, b in pairwise(ends))

        best = min(map(slowest, combinations(range(1, len(seconds)), p - 1)))
        checks.expect(
            slowest(got) == best,
            f"layers of {seconds} seconds, cut at {got}: the slowest stage takes {slowest(got)}, and {best} is "
            "possible. A pipeline "
            "is as fast as its slowest stage.",
        )
    checks.right("no other cuts have a faster slowest stage")


@checks.explain_errors
def check_finish(finish):
    times = {"F": 1.0, "B": 2.0}
    for name, p, m in (("naive", 3, 2), ("gpipe", 4, 5), ("1f1b", 4, 8), ("1f1b", 2, 3)):
        schedule = rows(name, p, m)
        orders = [[(action.kind, action.micro_batch) for action in row] for row in schedule]
        got = float(checks.numbers(finish, [list(order) for order in orders]))
        want = check(schedule).makespan
        work = max(sum(times[kind] for kind, _ in order) for order in orders)
        checks.expect(
            got != work or want == work,
            f"{name} on {p} stages, {m} micro-batches: {got:g} is what a rank works; it also waits for its neighbours.",
        )
        checks.same(got, want, f"the time of {name} on {p} stages, {m} micro-batches")
    wrong = [[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 0), ("F", 1), ("B", 0), ("B", 1)]]
    got = checks.call(finish, wrong)
    checks.expect(
        np.isinf(got),
        f"two stages that wait for each other never end: infinity (np.inf) is expected, and yours says {got:g}.",
    )
    checks.right("as the checker says, and a circle is found")


MOST_COLUMNS = 40  # of a picture of actions


def draw_rows(actions, error):
    """What each rank was to do, one action after the other; red: what cannot run, or the rank that lacks something.

    Of long rows it shows MOST_COLUMNS, the wrong one among them.
    """
    first = max(0, (error.column or 0) + 1 - MOST_COLUMNS)
    columns = range(first, min(first + MOST_COLUMNS, max(map(len, actions))))
    _, ax = plt.subplots(figsize=(10, 0.5 * len(actions) + 0.6))
    for rank, row in enumerate(actions):
        for i, action in list(enumerate(row))[first : first + MOST_COLUMNS]:
            wrong = rank == error.rank and error.column in (None, i)
            ax.barh(rank, 0.9, left=i, color=RED if wrong else BLUE, alpha=1 if wrong else 0.4)
            ax.text(i + 0.45, rank, str(action), ha="center", va="center", color=INK, fontsize=8)
    ax.set_yticks(range(len(actions)), [f"rank {rank}" for rank in range(len(actions))])
    ax.set_xticks(np.array(columns) + 0.45, columns)
    ax.set(xlabel="column", title="yours, before it is run")
    ax.invert_yaxis()


def draw_bubble(micro):
    """Idle share and activations of GPipe, over the number of micro-batches."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    for p, colour in ((2, GREEN), (4, BLUE), (8, ORANGE)):
        idle = [1 - 3 * m / check("gpipe", p, int(m)).makespan for m in micro]
        left.plot(micro, 100 * (p - 1) / (micro + p - 1), color=colour, lw=5, alpha=0.35)
        left.plot(micro, 100 * np.array(idle), "o", color=colour, label=f"{p} stages")
        assert np.allclose(idle, (p - 1) / (micro + p - 1))
    kept = np.array([[max(check("gpipe", p, int(m)).peaks) for m in micro] for p in (2, 4, 8)])
    assert (kept == micro).all(), "the same for any number of stages"
    right.plot(micro, kept[0], "o-", color=INK, label="2, 4 and 8 stages: all m")
    right.legend()
    for ax in (left, right):
        ax.set(xscale="log", xlabel="micro-batches m")
        ax.set_xticks(micro, micro)
        ax.set_xticks([], minor=True)
    left.set(ylabel="idle (%)", title="The bubble: line the formula, dots the checker")
    right.set(ylabel="micro-batches kept", yscale="log", title="What it costs: activations of all m")
    left.legend()
    plt.show()


def draw_peaks(micro):
    """Micro-batches that are kept by GPipe and 1F1B."""
    _, ax = plt.subplots(figsize=(7, 2.8))
    ax.plot(micro, micro, "s-", color=INK, label="GPipe, any number of stages")
    for p, colour, mark in ((8, ORANGE, "^"), (4, BLUE, "o"), (2, GREEN, "v")):
        kept = [max(check("1f1b", p, int(m)).peaks) for m in micro]
        ax.plot(micro, kept, f"{mark}-", color=colour, label=f"1F1B, {p} stages: at most {max(kept)}")
    ax.set(title="Micro-batches whose activations are kept", xlabel="micro-batches m", ylabel="on the first stage")
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(micro, micro)
        axis.set_ticks([], minor=True)
    ax.legend()
    plt.show()


def draw_halves():
    """The two halves of backward, and who waits for which."""
    _, ax = plt.subplots(figsize=(7, 2.1))
    ax.set_title("Backward in two halves: who waits for which")
    for text, at, colour in (
        ("x, gy", 0.06, GREY),
        ("I: gx = gy W'", 0.4, COLOURS["I"]),
        ("W: gW = x' gy", 0.4, COLOURS["W"]),
    ):
        y = {"x, gy": 0.5, "I: gx = gy W'": 0.8, "W: gW = x' gy": 0.2}[text]
        ax.text(at, y, text, ha="center", va="center", bbox=dict(boxstyle="round,pad=0.5", fc="white", ec=colour, lw=2))
    for y, what in ((0.8, "the stage before, at once"), (0.2, "the update, at the end of the step")):
        ax.annotate("", (0.29, y), (0.12, 0.5), arrowprops=dict(arrowstyle="-|>", color=GREY))
        ax.annotate("", (0.62, y), (0.51, y), arrowprops=dict(arrowstyle="-|>", color=GREY))
        ax.text(0.64, y, what, va="center")
    ax.axis("off")
    plt.show()


def draw_table(table, names):
    """Makespan and memory of the schedules."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3), sharey=True)
    columns = list(zip(*table.values(), strict=True))
    left.barh(names, columns[0], color=BLUE)
    left.axvline(24, color=INK, ls=":")
    left.bar_label(left.containers[0], [f" {t:g}, idle {share:.0%}" for t, share in zip(*columns[:2], strict=True)])
    right.barh(names, columns[2], color=ORANGE)
    right.bar_label(right.containers[0], fmt=" %g")
    left.set(xlabel="makespan, units (24 of them work: the dotted line)", title="Time", xlim=(0, 125))
    right.set(xlabel="micro-batches whose activations are kept", title="Memory", xlim=(0, 9))
    left.invert_yaxis()
    plt.show()


def draw_standstill(wrong, done):
    """Two ranks that wait for each other; what has run is blue."""
    _, ax = plt.subplots(figsize=(6, 1.9))
    for rank, row in enumerate(wrong):
        for i, action in enumerate(row):
            stands = not any(action == other for other in done[rank])
            ax.barh(rank, 0.9, 0.55, left=i, color=GREY if stands else BLUE, alpha=0.4 if stands else 1)
            ax.text(i + 0.45, rank, str(action), ha="center", va="center", color=INK if stands else "white")
    both_ways = dict(arrowstyle="<|-|>", color=RED, lw=2, shrinkA=0, shrinkB=0)
    ax.annotate("", (1.45, 0.72), (1.45, 0.28), arrowprops=both_ways)
    ax.text(1.6, 0.5, "0B0 waits for 1B0, 1F1 waits for 0F1", color=RED, va="center", fontsize=9)
    ax.set_yticks(range(2), ["rank 0", "rank 1"])
    ax.set_xticks([])
    ax.invert_yaxis()
    ax.set_title("blue has run; nothing else ever will")
    plt.show()


def draw_layers(T, a, w):
    """Seconds, outputs and weights of five layers."""
    _, axes = plt.subplots(1, 3, figsize=(10, 2.2))
    for ax, values, name, colour in zip(
        axes, (T, a, w), ("seconds", "bytes out", "bytes of weights"), (BLUE, GREEN, ORANGE), strict=True
    ):
        ax.bar_label(ax.bar(range(5), values, color=colour), fmt="%g", fontsize=8)
        ax.set(xlabel="layer", title=name, ylim=(0, 1.2 * max(values)))
    plt.show()


def draw_plan(plan, stage, a, B):
    """Seconds of the stages, the link between them, and data parallelism."""
    _, ax = plt.subplots(figsize=(7, 1.9))
    bars, labels, colours = [], [], []
    for s in plan.stages:
        bars.append(stage(s.first, s.last + 1, s.replicas))
        labels.append(f"layers {s.first}-{s.last} on {s.replicas}")
        colours.append(BLUE)
    bars += [2 * a[plan.stages[0].last] / B, plan.data_parallel]
    labels += ["the link between them", "all layers on 8"]
    colours += [SKY, RED]
    ax.bar_label(ax.barh(labels, bars, color=colours), fmt=" %.2f")
    ax.invert_yaxis()
    ax.set(xlabel="seconds a mini-batch; the slowest counts", xlim=(0, 6.2), title="The plan for 8 ranks")
    plt.show()


def plans_of(ranks, stage):
    """Return a function that draws seconds of the best plan, yours and the wanted one, over the ranks."""

    def draw(got, want):
        _, ax = plt.subplots(figsize=(6.4, 3))
        ax.plot(ranks, [stage(0, 5, m) for m in ranks], ":", color=GREY, label="data parallelism")
        ax.plot(ranks, want, color=GREY, lw=5, alpha=0.5, label="wanted")
        ax.plot(ranks, got, "o-", color=RED, label="yours")
        ax.set(xlabel="ranks", ylabel="seconds a mini-batch", title="The best plan", ylim=(0, None))
        ax.legend()

    return draw
