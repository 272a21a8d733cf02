"""What makes no sense is refused here, if it is about no strategy, no mesh: before ranks start where it can be known.

| about | rules | called by |
|---|---|---|
| options alone | `check` | parsing.py |
| ranks, files, surroundings | `check_surroundings` | factory.py |
| data, network, optimizer | `check_targets` ... `check_loading` | factory.py |
| ranks that have been started | `check_started`, `check_alike` | training_run.py |

A rule is a function that returns nothing or raises OptionError: which option, what is wrong, what to do. A strategy has
its rules in its own file; those of a mesh are in strategies/axis_rules.py, of a run to continue in resuming.py, of runs
that go on where ranks die in elastic/policy.py. What the text of an option may be is refused where it is read
(`learning_rates.parse`, `models.build` and their like). NumPy and MPI are imported by the rules that need them: those
of options alone must not wait for either.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from parallel.command.arguments import why_no_directory
from parallel.command.options import FIELDS, READERS, TYPES, Options, shown
from parallel.command.resuming import check_checkpoints
from parallel.launch import launcher, limits
from parallel.settings import LARGEST, OptionError, changed, flag, name_of, naming
from parallel.strategies import ALIASES, STRATEGIES, axes, axis_rules
from parallel.strategies.auto import AUTO, AutoKeys
from parallel.strategies.consistency import Consistency
from parallel.strategies.declaration import OPTIONS
from parallel.strategies.pipeline.option import arguments, schedule

# ------------------------------------------------------------------------------------------------------ options alone

CHOSEN_BY_AUTO = [name for name, field in FIELDS.items() if field.metadata["planned"]]
RATE_OPTIMIZERS = ("sgd", "adagrad", "rmsprop", "adam", "adamw", "lars", "lamb")  # lbfgs searches for it
MESSAGES = ("node_memory", "overlap", "bucket", "first_bucket")
# Option -> (another one, with which values of it this one is read at all).
READ_BY = {
    "momentum": ("optimizer", ("sgd", "rmsprop", "lars")),
    "nesterov": ("optimizer", ("sgd",)),
    "label_smoothing": ("loss", ("cross-entropy",)),
    **dict.fromkeys(
        ("lr", "weight_decay", "clip", "schedule", "linear_scaling", "rates", "freeze"), ("optimizer", RATE_OPTIMIZERS)
    ),
    **{name: ("strategy", readers) for name, readers in READERS.items()},
}
# Option that sums gradients in a way of its own -> those that say how the usual way does it.
EXCLUDES = {
    "compress": ("reproducible", *MESSAGES),
    "reproducible": ("accumulate", "sync_batch_norm", "allreduce", *MESSAGES),
}
ONE_PROCESS = {name for name, strategy in STRATEGIES.items() if strategy.searches}  # strategies that it may have
# Options that it does not read.
BETWEEN_RANKS = (
    "strategy",
    "mesh",
    "pipeline",
    "tensor",
    *(name for name, readers in READERS.items() if not ONE_PROCESS.intersection(readers)),
    "check_replicas",
    "elastic",
)
# How the names of data sets begin whose samples are cut from a text.
TEXT_PREFIXES = ("stdlib", "tinyshakespeare", "text:")


def check(options: Options) -> None:
    """Refuse numbers out of range, and options that cannot be combined."""
    for rule in OF_AUTO if options.strategy_name == AUTO else OF_OPTIONS:
        rule(options)


def check_number(called: str, name: str, value: float) -> None:
    """Refuse a number out of the range of the option `name`, which the message calls `called`."""
    given = FIELDS[name].metadata
    if TYPES[name] is int:
        least, most = 1 if given["least"] is None else given["least"], given["most"] or LARGEST
        fits = least <= value <= most
        allowed = f"at least {least}" if value < least else f"at most {most:,}"
    elif given["below"] is not None:
        fits, allowed = 0 <= value < given["below"], f"at least 0 and below {given['below']}"
    elif given["above"] is not None:
        fits, allowed = given["above"] < value <= sys.float_info.max, f"above {given['above']} and finite"
    else:
        fits, allowed = 0 <= value <= sys.float_info.max, "at least 0 and finite"
    if not fits:
        raise OptionError(f"{called} must be {allowed}, given {shown(value)}")


def _ranges(options: Options) -> None:
    for name, kind in TYPES.items():
        value = getattr(options, name)
        if value is not None and kind in (int, float):
            check_number(flag(name), name, value)
        if value == "":
            raise OptionError(f"{flag(name)} must not be empty: leave it out")
        if isinstance(value, str) and "\0" in value:
            raise OptionError(f"{flag(name)} must not hold a zero byte, given {shown(value)}")


def _batch_divisions(options: Options) -> None:
    for name in ("accumulate", "reproducible"):
        if (parts := getattr(options, name) or 1) > options.batch:
            raise OptionError(f"{flag(name)} must be at most the {options.batch} samples of --batch, given {parts}")


def _exclusive_sums(options: Options) -> None:
    for name, others in EXCLUDES.items():
        if getattr(options, name) and (given := changed(options, others)):
            why = STRATEGIES[options.strategy_name].supports.reason_against(None, given[0], name)
            raise OptionError(
                f"{flag(given[0])} cannot be combined with {flag(name)}{': ' * bool(why)}{why}: leave one of them out"
            )


def _validation(options: Options) -> None:
    if options.patience and not options.validation:
        raise OptionError(
            "--patience chooses by validation data, and --validation 0 holds none out: leave one of them out"
        )
    if options.find_lr and options.resume:
        raise OptionError("--find-lr tries rates on a network that has not learned yet: leave out --resume")


def _texts(options: Options) -> None:
    if changed(options, ["length"]) and not options.data.startswith(TEXT_PREFIXES):
        raise OptionError(
            f"--length has no effect with --data {options.data}: leave it out, or use {', '.join(TEXT_PREFIXES)}PATH"
        )
    if options.mask and not options.model.startswith("encoder"):
        raise OptionError(f"--mask: {options.model} predicts the next byte: leave it out, or use --model encoder")


def _effects(options: Options) -> None:
    for name in changed(options, READ_BY):
        other, readers = READ_BY[name]
        if other == "strategy" and options.strategy_name == AUTO:
            continue  # what does not read it, is not taken
        if name_of(value := getattr(options, other)) not in readers:
            raise OptionError(
                f"{flag(name)} has no effect with {flag(other)} {value}: leave it out, or use {', '.join(readers)}"
            )


def _choices(options: Options) -> None:
    for name, f in FIELDS.items():
        if f.metadata["keys"] and name_of(value := getattr(options, name)) not in f.metadata["choices"]:
            hint = f"; {value} is {ALIASES[value]}" if value in ALIASES else ""
            raise OptionError(f"{flag(name)} {value}: expected one of {', '.join(f.metadata['choices'])}{hint}")


def checkpoint_policy(options: Options) -> dict:
    """What --checkpoint says: whether a thread writes in the "background", and how many to "keep"."""
    if ":" not in options.checkpoint:
        return {"background": options.checkpoint == "async", "keep": 2}
    from nn import option_strings

    name, parts = option_strings.split(options.checkpoint)
    try:
        keep = option_strings.convert(name, parts, {"keep": int}, positional=False).get("keep", 2)
    except ValueError as error:
        raise OptionError(f"--checkpoint {options.checkpoint}: {error}") from None
    if keep < 2:
        raise OptionError(
            f"--checkpoint {options.checkpoint}: keep at least 2, given {keep}: where the last one is damaged, the one "
            "before it counts"
        )
    return {"background": name == "async", "keep": keep}


def _strategy(options: Options) -> None:
    """What a strategy, or one that lets gradients be late, does not support, and what its own file refuses."""
    for name in OPTIONS:
        if changed(options, [name]) and (why := axes.supported(options).reason_against(None, name)):
            raise OptionError(f"{flag(name)} cannot be combined with {_strategy_flags(options)}: {why}")
    if own := STRATEGIES[options.strategy_name].check_options:
        own(options)


def _strategy_flags(options: Options) -> str:
    """--strategy, and --consistency where it is not sync."""
    return f"--strategy {options.strategy}{f' --consistency {options.consistency}' * options.late}"


def _line_search(options: Options) -> None:
    if (options.optimizer == "lbfgs") != STRATEGIES[options.strategy_name].searches:
        (searching,) = (name for name, strategy in STRATEGIES.items() if strategy.searches)
        raise OptionError(
            f"--optimizer {options.optimizer} with --strategy {options.strategy}: a line search takes several "
            f"evaluations of a batch, which {searching} makes, on one process too: use --strategy {searching} "
            "--optimizer lbfgs, and a large --batch; or neither"
        )


def _one_batch_for_the_rate(options: Options) -> None:
    if options.linear_scaling and "base_batch=" in (options.schedule or ""):
        raise OptionError(
            f"--linear-scaling and base_batch in --schedule {options.schedule} say the same: leave one out"
        )


def _auto(options: Options) -> None:
    """What the plan chooses is not said beside it."""
    from parallel.command.sizes import read_bytes

    if given := changed(options, CHOSEN_BY_AUTO):
        raise OptionError(f"{flag(given[0])} is for --strategy {AUTO} to choose: leave one of them out")
    if options.memory_limit:
        try:
            read_bytes(options.memory_limit)
        except ValueError as error:
            raise OptionError(f"--memory-limit: {error}") from None


def _survivors(options: Options) -> None:
    from parallel.elastic import policy

    policy.check_options(options)


OF_AUTO = (
    _ranges, _choices, _batch_divisions, _validation, _texts, _effects, _one_batch_for_the_rate, _auto,
    checkpoint_policy,
)  # fmt: skip
OF_OPTIONS = (
    _ranges, _choices, _batch_divisions, _exclusive_sums, _validation, _texts, _effects, _strategy, _line_search,
    _one_batch_for_the_rate, axis_rules.check_options, checkpoint_policy, _survivors,
)  # fmt: skip

# ---------------------------------------------------------------------------------------- ranks, files, surroundings

# What ranks must have alike beside the options: what their collectives do. Launchers, and tools that start them, give
# each host an environment of its own.
SHARED_ENVIRONMENT = ("RINGPROP_WATCH", "RINGPROP_DEBUG", "RINGPROP_TUNE")
RANK_OPTIONS = ("out", "ranks")  # options that ranks need not have alike


def check_surroundings(options: Options, ranks: int | None) -> None:
    """Refuse what cannot be on so many ranks (0: one process, None: not known), in these directories, with this
    environment."""
    from collectives.choosing.selection import check_environment, check_name
    from parallel.sync import compression

    if ranks == 0 and not options.reproducible:
        _one_process(options)
    check_name("allreduce", options.allreduce)
    check_environment()
    if options.compress:
        compression.parse(options.compress)
    _keys(options)
    if options.elastic:
        from parallel.elastic import policy

        policy.check_ranks(options, ranks)
    if options.offload:
        check_directory("--offload", options.offload)
    if options.tensorboard and not launcher.rank_from_environment():  # other ranks write nothing there
        check_directory("--tensorboard", options.tensorboard)
    if options.out:
        check_directory("--out", options.out)
        if not options.find_lr and not launcher.is_replacement():
            check_directory("--out", os.path.join(options.out, "checkpoints"))
            check_checkpoints(options)


def _keys(options: Options) -> None:
    """Refuse keys that a strategy or a consistency does not have, and what they cannot be."""
    name = options.strategy_name
    strategy = STRATEGIES.get(name)
    if keys := AutoKeys if name == AUTO else strategy.keys:
        with naming("strategy", options.strategy):
            keys.parse(options.strategy)
    elif ":" in options.strategy:
        raise OptionError(f"--strategy {options.strategy}: {name} takes no keys: leave them out")
    if strategy and strategy.consistencies:
        with naming("consistency", options.consistency):
            Consistency.parse(options.consistency, name, strategy.consistencies)


def _one_process(options: Options) -> None:
    strategy = STRATEGIES.get(options.strategy_name)
    if strategy and strategy.serves and not strategy.searches:
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
    if reason := why_no_directory(directory):
        raise OptionError(f"{flag} {directory}: {reason}")


def check_started(options: Options, ranks: int) -> None:
    """Refuse another number of ranks than were started."""
    if options.ranks and options.ranks != ranks:
        name = launcher.rank_variable()
        raise OptionError(
            f"--ranks {options.ranks}, but {name}={os.environ.get(name)} in the environment says that a launcher has "
            f"started this process, as one of {ranks}: leave --ranks to it, or unset {name} if there is none"
        )


def settings(options: Options) -> dict:
    """This rank's options and environment variables, as far as all ranks must have the same."""
    from collectives.algorithms import ALGORITHMS

    names = [*SHARED_ENVIRONMENT, *(f"RINGPROP_{operation.upper()}" for operation in ALGORITHMS)]
    found = {flag(name): value for name, value in dataclasses.asdict(options).items() if name not in RANK_OPTIONS}
    return found | {name: os.environ[name] for name in names if name in os.environ}


