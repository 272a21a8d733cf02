"""Option strings, one grammar for schedules, clips, compressors, augmentation and models.

NAME[:PART,PART,...]      a PART is a VALUE, for the next key in order, or KEY=VALUE

cosine:warmup=5,end=0.001     dgc:0.001,clip=5     global:1.0     mlp:784,30,10
"""

from __future__ import annotations

from collections.abc import Mapping

WORDS = {int: "a whole number", float: "a number", bool: "0 or 1", str: "a text", tuple: "a number, or some as 30/60"}


def split(text: str) -> tuple[str, list[str]]:
    """Return the name and the parts after the colon: "crop:4" -> ("crop", ["4"])."""
    name, _, rest = text.partition(":")
    return name, rest.split(",") if rest else []


def join(name: str, parts: list[str]) -> str:
    """Return the text that `split` splits."""
    return f"{name}:{','.join(parts)}" if parts else name


def convert(name: str, parts: list[str], kinds: Mapping[str, type], positional: bool = True) -> dict[str, object]:
    """Return {key: value}, each value of its kind.

    Parameters
    ----------
    name : str
        Name of what takes these keys, for messages.
    parts : list of str
        As `split` returns them; empty ones are ignored.
    kinds : dict
        Key -> int, float, bool (0 or 1), str, or tuple (of floats, with / between them).
    positional : bool
        Whether parts without a key are the values of the first keys.

    Raises
    ------
    ValueError
        An unknown key, a key that is given twice, or a value that is not of its kind.
    """
    values: dict[str, object] = {}
    for i, part in enumerate(filter(None, parts)):
        key, equals, value = part.partition("=")
        if not equals and positional and i < len(kinds) and len(values) == i:
            key, value = list(kinds)[i], part
        if key not in kinds or not value or key in values:
            known = ", ".join(f"{key}={'TEXT' if kind is str else 'NUMBER'}" for key, kind in kinds.items())
            raise ValueError(f"what is {part!r}? {name} takes {known or 'nothing'}")
        try:
            values[key] = _value(value, kinds[key])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{key} must be {WORDS[kinds[key]]}, given {value!r}") from error
    return values


def _value(text: str, kind: type):
    if kind is tuple:
        return tuple(float(number) for number in text.split("/"))
    return {"0": False, "1": True}[text] if kind is bool else kind(text)
