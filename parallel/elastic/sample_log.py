"""Sample log: the samples that every member has trained, to check that each was trained exactly once.

A member writes a line before it trains its part of a batch, to a file of its own, where it stays when the member is
killed. Whether a step counts is known when the next members begin: the state that they have says after how many steps.
So a line counts if no later generation has begun at its step or before. At the end of an epoch the first rank reads all
files, and every place in the epoch's order must be in exactly one line that counts.

A line costs 2 us. The file of an epoch goes when the one after it was checked, the last ones with the end of the run.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nn.data.loader import Loader
from nn.reading import read_bytes
from nn.training.fit import Callback
from nn.training.trainer import Trainer
from parallel.axis import SHARE_BATCH

Place = tuple[int, int]  # epoch, batch
LARGEST = 1 << 28  # bytes of a file: eight million lines
LINE = np.dtype([(name, np.int64) for name in ("generation", "step", "first", "last")])


class SampleLogError(RuntimeError):
    """Samples were not trained, or more than once; the message says which."""


class SampleLog(Callback):
    """The sample log of one member, and the check of all.

    Parameters
    ----------
    directory : Path
        Where the files of all members are.
    number : int
        Of this member.

    Attributes
    ----------
    begun : list of int
        After how many steps each generation has begun; of those that this member was not there for, too.
    start : (epoch, batch)
        Where the first one has.
    again : (epoch, batch)
        To where the last one that went back into an epoch that was checked already has: what is before it was found
        right, and its lines may have gone.
    checked : dict
        Epoch -> samples, of which it was checked.
    """

    def __init__(self, directory: Path, number: int):
        self.directory, self.number = Path(directory), number
        self.file, self.epoch = -1, -1  # that is written to, and the epoch that it is for
        self.begun: list[int] = []
        self.start: Place = (0, 0)
        self.again: Place = (-1, 0)
        self.checked: dict[int, int] = {}

    def begin_generation(self, step: int, place: Place, others: Iterable[tuple] = ()) -> None:
        """Start a generation after a number of steps, at this place; `others` is `known` of all members."""
        for begun, start, again, checked in others:
            if len(begun) > len(self.begun):
                self.begun, self.start, self.again = begun, start, again
            self.checked |= checked
        self.start = self.start if self.begun else place
        epoch, batch = place
        if epoch == self.again[0]:
            self.again = epoch, min(batch, self.again[1])
        elif epoch + 1 in self.checked:
            self.again = place
        self.checked = {number: samples for number, samples in self.checked.items() if number <= epoch}
        self.begun = [*self.begun, step]
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def known(self) -> tuple[list[int], Place, Place, dict[int, int]]:
        """Return what another member may not know."""
        return self.begun, self.start, self.again, self.checked

    def loader(self, loader: Loader, trainer: Trainer) -> LoggedLoader:
        """Return a loader that logs its batches as what the trainer's next step trains."""
        return LoggedLoader(loader, self, trainer)

    def log_slice(self, epoch: int, step: int, first: int, last: int) -> None:
        """Log that this member is about to train a slice of the epoch's order.

        Raises
        ------
        OSError
            With the file in the message.
        """
        line = np.array((len(self.begun) - 1, step, first, last), LINE).tobytes()
        path = self.directory / f"{epoch}-{self.number}.bin"
        try:
            if epoch != self.epoch:
                self._open(epoch, path)
            if os.write(self.file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise type(error)(error.errno, f"cannot write to {path} ({error.strerror})") from error

    def _open(self, epoch: int, path: Path) -> None:
        if self.file >= 0:
            os.close(self.file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.file, self.epoch = os.open(path, flags, 0o666), epoch

    def on_epoch(self, training, record):
        trainer, found, problem = training.trainer, 0, ""
        if trainer.is_writer:
            try:
                found = self.check(record["epoch"] - 1, training.train.batch, len(training.train.dataset))
            except SampleLogError as error:
                problem = str(error)
        wrong, samples = trainer.sum(np.array([bool(problem), found]))
        if wrong:  # all ranks end alike
            raise SampleLogError(problem or "the sample log of the first rank is wrong")
        self.checked[record["epoch"]] = int(samples)

    def check(self, epoch: int, batch: int, samples: int) -> int:
        """Return how many of an epoch's `samples`, in batches of `batch`, were trained since the run was started.

        Raises
        ------
        SampleLogError
            Some were not trained, or more than once.
        """
        steps = np.zeros(samples + 1, int)  # +1 where a slice begins, -1 where it ends
        for path in self.directory.glob(f"{epoch}-*.bin"):
            content = read_bytes(path, LARGEST)
            lines = np.frombuffer(content[: len(content) // LINE.itemsize * LINE.itemsize], LINE)
            lines = lines[lines["step"] < self._ends()[lines["generation"]]]
            np.add.at(steps, lines["first"], 1)
            np.add.at(steps, lines["last"], -1)
        trained = np.cumsum(steps[:-1])
        start = self.start[1] if self.start[0] == epoch else 0
        known = max(start, self.again[1] if self.again[0] == epoch else 0)
        wrong = np.flatnonzero(trained[known * batch :] != 1) + known * batch
        if len(wrong):
            said = ", ".join(f"{place} ({trained[place]} times)" for place in wrong[:5])
            raise SampleLogError(
                f"epoch {epoch + 1}: {len(wrong)} samples were not trained exactly once: in its order {said}"
            )
        for path in self.directory.glob("*.bin"):
            if int(path.name.partition("-")[0]) < epoch:
                path.unlink(missing_ok=True)
        return samples - start * batch

    def _ends(self) -> np.ndarray:
        """Return for every generation the step before which its lines count."""
        later = [*self.begun[1:], np.iinfo(np.int64).max]
        return np.minimum.accumulate(later[::-1])[::-1]

    def close(self) -> None:
        """Remove the files: the run has succeeded."""
        if self.file >= 0:
            os.close(self.file)
            self.file = self.epoch = -1
        shutil.rmtree(self.directory, ignore_errors=True)


class LoggedLoader:
    """A loader that logs its batches as it returns them."""

    def __init__(self, loader: Loader, log: SampleLog, trainer: Trainer):
        self._loader, self._log, self._trainer = loader, log, trainer
        # Of ranks that compute the same samples together the first writes.
        self._writes = not any(place for axis, place in trainer.mesh.places.items() if axis not in SHARE_BATCH)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield the batches of an epoch, as `Loader.epoch`, and log them."""
        places = self._loader.step_slices(start_step)
        for (first, _, _), (x, y, total) in zip(places, self._loader.epoch(epoch, start_step), strict=True):
            if self._writes:
                self._log.log_slice(epoch, self._trainer.steps, first, first + len(x))
            yield x, y, total
