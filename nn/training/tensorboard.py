"""The callback that lets TensorBoard watch a training."""

from __future__ import annotations

import math
import os
import time

from nn.arguments import SIZE
from nn.training.event_file import EventFile
from nn.training.training import Callback


class TensorBoard(Callback):
    """Write event files for TensorBoard: the numbers of every epoch, loss and learning rate of steps.

    `epoch/NAME` is what an epoch's record has (loss, validation_loss, images_per_second, ...), `step/loss` the mean of
    the last `every` steps, `step/lr` the rate of the last of them. Only the process that writes does so. A training
    that continues has a file of its own; TensorBoard drops steps that an earlier file has and this one computes again.

    Parameters
    ----------
    directory : path
        That of this run; `tensorboard --logdir` takes it, or the directory above it for several runs.
    every : int
        Steps between two values of `step/loss`.

    Raises
    ------
    OSError
        The directory cannot be made, or written, as training begins.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np, nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 1), (3,)), nn.MSELoss(), nn.SGD(0.1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     board = nn.callbacks.TensorBoard(directory)
    ...     training = nn.fit(trainer, (np.ones((8, 3)), np.ones((8, 1))), 2, board, batch=4)
    ...     len(list(pathlib.Path(directory).glob("events.out.tfevents.*")))
    1
    """

    PAUSE = 5.0  # seconds between two writes within an epoch

    def __init__(self, directory: str | os.PathLike, every: int = 10):
        self.directory, self.every = directory, SIZE("TensorBoard: every", every)
        self.file: EventFile | None = None

    def on_begin(self, training):
        if training.trainer.is_writer:
            before = bool(training.history or training.batch)
            self.file = EventFile(self.directory, training.trainer.steps + 1 if before else None)
        self.written = time.monotonic()
        self._mark(training)

    def _mark(self, training) -> None:
        self.loss_sum, self.weight = training.loss_sum, training.weight

    def on_step(self, training, loss):
        if self.file is None or training.batch % self.every:
            return
        weight, rate = training.weight - self.weight, float(training.trainer.optimizer.lr)
        mean = (training.loss_sum - self.loss_sum) / weight if weight else math.nan
        self.file.add(training.trainer.steps, {"step/loss": mean, "step/lr": rate})
        self._mark(training)
        if time.monotonic() - self.written > self.PAUSE:
            self._flush()

    def on_epoch(self, training, record):
        if self.file is None:
            return
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        step = numbers.pop("step")
        self.file.add(step, {f"epoch/{name}": value for name, value in numbers.items() if name != "epoch"})
        self._mark(training)
        self._flush()

    def _flush(self) -> None:
        self.file.flush()
        self.written = time.monotonic()

    def on_end(self, training):
        if self.file is not None:
            self._flush()
            self.file = None

    on_abort = on_end
