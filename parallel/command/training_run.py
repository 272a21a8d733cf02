"""One training run, from options to a directory with everything in it: the same on one process and on many ranks."""

from __future__ import annotations

import math
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

import nn
from nn.analysis import pictures
from nn.training import callbacks, checkpoint_callback, checkpoints
from nn.training.tensorboard import TensorBoard
from nn.training.training import check_progress
from parallel.command import factory, trained_run
from parallel.command.factory import Parts, prepare
from parallel.command.options import Options
from parallel.command.resuming import check_checkpoints, result_options
from parallel.command.rules import BETWEEN_RANKS, check_alike, check_started, checkpoint_policy, settings
from parallel.command.run_directory import default_directory, files_in, what_next, write_headers
from parallel.command.run_lock import RunHeld, RunLock
from parallel.launch import launcher
from parallel.reports import inspection
from parallel.reports.breakdown import Breakdown, draw_breakdown
from parallel.reports.curves import write_curves
from parallel.reports.figures import write_figure
from parallel.reports.memory_report import MemoryReport, resident
from parallel.reports.staleness import Staleness, write_staleness
from parallel.reports.timeline import Timeline, write_trace
from parallel.run_trainer import RunTrainer
from parallel.settings import changed, flag
from parallel.state import placement_picture
from parallel.state.sharded_checkpoints import ShardedCheckpoints
from parallel.strategies import STRATEGIES, axes, build_trainer
from parallel.strategies.auto import AUTO

WRITING = 3600.0  # seconds that rank 0 may draw and write


def train(options: Options, written: Callable[[], object] = lambda: None, lock: RunLock | None = None) -> dict:
    """Do what the options say; returns what result.json holds.

    `written` is called when all is in files, before ranks part. `lock` of the run's directory names it from then on.

    Raises
    ------
    ValueError, TypeError, ArithmeticError, RuntimeError, OSError, MemoryError
        Whatever makes the run impossible or worthless, with a message that says what to do.
    """
    np.seterr(all="ignore")  # a loss that is not finite is an error of its own
    parts, lock = prepare(options), lock or RunLock()
    try:
        return run_attempts(options, parts, written, lock)
    finally:
        lock.release()


def run_attempts(options: Options, parts: Parts, written: Callable[[], object], lock: RunLock) -> dict:
    """A run, or several of them where ranks die and the others go on."""
    if options.elastic and launcher.inside():
        from parallel.elastic import recovery

        policy = recovery.Policy.parse(options.elastic)

        def attempt(elastic):
            return run_attempt(replace(options, out=lock.directory or options.out), parts, written, lock, elastic)

        return recovery.run_elastic(policy, attempt, options.watch)
    return run_attempt(options, parts, written, lock)


