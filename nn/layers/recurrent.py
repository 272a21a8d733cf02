"""Recurrent layers: a state goes from step to step of a sequence, and reads one position at each.

    RNN         h_t = tanh(x_t W + h_(t-1) U + b)                                   (Elman 1990)
    LSTM        i, f, o = sigmoid and g = tanh of the blocks of x_t W + h_(t-1) U + b,
                c_t = f c_(t-1) + i g,    h_t = o tanh(c_t)                         (Hochreiter and Schmidhuber 1997,
                                                                                    forget gate: Gers et al. 2000)

Backpropagation through time: the steps in reverse, each with the gradient of its output and that of the state which the
step behind it took (Werbos 1990). `truncate=k` lets that go back to the last multiple of k only (Williams and Peng
1990): less memory is not the point here, but gradients that neither vanish nor explode on their way through hundreds of
products with U.

Cost of N sequences of T steps, D features in and H out: N T (D + H) B H multiply-accumulates forward, twice that
backward, B = 1 or 4 blocks. The products with the input are made for some steps at a time, all gradients of parameters
and of the input for all steps; one product of (N, H) and (H, B H) a step is left, each way. It is small, so how often
NumPy is called counts as much, and that what a step needs is in the cache: all that needs no other step is made for as
many steps as fit there.

**What cannot be cut in time.** h_t needs h_(t-1): those T products wait for each other, on however many cores.
These can share the samples, the features or the layers (a layer can be at step t while the one above is at t - 1), but
a long sequence takes as long as all its steps. And the influence of the first position on the last goes through T
products. Attention (attention.py) replaced them for that: all positions of a layer at once, one product between any two
of them, so that work can be cut along the sequence as well; its price is T^2 scores instead of T states.
"""

from __future__ import annotations

import numpy as np

from nn.arguments import COUNT, SIZE, Number, OneOf
from nn.core.gradients import Product, RowSum
from nn.core.layer import Initializer, Layer, ShapeError, Spec
from nn.initializers import glorot, orthogonal, zeros
from nn.registry import register

BLOCK = 1 << 16  # elements of z worked on at a time, where steps do not wait for each other
SMALL = 1_000_000  # multiply-accumulates of a product, up to which OpenBLAS has kernels that copy nothing
TILE = 16  # rows of U transposed at a time, a cache line of float32: the lines of more would evict each other
MIN_ROWS = 8  # rows that such a product should have


