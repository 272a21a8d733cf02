"""Pools: the definition written as loops, PyTorch (sizes, ties, divisors), and the errors of wrong geometry."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Sequential, ShapeError
from nn.core.network import Network
from nn.layers.dense import Linear
from nn.layers.pooling import AdaptiveAvgPool2d, AvgPool2d, GlobalAvgPool2d, GlobalMaxPool2d, MaxPool2d
from nn.layers.reshaping import Flatten

EVERY = pytest.mark.parametrize(
    "layer",
    [
        MaxPool2d(2),
        MaxPool2d(3, stride=2, padding=1),
        MaxPool2d((2, 3), stride=3, ceil_mode=True),
        AvgPool2d(2),
        AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        AdaptiveAvgPool2d((3, 2)),
        GlobalAvgPool2d(),
        GlobalMaxPool2d(),
    ],
    ids=repr,
)


def sample(shape=(3, 7, 8, 2), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def windows(layer, size):
    """For each output position the rows and columns of its window that are inside the image."""
    for i, j in np.ndindex(layer.out_size(size)):
        rows, columns = (
            range(max(0, k * s - p), min(n, k * s - p + w))
            for k, s, p, w, n in zip((i, j), layer.stride, layer.padding, layer.kernel_size, size, strict=True)
        )
        yield i, j, rows, columns


@st.composite
def moving(draw):
    """Arguments of a pool with a moving kernel, and a batch that it fits on."""
    two = lambda low, high: draw(st.tuples(st.integers(low, high), st.integers(low, high)))
    kernel, stride = two(1, 4), two(1, 4)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    size = tuple(max(1, k - 2 * p) + e for k, p, e in zip(kernel, padding, two(0, 6), strict=True))
    shape = draw(st.integers(1, 3)), *size, draw(st.integers(1, 3))
    return (kernel, stride, padding, draw(st.booleans())), shape


@settings(max_examples=100, deadline=None)
@given(moving(), st.booleans(), st.integers(0, 99))
def test_max_is_the_definition(case, ties, seed):
    """Ties (small whole numbers) go to the first value in reading order."""
    arguments, shape = case
    layer, x = MaxPool2d(*arguments), sample(shape, seed)
    x = np.round(x) if ties else x
    r = one_pass(layer, x)
    y, gx = np.full_like(r.y, np.nan), np.zeros_like(x)
    for i, j, rows, columns in windows(layer, shape[1:3]):
        for n, c in np.ndindex(shape[0], shape[3]):
            best = max((x[n, a, b, c], -a, -b) for a in rows for b in columns)
            y[n, i, j, c] = best[0]
            gx[n, -best[1], -best[2], c] += r.gy[n, i, j, c]
    np.testing.assert_array_equal(r.y, y)
    np.testing.assert_allclose(r.gx, gx, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(moving(), st.integers(0, 99))
def test_average_is_the_definition(case, seed):
    """Without padding in the count; test_pytorch has the other."""
    arguments, shape = case
    layer, x = AvgPool2d(*arguments, count_include_pad=False), sample(shape, seed)
    r = one_pass(layer, x)
    y, gx = np.full_like(r.y, np.nan), np.zeros_like(x)
    for i, j, rows, columns in windows(layer, shape[1:3]):
        at = slice(None), slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        y[:, i, j] = x[at].mean(axis=(1, 2))
        gx[at] += r.gy[:, i, j][:, None, None] / (len(rows) * len(columns))
    np.testing.assert_allclose(r.y, y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(r.gx, gx, rtol=1e-12, atol=1e-12)


def compare_with_pytorch(torch, layer, function, x):
    r = one_pass(layer, x)
    t = torch.tensor(x.transpose(0, 3, 1, 2).copy(), requires_grad=True)
    y = function(t)
    gy = r.gy.reshape(len(x), *y.shape[2:], -1)
    y.backward(torch.tensor(gy.transpose(0, 3, 1, 2).copy()))
    theirs = y.detach().numpy().transpose(0, 2, 3, 1).reshape(r.y.shape)
    np.testing.assert_allclose(r.y, theirs, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(r.gx, t.grad.numpy().transpose(0, 2, 3, 1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [
        (2, 2, 0, (8, 8)),
        (2, 2, 0, (9, 7)),
        (3, 2, 1, (9, 8)),
        (3, 2, 0, (8, 9)),
        ((2, 3), (1, 2), (1, 1), (8, 9)),
        (2, 3, 1, (9, 9)),
        (20, 1, 0, (21, 20)),  # more places in a window than a byte counts
        (1, 2, 0, (7, 8)),
    ],
)
def test_pytorch_moving(kernel, stride, padding, size, ceil_mode):
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    arguments = kernel, stride, padding, ceil_mode
    x = sample((3, *size, 4))
    largest = lambda t: F.max_pool2d(t, kernel, stride, padding, ceil_mode=ceil_mode)
    compare_with_pytorch(torch, MaxPool2d(*arguments), largest, x)
    compare_with_pytorch(torch, MaxPool2d(*arguments), largest, np.round(x))
    for count in (True, False):
        mean = lambda t, count=count: F.avg_pool2d(t, kernel, stride, padding, ceil_mode, count)
        compare_with_pytorch(torch, AvgPool2d(*arguments, count), mean, x)


def test_pytorch_adaptive_and_global():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    x = sample((3, 7, 9, 4))
    for size in (1, 2, 3, (4, 7), 9):  # 9 rows out of 7: windows overlap
        mean = lambda t, size=size: F.adaptive_avg_pool2d(t, size)
        compare_with_pytorch(torch, AdaptiveAvgPool2d(size), mean, x)
    compare_with_pytorch(torch, GlobalAvgPool2d(), lambda t: F.adaptive_avg_pool2d(t, 1), x)
    compare_with_pytorch(torch, GlobalMaxPool2d(), lambda t: F.adaptive_max_pool2d(t, 1), np.round(x))


@EVERY
def test_gradient_and_contract(layer):
    assert gradcheck(layer, sample()) < 1e-6
    check_contract(layer, sample())


@EVERY
def test_micro_batches_in_flight(layer):
    features = int(np.prod(layer.specs((7, 8, 2))[1]))
    check_micro_batches(Sequential(layer, Flatten(), Linear(features, 3)), sample((6, 7, 8, 2)))


@EVERY
def test_empty_batch(layer):
    r = one_pass(layer, np.zeros((0, 7, 8, 2)))
    assert r.y.shape == (0, *layer.specs((7, 8, 2))[1]) and r.gx.shape == (0, 7, 8, 2)


@pytest.mark.parametrize("channels", [1, 20, 64, 200])
def test_channels_that_are_copied_as_one_item_and_those_that_are_not(channels):
    """Short runs of contiguous channels are copied as single items; images that are not contiguous have none."""
    x, layer = sample((2, 4, 6, channels)), MaxPool2d(2)
    gy = sample((2, 2, 3, channels), 1)
    expected = x.reshape(2, 2, 2, 3, 2, channels).max(axis=(2, 4))
    plain = one_pass(layer, x, gy=gy)
    assert (plain.y == expected).all()
    assert (plain.gx.reshape(2, 2, 2, 3, 2, channels).sum(axis=(2, 4)) == gy).all()
    turned = one_pass(layer, np.ascontiguousarray(x.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0), gy=gy)
    assert (turned.y == plain.y).all() and (turned.gx == plain.gx).all()


def test_padding_never_wins():
    assert (one_pass(MaxPool2d(3, stride=2, padding=1), -1 - np.abs(sample())).y <= -1).all()


def test_repr():
    assert repr(MaxPool2d(3, 2, 1, True)) == "MaxPool2d(3, stride=2, padding=1, ceil_mode=True)"
    assert repr(AvgPool2d((2, 3), count_include_pad=False)) == "AvgPool2d((2, 3), count_include_pad=False)"


@pytest.mark.parametrize("pool", [MaxPool2d, AvgPool2d])
def test_impossible_geometry_names_the_layer(pool):
    with pytest.raises(ShapeError, match=rf"layer 1 \({pool.__name__}\(5\)\): .*\(5, 5\).*\(4, 8\)"):
        Network(Sequential(pool(1), pool(5)), (4, 8, 2))
    with pytest.raises(ShapeError, match="expects images"):
        Network(Sequential(pool(2)), (12,))
    with pytest.raises(ValueError, match="more than half the kernel"):
        pool(3, padding=2)
    with pytest.raises(ValueError, match="stride"):
        pool(3, stride=0)
