"""VGG (Simonyan and Zisserman 2014): only 3x3 convolutions, doubled in channels whenever pooling halves the image."""

from nn.core.layer import Layer, Sequential, Shape
from nn.initializers import he
from nn.layers.activations import ReLU
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout
from nn.layers.pooling import MaxPool2d
from nn.layers.reshaping import Flatten
from nn.models.by_name import model
from nn.models.images import image_shape


@model("vgg16")
def vgg16(in_shape: Shape, classes: int, activation: type[Layer] = ReLU) -> Sequential:
    """Configuration D: 13 convolutions and 3 linear layers; 138,357,544 parameters for 224x224x3 and 1000 classes.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.vgg16((224, 224, 3), 1000)
    >>> network.out_shape, network.layout.count
    ((1000,), 138357544)
    """
    stages = [(64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)]
    features, count = _convolutions("vgg16", in_shape, stages, activation)
    hidden = [
        *(Linear(count, 4096, init=he), activation(), Dropout(0.5)),
        *(Linear(4096, 4096, init=he), activation(), Dropout(0.5)),
    ]
    return Sequential(*features, *hidden, Linear(4096, classes))


@model("vgg-small")
def vgg_small(in_shape: Shape, classes: int, activation: type[Layer] = ReLU) -> Sequential:
    """For 32x32 images: 64-64-pool-128-128-pool-256-256-pool, one linear layer; 1,186,378 parameters for 10 classes.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.vgg_small((32, 32, 3), 10)
    >>> network.out_shape, network.layout.count
    ((10,), 1186378)
    """
    features, count = _convolutions("vgg-small", in_shape, [(64, 64), (128, 128), (256, 256)], activation)
    return Sequential(*features, Linear(count, classes))


def _convolutions(model: str, in_shape: Shape, stages, activation) -> tuple[list[Layer], int]:
    """The stages, each pooled by 2, flattened; and how many features that makes."""
    factor = 2 ** len(stages)
    height, width, channels = image_shape(model, in_shape, at_least=factor)
    layers: list[Layer] = []
    for stage in stages:
        for filters in stage:
            layers += [Conv2d(channels, filters, 3, padding=1, init=he), activation()]
            channels = filters
        layers += [MaxPool2d(2)]
    return [*layers, Flatten()], (height // factor) * (width // factor) * channels
