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
# # 7. Allreduce: the sum on every rank
#
# Every rank has a vector, and every rank needs the sum of all vectors. In data-parallel training the vectors are
# gradients, and the speed of training depends on this operation. There are surprisingly many algorithms for it:
#
# 1. a tree up and down;
# 2. the **ring**: write it, and have it checked, drawn, priced, and run;
# 3. **doubling** and **halving**: for few bytes, and for many;
# 4. two trees at once;
# 5. no messages at all: **shared memory**;
# 6. when to use which: a map, and a race on this machine.

# %%
# %load_ext parallel.launch.notebook
# %matplotlib inline

# %%
import matplotlib.pyplot as plt
import numpy as np

import checks
import collectives
import exercises.patterns as exercise
from collectives import Copy, Barrier, Recv, RecvReduce, Reduce, Send, chunk, puzzles
from collectives.algorithms import allreduce
from collectives.pricing.networks import Network

checks.style()

# %% [markdown]
# ## Up and down a tree
#
# From the last notebook: reduce to rank 0, then broadcast. Two trees, $2 \log_2 p$ rounds, and in each the *whole*
# vector:

# %%
collectives.draw(allreduce.reduce_broadcast, 8, 4, title="reduce, then broadcast")

# %% [markdown]
# Count the arrows that touch rank 0: six whole vectors pass through its port, while rank 7 has one in and one out. Most
# of the machine is idle. No rank should be special.
#
# ## The ring, by hand
#
# Four ranks in a circle. Each keeps a running `total`, and sends to its right neighbour what it last received from its
# left one. After `size - 1` rounds every rank has seen every vector once. With nothing but `Sendrecv`:

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
    print(f"round {step}: {total[0]:g}")

# %% [markdown]
# It works, and all ranks are busy all the time. But in each of the p - 1 rounds every rank sends its **whole** vector
# of n numbers: with 100 ranks, 99 vectors. And all ranks do the *same additions*.
#
# ## The ring in parts
#
# Cut the vector into p parts and make each rank responsible for one. The ring is walked twice:
#
# - **reduce-scatter**, p - 1 rounds: each part goes once round the ring, and every rank *adds* its own values. In every
#   round each rank sends one part, a different one from its neighbours'. Afterwards each rank has one part of the sum
#   complete.
# - **allgather**, p - 1 rounds: the complete parts go round once more and are *copied*.
#
# Each rank sends 2 (p - 1) parts of n/p numbers: **2 (p - 1)/p n, less than twice the vector, however many ranks there
# are.**
#
# **Exercise 1.** Write it. In round k (0, 1, ...) of the first walk, rank r sends part r - k to the right, and receives
# part r - k - 1 from the left, adding it to its own (`RecvReduce`). Which part is complete on rank r then? It sends
# that part first on the second walk (`Recv` copies).

# %%
print(puzzles.ring)


# %%
def ring(rank, size, count):
    right, left = (rank + 1) % size, (rank - 1) % size

    def chunk_of(i):
        return chunk(count, size, i % size)  # (lo, hi) of part i, counted round

    for k in range(size - 1):
        yield Send(right, "x", *chunk_of(rank - k)), RecvReduce(left, "x", *chunk_of(rank - k - 1))
    for k in range(size - 1):
        # gap: complete parts go round: which part is sent in round k, which one is received
        # yield Send(right, "x", *chunk_of(rank - k)), Recv(left, "x", *chunk_of(rank - k - 1))
        # solution
        yield Send(right, "x", *chunk_of(rank + 1 - k)), Recv(left, "x", *chunk_of(rank - k))
        # wrong: ring allreduce: wrong
        # yield Send(right, "x", *chunk_of(rank - k)), Recv(left, "x", *chunk_of(rank - k - 1))
        # wrong: ring allreduce: wrong
        # yield Send(right, "x", *chunk_of(rank + 1 - k)), RecvReduce(left, "x", *chunk_of(rank - k))
        # end


# %%
checks.graded(puzzles.ring.grade(ring))
checks.graded(collectives.check(ring, ranks=range(1, 18), operation="allreduce"))
collectives.draw(ring, 4, 8, title="your ring")

# %% [markdown]
# Checked for 1 to 17 ranks, for vectors that divide evenly and that do not, with sends that return at once and with
# sends that wait. Follow one colour: it goes round once and grows into a sum, then goes round again and is only copied.
#
# This is what every rank holds, round by round (a square is x: its columns are the elements, its rows the ranks whose
# data they contain):

# %%
collectives.draw_buffers(ring, 4, 4, title="x on the way")

# %% [markdown]
# The diagonal of full columns after round 2 is the result of the reduce-scatter: each rank has one complete part of the
# sum. How many vectors does a rank send?

