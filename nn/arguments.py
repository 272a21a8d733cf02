"""Arguments of constructors: what each may be, declared beside the constructor, and how the object prints.

    class Dropout(Layer):
        constraints = {"rate": Number(0, below=1)}

        def __init__(self, rate: float = 0.5):
            self.rate = rate                     # refused here, and whenever it is set again: must be in [0, 1)

A constraint is a function (what, value) -> value that refuses a wrong value, or returns it, perhaps converted.
Arguments that depend on each other are compared by `check_arguments`, after construction and whenever one is set again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nn.guesses import nearest

Constraint = Callable[[str, Any], Any]
USUAL_NAMES = (
    {  # of other libraries
        "class_weight": "class_weights=",
        "embedding_dim": "features=",
        "epsilon": "eps=",
        "hidden_size": "features=",
        "input_size": "in_features=",
        "learning_rate": "lr=",
        "negative_slope": "slope=",
        "normalized_shape": "features=",
        "num_embeddings": "vocabulary=",
        "num_features": "features=",
        "num_heads": "heads=",
        "p": "rate=",
        "rho": "alpha=",
        "trust_coefficient": "trust=",
        "units": "out_features=",
        "weight": "class_weights=",
    }
    | dict.fromkeys(("betas", "beta_1"), "beta1=")
    | {"beta_2": "beta2="}
)


class ClosedType(type):
    """The type of `Closed`: it marks an object when its constructor has returned."""

    def __call__(cls, *values, **options):
        new = super().__call__(*values, **options)
        vars(new)["_closed"] = True
        new.check_arguments()
        return new

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's: help() and notebooks show it."""
        return inspect.Signature(list(arguments_of(cls).values()))


class Closed(metaclass=ClosedType):
    """Base of objects that refuse new attributes: a misspelled one would be read by no one, and change nothing.

    Attributes
    ----------
    constant : tuple of str
        Attributes that keep what the constructor gave them: others were made of it.
    instead : mapping of str to str
        What to write for usual names of other libraries.
    """

    constant: ClassVar[tuple[str, ...]] = ()
    instead: ClassVar[Mapping[str, str]] = {}

    def __setattr__(self, name: str, value: object) -> None:
        attributes = self.__dict__
        if "_closed" in attributes and (name not in attributes or name in self.constant):
            self._refuse(name, value)
        object.__setattr__(self, name, value)

    def check_arguments(self) -> None:
        """Refuse arguments that do not go together: after construction, and whenever one is set again."""

    def copy_attributes(self, other: object) -> None:
        """Copy the attributes of another object. For constructors: the copy is not closed yet, so all can be set."""
        vars(self).update({name: value for name, value in vars(other).items() if name not in ("_closed", "_fixed")})

    def _refuse(self, name: str, value: object) -> None:
        """Refuse an attribute that is not there, constant or a method; private ones and properties may be set."""
        kind = type(self)
        if name in self.constant:
            raise AttributeError(f"{kind.__name__}: {name} cannot be set: make a new {kind.__name__} with it")
        is_method = callable(getattr(kind, name, None)) and not callable(value)
        if name.startswith("_") or (hasattr(kind, name) and not is_method):
            return
        public = [key for key in (*vars(self), *dir(kind)) if not key.startswith("_")]
        near = nearest(name, public, cutoff=0.7)
        meant = f": {self.instead[name]}" if name in self.instead else f": did you mean {near}?" if near else ""
        what = f"{kind.__name__}.{name} is a method, which a value would hide" if is_method else ""
        raise AttributeError(f"{what or f'a {kind.__name__} has no {name!r}: to set it would change nothing'}{meant}")


