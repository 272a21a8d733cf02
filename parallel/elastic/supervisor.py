"""Restart a training run from its last complete checkpoint whenever it ends too early.

For MPI libraries that end a whole job with one of its ranks, which most do: the job is lost, the run is not. A restart
needs no more than the run's directory: a checkpoint is whole or it is not there, and a run that is continued makes the
steps that it would have made. What would end again in the same way is not started for ever: a wrong option never, and
anything else only a number of times without a new checkpoint between, with longer and longer pauses.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nn.training.checkpoints import CheckpointError, Checkpoints
from parallel.elastic.policy import Policy
from parallel.launch import launcher, processes
from parallel.launch.launcher import LOST

SUPERVISED = "RINGPROP_SUPERVISED"  # in the environment of all that a supervisor has started
WRONG_OPTION = 2  # exit status of a program that was called in a wrong way
LONGEST = 60.0  # seconds between two restarts at most
LOOK = 0.05  # seconds between two looks at what runs
RESTARTS = 3  # of ranks on this machine that have all ended, without a step in between
GRACE = 30.0  # seconds that a run has to save and end, when it is asked to


def value_of(command: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag in a command: the last one counts, as for argparse, and --no-out takes it back."""
    value, words = None, iter(command)
    for word in words:
        if word == flag:
            value = next(words, None)
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        elif word == f"--no-{flag[2:]}":
            value = None
    return value


def directory_of(command: Sequence[str]) -> Path | None:
    """Return the directory of the run that a command makes: what follows --out, else --resume."""
    value = value_of(command, "--out") or value_of(command, "--resume")
    return Path(os.path.expanduser(value)) if value else None  # as the run reads it


def last_step(directory: Path) -> int:
    """Return the step of the last checkpoint of a run; -1 if there is none, or none that can be read."""
    try:
        steps = [entry["file"] for entry in Checkpoints(directory / "checkpoints").entries() if not entry["named"]]
    except CheckpointError:
        return -1
    return int(Path(steps[-1]).stem.removeprefix("step-")) if steps else -1


def next_command(command: Sequence[str], directory: Path) -> list[str]:
    """Return the command that begins the run, or continues it where a checkpoint was saved.

    mpirun may start several programs, with a colon between them: each that names a directory is continued.
    """
    if last_step(directory) < 0:
        return list(command)
    continued: list[str] = []
    for i, program in enumerate(programs(command)):
        resumes = directory_of(program) is None or value_of(program, "--resume") is not None
        continued += [*([":"] * (i > 0)), *program, *([] if resumes else ["--resume", str(directory)])]
    return continued


def run_with_restarts(
    command: Sequence[str],
    ranks: int,
    policy: Policy,
    directory: Path,
    out: Callable[[str], object],
    patience: float,
) -> int:
    """Run ranks on this machine that survive others, and start them again where all have gone or hung.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments, as for `launcher.run`.
    ranks : int
    policy : Policy
        Of --elastic.
    directory : Path
        Of the run, from whose last checkpoint they go on.
    out : callable
        Receives their lines.
    patience : float
        Seconds that they have to save and end when they are asked to.

    Returns
    -------
    int
        The exit status of the last ones, after at most RESTARTS restarts without a step in between.
    """
    silent = policy.heartbeat if policy.silent == "kill" else 0.0
    more = {"stdout": out, "patience": patience, "survive": True, "silent": silent}
    status, left, saved = launcher.run(command, ranks, **more), RESTARTS, last_step(directory)
    reasons = {
        launcher.NOT_BEGUN: "as before MPI has started none survives another",
        launcher.LOST: "or MPI has failed",
        launcher.HUNG: "as some waited too long for others",
    }
    while (reason := reasons.get(status)) and left:
        left = RESTARTS if last_step(directory) > saved else left - 1
        saved = last_step(directory)
        print(f"all ranks have ended, {reason}: started again", flush=True)
        status = launcher.run(next_command(command, directory), ranks, **more)
    return status


def programs(command: Sequence[str]) -> list[list[str]]:
    """Return the parts of a command between colons."""
    found: list[list[str]] = [[]]
    for word in command:
        if word == ":":
            found.append([])
        else:
            found[-1].append(word)
    return found


