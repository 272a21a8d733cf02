"""Convolution with small kernels by Winograd's minimal filtering: fewer multiplications for a few more additions.

A tile of m x m outputs is a product of polynomials, settled by m + r - 1 points a side for a kernel of r x r; here six:

    Y = A^T [ (G w G^T) * (B^T x B) ] A          * is elementwise, and summed over input channels

so m x m outputs of a 3 x 3 kernel (m = 4) cost 36 multiplications a channel instead of 144, those of a 5 x 5 kernel
(m = 2) 36 instead of 100. Over channels the elementwise products are 36 matrix products, and the transforms, written as
A (x) A, B (x) B and G (x) G on flattened tiles, are matrix products as well. Every step is linear in x and in w, so
backward is the same chain transposed.

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
from nn.layers.im2col import strided

POINTS = (0.0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)  # and infinity
SIDE = len(POINTS) + 1  # of the tiles that are transformed
SLOTS = SIDE * SIDE
MIN_TILES = 128  # tiles at a time; more where there are so few channels that a slot has less than VALUES values
VALUES = 8192
BATCH = 16  # images that share a transformed kernel, for what it costs


def cost(geometry, channels: int, out_channels: int) -> float:
    """Multiplications for an image, infinity where this form cannot be used.

    Those of the transforms count 1.8 times: their matrices are small, and data goes to and from tiles.
    """
    kh, kw = geometry.kernel
    if not (geometry.stride == geometry.dilation == (1, 1) and geometry.groups == 1):
        return math.inf
    if not (3 <= kh < SIDE and 3 <= kw < SIDE):
        return math.inf
    outputs, both = step(kh) * step(kw), channels * out_channels
    tiles = math.prod(_tiles(geometry)) * (both + 1.8 * (SLOTS * channels + outputs * out_channels))
    return SLOTS * (tiles + 2 * kh * kw * both / BATCH)


def forward(x, weight, bias, y, geometry, pool) -> None:
    """Write the convolution of x with weight, plus bias if there is one, to y."""
    to_outputs, _, _ = _transforms(geometry.kernel, x.dtype)
    mh, mw = map(step, geometry.kernel)
    transformed = _transform_weight(weight, pool)
    for images, rows in _pieces(len(x), geometry, weight.shape[2]):
        tiles = _transform_input(x, images, rows, geometry, pool)
        products = pool.workspace("winograd products", (SLOTS, tiles.shape[1], y.shape[3]), x.dtype)
        np.matmul(tiles, transformed, out=products)
        piece = y[images, rows.start * mh : rows.stop * mh]
        shape = (mh, mw, len(piece), *_piece_tiles(rows, geometry), y.shape[3])
        outputs = pool.workspace("winograd outputs", shape, x.dtype)
        np.matmul(to_outputs.T, products.reshape(SLOTS, -1), out=outputs.reshape(mh * mw, -1))
        for slots, image in _pair(outputs, piece):
            if bias is None:
                image[...] = slots
            else:
                np.add(slots, bias, out=image)


def backward(x, gy, weight, gx, geometry, pool, needs_gx: bool, weight_gradient: bool = True) -> Product | None:
    """Write dLoss/dx to gx, unless that is None, and return the gradient of the weight where it is asked for.

    That needs no weight.
    """
    _, to_points, to_kernel = _transforms(geometry.kernel, x.dtype)
    channels, out_channels = x.shape[3], gy.shape[3]
    total = pool.workspace("winograd weight gradient", (SLOTS, channels, out_channels), gy.dtype)
    transformed = None if gx is None else _transform_weight(weight, pool)
    first = True
    for images, rows in _pieces(len(x), geometry, channels):
        products = _spread_outputs(gy, images, rows, geometry, pool)
        if weight_gradient:
            tiles = _transform_input(x, images, rows, geometry, pool)
            product = total if first else pool.workspace("product", total.shape, gy.dtype)
            np.matmul(tiles.transpose(0, 2, 1), products, out=product)
            if not first:
                total += product
        first = False
        if gx is not None:
            tiles = pool.workspace("winograd tiles", (SLOTS, products.shape[1], channels), gy.dtype)
            np.matmul(products, transformed.transpose(0, 2, 1), out=tiles)
            slots = pool.workspace("winograd slots", tiles.shape, gy.dtype)
            np.matmul(to_points, tiles.reshape(SLOTS, -1), out=slots.reshape(SLOTS, -1))
            _fold(slots, gx, images, rows, geometry, pool)
    if not weight_gradient:
        return None
    if first:
        total[...] = 0
    return Product(to_kernel.T, total.reshape(SLOTS, -1))


@cache
def _transforms(kernel: tuple[int, int], dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices A, B and G for both axes at once: (slots, outputs), (slots, slots), (slots, kernel)."""
    vertical, horizontal = (cook_toom(SIDE + 1 - k, k) for k in kernel)
    return tuple(np.kron(v, h).astype(dtype) for v, h in zip(vertical, horizontal, strict=True))


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


def step(taps: int) -> int:
    """Outputs a side of one tile, for a kernel of that many taps."""
    return SIDE + 1 - taps


