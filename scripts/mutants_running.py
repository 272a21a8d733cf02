"""Running a test file in a copy of the project, changed or not, and leaving no process of it behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "RINGPROP_MUTANT"  # in the environment of all processes of a run


@dataclass
class Ended:
    """pytest's status, None where it was ended at its limit; which tests failed, and what was said last of it."""

    status: int | None
    seconds: float
    failed: list[str]
    said: str


class Copy:
    """The tracked files, in a directory of their own: what tests run there, and all ranks, is read from there.

    PYTHONPATH comes before an editable installation of the project, and is handed down to every rank.
    """

    def __init__(self, tracked: list[str], directory: str):
        self.path = Path(directory)
        self._dates = itertools.count(1_000_000_000)
        for path in tracked:
            target = self.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)

    def write(self, path: str, text: str) -> None:
        """With a date that no text of this file had before: Python takes a .pyc of the same date for up to date."""
        target, date = self.path / path, next(self._dates)
        target.write_text(text)
        os.utime(target, (date, date))

    @contextlib.contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        kept = (self.path / path).read_text()
        self.write(path, text)
        try:
            yield
        finally:
            self.write(path, kept)

    def run(self, test: str, limit: float, *options: str, **environment: str) -> Ended:
        """How a test file ends, after `limit` seconds at the latest. No process of it stays."""
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *options, test]
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        variables = os.environ | {"PYTHONPATH": str(self.path), MARK: mark} | environment
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and to load them takes half a second
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
            variables.pop(name, None)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch, tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=variables | {"TMPDIR": scratch},  # what is killed leaves files behind, too
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_processes(f"{MARK}={mark}".encode())
                process.wait()
            seconds = time.monotonic() - start
            output.seek(0)
            said = [line.strip() for line in output if line.startswith(("FAILED ", "ERROR ", "E  "))]
        failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in said if line.startswith("FAILED ")]
        return Ended(status, seconds, failed, said[-1] if said else "")


def end_processes(mark: bytes) -> None:
    """Kill whoever has that in the environment, until nobody has: launchers and ranks, of whatever group or session."""
    while True:
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
            except OSError:  # it has ended, or is another user's
                continue
        if not found:
            return
        time.sleep(0.02)
