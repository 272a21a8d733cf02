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
# # 19. Long sequences
#
# Attention compares every position with every other one. A sequence of T positions has T^2 scores for each head, and
# all layers keep activations for T positions: at some length the memory of one rank is full. This notebook cuts the
# *sequence*: every rank has some of its positions.
#
# 1. a softmax computed in **pieces**, which need not be in memory at the same time;
# 2. **ring attention**: the pieces are on different ranks, and are sent round;
# 3. **zigzag**: positions are assigned to ranks so that causal attention leaves no rank idle;
# 4. an alternative by heads (**Ulysses**), and when each is faster.
#
# Sources: Milakov and Gimelshein 2018 (pieces), Liu et al. 2023 (ring attention), Jacobs et al. 2023 (Ulysses).

# %%
# %matplotlib inline

# %%
import numpy as np

import checks
import exercises.sequences as exercise
from collectives import Compute, Recv, Send, Slice, draw, puzzles
from collectives.pricing.networks import NETWORKS
from parallel.planning.context_costs import ring, ulysses
from parallel.planning.group_costs import Group
from parallel.strategies.context.ring import ring_backward

checks.style()
rng = np.random.default_rng(0)

# %% [markdown]
# ## 1. A softmax in pieces
#
# One query has scores S_j with all keys, and the values v_j. Attention gives it
#
#     y = sum_j exp(S_j) v_j / sum_j exp(S_j)
#
# Both sums can be taken over some of the keys first, and over the others later. But exp(S) of a large score is
# infinite, so all exponents are taken relative to the largest score. Keep three things for each piece:
#
# - `top`, the largest score m of the piece,
# - `total`, the sum of exp(S_j - m),
# - `sums`, the sum of exp(S_j - m) v_j.


# %%
def piece_of(scores, values):
    """(top, total, sums) of some keys: scores (queries, keys), values (keys, features)."""
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    return top, weights.sum(axis=1), weights @ values


# %% [markdown]
# **Exercise 1.** Merge two pieces into one. Their exponents have different offsets: bring both to the larger one.


# %%
def my_merge(one, two):
    """(top, total, sums) of the keys of both."""
    (top1, total1, sums1), (top2, total2, sums2) = one, two
    top = np.maximum(top1, top2)
    # gap: multiply totals and sums by how much smaller their exponents become
    # return top, total1 + total2, sums1 + sums2
    # solution
    shrink1, shrink2 = np.exp(top1 - top), np.exp(top2 - top)
    return top, total1 * shrink1 + total2 * shrink2, sums1 * shrink1[:, None] + sums2 * shrink2[:, None]
    # wrong: attention of four queries
    # shrink1, shrink2 = np.exp(top1 - top), np.exp(top2 - top)
    # return top, total1 * shrink2 + total2 * shrink1, sums1 * shrink2[:, None] + sums2 * shrink1[:, None]
    # end


# %%
scores, values = 30 * rng.standard_normal((4, 10)), rng.standard_normal((10, 3))
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
want = (weights @ values) / weights.sum(axis=1, keepdims=True)
pieces = piece_of(scores[:, :6], values[:6]), piece_of(scores[:, 6:], values[6:])
top, total, sums = checks.arrays([(4,), (4,), (4, 3)], my_merge, *pieces)
checks.same(sums / total[:, None], want, "attention of four queries to ten keys, in pieces of six and four")
checks.right("and the scores of one piece only were ever in memory")

# %% [markdown]
# `nn.MultiHeadAttention(..., attention="blocks:128")` works like this, and `nn/layers/blockwise.py` is its source. With
# 8,192 positions it needs 45 MiB where the whole scores take 2,092.
#
# ## 2. The ring
#
# Now the pieces are on different ranks: each has the queries, keys and values of its positions. Queries stay. Keys and
# values move: while a rank computes with those that it has, it sends them to the next rank, and receives those of the
# rank before. Here is the task, with its limits:

# %%
print(puzzles.ring_attention)

# %% [markdown]
# **Exercise 2.** Write the ring. Two buffers in addition to `x` are enough: one is used and sent, the other one
# receives. In step s a rank has the keys of rank `(rank - s) % size`.


# %%
def my_ring(rank, size, count):
    here, there = "x", "first"
    for step in range(size):
        owner = (rank - step) % size
        compute = Compute(f"A{owner}", (Slice(here, 0, count),), (Slice("y", owner, owner + 1),), 4.0)
        right, left = (rank + 1) % size, (rank - 1) % size
        # gap: messages in the round of the computation, but for the last step
        # yield (compute,)
        # solution
        if step < size - 1:
            yield compute, Send(right, here, 0, count), Recv(left, there, 0, count)
        else:
            yield (compute,)
        # wrong: over the limit
        # yield (compute,)
        # if step < size - 1:
        #     yield Send(right, here, 0, count), Recv(left, there, 0, count)
        # wrong: wrong
        # yield compute, Send(right, "x", 0, count), Recv(left, there, 0, count)
        # end
        here, there = there, "second" if there == "first" else "first"


# %%
checks.graded(puzzles.ring_attention.grade(my_ring))

# %% [markdown]
# Backward, keys and values go round once more, followed by their gradients: every rank adds the contribution of its
# queries, one step later. This is the schedule that training runs (`parallel/strategies/context/ring.py`):