def run_attempt(options: Options, parts: Parts, written: Callable[[], object], lock: RunLock, elastic=None) -> dict:
    """A run on these ranks, from the first message between them to result.json.

    Parameters
    ----------
    written : callable
        As of `train`.
    lock : RunLock
        Of the run's directory, which rank 0 holds.
    elastic : parallel.elastic.recovery.ElasticContext or None
        Of a run that goes on where ranks die, and calls this again then.
    """
    started = time.perf_counter()
    data = parts.data
    point, again = None, elastic is not None and elastic.again  # called again, as ranks have died
    if elastic:
        out, point = elastic.start_attempt(options.out)
        options = replace(options, out=out)
    world, options = connect_ranks(options, lock, elastic)
    if elastic and world is None:  # too many for the mesh
        elastic.open_sample_log(Path(options.out))
        elastic.wait()
        written()
        return {}
    rank, size = (world.rank, world.size) if world else (0, 1)
    say = (lambda line="": print(line, flush=True)) if rank == 0 else (lambda line="": None)

    if world:
        agree_on_data(world, data)
    if options.strategy_name == AUTO:
        options = choose_strategy(options, parts, world, say)
    before = resident()
    traffic = counted(world) if options.memory and world else None
    trainer = make_trainer(options, parts, traffic or world)
    trainer.say = say
    start_from(options, trainer, say)
    timeline = Timeline(world) if options.timeline else None
    breakdown = Breakdown(trainer)
    memory = MemoryReport(trainer, traffic, before) if options.memory else None
    loaders = factory.loaders(options, data, trainer.shard, listeners(breakdown.loader, timeline))
    trainer.set_epoch_steps(len(loaders.train))
    schedule, schedule_hooks = factory.schedule(options, loaders.train)

    out = Path(options.out)
    if not (again and (point or elastic.trained)):
        introduce(options, parts, trainer, say)
    if options.find_lr:
        say(inspection.find_rate(trainer, loaders.train, loaders.validation, out, write=rank == 0))
        trainer.close()
        return {}
    how, metric = checkpoint_policy(options), factory.metric(data)
    kept = ShardedCheckpoints(out / "checkpoints", how["keep"], result_options(options))
    if again:
        progress = go_on(trainer, kept, say, elastic, point, metric)
    else:
        progress = resume(options, trainer, kept, say)
    if progress and schedule:
        describe_rate(options, schedule, trainer, progress, say)
    if rank == 0 and not (again and (out / "config.json").exists()):
        write_headers(out, options, world)
    if options.profile:
        say(inspection.profile(trainer, loaders.train) + "\n")
    if timeline:
        timeline.watch(trainer)
    if not again:
        say(f"writing to {out}/; a run that is stopped goes on with --resume {shlex.quote(str(out))}\n")

    hooks = [elastic.tracker, elastic.open_sample_log(out, trainer.steps, progress)] if elastic else []
    hooks += [Staleness()] if world else []
    hooks += [
        callbacks.ExpertLoad(),
        breakdown,
        callbacks.Progress(say=say),
        callbacks.Metrics(out / "metrics.jsonl"),
        *schedule_hooks,
    ]
    hooks += [TensorBoard(options.tensorboard)] if options.tensorboard else []
    termination = elastic.termination if elastic else checkpoint_callback.Termination()
    checkpointing = checkpoint_callback.KeepCheckpoints(
        kept, options.checkpoint_steps, metric, how["background"], termination
    )
    hooks += [checkpointing, elastic.tracker.end] if elastic else [checkpointing]
    if options.check_replicas and world:
        hooks.append(replica_checks(options.check_replicas))
    chooser = None
    if options.patience:
        chooser = callbacks.EarlyStopping(options.patience, metric, kept)
    elif metric:
        chooser = callbacks.RestoreBest(kept, metric, say)
    hooks += [chooser] if chooser else []
    with termination, finishing(checkpointing):
        training = nn.fit(
            trainer,
            elastic.sample_log.loader(loaders.train, trainer) if elastic else loaders.train,
            options.epochs,
            hooks,
            loaders.validation,
            schedule,
            progress,
            options.accumulate,
            loaders.test,
        )
    if elastic:
        elastic.stop_loop_detection()
    if size > 1:
        trainer.check_replicas()

    result = {
        **training.result,
        **chosen(training, chooser),
        "epochs": training.epoch,
        "steps": training.history[-1]["step"] if training.history else trainer.steps,
        "seconds": training.seconds,
        "images_per_second": training.epoch * len(data.train) / max(1e-9, training.seconds),
        "ranks": size,
        **trainer.loss_scale_record(),
        "breakdown": breakdown.by_rank(),
        "parameters_sha256": trainer.digest(),
    }
    result |= trainer.bytes_sent()
    if elastic:
        result["elastic"] = elastic.summary()
    leave_network(options, parts, trainer, say)
    events = timeline.merge() if timeline else []
    alone = trainer.alone() if options.inspect else None  # every rank: sharded strategies gather here
    memory_table = memory.report() if memory else ""  # before pictures take memory of their own
    held = placement_picture.held_by_ranks(trainer.table) if memory and world and options.pictures else []
    if rank == 0:
        if not (out / "config.json").exists():
            say(f"warning: {out}/ was renamed or removed while the run trained: what was written since is in a new one")
            write_headers(out, options, world)
        checkpoints.remove_temporary_files(out)
        checkpoints.write_atomically(out / "result.json", (checkpoints.json_text(result, 1) + "\n").encode())
        if options.pictures:
            with drawing(say):
                write_curves(training.history, out / "curves.png")
                write_staleness(training.history, out / "staleness.png")
                write_figure(draw_breakdown(breakdown.table), out / "breakdown.png")
                if held:
                    count = trainer.network.layout.count
                    write_figure(placement_picture.draw_placement(held, trainer.name, count), out / "placement.png")
                if any(record.get("experts") for record in training.history):
                    write_figure(pictures.expert_load(training.history), out / "experts.png")
        if events:
            with drawing(say):
                write_trace(events, out)
                for name, figure in (
                    trainer.forward_backward.pictures(events) if trainer.forward_backward else {}
                ).items():
                    write_figure(figure, out / name, bbox_inches="tight")
        if options.inspect:
            with drawing(say):
                say("\n" + inspection.inspect(alone, data, out / "inspection"))
    for warning in not_finite(result, data) if rank == 0 else ():
        say(warning)
    if memory:
        say("\n" + memory_table)
    say()
    say(f"test {describe(result)}, {training.seconds:.1f} s of training")
    if result.get("bytes_dense"):
        sent, dense = result["bytes_sent"], result["bytes_dense"]
        say(f"{sent:,.0f} bytes on the wire a rank and step, counted; {dense:,.0f} dense ({sent / dense:.2%})")
    say(f"everything is in {out}/: {', '.join(files_in(out))} ({elapsed(started)} in all)")
    sys.audit("ringprop.say_what_next", trainer)
    say(what_next(options))
    written()
    if world:
        wait_for_writer(world, options.watch)
    if elastic:  # not before: a rank that is stopped as it writes is killed, and another one writes
        elastic.stop_heartbeat()
        if rank == 0:
            elastic.close()
    trainer.close()  # not after an error: it needs all ranks
    if world:  # MPI would free what is left at its end, in an order of each rank's own, and wait for ever
        world.release()
    return result


