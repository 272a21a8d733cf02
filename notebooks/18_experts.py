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
# # 18. Experts: more parameters, the same work
#
# A transformer's two linear layers treat all positions alike. A **mixture of experts** has several such pairs, and a
# small router that chooses one or two of them for each position: with eight experts it has eight times the parameters,
# and nearly the same work. On many ranks each rank has some of the experts, and positions are sent to them. You will
#
# 1. route positions, and see how unevenly a router loads the experts;
# 2. **balance** the load without a loss;
# 3. **dispatch** positions to ranks, and return the results: two alltoallv;
# 4. hide the messages behind computation: a puzzle;
# 5. train a transformer with experts on two real ranks: the same numbers as in one process.

# %%
# %load_ext parallel.launch.notebook

# %%
import numpy as np

import checks
import exercises.experts as exercise
import nn
from collectives import Compute, Recv, Send, puzzles
from collectives.steps import Slice
from nn.analysis import pictures

# %matplotlib inline
checks.style()

# %% [markdown]
# ## 1. A router
#
# For a position $x$ the router computes scores $p = \mathrm{softmax}(x W)$, one for each expert, and the `top` experts
# with the largest are chosen. Their outputs for $x$ are added up, weighted by $p$. Nothing makes the router balance the
# load. Here are positions of five clusters, and a router with random weights:

# %%
E, D, n = 4, 6, 400
rng = np.random.default_rng(0)
kinds = 2 * rng.standard_normal((5, D))
x = kinds[rng.integers(5, size=n)] + 0.7 * rng.standard_normal((n, D))
scores = 1 / (1 + np.exp(-0.5 * x @ rng.standard_normal((D, E))))


def load(chosen):
    """How many positions each expert has."""
    return np.bincount(np.ravel(chosen), minlength=E)


first = np.argsort(-scores, axis=1, kind="stable")[:, :1]
exercise.draw_load(E, load, first, n)

# %% [markdown]
# On many ranks, all wait for the busiest one. The first remedy was **capacity**: an expert takes a fixed number of
# positions, in their order; further ones skip it, on the residual connection (Lepikhin et al. 2020).
#
# **Exercise 1.** Which positions are kept?


# %%
def my_capacity(chosen, experts, room):
    """True for each position whose expert still has room; chosen: (n,), the expert of each."""
    # gap: the first `room` of every expert
    # return np.arange(len(chosen)) < experts * room
    # solution
    before = [np.sum(chosen[:i] == e) for i, e in enumerate(chosen)]
    return np.array(before) < room
    # wrong: the first of each are kept
    # before = [np.sum(chosen[: i + 1] == e) for i, e in enumerate(chosen)]
    # return np.array(before) < room
    # wrong: the first of each are kept
    # return np.bincount(chosen, minlength=experts)[chosen] <= room
    # end


# %%
exercise.check_capacity(my_capacity)
kept = my_capacity(first.ravel(), E, int(1.25 * n / E))
print(f"with room for 1.25 times an even load {np.mean(~kept):.0%} of our positions are dropped")

# %% [markdown]
# The second remedy is an **auxiliary loss** (Fedus et al. 2022). With $f_i$, the share of all choices that fall on
# expert i, and $P_i$, the mean of its scores over the positions, it is $E \sum_i f_i P_i$: it is 1 for an even load,
# and larger where experts with large scores are chosen often. Counts have no gradient, but scores do: the scores of
# busy experts are pushed down.
#
# **Exercise 2.** Write the loss.


# %%
def my_auxiliary(p, chosen):
    """The loss for p (n, E), whose rows sum to 1, and chosen (n, top)."""
    E = p.shape[1]
    # gap: shares of the choices, mean scores
    # return E * np.sum(p.mean(axis=0) ** 2)
    # solution
    share = np.bincount(chosen.ravel(), minlength=E) / chosen.size
    return E * np.sum(share * p.mean(axis=0))
    # wrong: the loss of even choices and even scores
    # share = np.bincount(chosen.ravel(), minlength=E) / len(chosen)
    # return E * np.sum(share * p.mean(axis=0))
    # wrong: the loss of four positions
    # share = np.bincount(chosen.ravel(), minlength=E) / chosen.size
    # return E * np.sum(share**2)
    # end


# %%
exercise.check_auxiliary(my_auxiliary)

# %% [markdown]
# The third remedy needs no loss:
#
# ## 2. Balance by a bias
#
# Each expert has a bias. It is added to the scores where experts are **chosen**, and not where outputs are weighted: so
# it has no gradient. After every step the bias of an expert with more than the mean load shrinks by a fixed rate, that
# of one with less grows (Wang et al. 2024; DeepSeek-V3).
#
# **Exercise 3.** One step: return the chosen experts (n, top), by score + bias, of equal ones the lowest; their
# weights, from the scores alone, divided by their sum; and the new bias. (The starter code uses the bias in the
# weights, and never changes it.)


