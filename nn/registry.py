"""The registry: names, by kind, of layers, losses, optimizers and the like in files, option strings and messages.

    @register("loss", "huber")
    class HuberLoss(Loss): ...

    lookup("loss", "huber")            # the class; an unknown name is refused, with the nearest known one
    registered("loss")                    # {"bce": BCEWithLogitsLoss, ...}
    from_text("clip", "global:1.0")    # ClipGlobalNorm(limit=1.0)

| kind | names | read by |
|---|---|---|
| layer | of the classes: Conv2d | nn.load, nn.save |
| onnx | classes of layers | nn.export_onnx |
| activation, initializer, model | relu, he, resnet20 | nn.models.build, --activation, --init, --model |
| loss, optimizer, clip, schedule | huber, adam, global, cosine | scripts/train.py |
| metric | top_5_accuracy | nn.fit and nn.evaluate |
| group | data | ctx.group |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from nn import option_strings
from nn.guesses import nearest

Entry = TypeVar("Entry")
_REGISTERED: dict[str, dict[Any, Any]] = {}


def register(kind: str, name: Hashable = "") -> Callable[[Entry], Entry]:
    """Return a decorator that gives a class, a function or an object its name; by default the class's own.

    Raises
    ------
    ValueError
        If another one has the name. The same class again, as in a notebook's cell that is run again, replaces it.
    """

    def put(entry: Entry) -> Entry:
        key = name or entry.__name__
        known = registered(kind).get(key, entry)
        if known is not entry and _origin(known) != _origin(entry):
            raise ValueError(f"register: there is a {key} already, that of {known.__module__}: give yours another name")
        registered(kind)[key] = entry
        return entry

    return put


def registered(kind: str) -> dict[Any, Any]:
    """Return the table of a kind: name -> what has it."""
    return _REGISTERED.setdefault(kind, {})


def lookup(kind: str, name: str) -> Any:
    """Return what has this name.

    Raises
    ------
    ValueError
        Nothing of this kind has it: the message lists the known names and suggests the nearest.

    Examples
    --------
    >>> lookup("clip", "globl")
    Traceback (most recent call last):
        ...
    ValueError: unknown clip 'globl': did you mean 'global'? known are global, norm, value
    """
    known = registered(kind)
    if isinstance(name, str) and name in known:
        return known[name]
    guess = str(name).lower()
    near = next((key for key in known if guess and key.startswith(guess)), None) or nearest(guess, known)
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r:.80}: {hint}known are {', '.join(sorted(known))}")


def from_text(kind: str, text: str) -> Any:
    """Return the object that an option string such as "global:1.0" describes (nn/option_strings.py).

    The keys are the arguments of the constructor, read by their annotations.

    Raises
    ------
    ValueError
        An unknown name or key, a missing argument, or one that the constructor refuses.
    """
    name, parts = option_strings.split(text)
    try:
        constructor = lookup(kind, name)
        arguments = option_strings.convert(name, parts, option_types(constructor))
        inspect.signature(constructor).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind} {text!r}: {error}") from error
    return constructor(**arguments)


def option_types(constructor: Callable) -> dict[str, type]:
    """Return {name: type} of the arguments that an option string can give: numbers, texts, tuples of numbers."""
    function = constructor.__init__ if isinstance(constructor, type) else constructor
    parameters = inspect.signature(function, eval_str=True).parameters
    return {name: p.annotation for name, p in parameters.items() if p.annotation in option_strings.WORDS}


def _origin(entry: Any) -> tuple[str, str]:
    return entry.__module__, getattr(entry, "__qualname__", "")
