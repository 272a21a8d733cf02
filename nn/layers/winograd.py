"""Convolution with small kernels by Winograd's minimal filtering: fewer multiplications for a few more additions.

A tile of m x m outputs is a product of polynomials, settled by m + r - 1 points a side for a kernel of r x r; here six:

    Y = A^T [ (G w G^T) * (B^T x B) ] A          * is elementwise, and summed over input channels

so m x m outputs of a 3 x 3 kernel (m = 4) cost 36 multiplications a channel instead of 144, those of a 5 x 5 kernel
(m = 2) 36 instead of 100. Over channels the elementwise products are 36 matrix products. The transforms are products as
well, of small matrices with views of the data: down the columns with whole rows of the image, as these are contiguous,
then along the rows with the channels of a tile, or of two where channels are few. So nothing is gathered into tiles or
scattered from them. The kernel, which is small, is transformed on both axes at once, by G (x) G.

The points are 0, +-2/3, +-3/2 and infinity. In float32 the rounding error of y and gx is about three times that of the
direct sum, of gW up to six times (root mean square, some 1e-6 of the values' standard deviation); the usual points 0,
+-1, +-2 and infinity double it. Both dtypes use the same code.

Sources: Toom 1963 and Cook 1966 (the transforms); Winograd 1980; Lavin and Gray 2016 (for networks); Barabasz et al.
2020 (points and their error).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from nn.core.gradients import Product
from nn.layers.im2col import add_bias, strided

POINTS = (0.0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)  # and infinity
SIDE = len(POINTS) + 1  # of the tiles that are transformed
SLOTS = SIDE * SIDE
MIN_TILES = 128  # tiles at a time; more where there are so few channels that a slot has less than VALUES values
VALUES = 8192
FEW = 64  # channels
GAP = 16  # values between slots of a kernel: where these are powers of two, a cache has few places for all of them
BATCH = 16  # images that share a transformed kernel, for what it costs


def cost(geometry, channels: int, out_channels: int) -> float:
    """Multiplications for an image, infinity where this form cannot be used.

    Those of the transforms count 1.3 times, as their matrices are small, and all of it 1.05 times: where OpenBLAS has
    no kernels for small matrices (before AVX-512), a close choice would be the slower one.
    """
    kh, kw = geometry.kernel
    if geometry.adjoint() is None or geometry.dilation != (1, 1) or geometry.groups > 1:
        return math.inf
    if not (3 <= kh < SIDE and 3 <= kw < SIDE):
        return math.inf
    outputs, both = step(kh) * step(kw), channels * out_channels
    tiles = math.prod(_tiles(geometry)) * (both + 1.3 * (SLOTS * channels + outputs * out_channels))
    return 1.05 * SLOTS * (tiles + 2 * kh * kw * both / BATCH)


def forward(x, weight, bias, y, geometry, pool) -> None:
    """Write the convolution of x with weight, plus bias if there is one, to y."""
    kernels = _transform_weight(weight, _kernel_transform(geometry.kernel, x.dtype), pool)
    for images, rows in _pieces(len(x), geometry, x.shape[3]):
        tiles = _transform_input(x[images], rows, geometry, pool)
        _convolve(tiles, kernels, y[images], rows, geometry, pool)
        if bias is not None:
            m = step(geometry.kernel[0])
            add_bias(y[images, rows.start * m : rows.stop * m], bias, pool)


def backward(x, gy, weight, gx, geometry, pool, needs_gx: bool, weight_gradient: bool = True) -> Product | None:
    """Write dLoss/dx to gx, unless that is None, and return the gradient of the weight where it is asked for.

    That needs no weight. gx is the convolution of gy with the flipped kernel. As gy is transformed for it, roles are
    exchanged for the kernel's gradient: x is taken for the gradient of an output, and it comes flipped. Where the image
    is much larger than the output, gx takes fewer tiles by the transposed chain.
    """
    to_kernel, exchanged = _kernel_transform(geometry.kernel, gy.dtype), not image_is_larger(geometry)
    if exchanged:
        geometry, to_kernel = geometry.adjoint(), to_kernel[:, ::-1]
    channels, out_channels = x.shape[3], gy.shape[3]
    if gx is not None:  # a contiguous transpose makes the products faster, and before the transform it is smaller
        transposed = pool.workspace("transposed", (*weight.shape[:2], out_channels, channels), weight.dtype)
        transposed[...] = weight.swapaxes(2, 3)
        kernels = _transform_weight(transposed, to_kernel, pool)
    total = pool.workspace("winograd weight gradient", (SIDE, SIDE, channels, out_channels), gy.dtype)
    product = total  # of the first tiles; the others' are added
    for images, rows in _pieces(len(x), geometry, channels):
        if exchanged:
            gy_tiles = _transform_input(gy[images], rows, geometry, pool)
            if gx is not None:
                _convolve(gy_tiles, kernels, gx[images], rows, geometry, pool)
        else:
            gy_tiles = _spread(gy[images], rows, geometry, pool)
            if gx is not None:
                _scatter(gy_tiles, kernels, gx[images], geometry, pool)
        if weight_gradient:
            x_tiles = (_spread if exchanged else _transform_input)(x[images], rows, geometry, pool)
            np.matmul(x_tiles.swapaxes(2, 3), gy_tiles, out=product)
            if product is not total:
                total += product
            product = pool.workspace("product", total.shape, gy.dtype)
    if not len(x):
        total[...] = 0
    return Product(to_kernel.T, total.reshape(SLOTS, -1)) if weight_gradient else None


@cache
def _kernel_transform(kernel: tuple[int, int], dtype) -> np.ndarray:
    """G (x) G: (slots, taps)."""
    vertical, horizontal = (cook_toom(step(k), k)[2] for k in kernel)
    return np.kron(vertical, horizontal).astype(dtype)


@cache
def axis_transforms(size: int, outputs: int, padding: int, taps: int, tiles: range, dtype) -> tuple[list, list]:
    """Return the transforms of image rows to slots, and of slots to output rows: lists of (tiles, first row, matrix).

    Tiles, counted from the first of `tiles`, that see equally many rows are one item: the first starts at that row,
    each of the others m rows further. The matrix has no columns for padding, nor rows for outputs that do not exist.
    """
    m = step(taps)
    a, b, _ = cook_toom(m, taps)
    to_slots, to_outputs = {}, {}
    for tile in tiles:
        start = tile * m - padding
        to_slots.setdefault((max(0, -start), min(SIDE, size - start)), []).append(tile)
        to_outputs.setdefault(min(m, outputs - tile * m), []).append(tile)
    span = lambda part: slice(part[0] - tiles.start, part[-1] + 1 - tiles.start)
    return (
        [
            (span(part), part[0] * m - padding + above, b.T[:, above:below].astype(dtype))
            for (above, below), part in to_slots.items()
        ],
        [(span(part), part[0] * m, a.T[:rows].astype(dtype)) for rows, part in to_outputs.items()],
    )


def cook_toom(outputs: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return A (points, outputs), B (points, points) and G (points, taps) of one axis.

    G evaluates the kernel's polynomial at the points, divided by N_j = prod of (p_j - p_l) over the other points;
    A does so for the outputs', and row j of B^T has the coefficients of the product of (t - p_l), l not j (Lagrange).
    The last row of each belongs to infinity, where a polynomial's value is its leading coefficient.
    """
    points = np.array(POINTS)
    a, g, b = (np.zeros((SIDE, n)) for n in (outputs, taps, SIDE))
    a[:-1] = points[:, None] ** np.arange(outputs)
    a[-1, -1] = 1
    for j, point in enumerate(points):
        rest = np.delete(points, j)
        g[j] = point ** np.arange(taps) / np.prod(point - rest)
        b[:-1, j] = np.poly(rest)[::-1]
    g[-1, -1] = 1
    b[:, -1] = np.poly(points)[::-1]
    return a, b, g


