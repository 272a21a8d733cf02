"""OverFeat, the fast network (Sermanet et al. 2013): wide convolutions, no normalisation, pools that do not overlap."""

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


@model("overfeat-fast")
def overfeat_fast(in_shape: Shape, classes: int, activation: type[Layer] = ReLU) -> Sequential:
    """Five convolutions and three linear layers; 145,920,872 parameters for 231x231x3 and 1000 classes.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.overfeat_fast((231, 231, 3), 1000)
    >>> network.out_shape, network.layout.count
    ((1000,), 145920872)
    """
    height, width, channels = image_shape("overfeat-fast", in_shape, at_least=71)
    features = _final_side(height) * _final_side(width) * 1024
    return Sequential(
        *(Conv2d(channels, 96, 11, stride=4, init=he), activation(), MaxPool2d(2)),
        *(Conv2d(96, 256, 5, init=he), activation(), MaxPool2d(2)),
        *(Conv2d(256, 512, 3, padding=1, init=he), activation()),
        *(Conv2d(512, 1024, 3, padding=1, init=he), activation()),
        *(Conv2d(1024, 1024, 3, padding=1, init=he), activation(), MaxPool2d(2)),
        Flatten(),
        *(Linear(features, 3072, init=he), activation(), Dropout(0.5)),
        *(Linear(3072, 4096, init=he), activation(), Dropout(0.5)),
        Linear(4096, classes),
    )


def _final_side(size: int) -> int:
    """Return the side of an image after all convolutions and pools: 231 -> 56 -> 28 -> 24 -> 12 -> 6."""
    return ((((size - 11) // 4 + 1) // 2) - 4) // 2 // 2
