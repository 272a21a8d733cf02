"""What makes no sense is refused here: every rule about options, told before ranks start where it can be known then.

| of what | rules | asked by |
|---|---|---|
| options alone | RANGES, READ_BY, EXCLUDES and the functions in OF_OPTIONS | parsing.py |
| a run to continue | `check_resumed`, `check_checkpoints` | parsing.py, factory.py, training_run.py |
| ranks, files, surroundings | `check_surroundings` | factory.py |
| data, network, optimizer | `check_targets` ... `check_loading` | factory.py |
| ranks that have been started | `check_started`, `check_alike` | training_run.py |
| and their nodes | `check_one_node`, `check_scattered` | above, registry.py |

A rule is a function that returns nothing or raises OptionError: which option, what is wrong, what to do. What the text
of an option may be is refused where it is read (`learning_rates.parse`, `models.build` and their like). NumPy and MPI
are imported by the rules that need them: those of options alone must not wait for either.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from parallel.command import axes
from parallel.command.options import FIELDS, TYPES, OptionError, Options, changed, flag, name_of, off_flag, shown
from parallel.launch import launcher, limits
from parallel.strategies.capabilities import (
    CAPABILITIES,
    IN_STEP,
    LATE,
    NEVER_FLUSHED,
    NOT_BESIDE,
    ON_WORKERS,
    TOGETHER,
    WHO_IS_LEFT,
    why_not,
)
from parallel.strategies.capabilities import IN_SHARDS as SHARDED
from parallel.strategies.capabilities import OPTIONS as ABILITIES

# ------------------------------------------------------------------------------------------------------ options alone

# Counts are at least 1, other numbers at least 0, but for these.
FROM_0 = ("epochs", "seed", "prefetch")
ABOVE_0 = ("lr", "bucket", "first_bucket", "unit")
BELOW_1 = ("momentum", "label_smoothing", "mask")
LARGEST = 2**63 - 1  # of whole numbers: what an array's axis can count
MOST = {"threads": 1024, "accumulate": 2**16, "reproducible": 2**16, "ranks": 2**20}

BUCKETING = ("overlap", "bucket", "first_bucket")  # how messages are cut and moved
MESSAGES = ("node_memory", *BUCKETING)  # and whether there are any between ranks of a node
SERVED = axes.SERVED
AUTO, CHOSEN = "auto", ("mesh", "pipeline", "tensor", "owt", "consistency", "delay_compensation")
OF_A_RATE = ("sgd", "adagrad", "rmsprop", "adam", "adamw", "lars", "lamb")  # lbfgs searches for it
# Option -> (another one, with which values of it this one is read at all).
READ_BY = {
    "momentum": ("optimizer", ("sgd", "rmsprop", "lars")),
    "nesterov": ("optimizer", ("sgd",)),
    "label_smoothing": ("loss", ("cross-entropy",)),
    "allreduce": ("strategy", ("ddp", "pipeline", "tensor", "owt")),
    "node_memory": ("strategy", ("ddp",)),
    **dict.fromkeys(BUCKETING, ("strategy", ("ddp", "pipeline", "tensor", "owt"))),
    "owt": ("strategy", ("owt",)),
    **dict.fromkeys(
        ("lr", "weight_decay", "clip", "schedule", "linear_scaling", "rates", "freeze"), ("optimizer", OF_A_RATE)
    ),
    "servers": ("strategy", ("ps", "downpour", "sandblaster")),
    "consistency": ("strategy", ("ps", "ddp")),
    "delay_compensation": ("strategy", ("ps",)),
    "offload": ("strategy", SHARDED),
    "unit": ("strategy", SHARDED),
    "prefetch": ("strategy", ("fsdp",)),
    "memory_limit": ("strategy", ("auto",)),
    "server_place": ("strategy", ("ps", "downpour", "sandblaster")),
}
# Option that sums gradients in a way of its own -> those that say how the usual way does it.
EXCLUDES = {
    "compress": ("reproducible", *MESSAGES),
    "reproducible": ("accumulate", "sync_batch_norm", "allreduce", *MESSAGES),
}
# Options that one process does not read.
BETWEEN_RANKS = (
    "strategy",
    "mesh",
    "pipeline",
    "tensor",
    "owt",
    "memory_limit",
    "consistency",
    "delay_compensation",
    "allreduce",
    *MESSAGES,
    "unit",
    "prefetch",
    "offload",
    "check_replicas",
    "elastic",
)
TEXTS = ("stdlib", "tinyshakespeare", "text:")  # how the names of data sets begin whose samples are cut from a text


def check(options: Options) -> None:
    """Refuse numbers out of range, and options that do not go together."""
    for rule in OF_AUTO if options.strategy_name == AUTO else OF_OPTIONS:
        rule(options)


def check_number(called: str, name: str, value: float) -> None:
    """Refuse a number out of the range of the option `name`, which the message calls `called`."""
    if TYPES[name] is int:
        least, most = int(name not in FROM_0), MOST.get(name, LARGEST)
        fits = least <= value <= most
        allowed = f"at least {least}" if value < least else f"at most {most:,}"
    elif name in BELOW_1:
        fits, allowed = 0 <= value < 1, "at least 0 and below 1"
    elif name in ABOVE_0:
        fits, allowed = 0 < value <= sys.float_info.max, "above 0 and finite"
    else:
        fits, allowed = 0 <= value <= sys.float_info.max, "at least 0 and finite"
    if not fits:
        raise OptionError(f"{called} must be {allowed}, given {shown(value)}")


def _values(options: Options) -> None:
    for name, kind in TYPES.items():
        value = getattr(options, name)
        if value is not None and kind in (int, float):
            check_number(flag(name), name, value)
        if value == "":
            raise OptionError(f"{flag(name)} must not be empty: leave it out")
        if isinstance(value, str) and "\0" in value:
            raise OptionError(f"{flag(name)} must not hold a zero byte, given {shown(value)}")


def _parts_of_a_batch(options: Options) -> None:
    for name in ("accumulate", "reproducible"):
        if (parts := getattr(options, name) or 1) > options.batch:
            raise OptionError(f"{flag(name)} must be at most the {options.batch} samples of --batch, given {parts}")


def _own_ways(options: Options) -> None:
    for name, others in EXCLUDES.items():
        if getattr(options, name) and (given := changed(options, others)):
            why = why_not(options.strategy_name, None, given[0], name)
            raise OptionError(
                f"{flag(given[0])} does not go with {flag(name)}{': ' * bool(why)}{why}: leave one of them out"
            )


def _what_chooses(options: Options) -> None:
    if options.patience and not options.validation:
        raise OptionError(
            "--patience chooses by validation data, and --validation 0 holds none out: leave one of them out"
        )
    if options.find_lr and options.resume:
        raise OptionError("--find-lr tries rates on a network that has not learned yet: leave out --resume")


def _texts(options: Options) -> None:
    if changed(options, ["length"]) and not options.data.startswith(TEXTS):
        raise OptionError(
            f"--length has no effect with --data {options.data}: leave it out, or use {', '.join(TEXTS)}PATH"
        )
    if options.mask and not options.model.startswith("encoder"):
        raise OptionError(f"--mask: {options.model} predicts the next byte: leave it out, or use --model encoder")


def _readers(options: Options) -> None:
    for name in changed(options, READ_BY):
        other, readers = READ_BY[name]
        if other == "strategy" and options.strategy_name == AUTO:
            continue  # what does not read it, is not taken
        if name_of(value := getattr(options, other)) not in readers:
            raise OptionError(
                f"{flag(name)} has no effect with {flag(other)} {value}: leave it out, or use {', '.join(readers)}"
            )


def _names(options: Options) -> None:
    for name, f in FIELDS.items():
        if f.metadata["keys"] and name_of(value := getattr(options, name)) not in f.metadata["choices"]:
            raise OptionError(f"{flag(name)} {value}: expected one of {', '.join(f.metadata['choices'])}")


def kept_how(options: Options) -> dict:
    """What --checkpoint says: whether a thread writes in the "background", and how many to "keep"."""
    if ":" not in options.checkpoint:
        return {"background": options.checkpoint == "async", "keep": 2}
    from nn import option_strings

    name, parts = option_strings.split(options.checkpoint)
    try:
        keep = option_strings.convert(name, parts, {"keep": int}, by_place=False).get("keep", 2)
    except ValueError as error:
        raise OptionError(f"--checkpoint {options.checkpoint}: {error}") from None
    if keep < 2:
        raise OptionError(
            f"--checkpoint {options.checkpoint}: keep at least 2, given {keep}: where the last one is damaged, the one "
            "before it counts"
        )
    return {"background": name == "async", "keep": keep}


def _abilities(options: Options) -> None:
    """What a strategy, or one that lets gradients be late, cannot."""
    how = f"--strategy {options.strategy}{f' --consistency {options.consistency}' * options.late}"
    for name in ABILITIES:
        if changed(options, [name]) and (why := why_not(options.strategy_name, None, name, late=options.late)):
            raise OptionError(f"{flag(name)} does not go with {how}: {why}")


def _late(options: Options) -> None:
    if options.delay_compensation and not options.late:
        raise OptionError("--delay-compensation: with --consistency sync nothing is late: use ssp:S or async")
    if options.late and options.strategy_name == "ddp" and (given := changed(options, MESSAGES)):
        raise OptionError(
            f"{flag(given[0])} has no effect with --consistency {options.consistency}: the gradients of a step travel "
            "as one message; leave it out"
        )


def _line_search(options: Options) -> None:
    if (options.optimizer == "lbfgs") != (options.strategy_name == "sandblaster"):
        raise OptionError(
            f"--optimizer {options.optimizer} with --strategy {options.strategy}: a line search takes several "
            "evaluations of a batch, which sandblaster makes, on one process too: use --strategy sandblaster "
            "--optimizer lbfgs, and a large --batch; or neither"
        )


def _one_batch_for_the_rate(options: Options) -> None:
    if options.linear_scaling and "base_batch=" in (options.schedule or ""):
        raise OptionError(
            f"--linear-scaling and base_batch in --schedule {options.schedule} say the same: leave one out"
        )


def _stages(options: Options) -> None:
    """Stages on different ranks: by whom, with what, and no other way beside it."""
    given = axes.mesh(options)
    if options.pipeline:
        axes.schedule(options)
    can_have = CAPABILITIES[options.strategy_name].axes
    if options.strategy_name in LATE and options.late:
        can_have = (*can_have, *LATE[options.strategy_name].axes)
    elif options.strategy_name == "ps" and (axes.is_tensor(options) or axes.is_pipeline(options)):
        raise OptionError(f"{_several(options)} with --strategy ps: {IN_STEP}: use --consistency async, or ssp:S")
    if given and not axes.is_pipeline(options) and not set(can_have) - {"data"}:
        raise OptionError(f"--mesh {options.mesh} has no effect with --strategy {options.strategy}: leave it out")
    for axis in given:
        if axis not in can_have and not (axes.is_pipeline(options) and axis in ("data", "pipeline")):
            can = ", ".join(name for name, can in CAPABILITIES.items() if axis in can.axes)
            raise OptionError(
                f"--mesh {options.mesh}: --strategy {options.strategy} has no axis {axis}: leave it out, or use {can}"
            )
    if options.pipeline and given.get("pipeline") == 1:
        raise OptionError(f"--pipeline {options.pipeline} needs ranks on its axis, given --mesh {options.mesh}")
    if not axes.is_pipeline(options):
        return
    if "pipeline" not in can_have:
        can = ", ".join(name for name, can in CAPABILITIES.items() if "pipeline" in can.axes)
        why = CAPABILITIES[options.strategy_name].not_stages
        raise OptionError(
            f"--strategy {options.strategy} has no stages on different ranks{': ' * bool(why)}{why or f': use {can}'}"
        )
    if _apart(options):
        return
    _of_axis(options, "pipeline", "stages on different ranks")
    if options.late:
        raise OptionError(
            f"--consistency {options.consistency} does not go with stages on different ranks: leave it out"
        )
    if options.node_memory == "on":
        raise OptionError("--node-memory on: gradients of stages are summed by messages; leave it out")


def _layers_together(options: Options) -> None:
    """Ranks that compute layers together: with what, and no other way beside it."""
    if not axes.is_tensor(options):
        if changed(options, ["tensor"]):
            raise OptionError(f"--tensor {options.tensor} needs an axis: use --mesh tensor=2, or --strategy tensor")
        return
    if axes.is_pipeline(options) or _apart(options):
        return
    _of_axis(options, "tensor", "layers that ranks compute together")
    if options.node_memory == "on":
        raise OptionError("--node-memory on: gradients of parts of layers are summed by messages; leave it out")


def _apart(options: Options) -> bool:
    """Whether replicas train apart that may be several ranks each."""
    can = CAPABILITIES[options.strategy_name]
    can = LATE.get(options.strategy_name, can) if options.late else can
    return can.apart and "pipeline" in can.axes


def _several(options: Options) -> str:
    """What says that a network is on several ranks."""
    return f"--mesh {options.mesh}" if options.mesh else f"--pipeline {options.pipeline}"


def _replicas(options: Options) -> None:
    """Replicas that train apart, of several ranks each: with what they do not go."""
    pipeline = axes.is_pipeline(options)
    if not _apart(options) or not (pipeline or axes.is_tensor(options)):
        return
    if pipeline and axes.schedule(options).name == "pipedream":
        raise OptionError(
            f"--pipeline {options.pipeline} does not go with --strategy {options.strategy}: {NEVER_FLUSHED}: use "
            "--pipeline 1f1b, or --strategy pipeline"
        )
    if pipeline and options.accumulate > 1:
        why = CAPABILITIES["pipeline"].not_parts
        raise OptionError(f"--accumulate does not go with stages on different ranks: {why}: leave it out")
    if options.strategy_name not in SERVED:
        return
    if options.server_place != "own":
        raise OptionError(
            f"{_several(options)} does not go with --server-place {options.server_place}: {ON_WORKERS}: use "
            "--server-place own"
        )
    if options.elastic:
        raise OptionError(
            f"--elastic does not go with {_several(options)} beside servers: {WHO_IS_LEFT}: leave one of them out"
        )


def _survivors(options: Options) -> None:
    """Ranks that go on without others: what each has must be what all have, or a copy of it."""
    if options.elastic is None:
        return
    how = f"--strategy {options.strategy}{f' --consistency {options.consistency}' * options.late}"
    can = ", ".join(name for name, can in CAPABILITIES.items() if can.elastic)
    if why := why_not(options.strategy_name, None, "elastic", late=options.late):
        raise OptionError(f"--elastic does not go with {how}: {why}: use {can}")
    if axes.is_pipeline(options) and axes.schedule(options).name == "pipedream":
        raise OptionError("--elastic does not go with --pipeline pipedream: weights of several steps are in its stages")
    for name, values, why in (
        ("compress", None, "what a rank has left out so far is lost with it"),
        ("allreduce", ("shared",), "what dies in it leaves sums half made"),
        ("offload", None, "shards on disk are to save memory, and neighbours have copies in memory"),
        ("find_lr", None, "trying rates makes no run"),
    ):
        if changed(options, [name]) and (values is None or getattr(options, name) in values):
            raise OptionError(f"{flag(name)} does not go with --elastic: {why}: leave one of them out")


def _samples_together(options: Options) -> None:
    """Ranks that compute rows of the same images, or branches: with what, and no other way beside it."""
    axis = axes.together(options)
    if not axis:
        return
    given = axes.mesh(options)
    if others := [name for name in axes.AXES[1:] if name != axis and given.get(name, 1) > 1]:
        raise OptionError(
            f"--mesh {options.mesh}: the axes {axis} and {others[0]} do not go together: {NOT_BESIDE[others[0]]}: "
            "leave one out"
        )
    _of_axis(options, axis, f"--mesh {options.mesh}")


def _of_axis(options: Options, axis: str, what: str) -> None:
    """What does not go with an axis, which has its own line among the capabilities."""
    for name in ("accumulate", "reproducible", "compress", "offload", "consistency"):
        method = options.compress if name == "compress" else None
        why = why_not(axis, method, name)
        if method and options.strategy_name in SHARDED and axis not in TOGETHER:
            why = CAPABILITIES[axis].not_compressed
        never = ("consistency",) if axis in TOGETHER else ("offload", "consistency")
        if changed(options, [name]) and (why or name in never):
            raise OptionError(f"{flag(name)} does not go with {what}{': ' * bool(why)}{why}: leave it out")


def _auto(options: Options) -> None:
    """What the plan chooses is not said beside it."""
    from parallel.command.sizes import read_bytes

    if given := changed(options, CHOSEN):
        raise OptionError(f"{flag(given[0])} is for --strategy {AUTO} to choose: leave one of them out")
    if options.memory_limit:
        try:
            read_bytes(options.memory_limit)
        except ValueError as error:
            raise OptionError(f"--memory-limit: {error}") from None


OF_AUTO = (
    _values, _names, _parts_of_a_batch, _what_chooses, _texts, _readers, _one_batch_for_the_rate, _auto, kept_how,
)  # fmt: skip
OF_OPTIONS = (
    _values, _names, _parts_of_a_batch, _own_ways, _what_chooses, _texts, _readers, _abilities, _late,
    _line_search, _one_batch_for_the_rate, _stages, _layers_together, _replicas, _samples_together, kept_how,
    _survivors,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------- a run to continue

# What a resumed run may change; all else is part of the result and comes from its config.json.
FREE_ON_RESUME = {
    "epochs", "data_dir", "ranks", "threads", "patience", "checkpoint_steps", "checkpoint", "resume", "out", "watch",
    "check_replicas", "servers", "server_place", "profile", "find_lr", "inspect", "timeline", "no_pictures",
    "strategy", "consistency", "delay_compensation", "mesh", "pipeline", "tensor", "owt", "offload", "prefetch", "unit",
    "memory", "memory_limit", "allreduce", "elastic", *MESSAGES,
}  # fmt: skip
# What a run has whose config.json is from before there was the option, where that is not the default.
UNTOLD = {"validation": 0.0}


def lasting(options: Options) -> dict:
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
    for name, value in lasting(options).items():
        before = facts.get(name, UNTOLD.get(name, FIELDS[name].default))
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


# ---------------------------------------------------------------------------------------- ranks, files, surroundings

# What ranks must have alike beside the options: what their collectives do. Launchers, and tools that start them, give
# each host an environment of its own.
ALIKE = ("RINGPROP_WATCH", "RINGPROP_DEBUG", "RINGPROP_TUNE")
EACH_ITS_OWN = ("out", "ranks")  # options that ranks need not have alike


def check_surroundings(options: Options, ranks: int | None) -> None:
    """Refuse what cannot be on so many ranks (0: one process, None: not known), in these directories, with this
    environment."""
    from collectives.choosing.selection import check_environment, check_name
    from parallel.exchange import compression

    if ranks == 0 and not options.reproducible:
        _one_process(options)
    check_name("allreduce", options.allreduce)
    check_environment()
    if options.compress:
        compression.parse(options.compress)
    _keys(options)
    if options.elastic:
        check_survivors(options, ranks)
    if options.offload:
        check_directory("--offload", options.offload)
    if options.out:
        check_directory("--out", options.out)
        if not options.find_lr and not launcher.joins():
            check_directory("--out", os.path.join(options.out, "checkpoints"))
            check_checkpoints(options)


def _keys(options: Options) -> None:
    """Refuse keys that a strategy or a consistency does not have, and what they cannot be."""
    from parallel.strategies import settings

    if kind := settings.OF_STRATEGIES.get(options.strategy_name):
        kind.parse(options.strategy)
    elif ":" in options.strategy:
        raise OptionError(f"--strategy {options.strategy}: {options.strategy_name} takes no keys: leave them out")
    if options.strategy_name in settings.CONSISTENCIES:
        settings.Consistency.parse(options.consistency, options.strategy_name)


def check_survivors(options: Options, ranks: int | None) -> None:
    """Refuse to go on where ranks die with an MPI library that ends all, and fewer ranks than are to be left."""
    from parallel.elastic.policy import Policy

    policy = Policy.parse(options.elastic)
    if ranks == 0:  # one process: without effect
        return
    if why := launcher.why_all_end():
        raise OptionError(f"--elastic: {why}; or leave it out, and start the run by scripts/supervise.py")
    if ranks is not None and ranks < policy.min:
        raise OptionError(f"--elastic {options.elastic}: {ranks} ranks are fewer than min={policy.min}: start more")


def _one_process(options: Options) -> None:
    if options.strategy_name in SERVED:
        raise OptionError(
            f"--strategy {options.strategy} needs ranks for workers and servers: start them with --ranks 3, or mpirun"
        )
    if options.compress:
        way = ", or leave it out" if options.resume is None else ", as that run was"
        raise OptionError(f"--compress {options.compress}: one process sends nothing; start several with --ranks{way}")
    if options.mesh and options.resume is None:
        axes.sizes(options, 1)
    if options.offload and options.resume is None:
        raise OptionError("--offload: one process has no shards; start several with --ranks, or leave it out")


def check_directory(flag: str, directory: str) -> None:
    """Refuse what is no directory, and cannot be made one."""
    path = Path(directory).absolute()
    near = next(place for place in (path, *path.parents) if place.exists())
    if not near.is_dir():
        raise OptionError(f"{flag} {directory}: {near} is a file, no directory")
    try:  # permission bits do not tell of root, nor of /proc
        with tempfile.TemporaryFile(dir=near):
            pass
    except OSError as error:
        raise OptionError(f"{flag} {directory}: nothing can be written into {near} ({error.strerror})") from None


def check_one_node(options: Options) -> None:
    """Refuse what has no effect where all ranks share a node."""
    if options.node_memory == "on" and (asked := of_messages(options)):
        raise OptionError(
            f"{asked[0]} has no effect with --node-memory on where all ranks share a node: "
            "gradients are summed in its memory, without messages; leave one of them out"
        )


def check_scattered(options: Options, ranks: int) -> None:
    """Refuse batches of which some rank would get no sample from the master."""
    if options.batch < ranks:
        raise OptionError(
            f"--batch {options.batch} cannot be cut among {ranks} ranks: use a batch of at least {ranks}, "
            "or fewer ranks"
        )


def check_started(options: Options, ranks: int) -> None:
    """Refuse another number of ranks than were started."""
    if options.ranks and options.ranks != ranks:
        raise OptionError(f"--ranks {options.ranks}, but {ranks} ranks were started: leave --ranks to the launcher")


def settings(options: Options) -> dict:
    """This rank's options and environment variables, as far as all ranks must have the same."""
    from collectives.algorithms import ALGORITHMS

    names = [*ALIKE, *(f"RINGPROP_{operation.upper()}" for operation in ALGORITHMS)]
    found = {flag(name): value for name, value in dataclasses.asdict(options).items() if name not in EACH_ITS_OWN}
    return found | {name: os.environ[name] for name in names if name in os.environ}


