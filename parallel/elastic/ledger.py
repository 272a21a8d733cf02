"""Which samples every member has trained when: a ledger from which it is checked that each was trained exactly once.

A member writes a line before it trains its part of a batch, to a file of its own, where it stays when the member is
killed. Whether a step counts is known when the next members begin: they say from which batch. So a line counts if no
later generation has begun at or before its batch. At the end of an epoch the first rank reads all files, and every
place in the epoch's order must be in exactly one line that counts.

A line costs 2 us. The file of an epoch goes when the one after it was checked, the last ones with the end of the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nn.data.loader import Loader
from nn.training.fit import Callback

Place = tuple[int, int]  # epoch, batch
LINE = np.dtype([(name, np.int64) for name in ("generation", "epoch", "batch", "first", "last")])


class LedgerError(RuntimeError):
    """Samples were not trained, or more than once; the message says which."""


class Ledger(Callback):
    """The ledger of one member, and the check of all.

    Parameters
    ----------
    directory : Path
        Where the files of all members are.
    number : int
        Of this member.

    Attributes
    ----------
    begun : list of (epoch, batch)
        Where each generation has begun; of those that this member was not there for, too.
    epochs, samples : int
        Of which it was checked.
    """

    def __init__(self, directory: Path, number: int):
        self.directory, self.number = Path(directory), number
        self.file, self.epoch = -1, -1  # that is written to, and the epoch that it is for
        self.begun: list[Place] = []
        self.epochs = self.samples = 0

    def begin(self, begun: list[Place]) -> None:
        """A generation begins at the last of these places; those before it at the others."""
        self.begun = list(begun)
        self.directory.mkdir(parents=True, exist_ok=True)

    def loader(self, loader: Loader) -> Noted:
        """A loader whose batches are written down."""
        return Noted(loader, self)

    def note(self, epoch: int, batch: int, first: int, last: int) -> None:
        """This member is about to train that slice of the epoch's order."""
        if epoch != self.epoch:
            self._open(epoch)
        os.write(self.file, np.array((len(self.begun) - 1, epoch, batch, first, last), LINE).tobytes())

    def _open(self, epoch: int) -> None:
        if self.file >= 0:
            os.close(self.file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.file, self.epoch = os.open(self.directory / f"{epoch}-{self.number}.bin", flags, 0o666), epoch

    def on_epoch(self, training, record):
        trainer, problem = training.trainer, ""
        if trainer.writer:
            problem = self.check(record["epoch"] - 1, training.train.batch, len(training.train.dataset))
        if trainer.sum(np.array([bool(problem)]))[0]:  # all ranks end alike
            raise LedgerError(problem or "the ledger of the first rank is wrong")
        self.epochs += 1

    def check(self, epoch: int, batch: int, samples: int) -> str:
        """What is wrong with an epoch of so many samples, in batches of `batch`; '' if nothing."""
        steps = np.zeros(samples + 1, int)  # +1 where a slice begins, -1 where it ends
        for path in self.directory.glob(f"{epoch}-*.bin"):
            content = path.read_bytes()
            lines = np.frombuffer(content[: len(content) // LINE.itemsize * LINE.itemsize], LINE)
            lines = lines[lines["batch"] < self._ends(epoch)[lines["generation"]]]
            np.add.at(steps, lines["first"], 1)
            np.add.at(steps, lines["last"], -1)
        trained = np.cumsum(steps[:-1])
        start = min((place[1] for place in self.begun if place[0] == epoch), default=0)
        start = 0 if self.begun[0] < (epoch, 0) else start
        wrong = np.flatnonzero(trained[start * batch :] != 1) + start * batch
        if len(wrong):
            said = ", ".join(f"{place} ({trained[place]} times)" for place in wrong[:5])
            return f"epoch {epoch + 1}: {len(wrong)} samples were not trained exactly once: in its order {said}"
        self.samples += samples - start * batch
        for path in self.directory.glob("*.bin"):
            if int(path.name.partition("-")[0]) < epoch:
                path.unlink(missing_ok=True)
        return ""

    def _ends(self, epoch: int) -> np.ndarray:
        """Before which batch of an epoch lines count, of every generation."""
        first, ends = (epoch + 1, 0), []
        for place in reversed([*self.begun[1:], first]):
            first = min(first, place)
            ends.append(first[1] if first[0] == epoch else np.iinfo(np.int64).max if first[0] > epoch else 0)
        return np.array(ends[::-1])

    def close(self) -> None:
        """The run has ended well: no file is needed any more."""
        if self.file >= 0:
            os.close(self.file)
            self.file = self.epoch = -1
        shutil.rmtree(self.directory, ignore_errors=True)


class Noted:
    """A loader whose batches are written in a ledger as they are handed out."""

    def __init__(self, loader: Loader, ledger: Ledger):
        self._loader, self._ledger = loader, ledger

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """As `Loader.epoch`."""
        places = self._loader.places(start_step)
        batches = self._loader.epoch(epoch, start_step)
        for batch, (first, last, _) in enumerate(places, start_step):
            x, y, total = next(batches)
            self._ledger.note(epoch, batch, first, first + len(x))
            yield x, y, total
