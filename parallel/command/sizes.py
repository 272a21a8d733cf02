"""Bytes as people write them: 16GiB, 500MB, 2e9."""

import math
import re

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def read_bytes(text: str) -> float:
    """The number that a text stands for.

    Raises
    ------
    ValueError
        It is none, or not above 0.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\+?\d+)?\s*([KMGT]?I?)B?", text.strip(), re.IGNORECASE)
    value = 0.0
    if match and match[3].upper() in UNITS:
        value = float(match[1] + (match[2] or "")) * UNITS[match[3].upper()]
    if not 0 < value < math.inf:
        raise ValueError(f"expected a number of bytes above 0, such as 16GiB, given {text!r}")
    return value