def wait_for_writer(world, limit: float) -> None:
    """Return when all ranks have come here; after `limit` seconds (0: never) one says that it waits.

    Rank 0 draws and writes meanwhile, so the watchdog ends nothing: the ranks that wait are in no call. If rank 0 fails
    it ends all.

    Raises
    ------
    TimeoutError
        After WRITING seconds, unless the limit is 0: rank 0 has been stopped, or its disk hangs.
    """
    from collectives.failures.awake import Awake
    from collectives.running.nonblocking import write_stderr

    request, clock, said = world.Ibarrier(), Awake(), world.rank != 1 or not limit
    while not request.Test():
        time.sleep(0.01)
        if not said and clock.now() > limit:
            said = True
            write_stderr(
                f"rank {world.rank} of {world.size}: has waited {limit:g} s for rank 0, which draws and writes"
            )
        if limit and clock.now() > max(limit, WRITING):
            raise TimeoutError(f"rank 0 has drawn and written for {clock.now():.0f} s: is it stopped, or its disk?")


def introduce(options: Options, parts: Parts, trainer: RunTrainer, say) -> None:
    """What is trained, on what, how."""
    say(parts.network.summary())
    say(f"{parts.data.name}: {describe_splits(parts.data)}")
    learning = f"{trainer.optimizer!r}, {trainer.loss!r}, {options.batch} samples a step"
    say(f"{describe_ranks(trainer, options)}; {learning}\n")


@contextmanager
def drawing(say):
    """Say what cannot be drawn or written in this block, as where MPLBACKEND names no backend: results are saved."""
    try:
        yield
    except BrokenPipeError:  # nobody reads the output any more
        raise
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        say(f"warning: some pictures are missing: {error}")


