"""The checks of `ringprop doctor` that look at facts: each rank gathers its own, and functions of all of them judge.

What is tried on the ranks is in trials.py.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from parallel.command import version
from parallel.command.findings import FAILED, OK, WARNING, Finding
from parallel.launch import launcher, processes

MIB = 1 << 20
NODE_MEMORY = 256 * MIB  # of /dev/shm, on each host
BUSY = 1.5  # programs that want a core, for each of them, in the last minute
SLOW_START = 30.0  # seconds until Python has loaded what it needs
# Facts that should not differ.
COMPARED = ("ringprop", "commit", "python", "numpy", "mpi4py", "mpi", "blas", "processor")
MUST_AGREE = ("ringprop", "commit", "mpi")
# How each launcher gives a rank cores of its own.
BINDING = {
    "Open MPI": "mpirun --map-by slot:PE={n} --bind-to core",
    "MPICH": "mpiexec -bind-to core:{n}",
    "Intel MPI": "I_MPI_PIN_DOMAIN={n} mpiexec",
    "Slurm": "srun --cpus-per-task={n} --cpu-bind=cores",
}


# --------------------------------------------------------------------------------------------------- facts of each rank


def age() -> float:
    """Return the seconds since this process was started; 0 where the system does not say."""
    try:
        ticks = int(processes.stat_fields("self")[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def facts(loaded: float) -> dict:
    """Return what this rank sees of its host, its libraries and its limits.

    Parameters
    ----------
    loaded : float
        Seconds that this process needed until all was imported.
    """
    import mpi4py
    from mpi4py import MPI
    from threadpoolctl import threadpool_info

    from collectives.choosing.selection import processor

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    try:
        memory = os.statvfs("/dev/shm")
        free = memory.f_bavail * memory.f_frsize
    except OSError:
        free = 0
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "ringprop": version.version(),
        "commit": version.commit(),
        "numpy": np.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
        "threads_of_mpi": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        "blas": ", ".join(f"{p['internal_api']} {p['version']} {p.get('architecture', '')}".strip() for p in pools),
        "processor": processor(),
        "threads": max((pool["num_threads"] for pool in pools), default=1),
        "cores": launcher.cores(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "node_memory": free,
        "load": os.getloadavg()[0],
        "loaded": loaded,
    }


def started_by() -> str:
    """Return the launcher whose ranks these are, a key of BINDING; "" for none that is known."""
    if "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        return "Slurm"
    from mpi4py import MPI

    return MPI.get_vendor()[0]


# ---------------------------------------------------------------------------------------- judged from what was gathered


def hosts_of(ranks: Sequence[dict]) -> dict[str, list[int]]:
    """Return the ranks on each host, in order of the first."""
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        found.setdefault(each["host"], []).append(rank)
    return found


def spans(ranks: Sequence[int]) -> str:
    """Return numbers of ranks in words: "0-3, 8"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def hello(ranks: Sequence[dict]) -> Finding:
    """Say which ranks are on which host."""
    hosts = hosts_of(ranks)
    where = "; ".join(f"{host}: rank{'s' * (len(its) > 1)} {spans(its)}" for host, its in hosts.items())
    return Finding(
        "hello", OK, f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}: {where}"
    )


def versions(ranks: Sequence[dict]) -> Iterator[Finding]:
    """Compare versions, libraries and processors of all ranks with those of rank 0."""
    first = ranks[0]
    differing = [name for name in COMPARED if any(each[name] != first[name] for each in ranks)]
    for name in differing:
        other = next(rank for rank, each in enumerate(ranks) if each[name] != first[name])
        there = f"{ranks[other][name]} on rank {other} ({ranks[other]['host']})"
        text = f"{name} is {first[name]} on rank 0 ({first['host']}), {there}"
        if name in MUST_AGREE:
            yield Finding("versions", FAILED, text, "give all hosts one environment, on a file system that they share")
        elif name == "processor":
            yield Finding("versions", WARNING, text, "--reproducible promises equal bits on equal processors alone")
        else:
            yield Finding("versions", WARNING, text, "give all hosts one environment, on a file system that they share")
    if not differing:
        commit = f" ({first['commit'][:12]})" if first["commit"] else ""  # an installed wheel has none
        names = f"ringprop {first['ringprop']}{commit}, Python {first['python']}"
        text = f"{names}, NumPy {first['numpy']}, mpi4py {first['mpi4py']}, {first['mpi']}"
        yield Finding("versions", OK, text)


