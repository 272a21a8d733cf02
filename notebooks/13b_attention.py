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
# # 13b. Attention by hand
#
# The next notebooks cut transformers: by columns and heads (14), by experts (18), by positions (19). Here is what they
# cut. A transformer consists of linear layers, normalisation, and one new part: **attention**. You will
#
# 1. write attention for one head, and hide the future from it;
# 2. derive its gradient;
# 3. split it into **heads**;
# 4. tell it **positions**, by rotations;
# 5. generate a position at a time, with a **cache**;
# 6. count the weights and the operations of a block;
# 7. trade computation for memory: **activation checkpointing**.

# %%
import numpy as np

import checks
import exercises.attention as exercise
import nn

# %matplotlib inline
checks.style()

# %% [markdown]
# ## 1. Attention
#
# A sequence has T positions, each with D numbers. A linear layer treats every position alone. In attention a position
# combines the values of others: it has a **query** $q_t$, which says what it looks for; every position has a **key**
# $k_s$, which the query is compared with, and a **value** $v_s$, which is then added. The **score** of t and s is a
# scalar product, and the weights are the softmax of the scores of one query:
#
# $$ S_{ts} = \frac{q_t \cdot k_s}{\sqrt d}, \qquad
#    p_{ts} = \frac{e^{S_{ts}}}{\sum_r e^{S_{tr}}}, \qquad y_t = \sum_s p_{ts}\, v_s . $$
#
# Why $\sqrt d$? A sum of d products of numbers with deviation 1 has the deviation $\sqrt d$. Without the division, the
# softmax of such large scores is nearly 0 or 1, where its slope is nearly 0.
#
# **Exercise 1.** Write it, for all queries at once: q is (queries, d), k and v are (keys, d).


# %%
def attention(q, k, v):
    """(y, weights of [query, key])."""
    # gap: scores, softmax of every row, weighted values
    # scores = q @ k.T
    # weights = np.exp(scores)
    # return weights @ v, weights
    # solution
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ v, weights
    # wrong: not divided by the root of the number of features
    # scores = q @ k.T
    # weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    # weights /= weights.sum(axis=1, keepdims=True)
    # return weights @ v, weights
    # wrong: the weights of a query sum to 1
    # weights = np.exp(q @ k.T / np.sqrt(q.shape[1]))
    # weights /= weights.sum(axis=0)
    # return weights @ v, weights
    # end


# %%
exercise.check_attention(attention)

# %% [markdown]
# A language model predicts the next element at each position, and must not see it. **Causal** attention lets position t
# see the positions up to t only.
#
# **Exercise 2.** Write it. `np.tri(T, dtype=bool)` is True where $s \le t$.


