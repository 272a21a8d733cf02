"""Is backward the derivative of forward? One random direction over the input and all parameters together.

For a unit direction d, (L(w + eps d) - L(w - eps d)) / (2 eps) must equal <dL/dw, d>, with L = <y, a random upstream
gradient>. In float64 with eps 1e-5 the two agree to about 1e-9; a wrong term anywhere shows. Costs two passes a
direction, whatever the number of parameters.
"""

from __future__ import annotations

import numpy as np

from nn.layer import Layer
from nn.network import Network


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
        Changes what layers are told, such as `run.common.training`.

    Returns
    -------
    float
        About 1e-9 where backward is right; use a bound of 1e-6. Near a kink (ReLU at 0) try another seed.

    Raises
    ------
    AssertionError
        If forward overwrites its input.
    """
    rng = np.random.default_rng(seed)
    network = Network(layer, x.shape[1:], np.float64)
    w, g = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
    network.layout.initialize(w, seed)
    for _, array in network.layout.items(w):  # zeros would hide a term
        array += 0.1 * rng.standard_normal(array.shape)
    run = network.run(seed=seed)
    run.common.input_gradient = x.dtype.kind == "f"
    if setup:
        setup(run)
    p, gp = network.layout.views(w), network.layout.views(g)

    given = x.copy()
    y, saved = network.forward(p, x, run)
    if not np.array_equal(x, given):
        raise AssertionError(f"{layer!r}: forward overwrote its input")
    upstream = rng.standard_normal(y.shape)
    gx = network.backward(p, gp, upstream.copy(), saved, run)

    def loss(shift: np.ndarray, x_shift: np.ndarray | float) -> float:
        moved = network.layout.views(w + shift)
        return float((network.forward(moved, x + x_shift if gx is not None else x, run)[0] * upstream).sum())

    worst = 0.0
    for _ in range(directions):
        d = np.zeros_like(w)
        for _, array in network.layout.items(d):
            array[...] = rng.standard_normal(array.shape)
        dx = rng.standard_normal(x.shape) if gx is not None else 0.0
        norm = np.sqrt((d * d).sum() + np.sum(np.square(dx)))
        d, dx = d / norm, dx / norm
        numerical = (loss(eps * d, eps * dx) - loss(-eps * d, -eps * dx)) / (2 * eps)
        analytic = float(g @ d) + (float((gx * dx).sum()) if gx is not None else 0.0)
        worst = max(worst, abs(numerical - analytic) / max(abs(numerical), abs(analytic), 1e-8))
    return worst
