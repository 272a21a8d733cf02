"""Calls of scripts/train.py's main in this process, for tests of what a run does and leaves: no further process starts.

Ranks that --ranks asks for are processes all the same. Tests of the process itself, such as its signals and its files,
start it as a user does.
"""

import contextlib
import io
import signal
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE

from parallel.command import main

ROOT = Path(__file__).parents[2]
NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM


def call(*args, program=ROOT / "scripts" / "train.py", timeout=PATIENCE, **environment) -> tuple[int, str]:
    """Return (exit status, what was written to stdout and stderr) of a run.

    `program` is what ranks are started with. Handlers of signals are put back; after `timeout` seconds main is
    interrupted, which ends its ranks.
    """
    said, handlers = io.StringIO(), [signal.getsignal(number) for number in NUMBERS]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", [*map(str, (program, *args))])
        patch.chdir(ROOT)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, timeout)
            status = main.main([*map(str, args)])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in zip(NUMBERS, handlers, strict=True):
                signal.signal(number, handler)
    return status, said.getvalue()


def _interrupt(number, frame):
    raise KeyboardInterrupt
