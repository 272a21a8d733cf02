"""How much a network computes and stores: weights, multiply-accumulates (MACs) and activations, counted, not measured.

One sample, forward; a fully connected or convolutional weight is used once for every place of the output. Backward does
each MAC twice, for the gradients of the input and of the weights; the first layer's input needs none. Elementwise
layers count no MACs, as is customary: activation and pooling cost O(N C H W), batch normalisation too.

The published table is that of Sze, Chen, Yang, Emer 2017 (Efficient processing of deep neural networks) as taught in
COMP4007; `notes` says where it differs from the true counts, and why.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from nn.core.layer import Layer, Shape
from nn.core.network import Network
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear
from nn.models import build


@dataclass(frozen=True)
class Row:
    """What one layer takes, for one sample.

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
    """One row a layer, in forward order. Allocates nothing but running statistics."""
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
    """The rows as a table, with the sums."""
    rows = count(network)
    heads = ("layer", "", "output", "weights", "parameters", "MACs forward", "backward", "activation bytes")
    lines = [
        (r.path, _short(r.layer), "x".join(map(str, r.out_shape)), r.weights, r.parameters, r.forward, r.backward)
        + (r.activation,)
        for r in rows
    ]
    sums = [sum(line[i] for line in lines) for i in range(3, 8)]
    lines.append(("", "in all", "x".join(map(str, network.out_shape)), *sums))
    return "\n".join([f"{network.name}: one sample of {network.in_shape}, {network.dtype}", *_table(heads, lines)])


# Model, what builds it, and the published row: conv weights and MACs, fc weights and MACs, total weights and MACs.
PUBLISHED = {
    "LeNet-5": ("lenet5-1998", (28, 28, 1), 10, ("2.6k", "283k", "58k", "58k", "60k", "341k")),
    "AlexNet": ("alexnet", (227, 227, 3), 1000, ("2.3M", "666M", "58.6M", "58.6M", "61M", "724M")),
    "OverFeat fast": ("overfeat-fast", (231, 231, 3), 1000, ("16M", "2.67G", "130M", "124M", "146M", "2.8G")),
    "VGG-16": ("vgg16", (224, 224, 3), 1000, ("14.7M", "15.3G", "124M", "130M", "138M", "15.5G")),
    "GoogLeNet v1": ("googlenet:0", (224, 224, 3), 1000, ("6.0M", "1.43G", "1M", "1M", "7M", "1.43G")),
    "ResNet-50": ("resnet50", (224, 224, 3), 1000, ("23.5M", "3.86G", "2M", "2M", "25.5M", "3.9G")),
}


def totals(network: Network) -> tuple[int, int, int, int, int, int]:
    """Weights and MACs of convolutions, of fully connected layers, and of both: a row of the published table."""
    conv_weights = conv_macs = fc_weights = fc_macs = 0
    for row in count(network):
        if isinstance(row.layer, Conv2d):
            conv_weights, conv_macs = conv_weights + row.weights, conv_macs + row.forward
        elif isinstance(row.layer, Linear):
            fc_weights, fc_macs = fc_weights + row.weights, fc_macs + row.forward
    return conv_weights, conv_macs, fc_weights, fc_macs, conv_weights + fc_weights, conv_macs + fc_macs


def agrees(counted: int, published: str) -> bool:
    """Whether a count rounds, or is cut off, to a published figure such as "14.7M" at that figure's digits."""
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}[published[-1]]
    unit = 10.0 ** -len(published[:-1].partition(".")[2])
    return abs(counted / scale - float(published[:-1])) < unit


def comparison() -> str:
    """The published table beside the true counts; what differs is marked and explained."""
    heads = ("model", "", "conv weights", "MACs", "fc weights", "MACs", "weights", "MACs", "input")
    lines, differing = [], []
    for name, (spec, in_shape, classes, published) in PUBLISHED.items():
        counted = totals(build(spec, in_shape, classes))
        marks = [p if agrees(c, p) else f"{p} *" for c, p in zip(counted, published, strict=True)]
        lines.append((name, "counted", *counted, "x".join(map(str, in_shape))))
        lines.append(("", "published", *marks, ""))
        if "*" in "".join(marks):
            differing.append(textwrap.fill(f"* {name}: {NOTES[name]}", 118, subsequent_indent="  "))
    return "\n".join([*_table(heads, lines), "", *differing])


