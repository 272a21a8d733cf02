"""What --mesh and --pipeline say: how many ranks each axis has, and the schedule of a pipeline.

--mesh data=2,pipeline=2          their product is the number of ranks; an axis that is left out has what is left
--mesh data=2,tensor=2            two groups of two ranks that compute every layer together
--mesh pipeline=2,tensor=2        two stages, of which two ranks each compute every layer together
--mesh space=4                    every image is cut in height; branch=4: branches are dealt out
--pipeline 1f1b:micro=8           a schedule by its name (strategies/pipeline/schedules.py), with keys
--pipeline gpipe:recompute        a key without a value is switched on
--pipeline pipedream:micro=16     an update after each; also vertical_sync
--pipeline pipedream:replicas=3/1 the same, the first stage on three ranks that take turns, the second on one
--pipeline mine.csv:cuts=3/5      a schedule that is written down, as PyTorch writes them
"""

from __future__ import annotations

import math
from typing import NamedTuple

from parallel.command.options import OptionError, Options

AXES = ("data", "pipeline", "tensor", "space", "branch")
SERVED = ("ps", "downpour")  # strategies with servers, which are on no axis
MICRO_BATCHES = 8
NAMES = ("naive", "gpipe", "1f1b", "pipedream", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev")
SWITCHES = ("recompute", "vertical_sync")  # keys without a value


class Schedule(NamedTuple):
    """What --pipeline says.

    Attributes
    ----------
    name : str
        Of a schedule, or of a file.
    micro : int
        Micro-batches; 0 where it is not said.
    cuts : list of int or None
    recompute : bool
    options : dict
        Of the schedule, such as chunks; vertical_sync, replicas of pipedream.
    """

    name: str
    micro: int
    cuts: list[int] | None
    recompute: bool
    options: dict


def is_pipeline(options: Options) -> bool:
    """Whether stages of the network lie on different ranks."""
    return options.strategy == "pipeline" or bool(options.pipeline) or mesh(options).get("pipeline", 1) > 1


def is_tensor(options: Options) -> bool:
    """Whether ranks compute layers together."""
    return options.strategy_name == "tensor" or mesh(options).get("tensor", 1) > 1


def serves_apart(options: Options) -> bool:
    """Whether the last ranks only serve those on the axes."""
    return options.strategy_name in SERVED and options.server_place == "own"


def together(options: Options) -> str:
    """The axis of ranks that compute rows of the same images, or branches of the same network; "" without one."""
    given = mesh(options)
    return next((axis for axis in AXES[3:] if given.get(axis, 1) > 1), "")


def mesh(options: Options) -> dict[str, int]:
    """The axes that --mesh names, and their ranks."""
    if not options.mesh:
        return {}
    from nn import option_strings

    try:
        found = option_strings.convert("it", options.mesh.split(","), dict.fromkeys(AXES, int), by_place=False)
    except ValueError as error:
        raise OptionError(f"--mesh {options.mesh}: {error}; such as --mesh data=2,pipeline=2") from None
    if not found:
        raise OptionError(f"--mesh {options.mesh} names no axis; such as --mesh data=2,pipeline=2")
    for axis, size in found.items():
        if size < 1:
            raise OptionError(f"--mesh {options.mesh}: {axis} must have at least 1 rank")
    return found


def sizes(options: Options, ranks: int) -> dict[str, int]:
    """How many of so many ranks every axis has, servers left out; the one that is not named what is left."""
    from parallel.mesh import sizes

    given, servers = mesh(options), options.servers if serves_apart(options) else 0
    if "pipeline" not in given and is_pipeline(options):
        given["pipeline"] = max(1, (ranks - servers) // (given.get("data", 1) * given.get("tensor", 1)))
    if "tensor" not in given and options.strategy_name == "tensor":
        given["tensor"] = max(1, ranks // (given.get("data", 1) * given.get("pipeline", 1)))
    try:
        found = sizes(ranks - servers, **given, servers=servers)
    except ValueError as error:
        text = f"--mesh {options.mesh}" if options.mesh else f"--strategy {options.strategy}"
        raise OptionError(f"{text}: {str(error).removeprefix('mesh: ')}") from None
    return {axis: found[axis] for axis in AXES}


def fitting(options: Options, ranks: int) -> tuple[int, str | None]:
    """(how many of so many ranks can train, --mesh for them) where ranks were lost: the axis "data" gets shorter.

    Raises
    ------
    OptionError
        The other axes need more.
    """
    given = {axis: size for axis, size in mesh(options).items() if axis != "data"}
    needed = math.prod(given.values())
    if ranks < needed:
        raise OptionError(f"--mesh {options.mesh}: {ranks} ranks are left, and the network is on {needed}: start more")
    if not given:
        return ranks, None
    return ranks - ranks % needed, ",".join(f"{axis}={size}" for axis, size in given.items())


def schedule(options: Options) -> Schedule:
    """What --pipeline says, in parts."""
    from nn import option_strings

    name, parts = option_strings.split(options.pipeline or "1f1b")
    parts = [part + "=1" if part in SWITCHES else part for part in parts]
    kinds = {"micro": int, "cuts": tuple, "recompute": bool, "chunks": int}
    written = name.endswith(".csv")
    if not written and name not in NAMES:
        raise OptionError(
            f"--pipeline {options.pipeline}: no schedule {name!r}; use one of {', '.join(NAMES)}, or a file "
            "with one, FILE.csv"
        )
    if written or name != "interleaved":
        kinds.pop("chunks")
    if written:
        kinds.pop("micro")
    if name == "pipedream":
        kinds = {"micro": int, "cuts": tuple, "vertical_sync": bool, "replicas": tuple}
    try:
        found = option_strings.convert(name, parts, kinds, by_place=False)
    except ValueError as error:
        raise OptionError(f"--pipeline {options.pipeline}: {error}") from None
    for key in ("micro", "chunks"):
        if found.get(key, 1) < 1:
            raise OptionError(f"--pipeline {options.pipeline}: {key} must be at least 1")
    for key, what in ("cuts", "numbers of layers, such as cuts=3/5"), ("replicas", "ranks of each stage, such as 3/1"):
        if not all(number.is_integer() for number in found.get(key, ())):
            raise OptionError(f"--pipeline {options.pipeline}: {key} are {what}")
        if key in found:
            found[key] = [int(number) for number in found[key]]
    return Schedule(
        name,
        found.get("micro", 0),
        found.get("cuts") or None,
        found.get("recompute", False),
        {key: found[key] for key in ("chunks", "vertical_sync", "replicas") if key in found},
    )


def arguments(options: Options, data: int) -> dict:
    """What `parallel.Pipeline` is given, for so many pipelines; reads the file of a schedule that is written down.

    "schedule" is "pipedream" where it is `parallel.PipeDream` that is given the rest, less recompute.
    """
    asked = schedule(options)
    found = {"cuts": asked.cuts, "recompute": asked.recompute, **asked.options}
    samples = options.batch // data
    if asked.name.endswith(".csv"):
        found |= written(asked.name)
        less = f"write a schedule of {max(1, samples)} or less, or train with --batch {found['micro_batches'] * data}"
    else:
        micro = asked.micro or max(1, min(MICRO_BATCHES, samples))
        found |= {"schedule": asked.name, "micro_batches": micro}
        less = f"use micro={max(1, samples)} or less"
    if found["micro_batches"] > samples:
        raise OptionError(
            f"--pipeline {options.pipeline}: {found['micro_batches']} micro-batches do not fit into the {samples} "
            f"samples that each of {data} pipelines has of --batch {options.batch}: {less}"
        )
    return found


def written(file: str) -> dict:
    """A schedule from a file, as PyTorch writes them."""
    from nn.reading import TABLE, read_text
    from parallel.strategies.pipeline import actions, checking

    try:
        rows = actions.read(read_text(file, TABLE, "utf-8-sig"))
        return {"schedule": rows, "micro_batches": checking.check(rows).micro_batches}
    except OSError as error:
        raise OptionError(f"--pipeline {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(
            f"--pipeline {file}: byte {error.start} is no text in UTF-8; a schedule is CSV, a row of actions such as "
            "0F0,0B0 for each rank"
        ) from None
    except ValueError as error:
        raise OptionError(f"--pipeline {file}: {error}") from None
