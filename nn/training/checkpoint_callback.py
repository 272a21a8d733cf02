"""Checkpoints while training goes on.

A save is a copy of the state, made between two steps, and a thread that writes it while the next ones compute. Where
the state lies on several ranks each writes its own part, and nothing is gathered: `Checkpoints` lists a checkpoint when
all its parts are there. Threads write files, and nothing else; ranks meet on the main thread, at steps that all know:
about every EVERY seconds they tell each other whether their threads are done, or have failed, and whether somebody was
asked to end. So all hear of an error alike, and all end with the same checkpoint.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from nn.reading import read_text
from nn.training.callbacks import BestEpoch
from nn.training.checkpoints import CheckpointError, Checkpoints, check_checkpoints, write_atomically
from nn.training.stored import Fragment
from nn.training.trainer import Trainer
from nn.training.training import Callback

EVERY = 0.1  # seconds between two meetings of ranks, roughly: of so many steps as that takes
ROOM = 600  # bytes of a line that ranks tell each other
WHOLE, PARTS, LIST = "whole", "parts", "list"  # what is being written


class Terminated(RuntimeError):
    """Training was asked to end, by SIGTERM: it has, and what it has learned is saved."""


class Termination:
    """A wish to end: while it is watched for, SIGTERM, or SIGHUP of a terminal that is closed, sets `asked`.

    A second one does what one does elsewhere. SIGHUP is left alone where it is ignored, as by nohup.
    """

    def __init__(self):
        self.asked, self._before = False, {}

    def __enter__(self) -> Termination:
        return self

    def __exit__(self, *exception) -> None:
        self.over()

    def watch(self) -> None:
        """From now on they are a wish; only the main thread of a process can ask for this."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            for number in (signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask) or signal.SIG_DFL

    def over(self) -> None:
        """It is what it was before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number, frame) -> None:
        if self.asked:
            self.over()
            signal.raise_signal(number)
        self.asked = True


class Writing:
    """A function that is called, by a thread or at once; its result, or its error."""

    def __init__(self, work: Callable, background: bool):
        self.result = self.error = self._thread = None
        if background:
            self._thread = threading.Thread(target=self._do, args=(work,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._do(work)

    def _do(self, work: Callable) -> None:
        try:
            self.result = work()
        except BaseException as error:  # whatever it is: all ranks hear of it
            self.error = error

    @property
    def busy(self) -> bool:
        """Whether it is not done yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when it is done."""
        if self._thread is not None:
            self._thread.join()


class KeepCheckpoints(Callback):
    """Save after every epoch, and the best epoch's once more as "best".

    Parameters
    ----------
    checkpoints : Checkpoints
    steps : int or None
        Also save every so many steps within an epoch.
    best : str or None
        The record's entry that decides, such as "validation_accuracy"; without validation data there is no best.
    mode : {"min", "max"} or None
        Whether smaller or larger is better; None: as the metric says (`nn.metrics.direction`).
    background : bool
        Whether a thread writes, while training goes on: the files are the same, and at the end of training, and before
        the next save, they are there. Not where the state is too large for memory, or for that of one rank.
    termination : Termination or None
        Where it is asked for, save and end. Ranks that train apart do where they meet: after an epoch, or `steps`.

    Raises
    ------
    OSError, CheckpointError, FloatingPointError
        On all ranks, where one cannot write, or has parameters that are not finite; there with the reason, elsewhere
        with its rank and what it says. Where a thread writes, after one of the next steps.
    Terminated
        On all ranks, after a checkpoint.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        steps: int | None = None,
        best: str | None = "validation_accuracy",
        background: bool = False,
        termination: Termination | None = None,
        mode: str | None = None,
    ):
        check_checkpoints("KeepCheckpoints", checkpoints)
        if not isinstance(steps, int | np.integer | None) or (steps or 0) < 0:
            raise ValueError(f"KeepCheckpoints: steps must be a number of steps, or None, given {steps!r:.80}")
        self.checkpoints, self.steps, self.background, self.termination = checkpoints, steps, background, termination
        self.best = None if best is None else BestEpoch("KeepCheckpoints", best, mode)
        self.stage = self.writing = None  # what all ranks are writing; this one
        self.shared: bool | None = None

    def on_begin(self, training):
        if self.best is not None:
            self.best.begin(training)
        self.training, self.since = training, time.perf_counter()
        self.met, self.next = training.trainer.steps, training.trainer.steps + 1  # steps at which ranks meet
        if self.termination:
            self.termination.watch()

    def on_step(self, training, loss):
        trainer = training.trainer
        if saves := bool(self.steps) and trainer.steps % self.steps == 0:
            self._save()
        if saves or (trainer.steps >= self.next and not trainer.apart):
            self._meet(saves)

    def on_epoch(self, training, record):
        measured = self.best is not None and self.best.metric in record
        is_best = measured and self.best.epoch(training) == training.epoch
        # The best first: a run killed after it makes this epoch again, and finds it the best.
        self._save(("best", None) if is_best else (None,))
        self._meet(True)

    def on_end(self, training):
        self.finish()
        self._meet(True)
        if self.termination:
            self.termination.over()

    def finish(self) -> None:
        """Return when all that was to be saved is (collective)."""
        while self.stage:
            self.wait()
            self._look()

    def wait(self) -> None:
        """Return when this process writes no more."""
        if self.writing:
            self.writing.wait()

    # ------------------------------------------------------------------------------------------------- where ranks meet

    def _meet(self, saved: bool) -> None:
        """Hear of errors and of wishes to end; decide when to meet next. `saved`: this step was, just now."""
        if not self.background and not self.termination:
            return
        trainer, now = self.training.trainer, time.perf_counter()
        made = max(1, trainer.steps - self.met)
        asked, seconds = self._look(now - self.since)
        pace = max(seconds / (_ranks(trainer) * made), 1e-9)
        self.since, self.met = now, trainer.steps
        self.next = trainer.steps + max(1, min(2 * made, int(EVERY / pace)))
        if asked:
            if not saved:
                self._save()
            self.finish()
            raise Terminated(f"ended by SIGTERM after step {trainer.steps}, which is saved")

    def _look(self, seconds: float = 0.0) -> tuple[bool, float]:
        """How far all ranks are; (whether one was asked to end, sum of the seconds)."""
        trainer, mine = self.training.trainer, self.writing
        busy = bool(mine) and mine.busy
        failed = bool(mine) and not busy and mine.error is not None
        asked = bool(self.termination) and self.termination.asked
        told = trainer.sum(np.array([asked, busy, failed, seconds], np.float64))
        if self.stage and not told[1]:
            if told[2]:
                self._fail(mine.error if mine else None)
            self._go_on()
        return bool(told[0]), float(told[3])

    def _go_on(self) -> None:
        """What was being written is: list it where that is still to do."""
        trainer, mine, stage = self.training.trainer, self.writing, self.stage
        self.stage = self.writing = None
        if stage == PARTS:
            told = _tell(trainer, " ".join(mine.result) if mine else "")
            self.stage = LIST
            if trainer.writer:
                parts = [tuple(line.split(" ")) for line in told if line]
                work = lambda steps=self.of, names=self.names: self.checkpoints.list_parts(steps, parts, names)
                self.writing = Writing(work, self.background)

    def _fail(self, error: BaseException | None) -> None:
        """All ranks end alike: none waits for one that has given up."""
        self.stage = self.writing = None
        told = _tell(self.training.trainer, (str(error) or type(error).__name__) if error else "")
        if error:
            raise error
        rank, said = next((rank, line) for rank, line in enumerate(told) if line)
        raise OSError(f"rank {rank} could not write a checkpoint: {said}")

    # ---------------------------------------------------------------------------------------------------------- saving

    def _save(self, names: Sequence[str | None] = (None,)) -> None:
        """Begin to save; without `background`, do."""
        self.training.meet()
        self.finish()  # the one before
        progress = copy.deepcopy(self.training.progress())
        trainer = self.training.trainer
        self.of, self.names = trainer.steps, tuple(names)
        if trainer.scattered and self._all_see_one_directory():
            self._save_parts(progress)
        else:
            self._save_whole(progress)
        if not self.background:
            self.finish()

    def _save_whole(self, progress: dict) -> None:
        """The first rank writes all of it."""
        trainer, save, self.stage = self.training.trainer, self.checkpoints.save, WHOLE
        if self.background and not trainer.scattered and not trainer.on_disk:
            state = [(name, array.copy() if trainer.writer else array) for name, array in trainer.entries()]
            if trainer.writer:
                work = lambda names=self.names: [save(finite(state), progress, name) for name in names]
                self.writing = Writing(work, True)
            return
        for name in self.names:
            entries = trainer.entries()
            if trainer.writer and not (self.writing and self.writing.error):
                self.writing = Writing(lambda state=entries, name=name: save(finite(state), progress, name), False)
            for _ in entries:  # take part to the end: sharded strategies gather here
                pass

    def _save_parts(self, progress: dict) -> None:
        """Each rank writes what it has."""
        trainer, steps, number, error = self.training.trainer, self.of, 0, None
        if trainer.writer:
            try:
                number = self.checkpoints.begin_parts(steps)
            except (OSError, CheckpointError) as found:
                error = found
        failed, number = trainer.sum(np.array([error is not None, number], np.float64))
        if failed:
            self._fail(error)
        self.stage, background = PARTS, self.background and not trainer.on_disk
        fragments = trainer.fragments()
        if background:
            fragments = iter([replace(each, array=each.array.copy()) for each in fragments])
        first = next(fragments, None)
        if first is None:  # all that this rank has others have, too
            return
        place = trainer.communicator.rank, trainer.communicator.size

        def work():
            mine = checked(each for some in ([first], fragments) for each in some)
            return self.checkpoints.write_part(steps, int(number), place, mine, progress if trainer.writer else None)

        self.writing = Writing(work, background)
        if not background:
            for _ in fragments:  # after an error: others may have to be met
                pass

    def _all_see_one_directory(self) -> bool:
        """Whether what the first rank writes is there for all; else all is gathered there (collective)."""
        if self.shared is None:
            trainer, file = self.training.trainer, self.checkpoints.directory / ".shared.tmp"
            token = random.SystemRandom().getrandbits(48) if trainer.writer else 0
            if trainer.writer:
                with suppress(OSError):  # a directory that cannot be written: said when that is tried
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(file, str(token).encode())
            token = int(trainer.sum(np.array([token], np.float64))[0])
            try:
                sees = read_text(file, 100) == str(token) and os.access(file.parent, os.W_OK)
            except (OSError, ValueError):
                sees = False
            self.shared = not trainer.sum(np.array([not sees], np.float64))[0]
            if trainer.writer:
                file.unlink(missing_ok=True)
                if not self.shared:
                    trainer.say(
                        f"not all ranks see {file.parent}: checkpoints are gathered on the first one, and not written "
                        "by each"
                    )
        return self.shared


def check_finite(name: str, array: np.ndarray) -> None:
    """Refuse a parameter from which nobody could go on: the one that was saved before is to stay."""
    if name.startswith("param/") and not np.isfinite(array).all():
        raise FloatingPointError(
            f"parameter {name.removeprefix('param/')} is not finite, so it is not saved; what was saved before is kept"
        )


def finite(state: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The same (name, array) pairs, with each parameter looked at."""
    for name, array in state:
        check_finite(name, array)
        yield name, array


def checked(fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """As `finite`, of fragments."""
    for each in fragments:
        check_finite(each.name, each.array)
        yield each


def _ranks(trainer: Trainer) -> int:
    return trainer.communicator.size if trainer.communicator else 1


def _tell(trainer: Trainer, line: str) -> list[str]:
    """What every rank has to say, in ROOM bytes (collective)."""
    rank = trainer.communicator.rank if trainer.communicator else 0
    lines = np.zeros((_ranks(trainer), ROOM))
    mine = np.frombuffer(" ".join(line.split()).encode()[:ROOM], np.uint8)
    lines[rank, : len(mine)] = mine
    told = trainer.sum(lines.reshape(-1)).reshape(lines.shape).astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in told]
