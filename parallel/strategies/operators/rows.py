"""Layers of which this rank computes some rows of the output, from rows of the input.

What lies outside the image is what one process has there: zeros around a convolution's input, nothing around a pool's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from nn.core.layer import Layer
from nn.layers.batch_normalization import BatchNorm
from nn.layers.convolution import Conv2d, Geometry
from nn.layers.pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from nn.models.resnet import Subsample
from parallel.strategies.operators.halo import Halo, Interval, common, owned_rows
from parallel.strategies.tensor.parts import Inner

Needs = Callable[[int, int], Interval]  # rows of the output -> those of the input, also outside the image


def window_of(layer: Layer, size: tuple[int, int]) -> Needs | None:
    """Which rows of an image of that size some rows of the output are made of; None for what is no such layer."""
    if isinstance(layer, Conv2d):
        geometry = layer.geometry(size)
        reach, stride, before = geometry.reach[0], geometry.stride[0], geometry.padding[0][0]
    elif isinstance(layer, (MaxPool2d, AvgPool2d)):
        reach, stride, before = layer.kernel_size[0], layer.stride[0], layer.padding[0]
    elif isinstance(layer, Subsample):
        reach, stride, before = 1, layer.stride, 0
    elif isinstance(layer, AdaptiveAvgPool2d):
        n, m = size[0], layer.output_size[0]
        return lambda a, b: (a * n // m, -(-b * n // m))
    else:
        return None
    return lambda a, b: (a * stride - before, (b - 1) * stride - before + reach)


def needed_rows(layer: Layer, size: tuple[int, int], out_height: int, ranks: int) -> list[Interval]:
    """What every rank needs of an image of that size, inside it."""
    return [common(window_of(layer, size)(*rows), (0, size[0])) for rows in owned_rows(out_height, ranks)]


class WindowRows(Inner):
    """A convolution or pool of some rows.

    Parameters
    ----------
    layer : Conv2d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d or Subsample
    size : (height, width)
        Of the whole input.
    out_height : int
        Of the whole output.
    rank, ranks : int
    whole : bool
        Whether every rank is given the whole image, as the first of these layers is: then nothing travels.
    """

    def __init__(self, layer: Layer, size: tuple[int, int], out_height: int, rank: int, ranks: int, whole: bool):
        super().__init__(layer)
        self.output = self.gradient = "new"
        self.size, self.rank, self.whole = size, rank, whole
        self.out = owned_rows(out_height, ranks)[rank]
        self.halo = Halo(size[0], needed_rows(layer, size, out_height, ranks), rank)
        lo, hi = window_of(layer, size)(*self.out)
        self.outside = self.halo.lo - lo, hi - self.halo.hi  # rows above and below
        self.geometries: dict[tuple[int, int], Geometry] = {}
        self.rows = self._of_rows()

    def _of_rows(self) -> Layer:
        """The layer as it is for this rank's rows, with what is outside the image."""
        other = copy.copy(self.layer)
        if isinstance(other, Conv2d):
            other.geometry = self._geometry
        elif isinstance(other, MaxPool2d):
            other.padding = 0, other.padding[1]
        elif not isinstance(other, Subsample):
            other.matrices = self._matrices
        return other

    def _geometry(self, size: tuple[int, int]):
        if size not in self.geometries:
            whole = self.layer.geometry(self.size)
            self.geometries[size] = replace(whole, size=size, padding=(self.outside, whole.padding[1]))
        return self.geometries[size]

    def _matrices(self, size: tuple[int, int], dtype) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = self.layer.matrices(self.size, dtype)
        return np.ascontiguousarray(rows[slice(*self.out), self.halo.lo : self.halo.hi]), columns

    def forward(self, p, x, run):
        theirs = None if self.whole else self.halo.receive(x, run)
        rows = self._needed(x, theirs, run)
        if isinstance(self.layer, MaxPool2d) and any(self.outside):
            rows = self._surrounded(rows, run)
        y, saved = self.rows.forward(p, rows, run)
        if isinstance(self.layer, Conv2d):  # which saves all rows that it needs: they are put together once more
            saved = x, theirs
        return y, saved

    def _needed(self, x, theirs, run):
        return self.halo.keep(x, run) if self.whole else self.halo.put_together(x, theirs, run)

    def backward(self, p, g, gy, saved, run):
        if isinstance(self.layer, Conv2d):
            saved = self._needed(*saved, run)
        gx = self.rows.backward(p, g, gy, saved, run)
        if gx is None or not run.wants_gx:
            return None
        if isinstance(self.layer, MaxPool2d) and any(self.outside):
            above, below = self.outside
            gx = gx[:, above : gx.shape[1] - below]
        if not self.whole:
            return self.halo.give_back(gx, run)
        whole = run.empty((len(gx), *self.size, gx.shape[3]), gx.dtype)
        whole[...] = 0
        whole[:, self.halo.lo : self.halo.hi] = gx
        run.group("space").sum(whole)
        return whole

    def _surrounded(self, x: np.ndarray, run) -> np.ndarray:
        """x between rows that never are a maximum."""
        above, below = self.outside
        found = run.empty((len(x), above + x.shape[1] + below, *x.shape[2:]), x.dtype)
        found[:, :above] = found[:, above + x.shape[1] :] = -np.inf
        found[:, above : above + x.shape[1]] = x
        return found


class BatchNormRows(Inner):
    """Statistics over all rows, of the ranks that have them; with `synchronized` over all samples, too."""

    def __init__(self, layer: BatchNorm):
        super().__init__(layer)
        self.synchronized = layer.synchronized
        self.rows = copy.copy(layer)
        self.rows.synchronized = True

    def forward(self, p, x, run):
        return self._among(run, self.rows.forward, p, x, run)

    def backward(self, p, g, gy, saved, run):
        return self._among(run, self.rows.backward, p, g, gy, saved, run)

    def _among(self, run, call: Callable, *arguments):
        """Call it where the ranks that share samples are those that have rows of them."""
        groups = run.context.groups
        before = groups["data"]
        groups["data"] = groups["everyone" if self.synchronized else "space"]
        try:
            return call(*arguments)
        finally:
            groups["data"] = before


class GlobalMeanRows(Inner):
    """GlobalAvgPool2d: from all ranks' rows, whole on each."""

    def __init__(self, layer: Layer, height: int):
        super().__init__(layer)
        self.height = height

    def forward(self, p, x, run):
        y, saved = self.layer.forward(p, x, run)
        y *= x.shape[1] / self.height
        run.group("space").sum(y)
        return y, saved

    def backward(self, p, g, gy, shape, run):
        gx = self.layer.backward(p, g, gy, shape, run)
        gx *= shape[1] / self.height
        return gx


class GlobalMaxRows(Inner):
    """GlobalMaxPool2d, the same; of equal ones the first rank's, which is the first in reading order."""

    def forward(self, p, x, run):
        y, saved = self.layer.forward(p, x, run)
        group = run.group("space")
        everyones = run.moved(group.gather, y)
        winner = everyones.argmax(axis=0)
        return np.take_along_axis(everyones, winner[None], axis=0)[0], (saved, winner == group.rank)

    def backward(self, p, g, gy, saved, run):
        saved, won = saved
        return self.layer.backward(p, g, np.multiply(gy, won, run.empty(gy.shape, gy.dtype)), saved, run)


def halos(layer: Layer) -> Iterator[Halo]:
    """Those of a layer and of the layers inside."""
    if isinstance(layer, WindowRows):
        yield layer.halo
    for child in layer.children().values():
        yield from halos(child)
