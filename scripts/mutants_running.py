"""Running a test file in a copy of the project, changed or not, and leaving no process of it behind."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

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
        """How a test file ends, after `limit` seconds at the latest. No process of it stays.

        pytest runs in a fork of this process, which has imported the libraries, and nothing of the project.
        """
        load_libraries()
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch, tempfile.TemporaryFile("w+") as output:
            variables = {"PYTHONPATH": str(self.path), MARK: mark, "TMPDIR": scratch} | environment
            arguments = ["-q", "--tb=line", "-p", "no:cacheprovider", *options, test]
            start = time.monotonic()
            child = os.fork()
            if not child:
                run_tests(self.path, variables, arguments, output.fileno())
            ends = os.pidfd_open(child)
            try:
                in_time = select.select([ends], [], [], limit)[0]
            finally:
                os.kill(child, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):  # who is alone in its session and has ended
                    os.killpg(child, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                end_processes(f"{MARK}={mark}".encode())
                os.close(ends)
            seconds = time.monotonic() - start
            output.seek(0)
            said = [line.strip() for line in output if line.startswith(("FAILED ", "ERROR ", "E  "))]
        failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in said if line.startswith("FAILED ")]
        return Ended(status if in_time else None, seconds, failed, said[-1] if said else "")


@cache
def load_libraries() -> None:
    """What tests import: seconds for each run of them."""
    for name in ("pytest", "numpy", "hypothesis", "matplotlib.pyplot", "scipy.optimize", "torch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_tests(directory: Path, variables: dict[str, str], arguments: list[str], output: int) -> NoReturn:
    """In the forked process: what `python -m pytest` would do there."""
    status = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 - what the parent has not written is its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(variables)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
            os.environ.pop(name, None)
        sys.dont_write_bytecode, tempfile.tempdir = False, None
        os.chdir(directory)
        sys.path[:1] = [str(directory)]  # for the directory of this script
        if "COVERAGE_PROCESS_START" in variables:
            importlib.import_module("coverage").process_startup()
        status = int(importlib.import_module("pytest").main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)  # what this process has to clean up is its parent's


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
