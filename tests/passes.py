"""One forward and backward pass of any layer, with everything that the tests compare."""

from types import SimpleNamespace

import numpy as np

from nn.core.network import Network

SMALL = {  # a shape that every model takes, as small as it can be
    "alexnet": (67, 67, 3),
    "cnn": (8, 8, 1),
    "encoder:8,2,1": (6,),
    "googlenet": (32, 32, 3),
    "lenet5": (16, 16, 1),
    "lenet5-1998": (12, 12, 1),
    "lstm:8,2,3": (6,),
    "mlp": (3, 4),
    "overfeat-fast": (71, 71, 3),
    "resnet20": (8, 8, 3),
    "resnet50": (32, 32, 3),
    "transformer:8,2,1,1": (6,),
    "vgg-small": (8, 8, 3),
    "vgg16": (32, 32, 3),
}


def one_pass(layer, x, seed=0, dtype=None, setup=None, gy=None, w=None):
    """y, gx, parameters w and gradients g (dicts by full name) of layer on batch x, with gy random unless given.

    Gradient buffers start as NaN, so that a gradient that is not written shows.
    """
    dtype = dtype or (x.dtype if x.dtype.kind == "f" else np.float64)
    network = Network(layer, x.shape[1:], dtype)
    buffer = network.layout.zeros(dtype)
    network.layout.initialize(buffer, seed)
    rng = np.random.default_rng(seed)
    for name, array in network.layout.items(buffer):
        array += 0.1 * rng.standard_normal(array.shape)  # biases of zero would hide a term
        if w is not None:
            array[...] = w[name]
    gradients = np.full_like(buffer, np.nan)
    ctx = network.context(seed=seed)
    ctx.network_context.input_gradient = x.dtype.kind == "f"
    if setup:
        setup(ctx)
    p, g = network.layout.views(buffer), network.layout.views(gradients)
    y, saved = network.forward(p, x, ctx)
    if gy is None:
        gy = rng.standard_normal(y.shape).astype(dtype)
    kept = gy.copy()
    y_before = y.copy()
    gx = network.backward(p, g, gy, saved, ctx)
    assert np.array_equal(gy, kept), "backward changed gy"
    for name, array in network.layout.items(gradients):
        assert not np.isnan(array).any(), f"the gradient of {name} was not written, or not all of it"
    return SimpleNamespace(
        y=y_before,
        gx=gx,
        gy=gy,
        w=dict(network.layout.items(buffer)),
        g=dict(network.layout.items(gradients)),
        network=network,
        ctx=ctx,
    )


def check_contract(layer, x, setup=None, tolerance=1e-4):
    """What every layer promises: x is left alone, float32 agrees with float64, strides do not matter."""
    before = x.copy()
    double = one_pass(layer, x, setup=setup)
    assert np.array_equal(x, before), "forward or backward changed x"
    if x.dtype.kind == "f":
        strided = np.repeat(x, 2, axis=-1)[..., ::2]
        assert not strided.flags.c_contiguous
        again = one_pass(layer, strided, setup=setup, gy=double.gy)
        np.testing.assert_allclose(again.y, double.y, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(again.gx, double.gx, rtol=1e-12, atol=1e-12)
        x = x.astype(np.float32)
    gy = double.gy.astype(np.float32)
    single = one_pass(layer, x, setup=setup, gy=gy, dtype=np.float32, w=double.w)
    assert single.y.dtype == np.float32
    scale = max(1.0, float(np.abs(double.y).max()))
    np.testing.assert_allclose(single.y, double.y, atol=tolerance * scale, rtol=tolerance)
    pairs = [(single.g[name], double.g[name]) for name in double.g]
    if single.gx is not None:
        assert single.gx.dtype == np.float32
        pairs.append((single.gx, double.gx))
    for ours, theirs in pairs:
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, atol=tolerance * scale, rtol=tolerance)


def check_micro_batches(layer, x, setup=None):
    """Three uneven micro-batches in flight, their backwards in another order, add up to the whole batch."""
    whole = one_pass(layer, x, setup=setup)
    network = whole.network
    buffer = network.layout.zeros(network.dtype)
    for name, array in network.layout.items(buffer):
        array[...] = whole.w[name]
    gradients = np.full_like(buffer, np.nan)
    p, g, ctx = network.layout.views(buffer), network.layout.views(gradients), whole.ctx
    cuts = [slice(0, 1), slice(1, 3), slice(3, len(x))]
    saved = {}
    for i, cut in enumerate(cuts):
        ctx.micro_batch.start = cut.start
        y, saved[i] = network.forward(p, x[cut], ctx)
        np.testing.assert_allclose(y, whole.y[cut], rtol=1e-10, atol=1e-12)
        del y
    for i in (1, 0, 2):
        ctx.micro_batch.accumulate = i != 1
        gx = network.backward(p, g, whole.gy[cuts[i]], saved.pop(i), ctx)
        if gx is not None:
            np.testing.assert_allclose(gx, whole.gx[cuts[i]], rtol=1e-10, atol=1e-12)
    for name, array in network.layout.items(gradients):
        np.testing.assert_allclose(array, whole.g[name], rtol=1e-10, atol=1e-10, err_msg=name)