class _Recurrence(Layer):
    """Base: what all steps have in common, and the loops over them.

    Inside arrays are (T, N, ...), a step together, and what is B times as wide (B, ..., H), a block together.
    """

    output = gradient = "new"
    constraints = {"in_features": SIZE, "features": SIZE, "truncate": COUNT}
    blocks = 1
    states: tuple[str, ...] = ("h0",)

    def __init__(self, in_features, features, bias, last, truncate, learn_state, init, recurrent_init, bias_init):
        self.in_features, self.features, self.bias, self.last = in_features, features, bias, last
        self.truncate, self.learn_state = truncate, learn_state
        self.init, self.recurrent_init, self.bias_init = init, recurrent_init, bias_init

    def specs(self, in_shape):
        if len(in_shape) != 2 or in_shape[1] != self.in_features or not in_shape[0]:
            raise ShapeError(f"expects sequences (steps, {self.in_features}), given samples of shape {in_shape}")
        width = self.blocks * self.features
        specs = {
            "W": Spec((self.in_features, width), self.init),
            "U": Spec((self.features, width), self.recurrent_init),
        }
        if self.bias:
            specs["b"] = Spec((width,), self.first_bias, decay=False)
        if self.learn_state:
            specs |= {name: Spec((self.features,), zeros, decay=False) for name in self.states}
        return specs, (self.features,) if self.last else (in_shape[0], self.features)

    def first_bias(self, rng: np.random.Generator, shape) -> np.ndarray:
        """First value of b."""
        return self.bias_init(rng, shape)

    def macs(self, in_shape):
        return in_shape[0] * (self.in_features + self.features) * self.blocks * self.features

    def forward(self, p, x, ctx):
        (N, T, D), H, B, dtype = x.shape, self.features, self.blocks, x.dtype
        W, U, b = self.parameters(p, ctx)
        steps = ctx.empty((T, N, D), dtype)
        steps[...] = x.swapaxes(0, 1)
        z = ctx.empty((T, B, N, H), dtype)
        h = ctx.empty((T + 1, N, H), dtype)  # h[t] is the state before step t
        more = self.begin(p, h, ctx)
        work, recurrent = ctx.workspace("step", (N, H), dtype), ctx.workspace("recurrent", (B, N, H), dtype)
        for block in _step_blocks(T, z):
            inputs = ctx.workspace("inputs", (B, block.stop - block.start, N, H), dtype)
            np.matmul(_rows(steps[block]), W, out=inputs.reshape(B, (block.stop - block.start) * N, H))
            np.add(inputs.swapaxes(0, 1), 0 if b is None else b, out=z[block])
            for t in range(*block.indices(T)):
                zt = z[t]
                zt += np.matmul(h[t], U, out=recurrent)
                self.step(t, zt, h, more, work)
        y = ctx.empty((N, H) if self.last else (N, T, H), dtype)
        y[...] = h[T] if self.last else h[1:].swapaxes(0, 1)
        return y, (steps, z, h, *more)

    def backward(self, p, gy, saved, ctx):
        steps, z, h, *more = saved
        (T, N, D), H, B, dtype = steps.shape, self.features, self.blocks, steps.dtype
        gz = ctx.workspace("steps", (T, N, B * H), dtype)
        blocks = gz.reshape(T, N, B, H).swapaxes(1, 2)
        gstates = [ctx.workspace(f"gradient of {name}", (N, H), dtype) for name in self.states]
        for gstate in gstates:
            gstate[...] = 0
        gh = gstates[0]
        work = ctx.workspace("step", (N, H), dtype)
        back = ctx.workspace("U", p.U.shape[::-1], dtype)
        for lo in range(0, H, TILE):  # products with contiguous rows take a third less time; by tiles: see TILE
            back[:, lo : lo + TILE] = p.U[lo : lo + TILE].T
        for block in reversed(_step_blocks(T, z)):
            slopes = self.slopes(z[block], h[1:][block], [array[block] for array in more], ctx)
            for t in reversed(range(*block.indices(T))):
                if not self.last:
                    gh += gy[:, t]
                elif t == T - 1:
                    gh += gy
                self.step_back(z[t], slopes[:, t - block.start], gstates, blocks[t], work)
                if t and self.truncate and t % self.truncate == 0:
                    for gstate in gstates:
                        gstate[...] = 0
                elif t or self.learn_state:
                    _multiply(gz[t], back, gh)

        rows = _rows(gz)
        gradients = {"W": Product(_rows(steps).T, rows), "U": Product(_rows(h[:T]).T, rows)}
        if self.bias:
            gradients["b"] = RowSum(rows)
        if self.learn_state:
            gradients |= {name: RowSum(gstate) for name, gstate in zip(self.states, gstates, strict=True)}
        if not ctx.needs_input_grad:
            return None, gradients
        gsteps = ctx.workspace("gradient of steps", steps.shape, dtype)
        np.dot(rows, p.W.T, _rows(gsteps))
        gx = ctx.empty((N, T, D), dtype)
        gx[...] = gsteps.swapaxes(0, 1)
        return gx, gradients

    def parameters(self, p, ctx) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """W (B, D, H), U (B, H, H), and b (B, 1, H) or None, as forward multiplies them."""
        return p.W[None], p.U[None], p.b[None, None] if self.bias else None

    def begin(self, p, h: np.ndarray, ctx) -> tuple[np.ndarray, ...]:
        """Write the first state, h[0]; returns what else is kept of the steps."""
        h[0] = p.h0 if self.learn_state else 0
        return ()

    def step(self, t: int, z: np.ndarray, h: np.ndarray, more: tuple, work: np.ndarray) -> None:
        """From z (B, N, H), which becomes what backward needs, the state h[t + 1]; `work` is an (N, H) to use."""
        raise TypeError(f"{type(self).__name__} does not define step")

    def slopes(self, z: np.ndarray, h: np.ndarray, more: list, ctx) -> np.ndarray:
        """Return the factors that `step_back` multiplies gradients with, of some steps: (any number, steps, N, H)."""
        raise TypeError(f"{type(self).__name__} does not define slopes")

    def step_back(self, z: np.ndarray, slopes: np.ndarray, gstates: list, gz: np.ndarray, work: np.ndarray) -> None:
        """From the gradients of the states behind a step that of z, gz (B, N, H) with blocks as parameters have them;
        of states that U has no part in, those before."""
        raise TypeError(f"{type(self).__name__} does not define step_back")


