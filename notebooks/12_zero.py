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
# # 12. Sharding by bytes: ZeRO
#
# Data parallelism keeps everything on every rank: parameters, gradients, and the optimizer's moments. A hundred ranks
# keep a hundred copies of the same numbers. **ZeRO** (Rajbhandari et al. 2020), which PyTorch calls *fully sharded data
# parallel*, keeps one copy in shards, and computes exactly the same. You will
#
# 1. count the bytes of a training step;
# 2. split an allreduce into its two halves, and put the update between them: **stage 1**;
# 3. see what is in memory during a step: **stages 2 and 3**;
# 4. gather one layer while another one is computed;
# 5. run all stages on real ranks, and compare with one process and with the formulas.

# %%
# %load_ext parallel.launch.notebook

# %%
import matplotlib.pyplot as plt
import numpy as np

import checks
import collectives
import exercises.zero as exercise
import nn
from collectives import price, puzzles
from collectives.algorithms import allgather, allreduce, reduce_scatter
from collectives.steps import Compute, Copy, Recv, Send, Slice, chunk

# %matplotlib inline
checks.style()

# %% [markdown]
# ## 1. The bytes in memory
#
# A network has $\Psi$ parameters. In float32 with Adam each of them takes 4 bytes, its gradient 4, and its two moments
# 8: $16\,\Psi$ bytes, whatever the batch is. (Activations come on top; they depend on the batch.) Now shard among N
# ranks first the moments, then the gradients too, then the parameters too:
#
# | | a rank keeps, bytes | |
# |---|---|---|
# | replicated | $16\,\Psi$ | |
# | stage 1 | $8\,\Psi + 8\,\Psi/N$ | moments in shards |
# | stage 2 | $4\,\Psi + 12\,\Psi/N$ | and gradients |
# | stage 3 | $16\,\Psi/N$ | and parameters |
#
# **Exercise 1.** Write the table as a function. (The starter code shards nothing.)


# %%
def my_bytes(count, ranks, stage):
    """(parameters, gradients, moments): bytes that a rank keeps, float32 with Adam; the stage is 0 to 3."""
    # gap: divide what the stage shards
    # return 4 * count, 4 * count, 8 * count
    # solution
    parameters = 4 * count / (ranks if stage >= 3 else 1)
    gradients = 4 * count / (ranks if stage >= 2 else 1)
    moments = 8 * count / (ranks if stage >= 1 else 1)
    return parameters, gradients, moments
    # wrong: GB of [stage
    # parameters = 4 * count / (ranks if stage >= 1 else 1)
    # gradients = 4 * count / (ranks if stage >= 2 else 1)
    # moments = 8 * count / (ranks if stage >= 3 else 1)
    # return parameters, gradients, moments
    # end


# %%
psi = 7.5  # billions, so that bytes are GB
exercise.check_bytes(my_bytes, psi)

# %% [markdown]
# The paper's figure shows 120, 31.4, 16.6 and 1.9 GB for the same model on the same 64 ranks. Yours shows 120, 60.9,
# 31.4 and 1.9. Both are right: the paper trains in **mixed precision**. Forward and backward compute with 16 bits, so a
# parameter takes 2 bytes and its gradient 2. The optimizer keeps a copy of the parameter in float32 (4 bytes), because
# most updates are too small to change a number of 16 bits, and both moments in float32 (8). That is $2 + 2 + 12 = 16$
# bytes as well. But stage 1 shards all that the optimizer keeps, which is now 12 of the 16 bytes; in float32 it was 8.
#
# **Exercise 2.** Write the bytes of mixed precision.


# %%
def mixed_bytes(count, ranks, stage):
    """(parameters, gradients, optimizer): bytes that a rank keeps, in mixed precision with Adam; stages 0 to 3."""
    # gap: what has 16 bits, what is the optimizer's, and what the stage shards
    # return my_bytes(count, ranks, stage)
    # solution
    parameters = 2 * count / (ranks if stage >= 3 else 1)
    gradients = 2 * count / (ranks if stage >= 2 else 1)
    optimizer = 12 * count / (ranks if stage >= 1 else 1)
    return parameters, gradients, optimizer
    # wrong: it keeps the parameters in float32, too
    # parameters = 2 * count / (ranks if stage >= 3 else 1)
    # gradients = 2 * count / (ranks if stage >= 2 else 1)
    # return parameters, gradients, 8 * count / (ranks if stage >= 1 else 1)
    # wrong: stage 1 shares it out like the moments
    # parameters = 2 * count / (ranks if stage >= 3 else 1)
    # gradients = 2 * count / (ranks if stage >= 2 else 1)
    # return parameters, gradients, 4 * count + 8 * count / (ranks if stage >= 1 else 1)
    # end