def check_alike(everyone: list[dict]) -> None:
    """Refuse ranks that were started differently: `settings` of each."""
    for other, theirs in enumerate(everyone):
        for name in everyone[0] | theirs:
            if (value := theirs.get(name)) != (first := everyone[0].get(name)):
                raise OptionError(f"ranks disagree on {name}: rank 0 has {first}, rank {other} has {value}")


def of_messages(options: Options) -> list[str]:
    """What was asked of messages, as on the command line: how they sum, are cut, and move."""
    asked = changed(options, BUCKETING)
    if options.allreduce not in ("auto", "shared"):
        asked.append("allreduce")
    return [f"{flag(name)} {getattr(options, name)}" for name in asked]


# ------------------------------------------------------------------------------------------ data, network, optimizer

FOR_CLASSES = ("cross-entropy", "quadratic")
FOR_VALUES = ("mse", "mae", "huber", "bce", "quadratic")


def check_targets(options: Options, data) -> None:
    """Refuse a loss that does not read the kind of targets that the data has."""
    targets, readers = ("classes", FOR_CLASSES) if data.classes else ("values", FOR_VALUES)
    if options.loss not in readers:
        classes = "" if data.classes else "; if they are classes, store y.astype(int)"
        raise OptionError(
            f"--loss {options.loss}: the targets of {data.name} are {targets}: use {', '.join(readers)}{classes}"
        )
    if options.mask and options.loss != "cross-entropy":
        raise OptionError(f"--loss {options.loss}: hidden bytes are told by cross-entropy: leave --loss out")


