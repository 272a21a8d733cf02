"""The door of scripts/train.py: options, ranks, threads, and one clear message where something fails.

What is heavy (NumPy, MPI) is imported only once the number of threads is set, and never for --help.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from parallel import launch
from parallel.options import Options, parse

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    if not launch.inside():
        options.out = options.out or default_directory(options)
        if options.ranks and options.ranks > 1:
            return start_ranks(options, argv)
    set_threads(options.threads or max(1, launch.cores() // local_ranks()))
    if launch.inside():
        from collectives import check_world, install_excepthooks

        install_excepthooks()
        check_world()
    try:
        from parallel.run import train

        train(options)
        return 0
    except KeyboardInterrupt:
        if launch.inside():
            raise  # the excepthook ends all ranks
        print(f"\ninterrupted; to continue: {continue_with(options)}", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, TypeError, ArithmeticError, RuntimeError, OSError) as error:
        return fail(error)


def start_ranks(options: Options, argv: list[str]) -> int:
    """Start --ranks ranks of this program on this machine, and end with their exit status."""
    inner = [sys.argv[0], *argv, *([] if options.resume else ["--out", options.out])]
    try:
        status = launch.run(inner, options.ranks)
    except launch.LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status in (INTERRUPTED, 143):
        print(f"\ninterrupted, all ranks ended; to continue: {continue_with(options)}", file=sys.stderr)
    return status


def continue_with(options: Options) -> str:
    """The command that continues this run, or starts it again where nothing was saved yet."""
    if not (Path(options.out or "") / "checkpoints" / "manifest.json").exists():
        return "start again (nothing was saved yet)"
    ranks = f" --ranks {options.ranks}" if options.ranks else ""
    return f"{program()} --resume {shlex.quote(options.out)}{ranks}"


def program() -> str:
    """How to call this program again from here, for messages."""
    beside = os.path.relpath(sys.executable)
    return f"{'python' if beside.startswith('..') else beside} {sys.argv[0]}"


def default_directory(options: Options) -> str:
    model = options.model.replace(":", "-").replace(",", "-").replace("/", "-")
    data = Path(options.data).stem.replace(":", "-")
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{data}-{model}"


def set_threads(threads: int) -> None:
    """Limit the BLAS threads of this process; it must happen before NumPy is imported. What the user has set stays."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))


def local_ranks() -> int:
    """Ranks on this host, as the launcher tells (Open MPI, MPICH, Slurm); 1 if nothing launched this process."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    if launch.inside() and "SLURM_STEP_TASKS_PER_NODE" in os.environ:  # such as "4(x2),3"
        return int(os.environ["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0])
    return launch.size_from_environment() or 1


def fail(error: Exception) -> int:
    """Say what went wrong, once: rank 0 at once, others only if rank 0 has not ended the job by then."""
    text = f"error: {error}"
    unexpected = type(error) in (ValueError, TypeError, RuntimeError) and os.environ.get("RINGPROP_TRACEBACK")
    if not launch.inside():
        if unexpected:
            raise error
        print(text, file=sys.stderr, flush=True)
        return 1
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    if rank:
        time.sleep(2)  # an error that all ranks have is rank 0's to tell
    print(text if rank == 0 else f"rank {rank}: {text}", file=sys.stderr, flush=True)
    if unexpected:
        import traceback

        traceback.print_exception(error)
    MPI.COMM_WORLD.Abort(1)
    return 1
