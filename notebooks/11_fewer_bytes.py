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
# # 11. Fewer bytes
#
# In data parallelism every rank sends about twice the size of the model in every step. On a slow network that is most
# of the time. But gradients need not be exact: they are estimates from a few samples anyway. This notebook makes them
# smaller, in three ways:
#
# 1. the possible gain;
# 2. **half precision**: 16 bits instead of 32;
# 3. **quantisation**: a few levels, drawn at random so that the mean is right;
# 4. **top-k**: send only the largest, and remember the rest (**error feedback**);
# 5. **momentum** where most gradients are delayed;
# 6. all methods in one picture: bytes against accuracy, simulated and on real ranks.

# %%
# %load_ext parallel.launch.notebook

# %%
import matplotlib.pyplot as plt
import numpy as np
from threadpoolctl import threadpool_limits

import checks
import exercises.fewer_bytes as exercise
import nn
from checks import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED
from parallel.sync.compression import parse

# %matplotlib inline
checks.style()
limits = threadpool_limits(1, user_api="blas")  # matrices as small as ours are multiplied fastest by one thread

# %% [markdown]
# ## 1. The possible gain
#
# VGG-16 has 138 million parameters; say that a GPU computes a step in 0.12 s. Eight of them sum the gradients by a
# ring. We can change the size of a message:

# %%
COMPUTE, PARAMETERS = 0.12, 138_000_000
speeds = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
sizes = {"float32": 4.0, "float16": 2.0, "8 bits": 1.0, "2 bits": 0.25}
exercise.draw_gain(speeds, PARAMETERS, sizes, COMPUTE)

# %% [markdown]
# The number next to a bar is the share of time in which the GPU computes. On a fast network there is little to gain, on
# a slow one much. (Nor is compression free: choosing and packing takes time. Here we look at bytes and at accuracy.)
#
# Our gradients come from the digits again. Four workers are simulated in one process, each with every fourth sample of
# the batch.

# %%
WORKERS, BATCH = 4, 64
data = nn.data.load("digits", validation=0.2, flat=True, normalise=True)
x_train, y_train = data.train.batch()
x_validation, y_validation = data.validation.batch()
network = nn.Network(
    nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), (64,)
)
loss_function, ctx, layout = nn.CrossEntropyLoss(), network.context(), network.layout
COUNT = layout.size


def gradient(w, x, y, total):
    """The part of these samples of the mean gradient over `total` samples, as a flat array."""
    g = layout.zeros(np.float32)
    output, saved = network.forward(layout.views(w), x, ctx)
    _, gz = loss_function(output, y, total, ctx)
    network.backward(layout.views(w), layout.views(g), gz, saved, ctx)
    return g


def error(w):
    """Validation error in percent."""
    return 100 * np.mean(network.forward(layout.views(w), x_validation, ctx)[0].argmax(1) != y_validation)


def train(exchange, epochs=8, rate=0.1, momentum=0.0, seed=0):
    """Gradient descent; `exchange(gradients of all workers, step)` is their sum, or what is taken for it."""
    w, v = layout.zeros(np.float32), layout.zeros(np.float32)
    layout.initialize(w, seed)
    errors, step = [], 0
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(x_train))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            mine = [order[start + i : start + BATCH : WORKERS] for i in range(WORKERS)]
            g = exchange([gradient(w, x_train[rows], y_train[rows], BATCH) for rows in mine], step)
            v = momentum * v + g
            w -= rate * v
            step += 1
        errors.append(error(w))
    return errors


w = layout.zeros(np.float32)
layout.initialize(w, 0)
example = gradient(w, x_train[:16], y_train[:16], BATCH)
exercise.draw_gradients(example, COUNT)

# %% [markdown]
# ## 2. Half precision
#
# A float16 has 11 bits for its digits and 5 for its exponent: numbers from 6e-8 to 65,504. Smaller gradients become
# zero. So before rounding, all are multiplied by the same power of two: the largest for which the *sum* of all workers'
# numbers does not exceed 65,504 (Micikevicius et al. 2018). A power of two changes only the exponent, so no digit is
# lost.
#
# **Exercise 1.** Which power of two?


# %%
def scale_of(largest, ranks):
    """What numbers up to `largest` are multiplied by, of which `ranks` are summed."""
    # gap: the largest power of two for which the sum is at most 65,504
    # return 2.0**16
    # solution
    return 2.0 ** np.floor(np.log2(65504 / ranks / largest))
    # wrong: above 65,504
    # return 2.0 ** np.floor(np.log2(65504 / largest))
    # wrong: is no power of two
    # return 65504 / ranks / largest
    # wrong: above 65,504
    # return 2.0 ** np.round(np.log2(65504 / ranks / largest))
    # end


# %%
exercise.check_scale(scale_of)


