"""GoogLeNet, Inception v1 (Szegedy et al. 2014): modules of parallel convolutions, and two auxiliary classifiers.

In training the network puts out three rows of logits a sample, (N, 3, classes), the main ones first. `AuxiliaryLoss`
weighs them; any other loss refuses their shape. In evaluation it puts out the main logits alone, (N, classes).
"""

from __future__ import annotations

import numpy as np

from nn.arguments import NOT_NEGATIVE
from nn.core.containers import Parallel
from nn.core.layer import Layer, Sequential, Shape, ShapeError, child_specs
from nn.initializers import he
from nn.layers.activations import ReLU
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout
from nn.layers.normalization import LocalResponseNorm
from nn.layers.pooling import AdaptiveAvgPool2d, GlobalAvgPool2d, MaxPool2d
from nn.layers.reshaping import Flatten
from nn.losses import Loss
from nn.models.by_name import model
from nn.models.images import image_shape
from nn.registry import register

# Input channels; then filters of 1x1; of 1x1 before 3x3, 3x3; of 1x1 before 5x5, 5x5; of 1x1 after pooling.
MODULES = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


@model("googlenet")
def googlenet(in_shape: Shape, classes: int, auxiliary: bool = True) -> Sequential:
    """For 224x224 images, about 7 million parameters; `auxiliary` 0 leaves out the two classifiers inside.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.googlenet((224, 224, 3), 1000)
    >>> network.out_shape, network.layout.count
    ((1000,), 13378280)
    """
    _, _, channels = image_shape("googlenet", in_shape, at_least=32)
    stem = [
        *(*_convolve(channels, 64, 7, 2), _pool(), LocalResponseNorm(5)),
        *(*_convolve(64, 64, 1), *_convolve(64, 192, 3), LocalResponseNorm(5), _pool()),
        *(_inception("3a"), _inception("3b"), _pool(), _inception("4a")),
    ]
    middle = [_inception("4b"), _inception("4c"), _inception("4d")]
    end = [_inception("4e"), _pool(), _inception("5a"), _inception("5b")]
    end += [GlobalAvgPool2d(), Dropout(0.4), Linear(1024, classes)]
    if not auxiliary:
        return Sequential(*stem, *middle, *end)
    inner = Auxiliary(Sequential(*end), _classifier(528, classes))
    return Sequential(*stem, Auxiliary(Sequential(*middle, inner), _classifier(512, classes)))


def _convolve(channels: int, filters: int, kernel: int, stride: int = 1) -> list[Layer]:
    return [Conv2d(channels, filters, kernel, stride, kernel // 2, init=he), ReLU()]


def _pool() -> MaxPool2d:
    return MaxPool2d(3, stride=2, padding=1)


def _inception(name: str) -> Parallel:
    channels, one, before3, three, before5, five, pooled = MODULES[name]
    return Parallel(
        Sequential(*_convolve(channels, one, 1)),
        Sequential(*_convolve(channels, before3, 1), *_convolve(before3, three, 3)),
        Sequential(*_convolve(channels, before5, 1), *_convolve(before5, five, 5)),
        Sequential(MaxPool2d(3, stride=1, padding=1), *_convolve(channels, pooled, 1)),
    )


def _classifier(channels: int, classes: int) -> Sequential:
    hidden = [Linear(16 * 128, 1024, init=he), ReLU(), Dropout(0.7)]
    return Sequential(AdaptiveAvgPool2d(4), *_convolve(channels, 128, 1), Flatten(), *hidden, Linear(1024, classes))


@register("layer")
class Auxiliary(Layer):
    """A classifier on an inner layer's output, beside the rest of the network: it sends gradient to the layers below.

    Parameters
    ----------
    rest : Layer
        From here to the main output (N, classes), or another Auxiliary's (N, rows, classes) at its end.
    head : Layer
        The classifier; in evaluation it is not computed.
    """

    def __init__(self, rest: Layer, head: Layer):
        self.rest, self.head = rest, head

    @property
    def output(self):
        return "new" if self.rest.output == "new" else "kept"  # in evaluation it is that of the rest

    @property
    def gradient(self):
        return "new" if self.rest.gradient == "new" else "kept"

    def children(self):
        return {"rest": self.rest, "head": self.head}

    def child_shapes(self, in_shape):
        return [in_shape, in_shape]

    def specs(self, in_shape):
        rest, out_shape = child_specs("rest", self.rest, in_shape)
        head, other = child_specs("head", self.head, in_shape)
        if out_shape != other:
            raise ShapeError(f"the classifiers must agree, the main one makes {out_shape}, the auxiliary {other}")
        return {"rest": rest, "head": head}, out_shape

    def training_shape(self, in_shape):
        *rows, classes = self.rest.training_shape(in_shape)
        return (sum(rows, start=1) if rows else 2), classes

    def plan(self, ctx):
        for child in ctx.children:
            child.may_overwrite_input = child.may_overwrite_grad = False
            child.is_first = ctx.is_first

    def forward(self, p, x, ctx):
        main, saved = ctx.children[0].forward(p[0], x)
        if not ctx.training:
            return main, [saved, None]
        row, saved_head = ctx.children[1].forward(p[1], x)
        rows = main if main.ndim == 3 else main[:, None]
        y = ctx.empty((len(x), rows.shape[1] + 1, row.shape[-1]), x.dtype)
        y[:, :-1], y[:, -1] = rows, row
        return y, [saved, saved_head]

    def backward(self, p, gy, saved, ctx):
        rest, head = ctx.children
        saved_head = saved.pop()
        if saved_head is None:  # it took no part
            gx_head, gy_rest = None, gy
            head.zero_gradients()
            if ctx.network_context.on_gradients_ready:
                head.defer(ctx.network_context.on_gradients_ready, head.end)
        else:
            gx_head = head.backward(p[1], gy[:, -1], saved_head)
            gy_rest = gy[:, :-1] if gy.shape[1] > 2 else gy[:, 0]
        gx = rest.backward(p[0], gy_rest, saved.pop())
        if gx is None or gx_head is None:
            return gx, {}
        return np.add(gx, gx_head, ctx.empty(gx.shape, gx.dtype)), {}


class AuxiliaryLoss(Loss):
    """The loss of the main logits plus `auxiliary_weight` times that of each auxiliary row (0.3 in the paper).

    Parameters
    ----------
    loss : Loss
        The loss of one row of logits, such as CrossEntropyLoss.
    auxiliary_weight : float
    """

    constraints = {"auxiliary_weight": NOT_NEGATIVE}

    def __init__(self, loss: Loss, auxiliary_weight: float = 0.3):
        self.loss, self.auxiliary_weight = loss, auxiliary_weight

    metric = property(lambda self: self.loss.metric)
    weighted = property(lambda self: self.loss.weighted)
    ignore_index = property(lambda self: self.loss.ignore_index)
    targets = property(lambda self: self.loss.targets)

    def weight(self, target):
        """Return the weight of these targets, which the main row and the auxiliary rows share."""
        return self.loss.weight(target)

    def mask(self, target):
        return self.loss.mask(target)

    def __call__(self, z, target, total_weight, ctx):
        if z.ndim == 2:  # evaluation
            return self.loss(z, target, total_weight, ctx)
        gz, value = ctx.empty(z.shape, z.dtype), 0.0
        for row in range(z.shape[1]):
            weight = self.auxiliary_weight if row else 1.0
            part, g = self.loss(z[:, row], target, total_weight, ctx)
            value += weight * part
            np.multiply(g, weight, gz[:, row])
        return value, gz
