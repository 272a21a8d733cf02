"""Tensor parallelism: ranks compute every layer together, each with a part of its parameters (Megatron).

All ranks of the axis "tensor" are given the same samples. Of every matrix each has some columns or rows, of attention
some heads; between them activations are summed or gathered (rewriting.py). So a rank has 1/t of the parameters, of
their gradients and moments, and of the arithmetic, and no gradient has to be summed over these ranks. Cost of a step
over one process's: 4 allreduces of N T D activations for each block of a transformer, two on the way forward, two on
the way back. Along the axis "data" the gradients of each part are summed as in data parallelism.

Source: Shoeybi et al. 2019; Korthikanti et al. 2022 (activations cut along the places).
"""

from __future__ import annotations

import numpy as np

from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.exchange.base import Exchange
from parallel.exchange.messages import Messages
from parallel.mesh import Mesh
from parallel.passes.whole import Whole
from parallel.strategies.tensor.moves import sum_as_one
from parallel.strategies.tensor.rewriting import in_words, share, terms
from parallel.trainer import Trainer


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
        index, ranks = mesh.places["tensor"], mesh.sizes["tensor"]
        shared, self.parts_loss, _ = share(network, self.whole_loss, ranks, self.way)
        self.knows = index == 0
        return shared.part(index, ranks) if ranks > 1 else network

    def join(self, trainer):
        """The loss of outputs that are cut; and where gradients are terms, here and there in the buffer."""
        names = terms(trainer.held)
        self.gradients = [array for name, array in trainer.held.layout.flat(trainer.g).items() if name in names]
        trainer.loss = self.parts_loss

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """As Whole. Where gradients are terms, none is told to be finished before they are summed."""
        z, saved = trainer.forward(x, True, micro)
        loss, gz = self.loss(trainer, z, y, total)
        trainer.tell(loss + before, total, micro)
        context, last = trainer.run.context, micro.addend is not None or not trainer.exchange.adds_up
        if not self.gradients or not last or saved is None:
            trainer.backward(gz, saved)
            return loss + before
        ready, context.ready = context.ready, None
        trainer.backward(gz, saved)
        sum_as_one(self.gradients, context.groups["tensor"])
        if ready:
            ready(trainer.held.layout.size)
        return loss + before

    def evaluate(self, trainer, x, y):
        """All ranks have the outputs; one tells how good they are."""
        sums = super().evaluate(trainer, x, y)
        return sums if self.knows else np.zeros_like(sums)

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
    bucketing: dict | None = None,
) -> Trainer:
    """`Serial` on many ranks, which compute every layer together.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Serial, alike on all ranks.
    communicator : collectives.Communicator
    tensor : int or None
        How many ranks share a layer; None for all. Those of one group are neighbours, and are given the same samples;
        groups share every global batch.
    way : {"pairs", "width", "sequence"}
        How layers are shared: two linear layers by columns and rows, so that only the second sends; or each by its
        outputs, as convolutions are; or as the first, with activations cut along the places of sequences where ranks
        would do the same with all of them.
    bucketing : bucket, first, overlap of exchange/messages.py, or None
        How groups sum their gradients.

    Raises
    ------
    ValueError
        Heads that cannot be dealt out, or nothing that can be shared: which numbers of ranks would do.
    ReplicaError
        If ranks were given different networks, losses or optimizers.
    """
    mesh = Mesh(communicator, tensor=tensor or communicator.size)
    bucketing = bucketing or {"bucket": 25.0, "first": 1.0, "overlap": "none"}
    exchange = Messages(bucketing, "each rank has parts of layers") if mesh.count > 1 else Exchange()
    return Trainer(network, loss, optimizer, mesh, SharedPass(loss, way), exchange, seed, "TensorParallel")
