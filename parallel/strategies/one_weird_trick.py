"""One weird trick: convolutions are data-parallel, fully-connected layers model-parallel (Krizhevsky 2014).

Convolutions have most of the arithmetic and few parameters: every rank has all of them, and computes its samples.
Fully-connected layers have most of the parameters and little arithmetic: every rank has a part of each (tensor/), and
computes all samples. In between activations move, by one of these schemes; r ranks have b samples each:

all      everybody's at once: one pass through the fully-connected layers, of r b samples.
turns    one rank's after the other: r passes of b samples; while they compute one, the next travels.
shares   1/r of everybody's at a time: r passes of b samples, and all ranks send alike.
features everybody's at once, but each rank gets only those features whose rows of the first layer it has: an alltoall
         in place of an allgather, and one sum of that layer's outputs more.

The gradients of the activations go back the way they came, summed. Then the convolutions' gradients are summed over the
ranks, as in data parallelism; the others are nobody else's. Bytes that a rank sends in a step, for c of convolutions'
parameters, n of a rank's activations and o of the first fully-connected layer's outputs for all samples: 2 (r-1)/r c,
and 2 (r-1) n with all, turns (on average) and shares, or 2 (r-1)/r n + 2 (r-1)/r o with features; data parallelism
would send 2 (r-1)/r of all parameters. Memory for gathered activations: r b samples' with all and features, 2 b with
the others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from collectives.steps import chunk
from nn.core.context import ALONE, LayerContext
from nn.core.layer import Sequential
from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.exchange.base import Exchange
from parallel.exchange.messages import Buckets
from parallel.mesh import Mesh, Ranks
from parallel.passes.whole import Whole
from parallel.strategies.activation_rounds import Rounds
from parallel.strategies.along_data import BUCKETING
from parallel.strategies.join import UnevenTotal
from parallel.strategies.tensor.boundary import shapes, split
from parallel.strategies.tensor.moves import sum_as_one
from parallel.trainer import DistributedTrainer


class WeirdTrick(Whole):
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

    def hold(self, network, mesh):
        index, ranks = mesh.places["tensor"], mesh.sizes["tensor"]
        shared, self.parts_loss, self.at = split(network, self.whole_loss, ranks, self.scheme)
        self.shape = shapes(network)[self.at]
        return shared.part(index, ranks) if ranks > 1 else shared

    def start(self, mesh, network):
        super().start(mesh, network)
        self.ranks, self.rank = mesh.sizes["tensor"], mesh.places["tensor"]
        self.shard = self.rank, self.ranks
        self.knows = self.rank == 0

    def first_sample(self, total):
        return total.first if isinstance(total, UnevenTotal) else chunk(total, self.ranks, self.rank)[0]

    def join(self, trainer):
        """The two halves of the network: their layers, and how they see arrays."""
        trainer.loss = self.parts_loss
        held, ctx = trainer.held, trainer.ctx
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
        """As Whole. Every rank takes part in every micro-batch, also without samples."""
        context, batch, last = trainer.ctx.network_context, trainer.ctx.micro_batch, micro.addend is not None
        batch.training, batch.pieces, context.on_gradients_ready = True, None, None
        if not micro.accumulate:
            self.buckets.begin()
        pieces, loss = self.moves.samples(len(x), micro.first), 0.0
        if some := any(samples for _, samples in pieces):
            a, saved = self.convolve(context, x)
            loss, ga = self.rounds(trainer, a, y, total, pieces, micro.accumulate)
            context.micro_batch = batch
        if last:
            self.mean_statistics()
            context.on_gradients_ready = lambda end: self.buckets.ready(end - self.start_of_convolutions)
        trainer.tell(loss + before, total, micro)
        if some:
            context.groups["data"] = self.group
            self.halves[0].backward(self.views[0], ga, saved, self.contexts[0])
        else:
            trainer.exchange.skip(micro)
        if last:
            self.buckets.ready(len(trainer.gradients) - self.start_of_convolutions)
            if news := self.buckets.sum():
                trainer.say(news)
        return loss + before

    def convolve(self, context, x: np.ndarray) -> tuple[np.ndarray, object]:
        """The activations of this rank's samples, and what backward needs. Here ranks share a batch, behind none do."""
        context.groups["data"] = self.group
        found = self.forward(0, x)
        context.groups["data"] = ALONE
        return found

    def forward(self, half: int, x: np.ndarray) -> tuple[np.ndarray, object]:
        """One half of the network, as its root would do it."""
        context = self.contexts[half].network_context
        if context.mixed_precision:
            context.mixed_precision.begin(None if half else x, context.micro_batch.training)
        return self.halves[half].forward(self.views[half], x, self.contexts[half])

    def rounds(self, trainer, a, y, total, pieces, accumulate: bool) -> tuple[float, np.ndarray]:
        """The loss of everybody's activations a, and its gradient with respect to this rank's."""
        context, batch, loss = trainer.ctx.network_context, trainer.ctx.micro_batch, 0.0
        ga = np.zeros(a.shape, a.dtype)
        for number, (one, x, targets) in enumerate(self.moves.moved(a, y, [n for _, n in pieces])):
            samples = [(first + lo, hi - lo) for (first, _), (lo, hi) in zip(pieces, one.rows, strict=True)]
            context.micro_batch = replace(batch, pieces=samples, accumulate=accumulate or number > 0)
            z, saved = self.forward(1, x)
            value, gz = trainer.loss(z, targets, trainer.mean_over(total), self.contexts[1])
            loss += value
            gx, _ = self.halves[1].backward(self.views[1], gz, saved, self.contexts[1])
            self.moves.take_back(gx, one, ga)
        return loss, ga

    def mean_statistics(self) -> None:
        """Running statistics of the convolutions' part are the mean of all ranks', as in data parallelism."""
        if self.buffers:
            sum_as_one(self.buffers, self.group)
            for array in self.buffers:
                array /= self.ranks

    # ------------------------------------------------------------------------------------------------ evaluation

    def predict(self, trainer, x, training=False):
        """The outputs for this rank's samples; all compute them."""
        context, batch = trainer.ctx.network_context, trainer.ctx.micro_batch
        batch.training, batch.pieces, context.on_gradients_ready = training, None, None
        pieces = self.moves.samples(len(x), batch.sample)
        a, _ = self.convolve(context, x)
        found = np.empty((len(x), *trainer.network.out_shape), trainer.held.dtype)
        for one, given, _ in self.moves.moved(a, np.empty(len(x)), [n for _, n in pieces]):
            samples = [(first + lo, hi - lo) for (first, _), (lo, hi) in zip(pieces, one.rows, strict=True)]
            context.micro_batch = replace(batch, pieces=samples)
            z, _ = self.forward(1, given)
            at = sum(one.counts[: self.rank])
            lo, hi = one.rows[self.rank]
            if not training:
                found[lo:hi] = z[at : at + hi - lo]
        context.micro_batch = batch
        return found

    def evaluate(self, trainer, x, y):
        z = self.predict(trainer, x)
        return trainer.evaluate_outputs(z, y) if len(x) else trainer.no_scores()

    def look(self, trainer, part):
        """As Whole. All ranks go on together, or none: from the activations on each sees everybody's."""
        trainer.ctx.micro_batch.sample, x = part
        mine = trainer.held.bad_input(x, trainer.ctx)
        if any(trainer.mesh.allgather(mine is not None)):
            return mine
        return trainer.held.first_bad(trainer.p, x, trainer.ctx, lambda: self.predict(trainer, x, True))

    def close(self):
        self.buckets.close()

    def describe(self):
        return (
            f"layers before {self.at} data-parallel, the others computed by {self.ranks} ranks together, activations "
            f"moved by {self.scheme}; gradients of the former in {self.buckets.describe()}"
        )


def OneWeirdTrick(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    scheme: str = "all",
    bucketing: dict | None = None,
) -> DistributedTrainer:
    """`Trainer` on many ranks: convolutions data-parallel, fully-connected layers model-parallel.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks; the network a Sequential of convolutions and then linear layers.
    communicator : collectives.Communicator
    scheme : {"all", "turns", "shares", "features"}
        How activations move from the ones to the others; see above.
    bucketing : bucket, first, overlap of exchange/messages.py, or None
        How the convolutions' gradients are summed.

    Raises
    ------
    ValueError
        A network without two such parts, or whose linear layers cannot be shared by so many ranks.
    ReplicaError
        If ranks were given different networks, losses or optimizers.
    """
    mesh, pass_ = Mesh(communicator, tensor=communicator.size), WeirdTrick(loss, scheme, bucketing or BUCKETING)
    return DistributedTrainer(network, loss, optimizer, mesh, pass_, Exchange(), seed, "OneWeirdTrick")
