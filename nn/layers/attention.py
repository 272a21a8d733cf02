"""Multi-head attention and the transformer block (Vaswani et al. 2017; pre-norm: Xiong et al. 2020).

Attention of N sequences of T positions, D features in H heads: 4 N T D^2 multiply-accumulates for the projections and
2 N T^2 D for scores and sums. The probabilities, N H T^2 numbers, are kept for backward; by blocks of keys they are
computed again, and what is kept is O(T) (blockwise.py).
"""

from __future__ import annotations

import math

import numpy as np

from nn import option_strings
from nn.arguments import COUNT, SIZE, Number
from nn.core.containers import Residual
from nn.core.gradients import Product, RowSum
from nn.core.layer import Initializer, Layer, Sequential, ShapeError, Spec
from nn.initializers import glorot, zeros
from nn.layers.activations import GELU, softmax
from nn.layers.blockwise import BlockwiseAttention, causal_mask
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout
from nn.layers.embedding import rotate
from nn.layers.normalization import LayerNorm
from nn.registry import register


@register("layer")
class MultiHeadAttention(Layer):
    """Self-attention: y is a mean of all positions' values, with the weights softmax(q k^T / sqrt(D/H)).

    Queries, keys and values are one product, x Wqkv + bqkv, columns in that order and by head within each. Positions
    that `MicroBatch.padding` marks, see `Embedding(padding=...)`, are never looked at.

    Given the columns and rows of some heads, it computes their term of y; bo is then added to the sum, and p has none.

    Parameters
    ----------
    features : int
        D, of x and y.
    heads : int
        H, divides D.
    causal : bool
        A position sees itself and those before it only.
    bias : bool
    init, bias_init : initializer
        For Wqkv (D, 3D) and Wo (D, D), for bqkv and bo.
    attention : str
        "whole": all scores of a sequence at once, (N, H, T, T). "blocks" or "blocks:SIZE": SIZE queries and SIZE keys
        at a time, 128 unless given; memory O(T), and of causal scores only the half that is seen (blockwise.py).
        Sequences of one block are computed whole.
    rotary : bool
        Rotate queries and keys by their positions (`RotaryPositions`).

    Raises
    ------
    ValueError
        In forward, if a mask leaves a position nothing to look at: which layer, sample and position.

    Examples
    --------
    >>> import nn
    >>> layer = nn.MultiHeadAttention(64, 4, causal=True, attention="blocks:256", rotary=True)
    >>> nn.Network(layer, (1024, 64)).out_shape
    (1024, 64)
    """

    output = gradient = "new"
    constraints = {"features": SIZE, "heads": SIZE}

    def __init__(
        self,
        features: int,
        heads: int,
        causal: bool = False,
        bias: bool = True,
        init: Initializer = glorot,
        bias_init: Initializer = zeros,
        attention: str = "whole",
        rotary: bool = False,
    ):
        self.features, self.heads, self.causal, self.bias = features, heads, causal, bias
        self.init, self.bias_init, self.attention, self.rotary = init, bias_init, attention, rotary

    def check_arguments(self):
        features, heads = self.features, self.heads
        if features % heads:
            raise ValueError(f"MultiHeadAttention: {heads} heads do not divide {features} features")
        if self.rotary and features // heads % 2:
            raise ValueError(
                f"MultiHeadAttention: rotary turns pairs of a head's features, and {features // heads} are odd: give "
                f"{heads} heads an even number each, such as features={features + heads}"
            )
        block_size(self.attention)  # refused here

    @property
    def block_size(self) -> int:
        """Queries and keys computed at a time; 0 for all."""
        return block_size(self.attention)

    def by_blocks(self, T: int) -> bool:
        """Return whether T positions are computed by blocks: one block alone is faster whole."""
        return 0 < self.block_size < T

    def specs(self, in_shape):
        if len(in_shape) != 2 or in_shape[1] != self.features:
            raise ShapeError(f"expects sequences (positions, {self.features}), given samples of shape {in_shape}")
        D = self.features
        specs = {
            "Wqkv": Spec((D, 3 * D), self.init),
            "Wo": Spec((D, D), self.init),
        }
        if self.bias:
            specs["bqkv"] = Spec((3 * D,), self.bias_init, decay=False)
            specs["bo"] = Spec((D,), self.bias_init, decay=False)
        return specs, in_shape

    def macs(self, in_shape):
        T, D = in_shape
        return 4 * T * D * D + 2 * T * T * D

    def forward(self, p, x, ctx):
        N, T, D = x.shape
        size = D // self.heads
        H = len(p.Wo) // size  # of this part of the heads
        qkv = ctx.empty((N, T, 3, H, size), x.dtype)
        rows = qkv.reshape(N * T, 3 * H * size)
        np.matmul(x.reshape(N * T, D), p.Wqkv, rows)
        if hasattr(p, "bqkv"):
            rows += p.bqkv
        q, k, v = _heads(qkv)
        q *= 1 / math.sqrt(size)
        if self.rotary:
            rotate(q, self.positions(T, ctx))
            rotate(k, self.positions(T, ctx))
        mixed = ctx.empty((N, T, H, size), x.dtype)
        weights = self.attend(q, k, v, mixed.swapaxes(1, 2), ctx)

        y = ctx.empty(x.shape, x.dtype)
        rows = y.reshape(N * T, D)
        np.matmul(mixed.reshape(N * T, H * size), p.Wo, rows)
        if hasattr(p, "bo"):
            rows += p.bo
        return y, (x, qkv, mixed, weights)

    def backward(self, p, gy, saved, ctx):
        x, qkv, mixed, weights = saved
        N, T, D = x.shape
        q, k, v = _heads(qkv)

        rows = gy.reshape(N * T, D)
        gmixed = ctx.workspace("mixed", mixed.shape, x.dtype)
        np.matmul(rows, p.Wo.T, gmixed.reshape(N * T, len(p.Wo)))

        gqkv = ctx.workspace("qkv", qkv.shape, x.dtype)
        gq, gk, gv = _heads(gqkv)
        self.attend_backward((q, k, v), mixed.swapaxes(1, 2), weights, gmixed.swapaxes(1, 2), (gq, gk, gv), ctx)
        if self.rotary:
            rotate(gq, self.positions(T, ctx), backward=True)
            rotate(gk, self.positions(T, ctx), backward=True)
        gq *= 1 / math.sqrt(D // self.heads)

        rows3 = gqkv.reshape(N * T, 3 * len(p.Wo))
        gradients = {
            "Wo": Product(mixed.reshape(N * T, len(p.Wo)).T, rows),
            "Wqkv": Product(x.reshape(N * T, D).T, rows3),
        }
        if hasattr(p, "bo"):
            gradients["bo"] = RowSum(rows)
        if hasattr(p, "bqkv"):
            gradients["bqkv"] = RowSum(rows3)
        if not ctx.needs_input_grad:
            return None, gradients
        gx = ctx.empty(x.shape, x.dtype)
        np.matmul(rows3, p.Wqkv.T, gx.reshape(N * T, D))
        return gx, gradients

    # ------------------------------------------------------------- the part between the two products with weights

    def positions(self, T: int, ctx) -> np.ndarray:
        """Return the position in the sequence of each of the T rows that this process has."""
        return np.arange(T)

    def attend(self, q, k, v, out, ctx) -> tuple:
        """Write softmax(q k^T) v to `out`, all (N, H, T, d); return what `attend_backward` needs beside them."""
        padding = self._padding(len(k), k.shape[2], ctx)
        if self.by_blocks(q.shape[2]):
            positions = np.arange(q.shape[2])
            running = BlockwiseAttention(q, positions, self.causal, self.block_size, ctx.network_context.pool)
            running.start(out)
            running.add(k, v, positions, padding)
            return (*running.finish(), padding)
        probabilities = ctx.empty((*q.shape[:3], k.shape[2]), q.dtype)
        np.matmul(q, k.swapaxes(2, 3), probabilities)
        if self.causal:
            probabilities += causal_mask(q.shape[2], k.shape[2], 0, q.dtype)
        if padding is not None:
            np.copyto(probabilities, -np.inf, where=padding[:, None, None, :])
        softmax(probabilities, probabilities)
        np.matmul(probabilities, v, out)
        return (probabilities,)

    def attend_backward(self, qkv, y, weights, gy, gradients, ctx) -> None:
        """Write the gradients of q, k and v: `attend` has written y and returned `weights`; gy is the gradient of y."""
        q, k, v = qkv
        gq, gk, gv = gradients
        if self.by_blocks(q.shape[2]):
            largest, total, padding = weights
            positions = np.arange(q.shape[2])
            running = BlockwiseAttention(q, positions, self.causal, self.block_size, ctx.network_context.pool)
            running.start_backward(largest, total, y, gy)
            gq[...], gk[...], gv[...] = 0, 0, 0
            running.add_backward(k, v, gradients, positions, padding)
            return
        (probabilities,) = weights
        np.matmul(probabilities.swapaxes(2, 3), gy, gv)
        gscore = ctx.workspace("prob", probabilities.shape, q.dtype)
        np.matmul(gy, v.swapaxes(2, 3), gscore)
        # softmax: gs = prob (gp - sum gp prob), and that sum over T positions is one over the d features
        gscore -= np.einsum("nhtd,nhtd->nht", gy, y)[..., None]
        gscore *= probabilities
        np.matmul(gscore, k, gq)
        np.matmul(gscore.swapaxes(2, 3), q, gk)

    def _padding(self, samples: int, length: int, ctx) -> np.ndarray | None:
        """Return the positions (N, T) that no query may see, checked; None: there are none."""
        padding = ctx.micro_batch.padding
        if padding is None:
            return None
        if padding.shape != (expected := (samples, length)):
            raise ShapeError(
                f"{ctx.description}: expects a padding mask of shape {expected}, one entry a position "
                f"of its input, given the Embedding's {padding.shape}: layers between the two change the positions; "
                "build the Embedding without padding, or leave its positions as they are"
            )
        blind = padding[:, 0] if self.causal else padding.all(axis=1)
        if blind.any():
            raise ValueError(
                f"{ctx.description}: sample {int(blind.argmax())}, position 0: padding masks every position "
                + ("that comes before it and itself; pad at the end" if self.causal else "of the sequence")
            )
        return padding


def block_size(attention: str) -> int:
    """Return how many queries and keys "blocks:SIZE" computes at a time; 0 for "whole"."""
    if attention == "whole":
        return 0
    if isinstance(attention, str):
        name, values = option_strings.split(attention)
        size = values[0] if values else "128"
        if name == "blocks" and len(values) < 2 and size.isdecimal() and int(size) > 0:
            return int(size)
    raise ValueError(f'attention must be "whole", or "blocks:SIZE" such as "blocks:128", given {attention!r}')


def _heads(qkv: np.ndarray) -> np.ndarray:
    """(N, T, 3, H, D/H) as queries, keys and values (3, N, H, T, D/H): a view."""
    return qkv.transpose(2, 0, 3, 1, 4)


@register("layer")
class TransformerBlock(Sequential):
    """Attention, then two linear layers with GELU between, each inside a residual connection.

    Parameters
    ----------
    features, heads : int
    causal : bool
    pre_norm : bool
        True: x + f(norm(x)), which trains without warm-up. False: norm(x + f(x)), the original.
    hidden : int
        Units between the two linear layers; 0 takes 4 features.
    dropout : float
        Rate, at the end of each residual branch.
    attention, rotary
        As of MultiHeadAttention.
    feed_forward : Layer or None
        Replaces the two linear layers, such as `MixtureOfExperts(features, 8)`.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.TransformerBlock(16, heads=4, causal=True), (12, 16)).out_shape
    (12, 16)
    """

    constraints = MultiHeadAttention.constraints | {"hidden": COUNT, "dropout": Number(0, below=1)}
    constant = (  # the layers inside are made of them
        *("features", "heads", "causal", "pre_norm", "hidden", "dropout", "attention", "rotary", "feed_forward"),
    )

    def __init__(
        self,
        features: int,
        heads: int,
        causal: bool = False,
        pre_norm: bool = True,
        hidden: int = 0,
        dropout: float = 0.0,
        attention: str = "whole",
        rotary: bool = False,
        feed_forward: Layer | None = None,
    ):
        self.features, self.heads, self.causal, self.pre_norm = features, heads, causal, pre_norm
        self.hidden, self.dropout, self.attention, self.rotary = hidden, dropout, attention, rotary
        self.feed_forward = feed_forward
        hidden = hidden or 4 * features
        heads_together = MultiHeadAttention(features, heads, causal, attention=attention, rotary=rotary)
        dense = [feed_forward] if feed_forward else [Linear(features, hidden), GELU(), Linear(hidden, features)]
        layers: list[Layer] = []
        for branch in ([heads_together], dense):
            branch += [Dropout(dropout)] if dropout else []
            if pre_norm:
                layers += [Residual(Sequential(LayerNorm(features), *branch))]
            else:
                layers += [Residual(Sequential(*branch)), LayerNorm(features)]
        super().__init__(*layers)
