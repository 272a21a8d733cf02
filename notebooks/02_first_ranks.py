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
# # First ranks
#
# Training on many processors starts with one small act: **several processes, each with numbers of its own, end up with
# the sum of them all.** If the numbers are gradients, that is data-parallel training. Here we get there in six steps:
#
# 1. what a rank is,
# 2. one rank sends, another receives,
# 3. a sum that travels round a ring, by hand,
# 4. the ring as engineers use it: in parts, everybody busy all the time,
# 5. the same sum in one line: `Allreduce`,
# 6. the gradients of a small model, on two ranks and on one: the same numbers.
#
# You need no cluster. The ranks are ordinary processes of your own machine.

# %%
# %load_ext parallel.launch.notebook
# %matplotlib inline

# %%
import matplotlib.pyplot as plt
import numpy as np

import collectives
from collectives.algorithms import allreduce

# %% [markdown]
# ## 1. A rank
#
# An MPI program is **one program that runs several times at once**. Each running copy is a process with its own
# memory, and has a number: its **rank**, counted from 0. `size` is how many there are. No variable is shared; what a
# rank wants to know of another must be sent.
#
# A cell that begins with `%%mpi -n 3` runs on three ranks instead of in the notebook. They start when the cell starts
# and are gone when it ends. Run it twice: the order of the lines may change, since nobody waits for anybody.

# %%
# %%mpi -n 3
import os

from mpi4py import MPI

comm = MPI.COMM_WORLD  # all the ranks that were started together
rank, size = comm.Get_rank(), comm.Get_size()
print(f"I am rank {rank} of {size}, process {os.getpid()}")

# %% [markdown]
# How does one program do different work on each rank? By asking for its number. Rank r takes every third sample,
# beginning with r. `-o` brings a variable back into the notebook: a list with one value a rank.

# %%
# %%mpi -n 3 -o mine
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
mine = list(range(10))[rank::size]

# %%
for rank, samples in enumerate(mine):
    print(f"rank {rank} has samples {samples}")
assert sorted(sample for samples in mine for sample in samples) == list(range(10)), "every sample has one rank"

# %% [markdown]
# ## 2. Send and receive
#
# `Send(array, dest)` and `Recv(array, source)` belong together: one rank sends, the other receives into an array that
# it has made ready, of the **same size and type**. MPI moves bytes and does not look at what they mean: the eight bytes
# of a `float64`, received into two `float32`, are nonsense, without a word of warning.

# %%
# %%mpi -n 2 -o x
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.Get_rank() == 0:
    x = np.array([1.0, 2.0, 3.0])
    comm.Send(x, dest=1)
else:
    x = np.empty(3)  # its values do not matter: they are about to be overwritten
    comm.Recv(x, source=0)

# %%
print("rank 0:", x[0], " rank 1:", x[1])
assert np.array_equal(x[0], x[1])

# %% [markdown]
# ### The mistake that everybody makes once
#
# Two ranks that both receive first wait for each other for ever: a **deadlock**. Nothing crashes, no message appears;
# the ranks just stand there and keep a core busy. That is why every `%%mpi` cell has a time limit (`-t`, 60 seconds if
# you do not say). When it is over, you are told at which line each rank stood, and all of them are ended.
#
# The next cell is wrong, and ends with an error after two seconds. Which two lines must change places, and on which
# rank?

# %% tags=["raises-exception"]
# %%mpi -n 2 -t 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
other = 1 - comm.Get_rank()
got = np.empty(3)
comm.Recv(got, source=other)
comm.Send(np.ones(3), dest=other)

# %% [markdown]
# ## 3. A sum round a ring, by hand
#
# Four ranks each hold an array, and all want the sum. Let the ranks sit in a circle. Each keeps a running `total`, and
# passes on to its right neighbour what it last got from its left one. After `size - 1` rounds every rank has seen
# every array once.
#
# Sending to the right and receiving from the left must happen *together*, or everybody waits as above. `Sendrecv` does
# both at once.

# %%
# %%mpi -n 4 -o total
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size