# %%
exercise.draw_vectors_sent()

# %% [markdown]
# No algorithm of messages sends less than the blue line. The ring is not the only one that reaches it: recursive
# halving and doubling sends as little, in $2\log_2 p$ rounds instead of $2(p-1)$, where $p$ is a power of two. The ring
# reaches it for every number of ranks, and needs only links between neighbours. Training libraries use it for these two
# reasons, and this project is named after it. It runs as you have written it:

# %%
# %%mpi -n 4 --with ring
import numpy as np
from mpi4py import MPI

from collectives import Communicator, Recv, RecvReduce, Send, chunk

comm = Communicator(MPI.COMM_WORLD)
x = np.full(8, 10.0 ** comm.Get_rank())
comm.Allreduce(MPI.IN_PLACE, x, algorithm=ring)
x

# %% [markdown]
# ## Few rounds: doubling
#
# The ring has one weakness: 2 (p - 1) rounds. With 1,024 ranks and 20 µs a message that is 41 ms, for a single number.
# For short vectors the number of rounds matters.
#
# **Exercise 2.** *Recursive doubling.* In round k, ranks whose numbers differ in bit k (`rank ^ 2**k`) exchange their
# whole vectors, and both add. After the first round every rank has the sum of two, then of four, then of eight. For a
# power of two ranks.


# %%
def doubling(rank, size, count):
    bit = 1
    while bit < size:
        # gap: exchange with the partner of this bit, and add what is received
        # partner = rank + bit
        # yield Send(partner, "x", 0, count), Recv(partner, "x", 0, count)
        # solution
        partner = rank ^ bit
        yield Send(partner, "x", 0, count), RecvReduce(partner, "x", 0, count)
        # wrong: wrong
        # partner = rank ^ bit
        # yield Send(partner, "x", 0, count), Recv(partner, "x", 0, count)
        # wrong: wrong
        # partner = (rank + bit) % size
        # yield Send(partner, "x", 0, count), RecvReduce((rank - 2 * bit) % size, "x", 0, count)
        # end
        bit *= 2


# %%
checks.graded(puzzles.doubling.grade(doubling))
collectives.draw(doubling, 8, 4, title="recursive doubling")

# %% [markdown]
# A **butterfly**: three rounds for eight ranks, ten for 1,024. But again each round carries the whole vector. Few
# rounds *and* few bytes are possible: exchange **halves**. In the first round each rank sends one half of the vector
# away and sums the other; in the next round a quarter, and so on. Then the complete parts come back, doubling in size.
# This is Rabenseifner's algorithm: $2 \log_2 p$ rounds and as few bytes as the ring.
#
# **Exercise 3.** Write it for a power of two ranks. The first half is done: with the partners of the bits p/2, p/4,
# ..., 1 each rank sends away half of the range `lo:hi` that it still sums, and keeps the other half. On the way back
# the ranges grow again: what does a rank send to the partner of bit 1, what does it receive, and what does it have
# then? (`ranges` lists partner, kept and sent range of each exchange.)

# %%
print(puzzles.halving)


# %%
def halving(rank, size, count):
    lo, hi, bit, ranges = 0, count, size // 2, []
    while bit:
        partner, middle = rank ^ bit, (lo + hi) // 2
        keep, give = ((middle, hi), (lo, middle)) if rank & bit else ((lo, middle), (middle, hi))
        yield Send(partner, "x", *give), RecvReduce(partner, "x", *keep)
        ranges.append((partner, keep, give))
        lo, hi = keep
        bit //= 2
    # gap: the same exchanges backwards: send the complete range, receive the one that was sent away
    # for partner, keep, give in ranges:
    #     yield Send(partner, "x", *keep), Recv(partner, "x", *give)
    # solution
    for partner, keep, give in reversed(ranges):
        yield Send(partner, "x", *keep), Recv(partner, "x", *give)
    # wrong: wrong
    # for partner, keep, give in reversed(ranges):
    #     yield Send(partner, "x", *keep), RecvReduce(partner, "x", *give)
    # wrong: wait for ever
    # for partner, keep, give in reversed(ranges):
    #     yield (Send(partner, "x", *keep),)
    #     yield (Recv(partner, "x", *give),)
    # end


# %%
checks.graded(puzzles.halving.grade(halving))

# %%
_, axes = plt.subplots(1, 2, figsize=(12, 6.4), layout="none")
plt.subplots_adjust(left=0.06, right=0.98, bottom=0.17, top=0.83)
collectives.draw(allreduce.rabenseifner, 8, 8, axes[0], title="halving and doubling")
collectives.draw(ring, 8, 8, axes[1], title="ring")
plt.show()

