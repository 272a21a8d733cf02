"""What to do while `fit` trains: say how it goes, write it down, keep checkpoints, stop in time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from nn.checkpoints import Checkpoints, write_atomically
from nn.training import Callback, Training


class Progress(Callback):
    """Whole lines from rank 0: epoch, loss, accuracy, images/s, time left; in an epoch one every `every` seconds."""

    def __init__(self, every: float = 5.0, say=None):
        self.every = every
        self.say = say or (lambda line: print(line, flush=True))

    def on_begin(self, training):
        self.quiet = training.trainer.shard[0] != 0
        self.started = self.last = time.perf_counter()
        self.images = 0
        self.done_before = self._done(training)

    def on_step(self, training, loss):
        now = time.perf_counter()
        self.images += getattr(training.train, "batch", 1)
        if self.quiet or now - self.last < self.every:
            return
        self.last = now
        mean = training.loss_sum / max(1, training.samples)
        self.say(
            f"epoch {training.epoch + 1}/{training.epochs}  step {training.batch}/{len(training.train)}  "
            f"loss {mean:.4f}  {self.images / (now - self.started):,.0f} images/s  {self._left(training)} left"
        )

    def on_epoch(self, training, record):
        if self.quiet:
            return
        self.last = time.perf_counter()
        test = f"test loss {record['test_loss']:.4f}  " if "test_loss" in record else ""
        test += f"accuracy {record['accuracy']:7.2%}  " if "accuracy" in record else ""
        self.say(
            f"epoch {record['epoch']}/{training.epochs}  loss {record['loss']:.4f}  {test}"
            f"{record['images_per_second']:,.0f} images/s  {self._left(training)} left"
        )

    def _done(self, training: Training) -> float:
        return training.epoch + training.batch / max(1, len(training.train))

    def _left(self, training: Training) -> str:
        done = self._done(training)
        spent = time.perf_counter() - self.started
        left = spent * (training.epochs - done) / max(1e-9, done - self.done_before)
        return f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"


class Metrics(Callback):
    """metrics.jsonl: one object a line and epoch. A resumed run drops the lines that its checkpoint does not know."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_begin(self, training):
        if training.trainer.shard[0] == 0:
            lines = "".join(json.dumps(record) + "\n" for record in training.history)
            write_atomically(self.path, lines.encode())

    def on_epoch(self, training, record):
        self.on_begin(training)  # written whole each time: a full disk leaves no half line


class KeepCheckpoints(Callback):
    """Save after every epoch, and the best epoch's once more as "best".

    Parameters
    ----------
    checkpoints : Checkpoints
    steps : int or None
        Also save every so many steps within an epoch.
    best : str or None
        The record's entry that decides, "accuracy" (larger is better) or "test_loss" (smaller is better).
    """

    def __init__(self, checkpoints: Checkpoints, steps: int | None = None, best: str | None = "accuracy"):
        self.checkpoints, self.steps, self.best = checkpoints, steps, best

    def on_step(self, training, loss):
        if self.steps and training.trainer.steps % self.steps == 0:
            self._save(training)

    def on_epoch(self, training, record):
        self._save(training)
        if self.best in record and best_epoch(training.history, self.best) == len(training.history) - 1:
            self._save(training, "best")

    def _save(self, training: Training, name: str | None = None) -> None:
        entries = training.trainer.entries()
        if training.trainer.shard[0] == 0:
            self.checkpoints.save(entries, training.progress(), name)
        else:  # take part: sharded strategies gather here
            for _ in entries:
                pass


class EarlyStopping(Callback):
    """Stop when `metric` has not improved for `patience` epochs, and put the best epoch's weights back.

    Parameters
    ----------
    patience : int
    metric : str
        "accuracy" (larger is better) or "test_loss" (smaller is better).
    checkpoints : Checkpoints or None
        Where `KeepCheckpoints` keeps "best": needed where a resumed run's best epoch was before the stop.
    """

    def __init__(self, patience: int, metric: str = "accuracy", checkpoints: Checkpoints | None = None):
        if patience < 1:
            raise ValueError(f"EarlyStopping: patience must be at least 1, given {patience}")
        self.patience, self.metric, self.checkpoints = patience, metric, checkpoints
        self.best: dict[str, np.ndarray] | None = None

    def on_epoch(self, training, record):
        if self.metric not in record:
            raise ValueError(
                f"EarlyStopping: {self.metric!r} is not in the record ({', '.join(record)}): no test data?"
            )
        best = best_epoch(training.history, self.metric)
        if best == len(training.history) - 1:
            self.best = training.trainer.snapshot()
        training.stop = len(training.history) - 1 - best >= self.patience

    def on_end(self, training):
        if not training.history:
            return
        if self.best is not None:
            training.trainer.restore(self.best)
        elif self.checkpoints:
            training.trainer.load_state(self.checkpoints.load("best")[0])


def best_epoch(history: list[dict], metric: str) -> int:
    """Index of the first record with the best value of `metric`; losses want to be small, all else large."""
    values = [record[metric] for record in history]
    return values.index(min(values) if metric.endswith("loss") else max(values))
