"""Convolution with Winograd's minimal filtering along one axis: down the columns of the image; along rows it is direct.

Tiles of m rows of outputs are settled by m + r - 1 = 6 points a column, for a kernel of r rows (nn/layers/winograd.py):

    Y = A^T [ (G w) * (B^T x) ]              * is a convolution along rows, summed over input channels

so a 3 x 3 kernel costs 18 multiplications a channel for four outputs instead of 36. Both axes would save more, but here
nothing is gathered and scattered: rows of channels-last images are contiguous, so the transforms are products of small
matrices with whole rows, and what is under the kernel is a piece of a transformed row. Of a kernel of k columns, the
pieces of every k-th output lie one behind the other and are all of the row, so a slot (what belongs to one point, of
all tiles) is a matrix as it lies in memory, and again one column further right, k times in all. That is faster up to
some 50 channels. The rounding error in float32 is at most twice that of the direct sum.

Backward: gx is a convolution of gy with the flipped kernel, and the kernel's gradient has the same slots of gy as one
of its factors.

Sources: those of nn/layers/winograd.py; Cho and Brand 2017 (views as patches).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from nn.layers.im2col import flip, strided
from nn.layers.winograd import SIDE, cook_toom, step

SMALL = 1_000_000  # multiplications of a product, at most: so OpenBLAS needs no copies of its factors
LIMIT = 1 << 20  # values of one transformed image


def pays(geometry, channels: int, out_channels: int) -> bool:
    """Whether this takes less time than the direct sum, both counted in multiplications, those of transforms double."""
    (kh, kw), (oh, ow), width = geometry.kernel, geometry.out, geometry.padded[1]
    if geometry.dilation != (1, 1) or geometry.groups > 1 or geometry.adjoint() is None or not 3 <= kh < SIDE:
        return False
    rows, m = SIDE * _tiles(geometry), step(kh)
    if rows * width * max(channels, out_channels) > LIMIT or 2 * math.prod(geometry.size) > 3 * oh * ow:
        return False
    transforms = rows * width * channels * (2 * m + kh - 1) + oh * ow * out_channels * 2 * SIDE
    products = rows * ow * kw * channels * out_channels
    return products + 2 * transforms < oh * ow * kh * kw * channels * out_channels


def forward(x, weight, bias, y, geometry, run) -> None:
    """Write the convolution of x with weight, plus bias if there is one, to y."""
    kernels = _transform_weight(weight, run)
    for images in _pieces(len(x), kernels, geometry):
        piece = y[images]
        _convolve(_to_slots(x[images], geometry, run), kernels, piece, geometry, run)
        if bias is not None:
            piece += bias


def backward(x, gy, weight, g_weight, gx, geometry, run) -> None:
    """Add to g_weight, and write dLoss/dx to gx; what is None is left out. g_weight needs no weight.

    Roles are exchanged: gy is transformed as an input, x as the gradient of an output, and the kernel is flipped.
    """
    adjoint = geometry.adjoint()
    (kh, kw), channels, out_channels = geometry.kernel, x.shape[3], gy.shape[3]
    flipped = run.scratch("flipped", (kh, kw, out_channels, channels), gy.dtype)
    if gx is not None:
        flip(weight, flipped, 1)
        kernels = _transform_weight(flipped, run)
    total = run.scratch("winograd weight gradient", (SIDE, kw * out_channels, channels), gy.dtype)
    total[...] = 0
    for images in _pieces(len(x), total, adjoint):
        slots = _to_slots(gy[images], adjoint, run)
        if gx is not None:
            _convolve(slots, kernels, gx[images], adjoint, run)
        if g_weight is not None:
            _add_products(total, slots, _spread(x[images], adjoint, run), adjoint, run)
    if g_weight is None:
        return
    np.matmul(_kernel_transform(kh, gy.dtype).T, total.reshape(SIDE, -1), out=flipped.reshape(kh, -1))
    gradient = run.scratch("gradient", g_weight.shape, gy.dtype)
    flip(flipped, gradient, 1)
    run.add(g_weight, gradient)


@cache
def _transforms(size: int, outputs: int, padding: int, taps: int, dtype) -> tuple[list, list]:
    """What takes rows of an image to slots, and slots to rows of outputs: lists of (tiles, first row, matrix).

    Tiles that see as many rows are one entry: the first starts at that row, the others m rows further each. The matrix
    has no columns for rows of padding, nor rows for outputs that are not there.
    """
    m = step(taps)
    a, b, _ = cook_toom(m, taps)
    to_slots, to_outputs = {}, {}
    for tile in range(-(-outputs // m)):
        start = tile * m - padding
        to_slots.setdefault((max(0, -start), min(SIDE, size - start)), []).append(tile)
        to_outputs.setdefault(min(m, outputs - tile * m), []).append(tile)
    span = lambda tiles: slice(tiles[0], tiles[-1] + 1)
    return (
        [
            (span(tiles), tiles[0] * m - padding + above, b.T[:, above:below].astype(dtype))
            for (above, below), tiles in to_slots.items()
        ],
        [(span(tiles), tiles[0] * m, a.T[:rows].astype(dtype)) for rows, tiles in to_outputs.items()],
    )


@cache
def _kernel_transform(taps: int, dtype) -> np.ndarray:
    """G: (SIDE, taps)."""
    return cook_toom(step(taps), taps)[2].astype(dtype)


def _axis(geometry, dtype) -> tuple[list, list]:
    return _transforms(geometry.size[0], geometry.out[0], geometry.padding[0][0], geometry.kernel[0], dtype)


def _tiles(geometry) -> int:
    """Rows of tiles."""
    return -(-geometry.out[0] // step(geometry.kernel[0]))


def _width(geometry) -> int:
    """Columns of a transformed row: those of the padded image, and zeros up to a multiple of the kernel's."""
    return -(-geometry.padded[1] // geometry.kernel[1]) * geometry.kernel[1]


def _pieces(n: int, kernels, geometry):
    """Slices of as many images as make products that are SMALL, at least one."""
    rows = _tiles(geometry) * _width(geometry) // geometry.kernel[1]
    images = max(1, SMALL // (rows * kernels[0].size))
    parts = -(-n // images)
    for i in range(parts):
        yield slice(n * i // parts, n * (i + 1) // parts)


def _transform_weight(weight, run) -> np.ndarray:
    """G w, as matrices that multiply patches of a row: (kh, kw, c, o) to (SIDE, kw c, o)."""
    kh, kw, c, o = weight.shape
    kernels = run.scratch("winograd weights", (SIDE, kw * c, o), weight.dtype)
    np.matmul(_kernel_transform(kh, weight.dtype), weight.reshape(kh, -1), out=kernels.reshape(SIDE, -1))
    return kernels


def _windows(image, tiles: slice, first: int, rows: int, geometry) -> np.ndarray:
    """The rows of each tile, (n, tiles, rows, values of a row): a view in which tiles may overlap."""
    sn, sy, _, item = image.strides
    shape = len(image), tiles.stop - tiles.start, rows, sy // item
    return strided(image, shape, (sn, step(geometry.kernel[0]) * sy, sy, item), first * sy)


def _to_slots(x, geometry, run) -> np.ndarray:
    """B^T x down the columns, zeros left and right: (SIDE, n, tiles, width, channels), flat, with zeros behind it."""
    n, _, w, c = x.shape
    shape, spare = (SIDE, n, _tiles(geometry), _width(geometry) * c), geometry.kernel[1] * c
    flat = run.scratch("winograd slots", (math.prod(shape) + spare,), x.dtype)
    flat[-spare:] = 0
    slots, left = flat[:-spare].reshape(shape), geometry.padding[1][0] * c
    slots[..., :left] = 0
    slots[..., left + w * c :] = 0
    target = slots[..., left : left + w * c].transpose(1, 2, 0, 3)
    for tiles, first, matrix in _axis(geometry, x.dtype)[0]:
        np.matmul(matrix, _windows(x, tiles, first, matrix.shape[1], geometry), out=target[:, tiles])
    return flat


def _convolve(slots, kernels, y, geometry, run) -> None:
    """Products of every slot with its kernel, and A^T of them: into y, the outputs of these images."""
    n, _, ow, o = y.shape
    kw, width = geometry.kernel[1], _width(geometry)
    products = run.scratch("winograd products", (SIDE, n, _tiles(geometry), width * o), y.dtype)
    columns = products.reshape(SIDE, -1, kw, o)
    for k in range(kw):
        np.matmul(_patches(slots, k, columns.shape[1], kernels.shape[1], geometry), kernels, out=columns[:, :, k])
    source = products[..., : ow * o].transpose(1, 2, 0, 3)
    for tiles, first, matrix in _axis(geometry, y.dtype)[1]:
        np.matmul(matrix, source[:, tiles], out=_windows(y, tiles, first, len(matrix), geometry))


def _spread(gy, geometry, run) -> np.ndarray:
    """A gy down the columns, zeros on the right: (SIDE, n, tiles, width, channels)."""
    n, _, ow, o = gy.shape
    spread = run.scratch("winograd products", (SIDE, n, _tiles(geometry), _width(geometry) * o), gy.dtype)
    spread[..., ow * o :] = 0
    target = spread[..., : ow * o].transpose(1, 2, 0, 3)
    for tiles, first, matrix in _axis(geometry, gy.dtype)[1]:
        np.matmul(matrix.T, _windows(gy, tiles, first, len(matrix), geometry), out=target[:, tiles])
    return spread


def _add_products(total, slots, spread, geometry, run) -> None:
    """total += patches^T spread, summed over images, tiles and columns."""
    kw = geometry.kernel[1]
    columns = spread.reshape(SIDE, -1, kw, total.shape[2])
    product = run.scratch("product", total.shape, total.dtype)
    for k in range(kw):
        patches = _patches(slots, k, columns.shape[1], total.shape[1], geometry)
        total += np.matmul(patches.transpose(0, 2, 1), columns[:, :, k], out=product)


def _patches(slots, first: int, count: int, width: int, geometry) -> np.ndarray:
    """What is under the kernel at every kw-th column from `first` on, (SIDE, count, kw c): a view.

    Where a row has no output left, the last one reaches into the next row; nobody takes what becomes of it.
    """
    item = slots.itemsize
    offset = first * width // geometry.kernel[1] * item
    return strided(slots, (SIDE, count, width), (count * width * item, width * item, item), offset)
