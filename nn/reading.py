"""Open files that somebody else may have written: regular files alone, and no more bytes than expected.

A name may lead to anything, through links too: opening a FIFO waits for a writer for ever, opening a device may do
something, and a sparse file of a gigabyte takes no room on the disk but all of it in memory. So everything that reads
run directories, tables, options, images, data sets or checkpoints opens them here. Errors are OSErrors, as for a file
that is not there: `strerror` says what is wrong.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

OPTIONS = 1 << 20  # bytes of a file of options
TABLE = 16 << 20  # bytes of a table, a manifest, a result, the records of a run: a hundred times a large one
TRACE = 64 << 20  # bytes of a trace
MAX_OBJECTS = 1 << 20  # objects and lists in a text of JSON: twice those of a trace of TRACE bytes
DIGITS = 300  # of a whole number in JSON: what a float can hold
LIMITS = ("", "memory.max"), ("memory", "memory.limit_in_bytes")  # of cgroups, in versions 2 and 1
KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: str | os.PathLike, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading, without ever waiting for it.

    Parameters
    ----------
    path : path
        Links are followed to what they name.
    limit : int or None
        Bytes that it may have; None where the reader bounds them itself.

    Raises
    ------
    OSError
        There is none, it cannot be read, is no regular file, or is larger.
    """
    _check(os.stat(path), path, limit)  # before it is opened: that alone may do something to a device
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(os.fstat(handle), path, limit)  # another file may have replaced it
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check(status: os.stat_result, path: str | os.PathLike, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"expected a regular file, this is {special(status.st_mode)}", os.fspath(path))
    if limit is not None and status.st_size > limit:
        raise _too_large(path, limit)


def special(mode: int) -> str:
    """Return the kind of a file that is neither regular nor a directory, in words; '' for these two."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    return next((name for is_kind, name in KINDS if is_kind(mode)), "something else")


def _too_large(path: str | os.PathLike, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"more than the {limit:,} bytes that such a file may have", os.fspath(path))


def read_bytes(path: str | os.PathLike, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises as `open_file`."""
    with open_file(path, limit) as file:
        expected = min(limit, os.fstat(file.fileno()).st_size)
        content = file.read(expected + 1)
        while len(content) > expected and (more := file.read(1 << 16)):  # it has grown, or is one of /proc
            content += more
            if len(content) > limit:
                break
    if len(content) > limit:
        raise _too_large(path, limit)
    return content


def free_memory(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> int:
    """Bytes that this process may still use: those that the machine has available, at most the limit of a container.

    Elsewhere than on Linux there is no bound.
    """
    own = [words[2].lstrip("/") for line in _lines(f"{proc}/self/cgroup") if len(words := line.split(":", 2)) == 3]
    limits = [
        line
        for group in {"", *own}
        for tree, file in LIMITS
        for line in _lines(os.path.join(groups, tree, group, file))
    ]
    bounds = [int(line) for line in limits if line.isdecimal()]  # "max": none
    available = [line.split() for line in _lines(f"{proc}/meminfo") if line.startswith("MemAvailable:")]
    return min([*bounds, *(int(words[1]) << 10 for words in available)], default=1 << 62)


def _lines(path: str) -> list[str]:
    try:
        return read_text(path, OPTIONS).splitlines()
    except (OSError, ValueError):
        return []


def read_text(path: str | os.PathLike, limit: int, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text in a regular file; raise as `open_file`, and ValueError where it is none in that encoding."""
    return read_bytes(path, limit).decode(encoding, errors)


def read_json(path: str | os.PathLike, limit: int = TABLE) -> Any:
    """Return the value in a file of JSON; raise as `open_file`, and ValueError as `parse_json`."""
    return parse_json(read_text(path, limit))


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a text of JSON; `pairs` makes the value of an object of its pairs, instead of a dict.

    Raises
    ------
    ValueError
        No JSON, lists without end in each other, more than MAX_OBJECTS of them (two bytes each, and a hundred in
        memory), or a whole number that no float can hold.
    """
    if (objects := text.count("{") + text.count("[")) > MAX_OBJECTS:
        raise ValueError(f"{objects:,} objects and lists, and at most {MAX_OBJECTS:,} are read")
    try:
        return json.loads(text, parse_int=_whole, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("lists or objects in each other, too deep") from error


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
