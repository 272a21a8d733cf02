"""Pooling: each channel of an image (N, H, W, C) is summarised over windows.

The first, second, ... values of all windows are strided views of the image, so a maximum over windows is a handful of
elementwise maxima. An average is linear and separates into rows and columns: two small matrices, whose transposes
are the backward pass. Sizes follow PyTorch's conventions, also where windows stick out (ceil_mode).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from nn.arguments import SizePair, call_text
from nn.core.layer import Layer, ShapeError
from nn.layers.convolution import Pair, check_image
from nn.layers.im2col import copy_runs
from nn.registry import register


class _Windows(Layer):
    """Base of pools with a kernel that moves; MaxPool2d says what the parameters mean."""

    output = gradient = "new"
    channelwise = True

    constraints = {"kernel_size": SizePair(1), "stride": SizePair(1), "padding": SizePair(0)}

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False):
        self.kernel_size, self.padding, self.ceil_mode = kernel_size, padding, ceil_mode
        self.stride = kernel_size if stride is None else stride

    def check_arguments(self):
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            name = type(self).__name__
            raise ValueError(f"{name}: padding {self.padding} is more than half the kernel {self.kernel_size}")

    def __repr__(self):
        return call_text(self, never={"stride"} if self.stride == self.kernel_size else ())

    def specs(self, in_shape):
        check_image(in_shape)
        return {}, (*self.out_size(in_shape[:2]), in_shape[2])

    def out_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Windows in (vertical, horizontal) direction."""
        out = []
        for n, k, s, p in zip(size, self.kernel_size, self.stride, self.padding, strict=True):
            if n + 2 * p < k:
                raise ShapeError(
                    f"a window of {self.kernel_size} does not fit into an image of {size} with padding {self.padding}"
                )
            count = (n + 2 * p - k + (s - 1 if self.ceil_mode else 0)) // s + 1
            if self.ceil_mode and (count - 1) * s >= n + p:
                count -= 1
            out.append(count)
        return tuple(out)


@register("layer")
class MaxPool2d(_Windows):
    """The largest value in each window; of equal ones, the first in reading order gets the gradient.

    Padding never wins. For backward, one byte an output holds the index in the window of its largest value.

    Parameters
    ----------
    kernel_size : int or (height, width)
    stride : int or (height, width)
        By default the kernel's size.
    padding : int or (height, width)
        At most half the kernel.
    ceil_mode : bool
        Keep windows that stick out at the bottom and right, if they start inside the image or the padding before it.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.MaxPool2d(3, stride=2, padding=1), (8, 8, 3)).out_shape
    (4, 4, 3)
    """

    takes_maxima = True

    def forward(self, p, x, ctx):
        out = self.out_size(x.shape[1:3])
        y = ctx.empty((len(x), *out, x.shape[3]), x.dtype)
        winner = ctx.empty(y.shape, np.uint8 if math.prod(self.kernel_size) <= 256 else np.uint32)
        larger = ctx.workspace("larger", y.shape, np.bool_)
        index = ctx.workspace("index", y.shape, winner.dtype)
        side_by_side = ctx.workspace("values", y.shape, x.dtype)  # contiguous, as it is read twice
        for k, values in enumerate(self._offset_views(self._reachable(x, out, ctx), out)):
            if k == 0:
                copy_runs(y, values)
                winner[...] = 0
                continue
            copy_runs(side_by_side, values)
            np.greater(side_by_side, y, out=larger)
            np.maximum(side_by_side, y, out=y)
            np.multiply(larger.view(np.uint8), winner.dtype.type(k), out=index)
            np.maximum(winner, index, out=winner)  # indices come in increasing order: the last to be larger won
        return y, (winner, x.shape)

    def backward(self, p, gy, saved, ctx):
        winner, shape = saved
        out, (h, w), (ph, pw) = winner.shape[1:3], shape[1:3], self.padding
        gx = ctx.empty(shape, gy.dtype)
        size = self._reach(out, (h, w))
        inside = size == (h, w)
        total = gx if inside else ctx.workspace("padded", (shape[0], *size, shape[3]), gy.dtype)
        disjoint = all(k <= s for k, s in zip(self.kernel_size, self.stride, strict=True))
        if not disjoint or any(n != m * k for n, m, k in zip(size, out, self.kernel_size, strict=True)):
            total[...] = 0
        won = ctx.workspace("larger", winner.shape, np.bool_)
        for k, gradients in enumerate(self._offset_views(total, out)):
            np.equal(winner, k, out=won)
            product = np.multiply(gy, won, out=ctx.workspace("winners", winner.shape, gy.dtype))
            if disjoint:
                copy_runs(gradients, product)
            else:
                gradients += product
        if not inside:
            gx[...] = total[:, ph : ph + h, pw : pw + w]
        return gx, {}

    def _offset_views(self, image, out):
        """Yield the views of `image` that hold the first, second, ... value of every window."""
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        for u in range(kh):
            for v in range(kw):
                yield image[:, u : u + (out[0] - 1) * sh + 1 : sh, v : v + (out[1] - 1) * sw + 1 : sw]

    def _reach(self, out, size) -> tuple[int, int]:
        """Size of an image, padding included, in which all windows are inside."""
        ends = ((n - 1) * s + k for n, s, k in zip(out, self.stride, self.kernel_size, strict=True))
        return tuple(max(end, p + n) for end, p, n in zip(ends, self.padding, size, strict=True))

    def _reachable(self, x, out, ctx):
        """x where all windows are inside it, else a workspace around it that is filled with -infinity."""
        n, h, w, c = x.shape
        size = self._reach(out, (h, w))
        if size == (h, w):
            return x
        ph, pw = self.padding
        padded = ctx.workspace("padded", (n, *size, c), x.dtype)
        padded[...] = -np.inf
        padded[:, ph : ph + h, pw : pw + w] = x
        return padded


