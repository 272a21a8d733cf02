"""Tables as text, for everything that prints one."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str | int]], left: Collection[int] = (0,), rules: Collection[int] = ()) -> str:
    """Return rows of cells as text in columns.

    Parameters
    ----------
    rows : sequence of sequences of str or int
        Whole numbers get thousands separators.
    left : collection of int
        Columns that are flush left; the others are flush right.
    rules : collection of int
        Rows above which a line is drawn.

    Examples
    --------
    >>> print(text_table([("layer", "weights"), ("0", 12345), ("sum", 12345)], rules=[1, 2]))
    layer  weights
    --------------
    0       12,345
    --------------
    sum     12,345
    """
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(padded).rstrip())
    rule = "-" * max(map(len, lines))
    return "\n".join(text for i, line in enumerate(lines) for text in ([rule] * (i in rules) + [line]))
