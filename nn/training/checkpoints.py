"""Checkpoints that a crash cannot spoil.

Each is one .npz file (no pickle, ever) with a line in manifest.json that gives its sha256. The file is written under a
temporary name, flushed to the disk and renamed; the manifest follows last, in the same way. So whatever happens, the
manifest lists only complete files, and a file that has changed since is found by its checksum. Where a file takes the
place of another, as each best one does, the manifest first says that it may be either.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from nn.data.arrays import NUMBERS, TEXT, Archive

FORMAT = 1


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says which files were tried and what is wrong with each."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part; a full disk leaves the old.

    Raises
    ------
    OSError
        With the file and the number of bytes in the message; the temporary file is removed.
    """
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[Hashed]:
    """A file that takes the place of `path` at the end of the context, and not at all after an error in it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file = None
    try:
        with open(temporary, "wb") as raw:
            file = Hashed(raw)
            yield file
            file.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name, too
        finally:
            os.close(directory)
    except OSError as error:
        why = error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            disk = os.statvfs(path.parent)
            free = disk.f_bavail * disk.f_frsize + (temporary.stat().st_size if temporary.exists() else 0)
            why += f": {free:,} bytes were free"
        what = f"{file.size:,} bytes to {path}" if file else str(path)
        raise type(error)(error.errno, f"cannot write {what} ({why}); what was there before is kept") from error
    finally:
        temporary.unlink(missing_ok=True)


class Hashed:
    """A file to be written from beginning to end; it keeps the SHA-256 and the number of bytes that it was given."""

    def __init__(self, file):
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0
        self.flush = file.flush

    def write(self, data) -> int:
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return self.file.write(data)


class Checkpoints:
    """A directory of checkpoints.

    Parameters
    ----------
    directory : path
        Made on the first save.
    keep : int
        How many of the latest to keep; those saved under a name of their own are kept beside them.
    facts : dict or None
        What holds for all of them, such as the options of the run; anything JSON can hold. The manifest keeps it.
    """

    def __init__(self, directory: str | Path, keep: int = 2, facts: dict | None = None):
        self.directory, self.keep, self._facts = Path(directory), keep, facts or {}

    @property
    def _manifest(self) -> Path:
        return self.directory / "manifest.json"

    def entries(self) -> list[dict]:
        """The manifest's lines, oldest first; [] where there is none.

        Raises
        ------
        CheckpointError
            The manifest is not one of ours, or was changed by others.
        """
        return self._read_manifest()["checkpoints"]

    def facts(self) -> dict:
        """What the manifest says of all checkpoints; {} where it says nothing. Raises as `entries`."""
        return self._read_manifest().get("facts", {})

    def _read_manifest(self) -> dict:
        try:
            content = json.loads(self._manifest.read_text())
        except FileNotFoundError:
            return {"checkpoints": []}
        except OSError as error:
            raise CheckpointError(f"{self._manifest} cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._manifest} is not JSON ({error}): was it edited?") from error
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise CheckpointError(f"{self._manifest}: format {found!r:.40}, but this ringprop reads {FORMAT}")
        entries = content.get("checkpoints")
        for entry in entries if isinstance(entries, list) else [None]:
            if not _is_entry(entry):
                raise CheckpointError(
                    f"{self._manifest}: expected checkpoints, each with a file beside it, its sha256 and whether it is "
                    f"named, given {entry!r:.80}: was it edited?"
                )
        if not isinstance(facts := content.get("facts", {}), dict):
            raise CheckpointError(f"{self._manifest}: facts must be an object, given {facts!r:.80}")
        return content

    def save(
        self,
        state: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]],
        progress: dict,
        name: str | None = None,
    ) -> Path:
        """Write a checkpoint and forget all but the latest `keep`.

        Parameters
        ----------
        state : dict of arrays, or (name, array) pairs
            `trainer.state()`, or `trainer.entries()`, of which the first is the number of steps: written one by one, so
            that all are never in memory at once.
        progress : dict
            `Training.progress()`; anything JSON can hold.
        name : str or None
            A name of its own, such as "best", which the next save of that name replaces.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob(".*.tmp"):  # by a run that was killed while it wrote
            left.unlink(missing_ok=True)
        pairs = iter([("steps", state["steps"]), *state.items()] if isinstance(state, Mapping) else state)
        _, steps = first = next(pairs)
        file = f"{name or f'step-{int(steps):08d}'}.npz"
        entries, there = [], None
        for each in self.entries():
            if each["file"] == file:
                there = each
            else:
                entries.append(each)
        with replacing(self.directory / file) as out:
            write_npz(out, chain([("progress", np.array(json.dumps(progress))), first], pairs))
            entry = {"file": file, "sha256": out.sha256.hexdigest(), "named": name is not None}
            if there:
                self._write_manifest([*entries, entry | {"before": self._content(there)}])
        latest = [e for e in [*entries, entry] if not e["named"]]
        dropped = latest[: -self.keep] if self.keep else latest
        self._write_manifest([e for e in [*entries, entry] if e not in dropped])
        for old in dropped:
            (self.directory / old["file"]).unlink(missing_ok=True)
        return self.directory / file

    def _write_manifest(self, entries: list[dict]) -> None:
        manifest = json.dumps({"format": FORMAT, "facts": self._facts, "checkpoints": entries}, indent=1)
        write_atomically(self._manifest, manifest.encode())

    def _content(self, entry: dict) -> str:
        """The sha256 of what an entry's file holds: known, but where a run was killed while it replaced the file."""
        path = self.directory / entry["file"]
        return _sha256(path) if "before" in entry and path.exists() else entry["sha256"]

    def load(self, name: str | None = None) -> tuple[Stored, dict, Path]:
        """(state, progress, file) of the latest checkpoint that is whole, or of the one called `name`.

        The arrays are read from the file when they are asked for. A damaged one is named in a warning, and the one
        before it is used.

        Raises
        ------
        CheckpointError
            If there is none.
        """
        entries = [e for e in self.entries() if (e["file"] == f"{name}.npz" if name else not e["named"])]
        problems = []
        for entry in reversed(entries):
            path = self.directory / entry["file"]
            try:
                state, progress = _read(path, entry)
            except (OSError, ValueError, KeyError, RecursionError) as error:
                problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
                warnings.warn(f"CHECKPOINT DAMAGED, trying the one before. {problems[-1]}", stacklevel=2)
                continue
            return state, progress, path
        raise CheckpointError(
            f"no usable checkpoint in {self.directory}: " + ("; ".join(problems) or "the directory holds none")
        )


