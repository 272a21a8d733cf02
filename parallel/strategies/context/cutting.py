"""A network of whose sequences one rank has some positions: which layer is replaced by what.

    mine = cut(network, groups)      # the same layers, names, arrays and random numbers

Positions are taken before the first layer, and every layer computes them alone: so activations are cut everywhere, and
outputs stay cut until somebody asks for predictions. Only attention asks other ranks. What mixes positions in another
way, such as a recurrent layer or a mean over time, is refused. The result can be cut once more, into stages or for
tensor parallelism.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from nn.core.containers import Parallel, Recompute, Residual
from nn.core.layer import Layer, Sequential, Shape, child_path
from nn.core.network import Network
from nn.layers.activations import Activation
from nn.layers.attention import MultiHeadAttention
from nn.layers.dense import Linear, TiedLinear
from nn.layers.dropout import Dropout
from nn.layers.embedding import Embedding, LearnedPositions, RotaryPositions, SinusoidalPositions
from nn.layers.experts import MixtureOfExperts
from nn.layers.normalization import LayerNorm, RMSNorm
from parallel.strategies.context.attention import ContextAttention, ContextGroups
from parallel.strategies.context.layers import (
    ContextExperts,
    ContextRotaryPositions,
    ShowPositions,
    TakePositions,
)
from parallel.strategies.context.positions import positions
from parallel.strategies.tensor.move_wrapper import MoveWrapper, behind, with_children
from parallel.strategies.tensor.parts import SplitDropout, SplitPositions, SplitSinusoids

BY_POSITION = (Activation, Embedding, Linear, TiedLinear, LayerNorm, RMSNorm)
REPLACED: dict[type[Layer], type] = {
    MixtureOfExperts: ContextExperts,
    MultiHeadAttention: ContextAttention,
    RotaryPositions: ContextRotaryPositions,
}
ADDED: dict[type[Layer], type] = {LearnedPositions: SplitPositions, SinusoidalPositions: SplitSinusoids}


class Beside(NamedTuple):
    """What else shares the layers: ranks on the axis "tensor", and whether these cut positions once more."""

    tensor: int = 1
    sequence: bool = False


ALONE = Beside()


def cut(network: Network, groups: ContextGroups, beside: Beside = ALONE) -> Network:
    """Return the network of one rank, which has all parameters; the loss of its outputs is a `ContextLoss`.

    Raises
    ------
    ValueError
        A layer that mixes positions and is no attention; heads that cannot be dealt out; fewer positions than ranks.
    """
    degrees = groups.degrees
    if degrees.size == 1:
        return network
    if len(network.in_shape) not in (1, 2) or network.out_shape[:1] != network.in_shape[:1]:
        raise ValueError(
            f"{network.name} takes samples of shape {network.in_shape} and puts out {network.out_shape}: an axis "
            "context cuts sequences (T,) or (T, features) that have an output at every position; use data parallelism"
        )
    length = network.in_shape[0]
    if length < degrees.size:
        raise ValueError(
            f"{network.name} takes sequences of {length} positions, of which {degrees.size} ranks cannot have some "
            f"each: use at most {length} ranks on the axis context"
        )
    fewest = min(len(positions(length, rank, degrees)) for rank in range(degrees.size))
    if beside.sequence and fewest < beside.tensor:
        raise ValueError(
            f"{network.name} takes sequences of {length} positions, of which a rank of the axis context has {fewest}: "
            f"{beside.tensor} ranks of the axis tensor cannot have some each; use longer sequences, or --tensor pairs"
        )
    root = _Cutting(length, groups, beside).layer(network.root, "", network.in_shape, first=True)
    root = behind(root, ShowPositions(length, groups))
    return Network(root, network.in_shape, network.dtype, network.name, mixed=network.mixed)


class _Cutting:
    """One walk through a network."""

    def __init__(self, length: int, groups: ContextGroups, beside: Beside):
        self.length, self.groups, self.beside = length, groups, beside

    def layer(self, layer: Layer, path: str, in_shape: Shape, first: bool = False) -> Layer:
        """What stands in a layer's place; the first one takes the positions."""
        if isinstance(layer, Sequential) and type(layer).forward is Sequential.forward:
            return self.sequential(layer, path, in_shape, first)
        if first:
            return self.first(layer, path, in_shape)
        if type(layer) is Recompute:
            return Recompute(self.layer(layer.layer, path, in_shape))
        if type(layer) in (Residual, Parallel):
            inside = [self.layer(child, child_path(path, name), in_shape) for name, child in layer.children().items()]
            return with_children(layer, inside)
        if type(layer) in REPLACED:
            self.check(layer, path)
            return REPLACED[type(layer)](layer, self.length, self.groups)
        mine = self.groups.positions(self.length)
        if type(layer) in ADDED:
            return ADDED[type(layer)](layer, mine)
        if type(layer) is Dropout:
            return SplitDropout(layer, None, positions=mine, length=self.length)
        if isinstance(layer, BY_POSITION):
            return layer
        raise ValueError(
            f"layer {path} ({layer!r:.80}): an axis context cuts sequences into positions, and only attention may look "
            "at those of other ranks; use data, tensor or pipeline parallelism"
        )

    def first(self, layer: Layer, path: str, in_shape: Shape) -> Layer:
        """A layer that is given whole sequences."""
        inner = self.layer(layer, path, in_shape)
        if getattr(layer, "padding", None) is not None:
            inner = copy.copy(inner)
            inner.padding = None  # it would give attention that of some positions
        return MoveWrapper(inner, enter=TakePositions(self.length, self.groups, layer))

    def sequential(self, layer: Sequential, path: str, in_shape: Shape, first: bool) -> Layer:
        layers, shape = [], in_shape
        for name, child in layer.children().items():
            layers.append(self.layer(child, child_path(path, name), shape, first))
            shape, first = child.specs(shape)[1], False
        return with_children(layer, layers)

    def check(self, layer: Layer, path: str) -> None:
        """Refuse heads that cannot be dealt out, and a capacity, which is of whole samples."""
        degrees, shares = self.groups.degrees, self.groups.degrees.heads * self.beside.tensor
        if isinstance(layer, MultiHeadAttention) and layer.heads % shares:
            heads, tensor, size = layer.heads, self.beside.tensor, degrees.size
            good = [n for n in range(2, heads + 1) if heads % (n * tensor) == 0 and size % n == 0]
            use = ["--context ring", *(f"--context ring:{size // n},ulysses:{n}" for n in good)]
            among = f"{degrees.heads} ranks" + f" of the axis context for each of {tensor} of tensor" * (tensor > 1)
            raise ValueError(
                f"layer {path} ({layer!r}): its {heads} heads cannot be dealt out to {among} evenly: use "
                f"{', '.join(use)}, or a multiple of {shares} heads"
            )
        if isinstance(layer, MixtureOfExperts) and layer.capacity:
            raise ValueError(
                f"layer {path} ({layer!r}): what an expert has room for is counted in whole samples, in their order: "
                "with an axis context use capacity=0"
            )
