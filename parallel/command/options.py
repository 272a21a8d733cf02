"""The options of a training run: a dataclass a topic, from which --help, flags, TOML files and config.json are made.

Adding an option is adding a field: its annotation says how it is read, `everyday` whether plain --help shows it, `free`
whether --resume may change it, and `least` and the like its range. Options of a strategy are declared in its own file
(parallel/strategies/). Which options go together is in rules.py. An option with parts of its own takes one text with
keys, such as "cosine:warmup=5" (nn/option_strings.py), in place of a flag for each part.

Nothing here imports NumPy or MPI, so that --help answers at once.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

from parallel.axis import AXES
from parallel.settings import flag, name_of, option
from parallel.strategies import DECLARED, STRATEGIES
from parallel.strategies.auto import AUTO, AutoOptions

# Strategies whose replicas may be several ranks each, in words.
REPLICATED = ", ".join(
    f"{strategy.name} ({strategy.late_values})" if strategy.late else strategy.name
    for strategy in DECLARED
    if strategy.supported(late=True).local_update and "pipeline" in strategy.supported(late=True).axes
)


@dataclass(frozen=True)
class DataOptions:
    """Data."""

    data: str = option(
        "digits", "data set: digits (embedded), mnist, fashion-mnist, cifar10, FILE.npz, ...", everyday=True
    )
    data_dir: str | None = option(
        None, "directory of data sets (default: $RINGPROP_DATA, else ./data)", metavar="DIR", free=True
    )
    limit: int | None = option(None, "use at most this number of samples of each split")
    validation: float = option(
        0.1,
        "training samples held out for validation: a fraction below 1, or their number; 0 disables "
        "validation and model selection "
        "(not used by data with a validation split of its own)",
        everyday=True,
    )
    normalise: bool = option(False, "subtract the mean of each channel, divide by its standard deviation")
    augment: str | None = option(None, "random changes of training images: crop:4, flip, crop:4,flip", everyday=True)
    length: int = option(64, "bytes in a sample of text")
    mask: float = option(
        0.0, "fraction of the bytes that is hidden and predicted from the others (encoder: 0.15 by default)", below=1
    )


@dataclass(frozen=True)
class NetworkOptions:
    """The network."""

    model: str = option(
        "cnn", "network: mlp:784,30,10, cnn, lenet5, ... (python scripts/workload.py lists all)", everyday=True
    )
    activation: str | None = option(
        None, "activation of hidden layers: sigmoid, tanh, relu, ... (default: the model's own)"
    )
    init: str | None = option(None, "initial weights: glorot, he, lecun, normal, ... (default: the model's own)")
    dtype: str = option(
        "float32",
        "type of parameters and activations; mixed: float32, with activations kept and sent as float16",
        ("float32", "float64", "mixed"),
    )
    from_: str | None = option(
        None,
        "start from the weights in a file of nn.save or of a run (network.npz): arrays with the same name and "
        "shape are "
        "copied; others, such as a last layer for other classes, are initialised",
        metavar="FILE",
    )
    freeze: str | None = option(
        None,
        "layers that are not trained, such as 0,2 or an array 4.W (names: first table of the output)",
        metavar="LAYERS",
    )
    seed: int = option(
        0, "seed of initial weights, of the order of samples and of those held out", everyday=True, least=0
    )


@dataclass(frozen=True)
class LearningOptions:
    """How the network learns."""

    epochs: int = option(30, "passes over the training data", everyday=True, least=0, free=True)
    batch: int = option(32, "samples in a step, over all ranks", everyday=True)
    loss: str = option(
        "cross-entropy",
        "loss function",
        ("cross-entropy", "quadratic", "mse", "mae", "huber", "bce"),
        everyday=True,
    )
    label_smoothing: float = option(0.0, "label smoothing of cross-entropy, such as 0.1", below=1)
    optimizer: str = option(
        "sgd", "update rule", ("sgd", "adagrad", "rmsprop", "adam", "adamw", "lars", "lamb", "lbfgs"), everyday=True
    )
    lr: float = option(
        0.01,
        "learning rate (default: the usual one of each optimizer; sgd without --lr has momentum 0.9)",
        everyday=True,
        above=0,
    )
    rates: str | None = option(
        None,
        "factors of --lr by layer, such as 0=0.1,2=0.1 for smaller steps of these layers",
        metavar="LAYER=FACTOR,...",
    )
    momentum: float = option(0.0, "of SGD (0.9 where --lr is not given), RMSprop and LARS", everyday=True, below=1)
    nesterov: bool = option(False, "Nesterov's momentum")
    weight_decay: float = option(0.0, "L2 coefficient; biases and normalisation are exempt", everyday=True)
    clip: str | None = option(None, "clip gradients: value:LIMIT, norm:LIMIT (each tensor's), global:LIMIT")
    schedule: str | None = option(
        None, "learning rate over time: cosine:warmup=5, step:every=10, plateau, ... (times in epochs)", everyday=True
    )
    linear_scaling: int | None = option(
        None,
        "batch for which --lr is meant: a k times larger batch gets k times the rate, reached over 5 epochs of warm-up",
        metavar="BATCH",
    )
    sync_batch_norm: bool = option(False, "batch normalisation uses the samples of all ranks")
    accumulate: int = option(
        1, "divide the samples of a step into this number of micro-batches, computed one after the other", most=2**16
    )
    patience: int | None = option(
        None, "stop after this number of epochs without better validation accuracy", free=True
    )


@dataclass(frozen=True)
class RanksOptions:
    """How ranks share the work."""

    ranks: int | None = option(
        None,
        "start this number of ranks on this machine; without it: one process, or the ranks that mpirun or srun started",
        everyday=True,
        most=2**20,
        free=True,
    )
    strategy: str = option(
        DECLARED[0].name,
        f"how ranks share the work: {', '.join(STRATEGIES)} (--help strategies says what each does), or auto: the "
        "fastest of all, measured and priced",
        (*STRATEGIES, AUTO),
        metavar="NAME[:KEYS]",
        everyday=True,
        keys=True,
        free=True,
    )
    compress: str | None = option(
        None,
        "fewer bytes: fp16, qsgd:LEVELS, terngrad, onebit, signsgd, topk:RATIO, threshold:LIMIT, dgc:RATIO, "
        "powersgd:RANK (--help strategies says which of them each supports)",
        metavar="METHOD",
        everyday=True,
    )
    reproducible: int | None = option(
        None,
        "the same bits on any number of ranks: divide every batch into this number of virtual shards, such as 8",
        everyday=True,
        most=2**16,
    )


@dataclass(frozen=True)
class MeshOptions:
    """How ranks share the network itself."""

    mesh: str | None = option(
        None,
        "ranks along each axis, such as data=2,pipeline=2; axes divide "
        + ", ".join(f"{axis.summary} ({name})" for name, axis in AXES.items())
        + f"; {REPLICATED}: data counts replicas, of pipeline x tensor ranks",
        metavar="AXIS=RANKS,...",
        free=True,
        planned=True,
    )
    pipeline: str | None = option(
        None,
        "layers on different ranks: naive, gpipe, 1f1b, pipedream, interleaved, zb-h1, zb-h2, zb-v, dualpipev or "
        "FILE.csv, with keys as 1f1b:micro=8,cuts=3/5, gpipe:recompute, interleaved:chunks=2, pipedream:vertical_sync, "
        "pipedream:replicas=3/1 (pipeline: 1f1b)",
        metavar="SCHEDULE",
        free=True,
        planned=True,
    )
    tensor: str = option(
        "pairs",
        "how ranks divide layers: pairs of linear layers by columns and rows (pairs), every layer by its "
        "outputs (width), "
        "or as pairs, with the layers between them divided by positions (sequence)",
        ("pairs", "width", "sequence"),
        free=True,
        planned=True,
    )
    context: str = option(
        "ring",
        "how ranks with positions of the same sequences compute attention: ring (keys and values travel), ulysses "
        "(heads are distributed), or both as ring:2,ulysses:2",
        metavar="HOW",
        free=True,
    )


@dataclass(frozen=True)
class RunOptions:
    """Where the run is kept, and what it may use."""

    out: str | None = option(
        None, "directory of the run (default: runs/DATE-DATA-MODEL)", metavar="DIR", everyday=True, free=True
    )
    resume: str | None = option(
        None, "continue the run in DIR from its last checkpoint", metavar="DIR", everyday=True, free=True
    )
    checkpoint_steps: int | None = option(
        None, "also save every N steps (always: after every epoch)", metavar="N", free=True
    )
    checkpoint: str = option(
        "async",
        "how checkpoints are written: async (by a thread, while training continues) or sync; async:keep=5 "
        "keeps the last "
        "five (default: two)",
        ("async", "sync"),
        metavar="HOW[:KEYS]",
        keys=True,
        free=True,
    )
    check_replicas: int | None = option(
        None, "compare the parameters of all ranks every N steps", metavar="N", free=True
    )
    elastic: str | None = option(
        None,
        "continue after the death of ranks: shrink:min=2 without them, as long as at least 2 are left; "
        "respawn:min=2 with "
        "replacements; buddy=10: neighbours hold copies of parts, at most 10 steps old (Open MPI 5)",
        metavar="KIND[:KEYS]",
        free=True,
    )
    watch: float = option(
        300.0,
        "seconds that ranks may wait for each other before the run ends and reports who waits for whom (0: for ever)",
        free=True,
    )
    threads: int | None = option(
        None, "BLAS threads of a rank (default: cores / ranks on this host)", most=1024, free=True
    )


@dataclass(frozen=True)
class ReportOptions:
    """What the run reports besides the result."""

    profile: bool = option(False, "show the time of every layer before training", free=True)
    find_lr: bool = option(False, "try increasing learning rates, draw the loss, and end", free=True)
    inspect: bool = option(
        False, "after training: confusion, misclassified samples, distributions, dead units", everyday=True, free=True
    )
    timeline: bool = option(
        False, "record what every rank did when: trace.json, recorded.goal, a picture", everyday=True, free=True
    )
    tensorboard: str | None = option(
        None,
        "write event files for TensorBoard there: loss and rate of steps, the numbers of epochs",
        metavar="DIR",
        everyday=True,
        free=True,
    )
    memory: bool = option(False, "after training: bytes that every rank keeps and sends, and the formulas", free=True)
    pictures: bool = option(
        True, "draw curves.png and breakdown.png; without them a short run ends a second earlier", free=True
    )


ENCODER_MASK = 0.15  # of BERT (Devlin et al. 2019)
# Dataclasses that strategies declare, each once, in the order of the strategies.
OF_STRATEGIES = tuple(dict.fromkeys(kind for strategy in DECLARED for kind in strategy.options)) + (AutoOptions,)
TOPICS = {
    "data": (DataOptions,),
    "network": (NetworkOptions,),
    "learning": (LearningOptions,),
    "ranks": (RanksOptions, *OF_STRATEGIES),
    "mesh": (MeshOptions,),
    "run": (RunOptions,),
    "reports": (ReportOptions,),
}


@dataclass(frozen=True)
class Options(*reversed([kind for kinds in TOPICS.values() for kind in kinds])):  # type: ignore[misc]
    """What a run of scripts/train.py is made of: all topics. (The fields of the last base come first.)

    Nothing changes them during a run: `dataclasses.replace` makes others.
    """

    @property
    def strategy_name(self) -> str:
        """Of --strategy, without its keys."""
        return name_of(self.strategy)

    @property
    def hidden_share(self) -> float:
        """Share of the bytes that are hidden: --mask, or an encoder's own; 0 for other networks."""
        return self.mask or (ENCODER_MASK if self.model.startswith("encoder") else 0.0)

    @property
    def late(self) -> bool:
        """Whether --consistency lets gradients or parameters be late."""
        return name_of(self.consistency) != "sync"


