"""Convolution as matrix products over patches copied into a workspace (im2col), a cache-sized piece at a time.

The column matrix of a whole batch is Kh Kw times as large as the batch. It is never made: a piece of it that stays in
the cache is filled and multiplied at once, which is also faster than one product over a ready-made matrix. Backward
keeps x, not its columns, and fills the pieces again.

Images with few channels are lowered along their rows only, a Kw times smaller copy: the patch of output column j is
then contiguous from column j s on, so there is a product for each output column, on overlapping views.

Sources: Chellapilla, Puri, Simard 2006 (im2col); Cho and Brand 2017 (MEC, lowering along one axis).
"""

from __future__ import annotations

import math

import numpy as np

PIECE = 1 << 21  # bytes of columns at a time, about
FEW = 16  # channels up to which one axis is lowered


def forward(x, weight, bias, y, geometry, run) -> None:
    """Write the convolution of x with weight, plus bias if there is one, to y."""
    columns_of, matrices = _lowered(weight, geometry, run)
    for images, rows, columns in columns_of(x, weight.shape, geometry, run):
        piece = y[images, rows]
        np.matmul(columns, matrices, out=_split(piece, columns))
        if bias is not None:
            piece += bias


def backward(x, gy, weight, g_weight, gx, geometry, run) -> None:
    """Add to g_weight, and write dLoss/dx to gx unless that is None."""
    adjoint = geometry.adjoint()
    if gx is None or adjoint is None or 2 * math.prod(geometry.size) > 3 * math.prod(geometry.out):
        _weight_gradient(x, gy, weight, g_weight, geometry, run)
        if gx is not None:
            _scatter(gy, weight, gx, geometry, run)
    else:
        _both_gradients(x, gy, weight, g_weight, gx, adjoint, run)


def _weight_gradient(x, gy, weight, g_weight, geometry, run) -> None:
    """Add to g_weight: columns of x times gy."""
    columns_of, matrices = _lowered(weight, geometry, run)
    total = run.scratch("weight gradient", matrices.shape, gy.dtype)
    total[...] = 0
    for images, rows, columns in columns_of(x, weight.shape, geometry, run):
        _add_products(total, columns, gy[images, rows], run)
    run.add(g_weight, _raised(total, weight.shape, geometry))


