"""Callbacks of `fit`: print progress, write metrics, stop early, restore the best epoch."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nn.arguments import SIZE
from nn.core.containers import Wrapper
from nn.guesses import nearest
from nn.layers.experts import MixtureOfExperts
from nn.metrics import check_mode
from nn.training.checkpoints import CheckpointError, Checkpoints, check_checkpoints, json_text, write_atomically
from nn.training.training import Callback, Training


def is_interactive() -> bool:
    """Return whether a person sees what is printed: in a terminal or a notebook."""
    stream = sys.stdout  # None without a console; closed, or without isatty, where others have replaced it
    kernel = sys.modules.get("ipykernel.iostream")  # there only where a notebook's kernel runs
    if kernel is not None and isinstance(stream, kernel.OutStream):
        return True
    return hasattr(stream, "isatty") and not getattr(stream, "closed", False) and stream.isatty()


class Progress(Callback):
    """Print lines, in the process that writes: epoch, loss, accuracy, samples/s, time left.

    Parameters
    ----------
    every : float
        Seconds between lines within an epoch.
    say : callable or None
        Called with each line; None prints it.
    every_epoch : float
        Seconds between lines at the ends of epochs, at least. The last epoch always has one.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> training = nn.fit(trainer, (x, y), 1, nn.Progress(say=lambda line: print(line[:9])))
    epoch 1/1
    """

    def __init__(self, every: float = 5.0, say=None, every_epoch: float = 0.0):
        self.every, self.every_epoch = every, every_epoch
        self.say = say or (lambda line: print(line, flush=True))

    def on_begin(self, training):
        self.quiet = not training.trainer.is_writer
        self.started = self.last = time.perf_counter()
        self.count, self.samples = 0, training.samples
        self.unit = "images" if len(training.trainer.network.in_shape) == 3 else "samples"
        self.steps = f"/{training.epoch_steps}" * (training.epoch_steps > 0)
        self.done_before, self.shown = self._done(training), training.epoch

    def on_step(self, training, loss):
        now = time.perf_counter()
        self.count += training.samples - self.samples if training.batch > 1 else training.samples
        self.samples = training.samples
        if self.quiet or now - self.last < self.every:
            return
        self.last = now
        mean = training.loss_sum / (training.weight or 1)
        self.say(
            f"epoch {training.epoch + 1}/{training.epochs}  step {training.batch}{self.steps}  "
            f"loss {mean:.4f}  {self.count / (now - self.started):,.0f} {self.unit}/s{self._time_left(training)}"
        )

    def on_epoch(self, training, record):
        if self.quiet:
            return
        now = time.perf_counter()
        if now - self.last < self.every_epoch and training.epoch < training.epochs:
            return
        self._show_epoch(training, record)

    def on_end(self, training):
        if not self.quiet and training.history and self.shown < training.epoch:  # stopped before the last epoch
            self._show_epoch(training, training.history[-1])

    def _show_epoch(self, training: Training, record: dict) -> None:
        self.last, self.shown = time.perf_counter(), training.epoch
        scores = f"validation loss {record['validation_loss']:.4f}  " if "validation_loss" in record else ""
        scores += f"accuracy {record['validation_accuracy']:7.2%}  " if "validation_accuracy" in record else ""
        self.say(
            f"epoch {record['epoch']}/{training.epochs}  loss {record['loss']:.4f}  {scores}"
            f"{record['images_per_second']:,.0f} {self.unit}/s{self._time_left(training)}"
        )

    def _done(self, training: Training) -> float:
        return training.epoch + (training.batch / training.epoch_steps if training.epoch_steps else 0.0)

    def _time_left(self, training: Training) -> str:
        done = self._done(training)
        if done == self.done_before:  # resumed after an epoch's last step: the pace is not known yet
            return ""
        spent = time.perf_counter() - self.started
        remaining = spent * (training.epochs - done) / (done - self.done_before)
        return f"  {remaining:.0f} s left" if remaining < 120 else f"  {remaining / 60:.0f} min left"


class Metrics(Callback):
    """Write metrics.jsonl: a JSON object a line, one an epoch. A resumed run drops the lines after its checkpoint.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> directory = tempfile.TemporaryDirectory()
    >>> file = pathlib.Path(directory.name, "metrics.jsonl")
    >>> training = nn.fit(trainer, (x, y), 2, nn.Metrics(file))
    >>> [json.loads(line)["epoch"] for line in file.read_text().splitlines()]
    [1, 2]
    >>> directory.cleanup()
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.last: str | None = None  # the file's last line

    def on_begin(self, training):
        if training.trainer.is_writer:
            lines = [_line(record) for record in training.history]
            self.last = lines[-1] if lines else None
            write_atomically(self.path, "".join(lines).encode())

    def on_epoch(self, training, record):
        if not training.trainer.is_writer:
            return
        if len(training.history) > 1 and _line(training.history[-2]) != self.last:
            self.on_begin(training)  # a later callback has added to the record of the epoch before
            return
        self.last = _line(record)
        try:
            append_or_nothing(self.path, self.last.encode())
        except FileNotFoundError:  # renamed or removed, perhaps with its directory: a new file holds all
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.on_begin(training)

    def on_end(self, training):
        if training.trainer.is_writer and training.history and _line(training.history[-1]) != self.last:
            self.on_begin(training)


