"""Options from what the user wrote: flags, a TOML file (--config), the config.json of a run to continue (--resume).

A value is taken from the first of: the flag, the TOML file, the default. What cannot be read is refused here, what
makes no sense by rules.py; an option that does not exist is named with the one that was perhaps meant.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from parallel.command.options import (
    FIELDS,
    TOPICS,
    TYPES,
    Options,
    help_of,
    names_of,
    off_flag,
    shown,
    shown_default,
    title_of,
)
from parallel.command.resuming import EARLIER_DEFAULTS, check_resumed, merged
from parallel.command.rules import check, check_number
from parallel.settings import OptionError, flag
from parallel.strategies import DECLARED, Strategy

LARGEST_FILE, MOST_DOTS = 2**16, 100  # of a TOML file: reading a dotted key takes the square of its parts
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
HELP = ("-h", "--help")
PATHS = ("out", "resume", "from_", "data", "data_dir", "offload")  # options that name a file or a directory
OFF = {off_flag(name)[2:].replace("-", "_"): name for name in FIELDS if off_flag(name)}  # no_timeline -> timeline


class Parser(argparse.ArgumentParser):
    """Wrong options are one message, without the list of all that there are; whoever parses says it."""

    def error(self, message: str):
        if unknown := re.fullmatch(r"unrecognized arguments: ([^\s=]+).*", message):
            message = f"no option {nearest(unknown[1], self._option_string_actions)}"
        if empty := re.fullmatch(r"argument (--\S+): expected one argument", message):
            message = f"{empty[1]} needs a value: {self._option_string_actions[empty[1]].help % {}}"
        raise OptionError(f"{message} (--help lists the options)")


class Help(argparse.Action):
    """--help: the options of every day; --help TOPIC, --help all: more."""

    def __call__(self, parser, namespace, topic, option_string=None):
        if topic not in (None, "all", "strategies", *TOPICS):
            near = closest(topic, ("all", "strategies", *TOPICS))
            hint = f": did you mean {near}?" if near else ""
            parser.error(f"--help: no topic {shown(topic)}{hint}; there are {', '.join(TOPICS)}, strategies, all")
        print(help_text(topic), end="")
        parser.exit()


def help_text(topic: str | None = None) -> str:
    """What --help prints: of a topic, of "all", or (None) the options of every day and the list of topics."""
    if topic == "strategies":
        return "\n".join(_described(strategy) for strategy in DECLARED)
    if topic:
        return parser(*(TOPICS if topic == "all" else [topic])).format_help()
    everyday = parser(*TOPICS, names=[name for name, f in FIELDS.items() if f.metadata["everyday"]])
    topics = "".join(f"  {topic:10} {title_of(topic)}\n" for topic in TOPICS)
    topics += "  strategies what each --strategy does, its keys, where it comes from\n"
    more = (
        "every switch, and every option without a default, has a --no-... that takes it back from --config and\n"
        "--resume; these are the options of every day; --help all shows all, --help TOPIC those of a topic:"
    )
    return f"{everyday.format_help()}\n{more}\n{topics}"


def _described(strategy: Strategy) -> str:
    """What --help strategies says of one."""
    lines = [strategy.summary, f"keys: {strategy.keys.describe()}" if strategy.keys else ""]
    lines += [f"flags: {' '.join(map(flag, strategy.reads()))}" if strategy.options else ""]
    lines += [f"--compress: {', '.join(methods)}" if (methods := strategy.supports.compress) else ""]
    lines += [f"source: {'; '.join(strategy.sources)}"]
    indented = [textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    ") for line in lines if line]
    return "\n".join([f"{strategy.name}: {strategy.title}", *indented, ""])


def parser(*topics: str, names: Iterable[str] = FIELDS) -> argparse.ArgumentParser:
    """argparse from the topics' dataclasses; an option that was not given is absent from the result."""
    parser = Parser(
        prog="train.py",
        usage="%(prog)s [options]",
        description="Train a neural network on one process or many ranks.",
        epilog="On a cluster: mpirun -n 4 python -m mpi4py scripts/train.py --data mnist --model lenet5",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(*HELP, nargs="?", action=Help, metavar="TOPIC", help="show options, and end")
    parser.add_argument("--config", metavar="FILE.toml", help="read options from this file; flags win")
    for topic in topics or TOPICS:
        group = parser.add_argument_group(title_of(topic))
        for name in names_of(topic):
            if name in names:
                _add(group, name)
    return parser


def _add(group, name: str) -> None:
    metadata, kind = FIELDS[name].metadata, TYPES[name]
    off = off_flag(name)
    if kind is bool:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=help_of(name))
        return
    choices, default = None if metadata["keys"] else metadata["choices"], shown_default(name)
    group.add_argument(
        flag(name),
        dest=name,
        type=kind,
        choices=choices,
        metavar=metadata["metavar"] or (None if choices else kind.__name__.upper()),
        help=help_of(name) + (f" (default: {default})" if default else ""),
    )
    if off:
        group.add_argument(off, dest=name, action="store_const", const=None, help=argparse.SUPPRESS)


