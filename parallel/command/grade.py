"""The command line of `ringprop grade`: a student's project, graded; points and reasons as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

from parallel.command.arguments import Parser, new_file
from parallel.testing.grade import PROJECTS, grade, page


def main(argv: list[str] | None = None) -> int:
    """Run the command line of `ringprop grade`; return the exit status."""
    parser = Parser(prog="ringprop grade", description="Grade a project of the course.")
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the student's folder, with PROJECT.py in it")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write points and reasons there")
    parser.add_argument("--page", type=new_file, metavar="FILE", help="write the page there, as Markdown")
    options = parser.parse_args(argv)
    try:
        criteria = grade(options.project, options.directory)
    except ValueError as error:
        parser.error(str(error))
    text = page(options.project, criteria)
    print(text, end="")
    if options.page:
        Path(options.page).write_text(text)
    if options.json:
        rows = [
            {"criterion": each.text, "points": each.points, "given": each.given, "cases": each.cases}
            for each in criteria
        ]
        Path(options.json).write_text(json.dumps({"project": options.project, "criteria": rows}, indent=1) + "\n")
    return 0