# %%
mixed = exercise.check_mixed(mixed_bytes, psi)
print("GB a rank     float32   mixed precision")
for stage, name in enumerate(("replicated", "stage 1", "stage 2", "stage 3")):
    print(f"{name:12} {sum(my_bytes(psi, 64, stage)):8.1f} {mixed[stage].sum():17.1f}")

# %% [markdown]
# Stage 1 in mixed precision is $4\,\Psi + 12\,\Psi/N$, the same formula as stage 2 in float32: that is why both columns
# have 31.4, in neighbouring lines.
#
# What is the largest model that fits? With 80 GB on every rank, and a quarter of it left for activations:

# %%
exercise.draw_largest_models(my_bytes)

# %% [markdown]
# ## 2. Stage 1: the update between two halves
#
# An allreduce by a ring has two halves. After the **reduce-scatter** rank r has part r of the sum; the **allgather**
# then brings all parts to all. Here are both, for four ranks; a colour is a place in the vector:

# %%
_, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="none")
plt.subplots_adjust(left=0.06, right=0.97, bottom=0.26, top=0.78, wspace=0.25)
collectives.draw(reduce_scatter.ring, 4, 8, axes[0], title="reduce-scatter")
collectives.draw(allgather.ring, 4, 8, axes[1], title="allgather")
plt.show()

# %% [markdown]
# Between the two, rank r has all that it needs to update *its* part of the parameters. So it updates it, with its part
# of the moments, and the allgather distributes parameters instead of gradients:
#
# 1. reduce-scatter the gradients: rank r has the sum of its part;
# 2. rank r updates its part of the parameters, with moments of that part only;
# 3. allgather the parameters.
#
# The same number of bytes is sent as before, and the optimizer's work is divided, too.
#
# **Exercise 3.** Write it for N ranks in one process. `w[r]` are the parameters that rank r has (all of them), `g[r]`
# its gradients, `m[r]` and `v[r]` its moments, *of its part alone*. `chunk(count, N, r)` says where that is. (The
# starter code updates each part with the rank's own gradients: the sum is missing, and so is the allgather.)


# %%
def adam(w, g, m, v, step, rate=0.01, beta1=0.9, beta2=0.999, eps=1e-8):
    """Adam in place, of a whole vector or of a part of it: no number looks at another."""
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g**2 - v)
    w -= rate * (m / (1 - beta1 ** (step + 1))) / (np.sqrt(v / (1 - beta2 ** (step + 1))) + eps)


def my_zero1(w, g, m, v, step):
    """One step of N ranks; changes w, m and v in place."""
    count, N = len(w[0]), len(w)
    # gap: for each rank: the sum of its part, adam on it, and its part to all others
    # for r in range(N):
    #     lo, hi = chunk(count, N, r)
    #     adam(w[r][lo:hi], g[r][lo:hi], m[r], v[r], step)
    # solution
    for r in range(N):
        lo, hi = chunk(count, N, r)
        total = sum(g[q][lo:hi] for q in range(N))  # reduce-scatter
        adam(w[r][lo:hi], total, m[r], v[r], step)
    for r in range(N):
        lo, hi = chunk(count, N, r)
        for q in range(N):  # allgather
            w[q][lo:hi] = w[r][lo:hi]
    # wrong: parameters of [rank, place]
    # for r in range(N):
    #     lo, hi = chunk(count, N, r)
    #     adam(w[r][lo:hi], sum(g[q][lo:hi] for q in range(N)), m[r], v[r], step)
    # wrong: has its own part wrong
    # for r in range(N):
    #     lo, hi = chunk(count, N, r)
    #     adam(w[r][lo:hi], sum(g[q][lo:hi] for q in range(N)) / N, m[r], v[r], step)
    # end


# %%
exercise.check_zero1(my_zero1, adam)
plt.show()

# %% [markdown]
# Adam updates each number by itself, so shards may begin and end anywhere. Methods that use a **norm** need more:
# clipping, LARS and LAMB (notebook 09) need the length of a whole tensor, or of the whole gradient. Each shard has a
# sum of squares, and these are first summed over the ranks: one number, one small allreduce.
#
# **Exercise 4.** Clip a gradient whose shards are on different ranks, so that its length is at most `limit`.


