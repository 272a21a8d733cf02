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
# # 14. Tensor parallelism: f, g and a transformer
#
# Data parallelism cuts the batch, a pipeline cuts between layers. Tensor parallelism cuts *through* the layers: every
# rank has a part of every matrix, and all work on the same samples at the same time. The largest transformers are
# trained like this inside a node (Shoeybi et al. 2019, "Megatron"). You will
#
# 1. cut a matrix product in two ways, and see what each has to send;
# 2. combine both, so that two layers need one sum: **f** and **g**;
# 3. cut attention by its heads;
# 4. look up words in a table that is divided among ranks;
# 5. compute a cross-entropy whose outputs are divided among ranks;
# 6. price it, and see why it stays inside a node;
# 7. train a transformer on two real ranks: the same numbers as on one.

# %%
# %load_ext parallel.launch.notebook

# %%
import numpy as np

import checks
import exercises.tensor as exercise
import nn
from collectives import price
from collectives.algorithms import allreduce
from collectives.pricing.networks import Network

# %matplotlib inline
checks.style()

# %% [markdown]
# ## 1. Two ways to cut a product
#
# $Y = X A$, with X of N rows and A a matrix. On two ranks:
#
# - **by columns**: $A = [A_0, A_1]$. Each rank has all of X, and gets some *columns* of Y. Nothing is sent.
# - **by rows**: $A$ has $A_0$ above $A_1$; X is cut by columns. Then $Y = X_0 A_0 + X_1 A_1$: each rank has a *term* of
#   the whole Y, and the terms are summed: an allreduce.


# %%
exercise.draw_products()

rng = np.random.default_rng(0)
X, A = rng.standard_normal((5, 4)), rng.standard_normal((4, 6))
by_columns = np.concatenate([X @ part for part in np.split(A, 2, axis=1)], axis=1)
by_rows = sum(x @ part for x, part in zip(np.split(X, 2, axis=1), np.split(A, 2, axis=0), strict=True))
assert np.allclose(by_columns, X @ A) and np.allclose(by_rows, X @ A)

# %% [markdown]
# ## 2. Two layers and one sum
#
# A transformer's MLP is $Z = \mathrm{GeLU}(X A)\, B$. Cut A by columns: each rank has some columns of XA, and can apply
# GeLU to them, element by element. A product cut **by rows** needs exactly these columns as its input. So cut B by
# rows: nothing is sent between the two products, and there is one sum at the end.
#
# Why not the other way round, A by rows? Then each rank would have a *term* of XA, and GeLU of a sum is not the sum of
# GeLUs: a second sum would be needed before it.

# %%
gelu = nn.GELU()
network = nn.Network(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), (4,), np.float64)
ctx = network.context()
z = np.linspace(-3, 3, 200)


def GeLU(x):
    """GeLU, as nn computes it; and a function that takes a gradient back through it."""
    y, saved = gelu.forward({}, x.copy(), ctx.children[1])  # a copy: there x may be written over
    return y.copy(), lambda gy: gelu.backward({}, gy.copy(), saved, ctx.children[1])[0].copy()


exercise.draw_gelu(z, GeLU)

# %% [markdown]
# Backward runs in the other direction. The gradient of Z goes to all ranks as it is. Each computes the gradient of its
# parts. At the beginning X went into *all* parts, so its gradient is the **sum** of theirs. Megatron gives names to
# these two places:
#
# | | forward | backward |
# |---|---|---|
# | **f**, before A | as it is | allreduce |
# | **g**, behind B | allreduce | as it is |
#
# Each is the other's adjoint: a copy to many is, backward, a sum of many.

# %%
exercise.draw_f_and_g()

# %% [markdown]
# **Exercise 1.** Forward and backward of the MLP, its matrices in parts, all ranks in one process: for each part `A[i]`
# (some columns) and `B[i]` (some rows). `GeLU(x)` gives y, and a function for the way back. Biases are left out. (The
# starter code takes the gradient of X from the last part alone.)