mine = np.full(8, 10.0**rank)  # rank 0: ones, rank 1: tens, rank 2: hundreds, ...
total, passing, got = mine.copy(), mine.copy(), np.empty(8)
for step in range(size - 1):
    comm.Sendrecv(passing, dest=right, recvbuf=got, source=left)
    total += got
    passing, got = got, passing
    if rank == 0:
        print(f"step {step}: rank 0 now has {total[0]:g}")

# %%
for rank, t in enumerate(total):
    print(f"rank {rank}: {t}")
assert all(np.array_equal(t, np.full(8, 1111.0)) for t in total)

# %% [markdown]
# It works, but it is wasteful. In each of the p - 1 rounds every rank sends its **whole** array of n numbers, (p - 1) n
# in all: with 100 ranks, 99 times the array.
#
# ## 4. The ring in parts
#
# Cut the array into p parts. In every round each rank sends **one part** to the right, a different one from its
# neighbours'. The ring is walked twice:
#
# - **reduce-scatter**, p - 1 rounds: a part that arrives is *added* to one's own. Afterwards each rank has one part of
#   the sum complete.
# - **allgather**, p - 1 rounds: the complete parts go round once more and are *copied*.
#
# Each rank sends 2 (p - 1) parts of n/p numbers: **2 (p - 1)/p n, less than twice the array, however many ranks there
# are.** No algorithm needs less. This is why training libraries use it, and where the name of this project comes from.
#
# Here is the ring in full. It is not a description of the program: it *is* the program. The same few lines run over
# MPI, are checked for many numbers of ranks, and are drawn below.

# %%
import inspect

print(inspect.getsource(allreduce.ring))

# %%
collectives.draw(allreduce.ring, 4, 8)

# %% [markdown]
# Every arrow is a message; time runs down; a colour is a place in the array. Follow one colour: it goes round
# once and grows into a sum, then goes round again and is only copied.
#
# How much does each rank send, in arrays?

# %%
p = np.arange(2, 65)
fig, ax = plt.subplots(figsize=(6, 3))
ax.plot(p, p - 1, label="whole arrays round the ring: p - 1")
ax.plot(p, 2 * (p - 1) / p, label="the ring in parts: 2 (p - 1)/p")
ax.set(xlabel="ranks p", ylabel="arrays sent by each rank", ylim=(0, 12))
ax.legend()
fig.tight_layout()

# %% [markdown]
# ## 5. In one line
#
# `collectives.Communicator` wraps an MPI communicator. Its methods are those of mpi4py, and what they do is the
# schedule above. `algorithm="ring"` asks for this one; left out, the size of the array decides. `MPI.IN_PLACE` says:
# the array is both what I give and where I want the result.

# %%
# %%mpi -n 4 -o x
import numpy as np
from mpi4py import MPI

from collectives import Communicator

comm = Communicator(MPI.COMM_WORLD)
x = np.full(8, 10.0 ** comm.Get_rank())
comm.Allreduce(MPI.IN_PLACE, x, algorithm="ring")

# %%
print(x[0])
assert all(np.array_equal(each, np.full(8, 1111.0)) for each in x)

# %% [markdown]
# ## 6. The gradients of a model
#
# A linear model y = X w, with the mean of the squared errors over all B samples as its loss:
#
# $$ L(w) = \frac{1}{2B} \sum_{i=1}^{B} (x_i \cdot w - y_i)^2, \qquad
#    \nabla L = \frac{1}{B} \sum_{i=1}^{B} (x_i \cdot w - y_i)\, x_i. $$
#
# The gradient is a **sum over samples**. So half of the samples can be summed on one rank, half on another, and the two
# sums added. The only care needed: each rank divides by B, the samples of *all* ranks, not by its own number. Then it
# is right for uneven shares too.

# %%
rng = np.random.default_rng(0)
B = 101  # odd, so the two ranks get different numbers of samples
w_true = np.array([2.0, -1.0, 0.5])
X = rng.standard_normal((B, 3))
y = X @ w_true + 0.1 * rng.standard_normal(B)


def gradient(w, X, y, total):
    """This share of the samples' part of the gradient; total is the number of samples of all ranks together."""
    return X.T @ (X @ w - y) / total