# %%
def clip_shards(shards, limit):
    """The clipped shards; shards[r] is rank r's part of the gradient."""
    # gap: one length for all
    # return [g * min(1, limit / np.linalg.norm(g)) for g in shards]
    # solution
    length = np.sqrt(sum(np.sum(g**2) for g in shards))  # an allreduce of one number
    return [g * min(1, limit / length) for g in shards]
    # wrong: the clipped gradient, all shards
    # length = sum(np.linalg.norm(g) for g in shards)
    # return [g * min(1, limit / length) for g in shards]
    # end


# %%
exercise.check_clip(clip_shards)

# %% [markdown]
# Without the sum each shard is clipped by itself, which changes the direction:

# %%
rng = np.random.default_rng(2)
g = np.concatenate([3 * rng.standard_normal(6), 0.4 * rng.standard_normal(6)])
whole = g / np.linalg.norm(g)
apart = np.concatenate([half / np.linalg.norm(half) for half in np.split(g, 2)])
exercise.draw_clipped(whole, apart)
cosine = whole @ apart / np.linalg.norm(apart)
print(f"cosine of the angle to the gradient: {whole @ g / np.linalg.norm(g):.3f} and {cosine:.3f}")

# %% [markdown]
# ## 3. Stages 2 and 3: what is in memory when
#
# **Stage 2**: as soon as backward has finished a layer's gradients they are reduced, and a rank keeps only its own
# part. **Stage 3**: parameters, too, are in memory only while they are needed: a layer's are gathered before its
# forward pass and again before its backward, and freed after it. So only one layer at a time is whole. Here is the
# memory over a step, for a network of eight equal layers on four ranks (without moments):


# %%
def life(stage, layers=8, ranks=4):
    """(parameters, gradients) in whole layers that a rank holds, after each of the 2 x layers passes."""
    steps = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
    rows, done = [], 0
    for what, _ in steps:
        done += what == "backward"
        parameters = layers / ranks + 1 - 1 / ranks if stage == 3 else layers
        if what == "forward":
            gradients = 0.0
        elif stage >= 2:
            gradients = (done - 1) / ranks + 1  # one whole, of those before a part
        else:
            gradients = done
        rows.append((parameters, gradients))
    return np.array(rows)


exercise.draw_life(life)

# %% [markdown]
# What does it cost? Count the vectors of $\Psi$ elements that a rank sends in a step: reduce-scatter and allgather send
# one each (times (N-1)/N). Stages 1 and 2 send what data parallelism sends; stage 3 gathers twice. Counted in the
# schedules themselves:

# %%
N, count = 8, 80_000


def sent(*schedules):
    """Elements that rank 0 sends, in vectors."""
    flights = [f for s in schedules for f in price(s, N, count, trace=True).trace.flights]
    return sum(f.send.hi - f.send.lo for f in flights if f.source == 0) / count


traffic = {
    "replicated: allreduce": sent(allreduce.ring),
    "stages 1, 2: reduce-scatter, allgather": sent(reduce_scatter.ring, allgather.ring),
    "stage 3: allgather, allgather, reduce-scatter": sent(allgather.ring, allgather.ring, reduce_scatter.ring),
}
exercise.draw_traffic(traffic)
assert np.isclose(traffic["stages 1, 2: reduce-scatter, allgather"], 2 * (N - 1) / N)

# %% [markdown]
# ## 4. One layer ahead
#
# If each layer is gathered only when it is needed, ranks wait for it eight times. If all are gathered at first, no
# memory is saved. The solution: while layer l is computed, the shards of layer l + 1 are received.
#
# **Exercise 5** is a puzzle: your schedule is graded by the same tools that check and price the library's own.

# %%
print(puzzles.fsdp)


# %% [markdown]
# The starter code is right, but it gathers a layer and *then* computes it. `yield` in one round what may happen at the
# same time. The buffer that receives the shards, `full`, may hold two layers.


