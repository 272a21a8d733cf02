"""Text that a trained language model goes on with: temperature, the k likeliest, a seed, a prompt."""

from __future__ import annotations

import codecs
import itertools
import sys

import nn
from nn.analysis import sampling
from parallel.command.arguments import Parser, number, whole
from parallel.command.trained_run import error_text, opened
from parallel.settings import OptionError, printable

BYTES = 256


def main(argv: list[str] | None = None) -> int:
    """Sample as the command line says; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        trained = opened(options.run)
        check(trained, options.run)
        prompt = options.prompt.encode() or b"\n"
        (places,) = trained.network.in_shape
        ids = sampling.generate(trained.predict, prompt, places, options.temperature, options.top_k, options.seed)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        print(options.prompt, end="", flush=True)
        for byte in itertools.islice(ids, options.length):
            print(printable(decoder.decode(bytes([byte]))), end="", flush=True)
        print(decoder.decode(b"", final=True))
    except (OptionError, nn.FileError, nn.CheckpointError, ValueError, TypeError, OSError, MemoryError) as error:
        print(f"error: {error_text(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def parser() -> Parser:
    """The command line."""
    found = Parser(prog="sample.py", description=__doc__)
    found.add_argument(
        "run", metavar="RUN", help="directory of a run with --model transformer or lstm, or a saved network"
    )
    found.add_argument("--prompt", default="", help="what the text begins with")
    found.add_argument("--length", type=whole(0), default=400, metavar="BYTES", help="bytes to add (default: 400)")
    found.add_argument(
        "--temperature", type=number(), default=0.8, help="below 1: likelier text; 0: the likeliest (default: 0.8)"
    )
    found.add_argument("--top-k", type=whole(), metavar="K", help="draw among the K likeliest bytes only")
    found.add_argument("--seed", type=whole(0), default=0, help="of the draws: the same seed, the same text")
    return found


def check(trained: nn.Model, run: str) -> None:
    """Refuse a network that does not tell the next byte."""
    network = trained.network
    places = network.in_shape[0] if len(network.in_shape) == 1 else 0
    if not network.takes_ids or network.out_shape != (places, BYTES):
        raise OptionError(
            f"{run}: {network.name} makes {network.out_shape} of {network.in_shape}: this program is for networks "
            "that tell the next byte, such as --model transformer --data tinyshakespeare"
        )
    if trained.about.get("hidden"):
        raise OptionError(f"{run}: {network.name} tells hidden bytes from those around them, not the next one")
