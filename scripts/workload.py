#!/usr/bin/env python3
"""What a network computes and stores, counted for one sample: weights, multiply-accumulates, activation bytes.

python scripts/workload.py                        the published table beside the true counts; the time to train
python scripts/workload.py vgg16                  layer by layer, forward and backward
python scripts/workload.py cnn --input 8,8,1      any model of the command line, for any input
"""

import argparse

from nn.models import MODELS, build
from nn.workload import PUBLISHED, comparison, report, training_time

SEQUENCE, DIGITS, COLOURS = ((64,), 256), ((28, 28, 1), 10), ((32, 32, 3), 10)
INPUTS = {spec.partition(":")[0]: (shape, classes) for spec, shape, classes, _ in PUBLISHED.values()}
INPUTS |= {"transformer": SEQUENCE, "encoder": SEQUENCE, "resnet20": COLOURS, "vgg-small": COLOURS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help=f"one of {', '.join(sorted(MODELS))}, and its numbers: mlp:784,30,10")
    parser.add_argument("--input", help="shape of one sample, such as 224,224,3; by default what the model is made for")
    parser.add_argument("--classes", type=int, help="outputs, or the vocabulary")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"], help="for the bytes")
    options = parser.parse_args()
    if not options.model:
        print(comparison(), training_time(), sep="\n\n")
        return
    try:
        in_shape, classes = INPUTS.get(options.model.partition(":")[0], DIGITS)
        if options.input:
            in_shape = tuple(int(n) for n in options.input.split(","))
        print(report(build(options.model, in_shape, options.classes or classes, options.dtype)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
