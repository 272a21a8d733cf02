"""Serial: the trainer of one process, which the strategies of `parallel` build on.

A trainer owns the buffers (parameters, gradients, the optimizer's moments, running statistics) and makes one optimizer
step at a time:

    trainer = Serial(network, CrossEntropyLoss(), SGD(lr=0.1))
    loss = trainer.step(x, y)

    step    compute_gradients   forward, loss, backward of this process's samples
            combine             with those of other processes: nothing to do here
            update              the optimizer's, unless the loss is not finite

A strategy overrides one or the other, and where buffers live (`allocate`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        """One optimizer step on this shard (x, y) of a global batch of `total` samples.

        Parameters
        ----------
        x : (N, *in_shape) array
        y : (N,) integers, the classes; or what else the loss compares N outputs with
        total : int or None
            None where this shard is the whole batch.

        Returns
        -------
        float
            The mean loss over the global batch.

        Raises
        ------
        ValueError
            The global batch is empty; a shard of it may be.
        NonFiniteLoss
            Before the update, so parameters and running statistics are those of the step before.
        """
        total = len(x) if total is None else total
        mine = self.seen() + len(x)
        try:
            if total < max(1, mine):
                raise ValueError(
                    f"step {self.steps} of {self.network.name}: a shard of {mine} samples in a batch of {total}; "
                    "a batch needs at least one"
                )
            if not self.parts:
                self.statistics_before[:] = self.statistics
            loss = self.combine(self.loss_so_far + self.compute_gradients(x, y, total))
        finally:
            parts = [*self.forget(), x]
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
        try:
            self.loss_so_far += self.compute_gradients(x, y, total)
        except BaseException:
            self.forget()
            raise
        self.parts.append(x)
        self.run.common.accumulate = True

    def forget(self) -> list[np.ndarray]:
        """This batch has ended, or failed: the next one begins anew. Returns what `accumulate` was given of it."""
        parts, self.parts = self.parts, []
        self.loss_so_far, self.run.common.accumulate = 0.0, False
        return parts

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
        """The network's outputs (N, *out_shape) for a batch, in evaluation mode."""
        self.run.common.training = False
        return self.network.forward(self.p, x, self.run)[0]

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Sums over a batch: [loss, correct, outputs], (3,) float64.

        Correct counts outputs whose largest entry is y; it is NaN where targets are no classes.
        """
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
