"""Classify image files with a trained network: likeliest classes, confidence, and the preprocessing."""

from __future__ import annotations

import argparse
import sys

import numpy as np

import nn
from nn.data import images
from nn.layers.activations import softmax
from parallel.command.arguments import Parser, whole
from parallel.command.trained_run import error_text, opened
from parallel.settings import OptionError, printable

FAR = 0.5  # between two borders, of 0 .. 1: then one is the other's negative


def main(argv: list[str] | None = None) -> int:
    """Predict as the command line says; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        trained = opened(options.run)
        check(trained, options.run)
        for name in options.images:
            print(printable("\n".join(answer_lines(trained, name, options))), flush=True)
    except (OptionError, nn.FileError, nn.CheckpointError, ValueError, TypeError, OSError, MemoryError) as error:
        print(f"error: {error_text(error)}", file=sys.stderr)
        return 1
    return 0


def parser() -> Parser:
    """The command line."""
    found = Parser(prog="predict.py", description=__doc__)
    found.add_argument("run", metavar="RUN", help="directory of a run, or a file that nn.save wrote")
    found.add_argument("images", metavar="IMAGE", nargs="+", help=f"image files: {', '.join(images.FORMATS)}")
    found.add_argument("--top", type=whole(), default=3, metavar="K", help="tell the K likeliest classes (default: 3)")
    found.add_argument(
        *("--fit",), choices=images.FITS, default="crop", help="what is done where the sides' proportion differs"
    )
    found.add_argument(
        "--invert",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="take the negative: dark on light as light on dark",
    )
    return found


def check(trained: nn.Model, run: str) -> None:
    """Refuse a network that does not tell classes of images, and what its file says of these that cannot be."""
    network = trained.network
    if len(network.in_shape) != 3 or len(network.out_shape) != 1:
        raise OptionError(
            f"{run}: {network.name} takes samples of shape {network.in_shape} and makes {network.out_shape}: this "
            "program is for images (height, width, channels) and classes; scripts/sample.py is for texts"
        )
    about, (classes,) = trained.about, network.out_shape
    names = about.get("class_names")
    if names and not (isinstance(names, list) and len(names) == classes):
        raise OptionError(f"{run}: class_names must be a list of {classes}, one for each output, given {names!r:.80}")
    for key, counts in (("white", {1}), ("border", {1}), ("scale", {1, network.in_shape[2]})):
        _check_numbers(run, key, about.get(key, 1.0), counts)
    _check_numbers(run, "shift", about.get("shift", 0.0), {1, network.in_shape[2]})


def _check_numbers(run: str, key: str, value: object, counts: set[int]) -> None:
    """Refuse what is not so many finite numbers."""
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) not in counts or not all(isinstance(n, int | float) and np.isfinite(n) for n in numbers):
        what = "a number" if counts == {1} else "a number, or one for each channel"
        raise OptionError(f"{run}: {key} must be {what}, given {value!r:.80}")


def answer_lines(trained: nn.Model, name: str, options: argparse.Namespace) -> list[str]:
    """The lines about one image."""
    about = trained.about
    image, before = images.read_image(name)
    image, done = images.fit_to_shape(image, trained.network.in_shape, options.fit)
    if options.invert:
        image = 1 - image
        done.append("inverted")
    scale, shift = (np.asarray(about.get(key, default), float) for key, default in (("scale", 1.0), ("shift", 0.0)))
    x = (image * about.get("white", 1)) * scale + shift
    z = trained.predict(x[None].astype(trained.network.dtype))[0]
    names = about.get("class_names") or [str(i) for i in range(len(z))]
    lines = [f"{name} ({', '.join(before + done)})"]
    if "border" in about and abs(images.border(image) - about["border"]) > FAR:
        light, dark = ("light", "dark") if about["border"] < images.border(image) else ("dark", "light")
        other = "leave out" if options.invert else "try"
        lines.append(f"  its border is {light}, and {dark} in the training samples: {other} --invert")
    shares, unit = confidence(z, about.get("outputs", "logits"))
    for i in np.argsort(-shares, kind="stable")[: options.top]:
        lines.append(f"  {shares[i]:7.1%}  {names[i]}" if unit else f"  {shares[i]:8.3f}  {names[i]}")
    return lines


def confidence(z: np.ndarray, outputs: str) -> tuple[np.ndarray, bool]:
    """How sure the network is of each class, and whether these are shares: of values, they are what they are."""
    if outputs == "logits":
        return softmax(z.astype(np.float64), np.empty(z.shape)), True
    if outputs == "logits of each":
        return 0.5 * (1 + np.tanh(0.5 * z.astype(np.float64))), True
    return z.astype(np.float64), False
