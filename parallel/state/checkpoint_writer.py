"""The writer of checkpoints of a trainer on ranks: one rank writes gathered arrays, or each rank its own.

Threads write files, and nothing else. Ranks synchronize on the main thread, at steps that all know (`poll`, `finish`):
so all hear of an error on one of them, and all end after the same step.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from nn.reading import read_text
from nn.training.checkpoint_writer import CheckpointWriter, check_finite, finite, start_write
from nn.training.checkpoints import CheckpointError, Checkpoints, write_atomically
from parallel.state.fragments import Fragment
from parallel.state.sharded_checkpoints import ShardedCheckpoints

INTERVAL = 0.1  # seconds between two calls in which ranks synchronize, roughly
LINE_BYTES = 600  # of a message that a rank has for all others
WHOLE, PARTS, LIST = "whole", "parts", "list"  # what is being written


class RanksCheckpointWriter(CheckpointWriter):
    """Writes the state of a trainer on ranks (every rank calls every method, in the same order).

    Where the state lies on several ranks and `checkpoints` are ShardedCheckpoints in a directory that all ranks see,
    each writes what it has, and nothing is gathered; else the first rank writes all. A thread writes where each rank
    has memory for a copy of what it writes: not of what is gathered, and not of what lies in files already (--offload).

    Parameters
    ----------
    trainer : DistributedTrainer
    checkpoints, background
        As of CheckpointWriter.

    Raises
    ------
    OSError, CheckpointError, FloatingPointError
        On all ranks, where one cannot write, or has parameters that are not finite: there with the reason, elsewhere
        with its rank and its message.
    """

    def __init__(self, trainer, checkpoints: Checkpoints, background: bool = False):
        super().__init__(trainer, checkpoints, background)
        self.stage: str | None = None  # what all ranks are writing; `writing`: what this one is
        self.steps, self.names = 0, ()  # of the checkpoint that is being written
        self.one_directory: bool | None = None  # whether all ranks see the same; None: not asked yet
        self.since, self.last = time.perf_counter(), trainer.steps  # of the last synchronization
        self.next = trainer.steps + 1

    def save(self, progress: dict, names: Sequence[str | None] = (None,)) -> None:
        sys.audit("ringprop.save", self.trainer)
        self.finish()  # the one before
        trainer = self.trainer
        self.steps, self.names = trainer.steps, tuple(names)
        sharded = trainer.scattered and isinstance(self.checkpoints, ShardedCheckpoints)
        if sharded and self._all_see_one_directory():
            self._save_parts(progress)
        else:
            self._save_whole(progress)
        if not self.background:
            self.finish()

    def finish(self) -> None:
        while self.stage:
            self.wait()
            self._synchronize()

    def poll(self, termination_requested: bool | None, saved: bool) -> bool:
        """Decide as CheckpointWriter does, on all ranks together, some INTERVAL seconds apart, not after every step.

        Ranks of a local-update strategy decide when a checkpoint starts, and only then.
        """
        trainer = self.trainer
        if not self.background and termination_requested is None:
            return False
        if not saved and (trainer.local_update or trainer.steps < self.next):
            return False
        now, made = time.perf_counter(), max(1, trainer.steps - self.last)
        ends, seconds = self._synchronize(bool(termination_requested), now - self.since)
        pace = max(seconds / (_size(trainer) * made), 1e-9)
        self.since, self.last = now, trainer.steps
        self.next = trainer.steps + max(1, min(2 * made, int(INTERVAL / pace)))
        return ends

    def _synchronize(self, asked: bool = False, seconds: float = 0.0) -> tuple[bool, float]:
        """Go on where all ranks are done with a stage; return (whether one was asked to end, the sum of seconds)."""
        mine = self.writing
        busy = bool(mine) and not mine.done()
        failed = bool(mine) and not busy and mine.exception() is not None
        sums = self.trainer.sum(np.array([asked, busy, failed, seconds], np.float64))
        if self.stage and not sums[1]:
            if sums[2]:
                self._fail(mine.exception() if mine else None)
            self._next_stage()
        return bool(sums[0]), float(sums[3])

    def _next_stage(self) -> None:
        """All files are written: list them in the manifest, where that is still to do."""
        trainer, mine, stage = self.trainer, self.writing, self.stage
        self.stage = self.writing = None
        if stage == PARTS:
            lines = _all_lines(trainer, " ".join(mine.result()) if mine else "")
            self.stage = LIST
            if trainer.is_writer:
                parts = [tuple(line.split(" ")) for line in lines if line]
                work = lambda steps=self.steps, names=self.names: self.checkpoints.list_parts(steps, parts, names)
                self.writing = start_write(work, self.background)

    def _fail(self, error: BaseException | None) -> None:
        """Raise on all ranks: none waits for one that has given up."""
        self.stage = self.writing = None
        lines = _all_lines(self.trainer, (str(error) or type(error).__name__) if error else "")
        if error:
            raise error
        rank, line = next((rank, line) for rank, line in enumerate(lines) if line)
        raise OSError(f"rank {rank} could not write a checkpoint: {line}")

    def _save_whole(self, progress: dict) -> None:
        """The first rank writes all of it."""
        trainer, save, self.stage = self.trainer, self.checkpoints.save, WHOLE
        if self.background and not trainer.scattered and not trainer.on_disk:
            state = [(name, array.copy() if trainer.is_writer else array) for name, array in trainer.state_items()]
            if trainer.is_writer:
                work = lambda names=self.names: [save(finite(state), progress, name) for name in names]
                self.writing = start_write(work, True)
            return
        for name in self.names:
            entries = trainer.state_items()
            if trainer.is_writer and not (self.writing and self.writing.exception()):
                self.writing = start_write(lambda state=entries, name=name: save(finite(state), progress, name), False)
            for _ in entries:  # take part to the end: sharded strategies gather here
                pass

    def _save_parts(self, progress: dict) -> None:
        """Each rank writes what it has."""
        trainer, steps, number, error = self.trainer, self.steps, 0, None
        if trainer.is_writer:
            try:
                number = self.checkpoints.begin_parts(steps)
            except (OSError, CheckpointError) as problem:
                error = problem
        failed, number = trainer.sum(np.array([error is not None, number], np.float64))
        if failed:
            self._fail(error)
        self.stage, background = PARTS, self.background and not trainer.on_disk
        fragments = trainer.fragments()
        if background:
            fragments = iter([replace(fragment, array=fragment.array.copy()) for fragment in fragments])
        first = next(fragments, None)
        if first is None:  # other ranks have all that this one has
            return
        place = trainer.communicator.rank, trainer.communicator.size

        def work():
            mine = finite_fragments(each for some in ([first], fragments) for each in some)
            return self.checkpoints.write_part(steps, int(number), place, mine, progress if trainer.is_writer else None)

        self.writing = start_write(work, background)
        if not background:
            for _ in fragments:  # after an error: other ranks may wait for this one in a collective call
                pass

    def _all_see_one_directory(self) -> bool:
        """Whether a file that the first rank writes is there for all; else all is gathered there (collective)."""
        if self.one_directory is None:
            trainer, file = self.trainer, self.checkpoints.directory / ".shared.tmp"
            token = random.SystemRandom().getrandbits(48) if trainer.is_writer else 0
            if trainer.is_writer:
                with suppress(OSError):  # a directory that cannot be written: said when that is tried
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(file, str(token).encode())
            token = int(trainer.sum(np.array([token], np.float64))[0])
            try:
                sees = read_text(file, 100) == str(token) and os.access(file.parent, os.W_OK)
            except (OSError, ValueError):
                sees = False
            self.one_directory = not trainer.sum(np.array([not sees], np.float64))[0]
            if trainer.is_writer:
                with suppress(OSError):  # raised here alone it would leave the other ranks waiting
                    file.unlink()
                if not self.one_directory:
                    trainer.say(
                        f"not all ranks see {file.parent}: checkpoints are gathered on the first one, and not written "
                        "by each"
                    )
        return self.one_directory


def finite_fragments(fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """Yield the same fragments; refuse one of a parameter that is not finite."""
    for fragment in fragments:
        check_finite(fragment.name, fragment.array)
        yield fragment


def _size(trainer) -> int:
    return trainer.communicator.size if trainer.communicator else 1


def _all_lines(trainer, line: str) -> list[str]:
    """The lines of all ranks, each cut to LINE_BYTES (collective)."""
    rank = trainer.communicator.rank if trainer.communicator else 0
    lines = np.zeros((_size(trainer), LINE_BYTES))
    mine = np.frombuffer(" ".join(line.split()).encode()[:LINE_BYTES], np.uint8)
    lines[rank, : len(mine)] = mine
    sums = trainer.sum(lines.reshape(-1)).reshape(lines.shape).astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in sums]
