"""Convolution as matrix products over patches copied into a workspace (im2col), a cache-sized piece at a time.

The column matrix of a whole batch is Kh Kw times as large as the batch. It is never made: a piece of it that stays in
the cache is filled and multiplied at once, which is also faster than one product over a ready-made matrix. Backward
keeps x, not its columns, and fills the pieces again.

Matrices of few columns multiply slowly, and short runs copy slowly. So where channels are few, neighbouring output
columns are computed together, from the patch that covers them all, with a weight that has the kernel once for each of
them, shifted, and zeros elsewhere: a banded matrix.

Source: Chellapilla, Puri, Simard 2006 (im2col).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

PIECE = 1 << 21  # bytes of columns at a time, about
RUN = 8  # values that a copy should find side by side, at least
SHORT = 512  # bytes: shorter runs are copied as one item each
OUTPUTS = 32  # columns that a product should have, at least


def cost(geometry, channels: int, out_channels: int) -> float:
    """Multiplications for an image, and a tenth for the copies of patches."""
    return 1.1 * math.prod(geometry.out) * math.prod(geometry.kernel) * channels * out_channels / geometry.groups


def forward(x, weight, bias, y, geometry, pool) -> None:
    """Write the convolution of x with weight, plus bias if there is one, to y."""
    matrices = _lowered(weight, geometry, pool)
    for images, rows, columns in _columns(x, _widened(weight.shape, geometry), pool):
        piece = y[images, rows]
        np.matmul(columns, matrices, out=_split(piece, columns))
        if bias is not None:
            add_bias(piece, bias, pool)


def backward(x, gy, weight, gx, geometry, pool, needs_gx: bool, weight_gradient: bool = True):
    """Write dLoss/dx to gx, unless that is None, and return the gradient of the weight where it is asked for.

    That is a workspace, and needs no weight. How it is summed depends on `needs_gx`, whether dLoss/dx is needed at all,
    and not on what is left out in this call.
    """
    adjoint = geometry.adjoint()
    if needs_gx and adjoint is not None and 2 * math.prod(geometry.size) <= 3 * math.prod(geometry.out):
        return _both_gradients(x, gy, weight, gx, adjoint, pool, weight_gradient)
    gradient = _weight_gradient(x, gy, geometry, pool) if weight_gradient else None
    if gx is not None:
        _scatter(gy, weight, gx, geometry, pool)
    return gradient


def _weight_gradient(x, gy, geometry, pool) -> np.ndarray:
    """Columns of x times gy."""
    shape = (*geometry.kernel, x.shape[3] // geometry.groups, gy.shape[3])
    total = _zero_matrices(shape, geometry, gy.dtype, pool)
    for images, rows, columns in _columns(x, _widened(shape, geometry), pool):
        _add_products(total, columns, gy[images, rows], pool)
    return _raised(total, shape, geometry)


def _both_gradients(x, gy, weight, gx, adjoint, pool, weight_gradient: bool) -> np.ndarray | None:
    """Compute both gradients from the same columns: dLoss/dx is the convolution of gy with the flipped kernel.

    With roles exchanged, gy is what is lowered, and x what its columns are multiplied with; the kernel's gradient comes
    flipped as well.
    """
    channels, out_channels = x.shape[3], gy.shape[3]
    shape = (*adjoint.kernel, out_channels // adjoint.groups, channels)
    if gx is not None:
        flipped = pool.workspace("flipped", shape, weight.dtype)
        flip(weight, flipped, adjoint.groups)
        matrices = _lowered(flipped, adjoint, pool)
    if weight_gradient:
        total = _zero_matrices(shape, adjoint, gy.dtype, pool)
    for images, rows, columns in _columns(gy, _widened(shape, adjoint), pool):
        if gx is not None:
            np.matmul(columns, matrices, out=_split(gx[images, rows], columns))
        if weight_gradient:
            _add_products(total, columns, x[images, rows], pool)
    if not weight_gradient:
        return None
    gradient = pool.workspace("gradient", (*adjoint.kernel, channels // adjoint.groups, out_channels), gy.dtype)
    flip(_raised(total, shape, adjoint), gradient, adjoint.groups)
    return gradient


def _add_products(total, columns, piece, pool) -> None:
    """total += columns^T piece, for each group."""
    product = pool.workspace("product", total.shape, total.dtype)
    total += np.matmul(columns.transpose(0, 2, 1), _split(piece, columns), out=product)


def flip(weight, out, groups) -> None:
    """out = the kernel turned by 180 degrees, inputs and outputs exchanged within each group."""
    kh, kw, c, o = weight.shape
    turned = weight[::-1, ::-1].reshape(kh, kw, c, groups, o // groups).transpose(0, 1, 4, 3, 2)
    out.reshape(turned.shape)[...] = turned


def _together(weight_shape, geometry) -> int:
    """How many output columns are computed at once: 1, 2 or 4."""
    _, kw, c, o = weight_shape
    count = 1
    if geometry.groups == 1 and geometry.stride[1] == geometry.dilation[1] == 1 < kw:
        while count < 4 and ((kw + count - 1) * c < RUN or count * o < OUTPUTS) and geometry.out[1] % (2 * count) == 0:
            count *= 2
    return count


def _widened(shape, geometry):
    """Where the patches of columns computed together are, for a weight of that shape."""
    if (count := _together(shape, geometry)) == 1:
        return geometry
    return replace(geometry, kernel=(shape[0], shape[1] + count - 1), stride=(geometry.stride[0], count))


def _lowered(weight, geometry, pool):
    """Return the matrices, one for each group, that multiply those patches."""
    count, (kh, kw, c, o) = _together(weight.shape, geometry), weight.shape
    if count == 1:
        return _by_group(weight, geometry.groups)
    banded = pool.workspace("banded", (kh, kw + count - 1, c, count, o), weight.dtype)
    banded[...] = 0
    for i in range(count):
        banded[:, i : i + kw, :, i] = weight
    return banded.reshape(1, -1, count * o)


def _zero_matrices(shape, geometry, dtype, pool):
    """A sum of gradients of what _lowered makes of a weight of that shape."""
    count, (kh, kw, c, o) = _together(shape, geometry), shape
    groups = geometry.groups
    total = pool.workspace("weight gradient", (groups, kh * (kw + count - 1) * c, count * o // groups), dtype)
    total[...] = 0
    return total


def _raised(matrices, shape, geometry):
    """The gradient of a weight of that shape from that of the matrices that _lowered has made of it."""
    count, (kh, kw, c, o) = _together(shape, geometry), shape
    if count == 1:
        return matrices.transpose(1, 0, 2).reshape(shape)
    banded = matrices.reshape(kh, kw + count - 1, c, count, o)
    return sum(banded[:, i : i + kw, :, i] for i in range(count))


def _by_group(weight, groups):
    """(kh, kw, c, o) as one matrix for each group: (groups, kh kw c, o / groups), a view."""
    o = weight.shape[-1]
    return weight.reshape(-1, groups, o // groups).transpose(1, 0, 2)


def _split(piece, columns):
    """Outputs (n, rows, ow, o) as the matrices that belong to `columns`, one for each group."""
    return piece.reshape(columns.shape[1], len(columns), -1).transpose(1, 0, 2)


def _columns(x, geometry, pool):
    """Yield (images, rows, columns): slices of the batch and of the output rows, and their patches.

    Columns are (groups, positions, kh kw c).
    """
    (kh, kw), (sh, sw), (dh, dw), groups = geometry.kernel, geometry.stride, geometry.dilation, geometry.groups
    (oh, ow), c = geometry.out, x.shape[3] // groups
    if (kh, kw, sh, sw) == (1, 1, 1, 1) and (oh, ow) == geometry.size and len(x):
        yield slice(None), slice(None), x.reshape(len(x) * oh * ow, groups, c).transpose(1, 0, 2)
        return
    images, rows = _piece(len(x), oh, ow * kh * kw * c * groups * x.itemsize)
    for a in range(0, len(x), images):
        part = _padded(x[a : a + images], geometry, pool)
        sn, sy, sx, sc = part.strides
        runs = (1, kw * c) if dw == groups == 1 else (kw, c)  # what lies side by side is one axis, the last
        shape = groups, len(part), oh, ow, kh, *runs
        patches = strided(part, shape, (c * sc, sn, sh * sy, sw * sx, dh * sy, dw * sx, sc))
        for r in range(0, oh, rows):
            source = patches[:, :, r : r + rows]
            columns = pool.workspace("columns", source.shape, x.dtype)
            copy_runs(columns, source)
            yield slice(a, a + images), slice(r, r + rows), columns.reshape(groups, -1, kh * kw * c)


def _scatter(gy, weight, gx, geometry, pool) -> None:
    """gx by adding every patch's gradient to where the patch came from: first along columns, then along rows."""
    (h, w, _), (kh, kw, c, _), groups, (oh, ow) = gx.shape[1:], weight.shape, geometry.groups, geometry.out
    axes = zip(geometry.axes, geometry.stride, geometry.dilation, strict=True)
    (vertical, other_rows), (horizontal, other_columns) = (_taps(*axis, *steps) for axis, *steps in axes)
    matrices = _by_group(weight, groups).transpose(0, 2, 1)
    images, rows = _piece(len(gx), oh, ow * kh * kw * c * groups * gx.itemsize)
    for a in range(0, len(gx), images):
        part = gx[a : a + images].reshape(-1, h, w, groups, c)
        half = pool.workspace("half columns", (groups, len(part), h, ow, kw * c), gx.dtype)
        half[:, :, other_rows] = 0
        for r in reversed(range(0, oh, rows)):  # rows below first: a row is written before later taps are added to it
            piece = gy[a : a + images, r : r + rows]
            count = piece.shape[1]
            columns = pool.workspace("columns", (groups, len(part), count, ow, kh, kw * c), gx.dtype)
            matrix = columns.reshape(groups, -1, kh * kw * c)
            np.matmul(_split(piece, matrix), matrices, out=matrix)
            for u, is_first, outputs, pixels in vertical:
                own = slice(max(0, r - outputs.start), max(0, r + count - outputs.start))
                source = columns[:, :, max(0, outputs.start - r) : max(0, outputs.stop - r), :, u]
                _write_or_add(half[:, :, _slice(pixels[own])], source, is_first)
        part[:, :, other_columns] = 0
        half = half.reshape(*half.shape[:-1], kw, c).transpose(1, 2, 3, 0, 4, 5)
        for v, is_first, outputs, pixels in horizontal:
            _write_or_add(part[:, :, _slice(pixels)], half[:, :, _slice(outputs), :, v], is_first)


