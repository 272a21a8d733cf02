"""Pooling: each channel of an image (N, H, W, C) is summarised over windows.

A window's slots are strided views of the image, so a maximum over windows is a handful of elementwise maxima.
"""

from __future__ import annotations

import math

import numpy as np

from nn.convolution import Pair, brief, check_image, pair
from nn.layer import Layer, ShapeError


class MaxPool2d(Layer):
    """The largest value in each window; of equal ones, the first in reading order gets the gradient.

    Parameters
    ----------
    kernel_size : int or (height, width)
    stride : int or (height, width)
        By default the kernel's size.
    padding : int or (height, width)
        At most half the kernel; padding never wins.
    ceil_mode : bool
        Keep windows that stick out at the bottom and right, as long as they start inside the image or its padding.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False):
        self.kernel = pair("MaxPool2d: kernel_size", kernel_size, 1)
        self.stride = pair("MaxPool2d: stride", kernel_size if stride is None else stride, 1)
        self.padding = pair("MaxPool2d: padding", padding, 0)
        self.ceil_mode = ceil_mode
        if any(2 * p > k for p, k in zip(self.padding, self.kernel, strict=True)):
            raise ValueError(f"MaxPool2d: padding {self.padding} is more than half the kernel {self.kernel}")

    def __repr__(self):
        parts = [f"{brief(self.kernel)}"]
        if self.stride != self.kernel:
            parts.append(f"stride={brief(self.stride)}")
        if self.padding != (0, 0):
            parts.append(f"padding={brief(self.padding)}")
        if self.ceil_mode:
            parts.append("ceil_mode=True")
        return f"MaxPool2d({', '.join(parts)})"

    def specs(self, in_shape):
        check_image(in_shape)
        return {}, (*self.out_size(in_shape[:2]), in_shape[2])

    def out_size(self, size: tuple[int, int]) -> tuple[int, int]:
        out = []
        for n, k, s, p in zip(size, self.kernel, self.stride, self.padding, strict=True):
            if n + 2 * p < k:
                raise ShapeError(
                    f"a window of {self.kernel} does not fit into an image of {size} with padding {self.padding}"
                )
            count = (n + 2 * p - k + (s - 1 if self.ceil_mode else 0)) // s + 1
            if self.ceil_mode and (count - 1) * s >= n + p:
                count -= 1
            out.append(count)
        return tuple(out)

    def forward(self, p, x, run):
        oh, ow = self.out_size(x.shape[1:3])
        y = run.empty((len(x), oh, ow, x.shape[3]), x.dtype)
        winner = run.empty(y.shape, np.uint8 if math.prod(self.kernel) <= 256 else np.int32)
        padded = self._padded(x, (oh, ow), run)
        larger = run.scratch("larger", y.shape, np.bool_)
        candidate = run.scratch("candidate", y.shape, winner.dtype)
        for k, slot in enumerate(self._slots(padded, (oh, ow))):
            if k == 0:
                y[...] = slot
                winner[...] = 0
                continue
            np.greater(slot, y, out=larger)
            np.maximum(slot, y, out=y)
            np.multiply(larger, winner.dtype.type(k), out=candidate)
            np.maximum(winner, candidate, out=winner)
        return y, (winner, x.shape)

    def backward(self, p, g, gy, saved, run):
        winner, shape = saved
        oh, ow = winner.shape[1:3]
        gx = run.empty(shape, gy.dtype)
        total = self._padded(None, (oh, ow), run, gx)
        total[...] = 0
        won = run.scratch("larger", winner.shape, np.bool_)
        share = run.scratch("share", winner.shape, gy.dtype)
        for k, slot in enumerate(self._slots(total, (oh, ow))):
            np.equal(winner, k, out=won)
            slot += np.multiply(gy, won, out=share)
        if total is not gx:
            (ph, pw), (h, w) = self.padding, shape[1:3]
            gx[...] = total[:, ph : ph + h, pw : pw + w]
        return gx

    def _padded(self, x, out, run, gx=None):
        """x (or gx) where every window fits, else a workspace around it, with x inside and -inf outside."""
        image = x if gx is None else gx
        n, h, w, c = image.shape
        (ph, pw), (kh, kw), (sh, sw) = self.padding, self.kernel, self.stride
        need = (out[0] - 1) * sh + kh, (out[1] - 1) * sw + kw
        if not ph and not pw and need[0] <= h and need[1] <= w:
            return image
        padded = run.scratch("padded", (n, max(need[0], ph + h), max(need[1], pw + w), c), image.dtype)
        if gx is None:
            padded[...] = -np.inf
            padded[:, ph : ph + h, pw : pw + w] = x
        return padded

    def _slots(self, image, out):
        """The views of `image` that hold the first, second, ... value of every window."""
        (kh, kw), (sh, sw) = self.kernel, self.stride
        for u in range(kh):
            for v in range(kw):
                yield image[:, u : u + (out[0] - 1) * sh + 1 : sh, v : v + (out[1] - 1) * sw + 1 : sw]
