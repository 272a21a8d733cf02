"""PowerSGD: gradients of weight matrices as products of two thin ones. Source: Vogels, Karimireddy and Jaggi 2019.

For M = sum over ranks of M_w, M_w = G_w + E_w of shape (rows, columns), one step of subspace iteration a training step:

    P = sum of M_w Q;  orthonormalise P;  Q = sum of M_w^T P;  M is about P Q^T;  E_w = M_w - P (M_w^T P)^T

Both sums are allreduces, of rank (rows + columns) numbers in all. Q is kept from step to step (warm start), so the
subspace follows the gradient. A tensor of more axes is a matrix of its last one and the others. What the factors would
not shorten travels as it is: biases, small matrices, and all at full rank. Cost: two products with thin matrices and
a QR factorisation for each; bits are equal on all ranks where all have the same BLAS and processor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nn.registry import register
from parallel.sync.compression.base import Compressor


class Matrix(NamedTuple):
    """A tensor that travels as two factors: its place in the gradients and those of P and Q in their buffers."""

    name: str
    part: slice
    shape: tuple[int, int]
    p: slice
    q: slice


@register("compressor", "powersgd")
@dataclass(eq=False)
class PowerSGD(Compressor):
    """Keeps the error memory E_w of each rank, and Q, alike on all.

    Parameters
    ----------
    rank : int
        Columns of P and Q.
    """

    rank: int = 4
    memories = ("error",)
    no_messages = "its factors are sums over all ranks; use --strategy ddp, or another method"

    def __post_init__(self):
        if not self.rank >= 1:
            raise ValueError(f"powersgd: the rank must be at least 1, given {self.rank}")

    def attach(self, region, dtype, seed=0, shard=(0, 1)):
        super().attach(region, dtype, seed, shard)
        self.matrices: list[Matrix] = []
        self.dense: list[tuple[slice, slice]] = []  # place in the gradients, place behind the factors P
        p_size = q_size = 0
        for name, part, spec in region.tensors:
            columns = spec.shape[-1] if spec.shape else 1
            rows = math.prod(spec.shape[:-1])
            count = part.stop - part.start
            if count == rows * columns > self.rank * (rows + columns):  # whole, and longer than its factors
                p, q = rows * self.rank, columns * self.rank
                place = slice(p_size, p_size + p), slice(q_size, q_size + q)
                self.matrices.append(Matrix(name, part, (rows, columns), *place))
                p_size, q_size = p_size + p, q_size + q
            else:
                self.dense.append((part, count))
        ends = p_size
        for i, (part, count) in enumerate(self.dense):
            self.dense[i] = part, slice(ends, ends + count)
            ends += count
        self.p = np.zeros(ends, self.dtype)
        self.q = np.zeros(q_size, self.dtype)  # of this step: sums over ranks
        for m in self.matrices:
            key = np.random.SeedSequence([seed, *b"powersgd", *m.name.encode()])
            factor = np.random.default_rng(key).standard_normal((m.shape[1], self.rank))
            self.shared[f"Q/{m.name}"] = factor.astype(self.dtype)
        return self

    def reduce(self, g, wire, step):
        e, sent = self.memory["error"], self.scratch("sent", self.dtype)
        for m in self.matrices:
            matrix = e[m.part].reshape(m.shape)
            matrix += g[m.part].reshape(m.shape)
            np.dot(matrix, self.shared[f"Q/{m.name}"], out=self.p[m.p].reshape(-1, self.rank))
        for part, place in self.dense:
            self.p[place] = g[part]
        wire.allreduce(self.p)
        for part, place in self.dense:
            g[part] = self.p[place]
        for m in self.matrices:
            matrix, p, q = e[m.part].reshape(m.shape), *self.factors(m)
            p[:] = np.linalg.qr(p)[0]  # columns stay orthonormal where P has not full rank, or is zero
            np.dot(matrix.T, p, out=q)
            matrix -= np.dot(p, q.T, out=sent[m.part].reshape(m.shape))
        if len(self.q):
            wire.allreduce(self.q)
        for m in self.matrices:
            p, q = self.factors(m)
            np.dot(p, q.T, out=g[m.part].reshape(m.shape))
            self.shared[f"Q/{m.name}"][:] = q

    def factors(self, m: Matrix) -> tuple[np.ndarray, np.ndarray]:
        return self.p[m.p].reshape(-1, self.rank), self.q[m.q].reshape(-1, self.rank)
