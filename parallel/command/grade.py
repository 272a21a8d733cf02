"""The command line of `ringprop grade`: a student's project, graded; points and reasons as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

from parallel.command.arguments import Parser, new_file, number
from parallel.testing.grade import CASE_SECONDS, PROJECTS, SECONDS, grade, page


def main(argv: list[str] | None = None) -> int:
    """Run the command line of `ringprop grade`; return the exit status."""
    parser = Parser(prog="ringprop grade", description="Grade a project of the course.")
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the student's folder, with PROJECT.py in it")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write points and reasons there")
    parser.add_argument("--page", type=new_file, metavar="FILE", help="write the page there, as Markdown")
    parser.add_argument(
        "--case-seconds", type=number(0.1), default=CASE_SECONDS, metavar="SECONDS",
        help="a case that takes longer hangs; after the first one that does, cases have 5 s (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=number(0.1), default=SECONDS, help="limit of all cases together (default: %(default)g)"
    )
    options = parser.parse_args(argv)
    try:
        criteria, stopped = grade(options.project, options.directory, options.case_seconds, options.seconds)
    except ValueError as error:
        parser.error(str(error))
    text = page(options.project, criteria, stopped)
    print(text, end="")
    if options.page:
        Path(options.page).write_text(text)
    if options.json:
        rows = [
            {"criterion": each.text, "points": each.points, "given": each.given, "cases": each.cases}
            for each in criteria
        ]
        result = {"project": options.project, "stopped": stopped, "criteria": rows}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0