@contextmanager
def finishing(checkpointing: checkpoint_callback.KeepCheckpoints):
    """What was to be saved when an error ends training is: of all ranks, where all have that error."""
    try:
        yield
    except nn.NonFiniteLoss:
        with suppress(FloatingPointError):  # of the same parameters
            checkpointing.finish()
        raise
    finally:
        checkpointing.wait()


def leave_network(options: Options, parts: Parts, trainer: RunTrainer, say) -> None:
    """Write the network, for whoever uses it: scripts/predict.py, nn.load (every rank: shards are gathered)."""
    sys.audit("ringprop.leave_network", trainer)
    file = Path(options.out) / trained_run.FILE
    try:
        nn.save(trainer, file, trained_run.about(options, parts.data))
    except (TypeError, ValueError, OSError) as error:  # such as a layer that is not registered: nothing else is lost
        say(f"no {file}: {error}")


def listeners(loader, timeline: Timeline | None):
    """Who is told what the loader did when."""
    if timeline is None:
        return loader

    def both(name: str, start: float, end: float) -> None:
        loader(name, start, end)
        timeline.add(name, start, end)

    return both


def counted(world):
    """The communicator, counting bytes."""
    from parallel.reports.traffic import Traffic

    return Traffic(world)


def describe_splits(data: nn.data.Data) -> str:
    """How many samples are for what."""
    train, test = f"{len(data.train):,} training", f"{len(data.test):,} test samples"
    if data.validation is None:
        return f"{train} and {test}; no validation data, so the last epoch counts"
    return f"{train}, {len(data.validation):,} validation and {test}"


def chosen(training: nn.Training, chooser: callbacks.EarlyStopping | callbacks.RestoreBest | None) -> dict:
    """The epoch whose parameters the trainer has in the end, and its scores on the validation data."""
    epoch = chooser.epoch if chooser else training.epoch
    record = training.history[epoch - 1] if training.history else {}
    return {"chosen_epoch": epoch} | {name: record[name] for name in record if name.startswith("validation_")}


def not_finite(result: dict, data: nn.data.Data) -> list[str]:
    """Warnings of losses of the test and the validation data that are not finite, with the sample where one is bad."""
    found = []
    for split, loss in (("test", result.get("loss")), ("validation", result.get("validation_loss"))):
        if loss is None or math.isfinite(loss):
            continue
        samples = getattr(data, split)  # None where the run that is continued had some
        bad = None if samples is None else samples.first_bad()
        why = f"{split} sample {bad} holds a value that is not finite" if bad is not None else ""
        found.append(f"warning: the {split} loss is {loss}: {why or 'outputs of the network are not finite'}")
    return found


def describe(result: dict) -> str:
    """The figure of the test data, and after which epoch."""
    score = f"accuracy {result['accuracy']:.2%}" if "accuracy" in result else f"loss {result['loss']:.4g}"
    epochs = result["epochs"]
    if result["chosen_epoch"] < epochs:
        return f"{score} after epoch {result['chosen_epoch']}, the best of {epochs} on the validation data"
    return f"{score} after {epochs} epoch{'' if epochs == 1 else 's'}"


def go_on(trainer: RunTrainer, kept: checkpoints.Checkpoints, say, elastic, point, metric: str | None) -> dict | None:
    """Take over what the members of a run have that others have died of; returns its progress.

    They go back to the last checkpoint where the best epoch's weights were lost with the rank that wrote them.
    """
    if point and (best := lost_best(trainer, kept, point.progress["history"], metric)):
        say(f"the weights of epoch {best}, the best so far, were lost with the rank that wrote them: trained again")
    elif point:
        trainer.load_state_dict(point.state())
        say(f"{elastic.describe()}, from step {trainer.steps}")
        return point.progress
    saved = any(not entry["named"] for entry in kept.entries())
    say(f"{elastic.describe()}, {'from the last checkpoint' if saved else 'from the beginning'}")
    return load(trainer, kept, say) if saved else None