def connections_1998() -> dict[str, int]:
    """Connections of LeNet-5 as its authors count them: biases, subsampling and the chosen maps of C3 included.

    A map of C3 sees 3, 4 or 6 of the six maps below: 6, 9 and 1 of the 16 do.
    """
    return {
        "C1": 28 * 28 * 6 * (25 + 1),
        "S2": 14 * 14 * 6 * (4 + 1),
        "C3": 10 * 10 * ((6 * 3 + 9 * 4 + 1 * 6) * 25 + 16),
        "S4": 5 * 5 * 16 * (4 + 1),
        "C5": 120 * (400 + 1),
        "F6": 84 * (120 + 1),
        "output": 84 * 10,
    }


_LENET = connections_1998()
_SWAPPED = "a fully connected layer has as many MACs as weights; this row's MACs are those of {}, whose row has these."
NOTES = {
    "LeNet-5": (
        "the row mixes two networks. Its MACs are connections as LeCun et al. 1998 count them: "
        + " + ".join(f"{name} {n:,}" for name, n in _LENET.items())
        + f" = {sum(_LENET.values()):,}; C5 and F6 ({_LENET['C5'] + _LENET['F6']:,}) are its fully connected part, all "
        "else its convolutions. So biases and subsampling are in, and C3 sees chosen maps only, with 60,000 weights in "
        "all. But 2.6k convolution weights, 150 + 2,400, are those of a C3 that sees all six maps, as it is built "
        "today and counted here."
    ),
    "OverFeat fast": _SWAPPED.format("VGG-16"),
    "VGG-16": _SWAPPED.format("OverFeat"),
    "GoogLeNet v1": (
        "the original's own table adds up to 1.50G, as it gives the first convolution 34M, where 7x7x3x64 weights at "
        "112x112 places make 118M; what else 1.43G leaves out is not published. The weights agree."
    ),
}


def training_time() -> str:
    """What it takes to train ResNet-50 on ImageNet for 90 epochs: the published arithmetic, then that of the counts."""
    rows = count(build("resnet50", (224, 224, 3), 1000))
    counted = sum(row.forward + row.backward for row in rows)
    images, epochs, peak, rate = 1.28e6, 90, 112e12, 1457
    lines = [f"ResNet-50 on ImageNet: {images:,.0f} images, {epochs} epochs; a MAC is two floating-point operations"]
    for source, macs in (("published", 11.7e9), ("counted", counted)):
        epoch = 2 * macs * images
        seconds = epochs * epoch / peak
        lines.append(
            f"  {source:9}  {macs / 1e9:.1f} GMAC forward and backward -> {epoch / 1e12:,.0f} TFLOP an epoch; "
            f"at {peak / 1e12:.0f} TFLOP/s at least {seconds:,.0f} s = {seconds / 3600:.1f} h"
        )
    seconds = epochs * images / rate
    lines.append(f"  measured   {rate:,} images/s -> {seconds:,.0f} s = {seconds / 3600:.0f} h")
    return "\n".join(lines)


def _first_layers(ctx) -> set[str]:
    """Paths of the layers whose input needs no gradient."""
    inner = [_first_layers(child) for child in ctx.children]
    return set().union(*inner) if inner else {ctx.path} if ctx.first else set()


def _short(layer: Layer) -> str:
    text = repr(layer)
    return text if len(text) <= 48 else text[:45] + "..."


def _table(heads: tuple, lines: list[tuple]) -> list[str]:
    """Columns of text to the left, of numbers to the right."""
    cells = [tuple(f"{cell:,}" if isinstance(cell, int) else cell for cell in line) for line in lines]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    right = [any(isinstance(line[i], int) for line in lines) for i in range(len(heads))]
    text = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in (heads, *cells)
    ]
    return [text[0], "-" * max(map(len, text)), *text[1:]]
