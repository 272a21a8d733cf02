"""Grade a project of the course: its tests have points; the page says what was given, and why points are missing."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

PROJECTS = ("data_parallel", "sharded_optimizer", "pipeline")
GRADERS = Path(__file__).resolve().parents[2] / "scripts" / "grading"
LONGEST = 300  # characters of a reason
CASE_SECONDS, AFTER_A_HANG = 20.0, 5.0  # limits of a case: until one hangs, and from then on
SECONDS = 600.0  # limit of all cases together
FIRST_HANGS = 3  # so many cases that hang, before any has passed, end it
HANGS = "no end within"  # how the report of a case that hangs begins (launch.py)


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
    """A pytest plugin: criteria by the mark `points`, outcomes of their cases, and limits for cases that hang.

    Attributes
    ----------
    stopped : str
        Why cases did not run; empty where all have run.
    """

    def __init__(self, case_seconds: float = CASE_SECONDS, seconds: float = SECONDS):
        self.case_seconds, self.end = case_seconds, time.monotonic() + seconds
        self.criteria: dict[str, Criterion] = {}
        self.owner: dict[str, Criterion] = {}
        self.hung: list[str] = []
        self.passed, self.stopped, self.session = 0, "", None

    def pytest_collection_modifyitems(self, session, items):
        self.session = session
        for item in items:
            mark = item.get_closest_marker("points")
            points, text = mark.args
            criterion = self.criteria.setdefault(text, Criterion(text, points))
            criterion.cases[item.name] = "did not run"
            self.owner[item.nodeid] = criterion

    def pytest_runtest_logstart(self, nodeid):
        item = next(item for item in self.session.items if item.nodeid == nodeid)
        limit = min(self.case_seconds, AFTER_A_HANG) if self.hung else self.case_seconds
        item.get_closest_marker("mpi").kwargs["timeout"] = limit

    def pytest_runtest_logreport(self, report):
        criterion, name = self.owner[report.nodeid], report.nodeid.rpartition("::")[2]
        if report.when == "call" and report.passed:
            criterion.cases[name] = ""
            self.passed += 1
        elif report.failed:
            criterion.cases[name] = reason(report)
            self.hung += [name] * criterion.cases[name].startswith(HANGS)
        if len(self.hung) >= FIRST_HANGS and not self.passed:
            self.stop(f"the first cases hang ({', '.join(self.hung)})")
        elif time.monotonic() > self.end:
            self.stop(f"the time for all cases is over; hung have {', '.join(self.hung) or 'none'}")

    def stop(self, why: str) -> None:
        """End the grading after this case; the others did not run."""
        self.stopped = self.session.shouldstop = f"stopped: {why}"


def reason(report) -> str:
    """Return the error of a failed case as one line; of one that hangs, where each rank was."""
    text = str(report.longrepr)
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    first, last = text.strip().splitlines()[0], text.strip().splitlines()[-1]
    found = (named or lines)[0] if lines else first if first.startswith(HANGS) else last
    return found.removeprefix("AssertionError: ")[:LONGEST]


def grade(
    project: str, directory: Path, case_seconds: float = CASE_SECONDS, seconds: float = SECONDS
) -> tuple[list[Criterion], str]:
    """Run the grader of a project on a student's directory; return criteria, and why it was stopped, or "".

    A case that takes more than `case_seconds` hangs and has failed; later ones then have 5 s. It is stopped where the
    first three cases hang, and after `seconds`.

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
    collector = Collector(case_seconds, seconds)
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
    return list(collector.criteria.values()), collector.stopped


def page(project: str, criteria: list[Criterion], stopped: str = "") -> str:
    """Return the result as Markdown: a row for each criterion, and a line for each case that failed."""
    given, possible = (sum(getattr(each, name) for each in criteria) for name in ("given", "points"))
    lines = [f"# {project}: {given:g} of {possible:g} points", "", *[f"**{stopped}**", ""] * bool(stopped)]
    lines += ["| points | of | for |", "|---|---|---|"]
    lines += [f"| {each.given:g} | {each.points:g} | {each.text} |" for each in criteria]
    failed = [(name, why) for each in criteria for name, why in each.cases.items() if why]
    if failed:
        lines += ["", "## What is missing", "", *(f"- `{name}`: {why}" for name, why in failed)]
    return "\n".join(lines) + "\n"
