"""Tensor parallelism: ranks compute every layer together, each with a part of its parameters (Megatron).

All ranks of the axis "tensor" are given the same samples. Of every matrix each has some columns or rows, of attention
some heads; between them activations are summed or gathered (rewriting.py). So a rank has 1/t of the parameters, of
their gradients and moments, and of the arithmetic, and no gradient has to be summed over these ranks. Cost of a step
over one process's: 4 allreduces of N T D activations for each block of a transformer, two on the way forward, two on
the way back. Along the axis "data" the gradients of each part are summed as in data parallelism.

Source: Shoeybi et al. 2019; Korthikanti et al. 2022 (activations cut along the places).
"""

from __future__ import annotations

from collections.abc import Callable

from nn.core.context import Group
from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.exchange.compression import Compressor
from parallel.mesh import Mesh
from parallel.passes.whole import Whole
from parallel.strategies.along_data import exchange_along
from parallel.strategies.tensor.moves import sum_as_one
from parallel.strategies.tensor.rewriting import in_words, share, terms
from parallel.trainer import DistributedTrainer


class SharedPass(Whole):
    """A step of which each rank of the axis "tensor" computes a part of every layer.

    Parameters
    ----------
    loss : Loss
        Of whole outputs.
    way : {"pairs", "width", "sequence"}
        See rewriting.py.
    """

    def __init__(self, loss: Loss, way: str = "pairs"):
        self.whole_loss, self.way = loss, way

    def hold(self, network, mesh):
        self.knows = False
        if mesh.index is None:  # a rank that only serves, whole arrays
            return network
        index, ranks = mesh.places["tensor"], mesh.sizes["tensor"]
        shared, self.parts_loss, _ = share(network, self.whole_loss, ranks, self.way)
        self.knows = index == 0
        return shared.part(index, ranks) if ranks > 1 else network

    def join(self, trainer):
        """The loss of outputs that are cut; and where gradients are terms, here and there in the buffer."""
        if self.mesh.index is None:
            return
        layout, names = trainer.held.layout, terms(trainer.held)
        self.terms = {name: array for name, array in layout.flat(trainer.g).items() if name in names}
        self.ends = sorted((layout.slices[name].stop, name) for name in names)
        trainer.loss = self.parts_loss

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """As Whole. Where gradients are terms, none is told to be finished before they are summed."""
        z, saved = trainer.forward(x, True, micro)
        loss, gz = self.loss(trainer, z, y, total)
        trainer.tell(loss + before, total, micro)
        context, adds_up = trainer.ctx.network_context, trainer.exchange.adds_up
        if not self.terms or (adds_up and micro.addend is None) or saved is None:
            trainer.backward(gz, saved)
            return loss + before
        ready, group = context.on_gradients_ready, context.groups["tensor"]
        context.on_gradients_ready = None if adds_up else self.summing(ready, group)
        trainer.backward(gz, saved)
        if adds_up:
            sum_as_one(list(self.terms.values()), group)
            if ready:
                ready(trainer.held.layout.size)
        return loss + before

    def summing(self, ready: Callable[[int], None], group: Group) -> Callable[[int], None]:
        """`ready`, before which the terms are summed that are finished: their memory is soon another layer's."""
        left = list(self.ends)

        def summed(end: int) -> None:
            finished = []
            while left and left[0][0] <= end:
                finished.append(self.terms[left.pop(0)[1]])
            if finished:
                sum_as_one(finished, group)
            ready(end)

        return summed

    def describe(self):
        return in_words(self.mesh.sizes["tensor"], self.way)


def TensorParallel(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    tensor: int | None = None,
    way: str = "pairs",
    stage: int = 0,
    bucketing: dict | None = None,
    unit_bytes: int = 1 << 20,
    prefetch: int | None = None,
    compressor: Compressor | None = None,
) -> DistributedTrainer:
    """`Trainer` on many ranks, which compute every layer together.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks.
    communicator : collectives.Communicator
    tensor : int or None
        How many ranks share a layer; None for all. Those of one group are neighbours, and are given the same samples;
        groups share every global batch.
    way : {"pairs", "width", "sequence"}
        How layers are shared: two linear layers by columns and rows, so that only the second sends; or each by its
        outputs, as convolutions are; or as the first, with activations cut along the places of sequences where ranks
        would do the same with all of them.
    stage : {0, 1, 2, 3}
        Of ZeRO: what groups keep in shards; 0 for nothing.
    bucketing, unit_bytes, prefetch, compressor
        How groups sum their gradients: see along_data.py.

    Raises
    ------
    ValueError
        Heads that cannot be dealt out, or nothing that can be shared: which numbers of ranks would do.
    ReplicaError
        If ranks were given different networks, losses or optimizers.
    """
    mesh = Mesh(communicator, tensor=tensor or communicator.size)
    exchange = exchange_along(mesh, stage, bucketing, unit_bytes, prefetch, compressor)
    return DistributedTrainer(network, loss, optimizer, mesh, SharedPass(loss, way), exchange, seed, "TensorParallel")
