"""How a setting of a training run is declared: a field of a dataclass, with its default, its range and its help.

    @dataclass(frozen=True)
    class ServerOptions:                                        # flags: --servers 2
        servers: int = option(1, "parameter servers, among which the parameters are cut")

    @dataclass(frozen=True)
    class LocalSGDKeys(Keys):                                   # keys of one text: --strategy local-sgd:8,drift=0.1
        name = "local-sgd"
        every: int = key(8, "steps between averages")

Flags, --help, TOML files, config.json and the tables of docs/options.md are made from such fields. Nothing here imports
NumPy or MPI, so that --help answers at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import ClassVar

LONGEST_WORD, LONGEST_MESSAGE = 300, 2000  # characters
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tabs and ends of lines
LARGEST = 2**63 - 1  # of whole numbers: what an array's axis can count


class OptionError(ValueError):
    """An option that makes no sense; the message says which and what would."""

    def __init__(self, message: str):
        super().__init__(shortened(message))


def printable(text: str) -> str:
    """Return the text with control characters escaped: in a file of others they might steer the terminal."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def shortened(message: str) -> str:
    """Return a printable message in which no value of thousands of characters is repeated whole."""
    message = printable(message)
    message = re.sub(rf"(\S{{{LONGEST_WORD}}})\S+", r"\1...", message)
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}..."


def flag(name: str) -> str:
    """Return --batch-size for batch_size."""
    return "--" + name.rstrip("_").replace("_", "-")


@contextmanager
def naming(name: str, value: object) -> Iterator[None]:
    """Put the flag of an option before what is said in this block of its value.

    Raises
    ------
    OptionError
        In place of a ValueError, TypeError or OSError.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        reason = str(error).removeprefix(f"[Errno {getattr(error, 'errno', None)}] ")
        if flag(name) in reason:
            raise
        where = flag(name) if reason.startswith(f"{value}:") else f"{flag(name)} {value}:"
        raise OptionError(f"{where} {reason}") from error


def name_of(text: str) -> str:
    """Return what stands before the colon of a text with keys."""
    return text.partition(":")[0]


def refuse(wrong: bool, reason: str) -> None:
    """Raise ValueError with the reason where something is wrong."""
    if wrong:
        raise ValueError(reason)


def option(
    default,
    help: str,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    everyday: bool = False,
    keys: bool = False,
    free: bool = False,
    planned: bool = False,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
):
    """Declare a flag of the command line.

    Parameters
    ----------
    default : value or None
    help : str
        What --help says of it.
    choices : tuple of str or None
    metavar : str or None
    everyday : bool
        Whether plain --help shows it.
    keys : bool
        Whether its choices may have keys behind a colon.
    free : bool
        Whether --resume may change it: it has no influence on what is trained, or the trained state fits any value.
    planned : bool
        Whether --strategy auto chooses it: the two cannot be given together.
    least, above, below, most : float or None
        The range of a number. Whole numbers are at least 1 unless `least` says otherwise, others at least 0.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "everyday": everyday, "keys": keys, "free": free}
    bounds = {"least": least, "above": above, "below": below, "most": most}
    return field(default=default, metadata=metadata | bounds | {"planned": planned})


def key(default, help: str, least: float = 1, most: float = math.inf):
    """Declare a key of a text with keys: its default, whose type it has; its help; the range of a number."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True)
class Keys:
    """Settings that one text holds: its name, a colon, and the fields in their order or by name."""

    name: ClassVar[str]

    def __post_init__(self):
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(entry.default, bool | str):
                continue
            kind, what = (Integral, "a whole number") if isinstance(entry.default, int) else (Real, "a number")
            if isinstance(value, bool) or not isinstance(value, kind):
                raise TypeError(f"{self.name}: {entry.name} must be {what}, given {value!r:.80}")
            least, most = entry.metadata["least"], entry.metadata["most"]
            refuse(
                not least <= value <= most,
                f"{self.name}: {entry.name} must be at least {least:g}{f' and at most {most:g}' * (most < math.inf)}, "
                f"given {value:g}",
            )

    @classmethod
    def parse(cls, text: str):
        """Read a text with its name: "local-sgd:8,drift=0.1".

        Raises
        ------
        ValueError
            An unknown key, a value that is no such number or out of its range; the message says which.
        """
        from nn import option_strings  # and with it NumPy, which --help does without

        name, parts = option_strings.split(text)
        kinds = {entry.name: type(entry.default) for entry in fields(cls)}
        return cls(**option_strings.convert(name, parts, kinds))

    @classmethod
    def describe(cls) -> str:
        """Return the keys with their defaults and help, as in "every=8: steps between averages; drift=0: ..."."""
        shown = {True: 1, False: 0}
        return "; ".join(
            f"{entry.name}={shown[entry.default] if isinstance(entry.default, bool) else format(entry.default, 'g')}: "
            f"{entry.metadata['help']}"
            for entry in fields(cls)
        )


def changed(options, names) -> list[str]:
    """Return those of the names whose value differs from the default; `options` is an instance of a dataclass."""
    declared = type(options).__dataclass_fields__
    return [name for name in names if getattr(options, name) != declared[name].default]
