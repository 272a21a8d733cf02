"""Training: the one loop that every strategy runs.

`fit` asks a trainer for one optimizer step after the other. That is a `Trainer` (trainer.py) of one process, or a
strategy of `parallel`, which does the same on many processes:

    trainer = Trainer(network, CrossEntropyLoss(), SGD(lr=0.1))
    fit(trainer, Loader(data.train, batch=64), epochs=5, test=Loader(data.test, batch=500, shuffle=False))
    fit(trainer, (x, y), epochs=5, batch=64)                 # arrays: a Loader is made of them

Callbacks that choose (stop early, keep the best epoch, lower the rate) read the history, which has the scores on the
validation data. The test data are evaluated once, after training.

With batch = all samples this is batch gradient descent, with batch = 1 stochastic gradient descent.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Never, ParamSpec, TypeVar

import numpy as np

from nn.arguments import COUNT, SIZE, refuse_others
from nn.data.dataset import Data, Dataset
from nn.data.loader import Loader
from nn.metrics import Measures, as_metrics
from nn.optim.learning_rates import Cosine, Polynomial, Warmup
from nn.training.batches import batches, refuse_lone_samples
from nn.training.callbacks import Progress, is_interactive
from nn.training.trainer import NonFiniteLoss, Trainer, check_rates
from nn.training.training import Callback, Training, check_progress

Samples = Data | Loader | Dataset | tuple | list | Iterable  # also what has a Loader's `epoch`
INSTEAD = {  # what to write for arguments of other libraries
    "batch_size": "batch=",
    "validation_data": "validation=",
    "validation_split": "validation=; nn.data.hold_out(dataset, 0.1) splits one in two",
    "epoch": "epochs=",
    "x": "the data second, as (x, y)",
    "y": "the data second, as (x, y)",
    "optimizer": "nn.Trainer(network, loss, optimizer)",
    "loss": "nn.Trainer(network, loss, optimizer)",
    "lr": "nn.SGD(lr=...) for the trainer, or schedule=",
    "learning_rate": "nn.SGD(lr=...) for the trainer, or schedule=",
    "scheduler": "schedule=",
    "callback": "callbacks=",
    "shuffle": "nn.Loader(dataset, batch, shuffle=False)",
    "initial_epoch": "progress=training.progress(), of the training to continue",
    "class_weight": "nn.CrossEntropyLoss(class_weights=...)",
}


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _data_in_one_argument(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Refuse targets as an argument of their own, as other libraries take them: Python says "multiple values"."""

    @functools.wraps(function)
    def checked(*values: Arguments.args, **options: Arguments.kwargs) -> Result:
        if len(values) > 2 and np.ndim(values[2]):
            raise TypeError(
                "fit takes samples and targets as one argument: nn.fit(trainer, (x, y), epochs=5), given "
                f"{values[2]!r:.80} in third place, where the number of epochs is"
            )
        return function(*values, **options)

    return checked