# %%
def halve(g, ranks):
    """float16 numbers and the scale that they were multiplied by."""
    scale = scale_of(np.abs(g).max(), ranks)
    return (g * np.float32(scale)).astype(np.float16), scale


small = example * np.float32(1e-4)  # as they may be late in training
plain = small.astype(np.float16).astype(np.float32)
numbers, scale = halve(small, WORKERS)
scaled = numbers.astype(np.float32) / np.float32(scale)
exercise.draw_rounded(small, plain, scale, scaled)

theirs = parse("fp16").attach(layout.region(), np.float32, 0, (0, WORKERS))
total = np.zeros(COUNT, np.float32)
theirs.decode(theirs.encode(small.copy(), 0), total)
print(f"by hand and by the library: differ by {np.abs(total - scaled).max():.1e}")
assert np.array_equal(total, scaled)

# %% [markdown]
# There are two traps. MPI has no float16 and cannot add them: the bytes are sent as `uint16`. And *sums* must not be
# made in 16 bits: each addition would round again. So each rank adds up one part of all vectors in float32, rounds the
# sum once, and sends it to all: a reduce-scatter and an allgather with half the bytes.
#
# ## 3. Quantisation
#
# Still fewer bits: only the levels -s, ..., 0, ..., s. Rounding to the nearest would make everything below half a level
# zero, in every step, for ever: a **bias**. QSGD (Alistarh et al. 2017) rounds at random, up with the probability that
# makes the mean right. With U uniform in [0, 1):
#
# $$ t = s\,\frac{v}{\lVert v\rVert_2}, \qquad k = \lfloor t + U \rfloor, \qquad
#    \text{decoded: } \frac{\lVert v\rVert_2}{s}\, k . $$
#
# $E\lfloor t + U\rfloor = t$, so the decoded vector is v on average, and its variance is at most
# $\min(n/s^2, \sqrt n/s)\,\lVert v\rVert^2$.
#
# **Exercise 2.** Write the decoded vector. (The starter code rounds to the nearest level.)


# %%
def my_qsgd(v, s, U):
    """The vector v in levels of |v| / s; U has a random number for each."""
    # gap: random rounding, so that the mean is v
    # norm = np.linalg.norm(v)
    # return norm / s * np.round(s * v / norm)
    # solution
    norm = np.linalg.norm(v)
    return norm / s * np.floor(s * v / norm + U)
    # wrong: rounding has a bias
    # norm = np.linalg.norm(v)
    # return norm / s * np.floor(s * v / norm)
    # wrong: not all values are whole levels
    # norm = np.linalg.norm(v)
    # return norm / s * (s * v / norm + U - 0.5)
    # end


# %%
exercise.check_qsgd(my_qsgd)
plt.show()

# %% [markdown]
# With s = 1, three levels, it is TernGrad's idea. `nn`'s QSGD takes the norm of every 512 gradients, not of all, which
# makes the levels finer, and packs 2s + 1 levels into log2(2s + 1) bits. Does noise without bias harm training?


# %%
def dense(gradients, step):
    return np.sum(gradients, axis=0)


def quantised(s):
    def exchange(gradients, step):
        draws = np.random.default_rng(step)
        return sum(my_qsgd(g, s, draws.random(COUNT).astype(np.float32)) for g in gradients).astype(np.float32)

    return exchange


def nearest(s):
    def exchange(gradients, step):
        return sum(np.linalg.norm(g) / s * np.round(s * g / np.linalg.norm(g)) for g in gradients)

    return exchange


curves = {
    "all bits": train(dense),
    "nearest of 33 levels": train(nearest(16)),
    "33 levels at random": train(quantised(16)),
}
exercise.draw_errors(curves, "Rounding: bias is worse than noise")

# %% [markdown]
# One bit is the minimum: the **sign** (Seide et al. 2014). Two numbers are sent with the signs, the mean of the
# positive gradients and the mean of the others; each sign is decoded as its mean. (The error is remembered, as below.)
#
# **Exercise 3.** Pack eight signs into a byte: `np.packbits` makes bytes of an array of True and False, and
# `np.unpackbits(bits, count=n)` gives n of them back.


# %%
def pack_signs(p):
    """(bytes of the bits: positive or not, mean of the positive numbers, mean of the others)."""
    # gap: a bit each
    # return (p > 0).astype(np.uint8), p.mean(), -p.mean()
    # solution
    positive = p > 0
    return np.packbits(positive), p[positive].mean(), p[~positive].mean()
    # wrong: the mean of the positive numbers, and that of the others
    # size = np.abs(p).mean()
    # return np.packbits(p > 0), size, -size
    # end


def unpack_signs(bits, high, low, count):
    """The decoded numbers."""
    # gap: from bits to means
    # return np.full(count, high)
    # solution
    return np.where(np.unpackbits(bits, count=count), high, low)
    # wrong: the signs do not come back in their places
    # return np.where(np.unpackbits(bits, count=count, bitorder="little"), high, low)
    # end