class Configured(Closed):
    """Base of what its arguments describe: layers, losses, optimizers, schedules.

    It keeps the arguments of its constructor under their names. `constraints` are those of the attributes, by name;
    subclasses add theirs to those of their base.
    """

    constraints: ClassVar[Mapping[str, Constraint]] = {}
    instead: ClassVar[Mapping[str, str]] = {name: argument.rstrip("=") for name, argument in USUAL_NAMES.items()}

    def __new__(cls, *values: object, **options: object):
        """Refuse arguments that the constructor does not have, with what to write instead of usual ones."""
        known = arguments_of(cls)
        ordered = [name for name, parameter in known.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if len(values) > len(ordered) and not any(p.kind is p.VAR_POSITIONAL for p in known.values()):
            rest = ", ".join(f"{name}=" for name in known if name not in ordered)
            raise TypeError(
                f"{cls.__name__} takes {', '.join(ordered) or 'nothing'} by position, given {len(values)} arguments: "
                f"the order of others differs between libraries, so they have names{rest and ': '}{rest}"
            )
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            for name in options.keys() - known.keys():
                hint = f": write {USUAL_NAMES[name]}" if USUAL_NAMES.get(name, "")[:-1] in known else ""
                raise TypeError(f"{cls.__name__} takes no {name!r}{hint}; it takes {', '.join(known) or 'nothing'}")
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        constraint = self.constraints.get(name) or (flag if name in flags_of(type(self)) else None)
        if constraint is not None:
            value = constraint(f"{type(self).__name__}: {name}", value)
        attributes = self.__dict__
        before = attributes.get(name)
        super().__setattr__(name, value)
        if "_closed" in attributes and name in attributes:
            try:
                self.check_arguments()
            except ValueError:
                attributes[name] = before
                raise

    def __repr__(self) -> str:
        """The call that makes the object again; see `call_text`."""
        return call_text(self)


@dataclass(frozen=True)
class Number:
    """A number of at least `least` or above `above`, and below `below` or at most `most`, where these are given."""

    least: float | None = None
    below: float | None = None
    above: float | None = None
    most: float | None = None
    whole: bool = False

    def __call__(self, what: str, value: Any) -> Any:
        """Return the number, as Python's; TypeError where it is none, ValueError where it is out of range or NaN."""
        kinds = (int, np.integer) if self.whole else (int, float, np.integer, np.floating)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{what} must be a {'whole ' * self.whole}number, given {value!r:.80}")
        if isinstance(value, np.generic):  # with a NumPy scalar float32 arrays would be computed in float64
            value = value.item()
        if not (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        ):
            raise ValueError(f"{what} must be {self}, given {value}")
        return value

    def __str__(self) -> str:
        low = f"({self.above:g}" if self.least is None else f"[{self.least:g}"
        if self.below is None and self.most is None:
            return "positive" if low == "(0" else f"above {low[1:]}" if self.least is None else f"at least {low[1:]}"
        return f"in {low}, {self.below:g})" if self.most is None else f"in {low}, {self.most:g}]"


def flag(what: str, value: Any) -> bool:
    """Return True or False; refuse anything else, such as another library's argument in this position."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{what} must be True or False, given {value!r:.80}: other libraries have other orders of arguments; give "
            "it by name"
        )
    return bool(value)


SIZE, COUNT = Number(1, whole=True), Number(0, whole=True)
NOT_NEGATIVE = Number(0)


@dataclass(frozen=True)
class SizePair:
    """(height, width), given as one whole number or two, none smaller than `least`."""

    least: int

    def __call__(self, what: str, value: Any) -> tuple[int, int]:
        both = tuple(value) if isinstance(value, tuple | list) else (value, value)
        if len(both) != 2 or not all(isinstance(v, int | np.integer) and v >= self.least for v in both):
            raise ValueError(f"{what} must be one or two whole numbers, at least {self.least}, given {value!r:.80}")
        return int(both[0]), int(both[1])


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    texts: Collection[str]

    def __call__(self, what: str, value: Any) -> Any:
        if value not in self.texts:
            raise ValueError(f"{what} must be {' or '.join(map(repr, self.texts))}, given {value!r:.80}")
        return value


@dataclass(frozen=True)
class Optional:
    """None, or what another constraint accepts."""

    constraint: Constraint

    def __call__(self, what: str, value: Any) -> Any:
        return None if value is None else self.constraint(what, value)


@functools.cache
def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class's constructor, by name."""
    if kind.__init__ is object.__init__:
        return {}
    parameters = dict(list(inspect.signature(kind.__init__).parameters.items())[1:])
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if field.name in parameters and field.default_factory is not dataclasses.MISSING:
            parameters[field.name] = parameters[field.name].replace(default=field.default_factory())
    return parameters


@functools.cache
def flags_of(kind: type) -> frozenset[str]:
    """Return the names of the constructor's arguments whose default is True or False."""
    return frozenset(name for name, p in arguments_of(kind).items() if isinstance(p.default, bool))


def call_text(value: Any, always: Collection[str] = (), never: Collection[str] = ()) -> str:
    """Return the call that makes an object again, without what draws first values.

    Parameters
    ----------
    value : object
        Its constructor keeps arguments under their names.
    always, never : collection of str
        Arguments that are shown though they have their default, and those that are not.
    """
    texts = []
    for name, parameter in arguments_of(type(value)).items():
        argument = vars(value).get(name, parameter.default)
        if name in never or argument is parameter.empty or _draws_first_values(name, argument):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            texts += map(_text, argument)
        elif parameter.default is parameter.empty:
            texts.append(_text(argument))
        elif name in always or _text(argument) != _text(parameter.default):
            texts.append(f"{name}={_text(argument)}")
    return f"{type(value).__name__}({', '.join(texts)})"


def _draws_first_values(name: str, argument: object) -> bool:
    return callable(argument) and (name == "init" or name.endswith("_init"))


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.size <= 16 else f"an array {value.shape}"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int) and value[0] == value[1]:
        return repr(value[0])  # a pair, such as a kernel's size
    return repr(value)


def refuse_others(function: str, others: Mapping[str, object], instead: Mapping[str, str]) -> None:
    """Refuse arguments that a function does not have: TypeError, with what to write instead of usual ones."""
    for name in others:
        hint = f": write {instead[name]}" if name in instead else ""
        raise TypeError(f"{function} takes no {name!r}{hint}")
