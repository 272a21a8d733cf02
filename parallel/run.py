"""One training run, from options to a directory with everything in it: the same on one process and on many ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import socket
import sys
import time
from pathlib import Path

import numpy as np

import nn
from nn import callbacks, checkpoints, data, models
from parallel import launch
from parallel.job import default_directory, program
from parallel.options import Options


def train(options: Options) -> dict:
    """Do what the options say; returns what result.json holds.

    Raises
    ------
    ValueError, TypeError, ArithmeticError, RuntimeError, OSError
        Whatever makes the run impossible or worthless, with a message that says what to do.
    """
    started = time.perf_counter()
    np.seterr(all="ignore")  # a loss that is not finite is an error of its own
    world = ranks(options)
    rank, size = (world.rank, world.size) if world else (0, 1)
    say = (lambda line="": print(line, flush=True)) if rank == 0 else (lambda line="": None)

    network, datasets = build(options)
    trainer = make_trainer(options, network, world)
    train_loader = data.Loader(datasets.train, options.batch, options.seed, shard=trainer.shard, dtype=network.dtype)
    test_batch = max(options.batch, 500)
    test_loader = data.Loader(datasets.test, test_batch, shuffle=False, shard=trainer.shard, dtype=network.dtype)

    out = Path(options.out)
    kept = checkpoints.Checkpoints(out / "checkpoints")
    progress = resume(options, trainer, kept, say)
    if rank == 0:
        write_headers(out, options, world)
    say(network.summary())
    say(f"{datasets.train.name}: {len(datasets.train):,} training and {len(datasets.test):,} test samples")
    say(f"{describe_ranks(trainer)}; {trainer.optimizer!r}, {trainer.loss!r}, {options.batch} samples a step")
    say()

    hooks = [callbacks.Progress(say=say), callbacks.Metrics(out / "metrics.jsonl")]
    hooks.append(callbacks.KeepCheckpoints(kept, options.checkpoint_steps))
    if options.patience:
        hooks.append(callbacks.EarlyStopping(options.patience, checkpoints=kept))
    training = nn.fit(trainer, train_loader, options.epochs, hooks, test_loader, progress=progress)
    if size > 1:
        trainer.check_replicas()

    score = nn.evaluate(trainer, test_loader)
    result = {
        "accuracy": score["accuracy"],
        "loss": score["test_loss"],
        "epochs": training.epoch,
        "steps": trainer.steps,
        "seconds": training.seconds,
        "images_per_second": training.epoch * len(datasets.train) / max(1e-9, training.seconds),
        "ranks": size,
        "parameters_sha256": hashlib.sha256(trainer.parameters).hexdigest(),
    }
    if rank == 0:
        checkpoints.write_atomically(out / "result.json", (json.dumps(result, indent=1) + "\n").encode())
        draw_curves(training.history, out / "curves.png")
    say()
    say(f"test accuracy {result['accuracy']:.2%} after {training.epoch} epochs, {training.seconds:.1f} s of training")
    say(f"everything is in {out}/: result.json, metrics.jsonl, curves.png, checkpoints/ ({elapsed(started)} in all)")
    say(what_next(options))
    return result


def ranks(options: Options):
    """A Communicator over all ranks, or None where this process is the only one and nothing launched it."""
    if not launch.inside():
        return None
    from mpi4py import MPI

    from collectives import Communicator

    world = Communicator(MPI.COMM_WORLD, allreduce=options.allreduce)
    everyone = world.allgather({k: v for k, v in dataclasses.asdict(options).items() if k not in ("out", "ranks")})
    for other, theirs in enumerate(everyone):
        for key, value in theirs.items():
            if value != everyone[0][key]:
                flag = "--" + key.replace("_", "-")
                raise ValueError(f"ranks disagree on {flag}: rank 0 has {everyone[0][key]}, rank {other} has {value}")
    if options.ranks and options.ranks != world.size:
        raise ValueError(f"--ranks {options.ranks}, but {world.size} ranks were started: leave --ranks to the launcher")
    options.out = world.bcast(options.out or default_directory(options))  # rank 0's clock decides
    return world


def build(options: Options) -> tuple[nn.Network, data.Data]:
    """The network and the data, checked against each other."""
    datasets = data.load(options.data, options.data_dir, limit=options.limit, dtype=options.dtype)
    output = (options.activation or "sigmoid") if options.loss == "quadratic" else None
    network = models.build(
        options.model,
        datasets.in_shape,
        datasets.classes,
        options.dtype,
        activation=options.activation,
        init=options.init,
        output_activation=output,
    )
    return network, datasets


def make_trainer(options: Options, network: nn.Network, world) -> nn.Serial:
    loss = {"cross-entropy": nn.CrossEntropyLoss, "quadratic": nn.QuadraticLoss}[options.loss]()
    optimizer = nn.SGD(options.lr, options.momentum, weight_decay=options.weight_decay)
    if world is None:
        return nn.Serial(network, loss, optimizer, options.seed)
    from parallel.data_parallel import DistributedDataParallel

    return DistributedDataParallel(network, loss, optimizer, world, options.seed)


def resume(options: Options, trainer: nn.Serial, kept: checkpoints.Checkpoints, say) -> dict | None:
    """Load the last whole checkpoint where --resume asks for it; refuse to overwrite a run otherwise."""
    if options.resume is None:
        if kept.entries():
            raise ValueError(
                f"{options.out} already holds a run: continue it with --resume {options.out}, or give another --out"
            )
        return None
    state, progress, file = kept.load()
    trainer.load_state(state)
    say(f"continuing from {file}: epoch {progress['epoch']}, step {trainer.steps}")
    return progress


def write_headers(out: Path, options: Options, world) -> None:
    """config.json and environment.json, before anything can go wrong."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.dumps(dataclasses.asdict(options) | {"resume": None}, indent=1) + "\n"
    checkpoints.write_atomically(out / "config.json", config.encode())
    checkpoints.write_atomically(out / "environment.json", (json.dumps(environment(world), indent=1) + "\n").encode())


