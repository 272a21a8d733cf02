"""What a rank computes of a step in which ranks compute every layer together."""

from __future__ import annotations

from collections.abc import Callable

from nn.core.context import Group
from nn.losses import Loss
from parallel.passes.whole import Whole
from parallel.state.splits import NetworkPart
from parallel.strategies.tensor.moves import sum_as_one
from parallel.strategies.tensor.rewriting import in_words, share, terms


class SharedPass(Whole):
    """A step of which each rank of the axis "tensor" computes a part of every layer.

    Parameters
    ----------
    loss : Loss
        Of whole outputs.
    way : {"pairs", "width", "sequence"}
        See rewriting.py.
    positions : SequenceParts or None
        Needed where the mesh has an axis "context".
    """

    def __init__(self, loss: Loss, way: str = "pairs", positions=None):
        self.whole_loss, self.way, self.positions = loss, way, positions

    def make_local_network(self, network, mesh):
        self.knows = False
        if mesh.index is None:  # a rank that only serves, whole arrays
            return network
        index, ranks = mesh.places["tensor"], mesh.sizes["tensor"]
        mine = self.positions.cut(network, mesh, self.way == "sequence") if self.positions else network
        shared, self.parts_loss, _ = share(mine, self.whole_loss, ranks, self.way)
        self.knows = index == 0
        return NetworkPart(shared, index, ranks) if ranks > 1 else shared

    def join(self, trainer):
        """The loss of outputs that are cut; and where gradients are terms, here and there in the buffer."""
        if self.mesh.index is None:
            return
        if self.positions:
            self.positions.join()
            self.parts_loss = self.positions.loss(self.parts_loss)
        layout, names = trainer.local_network.layout, terms(trainer.local_network)
        self.terms = {name: array for name, array in layout.flat(trainer.g).items() if name in names}
        self.ends = sorted((layout.slices[name].stop, name) for name in names)
        trainer.loss = self.parts_loss

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """As Whole. Where gradients are terms, none is told to be finished before they are summed."""
        z, saved = trainer.forward(x, True, micro)
        loss, gz = self.loss(trainer, z, y, total)
        trainer.set_loss(loss + before, total, micro)
        context, adds_up = trainer.ctx.network_context, trainer.sync.adds_up
        if not self.terms or (adds_up and micro.addend is None) or saved is None:
            trainer.backward(gz, saved)
            return loss + before
        ready, group = context.on_gradients_ready, context.groups["tensor"]
        context.on_gradients_ready = None if adds_up else self.summing(ready, group)
        trainer.backward(gz, saved)
        if adds_up:
            sum_as_one(list(self.terms.values()), group)
            if ready:
                ready(trainer.local_network.layout.size)
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

    def in_transit(self):
        return self.positions.nbytes if self.positions else 0

    def close(self):
        if self.positions:
            self.positions.close()

    def describe(self):
        how = self.positions.describe() if self.positions else ""
        return "; ".join(filter(None, (in_words(self.mesh.sizes["tensor"], self.way), how)))