# %%
def my_fsdp(rank, size, count):
    """Rounds of one rank, of `size`, for `count` layers; x[l] is this rank's shard of layer l."""
    # gap: gather layer l + 1 in the round in which layer l is computed
    # for layer in range(count):
    #     steps = [Copy("full", rank, rank + 1, "x", layer)]
    #     for k in range(1, size):
    #         to, source = (rank + k) % size, (rank - k) % size
    #         steps += [Send(to, "x", layer, layer + 1), Recv(source, "full", source, source + 1)]
    #     yield tuple(steps)
    #     yield (Compute(f"L{layer}", (Slice("full", 0, size),), (Slice("y", layer, layer + 1),), 4.0),)
    # solution
    for layer in range(-1, count):
        steps = []
        if layer >= 0:
            at = layer % 2 * size  # two places, used alternately
            steps.append(Compute(f"L{layer}", (Slice("full", at, at + size),), (Slice("y", layer, layer + 1),), 4.0))
        if layer + 1 < count:
            at = (layer + 1) % 2 * size
            steps.append(Copy("full", at + rank, at + rank + 1, "x", layer + 1))
            for k in range(1, size):
                to, source = (rank + k) % size, (rank - k) % size
                steps += [Send(to, "x", layer + 1, layer + 2), Recv(source, "full", at + source, at + source + 1)]
        yield tuple(steps)
    # wrong: wrong
    # for layer in range(-1, count):
    #     steps = []
    #     if layer >= 0:
    #         steps.append(Compute(f"L{layer}", (Slice("full", 0, size),), (Slice("y", layer, layer + 1),), 4.0))
    #     if layer + 1 < count:
    #         steps.append(Copy("full", rank, rank + 1, "x", layer + 1))
    #         for k in range(1, size):
    #             to, source = (rank + k) % size, (rank - k) % size
    #             steps += [Send(to, "x", layer + 1, layer + 2), Recv(source, "full", source, source + 1)]
    #     yield tuple(steps)
    # end


# %%
grade = checks.call(puzzles.fsdp.grade, my_fsdp)
checks.graded(grade)
grade.draw()

# %% [markdown]
# ## 5. On real ranks
#
# The same step five times: in one process, with data parallelism, and with all three stages on two ranks, in float64. A
# trainer reports what it has allocated (`memory()`), and what the formula predicts (`formula()`).


# %%
def work():
    """(network, loss, optimizer): the same in every process."""
    layers = [nn.Linear(64, 128), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    network = nn.Network(nn.Sequential(*layers, nn.Linear(128, 10)), (64,), np.float64)
    return network, nn.CrossEntropyLoss(), nn.Adam(0.001)


def five_steps(trainer):
    """Losses of five steps on the trainer's part of batches of 101 samples."""
    data = nn.data.load("digits", flat=True, dtype=np.float64)
    batches = nn.Loader(data.train, 101, shard=trainer.shard).epoch(0)
    return [trainer.step(*batch) for batch, _ in zip(batches, range(5), strict=False)]


one = nn.Trainer(*work())
five_steps(one)
alone = one.state_dict()
print(one.network.summary().splitlines()[-1])

# %%
# %%mpi -n 2 --with work,five_steps,np,nn -o kept,formula,states,names
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives import Communicator
from parallel import DistributedDataParallel, FullyShardedDataParallel, ZeRO1, ZeRO2

limits = threadpool_limits(1, user_api="blas")
kept, formula, states, names = [], [], [], []
for strategy in (DistributedDataParallel, ZeRO1, ZeRO2, FullyShardedDataParallel):
    options = {} if strategy is DistributedDataParallel else {"unit_bytes": 1 << 17}
    trainer = strategy(*work(), Communicator(MPI.COMM_WORLD), **options)
    five_steps(trainer)
    kept.append(trainer.memory())
    formula.append(trainer.formula())
    names.append(strategy.__name__)
    states.append({name: array for name, array in trainer.state_dict().items() if name.startswith("param/")})
    trainer.close()

# %%
for name, state in zip(names[0], states[0], strict=True):
    off = max(np.abs(state[key] - alone[key]).max() for key in state)
    print(f"{name:26} farthest from one process: {off:.1e}")
    assert len(state) == 12 and off < 1e-12

exercise.draw_kept(kept, formula, names)

# %% [markdown]
# "In transit" are the layers that are whole for a moment: the unit in use, and the next one. In a small network this is
# a large share; in one of a hundred layers it is one or two of them.
#
# ## Try
#
# - Give `FullyShardedDataParallel` a `unit_bytes` of 1 << 12, and 1 << 20. What happens to "in transit", and to the
#   number of messages?
# - `offload="shards"` keeps moments in a file on the disk. What is left in memory?
# - `python scripts/train.py --ranks 2 --strategy fsdp --optimizer adam --memory`
#
# *Sources: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (PyTorch FSDP).*
#
# Next: `13_pipelines.py`, which cuts the network itself.
#
# This system's page has commands and measurements: [ZeRO and FSDP](../docs/systems/zero.md).