def check_layers(options: Options, data, network) -> None:
    """Refuse numbers where a network takes ids, ids where it takes numbers, and what none of its layers would read."""
    from nn.layers.batch_normalization import BatchNorm

    x, _ = data.train.batch(slice(0, 1))
    if x.dtype.kind in "iu" and not network.takes_ids and x.ndim > 2:
        raise OptionError(
            f"{options.data} holds {data.train.x.dtype} samples of shape {data.in_shape}, which are ids: of images "
            "store x.astype(np.uint8), whose bytes are divided by 255, or floats"
        )
    if (x.dtype.kind in "iu") != network.takes_ids:
        takes, holds, other = ("ids", "numbers", "mlp") if network.takes_ids else ("numbers", "ids", "transformer")
        raise OptionError(
            f"--model {options.model} takes {takes}, and {options.data} holds {holds}: use --model {other}"
        )
    if options.sync_batch_norm and not any(isinstance(layer, BatchNorm) for _, layer, _, _ in network.layers()):
        raise OptionError(f"--sync-batch-norm: {network.name} has no batch normalisation: leave it out")


def check_memory(options: Options, network) -> None:
    """Refuse a network of which this machine must hold more than its memory: parameters and gradients alone, once.

    In a job of many machines a strategy that divides the network needs no more than all have together. ZeRO-1 keeps
    parameters and gradients whole on every rank, ZeRO-2 parameters.
    """
    name, elsewhere = options.strategy_name, launcher.inside()
    parts = any(size > 1 for axis, size in axes.mesh(options).items() if axis in ("pipeline", "tensor"))
    if (parts or name in ("fsdp", "pipeline", "tensor", "owt")) and (elsewhere or options.offload):
        return
    arrays = 1 if name == "zero2" and (elsewhere or options.offload) else 2
    needed = arrays * network.layout.size * network.dtype.itemsize
    there = limits.memory()
    if needed > there:
        raise OptionError(
            f"--model {options.model}: {network.layout.count:,} parameters and their gradients take "
            f"{needed / 2**30:,.0f} GiB, and there are {there / 2**30:,.1f} here: use smaller layers"
        )


