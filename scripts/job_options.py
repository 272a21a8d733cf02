"""Options that describe a training job, and how they are read: for estimate.py and experiments/scaling.py.

Nothing heavy is imported here, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from entry_point import module

arguments = module("parallel.command.arguments")
MOST = 1 << 30  # of a number of samples, classes, layers

SEQUENCE, DIGITS, COLOURS, IMAGENET = ((64,), 256), ((28, 28, 1), 10), ((32, 32, 3), 10), ((224, 224, 3), 1000)
INPUTS = {
    **dict.fromkeys(("transformer", "encoder", "lstm"), SEQUENCE),
    **dict.fromkeys(("resnet20", "vgg-small"), COLOURS),
    **dict.fromkeys(("vgg16", "resnet50", "googlenet"), IMAGENET),
    "alexnet": ((227, 227, 3), 1000),
    "overfeat-fast": ((231, 231, 3), 1000),
}
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}
MOST_RANKS = 1 << 24


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is trained, on what."""
    whole = arguments.whole(1, MOST)
    parser.add_argument(
        "model", help="network of the command line: vgg16, resnet50, mlp:784,30,10, transformer:512,8,6"
    )
    trained = parser.add_argument_group("the network that is trained")
    trained.add_argument("--input", type=shape, metavar="SHAPE", help="of one sample, such as 224,224,3")
    trained.add_argument("--classes", type=whole, metavar="N", help="outputs, or the vocabulary")
    trained.add_argument("--batch", type=whole, default=256, help="samples of a step over all ranks (default: 256)")
    trained.add_argument("--optimizer", choices=MOMENTS, default="sgd", help="0, 1 or 2 moments (default: sgd)")
    trained.add_argument(
        "--dtype",
        choices=("float32", "mixed"),
        default="float32",
        help="mixed: activations are kept and sent as float16 (default: float32)",
    )
    trained.add_argument(
        "--profile", metavar="CSV", help="seconds and bytes of every layer (parallel/planning/profile.py)"
    )
    trained.add_argument(
        "--profile-batch", type=whole, metavar="N", help="samples that the profile is of (default: --batch)"
    )
    machine = parser.add_argument_group("what it runs on")
    machine.add_argument(
        "--network",
        metavar="NAME|FILE",
        help="a name, a topology such as fat-tree:k=4,oversubscription=4 or a file, as bench.py network writes it "
        "(default: workstation)",
    )
    machine.add_argument(
        "--placement",
        metavar="HOW",
        help='of ranks on a topology: "in order" (default), "round robin", "random", or the host of each: 0,2,1,3',
    )
    machine.add_argument("--ranks-per-node", type=whole, metavar="N", help="instead of the network's")
    machine.add_argument(
        "--memory", type=size, metavar="BYTES", help="that a rank has, such as 16GiB: what does not fit is left out"
    )
    machine.add_argument(
        "--node-memory",
        choices=("auto", "on", "off"),
        default="auto",
        help="ranks of a node sum in its memory (auto: but on networks of GPUs)",
    )
    machine.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, default=True, help="messages travel during backprop"
    )
    machine.add_argument("--servers", type=whole, default=1, help="of ps (default: 1)")
    machine.add_argument("--micro", type=whole, metavar="M", help="micro-batches of pipelines (default: 4 a stage)")


MEASURE = """
import sys
from mpi4py import MPI
from collectives.pricing.measure import measure_network
network = measure_network(MPI.COMM_WORLD, tuple(4**k for k in range(1, 12)), float(sys.argv[2]))
if MPI.COMM_WORLD.rank == 0:
    network.save(sys.argv[1])
"""


def measured_network(ranks: int, seconds: float = 0.02):
    """What two ranks of this machine measure, about so many seconds for each length; all of `ranks` share its node.

    Raises
    ------
    RuntimeError
        the ranks did not end well
    """
    import tempfile

    from collectives.pricing.networks import Network
    from parallel.launch import launcher

    said: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "network.json"
        status = launcher.run(["-c", MEASURE, str(file), str(seconds)], 2, timeout=120, stdout=said.append)
        if status:
            raise RuntimeError(f"measuring the network: {launcher.ending(status)}: {''.join(said)[-500:]}")
        return Network.load(file).with_ranks_per_node(max(2, ranks))


def network_of(options) -> Network:  # noqa: F821
    """--network, with --ranks-per-node.

    Raises
    ------
    ValueError
        neither a name nor a file; a file that is no network, or lies
    """
    from collectives.pricing.networks import Network, find_network

    try:
        is_file = Path(options.network).is_file() and not options.network.endswith(".json")
        network = Network.load(options.network) if is_file else find_network(options.network)
    except ValueError as error:
        raise ValueError(f"--network {options.network}: {error}") from None
    if options.ranks_per_node:
        network = network.with_ranks_per_node(options.ranks_per_node)
    if options.placement:
        listed = re.fullmatch(r"\d+(,\d+)*", options.placement)
        network = network.place_ranks([int(i) for i in options.placement.split(",")] if listed else options.placement)
    return network


def in_node_memory(options) -> bool:
    """Whether ranks of a node sum in its memory."""
    if options.node_memory == "auto":
        return not (options.network or "").startswith("gpu")
    return options.node_memory == "on"


def samples_of(options) -> tuple[tuple[int, ...], int]:
    """Shape of a sample, and the number of classes: what is given, or the network's usual ones."""
    shape, classes = INPUTS.get(options.model.partition(":")[0], DIGITS)
    return options.input or shape, options.classes or classes


def model_of(options) -> nn.Network:  # noqa: F821
    """The network that is trained; nothing is allocated."""
    from nn.models import build

    found = build(options.model, *samples_of(options))
    found.mixed = getattr(options, "dtype", "float32") == "mixed"
    return found


def picture(text: str) -> str:
    """The name of a picture that can be written: asked before anything is computed."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"expected a file that ends in .png, .svg or .pdf, given {text!r}")
    return arguments.new_file(text)


def shape(text: str) -> tuple[int, ...]:
    """ "8,8,1" as (8, 8, 1)."""
    numbers = text.split(",")
    if not all(n.strip().isdecimal() and int(n) for n in numbers):
        raise argparse.ArgumentTypeError(f"expected whole numbers of at least 1, such as 8,8,1; given {text!r}")
    return tuple(map(int, numbers))


def size(text: str) -> float:
    """ "16GiB" or "2e9" as bytes."""
    from parallel.command.sizes import read_bytes

    try:
        return read_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def amount(text: str) -> float:
    """ "115M" or "2e9" as a number."""
    from parallel.command.sizes import read_bytes

    try:
        return read_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number above 0, such as 115M or 2e9, given {text!r}") from None


def node_size(network: Network, ranks: int) -> str:  # noqa: F821
    """How many ranks of a job share a node."""
    if network.topology:
        return f"{len(network.topology.hosts):,} hosts"
    per_node = network.ranks_per_node
    return "all ranks on one node" if per_node >= ranks else f"{per_node:,} ranks a node"


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, given {text!r}")
    return value


def ranks(text: str) -> list[int]:
    """ "64", "1,2,4", or "1..1024": doubling from the first to the last."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    found = [int(n) for n in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if match:
        at, last = int(match[1]), int(match[2])
        while at and at < last:
            found.append(at)
            at *= 2
        found.append(last)
    if not found or min(found) < 1 or max(found) > MOST_RANKS or (match and int(match[1]) > int(match[2])):
        raise argparse.ArgumentTypeError(
            f"ranks are numbers from 1 to {MOST_RANKS:,}: 64, or 1,2,4, or 1..1024; given {text!r}"
        )
    return sorted(set(found))
