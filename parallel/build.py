"""From options to objects: data, network, loss, optimizer, loaders, schedule; what is not known is refused by name."""

from __future__ import annotations

import nn
from nn import clipping, data, learning_rates, losses, models, optimizers
from nn.batch_normalization import BatchNorm
from nn.data import masking
from nn.models.googlenet import AuxiliaryLoss
from parallel.options import Options

LOSSES = {
    "cross-entropy": lambda o: losses.CrossEntropyLoss(label_smoothing=o.label_smoothing),
    "quadratic": lambda o: losses.QuadraticLoss(),
    "mse": lambda o: losses.MSELoss(),
    "mae": lambda o: losses.MAELoss(),
    "huber": lambda o: losses.HuberLoss(),
    "bce": lambda o: losses.BCEWithLogitsLoss(),
}
FOR_CLASSES = ("cross-entropy", "quadratic")
FOR_VALUES = ("mse", "mae", "huber", "bce", "quadratic")
WARMUP = 5  # epochs, with --linear-scaling (Goyal et al. 2017)
OPTIMIZERS = {
    "sgd": lambda o, common: optimizers.SGD(**common, momentum=o.momentum, nesterov=o.nesterov),
    "adagrad": lambda o, common: optimizers.Adagrad(**common),
    "rmsprop": lambda o, common: optimizers.RMSprop(**common, momentum=o.momentum),
    "adam": lambda o, common: optimizers.Adam(**common),
    "adamw": lambda o, common: optimizers.AdamW(**common),
    "lars": lambda o, common: optimizers.LARS(**common, momentum=o.momentum),
    "lamb": lambda o, common: optimizers.LAMB(**common),
}


def datasets(options: Options) -> data.Data:
    """The data. An encoder sees whole samples, so it is asked for hidden ids; a causal model for the next one."""
    if options.model.startswith("encoder"):
        options.mask = options.mask or 0.15
    elif options.mask:
        raise ValueError(f"--mask: {options.model} predicts the next byte: leave it out, or use --model encoder")
    return data.load(
        options.data,
        options.data_dir,
        limit=options.limit,
        normalise=options.normalise,
        length=options.length,
        mask=options.mask,
        dtype=options.dtype,
    )


def network(options: Options, data: data.Data) -> nn.Network:
    """The network for that data. With the quadratic loss its outputs pass the activation too, as in the classics."""
    output = (options.activation or "sigmoid") if options.loss == "quadratic" and data.classes else None
    outputs = data.classes or int(data.train.y[0].size)  # values to regress on
    network = models.build(
        options.model,
        data.in_shape,
        outputs,
        options.dtype,
        activation=options.activation,
        init=options.init,
        output_activation=output,
    )
    check_kind(options, data, network)
    if options.sync_batch_norm:
        synchronise(network)
    return network


def check_kind(options: Options, data: data.Data, network: nn.Network) -> None:
    """Refuse numbers where a network takes ids, and ids where it takes numbers."""
    x, _ = data.train.batch(slice(0, 1))
    if (x.dtype.kind in "iu") != network.takes_ids:
        takes, holds, other = ("ids", "numbers", "mlp") if network.takes_ids else ("numbers", "ids", "transformer")
        raise ValueError(
            f"--model {options.model} takes {takes}, and {options.data} holds {holds}: use --model {other}"
        )


def synchronise(network: nn.Network) -> None:
    """Let every batch normalisation take its statistics over all ranks."""
    layers = [layer for _, layer, _, _ in network.layers() if isinstance(layer, BatchNorm)]
    if not layers:
        raise ValueError(f"--sync-batch-norm: {network.name} has no batch normalisation: leave it out")
    for layer in layers:
        layer.synchronized = True


def loss(options: Options, data: data.Data) -> losses.Loss:
    """The loss, which must read the kind of targets that the data has."""
    targets, readers = ("classes", FOR_CLASSES) if data.classes else ("values", FOR_VALUES)
    if options.loss not in readers:
        raise ValueError(f"--loss {options.loss}: the targets of {data.name} are {targets}: use {', '.join(readers)}")
    if options.mask:
        if options.loss != "cross-entropy":
            raise ValueError(f"--loss {options.loss}: hidden bytes are told by cross-entropy: leave --loss out")
        places = masking.hidden(options.mask, data.in_shape[0])
        return losses.MaskedCrossEntropyLoss(places, options.label_smoothing)
    plain = LOSSES[options.loss](options)
    return AuxiliaryLoss(plain) if options.model.startswith("googlenet") else plain


def optimizer(options: Options) -> optimizers.Optimizer:
    common = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "clip": options.clip and clipping.parse(options.clip),
    }
    return OPTIMIZERS[options.optimizer](options, common)


def augmentation(text: str | None) -> list:
    """ "crop:4,flip" and the like, as transforms."""
    transforms = []
    for part in (text or "").split(",") if text else ():
        kind, _, number = part.partition(":")
        if kind == "flip" and not number:
            transforms.append(data.RandomFlip())
        elif kind == "crop" and number.isdecimal() and int(number):
            transforms.append(data.RandomCrop(int(number)))
        else:
            raise ValueError(f"--augment {text}: unknown part {part!r}; expected crop:PIXELS, flip, or crop:4,flip")
    return transforms


def loaders(options: Options, data_: data.Data, shard: tuple[int, int], timeline=None) -> tuple[nn.Loader, nn.Loader]:
    """(training, test) loaders of this shard; the test one in larger batches, each cut alike."""
    train = nn.Loader(
        data_.train,
        options.batch,
        options.seed,
        shard=shard,
        transform=augmentation(options.augment) or None,
        timeline=timeline,
    )
    test_batch = options.batch if data_.train.x[0].size > 4096 else max(options.batch, 500)
    return train, nn.Loader(data_.test, max(test_batch, shard[1]), shuffle=False, shard=shard)


def schedule(options: Options, loader: nn.Loader) -> tuple[learning_rates.Schedule | None, list[nn.Callback]]:
    """(step -> rate or None for a constant one, callbacks that it needs)."""
    text = options.schedule
    if options.linear_scaling:
        name, _, rest = (text or "constant").partition(":")
        if "base_batch=" in rest:
            raise ValueError(f"--linear-scaling and base_batch in --schedule {text} say the same: leave one out")
        given = [f"base_batch={options.linear_scaling}", *filter(None, rest.split(","))]
        if "warmup=" not in rest:
            given.append(f"warmup={WARMUP}")
        text = f"{name}:{','.join(given)}"
    if text is None:
        return None, []
    found, hooks = learning_rates.parse(text, options.lr, options.epochs, len(loader), options.batch)
    if optimizers.BY_NAME[options.optimizer].rate_inside:
        hooks.append(learning_rates.MomentumCorrection(found))
    return found, hooks
