"""Run as a program, this starts one rank of a job, and leaves a file for the launcher (parallel/launch/launcher.py).

    python -I -S start_rank.py mark DIRECTORY COMMAND...
    python -I -S start_rank.py wait FILE COMMAND...

mark  leaves an empty file of the rank's number, and becomes the rank: of a job whose ranks survive others, who has a
      file, and no process, has died
wait  waits for the rank, deaf to signals that are meant for it, and ends as it does; of the first one that fails FILE
      has number and exit status. The mpiexec of MPICH and Intel MPI gives another: 9 or 255 for one that was killed

No shell does it: that drops environment variables whose names are no identifiers.
"""

import contextlib
import os
import signal
import sys

HEARD = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM")


def leave(path: str, text: str = "") -> None:
    """Write a file, unless it is there or cannot be written."""
    with contextlib.suppress(OSError), open(path, "x") as file:
        file.write(text)


def wait_for(path: str, command: list[str]) -> int:
    """Run the rank; return its exit status, as a shell gives it."""
    for name in HEARD:
        signal.signal(getattr(signal, name), lambda number, frame: None)  # not ignored: that the rank would inherit
    pid = os.posix_spawn(command[0], command, os.environ)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 128 - status if status < 0 else status
    if status:
        leave(path, f"{os.environ['PMI_RANK']} {status}\n")
    return status


def main(action: str, path: str, *command: str) -> int:
    """Do what the docstring above says."""
    if action == "wait":
        return wait_for(path, list(command))
    leave(os.path.join(path, os.environ["OMPI_COMM_WORLD_RANK"]))
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