# %% [markdown]
# (The ring still has advantages: it needs only neighbours, which suits most networks; it works as well for 7 ranks as
# for 8; and its messages all have the same size. On shared networks, messages between distant ranks slow each other
# down.)
#
# The ring has a price, too: it needs all of its links in every round.
#
# **Exercise 4.** Link r goes from rank r to the next one; a message of m bytes takes `alphas[r] + betas[r] * m` on it.
# How long does a ring allreduce of n bytes take? (In every round each link carries one part, and the slowest link
# determines the pace of all ranks.)


# %%
def ring_seconds(n, alphas, betas):
    """Seconds of a ring allreduce of n bytes over links that differ, one for each rank, at most."""
    p = len(alphas)
    # gap: rounds, and what each takes
    # return 2 * (p - 1) * (np.mean(alphas) + np.mean(betas) * n / p)
    # solution
    return 2 * (p - 1) * max(alpha + beta * n / p for alpha, beta in zip(alphas, betas, strict=True))
    # wrong: seconds of
    # return 2 * (p - 1) * (max(alphas) + max(betas) * n / p)
    # wrong: seconds of
    # return 2 * (p - 1) * max(alpha + beta * n for alpha, beta in zip(alphas, betas, strict=True))
    # end


# %%
exercise.check_slow_link(ring_seconds)
even = ring_seconds(4e6, [20e-6] * 8, [8e-10] * 8)
slow = ring_seconds(4e6, [20e-6] * 8, [8e-10] * 7 + [8e-9])
print(f"4 MB on 8 ranks: {1e3 * even:.1f} ms; with one link of eight ten times slower: {1e3 * slow:.1f} ms")

# %% [markdown]
# ## Two trees at once
#
# In a pipelined binary tree the inner ranks are busy, and the *leaves*, half of all ranks, have a free port: they send
# nothing down. So take two trees over the same ranks, such that an inner rank of one is a leaf of the other (Sanders,
# Speck, Träff 2009), and send half of the vector through each. NCCL does this on thousands of GPUs.


# %%
exercise.draw_two_trees()

# %% [markdown]
# ## No messages: shared memory
#
# Ranks on one machine can do better than send. They can map the *same memory*, and read each other's vectors. Then they
# need a **barrier**: no rank may read before the other has written. `Barrier()` waits until all ranks have reached it;
# `Copy(..., of=q)` reads rank q's buffer, and `to=q` writes it.
#
# **Exercise 5.** Sum the vectors of four ranks without messages, with equal work for each: rank r adds up *part r* of
# all vectors, in a buffer `sum` of its own, and writes it into the x of every rank. Where must there be barriers? (If
# one is missing, the checker finds the race: two ranks use one element at the same time, and one of them writes.)

# %%
print(puzzles.memory)


# %%
def in_memory(rank, size, count):
    lo, hi = chunk(count, size, rank)  # my share
    yield (Copy("sum", 0, hi - lo, "x", lo, of=0),)  # of rank 0's x
    yield tuple(Reduce("sum", 0, hi - lo, "x", lo, operand_left=False, of=q) for q in range(1, size))
    # gap: write the sum to its place in the x of every rank q (`to=q`); and no rank may leave before all have written
    # yield (Copy("x", lo, hi, "sum", 0),)
    # solution
    yield tuple(Copy("x", lo, hi, "sum", 0, to=q) for q in range(size))
    yield (Barrier(),)
    # wrong: ends without a Barrier
    # yield tuple(Copy("x", lo, hi, "sum", 0, to=q) for q in range(size))
    # end


# %%
checks.graded(puzzles.memory.grade(in_memory))
collectives.draw(in_memory, 4, 16, title="shared memory")

# %% [markdown]
# Why no barrier *before* the writing? Because only rank r reads and writes part r of all vectors until the end. With
# one more barrier at the start, which ensures that all vectors are ready, this is the default on one machine here
# (`shared.arrays`).
#
# ## Which one when
#
# All of them, priced on 32 machines with a network of 10 Gbit/s and 20 µs. `draw_race` does it in one call:

# %%
network = Network.hockney(20e-6, 8e-10)
ways = {
    "reduce and broadcast": allreduce.reduce_broadcast,
    "doubling": allreduce.doubling,
    "halving and doubling": allreduce.rabenseifner,
    "ring": allreduce.ring,
    "double tree": allreduce.double_tree,
}
collectives.draw_race(ways, 32, network=network, title="allreduce on 32 ranks")

# %% [markdown]
# **Exercise 6.** Where is the border between doubling, $\log_2 p\,(\alpha + \beta n)$, and the ring,
# $2(p-1)\,\alpha + 2\frac{p-1}{p}\,\beta n$? Solve for n.


