"""What all tests share: MPI ranks launched by pytest (tests/ranks.py), and the check that nothing stays behind."""

import os
import time
from pathlib import Path

import pytest

pytest_plugins = ["ranks"]


@pytest.fixture
def nothing_left(monkeypatch):
    """After this test, none of the processes that it started, or that those started, runs.

    Found by a variable in their environment, read from /proc: independent of what the launcher itself does.
    """
    mark = f"RINGPROP_TEST_MARK={os.urandom(8).hex()}"
    monkeypatch.setenv(*mark.split("="))

    def running():
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in environ.read_bytes().split(b"\0"):
                    yield environ.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended, or is another user's
                continue

    yield
    end = time.monotonic() + 5
    while (left := list(running())) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, f"still running: {left}"
