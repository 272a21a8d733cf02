"""What is known of a network's layers before it is cut: seconds and bytes of one mini-batch, and the file they come in.

layer,forward_ms,backward_ms,output_bytes,parameter_bytes
Linear(4096 1000),0.453,0.474,1024000,16388000
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("layer", "forward_ms", "backward_ms", "output_bytes", "parameter_bytes")


class LayerProfile(NamedTuple):
    """One layer, one mini-batch: seconds, and bytes of what it gives to the next layer and of its parameters."""

    name: str
    forward: float
    backward: float
    output: float
    parameters: float


def read_profile(path: str | Path) -> list[LayerProfile]:
    """The layers of a profile, first to last.

    Raises
    ------
    ValueError
        a column that is missing, a number that is none, is negative or not finite, no layers: with file and line
    """
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: expected columns {', '.join(COLUMNS)}; {', '.join(missing)} not there")
        layers = [
            LayerProfile(
                row["layer"],
                number(path, reader.line_num, row, "forward_ms") / 1e3,
                number(path, reader.line_num, row, "backward_ms") / 1e3,
                number(path, reader.line_num, row, "output_bytes"),
                number(path, reader.line_num, row, "parameter_bytes"),
            )
            for row in reader
        ]
    return checked(layers, path)


def number(path, line: int, row: dict, column: str) -> float:
    """The number in a column of a row."""
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise ValueError(f"{path}, line {line}: {column} must be a number, given {row[column]!r}") from None


def checked(layers: Sequence[LayerProfile], where="profile") -> list[LayerProfile]:
    """The layers, if there are any and all their figures are finite and at least 0."""
    layers = [LayerProfile(*layer) for layer in layers]
    if not layers:
        raise ValueError(f"{where}: no layers")
    for i, layer in enumerate(layers):
        for field, value in zip(LayerProfile._fields[1:], layer[1:], strict=True):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{where}: layer {i} ({layer.name}): {field} must be at least 0, given {value}")
    return layers