# %%
def causal_attention(q, k, v):
    """(y, weights), position t sees 0 to t."""
    # gap: hide the scores of later positions
    # y, weights = attention(q, k, v)
    # weights = np.where(np.tri(len(q), dtype=bool), weights, 0)
    # return weights @ v, weights
    # solution
    scores = np.where(np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ v, weights
    # wrong: a position looks at a later one
    # return attention(q, k, v)
    # wrong: not even itself
    # with np.errstate(all="ignore"):
    #     scores = np.where(np.tri(len(q), k=-1, dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    #     weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    #     return weights @ v, weights / weights.sum(axis=1, keepdims=True)
    # end


# %%
exercise.check_causal(causal_attention)

# %% [markdown]
# Here is an example. Each query looks for the position whose first half is its own second half:

# %%
rng = np.random.default_rng(3)
names = rng.standard_normal((8, 16))
follows = rng.permutation(8)
x = np.concatenate([names, names[follows]], axis=1)  # its own name, and that of the one it is looking for
y, weights = attention(6 * x[:, 16:], x[:, :16], x[:, :16])
exercise.draw_weights(weights, follows, causal_attention, x)
assert (weights.argmax(axis=1) == follows).all()

# %% [markdown]
# ## 2. The gradient
#
# Three products and a softmax. For the product $y = p\,v$ the four equations of notebook 2 hold: $g_p = g_y v^{\mathsf
# T}$ and $g_v = p^{\mathsf T} g_y$. Then the softmax. Each probability of a row depends on each score of the row,
# $\partial p_s / \partial S_r = p_s (\delta_{sr} - p_r)$, so
#
# $$ g_{S,r} = p_r \Big( g_{p,r} - \sum_s g_{p,s}\, p_s \Big) . $$
#
# **Exercise 3.** Write the softmax's gradient, for a row a query.


# %%
def softmax_backward(p, gp):
    """The gradient of the scores, from the probabilities and their gradient."""
    # gap: row by row
    # return p * gp
    # solution
    return p * (gp - (gp * p).sum(axis=1, keepdims=True))
    # wrong: the gradients of a row sum to 0
    # return p * (1 - p) * gp
    # wrong: the gradient of the scores
    # return p * gp - (p * gp).mean(axis=1, keepdims=True)
    # end


# %%
exercise.check_softmax_backward(softmax_backward)

# %% [markdown]
# **Exercise 4.** Now all of attention: the gradients of q, k and v from that of y. The weights p are kept from forward.


# %%
def attention_backward(q, k, v, p, gy):
    """(gq, gk, gv)."""
    # gap: back through the three products
    # gS = softmax_backward(p, gy @ v.T)
    # return gS @ k, gS @ q, p @ gy
    # solution
    gS = softmax_backward(p, gy @ v.T) / np.sqrt(q.shape[1])
    return gS @ k, gS.T @ q, p.T @ gy
    # wrong: 2 times too long
    # gS = softmax_backward(p, gy @ v.T)
    # return gS @ k, gS.T @ q, p.T @ gy
    # wrong: gk
    # gS = softmax_backward(p, gy @ v.T) / np.sqrt(q.shape[1])
    # return gS @ k, gS @ q, p.T @ gy
    # end


# %%
exercise.check_backward(attention_backward)

# %% [markdown]
# Backward needs q, k, v, and p, which has **T^2 numbers**: for 2,048 positions four million for each head and sequence.
# Notebook 19 shows how to avoid them.
#
# ## 3. Heads
#
# One softmax looks for one thing. **Multi-head** attention splits the D features of q, k and v into H heads of D/H
# each, lets each attend by itself, and puts the outputs side by side again; a last matrix mixes them. Head h has the
# columns h D/H to (h + 1) D/H.
#
# **Exercise 5.** Split (T, D) into (H, T, D/H), and merge again. (`reshape` alone is not enough: in memory the numbers
# of one position are followed by those of the next.)


# %%
def split_heads(x, heads):
    """(T, D) to (heads, T, D / heads)."""
    # gap: reshape, then bring the heads to the front
    # return x.reshape(heads, len(x), -1)
    # solution
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)
    # wrong: the heads of [head, position, feature]
    # return x.reshape(len(x), -1, heads).transpose(2, 0, 1)
    # end


def merge_heads(x):
    """(heads, T, d) to (T, heads d)."""
    # gap: the way back
    # return x.reshape(x.shape[1], -1)
    # solution
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)
    # wrong: the heads side by side again
    # return x.transpose(1, 2, 0).reshape(x.shape[1], -1)
    # end


# %%
exercise.check_heads(split_heads, merge_heads)

# %% [markdown]
# With the library's weights it equals `nn.MultiHeadAttention`:

# %%
T, D, H = 7, 12, 4
network = nn.Network(nn.MultiHeadAttention(D, H, causal=True), (T, D), np.float64)
flat = network.layout.zeros(np.float64)
network.layout.initialize(flat, 3)
p = network.layout.views(flat)
x = np.random.default_rng(4).standard_normal((T, D))
q, k, v = (split_heads(part, H) for part in np.split(x @ p.Wqkv + p.bqkv, 3, axis=1))
mine = merge_heads(np.stack([causal_attention(*head)[0] for head in zip(q, k, v, strict=True)])) @ p.Wo + p.bo
theirs, _ = network.forward(p, x[None], network.context())
print(f"by hand and nn.MultiHeadAttention differ by {np.abs(mine - theirs[0]).max():.0e}")
assert np.allclose(mine, theirs[0], rtol=1e-12, atol=1e-14)