# %%
def border(p, alpha, beta):
    """Bytes from which on the ring is faster than doubling."""
    rounds = np.log2(p)
    # gap: the n for which both take the same time
    # return ...
    # solution
    return alpha * (2 * (p - 1) - rounds) / (beta * (rounds - 2 * (p - 1) / p))
    # wrong: there doubling takes
    # return alpha * (2 * (p - 1) - rounds) / (beta * rounds)
    # wrong: at least one for each rank is expected
    # return alpha * (2 * (p - 1) - rounds) * beta * (rounds - 2 * (p - 1) / p)
    # end


# %%
for ranks in (8, 32, 256):
    n = float(checks.numbers(border, ranks, 20e-6, 8e-10))
    checks.expect(ranks <= n < 1e15, f"for {ranks} ranks you say {n:g} bytes; at least one for each rank is expected")
    both = [
        collectives.price(way, ranks, round(n / ranks) * ranks, 1, network).seconds
        for way in (allreduce.doubling, allreduce.ring)
    ]
    checks.expect(
        np.isclose(*both, rtol=0.01),
        f"for {ranks} ranks you say {n:,.0f} bytes; there doubling takes {1e3 * both[0]:.2f} ms and the ring "
        f"{1e3 * both[1]:.2f} ms.",
        lambda ranks=ranks: collectives.draw_race({k: ways[k] for k in ("doubling", "ring")}, ranks, network=network),
    )
checks.right(f"with 32 ranks the ring is faster from {border(32, 20e-6, 8e-10) / 1e3:.0f} KB on")

# %% [markdown]
# And the whole map: which algorithm is the fastest, for every number of ranks and every length?

# %%
ranks, sizes = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128], 4 ** np.arange(1, 14)
costs = np.array(
    [
        [[collectives.ALGORITHMS["allreduce"][way.__name__].cost(q, int(n)).seconds(20e-6, 8e-10) for n in sizes]
         for q in ranks]
        for way in ways.values()
    ]
)  # fmt: skip
winner = costs.argmin(axis=0)
exercise.draw_winners(ways, winner, sizes, ranks)

# %% [markdown]
# Short vectors are summed fastest by doubling. For longer ones halving and doubling wins where the number of ranks is a
# power of two; for 3, 6, 12 ... ranks it must first fold some of them away, and the ring is the fastest in the end. On
# real networks, where long arrows disturb each other, the ring's part of the map is larger.

# %% [markdown]
# Now the real thing. Four ranks of *this* machine; your ring, the library's algorithms, shared memory, and the MPI
# library's own Allreduce. (With fewer than four cores, ranks also wait for a core, and the times say little. Run this
# on an idle machine.)

# %%
# %%mpi -n 4 --with ring,doubling -o sizes,measured
import time

import numpy as np
from mpi4py import MPI

from collectives import Communicator, Recv, RecvReduce, Send, chunk

comm = Communicator(MPI.COMM_WORLD)
runners = {"your ring": ring, "your doubling": doubling, "halving and doubling": "rabenseifner"}
runners |= {"chosen by the library": "auto", "MPI's own": "native"}
sizes = [1 << k for k in range(6, 23, 4)]  # bytes
measured = {}
for name, algorithm in runners.items():
    measured[name] = []
    for nbytes in sizes:
        x, y, best = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32), np.inf
        for _ in range(12):
            comm.Barrier()
            begin = time.perf_counter()
            comm.Allreduce(x, y, algorithm=algorithm)
            best = min(best, time.perf_counter() - begin)
        assert y[0] == y[-1] == comm.Get_size()
        measured[name].append(best)

# %%
slowest = {name: [max(each[name][i] for each in measured) for i in range(len(sizes[0]))] for name in measured[0]}
collectives.draw_race(slowest, 4, sizes[0], title="allreduce, measured on this machine")

# %% [markdown]
# On one machine the library chooses shared memory: no messages are sent, which matters for long vectors.
#
# All of these algorithms have two properties that training relies on:
#
# - **Between ranks: the same to the last bit.** Each part of the sum is computed once, by one rank, and copied (or, in
#   the butterfly, by all in an order that gives the same). So replicas of a model stay equal.
# - **Against one process: the same to rounding.** $(a + b) + c$ and $a + (b + c)$ may differ in the last digit.
#
# **To try further.** Break
# your ring (send part `rank - k + 1`) and look at the picture of what is wrong. `collectives.animate("ring.gif", ring,
# 4, 8)` makes a film of it. Price `allreduce.two_level` on `"gpu-100g"`, eight ranks a node: why are its bytes on the
# network so few?
#
# Next: `08_data_parallel`.
#
# *Sources: Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan 2009 (the ring is optimal in bytes); Sanders, Speck, Träff
# 2009; Chan et al. 2007 (the bounds).*
