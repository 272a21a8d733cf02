"""The checks and pictures of 10_asynchrony.py, and the server that the workers of its exercises talk to."""

from math import inf

import matplotlib.pyplot as plt
import numpy as np

import checks
import nn
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED


class Server:
    """Parameters, and SGD. Notes what is asked of it."""

    def __init__(self, w, rate):
        self.w, self.rate, self.log = w.copy(), rate, []

    def fetch(self):
        self.log.append(("fetch", self.w.copy()))
        return self.w.copy()

    def push(self, d):
        self.log.append(("push", d.copy()))
        self.w -= self.rate * d


def bowl(w):
    """The gradient of (w0^2 + 4 w1^2) / 2."""
    return w * np.array([1.0, 4.0])


def walk(worker, steps=12, fetch=4, push=3):
    """The places of the worker's copy, what it asked of the server in which step, and what it pushed."""
    server = Server(np.array([1.0, 1.0]), 0.1)
    w, gathered, places, asked = np.zeros(2), np.zeros(2), [], []
    for step in range(steps):
        checks.change(worker, step, w, gathered, server, bowl, 0.1, fetch, push)
        places.append(w.copy())
        asked += [f"{kind} in step {step}" for kind, _ in server.log[len(asked) :]]
    return np.array(places), asked, np.array([d for kind, d in server.log if kind == "push"])


def by_definition(fetch=4, push=3):
    """What is wanted, worked out from the definition."""
    server, waiting, places, asked, pushed = np.array([1.0, 1.0]), 0.0, [], [], []
    for step in range(12):
        if step % fetch == 0:
            w = server.copy()
            asked.append(f"fetch in step {step}")
        moved = bowl(w)
        w = w - 0.1 * moved
        waiting = moved if step % push == 0 else waiting + moved
        if step % push == push - 1:
            server = server - 0.1 * waiting
            asked.append(f"push in step {step}")
            pushed.append(waiting)
        places.append(w)
    return np.array(places), asked, np.array(pushed)


def draw_walk(got, want):
    """w over the steps."""
    _, axes = plt.subplots(1, 2, figsize=(9, 2.8))
    for i, ax in enumerate(axes):
        ax.plot(want[:, i], color=GREY, lw=5, alpha=0.5, label="wanted")
        ax.plot(got[:, i], "o-", color=RED, label="yours")
        ax.set(xlabel="step", title=f"w[{i}] of the worker, fetch every 4, push every 3")
    axes[0].legend()


@checks.explain_errors
def check_worker(worker):
    places, asked, pushed = walk(worker)
    wanted_places, wanted, wanted_pushes = by_definition()
    draw = lambda *_: draw_walk(places, wanted_places)
    said = f"wanted are {', '.join(wanted[:5])}, ...; yours are {', '.join(asked[:5]) or 'none'}"
    checks.expect(asked == wanted, said, draw)
    said = "the worker's w stays as it was given: change it in place, w[:] = ..., not w = ..."
    checks.expect(places.any(), said, draw)
    own = places.copy()
    own[4:] = wanted_places[4:]
    checks.same(own, wanted_places, "the worker's parameters until it fetches again", draw=draw)
    checks.same(pushed, wanted_pushes, "what is pushed, a row for each push")
    checks.same(places, wanted_places, "the worker's parameters after each step", draw=draw)
    checks.right("fetch, push and the worker's own steps are as in the paper")
    draw_walk(places, wanted_places)
    plt.show()


@checks.explain_errors
def check_staleness(staleness):
    rng = np.random.default_rng(15)
    logs = [[("read", 0), ("push", 0)], [("read", 0), ("read", 1), ("push", 1), ("push", 0)]]
    busy, log = set(), []
    for worker in rng.integers(4, size=60).tolist():
        log.append(("push" if worker in busy else "read", worker))
        busy ^= {worker}
    for each in (*logs, log):
        want = []
        for i, (kind, worker) in enumerate(each):
            if kind == "push":
                read = max(j for j in range(i) if each[j] == ("read", worker))
                want.append(sum(other == "push" for other, _ in each[read:i]))
        got = checks.call(staleness, list(each))
        checks.expect(
            np.shape(got) == (len(want),), f"{len(want)} pushes have a staleness each; yours are {np.size(got)}."
        )
        checks.same(got, want, "the staleness of every push" + (f" of {each}" if len(each) < 5 else ""))
    checks.right("what the server has applied between the worker's read and its push")


