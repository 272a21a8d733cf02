"""The processes of a launched job: found by its name, ended without exception, even when the launcher is killed.

Every process of a job carries the job's name in its environment, whoever started it, so that it is found in /proc.
(Sessions and process groups do not do: both Open MPI and MPICH give every rank its own.) Without /proc, that is
elsewhere than on Linux, nothing is found, and it is left to mpiexec to end its ranks.

Run as a program this file is the keeper of one job: it holds the end of a pipe from the launcher. When the launcher
dies, of whatever cause, the pipe ends, and the keeper ends the job. (A parent-death signal to mpiexec does not do:
MPICH's then waits for ranks that ignore SIGTERM.)
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

JOB = "RINGPROP_JOB"  # in the environment of every process of a job: its name
RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")  # Open MPI, PMIx, MPICH and Intel MPI, Cray
GRACE = 3.0  # seconds between SIGTERM and SIGKILL


def find(job: str, only_ranks: bool = False) -> list[int]:
    """Ids of the running processes of a job: mpiexec, its helpers, the ranks and their children."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = entry.read_bytes().decode(errors="replace").split("\0")  # of a zombie: empty
        except OSError:  # gone, or another user's
            continue
        if f"{JOB}={job}" in environment and (not only_ranks or any(v.startswith(RANK) for v in environment)):
            found.append(int(entry.parent.name))
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to those that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(job: str) -> None:
    """SIGKILL to every process of a job, until none is left."""
    end = time.monotonic() + GRACE
    while (left := find(job)) and time.monotonic() < end:
        send(left, signal.SIGKILL)
        time.sleep(0.01)


def start_keeper(job: str) -> subprocess.Popen:
    """A process that ends the job when this one dies."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, job],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_keeper(keeper: subprocess.Popen) -> None:
    """It is no longer needed: the job has ended."""
    keeper.kill()
    keeper.wait()
    keeper.stdin.close()


def keep(job: str) -> None:
    """The keeper: wait for the launcher's end, then end the job."""
    sys.stdin.read()
    send(find(job), signal.SIGTERM)
    end = time.monotonic() + GRACE
    while find(job) and time.monotonic() < end:
        time.sleep(0.05)
    kill(job)


if __name__ == "__main__":
    keep(sys.argv[1])
