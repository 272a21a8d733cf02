"""The checks of 10_asynchrony.py, and the server that the workers of its exercises talk to."""

import matplotlib.pyplot as plt
import numpy as np

import checks
import nn
from checks import GREY, INK, RED


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
