"""A network cut into stages, one after another, and the local network of a rank that has some of them.

A stage is a Network with some of the root's children, which keep their names. So it draws the weights and the dropout
masks that the whole network would, and the stages' layouts, last stage first, are the whole network's
(nn/core/layout.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nn.core.layer import Sequential
from nn.core.network import Network, takes_ids


def stages(network: Network, at: Iterable[int]) -> list[Network]:
    """The network's root Sequential, cut between children.

    Every stage but the first has to return dLoss/dx: set `ctx.network_context.input_gradient`. Padding that an
    Embedding finds is in its stage's MicroBatch, and has to travel to those after it.

    Parameters
    ----------
    network : Network
        Its root is a Sequential.
    at : numbers of children
        With which the second stage begins, and all after it, in order: [2, 5] makes three stages, of children 0 and 1,
        2 to 4, and the rest.

    Raises
    ------
    ValueError
        Where it cannot be cut: which place, and why.
    """
    root, at = network.root, list(at)
    if not isinstance(root, Sequential) or type(root).forward is not Sequential.forward:
        raise ValueError(f"{network.name}: only a Sequential can be cut into stages, the root is {root!r}")
    start, stop = root.first, root.first + len(root.layers)
    for k, before in zip(at, [start, *at], strict=False):
        if not before < k < stop:
            raise ValueError(
                f"{network.name} has children {start} to {stop - 1}: it can be cut before {start + 1} to {stop - 1}, "
                f"each once and in this order, given {at}"
            )
        for number, layer in enumerate(root.layers[k - start :], k):
            if takes_ids(layer):
                raise ValueError(
                    f"{network.name} cannot be cut before child {k}: child {number} ({layer!r}) takes ids, and only "
                    "the first stage is given those"
                )
    found, shape = [], network.in_shape
    for number, (a, b) in enumerate(zip([start, *at], [*at, stop], strict=True)):
        layers = Sequential(*root.layers[a - start : b - start], first=a)
        name = f"{network.name} (stage {number} of {len(at) + 1})"
        stage = Network(layers, shape, network.dtype, name, whole=network.layout, mixed=network.mixed)
        if b < stop and stage.training_shape != stage.out_shape:
            raise ValueError(
                f"{network.name} cannot be cut before child {b}: what comes there is {stage.training_shape} in "
                f"training and {stage.out_shape} in evaluation"
            )
        found.append(stage)
        shape = stage.out_shape
    return found


class LocalStages(Sequential):
    """The layers of several stages, which need not follow one another, under the names that they have in the whole.

    One layout for all that a rank has of a network; samples go through the stages, one by one.
    """

    def __init__(self, stages: Sequence[Network]):
        super().__init__(*(layer for stage in stages for layer in stage.root.layers))
        self.stages = stages

    def children(self):
        return {name: layer for stage in self.stages for name, layer in stage.root.children().items()}

    def specs(self, in_shape):
        return {name: spec for stage in self.stages for name, spec in stage.specs.items()}, self.stages[-1].out_shape

    def training_shape(self, in_shape):
        return self.stages[-1].training_shape

    def child_shapes(self, in_shape):
        return [shape for stage in self.stages for shape in stage.root.child_shapes(stage.in_shape)]

    def forward(self, p, x, ctx):
        raise TypeError("samples go through the stages, one by one")


def local_network(network: Network, stages: Sequence[Network]) -> Network:
    """Return some stages of a network, in their order, as one Network with one layout: that of a rank."""
    layers = sum(len(stage.root.layers) for stage in stages)
    if layers == len(network.root.layers):
        return network
    if len(stages) == 1:
        return stages[0]
    name = " and ".join(stage.name for stage in stages)
    first = stages[0].in_shape
    return Network(LocalStages(stages), first, network.dtype, name, whole=network.layout, mixed=network.mixed)
