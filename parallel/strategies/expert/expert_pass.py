"""What a rank computes of a step where ranks with different samples have some of the experts each."""

from __future__ import annotations

from parallel.mesh import Mesh, Ranks
from parallel.state.splits import NetworkPart, same_along, split_of, whole_specs
from parallel.strategies.expert.dealing import check, deal
from parallel.strategies.expert.dispatch import ExpertRanks
from parallel.strategies.tensor.rewriting import in_words, share
from parallel.strategies.tensor.shared_pass import SharedPass


class ExpertPass(SharedPass):
    """A step in which each rank of the axes "expert" and "tensor" computes some of the experts.

    The gradients of all other arrays are partial, of the rank's samples: they are summed over the axis "expert", and
    with the experts' along "data".
    """

    def make_local_network(self, network, mesh):
        tensors, experts = mesh.sizes["tensor"], mesh.sizes["expert"]
        check(network, experts, tensors)
        mine = self.positions.cut(network, mesh, self.way == "sequence")
        shared, self.parts_loss, _ = share(mine, self.whole_loss, tensors, self.way)
        self.owns_loss, self.asks_others = mesh.places["tensor"] == 0, experts > 1
        return NetworkPart(deal(shared, experts, tensors), *mesh.part) if mesh.part[1] > 1 else shared

    def bind(self, trainer):
        super().bind(trainer)
        self.everyone = bind_experts(trainer)
        if self.everyone:
            self.add_partial_gradients(trainer, replicated_names(trainer.local_network, self.mesh), self.everyone)

    def average_buffers(self, trainer):
        if self.everyone and trainer.buffers.size:
            self.everyone.average(trainer.buffers)

    def describe(self):
        tensors = self.mesh.sizes["tensor"]
        together = f"; {in_words(tensors, self.way)}" if tensors > 1 else ""
        how = f"; {positions}" if (positions := self.positions.describe()) else ""
        return f"experts dealt out to {self.mesh.part[1]} ranks{together}{how}"


def bind_experts(trainer) -> Ranks | None:
    """Give layers the ranks that have the other experts; return those whose samples are others, None without."""
    mesh = trainer.mesh
    if not mesh.expert:
        return None
    trainer.ctx.network_context.groups["expert"] = ExpertRanks(mesh.parts)
    trainer.computes_empty_shards = True
    return Ranks(mesh.expert)


def replicated_names(network: NetworkPart, mesh: Mesh) -> list[str]:
    """Return the names of the arrays of which all ranks of the axis "expert" have the same.

    Their gradients are partial: of a rank's samples.
    """
    specs = whole_specs(network)
    return [name for name in network.layout.specs if same_along("expert", split_of(specs[name]), mesh)]