# %%
def my_mlp(X, A, B, gZ):
    """Z, the gradient of X, and lists of the gradients of the parts of A and B."""
    # gap: a sum in g, and one in f
    # Z, gA, gB = 0, [], []
    # for a, b in zip(A, B, strict=True):
    #     y, back = GeLU(X @ a)
    #     Z = y @ b
    #     gB.append(y.T @ gZ)
    #     gH = back(gZ @ b.T)
    #     gA.append(X.T @ gH)
    #     gX = gH @ a.T
    # return Z, gX, gA, gB
    # solution
    Z, gX, gA, gB = 0, 0, [], []
    for a, b in zip(A, B, strict=True):
        y, back = GeLU(X @ a)
        Z = Z + y @ b  # g: the sum of all ranks' terms
        gB.append(y.T @ gZ)
        gH = back(gZ @ b.T)
        gA.append(X.T @ gH)
        gX = gX + gH @ a.T  # f, backward: X has gone into all parts
    return Z, gX, gA, gB
    # wrong: the gradient of X on 2 ranks
    # Z, gA, gB = 0, [], []
    # for a, b in zip(A, B, strict=True):
    #     y, back = GeLU(X @ a)
    #     Z = Z + y @ b
    #     gB.append(y.T @ gZ)
    #     gH = back(gZ @ b.T)
    #     gA.append(X.T @ gH)
    #     gX = gH @ a.T
    # return Z, gX, gA, gB
    # wrong: the gradient of part 0 of A
    # Z, gX, gA, gB = 0, 0, [], []
    # for a, b in zip(A, B, strict=True):
    #     y, back = GeLU(X @ a)
    #     Z = Z + y @ b
    #     gB.append(y.T @ gZ)
    #     gA.append(X.T @ (gZ @ b.T))
    #     gX = gX + back(gZ @ b.T) @ a.T
    # return Z, gX, gA, gB
    # end


# %%
g, mine = exercise.check_mlp(my_mlp, network)

exercise.draw_parts(mine, g)

# %% [markdown]
# No gradient of a *parameter* is sent: each rank has all the data for its part. And each of t ranks has 1/t of the
# parameters, of the gradients, of the optimizer's moments, and of the arithmetic.
#
# ## 3. Attention: by heads
#
# Multi-head attention divides easily. Head h has its own columns of the matrices for queries, keys and values, and does
# its softmax by itself; the projection at the end takes all heads' outputs side by side, so cut it by rows. The order
# is f, some heads on each rank, g.
#
# **Exercise 2.** Write a rank's term, for one sequence x (T, D), with `causal_attention` of notebook 13b. Of the
# library's weights `p.Wqkv` has the columns of all queries, then of all keys, then of all values; `p.Wo` is the
# projection. (Biases of q, k and v are 0 here; that of the output, `p.bo`, is added once, behind g.)

# %%
T, D, H = 7, 12, 4
attention = nn.Network(nn.MultiHeadAttention(D, H, causal=True), (T, D), np.float64)
flat = attention.layout.zeros(np.float64)
attention.layout.initialize(flat, 3)
p = attention.layout.views(flat)
x = np.random.default_rng(4).standard_normal((T, D))


