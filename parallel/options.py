"""The options of a training run: one dataclass, from which the command line, TOML files and config.json are made.

A value is taken from the first of: the flag, the TOML file given by --config, the default below. Nothing here imports
NumPy or MPI, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# How --help and README.md group the options: the first of each group, and its title.
GROUPS = {
    "model": "what is trained",
    "epochs": "how it learns",
    "ranks": "how ranks share the work",
    "checkpoint_steps": "the run",
}
BUCKETING = ("overlap", "bucket", "first_bucket")  # how messages are cut and moved
# Options that only some values of another one read.
READERS = (
    ("compress", "strategy", ("ddp", "ps")),
    ("momentum", "optimizer", ("sgd", "rmsprop", "lars")),
    ("nesterov", "optimizer", ("sgd",)),
    ("label_smoothing", "loss", ("cross-entropy",)),
    ("allreduce", "strategy", ("ddp",)),
    ("node_memory", "strategy", ("ddp",)),
    *((name, "strategy", ("ddp",)) for name in BUCKETING),
    ("servers", "strategy", ("ps",)),
    ("offload", "strategy", ("zero1", "zero2", "fsdp")),
    ("unit", "strategy", ("zero1", "zero2", "fsdp")),
    ("prefetch", "strategy", ("fsdp",)),
    ("server_place", "strategy", ("ps",)),
)
# Every number is in a range: counts are at least 1 and other numbers at least 0, but for these.
FROM_0 = ("epochs", "seed", "prefetch")
ABOVE_0 = ("bucket", "first_bucket", "unit")
BELOW_1 = ("momentum", "label_smoothing", "mask")
# Options that sum gradients in a way of their own, and those that say how the usual way does it.
MESSAGES = ("node_memory", *BUCKETING)
OWN_WAY = {
    "compress": ("reproducible", *MESSAGES),
    "reproducible": ("accumulate", "sync_batch_norm", "allreduce", *MESSAGES),
}
# Options that one process does not read.
BETWEEN_RANKS = ("strategy", "allreduce", *MESSAGES, "unit", "prefetch", "offload", "check_replicas")
TEXTS = ("stdlib", "tinyshakespeare", "text:")  # how the names of data sets begin whose samples are cut from a text
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def option(default, help: str, choices: tuple[str, ...] | None = None, metavar: str | None = None):
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass
class Options:
    """What a run of scripts/train.py is made of."""

    # what is trained
    model: str = option("cnn", "network: mlp:784,30,10, cnn, lenet5, ... (python scripts/workload.py lists all)")
    data: str = option("digits", "data set: digits (embedded), mnist, fashion-mnist, cifar10, FILE.npz, ...")
    data_dir: str | None = option(None, "where data sets lie (default: $RINGPROP_DATA, else ./data)", metavar="DIR")
    limit: int | None = option(None, "use at most that many samples of each split")
    normalise: bool = option(False, "subtract the mean of each channel, divide by its standard deviation")
    augment: str | None = option(None, "random changes of training images: crop:4, flip, crop:4,flip")
    length: int = option(64, "bytes in a sample of text")
    mask: float = option(0.0, "hide that share of the bytes, to be told from the others (encoder: 0.15 unless given)")
    activation: str | None = option(None, "of the hidden layers: sigmoid, tanh, relu, ... (default: the model's own)")
    init: str | None = option(None, "first weights: glorot, he, lecun, normal, ... (default: the model's own)")
    dtype: str = option("float32", "of parameters and activations", ("float32", "float64"))
    seed: int = option(0, "of initial weights and the order of samples")

    # how it learns
    epochs: int = option(30, "passes over the training data")
    batch: int = option(32, "samples in a step, over all ranks")
    loss: str = option(
        "cross-entropy", "what is minimised", ("cross-entropy", "quadratic", "mse", "mae", "huber", "bce")
    )
    label_smoothing: float = option(0.0, "of cross-entropy, such as 0.1")
    optimizer: str = option("sgd", "update rule", ("sgd", "adagrad", "rmsprop", "adam", "adamw", "lars", "lamb"))
    lr: float = option(0.1, "learning rate")
    momentum: float = option(0.0, "of SGD, RMSprop and LARS, such as 0.9")
    nesterov: bool = option(False, "Nesterov's momentum")
    weight_decay: float = option(0.0, "L2 coefficient; biases and normalisation are exempt")
    clip: str | None = option(None, "clip gradients: value:LIMIT, norm:LIMIT (each tensor's), global:LIMIT")
    schedule: str | None = option(
        None, "learning rate over time: cosine:warmup=5, step:every=10, plateau, ... (times in epochs)"
    )
    linear_scaling: int | None = option(
        None,
        "batch that --lr is meant for: a k times larger one gets k times the rate, reached over 5 epochs of warm-up",
        metavar="BATCH",
    )
    sync_batch_norm: bool = option(False, "batch normalisation over the samples of all ranks")
    accumulate: int = option(1, "cut every step's samples into so many parts, computed one after the other")
    patience: int | None = option(None, "stop after that many epochs without better accuracy, keep the best")

    # how ranks share the work
    ranks: int | None = option(None, "start that many ranks here; without it, one process, or what mpirun started")
    strategy: str = option("ddp", "how ranks share the work", ("ddp", "dp", "ps", "zero1", "zero2", "fsdp"))
    allreduce: str = option("auto", "algorithm that sums gradients: auto, ring, doubling, ..., native")
    node_memory: str = option(
        "auto",
        "ddp: sum gradients in the memory that the ranks of a node share (auto: unless told how messages do it)",
        ("auto", "on", "off"),
    )
    overlap: str = option(
        "auto",
        "ddp: what moves messages during backprop (auto: none, unless another is measured to be faster)",
        ("auto", "thread", "poke", "none"),
    )
    bucket: float = option(25.0, "ddp: MiB of gradients in a message", metavar="MIB")
    first_bucket: float = option(1.0, "ddp: MiB of gradients in the first message", metavar="MIB")
    compress: str | None = option(
        None,
        "ddp, ps: fewer bytes: fp16, qsgd:LEVELS, terngrad, onebit, signsgd, topk:RATIO, threshold:LIMIT, dgc:RATIO, "
        "powersgd:RANK",
        metavar="METHOD",
    )
    servers: int = option(1, "ps: parameter servers, among which the parameters are cut")
    server_place: str = option("own", "ps: servers have ranks of their own, or live on workers", ("own", "workers"))
    unit: float = option(
        1.0, "zero1, zero2, fsdp: MiB of neighbouring layers' parameters that travel together", metavar="MIB"
    )
    prefetch: int | None = option(
        None, "fsdp: units gathered ahead while others compute (default: 1 between nodes, 0 on one)", metavar="N"
    )
    offload: str | None = option(
        None, "zero1, zero2, fsdp: keep the shards in memory-mapped files there, gone when the run ends", metavar="DIR"
    )
    reproducible: int | None = option(
        None, "the same bits on any number of ranks: cut every batch into so many virtual shards, such as 8"
    )
    check_replicas: int | None = option(None, "compare the parameters of all ranks every so many steps", metavar="N")
    watch: float = option(
        300.0, "seconds that ranks may wait for each other before the run ends and says who did (0: for ever)"
    )
    threads: int | None = option(None, "BLAS threads of a rank (default: cores / ranks on this host)")

    # the run
    checkpoint_steps: int | None = option(
        None, "also save every so many steps (always: after every epoch)", metavar="N"
    )
    profile: bool = option(False, "show the time of every layer before training")
    find_lr: bool = option(False, "try growing learning rates, draw the loss, and end")
    inspect: bool = option(False, "after training: confusion, misclassified samples, distributions, dead units")
    timeline: bool = option(False, "record what every rank did when: trace.json and timeline.png")
    memory: bool = option(False, "after training: bytes that every rank keeps and sends, beside the formulas")
    no_pictures: bool = option(False, "draw no curves.png and breakdown.png: a short run ends a second earlier")
    out: str | None = option(None, "directory of the run (default: runs/DATE-DATA-MODEL)", metavar="DIR")
    resume: str | None = option(None, "continue the run in DIR from its last checkpoint", metavar="DIR")


# What a resumed run may change; all else is part of the result and comes from its config.json.
FREE_ON_RESUME = {
    "epochs", "data_dir", "ranks", "threads", "patience", "checkpoint_steps", "resume", "out", "watch",
    "check_replicas", "servers", "server_place", "profile", "find_lr", "inspect", "timeline", "no_pictures",
    "strategy", "offload", "prefetch", "unit", "memory", "allreduce", *MESSAGES,
}  # fmt: skip


class OptionError(ValueError):
    """An option that makes no sense; the message says which and what would."""


class Parser(argparse.ArgumentParser):
    """Wrong options are one message, without the list of all that there are; whoever parses says it."""

    def error(self, message: str):
        if unknown := re.fullmatch(r"unrecognized arguments: ([^\s=]+).*", message):
            message = f"no option {nearest(unknown[1], self._option_string_actions)}"
        raise OptionError(f"{message} (--help lists the options)")


def parser() -> argparse.ArgumentParser:
    """argparse from the dataclass; an option that was not given is absent from the result."""
    parser = Parser(
        prog="train.py",
        description="Train a neural network on one process or many ranks.",
        epilog="On a cluster: mpirun -n 4 python -m mpi4py scripts/train.py --data mnist --model lenet5",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE.toml", help="read options from this file; flags win")
    for f in dataclasses.fields(Options):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        kind = type_of(f)
        if kind is bool:
            group.add_argument(flag(f.name), action="store_true", help=f.metadata["help"])
            continue
        default = f" (default: {shown})" if (shown := shown_default(f)) else ""
        group.add_argument(
            flag(f.name),
            type=kind,
            choices=f.metadata["choices"],
            metavar=f.metadata["metavar"] or (None if f.metadata["choices"] else kind.__name__.upper()),
            help=f.metadata["help"] + default,
        )
    return parser


def type_of(f: dataclasses.Field) -> type:
    """int of `int | None`, and so on."""
    return next(kind for kind in (bool, int, float, str) if kind.__name__ in str(f.type))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def shown_default(f: dataclasses.Field) -> str:
    """Empty where nothing is done unless asked for."""
    off = f.default is None or (not f.default and type_of(f) is not int)
    return "" if off else str(f.default)


def nearest(name: str, known: Iterable[str]) -> str:
    """The name, and which one may have been meant."""
    words = [each[2:] for each in known if each.startswith("--")]  # dashes would make all names look alike
    near = difflib.get_close_matches(name.lstrip("-"), words, n=1)
    return repr(name) + (f": did you mean --{near[0]}?" if near else "")


def parse(argv: list[str] | None = None) -> Options:
    """Options from the command line; raises OptionError where they make no sense by themselves (`check`)."""
    argparser = parser()
    given = vars(argparser.parse_args(joined(sys.argv[1:] if argv is None else argv)))
    try:
        values = read_toml(given.pop("config")) if "config" in given else {}
        values |= given
        if "resume" in values:
            values = resumed(values)
        options = Options(**values)
        check(options)
    except OptionError as error:
        argparser.error(str(error))
    return options


def joined(argv: list[str]) -> list[str]:
    """`--lr -1e-3` as `--lr=-1e-3`: argparse takes the second for an option otherwise, and not for a wrong number."""
    found: list[str] = []
    for word in argv:
        if found and found[-1].startswith("--") and re.match(r"-(\.?\d|inf|nan)", word):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def read_toml(path: str) -> dict:
    """Options from a TOML file: keys as the flags, with _ or - between words."""
    try:
        with open(path, "rb") as file:
            values = {key.replace("-", "_"): value for key, value in tomllib.load(file).items()}
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise OptionError(f"--config {path} is not TOML ({error})") from None
    known = [f.name for f in dataclasses.fields(Options)]
    for key, value in values.items():
        if isinstance(value, dict):
            raise OptionError(f"--config {path}: options stand in no table: leave out [{key}]")
        if key not in known:
            raise OptionError(f"--config {path}: no option {nearest(flag(key), map(flag, known))}")
    return {key: of_its_kind(f"--config {path}", key, value) for key, value in values.items()}


def of_its_kind(where: str, name: str, value):
    """The value of an option from a file, which must be of its type and among its choices."""
    f = next(f for f in dataclasses.fields(Options) if f.name == name)
    kind, choices = type_of(f), f.metadata["choices"]
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) != (kind is bool):
        raise OptionError(f"{where}: {name} must be {KINDS[kind]}, given {value!r}")
    if choices and value not in choices:
        raise OptionError(f"{where}: {name} must be one of {', '.join(choices)}, given {value!r}")
    return kind(value)


def resumed(values: dict) -> dict:
    """The options of the run to continue, with what may change taken from `values`."""
    directory = Path(values["resume"])
    try:
        before = json.loads((directory / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise OptionError(
            f"--resume {directory}: no config.json there, so this is not the directory of a run"
        ) from None
    except OSError as error:
        raise OptionError(f"--resume {directory}: config.json cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise OptionError(f"--resume {directory}: config.json is not JSON ({error})") from None
    if not isinstance(before, dict):
        raise OptionError(f"--resume {directory}: config.json holds no options")
    if Path(values.get("out") or directory) != directory:
        raise OptionError(f"--resume {directory} goes on in that directory, given --out {values['out']}: leave it out")
    for key, value in values.items():
        if key not in FREE_ON_RESUME and before.get(key) != value:
            raise OptionError(
                f"--resume {directory}: that run has {flag(key)} {before.get(key)}, given {value}: leave it out"
            )
    known = [f.name for f in dataclasses.fields(Options) if before.get(f.name) is not None]
    found = {name: of_its_kind(f"{directory}/config.json", name, before[name]) for name in known}
    found |= {"ranks": None, "threads": None} | values
    for name, other, readers in READERS:  # another strategy has no use for some options of the one before
        if name in FREE_ON_RESUME and name not in values and found.get(other) not in (None, *readers):
            found.pop(name, None)
    return found | {"out": str(directory)}


def check(options: Options) -> None:
    """Refuse numbers out of range and options that others leave without effect, by name."""
    for f in dataclasses.fields(Options):
        value = getattr(options, f.name)
        if value is not None and type_of(f) in (int, float):
            check_number(f.name, type_of(f), value)
        if value == "":
            raise OptionError(f"{flag(f.name)} must not be empty: leave it out")
    for name in ("accumulate", "reproducible"):
        if (getattr(options, name) or 1) > options.batch:
            raise OptionError(
                f"{flag(name)} must be at most the {options.batch} samples of --batch, given {getattr(options, name)}"
            )
    defaults = {f.name: f.default for f in dataclasses.fields(Options)}
    for way, others in OWN_WAY.items():
        for name in others if getattr(options, way) else ():
            if getattr(options, name) != defaults[name]:
                raise OptionError(f"{flag(name)} does not go with --{way}: leave one of them out")
    if options.find_lr and options.resume:
        raise OptionError("--find-lr tries rates on a network that has not learned yet: leave out --resume")
    if options.length != defaults["length"] and not options.data.startswith(TEXTS):
        raise OptionError(
            f"--length has no effect with --data {options.data}: leave it out, or use {', '.join(TEXTS)}PATH"
        )
    for name, other, readers in READERS:
        if getattr(options, name) != defaults[name] and getattr(options, other) not in readers:
            raise OptionError(
                f"{flag(name)} has no effect with {flag(other)} {getattr(options, other)}: "
                f"leave it out, or use {', '.join(readers)}"
            )


def check_number(name: str, kind: type, value: float) -> None:
    """Refuse a number out of its range."""
    if kind is int:
        least = 0 if name in FROM_0 else 1
        fits, allowed = value >= least, f"at least {least}"
    elif name in BELOW_1:
        fits, allowed = 0 <= value < 1, "at least 0 and below 1"
    elif name in ABOVE_0:
        fits, allowed = 0 < value < math.inf, "above 0 and finite"
    else:
        fits, allowed = 0 <= value < math.inf, "at least 0 and finite"
    if not fits:
        raise OptionError(f"{flag(name)} must be {allowed}, given {value}")


def check_one_node(options: Options) -> None:
    """Refuse what has no effect where all ranks share a node."""
    if options.node_memory == "on" and (asked := of_messages(options)):
        raise OptionError(
            f"{asked[0]} has no effect with --node-memory on where all ranks share a node: "
            "gradients are summed in its memory, without messages; leave one of them out"
        )


def of_messages(options: Options) -> list[str]:
    """What was asked of messages, as on the command line: how they sum, are cut, and move."""
    asked = [name for name in BUCKETING if getattr(options, name) != getattr(Options, name)]
    if options.allreduce not in ("auto", "shared"):
        asked.append("allreduce")
    return [f"{flag(name)} {getattr(options, name)}" for name in asked]
