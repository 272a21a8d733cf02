"""Trainer: weights, loss and optimizer in one process; `parallel` extends it to many.

A trainer owns the buffers (parameters, gradients, the optimizer's moments, running statistics) and makes one optimizer
step at a time:

    trainer = Trainer(network, CrossEntropyLoss(), SGD(lr=0.1))
    loss = trainer.step(x, y)

    step    size_of_batch       checks of x, y and total
            make_step           compute_gradients of each micro-batch (forward, loss, backward), then the optimizer's
                                update, unless the loss is not finite
"""

from __future__ import annotations

import copy
import hashlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nn.arguments import COUNT, SIZE, Closed
from nn.core.layer import ShapeError
from nn.core.memory_pool import MemoryPool
from nn.core.network import Network, NotFinite
from nn.losses import Loss
from nn.metrics import Metric
from nn.optim.optimizers import Optimizer, lies_in
from nn.training.batches import batches
from nn.training.checkpoint_writer import CheckpointWriter
from nn.training.checkpoints import Checkpoints
from nn.training.loss_scale import LossScale
from nn.training.prediction import BATCH, predict_in_batches
from nn.training.state import check_state, fitting_weights

INSTEAD = {  # what to write for names of other libraries
    "fit": "nn.fit(trainer, data, epochs=5) trains",
    "train": "nn.fit(trainer, data, epochs=5) trains, trainer.step(x, y) makes one step",
    "train_on_batch": "trainer.step(x, y) makes one step",
    "eval": "predict and evaluate are in evaluation mode, step in training mode, by themselves",
    "clip_grad_norm_": "nn.SGD(lr, clip=nn.ClipGlobalNorm(1.0)) clips gradients in each step",
    "zero_grad": "a step overwrites the gradients: trainer.step(x, y)",
    "backward": "trainer.step(x, y) computes the gradients and updates the parameters",
    "forward": "trainer.predict(x) gives the outputs",
    "compile": "loss and optimizer are given when it is made: nn.Trainer(network, loss, optimizer)",
    "score": "trainer.evaluate(x, y) gives loss and accuracy",
    "predict_proba": "predict gives logits; nn.Model(nn.Network(nn.Sequential(*layers, nn.Softmax()), in_shape), "
    "trainer) predicts probabilities. Do not train with Softmax: CrossEntropyLoss has its own",
    "save": "nn.save(trainer, file) writes network and weights",
    "save_weights": "nn.save(trainer, file) writes network and weights",
    "get_weights": "trainer.named_parameters() gives (name, array)",
    "weights": "trainer.named_parameters() gives (name, array)",
    "to": "everything is computed on the processor, in the network's dtype: nn.Network(layers, in_shape, dtype)",
    "cuda": "everything is computed on the processor",
    "module": "trainer.network describes the layers, the trainer has their weights",
    "no_sync": "trainer.step(x, y, accumulate=4) computes four micro-batches and makes one update",
    "model": "trainer.network describes the layers, the trainer has their weights",
    "layers": "trainer.network.layers() iterates over them",
    "lr": "trainer.optimizer.lr",
    "learning_rate": "trainer.optimizer.lr",
    "momentum": "trainer.optimizer.momentum",
    "weight_decay": "trainer.optimizer.weight_decay",
    "schedule": "nn.fit(trainer, data, epochs=5, schedule=nn.schedules.Cosine(0.1, steps=1000))",
    "scheduler": "nn.fit(trainer, data, epochs=5, schedule=nn.schedules.Cosine(0.1, steps=1000))",
    "batch": "nn.fit(trainer, data, epochs=5, batch=64)",
    "batch_size": "nn.fit(trainer, data, epochs=5, batch=64)",
    "epochs": "nn.fit(trainer, data, epochs=5)",
    "training": "predict and evaluate are in evaluation mode, step in training mode, by themselves",
}
REBUILT = {
    "ctx",
    "mixed_precision",
    "p",
    "g",
    "region",
    "lock",
    "_closed",
}  # attributes that copies and unpickled trainers build themselves


