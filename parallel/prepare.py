"""What a run is made of, made before there are ranks: what cannot be is refused here, at once and once.

`train.py --ranks 8` makes all this before it starts ranks, and throws it away; each rank makes it before it touches
MPI, and trains with it, as one process does. So a wrong option is told in the same words, with exit status 2, however
the program was started. What only ranks can find out is left to them: who shares a node, what another host lacks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives.selection import check_name
from nn import Network, checkpoints
from nn.data import Data
from nn.data.transforms import RandomCrop, sample_keys
from nn.learning_rates import Plateau
from nn.losses import Loss
from nn.optimizers import Optimizer
from parallel import build, compression, launch
from parallel.options import OptionError, Options, check_one_node
from parallel.push_pull import cut, roles
from parallel.reproducible import shards, tree_sum

SHARDED = ("zero1", "zero2", "fsdp")


class Parts(NamedTuple):
    """What every rank has alike."""

    data: Data
    network: Network
    loss: Loss
    optimizer: Optimizer


def size(options: Options) -> int | None:
    """Ranks of this run: 0 for one process without MPI, None where the launcher does not tell."""
    if launch.inside():
        return launch.size_from_environment()
    return options.ranks if options.ranks and options.ranks > 1 else 0


def prepare(options: Options) -> Parts:
    """Data, network, loss and optimizer of a run, on whichever number of ranks.

    Raises
    ------
    OptionError
        Whatever makes the run impossible and can be known by now: what it is, and what to do.
    """
    try:
        return _prepare(options, size(options))
    except (ValueError, TypeError, OSError, MemoryError, checkpoints.CheckpointError) as error:
        raise OptionError(str(error).removeprefix(f"[Errno {getattr(error, 'errno', None)}] ")) from error


def _prepare(options: Options, ranks: int | None) -> Parts:
    if ranks == 0 and not options.reproducible:
        refuse_one_process(options)
    check_name("allreduce", options.allreduce)
    if options.compress:
        compression.parse(options.compress)
    if options.offload:
        check_directory("--offload", options.offload)
    if options.out:
        check_directory("--out", options.out)
        if not options.find_lr:
            check_directory("--out", os.path.join(options.out, "checkpoints"))
            check_checkpoints(options)
    data = build.datasets(options)
    network = build.network(options, data)
    parts = Parts(data, network, build.loss(options, data), build.optimizer(options))
    check_loading(options, data, check_strategy(options, ranks, network, parts.optimizer))
    return parts


def refuse_one_process(options: Options) -> None:
    if options.strategy == "ps":
        raise OptionError("--strategy ps needs ranks for workers and servers: start them with --ranks 3, or mpirun")
    if options.compress:
        way = ", or leave it out" if options.resume is None else ", as that run was"
        raise OptionError(f"--compress {options.compress}: one process sends nothing; start several with --ranks{way}")
    if options.offload and options.resume is None:
        raise OptionError("--offload: one process has no shards; start several with --ranks, or leave it out")


def check_directory(flag: str, directory: str) -> None:
    """Refuse what is no directory, and cannot be made one."""
    path = Path(directory).absolute()
    near = next(place for place in (path, *path.parents) if place.exists())
    if not near.is_dir():
        raise OptionError(f"{flag} {directory}: {near} is a file, no directory")
    if not os.access(near, os.W_OK | os.X_OK):
        raise OptionError(f"{flag} {directory}: there is no permission to write into {near}")


def check_checkpoints(options: Options) -> None:
    """A run neither overwrites another one, nor continues from nothing."""
    kept = checkpoints.Checkpoints(Path(options.out) / "checkpoints")
    if options.resume is None and kept.entries():
        raise OptionError(
            f"{options.out} already holds a run: continue it with --resume {options.out}, or give another --out"
        )
    if options.resume is not None and not kept.entries():
        raise OptionError(f"--resume {options.resume}: no checkpoint was saved there; start again, with another --out")


def check_strategy(options: Options, ranks: int | None, network: Network, optimizer: Optimizer) -> int:
    """Refuse what the strategy cannot do, on so many ranks; returns how many of them read samples."""
    if options.compress:
        method = compression.parse(options.compress)
        method.check(optimizer)
        if options.strategy == "ps":
            method.check_messages(options.servers)
    if options.reproducible and options.strategy in SHARDED:
        shards.refuse_norms(optimizer)
    if not ranks:
        return 1
    if not launch.inside():
        check_one_node(options)
    workers = ranks
    if options.strategy == "ps":
        found, servers = roles(ranks, options.servers, options.server_place)
        cut(network.layout.size + network.state_layout.size, len(servers))
        workers = len(found)
    if options.reproducible:
        tree_sum.check_holders(options.reproducible, workers)
    return workers


def check_loading(options: Options, data: Data, workers: int) -> None:
    """Refuse batches, transforms and schedules that do not fit the data."""
    loader, _ = build.loaders(options, data, (0, workers))
    _, *shape = data.train.x.shape  # as stored: what transforms see
    for transform in loader.transforms:
        if isinstance(transform, RandomCrop) and len(shape) == 3 and transform.padding >= min(shape[:2]):
            raise OptionError(
                f"--augment {options.augment}: shifted by {transform.padding} pixels nothing is left of an image of "
                f"{shape[0]} x {shape[1]}: use fewer"
            )
        transform(data.train.raw(np.zeros(1, int))[0], sample_keys(options.seed, 0, np.zeros(1, int)))
    metrics = ("test_loss", "loss", *(["accuracy"] if data.classes else []))
    for hook in build.schedule(options, loader)[1]:
        if isinstance(hook, Plateau) and hook.metric not in metrics:
            raise OptionError(f"--schedule {options.schedule}: no metric {hook.metric!r}; use {', '.join(metrics)}")
