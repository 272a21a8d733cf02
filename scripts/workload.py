#!/usr/bin/env python3
"""Count what a network needs for one sample: weights, multiply-accumulates, bytes of activations.

python scripts/workload.py                        the published table beside the true counts; the time to train
python scripts/workload.py vgg16                  layer by layer, forward and backward
python scripts/workload.py cnn --input 8,8,1      any model of the command line, for any input

The published table is that of Sze, Chen, Yang, Emer 2017 (Efficient processing of deep neural networks); NOTES says
where it differs from the true counts, and why.
"""

import argparse
import os
import sys
import textwrap

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run
from job_options import MOST, arguments, shape

nn, workload, models, registry, tables = map(
    module, ("nn", "nn.analysis.workload", "nn.models", "nn.registry", "nn.tables")
)
# Model, what builds it, and the published row: conv weights and MACs, fc weights and MACs, total weights and MACs.
PUBLISHED = {
    "LeNet-5": ("lenet5-1998", (28, 28, 1), 10, ("2.6k", "283k", "58k", "58k", "60k", "341k")),
    "AlexNet": ("alexnet", (227, 227, 3), 1000, ("2.3M", "666M", "58.6M", "58.6M", "61M", "724M")),
    "OverFeat fast": ("overfeat-fast", (231, 231, 3), 1000, ("16M", "2.67G", "130M", "124M", "146M", "2.8G")),
    "VGG-16": ("vgg16", (224, 224, 3), 1000, ("14.7M", "15.3G", "124M", "130M", "138M", "15.5G")),
    "GoogLeNet v1": ("googlenet:0", (224, 224, 3), 1000, ("6.0M", "1.43G", "1M", "1M", "7M", "1.43G")),
    "ResNet-50": ("resnet50", (224, 224, 3), 1000, ("23.5M", "3.86G", "2M", "2M", "25.5M", "3.9G")),
}

SEQUENCE, DIGITS, COLOURS = ((64,), 256), ((28, 28, 1), 10), ((32, 32, 3), 10)
INPUTS = {spec.partition(":")[0]: (shape, classes) for spec, shape, classes, _ in PUBLISHED.values()}
INPUTS |= {"transformer": SEQUENCE, "encoder": SEQUENCE, "lstm": SEQUENCE, "resnet20": COLOURS, "vgg-small": COLOURS}


def main() -> None:
    parser = arguments.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model",
        nargs="?",
        help=f"one of {', '.join(sorted(registry.registered('model')))}, and its numbers: mlp:784,30,10",
    )
    parser.add_argument(
        "--input",
        type=shape,
        metavar="SHAPE",
        help="of one sample, such as 224,224,3 (height, width, channels); by default what the model is made for",
    )
    parser.add_argument("--classes", type=arguments.whole(1, MOST), metavar="N", help="outputs, or the vocabulary")
    parser.add_argument("--dtype", choices=["float32", "float64"], help="for the bytes (default: float32)")
    options = parser.parse_args()
    if not options.model:
        for name in ("input", "classes", "dtype"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} needs a model: {', '.join(sorted(registry.registered('model')))}")
        print(comparison(), training_time(), sep="\n\n")
        return
    in_shape, classes = INPUTS.get(options.model.partition(":")[0], DIGITS)
    try:
        network = models.build(
            options.model, options.input or in_shape, options.classes or classes, options.dtype or "float32"
        )
    except ValueError as error:
        parser.error(str(error))
    print(workload.report(network))


def totals(network) -> tuple[int, int, int, int, int, int]:
    """Weights and MACs of convolutions, of fully connected layers, and of both: a row of the published table."""
    conv_weights = conv_macs = fc_weights = fc_macs = 0
    for row in workload.count(network):
        if isinstance(row.layer, nn.Conv2d):
            conv_weights, conv_macs = conv_weights + row.weights, conv_macs + row.forward
        elif isinstance(row.layer, nn.Linear):
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
        counted = totals(models.build(spec, in_shape, classes))
        marks = [p if agrees(c, p) else f"{p} *" for c, p in zip(counted, published, strict=True)]
        lines.append((name, "counted", *counted, "x".join(map(str, in_shape))))
        lines.append(("", "published", *marks, ""))
        if "*" in "".join(marks):
            differing.append(textwrap.fill(f"* {name}: {NOTES[name]}", 118, subsequent_indent="  "))
    return "\n".join([tables.text_table([heads, *lines], left=(0, 1, len(heads) - 1), rules=(1,)), "", *differing])


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
    rows = workload.count(models.build("resnet50", (224, 224, 3), 1000))
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


if __name__ == "__main__":
    sys.exit(run(main))