# %% [markdown]
# ## 4. Positions
#
# Attention does not know where a position is: if all positions are shuffled, the outputs are shuffled in the same way,
# and nothing else changes. **Rotary** positions (Su et al. 2021) turn every query and key by an angle that grows with
# its position t. The d numbers are taken as d/2 points of a plane, (x0, x1), (x2, x3), ...; pair i is turned by the
# angle $t\,\theta_i$,
#
# $$ \theta_i = 10000^{-2i/d}, \qquad
#    (a, b) \;\to\; (a \cos - b \sin,\; a \sin + b \cos) . $$
#
# Queries and keys are turned alike, so their scalar product depends only on the *difference* of the positions.
#
# **Exercise 6.** Turn one vector.


# %%
def rotate(x, t):
    """x (d numbers) at position t."""
    d = len(x)
    # gap: an angle for each pair, and the rotation
    # angle = t / 10_000 ** (2 * np.arange(d // 2) / d)
    # return x * np.repeat(np.cos(angle), 2)
    # solution
    angle = t / 10_000 ** (2 * np.arange(d // 2) / d)
    a, b = x[0::2], x[1::2]
    return np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=1).ravel()
    # wrong: the pairs (0, 1), (2, 3), (4, 5)
    # a, b = x[0::2], x[1::2]
    # return np.stack([a * np.cos(t) - b * np.sin(t), a * np.sin(t) + b * np.cos(t)], axis=1).ravel()
    # wrong: wherever they are
    # angle = t**2 / 10_000 ** (2 * np.arange(d // 2) / d)
    # a, b = x[0::2], x[1::2]
    # return np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=1).ravel()
    # end


# %%
exercise.check_rotary(rotate)

# %%
vector = np.random.default_rng(0).standard_normal(64)
distances = np.arange(0, 200)
exercise.draw_distances(distances, rotate, vector)

# %% [markdown]
# ## 5. One position at a time
#
# In training all positions are known at once. To *generate* a text the model computes one position, whose output is the
# input of the next. The keys and values of earlier positions do not change: they are kept in the **KV cache**, and each
# new position computes one query, one key and one value.
#
# **Exercise 7.** Write a step.


# %%
def next_output(q, k, v, keys, values):
    """(y of this position, keys, values), from vectors q, k, v, and the keys and values of all positions before."""
    # gap: append, then attend
    # y, _ = attention(q[None], keys, values)
    # return y[0], np.vstack([keys, k]), np.vstack([values, v])
    # solution
    keys, values = np.vstack([keys, k]), np.vstack([values, v])
    y, _ = attention(q[None], keys, values)
    return y[0], keys, values
    # wrong: after position 1 there are 2 keys and values
    # y, _ = attention(q[None], np.vstack([keys, k]), np.vstack([values, v]))
    # return y[0], k[None], v[None]
    # wrong: y of position 1
    # keys, values = np.vstack([k, keys]), np.vstack([values, v])
    # y, _ = attention(q[None], keys, values)
    # return y[0], keys, values
    # end


# %%
exercise.check_cache(next_output)

# %% [markdown]
# Without the cache, position t costs t times as much; with it, memory grows by 2 D numbers a layer for each position.
#
# ## 6. A block, and what it costs
#
# A **transformer block** is attention and two linear layers (an **MLP**), each with layer normalisation before it and a
# residual connection around it (notebook 4b):
#
# $$ x \leftarrow x + \text{Attention}(\text{Norm}(x)), \qquad
#    x \leftarrow x + B\,\text{GeLU}(A\,\text{Norm}(x)) . $$
#
# Its matrices: $W_q, W_k, W_v$ and $W_o$ are D x D; A is D x 4D, B is 4D x D.
#
# **Exercise 8.** Count the weights of these matrices, and the operations of one forward pass over a sequence of T
# positions. A product of (n, m) and (m, k) takes 2 n m k operations, a multiplication and an addition each. The scores
# ($q k^{\mathsf T}$ of all heads together) and the weighted values ($p\, v$) are products, too; leave out all else.


# %%
def block_weights(D):
    """Numbers in the six matrices."""
    # gap: four of D x D, and A and B
    # return 6 * D**2
    # solution
    return 12 * D**2
    # wrong: the weights of a block
    # return 8 * D**2
    # end


def block_operations(D, T):
    """Operations of a forward pass."""
    # gap: all positions with all matrices; scores; weighted values
    # return 2 * T * block_weights(D)
    # solution
    return 2 * T * block_weights(D) + 4 * T**2 * D
    # wrong: the operations of a block
    # return 2 * T * block_weights(D) + 2 * T**2 * D
    # end


# %%
exercise.check_count(block_weights, block_operations)

# %%
width = 12_288
exercise.draw_quadratic(block_operations, width)
print(f"96 such blocks: {96 * block_weights(width) / 1e9:.0f} billion weights, as GPT-3 has")

# %% [markdown]
# ## 7. Activation checkpointing
#
# Backward needs what forward has computed. With 96 blocks and long sequences these **activations** take more memory
# than the weights. They can be recomputed instead of kept (Chen et al. 2016): cut the L layers into **segments**, keep
# only the input of each segment, and in backward compute the segment once more, from its input. That costs one more
# forward pass: as backward takes twice as long as forward, a third more time.
#
# **Exercise 9.** Write it. `layer.forward(x)` gives y, and `layer.backward(x, gy)` the gradient of x, from the layer's
# own input. At any time there should be no more activations than the inputs of all segments, and those of one segment.


# %%
def checkpointed(layers, x, gy, size):
    """The gradient of x through all layers, in segments of `size` layers."""
    # gap: forward, keep the inputs of segments; backward, each segment once more
    # inputs = []
    # for layer in layers:
    #     inputs.append(x)
    #     x = layer.forward(x)
    # for layer, x in zip(reversed(layers), reversed(inputs)):
    #     gy = layer.backward(x, gy)
    # return gy
    # solution
    starts, kept = range(0, len(layers), size), []
    for first in starts:
        kept.append(x)
        for layer in layers[first : first + size]:
            x = layer.forward(x)
    for first in reversed(starts):
        segment, inputs = layers[first : first + size], [kept.pop()]
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        for layer in reversed(segment):
            gy = layer.backward(inputs.pop(), gy)
    return gy
    # wrong: begin again at the input of the segment
    # for last in reversed(range(len(layers))):
    #     a = x
    #     for layer in layers[:last]:
    #         a = layer.forward(a)
    #     gy = layers[last].backward(a, gy)
    # return gy
    # wrong: the gradient of x
    # for layer in reversed(layers):
    #     gy = layer.backward(x, gy)
    # return gy
    # end


# %%
exercise.check_checkpointing(checkpointed)

# %% [markdown]
# **Exercise 10.** How long should a segment be? With L layers in segments of k there are at most $\lceil L/k \rceil$
# inputs and k activations of one segment. Which k makes the sum smallest?


# %%
def best_size(L):
    """Layers of a segment."""
    # gap: the k for which L / k + k is smallest
    # return L
    # solution
    return min(range(1, L + 1), key=lambda k: -(-L // k) + k)
    # wrong: are possible
    # return L // 2
    # wrong: a whole number of layers is expected
    # return np.sqrt(L + 0.5)
    # end


# %%
exercise.check_segment(best_size)

# %%
exercise.draw_segments(best_size, 96)

# %% [markdown]
# GPipe (notebook 13) does this, with a stage as the segment: `--pipeline gpipe:recompute` on the command line.
#
# **To try further.** Leave out $\sqrt d$ in the picture of section 1, with 256 features. Write the gradient of
# `causal_attention`: what has to be changed? What does a KV cache of 96 layers of 12,288 features take for 2,048
# positions, in two bytes a number?
#
# Next: `14_tensor_parallelism`, which cuts all of this by columns and heads.
#
# *Sources: Vaswani et al. 2017; Su et al. 2021 (rotary); Chen et al. 2016 (checkpointing); Xiong et al. 2020 (norm
# before); Brown et al. 2020 (GPT-3).*
