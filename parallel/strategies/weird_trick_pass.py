"""The pass of one weird trick (one_weird_trick.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nn.core.context import ALONE, LayerContext
from nn.core.layer import Sequential
from nn.losses import Loss
from parallel.mesh import Ranks
from parallel.passes.forward_backward import ForwardBackward
from parallel.state.splits import NetworkPart
from parallel.strategies.activation_rounds import Rounds
from parallel.strategies.tensor.boundary import shapes, split
from parallel.strategies.tensor.moves import sum_as_one
from parallel.sync.messages import Buckets


class WeirdTrick(ForwardBackward):
    """A step: forward through the convolutions, round by round through the rest and back, back through the former.

    Parameters
    ----------
    loss : Loss
        Of whole outputs.
    scheme : {"all", "turns", "shares", "features"}
    bucketing : dict
        How the convolutions' gradients are summed, as for Buckets.
    """

    def __init__(self, loss: Loss, scheme: str, bucketing: dict):
        self.whole_loss, self.scheme, self.bucketing = loss, scheme, bucketing

    def make_local_network(self, network, mesh):
        index, ranks = mesh.places["tensor"], mesh.sizes["tensor"]
        shared, self.parts_loss, self.at = split(network, self.whole_loss, ranks, self.scheme)
        self.shape = shapes(network)[self.at]
        return NetworkPart(shared, index, ranks) if ranks > 1 else shared

    def start(self, mesh, network):
        super().start(mesh, network)
        self.ranks, self.rank = mesh.sizes["tensor"], mesh.places["tensor"]
        self.shard = self.rank, self.ranks
        self.owns_loss = self.rank == 0

    def bind(self, trainer):
        """Make the two halves of the network: their layers, and their views of the arrays."""
        trainer.loss = self.parts_loss
        held, ctx = trainer.local_network, trainer.ctx
        root, at = held.root, self.at
        self.halves = [Sequential(*root.layers[:at]), Sequential(*root.layers[at:])]
        self.views = [trainer.p[:at], trainer.p[at:]]
        children = ctx.children[:at], ctx.children[at:]
        self.contexts = [
            LayerContext(ctx.network_context, half, "", inside, None, ctx.end)
            for half, inside in zip(self.halves, children, strict=True)
        ]
        ctx.bind(trainer.g)
        self.group = ctx.network_context.groups.setdefault("tensor", Ranks(trainer.communicator))
        layout = held.layout
        start = layout.ends[str(at)]  # of the convolutions' gradients, which are finished last
        ends = [end - start for end in layout.ends.values() if end > start]
        self.buckets = Buckets(
            self.group.communicator, trainer.gradients[start:], ends, layout.size - start, **self.bucketing
        )
        self.start_of_convolutions = start
        self.moves = Rounds(self.scheme, self.group, self.shape[-1], ctx)
        buffers = held.buffer_layout.items(trainer.buffers)
        self.buffers = [array for name, array in buffers if int(name.partition(".")[0]) < at]

    # ------------------------------------------------------------------------------------------------ a step

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """As for ForwardBackward. Every rank takes part in every micro-batch, also without samples."""
        context, batch, last = trainer.ctx.network_context, trainer.ctx.micro_batch, micro.addend is not None
        batch.training, context.on_gradients_ready = True, None
        if not micro.accumulate:
            self.buckets.begin_step()
        pieces, loss = self.moves.samples(len(x), micro.first), 0.0
        if some := any(samples for _, samples in pieces):
            a, saved = self.convolve(context, x)
            loss, ga = self.rounds(trainer, a, y, total, pieces, micro.accumulate)
            context.micro_batch = batch
        if last:
            self.mean_statistics()
            context.on_gradients_ready = lambda end: self.buckets.ready(end - self.start_of_convolutions)
        trainer.set_loss(loss + before, total, micro)
        if some:
            context.groups["data"] = self.group
            self.halves[0].backward(self.views[0], ga, saved, self.contexts[0])
        else:
            trainer.sync.skip_pass(micro)
        if last:
            self.buckets.ready(len(trainer.gradients) - self.start_of_convolutions)
            if news := self.buckets.sum():
                trainer.say(news)
        return loss + before

    def convolve(self, context, x: np.ndarray) -> tuple[np.ndarray, object]:
        """Return the activations of this rank's samples, and what backward needs; only here ranks share a batch."""
        context.groups["data"] = self.group
        found = self.forward(0, x)
        context.groups["data"] = ALONE
        return found

    def forward(self, half: int, x: np.ndarray) -> tuple[np.ndarray, object]:
        """Run one half of the network as its root would."""
        context = self.contexts[half].network_context
        if context.mixed_precision:
            context.mixed_precision.begin(None if half else x, context.micro_batch.training)
        return self.halves[half].forward(self.views[half], x, self.contexts[half])

    def rounds(self, trainer, a, y, total, pieces, accumulate: bool) -> tuple[float, np.ndarray]:
        """Return the loss of all ranks' activations, and its gradient with respect to this rank's, a."""
        context, batch, loss = trainer.ctx.network_context, trainer.ctx.micro_batch, 0.0
        ga = np.zeros(a.shape, a.dtype)
        for number, (one, x, targets) in enumerate(self.moves.rounds(a, y, [n for _, n in pieces])):
            samples = [(first + lo, hi - lo) for (first, _), (lo, hi) in zip(pieces, one.rows, strict=True)]
            context.micro_batch = replace(batch, start=samples, accumulate=accumulate or number > 0)
            z, saved = self.forward(1, x)
            value, gz = trainer.loss(z, targets, trainer.mean_over(total), self.contexts[1])
            loss += value
            gx, _ = self.halves[1].backward(self.views[1], gz, saved, self.contexts[1])
            self.moves.return_gradients(gx, one, ga)
        return loss, ga

    def mean_statistics(self) -> None:
        """Average the running statistics of the convolutions over the ranks, as in data parallelism."""
        if self.buffers:
            sum_as_one(self.buffers, self.group)
            for array in self.buffers:
                array /= self.ranks

    # ------------------------------------------------------------------------------------------------ evaluation

    def predict(self, trainer, x, training=False):
        """Return the outputs for this rank's samples, which all ranks compute together."""
        context, batch = trainer.ctx.network_context, trainer.ctx.micro_batch
        batch.training, context.on_gradients_ready = training, None
        pieces = self.moves.samples(len(x), batch.start)
        a, _ = self.convolve(context, x)
        found = np.empty((len(x), *trainer.network.out_shape), trainer.local_network.dtype)
        for one, given, _ in self.moves.rounds(a, np.empty(len(x)), [n for _, n in pieces]):
            samples = [(first + lo, hi - lo) for (first, _), (lo, hi) in zip(pieces, one.rows, strict=True)]
            context.micro_batch = replace(batch, start=samples)
            z, _ = self.forward(1, given)
            at = sum(one.counts[: self.rank])
            lo, hi = one.rows[self.rank]
            if not training:
                found[lo:hi] = z[at : at + hi - lo]
        context.micro_batch = batch
        return found

    def sum_scores(self, trainer, x, y):
        z = self.predict(trainer, x)
        return trainer.evaluate_outputs(z, y) if len(x) else trainer.no_scores()

    def look(self, trainer, part):
        """As for ForwardBackward. All ranks go on together, or none: from the activations on each sees everybody's."""
        trainer.ctx.micro_batch.start, x = part
        mine = trainer.local_network.bad_input(x, trainer.ctx)
        if any(trainer.mesh.allgather(mine is not None)):
            return mine
        return trainer.local_network.first_bad(trainer.p, x, trainer.ctx, lambda: self.predict(trainer, x, True))

    def close(self):
        self.buckets.close()

    def describe(self):
        return (
            f"layers before {self.at} data-parallel, the others computed by {self.ranks} ranks together, activations "
            f"moved by {self.scheme}; gradients of the former in {self.buckets.describe()}"
        )
