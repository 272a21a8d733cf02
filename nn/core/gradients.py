"""How a layer describes the gradients of its parameters, and the one function that makes them.

    return gx, {"W": Product(x.T, gy), "b": RowSum(gy)}

A gradient is an array, or what it can be made of: `Product`, `RowSum`, `ScatterAdd`, or a function that adds it to an
array. So a layer never asks whether gradients are written or added (micro-batches), made now or later (zero-bubble
pipelines), or not made here, because a hook takes the factors of a product: `LayerContext` decides, `write_gradient`
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nn.core.memory_pool import MemoryPool

dot = np.ndarray.dot  # np.dot(a, b, out) without its dispatcher, which takes 0.2 microseconds a call


class Product:
    """a @ b, for a matrix b and a vector or matrix a; its elements, in order, are those of the gradient.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> x, gy = np.ones((4, 3)), np.ones((4, 2))
    >>> gradient = nn.Product(x.T, gy)  # what backward returns for gW = x.T @ gy
    >>> gradient.a.shape, gradient.b.shape
    ((3, 4), (4, 2))
    """

    __slots__ = ("a", "b")

    def __init__(self, a: np.ndarray, b: np.ndarray):
        self.a, self.b = a, b


class RowSum:
    """rows.sum(axis=0): of one row for each sample, or each sample and position.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> nn.RowSum(np.ones((4, 2))).rows.shape  # what backward returns for gb = gy.sum(axis=0)
    (4, 2)
    """

    __slots__ = ("rows",)

    def __init__(self, rows: np.ndarray):
        self.rows = rows


class ScatterAdd:
    """Row i of `rows` (n, D) is added to row ids[i] of a zero matrix (V, D): the gradient of a look-up.

    Ids may have any shape, and count from the end where they are negative, as in NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> gradient = nn.ScatterAdd(np.array([0, 2, 0]), np.ones((3, 2)))
    >>> gradient.ids.tolist(), gradient.rows.shape  # rows 0 and 2 of the table get sums
    ([0, 2, 0], (3, 2))
    """

    __slots__ = ("ids", "rows")

    def __init__(self, ids: np.ndarray, rows: np.ndarray):
        self.ids, self.rows = ids, rows


Gradient = np.ndarray | Product | RowSum | ScatterAdd | Callable[[np.ndarray], None]


def write_gradient(array: np.ndarray, gradient: Gradient, accumulate: bool, pool: MemoryPool) -> None:
    """Write a gradient to `array`, or add it (`accumulate`), without allocating memory where that can be avoided."""
    kind = type(gradient)
    if kind is RowSum:  # a product with ones is several times faster than a reduction
        rows = gradient.rows
        if rows.ndim != 2:
            rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        if array.ndim != 1:
            array = array.reshape(-1)
        a, b = pool.ones(len(rows), rows.dtype), rows
    elif kind is Product:
        a, b = gradient.a, gradient.b
        if array.ndim != a.ndim:
            array = array.reshape(*a.shape[:-1], b.shape[1])
    else:
        _write_other(array, gradient, accumulate, pool)
        return
    if accumulate:
        array += dot(a, b, pool.workspace("product", array.shape, array.dtype))
    else:
        dot(a, b, array)  # for small matrices half the overhead of matmul


def _write_other(array: np.ndarray, gradient: Gradient, accumulate: bool, pool: MemoryPool) -> None:
    """Write a gradient that is neither a product nor a sum of rows: see `write_gradient`."""
    if isinstance(gradient, ScatterAdd):
        _scatter(array, gradient.ids, gradient.rows, accumulate, pool)
    elif isinstance(gradient, np.ndarray | np.generic):  # a sum of all is a scalar of NumPy's
        if gradient.shape != array.shape:  # NumPy would repeat it, as where squeeze() met a batch of one
            raise ValueError(f"a gradient must have its parameter's shape {array.shape}, given {gradient.shape}")
        if accumulate:
            array += gradient
        else:
            array[...] = gradient
    else:
        if not accumulate:
            array[...] = 0
        gradient(array)


def is_small(gradient: Gradient) -> bool:
    """Return whether a gradient is a vector made of rows: it is made at once, because rows take more memory."""
    kind = type(gradient)
    return kind is RowSum or (kind is Product and gradient.a.ndim == 1)


def zero(views) -> None:
    """Set all arrays of a tree of views to zero."""
    for item in views if isinstance(views, tuple) else vars(views).values():
        if isinstance(item, np.ndarray):
            item[...] = 0
        else:
            zero(item)


def _scatter(array: np.ndarray, ids: np.ndarray, rows: np.ndarray, accumulate: bool, pool: MemoryPool) -> None:
    """Sort by id; then multiply the rows of frequent ids by ones, and add the others, one row of every id at a time.

    Many times faster than np.add.at, and more than twice as fast as np.add.reduceat, which calls its inner loop for
    each column of each id.
    """
    if array.ndim != 2 or rows.shape[-1] != array.shape[1] or rows.size != ids.size * array.shape[1]:
        raise ValueError(
            f"ScatterAdd adds rows (n, D) to a matrix (V, D) by n ids, given rows {rows.shape}, a parameter "
            f"{array.shape} and ids {ids.shape}"
        )
    ids, rows = ids.reshape(-1), rows.reshape(-1, array.shape[1])
    if ids.size and ids.min() < 0:
        ids = np.where(ids < 0, ids + len(array), ids)
        if ids.min() < 0:
            raise IndexError(f"ScatterAdd: id {ids.min() - len(array)} is out of range of {len(array)} rows")
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    counts = np.diff(starts, append=len(ids))
    frequent_first = np.argsort(-counts, kind="stable")
    starts, counts = starts[frequent_first], counts[frequent_first]
    sums = pool.workspace("sums", (len(starts), rows.shape[1]), rows.dtype)
    # One product for each of the first ids, then one addition for each row of the next: as few calls as possible.
    products = int((np.arange(len(counts) + 1) + np.append(counts, 0)).argmin())
    for i in range(products):
        selected = _rows_at(rows, order[starts[i] : starts[i] + counts[i]], pool)
        dot(pool.ones(len(selected), rows.dtype), selected, sums[i])
    sums[products:] = 0
    for k in range(counts[products:].max(initial=0)):
        stop = np.searchsorted(-counts, -k)  # the ids that have a row k lie before
        sums[products:stop] += _rows_at(rows, order[starts[products:stop] + k], pool)
    if accumulate:
        array[ids[starts]] += sums
    else:
        array[...] = 0
        array[ids[starts]] = sums


def _rows_at(rows: np.ndarray, positions: np.ndarray, pool: MemoryPool) -> np.ndarray:
    """Return these rows in a workspace."""
    selected = pool.workspace("rows", (len(rows), rows.shape[1]), rows.dtype)[: len(positions)]
    return np.take(rows, positions, axis=0, out=selected, mode="clip")
