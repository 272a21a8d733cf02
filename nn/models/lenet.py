"""LeNet-5 (LeCun, Bottou, Bengio, Haffner 1998, Gradient-based learning applied to document recognition).

Two variants go by the name. `lenet5` is that of today's benchmarks: 20 and 50 channels, ReLU, max-pooling and 500
hidden units; 431,080 parameters for 28x28 digits. `lenet5_1998` has the sizes of the paper: 6, 16, 120 and 84, tanh,
average pooling; 61,706 parameters, as its second convolution sees all six maps where the paper's sees a chosen part.
"""

from nn.core.layer import Layer, Sequential, Shape
from nn.initializers import he
from nn.layers.activations import ReLU, Tanh
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.layers.pooling import AvgPool2d, MaxPool2d
from nn.layers.reshaping import Flatten
from nn.models.by_name import model
from nn.models.images import image_shape


@model("lenet5")
def lenet5(in_shape: Shape, classes: int, *widths: int, activation: type[Layer] = ReLU) -> Sequential:
    """Convolution 5x5 - pool - convolution 5x5 - pool - hidden - classes, nothing padded.

    `widths` are the two numbers of channels and the hidden units: 20, 50, 500 unless given.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.lenet5((28, 28, 1), 10)
    >>> network.out_shape, network.layout.count
    ((10,), 431080)
    """
    height, width, channels = image_shape("lenet5", in_shape, at_least=16)
    if len(widths) not in (0, 3):
        raise ValueError(f"lenet5 takes three numbers, such as lenet5:20,50,500, given {len(widths)}: {widths}")
    first, second, hidden = widths or (20, 50, 500)
    return Sequential(
        Conv2d(channels, first, 5, init=he),
        activation(),
        MaxPool2d(2),
        Conv2d(first, second, 5, init=he),
        activation(),
        MaxPool2d(2),
        Flatten(),
        Linear(_final_side(height) * _final_side(width) * second, hidden, init=he),
        activation(),
        Linear(hidden, classes),
    )


@model("lenet5-1998")
def lenet5_1998(in_shape: Shape, classes: int, activation: type[Layer] = Tanh) -> Sequential:
    """The paper's sizes. 28x28 images are padded to 32x32, as there, so that strokes can be at a corner's centre.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.lenet5_1998((32, 32, 1), 10)
    >>> network.out_shape, network.layout.count
    ((10,), 82826)
    """
    height, width, channels = image_shape("lenet5-1998", in_shape, at_least=12)
    return Sequential(
        Conv2d(channels, 6, 5, padding=2),
        activation(),
        AvgPool2d(2),
        Conv2d(6, 16, 5),
        activation(),
        AvgPool2d(2),
        Flatten(),
        Linear(_final_side(height + 4) * _final_side(width + 4) * 16, 120),
        activation(),
        Linear(120, 84),
        activation(),
        Linear(84, classes),
    )


def _final_side(size: int) -> int:
    """Return the side of an image after two unpadded 5x5 convolutions, each pooled by 2."""
    return ((size - 4) // 2 - 4) // 2
