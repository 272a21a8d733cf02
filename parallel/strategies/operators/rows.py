"""Layers of which this rank computes some rows of the output, from rows of the input.

What lies outside the image is what one process has there: zeros around a convolution's input, nothing around a pool's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nn.core.containers import Wrapper
from nn.core.layer import Layer
from nn.layers.batch_normalization import BatchNorm
from nn.layers.convolution import Conv2d
from nn.layers.pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from nn.models.resnet import Subsample
from parallel.strategies.activation_transfer import transfer
from parallel.strategies.operators.halo import Halo, Interval, common, owned_rows

HIDES = 1 << 24  # multiply-accumulates behind which messages between nodes may be hidden: more of them
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


class OutputRows(NamedTuple):
    """Some rows of a layer's output, and what they are made of.

    Attributes
    ----------
    out, needs : (lo, hi)
        Rows of the output, and of the input inside the image.
    outside : (int, int)
        Rows above and below that, outside the image.
    """

    out: Interval
    needs: Interval
    outside: tuple[int, int]


def part_of(window: Needs, height: int, out: Interval) -> OutputRows:
    """What some rows of the output are made of, of an image of that height."""
    lo, hi = window(*out)
    needs = common((lo, hi), (0, height))
    return OutputRows(out, needs, (needs[0] - lo, hi - needs[1]))


class WindowRows(Wrapper):
    """A convolution or pool of some rows.

    Rows that come from other nodes may be on their way while a convolution computes what it can without; and the
    gradients of those rows while it computes all others. The borders are computed by themselves then, and their
    gradients twice, so it pays where messages take longer than that.

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

    output = gradient = "new"

    def __init__(self, layer: Layer, size: tuple[int, int], out_height: int, rank: int, ranks: int, whole: bool):
        super().__init__(layer)
        self.size, self.whole, window = size, whole, window_of(layer, size)
        self.halo = Halo(size[0], needed_rows(layer, size, out_height, ranks), rank)
        out = owned_rows(out_height, ranks)[rank]
        self.part = part_of(window, size[0], out)
        self.rows = self._of_rows(self.part)
        self.inside, self.borders = None, ()
        if isinstance(layer, Conv2d) and self.halo.receives and not whole:
            self._find_inside(window, out)
        if self.inside:
            rows = self.inside[0].out[1] - self.inside[0].out[0]
            self.macs_inside = layer.macs((*size, layer.in_channels)) // out_height * rows  # of one sample

    def _find_inside(self, window: Needs, out: Interval) -> None:
        """The rows of the output that are made of this rank's rows alone, if any; and those above and below."""
        lo, hi = self.halo.owned[self.halo.rank]
        alone = []
        for row in range(*out):
            needs = part_of(window, self.size[0], (row, row + 1)).needs
            if lo <= needs[0] and needs[1] <= hi:
                alone.append(row)
        if not alone:
            return
        cuts = (out[0], alone[0]), (alone[0], alone[-1] + 1), (alone[-1] + 1, out[1])
        above, inside, below = (part_of(window, self.size[0], rows) for rows in cuts)
        borders = [part for part in (above, below) if part.out[0] < part.out[1]]
        if all(part.needs[0] < part.needs[1] for part in borders):
            self.inside, *self.borders = ((part, self._of_rows(part)) for part in (inside, *borders))

    def _of_rows(self, part: OutputRows) -> Layer:
        """The layer as it is for a part, with what is outside the image."""
        other = copy.copy(self.layer)
        if isinstance(other, Conv2d):
            whole, (lo, hi) = self.layer.geometry(self.size), part.needs
            geometry = replace(whole, size=(hi - lo, self.size[1]), padding=(part.outside, whole.padding[1]))
            other.geometry = lambda size: geometry
        elif isinstance(other, MaxPool2d):
            other.padding = 0, other.padding[1]
        elif not isinstance(other, Subsample):
            other.matrices = self._matrices
        return other

    def _matrices(self, size: tuple[int, int], dtype) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = self.layer.matrices(self.size, dtype)
        return np.ascontiguousarray(rows[slice(*self.part.out), slice(*self.part.needs)]), columns

    def forward(self, p, x, ctx):
        if self._hides(x):
            return self.forward_in_parts(p, x, ctx)
        theirs = None if self.whole else self.halo.receive(x, ctx)
        rows = self._needed(x, theirs, ctx)
        if isinstance(self.layer, MaxPool2d) and any(self.part.outside):
            rows = self._surrounded(rows, ctx)
        y, saved = self.rows.forward(p, rows, ctx)
        if isinstance(self.layer, Conv2d):  # which saves all rows that it needs: they are put together once more
            saved = x, theirs
        return y, saved

    def _needed(self, x, theirs, ctx):
        return self.halo.keep(x, ctx) if self.whole else self.halo.put_together(x, theirs, ctx)

    def backward(self, p, gy, saved, ctx):
        if isinstance(self.layer, Conv2d):
            hides, saved = self._hides(saved[0]), self._needed(*saved, ctx)
            if hides and ctx.needs_input_grad:
                return self.backward_in_parts(p, gy, saved, ctx)
        gx, gradients = self.rows.backward(p, gy, saved, ctx)
        if gx is None or not ctx.needs_input_grad:
            return None, gradients
        if isinstance(self.layer, MaxPool2d) and any(self.part.outside):
            above, below = self.part.outside
            gx = gx[:, above : gx.shape[1] - below]
        if not self.whole:
            return self.halo.give_back(gx, ctx), gradients
        whole = ctx.empty((len(gx), *self.size, gx.shape[3]), gx.dtype)
        whole[...] = 0
        whole[:, self.halo.lo : self.halo.hi] = gx
        ctx.group("space").sum(whole)
        return whole, gradients

    def _hides(self, x: np.ndarray) -> bool:
        """Whether rows that are on their way are to be hidden behind what needs none, and there is enough of that."""
        halo = self.halo
        return bool(self.inside and halo.beside and halo.hides) and len(x) * self.macs_inside > HIDES

    def forward_in_parts(self, p, x, ctx):
        """What is made of this rank's rows alone, while others are on their way; then what is at the borders."""
        pieces, first = [], self.halo.owned[self.halo.rank][0]
        inside, layer = self.inside

        def compute():
            lo, hi = inside.needs
            pieces.append((inside, layer.forward(p, x[:, lo - first : hi - first], ctx)[0]))

        theirs = self.halo.receive(x, ctx, compute)
        for part, layer in self.borders:
            pieces.append((part, layer.forward(p, self.halo.put_together(x, theirs, ctx, part.needs), ctx)[0]))
        start, stop = self.part.out
        y = ctx.empty((len(x), stop - start, *pieces[0][1].shape[2:]), x.dtype)
        for part, piece in pieces:
            y[:, part.out[0] - start : part.out[1] - start] = piece
        return y, (x, theirs)

    def backward_in_parts(self, p, gy, x, ctx):
        """The gradients of other ranks' rows, from the borders; while they are on their way, all."""
        borders, made = [], []
        for part, layer in self.borders:
            theirs = x[:, part.needs[0] - self.halo.lo : part.needs[1] - self.halo.lo]
            upstream = gy[:, part.out[0] - self.part.out[0] : part.out[1] - self.part.out[0]]
            theirs, upstream = np.ascontiguousarray(theirs), np.ascontiguousarray(upstream)
            gx, geometry = ctx.empty(theirs.shape, gy.dtype), layer.geometry(theirs.shape[1:3])
            backward, pool = layer.algorithm(geometry, gy.shape[3]).backward, ctx.network_context.pool
            backward(theirs, upstream, p.W, gx, geometry, pool, needs_gx=True, weight_gradient=False)
            borders.append((part.needs, gx))
        self.halo.send_back(borders, ctx, lambda: made.append(self.rows.backward(p, gy, x, ctx)))
        gx, gradients = made[0]
        return self.halo.add_back(gx, ctx), gradients

    def _surrounded(self, x: np.ndarray, ctx) -> np.ndarray:
        """x between rows that never are a maximum."""
        above, below = self.part.outside
        found = ctx.empty((len(x), above + x.shape[1] + below, *x.shape[2:]), x.dtype)
        found[:, :above] = found[:, above + x.shape[1] :] = -np.inf
        found[:, above : above + x.shape[1]] = x
        return found