def check_alike(everyone: list[dict]) -> None:
    """Refuse ranks that were started differently: `settings` of each."""
    for other, theirs in enumerate(everyone):
        for name in everyone[0] | theirs:
            if (value := theirs.get(name)) != (first := everyone[0].get(name)):
                raise OptionError(f"ranks disagree on {name}: rank 0 has {first}, rank {other} has {value}")


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
    if options.hidden_share and options.loss != "cross-entropy":
        raise OptionError(f"--loss {options.loss}: hidden bytes are trained with cross-entropy: leave --loss out")


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
    strategy, elsewhere = STRATEGIES.get(options.strategy_name), launcher.inside()
    arrays = 0 if axes.divides_network(options) else strategy.whole if strategy else 2
    if not (elsewhere or options.offload):
        arrays = 2
    needed = arrays * network.layout.size * network.dtype.itemsize
    there = limits.memory()
    if needed > there:
        raise OptionError(
            f"--model {options.model}: {network.layout.count:,} parameters and their gradients take "
            f"{needed / 2**30:,.0f} GiB, and there are {there / 2**30:,.1f} here: use smaller layers"
        )


def check_strategy(options: Options, ranks: int | None, network, optimizer) -> int:
    """Refuse what the strategy cannot do, on so many ranks; returns how many of them read samples."""
    if options.strategy_name == AUTO:  # the strategy that is chosen is checked then
        return 1
    strategy, can, flags = STRATEGIES[options.strategy_name], axes.supported(options), _strategy_flags(options)
    if options.compress:
        from parallel.sync import compression

        if why := can.reason_against(options.compress):
            raise OptionError(f"--compress {options.compress} cannot be combined with {flags}: {why}")
        compression.parse(options.compress).check(optimizer)
    if network.mixed and ranks != 0 and (why := can.reason_against(None, "mixed")):
        others = ", ".join(name for name, other in STRATEGIES.items() if other.supports.mixed)
        raise OptionError(f"--dtype mixed cannot be combined with {flags}: {why}: use {others}")
    readers = strategy.check(options, ranks, network, optimizer) if strategy.check else None
    if not ranks or strategy.searches:
        return 1
    on_axes = axis_rules.check(options, ranks, network, optimizer)
    if on_axes is not None:
        return on_axes
    readers = ranks if readers is None else readers
    if options.reproducible:
        from parallel.sync import fixed_tree

        fixed_tree.check_holders(options.reproducible, readers)
    return readers


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
        elif schedule(options).name == "pipedream":
            parts = [min(size, pipeline["micro_batches"]) for size in shares]
        else:
            parts = [pipeline["micro_batches"]] * len(shares)
        return [m.stop - m.start for size, n in zip(shares, parts, strict=True) for m in micro_batches(size, n)]

    pipeline = arguments(options, readers) if axes.is_pipeline(options) else {}
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
