"""The checks and pictures of 18_experts.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, ORANGE, RED


@checks.explain_errors
def check_auxiliary(auxiliary):
    even = np.full((8, 4), 0.25)
    for chosen in (np.arange(8)[:, None] % 4, np.stack([np.arange(8) % 4, (np.arange(8) + 1) % 4], axis=1)):
        checks.same(checks.numbers(auxiliary, even, chosen), 1.0, "the loss of even choices and even scores")
    scores = np.array([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.6, 0.1], [0.5, 0.2, 0.2, 0.1]])
    chosen = scores.argmax(axis=1)[:, None]
    share = [sum(chosen.ravel() == e) / 4 for e in range(4)]
    want = 4 * sum(share[e] * sum(row[e] for row in scores) / 4 for e in range(4))
    checks.same(
        checks.numbers(auxiliary, scores, chosen), want, "the loss of four positions, of which three choose expert 0"
    )
    checks.right("1 where all is even, more where the favourites are chosen")


@checks.explain_errors
def check_capacity(keep):
    for chosen, experts, room in (
        ([0, 0, 1, 0, 1, 2], 3, 2),
        ([3] * 6, 4, 1),
        ([0, 1, 2, 3], 4, 5),
        ([1, 0, 1, 0, 1], 2, 2),
    ):
        got = np.asarray(checks.call(keep, np.array(chosen), experts, room))
        checks.expect(
            got.shape == (len(chosen),), f"True or False for each of {len(chosen)} positions; yours: {got.shape}."
        )
        taken, want = {}, []
        for e in chosen:
            taken[e] = taken.get(e, 0) + 1
            want.append(taken[e] <= room)
        checks.expect(
            got.tolist() == want,
            f"positions choose {chosen}, each expert has room for {room}: the first of each are kept, {want}; "
            f"yours: {got.tolist()}.",
        )
    checks.right("first come, first served, expert by expert")


@checks.explain_errors
def dispatched(dispatch, chosen, experts, ranks, rank):
    """(slots, counts) of a rank's positions, where they are right."""
    slots, counts = checks.several(2, dispatch, chosen.copy(), experts, ranks)
    flat = chosen.ravel().tolist()
    order = [slot for e in range(experts) for slot, choice in enumerate(flat) if choice == e]
    checks.same(slots, order, f"the slots of rank {rank}")
    each = experts // ranks
    want = [[flat.count(each * s + e) for e in range(each)] for s in range(ranks)]
    checks.same(counts, want, f"the counts of [rank, expert] of rank {rank}")
    return np.asarray(slots), np.asarray(counts)


def draw_load(E, load, first, n):
    """How many positions each expert has."""
    _, ax = plt.subplots(figsize=(5, 2.6))
    ax.bar(range(E), load(first), color=BLUE)
    ax.axhline(n / E, color=GREY, ls=":", label="even")
    ax.set(xlabel="expert", ylabel="positions", title="An expert each: who has how many", xticks=range(E))
    ax.legend()
    plt.show()


def draw_balance(busiest, biases, E):
    """Load of the busiest expert and the biases, over the steps."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8))
    left.plot(busiest, color=RED)
    left.axhline(1, color=GREY, ls=":")
    left.set(xlabel="step", ylabel="load of the busiest", title="1 is even", ylim=(0.8, None))
    right.plot(np.array(biases), label=[f"expert {e}" for e in range(E)])
    right.set(xlabel="step", ylabel="bias", title="The bias that does it")
    right.legend()
    plt.show()


def draw_sent(routing, mine, sent, E):
    """Experts of the rows, in the order in which they are sent."""
    _, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True)
    for rank, ax in enumerate(axes):
        experts = routing.chosen[mine[rank]].ravel()[sent[rank][0]]
        ax.scatter(range(len(experts)), experts, c=[(BLUE, ORANGE)[e // 2] for e in experts], s=60)
        ax.set(xlabel="row, as it is sent", title=f"rank {rank}: blue goes to rank 0, orange to 1", yticks=range(E))
    axes[0].set_ylabel("expert")
    plt.show()
