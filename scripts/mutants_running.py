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
from pathlib import Path

MARK = "RINGPROP_MUTANT"  # in the environment of all processes of a run


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

    def run(self, test: str, limit: float, *options: str, **environment: str) -> tuple[int | None, float]:
        """(pytest's status, seconds) of a test file; status None after `limit` seconds. No process of it stays."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, test]
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        variables = os.environ | {"PYTHONPATH": str(self.path), MARK: mark} | environment
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
            variables.pop(name, None)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:  # what is killed leaves files behind, too
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=variables | {"TMPDIR": scratch},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_processes(f"{MARK}={mark}".encode())
                process.wait()
        return status, time.monotonic() - start


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