# %%
exercise.check_signs(pack_signs, unpack_signs)
print(f"{4 * COUNT:,} bytes of float32 become {pack_signs(example)[0].nbytes:,}")

# %% [markdown]
# ## 4. Only the largest, with a memory
#
# Send only the 1% of the gradients that are largest in magnitude, with their places. If the others are dropped, small
# gradients never have an effect, even if they always point the same way. So each worker keeps what it did not send, the
# **error** e, and adds it to the next gradient:
#
# $$ p = g + e, \qquad \text{send the largest of } p, \qquad e \leftarrow p - \text{sent} . $$
#
# Nothing is lost, it is only sent later: at any time *sum of all sent + e = sum of all g*.
#
# **Exercise 4.** Write it. `e` is changed in place. (The starter code has no memory.)


# %%
def my_topk(g, e, k):
    """What is sent: zeros but for the k entries that are largest; e is changed in place."""
    # gap: add the memory, choose, remember the rest
    # sent = np.zeros_like(g)
    # largest = np.argsort(-np.abs(g))[:k]
    # sent[largest] = g[largest]
    # return sent
    # solution
    e += g
    largest = np.argsort(-np.abs(e))[:k]
    sent = np.zeros_like(e)
    sent[largest] = e[largest]
    e -= sent
    return sent
    # wrong: what is in the memory?
    # largest = np.argsort(-np.abs(g))[:k]
    # sent = np.zeros_like(g)
    # sent[largest] = g[largest]
    # e += g - sent
    # return sent
    # wrong: yours sends 20
    # e += g
    # sent = e.copy()
    # e -= sent
    # return sent
    # end


# %%
exercise.check_topk(my_topk)
plt.show()

# %% [markdown]
# Look at place 2: its gradient is small, but always points the same way. Whenever its memory has grown enough, all of
# it is sent at once.


# %%
def topk(share, memory=True):
    errors = [np.zeros(COUNT, np.float32) for _ in range(WORKERS)]
    k = int(np.ceil(share * COUNT))

    def exchange(gradients, step):
        if not memory:
            for e in errors:
                e[:] = 0
        return sum(my_topk(g, e, k) for g, e in zip(gradients, errors, strict=True))

    return exchange


curves = {
    "all": train(dense),
    "1%, forgetting": train(topk(0.01, memory=False)),
    "1%, remembering": train(topk(0.01)),
}
exercise.draw_errors(curves, "One gradient in a hundred")

# %% [markdown]
# ## 5. Momentum with delayed gradients
#
# With momentum m the optimizer multiplies what it gets by about 1/(1-m) over the next steps. If an entry is sent only
# every hundredth step, a hundred gradients arrive at once, and momentum repeats all of them. **Deep gradient
# compression** (Lin et al. 2018) puts the momentum *before* the choice, on each worker, and remembers velocities in
# place of gradients:
#
# $$ u \leftarrow m\,u + g, \qquad v \leftarrow v + u, \qquad
#    \text{send the largest of } v;\ \text{there } u = v = 0 . $$
#
# The optimizer then has no momentum of its own.
#
# **Exercise 5.** Write a step of one worker; u and v are changed in place. (The starter code remembers gradients.)


# %%
def my_dgc(g, u, v, m, k):
    """What is sent: zeros but for k entries."""
    # gap: velocity, memory, choice, and what becomes of both where it was sent
    # v += g
    # largest = np.argsort(-np.abs(v), kind="stable")[:k]
    # sent = np.zeros_like(v)
    # sent[largest] = v[largest]
    # v[largest] = 0
    # return sent
    # solution
    u *= m
    u += g
    v += u
    largest = np.argsort(-np.abs(v), kind="stable")[:k]
    sent = np.zeros_like(v)
    sent[largest] = v[largest]
    u[largest] = v[largest] = 0
    return sent
    # wrong: u after step
    # u *= m
    # u += g
    # v += u
    # largest = np.argsort(-np.abs(v), kind="stable")[:k]
    # sent = np.zeros_like(v)
    # sent[largest] = v[largest]
    # v[largest] = 0
    # return sent
    # end


# %%
exercise.check_dgc(my_dgc)

# %% [markdown]
# Here it is for every tensor of every worker, compared with the library's:


# %%
def dgc(share, momentum=0.9):
    u, v = np.zeros((WORKERS, COUNT), np.float32), np.zeros((WORKERS, COUNT), np.float32)
    tensors = [part for _, part, _ in layout.region().tensors]

    def exchange(gradients, step):
        total = np.zeros(COUNT, np.float32)
        for i, g in enumerate(gradients):
            for part in tensors:  # the largest of each tensor
                k = int(np.ceil(share * (part.stop - part.start)))
                total[part] += my_dgc(g[part], u[i, part], v[i, part], momentum, k)
        return total

    return exchange