# %%
def my_balance(scores, bias, top, rate):
    """The chosen experts, their weights, and the bias of the next step."""
    # gap: choose with the bias, weigh without it, then move it
    # wanted = scores + bias
    # chosen = np.argsort(-wanted, axis=1, kind="stable")[:, :top]
    # weights = np.take_along_axis(wanted, chosen, axis=1)
    # return chosen, weights / weights.sum(axis=1, keepdims=True), bias
    # solution
    chosen = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top]
    weights = np.take_along_axis(scores, chosen, axis=1)
    counts = np.bincount(chosen.ravel(), minlength=len(bias))
    return chosen, weights / weights.sum(axis=1, keepdims=True), bias - rate * np.sign(counts - counts.mean())
    # wrong: the weights of [position, choice]
    # wanted = scores + bias
    # chosen = np.argsort(-wanted, axis=1, kind="stable")[:, :top]
    # weights = np.take_along_axis(wanted, chosen, axis=1)
    # counts = np.bincount(chosen.ravel(), minlength=len(bias))
    # return chosen, weights / weights.sum(axis=1, keepdims=True), bias - rate * np.sign(counts - counts.mean())
    # wrong: the new bias
    # chosen = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top]
    # weights = np.take_along_axis(scores, chosen, axis=1)
    # counts = np.bincount(chosen.ravel(), minlength=len(bias))
    # return chosen, weights / weights.sum(axis=1, keepdims=True), bias + rate * np.sign(counts - counts.mean())
    # end


# %%
some, given = np.array([[0.8, 0.5, 0.7, 0.2], [0.9, 0.1, 0.3, 0.6]]), np.array([-0.5, 0.1, 0.0, 0.9])
chosen, weights, moved = checks.several(3, my_balance, some, given, 2, 0.1)
checks.same(chosen, [[3, 2], [3, 0]], "the chosen experts of [position, choice]")
checks.same(weights, [[0.2 / 0.9, 0.7 / 0.9], [0.6 / 1.5, 0.9 / 1.5]], "the weights of [position, choice]")
checks.same(moved, [-0.5, 0.2, 0.0, 0.8], "the new bias")
busiest, bias, biases = [], np.zeros(E), []
for _ in range(150):
    chosen, _, bias = my_balance(scores, bias, 1, 0.01)
    busiest.append(load(chosen).max() * E / n)
    biases.append(bias)
checks.expect(busiest[-1] < 1.25, f"after 150 steps the busiest expert still has {busiest[-1]:.2f} times its share")
checks.right(f"the busiest expert had {busiest[0]:.2f} times its share, and has {busiest[-1]:.2f} times")

exercise.draw_balance(busiest, biases, E)

# %% [markdown]
# ## 3. Dispatch
#
# Now the experts are on ranks: of E experts and p ranks, rank r has experts r E/p to (r + 1) E/p. A rank's positions
# are **sorted by expert**: then those for one rank lie side by side, and an alltoallv can take them there. The results
# come back in the same order, and have to be put back into the order of the positions.
#
# **Exercise 4.** For the chosen experts (n, k) of this rank's positions: `slots`, the places of `chosen.ravel()` in the
# order in which they are sent (by expert; of one expert in their own order); `counts` (p, E/p), how many rows go to
# every expert, by the rank that has it; and of rows `returned` in the sent order, the sum over each position's k slots,
# weighted. (The starter code does not sort, and counts rows by rank only.)


