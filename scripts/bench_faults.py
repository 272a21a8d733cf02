"""What it costs to be prepared for the worst, and how long it takes to go on after it.

Two ranks train LeNet-5 in alternating blocks of steps: bare; guarded, which is what scripts/train.py does: a watchdog
on the communicator, a meeting of the ranks ten times a second, in which they hear of errors and of wishes to end, and
in every block a checkpoint, which a thread writes; and elastic, which has beside that what --elastic has: a heartbeat,
a ledger, and in the memory of the node a copy of what an update overwrites. The median over the rounds of the quotient
of a round's blocks counts. Then what a checkpoint stops training for, by a thread and at once; and a rank that is
killed, until supervise.py has a run that goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench_engine import Case, make_batches
from bench_training import network_of, quiet_barrier, run
from benchmarking import Row, arguments

from parallel.launch import processes

CASE = Case("lenet5", (28, 28, 1), 10, 64)
GUARDED, ELASTIC = (f"lenet5, batch 64 a rank, {side}" for side in ("guarded", "elastic"))
PAUSE, RECOVERY = "lenet5, a checkpoint", "a killed rank, supervised"
STEPS, ROUNDS = 100, 16  # of a block, in which there is one checkpoint; rounds
WATCH = 300.0  # seconds, as scripts/train.py has it
MARK = "RINGPROP_BENCH"  # in the environment of all that is started to be killed
LONGEST = 120.0  # seconds that anything may take there
RUN = ["--model", "mlp:64,16,10", "--batch", "8", "--epochs", str(10**9), "--checkpoint-steps", "50", "--no-pictures"]


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """A guarded step against a bare one; a checkpoint by a thread against one at once; recovery."""
    if any(only in case for case in (GUARDED, ELASTIC, PAUSE)):
        size = {"steps": 10, "rounds": 2} if quick else {"steps": STEPS, "rounds": ROUNDS}
        found = run(size, suite=__file__)
        yield from step_rows(found)
    if only in RECOVERY:
        seconds = sorted(recover() for _ in range(1 if quick else 5))
        note = f"of {len(seconds)}, {seconds[0]:.2f} to {seconds[-1]:.2f} s; from SIGKILL to its first new checkpoint"
        yield Row(RECOVERY, median(seconds), unit="s", ranks=2, note=note)


def step_rows(found: dict) -> Iterator[Row]:
    """Of what rank 0 tells."""
    bare = 1e3 * median(found["seconds"]["bare"])
    for case, side in (GUARDED, "guarded"), (ELASTIC, "elastic"):
        each = [b / a for a, b in zip(found["seconds"]["bare"], found["seconds"][side], strict=True)]
        own = 1e3 * median(found["own"][side])
        note = f"median of {len(each)} quotients {median(each) - 1:+.2%}; {own:.3f} ms of a step are the guard's own, "
        note += f"{own / bare:.2%}; a checkpoint in {found['steps']} steps"
        if side == "elastic":
            copy = 1e3 * median(found["copying"])
            note += f"; {copy:.3f} ms copy what an update overwrites, so all else is {(own - copy) / bare:.2%}"
        yield Row(case, 1e3 * median(found["seconds"][side]), bare, "bare", "ms", 2, 1, note)
    later, once = (1e3 * median(found["save"][side]) for side in ("guarded", "at once"))
    yield Row(PAUSE, later, once, "at once", "ms", 2, 1, "what the first rank's training stops for")


def work(task: dict) -> None:
    """One rank of the job; rank 0 tells."""
    import numpy as np
    from mpi4py import MPI

    import nn
    from collectives import Communicator
    from nn.training.checkpoint_callback import KeepCheckpoints, Termination
    from parallel import DistributedDataParallel
    from parallel.elastic.heartbeat import Heartbeat
    from parallel.elastic.partner_checkpoints import PartnerCheckpoints
    from parallel.elastic.policy import Policy
    from parallel.elastic.recovery_points import StepTracker
    from parallel.elastic.sample_log import SampleLog

    steps, rounds = task["steps"], task["rounds"]
    world, batches = MPI.COMM_WORLD, make_batches(CASE)
    total = world.size * CASE.batch
    found = {
        "steps": steps,
        "seconds": {"bare": [], "guarded": [], "elastic": [], "at once": []},
        "own": {"guarded": [], "elastic": []},
        "copying": [],
        "save": {"guarded": [], "at once": []},
    }
    directory = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    sides, policy, ledger, copying = {}, Policy(), SampleLog(Path(directory) / "ledger", world.rank), [0.0]
    ledger.begin_generation(0, (0, 0))
    for side in found["seconds"]:
        communicator = Communicator(world, watch=0 if side == "bare" else WATCH)
        parts = network_of(CASE), nn.CrossEntropyLoss(), nn.SGD(0.01, 0.9), communicator
        many = DistributedDataParallel(*parts, survives=side == "elastic")
        training, hooks = nn.Training(many, batches, 1), []
        if side != "bare":
            kept = nn.Checkpoints(Path(directory) / side)
            hooks = [KeepCheckpoints(kept, steps, None, side != "at once", Termination())]
        if side == "elastic":
            hooks.append(StepTracker(PartnerCheckpoints(policy.buddy)))
            shadow = many.sync.undo_log
            shadow.keep = timed(shadow.keep, copying)
        for hook in hooks:
            hook.on_begin(training)
        sides[side] = many, training, hooks
    beats = Path(directory) / "beats"
    order = np.random.default_rng(0)  # the same on all ranks
    for number in range(rounds + 1):
        for side in order.permutation(list(sides)).tolist():
            many, training, hooks = sides[side]
            elastic, copying[0] = side == "elastic", 0.0
            heart = Heartbeat(beats, world.rank, policy.heartbeat, policy.loop, True, lambda many=many: many.steps)
            if elastic:
                heart.start()
            quiet_barrier(world)
            began, own, saving = time.perf_counter(), 0.0, 0.0
            for i in range(steps):
                start = time.perf_counter()
                if elastic:
                    ledger.log_slice(0, many.steps, i, i + 1)
                own += time.perf_counter() - start
                loss = many.step(*batches[i % len(batches)], total)
                start = time.perf_counter()
                for hook in hooks:
                    hook.on_step(training, loss)
                spent = time.perf_counter() - start
                own, saving = own + spent, max(saving, spent)
            taken = (time.perf_counter() - began) / steps
            if hooks:
                hooks[0].finish()
            quiet_barrier(world)
            if elastic:
                heart.stop()
            if number:  # the first round warms up
                found["seconds"][side].append(max(world.allgather(taken)))
            if number and side in found["save"]:
                found["save"][side].append(saving)
            if number and side in found["own"]:
                found["own"][side].append((own + copying[0]) / steps)
            if number and elastic:
                found["copying"].append(copying[0] / steps)
    for many, _, hooks in sides.values():
        for keeper in hooks[:1]:
            keeper.termination.stop()
        many.close()
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(directory)
        print(json.dumps(found), flush=True)


def timed(function, seconds: list[float]):
    """A function whose time is added up."""

    def add(*args):
        start = time.perf_counter()
        function(*args)
        seconds[0] += time.perf_counter() - start

    return add


def recover() -> float:
    """Seconds from the death of a rank to the first new checkpoint of the run that goes on."""
    from nn.training.checkpoints import CheckpointError, Checkpoints

    name = os.urandom(8).hex()
    scripts = Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        train = [sys.executable, scripts / "train.py", *RUN, "--ranks", "2", "--out", directory]
        command = [sys.executable, scripts / "supervise.py", "--pause", "0", "--", *train]
        with open(Path(directory) / "said", "wb") as log:
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {MARK: name}
            )

        def last() -> int:
            try:
                files = [entry["file"] for entry in Checkpoints(Path(directory) / "checkpoints").entries()]
            except CheckpointError:
                return 0
            return max((int(step) for file in files for step in re.findall(r"step-(\d+)", file)), default=0)

        def until(what) -> None:
            end = time.monotonic() + LONGEST
            while not what():
                if process.poll() is not None or time.monotonic() > end:
                    said = (Path(directory) / "said").read_text(errors="replace")
                    raise RuntimeError(f"supervise: it did not come as far: {said[-500:]}")
                time.sleep(0.01)

        try:
            until(lambda: last() > 0)
            ranks = processes.find(name, only_ranks=True, variable=MARK)
            processes.send(ranks[-1:], signal.SIGKILL)
            killed = time.monotonic()
            until(lambda: not set(ranks) & set(processes.find(name, only_ranks=True, variable=MARK)))
            before = last()  # of the run that has died
            until(lambda: last() > before)
            return time.monotonic() - killed
        finally:
            processes.kill(name, MARK)
            process.wait()


if __name__ == "__main__":
    work(json.loads(arguments(__doc__)[0]))
