"""Grade a project of the course: its tests have points; the page says what was given, and why points are missing."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

PROJECTS = ("data_parallel", "sharded_optimizer", "pipeline")
GRADERS = Path(__file__).resolve().parents[2] / "scripts" / "grading"
LONGEST = 300  # characters of a reason


@dataclass
class Criterion:
    """What points are given for: a test, in several cases.

    Attributes
    ----------
    points : float
        of all cases together; each case that passes gives its part
    cases : dict
        name of a case -> "" where it passed, else why it did not
    """

    text: str
    points: float
    cases: dict[str, str] = field(default_factory=dict)

    @property
    def given(self) -> float:
        passed = sum(not reason for reason in self.cases.values())
        return round(self.points * passed / len(self.cases), 1) if self.cases else 0.0


class Collector:
    """A pytest plugin: criteria by the mark `points`, and the outcome of each of their cases."""

    def __init__(self):
        self.criteria: dict[str, Criterion] = {}
        self.owner: dict[str, Criterion] = {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            mark = item.get_closest_marker("points")
            points, text = mark.args
            criterion = self.criteria.setdefault(text, Criterion(text, points))
            criterion.cases[item.name] = "did not run"
            self.owner[item.nodeid] = criterion

    def pytest_runtest_logreport(self, report):
        criterion, name = self.owner[report.nodeid], report.nodeid.rpartition("::")[2]
        if report.when == "call" and report.passed:
            criterion.cases[name] = ""
        elif report.failed:
            criterion.cases[name] = reason(report)


def reason(report) -> str:
    """Return the error of a failed case as one line."""
    lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    text = (named or lines)[0] if lines else str(report.longrepr).strip().splitlines()[-1]
    return text.removeprefix("AssertionError: ")[:LONGEST]


def grade(project: str, directory: Path) -> list[Criterion]:
    """Run the grader of a project on a student's directory.

    Raises
    ------
    ValueError
        no such directory, or no file of the project in it; no graders, as in an installed package; no pytest
    """
    if not (directory / f"{project}.py").is_file():
        raise ValueError(f"{directory}: expected the folder that holds {project}.py")
    if not GRADERS.is_dir():
        raise ValueError(f"{GRADERS} is missing: graders are in the source tree, not in an installed package")
    try:
        import pytest
    except ImportError:
        raise ValueError('grading needs pytest: pip install "pytest>=8"') from None
    collector = Collector()
    os.environ["RINGPROP_PROJECT"] = str(directory.resolve())
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "parallel.testing.plugin",
        "-o",
        "addopts=",
        "--rootdir",
        str(GRADERS),
        "--no-header",
        "--no-summary",
    ]
    pytest.main([*options, str(GRADERS / f"grade_{project}.py")], plugins=[collector])
    return list(collector.criteria.values())


def page(project: str, criteria: list[Criterion]) -> str:
    """Return the result as Markdown: a row for each criterion, and a line for each case that failed."""
    given, possible = (sum(getattr(each, name) for each in criteria) for name in ("given", "points"))
    lines = [f"# {project}: {given:g} of {possible:g} points", "", "| points | of | for |", "|---|---|---|"]
    lines += [f"| {each.given:g} | {each.points:g} | {each.text} |" for each in criteria]
    failed = [(name, why) for each in criteria for name, why in each.cases.items() if why]
    if failed:
        lines += ["", "## What is missing", "", *(f"- `{name}`: {why}" for name, why in failed)]
    return "\n".join(lines) + "\n"
