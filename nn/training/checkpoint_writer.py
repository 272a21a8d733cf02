"""The writer of a trainer's checkpoints: at once, or on a thread, which writes a copy of the state of that moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.training.checkpoints import Checkpoints

if TYPE_CHECKING:
    from concurrent.futures import Future  # brings logging with it, which training has no use for


def start_write(work: Callable[[], Any], background: bool) -> Future:
    """Call `work`, at once or on a thread; the future has its result or its error.

    No executor: at once is on this thread, and a thread that hangs in a file system must not keep the process alive.
    """
    from concurrent.futures import Future

    future: Future = Future()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is: who waits for it hears of it
            future.set_exception(error)

    if background:
        threading.Thread(target=call, name="checkpoint", daemon=True).start()
    else:
        call()
    return future


class CheckpointWriter:
    """Writes the state of a trainer, as `Trainer.checkpoint_writer` makes it; trainers with other state have their own.

    Parameters
    ----------
    trainer : Trainer
    checkpoints : Checkpoints
    background : bool
        Whether a thread writes a copy of the state, while training goes on.
    """

    def __init__(self, trainer: Any, checkpoints: Checkpoints, background: bool = False):
        self.trainer, self.checkpoints, self.background = trainer, checkpoints, background
        self.writing: Future | None = None

    def save(self, progress: dict, names: Sequence[str | None] = (None,)) -> None:
        """Begin to write a checkpoint under these names, after the one before; without `background`, finish it.

        Raises
        ------
        OSError, CheckpointError, FloatingPointError
            It cannot be written, or a parameter is not finite; on a thread: the one before.
        """
        self.finish()
        copied = [(name, array.copy()) for name, array in self.trainer.state_items()] if self.background else None

        def work() -> None:
            for name in names:
                self.checkpoints.save(finite(copied or self.trainer.state_items()), progress, name)

        self.writing = start_write(work, self.background)
        if not self.background:
            self.finish()

    def finish(self) -> None:
        """Return when all that was to be written is; raise what went wrong."""
        self.wait()  # first: an interrupted wait must not forget the write
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def wait(self) -> None:
        """Return when this process writes no more."""
        if self.writing:
            self.writing.exception()  # waits; raises nothing

    def poll(self, termination_requested: bool | None, saved: bool) -> bool:
        """Raise what went wrong on the thread; return whether to save and end. Called after every step.

        Parameters
        ----------
        termination_requested : bool or None
            Whether this process was asked to end; None where that cannot be asked for.
        saved : bool
            Whether a checkpoint was begun after this step.
        """
        if self.writing and self.writing.done():
            self.finish()
        return bool(termination_requested)


def check_finite(name: str, array: np.ndarray) -> None:
    """Refuse a parameter that is not finite: no run could continue from it, and the checkpoint before is to stay."""
    if name.startswith("param/") and not np.isfinite(array).all():
        raise FloatingPointError(
            f"parameter {name.removeprefix('param/')} is not finite, so it is not saved; what was saved before is kept"
        )


def finite(state: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the same (name, array) pairs; refuse a parameter that is not finite."""
    for name, array in state:
        check_finite(name, array)
        yield name, array
