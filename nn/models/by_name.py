"""Models by name, as the command line has them: "mlp:784,30,10", "cnn", "lenet5", ...

A builder is a function (in_shape, classes, *numbers) -> Layer; the numbers are what stands behind the colon. Add one to
MODELS, and every script reaches it.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable

import numpy as np

from nn import initializers, option_strings
from nn.core.layer import Initializer, Layer, Sequential, Shape
from nn.core.network import Network
from nn.layers import activations
from nn.models.alexnet import alexnet
from nn.models.cnn import cnn
from nn.models.googlenet import googlenet
from nn.models.lenet import lenet5, lenet5_1998
from nn.models.lstm import lstm
from nn.models.mlp import mlp
from nn.models.overfeat import overfeat_fast
from nn.models.resnet import resnet20, resnet50
from nn.models.transformer import encoder, transformer
from nn.models.vgg import vgg16, vgg_small

MODELS: dict[str, Callable[..., Layer]] = {
    "alexnet": alexnet,
    "cnn": cnn,
    "encoder": encoder,
    "googlenet": googlenet,
    "lenet5": lenet5,
    "lenet5-1998": lenet5_1998,
    "lstm": lstm,
    "mlp": mlp,
    "overfeat-fast": overfeat_fast,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "transformer": transformer,
    "vgg-small": vgg_small,
    "vgg16": vgg16,
}


def build(
    spec: str,
    in_shape: Shape,
    classes: int,
    dtype=np.float32,
    activation: str | None = None,
    init: str | None = None,
    output_activation: str | None = None,
) -> Network:
    """The network that a string such as "mlp:784,30,10" or "lenet5" stands for. Nothing is allocated.

    Parameters
    ----------
    spec : str
        Name of the model, and after a colon its numbers and options, separated by commas: "transformer:64,4,tied=1",
        "transformer:64,4,2,positions=rotary,dropout=0.1".
    in_shape : tuple of int
        Of one sample; images are (height, width, channels).
    classes : int
        Outputs of the last layer.
    dtype : float32 or float64
    activation : str or None
        Name in nn.layers.activations.BY_NAME, for the hidden layers; None for the model's own.
    init : str or None
        Name in nn.initializers.BY_NAME, for the weights of linear and convolutional layers; None for the model's own.
        "normal" draws the biases from N(0, 1) too, as the classical digit experiment does.
    output_activation : str or None
        Applied to the output too: "sigmoid" for the quadratic cost of the classical experiment.

    Raises
    ------
    ValueError
        Unknown names (with those that exist), numbers that do not fit.
    ShapeError
        Layers that do not fit the samples: which one, expected, given.
    """
    if not isinstance(spec, str):
        raise TypeError(f'a model is a text, such as "mlp:784,30,10", given {spec!r:.80}')
    if not isinstance(in_shape, tuple | list):
        raise TypeError(f"model {spec!r}: in_shape is that of one sample, such as (28, 28, 1), given {in_shape!r:.80}")
    name, parts = option_strings.split(spec)
    builder = lookup("model", MODELS, name)
    numbers, options = _arguments(spec, builder, parts)
    if activation is not None:
        if "activation" not in inspect.signature(builder).parameters:
            raise ValueError(f"model {name}: its activations are part of it; leave --activation out")
        options["activation"] = lookup("activation", activations.BY_NAME, activation)
    root = builder(tuple(in_shape), classes, *numbers, **options)
    if output_activation is not None:
        last = lookup("activation", activations.BY_NAME, output_activation)()
        root = Sequential(*(root.layers if isinstance(root, Sequential) else [root]), last)
    if init is not None:
        first_values(root, lookup("initialiser", initializers.BY_NAME, init), biases=init == "normal")
    return Network(root, in_shape, dtype, name=spec)


def network_function(name: str) -> Callable[..., Network]:
    """Return the function that builds the network of this name: (in_shape, classes, *numbers) and `build`'s options."""

    def network(in_shape: Shape, classes: int, *numbers: int, **options) -> Network:
        numbers_text = ",".join(map(str, numbers))
        return build(f"{name}:{numbers_text}" if numbers else name, in_shape, classes, **options)

    network.__name__ = network.__qualname__ = name.replace("-", "_")
    network.__doc__ = (
        f"{inspect.getdoc(MODELS[name])}\n\nArguments: in_shape, classes, then {_numbers(MODELS[name])}; by keyword "
        "dtype, activation, init and output_activation, as of `build`."
    )
    return network


def lookup(kind: str, known: dict, name: str):
    """known[name], or an error that lists what is known and suggests the nearest."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r}: {hint}known are {', '.join(sorted(known))}")


def first_values(layer: Layer, init: Initializer, biases: bool = False) -> None:
    """Let all layers inside that have a choice of first weights (and biases) draw them from `init`."""
    for child in layer.children().values():
        first_values(child, init, biases)
    if hasattr(layer, "bias_init"):
        layer.init = init
        if biases:
            layer.bias_init = init


def _arguments(spec: str, builder: Callable[..., Layer], parts: list[str]) -> tuple[list[int], dict[str, object]]:
    """The numbers behind a model's colon, and its options by name, such as positions=rotary."""
    parameters = inspect.signature(builder).parameters
    leading = list(itertools.takewhile(lambda part: "=" not in part, parts))
    try:
        numbers = [int(number) for number in leading]
    except ValueError:
        given = ",".join(parts)
        raise ValueError(f"model {spec!r}: expected whole numbers after the colon, given {given!r}") from None
    name = option_strings.split(spec)[0]
    try:
        inspect.signature(builder).bind((), 0, *numbers)
    except TypeError:
        raise ValueError(
            f"model {spec!r}: {len(numbers)} numbers are too many; {name} takes {_numbers(builder)}"
        ) from None
    free = [p.name for p in list(parameters.values())[2:] if p.kind is not p.VAR_POSITIONAL and p.name != "activation"]
    kinds = {key: type(parameters[key].default) for key in free[len(numbers) :]}
    return numbers, option_strings.convert(f"model {name}", parts[len(numbers) :], kinds, by_place=False)


def _numbers(builder: Callable[..., Layer]) -> str:
    """The names and defaults of a builder's numbers, for a message."""
    chosen = list(inspect.signature(builder).parameters.values())[2:]
    text = [f"{p.name}={p.default}" for p in chosen if p.kind is not p.VAR_POSITIONAL and p.name != "activation"]
    return ", ".join(text) or "none"