# %%
def my_dispatch(chosen, experts, ranks):
    """slots, counts."""
    # gap: sort by expert, count for every rank and expert
    # slots = np.arange(chosen.size)
    # counts = np.bincount(chosen.ravel() // (experts // ranks), minlength=ranks)
    # return slots, counts
    # solution
    slots = np.argsort(chosen.ravel(), kind="stable")
    return slots, np.bincount(chosen.ravel(), minlength=experts).reshape(ranks, experts // ranks)
    # wrong: the slots of rank 0
    # slots = np.argsort(chosen[:, 0], kind="stable")
    # return slots, np.bincount(chosen.ravel(), minlength=experts).reshape(ranks, experts // ranks)
    # wrong: the counts of [rank, expert]
    # slots = np.argsort(chosen.ravel(), kind="stable")
    # return slots, np.bincount(chosen.ravel(), minlength=experts).reshape(experts // ranks, ranks).T
    # end


def my_return(returned, slots, weights):
    """The weighted sum of each position's answers, of rows in the order in which they were sent."""
    # gap: back into the order of the positions, then weigh
    # return (weights[..., None] * returned.reshape(*weights.shape, -1)).sum(axis=1)
    # solution
    answers = np.empty_like(returned)
    answers[slots] = returned
    return (weights[..., None] * answers.reshape(*weights.shape, -1)).sum(axis=1)
    # wrong: the outputs of rank 0
    # return (weights[..., None] * returned[slots].reshape(*weights.shape, -1)).sum(axis=1)
    # wrong: the outputs of rank 0
    # answers = np.empty_like(returned)
    # answers[slots] = returned
    # return answers.reshape(*weights.shape, -1).mean(axis=1)
    # end


# %%
layer = nn.MixtureOfExperts(D, E, top=2, hidden=5, activation="relu", auxiliary=0)
network = nn.Network(layer, (D,), np.float64)
flat = network.layout.zeros(np.float64)
network.layout.initialize(flat, 1)
p, ranks = network.layout.views(flat), 2
p.router[...] = rng.standard_normal(p.router.shape)
want, (_, _, routing, *_) = network.forward(p, x[:8], network.context())


def exchange(parts):
    """An alltoallv: parts[r][s], what rank r has for s, becomes found[s][r]."""
    return [[parts[r][s] for r in range(len(parts))] for s in range(len(parts))]


mine = [slice(0, 5), slice(5, 8)]  # each rank's positions: an uneven batch
sent = [exercise.dispatched(my_dispatch, routing.chosen[rows], E, ranks, rank) for rank, rows in enumerate(mine)]
there = exchange(
    [
        np.split(x[rows][slots // 2], counts.sum(axis=1).cumsum()[:-1])
        for rows, (slots, counts) in zip(mine, sent, strict=True)
    ]
)
answers = []
for s in range(ranks):  # each rank computes with its two experts
    row = []
    for r in range(ranks):
        pieces = np.split(there[s][r], sent[r][1][s].cumsum()[:-1])
        row.append(np.concatenate([np.maximum(a @ p.A[2 * s + e], 0) @ p.B[2 * s + e] for e, a in enumerate(pieces)]))
    answers.append(row)
back = exchange(answers)
for rank, rows in enumerate(mine):
    y = checks.call(my_return, np.concatenate(back[rank]), sent[rank][0], routing.weights[rows])
    checks.same(y, want[rows], f"the outputs of rank {rank}'s positions")
checks.right("two ranks with two experts each, and uneven batches: as nn in one process")

exercise.draw_sent(routing, mine, sent, E)

# %% [markdown]
# Backward the gradients take the same two steps. That makes four alltoallv for each layer and step, each of n k D
# numbers, of which (p - 1) / p leave the rank. The gradient of an **expert** is complete on its rank, since the
# positions of all ranks were sent there. All **other** parameters are on every rank, and their gradients come from that
# rank's positions only: these are summed. Summing the experts' gradients too would add up those of different experts,
# without an error message.
#
# ## 4. A puzzle: overlap
#
# If messages and computation follow each other, ranks are idle. What can be computed before the first message arrives?

# %%
print(puzzles.experts)


# %% [markdown]
# **Exercise 5.** Nine units of time are possible. (The starter code does one thing after the other.)


# %%
def travelling(rank, size, count):
    """A generator of rounds; block q of x and y is slice(q * count, (q + 1) * count)."""

    def block(q):
        return q * count, (q + 1) * count

    # gap: compute what is here while other positions come, and send back what is done while the next ones are computed
    # for k in range(1, size):
    #     to, source = (rank + k) % size, (rank - k) % size
    #     yield Send(to, "x", *block(to)), Recv(source, "in", *block(source))
    # for q in range(size):
    #     reads, writes = ("x", "y") if q == rank else ("in", "out")
    #     yield (Compute(f"E{q}", (Slice(reads, *block(q)),), (Slice(writes, *block(q)),), 2.0),)
    # for k in range(1, size):
    #     to, source = (rank + k) % size, (rank - k) % size
    #     yield Send(to, "out", *block(to)), Recv(source, "y", *block(source))
    # solution
    for d in range(size + 1):
        steps = []
        if d < size:
            q = (rank - d) % size
            reads, writes = ("x", "y") if d == 0 else ("in", "out")
            steps.append(Compute(f"E{q}", (Slice(reads, *block(q)),), (Slice(writes, *block(q)),), 2.0))
        if d + 1 < size:
            to, source = (rank + d + 1) % size, (rank - d - 1) % size
            steps += [Send(to, "x", *block(to)), Recv(source, "in", *block(source))]
        if d > 1:
            to, source = (rank - d + 1) % size, (rank + d - 1) % size
            steps += [Send(to, "out", *block(to)), Recv(source, "y", *block(source))]
        yield tuple(steps)
    # wrong: experts: wrong
    # for k in range(1, size):
    #     to, source = (rank + k) % size, (rank - k) % size
    #     own = Compute(f"E{rank}", (Slice("x", *block(rank)),), (Slice("y", *block(rank)),), 2.0)
    #     yield *[own] * (k == 1), Send(to, "x", *block(to)), Recv(source, "in", *block(source))
    # for q in range(size):
    #     if q != rank:
    #         yield (Compute(f"E{q}", (Slice("in", *block(q)),), (Slice("out", *block(q)),), 2.0),)
    # for k in range(1, size):
    #     to, source = (rank + k) % size, (rank - k) % size
    #     yield Send(to, "out", *block(to)), Recv(source, "y", *block(source))
    # end


# %%
checks.graded(puzzles.experts.grade(travelling))

# %% [markdown]
# The library does it with a **shared expert**, which every position uses: it needs no messages, so it is computed while
# the positions for the other experts are sent.
#
# ## 5. On two ranks
#
# A transformer whose blocks have four experts, two for each position, on sequences that count in steps of 1 to 3. Two
# ranks with two experts each share every batch, and compute what one process computes.


# %%
def sequences(count, length=12, seed=0):
    """x: (count, length) ids; y: what follows each."""
    rng = np.random.default_rng(seed)
    start, step = rng.integers(12, size=(count, 1)), rng.integers(1, 4, size=(count, 1))
    ids = (start + step * np.arange(length + 1)) % 12
    return ids[:, :-1], ids[:, 1:]


def work():
    """(network, loss, optimizer): the same in every process."""
    model = "transformer:16,2,1,experts=4,top=2,shared=1"
    return nn.models.build(model, (12,), 12, "float64"), nn.CrossEntropyLoss(), nn.Adam(0.003)


def train(trainer, steps=60):
    """Losses, and the load of the experts, of batches of 32 sequences."""
    x, y = sequences(32 * steps)
    loader = nn.Loader(nn.data.Dataset(x, y, classes=12, dtype=np.float64), 32, seed=1, shard=trainer.shard)
    losses, load = [], nn.callbacks.ExpertLoad()

    class Losses(nn.callbacks.Callback):
        def on_step(self, training, loss):
            losses.append(loss)

    return losses, nn.fit(trainer, loader, 1, [Losses(), load]).history


one = nn.Trainer(*work())
losses_one, history = train(one)
alone = one.state_dict()

# %%
# %%mpi -n 2 --with work,train,sequences,np,nn -o losses,state,held,sent
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives import Communicator
from parallel import ExpertParallel

limits = threadpool_limits(1, user_api="blas")
trainer = ExpertParallel(*work(), Communicator(MPI.COMM_WORLD))
held = {name: list(array.shape) for name, array in trainer.local_network.layout.items(trainer.flat_parameters)}
losses = train(trainer)[0]
sent = trainer.ctx.group("expert").bytes_sent
state = {name: array for name, array in trainer.state_dict().items() if name.startswith("param/")}
trainer.close()

# %%
far = max(np.abs(state[0][name] - alone[name]).max() for name in state[0])
print(f"parameters of two ranks and of one process, after 60 steps of Adam: apart by {far:.1e}")
assert far < 1e-9 and np.allclose(losses[0], losses_one, rtol=1e-9)
even = 4 * 60 * 16 * 12 * 2 * 16 * 8 / 2  # trips, steps, samples, positions, choices, features, bytes; half stays
print(f"sent by each rank: {sent[0]:,} and {sent[1]:,} bytes; at an even load {even:,.0f}")
for name in ("2.1.body.1.body.A", "2.1.body.1.body.router", "2.0.body.1.Wqkv"):
    print(f"{name}: {alone['param/' + name].shape} in all, {held[0][name]} on rank 0")
checks.show(pictures.expert_load(history))

# %% [markdown]
# ## Try
#
# - `capacity=1.25` gives each expert room for 1.25 times an even load of a sample. How many choices are dropped?
# - What does `ExpertParallel` say to six experts on four ranks?
# - `python scripts/train.py --ranks 4 --mesh expert=4 --data tinyshakespeare --model transformer:64,4,2,experts=8`, and
#   look at experts.png.
#
# *Sources: Shazeer et al. 2017; Lepikhin et al. 2020 (GShard); Fedus et al. 2022 (Switch); Rajbhandari et al. 2022
# (DeepSpeed-MoE); Wang et al. 2024 (balance without a loss); DeepSeek-AI 2024.*
#
# This system's page has commands and measurements: [Experts](../docs/systems/experts.md).
