"""Is backward the derivative of forward? One random direction over the input and all parameters together.

For a unit direction d, (L(w + eps d) - L(w - eps d)) / (2 eps) must equal <dL/dw, d>, with L = <y, a random upstream
gradient>. In float64 with eps 1e-5 the two agree to about 1e-9; a wrong term anywhere shows. Costs two passes a
direction, whatever the number of parameters.

Gradients start as noise, once to be written and once to be added to, as for the first micro-batch of a step and those
after it: a backward that always adds, always writes or leaves something out is caught. So is one that computes
something else in two halves, input gradients first: both must give the same bits.

A loss is checked alike, `gradcheck(loss, z, target=y)`: the arrays that it gets for its gradient hold noise, so that
one that adds to them, or leaves elements out, is caught; and a batch cut into two, each divided by the total of the
whole, must add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nn.arguments import Number
from nn.core.checks import arrays_in
from nn.core.containers import Wrapper, buffers_of
from nn.core.context import LayerContext, NetworkContext
from nn.core.layer import Layer
from nn.core.memory_pool import MemoryPool
from nn.core.network import Network
from nn.losses import Loss

NEAR = 1e-12  # of two sums that differ in their order only, relative


def gradcheck(
    layer: Layer | Loss,
    x: np.ndarray,
    seed: int = 0,
    eps: float = 1e-5,
    directions: int = 3,
    setup: Callable[[LayerContext], None] | None = None,
    target: np.ndarray | None = None,
) -> float:
    """Return the largest relative difference between analytic and numerical directional derivative.

    Parameters
    ----------
    layer : Layer or Loss
    x : array (N, *in_shape)
        float64; an integer array (ids) is not perturbed. Of a loss, the network's outputs.
    seed : int
        Seed of parameters, upstream gradient and directions.
    directions : int
        How many directions to try; the worst counts.
    setup : callable (LayerContext) or None
        Changes what layers see, such as `ctx.micro_batch.training`.
    target : array (N, ...) or None
        For a loss: what the outputs are compared with.

    Returns
    -------
    float
        About 1e-9 where backward is right; use a bound of 1e-6. Near a kink (ReLU at 0) try another seed. Infinite
        where forward or backward gives what is not finite.

    Raises
    ------
    AssertionError
        If forward or backward overwrites what it is given, or returns memory that is not its own to give away; if
        backward in two halves, or after a forward of other samples, is not backward; if a loss overwrites what it is
        given, is not the sum over micro-batches, or leaves some of its gradient unwritten.
    TypeError, ShapeError
        If this is neither a layer nor a loss with its target, or x is no array of float64 or ids; if forward or
        backward does not return what a layer returns (nn/core/layer.py).
    ValueError
        If x is empty, there are no directions, or eps is no step: nothing would be compared.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> nn.gradcheck(nn.Tanh(), np.random.default_rng(0).normal(size=(5, 3))) < 1e-6
    True
    """
    if not isinstance(x, np.ndarray) or (x.dtype != np.float64 and x.dtype.kind not in "iu"):
        kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"gradcheck: x must be an array of float64, or of ids, given {kind}: np.asarray(x, np.float64)")
    Number(above=0)("gradcheck: eps", eps)
    if not x.size or directions < 1:
        raise ValueError(f"gradcheck: nothing to compare: x of shape {x.shape}, {directions} directions")
    if isinstance(layer, Loss):
        if not isinstance(target, np.ndarray):
            raise TypeError(f"gradcheck({layer!r}, z, target=y) takes the targets y as an array, given {target!r:.80}")
        return _of_loss(layer, x, target, seed, eps, directions)
    if not isinstance(layer, Layer) or target is not None:
        raise TypeError(f"gradcheck takes a Layer and x, or a Loss, z and target, given {layer!r:.80}")
    worst = 0.0
    for around in (False, True):
        worst = max(worst, _Case(layer, x, seed, setup, around).check(eps, directions))
    return worst


class _Overwriting(Wrapper):
    """The layer between two that overwrite whatever they may: with NaN, so that it shows wherever it is used again."""

    output = gradient = "new"

    def __repr__(self):
        return f"{self.layer!r} between layers that overwrite what they may"

    def plan(self, ctx):
        ctx.may_overwrite_input = ctx.may_overwrite_grad = True
        self.layer.plan(ctx)

    def forward(self, p, x, ctx):
        y, saved = self.layer.forward(p, x.copy(), ctx)
        return _spoiled(y, self.layer.output), saved

    def backward(self, p, gy, saved, ctx):
        gx, gradients = self.layer.backward(p, gy.copy(), saved, ctx)
        if gradients:
            ctx.write_gradients(gradients)  # as the engine does before it goes on
        return (None if gx is None else _spoiled(gx, self.layer.gradient)), {}


def _spoiled(array: np.ndarray, kind: str) -> np.ndarray:
    """A copy of an array, which is overwritten unless it is declared as kept."""
    copy = array.copy()
    if kind != "kept" and array.dtype.kind == "f":
        array[...] = np.nan
    return copy


class _Case:
    """A layer by itself, or between layers that overwrite whatever they may, with parameters and samples."""

    def __init__(self, layer: Layer, x: np.ndarray, seed: int, setup: Callable | None, around: bool):
        self.layer, self.x, self.around, self.rng = layer, x, around, np.random.default_rng(seed)
        self.network = Network(_Overwriting(layer) if around else layer, x.shape[1:], np.float64)
        self.w = self.network.layout.zeros(np.float64)
        self.network.layout.initialize(self.w, seed)
        for _, array in self.network.layout.items(self.w):  # zeros would hide a term
            array += 0.1 * self.rng.standard_normal(array.shape)
        self.ctx = self.network.context(seed=seed)
        if around:
            self.ctx.unchecked = None  # it was checked by itself
        self.moves_x = self.ctx.network_context.input_gradient = x.dtype.kind == "f"
        if setup:
            setup(self.ctx)
            self.moves_x = self.ctx.network_context.input_gradient
        self.p = self.network.layout.views(self.w)
        self.x_before = x.copy()

    def check(self, eps: float, directions: int) -> float:
        """Return the largest relative difference, as `gradcheck` does."""
        y = self.forward(self.x)[0].copy()
        if not np.array_equal(y, self.forward(self.x)[0], equal_nan=True):
            raise AssertionError(
                f"{self.layer!r}: forward makes something else the second time: random numbers must come from "
                "ctx.random, nothing may be kept from pass to pass, and in training y must not depend on buffers that "
                "forward changes"
            )
        if not self.around:
            self.look()
        self.upstream, self.noise = self.rng.standard_normal(y.shape), self.rng.standard_normal(len(self.w))
        gradients = [self.gradients(accumulate) for accumulate in (False, True)]
        _compare(self.layer, self.network, gradients[0], self.gradients(accumulate=False, halves=True))
        self.in_flight(gradients[0])
        worst = 0.0
        for _ in range(directions):
            worst = max(worst, self.difference(gradients, eps))
        return worst

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, object]:
        """Make one forward pass, which must leave x alone."""
        result = self.network.forward(self.p, x, self.ctx)
        if x is self.x and not np.array_equal(x, self.x_before, equal_nan=x.dtype.kind == "f"):
            raise AssertionError(f"{self.layer!r}: forward overwrote its input")
        return result

    def look(self) -> None:
        """Refuse outputs and gradients in memory that is somebody else's, in training and in evaluation."""
        batch, layer = self.ctx.micro_batch, self.layer
        before = batch.training
        for training in (not before, before):
            batch.training = training
            y, saved = self.network.forward(self.p, x := self.x.copy(), self.ctx)
            mode = "training" if training else "evaluation"
            memory = {"a parameter": self.w, "what it saved": saved, "its input": x}
            self.refuse(y, memory, layer.output, "input", f"in {mode}, the output", "output")
        gy, g = self.rng.standard_normal(y.shape), self.network.layout.views(np.zeros_like(self.w))
        del y
        saved_arrays = list(arrays_in(saved))  # backward may let go of some
        gx = self.network.backward(self.p, g, gy, saved, self.ctx)
        if isinstance(gx, np.ndarray) and self.moves_x:
            memory = {"a parameter": self.w, "what forward saved": saved_arrays, "gy": gy}
            self.refuse(gx, memory, layer.gradient, "gy", "dLoss/dx", "gradient")

    def refuse(self, array: np.ndarray, memory: dict, kind: str, passed: str, what: str, declared: str) -> None:
        """Refuse an array that shares memory with others, unless it is declared as kept."""
        for name, owner in memory.items():
            if kind == "kept" or (kind == "view" and name.endswith(passed)):
                continue
            if any(_shares(array, other) for other in arrays_in(owner)):
                raise AssertionError(
                    f"{self.layer!r}: {what} shares memory with {name}, and others would overwrite it: "
                    f'{declared} = "{kind}" does not hold, leave it out'
                )

    def gradients(self, accumulate: bool, halves: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """dL/dw, written over noise or added to it, and dL/dx."""
        g, network, ctx = self.noise.copy(), self.network, self.ctx
        ctx.micro_batch.accumulate = accumulate
        _, saved = self.forward(self.x)
        backward = network.backward_inputs if halves else network.backward
        gy = self.upstream.copy()
        gx = backward(self.p, network.layout.views(g), gy, saved, ctx)
        gx = gx.copy() if isinstance(gx, np.ndarray) else gx
        if halves:
            network.backward_weights(ctx)
        for what, array, before in (("its input", self.x, self.x_before), ("gy", gy, self.upstream)):
            if not np.array_equal(array, before, equal_nan=array.dtype.kind == "f"):
                raise AssertionError(f"{self.layer!r}: backward overwrote {what}, which others may need")
        ctx.micro_batch.accumulate = False
        return g - self.noise if accumulate else g, gx

    def in_flight(self, expected: tuple[np.ndarray, np.ndarray | None]) -> None:
        """Refuse a layer whose backward depends on a forward of other samples that came between."""
        ctx, g = self.ctx, self.noise.copy()
        first, second = replace(ctx.micro_batch), replace(ctx.micro_batch)
        buffers = [(array, array.copy()) for array in buffers_of(ctx)]
        _, saved = self.network.forward(self.p, self.x, ctx, first)
        other = self.x[::-1] if len(self.x) > 1 or self.x.dtype.kind != "f" else 0.5 * self.x
        self.network.forward(self.p, np.ascontiguousarray(other), ctx, second)
        gx = self.network.backward(self.p, self.network.layout.views(g), self.upstream.copy(), saved, ctx, first)
        for array, value in buffers:
            array[...] = value
        if not np.array_equal(g, expected[0], equal_nan=True) or (
            self.moves_x and not np.array_equal(gx, expected[1], equal_nan=True)
        ):
            raise AssertionError(
                f"{self.layer!r}: after a forward of other samples, backward makes something else: all that it needs "
                "of its own forward must be in `saved`"
            )

    def difference(self, gradients: list[tuple[np.ndarray, np.ndarray | None]], eps: float) -> float:
        """Return the relative difference along one random direction, of gradients that were written, and added."""
        d = np.zeros_like(self.w)
        for _, array in self.network.layout.items(d):
            array[...] = self.rng.standard_normal(array.shape)
        dx = self.rng.standard_normal(self.x.shape) if self.moves_x else 0.0
        norm = np.sqrt((d * d).sum() + np.sum(np.square(dx)))
        d, dx = d / norm, dx / norm

        def loss(step: float) -> float:
            moved = self.network.layout.views(self.w + step * d)
            x = self.x + step * dx if self.moves_x else self.x
            return float((self.network.forward(moved, x, self.ctx)[0] * self.upstream).sum())

        numerical = (loss(eps) - loss(-eps)) / (2 * eps)
        worst = 0.0
        for g, gx in gradients:
            analytic = float(g @ d) + (float((gx * dx).sum()) if self.moves_x else 0.0)
            worst = max(worst, _difference(numerical, analytic))
        return worst


def _shares(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=1000)
    except np.exceptions.TooHardError:
        return np.may_share_memory(a, b)


class NoisePool(MemoryPool):
    """Memory whose arrays hold noise, as after other users: zeros would hide a mistake."""

    def __init__(self, rng: np.random.Generator):
        super().__init__()
        self.rng = rng

    def empty(self, shape, dtype):
        return _filled(super().empty(shape, dtype), self.rng)

    def workspace(self, name, shape, dtype):
        return _filled(super().workspace(name, shape, dtype), self.rng)


def _filled(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if array.dtype.kind == "f":
        array[...] = rng.standard_normal(array.shape)
    return array


def _of_loss(loss: Loss, z: np.ndarray, target: np.ndarray, seed: int, eps: float, directions: int) -> float:
    """Check the gradient of a loss: see `gradcheck`."""
    rng = np.random.default_rng(seed)
    ctx = LayerContext(NetworkContext(NoisePool(rng), seed), loss, "loss", (), None, 0)
    total = 1.7 * len(z)  # not that of these samples: the caller says
    before = z.copy(), target.copy()
    value, gz = loss(z, target, total, ctx)
    if not np.array_equal(z, before[0]) or not np.array_equal(target, before[1]):
        raise AssertionError(f"{loss!r}: it overwrote its {'targets' if np.array_equal(z, before[0]) else 'input'}")
    if gz.shape != z.shape or gz.dtype != z.dtype or np.shares_memory(gz, z):
        raise AssertionError(f"{loss!r}: the gradient must be a new {z.dtype}{z.shape}, given {gz.dtype}{gz.shape}")
    again, gz_again = loss(z, target, total, ctx)
    if again != value or not np.array_equal(gz, gz_again):
        raise AssertionError(
            f"{loss!r}: another value or gradient the second time: does it use what was in its memory?"
        )
    half = len(z) // 2
    results = [loss(z[rows], target[rows], total, ctx) for rows in (slice(half), slice(half, None))]
    sums = sum(part for part, _ in results), np.concatenate([g for _, g in results])
    if not np.allclose(sums[0], value, NEAR, NEAR) or not np.allclose(sums[1], gz, NEAR, NEAR):
        raise AssertionError(
            f"{loss!r}: of a batch in two micro-batches, values and gradients are not those of the whole"
        )
    worst = 0.0
    for _ in range(directions):
        d = rng.standard_normal(z.shape)
        d /= np.sqrt((d * d).sum())
        numerical = (loss(z + eps * d, target, total, ctx)[0] - loss(z - eps * d, target, total, ctx)[0]) / (2 * eps)
        analytic = float((gz * d).sum())
        worst = max(worst, _difference(numerical, analytic))
    return worst


def _difference(numerical: float, analytic: float) -> float:
    """The relative difference; infinite where one of the two is not finite, for NaN is larger than nothing."""
    difference = abs(numerical - analytic) / max(abs(numerical), abs(analytic), 1e-8)
    return difference if math.isfinite(difference) else math.inf


def _compare(layer: Layer, network: Network, whole: tuple, halves: tuple) -> None:
    """Refuse gradients of two halves that are not those of the whole backward."""
    if whole[1] is not None and not np.array_equal(whole[1], halves[1], equal_nan=True):
        raise AssertionError(f"{layer!r}: backward in two halves returns another dLoss/dx")
    for (name, a), (_, b) in zip(network.layout.items(whole[0]), network.layout.items(halves[0]), strict=True):
        if not np.array_equal(a, b, equal_nan=True):
            raise AssertionError(
                f"{layer!r}: backward in two halves makes another gradient of {name}: is it given a workspace, or an "
                "array that is overwritten?"
            )