def _line(record: dict) -> str:
    return json_text(record) + "\n"


class ExpertLoad(Callback):
    """Put into every epoch's record how even the load of experts was, by layer and step.

    For every `MixtureOfExperts`, by its path in the network, `record["experts"]` has {"step": [...], "load": [[...],
    ...], "dropped": [...]}: a row for each step, or for each of SPANS spans of a longer epoch, with its last step, each
    expert's fraction of the choices times the number of experts (1 where the load is even), and the fraction of choices
    that a capacity left out.

    Examples
    --------
    >>> import nn, numpy as np
    >>> network = nn.Network(nn.Residual(nn.MixtureOfExperts(4, 2, top=1)), (3, 4))
    >>> data = nn.data.Dataset(np.ones((6, 3, 4), np.float32), np.ones((6, 3, 4), np.float32))
    >>> trainer = nn.Trainer(network, nn.MSELoss(), nn.SGD(0.1))
    >>> training = nn.fit(trainer, nn.Loader(data, 3), 1, [nn.callbacks.ExpertLoad()])
    >>> training.history[0]["experts"]["body"]["step"]
    [1, 2]
    """

    SPANS = 50  # rows of an epoch

    def on_begin(self, training):
        inner = ((path, _innermost(layer)) for path, layer, _, _ in training.trainer.network.layers())
        self.layers = {path: layer.experts for path, layer in inner if isinstance(layer, MixtureOfExperts)}
        if self.layers:
            self.number = {path: i for i, path in enumerate(self.layers)}
            self._clear()
            training.trainer.ctx.network_context.on_routing = self._count

    def _clear(self) -> None:
        self.counts = np.zeros((self.SPANS, len(self.layers), 2, max(self.layers.values())))  # chosen, computed
        self.steps, self.span = [0] * self.SPANS, 0

    def _count(self, path: str, choices: np.ndarray, computed: np.ndarray) -> None:
        self.counts[self.span, self.number[path], :, : len(choices)] += choices, computed

    def on_step(self, training, loss):
        if not self.layers:
            return
        self.steps[self.span] = training.trainer.steps
        self.span = min(self.SPANS - 1, training.batch * self.SPANS // max(self.SPANS, training.epoch_steps))

    def on_epoch(self, training, record):
        if not self.layers:
            return
        counts = training.trainer.sum(self.counts)
        for number, (path, experts) in enumerate(self.layers.items()):
            chosen, computed = counts[:, number, 0, :experts], counts[:, number, 1, :experts].sum(axis=1)
            total = chosen.sum(axis=1)
            rows = np.flatnonzero(total)
            if not len(rows):
                continue  # a stage of a pipeline, whose micro-batches are not counted
            record.setdefault("experts", {})[path] = {
                "step": [self.steps[row] for row in rows],
                "load": np.round(chosen[rows] * experts / total[rows, None], 3).tolist(),
                "dropped": np.round(1 - computed[rows] / total[rows], 4).tolist(),
            }
        self._clear()

    def on_end(self, training):
        training.trainer.ctx.network_context.on_routing = None

    on_abort = on_end


def _innermost(layer):
    while isinstance(layer, Wrapper):
        layer = layer.layer
    return layer


def append_or_nothing(path: Path, line: bytes) -> None:
    """Append a line to a file that is there, or raise and leave it as it was: a full disk leaves no half line."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        try:
            if (written := os.write(file, line)) < len(line):
                raise OSError(errno.ENOSPC, f"No space left on device: {written} of {len(line)} bytes")
        except OSError as error:
            os.ftruncate(file, size)
            raise OSError(
                error.errno, f"cannot write {path} ({error.strerror}); what was there before is kept"
            ) from error
    finally:
        os.close(file)


class BestEpoch:
    """Finds the best epoch of a training by a value of its records: for all callbacks that choose one.

    Parameters
    ----------
    owner : str
        Name of the callback, for messages.
    metric : str
        Entry of the records.
    mode : {"min", "max"} or None
        Whether smaller or larger is better; None: as the metric says (`nn.metrics.direction`).
    """

    def __init__(self, owner: str, metric: str, mode: str | None = None):
        if mode is not None:
            check_mode(owner, mode)
        self.owner, self.metric, self.mode = owner, metric, mode

    def check_direction(self, training: Training) -> None:
        """Refuse a metric of unknown direction before the first epoch."""
        training.direction(self.metric, self.mode)

    def check_record(self, record: dict) -> None:
        """Refuse a metric that the record lacks."""
        if self.metric not in record:
            near = nearest(self.metric, record)
            hint = f": did you mean {near!r}?" if near else ""
            if self.metric.startswith("validation_"):
                hint = ": no validation data?"
                if "validation_loss" in record:
                    hint = ": the loss does not measure it on such targets; choose another, or give fit metrics=[...]"
            raise ValueError(f"{self.owner}: {self.metric!r} is not in the record ({', '.join(record)}){hint}")

    def find(self, training: Training) -> int:
        """Return the first epoch with the best value, counted from 1. NaN is the worst."""
        return best_epoch(training.history, self.metric, training.direction(self.metric, self.mode))


def best_epoch(history: Sequence[dict], metric: str, direction: str) -> int:
    """Return the first epoch, counted from 1, whose record has the best value of a metric; NaN is the worst.

    Parameters
    ----------
    history : sequence of dict
        A record of each epoch, at least one.
    metric : str
        Entry of the records.
    direction : {"min", "max"}
        Whether smaller or larger is better.
    """
    sign = 1 if direction == "min" else -1
    values = [sign * record.get(metric, math.nan) for record in history]  # not measured: never best
    values = [math.inf if math.isnan(value) else value for value in values]
    return values.index(min(values)) + 1


class EarlyStopping(Callback):
    """Stop when `metric` has not improved for `patience` epochs, and restore the best epoch's weights.

    Parameters
    ----------
    patience : int
    metric : str
        Entry of the epochs' records, such as "validation_accuracy" or "validation_loss".
    mode : {"min", "max"} or None
        Whether smaller or larger is better; None: as the metric says (`nn.metrics.direction`).
    checkpoints : Checkpoints or None
        Those of `KeepCheckpoints`, which has "best" there: needed where a resumed run's best epoch was before the
        resume. If "best" cannot be read, the trainer keeps the last epoch's weights, as with `RestoreBest`.

    Attributes
    ----------
    epoch : int
        After training: the epoch whose weights the trainer has.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> stopping = nn.EarlyStopping(3, metric="validation_loss")
    >>> training = nn.fit(trainer, (x, y), 10, stopping, validation=(x, y))
    >>> stopping.epoch <= training.epoch <= 10
    True
    """

    def __init__(
        self,
        patience: int,
        metric: str = "validation_accuracy",
        checkpoints: Checkpoints | None = None,
        mode: str | None = None,
    ):
        SIZE("EarlyStopping: patience", patience)
        if checkpoints is not None:
            check_checkpoints("EarlyStopping", checkpoints)
        self.best_epoch = BestEpoch("EarlyStopping", metric, mode)
        self.patience, self.checkpoints = patience, checkpoints
        self.snapshot: dict[str, np.ndarray] | None = None  # of the best epoch

    def on_begin(self, training):
        self.best_epoch.check_direction(training)
        self.snapshot = None  # of another run
        measured = bool(training.history) and all(self.best_epoch.metric in record for record in training.history)
        if measured and not training.batch:  # a run that had stopped, and was killed before its end
            self._decide(training)

    def on_epoch(self, training, record):
        self.best_epoch.check_record(record)
        if self._decide(training) == training.epoch:
            self.snapshot = training.trainer.snapshot()

    def _decide(self, training: Training) -> int:
        """Stop training if the best epoch is `patience` epochs ago; return the best epoch."""
        best = self.best_epoch.find(training)
        training.stop |= training.epoch - best >= self.patience  # or another callback has set it
        return best

    def on_end(self, training):
        self.epoch = training.epoch
        if not training.history:
            return
        if self.snapshot is not None:
            training.trainer.restore(self.snapshot)
            self.epoch = training.restored = self.best_epoch.find(training)
        elif self.checkpoints:
            saved = RestoreBest(self.checkpoints, self.best_epoch.metric, mode=self.best_epoch.mode)
            saved.on_end(training)
            self.epoch = saved.epoch


class RestoreBest(Callback):
    """Restore the best epoch's weights after training, which `KeepCheckpoints` has saved as "best".

    If any process cannot read that file (it is damaged, or on another host's disk), all keep the last epoch's weights.

    Parameters
    ----------
    checkpoints : Checkpoints
    metric, mode
        As for `KeepCheckpoints`.
    say : callable or None
        Called by the process that writes with the reason why "best" could not be read; None prints it.

    Attributes
    ----------
    epoch : int
        After training: the epoch whose weights the trainer has.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> directory = tempfile.TemporaryDirectory()
    >>> checkpoints = nn.Checkpoints(directory.name)
    >>> metric = "validation_loss"
    >>> callbacks = [nn.KeepCheckpoints(checkpoints, best=metric), nn.RestoreBest(checkpoints, metric)]
    >>> training = nn.fit(trainer, (x, y), 3, callbacks, validation=(x, y))
    >>> callbacks[1].epoch
    3
    >>> directory.cleanup()
    """

    def __init__(
        self, checkpoints: Checkpoints, metric: str = "validation_accuracy", say=None, mode: str | None = None
    ):
        check_checkpoints("RestoreBest", checkpoints)
        self.checkpoints, self.best_epoch = checkpoints, BestEpoch("RestoreBest", metric, mode)
        self.say = say or (lambda line: print(line, flush=True))

    def on_begin(self, training):
        self.best_epoch.check_direction(training)

    def on_epoch(self, training, record):
        self.best_epoch.check_record(record)

    def on_end(self, training):
        trainer, self.epoch = training.trainer, training.epoch
        if not training.history:
            return
        best = self.best_epoch.find(training)
        if best == (training.restored or training.epoch):
            self.epoch = best
            return  # the trainer has it
        problem = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a damaged file: said below
            try:
                state, progress, file = self.checkpoints.load("best")
                if progress["epoch"] != best:
                    problem = f"{file} is of epoch {progress['epoch']}"
                elif any(progress["history"][-1].get(key) != training.history[best - 1].get(key) for key in SAME):
                    problem = (
                        f"{file} is of another run, whose epoch {best} had another loss: is KeepCheckpoints missing?"
                    )
            except (CheckpointError, OSError) as error:
                problem = str(error)
        # The sum synchronizes processes: in shared memory, none may load while another still reads the old state.
        failed = int(trainer.sum(np.array([bool(problem)]))[0])
        if not failed:
            trainer.load_state_dict(state)
            self.epoch = training.restored = best
        elif trainer.is_writer:
            problem = (
                problem or f"{failed} other processes cannot read it: is {self.checkpoints.directory} on one host only?"
            )
            self.say(f"warning: the best epoch, {best}, cannot be put back, so the last one counts: {problem}")


SAME = "step", "loss"  # values that must agree in an epoch's record and in its checkpoint