class NonFiniteLoss(ArithmeticError):
    """The loss is NaN or infinite; the message says at which step, and in which layer such a value appears first.

    Attributes
    ----------
    samples : list of int
        Indices in the global batch of the samples that have such a value; empty where they are not known.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.SGD())
    >>> try:
    ...     trainer.step(np.array([[np.inf, 1.0]], "f4"), np.array([[1.0]], "f4"))
    ... except nn.NonFiniteLoss as error:
    ...     print(error.samples)
    [0]
    """

    def __init__(self, message: str, samples: Sequence[int] = ()):
        super().__init__(message)
        self.samples = list(samples)


def _buffer(name: str) -> property:
    """Return a property for a flat array. Setting it writes into the array: layers and optimizer have views of it."""

    def write(trainer: Trainer, value: np.ndarray) -> None:
        buffer = vars(trainer).setdefault(name, value)
        if np.shape(value) != buffer.shape:
            raise ValueError(f"{name[1:]}: expected an array of shape {buffer.shape}, given shape {np.shape(value)}")
        if value is not buffer:
            buffer[...] = value

    return property(operator.attrgetter(name), write)


class Trainer(Closed):
    """Train a network in one process.

    Several threads may call `step`, `predict` and `evaluate`, take a snapshot and copy: a lock lets one in at a time.
    Copies and unpickled trainers have arrays of their own, and continue from the same state.

    Parameters
    ----------
    network : Network
    loss : Loss
    optimizer : Optimizer
    seed : int
        Decides the initial parameters and the random numbers of layers such as dropout.

    Attributes
    ----------
    local_network : Network
        The part of the network that this process has: here all of it.
    flat_parameters, gradients : flat arrays in local_network.layout
    slots : dict of flat arrays
        The optimizer's moments.
    buffers : flat array in local_network.buffer_layout
        Running statistics, such as batch normalisation's.
    p, g : views
        Parameters and gradients as layers see them.
    steps : int
        Steps made so far. In `updates` of them the optimizer ran; in the others a value overflowed float16.
    loss_scale : LossScale or None
        The scale of mixed precision.
    shard : (index, count)
        The shard of every global batch that this trainer expects from the loader.
    is_writer : bool
        Whether this process writes files and the log: one of those that train together does.
    name : str
        Name of the strategy, for the log.

    Examples
    --------
    >>> import nn, numpy as np
    >>> network = nn.Network(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (4,))
    >>> trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.1))
    >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 2, 0])
    >>> losses = [trainer.step(x, y) for _ in range(100)]
    >>> losses[-1] < losses[0], trainer.predict(x).shape, trainer.steps
    (True, (4, 3), 100)
    """

    constant = ("network", "loss", "optimizer", "seed")
    instead = INSTEAD
    shard = (0, 1)
    is_writer = True
    searches = False  # whether a step may evaluate the batch several times: see Optimizer.searches
    name = "Trainer"

    flat_parameters, gradients, buffers = map(_buffer, ("_flat_parameters", "_gradients", "_buffers"))

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, seed: int = 0):
        check_parts(network, loss, optimizer, seed, self.searches)
        self.network, self.loss, self.optimizer, self.seed = network, loss, optimizer, seed
        local = self.local_network = self.make_local_network(network)
        self.buffers = local.buffer_layout.zeros(network.dtype)
        local.buffer_layout.initialize(self.buffers, seed)
        self.loss_scale = LossScale() if network.mixed else None
        self.make_context()
        # Statistics over a group need every member, one without samples too.
        self.computes_empty_shards = any(layer.synchronized for _, layer, _, _ in network.layers())
        self.loss_rows, self.loss_checked = loss.rows(network.out_shape), False
        self.whole_loss = loss  # knows the weights of targets; a strategy's `loss` may be a part of it
        self.metrics: tuple[Metric, ...] = (loss.metric,)
        self.total_weight: float | None = None  # of the step's global batch
        self.steps = 0
        self.allocate()
        self.buffers_before = self.buffers.copy()  # those before the step: restored where it fails

    def make_context(self) -> None:
        """Make the contexts of the layers, and the lock that lets one thread use them at a time."""
        self.ctx = self.local_network.context(self.buffers, self.seed, MemoryPool(), may_overwrite_grad=True)
        self.mixed_precision, self.lock = self.ctx.network_context.mixed_precision, threading.RLock()

    def make_views(self) -> None:
        """Make the views of the buffers for layers and the optimizer."""
        layout = self.network.layout
        self.p, self.g, self.region = layout.views(self.flat_parameters), layout.views(self.gradients), layout.region()

    def __getstate__(self) -> dict:
        """Return the attributes as they are between two steps: copied, for another thread may train meanwhile."""
        with self.lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name not in REBUILT})

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)  # a copied view would be an array of its own, which training does not change
        self.make_context()
        self.make_views()
        self._closed = True

    def __copy__(self) -> Trainer:
        return copy.deepcopy(self)  # two trainers with one set of arrays would disagree about the number of steps

    def __repr__(self) -> str:
        frozen = f", frozen {', '.join(self.frozen)}" if self.frozen else ""
        return f"{self.name}({self.network!r}, {self.loss!r}, {self.optimizer!r}, {self.steps} steps{frozen})"

    def __getattr__(self, name: str):
        """Refuse names of other libraries, with what to write instead."""
        hint = f": {self.instead[name]}" if name in self.instead else ""
        raise AttributeError(f"a {type(self).__name__} has no {name!r}{hint}", name=name, obj=self)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        raise TypeError("a trainer is no function: trainer.predict(x) gives the outputs, trainer.step(x, y) trains")

    def summary(self) -> str:
        """Return a table of the layers, and what trains them."""
        frozen = f"\nfrozen: {', '.join(self.frozen)}" if self.frozen else ""
        return f"{self.network.summary()}\n{self.loss!r}, {self.optimizer!r}, {self.steps} steps{frozen}"

    @property
    def frozen(self) -> list[str]:
        """Names of the layers and arrays that are frozen."""
        return [*self.optimizer.frozen, *(name for name, rate in self.optimizer.rates.items() if not rate)]

    def freeze(self, *layers: str) -> None:
        """Train these layers no more: their parameters and moments stay as they are.

        Running statistics of batch normalisation go on, as in PyTorch. It is `optimizer.frozen`.

        Parameters
        ----------
        *layers : str
            Names as in `named_parameters` or `summary`: "0" for a layer with all inside, "0.W" for an array.

        Raises
        ------
        ValueError
            No parameter has such a name.
        """
        if bad := [name for name in layers if not isinstance(name, str)]:
            raise TypeError(f"freeze takes names of layers, such as freeze('0', '2.W'), given {bad[0]!r:.80}")
        check_rates(self.network, dict.fromkeys(layers, 0.0))
        self.optimizer.frozen = tuple(dict.fromkeys((*self.optimizer.frozen, *layers)))

    def unfreeze(self, *layers: str) -> None:
        """Train these layers again, with the rates that they had, and all that are frozen where none are named.

        Averages of Adam, AdamW and LAMB that were frozen from the first step start at zero late, where nothing
        corrects them: their first steps are several times as long. Make a new trainer (`load_weights`), or begin with a
        lower rate.
        """
        layers = layers or tuple(self.frozen)
        check_rates(self.network, dict.fromkeys(layers, 1.0))
        optimizer, frozen = self.optimizer, []
        for name in optimizer.frozen:  # of a layer of which a part is named, the other arrays stay frozen
            part = any(lies_in(layer, name) for layer in layers)
            frozen += [array for array in self.network.layout.names if lies_in(array, name)] if part else [name]
        optimizer.frozen = tuple(name for name in frozen if not any(lies_in(name, layer) for layer in layers))
        for layer in layers:
            inside = [name for name in optimizer.rates if lies_in(name, layer) and not optimizer.rates[name]]
            optimizer.rates = {**optimizer.rates, **dict.fromkeys(inside, 1.0)}
            if not any(optimizer.rate_of(name) for name in self.network.layout.names if lies_in(name, layer)):
                optimizer.rates = {**optimizer.rates, layer: 1.0}  # a layer around it has the rate 0

    def make_local_network(self, network: Network) -> Network:
        """Return what this process has and computes of the network: here all of it."""
        return network

    def allocate(self) -> None:
        """Allocate parameters, with their initial values, gradients and moments; make the views of them."""
        layout, dtype = self.network.layout, self.network.dtype
        self.flat_parameters, self.gradients = layout.zeros(dtype), layout.zeros(dtype)
        self.slots = {name: layout.zeros(dtype) for name in self.optimizer.slots}
        layout.initialize(self.flat_parameters, self.seed)
        self.make_views()

    def step(
        self,
        x: np.ndarray,
        y: np.ndarray,
        total: int | None = None,
        accumulate: int = 1,
        total_weight: float | None = None,
    ) -> float:
        """Make one optimizer step on this shard (x, y) of a global batch of `total` samples.

        Parameters
        ----------
        x : (N, *in_shape) array
        y : (N,) integers, the classes; or the targets that the loss takes for N outputs
        total : int or None
            Samples of the global batch. None: this shard is the whole batch.
        accumulate : int
            Micro-batches into which the shard is cut. They are computed one after the other and their gradients added:
            less memory for activations, the same step.
        total_weight : float or None
            The sum of `loss.weight(y)` over the global batch, by which the mean divides: for a loss whose rows count
            differently (`ignore_index`, `class_weights`). None: this shard is the whole batch. 0 gives a loss of 0.

        Returns
        -------
        float
            The mean loss over the global batch.

        Raises
        ------
        ValueError
            The global batch is empty; a shard of it may be. `accumulate` is below 1. The numbers of targets and samples
            differ. The total weight is missing.
        NonFiniteLoss
            It is raised before the update: parameters and running statistics are those of the step before.
        """
        with self.lock:
            total = self.size_of_batch(x, y, total, accumulate)
            weighted = self.whole_loss.weighted or total_weight is not None
            if weighted or self.total_weight is not None:
                self.total_weight = self.weight_of_batch(x, y, total, total_weight) if weighted else None
            return self.make_step(x, y, total, accumulate)

    def make_step(self, x: np.ndarray, y: np.ndarray, total: int, accumulate: int) -> float:
        """Make the step of a batch that `step` has checked; return the loss. Strategies define their own."""
        self.begin_step()
        loss, samples, start = 0.0, len(x), 0
        try:
            for i in range(1, accumulate + 1):
                stop = samples * i // accumulate
                loss += self.compute_gradients(x[start:stop], y[start:stop], total, start, i > 1)
                start = stop
        except BaseException:  # such as a label that is no class: forward has moved the running statistics
            self.buffers[:] = self.buffers_before
            raise
        if not math.isfinite(loss):
            raise self.bad_step(loss, [(rows.start, x[rows]) for rows in micro_batches(samples, accumulate)])
        self.end_step(self.mixed_precision is not None and self.mixed_precision.overflowed)
        return loss

    def samples_at_once(self, total: int, accumulate: int) -> set[int]:
        """Return the sizes of the micro-batches of a batch of `total` samples, in all shards."""
        return {rows.stop - rows.start for rows in micro_batches(total, accumulate)}

    def begin_step(self) -> None:
        """Keep the running statistics, which a failing step restores, and reset the overflow flag."""
        if self.buffers.size:
            self.buffers_before[:] = self.buffers
        if self.mixed_precision:
            self.mixed_precision.scale, self.mixed_precision.overflowed = self.loss_scale.scale, False

    def size_of_batch(self, x: np.ndarray, y: np.ndarray, total: int | None, accumulate: int) -> int:
        """Check a batch; return the number of samples of the global batch, len(x) if total is None.

        Raises
        ------
        TypeError, ValueError
            The shard is larger than its batch, the batch is empty, there are no micro-batches, or the numbers of
            targets and samples differ.
        """
        if not (_is_batch(x) and _is_batch(y)):
            raise TypeError(
                f"step: x and y are batches, given x = {x!r:.80} and y = {y!r:.80}: of one sample they are x[None] and "
                "np.asarray([y])"
            )
        samples = len(x)
        total = samples if total is None else total
        if type(accumulate) is not int or accumulate < 1:  # as most often, and at each step
            SIZE("step: accumulate", accumulate)
        if not isinstance(total, (int, np.integer)):
            weight = ": a sum of loss.weight(y) is the argument total_weight" if isinstance(total, float) else ""
            raise TypeError(f"step: total is the number of samples in the global batch, given {total!r:.80}{weight}")
        if len(y) != samples:
            raise ValueError(f"step {self.steps} of {self.network.name}: {samples} samples but {len(y)} targets")
        if not total >= max(1, samples):
            raise ValueError(
                f"step {self.steps} of {self.network.name}: a shard of {samples} samples in a batch of {total}; "
                "a batch needs at least one"
            )
        return total

    def weight_of_batch(self, x: np.ndarray, y: np.ndarray, total: int, total_weight: float | None) -> float | None:
        """Return the sum of the rows' weights, which divides the losses; None where all rows count alike.

        Raises
        ------
        TypeError, ValueError
            total_weight is no weight; or it is None, and this shard is not the whole batch.
        """
        if not self.whole_loss.weighted:
            if total_weight is not None:
                raise ValueError(f"step: the rows of {self.whole_loss!r} count alike: leave out total_weight")
            return None
        if total_weight is None:
            if len(x) == total:
                total_weight = self.weight(y)
            elif len(x):
                raise ValueError(
                    f"step {self.steps}: the rows of {self.whole_loss!r} count differently, and this shard has "
                    f"{len(x)} of {total} samples: give total_weight, the sum of loss.weight(y) over the global batch"
                )
            else:
                return None
        if not isinstance(total_weight, (int, float, np.number)):
            raise TypeError(f"step: total_weight is the sum of loss.weight(y), given {total_weight!r:.80}")
        if not 0 <= total_weight < math.inf:
            raise ValueError(f"step: total_weight must be in [0, inf), given {total_weight}")
        if not total_weight and len(x) and (own := self.weight(y)):
            raise ValueError(
                f"step: total_weight is 0, but the targets of this shard weigh {own}: give the sum of loss.weight(y) "
                "over the global batch"
            )
        return float(total_weight)

    def mean_over(self, total: int) -> float:
        """Return the divisor of a step's sum of losses, for a global batch of `total` samples."""
        if self.total_weight is None:
            return total * self.loss_rows
        return self.total_weight or 1.0  # where all rows are ignored, the sum of their losses is 0, too

    def weight_in_epoch(self, total: int) -> float:
        """Return the weight of a step's loss in the mean over an epoch: its samples, or its total weight."""
        return total if self.total_weight is None else self.total_weight

    def compute_gradients(self, x: np.ndarray, y: np.ndarray, total: int, first: int = 0, accumulate=False) -> float:
        """Compute the gradients of these samples' part of the mean loss; return that part of the loss.

        `first` is the index of the first sample in the global batch. `accumulate`: add to the gradients, not overwrite.
        """
        batch = self.ctx.micro_batch
        batch.training, batch.step, batch.start, batch.accumulate = True, self.steps, first, accumulate
        batch.total = total
        if not len(x) and not self.computes_empty_shards:
            if not accumulate:
                self.gradients[:] = 0
            return 0.0
        z, saved = self.network.forward(self.p, x, self.ctx)
        result = self.loss(z, y, self.mean_over(total), self.ctx)
        if not self.loss_checked:  # in the first step: once right, it stays so
            check_loss_result(self.loss, result, z)
            self.loss_checked = True
        loss, gz = result
        self.network.backward(self.p, self.g, gz, saved, self.ctx)
        return loss

    def end_step(self, overflowed: bool = False) -> None:
        """Update the parameters, unless a value overflowed float16, and count the step."""
        try:
            if overflowed:
                self.buffers[:] = self.buffers_before
                self.loss_scale.count_overflow(self.steps)
            else:
                self.update()
        except BaseException:  # such as a gradient norm that is not finite: nothing was updated
            self.buffers[:] = self.buffers_before
            raise
        self.steps += 1
        if self.loss_scale and not overflowed:
            self.loss_scale.count_update()

    def loss_scale_record(self) -> dict[str, float]:
        """Return loss_scale and skipped_steps for an epoch's record; empty without mixed precision."""
        scale = self.loss_scale
        return {"loss_scale": scale.scale, "skipped_steps": scale.skipped} if scale else {}

    def update(self) -> None:
        """Run the optimizer with the gradients of the whole batch."""
        self.optimizer.update(self.flat_parameters, self.gradients, self.slots, self.updates, self.region)

    @property
    def updates(self) -> int:
        """Steps in which the optimizer ran."""
        return self.steps - self.loss_scale.skipped if self.loss_scale else self.steps

    def rescale(self, slot: str, factor: float) -> None:
        """Multiply a slot of the optimizer, if it has one of that name."""
        if slot in self.slots:
            self.slots[slot] *= factor

    def bad_step(self, loss: float, computed: list[tuple[int, np.ndarray]]) -> NonFiniteLoss:
        """Return the error for a loss that is not finite; the running statistics are those before the step again.

        `computed`: of each micro-batch, the index of its first sample in the global batch, and its samples.
        """
        self.buffers[:] = self.buffers_before
        bad = self.first_bad(computed)
        self.buffers[:] = self.buffers_before  # the forward passes have moved them
        return NonFiniteLoss(
            f"step {self.steps}: the loss is {loss}; the first value that is not finite is in "
            f"{bad or 'the loss itself'}. The parameters were not updated. "
            "A lower learning rate, clipping or float64 may help.",
            bad.samples if bad else (),
        )

    def first_bad(self, computed: list[tuple[int, np.ndarray]]) -> NotFinite | None:
        """Return where the first value that is not finite appears: a parameter, the input, a layer's output."""
        for name, array in reversed(list(self.network.layout.items(self.flat_parameters))):
            if not np.isfinite(array).all():
                return self.bad_parameter(name)
        return min(filter(None, map(self.check_forward, computed)), key=lambda bad: bad.depth, default=None)

    def bad_parameter(self, name: str) -> NotFinite:
        """Return the finding for a parameter that is not finite."""
        when = f"it was updated in step {self.steps - 1}" if self.steps else "no step has updated it"
        return NotFinite(-1, f"parameter {name} ({when})", [])

    def check_forward(self, micro: tuple[int, np.ndarray]) -> NotFinite | None:
        """Return where the first value that is not finite appears in the forward pass of a micro-batch."""
        self.ctx.micro_batch.start, x = micro
        return self.local_network.first_bad(self.p, x, self.ctx) if len(x) else None

    def predict(self, x: np.ndarray, batch: int = BATCH) -> np.ndarray:
        """Return the network's outputs (N, *out_shape) for samples (N, *in_shape), in evaluation mode.

        Parameters
        ----------
        x : array or list
            Floats of any dtype, or ids; a single sample is x[None].
        batch : int
            Samples computed at once.

        Raises
        ------
        TypeError, ShapeError
            x is no array of samples of this network; the message says how to make one.
        """
        with self.lock:
            return predict_in_batches(self.network, self.outputs, x, batch)

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs for one batch of the network's dtype, in memory that the next pass may overwrite."""
        self.ctx.micro_batch.training = False
        return self.network.forward(self.p, x, self.ctx)[0]

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """Return {"loss", "accuracy"} over samples and their targets, as `nn.evaluate` does for any data.

        Examples
        --------
        >>> import nn, numpy as np
        >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 2), (2,)), nn.CrossEntropyLoss(), nn.SGD())
        >>> sorted(trainer.evaluate(np.eye(2), [0, 1]))
        ['accuracy', 'loss']
        """
        return self.scores(batches((x, y), self, False, "evaluate"))

    def scores(self, loader: Any) -> dict[str, float]:
        """Return the mean loss and each of `metrics` over the batches of a loader, this trainer's shards of all."""
        with self.lock:  # else another thread could let other metrics be measured meanwhile
            sums = self.no_scores()
            for x, y, _ in loader.epoch(0):
                sums += self.sum_scores(x, y)
            return self.means(self.sum(sums))

    def means(self, sums: np.ndarray) -> dict[str, float]:
        """Return the mean loss and each of `metrics` by name, from their sums over all samples."""
        loss, weight, *values = map(float, sums)
        scores = {"loss": loss / weight if weight else math.nan}
        for metric, total, count in zip(self.metrics, values[::2], values[1::2], strict=True):
            if count or not math.isnan(total):  # else it does not apply
                scores[metric.name] = metric.result(total / count) if count else math.nan
        return scores

    def sum_scores(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return sums over a batch, float64: [loss, weight, then sum and count of the values of each of `metrics`].

        The mean loss is loss / weight. Rows that the loss ignores are left out. The sum of the loss's own metric is NaN
        where it does not apply, as accuracy where targets are no classes.
        """
        with self.lock:
            return self.evaluate_outputs(self.outputs(x), y) if len(x) else self.no_scores()

    def evaluate_outputs(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the sums of `sum_scores` for outputs z."""
        loss, _ = self.loss(z, y, 1, self.ctx)
        sums = [loss, self.weight(y)]
        mask = self.whole_loss.mask(y)
        if mask is not None:
            z, y = z[mask], y[mask]
        for metric in self.metrics:
            measured = type(metric) is not type(self.whole_loss.metric) or metric.applies(z, y)
            sums += metric.sums(z, y) if measured else (math.nan, 0)
        return np.array(sums, np.float64)

    def no_scores(self) -> np.ndarray:
        """Return the sums of `sum_scores` over no samples."""
        return np.zeros(2 + 2 * len(self.metrics))

    def weight(self, y: np.ndarray) -> float:
        """Return the weight of these targets in a mean of losses: their rows, weighted as the loss says."""
        return self.whole_loss.weight(y) if self.whole_loss.weighted else float(len(y) * self.loss_rows)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all shards: here there is one."""
        return values

    def synchronize(self, loss: float) -> float:
        """Synchronize shards of a local-update method at the end of an epoch; return their mean loss. Here is one."""
        return loss

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all that training continues from, by name (see state.py): views, not copies."""
        layout = self.network.layout
        state = {f"param/{name}": array for name, array in layout.items(self.flat_parameters)}
        for slot, buffer in self.slots.items():
            state |= {f"optimizer/{slot}/{name}": array for name, array in layout.items(buffer)}
        return state | dict(self.replicated_items()) | {"steps": np.array(self.steps)}

    def parameters(self) -> Iterator[np.ndarray]:
        """Iterate over the arrays of parameters, views in backward completion order (last layer first)."""
        yield from (array for _, array in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over (name, array), such as ("0.W", the first layer's weights): views, which may be written into."""
        yield from self.local_network.layout.items(self.flat_parameters)

    def replicated_items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over (name, array) of the state that every process has: running statistics and the loss scale."""
        yield from self.buffer_items()
        if self.loss_scale:
            yield "loss_scale", self.loss_scale.array

    def buffer_items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over (name, array) of the running statistics."""
        yield from ((f"state/{name}", array) for name, array in self.local_network.buffer_layout.items(self.buffers))

    def state_items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over the items of `state_dict`, "steps" first, so that not all arrays need be in memory at once.

        An array is valid until the next one is requested. Processes that train together iterate together; only the
        arrays of the writer count.
        """
        state = self.state_dict()
        yield "steps", state.pop("steps")
        yield from state.items()

    def checkpoint_writer(self, checkpoints: Checkpoints, background: bool = False) -> CheckpointWriter:
        """Return what writes checkpoints of this trainer; `background`: on a thread, while training goes on."""
        return CheckpointWriter(self, checkpoints, background)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy a `state_dict` into this trainer.

        Raises
        ------
        ValueError
            An entry is missing, unknown, or of another shape or dtype: which, and what was expected.
        """
        with self.lock:
            own = self.state_dict()
            if problem := check_state({name: (array.shape, array.dtype) for name, array in own.items()}, state):
                raise ValueError(problem)
            for name, array in own.items():
                array[...] = state[name]
            self.steps = int(state["steps"])

    def load_weights(self, weights: Any) -> list[str]:
        """Start from the weights of a trained network, for example to fine-tune it; moments and steps start at 0.

        Parameters
        ----------
        weights : what `nn.load` returns, a trainer of one process, or the mapping that its state_dict returns
            Parameters and running statistics are copied where name and shape agree. All others, such as those of a new
            last layer, get initial values.

        Returns
        -------
        list of str
            Names of the parameters that got initial values.

        Raises
        ------
        ValueError
            No parameter fits.
        """
        state, new = fitting_weights(self.network, weights, self.optimizer, self.seed)
        self.load_state_dict(state)
        return new

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return a copy of the state that this process has, for `restore`."""
        with self.lock:
            return {name: array.copy() for name, array in self.state_dict().items()}

    def restore(self, snapshot: dict[str, np.ndarray]) -> None:
        """Go back to a snapshot of this trainer."""
        self.load_state_dict(snapshot)

    def digest(self) -> str:
        """Return the SHA-256 of all parameters, in the order of the layout: the same for every strategy."""
        return hashlib.sha256(self.flat_parameters).hexdigest()

    def memory(self) -> dict[str, int]:
        """Return the bytes that this process has allocated, by purpose."""
        moments = sum(slot.nbytes for slot in self.slots.values())
        buffers = {"parameters": self.flat_parameters.nbytes, "gradients": self.gradients.nbytes, "moments": moments}
        return buffers | {"in transit": 0}

    def formula(self) -> dict[str, float]:
        """Return the bytes of parameters, gradients and moments that `memory` should report, without padding."""
        psi = self.network.layout.count * self.network.dtype.itemsize
        return {"parameters": psi, "gradients": psi, "moments": psi * len(self.optimizer.slots)}

    def run_on_writer(self, write: Callable[[Trainer], None]) -> None:
        """Call write(self) in the process that writes files; where it fails, all that train together raise."""
        write(self)

    def close(self) -> None:
        """Free what this trainer holds beside its arrays: here nothing."""


def _is_batch(array: Any) -> bool:
    """Return whether something has samples: an array with axes, or a sequence. None and numbers have none."""
    return array.ndim > 0 if isinstance(array, np.ndarray) else hasattr(array, "__len__")


def check_parts(network: Network, loss: Loss, optimizer: Optimizer, seed: int, searches: bool = False) -> None:
    """Refuse arguments of another type than a trainer takes, classes in place of instances among them.

    `searches`: whether this trainer can evaluate a batch several times in a step.
    """
    for name, value, kind, example in (
        ("network", network, Network, "nn.Network(layers, in_shape)"),
        ("loss", loss, Loss, "nn.CrossEntropyLoss()"),
        ("optimizer", optimizer, Optimizer, "nn.SGD(lr=0.1)"),
    ):
        if not isinstance(value, kind):
            is_class = isinstance(value, type) and issubclass(value, kind)
            hint = "the class itself: call it" if is_class else "it is none"
            article = "an" if name == "optimizer" else "a"
            raise TypeError(f"a trainer takes {article} {name}, such as {example}, given {value!r:.80} ({hint})")
    if optimizer.searches and not searches:
        raise TypeError(
            f"{type(optimizer).__name__} evaluates a batch several times in a step: train with parallel.Sandblaster, "
            "on one process too, or minimise with nn.LBFGS"
        )
    check_rates(network, {**optimizer.rates, **dict.fromkeys(optimizer.frozen, 0.0)})
    COUNT("a trainer's seed", seed)


def check_loss_result(loss: Loss, result: tuple[float, np.ndarray], z: np.ndarray) -> None:
    """Refuse what a loss has returned, unless it is one number and a gradient of the outputs' shape and dtype."""
    if type(result) is not tuple or len(result) != 2:
        raise TypeError(f"{loss!r}: it must return a pair, the value and its gradient, given {result!r:.80}")
    value, gz = result
    if np.ndim(value):
        raise TypeError(f"{loss!r}: the value must be one number, given shape {np.shape(value)}: sum over all samples")
    if np.shape(gz) != z.shape:
        raise ShapeError(
            f"{loss!r}: the gradient must have the shape of the outputs, {z.shape}, given {np.shape(gz)}: are the "
            "targets of that shape? NumPy makes (N, N) of (N, 1) and (N,)"
        )
    if gz.dtype != z.dtype:
        raise TypeError(f"{loss!r}: the gradient of {z.dtype} outputs is {gz.dtype}: keep the dtype of z")


def check_rates(network: Network, rates: Mapping[str, float]) -> None:
    """Refuse factors of the learning rate for layers that the network lacks, or that have no parameters."""
    for name in rates:
        if name and not any(f"{known}.".startswith(f"{name}.") for known in network.layout.names):
            shown = ", ".join(list(network.layout.names)[::-1][:8])
            raise ValueError(
                f"rates: no parameter of {network.name} is called {name!r:.80}, or lies in a layer of that name; "
                f"parameters are {shown}{', ...' * (len(network.layout.names) > 8)}"
            )


def micro_batches(samples: int, count: int) -> list[slice]:
    """Return `count` slices of a batch, of nearly equal sizes; some are empty where there are fewer samples."""
    return [slice(samples * i // count, samples * (i + 1) // count) for i in range(count)]
