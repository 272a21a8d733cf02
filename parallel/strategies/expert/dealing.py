"""A network whose experts are dealt out to ranks: which layer is replaced by what.

    mine = deal(network, 4)               # the same layers, names, arrays and random numbers
    mine = deal(shared, 4, tensors=2)     # of a network that tensor, or context, parallelism has rewritten

Every `MixtureOfExperts` becomes a `DealtExperts`; one that is the body of a `Residual` with another expert as shortcut
is computed while that one is. All else stays: ranks compute it for their own samples.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from nn.core.containers import Residual, Wrapper
from nn.core.layer import Layer
from nn.core.network import Network
from nn.layers.experts import MixtureOfExperts
from parallel.strategies.expert.layers import DealtExperts, SharedExpert
from parallel.strategies.tensor.move_wrapper import MoveWrapper, with_children


def deal(network: Network, experts: int, tensors: int = 1) -> Network:
    """Return the network of ranks on an axis "expert", whose parts are `NetworkPart`s of expert x tensor ranks.

    Parameters
    ----------
    network : Network
        Stays as it is.
    experts, tensors : int
        Ranks along the axes.

    Raises
    ------
    ValueError
        There are no experts, or numbers of them that the ranks do not divide: which numbers of ranks would do.
    """
    check(network, experts, tensors)
    if experts == 1:
        return network
    root = _dealt(network.root, experts, tensors)
    return Network(root, network.in_shape, network.dtype, network.name, mixed=network.mixed)


def check(network: Network, experts: int, tensors: int = 1) -> None:
    """Refuse a network whose experts cannot be dealt out to so many ranks; see `deal`."""
    if experts == 1:
        return
    found = [(path, layer) for path, layer, _, _ in network.layers() if isinstance(innermost(layer), MixtureOfExperts)]
    if not found:
        raise ValueError(
            f"{network.name} has no experts that {experts} ranks could have: there is no nn.MixtureOfExperts inside, "
            "such as transformer:experts=8,top=2 has; use data parallelism"
        )
    ranks = experts * tensors
    for path, layer in found:
        count = innermost(layer).experts
        if count % ranks:
            good = ", ".join(str(n // tensors) for n in range(tensors, count + 1, tensors) if count % n == 0)
            beside = f" and {tensors} on the axis tensor" if tensors > 1 else ""
            way = f"use {good} for the axis expert, or" if good else "use"
            raise ValueError(
                f"layer {path} ({layer!r:.80}): its {count} experts cannot be dealt out evenly to {experts} ranks on "
                f"the axis expert{beside}: {way} a number of experts that {ranks} divides"
            )


def innermost(layer: Layer) -> Layer:
    """Return the layer in all wrappers."""
    while isinstance(layer, Wrapper):
        layer = layer.layer
    return layer


def _dealt(layer: Layer, experts: int, tensors: int) -> Layer:
    """What stands in a layer's place. Arrays that the axis "tensor" cuts are there once for each rank on "expert"."""
    if isinstance(layer, MixtureOfExperts):
        return DealtExperts(layer)
    if isinstance(layer, MoveWrapper):
        inner = _dealt(layer.layer, experts, tensors)
        if isinstance(inner, DealtExperts):
            return MoveWrapper(inner, layer.enter, layer.leave, partial=tensors > 1)
        splits = layer.splits and {name: replace(split, copies=experts) for name, split in layer.splits.items()}
        return MoveWrapper(inner, layer.enter, layer.leave, splits, layer.late, layer.partial)
    if isinstance(layer, Wrapper):
        inner = _dealt(layer.layer, experts, tensors)
        if inner is layer.layer:
            return layer
        other = copy.copy(layer)
        other.layer = inner
        return other
    children = [*layer.children().values()]
    inside = [_dealt(child, experts, tensors) for child in children]
    if all(new is old for new, old in zip(inside, children, strict=True)):
        return layer
    other = with_children(layer, inside)
    if type(layer) is Residual and layer.shortcut and isinstance(innermost(inside[0]), DealtExperts):
        return SharedExpert(other.body, other.shortcut)
    return other
