"""Convolution: every algorithm against the definition written as loops, PyTorch, and the errors of wrong geometry."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import check_contract, check_micro_batches, one_pass

from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Sequential, ShapeError
from nn.core.network import Network
from nn.layers import im2col, winograd, winograd_rows
from nn.layers.activations import ReLU
from nn.layers.convolution import Conv2d, Geometry

ALL = pytest.mark.parametrize("algorithm", [im2col, winograd, winograd_rows], ids=["im2col", "winograd", "rows"])


class Forced(Conv2d):
    """A convolution by a given algorithm, whatever the sizes."""

    def __init__(self, algorithm, *arguments, **options):
        super().__init__(*arguments, **options)
        self._algorithm = algorithm

    def algorithm(self, geometry, out_channels=None):
        return self._algorithm


def sample(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def by_definition(layer, x, W, b, gy):
    """y, gx, gW and gb of one convolution, output by output and tap by tap."""
    geometry = layer.geometry(x.shape[1:3])
    (sh, sw), (dh, dw), groups = geometry.stride, geometry.dilation, geometry.groups
    (top, bottom), (left, right) = geometry.padding
    padded = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    y, gx, gW = np.zeros_like(gy), np.zeros_like(padded), np.zeros_like(W)
    kh, kw, c, o = W.shape
    o //= groups
    for i, j, u, v in np.ndindex(*gy.shape[1:3], kh, kw):
        at = slice(None), i * sh + u * dh, j * sw + v * dw
        for g in range(groups):
            ins, outs = slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)
            y[:, i, j, outs] += padded[(*at, ins)] @ W[u, v, :, outs]
            gx[(*at, ins)] += gy[:, i, j, outs] @ W[u, v, :, outs].T
            gW[u, v, :, outs] += padded[(*at, ins)].T @ gy[:, i, j, outs]
    h, w = x.shape[1:3]
    return y + b, gx[:, top : top + h, left : left + w], gW, gy.sum(axis=(0, 1, 2))


def compare_with_definition(layer, x, seed=0):
    r = one_pass(layer, x, seed)
    b = r.w.get("b", np.zeros(layer.out_channels))
    y, gx, gW, gb = by_definition(layer, x, r.w["W"], b, r.gy)
    pairs = [(r.y, y), (r.gx, gx), (r.g["W"], gW)] + ([(r.g["b"], gb)] if layer.bias else [])
    for ours, naive in pairs:
        np.testing.assert_allclose(ours, naive, rtol=1e-10, atol=1e-10)


@st.composite
def lowered_cases(draw):
    """A layer of any geometry, and an image that it fits on."""
    two = lambda low, high: draw(st.tuples(st.integers(low, high), st.integers(low, high)))
    kernel, stride, padding, dilation = two(1, 4), two(1, 3), two(0, 4), two(1, 3)
    groups, c, o = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 7])), draw(st.integers(1, 3))
    size = tuple(
        max(1, d * (k - 1) + 1 - 2 * p) + extra
        for d, k, p, extra in zip(dilation, kernel, padding, two(0, 6), strict=True)
    )
    bias = draw(st.booleans())
    layer = Forced(im2col, groups * c, groups * o, kernel, stride, padding, dilation, groups, bias)
    return layer, (draw(st.integers(1, 3)), *size, groups * c)


@settings(max_examples=120, deadline=None)
@given(
    lowered_cases(),
    st.sampled_from([60, 700, 1 << 20]),
    st.sampled_from([0, 4, 99]),
    st.sampled_from([0, 512]),
    st.integers(0, 99),
)
def test_lowering_is_the_definition(case, piece, wide, short, seed):
    """Whatever the geometry, the size of the pieces, how many columns are computed together, how runs are copied."""
    layer, shape = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(im2col, "PIECE", piece)
        patch.setattr(im2col, "OUTPUTS", wide)
        patch.setattr(im2col, "SHORT", short)
        compare_with_definition(layer, sample(shape, seed), seed)


def test_a_kernel_of_one_reads_the_input_where_it_lies():
    x = sample((2, 3, 4, 6))
    ((_, _, columns),) = im2col._columns(x, Geometry((3, 4), (1, 1), groups=2), None)
    assert columns.shape == (2, 24, 3) and np.shares_memory(columns, x)


def test_output_columns_together():
    """As many as fill a product, if they divide the output; 1 x 1 kernels and strided ones always one."""
    together = lambda size, *arguments: im2col._together(
        (layer := Conv2d(*arguments)).specs((*size, arguments[0]))[0]["W"].shape, layer.geometry(size)
    )
    assert together((32, 32), 3, 16, 3, 1, 1) == 2
    assert together((28, 28), 1, 20, 5) == 4
    assert together((30, 30), 1, 20, 5) == 2
    assert together((32, 31), 3, 16, 3, 1, 1) == 1
    assert together((32, 32), 3, 64, 3, 1, 1) == 1
    assert together((32, 32), 3, 16, 3, 2, 1) == together((32, 32), 3, 16, 1) == 1


@settings(max_examples=80, deadline=None)
@given(
    kernel=st.tuples(st.integers(3, 5), st.integers(3, 5)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    extra=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    images=st.integers(1, 3),
    small=st.booleans(),
    bias=st.booleans(),
)
def test_winograd_is_the_definition(kernel, padding, extra, channels, images, small, bias):
    padding = tuple(min(p, k - 1) for p, k in zip(padding, kernel, strict=True))
    layer = Forced(winograd, *channels, kernel, padding=padding, bias=bias)
    size = (max(1, k - 2 * p) + e for k, p, e in zip(kernel, padding, extra, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        if small:  # pieces of a row of tiles
            patch.setattr(winograd, "MIN_TILES", 1)
            patch.setattr(winograd, "VALUES", 1)
        compare_with_definition(layer, sample((images, *size, channels[0])))


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(st.integers(3, 5), st.integers(1, 5)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    extra=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    images=st.integers(1, 3),
    small=st.booleans(),
    bias=st.booleans(),
)
def test_winograd_of_rows_is_the_definition(kernel, padding, extra, channels, images, small, bias):
    padding = tuple(min(p, k - 1) for p, k in zip(padding, kernel, strict=True))
    layer = Forced(winograd_rows, *channels, kernel, padding=padding, bias=bias)
    size = (max(1, k - 2 * p) + e for k, p, e in zip(kernel, padding, extra, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        if small:  # one image at a time
            patch.setattr(winograd_rows, "SMALL", 1)
        compare_with_definition(layer, sample((images, *size, channels[0])))


@pytest.mark.parametrize(
    ("arguments", "size", "algorithm"),
    [
        ((1, 20, 5), (28, 28), im2col),
        ((20, 50, 5), (12, 12), winograd),
        ((32, 50, 3), (14, 8), winograd_rows),
        ((3, 8, 3, 1, "same"), (9, 8), im2col),
        ((3, 8, (2, 4), 1, "same"), (9, 8), im2col),
        ((3, 8, 11, 4, 2), (35, 31), im2col),
        ((6, 6, 3, 1, 1, 1, 6), (7, 9), im2col),
        ((32, 64, 3, 1, 1, 1, 2), (13, 13), im2col),
        ((8, 12, 1), (7, 5), im2col),
        ((8, 12, 1, 2), (7, 5), im2col),
        ((8, 12, 3, 2, 1), (9, 12), im2col),
        ((8, 12, 3, 1, 2, 2), (9, 12), im2col),
        ((192, 128, 3, 1, 1), (12, 15), winograd),
        ((160, 192, 5, 1, 2), (8, 8), winograd),
        ((16, 16, 3, 1, 1), (32, 32), winograd_rows),
        ((24, 32, (3, 5), 1, (0, 2)), (13, 9), winograd_rows),
        ((64, 48, 3, 1, 1), (8, 7), winograd_rows),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_pytorch(arguments, size, algorithm):
    torch = pytest.importorskip("torch")
    layer = Conv2d(*arguments)
    assert layer.algorithm(layer.geometry(size)) is algorithm
    x = sample((3, *size, layer.in_channels))
    r = one_pass(layer, x)
    t = torch.tensor(x.transpose(0, 3, 1, 2).copy(), requires_grad=True)
    W = torch.tensor(r.w["W"].transpose(3, 2, 0, 1).copy(), requires_grad=True)
    b = torch.tensor(r.w["b"].copy(), requires_grad=True)
    y = torch.nn.functional.conv2d(t, W, b, layer.stride, layer.padding, layer.dilation, layer.groups)
    y.backward(torch.tensor(r.gy.transpose(0, 3, 1, 2).copy()))
    images = (0, 2, 3, 1)
    for ours, theirs in (
        (r.y, y.detach().numpy().transpose(images)),
        (r.gx, t.grad.numpy().transpose(images)),
        (r.g["W"], W.grad.numpy().transpose(2, 3, 1, 0)),
        (r.g["b"], b.grad.numpy()),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@ALL
def test_gradient_and_contract(algorithm):
    layer = Forced(algorithm, 4, 5, 3, padding=1)
    x = sample((3, 9, 6, 4))
    assert gradcheck(layer, x) < 1e-6
    check_contract(layer, x)


@ALL
def test_micro_batches_in_flight(algorithm):
    layers = Forced(algorithm, 3, 4, 3, padding=1), ReLU(), Forced(algorithm, 4, 2, 3)
    check_micro_batches(Sequential(*layers), sample((5, 8, 7, 3)))


def error_of(algorithm, m_channels, kernel):
    """Root mean square and largest error of y, gW and gx in float32, in standard deviations of the true values."""
    layer = Forced(algorithm, m_channels, 32, kernel, padding=kernel // 2)
    x = sample((4, 16, 16, m_channels)).astype(np.float32)
    single = one_pass(layer, x)
    exact = one_pass(
        layer,
        x.astype(np.float64),
        gy=single.gy.astype(np.float64),
        w={k: v.astype(np.float64) for k, v in single.w.items()},
    )
    errors = []
    for ours, true in ((single.y, exact.y), (single.g["W"], exact.g["W"]), (single.gx, exact.gx)):
        off = (ours - true) / true.std()
        errors.append((np.sqrt(np.mean(off**2)), np.abs(off).max()))
    return np.array(errors)


@pytest.mark.parametrize(("channels", "kernel"), [(16, 3), (128, 3), (32, 5)])
def test_rounding_of_winograd_in_float32(channels, kernel):
    """y, gW and gx: at most seven times that of the direct sum, and some 1e-6 of a standard deviation.

    Along one axis, at most two and a half times. It differs with the order in which a processor's matrix product adds:
    the worst of OpenBLAS's kernels (OPENBLAS_CORETYPE) comes to 6.3 and 2.4 times, and 1.7e-6 and 1.9e-5.
    """
    direct = error_of(im2col, channels, kernel)
    for algorithm, times in ((winograd, 7), (winograd_rows, 2.5)):
        fast = error_of(algorithm, channels, kernel)
        assert (fast[:, 0] < times * direct[:, 0]).all(), (algorithm, fast, direct)
        assert (fast[:, 0] < 2e-6).all() and (fast[:, 1] < 2e-5).all(), (algorithm, fast)


def test_points_are_those_that_round_least():
    """A check that the bound above can fail: the classical points are worse by half at least."""
    caches = winograd.cook_toom_of, winograd.axis_transforms, winograd._kernel_transform
    caches += winograd._neighbours, winograd._scattering
    ours = error_of(winograd, 32, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "POINTS", (0.0, 1.0, -1.0, 2.0, -2.0))
        for cached in caches:
            cached.cache_clear()
        classical = error_of(winograd, 32, 3)
    for cached in caches:
        cached.cache_clear()
    assert (classical[:, 0] > 1.5 * ours[:, 0]).all()


@ALL
def test_empty_batch(algorithm):
    """A rank without samples takes part with nothing: gradients are zero, not left as they were."""
    r = one_pass(Forced(algorithm, 3, 4, 3), np.zeros((0, 6, 5, 3)))
    assert r.y.shape == (0, 4, 3, 4) and r.gx.shape == (0, 6, 5, 3)
    assert not r.g["W"].any() and not r.g["b"].any()


def test_first_layer_computes_no_input_gradient():
    def setup(ctx):
        ctx.network_context.input_gradient = False

    assert one_pass(Conv2d(3, 4, 3), sample((2, 6, 5, 3)), setup=setup).gx is None


@ALL
def test_a_step_allocates_nothing_large(algorithm):
    network = Network(Sequential(*(Forced(algorithm, 8, 8, 3, padding=1) for _ in range(2))), (32, 32, 8))
    w, g = network.layout.zeros(np.float32), network.layout.zeros(np.float32)
    network.layout.initialize(w, 0)
    p, gp, ctx = network.layout.views(w), network.layout.views(g), network.context()
    x = sample((16, 32, 32, 8)).astype(np.float32)

    def step():
        y, saved = network.forward(p, x, ctx)
        network.backward(p, gp, y, saved, ctx)

    step(), step()
    tracemalloc.start()
    try:
        step()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 4, f"{peak} bytes in a step on activations of {x.nbytes}"


def test_choice_of_algorithm():
    choose = lambda size, *arguments, **options: (layer := Conv2d(*arguments, **options)).algorithm(
        layer.geometry(size)
    )
    assert choose((32, 32), 128, 128, 3, padding=1) is winograd
    assert choose((8, 8), 256, 256, 3, padding=1) is winograd
    assert choose((32, 32), 64, 64, 3, padding=1) is winograd  # measured: 39 ms a step of 32 images, 49 along rows
    assert choose((16, 16), 64, 128, 3, padding=1) is winograd  # 19 ms, 24
    assert choose((8, 8), 64, 64, 3, padding=1) is winograd  # 2.4 ms, 2.8
    assert choose((16, 16), 32, 32, 3, padding=1) is winograd_rows  # 3.3 ms, 3.5; 4.9 and 4.5 without AVX-512
    assert choose((32, 32), 16, 16, 3, padding=1) is winograd_rows  # 5.8 ms, 4.5: its transforms cost less
    assert choose((14, 8), 32, 50, 3) is winograd_rows  # although the image is much larger than the output
    assert choose((12, 12), 20, 50, 5) is winograd
    assert choose((32, 32), 3, 64, 3, padding=1) is im2col  # transforms would cost more than they save
    assert choose((32, 32), 64, 64, 3, 2, 1) is im2col
    assert choose((32, 32), 64, 64, 3, dilation=2) is im2col
    assert choose((32, 32), 64, 64, 3, padding=1, groups=2) is im2col
    assert choose((32, 32), 64, 64, 1) is im2col
    assert choose((3, 3), 64, 64, 3) is im2col  # one output would pay for a whole tile


def test_shape_and_macs():
    layer = Conv2d(6, 9, (3, 5), stride=(2, 1), padding=(1, 0), groups=3)
    specs, out = layer.specs((11, 9, 6))
    assert out == (6, 5, 9) and specs["W"].shape == (3, 5, 2, 9) and specs["b"].shape == (9,)
    assert specs["W"].decay and not specs["b"].decay
    assert layer.macs((11, 9, 6)) == 6 * 5 * 9 * 3 * 5 * 2
    assert repr(layer) == "Conv2d(6, 9, (3, 5), stride=(2, 1), padding=(1, 0), groups=3)"
    assert Conv2d(3, 4, 3, padding="same").specs((5, 6, 3))[1] == (5, 6, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Conv2d(6, 8, 3, groups=4), "groups=4 .* in_channels=6"),
        (lambda: Conv2d(8, 6, 3, groups=4), "out_channels=6"),
        (lambda: Conv2d(0, 4, 3), "at least 1"),
        (lambda: Conv2d(3, 4, 0), "kernel_size"),
        (lambda: Conv2d(3, 4, (3, 3, 3)), "kernel_size"),
        (lambda: Conv2d(3, 4, 3, stride=0), "stride"),
        (lambda: Conv2d(3, 4, 3, padding=-1), "padding"),
        (lambda: Conv2d(3, 4, 3, padding=1.5), "padding"),
        (lambda: Conv2d(3, 4, 3, stride=2, padding="same"), "stride 1, given"),
    ],
)
def test_impossible_layers(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (Conv2d(3, 4, 7), (6, 9, 3), r"layer 1 \(Conv2d\(3, 4, 7\)\): .* \(7, 7\) .* \(6, 9\)"),
        (Conv2d(3, 4, 3, dilation=4), (8, 9, 3), r"\(9, 9\) does not fit"),
        (Conv2d(3, 4, 3), (6, 9, 4), "expects 3 channels .* given"),
        (Conv2d(3, 4, 3), (12,), "expects images"),
    ],
)
def test_impossible_geometry_names_the_layer(layer, shape, words):
    with pytest.raises(ShapeError, match=words):
        Network(Sequential(ReLU(), layer), shape)
