"""What a rank computes of a step where ranks with different samples have some of the experts each."""

from __future__ import annotations

from parallel.mesh import Ranks
from parallel.state.splits import NetworkPart, split_of, whole_specs
from parallel.strategies.expert.dealing import check, deal
from parallel.strategies.expert.dispatch import ExpertRanks
from parallel.strategies.tensor.rewriting import in_words, share
from parallel.strategies.tensor.shared_pass import SharedPass


class ExpertPass(SharedPass):
    """A step in which each rank of the axes "expert" and "tensor" computes some of the experts.

    The gradients of all other arrays are terms, of the rank's samples: they are summed over the axis "expert", and with
    the experts' along "data".
    """

    def make_local_network(self, network, mesh):
        place, tensors, experts = mesh.places["tensor"], mesh.sizes["tensor"], mesh.sizes["expert"]
        check(network, experts, tensors)
        mine = self.positions.cut(network, mesh, self.way == "sequence")
        shared, self.parts_loss, _ = share(mine, self.whole_loss, tensors, self.way)
        self.owns_loss, self.asks_others = place == 0, experts > 1
        if experts * tensors == 1:
            return shared
        return NetworkPart(deal(shared, experts, tensors), mesh.places["expert"] * tensors + place, experts * tensors)

    def join(self, trainer):
        super().join(trainer)
        self.everyone = join_experts(trainer)
        if self.everyone:
            self.add_terms(trainer, alike(trainer.local_network), self.everyone)

    def average_buffers(self, trainer):
        if self.everyone and trainer.buffers.size:
            self.everyone.average(trainer.buffers)

    def describe(self):
        tensors, experts = self.mesh.sizes["tensor"], self.mesh.sizes["expert"]
        together = f"; {in_words(tensors, self.way)}" if tensors > 1 else ""
        how = f"; {positions}" if (positions := self.positions.describe()) else ""
        return f"experts dealt out to {tensors * experts} ranks{together}{how}"


def join_experts(trainer) -> Ranks | None:
    """Give layers the ranks that have the other experts; return those whose samples are others, None without."""
    mesh = trainer.mesh
    if not mesh.expert:
        return None
    trainer.ctx.network_context.groups["expert"] = ExpertRanks(mesh.parts)
    trainer.computes_empty_shards = True
    return Ranks(mesh.expert)


def alike(network: NetworkPart) -> list[str]:
    """Names of the arrays that all ranks of the axis "expert" have: their gradients are terms, of a rank's samples."""
    splits = {name: split_of(spec) for name, spec in whole_specs(network).items()}
    return [name for name in network.layout.specs if splits[name] is None or splits[name].copies > 1]
