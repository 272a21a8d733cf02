"""Layers made of layers: Residual (He et al. 2015), Parallel (Szegedy et al. 2014), Recompute (Chen et al. 2016).

A container decides what its children may overwrite (`plan`), and runs their backward in the reverse of their order, as
the layout has it: so finished gradients stay a growing prefix.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from nn.core.checks import as_pair
from nn.core.context import LayerContext, MicroBatch
from nn.core.layer import Layer, ShapeError, check_layers, child_specs
from nn.registry import register


@register("layer")
class Residual(Layer):
    """y = body(x) + x, or body(x) + shortcut(x).

    Parameters
    ----------
    body : Layer
    shortcut : Layer or None
        Where the body changes the shape; None leaves x as it is.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.Residual(nn.Linear(8, 8)), (8,)).out_shape
    (8,)
    """

    output = gradient = "new"

    def __init__(self, body: Layer, shortcut: Layer | None = None):
        check_layers("Residual", body, *([] if shortcut is None else [shortcut]))
        self.body, self.shortcut = body, shortcut

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

    def plan(self, ctx):
        for child in ctx.children:  # x and gy are used twice: nobody may overwrite them
            child.may_overwrite_input = child.may_overwrite_grad = False
            child.is_first = ctx.is_first

    def forward(self, p, x, ctx):
        y, saved_body = ctx.children[0].forward(p[0], x)
        other, saved_shortcut = ctx.children[1].forward(p[1], x) if self.shortcut else (x, None)
        y = np.add(y, other, y if self.body.output == "new" else ctx.empty(y.shape, y.dtype))
        return y, [saved_body, saved_shortcut]

    def backward(self, p, gy, saved, ctx):
        saved_shortcut = saved.pop()
        other = ctx.children[1].backward(p[1], gy, saved_shortcut) if self.shortcut else gy
        gx = ctx.children[0].backward(p[0], gy, saved.pop())
        if gx is None or other is None or not ctx.needs_input_grad:
            return None, {}
        return np.add(gx, other, gx if self.body.gradient == "new" else ctx.empty(gx.shape, gx.dtype)), {}


@register("layer")
class Parallel(Layer):
    """Several layers on the same input, their outputs concatenated on the last axis: an inception module.

    Parameters
    ----------
    *layers : Layer
        Their outputs agree in all axes but the last.

    Examples
    --------
    Two tables of the same ids:

    >>> import nn
    >>> nn.Parallel(nn.Embedding(9, 4), nn.Embedding(9, 2)).specs((3,))[1]
    (3, 6)
    """

    output = gradient = "new"

    def __init__(self, *layers: Layer):
        if not layers:
            raise ValueError("Parallel needs at least one layer")
        check_layers("Parallel", *layers)
        self.layers = layers

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

    def plan(self, ctx):
        for child in ctx.children:
            child.may_overwrite_input, child.may_overwrite_grad = False, True  # gy is a copy made here
            child.is_first = ctx.is_first

    def forward(self, p, x, ctx):
        outputs, saved = [], []
        for views, child in zip(p, ctx.children, strict=True):
            y, saved_by_child = child.forward(views, x)
            outputs.append(y)
            saved.append(saved_by_child)
        widths = [y.shape[-1] for y in outputs]
        dtype = next((y.dtype for y in outputs if y.dtype.kind == "f"), x.dtype)  # x may hold ids
        y = ctx.empty((*outputs[0].shape[:-1], sum(widths)), dtype)
        np.concatenate(outputs, axis=-1, out=y)
        return y, (saved, widths)

    def backward(self, p, gy, saved, ctx):
        saved, widths = saved
        gx, stop = None, gy.shape[-1]
        for i in range(len(self.layers) - 1, -1, -1):
            part = ctx.empty((*gy.shape[:-1], widths[i]), gy.dtype)
            part[...] = gy[..., stop - widths[i] : stop]
            stop -= widths[i]
            one = ctx.children[i].backward(p[i], part, saved.pop())
            if gx is None and one is not None and self.layers[i].gradient == "kept":
                one = one.copy()
            if gx is None:
                gx = one
            elif one is not None:
                gx += one
        return (gx if ctx.needs_input_grad else None), {}


class Wrapper(Layer):
    """Base of layers that run another one under its own path: the same arrays, children and shapes.

    Parameters
    ----------
    layer : Layer
    """

    def __init__(self, layer: Layer):
        self.layer = layer
        self.ids, self.synchronized = layer.ids, layer.synchronized
        self.updates_without_samples = layer.updates_without_samples

    def __repr__(self):
        return repr(self.layer)

    @property
    def output(self):
        return self.layer.output

    @property
    def gradient(self):
        return self.layer.gradient

    def children(self):
        return self.layer.children()

    def child_shapes(self, in_shape):
        return self.layer.child_shapes(in_shape)

    def specs(self, in_shape):
        return self.layer.specs(in_shape)

    def training_shape(self, in_shape):
        return self.layer.training_shape(in_shape)

    def macs(self, in_shape):
        return self.layer.macs(in_shape)

    def plan(self, ctx):
        self.layer.plan(ctx)

    def fix(self):
        super().fix()
        self.layer.fix()


@register("layer")
class Recompute(Wrapper):
    """Activation checkpointing: keep only the input of a layer, and compute it again when its backward needs the rest.

    Less memory, a third more arithmetic. The second forward sees what the first saw: sample, step and padding, so the
    random numbers are the same; running statistics move once. Parameters have the names they have without it.

    Parameters
    ----------
    layer : Layer
        Usually a Sequential.

    Raises
    ------
    RuntimeError
        In the first step, if the second forward makes something else, as with random numbers that are not `ctx.random`.

    Examples
    --------
    >>> import nn
    >>> nn.Network(nn.Recompute(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))), (8,)).out_shape
    (8,)
    """

    def __init__(self, layer: Layer):
        check_layers("Recompute", layer)
        super().__init__(layer)

    __repr__ = Layer.__repr__

    @property
    def output(self):
        return "new" if self.layer.output == "new" else "kept"  # it may be x, which is kept

    def plan(self, ctx):
        ctx.may_overwrite_input = False  # it is needed again
        self.layer.plan(ctx)

    def forward(self, p, x, ctx):
        y, _ = as_pair(self.layer.forward(p, x, ctx), ctx)
        mixed = ctx.network_context.mixed_precision
        expected = y.copy() if ctx.unchecked and not mixed else None  # mixed: the second is given x as float16
        return y, (mixed.keep(x, y, x) if mixed else x, replace(ctx.micro_batch, deferred=None), expected)

    def backward(self, p, gy, saved, ctx):
        x, micro_batch, expected = saved
        mixed = ctx.network_context.mixed_precision
        x = mixed.restored(x, gy.dtype) if mixed else x
        with _as_before(ctx, micro_batch):
            y, saved = self.layer.forward(p, x, ctx)
        if expected is not None and np.nanmax(np.abs(y - expected), initial=0) > 1e-3 * np.nanmax(np.abs(y), initial=0):
            raise RuntimeError(
                f"{ctx.description}: computed again, forward makes something else. Random numbers must come "
                "from ctx.random, and a layer must keep nothing from pass to pass"
            )
        del y
        return self.layer.backward(p, gy, saved, ctx)


@contextlib.contextmanager
def _as_before(ctx: LayerContext, micro_batch: MicroBatch):
    """Let layers see the micro-batch as it was, without hooks, and running statistics come out as they went in."""
    context = ctx.network_context
    now = context.micro_batch, context.after_forward, context.on_routing
    state = [(array, array.copy()) for array in buffers_of(ctx)]
    context.micro_batch, context.after_forward, context.on_routing = micro_batch, None, None
    try:
        yield
    finally:
        context.micro_batch, context.after_forward, context.on_routing = now
        for array, value in state:
            array[...] = value


def buffers_of(ctx: LayerContext):
    """Yield all arrays of running statistics at and below a layer."""
    if not ctx.children:
        yield from vars(ctx.buffers).values()
    for child in ctx.children:
        yield from buffers_of(child)