@_data_in_one_argument
def fit(
    trainer: Trainer,
    train: Samples,
    epochs: int,
    callbacks: Callback | Iterable[Callback] = (),
    validation: Samples | None = None,
    schedule: Callable[[int], float] | None = None,
    progress: dict | None = None,
    accumulate: int = 1,
    test: Samples | None = None,
    batch: int | None = None,
    metrics: Measures = (),
    verbose: bool | None = None,
    **others: Never,
) -> Training:
    """Train for `epochs` epochs: the one training loop, of every trainer.

    A second call continues: samples come in the orders of the next epochs. A schedule starts anew.

    Parameters
    ----------
    trainer : Trainer
        A trainer of one process, or of many (`parallel`).
    train : Data, Loader, Dataset, (x, y), or an iterable of batches (x, y)
        A Data has training samples, and validation and test samples that count where these arguments are None. A Loader
        gives global batches, cut for trainer.shard: train.epoch(e, start) yields (x, y, total). A Dataset, or two
        arrays (N, *in_shape) and (N, ...), is cut into batches of `batch` samples in an order drawn from trainer.seed.
    epochs : int
        The number of epochs at the end, including those before a resume.
    callbacks : Callback or iterable of Callback
        They are called in this order.
    validation : as train, or None
        Evaluated after every epoch, each shard by its own process. Callbacks may choose by the scores.
    schedule : callable or None
        Maps the step of this call, from 0, to a learning rate; None leaves the optimizer's, which is there again after
        training. A `Plateau` is a schedule and a callback, and need not be given twice.
    progress : dict or None
        `Training.progress()` of the run to continue; load its state into the trainer first (load_state_dict).
    accumulate : int
        Micro-batches of a step, computed one after the other: less memory for activations, the same step.
    test : as train, or None
        Evaluated once, after the callbacks' on_end: the `result`.
    batch : int or None
        Samples of a step's global batch, 32 where None. A Loader, or an iterable of batches, has its own.
    metrics : Metric, name or function, or several
        Measured on validation and test data beside the loss and its own metric: an `nn.metrics.Metric`, its name such
        as "mae" or "top_5_accuracy", or a function (z, y) -> values whose name says the direction, such as `my_error`.
    verbose : bool or None
        Whether to print progress; None prints it in a terminal or a notebook, unless a callback `Progress` does.

    Returns
    -------
    Training

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> training = nn.fit(trainer, (x, y), epochs=5, batch=3)
    >>> len(training.history), training.history[-1]["loss"] < training.history[0]["loss"]
    (5, True)
    """
    refuse_others("fit", others, INSTEAD)
    _check_trainer("fit", trainer)
    optimizer = trainer.optimizer
    check_rates(trainer.network, {**optimizer.rates, **dict.fromkeys(optimizer.frozen, 0.0)})
    COUNT("fit: epochs", epochs)
    SIZE("fit: accumulate", accumulate)
    if schedule is not None and not callable(schedule):
        raise TypeError(
            f"fit: schedule must be a function step -> rate, given {schedule!r:.80}; leave it out for a constant rate"
        )
    if not isinstance(progress, Mapping | None):
        raise TypeError(
            f"fit: progress is a dict, as training.progress() returns it, given {progress!r:.80}: is it a callback?"
        )
    callbacks = _as_list(callbacks)
    shown = any(isinstance(callback, Progress) for callback in callbacks)
    if not shown and (is_interactive() if verbose is None else verbose):
        callbacks.append(Progress(every_epoch=1.0 if verbose is None else 0.0))
    if isinstance(train, Data):
        validation = train.validation if validation is None else validation
        test = train.test if test is None else test
        train = train.train
    schedule, callbacks = _with_plateau(schedule, callbacks)
    train = batches(train, trainer, True, "fit: train", batch)
    validation = validation if validation is None else batches(validation, trainer, False, "fit: validation")
    test = test if test is None else batches(test, trainer, False, "fit: test")
    _check_batches(trainer, train, int(accumulate))
    check_progress(progress or {}, len(train) if isinstance(train, Sized) else None)
    training = Training(trainer, train, epochs, validation, **_start(progress))
    if not progress:
        training.first_step, training.first_epoch = trainer.steps, -(-trainer.steps // max(1, training.epoch_steps))
    if schedule:
        _check_schedule(schedule, training)
    rate = optimizer.lr
    try:
        with _measuring(trainer, metrics):
            for callback in callbacks:
                callback.on_begin(training)
            while training.epoch < epochs and not training.stop:
                _epoch(training, callbacks, schedule, accumulate)
            for callback in callbacks:
                callback.on_end(training)
            if test is not None:
                training.result = trainer.scores(test)
    except BaseException:
        for callback in callbacks:
            callback.on_abort(training)
        raise
    finally:
        if schedule:
            optimizer.lr = rate  # not the schedule's last one: a next call without a schedule would train with that
    return training


def _start(progress: Mapping | None) -> dict:
    """Return the fields of a Training at `progress`; none where there is none."""
    if not progress:
        return {}
    # Older checkpoints have no weight: every sample weighed 1.
    fields = {"weight": float(progress.get("samples", 0)), **progress}
    return fields | {"history": [dict(record) for record in progress.get("history", ())]}  # copies: it is the caller's


def _with_plateau(schedule, callbacks: list[Callback]) -> tuple[Callable[[int], float] | None, list[Callback]]:
    """Return the schedule and the callbacks; one that is both, and was given as either, is in both."""
    inner = schedule
    while isinstance(inner, Warmup):
        inner = inner.schedule
    if isinstance(inner, Callback):
        return schedule, callbacks if inner in callbacks else [inner, *callbacks]
    rates = [callback for callback in callbacks if callable(callback)]
    if rates and (schedule is not None or len(rates) > 1):
        setters = ", ".join(map(repr, [schedule] * (schedule is not None) + rates[schedule is None :]))
        raise ValueError(f"fit: {rates[0]!r} sets the learning rate, and so does {setters}: give one of them")
    return (rates[0] if rates else schedule), callbacks


def _check_schedule(schedule, training: Training) -> None:
    """Refuse a schedule that has ended, with rate 0, before the last epoch; warn of one that starts anew too early."""
    inner = schedule
    while isinstance(inner, Warmup):
        inner = inner.schedule
    if not isinstance(inner, Cosine | Polynomial):
        return
    steps, epochs = training.epoch_steps, training.epochs
    if inner.end == 0 and epochs > training.epoch and inner.steps <= (epochs - 1) * steps:
        raise ValueError(
            f"fit: {schedule!r} ends with rate 0 at step {inner.steps}, and {epochs} epochs of {steps} steps are "
            f"{epochs * steps}: the last epoch would train nothing. A schedule counts steps: steps={epochs * steps}"
        )
    if training.first_step and not training.step and inner.steps > epochs * steps:
        warnings.warn(
            f"fit: {schedule!r} starts anew, as in every call of fit, and ends after the {epochs * steps} steps of "
            "this one; to go on with it, give all epochs, and progress=training.progress() of the call before",
            stacklevel=4,
        )


@contextmanager
def _measuring(trainer: Trainer, metrics: Measures):
    """Let the trainer measure these metrics too; one with the name of the loss's own metric replaces it."""
    metrics = as_metrics(metrics)
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names) or "loss" in names:
        raise ValueError(f"metrics: names must differ, and from 'loss', given {', '.join(names)}")
    with trainer.lock:
        before = trainer.metrics
        trainer.metrics = (*(metric for metric in before if metric.name not in names), *metrics)
    try:
        yield
    finally:
        with trainer.lock:
            trainer.metrics = before


