"""The processes of a launched job: found by its name, ended without exception, even when the launcher is killed.

Every process of a job carries the job's name in its environment, whoever started it, so that it is found in /proc.
(Sessions and process groups do not do: both Open MPI and MPICH give every rank its own.) Without /proc, that is
elsewhere than on Linux, nothing is found, and it is left to mpiexec to end its ranks.

What the MPI library keeps in /dev/shm lies in a directory of the job's own, which goes with the job. Where nobody was
left to remove it, the next launcher does.

Run as a program this file is the reaper of one job: it holds the end of a pipe from the launcher. When the launcher
dies, of whatever cause, the pipe ends, and the reaper ends the job. (A parent-death signal to mpiexec does not do:
MPICH's then waits for ranks that ignore SIGTERM.)
"""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

JOB = "RINGPROP_JOB"  # in the environment of every process of a job: its name
RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")  # Open MPI, PMIx, MPICH and Intel MPI, Cray
MEMORY, DIRECTORY = Path("/dev/shm"), "ringprop."  # where a job's memory files are, below DIRECTORY and its name
GRACE = 3.0  # seconds between SIGTERM and SIGKILL
STARTING = 1.0  # seconds in which a process that was just begun has got the job's name


def find(job: str, only_ranks: bool = False, variable: str = JOB) -> list[int]:
    """Return the ids of the running processes of a job: mpiexec, its helpers, the ranks and their children.

    They have its name in the environment, as the value of `variable`.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        environment = environment_of(entry.name)
        if f"{variable}={job}" in environment and (not only_ranks or any(v.startswith(RANK) for v in environment)):
            found.append(int(entry.name))
    return found


def numbers(ranks: Iterable[int]) -> set[str]:
    """Return the ranks in MPI's world of a job's processes, as their launcher has set them."""
    return {v.partition("=")[2] for pid in ranks for v in environment_of(pid) if v.startswith(RANK)}


def environment_of(pid: int | str) -> list[str]:
    """Return the environment of a process, NAME=VALUE; empty if it is gone, a zombie, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may have spaces: state, parent, ..., 19 its start.

    Raises
    ------
    OSError
        There is no such process, or no /proc.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def rank_above() -> int | None:
    """Return the rank of MPI, with the same variables, that has started this process, itself or by others; or None."""
    pid = os.getpid()
    with contextlib.suppress(OSError, IndexError):
        while True:
            pid = int(stat_fields(pid)[1])
            if not any(v.startswith(RANK) for v in environment_of(pid)):
                return None
            if "/libmpi" in Path(f"/proc/{pid}/maps").read_text():  # what starts a rank has none
                return pid
    return None


def stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP)."""
    try:
        return stat_fields(pid)[0] == "T"
    except OSError:  # gone
        return False


@contextlib.contextmanager
def error_pipes(pids: Iterable[int]) -> Iterator[list[int]]:
    """Yield descriptors that read, without waiting, the stderr of the processes that write into a pipe."""
    with contextlib.ExitStack() as stack:
        found = {}
        for path in (f"/proc/{pid}/fd/2" for pid in pids):
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO((about := os.stat(path)).st_mode) and about.st_ino not in found:
                    found[about.st_ino] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    stack.callback(os.close, found[about.st_ino])
        yield list(found.values())


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(job: str, variable: str = JOB) -> None:
    """Send SIGKILL to every process of a job, until none is left."""
    end = time.monotonic() + GRACE
    while (left := find(job, variable=variable)) and time.monotonic() < end:
        send(left, signal.SIGKILL)
        time.sleep(0.01)


def make_directory(job: str) -> tuple[Path, int] | None:
    """Make a directory for the MPI library's memory files of a job; return it, and a descriptor that locks it.

    It belongs to the job while the lock is held, or a process of the job runs. None if there is no /dev/shm.
    """
    path = MEMORY / f"{DIRECTORY}{job}"
    try:
        return path, make_locked(path)
    except OSError:
        return None


def make_locked(path: Path) -> int:
    """Make a directory, which `sweep` leaves alone as long as the descriptor that this returns is open."""
    new = path.with_name(f".{path.name}")
    new.mkdir(mode=0o700)
    lock = os.open(new, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(path)  # it has its name when it is locked: nobody takes it for a dead job's
    return lock


def sweep(where: Path | None = None, prefix: str = DIRECTORY) -> None:
    """Remove this user's directories of `make_locked` of which nothing runs: whoever made them was killed.

    Their names are `prefix` and that of a job; `where` is MEMORY unless given.
    """
    for path in (where or MEMORY).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or just gone
            # Anybody may put anything there: opening a FIFO would wait for ever.
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid() and not find(path.name.removeprefix(prefix)):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def start_reaper(
    job: str, directory: Path | None = None, lock: int | None = None, variable: str = JOB
) -> subprocess.Popen:
    """Start a process that ends the job when this one dies, and removes its directory; `variable` as in `find`."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, job, variable, *([str(directory)] if directory else [])],
        pass_fds=() if lock is None else (lock,),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_reaper(reaper: subprocess.Popen) -> None:
    """End it: the job has ended."""
    reaper.kill()
    reaper.wait()
    reaper.stdin.close()


@contextlib.contextmanager
def signals_later():
    """Delay Ctrl-C, SIGTERM and SIGHUP to the end of this block."""
    come, handlers = [], {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handlers[number] = signal.signal(number, lambda number, frame: come.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in come:
            signal.raise_signal(number)


@contextlib.contextmanager
def meanwhile(look: Callable[[threading.Event], object], name: str) -> Iterator[None]:
    """Run `look(over)` in a thread during this block; at its end set `over`, and wait for the thread."""
    over = threading.Event()
    thread = threading.Thread(target=look, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def reap(job: str, variable: str = JOB, directory: str | None = None) -> None:
    """Wait for the launcher's end, then end the job: what the reaper does.

    A launcher that is killed while it starts mpiexec leaves a process that has not got the job's name yet.
    """
    sys.stdin.read()
    begin, signalled = time.monotonic(), set()
    while (passed := time.monotonic() - begin) < GRACE:
        found = set(find(job, variable=variable))
        if not found and passed > STARTING:
            break
        send(found - signalled, signal.SIGTERM)
        signalled |= found
        time.sleep(0.05)
    kill(job, variable)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    reap(*sys.argv[1:])
