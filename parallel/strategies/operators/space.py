"""A network whose images are cut in height: which layer computes rows, and where they are put together.

    mine = cut(network, rank, ranks)      # the same layers, names, arrays and random numbers

The layers are walked through in their order, with what is known of the activation that comes: whole on every rank, or
cut in height. The rules:

Conv2d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, Subsample
              rows of the output, if every rank gets one; with the rows of others that they need (halo.py). Of a whole
              image, which every rank has, nothing has to travel.
BatchNorm     statistics over the rows of all ranks.
Dropout       rows of the mask.
GlobalAvgPool2d, GlobalMaxPool2d
              the mean or maximum of all ranks', which is whole.
by place      layers that treat every place of an image by itself: activations, Linear, normalisation of channels.
any other     takes what is whole, after a gather where it comes cut, and every rank does the same.

Containers end as they would: where branches, or the two ways of a residual connection, do not end with the same rows,
or all whole, the images are put together before them.
"""

from __future__ import annotations

from nn.core.containers import Parallel, Recompute, Residual
from nn.core.layer import Layer, Sequential, Shape
from nn.core.network import Network
from nn.layers.activations import Activation
from nn.layers.batch_normalization import BatchNorm
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout
from nn.layers.normalization import LayerNorm, LocalResponseNorm, RMSNorm
from nn.layers.pooling import GlobalAvgPool2d, GlobalMaxPool2d
from nn.models.googlenet import Auxiliary
from parallel.strategies.operators.replicated import GatherRows, ReplicatedLayer
from parallel.strategies.operators.rows import (
    BatchNormRows,
    GlobalMaxRows,
    GlobalMeanRows,
    WindowRows,
    needed_rows,
    window_of,
)
from parallel.strategies.tensor.move_wrapper import MoveWrapper, with_children
from parallel.strategies.tensor.moves import Cut
from parallel.strategies.tensor.parts import SplitDropout

BY_PLACE = (Activation, Linear, LayerNorm, RMSNorm, LocalResponseNorm)
State = int | None  # the height of an image that is cut; None: whole
Found = tuple[Layer, State]


def cut(network: Network, rank: int, ranks: int) -> Network:
    """What one of so many ranks computes of a network; each has all parameters.

    Raises
    ------
    ValueError
        Nothing can be cut in height: why not.
    """
    if ranks == 1:
        return network
    if network.layout.shared:
        raise ValueError(
            f"{network.name}: layers share an array ({', '.join(sorted(network.layout.shared))}), and of one that is "
            "used on rows and on what is whole no gradient can be separated: use data parallelism"
        )
    cutting = _Cutting(rank, ranks)
    root, state = cutting.layer(network.root, network.in_shape, None)
    if not cutting.cut:
        fewer = range(min(ranks - 1, network.in_shape[0]), 1, -1)
        most = next((n for n in fewer if _cuts(network, n)), 1)
        raise ValueError(
            f"{network.name} takes samples of shape {network.in_shape}, of which {ranks} ranks cannot have some rows "
            "each: there is no convolution or pool over images whose output has so many rows; use "
            + f"at most {most} ranks on the axis space, or " * (most > 1)
            + "data parallelism"
        )
    if state is not None:
        root = cutting.gathered(root, state)
    return Network(root, network.in_shape, network.dtype, network.name, mixed=network.mixed)


def _cuts(network: Network, ranks: int) -> bool:
    """Whether so many ranks can have some rows each."""
    cutting = _Cutting(0, ranks)
    cutting.layer(network.root, network.in_shape, None)
    return bool(cutting.cut)


class _Cutting:
    """One walk through a network."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks, self.cut = rank, ranks, 0

    def layer(self, layer: Layer, in_shape: Shape, state: State) -> Found:
        """What stands in a layer's place, and the height of its output where that is cut."""
        forward = type(layer).forward
        if isinstance(layer, Sequential) and forward is Sequential.forward:
            return self.sequential(layer, in_shape, state)
        if type(layer) is Recompute:
            inner, out = self.layer(layer.layer, in_shape, state)
            return Recompute(inner), out
        if type(layer) in (Residual, Parallel, Auxiliary):
            return self.branches(layer, in_shape, state)
        if (found := self.window(layer, in_shape, state)) is not None:
            return found
        if state is None:
            return self.replicated(layer, None), None
        if isinstance(layer, BatchNorm):
            return BatchNormRows(layer), state
        if isinstance(layer, Dropout):
            return SplitDropout(layer, Cut(1, state), "space"), state
        if type(layer) is GlobalAvgPool2d:
            return GlobalMeanRows(layer, state), None
        if type(layer) is GlobalMaxPool2d:
            return GlobalMaxRows(layer), None
        if isinstance(layer, BY_PLACE):
            return layer, state
        return self.replicated(layer, state), None

    def sequential(self, layer: Sequential, in_shape: Shape, state: State) -> Found:
        layers, shape = [], in_shape
        for child in layer.layers:
            found, state = self.layer(child, shape, state)
            layers.append(found)
            shape = child.specs(shape)[1]
        return with_children(layer, layers), state

    def branches(self, layer: Layer, in_shape: Shape, state: State) -> Found:
        """Branches that meet in a sum or side by side: all cut alike, or all whole; else nothing in here is cut."""
        before = self.cut
        found = [self.layer(child, in_shape, state) for child in layer.children().values()]
        if type(layer) is Auxiliary:  # classifiers
            found = [(way if out is None else self.gathered(way, out), None) for way, out in found]
        ends = {out for _, out in found}
        if type(layer) is Residual and not layer.shortcut:
            ends.add(state)
        if len(ends) == 1:
            return with_children(layer, [way for way, _ in found]), ends.pop()
        self.cut = before
        return self.replicated(layer, state), None

    def replicated(self, layer: Layer, state: State) -> Layer:
        """A layer that all ranks compute alike."""
        return ReplicatedLayer(layer, self.rank, None if state is None else GatherRows(state))

    def window(self, layer: Layer, in_shape: Shape, state: State) -> Found | None:
        """A convolution or pool, if every rank gets rows of its output."""
        size = in_shape[:2]
        if len(in_shape) != 3 or window_of(layer, size) is None:
            return None
        height = layer.specs(in_shape)[1][0]
        if height < self.ranks or any(lo == hi for lo, hi in needed_rows(layer, size, height, self.ranks)):
            return None
        self.cut += 1
        return WindowRows(layer, size, height, self.rank, self.ranks, state is None), height

    def gathered(self, layer: Layer, height: int) -> Layer:
        """The layer, and behind it the rows of all ranks; of a Sequential, behind its last child."""
        if isinstance(layer, Sequential):
            *before, last = layer.layers
            return with_children(layer, [*before, self.gathered(last, height)])
        return MoveWrapper(layer, leave=GatherRows(height))
