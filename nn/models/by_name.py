"""Models by name, as the command line has them: "mlp:784,30,10", "cnn", "lenet5", ...

A builder is a function (in_shape, classes, *numbers, **options) -> Layer; numbers and options are what stands behind
the colon. `model` gives it a name, and makes it a function that returns a network:

    @model("perceptron")
    def perceptron(in_shape: Shape, classes: int) -> Layer:
        return Sequential(Flatten(), Linear(math.prod(in_shape), classes))
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping

import numpy as np

from nn import option_strings
from nn.arguments import Number, OneOf
from nn.core.layer import Initializer, Layer, Sequential, Shape
from nn.core.network import Network
from nn.registry import lookup, register


def model(name: str) -> Callable[[Callable[..., Layer]], Callable[..., Network]]:
    """Return a decorator that registers a builder and lets it return a Network; `build` has the further options.

    Examples
    --------
    >>> import nn
    >>> from nn.models import model
    >>> @model("two")
    ... def two(in_shape, classes):
    ...     return nn.Sequential(nn.Linear(in_shape[0], 4), nn.ReLU(), nn.Linear(4, classes))
    >>> nn.models.build("two", (3,), 2).out_shape
    (2,)
    """

    def decorate(builder: Callable[..., Layer]) -> Callable[..., Network]:
        parameters = inspect.signature(builder).parameters

        @functools.wraps(builder)
        def network(
            in_shape: Shape,
            classes: int,
            *numbers: int,
            dtype=np.float32,
            activation: str | None = None,
            init: str | None = None,
            output_activation: str | None = None,
            spec: str = "",
            **own,
        ) -> Network:
            if not spec:
                options = {key: int(value) if isinstance(value, bool) else value for key, value in own.items()}
                spec = option_strings.join(name, [*map(str, numbers), *(f"{key}={options[key]}" for key in options)])
            if not isinstance(in_shape, tuple | list):
                raise TypeError(
                    f"model {spec!r}: in_shape is that of one sample, such as (28, 28, 1), given {in_shape!r:.80}"
                )
            if activation is not None:
                if "activation" not in parameters:
                    raise ValueError(f"model {name}: its activations are part of it; leave --activation out")
                own["activation"] = lookup("activation", activation)
            _check_options(spec, builder, inspect.signature(builder).bind((), 0, *numbers, **own).arguments)
            root = builder(tuple(in_shape), classes, *numbers, **own)
            if output_activation is not None:
                last = lookup("activation", output_activation)()
                root = Sequential(*(root.layers if isinstance(root, Sequential) else [root]), last)
            if init is not None:
                initialize_with(root, lookup("initializer", init), biases=init == "normal")
            return Network(root, in_shape, dtype, name=spec)

        network.__doc__ = (
            f"{inspect.getdoc(builder)}\n\nArguments: in_shape, classes, then {_numbers(builder)}; by keyword "
            "dtype, activation, init and output_activation, as of `build`."
        )
        return register("model", name)(network)

    return decorate


def build(
    spec: str,
    in_shape: Shape,
    classes: int,
    dtype=np.float32,
    activation: str | None = None,
    init: str | None = None,
    output_activation: str | None = None,
) -> Network:
    """Return the network that a string such as "mlp:784,30,10" or "lenet5" stands for. Nothing is allocated.

    Parameters
    ----------
    spec : str
        Name of the model, and after a colon its numbers and options, separated by commas: "transformer:64,4,tied=1",
        "transformer:64,4,2,positions=rotary,dropout=0.1".
    in_shape : tuple of int
        Shape of one sample; images are (height, width, channels).
    classes : int
        Outputs of the last layer.
    dtype : float32 or float64
    activation : str or None
        Such as "relu", for the hidden layers; None for the model's own.
    init : str or None
        Such as "he", for the weights of linear and convolutional layers; None for the model's own.
        "normal" draws the biases from N(0, 1) too, as the classical digit experiment does.
    output_activation : str or None
        Applied to the output too: "sigmoid" for the quadratic cost of the classical experiment.

    Raises
    ------
    ValueError
        Unknown names (with those that exist), numbers that do not fit.
    ShapeError
        Layers that do not fit the samples: which one, expected, given.

    Examples
    --------
    >>> import nn
    >>> nn.models.build("mlp:784,30,10", (784,), 10).layout.count
    23860
    """
    if not isinstance(spec, str):
        raise TypeError(f'a model is a text, such as "mlp:784,30,10", given {spec!r:.80}')
    name, parts = option_strings.split(spec)
    network = lookup("model", name)
    numbers, own = _arguments(spec, network, parts)
    own |= {"dtype": dtype, "activation": activation, "init": init, "output_activation": output_activation}
    return network(in_shape, classes, *numbers, spec=spec, **own)


def initialize_with(layer: Layer, init: Initializer, biases: bool = False) -> None:
    """Let all layers inside that have a choice of first weights (and biases) draw them from `init`."""
    for child in layer.children().values():
        initialize_with(child, init, biases)
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
        text = ",".join(parts)
        raise ValueError(f"model {spec!r}: expected whole numbers after the colon, given {text!r}") from None
    name = option_strings.split(spec)[0]
    try:
        inspect.signature(builder).bind((), 0, *numbers)
    except TypeError:
        raise ValueError(
            f"model {spec!r}: {len(numbers)} numbers are too many; {name} takes {_numbers(builder)}"
        ) from None
    free = [p.name for p in list(parameters.values())[2:] if p.kind is not p.VAR_POSITIONAL and p.name != "activation"]
    kinds = {key: type(parameters[key].default) for key in free[len(numbers) :]}
    return numbers, option_strings.convert(f"model {name}", parts[len(numbers) :], kinds, positional=False)


def _check_options(spec: str, builder: Callable[..., Layer], given: Mapping[str, object]) -> None:
    """Refuse numbers out of range: at least 1, or 0 where that is the default; 0 or 1 for what is switched."""
    for name, parameter in list(inspect.signature(builder).parameters.items())[2:]:
        default, values = parameter.default, [given[name]] if name in given else []
        if parameter.kind is parameter.VAR_POSITIONAL:
            default, values = 1, given.get(name, ())
        for value in values:
            if isinstance(default, bool):
                OneOf((0, 1))(f"model {spec!r}: {name}", value)
            elif isinstance(default, int | float):
                least = min(1, default) if isinstance(default, int) else 0
                Number(least, whole=isinstance(default, int))(f"model {spec!r}: {name}", value)


def _numbers(builder: Callable[..., Layer]) -> str:
    """The names and defaults of a builder's numbers, for a message."""
    chosen = list(inspect.signature(builder).parameters.values())[2:]
    numbers = [p for p in chosen if p.kind is not p.VAR_POSITIONAL and p.name != "activation"]
    text = [f"{p.name}={int(p.default) if isinstance(p.default, bool) else p.default}" for p in numbers]
    return ", ".join(text) or "none"