def _tiles(geometry) -> tuple[int, int]:
    """How many tiles cover the output, vertically and horizontally."""
    return tuple(-(-n // step(k)) for n, k in zip(geometry.out, geometry.kernel, strict=True))


def _pieces(n: int, geometry, channels: int):
    """Yield (slice of images, slice of tile rows): whole images, or even fractions of one; about MIN_TILES tiles."""
    th, tw = _tiles(geometry)
    tiles = max(MIN_TILES, VALUES // channels)
    rows = -(-th // -(-th * tw // tiles))
    images = max(1, tiles // (th * tw)) if rows == th else 1
    for a in range(0, n, images):
        for r in range(0, th, rows):
            yield slice(a, min(n, a + images)), slice(r, min(th, r + rows))


def _pair(outputs, piece):
    """Yield (part of the tiles (m, m, n, rows, columns, c), the part of the image it covers, as a view alike).

    One pair where tiles fit the image, up to four where those on the bottom and right stick out.
    """
    mh, mw, n = outputs.shape[:3]
    _, h, w, c = piece.shape
    for y, rows, high in ((0, h // mh, mh), (h // mh, 1, h % mh)):
        for x, columns, wide in ((0, w // mw, mw), (w // mw, 1, w % mw)):
            image = piece[:, y * mh : y * mh + rows * high, x * mw : x * mw + columns * wide]
            if image.size:
                image = image.reshape(n, rows, high, columns, wide, c).transpose(2, 4, 0, 1, 3, 5)
                yield outputs[:high, :wide, :, y : y + rows, x : x + columns], image


def _piece_tiles(rows: slice, geometry) -> tuple[int, int]:
    return rows.stop - rows.start, _tiles(geometry)[1]


def _transform_weight(weight, pool) -> np.ndarray:
    """G w G^T: (kh, kw, c, o) to (slots, c, o)."""
    kh, kw, c, o = weight.shape
    transformed = pool.workspace("winograd weights", (SLOTS, c, o), weight.dtype)
    matrix = _transforms((kh, kw), weight.dtype)[2]
    np.matmul(matrix, weight.reshape(kh * kw, c * o), out=transformed.reshape(SLOTS, -1))
    return transformed


def _transform_input(x, images, rows, geometry, pool) -> np.ndarray:
    """B^T x B for every tile of a piece: (slots, tiles, channels)."""
    part = x[images]
    n, h, w, c = part.shape
    mh, mw = map(step, geometry.kernel)
    th, tw = _piece_tiles(rows, geometry)
    (top, _), (left, _) = geometry.padding

    padded = pool.workspace("padded", (n, (th - 1) * mh + SIDE, (tw - 1) * mw + SIDE, c), x.dtype)
    start = rows.start * mh - top  # the image's row that comes first in `padded`
    a, b = max(0, -start), max(0, min(padded.shape[1], h - start))
    d = min(padded.shape[2], left + w)
    padded[:, :a] = 0
    padded[:, b:] = 0
    padded[:, a:b, :left] = 0
    padded[:, a:b, d:] = 0
    padded[:, a:b, left:d] = part[:, start + a : start + b, : d - left]

    sn, sy, sx, sc = padded.strides
    windows = strided(padded, (SIDE, SIDE, n, th, tw, c), (sy, sx, sn, mh * sy, mw * sx, sc))
    slots = pool.workspace("winograd slots", windows.shape, x.dtype)
    np.copyto(slots, windows)
    tiles = pool.workspace("winograd tiles", (SLOTS, n * th * tw, c), x.dtype)
    matrix = _transforms(geometry.kernel, x.dtype)[1]
    np.matmul(matrix.T, slots.reshape(SLOTS, -1), out=tiles.reshape(SLOTS, -1))
    return tiles


def _spread_outputs(gy, images, rows, geometry, pool) -> np.ndarray:
    """A gy A^T for every tile of a piece: (slots, tiles, out channels)."""
    mh, mw = map(step, geometry.kernel)
    th, tw = _piece_tiles(rows, geometry)
    piece = gy[images, rows.start * mh : rows.stop * mh]
    outputs = pool.workspace("winograd outputs", (mh, mw, len(piece), th, tw, gy.shape[3]), gy.dtype)
    if piece.shape[1] % mh or piece.shape[2] % mw:
        outputs[...] = 0
    for slots, image in _pair(outputs, piece):
        slots[...] = image
    products = pool.workspace("winograd products", (SLOTS, len(piece) * th * tw, gy.shape[3]), gy.dtype)
    matrix = _transforms(geometry.kernel, gy.dtype)[0]
    np.matmul(matrix, outputs.reshape(mh * mw, -1), out=products.reshape(SLOTS, -1))
    return products


def _fold(slots, gx, images, rows, geometry, pool) -> None:
    """Add overlapping input tiles where they came from, cell by cell of m x m; gx when the images' last rows are in."""
    n, h, w, c = gx[images].shape
    mh, mw = map(step, geometry.kernel)
    th, tw = _piece_tiles(rows, geometry)
    over_h, over_w = -(-SIDE // mh), -(-SIDE // mw)  # cells that a tile touches
    all_rows = _tiles(geometry)[0]
    shape = (n, all_rows + over_h - 1, mh, tw + over_w - 1, mw, c)
    total = pool.workspace("winograd fold", shape, gx.dtype)
    if rows.start == 0:
        total[...] = 0
    tiles = slots.reshape(SIDE, SIDE, n, th, tw, c)
    for i in range(over_h):
        for j in range(over_w):
            block = tiles[i * mh : (i + 1) * mh, j * mw : (j + 1) * mw]
            target = total[:, rows.start + i :, : len(block), j:, : block.shape[1]]
            piece = target[:, :th, :, :tw]
            piece += block.transpose(2, 3, 0, 4, 1, 5)
    if rows.stop == all_rows:
        (top, _), (left, _) = geometry.padding
        whole = total.reshape(n, shape[1] * mh, shape[3] * mw, c)
        gx[images] = whole[:, top : top + h, left : left + w]
