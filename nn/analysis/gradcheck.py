"""Is backward the derivative of forward? One random direction over the input and all parameters together.

For a unit direction d, (L(w + eps d) - L(w - eps d)) / (2 eps) must equal <dL/dw, d>, with L = <y, a random upstream
gradient>. In float64 with eps 1e-5 the two agree to about 1e-9; a wrong term anywhere shows. Costs two passes a
direction, whatever the number of parameters.

Gradients start as noise, once to be written and once to be added to, as for the first micro-batch of a step and those
after it: a backward that always adds, always writes or leaves something out is caught. So is one that computes
something else in two halves, input gradients first: both must give the same bits.

A loss is checked alike, `gradcheck(loss, z, target=y)`: the arrays that it gets for its gradient hold noise, so that
one that adds to them, or leaves entries out, is caught; and a batch cut into two, each divided by the total of the
whole, must add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nn.core.layer import Layer
from nn.core.network import Network
from nn.core.pool import Memory
from nn.core.run import Context, Run
from nn.losses import Loss

NEAR = 1e-12  # of two sums that differ in their order only, relative


def gradcheck(
    layer: Layer | Loss,
    x: np.ndarray,
    seed: int = 0,
    eps: float = 1e-5,
    directions: int = 3,
    setup: Callable[[Run], None] | None = None,
    target: np.ndarray | None = None,
) -> float:
    """The largest relative difference between analytic and numerical directional derivative.

    Parameters
    ----------
    layer : Layer or Loss
    x : array (N, *in_shape)
        float64; an integer array (ids) is not perturbed. Of a loss, the network's outputs.
    seed : int
        Of parameters, upstream gradient and directions.
    directions : int
        How many directions to try; the worst counts.
    setup : callable (Run) or None
        Changes what layers are told, such as `run.micro_batch.training`.
    target : array (N, ...) or None
        Of a loss, what the outputs are compared with.

    Returns
    -------
    float
        About 1e-9 where backward is right; use a bound of 1e-6. Near a kink (ReLU at 0) try another seed. Infinite
        where forward or backward gives what is not finite.

    Raises
    ------
    AssertionError
        If forward or backward overwrites what it is given, backward returns no dLoss/dx, or backward in two halves is
        not backward; if a loss overwrites what it is given, is not the sum of its parts, or leaves some of its gradient
        unwritten.
    TypeError
        If this is neither a layer nor a loss with its target, or x is no array of float64 or ids.
    ValueError
        If x is empty, there are no directions, or eps is no step: nothing would be compared.
    """
    if not isinstance(x, np.ndarray) or (x.dtype != np.float64 and x.dtype.kind not in "iu"):
        given = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(
            f"gradcheck: x must be an array of float64, or of ids, given {given}: np.asarray(x, np.float64)"
        )
    if not eps > 0:
        raise ValueError(f"gradcheck: eps must be above 0, a step in each direction, given {eps}")
    if not x.size or directions < 1:
        raise ValueError(f"gradcheck: nothing to compare: x of shape {x.shape}, {directions} directions")
    if isinstance(layer, Loss):
        if not isinstance(target, np.ndarray):
            raise TypeError(f"gradcheck({layer!r}, z, target=y) takes the targets y as an array, given {target!r:.80}")
        return _of_loss(layer, x, target, seed, eps, directions)
    if not isinstance(layer, Layer) or target is not None:
        raise TypeError(f"gradcheck takes a Layer and x, or a Loss, z and target, given {layer!r:.80}")
    rng = np.random.default_rng(seed)
    network = Network(layer, x.shape[1:], np.float64)
    w = network.layout.zeros(np.float64)
    network.layout.initialize(w, seed)
    for _, array in network.layout.items(w):  # zeros would hide a term
        array += 0.1 * rng.standard_normal(array.shape)
    run = network.run(seed=seed)
    run.context.input_gradient = x.dtype.kind == "f"
    if setup:
        setup(run)
    p = network.layout.views(w)
    given, moves_x = x.copy(), run.context.input_gradient
    y, _ = network.forward(p, x, run)
    if not np.array_equal(x, given, equal_nan=x.dtype.kind == "f"):
        raise AssertionError(f"{layer!r}: forward overwrote its input")
    upstream, noise = rng.standard_normal(y.shape), rng.standard_normal(len(w))

    def gradients(accumulate: bool, halves: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """dL/dw, written over noise or added to it, and dL/dx."""
        g = noise.copy()
        run.micro_batch.accumulate = accumulate
        _, saved = network.forward(p, x, run)
        backward = network.backward_inputs if halves else network.backward
        gy = upstream.copy()
        gx = backward(p, network.layout.views(g), gy, saved, run)
        gx = gx.copy() if isinstance(gx, np.ndarray) else gx
        if halves:
            network.backward_weights(run)
        if moves_x and (not isinstance(gx, np.ndarray) or gx.shape != x.shape or gx.dtype != x.dtype):
            found = f"{gx.dtype}{gx.shape}" if isinstance(gx, np.ndarray) else f"{gx!r:.60}"
            raise AssertionError(f"{layer!r}: backward must return dLoss/dx, {x.dtype}{x.shape}, given {found}")
        for what, array, before in (("its input", x, given), ("gy", gy, gy if run.gy_free else upstream)):
            if not np.array_equal(array, before, equal_nan=array.dtype.kind == "f"):
                raise AssertionError(f"{layer!r}: backward overwrote {what}, which others may need")
        return g - noise if accumulate else g, gx

    found = [gradients(accumulate) for accumulate in (False, True)]
    _compare(layer, network, found[0], gradients(accumulate=False, halves=True))

    def loss(shift: np.ndarray, x_shift: np.ndarray | float) -> float:
        moved = network.layout.views(w + shift)
        return float((network.forward(moved, x + x_shift if moves_x else x, run)[0] * upstream).sum())

    worst = 0.0
    for _ in range(directions):
        d = np.zeros_like(w)
        for _, array in network.layout.items(d):
            array[...] = rng.standard_normal(array.shape)
        dx = rng.standard_normal(x.shape) if moves_x else 0.0
        norm = np.sqrt((d * d).sum() + np.sum(np.square(dx)))
        d, dx = d / norm, dx / norm
        numerical = (loss(eps * d, eps * dx) - loss(-eps * d, -eps * dx)) / (2 * eps)
        for g, gx in found:
            analytic = float(g @ d) + (float((gx * dx).sum()) if moves_x else 0.0)
            worst = max(worst, _difference(numerical, analytic))
    return worst


class _Noise(Memory):
    """Memory that hands out what others have left: noise, in place of zeros that hide a mistake."""

    def __init__(self, rng: np.random.Generator):
        super().__init__()
        self.rng = rng

    def empty(self, shape, dtype):
        return _filled(super().empty(shape, dtype), self.rng)

    def scratch(self, name, shape, dtype):
        return _filled(super().scratch(name, shape, dtype), self.rng)


def _filled(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if array.dtype.kind == "f":
        array[...] = rng.standard_normal(array.shape)
    return array


def _of_loss(loss: Loss, z: np.ndarray, target: np.ndarray, seed: int, eps: float, directions: int) -> float:
    """As `gradcheck`, of a loss."""
    rng = np.random.default_rng(seed)
    run = Run(Context(_Noise(rng), seed), "loss", (), None, 0)
    total = 1.7 * len(z)  # not that of these samples: the caller says
    given = z.copy(), target.copy()
    value, gz = loss(z, target, total, run)
    if not np.array_equal(z, given[0]) or not np.array_equal(target, given[1]):
        raise AssertionError(f"{loss!r}: it overwrote its {'targets' if np.array_equal(z, given[0]) else 'input'}")
    if gz.shape != z.shape or gz.dtype != z.dtype or np.shares_memory(gz, z):
        raise AssertionError(f"{loss!r}: the gradient must be a new {z.dtype}{z.shape}, given {gz.dtype}{gz.shape}")
    again, gz_again = loss(z, target, total, run)
    if again != value or not np.array_equal(gz, gz_again):
        raise AssertionError(
            f"{loss!r}: another value or gradient the second time: does it use what was in its memory?"
        )
    half = len(z) // 2
    parts = [loss(z[rows], target[rows], total, run) for rows in (slice(half), slice(half, None))]
    sums = sum(part for part, _ in parts), np.concatenate([g for _, g in parts])
    if not np.allclose(sums[0], value, NEAR, NEAR) or not np.allclose(sums[1], gz, NEAR, NEAR):
        raise AssertionError(f"{loss!r}: of a batch in two parts, values and gradients are not those of the whole")
    worst = 0.0
    for _ in range(directions):
        d = rng.standard_normal(z.shape)
        d /= np.sqrt((d * d).sum())
        numerical = (loss(z + eps * d, target, total, run)[0] - loss(z - eps * d, target, total, run)[0]) / (2 * eps)
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
