"""How much a network computes and stores: weights, multiply-accumulates (MACs) and activations, counted, not measured.

One sample, forward; a fully connected or convolutional weight is used once for every position of the output. Backward
does each MAC twice, for the gradients of the input and of the weights; the first layer's input needs none. Elementwise
layers count no MACs, as is customary: activation and pooling cost O(N C H W), batch normalisation too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nn.core.layer import Layer, Shape
from nn.core.network import Network
from nn.tables import text_table


@dataclass(frozen=True)
class Row:
    """Cost of one layer, for one sample.

    Attributes
    ----------
    weights : int
        Elements of its matrices and kernels, without biases and normalisation: what tables in the literature count.
    parameters : int
        All that is trained.
    forward, backward : int
        Multiply-accumulates.
    activation : int
        Bytes of its output; 0 for a view of the input. What overwrites its input is counted as if it did not.
    """

    path: str
    layer: Layer
    out_shape: Shape
    weights: int
    parameters: int
    forward: int
    backward: int
    activation: int


def count(network: Network) -> list[Row]:
    """Return one row for each layer, in forward order. Allocates nothing but running statistics."""
    first = _first_layers(network.context())
    rows = []
    for path, layer, in_shape, out_shape in network.layers():
        trained = [s for s in layer.specs(in_shape)[0].values() if not (s.buffer or s.tied)]
        weights = sum(math.prod(s.shape) for s in trained if s.decay)
        macs = layer.macs(in_shape)
        rows.append(
            Row(
                path,
                layer,
                out_shape,
                weights,
                sum(math.prod(s.shape) for s in trained),
                macs,
                macs if path in first else 2 * macs,
                0 if layer.output == "view" else math.prod(out_shape) * network.dtype.itemsize,
            )
        )
    return rows


def report(network: Network) -> str:
    """Return the rows as a table, with the sums."""
    heads = ("layer", "", "output", "weights", "parameters", "MACs forward", "backward", "activation bytes")
    lines = [
        (r.path, _short(r.layer), "x".join(map(str, r.out_shape)), r.weights, r.parameters, r.forward, r.backward)
        + (r.activation,)
        for r in count(network)
    ]
    sums = [sum(line[i] for line in lines) for i in range(3, 8)]
    lines.append(("", "in all", "x".join(map(str, network.out_shape)), *sums))
    table = text_table([heads, *lines], left=(0, 1, 2), rules=(1,))
    return f"{network.name}: one sample of {network.in_shape}, {network.dtype}\n{table}"


def _first_layers(ctx) -> set[str]:
    """Paths of the layers whose input needs no gradient."""
    inner = [_first_layers(child) for child in ctx.children]
    return set().union(*inner) if inner else {ctx.path} if ctx.is_first else set()


def _short(layer: Layer) -> str:
    text = repr(layer)
    return text if len(text) <= 48 else text[:45] + "..."
