"""A network whose branches are dealt out to ranks: an inception module's, each computed by one rank.

    mine = deal(network, rank, ranks)     # the same layers, names, arrays and random numbers

What comes to a module is whole on every rank. Each computes its branches; their outputs are gathered and lie side by
side as they would, whole again. On the way back the gradient of a branch's output is there already; what the branches
of a rank make of it is a partial gradient of the module's input, which is summed. Everything else is replicated.

Branches are dealt by their multiply-accumulates, the largest first, each to the rank that has least: no rank has more
than 4/3 of what would be best (Graham 1969). A module is as fast as the rank with the most.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nn.core.containers import Parallel, Recompute, Residual
from nn.core.layer import Layer, Sequential, Shape, child_path
from nn.core.network import Network
from nn.models.googlenet import Auxiliary
from parallel.strategies.activation_transfer import transfer
from parallel.strategies.operators.replicated import ReplicatedLayer
from parallel.strategies.tensor.move_wrapper import MoveWrapper, with_children
from parallel.strategies.tensor.moves import CopyTo, Move


def deal(network: Network, rank: int, ranks: int) -> Network:
    """What one of so many ranks computes of a network; each has all parameters.

    Raises
    ------
    ValueError
        There are no branches, or arrays that layers share.
    """
    if ranks == 1:
        return network
    if network.layout.shared:
        raise ValueError(f"{network.name}: layers share an array, {', '.join(sorted(network.layout.shared))}")
    root, modules = _dealt(network.root, network.in_shape, rank, ranks)
    if not modules:
        raise ValueError(
            f"{network.name} has no branches that {ranks} ranks could compute: there is no nn.Parallel inside, such as "
            "googlenet has; use data parallelism"
        )
    return Network(root, network.in_shape, network.dtype, network.name, mixed=network.mixed)


def _dealt(layer: Layer, in_shape: Shape, rank: int, ranks: int) -> tuple[Layer, int]:
    """What stands in a layer's place, and how many modules in it are dealt out."""
    if type(layer) is Parallel:
        return _module(layer, in_shape, rank, ranks), 1
    whole = isinstance(layer, Sequential) and type(layer).forward is Sequential.forward
    if not whole and type(layer) not in (Residual, Recompute, Auxiliary):
        return ReplicatedLayer(layer, rank), 0
    if type(layer) is Recompute:
        inner, count = _dealt(layer.layer, in_shape, rank, ranks)
        return Recompute(inner), count
    shapes = layer.child_shapes(in_shape)
    found = [_dealt(child, shape, rank, ranks) for child, shape in zip(layer.children().values(), shapes, strict=True)]
    return with_children(layer, [each for each, _ in found]), sum(count for _, count in found)


def _module(layer: Parallel, in_shape: Shape, rank: int, ranks: int) -> Layer:
    owners = owners_of([branch.macs(in_shape) for branch in layer.layers], ranks)
    shapes = [branch.specs(in_shape)[1] for branch in layer.layers]
    parts = [
        branch if owner == rank else Elsewhere(branch, shape)
        for branch, owner, shape in zip(layer.layers, owners, shapes, strict=True)
    ]
    widths = [shape[-1] for shape in shapes]
    return MoveWrapper(with_children(layer, parts), CopyTo("branch"), SideBySide(owners, widths, ranks))


def owners_of(costs: list[int], ranks: int) -> list[int]:
    """Whose each branch is, by their costs."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for branch in sorted(range(len(costs)), key=lambda branch: -costs[branch]):
        owners[branch] = min(range(ranks), key=loads.__getitem__)
        loads[owners[branch]] += max(1, costs[branch])
    return owners


class Elsewhere(MoveWrapper):
    """A branch that another rank computes: here it puts out no channels, and its gradients are zero.

    Parameters
    ----------
    layer : Layer
    shape : tuple of int
        Of its output, for one sample.
    """

    def __init__(self, layer: Layer, shape: Shape):
        super().__init__(layer)
        self.places = shape[:-1]

    output = gradient = "new"

    def forward(self, p, x, ctx):
        return np.empty((len(x), *self.places, 0), x.dtype), x.shape

    def backward(self, p, gy, shape, ctx):
        ctx.zero_gradients()
        gx = ctx.empty(shape, gy.dtype)
        gx[...] = 0
        return gx, {}


class SideBySide(Move):
    """The branches of all ranks in their order; backward those of this rank.

    Parameters
    ----------
    owners, widths : list of int
        Of each branch its rank, and how many channels it puts out.
    ranks : int
    """

    def __init__(self, owners: list[int], widths: list[int], ranks: int):
        self.width = sum(widths)
        self.columns: list[list[int]] = [[] for _ in range(ranks)]  # of every rank, where its channels belong
        at = 0
        for owner, width in zip(owners, widths, strict=True):
            self.columns[owner] += range(at, at + width)
            at += width
        self.most = max(map(len, self.columns))

    def forward(self, p, x, ctx):
        mine = ctx.workspace("branches", (*x.shape[:-1], self.most), x.dtype)
        mine[..., : x.shape[-1]] = x
        mine[..., x.shape[-1] :] = 0
        y = ctx.empty((*x.shape[:-1], self.width), x.dtype)
        for theirs, columns in zip(transfer(ctx, ctx.group("branch").all_gather, mine), self.columns, strict=True):
            y[..., columns] = theirs[..., : len(columns)]
        return y, None

    def backward(self, p, gy, saved, ctx):
        return gy[..., self.columns[ctx.group("branch").rank]], {}


def elsewhere(layer: Layer, path: str = "") -> Iterator[tuple[str, bool]]:
    """(path, whether another rank computes it) of every branch that is dealt out."""
    module = isinstance(layer, MoveWrapper) and isinstance(layer.leave, SideBySide)
    branches = layer.layer.layers if module else ()
    for i, (name, child) in enumerate(layer.children().items()):
        inner = child_path(path, name)
        if module:
            yield inner, isinstance(branches[i], Elsewhere)
        else:
            yield from elsewhere(child, inner)