class _Averages(Layer):
    """Base of the average pools: y = R x C^T with R (out rows, rows) and C (out columns, columns)."""

    output = gradient = "new"
    channelwise = True

    def matrices(self, size: tuple[int, int], dtype) -> tuple[np.ndarray, np.ndarray]:
        """R and C for an image of that size."""
        raise TypeError(f"{type(self).__name__} does not define matrices")

    def forward(self, p, x, ctx):
        rows, columns = self.matrices(x.shape[1:3], x.dtype)
        return _both_axes(rows, columns, x, ctx), x.shape[1:3]

    def backward(self, p, gy, size, ctx):
        rows, columns = self.matrices(size, gy.dtype)
        return _both_axes(rows.T, columns.T, gy, ctx), {}


@register("layer")
class AvgPool2d(_Averages, _Windows):
    """The mean of each window.

    Parameters
    ----------
    kernel_size, stride, padding, ceil_mode
        As for MaxPool2d.
    count_include_pad : bool
        Whether padding counts as zeros, or not at all.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.AvgPool2d(2), (8, 8, 3)).out_shape
    (4, 4, 3)
    """

    def __init__(
        self,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ):
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.count_include_pad = count_include_pad

    def matrices(self, size, dtype):
        axes = zip(size, self.out_size(size), self.kernel_size, self.stride, self.padding, strict=True)
        return tuple(_moving_average(*axis, self.count_include_pad, dtype) for axis in axes)


@register("layer")
class AdaptiveAvgPool2d(_Averages):
    """Means over windows that divide the image as evenly as whole numbers can, whatever its size.

    Window i of m over n rows goes from floor(i n / m) to ceil((i + 1) n / m); neighbours may overlap by one.

    Parameters
    ----------
    output_size : int or (height, width)

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.AdaptiveAvgPool2d(2), (7, 5, 3)).out_shape
    (2, 2, 3)
    """

    constraints = {"output_size": SizePair(1)}

    def __init__(self, output_size: Pair):
        self.output_size = output_size

    def specs(self, in_shape):
        check_image(in_shape)
        return {}, (*self.output_size, in_shape[2])

    def matrices(self, size, dtype):
        return tuple(_even_average(n, m, dtype) for n, m in zip(size, self.output_size, strict=True))


@register("layer")
class GlobalAvgPool2d(Layer):
    """The mean of each channel: (N, H, W, C) to (N, C).

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.GlobalAvgPool2d(), (8, 8, 3)).out_shape
    (3,)
    """

    output = gradient = "new"
    channelwise = True

    def specs(self, in_shape):
        check_image(in_shape)
        return {}, in_shape[2:]

    def forward(self, p, x, ctx):
        positions = x.shape[1] * x.shape[2]
        y = np.matmul(ctx.ones(positions, x.dtype), x.reshape(len(x), positions, x.shape[3]))
        y *= 1 / positions
        return y, x.shape

    def backward(self, p, gy, shape, ctx):
        gx = ctx.empty(shape, gy.dtype)
        gx[...] = (gy * (1 / (shape[1] * shape[2])))[:, None, None]
        return gx, {}


@register("layer")
class GlobalMaxPool2d(Layer):
    """The largest value of each channel: (N, H, W, C) to (N, C); the first of equal ones gets the gradient.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.GlobalMaxPool2d(), (8, 8, 3)).out_shape
    (3,)
    """

    output = gradient = "new"
    channelwise = takes_maxima = True

    def specs(self, in_shape):
        check_image(in_shape)
        return {}, in_shape[2:]

    def forward(self, p, x, ctx):
        flat = x.reshape(len(x), x.shape[1] * x.shape[2], x.shape[3])
        winner = flat.argmax(axis=1)[:, None]
        return np.take_along_axis(flat, winner, axis=1)[:, 0], (winner, x.shape)

    def backward(self, p, gy, saved, ctx):
        winner, shape = saved
        gx = ctx.empty(shape, gy.dtype)
        gx[...] = 0
        flat = gx.reshape(shape[0], shape[1] * shape[2], shape[3])
        np.put_along_axis(flat, winner, gy[:, None], axis=1)
        return gx, {}


def _both_axes(rows, columns, x, ctx) -> np.ndarray:
    """rows x columns^T for every image and channel."""
    n, h, w, c = x.shape
    half = ctx.workspace("half", (n, len(rows), w * c), x.dtype)
    np.matmul(rows, x.reshape(n, h, w * c), out=half)
    y = ctx.empty((n, len(rows), len(columns), c), x.dtype)
    np.matmul(columns, half.reshape(n, len(rows), w, c), out=y)
    return y


@cache
def _moving_average(n: int, out: int, kernel: int, stride: int, padding: int, count_padding: bool, dtype):
    """Row i averages kernel values from i stride - padding on; those beyond n + padding never count."""
    matrix = np.zeros((out, n), dtype)
    for i, row in enumerate(matrix):
        start = i * stride - padding
        end = min(start + kernel, n + padding)
        inside = slice(max(start, 0), min(end, n))
        row[inside] = 1 / (end - start if count_padding else inside.stop - inside.start)
    return matrix


@cache
def _even_average(n: int, out: int, dtype):
    """Row i averages from floor(i n / out) to ceil((i + 1) n / out)."""
    matrix = np.zeros((out, n), dtype)
    for i, row in enumerate(matrix):
        window = slice(i * n // out, -(-(i + 1) * n // out))
        row[window] = 1 / (window.stop - window.start)
    return matrix