class BatchNormRows(Wrapper):
    """Statistics over all rows, of the ranks that have them; with `synchronized` over all samples, too."""

    def __init__(self, layer: BatchNorm):
        super().__init__(layer)
        self.synchronized = layer.synchronized
        self.rows = copy.copy(layer)
        self.rows.synchronized = True

    def forward(self, p, x, ctx):
        return self._among(ctx, self.rows.forward, p, x, ctx)

    def backward(self, p, gy, saved, ctx):
        return self._among(ctx, self.rows.backward, p, gy, saved, ctx)

    def _among(self, ctx, call: Callable, *arguments):
        """Call it where the ranks that share samples are those that have rows of them."""
        groups = ctx.network_context.groups
        before = groups["data"]
        groups["data"] = groups["everyone" if self.synchronized else "space"]
        try:
            return call(*arguments)
        finally:
            groups["data"] = before


class GlobalMeanRows(Wrapper):
    """GlobalAvgPool2d: from all ranks' rows, whole on each."""

    def __init__(self, layer: Layer, height: int):
        super().__init__(layer)
        self.height = height

    def forward(self, p, x, ctx):
        y, saved = self.layer.forward(p, x, ctx)
        y *= x.shape[1] / self.height
        ctx.group("space").sum(y)
        return y, saved

    def backward(self, p, gy, shape, ctx):
        gx, gradients = self.layer.backward(p, gy, shape, ctx)
        gx *= shape[1] / self.height
        return gx, gradients


class GlobalMaxRows(Wrapper):
    """GlobalMaxPool2d, the same; of equal ones the first rank's, which is the first in reading order."""

    def forward(self, p, x, ctx):
        y, saved = self.layer.forward(p, x, ctx)
        group = ctx.group("space")
        everyones = transfer(ctx, group.all_gather, y)
        winner = everyones.argmax(axis=0)
        return np.take_along_axis(everyones, winner[None], axis=0)[0], (saved, winner == group.rank)

    def backward(self, p, gy, saved, ctx):
        saved, won = saved
        return self.layer.backward(p, np.multiply(gy, won, ctx.empty(gy.shape, gy.dtype)), saved, ctx)


def halos(layer: Layer) -> Iterator[Halo]:
    """Those of a layer and of the layers inside."""
    if isinstance(layer, WindowRows):
        yield layer.halo
    for child in layer.children().values():
        yield from halos(child)
