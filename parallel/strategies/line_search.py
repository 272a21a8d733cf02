"""What a step of Sandblaster is: one iteration of L-BFGS, with a line search, on a coordinator, replicas and shards."""

from __future__ import annotations

import math

from nn.core.network import Network
from nn.layers.dropout import Dropout
from nn.losses import Loss
from nn.training.state import fitting_weights
from parallel.mesh import Mesh, agree
from parallel.passes.chunks import Chunks
from parallel.sync.coordinator.quasi_newton import QuasiNewton
from parallel.sync.coordinator.shards import Coordinated
from parallel.sync.mailbox import LIMIT
from parallel.trainer import DistributedTrainer


class LineSearchTrainer(DistributedTrainer):
    """The trainer of Sandblaster (sandblaster.py, which has the parameters): a step is a search along a line."""

    searches = True

    def __init__(
        self,
        network: Network,
        loss: Loss,
        optimizer: QuasiNewton,
        communicator=None,
        seed: int = 0,
        servers: int = 1,
        place: str = "dedicated",
        *,
        chunk: int = 64,
        same_batch: bool | None = None,
        limit: float = LIMIT,
    ):
        if not isinstance(optimizer, QuasiNewton):
            raise ValueError(f"Sandblaster searches along lines: expected QuasiNewton, given {optimizer!r}")
        if chunk < 1:
            raise ValueError(f"Sandblaster: chunk must be at least 1 sample, given {chunk}")
        refuse_changing(network)
        if communicator:
            agree(communicator, {"Sandblaster": f"{servers} shards on {place}, chunks of {chunk}, same={same_batch}"})
        sync = Coordinated(communicator.size if communicator else 1, servers, place, limit)
        mesh = Mesh(communicator, sync.workers if communicator else None)
        self.same_batch, self.samples = same_batch, None
        super().__init__(network, loss, optimizer, mesh, Chunks(chunk), sync, seed, "Sandblaster")

    def make_step(self, x, y, total, accumulate):
        """One iteration of L-BFGS on a batch; returns the loss before it.

        Raises
        ------
        NonFiniteLoss
            The loss at the start is not finite; nothing was changed.
        """
        chunks = -(-total // self.forward_backward.size)

        def compute(number: int) -> float:
            micro = self.forward_backward.chunk(number, total)
            return self.compute_gradients(x[micro.rows], y[micro.rows], total, micro)

        loss = self.sync.search(compute, chunks, bool(self.same_batch) and self.samples in (None, total))
        if not math.isfinite(loss):
            rows = [micro.rows for micro in self.forward_backward.divide(len(x), total, 1)]
            raise self.bad_step(loss, [(each.start, x[each]) for each in rows])
        self.samples = total
        self.steps += 1
        if self.sync.finished:
            self.say(f"step {self.steps}: {self.sync.finished}")
        return loss

    def load_weights(self, weights):
        """As for Trainer (collective): the search begins anew, without pairs."""
        state, new = fitting_weights(self.network, weights, self.optimizer, self.seed)
        self.load_state_dict(state | self.sync.first_scalars)
        return new

    def set_epoch_steps(self, steps):
        if self.same_batch is None:
            self.same_batch = steps == 1

    def size_of_batch(self, x, y, total, accumulate):
        """As for Trainer, of all samples of the batch on a replica, and none elsewhere (collective).

        Raises
        ------
        ValueError
            Ranks were given different sizes or shards (all ranks refuse), or micro-batches: a batch is cut into chunks.
        """
        self.check_open()
        samples = len(x)
        if accumulate != 1:
            raise ValueError(f"Sandblaster cuts a batch into chunks already: leave out accumulate, given {accumulate}")
        if total is None and self.mesh.size == 1:
            total = samples
        given = self.mesh.allgather((samples, total))
        for rank, (samples, total) in enumerate(given):
            expected = given[0][1] if self.mesh.size == 1 or rank in self.sync.workers else 0
            if total is None or total != given[0][1] or samples != expected or total < 1:
                raise ValueError(
                    f"step {self.steps}: rank {rank} has {samples} samples of a batch of {total}; expected {expected} "
                    f"of {given[0][1]}: a replica has the whole batch, the others none of it, as a Loader gives it"
                )
        return given[0][1]


def refuse_changing(network: Network) -> None:
    """Refuse layers whose outputs change from one evaluation to the next: a line search would follow noise."""
    if network.buffer_layout.size:
        name = next(iter(network.buffer_layout.specs))
        raise ValueError(
            f"Sandblaster: {name} of {network.name} moves with every batch, and a line search needs one function: use "
            "layer normalisation in place of batch normalisation"
        )
    if network.mixed:
        raise ValueError(
            f"Sandblaster: {network.name} keeps float16, and a line search needs gradients as exact as the loss: build "
            "it without mixed"
        )
    for path, layer, _, _ in network.layers():
        if isinstance(layer, Dropout) and layer.rate:
            raise ValueError(
                f"Sandblaster: {layer!r} at {path} of {network.name} is another function every time, and a line search "
                "needs one: leave it out"
            )
