"""What a check of `ringprop doctor` has found. Nothing here imports NumPy or MPI."""

from __future__ import annotations

from dataclasses import dataclass, field

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes
    ----------
    check : str
        Name of the check.
    status : {"ok", "warning", "failed"}
    text : str
    advice : str
        What to set, or to do; "" for nothing.
    rows : list of dict
        Figures, such as one for each collective and length.
    """

    check: str
    status: str
    text: str
    advice: str = ""
    rows: list[dict] = field(default_factory=list)
