"""Convolution with Winograd's minimal filtering along one axis: down the columns of the image; along rows it is direct.

Tiles of m rows of outputs are settled by m + r - 1 = 6 points a column, for a kernel of r rows (nn/layers/winograd.py):

    Y = A^T [ (G w) * (B^T x) ]              * is a convolution along rows, summed over input channels

so a 3 x 3 kernel costs 18 multiplications a channel for four outputs instead of 36. Both axes save more, but here the
transforms are products of small matrices with whole rows, which are contiguous in channels-last images, and what is
under the kernel is a piece of a transformed row. The pieces of outputs that are `spacing` columns from each other are a
matrix, a view. Where channels are many, these are the outputs of one column of all tiles; where they are few, and the
kernel has k columns, every k-th, whose pieces lie one behind the other and fill the rows. That is faster than both axes
up to some 32 channels. The rounding error in float32 is at most twice that of the direct sum.

Backward: gx is a convolution of gy with the flipped kernel, and the kernel's gradient has the same slots of gy as one
of its factors.

Sources: those of nn/layers/winograd.py; Cho and Brand 2017 (views as patches).
"""

from __future__ import annotations

import math

import numpy as np

from nn.layers.im2col import add_bias, flip, strided
from nn.layers.winograd import (
    BATCH,
    SIDE,
    cook_toom_of,
    image_is_larger,
    rows_to_slots,
    slots_to_rows,
    spread_rows,
    step,
)

SMALL = 1_000_000  # multiplications of a product, at most: so OpenBLAS needs no copies of its factors
LIMIT = 1 << 20  # values of one transformed image
FEW = 32  # channels


def cost(geometry, channels: int, out_channels: int) -> float:
    """Multiplications for an image, infinity where this form cannot be used.

    Those of transforms count double, and all 1.15 times: the factors of the products are views.
    """
    adjoint, kh = geometry.adjoint(), geometry.kernel[0]
    if geometry.dilation != (1, 1) or geometry.groups > 1 or adjoint is None or not 3 <= kh < SIDE:
        return math.inf
    own = _multiplications(geometry, channels, out_channels)
    return (2 * own + _multiplications(adjoint, out_channels, channels)) / 3 if image_is_larger(geometry) else own


def _multiplications(geometry, channels: int, out_channels: int) -> float:
    """Those of one direction."""
    kw, ow, rows = geometry.kernel[1], geometry.out[1], SIDE * _tiles(geometry)
    width, spacing = _row(geometry, channels, out_channels)
    if rows * width * max(channels, out_channels) > LIMIT:
        return math.inf
    outputs, both = (width if spacing == kw else ow), channels * out_channels
    images = rows * (outputs * kw * both + 2 * SIDE * (width * channels + ow * out_channels))
    return 1.15 * (images + 2 * SIDE * math.prod(geometry.kernel) * both / BATCH)


def forward(x, weight, bias, y, geometry, pool) -> None:
    """Write the convolution of x with weight, plus bias if there is one, to y."""
    kernels, row = _transform_weight(weight, pool), _row(geometry, x.shape[3], y.shape[3])
    for images in _pieces(len(x), kernels, geometry, row):
        piece = y[images]
        patches = _transform_input(x[images], geometry, row, pool)
        _convolve(patches, kernels, piece, geometry, row, pool)
        if bias is not None:
            add_bias(piece, bias, pool)


def backward(x, gy, weight, gx, geometry, pool, needs_gx: bool, weight_gradient: bool = True) -> np.ndarray | None:
    """Write dLoss/dx to gx, unless that is None, and return the gradient of the weight where it is asked for.

    That is a workspace, and needs no weight.

    gx is the convolution of gy with the flipped kernel. As gy is transformed for it, roles are exchanged for the
    kernel's gradient, unless the image is much larger: x is taken for the gradient of an output, and it comes flipped.
    """
    adjoint, exchanged, (kh, kw) = geometry.adjoint(), not image_is_larger(geometry), geometry.kernel
    flipped = None
    if gx is not None:
        flipped = pool.workspace("flipped", (kh, kw, gy.shape[3], x.shape[3]), gy.dtype)
        flip(weight, flipped, 1)
        if not weight_gradient or not exchanged:
            forward(gy, flipped, None, gx, adjoint, pool)
    if not weight_gradient:
        return None
    gradient = pool.workspace("gradient", (kh, kw, x.shape[3], gy.shape[3]), gy.dtype)
    if exchanged:
        turned = pool.workspace("turned", (kh, kw, gy.shape[3], x.shape[3]), gy.dtype)
        _kernel_gradient(gy, x, turned, flipped, gx, adjoint, pool)
        flip(turned, gradient, 1)
    else:
        _kernel_gradient(x, gy, gradient, None, None, geometry, pool)
    return gradient