def alone(steps, rate):
    """Gradient descent in one process: the weights after every step."""
    w, path = np.zeros(3), []
    for _ in range(steps):
        g = gradient(w, X, y, len(X))
        w -= rate * g
        path.append(w.copy())
    return np.array(path)


path_alone = alone(40, 0.2)
w_alone = path_alone[-1]
print("one process:", w_alone)

# %% [markdown]
# Now on two ranks. The ranks do not know this notebook; `--with` gives them what they need: `gradient` as source,
# `X` and `y` as arrays. Compare the loop with the one above: **one line is new.**

# %%
# %%mpi -n 2 --with gradient,X,y -o w,path,count
import numpy as np
from mpi4py import MPI

from collectives import Communicator

comm = Communicator(MPI.COMM_WORLD)
rank, size = comm.Get_rank(), comm.Get_size()
mine, targets = X[rank::size], y[rank::size]  # this rank's share
count = len(mine)

w, path = np.zeros(3), []
for _ in range(40):
    g = gradient(w, mine, targets, len(X))
    comm.Allreduce(MPI.IN_PLACE, g, algorithm="ring")  # now g is the gradient over all samples, on both ranks
    w -= 0.2 * g
    path.append(w.copy())

# %%
print("samples:", count)
for rank in range(2):
    farthest = np.abs(np.array(path[rank]) - path_alone).max()
    print(f"rank {rank}: {w[rank]}, never farther from one process than {farthest:.1e}")

assert count == [51, 50]
assert np.array_equal(path[0], path[1]), "the two ranks have the same weights after every step, to the last bit"
assert np.allclose(path[0], path_alone, rtol=1e-12, atol=0)

# %% [markdown]
# Two different promises are kept here:
#
# - **Between ranks: the same to the last bit.** Each part of the sum is computed once, by one rank, and copied to the
#   others. So two replicas of a model cannot drift apart.
# - **Against one process: the same to rounding.** Floating-point addition is not associative: (a + b) + c and
#   a + (b + c) may differ in the last digit, and the ranks add in another order.
#
# What if we forget the one new line? Each rank would learn from its own half only.

# %%
# %%mpi -n 2 --with gradient,X,y -o w_apart
import numpy as np
from mpi4py import MPI

rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
mine, targets = X[rank::size], y[rank::size]
w_apart = np.zeros(3)
for _ in range(40):
    w_apart -= 0.2 * gradient(w_apart, mine, targets, len(mine))

# %%
fig, ax = plt.subplots(figsize=(6, 3))
bars = {"one process": w_alone, "2 ranks, rank 0": w[0], "2 ranks, rank 1": w[1]}
bars |= {"no Allreduce, rank 0": w_apart[0], "no Allreduce, rank 1": w_apart[1]}
colours = ["black", "tab:blue", "tab:cyan", "tab:red", "tab:orange"]
for i, (name, each) in enumerate(bars.items()):
    ax.bar(np.arange(3) + 0.16 * (i - 2), each - w_true, width=0.15, label=name, color=colours[i])
ax.axhline(0, color="grey", linewidth=0.8)
ax.set_xticks(range(3), ["w[0]", "w[1]", "w[2]"])
ax.set_ylabel("distance from the true weights")
ax.legend(fontsize=7)
fig.tight_layout()

assert np.abs(w_apart[0] - w_apart[1]).max() > 1e-3, "without the sum the replicas are two different models"

# %% [markdown]
# Black and the two blues agree; the red and the orange bars are two different models, each from half the data.
#
# ## Try
#
# - Give the last training cell 3 or 4 ranks. What has to change? (Nothing but `-n`.)
# - Divide by `len(mine)` instead of `len(X)` in the data-parallel loop. The gradient becomes about twice as long. What
#   does that do to the learning rate?
# - Draw other ways to the same sum: `collectives.ALGORITHMS["allreduce"]` names them, `collectives.draw` draws any of
#   them.
#
# What comes next is the same with a real network: `parallel.DistributedDataParallel` is the loop above, with the
# gradients of all layers in one array.