def library(method):
    """The library's compressors as an exchange, one for each worker; `sent` counts bytes."""
    each = [parse(method).attach(layout.region(), np.float32, 0, (i, WORKERS)) for i in range(WORKERS)]

    def exchange(gradients, step):
        total, messages = np.zeros(COUNT, np.float32), []
        for one, g in zip(each, gradients, strict=True):
            messages.append(one.encode(g, step))
            one.decode(messages[-1], total)
        exchange.sent.append(np.mean([len(message) for message in messages]))
        return total

    exchange.sent = []
    return exchange


ours, theirs = dgc(0.01), library("dgc:0.01,momentum=0.9")
rng = np.random.default_rng(0)
for step in range(6):
    gradients = [
        gradient(w, x_train[rows], y_train[rows], 16) for rows in rng.integers(len(x_train), size=(WORKERS, 4))
    ]
    a, b = ours([g.copy() for g in gradients], step), theirs([g.copy() for g in gradients], step)
    assert np.allclose(a, b, rtol=1e-5, atol=1e-7)
print("six steps: by hand and by the library the same")

curves = {
    "all, momentum 0.9": train(dense, rate=0.05, momentum=0.9),
    "1%, momentum after": train(topk(0.01), rate=0.05, momentum=0.9),
    "1%, momentum before (DGC)": train(dgc(0.01), rate=0.05),
}
exercise.draw_errors(curves, "Momentum and one gradient in a hundred")

# %% [markdown]
# ## 6. Bytes against accuracy
#
# These are the library's methods that encode messages, each for 8 epochs with the same rate; the bytes are those of the
# messages, positions included.

# %%
methods = {"none": INK, "fp16": BLUE, "qsgd:4": ORANGE, "terngrad": ORANGE, "onebit": GREEN}
methods |= {"topk:0.1": RED, "topk:0.01": RED, "topk:0.001": RED, "threshold:0.01": PINK, "dgc:0.01": GREY}
points = {}
for method in methods:
    exchange = library(method)
    rate = 0.02 if method.startswith("dgc") else 0.1  # with its momentum of 0.9 a step is longer
    errors = train(exchange, rate=rate)
    points[method] = np.mean(exchange.sent) / (4 * COUNT), float(np.median(errors[-3:]))

exercise.draw_methods(points, methods)

# %% [markdown]
# Read from the right: half of the bytes cost no accuracy, a tenth hardly any; below that it depends on the method.
# (With one seed, a percent is chance.) Now the same on real ranks: `DistributedDataParallel` takes a compressor, and
# counts the bytes that it sends.

# %%
# %%mpi -n 2 --with np,nn -o losses,sent,name
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives import Communicator
from parallel import DistributedDataParallel
from parallel.sync.compression import parse

limits = threadpool_limits(1, user_api="blas")
losses, sent = {}, {}
data = nn.data.load("digits", validation=0.2, flat=True, normalise=True)
for method in ("none", "fp16", "topk:0.01"):
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    network = nn.Network(nn.Sequential(*layers), (64,))
    communicator = Communicator(MPI.COMM_WORLD)
    trainer = DistributedDataParallel(
        network, nn.CrossEntropyLoss(), nn.SGD(0.1), communicator, compressor=parse(method)
    )
    history = nn.fit(trainer, nn.Loader(data.train, 64, shard=trainer.shard), 8).history
    losses[method] = [record["loss"] for record in history]
    sent[method] = trainer.sync.bytes_sent()
    name = trainer.name
    trainer.close()

# %%
exercise.draw_on_ranks(losses, sent, name)
assert sent[0]["topk:0.01"]["bytes_sent"] < 0.05 * sent[0]["none"]["bytes_sent"]

# %% [markdown]
# ## Try
#
# - Let `topk` choose 0.1%, and lower the rate. Can patience make up for bytes?
# - PowerSGD (Vogels et al. 2019) sends two thin matrices P and Q with P Q' near the gradient. It has no messages of
#   single ranks (they are summed as they are), so it is not in the picture; `scripts/experiments/fewer_bytes.py` has
#   it.
# - Is the gradient of one *rank* or the sum of all to be compressed? What would a parameter server do?
# - `python scripts/train.py --ranks 2 --compress topk:0.01`
#
# *Sources: Micikevicius et al. 2018 (scaling); Alistarh et al. 2017 (QSGD); Wen et al. 2017 (TernGrad); Seide et al.
# 2014 (error feedback); Stich, Cordonnier, Jaggi 2018 (top-k); Lin et al. 2018 (DGC).*
#
# Next: `12_zero.py`, where the bytes are those in memory.
#
# This system's page has commands and measurements: [Fewer bytes](../docs/systems/compression.md).