def _as_list(callbacks: Callback | Iterable[Callback]) -> list[Callback]:
    """Return the callbacks as a list; refuse what is no callback, and methods that are never called."""
    is_several = isinstance(callbacks, Iterable) and not isinstance(callbacks, type)
    callbacks = list(callbacks) if is_several else [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = ", the class itself: call it" if isinstance(callback, type) else ""
            raise TypeError(f"fit: callbacks are instances of nn.Callback, given {callback!r:.80}{hint}")
        if never := [name for name in dir(callback) if name.startswith("on_") and not hasattr(Callback, name)]:
            raise TypeError(
                f"fit: {type(callback).__name__} has {', '.join(never)}, which is never called: callbacks have "
                f"{', '.join(name for name in dir(Callback) if name.startswith('on_'))}"
            )
    return callbacks


def _rate(rate: float, step: int) -> float:
    """Return a schedule's value; refuse one that is no learning rate."""
    try:
        if not isinstance(rate, str) and 0 <= float(rate) < math.inf:
            return rate
    except (TypeError, ValueError):
        pass
    raise ValueError(f"fit: schedule({step}) must be a learning rate, in [0, inf), given {rate!r:.80}")


def _check_trainer(what: str, trainer: Trainer) -> None:
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"{what} takes a trainer first, nn.Trainer(network, loss, optimizer) or one of `parallel`, given "
            f"{trainer!r:.80}; of what nn.load returns: trainer = nn.Trainer(model.network, loss, optimizer), then "
            "trainer.load_weights(model)"
        )


def _check_batches(trainer: Trainer, train: object, accumulate: int) -> None:
    """Refuse batches that batch normalisation would fail in, now and not in the last batch of an epoch."""
    if isinstance(train, Loader):
        refuse_lone_samples(
            trainer.network,
            lambda total: trainer.samples_at_once(total, accumulate),
            train.totals(),
            f"give another batch than {train.batch}, or a Loader with drop_last=True",
        )


