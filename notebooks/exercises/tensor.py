"""The checks of 14_tensor_parallelism.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import GREY, RED
from exercises.training import derivative


@checks.explain_errors
def check_heads(some_heads, attention, p, x):
    theirs, _ = attention.forward(p, x[None], attention.context())
    for groups in (((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))):
        parts = [checks.several(2, some_heads, x.copy(), group) for group in groups]
        for (term, weights), group in zip(parts, groups, strict=True):
            checks.expect(
                np.shape(term) == x.shape,
                f"a rank's term has the shape {np.shape(term)}; with its rows of the projection it is "
                f"{x.shape}, as the whole output.",
            )
            checks.expect(len(weights) == len(group), f"{len(group)} heads have {len(group)} matrices of weights.")
            checks.expect(
                all(np.allclose(np.sum(w, axis=1), 1) and not np.triu(w, 1).any() for w in weights),
                "each position's weights sum to 1, and later positions have none.",
            )
        total = sum(term for term, _ in parts) + p.bo
        name = f"the sum of {len(groups)} ranks' terms"
        checks.same(total, theirs[0], name, tolerance=1e-9)
    checks.right("on 1, 2 and 4 ranks the terms sum to what nn.MultiHeadAttention gives")


@checks.explain_errors
def check_embedding(lookup):
    rng = np.random.default_rng(20)
    table, ids = rng.standard_normal((11, 5)), rng.integers(11, size=(3, 7))
    for first in ((0,), (0, 4, 8), (0, 1, 10)):
        parts = np.split(table, first[1:])
        terms = [
            checks.numbers(lookup, part.copy(), lo, ids, shape=(3, 7, 5)) for part, lo in zip(parts, first, strict=True)
        ]
        for (part, lo), term in zip(zip(parts, first, strict=True), terms, strict=True):
            elsewhere = (ids < lo) | (ids >= lo + len(part))
            checks.expect(
                not np.any(term[elsewhere]),
                f"the rank with the rows from {lo} on gives something for ids that it does not have: the sum "
                "would be wrong. Their "
                "rows are 0.",
            )
        checks.same(sum(terms), table[ids], f"the sum of the terms of {len(first)} ranks")
    checks.right("each id is found by one rank, and all others add 0")


@checks.explain_errors
def check_seconds(block_seconds):
    alone, nbytes = 0.2, 4e7
    for t in (1, 2, 4, 8):
        for alpha, beta in ((5e-6, 1 / 300e9), (2e-5, 1 / 25e9)):
            rounds = 2 * (t - 1)
            summing = rounds * (alpha + beta * nbytes / t)
            got = float(checks.numbers(block_seconds, t, alone, nbytes, alpha, beta))
            checks.expect(
                t == 1 or not np.isclose(got, alone / t + summing, rtol=1e-9),
                "one sum of four: f and g of attention and of the MLP, forward and backward.",
            )
            checks.same(got, alone / t + 4 * summing, f"seconds of a block on {t} ranks")
    checks.right("a t-th of the arithmetic, and four rings behind which nothing can hide")


def draw_losses(got, want):
    """A bar for every row."""
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    ax.bar(np.arange(len(want)) - 0.2, want, 0.4, color=GREY, label="wanted")
    ax.bar(np.arange(len(want)) + 0.2, got, 0.4, color=RED, label="yours")
    ax.set(xlabel="row", ylabel="loss", title="classes on three ranks: 4, 4 and 3 of 11", ylim=(0, 1.4 * max(want)))
    ax.legend()


@checks.explain_errors
def check_mlp(my_mlp, network):
    """On 1, 2 and 4 ranks against the network in one process; returns its gradients, and the learner's on 4 ranks."""
    ctx, p = network.context(), network.layout.views(network.layout.zeros(np.float64))
    g = network.layout.views(network.layout.zeros(np.float64))
    rng = np.random.default_rng(1)
    X, gZ = rng.standard_normal((6, 4)), rng.standard_normal((6, 4))
    p[0].W[...], p[2].W[...] = rng.standard_normal((4, 8)), rng.standard_normal((8, 4))
    # a network gives no gradient of its input: take it by differences
    gX = derivative(lambda x: (network.forward(p, x.copy(), network.context())[0] * gZ).sum(), X)
    Z, saved = network.forward(p, X.copy(), ctx)
    Z = Z.copy()
    network.backward(p, g, gZ.copy(), saved, ctx)
    for t in (1, 2, 4):
        parts = np.split(p[0].W, t, axis=1), np.split(p[2].W, t, axis=0)
        mine = checks.several(4, my_mlp, X, *parts, gZ)
        checks.same(mine[0], Z, f"Z on {t} ranks")
        checks.same(mine[1], gX, f"the gradient of X on {t} ranks", tolerance=1e-6)
        for name, found, whole, axis in (("A", mine[2], g[0].W, 1), ("B", mine[3], g[2].W, 0)):
            said = f"of {name}, in {t} parts, a list of as many gradients is expected"
            checks.expect(isinstance(found, list | tuple | np.ndarray) and len(found) == t, said)
            for i, want in enumerate(np.split(whole, t, axis=axis)):
                checks.same(found[i], want, f"the gradient of part {i} of {name}, on {t} ranks")
    checks.right("on 1, 2 and 4 ranks as nn in one process")
    return g, mine
