"""One training run, from options to a directory with everything in it: the same on one process and on many ranks."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import shlex
import socket
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import nn
from nn import callbacks, checkpoints
from parallel import build, launch, reports
from parallel.breakdown import Breakdown, draw_breakdown
from parallel.job import again, default_directory, program
from parallel.memory import Ledger, resident
from parallel.options import BETWEEN_RANKS, Options, flag
from parallel.prepare import Parts, check_checkpoints, prepare
from parallel.timeline import Timeline
from parallel.timeline import write as write_timeline


def train(options: Options) -> dict:
    """Do what the options say; returns what result.json holds.

    Raises
    ------
    ValueError, TypeError, ArithmeticError, RuntimeError, OSError, MemoryError
        Whatever makes the run impossible or worthless, with a message that says what to do.
    """
    started = time.perf_counter()
    np.seterr(all="ignore")  # a loss that is not finite is an error of its own
    parts = prepare(options)
    data, network = parts.data, parts.network
    world = ranks(options)
    rank, size = (world.rank, world.size) if world else (0, 1)
    say = (lambda line="": print(line, flush=True)) if rank == 0 else (lambda line="": None)

    if world:
        agree_on_data(world, data)
    before = resident()
    traffic = counted(world) if options.memory and world else None
    trainer = make_trainer(options, parts, traffic or world)
    trainer.say = say
    timeline = Timeline(world) if options.timeline else None
    breakdown = Breakdown(trainer)
    ledger = Ledger(trainer, traffic, before) if options.memory else None
    train_loader, test_loader = build.loaders(options, data, trainer.shard, told(breakdown.loader, timeline))
    if options.compress:
        trainer.compressor.tell_epoch(len(train_loader))
    schedule, schedule_hooks = build.schedule(options, train_loader)

    out = Path(options.out)
    say(network.summary())
    say(f"{data.name}: {len(data.train):,} training and {len(data.test):,} test samples")
    learning = f"{trainer.optimizer!r}, {trainer.loss!r}, {options.batch} samples a step"
    say(f"{describe_ranks(trainer, options)}; {learning}")
    say()
    if options.find_lr:
        say(reports.find_rate(trainer, train_loader, out, write=rank == 0))
        return {}
    kept = checkpoints.Checkpoints(out / "checkpoints")
    progress = resume(options, trainer, kept, say)
    if rank == 0:
        write_headers(out, options, world)
    if options.profile:
        say(reports.profile(trainer, train_loader) + "\n")
    if timeline:
        timeline.watch(trainer)
    say(f"writing to {out}/; a run that is stopped goes on with --resume {shlex.quote(str(out))}\n")

    metric = "accuracy" if data.classes else "test_loss"
    hooks = [breakdown, callbacks.Progress(say=say), callbacks.Metrics(out / "metrics.jsonl"), *schedule_hooks]
    hooks.append(callbacks.KeepCheckpoints(kept, options.checkpoint_steps, metric))
    if options.check_replicas and world:
        hooks.append(replica_checks(options.check_replicas))
    if options.patience:
        hooks.append(callbacks.EarlyStopping(options.patience, metric, kept))
    training = nn.fit(trainer, train_loader, options.epochs, hooks, test_loader, schedule, progress, options.accumulate)
    if size > 1:
        trainer.check_replicas()

    result = {
        **score(trainer, test_loader),
        "epochs": training.epoch,
        "steps": trainer.steps,
        "seconds": training.seconds,
        "images_per_second": training.epoch * len(data.train) / max(1e-9, training.seconds),
        "ranks": size,
        "breakdown": breakdown.by_rank(),
        "parameters_sha256": trainer.digest(),
    }
    if options.compress:
        result |= trainer.bytes_sent()
    events = timeline.merge() if timeline else []
    alone = trainer.alone() if options.inspect else None  # every rank: sharded strategies gather here
    memory = ledger.report() if ledger else ""  # before pictures take memory of their own
    if rank == 0:
        checkpoints.write_atomically(out / "result.json", (json.dumps(result, indent=1) + "\n").encode())
        if not options.no_pictures:
            draw_curves(training.history, out / "curves.png")
            draw_breakdown(breakdown.table).savefig(out / "breakdown.png", dpi=120)
        if events:
            write_timeline(events, out)
        if options.inspect:
            say("\n" + reports.inspect(alone, data, out / "inspection"))
    if ledger:
        say("\n" + memory)
    say()
    epochs = f"{training.epoch} epoch{'' if training.epoch == 1 else 's'}"
    say(f"test {describe(result)} after {epochs}, {training.seconds:.1f} s of training")
    if options.compress:
        sent, dense = result["bytes_sent"], result["bytes_dense"]
        say(f"{sent:,.0f} bytes on the wire a rank and step, counted; {dense:,.0f} dense ({sent / dense:.2%})")
    say(f"everything is in {out}/: {', '.join(files_in(out))} ({elapsed(started)} in all)")
    say(what_next(options))
    return result


def told(loader, timeline: Timeline | None):
    """Who is told what the loader did when."""
    if timeline is None:
        return loader

    def both(name: str, start: float, end: float) -> None:
        loader(name, start, end)
        timeline.add(name, start, end)

    return both


def counted(world):
    """The communicator, counting bytes."""
    from parallel.traffic import Traffic

    return Traffic(world)


def score(trainer: nn.Serial, loader: nn.Loader) -> dict:
    """Loss and, where there are classes, accuracy on the test data."""
    found = nn.evaluate(trainer, loader)
    return {"loss": found.pop("test_loss"), **found}


def describe(result: dict) -> str:
    return f"accuracy {result['accuracy']:.2%}" if "accuracy" in result else f"loss {result['loss']:.4g}"


EACH_ITS_OWN = ("--out", "--ranks", "RINGPROP_DATA", "RINGPROP_TRACEBACK")  # what ranks need not have alike


def ranks(options: Options):
    """A Communicator over all ranks, or None where this process is the only one and nothing launched it.

    `options.out` is a directory from now on, the same on all.
    """
    if not launch.inside():
        options.out = options.out or default_directory(options)
        return None
    from mpi4py import MPI

    from collectives import Communicator

    # Compared before there is a Communicator: its watchdog is made by all ranks, or they wait for each other.
    mine = {"--" + name.replace("_", "-"): value for name, value in dataclasses.asdict(options).items()}
    mine |= {name: value for name, value in os.environ.items() if name.startswith("RINGPROP_")}
    for name in EACH_ITS_OWN:
        mine.pop(name, None)
    everyone = MPI.COMM_WORLD.allgather(mine)
    for other, theirs in enumerate(everyone):
        for name in everyone[0] | theirs:
            if (value := theirs.get(name)) != (first := everyone[0].get(name)):
                raise ValueError(f"ranks disagree on {name}: rank 0 has {first}, rank {other} has {value}")
    world = Communicator(MPI.COMM_WORLD, allreduce=options.allreduce, watch=options.watch)
    if options.ranks and options.ranks != world.size:
        raise ValueError(f"--ranks {options.ranks}, but {world.size} ranks were started: leave --ranks to the launcher")
    options.out = world.bcast((options.out or default_directory(options)) if world.rank == 0 else None)
    return world


def make_trainer(options: Options, parts: Parts, world) -> nn.Serial:
    _, network, loss, optimizer = parts
    if world is None and options.reproducible:
        from parallel.reproducible.shards import ReproducibleSerial

        return ReproducibleSerial(network, loss, optimizer, options.seed, options.reproducible)
    if world is None:
        return nn.Serial(network, loss, optimizer, options.seed)
    from parallel.strategies import STRATEGIES

    return STRATEGIES[options.strategy](options, network, loss, optimizer, world)


def agree_on_data(world, data: nn.data.Data) -> None:
    from parallel.synchronous import agree, data_facts

    agree(world, data_facts(data))


def replica_checks(steps: int) -> nn.Callback:
    from parallel.synchronous import CheckReplicas

    return CheckReplicas(steps)


def resume(options: Options, trainer: nn.Serial, kept: checkpoints.Checkpoints, say) -> dict | None:
    """Load the last whole checkpoint where --resume asks for it; refuse to overwrite a run otherwise."""
    check_checkpoints(options)
    if options.resume is None:
        return None
    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        state, progress, file = kept.load()
    for each in damaged:  # every rank has found it; one says so
        say(f"warning: {each.message}")
    try:
        trainer.load_state(state)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
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


def describe_ranks(trainer: nn.Serial, options: Options) -> str:
    communicator = getattr(trainer, "communicator", None)
    count = communicator.size if communicator else 1
    if count == 1:
        asked = [name for name in BETWEEN_RANKS if getattr(options, name) != getattr(Options, name)]
        idle = [f"{flag(name)} {getattr(options, name)}" for name in asked]
        return "one process" + (f" (without effect below --ranks 2: {', '.join(idle)})" if idle else "")
    how = trainer.describe() if hasattr(trainer, "describe") else ""
    return f"{count} ranks, {type(trainer).__name__}{': ' * bool(how)}{how}"


def draw_curves(history: list[dict], file: Path) -> None:
    """Loss and accuracy over the epochs, as a picture."""
    if not history:
        return
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs, style = [record["epoch"] for record in history], {"marker": "o"} if len(history) < 10 else {}
    left.plot(epochs, [record["loss"] for record in history], label="training", **style)
    left.plot(epochs, [record["test_loss"] for record in history], label="test", **style)
    left.set(xlabel="epoch", ylabel="loss", yscale="log")
    left.legend(frameon=False)
    if "accuracy" in history[0]:
        right.plot(epochs, [100 * record["accuracy"] for record in history], color="C1", **style)
        right.set(xlabel="epoch", ylabel="test accuracy (%)")
    else:
        right.plot(epochs, [record["images_per_second"] for record in history], color="C1", **style)
        right.set(xlabel="epoch", ylabel="samples/s")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    checkpoints.write_atomically(file, content.getvalue())


def files_in(out: Path) -> list[str]:
    """What a run has left to look at."""
    names = "result.json", "metrics.jsonl", "curves.png", "breakdown.png", "timeline.png", "inspection/", "checkpoints/"
    return [name for name in names if (out / name).exists()]


def elapsed(since: float) -> str:
    return f"{time.perf_counter() - since:.0f} s"


def what_next(options: Options) -> str:
    call = program()
    saved = bool(checkpoints.Checkpoints(Path(options.out) / "checkpoints").entries())
    return (
        "what next:\n"
        + f"  {again(options)} --epochs {options.epochs + 10}   # train on\n" * saved
        + f"  {call} --ranks 4 --allreduce doubling   # more ranks, another algorithm: the same network\n"
        + f"  {call} --help   # models, data sets, options; notebooks/ explain how it works"
    )
