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
from typing import Any, BinaryIO

OPTIONS = 1 << 20  # bytes of a file of options
TABLE = 16 << 20  # bytes of a table, a manifest, a result, the records of a run: a hundred times a large one
TRACE = 64 << 20  # bytes of a trace
DIGITS = 300  # of a whole number in JSON: what a float can hold
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
        _check(os.fstat(handle), path, limit)  # another one may have taken its place
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check(status: os.stat_result, path: str | os.PathLike, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in KINDS if is_kind(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"expected a regular file, this is {kind}", os.fspath(path))
    if limit is not None and status.st_size > limit:
        raise _too_large(path, limit)


def _too_large(path: str | os.PathLike, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"more than the {limit:,} bytes that such a file may have", os.fspath(path))


def read_bytes(path: str | os.PathLike, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises as `open_file`."""
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


def read_text(path: str | os.PathLike, limit: int, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text in a regular file; raises as `open_file`, and ValueError where it is none in that encoding."""
    return read_bytes(path, limit).decode(encoding, errors)


def read_json(path: str | os.PathLike, limit: int = TABLE) -> Any:
    """What a file of JSON says; raises as `open_file`, and ValueError as `parse_json`."""
    return parse_json(read_text(path, limit))


def parse_json(text: str) -> Any:
    """What a text of JSON says.

    Raises
    ------
    ValueError
        No JSON, lists without end in each other, or a whole number that no float can hold.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("lists or objects in each other, too deep") from error


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
