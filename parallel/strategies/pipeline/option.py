"""The option --pipeline: the schedule of a pipeline, with its keys.

--pipeline 1f1b:micro=8           a schedule by its name (strategies/pipeline/schedules.py), with keys
--pipeline gpipe:recompute        a key without a value is switched on
--pipeline pipedream:micro=16     an update after each; also vertical_sync
--pipeline pipedream:replicas=3/1 the same, the first stage on three ranks that take turns, the second on one
--pipeline mine.csv:cuts=3/5      a schedule that is written down, as PyTorch writes them
"""

from __future__ import annotations

from typing import NamedTuple

from parallel.settings import OptionError
from parallel.strategies import axes

MICRO_BATCHES = 8
NAMES = ("naive", "gpipe", "1f1b", "pipedream", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev")
SWITCHES = ("recompute", "vertical_sync")  # keys without a value


class Schedule(NamedTuple):
    """The value of --pipeline.

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


def schedule(options) -> Schedule:
    """Parse --pipeline."""
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
        found = option_strings.convert(name, parts, kinds, positional=False)
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


def arguments(options, data: int) -> dict:
    """Return the arguments of `parallel.Pipeline`, for `data` pipelines; a schedule in a file is read.

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


def replica_sizes(options, ranks: int) -> dict:
    """Return how many ranks are one replica, where several are, how they share its layers, and its schedule."""
    found: dict = {}
    if axes.is_pipeline(options) or axes.is_tensor(options):
        sizes = axes.sizes(options, ranks)
    if axes.is_pipeline(options):
        found |= {"pipeline": sizes["pipeline"], **arguments(options, sizes["data"])}
    if axes.is_tensor(options):
        found |= {"tensor": sizes["tensor"], "way": options.tensor}
    return found
