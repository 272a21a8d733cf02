"""The command lines of all programs beside training (parsing.py): a wrong argument is one line, and exit status 2.

    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=whole(2), help="ranks to start")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows there")

What a `type` refuses argparse puts behind the name of the argument. Files and directories are tried before anything is
computed: a result of hours must not be lost to a directory that is not there. The standard library only.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from parallel.settings import LARGEST, shortened


class Parser(argparse.ArgumentParser):
    """argparse without the usage before an error, which hides it."""

    def error(self, message: str):
        """Print what is wrong and exit with status 2."""
        self.exit(2, shortened(f"{self.prog}: error: {message} (--help lists the arguments)") + "\n")


def whole(least: int = 1, most: int = LARGEST) -> Callable[[str], int]:
    """Return the reader of a whole number of that range."""

    def read(text: str) -> int:
        value = int(text) if text.removeprefix("-").isdecimal() and len(text) < 30 else None
        if value is None or not least <= value <= most:
            allowed = f"of at least {least}" if most == LARGEST else f"from {least} to {most:,}"
            raise argparse.ArgumentTypeError(f"expected a whole number {allowed}, given {text!r:.60}")
        return value

    return read


def number(least: float = 0.0, most: float = math.inf) -> Callable[[str], float]:
    """Return the reader of a finite number of that range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or math.isinf(value):
            allowed = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"expected a number {allowed}, given {text!r:.60}")
        return value

    return read


def new_file(text: str) -> str:
    """Read the name of a file that can be written, in a directory that is there."""
    path = Path(text or ".")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected the name of a file, given {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent} for {path.name}: make it first")
    if reason := why_not_written(path if path.is_file() else path.parent):
        raise argparse.ArgumentTypeError(reason)
    return text


def new_directory(text: str) -> str:
    """Read the name of a directory that can be written, or made."""
    if reason := "expected the name of a directory" if not text else why_no_directory(text):
        raise argparse.ArgumentTypeError(f"{reason}, given {text!r}")
    return text


def why_no_directory(text: str) -> str:
    """Return why nothing can be written into a directory that is there or has to be made; "" where it can."""
    path = Path(text).absolute()
    near = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if near.is_dir():
        return why_not_written(near)
    return f"{near} is a {'file, no directory' if os.path.exists(near) else 'link to nothing'}"


def why_not_written(path: Path) -> str:
    """Return why a file, or a new one in a directory, cannot be written; "" where it can."""
    try:  # permission bits do not tell of root, nor of /proc
        if path.is_dir():
            with tempfile.TemporaryFile(dir=path):
                return ""
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return ""
    except OSError as error:
        into = "nothing can be written into " * path.is_dir()
        return f"{into}{path}{'' if into else ' cannot be written'} ({error.strerror})"
