"""Checks in the first passes of every layer, so that a mistake in it is named at once.

The engine trusts a layer that has computed one forward and one backward pass of a training step. What costs more than
a glance is left to `nn.gradcheck` and `nn.check_layer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nn.core.gradients import Product, RowSum, ScatterAdd


class ShapeError(ValueError):
    """A layer cannot take what it is given; the message names the layer, expected and given.

    Examples
    --------
    >>> import nn
    >>> try:
    ...     nn.Network(nn.Linear(3, 2), (4,))
    ... except nn.ShapeError as error:
    ...     print(error)
    Linear(3, 2): expects 3 features on the last axis, given samples of shape (4,)
    """


class Checks:
    """The first passes of one layer.

    Parameters
    ----------
    dtype : NumPy dtype
        That of the network.
    shapes : bool
        Whether arrays have the shapes that specs say: see Network.checks_shapes.
    """

    __slots__ = ("checked_modes", "dtype", "ids", "sample", "shapes")

    def __init__(self, dtype: np.dtype, shapes: bool):
        self.dtype, self.shapes, self.ids = dtype, shapes, False
        self.checked_modes: set[bool] = set()  # values of ctx.training in the forward passes that were checked
        self.sample: tuple[int, ...] = ()

    def forward(self, p: Any, x: np.ndarray, ctx: Any) -> tuple[np.ndarray, Any]:
        """Run the layer's forward, and look at its result."""
        layer = ctx.layer
        sample, ids = x.shape[1:], x.dtype.kind != "f"
        if ctx.training in self.checked_modes and self.sample == sample:
            return as_pair(layer.forward(p, x, ctx), ctx)
        before = x[:1].copy()
        result = as_pair(layer.forward(p, x, ctx), ctx)
        y, saved = result
        if not (ctx.may_overwrite_input or np.array_equal(x[:1], before, equal_nan=not ids)):
            raise TypeError(f"{ctx.description}: forward overwrote x, which others may need: write to a new array")
        if not isinstance(y, np.ndarray):
            raise TypeError(
                f"{ctx.description}: forward must return an array, and what backward needs, given {_kind(y)}"
            )
        if y.dtype != self.dtype and not (ids and y.dtype.kind in "iub"):
            raise TypeError(
                f"{ctx.description}: its output is {y.dtype} in a network of {self.dtype}: does it compute with arrays "
                "of another dtype, such as np.ones(3)? Make them with dtype=x.dtype"
            )
        if self.compares(ctx):
            wanted = (len(x), *(layer.training_shape(sample) if ctx.training else layer.specs(sample)[1]))
            if y.shape != wanted:
                raise ShapeError(
                    f"{ctx.description}: specs says that it makes {wanted} of {x.shape}, forward made {y.shape}"
                )
        for what, arrays in (("y", y), ("something in saved", saved)):
            self.refuse_workspace(what, arrays, ctx)
        self.sample, self.ids = sample, ids
        self.checked_modes.add(ctx.training)
        return result

    def refuse_workspace(self, what: str, value: Any, ctx: Any) -> None:
        """Refuse memory that the next layer overwrites where it has to last."""
        pool = ctx.network_context.pool
        if any(np.may_share_memory(array, raw) for array in arrays_in(value) for raw in pool.workspaces()):
            raise TypeError(
                f"{ctx.description}: {what} is a workspace, which the next layer overwrites: take ctx.empty"
            )

    def compares(self, ctx: Any) -> bool:
        """Return whether arrays have the shapes that specs say, which they lack where a group computes one layer."""
        return self.shapes and ctx.network_context.groups.keys() <= {"data"}

    def backward(self, p: Any, gy: np.ndarray, saved: Any, ctx: Any) -> tuple[np.ndarray | None, dict]:
        """Run the layer's backward, and look at its result."""
        layer, before = ctx.layer, gy[:1].copy()
        result = layer.backward(p, gy, saved, ctx)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise TypeError(
                f"{ctx.description}: backward must return a pair (gx, gradients): dLoss/dx, and a dict of the "
                f"gradients of its parameters, which may be empty; given {_kind(result)}"
            )
        gx, gradients = result
        if ctx.needs_input_grad and self.checked_modes and not self.ids:
            wanted = (len(gy), *self.sample)
            if not isinstance(gx, np.ndarray) or gx.shape != wanted or gx.dtype != self.dtype:
                kind = f"{gx.dtype}{gx.shape}" if isinstance(gx, np.ndarray) else gx if gx is None else _kind(gx)
                raise TypeError(f"{ctx.description}: backward must return dLoss/dx, {self.dtype}{wanted}, given {kind}")
        if not (ctx.may_overwrite_grad or np.array_equal(gy[:1], before, equal_nan=True)):
            raise TypeError(f"{ctx.description}: backward overwrote gy, which others may need: write to a new array")
        self.refuse_workspace("dLoss/dx", gx, ctx)
        if ctx.children:
            if gradients:
                raise TypeError(
                    f"{ctx.description}: a layer with children has no parameters of its own; ctx.children[i].backward "
                    f"takes those of its children, given {', '.join(map(repr, gradients))}"
                )
        elif self.compares(ctx):
            _check_gradients(gradients, vars(ctx.gradients), ctx)
        if self.checked_modes:
            ctx.unchecked = None
        return result


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """Yield all arrays in a tree of tuples, lists and dicts."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)


def as_pair(result: Any, ctx: Any) -> tuple[np.ndarray, Any]:
    """Return what a layer's forward has returned; refuse anything but a pair (y, saved)."""
    if type(result) is not tuple or len(result) != 2:
        raise TypeError(
            f"{ctx.description}: forward must return a pair (y, saved), the output and what backward needs (None if "
            f"nothing), given {_kind(result)}"
        )
    return result


