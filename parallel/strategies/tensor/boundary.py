"""Where a network's convolutions end and its fully-connected layers begin, of which ranks have parts each.

MPI is not asked for here, so that what cannot be is refused before there are ranks.
"""

from __future__ import annotations

from nn.core.layer import Layer, Sequential
from nn.core.network import Network
from nn.layers.batch_normalization import BatchNorm
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.losses import Loss
from parallel.strategies.tensor.moves import Cut
from parallel.strategies.tensor.rewriting import PARTIAL_GRADIENT, share

SCHEMES = ("all", "turns", "shares", "features")


def boundary(network: Network) -> int:
    """The number of the root's child with which the fully-connected layers begin.

    Raises
    ------
    ValueError
        There are no such two parts.
    """
    root = network.root
    if isinstance(root, Sequential) and type(root).forward is Sequential.forward:
        layers = list(root.layers)
        last = max((i for i, layer in enumerate(layers) if holds(layer, Conv2d)), default=-1)
        dense = [i for i, layer in enumerate(layers) if i > last and holds(layer, Linear)]
        if last >= 0 and dense:
            return dense[0]
    raise ValueError(
        f"{network.name} is no Sequential of convolutions and then linear layers, which the one weird trick is for: "
        "use --strategy tensor or ddp"
    )


def holds(layer: Layer, kind: type[Layer]) -> bool:
    """Whether a layer is one of a kind, or has one inside."""
    return isinstance(layer, kind) or any(holds(child, kind) for child in layer.children().values())


def split(network: Network, loss: Loss, ranks: int, scheme: str) -> tuple[Network, Loss, int]:
    """(network of which each rank has a part of the fully-connected layers, loss, where these begin).

    Raises
    ------
    ValueError
        A network without such layers, or of which nothing can be shared; a scheme that does not exist, or does not fit.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"one weird trick by {scheme!r}: expected one of {', '.join(SCHEMES)}")
    at = boundary(network)
    given = PARTIAL_GRADIENT
    if scheme == "features":
        first, features = network.root.layers[at], shapes(network)[at]
        if not isinstance(first, Linear) or len(features) != 1 or features[0] < ranks:
            raise ValueError(
                f"{network.name}: features are dealt out to {ranks} ranks before a linear layer of so many at least, "
                f"child {at} is {first!r}, given samples of shape {features}: use all, turns or shares"
            )
        given = Cut(-1, features[0])
    if scheme in ("turns", "shares") and any(holds(layer, BatchNorm) for layer in network.root.layers[at:]):
        raise ValueError(
            f"{network.name} has batch normalisation among its linear layers, which needs all samples at once: "
            "use all or features"
        )
    shared = share(network, loss, ranks, start=at, given=given)
    return shared.network, shared.loss, at


def shapes(network: Network) -> list[tuple[int, ...]]:
    """The shape of what comes to each of the root's children."""
    return network.root.child_shapes(network.in_shape)