def nearest(name: str, known: Iterable[str]) -> str:
    """The name, and which one may have been meant."""
    words = [each[2:] for each in known if each.startswith("--")]  # dashes would make all names look alike
    near = closest(name.lstrip("-"), words)
    return shown(name) + (f": did you mean --{near}?" if near else "")


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that may have been meant, or an empty one."""
    import difflib  # takes milliseconds, which a run without a mistake need not spend

    return next(iter(difflib.get_close_matches(word, known, n=1)), "")


def parse(argv: list[str] | None = None) -> Options:
    """Options from the command line; raises OptionError where they make no sense by themselves (rules.check)."""
    argparser, argv = parser(), sys.argv[1:] if argv is None else argv
    for word in argv:
        if word.startswith("--") and word.endswith("=--"):  # argparse would make an empty list of it
            argparser.error(f"{word.removesuffix('=--')} --: expected a value")
    given = vars(argparser.parse_args(attach_values(argv)))
    try:
        values = read_toml(os.path.expanduser(given.pop("config"))) if "config" in given else {}
        values = expanded(values | given)
        values = usual_rate(values) | values if values.get("resume") is None else resumed(values)
        options = Options(**values)
        check(options)
    except OptionError as error:
        argparser.error(str(error))
    return options


def expanded(values: dict) -> dict:
    """Options with ~ and ~user as directories: shells expand them in some places only, and no file of options does."""
    return {
        name: os.path.expanduser(value) if name in PATHS and isinstance(value, str) else value
        for name, value in values.items()
    }


def usual_rate(values: dict) -> dict:
    """The learning rate of a run that gives none, and the momentum that goes with it.

    SGD at 0.01 with momentum 0.9 rises steadily on the default data; at 0.02 and more without, accuracy jumps up and
    down in the first epochs. Other optimizers have their own usual rates.
    """
    name = values.get("optimizer", "sgd")
    if "lr" in values:
        return {}
    if name == "sgd":
        return {} if str(values.get("compress")).startswith("dgc") else {"momentum": 0.9}  # dgc has one itself
    from nn.registry import lookup  # and with it NumPy, which a start of ranks does without

    return {} if name == "lbfgs" else {"lr": lookup("optimizer", name).lr}


def asks_for_help(argv: list[str]) -> bool:
    """Whether `parse` will print help and end."""
    return any(word.partition("=")[0] in HELP for word in argv)


def attach_values(argv: list[str]) -> list[str]:
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
    import tomllib

    from nn.reading import read_bytes  # and with it NumPy, which --help does without

    try:
        text = read_bytes(path, LARGEST_FILE)
        if any(line.count(b".") > MOST_DOTS for line in text.splitlines()):
            raise OptionError(f"--config {path} is no file of options: more than {MOST_DOTS} dots in a line")
        values = {key.replace("-", "_"): value for key, value in tomllib.loads(text.decode("utf-8-sig")).items()}
        values = {f"{key}_" if f"{key}_" in FIELDS else key: value for key, value in values.items()}  # from
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from None
    except OptionError:
        raise
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or brackets without end
        raise OptionError(f"--config {path} is not TOML ({error})") from None
    for key in values.keys() & OFF.keys():  # no-timeline = true, as the flag
        name, value = OFF[key], values.pop(key)
        if not isinstance(value, bool):
            raise OptionError(f"--config {path}: {key} must be true or false, given {shown(value)}")
        if name in values:
            raise OptionError(f"--config {path}: {key} and {name} contradict each other: leave one of them out")
        if TYPES[name] is bool or value:
            values[name] = not value if TYPES[name] is bool else None
    for key, value in values.items():
        if isinstance(value, dict):
            raise OptionError(f"--config {path}: options stand in no table: leave out [{key:.60}]")
        if key not in FIELDS:
            raise OptionError(f"--config {path}: no option {nearest(flag(key), map(flag, FIELDS))}")
    read = lambda key, value: None if value is None else of_its_kind(f"--config {path}", key, value)
    return {key: read(key, value) for key, value in values.items()}


def of_its_kind(where: str, name: str, value):
    """The value of an option from a file, which must be of its type and among its choices."""
    kind, metadata = TYPES[name], FIELDS[name].metadata
    choices = metadata["choices"]
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) != (kind is bool):
        raise OptionError(f"{where}: {name} must be {KINDS[kind]}, given {shown(value)}")
    if choices and not metadata["keys"] and value not in choices:
        raise OptionError(f"{where}: {name} must be one of {', '.join(choices)}, given {shown(value)}")
    if kind is int or kind is float:
        check_number(f"{where}: {name}", name, value)
    return kind(value)


def read_config(directory: Path) -> dict:
    """What the config.json of a run says, before anything is made of it."""
    from nn.reading import OPTIONS, read_json

    try:
        found = read_json(directory / "config.json", OPTIONS)
    except (FileNotFoundError, NotADirectoryError):
        raise OptionError(
            f"--resume {directory}: no config.json there, so this is not the directory of a run"
        ) from None
    except OSError as error:
        raise OptionError(f"--resume {directory}: config.json cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise OptionError(f"--resume {directory}: config.json is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise OptionError(f"--resume {directory}: config.json holds no options")
    if "no_pictures" in found:  # what earlier runs said
        found["pictures"] = not found.pop("no_pictures")
    if found.get("server_place") == "own":
        found["server_place"] = "dedicated"
    for key in sorted(found.keys() - FIELDS.keys()):
        raise OptionError(
            f"{directory}/config.json: no option {nearest(flag(key), map(flag, FIELDS))}. "
            "Was the file edited, or the run started by another version?"
        )
    return found


def resumed(values: dict) -> dict:
    """The options of the run to continue, with what may change taken from `values`."""
    directory = Path(values["resume"])
    before = read_config(directory)
    if EARLIER_DEFAULTS.keys() - before.keys():
        before = EARLIER_DEFAULTS | before | {"patience": None}  # nothing was held out to choose by
    check_resumed(directory, before, values)
    given = [name for name in FIELDS if before.get(name) is not None]
    typed = {name: of_its_kind(f"{directory}/config.json", name, before[name]) for name in given}
    return merged(typed, values) | {"out": str(directory)}