FIELDS = {f.name: f for f in dataclasses.fields(Options)}
# Option of strategies -> those that read it.
READERS: dict[str, tuple[str, ...]] = {
    name: tuple(strategy.name for strategy in DECLARED if name in strategy.reads())
    for strategy in DECLARED
    for name in strategy.reads()
} | {f.name: (AUTO,) for f in dataclasses.fields(AutoOptions)}


def plain_type(hint) -> type:
    """Return int for `int | None`, and so on."""
    (kind,) = {*(typing.get_args(hint) or (hint,))} - {type(None)}
    return kind


TYPES: dict[str, type] = {name: plain_type(hint) for name, hint in typing.get_type_hints(Options).items()}


def names_of(topic: str) -> list[str]:
    """Return the options of a topic."""
    return [f.name for kind in TOPICS[topic] for f in dataclasses.fields(kind)]


def help_of(name: str) -> str:
    """Return what --help says of an option: of some strategies' options, whose they are first."""
    readers = f"{', '.join(READERS[name])}: " if name in READERS and name != "consistency" else ""
    return readers + FIELDS[name].metadata["help"]


def title_of(topic: str) -> str:
    """What a topic is about, in a few words."""
    text = TOPICS[topic][0].__doc__.rstrip(".")
    return text[0].lower() + text[1:]


def off_flag(name: str) -> str:
    """Return the flag that switches an option off: --no-timeline, --no-elastic; "" where its default is no such value,
    and another value must be given."""
    if FIELDS[name].default is not None and TYPES[name] is not bool:
        return ""
    return flag(f"no_{name}")


def shown_default(name: str) -> str:
    """The default as --help has it; empty where nothing is done unless asked for."""
    default = FIELDS[name].default
    off = default is None or (not default and TYPES[name] is not int)
    return "" if off else str(default)


def shown(value) -> str:
    """A value as a message has it, in some 60 letters; a whole number of thousands of digits cannot be written."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "one that is too long to be shown"
    return text if len(text) <= 60 else f"{text[:60]}..."
