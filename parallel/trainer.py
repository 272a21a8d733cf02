"""The trainer of many ranks, made of three parts: what computes, what brings ranks together, and who they are.

    trainer = DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync)

forward_backward   what this rank computes of a step (passes/): all its samples, micro-batches, or virtual shards
sync               how the gradients of ranks are summed (sync/): it owns the buffers
mesh               which ranks there are (mesh.py)

A strategy (strategies/) chooses the parts. Each rank computes the gradient of its samples, divided by the size of the
**global** batch, so that the sum over ranks is the gradient of the batch, uneven parts included. What a step is, is
`DistributedTrainer.make_step`, from top to bottom.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping
from weakref import WeakMethod

import numpy as np

from nn.arguments import SIZE, Optional
from nn.core.network import Network, NotFinite
from nn.data import Data
from nn.losses import Loss
from nn.optim.optimizers import SGD, Optimizer
from nn.training.checkpoints import Checkpoints
from nn.training.fit import Callback
from nn.training.prediction import as_samples
from nn.training.trainer import Trainer, check_parts
from parallel.axis import DIVIDE_ARRAYS, IN_LAYERS
from parallel.mesh import Mesh, Ranks, ReplicaError, agree
from parallel.passes.forward_backward import ForwardBackward, Samples
from parallel.run_trainer import RunTrainer
from parallel.state.checkpoint_writer import RanksCheckpointWriter
from parallel.state.fragments import Fragment
from parallel.state.placed import PlacedArray
from parallel.state.splits import same_along, split_of
from parallel.state.table import StateTable
from parallel.sync.base import GradientSync
from parallel.sync.step_result import AgreementCode, StepResult, checksum, disagreement

__all__ = ["CheckReplicas", "DistributedTrainer", "ReplicaError", "agree", "data_facts"]


class DistributedTrainer(RunTrainer):
    """`Trainer` on many ranks.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks.
    mesh : Mesh
    forward_backward : ForwardBackward or one of its kind
    sync : GradientSync
        Both not started yet.
    name : str
        For the log.

    Raises
    ------
    ReplicaError
        If ranks were given different networks, losses or optimizers.
    ValueError
        Mixed precision with local updates.
    """

    def __init__(
        self,
        network: Network,
        loss: Loss,
        optimizer: Optimizer,
        mesh: Mesh,
        forward_backward: ForwardBackward,
        sync: GradientSync,
        seed: int = 0,
        name: str = "DistributedTrainer",
    ):
        check_parts(network, loss, optimizer, seed, self.searches)
        self.mesh, self.forward_backward, self.sync, self.name, self.closed = mesh, forward_backward, sync, name, False
        self.communicator, self.is_writer = mesh.communicator, mesh.rank == 0
        mesh.agree(facts(network, loss, optimizer, seed))
        if network.mixed and sync.local_update:
            raise ValueError(
                f"{name}: ranks that make local updates do not skip a step together: build it without mixed"
            )
        super().__init__(network, loss, optimizer, seed)

    def make_local_network(self, network):
        return self.forward_backward.make_local_network(network, self.mesh)

    def allocate(self) -> None:
        mesh, context = self.mesh, self.ctx.network_context
        if not self.sync.local_update:  # else ranks make steps of their own
            layers = [layer for _, layer, _, _ in self.network.layers()]
            self.computes_empty_shards |= any(layer.updates_without_samples for layer in layers)
        self.suspects: list[tuple[int, np.ndarray]] = []  # what was computed when a loss was not finite
        self.forward_backward.start(mesh, self.network)
        self.sync.start(
            mesh, self.forward_backward, self.local_network, self.network, self.optimizer, self.buffers, self.seed
        )
        self.shard, self.p, self.g = self.forward_backward.shard, self.sync.p, self.sync.g
        context.before_layer = self.sync.before_layer
        context.groups |= {name: Ranks(ranks) for name in IN_LAYERS if (ranks := getattr(mesh, name))}
        self.forward_backward.bind(self)
        self.step_count = np.zeros((), int)  # `steps`, for the state
        first = self.forward_backward.peers is None or self.forward_backward.peers.rank == 0
        slots = self.optimizer.slots
        self.table = StateTable(mesh, self.network, self.local_network, slots, WeakMethod(self.placed), first)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{self.name}: a trainer on ranks shares memory and messages with others, so it cannot be copied or "
            "pickled: another one takes its state_dict() with load_state_dict; alone() is a copy of one process"
        )

    flat_parameters = property(lambda self: self.sync.parameters)
    gradients = property(lambda self: self.sync.gradients)
    slots = property(lambda self: self.sync.slots)
    phases = property(lambda self: self.sync.phases + self.forward_backward.phases)
    # With other axes activations travel, too:
    sends = property(lambda self: self.sync.sends if self.mesh.data_group is self.mesh else "")
    notes = property(lambda self: self.sync.notes)
    local_update = property(lambda self: self.sync.local_update)
    scattered = property(lambda self: self.table.scattered)
    on_disk = property(lambda self: self.sync.offload is not None)

    # ------------------------------------------------------------------------------------------------ a step

    def make_step(self, x, y, total, accumulate):
        """As for Trainer (collective).

        Raises
        ------
        ValueError
            Ranks were given different sizes of the global batch, or have different settings of their
            optimizers, which they find in the message with the loss.
        """
        self.sync.resume()
        self.begin_step()
        context, sync, computed, loss = self.ctx.network_context, self.sync, [], 0.0
        micro_batches = self.forward_backward.divide(len(x), total, accumulate)
        context.product_hooks = sync.begin_step(self.updates, len(x), total, accumulate)
        try:
            for micro in micro_batches:
                samples, targets = self.forward_backward.select_samples(x, y, micro)
                computed.append((micro.first, samples))
                loss = self.compute_gradients(samples, targets, total, micro, loss if micro.accumulate else 0.0)
            result = sync.finish_step()
        except BaseException:  # ranks that survive the death of another begin this step again
            self.buffers[:] = self.buffers_before
            raise
        finally:
            context.on_gradients_ready, context.product_hooks = None, {}
            if sync.bad and not self.suspects:
                self.suspects = computed
        loss, overflowed = self.read(result, total)
        if not math.isfinite(loss):
            suspects, self.suspects = self.suspects or computed, []
            raise self.bad_step(loss, suspects)
        if overflowed:
            sync.barrier("the step that is skipped")  # others may still read what the next one writes
        self.end_step(overflowed)  # updates; a step counts once nothing can fail: ranks that survive begin from it
        return loss

    def compute_gradients(self, x: np.ndarray, y: np.ndarray, total: int, micro: Samples, before: float = 0.0) -> float:
        """Gradients of a micro-batch; returns its part of the mean loss and that of those `before` in this addend."""
        sys.audit("ringprop.compute_gradients", self)
        batch, sync = self.ctx.micro_batch, self.sync
        if self.buffers.size and not micro.accumulate:
            self.buffers[:] = self.buffers_before
        batch.step, batch.start, batch.accumulate = self.steps, micro.first, micro.accumulate and sync.adds_up
        batch.total = total
        loss = self.forward_backward.compute(self, x, y, total, micro, before)
        if micro.addend is not None:
            if self.mixed_precision and self.mixed_precision.overflowed:
                sync.message.set_overflow()
            sync.end_addend()
        return loss

    def set_loss(self, loss: float, total: int, micro: Samples) -> None:
        """The loss of an addend, where one ends: as soon as it is known."""
        if micro.addend is not None:
            self.sync.set_loss(loss, total)

    def forward(self, x: np.ndarray, training: bool, micro: Samples | None = None) -> tuple[np.ndarray, object]:
        """(outputs, what backward needs); None for that where there are no samples, and none has to wait for others."""
        network = self.local_network
        self.ctx.micro_batch.training = training
        self.ctx.network_context.on_gradients_ready = self.sync.begin_pass(micro)
        if len(x) or self.forward_backward.asks_others or (training and self.computes_empty_shards):
            return network.forward(self.p, x, self.ctx)
        self.sync.skip_pass(micro)
        return np.empty((0, *(network.training_shape if training else network.out_shape)), network.dtype), None

    def backward(self, gz: np.ndarray, saved: object) -> None:
        """Gradients of what went forward."""
        if saved is not None:
            self.local_network.backward(self.p, self.g, gz, saved, self.ctx)
            if ready := self.ctx.network_context.on_gradients_ready:
                ready(self.local_network.layout.size)  # a root that is no Sequential calls no hook itself

    def read(self, result: StepResult, total: int) -> tuple[float, bool]:
        """(loss of the batch, whether float16 overflowed) from the sums.

        All ranks are here, and refuse a batch of which they were given different sizes.
        """
        sys.audit("ringprop.read_sums", self)
        loss, agreed, overflowed, buffers = result
        mesh = self.mesh
        if mesh.model and not self.sync.local_update:  # of the ranks that have one network together, one knows the loss
            code = AgreementCode(mesh.model.size, np.float64)
            mine = code.encode(total, checksum(self.optimizer))
            sums = np.array([loss if self.forward_backward.owns_loss else 0.0, not agreed, overflowed, *mine])
            mesh.sum_model(sums)
            loss, overflowed = float(sums[0]), sums[2] > 0
            agreed = not sums[1] and code.agree(sums[3:])
        if not agreed:
            self.buffers[:] = self.buffers_before
            raise ValueError(
                disagreement(self.steps, *zip(*mesh.allgather((total, repr(self.optimizer))), strict=True))
            )
        if buffers is not None:
            self.buffers[:] = buffers
        return loss, overflowed

    def check_open(self) -> None:
        """Refuse what needs other ranks, once what was shared with them has been freed."""
        if self.closed:
            raise RuntimeError(
                f"{self.name} is closed: it neither trains, nor evaluates, nor gives its state any more; close it last"
            )

    def size_of_batch(self, x: np.ndarray, y: np.ndarray, total: int | None, accumulate: int) -> int:
        """As for Trainer; refuses a closed trainer too, and a rank that is not given the size of the global batch."""
        self.check_open()
        if total is None and self.shard[1] > 1:
            raise ValueError(
                f"step {self.steps} on {self.shard[1]} ranks: step(x, y, total) needs the number of samples that "
                "all ranks have together, as a Loader gives it"
            )
        return super().size_of_batch(x, y, total, accumulate)

    def weight_of_batch(self, x, y, total, total_weight):
        """As for Trainer (collective, where the loss is weighted): all ranks refuse what one of them refuses."""
        if not self.whole_loss.weighted or self.local_update:
            return super().weight_of_batch(x, y, total, total_weight)
        weight = problem = None
        try:
            weight = super().weight_of_batch(x, y, total, total_weight)
        except (TypeError, ValueError) as error:
            problem = error
        weights, problems = zip(*self.mesh.allgather((weight, problem and str(problem))), strict=True)
        if problem:
            raise problem
        for rank, other in enumerate(problems):
            if other:
                raise ValueError(f"rank {rank}: {other}")
        if len({each for each in weights if each is not None}) > 1:
            listed = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(weights))
            raise ValueError(
                f"step {self.steps}: total_weight differs: {listed}; it is the sum of loss.weight(y) over the global "
                "batch, the same on all ranks"
            )
        return weight

    def update(self) -> None:
        sys.audit("ringprop.update", self)
        self.sync.update()

    def rescale(self, slot, factor):
        self.check_open()
        self.sync.rescale(slot, factor)

    # ------------------------------------------------------------------------------------------------ a bad step

    def bad_step(self, loss, computed):
        error = super().bad_step(loss, computed)
        if self.local_update:  # found steps later: of which batch the samples are is not known
            error.samples = []
        return error

    def first_bad(self, computed):
        """Every rank looks at its own samples; all return one finding: an input comes before what is made of it."""
        bad = {name for names in self.mesh.allgather(self.table.not_finite()) for name in names}
        for name in reversed(self.network.layout.specs):
            if name in bad:
                return self.bad_parameter(name)
        if self.mesh.sizes["pipeline"] > 1:
            return self.forward_backward.first_bad(self, computed)
        # In training, ranks that share statistics would wait for one that has found something and looks no further.
        self.ctx.micro_batch.training = not self.computes_empty_shards
        mine = min(
            filter(None, (self.forward_backward.look(self, micro) for micro in computed)),
            key=lambda bad: bad.depth,
            default=None,
        )
        found = [(bad.depth, rank, bad) for rank, bad in enumerate(self.mesh.allgather(mine)) if bad]
        if not found:
            return None
        _, rank, bad = min(found, key=lambda entry: entry[:2])
        return bad._replace(where=f"{bad.where} on rank {rank}") if self.mesh.size > 1 else bad

    def check_forward(self, micro) -> NotFinite | None:
        self.sync.begin_pass(None)
        bad = super().check_forward(micro)
        if not len(micro[1]) or (bad and bad.depth == 0):  # no forward pass was made
            self.sync.skip_pass(None) if not self.forward_backward.asks_others else self.forward(micro[1], False)
        return bad

    # ------------------------------------------------------------------------------------------------ synchronizing

    def show_synchronized(self) -> None:
        """Show what `synchronize` would give, until the next step, as evaluation and every access to the state do."""
        self.check_open()
        self._refuse_bad(self.sync.show_synchronized())

    def _refuse_bad(self, bad: bool) -> None:
        """Raise NonFiniteLoss, where ranks with local updates have found when they synchronized that a loss was bad."""
        if bad:
            suspects, self.suspects = self.suspects, []
            raise self.bad_step(math.nan, suspects)

    def synchronize(self, loss=0.0):
        """As for Trainer (collective): ranks with local updates get the same parameters. This is a part of training.

        Raises
        ------
        NonFiniteLoss
            On all ranks, if one had a loss that is not finite since they were last synchronized.
        """
        self.check_open()
        if not self.sync.local_update:
            return loss
        self._refuse_bad(self.sync.synchronize())
        mesh = self.mesh
        if mesh.size == mesh.model_size:  # all ranks of one network have this loss
            return loss + self.forward_backward.loss_in_flight()
        return float(self.sum([loss if mesh.index is not None else 0.0])[0]) / (mesh.count * mesh.model_size)

    def epoch_record(self) -> dict[str, object]:
        """Return what local-update ranks have counted in an epoch, for its record (collective)."""
        return self.sync.epoch_record()

    # ------------------------------------------------------------------------------------------------ evaluation

    def samples_at_once(self, total, accumulate):
        return self.forward_backward.samples_at_once(total, accumulate)

    def predict(self, x, batch=None):
        """As for Trainer (collective), all samples at once where `batch` is None; None for the workers of a master."""
        Optional(SIZE)("predict: batch", batch)
        x = as_samples(self.network, x)
        size = batch or max(1, len(x))
        with self.lock:
            count = max(1, -(-len(x) // size))
            if batch:  # a rank with fewer samples takes part in the batches of the others
                self.show_synchronized()  # first: a server on this rank answers nobody in the next call
                count = max(self.mesh.allgather(count))
            batches = (self.outputs(x[i * size : (i + 1) * size]) for i in range(count))
            outputs = [y if y is None else y.copy() for y in batches]
        return outputs[0] if count == 1 or outputs[0] is None else np.concatenate(outputs)

    def outputs(self, x):
        """As for Trainer (collective)."""
        self.show_synchronized()
        return self.forward_backward.predict(self, x)

    def sum_scores(self, x, y):
        """As for Trainer (collective)."""
        sys.audit("ringprop.sum_scores", self)
        with self.lock:
            self.show_synchronized()
            return self.forward_backward.sum_scores(self, x, y)

    def sum(self, values):
        total = np.array(values, np.float64)
        self.mesh.sum_all(total)
        return total

    # ------------------------------------------------------------------------------------------------ the state

    def summary(self):
        return f"{super().summary()}\n{self.table.describe()}"

    def placed(self) -> Iterator[PlacedArray]:
        """All arrays that this rank has: what `table` is about."""
        self.step_count[...] = self.steps
        yield PlacedArray("steps", "", self.step_count)
        if self.loss_scale:
            yield PlacedArray("loss_scale", "", self.loss_scale.array)
        yield from self.sync.placed()
        if self.mesh.index is not None:
            yield PlacedArray("state", "", self.buffers, self.local_network.buffer_layout)

    def state_items(self) -> Iterator[tuple[str, np.ndarray]]:
        self.show_synchronized()
        yield from self.table.items()

    def fragments(self) -> Iterator[Fragment]:
        """What this rank writes of a checkpoint that all write together (collective): together, each element once."""
        self.show_synchronized()
        yield from self.table.fragments()

    def named_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """As for Trainer.

        Raises
        ------
        ValueError
            Several ranks have parts of the arrays: `state_dict` gathers these.
        """
        if self.scattered:
            raise ValueError(f"{self.name}: ranks have parts of the parameters; state_dict() gathers them on rank 0")
        yield from super().named_parameters()

    def checkpoint_writer(self, checkpoints: Checkpoints, background: bool = False) -> RanksCheckpointWriter:
        return RanksCheckpointWriter(self, checkpoints, background)

    def run_on_writer(self, write) -> None:
        """As for Trainer (collective)."""
        error = None
        try:
            if self.is_writer:
                write(self)
            else:
                for _ in self.state_items():  # sharded strategies gather
                    pass
        except (OSError, TypeError, ValueError) as failure:
            error = failure
        if self.sum([error is not None])[0]:
            raise error or OSError("the first rank could not write the network")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all that training continues from; where it is gathered, all of it on rank 0, nothing elsewhere."""
        mine = self.is_writer or not self.scattered
        return {name: array.copy() for name, array in self.state_items() if mine}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state_dict` of any strategy returned; rank 0's counts (collective)."""
        self.check_open()
        sync = self.sync
        sync.before_load()
        sync.barrier("what was there before a state is loaded")
        anew = self.table.load(state)
        sync.barrier("the state that is loaded")
        self._loaded(anew)

    def _loaded(self, anew=()) -> None:
        """The arrays have the values of another state."""
        self.steps = int(self.step_count)
        self.sync.loaded(self.steps, anew)
        self.sync.reset()

    def snapshot(self) -> dict[str, np.ndarray]:
        self.show_synchronized()
        return self.table.snapshot()

    def restore(self, snapshot) -> None:
        self.check_open()
        self.sync.before_load()
        self.sync.barrier("what was there before a snapshot is restored")
        self.table.restore(snapshot)
        self.sync.barrier("the snapshot that is restored")
        self._loaded()

    def digest(self):
        self.show_synchronized()
        sha = hashlib.sha256()
        self.table.digest(sha)
        return self.mesh.bcast(sha.hexdigest())

    def check_replicas(self) -> None:
        """Compare what all ranks should hold alike, bit for bit, by hashes.

        Raises
        ------
        ReplicaError
            On every rank: the first parameter that differs, and on which ranks.
        """
        self.show_synchronized()
        if self.mesh.data is None:  # a rank that computes no gradients
            return
        replicated = {each.name.removeprefix("param/"): each for each in self.table.replicated()}
        mine = {name: _digest(each.array) for name, each in replicated.items()}
        found = self._differing(self.mesh.data_group.data, mine)
        splits = {name: split_of(self.table.specs.get(name.rpartition("/")[2])) for name in mine}
        for axis in DIVIDE_ARRAYS:
            if ranks := getattr(self.mesh, axis):
                same = {name: mine[name] for name, split in splits.items() if same_along(axis, split, self.mesh)}
                found = found or self._differing(ranks, same)
        if self.forward_backward.peers:  # of a stage on several ranks
            found = found or self._differing(self.forward_backward.peers, mine)
        if self.mesh.model:  # ranks with other parts of the network raise it as well
            found = next(filter(None, self.mesh.model.allgather(found)), "")
        if found:
            raise ReplicaError(f"step {self.steps}: {found}")

    def _differing(self, ranks, mine: dict[str, bytes]) -> str:
        """The first parameter of which these ranks have different hashes, in words."""
        everyone = ranks.allgather((self.mesh.rank, mine))
        first, expected = everyone[0]
        for name in reversed(mine):  # in forward order: the first to differ is nearest to the cause
            differing = [rank for rank, digests in everyone if digests[name] != expected[name]]
            if differing:
                return f"parameter {name} on ranks {differing} differs from rank {first}'s"
        return ""

    def alone(self):
        """Of one process: it neither waits for other ranks nor writes into memory that they share."""
        state = self.state_dict()
        if not self.is_writer:
            return None
        optimizer = SGD(self.optimizer.lr) if self.optimizer.searches else self.optimizer
        one = Trainer(self.network, self.loss, optimizer, self.seed)
        one.load_state_dict({name: state[name] for name in one.state_dict()})  # less what a sync keeps of its own
        return one

    def memory(self):
        found = self.table.bytes()
        return found | {"in transit": found["in transit"] + self.forward_backward.in_transit()}

    def formula(self):
        return self.table.formula()

    def set_epoch_steps(self, steps):
        self.sync.set_epoch_steps(steps)

    def bytes_sent(self) -> dict[str, float]:
        """What compression saves; see GradientSync.bytes_sent (collective)."""
        found = self.sync.bytes_sent()
        if self.mesh.model and found:  # ranks with other parts of the network send other bytes
            mean = np.array(list(found.values()))
            self.mesh.sum_model(mean)
            found = dict(zip(found, (mean / self.mesh.model.size).tolist(), strict=True))
        return found

    def describe(self):
        return "; ".join(filter(None, (self.sync.describe(), self.forward_backward.describe())))

    @property
    def say(self):
        return self.sync.say

    @say.setter
    def say(self, say) -> None:
        self.sync.say = say

    def close(self) -> None:
        """Free what this trainer has made, but not the communicator that it was given (collective): the last call.

        After it `step`, `predict`, `state_dict` and all else that needs other ranks raise RuntimeError. A second
        `close` does nothing.

        Raises
        ------
        FloatingPointError, ValueError
            On all ranks, as `synchronize`, when all is freed.
        """
        sys.audit("ringprop.close", self)
        if self.closed:
            return
        self.closed = True
        try:
            self.sync.close()
        except (FloatingPointError, ValueError):  # another error may be this rank's alone: others would not come
            self._close_rest()
            raise
        self._close_rest()

    def _close_rest(self) -> None:
        self.forward_backward.close()
        self.mesh.close()


class CheckReplicas(Callback):
    """Every `steps` steps, compare the parameters of all ranks: a faulty rank is found before the end of the run.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.DistributedDataParallel(network, loss, optimizer, communicator)
    >>> training = nn.fit(trainer, (x, y), 2, parallel.CheckReplicas(steps=1), batch=4)
    >>> trainer.close()
    """

    def __init__(self, steps: int):
        SIZE("CheckReplicas: steps", steps)
        self.steps = steps

    def on_step(self, training, loss):
        if training.trainer.steps % self.steps == 0:
            training.trainer.check_replicas()


def facts(network: Network, loss: Loss, optimizer: Optimizer, seed: int) -> dict[str, object]:
    """What ranks must have alike of a trainer: else the sizes of messages would not match."""
    shapes = {name: spec.shape for name, spec in network.layout.specs.items()}
    return {
        "network": f"{network.in_shape} -> {network.out_shape}, parameters {shapes}",
        **{f"layer {path}": repr(layer) for path, layer, _, _ in network.layers()},
        "dtype": network.precision,
        "loss": repr(loss),
        "optimizer": repr(optimizer),
        "seed": seed,
    }


def data_facts(data: Data) -> dict[str, str]:
    """What ranks must have alike of their data sets, for `agree`: sizes, targets, samples here and there."""
    facts = {}
    for split in ("train", "validation", "test"):
        dataset = getattr(data, split)
        if dataset is None:
            continue
        n = len(dataset)
        some = np.linspace(0, n - 1, min(n, SAMPLES)).astype(int)
        x, y = dataset.raw(some)
        facts |= {
            f"number of {split} samples": f"{n:,}, each {x.dtype}{x.shape[1:]}",
            f"targets of the {split} data": f"SHA-256 {_digest(dataset.y if dataset.y.ndim == 1 else y).hex()[:16]}",
            f"samples of the {split} data": f"SHA-256 {_digest(x).hex()[:16]} of {len(some)} of them",
        }
    return facts


SAMPLES = 100  # of a data set that ranks compare


def _digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array)).digest()
