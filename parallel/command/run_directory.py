"""The directory of a run: its name, what is written first, what is in it, and how to go on from it.

The first half is asked before there are ranks or threads, so NumPy is imported where the second half needs it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import shlex
import socket
import sys
import time
from pathlib import Path

from parallel.command import version
from parallel.command.options import Options
from parallel.launch import launcher
from parallel.settings import OptionError

LEFT = (  # what a run leaves to look at
    *("result.json", "metrics.jsonl", "curves.png", "breakdown.png", "staleness.png", "experts.png"),
    *("placement.png", "timeline.png", "pipeline.png"),
    *("trace.json", "recorded.goal"),
    *("inspection/", "checkpoints/", "network.npz"),
)


def continue_with(options: Options) -> str:
    """The command that continues this run, or starts it again where nothing was saved yet."""
    if not (Path(options.out or "") / "checkpoints" / "manifest.json").exists():
        return "start again (nothing was saved yet)"
    return again(options)


def again(options: Options) -> str:
    """The command that continues this run on as many ranks, started in the same way."""
    resume = f"--resume {shlex.quote(options.out)}"
    if options.ranks:
        return f"{program()} {resume} --ranks {options.ranks}"
    if size := launcher.size_from_environment():
        by_slurm = "SLURM_STEP_NUM_TASKS" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ
        kind = os.environ.get("SLURM_MPI_TYPE")  # what --mpi was; a shell's default may be another
        start = f"srun{f' --mpi={kind}' if kind else ''}" if by_slurm else "mpirun"
        if options.elastic and not by_slurm:
            start += " " + " ".join(launcher.SURVIVE)
        return f"{start} -n {size} {program('-m mpi4py ')} {resume}"
    return f"{program()} {resume}"


def program(module: str = "") -> str:
    """How to call this program again from here, for messages."""
    if (command := os.environ.get("RINGPROP_COMMAND")) and not module:
        return command
    beside = os.path.relpath(sys.executable)
    return f"{'python' if beside.startswith('..') else beside} {module}{sys.argv[0]}"


def default_directory(options: Options) -> str:
    """Make runs/DATE-DATA-MODEL, or -2, -3, ... of it where runs began in the same second; return its name."""
    model = options.model.replace(":", "-").replace(",", "-").replace("/", "-")
    data = Path(options.data).stem.replace(":", "-")
    name = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{data}-{model}"
    for directory in itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2))):
        try:
            os.makedirs(directory)
            return directory
        except FileExistsError:
            continue  # another run has it
        except OSError as error:
            raise OptionError(f"{directory} cannot be made ({error.strerror}): give another place by --out") from None


def write_headers(out: Path, options: Options, world) -> None:
    """config.json and environment.json, before anything can go wrong."""
    from nn.training.checkpoints import write_atomically

    out.mkdir(parents=True, exist_ok=True)
    remove_unfinished(out)
    config = json.dumps(dataclasses.asdict(options) | {"resume": None}, indent=1) + "\n"
    write_atomically(out / "config.json", config.encode())
    write_atomically(out / "environment.json", (json.dumps(environment(world), indent=1) + "\n").encode())


def remove_unfinished(out: Path) -> None:
    """Files of a run that ended while it wrote them."""
    from nn.training.checkpoints import remove_temporary_files

    for directory in (out, out / "checkpoints", out / "inspection"):
        remove_temporary_files(directory)


def environment(world) -> dict:
    """Versions, MPI library, host, cores and threads: what a figure depends on besides the options."""
    import numpy as np
    from threadpoolctl import threadpool_info

    found = {
        "ringprop": version.version(),
        "commit": version.commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": [
            f"{p['internal_api']} {p['version']} {p.get('architecture', '')}, {p['num_threads']} threads"
            for p in threadpool_info()
        ],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cores": launcher.cores(),
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "ranks": world.size if world else 1,
        "command": " ".join([os.environ.get("RINGPROP_COMMAND") or sys.argv[0], *map(shlex.quote, sys.argv[1:])]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if world:
        import mpi4py
        from mpi4py import MPI

        found["mpi4py"] = mpi4py.__version__
        found["mpi"] = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    return found


def files_in(out: Path) -> list[str]:
    """What a run has left to look at."""
    return [name for name in LEFT if (out / name).exists()]


def what_next(options: Options) -> str:
    """What the user may call after this run, for the last lines that it prints."""
    from nn.training.checkpoints import Checkpoints

    call = program()
    saved = bool(Checkpoints(Path(options.out) / "checkpoints").entries())
    return (
        "what next:\n"
        + f"  {again(options)} --epochs {options.epochs + 10}   # train on\n" * saved
        + f"  {call} --ranks 4 --allreduce doubling   # the default network: more ranks, another algorithm\n"
        + f"  {call} --help   # models, data sets, options; notebooks/ explain how it works"
    )
