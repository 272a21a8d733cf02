"""Tables that commands put into pages of docs/, between marks: <!-- name --> and <!-- end -->.

Tables of measurements are made from rows in docs/measured: `bench.py SUITE --json docs/measured/SUITE.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

MEASURED = Path(__file__).resolve().parents[1] / "docs" / "measured"


def put(page: str, name: str, table: str) -> str:
    """Return the page with a table between its marks; ValueError where there are none."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        raise ValueError(f"the page has no <!-- {name} --> ... <!-- end -->")
    return marks.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def print_tables(page: Path, tables: dict[str, Callable[[], str]], write: bool) -> None:
    """Print all tables; put them into the page, too, if `write`."""
    text = page.read_text()
    for name, make in tables.items():
        table = make()
        print(f"{table}\n")
        text = put(text, name, table)
    if write:
        page.write_text(text)


def markdown(heads: list[str], rows: list[list[str]], words: int = 1) -> str:
    """Return a table whose first `words` columns are words and whose others are numbers, set to the right."""
    lines = [heads, ["---"] * words + ["---:"] * (len(heads) - words), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(suite: str) -> dict[str, dict]:
    """Return the rows of a suite in docs/measured, by their case; those without a figure are left out."""
    rows = json.loads((MEASURED / f"{suite}.json").read_text())
    return {row["case"]: row for row in rows if row["ours"] is not None}
