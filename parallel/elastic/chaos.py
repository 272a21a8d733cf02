"""Break runs at random moments, continue them, and compare the end with that of an undisturbed one.

A fault, one of FAULTS, is injected into a run at a moment drawn from the duration of an undisturbed one: after so many
epochs and a while, however fast the machine is by now. Afterwards the run is continued, until it succeeds; then its
parameters must have the bits of the undisturbed run, and no process and no temporary file of it may be left.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nn.training.checkpoints import Checkpoints, files_of
from parallel.elastic.supervisor import SUPERVISED, last_step, next_command
from parallel.launch import processes

FAULTS = {
    "kill a rank": "SIGKILL to one rank",
    "kill two ranks": "SIGKILL to two ranks at once",
    "kill the launcher": "SIGKILL to the process that the user has started",
    "stop a rank": "SIGSTOP to one rank, for good: --watch ends the run",
    "slow a rank": "SIGSTOP to one rank, and SIGCONT after a moment: the run goes on",
    "interrupt": "Ctrl-C",
    "terminate": "SIGTERM",
    "full disk": "no file of any rank may become larger than 4 KB any more",
    "damage": "SIGKILL, then a byte of the newest checkpoint is changed",
    "torn manifest": "SIGKILL, then a temporary file and half a checkpoint are left, as by a write that was cut short",
}
SURVIVED = ("kill a rank", "kill two ranks", "stop a rank", "slow a rank")  # by --elastic respawn, while it runs
END = 120.0  # seconds within which a run that was hit must have ended
WATCH = 8  # seconds: --watch, where the options have none, as its default is longer than END
LEFT = 30.0  # and all of its processes after it
LOOK = 0.01  # seconds between two looks how far it is
SMALL = 4096  # bytes that a file may have on a full disk
SAME = "parameters_sha256", "steps", "epochs"  # of result.json, whatever has happened


class Broken(AssertionError):
    """A run did not survive: the message says which faults were injected, and what is wrong."""


@dataclass
class Chaos:
    """Runs of one training command, into each of which faults are injected.

    Parameters
    ----------
    options : sequence of str
        Of scripts/train.py, without --out.
    directory : Path
        Where the runs are made.
    seed : int
    kinds : sequence of str
        Of FAULTS.
    program : sequence of str
        The program of these options: Python and scripts/train.py.
    say : callable (str)

    Attributes
    ----------
    ends, want : list of float, dict
        Of the undisturbed run: the seconds after which its epochs, and at last all of it, were done; the entries of its
        result that other runs must have, too.
    injected, missed : Counter
        Faults by kind: injected while the run was on, and too late.
    recovery : list of float
        Seconds from a fault until all processes of the run had ended.
    resumed : list of float
        Seconds from when ranks knew of a death until they trained again, if runs survive deaths.
    """

    options: Sequence[str]
    directory: Path
    seed: int = 0
    kinds: Sequence[str] = tuple(FAULTS)
    program: Sequence[str] = field(kw_only=True)
    say: Callable[[str], object] = lambda line: None
    injected: Counter = field(default_factory=Counter)
    missed: Counter = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.ends, self.want = [], {}
        self.directory = Path(self.directory)
        given = {word.split("=")[0] for word in self.options}
        self.survives = "--elastic" in given  # the death of a rank
        self.refills = self.survives and any("respawn" in word for word in self.options)  # for several faults
        for kind in self.kinds:
            if kind not in FAULTS:
                raise ValueError(f"fault {kind!r}: expected one of {', '.join(FAULTS)}")
        if self.survives and not self.refills and "--reproducible" not in given:
            raise ValueError(
                "runs are compared bit by bit, and fewer ranks add up in another order: with --elastic shrink give "
                "--reproducible N (meshes have none: let others come, --elastic respawn)"
            )
        if given & {"--out", "--resume"}:
            raise ValueError("leave out --out and --resume: every run has a directory of its own")
        if "--watch" not in given:
            self.options = [*self.options, "--watch", str(WATCH)]

    def undisturbed(self) -> None:
        """Make the run that all others are compared with, and measure how long it takes."""
        out, ends = self.directory / "undisturbed", []
        process = self.start(out)
        while process.poll() is None and (now := time.monotonic() - self.begun) < END:
            ends += [round(now, 2)] * (epochs_done(out) - len(ends))
            time.sleep(LOOK)
        status, said = self._finish(process, LOOK)
        if status:
            raise Broken(f"the undisturbed run ended with exit status {status}:\n{said}")
        found = result(out)
        self.ends = [*ends, round(time.monotonic() - self.begun, 2)]
        self.want = {key: found[key] for key in SAME}
        shutil.rmtree(out)

    def run(self, number: int, faults: int) -> None:
        """Make one run with at most this many faults, drawn by the seed and its number.

        Raises
        ------
        Broken
        """
        self.rng = np.random.default_rng((self.seed, number))
        out, log = self.directory / f"run{number}", []
        while not (out / "result.json").exists():
            kinds = []
            while len(log) < faults and (not kinds or (self.refills and kinds[-1] in SURVIVED)):
                kinds.append(str(self.rng.choice(list(self.kinds))))
                log.append(kinds[-1])
            begun = len(log)
            self._try(out, kinds, log)
            if len(log) > 10 * faults + 10 or (not kinds and begun == len(log) and not (out / "result.json").exists()):
                raise Broken(f"{out}: it never ends ({', '.join(log)})")
        found = result(out)
        for key in SAME:
            if found[key] != self.want[key]:
                raise Broken(f"{out}: {key} is {found[key]}, undisturbed {self.want[key]} ({', '.join(log)})")
        self.resumed += found.get("elastic", {}).get("recovery_seconds", [])
        if left := [str(path) for path in out.rglob("*.tmp")]:
            raise Broken(f"{out}: {', '.join(left)} left behind ({', '.join(log)})")
        shutil.rmtree(out)

    def _try(self, out: Path, kinds: list[str], log: list[str]) -> None:
        """Start or continue a run, and inject faults; return when all of it has ended."""
        begun = last_step(out) >= 0
        process = self.start(out)
        if not kinds:
            status, said = self._finish(process, END)
            if status:
                raise Broken(f"{out}: continued after {', '.join(log) or 'nothing'}, it ended with {status}:\n{said}")
            return
        affected, moments = set(), []
        for kind, moment in zip(kinds, self.draw_moments(out, len(kinds)), strict=True):
            if moments and process.poll() is not None:  # the others are for when it is continued
                del log[len(log) - len(kinds) + len(moments) :]
                break
            moments.append(moment)
            self._wait_until(process, out, *moment)
            if process.poll() is None:
                self.injected[kind] += 1
            else:
                self.missed[kind] += 1
            hit = time.monotonic()
            affected |= self.inject(kind, process)
        kinds = kinds[: len(moments)]
        status, said = self._finish(process, END)
        self.recovery.append(time.monotonic() - hit)
        faults = zip(kinds, moments, strict=True)
        injected = ", ".join(f"{kind} {seconds:.2f} s after epoch {epochs}" for kind, (epochs, seconds) in faults)
        self.say(f"{out.name}: {injected}: exit status {status}, step {last_step(out)}")
        if self.survives and set(kinds) <= set(SURVIVED) and process.pid not in affected and status:
            raise Broken(f"{out}: {injected}: the others should have gone on, and ended with {status}:\n{said}")
        if begun and last_step(out) < 0:
            raise Broken(f"{out}: {injected}: no checkpoint is left of those that there were")
        ours = re.search(r'File ".*/(scripts|parallel|nn|collectives)/', said)  # not Python's, before it came to us
        if "Traceback" in said and ours and kinds[-1] in ("interrupt", "terminate", "full disk"):
            raise Broken(f"{out}: {injected}: a traceback:\n{said}")
        if kinds[-1] in ("damage", "torn manifest") and not (out / "result.json").exists():
            self.damage(kinds[-1], out)

    def draw_moments(self, out: Path, number: int) -> list[tuple[int, float]]:
        """Return moments of a run that is started or continued, in order: epochs, seconds since then."""
        *ends, whole = self.ends
        done = min(epochs_done(out), len(ends))
        past = ends[done - 1] - ends[0] if done else 0.0  # of what is not done again
        moments = []
        for moment in sorted(self.rng.uniform(0, whole - past, number)):
            epochs = bisect_right(ends, moment + past)
            moments.append((epochs, moment + past - ends[epochs - 1]) if epochs > done else (0, moment))
        return moments

    def _wait_until(self, process: subprocess.Popen, out: Path, epochs: int, seconds: float) -> None:
        """Return when a run is at that moment, or has ended; without epochs seconds count from its start."""
        end = time.monotonic() + END
        while epochs_done(out) < epochs and process.poll() is None and time.monotonic() < end:
            time.sleep(LOOK)
        since = time.monotonic() if epochs else self.begun
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, since + seconds - time.monotonic()))

    def start(self, out: Path) -> subprocess.Popen:
        self.name, self.begun = os.urandom(8).hex(), time.monotonic()
        command = next_command([*self.program, *self.options, "--out", str(out)], out)
        self.said = out.with_name(f"{out.name}.log")
        self.said.parent.mkdir(parents=True, exist_ok=True)
        with open(self.said, "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {SUPERVISED: self.name},
            )

    def inject(self, kind: str, process: subprocess.Popen) -> set[int]:
        """Inject a fault into a run; return the processes that were drawn."""
        ranks = processes.find(self.name, only_ranks=True, variable=SUPERVISED) or [process.pid]
        drawn = [int(each) for each in self.rng.permutation(ranks)]
        one = drawn[0]
        match kind:
            case "kill a rank" | "damage" | "torn manifest":
                processes.send([one], signal.SIGKILL)
            case "kill two ranks":
                processes.send(drawn[:2], signal.SIGKILL)
            case "kill the launcher":
                processes.send([process.pid], signal.SIGKILL)
            case "stop a rank" if one != process.pid:  # one process, or a launcher, nobody would miss
                processes.send([one], signal.SIGSTOP)
            case "slow a rank":
                processes.send([one], signal.SIGSTOP)
                time.sleep(self.rng.uniform(0, 0.3))
                processes.send([one], signal.SIGCONT)
            case "full disk":  # not from the start, where MPI makes larger files of its own
                for each in drawn:
                    with suppress(ProcessLookupError):
                        resource.prlimit(each, resource.RLIMIT_FSIZE, (SMALL, SMALL))
            case "interrupt":
                processes.send([process.pid], signal.SIGINT)
            case "terminate":
                processes.send([process.pid], signal.SIGTERM)
        return set(drawn[:2])

    def damage(self, kind: str, out: Path) -> None:
        """Damage the newest checkpoint, as a bad disk does, or a write that was cut short."""
        directory = out / "checkpoints"
        entries = [entry for entry in Checkpoints(directory).entries() if not entry["named"]]
        if not entries:
            return
        file = directory / files_of(entries[-1])[-1][0]
        content = bytearray(file.read_bytes())
        if kind == "torn manifest":
            (directory / ".manifest.json.1.tmp").write_bytes(b'{"format": 1, "chec')
            (directory / "step-99999999.npz").write_bytes(content[: len(content) // 2])
        elif len(entries) > 1:  # the one before it takes its place
            content[int(self.rng.integers(len(content)))] ^= 1 << int(self.rng.integers(8))
            file.write_bytes(content)

    def _finish(self, process: subprocess.Popen, seconds: float) -> tuple[int, str]:
        """Return (exit status, output) of a run, of which no process is left."""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            processes.kill(self.name, SUPERVISED)
            process.wait()
            raise Broken(f"it did not end within {seconds:g} s:\n{self.said.read_text(errors='replace')}") from None
        end = time.monotonic() + LEFT
        while (left := processes.find(self.name, variable=SUPERVISED)) and time.monotonic() < end:
            time.sleep(0.02)
        if left:
            processes.kill(self.name, SUPERVISED)
            raise Broken(f"processes {left} are left")
        return status, self.said.read_text(errors="replace")


def result(out: Path) -> dict:
    """Read result.json of a run."""
    return json.loads((out / "result.json").read_text())


def epochs_done(out: Path) -> int:
    """Return how many epochs a run has written."""
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0
