"""Two-dimensional convolution (cross-correlation, as usual) of channels-last images.

    y[n, i, j, o] = b[o] + sum over u, v, c of x[n, i s + u d - p, j s + v d - p, c] W[u, v, c, o]

Activations are (N, H, W, C) and weights (height, width, in / groups, out), so that a convolution is a matrix product:
rows are output positions, columns the outputs, and what is summed over is the patch of the input under the kernel.
Patches are copied into a workspace a piece at a time (nn/layers/im2col.py).

Costs N H' W' Kh Kw C O / groups multiply-accumulates forward, twice that backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from nn.arguments import SIZE, SizePair
from nn.core.gradients import RowSum, write_gradient
from nn.core.layer import Initializer, Layer, ShapeError, Spec
from nn.initializers import he, zeros
from nn.layers import im2col, winograd, winograd_rows
from nn.registry import register

Pair = int | tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Where a kernel goes: sizes are (height, width) pairs, padding is ((top, bottom), (left, right))."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @cached_property
    def padded(self) -> tuple[int, int]:
        (top, bottom), (left, right) = self.padding
        return self.size[0] + top + bottom, self.size[1] + left + right

    @cached_property
    def reach(self) -> tuple[int, int]:
        """How many rows and columns of the input lie under the kernel, gaps included."""
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))

    @cached_property
    def out(self) -> tuple[int, int]:
        return tuple((n - r) // s + 1 for n, r, s in zip(self.padded, self.reach, self.stride, strict=True))

    @cached_property
    def axes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Size, outputs, padding before and taps of each axis."""
        return tuple(zip(self.size, self.out, (first for first, _ in self.padding), self.kernel, strict=True))

    def adjoint(self) -> Geometry | None:
        """Return the convolution that takes gy to gx with the flipped kernel; None where it is not of this form."""
        padding = tuple((r - 1 - a, r - 1 - b) for r, (a, b) in zip(self.reach, self.padding, strict=True))
        if self.stride != (1, 1) or min(map(min, padding)) < 0:
            return None
        return Geometry(self.out, self.kernel, (1, 1), padding, self.dilation, self.groups)


_geometry = lru_cache(maxsize=1024)(Geometry)  # shared: `out` and `reach` are computed once


def _padding(what: str, value: Pair | str) -> tuple[int, int] | str:
    return "same" if value == "same" else SizePair(0)(what, value)


@register("layer")
class Conv2d(Layer):
    """y = x * W + b over images (N, H, W, C).

    Parameters
    ----------
    in_channels, out_channels : int
    kernel_size, stride, dilation : int or (height, width)
    padding : int, (height, width) or "same"
        Zeros around the image; "same" keeps its size (stride 1 only; an odd surplus goes to the bottom and right).
    groups : int
        Group g of the outputs sees group g of the inputs only. Must divide both.
    bias : bool
    init, bias_init : initializer
        For W of shape (height, width, in_channels / groups, out_channels) and b of shape (out_channels,).

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.Conv2d(3, 16, 3, stride=2, padding=1), (32, 32, 3)).out_shape
    (16, 16, 16)
    """

    output = gradient = "new"

    constraints = dict.fromkeys(("in_channels", "out_channels", "groups"), SIZE) | {
        **dict.fromkeys(("kernel_size", "stride", "dilation"), SizePair(1)),
        "padding": _padding,
    }

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        init: Initializer = he,
        bias_init: Initializer = zeros,
    ):
        self.in_channels, self.out_channels, self.groups, self.bias = in_channels, out_channels, groups, bias
        self.kernel_size, self.stride, self.dilation, self.padding = kernel_size, stride, dilation, padding
        self.init, self.bias_init = init, bias_init

    def check_arguments(self):
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f"Conv2d: groups={self.groups} does not divide both in_channels={self.in_channels} "
                f"and out_channels={self.out_channels}"
            )
        if self.padding == "same" and self.stride != (1, 1):
            raise ValueError(f'Conv2d: padding="same" needs stride 1, given {self.stride}')

    def geometry(self, size: tuple[int, int]) -> Geometry:
        """Return where the kernel goes on an image of `size`."""
        padding = self._same() if self.padding == "same" else tuple((p, p) for p in self.padding)
        return _geometry(size, self.kernel_size, self.stride, padding, self.dilation, self.groups)

    def _same(self):
        """Padding that keeps the size."""
        extra = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return tuple((e // 2, e - e // 2) for e in extra)

    def specs(self, in_shape):
        check_image(in_shape)
        if in_shape[2] != self.in_channels:
            raise ShapeError(f"expects {self.in_channels} channels on the last axis, given samples of shape {in_shape}")
        geometry = self.geometry(in_shape[:2])
        if min(geometry.out) < 1:
            raise ShapeError(
                f"a kernel that covers {geometry.reach} does not fit into an image of {in_shape[:2]} "
                f"padded to {geometry.padded}: use a larger image, more padding or a smaller kernel"
            )
        shape = (*self.kernel_size, self.in_channels // self.groups, self.out_channels)
        specs = {"W": Spec(shape, self.init)}
        if self.bias:
            specs["b"] = Spec((self.out_channels,), self.bias_init, decay=False)
        return specs, (*geometry.out, self.out_channels)

    def macs(self, in_shape):
        positions = math.prod(self.geometry(in_shape[:2]).out)
        return positions * math.prod(self.kernel_size) * self.in_channels // self.groups * self.out_channels

    def forward(self, p, x, ctx):
        geometry, x = self.geometry(x.shape[1:3]), np.ascontiguousarray(x)
        y = ctx.empty((len(x), *geometry.out, p.W.shape[3]), x.dtype)
        pool = ctx.network_context.pool
        self.algorithm(geometry, p.W.shape[3]).forward(x, p.W, getattr(p, "b", None), y, geometry, pool)
        return y, x

    def backward(self, p, gy, x, ctx):
        geometry = self.geometry(x.shape[1:3])
        gy = np.ascontiguousarray(gy)
        gx = ctx.empty(x.shape, x.dtype) if ctx.needs_input_grad else None
        pool, needs_gx = ctx.network_context.pool, ctx.needs_input_grad
        backward = self.algorithm(geometry, gy.shape[3]).backward
        if not ctx.defers:
            gradients = {"W": backward(x, gy, p.W, gx, geometry, pool, needs_gx)}
        else:  # dLoss/dx first, and the patches once more for the weight

            def add_weight_gradient(array: np.ndarray) -> None:
                write_gradient(array, backward(x, gy, None, None, geometry, pool, needs_gx), True, pool)

            if gx is not None:
                backward(x, gy, p.W, gx, geometry, pool, needs_gx, weight_gradient=False)
            gradients = {"W": add_weight_gradient}
        if hasattr(p, "b"):
            gradients["b"] = RowSum(gy.reshape(-1, gy.shape[3]))
        return gx, gradients

    def algorithm(self, geometry: Geometry, out_channels: int | None = None):
        """Return the module that does the work: the choice depends on shapes only, so it is the same everywhere."""
        out_channels = out_channels or self.out_channels
        return min(
            (im2col, winograd, winograd_rows), key=lambda form: form.cost(geometry, self.in_channels, out_channels)
        )


def check_image(in_shape) -> None:
    """Refuse samples that are not (height, width, channels)."""
    if len(in_shape) != 3:
        raise ShapeError(f"expects images (height, width, channels), given samples of shape {in_shape}")
