"""The checks of 13_pipelines.py."""

from itertools import combinations, pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, INK, RED
from parallel.strategies.pipeline.checking import check
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
        got = list(checks.call(my_cuts, list(seconds), p))
        checks.expect(
            len(got) == p - 1 and got == sorted(set(got)) and all(0 < cut < len(seconds) for cut in got),
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


def draw_rows(actions, error):
    """What each rank was to do, one action after the other; red: what cannot run, or the rank that lacks something."""
    _, ax = plt.subplots(figsize=(10, 0.5 * len(actions) + 0.6))
    for rank, row in enumerate(actions):
        for i, action in enumerate(row):
            wrong = rank == error.rank and error.column in (None, i)
            ax.barh(rank, 0.9, left=i, color=RED if wrong else BLUE, alpha=1 if wrong else 0.4)
            ax.text(i + 0.45, rank, str(action), ha="center", va="center", color=INK, fontsize=8)
    ax.set_yticks(range(len(actions)), [f"rank {rank}" for rank in range(len(actions))])
    columns = range(max(map(len, actions)))
    ax.set_xticks(np.arange(len(columns)) + 0.45, columns)
    ax.set(xlabel="column", title="yours, before it is run")
    ax.invert_yaxis()
