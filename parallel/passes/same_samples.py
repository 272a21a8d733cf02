"""What a rank computes in a step where the ranks of an axis compute the same samples, each some of the work."""

from __future__ import annotations

from parallel.passes.whole import Whole


class SameSamples(Whole):
    """Every rank has all parameters and computes a term of their gradients: the gradients of all ranks are summed."""

    by_samples = False

    def start(self, mesh, network):
        super().start(mesh, network)
        self.addends = mesh.size

    def divide(self, samples, total, parts):
        """As Whole; every rank's gradients are an addend."""
        found = super().divide(samples, total, parts)
        return [micro if micro.addend is None else micro._replace(addend=self.mesh.rank) for micro in found]
