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
        shared, self.parts_loss, _ = share(network, self.whole_loss, tensors, self.way)
        self.owns_loss, self.asks_others = place == 0, experts > 1
        if experts == 1:
            return NetworkPart(shared, place, tensors) if tensors > 1 else shared
        return NetworkPart(deal(shared, experts, tensors), mesh.places["expert"] * tensors + place, experts * tensors)

    def join(self, trainer):
        super().join(trainer)
        self.everyone = Ranks(self.mesh.expert) if self.mesh.expert else None
        if not self.everyone:
            return
        trainer.ctx.network_context.groups["expert"] = ExpertRanks(self.mesh.parts)
        trainer.computes_empty_shards = True
        network = trainer.local_network
        splits = {name: split_of(spec) for name, spec in whole_specs(network).items()}
        alike = [name for name in network.layout.specs if splits[name] is None or splits[name].copies > 1]
        self.add_terms(trainer, alike, self.everyone)

    def average_buffers(self, trainer):
        if self.everyone and trainer.buffers.size:
            self.everyone.sum(trainer.buffers)
            trainer.buffers /= self.everyone.size

    def describe(self):
        tensors, experts = self.mesh.sizes["tensor"], self.mesh.sizes["expert"]
        together = f"; {in_words(tensors, self.way)}" if tensors > 1 else ""
        return f"experts dealt out to {tensors * experts} ranks{together}"