def lost_best(trainer: RunTrainer, kept: checkpoints.Checkpoints, history: list[dict], metric: str | None) -> int:
    """The best epoch, where its weights are not saved and the last checkpoint is of the epoch before; else 0 (all
    ranks)."""
    best = 0
    if metric and history and trainer.is_writer:
        best = callbacks.best_epoch(history, metric, nn.metrics.direction(metric, None, trainer.metrics))
        if saved_epoch(kept, "best") >= best or saved_epoch(kept) != best - 1:
            best = 0
    return int(trainer.sum(np.array([best]))[0])


def saved_epoch(kept: checkpoints.Checkpoints, name: str | None = None) -> int:
    """The epochs that were done as a checkpoint was saved; 0 where there is none."""
    with warnings.catch_warnings(), suppress(checkpoints.CheckpointError, OSError):
        warnings.simplefilter("ignore")  # of a damaged one: said where it is loaded
        return kept.load(name)[1]["epoch"]
    return 0


def connect_ranks(options: Options, lock: RunLock, elastic=None):
    """Return a Communicator over all ranks, or None for one process that nothing launched; and the options there.

    Their `out` is a directory, the same on all ranks, and no other run's. Where ranks were lost, the mesh and the
    servers are those of the ranks that are left. `lock`, `elastic` as of `run_attempt`.
    """
    if not launcher.inside():
        options = replace(options, out=options.out or default_directory(options))
        hold_lock(options, lock)
        return None, options
    from collectives.failures.launch_check import starting

    if elastic:
        if not elastic.again:
            with starting(options.watch):
                check_alike(elastic.members.root.allgather(settings(options)))
            check_started(options, elastic.members.size)
        root, train = elastic.members.root, elastic.members.root.size
        if elastic.again and train < elastic.members.size:
            train, mesh = axes.fitting(options, train)
            place = "workers" if train == 1 else options.server_place  # it is worker and server
            servers = min(options.servers, train - (place == "dedicated"))
            options = replace(options, mesh=mesh, server_place=place, servers=servers)
        options = agreed_directory(options, root)
        if root.rank:
            lock.release()  # another rank is the first one now
        known = root.allgather(elastic.lock_content)
        elastic.lock_content = hold_lock(options, lock, root, next(filter(None, known), ""))
        return elastic.communicator(train, allreduce=options.allreduce, watch=options.watch), options
    with starting(options.watch):
        world = communicator(options)
    check_started(options, world.size)
    options = agreed_directory(options, world)
    hold_lock(options, lock, world)
    return world, options


def agreed_directory(options: Options, comm) -> Options:
    """Return the options with the run's directory as rank 0 has it (collective)."""
    return replace(options, out=comm.bcast((options.out or default_directory(options)) if comm.rank == 0 else None))


def hold_lock(options: Options, lock: RunLock, comm=None, known: str = "") -> str:
    """Hold the lock of the run's directory on rank 0; return what it says (collective).

    Raises
    ------
    RunHeld
        On all ranks: another process trains there.
    """
    content = refused = ""
    lock.directory = options.out
    if not options.find_lr and (comm is None or comm.rank == 0):
        try:
            content = lock.hold(Path(options.out), known)
        except RunHeld as error:
            refused = str(error)
    if comm is not None:
        content, refused = comm.bcast((content, refused))
    if refused:
        raise RunHeld(refused)
    return content


def communicator(options: Options):
    """A Communicator over all ranks, if their options are the same."""
    from mpi4py import MPI

    from collectives import Communicator

    # Compared before there is a Communicator: its watchdog is made by all ranks, or they wait for each other.
    check_alike(MPI.COMM_WORLD.allgather(settings(options)))
    return Communicator(MPI.COMM_WORLD, allreduce=options.allreduce, watch=options.watch)