def _write_or_add(target, source, is_first: bool) -> None:
    if is_first:
        copy_runs(target, source)
    else:
        target += source


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


@cache
def _taps(size: int, outputs: int, padding: int, taps: int, stride: int, dilation: int) -> tuple[list, list[int]]:
    """Return (tap, whether no earlier tap is at any of its pixels, outputs, their pixels), and where no first tap is.

    Along one axis, and inside the image: output i of a tap is at pixel tap * dilation - padding + i * stride.
    """
    reached, written, items = set(), set(), []
    for tap in range(taps):
        first = tap * dilation - padding
        inside = range(max(0, -(first // stride)), min(outputs, (size - 1 - first) // stride + 1))
        pixels = range(first + inside.start * stride, first + inside.stop * stride, stride)
        if inside:
            is_first = reached.isdisjoint(pixels)
            items.append((tap, is_first, inside, pixels))
            written.update(pixels if is_first else ())
            reached.update(pixels)
    return items, sorted(set(range(size)) - written)


def _piece(images: int, out_rows: int, row_bytes: int) -> tuple[int, int]:
    """Return (images, output rows) of a piece: an even fraction of the images, or of one image's rows."""
    pieces = -(-out_rows * row_bytes // PIECE)
    if pieces > 1:
        return 1, -(-out_rows // pieces)
    pieces = -(-images // (PIECE // (out_rows * row_bytes))) or 1
    return -(-images // pieces) or 1, out_rows


def _padded(x, geometry, pool) -> np.ndarray:
    """x with zeros around, in a workspace; x itself where there are none."""
    n, h, w, c = x.shape
    if geometry.padded == (h, w):
        return x
    (top, _), (left, _) = geometry.padding
    padded = pool.workspace("padded", (n, *geometry.padded, c), x.dtype)
    padded[:, :top] = 0
    padded[:, top + h :] = 0
    padded[:, top : top + h, :left] = 0
    padded[:, top : top + h, left + w :] = 0
    padded[:, top : top + h, left : left + w] = x
    return padded


def add_bias(y, bias, pool) -> None:
    """Add a bias to each channel of images y, a row at a time: long inner loops."""
    rows = y.reshape(*y.shape[:2], -1)
    repeated = pool.workspace("bias", y.shape[2:], bias.dtype)
    repeated[...] = bias
    rows += repeated.reshape(-1)


def copy_runs(target, source) -> None:
    """Copy an array to one of the same shape and dtype. Where the last axis is short and contiguous, it is one item.

    NumPy takes as long to begin a run as to copy some twenty values of it.
    """
    nbytes = source.shape[-1] * source.itemsize
    if nbytes < SHORT and source.strides[-1] == target.strides[-1] == source.itemsize:
        target, source = target.view((np.void, nbytes)), source.view((np.void, nbytes))
    np.copyto(target, source)


def strided(array, shape, strides, offset: int = 0) -> np.ndarray:
    """Return a view of a contiguous array with any shape and strides (bytes); as_strided of NumPy takes 30 us."""
    return np.ndarray(shape, array.dtype, array, offset, strides)
