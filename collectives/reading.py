"""Tables and networks in files of JSON that somebody else may have written.

Only regular files of a bounded size are read: opening a FIFO waits for a writer for ever, and a sparse file takes no
room on the disk but all of it in memory. (The packages nn and collectives do not import each other: nn/reading.py does
the same for its files.)
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST = 4 << 20  # bytes of a file


def read_json(file: str | Path) -> Any:
    """Return what a regular file says.

    Raises
    ------
    OSError
        The file is missing, unreadable, not a regular file, or larger than LARGEST.
    ValueError, RecursionError
        It is not JSON.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):  # before it is opened: that alone may do something to a device
        raise OSError(errno.EINVAL, "expected a regular file", os.fspath(file))
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as raw:
        status = os.fstat(raw.fileno())  # another one may have taken its place
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", os.fspath(file))
        text = raw.read(min(status.st_size, LARGEST) + 1)
    if len(text) > LARGEST:
        raise OSError(errno.EFBIG, f"more than the {LARGEST:,} bytes that such a file may have", os.fspath(file))
    return json.loads(text.decode())