def threads(ranks: Sequence[dict], launcher_name: str) -> Iterator[Finding]:
    """Compare the BLAS threads of each host's ranks with its cores, and with those that each rank is bound to."""
    if without := [rank for rank, each in enumerate(ranks) if not each["blas"]]:
        text = f"no BLAS library that threadpoolctl knows on ranks {spans(without)}: matrix products may be slow"
        yield Finding("threads", WARNING, text)
    fine = []
    for host, its in hosts_of(ranks).items():
        cores, wanted = cores_of([ranks[rank] for rank in its]), sum(ranks[rank]["threads"] for rank in its)
        each = max(1, cores // len(its))
        text = f"{host}: {len(its)} ranks with {wanted} BLAS threads on {cores} cores"
        if binding := wrong_binding(host, its, ranks):
            advice = BINDING.get(launcher_name, "bind each rank to {n} cores of its own").format(n=binding[1])
            yield Finding("binding", WARNING, binding[0], advice)
        elif len(its) > cores:
            advice = f"start at most {cores} ranks on {host}: ranks without a core make the others wait"
            yield Finding("threads", WARNING, text, advice)
        elif wanted > cores:
            yield Finding("threads", WARNING, text, f"export OMP_NUM_THREADS={each}, or --threads {each}")
        else:
            fine.append(text)
    if fine:
        yield Finding("threads", OK, "; ".join(fine))


def cores_of(ranks: Sequence[dict]) -> int:
    """Return how many cores the ranks of a host may use together."""
    by_binding = {tuple(each["affinity"]): each["cores"] for each in ranks}
    bound = set().union(*by_binding)
    return min(len(bound) or sum(by_binding.values()), sum(by_binding.values()))


def wrong_binding(host: str, its: Sequence[int], ranks: Sequence[dict]) -> tuple[str, int] | None:
    """Return what is wrong with the binding of a host's ranks, and the cores that each needs; None where it is right.

    Wrong are more BLAS threads than cores, and one core for two ranks.
    """
    by_core: dict[int, int] = {}
    for rank in its:
        own, count = ranks[rank]["affinity"], ranks[rank]["threads"]
        if own and len(own) < count:
            cores = f"{len(own)} core{'s' * (len(own) > 1)}"
            return f"{host}: rank {rank} is bound to {cores}, and has {count} BLAS threads", count
        if len(own) == 1:
            if own[0] in by_core:
                return f"{host}: ranks {by_core[own[0]]} and {rank} are bound to the same core {own[0]}", count
            by_core[own[0]] = rank
    return None


def node_memory(ranks: Sequence[dict]) -> Finding:
    """Judge the memory that ranks of a host can share."""
    several = {host: its for host, its in hosts_of(ranks).items() if len(its) > 1}
    if not several:
        return Finding("/dev/shm", OK, "no two ranks share a host: sums go by messages")
    free = {host: min(ranks[rank]["node_memory"] for rank in its) for host, its in several.items()}
    host = min(free, key=free.get)
    text = f"{free[host] / MIB:,.0f} MiB are free in /dev/shm on {host}" + ", the least of all hosts" * (len(free) > 1)
    if free[host] < NODE_MEMORY:
        advice = (
            "ranks of a host sum gradients there: give a container --shm-size=2g, a host a larger tmpfs, or take "
            "--node-memory off"
        )
        return Finding("/dev/shm", WARNING, text, advice)
    return Finding("/dev/shm", OK, text)


def load(ranks: Sequence[dict]) -> Finding:
    """Judge whether other programs use the cores: then times say little."""
    busy = []
    for host, its in hosts_of(ranks).items():
        cores, found = cores_of([ranks[rank] for rank in its]), max(ranks[rank]["load"] for rank in its)
        if found > BUSY * cores:
            busy.append(f"{host} had a load of {found:.1f} on {cores} cores")
    if busy:
        advice = "other programs use the cores, so times say little: repeat this on hosts of your own"
        return Finding("load", WARNING, "; ".join(busy), advice)
    return Finding("load", OK, "the cores were free")


def start(ranks: Sequence[dict]) -> Finding:
    """Judge how long Python took to start and import on the slowest rank."""
    seconds = [each["loaded"] for each in ranks]
    slowest = max(range(len(ranks)), key=seconds.__getitem__)
    text = f"Python and its packages were loaded after {median(seconds):.1f} s (median), "
    text += f"{seconds[slowest]:.1f} s on rank {slowest}"
    if seconds[slowest] > SLOW_START:
        advice = (
            "many ranks read one file system at once: put the environment into a container image, or copy it to each "
            "node first"
        )
        return Finding("start", WARNING, text, advice)
    return Finding("start", OK, text)


def threads_of_mpi(ranks: Sequence[dict]) -> Finding:
    """Judge whether MPI lets threads call it."""
    if all(each["threads_of_mpi"] for each in ranks):
        return Finding("MPI", OK, f"{ranks[0]['mpi']} lets all threads call it")
    advice = "--overlap thread and reports of ranks that hang need an MPI library with MPI_THREAD_MULTIPLE"
    return Finding("MPI", WARNING, f"{ranks[0]['mpi']} lets one thread call it", advice)
