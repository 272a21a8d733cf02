"""Training: what one process does in a step, and the one loop that every strategy runs.

A **trainer** owns the buffers and makes one optimizer step at a time; `Serial` does it in one process, the classes of
`parallel` do the same on many ranks, and `fit` cannot tell them apart:

    trainer = Serial(network, CrossEntropyLoss(), SGD(lr=0.1))
    fit(trainer, Loader(data.train, batch=64), epochs=5, test=Loader(data.test, batch=500, shuffle=False))

Batch gradient descent is batch = all samples, stochastic gradient descent is batch = 1: the loop is the same.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from nn.losses import Loss
from nn.memory import Memory
from nn.network import Bad, Network
from nn.optimizers import Optimizer


class NonFiniteLoss(ArithmeticError):
    """The loss is NaN or infinite; the message says at which step and in which layer it appears first.

    Attributes
    ----------
    samples : list of int
        Of which samples that is, as indices in the global batch; empty where it cannot be told.
    """

    def __init__(self, message: str, samples: Sequence[int] = ()):
        super().__init__(message)
        self.samples = list(samples)


class Serial:
    """One process: forward, backward, update.

    Parameters
    ----------
    network : Network
    loss : Loss
    optimizer : Optimizer
    seed : int
        Of the initial parameters and of random layers.

    Attributes
    ----------
    parameters, gradients : flat arrays in network.layout
    slots : dict of flat arrays
        The optimizer's moments.
    statistics : flat array in network.state_layout
        Running statistics, such as batch normalisation's.
    p, g : views
        Parameters and gradients as layers see them.
    steps : int
        Optimizer steps made so far.
    shard : (index, count)
        Which part of every global batch this trainer expects from the loader.
    """

    shard = (0, 1)

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, seed: int = 0):
        self.network, self.loss, self.optimizer, self.seed = network, loss, optimizer, seed
        self.allocate()
        self.initialize()
        self.statistics = network.state_layout.zeros(network.dtype)
        network.state_layout.initialize(self.statistics, seed)
        self.run = network.run(self.statistics, seed, Memory(), gy_free=True)
        # Statistics over all ranks need every rank, one without samples too.
        self.everyone = any(getattr(layer, "synchronized", False) for _, layer, _, _ in network.layers())
        self.terms = loss.rows(network.out_shape)
        self.steps = 0
        self.loss_so_far, self.parts = 0.0, []  # of this batch, what `accumulate` was given: its loss, and the samples
        self.statistics_before = self.statistics.copy()  # those of the step before, for a batch that goes wrong

    def allocate(self) -> None:
        """Make the flat buffers `parameters` and `gradients`; a strategy may choose other memory."""
        self.parameters = self.network.layout.zeros(self.network.dtype)
        self.gradients = self.network.layout.zeros(self.network.dtype)

    def initialize(self) -> None:
        """First values, the optimizer's slots, and how layers and optimizer see the buffers."""
        layout = self.network.layout
        layout.initialize(self.parameters, self.seed)
        self.slots = {name: layout.zeros(self.network.dtype) for name in self.optimizer.slots}
        self.p, self.g = layout.views(self.parameters), layout.views(self.gradients)
        self.region = layout.region()

    def step(self, x: np.ndarray, y: np.ndarray, total: int | None = None) -> float:
        """One optimizer step on this shard (x, y) of a global batch of `total` samples; returns the batch's mean loss.

        Raises
        ------
        ValueError
            The global batch is empty; a shard of it may be.
        NonFiniteLoss
            Before the update, so parameters and running statistics are those of the step before.
        """
        total = len(x) if total is None else total
        mine = self.seen() + len(x)
        if total < max(1, mine):
            raise ValueError(
                f"step {self.steps} of {self.network.name}: a shard of {mine} samples in a batch of {total}; "
                "a batch needs at least one"
            )
        if not self.parts:
            self.statistics_before[:] = self.statistics
        loss = self.combine(self.loss_so_far + self.compute_gradients(x, y, total))
        parts, self.parts = [*self.parts, x], []
        self.loss_so_far, self.run.common.accumulate = 0.0, False
        if not math.isfinite(loss):
            self.statistics[:] = self.statistics_before
            bad = self.first_bad(parts)
            self.statistics[:] = self.statistics_before  # looking may train
            raise NonFiniteLoss(self.explain(loss, bad), bad.samples if bad else ())
        try:
            self.update()
        except FloatingPointError:  # a norm that is not finite: nothing was updated
            self.statistics[:] = self.statistics_before
            raise
        self.steps += 1
        return loss

    def accumulate(self, x: np.ndarray, y: np.ndarray, total: int) -> None:
        """Forward and backward of a first part of this shard; the `step` with its last part ends the batch.

        Saves memory: activations are those of a part. Nothing is sent to other ranks (PyTorch calls it no_sync).
        """
        if not self.parts:
            self.statistics_before[:] = self.statistics
        self.loss_so_far += self.compute_gradients(x, y, total)
        self.parts.append(x)
        self.run.common.accumulate = True

    def compute_gradients(self, x: np.ndarray, y: np.ndarray, total: int) -> float:
        """Gradients of these samples' part of the mean loss into `gradients`; returns that part of the loss."""
        common = self.run.common
        common.training, common.step, common.sample = True, self.steps, self.first_sample(total) + self.seen()
        if not len(x) and not self.everyone:
            if not common.accumulate:
                self.gradients[:] = 0
            return 0.0
        z, saved = self.network.forward(self.p, x, self.run)
        loss, gz = self.loss(z, y, total * self.terms, self.run)
        self.before_backward(loss)
        self.network.backward(self.p, self.g, gz, saved, self.run)
        return loss

    def seen(self) -> int:
        """Samples of this batch that `accumulate` was given."""
        return sum(map(len, self.parts))

    def before_backward(self, loss: float) -> None:
        """Told the loss of these samples when their forward pass has ended."""

    def first_sample(self, total: int) -> int:
        """Index in a global batch of `total` samples of the first one of this shard."""
        return 0

    def update(self) -> None:
        """One step of the optimizer, with the gradients of the whole batch."""
        self.optimizer.update(self.parameters, self.gradients, self.slots, self.steps, self.region)

    def rescale(self, slot: str, factor: float) -> None:
        """Multiply a slot of the optimizer, where this process holds it."""
        if slot in self.slots:
            self.slots[slot] *= factor

    def combine(self, loss: float) -> float:
        """Bring together what all shards computed: nothing to do in one process."""
        return loss

    def explain(self, loss: float, bad: Bad | None) -> str:
        """What to tell about a loss that is not finite."""
        return (
            f"step {self.steps}: the loss is {loss}; the first value that is not finite is in "
            f"{bad or 'the loss itself'}. The parameters were not updated. "
            "A lower learning rate, clipping or float64 may help."
        )

    def first_bad(self, parts: list[np.ndarray]) -> Bad | None:
        """Where the first value that is not finite appears: a parameter, the input (in parts), a layer's output."""
        for name, array in reversed(list(self.network.layout.items(self.parameters))):
            if not np.isfinite(array).all():
                return Bad(-1, f"parameter {name} (it was updated in step {self.steps - 1})", [])
        common = self.run.common
        common.sample -= sum(map(len, parts[:-1]))  # of the first part again
        found = []
        for x in parts:
            if len(x) and (bad := self.network.first_bad(self.p, x, self.run)):
                found.append(bad)
            common.sample += len(x)
        return min(found, key=lambda bad: bad.depth, default=None)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The network's output for a batch, in evaluation mode."""
        self.run.common.training = False
        return self.network.forward(self.p, x, self.run)[0]

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Sums over a batch: [loss, correct, outputs], float64. Correct counts outputs whose largest entry is y; it is
        NaN where targets are no classes."""
        return self.score(self.predict(x), y) if len(x) else np.zeros(3)

    def score(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The sums of `evaluate` for outputs z."""
        loss, _ = self.loss(z, y, 1, self.run)
        correct = np.count_nonzero(z.argmax(axis=-1) == y) if y.dtype.kind in "iu" else math.nan
        return np.array([loss, correct, len(z) * self.terms], np.float64)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of an array over all shards."""
        return values

    def state(self) -> dict[str, np.ndarray]:
        """Everything that training continues from: prefix/name -> array (views, not copies)."""
        layout = self.network.layout
        state = {f"param/{name}": array for name, array in layout.items(self.parameters)}
        for slot, buffer in self.slots.items():
            state |= {f"optimizer/{slot}/{name}": array for name, array in layout.items(buffer)}
        state |= {f"state/{name}": a for name, a in self.network.state_layout.items(self.statistics)}
        return state | {"steps": np.array(self.steps)}

    def entries(self) -> Iterator[tuple[str, np.ndarray]]:
        """`state`, an entry at a time, as a checkpoint is written: a strategy that shards it gathers no more at once.

        First the steps. An array may change when the next one is asked for. Every rank goes through all; only rank
        0's arrays count.
        """
        state = self.state()
        yield "steps", state.pop("steps")
        yield from state.items()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state` returned; refuses missing, foreign and misshapen entries by name."""
        mine = self.state()
        if problem := check_state({name: (array.shape, array.dtype) for name, array in mine.items()}, state):
            raise ValueError(problem)
        for name, array in mine.items():
            array[...] = state[name]
        self.steps = int(state["steps"])

    def snapshot(self) -> dict[str, np.ndarray]:
        """A copy of all that this process holds of the state, for `restore`."""
        return {name: array.copy() for name, array in self.state().items()}

    def restore(self, snapshot: dict[str, np.ndarray]) -> None:
        """Go back to a snapshot of this trainer."""
        self.load_state(snapshot)

    def digest(self) -> str:
        """SHA-256 of all parameters, in the order of the layout: the same for every strategy."""
        return hashlib.sha256(self.parameters).hexdigest()

    def memory(self) -> dict[str, int]:
        """Bytes that this process has allocated, by what they are for."""
        moments = sum(slot.nbytes for slot in self.slots.values())
        kept = {"parameters": self.parameters.nbytes, "gradients": self.gradients.nbytes, "moments": moments}
        return kept | {"in transit": 0}

    def alone(self) -> Serial | None:
        """A trainer of one process with this state, to look into the network; None on all ranks but the first."""
        return self


