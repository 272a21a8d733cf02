"""scripts/train.py with a fault on one rank: the environment's FAULT says "KIND/PHASE/RANK", once, and STRUCK a file.

A phase is a function that every rank calls there; on the rank it is replaced by what the kind does.
"""

import os
import resource
import signal
import sys
from pathlib import Path

from parallel.command import main


def patch(kind: str, phase: str) -> None:
    """Put the fault there."""
    import numpy as np

    from nn.training import checkpoints
    from parallel import trainer
    from parallel.command import training_run
    from parallel.state.checkpoint_writer import RanksCheckpointWriter
    from parallel.state.sharded_checkpoints import ShardedCheckpoints

    def replace(owner, name: str, call: int, do) -> None:
        """do(real, arguments) in place of that call, and of no other."""
        real, calls = getattr(owner, name), []

        def replaced(*arguments, **more):
            calls.append(None)
            if len(calls) != call:
                return real(*arguments, **more)
            Path(os.environ["STRUCK"]).touch()
            return do(lambda *changed: real(*(changed or arguments), **more), arguments)

        setattr(owner, name, replaced)

    def then(strike):
        """Do that, and go on."""

        def do(real, arguments):
            strike(next((each for each in arguments if isinstance(each, trainer.DistributedTrainer)), arguments[0]))
            return real()

        return do

    def stop(_):
        raise RuntimeError("boom")

    def leave(code):
        def do(_):
            raise SystemExit(code)

        return do

    def poison(many):
        many = many.trainer if isinstance(many, RanksCheckpointWriter) else many
        many.flat_parameters[...] = np.nan
        if getattr(many.sync, "serves", False):
            many.sync.held[...] = np.nan

    def fill(_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))

    def spoil(of: str):
        """Change what was saved, and die of it."""

        def do(_):
            directory = Path(os.environ["CHECKPOINTS"])
            if of == "manifest":
                text = (directory / "manifest.json").read_text()
                (directory / "manifest.json").write_text(text[: len(text) // 2])
            else:
                spoiled = None
                while (newest := newest_part(directory)) != spoiled:  # a thread may just be saving another one
                    if spoiled and spoiled.exists():
                        flip(spoiled)
                    flip(newest)
                    spoiled = newest
            os.kill(os.getpid(), signal.SIGKILL)

        return do

    def newest_part(directory):
        return directory / checkpoints.files_of(checkpoints.Checkpoints(directory).entries()[-1])[-1][0]

    def flip(file):
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 4
        file.write_bytes(content)

    strikes = {
        "raise": stop,
        "SystemExit": leave("boom"),
        "exit 0": leave(0),
        "exit 3": leave(3),
        "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
        "SIGSTOP": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
        "SIGTERM": lambda _: os.kill(os.getpid(), signal.SIGTERM),
        "NaN": poison,
        "disk full": fill,
        "corrupted part": spoil("part"),
        "truncated manifest": spoil("manifest"),
    }
    many = trainer.DistributedTrainer
    places = {
        "start": (training_run, "resume", 1),
        "step": (many, "step", 8),
        "evaluation": (many, "sum_scores", 2),
        "end": (training_run, "leave_network", 1),
    }
    if phase == "checkpoint" and kind in ("NaN", "missing call"):
        places["checkpoint"] = RanksCheckpointWriter, "save", 3  # of step 6
    if kind == "missing call":
        places |= {"start": (training_run, "agree_on_data", 1), "end": (many, "check_replicas", 1)}
        places["evaluation"] = many, "scores", 2
        nothing = {"step": 0.0, "evaluation": {"accuracy": 0.0, "loss": 0.0}}.get(phase)
        replace(*places[phase], lambda real, arguments: nothing)
    elif kind in ("wrong shape", "wrong dtype"):

        def change(real, arguments):
            each, x, *more = arguments
            return real(each, x[:, :, :-1] if kind == "wrong shape" else np.full(x.shape, "x"), *more)

        replace(*places[phase], change)
    elif phase == "checkpoint" and kind != "NaN":  # that of step 6, in whatever thread, of one file or of parts
        replace(checkpoints.Checkpoints, "save", 4, then(strikes[kind]))
        replace(ShardedCheckpoints, "write_part", 3, then(strikes[kind]))
    else:
        replace(*places[phase], then(strikes[kind]))


def then_patch(*arguments) -> None:
    set_threads(*arguments)
    kind, phase, rank = os.environ["FAULT"].split("/")
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == rank:
        patch(kind, phase)


set_threads, main.set_threads = main.set_threads, then_patch  # only then may NumPy be imported
sys.exit(main.main())
