"""One page about some runs: options, environment, curves, where the time goes, timeline, and how they compare."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from parallel.command.arguments import Parser, new_file
from parallel.command.options import FIELDS, TOPICS, names_of
from parallel.command.version import commit, version
from parallel.settings import shortened


def main(argv: list[str] | None = None) -> int:
    """Write the page that the command line asks for; returns the exit status."""
    options = parser().parse_args(argv)
    from parallel.reports.page import page, write_page
    from parallel.reports.runs import read_run

    out = Path(os.path.expanduser(options.out) if options.out else Path(options.runs[0]) / "report.html")
    topics = {topic: {name: FIELDS[name].default for name in names_of(topic)} for topic in TOPICS}
    try:
        runs = [read_run(directory) for directory in options.runs]
        made_by = f"ringprop {version()}" + (f", commit {commit()[:12]}" if commit() else "")
        write_page(page(runs, topics, made_by), out)
    except (ValueError, OSError) as error:
        print(f"error: {shortened(str(error))}", file=sys.stderr)
        return 1
    many = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    print(f"{out}: {many}, {out.stat().st_size / 1024:,.0f} KiB, to be opened in a browser")
    return 0


def parser() -> Parser:
    """The command line."""
    found = Parser(prog="report.py", description=__doc__)
    found.add_argument("runs", metavar="RUN", nargs="+", help="directories of runs")
    found.add_argument(
        "--out", type=new_file, metavar="FILE.html", help="where the page is written (default: RUN/report.html)"
    )
    return found
