"""Multi-head attention and the transformer block (Vaswani et al. 2017; pre-norm: Xiong et al. 2020).

Attention of N sequences of T places, D features in H heads: 4 N T D^2 multiply-accumulates for the projections and
2 N T^2 D for scores and sums; the probabilities, N H T^2 numbers, are kept for backward.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from nn.core.containers import Residual
from nn.core.gradients import Product, RowSum
from nn.core.layer import Initializer, Layer, Sequential, ShapeError, Spec, Split, check_numbers
from nn.initializers import glorot, zeros
from nn.layers.activations import GELU, softmax
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout
from nn.layers.normalization import LayerNorm


class MultiHeadAttention(Layer):
    """Self-attention: every place takes a weighted mean of all places' values, weights softmax(q k^T / sqrt(D/H)).

    Queries, keys and values are one product, x Wqkv + bqkv, columns in that order and by head within each. Places that
    `MicroBatch.padding` marks, see `Embedding(padding=...)`, are never looked at.

    Of several ranks each can take some of the heads. Their results have to be summed; bo is added there, once, and p
    has none.

    Parameters
    ----------
    features : int
        D, of x and y.
    heads : int
        H, divides D.
    causal : bool
        A place sees itself and those before it only.
    bias : bool
    init, bias_init : initializer
        For Wqkv (D, 3D) and Wo (D, D), for bqkv and bo.

    Raises
    ------
    ValueError
        In forward, if a mask leaves a place nothing to look at: which layer, sample and place.
    """

    output = gradient = "new"

    def __init__(
        self,
        features: int,
        heads: int,
        causal: bool = False,
        bias: bool = True,
        init: Initializer = glorot,
        bias_init: Initializer = zeros,
    ):
        check_numbers("MultiHeadAttention", features=features, heads=heads)
        if features < 1 or heads < 1 or features % heads:
            raise ValueError(f"MultiHeadAttention: {heads} heads do not divide {features} features")
        self.features, self.heads, self.causal, self.bias = features, heads, causal, bias
        self.init, self.bias_init = init, bias_init

    def __repr__(self):
        return f"MultiHeadAttention({self.features}, {self.heads}{', causal=True' if self.causal else ''})"

    def specs(self, in_shape):
        if len(in_shape) != 2 or in_shape[1] != self.features:
            raise ShapeError(f"expects sequences (places, {self.features}), given samples of shape {in_shape}")
        D, H = self.features, self.heads
        specs = {
            "Wqkv": Spec((D, 3 * D), self.init, split=Split(1, blocks=3, units=H)),
            "Wo": Spec((D, D), self.init, split=Split(0, units=H)),
        }
        if self.bias:
            specs["bqkv"] = Spec((3 * D,), self.bias_init, decay=False, split=Split(0, blocks=3, units=H))
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

        prob = ctx.empty((N, H, T, T), x.dtype)
        np.matmul(q, k.swapaxes(2, 3), prob)
        self._mask(prob, ctx)
        softmax(prob, prob)
        mixed = ctx.empty((N, T, H, size), x.dtype)
        np.matmul(prob, v, mixed.swapaxes(1, 2))

        y = ctx.empty(x.shape, x.dtype)
        rows = y.reshape(N * T, D)
        np.matmul(mixed.reshape(N * T, H * size), p.Wo, rows)
        if hasattr(p, "bo"):
            rows += p.bo
        return y, (x, qkv, prob, mixed)

    def backward(self, p, gy, saved, ctx):
        x, qkv, prob, mixed = saved
        N, T, D = x.shape
        q, k, v = _heads(qkv)

        rows = gy.reshape(N * T, D)
        gmixed = ctx.workspace("mixed", mixed.shape, x.dtype)
        np.matmul(rows, p.Wo.T, gmixed.reshape(N * T, len(p.Wo)))

        gqkv = ctx.workspace("qkv", qkv.shape, x.dtype)
        gq, gk, gv = _heads(gqkv)
        np.matmul(prob.swapaxes(2, 3), gmixed.swapaxes(1, 2), gv)
        gscore = ctx.workspace("prob", prob.shape, x.dtype)
        np.matmul(gmixed.swapaxes(1, 2), v.swapaxes(2, 3), gscore)
        # softmax: gs = prob (gp - sum gp prob), and that sum over T places is one over the D/H features
        gscore -= np.einsum("nthd,nthd->nht", gmixed, mixed)[..., None]
        gscore *= prob
        np.matmul(gscore, k, gq)
        gq *= 1 / math.sqrt(D // self.heads)
        np.matmul(gscore.swapaxes(2, 3), q, gk)  # q was scaled in forward

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

    def _mask(self, score: np.ndarray, ctx) -> None:
        """Minus infinity where a query (third axis) may not see a key (last axis)."""
        padding = ctx.micro_batch.padding
        if self.causal:
            score += future(score.shape[-1], score.dtype)
        if padding is not None:
            if padding.shape != (expected := (len(score), score.shape[-1])):
                raise ShapeError(
                    f"layer {ctx.path} ({self!r}): expects a padding mask of shape {expected}, one entry a place "
                    f"of its input, given the Embedding's {padding.shape}: layers between the two change the places; "
                    "build the Embedding without padding, or leave its places as they are"
                )
            blind = padding[:, 0] if self.causal else padding.all(axis=1)
            if blind.any():
                raise ValueError(
                    f"layer {ctx.path} ({self!r}): sample {int(blind.argmax())}, place 0: padding masks every place "
                    + ("that comes before it and itself; pad at the end" if self.causal else "of the sequence")
                )
            np.copyto(score, -np.inf, where=padding[:, None, None, :])


def _heads(qkv: np.ndarray) -> np.ndarray:
    """(N, T, 3, H, D/H) as queries, keys and values (3, N, H, T, D/H): a view."""
    return qkv.transpose(2, 0, 3, 1, 4)


@functools.lru_cache(maxsize=8)
def future(length: int, dtype: np.dtype) -> np.ndarray:
    """0 on and below the diagonal, minus infinity above."""
    table = np.triu(np.full((length, length), -np.inf, dtype), 1)
    table.flags.writeable = False
    return table


class TransformerBlock(Sequential):
    """Attention, then two linear layers with GELU between, each inside a residual connection.

    Parameters
    ----------
    features, heads : int
    causal : bool
    pre_norm : bool
        True: x + f(norm(x)), which trains without warm-up. False: norm(x + f(x)), the original.
    hidden : int
        Of the two linear layers; 0 takes 4 features.
    dropout : float
        Rate, at the end of each residual branch.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        causal: bool = False,
        pre_norm: bool = True,
        hidden: int = 0,
        dropout: float = 0.0,
    ):
        self.features, self.heads, self.causal, self.pre_norm = features, heads, causal, pre_norm
        self.hidden, self.dropout = hidden, dropout
        check_numbers("TransformerBlock", features=features, heads=heads, hidden=hidden, dropout=dropout)
        hidden = hidden or 4 * features
        attention = [MultiHeadAttention(features, heads, causal)]
        dense = [Linear(features, hidden), GELU(), Linear(hidden, features)]
        layers: list[Layer] = []
        for branch in (attention, dense):
            branch += [Dropout(dropout)] if dropout else []
            if pre_norm:
                layers += [Residual(Sequential(LayerNorm(features), *branch))]
            else:
                layers += [Residual(Sequential(*branch)), LayerNorm(features)]
        super().__init__(*layers)
