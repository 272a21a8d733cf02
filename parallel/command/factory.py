"""From options to objects: data, network, loss, optimizer, loaders, schedule.

`prepare` makes what a run needs before there are ranks, and asks the rules of it. `train.py --ranks 8` does so before
it starts ranks, and throws the objects away; each rank does it before it touches MPI, and trains with them, as one
process does. So a wrong option is refused in the same words, with exit status 2, however the program was started. What
only ranks can find out is left to them: who shares a node, what another host lacks.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import nn
from nn import data, losses, models, option_strings
from nn.data import masking
from nn.layers.batch_normalization import BatchNorm
from nn.models.googlenet import AuxiliaryLoss
from nn.optim import optimizers
from nn.optim.learning_rates import Schedule
from nn.registry import from_text, lookup
from nn.training import schedules
from nn.training.checkpoints import CheckpointError
from nn.training.state import fitting_weights
from nn.training.trainer import check_rates
from parallel.command import rules
from parallel.command.options import Options
from parallel.launch import launcher
from parallel.settings import OptionError, naming
from parallel.strategies.sandblaster import SandblasterKeys
from parallel.sync.coordinator.quasi_newton import QuasiNewton

TOGETHER = 500  # samples in a batch that is not trained on
WARMUP = 5  # epochs, with --linear-scaling (Goyal et al. 2017)


class Parts(NamedTuple):
    """What every rank has alike."""

    data: data.Data
    network: nn.Network
    loss: losses.Loss
    optimizer: optimizers.Optimizer


def prepare(options: Options, one_process: bool = False) -> Parts:
    """Data, network, loss and optimizer of a run, on whichever number of ranks.

    Parameters
    ----------
    one_process : bool
        Whether this process trains alone, whatever was launched or is asked for.

    Raises
    ------
    OptionError
        Whatever makes the run impossible and can be known by now: what it is, and what to do.
    """
    try:
        return _prepare(options, 0 if one_process else asked_ranks(options))
    except (ValueError, TypeError, OSError, MemoryError, CheckpointError) as error:
        raise OptionError(str(error).removeprefix(f"[Errno {getattr(error, 'errno', None)}] ")) from error


def _prepare(options: Options, ranks: int | None) -> Parts:
    rules.check_surroundings(options, ranks)
    parts = make(options)
    rules.check_memory(options, parts.network)
    if options.from_ and options.resume is None:
        fitting_weights(parts.network, weights(options), parts.optimizer, options.seed)
    readers = rules.check_strategy(options, ranks, parts.network, parts.optimizer)
    loader = loaders(options, parts.data, (0, readers)).train
    rules.check_normalization(options, parts.network, loader, readers)
    rules.check_loading(options, parts.data, loader, schedule(options, loader)[1])
    return parts


def asked_ranks(options: Options) -> int | None:
    """Ranks of this run: 0 for one process without MPI, None where the launcher does not say."""
    if launcher.inside():
        return launcher.size_from_environment()
    return options.ranks if options.ranks and options.ranks > 1 else 0


def make(options: Options) -> Parts:
    """Data, network, loss and optimizer, if they fit each other."""
    found = datasets(options)
    rules.check_targets(options, found)  # before layers, whose sizes follow from the targets
    built = network(options, found)
    rules.check_layers(options, found, built)
    rule = optimizer(options)
    with naming("rates" if options.rates else "freeze", options.rates or options.freeze):
        check_rates(built, rule.rates)
    return Parts(found, built, loss(options, found), rule)


def datasets(options: Options) -> data.Data:
    """The data. An encoder sees whole samples, so it is asked for hidden ids; a causal model for the next one."""
    return data.load(
        options.data,
        options.data_dir,
        limit=options.limit,
        normalise=options.normalise,
        length=options.length,
        mask=options.hidden_share,
        validation=options.validation,
        seed=options.seed,
        dtype=floats(options),
    )


def network(options: Options, data: data.Data) -> nn.Network:
    """The network for that data. With the quadratic loss its outputs pass the activation too, as in the classics."""
    output = (options.activation or "sigmoid") if options.loss == "quadratic" and data.classes else None
    outputs = data.classes or int(data.train.y[0].size)  # values to regress on
    network = models.build(
        options.model,
        data.in_shape,
        outputs,
        floats(options),
        activation=options.activation,
        init=options.init,
        output_activation=output,
    )
    network.mixed = options.dtype == "mixed"
    return synchronised(network) if options.sync_batch_norm else network


def floats(options: Options) -> str:
    """What is computed with."""
    return "float32" if options.dtype == "mixed" else options.dtype


def synchronised(network: nn.Network) -> nn.Network:
    """The network with every batch normalisation taking its statistics over all ranks."""

    def synchronise(layer: nn.Layer) -> None:
        if isinstance(layer, BatchNorm):
            layer.synchronized = True
        for child in layer.children().values():
            synchronise(child)

    root = copy.deepcopy(network.root)  # layers of a network cannot be changed, copies of them can
    synchronise(root)
    return nn.Network(root, network.in_shape, network.dtype, network.name, mixed=network.mixed)


def loss(options: Options, data: data.Data) -> losses.Loss:
    """The loss, of hidden bytes only where some are."""
    if options.hidden_share:
        count = masking.masked_count(options.hidden_share, data.in_shape[0])
        return losses.MaskedCrossEntropyLoss(count, label_smoothing=options.label_smoothing)
    smoothing = {"label_smoothing": options.label_smoothing} if options.loss == "cross-entropy" else {}
    plain = lookup("loss", options.loss)(**smoothing)
    return AuxiliaryLoss(plain) if options.model.startswith("googlenet") else plain


def optimizer(options: Options) -> optimizers.Optimizer:
    """The update rule, with its clip."""
    if options.optimizer == "lbfgs":
        return QuasiNewton(history=SandblasterKeys.parse(options.strategy).history)
    kind = lookup("optimizer", options.optimizer)
    with naming("clip", options.clip):
        clip = options.clip and from_text("clip", options.clip)
    common = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "clip": clip,
        "rates": rates(options),
    }
    own = [field.name for field in dataclasses.fields(kind) if field.name in ("momentum", "nesterov")]
    return kind(**common, **{name: getattr(options, name) for name in own})


def rates(options: Options) -> dict[str, float]:
    """Factors of the learning rate by layer: --rates, and 0 for each of --freeze."""
    found = {}
    for part in options.rates.split(",") if options.rates else ():
        name, equals, factor = part.strip().rpartition("=")
        try:
            found[name] = float(factor)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ValueError(f"--rates {options.rates}: expected LAYER=FACTOR, such as 0=0.1,2=0.1, given {part!r}")
    frozen = [name.strip() for name in options.freeze.split(",")] if options.freeze else []
    if "" in frozen:  # it would name the whole network
        raise ValueError(f"--freeze {options.freeze}: expected names of layers with commas between, such as 0,2")
    return found | dict.fromkeys(frozen, 0.0)


def weights(options: Options) -> nn.Model | None:
    """The model of --from; None without."""
    with naming("from_", options.from_):
        return nn.load(options.from_) if options.from_ else None


def augmentation(text: str | None) -> list:
    """ "crop:4,flip" and the like, as transforms."""
    transforms = []
    for part in (text or "").split(",") if text else ():
        match option_strings.split(part):
            case "flip", []:
                transforms.append(data.RandomFlip())
            case "crop", [pixels] if pixels.isdecimal() and int(pixels):
                transforms.append(data.RandomCrop(int(pixels)))
            case _:
                raise ValueError(f"--augment {text}: unknown part {part!r}; expected crop:PIXELS, flip, or crop:4,flip")
    return transforms


class Loaders(NamedTuple):
    """Batches of each split; None where there is no validation data."""

    train: nn.Loader
    validation: nn.Loader | None
    test: nn.Loader


def loaders(options: Options, data_: data.Data, shard: tuple[int, int], timeline=None) -> Loaders:
    """The loaders of this shard; what is only looked at comes in larger batches, each cut alike."""
    train = nn.Loader(
        data_.train,
        options.batch,
        options.seed,
        shard=shard,
        transform=augmentation(options.augment) or None,
        timeline=timeline,
    )
    batch = options.batch if data_.train.x[0].size > 4096 else max(options.batch, TOGETHER)
    validation, test = (
        split and nn.Loader(split, max(batch, shard[1]), shuffle=False, shard=shard)
        for split in (data_.validation, data_.test)
    )
    return Loaders(train, validation, test)


def metric(data_: data.Data) -> str | None:
    """The entry of an epoch's record that chooses the best; None where nothing may choose."""
    if data_.validation is None:
        return None
    return "validation_accuracy" if data_.classes else "validation_loss"


def schedule(options: Options, loader: nn.Loader) -> tuple[Schedule | None, list[nn.Callback]]:
    """(step -> rate or None for a constant one, callbacks that it needs)."""
    text = options.schedule
    if options.linear_scaling:
        name, parts = option_strings.split(text or "constant")
        parts.append(f"base_batch={options.linear_scaling}")
        if not any(part.startswith("warmup=") for part in parts):
            parts.append(f"warmup={WARMUP}")
        text = option_strings.join(name, parts)
    if text is None:
        return None, []
    said = "schedule" if options.schedule else "linear_scaling"
    with naming(said, getattr(options, said)):
        found, hooks = schedules.parse(text, options.lr, options.epochs, len(loader), options.batch)
    if lookup("optimizer", options.optimizer).rate_inside:
        hooks.append(schedules.MomentumCorrection(found))
    return found, hooks