# %%
draw(
    lambda rank, size, count: ring_backward(rank, size, [count] * size, 1, [1e-3] * size),
    4,
    4,
    title="backward: gradients follow keys and values home",
)

# %% [markdown]
# ## 3. Zigzag
#
# A language model may not see the future: position t attends to positions 0 to t. How many pairs of queries and keys
# does each of four ranks compute, if the first rank has the first quarter, and so on?


# %%
def pairs(positions):
    """Pairs of a query at one of these positions and a key that it may see."""
    return sum(t + 1 for t in positions)


length, ranks = 64, 4
contiguous = [list(range(16 * r, 16 * r + 16)) for r in range(ranks)]
print([pairs(positions) for positions in contiguous])

# %% [markdown]
# The last rank computes about seven times as much as the first one, and in each step of the ring all wait for it.
#
# **Exercise 3.** Cut the sequence into two chunks for each rank, 2 p in all, and give each rank two of them, so that
# all have the same number of pairs.


# %%
def my_chunks(rank, size):
    """The numbers of the two chunks of a rank, of 2 size chunks."""
    # gap: an early one and a late one
    # return 2 * rank, 2 * rank + 1
    # solution
    return rank, 2 * size - 1 - rank
    # wrong: your ranks have
    # return rank, rank + size
    # wrong: each chunk belongs to one rank
    # return rank, 2 * size - 1
    # end


# %%
chosen = [tuple(map(int, checks.arrays([(), ()], my_chunks, rank, ranks))) for rank in range(ranks)]
checks.expect(sorted(c for two in chosen for c in two) == list(range(2 * ranks)), "each chunk belongs to one rank")
chunk = length // (2 * ranks)
mine = [[t for c in two for t in range(c * chunk, (c + 1) * chunk)] for two in chosen]
counts = [pairs(positions) for positions in mine]
draw = lambda: exercise.draw_pairs([pairs(positions) for positions in contiguous], counts)
checks.expect(len(set(counts)) == 1, f"your ranks have {counts} pairs", draw)
checks.right(f"{counts[0]} pairs each: with p ranks 2 - 1/p times as fast as contiguous parts")
draw()

# %% [markdown]
# What may a query see, if the positions of a rank no longer follow each other?
#
# **Exercise 4.** Write the mask. `queries` and `keys` are the positions in the sequence that two ranks have.


# %%
def my_mask(queries, keys):
    """(queries, keys): True where the query may see the key."""
    # gap: by positions, not by rows
    # return np.tri(len(queries), len(keys), dtype=bool)
    # solution
    return queries[:, None] >= keys
    # wrong: a position sees itself
    # return queries[:, None] > keys
    # wrong: a row for each of
    # return queries >= keys
    # end


# %%
exercise.check_mask(my_mask)

# %% [markdown]
# Now combine all of it, with lists in place of four ranks: your merge, the ring, your zigzag, and your mask. The result
# must equal that of one process.

# %%
q, k, v = (rng.standard_normal((length, 8)) for _ in range(3))


def plain(mask):
    """Attention of one process."""
    _, total, sums = piece_of(np.where(mask, q @ k.T, -np.inf), v)
    return sums / total[:, None]


result = np.zeros_like(q)
travelling = [(np.array(p), k[p], v[p]) for p in mine]
seen = [None] * ranks
for _ in range(ranks):
    for rank in range(ranks):
        at, keys, vals = travelling[rank]
        s = np.where(my_mask(np.array(mine[rank]), at), q[mine[rank]] @ keys.T, -1e30)
        found = piece_of(s, vals)
        seen[rank] = found if seen[rank] is None else my_merge(seen[rank], found)
    travelling = travelling[-1:] + travelling[:-1]  # to the next rank
for rank in range(ranks):
    _, total, sums = seen[rank]
    result[mine[rank]] = sums / total[:, None]
error = abs(result - plain(np.tri(length, dtype=bool))).max()
print(f"the largest difference from one process: {error:.1e}")
assert error < 1e-12

# %% [markdown]
# ## 4. Ring or Ulysses
#
# Ulysses divides attention by *heads*: an alltoall gives each rank all positions of some heads, another one returns the
# results. It sends less, but nothing is computed meanwhile, and it needs at least one head for each rank. Scores grow
# with the square of the length, messages with the length: so for long sequences the computation hides the messages of
# the ring. On gigabit Ethernet, with processors of 20 Gflop/s and 1,024 features, eight ranks:

# %%
network, lengths = NETWORKS["gigabit"].with_ranks_per_node(1), 2 ** np.arange(8, 15)
keys = [8.0 * n * 1024 for n in lengths]
attention = [4.0 * n * n * 1024 / 2e10 for n in lengths]
waits = {
    "ring": [ring(b, a, Group(8), network).seconds for b, a in zip(keys, attention, strict=True)],
    "Ulysses": [ulysses(b, Group(8), network).seconds for b in keys],
}
exercise.draw_waits(waits, lengths, attention)

# %% [markdown]
# Train with it: `python scripts/train.py --ranks 4 --mesh context=4 --data stdlib --length 1024 --model
# transformer:64,4,2,positions=rotary`, and `--context ulysses` for the other way. docs/systems/sequences.md has
# measurements, and what goes together with what.
#
# This system's page has commands and measurements: [Long sequences](../docs/systems/sequences.md).
