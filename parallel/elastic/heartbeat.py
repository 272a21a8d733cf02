"""Stall detection: find ranks that are stopped (SIGSTOP), or in an endless loop; MPI takes them for alive.

While it trains, a thread of each rank touches a file of its own some times a second, and looks at those of the others.
Whose file it finds untouched for too long is named; where it is on the same host it is killed, which is a death like
any other. A rank's own thread looks at its main thread, too: one that makes no step and is in no call for very long,
compared with what its steps took so far, is named with the line where it is, and killed. Time in which the thread
itself stood still does not count, nor does time in which its disk failed: the thread survives every OSError.

Files lie in the run's directory, as all ranks see it. Others may be able to write there, so no file is believed: only a
process that said by MPI that it is this member is killed. Cost: five system calls a tick and other rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from collectives.failures.awake import Awake
from collectives.progress import Calls, outside, where
from nn.reading import read_text
from nn.training.checkpoints import write_atomically
from parallel.launch.processes import stat_fields

TICKS = 10  # in the time that a rank may be silent
LONGEST = 400  # bytes of a file
SPEAKS = 1.0  # seconds that a rank may take to say why it kills itself
SLOWER = 10  # times the longest step so far: who takes that long is in a loop


def born(pid: int | str) -> str:
    """Return when a process of this host was started, in the system's ticks: its number may be another's later."""
    return stat_fields(pid)[19]


def identity() -> str:
    """Return host, number and start of this process, as in its file."""
    return f"{socket.gethostname()} {os.getpid()} {born('self')}"


class Stuck:
    """Detects that a main thread makes no step, and waits for no other rank.

    Parameters
    ----------
    limit : float
        Seconds that it may compute at least; 0 for ever.
    """

    def __init__(self, limit: float):
        self.limit, self.seen, self.since, self.longest = limit, None, 0.0, 0.0

    def look(self, now: float, progress: object, waits: bool) -> bool:
        """Return whether it is stuck, by its progress and the clock."""
        if progress != self.seen:
            if self.seen is not None:
                self.longest = max(self.longest, now - self.since)
            self.seen, self.since = progress, now
        elif waits:
            self.since = now
        return 0 < max(self.limit, SLOWER * self.longest) * bool(self.limit) < now - self.since


class Heartbeat:
    """The heartbeat thread of one rank, and its file.

    Parameters
    ----------
    directory : Path
    number : int
        Of this member.
    silent : float
        Seconds that a rank may be silent; 0 for ever, and there is no thread.
    loop : float
        Seconds that its main thread may compute at least; 0 for ever.
    kill : bool
        Whether silent ranks are killed, and not only named.
    steps : callable () -> int
        The number of steps that this rank has trained.
    peers : mapping of int to str
        Number of each member -> its `identity`, as it told all others by MPI. Files that say something else are
        ignored.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        silent: float,
        loop: float,
        kill: bool,
        steps: Callable[[], int],
        peers: Mapping[int, str],
    ):
        self.directory, self.number, self.silent, self.kill, self.steps = directory, number, silent, kill, steps
        self.peers = {str(peer): line for peer, line in peers.items()}
        self.identity = identity().encode()
        self.stuck, self.main = Stuck(loop), threading.get_ident()
        self.clock = Awake(2 * silent / TICKS)
        self.seen: dict[str, tuple[str, int, float]] = {}  # rank -> its file, when it was touched, when that was seen
        self.said: set[str] = set()  # ranks that were named
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread: this rank trains, and must not be silent from now on."""
        if self.silent:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.directory / str(self.number), self.identity)
            self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """Stop the thread: this rank trains no more, or starts again."""
        self.ended.set()
        if self.thread:
            self.thread.join(self.silent)  # its disk may hang
            with suppress(OSError):
                (self.directory / str(self.number)).unlink(missing_ok=True)

    def _run(self) -> None:
        while not self.ended.wait(self.silent / TICKS):
            self._look_at_main()
            try:
                self._touch()
                paths = sorted(self.directory.glob("[0-9]*"))
            except OSError:  # a network disk fails: the files of all ranks stay untouched meanwhile
                self.seen.clear()
                continue
            for path in paths:
                if path.name != str(self.number):
                    self.look_at(path)

    def _touch(self) -> None:
        """Touch this rank's file; write it again if another rank took this one for dead."""
        own = self.directory / str(self.number)
        try:
            os.utime(own)
        except FileNotFoundError:
            if self.directory.is_dir():  # else all have ended
                write_atomically(own, self.identity)

    def look_at(self, path: Path) -> None:
        """Kill another rank if it is silent; only name it if it is on another host, or to be waited for."""
        name = path.name
        try:
            touched, line = path.stat().st_mtime_ns, read_text(path, LONGEST)
        except (OSError, ValueError):  # it has ended, its disk fails, or somebody else has put something there
            self.seen.pop(name, None)
            return
        if self.peers.get(name) != line:  # forged, or left by another run: it must not name a process to kill
            return
        now = self.clock.now()
        if self.seen.get(name, ())[:2] != (line, touched):
            self.seen[name] = line, touched, now
            self.said.discard(name)
        silent = now - self.seen[name][2]
        if silent < self.silent:
            return
        host, pid, start = line.split()
        here = host == socket.gethostname()
        kills = self.kill and here
        try:
            if here and born(pid) != start:
                raise ProcessLookupError
            if kills:  # before anything is said: stderr may be a pipe that nobody reads
                os.kill(int(pid), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):  # it has died, or another rank has killed it: MPI tells of that
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return
        except OSError as error:
            kills, why = False, f" (it cannot be killed: {error.strerror})"
        else:
            why = ""
        if name not in self.said:
            self.said.add(name)
            done = "killed" if kills else "waited for"
            say(f"heartbeat: rank {name} (process {pid} on {host}) has been silent for {silent:.1f} s: {done}{why}")

    def _look_at_main(self) -> None:
        """Kill this rank, or name it, if its main thread is in an endless loop."""
        calls = [found for reference in tuple(Calls.instances) if (found := reference())]
        progress = self.steps(), sum(each.collectives + each.others for each in calls)
        if not self.stuck.look(self.clock.now(), progress, any(each.current for each in calls)):
            return
        if "loop" not in self.said:
            self.said.add("loop")
            place, seconds = where(outside(sys._current_frames().get(self.main))), self.clock.now() - self.stuck.since
            done = "killed" if self.kill else "waited for"
            line = (
                f"heartbeat: rank {self.number} has computed for {seconds:.1f} s at {place}, and made no step: {done}"
            )
            speaker = threading.Thread(target=say, args=(line,), daemon=True)
            speaker.start()
            speaker.join(SPEAKS)
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)


def say(line: str) -> None:
    """Write a whole line, so that lines of several ranks do not mix; nothing if stderr is closed."""
    with suppress(OSError, ValueError):  # ValueError: stderr is closed
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
