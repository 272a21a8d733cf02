"""A mixture of experts of which this rank has some, and a shared expert that is computed while positions travel."""

from __future__ import annotations

import numpy as np

from nn.core.containers import Residual
from nn.layers.experts import MixtureOfExperts
from parallel.state.splits import Split, with_split
from parallel.strategies.expert.dispatch import ExpertRanks
from parallel.strategies.tensor.moves import Cut


class DealtExperts(MixtureOfExperts):
    """A mixture of experts that are dealt out to ranks with different samples.

    Every rank has the router, and chooses experts for its own positions. Those are sent to the ranks that have the
    chosen experts, and the outputs are sent back. So an expert's gradient is complete, of all ranks' positions, and the
    router's is partial.

    Ranks of the axis "tensor" are given the same samples, and each chooses for some of them: so no position is sent
    twice. The outputs are gathered. Those of the axis "context" have other positions of the same samples, and the same
    experts as this one has: what samples choose is counted by the layer of that axis, which this one stands for.
    """

    def __init__(self, layer: MixtureOfExperts):
        self.copy_attributes(layer)
        self.undivided = layer

    def __repr__(self):
        return repr(self.undivided)

    def specs(self, in_shape):
        specs, out_shape = super().specs(in_shape)
        split = Split(0, units=self.experts)
        return specs | {name: with_split(specs[name], split) for name in ("A", "B")}, out_shape

    def forward(self, p, x, ctx):
        group, cut = ctx.group("tensor"), Cut(0, len(x))
        if group.size == 1:
            return super().forward(p, x, ctx)
        noise = self.draw_noise(x.shape, ctx)  # of these samples, before they are cut
        noise = None if noise is None else cut.scatter(noise, group, ctx)
        y, saved = self.mix(p, cut.scatter(x, group, ctx), noise, ctx)
        return cut.all_gather(y, group, ctx, rounded=False), saved

    def backward(self, p, gy, saved, ctx):
        group, cut = ctx.group("tensor"), Cut(0, len(gy))
        if group.size == 1:
            return super().backward(p, gy, saved, ctx)
        gx, gradients = super().backward(p, cut.scatter(gy, group, ctx), saved, ctx)
        return (None if gx is None else cut.all_gather(gx, group, ctx, rounded=False)), gradients

    def draw_noise(self, shape, ctx):
        return self.undivided.draw_noise(shape, ctx)

    def count_choices(self, chosen, samples, ctx):
        return self.undivided.count_choices(chosen, samples, ctx)

    def sample_length(self, positions):
        return self.undivided.sample_length(positions)

    def count_load(self, counts, ctx):
        total = counts.astype(np.float64)
        ctx.group("tensor").sum(total)
        return total

    def run_experts(self, p, dispatched, counts, ctx):
        group = ctx.group("expert")
        plan = group.plan(counts)
        received = self._send(group, dispatched, plan.sent, plan.received, ctx)[plan.by_expert]
        outputs, saved_by_expert = super().run_experts(p, received, plan.counts, ctx)
        return self._send_back(group, outputs, plan, ctx), (plan, received, saved_by_expert)

    def experts_backward(self, p, gexperts, dispatched, saved, counts, ctx):
        group, (plan, received, saved_by_expert) = ctx.group("expert"), saved
        upstream = self._send(group, gexperts, plan.sent, plan.received, ctx)[plan.by_expert]
        greceived, gradients = super().experts_backward(p, upstream, received, saved_by_expert, plan.counts, ctx)
        return self._send_back(group, greceived, plan, ctx), gradients

    def _send(self, group: ExpertRanks, rows: np.ndarray, sent, received, ctx) -> np.ndarray:
        """The rows that ranks have for this one's experts; what there is to do meanwhile is done."""
        out = ctx.empty((int(received.sum()), self.features), rows.dtype)
        wait = group.start(rows, sent, received, out)
        group.compute_meanwhile()
        return wait()

    def _send_back(self, group: ExpertRanks, rows: np.ndarray, plan, ctx) -> np.ndarray:
        """The rows that this rank has sent, as the experts made them, of those of its experts."""
        by_rank = np.empty_like(rows)
        by_rank[plan.by_expert] = rows
        out = ctx.empty((int(plan.sent.sum()), self.features), rows.dtype)
        return group.start(by_rank, plan.received, plan.sent, out)()


class SharedExpert(Residual):
    """Experts that are dealt out, and one beside them that every position takes: computed while positions travel."""

    def forward(self, p, x, ctx):
        with ctx.group("expert").meanwhile(lambda: ctx.children[1].forward(p[1], x)) as shared:
            y, kept = ctx.children[0].forward(p[0], x)
        other, kept_shared = shared.pop()
        return np.add(y, other, y), [kept, kept_shared]

    def backward(self, p, gy, saved, ctx):
        kept_shared = [saved.pop()]
        with ctx.group("expert").meanwhile(lambda: ctx.children[1].backward(p[1], gy, kept_shared.pop())) as shared:
            gx = ctx.children[0].backward(p[0], gy, saved.pop())
        other = shared.pop()
        if gx is None or other is None or not ctx.needs_input_grad:
            return None, {}
        return np.add(gx, other, gx), {}