def make_trainer(options: Options, parts: Parts, world) -> RunTrainer:
    """The trainer of --strategy on these ranks; of one process, where `world` is None."""
    _, network, loss, optimizer = parts
    if world is None and options.reproducible:
        from parallel.strategies.data_parallel import DistributedDataParallel

        return DistributedDataParallel(network, loss, optimizer, None, options.seed, shards=options.reproducible)
    if world is None and not STRATEGIES[options.strategy_name].searches:
        return RunTrainer(network, loss, optimizer, options.seed)
    return build_trainer(options, network, loss, optimizer, world)


def start_from(options: Options, trainer: RunTrainer, say) -> None:
    """Take over the weights of --from (all ranks); a checkpoint of a resumed run replaces them."""
    if options.from_ is None or options.resume is not None:
        return
    new = trainer.load_weights(factory.weights(options))
    say(f"weights of {options.from_}" + (f"; drawn anew: {', '.join(new)}" if new else ""))


def choose_strategy(options: Options, parts: Parts, world, say) -> Options:
    """Return the options with the strategy that the plan chooses, on many ranks; one process has no choice."""
    if world is None:
        return replace(options, strategy="ddp")
    from parallel.command import auto

    return auto.chosen(options, parts, world, say)


def agree_on_data(world, data: nn.data.Data) -> None:
    """Refuse data that differ between ranks, as where hosts hold other files."""
    from parallel.trainer import agree, data_facts

    agree(world, data_facts(data))


def replica_checks(steps: int) -> nn.Callback:
    """A callback that compares the parameters of all ranks every so many steps."""
    from parallel.trainer import CheckReplicas

    return CheckReplicas(steps)


def resume(options: Options, trainer: RunTrainer, kept: checkpoints.Checkpoints, say) -> dict | None:
    """Load the last whole checkpoint where --resume asks for it; refuse to overwrite a run otherwise."""
    sys.audit("ringprop.resume", trainer)
    check_checkpoints(options)
    return None if options.resume is None else load(trainer, kept, say)


def load(trainer: RunTrainer, kept: checkpoints.Checkpoints, say) -> dict:
    """Load the last whole checkpoint; returns its progress."""
    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        state, progress, file = kept.load()
    for each in damaged:  # every rank has found it; one says so
        say(f"warning: {each.message}")
    try:
        check_progress(progress)
        trainer.load_state_dict(state)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
    say(f"continuing from {file}: epoch {progress['epoch']}, step {trainer.steps}")
    return progress


def describe_rate(options: Options, schedule, trainer: RunTrainer, progress: dict, say) -> None:
    """Say how long the schedule of a resumed run lasts, and at what rate it goes on: more epochs stretch it."""
    step = trainer.steps - progress.get("first_step", 0)
    before = progress["history"][-1].get("lr") if progress["history"] else None
    now = schedule(step)
    line = f"schedule {options.schedule or 'constant'} over {options.epochs} epochs: the learning rate is {now:.3g}"
    if before is not None and not math.isclose(now, before, rel_tol=0.01):
        line += f", it was {before:.3g} at the end of epoch {progress['history'][-1]['epoch']}"
    say(line)


def describe_ranks(trainer: RunTrainer, options: Options) -> str:
    """How many ranks train and how, and which options have no effect on one process."""
    count = trainer.communicator.size if trainer.communicator else 1
    if count == 1:
        idle = [f"{flag(name)} {getattr(options, name)}" for name in changed(options, BETWEEN_RANKS)]
        return "one process" + (f" (without effect below --ranks 2: {', '.join(idle)})" if idle else "")
    how = trainer.describe()
    return f"{count} ranks, {trainer.name}{': ' * bool(how)}{how}"


def elapsed(since: float) -> str:
    """Seconds since then, by time.perf_counter, in words."""
    return f"{time.perf_counter() - since:.0f} s"
