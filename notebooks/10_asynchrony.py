# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10. Asynchrony: training without waiting, and what it costs
#
# So far every rank waits in every step for the slowest one. Among a thousand machines there is always one that is slow
# at the moment. What if ranks do not wait? Then a gradient is computed with parameters that others have changed
# meanwhile: it is **stale**. This notebook
#
# 1. builds asynchronous training in thirty lines, and draws it;
# 2. measures staleness, and shows its effect on a parabola;
# 3. bounds it: **stale synchronous parallel** (SSP);
# 4. writes a worker of **Downpour SGD**, and runs the library's on real ranks;
# 5. averages **elastically**;
# 6. shows **Sandblaster**, which keeps the whole batch and shortens the waiting.

# %%
# %load_ext parallel.launch.notebook

# %%
import heapq
from math import inf

import numpy as np
from threadpoolctl import threadpool_limits

import checks
import exercises.asynchrony as exercise
import nn
from collectives import draw_timeline
from nn.optim.lbfgs import LBFGS, Vectors
from parallel.sync.asynchronous.clock import allowed

# %matplotlib inline
checks.style()
limits = threadpool_limits(1, user_api="blas")  # matrices as small as ours are multiplied fastest by one thread

# %% [markdown]
# ## The work
#
# The digits, and a network with one hidden layer. Worker i of p has every p-th sample. All gradients are divided by
# the samples of *all* workers' batches, so that p updates, one of each, are together one step of data parallelism.


# %%
def work():
    """(network, loss, optimizer): the same in every process."""
    layers = nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    return nn.Network(nn.Sequential(*layers), (64,), np.float64), nn.CrossEntropyLoss(), nn.SGD(0.2)


data = nn.data.load("digits", validation=0.2, flat=True, normalise=True, dtype=np.float64)
x_train, y_train = data.train.batch()
x_validation, y_validation = data.validation.batch()
network, loss_function, _ = work()
ctx = network.context()


def gradient(w, x, y, total):
    """The part of these samples of the mean gradient over `total` samples, as a flat array."""
    g = network.layout.zeros(np.float64)
    output, saved = network.forward(network.layout.views(w), x, ctx)
    _, gz = loss_function(output, y, total, ctx)
    network.backward(network.layout.views(w), network.layout.views(g), gz, saved, ctx)
    return g


def error(w):
    """Validation error in percent."""
    output, _ = network.forward(network.layout.views(w), x_validation, ctx)
    return 100 * np.mean(output.argmax(1) != y_validation)


# %% [markdown]
# ## 1. Clocks
#
# A server has the parameters. A worker reads them, computes a gradient, sends it; the server applies it at once. The
# worker's **clock** counts what it has sent. Who may start the next step?
#
# - *synchronous*: a worker that is not ahead of any other;
# - *asynchronous*: every worker, always;
# - between the two: a worker that is at most s steps ahead of the slowest. That is the **bound** of stale synchronous
#   parallel (Ho et al. 2013): a worker may start clock c only if
#
# $$ c - \min_j c_j \le s . $$
#
# s = 0 is synchronous, s = infinity asynchronous.
#
# **Exercise 1.** Write the rule. (The starter code lets every worker start.)


# %%
def may_start(clock, slowest, bound):
    """Whether a worker at this clock may begin, where the slowest of all is at clock `slowest`."""
    # gap: the rule of SSP, True or False
    # return True
    # solution
    return clock - slowest <= bound
    # wrong: who may go
    # return clock - slowest < bound
    # end


# %%
wanted = np.array([[allowed(clock, slowest, 2) for clock in range(7)] for slowest in range(4)], float)
got = [[checks.call(may_start, clock, slowest, 2) for clock in range(7)] for slowest in range(4)]
checks.same(got, wanted, "who may go (1) or waits (0), [slowest clock, own clock]", draw=exercise.draw_rule)
checks.expect(checks.call(may_start, 99, 0, inf), "without a bound (s = inf) every worker may always start")
checks.right("with s = 2 no worker is more than three steps ahead, the current one included")
exercise.draw_rule(np.array(got, float), wanted)

