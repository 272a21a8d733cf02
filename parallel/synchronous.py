"""What all synchronous data-parallel strategies share: one global batch a step, cut among the ranks.

Each rank computes the gradient of its samples, divided by the size of the *global* batch, so that the sum over ranks is
the gradient of the batch, uneven parts included. A strategy says how the sum is made (`combine`), who updates what
(`update`), and where parameters, gradients and moments live (`allocate`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator

import numpy as np
from mpi4py.MPI import IN_PLACE

from collectives.steps import part
from nn.data import Data
from nn.losses import Loss
from nn.network import Bad, Network
from nn.optimizers import Optimizer
from nn.serial import Serial
from nn.training import Callback
from parallel.uneven import Total


class ReplicaError(RuntimeError):
    """Ranks that should hold the same do not; the message says which and what."""


class Synchronous(Serial):
    """`Serial` on many ranks; base of the strategies.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Serial, alike on all ranks.
    communicator : collectives.Communicator
        Its ranks share every global batch.

    Raises
    ------
    ReplicaError
        If ranks were given different networks, losses or optimizers.
    """

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, communicator, seed: int = 0):
        self.communicator = communicator
        self.shard = (communicator.rank, communicator.size)
        self.total = 0  # samples in the global batch of this step
        self._agree(network, loss, optimizer, seed)
        super().__init__(network, loss, optimizer, seed)
        this = weakref.proxy(self)  # no cycle: shared memory goes with the trainer, not when garbage is collected
        self.run.common.all_sum = lambda array: this.all_sum(array)

    def start_alike(self) -> None:
        """Parameters and running statistics are rank 0's on all ranks (collective)."""
        self.communicator.Bcast(self.parameters, root=0)
        self.communicator.Bcast(self.statistics, root=0)

    def step(self, x, y, total=None):
        """As for Serial.

        Raises
        ------
        ValueError
            Also where this rank was not told the size of the global batch, or ranks were told different ones: all
            strategies but dp, where only the master is asked, find that in the message with the loss.
        """
        return super().step(x, y, self.size_of_batch(x, total))

    def size_of_batch(self, x: np.ndarray, total: int | None) -> int:
        """The samples of the global batch that this step is about, as it was told to."""
        if total is None:
            if self.shard[1] > 1:
                raise ValueError(
                    f"step {self.steps} on {self.shard[1]} ranks: step(x, y, total) needs the number of samples that "
                    "all ranks have together, as a Loader gives it"
                )
            total = len(x)
        self.total = total
        return total

    def totals(self, first: bool) -> tuple[int, int]:
        """What is summed over all ranks so that they find out that they disagree on the size of the batch."""
        return self.total, self.total if first else 0

    def refuse_other_totals(self, mean: float, first: float) -> None:
        """`mean` of what the ranks were told, and what the first one was, as all of them know it from the sums."""
        if differ(mean, first):  # all ranks are here
            totals = ", ".join(map(str, self.communicator.allgather(self.total)))
            raise ValueError(f"step {self.steps}: ranks disagree on the size of the global batch: {totals}")
        if differ(self.total, first):
            raise ValueError(
                f"step {self.steps}: ranks disagree on the size of the global batch: it is {first:g} on rank 0, "
                f"{self.total} on rank {self.communicator.rank}"
            )

    def first_sample(self, total):
        if isinstance(total, Total):  # ranks with data of their own
            return total.first
        return part(total, self.shard[1], self.shard[0])[0]

    def place(self, samples: int, total: int) -> slice | None:
        """Where in the global batch so many samples of this rank are; None if that is not how batches are cut."""
        first = self.first_sample(total)
        if isinstance(total, Total) or samples == part(total, self.shard[1], self.shard[0])[1] - first:
            return slice(first, first + samples)
        return None

    def first_bad(self, parts):
        """Every rank looks at its own samples; all return one finding: an input comes before what is made of it."""
        common = self.run.common
        # In training, ranks that share statistics would wait for one that has found something and looks no further.
        common.training = not self.everyone
        found = self.communicator.allgather(self.look(parts))
        found = [(bad.depth, rank, bad) for rank, bad in enumerate(found) if bad]
        if not found:
            return None
        _, rank, bad = min(found, key=lambda entry: entry[:2])
        return bad._replace(place=f"{bad.place} on rank {rank}")

    def look(self, parts: list[np.ndarray]) -> Bad | None:
        """What `first_bad` finds on this rank."""
        return super().first_bad(parts)

    def all_sum(self, array: np.ndarray) -> None:
        """Sum an array over all ranks, in place."""
        self.communicator.Allreduce(IN_PLACE, array)

    def sum(self, values):
        total = np.array(values, np.float64)
        self.all_sum(total)
        return total

    def check_replicas(self) -> None:
        """Compare what all ranks should hold alike, bit for bit, by hashes.

        Raises
        ------
        ReplicaError
            On every rank: the first parameter that differs, and on which ranks.
        """
        mine = {name: _digest(array) for name, array in self.replicated()}
        everyone = self.communicator.allgather(mine)
        for name in reversed(mine):  # in forward order: the first to differ is nearest to the cause
            differing = [r for r, digests in enumerate(everyone) if digests[name] != everyone[0][name]]
            if differing:
                raise ReplicaError(f"step {self.steps}: parameter {name} on ranks {differing} differs from rank 0's")

    def replicated(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of all that every rank has a copy of."""
        yield from ((f"state/{name}", a) for name, a in self.network.state_layout.items(self.statistics))
        yield from self.network.layout.items(self.parameters)

    def alone(self):
        """Of one process: it neither waits for other ranks nor writes into memory that they share."""
        state = self.state()
        if self.communicator.rank:
            return None
        one = Serial(self.network, self.loss, self.optimizer, self.seed)
        one.load_state({name: state[name] for name in one.state()})  # less what a strategy keeps of its own
        return one

    def describe(self) -> str:
        """How the work is shared, for the log; empty where there is nothing to say."""
        return ""

    def say(self, line: str) -> None:
        """Told what is worth a line in the log; whoever runs the trainer may put a function here."""

    def close(self) -> None:
        """Free what this trainer holds beside its communicator (collective); it trains no more."""

    def _agree(self, network: Network, loss: Loss, optimizer: Optimizer, seed: int) -> None:
        """Refuse to start where ranks differ: the sizes of messages would not match."""
        shapes = {name: spec.shape for name, spec in network.layout.specs.items()}
        agree(
            self.communicator,
            {
                "network": f"{network.in_shape} -> {network.out_shape}, parameters {shapes}",
                **{f"layer {path}": repr(layer) for path, layer, _, _ in network.layers()},
                "dtype": str(network.dtype),
                "loss": repr(loss),
                "optimizer": repr(optimizer),
                "seed": seed,
            },
        )


class CheckReplicas(Callback):
    """Every `steps` steps, compare the parameters of all ranks: a faulty rank is found before the end of the run."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step(self, training, loss):
        if training.trainer.steps % self.steps == 0:
            training.trainer.check_replicas()


def differ(total: float, first: float) -> bool:
    """Whether two sizes of a batch do, as sums of float32 tell them."""
    return abs(total - first) > 1e-6 * first


def agree(communicator, mine: dict[str, object]) -> None:
    """Compare what every rank has been given, by name (collective).

    Raises
    ------
    ReplicaError
        On every rank: what the ranks disagree on, and what two of them have.
    """
    everyone = communicator.allgather(mine)
    for key, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(key) != value:
                raise ReplicaError(f"ranks disagree on the {key}: rank 0: {value}, rank {rank}: {theirs.get(key)}")


def data_facts(data: Data) -> dict[str, str]:
    """What ranks must have alike of their data sets, for `agree`: sizes, targets, samples here and there."""
    facts = {}
    for split in ("train", "test"):
        dataset = getattr(data, split)
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
