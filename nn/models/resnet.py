"""Residual networks (He, Zhang, Ren, Sun 2015): blocks that learn what to add to their input.

`zero_gamma` 1 lets the last batch normalisation of every block start at 0, so that a block starts as the identity: what
large batches need (Goyal et al. 2017).
"""

from __future__ import annotations

from nn.arguments import SIZE
from nn.core.containers import Residual
from nn.core.layer import Layer, Sequential, Shape, ShapeError
from nn.initializers import he, ones, zeros
from nn.layers.activations import ReLU
from nn.layers.batch_normalization import BatchNorm2d
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.layers.pooling import GlobalAvgPool2d, MaxPool2d
from nn.models.by_name import model
from nn.models.images import image_shape
from nn.registry import register


@model("resnet20")
def resnet20(in_shape: Shape, classes: int, zero_gamma: bool = False) -> Sequential:
    """For 32x32 images: three stages of three blocks, 16, 32, 64 channels, shortcuts without parameters (option A).

    Examples
    --------
    >>> import nn
    >>> network = nn.models.resnet20((32, 32, 3), 10)
    >>> network.out_shape, network.layout.count
    ((10,), 269722)
    """
    _, _, channels = image_shape("resnet20", in_shape, at_least=4)
    layers = _convolve(channels, 16, 3) + [ReLU()]
    channels = 16
    for filters in (16, 32, 64):
        for i in range(3):
            stride = 2 if i == 0 and filters > 16 else 1
            body = [*_convolve(channels, filters, 3, stride), ReLU(), *_convolve(filters, filters, 3, last=zero_gamma)]
            layers += [Residual(Sequential(*body), Subsample(stride, filters) if stride > 1 else None), ReLU()]
            channels = filters
    return Sequential(*layers, GlobalAvgPool2d(), Linear(64, classes))


@model("resnet50")
def resnet50(in_shape: Shape, classes: int, zero_gamma: bool = False) -> Sequential:
    """For 224x224 images: 16 bottleneck blocks, the stride in their first 1x1 convolution; 25.6 million parameters.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.resnet50((64, 64, 3), 1000)
    >>> network.out_shape, network.layout.count
    ((1000,), 25557032)
    """
    _, _, channels = image_shape("resnet50", in_shape, at_least=32)
    layers = [*_convolve(channels, 64, 7, 2), ReLU(), MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            stride = 2 if i == 0 and width > 64 else 1
            body = [*_convolve(channels, width, 1, stride), ReLU(), *_convolve(width, width, 3), ReLU()]
            body += _convolve(width, 4 * width, 1, last=zero_gamma)
            shortcut = Sequential(*_convolve(channels, 4 * width, 1, stride)) if i == 0 else None
            layers += [Residual(Sequential(*body), shortcut), ReLU()]
            channels = 4 * width
    return Sequential(*layers, GlobalAvgPool2d(), Linear(2048, classes))


def _convolve(channels: int, filters: int, kernel: int, stride: int = 1, last: int = 0) -> list[Layer]:
    """A convolution that keeps the size (but for its stride), and its normalisation, which has the bias."""
    convolution = Conv2d(channels, filters, kernel, stride, kernel // 2, bias=False, init=he)
    return [convolution, BatchNorm2d(filters, init=zeros if last else ones)]


@register("layer")
class Subsample(Layer):
    """Every stride-th row and column, and zeros as further channels, half in front and half behind: shortcut option A.

    Parameters
    ----------
    stride : int
    channels : int
        Channels of the output.
    """

    output = gradient = "new"

    constraints = {"stride": SIZE, "channels": SIZE}

    def __init__(self, stride: int, channels: int):
        self.stride, self.channels = stride, channels

    def specs(self, in_shape):
        if len(in_shape) != 3 or in_shape[2] > self.channels:
            raise ShapeError(f"expects images of at most {self.channels} channels, given samples of shape {in_shape}")
        return {}, (-(-in_shape[0] // self.stride), -(-in_shape[1] // self.stride), self.channels)

    def forward(self, p, x, ctx):
        part = x[:, :: self.stride, :: self.stride]
        front = (self.channels - x.shape[3]) // 2
        y = ctx.empty((*part.shape[:3], self.channels), x.dtype)
        y[...] = 0
        y[..., front : front + x.shape[3]] = part
        return y, (x.shape, front)

    def backward(self, p, gy, saved, ctx):
        shape, front = saved
        gx = ctx.empty(shape, gy.dtype)
        gx[...] = 0
        gx[:, :: self.stride, :: self.stride] = gy[..., front : front + shape[3]]
        return gx, {}