def _both_gradients(x, gy, weight, g_weight, gx, adjoint, run) -> None:
    """Write dLoss/dx, the convolution of gy with the flipped kernel, and add to g_weight from the same columns.

    With roles exchanged, gy is what is lowered, and x what its columns are multiplied with; the kernel's gradient comes
    flipped as well.
    """
    flipped = run.scratch("flipped", (*weight.shape[:2], weight.shape[3] // adjoint.groups, x.shape[3]), weight.dtype)
    flip(weight, flipped, adjoint.groups)
    columns_of, matrices = _lowered(flipped, adjoint, run)
    total = run.scratch("weight gradient", matrices.shape, gy.dtype)
    total[...] = 0
    for images, rows, columns in columns_of(gy, flipped.shape, adjoint, run):
        np.matmul(columns, matrices, out=_split(gx[images, rows], columns))
        _add_products(total, columns, x[images, rows], run)
    gradient = run.scratch("gradient", weight.shape, gy.dtype)
    flip(_raised(total, flipped.shape, adjoint), gradient, adjoint.groups)
    run.add(g_weight, gradient)


def _add_products(total, columns, piece, run) -> None:
    """total += columns^T piece, for each group, or summed over output columns."""
    product = run.scratch("product", (len(columns), *total.shape[1:]), total.dtype)
    np.matmul(columns.transpose(0, 2, 1), _split(piece, columns), out=product)
    total += product if len(total) == len(product) else product.sum(axis=0)


def flip(weight, out, groups) -> None:
    """out = the kernel turned by 180 degrees, inputs and outputs exchanged within each group."""
    kh, kw, c, o = weight.shape
    turned = weight[::-1, ::-1].reshape(kh, kw, c, groups, o // groups).transpose(0, 1, 4, 3, 2)
    out.reshape(turned.shape)[...] = turned


def _few_channels(weight_shape, geometry) -> bool:
    _, kw, c, _ = weight_shape
    return c <= FEW and kw > 1 and geometry.groups == 1 and geometry.dilation[1] == 1


def _lowered(weight, geometry, run):
    """The generator of columns, and the weight as the matrices that multiply them."""
    if not _few_channels(weight.shape, geometry):
        return _columns, _by_group(weight, geometry.groups)
    kh, kw, c, o = weight.shape
    turned = run.scratch("turned", (kw, kh, c, o), weight.dtype)
    turned[...] = weight.transpose(1, 0, 2, 3)
    return _half_columns, turned.reshape(1, kw * kh * c, o)


def _raised(matrices, shape, geometry):
    """What _lowered has made of an array of that shape, turned back."""
    if not _few_channels(shape, geometry):
        return matrices.transpose(1, 0, 2).reshape(shape)
    kh, kw, c, o = shape
    return matrices.reshape(kw, kh, c, o).transpose(1, 0, 2, 3)


def _by_group(weight, groups):
    """(kh, kw, c, o) as one matrix for each group: (groups, kh kw c, o / groups), a view."""
    o = weight.shape[-1]
    return weight.reshape(-1, groups, o // groups).transpose(1, 0, 2)


def _split(piece, columns):
    """Outputs (n, rows, ow, o) as the matrices that belong to `columns`: by group, or by output column."""
    return piece.reshape(columns.shape[1], len(columns), -1).transpose(1, 0, 2)


def _columns(x, weight_shape, geometry, run):
    """Yield (images, rows, columns): slices of the batch and of the output rows, and their patches.

    Columns are (groups, positions, kh kw c).
    """
    kh, kw, c, _ = weight_shape
    (sh, sw), (dh, dw), groups = geometry.stride, geometry.dilation, geometry.groups
    oh, ow = geometry.out
    if (kh, kw, sh, sw) == (1, 1, 1, 1) and (oh, ow) == geometry.size:
        yield slice(None), slice(None), x.reshape(len(x) * oh * ow, groups, c).transpose(1, 0, 2)
        return
    images, rows = _piece(len(x), oh, ow * kh * kw * c * groups * x.itemsize)
    for a in range(0, len(x), images):
        part = _padded(x[a : a + images], geometry, run)
        sn, sy, sx, sc = part.strides
        shape = groups, len(part), oh, ow, kh, kw, c
        patches = strided(part, shape, (c * sc, sn, sh * sy, sw * sx, dh * sy, dw * sx, sc))
        for r in range(0, oh, rows):
            source = patches[:, :, r : r + rows]
            columns = run.scratch("columns", source.shape, x.dtype)
            np.copyto(columns, source)
            yield slice(a, a + images), slice(r, r + rows), columns.reshape(groups, -1, kh * kw * c)


def _half_columns(x, weight_shape, geometry, run):
    """As _columns, lowered along rows only: columns are (output columns, images and rows, kw kh c), a view."""
    kh, kw, c, _ = weight_shape
    (sh, sw), dh = geometry.stride, geometry.dilation[0]
    (top, _), (left, _) = geometry.padding
    (oh, ow), (h, w), width = geometry.out, geometry.size, geometry.padded[1]
    images, rows = _piece(len(x), oh, width * kh * c * x.itemsize)
    for a in range(0, len(x), images):
        part = x[a : a + images]
        for r in range(0, oh, rows):
            count = min(rows, oh - r)
            lowered = run.scratch("columns", (len(part), count, width, kh, c), x.dtype)
            lowered[:, :, :left] = 0
            lowered[:, :, left + w :] = 0
            for u in range(kh):
                shift = u * dh - top  # output row i sees the image's row i sh + shift, where there is one
                first = min(max(-(shift // sh) - r, 0), count)
                last = min(max(-((shift - h) // sh) - r, first), count)
                lowered[:, :first, :, u] = 0
                lowered[:, last:, :, u] = 0
                source = slice((r + first) * sh + shift, (r + last - 1) * sh + shift + 1, sh)
                if first < last:
                    lowered[:, first:last, left : left + w, u] = part[:, source]
            _, row, column, _, item = lowered.strides
            shape = ow, len(part) * count, kw * kh * c
            columns = strided(lowered, shape, (sw * column, row, item))
            yield slice(a, a + images), slice(r, r + rows), columns


def _scatter(gy, weight, gx, geometry, run) -> None:
    """gx by adding every patch's gradient to where the patch came from: first along rows, then along columns."""
    h, w, channels = gx.shape[1:]
    kh, kw, c, _ = weight.shape
    (sh, sw), (dh, dw), groups = geometry.stride, geometry.dilation, geometry.groups
    (top, _), (left, _) = geometry.padding
    oh, ow = geometry.out
    matrices = _by_group(weight, groups).transpose(0, 2, 1)
    images, rows = _piece(len(gx), oh, ow * kh * kw * channels * gx.itemsize)
    for a in range(0, len(gx), images):
        part = gx[a : a + images]
        n, (height, width) = len(part), geometry.padded
        half = run.scratch("half columns", (groups, n, height, ow, kw, c), gx.dtype)
        half[...] = 0
        for r in range(0, oh, rows):
            piece = gy[a : a + images, r : r + rows]
            count = piece.shape[1]
            columns = run.scratch("columns", (groups, n, count, ow, kh, kw, c), gx.dtype)
            matrix = columns.reshape(groups, -1, kh * kw * c)
            np.matmul(_split(piece, matrix), matrices, out=matrix)
            for u in range(kh):
                first = r * sh + u * dh
                target = half[:, :, first : first + (count - 1) * sh + 1 : sh]
                target += columns[:, :, :, :, u]
        whole = run.scratch("padded", (n, height, width, groups, c), gx.dtype)
        whole[...] = 0
        for v in range(kw):
            target = whole[:, :, v * dw : v * dw + (ow - 1) * sw + 1 : sw]
            target += half[:, :, :, :, v].transpose(1, 2, 3, 0, 4)
        part[...] = whole.reshape(n, height, width, channels)[:, top : top + h, left : left + w]


def _piece(images: int, out_rows: int, row_bytes: int) -> tuple[int, int]:
    """(images, output rows) to take at a time: an even share of the images, or of one image's rows."""
    parts = -(-out_rows * row_bytes // PIECE)
    if parts > 1:
        return 1, -(-out_rows // parts)
    parts = -(-images // (PIECE // (out_rows * row_bytes))) or 1
    return -(-images // parts) or 1, out_rows


def _padded(x, geometry, run) -> np.ndarray:
    """x with zeros around, in a workspace; x itself where there are none."""
    n, h, w, c = x.shape
    if geometry.padded == (h, w):
        return x
    (top, _), (left, _) = geometry.padding
    padded = run.scratch("padded", (n, *geometry.padded, c), x.dtype)
    padded[:, :top] = 0
    padded[:, top + h :] = 0
    padded[:, top : top + h, :left] = 0
    padded[:, top : top + h, left + w :] = 0
    padded[:, top : top + h, left : left + w] = x
    return padded


def strided(array, shape, strides) -> np.ndarray:
    """A view of a contiguous array with any shape and strides; NumPy's as_strided takes 30 us, this one."""
    return np.ndarray(shape, array.dtype, array, 0, strides)