def environment(world) -> dict:
    """Versions, MPI library, host, cores and threads: what a figure depends on besides the options."""
    from threadpoolctl import threadpool_info

    found = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": [f"{p['internal_api']} {p['version']}, {p['num_threads']} threads" for p in threadpool_info()],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cores": launch.cores(),
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "ranks": world.size if world else 1,
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if world:
        import mpi4py
        from mpi4py import MPI

        found["mpi4py"] = mpi4py.__version__
        found["mpi"] = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    return found


def describe_ranks(trainer: nn.Serial) -> str:
    count = trainer.shard[1]
    return f"{count} ranks, {type(trainer).__name__}" if count > 1 else "one process"


def draw_curves(history: list[dict], file: Path) -> None:
    """Loss and accuracy over the epochs, as a picture."""
    if not history:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [record["epoch"] for record in history]
    left.plot(epochs, [record["loss"] for record in history], label="training")
    left.plot(epochs, [record["test_loss"] for record in history], label="test")
    left.set(xlabel="epoch", ylabel="loss", yscale="log")
    left.legend(frameon=False)
    right.plot(epochs, [100 * record["accuracy"] for record in history], color="C1")
    right.set(xlabel="epoch", ylabel="test accuracy (%)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def elapsed(since: float) -> str:
    return f"{time.perf_counter() - since:.0f} s"


def what_next(options: Options) -> str:
    call = program()
    return (
        f"what next:\n  {call} --resume {options.out} --epochs {options.epochs + 10}   # train on\n"
        f"  {call} --ranks 4 --allreduce doubling   # more ranks, another algorithm: the same network\n"
        f"  {call} --help   # models, data sets, options; notebooks/ explain how it works"
    )
