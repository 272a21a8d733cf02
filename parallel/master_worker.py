"""Master and workers: one rank holds the batch, the model and the optimizer; the others only compute.

In every step the master scatters the batch and broadcasts the model; each rank computes the outputs of its samples; the
master gathers them, computes the loss, scatters its gradient; each rank backpropagates; the master sums the gradients
and updates. This is how PyTorch's DataParallel works, and the first picture of most courses.

It is kept because it shows why nobody trains like this on many ranks: the parameters leave the master and gradients
come back in every step, and while the master reads, computes the loss and updates, the workers wait. See it in the
picture that `--timeline` draws. Cost of a step over one process's, for n bytes of parameters and a batch of b bytes:
2 ceil(log2 p) (alpha + n beta) for model and gradients by binomial trees, (p-1)/p b beta for the batch, and the same
for outputs and their gradients, all of it through one rank. Source: PyTorch (torch.nn.DataParallel).
"""

from __future__ import annotations

import math

import numpy as np
from mpi4py.MPI import IN_PLACE

from collectives.steps import part
from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from nn.serial import check_state, state_kinds
from parallel.synchronous import Synchronous
from parallel.uneven import Total

MASTER = 0


class DataParallel(Synchronous):
    """`Serial` on many ranks, with rank 0 as the master; parameters are those of Synchronous.

    `shard` is the whole batch on the master and nothing elsewhere: workers get their samples from the master, in
    evaluation too. Their parameters are those of the last broadcast, and they have no moments.
    """

    phases = (
        ("scatter", "scatter_batch", True),
        ("broadcast", "broadcast_model", True),
        ("forward", "forward", False),
        ("gather", "gather_outputs", True),
        ("loss", "compute_loss", False),
        ("scatter gradient", "scatter_gradient", True),
        ("backward", "backward", False),
        ("reduce", "combine", True),
        ("update", "update", False),
    )

    def __init__(self, network: Network, loss: Loss, optimizer: Optimizer, communicator, seed: int = 0):
        self.master = communicator.rank == MASTER
        super().__init__(network, loss, optimizer, communicator, seed)
        self.shard = (0 if self.master else None, 1)
        self.cuts = []  # (lo, hi) of every rank's samples in the batch that was scattered last
        self.mine: list[tuple[int, np.ndarray]] = []  # of this step: place in the global batch, this rank's samples

    def allocate(self) -> None:
        """Gradients, and behind them running statistics: one message to the master carries both."""
        super().allocate()
        size = self.network.layout.size
        self.message = np.zeros(size + self.network.state_layout.size, self.network.dtype)
        self.gradients, self.message_statistics = self.message[:size], self.message[size:]

    def initialize(self) -> None:
        """Workers update nothing, and keep no moments."""
        super().initialize()
        if not self.master:
            self.slots = {}

    def compute_gradients(self, x, y, total):
        """All ranks take part; x and y are those of the master."""
        if isinstance(total, Total):
            raise ValueError(
                "with dp the master reads for all ranks, and `join` gives every rank its own: use ddp, zero1, zero2, "
                "fsdp, or ps"
            )
        if len(x) and not self.master:
            raise ValueError(
                f"rank {self.communicator.rank} is a worker of the master, and was given {len(x)} samples: a worker "
                "gets its part from the master; a loader for this trainer's `shard` gives it none"
            )
        common = self.run.common
        common.training, common.step = True, self.steps
        samples = self.scatter_batch(x)
        self.mine = [*(self.mine if common.accumulate else ()), (common.sample, samples)]
        self.broadcast_model()
        z, saved = self.forward(samples)
        outputs = self.gather_outputs(z)
        loss, gz = self.compute_loss(outputs, y, total)
        self.backward(self.scatter_gradient(gz, z), saved)
        return loss

    def scatter_batch(self, x: np.ndarray) -> np.ndarray:
        """This rank's samples of the master's x. Targets stay: only the master computes the loss."""
        rank, size = self.communicator.rank, self.communicator.size
        sizes = np.array([len(x), self.seen()])  # of the batch, and of its micro-batches before this one
        self.communicator.Bcast(sizes, root=MASTER)
        self.cuts = [part(int(sizes[0]), size, i) for i in range(size)]
        lo, hi = self.cuts[rank]
        self.run.common.sample = int(sizes[1]) + lo
        samples = np.empty((hi - lo, *x.shape[1:]), x.dtype)
        self._scatter(x, samples)
        return samples

    def broadcast_model(self) -> None:
        """The master's parameters and running statistics to all."""
        self.communicator.Bcast(self.parameters, root=MASTER)
        if len(self.statistics):
            self.communicator.Bcast(self.statistics, root=MASTER)

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, object]:
        """(outputs, what backward needs) of this rank's samples; one without any rests, unless it shares statistics."""
        if not len(x) and not (self.everyone and self.run.common.training):
            return np.empty((0, *self.network.out_shape), self.network.dtype), None
        return self.network.forward(self.p, x, self.run)

    def gather_outputs(self, z: np.ndarray) -> np.ndarray | None:
        """All ranks' outputs, on the master."""
        outputs = self.run.empty((self.cuts[-1][1], *z.shape[1:]), z.dtype) if self.master else None
        self.communicator.Gatherv(np.ascontiguousarray(z), self._blocks(outputs), root=MASTER)
        return outputs

    def compute_loss(self, outputs: np.ndarray | None, y: np.ndarray, total: int) -> tuple[float, np.ndarray | None]:
        """(loss, its gradient with respect to all outputs), on the master; workers have none."""
        return self.loss(outputs, y, total * self.terms, self.run) if self.master else (0.0, None)

    def scatter_gradient(self, gz: np.ndarray | None, z: np.ndarray) -> np.ndarray:
        """The part of the loss gradient that belongs to this rank's outputs z."""
        mine = self.run.empty(z.shape, z.dtype)
        self._scatter(gz, mine)
        return mine

    def backward(self, gz: np.ndarray, saved: object) -> None:
        """Gradients of this rank's samples."""
        if saved is not None:
            self.network.backward(self.p, self.g, gz, saved, self.run)
        elif not self.run.common.accumulate:
            self.gradients[:] = 0

    def combine(self, loss):
        """Sum the gradients on the master, which tells all ranks the loss."""
        np.divide(self.statistics, self.communicator.size, out=self.message_statistics)
        if self.master:
            self.communicator.Reduce(IN_PLACE, self.message, root=MASTER)
            self.statistics[:] = self.message_statistics
        else:
            self.communicator.Reduce(self.message, None, root=MASTER)
        told = np.array([loss])
        self.communicator.Bcast(told, root=MASTER)
        return float(told[0])

    def update(self):
        """The master's; the others get its parameters with the next broadcast, and are told if a clip finds no norm."""
        refused = None
        if self.master:
            try:
                super().update()
            except FloatingPointError as error:
                refused = str(error)
        if self.optimizer.clip:
            refused = self.communicator.bcast(refused, root=MASTER)
        if refused:
            raise FloatingPointError(refused)

    def predict(self, x):
        """The network's outputs for the master's x, computed by all ranks (collective); workers get None."""
        self.run.common.training = False
        samples = self.scatter_batch(x)
        self.broadcast_model()
        return self.gather_outputs(self.forward(samples)[0])

    def evaluate(self, x, y):
        z = self.predict(x)  # an empty batch too: the workers do not know
        return self.score(z, y) if self.master and len(x) else np.zeros(3)

    def look(self, parts):
        """At the samples that the master gave this rank, in place of what the loader did."""
        for sample, samples in self.mine:
            self.run.common.sample = sample
            if bad := super().look([samples]):
                return bad
        return None

    def load_state(self, state):
        """Take over what `state` of any strategy returned on rank 0; workers leave the moments."""
        if problem := check_state(state_kinds(self.network, self.optimizer.slots), state):
            raise ValueError(problem)
        mine = self.state()
        super().load_state({name: array for name, array in state.items() if name in mine})

    def restore(self, snapshot):
        super().load_state(snapshot)  # of this rank, so without the moments that it has not

    def check_replicas(self):
        """As for all strategies, of what the master's broadcast brings."""
        self.broadcast_model()
        super().check_replicas()

    def describe(self):
        return f"rank {MASTER} is the master: it reads, computes the loss and updates"

    def _blocks(self, rows: np.ndarray | None) -> list | None:
        """The master's array of all samples' rows as a message with a block for each rank."""
        if rows is None:
            return None
        row = math.prod(rows.shape[1:])
        return [rows, [(hi - lo) * row for lo, hi in self.cuts], [lo * row for lo, _ in self.cuts], None]

    def _scatter(self, rows: np.ndarray | None, mine: np.ndarray) -> None:
        rows = np.ascontiguousarray(rows) if self.master else None
        self.communicator.Scatterv(self._blocks(rows), mine, root=MASTER)