@checks.explain_errors
def check_adagrad(adagrad):
    rng = np.random.default_rng(0)
    flat = nn.Network(nn.Linear(8, 1, bias=False), (8,), np.float64).layout
    theirs, slots = flat.zeros(np.float64), {"squares": flat.zeros(np.float64)}
    theirs[:] = rng.standard_normal(theirs.shape)
    w, squares = theirs.copy(), np.zeros_like(theirs)
    for step in range(20):
        d = rng.standard_normal(w.shape) * 10.0 ** rng.integers(-2, 3)
        checks.change(adagrad, w, d.copy(), squares, 0.1)
        nn.Adagrad(0.1).update(theirs, d, slots, step, flat.region())
        checks.same(squares, slots["squares"], f"the sums of squares after push {step}")
        checks.same(w, theirs, f"w after push {step}", tolerance=1e-6)
    checks.right("20 pushes of very different lengths: as nn.Adagrad")


@checks.explain_errors
def check_elastic(elastic):
    rng = np.random.default_rng(16)
    worker, center = rng.standard_normal((2, 5))
    x, c = worker.copy(), center.copy()
    checks.change(elastic, x, c, 0.25)
    checks.expect(not np.array_equal(c, center), "the center does not move: it is pulled towards the worker.")
    checks.expect(not np.array_equal(x, worker), "the worker does not move: it is pulled towards the center.")
    checks.expect(
        np.allclose(x + c, worker + center),
        "the sum of both changes: what one is moved by, the other is moved back by. Has one been changed "
        "before the other's "
        "distance was taken?",
    )
    checks.same(x - c, 0.5 * (worker - center), "the distance after a pull of a quarter from both sides")
    checks.right("both move by the same length, towards each other")


def draw_rule(got, want):
    """Who may go, for every pair of clocks."""
    _, axes = plt.subplots(1, 2, figsize=(7.4, 3.4), sharey=True)
    for ax, table, name in zip(axes, (got, want), ("yours", "wanted"), strict=True):
        ax.imshow(table, cmap="Blues", vmin=0, vmax=1.6, origin="lower")
        for (slowest, clock), goes in np.ndenumerate(table):
            ax.text(clock, slowest, "goes" if goes else "waits", ha="center", va="center", fontsize=7, color=INK)
            if goes != want[slowest, clock]:
                ax.add_patch(plt.Rectangle((clock - 0.46, slowest - 0.46), 0.92, 0.92, fill=False, ec=RED, lw=2.5))
        ax.set(xlabel="the worker's clock", title=f"s = 2: {name}")
    axes[0].set_ylabel("the slowest worker's clock")


def draw_late(in_step, free):
    """Staleness, and validation error over time."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    for found, name, colour, shift in ((in_step, "synchronous", GREY, -0.2), (free, "asynchronous", BLUE, 0.2)):
        counts = np.bincount(found["late"], minlength=8)
        left.bar(
            np.arange(len(counts)) + shift,
            100 * counts / sum(counts),
            0.4,
            color=colour,
            label=f"{name}, mean {np.mean(found['late']):.1f}",
        )
        right.plot(found["errors"], color=colour, label=f"{name}: {found['updates']} updates")
    left.set(xlabel="updates between read and push", ylabel="updates (%)", title="Staleness")
    right.set(xlabel="seconds (simulated)", ylabel="validation error (%)", title="Error over time", yscale="log")
    right.set_yticks([5, 10, 20, 50], [5, 10, 20, 50])
    right.set_yticks([], minor=True)
    left.legend()
    right.legend()
    plt.show()


def draw_parabola():
    """Descent on a parabola with late gradients, for three delays and three rates."""
    _, axes = plt.subplots(1, 3, figsize=(11, 2.8), sharey=True)
    for ax, tau in zip(axes, (0, 3, 10), strict=True):
        for eta, colour in ((0.05, BLUE), (0.12, ORANGE), (0.2, RED)):
            way = [1.0] * (tau + 1)
            for _ in range(120):
                way.append(way[-1] - eta * way[-1 - tau])
            ax.plot(way[tau:], color=colour, label=rf"$\eta$ = {eta}")
        ax.axhline(0, color=GREY, lw=0.8)
        ax.set(xlabel="updates", title=rf"$\tau$ = {tau}", ylim=(-1.6, 1.6))
    axes[0].set_ylabel("w")
    axes[0].legend(loc="upper right")
    plt.show()


def draw_largest_rates(taus, formula, measured):
    """The largest rate that converges over the staleness."""
    _, ax = plt.subplots(figsize=(6.4, 3))
    ax.plot(taus, formula, color=GREY, lw=5, alpha=0.5, label="the formula")
    ax.plot(taus, measured, "o", ms=4, color=BLUE, label="roots of the polynomial")
    ax.set(
        xlabel=r"staleness $\tau$",
        ylabel="largest rate that converges",
        title="Stale gradients ask for small steps",
        yscale="log",
    )
    ax.legend()
    plt.show()


def draw_clocks(bounds, runs, SLOW):
    """Clocks of three workers under four bounds."""
    _, axes = plt.subplots(1, 4, figsize=(11, 3), sharey=True)
    for ax, bound, found in zip(axes, bounds, runs, strict=True):
        for i, colour in enumerate((BLUE, GREEN, RED)):
            times, clocks = zip(*[(t, c) for t, worker, c in found["starts"] if worker == i], strict=True)
            ax.step(times, clocks, where="post", color=colour, label=f"{SLOW[i]} s a step")
            if i == 2 and bound < inf:
                ax.fill_between(times, clocks, np.array(clocks) + bound, step="post", color=RED, alpha=0.12, lw=0)
        ax.set(xlabel="seconds", title=f"s = {bound}: {found['updates']} updates")
    axes[0].set_ylabel("clock: steps begun")
    axes[0].legend(fontsize=8)
    plt.show()


def draw_bounds(some, found):
    """Updates and staleness over the bound."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
    left.plot(range(len(some)), [each["updates"] for each in found], "o-", color=BLUE)
    left.set(ylabel="updates in 60 s", title="Speed", ylim=(0, None))
    right.plot(range(len(some)), [np.mean(each["late"]) for each in found], "o-", color=BLUE, label="mean")
    right.plot(range(len(some)), [max(each["late"]) for each in found], "s-", color=RED, label="most")
    right.set(ylabel="staleness, updates", title="Staleness", ylim=(0, None))
    right.legend()
    for ax in (left, right):
        ax.set_xticks(range(len(some)), [f"s = {bound}" for bound in some])
    plt.show()


