"""What a rank computes of a step in which ranks compute every layer together.

The gradient of a replicated array may be partial, as a norm's is where activations are cut: it is summed here, before
gradients are summed along "data".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from nn.core.context import Group
from nn.losses import Loss
from parallel.passes.forward_backward import ForwardBackward
from parallel.state.splits import NetworkPart
from parallel.strategies.tensor.moves import sum_as_one
from parallel.strategies.tensor.rewriting import in_words, partial_gradients, share


class SharedPass(ForwardBackward):
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
        self.owns_loss = False
        if mesh.index is None:  # a rank that only serves, whole arrays
            return network
        index, ranks = mesh.places["tensor"], mesh.sizes["tensor"]
        mine = self.positions.cut(network, mesh, self.way == "sequence") if self.positions else network
        shared, self.parts_loss, _ = share(mine, self.whole_loss, ranks, self.way)
        self.owns_loss = index == 0
        return NetworkPart(shared, index, ranks) if ranks > 1 else shared

    def bind(self, trainer):
        """The loss of outputs that are cut; and where in the buffer gradients are partial."""
        if self.mesh.index is None:
            return
        if self.positions:
            self.positions.connect()
            self.parts_loss = self.positions.loss(self.parts_loss)
        self.partial_gradients: list[tuple[list, Group]] = []  # for each group (end, gradient)
        tensor_group = trainer.ctx.network_context.groups.get("tensor")
        self.add_partial_gradients(trainer, partial_gradients(trainer.local_network), tensor_group)
        trainer.loss = self.parts_loss

    def add_partial_gradients(self, trainer, names: Sequence[str], group: Group | None) -> None:
        """Sum the partial gradients of these arrays over the group."""
        layout = trainer.local_network.layout
        flat = layout.flat(trainer.g)
        if names and group:
            self.partial_gradients.append(([(layout.slices[name].stop, flat[name]) for name in names], group))

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """As for ForwardBackward. No partial gradient is announced as ready before it is summed."""
        z, saved = trainer.forward(x, True, micro)
        loss, gz = self.loss(trainer, z, y, total)
        if micro.addend is not None:
            self.average_buffers(trainer)
        trainer.set_loss(loss + before, total, micro)
        context, adds_up = trainer.ctx.network_context, trainer.sync.adds_up
        if not self.partial_gradients or (adds_up and micro.addend is None) or saved is None:
            trainer.backward(gz, saved)
            return loss + before
        ready, end = context.on_gradients_ready, trainer.local_network.layout.size
        context.on_gradients_ready = None if adds_up else self.summing(ready)
        trainer.backward(gz, saved)
        if adds_up:
            self.summing(ready or (lambda end: None))(end)
        return loss + before

    def average_buffers(self, trainer) -> None:
        """Average running statistics over ranks that have one network together, and other samples: here all have the
        same."""

    def summing(self, ready: Callable[[int], None]) -> Callable[[int], None]:
        """Return `ready`, which first sums complete partial gradients: another layer soon reuses their memory."""
        left = [(sorted(gradients, key=itemgetter(0)), group) for gradients, group in self.partial_gradients]

        def summed(end: int) -> None:
            for unsummed, group in left:
                finished = []
                while unsummed and unsummed[0][0] <= end:
                    finished.append(unsummed.pop(0)[1])
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
