"""Checkpoints that many ranks write at the same time, each its own file, and that any number of them reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from itertools import chain

from nn.training.checkpoints import (
    Checkpoints,
    files_of,
    progress_entry,
    remove_temporary_files,
    replacing,
    write_npz,
)
from nn.training.state_files import LazyState
from parallel.state.fragments import Fragment, JoinedFiles, with_places


class ShardedCheckpoints(Checkpoints):
    """A directory of checkpoints, each of one file or of one for each rank: `nn.Checkpoints` for sharded strategies.

    Where a strategy holds parts of the state on several ranks, every rank writes what it has, and nothing is gathered.
    The files have other names than those of the checkpoint before, and the manifest lists them when all are there. Any
    strategy on any number of ranks, one process too, reads whole arrays.

    Parameters
    ----------
    directory, keep, facts
        As of nn.Checkpoints.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> import tempfile
    >>> directory = communicator.bcast(tempfile.mkdtemp() if communicator.rank == 0 else None)
    >>> checkpoints = parallel.ShardedCheckpoints(directory)
    >>> trainer = parallel.ZeRO1(network, loss, optimizer, communicator)
    >>> keep = nn.KeepCheckpoints(checkpoints, best=None)
    >>> training = nn.fit(trainer, (x, y), 1, keep, batch=4)
    >>> checkpoints.load()[1]["epoch"]
    1
    >>> trainer.close()
    """

    def open(self, entry: dict) -> LazyState:
        if "parts" not in entry:
            return super().open(entry)
        return JoinedFiles([self.directory / file for file, _ in files_of(entry)])

    def begin_parts(self, steps: int) -> int:
        """A number for the files of the next checkpoint, so that none takes the place of one that is listed.

        Files that a run has left which was killed before it listed them are removed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        listed = {file for entry in self.entries() for file, _ in files_of(entry)}
        remove_temporary_files(self.directory)
        for left in self.directory.glob("*.part-*.npz"):
            if left.name not in listed:
                left.unlink(missing_ok=True)
        taken = {file.split(".")[1] for file in listed if file.startswith(f"step-{steps:08d}.") and ".part-" in file}
        return next(number for number in itertools.count(1) if str(number) not in taken)

    def write_part(
        self,
        steps: int,
        number: int,
        place: tuple[int, int],
        fragments: Iterable[Fragment],
        progress: dict | None = None,
    ) -> tuple[str, str]:
        """(file, sha256) of what one of several processes has of a checkpoint; it counts once it is listed.

        Parameters
        ----------
        steps : int
        number : int
            From `begin_parts`, which one process calls for all.
        place : (int, int)
            (index, count) of this process.
        fragments : Fragment, one after the other
        progress : dict or None
            As for `save`, of one of them.
        """
        file = f"step-{steps:08d}.{number}.part-{place[0]}-of-{place[1]}.npz"
        with replacing(self.directory / file) as out:
            write_npz(out, chain([] if progress is None else [progress_entry(progress)], with_places(fragments)))
            return file, out.sha256.hexdigest()

    def list_parts(self, steps: int, parts: Sequence[tuple[str, str]], names: Sequence[str | None] = (None,)) -> None:
        """Make a checkpoint of files that are all there: one process does, when all have written theirs.

        Parameters
        ----------
        steps : int
        parts : (file, sha256) of each
        names : as for `save`, of one or more: the same files may be the best ones, too
        """
        entries, replaced = self.entries(), []
        for name in names:
            file = f"{name or f'step-{steps:08d}'}.npz"  # there is none of this name
            replaced += [entry for entry in entries if entry["file"] == file]
            files = [{"file": part, "sha256": sha256} for part, sha256 in parts]
            entries = [entry for entry in entries if entry["file"] != file]
            entries.append({"file": file, "parts": files, "named": name is not None})
        self.list_entries(entries, *replaced)