def draw_rates_of_adagrad():
    """Rates of five parameters over the pushes."""
    pushes = np.random.default_rng(0).standard_normal((20, 5))
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    ax.plot([0.1 / np.sqrt((pushes[: n + 1] ** 2).sum(0)) for n in range(20)])
    ax.set(
        xlabel="pushes",
        ylabel=r"rate $\eta / \sqrt{G}$",
        title="Adagrad: each of five parameters has a rate of its own",
    )
    plt.show()


def draw_downpour(staleness, errors, name):
    """Staleness as the server counts it, and validation error over the epochs."""
    counts = np.sum([np.pad(row, (0, 20))[:20] for row in staleness[0]], axis=0)
    counts = counts[: np.flatnonzero(counts).max() + 1]
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
    left.bar(range(len(counts)), 100 * counts / counts.sum(), color=BLUE)
    left.set(xlabel="updates between read and push", ylabel="pushes (%)", title="Staleness, counted by the server")
    left.set_xticks(range(len(counts)))
    right.plot(range(1, 7), errors[0], "o-", color=BLUE)
    right.set(xlabel="epoch", ylabel="validation error (%)", title=f"{name[0]}, 2 workers, Adagrad", ylim=(0, None))
    plt.show()


def draw_elastic(ways):
    """Three workers and their center over the steps."""
    ways = np.array(ways)
    _, ax = plt.subplots(figsize=(7, 2.8))
    ax.plot(ways[:, :3], color=ORANGE, lw=1, label=["three workers", "", ""])
    ax.plot(ways[:, 3], color=BLUE, lw=2.5, label="center")
    ax.axhline(1, color=GREY, ls=":")
    ax.set(title="elastic averaging: the bottom is at 1", xlabel="step", ylabel="x")
    ax.legend()
    plt.show()


def draw_dealt(ideal, t_whole, t_small, t_twice):
    """Seconds of an evaluation by four ways of dealing out the batch."""
    _, ax = plt.subplots(figsize=(6.4, 1.9))
    names = ["a quarter each", "32 chunks", "32 chunks, the last twice", "ideal: no worker ever idle"]
    bars = ax.barh(names, [t_whole, t_small, t_twice, ideal], color=[RED, ORANGE, BLUE, GREY])
    ax.bar_label(bars, fmt=" %.1f s")
    ax.invert_yaxis()
    ax.set(
        xlabel="seconds of an evaluation", title="One of four workers is four times slower", xlim=(0, 1.15 * t_whole)
    )
    plt.show()


def draw_curvature(curve, losses):
    """Training loss of L-BFGS and of gradient descent, over evaluations of the whole training set."""
    _, ax = plt.subplots(figsize=(6.8, 3))
    ax.plot(curve, color=BLUE, label="L-BFGS")
    ax.plot(losses, color=ORANGE, label="gradient descent, rate 0.5")
    ax.set(xlabel="evaluations of the whole training set", ylabel="training loss", yscale="log")
    ax.set_title("What curvature is worth")
    ax.legend()
    plt.show()
