"""Is backward the derivative of forward? One random direction over the input and all parameters together.

For a unit direction d, (L(w + eps d) - L(w - eps d)) / (2 eps) must equal <dL/dw, d>, with L = <y, a random upstream
gradient>. In float64 with eps 1e-5 the two agree to about 1e-9; a wrong term anywhere shows. Costs two passes a
direction, whatever the number of parameters.

Gradients start as noise, once to be written and once to be added to, as for the first micro-batch of a step and those
after it: a backward that always adds, always writes or leaves something out is caught. So is one that computes
something else in two halves, input gradients first: both must give the same bits.
"""

from __future__ import annotations

import numpy as np

from nn.core.layer import Layer
from nn.core.network import Network


def gradcheck(layer: Layer, x: np.ndarray, seed: int = 0, eps: float = 1e-5, directions: int = 3, setup=None) -> float:
    """The largest relative difference between analytic and numerical directional derivative.

    Parameters
    ----------
    layer : Layer
    x : array (N, *in_shape)
        float64; an integer array (ids) is not perturbed.
    seed : int
        Of parameters, upstream gradient and directions.
    directions : int
        How many directions to try; the worst counts.
    setup : callable (Run) or None
        Changes what layers are told, such as `run.micro_batch.training`.

    Returns
    -------
    float
        About 1e-9 where backward is right; use a bound of 1e-6. Near a kink (ReLU at 0) try another seed.

    Raises
    ------
    AssertionError
        If forward overwrites its input, or backward in two halves is not backward.
    """
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
    given = x.copy()
    y, _ = network.forward(p, x, run)
    if not np.array_equal(x, given):
        raise AssertionError(f"{layer!r}: forward overwrote its input")
    upstream, noise = rng.standard_normal(y.shape), rng.standard_normal(len(w))

    def gradients(accumulate: bool, halves: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """dL/dw, written over noise or added to it, and dL/dx."""
        g = noise.copy()
        run.micro_batch.accumulate = accumulate
        _, saved = network.forward(p, x, run)
        backward = network.backward_inputs if halves else network.backward
        gx = backward(p, network.layout.views(g), upstream.copy(), saved, run)
        gx = None if gx is None else gx.copy()
        if halves:
            network.backward_weights(run)
        return g - noise if accumulate else g, gx

    found = [gradients(accumulate) for accumulate in (False, True)]
    moves_x = found[0][1] is not None
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
            worst = max(worst, abs(numerical - analytic) / max(abs(numerical), abs(analytic), 1e-8))
    return worst


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
