"""Arguments by keyword that a function does not have, but that users of other libraries write."""

from __future__ import annotations

from collections.abc import Mapping


def refuse_others(function: str, others: Mapping[str, object], instead: Mapping[str, str]) -> None:
    """Refuse arguments that a function does not have: TypeError, with what to write instead of usual ones."""
    for name in others:
        hint = f": write {instead[name]}" if name in instead else ""
        raise TypeError(f"{function} takes no {name!r}{hint}")