def _in_data_set(training: Training, error: NonFiniteLoss) -> NonFiniteLoss:
    """Return the error with the indices of the samples in the data set, where the loader knows their order."""
    if not error.samples or not hasattr(training.train, "order"):
        return error
    first = training.batch * training.train.batch
    order = training.train.order(training.first_epoch + training.epoch)
    samples = [int(order[first + i]) for i in error.samples[:5]]
    return NonFiniteLoss(f"{error} In the data set: samples {samples}.", error.samples)


def _epoch(training: Training, callbacks: Sequence[Callback], schedule, accumulate: int) -> None:
    trainer = training.trainer
    clock = time.perf_counter()
    if schedule and training.batch:  # resumed, perhaps after the last step: the record has that step's rate
        trainer.optimizer.lr = _rate(schedule(training.step - 1), training.step - 1)
    for x, y, total in training.train.epoch(training.first_epoch + training.epoch, training.batch):
        if schedule:
            trainer.optimizer.lr = _rate(schedule(training.step), training.step)
        try:
            loss = trainer.step(x, y, total, accumulate, _total_weight(training, y, total))
        except NonFiniteLoss as error:
            raise _in_data_set(training, error) from None
        training.batch += 1
        weight = trainer.weight_in_epoch(total)
        training.loss_sum += loss * weight
        training.weight += weight
        training.samples += total
        now = time.perf_counter()
        training.seconds, clock = training.seconds + now - clock, now
        for callback in callbacks:
            callback.on_step(training, loss)
    if not training.samples:
        raise ValueError(
            f"fit: train gave no batch in epoch {training.epoch + 1}: a Loader with drop_last leaves out one that is "
            "not full, so its batch must not be larger than the data set"
        )
    clock = time.perf_counter()
    training.synchronize()  # updates that are still in flight are training, too
    training.seconds += time.perf_counter() - clock
    training.epoch += 1
    record = {
        "epoch": training.epoch,
        "step": trainer.steps,
        "loss": training.loss_sum / training.weight if training.weight else math.nan,
        "lr": float(trainer.optimizer.lr),
        "seconds": training.seconds,
    }
    spent = training.seconds - (training.history[-1]["seconds"] if training.history else 0.0)
    record["images_per_second"] = training.samples / max(1e-9, spent)
    record |= trainer.loss_scale_record()
    training.batch, training.loss_sum, training.weight, training.samples = 0, 0.0, 0.0, 0
    if training.validation is not None:
        scores = trainer.scores(training.validation)
        record |= {f"validation_{name}": score for name, score in scores.items()}
    training.history.append(record)
    for callback in callbacks:
        callback.on_epoch(training, record)
        for name, value in record.items():
            if isinstance(value, np.generic):
                record[name] = value.item()  # files of records hold Python's numbers


def _total_weight(training: Training, y: np.ndarray, total: int) -> float | None:
    """Return the weight of a step's global batch, whose targets every loader knows; None if not needed."""
    loss, train = training.trainer.whole_loss, training.train
    if not loss.weighted or len(y) == total or not hasattr(train, "targets"):
        return None
    return loss.weight(train.targets(training.first_epoch + training.epoch, training.batch))


def evaluate(
    trainer: Trainer, data: Samples, batch: int | None = None, metrics: Measures = (), **others: Never
) -> dict[str, float]:
    """Return {"loss", "accuracy"} and other metrics over data as `fit` takes them.

    Parameters
    ----------
    trainer : Trainer
        A trainer of one process, or of many (`parallel`).
    data : Loader, Dataset or (x, y)
        A Loader's batches are cut for trainer.shard; means are exact for uneven shards.
    batch : int or None
        Samples of a batch, 500 where None. A Loader, or an iterable of batches, has its own.
    metrics
        Measured too, as in `fit`.

    Returns
    -------
    dict
        "accuracy" is missing where targets are no classes. Means leave out rows that the loss ignores, and are NaN
        where no row is left.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(3, 2), (3,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(3), np.array([0, 1, 1])
    >>> sorted(nn.evaluate(trainer, (x, y)))
    ['accuracy', 'loss']
    """
    refuse_others("evaluate", others, INSTEAD)
    _check_trainer("evaluate", trainer)
    with trainer.lock, _measuring(trainer, metrics):
        return trainer.scores(batches(data, trainer, False, "evaluate", batch))