def check_strategy(options: Options, ranks: int | None, network, optimizer) -> int:
    """Refuse what the strategy cannot do, on so many ranks; returns how many of them read samples."""
    from nn.losses import Loss
    from parallel.exchange import compression, fixed_tree
    from parallel.exchange.push_pull import roles, server_slices
    from parallel.passes import virtual_shards
    from parallel.strategies.operators import branches, space
    from parallel.strategies.tensor import boundary, rewriting

    if options.strategy_name == AUTO:  # what is chosen is asked then
        return 1
    if options.compress:
        if why := why_not(options.strategy_name, options.compress, late=options.late):
            how = f"--strategy {options.strategy}{f' --consistency {options.consistency}' * options.late}"
            raise OptionError(f"--compress {options.compress} does not go with {how}: {why}")
        method = compression.parse(options.compress)
        method.check(optimizer)
        if options.strategy_name in SERVED:
            method.check_messages(options.servers)
    late = f" --consistency {options.consistency}" * options.late
    why = why_not(options.strategy_name, None, "mixed", late=options.late)
    if network.mixed and ranks != 0 and why:
        others = ", ".join(name for name, can in CAPABILITIES.items() if can.mixed)
        raise OptionError(f"--dtype mixed does not go with --strategy {options.strategy}{late}: {why}: use {others}")
    if options.reproducible and options.strategy_name in SHARDED:
        virtual_shards.refuse_norms(optimizer)
    if options.strategy_name == "sandblaster":
        check_sandblaster(options, max(1, ranks or 1), network)
        return 1
    if not ranks:
        return 1
    workers = range(ranks)
    if options.strategy_name in SERVED:
        workers, servers = roles(ranks, options.servers, options.server_place)
        server_slices(network.layout.size + network.buffer_layout.size, len(servers))
        if len(servers) > 1 and (options.late or options.reproducible or options.strategy_name == "downpour"):
            virtual_shards.refuse_norms(optimizer)
    if axes.is_pipeline(options):
        return check_stages(options, ranks, network, optimizer)
    found = axes.sizes(options, ranks)
    if axes.is_tensor(options):
        rewriting.share(network, Loss(), found["tensor"], options.tensor)
        if options.strategy_name not in SERVED:
            _refuse_nothing_sent(options, found["data"])
        return found["data"]
    if not launcher.inside():
        check_one_node(options)
    if axis := axes.together(options):
        {"space": space.cut, "branch": branches.deal}[axis](network, 0, found[axis])
        return found["data"]
    if options.strategy_name == "dp":
        check_scattered(options, ranks)
    if options.strategy_name == "owt":
        boundary.split(network, Loss(), ranks, options.owt)
    if options.reproducible:
        fixed_tree.check_holders(options.reproducible, len(workers))
    return len(workers)