def _kernel_gradient(x, gy, gradient, weight, y, geometry, pool) -> None:
    """Write the kernel's gradient; and where y is given, to y the convolution with weight: x is transformed once."""
    kernels = None if y is None else _transform_weight(weight, pool)
    row = _row(geometry, x.shape[3], gy.shape[3])
    kh, kw, c, o = gradient.shape
    total = pool.workspace("winograd weight gradient", (SIDE, kw * c, o), gy.dtype)
    product = pool.workspace("product", total.shape, total.dtype)
    total[...] = 0
    for images in _pieces(len(x), total, geometry, row):
        patches = _transform_input(x[images], geometry, row, pool)
        if y is not None:
            _convolve(patches, kernels, y[images], geometry, row, pool)
        spread = _spread(gy[images], geometry, row, pool)
        for k in range(patches.shape[1]):
            total += np.matmul(patches[:, k].transpose(0, 2, 1), spread[:, k], out=product)
    np.matmul(cook_toom_of(kh, gy.dtype)[2].T, total.reshape(SIDE, -1), out=gradient.reshape(kh, -1))


def _tiles(geometry) -> int:
    """Rows of tiles."""
    return -(-geometry.out[0] // step(geometry.kernel[0]))


def _row(geometry, channels: int, out_channels: int) -> tuple[int, int]:
    """Columns of a transformed row, and the spacing of those whose patches make a matrix: a divisor of the columns.

    They are those of the padded image, and zeros where that makes the kernel's width a divisor.
    """
    kw, width = geometry.kernel[1], geometry.padded[1]
    rounded = -(-width // kw) * kw
    few = max(channels, out_channels) <= FEW and rounded <= 1.25 * geometry.out[1]
    return (rounded, kw) if few else (width, width)


def _pieces(n: int, kernels, geometry, row):
    """Slices of as many images as make products that are SMALL, at least one."""
    width, spacing = row
    images = max(1, SMALL // (_tiles(geometry) * width // spacing * kernels[0].size))
    count = -(-n // images)
    for i in range(count):
        yield slice(n * i // count, n * (i + 1) // count)


def _transform_weight(weight, pool) -> np.ndarray:
    """G w, as matrices that multiply patches of a row: (kh, kw, c, o) to (SIDE, kw c, o)."""
    kh, kw, c, o = weight.shape
    kernels = pool.workspace("winograd weights", (SIDE, kw * c, o), weight.dtype)
    np.matmul(cook_toom_of(kh, weight.dtype)[2], weight.reshape(kh, -1), out=kernels.reshape(SIDE, -1))
    return kernels


def _transform_input(x, geometry, row, pool) -> np.ndarray:
    """B^T x down the columns, as patches: (SIDE, spacing, images and tiles and columns / spacing, kw c), a view.

    Where a row has no output left, a patch may reach into the next row; its product is never used.
    """
    (n, _, _, c), kw, (width, spacing) = x.shape, geometry.kernel[1], row
    shape, spare = (SIDE, n, _tiles(geometry), width, c), kw * c
    flat = pool.workspace("winograd slots", (math.prod(shape) + spare,), x.dtype)
    flat[-spare:] = 0
    slots = flat[:-spare].reshape(shape)
    rows_to_slots(x, slots, geometry, range(shape[2]))
    count, item = slots[0].size // (spacing * c), x.itemsize
    strides = (slots.strides[0], c * item, spacing * c * item, item)
    return strided(flat, (SIDE, min(spacing, geometry.out[1]), count, kw * c), strides)


def _convolve(patches, kernels, y, geometry, row, pool) -> None:
    """Products of every slot with its kernel, and A^T of them: into y, the outputs of these images."""
    n, _, ow, o = y.shape
    products = pool.workspace("winograd products", (SIDE, n, _tiles(geometry), row[0], o), y.dtype)
    np.matmul(patches, kernels[:, None], out=_columns(products, ow, row))
    slots_to_rows(products, y, geometry, range(products.shape[2]))


def _spread(gy, geometry, row, pool) -> np.ndarray:
    """A gy down the columns, zeros on the right, in the order of the patches."""
    n, _, ow, o = gy.shape
    spread = pool.workspace("winograd products", (SIDE, n, _tiles(geometry), row[0], o), gy.dtype)
    spread_rows(gy, spread, geometry, range(spread.shape[2]))
    return _columns(spread, ow, row)


def _columns(rows, columns: int, row) -> np.ndarray:
    """Rows (SIDE, n, tiles, width, channels) in the order of the patches: a view."""
    spacing = row[1]
    return rows.reshape(SIDE, -1, spacing, rows.shape[-1])[:, :, : min(spacing, columns)].swapaxes(1, 2)
