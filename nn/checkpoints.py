"""Checkpoints that a crash cannot spoil.

Each is one .npz file (no pickle, ever) with a line in manifest.json that gives its sha256. The file is written under a
temporary name, flushed to the disk and renamed; the manifest follows last, in the same way. So whatever happens, the
manifest lists only complete files, and a file that has changed since is found by its checksum.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zipfile
from pathlib import Path

import numpy as np

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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name, too
        finally:
            os.close(directory)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"cannot write {len(content):,} bytes to {path} ({error.strerror}); what was there before is kept",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


class Checkpoints:
    """A directory of checkpoints.

    Parameters
    ----------
    directory : path
        Made on the first save.
    keep : int
        How many of the latest to keep; those saved under a name of their own are kept beside them.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        self.directory, self.keep = Path(directory), keep

    @property
    def _manifest(self) -> Path:
        return self.directory / "manifest.json"

    def entries(self) -> list[dict]:
        """The manifest's lines, oldest first; [] where there is none."""
        try:
            content = json.loads(self._manifest.read_text())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise CheckpointError(f"{self._manifest} is not JSON ({error}): was it edited?") from error
        if content.get("format") != FORMAT:
            raise CheckpointError(
                f"{self._manifest}: format {content.get('format')}, but this version of ringprop reads {FORMAT}"
            )
        return content["checkpoints"]

    def save(self, state: dict[str, np.ndarray], progress: dict, name: str | None = None) -> Path:
        """Write a checkpoint and forget all but the latest `keep`.

        Parameters
        ----------
        state : dict of arrays
            `trainer.state()`.
        progress : dict
            `Training.progress()`; anything JSON can hold.
        name : str or None
            A name of its own, such as "best", which the next save of that name replaces.
        """
        if odd := [name for name, array in state.items() if array.dtype.hasobject]:
            raise TypeError(f"checkpoint: {', '.join(odd)} holds Python objects, which only a pickle could store")
        self.directory.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, progress=np.array(json.dumps(progress)), **state)
        content = buffer.getvalue()
        steps = int(state["steps"])
        file = f"{name or f'step-{steps:08d}'}.npz"
        write_atomically(self.directory / file, content)
        entry = {"file": file, "sha256": hashlib.sha256(content).hexdigest(), "named": name is not None}
        entries = [e for e in self.entries() if e["file"] != file] + [entry]
        latest = [e for e in entries if not e["named"]]
        dropped = latest[: -self.keep] if self.keep else latest
        entries = [e for e in entries if e not in dropped]
        manifest = json.dumps({"format": FORMAT, "checkpoints": entries}, indent=1)
        write_atomically(self._manifest, manifest.encode())
        for old in dropped:
            (self.directory / old["file"]).unlink(missing_ok=True)
        return self.directory / file

    def load(self, name: str | None = None) -> tuple[dict[str, np.ndarray], dict, Path]:
        """(state, progress, file) of the latest checkpoint that is whole, or of the one called `name`.

        A damaged one is named in a warning, and the one before it is used.

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
                state, progress = _read(path, entry["sha256"])
            except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
                problems.append(f"{path}: {error}")
                warnings.warn(f"CHECKPOINT DAMAGED, trying the one before. {problems[-1]}", stacklevel=2)
                continue
            return state, progress, path
        raise CheckpointError(
            f"no usable checkpoint in {self.directory}: " + ("; ".join(problems) or "the directory holds none")
        )


def _read(path: Path, sha256: str) -> tuple[dict[str, np.ndarray], dict]:
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"sha256 is {found[:12]}..., the manifest says {sha256[:12]}...: the file has changed")
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        state = {key: file[key] for key in file.files}
    return state, json.loads(str(state.pop("progress")))