def _refuse_nothing_sent(options: Options, data: int) -> None:
    """Refuse to compress gradients where no two ranks have the same part of the network."""
    if options.compress and data == 1:
        raise OptionError(
            f"--compress {options.compress}: every rank has another part of the network, and no gradients are sent: "
            "leave it out, or start more ranks, for an axis data"
        )


def check_sandblaster(options: Options, ranks: int, network) -> None:
    """Refuse roles that there are no ranks for, and networks that are not one function."""
    from parallel.exchange.commanded.shards import parts
    from parallel.exchange.push_pull import server_slices
    from parallel.strategies.sandblaster import refuse_changing

    parts(ranks, options.servers, options.server_place)
    server_slices(network.layout.size, options.servers)
    refuse_changing(network)


def check_stages(options: Options, ranks: int, network, optimizer) -> int:
    """Refuse a mesh, a schedule, cuts that cannot be, on so many ranks; returns how many pipelines read samples."""
    from nn.losses import Loss
    from parallel.strategies.pipeline.placement import check_updates_apart, place, refuse_ties
    from parallel.strategies.tensor.rewriting import share

    found = axes.sizes(options, ranks)
    if options.batch < found["data"]:
        raise OptionError(
            f"--batch {options.batch} cannot be cut among {found['data']} pipelines: use a batch of at least "
            f"{found['data']}, or fewer of them"
        )
    given = axes.arguments(options, found["data"])
    stale = given["schedule"] == "pipedream"
    if stale and (found["data"] * found["tensor"] > 1 or options.strategy == "zero1"):
        raise OptionError(
            f"--pipeline {options.pipeline}: every mini-batch has an update of its own, which several ranks with a "
            "stage would have to wait for: leave out --mesh data, tensor and --strategy zero1; a stage on several "
            "ranks, which take turns, is pipedream:replicas=2/1"
        )
    if stale and options.compress:
        raise OptionError(
            f"--compress does not go with --pipeline {options.pipeline}: replicas of a stage sum their gradients as "
            "they are: leave it out"
        )
    _refuse_nothing_sent(options, found["data"])
    given = {name: value for name, value in given.items() if name not in ("recompute", "vertical_sync")}
    network = share(network, Loss(), found["tensor"], options.tensor).network
    try:
        placement = place(network, found["pipeline"], **given)
        if stale:
            check_updates_apart(placement, optimizer)
        if options.compress and not _apart(options):  # whose pushes are of whole networks
            refuse_ties(placement)
    except ValueError as error:
        asked = next((name for name in ("pipeline", "mesh") if getattr(options, name)), "strategy")
        asked = f"{flag(asked)} {getattr(options, asked)}"
        raise OptionError(f"{asked}: {error}") from error
    return found["data"]


