"""Multilayer perceptron: fully connected layers with an activation between them (Rumelhart, Hinton, Williams 1986)."""

import itertools
import math

from nn.core.layer import Layer, Sequential, Shape
from nn.layers.activations import ReLU
from nn.layers.dense import Linear
from nn.layers.reshaping import Flatten
from nn.models.by_name import model


@model("mlp")
def mlp(in_shape: Shape, classes: int, *sizes: int, activation: type[Layer] = ReLU) -> Sequential:
    """Linear layers of the given sizes, input and output included; without sizes, one hidden layer of 128.

    Images and other samples of more than one axis are flattened first.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.mlp((784,), 10, 784, 100, 10)
    >>> network.out_shape, network.layout.count
    ((10,), 79510)
    """
    inputs = math.prod(in_shape)
    sizes = sizes or (inputs, 128, classes)
    if len(sizes) < 2 or sizes[0] != inputs or sizes[-1] != classes:
        raise ValueError(
            f"mlp:{','.join(map(str, sizes))}: sizes go from the input to the output: expected "
            f"{inputs} (samples of shape {tuple(in_shape)}) first and {classes} classes last, "
            f"such as mlp:{inputs},128,{classes}"
        )
    layers: list[Layer] = [Flatten()] if len(in_shape) != 1 else []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layers += [activation()] if i else []
        layers += [Linear(fan_in, fan_out)]
    return Sequential(*layers)