@register("layer")
class RNN(_Recurrence):
    """h_t = f(x_t W + h_(t-1) U + b) on sequences (N, T, D): (N, T, H), or the last h (N, H).

    Parameters
    ----------
    in_features, features : int
        D of x and H of y.
    activation : {"tanh", "relu"}
        f.
    bias : bool
    last : bool
        Put out the state behind the last step only.
    truncate : int
        Gradients of the state do not go back beyond a multiple of this number of steps; 0: they go back to the first.
    learn_state : bool
        The state before the first step, h0 (H,), is a parameter, zero at first; otherwise it is zero.
    init, recurrent_init, bias_init : initializer
        For W (D, H), U (H, H), b (H,).

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.RNN(16, 32), (12, 16)).out_shape
    (12, 32)
    """

    constraints = _Recurrence.constraints | {"activation": OneOf(("tanh", "relu"))}

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        activation: str = "tanh",
        bias: bool = True,
        last: bool = False,
        truncate: int = 0,
        learn_state: bool = False,
        init: Initializer = glorot,
        recurrent_init: Initializer = orthogonal,
        bias_init: Initializer = zeros,
    ):
        super().__init__(in_features, features, bias, last, truncate, learn_state, init, recurrent_init, bias_init)
        self.activation = activation

    def step(self, t, z, h, more, work):
        if self.activation == "tanh":
            np.tanh(z[0], h[t + 1])
        else:
            np.maximum(z[0], 0, out=h[t + 1])

    def slopes(self, z, h, more, ctx):
        slope = ctx.workspace("slopes", (1, *h.shape), h.dtype)
        if self.activation == "tanh":
            np.multiply(h, h, slope[0])
            np.subtract(1, slope, slope)
        else:
            np.greater(h, 0, slope[0])
        return slope

    def step_back(self, z, slopes, gstates, gz, work):
        np.multiply(slopes, gstates[0], gz)


