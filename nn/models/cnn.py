"""A small convolutional network for small images: two convolutions, each pooled, then two fully connected layers."""

from nn.core.layer import Layer, Sequential, Shape
from nn.initializers import he
from nn.layers.activations import ReLU
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.layers.pooling import MaxPool2d
from nn.layers.reshaping import Flatten
from nn.models.by_name import model
from nn.models.images import image_shape


@model("cnn")
def cnn(
    in_shape: Shape,
    classes: int,
    first: int = 32,
    second: int = 64,
    hidden: int = 128,
    activation: type[Layer] = ReLU,
) -> Sequential:
    """Convolutions with `first` and `second` channels, a layer of `hidden` units, and the classes.

    Good for the 8x8 digits (about 53,000 parameters) as well as 28x28 and 32x32 images.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.cnn((8, 8, 1), 10)
    >>> network.out_shape, network.layout.count
    ((10,), 53002)
    """
    height, width, channels = image_shape("cnn", in_shape, at_least=4)
    return Sequential(
        Conv2d(channels, first, 3, padding=1, init=he),
        activation(),
        MaxPool2d(2),
        Conv2d(first, second, 3, padding=1, init=he),
        activation(),
        MaxPool2d(2),
        Flatten(),
        Linear((height // 4) * (width // 4) * second, hidden, init=he),
        activation(),
        Linear(hidden, classes),
    )