# %% [markdown]
# Here is a complete asynchronous training. Nothing depends on the speed of this computer: workers are simulated, one
# event after the other, and a step of worker i takes `seconds[i]`. Read it.


# %%
def train(seconds, bound, end=40.0, rate=0.2, batch=16):
    """Simulate len(seconds) workers and a server; returns what happened."""
    workers = range(len(seconds))
    clock, since, w, version = [0] * len(seconds), [0.0] * len(seconds), network.layout.zeros(np.float64), 0
    network.layout.initialize(w, 0)
    idle, coming, now = set(workers), [], 0.0  # coming: (when, worker, version read, parameters read)
    events, late, errors, starts = [], [], [], []
    while now <= end:
        for i in sorted(idle):
            if may_start(clock[i], min(clock), bound):
                idle.remove(i)
                events.append({"rank": i, "name": "wait", "start": since[i], "end": now})
                events.append({"rank": i, "name": f"compute {clock[i]}", "start": now, "end": now + seconds[i]})
                starts.append((now, i, clock[i]))
                heapq.heappush(coming, (now + seconds[i], i, version, w.copy()))
        now, i, read, copy = heapq.heappop(coming)  # the next worker that has finished
        while len(errors) < now and len(errors) <= end:
            errors.append(error(w))
        chosen = np.random.default_rng([i, clock[i]]).integers(len(x_train) // len(seconds), size=batch)
        x, y = x_train[i :: len(seconds)][chosen], y_train[i :: len(seconds)][chosen]
        w -= rate * gradient(copy, x, y, batch * len(seconds))  # computed with the copy, applied to what there is now
        late.append(version - read)
        version += 1
        clock[i] += 1
        idle.add(i)
        since[i] = now
    return {"events": events, "late": late, "errors": errors, "starts": starts, "updates": version}


def first(events, end):
    """The events that have begun before, cut there."""
    return [e | {"end": min(e["end"], end)} for e in events if e["start"] < end and e["start"] < e["end"]]


SLOW = (1.0, 1.1, 3.0)  # seconds of a step: the third worker is slow
in_step, free = train(SLOW, 0), train(SLOW, inf)
draw_timeline(first(in_step["events"], 15), title="synchronous, s = 0")

# %%
draw_timeline(first(free["events"], 15), title="asynchronous")

# %% [markdown]
# The number in a bar is the clock. Above, two of three workers are idle most of the time. Below, no worker waits: there
# are more than twice as many updates in the same time. But how good are they?
#
# ## 2. Staleness
#
# The **staleness** of an update is how many others the server has applied between the read and the push.
#
# **Exercise 2.** Compute it from the server's log: ("read", worker) and ("push", worker) in the order in which they
# came.


# %%
def my_staleness(log):
    """The staleness of every push, in order."""
    found = []
    # gap: how many pushes had there been when this worker read
    # for i, (kind, worker) in enumerate(log):
    #     if kind == "push":
    #         found.append(0)
    # solution
    pushes, read = 0, {}
    for kind, worker in log:
        if kind == "read":
            read[worker] = pushes
        else:
            found.append(pushes - read[worker])
            pushes += 1
    # wrong: the staleness of every push
    # last = {}
    # for i, (kind, worker) in enumerate(log):
    #     if kind == "push":
    #         found.append(i - last.get(worker, i))
    #     last[worker] = i
    # wrong: the staleness of every push
    # pushes, read = 0, {}
    # for kind, worker in log:
    #     if kind == "read":
    #         read[worker] = pushes
    #     else:
    #         pushes += 1
    #         found.append(pushes - read[worker])
    # end
    return found


# %%
exercise.check_staleness(my_staleness)

# %%
exercise.draw_late(in_step, free)

# %% [markdown]
# (In synchronous training all three read the same version. The second push then finds one update made, the third two:
# they are the three parts of one update, and no gradient is stale.)
#
# So far asynchrony only helps. Its price appears with more workers, and with larger rates. Take the simplest loss,
# $\frac12 w^2$, whose gradient is w, and let every gradient be $\tau$ updates late:
#
# $$ w_{t+1} = w_t - \eta\, w_{t-\tau} . $$

# %%
exercise.draw_parabola()

# %% [markdown]
# A late gradient still pushes the same way after the minimum has been passed. So the largest rate that converges
# shrinks with staleness. Put $w_t = z^t$: then $z^{\tau+1} = z^\tau - \eta$, and it converges where all z lie inside
# the unit circle. At the border $z = e^{i\theta}$, and then
#
# $$ \eta_{\max} = 2 \sin \frac{\pi}{2 (2\tau + 1)} \approx \frac{\pi}{2\tau + 1} : $$
#
# with twice as many workers the rate must be halved. Compare the formula with the roots of the polynomial:

# %%
taus = np.arange(0, 25)


def largest_rate(tau):
    """By bisection: the rate at which the largest root reaches the unit circle."""
    low, high = 0.0, 2.5
    for _ in range(50):
        eta = (low + high) / 2
        polynomial = np.zeros(tau + 2)
        polynomial[0], polynomial[1] = 1, -1
        polynomial[-1] += eta
        low, high = (eta, high) if np.abs(np.roots(polynomial)).max() < 1 else (low, eta)
    return low


measured = np.array([largest_rate(tau) for tau in taus])
formula = 2 * np.sin(np.pi / (2 * (2 * taus + 1)))
exercise.draw_largest_rates(taus, formula, measured)
assert np.allclose(measured, formula, rtol=1e-6)

# %% [markdown]
# ## 3. A bound
#
# SSP lets a fast worker run ahead, but only so far. Here are the same three workers with four bounds; a line is the
# clock of a worker, the shaded band the range that the slowest one allows:

# %%
bounds = [0, 2, 8, inf]
runs = [train(SLOW, bound) for bound in bounds]
exercise.draw_clocks(bounds, runs, SLOW)

for found, bound in zip(runs, bounds, strict=True):
    clocks = [0, 0, 0]
    for _, i, c in found["starts"]:
        clocks[i] = c
        assert c - min(clocks) <= bound + 1

# %% [markdown]
# A bound does not help against a worker that is always slow: it still sets the pace of all, only later. A bound helps
# against *changing* delays, where one worker is slow now and another one later. This is common in a cluster (another
# job, a page fault, a retry). Then s = 4 already has most of the speed of no bound, and the staleness stays limited:


# %%
def changing(mean=1.0, seed=0):
    """Seconds of a step that are another every time: short, and now and then long."""
    draws = np.random.default_rng(seed)

    class Now:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return mean * (5.0 if draws.random() < 0.1 else 0.7)

    return Now()


some = [0, 1, 2, 4, 8, inf]
found = [train(changing(), bound, end=60.0) for bound in some]
exercise.draw_bounds(some, found)

# %% [markdown]
# ## 4. Downpour
#
# Downpour SGD (Dean et al. 2012) trained the first networks with thousands of machines. The parameters are divided
# among many servers, and each worker saves messages: it **fetches** parameters only every `fetch` steps, moves its own
# copy by its own gradients in between, and **pushes** the sum of its gradients every `push` steps:
#
# - if the step's number is a multiple of `fetch`: w = what the server has;
# - g = gradient(w); gathered += g; w -= rate g;
# - if this was the last of `push` steps: push `gathered`, and set it to zero.
#
# **Exercise 3.** Write a step of a worker. Arrays are changed in place (`w[:] = ...`); `step` counts from 0. (The
# starter code fetches and pushes in every step.)


# %%
def my_worker(step, w, gathered, server, gradient, rate, fetch, push):
    """One step; `server.fetch()` gives parameters, `server.push(d)` adds up d."""
    # gap: fetch perhaps, compute and move, push perhaps
    # w[:] = server.fetch()
    # gathered[:] = gradient(w)
    # server.push(gathered)
    # solution
    if step % fetch == 0:
        w[:] = server.fetch()
    g = gradient(w)
    gathered += g
    w -= rate * g
    if (step + 1) % push == 0:
        server.push(gathered)
        gathered[:] = 0
    # wrong: wanted are fetch in step 0
    # if step % fetch == 0:
    #     w[:] = server.fetch()
    # g = gradient(w)
    # gathered += g
    # w -= rate * g
    # if step % push == 0:
    #     server.push(gathered)
    #     gathered[:] = 0
    # wrong: what is pushed
    # if step % fetch == 0:
    #     w[:] = server.fetch()
    # g = gradient(w)
    # gathered += g
    # w -= rate * g
    # if (step + 1) % push == 0:
    #     server.push(gathered)
    # end


# %%
exercise.check_worker(my_worker)

# %% [markdown]
# The worker's copy moves on between two fetches. With one worker alone, its own steps equal those that the server makes
# with its pushes. With several workers, a copy jumps at each fetch to the result of all of them.
#
# **Adagrad** on the server is what made Downpour stable (Duchi et al. 2011). Each parameter has a sum G of the squares
# of all its pushes, and its rate is divided by the root of G:
#
# $$ G \leftarrow G + d^2, \qquad w \leftarrow w - \frac{\eta}{\sqrt{G} + 10^{-10}}\, d . $$
#
# Where pushes are large, G grows and the rate falls.
#
# **Exercise 4.** Write it; `w` and `squares` are changed in place.


# %%
def my_adagrad(w, d, squares, rate):
    """What the server does with a push d."""
    # gap: first the squares, then the step
    # w -= rate * d
    # solution
    squares += d**2
    w -= rate * d / (np.sqrt(squares) + 1e-10)
    # wrong: w after push 0
    # w -= rate * d / (np.sqrt(squares) + 1e-10)
    # squares += d**2
    # wrong: the sums of squares after push
    # squares[:] = 0.9 * squares + 0.1 * d**2
    # w -= rate * d / (np.sqrt(squares) + 1e-10)
    # end


# %%
exercise.check_adagrad(my_adagrad)

# %%
exercise.draw_rates_of_adagrad()

# %% [markdown]
# ### On real ranks
#
# `parallel.Downpour` does this with messages: two workers and a server on three processes. `fit` is the training loop
# of all strategies. The callback adds `staleness` to its record of an epoch.

# %%
# %%mpi -n 3 --with work,np,nn -o errors,staleness,name
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives import Communicator
from parallel import Downpour
from parallel.reports.staleness import Staleness

limits = threadpool_limits(1, user_api="blas")
data = nn.data.load("digits", validation=0.2, flat=True, normalise=True, dtype=np.float64)
network, loss, _ = work()
trainer = Downpour(network, loss, nn.Adagrad(0.05), Communicator(MPI.COMM_WORLD), push=2, fetch=2, warm=5)
loader = nn.Loader(data.train, 32, shard=trainer.shard)
history = nn.fit(trainer, loader, 6, Staleness(), validation=data.validation).history
errors = [100 * (1 - record["validation_accuracy"]) for record in history]
staleness = [record["staleness"]["updates"] for record in history]
name = trainer.name
trainer.close()

# %%
exercise.draw_downpour(staleness, errors, name)
assert errors[0][-1] < 15

# %% [markdown]
# Each run differs: the order of the pushes depends on the machine. (Late pushes are more frequent on a busy one.)
#
# ## 5. A rubber band
#
# Downpour's workers jump to the server's parameters when they fetch. In **elastic averaging** (Zhang, Choromanska,
# LeCun 2015) each worker has parameters x of its own and trains with them. Every few steps x and the server's *center*
# c move towards each other, as if a rubber band connected them:
#
# $$ d = \alpha\, (x - c), \qquad x \leftarrow x - d, \qquad c \leftarrow c + d . $$
#
# So workers explore different places, and the center is a kind of mean.
#
# **Exercise 5.** Write it; both arrays are changed in place.


# %%
def my_elastic(x, center, alpha):
    """Worker and center pull at each other."""
    # gap: one distance for both
    # x -= alpha * (x - center)
    # solution
    d = alpha * (x - center)
    x -= d
    center += d
    # wrong: the sum of both changes
    # x -= alpha * (x - center)
    # center += alpha * (x - center)
    # wrong: the worker does not move
    # d = alpha * (x - center)
    # x = x - d
    # center += d
    # end


# %%
exercise.check_elastic(my_elastic)

# %%
workers, center, ways = [np.array([start]) for start in (-2.0, 0.5, 3.0)], np.array([0.0]), []
draws = np.random.default_rng(1)
for step in range(60):
    for x in workers:
        x -= 0.1 * (x - 1 + draws.normal(0, 1, 1))  # noisy gradients of (x - 1)^2 / 2
        if step % 4 == 3:
            my_elastic(x, center, 0.2)
    ways.append([*(x[0] for x in workers), center[0]])
exercise.draw_elastic(ways)

# %% [markdown]
# ## 6. Sandblaster: shorten the waiting
#
# The other method of the same paper keeps the *whole* batch and uses **L-BFGS**, which estimates the curvature from the
# last m steps $s_i$ and the changes of the gradient $y_i$. The direction comes from two loops over them:
#
# $$ q = g;\quad \text{newest to oldest: } a_i = \rho_i\, s_i\!\cdot\! q,\; q \mathrel{-}= a_i y_i;\quad
#    r = \tfrac{s\cdot y}{y\cdot y}\, q;$$
#
# $$ \text{oldest to newest: } r \mathrel{+}= (a_i - \rho_i\, y_i\!\cdot\! r)\, s_i;\quad
#    d = -r . $$
#
# These are only dot products, scaled sums and copies. So the **coordinator** needs no parameters: it sends commands
# ("dot s3 q", "axpy q -0.2 y3") to servers that hold slices, and receives numbers. Here are `nn`'s vectors with a log
# of the commands:


# %%
class Logged(Vectors):
    """Vectors that log their commands."""

    log = []

    def dot(self, a, b):
        self.log.append(f"dot {a} {b}")
        return super().dot(a, b)

    def axpy(self, to, factor, x):
        self.log.append(f"axpy {to} {x}")
        super().axpy(to, factor, x)

    def scale(self, a, factor):
        self.log.append(f"scale {a}")
        super().scale(a, factor)

    def copy(self, to, source):
        self.log.append(f"copy {to} {source}")
        super().copy(to, source)


def two_loops(g, pairs):
    """-H g; pairs are (s, y), oldest first."""
    q, a = g.copy(), []
    for s, y in reversed(pairs):
        a.append(s @ q / (s @ y))
        q -= a[-1] * y
    s, y = pairs[-1]
    r = (s @ y) / (y @ y) * q
    for (s, y), a_i in zip(pairs, reversed(a), strict=True):
        r += (a_i - y @ r / (s @ y)) * s
    return -r


w, g = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
network.layout.initialize(w, 0)
curve = []


def evaluate():
    """The loss of the whole training set at w; its gradient into g."""
    output, saved = network.forward(network.layout.views(w), x_train, ctx)
    loss, gz = loss_function(output, y_train, len(x_train), ctx)
    network.backward(network.layout.views(w), network.layout.views(g), gz, saved, ctx)
    curve.append(loss)
    return loss


vectors = Logged(w, g)
lbfgs = LBFGS(vectors, evaluate, history=5)
lbfgs.minimize(8)
arrays = vectors.arrays
pairs = [(arrays[s].copy(), arrays[y].copy()) for s, y, _ in lbfgs._pairs]
want = two_loops(g.copy(), pairs)
vectors.log.clear()
lbfgs.step()
print(f"the direction by hand and nn's differ by {np.abs(want - arrays['d']).max() / np.abs(want).max():.1e}")
print(f"{len(vectors.log)} commands in a step; the first: " + ", ".join(vectors.log[:9]))
assert np.allclose(want, arrays["d"], rtol=1e-9, atol=1e-12)
lbfgs.minimize(25)

descent = network.layout.zeros(np.float64)
network.layout.initialize(descent, 0)
losses = []
for _ in range(len(curve)):
    output, _ = network.forward(network.layout.views(descent), x_train, ctx)
    losses.append(loss_function(output, y_train, len(x_train), ctx)[0])
    descent -= 0.5 * gradient(descent, x_train, y_train, len(x_train))
exercise.draw_curvature(curve, losses)
assert curve[-1] < losses[-1]

# %% [markdown]
# How is the waiting shortened? The batch is cut into chunks much smaller than 1/N of it, and an idle worker gets the
# next one. A slow worker computes fewer. At the end, chunks that are still being computed are given out a second time,
# and the first result counts.


# %%
def deal(seconds, chunks, again=True):
    """Events of workers that are dealt chunks, and when all chunks are done."""
    heap, events, done, out = [(0.0, i) for i in range(len(seconds))], [], {}, {}
    waiting = list(range(chunks))
    while len(done) < chunks:
        now, i = heapq.heappop(heap)
        done |= {c: t for c, (t, _) in out.items() if t <= now and c not in done}
        if waiting:
            chunk = waiting.pop(0)
        else:
            left = [c for c in out if c not in done and out[c][1] != i]
            if not again or not left:
                if not heap:
                    done |= {c: t for c, (t, _) in out.items() if c not in done}
                continue
            chunk = max(left, key=lambda c: out[c][0])  # the one that would come last
        end = now + seconds[i] * 32 / chunks
        events.append(
            {"rank": i, "name": f"{'compute' if chunk not in out else 'again'} {chunk}", "start": now, "end": end}
        )
        if chunk not in out or end < out[chunk][0]:
            out[chunk] = end, i
        heapq.heappush(heap, (end, i))
    end = max(t for t, _ in out.values())
    return first(events, end), end


speeds = (1.0, 1.1, 0.9, 4.0)
whole, t_whole = deal(speeds, 4, again=False)
small, t_small = deal(speeds, 32, again=False)
twice, t_twice = deal(speeds, 32)
draw_timeline(whole, title="a quarter of the batch for each")

# %%
draw_timeline(twice, title="32 chunks, the last ones twice")

# %%
ideal = 32 / sum(1 / s for s in speeds)
exercise.draw_dealt(ideal, t_whole, t_small, t_twice)
assert ideal <= t_twice <= t_small < t_whole

# %% [markdown]
# In the paper Downpour with Adagrad on 200 replicas was fastest, Sandblaster on 2,000 second, and both were far faster
# than one machine (Dean et al. 2012, figure 4).
#
# ## Try
#
# - `train((1.0,) * 16, inf, rate=0.2)` and then `rate=1.0`: how stale are updates of 16 workers, and what do they do?
# - Delay compensation (Zheng et al. 2017) corrects a late gradient: g + lambda g^2 (w - w_then). Put it into `train`.
# - The real thing with a picture of staleness: `python scripts/train.py --strategy downpour:push=4,fetch=4 --ranks 3`,
#   `--strategy ps --consistency ssp:3`, and `scripts/experiments/asynchronous.py`, which slows a worker down.
#
# *Sources: Dean et al. 2012, Large scale distributed deep networks; Ho et al. 2013 (SSP); Duchi et al. 2011 (Adagrad);
# Liu and Nocedal 1989 (L-BFGS).*
#
# Next: `11_fewer_bytes.py`.
#
# This system's page has commands and measurements: [Parameter servers and asynchrony](../docs/systems/asynchrony.md).
