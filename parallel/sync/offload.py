"""Flat arrays in memory, or in memory-mapped files of a directory: one file a rank, which no end can leave behind.

A file loses its name as soon as it is mapped, so it is gone with the process, whatever ends that. The room is taken
from the file system at once (posix_fallocate): a full disk is reported at the start, not by a crash in a step.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

ALIGN = 4096  # bytes: arrays begin at pages
FULL = (errno.ENOSPC, errno.EDQUOT)


def shards(names: list[str], size: int, dtype, directory: str | Path | None, communicator) -> dict[str, np.ndarray]:
    """Arrays of zeros by name, each of `size` elements (collective).

    Raises
    ------
    OSError
        On all ranks: which of them cannot have their file in `directory`, and the bytes needed and free.
    """
    if directory is None or not names:
        return {name: np.zeros(size, dtype) for name in names}
    directory, stretch = Path(directory), -(-size * np.dtype(dtype).itemsize // ALIGN) * ALIGN
    memory, problem = None, None
    try:
        memory = mapped(directory, stretch * len(names), communicator.rank)
    except OSError as error:
        problem = error
    problems = communicator.allgather(problem)
    if failing := [rank for rank, each in enumerate(problems) if each]:
        del memory
        communicator.Barrier()  # all have given back what they had
        free = communicator.allgather(free_bytes(directory))[failing[0]]
        error, who = problems[failing[0]], f"rank{'s' * (len(failing) > 1)} {', '.join(map(str, failing))}"
        if error.errno not in FULL:
            raise OSError(error.errno, f"offload: {who}: {error.strerror}")
        where = str(directory) if free is None else f"{directory}, where {free:,} are free"
        raise OSError(
            error.errno,
            f"offload: no room for {who}: each of {communicator.size} ranks needs {stretch * len(names):,} bytes in "
            f"{where} ({error.strerror})",
        )
    memory = np.frombuffer(memory, np.uint8)
    return {name: memory[i * stretch :].view(dtype)[:size] for i, name in enumerate(names)}


def free_bytes(directory: Path) -> int | None:
    """Return the free bytes where `directory` is, or would be; None where the system does not say."""
    try:
        found = os.statvfs(next(place for place in (directory, *directory.absolute().parents) if place.exists()))
    except OSError:  # as on a rank that may not look into a parent: other ranks wait for its answer
        return None
    return found.f_bavail * found.f_frsize


def mapped(directory: Path, nbytes: int, rank: int) -> mmap.mmap:
    """Return the bytes of a new file, mapped; it has no name any more."""
    file = directory / f"shard-{os.getpid()}-rank-{rank}"
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{directory} is no directory: shards need one for their files")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OSError(error.errno, f"cannot make {file}: {error.strerror}") from error
    try:
        os.posix_fallocate(handle, 0, nbytes)
        return mmap.mmap(handle, nbytes)
    except OSError:
        os.ftruncate(handle, 0)
        raise
    finally:
        os.unlink(file)
        os.close(handle)
