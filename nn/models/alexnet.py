"""AlexNet (Krizhevsky, Sutskever, Hinton 2012), its convolutions in two groups as on the two GPUs of the original."""

from nn.core.layer import Layer, Sequential, Shape
from nn.initializers import he
from nn.layers.activations import ReLU
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout
from nn.layers.normalization import LocalResponseNorm
from nn.layers.pooling import MaxPool2d
from nn.layers.reshaping import Flatten
from nn.models.by_name import model
from nn.models.images import image_shape


@model("alexnet")
def alexnet(in_shape: Shape, classes: int, activation: type[Layer] = ReLU) -> Sequential:
    """Five convolutions and three linear layers; 60,965,224 parameters for 227x227x3 and 1000 classes.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.alexnet((224, 224, 3), 1000)
    >>> network.out_shape, network.layout.count
    ((1000,), 49430888)
    """
    height, width, channels = image_shape("alexnet", in_shape, at_least=67)
    features = _final_side(height) * _final_side(width) * 256
    return Sequential(
        *(Conv2d(channels, 96, 11, stride=4, init=he), activation(), _norm(), MaxPool2d(3, stride=2)),
        *(Conv2d(96, 256, 5, padding=2, groups=2, init=he), activation(), _norm(), MaxPool2d(3, stride=2)),
        *(Conv2d(256, 384, 3, padding=1, init=he), activation()),
        *(Conv2d(384, 384, 3, padding=1, groups=2, init=he), activation()),
        *(Conv2d(384, 256, 3, padding=1, groups=2, init=he), activation(), MaxPool2d(3, stride=2)),
        Flatten(),
        *(Linear(features, 4096, init=he), activation(), Dropout(0.5)),
        *(Linear(4096, 4096, init=he), activation(), Dropout(0.5)),
        Linear(4096, classes),
    )


def _norm() -> LocalResponseNorm:
    """The paper's constants; alpha there multiplies the sum over five channels, here the mean."""
    return LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)


def _final_side(size: int) -> int:
    """Return the side of an image after all convolutions and pools: 227 -> 55 -> 27 -> 13 -> 6."""
    size = (size - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    return size