@register("layer")
class LSTM(_Recurrence):
    """Long short-term memory on sequences (N, T, D): (N, T, H), or the last h (N, H). Stack several for layers.

    The cell c is added to, not multiplied by U: what a step has put into it, and its gradient, last as long as the
    forget gate is near 1.

    Parameters
    ----------
    in_features, features : int
        D of x and H of y.
    bias, last, truncate
        As for RNN.
    learn_state : bool
        The states before the first step, h0 and c0 (H,), are parameters, zero at first; otherwise they are zero.
    forget_bias : float
        Added to the first value of the forget gate's bias, so that cells remember at first (Jozefowicz et al. 2015).
    init, recurrent_init, bias_init : initializer
        For W (D, 4H), U (H, 4H), b (4H,): blocks in the order i, f, g, o, as PyTorch has them. Its two biases are one.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.LSTM(16, 32, last=True), (12, 16)).out_shape
    (32,)
    """

    blocks, states = 4, ("h0", "c0")
    constraints = _Recurrence.constraints | {"forget_bias": Number()}

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        bias: bool = True,
        last: bool = False,
        truncate: int = 0,
        learn_state: bool = False,
        forget_bias: float = 1.0,
        init: Initializer = glorot,
        recurrent_init: Initializer = orthogonal,
        bias_init: Initializer = zeros,
    ):
        super().__init__(in_features, features, bias, last, truncate, learn_state, init, recurrent_init, bias_init)
        self.forget_bias = forget_bias

    def first_bias(self, rng, shape):
        b = np.array(np.broadcast_to(super().first_bias(rng, shape), shape), np.float64)  # a copy, to be added to
        b[self.features : 2 * self.features] += self.forget_bias
        return b

    def parameters(self, p, ctx):
        """Inside, blocks are in the order o, i, f, g: the gates lie together, and so does what makes c.

        sigmoid(z) = (1 + tanh(z / 2)) / 2: with halves of the gates' columns one tanh serves all four blocks.
        """
        reordered = []
        for name, w in (("W", p.W), ("U", p.U), ("b", p.b[None] if self.bias else None)):
            if w is None:
                return *reordered, None
            blocks = w.reshape(len(w), 4, self.features).swapaxes(0, 1)
            inside = ctx.workspace(f"blocks of {name}", blocks.shape, w.dtype)
            for k, factor in enumerate((0.5, 0.5, 1, 0.5)):
                np.multiply(blocks[k], factor, inside[(k + 1) % 4])
            reordered.append(inside)
        return tuple(reordered)

    def begin(self, p, h, ctx):
        super().begin(p, h, ctx)
        c, squashed = ctx.empty(h.shape, h.dtype), ctx.empty((len(h) - 1, *h.shape[1:]), h.dtype)
        c[0] = p.c0 if self.learn_state else 0
        return c, squashed

    def step(self, t, z, h, more, work):
        c, squashed = more
        np.tanh(z, z)
        gates = z[:3]
        gates *= 0.5
        gates += 0.5
        o, i, f, g = z
        cell = np.multiply(f, c[t], c[t + 1])
        cell += np.multiply(i, g, work)
        np.tanh(cell, squashed[t])
        np.multiply(o, squashed[t], h[t + 1])

    def slopes(self, z, h, more, ctx):
        z, (before, squashed) = z.swapaxes(0, 1), more
        gates, (o, i, _, g) = z[:3], z
        slopes = ctx.workspace("slopes", (5, *h.shape), h.dtype)
        np.multiply(gates, gates, slopes[:3])  # dy/dz: y - y^2 of gates, 1 - g^2
        np.subtract(gates, slopes[:3], slopes[:3])
        np.multiply(g, g, slopes[3])
        np.multiply(squashed, squashed, slopes[4])
        np.subtract(1, slopes[3:], slopes[3:])
        for slope, other in zip(slopes, (squashed, g, before, i, o), strict=True):
            slope *= other  # of o: dh/dz; of i, f and g: dc/dz; the last one is dh/dc
        return slopes

    def step_back(self, z, slopes, gstates, gz, work):
        gh, gc = gstates
        gc += np.multiply(gh, slopes[4], work)
        np.multiply(slopes[1:4], gc, gz[:3])
        np.multiply(slopes[0], gh, gz[3])
        gc *= z[2]


def _step_blocks(steps: int, z: np.ndarray) -> list[slice]:
    """Return slices of steps whose arrays stay in the cache, for work in which steps do not wait for each other."""
    together = max(1, BLOCK // max(1, z[0].size))
    return [slice(start, min(steps, start + together)) for start in range(0, steps, together)]


def _rows(array: np.ndarray) -> np.ndarray:
    """(T, N, ...) as a matrix of T N rows: a view."""
    return array.reshape(-1, array.shape[-1])


def _multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Compute out = a b by so few rows of a at a time that OpenBLAS does not copy b first."""
    most = SMALL // b.size
    count = -(-len(a) // most) if most >= MIN_ROWS else 1
    for k in range(count):
        rows = slice(len(a) * k // count, len(a) * (k + 1) // count)
        np.dot(a[rows], b, out[rows])