def _check_gradients(gradients: dict, arrays: dict[str, np.ndarray], ctx: Any) -> None:
    """Refuse gradients of other names, shapes or dtypes than the parameters have."""
    if gradients.keys() != arrays.keys():
        raise TypeError(
            f"{ctx.description}: backward must return the gradients of {_names(arrays)}, as specs names them, "
            f"given those of {_names(gradients)}"
        )
    for name, gradient in gradients.items():
        array = arrays[name]
        if not isinstance(gradient, np.ndarray | np.generic | Product | RowSum | ScatterAdd) and not callable(gradient):
            raise TypeError(
                f"{ctx.description}: the gradient of {name} must be an array, or say what it is made of (nn.Product, "
                f"nn.RowSum, nn.ScatterAdd, a function), given {_kind(gradient)}"
            )
        shape, dtypes = _described(gradient)
        exact = shape is not None and (len(shape) == array.ndim or isinstance(gradient, np.ndarray | np.generic))
        # a product is a matrix: for an array of more axes it has the elements, in their order
        if shape is not None and (shape != array.shape if exact else math.prod(shape) != array.size):
            raise ShapeError(
                f"{ctx.description}: the gradient of {name} must have its shape {array.shape}, given {shape}"
            )
        if any(dtype != array.dtype for dtype in dtypes):
            raise TypeError(f"{ctx.description}: the gradient of {name} must be made of {array.dtype}, given {dtypes}")


def _described(gradient: Any) -> tuple[tuple[int, ...] | None, list[np.dtype]]:
    """The shape that a gradient will have, where that is known, and the dtypes that it is multiplied from."""
    if isinstance(gradient, np.ndarray | np.generic):
        return gradient.shape, []
    if isinstance(gradient, Product):
        return (*gradient.a.shape[:-1], *gradient.b.shape[1:]), [gradient.a.dtype, gradient.b.dtype]
    if isinstance(gradient, RowSum):
        return gradient.rows.shape[1:], [gradient.rows.dtype]
    if isinstance(gradient, ScatterAdd):
        return None, [gradient.rows.dtype]
    return None, []


def _names(mapping: dict) -> str:
    return ", ".join(map(str, mapping)) or "none"


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(map(_kind, value)) or 'nothing'}"
    return "None (is a return missing?)" if value is None else f"{' '.join(repr(value).split()):.80}"
