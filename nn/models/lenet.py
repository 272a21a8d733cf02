"""LeNet-5 (LeCun, Bottou, Bengio, Haffner 1998, Gradient-based learning applied to document recognition).

`lenet5` is the variant of today's benchmarks: 20 and 50 channels, ReLU, max-pooling and 500 hidden
units; 431,080 parameters for 28x28 digits.
"""

from nn.activations import ReLU
from nn.convolution import Conv2d
from nn.dense import Linear
from nn.initializers import he
from nn.layer import Layer, Sequential, Shape
from nn.models.images import image_shape
from nn.pooling import MaxPool2d
from nn.reshaping import Flatten


def lenet5(in_shape: Shape, classes: int, *widths: int, activation: type[Layer] = ReLU) -> Sequential:
    """Convolution 5x5 - pool - convolution 5x5 - pool - hidden - classes, nothing padded.

    `widths` are the two numbers of channels and the hidden units: 20, 50, 500 unless given.
    """
    height, width, channels = image_shape("lenet5", in_shape, at_least=16)
    first, second, hidden = widths or (20, 50, 500)
    return Sequential(
        Conv2d(channels, first, 5, init=he),
        activation(),
        MaxPool2d(2),
        Conv2d(first, second, 5, init=he),
        activation(),
        MaxPool2d(2),
        Flatten(),
        Linear(_left(height) * _left(width) * second, hidden, init=he),
        activation(),
        Linear(hidden, classes),
    )


def _left(size: int) -> int:
    """What two unpadded 5x5 convolutions, each pooled by 2, leave of a side."""
    return ((size - 4) // 2 - 4) // 2