class Supervisor:
    """Runs a command until it has ended well; what runs ends with the process that supervises it.

    Parameters
    ----------
    command : sequence of str
        Such as ["mpirun", "-n", "4", "python", "-m", "mpi4py", "scripts/train.py", ..., "--out", "runs/mine"].
    restarts : int
        How often at most, since the last new checkpoint.
    pause : float
        Seconds before the first restart; twice as long before each one after it, until there is a new checkpoint.
    say : callable (str)
        Told what happens.
    options : dict
        Passed on to subprocess.Popen.

    Raises
    ------
    ValueError
        The command names no directory.
    """

    def __init__(
        self,
        command: Sequence[str],
        restarts: int = 10,
        pause: float = 1.0,
        say: Callable[[str], object] = print,
        **options,
    ):
        self.directory = directory_of(command)
        if self.directory is None:
            raise ValueError("the command names no directory to continue from: add --out DIR to its options")
        if restarts < 0 or not 0 <= pause < math.inf:
            raise ValueError(f"restarts and pause must be at least 0, and finite, given {restarts} and {pause}")
        self.command, self.restarts, self.pause, self.say, self.options = list(command), restarts, pause, say, options
        self.name = os.urandom(8).hex()
        self.process: subprocess.Popen | None = None
        self.asked = 0  # the signal that asks for the end

    def run(self) -> int:
        """Return the exit status of the last try, or 128 plus the number of a signal that ended the supervisor."""
        failed, pause = 0, self.pause
        with self._signals(), self._kept():
            while True:
                before, done = last_step(self.directory), self._result()
                status = self._once(next_command(self.command, self.directory))
                options = self.directory / "config.json"  # of scripts/train.py, which leaves a result; others need not
                if status == 0 and options.exists() and last_step(self.directory) >= 0 and self._result() == done:
                    status = LOST  # mpirun ends with 0 where a host was lost
                if self.asked or status in (0, WRONG_OPTION):
                    return 128 + self.asked if self.asked else status
                if (step := last_step(self.directory)) > before:
                    failed, pause = 0, self.pause
                failed += 1
                if failed > self.restarts:
                    self.say(f"supervise: {ended(status)}; no new checkpoint in {failed} tries: given up")
                    return status
                since = f"from step {step}" if step >= 0 else "from the beginning (nothing was saved yet)"
                self.say(f"supervise: {ended(status)}; restart {failed} of {self.restarts} in {pause:g} s, {since}")
                self._sleep(pause)
                if self.asked:
                    return 128 + self.asked
                pause = min(2 * pause, LONGEST)

    def _result(self) -> int:
        """Return when the run has written its result; 0 if it has not."""
        path = self.directory / "result.json"
        return path.stat().st_mtime_ns if path.exists() else 0

    def _once(self, command: list[str]) -> int:
        """Run the command to its end, and end what it leaves behind."""
        try:
            with processes.signals_later():  # until there is a process to tell
                self.process = subprocess.Popen(command, env=os.environ | {SUPERVISED: self.name}, **self.options)
        except OSError as error:
            self.say(f"supervise: {command[0]} cannot be started ({error.strerror})")
            return WRONG_OPTION
        end = math.inf
        while (status := self.process.poll()) is None:
            if self.asked:
                end = min(end, time.monotonic() + GRACE)
            if time.monotonic() > end:
                self.process.kill()
            time.sleep(LOOK)
        processes.kill(self.name, SUPERVISED)
        return 128 - status if status < 0 else status

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK))

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """End the processes of this block if this process is killed: another one may be about to continue the run."""
        reaper = processes.start_reaper(self.name, variable=SUPERVISED)
        try:
            yield
        finally:
            processes.end_reaper(reaper)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass SIGINT and SIGTERM to the run, which saves and ends; start nothing after it.

        SIGHUP, of a terminal that is closed, does as SIGTERM, unless it is ignored (nohup).
        """

        def ask(number, frame):
            self.asked = number
            forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            ranks = (
                processes.find(self.name, only_ranks=True, variable=SUPERVISED) if forwarded == signal.SIGTERM else []
            )
            if ranks:  # a signalled mpirun would kill them a second later
                processes.send(ranks, forwarded)
            elif self.process and self.process.poll() is None:
                self.process.send_signal(forwarded)

        heeded = [signal.SIGINT, signal.SIGTERM]
        heeded += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
        handlers = {number: signal.signal(number, ask) for number in heeded}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def ended(status: int) -> str:
    """Return how a run has ended, in words."""
    if status == LOST:
        return "the run ended without a result"
    if status > 128:
        try:
            return f"the run ended by {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return f"the run ended with exit status {status}"
