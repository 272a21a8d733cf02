"""A run that is continued: what --resume takes from its config.json, and what it may change."""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from pathlib import Path

from parallel.command.options import FIELDS, READERS, Options, off_flag
from parallel.launch import launcher
from parallel.settings import OptionError, flag, name_of
from parallel.strategies.axes import mesh

# What a resumed run may change, the options of strategies among it; all else comes from its config.json.
FREE_ON_RESUME = {name for name, field in FIELDS.items() if field.metadata["free"] or name in READERS}
# What a run has whose config.json is from before there was the option, where that is not the default.
EARLIER_DEFAULTS = {"validation": 0.0}


def result_options(options: Options) -> dict:
    """The options that are part of a run's result: those that a resumed one may not change."""
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in FREE_ON_RESUME}


def check_resumed(directory: Path, before: dict, given: dict) -> None:
    """Refuse another place, and to change what made the result; `before` are the options of that run."""
    if Path(given.get("out") or directory) != directory:
        raise OptionError(f"--resume {directory} goes on in that directory, given --out {given['out']}: leave it out")
    for name, value in given.items():
        if name not in FREE_ON_RESUME and before.get(name) != value:
            raise OptionError(
                f"--resume {directory}: that run has {flag(name)} {before.get(name)}, given "
                f"{off_flag(name) if value is None else value}: leave it out"
            )


def check_checkpoints(options: Options) -> None:
    """A run neither overwrites another one, nor continues from nothing, or with options that were changed by hand."""
    from nn.training.checkpoints import Checkpoints

    kept = Checkpoints(Path(options.out) / "checkpoints")
    saved = [entry for entry in kept.entries() if not entry.get("named")]
    if options.resume is None:
        if saved:
            raise OptionError(
                f"{options.out} already holds a run: continue it with --resume {options.out}, or give another --out"
            )
        check_overwritten(Path(options.out))
        return
    if not saved:
        raise OptionError(f"--resume {options.resume}: no checkpoint was saved there; start again, with another --out")
    facts = kept.facts()
    for name, value in result_options(options).items():
        before = facts.get(name, EARLIER_DEFAULTS.get(name, FIELDS[name].default))
        if facts and before != value:
            raise OptionError(
                f"{options.resume}/config.json has {flag(name)} {value}, but that run was made with {before}: put that "
                "back, or start another run"
            )


def check_overwritten(out: Path) -> None:
    """Refuse to write over files that no run has left: a run's first one is a config.json of its options."""
    from nn.reading import OPTIONS, read_json
    from parallel.command.run_directory import LEFT

    there = [name for name in ("config.json", "environment.json", *LEFT) if (out / name).is_file()]
    if not there:
        return
    with suppress(OSError, ValueError):
        found = read_json(out / "config.json", OPTIONS)
        if isinstance(found, dict) and found.keys() >= {"model", "data"}:
            return
    raise OptionError(f"{out / there[0]} was not left by a run, and would be overwritten: give another --out")


def merged(before: dict, values: dict) -> dict:
    """Return the options of a run to continue: those `before`, with what may change taken from `values`."""
    found = before | {"ranks": None, "threads": None} | values
    another = "strategy" in values and name_of(values["strategy"]) != name_of(str(before.get("strategy")))
    if another and "consistency" not in values:
        found.pop("consistency", None)
    strategy = found.get("strategy")
    for name, readers in READERS.items():  # another strategy has no use for some options of the one before
        if name not in values and strategy is not None and name_of(strategy) not in readers:
            found.pop(name, None)
    if "mesh" not in values and ("strategy" in values or not fits(found, values)):
        found.pop("mesh", None)
        if "tensor" not in values and name_of(str(found.get("strategy"))) != "tensor":
            found.pop("tensor", None)
        if "context" not in values:
            found.pop("context", None)
    if "strategy" in values and "pipeline" not in values:
        found.pop("pipeline", None)
    return found


def fits(before: dict, values: dict) -> bool:
    """Whether the mesh of a run to continue makes as many ranks as there are now."""
    ranks, named = values.get("ranks") or launcher.size_from_environment() or 1, mesh(Options(mesh=before.get("mesh")))
    made = math.prod(named.values())
    return made == ranks or ("data" not in named and ranks % made == 0)