def causal_attention(q, k, v):
    """(y, weights), position t sees 0 to t."""
    scores = np.where(np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ v, weights


def some_heads(x, heads):
    """This rank's term of the output, and a list of the weights of its heads."""
    d, term, shown = D // H, np.zeros_like(x), []
    Q, K, V = np.split(p.Wqkv, 3, axis=1)
    for h in heads:
        # gap: its columns of Q, K and V; its rows of the projection
        # y, weights = causal_attention(x @ Q, x @ K, x @ V)
        # term += y @ p.Wo
        # shown.append(weights)
        # solution
        mine = slice(h * d, (h + 1) * d)
        y, weights = causal_attention(x @ Q[:, mine], x @ K[:, mine], x @ V[:, mine])
        term += y @ p.Wo[mine]
        shown.append(weights)
        # wrong: the sum of 1 ranks' terms
        # mine = slice(h * d, (h + 1) * d)
        # y, weights = causal_attention(x @ Q[:, mine], x @ K[:, mine], x @ V[:, mine])
        # term += y @ p.Wo[: d]
        # shown.append(weights)
        # wrong: the sum of 1 ranks' terms
        # y, weights = causal_attention(x @ Q[:, h::H], x @ K[:, h::H], x @ V[:, h::H])
        # term += y @ p.Wo[h::H]
        # shown.append(weights)
        # end
    return term, shown


# %%
exercise.check_heads(some_heads, attention, p, x)
terms = [some_heads(x, heads) for heads in ((0, 1), (2, 3))]  # two ranks

exercise.draw_heads(terms)

# %% [markdown]
# So a block of a transformer has two pairs of f and g: four allreduces of N T D numbers, two forward and two backward.
# There cannot be more ranks than heads.
#
# ## 4. A divided embedding
#
# Before the blocks, each of V words (50,000 and more) has a row of D numbers in a table, the **embedding**. It is cut
# by rows: a rank has the words from `first` on. A rank that does not have a word gives zeros for it, and the terms are
# summed: g again.
#
# **Exercise 3.** Write a rank's term, for any array of ids. (Ids of other ranks' words must not read outside of the
# table.)


# %%
def my_lookup(part, first, ids):
    """(..., D): the rows of `part`, whose first row is that of the word `first`; 0 for the words of other ranks."""
    # gap: the rows that are here, zeros elsewhere
    # return part[np.clip(ids - first, 0, len(part) - 1)]
    # solution
    here = (ids >= first) & (ids < first + len(part))
    return np.where(here[..., None], part[np.where(here, ids - first, 0)], 0)
    # wrong: gives something for ids that it does not have
    # return np.where((ids >= first)[..., None], part[np.clip(ids - first, 0, len(part) - 1)], 0)
    # wrong: raises IndexError
    # return np.where((ids >= first)[..., None], part[ids - first], 0)
    # end


# %%
exercise.check_embedding(my_lookup)

# %% [markdown]
# ## 5. A loss of divided outputs
#
# The last layer has V outputs, one for every word: 50,000 and more. It is cut by columns, and gathering all outputs
# would be the largest message of the step. But the loss needs only three numbers of each row. For one position with the
# target y:
#
# $$ \ell = \log \sum_{c} e^{z_c} - z_y = \log \sum_c e^{z_c - m} - (z_y - m), \qquad m = \max_c z_c . $$
#
# Three small allreduces, one number a row each: the **maximum**; the **sum of the exponentials**; the **target's
# logit**, for which all ranks but one contribute zero. The gradient $\mathrm{softmax}(z) - \mathrm{onehot}$ is then
# local.
#
# **Exercise 4.** Write it for all ranks in one process: `z[i]` are the logits of rank i, for the classes from
# `first[i]` on. (The starter code lets each rank take its own maximum and its own sum.)


# %%
def my_split_loss(z, first, target):
    """The loss of every row, and a list of the gradients of the parts of z."""
    rows = np.arange(len(target))
    # gap: the maximum of all, the sum of all, the target's logit
    # loss, gz = 0, []
    # for part, lo in zip(z, first, strict=True):
    #     m = part.max(axis=1)
    #     e = np.exp(part - m[:, None])
    #     here = (target >= lo) & (target < lo + part.shape[1])
    #     own = np.where(here, part[rows, np.where(here, target - lo, 0)] - m, 0)
    #     loss = loss + np.log(e.sum(axis=1)) - own
    #     gz.append(e / e.sum(axis=1)[:, None])
    # return loss, gz
    # solution
    m = np.max([part.max(axis=1) for part in z], axis=0)  # allreduce, maximum
    total = sum(np.exp(part - m[:, None]).sum(axis=1) for part in z)  # allreduce, sum
    own, gz = 0, []
    for part, lo in zip(z, first, strict=True):
        here = (target >= lo) & (target < lo + part.shape[1])
        own = own + np.where(here, part[rows, np.where(here, target - lo, 0)] - m, 0)  # allreduce, sum
        g = np.exp(part - m[:, None]) / total[:, None]
        g[rows[here], target[here] - lo] -= 1
        gz.append(g)
    return np.log(total) - own, gz
    # wrong: the gradient of [row, class]
    # m = np.max([part.max(axis=1) for part in z], axis=0)
    # total = sum(np.exp(part - m[:, None]).sum(axis=1) for part in z)
    # own, gz = 0, []
    # for part, lo in zip(z, first, strict=True):
    #     here = (target >= lo) & (target < lo + part.shape[1])
    #     own = own + np.where(here, part[rows, np.where(here, target - lo, 0)] - m, 0)
    #     gz.append(np.exp(part - m[:, None]) / total[:, None])
    # return np.log(total) - own, gz
    # wrong: the loss of every row
    # m = np.max([part.max(axis=1) for part in z], axis=0)
    # total = sum(np.exp(part - m[:, None]).sum(axis=1) for part in z)
    # own, gz = 0, []
    # for part, lo in zip(z, first, strict=True):
    #     here = (target >= lo) & (target < lo + part.shape[1])
    #     own = own + part[rows, np.where(here, target - lo, 0)] - m
    #     g = np.exp(part - m[:, None]) / total[:, None]
    #     g[rows[here], target[here] - lo] -= 1
    #     gz.append(g)
    # return np.log(total) - own, gz
    # end


# %%
rng = np.random.default_rng(5)
z, target = 4 * rng.standard_normal((6, 11)), np.array([0, 3, 4, 7, 8, 10])
z[2] += 800  # exp of it would be infinite
want, want_gz = [], np.zeros_like(z)
for i in range(6):
    loss, gz = nn.CrossEntropyLoss()(z[i : i + 1], target[i : i + 1], 1, ctx)
    want.append(loss)
    want_gz[i] = gz
first, parts = (0, 4, 8), [z[:, :4], z[:, 4:8], z[:, 8:]]
loss, gz = checks.several(2, my_split_loss, [part.copy() for part in parts], first, target)
checks.same(loss, want, "the loss of every row", draw=exercise.draw_losses)
said = "of z, in three parts, a list of three gradients is expected"
checks.expect(isinstance(gz, list | tuple) and len(gz) == 3, said)
for i, wanted in enumerate(np.split(want_gz, first[1:], axis=1)):
    checks.same(gz[i], wanted, f"the gradient of [row, class] of part {i}")
checks.right("as nn.CrossEntropyLoss of all eleven classes, a row with logits of 800 too")
exercise.draw_losses(loss, want)

# %% [markdown]
# ## 6. The price
#
# Take a block of a large transformer: D = 12,288, sequences of 2,048, one at a time on a rank. It has 12 D^2 weights,
# so forward and backward make 6 x 12 D^2 x 2,048 operations; say 140 TFLOP/s. Its four allreduces carry T D numbers
# of two bytes each.
#
# **Exercise 5.** Seconds of such a block on t ranks: `alone` is what it takes on one, n the bytes of one sum, and a
# message of a ring of t ranks takes $\alpha + \beta\, n/t$ (notebook 7). These sums cannot hide behind computation: the
# next layer waits.


# %%
def block_seconds(t, alone, n, alpha, beta):
    """Forward and backward of a block whose layers are shared by t ranks."""
    # gap: the share of the arithmetic, and four sums of 2 (t - 1) messages each
    # return alone / t
    # solution
    return alone / t + 4 * 2 * (t - 1) * (alpha + beta * n / t)
    # wrong: one sum of four
    # return alone / t + 2 * (t - 1) * (alpha + beta * n / t)
    # wrong: seconds of a block on 2 ranks
    # return max(alone / t, 4 * 2 * (t - 1) * (alpha + beta * n / t))
    # end


# %%
exercise.check_seconds(block_seconds)

# %% [markdown]
# On t ranks inside of a node (300 GB/s), and over a network (25 GB/s):

# %%
D, T = 12_288, 2_048
alone = 6 * 12 * D**2 * T / 140e12
inside, between = (5e-6, 1 / 300e9), (20e-6, 1 / 25e9)
degrees = [1, 2, 4, 8, 16, 32]
speedups = {}
for name, network_ in {"in a node, 300 GB/s": inside, "network, 25 GB/s": between}.items():
    speedups[name] = [alone / block_seconds(t, alone, 2 * T * D, *network_) for t in degrees]
    priced = 4 * price(allreduce.ring, 8, T * D, itemsize=2, network=Network.hockney(*network_)).seconds
    on_eight = speedups[name][3]
    assert np.isclose(alone / 8 + priced, alone / on_eight, rtol=1e-3), "as the ring itself is priced"
    print(f"{name}: on 8 ranks {on_eight:.1f} times as fast, {on_eight / 8:.0%} efficient")
exercise.draw_speedups(degrees, speedups)

# %% [markdown]
# So tensor parallelism is used where the network is fastest, on the ranks of one node; pipelines go between nodes,
# since they send little; data parallelism is the outermost level. A **mesh** of ranks has an axis for each. Here are 32
# ranks, 8 on a node, as 2 x 4 x 4; neighbouring ranks share layers:

# %%
exercise.draw_mesh()

# %% [markdown]
# ## 7. A transformer on two ranks
#
# The task: continue a sequence. A sequence counts upwards, in steps of 1 to 3, modulo 12; the network has to infer the
# step from the numbers so far. The second number cannot be known; from the third on all are determined.


# %%
def sequences(count, length=12, seed=0):
    """x: (count, length) ids; y: what follows each."""
    rng = np.random.default_rng(seed)
    start, step = rng.integers(12, size=(count, 1)), rng.integers(1, 4, size=(count, 1))
    ids = (start + step * np.arange(length + 1)) % 12
    return ids[:, :-1], ids[:, 1:]


def work():
    """(network, loss, optimizer): the same in every process."""
    network = nn.models.build("transformer:32,4,2", (12,), 12, "float64")
    return network, nn.CrossEntropyLoss(), nn.Adam(0.003)


def train(trainer, steps=80):
    """Losses on batches of 32 sequences."""
    return [trainer.step(*sequences(32, seed=step)) for step in range(steps)]


one = nn.Trainer(*work())
losses_one = train(one)
alone = one.state_dict()
print(one.network.summary())

# %%
# %%mpi -n 2 --with work,train,sequences,np,nn -o losses,state,held
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives import Communicator
from parallel import TensorParallel

limits = threadpool_limits(1, user_api="blas")
trainer = TensorParallel(*work(), Communicator(MPI.COMM_WORLD))
held = {name: list(array.shape) for name, array in trainer.local_network.layout.items(trainer.flat_parameters)}
losses = train(trainer)
state = {name: array for name, array in trainer.state_dict().items() if name.startswith("param/")}
trainer.close()

# %%
far = max(np.abs(state[0][name] - alone[name]).max() for name in state[0])
print(f"parameters of two ranks and of one process, after 80 steps of Adam: apart by {far:.1e}")
assert far < 1e-9 and np.allclose(losses[0], losses_one, rtol=1e-9)

exercise.draw_training(losses_one, losses, held)

# %% [markdown]
# Every matrix is cut. The parameters that are not cut (normalisation, the biases behind g, positions) are on both
# ranks, and get the same gradient on both, because activations outside f and g are whole.

# %%
x, y = sequences(6, seed=999)
guess = one.predict(x).argmax(-1)
exercise.draw_predictions(guess, y, x)
assert (guess[:, 2:] == y[:, 2:]).mean() > 0.9

# %% [markdown]
# ## Try
#
# - `TensorParallel(..., way="sequence")` cuts the activations between the blocks along the places, too: each allreduce
#   becomes a reduce-scatter and an allgather (Korthikanti et al. 2022). The same bytes; what is saved?
# - With three ranks four heads cannot be shared evenly. What does the library say?
# - `python scripts/train.py --ranks 2 --strategy tensor --model transformer:64,4,2 --data stdlib`
#
# *Sources: Shoeybi et al. 2019 (Megatron-LM); Vaswani et al. 2017 (attention); Narayanan et al. 2021 (the mesh).*
#
# Next: `15_laws.py`.
#
# This system's page has commands and measurements: [Tensor parallelism](../docs/systems/tensor.md).