def state_kinds(network: Network, slots: Iterable[str]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Name -> (shape, dtype) of what every strategy's `state` has for this network and these slots of an optimizer."""
    kinds = {"steps": ((), np.dtype(int))}
    layouts = {"param": network.layout, "state": network.state_layout}
    for prefix, layout in (layouts | {f"optimizer/{slot}": network.layout for slot in slots}).items():
        kinds |= {f"{prefix}/{name}": (spec.shape, network.dtype) for name, spec in layout.specs.items()}
    return kinds


def check_state(expected: dict[str, tuple[tuple[int, ...], np.dtype]], state: Mapping[str, np.ndarray]) -> str:
    """What is wrong with a state where entries of these shapes and dtypes are expected, in words; '' if nothing."""
    if missing := sorted(expected.keys() - state.keys()):
        return f"the checkpoint lacks {', '.join(missing[:5])}: another network or optimizer?"
    if foreign := sorted(state.keys() - expected.keys()):
        return f"the checkpoint has {', '.join(foreign[:5])}, unknown here: another network or optimizer?"
    for name, (shape, dtype) in expected.items():
        array = state[name]
        if (array.shape, array.dtype) != (shape, dtype):
            return f"checkpoint entry {name}: expected {dtype}{shape}, given {array.dtype}{array.shape}"
    return ""


@dataclass
class Training:
    """Where a run of `fit` stands; callbacks read it, checkpoints keep it.

    Attributes
    ----------
    history : list of dict
        One record an epoch: epoch, step, loss (mean over the epoch), images_per_second, seconds; with test data also
        test_loss and accuracy.
    stop : bool
        A callback sets it to end after this epoch (alike on all ranks: decide from the history).
    """

    trainer: Serial
    train: object
    epochs: int
    test: object = None
    epoch: int = 0  # epochs finished
    batch: int = 0  # batches of the current epoch finished
    loss_sum: float = 0.0
    samples: int = 0
    seconds: float = 0.0  # spent training, earlier runs included
    history: list[dict] = field(default_factory=list)
    stop: bool = False

    def progress(self) -> dict:
        """What a checkpoint keeps beside the trainer's state."""
        keys = ("epoch", "batch", "loss_sum", "samples", "seconds", "history")
        return {key: getattr(self, key) for key in keys}


class Callback:
    """Told what happens; every rank calls its callbacks alike, so only rank 0 should print or write."""

    def on_begin(self, training: Training) -> None: ...

    def on_step(self, training: Training, loss: float) -> None: ...

    def on_epoch(self, training: Training, record: dict) -> None: ...

    def on_end(self, training: Training) -> None: ...


def fit(
    trainer: Serial,
    train: Iterable,
    epochs: int,
    callbacks: Sequence[Callback] = (),
    test: Iterable | None = None,
    schedule: Callable[[int], float] | None = None,
    progress: dict | None = None,
    accumulate: int = 1,
) -> Training:
    """Train for `epochs` epochs: the only loop there is.

    Parameters
    ----------
    trainer : Serial or a strategy of `parallel`
    train : Loader
        Global batches, cut for trainer.shard; train.epoch(e, start) yields (x, y, total).
    epochs : int
        In all, those of a resumed run included.
    callbacks : sequence of Callback
    test : Loader or None
        Evaluated after every epoch, each shard on its own part.
    schedule : callable or None
        Step -> learning rate; without it the optimizer's own stays.
    progress : dict or None
        `Training.progress()` of the run to continue, after trainer.load_state.
    accumulate : int
        Cut every step's shard into so many parts, one after the other: less memory for activations, the same step.

    Returns
    -------
    Training
    """
    if epochs < 0 or accumulate < 1:
        raise ValueError(f"epochs must not be negative, accumulate at least 1, given {epochs} and {accumulate}")
    training = Training(trainer, train, epochs, test, **(progress or {}))
    for callback in callbacks:
        callback.on_begin(training)
    while training.epoch < epochs and not training.stop:
        _epoch(training, callbacks, schedule, accumulate)
    for callback in callbacks:
        callback.on_end(training)
    return training


def step_in_parts(trainer: Serial, x: np.ndarray, y: np.ndarray, total: int, parts: int) -> float:
    """`trainer.step`, with the shard cut into parts that are computed one after the other.

    Every rank cuts its shard into as many, empty ones perhaps: layers that take statistics over all ranks meet in each.
    """
    cuts = [len(x) * i // parts for i in range(parts + 1)]
    for lo, hi in pairwise(cuts[:-1]):
        trainer.accumulate(x[lo:hi], y[lo:hi], total)
    return trainer.step(x[cuts[-2] :], y[cuts[-2] :], total)


def _in_data_set(training: Training, error: NonFiniteLoss) -> NonFiniteLoss:
    """The error, told with the places in the data set where the loader knows them."""
    if not error.samples or not hasattr(training.train, "order"):
        return error
    first = training.batch * training.train.batch
    found = [int(training.train.order(training.epoch)[first + i]) for i in error.samples[:5]]
    return NonFiniteLoss(f"{error} In the data set: samples {found}.", error.samples)


def _epoch(training: Training, callbacks: Sequence[Callback], schedule, accumulate: int) -> None:
    trainer = training.trainer
    clock = time.perf_counter()
    for x, y, total in training.train.epoch(training.epoch, training.batch):
        if schedule:
            trainer.optimizer.lr = schedule(trainer.steps)
        try:
            loss = step_in_parts(trainer, x, y, total, accumulate)
        except NonFiniteLoss as error:
            raise _in_data_set(training, error) from None
        training.batch += 1
        training.loss_sum += loss * total
        training.samples += total
        now = time.perf_counter()
        training.seconds, clock = training.seconds + now - clock, now
        for callback in callbacks:
            callback.on_step(training, loss)
    training.epoch += 1
    record = {
        "epoch": training.epoch,
        "step": trainer.steps,
        "loss": training.loss_sum / max(1, training.samples),
        "seconds": training.seconds,
    }
    spent = training.seconds - (training.history[-1]["seconds"] if training.history else 0.0)
    record["images_per_second"] = training.samples / max(1e-9, spent)
    training.batch, training.loss_sum, training.samples = 0, 0.0, 0
    if training.test is not None:
        record |= evaluate(trainer, training.test)
    training.history.append(record)
    for callback in callbacks:
        callback.on_epoch(training, record)


def evaluate(trainer: Serial, test: Iterable) -> dict[str, float]:
    """{"test_loss", "accuracy"} over a loader whose batches are cut for trainer.shard: exact for uneven shards.

    Without "accuracy" where the targets are no classes.
    """
    sums = np.zeros(3)
    for x, y, _ in test.epoch(0):
        sums += trainer.evaluate(x, y)
    loss, correct, count = trainer.sum(sums)
    scores = {"test_loss": float(loss / max(1, count)), "accuracy": float(correct / max(1, count))}
    return scores if math.isfinite(correct) else {"test_loss": scores["test_loss"]}
