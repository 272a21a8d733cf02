"""Which test files run a line of the packages: each is run once under coverage, with all processes and ranks it starts.

What a file ran is kept, with its seconds, and measured again when the test file or a source file that it ran has
changed. coverage.py (Ned Batchelder) counts with sys.monitoring where Python has it (3.12), else with its C tracer.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mutants_running import Copy

# sitecustomize.py, which Python imports at the start of every process that finds it.
START = "import coverage\ncoverage.process_startup()\n"
LIMIT = 1800  # seconds for a test file under coverage


@dataclass
class Measured:
    """A test file: seconds, tests that fail without any change, and the lines that it ran of each source file."""

    test: str
    failing: list[str] | None  # None: nothing of it runs to its end
    seconds: float
    digest: str
    lines: dict[str, list[int]] = field(default_factory=dict)


def measure(copy: Copy, tests: list[str], folders: tuple[str, ...], kept: Path) -> list[Measured]:
    """All test files that run without any change, from `kept` where they are known."""
    kept.mkdir(parents=True, exist_ok=True)
    found = []
    for test in tests:
        file = kept / (test.replace("/", "-") + ".json")
        known = Measured(**json.loads(file.read_text())) if file.exists() else None
        if known is None or known.failing is None or known.digest != digest(copy, test, known.lines):
            known = measure_one(copy, test, folders)
            print(f"{known.seconds:7.1f} s  {test}", flush=True)
            if known.failing != []:
                print(f"           fails as it is, and is left out: {known.failing or test}", flush=True)
            new = file.with_suffix(".new")
            new.write_text(json.dumps(asdict(known)))
            os.replace(new, file)
        found.append(known)
    return [known for known in found if known.failing is not None]


def measure_one(copy: Copy, test: str, folders: tuple[str, ...]) -> Measured:
    from coverage import CoverageData

    with tempfile.TemporaryDirectory(prefix="mutants-lines-") as directory:
        settings, startup = Path(directory, "coveragerc"), copy.path / "sitecustomize.py"
        settings.write_text(
            f"[run]\nparallel = true\ncore = {'sysmon' if sys.version_info >= (3, 12) else 'ctrace'}\npatch = _exit\n"
            f"data_file = {directory}/data\nsource = {','.join(str(copy.path / folder) for folder in folders)}\n"
            "disable_warnings = no-data-collected, module-not-measured, module-not-imported\n"
        )
        startup.write_text(START)
        try:
            ended = copy.run(test, LIMIT, COVERAGE_PROCESS_START=str(settings))
        finally:
            startup.unlink()
        lines: dict[str, set[int]] = {}
        for part in Path(directory).glob("data.*"):
            data = CoverageData(str(part))
            data.read()
            for path in data.measured_files():
                name = Path(path).relative_to(copy.path).as_posix()
                lines.setdefault(name, set()).update(data.lines(path) or ())
    if ended.status:  # counting may be what it fails of
        ended = copy.run(test, LIMIT)
    ran = {path: sorted(numbers) for path, numbers in sorted(lines.items()) if numbers}
    failing = ended.failed if ended.status in (0, 1) else None
    return Measured(test, failing, ended.seconds, digest(copy, test, ran), ran)


def digest(copy: Copy, test: str, lines: dict[str, list[int]]) -> str:
    total = hashlib.sha256()
    for path in [test, *lines]:
        file = copy.path / path
        total.update(file.read_bytes() if file.exists() else b"")
    return total.hexdigest()


def statement(text: str, line: int) -> range:
    """The lines of the innermost statement around a line; of one with a body, those before it."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            end = node.body[0].lineno if getattr(node, "body", None) else node.end_lineno + 1
            if start <= line < max(end, start + 1):
                best = range(start, max(end, start + 1))  # inner statements come later
    return best


def covering(measured: list[Measured], path: str, text: str, line: int) -> list[Measured]:
    """The test files that run a line, first those that are likely to tell soon.

    That is the fewest seconds for what a file runs of `path`, where a line that few files run weighs more: merely
    importing it, as many do, is not testing it. Where nobody ran the line itself, any line of its statement counts.
    """
    users = Counter(number for one in measured for number in one.lines.get(path, ()))
    wanted = {line} if users[line] else set(statement(text, line))
    found = [one for one in measured if not wanted.isdisjoint(one.lines.get(path, ()))]
    weight = {one.test: sum(1 / users[number] for number in one.lines[path]) for one in found}
    return sorted(found, key=lambda one: one.seconds / weight[one.test])
