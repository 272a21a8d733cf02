"""One run, one directory: a file `lock` there names the process that trains, and another one is refused.

Rank 0 holds it. The system's lock on the file (flock, which most network file systems pass on to their server) ends
with its process, however that dies. Where there are no such locks, or only among the processes of one host, the file
tells: its holder touches it every second, and a process of the same machine can be looked at. So the lock of a process
that has died is taken over: at once on the same machine, otherwise after `LEASE` seconds in which nobody touched it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from parallel.launch.processes import stat_fields

LEASE, TOUCH = 20.0, 1.0  # seconds without a touch after which its holder counts as dead; between two touches
NAME, LARGEST = "lock", 1000  # bytes of the file


class RunHeld(RuntimeError):
    """Another process trains in this directory, or its lock cannot be written; the message says which."""


def this_process() -> dict:
    """What a lock says of its holder."""
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "machine": line_of("/proc/sys/kernel/random/boot_id"),
        "born": _born(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


class RunLock:
    """The lock of a run's directory, for one process.

    Parameters
    ----------
    lease : float
        Seconds to wait for a sign of life of a holder on another machine.
    """

    def __init__(self, lease: float = LEASE):
        self.lease, self.path, self.file, self.own = lease, Path(), None, ""
        self.made_directory = False
        self.directory: str | None = None  # of the run that asked for it, on ranks that do not hold it too
        self.released = threading.Event()

    def hold(self, directory: Path, known: str = "") -> str:
        """Hold the lock of a directory, which is made; return what the file says from now on.

        Parameters
        ----------
        known : str
            What the file said of a rank of this same run, which has died since: it is not waited for.

        Raises
        ------
        RunHeld
            Another process has it, it is another program's file, or it cannot be written.
        """
        if self.file is not None:
            return self.own
        self.path = directory / NAME
        try:
            return self._hold(known)
        except OSError as error:
            why = error.strerror or error
            raise RunHeld(f"{self.path}, which keeps other runs away, cannot be written ({why})") from error

    def _hold(self, known: str) -> str:
        self.made_directory = not self.path.parent.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file, locked = self._open()
        try:
            there = _content(file)
            if there.strip("\0") and not there.startswith("{"):  # torn ones of ours are empty, zeros, or begin so
                raise RunHeld(f"{self.path} is the file of another program: train in another directory")
            if there and there != known:
                self._refuse_living(locked, there)
            self._write(file, json.dumps(this_process()))
        except BaseException:
            os.close(file)
            raise
        self.file, self.released = file, threading.Event()
        threading.Thread(target=self._touch, args=(file, self.released), name="run-lock", daemon=True).start()
        return self.own

    def _write(self, file: int, own: str) -> None:
        """Let the file name this process; where the disk is full, it goes."""
        self.own = own
        try:
            os.ftruncate(file, 0)
            if (written := os.pwrite(file, own.encode(), 0)) < len(own):
                raise OSError(errno.ENOSPC, f"No space left on device: {written} of {len(own)} bytes")
            os.fsync(file)
        except OSError:
            self._remove()
            raise

    def release(self) -> None:
        """Release the lock, if it is held, and remove its file; also a directory that it made and nobody has used."""
        if self.file is None:
            return
        self.released.set()
        with contextlib.suppress(OSError):
            if _content(self.file) == self.own and os.path.samestat(os.fstat(self.file), os.stat(self.path)):
                self._remove()
        os.close(self.file)
        self.file = None

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
            if self.made_directory:
                self.path.parent.rmdir()  # fails where the run has left something

    def _open(self) -> tuple[int, bool]:
        """The file, opened, and whether the system has locked it for this process."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            locked = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                content = _content(file)
                os.close(file)
                raise RunHeld(refusal(self.path.parent, content)) from None
            except OSError:  # this disk has no locks
                locked = False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(self.path)):
                    return file, locked
            os.close(file)  # its holder has just removed it

    def _refuse_living(self, locked: bool, there: str) -> None:
        """Raise RunHeld if the process that the file names lives."""
        holder = _parsed(there)
        if holder.get("machine") and holder["machine"] == this_process()["machine"]:
            if not locked and holder.get("born") and _born(holder.get("process")) == holder["born"]:
                raise RunHeld(refusal(self.path.parent, there))
            return  # it would hold the system's lock
        touched, end = os.stat(self.path).st_mtime_ns, time.monotonic() + self.lease
        while time.monotonic() < end:  # a holder on another machine shows that it lives
            content = _fresh(self.path)
            if content != there or os.stat(self.path).st_mtime_ns != touched:
                raise RunHeld(refusal(self.path.parent, content or there))
            time.sleep(min(0.2, self.lease))

    def _touch(self, file: int, released: threading.Event) -> None:
        """Show that this process lives; end it where another one took it for dead: two would write."""
        while not released.wait(TOUCH):
            with contextlib.suppress(OSError):
                there = _fresh(self.path)
                if there is not None and there != self.own and not released.is_set():
                    sys.stderr.write(f"error: {refusal(self.path.parent, there)}; it took this process for dead\n")
                    sys.stderr.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                os.utime(file)


def refusal(directory: Path, content: str) -> str:
    """Why a directory cannot be trained in, in a sentence."""
    holder = _parsed(content)
    who = f"process {holder.get('process', '?')!s:.20} on {holder.get('host', '?')!s:.80}"
    since = f" since {holder['since']!s:.40}" if "since" in holder else ""
    return f"{directory} is being trained by {who}{since}: wait until it has ended, or end it"


def _parsed(content: str) -> dict:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(file: int) -> str:
    return os.pread(file, LARGEST, 0).decode(errors="replace")


def _fresh(path: Path) -> str | None:
    """The content as a new opening of the file has it, as network disks only then look; None where it is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return _content(file)
    finally:
        os.close(file)


def line_of(path: str) -> str:
    """Return the first line of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _born(pid: object) -> str:
    """When a process of this machine was started, in the system's ticks; "" where there is none, or it has ended."""
    try:
        fields = stat_fields(pid) if isinstance(pid, int) else ["Z"]
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
