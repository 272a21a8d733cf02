"""Convolution as a matrix product over patches copied into a workspace (im2col), a cache-sized piece at a time.

The column matrix of a whole batch is Kh Kw times as large as the batch. It is never made: a piece of it that stays in
the second-level cache is filled and multiplied at once, which is also faster than one product over a ready-made matrix.
Backward keeps x, not its columns, and fills the pieces again. Source of the lowering: Chellapilla, Puri, Simard 2006.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

PIECE = 1 << 19  # bytes of columns at a time


def forward(x, weight, bias, y, geometry, run) -> None:
    """Write the convolution of x with weight, plus bias, to y."""
    matrices = _by_group(weight, geometry.groups)
    for images, rows, columns in _columns(x, weight.shape, geometry, run):
        piece = y[images, rows]
        out = piece.reshape(-1, geometry.groups, piece.shape[-1] // geometry.groups)
        np.matmul(columns, matrices, out=out.transpose(1, 0, 2))
        piece += bias


def backward(x, gy, weight, g_weight, gx, geometry, run) -> None:
    """Add to g_weight, and write dLoss/dx to gx unless that is None."""
    total = run.scratch("weight gradient", weight.shape, gy.dtype)
    total[...] = 0
    sums = _by_group(total, geometry.groups)
    product = run.scratch("product", sums.shape, gy.dtype)
    for images, rows, columns in _columns(x, weight.shape, geometry, run):
        piece = gy[images, rows]
        piece = piece.reshape(-1, geometry.groups, piece.shape[-1] // geometry.groups)
        sums += np.matmul(columns.transpose(0, 2, 1), piece.transpose(1, 0, 2), out=product)
    run.add(g_weight, total)
    if gx is not None:
        _input_gradient(gy, weight, gx, geometry, run)


def _input_gradient(gy, weight, gx, geometry, run) -> None:
    """Write dLoss/dx: the convolution of gy with the flipped kernel where that exists, else patch by patch."""
    adjoint = geometry.adjoint()
    if adjoint:
        kh, kw, c, o = weight.shape
        groups = geometry.groups
        flipped = run.scratch("flipped", (kh, kw, o // groups, c * groups), weight.dtype)
        source = weight[::-1, ::-1].reshape(kh, kw, c, groups, o // groups)
        flipped.reshape(kh, kw, o // groups, groups, c)[...] = source.transpose(0, 1, 4, 3, 2)
        forward(gy, flipped, 0, gx, adjoint, run)
    else:
        _scatter(gy, weight, gx, geometry, run)


def _by_group(weight, groups):
    """(kh, kw, c, o) as one matrix for each group: (groups, kh kw c, o / groups), a view."""
    o = weight.shape[-1]
    return weight.reshape(-1, groups, o // groups).transpose(1, 0, 2)


def _columns(x, weight_shape, geometry, run):
    """Yield (images, rows, columns): slices of the batch and of the output rows, and their patches.

    Columns are (groups, positions, kh kw c).
    """
    n, _, _, channels = x.shape
    kh, kw, c, _ = weight_shape
    (sh, sw), (dh, dw), groups = geometry.stride, geometry.dilation, geometry.groups
    (top, bottom), (left, right) = geometry.padding
    oh, ow = geometry.out
    images, rows = _piece(oh, ow * kh * kw * channels * x.itemsize)
    for a in range(0, n, images):
        part = x[a : a + images]
        if top or bottom or left or right:
            part = _padded(part, geometry, run)
        sn, sy, sx, sc = part.strides
        view = as_strided(
            part,
            (groups, len(part), oh, ow, kh, kw, c),
            (c * sc, sn, sh * sy, sw * sx, dh * sy, dw * sx, sc),
            writeable=False,
        )
        for r in range(0, oh, rows):
            source = view[:, :, r : r + rows]
            columns = run.scratch("columns", source.shape, x.dtype)
            np.copyto(columns, source)
            yield slice(a, a + images), slice(r, r + rows), columns.reshape(groups, -1, kh * kw * c)


def _scatter(gy, weight, gx, geometry, run) -> None:
    """gx by adding every position's patch gradient to where the patch came from."""
    n, h, w, channels = gx.shape
    kh, kw, c, _ = weight.shape
    (sh, sw), (dh, dw), groups = geometry.stride, geometry.dilation, geometry.groups
    (top, _), (left, _) = geometry.padding
    oh, ow = geometry.out
    matrices = _by_group(weight, groups).transpose(0, 2, 1)
    images, rows = _piece(oh, ow * kh * kw * channels * gx.itemsize)
    for a in range(0, n, images):
        part = gx[a : a + images]
        total = run.scratch("padded", (len(part), *geometry.padded, groups, c), gx.dtype)
        total[...] = 0
        for r in range(0, oh, rows):
            piece = gy[a : a + images, r : r + rows]
            shape = (groups, *piece.shape[:3], kh, kw, c)
            columns = run.scratch("columns", shape, gx.dtype)
            rows_of_gy = piece.reshape(-1, groups, piece.shape[-1] // groups).transpose(1, 0, 2)
            np.matmul(rows_of_gy, matrices, out=columns.reshape(groups, -1, kh * kw * c))
            for u in range(kh):
                for v in range(kw):
                    y0, x0 = r * sh + u * dh, v * dw
                    target = total[:, y0 : y0 + (shape[2] - 1) * sh + 1 : sh, x0 : x0 + (ow - 1) * sw + 1 : sw]
                    target += columns[:, :, :, :, u, v].transpose(1, 2, 3, 0, 4)
        part[...] = total.reshape(*total.shape[:3], channels)[:, top : top + h, left : left + w]


def _piece(out_rows: int, row_bytes: int) -> tuple[int, int]:
    """(images, output rows) to take at a time: several whole images, or some rows of one."""
    rows = max(1, min(out_rows, PIECE // row_bytes))
    return (max(1, PIECE // (out_rows * row_bytes)), out_rows) if rows == out_rows else (1, rows)


def _padded(x, geometry, run) -> np.ndarray:
    """x with zeros around, in a workspace."""
    n, h, w, c = x.shape
    (top, _), (left, _) = geometry.padding
    padded = run.scratch("padded", (n, *geometry.padded, c), x.dtype)
    padded[:, :top] = 0
    padded[:, top + h :] = 0
    padded[:, top : top + h, :left] = 0
    padded[:, top : top + h, left + w :] = 0
    padded[:, top : top + h, left : left + w] = x
    return padded
