"""Convolution with Winograd's minimal filtering along one axis: down the columns of the image; along rows it is direct.

Tiles of m rows of outputs are settled by m + r - 1 = 6 points a column, for a kernel of r rows (nn/layers/winograd.py):

    Y = A^T [ (G w) * (B^T x) ]              * is a convolution along rows, summed over input channels

so a 3 x 3 kernel costs 18 multiplications a channel for four outputs instead of 36. Both axes would save more, but here
nothing is gathered and scattered: rows of channels-last images are contiguous, so the transforms are products of small
matrices with whole rows, and what is under the kernel is a piece of a transformed row: an overlapping view. That is
faster up to some 50 channels. The rounding error in float32 is at most twice that of the direct sum.

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

PAIR = 2  # tiles that one product transforms: its matrix is a third zeros, but wide enough for BLAS
VALUES = 1 << 19  # of transformed images at a time, about
LIMIT = 1 << 20  # of one transformed image


def pays(geometry, channels: int, out_channels: int) -> bool:
    """Whether this takes less time than the direct sum, both counted in multiplications, those of transforms double."""
    (kh, kw), (oh, ow), width = geometry.kernel, geometry.out, geometry.padded[1]
    if geometry.dilation != (1, 1) or geometry.groups > 1 or geometry.adjoint() is None or not 3 <= kh < SIDE:
        return False
    rows, m = _slot_rows(geometry), step(kh)
    if rows * width * max(channels, out_channels) > LIMIT or 2 * math.prod(geometry.size) > 3 * oh * ow:
        return False
    transforms = rows * width * channels * (PAIR * m + kh - 1) + oh * ow * out_channels * PAIR * SIDE
    products = rows * ow * kw * channels * out_channels
    return products + 2 * transforms < oh * ow * kh * kw * channels * out_channels


def forward(x, weight, bias, y, geometry, run) -> None:
    """Write the convolution of x with weight, plus bias if there is one, to y."""
    kernels = _transform_weight(weight, run)
    for images in _pieces(len(x), geometry, x.shape[3]):
        piece = y[images]
        slots = _to_slots(x[images], geometry, run)
        _convolve_rows(slots, kernels, piece, geometry, run)
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
    for images in _pieces(len(x), adjoint, out_channels):
        slots = _to_slots(gy[images], adjoint, run)
        if gx is not None:
            _convolve_rows(slots, kernels, gx[images], adjoint, run)
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
    """What takes rows of an image to slots, and slots to rows of outputs: lists of (to rows, from rows, matrix).

    Each is one banded matrix for the whole axis, here cut into blocks of PAIR tiles; rows of padding have no columns.
    """
    m = step(taps)
    a, b, _ = cook_toom(m, taps)
    to_slots, to_outputs = [], []
    for t in range(0, -(-outputs // m), PAIR):
        count = min(PAIR, -(-outputs // m) - t)
        matrix = np.zeros((count * SIDE, (count - 1) * m + SIDE), dtype)
        for i in range(count):
            matrix[i * SIDE : (i + 1) * SIDE, i * m : i * m + SIDE] = b.T
        start = t * m - padding  # the image's row that belongs to the first column
        seen = slice(max(0, start), min(size, start + matrix.shape[1]))
        slots, rows = slice(t * SIDE, (t + count) * SIDE), slice(t * m, min(outputs, (t + count) * m))
        to_slots.append((slots, seen, matrix[:, seen.start - start : seen.stop - start].copy()))
        to_outputs.append((rows, slots, np.kron(np.eye(count), a.T)[: rows.stop - rows.start].astype(dtype)))
    return to_slots, to_outputs


@cache
def _kernel_transform(taps: int, dtype) -> np.ndarray:
    """G: (SIDE, taps)."""
    return cook_toom(step(taps), taps)[2].astype(dtype)


def _axis(geometry, dtype) -> tuple[list, list]:
    return _transforms(geometry.size[0], geometry.out[0], geometry.padding[0][0], geometry.kernel[0], dtype)


def _slot_rows(geometry) -> int:
    """Rows of a transformed image: SIDE for each row of tiles."""
    return SIDE * -(-geometry.out[0] // step(geometry.kernel[0]))


def _pieces(n: int, geometry, channels: int):
    """Slices of as many images as make VALUES when transformed, at least one."""
    images = max(1, VALUES // (_slot_rows(geometry) * geometry.padded[1] * channels))
    for a in range(0, n, images):
        yield slice(a, min(n, a + images))


def _transform_weight(weight, run) -> np.ndarray:
    """G w, as matrices that multiply patches of a row: (kh, kw, c, o) to (SIDE, kw c, o)."""
    kh, kw, c, o = weight.shape
    kernels = run.scratch("winograd weights", (SIDE, kw * c, o), weight.dtype)
    np.matmul(_kernel_transform(kh, weight.dtype), weight.reshape(kh, -1), out=kernels.reshape(SIDE, -1))
    return kernels


def _to_slots(x, geometry, run) -> np.ndarray:
    """B^T x down the columns, with zeros left and right: (n, slot rows, padded width, channels)."""
    n, _, w, c = x.shape
    slots = run.scratch("winograd slots", (n, _slot_rows(geometry), geometry.padded[1], c), x.dtype)
    flat, left = slots.reshape(*slots.shape[:2], -1), geometry.padding[1][0] * c
    flat[:, :, :left] = 0
    flat[:, :, left + w * c :] = 0
    for to, source, matrix in _axis(geometry, x.dtype)[0]:
        np.matmul(matrix, x[:, source].reshape(n, -1, w * c), out=flat[:, to, left : left + w * c])
    return slots


def _convolve_rows(slots, kernels, y, geometry, run) -> None:
    """Products of every slot with its kernel, and A^T of them: into y, the outputs of these images."""
    n, _, ow, o = y.shape
    products = run.scratch("winograd products", (n, slots.shape[1], ow, o), y.dtype)
    np.matmul(_patches(slots, ow, geometry), kernels[:, None], out=_patches(products, ow))
    flat = products.reshape(n, -1, ow * o)
    for to, source, matrix in _axis(geometry, y.dtype)[1]:
        np.matmul(matrix, flat[:, source], out=y[:, to].reshape(n, -1, ow * o))


def _spread(gy, geometry, run) -> np.ndarray:
    """A gy down the columns: (n, slot rows, width, channels)."""
    n, _, ow, o = gy.shape
    spread = run.scratch("winograd products", (n, _slot_rows(geometry), ow, o), gy.dtype)
    flat = spread.reshape(n, -1, ow * o)
    for source, to, matrix in _axis(geometry, gy.dtype)[1]:
        np.matmul(matrix.T, gy[:, source].reshape(n, -1, ow * o), out=flat[:, to])
    return spread


def _add_products(total, slots, spread, geometry, run) -> None:
    """total += patches^T spread, summed over images, tiles and columns; some columns at a time."""
    ow = spread.shape[2]
    patches, values = _patches(slots, ow, geometry).transpose(0, 1, 3, 2), _patches(spread, ow)
    columns = max(1, VALUES // total.size)
    for j in range(0, ow, columns):
        part = slice(j, j + columns)
        product = run.scratch("product", (SIDE, min(columns, ow - j), *total.shape[1:]), total.dtype)
        np.matmul(patches[:, part], values[:, part], out=product)
        total += np.add.reduce(product, axis=1, out=run.scratch("sum", total.shape, total.dtype))


def _patches(slots, columns: int, geometry=None) -> np.ndarray:
    """Matrices for each slot and output column, (SIDE, columns, images and tiles, kw c), a view; one column wide
    if no geometry is given."""
    n, rows, _, c = slots.shape
    _, row, column, item = slots.strides
    width = geometry.kernel[1] if geometry else 1
    return strided(slots, (SIDE, columns, n * rows // SIDE, width * c), (row, column, SIDE * row, item))
