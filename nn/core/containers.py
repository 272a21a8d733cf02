"""Layers made of layers: Residual (He et al. 2015), Branches (Szegedy et al. 2014), Recompute (Chen et al. 2016).

A container decides what its children may overwrite (`plan`), and runs their backward in the reverse of their order, as
the layout has it: so finished gradients stay a growing prefix.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from nn.core.layer import Layer, ShapeError, as_pair, check_layers, child_specs
from nn.core.run import MicroBatch


class Residual(Layer):
    """y = body(x) + x, or body(x) + shortcut(x).

    Parameters
    ----------
    body : Layer
    shortcut : Layer or None
        Where the body changes the shape; None leaves x as it is.
    """

    def __init__(self, body: Layer, shortcut: Layer | None = None):
        check_layers("Residual", body, *([] if shortcut is None else [shortcut]))
        self.body, self.shortcut = body, shortcut

    def __repr__(self):
        return f"Residual({self.body!r}{f', {self.shortcut!r}' if self.shortcut else ''})"

    def children(self):
        return {"body": self.body} | ({"shortcut": self.shortcut} if self.shortcut else {})

    def child_shapes(self, in_shape):
        return [in_shape] * len(self.children())

    def specs(self, in_shape):
        specs, shapes = {}, []
        for name, child in self.children().items():
            specs[name], shape = child_specs(name, child, in_shape)
            shapes.append(shape)
        other = shapes[1] if self.shortcut else in_shape
        if shapes[0] != other:
            raise ShapeError(
                f"the body makes {shapes[0]} of samples of shape {in_shape}, the shortcut {other}: they cannot be added"
            )
        return specs, shapes[0]

    def plan(self, run):
        for child in run.children:  # x and gy go two ways: nobody may overwrite them
            child.x_free = child.gy_free = False
            child.first = run.first

    def forward(self, p, x, run):
        y, kept = forward_child(self.body, p[0], x, run.children[0])
        other, kept_shortcut = (
            (x, None) if not self.shortcut else forward_child(self.shortcut, p[1], x, run.children[1])
        )
        y = np.add(y, other, y if self.body.output == "new" else run.empty(y.shape, y.dtype))
        return y, [kept, kept_shortcut]

    def backward(self, p, g, gy, saved, run):
        other = gy
        if self.shortcut:
            other = backward_child(self.shortcut, p[1], g[1], gy, saved, 1, run)
        gx = backward_child(self.body, p[0], g[0], gy, saved, 0, run)
        if gx is None or other is None or not run.wants_gx:
            return None
        return np.add(gx, other, gx if self.body.gradient == "new" else run.empty(gx.shape, gx.dtype))


class Branches(Layer):
    """Several layers on the same input, their outputs side by side on the last axis: an inception module.

    Parameters
    ----------
    *layers : Layer
        Their outputs agree in all axes but the last.
    """

    def __init__(self, *layers: Layer):
        if not layers:
            raise ValueError("Branches needs at least one layer")
        check_layers("Branches", *layers)
        self.layers = layers

    def __repr__(self):
        return f"Branches({', '.join(map(repr, self.layers))})"

    def children(self):
        return {str(i): layer for i, layer in enumerate(self.layers)}

    def child_shapes(self, in_shape):
        return [in_shape] * len(self.layers)

    def specs(self, in_shape):
        specs, shapes = {}, []
        for name, child in self.children().items():
            specs[name], shape = child_specs(name, child, in_shape)
            shapes.append(shape)
        if len({shape[:-1] for shape in shapes}) > 1 or not all(shapes):
            raise ShapeError(f"outputs must agree in all axes but the last, given {', '.join(map(str, shapes))}")
        return specs, (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    def plan(self, run):
        for child in run.children:
            child.x_free, child.gy_free = False, True  # gy is a copy made here
            child.first = run.first

    def forward(self, p, x, run):
        outputs, saved = [], []
        for layer, pl, child in zip(self.layers, p, run.children, strict=True):
            y, kept = forward_child(layer, pl, x, child)
            outputs.append(y)
            saved.append(kept)
        widths = [y.shape[-1] for y in outputs]
        dtype = next((y.dtype for y in outputs if y.dtype.kind == "f"), x.dtype)  # x may hold ids
        y = run.empty((*outputs[0].shape[:-1], sum(widths)), dtype)
        np.concatenate(outputs, axis=-1, out=y)
        return y, (saved, widths)

    def backward(self, p, g, gy, saved, run):
        saved, widths = saved
        gx, stop = None, gy.shape[-1]
        for i in range(len(self.layers) - 1, -1, -1):
            part = run.empty((*gy.shape[:-1], widths[i]), gy.dtype)
            part[...] = gy[..., stop - widths[i] : stop]
            stop -= widths[i]
            one = backward_child(self.layers[i], p[i], g[i], part, saved, i, run)
            if gx is None:
                gx = one
            elif one is not None:
                gx += one
        return gx if run.wants_gx else None


class Recompute(Layer):
    """Activation checkpointing: keep only the input of a layer, and compute it again when its backward needs the rest.

    Less memory, a third more arithmetic. The second forward sees what the first saw: sample, step and padding, so the
    random numbers are the same; running statistics move once. Parameters have the names they have without it.

    Parameters
    ----------
    layer : Layer
        Usually a Sequential.
    """

    def __init__(self, layer: Layer):
        check_layers("Recompute", layer)
        self.layer = layer

    def __repr__(self):
        return f"Recompute({self.layer!r})"

    @property
    def output(self):
        return "kept" if self.layer.output == "view" else "new"

    @property
    def gradient(self):
        return self.layer.gradient

    def children(self):
        return self.layer.children()

    def child_shapes(self, in_shape):
        return self.layer.child_shapes(in_shape)

    def specs(self, in_shape):
        return self.layer.specs(in_shape)

    def macs(self, in_shape):
        return self.layer.macs(in_shape)

    def plan(self, run):
        run.x_free = False  # it is needed again
        self.layer.plan(run)

    def forward(self, p, x, run):
        y, _ = as_pair(self.layer.forward(p, x, run), self.layer, run)
        half = run.context.half
        return y, (half.keep(x, y) if half else x, replace(run.micro_batch, waiting=None))

    def backward(self, p, g, gy, saved, run):
        x, seen = saved
        half = run.context.half
        x = half.restored(x, gy.dtype) if half else x
        with _as_before(run, seen):
            _, kept = self.layer.forward(p, x, run)
        return self.layer.backward(p, g, gy, kept, run)


@contextlib.contextmanager
def _as_before(run, seen: MicroBatch):
    """Let layers see the micro-batch as it was, unwatched, and running statistics come out as they went in."""
    context = run.context
    now = context.micro_batch, context.watch
    state = [(array, array.copy()) for array in _states(run)]
    context.micro_batch, context.watch = seen, None
    try:
        yield
    finally:
        context.micro_batch, context.watch = now
        for array, value in state:
            array[...] = value


def _states(run):
    """All arrays of running statistics at and below a layer."""
    if not run.children:
        yield from vars(run.state).values()
    for child in run.children:
        yield from _states(child)


def forward_child(layer: Layer, p, x, run):
    """Forward of a child (run: its own): it is rounded, checked and watched as in a Sequential."""
    half = run.context.half
    if half:
        x = half.take(p, x, run)
    y, kept = as_pair(layer.forward(p, x, run), layer, run)
    if run.context.watch:
        run.context.watch(run.path, layer, y)
    return y, (kept if half is None or run.children else half.keep(kept, y))


def backward_child(layer: Layer, p, g, gy, saved: list, i: int, run):
    """Backward of child i, which lets go of what it saved and tells that its gradients are finished."""
    child, half = run.children[i], run.context.half
    if half:
        gy, saved[i] = half.restore(p, gy, saved[i], child)
    gx = layer.backward(p, g, gy, saved[i], child)
    saved[i] = None
    if run.context.ready:
        child.later(run.context.ready, child.end)
    return gx
