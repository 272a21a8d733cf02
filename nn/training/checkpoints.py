"""Checkpoints that a crash cannot spoil.

Each is one .npz file (no pickle, ever) with a line in manifest.json that gives its sha256. A file is written under a
temporary name, flushed to the disk and renamed; the manifest follows last, in the same way. So whatever happens, the
manifest lists only complete files, and a file that has changed since is found by its checksum. Where a file replaces
another, as each best one does, the manifest first says that it may be either.

A checkpoint may also have several files ("parts" in the manifest), each with its sha256: a subclass writes and reads
those (`Checkpoints.open`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np

from nn.arguments import COUNT, Closed
from nn.reading import open_file, read_json, special
from nn.training.state_files import PROGRESS, LazyState, StateFile

FORMAT = 2
STEP = re.compile(r"step-[0-9]+\.npz")
TEMPORARY = re.compile(r"\.(.+)\.[0-9]+\.tmp")  # names of files that are being written, with the process that does
FORMATS = (1, FORMAT)  # that are read; 1 has no checkpoints of several files


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says which files were tried and what is wrong with each.

    Examples
    --------
    >>> import tempfile
    >>> import nn
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     try:
    ...         nn.Checkpoints(directory).load()
    ...     except nn.CheckpointError as error:
    ...         print("nothing was saved")
    nothing was saved
    """


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never half of it; a full disk leaves the old.

    Raises
    ------
    OSError
        With the file and the number of bytes in the message; the temporary file is removed.
    """
    with replacing(path) as file:
        file.write(content)


def json_text(value: object, indent: int | None = None) -> str:
    """Return the JSON of a record or a result: numbers that are not finite are null, for JSON has no NaN."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def remove_temporary_files(directory: Path, names: Collection[str] | None = None) -> None:
    """Remove what `replacing` has left in a directory where its process was killed; files of others stay.

    With names, only what was to become a checkpoint of a step or one of these: others may write there just now.
    """
    with suppress(OSError):  # there is none, or it cannot be read
        for file in directory.iterdir():
            match = TEMPORARY.fullmatch(file.name)
            if match and (names is None or match[1] in names or STEP.fullmatch(match[1])):
                file.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Hashed]:
    """Replace `path` by the file of this context at its end, and not at all after an error in it.

    Only a regular file is replaced: otherwise root could replace a device (/dev/null, /dev/stdout) for everybody.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # as TEMPORARY
    file = None
    try:
        if path.exists() and (kind := special(path.stat().st_mode)):
            raise OSError(errno.EINVAL, f"there is {kind}, which is not replaced by a file")
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as raw:  # a new file: never through a link that somebody else has put there
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


def check_checkpoints(what: str, value: object) -> None:
    """Refuse what are no Checkpoints, such as the name of a directory, before anything is trained."""
    if not isinstance(value, Checkpoints):
        hint = f": nn.Checkpoints({value!r:.80}) makes them" if isinstance(value, str | os.PathLike) else ""
        raise TypeError(f"{what}: checkpoints must be nn.Checkpoints, given {value!r:.80}{hint}")


class Checkpoints(Closed):
    """A directory of checkpoints.

    Parameters
    ----------
    directory : path
        Made on the first save.
    keep : int
        How many of the latest to keep; those saved under a name of their own are kept beside them.
    facts : dict or None
        What holds for all of them, such as the options of the run; anything JSON can hold. The manifest keeps it.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> directory = tempfile.TemporaryDirectory()
    >>> checkpoints = nn.Checkpoints(directory.name)
    >>> training = nn.fit(trainer, (x, y), 2, nn.KeepCheckpoints(checkpoints, best=None))
    >>> state, progress, file = checkpoints.load()
    >>> progress["epoch"], file.name
    (2, 'step-00000002.npz')
    >>> trainer.load_state_dict(state)
    >>> directory.cleanup()
    """

    def __init__(self, directory: str | Path, keep: int = 2, facts: dict | None = None):
        COUNT("Checkpoints: keep", keep)
        self.directory, self.keep, self._facts = Path(directory), keep, facts or {}

    @property
    def _manifest(self) -> Path:
        return self.directory / "manifest.json"

    def entries(self) -> list[dict]:
        """Return the manifest's entries, oldest first; [] where there is no manifest.

        Raises
        ------
        CheckpointError
            The manifest is not one of ours, or was changed by others.
        """
        return self._read_manifest()["checkpoints"]

    def facts(self) -> dict:
        """Return the facts that the manifest keeps for all checkpoints; {} where it has none. Raises as `entries`."""
        return self._read_manifest().get("facts", {})

    def _read_manifest(self) -> dict:
        try:
            content = read_json(self._manifest)
        except FileNotFoundError:
            return {"checkpoints": []}
        except OSError as error:
            raise CheckpointError(f"{self._manifest} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise CheckpointError(f"{self._manifest} is not JSON ({error}): was it edited?") from error
        version = content.get("format") if isinstance(content, dict) else None
        if version not in FORMATS or isinstance(version, bool):
            raise CheckpointError(
                f"{self._manifest}: format {version!r:.40}, but this ringprop reads {' and '.join(map(str, FORMATS))}"
            )
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
            `trainer.state_dict()`, or `trainer.state_items()`, with the number of steps first: written one by
            one, so that all are never in memory at once.
        progress : dict
            `Training.progress()`; anything JSON can hold.
        name : str or None
            A name of its own, such as "best", which the next save of that name replaces.
        """
        if name is not None and (not name or Path(name).name != name or STEP.fullmatch(f"{name}.npz")):
            raise ValueError(
                "Checkpoints.save: name is that of a file in the directory, such as 'best', and none of those that are "
                f"named by their step, given {name!r}"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(self.directory, ("manifest.json", f"{name}.npz"))
        pairs = iter([("steps", state["steps"]), *state.items()] if isinstance(state, Mapping) else state)
        _, steps = first = next(pairs)
        file = f"{name or f'step-{int(steps):08d}'}.npz"
        entries = self.entries()
        replaced = next((entry for entry in reversed(entries) if entry["file"] == file), None)
        remaining = [entry for entry in entries if entry["file"] != file]
        with replacing(self.directory / file) as out:
            write_npz(out, chain([progress_entry(progress), first], pairs))
            entry = {"file": file, "sha256": out.sha256.hexdigest(), "named": name is not None}
            if replaced and "sha256" in replaced:  # a file of this name
                self._write_manifest([*remaining, entry | {"before": self._content(replaced)}])
        self.list_entries([*remaining, entry], replaced)
        return self.directory / file

    # ------------------------------------------------------------------------------------------------- the manifest

    def list_entries(self, entries: list[dict], *replaced: dict | None) -> None:
        """List the latest of these entries in the manifest; remove the files of all others, and of those replaced."""
        latest = [entry for entry in entries if not entry["named"]]
        dropped = latest[: -self.keep] if self.keep else latest
        listed = [entry for entry in entries if entry not in dropped]
        self._write_manifest(listed)
        listed_files = {file for entry in listed for file, _ in files_of(entry)}
        removed = (*dropped, *filter(None, replaced))
        for file in {file for entry in removed for file, _ in files_of(entry)} - listed_files:
            (self.directory / file).unlink(missing_ok=True)

    def _write_manifest(self, entries: list[dict]) -> None:
        manifest = json.dumps({"format": FORMAT, "facts": self._facts, "checkpoints": entries}, indent=1)
        write_atomically(self._manifest, manifest.encode())

    def _content(self, entry: dict) -> str:
        """Return the sha256 of an entry's file; computed only if a run was killed while it replaced the file."""
        path = self.directory / entry["file"]
        return _sha256(path) if "before" in entry and path.exists() else entry["sha256"]

    def load(self, name: str | None = None) -> tuple[LazyState, dict, Path]:
        """Return (state, progress, file) of the latest checkpoint that is whole, or of the one called `name`.

        The arrays are read from the file when they are asked for. A damaged one is named in a warning, and the one
        before it is used.

        Raises
        ------
        CheckpointError
            If there is none; or a subclass has written it, in several files.
        """
        entries = [e for e in self.entries() if (e["file"] == f"{name}.npz" if name else not e["named"])]
        problems = []
        for entry in reversed(entries):
            path = self.directory / entry["file"]
            try:
                self._verify(entry)
                state = self.open(entry)
            except (OSError, ValueError, KeyError, RecursionError) as error:
                problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
                warnings.warn(f"CHECKPOINT DAMAGED, trying the one before. {problems[-1]}", stacklevel=2)
                continue
            return state, state.progress, path
        raise CheckpointError(
            f"no usable checkpoint in {self.directory}: " + ("; ".join(problems) or "the directory holds none")
        )

    def open(self, entry: dict) -> LazyState:
        """Return the arrays of an entry of the manifest, whose files are right. For subclasses with other files.

        Raises
        ------
        CheckpointError
            It has several files.
        """
        if "parts" in entry:
            raise CheckpointError(
                f"{self.directory / entry['file']}: it has {len(entry['parts'])} files, which several processes wrote: "
                "read it with parallel.ShardedCheckpoints"
            )
        return StateFile(self.directory / entry["file"])

    def _verify(self, entry: dict) -> None:
        """Refuse files that are not what the manifest says of them."""
        for file, sha256 in files_of(entry):
            of = f"its part {file}: " if "parts" in entry else ""
            try:
                actual = _sha256(self.directory / file)
            except OSError as error:
                raise ValueError(f"{of}{error.strerror}") from error
            if actual not in (sha256, entry.get("before")):
                raise ValueError(
                    f"{of}sha256 is {actual[:12]}..., the manifest says {sha256[:12]}...: the file has changed"
                )


def files_of(entry: dict) -> list[tuple[str, str]]:
    """Return (file, sha256) of all files of an entry of the manifest."""
    return [(part["file"], part["sha256"]) for part in entry.get("parts", [entry])]


def _is_entry(entry) -> bool:
    """Return whether this is an entry of a manifest; its files must lie beside it, for `save` removes old ones."""
    if not (isinstance(entry, dict) and isinstance(entry.get("named"), bool) and _is_file(entry.get("file"))):
        return False
    if "parts" not in entry:
        return isinstance(entry.get("sha256"), str) and isinstance(entry.get("before", ""), str)
    parts = entry["parts"]
    return (
        isinstance(parts, list)
        and len(parts) > 0
        and all(isinstance(part, dict) and _is_file(part.get("file")) for part in parts)
        and all(isinstance(part.get("sha256"), str) for part in parts)
    )


def _is_file(name) -> bool:
    return isinstance(name, str) and name.endswith(".npz") and name == os.path.basename(name) and "\0" not in name


def progress_entry(progress: dict) -> tuple[str, np.ndarray]:
    """Return the progress as an entry of a file."""
    return PROGRESS, np.array(json.dumps(progress))


def write_npz(out: Hashed, pairs: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write an .npz file, as numpy.savez does, of arrays that come one by one."""
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
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