class Stored(Mapping):
    """The arrays of a checkpoint by name, each read from the file when it is asked for: they need not all fit."""

    def __init__(self, path: Path):
        self._file = Archive(path, NUMBERS + TEXT)
        self._names = dict.fromkeys(self._file)
        for name in self._names:
            self._file.check(name)
        self.progress = json.loads(str(self._file["progress"]))
        if not isinstance(self.progress, dict):
            raise ValueError(f"progress must be an object, given {self.progress!r:.40}")
        del self._names["progress"]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._file[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_entry(entry) -> bool:
    """Whether this is a line of a manifest; its file must lie beside it, for `save` removes old ones."""
    return (
        isinstance(entry, dict)
        and isinstance(file := entry.get("file"), str)
        and file.endswith(".npz")
        and file == os.path.basename(file)
        and "\0" not in file
        and isinstance(entry.get("sha256"), str)
        and isinstance(entry.get("before", ""), str)
        and isinstance(entry.get("named"), bool)
    )


def write_npz(out: Hashed, pairs: Iterable[tuple[str, np.ndarray]]) -> None:
    """An .npz file, as numpy.savez makes it, of arrays that come one by one."""
    written = set()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, array in pairs:
            if name in written:
                continue
            if array.dtype.hasobject:
                raise TypeError(f"{name} holds Python objects, which only a pickle could store")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
            written.add(name)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, entry: dict) -> tuple[Stored, dict]:
    found, sha256 = _sha256(path), entry["sha256"]
    if found not in (sha256, entry.get("before")):
        raise ValueError(f"sha256 is {found[:12]}..., the manifest says {sha256[:12]}...: the file has changed")
    stored = Stored(path)
    return stored, stored.progress