@cache
def cook_toom_of(taps: int, dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and G for a kernel of that many taps, in the dtype of products."""
    return tuple(matrix.astype(dtype) for matrix in cook_toom(step(taps), taps))


def image_is_larger(geometry) -> bool:
    """Return whether the image has so many more pixels than the output that roles are not exchanged for the kernel."""
    return 2 * math.prod(geometry.size) > 3 * math.prod(geometry.out)


def step(taps: int) -> int:
    """Outputs a side of one tile, for a kernel of that many taps."""
    return SIDE + 1 - taps


def _tiles(geometry) -> tuple[int, int]:
    """How many tiles cover the output, vertically and horizontally."""
    return tuple(-(-n // step(k)) for n, k in zip(geometry.out, geometry.kernel, strict=True))


def _pieces(n: int, geometry, channels: int):
    """Yield (slice of images, range of tile rows): whole images, or even fractions of one; about MIN_TILES tiles."""
    th, tw = _tiles(geometry)
    tiles = max(MIN_TILES, VALUES // channels)
    rows = th if image_is_larger(geometry) else -(-th // -(-th * tw // tiles))
    images = max(1, tiles // (th * tw)) if rows == th else 1
    for a in range(0, n, images):
        for r in range(0, th, rows):
            yield slice(a, min(n, a + images)), range(r, min(th, r + rows))


def _transform_weight(weight, matrix, pool) -> np.ndarray:
    """G w G^T: (kh, kw, c, o) to (SIDE, SIDE, c, o)."""
    kh, kw, c, o = weight.shape
    transformed = pool.workspace("winograd weights", (SLOTS, c * o + GAP), weight.dtype)[:, : c * o]
    np.matmul(matrix, weight.reshape(kh * kw, c * o), out=transformed)
    return transformed.reshape(SIDE, SIDE, c, o)


def _transform_input(x, rows, geometry, pool) -> np.ndarray:
    """B^T x B for every tile of these rows: (SIDE, SIDE, tiles, channels)."""
    (n, _, _, c), m = x.shape, step(geometry.kernel[1])
    th, tw = len(rows), _tiles(geometry)[1]
    half = pool.workspace("winograd rows", (SIDE, n, th, (tw - 1) * m + SIDE, c), x.dtype)
    rows_to_slots(x, half, geometry, rows)
    group, _, matrix = _neighbours(geometry.kernel[1], tw, c, x.dtype)
    sv, sn, sy, sx, sc = half.strides
    windows = strided(half, (SIDE, n, th, tw // group, len(matrix), c), (sv, sn, sy, group * m * sx, sx, sc))
    tiles = pool.workspace("winograd tiles", (SIDE, n, th, tw // group, group * SIDE, c), x.dtype)
    np.matmul(matrix.T, windows, out=tiles)
    return _by_slot(tiles)


def _convolve(tiles, kernels, y, rows, geometry, pool) -> None:
    """Products of every slot with its kernel, and A^T of them A: into y, the outputs of these rows."""
    (n, _, _, o), m = y.shape, step(geometry.kernel[1])
    th, tw = len(rows), _tiles(geometry)[1]
    products = pool.workspace("winograd products", (SIDE, SIDE, n, th, tw, o), y.dtype)
    np.matmul(tiles, kernels, out=products.reshape(SIDE, SIDE, -1, o))
    half = pool.workspace("winograd rows", (SIDE, n, th, tw * m, o), y.dtype)
    matrix = cook_toom_of(geometry.kernel[1], y.dtype)[0].T
    np.matmul(matrix, products.transpose(0, 2, 3, 4, 1, 5), out=half.reshape(SIDE, n, th, tw, m, o))
    slots_to_rows(half, y, geometry, rows)


def _spread(gy, rows, geometry, pool) -> np.ndarray:
    """A gy A^T for every tile of these rows: (SIDE, SIDE, tiles, channels)."""
    (n, _, _, o), m = gy.shape, step(geometry.kernel[1])
    th, tw = len(rows), _tiles(geometry)[1]
    half = pool.workspace("winograd rows", (SIDE, n, th, tw * m, o), gy.dtype)
    spread_rows(gy, half, geometry, rows)
    group, matrix, _ = _neighbours(geometry.kernel[1], tw, o, gy.dtype)
    products = pool.workspace("winograd products", (SIDE, n, th, tw // group, group * SIDE, o), gy.dtype)
    np.matmul(matrix, half.reshape(SIDE, n, th, tw // group, group * m, o), out=products)
    return _by_slot(products)


def _scatter(gy_tiles, kernels, gx, geometry, pool) -> None:
    """Products of every slot with its kernel, and B of them B^T, overlapping tiles added: into gx, whole images."""
    (n, h, w, c), (th, tw) = gx.shape, _tiles(geometry)
    tiles = pool.workspace("winograd tiles", (SIDE, n, th, tw * SIDE, c), gx.dtype)
    np.matmul(gy_tiles, kernels, out=_by_slot(tiles))
    vertical, horizontal = (_scattering(*axis, gx.dtype) for axis in geometry.axes)
    half = pool.workspace("winograd rows", (n, SIDE, th, w, c), gx.dtype)
    np.matmul(horizontal.reshape(w, -1), tiles, out=half.swapaxes(0, 1))
    matrix = vertical.swapaxes(1, 2).reshape(h, -1)
    np.matmul(matrix, half.reshape(n, SIDE * th, w * c), out=gx.reshape(n, h, w * c))


@cache
def _neighbours(taps: int, tiles: int, channels: int, dtype) -> tuple[int, np.ndarray, np.ndarray]:
    """Return how many tiles of a row are transformed together, and A (slots, outputs) and B (columns, slots) of these.

    Two, where channels are few: then one larger product is faster, in spite of its zeros.
    """
    group, m = (2 if tiles % 2 == 0 and channels < FEW else 1), step(taps)
    columns = (group - 1) * m + SIDE
    b = _scattering(columns, group * m, 0, taps, dtype).reshape(columns, -1)
    return group, np.kron(np.eye(group), cook_toom(m, taps)[0]).astype(dtype), b


@cache
def _scattering(size: int, outputs: int, padding: int, taps: int, dtype) -> np.ndarray:
    """Return B of every tile, where the tile is in the image: (size, tiles, slots)."""
    m, tiles = step(taps), -(-outputs // step(taps))
    whole = np.zeros(((tiles - 1) * m + SIDE, tiles, SIDE), dtype)
    for tile in range(tiles):
        whole[tile * m : tile * m + SIDE, tile] = cook_toom(m, taps)[1]
    return whole[padding : padding + size]


def _by_slot(tiles) -> np.ndarray:
    """Rows of tiles (SIDE, ..., tiles SIDE, channels) as (SIDE, SIDE, tiles, channels): a view."""
    return tiles.reshape(SIDE, -1, SIDE, tiles.shape[-1]).swapaxes(1, 2)


# ----------------------------------------------------------------------- one axis, also for winograd_rows


def rows_to_slots(x, slots, geometry, tiles: range) -> None:
    """Transform the columns of x, B^T x, for rows of tiles: into slots (SIDE, n, tiles, columns, c), zero-padded."""
    w, c, left = *x.shape[2:], geometry.padding[1][0]
    slots[:, :, :, :left] = 0
    slots[:, :, :, left + w :] = 0
    target = slots.reshape(*slots.shape[:3], -1)[..., left * c : (left + w) * c].transpose(1, 2, 0, 3)
    for part, first, matrix in axis_transforms(*geometry.axes[0], tiles, x.dtype)[0]:
        np.matmul(matrix, _windows(x, part, first, matrix.shape[1], geometry), out=target[:, part])


def slots_to_rows(slots, y, geometry, tiles: range) -> None:
    """Write A^T of slots (SIDE, n, tiles, columns, o), of which the first count, to the rows of y."""
    source = slots.reshape(*slots.shape[:3], -1)[..., : y.shape[2] * y.shape[3]].transpose(1, 2, 0, 3)
    for part, first, matrix in axis_transforms(*geometry.axes[0], tiles, y.dtype)[1]:
        np.matmul(matrix, source[:, part], out=_windows(y, part, first, len(matrix), geometry))


def spread_rows(gy, slots, geometry, tiles: range) -> None:
    """Transform the columns of gy, A gy, for rows of tiles: into slots (SIDE, n, tiles, columns, o), zero-padded."""
    used = gy.shape[2] * gy.shape[3]
    slots = slots.reshape(*slots.shape[:3], -1)
    slots[..., used:] = 0
    target = slots[..., :used].transpose(1, 2, 0, 3)
    for part, first, matrix in axis_transforms(*geometry.axes[0], tiles, gy.dtype)[1]:
        np.matmul(matrix.T, _windows(gy, part, first, len(matrix), geometry), out=target[:, part])


def _windows(image, tiles: slice, first: int, rows: int, geometry) -> np.ndarray:
    """The rows of each tile, (n, tiles, rows, values of a row): a view in which tiles may overlap."""
    sn, sy, _, item = image.strides
    shape = len(image), tiles.stop - tiles.start, rows, sy // item
    return strided(image, shape, (sn, step(geometry.kernel[0]) * sy, sy, item), first * sy)
