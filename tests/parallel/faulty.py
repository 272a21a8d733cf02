"""scripts/train.py with a fault on one rank: the environment's FAULT says "KIND/PHASE/RANK", once, and STRUCK a file.

Where a rank fails at a place, `faults.inject` does it; where it leaves out a call, or makes another one, a public
function that all ranks call there is replaced.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from parallel.command import main
from parallel.testing import faults

KIND, PHASE, RANK = os.environ["FAULT"].split("/")
STRUCK, CHECKPOINTS = Path(os.environ["STRUCK"]), Path(os.environ["CHECKPOINTS"])
dying = threading.Event()
PLACES = {  # event, and after how many steps; the file of a checkpoint is opened in whatever thread, and may be a part
    "start": ("ringprop.resume", 0),
    "step": ("ringprop.compute_gradients", 7),
    "evaluation": ("ringprop.sum_scores", 8),
    "checkpoint": ("ringprop.save", 6) if KIND == "NaN" else ("open", ".step-00000006"),
    "end": ("ringprop.leave_network", 12),
}


def come_to(event: str, *arguments) -> None:
    """Fail, if this is the place."""
    while dying.is_set() and event == "os.rename":  # of a thread that saves: nothing takes the place of what is spoiled
        time.sleep(1)
    name, when = PLACES[PHASE]
    if event != name or STRUCK.exists():
        return
    if os.path.basename(str(arguments[0])).startswith(when) if event == "open" else arguments[0].steps == when:
        STRUCK.touch()
        STRIKES[KIND](*arguments)


def stop(*_):
    raise RuntimeError("boom")


def leave(code):
    def do(*_):
        raise SystemExit(code)

    return do


def send(number):
    return lambda *_: os.kill(os.getpid(), number)


def poison(trainer):
    trainer.flat_parameters[...] = float("nan")
    if getattr(trainer.sync, "serves", False):
        trainer.sync.held[...] = float("nan")


def fill(*_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))


def cut_manifest(*_):
    """Change what was saved, and die of it."""
    dying.set()
    manifest, half = CHECKPOINTS / "manifest.json", None
    while (text := manifest.read_text()) != half:  # a file may just have been renamed
        manifest.write_text(half := text[: len(text) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def corrupt_part(*_):
    """The same."""
    dying.set()
    spoiled = None
    while (newest := newest_part()) != spoiled:  # as above
        if spoiled and spoiled.exists():
            flip(spoiled)
        flip(newest)
        spoiled = newest
    os.kill(os.getpid(), signal.SIGKILL)


def newest_part() -> Path:
    from nn.training import checkpoints

    return CHECKPOINTS / checkpoints.files_of(checkpoints.Checkpoints(CHECKPOINTS).entries()[-1])[-1][0]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)


STRIKES = {
    "raise": stop,
    "SystemExit": leave("boom"),
    "exit 0": leave(0),
    "exit 3": leave(3),
    "SIGKILL": send(signal.SIGKILL),
    "SIGSTOP": send(signal.SIGSTOP),
    "SIGTERM": send(signal.SIGTERM),
    "NaN": poison,
    "disk full": fill,
    "corrupted part": corrupt_part,
    "truncated manifest": cut_manifest,
}


def replace() -> None:
    """Leave out a call, or make it with samples of another shape or dtype."""
    import numpy as np

    from parallel.command import training_run
    from parallel.state.checkpoint_writer import RanksCheckpointWriter
    from parallel.trainer import DistributedTrainer

    missing, calls = KIND == "missing call", []
    owner, name, call, result = {
        "start": (training_run, "agree_on_data", 1, None),
        "step": (DistributedTrainer, "step", 8, 0.0),
        "evaluation": (DistributedTrainer, "scores" if missing else "sum_scores", 2, {"accuracy": 0.0, "loss": 0.0}),
        "checkpoint": (RanksCheckpointWriter, "save", 3, None),  # of step 6
        "end": (DistributedTrainer, "check_replicas", 1, None),
    }[PHASE]
    real = getattr(owner, name)

    def replaced(*arguments):
        calls.append(None)
        if len(calls) != call:
            return real(*arguments)
        STRUCK.touch()
        if missing:
            return result
        trainer, x, *more = arguments
        return real(trainer, x[:, :, :-1] if KIND == "wrong shape" else np.full(x.shape, "x"), *more)

    setattr(owner, name, replaced)


fails = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == RANK
if fails and KIND not in STRIKES:
    replace()
with faults.inject(come_to) if fails and KIND in STRIKES else contextlib.nullcontext():
    sys.exit(main.main())
