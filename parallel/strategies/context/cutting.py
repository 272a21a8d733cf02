"""A network of whose sequences one rank has some positions: which layer is replaced by what.

    mine = cut(network, groups)      # the same layers, names, arrays and random numbers

Positions are taken behind the input, and every layer computes them alone: so activations are cut everywhere, and
outputs stay cut until somebody asks for predictions. Only attention asks other ranks. What mixes positions in another
way, such as a recurrent layer or a mean over time, is refused.
"""

from __future__ import annotations

from nn.core.containers import Parallel, Recompute, Residual
from nn.core.layer import Layer, Sequential, Shape
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
    ContextDropout,
    ContextExperts,
    ContextLearnedPositions,
    ContextRotaryPositions,
    ContextSinusoids,
    TakePositions,
)
from parallel.strategies.tensor.around import with_children

BY_POSITION = (Activation, Embedding, Linear, TiedLinear, LayerNorm, RMSNorm)
REPLACED: dict[type[Layer], type] = {
    Dropout: ContextDropout,
    LearnedPositions: ContextLearnedPositions,
    MixtureOfExperts: ContextExperts,
    MultiHeadAttention: ContextAttention,
    RotaryPositions: ContextRotaryPositions,
    SinusoidalPositions: ContextSinusoids,
}


def cut(network: Network, groups: ContextGroups) -> Network:
    """Return the network of one rank; it has all parameters.

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
    root = _Cutting(length, groups).layer(network.root, "", network.in_shape, first=True)
    return Network(root, network.in_shape, network.dtype, network.name, mixed=network.mixed)


class _Cutting:
    """One walk through a network."""

    def __init__(self, length: int, groups: ContextGroups):
        self.length, self.groups = length, groups

    def layer(self, layer: Layer, path: str, in_shape: Shape, first: bool = False) -> Layer:
        """What stands in a layer's place; the first one takes the positions."""
        if isinstance(layer, Sequential) and type(layer).forward is Sequential.forward:
            return self.sequential(layer, path, in_shape, first)
        if first:
            return TakePositions(self.layer(layer, path, in_shape), self.length, self.groups)
        if type(layer) is Recompute:
            return Recompute(self.layer(layer.layer, path, in_shape))
        if type(layer) in (Residual, Parallel):
            inside = [self.layer(child, _join(path, name), in_shape) for name, child in layer.children().items()]
            return with_children(layer, inside)
        if type(layer) in REPLACED:
            self.check(layer, path)
            return REPLACED[type(layer)](layer, self.length, self.groups)
        if isinstance(layer, BY_POSITION):
            return layer
        raise ValueError(
            f"layer {path} ({layer!r:.80}): an axis context cuts sequences into positions, and only attention may look "
            "at those of other ranks; use data, tensor or pipeline parallelism"
        )

    def sequential(self, layer: Sequential, path: str, in_shape: Shape, first: bool) -> Layer:
        layers, shape = [], in_shape
        for name, child in layer.children().items():
            layers.append(self.layer(child, _join(path, name), shape, first))
            shape, first = child.specs(shape)[1], False
        return with_children(layer, layers)

    def check(self, layer: Layer, path: str) -> None:
        """Refuse heads that cannot be dealt out, and a capacity, which is of whole samples."""
        degrees = self.groups.degrees
        if isinstance(layer, MultiHeadAttention) and layer.heads % degrees.heads:
            good = [str(n) for n in range(1, layer.heads + 1) if layer.heads % n == 0 and degrees.size % n == 0]
            raise ValueError(
                f"layer {path} ({layer!r}): its {layer.heads} heads cannot be dealt out to {degrees.heads} ranks "
                f"evenly: of {degrees.size} ranks {', '.join(good)} can share heads (--context ulysses:N), or none "
                "(--context ring)"
            )
        if isinstance(layer, MixtureOfExperts) and layer.capacity:
            raise ValueError(
                f"layer {path} ({layer!r}): what an expert has room for is counted in whole samples, in their order: "
                "with an axis context use capacity=0"
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
