#!/usr/bin/env python3
"""What a network computes and stores, counted for one sample: weights, multiply-accumulates, activation bytes.

python scripts/workload.py                        the published table beside the true counts; the time to train
python scripts/workload.py vgg16                  layer by layer, forward and backward
python scripts/workload.py cnn --input 8,8,1      any model of the command line, for any input
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run

workload, models, registry = module("nn.analysis.workload"), module("nn.models"), module("nn.registry")
SEQUENCE, DIGITS, COLOURS = ((64,), 256), ((28, 28, 1), 10), ((32, 32, 3), 10)
INPUTS = {spec.partition(":")[0]: (shape, classes) for spec, shape, classes, _ in workload.PUBLISHED.values()}
INPUTS |= {"transformer": SEQUENCE, "encoder": SEQUENCE, "lstm": SEQUENCE, "resnet20": COLOURS, "vgg-small": COLOURS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model",
        nargs="?",
        help=f"one of {', '.join(sorted(registry.entries('model')))}, and its numbers: mlp:784,30,10",
    )
    parser.add_argument(
        "--input",
        type=shape,
        metavar="SHAPE",
        help="of one sample, such as 224,224,3 (height, width, channels); by default what the model is made for",
    )
    parser.add_argument("--classes", type=outputs, metavar="N", help="outputs, or the vocabulary")
    parser.add_argument("--dtype", choices=["float32", "float64"], help="for the bytes (default: float32)")
    options = parser.parse_args()
    if not options.model:
        for name in ("input", "classes", "dtype"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} needs a model: {', '.join(sorted(registry.entries('model')))}")
        print(workload.comparison(), workload.training_time(), sep="\n\n")
        return
    in_shape, classes = INPUTS.get(options.model.partition(":")[0], DIGITS)
    try:
        network = models.build(
            options.model, options.input or in_shape, options.classes or classes, options.dtype or "float32"
        )
    except ValueError as error:
        parser.error(str(error))
    print(workload.report(network))


def shape(text: str) -> tuple[int, ...]:
    """ "8,8,1" as (8, 8, 1)."""
    numbers = text.split(",")
    if not all(n.strip().isdecimal() and int(n) for n in numbers):
        raise argparse.ArgumentTypeError(f"expected whole numbers of at least 1, such as 8,8,1; given {text!r}")
    return tuple(map(int, numbers))


def outputs(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, given {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(run(main))