def check_normalization(options: Options, network, loader, readers: int) -> None:
    """Refuse batches of which some rank normalises one value a channel: its variance is unknown."""
    from collectives.steps import chunk
    from nn.training.batches import refuse_lone_samples
    from nn.training.trainer import micro_batches

    def cut(total: int, count: int) -> list[int]:
        return [hi - lo for lo, hi in (chunk(total, count, i) for i in range(count))]

    def sizes(total: int) -> list[int]:
        if options.reproducible:
            return cut(total, options.reproducible)
        shares = [size for size in cut(total, readers) if size]
        if not axes.is_pipeline(options):
            parts = [options.accumulate] * len(shares)
        elif axes.schedule(options).name == "pipedream":
            parts = [min(size, pipeline["micro_batches"]) for size in shares]
        else:
            parts = [pipeline["micro_batches"]] * len(shares)
        return [m.stop - m.start for size, n in zip(shares, parts, strict=True) for m in micro_batches(size, n)]

    pipeline = axes.arguments(options, readers) if axes.is_pipeline(options) else {}
    refuse_lone_samples(network, sizes, loader.totals(), f"use another --batch than {options.batch}, or --limit")


def check_loading(options: Options, data, loader, callbacks) -> None:
    """Refuse transforms and schedules that do not fit the data; what batches must be, the loader has said."""
    import numpy as np

    from nn.data.transforms import RandomCrop, sample_keys
    from nn.training.schedules import Plateau

    _, *shape = data.train.x.shape  # as stored: what transforms see
    for transform in loader.transforms:
        if isinstance(transform, RandomCrop) and len(shape) == 3 and transform.padding >= min(shape[:2]):
            raise OptionError(
                f"--augment {options.augment}: shifted by {transform.padding} pixels nothing is left of an image of "
                f"{shape[0]} x {shape[1]}: use fewer"
            )
        transform(data.train.raw(np.zeros(1, int))[0], sample_keys(options.seed, 0, np.zeros(1, int)))
    metrics = ["loss"]
    if data.validation:
        metrics += ["validation_loss", *(["validation_accuracy"] if data.classes else [])]
    for callback in callbacks:
        if isinstance(callback, Plateau) and callback.metric not in metrics:
            without = "" if data.validation else " without validation data (--validation 0)"
            raise OptionError(
                f"--schedule {options.schedule}: no metric {callback.metric!r}{without}; "
                f"use metric={', '.join(metrics)}"
            )
