"""A layer as plain text and back: its class by name, its arguments by theirs, layers inside layers.

    describe(Linear(3, 2))   {"layer": "Linear", "arguments": {"in_features": 3, "out_features": 2, "bias": true, ...}}
    make_layer({"layer": "Linear", "arguments": {...}})   Linear(3, 2)

The rule that makes this possible: **a layer keeps every argument of its constructor under the argument's name**, as
Linear does with self.in_features. Then nothing has to be written for a new layer but `register`. A file names classes
and never contains code; only registered ones are made.

First values of weights are arguments too (nn/initializers.py): those with a name there are kept by it, others are left
out, for in the file are the weights that were learned.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from nn import registry
from nn.arguments import arguments_of
from nn.core.layer import Layer
from nn.registry import lookup, registered

RENAMED = {"Branches": "Parallel", "Recurrent": "RNN"}  # what older files call them
DROPPED = {("Linear", "split")}  # arguments that older files have, and that change nothing
PLAIN = (bool, int, float, str, type(None))
MAX_SHOWN = 80  # characters of a layer or a value in a message

Kind = TypeVar("Kind", bound=type[Layer])


def register(kind: Kind) -> Kind:
    """Let files name a layer of your own; also as a decorator of its class.

    The class must keep the arguments of its constructor under their names: numbers, texts, None, layers, or lists of
    these. Call it wherever such a network is saved or loaded, before that.

    Raises
    ------
    TypeError
        It is no class of layers.
    ValueError
        Another class has this name.

    Examples
    --------
    >>> import nn
    >>> class Identity(nn.Layer):
    ...     def forward(self, p, x, ctx):
    ...         return x, None
    ...     def backward(self, p, gy, saved, ctx):
    ...         return gy, {}
    >>> nn.register(Identity).__name__
    'Identity'
    """
    if not isinstance(kind, type) or not issubclass(kind, Layer):
        raise TypeError(
            f"register takes a class of layers, given {brief(kind)}: the class itself, not an instance; losses and "
            "optimizers are not in files"
        )
    return registry.register("layer")(kind)


def describe(layer: Layer) -> dict[str, Any]:
    """Return a layer, with those inside, as values that JSON can hold.

    Raises
    ------
    TypeError
        A class that is not registered, or an argument that a file cannot hold: which, and what to do.
    """
    name = type(layer).__name__
    if registered("layer").get(name) is not type(layer):
        raise TypeError(
            f"{brief(layer)}: files do not know this kind of layer; call nn.register({name}), here and wherever the "
            "network is loaded"
        )
    arguments = arguments_of(type(layer))
    if any(p.kind is p.VAR_KEYWORD for p in arguments.values()):
        raise TypeError(
            f"{brief(layer)}: the constructor of {name} takes arguments of any name, and files would leave them out: "
            "let it name each"
        )
    values = {}
    for argument, parameter in arguments.items():
        if not hasattr(layer, argument):
            raise TypeError(
                f"{brief(layer)}: {name} takes {argument!r} and does not keep it: its constructor should say "
                f"self.{argument} = {argument}, so that the layer can be made again"
            )
        value = getattr(layer, argument)
        if callable(value) and (argument == "init" or argument.endswith("_init")):
            named = next((key for key, function in registered("initializer").items() if function == value), None)
            if named is None and parameter.default is not parameter.empty:
                continue  # drawn from a function of one's own: the weights are what is kept
            value = {"initializer": named}
        values[argument] = _plain(value, f"{name}: {argument}")
    return {"layer": name, "arguments": values}


def _plain(value, where: str):
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Layer):
        return describe(value)
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, PLAIN) or (isinstance(value, dict) and value.get("initializer")):
        return value
    raise TypeError(f"{where} is {brief(value)}: files hold numbers, texts, None, layers, and lists of these")


def make_layer(description: Any) -> Layer:
    """Return the layer of a description, as `describe` makes it.

    Raises
    ------
    ValueError
        It is no description, or of a class that is not registered, or with arguments that do not fit.
    """
    if (
        not isinstance(description, dict)
        or description.keys() != {"layer", "arguments"}
        or not isinstance(description["arguments"], dict)
    ):
        raise ValueError(f"expected a layer by its name and arguments, given {brief(description)}")
    name, values = description["layer"], description["arguments"]
    layers = registered("layer")
    kind = (layers.get(name) or layers.get(RENAMED.get(name, ""))) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"it has a layer {brief(name)}, unknown here: if it is one of your own, import its module and call "
            "nn.register(...) with its class before loading"
        )
    values = {argument: value for argument, value in values.items() if (name, argument) not in DROPPED}
    known = arguments_of(kind)
    if foreign := values.keys() - known.keys():
        raise ValueError(f"{name} takes no {brief(sorted(foreign)[0])}; it takes {', '.join(known) or 'nothing'}")
    positional, named = [], {argument: _argument(value) for argument, value in values.items()}
    for argument in [a for a, parameter in known.items() if parameter.kind is parameter.VAR_POSITIONAL]:
        many = named.pop(argument, ())
        if not isinstance(many, tuple):
            raise ValueError(f"{name}: {argument} must be a list, given {brief(many)}")
        before = list(known)[: list(known).index(argument)]
        positional = [*(named.pop(other) for other in before if other in named), *many]
    try:
        return kind(*positional, **named)
    except Exception as error:  # whatever a constructor says of arguments that no program would give it
        raise ValueError(f"{name} cannot be made of {brief(values)}: {brief(error, 300)}") from error


def _argument(value):
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.keys() != {"initializer"}:
        return make_layer(value)
    return lookup("initializer", value["initializer"])


def brief(value, length: int = MAX_SHOWN) -> str:
    """Return a value as text for a message, on one line and of at most `length` characters."""
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except (ValueError, RecursionError):
        return "one that is too long to be shown"
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]}..."
